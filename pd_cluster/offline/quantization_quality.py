"""Reads texts for calibration, and compares a quantized model to its original: perplexity and next tokens."""

from __future__ import annotations

import json
import math
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pd_cluster.errors import ConfigError
from pd_cluster.offline.llm_sampling import SamplingParams
from pd_cluster.offline.offline_llm import LLM
from pd_cluster.text.tokenizer import Tokenizer

Samples = list[list[int]]
TEXT_FIELDS = ("text", "prompt", "content")
LEAST_TOKENS = 2  # minimum number of tokens of a sample, so that at least one token is predicted


@dataclass(frozen=True, slots=True)
class Quality:
    """`logprobs` of the samples' tokens, and `chosen`, the most probable token at each position."""

    logprobs: list[float]
    chosen: list[int]

    @property
    def perplexity(self) -> float:
        return math.exp(-sum(self.logprobs) / len(self.logprobs))

    def agreement(self, other: Quality) -> float:
        """Returns the share of positions at which both models choose the same token."""
        pairs = list(zip(self.chosen, other.chosen, strict=True))
        return sum(own == others for own, others in pairs) / len(pairs)


def texts_of(file: Path, render: Any) -> list[str]:
    """Reads a text file, or JSON lines of texts or of conversations, which `render` converts. Raises ConfigError."""
    try:
        whole = file.read_text("utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--calibration {file}: cannot be read: {error}") from None
    if file.suffix != ".jsonl":
        return [whole]
    found = []
    for number, line in enumerate(whole.splitlines(), 1):
        if not line.strip():
            continue
        place = f"--calibration {file}: line {number}"
        try:
            entry = json.loads(line)
        except ValueError as error:
            raise ConfigError(f"{place}: not JSON: {error}") from None
        if isinstance(entry, str):
            found.append(entry)
        elif isinstance(entry, dict) and isinstance(entry.get("messages"), list):
            found.append(render(entry["messages"]))
        elif isinstance(entry, dict) and (name := next((n for n in TEXT_FIELDS if isinstance(entry.get(n), str)), "")):
            found.append(entry[name])
        else:
            raise ConfigError(f"{place}: expected a text, or an object with text or messages")
    return found


def samples_of(texts: list[str], encode: Any, num_samples: int, num_tokens: int) -> Samples:
    """Cuts texts into samples of at most `num_tokens` tokens. Raises ConfigError if there is none."""
    found: Samples = []
    for text in texts:
        ids = encode(text)
        found += [ids[start : start + num_tokens] for start in range(0, len(ids), num_tokens)]
        if len(found) >= num_samples:
            break
    found = [ids for ids in found[:num_samples] if len(ids) >= LEAST_TOKENS]
    if not found:
        raise ConfigError("--calibration: no text of two tokens or more")
    return found


def samples_of_file(file: Path, tokenizer: Tokenizer, folder: Path, num_samples: int, num_tokens: int) -> Samples:
    """Reads `--calibration` for the model of the folder. Raises ConfigError."""

    def render(messages: list[dict[str, object]]) -> str:
        if tokenizer.template is None:
            raise ConfigError(f"--calibration {file}: has conversations, but {folder} has no chat template; give texts")
        return tokenizer.template.render(messages, add_generation_prompt=False)

    return samples_of(texts_of(file, render), tokenizer.encode, num_samples, num_tokens)


def own_samples(llm: LLM, vocab_size: int, num_samples: int, num_tokens: int) -> Samples:
    """Lets the model generate texts, each after a different first token, and returns them as samples."""
    prompts = [[number * 7919 % vocab_size] for number in range(num_samples)]
    drawn = SamplingParams(temperature=1.0, max_tokens=num_tokens - 1, seed=0)
    outputs = llm.generate(prompt_token_ids=prompts, sampling_params=drawn, use_tqdm=False)
    found = [[*prompt, *output.outputs[0].token_ids] for prompt, output in zip(prompts, outputs, strict=True)]
    return [ids for ids in found if len(ids) >= LEAST_TOKENS]


def quality_of(llm: LLM, samples: Samples) -> Quality:
    """Evaluates each sample once."""
    reading = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)
    outputs = llm.generate(prompt_token_ids=samples, sampling_params=reading, use_tqdm=False)
    logprobs, chosen = [], []
    for ids, output in zip(samples, outputs, strict=True):
        for token_id, entries in zip(ids[1:], (output.prompt_logprobs or [])[1:], strict=True):
            assert entries is not None, "only the first token has no logprobs"
            logprobs.append(float(entries[token_id].logprob))
            chosen.append(next(each for each, entry in entries.items() if entry.rank == 1))
    return Quality(logprobs, chosen)
