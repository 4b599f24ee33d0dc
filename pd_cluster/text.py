"""Text to token ids and back: tokenizer, incremental detokenizer, stop strings.

Uses the `tokenizers` library, never torch: the scheduler's process imports this.
"""

from __future__ import annotations

import json
import re
import threading
from collections.abc import Callable, Collection, Mapping
from functools import lru_cache
from pathlib import Path
from types import MappingProxyType
from typing import Any

from tokenizers import Tokenizer as RustTokenizer
from tokenizers.models import BPE

from pd_cluster.chat_template import ChatTemplate
from pd_cluster.checkpoint import read_json
from pd_cluster.control_tokens import ControlTokens, PromptText, control_texts
from pd_cluster.errors import ModelError
from pd_cluster.renamed_tokens import RenamedTokens

REPLACEMENT = "\ufffd"  # what a decoder shows for bytes that are not (yet) a character
NO_TOKENS: Mapping[int, str] = MappingProxyType({})
MAX_PENDING_TOKENS = 64  # without a complete character among them: it is no text, show it


class Tokenizer:
    """A folder's tokenizer, and a chat template."""

    def __init__(self, path: Path | None, template: str = "", model_path: Path | None = None) -> None:
        """`path` None: there is no text, only token ids. Raises ModelError.

        `template`: a source that takes the place of the folder's. `model_path`: where the template is looked for when
        the tokenizer's folder has none.
        """
        self.has_text = path is not None
        try:
            self._rust = RustTokenizer(BPE())
            if path is not None:
                self._rust = RustTokenizer.from_file(str(path / "tokenizer.json"))
        except Exception as error:
            raise ModelError(f"{path}/tokenizer.json: cannot be read: {error}") from None
        self._rust.no_truncation()
        self._rust.no_padding()
        self.vocab_size: int = self._rust.get_vocab_size(with_added_tokens=True)
        added = self._rust.get_added_tokens_decoder()
        self._added = {i: token.content for i, token in added.items()}
        self._special_ids = frozenset(i for i, token in added.items() if token.special)
        self._decoder_types = _decoder_types(self._rust)
        vocabulary = self._rust.get_vocab(with_added_tokens=True)
        self.max_chars_per_token = max(map(len, vocabulary), default=1)
        # One int object an id, that all prompts share: a running request's takes 8 bytes a token instead of 40.
        self._ids = list(range(max(vocabulary.values(), default=-1) + 1))
        config = _config(path) if path is not None else {}
        if path is not None:
            _check_added_tokens(path, config, vocabulary)
        folders = [folder for folder in (path, model_path) if folder is not None and self.has_text]
        source = template or next(filter(None, (_find_template(folder, _config(folder)) for folder in folders)), None)
        self.special_tokens = _special_tokens(config)
        try:
            self.template = ChatTemplate(source, self.special_tokens) if source is not None else None
        except ModelError as error:
            raise ModelError(f"{'--chat-template' if template else path}: {error}") from None
        self._renamed: RenamedTokens | None = None  # made when a prompt first needs it
        self._renaming = threading.Lock()

    def control_tokens(self, known: Collection[str] = ()) -> ControlTokens:
        """`known`: added tokens that are control tokens in any case."""
        added = [(token.content, token.special) for token in self._rust.get_added_tokens_decoder().values()]
        source = self.template.source if self.template is not None else ""
        return ControlTokens(control_texts(added, known, source))

    def normalizer(self, control: ControlTokens) -> Callable[[str], str] | None:
        """What is done to a text before some of these are looked for; None where they are looked for in the text."""
        added = self._rust.get_added_tokens_decoder().values()
        if self._rust.normalizer is None or not any(t.normalized and t.content in control.texts for t in added):
            return None
        normalize: Callable[[str], str] = self._rust.normalizer.normalize_str
        return normalize

    def encode_prompt(self, prompt: PromptText, control: ControlTokens, add_special_tokens: bool = True) -> list[int]:
        """Where the prompt says which control tokens are its own, all others are encoded as plain text."""
        if prompt.own is None:
            return self.encode(prompt.text, add_special_tokens)
        with self._renaming:
            if self._renamed is None:
                self._renamed = RenamedTokens(self._rust, control.texts)
        own = self._ids
        return [own[token_id] for token_id in self._renamed.encode(prompt, add_special_tokens)]

    def encode(self, text: str, add_special_tokens: bool = True) -> list[int]:
        # A batch of one: `encode` would hold the interpreter's lock for seconds on a long text, and heartbeats with it.
        # Without offsets, which take more memory than the ids.
        (encoding,) = self._rust.encode_batch_fast([text], add_special_tokens=add_special_tokens)
        own = self._ids
        return [own[token_id] for token_id in encoding.ids]

    def decode(self, token_ids: list[int], skip_special_tokens: bool = True) -> str:
        # A batch of one, for the same reason.
        (text,) = self._rust.decode_batch([token_ids], skip_special_tokens=skip_special_tokens)
        return str(text)

    def encode_bad_words(self, words: list[str]) -> tuple[tuple[int, ...], ...]:
        """Each word's tokens as it is and, as vLLM has it, with a space before it when those are other tokens."""
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

    def token_bytes(self, token_id: int) -> bytes:
        """What one token stands for by itself, before it is text: half a character, perhaps; b"" for ids without."""
        if (added := self._added.get(token_id)) is not None:
            return added.encode()
        token = self._rust.id_to_token(token_id)
        if token is None:  # checkpoints have rows for more ids than their tokenizer
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
        """`kept` are special tokens that are shown nevertheless; `spaces_between` is about special tokens in a row."""
        is_additive = self._decoder_types == {"ByteLevel"}
        if not skip_special_tokens:
            joined = NO_TOKENS if spaces_between else self._added
            return Detokenizer(self._rust, False, joined=joined, is_additive=is_additive)
        shown = {i for i in self._special_ids if self._added[i] in kept} if kept else None
        dropped = self._special_ids - shown if shown else frozenset()
        return Detokenizer(self._rust, not shown, dropped, is_additive=is_additive)


