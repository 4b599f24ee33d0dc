"""Models that take pictures, other than Qwen's, answer as transformers' generate() does with its own processors."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest

from pd_cluster import LLM, SamplingParams
from pd_cluster.engine.step.engine_core import EngineCore
from pd_cluster.errors import ConfigError
from pd_cluster.types import Sampling
from tests.support.checkpoints import make_tokenizer
from tests.support.engines import make_core, together
from tests.support.multimodal import rewrite_weights
from tests.support.picture_kinds import FIRST, KINDS, LAST, NAMES, PICTURE, asked, make_kind, reference_answer
from tests.support.pictures import Shown, data_url, picture, shared_folder
from tests.support.ranks import ranks

NUM_TOKENS = 12
GREEDY = Sampling(max_tokens=NUM_TOKENS, temperature=0.0)
SETTINGS: dict[str, Any] = {"block_size": 4, "num_blocks": 256, "max_num_batched_tokens": 64, "max_num_seqs": 8}
QUICK = ("gemma3",)  # tests of the others are slow
EVERY = [
    pytest.param(name, marks=[] if name in QUICK else [pytest.mark.slow, pytest.mark.timeout(300)]) for name in KINDS
]
FEWEST = {"gemma3": 11}  # a picture's four tokens, and one for each other sequence


def text(seed: int, num_tokens: int) -> list[int]:
    return [random.Random(seed + at).randrange(256) for at in range(num_tokens)]


def prompts(name: str) -> list[Shown]:
    same, other = text(1, 5), text(20, 7)
    return [
        asked(name, [same, other], [picture(1)]),
        asked(name, [same, other], [picture(2)]),  # the same words
        asked(name, [[], text(3, 3), other], [picture(3, 40, 16), picture(4, 17, 33)]),
        asked(name, [[], text(3, 3), other], [picture(4, 17, 33), picture(3, 40, 16)]),
        asked(name, [other, [], same], [picture(5, 64, 64), picture(5, 64, 64)]),
        asked(name, [text(50, 20)], []),
    ]


def expected_of(folder: Path, name: str, shown: list[Shown]) -> list[list[int]]:
    return [reference_answer(folder, name, each, NUM_TOKENS) for each in shown]


def answer_all(folder: Path, core: EngineCore, shown: list[Shown]) -> list[list[int]]:
    """Answers all in one batch."""
    return together(core, [each.order(folder, GREEDY) for each in shown])


@pytest.mark.parametrize("name", EVERY)
def test_one_engine(name: str) -> None:
    """Covers single requests, batches, chunks that split pictures, cached prefixes and preemption."""
    folder = shared_folder(make_kind, name)
    shown = prompts(name)
    expected = expected_of(folder, name, shown)
    assert expected[0] != expected[1], "the picture must matter"
    assert expected[2] != expected[3], "the pictures' order must matter"
    core = make_core(folder, **SETTINGS)
    for each, tokens in zip(shown, expected, strict=True):
        assert answer_all(folder, core, [each]) == [tokens]
    assert answer_all(folder, core, shown) == expected
    fewest = FEWEST.get(name, 3)
    chunked = make_core(folder, **{**SETTINGS, "max_num_batched_tokens": fewest, "mm_encoder_cache_tokens": 0})
    assert answer_all(folder, chunked, shown) == expected
    preempting = make_core(folder, **with_few_blocks(folder, shown[0]))
    assert answer_all(folder, preempting, shown[:2] * 2) == expected[:2] * 2
    assert preempting.scheduler.num_preemptions


def with_few_blocks(folder: Path, shown: Shown) -> dict[str, Any]:
    """Returns settings with blocks for hardly more than two such prompts."""
    num_blocks = 2 * -(-len(shown.placed(folder).token_ids) // SETTINGS["block_size"]) + 1
    most = num_blocks * SETTINGS["block_size"]
    return {**SETTINGS, "num_blocks": num_blocks, "max_model_len": most, "enable_prefix_caching": False}


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", KINDS)
def test_two_ranks_and_swap(name: str) -> None:
    folder = shared_folder(make_kind, name)
    shown = prompts(name)
    expected = expected_of(folder, name, shown)
    few = {**with_few_blocks(folder, shown[0]), "preemption_mode": "swap", "swap_space_gib": 0.01}
    with ranks(folder, 2, **{**few, "mm_encoder_cache_tokens": 20}) as core:
        assert answer_all(folder, core, shown[:2] * 2) == expected[:2] * 2
        assert core.scheduler.num_preemptions
    with ranks(folder, 2, **SETTINGS) as core:
        assert answer_all(folder, core, shown) == expected


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", KINDS)
def test_published_names_of_weights(tmp_path: Path, name: str) -> None:
    folder = make_kind(tmp_path, name)
    shown = prompts(name)[:2]
    expected = expected_of(folder, name, shown)
    for old, new in names_of(name):
        rewrite_weights(folder, old, new)
    assert answer_all(folder, make_core(folder, **SETTINGS), shown) == expected


def names_of(name: str) -> list[tuple[str, str]]:
    """Returns pairs of name prefixes: transformers 5's, and those in published folders."""
    if name == "glm4v":  # published under transformers 5's names
        return []
    towers = [("vision_tower.", "vision_tower.vision_model.")] if name in ("llava", "gemma3") else []
    return [*towers, ("lm_head.", "language_model.lm_head.")]


def test_a_conversation_spells_pictures_out() -> None:
    """Gemma's pictures are surrounded by line feeds, in texts and conversations; user text never becomes a picture."""
    folder = shared_folder(make_kind, "gemma3")
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS)

    def expected(before: str, after: str, seed: int) -> list[int]:
        encode = make_tokenizer().encode
        ids = [[*encode(f"{before}\n\n").ids, FIRST], [LAST, *encode(f"\n\n{after}").ids]]
        return expected_of(folder, "gemma3", [asked("gemma3", ids, [picture(seed)])])[0]

    with LLM(str(folder), num_blocks=128, block_size=8, enable_mm=True, max_num_seqs=8) as llm:
        data = [{"prompt": f"ab{NAMES[FIRST]}c", "multi_modal_data": {"image": picture(seed)}} for seed in (1, 2)]
        found = llm.generate(data, params, use_tqdm=False)
        assert [list(each.outputs[0].token_ids) for each in found] == [expected("ab", "c", seed) for seed in (1, 2)]
        shown = {"type": "image_url", "image_url": {"url": data_url(picture(1))}}
        for words in ("x", f"{NAMES[FIRST]}{NAMES[PICTURE]}"):
            parts = [shown, {"type": "text", "text": words}]
            (answer,) = llm.chat([{"role": "user", "content": parts}], params, use_tqdm=False)
            assert answer.error_msg is None
            assert answer.prompt_token_ids.count(PICTURE) == 4
            assert list(answer.outputs[0].token_ids) == expected("<|user|>", f"{words}<|assistant|>", 1)


def test_a_picture_that_does_not_fit_a_step() -> None:
    folder = shared_folder(make_kind, "gemma3")
    with pytest.raises(ConfigError, match=r"computes a picture's 4 tokens in one step, .* give at least 11, or"):
        make_core(folder, **{**SETTINGS, "max_num_batched_tokens": 10})
