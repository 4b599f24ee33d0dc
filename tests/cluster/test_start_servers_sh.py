"""The reference deployment's commands, unchanged where a machine without NPUs allows it: rank tables from
pd_ranktable_tools.py, start_servers.sh three times from another folder, curl. Also operators' typical mistakes.
"""

from __future__ import annotations

import json
import shutil
import signal
import socket
import subprocess
import sys
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import NamedTuple

import httpx
import pytest

from tests.support.checkpoints import EOS_ID, reference_greedy
from tests.support.netns import HUB, CannotMakeNamespaces, Network
from tests.support.start_servers import HOST, ROOT, Servers, Shape, curl, document_body

Checkpoints = Callable[[str], Path]


def add_foreign_fields(folder: Path) -> None:
    """Adds the fields of Ascend's tools to the tables, which every instance must accept."""
    for path in folder.glob("*_ranktable_*.json"):
        table = json.loads(path.read_text())
        table["super_pod_list"] = [{"super_pod_id": "0", "server_list": [{"server_id": HOST}]}]
        for group in table.get("server_group_list", [table]):
            group["deploy_server"] = path.name
            for server in group["server_list"]:
                server["host_nic_ip"] = "reserve"
        path.write_text(json.dumps(table))


@pytest.fixture
def servers(tmp_path: Path, checkpoint: Checkpoints) -> Iterator[Servers]:
    with Servers(tmp_path, checkpoint("llama")) as started:
        yield started


@pytest.fixture(scope="module")
def deployed(tmp_path_factory: pytest.TempPathFactory, checkpoint: Checkpoints) -> Iterator[Servers]:
    """Runs the document's deployment, but starts the scheduler first, whereas the document starts it last.

    The model's sampling defaults are greedy without repetition, unlike the document's model.
    """
    folder = tmp_path_factory.mktemp("deployed")
    shutil.copytree(checkpoint("llama"), folder / "model")
    own = {"temperature": 0, "repetition_penalty": 1.9, "eos_token_id": EOS_ID}
    (folder / "model" / "generation_config.json").write_text(json.dumps(own))
    with Servers(folder, folder / "model") as started:
        add_foreign_fields(folder)
        started.start_scheduler()
        started.start_workers()
        for port in (started.public, started.prefill, started.decode):
            started.await_health(port)
        yield started


def test_the_documents_deployment(deployed: Servers) -> None:
    """Both model names give the same answer. This is the first test on `deployed`, with the original scheduler."""
    texts = []
    for model in (str(deployed.model), "tiny"):
        answer = curl(deployed.public, "/v1/chat/completions", document_body(model))
        assert answer["object"] == "chat.completion", answer
        (choice,) = answer["choices"]
        assert choice["message"]["role"] == "assistant"
        assert choice["finish_reason"] in ("length", "stop")
        texts.append(choice["message"]["content"])
    assert texts[0] == texts[1]


def drawn(servers: Servers, **fields: object) -> list[list[int]]:
    """Returns the tokens of a completion for each of three seeds."""
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 16, "ignore_eos": True, "return_token_ids": True}
    answers = [curl(servers.public, "/v1/completions", {**body, **fields, "seed": seed}) for seed in (1, 2, 3)]
    return [answer["choices"][0]["token_ids"] for answer in answers]


def test_the_documents_defaults_are_not_the_models_and_it_requires_a_model(deployed: Servers) -> None:
    body = document_body("tiny")
    del body["model"]
    error = curl(deployed.public, "/v1/chat/completions", body)["error"]
    assert (error["type"], error["param"]) == ("invalid_request_error", "model")
    found = drawn(deployed)
    documented = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    assert found == drawn(deployed, **documented, repetition_penalty=1.0)
    assert found[0] != found[1]


