"""Decode steps as graphs against the same steps run eagerly, on one NPU, in 16 bits.

Run by scripts/npu_check.sh on NPUs, with layers of real width, and by tests/model/test_npu.py on simulated NPUs.
"""

from __future__ import annotations

import random
import time
from pathlib import Path
from typing import Any

import pytest

from pd_cluster.engine.assembly.build_engine import build_core
from pd_cluster.engine.step.engine_core import EngineCore
from pd_cluster.model.graphs.step_graphs import StepGraphs
from pd_cluster.model.runner.model_runner import ModelRunner
from pd_cluster.settings.engine_config import EngineConfig
from pd_cluster.types import Request, RequestSpec, Sampling
from tests.support.checkpoints import make_checkpoint
from tests.support.engines import generate, random_prompt
from tests.support.npu_parity_cases import IS_SIMULATED, device

__all__ = ["device"]  # a fixture

WIDE = {
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_hidden_layers": 4,
}
MAX_LEN = 300 if IS_SIMULATED else 4000
MOST = 8 if IS_SIMULATED else 64  # sequences
DTYPE = "float32" if IS_SIMULATED else "bfloat16"  # on the host, 16-bit layers are not fused
NUM_STEPS = 6 if IS_SIMULATED else 24
# Relative to a row's standard deviation: graphs use the same operators, but their products have padding rows.
TOLERANCE = 0.05


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    sizes: dict[str, Any] = {} if IS_SIMULATED else WIDE
    return make_checkpoint(tmp_path_factory.mktemp("model"), head_dim=128, max_position_embeddings=8192, **sizes)


def engine(folder: Path, **settings: Any) -> tuple[EngineCore, ModelRunner]:
    settings = {"num_blocks": 24 if IS_SIMULATED else 1024, "max_model_len": MAX_LEN, "max_num_seqs": MOST, **settings}
    return build_core(EngineConfig(model=str(folder), device="npu", dtype=DTYPE, **settings))


def worst_difference(runner: ModelRunner, step: Any) -> float:
    """Computes a decode step both ways; returns the largest difference in a row over the row's standard deviation."""
    graphs = runner.graphs
    assert graphs.decode is not None
    by_graph = runner.compute(step).logits.cpu().clone()
    runner.graphs = StepGraphs()
    try:
        eager = runner.compute(step).logits.cpu()
    finally:
        runner.graphs = graphs
    return float(((by_graph - eager).abs().amax(1) / eager.std(1)).max())


def test_every_step_of_growing_contexts_is_the_eager_one(folder: Path) -> None:
    """Contexts grow with each step, so a graph with the previous step's lengths would miss the newest key."""
    started_s = time.monotonic()
    _, runner = engine(folder)
    graphs = runner.graphs.decode
    assert graphs is not None
    print(f"captured {graphs.num_captured} graphs; load and capture took {time.monotonic() - started_s:.1f} s")
    rng = random.Random(3)
    for num_seqs in (1, 3, MOST // 2 - 1):
        lens = [rng.randrange(1, MAX_LEN // max(3, num_seqs)) for _ in range(num_seqs)]
        requests, block = [], 0
        for i, length in enumerate(lens):
            table = list(range(block, block + (length + NUM_STEPS) // 128 + 1))
            block += len(table)
            requests.append(Request(str(i), RequestSpec(random_prompt(rng, length), Sampling()), tables=[table]))
        assert block <= runner.pool.num_blocks
        logits = runner.forward([(request, request.num_tokens) for request in requests]).logits
        worst = 0.0
        for _ in range(NUM_STEPS):
            for request, row in zip(requests, logits, strict=True):
                request.num_computed_tokens = request.num_tokens
                request.output_token_ids.append(int(row.argmax()))
            step = runner.step_of([(request, 1) for request in requests])
            worst = max(worst, worst_difference(runner, step))
            logits = runner.compute(step).logits
        print(f"{num_seqs} sequences: graphs and eager steps differ by {worst:.4f} of the logits' deviation")
        assert worst < TOLERANCE


def test_the_engine_goes_ahead_and_its_tokens_are_those_of_eager_steps(folder: Path) -> None:
    rng = random.Random(4)
    prompts = [random_prompt(rng, rng.randrange(1, MAX_LEN // 4)) for _ in range(5)]
    sampling = Sampling(max_tokens=12, temperature=0.0, ignore_eos=True)
    outputs = []
    for eager in (False, True):
        core, runner = engine(folder, enforce_eager=eager)
        assert (runner.graphs.decode is None) == eager
        outputs.append(generate(core, prompts, sampling))
        assert core.ahead.num_ahead > 0
    same = [sum(a == b for a, b in zip(*pair, strict=True)) for pair in zip(*outputs, strict=True)]
    print(f"equal tokens of 12: {same}")
    assert [tokens[:4] for tokens in outputs[0]] == [tokens[:4] for tokens in outputs[1]]
