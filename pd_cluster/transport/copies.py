"""What one end of a link copies on its device, beside what is computed there: a stream of its own, in order.

On CPU a copy is over when its call returns, and everything here is empty. Knows nothing of what is copied. Which wait
guards which block is told in docs/protocol.md, "Pools on devices".
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Iterator

from pd_cluster.device import Device
from pd_cluster.errors import LinkError, first_line
from pd_cluster.streams import REACHED, Marker, SideStream

log = logging.getLogger(__name__)

SETTLE_S = 30.0


class Copies:
    """Used by the link's own thread only."""

    def __init__(self, device: Device, settle_s: float = SETTLE_S) -> None:
        self._stream = SideStream(device)
        self._settle_s = settle_s
        self._last: Marker = REACHED

    def after(self, marker: Marker) -> None:
        """What is launched from now on begins when that is reached. Nobody waits here."""
        self._stream.after(marker)

    @contextlib.contextmanager
    def launch(self) -> Iterator[None]:
        """What is launched inside is copied in this order, and may not be over when this ends."""
        with self._stream:
            try:
                yield
            finally:  # what went before an error is under way, too
                self._last = self._stream.mark()

    @contextlib.contextmanager
    def beside(self) -> Iterator[None]:
        """What waits for the current stream inside waits for this one, not for what is computed."""
        with self._stream:
            yield

    def settle(self) -> None:
        """Waits until all that was launched is over. Raises LinkError."""
        try:
            if self._last.wait(self._settle_s):
                return
        except RuntimeError as error:
            raise LinkError(f"copying KV cache on the device failed: {first_line(error)}", retry=True) from error
        raise LinkError(f"the device has not copied KV cache within {self._settle_s:g} s", retry=True)

    def drain(self) -> None:
        """The same, however long it takes: whoever waits for this gives the blocks to somebody else."""
        try:
            self._last.wait()
        except RuntimeError as error:  # the device is beyond use: nothing is written any more
            log.error("copying KV cache on the device failed: %s", first_line(error))
