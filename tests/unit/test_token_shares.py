"""Which tokens a part of a reply gets, whatever pieces the text came in."""

from __future__ import annotations

import random

import pytest

from pd_cluster.parsers.parts import CallArguments, CallBegin, Content, Part, Reasoning
from pd_cluster.parsers.reply import ReplyFormat
from pd_cluster.service.answers.token_shares import TokenShares
from pd_cluster.service.sequence import Piece, TokenLogprobs
from pd_cluster.types import Logprobs

CALL = '{"name": "f", "arguments": {}}'
REPLIES: dict[str, tuple[list[str], list[str]]] = {
    "text": (["Hel", "lo", "", "!"], ["Hel", "lo", "", "!"]),
    "a character of two tokens": (["a", "", "é", "b"], ["a", "", "é", "b"]),
    "reasoning": (["<think>", "h", "m", "</think>", "\n\n", "Yes", "."], ["Yes", "."]),
    "a call after text": (["Look", ".", "\n", "<tool_call>", CALL, "</tool_call>"], ["Look", ".", "\n"]),
    "text that could be a mark": (["a ", "<", "tool", "s", ">", " b"], ["a ", "<", "tool", "s", ">", " b"]),
    "all of it": (["<think>", "x", "</think>", "So", ":", "<tool_call>", CALL, "</tool_call>"], ["So", ":"]),
}


def pieces_of(tokens: list[str], sizes: random.Random) -> list[Piece]:
    """Pieces of one to three tokens; a token without text comes with the one after it, or at the end."""
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


@pytest.mark.parametrize("name", REPLIES)
def test_content_has_the_tokens_that_wrote_it(name: str) -> None:
    tokens, wanted = REPLIES[name]
    for seed in range(40):
        reader, shares = ReplyFormat("hermes", "qwen3" if "<think>" in tokens else "").reader("auto", ""), TokenShares()
        steps: list[list[Part]] = []
        shared: list[list[TokenLogprobs]] = []
        for piece in pieces_of(tokens, random.Random(seed)):
            for text in shares.cut(piece):
                steps.append(reader.feed(text))
                shared += shares.of(steps[-1])
        steps.append(reader.finish())
        shared += shares.of(steps[-1])
        assert [tokens[entry.token_id] for entries in shared for entry in entries] == wanted
        assert "".join(part.text for parts in steps for part in parts if isinstance(part, Content)) == "".join(wanted)


def test_pieces_that_end_within_a_token() -> None:
    """Text is held back where a stop string may begin, token or no token."""
    shares = TokenShares()
    entries = [TokenLogprobs(at, None, offset) for at, offset in enumerate((0, 3))]
    texts = [text for piece in (Piece(0, "a", [0], entries), Piece(0, "bcd", [1], [])) for text in shares.cut(piece)]
    assert texts == ["a", "bc", "d"]


def test_parts_without_content_have_none() -> None:
    shares = TokenShares()
    list(shares.cut(Piece(0, "ab", [0], [TokenLogprobs(0, None, 0)])))
    assert shares.of([Reasoning("a"), CallBegin(0, "f"), CallArguments(0, "{}")]) == [[], [], []]
    assert shares.of([Content("b")]) == [[]]
