"""Both legs of models that take pictures, other than Qwen's."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest

from tests.support.checkpoints import make_tokenizer
from tests.support.cluster import LiveCluster
from tests.support.picture_kinds import FIRST, KINDS, LAST, NAMES, asked, make_kind, reference_answer
from tests.support.pictures import data_url, picture

NUM_TOKENS = 16
QUICK = ("gemma3",)
FLAGS = ["--block-size=4", "--num-blocks=256", "--max-num-seqs=8", "--max-num-batched-tokens=16", "--max-model-len=400"]
CONVERSATIONS: list[list[Any]] = [
    ["ab", picture(1), "c"],
    ["ab", picture(2), "c"],
    ["x", picture(3, 40, 16), "y", picture(4, 17, 33), "z"],
    ["no picture"],
]


def body_of(parts: list[Any]) -> dict[str, Any]:
    content = [
        {"type": "text", "text": part}
        if isinstance(part, str)
        else {"type": "image_url", "image_url": {"url": data_url(part)}}
        for part in parts
    ]
    more = {"max_tokens": NUM_TOKENS, "temperature": 0, "return_token_ids": True}
    return {"messages": [{"role": "user", "content": content}], **more}


def expected(folder: Path, name: str, parts: list[Any]) -> list[int]:
    """generate()'s answer to a message of texts and pictures."""
    around = ("\n\n", "\n\n") if name == "gemma3" else ("", "")
    texts, pictures, text = [], [], "<|user|>"
    for part in parts:
        if isinstance(part, str):
            text += part
        else:
            texts.append(text + around[0])
            pictures.append(part)
            text = around[1]
    ids = [list(make_tokenizer().encode(each).ids) for each in [*texts, text + "<|assistant|>"]]
    if name == "gemma3":
        ids = [[*[LAST] * (at > 0), *each, *[FIRST] * (at < len(ids) - 1)] for at, each in enumerate(ids)]
    return reference_answer(folder, name, asked(name, ids, pictures), NUM_TOKENS)


@pytest.mark.parametrize(
    "name", [pytest.param(name, marks=[] if name in QUICK else pytest.mark.slow) for name in KINDS]
)
def test_both_legs(tmp_path: Path, name: str) -> None:
    model = make_kind(tmp_path / "model", name)
    wanted = [expected(model, name, parts) for parts in CONVERSATIONS]
    assert wanted[0] != wanted[1], "the picture does not matter"
    with LiveCluster(tmp_path / "cluster", model, arguments=FLAGS) as cluster:

        def answer(parts: list[Any]) -> list[int]:
            found = cluster.client.post(f"{cluster.url}/v1/chat/completions", json=body_of(parts))
            assert found.status_code == 200, found.text
            tokens: list[int] = found.json()["choices"][0]["token_ids"]
            return tokens

        with ThreadPoolExecutor(4) as pool:
            for _ in range(2):  # then from the prefix caches
                assert list(pool.map(answer, CONVERSATIONS)) == wanted
        cluster.wait_until("KV cache came over", lambda: cluster.instance("decode-0")["kv_received_nbytes"] > 0)
        counts = []
        for words in ("x", NAMES[FIRST]):
            body = {"messages": body_of([picture(1), words])["messages"]}
            counts.append(cluster.client.post(f"{cluster.url}/tokenize", json=body).json()["tokens"].count(FIRST))
        assert counts[0] == counts[1], "a user's text is no control token"
        cluster.assert_home()
