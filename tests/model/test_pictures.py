"""Prompts with pictures get the tokens of transformers' generate() with its own processor."""

from __future__ import annotations

import contextlib
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec.structs import replace
from safetensors.torch import load_file, save_file

from pd_cluster import LLM, SamplingParams
from pd_cluster.engine.ranks.follower import Follower
from pd_cluster.engine.step.engine_core import EngineCore
from pd_cluster.errors import InstanceLost, ModelError, RequestError
from pd_cluster.model.loading import model_loader
from pd_cluster.model.runner.model_runner import ModelRunner
from pd_cluster.model.vision.vision_tower import Tower
from pd_cluster.types import Image, Request, Sampling
from tests.support.ahead_graphs import go_ahead_with_graphs, num_captured
from tests.support.checkpoints import ROPE
from tests.support.engines import make_core, run, shared_core, together
from tests.support.multimodal import rewrite_weights
from tests.support.pictures import (
    MODELS,
    PAD,
    PLACEHOLDER,
    SECTIONS,
    Shown,
    data_url,
    ids_of,
    make_vision,
    picture,
    prompt_logits,
    reference_answer,
    shared_folder,
    shown,
)
from tests.support.ranks import ranks

NUM_TOKENS = 16
GREEDY = Sampling(max_tokens=NUM_TOKENS, temperature=0.0)
SETTINGS: dict[str, Any] = {"block_size": 8, "num_blocks": 128, "max_num_batched_tokens": 64}


def answer_all(folder: Path, core: EngineCore, prompts: list[Shown]) -> list[list[int]]:
    """Answers all in one batch."""
    return together(core, [each.order(folder, GREEDY) for each in prompts])


def expected_of(folder: Path, prompts: list[Shown]) -> list[list[int]]:
    return [reference_answer(folder, prompt, NUM_TOKENS) for prompt in prompts]


PROMPTS = [
    shown(1, [5, 7], [picture(1)]),
    shown(1, [5, 7], [picture(2)]),  # the same words
    shown(2, [0, 3, 6], [picture(3, 40, 16), picture(4, 17, 33)]),  # other sizes
    shown(2, [0, 3, 6], [picture(4, 17, 33), picture(3, 40, 16)]),
    shown(3, [11, 0, 0, 1], [picture(5), picture(5), picture(6, 64, 64)]),
    shown(4, [20], []),
]


@pytest.mark.parametrize("name", MODELS)
def test_one_engine(name: str) -> None:
    folder = shared_folder(make_vision, name)
    expected = expected_of(folder, PROMPTS)
    assert expected[0] != expected[1], "the picture must matter"
    assert expected[2] != expected[3], "the pictures' order must matter"
    core = shared_core(folder, **SETTINGS)
    for prompt, tokens in zip(PROMPTS, expected, strict=True):
        assert answer_all(folder, core, [prompt]) == [tokens]
    assert answer_all(folder, core, PROMPTS) == expected


@pytest.mark.parametrize(("name", "num_tokens"), [("qwen2_5_vl", 3), ("qwen3_vl", 1)])
def test_chunks_cut_pictures(name: str, num_tokens: int) -> None:
    """If features are not kept between steps, each chunk recomputes the picture."""
    folder, prompts = shared_folder(make_vision, name), [PROMPTS[2], PROMPTS[4]]
    expected, nums_encoded = expected_of(folder, prompts), []
    for num_kept in (0, 1, 128):
        core = make_core(
            folder, **SETTINGS | {"max_num_batched_tokens": num_tokens, "mm_encoder_cache_tokens": num_kept}
        )
        assert answer_all(folder, core, prompts) == expected
        nums_encoded.append(tower_of(core).num_encoded)
    nothing, last, kept = nums_encoded
    assert nothing > 5
    assert last < nothing
    assert kept == 4, "two of the five pictures are equal"


@pytest.mark.parametrize("mode", ["recompute", "swap"])
def test_preempted(mode: str) -> None:
    folder = shared_folder(make_vision, "qwen3_vl")
    settings = {"preemption_mode": mode, "swap_space_gib": 0.01, "block_size": 4, "max_model_len": 80}
    core = make_core(folder, **{**SETTINGS, **settings, "num_blocks": 20})
    prompts = [shown(10 + at, [6, 4], [picture(at)]) for at in range(5)]
    assert answer_all(folder, core, prompts) == expected_of(folder, prompts)
    assert core.scheduler.num_preemptions


