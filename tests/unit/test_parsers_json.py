"""Scanning JSON in pieces, against the standard library's parser of whole texts."""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from typing import Any

import pytest

from pd_cluster.parsers.json_scan import MAX_DEPTH, StringDecoder, scan_value
from pd_cluster.parsers.text_stream import BLANKS, Steps, TextStream

LETTERS = 'ab"\\/\n\té🙂\u2028<{[]}:, '


def pieces_of(text: str, rng: random.Random) -> Iterator[str]:
    at = 0
    while at < len(text):
        length = rng.choice([1, 1, 2, 5, 40])
        yield text[at : at + length]
        at += length


def random_value(rng: random.Random, depth: int = 4) -> Any:
    kind = rng.randrange(7 if depth else 5)
    if kind == 0:
        return rng.choice([True, False, None, 0, -1, 10**25, -0.5, 1e-9, 1.5e300])
    if kind <= 2:
        return random_text(rng)
    if kind == 3:
        return rng.randint(-999, 999)
    if kind == 4:
        return rng.choice([{}, [], ""])
    if kind == 5:
        return [random_value(rng, depth - 1) for _ in range(rng.randint(0, 4))]
    return {random_text(rng): random_value(rng, depth - 1) for _ in range(rng.randint(0, 4))}


def random_text(rng: random.Random) -> str:
    return "".join(rng.choices(LETTERS, k=rng.randint(0, 8)))


def scanned(pieces: Iterator[str]) -> tuple[bool, str, str]:
    """Returns whether a value was complete, the consumed text, and the rest."""
    stream, taken, found = TextStream(), [], []

    def read() -> Steps[None]:
        found.append((yield from scan_value(stream, taken.append)))
        yield from stream.until((), lambda text: None)

    steps = read()
    rest = []
    for piece in pieces:
        stream.add(piece)
        next(steps)
        if found:
            rest.append(piece)
    stream.end()
    next(steps, None)
    return found[0], "".join(taken), "".join(rest)


@pytest.mark.parametrize("seed", range(40))
def test_a_value_is_taken_whole_and_verbatim(seed: int) -> None:
    rng = random.Random(seed)
    value = [random_value(rng)]
    for indent, ascii_only in ((None, True), (1, False), (2, True)):
        text = json.dumps(value, indent=indent, ensure_ascii=ascii_only)
        assert scanned(pieces_of(text + ' ] more, {"', rng))[:2] == (True, text)
        assert scanned(iter(text))[:2] == (True, text)
        assert not scanned(iter(text[: rng.randrange(len(text))]))[0]  # a truncated text


@pytest.mark.parametrize("seed", range(150))
def test_what_the_library_refuses_is_refused(seed: int) -> None:
    """After replacing one character of a text, both parsers accept it or both reject it."""
    rng = random.Random(seed)
    value = {"a": [1, -2.5e3, {"b": True, "c": None}, [], {}, "x y"], "d": {"e": [[0]]}}
    letters = list(json.dumps(value, indent=rng.choice([None, 1])))
    for _ in range(rng.choice([1, 1, 2])):
        at = rng.randrange(len(letters))
        letters[at] = rng.choice(['"', "", *"{}[],:0123456789.-+eE tn", letters[at] * 2])
    text = "".join(letters)
    is_value, taken, _ = scanned(pieces_of(text, rng))
    try:
        json.loads(text, strict=False)
        is_good = True
    except ValueError:
        is_good = False
    assert (is_value and not text[len(taken) :].strip(BLANKS)) == is_good, text


NO_JSON = [
    *("NaN", "Infinity", "01", "1.", ".5", "+1", "1e", "tru", "nul", "-", "", "'a'", "[1,]", '{"a"}'),
    *("[1}", '{"a":1]', '{"a":1,}', "[,1]", '{,"a":1}', "{1:2}", '{"a":,}', "[1 2]", "[[]"),
]


def test_what_is_json_and_what_is_none() -> None:
    assert [text for text in NO_JSON if scanned(iter(text))[0]] == []
    for text in ('["a\nb\tc"]', r'["it\'s \d"]', r'["\u12"]', r'["\\"]'):
        assert scanned(iter(text))[:2] == (True, text)
    for opening, closing in (("[", "]"), ('{"a":', "}")):
        for depth in (MAX_DEPTH, MAX_DEPTH + 1, 100_000):
            text = opening * depth + "1" + closing * depth
            assert scanned(iter([text]))[0] == (depth == MAX_DEPTH)


def decoded(pieces: Iterator[str]) -> str:
    found: list[str] = []
    decoder = StringDecoder(found.append)
    for piece in pieces:
        decoder.feed(piece)
    decoder.finish()
    return "".join(found)


@pytest.mark.parametrize("seed", range(20))
def test_escapes_stand_for_what_the_library_says(seed: int) -> None:
    rng = random.Random(seed)
    text = "".join(rng.choices(LETTERS + "\\u😀𝄞", k=30))
    for ascii_only in (True, False):
        raw = json.dumps(text, ensure_ascii=ascii_only)[1:-1]
        assert decoded(pieces_of(raw, rng)) == text
        assert decoded(iter(raw)) == text


@pytest.mark.parametrize(
    ("raw", "text"),
    [
        (r"\ud83d", "\ufffd"),
        (r"\ud83d\n", "\ufffd\n"),
        (r"\ud83dx\ude00", "\ufffdx\ufffd"),
        (r"\ude00\ud83d", "\ufffd\ufffd"),
        (r"\ud83d\ud83d\ude00", "\ufffd😀"),
        (r"\u12", r"\u12"),
        (r"\u12zz\t", "\\u12zz\t"),
        (r"\x\'", r"\x\'"),
    ],
)
def test_escapes_that_are_none(raw: str, text: str) -> None:
    """Invalid escapes give output that can be encoded."""
    for pieces in (iter([raw]), iter(raw)):
        assert decoded(pieces) == text
    text.encode()
