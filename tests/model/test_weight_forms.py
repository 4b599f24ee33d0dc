"""A weight form defined only in this file is loaded, divided, fused and computed with, for experts, too."""

from __future__ import annotations

import random
import re
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from pd_cluster.checkpoints.checkpoint import Checkpoint
from pd_cluster.devices.device import CPU
from pd_cluster.errors import ModelError
from pd_cluster.model.language_model.cache_declaration import layout_of
from pd_cluster.model.language_model.fused_lm import FusedCausalLM
from pd_cluster.model.layers.expert_weights import ExpertStack
from pd_cluster.model.layers.linear_weight import LinearWeight, Tensors, WeightForm, WeightPart
from pd_cluster.model.layers.packed_linear import Linear, PlainLinear, make_linear
from pd_cluster.model.loading.model_loader import load_model, probe_logits
from pd_cluster.model.weights.weight_forms import FORMS
from pd_cluster.types import Sampling
from tests.support.checkpoints import make_checkpoint
from tests.support.engines import assert_all_same, generate, make_core, random_prompt
from tests.support.ranks import ranks

GREEDY = Sampling(max_tokens=10, temperature=0.0)
GROUP = 8  # input features that share a step
FILE = "model.safetensors"
NAME = re.compile(r"model\.layers\.\d+\..*(?:_proj|\.w[123])\.weight|model\.layers\.\d+\..*\.experts\.\w+_proj")


