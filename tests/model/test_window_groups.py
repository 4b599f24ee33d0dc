"""Windowed layers in a separate group have the bits of a single group, and do not read released blocks."""

from __future__ import annotations

import random
from pathlib import Path
from typing import Any

import pytest
import torch

from pd_cluster.kv.pool_memory import TORCH_DTYPES
from pd_cluster.model.language_model.fused_lm import FusedCausalLM
from pd_cluster.model.planning import pools_before_loading
from pd_cluster.model.runner import load_runner as loading
from pd_cluster.model.runner.model_runner import ModelRunner
from pd_cluster.settings.engine_config import EngineConfig
from pd_cluster.types import Request, RequestSpec, Sampling
from tests.support.checkpoints import make_checkpoint

NUM_BLOCKS, BLOCK_SIZE, LONGEST = 128, 4, 110
CASES: dict[str, dict[str, Any]] = {
    "gpt_oss": {},
    "gemma3_text": {"kv_cache_dtype": "int8"},
    "qwen2": {"quantization": "int8"},  # its layers are computed in one call
    "cohere2": {"dtype": "bfloat16"},
    "exaone4": {"attention_backend": "sdpa"},
}


def runner_of(folder: Path, splits: bool, monkeypatch: pytest.MonkeyPatch, **settings: Any) -> ModelRunner:
    for module in (loading, pools_before_loading):
        monkeypatch.setattr(module, "splits_windows", lambda plan: splits)
    config = EngineConfig(
        model=str(folder), block_size=BLOCK_SIZE, num_blocks=NUM_BLOCKS, max_model_len=LONGEST + 2, **settings
    )
    runner = loading.load_runner(config)
    assert [pool.num_blocks for pool in runner.pools] == [NUM_BLOCKS] * (1 + splits)
    return runner


def requests_of(num_groups: int) -> list[Request]:
    """Returns four sequences with scattered blocks in each group."""
    rng = random.Random(3)
    found = []
    free = [rng.sample(range(NUM_BLOCKS), NUM_BLOCKS) for _ in range(2)][:num_groups]
    for at, num_tokens in enumerate((LONGEST, 90, 61, 7)):
        order = RequestSpec([rng.randrange(1, 200) for _ in range(num_tokens)], Sampling())
        count = -(-num_tokens // BLOCK_SIZE)
        tables = [[blocks.pop() for _ in range(count)] for blocks in free]
        found.append(Request(str(at), order, tables=tables))
    return found


def pass_by(request: Request, runner: ModelRunner) -> None:
    """Releases blocks that have left the window, and fills them with NaN, which the padding block holds, too."""
    pool = runner.pools[1]
    first = pool.layout.holds.first_seen(request.num_computed_tokens) // BLOCK_SIZE
    table = request.tables[1]
    for block in [*table[:first], pool.num_blocks]:
        pool.flat()[block] = (
            torch.full((1,), torch.nan, dtype=TORCH_DTYPES["float32"])
            .view(torch.uint8)
            .repeat(pool.layout.block_nbytes // 4)
        )
    table[:first] = [pool.num_blocks] * first


def steps() -> list[list[int]]:
    """Returns each sequence's tokens per step: chunked prompts, single tokens, and both together."""
    rng, left = random.Random(5), [LONGEST, 90, 61, 7]
    found = []
    while any(left):
        sizes = [rng.choice((0, 1, 3, 31, 40)) if rng.random() < 0.5 else 1 for _ in left]
        found.append([min(size, most) for size, most in zip(sizes, left, strict=True)])
        left = [most - size for most, size in zip(left, found[-1], strict=True)]
    return [step for step in found if any(step)]


def computed(runner: ModelRunner) -> tuple[list[torch.Tensor], list[int]]:
    """Returns all tokens' logits per step, and the reported numbers of written layers."""
    requests = requests_of(len(runner.pools))
    found, told = [], list[int]()
    for at, sizes in enumerate(steps()):
        chunks = [(each, size) for each, size in zip(requests, sizes, strict=True) if size]
        step = runner.step_of(chunks)
        step.rows[:, 3] = step.rows[:, 0]  # all tokens' logits
        found.append(runner.compute(step, told.append if at % 2 else None).logits)
        for each, size in chunks:
            each.num_computed_tokens += size
            if len(runner.pools) > 1:
                pass_by(each, runner)
    return found, told


@pytest.mark.parametrize("architecture", CASES)
def test_bits_are_those_of_one_group(architecture: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = make_checkpoint(tmp_path / "model", architecture)
    one, two = (runner_of(folder, splits, monkeypatch, **CASES[architecture]) for splits in (False, True))
    if architecture == "qwen2":
        assert isinstance(two.model, FusedCausalLM)
        assert two.model.decoder is not None
    window = two.pools[1].layout
    assert (window.rule, window.window) == ("window", 24)
    assert sorted((*two.pool.layout.layers, *window.layers)) == list(range(one.pool.layout.num_layers))
    (expected, told), (found, also_told) = computed(one), computed(two)
    assert told == also_told
    assert all(torch.equal(ours, theirs) for ours, theirs in zip(found, expected, strict=True))
    assert all(logits.isfinite().all() for logits in found)
    before = [pool.flat().clone() for pool in two.pools]
    two.move([("copy", 1, 2, 1), ("clear", 1, 1, 1), ("copy", 3, 1, 0)])
    assert torch.equal(two.pools[1].flat()[2], before[1][1])
    assert not two.pools[1].flat()[1].any()
    assert torch.equal(two.pool.flat()[1], before[0][3])
    assert torch.equal(two.pool.flat()[2:], before[0][2:])
    two.sleep(1)
    assert not any(pool.flat()[: NUM_BLOCKS // 2].any() for pool in two.pools)
    for runner in (one, two):
        runner.let_go()
