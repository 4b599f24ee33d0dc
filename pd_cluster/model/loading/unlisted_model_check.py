"""Additional checks of a model whose type is not listed and which is served because --try-unlisted names its type.

No test compares such a type with transformers, so more is checked at load: the whole config, the effect of packing the
modules, and sequences just longer than each length at which the computation may change. Contains no model types.
"""

from __future__ import annotations

import logging
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch

from pd_cluster.checkpoints.architectures import thresholds, why_not_by_fields
from pd_cluster.checkpoints.checkpoint import Checkpoint
from pd_cluster.devices.device import Device
from pd_cluster.errors import ModelError, called
from pd_cluster.kv.kv_layout import KVLayout
from pd_cluster.kv.kv_pool import KVPool
from pd_cluster.model.inputs.forward_batch import build_batch
from pd_cluster.model.language_model.causal_lm import PlainCausalLM
from pd_cluster.model.layers.packed_modules import pack_modules
from pd_cluster.model.layers.rope.rope_scaling import LengthRotary
from pd_cluster.model.loading.load_proof import check_same, own_logits, probe_token_ids, refusal
from pd_cluster.numerics import RopeScaling
from pd_cluster.types import Request, RequestSpec, Sampling

log = logging.getLogger(__name__)

NUM_BEYOND = 8  # tokens after the length
NUM_BEFORE = 4  # tokens before the length; their logits are also compared
COMPANY = 12  # tokens of a second sequence in the same steps
MOST_FLOP = {"cpu": 5e12}  # operations of all these sequences together: about a minute on few cores
MOST_FLOP_ELSEWHERE = 2e15
NOTHING_MORE = Sampling(max_tokens=0)  # positions may depend on the maximum number of tokens of a request
MOST_SCORES_NBYTES = 2 << 30  # memory of transformers' own attention in one layer


@contextmanager
def trial(checkpoint: Checkpoint) -> Iterator[None]:
    """Turns every failure of an unlisted type into a ModelError that names the type; ignores listed types."""
    try:
        yield
    except ModelError as error:
        if not checkpoint.is_unproven:
            raise
        raise ModelError(f"{_asked(checkpoint)}: the proof at load failed: {error.text}") from error
    except (TypeError, AttributeError, RuntimeError, LookupError, ValueError, AssertionError) as error:
        if not checkpoint.is_unproven:
            raise
        what = f"{type(error).__name__}: {error}"
        raise ModelError(f"{_asked(checkpoint)}: the proof at load failed: {what}") from error


def _asked(checkpoint: Checkpoint) -> str:
    return f"{called('try_unlisted')} {checkpoint.model_type}"


def check_fields(model: Any) -> None:
    """Checks the whole config, also the defaults of fields that config.json omits. Raises ModelError."""
    if reason := why_not_by_fields(model.config.to_dict(), bool(getattr(model, "_is_stateful", False))):
        raise ModelError(f"{model.config.model_type} {reason}")


def prove_packing(model: PlainCausalLM, device: Device, dtype: str) -> int:
    """Packs the model's modules and returns their number. Raises ModelError if that changes the logits.

    The later proof would not detect a change, because it compares packed modules with packed modules.
    """
    token_ids = probe_token_ids(model.config.vocab_size).to(device.torch_name)
    with torch.inference_mode(), refusal(model):
        expected = own_logits(model, token_ids)
        num_packed = pack_modules(model.model)
        check_same(own_logits(model, token_ids), expected, model, dtype, "with packed modules")
    return num_packed


@dataclass(frozen=True, slots=True)
class ConfigLengths:
    """The lengths in a config, each with its field: those that are checked at load, and those that take too long."""

    proven: dict[int, str]
    skipped: dict[int, str]

    @classmethod
    def of(cls, config: Any, num_weights: int, max_model_len: int, device: str, rope: RopeScaling) -> ConfigLengths:
        """Collects the lengths that a sequence can exceed. `num_weights`: the number of the model's parameters."""
        found = thresholds(config.to_dict())
        if rope.kind:
            found.setdefault(rope.reach, f"the reach of {rope.kind} positions,")
        proven: dict[int, str] = {}
        skipped: dict[int, str] = {}
        flop = MOST_FLOP.get(device, MOST_FLOP_ELSEWHERE)
        for length, name in sorted(found.items()):
            if length >= max_model_len:
                continue
            flop -= 2 * 2 * num_weights * (length + NUM_BEYOND)  # each sequence is computed in chunks and as a whole
            fits = 4 * config.num_attention_heads * (length + NUM_BEYOND) ** 2 <= MOST_SCORES_NBYTES
            (proven if fits and flop > 0 else skipped)[length] = name
        return cls(proven, skipped)


