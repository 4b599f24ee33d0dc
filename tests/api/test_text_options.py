"""Every accepted parameter takes effect."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple

import pytest

from pd_cluster.text.tokenizer import Tokenizer
from tests.api.conftest import MAX_MODEL_LEN
from tests.support.checkpoints import EOS_ID, reference_greedy
from tests.support.cluster import LiveCluster

PROMPT = "Once upon a time"
NUM_TOKENS = 40
HELLO = [{"role": "user", "content": "hello"}]


class Answer(NamedTuple):
    text: str
    finish_reason: str
    usage: dict[str, int]
    token_ids: list[int]


def ask(cluster: LiveCluster, prompt: str | list[int] = PROMPT, **fields: Any) -> Answer:
    """Sends one completion, by default greedy with NUM_TOKENS tokens; None omits a field."""
    defaults = {"temperature": 0, "max_tokens": NUM_TOKENS, "return_token_ids": True}
    body = {"prompt": prompt, **{k: v for k, v in {**defaults, **fields}.items() if v is not None}}
    data = cluster.ask("/v1/completions", body)
    (choice,) = data["choices"]
    data["usage"].pop("prompt_tokens_details", None)  # depends on earlier requests
    return Answer(choice["text"], choice["finish_reason"], data["usage"], choice.get("token_ids", []))


def chat(cluster: LiveCluster, messages: list[dict[str, Any]], **fields: Any) -> dict[str, Any]:
    body = {"messages": messages, "temperature": 0, "return_token_ids": True, **fields}
    data: dict[str, Any] = cluster.ask("/v1/chat/completions", body)
    data["usage"].pop("prompt_tokens_details", None)
    return data


def stream(cluster: LiveCluster, **body: Any) -> Iterator[dict[str, Any]]:
    """Yields the choices of a streamed completion."""
    fields = {"prompt": PROMPT, "temperature": 0, "max_tokens": NUM_TOKENS, **body, "stream": True}
    with cluster.client.stream("POST", f"{cluster.url}/v1/completions", json=fields) as answer:
        assert answer.status_code == 200
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                yield from json.loads(line.removeprefix("data: "))["choices"]


@pytest.fixture(scope="session")
def greedy(cluster: LiveCluster) -> Answer:
    return ask(cluster, ignore_eos=True)


# ---- sampling


def test_greedy_is_the_reference_s_and_repeatable(cluster: LiveCluster, model: Path, tokenizer: Tokenizer) -> None:
    answer = ask(cluster)
    assert answer.token_ids == reference_greedy(model, tokenizer.encode(PROMPT), NUM_TOKENS)
    assert ask(cluster) == answer
    assert ask(cluster, temperature=1e-9, seed=5) == answer


def test_a_seed_repeats_and_seeds_differ(cluster: LiveCluster) -> None:
    answers = [ask(cluster, temperature=1, seed=seed, ignore_eos=True).token_ids for seed in (1, 1, 2, -3, 2**63 - 1)]
    assert answers[0] == answers[1]
    assert len({tuple(answer) for answer in answers}) == 4
    assert ask(cluster, temperature=1.5).token_ids != ask(cluster, temperature=1.5).token_ids


def test_one_candidate_is_greedy_and_all_are_the_default(cluster: LiveCluster, greedy: Answer) -> None:
    hot: dict[str, Any] = {"temperature": 2, "seed": 3, "ignore_eos": True}
    wide = ask(cluster, **hot)
    assert wide.token_ids != greedy.token_ids
    assert ask(cluster, **hot, top_k=1) == ask(cluster, **hot, top_p=1e-9) == greedy
    for top_k in (-1, 0, 2**31 - 1):
        assert ask(cluster, **hot, top_k=top_k, top_p=1) == wide


def test_what_is_not_given_has_the_documents_default(cluster: LiveCluster) -> None:
    body = {"prompt": PROMPT, "seed": 5, "return_token_ids": True}
    defaults: dict[str, Any] = {"max_tokens": 16, "top_k": -1, "top_p": 1.0, "temperature": 1.0, "stop": None}
    defaults |= {"stream": False, "n": 1, "use_beam_search": False, "presence_penalty": 0.0, "frequency_penalty": 0.0}
    defaults |= {"length_penalty": 1.0, "ignore_eos": False, "guided_json": None}
    plain = cluster.ask("/v1/completions", body)["choices"]
    assert plain == cluster.ask("/v1/completions", body | defaults)["choices"]


# ---- length


@pytest.mark.parametrize(
    ("path", "fields", "num_tokens"),
    [
        ("completions", {"prompt": PROMPT}, 16),
        ("completions", {"prompt": PROMPT, "max_tokens": 1}, 1),
        ("completions", {"prompt": "x" * (MAX_MODEL_LEN - 3)}, 3),  # the default shrinks to the remaining context
        ("chat/completions", {"messages": HELLO, "max_tokens": 9, "max_completion_tokens": 5}, 5),
        ("chat/completions", {"messages": HELLO}, MAX_MODEL_LEN - len("<|user|>hello<|assistant|>")),
    ],
)
def test_how_long_an_answer_is(cluster: LiveCluster, path: str, fields: dict[str, Any], num_tokens: int) -> None:
    answer = cluster.ask(f"/v1/{path}", {"temperature": 0, "ignore_eos": True, **fields})
    assert (answer["usage"]["completion_tokens"], answer["choices"][0]["finish_reason"]) == (num_tokens, "length")
    assert answer["usage"]["total_tokens"] == answer["usage"]["prompt_tokens"] + num_tokens


# ---- when to stop


def first_tokens_with(tokenizer: Tokenizer, token_ids: list[int], stop: str) -> int:
    """Returns the number of tokens until the text contains the stop string."""
    return next(n for n in range(1, len(token_ids) + 1) if stop in tokenizer.decode(token_ids[:n]))


def stop_string_of(answer: Answer, tokenizer: Tokenizer) -> str:
    """Returns four valid characters from the middle, spanning several tokens, that do not occur earlier."""
    for at in range(4, len(answer.text) - 8):
        stop = answer.text[at : at + 4]
        if "\ufffd" in stop or answer.text.find(stop) != at:
            continue
        needed = first_tokens_with(tokenizer, answer.token_ids, stop)
        if tokenizer.decode(answer.token_ids[: needed - 1]).startswith(answer.text[: at + 2]):
            return stop
    raise AssertionError("the greedy answer has no such text; choose another prompt")


def test_a_stop_string_cuts_before_it(cluster: LiveCluster, greedy: Answer, tokenizer: Tokenizer) -> None:
    stop = stop_string_of(greedy, tokenizer)
    num_tokens = first_tokens_with(tokenizer, greedy.token_ids, stop)
    assert 1 < num_tokens < NUM_TOKENS
    for given in (stop, ["never in there", stop]):
        answer = ask(cluster, stop=given, ignore_eos=True)
        assert answer.text == greedy.text[: greedy.text.index(stop)]
        assert answer.finish_reason == "stop"
        assert answer.usage["completion_tokens"] == num_tokens
        assert answer.token_ids == greedy.token_ids[:num_tokens]
    cluster.assert_home()


def test_of_two_stop_strings_the_first_to_come_ends_the_text(cluster: LiveCluster) -> None:
    """Uses the document's `["你","好"]` in either order; a guide makes both occur."""
    said = "世界好,你好"
    for stop, wanted in ((["你", "好"], "世界"), (["好", "你"], "世界"), (["你"], "世界好,"), (["她"], said)):
        fields = {"guided_choice": [said], "stop": stop, "max_tokens": 40}
        (choice,) = chat(cluster, [{"role": "user", "content": PROMPT}], **fields)["choices"]
        assert choice["message"]["content"] == ask(cluster, **fields).text == wanted


