"""Videos of GLM-4.1V and ERNIE 4.5 VL get the tokens of transformers' generate(), at the positions of training."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pd_cluster.engine.step.core import EngineCore
from pd_cluster.media.given_video import Frames
from pd_cluster.types import Request, Sampling
from tests.support.clip_kinds import (
    CLIP_KINDS,
    Filmed,
    make_filming,
    reference_answer,
    reference_pixels,
)
from tests.support.clips import clip, frames_in
from tests.support.engines import make_core, run
from tests.support.pictures import shared_folder
from tests.support.ranks import ranks

NUM_TOKENS = 12
GREEDY = Sampling(max_tokens=NUM_TOKENS, temperature=0.0)
SETTINGS: dict[str, Any] = {"block_size": 8, "num_blocks": 256, "max_num_batched_tokens": 64}
LONG, SHORT, SLOW = frames_in(clip(1, 9, 48, 40)), frames_in(clip(2, 2, 40, 17)), frames_in(clip(3, 6), fps=0.7)
WORDS, OTHERS = [5, 17, 30, 2], [80, 90, 7]
PROMPTS = [
    Filmed([WORDS, OTHERS], [LONG]),
    Filmed([WORDS, OTHERS], [LONG._replace(pictures=LONG.pictures[::-1])]),  # the same words and frames
    Filmed([[], WORDS, OTHERS], [SHORT, SLOW]),
    Filmed([[], WORDS, OTHERS], [SLOW, SHORT]),
    Filmed([WORDS, [], OTHERS], [frames_in(clip(5, 1)), SLOW]),  # a single frame, and no text between
]


def answers(folder: Path, core: EngineCore, prompts: list[Filmed]) -> list[list[int]]:
    requests = [Request(f"r{i}", each.order(folder, GREEDY), arrival_s=float(i)) for i, each in enumerate(prompts)]
    found = run(core, requests)
    return [[token.token_id for token in found[request.request_id][0]] for request in requests]


def expected_of(folder: Path, name: str, prompts: list[Filmed]) -> list[list[int]]:
    return [reference_answer(folder, name, prompt, NUM_TOKENS) for prompt in prompts]


@pytest.mark.parametrize("name", CLIP_KINDS)
def test_one_engine(name: str) -> None:
    """Also in chunks that cut every video, with prefix hits that end in one."""
    folder = shared_folder(make_filming, name)
    expected = expected_of(folder, name, PROMPTS)
    assert expected[0] != expected[1], "the frames' order does not matter"
    assert expected[2] != expected[3], "the videos' order does not matter"
    core = make_core(folder, **SETTINGS)
    assert [answers(folder, core, [prompt])[0] for prompt in PROMPTS] == expected
    assert answers(folder, core, PROMPTS) == expected
    cut = make_core(folder, **{**SETTINGS, "max_num_batched_tokens": 3, "mm_encoder_cache_tokens": 0, "block_size": 4})
    assert answers(folder, cut, PROMPTS) == expected


@pytest.mark.slow
@pytest.mark.timeout(300)
@pytest.mark.parametrize("name", CLIP_KINDS)
def test_preempted_and_beside_a_second_rank(name: str) -> None:
    folder = shared_folder(make_filming, name)
    prompts = [Filmed([WORDS, OTHERS], [frames_in(clip(at, 4, 16, 16))]) for at in range(5)]
    expected = expected_of(folder, name, prompts)
    num_blocks = 2 * -(-len(prompts[0].placed(folder).token_ids) // 4) + 2
    small = {**SETTINGS, "block_size": 4, "num_blocks": num_blocks, "max_model_len": 4 * num_blocks}
    for mode in ("recompute", "swap"):
        core = make_core(folder, **small, swap_space_gib=0.01, preemption_mode=mode)
        assert answers(folder, core, prompts) == expected
        assert core.scheduler.num_preemptions
    with ranks(folder, 2, **{**SETTINGS, "mm_encoder_cache_tokens": 20}) as both:
        assert answers(folder, both, prompts) == expected


def test_times_are_drawn_as_transformers_draws_them(tmp_path: Path) -> None:
    name = "ernie4_5_vl_moe"
    folder = make_filming(tmp_path / "drawn", name)
    plain = make_filming(tmp_path / "plain", name, draw_on_frames=False)
    large = Frames([each.resize((320, 200)) for each in LONG.pictures], [*range(0, 90_000, 10_000)], 90_000, 24.0)
    for video in (LONG, large):
        prompt = Filmed([WORDS, OTHERS], [video])
        pixels, without = (
            np.concatenate([np.frombuffer(image.pixels, np.uint8) for image in prompt.prepared(each)[0].images])
            for each in (folder, plain)
        )
        assert np.array_equal(pixels, reference_pixels(folder, name, video).reshape(-1))
        assert not np.array_equal(pixels, without)