class Detokenizer:
    """Token ids in, text out as soon as it is certain; the sum equals decoding all at once.

    A token's text depends on its neighbours (a character may take several, a leading space may be dropped), so every
    token is decoded behind those that came before it. Byte-fallback tokenizers may take back a character that was
    shown already when invalid bytes follow; it stays as shown.
    """

    def __init__(
        self,
        rust: RustTokenizer,
        skip_special_tokens: bool,
        dropped: frozenset[int] = frozenset(),
        joined: Mapping[int, str] = NO_TOKENS,
        is_additive: bool = False,
    ) -> None:
        """`dropped` ids are not shown; those in `joined` are shown as that text where they follow one another.

        `is_additive`: a token's bytes do not depend on its neighbours.
        """
        self._rust = rust
        self._skip = skip_special_tokens
        self._dropped = dropped
        self._joined = joined
        self._takes_many = is_additive and not dropped and not joined
        self._last_id = -1
        self._shown: list[int] = []  # the tokens whose text went out last
        self._shown_text = ""  # theirs alone
        self._pending: list[int] = []

    def add(self, token_id: int) -> str:
        """New text, "" while a character is incomplete."""
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
        if len(self._pending) > MAX_PENDING_TOKENS:  # special tokens, that have no text
            self._pending.clear()
        return ""

    def add_all(self, token_ids: list[int]) -> str:
        """What `add` gives for each of them, together; at once where that is the same."""
        if self._takes_many and not self._pending and 0 < len(token_ids) <= MAX_PENDING_TOKENS:
            text = self._decode([*self._shown, *token_ids])
            if len(text) > len(self._shown_text) and not text.endswith(REPLACEMENT):
                self._pending = token_ids
                return self._show(text)
        return "".join(map(self.add, token_ids))

    def finish(self) -> str:
        """What is left, incomplete characters as U+FFFD."""
        return self._show(self._decode([*self._shown, *self._pending]))

    def _join(self, token_id: int) -> str:
        """A special token right behind another one."""
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


