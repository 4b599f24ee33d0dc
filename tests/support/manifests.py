"""Kubernetes manifests of deploy/ and their schemas: Kubernetes' own and those in tests/data/crds."""

from __future__ import annotations

import functools
import json
import shutil
import subprocess
from pathlib import Path
from typing import Any

import jsonschema
import kubernetes_validate
import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
CHART = ROOT / "deploy" / "helm" / "pd-cluster"
KUSTOMIZE = ROOT / "deploy" / "kubernetes"
CRDS = ROOT / "tests" / "data" / "crds"
OLDEST, NEWEST = "1.29", "1.37"


@functools.cache
def _custom(kind: str) -> Any:
    return json.loads((CRDS / f"{kind}.json").read_text(encoding="utf-8"))


def check_schema(document: dict[str, Any], version: str = NEWEST) -> None:
    """Raises ValidationError, also for fields that the kind does not declare."""
    if (CRDS / f"{document['kind']}.json").exists():
        jsonschema.validate(document, _custom(document["kind"]))
    else:
        kubernetes_validate.validate(document, version, strict=True)


@functools.cache
def documents(file: str) -> list[dict[str, Any]]:
    """Returns the objects of a file below deploy/kubernetes."""
    return list(yaml.safe_load_all((KUSTOMIZE / file).read_text(encoding="utf-8")))


def built(folder: Path) -> list[dict[str, Any]]:
    """Returns the objects that kustomize builds from a folder."""
    kubectl = shutil.which("kubectl") or shutil.which("kustomize")
    if kubectl is None:
        pytest.skip("neither kubectl nor kustomize is installed")
    command = [kubectl, "kustomize" if kubectl.endswith("kubectl") else "build", str(folder)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    return list(yaml.safe_load_all(done.stdout))
