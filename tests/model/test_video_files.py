"""Prompts with videos get the tokens of transformers' generate(), at the positions of the models' training."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest

from pd_cluster import LLM, SamplingParams
from pd_cluster.engine.step.engine_core import EngineCore
from pd_cluster.errors import RequestError
from pd_cluster.media.frame_sampling import FrameSampling
from pd_cluster.media.video_files import frames_of
from pd_cluster.media.video_inputs import VideoFrames
from pd_cluster.model.runner.model_runner import ModelRunner
from pd_cluster.types import Sampling
from tests.support import clip_kinds, pictures
from tests.support.checkpoints import make_tokenizer
from tests.support.clips import (
    PLACEHOLDER,
    Filmed,
    clip,
    data_url,
    file_of,
    filmed,
    frames_in,
    make_seer,
    reference_answer,
)
from tests.support.engines import make_core, together
from tests.support.pictures import shared_folder

NUM_TOKENS = 16
GREEDY = Sampling(max_tokens=NUM_TOKENS, temperature=0.0)
SETTINGS: dict[str, Any] = {"block_size": 8, "num_blocks": 128, "max_num_batched_tokens": 64}
NAMES = ("qwen2_vl", "qwen2_5_vl", "qwen3_vl")


LONG, SHORT, SLOW = frames_in(clip(1, 9)), frames_in(clip(2, 2, 40, 17)), frames_in(clip(3, 6), fps=0.7)
PROMPTS = [
    filmed(1, [5, 7], [LONG]),
    filmed(1, [5, 7], [LONG._replace(pictures=LONG.pictures[::-1])]),  # the same words and frames
    filmed(1, [5, 7], [frames_in(clip(4, 9))]),
    filmed(2, [0, 3, 6], [SHORT, SLOW]),
    filmed(2, [0, 3, 6], [SLOW, SHORT]),
    filmed(3, [4, 0, 2], [frames_in(clip(5, 1)), SLOW]),  # a single frame, and two videos without text between
]


def answers(folder: Path, core: EngineCore, prompts: Sequence[Any]) -> list[list[int]]:
    return together(core, [each.order(folder, GREEDY) for each in prompts])


def expected_of(folder: Path, prompts: list[Filmed]) -> list[list[int]]:
    return [reference_answer(folder, prompt, NUM_TOKENS) for prompt in prompts]


@pytest.mark.parametrize("name", NAMES)
def test_one_engine(name: str) -> None:
    """Covers chunks that split every video, prefix hits that end within one, and kept features."""
    folder = shared_folder(make_seer, name)
    expected = expected_of(folder, PROMPTS)
    assert len({tuple(each) for each in expected[:3]}) == 3, "frames and their order must matter"
    assert expected[3] != expected[4], "the videos' order must matter"
    core = make_core(folder, **SETTINGS)
    assert [answers(folder, core, [prompt])[0] for prompt in PROMPTS] == expected
    assert answers(folder, core, PROMPTS) == expected
    for num_tokens, num_kept in ((3, 0), (7, 64)):
        cut = {**SETTINGS, "max_num_batched_tokens": num_tokens, "mm_encoder_cache_tokens": num_kept, "block_size": 4}
        core = make_core(folder, **cut)
        for _ in range(2):
            assert answers(folder, core, PROMPTS) == expected


def test_frames_that_are_alike_are_encoded_once() -> None:
    folder = shared_folder(make_seer, "qwen3_vl")
    still = frames_in([clip(1, 1)[0]] * 8)
    core = make_core(folder, **SETTINGS)
    prompt = filmed(1, [2, 2], [still])
    assert answers(folder, core, [prompt]) == expected_of(folder, [prompt])
    runner = core.runner
    assert isinstance(runner, ModelRunner)
    assert runner.tower is not None
    assert runner.tower.num_encoded == 1


@pytest.mark.parametrize(
    "name", ["qwen3_vl", *(pytest.param(name, marks=pytest.mark.slow) for name in NAMES if name != "qwen3_vl")]
)
def test_offline(name: str) -> None:
    """Covers videos as files, arrays, by URL and in FastDeploy's form, and a picture and a video in one prompt."""
    folder = shared_folder(make_seer, name)
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS)
    raw = clip(1, 9)
    file = file_of(raw)
    ids = make_tokenizer().encode

    def expected(video: VideoFrames, *texts: str) -> list[int]:
        before, after = (ids(text).ids for text in texts)
        return reference_answer(folder, Filmed([*before, 302, 301, 303, *after], [video]), NUM_TOKENS)

    def asked(video: Any, key: str = "multi_modal_data") -> dict[str, Any]:
        return {"prompt": f"ab{PLACEHOLDER}c", key: {"video": video}}

    settings = {"media_io_kwargs": {"video": {"num_frames": 6}}, "num_blocks": 128, "block_size": 8, "enable_mm": True}
    with LLM(str(folder), **settings) as llm:
        metadata = {"fps": 2.0, "frames_indices": [0, 4, 5], "total_num_frames": 10}
        few = frames_in([raw[0], raw[4], raw[5]])._replace(indices=[0, 4, 5], num_frames=10, fps=2.0)
        read, four = frames_of(file, FrameSampling(6)), frames_of(file, FrameSampling(6), 4)
        assert (len(read.pictures), len(four.pictures)) == (6, 4)
        found = llm.generate(
            [
                asked(file),
                asked([{"video": file, "max_frames": 4}], "multimodal_data"),
                asked((raw[0][None].repeat(1, 0), {"fps": 4.0})),
                asked(([raw[0], raw[4], raw[5]], metadata)),
            ],
            params,
            use_tqdm=False,
        )
        wanted = [read, four, frames_in(raw[:1]), few]
        assert [each.error_msg for each in found] == [None] * 4
        assert [list(each.outputs[0].token_ids) for each in found] == [expected(each, "ab", "c") for each in wanted]
        parts = [{"type": "video_url", "video_url": {"url": data_url(file)}}, {"type": "text", "text": "x"}]
        (answer,) = llm.chat([{"role": "user", "content": parts}], params, use_tqdm=False)
        assert answer.error_msg is None
        assert list(answer.outputs[0].token_ids) == expected(read, "<|user|>", "x<|assistant|>")
        both = {"prompt": f"{pictures.PLACEHOLDER}{PLACEHOLDER}"}
        both["multi_modal_data"] = {"image": pictures.picture(1), "video": file}  # type: ignore[assignment]
        (answer,) = llm.generate(both, params, use_tqdm=False)
        assert answer.error_msg is None
        assert answer.prompt_token_ids.count(300) == 6
        broken: list[tuple[Any, str]] = [
            ({**both, "prompt": PLACEHOLDER}, "prompt: 0 placeholders of images for 1 images; give one for each"),
            (f"a{PLACEHOLDER}", "prompt: 1 placeholders of videos for 0 videos; give one for each"),
            (asked(file[:200]), "multi_modal_data.video[0]: the file is broken or cut short; send it anew"),
        ]
        answers = llm.generate([each for each, _ in broken], params, use_tqdm=False)
        assert [answer.error_msg for answer in answers] == [said for _, said in broken]
        refused = {
            r"video\[0\]: str; must be bytes of a file": "a",
            r"max_frames 0: must be a whole number from 1 to 768": [{"video": file, "max_frames": 0}],
            r"metadata.frames_indices: must ascend": (raw[:2], {"frames_indices": [1, 0]}),
            r"its frames differ in size": [raw[0], raw[1][:8]],
        }
        for said, video in refused.items():
            with pytest.raises(RequestError, match=said):
                llm.generate(asked(video), params, use_tqdm=False)


