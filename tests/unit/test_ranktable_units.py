"""Units in a rank table: their entries, their names in the tools, and tables without valid units."""

from pathlib import Path

import pytest

from ranktable_tools import cli
from ranktable_tools.unit_entries import unit_at

SIZES = ["--prefill-data-parallel-size", "2", "--decode-data-parallel-size", "2"]
NAMES = "prefill-0..1, decode-0..1, decode-2..3"


def tables(folder: Path, **decode: str) -> list[str]:
    """Writes each host's table, the first with prefill instances; returns the files."""
    for host, ids in {"a": "", **decode}.items():
        own = ["--prefill-server-list", "10,11", "12,13", "--api-server"] if host == "a" else []
        given = ["--decode-server-list", *ids.split()] if ids else []
        assert cli.main(["gen", *own, *given, "--device=cpu", f"--server-ip={host}", f"--save-dir={folder}"]) == 0
    return [str(folder / f"global_ranktable_{host}.json") for host in decode]


def merge(folder: Path, files: list[str], sizes: list[str]) -> int:
    first = str(folder / "global_ranktable_a.json")
    files = files if first in files else [first, *files]
    return cli.main(["merge", "--global-ranktable-list", *files, *sizes, "--save-dir", str(folder)])


def test_a_unit_has_its_own_entries() -> None:
    assert [unit_at("decode", position, 3) for position in (3, 4, 5)] == [("decode-3..5", range(3, 6))] * 3
    assert unit_at("prefill", 0, 2).name == "prefill-0..1"


def test_units_are_checked_and_shown(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert merge(tmp_path, tables(tmp_path, a="0 1", b="0 1"), SIZES) == 0
    assert "splits units" not in capsys.readouterr().err
    merged = str(tmp_path / "global_ranktable_merge.json")
    assert cli.main(["check", merged, *SIZES]) == 0
    assert capsys.readouterr().out == f"ok: 1 scheduler, 2 prefill, 4 decode; units {NAMES}\n"
    assert cli.main(["show", merged, *SIZES[:2]]) == 0
    _, titles, *rows, _ = capsys.readouterr().out.splitlines()
    at = titles.split().index("unit")
    assert [row.split()[at] for row in rows] == ["-", "prefill-0..1", "prefill-0..1", "-", "-", "-", "-"]
    assert cli.main(["show", merged]) == 0
    assert " unit " not in capsys.readouterr().out

    assert cli.main(["check", merged, "--decode-data-parallel-size=3"]) == 1
    fault = "server_group_list[2].server_count: found '4', expected a multiple of 3, the --decode-data-parallel-size"
    assert f"{merged}: {fault}; add 2 decode instances, or remove 1\n" == capsys.readouterr().out
    assert cli.main(["show", merged, "--decode-data-parallel-size=3"]) == 1


def test_members_have_equal_devices(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = tables(tmp_path, a="0 1", b="0 1,2")
    assert merge(tmp_path, files, []) == 0
    capsys.readouterr()
    assert cli.main(["check", str(tmp_path / "global_ranktable_merge.json"), *SIZES]) == 1
    (fault,) = capsys.readouterr().out.splitlines()
    place = "server_group_list[2].server_list"
    assert f"{place}[3].device: found '2 devices', expected 1 as in {place}[2]: both are in unit decode-2..3" in fault
    assert merge(tmp_path, files, SIZES) == 1, "given the sizes, merge must report it at once"


def test_gen_says_which_units_another_machine_completes(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    instances = ["--prefill-server-list", "0", "1", "--decode-server-list", "2", "3", "4", "--device=cpu"]
    assert cli.main(["gen", *instances, "--server-ip=a", *SIZES, f"--save-dir={tmp_path}"]) == 0
    (note,) = [line for line in capsys.readouterr().err.splitlines() if "units" in line]
    assert "3 decode instances do not fill units of --decode-data-parallel-size 2" in note
    assert "the next 1 decode instances" in note


@pytest.mark.parametrize(
    ("decode", "torn"),
    [
        ({"a": "0 1 2", "b": "0 1 2"}, []),  # one unit must span both
        ({"a": "0 1 2", "b": "0 1", "c": "0"}, ["b"]),  # b would not span hosts if c came first
        ({"a": "0 1 2", "c": "0", "b": "0 1"}, []),
    ],
)
def test_merge_says_when_an_order_splits_units(
    decode: dict[str, str], torn: list[str], tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    assert merge(tmp_path, tables(tmp_path, **decode), SIZES) == 0
    notes = [line for line in capsys.readouterr().err.splitlines() if "splits units" in line]
    assert [note.split(": ")[2].split()[0] for note in notes] == torn
    assert all("has 2 decode instances, enough for 1 of" in note for note in notes)
