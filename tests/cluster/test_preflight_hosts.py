"""`pd-cluster check --network` on several simulated hosts at once: KV blocks between network namespaces."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from pd_cluster.cluster.preflight.preflight_findings import Finding, in_order
from ranktable_tools import cli, generate, write
from tests.support.netns import HUB, CannotMakeNamespaces, Network

pytestmark = pytest.mark.slow  # up to six processes that import torch
PORTS = "7811,7811,7811"


@pytest.fixture(scope="module")
def network() -> Iterator[Network]:
    try:
        made = Network(["left", "right"]).__enter__()
    except CannotMakeNamespaces as why:
        pytest.skip(str(why))
    with made:
        yield made


@pytest.fixture
def tables(network: Network, tmp_path: Path) -> Path:
    """Writes tables: a prefill instance on the hub, another and a two-rank decode instance on `left` and `right`."""
    given = {HUB: ([[0]], []), "left": ([[0]], []), "right": ([], [[0, 1]])}
    for host, (prefill, decode) in given.items():
        made = generate(
            prefill=prefill,
            decode=decode,
            api_server=host == HUB,
            server_ip=network.addresses[host],
            device_kind="cpu",
            device_ips=None,
        )
        write(made, tmp_path)
    tables = [str(tmp_path / f"global_ranktable_{network.addresses[host]}.json") for host in given]
    assert cli.main(["merge", "--global-ranktable-list", *tables, "--save-dir", str(tmp_path)]) == 0
    return tmp_path


def begin(network: Network, tables: Path, host: str, wait_s: float = 100) -> subprocess.Popen[str]:
    address = network.addresses[host]
    local = next(tables.glob(f"local_ranktable_{address}_[0-9]*.json"))
    env = {
        **os.environ,
        "GLOBAL_RANK_TABLE_FILE_PATH": str(tables / "global_ranktable_merge.json"),
        "RANK_TABLE_FILE_PATH": str(local),
        "NODE_PORTS": PORTS,
        "PD_CLUSTER_SERVE_DEVICE": "cpu",
    }
    command = [sys.executable, "-m", "pd_cluster", "check", "--network", f"--wait={wait_s:g}"]
    return subprocess.Popen(
        network.inside(host, command), env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True
    )


def findings(process: subprocess.Popen[str]) -> list[str]:
    said, _ = process.communicate(timeout=400)
    return [line for line in said.splitlines() if re.match("ok |unchecked |error |network:", line)] or [said]


@pytest.mark.timeout(600)
def test_every_pair_exchanges_blocks(network: Network, tables: Path) -> None:
    began = {host: begin(network, tables, host) for host in (HUB, "left", "right")}
    said = {host: findings(process) for host, process in began.items()}
    right = network.addresses["right"]
    for host, name in ((HUB, "prefill-0"), ("left", "prefill-1")):
        own = network.addresses[host]
        sent = [line for line in said[host] if line.startswith("ok ")]
        form = (
            rf"ok +KV: {name} -> decode-0 \({own} -> {right}\): [0-9]+\.[0-9] GB/s over curve; {right} compares the "
            r"bytes; the slowest of 2 lanes"
        )
        assert len(sent) == 1, said[host]
        assert re.fullmatch(form, sent[0]), sent
        landed = f"KV: {name} -> decode-0 ({own} -> {right}): every byte right; {own} shows the rate"
        assert any(line.endswith(landed) for line in said["right"]), said["right"]
    assert {process.returncode for process in began.values()} == {0}


@pytest.mark.timeout(600)
def test_a_host_without_the_command_is_named_once_waited_for(network: Network, tables: Path) -> None:
    said = findings(begin(network, tables, "right", wait_s=3))
    unchecked = [line for line in said if line.startswith("unchecked")]
    assert len(unchecked) == 2, said
    for host, line in zip((HUB, "left"), sorted(unchecked), strict=True):
        assert f"{network.addresses[host]} did not connect within 3 s" in line


def test_the_slowest_pair_comes_first() -> None:
    rates = [("a", 3.0), ("b", 0.5), ("c", 9.0)]
    found = [Finding("ok", "KV", where, f"{rate:.1f} GB/s", rate=rate) for where, rate in rates]
    found.append(Finding("error", "KV", "d", "no KV blocks arrived"))
    assert [each.where for each in in_order(found)] == ["d", "b", "a", "c"]
