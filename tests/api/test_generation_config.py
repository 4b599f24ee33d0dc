"""The source of a request's sampling defaults (the model folder, none, another folder), and overrides."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import httpx
import pytest

from pd_cluster import LLM, SamplingParams
from pd_cluster.errors import ConfigError, ModelError
from pd_cluster.text.tokenizer import Tokenizer
from tests.api.conftest import FLAGS
from tests.support.checkpoints import EOS_ID, reference_greedy
from tests.support.cluster import LiveCluster

pytestmark = pytest.mark.usefixtures("one_preloader")

PROMPT = "Once upon a time"
NUM_TOKENS = 24
SEEDS = (1, 2, 3)
OWN = {"temperature": 0, "repetition_penalty": 1.9, "top_k": 5, "do_sample": False}
NEUTRAL = {"temperature": 1.0, "top_p": 1.0, "top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}


@pytest.fixture(scope="module")
def greedy(model: Path) -> list[int]:
    """Returns the reference's answer without any defaults."""
    return reference_greedy(model, Tokenizer(model).encode(PROMPT), NUM_TOKENS)


@pytest.fixture(scope="module")
def ending(greedy: list[int]) -> int:
    """Returns a token in the middle of that answer, used to end it."""
    return next(token for at, token in enumerate(greedy) if at > 3 and token not in greedy[:at])