@pytest.mark.slow
def test_an_operator_may_want_the_models_defaults_and_no_model(deployed: Servers) -> None:
    """A flag selects the model's sampling defaults, and a variable allows requests without a model name."""
    deployed.replace_scheduler(["--generation-config=auto"], PD_CLUSTER_SERVE_REQUIRE_MODEL="0")
    deployed.await_health(deployed.public)
    greedy, *others = drawn(deployed, model=None)
    assert others == [greedy] * len(others)
    assert drawn(deployed, temperature=0, repetition_penalty=1.9)[0] == greedy


@pytest.mark.slow
def test_the_documents_own_numbers(tmp_path: Path, checkpoint: Callable[..., Path]) -> None:
    """Cards 4 and 5 prefill, 6 and 7 decode, started in the document's order with its flags: two ranks on each side."""
    model = checkpoint("llama", max_position_embeddings=4096)
    with Servers(tmp_path, model, ("4,5", "6,7"), Shape(2, 4096, 4096)) as servers:
        servers.start_workers()
        for port in (servers.prefill, servers.decode):
            servers.await_health(port)
        servers.start_scheduler()
        servers.await_health(servers.public)
        answer = curl(servers.public, "/v1/chat/completions", document_body("tiny"))
        assert answer["usage"]["completion_tokens"] > 0
        for name, devices in (("prefill", ["4", "5"]), ("decode", ["6", "7"])):
            told = httpx.get(f"http://{HOST}:{getattr(servers, name)}/instance", timeout=10, trust_env=False).json()
            assert told["device_ids"] == devices
            assert told["layout"]["tp_size"] == 2


def test_without_openai_the_api_is_vllms(deployed: Servers) -> None:
    deployed.replace_scheduler(USE_OPENAI="0")
    deployed.await_health(deployed.public)
    answer = curl(deployed.public, "/generate", {"prompt": "hello", "max_tokens": 4, "temperature": 0})
    (text,) = answer["text"]
    assert text.startswith("hello")


def test_node_ports_in_the_wrong_order(deployed: Servers) -> None:
    """The workers are recognized by their devices; the error says which one answers where."""
    deployed.replace_scheduler(NODE_PORTS=f"{deployed.decode},{deployed.prefill}")
    error = deployed.error_of("scheduler")
    assert error.startswith(f"NODE_PORTS={deployed.decode},{deployed.prefill}:")
    ports = {"decode-0": deployed.decode, "prefill-0": deployed.prefill}
    assert any(f"but {name} (" in error and f"answers at port {port};" in error for name, port in ports.items())


def test_sigterm_ends_every_instance(deployed: Servers) -> None:
    """Ends `deployed`, so this is its last test."""
    deployed.replace_scheduler()
    deployed.await_health(deployed.public)
    for process in deployed.processes.values():
        process.send_signal(signal.SIGTERM)  # reaches the instance, because the shell exec'd it
    codes = {name: deployed.await_exit(name) for name in deployed.processes}
    assert codes == {"scheduler": 0, "prefill": 0, "decode": 0}, deployed.logs()
    assert "Traceback" not in deployed.logs()


