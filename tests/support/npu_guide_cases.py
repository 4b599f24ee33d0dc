"""The deployment guide's example on NPUs: its rank-table command, start_servers.sh three times, and its requests.

Run by scripts/npu_check.sh on NPUs, and by tests/cluster/test_npu_check.py on simulated ones. Variables:
PD_CLUSTER_TEST_CARDS names both instances' cards, PD_CLUSTER_TEST_FLAGS further flags, PD_CLUSTER_TEST_MODEL a model
(default: a tiny one, whose tokens are compared).
"""

from __future__ import annotations

import json
import os
import re
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.checkpoints import make_checkpoint, margin, reference_greedy
from tests.support.npu_parity_cases import IS_SIMULATED
from tests.support.start_servers import HOST, Servers, Shape, curl, document_body

pytestmark = pytest.mark.timeout(450)  # starts four ranks with graphs
PREFILL, DECODE = (os.environ.get("PD_CLUSTER_TEST_CARDS") or "4,5 6,7").split()
MODEL = os.environ.get("PD_CLUSTER_TEST_MODEL", "")
NUM_TOKENS = 24
# On the host, 16-bit layers are not fused, and capturing each size takes seconds.
MORE_FLAGS = os.environ.get("PD_CLUSTER_TEST_FLAGS", "").split()
FLAGS = (
    "--device=npu",
    *MORE_FLAGS,
    *(("--dtype=float32", "--max-num-seqs=4", "--num-blocks=24") if IS_SIMULATED else ()),
)
# In 16 bits a token may differ if the reference's two best logits are closer than this.
NEAR = 1e-4 if IS_SIMULATED else 0.1
SCHEMA = {
    "title": "Character",
    "type": "object",
    "properties": {
        "name": {"title": "Name", "maxLength": 10, "type": "string"},
        "age": {"title": "Age", "type": "integer"},
        "armor": {"$ref": "#/definitions/Armor"},
    },
    "required": ["name", "age", "armor"],
    "definitions": {"Armor": {"title": "Armor", "enum": ["leather", "chainmail", "plate"], "type": "string"}},
}


@pytest.fixture(scope="module")
def servers(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Servers]:
    folder = tmp_path_factory.mktemp("guide")
    if MODEL:
        model = Path(MODEL)
    else:
        sizes = {"head_dim": 128, "max_position_embeddings": 4096, "num_attention_heads": 8, "num_key_value_heads": 4}
        model = make_checkpoint(tmp_path_factory.mktemp("model"), **sizes)
    shape = Shape(len(PREFILL.split(",")), 1024 if IS_SIMULATED else 4096, 1024 if IS_SIMULATED else 4096)
    with Servers(folder, model, (PREFILL, DECODE), shape, "npu") as started:
        for name, devices, port in zip(("prefill", "decode"), started.devices, started.ports[:2], strict=True):
            started.start(name, devices.replace(",", ""), port, FLAGS)
        for port in (started.prefill, started.decode):
            started.await_health(port)
        started.start_scheduler()
        started.await_health(started.public)
        yield started
    for name in started.processes:
        shutil.copy(started.log_file(name), folder.parent / f"{name}.log")


def test_every_instance_has_the_cards_of_its_table(servers: Servers) -> None:
    for name, cards in (("prefill", PREFILL), ("decode", DECODE)):
        told = httpx.get(f"http://{HOST}:{getattr(servers, name)}/instance", timeout=10, trust_env=False).json()
        assert told["device_ids"] == cards.split(",")
        assert told["layout"]["tp_size"] == len(cards.split(","))
        assert told["layout"]["block_size"] == 128
        assert "attention by torch-npu" in servers.log(name)


@pytest.mark.skipif("--npu-tp-graphs" not in MORE_FLAGS, reason="without --npu-tp-graphs ranks decode eagerly")
def test_ranks_captured_graphs(servers: Servers) -> None:
    for name in ("prefill", "decode"):
        found = [int(n) for n in re.findall(r"captured ([0-9]+) of [0-9]+ decode graphs", servers.log(name))]
        print(f"{name}: {found} graphs")
        assert len(found) == len(PREFILL.split(","))
        assert min(found) > 0


def test_the_guides_requests(servers: Servers) -> None:
    answer = curl(servers.public, "/v1/chat/completions", document_body("tiny"))
    text = answer["choices"][0]["message"]["content"]
    print(f"hello: {text!r}")
    assert answer["usage"]["completion_tokens"] > 0
    again = curl(servers.public, "/v1/chat/completions", document_body("tiny"))
    assert again["choices"][0]["message"]["content"] == text
    body = {"model": "tiny", "prompt": "Describe Knight, who is 32 years old.", "max_tokens": 200, "temperature": 0}
    answer = curl(servers.public, "/v1/completions", {**body, "guided_json": json.dumps(SCHEMA)})
    text, reason = answer["choices"][0]["text"], answer["choices"][0]["finish_reason"]
    print(f"guided: {text!r}, {reason}")
    assert text.lstrip().startswith("{")
    if reason == "stop":
        assert set(json.loads(text)) == set(SCHEMA["required"])


def test_drawn_tokens_are_the_same_again(servers: Servers) -> None:
    body = {"model": "tiny", "prompt": "hello", "max_tokens": 16, "ignore_eos": True, "return_token_ids": True}
    drawn: dict[str, Any] = {**body, "seed": 7, "temperature": 0.8, "top_p": 0.9, "top_k": 40}
    first, second = (curl(servers.public, "/v1/completions", drawn)["choices"][0]["token_ids"] for _ in range(2))
    assert first == second


@pytest.mark.skipif(bool(MODEL), reason="a large model's reference takes minutes of the host")
def test_tokens_are_those_of_transformers(servers: Servers) -> None:
    for prompt in ([1, 2, 3], [7 * i % 250 for i in range(300)]):
        body = {"model": "tiny", "prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, "return_token_ids": True}
        found = curl(servers.public, "/v1/completions", body)["choices"][0]["token_ids"]
        expected = reference_greedy(servers.model, prompt, NUM_TOKENS)
        num_same = next((i for i, pair in enumerate(zip(found, expected, strict=False)) if pair[0] != pair[1]), None)
        print(f"{len(prompt)} tokens: {'all' if num_same is None else num_same} of {len(expected)} as in transformers")
        if num_same is None:
            assert len(found) == len(expected)
        else:
            assert margin(servers.model, prompt, expected[:num_same]) < NEAR


def test_the_kv_cache_went_from_card_to_card(servers: Servers) -> None:
    lines = [line for line in servers.log("prefill").splitlines() if "link to" in line]
    print("\n".join(lines))
    assert any("is up over ipc" in line or "is up over hccl" in line for line in lines)