@pytest.fixture(scope="module")
def opinionated(model: Path, ending: int, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns the same model with sampling defaults and one more end token in its folder."""
    folder = tmp_path_factory.mktemp("opinionated") / "model"
    shutil.copytree(model, folder)
    (folder / "generation_config.json").write_text(json.dumps({**OWN, "eos_token_id": [EOS_ID, ending]}))
    return folder


class Urls(NamedTuple):
    """URLs of schedulers with different sources of defaults, over the same workers."""

    overridden: str  # greedy from another folder, the cap from the override; no penalty
    automatic: str
    neutral: str


@pytest.fixture(scope="module")
def cluster(opinionated: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    other = tmp_path_factory.mktemp("other")
    (other / "generation_config.json").write_text('{"temperature": 0, "repetition_penalty": 1.9}')
    override = '{"max_new_tokens": 3, "repetition_penalty": null}'
    own = {
        "scheduler-0": [f"--override-generation-config={override}"],
        "scheduler-1": ["--generation-config=auto"],
        "scheduler-2": ["--generation-config=vllm", "--require-model", "--enable-per-request-metrics"],
    }
    flags = [*FLAGS, f"--generation-config={other}"]  # also for the workers
    folder = tmp_path_factory.mktemp("defaults")
    with LiveCluster(folder, opinionated, 1, 1, flags, member_arguments=own, num_schedulers=len(own)) as running:
        for url in running.launch.urls:
            running.wait_until(f"{url} is ready", lambda url=url: running.client.get(f"{url}/health").is_success)  # type: ignore[misc]
        yield running


@pytest.fixture
def urls(cluster: LiveCluster) -> Urls:
    return Urls(*cluster.launch.urls)


def post(url: str, path: str, body: dict[str, Any]) -> httpx.Response:
    return httpx.post(f"{url}{path}", json=body, trust_env=False, timeout=60)


def ask(url: str, **fields: Any) -> list[int]:
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": NUM_TOKENS, "ignore_eos": True, **fields}
    answer = post(url, "/v1/completions", {"return_token_ids": True, **body})
    assert answer.status_code == 200, answer.text
    found: list[int] = answer.json()["choices"][0]["token_ids"]
    return found


def test_auto_is_the_model_folders_file(urls: Urls, greedy: list[int]) -> None:
    penalized = ask(urls.automatic, temperature=0, repetition_penalty=1.9)
    assert penalized != greedy
    assert [ask(urls.automatic, seed=seed) for seed in SEEDS] == [penalized] * len(SEEDS)
    assert ask(urls.automatic, repetition_penalty=1) == greedy  # the request takes precedence


def test_vllm_is_the_documented_defaults(urls: Urls, greedy: list[int]) -> None:
    drawn = [ask(urls.neutral, seed=seed) for seed in SEEDS]
    assert drawn == [ask(urls.neutral, seed=seed, **NEUTRAL) for seed in SEEDS]
    assert len({tuple(each) for each in drawn}) > 1
    assert ask(urls.neutral, temperature=0) == greedy


def test_the_models_ends_stay_ends(urls: Urls, greedy: list[int], ending: int, tokenizer: Tokenizer) -> None:
    until_end = greedy[: greedy.index(ending) + 1]
    for url in (urls.automatic, urls.neutral):
        assert ask(url, temperature=0, repetition_penalty=1, ignore_eos=False) == until_end
    prompt = tokenizer.encode(PROMPT) + until_end[:-2]
    found = ask(urls.overridden, prompt=prompt, ignore_eos=False)
    assert found == until_end[-2:]


def test_another_folder_and_an_override(urls: Urls, greedy: list[int]) -> None:
    for max_tokens in (None, 3, NUM_TOKENS):
        assert ask(urls.overridden, max_tokens=max_tokens) == greedy[:3]
    assert ask(urls.overridden, max_tokens=2) == greedy[:2]
    body = {"messages": [{"role": "user", "content": "hello"}], "ignore_eos": True}
    answer = post(urls.overridden, "/v1/chat/completions", body).json()
    assert answer["usage"]["completion_tokens"] == 3
    assert answer["choices"][0]["finish_reason"] == "length"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/completions", {"prompt": "a", "max_tokens": 2}),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "a"}], "max_tokens": 2}),
        ("/tokenize", {"prompt": "a"}),
        ("/detokenize", {"tokens": [1]}),
    ],
)
def test_a_model_is_required_where_the_flag_says_so(urls: Urls, path: str, body: dict[str, Any]) -> None:
    assert post(urls.automatic, path, body).status_code == 200
    assert post(urls.neutral, path, {**body, "model": "tiny"}).status_code == 200
    for nothing in ({}, {"model": None}):
        answer = post(urls.neutral, path, {**body, **nothing})
        assert (answer.status_code, answer.json()["error"]["param"]) == (400, "model"), answer.text


# ---- offline


def offline(model: Path, prefill: int = 0, decode: int = 0, **arguments: Any) -> list[int]:
    with LLM(str(model), num_blocks=64, max_model_len=256, prefill=prefill, decode=decode, **arguments) as llm:
        (output,) = llm.generate([PROMPT], SamplingParams(max_tokens=NUM_TOKENS, seed=7), use_tqdm=False)
        return list(output.outputs[0].token_ids)


def test_llm_takes_both_by_their_python_names(opinionated: Path, greedy: list[int], ending: int) -> None:
    until_end = greedy[: greedy.index(ending) + 1]
    assert offline(opinionated, override_generation_config={"repetition_penalty": None}) == until_end
    capped = '{"temperature": 0, "max_new_tokens": 2}'
    assert offline(opinionated, 1, 1, generation_config="vllm", override_generation_config=capped) == until_end[:2]


def test_llm_names_the_argument_that_is_wrong(opinionated: Path) -> None:
    with pytest.raises(ConfigError, match=r"^override_generation_config: 'temprature' is not .*did you mean temp"):
        LLM(str(opinionated), override_generation_config={"temprature": 1})
    with pytest.raises(ModelError, match=r"^generation_config 'nowhere': no folder with"):
        LLM(str(opinionated), generation_config="nowhere")


def test_metrics_in_every_answer(urls: Urls) -> None:
    """With --enable-per-request-metrics, answers have metrics unless a request opts out; otherwise only on request."""
    body = {"model": "tiny", "prompt": PROMPT, "max_tokens": 2}
    for url, more, has in (
        (urls.neutral, {}, True),
        (urls.neutral, {"include_metrics": False}, False),
        (urls.automatic, {}, False),
    ):
        answer = httpx.post(f"{url}/v1/completions", json={**body, **more}, timeout=60, trust_env=False)
        assert answer.status_code == 200, answer.text
        assert ("metrics" in answer.json()) == has
        assert not has or answer.json()["metrics"]["time_to_first_token_ms"] > 0
