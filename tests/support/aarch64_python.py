"""The aarch64 Python that scripts/aarch64_check.sh assembles: its folder, interpreter and environment variables."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]
VARIABLE = "PD_CLUSTER_TEST_AARCH64"
FOLDER = os.environ.get(VARIABLE, "")


def python() -> Path:
    """Returns a program that runs the interpreter, and any process that it starts, under emulation."""
    return Path(FOLDER) / "root" / "usr" / "bin" / "python3"


def environment() -> dict[str, str]:
    """Returns this process's environment with the variables that the interpreter needs."""
    folder = Path(FOLDER)
    return {
        "PYTHONPATH": f"{folder / 'site'}{os.pathsep}{ROOT}",
        "PYTHONDONTWRITEBYTECODE": "1",
        "HF_HUB_OFFLINE": "1",
        "TORCH_DEVICE_BACKEND_AUTOLOAD": "0",
        "XDG_CACHE_HOME": str(folder / "cache"),
        "CC": str(folder / "cc"),
        "OMP_NUM_THREADS": "1",
        "QEMU_CPU": os.environ.get("QEMU_CPU", "cortex-a76"),
    }


def main() -> int:
    """Runs the interpreter with this process's arguments."""
    return subprocess.run([str(python()), *sys.argv[1:]], env={**os.environ, **environment()}, check=False).returncode


if __name__ == "__main__":
    sys.exit(main())