def test_a_cached_prefix_ends_inside_a_picture() -> None:
    """The same picture's prefix is found and the rest computed; another picture of the same size is not found."""
    folder = shared_folder(make_vision, "qwen3_vl")
    same, other = picture(1, 32, 32), picture(2, 32, 32)  # 16 tokens, the prompts' 6 to 22

    def num_cached(core: EngineCore, prompt: Shown) -> int:
        request = Request("r", prompt.order(folder, GREEDY))
        run(core, [request])
        assert request.output_token_ids == reference_answer(folder, prompt, NUM_TOKENS)
        return request.num_cached_tokens

    core = make_core(folder, **{**SETTINGS, "block_size": 4})
    asked = [([5, 2], same), ([5, 2], same), ([5, 2], other), ([5, 9], same)]
    assert [num_cached(core, shown(1, texts, [each])) for texts, each in asked] == [0, 24, 4, 24]
    core = make_core(folder, **{**SETTINGS, "block_size": 16, "mm_encoder_cache_tokens": 0})
    short = shown(1, [5, 0], [same])  # the prompt's first block ends inside the picture
    assert [num_cached(core, short) for _ in range(2)] == [0, 16]
    assert tower_of(core).num_encoded == 2


def test_features_are_not_shared_between_salts() -> None:
    """A tenant cannot learn from response times that another tenant has sent the same picture."""
    folder = shared_folder(make_vision, "qwen3_vl")
    core = make_core(folder, **SETTINGS)
    order = PROMPTS[0].order(folder, GREEDY)
    for at, (salt, num_encoded) in enumerate((("a", 1), ("a", 1), ("b", 2), ("", 3))):
        prompt = [at, *order.prompt_token_ids[1:]]  # found in no prefix cache
        run(core, [Request("r", replace(order, prompt_token_ids=prompt, cache_salt=salt))])
        assert tower_of(core).num_encoded == num_encoded


def test_heads_of_128(tmp_path: Path) -> None:
    sections = {**SECTIONS, "mrope_section": [16, 24, 24]}
    changes = {"head_dim": 128, "num_attention_heads": 2, "num_key_value_heads": 1, "rope_parameters": sections}
    tower = {"hidden_size": 128, "num_heads": 1, "out_hidden_size": 256}
    folder = make_vision(tmp_path, "qwen2_5_vl", tower, hidden_size=256, **changes)
    assert answer_all(folder, make_core(folder, **SETTINGS), PROMPTS[:3]) == expected_of(folder, PROMPTS[:3])


def test_layers_of_transformers_take_deep_features(monkeypatch: pytest.MonkeyPatch) -> None:
    """DeepStack's features reach layers that are not fused, too."""
    monkeypatch.setattr(model_loader, "can_fuse", lambda model: False)
    folder = shared_folder(make_vision, "qwen3_vl")
    core = make_core(folder, **{**SETTINGS, "max_num_batched_tokens": 7})
    assert answer_all(folder, core, PROMPTS) == expected_of(folder, PROMPTS)


@pytest.fixture
def towers(monkeypatch: pytest.MonkeyPatch) -> dict[int, Tower]:
    """Returns a dict that receives each rank's tower."""
    made: dict[int, Tower] = {}
    plain_init = Tower.__init__

    def init(tower: Tower, *arguments: Any) -> None:
        plain_init(tower, *arguments)
        made[tower.group.rank] = tower

    monkeypatch.setattr(Tower, "__init__", init)
    return made


@pytest.mark.parametrize("size", [2, pytest.param(4, marks=pytest.mark.slow)])
def test_pictures_are_spread_over_ranks(tmp_path: Path, towers: dict[int, Tower], size: int) -> None:
    """Each picture is computed once, and all ranks keep the bits of a single rank, in a small feature cache."""
    changes = {"num_attention_heads": 4, "num_key_value_heads": 4}
    folder = make_vision(tmp_path, "qwen3_vl_moe", **changes)
    settings = {**SETTINGS, "mm_encoder_cache_tokens": 30}
    with ranks(folder, 1, **settings) as core:
        alone = towers[0]
        for _ in range(2):
            assert answer_all(folder, core, PROMPTS) == expected_of(folder, PROMPTS)
    with ranks(folder, size, **settings) as core:
        for _ in range(2):
            assert answer_all(folder, core, PROMPTS) == expected_of(folder, PROMPTS)
        shares = [towers[rank].num_encoded for rank in range(size)]
        assert core.runner.encoded.num_images == sum(shares) == alone.num_encoded
    assert min(shares[:2]) > 0
    for tower in towers.values():
        assert list(tower.kept) == list(alone.kept)
        for key, features in tower.kept.items():
            assert len(features) == 3, "expected DeepStack's planes"
            assert torch.equal(features, alone.kept[key])


