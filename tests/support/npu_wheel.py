"""Runs the real torch-npu wheel without CANN, over stub libraries whose functions return 0, in child processes.

So operators have their real schemas and shapes; npu_simulated.py implements them. This module does not import
torch-npu. PD_CLUSTER_TEST_TORCH_NPU_VERSION names a later build for the installed torch, such as 2.12.0.post3.

For scripts/npu_check.sh, `python -m tests.support.npu_wheel FOLDER` writes an Atlas machine's programs to FOLDER and
prints shell variables, with these programs on PATH.
"""

from __future__ import annotations

import compileall
import fcntl
import os
import shlex
import shutil
import subprocess
import sys
import zipfile
from collections.abc import Mapping, Sequence
from importlib.metadata import version
from pathlib import Path

import pytest
import torch

from tests.support import npu_machine

ROOT = Path(__file__).parents[2]
VERSION = "PD_CLUSTER_TEST_TORCH_NPU_VERSION"
CACHE = ROOT / ".pytest_cache" / "torch_npu"
SHIM = Path(__file__).parent / "npu_shim"
FUNCTIONS_IN = "libascendcl.so"
OTHERS = ("hccl", "acl_op_compiler", "ge_runner", "graph", "acl_tdt_channel", "ascend_ml", "atb")
EMPTY = [f"lib{name}.so" for name in OTHERS]
# Prefixes of the interpreter's, loader's and compiler's symbols, which CANN's libraries do not provide.
FOREIGN = ("Py", "_Py", "_ITM", "__", "_ZTH")
DOWNLOAD_TIMEOUT_S = 240
BUILD_TIMEOUT_S = 120


def environment() -> dict[str, str]:
    """Returns variables for a process with simulated NPUs. Skips the test if they are unavailable."""
    wheel, libraries = unpacked(wanted_version()), _libraries()
    paths = [SHIM, ROOT, *os.environ.get("PYTHONPATH", "").split(os.pathsep)]
    return {
        **os.environ,
        "PYTHONPATH": os.pathsep.join(str(path) for path in paths if path),
        "LD_LIBRARY_PATH": os.pathsep.join(filter(None, [str(libraries), os.environ.get("LD_LIBRARY_PATH", "")])),
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "PD_CLUSTER_TEST_TORCH_NPU": str(wheel),
        "OMP_NUM_THREADS": "1",
        "PYTEST_ADDOPTS": "",
    }


def run_cases(files: Sequence[str], *arguments: str, timeout_s: float = 110) -> str:
    """Runs pytest on `files` of tests/support. Returns its output; raises AssertionError if a case failed."""
    paths = [str(ROOT / "tests" / "support" / file) for file in files]
    command = [sys.executable, "-m", "pytest", "-p", "no:cacheprovider", "-p", "no:xdist", *paths, *arguments]
    done = _run(command, timeout_s, environment())
    assert done.returncode == 0, done.stdout[-8000:] + done.stderr[-2000:]
    return done.stdout


def wanted_version() -> str:
    """Returns the version of torch-npu under test. Fails the test if the variable names one for another torch."""
    of_torch = version("torch").partition("+")[0]
    wanted = os.environ.get(VERSION) or of_torch
    if wanted.partition(".post")[0] != of_torch:
        pytest.fail(f"{VERSION}={wanted}: torch {of_torch} is installed; torch-npu goes with the torch of its version")
    return wanted


def unpacked(wanted: str) -> Path:
    """Returns the folder with the unpacked wheel, made once per version. Skips the test if there is no such wheel."""
    folder = CACHE / f"{wanted}-cp{sys.version_info.major}{sys.version_info.minor}"
    CACHE.mkdir(parents=True, exist_ok=True)
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.is_dir():
            _download(f"torch-npu=={wanted}", folder)
    return folder


def _download(requirement: str, folder: Path) -> None:
    partial = folder.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    options = ["-q", "--no-deps", "--only-binary=:all:", "-d"]
    done = _run([sys.executable, "-m", "pip", "download", *options, str(partial), requirement], DOWNLOAD_TIMEOUT_S)
    if done.returncode:
        pytest.skip(f"no wheel of {requirement} to be had here: {(done.stderr.splitlines() or ['?'])[-1]}")
    (wheel,) = partial.glob("*.whl")
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(partial)
    wheel.unlink()
    compileall.compile_dir(partial, quiet=2)  # even if Python is configured not to write bytecode
    partial.rename(folder)


def _libraries() -> Path:
    """Returns the folder of the stub libraries."""
    if not (shutil.which("gcc") and shutil.which("nm")):
        pytest.skip("torch-npu's stub libraries need gcc and nm")
    wheel = unpacked(wanted_version())
    folder = wheel / "stubs"
    with (CACHE / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        if not folder.is_dir():
            _build(wheel / "torch_npu", folder)
    return folder


def _build(package: Path, folder: Path) -> None:
    partial = folder.with_suffix(".partial")
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir()
    names = _missing(package)
    source = "".join(f"long {name}(void) {{ return 0; }}\n" for name in sorted(names))
    for library in (FUNCTIONS_IN, *EMPTY):
        command = ["gcc", "-shared", "-fPIC", "-w", "-x", "c", "-o", str(partial / library), "-"]
        text = source if library == FUNCTIONS_IN else ""
        subprocess.run(command, input=text, text=True, check=True, capture_output=True, timeout=BUILD_TIMEOUT_S)
    partial.rename(folder)


def _missing(package: Path) -> set[str]:
    """Returns the functions that the wheel needs from CANN's libraries."""
    own = [*package.glob("*.so"), *(package / "lib").glob("*.so")]
    linked = _run(["ldd", str(package / "lib" / "libtorch_npu.so")], BUILD_TIMEOUT_S).stdout
    others = [line.split("=>")[1].split()[0] for line in linked.splitlines() if "=> /" in line]
    known = {name for library in own for name in _symbols(library, "--defined-only")}
    known |= {name for library in others for name in _symbols(Path(library), "--defined-only")}
    for library in Path(torch.__file__).parent.glob("lib/*.so*"):
        known |= _symbols(library, "--defined-only")
    wanted = {name for library in own for name in _symbols(library, "--undefined-only")}
    return {name for name in wanted - known if not name.startswith(FOREIGN)}


def _symbols(library: Path, which: str) -> set[str]:
    listed = _run(["nm", "-D", which, str(library)], BUILD_TIMEOUT_S).stdout
    return {line.split()[-1].partition("@")[0] for line in listed.splitlines() if line.split()}


def _run(
    command: list[str], timeout_s: float, env: Mapping[str, str] | None = None
) -> subprocess.CompletedProcess[str]:
    return subprocess.run(command, cwd=ROOT, env=env, capture_output=True, text=True, check=False, timeout=timeout_s)


def main() -> int:
    folder = Path(sys.argv[1])
    try:
        found = environment()
    except pytest.skip.Exception as why:
        print(why)
        return 1
    found["PATH"] = f"{npu_machine.install(folder, npu_machine.whole())}{os.pathsep}{os.environ['PATH']}"
    for name, value in found.items():
        if os.environ.get(name) != value:
            print(f"export {name}={shlex.quote(value)}")
    return 0


if __name__ == "__main__":
    sys.exit(main())
