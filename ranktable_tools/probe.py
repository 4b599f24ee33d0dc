"""What this machine has: its address, its kind of device, each device's address.

The parsers are pure functions of a program's text; the rest runs the programs, each with a time limit. An
address may be IPv6, so a line is cut at its first colon only.
"""

from __future__ import annotations

import glob
import re
import shutil
import socket
import subprocess
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Final, Literal

from ranktable_tools.errors import MISSING, RankTableError
from ranktable_tools.hosts import is_ip

DeviceKind = Literal["npu", "gpu", "cpu"]
Run = Callable[[Sequence[str]], "str | None"]

HCCN_CONF: Final = Path("/etc/hccn.conf")
_HCCN_TOOL: Final = "/usr/local/Ascend/driver/tools/hccn_tool"  # where the driver puts it, often not on PATH
_PROGRAM_TIMEOUT_S: Final = 10.0
_ELSEWHERE: Final = (
    (socket.AF_INET, ("198.51.100.1", 9)),  # documentation addresses (RFC 5737, RFC 3849): nothing is sent
    (socket.AF_INET6, ("2001:db8::1", 9)),
)


def parse_hccn_tool(text: str) -> str | None:
    """`ipaddr:10.0.0.10` of `hccn_tool -i N -ip -g`, or the same line of `-vnic -g`."""
    for line in text.splitlines():
        key, _, value = line.partition(":")
        address = value.strip().partition("/")[0]
        if "mask" not in key.lower() and is_ip(address):
            return address
    return None


def parse_hccn_conf(text: str) -> dict[int, str]:
    """device_id -> address, from the `address_0=10.0.0.10` lines."""
    found = {}
    for line in text.splitlines():
        key, _, value = line.strip().partition("=")
        match = re.fullmatch(r"address_([0-9]+)", key.strip())
        if match and is_ip(value.strip()):
            found[int(match[1])] = value.strip()
    return found


def parse_npu_smi_list(text: str) -> list[int]:
    """The `NPU ID : k` lines of `npu-smi info -l`."""
    return [int(k) for k in re.findall(r"^\s*NPU ID\s*:\s*([0-9]+)\s*$", text, flags=re.MULTILINE)]


def parse_npu_smi_map(text: str) -> list[int]:
    """Physical ids of `npu-smi info -m`, logic ids where there is no such column.

    Columns are told apart by two or more spaces; a row whose logic id is `-` is the card's controller.
    """
    rows = [re.split(r"\s{2,}", line.strip()) for line in text.splitlines() if line.strip()]
    header = next((row for row in rows if "NPU ID" in row and "Chip Logic ID" in row), None)
    if header is None:
        return []
    logic = header.index("Chip Logic ID")
    physical = header.index("Chip Phy-ID") if "Chip Phy-ID" in header else logic
    chips = [row for row in rows if len(row) == len(header) and row[logic].isdigit()]
    return [int(row[physical]) for row in chips if row[physical].isdigit()]


def parse_nvidia_smi_list(text: str) -> list[int]:
    """The `GPU 0: NVIDIA … (UUID: …)` lines of `nvidia-smi -L`; MIG slices are indented and not counted."""
    return [int(k) for k in re.findall(r"^GPU ([0-9]+):", text, flags=re.MULTILINE)]


def run_program(command: Sequence[str]) -> str | None:
    """Its standard output; None when it is missing, fails or takes too long."""
    try:
        done = subprocess.run(
            command, capture_output=True, text=True, errors="replace", timeout=_PROGRAM_TIMEOUT_S, check=False
        )
    except (OSError, subprocess.TimeoutExpired):
        return None
    return done.stdout if done.returncode == 0 else None


def detect_kind() -> DeviceKind:
    if shutil.which("npu-smi") or shutil.which("hccn_tool") or glob.glob("/dev/davinci*"):
        return "npu"
    if shutil.which("nvidia-smi") or glob.glob("/dev/nvidia0"):
        return "gpu"
    return "cpu"


def default_server_ip() -> str | None:
    """The address from which the default route sends; None without one. Opens a UDP socket, sends nothing."""
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


def device_ips(
    kind: DeviceKind,
    device_ids: Sequence[int],
    server_ip: str,
    run: Run = run_program,
    conf: Path = HCCN_CONF,
) -> dict[int, str]:
    """device_id -> address. Raises RankTableError for a device that isn't there or has no address."""
    if kind == "npu":
        return _npu_ips(device_ids, run, conf)
    if kind == "gpu":
        _refuse_absent_gpus(device_ids, run)
    return dict.fromkeys(device_ids, server_ip)


def _npu_ips(device_ids: Sequence[int], run: Run, conf: Path) -> dict[int, str]:
    configured = _read_conf(conf)
    found = {}
    for device_id in device_ids:
        address = _ask_hccn_tool(device_id, run) or configured.get(device_id)
        if address is None:
            raise _no_address(device_id, run, configured, conf)
        found[device_id] = address
    return found


def _ask_hccn_tool(device_id: int, run: Run) -> str | None:
    tool = shutil.which("hccn_tool") or _HCCN_TOOL
    for what in ("-ip", "-vnic"):  # A3 machines answer the second
        text = run([tool, "-i", str(device_id), what, "-g"])
        address = parse_hccn_tool(text) if text else None
        if address:
            return address
    return None


def _read_conf(conf: Path) -> dict[int, str]:
    try:
        return parse_hccn_conf(conf.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return {}


def _no_address(device_id: int, run: Run, configured: Mapping[int, str], conf: Path) -> RankTableError:
    present = parse_npu_smi_map(run(["npu-smi", "info", "-m"]) or "")
    present = present or parse_npu_smi_list(run(["npu-smi", "info", "-l"]) or "")
    seen = f"npu-smi sees {', '.join(map(str, present))}" if present else "npu-smi sees no device"
    return RankTableError(
        str(conf) if configured else "hccn_tool",
        f"address_{device_id}" if configured else f"ipaddr of device {device_id}",
        MISSING,
        f"the address of NPU {device_id} from hccn_tool -ip, -vnic or {conf} ({seen})",
        f"mount {HCCN_CONF} and hccn_tool into the container, or say --device-ip {device_id}=ADDRESS",
    )


def _refuse_absent_gpus(device_ids: Sequence[int], run: Run) -> None:
    """Only as far as nvidia-smi can tell: a table may be written on a machine without the driver."""
    present = parse_nvidia_smi_list(run(["nvidia-smi", "-L"]) or "")
    absent = [device_id for device_id in device_ids if device_id not in present]
    if present and absent:
        expected = f"one of {', '.join(map(str, present))}"
        raise RankTableError("nvidia-smi -L", "GPU", absent[0], expected, "or say --device cpu")
