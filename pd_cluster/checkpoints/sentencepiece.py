"""Makes a tokenizer.json from a SentencePiece file, for folders without one, such as Paddle's ERNIE 4.5.

Reads only those fields of ModelProto that affect how text is split. Source: sentencepiece_model.proto and the
normalizer in google/sentencepiece.
"""

from __future__ import annotations

import base64
import json
import struct
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, NamedTuple

from pd_cluster.checkpoints.json_files import read_json
from pd_cluster.checkpoints.plain_files import read_plain
from pd_cluster.errors import ModelError

FILE, MODEL, CONFIG, ADDED = "tokenizer.json", "tokenizer.model", "tokenizer_config.json", "added_tokens.json"
# tokenizer classes that add no tokens to a prompt
ERNIE = ("Ernie4_5_Tokenizer", "Ernie4_5Tokenizer", "Ernie4_5_VLTokenizer", "ErnieBotTokenizer")
NORMAL, UNKNOWN, CONTROL, USER_DEFINED, BYTE = 1, 2, 3, 4, 6  # kinds of pieces
UNIGRAM, BPE = 1, 2
VARINT, EIGHT_BYTES, BYTES, FOUR_BYTES = 0, 1, 2, 5  # wire types
SPACE = "\u2581"
SPECIAL_FIELDS = (
    *("bos_token", "eos_token", "unk_token", "pad_token", "cls_token", "sep_token", "mask_token"),
    *("additional_special_tokens", "extra_special_tokens"),
)


class SentencePiece(NamedTuple):
    text: str
    score: float
    kind: int


class SentencePieces(NamedTuple):
    """A SentencePiece model: its pieces by id, and how it prepares texts."""

    pieces: list[SentencePiece]
    kind: int
    character_map: bytes
    adds_prefix: bool
    removes_spaces: bool

    @classmethod
    def read(cls, file: Path) -> SentencePieces:
        """Raises ModelError."""
        try:
            data = read_plain(file)
            pieces: list[SentencePiece] = []
            trainer: dict[int, Any] = {}
            normalizer: dict[int, Any] = {}
            for number, value in _fields(data):
                if number == 1:
                    pieces.append(_piece(value))
                elif number == 2:
                    trainer = dict(_fields(value))
                elif number == 3:
                    normalizer = dict(_fields(value))
            if not pieces:
                raise ValueError("it has no pieces")
        except (OSError, ValueError, TypeError, AttributeError, LookupError, struct.error) as error:
            raise ModelError(f"{file}: cannot be read as a SentencePiece model: {error}; copy it again") from None
        spaces = bool(normalizer.get(3, 1)), bool(normalizer.get(4, 1))
        return cls(pieces, int(trainer.get(3, UNIGRAM)), normalizer.get(2, b""), *spaces)


def tokenizer_text(file: Path) -> str:
    """Returns the text of a folder's tokenizer.json; if there is none, makes it from the SentencePiece file.

    Raises ModelError, OSError.
    """
    return made_from(file.parent) if is_made(file.parent) else read_plain(file).decode("utf-8")


def is_made(folder: Path) -> bool:
    """Whether a folder's tokenizer is a SentencePiece file of a known class."""
    if (folder / FILE).exists() or not (folder / MODEL).exists() or not (folder / CONFIG).exists():
        return False
    return read_json(folder / CONFIG).get("tokenizer_class") in ERNIE


def files_of(folder: Path) -> tuple[Path, ...]:
    """Returns the files of a folder's tokenizer."""
    if not is_made(folder):
        return (folder / FILE,)
    return tuple(file for name in (MODEL, CONFIG, ADDED) if (file := folder / name).exists())


def made_from(folder: Path) -> str:
    """Returns the text of a tokenizer.json for the folder's SentencePiece file. Raises ModelError."""
    model = SentencePieces.read(folder / MODEL)
    config = read_json(folder / CONFIG)
    steps = [_replace({"String": SPACE}, " "), {"type": "ByteFallback"}, {"type": "Fuse"}]
    if model.adds_prefix:
        steps.append({"type": "Strip", "content": " ", "start": 1, "stop": 0})
    scheme = "always" if model.adds_prefix else "never"
    return json.dumps(
        {
            "version": "1.0",
            "truncation": None,
            "padding": None,
            "added_tokens": _added(model, folder, config),
            "normalizer": _normalizer(model),
            "pre_tokenizer": {
                "type": "Metaspace",
                "replacement": SPACE,
                "prepend_scheme": scheme,
                "split": False,
            },
            "post_processor": None,
            "decoder": {"type": "Sequence", "decoders": steps},
            "model": _bpe(model.pieces) if model.kind == BPE else _unigram(model.pieces, folder / MODEL, model.kind),
        }
    )


def _normalizer(model: SentencePieces) -> dict[str, Any] | None:
    steps: list[dict[str, Any]] = []
    if model.character_map:
        text = base64.b64encode(model.character_map).decode()
        steps.append({"type": "Precompiled", "precompiled_charsmap": text})
    if model.removes_spaces:
        steps += [{"type": "Strip", "strip_left": True, "strip_right": True}, _replace({"Regex": " {2,}"}, " ")]
    return {"type": "Sequence", "normalizers": steps} if steps else None


