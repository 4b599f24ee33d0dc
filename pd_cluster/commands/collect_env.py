"""`pd-cluster collect-env`: collects the facts that a problem report needs, without keys."""

from __future__ import annotations

import json
import platform
import shutil
import sys
import tempfile
from collections.abc import Mapping
from importlib import metadata
from pathlib import Path
from typing import Any

from pd_cluster import __version__, host
from pd_cluster.result_tables import commit, machine
from pd_cluster.settings.redaction import shown_value

PACKAGES = (
    *("torch", "torch-npu", "transformers", "safetensors", "tokenizers", "triton", "numpy", "msgspec", "pyzmq"),
    *("fastapi", "starlette", "uvicorn", "uvloop", "httpx", "pydantic", "llguidance", "pillow", "peft", "flashinfer"),
)
VARIABLES = (
    *("PD_CLUSTER_", "VLLM_", "OPENAI_", "HF_", "CUDA_", "NVIDIA_", "NCCL_", "GLOO_", "ASCEND_", "HCCL_", "OMP_"),
    *("MKL_", "TORCH_", "TRITON_", "GLOBAL_RANK_TABLE", "RANK_TABLE", "NODE_PORTS", "USE_OPENAI", "PYTHONPATH"),
)
DEVICE_FILES = ("/dev/davinci*", "/dev/nvidia[0-9]*", "/dev/vdavinci*")


def collect(env: Mapping[str, str]) -> dict[str, Any]:
    """Returns versions, the machine, devices, limits, and the variables that affect pd-cluster."""
    return {
        "pd-cluster": __version__,
        "commit": commit(),
        "python": sys.version.split()[0],
        "executable": sys.executable,
        "platform": platform.platform(),
        "libc": " ".join(platform.libc_ver()),
        "machine": machine(),
        "packages": {name: version for name in PACKAGES if (version := _version(name))},
        "devices": sorted(str(path) for pattern in DEVICE_FILES for path in Path("/").glob(pattern[1:])),
        "compiler": shutil.which("gcc") or shutil.which("cc") or "none",
        "shared memory": _free("/dev/shm"),
        "temporary files": _free(tempfile.gettempdir()),
        "memory": str(host.memory()),
        "cores": f"{host.num_cores()} (quota: {host.cores_quota():g})",
        "open files": str(host.open_files()),
        "variables": {name: shown_value(name, env[name]) for name in sorted(env) if name.startswith(VARIABLES)},
    }


def run(env: Mapping[str, str], as_json: bool) -> None:
    found = collect(env)
    if as_json:
        print(json.dumps(found, indent=2))
        return
    for name, value in found.items():
        if isinstance(value, dict):
            print(f"{name}:")
            for each, text in value.items():
                print(f"  {each}: {text}")
        else:
            print(f"{name}: {', '.join(value) or 'none' if isinstance(value, list) else value}")


def _version(package: str) -> str:
    try:
        return metadata.version(package)
    except metadata.PackageNotFoundError:
        return ""


def _free(folder: str) -> str:
    try:
        usage = shutil.disk_usage(folder)
    except OSError as error:
        return f"{folder}: {error.strerror}"
    return f"{folder}: {usage.free / 2**30:.1f} GiB free of {usage.total / 2**30:.1f}"
