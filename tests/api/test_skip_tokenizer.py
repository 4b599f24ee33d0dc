"""A server without a tokenizer takes and returns token ids; requests that need text get an error that says so."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.support.cluster import LiveCluster
from tests.support.engines import assert_same

PROMPT = [5, 6, 7, 8]
TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "chat_template.jinja", "special_tokens_map.json")


@pytest.fixture(scope="module")
def model(checkpoint: Callable[..., Path]) -> Path:
    return checkpoint("llama")


@pytest.fixture(scope="module")
def cluster(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    folder = tmp_path_factory.mktemp("bare") / "model"
    folder.mkdir()
    for file in model.iterdir():
        if file.name not in TOKENIZER_FILES:
            (folder / file.name).write_bytes(file.read_bytes())
    arguments = ["--skip-tokenizer-init", "--num-blocks=64"]
    with LiveCluster(tmp_path_factory.mktemp("skip"), folder, arguments=arguments) as running:
        yield running


def test_token_ids_in_and_out(cluster: LiveCluster, model: Path) -> None:
    assert_same(model, PROMPT, cluster.complete(PROMPT, 8, ignore_eos=True), 8)


def test_logprobs_name_tokens_by_their_ids(cluster: LiveCluster) -> None:
    """Tokens in logprobs are named by id, because without texts all other names would be equal."""
    body = {"prompt": PROMPT, "max_tokens": 2, "temperature": 0, "logprobs": 3, "return_token_ids": True}
    (choice,) = cluster.client.post(f"{cluster.url}/v1/completions", json=body).json()["choices"]
    assert choice["text"] == ""
    assert choice["logprobs"]["tokens"] == [f"token_id:{token_id}" for token_id in choice["token_ids"]]
    assert all(len(top) >= 3 for top in choice["logprobs"]["top_logprobs"])


@pytest.mark.parametrize(
    ("route", "body", "named"),
    [
        ("/v1/completions", {"prompt": "hi"}, "prompt: a text, but this server has no tokenizer (--skip-tok"),
        ("/v1/completions", {"prompt": PROMPT, "stop": ["a"]}, "stop: needs a tokenizer"),
        ("/v1/chat/completions", {"messages": [{"role": "user", "content": "hi"}]}, "chat template"),
        ("/tokenize", {"prompt": "hi"}, "this server has no tokenizer"),
        ("/detokenize", {"tokens": [1]}, "tokens: there is no tokenizer"),
    ],
)
def test_what_needs_text_is_refused_by_name(cluster: LiveCluster, route: str, body: dict[str, Any], named: str) -> None:
    answer = cluster.client.post(f"{cluster.url}{route}", json=body)
    assert answer.status_code == 400, answer.text
    assert named in answer.json()["error"]["message"]
