"""Output files named by an operator: opened as by a shell, without losing existing content."""

from __future__ import annotations

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from pd_cluster import output_files
from pd_cluster.errors import ConfigError
from pd_cluster.offline.batch_job import opened_target
from pd_cluster.output_files import open_output, write_output
from tests.support.full_disks import full_disk

WRITES = """
import sys
from pd_cluster.output_files import write_output
print("before", flush=True)
write_output("/dev/stdout", "--json", b"output\\n")
print("after", flush=True)
"""


def test_a_new_file_has_the_umask_and_another_keeps_its_access(tmp_path: Path) -> None:
    file = tmp_path / "out"
    write_output(str(file), "--json", b"one")
    assert file.stat().st_mode & 0o777 == 0o666 & ~_umask()
    file.chmod(0o640)
    write_output(str(file), "--json", b"two")
    assert (file.read_bytes(), file.stat().st_mode & 0o777) == (b"two", 0o640)


def _umask() -> int:
    os.umask(found := os.umask(0))
    return found


def test_a_link_is_followed_and_stays(tmp_path: Path) -> None:
    (tmp_path / "link").symlink_to("target")
    for content in (b"new", b"again"):
        write_output(str(tmp_path / "link"), "--json", content)
        assert (tmp_path / "link").is_symlink()
        assert (tmp_path / "target").read_bytes() == content


@pytest.mark.parametrize("is_there", [True, False])
def test_a_full_disk_loses_nothing(tmp_path: Path, is_there: bool) -> None:
    file = tmp_path / "out"
    if is_there:
        file.write_bytes(b"of an earlier run")
    with full_disk(100), pytest.raises(ConfigError, match=r"^--json .*out: cannot be written: [^\n]+$"):
        write_output(str(file), "--json", bytes(1000))
    assert {each.name: each.read_bytes() for each in tmp_path.iterdir()} == (
        {"out": b"of an earlier run"} if is_there else {}
    )
    with pytest.raises(ConfigError, match="--json /dev/full: cannot be written: No space left on device"):
        write_output("/dev/full", "--json", b"x")


def test_a_pipe_is_written_to_as_soon_as_it_is_read(tmp_path: Path) -> None:
    pipe = tmp_path / "pipe"
    os.mkfifo(pipe)
    writer = threading.Thread(target=write_output, args=(str(pipe), "--json", bytes(1 << 20)))
    writer.start()
    assert pipe.read_bytes() == bytes(1 << 20)
    writer.join()
    assert pipe.is_fifo()


def test_a_pipe_that_nobody_reads_is_not_waited_for_without_end(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    os.mkfifo(tmp_path / "pipe")
    monkeypatch.setattr(output_files, "READER_WAIT_S", 0.2)
    name = str(tmp_path / "pipe")
    for flag, write in (
        ("--json", lambda: write_output(name, "--json", b"x")),
        ("-o", lambda: opened_target(name).__enter__()),
        ("FD_LOG_DIR", lambda: open_output(name, "FD_LOG_DIR", wait_s=0)),
    ):
        with pytest.raises(ConfigError, match=f"{flag} {name}: nobody reads this pipe"):
            write()


def test_standard_outputs_file_is_not_replaced(tmp_path: Path) -> None:
    file = tmp_path / "out"
    for mode in ("wb", "ab"):
        with file.open(mode) as out:
            subprocess.run([sys.executable, "-c", WRITES], stdout=out, check=True, timeout=60)
    assert file.read_text() == "before\noutput\nafter\n" * 2
    piped = subprocess.run([sys.executable, "-c", WRITES], capture_output=True, check=True, timeout=60)
    assert piped.stdout == b"before\noutput\nafter\n"
