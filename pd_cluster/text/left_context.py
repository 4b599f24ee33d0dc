"""Finds the tokens of a prompt that affect the text after it.

The text after a prompt depends on them because decoders drop the first space of a text, put a space between words, and
need all bytes of a character. Knows nothing of requests.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Collection
from typing import NamedTuple

MIN_NUM_TOKENS = 8  # more than one character can have: at most one token per byte
ENOUGH_BLANK_TOKENS = 1024  # no decoder drops this many spaces
MOST_TOKENS_OF_CHARACTER = 64  # including hidden tokens between its bytes
MOST_UNFINISHED_NBYTES = 3  # maximum number of bytes of an incomplete character in UTF-8


class PromptTail(NamedTuple):
    """A prompt's tokens: `certain` have final text, `begun` begin an incomplete last character.

    `has_more`: the last token of `certain` also ends with bytes of that character, which its text shows as U+FFFD.
    """

    certain: list[int]
    begun: list[int]
    has_more: bool

    def text(self, decode: Callable[[list[int]], str]) -> str:
        """Returns the text without a character that the next token may complete."""
        text = decode(self.certain)
        return text[:-1] if self.has_more else text


class LeftContext:
    """Describes how the text that one tokenizer's decoder gives depends on the tokens before it."""

    def __init__(
        self,
        decoder_types: Collection[str] = (),
        token_bytes: Callable[[int], bytes] | None = None,
        special_ids: frozenset[int] = frozenset(),
    ) -> None:
        """`token_bytes` returns the bytes of a single token; None: no token is part of a character."""
        self.is_additive = set(decoder_types) == {"ByteLevel"}  # a token's bytes do not depend on its neighbours
        self.special_ids = special_ids
        self._has_byte_tokens = "ByteFallback" in decoder_types  # each byte of a character is a token
        self._token_bytes = token_bytes if self._has_byte_tokens or "ByteLevel" in decoder_types else None

    def prompt(self, token_ids: list[int], hidden: Collection[int]) -> PromptTail:
        """Splits a prompt's tokens. `hidden` tokens have no text."""
        firsts = self._begun(token_ids, hidden)
        if not firsts or not self._has_byte_tokens:
            return PromptTail(token_ids, [], bool(firsts))
        # If one byte is missing in a run of byte tokens, all of them decode to U+FFFD.
        return PromptTail(token_ids[: firsts[0]], token_ids[firsts[0] :], False)

    def _begun(self, token_ids: list[int], hidden: Collection[int]) -> list[int]:
        """Returns the token index of each byte of an incomplete character at the end of a prompt."""
        if self._token_bytes is None:
            return []
        raw, places = b"", list[int]()
        for at in range(len(token_ids) - 1, max(len(token_ids) - MOST_TOKENS_OF_CHARACTER, 0) - 1, -1):
            if len(raw) >= MOST_UNFINISHED_NBYTES:
                break
            if token_ids[at] not in hidden:
                own = self._token_bytes(token_ids[at])
                raw, places = own + raw, [at] * len(own) + places
        decoder = codecs.getincrementaldecoder("utf-8")("replace")
        decoder.decode(raw)
        return places[len(raw) - len(decoder.getstate()[0]) :]

    def tail(self, token_ids: list[int], hidden: Collection[int], decode: Callable[[list[int]], str]) -> list[int]:
        """Returns a suffix of the tokens, without hidden ones, that has text. Any next token decodes to the same text
        after this suffix as after all the tokens.
        """
        size = MIN_NUM_TOKENS
        while size < len(token_ids):
            start = len(token_ids) - size
            while start < len(token_ids) and self._continues(token_ids[start]):
                start += 1
            tail = [token_id for token_id in token_ids[start:] if token_id not in hidden]
            text = decode(tail)
            if text.strip() or (text and size >= ENOUGH_BLANK_TOKENS):
                return tail  # spaces that a decoder drops precede this tail
            size *= 2
        return [token_id for token_id in token_ids if token_id not in hidden]

    def _continues(self, token_id: int) -> bool:
        """Returns whether this is a later byte of a character: its text depends on the character's first byte."""
        if not self._has_byte_tokens or self._token_bytes is None:
            return False
        raw = self._token_bytes(token_id)
        return len(raw) == 1 and 0x80 <= raw[0] < 0xC0


NO_CONTEXT = LeftContext()
