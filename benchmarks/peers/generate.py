"""transformers' generate(): padded batches of 32 in arrival order, greedy, SDPA attention.

It is the reference for tokens, and the usual baseline. A batch runs until its longest output ends; surplus tokens of
shorter outputs are not counted.
"""

from __future__ import annotations

import time
from typing import Any

import torch
import transformers

from benchmarks.engine_messages import PeerResult, Run, Spec, Workload, child_main
from benchmarks.model_shapes import EOS_ID

PAD_ID = EOS_ID - 2


def measure(spec: Spec) -> PeerResult:
    torch.set_num_threads(spec.num_threads)
    model = transformers.AutoModelForCausalLM.from_pretrained(
        spec.model, dtype=torch.float32, attn_implementation="sdpa"
    ).eval()
    model.generation_config.eos_token_id = None
    every = [spec.warmup, *spec.workloads]
    return PeerResult(runs={each.name: run(model, each, spec.batch_size) for each in every})


def run(model: Any, workload: Workload, batch_size: int) -> Run:
    start_s = time.perf_counter()
    outputs: list[list[int]] = []
    for first in range(0, len(workload.prompts), batch_size):
        last = first + batch_size
        outputs += generate(model, workload.prompts[first:last], workload.output_lens[first:last])
    return Run(time.perf_counter() - start_s, outputs)


def generate(model: Any, prompts: list[list[int]], output_lens: list[int]) -> list[list[int]]:
    """Generates one padded batch, until its longest output ends."""
    width = max(map(len, prompts))
    input_ids = torch.tensor([[PAD_ID] * (width - len(prompt)) + prompt for prompt in prompts])  # [batch, width]
    mask = torch.tensor([[0] * (width - len(prompt)) + [1] * len(prompt) for prompt in prompts])
    with torch.inference_mode():
        sequences = model.generate(
            input_ids=input_ids,
            attention_mask=mask,
            max_new_tokens=max(output_lens),
            do_sample=False,
            pad_token_id=PAD_ID,
        )
    return [row[width : width + num].tolist() for row, num in zip(sequences, output_lens, strict=True)]


if __name__ == "__main__":
    child_main(measure)
