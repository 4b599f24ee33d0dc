"""Finds the NPUs of this machine, with their addresses and their names in a super pod (`super_device_id`).

The parsers are pure functions of the output of hccn_tool and npu-smi, and of /etc/hccn.conf, on Atlas A2 and A3
machines. An address may be IPv6, so lines are split only at their first colon. A device_id is a chip's physical id, as
in hccn_tool's `-i`. An A2 card has one chip. An A3 card has two, and its machine is part of a super pod, in which chips
reach each other through their vNICs and HCCL requires the SDID. Knows nothing of tables.
"""

from __future__ import annotations

import re
import shutil
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import Final, NamedTuple, Protocol

from ranktable_tools.errors import MISSING, RankTableError
from ranktable_tools.host_addresses import is_ip

HCCN_CONF: Final = Path("/etc/hccn.conf")
_HCCN_TOOL: Final = "/usr/local/Ascend/driver/tools/hccn_tool"  # installed by the driver, often not on PATH
_NPU_SMI: Final = "/usr/local/sbin/npu-smi"
_INFERENCE_CHIP: Final = re.compile(r"Ascend ?310")
_NO_SDID: Final = 0xFFFFFFFF
_IPV4, _IPV6, _VNIC = ("-ip",), ("-ip", "-inet6"), ("-vnic",)
_OF_A_CARD: Final = (_IPV4, _IPV6, _VNIC)  # an A2 chip's vNIC reaches no other machine
_OF_A_SUPER_POD: Final = (_VNIC, _IPV4, _IPV6)


class Run(Protocol):
    """Runs a program; returns its standard output, or None if it fails."""

    def __call__(self, command: Sequence[str], /) -> str | None: ...


class Chip(NamedTuple):
    """A row of `npu-smi info -m` for a computing chip. `npu_id` is the card; `chip_id` counts the card's chips."""

    npu_id: int
    chip_id: int
    logic_id: int
    phy_id: int | None = None  # None: the table lacks that column

    @property
    def device_ids(self) -> list[int]:
        """Its possible device ids: the physical id or, if that is unknown (in a container), `npu_id` and `logic_id`."""
        return sorted({self.npu_id, self.logic_id}) if self.phy_id is None else [self.phy_id]


class Npu(NamedTuple):
    address: str
    super_device_id: str | None = None


def parse_hccn_tool(text: str) -> str | None:
    """Reads `ipaddr:10.0.0.10` from `hccn_tool -i N -ip -g`, or the same line of `-ip -inet6 -g` and `-vnic -g`."""
    for line in text.splitlines():
        key, _, value = line.partition(":")
        address = value.strip().partition("/")[0]
        if "mask" not in key.lower() and is_ip(address):
            return address
    return None


def parse_hccn_conf(text: str) -> dict[int, str]:
    """Maps device_id to address, from the `address_0=10.0.0.10` lines, or the `IPv6address_0=2001:db8::10` ones."""
    found: dict[str, dict[int, str]] = {"": {}, "IPv6": {}}
    for line in text.splitlines():
        key, _, value = line.strip().partition("=")
        match = re.fullmatch(r"(|IPv6)address_([0-9]+)", key.strip())
        if match and is_ip(value.strip()):
            found[match[1]][int(match[2])] = value.strip()
    return {**found["IPv6"], **found[""]}


def parse_npu_smi_list(text: str) -> list[int]:
    """Reads the `NPU ID : k` lines of `npu-smi info -l`."""
    return [int(k) for k in re.findall(r"^\s*NPU ID\s*:\s*([0-9]+)\s*$", text, flags=re.MULTILINE)]


def parse_npu_smi_count(text: str) -> int | None:
    """Reads the number of cards: the `Total Count : N` line of `npu-smi info -l`."""
    match = re.search(r"^\s*Total Count\s*:\s*([0-9]+)\s*$", text, flags=re.MULTILINE)
    return int(match[1]) if match else None


def parse_npu_smi_map(text: str) -> list[Chip]:
    """Reads the chips of `npu-smi info -m`.

    Columns are separated by two or more spaces. A row with the logic id `-` is the card's controller. A row with -1 is
    a chip that is down, and its other numbers have no meaning.
    """
    rows = [re.split(r"\s{2,}", line.strip()) for line in text.splitlines() if line.strip()]
    header = next((row for row in rows if {"NPU ID", "Chip ID", "Chip Logic ID"} <= set(row)), None)
    if header is None:
        return []
    names = [name for name in ("NPU ID", "Chip ID", "Chip Logic ID", "Chip Phy-ID") if name in header]
    chips = [[row[header.index(name)] for name in names] for row in rows if len(row) == len(header)]
    return [Chip(*map(int, chip)) for chip in chips if all(map(_is_count, chip))]


def parse_npu_smi_chip_names(text: str) -> list[str]:
    """Reads the chip's name in each row of `npu-smi info -m`, such as `Ascend 910B3`; a card's controller is left
    out.
    """
    return [" ".join(name.split()) for name in re.findall(r"\b(Ascend ?[0-9]\w*)\s*$", text, flags=re.MULTILINE)]


def parse_spod_info(text: str) -> str | None:
    """Reads the `SDID : 16777216` of `npu-smi info -t spod-info -i N -c M`; None if a chip is in no super pod."""
    match = re.search(r"^\s*SDID\s*:\s*([0-9]{1,10})\s*$", text, flags=re.MULTILINE)
    return str(int(match[1])) if match and int(match[1]) < _NO_SDID else None


