"""Every further sampling parameter takes effect in a cluster with split prefill and decode."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from pd_cluster.text.tokenizer import Tokenizer
from tests.api.conftest import MAX_MODEL_LEN
from tests.support.checkpoints import EOS_ID, VOCAB_SIZE, reference_model
from tests.support.cluster import LiveCluster
from tests.support.engines import assert_same, random_prompt

PROMPT = "Once upon a time"
NUM_TOKENS = 24
BLOCK_SIZE = 16
MAX_TOKENS = 16
SAMPLED: dict[str, Any] = {"temperature": 1, "seed": 11}


def ask(cluster: LiveCluster, prompt: str | list[int] = PROMPT, **fields: Any) -> dict[str, Any]:
    """Returns a completion's choice; by default greedy, NUM_TOKENS tokens, ignoring the end of sequence."""
    defaults = {"temperature": 0, "max_tokens": NUM_TOKENS, "ignore_eos": True, "return_token_ids": True}
    body = {"prompt": prompt, **defaults, **fields}
    choice: dict[str, Any] = cluster.ask("/v1/completions", body)["choices"][0]
    return choice


def token_ids(cluster: LiveCluster, prompt: str | list[int] = PROMPT, **fields: Any) -> list[int]:
    found: list[int] = ask(cluster, prompt, **fields)["token_ids"]
    return found


@pytest.fixture(scope="module")
def greedy(cluster: LiveCluster) -> list[int]:
    return token_ids(cluster)


# ---- which tokens


def test_a_bias_forces_or_forbids_a_token(cluster: LiveCluster, greedy: list[int]) -> None:
    forced = next(i for i in range(256) if i not in greedy)
    for fields in ({}, SAMPLED):
        assert token_ids(cluster, logit_bias={str(forced): 100}, **fields) == [forced] * NUM_TOKENS
    biased = token_ids(cluster, logit_bias={str(greedy[0]): -100, str(greedy[5]): -100})
    assert not {greedy[0], greedy[5]} & set(biased)
    assert token_ids(cluster, logit_bias={str(greedy[0]): 0}) == greedy


