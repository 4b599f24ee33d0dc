"""compose.yaml and its overrides for GPUs and NPUs: Compose's schema, its parser if installed, and their changes."""

import re
from pathlib import Path
from typing import Any

import pytest
import yaml

from ranktable_tools import cli, load_global, load_local, locate
from tests.unit.test_deploy import parse_serve

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
FILES = ("compose.yaml", "compose.cuda.yaml", "compose.npu.yaml")
ENV = {"CLUSTER_SECRET": "secret …", "SCHEDULER_KEY": "…", "ADMIN_TOKEN": "…", "BASE_IMAGE": "registry.example/base:1"}
ENV |= {"HOST_IP": "10.0.0.18", "TABLES_DIR": "/srv/save_dir"}


def loaded(name: str) -> dict[str, Any]:
    value: dict[str, Any] = yaml.safe_load((DEPLOY / name).read_text(encoding="utf-8"))
    return value


def test_the_files_keep_to_the_compose_specification_s_schema() -> None:
    schemas = pytest.importorskip("check_jsonschema.builtin_schemas", reason="check-jsonschema is not installed")
    jsonschema = pytest.importorskip("jsonschema")
    schema = schemas.get_builtin_schema("vendor.compose-spec")
    validator = jsonschema.validators.validator_for(schema)(schema)
    for name in FILES:
        validator.validate(loaded(name))
    broken = loaded(FILES[0])
    broken["services"]["prefill"]["comand"] = []
    assert not validator.is_valid(broken)


def filled(name: str, **env: str) -> dict[str, Any]:
    """Returns the file with its variables replaced as by Compose, from `env`, ENV or their defaults."""

    def fill(match: re.Match[str]) -> str:
        variable, has_default, default = match.group(1), match.group(2) == "-", match.group(3)
        return {**ENV, **env}.get(variable) or (default if has_default else pytest.fail(f"{variable} is not given"))

    text = re.sub(r"\$\{(\w+):([-?])([^}]*)\}", fill, (DEPLOY / name).read_text(encoding="utf-8"))
    value: dict[str, Any] = yaml.safe_load(text)
    return value


@pytest.mark.parametrize("kind", ["cuda", "npu"])
def test_an_override_gives_each_worker_one_device_and_the_scheduler_none(kind: str) -> None:
    """Each worker gets one device, as in its table, so that it is found whatever its number on the host."""
    services = loaded(f"compose.{kind}.yaml")["services"]
    given = {name: _devices(service) for name, service in services.items()}
    assert given["scheduler"] == []
    assert len(given["prefill"]) == len(given["decode"]) == 1
    assert given["prefill"] != given["decode"]


def test_the_npus_file_is_on_the_host_s_network_with_the_tables_that_gen_makes(tmp_path: Path) -> None:
    """With the tables of deploy/README.md, every service finds its own, and the scheduler finds the workers' ports."""
    cards = [f"--device-ip={card}=10.1.0.{card}" for card in (4, 12)]
    lists = ["--prefill-server-list", "4", "--decode-server-list", "12", "--api-server"]
    given = ["gen", "--device", "npu", "--server-ip", "10.0.0.18", *lists, *cards, f"--save-dir={tmp_path}"]
    assert cli.main(given) == 0
    services = filled("compose.npu.yaml", PREFILL_NPU="4", DECODE_NPU="12", TABLES_DIR=str(tmp_path))["services"]
    ports = {}
    for name, service in services.items():
        assert service["network_mode"] == "host"
        assert not {"networks", "ports"} & service.keys()  # Compose rejects them together with network_mode: host
        assert f"{tmp_path}:/etc/pd-cluster:ro" in service["volumes"]
        whole, own = (
            tmp_path / Path(service["environment"][f"{each}RANK_TABLE_FILE_PATH"]).name for each in ("GLOBAL_", "")
        )
        assert locate(load_global(whole), load_local(own))[0] == name
        options = parse_serve(service["command"])
        assert options["port"] == int(service["environment"]["HEALTH_PORT"])
        assert options["device"] == ("auto" if name == "scheduler" else "npu")
        assert options["secret_file"] == service["secrets"][0]["target"]
        ports[name] = options["port"]
    assert services["scheduler"]["environment"]["NODE_PORTS"] == f"{ports['prefill']},{ports['decode']}"
    assert parse_serve(services["scheduler"]["command"])["host"] == "127.0.0.1"


def _devices(service: dict[str, Any]) -> list[str]:
    reserved = service.get("deploy", {}).get("resources", {}).get("reservations", {}).get("devices", [])
    named = [name for each in reserved for name in each["device_ids"]]
    return named + [path for path in service.get("devices", []) if path.startswith("/dev/davinci$")]