@pytest.mark.parametrize("victim", [0, 1])
def test_a_rank_cannot_compute_a_picture(
    towers: dict[int, Tower], monkeypatch: pytest.MonkeyPatch, victim: int
) -> None:
    """If one rank fails, no rank waits for a deadline, and none keeps a feature of the step."""
    plain_encode, plain_run = Tower.encode, Follower.run
    errors: list[Exception] = []

    def encode(tower: Tower, image: Image) -> torch.Tensor:
        if tower.group.rank == victim:
            raise RuntimeError("no memory")
        return plain_encode(tower, image)

    def follow(follower: Follower) -> None:
        with contextlib.suppress(InstanceLost, RuntimeError):
            try:
                plain_run(follower)
            except Exception as error:
                errors.append(error)
                raise

    monkeypatch.setattr(Tower, "encode", encode)
    monkeypatch.setattr(Follower, "run", follow)
    folder = shared_folder(make_vision, "qwen3_vl")
    with ranks(folder, 2, **SETTINGS) as core, pytest.raises((InstanceLost, RuntimeError)) as found:
        answer_all(folder, core, PROMPTS)
    said = [str(found.value), *map(str, errors)]
    assert said[victim] == "no memory"
    assert said[1 - victim] == f"rank {victim} of 2 could not compute a picture"
    assert not any(tower.kept for tower in towers.values())


def tower_of(core: EngineCore) -> Tower:
    runner = core.runner
    assert isinstance(runner, ModelRunner)
    assert runner.tower is not None
    return runner.tower


def test_offline(tmp_path: Path) -> None:
    """Covers prompts and conversations, with pictures as objects and as URLs."""
    folder = make_vision(tmp_path, "qwen2_5_vl")
    params = SamplingParams(temperature=0, max_tokens=NUM_TOKENS)
    with LLM(str(folder), num_blocks=128, block_size=8, enable_mm=True) as llm:
        data = {"prompt": f"ab{PLACEHOLDER}c", "multi_modal_data": {"image": picture(1)}}
        other = {**data, "multi_modal_data": {"image": [picture(2)]}}
        two = {"prompt_token_ids": PROMPTS[2].token_ids, "multi_modal_data": {"image": PROMPTS[2].pictures}}
        found = llm.generate([data, other, two], params, use_tqdm=False)
        prompts = [Shown(ids_of("ab", "c"), [picture(1)]), Shown(ids_of("ab", "c"), [picture(2)]), PROMPTS[2]]
        assert [list(each.outputs[0].token_ids) for each in found] == expected_of(folder, prompts)
        assert len(found[0].prompt_token_ids) == len(ids_of("ab", "c")) + 5  # one placeholder becomes six tokens
        text = {"type": "text", "text": "x"}
        parts = [{"type": "image_url", "image_url": {"url": data_url(picture(1))}}, text]
        parts += [{"type": "image_pil", "image_pil": picture(2)}]
        (answer,) = llm.chat([{"role": "user", "content": parts}], params, use_tqdm=False)
        assert answer.error_msg is None
        prompt = Shown(ids_of("<|user|>", "x", "<|assistant|>"), [picture(1), picture(2)])
        assert list(answer.outputs[0].token_ids) == expected_of(folder, [prompt])[0]
        forged = [{"role": "user", "content": [parts[0], {"type": "text", "text": PLACEHOLDER}]}]
        (answer,) = llm.chat(forged, params, use_tqdm=False)
        assert answer.error_msg is None
        assert answer.prompt_token_ids.count(300) == 6
        (answer,) = llm.generate({**data, "prompt": "ab"}, params, use_tqdm=False)
        assert answer.error_msg == "prompt: 0 placeholders of images for 1 images; give one for each"
        (answer,) = llm.generate(f"a{PAD}", params, use_tqdm=False)
        assert answer.error_msg == "prompt: 1 placeholders of images for 0 images; give one for each"
        with pytest.raises(RequestError, match=r"multi_modal_data.image\[0\]: str; must be a PIL.Image.Image"):
            llm.generate({**data, "multi_modal_data": {"image": "a"}}, params, use_tqdm=False)
        with pytest.raises(RequestError, match=r"multi_modal_data.audio: only images and videos are supported"):
            llm.generate({**data, "multi_modal_data": {"audio": [1]}}, params, use_tqdm=False)


def test_steps_as_graphs_and_ahead_of_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """Decode steps replay graphs; steps with pictures never do, and are launched before the host knows the tokens."""
    made = go_ahead_with_graphs(monkeypatch, 16)
    folder = shared_folder(make_vision, "qwen3_vl")
    settings = {**SETTINGS, "max_num_batched_tokens": 9, "max_num_seqs": 16, "mm_encoder_cache_tokens": 12}
    with ranks(folder, 2, **settings) as core:
        assert answer_all(folder, core, PROMPTS) == expected_of(folder, PROMPTS)
        assert core.ahead.num_ahead > 0
    assert len(made) == 2
    assert all(num_captured(made))


