"""Two references for beam search: transformers' `generate()`, and a search over all continuations of every beam."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path

import torch

from pd_cluster.types import Sampling
from tests.support.checkpoints import padded_left, reference_model, until_end

TOLERANCE = 1e-4  # of a hypothesis' score; rounding may reorder closer hypotheses


def generate_beams(folder: Path, prompt: list[int], sampling: Sampling) -> list[list[int]]:
    """Returns transformers' best hypotheses, each up to and including its end token."""
    return generate_beams_together(folder, [prompt], sampling)[0]


def generate_beams_together(folder: Path, prompts: list[list[int]], sampling: Sampling) -> list[list[list[int]]]:
    """Like `generate_beams`, for all prompts in one generate(); left padding may change the last bits."""
    model, padded = reference_model(folder), padded_left(prompts)
    ends = {*sampling.stop_token_ids, *(() if sampling.ignore_eos else eos_of(folder))}
    with one_thread(), torch.inference_mode():
        output = model.generate(
            **padded,
            max_new_tokens=sampling.max_tokens,
            do_sample=False,
            num_beams=sampling.beam_width,
            num_return_sequences=sampling.n,
            length_penalty=sampling.length_penalty,
            early_stopping=sampling.early_stopping,
            eos_token_id=sorted(ends) or [-1],
            pad_token_id=0,
        )  # [num_prompts * n, longest + max_tokens]
    rows = [until_end(row, ends) for row in output[:, padded["input_ids"].shape[1] :].tolist()]
    return [rows[at : at + sampling.n] for at in range(0, len(rows), sampling.n)]


@contextlib.contextmanager
def one_thread() -> Iterator[None]:
    """Limits torch to one thread, because threads slow down a tiny model's many small operations on busy cores."""
    num_threads = torch.get_num_threads()
    torch.set_num_threads(1)
    try:
        yield
    finally:
        torch.set_num_threads(num_threads)


def eos_of(folder: Path) -> set[int]:
    ids = reference_model(folder).generation_config.eos_token_id
    return set(ids) if isinstance(ids, list) else {ids}


def assert_same_beams(folder: Path, prompt: list[int], found: list[list[int]], sampling: Sampling) -> None:
    """Asserts the reference's hypotheses, except where scores differ by less than TOLERANCE."""
    expected = generate_beams(folder, prompt, sampling)
    assert len(found) == len(expected)
    for at, (ours, theirs) in enumerate(zip(found, expected, strict=True)):
        if ours != theirs:
            scores = [score_of(folder, prompt, tokens, sampling.length_penalty) for tokens in (ours, theirs)]
            assert abs(scores[0] - scores[1]) < TOLERANCE, (
                f"hypothesis {at} of {sampling} after {len(prompt)} tokens is {ours} ({scores[0]:.5f}) instead of "
                f"{theirs} ({scores[1]:.5f})"
            )


def assert_all_same_beams(
    folder: Path, prompts: list[list[int]], found: list[list[list[int]]], sampling: Sampling
) -> None:
    """Like `assert_same_beams`, for many prompts; where the batched reference differs, computes the prompt alone."""
    together = generate_beams_together(folder, prompts, sampling)
    for prompt, ours, theirs in zip(prompts, found, together, strict=True):
        if ours != theirs:
            assert_same_beams(folder, prompt, ours, sampling)


def score_of(folder: Path, prompt: list[int], tokens: list[int], length_penalty: float) -> float:
    with torch.inference_mode():
        logprobs = reference_model(folder)(torch.tensor([prompt + tokens])).logits[0].double().log_softmax(-1)
    total = sum(float(logprobs[len(prompt) - 1 + at, token]) for at, token in enumerate(tokens))
    return float(total / len(tokens) ** length_penalty)


def search_everything(
    logprobs_after: Callable[[tuple[int, ...]], Sequence[float]], params: Sampling, ends: set[int]
) -> list[list[int]]:
    """Applies beam search's rules to the whole vocabulary and whole sequences; -inf excludes a token."""
    width, penalty = params.beam_width, params.length_penalty
    live: list[tuple[float, tuple[int, ...]]] = [(0.0, ())]
    done: list[tuple[float, tuple[int, ...]]] = []
    for length in range(1, params.max_tokens + 1):
        ranked = []
        for rank, (total, tokens) in enumerate(live):
            for token, logprob in enumerate(logprobs_after(tokens)):
                if logprob > float("-inf"):
                    ranked.append((-(total + logprob), rank, token, (*tokens, token)))
        ranked.sort()
        for place, (negated, _, token, tokens) in enumerate(ranked):
            if place < width and (token in ends or length == params.max_tokens):
                done.append((-negated / length**penalty, tokens))
        done = sorted(done, key=lambda each: -each[0])[:width]
        live = [(-negated, tokens) for negated, _, token, tokens in ranked if token not in ends][:width]
        if not live or length == params.max_tokens:
            break
        if len(done) == width:
            reach = params.max_tokens if params.early_stopping == "never" and penalty > 0 else length
            if params.early_stopping is True or live[0][0] / reach**penalty <= done[-1][0]:
                break
    best = [list(tokens) for _, tokens in done[: params.n]]
    return best + best[-1:] * (params.n - len(best))
