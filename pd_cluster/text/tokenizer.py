"""Converts text to token ids and back.

Uses the `tokenizers` library, never torch: the scheduler's process imports this.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any

from tokenizers import Tokenizer as RustTokenizer
from tokenizers.models import BPE

from pd_cluster.checkpoints.json_files import read_json
from pd_cluster.checkpoints.plain_files import read_plain
from pd_cluster.checkpoints.sentencepiece import tokenizer_text
from pd_cluster.errors import ModelError, called
from pd_cluster.text.chat_template import ChatTemplate
from pd_cluster.text.control_tokens import ControlTokens, PromptText, control_texts
from pd_cluster.text.detokenizer import NO_TOKENS, Detokenizer
from pd_cluster.text.left_context import LeftContext
from pd_cluster.text.renamed_tokens import RenamedTokens
from pd_cluster.text.template_roles import UNNAMED_ROLES


class Tokenizer:
    """A folder's tokenizer and chat template."""

    def __init__(self, path: Path | None, template: str = "", model_path: Path | None = None) -> None:
        """`path` None: there is no tokenizer; requests and answers are token ids. Raises ModelError.

        `template`: a source that replaces the folder's. `model_path`: the folder to search for a template if the
        tokenizer's folder has none.
        """
        self.has_text = path is not None
        try:
            self._rust = RustTokenizer(BPE())
            if path is not None:
                self._rust = RustTokenizer.from_str(tokenizer_text(path / "tokenizer.json"))
        except ModelError:
            raise
        except Exception as error:
            raise ModelError(f"{path}/tokenizer.json: cannot be read: {error}") from None
        self._rust.no_truncation()
        self._rust.no_padding()
        self.vocab_size: int = self._rust.get_vocab_size(with_added_tokens=True)
        added = self._rust.get_added_tokens_decoder()
        self._added = {i: token.content for i, token in added.items()}
        self._special_ids = frozenset(i for i, token in added.items() if token.special)
        self._decoder_types = _decoder_types(self._rust)
        self._context = LeftContext(self._decoder_types, self.token_bytes, self._special_ids)
        vocabulary = self._rust.get_vocab(with_added_tokens=True)
        self.max_chars_per_token = max(map(len, vocabulary), default=1)
        # One int object per id, shared by all prompts: a running request then needs 8 bytes a token instead of 40.
        self._ids = list(range(max(vocabulary.values(), default=-1) + 1))
        self.config = config = _config(path) if path is not None else {}
        if path is not None:
            _check_added_tokens(path, config, vocabulary)
        folders = [folder for folder in (path, model_path) if folder is not None and self.has_text]
        source = template or next(filter(None, (_find_template(folder, _config(folder)) for folder in folders)), None)
        self.special_tokens = _special_tokens(config)
        try:
            roles = [role for role in UNNAMED_ROLES if f"<|{role}|>" in vocabulary]
            self.template = ChatTemplate(source, self.special_tokens, roles) if source is not None else None
        except ModelError as error:
            raise ModelError(f"{called('chat_template') if template else path}: {error.text}") from None
        self._renamed: RenamedTokens | None = None  # created when a prompt first needs it
        self._renaming = threading.Lock()

    def control_tokens(self, known: Collection[str] = ()) -> ControlTokens:
        """Returns the control tokens. `known`: added tokens that always count as control tokens."""
        added = [(token.content, token.special) for token in self._rust.get_added_tokens_decoder().values()]
        source = self.template.source if self.template is not None else ""
        return ControlTokens(control_texts(added, known, source))

    def normalizer(self, control: ControlTokens) -> Callable[[str], str] | None:
        """Returns the normalization to apply before control tokens are matched; None to match the raw text."""
        added = self._rust.get_added_tokens_decoder().values()
        if self._rust.normalizer is None or not any(t.normalized and t.content in control.texts for t in added):
            return None
        normalize: Callable[[str], str] = self._rust.normalizer.normalize_str
        return normalize

    def encode_prompt(self, prompt: PromptText, control: ControlTokens, add_special_tokens: bool = True) -> list[int]:
        """Encodes a prompt. If it lists its own control tokens, all others are encoded as plain text."""
        if prompt.own is None:
            return self.encode(prompt.text, add_special_tokens)
        with self._renaming:
            if self._renamed is None:
                self._renamed = RenamedTokens(self._rust, control.texts)
        own = self._ids
        return [own[token_id] for token_id in self._renamed.encode(prompt, add_special_tokens)]

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        # A batch of one: `encode` would hold the interpreter's lock for seconds on a long text, which delays
        # heartbeats. Offsets are left out, because they take more memory than the ids.
        (encoding,) = self._rust.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        own = self._ids
        return [own[token_id] for token_id in encoding.ids]

    def offsets(self, text: str, add_special_tokens: bool = True) -> list[int]:
        """Returns the number of characters before each token of the text."""
        (encoding,) = self._rust.encode_batch([text], add_special_tokens=add_special_tokens)
        found, end = [], 0
        for first, stop in encoding.offsets:  # added tokens have (0, 0); a first space may be left out
            found.append(min(first, end) if first < stop else end)
            end = max(end, stop)
        return found

    def encode_with_offsets(
        self, text: str, add_special_tokens: bool = True
    ) -> tuple[list[int], list[tuple[int, int]]]:
        """Returns the ids, and for each its first character and the one after its last; both 0 for added tokens."""
        (encoding,) = self._rust.encode_batch([text], add_special_tokens=add_special_tokens)
        return list(encoding.ids), [(first, stop) for first, stop in encoding.offsets]

    def beginning(self, text: str, most: int) -> str:
        """Returns the text's beginning with at most this many tokens, without special tokens; 0: the whole text."""
        shorter = text[: 2 * most * self.max_chars_per_token] if most else ""  # doubled: the cut affects tokens near it
        _, offsets = self.encode_with_offsets(shorter, False)
        return text if len(offsets) <= most else text[: offsets[most - 1][1]]

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        # A batch of one, because `decode` would hold the interpreter's lock.
        (text,) = self._rust.decode_batch([token_ids], skip_special_tokens=skip_special_tokens)
        return str(text)

    def encode_bad_words(self, words: list[str]) -> tuple[tuple[int, ...], ...]:
        """Returns each word's tokens and, as in vLLM, those of the word after a space, if they differ."""
        if not words:
            return ()
        bare = [word.lstrip() or word for word in words]
        both = [text for word in bare for text in (word, " " + word)]
        encodings = [tuple(e.ids) for e in self._rust.encode_batch(both, add_special_tokens=False)]
        found: dict[tuple[int, ...], None] = {}
        for plain, spaced in zip(encodings[::2], encodings[1::2], strict=True):
            found[plain] = None
            if plain and len(plain) == len(spaced) and plain[0] != spaced[0]:
                found[spaced] = None
        return tuple(ids for ids in found if ids)

    def is_special(self, token_id: int) -> bool:
        """Whether the token is special, so that its text is shown only if special tokens are shown."""
        return token_id in self._special_ids

    def token_name(self, token_id: int) -> str:
        """Returns a token as the vocabulary writes it; "" for ids without any."""
        return self._rust.id_to_token(token_id) or ""

    def token_bytes(self, token_id: int) -> bytes:
        """Returns the bytes of a single token, possibly part of a character; b"" for ids without any."""
        if (added := self._added.get(token_id)) is not None:
            return added.encode()
        token = self._rust.id_to_token(token_id)
        if token is None:  # a checkpoint's embedding may have rows for ids that its tokenizer does not have
            return b""
        if "ByteLevel" in self._decoder_types:
            return b"".join(_BYTE_OF[char] if char in _BYTE_OF else char.encode() for char in token)
        if "ByteFallback" in self._decoder_types and (byte := _BYTE_TOKEN.fullmatch(token)):
            return bytes.fromhex(byte[1])
        if self._decoder_types & {"Metaspace", "Replace"}:
            return token.replace("\u2581", " ").encode()
        return self.decode([token_id], skip_special_tokens=False).encode()

    def detokenizer(
        self, skip_special_tokens: bool = True, kept: Collection[str] = (), spaces_between: bool = True
    ) -> Detokenizer:
        """`kept`: special tokens that are shown anyway. `spaces_between` applies to consecutive special tokens."""
        if not skip_special_tokens:
            joined = NO_TOKENS if spaces_between else self._added
            return Detokenizer(self._rust, False, joined=joined, context=self._context)
        shown = {i for i in self._special_ids if self._added[i] in kept} if kept else None
        dropped = self._special_ids - shown if shown else frozenset()
        return Detokenizer(self._rust, not shown, dropped, context=self._context)


