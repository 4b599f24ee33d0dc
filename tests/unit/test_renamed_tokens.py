"""A tokenizer with renamed control tokens gives the library's ids for intended tokens, and none for plain text."""

from __future__ import annotations

from collections.abc import Callable

import pytest
from tokenizers import Tokenizer, models, normalizers, pre_tokenizers, processors

from pd_cluster.text.control_tokens import ControlTokens, PromptText
from pd_cluster.text.renamed_tokens import RenamedTokens


def word_piece() -> Tokenizer:
    texts = ["[PAD]", "[UNK]", "[CLS]", "[SEP]", "a", "b", "##b", "[", "]", "cls", "sep"]
    tokenizer = Tokenizer(models.WordPiece({text: at for at, text in enumerate(texts)}, unk_token="[UNK]"))
    tokenizer.normalizer = normalizers.BertNormalizer()
    tokenizer.pre_tokenizer = pre_tokenizers.BertPreTokenizer()
    tokenizer.add_special_tokens(texts[:4])
    tokenizer.post_processor = processors.BertProcessing(("[SEP]", 3), ("[CLS]", 2))
    return tokenizer


def word_level() -> Tokenizer:
    tokenizer = Tokenizer(models.WordLevel({"[UNK]": 0, "[CLS]": 1, "[SEP]": 2, "a": 3, "Ab": 4}, unk_token="[UNK]"))
    tokenizer.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    tokenizer.add_special_tokens(["[UNK]", "[CLS]", "[SEP]"])
    return tokenizer


def merging() -> Tokenizer:
    """Returns a tokenizer whose merges produce a control token's text, and continue from it."""
    alphabet = sorted(pre_tokenizers.ByteLevel.alphabet())
    merges = [("S", "E"), ("SE", "P"), ("[", "SEP"), ("[SEP", "]"), ("[SEP]", "a"), ("C", "L"), ("A", "b")]
    vocab = {text: at for at, text in enumerate([*alphabet, *map("".join, merges)])}
    tokenizer = Tokenizer(models.BPE(vocab=vocab, merges=merges, ignore_merges=True))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.add_special_tokens(["[CLS]", "[SEP]"])
    return tokenizer


@pytest.mark.parametrize("make", [word_piece, word_level, merging])
def test_renamed_tokens(make: Callable[[], Tokenizer]) -> None:
    tokenizer = make()
    control = ControlTokens([token.content for token in tokenizer.get_added_tokens_decoder().values()])
    renamed = RenamedTokens(tokenizer, control.texts)
    for text in ("a [CLS] Ab [SEP] a", "[SEP]", "a Ab"):
        for special in (True, False):
            expected = tokenizer.encode(text, add_special_tokens=special).ids
            assert renamed.encode(control.prompt_of(text, None), special) == expected
    typed = renamed.encode(PromptText("a [SEP] Ab [CLS]", ()), False)
    assert not {tokenizer.token_to_id("[SEP]"), tokenizer.token_to_id("[CLS]")} & {*typed}
    assert tokenizer.token_to_id("a") in typed
