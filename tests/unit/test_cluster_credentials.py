"""The credential files of a cluster: their writers and readers, and the error of a launch without them."""

from __future__ import annotations

import os
import stat
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
from msgspec.structs import replace

from pd_cluster.cluster.members.cluster_credentials import admin_token_of, credentials_of, read_admin_token
from pd_cluster.cluster.members.rank_table_place import Place, find_place
from pd_cluster.cluster.processes.launch_settings import Launch
from pd_cluster.cluster.processes.launcher import plan_cluster
from pd_cluster.errors import ConfigError
from pd_cluster.settings.process_settings import KeyFiles
from ranktable_tools import RankTableError, cli
from ranktable_tools.cluster_keys import read_scheduler_key, read_secret, secret_text, write_keys
from ranktable_tools.public_keys import public_key
from ranktable_tools.table_files import PRIVATE, Access

NAMES = ("cluster.secret", "scheduler.key", "admin.token")
GEN = ["--device", "cpu", "--server-ip", "10.0.0.1"]
WITHOUT_ZMQ = "import sys; sys.modules['zmq'] = None; "
PRINT_KEY = (
    "import sys; from ranktable_tools import public_keys as p; print(p.public_key(bytes.fromhex(sys.argv[1])).hex())"
)
RUN = "from ranktable_tools.cli import main; sys.exit(main(sys.argv[1:]))"
WHOLE = ["--prefill-server-list", "0", "--decode-server-list", "1", "--api-server"]


def gen(folder: Path, *options: str) -> Path:
    assert cli.main(["gen", *GEN, *WHOLE, "--save-dir", str(folder), *options]) == 0
    return folder


def place(folder: Path, which: str = "host") -> Place:
    (table,) = folder.glob("global_*.json")
    env = {"GLOBAL_RANK_TABLE_FILE_PATH": str(table)}
    return find_place({**env, "RANK_TABLE_FILE_PATH": str(folder / f"local_ranktable_10.0.0.1_{which}.json")})


def fault(work: Callable[[], object]) -> str:
    with pytest.raises(ConfigError) as caught:
        work()
    assert "\n" not in str(caught.value)
    return str(caught.value)


# ---- keys


def test_public_keys_of_both_implementations_agree() -> None:
    for private in (b"\xff" * 32, os.urandom(32)):
        with_openssl, with_libzmq = (
            subprocess.run(command, capture_output=True, check=True).stdout.strip()
            for command in (
                [sys.executable, "-c", WITHOUT_ZMQ + PRINT_KEY, private.hex()],
                [sys.executable, "-c", PRINT_KEY, private.hex()],
            )
        )
        assert with_openssl == with_libzmq == public_key(private).hex().encode()
    with pytest.raises(ValueError, match="a private key has 32 bytes, this one has 31"):
        public_key(bytes(31))


def test_tables_are_written_where_no_key_can_be_made(tmp_path: Path) -> None:
    """Without pyzmq and openssl, tables are written and no partial key files are left for `pd-ranktable keys`."""
    command = [sys.executable, "-c", WITHOUT_ZMQ + RUN, "gen", *GEN, *WHOLE]
    made = subprocess.run([*command, "--save-dir", tmp_path], env={"PATH": ""}, capture_output=True, text=True)
    assert made.returncode == 0, made.stderr
    assert "run `pd-ranktable keys --save-dir DIR`" in made.stderr
    assert not any((tmp_path / name).exists() for name in NAMES)
    assert len([*tmp_path.glob("*.json")]) == 4
    assert cli.main(["keys", "--save-dir", str(tmp_path)]) == 0
    assert all((tmp_path / name).exists() for name in NAMES)


# ---- writers


