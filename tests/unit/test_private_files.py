"""Private folders: links are not followed, pipes do not block, and a full disk loses nothing."""

from __future__ import annotations

import logging
import os
import subprocess
from pathlib import Path

import pytest

from pd_cluster.api.admin.log_routes import read_lines
from pd_cluster.errors import ConfigError, RequestNotFound
from pd_cluster.native import build
from pd_cluster.private_files import APPEND, CREATE, READ, check_folder, open_folder, open_own, write_whole
from pd_cluster.settings.log_files import MAX_FILE_NBYTES, LogFile, file_of
from tests.support.full_disks import full_disk


def test_a_folder_is_made_for_this_user_alone(tmp_path: Path) -> None:
    os.close(open_folder(tmp_path / "a", "b/c", "--kept"))
    assert [(tmp_path / name).stat().st_mode & 0o777 for name in ("a", "a/b", "a/b/c")] == [0o700] * 3
    check_folder(tmp_path / "a", "--kept", ("missing",))
    (tmp_path / "a").chmod(0o755)
    with pytest.raises(ConfigError, match="with mode 0700"):
        check_folder(tmp_path / "a", "--kept")


@pytest.mark.parametrize("part", ["a", "a/b"])
def test_a_link_in_a_folders_place_is_refused(tmp_path: Path, part: str) -> None:
    (tmp_path / "elsewhere").mkdir(mode=0o700)
    (tmp_path / part).parent.mkdir(mode=0o700, exist_ok=True)
    (tmp_path / part).symlink_to(tmp_path / "elsewhere")
    with pytest.raises(ConfigError, match=f"--kept .*/?{part.rpartition('/')[2]}: must be a folder"):
        open_folder(tmp_path / "a", "b", "--kept")
    assert not list((tmp_path / "elsewhere").iterdir())


def spoiled(file: Path, what: str) -> Path:
    """Replaces a file by a link to `outside`, a pipe or a folder."""
    (file.parent / "outside").write_text("theirs\n")
    if what == "link":
        file.symlink_to(file.parent / "outside")
    elif what == "pipe":
        os.mkfifo(file)
    else:
        file.mkdir()
    return file


@pytest.mark.parametrize("what", ["link", "pipe", "folder"])
def test_only_plain_files_are_opened(tmp_path: Path, what: str) -> None:
    file = spoiled(tmp_path / "file", what)
    for flags in (READ, APPEND, CREATE):
        with pytest.raises(OSError, match=str(file)):
            open_own(file, flags)
    assert (tmp_path / "outside").read_text() == "theirs\n"


def test_a_whole_file_replaces_a_link_and_not_its_target(tmp_path: Path) -> None:
    (tmp_path / "outside").write_text("theirs")
    for name in ("file", "file.tmp"):
        (tmp_path / name).symlink_to(tmp_path / "outside")
    folder = os.open(tmp_path, os.O_RDONLY)
    write_whole(folder, "file", b"ours")
    assert (tmp_path / "file").read_bytes() == b"ours"
    with full_disk(100), pytest.raises(OSError, match="File too large"):
        write_whole(folder, "file", bytes(1000))
    os.close(folder)
    assert {each.name: each.read_bytes() for each in tmp_path.iterdir()} == {"file": b"ours", "outside": b"theirs"}


@pytest.mark.parametrize("what", ["link", "pipe"])
def test_lines_go_into_files_alone(tmp_path: Path, what: str, caplog: pytest.LogCaptureFixture) -> None:
    file = spoiled(file_of(tmp_path, "decode-0"), what)
    kept = LogFile(tmp_path, "decode-0")
    with caplog.at_level(logging.WARNING):
        kept.write("one")
        kept.write("two")
    kept.close()
    assert [record.message.partition(": ")[0] for record in caplog.records] == [str(file)]
    with pytest.raises(RequestNotFound):
        read_lines(file, "decode-0", 10, -1)
    assert (tmp_path / "outside").read_text() == "theirs\n"


def test_a_full_disk_is_told_once_and_later_lines_are_kept(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    kept = LogFile(tmp_path, "decode-0")
    kept.write("one")
    with full_disk(4), caplog.at_level(logging.WARNING):
        kept.write("two")
        kept.write("three")
    kept.write("four")
    kept.close()
    assert len(caplog.records) == 1
    assert read_lines(file_of(tmp_path, "decode-0"), "decode-0", 10, -1)["lines"] == ["one", "four"]


def test_lines_never_go_into_another_file_that_has_the_descriptor(tmp_path: Path) -> None:
    kept = LogFile(tmp_path, "decode-0")
    kept.write("x" * (MAX_FILE_NBYTES - 10))
    older = file_of(tmp_path, "decode-0").with_suffix(".log.1")
    older.mkdir()  # so that the file cannot be renamed away
    kept.write("y" * 100)
    with (tmp_path / "other").open("wb"):  # takes the lowest free descriptor
        kept.write("z" * 100)
    kept.close()
    assert not (tmp_path / "other").read_bytes()


def test_compiled_kernels_are_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    compiler = tmp_path / "cc"
    compiler.write_text('#!/bin/sh\nwhile [ $# -gt 0 ]; do [ "$1" != -o ] || echo made > "$2"; shift; done\n')
    compiler.chmod(0o755)
    monkeypatch.setenv("CC", str(compiler))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    made = build.build(("-O0",))
    for spoil in (os.mkfifo, lambda path: path.symlink_to("/dev/zero")):
        made.unlink()
        spoil(made)
        assert build.build(("-O0",)) == made
        assert made.is_file()
        assert not made.is_symlink()
        assert subprocess.check_output(["cat", made], timeout=10) == b"made\n"
