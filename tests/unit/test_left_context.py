"""Prompt text plus answer text equal the decoded whole, for every kind of tokenizer."""

from __future__ import annotations

import random
from functools import cache
from pathlib import Path

import pytest
from tokenizers import Tokenizer as RustTokenizer

from pd_cluster.extras.lmdeploy.generation_config import request_of
from pd_cluster.messages import GenerationConfig
from pd_cluster.text.tokenizer import Tokenizer
from tests.support.text_services import completion, services_in, whole
from tests.support.tokenizer_kinds import FIRST_BYTE, KINDS

TEXTS = ("日本語", "😀😀 x", "é", "\ufffd", "a\ufffd\ufffd ")
NUM_CASES = 100


@pytest.fixture(scope="module", params=KINDS)
def kind(request: pytest.FixtureRequest, tmp_path_factory: pytest.TempPathFactory) -> tuple[RustTokenizer, Tokenizer]:
    folder = tmp_path_factory.mktemp(request.param)
    rust = KINDS[request.param]()
    rust.save(str(folder / "tokenizer.json"))
    return rust, Tokenizer(folder)


@cache
def bytes_of(rust: RustTokenizer, text: str) -> list[int]:
    """Returns the byte tokens of a text, if the tokenizer has any."""
    if rust.token_to_id("<0x00>") is not None:
        return [FIRST_BYTE + byte for byte in text.encode()]
    return rust.encode(text, add_special_tokens=False).ids


def drawn(rust: RustTokenizer, rng: random.Random) -> list[int]:
    """Draws tokens of whole characters: spaces, words, special tokens, and characters of several tokens."""
    has_bytes = rust.token_to_id("<0x00>") is not None
    others = [i for i in range(rust.get_vocab_size()) if not (has_bytes and FIRST_BYTE <= i < FIRST_BYTE + 256)]
    if rust.token_to_id("Ġ") is not None:
        others = [i for i in others if "\ufffd" not in rust.decode([i], skip_special_tokens=False)]
    found: list[int] = []
    for _ in range(rng.randrange(25)):
        found += bytes_of(rust, rng.choice(TEXTS)) if rng.random() < 0.3 else [rng.choice(others)]
        found += [rng.choice((1, 2))] * rng.choice((0, 0, 0, 1, 12))
    return found


@pytest.mark.parametrize("skip", [True, False])
def test_the_texts_of_prompt_and_answer_are_the_decoded_whole(
    kind: tuple[RustTokenizer, Tokenizer], skip: bool
) -> None:
    rust, tokenizer = kind
    rng = random.Random(7)
    for _ in range(NUM_CASES):
        token_ids = drawn(rust, rng)
        at = rng.randint(0, len(token_ids))
        prompt, answer = token_ids[:at], token_ids[at:]
        detokenizer = tokenizer.detokenizer(skip)
        detokenizer.follow(prompt)
        shown = detokenizer.prompt_text(prompt)
        one_by_one, at_once = detokenizer.copy(), detokenizer
        text = "".join(map(one_by_one.add, answer)) + one_by_one.finish()
        assert shown + text == rust.decode(token_ids, skip_special_tokens=skip), (prompt, answer)
        assert at_once.add_all(answer) + at_once.finish() == text


def test_a_resumed_answer_follows_the_prompt_that_was_sent(tmp_path: Path) -> None:
    """The sent prompt counts, because a template that renders the date gives another one when rendered again."""
    service, _ = services_in(tmp_path, KINDS["llama2"]())("world")
    sent, other = completion(service, "Hello"), completion(service, [1])
    assert [piece.text for piece in whole(service, completion(service, [1]))] == ["world"]
    other.resume(sent.order)
    assert [piece.text for piece in whole(service, other)] == [" world"]


def test_every_sequence_has_its_own_text(tmp_path: Path) -> None:
    """Each sequence completes the character in which the prompt ends."""
    rust = KINDS["llama2"]()
    service, router = services_in(tmp_path, rust)()
    *begun, last = bytes_of(rust, "日")
    router.token_ids = [last]
    pieces = whole(service, completion(service, [*rust.encode("x").ids, *begun], n=3))
    assert [piece.text for piece in pieces] == ["日"] * 3


def test_a_stop_word_of_spaces_is_text(tmp_path: Path) -> None:
    """A space alone decodes to nothing, like a special token, but must count as text."""
    KINDS["unigram"]().save(str(tmp_path / "tokenizer.json"))
    request = request_of(GenerationConfig(stop_words=[" ", "</s>"]), Tokenizer(tmp_path))
    assert (request.stops, request.stop_token_ids) == ([" "], [2])
