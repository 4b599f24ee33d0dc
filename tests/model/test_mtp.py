"""MTP layers as draft heads: states and logits equal transformers', for chunked prompts and chains of drafts."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from transformers.cache_utils import MtpCache

from pd_cluster.devices.device import CPU
from pd_cluster.errors import ConfigError, ModelError
from pd_cluster.kv.kv_pool import KVPool
from pd_cluster.model.draft.draft_head import DraftHead
from pd_cluster.model.draft.mtp_head import check_mtp, load_mtp
from pd_cluster.model.inputs.forward_batch import HiddenRows, PairRows, build_batch
from pd_cluster.model.language_model.cache_declaration import layout_of
from pd_cluster.model.language_model.fused_lm import FusedCausalLM
from pd_cluster.model.parallel.rank_group import SingleRank
from pd_cluster.model.planning.load_plan import LoadPlan
from pd_cluster.model.runner.loaded_parts import load_parts
from pd_cluster.native.packed_products import bf16_way
from pd_cluster.settings.engine_config import EngineConfig
from pd_cluster.settings.lora_settings import AdapterSettings
from pd_cluster.settings.speculation import Speculation
from pd_cluster.types import Request, RequestSpec, Sampling
from tests.support.checkpoints import make_checkpoint
from tests.support.mtp import FILE, add_mtp_layer, reference_mtp
from tests.support.quantized import FORMATS, change_config, rewritten

Checkpoints = Callable[..., Path]
NUM_DRAFTS = 4
MOST_TOKENS = 40
WIDE: dict[str, Any] = {"hidden_size": 1152, "num_attention_heads": 9, "num_key_value_heads": 3, "head_dim": 128}
WIDE |= {"initializer_range": 0.05}

pytestmark = pytest.mark.usefixtures("one_thread")


def plan_of(folder: Path, mtp_type: str = "", **settings: Any) -> LoadPlan:
    speculation = Speculation(methods=("mtp",), mtp_type=mtp_type)
    config = EngineConfig(model=str(folder), speculation=speculation, block_size=8, **settings)
    return LoadPlan.of(config, SingleRank(), CPU)


def loaded(folder: Path, **settings: Any) -> tuple[LoadPlan, FusedCausalLM, DraftHead]:
    plan = plan_of(folder, **{"dtype": "float32", **settings})
    check_mtp(plan)
    target = load_parts(plan).model
    assert isinstance(target, FusedCausalLM)
    return plan, target, load_mtp(plan, target)


class Pairs:
    """One sequence's pairs in a pool, and transformers' states and logits of each.

    Pair j combines token j with the model's states of token j - 1, or, after the prompt, with those of pair j - 1.
    """

    def __init__(self, prompt: list[int], main: Any, mtp: Any) -> None:
        self.num_prompt, cache = len(prompt), MtpCache(config=main.config.get_mtp_config())
        with torch.inference_mode():
            self.states = main.model(torch.tensor([prompt])).last_hidden_state[0, :-1]
            found = _layer(mtp, cache, prompt[1:], self.states, 1)
            self.expected = [*found]
            for _ in range(NUM_DRAFTS):
                draft = int(mtp._project_to_logits(self.expected[-1]).argmax())
                found = _layer(mtp, cache, [draft], found[-1:], len(prompt))
                prompt, self.expected = [*prompt, draft], [*self.expected, *found]
            self.expected_logits = mtp._project_to_logits(torch.stack(self.expected))
        self.request = Request("r", RequestSpec(prompt, Sampling()), num_computed_tokens=1)
        self.found: dict[int, tuple[torch.Tensor, torch.Tensor]] = {}  # states and logits of the pairs that were read

    @property
    def start(self) -> int:
        return self.request.num_computed_tokens

    @property
    def is_done(self) -> bool:
        return self.start == self.num_prompt + NUM_DRAFTS

    def most(self) -> int:
        """Returns how many pairs can be computed next: one at a time after the prompt."""
        return max(1, self.num_prompt - self.start)

    def states_of(self, num_tokens: int) -> torch.Tensor:
        if self.start < self.num_prompt:
            return self.states[self.start - 1 : self.start - 1 + num_tokens]
        return self.found[self.start - 1][0][None]

    def errors(self) -> list[float]:
        """Returns the largest errors of states and logits, relative to transformers' largest values."""
        states = [_error(states, self.expected[at - 1]) for at, (states, _) in self.found.items()]
        return states + [_error(logits, self.expected_logits[at - 1]) for at, (_, logits) in self.found.items()]


