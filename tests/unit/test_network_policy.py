"""Either end that does not trust the network refuses gloo between hosts, and nothing else."""

from __future__ import annotations

from pathlib import Path

import pytest

from pd_cluster.commands import cli
from ranktable_tools import cli as tables
from tests.unit.test_link_rests import Net

HOSTS = {"p0": "10.0.0.1", "d0": "10.0.0.2"}
WHY = (
    "KV cache would travel between hosts over gloo ({}, {}), checked but not encrypted: give all workers "
    "--kv-transport auto or curve, which is encrypted, or --trust-network if nobody else can access that network"
)


def state(net: Net) -> str:
    net.run()
    return net.states("p0")["d0"]


@pytest.mark.parametrize(
    ("trusting", "refused_by"), [((), ("10.0.0.1", "10.0.0.2")), (("p0",), ("10.0.0.2", "10.0.0.1"))]
)
def test_gloo_does_not_leave_its_host(trusting: tuple[str, ...], refused_by: tuple[str, str]) -> None:
    net = Net(1, 1, 0, 0, hosts=HOSTS, trusting=trusting)
    assert WHY.format(*refused_by) in state(net)
    assert net.p["p0"].admit("d0") == "no link"


@pytest.mark.parametrize(
    ("transport", "hosts", "trusting"),
    [
        ("dist", HOSTS, ("p0", "d0")),
        ("dist", {"p0": "10.0.0.1", "d0": "10.0.0.1"}, ()),
        ("dist", {"p0": "127.0.0.1", "d0": "localhost"}, ()),
        ("dist", {"p0": "127.0.0.1", "d0": "127.0.0.2"}, ()),
        ("dist", {"p0": "FD00::1", "d0": "fd00:0::1"}, ()),
        ("curve", HOSTS, ()),
        ("nccl", HOSTS, ()),
    ],
)
def test_one_host_and_other_transports_are_untouched(
    transport: str, hosts: dict[str, str], trusting: tuple[str, ...]
) -> None:
    assert state(Net(1, 1, 0, 0, transport, hosts, trusting)) == f"up ({transport})"


def test_a_worker_on_a_cpu_says_so_when_it_starts(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without this error, a cluster would start although all its links are refused."""
    for address, role in (("10.0.0.1", "prefill"), ("10.0.0.2", "decode")):
        own = ["--api-server"] if role == "prefill" else []
        given = [f"--{role}-server-list", "0", *own, "--server-ip", address, "--device", "cpu"]
        assert tables.main(["gen", *given, "--save-dir", str(tmp_path)]) == 0
    parts = [str(tmp_path / f"global_ranktable_{each}.json") for each in HOSTS.values()]
    assert tables.main(["merge", "--global-ranktable-list", *parts, "--save-dir", str(tmp_path)]) == 0
    monkeypatch.setenv("GLOBAL_RANK_TABLE_FILE_PATH", str(tmp_path / "global_ranktable_merge.json"))
    monkeypatch.setenv("RANK_TABLE_FILE_PATH", str(tmp_path / "local_ranktable_10.0.0.2_0.json"))
    model = Path(cli.__file__).parents[1] / "models" / "tiny-chat"
    for flags, is_refused in (("dist", True), ("curve", False), ("dist --trust-network", False)):
        fault = [] if is_refused else ["--kv-disk-cache=/x"]  # a later check of the start would also end it
        argv = ["pd-cluster", "serve", f"--model={model}", "--device=cpu", f"--kv-transport={flags}", *fault]
        monkeypatch.setattr("sys.argv", [*" ".join(argv).split(), "--port=1", "--host=192.0.2.1"])
        capsys.readouterr()
        with pytest.raises(SystemExit) as ended:
            cli.main()
        said = capsys.readouterr().err
        assert ended.value.code == 1, said
        assert (WHY.format("10.0.0.2", "10.0.0.1") in said) is is_refused, said
