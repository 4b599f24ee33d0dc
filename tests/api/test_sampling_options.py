"""Every sampling parameter beyond the first ones has its effect, in a live cluster with split prefill and decode."""

from __future__ import annotations

import itertools
from pathlib import Path
from typing import Any

import pytest
import torch

from pd_cluster.text.tokenizer import Tokenizer
from tests.api.conftest import MAX_MODEL_LEN
from tests.support.checkpoints import EOS_ID, VOCAB_SIZE, reference_model
from tests.support.cluster import LiveCluster

PROMPT = "Once upon a time"
NUM_TOKENS = 24
SAMPLED: dict[str, Any] = {"temperature": 1, "seed": 11}


def ask(cluster: LiveCluster, prompt: str | list[int] = PROMPT, **fields: Any) -> dict[str, Any]:
    """Returns the choice of one completion: by default greedy, NUM_TOKENS tokens, past the end of sequence."""
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


@pytest.mark.parametrize("fields", [{}, SAMPLED], ids=["greedy", "sampled"])
def test_a_bias_forces_a_token(cluster: LiveCluster, greedy: list[int], fields: dict[str, Any]) -> None:
    forced = next(i for i in range(256) if i not in greedy)
    assert token_ids(cluster, logit_bias={str(forced): 100}, **fields) == [forced] * NUM_TOKENS


def test_a_bias_forbids_a_token(cluster: LiveCluster, greedy: list[int]) -> None:
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
    """Words of one token, and of two: then each of the two may come, one after the other they may not."""
    letters = list("abcdefgh")
    allowed = [tokenizer.encode(letter)[0] for letter in letters]
    free = ask(cluster, allowed_token_ids=allowed, **fields)["text"]
    pair, single = free[3:5], free[10]
    text = ask(cluster, allowed_token_ids=allowed, bad_words=[pair], **fields)["text"]
    assert pair in free
    assert pair not in text
    same = free.index(pair) + 1  # until then nothing was forbidden
    assert text[:same] == free[:same]
    assert single not in ask(cluster, allowed_token_ids=allowed, bad_words=[single], **fields)["text"]


def test_min_p_cuts_the_unlikely(cluster: LiveCluster, greedy: list[int]) -> None:
    assert token_ids(cluster, temperature=2, seed=3, min_p=1) == greedy
    wide = token_ids(cluster, temperature=2, seed=3)
    assert wide != greedy
    assert token_ids(cluster, temperature=2, seed=3, min_p=0) == wide


# ---- penalties


def repetitive(cluster: LiveCluster, **fields: Any) -> list[int]:
    """Among eight tokens only, so that repetition is sure."""
    return token_ids(cluster, allowed_token_ids=list(range(40, 48)), max_tokens=16, **fields)


def test_a_presence_penalty_spreads_the_choice(cluster: LiveCluster) -> None:
    """It takes 2 from what has come once, however often: a new token comes sooner, one that has come not sooner."""
    plain = repetitive(cluster)
    penalised = repetitive(cluster, presence_penalty=2)
    rewarded = repetitive(cluster, presence_penalty=-2)
    assert len(set(rewarded)) <= len(set(plain)) <= len(set(penalised))
    assert len({tuple(plain), tuple(penalised), tuple(rewarded)}) > 1
    assert penalised[0] == plain[0] == rewarded[0], "nothing had come yet"


def test_a_frequency_penalty_grows_with_each_repetition(cluster: LiveCluster) -> None:
    """40 is ahead by 20 in each step, at the least by what the model says; after enough repetitions it loses."""
    bias = {"40": 20.0}
    assert set(repetitive(cluster, logit_bias=bias)) == {40}
    penalised = repetitive(cluster, logit_bias=bias, frequency_penalty=2)
    assert penalised[0] == 40
    assert set(penalised) != {40}
    presence = repetitive(cluster, logit_bias=bias, presence_penalty=2)
    assert presence.count(40) > penalised.count(40)