def _layer(mtp: Any, cache: MtpCache, tokens: list[int], states: torch.Tensor, start: int) -> torch.Tensor:
    """Returns transformers' states [num_tokens, hidden_size] of pairs from `start` on."""
    positions = torch.arange(start, start + len(tokens))[None]
    found: torch.Tensor = mtp.forward_layer(0, states[None], positions, cache, input_ids=torch.tensor([tokens]))[0]
    return found


def _error(found: torch.Tensor, expected: torch.Tensor) -> float:
    return float((found - expected).abs().max() / expected.abs().max())


def draft(head: DraftHead, target: FusedCausalLM, plan: LoadPlan, sequences: list[Pairs], seed: int) -> None:
    """Computes all pairs in random chunks, batched with other sequences; results within prompts are not always read."""
    layout = layout_of((*target.caches, *head.model.caches), plan.block_size, plan.kv_dtype)
    assert layout.num_layers == len(target.layers) + 1
    pool, rng = KVPool(layout, 64), random.Random(seed)
    pool.memory.bytes.fill_(255)  # NaN, so that reading an unwritten slot fails
    blocks = rng.sample(range(64), 64)
    for each in sequences:
        each.request.tables[0] += [blocks.pop() for _ in range(layout.num_blocks_for(each.request.num_tokens))]
    while running := [each for each in sequences if not each.is_done]:
        chunks = [(each, rng.randint(1, each.most())) for each in rng.sample(running, rng.randint(1, len(running)))]
        batch = build_batch([(each.request, num_tokens) for each, num_tokens in chunks], pool)
        batch.pairs = PairRows(torch.cat([each.states_of(num_tokens) for each, num_tokens in chunks]))
        is_read = any(each.start + num_tokens >= each.num_prompt for each, num_tokens in chunks) or rng.random() < 0.5
        rows = torch.arange(batch.num_tokens if is_read else 0)
        batch.sample_rows, batch.kept_rows = rows, rows.numpy()
        batch.hidden = HiddenRows(rows, rows, rows, rows) if is_read else None
        with torch.inference_mode():
            logits = head.model(batch)
        assert batch.layers_written == [len(target.layers)]
        first = 0
        for each, num_tokens in chunks:
            for row in range(first, first + num_tokens):
                if batch.hidden is not None and batch.hidden.states is not None:
                    each.found[each.start + row - first] = batch.hidden.states[row], logits[row]
            first, each.request.num_computed_tokens = first + num_tokens, each.start + num_tokens
    pool.close()


KINDS: list[tuple[str, dict[str, Any], dict[str, Any]]] = [
    *((kind, {}, {}) for kind in ("deepseek_v3", "glm4_moe", "glm4_moe_lite")),
    *(("glm4_moe", {}, settings) for settings in ({"dtype": "bfloat16"}, {"quantization": "int8"})),
    *((kind, {}, {"kv_cache_dtype": "int8"}) for kind in ("deepseek_v3", "glm4_moe")),
    ("glm4_moe", WIDE, {"adapters": AdapterSettings(enable_lora=True)}),
]