@dataclass(frozen=True, slots=True)
class GroupedInt8:
    """codes [..., out, in] int8; steps [..., out, in / GROUP]: a weight is its code times its group's step."""

    codes: torch.Tensor
    steps: torch.Tensor
    bias: torch.Tensor | None = None

    @classmethod
    def of(cls, parts: Tensors, dtype: torch.dtype) -> GroupedInt8:
        return cls(parts["codes"], parts["steps"].to(dtype), parts.get("bias"))

    @property
    def out_features(self) -> int:
        return self.codes.shape[-2]

    @classmethod
    def join(cls, parts: Sequence[GroupedInt8]) -> GroupedInt8:
        biases = [part.bias for part in parts if part.bias is not None]
        assert len(biases) in (0, len(parts))
        codes, steps = torch.cat([part.codes for part in parts]), torch.cat([part.steps for part in parts])
        return cls(codes, steps, torch.cat(biases) if biases else None)

    def reordered(self, rows: torch.Tensor) -> GroupedInt8:
        bias = None if self.bias is None else self.bias[..., rows]
        return GroupedInt8(self.codes[..., rows, :], self.steps[..., rows, :], bias)

    def linear(self) -> Linear:
        return make_linear(self.matrix(), self.bias)

    def reference(self) -> Linear:
        return PlainLinear(self.matrix(), self.bias)

    def matrix(self) -> torch.Tensor:
        groups = self.codes.unflatten(-1, (-1, self.codes.shape[-1] // self.steps.shape[-1])).to(self.steps.dtype)
        return (groups * self.steps[..., None]).flatten(-2)


FORM = WeightForm(
    {
        "codes": WeightPart(outputs=0, inputs=1),
        "steps": WeightPart(outputs=0, inputs=1),
        "bias": WeightPart(outputs=0, inputs=None, is_added=True),
    },
    GroupedInt8,
)


@pytest.fixture(autouse=True)
def _known(monkeypatch: pytest.MonkeyPatch) -> None:
    """Registers the form in the table of forms; besides its class it needs nothing more."""
    monkeypatch.setitem(FORMS, "grouped int8", FORM)


def coded(weight: torch.Tensor, group: int = GROUP) -> dict[str, torch.Tensor]:
    groups = weight.unflatten(-1, (-1, group))
    steps = groups.abs().amax(-1) / 127
    return {"codes": (groups / steps[..., None]).round().to(torch.int8).flatten(-2), "steps": steps}


def pair(folder: Path, architecture: str, fused: bool = False, group: int = GROUP, **changes: Any) -> tuple[Path, Path]:
    """Returns a checkpoint with weights in this form, and one with the same numbers in transformers' own form.

    `fused`: experts are one tensor for each product in the files, instead of one for each expert.
    """
    plain, other = (make_checkpoint(folder / name, architecture, **changes) for name in ("plain", "other"))
    numbers, codes = {}, {}
    stored = load_file(plain / FILE)
    is_transposed = architecture == "gpt_oss"  # its experts' tensors, in transformers' form only
    if fused:
        stored = with_fused_experts(stored)
    for name, tensor in stored.items():
        if not NAME.fullmatch(name):
            numbers[name] = codes[name] = tensor
            continue
        turned = is_transposed and ".experts." in name
        parts = coded(tensor.mT.contiguous() if turned else tensor, group)
        matrix = GroupedInt8.of(parts, torch.float32).matrix()
        numbers[name] = matrix.mT.contiguous() if turned else matrix
        path = name.removesuffix(".weight")
        codes |= {f"{path}{'.' if name != path else '_'}{part}": tensor for part, tensor in parts.items()}
    save_file(numbers, plain / FILE, {"format": "pt"})
    save_file(codes, other / FILE, {"format": "pt"})
    assert sum(tensor.dtype == torch.int8 for tensor in codes.values()) > 10
    return plain, other


def with_fused_experts(stored: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Returns weights with experts stacked as in transformers' modules."""
    found, experts = {}, {}
    for name, tensor in stored.items():
        if one := re.fullmatch(r"(.+)\.experts\.(\d+)\.(\w+)\.weight", name):
            experts.setdefault(one[1], {}).setdefault(int(one[2]), {})[one[3]] = tensor
        else:
            found[name] = tensor
    assert experts
    for block, each in experts.items():
        gate, up, down = ("w1", "w3", "w2") if "w1" in each[0] else ("gate_proj", "up_proj", "down_proj")
        path = f"{block.replace('block_sparse_moe', 'mlp')}.experts"
        found[f"{path}.gate_up_proj"] = torch.stack([torch.cat([e[gate], e[up]]) for _, e in sorted(each.items())])
        found[f"{path}.down_proj"] = torch.stack([e[down] for _, e in sorted(each.items())])
    return found


QUICK = [("qwen2", False), ("mixtral", False), ("qwen3_moe", True)]
SLOW = [
    ("llama", False),
    ("olmo2", False),
    ("qwen3_moe", False),
    ("qwen2_moe", False),
    ("qwen2_moe", True),
    ("mixtral", True),
]


CASES = [*QUICK, *(pytest.param(*case, marks=pytest.mark.slow) for case in SLOW)]


@pytest.mark.parametrize(("architecture", "fused"), CASES)
def test_the_numbers_are_those_of_the_same_weights_in_plain_form(
    tmp_path: Path, architecture: str, fused: bool
) -> None:
    """Covers one and two ranks, fused layers, transformers' modules, biases, and both file layouts of experts."""
    plain, other = pair(tmp_path, architecture, fused)
    rng = random.Random(1)
    prompts = [random_prompt(rng, n) for n in (1, 17, 40)]
    outputs = generate(make_core(other, max_num_batched_tokens=32, num_blocks=64), prompts, GREEDY)
    assert_all_same(plain, prompts, outputs, GREEDY.max_tokens)
    with ranks(other, 2, max_num_batched_tokens=32, num_blocks=64) as core:
        assert_all_same(plain, prompts, generate(core, prompts, GREEDY), GREEDY.max_tokens)


@pytest.mark.parametrize("architecture", ["glm4", "phi3", "gpt_oss"])
def test_forms_are_reordered_as_plain_weights_are(
    tmp_path: Path, architecture: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Covers rows of heads, gates and ups, and gpt_oss's biases. A form that cannot be reordered is refused."""
    plain, other = pair(tmp_path, architecture)
    prompts = [random_prompt(random.Random(2), n) for n in (1, 17, 40)]
    core = make_core(other, max_num_batched_tokens=32, num_blocks=64)
    assert isinstance(core.runner.model, FusedCausalLM)  # type: ignore[attr-defined]
    assert_all_same(plain, prompts, generate(core, prompts, GREEDY), GREEDY.max_tokens)

    def reordered(self: GroupedInt8, rows: torch.Tensor) -> GroupedInt8:
        raise ModelError("grouped int8: two output features share a word, so their order cannot change")

    monkeypatch.setattr(GroupedInt8, "reordered", reordered)
    with pytest.raises(ModelError, match="grouped int8: two output features share a word"):
        make_core(other, num_blocks=64)


def test_logits_are_bit_for_bit_those_of_the_plain_form(tmp_path: Path) -> None:
    found = []
    for folder in pair(tmp_path, "mixtral"):
        model = load_model(Checkpoint.open(str(folder)), "float32", CPU)
        found.append(probe_logits(model, layout_of(model.caches, 16, "float32"), CPU))
    assert torch.equal(*found)


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_sixteen_bits_on_a_cpu_have_this_form(tmp_path: Path, dtype: str) -> None:
    """The model answers, so no layer has kept its placeholder."""
    _, other = pair(tmp_path, "mixtral")
    core = make_core(other, dtype=dtype, num_blocks=32)
    (output,) = generate(core, [[5, 6, 7]], GREEDY)
    assert len(set(output)) > 2


def test_groups_are_never_cut(tmp_path: Path) -> None:
    """96 features are three groups of 32, which two ranks cannot divide."""
    for architecture in ("llama", "mixtral"):
        _, other = pair(tmp_path / architecture, architecture, group=32)
        with (
            pytest.raises(ModelError, match=r"(down_proj|w2)\.steps has 3 elements .* use a divisor"),
            ranks(other, 2, num_blocks=32),
        ):
            pass
        make_core(other, num_blocks=32)


def test_a_stack_is_its_experts() -> None:
    torch.manual_seed(0)
    weights = [(torch.randn(16, 24), torch.randn(16, 24)) for _ in range(3)]
    stack = ExpertStack.stacked(FORM, [[coded(gate), coded(up)] for gate, up in weights], torch.float32)
    assert len(stack) == 3
    assert stack.whole().matrix().shape == (3, 32, 24)
    x = torch.randn(5, 24)
    for index, linear in enumerate(stack.linears()):
        expert: LinearWeight = stack.expert(index)
        assert expert.out_features == 32
        torch.testing.assert_close(linear(x), x @ stack.whole().matrix()[index].T)
        torch.testing.assert_close(stack.whole().matrix()[index], torch.cat(weights[index]), rtol=0, atol=0.02)


EXPERT, Q_PROJ = "model.layers.1.block_sparse_moe.experts.2.w3", "model.layers.0.self_attn.q_proj"
CHANGES: list[tuple[list[str], str, str]] = [  # removed tensors, an added layer, the error
    ([f"{EXPERT}.codes"], "", r"gate_proj or up_proj of expert 2 lacks some of the tensors codes, steps"),
    ([f"{EXPERT}.codes", f"{EXPERT}.steps"], "", r"expert 2 lacks up_proj"),
    ([f"{Q_PROJ}.codes"], "", r"q_proj: steps are not the tensors of a known form"),
    ([], "model.layers.0.x_proj", r"x_proj: this architecture has no linear layer here"),
]


@pytest.mark.parametrize(("gone", "more", "said"), CHANGES, ids=[said for *_, said in CHANGES])
def test_files_that_do_not_fit_are_refused(tmp_path: Path, gone: list[str], more: str, said: str) -> None:
    _, other = pair(tmp_path, "mixtral")
    weights = {name: each for name, each in load_file(other / FILE).items() if name not in gone}
    if more:
        weights |= {f"{more}.{part}": torch.zeros(1) for part in ("codes", "steps")}
    save_file(weights, other / FILE, {"format": "pt"})
    with pytest.raises(ModelError, match=said):
        make_core(other, num_blocks=32)
