"""Gets the files of a version from another process, and sends them to another instance.

docs/protocol/weights.md, "Copies", has the state × event table. Holds no legs. Knows nothing of tensors: other modules
compare the files with the model's and load them.
"""

from __future__ import annotations

import logging
import queue
import shutil
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

from pd_cluster import wire
from pd_cluster.checkpoints.replaced_weights import version_files
from pd_cluster.checkpoints.weight_files import weights_nbytes
from pd_cluster.engine.lifecycle.weight_copies import WeightCopies
from pd_cluster.engine.stages.stage import Stage
from pd_cluster.errors import ModelError, PdClusterError
from pd_cluster.net.folder_transfer import (
    SILENCE_S,
    FolderFiles,
    ReceiverAddress,
    receive_folder,
    send_in_background,
)
from pd_cluster.net.payload_channel import PayloadError, PayloadReceiver, PayloadSender

log = logging.getLogger(__name__)

MOST_MORE_NBYTES = 64 << 20  # the most bytes of a version's files besides tensors; these are as large as the model's
MOST_FAILED = 1024
BUSY_S = 0.5  # between requests for a source while all send to others
MOST_BUSY_S = 3600.0  # the longest search for a source
Check = Callable[[Path], None]  # raises PdClusterError if a folder does not have the version


@dataclass(frozen=True, slots=True)
class TransferEnds:
    """`send`: sends to a connection. `sender`: makes a channel's sending end. `host`: where this instance listens."""

    send: Callable[[str, wire.Body], None]
    sender: Callable[[], PayloadSender]
    host: str


class WeightTransfers(Stage):
    """`base`: the folder of the model. `fetch` runs on its caller's thread."""

    def __init__(self, base: Path, ends: TransferEnds, copies: WeightCopies) -> None:
        self._base, self._ends, self.copies = base, ends, copies
        self._schedulers: tuple[str, ...] = ()  # their connections; replaced, never changed
        self._answers: queue.SimpleQueue[tuple[str, wire.TakeWeights]] = queue.SimpleQueue()
        self._fetching = threading.Lock()
        self.sending: threading.Thread | None = None

    # ---- the engine's thread

    def opened(self, conn: str, is_scheduler: bool) -> None:
        if is_scheduler:
            self._schedulers = *self._schedulers, conn

    def closed(self, conn: str, reason: str, was_scheduler: bool) -> None:
        self._schedulers = tuple(each for each in self._schedulers if each != conn)

    def close(self) -> None:
        self.copies.close()

    # ---- the mailbox's thread

    def at_once(self, conn: str, body: wire.Body) -> None:
        match body:
            case wire.TakeWeights():
                self._answers.put((conn, body))
            case wire.SendWeights():
                self._send(body)

    def _send(self, order: wire.SendWeights) -> None:
        version = order.version

        def find() -> FolderFiles:
            folder = self.copies.of(version.digest) or Path(version.path)
            return FolderFiles(folder, version_files(folder))

        to = ReceiverAddress(order.host, order.port, order.public_key)
        self.sending = send_in_background(self._ends.sender(), to, find, after=self.sending)

    # ---- other threads

    def fetch(self, version: wire.WeightVersion, check: Check) -> None:
        """Gets a copy of a version from another process. Raises ModelError if no process has it or it does not fit."""
        with self._fetching:
            if self.copies.of(version.digest) is not None:
                return
            try:
                source = self._search(version, check)
            finally:  # all schedulers, because any may have named a source, perhaps after the search ended
                for conn in self._schedulers:
                    self._ends.send(conn, wire.SeekWeights(version.epoch, is_over=True))
            log.info("got weights %s from %s", version.name, source)

    def _search(self, version: wire.WeightVersion, check: Check) -> str:
        """Asks for sources until one delivers; returns its name. Raises ModelError."""
        failed, last, until_s = list[str](), "", time.monotonic() + MOST_BUSY_S
        while True:
            conn, found = self._ask(version, failed)
            if found.problem:
                raise ModelError(found.problem + last)
            if not found.source:
                if time.monotonic() > until_s:
                    raise ModelError(f"all sources have been sending to other instances for {MOST_BUSY_S:.0f} s")
                time.sleep(BUSY_S)
                continue
            try:
                self._receive(version, conn, found, check)
            except (PdClusterError, PayloadError, OSError) as error:
                log.warning("%s did not deliver weights %s: %s", found.source, version.name, error)
                failed.append(found.source)
                last = f" (last: {found.source}: {error})"
            else:
                return found.source

    def _ask(self, version: wire.WeightVersion, failed: list[str]) -> tuple[str, wire.TakeWeights]:
        """Returns a source, and the connection of the scheduler that names it. Raises ModelError if none answers.

        API processes are schedulers, too, and do not answer.
        """
        while not self._answers.empty():
            self._answers.get_nowait()
        for conn in self._schedulers:
            self._ends.send(conn, wire.SeekWeights(version.epoch, failed[-MOST_FAILED:]))
        while True:
            try:
                conn, found = self._answers.get(timeout=SILENCE_S)
            except queue.Empty:
                raise ModelError("the scheduler names no source") from None
            if found.epoch == version.epoch:
                return conn, found

    def _receive(self, version: wire.WeightVersion, conn: str, found: wire.TakeWeights, check: Check) -> None:
        """Receives a version from a source. Raises PayloadError, OSError, and ModelError if it does not fit."""
        receiver = PayloadReceiver(self._ends.host, found.public_key)
        try:
            folder = self.copies.begin()
            try:
                address = wire.WeightAddress(version.epoch, found.source, receiver.port, receiver.public_key)
                self._ends.send(conn, address)
                receive_folder(receiver, folder, weights_nbytes(self._base) + MOST_MORE_NBYTES)
                check(folder)
            except BaseException:
                shutil.rmtree(folder, ignore_errors=True)
                raise
            self.copies.keep(version.digest, folder)
        finally:
            receiver.close()