def test_beams_several_sequences_and_prompt_logprobs() -> None:
    folder = shared_folder(make_vision, "qwen3_vl")
    core = make_core(folder, **{**SETTINGS, "max_num_batched_tokens": 11})
    prompt, sampling = PROMPTS[2], replace(GREEDY, max_tokens=8)

    def answers_to(**changes: Any) -> tuple[Request, list[list[int]]]:
        request = Request("r", prompt.order(folder, replace(sampling, **changes)))
        return request, [[token.token_id for token in tokens] for tokens in run(core, [request])["r"].values()]

    beam = reference_answer(folder, prompt, 8, num_beams=3, length_penalty=1.0)
    assert answers_to(beam_width=3, n=1)[1] == [beam]
    greedy = reference_answer(folder, prompt, 8)
    assert answers_to(n=3)[1] == [greedy] * 3
    asked, found = answers_to(prompt_logprobs=1)
    assert found == [greedy]
    told = [each.logprob for each in asked.prompt_logprobs if each is not None]
    logprobs = prompt_logits(folder, prompt).log_softmax(-1)
    expected = logprobs[torch.arange(len(told)), torch.tensor(asked.prompt_token_ids[1:])]
    assert torch.allclose(torch.tensor(told), expected, atol=1e-3)


@pytest.mark.parametrize("name", ["qwen2_vl", "qwen2_5_vl"])
def test_a_folder_as_published(tmp_path: Path, name: str) -> None:
    """The config is flat, with M-RoPE's sections in rope_scaling and picture sizes under older names; weights have
    other prefixes.
    """
    folder = make_vision(tmp_path, name)
    expected = expected_of(folder, PROMPTS[:4])
    config = json.loads((folder / "config.json").read_text())
    text = config.pop("text_config")
    rope = text.pop("rope_parameters")
    scaling = {"type": "mrope", "mrope_section": rope["mrope_section"]}
    flat = {**text, **config, "rope_theta": rope["rope_theta"], "rope_scaling": scaling}
    (folder / "config.json").write_text(json.dumps(flat))
    file = folder / "preprocessor_config.json"
    sizes = json.loads(file.read_text())["size"]
    change_json(file, size=None, min_pixels=sizes["shortest_edge"], max_pixels=sizes["longest_edge"])
    rewrite_weights(folder, "model.visual.", "visual.")
    rewrite_weights(folder, "model.language_model.", "model.")
    assert answer_all(folder, make_core(folder, **SETTINGS), PROMPTS[:4]) == expected


def test_published_experts_are_the_other_way_round(tmp_path: Path) -> None:
    folder = make_vision(tmp_path, "qwen3_vl_moe")
    expected = expected_of(folder, PROMPTS[:2])
    file = folder / "model.safetensors"
    weights = load_file(file)
    turned = {key: each.mT.contiguous() if "experts" in key else each for key, each in weights.items()}
    save_file(turned, file, metadata={"format": "pt"})
    assert answer_all(folder, make_core(folder, **SETTINGS), PROMPTS[:2]) == expected


@pytest.mark.parametrize(
    ("place", "changes", "said"),
    [
        ("", {"patch_size": 8}, "patch_size 8: config.json has patch_size 4"),
        ("vision_config", {"deepstack_visual_indexes": [0, 1, 1]}, "3 indexes for 3 layers; the last layer"),
        ("vision_config", {"depth": 3}, r"visual\.\S+: missing among the weights of the vision tower"),
        ("vision_config", {"intermediate_size": 40}, "mismatched among the weights of the vision tower"),
        ("text_config", {"rope_parameters": {**ROPE, "mrope_section": [4, 2, 3]}}, "must add up to half"),
    ],
)
def test_a_folder_that_does_not_fit(tmp_path: Path, place: str, changes: dict[str, Any], said: str) -> None:
    folder = Path(shutil.copytree(shared_folder(make_vision, "qwen3_vl"), tmp_path / "model"))
    if place:
        file = folder / "config.json"
        changes = {place: {**json.loads(file.read_text())[place], **changes}}
    else:
        file = folder / "preprocessor_config.json"
    change_json(file, **changes)
    with pytest.raises(ModelError, match=said):
        make_core(folder, **SETTINGS)


def change_json(file: Path, **changes: Any) -> None:
    file.write_text(json.dumps({**json.loads(file.read_text()), **changes}))
