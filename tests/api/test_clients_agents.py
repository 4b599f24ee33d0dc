"""Unmodified agent libraries and command lines call a tool, send its result back and get the answer.

Each is installed into a separate folder, which is kept between runs. The command lines can reach only the server;
PD_CLUSTER_AGENT_CLIS names the folder of their programs (`npm install @openai/codex @anthropic-ai/claude-code`, then
its node_modules/.bin).
"""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

from tests.support.agent_model import FLAGS, make_agent_model
from tests.support.cluster import LiveCluster
from tests.support.no_network import is_possible, run_without_network

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]  # includes two installations
CLIENTS = Path(__file__).parents[1] / "clients"
CLIS = os.environ.get("PD_CLUSTER_AGENT_CLIS", "")
ANSWER = "The answer is seven."
NOWHERE = "http://127.0.0.1:9"  # no listener
ONLY_HERE = {"HTTP_PROXY": NOWHERE, "HTTPS_PROXY": NOWHERE, "NO_PROXY": "127.0.0.1"}
Start = Callable[[str, dict[str, Any]], LiveCluster]


@pytest.fixture(scope="module")
def start(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Start]:
    """Yields `start(tool, arguments)`, starting a cluster whose model calls the tool and answers with its result."""
    running: dict[str, LiveCluster] = {}

    def make(tool: str, arguments: dict[str, Any]) -> LiveCluster:
        if tool not in running:
            folder = tmp_path_factory.mktemp(tool)
            call = f"<tool_call>\n{json.dumps({'name': tool, 'arguments': arguments})}\n</tool_call>"
            model = make_agent_model(folder / "model", [call, ANSWER])
            cluster = LiveCluster(folder, model, arguments=FLAGS)
            running[tool] = cluster
            cluster.__enter__()
        return running[tool]

    yield make
    for cluster in running.values():
        cluster.stop()


@pytest.fixture
def adds(start: Start) -> LiveCluster:
    return start("get_sum", {"a": 3, "b": 4})


def installed(request: pytest.FixtureRequest, name: str, files: Sequence[str], commands: Sequence[list[str]]) -> Path:
    """Returns a folder in which the commands have run once per content of the files; skips the test if they fail."""
    cache = request.config.cache
    assert cache is not None
    folder = cache.mkdir("clients") / name
    wanted = "".join((CLIENTS / file).read_text() for file in files)
    done = folder / "installed"
    if not done.exists() or done.read_text() != wanted:
        shutil.rmtree(folder, ignore_errors=True)
        folder.mkdir(parents=True)
        for file in files:
            shutil.copy(CLIENTS / file, folder)
        for command in commands:
            ended = subprocess.run(command, cwd=folder, capture_output=True, text=True, timeout=600, check=False)
            if ended.returncode:
                pytest.skip(f"{name} cannot be installed here: {ended.stderr[-500:]}")
        done.write_text(wanted)
    return folder


def found_by(command: Sequence[str | Path], folder: Path) -> Any:
    env = {**os.environ, **ONLY_HERE}
    ended = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=300, check=False)
    assert ended.returncode == 0, ended.stderr[-4000:]
    return json.loads(ended.stdout.splitlines()[-1])


def python_of(request: pytest.FixtureRequest, name: str) -> Path:
    """Returns the Python of a virtual environment with the packages that NAME.txt lists."""
    pip = [str(Path("venv") / "bin" / "pip"), "install", "-q", "-r", f"{name}.txt"]
    return installed(request, name, [f"{name}.txt"], [[sys.executable, "-m", "venv", "venv"], pip]) / "venv/bin/python"


def test_openai_agents(request: pytest.FixtureRequest, adds: LiveCluster) -> None:
    python = python_of(request, "openai-agents")
    seen = found_by([python, CLIENTS / "ask_openai_agents.py", adds.url], CLIENTS)
    assert seen["asked"] == [[3, 4]] * 4
    for name in ("responses", "chat"):
        found = seen["found"][name]
        assert (found["answer"], found["streamed"]) == (ANSWER, ANSWER)
        assert found["items"] == ["tool_call_item", "tool_call_output_item", "message_output_item"]
        assert {"raw_response_event", "run_item_stream_event"} <= set(found["events"])
        assert found["usage"] > len(ANSWER)
    adds.assert_home()


