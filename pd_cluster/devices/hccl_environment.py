"""HCCL's environment variables for the ranks of an instance on NPUs, from its rank table entry and deadlines.

HCCL reads its variables when torch_npu creates the first communicator, so they must be set when a rank process starts.
Variables that the operator has set are kept. Knows nothing of torch, devices or processes, nor whether an NPU is
present: an instance counts as one on NPUs if its devices have their own addresses in the table.

Ranges and defaults come from CANN's reference of environment variables for Atlas A2 and A3, and from torch_npu's.
"""

from __future__ import annotations

import ipaddress
import math
import os
from collections.abc import Callable, Mapping
from typing import NamedTuple

from pd_cluster.errors import flag_of
from pd_cluster.settings.process_settings import PortRange
from pd_cluster.settings.timeouts import Timeouts
from ranktable_tools import Server
from ranktable_tools.host_addresses import host_key, is_ip, is_loopback

# Size of one communicator's buffer in MB; the communicator takes twice as much device memory.
GROUP_BUFFER_MB = 200  # the buffer of an instance's ranks: HCCL's default, for all-reduces of whole steps
UNIT_BUFFER_MB = 200  # the buffer of a unit's members, for rows of whole steps
PAIR_BUFFER_MB = 64  # the buffer of a KV link, for two payloads; a rank has one for each rank that it is linked to

BUFFER, NIC, ADDRESS = "HCCL_BUFFSIZE", "HCCL_SOCKET_IFNAME", "HCCL_IF_IP"
EXPANSION = "HCCL_OP_EXPANSION_MODE"  # AIV: on vector cores, the fastest mode where it is supported
RANK_TABLE = "RANK_TABLE_FILE"  # torch_npu's variable; the cluster's own is RANK_TABLE_FILE_PATH
MIN_CONNECT_S, MAX_CONNECT_S = 120, 7200
MAX_EXEC_S = (1 << 31) - 1
ANY_PORT = "auto"


class HcclVariable(NamedTuple):
    """One variable. `value`: None to leave it to HCCL, "" to remove it."""

    name: str
    value: str | None
    reason: str
    is_yours: bool = False


class _Given(NamedTuple):
    server: Server
    bind_address: str
    timeouts: Timeouts
    ports: PortRange
    env: Mapping[str, str]
    is_fast: bool


def is_wanted(device: str, server: Server) -> bool:
    """Whether an instance with this --device may use HCCL.

    In the table, GPUs and CPU slots have the host's address, and NPUs have their own addresses.
    """
    own = host_key(server.server_ip)
    return device == "npu" or (device == "auto" and any(host_key(each.device_ip) != own for each in server.device))


def settings(
    server: Server,
    bind_address: str,
    timeouts: Timeouts,
    ports: PortRange,
    env: Mapping[str, str],
    is_fast: bool = False,
) -> list[HcclVariable]:
    """Returns all HCCL variables that the cluster sets or removes.

    `bind_address` is `server_ip` as a number. `is_fast`: `--fast-collectives`.
    """
    given = _Given(server, bind_address, timeouts, ports, env, is_fast)
    found = [_setting(name, choose, given) for name, choose in CHOICES.items()]
    if env.get(RANK_TABLE):
        reason = "taken away: HCCL would build its groups from that file; the tables are in *RANK_TABLE_FILE_PATH"
        found.append(HcclVariable(RANK_TABLE, "", reason))
    return found


def environment(found: list[HcclVariable]) -> dict[str, str]:
    """Returns a rank process's additional variables; an empty value removes a variable."""
    return {each.name: each.value for each in found if each.value is not None and not each.is_yours}


def hccl_config(buffer_mb: int, env: Mapping[str, str] = os.environ) -> dict[str, object]:
    """Returns `ProcessGroupHCCL.Options.hccl_config` of one communicator.

    Empty if the operator has set HCCL_BUFFSIZE, which this config would override.
    """
    return {} if env.get(BUFFER) else {"hccl_buffer_size": buffer_mb}


def device_nbytes(num_pairs: int, has_ranks: bool, has_unit: bool, env: Mapping[str, str] = os.environ) -> int:
    """Returns the device memory of a rank's communicators: for links, its instance and its unit."""
    sizes_mb, given = (PAIR_BUFFER_MB, GROUP_BUFFER_MB, UNIT_BUFFER_MB), env.get(BUFFER, "")
    pair_mb, group_mb, unit_mb = (int(given),) * 3 if given.isdecimal() else sizes_mb
    return 2 * (num_pairs * pair_mb + has_ranks * group_mb + has_unit * unit_mb) << 20


