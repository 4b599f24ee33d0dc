"""Guides without a model: masks against brute force, replay, failures, and guided requests in the engine."""

from __future__ import annotations

import json
import random
import threading
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import jsonschema
import numpy as np
import pytest
import regex
from tokenizers import Tokenizer, decoders, models, pre_tokenizers

from pd_cluster.engine.draft.forced_drafter import ForcedDrafter
from pd_cluster.engine.scheduling.group_holdings import LayerGroup
from pd_cluster.engine.scheduling.scheduler import StepScheduler, StepSizes
from pd_cluster.engine.step.drafting import Drafting
from pd_cluster.engine.step.engine_core import EngineCore
from pd_cluster.errors import GuideError
from pd_cluster.kv.block_pool import BlockPool
from pd_cluster.kv.prefix_index import PrefixScope
from pd_cluster.model.sampling.grammar_masks import MAX_GUIDES, Guides, TokenMask
from pd_cluster.model.sampling.sampler import NO_TOKEN, Sampler, SamplingRow
from pd_cluster.numerics import Numerics
from pd_cluster.text.grammar import Compiler, without_anchors, words_of
from pd_cluster.types import Guide, Request, RequestSpec, Sampling
from tests.support.checkpoints import EOS_ID, VOCAB_SIZE, make_tokenizer
from tests.support.drafts import AllDrafts, liars
from tests.support.schemas import random_schema, random_value
from tests.support.toy_model import EOS, ToyRunner, generate_alone
from tests.support.toy_model import VOCAB_SIZE as TOY_VOCAB_SIZE

TOY_TEXTS = [*"abcdefghij0123456789", "ab", "abc", "bc", "ca", "12", "123", '"', "{", "}", ":", ",", "[", "]"]
SCHEMA = {"type": "object", "properties": {"a": {"enum": ["bc", 12]}}, "required": ["a"], "additionalProperties": False}