def test_proxies_do_not_hold_a_stream_back(cluster: LiveCluster) -> None:
    """nginx buffers an answer unless this header disables it."""
    for path in ("completions", "chat/completions", "responses", "messages"):
        words = {"completions": "prompt", "responses": "input"}.get(path)
        asked: Any = {words: PROMPT} if words else {"messages": [{"role": "user", "content": PROMPT}]}
        limit = "max_output_tokens" if path == "responses" else "max_tokens"
        body = {**asked, "model": "tiny", limit: 2, "stream": True}
        answer = cluster.client.post(f"{cluster.url}/v1/{path}", json=body)
        assert (answer.status_code, answer.headers["x-accel-buffering"]) == (200, "no")


def test_a_streamed_stop_string_never_leaks(cluster: LiveCluster, greedy: Answer, tokenizer: Tokenizer) -> None:
    """An incomplete stop string at the end is text, held back until the last token."""
    stop = stop_string_of(greedy, tokenizer)
    choices = list(stream(cluster, stop=stop, ignore_eos=True))
    assert "".join(choice["text"] for choice in choices) == greedy.text[: greedy.text.index(stop)]
    assert [choice["finish_reason"] for choice in choices if choice["finish_reason"]] == ["stop"]
    stop = greedy.text[-3:] + "and more"
    answer = ask(cluster, stop=stop, ignore_eos=True)
    assert (answer.text, answer.finish_reason) == (greedy.text, "length")
    assert "".join(choice["text"] for choice in stream(cluster, stop=stop, ignore_eos=True)) == greedy.text


def test_stop_token_ids(cluster: LiveCluster, greedy: Answer, tokenizer: Tokenizer) -> None:
    token_id = greedy.token_ids[7]
    num_tokens = greedy.token_ids.index(token_id) + 1
    answer = ask(cluster, stop_token_ids=[token_id], ignore_eos=True)
    assert answer.token_ids == greedy.token_ids[:num_tokens]
    assert answer.finish_reason == "stop"
    assert answer.usage["completion_tokens"] == num_tokens
    assert answer.text == tokenizer.decode(greedy.token_ids[: num_tokens - 1])


