"""Ranks with whole experts, in an instance and in a unit of instances: each reads only its own; tokens are the same."""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from msgspec import structs

from pd_cluster.checkpoints.checkpoint import Checkpoint
from pd_cluster.checkpoints.expert_counts import num_experts_of
from pd_cluster.devices.device import CPU
from pd_cluster.errors import ConfigError
from pd_cluster.model.layers.expert_share import ExpertShare
from pd_cluster.model.loading import model_loader, transformers_modules
from pd_cluster.model.parallel import weight_slices
from pd_cluster.model.parallel.expert_modules import ExpertModules
from pd_cluster.model.parallel.rank_group import SingleRank
from pd_cluster.model.parallel.rank_tensors import OwnFiles
from pd_cluster.model.planning.load_plan import LoadPlan
from pd_cluster.model.runner.load_runner import load_runner
from pd_cluster.settings.engine_config import EngineConfig
from pd_cluster.settings.lora_settings import AdapterSettings
from pd_cluster.settings.speculation import Speculation
from pd_cluster.types import Request, RequestSpec, Sampling
from tests.support.checkpoints import CONFIGS, make_checkpoint
from tests.support.engines import assert_all_same, generate, make_core, random_prompt
from tests.support.hybrids import HYBRIDS
from tests.support.more_checkpoints import MORE
from tests.support.quantized import FORMATS, experts_in_mxfp4, rewritten
from tests.support.ranks import ranks
from tests.support.unit_threads import Hall, ThreadUnit, Tokens, run_in_step, unit
from tests.support.usual import slow_but

Checkpoints = Callable[..., Path]
GREEDY = Sampling(max_tokens=8, temperature=0.0)
ROOM: dict[str, Any] = {
    "block_size": 16,
    "num_blocks": 96,
    "max_model_len": 256,
    "max_num_seqs": 8,
    "max_num_batched_tokens": 50,
}
NUM_EXPERTS = re.compile(r"(?:moe_)?num_(?:local_)?experts|n_routed_experts")
TABLES = {**MORE, **HYBRIDS, **CONFIGS}
KNOWN = {
    name: next((value for key, value in own.items() if NUM_EXPERTS.fullmatch(key)), 0) for name, own in TABLES.items()
}
TYPES = [name for name, num_experts in KNOWN.items() if num_experts and name != "longcat_flash"]
NOT_SPLIT = ("granitemoe", "granitemoeshared", "hunyuan_v1_moe", "olmoe", "phimoe", "mimo_v2_flash", "bailing_hybrid")
FUSED_ALONE = ("deepseek_v32", "glm_moe_dsa")  # sparse attention
SPLIT = [name for name in TYPES if name not in NOT_SPLIT]
QUICK = ("deepseek_v3 2 linear", "gpt_oss 4 round_robin")  # on two and four ranks; glm4_moe and qwen3_moe in units
CASES = [f"{name} {size} {kind}" for name in SPLIT for size in (2, 4) for kind in ("linear", "round_robin")]
IN_A_UNIT = ("deepseek_v3 2", "qwen3_moe 4", "nemotron_h 2", "olmoe 2")
UNITS = [f"{name} {size}" for name in TYPES for size in (2, 4)]
pytestmark = pytest.mark.usefixtures("one_thread")


def prompts_of(*lengths: int) -> list[list[int]]:
    rng = random.Random(1)
    return [random_prompt(rng, n) for n in lengths]


def requests_of(prompts: Sequence[list[int]], sampling: Sampling = GREEDY) -> list[Request]:
    return [Request(f"r{i}", RequestSpec(prompt, sampling), arrival_s=float(i)) for i, prompt in enumerate(prompts)]


# ---- in an instance