@pytest.fixture(scope="module")
def toy_tokenizer(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a tokenizer for the toy model: ids 0-3 are special, 3 is the end; some tokens have several characters."""
    names = ["<pad>", "<a>", "<b>", "<eos>", *TOY_TEXTS]
    merges = [("a", "b"), ("ab", "c"), ("b", "c"), ("c", "a"), ("1", "2"), ("12", "3")]
    tokenizer = Tokenizer(models.BPE(vocab={name: at for at, name in enumerate(names)}, merges=merges))
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False)
    tokenizer.decoder = decoders.ByteLevel()
    tokenizer.add_special_tokens(["<pad>", "<a>", "<b>", "<eos>"])
    file = tmp_path_factory.mktemp("toy") / "tokenizer.json"
    tokenizer.save(str(file))
    return file


@pytest.fixture(scope="module")
def compiler(toy_tokenizer: Path) -> Compiler:
    return Compiler(toy_tokenizer, TOY_VOCAB_SIZE, EOS)


@pytest.fixture(scope="module")
def byte_compiler(tmp_path_factory: pytest.TempPathFactory) -> Compiler:
    """Returns a compiler whose tokens are bytes, for a model with more logits than the tokenizer has tokens."""
    file = tmp_path_factory.mktemp("bytes") / "tokenizer.json"
    make_tokenizer().save(str(file))
    return Compiler(file, VOCAB_SIZE + 70, {EOS_ID})


def ids_of(mask: TokenMask) -> list[int]:
    return np.flatnonzero(np.unpackbits(mask.words.view(np.uint8), bitorder="little")).tolist()


def text_of(token_ids: list[int]) -> str:
    return "".join(TOY_TEXTS[token_id - 4] for token_id in token_ids if token_id >= 4)


def mask_of(guides: Guides, request: Request) -> TokenMask:
    guides.prepare(request)
    request.num_computed_tokens = request.num_tokens - 1
    while not guides.without_unready([(request, 1)]):
        pass
    return guides.begin([(request, 1)]).wait()[request.key][0]


def guided(guide: Guide, **fields: Any) -> Request:
    return Request("r", RequestSpec([4, 5], Sampling(guide=guide, max_tokens=50, **fields)))


# ---- masks

PATTERNS = ["(ab|ca)*12?", "[a-e]{2,4}", "a?b*c+[0-9]{1,2}", "(abc|abd|1(2|3))+", "a|ab|abc|", "([abc]{2}1)*"]


@pytest.mark.parametrize("pattern", PATTERNS)
def test_masks_are_what_brute_force_finds(compiler: Compiler, pattern: str) -> None:
    """A token is allowed if a match begins with the text and the token; the end token if the text is a match."""
    guides = Guides(lambda: compiler)
    expression = regex.compile(pattern)
    for seed in range(4):
        rng = random.Random(seed)
        request = guided(Guide("regex", pattern))
        while len(request.output_token_ids) < 12:
            text = text_of(request.output_token_ids)
            expected = [at for at in range(4, len(TOY_TEXTS) + 4) if begins(expression, text + TOY_TEXTS[at - 4])]
            expected += [3] if expression.fullmatch(text) else []
            mask = mask_of(guides, request)
            found = ids_of(mask)
            if 3 in expected or len({TOY_TEXTS[at - 4][0] for at in expected}) > 1:
                assert found == sorted(expected), text
            else:  # if only one character can follow, one way to write it is enough
                assert found, text
                assert set(found) <= set(expected), text
            assert mask.is_complete == (expected == [3])
            token_id = rng.choice(found)
            if token_id == 3:
                break
            request.output_token_ids.append(token_id)


def begins(expression: regex.Pattern[str], text: str) -> bool:
    return expression.fullmatch(text, partial=True) is not None


GUIDES = [
    Guide("json", json.dumps(SCHEMA)),
    Guide("json_object"),
    Guide("regex", "[abc]{3,9}"),
    Guide("choice", '["abc", "a", "12b"]'),
    Guide("grammar", 'root ::= "a" root "b" | "1"'),
]


@pytest.mark.parametrize("guide", GUIDES, ids=lambda guide: guide.kind)
def test_replay_is_the_same_as_going_along(compiler: Compiler, guide: Guide) -> None:
    """The masks are the same whether a state is kept, dropped, or rebuilt from an existing output."""
    guides = Guides(lambda: compiler)
    rng = random.Random(1)
    going_along = guided(guide)
    for _ in range(15):
        mask = mask_of(guides, going_along)
        replayed = guided(guide)
        replayed.output_token_ids = list(going_along.output_token_ids)
        assert ids_of(mask_of(guides, replayed)) == ids_of(mask)
        if rng.random() < 0.3:
            del guides.states[going_along]
            assert ids_of(mask_of(guides, going_along)) == ids_of(mask)
        if mask.is_complete:
            break
        going_along.output_token_ids.append(rng.choice([each for each in ids_of(mask) if each != 3]))
    going_along.output_token_ids = []  # the request is retried from its start
    assert ids_of(mask_of(guides, going_along)) == ids_of(mask_of(guides, guided(guide)))


def test_rows_that_no_token_has_are_never_allowed(byte_compiler: Compiler) -> None:
    request = Request("r", RequestSpec([1], Sampling(guide=Guide("regex", r"(.|\n)*"))))
    found = ids_of(mask_of(Guides(lambda: byte_compiler), request))
    assert EOS_ID in found
    assert not {256, 257} & set(found)  # special tokens are not text
    assert max(found) < VOCAB_SIZE


def test_values_of_a_schema_are_accepted(byte_compiler: Compiler) -> None:
    """A guide accepts every value of its schema, with any whitespace."""
    words = np.zeros(byte_compiler.num_words, dtype=np.uint32)
    encode = make_tokenizer().encode
    for seed in range(60):
        schema, rng = random_schema(seed), random.Random(seed)
        compiled = byte_compiler.compile(Guide("json", json.dumps(schema)))
        for indent in (None, None, 2):
            value = random_value(schema, rng, schema)
            jsonschema.validate(value, schema)
            text = json.dumps(value, ensure_ascii=False, indent=indent)
            matcher = compiled.copy()
            matcher.take(encode(text, add_special_tokens=False).ids)
            matcher.write_mask(words)
            assert (words & byte_compiler.end_words).any(), (seed, text)


# ---- compiling guides


@pytest.mark.parametrize(
    ("pattern", "bare"),
    [("^a$", "a"), ("a", "a"), (r"a\$", r"a\$"), (r"a\\$", r"a\\"), ("^", ""), ("a$|^b", "a$|^b"), ("^a|b$", "a|b")],
)
def test_outer_anchors_say_nothing(pattern: str, bare: str) -> None:
    assert without_anchors(pattern) == bare


@pytest.mark.parametrize(
    ("guide", "why"),
    [
        (Guide("regex", "a("), "unclosed group"),
        (Guide("regex", r"(a)\1"), "backreferences are not supported"),
        (Guide("json", '{"$ref": "http://127.0.0.1/x"}'), "127.0.0.1"),
        (Guide("json", '{"oneOf": [{"type": "string"}, {"maxLength": 2}]}'), "oneOf is supported where"),
        (Guide("choice", "5"), "not a guide of kind choice"),
        (Guide("grammar", "root ::= a"), "Rule 'a' not found"),
        (Guide("grammar", 'start: %json {"type": "string"}'), "%json is not supported"),
        (Guide("grammar", '{"grammars": []}'), "EBNF, not JSON"),
    ],
)
def test_what_cannot_be_followed_says_why(byte_compiler: Compiler, guide: Guide, why: str) -> None:
    with pytest.raises(GuideError) as caught:
        byte_compiler.compile(guide)
    assert why in str(caught.value)
    assert "\n" not in str(caught.value)
    assert len(str(caught.value)) <= 350


def test_compiled_guides_are_kept_and_bounded(compiler: Compiler) -> None:
    guides = Guides(lambda: compiler)
    first = guided(Guide("regex", "a"))
    for number in range(2 * MAX_GUIDES):
        guides.prepare(first)
        guides.prepare(guided(Guide("regex", f"a{{{number + 1}}}")))
    assert len(guides.compiled) == MAX_GUIDES
    assert ids_of(mask_of(guides, first)) == [4]  # guides in use stay cached


# ---- in the sampler


def test_masks_go_with_everything_else() -> None:
    import torch

    logits = torch.zeros(5, TOY_VOCAB_SIZE)
    logits[:, 9] = 5.0
    mask, only_end = TokenMask(words_of([3, 6, 7, 9], 2)), TokenMask(words_of([3], 2), accepts=True, is_forced=True)
    asked: list[tuple[TokenMask | None, dict[str, Any]]] = [
        (mask, {}),
        (mask, {"bad_words": ((9,),), "logit_bias": ((7, 2.0),)}),
        (mask, {"allowed_token_ids": (8, 10)}),
        (None, {}),
        (only_end, {"temperature": 2.0, "min_tokens": 9, "allowed_token_ids": (8,)}),
    ]
    rows = [
        SamplingRow(Request(f"{at}", RequestSpec([4], Sampling(**{"temperature": 0.0, **fields}))), 0, 0, each)
        for at, (each, fields) in enumerate(asked)
    ]
    found = Sampler(TOY_VOCAB_SIZE, EOS).sample(logits, rows)
    assert [each.token_id for each in found] == [9, 7, NO_TOKEN, 9, 3]


# ---- in the engine


def make_core(compiler: Compiler, num_blocks: int = 64) -> EngineCore:
    scheduler = StepScheduler([LayerGroup(BlockPool(num_blocks))], StepSizes(4, 8, 16), PrefixScope("toy", Numerics()))
    return EngineCore(ToyRunner(num_blocks, 4), scheduler, guides=Guides(lambda: compiler))


def run(core: EngineCore, requests: list[Request], drop: random.Random | None = None) -> dict[str, str]:
    """Runs the requests to their end; returns failed request -> reason."""
    failed = {}
    for request in requests:
        core.scheduler.add(request)
    for _ in range(2000):
        if not core.scheduler.requests:
            break
        result = core.step()
        failed |= {request.key: why for request, why in result.failed}
        core.scheduler.check()
        if drop is not None:
            for request in core.scheduler.requests.values():
                if drop.random() < 0.5:
                    core.guides.states.pop(request, None)
    assert not core.scheduler.requests
    assert core.scheduler.blocks.num_held == 0
    return failed


def requests_of_all_kinds(**fields: Any) -> list[Request]:
    return [
        Request(
            f"r{at}", RequestSpec([4 + at, 9, 5], Sampling(guide=guide, max_tokens=40, seed=at, **fields)), arrival_s=at
        )
        for at, guide in enumerate([*GUIDES, *GUIDES, None, None])
    ]


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_drafts_change_no_guided_token(compiler: Compiler, temperature: float) -> None:
    """Outputs are the same where drafts are forbidden, end an output, or are text that the guide forces."""
    alone = requests_of_all_kinds(temperature=temperature)
    for request in alone:
        assert run(make_core(compiler), [request]) == {}
    truths = {request.request_id: request.output_token_ids for request in alone}
    for seed in range(6):
        core, drafting = make_core(compiler, num_blocks=24), requests_of_all_kinds(temperature=temperature)
        core.drafting = liars(core.scheduler, random.Random(seed), lambda r: truths[r.request_id], TOY_VOCAB_SIZE)
        assert run(core, drafting, random.Random(seed) if seed % 2 else None) == {}
        assert [request.output_token_ids for request in drafting] == [*truths.values()]
        assert core.drafting.totals.num_accepted_tokens > 20


def test_text_that_a_guide_forces_is_drafted(compiler: Compiler) -> None:
    """One step verifies forced text; where the tokenizer would split it differently, only time is lost."""
    forced = Guide("regex", "[ab](bc12bc12bc12)[cd]")
    plain, request = guided(forced), guided(forced)
    core = make_core(compiler)
    assert run(core, [plain]) == {}
    num_steps = core.num_steps
    core = make_core(compiler)
    core.drafting = Drafting(core.scheduler, [ForcedDrafter(core.guides)], vocab_size=TOY_VOCAB_SIZE)
    core.drafting.size = AllDrafts()
    assert run(core, [request]) == {}
    assert request.output_token_ids == plain.output_token_ids
    assert core.drafting.totals.num_accepted_tokens >= 4
    assert core.num_steps <= num_steps - 4


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_neither_company_nor_preemption_nor_a_lost_state_changes_a_token(
    compiler: Compiler, temperature: float
) -> None:
    alone = requests_of_all_kinds(temperature=temperature)
    for request in alone:
        assert run(make_core(compiler), [request]) == {}
    crowd, lost = requests_of_all_kinds(temperature=temperature), requests_of_all_kinds(temperature=temperature)
    crowded = make_core(compiler, num_blocks=12)
    assert run(crowded, crowd) == {}
    assert crowded.scheduler.num_preemptions > 0
    assert run(make_core(compiler, num_blocks=12), lost, random.Random(3)) == {}
    expected = [request.output_token_ids for request in alone]
    assert [request.output_token_ids for request in crowd] == expected
    assert [request.output_token_ids for request in lost] == expected
    for request in alone[-2:]:  # unguided requests beside guided ones get the same tokens as without guides
        assert generate_alone(request.prompt_token_ids, request.sampling) == [request.output_token_ids]


@pytest.mark.parametrize(
    "fields",
    [
        {"ignore_eos": True},
        {"min_tokens": 30},
        {"allowed_token_ids": (4, 5, 6)},
        {"bad_words": ((3,),)},
        {"repetition_penalty": 2.0, "logit_bias": ((3, -100.0),)},
    ],
)
def test_a_complete_output_ends_whatever_else_was_wanted(compiler: Compiler, fields: dict[str, Any]) -> None:
    request = guided(Guide("regex", "[abc]{2}"), **fields)
    assert run(make_core(compiler), [request]) == {}
    assert request.output_token_ids[-1] == 3
    assert len(text_of(request.output_token_ids)) == 2


def test_ignore_eos_goes_on_while_the_guide_lets_it(compiler: Compiler) -> None:
    request = guided(Guide("regex", "[abc]*"), ignore_eos=True)
    assert run(make_core(compiler), [request]) == {}
    assert len(request.output_token_ids) == 50
    assert 3 not in request.output_token_ids


def test_nothing_left_to_choose_ends_one_request_only(compiler: Compiler) -> None:
    stuck = guided(Guide("regex", "[abc]{9}"), allowed_token_ids=(20,))
    broken = Request("broken", RequestSpec([4], Sampling(guide=Guide("regex", "a("))))
    other = Request("other", RequestSpec([4], Sampling(max_tokens=9)))
    failed = run(make_core(compiler), [stuck, broken, other])
    assert {*failed} == {"r#0", "broken#0"}
    assert "leave no token to choose" in failed["r#0"]
    assert failed["broken#0"].startswith("its guide cannot be followed: ")
    assert generate_alone([4], other.sampling) == [other.output_token_ids]


def test_forks_follow_their_own_outputs(compiler: Compiler) -> None:
    core = make_core(compiler)
    sampling = Sampling(guide=Guide("regex", "[abc]{3}[0-9]{2}"), max_tokens=20, n=4, seed=2)
    core.scheduler.add(Request("r", RequestSpec([4, 5], sampling)))
    outputs: dict[int, list[int]] = {}
    while core.scheduler.requests:
        for _, token in core.step().sampled:
            outputs.setdefault(token.index, []).append(token.token_id)
    assert len({tuple(each) for each in outputs.values()}) > 1
    for index, output in outputs.items():
        assert regex.fullmatch("[abc]{3}[0-9]{2}", text_of(output)), index


def test_others_do_not_wait_for_a_guide_that_compiles(compiler: Compiler) -> None:
    core = make_core(compiler)
    pending: Future[Any] = Future()
    core.guides.compiled[GUIDES[2]] = pending
    waiting, other = guided(GUIDES[2]), Request("other", RequestSpec([4, 5], Sampling(max_tokens=6, ignore_eos=True)))
    core.scheduler.add(waiting)
    core.scheduler.add(other)
    for _ in range(8):
        core.step()
    assert (len(other.output_token_ids), waiting.output_token_ids) == (6, [])
    core.guides.compiler = compiler
    pending.set_result(compiler.compile(GUIDES[2]))
    assert run(core, []) == {}
    assert regex.fullmatch("[abc]{3,9}", text_of(waiting.output_token_ids))


def test_masks_that_do_not_come_end_their_requests_and_not_the_engine(
    compiler: Compiler, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If the mask thread hangs, its requests fail, and the next step uses a new thread."""
    monkeypatch.setattr("pd_cluster.model.sampling.grammar_masks.MASKS_TIMEOUT_S", 0.1)
    write, stuck, free = compiler.write_masks, [True], threading.Event()

    def write_masks(*arguments: Any) -> Any:
        if stuck:
            stuck.clear()
            free.wait(60)
        return write(*arguments)

    monkeypatch.setattr(compiler, "write_masks", write_masks)
    guides = Guides(lambda: compiler)
    try:
        mask = mask_of(guides, guided(Guide("regex", "a")))
        assert mask.problem.endswith(": computing the masks of a step took more than 0.1 s")
        assert ids_of(mask) == []
        monkeypatch.setattr("pd_cluster.model.sampling.grammar_masks.MASKS_TIMEOUT_S", 60.0)
        assert ids_of(mask_of(guides, guided(Guide("regex", "a")))) == [4]
    finally:
        free.set()


def test_an_engine_compiles_a_guide_once(compiler: Compiler, monkeypatch: pytest.MonkeyPatch) -> None:
    """One compilation serves all sequences of all requests, also after preemptions and lost states."""
    compiled: list[Guide] = []
    compile_guide = compiler.compile

    def counted(guide: Guide) -> Any:
        compiled.append(guide)
        return compile_guide(guide)

    monkeypatch.setattr(compiler, "compile", counted)
    core = make_core(compiler, num_blocks=12)
    assert run(core, requests_of_all_kinds(temperature=1.0, n=2), random.Random(3)) == {}
    assert core.scheduler.num_preemptions > 0
    assert sorted(compiled, key=repr) == sorted(GUIDES, key=repr)