@pytest.fixture(scope="session")
def ending(cluster: LiveCluster) -> tuple[str, Answer]:
    """Returns a prompt whose greedy answer ends by itself, and that answer."""
    for number in range(200):
        prompt = f"Tell me number {number}"
        answer = ask(cluster, prompt)
        if answer.finish_reason == "stop" and len(answer.token_ids) > 3:
            return prompt, answer
    raise AssertionError("no prompt ends by itself")


def test_the_end_of_sequence(cluster: LiveCluster, ending: tuple[str, Answer], tokenizer: Tokenizer) -> None:
    prompt, answer = ending
    num_tokens = len(answer.token_ids)
    assert answer.token_ids.index(EOS_ID) == num_tokens - 1 == answer.usage["completion_tokens"] - 1
    assert answer.text == tokenizer.decode(answer.token_ids)
    longer = ask(cluster, prompt, ignore_eos=True)
    assert longer.token_ids[:num_tokens] == answer.token_ids
    assert (len(longer.token_ids), longer.finish_reason) == (NUM_TOKENS, "length")
    assert longer.text.startswith(answer.text)


def test_special_tokens_are_shown_when_asked_for(
    cluster: LiveCluster, ending: tuple[str, Answer], tokenizer: Tokenizer
) -> None:
    prompt, answer = ending
    shown = ask(cluster, prompt, skip_special_tokens=False)
    assert shown.token_ids == answer.token_ids
    assert shown.text == tokenizer.decode(answer.token_ids[:-1], skip_special_tokens=False)
    kept = ask(cluster, prompt, skip_special_tokens=False, include_stop_str_in_output=True)
    assert kept.text == shown.text + "<eos>" == tokenizer.decode(answer.token_ids, skip_special_tokens=False)
    longer = ask(cluster, prompt, skip_special_tokens=False, ignore_eos=True)
    assert "<eos>" in longer.text
    assert longer.text == tokenizer.decode(longer.token_ids, skip_special_tokens=False)


# ---- contents of answers


def test_echo(cluster: LiveCluster, greedy: Answer, tokenizer: Tokenizer) -> None:
    assert ask(cluster, echo=True, ignore_eos=True).text == PROMPT + greedy.text
    token_ids = tokenizer.encode(PROMPT)
    assert ask(cluster, token_ids, echo=True, ignore_eos=True).text == PROMPT + greedy.text
    streamed = "".join(choice["text"] for choice in stream(cluster, echo=True, ignore_eos=True))
    assert streamed == PROMPT + greedy.text

    answer = ask(cluster, echo=True, max_tokens=0)
    assert (answer.text, answer.finish_reason) == (PROMPT, "length")
    assert answer.usage["completion_tokens"] == 0
    assert answer.usage["prompt_tokens"] == answer.usage["total_tokens"] == len(PROMPT)
    choices = list(stream(cluster, echo=True, max_tokens=0))
    assert "".join(choice["text"] for choice in choices) == PROMPT
    assert choices[-1]["finish_reason"] == "length"


def test_token_ids_in_and_out(cluster: LiveCluster, greedy: Answer, tokenizer: Tokenizer) -> None:
    token_ids: Any = tokenizer.encode(PROMPT)
    for prompt in (token_ids, [token_ids]):
        assert ask(cluster, prompt, ignore_eos=True) == greedy
    assert tokenizer.decode(greedy.token_ids) == greedy.text
    assert not ask(cluster, return_token_ids=None).token_ids
    streamed = [i for c in stream(cluster, return_token_ids=True, ignore_eos=True) for i in c.get("token_ids", [])]
    assert streamed == greedy.token_ids
    body = {"prompt": PROMPT, "max_tokens": 1, "return_token_ids": True}
    (choice,) = cluster.client.post(f"{cluster.url}/v1/completions", json=body).json()["choices"]
    assert choice["prompt_token_ids"] == token_ids


# ---- chat


def test_a_chat_is_its_template_s_completion(cluster: LiveCluster) -> None:
    messages = [
        {"role": "system", "content": "be brief"},
        {"role": "user", "content": "hello"},
        {"role": "assistant", "content": "yes?"},
        {"role": "user", "content": "well"},
    ]
    prompt = "<|system|>be brief<|user|>hello<|assistant|>yes?<|user|>well<|assistant|>"
    answer = chat(cluster, messages, max_tokens=12)
    assert answer["choices"][0]["token_ids"] == ask(cluster, prompt, max_tokens=12).token_ids
    without = chat(cluster, messages, max_tokens=12, add_generation_prompt=False)
    expected = ask(cluster, prompt.removesuffix("<|assistant|>"), max_tokens=12)
    assert without["choices"][0]["token_ids"] == expected.token_ids != answer["choices"][0]["token_ids"]
    parts = [{"type": "text", "text": "hello"}, {"type": "text", "text": "you"}]
    one = chat(cluster, [{"role": "user", "content": parts}], max_tokens=8)
    other = chat(cluster, [{"role": "user", "content": "hello\nyou"}], max_tokens=8)
    assert (one["choices"], one["usage"]) == (other["choices"], other["usage"])
