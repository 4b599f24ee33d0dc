"""Tokenizing and detokenizing: stop strings and decoding against brute force, chat templates and their sandbox."""

from __future__ import annotations

import itertools
import json
import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as RustTokenizer
from tokenizers import decoders, models, pre_tokenizers

from pd_cluster.errors import ModelError, RequestError
from pd_cluster.text.detokenizer import Detokenizer
from pd_cluster.text.left_context import LeftContext
from pd_cluster.text.stop_strings import StopStrings
from pd_cluster.text.tokenizer import Tokenizer
from tests.support.checkpoints import EOS_ID, TEMPLATE, VOCAB_SIZE, make_tokenizer

RUST = make_tokenizer()
HELLO: list[dict[str, Any]] = [{"role": "user", "content": "hello"}]
Folders = Callable[..., Path]


# ---- stop strings


def first_stop(text: str, stops: list[str]) -> tuple[str, str | None]:
    """Returns the text before the first complete stop string (the longest of several), and that string."""
    for end in range(len(text) + 1):
        complete = [stop for stop in stops if text[:end].endswith(stop)]
        if complete:
            longest = max(complete, key=len)
            return text[: end - len(longest)], longest
    return text, None


def cut(text: str, places: list[int]) -> list[str]:
    bounds = sorted({0, len(text), *(place % (len(text) + 1) for place in places)})
    return [text[a:b] for a, b in itertools.pairwise(bounds)]


@settings(max_examples=400, deadline=None)
@given(
    text=st.text("abc", max_size=24),
    stops=st.lists(st.text("abc", min_size=1, max_size=4), max_size=4),
    places=st.lists(st.integers(0, 100), max_size=10),
)
def test_stop_strings_as_brute_force_however_the_text_is_cut(text: str, stops: list[str], places: list[int]) -> None:
    expected, matched = first_stop(text, stops)
    stream = StopStrings(stops)
    shown = ""
    for piece in cut(text, places):
        shown += stream.add(piece)
        assert expected.startswith(shown), "a part of a stop string was released"
    if stream.matched is None:
        shown += stream.finish()
    assert (shown, stream.matched) == (expected, matched)


def test_text_is_held_back_no_longer_than_it_must() -> None:
    """Only text that may begin a match is held back."""
    stream = StopStrings(["stop"])
    assert [stream.add(piece) for piece in ("a st", "o", "ne", "s")] == ["a ", "", "stone", ""]
    assert stream.finish() == "s"
    stops = StopStrings(["cd"])
    assert [stops.add("xcdx", may_match=False), stops.add("c", may_match=False)] == ["xcdx", ""]
    assert stops.add("d", may_match=True) == ""
    assert stops.matched == "cd"
    late = StopStrings(["cd"])
    assert late.add("cd", may_match=False) + late.add("x") + late.finish() == "cdx"
    assert late.matched is None


# ---- detokenizing


def detokenized(rust: RustTokenizer, token_ids: list[int], skip: bool = True) -> str:
    detokenizer = Detokenizer(rust, skip)
    return "".join([*(detokenizer.add(token_id) for token_id in token_ids), detokenizer.finish()])


@settings(max_examples=100, deadline=None)
@given(token_ids=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=50), skip=st.booleans())
def test_pieces_sum_to_decoding_all_at_once(token_ids: list[int], skip: bool) -> None:
    assert detokenized(RUST, token_ids, skip) == RUST.decode(token_ids, skip_special_tokens=skip)


@settings(max_examples=300, deadline=None)
@given(
    token_ids=st.lists(st.integers(0, VOCAB_SIZE - 1), max_size=150),
    skip=st.booleans(),
    places=st.lists(st.integers(0, 150), max_size=5),
)
def test_many_tokens_at_once_give_what_each_of_them_gives(token_ids: list[int], skip: bool, places: list[int]) -> None:
    one_by_one, together = (Detokenizer(RUST, skip, context=LeftContext({"ByteLevel"})) for _ in range(2))
    cuts = sorted({0, len(token_ids), *(min(place, len(token_ids)) for place in places)})
    for start, stop in itertools.pairwise(cuts):
        part = token_ids[start:stop]
        assert together.add_all(part) == "".join(map(one_by_one.add, part))
    assert together.finish() == one_by_one.finish()


