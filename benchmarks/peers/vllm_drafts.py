"""Decodes prompts with vLLM, without and with its n-gram drafts. Runs in a Python that has vLLM for CPUs.

    PYTHON vllm_drafts.py SPEC RESULT

Spec and result are JSON: see benchmarks/speculative.py. Knows nothing of pd_cluster. A time is the time of whole
answers minus the time of first tokens.
"""

import gc
import json
import sys
import time
from pathlib import Path
from typing import Any


def main() -> None:
    spec = json.loads(Path(sys.argv[1]).read_text())
    found = [decoded(spec, drafts) for drafts in (None, {"method": "ngram", **spec["ngram"]})]
    Path(sys.argv[2]).write_text(json.dumps(found))


def decoded(spec: dict[str, Any], drafts: dict[str, Any] | None) -> dict[str, Any]:
    """Returns seconds and answers of each round; the first round is not counted."""
    from vllm import LLM, SamplingParams  # type: ignore[import-not-found,unused-ignore]  # exists in that Python

    llm = LLM(
        spec["model"],
        skip_tokenizer_init=True,
        dtype="float32",
        max_model_len=spec["max_model_len"],
        enable_prefix_caching=False,
        speculative_config=drafts,
    )
    seconds, answers = [], []
    for prompts in spec["rounds"]:
        asked = [{"prompt_token_ids": prompt} for prompt in prompts]
        times = []
        for max_tokens in (1, spec["max_tokens"]):
            sampling = SamplingParams(temperature=0.0, max_tokens=max_tokens, ignore_eos=True, detokenize=False)
            started_s = time.perf_counter()
            outputs = llm.generate(asked, sampling, use_tqdm=False)
            times.append(time.perf_counter() - started_s)
        seconds.append(times[1] - times[0])
        answers.append([list(output.outputs[0].token_ids) for output in outputs])
    del llm
    gc.collect()
    return {"seconds": seconds[1:], "answers": answers[1:]}


if __name__ == "__main__":
    main()
