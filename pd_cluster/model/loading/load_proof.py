"""Checks a loaded model before it serves: every layer uses the pool, and the results equal those of transformers.

transformers passes the registered attention function to many architectures. Some of them ignore it, and some pass it
less information than their own masks contain. Such a model would give wrong answers, so it is refused here.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import replace
from typing import Any, NamedTuple

import torch

from pd_cluster.devices.device import CPU, Device
from pd_cluster.errors import ModelError
from pd_cluster.kv.kv_layout import KVLayout
from pd_cluster.kv.kv_pool import KVPool
from pd_cluster.model.inputs.forward_batch import ForwardBatch, build_batch
from pd_cluster.model.inputs.state_rows import StateRows, segments_of
from pd_cluster.model.language_model.causal_lm import CausalLM, PlainCausalLM
from pd_cluster.model.language_model.fused_lm import FusedCausalLM
from pd_cluster.model.layers.attention import sdpa
from pd_cluster.model.layers.states.state_planes import state_modules
from pd_cluster.types import Request, RequestSpec, Sampling

BLOCK_SIZE = 4
# Replaces larger sliding windows, and larger numbers of keys that an indexer chooses: the few tokens of the proof would
# not exceed them.
WINDOW = 3
SHORTENED = ("sliding_window", "index_topk")
# Recurrent modules scan at most 64 tokens together during the proof, so that the steps cross a boundary between scans.
SCAN, MOST_SCANNED = "chunk_size", 64
ROUNDED = "int8"  # the bound if activations are rounded to codes, since their last bits can change a code
# The tolerated relative difference of a row of logits; in float32, correct rows differ by about 1e-6.
TOLERANCE = {"float32": 1e-3, "bfloat16": 0.1, "float16": 0.1, ROUNDED: 0.25}
# The share of rows that may exceed TOLERANCE: in 16 bits a router may choose another expert, which changes everything
# after it. In a model that ignores its past, or reads a wrong one, at least half the rows are wrong.
SPARED_ROWS = {"float32": 0.0, "bfloat16": 0.25, "float16": 0.25, ROUNDED: 0.25}


class ProofSchedule(NamedTuple):
    """How the proof computes two sequences: an entry of `steps` has each sequence's number of tokens in a step.

    If `kept` is not 0, the first sequence's state after `kept` tokens is copied, and a third sequence continues from
    the copy.
    """

    steps: tuple[tuple[int, int], ...]
    kept: int = 0

    @property
    def num_tokens(self) -> int:
        """Returns the number of tokens of one sequence."""
        return sum(first for first, _ in self.steps)


KEYS = ProofSchedule(((5, 7), (6, 4), (1, 1)))
STATES = ProofSchedule(
    ((64, 1), (65, 67), (1, 62), (1, 1)), kept=68
)  # recurrent modules scan 64 tokens at a time; the state is copied in the middle of a scan


def prove(model: CausalLM, pools: KVPool | Sequence[KVPool], dtype: str) -> int | None:
    """Raises ModelError for a model that must not be served; also warms up. `dtype`: the model's dtype.

    `pools`: one for each group of the model's layers. Returns the sliding window that all layers share; None if a layer
    attends to all tokens, or if the windows differ.
    """
    pools = [pools] if isinstance(pools, KVPool) else list(pools)
    windows = prove_every_layer_writes(model, pools)
    if isinstance(model, PlainCausalLM):  # fused layers were compared with such a model when they were made
        prove_same_logits(model, pools, dtype)
    return windows.pop() if len(windows) == 1 else None


def prove_every_layer_writes(model: CausalLM, pools: KVPool | Sequence[KVPool]) -> set[int | None]:
    """Raises ModelError unless each layer wrote to its pool once, in ascending order; returns the layers' windows.

    Layers write either keys and values or a state. The written blocks are the padding blocks.
    """
    pools = [pools] if isinstance(pools, KVPool) else list(pools)
    probe = Request("probe", RequestSpec([0, 0], Sampling()), tables=[[pool.num_blocks] for pool in pools])
    if pools[0].layout.block_size < 2:
        probe.prompt_token_ids = [0]
    batch = probe_batch([(probe, probe.num_tokens)], pools)
    with torch.inference_mode(), refusal(model):
        model(batch)
    for written, what in ((batch.layers_written, "KV"), (batch.states_written, "state")):
        own = [pool.layout for pool in pools if pool.layout.holds.is_state == (what == "state")]
        wanted = sorted(layer for layout in own for layer in _layers_of(layout))
        if written != wanted:
            each = len(wanted) if wanted == list(range(len(wanted))) else wanted
            raise ModelError(
                f"{_name(model)}: layers {written} wrote to the {what} pool, but each of {each} must do so once, in "
                f"order; this architecture cannot be served"
            )
    return batch.windows


def _layers_of(layout: KVLayout) -> Sequence[int]:
    """Returns the indexes of the model's layers in a group, without the draft head's layer."""
    return (layout.layers or range(layout.num_layers))[: layout.num_model_layers]


def probe_batch(
    chunks: list[tuple[Request, int]], pools: Sequence[KVPool], keeps: Sequence[tuple[int, int, int]] = ()
) -> ForwardBatch:
    """Builds a step over the pools of all groups; `keeps`: see segments_of."""
    batch = build_batch(chunks, pools[0], pools[1:])
    for group, pool in enumerate(pools):
        if keeps and pool.layout.holds.is_state:
            blocks = [request.tables[group][0] for request, _ in chunks]
            batch.states = StateRows.of(pool, segments_of([num for _, num in chunks], blocks, keeps))
    return batch


def prove_same_logits(model: PlainCausalLM, pools: Sequence[KVPool], dtype: str) -> None:
    """Raises ModelError unless two prompts, in chunks through small pools, give the same logits as transformers alone.

    Pools of keys and values have the model's dtype, because quantized pools would change the results. A row's mean is
    subtracted, because it carries no information.
    """
    layouts = [pool.layout if pool.layout.holds.is_state else replace(pool.layout, dtype=dtype) for pool in pools]
    course = STATES if any(layout.holds.is_state for layout in layouts) else KEYS
    token_ids = probe_token_ids(model.config.vocab_size, 2 * course.num_tokens)
    bound = ROUNDED if model.rounds_activations else dtype
    with torch.inference_mode(), refusal(model), _all_shortened(model):
        actual = _in_chunks(model, layouts, pools[0].device, token_ids.tolist(), course)
        expected = own_logits(model, token_ids.to(pools[0].device.torch_name))
    check_same(torch.stack(actual[:2]), expected, model, bound)
    for resumed in actual[2:]:
        check_same(resumed, expected[0, course.kept :], model, bound, "from a kept state")


def transformers_logits(model: PlainCausalLM, course: ProofSchedule = KEYS, device: Device = CPU) -> torch.Tensor:
    """Returns logits of the schedule's sequences from transformers alone: two prompts, and the third sequence if the
    schedule has one.

    In KEYS, most tokens have more keys than WINDOW.
    """
    token_ids = probe_token_ids(model.config.vocab_size, 2 * course.num_tokens)
    with torch.inference_mode(), refusal(model), _shortened(model.model.modules() if course is KEYS else ()):
        logits = own_logits(model, token_ids.to(device.torch_name))
    continued = logits[:1, course.kept :] if course.kept else logits[:0]
    return torch.cat((*logits, *continued)).float()


def fused_logits(
    model: FusedCausalLM, layouts: Sequence[KVLayout], course: ProofSchedule = KEYS, device: Device = CPU
) -> torch.Tensor:
    """Returns the logits of the same sequences from fused layers, in chunks through pools. The pools have the given
    layouts, perhaps with smaller blocks.
    """
    token_ids = probe_token_ids(model.config.vocab_size, 2 * course.num_tokens)
    with torch.inference_mode(), _shortened(model.indexers if course is KEYS else ()):
        return torch.cat(_in_chunks(model, layouts, device, token_ids.tolist(), course)).float()


def own_logits(model: PlainCausalLM, token_ids: torch.Tensor, rows: torch.Tensor | int = 0) -> torch.Tensor:
    """Returns the logits of `rows` of each sequence from transformers alone, without a cache; 0 means all rows."""
    with _eager(model.model):
        return model.whole(model.model(input_ids=token_ids, use_cache=False, logits_to_keep=rows).logits)


def check_same(
    actual: torch.Tensor, expected: torch.Tensor, model: PlainCausalLM, dtype: str, where: str = "with paged attention"
) -> None:
    """Raises ModelError unless rows of logits [..., vocab_size] are equal within the tolerance of the dtype."""
    check_finite(expected, _name(model), dtype)
    expected, actual = _centred(expected), _centred(actual)
    errors = ((actual - expected).norm(dim=-1) / expected.norm(dim=-1)).flatten().sort().values  # of each row
    error = float(errors[-1 - int(len(errors) * SPARED_ROWS[dtype])])
    if not error <= TOLERANCE[dtype]:
        raise ModelError(
            f"{_name(model)}: {where} the logits differ from transformers' own by {error:.1e} of their "
            f"size; this architecture cannot be served"
        )


def check_finite(logits: torch.Tensor, model: str, dtype: str) -> None:
    """Raises ModelError if the logits are not finite: no other kernels could change that."""
    if not logits.isfinite().all():
        raise ModelError(
            f"{model}: the logits in {dtype} contain NaN or infinity: either the weights contain them, or "
            f"the range of {dtype} is too small"
        )


def _centred(logits: torch.Tensor) -> torch.Tensor:
    logits = logits.float()
    return logits - logits.mean(-1, keepdim=True)


def probe_token_ids(vocab_size: int, num_tokens: int = 2 * KEYS.num_tokens) -> torch.Tensor:
    """Returns ids [2, num_tokens / 2], spread over the vocabulary."""
    return (torch.arange(num_tokens) * 7919 % vocab_size).view(2, -1)


def _in_chunks(
    model: CausalLM, layouts: Sequence[KVLayout], device: Device, token_ids: list[list[int]], course: ProofSchedule
) -> list[torch.Tensor]:
    """Returns the logits [course.num_tokens, vocab_size] of two sequences, computed in chunks through small pools.

    If the schedule has a third sequence, its logits follow, from the token after the copied state.
    """
    per_seq = -(-course.num_tokens // BLOCK_SIZE)
    with ExitStack() as stack:
        pools = list[KVPool]()
        for layout in layouts:
            is_state = layout.holds.is_state
            small = layout if is_state else _in_small_blocks(layout, device)
            pools.append(stack.enter_context(KVPool(small, 4 if is_state else 3 * per_seq, device)))
        tables = [[3 * at + seq for at in reversed(range(per_seq))] for seq in range(3)]
        requests = [
            Request(
                f"probe {seq}", RequestSpec(ids, Sampling()), tables=[_table(pool, tables[seq], seq) for pool in pools]
            )
            for seq, ids in enumerate((*token_ids, token_ids[0]))
        ]
        found = _steps(model, pools, requests[:2], course)
        if course.kept:
            third, num_shared = requests[2], course.kept // BLOCK_SIZE
            third.num_computed_tokens = course.kept
            for table, of in zip(third.tables, requests[0].tables, strict=True):
                if len(table) > 1:
                    table[:num_shared] = of[:num_shared]
            found += [_all_logits(model, probe_batch([(third, course.num_tokens - course.kept)], pools))]
    return found


def _in_small_blocks(layout: KVLayout, device: Device) -> KVLayout:
    """Returns the layout with blocks so small that the proof's sequences have several, if attention supports these."""
    takes_any = device.traits.runs_triton or not device.is_accelerator
    return replace(layout, block_size=BLOCK_SIZE) if takes_any else layout


