"""A copy of a tokenizer in which control tokens have names that clients cannot guess.

The tokens' usual text is then plain text, and a prompt contains the new names for control tokens. All ids are
unchanged. Knows nothing of conversations.
"""

from __future__ import annotations

import json
import secrets
import string
from collections.abc import Collection, Mapping
from typing import Any

from tokenizers import Tokenizer as RustTokenizer

from pd_cluster.text.control_tokens import PromptText

NONCE_NUM_CHARS = 32  # letters only, which normalizers do not change
INDEX_NUM_CHARS = 4


class RenamedTokens:
    """A renamed tokenizer. Making one takes as long as loading the original, and as much memory."""

    def __init__(self, rust: RustTokenizer, control: Collection[str]) -> None:
        nonce = "".join(secrets.choice(string.ascii_lowercase) for _ in range(NONCE_NUM_CHARS))
        self._names = {text: nonce + _letters(at) for at, text in enumerate(sorted(control))}
        state = json.loads(rust.to_str())
        added = [token["content"] for token in state["added_tokens"]]
        for token in state["added_tokens"]:
            token["content"] = self._names.get(token["content"], token["content"])
        _rename(state["model"], self._names)
        self._rust = RustTokenizer.from_str(json.dumps(state))
        self._id_of: dict[int, int] = {}  # id that the library assigned -> original id, where they differ
        for text in added:
            own, token_id = self._rust.token_to_id(self._names.get(text, text)), rust.token_to_id(text)
            if own is not None and token_id is not None and own != token_id:
                self._id_of[own] = token_id

    def encode(self, prompt: PromptText, add_special_tokens: bool) -> list[int]:
        """Returns the ids of a prompt whose control tokens have known positions."""
        parts, at = [], 0
        for start, stop in prompt.own or ():
            parts += [prompt.text[at:start], self._names[prompt.text[start:stop]]]
            at = stop
        text = "".join([*parts, prompt.text[at:]])
        (encoding,) = self._rust.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        ids: list[int] = encoding.ids
        return [self._id_of.get(token_id, token_id) for token_id in ids] if self._id_of else ids


def _rename(model: dict[str, Any], names: Mapping[str, str]) -> None:
    """Renames control tokens in the vocabulary; otherwise their text could still become those tokens."""
    vocab = model.get("vocab")
    if isinstance(vocab, dict):
        model["vocab"] = {names.get(text, text): token_id for text, token_id in vocab.items()}
    elif isinstance(vocab, list):  # Unigram's: [text, score]
        model["vocab"] = [[names.get(text, text), score] for text, score in vocab]
    if model.get("unk_token") in names:
        model["unk_token"] = names[model["unk_token"]]
    if "merges" in model:
        pairs = [merge.split(" ") if isinstance(merge, str) else merge for merge in model["merges"]]
        model["merges"] = [pair for pair in pairs if not names.keys() & {*pair, "".join(pair)}]


def _letters(number: int) -> str:
    """Returns the number, written in letters of a fixed length."""
    found = ""
    for _ in range(INDEX_NUM_CHARS):
        number, digit = divmod(number, len(string.ascii_lowercase))
        found = string.ascii_lowercase[digit] + found
    return found
