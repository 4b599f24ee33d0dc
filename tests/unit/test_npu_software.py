"""Versions of CANN, driver and torch-npu: from a machine's files, faults, and the table on the page."""

from __future__ import annotations

import importlib.metadata
import re
import tomllib
from collections.abc import Callable
from pathlib import Path

import pytest

from pd_cluster.commands import check_command
from pd_cluster.devices import npu_software
from pd_cluster.devices.npu_software import NEEDS, InstalledVersion, Software

ROOT = Path(__file__).resolve().parents[2]
PAGE = (ROOT / "docs" / "ascend.md").read_text(encoding="utf-8")
# As the packages' installers write them.
DRIVER = "Version=25.3.rc1\nascendhal_version=7.35.23\naicpu_version=1.0\nInnerversion=V100R001C23SPC002B212\n"
TOOLKIT = "package_name=Ascend-cann-toolkit\nversion=9.1.0\ninnerversion=V100R001C10B001\narch=aarch64\nos=linux\n"
RUNTIME = "Version=9.1.0\nversion_dir=cann-9.1.0\ntimestamp=20260601_000000000\n"
GOOD: dict[Software, InstalledVersion] = {
    "Python": InstalledVersion("3.11.7", "here"),
    "torch": InstalledVersion("2.13.0+cpu", "here"),
    "torch-npu": InstalledVersion("2.13.0", "here"),
    "CANN": InstalledVersion("9.1.0", "here"),
    "HDK driver": InstalledVersion("25.3.rc1", "here"),
}


def packages(**versions: str) -> Callable[[str], str]:
    def version(name: str) -> str:
        if (found := versions.get(name.replace("-", "_"))) is None:
            raise importlib.metadata.PackageNotFoundError(name)
        return found

    return version


def put(file: Path, text: str) -> Path:
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(text, "utf-8")
    return file


def machine(root: Path, cann: str = "usr/local/Ascend/cann-9.1.0/aarch64-linux/ascend_toolkit_install.info") -> None:
    """Writes a machine's files, and the link that CANN's installer makes."""
    put(root / "usr/local/Ascend/driver/version.info", DRIVER)
    put(root / cann, TOOLKIT if cann.endswith("install.info") else RUNTIME)
    put(root / "dev/davinci4", "")


def test_a_machine_as_installers_leave_it(tmp_path: Path) -> None:
    machine(tmp_path)
    (tmp_path / "usr/local/Ascend/cann").symlink_to("cann-9.1.0")
    found = npu_software.installed({}, tmp_path, packages(torch="2.12.0", torch_npu="2.12.0.post3"))
    assert (found["CANN"].version, found["HDK driver"].version) == ("9.1.0", "25.3.rc1")
    assert found["torch-npu"].version == "2.12.0.post3"
    assert npu_software.faults(found) == []


@pytest.mark.parametrize("variable", ["ASCEND_TOOLKIT_HOME", "ASCEND_HOME_PATH", "ASCEND_HOME"])
@pytest.mark.parametrize("file", ["x86_64-linux/ascend_toolkit_install.info", "share/info/runtime/version.info"])
def test_a_cann_that_a_variable_names(tmp_path: Path, variable: str, file: str) -> None:
    machine(tmp_path, f"opt/cann/{file}")
    found = npu_software.installed({variable: str(tmp_path / "opt/cann")}, tmp_path, packages())
    assert found["CANN"] == InstalledVersion("9.1.0", str(tmp_path / "opt/cann" / file))


def test_the_toolkit_speaks_for_cann_and_ascend_root_moves_it(tmp_path: Path) -> None:
    machine(tmp_path, "mine/ascend-toolkit/latest/aarch64-linux/ascend_toolkit_install.info")
    put(tmp_path / "mine/ascend-toolkit/latest/aarch64-linux/ascend_ops_install.info", "version=8.5.0\n")
    found = npu_software.installed({"ASCEND_ROOT": str(tmp_path / "mine")}, tmp_path, packages())
    assert found["CANN"].version == "9.1.0"


