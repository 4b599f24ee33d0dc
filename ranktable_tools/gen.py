"""Generates the tables of one machine: its part of the global table, and a local table for each of its instances.

Each machine of a cluster generates its own tables; `merge` combines the global parts.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from ranktable_tools import machine_probe, vnpu
from ranktable_tools.errors import RankTableError
from ranktable_tools.host_addresses import HOST_EXPECTED, in_file_name, is_shared_host
from ranktable_tools.machine_probe import DeviceKind
from ranktable_tools.npu import Npu
from ranktable_tools.table_files import PRIVATE, Access, write_file
from ranktable_tools.table_rules import device_conflicts, entries
from ranktable_tools.table_types import Device, LocalRankTable, RankTable, Server, local_table, server_group

_ARGUMENTS = "gen"


@dataclass(frozen=True)
class Generated:
    """The result of `generate`. `locals`: file name -> local table.

    A group of the global table without instances has count "0".
    """

    server_ip: str
    global_table: RankTable
    locals: dict[str, LocalRankTable]

    @property
    def global_name(self) -> str:
        return f"global_ranktable_{in_file_name(self.server_ip)}.json"


def generate(
    *,
    prefill: Sequence[Sequence[int]],
    decode: Sequence[Sequence[int]],
    api_server: bool,
    server_ip: str,
    device_kind: DeviceKind,
    device_ips: Mapping[int, str] | None = None,
) -> Generated:
    """Generates one machine's tables. `prefill` and `decode`: the device ids of each instance, in order of rank.

    Missing `device_ips` are read from the machine. If NPUs have a super_device_id, all tables are of version 1.2, as in
    HCCL. Raises RankTableError.
    """
    if not is_shared_host(server_ip):
        raise RankTableError(_ARGUMENTS, "--server-ip", server_ip, HOST_EXPECTED)
    _refuse_wrong_ids(prefill, decode)
    if device_kind == "npu":
        vnpu.refuse_split(dict(_instances(prefill, decode)))
    if not (prefill or decode or api_server):
        expected = "--prefill-server-list, --decode-server-list or --api-server"
        raise RankTableError(_ARGUMENTS, "instances", "none", expected)
    devices = _devices([*prefill, *decode], server_ip, device_kind, device_ips or {})
    prefill_servers = tuple(_server(server_ip, ids, devices) for ids in prefill)
    decode_servers = tuple(_server(server_ip, ids, devices) for ids in decode)
    host = Server(server_ip, server_ip)
    groups = (
        server_group("scheduler", (host,) if api_server else ()),
        server_group("prefill", prefill_servers),
        server_group("decode", decode_servers),
    )
    version = "1.2" if any(device.super_device_id for device in devices.values()) else "1.0"
    table = RankTable(version, "completed", groups)
    for fault in device_conflicts(entries(table)):  # a table with such conflicts would be refused by every reader
        raise replace(fault, file=_ARGUMENTS).error()
    names = _local_names(server_ip, [*prefill, *decode])
    servers = dict(zip(names, prefill_servers + decode_servers))
    if api_server:
        servers[f"local_ranktable_{in_file_name(server_ip)}_host.json"] = host
    tables = {name: local_table(version, server) for name, server in servers.items()}
    return Generated(server_ip, table, tables)


def write(generated: Generated, save_dir: Path, access: Access = PRIVATE) -> list[Path]:
    """Writes the global table first. Creates `save_dir`; replaces files of the same name, each atomically.
    Raises OSError.
    """
    written = [write_file(save_dir / generated.global_name, generated.global_table.to_json(), access)]
    for name, table in generated.locals.items():
        written.append(write_file(save_dir / name, table.to_json(), access))
    return written


def _refuse_wrong_ids(prefill: Sequence[Sequence[int]], decode: Sequence[Sequence[int]]) -> None:
    owners: dict[int, str] = {}  # device_id -> its instance
    for place, ids in _instances(prefill, decode):
        if not ids:
            raise RankTableError(_ARGUMENTS, place, "no device", "device ids, such as 4,5")
        for device_id in ids:
            if not 0 <= device_id < 10**9:
                raise RankTableError(_ARGUMENTS, place, device_id, "a device id of 0 or more")
            if device_id in owners:
                expected = f"a device that no other instance uses ({owners[device_id]} does)"
                raise RankTableError(_ARGUMENTS, place, device_id, expected)
            owners[device_id] = place


def _instances(
    prefill: Sequence[Sequence[int]], decode: Sequence[Sequence[int]]
) -> Iterator[tuple[str, Sequence[int]]]:
    for option, instances in (("--prefill-server-list", prefill), ("--decode-server-list", decode)):
        for index, ids in enumerate(instances):
            yield f"{option}[{index}]", ids


def _devices(
    instances: Sequence[Sequence[int]], server_ip: str, kind: DeviceKind, given: Mapping[int, str]
) -> dict[int, Npu]:
    used = [device_id for ids in instances for device_id in ids]
    for device_id, address in given.items():
        if device_id not in used:
            raise RankTableError(_ARGUMENTS, "--device-ip", device_id, "a device of an instance")
        if not is_shared_host(address):
            raise RankTableError(_ARGUMENTS, f"--device-ip {device_id}", address, HOST_EXPECTED)
    return machine_probe.find_devices(kind, used, server_ip, given) if used else {}


def _server(server_ip: str, device_ids: Sequence[int], devices: Mapping[int, Npu]) -> Server:
    found = [(str(i), devices[i]) for i in device_ids]
    ranked = (Device(i, one.address, str(rank), one.super_device_id) for rank, (i, one) in enumerate(found))
    return Server(server_ip, server_ip, tuple(ranked))


def _local_names(server_ip: str, instances: Sequence[Sequence[int]]) -> list[str]:
    """Returns the document's names, `…_45.json` for 4,5 and `…_1011.json` for 10,11.

    Instances of this machine that would have the same name, such as 1,12 and 11,2, or 4,5 and 45, get dashes between
    ids.
    """
    plain = ["".join(map(str, ids)) for ids in instances]
    dashed = ["-".join(map(str, ids)) for ids in instances]
    names = [dashed[at] if plain.count(name) > 1 else name for at, name in enumerate(plain)]
    return [f"local_ranktable_{in_file_name(server_ip)}_{name}.json" for name in names]
