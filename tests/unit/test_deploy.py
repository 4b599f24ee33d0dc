"""The files in deploy/ are consistent, and pd-cluster accepts them. Uses no container engine."""

import re
import shlex
import shutil
import stat
import subprocess
import sys
import threading
from collections.abc import Iterator
from contextlib import contextmanager
from http.server import BaseHTTPRequestHandler, HTTPServer
from ipaddress import ip_address, ip_network
from pathlib import Path
from typing import Any

import pytest
import yaml

from pd_cluster.settings.vllm_flags import judge, normalize
from ranktable_tools import check, load_global, load_local, locate
from ranktable_tools import cli as ranktable_cli
from tests.support.serve_command import serve_command, settings_in

ROOT = Path(__file__).resolve().parents[2]
DEPLOY = ROOT / "deploy"
TABLES = DEPLOY / "ranktables"
GLOBAL_TABLE = TABLES / "global_ranktable_merge.json"
MOUNTED_TABLES = "/etc/pd-cluster/"


def compose(**env: str) -> dict[str, Any]:
    """Returns compose.yaml with its variables replaced as by Compose, from `env` or their defaults."""

    def fill(match: re.Match[str]) -> str:
        name, default = match.group(1), match.group(2)
        assert default is not None or name in env, f"${{{name}}} has no default"
        return env.get(name) or default

    text = (DEPLOY / "compose.yaml").read_text(encoding="utf-8")
    loaded: dict[str, Any] = yaml.safe_load(re.sub(r"\$\{(\w+)(?::-([^}]*))?\}", fill, text))
    return loaded


SERVICES: dict[str, dict[str, Any]] = compose()["services"]


def parse_serve(argv: list[str]) -> dict[str, Any]:
    """Parses a command line as `pd-cluster serve` does. Fails on a warning and on a flag without effect."""
    command = serve_command()
    context = command.make_context("serve", normalize(["serve", *argv])[1:])
    assert judge(context.args, [name for parameter in command.params for name in parameter.opts]) == []
    return settings_in(context)


def address(service: dict[str, Any]) -> str:
    (network,) = service["networks"].values()
    return str(network["ipv4_address"])


# ---- rank tables


def test_the_tables_have_no_fault() -> None:
    locals_ = sorted(TABLES.glob("local_*.json"))
    node_ports = SERVICES["scheduler"]["environment"]["NODE_PORTS"]
    assert check(GLOBAL_TABLE, locals_, node_ports=node_ports, tensor_parallel_size=1) == []
    table = load_global(GLOBAL_TABLE)
    found = {locate(table, load_local(path)) for path in locals_}
    assert found == {("scheduler", 0), ("prefill", 0), ("decode", 0)}


