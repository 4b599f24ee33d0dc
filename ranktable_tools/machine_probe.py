"""Reads this machine's address, its kind of device, and the devices' addresses (npu.py does so for NPUs).

The parsers are pure functions of a program's output; the other functions run the programs, each with a time limit.
"""

from __future__ import annotations

import array
import fcntl
import glob
import re
import shutil
import socket
import struct
import subprocess
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Final, Literal

from ranktable_tools import vnpu
from ranktable_tools.errors import RankTableError
from ranktable_tools.host_addresses import is_ip, is_link_local, is_loopback
from ranktable_tools.npu import Npu, Run, find_npus

DeviceKind = Literal["npu", "gpu", "cpu"]

_PROGRAM_TIMEOUT_S: Final = 10.0
_SIOCGIFCONF: Final = 0x8912  # netdevice(7)
_MOST_ADDRESSES: Final = 256
_IF_INET6: Final = Path("/proc/net/if_inet6")
_ELSEWHERE: Final = (
    (socket.AF_INET, ("198.51.100.1", 9)),  # documentation addresses (RFC 5737, RFC 3849): nothing is sent
    (socket.AF_INET6, ("2001:db8::1", 9)),
)


def parse_nvidia_smi_list(text: str) -> list[int]:
    """Reads the `GPU 0: NVIDIA … (UUID: …)` lines of `nvidia-smi -L`; MIG slices are indented and not counted."""
    return [int(k) for k in re.findall(r"^GPU ([0-9]+):", text, flags=re.MULTILINE)]


def run_program(command: Sequence[str]) -> str | None:
    """Returns a program's standard output; None if it is missing, fails or takes too long."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_PROGRAM_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def detect_kind() -> DeviceKind:
    if shutil.which("npu-smi") or shutil.which("hccn_tool") or glob.glob(str(vnpu.DEV / "davinci*")):
        return "npu"
    if glob.glob(str(vnpu.DEV / vnpu.FILES)):
        return "npu"
    if shutil.which("nvidia-smi") or glob.glob("/dev/nvidia0"):
        return "gpu"
    return "cpu"


def default_server_ip() -> str | None:
    """Returns the source address of the default route; None without one. Opens a UDP socket, sends nothing."""
    for family, elsewhere in _ELSEWHERE:
        try:
            with socket.socket(family, socket.SOCK_DGRAM) as probe:
                probe.connect(elsewhere)
                address = str(probe.getsockname()[0])
        except OSError:
            continue
        if is_ip(address):
            return address
    return None


def global_addresses() -> list[str]:
    """Returns addresses at which other hosts may reach this machine: IPv4 or, without any, IPv6 addresses."""
    return _ipv4_addresses() or _ipv6_addresses()


def _ipv4_addresses() -> list[str]:
    size = 40  # size of a struct ifreq on 64-bit machines: a name of 16 bytes, then a struct sockaddr_in
    buffer = array.array("B", bytes(_MOST_ADDRESSES * size))
    request = struct.pack("iL", len(buffer), buffer.buffer_info()[0])  # a struct ifconf
    try:
        with socket.socket(socket.AF_INET, socket.SOCK_DGRAM) as probe:
            nbytes = struct.unpack("iL", fcntl.ioctl(probe, _SIOCGIFCONF, request))[0]
    except OSError:
        return []
    found = [socket.inet_ntoa(buffer[at + 20 : at + 24].tobytes()) for at in range(0, nbytes, size)]
    return [each for each in dict.fromkeys(found) if is_ip(each) and not is_loopback(each) and not is_link_local(each)]


def _ipv6_addresses() -> list[str]:
    try:
        rows = [line.split() for line in _IF_INET6.read_text().splitlines()]
    except OSError:
        return []
    found = [socket.inet_ntop(socket.AF_INET6, bytes.fromhex(row[0])) for row in rows]
    return [each for each in dict.fromkeys(found) if is_ip(each) and not is_loopback(each) and not is_link_local(each)]


def find_devices(
    kind: DeviceKind,
    device_ids: Sequence[int],
    server_ip: str,
    given: Mapping[int, str] | None = None,
    run: Run = run_program,
    conf: Path | None = None,
) -> dict[int, Npu]:
    """Maps each device_id to its address, and to its super_device_id if it is an NPU that has one. `given` addresses
    are not looked up.

    A vNPU has its host's address. Raises RankTableError for a device that is missing or has no address.
    """
    known = given or {}
    if kind == "npu":
        parts = vnpu.addresses([i for i in device_ids if vnpu.is_vnpu(i)], known, server_ip)
        whole = find_npus([i for i in device_ids if i not in parts], known, run, conf)
        return {i: whole[i] if i in whole else Npu(parts[i]) for i in device_ids}
    if kind == "gpu":
        _refuse_absent_gpus([device_id for device_id in device_ids if device_id not in known], run)
    return {device_id: Npu(known.get(device_id, server_ip)) for device_id in device_ids}


def _refuse_absent_gpus(device_ids: Sequence[int], run: Run) -> None:
    """Refuses missing GPUs if nvidia-smi can list GPUs; without the driver, a machine may still write a table."""
    present = parse_nvidia_smi_list(run(["nvidia-smi", "-L"]) or "")
    absent = [device_id for device_id in device_ids if device_id not in present]
    if present and absent:
        expected = f"one of {', '.join(map(str, present))}"
        raise RankTableError("nvidia-smi -L", "GPU", absent[0], expected, "or use --device cpu")
