"""HCCL's environment variables for an instance's ranks: values, precedence, and the messages of `check`."""

from __future__ import annotations

import asyncio
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pd_cluster.cluster.processes import rank_process
from pd_cluster.commands import check_command, serve_command
from pd_cluster.devices import hccl_environment
from pd_cluster.devices.device import CPU
from pd_cluster.engine.assembly import build_ranks
from pd_cluster.settings.engine_config import SHIPPED_MODEL, EngineConfig
from pd_cluster.settings.process_configs import Credentials, WorkerConfig
from pd_cluster.settings.process_settings import PortRange
from pd_cluster.settings.serve_options import ServeOptions
from pd_cluster.settings.timeouts import Timeouts
from ranktable_tools import Device, Server, generate, write

ANY = PortRange()
OURS = {
    "HCCL_IF_IP": "10.0.0.18",
    "HCCL_CONNECT_TIMEOUT": "120",
    "HCCL_EXEC_TIMEOUT": "120",
    "HCCL_HOST_SOCKET_PORT_RANGE": "auto",
    "HCCL_NPU_SOCKET_PORT_RANGE": "auto",
    "P2P_HCCL_BUFFSIZE": "0",
    "HCCL_DETERMINISTIC": "true",
}


def server(*device_ips: str, server_ip: str = "10.0.0.18") -> Server:
    devices = [
        Device(str(rank), each, str(rank)) for rank, each in enumerate(device_ips or ("192.0.2.20", "192.0.2.21"))
    ]
    return Server(server_ip, server_ip, tuple(devices))


def found(
    entry: Server | None = None, timeouts: Timeouts | None = None, ports: PortRange = ANY, **env: str
) -> dict[str, hccl_environment.HcclVariable]:
    one = entry or server()
    address = "127.0.0.1" if one.server_ip == "localhost" else one.server_ip
    return {each.name: each for each in hccl_environment.settings(one, address, timeouts or Timeouts(), ports, env)}


def handed_over(*args: Any, **changed: Any) -> dict[str, str]:
    return hccl_environment.environment(list(found(*args, **changed).values()))


def test_fast_collectives_leave_the_order_of_sums_to_hccl() -> None:
    sure, fast = (
        hccl_environment.settings(server(), "10.0.0.18", Timeouts(), ANY, {}, is_fast=is_fast)
        for is_fast in (False, True)
    )
    assert hccl_environment.environment(sure).items() - hccl_environment.environment(fast).items() == {
        ("HCCL_DETERMINISTIC", "true")
    }
    yours = hccl_environment.settings(
        server(), "10.0.0.18", Timeouts(), ANY, {"HCCL_DETERMINISTIC": "strict"}, is_fast=True
    )
    assert hccl_environment.HcclVariable("HCCL_DETERMINISTIC", "strict", "set by you", is_yours=True) in yours


def test_only_instances_on_npus_get_it() -> None:
    host_only, mixed = server("10.0.0.18", "10.0.0.18"), server("10.0.0.18", "192.0.2.21")
    loopback = server("127.0.0.1", server_ip="localhost")
    wanted = [hccl_environment.is_wanted("auto", each) for each in (server(), mixed, host_only, loopback)]
    assert wanted == [True, True, False, False]
    assert hccl_environment.is_wanted("npu", host_only)
    assert not any(hccl_environment.is_wanted(device, server()) for device in ("cpu", "cuda"))


@pytest.mark.parametrize("name", ["HCCL_IF_IP", "HCCL_BUFFSIZE", "HCCL_SOCKET_FAMILY"])
def test_what_the_operator_set_stays(name: str) -> None:
    setting = found(**{name: "mine"})[name]
    assert setting == hccl_environment.HcclVariable(name, "mine", "set by you", is_yours=True)
    assert name not in handed_over(**{name: "mine"})
    assert handed_over(**{name: ""}) == OURS, "an empty variable must count as unset"


def test_neither_the_operators_network_card_nor_a_loopback_address_is_overruled() -> None:
    """HCCL_IF_IP is not set then, because it would override the operator's HCCL_SOCKET_IFNAME."""
    without = {name: value for name, value in OURS.items() if name != "HCCL_IF_IP"}
    assert handed_over(HCCL_SOCKET_IFNAME="eth0") == without
    for server_ip in ("localhost", "::1"):
        assert handed_over(server(server_ip=server_ip)) == without


