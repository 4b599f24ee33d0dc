"""vLLM for CPU with LoRA adapters, for `lora`: `python vllm_lora.py SPEC_FILE RESULT_FILE`, by its own Python.

Imports nothing of pd_cluster. A decode step is what one more token for every sequence takes, its sampling included, in
one process and without compiled graphs, which is how vLLM runs adapters on CPU.
"""

from __future__ import annotations

import json
import os
import sys
import time
from pathlib import Path
from typing import Any

NUM_STEPS = 16


def times_of(spec: dict[str, Any]) -> dict[str, Any]:
    """Returns seconds of a step without adapters and with as many as there are folders, and the version."""
    import vllm  # type: ignore[import-not-found]
    from vllm.lora.request import LoRARequest  # type: ignore[import-not-found]

    folders = spec["folders"]
    llm = vllm.LLM(
        model=spec["model"],
        dtype="float32",
        enable_lora=True,
        max_loras=len(folders),
        max_lora_rank=spec["rank"],
        max_model_len=spec["context"] + NUM_STEPS + 1,
        max_num_seqs=spec["batch"],
        max_num_batched_tokens=spec["batch"] * (spec["context"] + 1),
        enable_prefix_caching=False,
        enforce_eager=True,
        skip_tokenizer_init=True,
    )
    prompts = [
        {"prompt_token_ids": [1 + (row + at) % 1000 for at in range(spec["context"])]} for row in range(spec["batch"])
    ]
    adapters = [LoRARequest(str(at), at, folder) for at, folder in enumerate(folders, 1)]
    mixed = [adapters[row % len(adapters)] for row in range(spec["batch"])]

    def took_s(num_tokens: int, asked: Any) -> float:
        sampling = vllm.SamplingParams(max_tokens=num_tokens, temperature=0, ignore_eos=True, detokenize=False)
        begun_s = time.perf_counter()
        llm.generate(prompts, sampling, use_tqdm=False, lora_request=asked)
        return time.perf_counter() - begun_s

    least_s: dict[tuple[str, int], float] = {}
    for _ in range(spec["rounds"] + 1):  # the first one warms up, and is never the least
        for name, asked in (("none", None), ("adapters", mixed)):
            for num in (1, 1 + NUM_STEPS):
                least_s[name, num] = min(least_s.get((name, num), float("inf")), took_s(num, asked))
    step_s = {name: (least_s[name, 1 + NUM_STEPS] - least_s[name, 1]) / NUM_STEPS for name in ("none", "adapters")}
    return {"version": vllm.__version__, **step_s}


if __name__ == "__main__":
    given = json.loads(Path(sys.argv[1]).read_text())
    os.environ |= {
        "VLLM_CPU_KVCACHE_SPACE": "1",
        "VLLM_CPU_OMP_THREADS_BIND": ",".join(map(str, sorted(os.sched_getaffinity(0))[: given["threads"]])),
        "VLLM_ENABLE_V1_MULTIPROCESSING": "0",
        "VLLM_CACHE_ROOT": str(Path(sys.argv[2]).parent / "vllm-cache"),
        "VLLM_NO_USAGE_STATS": "1",
    }
    Path(sys.argv[2]).write_text(json.dumps(times_of(given)))