@pytest.mark.parametrize("case", slow_but(QUICK, CASES))
def test_ranks_generate_the_same_tokens(checkpoint: Checkpoints, case: str) -> None:
    """Runs prompts in chunks, then batched, then from the prefix cache."""
    name, size, placement = case.split()
    folder, prompts = checkpoint(name), prompts_of(1, 16, 41, 70)
    state = {"state_cache_gib": 0.02} if name in HYBRIDS else {}
    settings: dict[str, Any] = {**ROOM, **state, "expert_placement_strategy": placement}
    with ranks(folder, int(size), enable_expert_parallel=True, **settings) as core:
        for _ in range(2):
            assert_all_same(folder, prompts, generate(core, prompts, GREEDY), GREEDY.max_tokens)
        assert core.scheduler.num_prefix_hit_tokens == 32 + 64


@pytest.mark.parametrize(
    "form", slow_but(("fp8 blocks",), ("fp8 blocks", "awq", "mxfp4 stacked", "int8", "plain in bfloat16"))
)
def test_other_forms_have_the_tokens_of_one_rank(checkpoint: Checkpoints, tmp_path: Path, form: str) -> None:
    folder, settings, prompts = checkpoint("qwen3_moe"), dict(ROOM), prompts_of(3, 40)
    if form == "int8":
        settings["quantization"] = form
    elif form == "plain in bfloat16":
        settings["dtype"] = "bfloat16"
    elif form == "mxfp4 stacked":
        plain, folder = (make_checkpoint(tmp_path / name, "gpt_oss") for name in ("plain", "quantized"))
        experts_in_mxfp4(plain, folder)
    else:
        folder, _ = rewritten(folder, tmp_path, FORMATS[form])
    expected = generate(make_core(folder, **settings), prompts, GREEDY)
    with ranks(folder, 2, enable_expert_parallel=True, **settings) as core:
        assert generate(core, prompts, GREEDY) == expected


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in SPLIT if name not in FUSED_ALONE])
def test_transformers_modules_on_ranks(checkpoint: Checkpoints, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_loader, "can_fuse", lambda _: False)
    test_ranks_generate_the_same_tokens(checkpoint, f"{name} 2 round_robin")


# ---- what a rank reads and holds


@contextmanager
def reading(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[int]]:
    """Yields a list of the sizes of reads of experts, in bytes."""
    found, opened = list[int](), weight_slices.opened

    class Slice:
        def __init__(self, inner: Any, key: str) -> None:
            self._inner, self._counts = inner, ".experts." in key or "_linear." in key

        def get_shape(self) -> list[int]:
            return list(self._inner.get_shape())

        def __getitem__(self, index: Any) -> torch.Tensor:
            taken: torch.Tensor = self._inner[index]
            if self._counts:
                found.append(taken.nbytes)
            return taken

    class Stream:
        def __init__(self, inner: Any) -> None:
            self.keys, self._inner = inner.keys, inner

        def get_slice(self, key: str) -> Slice:
            return Slice(self._inner.get_slice(key), key)

    @contextmanager
    def recorded(*arguments: Any) -> Iterator[Stream]:
        with opened(*arguments) as inner:
            yield Stream(inner)

    with monkeypatch.context() as patch:
        patch.setattr(weight_slices, "opened", recorded)
        yield found


def experts_in(model: torch.nn.Module) -> dict[str, torch.Tensor]:
    parameters = {name.replace(".inner", ""): each for name, each in model.named_parameters()}
    return {name: each for name, each in parameters.items() if ".experts." in name}


