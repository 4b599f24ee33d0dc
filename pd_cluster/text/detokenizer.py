"""Token ids to text as they come: each call returns the text that is certain."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

from tokenizers import Tokenizer as RustTokenizer

REPLACEMENT = "\ufffd"  # what a decoder shows for bytes that are not (yet) a character
NO_TOKENS: Mapping[int, str] = MappingProxyType({})
MAX_PENDING_TOKENS = 64  # without one complete character; after that the bytes are shown as they are


class Detokenizer:
    """Takes token ids and returns text as soon as it is certain; the sum equals decoding all at once.

    A token's text depends on its neighbours (a character may take several, a leading space may be dropped), so every
    token is decoded after those before it. Byte-fallback tokenizers may take back a character that was already shown
    when invalid bytes follow; it stays as shown.
    """

    def __init__(
        self,
        rust: RustTokenizer,
        skip_special_tokens: bool,
        dropped: frozenset[int] = frozenset(),
        joined: Mapping[int, str] = NO_TOKENS,
        is_additive: bool = False,
    ) -> None:
        """`dropped` ids are not shown; those in `joined` are shown as that text where they are adjacent.

        `is_additive`: a token's bytes do not depend on its neighbours.
        """
        self._rust = rust
        self._skip = skip_special_tokens
        self._dropped = dropped
        self._joined = joined
        self._takes_many = is_additive and not dropped and not joined
        self._last_id = -1
        self._shown: list[int] = []  # the tokens of the text returned last
        self._shown_text = ""  # their text alone
        self._pending: list[int] = []

    def add(self, token_id: int) -> str:
        """Returns new text; "" while a character is incomplete."""
        if token_id in self._dropped:
            return ""
        last_id, self._last_id = self._last_id, token_id
        if token_id in self._joined and last_id in self._joined:
            return self._join(token_id)
        self._pending.append(token_id)
        text = self._decode([*self._shown, *self._pending])
        is_longer = len(text) > len(self._shown_text)
        if is_longer and (not text.endswith(REPLACEMENT) or len(self._pending) > MAX_PENDING_TOKENS):
            return self._show(text)
        if len(self._pending) > MAX_PENDING_TOKENS:  # special tokens, which have no text
            self._pending.clear()
        return ""

    def add_all(self, token_ids: list[int]) -> str:
        """Returns the concatenated results of `add`, with a single decode where that gives the same text."""
        if self._takes_many and not self._pending and 0 < len(token_ids) <= MAX_PENDING_TOKENS:
            text = self._decode([*self._shown, *token_ids])
            if len(text) > len(self._shown_text) and not text.endswith(REPLACEMENT):
                self._pending = token_ids
                return self._show(text)
        return "".join(map(self.add, token_ids))

    def finish(self) -> str:
        """Returns the remaining text, with incomplete characters as U+FFFD."""
        return self._show(self._decode([*self._shown, *self._pending]))

    def _join(self, token_id: int) -> str:
        """Returns the text of a special token that directly follows another one."""
        text = self.finish() + self._joined[token_id]
        self._shown = [token_id]
        self._shown_text = self._decode(self._shown)
        return text

    def _show(self, text: str) -> str:
        new = text[len(self._shown_text) :]
        self._shown, self._pending = self._pending, []
        self._shown_text = self._decode(self._shown)
        return new

    def _decode(self, token_ids: list[int]) -> str:
        text: str = self._rust.decode(token_ids, skip_special_tokens=self._skip)
        return text
