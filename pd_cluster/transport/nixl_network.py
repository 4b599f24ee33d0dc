"""Restricts UCX to the cluster's network interface. UCX variables in the environment take precedence."""

from __future__ import annotations

import fcntl
import ipaddress
import os
import socket
import struct
from pathlib import Path

from pd_cluster.errors import LinkError

DEVICES = "UCX_NET_DEVICES"
SIOCGIFADDR = 0x8915  # linux/sockios.h
QUIET = {"UCX_LOG_LEVEL": "error", "NIXL_LOG_LEVEL": "WARN"}  # NIXL logs to stdout


def bind_ucx(host: str) -> None:
    """Makes later agents listen on the interface with this address. Raises LinkError."""
    for name, value in QUIET.items():
        os.environ.setdefault(name, value)
    if not os.environ.get(DEVICES):
        os.environ[DEVICES] = ",".join(devices_at(host))


def devices_at(host: str, net: Path = Path("/sys/class/net")) -> list[str]:
    """Returns UCX's names of the network interface with this address and of its RDMA devices. Raises LinkError."""
    interface = interface_of(host)
    folder = net / interface / "device" / "infiniband"
    port = net / interface / "dev_port"
    number = int(port.read_text()) + 1 if port.exists() else 1
    rdma = sorted(each.name for each in folder.iterdir()) if folder.is_dir() else []
    return [interface, *(f"{name}:{number}" for name in rdma)]


def interface_of(host: str) -> str:
    """Raises LinkError."""
    address = ipaddress.ip_address(socket.gethostbyname(host) if ":" not in host else host)
    if address.is_loopback:
        return "lo"
    found = _ipv6() if address.version == 6 else _ipv4()
    if address not in found:
        raise LinkError(f"no network interface has the address {host}; name UCX's devices in {DEVICES}")
    return found[address]


def _ipv4() -> dict[ipaddress.IPv4Address | ipaddress.IPv6Address, str]:
    found: dict[ipaddress.IPv4Address | ipaddress.IPv6Address, str] = {}
    with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as any_socket:
        for _, name in socket.if_nameindex():
            try:
                answer = fcntl.ioctl(any_socket, SIOCGIFADDR, struct.pack("256s", name.encode()))
            except OSError:  # the interface has no address
                continue
            found[ipaddress.IPv4Address(answer[20:24])] = name
    return found


def _ipv6() -> dict[ipaddress.IPv4Address | ipaddress.IPv6Address, str]:
    path = Path("/proc/net/if_inet6")
    lines = [line.split() for line in path.read_text().splitlines()] if path.exists() else []
    return {ipaddress.IPv6Address(bytes.fromhex(each[0])): each[-1] for each in lines}
