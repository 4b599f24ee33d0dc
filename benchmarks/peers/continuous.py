"""transformers' continuous batching (`model.continuous_batching_context_manager`), greedy, paged SDPA attention."""

from __future__ import annotations

import time
from typing import Any

import torch
import transformers

from benchmarks.spec import PeerResult, Run, Spec, Workload, child_main

PAGE_SIZE = 32
MAX_BATCH_TOKENS = 2048
NO_RESULT_TIMEOUT_S = 120.0


def measure(spec: Spec) -> PeerResult:
    torch.set_num_threads(spec.num_threads)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        spec.model, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    return PeerResult(
        version=f"transformers {transformers.__version__}, torch {torch.__version__}",
        settings=f"paged sdpa, pages of {PAGE_SIZE} tokens, {MAX_BATCH_TOKENS} tokens a batch, no block sharing",
        runs={each.name: run(model, each) for each in [spec.warmup, *spec.workloads]},
    )


def run(model: Any, workload: Workload) -> Run:
    """Runs a workload. Making the manager and its cache is not counted."""
    most = max(len(p) + n for p, n in zip(workload.prompts, workload.output_lens, strict=True))
    config = transformers.ContinuousBatchingConfig(
        page_size=PAGE_SIZE,
        num_blocks=len(workload.prompts) * (-(-most // PAGE_SIZE) + 1),
        max_batch_tokens=MAX_BATCH_TOKENS,
        allow_block_sharing=False,
    )
    generation = transformers.GenerationConfig(
        do_sample=False, eos_token_id=-1, max_new_tokens=max(workload.output_lens)
    )
    with model.continuous_batching_context_manager(
        generation_config=generation, continuous_batching_config=config, timeout=10
    ) as manager:
        start_s = time.perf_counter()
        ids = [
            manager.add_request(prompt, max_new_tokens=num)
            for prompt, num in zip(workload.prompts, workload.output_lens, strict=True)
        ]
        outputs: dict[str, list[int]] = {}
        while len(outputs) < len(ids):
            result = manager.get_result(timeout=NO_RESULT_TIMEOUT_S)
            if result is None:
                raise RuntimeError(f"no result within {NO_RESULT_TIMEOUT_S:g} s, or the manager's thread ended")
            if result.error:
                raise RuntimeError(result.error)
            if result.is_finished():
                outputs[result.request_id] = list(result.generated_tokens)
        took_s = time.perf_counter() - start_s
    return Run(took_s, [outputs[each] for each in ids])


if __name__ == "__main__":
    child_main(measure)
