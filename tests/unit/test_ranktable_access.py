"""File permissions of written tables, and errors of processes that may not read them."""

import grp
import os
import stat
import tempfile
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from pd_cluster.cluster.members.cluster_credentials import find_admin_token
from pd_cluster.cluster.members.rank_table_place import find_place
from ranktable_tools import check, cli, load_global, merge, permission_warnings
from tests.support.another_user import OTHER_ID, as_another_user

GEN = ["--prefill-server-list", "0", "--decode-server-list", "1", "--api-server", "--device", "cpu"]
HERE = ["--server-ip", "10.0.0.1"]


def modes(folder: Path) -> set[int]:
    return {stat.S_IMODE(path.stat().st_mode) for path in folder.glob("*.json")}


def written(folder: Path, *options: str, expected: int = 0) -> Path:
    assert cli.main(["gen", *GEN, *HERE, "--save-dir", str(folder), *options]) == expected
    return folder / "global_ranktable_10.0.0.1.json"


def test_both_command_lines_and_merge_write_with_the_mode(tmp_path: Path) -> None:
    own = str(os.getgid())
    old = os.umask(0o077)
    try:
        for at, (options, mode) in enumerate(
            [
                ([], 0o600),
                (["--file-mode=640"], 0o640),
                (["--file-mode", "0o644"], 0o644),
                (["--group", own], 0o640),
                (["--group", own, "--file-mode", "0600"], 0o600),
            ]
        ):
            folders = [tmp_path / f"{name}{at}" for name in "abcd"]
            table = written(folders[0], *options)
            assert cli.reference_main(["--mode", "gen", *GEN, *HERE, "--save-dir", str(folders[1]), *options]) == 0
            listed = ["--global-ranktable-list", str(table), *options, "--save-dir"]
            assert cli.main(["merge", *listed, str(folders[2])]) == 0
            assert cli.reference_main(["--mode", "merge", *listed, str(folders[3])]) == 0
            assert [modes(folder) for folder in folders] == [{mode}] * 4
    finally:
        os.umask(old)


def test_a_group_by_its_name(tmp_path: Path) -> None:
    own = grp.getgrgid(os.getgid())
    table = written(tmp_path, "--group", own.gr_name)
    assert table.stat().st_gid == own.gr_gid


@pytest.mark.skipif(os.getuid() != 0, reason="only root may give a file to any group")
def test_a_group_that_this_machine_does_not_know(tmp_path: Path) -> None:
    table = written(tmp_path, "--group", "54321")
    assert (table.stat().st_gid, modes(tmp_path)) == (54321, {0o640})


def test_a_mode_for_everybody_says_what_that_means(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    table = written(tmp_path, "--file-mode", "0644")
    err = capsys.readouterr().err
    assert err.startswith("note: --file-mode 0644: all users of this machine can read the tables")
    assert "cluster.secret, scheduler.key and admin.token stay private (--group " in err
    assert len(permission_warnings([table])) == 1


def test_a_wrong_value_is_one_line(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for option, value, words in (
        ("--file-mode", "0777", "only the owner can write, such as 0640"),
        *(("--file-mode", wrong, "such as 0640") for wrong in ("0660", "0440")),
        *(("--file-mode", wrong, "octal") for wrong in ("u=rw", "0698", "4640")),
        *(("--group", wrong, "no such group") for wrong in ("no-such-group-here", "99999999999")),
        ("--group", "-1", ""),
    ):
        for main, head in ((cli.main, ["gen"]), (cli.reference_main, ["--mode", "gen"])):
            with pytest.raises(SystemExit) as caught:
                main([*head, *GEN, option, value, "--save-dir", str(tmp_path)])
            assert caught.value.code == 2
            err = capsys.readouterr().err
            assert err.count("\n") == 1
            assert option in err
            assert words in err
    assert not list(tmp_path.iterdir())


# ---- as another user


@pytest.fixture
def folder() -> Iterator[Path]:
    """Yields a folder that other users may enter, unlike pytest's folders."""
    with tempfile.TemporaryDirectory() as name:
        Path(name).chmod(0o755)
        yield Path(name)


def readers(table: Path) -> dict[str, Callable[[], object]]:
    """Returns all readers of a global table, by name."""
    env = {"GLOBAL_RANK_TABLE_FILE_PATH": str(table), "RANK_TABLE_FILE_PATH": str(table)}
    return {
        "load": lambda: load_global(table),
        "merge": lambda: merge([table]),
        "place": lambda: find_place(env),
        "token": lambda: find_admin_token(env, ""),
    }


@pytest.mark.parametrize("what", ["load", "merge", "place"])
def test_a_table_that_may_not_be_read_says_who_may(folder: Path, what: str) -> None:
    table = written(folder)
    if os.getuid() != 0:
        table.chmod(0)
    said = as_another_user(readers(table)[what])
    group = OTHER_ID if os.getuid() == 0 else os.getgid()
    mode = "0600" if os.getuid() == 0 else "0000"
    kind = "RankTableError" if what in ("load", "merge") else "ConfigError"
    assert said.startswith(f"{kind}: {table}: (file): found 'mode {mode} of "), said
    assert f"gid {group}) may read; its owner: chgrp {group} {table} && chmod 640 {table}" in said
    assert said.endswith(f"or write it with --group {group}")
    assert "\n" not in said


@pytest.mark.skipif(os.getuid() != 0, reason="only root may become another user")
def test_with_the_readers_group_it_is_read(folder: Path) -> None:
    table = written(folder, "--group", str(OTHER_ID))
    assert as_another_user(lambda: load_global(table)) == "nothing raised"
    assert as_another_user(lambda: find_place({"GLOBAL_RANK_TABLE_FILE_PATH": str(table)})).startswith(
        "ConfigError: RANK_TABLE_FILE_PATH is not set"
    )


@pytest.mark.parametrize("what", ["load", "place", "token"])
def test_a_folder_that_may_not_be_searched(folder: Path, what: str) -> None:
    table = written(folder / "closed")
    (folder / "closed").chmod(0o700 if os.getuid() == 0 else 0)
    said = as_another_user(readers(table)[what])
    (folder / "closed").chmod(0o700)
    assert f"{table}: (file): found 'a folder that may not be searched', expected a table that " in said


def test_check_and_the_command_line_do_not_fall_over(folder: Path) -> None:
    table = written(folder / "closed")
    (folder / "closed").chmod(0o700 if os.getuid() == 0 else 0)

    def checked() -> None:
        (fault,) = check(table)
        raise SystemExit(f"{cli.main(['check', str(table)])} {permission_warnings([table])} {fault.field}")

    said = as_another_user(checked)
    (folder / "closed").chmod(0o700)
    assert said == "SystemExit: 1 [] (file)"
