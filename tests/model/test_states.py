"""Hybrids with transformers' modules: sequences computed in steps have the logits of a whole pass."""

from __future__ import annotations

import contextlib
import importlib
import random
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM
from transformers.integrations.hub_kernels import use_kernel_func_from_hub_with_fallback

from pd_cluster.checkpoints.checkpoint import Checkpoint
from pd_cluster.errors import ModelError
from pd_cluster.kv.kv_pool import KVPool
from pd_cluster.model.inputs.state_rows import Segment, segments_of
from pd_cluster.model.language_model.cache_declaration import LayerCache, caches_of, layouts_of
from pd_cluster.model.layers.states import module_states
from pd_cluster.model.layers.states.module_states import ModulesState
from pd_cluster.model.layers.states.state_planes import StateParts
from pd_cluster.model.loading.load_proof import prove
from pd_cluster.model.loading.model_loader import plan_of
from tests.support import fake_fla
from tests.support.checkpoints import VOCAB_SIZE, make_checkpoint, reference_model
from tests.support.hybrids import HYBRIDS
from tests.support.state_world import BLOCK_SIZE, StateWorld, load_modules, row_errors
from tests.support.usual import slow_but

Checkpoints = Callable[..., Path]
LOOSE = 5e-4  # chunks and single tokens are summed differently, in transformers, too
TIGHT = 2e-5
BY_CONVOLUTION = ("lfm2", "lfm2_moe")
KEPT = 5 * BLOCK_SIZE
# Tokens of two sequences per step: around the length of a scan, prompts beside single tokens, single tokens only.
STEPS = ((1, 63), (64, 65), (65, 1), (1, 1), (1, 64), (1, 1))


def ids_of(num_seqs: int, num_tokens: int) -> list[list[int]]:
    rng = random.Random(num_tokens)
    return [[rng.randrange(VOCAB_SIZE) for _ in range(num_tokens)] for _ in range(num_seqs)]


def random_steps(rest: Sequence[int]) -> Iterator[tuple[int, int]]:
    """Yields the rest of two sequences in random pieces."""
    rng, (first, second) = random.Random(sum(rest)), rest
    while first > 1 and second > 1:
        step = rng.randint(1, min(40, first - 1)), rng.randint(1, min(40, second - 1))
        first, second = first - step[0], second - step[1]
        yield step


@pytest.mark.parametrize("architecture", slow_but(("olmo_hybrid", "nemotron_h", "lfm2"), HYBRIDS))
def test_chunks_and_single_tokens_beside_each_other(checkpoint: Checkpoints, architecture: str) -> None:
    """A sequence also resumes from a state kept within a chunk. The reference pass uses no cache."""
    folder, ids = checkpoint(architecture), ids_of(2, 300)
    with torch.inference_mode():
        expected = reference_model(folder)(input_ids=torch.tensor(ids), use_cache=False).logits
    limit = TIGHT if architecture in BY_CONVOLUTION else LOOSE
    steps = [*STEPS, *random_steps([300 - sum(step[i] for step in STEPS) for i in range(2)])]
    with StateWorld(load_modules(folder)) as world:
        world.states.memory.planes(0)[0][:] = float("nan")  # blocks are cleared when a sequence takes them
        requests = [world.request(own, state) for state, own in enumerate(ids, start=2)]
        rows: list[list[torch.Tensor]] = [[], []]
        for at, step in enumerate(steps):
            keeps = [(0, KEPT - 65, 6)] if at == 2 else []
            for own, part in zip(rows, world.step(requests, step, keeps), strict=True):
                own.append(part)
        for own, whole in zip(rows, expected, strict=True):
            found = torch.cat(own)
            assert row_errors(found, whole[: len(found)]).max() < limit
        resumed = world.request(ids[0], 6, requests[0], KEPT)
        (found,) = world.step([resumed], [300 - KEPT])
    assert row_errors(found, expected[0, KEPT:]).max() < limit


@pytest.mark.parametrize("architecture", ["qwen3_next", "kimi_linear", "nemotron_h", "lfm2"])
def test_a_state_is_kept_to_the_bit(checkpoint: Checkpoints, architecture: str) -> None:
    """In the first layer, whose inputs are embeddings, a state kept within a chunk is that of a prompt ending there."""
    (ids,) = ids_of(1, 130)
    with StateWorld(load_modules(checkpoint(architecture))) as world:
        whole, cut = world.request(ids, 1), world.request(ids, 2)
        world.step([whole], [130], [(0, 1, 3), (0, 37, 4), (0, 130, 5)])
        for num_tokens, kept in ((1, 3), (36, 4), (93, 5)):
            world.step([cut], [num_tokens])
            for plane in world.states.memory.planes(0):
                assert plane[2].any()
                assert torch.equal(plane[kept], plane[2])


