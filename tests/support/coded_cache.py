"""transformers' cache rounded like a quantized pool, and the tokens generated with it."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from transformers import DynamicCache

from pd_cluster.kv.kv_vectors import decode, encode
from tests.support.checkpoints import reference_model


class CacheOf(DynamicCache):
    """transformers' cache in which every vector is rounded as in a pool of this dtype."""

    def __init__(self, dtype: str) -> None:
        super().__init__()
        self.pool_dtype = dtype

    def update(self, keys: torch.Tensor, values: torch.Tensor, *others: Any, **named: Any) -> Any:
        rounded = (decode(encode(x, self.pool_dtype), self.pool_dtype).to(x.dtype) for x in (keys, values))
        return super().update(*rounded, *others, **named)


def generated(folder: Path, dtype: str, prompts: list[list[int]], num_tokens: int) -> list[list[int]]:
    """Returns transformers' greedy tokens for each prompt."""
    model, found = reference_model(folder), []
    for prompt in prompts:
        with torch.inference_mode():
            output = model.generate(
                torch.tensor([prompt]),
                past_key_values=CacheOf(dtype),
                max_new_tokens=num_tokens,
                min_new_tokens=num_tokens,
            )
        found.append(output[0, len(prompt) :].tolist())
    return found
