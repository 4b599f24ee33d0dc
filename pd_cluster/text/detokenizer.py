"""Converts token ids to text incrementally: each call returns the new text that can no longer change."""

from __future__ import annotations

from collections.abc import Mapping
from copy import copy
from types import MappingProxyType
from typing import Self

from tokenizers import Tokenizer as RustTokenizer

from pd_cluster.text.left_context import NO_CONTEXT, LeftContext

REPLACEMENT = "\ufffd"  # decoders show it for bytes that are not (yet) a character
NO_TOKENS: Mapping[int, str] = MappingProxyType({})
FEW_TOKENS = 1024  # up to this many tokens are decoded without a thread
MAX_PENDING_TOKENS = 64  # after this many tokens without a complete character, the bytes are shown as U+FFFD


class Detokenizer:
    """Takes token ids and returns text as soon as it is final, so that later tokens cannot change it.

    A token's text depends on its neighbours: a character may take several tokens, and a leading space may be dropped.
    Every token is therefore decoded together with the tokens before it, the first one with the prompt's last tokens.
    The prompt's text and the returned text together equal the text of all tokens, decoded at once. There is one
    exception: byte-fallback tokenizers may change a character when invalid bytes follow, but text that was returned
    stays.
    """

    def __init__(
        self,
        rust: RustTokenizer,
        skip_special_tokens: bool,
        dropped: frozenset[int] = frozenset(),
        joined: Mapping[int, str] = NO_TOKENS,
        context: LeftContext = NO_CONTEXT,
    ) -> None:
        """`dropped` ids are not shown; adjacent ids in `joined` are shown as the text that `joined` gives."""
        self._rust = rust
        self._skip = skip_special_tokens
        self._dropped = dropped
        self._joined = joined
        self._context = context
        self._takes_many = context.is_additive and not dropped and not joined
        self._last_id = -1
        self._shown: list[int] = []  # the tokens of the text returned last
        self._shown_text = ""  # the text of these tokens alone
        self._pending: list[int] = []

    def copy(self) -> Self:
        made = copy(self)
        made._pending = [*self._pending]
        return made

    def follow(self, prompt_token_ids: list[int]) -> None:
        """Starts anew, with the output that follows a prompt.

        A character that the prompt's last token leaves incomplete is part of the output.
        """
        self._last_id = prompt_token_ids[-1] if prompt_token_ids else -1
        self._shown, self._shown_text, self._pending = [], "", []
        prompt = self._context.prompt(prompt_token_ids, self._hidden)
        if self._context.is_additive and not prompt.has_more:
            return
        tail = prompt._replace(certain=self._context.tail(prompt.certain, self._hidden, self._text_of))
        self._shown_text = tail.text(self._text_of)
        self._shown, self._pending = tail.certain, self._visible(tail.begun)

    def prompt_text(self, prompt_token_ids: list[int]) -> str:
        """Returns the prompt's text, without a last incomplete character, which `follow` counts as output."""
        return self._context.prompt(prompt_token_ids, self._hidden).text(self._text_of)

    def offsets(self, prompt_token_ids: list[int]) -> list[int]:
        """Returns how many characters of the prompt's text are before each token."""
        fresh = self.copy()
        fresh.follow([])
        found, num_chars = [], 0
        for token_id in prompt_token_ids:
            found.append(num_chars)
            num_chars += len(fresh.add(token_id))
        return found

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
        if len(self._pending) > MAX_PENDING_TOKENS:  # this many tokens without text can only be special tokens
            self._pending.clear()
        return ""

    def add_all(self, token_ids: list[int]) -> str:
        """Returns the concatenated results of `add`. Decodes all tokens together if that gives the same text."""
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

    @property
    def _hidden(self) -> frozenset[int]:
        return self._context.special_ids if self._skip else self._dropped

    def _visible(self, token_ids: list[int]) -> list[int]:
        return [each for each in token_ids if each not in self._dropped] if self._dropped else token_ids

    def _text_of(self, token_ids: list[int]) -> str:
        """Decodes any number of tokens. Many tokens are decoded without holding the interpreter's lock."""
        shown = self._visible(token_ids)
        if len(shown) <= FEW_TOKENS:
            return self._decode(shown)
        (text,) = self._rust.decode_batch([shown], skip_special_tokens=self._skip)
        return str(text)

    def _decode(self, token_ids: list[int]) -> str:
        text: str = self._rust.decode(token_ids, skip_special_tokens=self._skip)
        return text