def find_npus(
    device_ids: Sequence[int], given: Mapping[int, str], run: Run, conf: Path | None = None
) -> dict[int, Npu]:
    """Finds the NPUs; `given` addresses are used unchanged.

    Raises RankTableError for a device that is missing, has no address, or does not report its place in the super pod
    while others of this machine do, and for a machine whose chips no worker can use (310P).
    """
    seen = _NpuSmiReport.look(run)
    seen.refuse_other_chips()
    in_super_pod = _super_device_ids(device_ids, seen, run)
    addresses = _addresses([i for i in device_ids if i not in given], in_super_pod, seen, run, conf or HCCN_CONF)
    return {i: Npu({**addresses, **given}[i], in_super_pod.get(i)) for i in device_ids}


class _NpuSmiReport(NamedTuple):
    """npu-smi's reports on this machine; empty if npu-smi is missing or fails."""

    chips: list[Chip]
    cards: list[int]
    num_cards: int | None
    names: list[str]

    @staticmethod
    def look(run: Run) -> _NpuSmiReport:
        listed = run([_npu_smi(), "info", "-l"]) or ""
        mapped = run([_npu_smi(), "info", "-m"]) or ""
        chips, cards = parse_npu_smi_map(mapped), parse_npu_smi_list(listed)
        return _NpuSmiReport(chips, cards, parse_npu_smi_count(listed), parse_npu_smi_chip_names(mapped))

    def refuse_other_chips(self) -> None:
        for name in self.names:
            if _INFERENCE_CHIP.match(name):
                expected = "a chip of Atlas A2 or A3; workers have no operators for the 310 series, and it has no HCCN"
                raise RankTableError("npu-smi info -m", "Chip Name", name, expected, "use --device cpu on this machine")

    @property
    def device_ids(self) -> list[int]:
        return sorted({i for chip in self.chips for i in chip.device_ids}) or self.cards

    def __str__(self) -> str:
        if not self.device_ids:
            return "npu-smi sees no device"
        counted = f" on {self.num_cards} cards" if self.num_cards else ""
        return f"npu-smi sees {', '.join(map(str, self.device_ids))}{counted}"


def _super_device_ids(device_ids: Sequence[int], seen: _NpuSmiReport, run: Run) -> dict[int, str]:
    """Maps device_id to SDID; empty on a machine outside any super pod."""
    # npu-smi reports physical ids on all machines of super pods
    chips = {chip.phy_id: chip for chip in seen.chips if chip.phy_id is not None}
    answers = {i: parse_spod_info(run(_ask_super_pod(chips[i])) or "") for i in device_ids if i in chips}
    found = {i: sdid for i, sdid in answers.items() if sdid is not None}
    lacking = [i for i in device_ids if i not in found]
    if found and lacking:
        if lacking[0] not in chips:
            raise _not_there(lacking[0], seen)
        command = " ".join(("npu-smi", *_ask_super_pod(chips[lacking[0]])[1:]))
        expected = f"the place of NPU {lacking[0]} in its super pod, because NPU {next(iter(found))} has one"
        way_out = "HCCL requires a super_device_id for all devices or for none; see `npu-smi info -t health`"
        raise RankTableError(command, "SDID", MISSING, expected, way_out)
    return found


def _ask_super_pod(chip: Chip) -> list[str]:
    return [_npu_smi(), "info", "-t", "spod-info", "-i", str(chip.npu_id), "-c", str(chip.chip_id)]


def _addresses(
    device_ids: Sequence[int], in_super_pod: Collection[int], seen: _NpuSmiReport, run: Run, conf: Path
) -> dict[int, str]:
    configured = _read_conf(conf)
    found = {}
    for device_id in device_ids:
        address = _ask_hccn_tool(device_id, _OF_A_SUPER_POD if device_id in in_super_pod else _OF_A_CARD, run)
        if address is None and seen.device_ids and device_id not in seen.device_ids:
            raise _not_there(device_id, seen)
        address = address or configured.get(device_id)
        if address is None:
            raise _no_address(device_id, seen, configured, conf)
        found[device_id] = address
    return found


def _ask_hccn_tool(device_id: int, kinds: Sequence[tuple[str, ...]], run: Run) -> str | None:
    for what in kinds:
        text = run([hccn_tool(), "-i", str(device_id), *what, "-g"])
        address = parse_hccn_tool(text) if text else None
        if address:
            return address
    return None


def hccn_tool() -> str:
    """Returns the path at which hccn_tool is expected, even if it does not exist."""
    return shutil.which("hccn_tool") or _HCCN_TOOL


def _npu_smi() -> str:
    return shutil.which("npu-smi") or _NPU_SMI


def _read_conf(conf: Path) -> dict[int, str]:
    try:
        return parse_hccn_conf(conf.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return {}


def _is_count(text: str) -> bool:
    return text.isascii() and text.isdigit()


def _not_there(device_id: int, seen: _NpuSmiReport) -> RankTableError:
    return RankTableError(
        "npu-smi info -m",
        f"NPU {device_id}",
        MISSING,
        f"a device that exists and is up ({seen})",
        f"use one of these, or give --device-ip {device_id}=ADDRESS for a device that this container cannot see",
    )


def _no_address(device_id: int, seen: _NpuSmiReport, configured: Mapping[int, str], conf: Path) -> RankTableError:
    return RankTableError(
        str(conf) if configured else "hccn_tool",
        f"address_{device_id}" if configured else f"ipaddr of device {device_id}",
        MISSING,
        f"the address of NPU {device_id} from hccn_tool -ip, -vnic or {conf} ({seen})",
        f"mount {HCCN_CONF} and hccn_tool into the container, or give --device-ip {device_id}=ADDRESS",
    )