def test_addresses_of_the_other_family() -> None:
    six = server("2001:db8::20", "2001:db8::21", server_ip="2001:db8::1")
    assert handed_over(six) == {**OURS, "HCCL_IF_IP": "2001:db8::1", "HCCL_SOCKET_FAMILY": "AF_INET6"}
    assert "HCCL_SOCKET_FAMILY" not in handed_over(six, HCCL_SOCKET_IFNAME="eth0")
    assert found(server("2001:db8::20", "192.0.2.21"))["HCCL_SOCKET_FAMILY"].value is None, "both families occur"


@pytest.mark.parametrize(
    ("changed", "connect", "execute"),
    [
        ({"collective_timeout_s": 1.0, "transfer_timeout_s": 2.2, "connect_timeout_s": 0.5}, "120", "5"),
        ({"collective_timeout_s": 200.0}, "400", "400"),
        ({"transfer_timeout_s": 10_000.0}, "7200", "20000"),
        ({"connect_timeout_s": 0.0, "collective_timeout_s": 0.0, "transfer_timeout_s": 0.0}, "120", "1"),
        ({"collective_timeout_s": float("inf")}, "7200", str(hccl_environment.MAX_EXEC_S)),
    ],
)
def test_hccls_deadlines_are_a_net_under_ours(changed: dict[str, float], connect: str, execute: str) -> None:
    """HCCL's deadlines are longer than ours and never 0, which HCCL takes for no limit."""
    env = handed_over(timeouts=Timeouts(**changed))
    assert (env["HCCL_CONNECT_TIMEOUT"], env["HCCL_EXEC_TIMEOUT"]) == (connect, execute)


def test_a_port_range_is_honoured_where_ports_are_left() -> None:
    assert handed_over(ports=PortRange(7000, 7002))["HCCL_HOST_SOCKET_PORT_RANGE"] == "7000-7002"
    assert handed_over(ports=PortRange(7000, 7001))["HCCL_HOST_SOCKET_PORT_RANGE"] == "auto", "each rank needs a port"


def test_hccls_own_table_is_taken_away() -> None:
    assert handed_over() == OURS
    assert handed_over(RANK_TABLE_FILE="/etc/hccl.json") == {**OURS, "RANK_TABLE_FILE": ""}


def test_communicators_take_twice_their_buffers() -> None:
    known = ((32, False, False, 32 * 128), (1, True, False, 128 + 400), (0, True, True, 800), (0, False, False, 0))
    for num_pairs, has_ranks, has_unit, num_mb in known:
        assert hccl_environment.device_nbytes(num_pairs, has_ranks, has_unit, {}) == num_mb << 20
    assert hccl_environment.device_nbytes(1, True, True, {"HCCL_BUFFSIZE": "100"}) == 3 * 200 << 20
    assert hccl_environment.hccl_config(hccl_environment.PAIR_BUFFER_MB, {}) == {"hccl_buffer_size": 64}
    assert hccl_environment.hccl_config(hccl_environment.PAIR_BUFFER_MB, {"HCCL_BUFFSIZE": "64"}) == {}


def worker_config(environment: dict[str, str]) -> WorkerConfig:
    return WorkerConfig(
        name="prefill-0",
        role="prefill",
        server_ip="10.0.0.18",
        bind_address="10.0.0.18",
        device_ids=["0"],
        epoch=1,
        credentials=Credentials(b""),
        num_threads=3,
        kv_transport="auto",
        kv_port_range=ANY,
        engine=EngineConfig(model="m"),
        timeouts=Timeouts(),
        environment=environment,
    )


def test_a_rank_process_starts_with_it(monkeypatch: pytest.MonkeyPatch) -> None:
    """The variables are in a rank's environment before it imports anything."""
    started: dict[str, dict[str, str]] = {}

    async def start(*command: str, env: dict[str, str], **_: object) -> None:
        started["env"] = env
        raise InterruptedError

    monkeypatch.setattr(rank_process.asyncio, "create_subprocess_exec", start)
    monkeypatch.setenv("RANK_TABLE_FILE", "/etc/hccl.json")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "")
    config = worker_config({"HCCL_IF_IP": "10.0.0.18", "RANK_TABLE_FILE": ""})
    config = msgspec.json.decode(msgspec.json.encode(config), type=WorkerConfig)
    with pytest.raises(InterruptedError):
        asyncio.run(rank_process.RankProcess(config).start())
    env = started["env"]
    assert (env["HCCL_IF_IP"], env["OMP_NUM_THREADS"], env["CUDA_VISIBLE_DEVICES"]) == ("10.0.0.18", "3", "")
    assert "RANK_TABLE_FILE" not in env
    assert set(os.environ) - set(env) == {"RANK_TABLE_FILE"}


