"""EAGLE-3 heads match their definition, and the states that they read match transformers' layers."""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from safetensors.torch import load_file, save_file

from pd_cluster.devices.device import CPU
from pd_cluster.errors import ConfigError
from pd_cluster.kv.kv_pool import KVPool
from pd_cluster.model.draft.draft_head import DraftHead
from pd_cluster.model.draft.eagle3_head import check_eagle3, load_eagle3
from pd_cluster.model.inputs.forward_batch import AuxiliaryStates, PairRows, batch_of
from pd_cluster.model.inputs.step_input import StepInput
from pd_cluster.model.language_model.cache_declaration import layout_of
from pd_cluster.model.language_model.fused_lm import FusedCausalLM
from pd_cluster.model.parallel.rank_group import SingleRank
from pd_cluster.model.planning.load_plan import LoadPlan
from pd_cluster.model.runner.loaded_parts import load_parts
from pd_cluster.native.packed_products import multiplies_bf16
from pd_cluster.settings.engine_config import EngineConfig
from pd_cluster.settings.speculation import Speculation
from tests.support.checkpoints import reference_model
from tests.support.eagle3_eager import EagerEagle3
from tests.support.eagle3_heads import make_eagle3_head

Checkpoints = Callable[..., Path]
pytestmark = pytest.mark.usefixtures("one_thread", "freed")
SEVEN: dict[str, Any] = {"num_hidden_layers": 7}  # the fewest with the usual layers 2, 3 and 4
WIDE: dict[str, Any] = {
    "hidden_size": 1280,
    "intermediate_size": 1536,
    "num_attention_heads": 10,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "num_hidden_layers": 3,
    "initializer_range": 0.03,
}
IDS = "eagle_aux_hidden_state_layer_ids"
LENGTHS = (37, 2, 70, 17)
BLOCK_SIZE = 16
LINEAR = {"rope_type": "linear", "rope_theta": 1e4, "factor": 4.0}
HEADS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {  # name -> (model, its changes, the head's options)
    "plain": ("llama", SEVEN, {"has_output_layer": False}),
    "ids": ("llama", SEVEN, {"draft_vocab_size": 100, "prefix": "model.", IDS: [5, 0, 3]}),
    "speculators": ("qwen3", SEVEN, {"is_speculators": True, "draft_vocab_size": 77, "norm_before_residual": True}),
    "qwen3, norms": (
        *("qwen3", SEVEN),
        {
            "layer": {"model_type": "qwen3"},
            "norm_before_fc": True,
            "norm_output": True,
            "embedding": "copy",
            IDS: [1, 6],
        },
    ),
    "speculators, norms": (
        *("llama", SEVEN),
        {"is_speculators": True, "fc_norm": True, "norm_output": True, "norm_before_residual": True, IDS: [0, 2, 4, 6]},
    ),
    "narrower": (
        *("llama", SEVEN),
        {"layer": {"hidden_size": 48, "num_attention_heads": 6, "intermediate_size": 80}, "embedding": "own"},
    ),
    "no fc": ("gemma2", {}, {"use_aux_hidden_state": False, "embedding": "own"}),
    "window": (
        *("mistral", SEVEN),
        {"layer": {"layer_types": ["sliding_attention"], "sliding_window": 9, "rope_parameters": LINEAR}},
    ),
    "wide": ("llama", WIDE, {"draft_vocab_size": 200, "norm_before_residual": True, IDS: [0, 1, 2]}),
}


def plan_of(target: Path, head: Path, **settings: Any) -> LoadPlan:
    speculation = Speculation(methods=("eagle3",), model=str(head))
    given = {"device": "cpu", "dtype": "float32", "block_size": BLOCK_SIZE, **settings}
    return LoadPlan.of(EngineConfig(model=str(target), speculation=speculation, **given), SingleRank(), CPU)


