"""Files of a folder arrive whole over a real channel, or are refused; no end waits for one that is gone."""

from __future__ import annotations

import contextlib
import os
import secrets
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from pd_cluster.errors import ModelError
from pd_cluster.net import folder_transfer
from pd_cluster.net.folder_transfer import (
    FolderFiles,
    ReceiverAddress,
    receive_folder,
    send_in_background,
)
from pd_cluster.net.payload_channel import PayloadError, PayloadReceiver, PayloadSender
from pd_cluster.net.zmq_sockets import KeyPair

HOST, WAIT_S = "127.0.0.1", 20.0
MOST_NBYTES = 64 << 20
Send = Callable[[PayloadSender, ReceiverAddress], None]


@pytest.fixture(autouse=True)
def _impatient(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(folder_transfer, "SILENCE_S", 2.0)


def received(folder: Path, send: Send, most_nbytes: int = MOST_NBYTES) -> int:
    """Receives what `send` sends; returns its number of bytes."""
    keys = KeyPair.of(b"")
    receiver = PayloadReceiver(HOST, keys.public)
    try:
        send(PayloadSender(keys), ReceiverAddress(HOST, receiver.port, receiver.public_key))
        return receive_folder(receiver, folder, most_nbytes)
    finally:
        receiver.close()


def in_background(find: Callable[[], FolderFiles], threads: list[threading.Thread]) -> Send:
    return lambda sender, to: threads.append(send_in_background(sender, to, find))


def test_files_arrive_whole(tmp_path: Path) -> None:
    """Covers empty and small files, and files of one and of several pieces."""
    (tmp_path / "from").mkdir()
    (tmp_path / "to").mkdir()
    sizes = {"empty.json": 0, "config.json": 5, "one.safetensors": 4 << 20, "model-2.safetensors": (9 << 20) + 1}
    for name, size in sizes.items():
        (tmp_path / "from" / name).write_bytes(secrets.token_bytes(size))
    threads: list[threading.Thread] = []
    found = FolderFiles(tmp_path / "from", list(sizes))
    assert received(tmp_path / "to", in_background(lambda: found, threads)) == sum(sizes.values())
    for name in sizes:
        assert (tmp_path / "to" / name).read_bytes() == (tmp_path / "from" / name).read_bytes()
        assert (tmp_path / "to" / name).stat().st_mode & 0o777 == 0o600
    threads[0].join(WAIT_S)
    assert not threads[0].is_alive()


def test_a_sender_says_why_it_has_none(tmp_path: Path) -> None:
    def find() -> FolderFiles:
        raise ModelError("the folder is gone")

    with pytest.raises(PayloadError, match="the folder is gone"):
        received(tmp_path, in_background(find, []))
    with pytest.raises(PayloadError, match="No such file"):
        received(tmp_path, in_background(lambda: FolderFiles(tmp_path, ["none.safetensors"]), []))


def listed(text: bytes) -> Send:
    """Sends only a list of files."""

    def send(sender: PayloadSender, to: ReceiverAddress) -> None:
        def run() -> None:
            with contextlib.suppress(PayloadError):  # the receiver goes away
                sender.connect(*to, WAIT_S)
                sender.send(memoryview(text.ljust(folder_transfer.LIST_NBYTES)), 0).wait(WAIT_S)
                while True:
                    sender.check()
                    time.sleep(0.02)
            sender.close()

        threading.Thread(target=run, daemon=True).start()

    return send


@pytest.mark.parametrize(
    ("text", "why"),
    [
        (b'{"files": [["../escape.safetensors", 1]]}', "the list of files is invalid"),
        (b'{"files": [["/etc/passwd", 1]]}', "the list of files is invalid"),
        (b'{"files": [[".hidden", 1]]}', "the list of files is invalid"),
        (b'{"files": [["a.json", -1]]}', "the list of files is invalid"),
        (b'{"files": [' + b",".join([b'["a",0]'] * 4097) + b"]}", "the list of files is invalid"),
        (b"rubbish", "the list of files is invalid"),
        (b'{"files": [["a.safetensors", 67108865]]}', "more than the 67108864"),
        (b'{"files": [["a.json", 10]]}', "nothing arrived within"),
    ],
)
def test_lists_that_are_refused(tmp_path: Path, text: bytes, why: str) -> None:
    with pytest.raises(PayloadError, match=why):
        received(tmp_path, listed(text))


def test_a_file_is_not_overwritten(tmp_path: Path) -> None:
    with pytest.raises(FileExistsError):
        received(tmp_path, listed(b'{"files": [["a.json", 0], ["a.json", 0]]}'))


SLOW = """
import sys, time
from pathlib import Path
from pd_cluster.net import folder_transfer
from pd_cluster.net.payload_channel import PayloadSender
from pd_cluster.net.zmq_sockets import KeyPair
folder_transfer.NBYTES_PER_S = 8 << 20
private, port, key, folder, name = sys.argv[1:]
sender = PayloadSender(KeyPair.of(bytes.fromhex(private)))
to = folder_transfer.ReceiverAddress("127.0.0.1", int(port), bytes.fromhex(key))
folder_transfer.send_in_background(sender, to, lambda: folder_transfer.FolderFiles(Path(folder), [name])).join()
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGSTOP])
def test_a_sender_that_dies_or_stands_still_is_noticed(tmp_path: Path, number: signal.Signals) -> None:
    (tmp_path / "from").mkdir()
    (tmp_path / "to").mkdir()
    (tmp_path / "from" / "large.safetensors").write_bytes(bytes(40 << 20))
    processes: list[subprocess.Popen[bytes]] = []

    def send(sender: PayloadSender, to: ReceiverAddress) -> None:
        private = sender._keys.private.hex()  # of a process of its own here
        command = [sys.executable, "-c", SLOW, private, str(to.port), to.public_key.hex()]
        processes.append(subprocess.Popen([*command, str(tmp_path / "from"), "large.safetensors"]))
        threading.Thread(target=end, daemon=True).start()

    def end() -> None:
        file = tmp_path / "to" / "large.safetensors"
        while not (file.exists() and file.stat().st_size):
            threading.Event().wait(0.02)
        os.kill(processes[0].pid, number)

    try:
        with pytest.raises(PayloadError, match="nothing arrived within 2 s"):
            received(tmp_path / "to", send)
        assert 0 < (tmp_path / "to" / "large.safetensors").stat().st_size < 40 << 20
    finally:
        for process in processes:
            process.kill()
            process.wait()


def test_a_receiver_that_goes_away_ends_the_sender(tmp_path: Path) -> None:
    (tmp_path / "large.safetensors").write_bytes(bytes(40 << 20))
    keys = KeyPair.of(b"")
    receiver = PayloadReceiver(HOST, keys.public)
    to = ReceiverAddress(HOST, receiver.port, receiver.public_key)
    found = FolderFiles(tmp_path, ["large.safetensors"])
    thread = send_in_background(PayloadSender(keys), to, lambda: found)
    receiver.accept(WAIT_S)
    receiver.receive(folder_transfer.LIST_NBYTES, 0, WAIT_S)
    receiver.close()
    thread.join(WAIT_S)
    assert not thread.is_alive()