@settings(max_examples=200, deadline=None)
@given(text=st.text(max_size=30))
def test_real_text_never_shows_half_a_character(text: str) -> None:
    detokenizer = Detokenizer(RUST, True)
    shown = ""
    for token_id in RUST.encode(text).ids:
        shown += detokenizer.add(token_id)
        assert text.startswith(shown)
    assert shown + detokenizer.finish() == text


def byte_fallback_tokenizer() -> RustTokenizer:
    """Makes a tokenizer like Llama 2's and Mistral's: bytes for unknown words, and a dropped leading space."""
    words = ["▁", "▁a", "b", "▁hello", "wor", "ld", "é", "▁日本"]
    names = ["<unk>", "<s>", "</s>", *(f"<0x{byte:02X}>" for byte in range(256)), *words]
    vocab = {name: i for i, name in enumerate(names)}
    tokenizer = RustTokenizer(models.BPE(vocab=vocab, merges=[], unk_token="<unk>", byte_fallback=True))
    tokenizer.decoder = decoders.Sequence(
        [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse(), decoders.Strip(" ", 1, 0)]
    )
    tokenizer.add_special_tokens(["<unk>", "<s>", "</s>"])
    return tokenizer


FALLBACK = byte_fallback_tokenizer()


@settings(max_examples=100, deadline=None)
@given(parts=st.lists(st.one_of(st.integers(259, 266), st.sampled_from("é日本😀x"), st.just(2)), max_size=20))
def test_byte_fallback_tokenizers_sum_to_the_whole(parts: list[int | str]) -> None:
    token_ids: list[int] = []
    for part in parts:
        token_ids += [part] if isinstance(part, int) else [3 + byte for byte in part.encode()]
    assert detokenized(FALLBACK, token_ids) == FALLBACK.decode(token_ids, skip_special_tokens=True)


def test_bytes_that_are_no_text_are_survived() -> None:
    """Uses bytes on which tokenizers' own DecodeStream raises "Invalid prefix encountered"."""
    rng = random.Random(1)
    texts = [detokenized(FALLBACK, [rng.randrange(267) for _ in range(40)]) for _ in range(100)]
    assert "".join(texts).count("\ufffd") > 300


@pytest.mark.parametrize("token_id", [RUST.encode("é").ids[0], EOS_ID], ids=["half a character", "special"])
def test_endless_nothing_costs_no_more_with_time(token_id: int) -> None:
    """A thousand tokens without a character are not re-decoded again and again; later text is returned."""
    detokenizer = Detokenizer(RUST, True)
    for _ in range(1000):
        detokenizer.add(token_id)
        assert len(detokenizer._shown) + len(detokenizer._pending) < 200
    assert (detokenizer.add(RUST.encode("k").ids[0]) + detokenizer.finish()).endswith("k")


# ---- a model folder's tokenizer and template


@pytest.fixture
def folder(tmp_path: Path) -> Folders:
    """Returns `folder(config=…, jinja=…)`, which writes a model folder with these tokenizer and template files."""

    def make(config: dict[str, Any] | None = None, jinja: str | None = None) -> Path:
        RUST.save(str(tmp_path / "tokenizer.json"))
        if config is not None:
            (tmp_path / "tokenizer_config.json").write_text(json.dumps(config))
        if jinja is not None:
            (tmp_path / "chat_template.jinja").write_text(jinja)
        return tmp_path

    return make


def rendered(tokenizer: Tokenizer, *arguments: Any, **more: Any) -> str:
    assert tokenizer.template is not None
    return tokenizer.template.render(*arguments, **more)