def test_a_repetition_penalty_stops_repetition(cluster: LiveCluster) -> None:
    """It counts the prompt's tokens too."""
    prompt = list(range(100, 140))
    within = {"allowed_token_ids": [*range(100, 140), *range(200, 240)]}
    strong = token_ids(cluster, prompt, repetition_penalty=2, **within)
    plain = token_ids(cluster, prompt, **within)

    def num_repeated(found: list[int]) -> int:
        return sum(token in {*prompt, *found[:at]} for at, token in enumerate(found))

    assert num_repeated(strong) < num_repeated(plain)
    assert token_ids(cluster, prompt, repetition_penalty=1, **within) == plain


def penalised_greedy(model: Path, prompt: list[int], presence: float, frequency: float, repetition: float) -> list[int]:
    """vLLM's arithmetic on transformers' logits: repetition over prompt and output, the others over the output."""
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


@pytest.mark.parametrize("name", ["presence_penalty", "frequency_penalty"])
@pytest.mark.parametrize("value", [-2, 2])
def test_the_ends_of_the_range_are_in_it(cluster: LiveCluster, name: str, value: int) -> None:
    assert len(token_ids(cluster, **{name: value})) == NUM_TOKENS


# ---- when to stop


def test_min_tokens_keeps_the_end_away(cluster: LiveCluster) -> None:
    """This holds even if the end is the likeliest token, which then comes as soon as it may."""
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


def test_the_stop_string_can_be_kept(cluster: LiveCluster, tokenizer: Tokenizer) -> None:
    allowed = {"allowed_token_ids": [tokenizer.encode(letter)[0] for letter in "abcdefgh"]}
    text = ask(cluster, **allowed)["text"]
    stop = text[6:9]
    before = text[: text.index(stop)]
    assert ask(cluster, **allowed, stop=stop)["text"] == before
    kept = ask(cluster, **allowed, stop=stop, include_stop_str_in_output=True)
    assert (kept["text"], kept["finish_reason"]) == (before + stop, "stop")


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
    assert cached(cluster, [*prompt[:50], *range(50)]) == 48, "whole blocks of 16 tokens"


def test_a_salt_separates(cluster: LiveCluster) -> None:
    """Without the salt nobody can find out what others asked; the answers are the same."""
    prompt = [(11 * at) % 239 for at in range(100)]
    salts: list[dict[str, Any]] = [{}, {"cache_salt": "mine"}, {"cache_salt": "yours"}]
    assert [cached(cluster, prompt, **salt) for salt in salts] == [0, 0, 0]
    assert all(cached(cluster, prompt, **salt) > 0 for salt in salts)
    answers = [token_ids(cluster, prompt, **salt) for salt in salts]
    assert answers == [answers[0]] * 3


def test_cached_tokens_in_a_stream(cluster: LiveCluster) -> None:
    prompt = [(13 * at) % 233 for at in range(100)]
    body = {"prompt": prompt, "max_tokens": 4, "stream": True, "stream_options": {"include_usage": True}}
    texts = [cluster.client.post(f"{cluster.url}/v1/completions", json=body).text for _ in range(2)]
    assert '"cached_tokens":0' in texts[0]
    assert '"cached_tokens":' in texts[1]
    assert '"cached_tokens":0' not in texts[1]


# ---- together


@pytest.mark.parametrize("seed", range(3))
def test_everything_at_once_repeats(cluster: LiveCluster, seed: int) -> None:
    fields: dict[str, Any] = {
        "temperature": 0.8,
        "top_p": 0.9,
        "top_k": 40,
        "min_p": 0.01,
        "seed": seed,
        "presence_penalty": 0.3,
        "frequency_penalty": 0.4,
        "repetition_penalty": 1.1,
        "logit_bias": {"65": 3, "70": -5},
        "bad_words": ["qq", "zz"],
        "min_tokens": 4,
        "n": 3,
        "logprobs": 2,
    }
    body = {"prompt": PROMPT, "max_tokens": 20, "return_token_ids": True, **fields}
    answers = [cluster.client.post(f"{cluster.url}/v1/completions", json=body).json()["choices"] for _ in range(2)]
    assert [c["token_ids"] for c in answers[0]] == [c["token_ids"] for c in answers[1]]
    assert [c["text"] for c in answers[0]] == [c["text"] for c in answers[1]]
    assert len(list(itertools.chain(*(c["token_ids"] for c in answers[0])))) > 12
    cluster.assert_home()
