"""Both command lines: `pd-ranktable …` and the reference document's `pd_ranktable_tools.py --mode …`."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from ranktable_tools import cli, load_global, machine_probe, ports

SCRIPT = Path(__file__).parents[2] / "scripts" / "pd_ranktable_tools.py"
GEN = ["--prefill-server-list", "4,5", "--decode-server-list", "6,7", "--api-server"]
CPU = ["--device", "cpu", "--server-ip", "10.0.0.18"]


def usage_error(argv: list[str], capsys: pytest.CaptureFixture[str], main: object = cli.main) -> str:
    with pytest.raises(SystemExit) as caught:
        main(argv)  # type: ignore[operator]
    assert caught.value.code == 2
    line = capsys.readouterr().err
    assert line.count("\n") == 1
    return line


def test_both_command_lines_write_the_same(tmp_path: Path) -> None:
    assert cli.main(["gen", *GEN, *CPU, "--save-dir", str(tmp_path / "a")]) == 0
    assert cli.reference_main(["--mode", "gen", *GEN, *CPU, "--save-dir", str(tmp_path / "b")]) == 0
    a, b = ({path.name: path.read_bytes() for path in (tmp_path / name).iterdir()} for name in "ab")
    assert a.keys() == b.keys()
    keys = {"cluster.secret", "scheduler.key", "admin.token"}
    assert {name for name in a if a[name] != b[name]} == keys, "each cluster must get its own secret"
    assert len(a) == 4 + len(keys)


def test_instances_are_separated_by_spaces(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    lists = ["--prefill-server-list", "0,1", "2,3", "--decode-server-list", "4", "--decode-server-list", "5"]
    assert cli.main(["gen", *lists, *CPU]) == 0
    table = load_global("global_ranktable_10.0.0.18.json")
    assert [len(server.device) for server in table.instances] == [2, 2, 1, 1]


def test_merge_check_show(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    a, b = (str(tmp_path / f"global_ranktable_10.0.0.{host}.json") for host in (18, 19))
    cli.main(["gen", "--prefill-server-list", "4,5", "--api-server", *CPU, "--save-dir", str(tmp_path)])
    decode = ["--decode-server-list", "6,7", "--device", "cpu", "--server-ip=10.0.0.19"]
    cli.main(["gen", *decode, f"--save-dir={tmp_path}"])
    capsys.readouterr()
    merge = ["--mode", "merge", "--global-ranktable-list", a, b, "--save-dir", str(tmp_path)]
    assert cli.reference_main(merge) == 0
    merged = capsys.readouterr().out.splitlines()[0]
    assert merged == str(tmp_path / "global_ranktable_merge.json")

    local_tables = [str(path) for path in tmp_path.glob("local_*")]
    assert cli.main(["check", merged, "--local", *local_tables, "--node-ports", "8088,8088"]) == 0
    assert capsys.readouterr().out == "ok: 1 scheduler, 1 prefill, 1 decode\n"
    assert cli.main(["check", a, "--tensor-parallel-size", "4"]) == 1
    assert len(capsys.readouterr().out.splitlines()) == 2

    assert cli.main(["show", merged]) == 0
    assert capsys.readouterr().out.splitlines() == [
        f"{merged}: version 1.0, completed",
        "#  role       host       devices  device ips",
        "-  scheduler  10.0.0.18  -        -",
        "0  prefill    10.0.0.18  4,5      10.0.0.18,10.0.0.18",
        "1  decode     10.0.0.19  6,7      10.0.0.19,10.0.0.19",
        "NODE_PORTS=<port of #0>,<port of #1>",
    ]


def test_a_readable_table_warns(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cli.main(["gen", *GEN, *CPU, "--save-dir", str(tmp_path)])
    table = tmp_path / "global_ranktable_10.0.0.18.json"
    for mode in (0o644, 0o660):
        table.chmod(mode)
        assert cli.main(["check", str(table)]) == 0
        assert f"mode {mode:04o}" in capsys.readouterr().err
    table.chmod(0o640)
    assert cli.main(["check", str(table)]) == 0
    assert capsys.readouterr().err == ""


def test_faults_are_one_line_and_exit_1(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    taken = tmp_path / "file"
    taken.write_text("")
    for argv in (
        ["show", str(tmp_path / "missing.json")],
        ["merge", "--global-ranktable-list", str(taken)],
        ["gen", "--prefill-server-list", "4,4", *CPU],
        ["gen", *GEN, *CPU, "--save-dir", str(taken / "below")],
    ):
        assert cli.main(argv) == 1
        assert capsys.readouterr().err.count("\n") == 1


def test_usage_errors_are_one_line_and_exit_2(capsys: pytest.CaptureFixture[str]) -> None:
    for argv, part in (
        (["gen", "--prefil-server-list", "4"], "did you mean --prefill-server-list?"),
        (["mrge"], "did you mean merge?"),
        (["merge"], "--global-ranktable-list"),
        (["gen", "--device", "tpu"], "tpu"),
        (["gen", "--device-ip", "10.0.0.1"], "ID=ADDRESS"),
        (["check", "t.json", "--tensor-parallel-size", "two"], "two"),
    ):
        assert part in usage_error(argv, capsys)


def test_the_reference_command_line_refuses(capsys: pytest.CaptureFixture[str]) -> None:
    assert "--mode" in usage_error(GEN, capsys, cli.reference_main)
    assert "merge-all" in usage_error(["--mode", "merge-all"], capsys, cli.reference_main)
    assert "--global-ranktable-list" in usage_error(["--mode", "merge"], capsys, cli.reference_main)


def test_the_address_without_a_default_route(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine_probe, "default_server_ip", lambda: None)
    for addresses, taken, said in (
        (
            [],
            "127.0.0.1",
            "note: this machine has no address, so --server-ip is 127.0.0.1, which works on one machine only\n",
        ),
        (["10.0.0.5"], "10.0.0.5", "note: no default route, so --server-ip is 10.0.0.5, the only address\n"),
        (["10.0.0.5", "10.9.0.5"], "", "--server-ip: found '10.0.0.5 10.9.0.5', expected one address"),
    ):
        monkeypatch.setattr(machine_probe, "global_addresses", lambda addresses=addresses: addresses)
        assert cli.main(["gen", "--api-server", "--save-dir", str(tmp_path)]) == (not taken)
        assert said in capsys.readouterr().err
        assert (tmp_path / f"local_ranktable_{taken}_host.json").exists() == bool(taken)


def test_check_knows_the_schedulers_ports_and_the_kernels(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert cli.main(["gen", *GEN, *CPU, "--save-dir", str(tmp_path)]) == 0
    table = str(tmp_path / "global_ranktable_10.0.0.18.json")
    capsys.readouterr()
    assert cli.main(["check", table, "--node-ports", "8088,9001", "--port", "9000"]) == 1
    assert capsys.readouterr().out.startswith("NODE_PORTS: [1]: found 9001, expected a port that the scheduler of 10.")
    assert cli.main(["check", table, "--node-ports", "8088,9001", "--port", "9000", "--admin-port", "9100"]) == 0
    kernel = tmp_path / "ipv4"
    kernel.mkdir()
    (kernel / "ip_local_port_range").write_text("32768\t60999\n")
    (kernel / "ip_local_reserved_ports").write_text("40000,41000-41010\n")
    monkeypatch.setattr(ports, "KERNEL", kernel)
    capsys.readouterr()
    assert cli.main(["check", table, "--node-ports", "40000,50000", "--port", "32767"]) == 0
    said = capsys.readouterr().err
    assert [line.partition(", which")[0] for line in said.splitlines()] == [
        "warning: NODE_PORTS: [1]: found 50000",
        "warning: --admin-port: found 32768",
    ]
    assert f"uses 32768 to 60999 for these ({kernel}/ip_local_port_range); choose a port below 32768" in said
    (kernel / "ip_local_reserved_ports").unlink()
    assert cli.main(["check", table, "--node-ports", "40000,50000"]) == 0, "an unreadable file must not cause a warning"


def test_the_script_runs_anywhere_with_the_standard_library_only(tmp_path: Path) -> None:
    command = [sys.executable, "-I", "-S", str(SCRIPT), "--mode", "gen", *GEN, *CPU, "--save-dir", "./save_dir"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr) == (0, "")
    local = json.loads((tmp_path / "save_dir" / "local_ranktable_10.0.0.18_67.json").read_text())
    assert [device["device_id"] for device in local["server_list"][0]["device"]] == ["6", "7"]


def test_the_package_pulls_in_nothing_heavy() -> None:
    code = "import sys, ranktable_tools as r; print({m.split('.')[0] for m in sys.modules} & {*sys.argv[1:]})"
    heavy = ["torch", "pd_cluster", "typer", "pydantic", "msgspec", "argparse"]
    command = [sys.executable, "-c", code, *heavy]
    done = subprocess.run(command, cwd=SCRIPT.parents[1], capture_output=True, text=True, timeout=60, check=True)
    assert done.stdout.strip() == "set()"


def test_a_machine_without_cards_is_told(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Unless --device is given, gen warns, so a container without the driver is noticed early."""
    given = ["gen", "--prefill-server-list", "0", "--server-ip", "127.0.0.1", "--save-dir", str(tmp_path)]
    for kind, arguments, is_told in (("cpu", [], True), ("npu", [], False), ("cpu", ["--device", "cpu"], False)):
        monkeypatch.setattr("ranktable_tools.machine_probe.detect_kind", lambda kind=kind: kind)
        cli.main([*given, *arguments, "--device-ip", "0=127.0.0.1"])
        assert ("no NPU and no GPU is visible here" in capsys.readouterr().err) == is_told
