"""API keys from a file with two API processes: OpenAI's client at its limits, refunds, and reloading the file."""

from __future__ import annotations

import json
import os
import re
import signal
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import httpx
import openai
import pytest
from prometheus_client.parser import text_string_to_metric_families

from pd_cluster.extras.key_file.key_file import KeyFile, digest_of, write_key_file
from pd_cluster.process_messages import ApiKey
from tests.api.conftest import FLAGS
from tests.support.adapters import make_adapter
from tests.support.cluster import LiveCluster, children_of

SALT = "5a" * 32
METRICS_KEY = "mk-0123456789"
FLAG_KEY = "sk-from-the-flag"
NUM_TRIES = 6  # enough new connections for both processes
A_MINUTE = 1200  # tokens per minute; twenty return each second
LONG = {"max_tokens": 240, "temperature": 0, "extra_body": {"ignore_eos": True}}


def key_of(name: str, **fields: Any) -> ApiKey:
    return ApiKey(id=name, digest=digest_of(SALT, secret_of(name).encode()), **{"tenant": f"team-{name}", **fields})


def secret_of(name: str) -> str:
    return f"pdc-secret-of-{name}"


KEYS = (
    key_of("requests", requests_per_minute=2),
    key_of("tokens", tokens_per_minute=A_MINUTE),
    key_of("left", tokens_per_minute=1000),
    key_of("models", models=("second",)),
    key_of("adapter", models=("french",)),
    key_of("all"),
    key_of("shared", requests_per_minute=10),
    key_of("swapped"),
)


class Keyed(LiveCluster):
    file: Path

    def write(self, *keys: ApiKey) -> None:
        write_key_file(self.file, KeyFile(SALT, keys))

    def hang_up(self, said: str) -> None:
        """Sends SIGHUP until a new line of the scheduler's log contains `said`."""
        num_before = self.log_file("scheduler").read_text().count(said)
        self.processes["scheduler"].send_signal(signal.SIGHUP)
        log = self.log_file("scheduler")
        self.wait_until("the scheduler says so", lambda: log.read_text().count(said) > num_before)


