"""Weight updates in a serving cluster: every token comes from the version that its answer names."""

from __future__ import annotations

import json
import shutil
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import pytest

from pd_cluster.types import RequestSpec, Sampling
from tests.cluster.test_control import Background, Steered, running
from tests.support.cluster import free_port_pair
from tests.support.engines import assert_all_same, shared_core
from tests.support.engines import together as run_together
from tests.support.weight_versions import Trainer, info_of, make_version, restarted, two_versions

Checkpoints = Callable[..., Path]
PROMPT = [7] * 60
MOST_GROWTH_MIB = 3.0  # per process over eight updates
LONG = {"prompt": PROMPT, "max_tokens": 1500, "temperature": 0, "ignore_eos": True, "return_token_ids": True}


@pytest.fixture(scope="module")
def model(checkpoint: Checkpoints) -> Path:
    return checkpoint("llama", max_position_embeddings=4096)


@pytest.fixture(scope="module")
def versions(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    return two_versions(model, tmp_path_factory.mktemp("versions"))


@pytest.fixture(scope="module")
def learning(model: Path, versions: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Steered]:
    """Yields a cluster with a two-rank prefill instance and two API processes."""
    folder = tmp_path_factory.mktemp("learning")
    flags = ["--max-model-len=4096", "--num-blocks=640", "--api-workers=2", "--api-key=sk-hidden"]
    flags += [f"--weights-dir={versions}", "--weight-update-hosts=127.0.0.1"]
    with Steered(folder, model, 1, 1, flags, tp_sizes={"prefill-0": 2}) as running_one:
        running_one.client.headers["Authorization"] = "Bearer sk-hidden"
        yield running_one
        running_one.assert_home()


def update(cluster: Steered, folder: str, mode: str = "wait", **fields: Any) -> Any:
    cluster.command("/start_weight_update", json={"mode": mode})
    cluster.command("/update_weights", json={"update_info": {"folder": folder}})
    return cluster.command("/finish_weight_update", json=fields)


def assert_named(versions: Path, choices: list[dict[str, Any]]) -> None:
    """Asserts that each span's tokens equal those of an engine started with its version."""
    spans = [(choice, span) for choice in choices for span in choice["weight_versions"]]
    assert all(choice["weight_versions"][-1]["end"] == len(choice["token_ids"]) for choice in choices)
    for folder in {span["version"] for _, span in spans}:
        wanted = {}
        for choice, span in spans:
            if span["version"] == folder:
                start, end = span["start"], span["end"]
                before = *choice["prompt"], *choice["token_ids"][:start]
                wanted[before, end - start] = choice["token_ids"][start:end]
        core = shared_core(versions / folder, num_blocks=1024, device="cpu")
        samplings = [Sampling(max_tokens=count, temperature=0.0, ignore_eos=True) for _, count in wanted]
        orders = [RequestSpec(list(before), each) for (before, _), each in zip(wanted, samplings, strict=True)]
        assert run_together(core, orders) == list(wanted.values())


def ask(cluster: Steered, **fields: Any) -> tuple[list[int], int, list[dict[str, Any]]]:
    """Returns the tokens, the number of cached prompt tokens, and the versions."""
    body = {"prompt": PROMPT, "max_tokens": 6, "temperature": 0, "return_weight_versions": True, **fields}
    answer = cluster.client.post(f"{cluster.url}/v1/completions", json={**body, "return_token_ids": True}).json()
    (choice,) = answer["choices"]
    return choice["token_ids"], answer["usage"]["prompt_tokens_details"]["cached_tokens"], choice["weight_versions"]


def test_new_weights_serve_and_nothing_of_the_old_ones_is_reused(
    learning: Steered, model: Path, versions: Path
) -> None:
    before = ask(learning)
    assert_all_same(model, [PROMPT], [before[0]], 6)
    assert before[2] == [{"version": "default", "start": 0, "end": 6}]
    assert ask(learning)[1] > 0
    answer = update(learning, "step-1")
    assert answer["weight_version"] == "step-1"
    tokens, num_cached, spans = ask(learning)
    assert (num_cached, spans) == (0, [{"version": "step-1", "start": 0, "end": 6}])
    assert_all_same(versions / "step-1", [PROMPT], [tokens], 6)
    assert tokens != before[0]
    assert ask(learning)[:2] == (tokens, 48)
    info = info_of(learning)
    assert (info["weight_version"], info["phase"]) == ("step-1", "serving")
    assert info["instances"] == dict.fromkeys(("prefill-0", "decode-0"), info["epoch"])
    learning.command("/update_weight_version", json={"new_version": "best"})
    learning.wait_until("the name is known", lambda: ask(learning)[2] == [{"version": "best", "start": 0, "end": 6}])


def test_every_api_names_the_version(learning: Steered) -> None:
    learning.command("/update_weight_version", json={"new_version": "named"})
    wanted = [{"version": "named", "start": 0, "end": 4}]
    learning.wait_until("the name is known", lambda: ask(learning, max_tokens=4)[2] == wanted)
    turns = [{"role": "user", "content": "a"}]
    asked: dict[str, tuple[str, dict[str, Any]]] = {
        "messages": ("max_tokens", {"messages": turns}),
        "responses": ("max_output_tokens", {"input": turns}),
        "chat/completions": ("max_tokens", {"messages": turns, "ignore_eos": True}),
    }
    for path, (limit, fields) in asked.items():
        body = {limit: 4, "model": "tiny", "temperature": 0, **fields}
        plain = learning.client.post(f"{learning.url}/v1/{path}", json=body)
        assert (plain.status_code, "weight_versions" in plain.text) == (200, False), plain.text
        body["return_weight_versions"] = True
        answer = learning.client.post(f"{learning.url}/v1/{path}", json=body).json()
        found = answer["choices"][0] if "choices" in answer else answer
        assert found["weight_versions"] == wanted
        lines = learning.client.post(f"{learning.url}/v1/{path}", json={**body, "stream": True}).text.splitlines()
        events = [json.loads(line.removeprefix("data: ")) for line in lines if line.startswith("data: {")]
        parts = [part for event in events for part in (event, event.get("response"), *event.get("choices", ())) if part]
        assert [part["weight_versions"] for part in parts if part.get("weight_versions")] == [wanted]
    tokens = {"enable_response_messages": True, "input": "a", "max_output_tokens": 4, "ignore_eos": True}
    answer = learning.client.post(f"{learning.url}/v1/responses", json=tokens)
    assert answer.json()["weight_versions"] == wanted


def test_a_request_continues_on_the_new_weights(learning: Steered, versions: Path) -> None:
    update(learning, "step-1")
    streams = Background(learning, 3, **LONG)
    learning.wait_until("they run", lambda: running(learning) >= 3)
    update(learning, "step-2", mode="keep")
    for answer in streams.end():
        assert answer.status_code == 200, answer.text
        (choice,) = answer.json()["choices"]
        first, second = choice["weight_versions"]
        assert (first["version"], second["version"], second["end"]) == ("step-1", "step-2", 1500)
        assert first["end"] == second["start"]
        assert_named(versions, [{**choice, "prompt": PROMPT}])


def test_requests_end_or_finish_first(learning: Steered, versions: Path) -> None:
    ended = Background(learning, 1, **LONG)
    learning.wait_until("it runs", lambda: running(learning) >= 1)
    update(learning, "step-1", mode="abort")
    assert [answer.status_code for answer in ended.end()] == [410]
    finished = Background(learning, 1, **LONG)
    learning.wait_until("it runs", lambda: running(learning) >= 1)
    update(learning, "step-2", mode="wait")
    (answer,) = finished.end()
    assert answer.json()["choices"][0]["weight_versions"] == [{"version": "step-1", "start": 0, "end": 1500}]


def test_instances_that_die_come_back_with_the_current_weights(learning: Steered, versions: Path) -> None:
    update(learning, "step-1")
    expected = ask(learning)
    restarted(learning, "decode-0", "prefill-0")
    learning.await_ready()
    assert ask(learning)[::2] == expected[::2]
    info = info_of(learning)
    assert info["instances"] == dict.fromkeys(("prefill-0", "decode-0"), info["epoch"])


def test_a_version_outlives_its_folder(learning: Steered, versions: Path) -> None:
    """Covers a trainer that removes its folder, then hidden links of the server, until an operator restores them."""
    shutil.copytree(versions / "step-2", versions / "brief")
    update(learning, "brief")
    expected = ask(learning)
    shutil.rmtree(versions / "brief")
    restarted(learning, "decode-0")
    learning.await_ready()
    assert ask(learning)[::2] == expected[::2]
    (own,) = versions.glob("received-*")
    own.rename(versions / "hidden")
    restarted(learning, "decode-0")

    def says_why() -> bool:
        found = learning.instance("decode-0")
        why = f"it cannot load weights brief, and tries again: {own}"
        return found["state"] == "connecting" and (found["reason"] or "").startswith(why)

    try:
        learning.wait_until("the instance says why it is not ready", says_why)
    finally:
        (versions / "hidden").rename(own)
    learning.await_ready()
    assert ask(learning)[::2] == expected[::2]


def test_an_update_waits_while_no_instance_is_ready(learning: Steered, versions: Path) -> None:
    restarted(learning, "decode-0", "prefill-0")
    update(learning, "step-2")
    learning.await_ready()
    tokens, _, spans = ask(learning)
    assert spans == [{"version": "step-2", "start": 0, "end": 6}]
    assert_all_same(versions / "step-2", [PROMPT], [tokens], 6)


@pytest.mark.parametrize(
    ("path", "body", "status", "why"),
    [
        ("/update_weights", {"update_info": {"folder": "../elsewhere"}}, 400, "is not below --weights-dir"),
        ("/update_weights", {"update_info": {"folder": "none"}}, 404, "there is no folder"),
        ("/update_weights", {"update_info": {"path": "x"}}, 400, "unknown field"),
        ("/start_weight_update", {"mode": "later"}, 400, "mode"),
        ("/start_weight_update", {}, 409, "an update has been started"),
        ("/finish_weight_update", {}, 409, "no weights have been checked"),
    ],
)
def test_what_is_refused_changes_nothing(
    learning: Steered, path: str, body: dict[str, Any], status: int, why: str
) -> None:
    before = ask(learning)[::2]
    learning.command("/start_weight_update")
    answer = learning.ask_admin("POST", path, json=body)
    assert (answer.status_code, why in answer.text) == (status, True), answer.text
    learning.command("/abort_weight_update")
    assert httpx.post(f"{learning.url}{path}", json=body, trust_env=False).status_code in (401, 404)
    assert ask(learning)[::2] == before


def test_a_folder_that_does_not_fit_is_refused_by_name(
    learning: Steered, model: Path, versions: Path, checkpoint: Checkpoints
) -> None:
    (versions / "wide").symlink_to(checkpoint("llama"))
    learning.command("/start_weight_update")
    answer = learning.ask_admin("POST", "/update_weights", json={"update_info": {"folder": "wide"}})
    assert (answer.status_code, "not below --weights-dir" in answer.text) == (400, True), answer.text
    make_version(checkpoint("llama"), versions / "short", 1)
    answer = learning.ask_admin("POST", "/update_weights", json={"update_info": {"folder": "short"}})
    assert (answer.status_code, "max_position_embeddings is" in answer.text) == (400, True), answer.text
    learning.command("/abort_weight_update")


def test_a_trainer_sends_the_tensors(learning: Steered, versions: Path) -> None:
    update(learning, "step-1")
    trainer = Trainer(free_port_pair(), versions / "step-2")
    try:
        learning.command("/init_weight_transfer_engine", json={"init_info": trainer.info})
        learning.command("/start_weight_update")
        learning.command("/update_weights", json=trainer.part(0, 5))
        answer = learning.ask_admin("POST", "/update_weights", json=trainer.part(0, 1))
        assert (answer.status_code, "has already been sent" in answer.text) == (400, True), answer.text
        answer = learning.ask_admin("POST", "/finish_weight_update")
        assert (answer.status_code, "an update has all tensors" in answer.text) == (400, True), answer.text
        learning.command("/update_weights", json=trainer.part(5))
        assert learning.command("/finish_weight_update", json={"weight_version": "sent"})["weight_version"] == "sent"
        tokens, _, spans = ask(learning)
        assert spans == [{"version": "sent", "start": 0, "end": 6}]
        assert_all_same(versions / "step-2", [PROMPT], [tokens], 6)
        learning.kill("decode-0")
        learning.await_exit("decode-0")
        learning.start_member("decode-0")
        learning.await_ready()
        assert ask(learning)[::2] == (tokens, spans)
    finally:
        trainer.end()
    sent = (*versions.glob("received-*"),)
    update(learning, "step-1")
    assert len(sent) == len([*versions.glob("received-*")]) == 1
    assert not sent[0].exists()


def test_a_trainer_that_dies_changes_nothing(learning: Steered, versions: Path) -> None:
    before = ask(learning)[::2]
    trainer = Trainer(free_port_pair(), versions / "step-2")
    try:
        elsewhere = {**trainer.info, "master_address": "192.0.2.1"}
        answer = learning.ask_admin("POST", "/init_weight_transfer_engine", json={"init_info": elsewhere})
        assert (answer.status_code, "is not in --weight-update-hosts" in answer.text) == (400, True), answer.text
        learning.command("/init_weight_transfer_engine", json={"init_info": trainer.info})
        learning.command("/start_weight_update")
        trainer.end()
        answer = learning.ask_admin("POST", "/update_weights", json=trainer.part(0))
        assert (answer.status_code, "the trainer's group" in answer.text) == (409, True), answer.text
        answer = learning.ask_admin("POST", "/update_weights", json=trainer.part(0))
        assert "no trainer's group has been joined" in answer.text
        learning.command("/abort_weight_update")
    finally:
        trainer.end()
    assert ask(learning)[::2] == before
    assert len([*versions.glob("received-*")]) == 1


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_every_token_is_of_the_version_that_its_answer_names(
    model: Path, versions: Path, tmp_path_factory: pytest.TempPathFactory
) -> None:
    """Runs 200 streams on 1P2D with two ranks each, during ten updates and two kills."""
    flags = ["--max-model-len=4096", "--num-blocks=640", f"--weights-dir={versions}", "--max-attempts=20"]
    sizes = dict.fromkeys(("prefill-0", "decode-0", "decode-1"), 2)
    folders = {f"v{number}": f"step-{number % 2 + 1}" for number in range(11)}
    with Steered(tmp_path_factory.mktemp("proof"), model, 1, 2, flags, tp_sizes=sizes) as cluster:
        update(cluster, folders["v0"], weight_version="v0")
        choices: list[dict[str, Any]] = []

        def stream(at: int) -> None:
            choices.append(streamed(cluster.url, [at % 7 + 3] * 40, 150))

        def change() -> None:
            for number in range(1, 11):
                update(cluster, folders[f"v{number}"], ("keep", "wait")[number % 2], weight_version=f"v{number}")
                if number in (4, 7):
                    name = {4: "decode-1", 7: "prefill-0"}[number]
                    cluster.kill(name)
                    cluster.await_exit(name)
                    cluster.start_member(name)

        with ThreadPoolExecutor(8) as pool:  # members end with the thread that starts them, so this thread starts them
            streams = [pool.submit(stream, at) for at in range(200)]
            change()
            for each in streams:
                each.result(500)
        assert len(choices) == 200
        seen = {span["version"] for choice in choices for span in choice["weight_versions"]}
        assert len(seen) > 8, seen
        for choice in choices:
            for span in choice["weight_versions"]:
                span["version"] = folders[span["version"]]
        assert_named(versions, choices)
        cluster.await_ready()
        cluster.assert_home()
        for number in range(10):  # without requests, whose memory would count as well
            if number == 2:
                before_mib = resident_mib(cluster)
            update(cluster, f"step-{number % 2 + 1}")
        grown_mib = {name: mib - before_mib[name] for name, mib in resident_mib(cluster).items()}
        assert max(grown_mib.values()) < MOST_GROWTH_MIB, grown_mib


def streamed(url: str, prompt: list[int], max_tokens: int) -> dict[str, Any]:
    """Returns the tokens and the versions of a streamed completion."""
    body = {"prompt": prompt, "max_tokens": max_tokens, "temperature": 0, "ignore_eos": True, "stream": True}
    found: dict[str, Any] = {"prompt": prompt, "token_ids": []}
    asked = {**body, "return_token_ids": True}
    with httpx.stream("POST", f"{url}/v1/completions", json=asked, timeout=120, trust_env=False) as answer:
        for line in answer.iter_lines():
            if not line.startswith("data: {"):
                continue
            event = json.loads(line.removeprefix("data: "))
            assert "error" not in event, event
            for choice in event["choices"]:
                found["token_ids"] += choice.get("token_ids") or []
                found["weight_versions"] = choice.get("weight_versions")
    assert len(found["token_ids"]) == max_tokens
    return found


def resident_mib(cluster: Steered) -> dict[str, float]:
    """Returns each process's memory without file pages, by instance and rank."""
    pids = {name: process.pid for name, process in cluster.processes.items()}
    for name in (each for each in [*pids] if each.startswith(("prefill", "decode"))):
        pids |= {f"{name}, rank {rank}": pid for rank, pid in enumerate(cluster.rank_pids(name))}
    found = {}
    for name, pid in pids.items():
        lines = Path(f"/proc/{pid}/status").read_text().splitlines()
        found[name] = sum(int(line.split()[1]) for line in lines if line.startswith("RssAnon")) / 1024
    return found