class TwoMachines(Servers):
    """The document's deployment over two machines, with its numbers: prefill and scheduler on the first, decode on the
    second.

    Each has a folder of its own, in which its operator runs the document's lines, and one address, but no default
    route.
    """

    said: list[str]  # output lines of `merge`

    def __init__(self, network: Network, folder: Path, model: Path) -> None:
        self.network = network
        self.first, self.second = (network.addresses[name] for name in (HUB, "second"))
        self.folders = {self.first: folder / "first", self.second: folder / "second"}
        super().__init__(folder, model, ("4,5", "6,7"), Shape(2, 4096, 4096))
        self.prefill, self.decode, self.public, self.admin = 8088, 8089, 9000, 9001  # all ports are free in a namespace

    def make_tables(self) -> None:
        """Step 5: runs `gen` on each machine, `merge` of both global tables on the first, and the requested copies."""
        for address, instances in (
            (self.first, ["--prefill-server-list", self.devices[0], "--api-server"]),
            (self.second, ["--decode-server-list", self.devices[1]]),
        ):
            self.folders[address].mkdir()
            self.tool(address, "gen", *instances, "--save-dir", ".")
        parts = [f"global_ranktable_{address}.json" for address in self.folders]
        shutil.copy(self.folders[self.second] / parts[1], self.folders[self.first])
        self.said = self.tool(self.first, "merge", "--global-ranktable-list", *parts, "--save-dir", ".")
        shutil.copy(self.folders[self.first] / "global_ranktable_merge.json", self.folders[self.second])

    def tool(self, address: str, mode: str, *options: str) -> list[str]:
        command = [sys.executable, str(ROOT / "scripts" / "pd_ranktable_tools.py"), "--mode", mode, *options]
        host = "second" if address == self.second else HUB
        return subprocess.run(
            self.network.inside(host, command),
            cwd=self.folders[address],
            check=True,
            timeout=60,
            capture_output=True,
            text=True,
        ).stdout.splitlines()

    def environment(self, table: str, **changes: str | None) -> dict[str, str]:
        address = self.second if table == "67" else self.first
        tables = {
            "GLOBAL_RANK_TABLE_FILE_PATH": "global_ranktable_merge.json",
            "RANK_TABLE_FILE_PATH": f"local_rank_table_{address}_{table}.json",
        }
        return super().environment(table, **tables, **changes)

    def start(self, name: str, table: str, port: int, flags: Sequence[str] = (), **changes: str | None) -> None:
        super().start(name, table, port, ["--host=0.0.0.0", *flags], **changes)  # the last flag wins

    def start_scheduler(self, flags: Sequence[str] = (), **changes: str | None) -> None:
        self.start("scheduler", "host", self.public, flags, **changes)

    def where(self, table: str) -> tuple[Path, Callable[[Sequence[str]], list[str]]]:
        if table == "67":
            return self.folders[self.second], partial(self.network.inside, "second")
        return self.folders[self.first], partial(self.network.inside, HUB)


@pytest.fixture
def network() -> Iterator[Network]:
    try:
        with Network(["second"]) as made:
            yield made
    except CannotMakeNamespaces as error:
        pytest.skip(str(error))


@pytest.mark.slow
def test_the_documents_two_machines(network: Network, tmp_path: Path, checkpoint: Callable[..., Path]) -> None:
    """Runs the document's lines unchanged, plus a copy of cluster.secret to the second machine."""
    model = checkpoint("llama", max_position_embeddings=4096)
    with TwoMachines(network, tmp_path, model) as servers:
        assert servers.said[-2:] == [
            f"copy global_ranktable_merge.json and cluster.secret to {servers.first}, {servers.second}, into one "
            "folder "
            f"on each, readable only by their owner",
            f"copy scheduler.key and admin.token only to {servers.first}, into the same folder",
        ]
        first, second = servers.folders.values()
        servers.start("decode", "67", servers.decode)
        assert servers.error_of("decode").startswith("cluster.secret: no such file; `pd-ranktable gen` or `merge` ")
        servers.start("decode", "67", servers.decode, ["--derive-secret"])
        assert f"has several hosts ({servers.first}, {servers.second})" in servers.error_of("decode")
        shutil.copy(first / "cluster.secret", second)
        assert not [name for name in ("scheduler.key", "admin.token") if (second / name).exists()]
        servers.start("prefill", "45", servers.prefill, ["--kv-transport=dist"])
        assert servers.error_of("prefill").startswith(
            f"KV cache would travel between hosts over gloo ({servers.first}, {servers.second}), checked but not"
        )
        servers.start_workers()
        servers.start_scheduler()
        with network.visit():
            servers.await_health(servers.public)
            for prompt in ([5, 6, 7, 8] * 40, [9, 3, 11], [5, 6, 7, 8] * 40):
                body = {"model": "tiny", "prompt": prompt, "max_tokens": 24, "temperature": 0, "ignore_eos": True}
                answer = curl(servers.public, "/v1/completions", {**body, "return_token_ids": True})
                assert answer["choices"][0]["token_ids"] == reference_greedy(model, prompt, 24)
            instances = httpx.get(f"http://{HOST}:{servers.admin}/instances", trust_env=False).json()["instances"]
            assert [each["host"] for each in instances] == [servers.first, servers.second]
            assert list(instances[0]["links"].values()) == ["up (curve)"]
        command = [
            sys.executable,
            "-m",
            "pd_cluster.commands.cli",
            "instances",
            f"--admin=http://{HOST}:{servers.admin}",
        ]
        drained = subprocess.run(
            network.inside(HUB, [*command, "drain", "decode-0", "--force"]),
            cwd=first,
            env=servers.environment("host"),
            capture_output=True,
            text=True,
            timeout=60,
            check=False,
        )
        assert drained.returncode == 0, drained.stderr  # finds the token next to the table