def _replace(pattern: dict[str, str], content: str) -> dict[str, Any]:
    return {"type": "Replace", "pattern": pattern, "content": content}


def _bpe(pieces: list[SentencePiece]) -> dict[str, Any]:
    """Returns the BPE model. Its merges are all pairs of pieces that join to another piece, the highest score first."""
    ids = {piece.text: index for index, piece in enumerate(pieces)}
    can_merge = {piece.text for piece in pieces if piece.kind == NORMAL}
    merges: list[list[str]] = []
    for piece in sorted((piece for piece in pieces if piece.kind == NORMAL), key=lambda piece: -piece.score):
        halves = ((piece.text[:at], piece.text[at:]) for at in range(1, len(piece.text)))
        known = [(left, right) for left, right in halves if left in can_merge and right in can_merge]
        merges += map(list, sorted(known, key=lambda pair: (ids[pair[0]], ids[pair[1]])))
    return {
        "type": "BPE",
        "dropout": None,
        "unk_token": next((piece.text for piece in pieces if piece.kind == UNKNOWN), None),
        "continuing_subword_prefix": None,
        "end_of_word_suffix": None,
        "fuse_unk": True,
        "byte_fallback": any(piece.kind == BYTE for piece in pieces),
        "ignore_merges": False,
        "vocab": ids,
        "merges": merges,
    }


def _unigram(pieces: list[SentencePiece], file: Path, kind: int) -> dict[str, Any]:
    if kind != UNIGRAM:
        raise ModelError(f"{file}: SentencePiece model type {kind} is not supported; give a tokenizer.json")
    return {
        "type": "Unigram",
        "unk_id": next((index for index, piece in enumerate(pieces) if piece.kind == UNKNOWN), None),
        "vocab": [[piece.text, piece.score] for piece in pieces],
        "byte_fallback": any(piece.kind == BYTE for piece in pieces),
    }


def _added(model: SentencePieces, folder: Path, config: Mapping[str, Any]) -> list[dict[str, Any]]:
    """Returns the tokens that are matched before a text is split: SentencePiece's, and those that other files add.

    Control pieces, and those that tokenizer_config.json marks, are special.
    """
    ids = {piece.text: index for index, piece in enumerate(model.pieces)}
    found = {p.text: p.kind != USER_DEFINED for p in model.pieces if p.kind in (CONTROL, USER_DEFINED, UNKNOWN)}
    found |= dict.fromkeys(_special(config), True)
    given = read_json(folder / ADDED) if (folder / ADDED).exists() else {}
    for content, token_id in given.items():
        ids.setdefault(content, token_id)
        found.setdefault(content, False)
    decoder = config.get("added_tokens_decoder")
    for token_id, token in decoder.items() if isinstance(decoder, dict) else ():
        ids.setdefault(str(token["content"]), int(token_id))
        found[str(token["content"])] = bool(token.get("special"))
    for content in found:
        ids.setdefault(content, max(ids.values()) + 1)
    flags = dict.fromkeys(("single_word", "lstrip", "rstrip", "normalized"), False)
    added = ({"id": ids[content], "content": content, **flags, "special": found[content]} for content in found)
    return sorted(added, key=lambda token: int(token["id"]))


def _special(config: Mapping[str, Any]) -> Iterator[str]:
    for name in SPECIAL_FIELDS:
        value = config.get(name)
        for token in value if isinstance(value, list) else [value]:
            content = token.get("content") if isinstance(token, dict) else token
            if isinstance(content, str) and content:
                yield content


def _piece(data: bytes) -> SentencePiece:
    values = dict(_fields(data))
    return SentencePiece(values[1].decode("utf-8"), values.get(2, 0.0), int(values.get(3, NORMAL)))


def _fields(data: bytes) -> Iterator[tuple[int, Any]]:
    """Yields field numbers and values of a protobuf message: integers, floats, or bytes. Raises ValueError."""
    at = 0
    while at < len(data):
        key, at = _varint(data, at)
        number, wire = key >> 3, key & 7
        if wire == VARINT:
            value, at = _varint(data, at)
            yield number, value
        elif wire in (FOUR_BYTES, EIGHT_BYTES):
            form, size = ("<f", 4) if wire == FOUR_BYTES else ("<d", 8)
            yield number, struct.unpack_from(form, data, at)[0]
            at += size
        elif wire == BYTES:
            size, at = _varint(data, at)
            if at + size > len(data):
                raise ValueError("it is cut short")
            yield number, data[at : at + size]
            at += size
        else:
            raise ValueError(f"wire type {wire}")


def _varint(data: bytes, at: int) -> tuple[int, int]:
    value = shift = 0
    while True:
        byte = data[at]
        value |= (byte & 0x7F) << shift
        at, shift = at + 1, shift + 7
        if byte < 0x80:
            return value, at