@pytest.fixture(scope="module")
def keyed(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Keyed]:
    folder = tmp_path_factory.mktemp("keyed")
    flags = [*FLAGS, "--api-workers=2", f"--api-key-file={folder / 'keys.json'}", '--allowed-origins=["*"]']
    french = make_adapter(folder / "french", model, 1)
    flags += ["--enable-lora", f"--lora-modules=french={french}", f"--lora-modules=german={french}"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PD_CLUSTER_SERVE_API_KEY", FLAG_KEY)
        patch.setenv("PD_CLUSTER_SERVE_METRICS_KEY", METRICS_KEY)
        cluster = Keyed(folder, model, arguments=flags, served_model_names=("tiny", "second"))
        cluster.file = folder / "keys.json"
        cluster.write(*KEYS)
        with cluster:
            yield cluster
            cluster.assert_home()


def client_of(keyed: Keyed, name: str, retries: int = 0) -> openai.OpenAI:
    return openai.OpenAI(base_url=f"{keyed.url}/v1", api_key=secret_of(name), max_retries=retries, timeout=60)


def headers_of(name: str) -> dict[str, str]:
    return {"Authorization": f"Bearer {secret_of(name)}"}


def tokenized(keyed: Keyed, name: str) -> httpx.Response:
    """Sends a request that counts but uses no tokens, over a new connection."""
    body = {"prompt": "a"}
    return httpx.post(f"{keyed.url}/tokenize", json=body, headers=headers_of(name), trust_env=False, timeout=60)


def left(keyed: Keyed, name: str) -> int:
    return int(tokenized(keyed, name).headers["x-ratelimit-remaining-tokens"])


def test_openais_client_at_its_limit_of_requests(keyed: Keyed) -> None:
    with client_of(keyed, "requests") as client:
        for at in range(2):
            raw = client.chat.completions.with_raw_response.create(
                model="tiny", messages=[{"role": "user", "content": "a"}], max_tokens=2, stream=bool(at % 2)
            )
            assert raw.headers["x-ratelimit-limit-requests"] == "2"
            assert raw.headers["x-ratelimit-remaining-requests"] == str(1 - at)
            assert "x-ratelimit-limit-tokens" not in raw.headers
            raw.http_response.read()
        with pytest.raises(openai.RateLimitError) as caught:
            client.completions.create(model="tiny", prompt="a", max_tokens=2)
    headers = caught.value.response.headers
    assert 1 <= int(headers["retry-after"]) <= 30
    assert (headers["x-ratelimit-limit-requests"], headers["x-ratelimit-remaining-requests"]) == ("2", "0")
    assert caught.value.code == "rate_limit_exceeded"
    origin = {"Origin": "https://a.example"}
    page = httpx.post(f"{keyed.url}/tokenize", headers=headers_of("requests") | origin, json={}, trust_env=False)
    assert page.status_code == 429
    assert "x-ratelimit-reset-requests" in page.headers["access-control-expose-headers"]


def prompts_of(num_tokens: int) -> list[list[int]]:
    """Returns prompts that use `num_tokens` tokens in total, with one answer token each."""
    num_whole, rest = divmod(num_tokens, 241)
    return [[7] * 240] * num_whole + ([[7] * (rest - 1)] if rest > 1 else [])


def test_openais_client_waits_as_long_as_it_is_told_and_is_let_in(keyed: Keyed) -> None:
    with client_of(keyed, "tokens") as client, client_of(keyed, "tokens", retries=3) as patient:
        wanted: Any = prompts_of(A_MINUTE)
        for _ in range(50):  # a slow second between two requests may refill the bucket
            try:
                client.completions.create(model="tiny", prompt=wanted, max_tokens=1)
            except openai.RateLimitError as error:
                refused = error
                break
            wanted = prompts_of(min(left(keyed, "tokens") + 30, A_MINUTE))
        assert int(refused.response.headers["retry-after"]) in (1, 2)
        assert refused.response.headers["x-ratelimit-limit-tokens"] == str(A_MINUTE)
        assert "tokens a minute" in refused.message
        answer = patient.completions.create(model="tiny", prompt=wanted, max_tokens=1)
        assert len(answer.choices) == len(wanted)


def test_a_client_that_leaves_has_its_tokens_back(keyed: Keyed) -> None:
    body = {"model": "tiny", "prompt": [1] * 16, "max_tokens": 240, "n": 4, "ignore_eos": True, "stream": True}
    assert left(keyed, "left") == 1000
    keyed.kill_rank("decode-0", signal.SIGSTOP)  # otherwise the answer might end before its client leaves
    try:
        with httpx.stream(
            "POST", f"{keyed.url}/v1/completions", json=body, headers=headers_of("left"), trust_env=False, timeout=60
        ) as answer:
            assert answer.status_code == 200
            assert int(answer.headers["x-ratelimit-remaining-tokens"]) < 1000 - 16 - 4 * 240 + 100
        keyed.wait_until("they are back, sooner than by themselves", lambda: left(keyed, "left") > 600, timeout_s=20)
    finally:
        keyed.kill_rank("decode-0", signal.SIGCONT)
    keyed.await_ready()


CHAT = {"messages": [{"role": "user", "content": "Hello"}]}
GREEDY = {"temperature": 0, "max_tokens": 8, "ignore_eos": True}
PARAMS = {"sampling_params": GREEDY}
ROUTES: dict[str, dict[str, Any]] = {  # route -> fields of an answer that depend on the adapter
    "/v1/completions": {"prompt": "a", **GREEDY},
    "/v1/chat/completions": {**CHAT, **GREEDY},
    "/v1/chat/completions/batch": {"messages": [CHAT["messages"]] * 2, **GREEDY},
    "/v1/responses": {"input": "Hello", "temperature": 0, "max_output_tokens": 16, "store": False},
    "/v1/messages": {**CHAT, "temperature": 0, "max_tokens": 8},
    "/inference/v1/generate": {"token_ids": [5, 6, 7], **PARAMS},
    "/invocations": {**CHAT, **GREEDY},
    "/v1/embeddings": {"input": "a"},
    "/v1/score": {"text_1": "a", "text_2": "bcd"},
    "/v1/rerank": {"query": "a", "documents": ["bcd"]},
}
OTHER_ROUTES: dict[str, dict[str, Any]] = {
    "/tokenize": {"prompt": "a"},
    "/detokenize": {"tokens": [5]},
    "/v1/messages/count_tokens": CHAT,
    "/v1/responses/input_tokens": {"input": "Hello"},
    "/v1/chat/completions/render": {**CHAT, **GREEDY},
    "/v1/completions/render": {"prompt": "a", **GREEDY},
}
TELLING = re.compile(r'"(?:text|content|token_ids|embedding|score|relevance_score)":("[^"]*"|[^,}]*[,}])')


@pytest.mark.parametrize("path", ROUTES | OTHER_ROUTES)
def test_a_key_that_may_use_an_adapter_alone(keyed: Keyed, path: str) -> None:
    """Any other name, existing or not, is not found; and the adapter itself answers."""

    def ask(key: str, **naming: str) -> httpx.Response:
        body = {**(ROUTES | OTHER_ROUTES)[path], **naming}
        return httpx.post(f"{keyed.url}{path}", json=body, headers=headers_of(key), trust_env=False, timeout=60)

    answers = {name: ask("all", model=name) for name in ("tiny", "french", "german")}
    assert {each.status_code for each in answers.values()} == {200}, answers["tiny"].text
    own = ask("adapter", model="french")
    assert own.status_code == 200, own.text
    if path in ROUTES:
        told = {name: TELLING.findall(each.text) for name, each in answers.items()}
        assert told["french"] == told["german"] == TELLING.findall(own.text) != told["tiny"]
        assert told["french"]
    refused = {name: ask("adapter", model=name) for name in ("tiny", "german", "nothing")}
    refused[""] = ask("adapter")
    if path not in ("/v1/responses", "/v1/messages", "/v1/messages/count_tokens"):  # these need a model name
        assert refused[""].status_code == 404
    for name in ("tiny", "german", "nothing"):
        assert refused[name].status_code == 404
        assert refused[name].text.replace(name, "nothing") == refused["nothing"].text
        assert ("french" in refused[name].text, "second" in refused[name].text) == (True, False)


def test_a_key_sees_its_adapters_alone(keyed: Keyed) -> None:
    with client_of(keyed, "adapter") as client:
        assert [each.id for each in client.models.list()] == ["french"]
        assert client.models.retrieve("french").id == "french"
        for name in ("german", "tiny"):
            with pytest.raises(openai.NotFoundError):
                client.models.retrieve(name)
    assert "is not served here" not in keyed.log_file("scheduler").read_text()
    with client_of(keyed, "models") as client, pytest.raises(openai.NotFoundError) as caught:
        client.completions.create(model="french", prompt="a")
    assert "german" not in str(caught.value)


def spend_all(keyed: Keyed) -> float:
    """Uses up the key `shared`; returns the time. One request returns every six seconds."""
    now_s = time.monotonic()

    def is_spent() -> bool:
        nonlocal now_s
        now_s = time.monotonic()
        return tokenized(keyed, "shared").status_code == 429

    keyed.wait_until("nothing is left", is_spent)
    return now_s


def num_left(keyed: Keyed) -> int:
    """Sends one more request; returns how many may follow."""
    return int(tokenized(keyed, "shared").headers["x-ratelimit-remaining-requests"])


def test_two_processes_have_one_limit(keyed: Keyed) -> None:
    begun_s = time.monotonic()
    with ThreadPoolExecutor(8) as pool:
        statuses = list(pool.map(lambda _: tokenized(keyed, "shared").status_code, range(24)))
    num_back = int((time.monotonic() - begun_s) / 6)  # one request every six seconds
    assert {*statuses} == {200, 429}
    assert 10 <= statuses.count(200) <= 10 + num_back


def test_a_file_that_is_read_again_disturbs_nothing(keyed: Keyed) -> None:
    with client_of(keyed, "swapped") as client, client_of(keyed, "next") as following:
        stream = client.completions.create(model="tiny", prompt=[5, 6, 7], stream=True, **LONG)  # type: ignore[call-overload]
        first = next(stream)
        since_s = spend_all(keyed)
        keyed.write(*KEYS[:-1], key_of("next", tenant="team-swapped"))
        keyed.hang_up(f"the API keys were read again: {len(KEYS)} in")

        def is_swapped() -> bool:
            answers = [tokenized(keyed, name).status_code for name in ["swapped", "next"] * NUM_TRIES]
            return answers == [401, 200] * NUM_TRIES

        keyed.wait_until("both processes have the new keys", is_swapped)
        assert sum(len(chunk.choices[0].text) > 0 for chunk in [first, *stream]) > 1
        assert following.completions.create(model="tiny", prompt="a", max_tokens=1).choices
        assert num_left(keyed) <= (time.monotonic() - since_s) / 6, "the remaining requests must stay"
        whole = json.loads(keyed.file.read_text())
        whole["keys"][0]["requests_per_minute"] = "many"
        keyed.file.write_text(json.dumps(whole))
        keyed.hang_up("the API keys stay as they are")
        (line,) = [each for each in keyed.log_file("scheduler").read_text().splitlines() if "stay as" in each]
        said = f"--api-key-file {keyed.file}: keys[0] (id 'requests'): requests_per_minute: 'many': expected a whole"
        assert said in line
        assert {tokenized(keyed, "next").status_code for _ in range(NUM_TRIES)} == {200}


@pytest.mark.slow
def test_a_process_that_is_started_again_has_the_new_keys(keyed: Keyed) -> None:
    """After kill -9 of the API processes, their successors have the reloaded keys; spent requests stay spent."""
    scheduler = keyed.processes["scheduler"].pid
    since_s = spend_all(keyed)
    keyed.write(*KEYS[:-1], key_of("third"))
    keyed.hang_up(f"the API keys were read again: {len(KEYS)} in")
    serving = [pid for pid in children_of(scheduler) if b"api_process" in Path(f"/proc/{pid}/cmdline").read_bytes()]
    assert len(serving) == 2
    for pid in serving:
        os.kill(pid, signal.SIGKILL)

    def is_back() -> bool:
        try:
            return {tokenized(keyed, "third").status_code for _ in range(NUM_TRIES)} == {200}
        except httpx.TransportError:
            return False

    keyed.wait_until("both are there again", is_back)
    assert num_left(keyed) <= (time.monotonic() - since_s) / 6, "the remaining requests must have stayed"


def test_tenants_are_counted_by_all_processes_together(keyed: Keyed) -> None:
    def told() -> dict[tuple[str, str, str], float]:
        key = {"Authorization": f"Bearer {METRICS_KEY}"}
        answer = httpx.get(f"{keyed.url}/metrics", headers=key, trust_env=False, timeout=60)
        if answer.status_code != 200:
            return {}
        return {
            (sample.name.removeprefix("pd_cluster:tenant_"), sample.labels["tenant"], *of(sample.labels)): sample.value
            for family in text_string_to_metric_families(answer.text)
            for sample in family.samples
            if "tenant" in sample.labels
        }

    def of(labels: dict[str, str]) -> tuple[str]:
        return (labels.get("outcome", "") + labels.get("limit", ""),)

    httpx.post(
        f"{keyed.url}/tokenize", json={"prompt": "a"}, headers={"Authorization": f"Bearer {FLAG_KEY}"}, trust_env=False
    )
    keyed.wait_until("all is told", lambda: told().get(("requests_total", "other", "finished")) == 1)
    found = told()
    assert found["limited_total", "team-tokens", "tokens"] >= 1
    assert found["limited_total", "team-shared", "requests"] >= 1
    assert found["requests_total", "team-shared", "limited"] == found["limited_total", "team-shared", "requests"]
    assert found["requests_total", "team-left", "aborted"] == 1
    assert found["prompt_tokens_total", "team-tokens", ""] >= 4 * 240
    assert found["generation_tokens_total", "team-swapped", ""] == 240 + 1


def test_holders_of_keys_do_not_learn_how_busy_others_keep_the_cluster(keyed: Keyed) -> None:
    headers = {"Authorization": f"Bearer {FLAG_KEY}", "endpoint-load-metrics-format": "TEXT"}
    answer = keyed.client.post(f"{keyed.url}/v1/completions", json={"prompt": "a", "max_tokens": 1}, headers=headers)
    assert (answer.status_code, "endpoint-load-metrics" in answer.headers) == (200, False)
    for name in keyed.members:  # keys must not be in any log
        log = keyed.log_file(name).read_text(errors="replace")
        assert not [each for each in ("pdc-", FLAG_KEY, SALT, *(key.digest for key in KEYS)) if each in log]