def _bytes_of_characters() -> dict[str, bytes]:
    """Maps the characters of GPT-2's byte-level BPE to bytes; unprintable bytes have characters from U+0100 on."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in shown]
    found = {chr(byte): bytes([byte]) for byte in shown}
    return found | {chr(0x100 + at): bytes([byte]) for at, byte in enumerate(others)}


_BYTE_OF = _bytes_of_characters()
_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")


def _decoder_types(rust: RustTokenizer) -> frozenset[str]:
    """Returns the names of the decoders that the tokenizer applies, such as ByteLevel."""
    if rust.decoder is None:
        return frozenset()
    state = json.loads(rust.decoder.__getstate__())
    return frozenset(decoder["type"] for decoder in state.get("decoders", [state]))


def _config(path: Path) -> dict[str, Any]:
    file = path / "tokenizer_config.json"
    return read_json(file) if file.exists() else {}


def _find_template(path: Path, config: dict[str, Any]) -> str | None:
    file = path / "chat_template.jinja"
    source = read_plain(file).decode("utf-8") if file.exists() else config.get("chat_template")
    if source is None and (file := path / "chat_template.json").exists():  # folders of vision models have this file
        source = read_json(file).get("chat_template")
    if isinstance(source, list):  # [{"name": "default", "template": …}, …]
        source = {entry.get("name"): entry.get("template") for entry in source}.get("default")
    return source if isinstance(source, str) else None


def _check_added_tokens(path: Path, config: Mapping[str, Any], vocabulary: Mapping[str, int]) -> None:
    """Rejects tokens that only these files add: transformers would use them, so prompts would get other ids.

    Raises ModelError.
    """
    added: dict[str, tuple[int, Path]] = {}
    decoder = config.get("added_tokens_decoder")
    for token_id, token in decoder.items() if isinstance(decoder, dict) else ():
        if isinstance(token, dict) and token_id.isdecimal():
            added[str(token.get("content"))] = int(token_id), path / "tokenizer_config.json"
    file = path / "added_tokens.json"
    for content, token_id in read_json(file).items() if file.exists() else ():
        if isinstance(token_id, int):
            added[content] = token_id, file
    for content, (token_id, where) in added.items():
        if vocabulary.get(content) != token_id:
            raise ModelError(
                f"{where}: the token {content!r} with id {token_id} is not in tokenizer.json; write that file again "
                f"with transformers: AutoTokenizer.from_pretrained(…).save_pretrained(…)"
            )


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    found = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        value = config.get(name)
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            found[name] = value
    return found
