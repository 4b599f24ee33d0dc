"""A workload through the offline service: completions with token ids in and out, all submitted at once."""

from __future__ import annotations

import asyncio
import time

from benchmarks.spec import Run, Spec, Workload
from pd_cluster.offline.session import Offline
from pd_cluster.service.schema.protocol import CompletionRequest
from pd_cluster.service.service import TextService
from pd_cluster.settings.engine import EngineConfig

BLOCK_SIZE = 16


def engine_config(spec: Spec) -> EngineConfig:
    """Returns the configuration of every contender: room for all requests at once, no prefixes cached."""
    lens = [
        len(prompt) + num
        for each in [spec.warmup, *spec.workloads]
        for prompt, num in zip(each.prompts, each.output_lens, strict=True)
    ]
    return EngineConfig(
        model=spec.model,
        dtype="float32",
        device="cpu",
        block_size=BLOCK_SIZE,
        num_blocks=sum(-(-length // BLOCK_SIZE) + 1 for length in lens),
        enable_prefix_caching=False,
    )


def run(offline: Offline, workload: Workload) -> Run:
    start_s = time.perf_counter()
    outputs = offline.run(_all_outputs(offline.service, workload))
    return Run(time.perf_counter() - start_s, outputs)


async def _all_outputs(service: TextService, workload: Workload) -> list[list[int]]:
    pairs = zip(workload.prompts, workload.output_lens, strict=True)
    return await asyncio.gather(*[_output(service, prompt, num, workload.name) for prompt, num in pairs])


async def _output(service: TextService, prompt: list[int], num_tokens: int, batch: str) -> list[int]:
    request = CompletionRequest(
        prompt=prompt, max_tokens=num_tokens, temperature=0.0, ignore_eos=True, return_token_ids=True
    )
    generation = await service.completion(request, prompt)
    generation.amend(batch=batch)
    (piece,) = await service.complete([generation])
    return piece.token_ids
