"""Both legs of models that take pictures, except Qwen's."""

from __future__ import annotations

import signal
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.cluster.test_pictures import Stream, post, tokens
from tests.support.checkpoints import make_tokenizer
from tests.support.cluster import LiveCluster, together
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
    """Returns generate()'s answer to a message of texts and pictures."""
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
    assert wanted[0] != wanted[1], "the picture must matter"
    with LiveCluster(tmp_path / "cluster", model, arguments=FLAGS) as cluster:
        asks = [partial(post, cluster, body_of(parts)) for parts in CONVERSATIONS]
        for _ in range(2):  # the second time from the prefix caches
            assert [tokens(answer) for answer in together(asks)] == wanted
        cluster.await_received("decode-0")
        counts = []
        for words in ("x", NAMES[FIRST]):
            body = {"messages": body_of([picture(1), words])["messages"]}
            counts.append(cluster.client.post(f"{cluster.url}/tokenize", json=body).json()["tokens"].count(FIRST))
        assert counts[0] == counts[1], "a user's text must not become a control token"
        cluster.assert_home()


@pytest.mark.slow
@pytest.mark.timeout(400)
@pytest.mark.parametrize("name", ["gemma3", "glm4v"])
def test_killed_in_mid_request(tmp_path: Path, name: str) -> None:
    """Over gloo, with all pixels in files, decode dies between tokens, and prefill during a request."""
    model = make_kind(tmp_path / "model", name)
    parts = CONVERSATIONS[2]
    body = {**body_of(parts), "max_tokens": 250, "ignore_eos": True}
    reference = expected(model, name, parts)
    spill = tmp_path / "spill"
    spill.mkdir()
    flags = [*FLAGS, "--kv-transport=dist", "--media-memory-gb=0", f"--media-spill-path={spill}"]
    with LiveCluster(tmp_path / "cluster", model, arguments=flags) as cluster:
        whole = tokens(post(cluster, body))
        assert whole[: len(reference)] == reference
        for victim in ("decode-0", "prefill-0"):
            if victim == "prefill-0":
                cluster.kill_rank(victim, signal.SIGSTOP)
            stream = Stream(cluster, body)
            if victim == "prefill-0":
                cluster.wait_until("it was sent", lambda: cluster.instance("prefill-0")["num_outstanding"] == 1)
            else:
                stream.begun()
            cluster.kill(victim)
            assert stream.end() == whole
            cluster.restart(victim)
        cluster.assert_home()
        assert not list(spill.iterdir()), "pixel files must be unnamed"
