"""A small tokenizer for each kind of decoder. Ids 0 to 2 are <unk>, <s> and </s>."""

from __future__ import annotations

from collections.abc import Callable

from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models, normalizers, pre_tokenizers

SPECIAL = ["<unk>", "<s>", "</s>"]
BYTES = [f"<0x{byte:02X}>" for byte in range(256)]
WORDS = ["Hello", "world", "He", "llo", "ab", "if", ":", "x", "é", "日"]
PIECES = ["▁", "▁▁▁", "▁▁▁▁", *("▁" + word for word in WORDS), *WORDS]
FIRST_BYTE = len(SPECIAL)  # first byte's id, in tokenizers with byte tokens


def _vocab(names: list[str]) -> dict[str, int]:
    return {name: token_id for token_id, name in enumerate(names)}


def _with_special(tokenizer: RustTokenizer) -> RustTokenizer:
    tokenizer.add_special_tokens(SPECIAL)
    return tokenizer


def byte_level() -> RustTokenizer:
    """Makes GPT-2's kind, with tokens for bytes and words."""
    level = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    words = [level.pre_tokenize_str(text)[0][0] for text in (" ", "   ", *(" " + word for word in WORDS[:6]))]
    alphabet = [level.pre_tokenize_str(chr(byte))[0][0] for byte in range(128)]
    alphabet += [char for char in sorted(pre_tokenizers.ByteLevel.alphabet()) if char not in alphabet]
    names = list(dict.fromkeys([*SPECIAL, *alphabet, *words, *WORDS[:6]]))
    tokenizer = RustTokenizer(models.BPE(vocab=_vocab(names), merges=[]))
    tokenizer.pre_tokenizer, tokenizer.decoder = level, decoders.ByteLevel()
    return _with_special(tokenizer)


def _sentencepiece_bpe(first_space: bool) -> RustTokenizer:
    names = [*SPECIAL, *BYTES, *PIECES]
    letters = sorted({char for piece in PIECES for char in piece} - {*PIECES})
    model = models.BPE(vocab=_vocab([*names, *letters]), merges=[], unk_token="<unk>", byte_fallback=True)
    tokenizer = RustTokenizer(model)
    steps = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    normal = [normalizers.Replace(" ", "▁")]
    if first_space:
        steps, normal = [*steps, decoders.Strip(" ", 1, 0)], [normalizers.Prepend("▁"), *normal]
    tokenizer.decoder, tokenizer.normalizer = decoders.Sequence(steps), normalizers.Sequence(normal)
    return _with_special(tokenizer)


def llama2() -> RustTokenizer:
    """SentencePiece BPE that drops the first space: Llama 2, Mistral, Mixtral, Phi-3."""
    return _sentencepiece_bpe(first_space=True)


def gemma() -> RustTokenizer:
    """SentencePiece BPE that keeps the first space."""
    return _sentencepiece_bpe(first_space=False)


def _unigram(prepend_scheme: str) -> RustTokenizer:
    scores = [(name, -1.0 - 1 / (1 + len(name))) for name in [*SPECIAL, *PIECES]]
    tokenizer = RustTokenizer(models.Unigram(scores, unk_id=0, byte_fallback=False))
    tokenizer.pre_tokenizer = pre_tokenizers.Metaspace(prepend_scheme=prepend_scheme)
    tokenizer.decoder = decoders.Metaspace(prepend_scheme=prepend_scheme)
    return _with_special(tokenizer)


def unigram() -> RustTokenizer:
    """Makes T5's kind."""
    return _unigram("always")


def unigram_without_prefix() -> RustTokenizer:
    return _unigram("never")


def word_piece() -> RustTokenizer:
    """Makes BERT's kind: a space precedes every token that does not begin with ##."""
    names = [*SPECIAL, *WORDS, *("##" + word for word in WORDS), ".", ","]
    tokenizer = RustTokenizer(models.WordPiece(vocab=_vocab(names), unk_token="<unk>"))
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.BertPreTokenizer(), decoders.WordPiece()
    return _with_special(tokenizer)


def word_ends() -> RustTokenizer:
    """Makes GPT-1's kind: </w> is a space, but not at the end of a text."""
    tokenizer = RustTokenizer(
        models.BPE(vocab=_vocab([*SPECIAL, *WORDS, *(word + "</w>" for word in WORDS)]), merges=[])
    )
    tokenizer.pre_tokenizer, tokenizer.decoder = pre_tokenizers.Whitespace(), decoders.BPEDecoder()
    return _with_special(tokenizer)


def words_alone() -> RustTokenizer:
    """Makes a tokenizer without a decoder, so that a space separates tokens."""
    tokenizer = RustTokenizer(models.WordLevel(vocab=_vocab([*SPECIAL, *WORDS]), unk_token="<unk>"))
    tokenizer.pre_tokenizer = pre_tokenizers.Whitespace()
    return _with_special(tokenizer)


KINDS: dict[str, Callable[[], RustTokenizer]] = {
    each.__name__: each
    for each in (byte_level, llama2, gemma, unigram, unigram_without_prefix, word_piece, word_ends, words_alone)
}