def test_nothing_installed_is_one_line_each(tmp_path: Path) -> None:
    lines = npu_software.faults(npu_software.installed({}, tmp_path, packages()))
    assert [line.partition(":")[0] for line in lines] == ["torch", "torch-npu", "CANN", "HDK driver"]
    assert f"searched {tmp_path}/usr/local/Ascend/cann, " in lines[2]
    assert "IPC needs 8.3 or newer" in lines[2]
    assert all("\n" not in line for line in lines)


@pytest.mark.parametrize(
    ("software", "version", "said"),
    [
        ("Python", "3.10.2", ["a worker needs 3.11 or newer"]),
        ("torch-npu", "2.10.0.post4", ["a worker needs 2.11 or newer, below 2.15", "must be of one version"]),
        ("torch", "2.12.0", ["torch 2.12.0 and torch-npu 2.13.0: the two must be of one version"]),
        ("CANN", "8.2.RC1", ["torch-npu 2.11 and later needs 9.1", "KV handover by IPC needs 8.3"]),
        ("CANN", "8.3.RC1", ["torch-npu 2.11 and later needs 9.1"]),
        ("CANN", "latest", ["names version 'latest', which is not a number like 9.1"]),
        ("HDK driver", "23.0.6", ["CANN 9.1 needs 25.2", "several processes on one NPU needs 25.0", "IPC needs 25.3"]),
    ],
)
def test_what_is_wrong_is_named_with_its_number(software: Software, version: str, said: list[str]) -> None:
    lines = npu_software.faults({**GOOD, software: InstalledVersion(version, "/some/file")})
    assert len(lines) == len(said)
    assert all(each in line for each, line in zip(said, lines, strict=True))
    assert version in lines[0]


@pytest.mark.parametrize("name", ["davinci0", "davinci15", "vdavinci100"])
def test_a_card_or_a_part_of_one_is_an_npu(tmp_path: Path, name: str) -> None:
    put(tmp_path / "dev/davinci_manager", "")
    assert not npu_software.has_npu(tmp_path)
    put(tmp_path / "dev" / name, "")
    assert npu_software.has_npu(tmp_path)


def test_check_says_it_where_npus_are_and_nothing_elsewhere(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    machine(tmp_path)
    env = {"ASCEND_HOME": str(tmp_path / "nowhere" / ("long" * 30))}
    monkeypatch.setattr(npu_software, "has_npu", lambda: False)
    check_command.run(env)
    assert "NPU" not in capsys.readouterr().out
    monkeypatch.setattr(npu_software, "has_npu", lambda: True)
    real = npu_software.installed
    monkeypatch.setattr(npu_software, "installed", lambda env: real(env, tmp_path))
    check_command.run(env)
    lines = capsys.readouterr().out.splitlines()
    assert any(line.startswith("software of the NPUs: ") and "HDK driver 25.3.rc1" in line for line in lines)
    (fault,) = [line for line in lines if line.startswith("warning: CANN")]
    assert f"searched {env['ASCEND_HOME']}" in fault  # reported in one line of any length


def test_the_page_has_the_table() -> None:
    rows = [f"| {n.software} | {n.wanted} | {n.feature} | {n.source} |" for n in NEEDS]
    section = PAGE.partition("\n## Versions\n")[2].partition("\n## ")[0]
    shown = [line for line in section.splitlines() if line.startswith("| ")][1:]
    assert shown == rows, "\n".join(rows)


def test_the_project_s_metadata_and_images_keep_to_the_table() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    bounds = {need.software: need for need in NEEDS if need.feature == "a worker"}
    assert project["requires-python"] == f">={bounds['Python'].least}"
    torch_npu = bounds["torch-npu"]
    assert project["optional-dependencies"]["npu"] == [f"torch-npu>={torch_npu.least},<{torch_npu.below}"]
    (torch,) = (each for each in project["dependencies"] if each.startswith("torch>"))
    assert torch.startswith(f"torch>={bounds['torch'].least},<"), "only the lower bounds must agree"
    pins = re.findall(r"\b(torch(?:-npu)?)==([\d.]+)", (ROOT / "deploy/Dockerfile.npu").read_text(encoding="utf-8"))
    assert {name for name, _ in pins} == {"torch", "torch-npu"}
    assert all(bounds[name].is_met_by(version) for name, version in pins)  # type: ignore[index]