def test_a_chat_is_rendered(folder: Folders) -> None:
    """Uses the template file, or tokenizer_config.json's template; a model may have neither."""
    tokenizer = Tokenizer(folder(jinja=TEMPLATE))
    messages = [{"role": "system", "content": "be brief"}, *HELLO]
    expected = "<|system|>be brief<|user|>hello<|assistant|>"
    assert rendered(tokenizer, messages) == expected
    assert rendered(tokenizer, messages, add_generation_prompt=False) == expected.removesuffix("<|assistant|>")
    (folder() / "chat_template.jinja").unlink()
    several = [{"name": "tool_use", "template": "no"}, {"name": "default", "template": "from config"}]
    for source in ("from config", several):
        assert rendered(Tokenizer(folder({"chat_template": source})), HELLO) == "from config"
    for config in ({}, {"chat_template": [{"name": "rag", "template": "x"}]}):
        assert Tokenizer(folder(config)).template is None


def test_tokens_that_only_transformers_would_add_are_refused_by_name(folder: Folders) -> None:
    """A token that tokenizer.json has under the same id, as saved by transformers, is accepted."""
    known = RUST.get_vocab(with_added_tokens=True)
    content, token_id = max(known.items(), key=lambda item: item[1])
    path = folder({"added_tokens_decoder": {str(token_id): {"content": content, "special": True}}})
    (path / "added_tokens.json").write_text(json.dumps({content: token_id}))
    Tokenizer(path)
    (path / "added_tokens.json").write_text(json.dumps({content: token_id, "<tool>": token_id + 1}))
    with pytest.raises(ModelError, match=rf"added_tokens.json: the token '<tool>' with id {token_id + 1} is not in"):
        Tokenizer(path)
    (path / "added_tokens.json").unlink()
    folder({"added_tokens_decoder": {str(token_id + 1): {"content": "<tool>", "special": True}}})
    with pytest.raises(ModelError, match=r"tokenizer_config.json: the token '<tool>'.*write that file again"):
        Tokenizer(path)


def test_templates_see_special_tokens_variables_and_helpers(folder: Folders) -> None:
    source = (
        "{{ bos_token }}{{ eos_token }}{{ messages | tojson }}{{ thinking }}{{ strftime_now('%Y') | length }}"
        "{% for m in [1, 2] %}{% if m == 2 %}{% break %}{% endif %}{{ m }}{% endfor %}"
        "{% if tools is not none or documents is not none %}wrong{% endif %}"
    )
    config = {"bos_token": "<bos>", "eos_token": {"content": "<eos>", "lstrip": False}}
    found = rendered(Tokenizer(folder(config, source)), [{"role": "user", "content": "<é>"}], True, {"thinking": 7})
    assert found == '<bos><eos>[{"role": "user", "content": "<é>"}]741'


@pytest.mark.parametrize(
    "source",
    [
        "{{ raise_exception('only users may speak') }}",
        "{{ messages[0].missing.deeper }}",
        "{{ 'x'.index(messages[0].content) }}",
        "{% macro again() %}{{ again() }}{% endmacro %}{{ again() }}",
        # The sandbox blocks this.
        "{{ messages.__class__.__base__ }}",
        "{{ messages.append(1) }}",
        "{{ raise_exception.__globals__.json }}",
        "{{ '{0.__class__.__init__.__globals__}'.format(messages) }}",
        "{% for i in range(10000000) %}{% endfor %}",
    ],
)
def test_what_a_template_refuses_is_the_clients_error(folder: Folders, source: str) -> None:
    with pytest.raises(RequestError, match="the chat template rejects these messages") as caught:
        rendered(Tokenizer(folder(jinja=source)), HELLO)
    assert caught.value.param == "messages"


@pytest.mark.parametrize("content", [None, "{", '{"model": 3}'])
def test_an_unreadable_tokenizer_names_its_file(folder: Folders, tmp_path: Path, content: str | None) -> None:
    if content is not None:
        (tmp_path / "tokenizer.json").write_text(content)
    with pytest.raises(ModelError, match=r"tokenizer\.json: cannot be read"):
        Tokenizer(tmp_path)
    with pytest.raises(ModelError, match="does not compile"):
        Tokenizer(folder(jinja="{% if %}"))


# ---- single tokens


def tokenizer_in(folder: Path, rust: RustTokenizer) -> Tokenizer:
    rust.save(str(folder / "tokenizer.json"))
    return Tokenizer(folder)


TEXT = "Hello wörld, 日本語 😀\n\x00\x7f\xad"


