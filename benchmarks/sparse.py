"""`python -m benchmarks engine --parts sparse`: compares sparse to dense latent attention, in a layer with V3.2's
widths.

Times indexing and attention together, for one token after a long context and for a prompt's last tokens. Values are
random. peers/gpu_sparse.py measures the same on a GPU.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator

import torch

from benchmarks.figures import begin, finish, result
from pd_cluster.kv.kv_layout import INDEX, KVLayout, latents
from pd_cluster.kv.kv_pool import KVPool
from pd_cluster.kv.pool_memory import TORCH_DTYPES
from pd_cluster.model.inputs.forward_batch import ForwardBatch, build_batch
from pd_cluster.model.kernels.cpu.ops import CpuOps
from pd_cluster.model.layers.attention.sparse_selection import IndexRows
from pd_cluster.model.layers.ops import Latents, Norm, Rope, SparseOps
from pd_cluster.result_tables import Report, Result
from pd_cluster.types import Request, RequestSpec, Sampling
from pd_cluster.wire import Plane

NAME, BLOCK_SIZE = "sparse", 16
NUM_HEADS, LATENT, ROPE, QUERY, VALUE = 128, 512, 64, 128, 128
INDEX_HEADS, INDEX_WIDTH = 64, 128
CONTEXT, PROMPT = 16_384, 64  # tokens of the context, and of a prompt's chunk
SHARE = 8  # one in this many keys is chosen, 2,048 in all
MOST_SHARE = 0.35


def run(rounds: int, threads: int, quick: bool, json: str) -> None:
    begin(json)
    torch.set_num_threads(threads)
    started_s, ops = time.monotonic(), CpuOps(has_latents=True)
    context = CONTEXT // 16 if quick else CONTEXT
    layout = layout_of("float32")
    found: list[dict[str, float]] = [{} for _ in range(rounds)]
    with KVPool(layout, context // BLOCK_SIZE) as pool:
        for plane in pool.memory.planes(0):
            plane.normal_()
        counts = {"decode": 1, "prefill": PROMPT}
        steps = {name: SparseStep(ops, pool, context, count) for name, count in counts.items()}
        for each in found:
            for name, step in steps.items():
                each |= {f"{name}_dense": _took_ms(step.dense), f"{name}_index": _took_ms(step.choose)}
                each[f"{name}_chosen"] = _took_ms(step.chosen)
    asked = f"--parts {NAME} --rounds {rounds} --threads {threads}{' --quick' * quick}"
    report = Report(f"python -m benchmarks engine {asked}", [*_results(found)])
    finish(report, f"{rounds} rounds, {threads} threads, {time.monotonic() - started_s:.0f} s", json, quick)


def layout_of(dtype: str) -> KVLayout:
    return KVLayout(1, 1, (*latents(LATENT, ROPE), Plane(INDEX, INDEX_WIDTH)), BLOCK_SIZE, dtype)


class SparseStep:
    """The last tokens of sequences in a layer. `dense`, `choose`, `chosen` are the calls that are timed."""

    def __init__(self, ops: SparseOps, pool: KVPool, context: int, num_tokens: int, num_seqs: int = 1) -> None:
        """`context`, `num_tokens`: the tokens of each sequence, and those of them in the step."""
        order, num_blocks, chunks = RequestSpec([5] * context, Sampling()), -(-context // BLOCK_SIZE), []
        for at in range(num_seqs):
            table = [*range(at * num_blocks, (at + 1) * num_blocks)]
            request = Request(f"{at}", order, num_computed_tokens=context - num_tokens, tables=[table])
            chunks.append((request, num_tokens))
        self._ops, self._batch = ops, build_batch(chunks, pool)
        device, dtype = pool.device.torch_name, TORCH_DTYPES[pool.layout.dtype]

        def randn(*shape: int) -> torch.Tensor:
            return torch.randn(shape, device=device).to(dtype)

        self._layer = Latents(
            layer_idx=0,
            norm=Norm(torch.ones(LATENT, device=device).to(dtype), 1e-6),
            keys=randn(NUM_HEADS, QUERY, LATENT) * LATENT**-0.5,
            values=randn(NUM_HEADS, LATENT, VALUE) * LATENT**-0.5,
            rope_width=ROPE,
            scaling=(QUERY + ROPE) ** -0.5,
        )
        rows = num_tokens * num_seqs
        self._queries, self._kept = randn(rows, NUM_HEADS * (QUERY + ROPE)), randn(rows, LATENT + ROPE)
        self._rope = Rope(*(torch.full((rows, ROPE), value, device=device).to(dtype) for value in (1.0, 0.0)))
        queries, weights, keys = (
            randn(rows, INDEX_HEADS, INDEX_WIDTH),
            randn(rows, INDEX_HEADS),
            randn(rows, INDEX_WIDTH),
        )
        self._rows = IndexRows(0, queries, weights.float(), keys, context // SHARE)
        self._chosen = ops.choose_keys(self._rows, self._rope, self._batch)

    def dense(self) -> None:
        self._attend(None)

    def choose(self) -> None:
        self._ops.choose_keys(self._rows, self._rope, self._batch)

    def chosen(self) -> None:
        self._attend(self._chosen)

    def _attend(self, chosen: torch.Tensor | None) -> None:
        batch: ForwardBatch = self._batch
        batch.chosen = chosen
        self._ops.attend_latents(self._layer, self._queries, self._kept, self._rope, batch)


def _took_ms(call: Callable[[], None]) -> float:
    start_s = time.perf_counter()
    call()
    return 1e3 * (time.perf_counter() - start_s)


def _results(rounds: list[dict[str, float]]) -> Iterator[Result]:
    for name in rounds[0]:
        yield result(name.replace("_", ", "), [each[name] for each in rounds], "ms", "lower")
    for step in ("decode", "prefill"):
        shares = [(each[f"{step}_index"] + each[f"{step}_chosen"]) / each[f"{step}_dense"] for each in rounds]
        yield result(f"{step}: index and chosen, share of dense", shares, "x", "lower", MOST_SHARE)
