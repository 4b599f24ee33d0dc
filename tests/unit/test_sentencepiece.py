"""Tokenizers of folders with a SentencePiece file and no tokenizer.json, like Paddle's ERNIE 4.5."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from tokenizers import Tokenizer as RustTokenizer
from transformers import LlamaTokenizer

from pd_cluster.checkpoints.sentencepiece import files_of, made_from, tokenizer_text
from pd_cluster.errors import ModelError
from pd_cluster.text.grammar import Compiler
from pd_cluster.text.token_ids import token_ids_of
from pd_cluster.text.tokenizer import Tokenizer
from pd_cluster.types import Guide
from tests.support.paddle_layout import BYTE, CONTROL, NORMAL, UNKNOWN, USER_DEFINED, sentence_pieces

CONTROLS = ["<unk>", "<s>", "</s>"]
WORDS = ["th", "▁t", "▁th", "he", "▁the", "▁▁", "in", "▁in", "er", "和", "▁the▁"]
CHARACTERS = ["▁", *"abcdefghijklmnopqrstuvwxyzABTU.,:\n和赏"]
TEXTS = ["the there then", " the  in there", "a   b", "User: 赏和 1234\nAssistant: ", "naïve ☃", "", " "]
TEXTS += ["</s>the<sep>in"]
SEP = "<sep>"


def pieces() -> list[tuple[str, float, int]]:
    found = [(text, 0.0, UNKNOWN if text == "<unk>" else CONTROL) for text in CONTROLS]
    found += [(str(digit), 0.0, USER_DEFINED) for digit in range(10)] + [(SEP, 0.0, USER_DEFINED)]
    found += [(f"<0x{byte:02X}>", 0.0, BYTE) for byte in range(256)]
    texts = dict.fromkeys([*WORDS, *CHARACTERS])
    return found + [(text, -float(at), NORMAL) for at, text in enumerate(texts)]


def make_folder(folder: Path, adds_prefix: bool = False, **config: Any) -> Path:
    folder.mkdir(exist_ok=True)
    (folder / "tokenizer.model").write_bytes(sentence_pieces(pieces(), adds_prefix))
    settings = {"tokenizer_class": "Ernie4_5_Tokenizer", "bos_token": "<s>", "eos_token": "</s>", **config}
    (folder / "tokenizer_config.json").write_text(json.dumps(settings))
    return folder


@pytest.mark.parametrize("adds_prefix", [False, True])
def test_texts_are_split_as_transformers_does(tmp_path: Path, adds_prefix: bool) -> None:
    """Compares with transformers' Llama tokenizer, which has the same rules, pieces and merges."""
    folder = make_folder(tmp_path, adds_prefix, sep_token=SEP)
    state = json.loads(made_from(folder))
    merges = [tuple(pair) for pair in state["model"]["merges"]]
    theirs = LlamaTokenizer(
        vocab=state["model"]["vocab"],
        merges=merges,
        add_bos_token=False,
        add_prefix_space=adds_prefix,
        legacy=True,
        sep_token=SEP,
        additional_special_tokens=[],
    )
    theirs.add_tokens([str(digit) for digit in range(10)])
    own = Tokenizer(folder)
    for text in TEXTS:
        token_ids = own.encode(text)
        assert token_ids == theirs.encode(text), text
        assert token_ids == token_ids_of(folder, text)
        assert own.decode(token_ids, False) == theirs.decode(token_ids)


def test_the_piece_with_the_highest_score_is_made_first_and_what_is_special_is_hidden(tmp_path: Path) -> None:
    """Digits are user-defined pieces and shown in text; special tokens of tokenizer_config.json are hidden."""
    own = Tokenizer(make_folder(tmp_path, sep_token=SEP))
    names = [own.token_name(token_id) for token_id in own.encode("the")]
    assert names == ["th", "e"], "th has a higher score than he, and th and e do not merge"
    assert [own.token_name(each) for each in own.encode(" the")] == ["▁the"]
    token_ids = own.encode(f"<s>in 42{SEP}</s>")
    assert len(token_ids) == 7
    assert own.decode(token_ids) == "in 42"
    assert own.decode(token_ids, False) == f"<s>in 42{SEP}</s>"


def test_tokens_of_other_files_have_their_ids(tmp_path: Path) -> None:
    folder = make_folder(tmp_path, additional_special_tokens=["<mask:1>"])
    (folder / "added_tokens.json").write_text(json.dumps({"<think>": len(pieces())}))
    own = Tokenizer(folder)
    assert own.encode("<think>in<mask:1>")[::2] == [len(pieces()), len(pieces()) + 1]
    assert {file.name for file in files_of(folder)} == {"tokenizer.model", "tokenizer_config.json", "added_tokens.json"}


def test_a_tokenizer_json_comes_first(tmp_path: Path) -> None:
    """tokenizer.json takes precedence; guides accept either file."""
    folder = make_folder(tmp_path)
    assert Compiler(folder / "tokenizer.json", len(pieces()), [2]).compile(Guide("regex", "in|the")).problem == ""
    text = made_from(folder)
    (folder / "tokenizer.json").write_text(text)
    (folder / "tokenizer.model").write_bytes(b"")
    assert tokenizer_text(folder / "tokenizer.json") == text
    assert RustTokenizer.from_str(text).get_vocab_size() == len(pieces())


@pytest.mark.parametrize("data", [b"", b"\x0a\xff", b"\xff" * 40, b"\x0a\x02\x10\x01"])
def test_a_broken_file_is_refused_by_name(tmp_path: Path, data: bytes) -> None:
    """A broken file, or a tokenizer class with unknown rules, is refused by name."""
    folder = make_folder(tmp_path)
    (folder / "tokenizer.model").write_bytes(data)
    with pytest.raises(ModelError, match=r"tokenizer\.model: cannot be read as a SentencePiece model"):
        Tokenizer(folder)
    with pytest.raises(ModelError, match=r"tokenizer\.json: cannot be read"):
        Tokenizer(make_folder(tmp_path, tokenizer_class="LlamaTokenizer"))
