"""Lists the required versions of the software for workers on NPUs, and finds the installed ones.

docs/ascend.md repeats the table, and a test compares the two. Reads version files and package metadata; opens no
device and imports neither torch nor torch-npu. Atlas A2 and A3 need the same versions.
"""

from __future__ import annotations

import importlib.metadata
import platform
import re
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Final, Literal, NamedTuple

Software = Literal["Python", "torch", "torch-npu", "CANN", "HDK driver"]

_CARDS: Final = "v?davinci[0-9]+"
_DRIVER: Final = Path("usr/local/Ascend/driver/version.info")
_CANN_HOMES: Final = ("ASCEND_TOOLKIT_HOME", "ASCEND_HOME_PATH", "ASCEND_HOME")  # CANN's set_env.sh sets the first two
_CANN_FOLDERS: Final = ("cann", "ascend-toolkit/latest")  # folders below ASCEND_ROOT, used if no variable names CANN
_CANN_FILES: Final = (
    "*-linux/ascend_toolkit_install.info",
    "*-linux/ascend_*_install.info",
    "share/info/runtime/version.info",
    "version.cfg",
)
_VERSION: Final = re.compile(r"^\s*version\s*=\s*(\S+)\s*$", re.IGNORECASE | re.MULTILINE)

_RELEASES: Final = "TorchNPU's COMPATIBILITY.md, whose last version is torch-npu 2.12"
_IPC_GUIDE: Final = "torch-npu's IPC guide of release 7.2.0, which belongs to CANN 8.3.RC1"
_PROCESSES: Final = "CANN's article on IPC in torch-npu; for A3, HCCL's constraints in CANN 9.0"
_OWN: Final = "this project's dependencies"
_SET_ENV: Final = "install a newer CANN and source its set_env.sh"
_UPGRADE: Final = "upgrade driver and firmware of the host to one newer HDK release"


@dataclass(frozen=True)
class SoftwareNeed:
    """`feature` needs `least` <= version < `below`, both given as major.minor; an empty `below` is no limit.

    A release candidate counts as its release: 25.3.rc1 is 25.3. `source`: where the bound was published.
    """

    software: Software
    feature: str
    least: str
    source: str
    way_out: str
    below: str = ""

    @property
    def wanted(self) -> str:
        return f"{self.least} or newer, below {self.below}" if self.below else f"{self.least} or newer"

    def is_met_by(self, version: str) -> bool:
        """Raises ValueError for a version that does not begin with major.minor."""
        found = major_minor(version)
        return major_minor(self.least) <= found and (not self.below or found < major_minor(self.below))


NEEDS: Final = (
    SoftwareNeed(
        "Python", "a worker", "3.11", f"{_OWN}; torch-npu 2.13.0 has wheels for 3.10 to 3.14", "take another image"
    ),
    SoftwareNeed("torch", "a worker", "2.11", _OWN, "pip install torch==2.13.0", below="2.15"),
    SoftwareNeed("torch-npu", "a worker", "2.11", _OWN, "pip install torch-npu==2.13.0", below="2.15"),
    SoftwareNeed("CANN", "torch-npu 2.11 and later", "9.1", _RELEASES, _SET_ENV),
    SoftwareNeed("CANN", "KV handover by IPC", "8.3", _IPC_GUIDE, _SET_ENV),
    SoftwareNeed("HDK driver", "CANN 9.1", "25.2", "release notes of CANN 9.1.0 and 9.1.1", _UPGRADE),
    SoftwareNeed("HDK driver", "several processes on one NPU", "25.0", _PROCESSES, _UPGRADE),
    SoftwareNeed("HDK driver", "KV handover by IPC", "25.3", "tests of torch-npu, which skip older drivers", _UPGRADE),
)


class InstalledVersion(NamedTuple):
    """An installed version; "" if none was found. `at`: the file with the version, or the searched paths."""

    version: str
    at: str


def major_minor(version: str) -> tuple[int, int]:
    """Returns (8, 3) for 8.3.RC1 and (2, 13) for 2.13.0+cpu. Raises ValueError."""
    match = re.match(r"([0-9]+)\.([0-9]+)", version)
    if match is None:
        raise ValueError(version)
    return int(match[1]), int(match[2])


def has_npu(root: Path = Path("/")) -> bool:
    """Returns whether the driver shows this process a card, or a part of one (vNPU)."""
    folder = root / "dev"
    return folder.is_dir() and any(re.fullmatch(_CARDS, each.name) for each in folder.iterdir())


def installed(
    env: Mapping[str, str], root: Path = Path("/"), package: Callable[[str], str] = importlib.metadata.version
) -> dict[Software, InstalledVersion]:
    """Reads every version. `root` holds usr/local/Ascend; `package` raises PackageNotFoundError as importlib does."""
    return {
        "Python": InstalledVersion(platform.python_version(), "this interpreter"),
        "torch": _package("torch", package),
        "torch-npu": _package("torch-npu", package),
        "CANN": _cann(env, root),
        "HDK driver": InstalledVersion(_version_in(root / _DRIVER), str(root / _DRIVER)),
    }


def faults(found: Mapping[Software, InstalledVersion]) -> list[str]:
    """Returns one line for each missing, unreadable, too old, too new or incompatible version."""
    lines: list[str] = []
    for software in dict.fromkeys(need.software for need in NEEDS):
        lines += _faults_of(software, found[software])
    torch, torch_npu = found["torch"].version, found["torch-npu"].version
    if torch and torch_npu and torch.split(".")[:2] != torch_npu.split(".")[:2]:
        lines.append(f"torch {torch} and torch-npu {torch_npu}: the two must be of one version; install both together")
    return lines


def _faults_of(software: Software, found: InstalledVersion) -> Iterator[str]:
    needs = [need for need in NEEDS if need.software == software]
    if not found.version:
        needed = "; ".join(f"{need.feature} needs {need.wanted}" for need in needs)
        yield f"{software}: no version found ({found.at}); {needed}; {needs[0].way_out}"
        return
    for need in needs:
        try:
            is_met = need.is_met_by(found.version)
        except ValueError:
            yield f"{software}: {found.at} names version {found.version!r}, which is not a number like {need.least}"
            return
        if not is_met:
            yield f"{software} {found.version} ({found.at}): {need.feature} needs {need.wanted}; {need.way_out}"


def _package(name: str, version: Callable[[str], str]) -> InstalledVersion:
    try:
        return InstalledVersion(version(name), "Python package")
    except importlib.metadata.PackageNotFoundError:
        return InstalledVersion("", "not installed")


def _cann(env: Mapping[str, str], root: Path) -> InstalledVersion:
    named = [Path(env[name]) for name in _CANN_HOMES if env.get(name)]
    folder = Path(env.get("ASCEND_ROOT") or root / "usr/local/Ascend")
    homes = named or [folder / name for name in _CANN_FOLDERS]
    for home in homes:
        for file in (each for pattern in _CANN_FILES for each in sorted(home.glob(pattern))):
            if version := _version_in(file):
                return InstalledVersion(version, str(file))
    return InstalledVersion("", f"searched {', '.join(map(str, dict.fromkeys(homes)))}")


def _version_in(file: Path) -> str:
    """Returns the value of a `version=` line; "" if there is no such file or line."""
    try:
        match = _VERSION.search(file.read_text(encoding="utf-8", errors="replace"))
    except OSError:
        return ""
    return match[1] if match else ""
