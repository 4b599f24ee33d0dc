"""Which tokens each part of a reply gets, however the text is split into pieces."""

from __future__ import annotations

import itertools
import random

import pytest

from pd_cluster.parsers.reply_format import ReplyFormat
from pd_cluster.parsers.reply_parts import CallArguments, CallBegin, Content, Part, Reasoning
from pd_cluster.service.answers.token_alignment import TokenAlignment
from pd_cluster.service.generation.text_sequence import Piece, TokenLogprobs
from pd_cluster.types import Logprobs
from tests.unit.test_parsers_families import ALL_END, CASES, END

CALL = '{"name": "f", "arguments": {}}'
V3 = "<｜tool▁calls▁begin｜><｜tool▁call▁begin｜>function<｜tool▁sep｜>f\n```json\n{}\n```"
PREAMBLE = [
    *("<|channel|>", "commentary", "<|message|>", "pre", "amble", "<|end|>"),
    *("<|start|>", "assistant", "<|channel|>", "final"),
]
REPLIES: dict[str, tuple[list[str], list[str]]] = {
    "a character of two tokens": (["a", "", "é", "b"], ["a", "", "é", "b"]),
    "text that could be a mark": (["a ", "<", "tool", "s", ">", " b"], ["a ", "<", "tool", "s", ">", " b"]),
    "all of it": (["<think>", "x", "</think>", "\n\n", "So", ":", "<tool_call>", CALL, "</tool_call>"], ["So", ":"]),
}


def pieces_of(tokens: list[str], sizes: random.Random) -> list[Piece]:
    """Returns pieces of one to three tokens; a token without text comes with the next one, or at the end."""
    found: list[Piece] = []
    num_chars, at = 0, 0
    while at < len(tokens):
        until = at + sizes.randint(1, 3)
        entries = []
        for number, text in enumerate(tokens[at:until], at):
            entries.append(TokenLogprobs(number, Logprobs(-1.0, 1, []), num_chars))
            num_chars += len(text)
        found.append(Piece(0, "".join(tokens[at:until]), [*range(at, until)], entries))
        at = until
    return found


def shared(form: ReplyFormat, pieces: list[Piece], prompt_end: str = "") -> tuple[str, list[int]]:
    """Returns a reply's content and its tokens' ids."""
    reader, shares, steps, found = form.reader("auto", prompt_end), TokenAlignment(), list[list[Part]](), list[int]()
    for piece in pieces:
        for text in shares.cut(piece):
            steps.append(reader.feed(text))
            found += [each.token_id for given in shares.of(steps[-1], reader.num_held) for each in given]
    steps.append(reader.finish())
    found += [each.token_id for given in shares.of(steps[-1], reader.num_held) for each in given]
    return "".join(part.text for parts in steps for part in parts if isinstance(part, Content)), found


@pytest.mark.parametrize("name", REPLIES)
def test_content_has_the_tokens_that_wrote_it(name: str) -> None:
    tokens, wanted = REPLIES[name]
    for seed in range(40):
        form = ReplyFormat("hermes", "qwen3" if "<think>" in tokens else "")
        content, found = shared(form, pieces_of(tokens, random.Random(seed)))
        assert [tokens[token_id] for token_id in found] == wanted
        assert content == "".join(wanted)


@pytest.mark.parametrize(
    ("parser", "reasoning", "tokens", "wanted"),
    [
        ("hermes", "qwen3", ["cout", " ", "<", "<", " x"], ["cout", " ", "<", "<", " x"]),
        ("hermes", "", ["<", "><", "b"], ["<", "><", "b"]),
        ("mistral", "", ["[", "[", "1", "]", "]"], ["[", "[", "1", "]", "]"]),
        ("hunyuan_a13b", "hunyuan_a13b", ["x", "\n", "}\n"], ["x", "\n", "}\n"]),
        ("hermes", "ernie45", ["</think>", "x", "\n", "}\n"], ["x", "\n", "}\n"]),
        ("deepseek_v3", "", [V3, END, "\n", ALL_END, "Hi"], ["\n", "Hi"]),
        ("openai", "openai_gptoss", [*PREAMBLE, "<|message|>", "Hel", "lo"], ["pre", "amble", "Hel", "lo"]),
    ],
)
def test_text_that_readers_hold_back_or_move(parser: str, reasoning: str, tokens: list[str], wanted: list[str]) -> None:
    for seed in range(10):
        _, found = shared(ReplyFormat(parser, reasoning), pieces_of(tokens, random.Random(seed)))
        assert [tokens[token_id] for token_id in found] == wanted


BETWEEN = ["So ", "a < b", "[x] << {y}", "\n", " \n\n", "}", "<", ":"]


@pytest.mark.parametrize("parser", sorted(CASES))
def test_every_character_of_content_has_its_token(parser: str) -> None:
    """Splits replies of all formats into single characters, and randomly."""
    rng = random.Random(parser)
    form = ReplyFormat(parser)
    for _ in range(12):
        calls = [rng.choice(CASES[parser])[0] for _ in range(2)]
        reply = "".join(f"{rng.choice(BETWEEN)}{rng.choice(BETWEEN)}{call}" for call in calls) + rng.choice(BETWEEN)
        content, places = shared(form, pieces_of([*reply], rng))
        assert "".join(reply[at] for at in places) == content, reply
        cuts = sorted({0, len(reply), *rng.choices(range(len(reply)), k=len(reply) // 3)})
        tokens = [reply[a:b] for a, b in itertools.pairwise(cuts)]
        _, found = shared(form, pieces_of(tokens, rng))
        assert found == [at for at, (a, b) in enumerate(itertools.pairwise(cuts)) if any(a <= x < b for x in places)]


def test_the_token_that_ends_an_answer_has_no_text() -> None:
    """An incomplete character's first byte becomes U+FFFD, which belongs to its own token, not to the end token."""
    entries = [TokenLogprobs(at, Logprobs(-1.0, 1, []), offset) for at, offset in enumerate((0, 1, 1))]
    for shows, wanted in ((False, [[0], [1]]), (True, [[0], [1, 2]])):
        shares = TokenAlignment(shows)
        texts = shares.cut(Piece(0, "a\ufffd", [0, 1, 2], entries, "stop"))
        found = [[each.token_id for each in shares.of([Content(text)])[0]] for text in texts]
        assert found == wanted


def test_pieces_that_end_within_a_token() -> None:
    """Text is held back where a stop string may begin, even within a token; parts without content get no tokens."""
    shares = TokenAlignment()
    entries = [TokenLogprobs(at, None, offset) for at, offset in enumerate((0, 3))]
    texts = [text for piece in (Piece(0, "a", [0], entries), Piece(0, "bcd", [1], [])) for text in shares.cut(piece)]
    assert texts == ["a", "bc", "d"]
    shares = TokenAlignment()
    list(shares.cut(Piece(0, "ab", [0], [TokenLogprobs(0, None, 0)])))
    assert shares.of([Reasoning("a"), CallBegin(0, "f"), CallArguments(0, "{}")]) == [[], [], []]
    assert shares.of([Content("b")]) == [[]]
