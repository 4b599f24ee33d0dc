"""Counts a CUDA decode step's launches without a GPU, because an additional one would slow down every token.

Triton's launches are recorded instead of run; torch's operators are counted, except views and allocations. The computed
numbers are meaningless.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils._python_dispatch import TorchDispatchMode

from pd_cluster.checkpoints.checkpoint import Checkpoint
from pd_cluster.devices.device import CPU
from pd_cluster.kv.kv_pool import KVPool
from pd_cluster.model.inputs.forward_batch import batch_of
from pd_cluster.model.inputs.step_input import step_input
from pd_cluster.model.kernels.attention_backend import triton_attention
from pd_cluster.model.kernels.cuda.attention.attention_plan import SPLIT_KEYS
from pd_cluster.model.kernels.cuda_speedups import sped_up
from pd_cluster.model.language_model.adapter_devices import to_tables
from pd_cluster.model.language_model.cache_declaration import caches_of, layout_of
from pd_cluster.model.language_model.fused_lm import FusedCausalLM, Served
from pd_cluster.model.layers.attention.sdpa import Scoring
from pd_cluster.model.loading import model_loader, transformers_modules
from pd_cluster.model.sampling.device_sampling import draw_shaped
from pd_cluster.model.sampling.token_draw import DrawParameters
from pd_cluster.settings.lora_settings import AdapterSettings
from pd_cluster.types import Request, RequestSpec, Sampling
from tests.support.quantized import FORMATS, W8A8, rewritten

pytest.importorskip("triton")

ALLOCATIONS = {"aten::empty", "aten::new_empty", "aten::empty_strided", "aten::detach"}
MAX_BEFORE = 7  # the embedding, and cos and sin by transformers' own module
KNOBS = DrawParameters.of([Sampling(top_p=0.9)] * 2, np.array([0.3, 0.6]), 1000)
LORA = ["lora_shrink", "lora_expand"]
END = ["rms_norm", "linear"]
LAYER = ["rms_norm", "linear", "prepare_heads", "decode_kernel", "linear", "rms_norm", "linear", "gated", "linear"]


class _Operators(TorchDispatchMode):
    def __init__(self, launched: list[str]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._launched = launched

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        name = func._schema.name
        if not func.is_view and name not in ALLOCATIONS:
            self._launched.append(name.removeprefix("aten::"))
        return func(*args, **(kwargs or {}))


@pytest.fixture
def launches(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[str]]:
    """Yields a list that receives the names of launched kernels and operators, in order."""
    from triton.runtime.jit import JITFunction  # triton may be missing

    launched: list[str] = []
    monkeypatch.setattr(JITFunction, "run", lambda self, *args, **options: launched.append(self.__name__))
    with torch.inference_mode(), _Operators(launched):
        yield launched


@pytest.fixture
def plain(checkpoint: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch) -> Any:
    return load_as_on_cuda(checkpoint("llama"), monkeypatch)


@pytest.fixture
def model(plain: Any) -> FusedCausalLM:
    """Returns a fused Llama that uses CUDA's operations on CPU."""
    return fused_by(plain, ())