def load(target: Path, head: Path, **settings: Any) -> tuple[FusedCausalLM, DraftHead]:
    plan = plan_of(target, head, **settings)
    model = load_parts(plan).model
    assert isinstance(model, FusedCausalLM)
    return model, load_eagle3(plan, model)


@dataclass
class Sequence3:
    """A sequence in the pool: its tokens, blocks, and the projected states of computed tokens."""

    token_ids: list[int]
    blocks: list[int]
    num_pairs: int = 1  # pairs in the head's layer, counting a nonexistent one for token 0
    states: list[torch.Tensor] = field(default_factory=list)
    logits: list[torch.Tensor] = field(default_factory=list)  # of its pairs in order
    outputs: list[torch.Tensor] = field(default_factory=list)  # of its pairs in order: inputs of the next draft

    @property
    def is_done(self) -> bool:
        return len(self.states) == len(self.token_ids) == self.num_pairs


class World:
    """Model and head over one pool, whose last layer is the head's."""

    def __init__(self, model: FusedCausalLM, head: DraftHead, dtype: str = "float32", seed: int = 1) -> None:
        self.model, self.head, self.rng = model, head, random.Random(seed)
        layout = layout_of((*model.caches, *head.model.caches), BLOCK_SIZE, dtype)
        assert layout.num_layers == len(model.layers) + 1
        self.pool = KVPool(layout, 32, CPU)
        self.pool.data.zero_()
        free = self.rng.sample(range(32), 32)
        self.sequences = [
            Sequence3(
                [self.rng.randrange(250) for _ in range(n)], [free.pop() for _ in range(-(-(n + 8) // BLOCK_SIZE))]
            )
            for n in LENGTHS
        ]

    def step(self, chunks: Sequence[tuple[Sequence3, int, list[int]]], num_hidden: bool = False) -> StepInput:
        """Makes a step of chunks: (sequence, first index, tokens from there on)."""
        rows, ids, blocks = [], [], []
        for sequence, start, token_ids in chunks:
            number, num_blocks = len(token_ids), -(-(start + len(token_ids)) // BLOCK_SIZE)
            rows.append((number, start, num_blocks, number, 512, number if num_hidden else 0))
            ids += token_ids
            blocks += sequence.blocks[:num_blocks]
        return StepInput(*(np.array(each, dtype=np.int64) for each in (rows, ids, blocks)))

    @torch.inference_mode()
    def compute(self, chunks: Sequence[tuple[Sequence3, int, list[int]]]) -> None:
        """Computes tokens with the model, and keeps their states."""
        batch = batch_of(self.step(chunks), self.pool)
        batch.taps = AuxiliaryStates(self.head.taps)
        self.model(batch)
        states = self.head.project(torch.cat(batch.taps.states, dim=-1))
        for (sequence, _, token_ids), own in zip(chunks, states.split([len(each[2]) for each in chunks]), strict=True):
            sequence.states += own
            assert len(token_ids) == len(own)

    @torch.inference_mode()
    def pair(self, chunks: Sequence[tuple[Sequence3, int, list[int]]]) -> None:
        """Computes pairs of tokens with the head, and keeps their logits and outputs."""
        step = self.step(chunks, True)
        if self.rng.random() < 0.5:  # M-RoPE's positions, which are equal for text
            indices = np.concatenate([np.arange(start, start + len(ids)) for _, start, ids in chunks])
            step = replace(step, rope_positions=np.tile(indices, (3, 1)))
        batch = batch_of(step, self.pool)
        states = [
            state for sequence, start, ids in chunks for state in sequence.states[start - 1 : start - 1 + len(ids)]
        ]
        batch.pairs = PairRows(torch.stack(states))
        logits = self.head.model(batch)
        assert torch.equal(batch.pairs.states, torch.stack(states))  # the caller's states are used
        assert batch.hidden is not None
        assert batch.hidden.states is not None
        assert batch.layers_written == [len(self.model.layers)]
        sizes = [len(each[2]) for each in chunks]
        parts = zip(chunks, logits.split(sizes), batch.hidden.states.split(sizes), strict=True)
        for (sequence, _, token_ids), own, output in parts:
            sequence.logits += own
            sequence.outputs += output
            sequence.num_pairs += len(token_ids)

    def prompts(self) -> None:
        """Computes all tokens and their pairs in random chunks."""
        while late := [each for each in self.sequences if not each.is_done]:
            some = self.rng.sample(late, self.rng.randint(1, len(late)))
            if chunks := [*self._chunks((each, len(each.states), len(each.token_ids)) for each in some)]:
                self.compute(chunks)
            if chunks := [
                *self._chunks((each, each.num_pairs, min(len(each.states) + 1, len(each.token_ids))) for each in some)
            ]:
                self.pair(chunks)

    def _chunks(self, parts: Iterator[tuple[Sequence3, int, int]]) -> Iterator[tuple[Sequence3, int, list[int]]]:
        for sequence, start, stop in parts:
            if start < stop:
                yield sequence, start, sequence.token_ids[start : start + self.rng.randint(1, min(30, stop - start))]

    def draft(self, depth: int) -> list[list[int]]:
        """Drafts greedily after a token of each sequence that the model has not computed yet."""
        drafts: list[list[int]] = [[] for _ in self.sequences]
        for _ in range(depth):
            self.pair([(each, len(each.token_ids) - 1, each.token_ids[-1:]) for each in self.sequences])
            for each, own in zip(self.sequences, drafts, strict=True):
                best = each.logits[-1].argmax()
                own.append(int(best if self.head.token_ids is None else self.head.token_ids[best]))
                each.token_ids.append(own[-1])
                each.states.append(each.outputs[-1])
        return drafts


def assert_near(found: torch.Tensor, expected: torch.Tensor, bound: float = 1e-4) -> None:
    assert found.shape == expected.shape
    error = (found.double() - expected.double()).abs().max() / expected.abs().max().clamp(min=1.0)
    assert error < bound, f"differs by {error:.1e}"


def inputs_of_layers(folder: Path, token_ids: list[int]) -> list[torch.Tensor]:
    """Returns each layer's input in transformers, then the final states, each [num_tokens, hidden_size]."""
    with torch.inference_mode():
        output = reference_model(folder)(torch.tensor([token_ids]), output_hidden_states=True)
    return [each[0] for each in output.hidden_states]


@pytest.mark.parametrize("name", HEADS)
def test_pairs_and_chains(checkpoint: Checkpoints, tmp_path: Path, name: str) -> None:
    architecture, changes, options = HEADS[name]
    target = checkpoint(architecture, **changes)
    folder = make_eagle3_head(tmp_path, target, **options)
    model, head = load(target, folder)
    assert (head.model.ends.embed is model.ends.embed) == (options.get("embedding") != "own")
    eager = EagerEagle3(folder, target)
    assert (None if head.token_ids is None else head.token_ids.tolist()) == eager.token_ids
    world = World(model, head)
    world.prompts()
    expected = []
    for each in world.sequences:
        tapped = inputs_of_layers(target, each.token_ids)
        states = eager.project([tapped[layer] for layer in head.taps or (-1,)])
        assert_near(torch.stack(each.states), states)
        logits, outputs = eager(each.token_ids, states)
        assert_near(torch.stack(each.logits), logits)
        assert_near(torch.stack(each.outputs), outputs)
        each.token_ids.append(world.rng.randrange(250))
        expected.append(eager.drafts(each.token_ids, states, 4))
    drafts = world.draft(4)
    for each, own, (wanted, pairs) in zip(world.sequences, drafts, expected, strict=True):
        assert own == wanted
        assert_near(torch.stack(each.logits[-4:]), torch.stack([logits for logits, _ in pairs]))
        assert_near(torch.stack(each.outputs[-4:]), torch.stack([output for _, output in pairs]))


def test_pairs_of_prompts_need_no_rows(checkpoint: Checkpoints, tmp_path: Path) -> None:
    """Keys and values are written even if no row is read."""
    target = checkpoint("llama", **SEVEN)
    model, head = load(target, make_eagle3_head(tmp_path, target))
    told, quiet = World(model, head), World(model, head)
    told.prompts()
    for each, others in zip(quiet.sequences, told.sequences, strict=True):
        step = quiet.step([(each, 1, each.token_ids[1:])])
        step.rows[:, 3] = 0
        batch = batch_of(step, quiet.pool)
        batch.pairs = PairRows(torch.stack(others.states[:-1]))
        with torch.inference_mode():
            assert head.model(batch).shape == (0, 320)
        each.states = others.states
    for world in (told, quiet):
        for each in world.sequences:
            each.token_ids.append(7)
        world.draft(2)
    for each, others in zip(quiet.sequences, told.sequences, strict=True):
        assert_near(torch.stack(each.logits), torch.stack(others.logits[-2:]))


def test_identity_follows_from_the_files(checkpoint: Checkpoints, tmp_path: Path) -> None:
    target = checkpoint("llama", **SEVEN)
    folders = [make_eagle3_head(tmp_path / f"{at}", target, seed=seed) for at, seed in enumerate((0, 0, 1, 0))]
    changed_config(folders[3], norm_output=True)
    first, same, other, further = (check_eagle3(plan_of(target, folder)).identity for folder in folders)
    assert first == same
    assert len({first, other, further}) == 3


@pytest.mark.skipif(not multiplies_bf16(), reason="this processor does not multiply bfloat16")
def test_matrices_are_narrow_beside_a_narrow_model(checkpoint: Checkpoints, tmp_path: Path) -> None:
    target = checkpoint("llama", **SEVEN)
    folder = make_eagle3_head(tmp_path, target, dtype=torch.bfloat16, draft_vocab_size=64)
    model, head = load(target, folder, dtype="bfloat16")
    world = World(model, head, "bfloat16")
    world.prompts()
    eager = EagerEagle3(folder, target)
    each = world.sequences[2]
    logits, _ = eager(each.token_ids, torch.stack(each.states))
    assert_near(torch.stack(each.logits), logits, 0.03)
    assert head.model.bf16_way == model.bf16_way != ""


@pytest.mark.parametrize(
    ("architecture", "settings"), [("llama", {}), ("gemma2", {}), ("llama", {"quantization": "int8"})], ids=str
)
@pytest.mark.parametrize("layers", [(2, 3, 4), (0, 1, 6), ()], ids=str)
def test_taps_are_the_inputs_of_layers(
    checkpoint: Checkpoints, tmp_path: Path, architecture: str, settings: dict[str, Any], layers: tuple[int, ...]
) -> None:
    """Holds for chunks and rows, with the bits of steps without taps, for layers in one call and one by one.

    int8 layers are computed in one call on every processor, but are too coarse for the comparison.
    """
    target = checkpoint(architecture, **{**SEVEN, "layer_types": None})
    model, head = load(target, make_eagle3_head(tmp_path, target, embedding="own"), **settings)
    decoder = model.decoder
    assert decoder is not None or not settings
    worlds = [World(model, head) for _ in range(3)]
    sequences = worlds[0].sequences
    expected = [inputs_of_layers(target, each.token_ids) for each in sequences]

    @torch.inference_mode()
    def compute(world: World, step: StepInput, taps: AuxiliaryStates | None) -> torch.Tensor:
        batch = batch_of(step, world.pool)
        batch.taps = taps
        return model(batch)

    for spans, wants_all in (
        ([(0, 20), (0, 1), (0, 64), (0, 16)], False),  # a prompt's chunks, with logits for last rows only
        ([(20, 21), (1, 2), (64, 65), (16, 17)], True),  # one token each
        ([(21, 37), (2, 2), (65, 70), (17, 17)], True),  # several
    ):
        given = [
            (each, start, each.token_ids[start:stop]) for each, (start, stop) in zip(sequences, spans, strict=True)
        ]
        step = worlds[0].step([chunk for chunk in given if chunk[2]])
        step.rows[:, 3] = step.rows[:, 0] if wants_all else 1
        taps, apart = AuxiliaryStates(layers), AuxiliaryStates(layers)
        logits = [compute(worlds[0], step, taps), compute(worlds[1], step, None)]
        model.decoder = None
        logits.append(compute(worlds[2], step, apart))
        model.decoder = decoder
        for world, others in zip(worlds[1:], logits[1:], strict=True):
            assert torch.equal(logits[0], others)
            assert torch.equal(worlds[0].pool.data, world.pool.data)
        for states, others, layer in zip(taps.states, apart.states, layers or (-1,), strict=True):
            assert torch.equal(states, others)
            if not settings:
                own, before = (
                    torch.cat([each[at][slice(*span)] for each, span in zip(expected, spans, strict=True)])
                    for at in (layer, layer - 1)
                )
                assert_near(states, own)
                with pytest.raises(AssertionError, match="differs by"):
                    assert_near(states, before)


def changed_config(folder: Path, **changes: Any) -> None:
    file = folder / "config.json"
    config = json.loads(file.read_text())
    file.write_text(json.dumps({**config, **changes}))


def changed_weights(folder: Path, **changes: torch.Tensor | None) -> None:
    file = folder / "model.safetensors"
    weights = {**load_file(file), **{name.replace("__", "."): value for name, value in changes.items()}}
    save_file({name: value for name, value in weights.items() if value is not None}, file)


CONFIG_FAULTS: list[tuple[dict[str, Any], str]] = [
    ({"architectures": ["EagleLlamaForCausalLM"]}, "architectures ['EagleLlamaForCausalLM']: not a known EAGLE-3 head"),
    ({"speculators_model_type": "dflash"}, "'dflash': only eagle3 is supported; give another head"),
    ({"speculators_model_type": "eagle3"}, "transformer_layer_config None: must be an object"),
    ({"parallel_drafting": True}, "parallel_drafting True: heads that guess several tokens at once are not supported"),
    ({"quantization_config": {"quant_method": "fp8"}}, "quantized heads are not supported"),
    ({"model_type": "deepseek_v3"}, "model_type 'deepseek_v3': only layers of llama and qwen3 are supported"),
    ({"num_hidden_layers": 2}, "num_hidden_layers 2: a head has 1 layer, not 2"),
    ({"attention_bias": True}, "attention_bias True: biases in a head's layer are not supported"),
    ({"hidden_act": "relu"}, "hidden_act 'relu': only silu and gelu_pytorch_tanh are supported"),
    (
        {"rope_parameters": {"rope_type": "dynamic", "factor": 2.0}},
        "only the rotations default, linear, llama3, yarn are supported",
    ),
    ({"rope_parameters": {"rope_type": "llama3", "factor": 2.0}}, "'rope_type': 'llama3', 'factor': 2.0"),
    ({"logit_scale": 0.5}, "logit_scale 0.5: only 1 is supported"),
    ({"fc_norm": True, "norm_before_fc": True}, "fc_norm True: norm_before_fc is true as well"),
    ({"num_attention_heads": 3}, "num_attention_heads 3: must be a multiple of num_key_value_heads 2"),
    ({"eagle_config": {"use_last_layernorm": False}}, "use_last_layernorm False: only True is supported"),
    ({"hidden_size": "64"}, "hidden_size '64': must be a whole number of at least 1"),
    ({"norm_output": 1}, "norm_output 1: must be true or false"),
    ({"target_hidden_size": 128}, "fc.weight: shape [64, 192], and by "),
    ({"draft_vocab_size": 60}, "d2t: shape [50], and by "),
    ({"eagle_config": {IDS: [1, 1]}}, f"{IDS} [1, 1]: must be different numbers of layers"),
    (
        {"eagle_config": {IDS: [1, 2, 7]}},
        f"{IDS} [1, 2, 7]: the model has only layers 0 to 6",
    ),
    ({"num_aux_hidden_states": 4}, f"num_aux_hidden_states 4: without {IDS} there are 3; write {IDS}"),
    ({"vocab_size": 330}, "vocab_size 330: "),
]
WEIGHT_FAULTS: list[tuple[dict[str, torch.Tensor | None], str]] = [
    ({"d2t": torch.full((50,), 271)}, "d2t[49] 271: token 320 is not one of the model's 320"),
    ({"d2t": None}, "d2t: missing, and draft_vocab_size 50 is not vocab_size 320"),
    ({"d2t": torch.zeros(50)}, "d2t: dtype F32; expected one of I64, I32"),
    ({"midlayer__hidden_norm__weight": None}, "layers.0.hidden_norm.weight: missing"),
    ({"midlayer__self_attn__q_proj__bias": torch.zeros(64)}, "self_attn.q_proj.bias: a head as "),
    ({"mask_hidden": torch.zeros(1, 192)}, "mask_hidden: a head as "),
    ({"lm_head__weight": torch.zeros(320, 64)}, "lm_head.weight: shape [320, 64], and by "),
    ({"lm_head__weight": None}, "lm_head.weight: missing, and draft_vocab_size is 50"),
    ({"fc__weight": torch.zeros(64, 192, dtype=torch.int8)}, "fc.weight (I8): quantized weights"),
]
TARGET_FAULTS: list[tuple[str, dict[str, Any], dict[str, Any], str]] = [
    ("llama", {**SEVEN, "hidden_size": 128}, {}, "hidden_size 64: "),
    ("llama", {**SEVEN, "num_key_value_heads": 4}, {}, "num_key_value_heads 2: "),
    ("llama", {**SEVEN, "head_dim": 32}, {}, "head_dim 16: "),
    ("llama", {}, {}, f"{IDS}: missing, and the usual ones of a model of 3 layers would be 2, 1, 0"),
    ("deepseek_v3", {}, {}, "keeps latents"),
]


def refused(target: Path, head: Path, message: str, **settings: Any) -> None:
    with pytest.raises(ConfigError) as caught:
        check_eagle3(plan_of(target, head, **settings))
    assert message in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(("fault", "message"), [*CONFIG_FAULTS, *WEIGHT_FAULTS])
def test_faults_of_a_head(checkpoint: Checkpoints, tmp_path: Path, fault: dict[str, Any], message: str) -> None:
    target = checkpoint("llama", **SEVEN)
    folder = make_eagle3_head(tmp_path, target, draft_vocab_size=50)
    is_weight = any(isinstance(value, torch.Tensor | None) for value in fault.values())
    (changed_weights if is_weight else changed_config)(folder, **fault)
    refused(target, folder, message)


@pytest.mark.parametrize(("architecture", "changes", "settings", "message"), TARGET_FAULTS)
def test_heads_of_another_model(
    checkpoint: Checkpoints,
    tmp_path: Path,
    architecture: str,
    changes: dict[str, Any],
    settings: dict[str, Any],
    message: str,
) -> None:
    folder = make_eagle3_head(tmp_path, checkpoint("llama", **SEVEN))
    refused(checkpoint(architecture, **changes), folder, message, **settings)


def test_pickles_are_not_read(checkpoint: Checkpoints, tmp_path: Path) -> None:
    target = checkpoint("llama", **SEVEN)
    folder = make_eagle3_head(tmp_path, target)
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")
    refused(target, folder, "such files may run code when they are read; save it as model.safetensors")