def _setting(name: str, choose: Callable[[_Given], tuple[str | None, str]], given: _Given) -> HcclVariable:
    yours = given.env.get(name)
    return HcclVariable(name, yours, "set by you", is_yours=True) if yours else HcclVariable(name, *choose(given))


def _address(given: _Given) -> tuple[str | None, str]:
    if given.env.get(NIC):
        return None, f"you have set {NIC}, and HCCL would ignore that if this variable were set"
    if not is_ip(given.bind_address) or is_loopback(given.bind_address):
        return None, f"server_ip {given.server.server_ip} is no address for other hosts: HCCL chooses a network card"
    return given.bind_address, "server_ip of the rank table: the host's side of every communicator"


def _family(given: _Given) -> tuple[str | None, str]:
    addresses = [each.device_ip for each in given.server.device]
    num_ipv6 = sum(is_ip(each) and ipaddress.ip_address(each).version == 6 for each in addresses)
    if not num_ipv6:
        return None, "HCCL's default, IPv4, like the table's device_ip"
    if num_ipv6 < len(addresses):
        return None, "device_ip of the rank table mix IPv4 and IPv6, and HCCL refuses such a group: correct them"
    if given.env.get(NIC):
        return None, f"{NIC}, which you have set, decides; this variable would choose among its addresses"
    return "AF_INET6", "device_ip of the rank table are IPv6; HCCL looks for IPv4 first"


def _connect_timeout(given: _Given) -> tuple[str | None, str]:
    seconds = min(max(_net_s(given.timeouts), MIN_CONNECT_S), MAX_CONNECT_S)
    return str(seconds), f"within HCCL's {MIN_CONNECT_S} to {MAX_CONNECT_S} s; the cluster's own deadlines are shorter"


def _exec_timeout(given: _Given) -> tuple[str | None, str]:
    return str(
        min(_net_s(given.timeouts), MAX_EXEC_S)
    ), "twice the longest deadline of a link or of an instance's ranks"


def _net_s(timeouts: Timeouts) -> int:
    """Returns whole seconds; the cluster's own deadlines are shorter, because their errors name the peer."""
    longest = max(timeouts.connect_timeout_s, timeouts.collective_timeout_s, timeouts.transfer_timeout_s)
    return max(1, math.ceil(2 * min(longest, MAX_EXEC_S)))


def _host_ports(given: _Given) -> tuple[str | None, str]:
    num_ports, num_ranks = len(list(given.ports)), len(given.server.device)
    if not given.ports.last:
        return ANY_PORT, "a restarted instance never waits for its predecessor's port"
    if num_ports <= num_ranks:
        return ANY_PORT, f"--kv-port-range {given.ports} has no more ports than the {num_ranks} ranks need"
    return str(given.ports), "--kv-port-range; HCCL takes the first that is free"


def _npu_ports(given: _Given) -> tuple[str | None, str]:
    return ANY_PORT, "two processes on one NPU cannot both use port 16666, the default; equal in all ranks of a group"


def _deterministic(given: _Given) -> tuple[str | None, str]:
    """Makes sums deterministic, which costs speed. According to CANN's reference, they take longer, and this setting
    takes precedence over HCCL_OP_EXPANSION_MODE=AIV, which may then have no effect.
    """
    if given.is_fast:
        return None, f"{flag_of('fast_collectives')}: HCCL's default, false; equal requests may have unequal answers"
    slower = f"slower, and overrides {EXPANSION}=AIV; {flag_of('fast_collectives')} lets HCCL choose"
    return "true", f"equal requests have equal answers: sums are added in one order; {slower}"


CHOICES: dict[str, Callable[[_Given], tuple[str | None, str]]] = {
    ADDRESS: _address,
    "HCCL_SOCKET_FAMILY": _family,
    "HCCL_CONNECT_TIMEOUT": _connect_timeout,
    "HCCL_EXEC_TIMEOUT": _exec_timeout,
    "HCCL_HOST_SOCKET_PORT_RANGE": _host_ports,
    "HCCL_NPU_SOCKET_PORT_RANGE": _npu_ports,
    BUFFER: lambda _: (
        None,
        f"each communicator sets its own: {GROUP_BUFFER_MB} MB for an instance, {UNIT_BUFFER_MB} for a unit, "
        f"{PAIR_BUFFER_MB} for a link",
    ),
    "P2P_HCCL_BUFFSIZE": lambda _: ("0", "a link sends through its own communicator, not a second one"),
    "HCCL_DETERMINISTIC": _deterministic,
}
"""Name -> (value, why)."""
