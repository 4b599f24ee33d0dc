"""Orders the copies at one end of a link: they run on a separate stream of the device, alongside computation.

On CPU a copy has ended when its call returns, so nothing here has an effect. Knows nothing of the copied data.
docs/protocol/handover.md, "Blocks on devices", lists which wait protects which block.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from pd_cluster.devices.device import Device
from pd_cluster.devices.device_streams import REACHED, CopyStream, Marker
from pd_cluster.errors import LinkError, first_line

log = logging.getLogger(__name__)

SETTLE_S = 30.0


class Copies:
    """The copies of one link. Only the link's own thread uses this."""

    def __init__(self, device: Device, settle_s: float = SETTLE_S) -> None:
        self._stream = CopyStream(device)
        self._settle_s = settle_s
        self._last: Marker = REACHED

    def after(self, marker: Marker) -> None:
        """Delays later launches until the marker is reached, without blocking the host."""
        self._stream.after(marker)

    @contextlib.contextmanager
    def launch(self) -> Iterator[None]:
        """A context whose launches are copies. They run in order, and may still run when the context ends."""
        with self._stream:
            try:
                yield
            finally:  # also after an error, because earlier launches are under way
                self._last = self._stream.mark()

    @contextlib.contextmanager
    def as_current(self) -> Iterator[None]:
        """A context in which this stream is the current one, so waits for the current stream exclude computation."""
        with self._stream:
            yield

    def settle(self) -> None:
        """Waits until all launched copies have ended. Raises LinkError."""
        try:
            if self._last.wait(self._settle_s):
                return
        except RuntimeError as error:
            raise LinkError(f"copying KV cache on the device failed: {first_line(error)}", retry=True) from error
        raise LinkError(f"the device has not copied KV cache within {self._settle_s:g} s", retry=True)

    def drain(self) -> None:
        """Waits like `settle`, but without a limit, because other requests get the blocks afterwards."""
        try:
            self._last.wait()
        except RuntimeError as error:  # the device is unusable and writes no more
            log.error("copying KV cache on the device failed: %s", first_line(error))
