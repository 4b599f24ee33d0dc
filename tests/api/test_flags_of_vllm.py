"""vLLM's flags with real processes: a YAML file of flags, and a cluster served at a Unix socket."""

from __future__ import annotations

import json
import stat
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from pd_cluster.text.tokenizer import Tokenizer
from tests.api.conftest import FLAGS
from tests.support.cluster import LiveCluster
from tests.support.metrics import told
from tests.support.sse import chunks_of

TEMPLATE = (
    "{{ mood | default('no mood') }}:{% for part in messages[0].content %}{{ part.text }}/{% endfor %}"
    "{% for tool in tools or [] %}{{ tool.function.name }}{% endfor %}"
)
FILE = """
stream_interval: 4
enable-force-include-usage: true
chat-template-content-format: openai
default-chat-template-kwargs: {mood: glad}
api-server-count: 2
shutdown-timeout: 5
h11-max-header-count: 20
structured-outputs-config: {backend: xgrammar, disable_any_whitespace: true}
enable-log-requests: true
enable-log-outputs: true
max-log-len: 12
disable-access-log-for-endpoints: /health,/ping
exclude-tools-when-tool-choice-none: true
"""
LOGS = {
    "formatters": {"own": {"format": "OWN %(process)d %(levelname)s %(message)s"}},
    "handlers": {"own": {"class": "logging.StreamHandler", "formatter": "own"}},
}
SELDOM = ["--heartbeat-interval=15", "--dead-after=60"]  # so rare that heartbeats alone would show changes too late
PROMPT = {"model": "tiny", "prompt": "Once", "max_tokens": 10, "temperature": 0, "ignore_eos": True}