def _table(pool: KVPool, blocks: list[int], seq: int) -> list[int]:
    """Returns a sequence's block table in a pool: its blocks, or the block of its state."""
    return [seq + 1] if pool.layout.holds.is_state else list(blocks)


def _steps(
    model: CausalLM, pools: Sequence[KVPool], requests: list[Request], course: ProofSchedule
) -> list[torch.Tensor]:
    """Computes the steps of two sequences; copies the first one's state to the block of the third."""
    rows: list[list[torch.Tensor]] = [[], []]
    for step in course.steps:
        after = course.kept - requests[0].num_computed_tokens
        keeps = [(0, after, 3)] if 0 < after <= step[0] else []
        batch = probe_batch(list(zip(requests, step, strict=True)), pools, keeps)
        for i, part in enumerate(torch.split(_all_logits(model, batch), list(step))):
            rows[i].append(part)
            requests[i].num_computed_tokens += step[i]
    return [torch.cat(parts) for parts in rows]


def _all_logits(model: CausalLM, batch: ForwardBatch) -> torch.Tensor:
    batch.sample_rows = torch.arange(batch.num_tokens, device=batch.slot_mapping.device)
    return model(batch)


@contextmanager
def refusal(model: CausalLM) -> Iterator[None]:
    """Raises ModelError in place of the errors that an unknown architecture's own code may raise."""
    try:
        yield
    except torch.OutOfMemoryError as error:
        raise ModelError(f"{_name(model)}: the proof at load does not fit the device's memory: {error}") from error
    except (TypeError, AttributeError, RuntimeError, IndexError, AssertionError) as error:
        raise ModelError(f"{_name(model)} cannot run with paged attention: {error!r}") from error