@pytest.mark.parametrize("fields", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_only_allowed_tokens(cluster: LiveCluster, fields: dict[str, Any]) -> None:
    allowed = [3, 50, 99, 201]
    found = token_ids(cluster, allowed_token_ids=allowed, **fields)
    assert set(found) <= set(allowed)
    assert len(found) == NUM_TOKENS
    assert token_ids(cluster, allowed_token_ids=list(range(VOCAB_SIZE)), **fields) == token_ids(cluster, **fields)


@pytest.mark.parametrize("fields", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_bad_words_never_come(cluster: LiveCluster, tokenizer: Tokenizer, fields: dict[str, Any]) -> None:
    """Covers words of one token, and of two, which may occur separately but not in sequence."""
    letters = list("abcdefgh")
    allowed = [tokenizer.encode(letter)[0] for letter in letters]
    free = ask(cluster, allowed_token_ids=allowed, **fields)["text"]
    pair, single = free[3:5], free[10]
    text = ask(cluster, allowed_token_ids=allowed, bad_words=[pair], **fields)["text"]
    assert pair in free
    assert pair not in text
    same = free.index(pair) + 1  # up to there nothing is forbidden
    assert text[:same] == free[:same]
    assert single not in ask(cluster, allowed_token_ids=allowed, bad_words=[single], **fields)["text"]


# ---- penalties


def penalised_greedy(model: Path, prompt: list[int], presence: float, frequency: float, repetition: float) -> list[int]:
    """Applies vLLM's penalties to transformers' logits: repetition over prompt and output, others over the output."""
    output: list[int] = []
    for _ in range(NUM_TOKENS):
        with torch.inference_mode():
            logits = reference_model(model)(torch.tensor([prompt + output])).logits[0, -1].tolist()
        for token in {*prompt, *output}:
            logits[token] = logits[token] / repetition if logits[token] > 0 else logits[token] * repetition
        for token in set(output):
            logits[token] -= presence + frequency * output.count(token)
        output.append(max(range(len(logits)), key=lambda token: logits[token]))
    return output


@pytest.mark.parametrize(
    ("presence", "frequency", "repetition"),
    [(2, 0, 1), (-2, 0, 1), (0, 2, 1), (0, -2, 1), (0, 0, 2), (0, 0, 0.5), (1.5, 0.5, 1.2)],
)
def test_penalties_are_vllms_arithmetic(
    cluster: LiveCluster, model: Path, tokenizer: Tokenizer, presence: float, frequency: float, repetition: float
) -> None:
    expected = penalised_greedy(model, tokenizer.encode(PROMPT), presence, frequency, repetition)
    fields = {"presence_penalty": presence, "frequency_penalty": frequency, "repetition_penalty": repetition}
    assert token_ids(cluster, **fields) == expected


# ---- when to stop


def test_min_tokens_keeps_the_end_away(cluster: LiveCluster) -> None:
    """Even if the end token is the likeliest, it comes only after min_tokens, and then at once."""
    bias = {str(EOS_ID): 100}
    assert token_ids(cluster, logit_bias=bias, ignore_eos=False) == [EOS_ID]
    for num_tokens in (1, 2, 7):
        choice = ask(cluster, logit_bias=bias, ignore_eos=False, min_tokens=num_tokens)
        assert choice["token_ids"].index(EOS_ID) == num_tokens
        assert len(choice["token_ids"]) == num_tokens + 1
        assert choice["finish_reason"] == "stop"
    choice = ask(cluster, logit_bias=bias, ignore_eos=False, min_tokens=NUM_TOKENS)
    assert (len(choice["token_ids"]), choice["finish_reason"]) == (NUM_TOKENS, "length")
    assert EOS_ID not in choice["token_ids"]


def test_min_tokens_holds_for_stop_tokens_and_stop_strings(cluster: LiveCluster, tokenizer: Tokenizer) -> None:
    (x,) = tokenizer.encode("x")
    always_x = {"logit_bias": {str(x): 100}}
    assert ask(cluster, **always_x, stop="x")["text"] == ""
    choice = ask(cluster, **always_x, stop="x", min_tokens=5)
    assert (choice["text"], len(choice["token_ids"]), choice["finish_reason"]) == ("xxxxx", 6, "stop")
    assert token_ids(cluster, **always_x, stop_token_ids=[x]) == [x]
    found = token_ids(cluster, **always_x, stop_token_ids=[x], min_tokens=5)
    assert found.index(x) == 5
    assert len(found) == 6


# ---- the prompt


def test_a_prompt_is_cut_from_the_left(cluster: LiveCluster, tokenizer: Tokenizer) -> None:
    prompt = tokenizer.encode("This is a longer prompt than the last time")
    assert token_ids(cluster, prompt, truncate_prompt_tokens=9) == token_ids(cluster, prompt[-9:])
    long = [at % 250 for at in range(3 * MAX_MODEL_LEN)]
    fields: dict[str, Any] = {"prompt": long, "max_tokens": 10, "truncate_prompt_tokens": -1, "return_token_ids": True}
    choice = ask(cluster, **fields)
    assert choice["prompt_token_ids"] == long[-(MAX_MODEL_LEN - 10) :]
    messages = [{"role": "user", "content": "x" * 3 * MAX_MODEL_LEN}]
    body = {"messages": messages, "truncate_prompt_tokens": -1, "max_tokens": 5, "ignore_eos": True}
    answer = cluster.ask("/v1/chat/completions", body)
    assert answer["usage"]["prompt_tokens"] == MAX_MODEL_LEN - 5


def cached(cluster: LiveCluster, prompt: list[int], **fields: Any) -> int:
    body = {"prompt": prompt, "max_tokens": 4, "temperature": 0, **fields}
    answer = cluster.ask("/v1/completions", body)
    num_cached: int = answer["usage"]["prompt_tokens_details"]["cached_tokens"]
    return num_cached


def test_the_second_time_a_prompt_is_cached(cluster: LiveCluster) -> None:
    prompt = [(7 * at) % 241 for at in range(100)]
    assert cached(cluster, prompt) == 0
    second = cached(cluster, prompt)
    assert 64 <= second < 100
    assert cached(cluster, [*prompt[:50], *range(50)]) == 48, "expected whole blocks of 16 tokens"


def test_a_salt_separates(cluster: LiveCluster) -> None:
    """Without the salt other clients cannot detect cached prompts; answers are the same."""
    prompt = [(11 * at) % 239 for at in range(100)]
    salts: list[dict[str, Any]] = [{}, {"cache_salt": "mine"}, {"cache_salt": "yours"}]
    assert [cached(cluster, prompt, **salt) for salt in salts] == [0, 0, 0]
    assert all(cached(cluster, prompt, **salt) > 0 for salt in salts)
    answers = [token_ids(cluster, prompt, **salt) for salt in salts]
    assert answers == [answers[0]] * 3


def received(cluster: LiveCluster, turn: list[int]) -> tuple[list[int], int]:
    """Returns the answer, and the bytes of KV cache that decode received for it."""
    cluster.assert_home()
    before = cluster.instance("decode-0")["kv_received_nbytes"]
    answer = cluster.complete(turn, MAX_TOKENS, ignore_eos=True)
    cluster.assert_home()
    nbytes: int = cluster.instance("decode-0")["kv_received_nbytes"] - before
    return answer, nbytes


def test_a_second_turn_moves_only_what_is_new(cluster: LiveCluster, model: Path) -> None:
    """The decode instance caches received and generated blocks, so only new ones are sent."""
    first = random_prompt(random.Random(12), 4 * BLOCK_SIZE)
    answer, whole = received(cluster, first)
    block_nbytes = whole // 4
    second = [*first, *answer, *random_prompt(random.Random(13), 2 * BLOCK_SIZE)]
    again, rest = received(cluster, second)
    # The block with the answer's last token, whose KV decode never computed, and two of the new turn.
    assert rest == 3 * block_nbytes
    assert_same(model, second, again, MAX_TOKENS)
    _, nothing = received(cluster, first)
    assert nothing == 0


# ---- together


def test_everything_at_once_repeats(cluster: LiveCluster) -> None:
    fields = {"temperature": 0.8, "top_p": 0.9, "top_k": 40, "min_p": 0.01, "seed": 1, "n": 3, "logprobs": 2}
    fields |= {"presence_penalty": 0.3, "frequency_penalty": 0.4, "repetition_penalty": 1.1, "min_tokens": 4}
    more = {"logit_bias": {"65": 3, "70": -5}, "bad_words": ["qq", "zz"]}
    first, again = (cluster.complete_choices(PROMPT, 20, **fields, **more) for _ in range(2))
    assert first == again
    assert sum(map(len, first)) > 12
    cluster.assert_home()