@pytest.fixture(scope="module")
def served(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    folder = tmp_path_factory.mktemp("uds")
    (folder / "serve.yaml").write_text(FILE)
    (folder / "logs.json").write_text(json.dumps({"root": {"handlers": ["own"]}, **LOGS}))
    flags = [*FLAGS, *SELDOM, f"--log-config-file={folder / 'logs.json'}", f"--chat-template={TEMPLATE}"]
    own = {"scheduler": [f"--uds={folder / 'api.sock'}", "--config", str(folder / "serve.yaml")]}
    cluster = LiveCluster(folder, model, arguments=flags, member_arguments=own)
    socket = httpx.HTTPTransport(uds=str(folder / "api.sock"))
    cluster.client.close()
    cluster.client = httpx.Client(timeout=60, trust_env=False, mounts={"http://cluster": socket})
    cluster.url = "http://cluster"
    with cluster as running:
        yield running
    assert not (folder / "api.sock").exists()


def post(cluster: LiveCluster, path: str, **body: Any) -> Any:
    return cluster.ask(path, body)


def chunks(cluster: LiveCluster, **body: Any) -> list[dict[str, Any]]:
    return chunks_of(cluster.client.post(f"{cluster.url}/v1/completions", json={**PROMPT, **body, "stream": True}))


def test_it_is_served_at_the_socket_alone(served: LiveCluster) -> None:
    assert stat.S_ISSOCK((served.folder / "api.sock").stat().st_mode)
    with pytest.raises(httpx.ConnectError):
        served.client.get(f"{served.launch.url}/health")
    assert served.client.get(f"{served.url}/v1/models").json()["data"][0]["id"] == "tiny"


def test_a_stream_has_its_usage_and_several_tokens_in_each_chunk(served: LiveCluster) -> None:
    whole = post(served, "/v1/completions", **PROMPT)
    *found, usage = chunks(served, return_token_ids=True)
    counts = [len(each["choices"][0]["token_ids"]) for each in found]
    assert counts == [1, 4, 4, 1]
    assert "".join(each["choices"][0]["text"] for each in found) == whole["choices"][0]["text"]
    assert (usage["choices"], usage["usage"]["completion_tokens"]) == ([], 10)


def test_variables_and_parts_of_the_template(served: LiveCluster, tokenizer: Tokenizer) -> None:
    def prompt_of(**more: Any) -> list[int]:
        messages = [{"role": "user", "content": "Hi"}]
        tokens: list[int] = post(served, "/tokenize", messages=messages, add_special_tokens=False, **more)["tokens"]
        return tokens

    assert prompt_of() == tokenizer.encode("glad:Hi/", add_special_tokens=False)
    sad = tokenizer.encode("sad:Hi/", add_special_tokens=False)
    assert prompt_of(chat_template_kwargs={"mood": "sad"}) == sad


def test_tools_that_may_not_be_called_are_left_out(served: LiveCluster, tokenizer: Tokenizer) -> None:
    tools = [{"type": "function", "function": {"name": "f"}}]
    chat = {
        "model": "tiny",
        "messages": [{"role": "user", "content": "Hi"}],
        "tools": tools,
        "add_special_tokens": False,
    }
    without = tokenizer.encode("glad:Hi/", add_special_tokens=False)
    assert post(served, "/tokenize", **chat, tool_choice="none")["tokens"] == without
    assert post(served, "/tokenize", **chat)["tokens"] == tokenizer.encode("glad:Hi/f", add_special_tokens=False)
    answer = post(served, "/v1/chat/completions", **chat, tool_choice="none", max_tokens=1)
    assert answer["usage"]["prompt_tokens"] == len(without)


def log_of(served: LiveCluster) -> str:
    return served.log_file("scheduler").read_text()


def test_requests_and_outputs_are_logged_and_prompts_are_not(served: LiveCluster) -> None:
    text = post(served, "/v1/completions", **PROMPT, request_id="whole")["choices"][0]["text"]
    chunks(served, request_id="streamed", prompt="Once more", n=2, temperature=1)
    begun = "request cmpl-whole: 4 tokens in the prompt, max_tokens 10, temperature 0.0"
    served.wait_until(
        "the log", lambda: begun in log_of(served) and log_of(served).count("request cmpl-streamed, choice ") == 2
    )
    shown = text[:12]
    ended = f"request cmpl-whole, choice 0: length after 10 tokens: {shown!r} and {len(text) - 12} characters more"
    lines = log_of(served)
    assert len(text) > 12
    assert ended in lines
    assert "Once" not in lines


def test_requests_are_in_the_access_log_but_for_quiet_paths(served: LiveCluster) -> None:
    assert served.client.get(f"{served.url}/health?name=x").status_code == 200
    assert served.client.get(f"{served.url}/nothing%0Ahere?name=x").status_code == 404
    served.wait_until("the log", lambda: '"GET /nothing%0Ahere HTTP/1.1" 404 Not Found' in log_of(served))
    assert not [
        line for line in log_of(served).splitlines() if '"GET' in line and ("/health" in line or "name=x" in line)
    ]


def test_gauges_do_not_wait_for_heartbeats(served: LiveCluster) -> None:
    def num_cached() -> float:
        return told(served)["pd_cluster:num_cached_blocks", "decode-0"]

    for first in (37, 41):  # a heartbeat may coincide with one change, but not with both
        before = num_cached()
        post(served, "/v1/completions", **{**PROMPT, "prompt": [first] * 128})
        served.wait_until("the gauge shows the prompt's blocks", lambda least=before + 8: num_cached() >= least, 12)


def test_every_process_logs_as_the_file_says(served: LiveCluster) -> None:
    lines = {name: served.log_file(name).read_text().splitlines() for name in served.members}
    own = {name: {line.split()[1] for line in each if line.startswith("OWN ")} for name, each in lines.items()}
    assert all(own.values()), own
    assert not [line for each in lines.values() for line in each if " INFO " in line and not line.startswith("OWN ")]


def test_a_socket_that_is_taken_is_refused(model: Path, tmp_path: Path, served: LiveCluster) -> None:
    taken = served.folder / "api.sock"
    other = LiveCluster(tmp_path, model, arguments=FLAGS, member_arguments={"scheduler": [f"--uds={taken}"]})
    other.members = {member.name: member for member in other.plan() if member.is_scheduler}  # without workers
    try:
        other.start_member("scheduler")
        assert other.await_exit("scheduler") == 1
    finally:
        other.stop()
    assert f"--uds {taken}: another process listens there" in other.log_file("scheduler").read_text()
    assert taken.exists()