def test_a_cpu_in_an_npus_place_is_told(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    """If the table has NPUs but a CPU serves, rank 0 alone logs a warning."""
    monkeypatch.setattr(build_ranks, "bind", lambda name, device_ids, rank: CPU)
    for environment, num_told in (({}, 0), (OURS, 1)):
        config = worker_config(environment)
        follower = msgspec.structs.replace(config, ranks=msgspec.structs.replace(config.ranks, rank=1))
        assert build_ranks.device_of(config) == build_ranks.device_of(follower) == CPU
        assert caplog.text.count("computes on the CPU") == num_told


# ---- from the tables to messages and to the ranks' environment


def tables(folder: Path, server_ip: str = "127.0.0.1") -> dict[str, str]:
    ips = {0: "192.0.2.20", 1: "192.0.2.21"}
    generated = generate(
        prefill=[[0]], decode=[[1]], api_server=True, server_ip=server_ip, device_kind="npu", device_ips=ips
    )
    written = [str(path) for path in write(generated, folder)]
    return {"GLOBAL_RANK_TABLE_FILE_PATH": written[0], "RANK_TABLE_FILE_PATH": written[1]}


def checked(env: dict[str, str], capsys: pytest.CaptureFixture[str]) -> str:
    check_command.run(env)
    return " ".join(capsys.readouterr().out.replace("│", " ").split())


def test_check_shows_what_was_set_and_why(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    conf = tmp_path / "hccn.conf"
    monkeypatch.setattr(check_command, "HCCN_CONF", conf)
    env = {**tables(tmp_path), "HCCL_EXEC_TIMEOUT": "1800", "PD_CLUSTER_SERVE_KV_PORT_RANGE": "7000-7010"}
    said = checked(env, capsys)
    for shown in (
        "HCCL_EXEC_TIMEOUT 1800 set by you",
        "HCCL_HOST_SOCKET_PORT_RANGE 7000-7010",
        "HCCL_BUFFSIZE not set",
    ):
        assert shown in said
    assert "HCCL_DETERMINISTIC not set" in checked({**env, "PD_CLUSTER_SERVE_FAST_COLLECTIVES": "1"}, capsys)
    assert f"warning: {conf} is missing" in said.replace("- ", "-")
    conf.write_text("address_0=192.0.2.20\n")
    assert "is missing" not in checked(env, capsys)
    scheduler = str(tmp_path / "local_ranktable_127.0.0.1_host.json")
    assert "HCCL" not in checked({**env, "RANK_TABLE_FILE_PATH": scheduler, "NODE_PORTS": "8088,8089"}, capsys)
    assert "HCCL_CONNECT_TIMEOUT" not in checked({**env, "PD_CLUSTER_SERVE_DEVICE": "cpu"}, capsys)


@pytest.fixture
def handed_by_serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., dict[str, str]]:
    """Returns a function that starts a worker with `serve` options and returns its ranks' environment."""

    class Made(Exception):
        """Stops the start once the ranks' settings are complete."""

    def made(**fields: Any) -> None:
        raise Made(fields["environment"])

    for name in {*OURS, "HCCL_SOCKET_IFNAME", "HCCL_SOCKET_FAMILY"}:
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setattr(serve_command, "WorkerConfig", made)
    env = tables(tmp_path, "10.0.0.18")
    env["RANK_TABLE_FILE_PATH"] = str(next(tmp_path.glob("local_*_0.json")))

    def start(**options: Any) -> dict[str, str]:
        started = serve_command.start_of(ServeOptions(model=str(SHIPPED_MODEL), **options), env)
        with pytest.raises(Made) as caught:
            serve_command._run_worker(started, Credentials(b""))
        environment: dict[str, str] = caught.value.args[0]
        return environment

    return start


def test_serve_hands_it_to_workers_on_npus(
    handed_by_serve: Callable[..., dict[str, str]], monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setenv("RANK_TABLE_FILE", "/etc/hccl.json")
    got = handed_by_serve(collective_timeout=100.0, kv_port_range="7000-7010")
    assert got == {
        **OURS,
        "HCCL_CONNECT_TIMEOUT": "200",
        "HCCL_EXEC_TIMEOUT": "200",
        "HCCL_HOST_SOCKET_PORT_RANGE": "7000-7010",
        "RANK_TABLE_FILE": "",
    }
    fast = handed_by_serve(device="npu", fast_collectives=True)
    assert got.keys() - fast.keys() == {"HCCL_DETERMINISTIC"}
    assert "RANK_TABLE_FILE=/etc/hccl.json is not passed to the ranks" in caplog.text
    assert handed_by_serve(device="cpu") == {}