class Mistake(NamedTuple):
    """An operator's mistake, and the one-line error that must name it."""

    said: str
    table: str = "0"
    flags: Sequence[str] = ()
    changes: Mapping[str, str | None] = {}


MISTAKES = {
    "no variable": Mistake("RANK_TABLE_FILE_PATH is not set", changes={"RANK_TABLE_FILE_PATH": None}),
    "no table": Mistake(
        "RANK_TABLE_FILE_PATH=elsewhere/local.json: no such file",
        changes={"RANK_TABLE_FILE_PATH": "elsewhere/local.json"},
    ),
    "no ports": Mistake("NODE_PORTS is not set", "host", changes={"NODE_PORTS": None}),
    "one port": Mistake("NODE_PORTS", "host", changes={"NODE_PORTS": "8088"}),
    "a wrong flag": Mistake("--tool-server x: the server runs no tools", flags=["--tool-server=x"]),
}


def test_an_operators_mistakes_are_one_line_each(servers: Servers) -> None:
    for name, mistake in MISTAKES.items():
        servers.start(name, mistake.table, servers.prefill, mistake.flags, **mistake.changes)
        assert servers.error_of(name).startswith(mistake.said)
    with socket.socket() as taken:
        taken.bind((HOST, servers.decode))
        taken.listen()
        servers.start("a taken port", "1", servers.decode)
        error = servers.error_of("a taken port")
    assert error.startswith(f"--port {servers.decode}: cannot listen at {HOST}: the port is taken")
    (servers.folder / "scheduler.key").unlink()
    servers.start_scheduler()
    assert servers.error_of("scheduler").startswith("scheduler.key: no such file; `pd-ranktable gen` or `merge` ")
    (servers.folder / "cluster.secret").unlink()
    servers.start("prefill", "0", servers.prefill)
    assert "`pd-ranktable keys --save-dir .`" in servers.error_of("prefill")


def test_nothing_is_installed(tmp_path: Path) -> None:
    """Prints one line with the command to run, without needing Python."""
    scripts = tmp_path / "repository" / "scripts"
    scripts.mkdir(parents=True)
    script = scripts / "start_servers.sh"
    script.write_bytes((ROOT / "scripts" / "start_servers.sh").read_bytes())
    bin_folder = tmp_path / "bin"
    bin_folder.mkdir()
    for tool in ("dirname", "readlink"):
        (bin_folder / tool).symlink_to(f"/usr/bin/{tool}")
    result = subprocess.run(
        ["/bin/sh", str(script), "--port=8088"],
        env={"PATH": str(bin_folder)},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=60,
        check=False,
    )
    assert result.returncode == 1
    assert result.stderr == (
        f"start_servers.sh: pd-cluster is not installed; run: sh {tmp_path.resolve()}/repository/scripts/setup.sh\n"
    )