@pytest.mark.parametrize(("kind", "changes", "settings"), KINDS)
def test_pairs_are_those_of_transformers(
    tmp_path: Path, kind: str, changes: dict[str, Any], settings: dict[str, Any]
) -> None:
    if settings.get("dtype") == "bfloat16" and bf16_way() is None:
        pytest.skip("this processor has no products of bfloat16")
    folder = add_mtp_layer(make_checkpoint(tmp_path, kind, **changes))
    plan, target, head = loaded(folder, **settings)
    assert head.taps == ()
    assert head.token_ids is None
    assert head.model.ends.embed is target.ends.embed
    rng, (main, mtp) = random.Random(8), reference_mtp(folder)
    sequences = [Pairs([rng.randrange(250) for _ in range(number)], main, mtp) for number in (2, 9, 23, MOST_TOKENS)]
    draft(head, target, plan, sequences, seed=9)
    errors = sorted(error for each in sequences for error in each.errors())
    assert len(errors) > 8 * NUM_DRAFTS
    is_exact = {"dtype", "quantization", "kv_cache_dtype"}.isdisjoint(settings)
    assert errors[-1] < 1e-4 if is_exact else errors[len(errors) // 2] < 0.05, "with fewer bits experts may differ"


@pytest.mark.parametrize("is_left", [False, True])
def test_quantized_folders(tmp_path: Path, is_left: bool) -> None:
    """Quantizers leave an MTP layer unchanged, or quantize all of it, including `eh_proj`."""
    made = make_checkpoint(tmp_path / "made", "glm4_moe")
    folder, plain = rewritten(made if is_left else add_mtp_layer(made), tmp_path, FORMATS["awq"])
    if is_left:
        add_mtp_layer(plain)
        layer = {name: tensor for name, tensor in load_file(plain / FILE).items() if ".layers.3." in name}
        save_file({**load_file(folder / FILE), **layer}, folder / FILE, {"format": "pt"})
        change_config(folder, num_nextn_predict_layers=1)
    plan, target, head = loaded(folder)
    sequences = [Pairs([*range(70, 70 + MOST_TOKENS)], *reference_mtp(plain))]
    draft(head, target, plan, sequences, seed=3)
    assert max(sequences[0].errors()) < 1e-4


def test_what_has_no_such_head_is_refused_by_name(tmp_path: Path, checkpoint: Checkpoints) -> None:
    glm = add_mtp_layer(make_checkpoint(tmp_path / "glm", "glm4_moe"))
    for folder, mtp_type, error in (
        (
            checkpoint("llama"),
            "",
            "has no model.layers.3.enorm, so no MTP layer after its last layer; give another method",
        ),
        (glm, "deepseek_mtp", f"method deepseek_mtp is for deepseek_v3, but {glm} is glm4_moe; give mtp"),
        (
            add_mtp_layer(make_checkpoint(tmp_path / "dsa", "deepseek_v32")),
            "",
            "sparse attention draft heads do not support",
        ),
    ):
        with pytest.raises(ConfigError) as caught:
            check_mtp(plan_of(folder, mtp_type))
        assert error in str(caught.value)
    check_mtp(plan_of(glm, "glm4_moe_mtp"))
    with pytest.raises(ConfigError, match="needs the C kernels, but this model has fused layers, torch kernels"):
        loaded(glm, attention_backend="sdpa")
    whole = load_file(glm / FILE)
    for change, error in (
        (
            {"eh_proj.weight": whole["model.layers.3.eh_proj.weight"][:, :64]},
            r"eh_proj: its shape is \[64, 64\], not \[64, 128\]",
        ),
        ({"mlp.gate.weight": None}, r"lack 1 weights.*gate.*\(layer 0 in this message is layer 3 of"),
    ):
        changed = {**whole, **{f"model.layers.3.{name}": tensor for name, tensor in change.items()}}
        kept = {name: tensor.contiguous() for name, tensor in changed.items() if tensor is not None}
        save_file(kept, glm / FILE, {"format": "pt"})
        with pytest.raises(ModelError, match=error):
            loaded(glm)