def test_every_byte_of_byte_level_tokens(tmp_path: Path) -> None:
    """With a decoder of another kind, tokens are text."""
    tokenizer = tokenizer_in(tmp_path, make_tokenizer())
    assert sorted(tokenizer.token_bytes(i) for i in range(256)) == [bytes([byte]) for byte in range(256)]
    assert [tokenizer.token_bytes(i) for i in (258, 300, 100_000)] == [b"<eos>", b"<word41>", b""]
    assert b"".join(tokenizer.token_bytes(i) for i in tokenizer.encode(TEXT)).decode() == TEXT
    rust = RustTokenizer(models.WordPiece({"hello": 0, "##ing": 1, "[UNK]": 2}, unk_token="[UNK]"))
    rust.decoder = decoders.WordPiece()
    for each in (rust, RustTokenizer(models.WordLevel({"hello": 0}, unk_token="hello"))):
        assert tokenizer_in(tmp_path, each).token_bytes(0) == b"hello"


def test_byte_fallback_tokens(tmp_path: Path) -> None:
    """In Llama 2's and Mistral's kind, <0xE6> is a byte and ▁ a space."""
    tokenizer = tokenizer_in(tmp_path, FALLBACK)
    assert [tokenizer.token_bytes(3 + byte) for byte in range(256)] == [bytes([byte]) for byte in range(256)]
    assert [tokenizer.token_bytes(i) for i in (259, 262, 265)] == [b" ", b" hello", "é".encode()]


def test_bad_words_with_and_without_a_space(tmp_path: Path) -> None:
    """As in vLLM, the form with a space is added if it has as many tokens and another first token."""
    words = ["h", "i", "Ġ", "hi", "Ġhi", "Ġh"]
    rust = RustTokenizer(
        models.BPE({w: i for i, w in enumerate(words)}, [("Ġ", "h"), ("h", "i"), ("Ġh", "i")], fuse_unk=False)
    )
    rust.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    rust.decoder = decoders.ByteLevel()
    tokenizer = tokenizer_in(tmp_path, rust)
    assert tokenizer.encode("hi") == [3]
    assert tokenizer.encode(" hi") == [4]
    assert tokenizer.encode_bad_words(["hi"]) == ((3,), (4,))
    assert tokenizer.encode_bad_words(["  hi", "hi"]) == ((3,), (4,))
    assert tokenizer.encode_bad_words(["ii"]) == ((1, 1),), "the form with a space is longer"
    assert tokenizer.encode_bad_words([" "]) == ((2,),)
    assert tokenizer.encode_bad_words([]) == ()


# ---- special tokens in texts


def words(specials: list[str]) -> RustTokenizer:
    """Returns a tokenizer whose tokens are words, joined by spaces."""
    rust = RustTokenizer(models.WordLevel({word: at for at, word in enumerate(["<unk>", "a", "b"])}, "<unk>"))
    rust.pre_tokenizer = pre_tokenizers.WhitespaceSplit()
    rust.add_special_tokens(specials)
    return rust


def shown(folder: Path, text: str, **options: Any) -> str:
    tokenizer = Tokenizer(folder)
    detokenizer = tokenizer.detokenizer(**options)
    return "".join(detokenizer.add(token_id) for token_id in tokenizer.encode(text)) + detokenizer.finish()


def test_special_tokens_that_follow_each_other_are_joined_or_kept_when_asked_for(tmp_path: Path) -> None:
    words(["<x>", "<y>"]).save(str(tmp_path / "tokenizer.json"))
    text = "a <x> <y> b <x> <x> <y>"
    assert shown(tmp_path, text, skip_special_tokens=False) == text
    assert shown(tmp_path, text, skip_special_tokens=False, spaces_between=False) == "a <x><y> b <x><x><y>"
    assert shown(tmp_path, text, spaces_between=False) == shown(tmp_path, text) == "a b"
    assert shown(tmp_path, "<y> a <x> b <y> <x>", kept=["<x>", "<z>"]) == "a <x> b <x>"
    assert shown(tmp_path, text, kept=["a"]) == "a b"
