"""Pairs of constraints on one output (masks, ends, biases, budgets, guides), in the engine.

No constraint forbids tokens that a guide needs, so each request must succeed and satisfy all constraints.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from itertools import combinations
from pathlib import Path
from typing import Any, NamedTuple

import numpy as np
import pytest
import regex
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from pd_cluster.engine.scheduling.group_holdings import LayerGroup
from pd_cluster.engine.scheduling.scheduler import StepScheduler, StepSizes
from pd_cluster.engine.step.engine_core import EngineCore
from pd_cluster.errors import GuideError
from pd_cluster.kv.block_pool import BlockPool
from pd_cluster.kv.prefix_index import PrefixScope
from pd_cluster.model.sampling.grammar_masks import Guides
from pd_cluster.numerics import Numerics
from pd_cluster.parsers.reply_format import ReplyFormat
from pd_cluster.text.grammar import Compiler
from pd_cluster.types import Guide, Request, RequestSpec, Sampling
from tests.support.drafts import liars
from tests.support.toy_model import VOCAB_SIZE, ToyRunner

OPEN, CLOSE, EOS_ID = 1, 2, 3
BYTES = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
TEXTS = [*"ABCDabcd0123 ", *"é…", "ab", "Ba", "\n"]


def byte_level(text: str) -> str:
    return "".join(piece for piece, _ in BYTES.pre_tokenize_str(text))


class Ends(ToyRunner):
    """The toy model with these end tokens."""

    def __init__(self, num_blocks: int, eos_token_ids: frozenset[int]) -> None:
        super().__init__(num_blocks, 4)
        self.eos_token_ids = eos_token_ids  # type: ignore[misc]


class Outcome(NamedTuple):
    """`output` excludes the end token."""

    output: list[int]
    reason: str
    failure: str


class World:
    """A vocabulary of letters, bytes of two longer characters, and reasoning markers; `B` is an end token and text."""

    def __init__(self, folder: Path) -> None:
        texts = [byte_level(text) for text in TEXTS]
        names = ["<pad>", "<think>", "</think>", "<eos>", *dict.fromkeys([*"".join(texts[:15]), *texts[15:]])]
        merges = [("a", "b"), ("B", "a")]
        tokenizer = Tokenizer(models.BPE(vocab={name: at for at, name in enumerate(names)}, merges=merges))
        tokenizer.pre_tokenizer = BYTES
        tokenizer.decoder = decoders.ByteLevel()
        tokenizer.add_special_tokens(names[:4])
        assert len(names) <= VOCAB_SIZE
        tokenizer.save(str(folder / "tokenizer.json"))
        self.file, self.tokenizer = folder / "tokenizer.json", tokenizer
        self.ends = frozenset({EOS_ID, self.id_of("B"), VOCAB_SIZE - 1, VOCAB_SIZE + 7, -1})
        self.compiler = Compiler(self.file, VOCAB_SIZE, self.ends)
        self.guides = Guides(lambda: self.compiler)

    def id_of(self, text: str) -> int:
        (token_id,) = self.tokenizer.encode(text).ids
        return int(token_id)

    def text_of(self, token_ids: Sequence[int]) -> str:
        return str(self.tokenizer.decode(token_ids, skip_special_tokens=False))

    def run(self, samplings: Sequence[Sampling], known: Sequence[list[int]] | None = None) -> list[Outcome]:
        """`known`: the whole outputs, from which right and wrong drafts are made."""
        scheduler = StepScheduler([LayerGroup(BlockPool(1024))], StepSizes(4, 64, 256), PrefixScope("toy", Numerics()))
        drafting = None
        if known is not None:
            truths = {f"r{at}": output for at, output in enumerate(known)}
            drafting = liars(scheduler, random.Random(1), lambda r: truths[r.request_id], VOCAB_SIZE, self.id_of("B"))
        core = EngineCore(Ends(1024, self.ends), scheduler, guides=self.guides, drafting=drafting)
        requests = [Request(f"r{at}", RequestSpec([4, 5], sampling)) for at, sampling in enumerate(samplings)]
        for request in requests:
            scheduler.add(request)
        reasons: dict[str, str] = {}
        failed: dict[str, str] = {}
        while scheduler.requests:
            result = core.step()
            failed |= {request.key: why for request, why in result.failed}
            reasons |= {request.key: token.finish_reason for request, token in result.sampled if token.finish_reason}
        found = []
        for request in requests:
            output, reason = request.output_token_ids, reasons.get(request.key, "")
            found.append(Outcome(output[:-1] if reason == "stop" else output, reason, failed.get(request.key, "")))
        return found


@pytest.fixture(scope="module")
def world(tmp_path_factory: pytest.TempPathFactory) -> World:
    return World(tmp_path_factory.mktemp("met"))


CHOICES = Guide("choice", '["BAD", "CAB", "DaBBa"]')
GUIDES = {
    "choice": (CHOICES, "BAD|CAB|DaBBa"),
    "regex": (Guide("regex", "([A-D]{2}é?…?)+[a-d]"), "([A-D]{2}é?…?)+[a-d]"),
    "grammar": (Guide("grammar", 'root ::= "B" root "C" | "Aé"'), r"(B(?:(?R)|Aé)C)|Aé"),
    "json": (Guide("json", '{"enum": [120, 31]}'), "120|31"),
    "free": (None, r"(?s).*"),
}


def constraints(world: World) -> dict[str, dict[str, Any]]:
    letters = [*range(4, len(TEXTS) + 7)]
    return {
        "none": {},
        "allowed_token_ids": {"allowed_token_ids": tuple(letters)},
        "bad_words": {"bad_words": ((OPEN,), (CLOSE,), (world.id_of("c"), world.id_of("d")), (EOS_ID,))},
        "min_tokens": {"min_tokens": 5},
        "ignore_eos": {"ignore_eos": True},
        "logit_bias": {"logit_bias": ((world.id_of("B"), 4.0), (EOS_ID, -100.0), (CLOSE, -100.0))},
        "stop_token_ids": {"stop_token_ids": (world.id_of("A"), world.id_of("1"))},
        "penalties": {"repetition_penalty": 1.7, "presence_penalty": 1.5},
        "drawn": {"temperature": 1.5, "top_k": 5, "seed": 3},
    }


@pytest.mark.parametrize("name", GUIDES)
@pytest.mark.parametrize("budget", [None, 0, 2])
def test_every_pair_with_every_guide_and_every_budget(world: World, name: str, budget: int | None) -> None:
    guide, pattern = GUIDES[name]
    form = ReplyFormat("", "deepseek_r1")
    inner = form.guide([], "none", "<think>", answer=guide)
    given = guide if budget is None else form.budgeted(inner, budget, "<think>")
    pairs = [*combinations(constraints(world).items(), 2)]
    samplings = [
        Sampling(**{"temperature": 0.0, **first, **second}, guide=given, max_tokens=30)
        for (_, first), (_, second) in pairs
    ]
    outcomes = world.run(samplings)
    assert world.run(samplings, [outcome.output for outcome in outcomes]) == outcomes
    for ((one, _), (other, _)), (output, reason, failure) in zip(pairs, outcomes, strict=True):
        told = f"{one}, {other}: {world.text_of(output)!r} {reason} {failure}"
        assert failure == "", told
        if budget is not None:
            num_thought = output.index(CLOSE) if CLOSE in output else len(output)
            assert num_thought <= budget + 2, told  # at most the remaining bytes of a character
            if guide is not None and CLOSE in output:
                assert "\ufffd" not in world.text_of(output[:num_thought]), told
            output = output[num_thought + 1 :]
        if guide is None or (reason == "length" and "\ufffd" in world.text_of(output)):
            continue
        assert regex.fullmatch(pattern, world.text_of(output).lstrip(), partial=reason != "stop"), told


@pytest.mark.parametrize("ends", [{}, {"stop_token_ids": "B"}, {"min_tokens": 3}, {"ignore_eos": True}])
def test_an_end_token_within_the_guide_is_text(world: World, ends: dict[str, Any]) -> None:
    """Every choice can be generated, whichever the model prefers; an end token inside a choice does not end it."""
    sampling = {**ends, "stop_token_ids": (world.id_of("B"),)} if "stop_token_ids" in ends else ends
    for choice in json.loads(CHOICES.text):
        bias = tuple((token_id, 50.0) for token_id in world.tokenizer.encode(choice[0]).ids)
        (found,) = world.run([Sampling(guide=CHOICES, max_tokens=20, logit_bias=bias, **sampling)])
        assert (world.text_of(found.output), found.reason, found.failure) == (choice, "stop", ""), choice


@pytest.mark.parametrize(("ends", "vocab_size"), [({3, VOCAB_SIZE - 1, 10**6, -1}, VOCAB_SIZE), ({5, 31}, 20)])
def test_an_end_beyond_the_tokenizer_refuses_no_guide(world: World, ends: set[int], vocab_size: int) -> None:
    compiler = Compiler(world.file, vocab_size, ends)
    words = np.zeros(compiler.num_words, dtype=np.uint32)
    matcher = compiler.compile(Guide("regex", "a"))
    matcher.take([world.id_of("a")])
    matcher.write_mask(words)
    found = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()
    assert found == sorted(token_id for token_id in ends if 0 <= token_id < vocab_size)
    with pytest.raises(GuideError, match="names no end-of-sequence token"):
        Compiler(world.file, VOCAB_SIZE, {-1, 10**6})


@pytest.mark.parametrize("inner", [CHOICES, None], ids=["guided", "free"])
def test_a_budget_closes_at_the_next_character(world: World, inner: Guide | None) -> None:
    """For any budget, also one that ends inside a character; the closing marker fits a grammar of the whole reply."""
    form = ReplyFormat("", "deepseek_r1")
    thought = world.tokenizer.encode("a…é… …éb…").ids
    for budget in range(len(thought) + 1):
        guide = form.budgeted(form.guide([], "none", "<think>", answer=inner), budget, "<think>")
        assert guide is not None
        matcher = world.compiler.compile(guide)
        words = np.zeros(world.compiler.num_words, dtype=np.uint32)
        taken: list[int] = []
        while True:
            matcher.write_mask(words)
            allowed = np.flatnonzero(np.unpackbits(words.view(np.uint8), bitorder="little")).tolist()
            if allowed == [CLOSE]:
                break
            token_id = thought[len(taken)]
            assert token_id in allowed
            matcher.take([token_id])
            taken.append(token_id)
        assert "\ufffd" not in world.text_of(taken)
        assert world.text_of(thought[:budget]).rstrip("\ufffd") in world.text_of(taken)
        assert budget <= len(taken) <= budget + 2
        matcher.take([CLOSE])
        matcher.write_mask(words)
