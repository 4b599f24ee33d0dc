"""Finds the positions of a prompt's tokens in its text, if plain tokenization of the text gives these tokens."""

from __future__ import annotations

from pd_cluster.text.tokenizer import Tokenizer

Offsets = list[list[int]]  # for each token, the indexes of its first character and of the one after its last


def offsets_of(tokenizer: Tokenizer, text: str, special: bool, token_ids: list[int]) -> Offsets | None:
    """Returns each token's position.

    `special`: the tokenizer adds its own tokens. `token_ids` may be only the first or the last tokens of the text.
    Returns None if the text tokenizes differently, because the text of a control token in it is plain text.
    """
    whole, found = tokenizer.encode_with_offsets(text, special)
    offsets = [[first, stop] for first, stop in found]
    number = len(token_ids)
    if number and whole[-number:] == token_ids:
        return offsets[-number:]
    return offsets[:number] if whole[:number] == token_ids else None
