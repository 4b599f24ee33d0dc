"""Checks that the entries of one table, or of several tables that are being merged, fit together.

schema.py has already checked each field. Knows nothing of files' contents or of ports.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Iterator, Sequence
from typing import NamedTuple

from ranktable_tools.errors import MISSING, Fault
from ranktable_tools.host_addresses import host_key, is_loopback, machine_key
from ranktable_tools.table_types import ROLES, Device, RankTable, Role, Server
from ranktable_tools.vnpu import is_vnpu

_OWN_ADDRESS = "give each machine its own address: `pd-ranktable gen --server-ip ADDRESS`"


class Entry(NamedTuple):
    """One instance, and its place in a table."""

    file: str
    field: str
    role: Role
    position: int  # index in its group's server_list
    server: Server

    def seen_from(self, file: str) -> str:
        return self.field if self.file == file else f"{self.file} {self.field}"


def entries(table: RankTable) -> list[Entry]:
    found = []
    for group_index, (role, group) in enumerate(zip(ROLES, table.server_group_list)):
        for position, server in enumerate(group.server_list):
            field = f"server_group_list[{group_index}].server_list[{position}]"
            found.append(Entry(table.file, field, role, position, server))
    return found


def device_conflicts(all_entries: Sequence[Entry]) -> Iterator[Fault]:
    """Checks that each device of a host belongs to only one instance, and each NPU's address to only one device."""
    owners: dict[tuple[str, str], tuple[Entry, int]] = {}  # (host, device_id) -> entry, index in its device list
    for entry in all_entries:
        host = machine_key(entry.server.server_ip)
        for index, device in enumerate(entry.server.device):
            owner, at = owners.setdefault((host, device.device_id), (entry, index))
            if (owner, at) != (entry, index):
                place = f"{owner.seen_from(entry.file)}.device[{at}]"
                expected = f"a device of host {entry.server.server_ip} that no other instance uses ({place} does)"
                field = f"{entry.field}.device[{index}].device_id"
                way_out = _OWN_ADDRESS if is_loopback(entry.server.server_ip) else ""
                yield Fault(entry.file, field, device.device_id, expected, way_out)
    yield from _address_conflicts(all_entries)


def _address_conflicts(all_entries: Sequence[Entry]) -> Iterator[Fault]:
    """Checks that no two hosts have the same device_ip, and that no device_ip is another host's server_ip.

    On one host, either all devices have the same address, the host's (GPU, CPU), or all have different ones (NPU). Next
    to NPUs, vNPUs may have the host's address.
    """
    owners: dict[str, tuple[str, str, Entry]] = {}  # device_ip -> host, device_id, entry
    hosts = {host_key(entry.server.server_ip): entry for entry in all_entries}
    shared = _hosts_with_one_address(all_entries)
    for entry in all_entries:
        host = host_key(entry.server.server_ip)
        for index, device in enumerate(entry.server.device):
            address = host_key(device.device_ip)
            if _is_vnpu_without_address(device, host):
                continue
            field = f"{entry.field}.device[{index}].device_ip"
            if address != host and address in hosts and not is_loopback(device.device_ip):
                expected = f"an address of this host's ({hosts[address].seen_from(entry.file)}.server_ip is this one)"
                yield Fault(entry.file, field, device.device_ip, expected)
                continue
            owner_host, owner_id, owner = owners.setdefault(address, (host, device.device_id, entry))
            same_device = owner_host == host and owner_id == device.device_id
            if same_device or (owner_host == host and host in shared) or is_loopback(device.device_ip):
                continue
            expected = f"an address of its own (device {owner_id} in {owner.seen_from(entry.file)} has this one)"
            yield Fault(entry.file, field, device.device_ip, expected)


def _hosts_with_one_address(all_entries: Sequence[Entry]) -> set[str]:
    addresses: dict[str, set[str]] = defaultdict(set)  # host -> its devices' addresses
    for entry in all_entries:
        host = host_key(entry.server.server_ip)
        for device in entry.server.device:
            if not _is_vnpu_without_address(device, host):
                addresses[host].add(host_key(device.device_ip))
    return {host for host, found in addresses.items() if len(found) == 1}


def _is_vnpu_without_address(device: Device, host: str) -> bool:
    return is_vnpu(int(device.device_id)) and host_key(device.device_ip) == host


def super_pod_faults(all_entries: Sequence[Entry], num_super_pods: int) -> Iterator[Fault]:
    """Checks that either all devices have a super_device_id or none has, and that ids are unique in their pod.

    HCCL refuses tables in which only some devices have one. With several super pods, ids are compared within each host.
    """
    devices = [(entry, at, each) for entry in all_entries for at, each in enumerate(entry.server.device)]
    named = [(entry, at, each) for entry, at, each in devices if each.super_device_id is not None]
    owners: dict[tuple[str, str | None], tuple[str, Entry, int]] = {}  # (pod, id) -> host and device, entry, index
    for entry, at, device in named:
        host = machine_key(entry.server.server_ip)
        one = f"{host} {device.device_id}"
        pod = host if num_super_pods > 1 else ""
        owner, its_entry, its_at = owners.setdefault((pod, device.super_device_id), (one, entry, at))
        if owner != one:
            place = f"{its_entry.seen_from(entry.file)}.device[{its_at}]"
            field = f"{entry.field}.device[{at}].super_device_id"
            yield Fault(entry.file, field, device.super_device_id, f"an id of its own ({place} has this one)")
    for entry, at, device in devices:
        if named and device.super_device_id is None:
            first, its_at, _ = named[0]
            place = f"{first.seen_from(entry.file)}.device[{its_at}]"
            expected = f"one for every device, because {place} has one; or for none"
            way_out = "write the tables of all machines with the same `pd-ranktable gen`"
            field = f"{entry.field}.device[{at}].super_device_id"
            yield Fault(entry.file, field, MISSING, expected, way_out)


def num_super_pods(table: RankTable) -> int:
    """Counts the super pods that a table of Ascend's tools lists."""
    listed = table.extra.get("super_pod_list")
    return len(listed) if isinstance(listed, list) else 0


def gaps(table: RankTable) -> Iterator[Fault]:
    """Yields a fault for each role without which the table cannot be used."""
    way_outs = (
        "run gen with --api-server on one machine, then merge",
        "run gen with --prefill-server-list, then merge",
        "run gen with --decode-server-list, then merge",
    )
    for index, (role, group) in enumerate(zip(ROLES, table.server_group_list)):
        if not group.server_list:
            field = f"server_group_list[{index}].server_count"
            wanted = "exactly one scheduler" if role == "scheduler" else f"at least one {role} instance"
            yield Fault(table.file, field, group.server_count, wanted, way_outs[index])
    yield from unreachable_hosts(entries(table))
    yield from super_pod_faults(entries(table), num_super_pods(table))


def unreachable_hosts(all_entries: Sequence[Entry]) -> Iterator[Fault]:
    """Yields uses of `localhost`, which every host resolves to itself, unless all instances are on one host."""
    elsewhere = [entry.server.server_ip for entry in all_entries if not is_loopback(entry.server.server_ip)]
    for entry in all_entries:
        if elsewhere and is_loopback(entry.server.server_ip):
            expected = f"an address that {elsewhere[0]} can reach"
            yield Fault(entry.file, f"{entry.field}.server_ip", entry.server.server_ip, expected, _OWN_ADDRESS)