def test_llama_index(request: pytest.FixtureRequest, adds: LiveCluster) -> None:
    seen = found_by([python_of(request, "llama-index"), CLIENTS / "ask_llama_index.py", adds.url], CLIENTS)
    assert seen["agent"] == ANSWER
    assert seen["streamed"] == seen["chat"]
    assert seen["chat"].startswith("<tool_call>")  # without tools it is text
    assert seen["completion"] == seen["chat"][:5]
    assert seen["vectors"] == [128, 128]
    adds.assert_home()


def test_the_ai_sdk(request: pytest.FixtureRequest, adds: LiveCluster) -> None:
    if shutil.which("npm") is None:
        pytest.skip("there is no npm here")
    files = ["package.json", "package-lock.json", "ask_ai_sdk.mjs"]
    folder = installed(request, "ai-sdk", files, [["npm", "ci", "--no-audit", "--no-fund"]])
    shutil.copy(CLIENTS / "ask_ai_sdk.mjs", folder)
    seen = found_by(["node", "ask_ai_sdk.mjs", adds.url], folder)
    assert set(seen["found"]) == {"responses", "chat", "messages", "compatible"}
    for found in seen["found"].values():
        assert (found["whole"], found["streamed"], found["steps"]) == (ANSWER, ANSWER, 2)
        assert found["asked"] == [[3, 4]] * 2
        assert found["object"]["answer"] in ("seven", "eight")
        assert found["usage"] > len(ANSWER)
    assert (seen["completion"], seen["vectors"]) == (5, [128, 128])
    adds.assert_home()


def test_the_lock_file_names_no_host() -> None:
    assert "resolved" not in (CLIENTS / "package-lock.json").read_text()


def cli(name: str, arguments: list[str], cluster: LiveCluster, env: dict[str, str], folder: Path) -> str:
    """Runs a command line that can reach only the cluster; returns its output."""
    if not CLIS:
        pytest.skip("PD_CLUSTER_AGENT_CLIS names no folder of agents' programs")
    if not is_possible():
        pytest.skip("this user cannot make network namespaces")
    command = [str(Path(CLIS) / name), *arguments]
    kept = {"PATH": os.environ["PATH"], "HOME": str(folder), **env}
    ended = run_without_network(cluster.launch.port, command, kept, folder, timeout_s=120)
    assert ended.returncode == 0, ended.stdout[-3000:] + ended.stderr[-3000:]
    return ended.stdout


def test_codex(start: Start, tmp_path: Path) -> None:
    """Codex uses /v1/responses, with a namespace of tools among others."""
    cluster = start("exec_command", {"cmd": "echo seven > said"})
    (tmp_path / "config.toml").write_text(
        f"""model = "tiny"
model_provider = "cluster"
web_search = "disabled"
[model_providers.cluster]
name = "cluster"
base_url = "{cluster.url}/v1"
wire_api = "responses"
request_max_retries = 0
"""
    )
    arguments = ["exec", "--skip-git-repo-check", "--sandbox", "workspace-write", "What is 3 + 4?"]
    said = cli("codex", arguments, cluster, {"CODEX_HOME": str(tmp_path)}, tmp_path)
    assert said.splitlines()[-1] == ANSWER
    assert (tmp_path / "said").read_text() == "seven\n"
    cluster.assert_home()


def test_claude_code(start: Start, tmp_path: Path) -> None:
    """Claude Code uses streamed /v1/messages, with tool descriptions of some 19,000 characters."""
    cluster = start("Bash", {"command": "echo seven", "description": "Says seven"})
    env = {
        "ANTHROPIC_BASE_URL": cluster.url,
        "ANTHROPIC_API_KEY": "none",
        "ANTHROPIC_MODEL": "tiny",
        "ANTHROPIC_SMALL_FAST_MODEL": "tiny",
        "CLAUDE_CODE_MAX_OUTPUT_TOKENS": "300",
        "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
    }
    arguments = ["-p", "What is 3 + 4?", "--allowedTools", "Bash", "--output-format", "json"]
    told = json.loads(cli("claude", arguments, cluster, env, tmp_path))
    assert (told["result"], told["is_error"], told["num_turns"]) == (ANSWER, False, 2)
    cluster.assert_home()
