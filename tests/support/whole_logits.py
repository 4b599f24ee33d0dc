"""Compares a model's logits with transformers': every row of a prompt computed in chunks, and a few decoded tokens.

transformers in float32 is the reference. Our error is compared with transformers' error in the model's precision.
"""

from __future__ import annotations

import functools
import gc
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import torch
from transformers import AutoModelForCausalLM

from pd_cluster.checkpoints.checkpoint import Checkpoint
from pd_cluster.devices.device import Device, reserved_nbytes
from pd_cluster.kv.kv_pool import KVPool
from pd_cluster.model.inputs.forward_batch import build_batch
from pd_cluster.model.language_model.cache_declaration import layout_of
from pd_cluster.model.loading import model_loader
from pd_cluster.types import Request, RequestSpec, Sampling

BLOCK_SIZE = 16


@dataclass(frozen=True, slots=True)
class LogitsError:
    """Errors of the worst rows: 1 - cosine similarity, and the largest difference over the true row's deviation."""

    off_cosine: float
    difference: float

    def is_within(self, other: LogitsError) -> bool:
        """Whether this error is at most twice the other one, because sums are in different orders."""
        return self.off_cosine <= 2 * other.off_cosine + 1e-6 and self.difference <= 2 * other.difference + 1e-4


def our_logits(
    folder: Path, device: Device, dtype: str, token_ids: list[int], chunks: list[int], speedups: Sequence[str]
) -> torch.Tensor:
    """Returns [num_tokens, vocab_size] float32 on the CPU; `chunks`: number of tokens in each step."""
    model = model_loader.load_model(
        Checkpoint.open(str(folder)), dtype, device, choices=model_loader.LoadChoices(speedups=speedups)
    )
    layout = layout_of(model.caches, BLOCK_SIZE, dtype)
    pool = KVPool(layout, layout.num_blocks_for(len(token_ids)), device)
    request = Request("logits", RequestSpec(token_ids, Sampling()), tables=[list(range(pool.num_blocks))[::-1]])
    found = []
    for num_tokens in chunks:
        batch = build_batch([(request, num_tokens)], pool)
        batch.sample_rows = torch.arange(num_tokens, device=batch.rope_positions.device)
        with torch.inference_mode():
            found.append(model(batch).float().cpu())
        request.num_computed_tokens += num_tokens
    assert request.num_computed_tokens == len(token_ids)
    return torch.cat(found)


def their_logits(folder: Path, device: Device, dtype: torch.dtype, token_ids: list[int]) -> torch.Tensor:
    model = AutoModelForCausalLM.from_pretrained(folder, dtype=dtype).to(device.torch_name)
    with torch.inference_mode():
        found: torch.Tensor = model(torch.tensor([token_ids], device=device.torch_name)).logits[0].float().cpu()
    del model
    gc.collect()
    if device.is_accelerator:
        reserved_nbytes(device)  # releases unused memory
    return found


def error_of(logits: torch.Tensor, truth: torch.Tensor) -> LogitsError:
    cosine = torch.nn.functional.cosine_similarity(logits.double(), truth.double(), dim=-1)
    difference = (logits - truth).abs().amax(-1) / truth.std(-1)
    return LogitsError(float((1 - cosine).max()), float(difference.max()))


@functools.cache
def references(
    folder: Path, device: Device, dtype: str, num_tokens: int
) -> tuple[list[int], torch.Tensor, torch.Tensor]:
    """Returns random token ids, and transformers' logits in float32 and in `dtype`."""
    vocab_size = Checkpoint.open(str(folder)).config["vocab_size"]
    generator = torch.Generator().manual_seed(17)
    token_ids = torch.randint(vocab_size, (num_tokens,), generator=generator).tolist()
    truth = their_logits(folder, device, torch.float32, token_ids)
    return token_ids, truth, their_logits(folder, device, getattr(torch, dtype), token_ids)


def errors(
    folder: Path, device: Device, dtype: str, chunks: list[int], speedups: Sequence[str] = ()
) -> tuple[LogitsError, LogitsError]:
    """Returns our error and transformers' error in the same precision; `chunks`: number of tokens in each step."""
    token_ids, truth, theirs = references(folder, device, dtype, sum(chunks))
    ours = our_logits(folder, device, dtype, token_ids, chunks, speedups)
    return error_of(ours, truth), error_of(theirs, truth)