# ---- GLM-4.1V and ERNIE 4.5 VL


KIND_SETTINGS: dict[str, Any] = {**SETTINGS, "num_blocks": 256}
WIDE = frames_in(clip(1, 9, 48, 40))
WORDS, OTHERS = [5, 17, 30, 2], [80, 90, 7]
KIND_PROMPTS = [
    clip_kinds.Filmed([WORDS, OTHERS], [WIDE]),
    clip_kinds.Filmed([WORDS, OTHERS], [WIDE._replace(pictures=WIDE.pictures[::-1])]),  # the same words and frames
    clip_kinds.Filmed([[], WORDS, OTHERS], [SHORT, SLOW]),
    clip_kinds.Filmed([[], WORDS, OTHERS], [SLOW, SHORT]),
    clip_kinds.Filmed([WORDS, [], OTHERS], [frames_in(clip(5, 1)), SLOW]),  # a single frame, and no text between
]


def expected_of_kind(folder: Path, name: str, prompts: list[clip_kinds.Filmed]) -> list[list[int]]:
    return [clip_kinds.reference_answer(folder, name, prompt, NUM_TOKENS) for prompt in prompts]


@pytest.mark.parametrize("name", clip_kinds.CLIP_KINDS)
def test_one_engine_of_other_kinds(name: str) -> None:
    """Covers chunks that split every video, and prefix hits that end within one."""
    folder = shared_folder(clip_kinds.make_filming, name)
    expected = expected_of_kind(folder, name, KIND_PROMPTS)
    assert expected[0] != expected[1], "the frames' order must matter"
    assert expected[2] != expected[3], "the videos' order must matter"
    core = make_core(folder, **KIND_SETTINGS)
    assert [answers(folder, core, [prompt])[0] for prompt in KIND_PROMPTS] == expected
    assert answers(folder, core, KIND_PROMPTS) == expected
    cut = make_core(
        folder, **{**KIND_SETTINGS, "max_num_batched_tokens": 3, "mm_encoder_cache_tokens": 0, "block_size": 4}
    )
    assert answers(folder, cut, KIND_PROMPTS) == expected


def test_times_are_drawn_as_transformers_draws_them(tmp_path: Path) -> None:
    name = "ernie4_5_vl_moe"
    folder = clip_kinds.make_filming(tmp_path / "drawn", name)
    plain = clip_kinds.make_filming(tmp_path / "plain", name, draw_on_frames=False)
    large = VideoFrames([each.resize((320, 200)) for each in WIDE.pictures], [*range(0, 90_000, 10_000)], 90_000, 24.0)
    for video in (WIDE, large):
        prompt = clip_kinds.Filmed([WORDS, OTHERS], [video])
        pixels, without = (
            np.concatenate([np.frombuffer(image.pixels, np.uint8) for image in prompt.prepared(each)[0].images])
            for each in (folder, plain)
        )
        assert np.array_equal(pixels, clip_kinds.reference_pixels(folder, name, video).reshape(-1))
        assert not np.array_equal(pixels, without)