def prove_lengths(
    model: PlainCausalLM, pool: KVPool, max_model_len: int, num_weights: int, rope: RopeScaling, dtype: str
) -> None:
    """Raises ModelError unless sequences just longer than each length, computed in chunks, give the same logits as
    transformers alone.

    `dtype`: the dtype of the model and of the pools used here.
    """
    lengths = ConfigLengths.of(model.config, num_weights, max_model_len, pool.device.kind, rope)
    own = replace(pool.layout, dtype=dtype)
    for length, name in lengths.proven.items():
        num_tokens = min(length + NUM_BEYOND, max_model_len)
        where = f"beyond {name} {length}"
        _prove_length(model, own, pool.device, num_tokens, max(0, length - NUM_BEFORE), where)
    said = "".join(f", beyond {name} {length}" for length, name in lengths.proven.items())
    log.warning("unproven: %s: proven at load with 12 tokens%s", model.config.model_type, said)
    for length, name in lengths.skipped.items():
        log.warning(
            "unproven: %s: sequences beyond %s %d were not tried at load, which would have taken too long; "
            "--max-model-len %d keeps requests shorter",
            *(model.config.model_type, name, length, length),
        )


def _prove_length(
    model: PlainCausalLM, layout: KVLayout, device: Device, num_tokens: int, first: int, where: str
) -> None:
    """Compares the logits of tokens [first, num_tokens) of a sequence, and of a short sequence in the same steps."""
    block_size = layout.block_size
    num_blocks = [-(-n // block_size) for n in (num_tokens, COMPANY)]
    blocks = list(reversed(range(sum(num_blocks))))
    ids = probe_token_ids(model.config.vocab_size, 2 * num_tokens)
    requests = [
        Request("long", RequestSpec(ids[0].tolist(), NOTHING_MORE), tables=[blocks[: num_blocks[0]]]),
        Request("short", RequestSpec(ids[1, :COMPANY].tolist(), NOTHING_MORE), tables=[blocks[num_blocks[0] :]]),
    ]
    half = num_tokens // 2
    steps = [(half, 5), (num_tokens - half - 3, 4), (1, 1), (1, 1), (1, 1)]
    with KVPool(layout, sum(num_blocks), device=device) as small, torch.inference_mode(), refusal(model):
        found = _in_chunks(model, small, requests, steps, (first, 0))
        for actual, request, start in zip(found, requests, (first, 0), strict=True):
            token_ids = torch.tensor([request.prompt_token_ids], device=actual.device)
            rows = torch.arange(start, token_ids.shape[1], device=actual.device)
            with _own_positions(model):
                expected = own_logits(model, token_ids, rows)[0]
            check_same(actual, expected, model, layout.dtype, where)


@contextmanager
def _own_positions(model: PlainCausalLM) -> Iterator[None]:
    """Makes rotary embeddings scale like transformers: by the longest sequence of the forward pass."""
    rotaries = [module for module in model.model.modules() if isinstance(module, LengthRotary)]
    try:
        for rotary in rotaries:
            rotary.uses_transformers_rule = True
        yield
    finally:
        for rotary in rotaries:
            rotary.uses_transformers_rule = False


def _in_chunks(
    model: PlainCausalLM,
    pool: KVPool,
    requests: Sequence[Request],
    steps: Sequence[Sequence[int]],
    first: Sequence[int],
) -> list[torch.Tensor]:
    """Returns the logits of each request's tokens from `first` on."""
    parts: list[list[torch.Tensor]] = [[] for _ in requests]
    for step in steps:
        batch = build_batch(list(zip(requests, step, strict=True)), pool)
        rows: list[int] = []
        counts, at = [], 0
        for request, num_tokens, start in zip(requests, step, first, strict=True):
            skipped = min(num_tokens, max(0, start - request.num_computed_tokens))
            rows += range(at + skipped, at + num_tokens)
            counts.append(num_tokens - skipped)
            at += num_tokens
            request.num_computed_tokens += num_tokens
        batch.sample_rows = torch.tensor(rows, device=batch.slot_mapping.device)
        for part, logits in zip(parts, torch.split(model(batch), counts), strict=True):
            part.append(logits)
    return [torch.cat(part) for part in parts]