def test_the_tables_are_what_the_readme_makes(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    readme = (DEPLOY / "README.md").read_text(encoding="utf-8")
    section = readme.partition("\n### Addresses\n")[2].partition("\n### ")[0]
    lines = re.findall(r"^pd-ranktable (.*)$", section, re.MULTILINE)
    assert len(lines) == 5
    for line in lines:
        assert ranktable_cli.main(shlex.split(line)) == 0
    made = {path.name: path.read_bytes() for path in (tmp_path / "ranktables").iterdir()}
    parts = {name for name in made if re.fullmatch(r"global_ranktable_10\.77\.0\.\d+\.json", name)}
    assert len(parts) == 3
    committed = {path.name: path.read_bytes() for path in TABLES.iterdir()}
    keys = {"cluster.secret", "scheduler.key", "admin.token"}
    assert {name: made[name] for name in made.keys() - parts - keys} == committed


# ---- compose.yaml


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_is_the_instance_that_its_table_names(name: str) -> None:
    service = SERVICES[name]
    env = service["environment"]
    assert env["GLOBAL_RANK_TABLE_FILE_PATH"] == MOUNTED_TABLES + GLOBAL_TABLE.name
    local = load_local(TABLES / env["RANK_TABLE_FILE_PATH"].removeprefix(MOUNTED_TABLES))
    assert locate(load_global(GLOBAL_TABLE), local) == (name, 0)
    assert local.server.server_ip == address(service)
    (config,) = compose()["networks"]["cluster"]["ipam"]["config"]
    assert ip_address(address(service)) in ip_network(config["subnet"])


@pytest.mark.parametrize("name", SERVICES)
def test_a_service_is_started_with_known_flags(name: str) -> None:
    service = SERVICES[name]
    options = parse_serve(service["command"])
    assert options["host"] == "0.0.0.0"
    assert options["port"] == service["environment"]["HEALTH_PORT"]
    assert options["model"] in [volume.split(":")[1] for volume in service["volumes"]]
    files = [options[name] for name in ("secret_file", "scheduler_key_file", "admin_token_file")]
    assert [each["target"] for each in service["secrets"]] == (files if name == "scheduler" else files[:1])
    assert all(each["mode"] & 0o077 == 0 for each in service["secrets"])
    assert options["kv_transport"] == "auto"


# ---- healthcheck.py


@contextmanager
def answering(status: int) -> Iterator[int]:
    """Runs a server that answers every request with `status`; yields its port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(status if self.path == "/health" else 404)
            self.end_headers()

        def log_message(self, *_: object) -> None:
            pass

    with HTTPServer(("127.0.0.1", 0), Handler) as server:
        thread = threading.Thread(target=server.serve_forever, args=(0.01,), daemon=True)
        thread.start()
        try:
            yield server.server_port
        finally:
            server.shutdown()
            thread.join(10)


@pytest.mark.parametrize(("status", "code"), [(200, 0), (503, 1)])
def test_the_healthcheck(status: int, code: int) -> None:
    """The health check ignores a proxy in the environment."""
    with answering(status) as port:
        env = {"HEALTH_PORT": str(port), "http_proxy": "http://127.0.0.1:1"}
        script = str(DEPLOY / "healthcheck.py")
        result = subprocess.run([sys.executable, "-I", script], env=env, capture_output=True, timeout=30, check=False)
    assert result.returncode == code, result.stderr


# ---- systemd


def verified(tmp_path: Path, unit: str, *drop_ins: Path) -> str:
    """Returns systemd-analyze's complaints about the unit, installed under a name; empty if there are none."""
    program = shutil.which("systemd-analyze")
    if program is None:
        pytest.skip("systemd-analyze is not installed")
    (tmp_path / "pd-cluster@.service").write_text(unit, encoding="utf-8")
    folder = tmp_path / "pd-cluster@.service.d"
    folder.mkdir(exist_ok=True)
    for path in drop_ins:
        shutil.copy(path, folder)
    command = [program, "verify", "--man=no", str(tmp_path / "pd-cluster@prefill-0.service")]
    return subprocess.run(command, capture_output=True, text=True, timeout=30, check=False).stderr


def test_systemd_has_nothing_to_say_of_the_unit(tmp_path: Path) -> None:
    unit = (DEPLOY / "systemd" / "pd-cluster@.service").read_text(encoding="utf-8")
    assert "TimeoutStopSecs" in verified(tmp_path, unit.replace("TimeoutStopSec=", "TimeoutStopSecs="))
    assert verified(tmp_path, unit, DEPLOY / "systemd" / "npu.conf") == ""


def test_the_unit_starts_known_flags() -> None:
    unit = (DEPLOY / "systemd" / "pd-cluster@.service").read_text(encoding="utf-8")
    (start,) = re.findall(r"^ExecStart=/bin/sh (\S+) (.*)$", unit, re.MULTILINE)
    script = ROOT / start[0].removeprefix("/opt/pd-cluster/")
    assert script.is_file()
    assert script.stat().st_mode & stat.S_IXUSR
    example = (DEPLOY / "systemd" / "cluster.env.example").read_text(encoding="utf-8")
    env = dict(line.split("=", 1) for line in example.splitlines() if line and not line.startswith("#"))
    argv = shlex.split(start[1].replace("$FLAGS", env["FLAGS"]).replace("${PORT}", "8088"))
    options = parse_serve(argv)
    assert options["port"] == 8088
    (stop_s,) = re.findall(r"^TimeoutStopSec=(\d+)$", unit, re.MULTILINE)
    assert int(stop_s) > options["drain_timeout"]
    assert {"GLOBAL_RANK_TABLE_FILE_PATH", "NODE_PORTS", "USE_OPENAI"} < set(env)