def test_rows_of_single_tokens_have_the_bits_of_each_alone(checkpoint: Checkpoints) -> None:
    ids = ids_of(3, 40)
    with StateWorld(load_modules(checkpoint("qwen3_next"))) as world:
        together, alone = ([world.request(own, first + i) for i, own in enumerate(ids)] for first in (0, 3))
        for request in (*together, *alone):
            world.step([request], [39])
        found = torch.cat(world.step(together, [1, 1, 1]))
        assert torch.equal(found, torch.cat([world.step([request], [1])[0] for request in alone]))


# ---- faults that the check at load detects


def of_another(load: Callable[..., ModulesState]) -> Callable[..., ModulesState]:
    def wrong(planes: Sequence[torch.Tensor], blocks: torch.Tensor, *rest: Any) -> ModulesState:
        return load(planes, blocks.where(blocks != 2, 1), *rest)

    return wrong


def one_column_too_few(load: Callable[..., ModulesState]) -> Callable[..., ModulesState]:
    def wrong(planes: Sequence[torch.Tensor], blocks: torch.Tensor, parts: StateParts, dtype: Any) -> ModulesState:
        state = load(planes, blocks, parts, dtype)
        state.convolved[..., 1] = 0
        return state

    return wrong


def one_part(load: Callable[..., ModulesState]) -> Callable[..., ModulesState]:
    """A fault: reads a convolution's channels in the pool's order, as if they were those of all heads."""

    def wrong(planes: Sequence[torch.Tensor], blocks: torch.Tensor, parts: StateParts, dtype: Any) -> ModulesState:
        state = load(planes, blocks, parts, dtype)
        mixed = state.convolved[..., 1:].transpose(1, 2).reshape(len(blocks), -1, parts.num_kept)
        return state._replace(convolved=torch.nn.functional.pad(mixed, (1, 0)))

    return wrong


def never_written(store: Callable[..., None]) -> Callable[..., None]:
    return lambda *_: None


def never_bounded(bound: Callable[..., Any]) -> Callable[..., Any]:
    return lambda *_: contextlib.nullcontext()


def never_kept(cut: Callable[..., Iterator[Segment]]) -> Callable[..., Iterator[Segment]]:
    return lambda *given: (segment._replace(keep=-1) for segment in cut(*given))


DIFFER = "with paged attention the logits differ"
MUTATIONS: dict[str, tuple[str, str, Callable[..., Any], str]] = {
    "of another": ("qwen3_next", "model.layers.states.module_states.load", of_another, DIFFER),
    "a column short": ("lfm2", "model.layers.states.module_states.load", one_column_too_few, DIFFER),
    "one part": ("granitemoehybrid", "model.layers.states.module_states.load", one_part, DIFFER),
    "not written": ("kimi_linear", "model.layers.states.module_states.store", never_written, DIFFER),
    "not bounded": ("nemotron_h", "model.layers.states.module_states._no_shorter_steps", never_bounded, DIFFER),
    "not kept": ("bamba", "model.loading.load_proof.segments_of", never_kept, "from a kept state the logits differ"),
}