@contextmanager
def _shortened(owners: Iterable[Any], names: Sequence[str] = SHORTENED, most: int = WINDOW) -> Iterator[None]:
    """Sets every sliding window to `most`, both in the configs, which determine transformers' masks, and in modules.

    Also sets the other fields in `names`, such as the number of keys that indexers choose.
    """
    values = [(owner, name, getattr(owner, name, None)) for owner in owners for name in names]
    values = [each for each in values if isinstance(each[2], int)]
    try:
        for owner, name, _ in values:
            setattr(owner, name, most)
        yield
    finally:
        for owner, name, value in values:
            setattr(owner, name, value)


@contextmanager
def _all_shortened(model: PlainCausalLM) -> Iterator[None]:
    """Shortens every length that the few tokens of the proof would not exceed."""
    scans = state_modules(model.model).values()
    with _shortened([*model.model.modules(), *_configs(model.model)]), _shortened(scans, (SCAN,), MOST_SCANNED):
        yield


@contextmanager
def _eager(model: torch.nn.Module) -> Iterator[None]:
    """Makes the model use transformers' own attention and masks."""
    configs = _configs(model)
    try:
        for config in configs:
            config._attn_implementation = "eager"
        yield
    finally:
        for config in configs:
            config._attn_implementation = sdpa.NAME


def _configs(model: torch.nn.Module) -> list[Any]:
    """Returns the configs of the model and its modules, without duplicates."""
    found = {id(module.config): module.config for module in model.modules() if hasattr(module, "config")}
    return list(found.values())


def _name(model: CausalLM) -> str:
    return str(model.config.model_type)
