"""Logits processors like an operator's; workers import this module by --logits-processors."""

from __future__ import annotations

import math
import time
from typing import Any

import torch

from pd_cluster.logits_processors import AdapterLogitsProcessor, LogitsProcessor

HERE = "tests.support.processors"
MODULUS = 251
STEP = 31


def rolled(state: int, token_id: int) -> int:
    return (state * STEP + token_id + 1) % MODULUS


def shifted(logits: torch.Tensor, state: int) -> torch.Tensor:
    """Raises logits of tokens chosen by `state`, so strongly that the model's own choice seldom wins."""
    return logits + 3.0 * ((torch.arange(len(logits), device=logits.device) * (state + 1)) % 7 == 3)


class OnlyOne(AdapterLogitsProcessor):
    """vLLM's own example: allows only the token extra_args["target"]."""

    @classmethod
    def validate_params(cls, sampling_params: Any) -> None:
        target = (sampling_params.extra_args or {}).get("target")
        if target is not None and not isinstance(target, int):
            raise ValueError(f"target {target!r} is not a token id")

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: Any) -> Any:
        target = (params.extra_args or {}).get("target")
        if target is None:
            return None

        def only(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
            kept = logits[target].item()
            logits[:] = -math.inf
            logits[target] = kept
            return logits

        return only


class ByTokens(AdapterLogitsProcessor):
    """Changes logits by a hash of all prompt and output tokens."""

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: Any) -> Any:
        if not (params.extra_args or {}).get("by_tokens", True):
            return None

        def process(prompt_ids: list[int], output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
            state = 0
            for token_id in (*prompt_ids, *output_ids):
                state = rolled(state, token_id)
            return shifted(logits, state)

        return process


class Rolling:
    """A batch processor without a base class, which updates a state with every output token."""

    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        assert vllm_config.scheduler_config.max_num_seqs == 1
        assert vllm_config.model_config.get_vocab_size() > 0
        self.state, self.num_seen, self.output = 0, 0, []

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: Any) -> None:
        if batch_update is not None:
            ((index, _, _, self.output),) = batch_update.added
            assert (index, batch_update.batch_size) == (0, 1)
        for token_id in self.output[self.num_seen :]:
            self.state = rolled(self.state, token_id)
        self.num_seen = len(self.output)

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        assert logits.shape[0] == 1
        return shifted(logits[0], self.state)[None]


class Fails(AdapterLogitsProcessor):
    """Raises at the output position extra_args["fails_at"] (-1: when the request begins), and never returns at the
    position extra_args["stays_at"].
    """

    def is_argmax_invariant(self) -> bool:
        return False

    def new_req_logits_processor(self, params: Any) -> Any:
        position = (params.extra_args or {}).get("fails_at")
        if position == -1:
            raise KeyError("begin")

        stays_at = (params.extra_args or {}).get("stays_at")

        def process(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
            if len(output_ids) == position:
                raise ZeroDivisionError(f"at {position}")
            while len(output_ids) == stays_at:
                time.sleep(60)
            return logits

        return None if position is None and stays_at is None else process


class Sharpens(AdapterLogitsProcessor):
    def is_argmax_invariant(self) -> bool:
        return True

    def new_req_logits_processor(self, params: Any) -> Any:
        return lambda output_ids, logits: logits.mul_(3.0)


class NeedsBatch(LogitsProcessor):
    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: Any) -> None:
        pass

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        return logits.mean(0)


class Bare:
    """Has none of the required methods."""


def a_function(output_ids: list[int], logits: torch.Tensor) -> torch.Tensor:
    return logits


class CannotBegin(LogitsProcessor):
    def __init__(self, vllm_config: Any, device: torch.device, is_pin_memory: bool) -> None:
        super().__init__(vllm_config, device, is_pin_memory)
        self.parallel = vllm_config.parallel_config

    def is_argmax_invariant(self) -> bool:
        return False

    def update_state(self, batch_update: Any) -> None:
        pass

    def apply(self, logits: torch.Tensor) -> torch.Tensor:
        return logits