def load_as_on_cuda(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    monkeypatch.setenv("PD_CLUSTER_CPU_KERNELS", "0")
    monkeypatch.setattr(model_loader, "choose_attention", lambda *given: triton_attention())
    return transformers_modules.load_plain(Checkpoint.open(str(folder)), "bfloat16", CPU)


def fused_by(plain: Any, speedups: Sequence[str]) -> FusedCausalLM:
    caches = caches_of(plain)
    ops = model_loader.choose_ops(layout_of(caches, 16, "bfloat16"), CPU, sped_up(triton_attention(), speedups))
    fused = model_loader.fuse(plain, ops, Served(caches))
    assert fused.ops.name == "Triton"
    return fused


def launched_by(
    model: FusedCausalLM, num_layers: int, launches: list[str], context_len: int = 40, adapters: Any = None
) -> list[str]:
    """Runs a decode step of three sequences through `num_layers` layers, with adapters in these slots."""
    num_blocks = -(-context_len // 16)
    pool = KVPool(layout_of(model.caches, 16, "bfloat16"), 3 * num_blocks)
    tables = [list(range(i * num_blocks, (i + 1) * num_blocks)) for i in range(3)]
    requests = [
        Request(str(i), RequestSpec([1] * context_len, Sampling()), tables=[table]) for i, table in enumerate(tables)
    ]
    for request in requests:
        request.num_computed_tokens = context_len - 1
    step = dataclasses.replace(step_input([(request, 1) for request in requests], 16), adapters=adapters)
    batch = batch_of(step, pool)
    model.layers = model.layers[:1] * num_layers
    launches.clear()
    model(batch)
    return list(launches)


def test_no_launch_is_added_to_a_layer_or_around_the_layers(model: FusedCausalLM, launches: list[str]) -> None:
    """A layer is four products and what lies between them, also where contexts are split: then a step has one more
    launch, which sets the counts of splits to zero.
    """
    for num_layers, context_len in ((1, 40), (2, 40), (2, 400)):
        found = launched_by(model, num_layers, launches, context_len)
        if context_len > SPLIT_KEYS:
            found.remove("zeros")
        first = found.index(LAYER[0])
        stop = first + num_layers * len(LAYER)
        assert found[first:stop] == num_layers * LAYER
        assert found[stop:] == END
        assert found[0] == "embedding"
        assert first <= MAX_BEFORE, found[:first]


def test_the_skinny_gate_saves_a_launch(plain: Any, launches: list[str]) -> None:
    found = launched_by(fused_by(plain, ["pdl", "skinny-gate"]), 2, launches)
    first = found.index(LAYER[0])
    layer = [*LAYER[:6], "skinny_gate_product", "linear"]
    assert found[first : first + 16] == 2 * layer


@pytest.mark.parametrize(
    ("form", "linear"),
    [(FORMATS["awq"], ["coded_linear_product"]), (W8A8, ["round_rows", "coded_linear_product"])],
    ids=["awq", "int8"],
)
def test_codes_add_no_launch_but_the_rounding_of_activations(
    form: Any,
    linear: list[str],
    checkpoint: Callable[[str], Path],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    launches: list[str],
) -> None:
    """Any number of programs may share a product, because the last one adds up the parts."""
    quantized, _ = rewritten(checkpoint("llama"), tmp_path, form)
    found = launched_by(fused_by(load_as_on_cuda(quantized, monkeypatch), ()), 2, launches)
    first = found.index(LAYER[0])
    layer = [name for each in LAYER for name in (linear if each == "linear" else [each])]
    assert found[first:] == [*layer, *layer, *END]


def test_adapters_add_two_launches_to_a_linear_layer_and_none_to_a_step_without(
    checkpoint: Callable[[str], Path], plain: Any, launches: list[str]
) -> None:
    adapters = model_loader.adapters_of(Checkpoint.open(str(checkpoint("llama"))), None)
    caches = caches_of(plain)
    ops = model_loader.choose_ops(layout_of(caches, 16, "bfloat16"), CPU, triton_attention())
    fused = model_loader.fuse(plain, ops, Served(caches, adapters=adapters))
    to_tables(adapters.places, AdapterSettings(enable_lora=True), CPU, "bfloat16")
    adapters.places.rows.places[1] = 0
    found = launched_by(fused, 2, launches, adapters=np.array([1, 0, 1]))
    first = found.index(LAYER[0])
    layer = [name for each in LAYER for name in ([each, *LORA] if each == "linear" else [each])]
    assert found[first:] == [*layer, *layer, *END]
    found = launched_by(fused, 2, launches)
    assert found[found.index(LAYER[0]) :] == [*LAYER, *LAYER, *END]


def variant_of(kernel: Any, args: Any, options: dict[str, Any]) -> str:
    """Returns Triton's specialisation of a launch: types, constants, alignment."""
    from triton.backends.compiler import GPUTarget
    from triton.compiler import make_backend
    from triton.runtime.jit import create_function_from_signature

    options = {name: value for name, value in options.items() if name not in ("grid", "warmup")}
    bind = create_function_from_signature(kernel.signature, kernel.params, make_backend(GPUTarget("cuda", 90, 32)))
    return f"{kernel.__name__} {bind(*args, **options)[1:]}"


def test_no_kernel_is_compiled_again_for_another_number_of_rows_or_place_in_a_buffer(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Compiling takes seconds during a client's step. Covers arguments of 1, multiples of 16, and others."""
    from triton.runtime.jit import JITFunction

    from pd_cluster.model.kernels.cuda.attention.attention_configs import configs_for
    from pd_cluster.model.kernels.cuda.attention.attention_plan import plan_decode
    from pd_cluster.model.kernels.cuda.attention.paged_attention import BatchMetadata, PagedKV, attend
    from pd_cluster.model.kernels.cuda.linear.lora_tables import CudaTable
    from pd_cluster.model.lora.adapter_row_blocks import AdaptedBlocks

    found: set[str] = set()
    monkeypatch.setattr(JITFunction, "run", lambda self, *args, **options: found.add(variant_of(self, args, options)))
    table = CudaTable([slice(0, 64), slice(64, 96)], 128, torch.bfloat16, torch.device("cpu"), max_rank=16)
    pool = torch.zeros(4, 16, 2, 64, dtype=torch.bfloat16)
    for num_rows, offset in ((1, 0), (16, 1), (17, 2), (32, 0)):

        def numbers(size: int, offset: int = offset) -> torch.Tensor:
            return torch.zeros(size + offset, dtype=torch.int32)[offset:]

        x, y = torch.zeros(num_rows, 128, dtype=torch.bfloat16), torch.zeros(num_rows, 96, dtype=torch.bfloat16)
        table.add(x, y, AdaptedBlocks(numbers(num_rows), numbers(3).view(1, 3)))
        plan = plan_decode(num_rows, 1000 * num_rows, 2, configs_for(64, 16, 4, (9, 0)), 132)
        starts, lens = numbers(num_rows + 1), numbers(num_rows)
        arrivals = torch.zeros(plan.num_arrivals(2), dtype=torch.int32)
        batch = BatchMetadata(plan, starts, lens, numbers(8), starts, numbers(0), numbers(0).view(0, 2), arrivals)
        attend(torch.zeros(num_rows, 8, 64, dtype=torch.bfloat16), PagedKV(pool, pool), batch, Scoring(0.1))
    assert len(found) == 3, sorted(found)


def test_a_shaped_draw_takes_three_launches(launches: list[str]) -> None:
    """torch's operators would take more than forty launches."""
    from pd_cluster.model.kernels.cuda.sampling.triton_draw import draw_rows

    there = {field.name: torch.from_numpy(getattr(KNOBS, field.name)) for field in dataclasses.fields(KNOBS)}
    logits = torch.randn(2, 1000)
    best, best_ids = logits.max(1)
    rows = torch.arange(2)
    launches.clear()
    draw_rows(logits, rows, best, best_ids, there)
    assert launches == ["weigh_bins", "gather_likely", "choose_among"]
    launches.clear()
    draw_shaped(logits, best, best_ids, there)
    assert len(launches) > 40