def test_one_machine_gets_all_three_and_keeps_them(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    gen(tmp_path)
    assert capsys.readouterr().out.splitlines()[-3:] == [str(tmp_path / name) for name in NAMES]
    before = [(tmp_path / name).read_bytes() for name in NAMES]
    assert {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in NAMES} == {0o600}
    assert read_secret(tmp_path / NAMES[0]).schedulers == (public_key(read_scheduler_key(tmp_path / NAMES[1])),)
    gen(tmp_path, "--decode-server-list", "2")  # the cluster grows
    assert [(tmp_path / name).read_bytes() for name in NAMES] == before
    gen(tmp_path / "another")
    others = [(tmp_path / "another" / name).read_bytes() for name in NAMES]
    assert not {*before} & {*others}


def test_a_machines_part_gets_none_and_merge_says_what_to_copy(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    home = ["--prefill-server-list", "0", "--api-server", *GEN, "--save-dir", str(tmp_path / "home")]
    away = ["--decode-server-list", "0", "--device", "cpu", "--server-ip", "10.0.0.2"]
    assert cli.main(["gen", *home]) == cli.main(["gen", *away, "--save-dir", str(tmp_path / "away")]) == 0
    parts = [str(next((tmp_path / name).glob("global_*.json"))) for name in ("home", "away")]
    assert not [path for name in NAMES for path in tmp_path.rglob(name)]
    capsys.readouterr()
    assert cli.main(["merge", "--global-ranktable-list", *parts, "--save-dir", str(tmp_path / "home")]) == 0
    written = ["global_ranktable_merge.json", *NAMES]
    *paths, everywhere, alone = capsys.readouterr().out.splitlines()
    assert paths == [str(tmp_path / "home" / name) for name in written]
    assert everywhere.startswith("copy global_ranktable_merge.json and cluster.secret to 10.0.0.1, 10.0.0.2")
    assert alone.startswith("copy scheduler.key and admin.token only to 10.0.0.1")


@pytest.mark.parametrize(
    ("options", "mode"),
    [
        (["--file-mode", "0644"], 0o600),
        (["--group", str(os.getgid()), "--file-mode", "0644"], 0o640),
        (["--group", str(os.getgid()), "--file-mode", "0600"], 0o600),
    ],
)
def test_nobody_but_owner_and_group_reads_them(tmp_path: Path, options: list[str], mode: int) -> None:
    gen(tmp_path, *options)
    assert {stat.S_IMODE((tmp_path / name).stat().st_mode) for name in NAMES} == {mode}
    assert credentials_of(place(tmp_path), KeyFiles()).key
    assert len(admin_token_of(place(tmp_path), KeyFiles())) == 64


def test_files_that_do_not_belong_together_are_not_completed(tmp_path: Path) -> None:
    write_keys(tmp_path, PRIVATE)
    write_keys(tmp_path / "another", PRIVATE)
    key = tmp_path / "scheduler.key"
    key.write_bytes((tmp_path / "another" / "scheduler.key").read_bytes())
    with pytest.raises(RankTableError, match="found 'the key of another cluster', expected one whose public key "):
        write_keys(tmp_path, PRIVATE)
    key.unlink()
    with pytest.raises(RankTableError, match="restore it from the scheduler's host, or remove "):
        write_keys(tmp_path, Access())
    (tmp_path / "cluster.secret").unlink()
    write_keys(tmp_path, PRIVATE)


def test_up_writes_its_own_and_keeps_it(tmp_path: Path) -> None:
    members = plan_cluster(Launch(), tmp_path)
    before = [(tmp_path / name).read_bytes() for name in NAMES]
    plan_cluster(Launch(), tmp_path)
    assert [(tmp_path / name).read_bytes() for name in NAMES] == before
    assert all(f"--secret-file={tmp_path / 'cluster.secret'}" in member.command for member in members)
    for private in NAMES[1:]:
        assert [m.name for m in members if any(private in word for word in m.command)] == ["scheduler"]


# ---- readers


def test_a_worker_has_no_private_key(tmp_path: Path) -> None:
    gen(tmp_path)
    scheduler, *workers = (credentials_of(place(tmp_path, which), KeyFiles()) for which in ("host", "0", "1"))
    assert workers[0] == workers[1] != scheduler
    assert (workers[0].secret, workers[0].schedulers) == (scheduler.secret, scheduler.schedulers)
    assert scheduler.schedulers == (public_key(scheduler.key),)
    assert not workers[0].key
    (tmp_path / "scheduler.key").unlink()
    (tmp_path / "admin.token").unlink()
    assert credentials_of(place(tmp_path, "0"), KeyFiles()) == workers[0]
    assert scheduler.secret.hex() not in repr(scheduler)


def test_workers_may_pin_several_schedulers(tmp_path: Path) -> None:
    gen(tmp_path)
    known = read_secret(tmp_path / "cluster.secret")
    both = (*known.schedulers, public_key(b"x" * 32))
    (tmp_path / "cluster.secret").write_text(secret_text(known.secret, both))
    assert credentials_of(place(tmp_path, "0"), KeyFiles()).schedulers == both
    assert credentials_of(place(tmp_path), KeyFiles()).schedulers == both


@pytest.mark.parametrize(
    ("which", "missing", "flag"),
    [
        ("0", "cluster.secret", "--secret-file"),
        ("host", "cluster.secret", "--secret-file"),
        ("host", "scheduler.key", "--scheduler-key-file"),
        ("host", "admin.token", "--admin-token-file"),
    ],
)
def test_a_launch_without_them_says_the_way_out(tmp_path: Path, which: str, missing: str, flag: str) -> None:
    folder = gen(tmp_path)
    (folder / missing).unlink()

    def launch() -> None:
        credentials_of(place(folder, which), KeyFiles())
        admin_token_of(place(folder, which), KeyFiles())

    said = fault(launch)
    assert said.startswith(f"{folder / missing}: no such file; ")
    assert f"or name it with {flag} FILE" in said
    assert ("--derive-secret" in said) is (missing == "cluster.secret")


@pytest.mark.parametrize(
    ("content", "mode", "said"),
    [
        (None, 0, "No such file"),
        ("secret", 0o660, "can read it; chmod 600"),
        (f"secret {'0' * 64}\nsecret {'1' * 64}", 0o600, "secret: found '2 lines', expected exactly one"),
        ("\xfc", 0o600, "(file): found something else, expected letters, digits and signs"),
    ],
)
def test_a_bad_secret_file(tmp_path: Path, content: str | None, mode: int, said: str) -> None:
    folder, file = gen(tmp_path / "tables"), tmp_path / "secret"
    if content is not None:
        file.write_text(content)
        file.chmod(mode)
    message = fault(lambda: credentials_of(place(folder, "0"), KeyFiles(secret=str(file))))
    assert message.startswith(f"--secret-file {file}: ")
    assert said in message
    assert "0" * 32 not in message
    files = KeyFiles(scheduler_key=str(gen(tmp_path / "two") / "scheduler.key"))
    assert "(file): found 'the key of another cluster'" in fault(lambda: credentials_of(place(folder), files))


@pytest.mark.parametrize(
    ("content", "mode", "said"),
    [
        (None, 0, "No such file"),
        ("0123456789abcdef\n", 0o600, ""),
        ("0123456789abcdef", 0o644, "can read it; chmod 600"),
        ("0123456789", 0o600, "at least 16 bytes"),
        ("0123456789 abcdef", 0o600, "without spaces"),
        ("0123456789abcdef\u00fc", 0o600, "letters, digits and signs"),
    ],
)
def test_token_files(tmp_path: Path, content: str | None, mode: int, said: str) -> None:
    file = tmp_path / "token"
    if content is not None:
        file.write_text(content)
        file.chmod(mode)
    if not said:
        assert read_admin_token(str(file)) == "0123456789abcdef"
        return
    message = fault(lambda: read_admin_token(str(file)))
    assert message.startswith(f"--admin-token-file {file}: ")
    assert said in message


# ---- --derive-secret


DERIVED = KeyFiles(derives=True)


def test_a_derived_secret_follows_from_the_table(tmp_path: Path) -> None:
    folder, same = gen(tmp_path / "one"), gen(tmp_path / "two")
    for name in NAMES:
        (folder / name).unlink()
    scheduler, worker = (credentials_of(place(folder, which), DERIVED) for which in ("host", "0"))
    assert scheduler == credentials_of(place(same), DERIVED) != credentials_of(place(same), KeyFiles())
    assert (worker.secret, worker.schedulers, worker.key) == (scheduler.secret, (public_key(scheduler.key),), b"")
    token = admin_token_of(place(folder), DERIVED)
    assert len({token, scheduler.secret.hex(), scheduler.key.hex()}) == 3
    (table,) = same.glob("global_*.json")
    table.write_text(table.read_text() + "\n")
    assert credentials_of(place(same, "0"), DERIVED).secret != worker.secret


def test_a_derived_secret_is_for_one_host(tmp_path: Path) -> None:
    away = ["--decode-server-list", "0", "--device", "cpu", "--server-ip", "10.0.0.2"]
    assert cli.main(["gen", *away, "--save-dir", str(tmp_path / "away")]) == 0
    parts = [str(next(folder.glob("global_*.json"))) for folder in (gen(tmp_path / "home"), tmp_path / "away")]
    assert cli.main(["merge", "--global-ranktable-list", *parts, "--save-dir", str(tmp_path)]) == 0
    table = tmp_path / "global_ranktable_merge.json"
    for local in (tmp_path / "home").glob("local_*.json"):
        here = find_place({"GLOBAL_RANK_TABLE_FILE_PATH": str(table), "RANK_TABLE_FILE_PATH": str(local)})
        said = fault(lambda here=here: credentials_of(here, DERIVED))  # type: ignore[misc]
        assert said.startswith(f"--derive-secret: {table} has several hosts (10.0.0.1, 10.0.0.2), and ")


def test_derived_and_read_do_not_mix(tmp_path: Path) -> None:
    here = place(gen(tmp_path))
    for changes in ({"secret": "file"}, {"scheduler_key": "file"}):
        said = fault(lambda changes=changes: credentials_of(here, replace(DERIVED, **changes)))  # type: ignore[misc]
        assert "cannot be combined with --derive-secret" in said
