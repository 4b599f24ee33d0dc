"""Sends some files of a folder over a payload channel, and receives them into another folder.

Both ends limit the form and number of names, the total of bytes, and the time. Knows nothing of the files' meaning.
docs/protocol/weights.md, "Copies", has the table.
"""

from __future__ import annotations

import contextlib
import logging
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Annotated, NamedTuple

import msgspec

from pd_cluster.errors import PdClusterError
from pd_cluster.net.payload_channel import POLL_S, PayloadError, PayloadReceiver, PayloadSender, PayloadUnderWay
from pd_cluster.private_files import CREATE, open_own, write_all
from pd_cluster.wire import MOST_TEXT

log = logging.getLogger(__name__)

PIECE_NBYTES = 4 << 20
LIST_NBYTES = 2 << 20  # of the first payload, which is padded, because a receiver must know each payload's size
MOST_FILES = 4096
SILENCE_S = 10.0  # the longest wait for the other end
NBYTES_PER_S = 512 << 20  # the maximum rate, so that the sender keeps serving
LEAST_S, LEAST_NBYTES_PER_S = 60.0, 16 << 20  # a transfer takes at most LEAST_S plus the time of its bytes at this rate


class SentFile(msgspec.Struct, frozen=True, array_like=True):
    name: Annotated[str, msgspec.Meta(pattern=r"^[A-Za-z0-9][A-Za-z0-9._-]{0,254}$")]
    nbytes: Annotated[int, msgspec.Meta(ge=0, le=1 << 50)]


class SentFileList(msgspec.Struct, frozen=True):
    """The first payload. `problem`: why the sender has no files; "" if it sends them all."""

    files: Annotated[list[SentFile], msgspec.Meta(max_length=MOST_FILES)] = []
    problem: Annotated[str, msgspec.Meta(max_length=MOST_TEXT)] = ""


class ReceiverAddress(NamedTuple):
    host: str
    port: int
    public_key: bytes


class FolderFiles(NamedTuple):
    folder: Path
    names: Sequence[str]


def send_in_background(
    sender: PayloadSender,
    to: ReceiverAddress,
    find: Callable[[], FolderFiles],
    after: threading.Thread | None = None,
) -> threading.Thread:
    """Sends files on a separate thread. `find` returns them, or raises PdClusterError, whose text the receiver gets.

    `after`: an earlier transfer, which may not have noticed yet that its receiver is done.
    """
    thread = threading.Thread(target=_send, args=(sender, to, find, after), name="send folder", daemon=True)
    thread.start()
    return thread


def _send(
    sender: PayloadSender, to: ReceiverAddress, find: Callable[[], FolderFiles], after: threading.Thread | None
) -> None:
    started_s = time.monotonic()
    try:
        if after is not None:
            after.join(SILENCE_S)
            if after.is_alive():
                raise PayloadError("another transfer is under way")
        sender.connect(*to, SILENCE_S)
        nbytes = _send_files(sender, find)
        _await_end(sender)
        log.info("sent %d MiB to %s:%d in %.1f s", nbytes >> 20, to.host, to.port, time.monotonic() - started_s)
    except (PayloadError, OSError) as error:
        log.warning("files for %s:%d were not sent: %s", to.host, to.port, error)
    finally:
        sender.close()


def _send_files(sender: PayloadSender, find: Callable[[], FolderFiles]) -> int:
    """Sends the list and the files; returns their bytes. Raises PayloadError, OSError."""
    try:
        folder, names = find()
        listed = SentFileList([SentFile(name, os.stat(folder / name).st_size) for name in names])
    except (PdClusterError, OSError) as error:
        sender.send(_padded(SentFileList(problem=str(error)[:MOST_TEXT])), 0).wait(SILENCE_S)
        return 0
    waiting: list[PayloadUnderWay] = [sender.send(_padded(listed), 0)]
    sent_nbytes, started_s = 0, time.monotonic()
    for tag, piece in enumerate(_pieces(folder, listed.files), 1):
        waiting.append(sender.send(memoryview(piece), tag))
        waiting.pop(0).wait(SILENCE_S)
        sent_nbytes += len(piece)
        time.sleep(max(0.0, started_s + sent_nbytes / NBYTES_PER_S - time.monotonic()))
    waiting.pop().wait(SILENCE_S)
    return sent_nbytes


def _await_end(sender: PayloadSender) -> None:
    """Waits until the receiver has closed the connection: closing it here could lose its last bytes."""
    until_s = time.monotonic() + SILENCE_S
    with contextlib.suppress(PayloadError):
        while time.monotonic() < until_s:
            sender.check()
            time.sleep(POLL_S)


def _padded(listed: SentFileList) -> memoryview:
    """Raises PayloadError for a list that is too long."""
    data = msgspec.json.encode(listed)
    if len(data) > LIST_NBYTES or len(listed.files) > MOST_FILES:
        raise PayloadError(f"{len(listed.files)} files are too many")
    return memoryview(data.ljust(LIST_NBYTES))


def _pieces(folder: Path, files: Sequence[SentFile]) -> Iterator[bytes]:
    """Yields the files' bytes, each file in pieces. Raises PayloadError for a file that has become shorter."""
    for each in files:
        left = each.nbytes
        with (folder / each.name).open("rb") as stream:
            while left:
                piece = stream.read(min(left, PIECE_NBYTES))
                if not piece:
                    raise PayloadError(f"{folder / each.name} has changed")
                left -= len(piece)
                yield piece


def receive_folder(receiver: PayloadReceiver, folder: Path, most_nbytes: int) -> int:
    """Receives files into a folder of this user; returns their bytes. Raises PayloadError, OSError."""
    receiver.accept(SILENCE_S)
    try:
        listed = msgspec.json.decode(bytes(receiver.receive(LIST_NBYTES, 0, SILENCE_S)), type=SentFileList)
    except msgspec.DecodeError as error:
        raise PayloadError(f"the list of files is invalid: {error}") from error
    if listed.problem:
        raise PayloadError(listed.problem)
    nbytes = sum(each.nbytes for each in listed.files)
    if nbytes > most_nbytes:
        raise PayloadError(f"{nbytes} bytes are more than the {most_nbytes} that this model can have")
    until_s, tag = time.monotonic() + LEAST_S + nbytes / LEAST_NBYTES_PER_S, 0
    for each in listed.files:
        file = open_own(folder / each.name, CREATE)
        try:
            for at in range(0, each.nbytes, PIECE_NBYTES):
                tag += 1
                if time.monotonic() > until_s:
                    raise PayloadError("the transfer takes too long")
                write_all(file, receiver.receive(min(PIECE_NBYTES, each.nbytes - at), tag, SILENCE_S))
        finally:
            os.close(file)
    return nbytes
