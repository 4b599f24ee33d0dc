"""--try-unlisted and --language-model-only across real processes."""

from __future__ import annotations

import random
from pathlib import Path

import pytest

from tests.support import multimodal
from tests.support.cluster import LiveCluster
from tests.support.engines import assert_all_same, random_prompt
from tests.support.unlisted import make

FLAGS = ["--block-size=16", "--max-num-batched-tokens=40", "--num-blocks=128"]
PROMPTS = [random_prompt(random.Random(4), length) for length in (1, 17, 41, 100)]


def test_an_unlisted_model_is_served_as_unproven(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The model's entry in /v1/models, and each process's log, mark the model as unproven."""
    model = make(tmp_path / "model", "helium", monkeypatch)
    with LiveCluster(tmp_path, model, arguments=[*FLAGS, "--try-unlisted=helium"]) as cluster:
        outputs = [cluster.complete(prompt, 16) for prompt in PROMPTS]
        assert_all_same(model, PROMPTS, outputs, 16)
        cluster.await_received("decode-0")
        cards = [*cluster.client.get(f"{cluster.url}/v1/models").json()["data"]]
        cards.append(cluster.client.get(f"{cluster.url}/v1/models/tiny").json())
        assert [card["unproven"] for card in cards] == [True, True]
        cluster.assert_home()
        for name in ("scheduler", "prefill-0", "decode-0"):
            assert "unproven: model_type helium is not listed" in cluster.log_file(name).read_text()


def test_the_text_model_of_a_multimodal_folder(tmp_path: Path) -> None:
    model = multimodal.make_multimodal(tmp_path / "model", "gemma3")
    with LiveCluster(tmp_path, model, arguments=[*FLAGS, "--language-model-only"]) as cluster:
        outputs = [cluster.complete(prompt, 16) for prompt in PROMPTS]
        assert outputs == multimodal.reference_greedy(model, PROMPTS, 16)
        cluster.await_received("decode-0")
        assert "unproven" not in cluster.client.get(f"{cluster.url}/v1/models").json()["data"][0]
        image = {"type": "image_url", "image_url": {"url": "data:image/png;base64,AAAA"}}
        body = {"messages": [{"role": "user", "content": [image]}]}
        answer = cluster.client.post(f"{cluster.url}/v1/chat/completions", json=body)
        assert answer.status_code == 400
        assert "image_url: this model takes no images; leave them out" in answer.json()["error"]["message"]
        cluster.assert_home()
