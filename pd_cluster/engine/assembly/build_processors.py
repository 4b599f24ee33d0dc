"""Builds the logits processors of an engine."""

from __future__ import annotations

import torch

from pd_cluster.logits_processors import ModelFacts, ProcessorConfig
from pd_cluster.model.runner.model_runner import ModelRunner
from pd_cluster.model.sampling.load_processors import load_processors
from pd_cluster.model.sampling.request_processors import NO_PROCESSORS, RequestProcessors
from pd_cluster.settings.engine_config import EngineConfig


def processors_of(config: EngineConfig, runner: ModelRunner) -> RequestProcessors:
    """Loads the operator's logits processors. Raises ConfigError."""
    if not config.logits_processors:
        return NO_PROCESSORS
    facts = ModelFacts(
        model=config.model,
        tokenizer=str(runner.tokenizer_file),
        dtype=runner.numerics.dtype,
        max_model_len=runner.max_model_len,
        vocab_size=runner.vocab_size,
    )
    device = torch.device(runner.device.torch_name)
    loaded = load_processors(config.logits_processors, ProcessorConfig(model_config=facts), device)
    return RequestProcessors(loaded, runner.eos_token_ids)