# Their files store experts one by one (two namings), stacked with biases, stacked under other names, without gates.
@pytest.mark.parametrize("name", ["deepseek_v3", "mixtral", "gpt_oss", "granitemoe", "nemotron_h"])
def test_each_rank_reads_and_holds_its_own_experts(
    checkpoint: Checkpoints, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    opened = Checkpoint.open(str(checkpoint(name)))
    whole = experts_in(transformers_modules.load_plain(opened, "float32", CPU))
    num_experts, size = num_experts_of(opened.config), 2
    for share in (ExpertShare(0, size), ExpertShare(1, size), ExpertShare(1, size, "round_robin")):
        own = ExpertModules(share, num_experts, transformers_modules.config_of(opened))
        with reading(monkeypatch) as num_read:
            held = experts_in(transformers_modules.load_plain(opened, "float32", CPU, None, own))
        assert held.keys() == whole.keys()
        for each, all_of_them in zip(held.values(), whole.values(), strict=True):
            assert torch.equal(each, all_of_them[share.own(num_experts)])
        nbytes = sum(each.nbytes for each in whole.values()) // size
        assert sum(num_read) == sum(each.nbytes for each in held.values()) == nbytes > 0


def test_experts_are_counted_without_torch(checkpoint: Checkpoints) -> None:
    for name, expected in KNOWN.items():
        if name in ("qwen3_moe", "deepseek_v3", "ernie4_5_moe", "granitemoehybrid", "llama", "gemma2"):
            assert num_experts_of(Checkpoint.open(str(checkpoint(name))).config) == expected, name
        assert num_experts_of({"model_type": name, **TABLES[name]}) == expected, name
    assert num_experts_of({"model_type": "qwen3_moe"}) == 128
    assert num_experts_of({"model_type": "qwen3_vl_moe", "text_config": {"num_experts": 6}}) == 6
    assert num_experts_of({"model_type": "gemma4_text", "num_experts": None}) == 0


# ---- in a unit


def check_unit(folder: Path, size: int, tp_size: int = 1, **settings: Any) -> None:
    """Runs chunked prompts, then prefix hits, with unequal work per member. Members of one rank may also be idle."""
    prompts = [prompts_of(1, 16, 41, 70), prompts_of(33), [], prompts_of(5, 90)][:size]
    sampling = GREEDY
    if tp_size > 1:
        prompts, sampling = (
            [prompts_of(1, 16, 41, 70), prompts_of(2, 17, 40, 70)],
            structs.replace(GREEDY, ignore_eos=True),
        )
    with unit(folder, size, tp_size, **{**ROOM, **settings}) as cores:
        for _ in range(2):
            asked = [requests_of(own, sampling) for own in prompts]
            run_in_step(cores, asked)
            for own, requests in zip(prompts, asked, strict=True):
                outputs = [request.output_token_ids for request in requests]
                if tp_size > 1:
                    expected = generate(make_core(folder, **ROOM), own, sampling)
                    assert outputs == expected
                elif own:
                    assert_all_same(folder, own, outputs, GREEDY.max_tokens)
        assert cores[0].scheduler.num_prefix_hit_tokens > 0


@pytest.mark.parametrize("case", slow_but(IN_A_UNIT, UNITS))
def test_a_unit_generates_the_same_tokens(checkpoint: Checkpoints, case: str) -> None:
    name, size = case.split()
    check_unit(checkpoint(name), int(size), **({"state_cache_gib": 0.02} if name in HYBRIDS else {}))


def test_a_unit_of_instances_of_two_ranks(checkpoint: Checkpoints) -> None:
    check_unit(checkpoint("glm4_moe"), 2, 2, expert_placement_strategy="round_robin")


@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in TYPES if name not in FUSED_ALONE])
def test_transformers_modules_in_a_unit(checkpoint: Checkpoints, name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(model_loader, "can_fuse", lambda _: False)
    test_a_unit_generates_the_same_tokens(checkpoint, f"{name} 2")


TELLING = Sampling(max_tokens=6, temperature=0.0, logprobs=4, ignore_eos=True)
COMPANY = ([[], [], []], [[1], [], [1]], [[37], [2, 9], []])  # prompt lengths of the other members
# Each row uses experts of three or more ranks, so that the order of a sum matters.
MANY = {"num_experts_per_tok": 6, "topk_group": 4}


def beside_company(folder: Path, kind: type[ThreadUnit] = ThreadUnit, **settings: Any) -> list[Tokens]:
    """Returns member 0's tokens and logprobs beside each set of other prompts."""
    sampling = structs.replace(TELLING, max_tokens=3)
    with unit(folder, 4, kind=kind, **{**ROOM, "enable_prefix_caching": False, **settings}) as cores:
        return [
            run_in_step(
                cores,
                [requests_of(prompts_of(7, 30), TELLING)]
                + [requests_of(prompts_of(*lengths), sampling) for lengths in company],
            )[0]
            for company in COMPANY
        ]


@pytest.mark.parametrize("name", slow_but(("glm4_moe",), ("glm4_moe", "deepseek_v3", "axk1", "dots1")))
def test_bits_depend_on_the_unit_and_not_on_its_rows(checkpoint: Checkpoints, name: str) -> None:
    alone, *others = beside_company(checkpoint(name, **MANY))
    assert len(alone) == 2
    assert all(found == alone for found in others)


@pytest.mark.slow
def test_bits_of_wide_rows(tmp_path: Path) -> None:
    """Covers widths beyond 1,024 inputs, where oneDNN computes a single row differently."""
    wide = {"hidden_size": 1280, "moe_intermediate_size": 1280, "num_hidden_layers": 2, "initializer_range": 0.05}
    alone, *others = beside_company(make_checkpoint(tmp_path, "glm4_moe", **MANY, **wide))
    assert all(found == alone for found in others)


class FewestRowsFirst(ThreadUnit):
    """A faulty exchange, which sums members' parts in an order that depends on their rows."""

    def order(self) -> list[int]:
        return sorted(super().order(), key=self.nums_rows.__getitem__)


def test_faults_put_in_by_hand_are_noticed(checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    alone, *others = beside_company(checkpoint("glm4_moe", **MANY), FewestRowsFirst)
    assert any(found != alone for found in others)
    of = OwnFiles.of

    def next_ranks(share: ExpertShare, num_experts: int) -> OwnFiles:
        return of(replace(share, rank=(share.rank + 1) % share.size), num_experts)

    monkeypatch.setattr(OwnFiles, "of", next_ranks)
    with pytest.raises(AssertionError, match="prompt of"):
        check_unit(checkpoint("qwen3_moe"), 2)


# ---- refusals


def refusal(folder: Path, **settings: Any) -> str:
    config = EngineConfig(model=str(folder), **settings)
    with pytest.raises(ConfigError) as error:
        load_runner(config, unit=ThreadUnit(Hall(1), 0))
    assert "\n" not in str(error.value)
    return str(error.value)


def test_what_cannot_be_spread_is_refused_by_name(checkpoint: Checkpoints) -> None:
    dense, sparse, pair = checkpoint("llama"), checkpoint("qwen3_moe"), {"data_parallel_size": 2}
    assert re.search("--enable-expert-parallel: .*llama.* has no experts", refusal(dense, enable_expert_parallel=True))
    odd = refusal(sparse, data_parallel_size=3)
    assert odd.startswith("--data-parallel-size: 4 experts cannot be spread evenly over 3 ranks")
    adapters = AdapterSettings(enable_lora=True)
    assert "--data-parallel-size 2: --enable-lora: adapters" in refusal(sparse, adapters=adapters, **pair)
    graphs = refusal(sparse, cuda_speedups=("prompt-graphs",), **pair)
    assert "--data-parallel-size 2: --cuda-speedups prompt-graphs: steps that exchange rows" in graphs
    head = Speculation(methods=("mtp",))
    assert "method mtp: draft models and heads" in refusal(checkpoint("glm4_moe"), speculation=head, **pair)
    draft = Speculation(methods=("draft_model",), model=str(sparse))
    assert "method draft_model: draft models and heads" in refusal(sparse, speculation=draft, **pair)
    assert "longcat_flash has LongcatFlashExperts" in refusal(checkpoint("longcat_flash"), **pair)
    with pytest.raises(ConfigError, match="--data-parallel-size 2: the instances of a unit exchange rows"):
        load_runner(EngineConfig(model=str(sparse), data_parallel_size=2))
    with (
        pytest.raises(ConfigError, match="only whole experts of gpt_oss can be spread"),
        ranks(checkpoint("gpt_oss"), 2),
    ):
        pass


def test_a_unit_of_a_model_without_experts_shares_nothing(checkpoint: Checkpoints) -> None:
    config = EngineConfig(model=str(checkpoint("llama")), data_parallel_size=2)
    assert LoadPlan.of(config, SingleRank(), CPU).experts is None
    alone = EngineConfig(model=str(checkpoint("qwen3_moe")), enable_expert_parallel=True)
    assert LoadPlan.of(alone, SingleRank(), CPU).experts is None
