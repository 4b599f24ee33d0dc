"""`pd-cluster check --network` with real processes: KV blocks between instances of a CPU rank table."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from pathlib import Path

import pytest

from pd_cluster.cluster.members.rank_table_place import Place, find_place
from pd_cluster.cluster.preflight import pair_probes
from pd_cluster.cluster.preflight.preflight_findings import Finding, in_order, is_wrong
from pd_cluster.engine.link_probe.probe_messages import Compare, Listen, ProbeAnswer
from ranktable_tools import cli

HERE = "127.0.0.1"
ONE_PAIR = ("--prefill-server-list", "0", "--decode-server-list", "1", "--api-server")
Variables = dict[str, str]


def make(folder: Path, *arguments: str, ip: str = HERE, local: str = "0") -> Variables:
    """Writes tables; returns the variables of the instance on device `local`."""
    assert cli.main(["gen", *arguments, "--server-ip", ip, "--save-dir", str(folder)]) == 0
    return {
        "GLOBAL_RANK_TABLE_FILE_PATH": str(folder / f"global_ranktable_{ip}.json"),
        "RANK_TABLE_FILE_PATH": str(folder / f"local_ranktable_{ip}_{local}.json"),
    }


def run_command(variables: Variables) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "pd_cluster", "check", "--network"]
    return subprocess.run(command, capture_output=True, text=True, timeout=300, check=False, env=os.environ | variables)


def check(place: Place) -> list[Finding]:
    return in_order(pair_probes.check_pairs(place, "cpu", "auto", lambda text: None))


@pytest.fixture
def one_pair(tmp_path: Path) -> Place:
    return find_place(make(tmp_path, *ONE_PAIR, "--device", "cpu"))


def test_the_command(tmp_path: Path) -> None:
    """One rank sends to two over torch.distributed; without a terminal the output is plain lines."""
    lists = ("--prefill-server-list", "0", "--decode-server-list", "1,2", "--api-server", "--device", "cpu")
    done = run_command(make(tmp_path, *lists) | {"PD_CLUSTER_SERVE_KV_TRANSPORT": "dist"})
    assert done.returncode == 0, done.stdout + done.stderr
    *progress, pair, total = done.stdout.splitlines()
    assert [line[-1] for line in progress] == ["…", "…"]
    rate = r"ok +KV: prefill-0 -> decode-0: [0-9]+\.[0-9] GB/s over dist, every byte right; the slowest of 2 lanes"
    assert re.fullmatch(rate, pair)
    assert total == "network: 0 error, 0 unchecked, 0 warning, 1 ok"


def test_a_table_of_npus_on_a_machine_without(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Reports the cards and the pair as faulty, each with its remedy, and exits with an error code."""
    cards = ("--device", "npu", "--device-ip", "0=192.0.2.20", "--device-ip", "1=192.0.2.21")
    variables = make(tmp_path, *ONE_PAIR, *cards)
    done = run_command(variables | {"PATH": str(tmp_path), "CUDA_VISIBLE_DEVICES": ""})
    assert done.returncode == 1, done.stdout + done.stderr
    errors = [line for line in done.stdout.splitlines() if line.startswith("error")]
    assert len(errors) == 2
    assert "hccn_tool: NPU 0, NPU 1: cannot be queried" in errors[0]
    assert "rank 0 of prefill-0: its table has NPUs, but torch would use the cpu here" in errors[1]


def test_wrong_content_is_found(one_pair: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    """The receiver expects another seed's content, as if the sender had sent wrong bytes."""
    begin = pair_probes._begin

    def begin_and_forget(ends: dict[tuple[str, int], pair_probes.RankEndpoint], device: str) -> dict[str, str]:
        broken = begin(ends, device)
        ends["prefill-0", 0].seed += 1
        return broken

    monkeypatch.setattr(pair_probes, "_begin", begin_and_forget)
    (finding,) = check(one_pair)
    assert finding.text == "no KV blocks arrived: block 0 of 64 does not have the expected content"
    assert is_wrong([finding])


def test_a_rank_that_dies_is_named_and_none_remains(one_pair: Place, monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[pair_probes.RankEndpoint] = []
    ask = pair_probes.RankEndpoint.ask

    def dies(end: pair_probes.RankEndpoint, command: Listen, timeout_s: float) -> ProbeAnswer:
        started.append(end)
        if not isinstance(command, Listen | Compare):
            end._process.kill()
            end._process.wait()
        return ask(end, command, timeout_s)

    monkeypatch.setattr(pair_probes.RankEndpoint, "ask", dies)
    (finding,) = check(one_pair)
    assert finding.level == "error"
    assert "the process has ended" in finding.text
    assert all(end._process.poll() is not None for end in started)


@pytest.mark.slow
def test_an_address_that_is_not_this_hosts(tmp_path: Path) -> None:
    place = find_place(make(tmp_path, *ONE_PAIR, "--device", "cpu", ip="192.0.2.7"))
    (finding,) = check(place)
    assert finding.level == "error"
    assert "cannot bind the control socket at 192.0.2.7" in finding.text


def test_other_hosts_are_named_and_not_checked(tmp_path: Path) -> None:
    """Instances on other hosts are named; no process starts for them."""
    make(tmp_path, "--prefill-server-list", "0", "--api-server", "--device", "cpu", ip="192.0.2.6")
    lists = ("--prefill-server-list", "0", "--decode-server-list", "1", "--device", "cpu")
    make(tmp_path, *lists, ip="192.0.2.7")
    tables = [str(tmp_path / f"global_ranktable_192.0.2.{host}.json") for host in (6, 7)]
    assert cli.main(["merge", "--global-ranktable-list", *tables, "--save-dir", str(tmp_path)]) == 0
    variables = {
        "GLOBAL_RANK_TABLE_FILE_PATH": str(tmp_path / "global_ranktable_merge.json"),
        "RANK_TABLE_FILE_PATH": str(tmp_path / "local_ranktable_192.0.2.6_0.json"),
    }
    between, there = check(find_place(variables))
    assert between.line == (
        "KV: prefill-0 -> decode-0 (192.0.2.6 -> 192.0.2.7): between hosts; "
        "set NODE_PORTS and run the command on both hosts at the same time"
    )
    assert there.line == (
        "KV: prefill-1 -> decode-0 (192.0.2.7): not on this host; run `pd-cluster check --network` there, too"
    )
    assert not is_wrong([between, there])


@pytest.mark.parametrize(
    ("sizes", "lanes"),
    [((1, 1), [(0, 0)]), ((1, 2), [(0, 0), (0, 1)]), ((4, 2), [(0, 0), (1, 0), (2, 1), (3, 1)])],
)
def test_lanes(sizes: tuple[int, int], lanes: list[tuple[int, int]]) -> None:
    assert pair_probes.lanes_of(*sizes) == lanes


def test_two_instances_on_one_npu_prove_nothing() -> None:
    """Two instances on one NPU, as in a container with two of four cards, prove nothing; CPUs and GPUs may share."""
    names = [("prefill-0", 0), ("prefill-0", 1), ("decode-0", 0), ("decode-0", 1)]
    found = pair_probes.shared_npus(dict(zip(names, ["npu:0", "npu:1", "npu:0", "npu:1"], strict=True)))
    assert list(found) == ["decode-0"]
    assert "rank 0 of decode-0 has npu:0 here, and so has rank 0 of prefill-0" in found["decode-0"]
    for devices in (["npu:0", "npu:1", "npu:2", "npu:3"], ["cpu"] * 4, ["cuda:0"] * 4):
        assert pair_probes.shared_npus(dict(zip(names, devices, strict=True))) == {}