@pytest.mark.parametrize(
    ("architecture", "name", "theirs"),
    [
        ("qwen3_next", "torch_chunk_gated_delta_rule", "chunk_gated_delta_rule"),
        ("kimi_linear", "chunk_kimi_delta_attention", "chunk_kda"),
    ],
)
def test_libraries_that_transformers_prefers_are_not_called(
    checkpoint: Checkpoints, architecture: str, name: str, theirs: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An installed fla would be called on CPUs, too, where it fails, as the fake does here."""
    folder, ids = checkpoint(architecture), torch.tensor(ids_of(1, 70))
    module = importlib.import_module(f"transformers.models.{architecture}.modeling_{architecture}")
    reference = reference_model(folder)
    with fake_fla.installed(), torch.inference_mode():
        expected = reference(ids, use_cache=False).logits
        preferred = use_kernel_func_from_hub_with_fallback(theirs, "fla")(getattr(module, name))
        monkeypatch.setattr(module, name, preferred)
        with pytest.raises(AssertionError):
            reference(ids, use_cache=False)
        load_modules(folder)
        assert getattr(module, name) is not preferred
        assert torch.equal(reference(ids, use_cache=False).logits, expected)
    assert not fake_fla.calls


@pytest.mark.parametrize("name", MUTATIONS)
def test_a_wrong_state_is_noticed(checkpoint: Checkpoints, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    architecture, place, wrong, reason = MUTATIONS[name]
    model = load_modules(checkpoint(architecture))
    pools = [KVPool(layout, 2) for layout in layouts_of(model.caches, BLOCK_SIZE, "float32")]
    prove(model, pools, "float32")
    right = {"load": module_states.load, "store": module_states.store, "segments_of": segments_of}
    monkeypatch.setattr(f"pd_cluster.{place}", wrong(right.get(place.rpartition(".")[2])))
    with pytest.raises(ModelError, match=reason):
        prove(model, pools, "float32")


def test_a_layer_that_does_not_write_its_state(checkpoint: Checkpoints) -> None:
    model = load_modules(checkpoint("falcon_h1"))
    pools = [KVPool(layout, 2) for layout in layouts_of(model.caches, BLOCK_SIZE, "float32")]
    model.model.model.layers[2].mamba.forward = lambda hidden_states, **_: hidden_states  # type: ignore[method-assign]
    with pytest.raises(
        ModelError, match=r"layers \[0, 1, 3\] wrote to the state pool, but each of 4 must do so once, in order"
    ):
        prove(model, pools, "float32")


# ---- the caches that layers are found to keep


def declared(model_type: str, **fields: Any) -> tuple[LayerCache, ...]:
    with torch.device("meta"):
        return caches_of(AutoModelForCausalLM.from_config(AutoConfig.for_model(model_type, **fields)))


def test_a_sequence_of_qwen3_next() -> None:
    """Of 48 layers, every fourth has keys and values: two heads of 256 two-byte numbers; the others have states."""
    caches = declared("qwen3_next", num_hidden_layers=4, mlp_only_layers=[0, 1, 2, 3], vocab_size=16)
    keys, states = layouts_of(caches * 12, 64, "bfloat16")
    assert (keys.rule, keys.layers[:2], keys.token_nbytes) == ("all", (3, 7), 24_576)
    assert (states.rule, states.block_size, states.dtype, states.num_layers) == ("state", 1, "float32", 36)
    assert states.block_nbytes == 36 * 4 * (32 * 128 * 128 + 3 * 8192)
    assert [(plane.name, states.num_heads_of(plane)) for plane in states.planes] == [
        ("state", 32),
        ("conv_q", 16),
        ("conv_k", 16),
        ("conv_v", 32),
    ]


def test_windows_make_a_group() -> None:
    sizes: dict[str, Any] = {"hidden_size": 64, "intermediate_size": 64, "num_hidden_layers": 6, "vocab_size": 16}
    caches = declared("gemma3_text", **sizes, sliding_window=32)
    assert [each.window for each in caches] == [32] * 5 + [0]
    (whole,) = layouts_of(caches, 16, "float32")
    assert (whole.num_layers, whole.layers, whole.rule) == (6, (), "all")
    rest, near = layouts_of(caches, 16, "float32", split_windows=True)
    assert (rest.layers, rest.rule, rest.window) == ((5,), "all", 0)
    assert (near.layers, near.rule, near.window) == ((0, 1, 2, 3, 4), "window", 32)
    assert len(layouts_of(caches[:5], 16, "float32", split_windows=True)) == 1  # windows only: no second group
    twice = (*caches, *(LayerCache(each.num_heads, each.planes, 48) for each in caches[:2]))
    assert [layout.layers for layout in layouts_of(twice, 16, "float32", split_windows=True)] == [
        (5, 6, 7),
        (0, 1, 2, 3, 4),
    ]


# ---- refusals


@pytest.mark.parametrize("architecture", ["bamba", "falcon_h1", "granitemoehybrid"])
def test_time_steps_that_single_tokens_would_not_bound(checkpoint: Checkpoints, architecture: str) -> None:
    folder = checkpoint(architecture, time_step_limit=(0.001, 0.1))
    with pytest.raises(ModelError, match=r"has time_step_limit \[0\.001, 0\.1\], which .*: remove the field"):
        load_modules(folder)


def test_lightning_attention_and_ranks(checkpoint: Checkpoints, tmp_path: Path) -> None:
    kinds = ["linear_attention", "full_attention", "linear_attention"]
    with pytest.raises(ModelError, match=r"layer_types .*: only full, sliding and indexed attention and the states"):
        load_modules(make_checkpoint(tmp_path, "minimax", layer_types=kinds))
    with pytest.raises(ModelError, match="--tensor-parallel-size 2: olmo_hybrid cannot be split: the states"):
        plan_of(Checkpoint.open(str(checkpoint("olmo_hybrid"))), 2)
