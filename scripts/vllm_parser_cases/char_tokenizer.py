"""A real tokenizer, built here in place of a model hub's: a token for each character and each format's marker."""

from __future__ import annotations

import functools
import string
import types
from pathlib import Path
from typing import Any

from tokenizers import Regex, Tokenizer, decoders, models, pre_tokenizers
from transformers import PreTrainedTokenizerFast

from pd_cluster.parsers.format_table import FORMATS, THINKING

UNKNOWN, END = "<unk>", "<|endoftext|>"
alphabet: set[str] = set(string.printable)


def learn(folder: Path) -> None:
    """Adds the characters of all tests in this folder to tokenizers that are made later."""
    for path in folder.rglob("*.py"):
        text = path.read_text()
        alphabet.update(text)
        alphabet.update(chr(int(text[at + 2 : at + 6], 16)) for at in _escapes(text))


def markers() -> list[str]:
    formats = [*FORMATS.values(), *THINKING.values()]
    return sorted({mark for each in formats for mark in each.markers if mark.strip() == mark and len(mark) > 1})


@functools.cache
def char_tokenizer() -> PreTrainedTokenizerFast:
    vocab = {text: number for number, text in enumerate([UNKNOWN, END, *sorted(alphabet)])}
    inner = Tokenizer(models.WordLevel(vocab, UNKNOWN))
    inner.pre_tokenizer = pre_tokenizers.Split(Regex(r"[\s\S]"), "isolated")
    inner.decoder = decoders.Fuse()
    made = PreTrainedTokenizerFast(tokenizer_object=inner, unk_token=UNKNOWN, eos_token=END, bos_token=END)
    made.clean_up_tokenization_spaces = False
    made.add_tokens(markers())
    return made


class MistralTokenizer:
    """The same tokenizer with the methods of Mistral's tokenizer."""

    def __init__(self) -> None:
        self._inner = char_tokenizer()
        ids = self._inner.convert_tokens_to_ids(["[THINK]", "[/THINK]"])
        self.instruct = types.SimpleNamespace(BEGIN_THINK=ids[0], END_THINK=ids[1])
        self.tokenizer = types.SimpleNamespace(encode=lambda text, bos, eos: self._inner.encode(text))

    @staticmethod
    def from_pretrained(*names: Any, **settings: Any) -> MistralTokenizer:
        return MistralTokenizer()

    def convert_ids_to_tokens(self, ids: list[int], **settings: Any) -> list[str]:
        return [self._inner.decode([number]) for number in ids]

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def from_pretrained(*names: Any, **settings: Any) -> PreTrainedTokenizerFast:
    return char_tokenizer()


def detokenize_incrementally(
    tokenizer: Any, all_input_ids: list[int], prev_tokens: Any, prefix_offset: int, read_offset: int, **settings: Any
) -> tuple[list[str], str, int, int]:
    """Returns the last token and its text, in the format of vLLM's function."""
    text = tokenizer.decode(all_input_ids[-1:])
    return [text], text, read_offset, len(all_input_ids)


def _escapes(text: str) -> list[int]:
    return [at for at in range(len(text) - 5) if text[at : at + 2] == "\\u" and _is_hex(text[at + 2 : at + 6])]


def _is_hex(text: str) -> bool:
    return all(char in string.hexdigits for char in text) and not "d800" <= text.lower() <= "dfff"
