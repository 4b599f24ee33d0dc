"""compose.yaml and its overrides for GPUs and NPUs: Compose's schema, its parser where it is, what they change."""

import os
import re
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest
import yaml

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
FILES = ("compose.yaml", "compose.cuda.yaml", "compose.npu.yaml")
ENV = {"CLUSTER_SECRET": "secret …", "SCHEDULER_KEY": "…", "ADMIN_TOKEN": "…", "BASE_IMAGE": "registry.example/base:1"}


def loaded(name: str) -> dict[str, Any]:
    value: dict[str, Any] = yaml.safe_load((DEPLOY / name).read_text(encoding="utf-8"))
    return value


@pytest.mark.parametrize("name", FILES)
def test_the_file_keeps_to_the_compose_specification_s_schema(name: str) -> None:
    schemas = pytest.importorskip("check_jsonschema.builtin_schemas", reason="check-jsonschema is not installed")
    jsonschema = pytest.importorskip("jsonschema")
    schema = schemas.get_builtin_schema("vendor.compose-spec")
    jsonschema.validate(loaded(name), schema)
    broken = loaded(name)
    broken["services"]["prefill"]["comand"] = []
    with pytest.raises(jsonschema.ValidationError, match="comand"):
        jsonschema.validate(broken, schema)


@pytest.mark.parametrize("override", [None, *FILES[1:]])
def test_compose_itself_reads_the_files(override: str | None) -> None:
    docker = shutil.which("docker")
    if docker is None or subprocess.run([docker, "compose", "version"], capture_output=True, check=False).returncode:
        pytest.skip("docker compose is not installed")
    files = [argument for name in (FILES[0], override) if name for argument in ("-f", str(DEPLOY / name))]
    command = [docker, "compose", *files, "config", "--format", "json"]
    done = subprocess.run(command, env={**os.environ, **ENV}, capture_output=True, text=True, timeout=60, check=False)
    assert done.returncode == 0, done.stderr
    services = yaml.safe_load(done.stdout)["services"]
    kind = override.split(".")[1] if override else "cpu"
    assert {service["image"] for service in services.values()} == {f"pd-cluster:{kind}"}


@pytest.mark.parametrize("kind", ["cuda", "npu"])
def test_an_override_changes_the_image_of_every_service(kind: str) -> None:
    services = loaded(f"compose.{kind}.yaml")["services"]
    assert set(services) == set(loaded("compose.yaml")["services"])
    for service in services.values():
        assert service["image"] == f"pd-cluster:{kind}"
        assert (ROOT / service["build"]["dockerfile"]).is_file()
        text = (ROOT / service["build"]["dockerfile"]).read_text(encoding="utf-8")
        assert all(re.search(rf"^ARG {name}\b", text, re.MULTILINE) for name in service["build"]["args"])


@pytest.mark.parametrize("kind", ["cuda", "npu"])
def test_an_override_gives_each_worker_one_device_and_the_scheduler_none(kind: str) -> None:
    """There are as many as in the table, so that a device is found whatever its number on the host."""
    services = loaded(f"compose.{kind}.yaml")["services"]
    given = {name: _devices(service) for name, service in services.items()}
    assert given["scheduler"] == []
    assert len(given["prefill"]) == len(given["decode"]) == 1
    assert given["prefill"] != given["decode"]


def _devices(service: dict[str, Any]) -> list[str]:
    reserved = service.get("deploy", {}).get("resources", {}).get("reservations", {}).get("devices", [])
    named = [name for each in reserved for name in each["device_ids"]]
    return named + [path for path in service.get("devices", []) if path.startswith("/dev/davinci$")]