class StopStrings:
    """Cuts a stream of text before the first stop string, holding back what could still become one.

    First is the one that is complete first, of several that end together the longest: then the answer does not
    depend on how the text was cut into pieces. Each character costs a step for each stop string, whatever they are
    (Knuth, Morris and Pratt's search).
    """

    def __init__(self, stops: list[str], include: bool = False) -> None:
        """`include` keeps the stop string itself."""
        self._stops = sorted(stops, key=len, reverse=True)
        self._fallbacks = [_fallback(stop) for stop in self._stops]
        self._nums_matched = [0 for _ in stops]  # characters at the text's end that the stop string begins with
        self._include = include
        self._held = ""
        self.matched: str | None = None

    def __bool__(self) -> bool:
        """Whether there is anything to look for."""
        return bool(self._stops)

    def add(self, text: str, may_match: bool = True) -> str:
        """Text that is certain to come before any stop string. After a match: nothing more.

        A stop string that is complete with text of `may_match` False is none.
        """
        if self.matched is not None:
            return ""
        if not self._stops:
            return text
        for at, char in enumerate(text):
            found = self._step(char)
            if found is not None and may_match:
                self.matched = found
                whole, self._held = self._held + text[: at + 1], ""
                return whole if self._include else whole[: len(whole) - len(found)]
        self._held += text
        keep = max(self._nums_matched)
        certain = self._held[: len(self._held) - keep]
        self._held = self._held[len(self._held) - keep :]
        return certain

    def finish(self) -> str:
        """The end of the stream: what was held back was no stop string."""
        rest, self._held = self._held, ""
        return rest

    def _step(self, char: str) -> str | None:
        """The longest stop string that ends with this character."""
        found = None
        for which, stop in enumerate(self._stops):
            num_matched, fallback = self._nums_matched[which], self._fallbacks[which]
            while num_matched and stop[num_matched] != char:
                num_matched = fallback[num_matched]
            num_matched += stop[num_matched] == char
            if num_matched == len(stop):
                found = found or stop
                num_matched = fallback[num_matched]
            self._nums_matched[which] = num_matched
        return found


@lru_cache(maxsize=1024)  # of a request's many sequences, each has the same
def _fallback(stop: str) -> list[int]:
    """For each length of a beginning of it: the longest shorter one that this ends with."""
    found = [0, 0]
    for char in stop[1:]:
        length = found[-1]
        while length and stop[length] != char:
            length = found[length]
        found.append(length + (stop[length] == char))
    return found


def _bytes_of_characters() -> dict[str, bytes]:
    """How byte-level BPE (GPT-2's) writes bytes: those that can be shown as themselves, the others from U+0100 on."""
    shown = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [byte for byte in range(0x100) if byte not in shown]
    found = {chr(byte): bytes([byte]) for byte in shown}
    return found | {chr(0x100 + at): bytes([byte]) for at, byte in enumerate(others)}


_BYTE_OF = _bytes_of_characters()
_BYTE_TOKEN = re.compile("<0x([0-9A-F]{2})>")


def _decoder_types(rust: RustTokenizer) -> frozenset[str]:
    """The names of the decoders that the tokenizer applies, such as ByteLevel."""
    if rust.decoder is None:
        return frozenset()
    state = json.loads(rust.decoder.__getstate__())
    return frozenset(decoder["type"] for decoder in state.get("decoders", [state]))


def _config(path: Path) -> dict[str, Any]:
    file = path / "tokenizer_config.json"
    return read_json(file) if file.exists() else {}


def _find_template(path: Path, config: dict[str, Any]) -> str | None:
    file = path / "chat_template.jinja"
    source = file.read_text("utf-8") if file.exists() else config.get("chat_template")
    if isinstance(source, list):  # [{"name": "default", "template": …}, …]
        source = {entry.get("name"): entry.get("template") for entry in source}.get("default")
    return source if isinstance(source, str) else None


def _check_added_tokens(path: Path, config: Mapping[str, Any], vocabulary: Mapping[str, int]) -> None:
    """transformers adds tokens that stand in these files only; a prompt would have other ids. Raises ModelError."""
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
                f"{where}: the token {content!r} with id {token_id} is not in tokenizer.json; make that file anew with "
                f"transformers: AutoTokenizer.from_pretrained(…).save_pretrained(…)"
            )


def _special_tokens(config: dict[str, Any]) -> dict[str, str]:
    found = {}
    for name in ("bos_token", "eos_token", "unk_token", "pad_token"):
        value = config.get(name)
        value = value.get("content") if isinstance(value, dict) else value
        if isinstance(value, str):
            found[name] = value
    return found
