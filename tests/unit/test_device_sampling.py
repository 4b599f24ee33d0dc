"""Sampling on the device chooses the same tokens as on the host."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest
import torch
from numpy.typing import NDArray

from pd_cluster.devices.device import CPU, Device
from pd_cluster.model.inputs.forward_batch import packed
from pd_cluster.model.sampling import device_sampling as choice
from pd_cluster.model.sampling.device_sampling import choose, tell
from pd_cluster.model.sampling.device_tokens import DeviceTokens
from pd_cluster.model.sampling.sampler import Sampler, SamplingRow
from pd_cluster.types import Request, RequestSpec, Sampling

EOS = frozenset({0})


def random_changes(rng: random.Random, vocab_size: int) -> dict[str, Any]:
    """Draws masks, biases and penalties, including meaningless ones."""
    ids = [-3, vocab_size + 2, *range(vocab_size)]
    some = [tuple(rng.choices(ids, k=rng.randrange(1, 8))) for _ in range(4)]
    values = [5.0, -5.0, 0.1, 1e-7, 100.0, -math.inf, math.inf, math.nan, 3e38]
    words = [tuple(random_tokens(rng, rng.randrange(1, 4), vocab_size)) for _ in range(8)]
    changes: dict[str, Any] = {
        "allowed_token_ids": rng.choice([some[0], (vocab_size,)]),
        "bad_words": rng.choice([tuple((i,) for i in some[1]), tuple((i,) for i in some[0]), (*words, words[0])]),
        "logit_bias": tuple((i, rng.choice(values)) for i in some[2]),
        "min_tokens": rng.randrange(1, 12),
        "presence_penalty": rng.choice([0.5, -0.5, math.inf]),
        "frequency_penalty": rng.choice([0.3, -0.3]),
        "repetition_penalty": rng.choice([1.7, 0.6, 0.0]),
    }
    names = rng.sample(list(changes), rng.randrange(1, 4))
    return {"stop_token_ids": some[3], **{name: changes[name] for name in names}}


def random_tokens(rng: random.Random, num: int, vocab_size: int) -> list[int]:
    """Draws tokens with few different values."""
    return [rng.randrange(min(5, vocab_size)) for _ in range(num)]


def sequences(rng: random.Random, num: int, vocab_size: int, share_changed: float = 0.0) -> list[Request]:
    found = []
    for i in range(num):
        params = Sampling(
            temperature=rng.choice([0.0, 0.3, 1.0, 2.5]),
            min_p=rng.choice([0.0, 0.0, 0.02, 0.5]),
            top_k=rng.choice([-1, -1, 1, 3, 50, 200, 3000]),
            top_p=rng.choice([1.0, 1.0, 0.95, 0.5, 1e-6]),
            seed=rng.randrange(1 << 40),
            logprobs=rng.choice([None, None, 0, 1, 4, 20, 500]),
            logprob_token_ids=tuple(rng.sample(range(vocab_size), rng.choice([0, 0, 1, 3]))),
            **(random_changes(rng, vocab_size) if rng.random() < share_changed else {}),
        )
        prompt, output = (random_tokens(rng, rng.randrange(1, 9), vocab_size) for _ in range(2))
        found.append(Request(str(i), RequestSpec(prompt, params), index=rng.randrange(3), output_token_ids=output))
    return found


def knowing(requests: list[Request], last_ids: torch.Tensor | None) -> list[SamplingRow]:
    """Returns the host's rows with the last tokens filled in."""
    rows = []
    for i, request in enumerate(requests):
        last = [] if last_ids is None else [int(last_ids[i])]
        known = replace(request, output_token_ids=request.output_token_ids + last)
        rows.append(SamplingRow(known, known.index, len(known.output_token_ids)))
    return rows


def random_logits(rng: random.Random, seed: int, vocab_size: int) -> torch.Tensor:
    """Returns [12, vocab_size] logits; often many are equal, and some rows define no distribution."""
    logits = torch.randn(12, vocab_size, generator=torch.Generator().manual_seed(seed)) * rng.choice([0.5, 3.0, 20.0])
    if seed % 3 == 0:
        logits = logits.round()
    if seed % 7 == 0:
        logits[rng.randrange(12), rng.randrange(vocab_size)] = rng.choice([math.nan, math.inf])
        logits[rng.randrange(12)] = rng.choice([-math.inf, math.nan])
    return logits


@pytest.mark.parametrize("share_changed", [0.0, 0.5, 1.0])
@pytest.mark.parametrize("vocab_size", [5, 1000, 4099])
@pytest.mark.parametrize("is_ahead", [False, True])
def test_the_device_chooses_what_the_host_chooses(vocab_size: int, is_ahead: bool, share_changed: float) -> None:
    """The device chooses the host's tokens and reports the same logprobs, to the last bit."""
    rng = random.Random(vocab_size)
    sampler = Sampler(vocab_size, EOS)
    for seed in range(22 if vocab_size < 1000 else 8):
        requests = sequences(rng, 12, vocab_size, share_changed)
        logits = random_logits(rng, seed, vocab_size)
        last_ids = torch.tensor(random_tokens(rng, 12, vocab_size)) if is_ahead else None
        chosen = choose(logits, requests, last_ids, EOS, CPU)
        told = tell(logits, chosen, requests, CPU)
        expected = sampler.sample(logits.clone(), knowing(requests, last_ids))
        assert DeviceTokens(chosen, CPU, told).wait() == expected, seed


@pytest.mark.parametrize("vocab_size", [5, 300])
def test_rows_whose_last_token_is_known_and_others_share_a_step(vocab_size: int) -> None:
    """Position, counts and bans are per row, as when a prompt ends beside decoding sequences."""
    rng = random.Random(vocab_size)
    sampler = Sampler(vocab_size, EOS)
    for seed in range(15):
        requests = sequences(rng, 12, vocab_size, share_changed=0.7)
        logits = random_logits(rng, seed, vocab_size)
        unknown = [rng.random() < 0.5 for _ in requests]
        last_ids = torch.tensor(random_tokens(rng, 12, vocab_size))
        chosen = choose(logits, requests, last_ids, EOS, CPU, unknown)
        both = zip(knowing(requests, None), knowing(requests, last_ids), unknown, strict=True)
        rows = [after if is_unknown else before for before, after, is_unknown in both]
        expected = sampler.sample(logits.clone(), rows)
        assert DeviceTokens(chosen, CPU, tell(logits, chosen, requests, CPU)).wait() == expected, seed


@pytest.mark.parametrize("is_ahead", [False, True])
def test_an_accelerator_gets_all_numbers_in_one_copy(is_ahead: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """All parameters reach the accelerator in one copy, and give the same choices."""
    requests = sequences(random.Random(5), 40, 300, share_changed=0.8)
    logits = torch.randn(40, 300, generator=torch.Generator().manual_seed(5))
    last_ids = torch.arange(40) % 5 if is_ahead else None
    expected = choose(logits, requests, last_ids, EOS, CPU)

    def one_copy(arrays: Mapping[str, NDArray[Any]], device: Device) -> dict[str, torch.Tensor]:
        return packed(arrays, torch.clone, pinned=False)

    monkeypatch.setattr(choice, "on_device", one_copy)
    assert choose(logits, requests, last_ids, EOS, CPU).tolist() == expected.tolist()


@pytest.mark.parametrize("is_ahead", [False, True])
def test_nothing_waits_for_the_device(is_ahead: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Uses tensors without data, so that reading one raises an error."""

    def nowhere(arrays: Mapping[str, NDArray[Any]], device: Device) -> dict[str, torch.Tensor]:
        return {name: torch.from_numpy(array).to("meta") for name, array in arrays.items()}

    monkeypatch.setattr(choice, "on_device", nowhere)
    requests = sequences(random.Random(5), 40, 300, share_changed=0.8)
    logits = torch.empty(40, 300, device="meta", dtype=torch.bfloat16)
    last_ids = torch.empty(40, dtype=torch.int64, device="meta") if is_ahead else None
    chosen = choose(logits, requests, last_ids, EOS, CPU)
    told = tell(logits, chosen, requests, CPU)
    assert chosen.is_meta
    assert told is not None
    assert told.numbers.is_meta


def test_logits_that_no_distribution_follows_from() -> None:
    logits = torch.zeros(4, 300)
    logits[0, 7] = math.nan
    logits[1, 9] = math.inf
    logits[2] = -math.inf
    logits[3] = math.nan
    drawn = [
        Request(str(i), RequestSpec([1], Sampling(temperature=1.0, seed=i)), output_token_ids=[1]) for i in range(4)
    ]
    chosen = choose(logits.clone(), drawn, None, EOS, CPU).tolist()
    assert chosen[0] != 7
    assert chosen[1:] == [9, 0, 0]
    greedy = [Request(str(i), RequestSpec([1], Sampling(temperature=0.0)), output_token_ids=[1]) for i in range(4)]
    assert choose(logits.clone(), greedy, None, EOS, CPU).tolist() == [0, 9, 0, 0]


def test_in_sixteen_bits_or_a_few_rows_at_a_time_the_draw_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    logits = torch.randn(20, 640, generator=torch.Generator().manual_seed(1)).bfloat16()
    requests = sequences(random.Random(3), 20, 640, share_changed=0.5)
    whole = choose(logits.float(), requests, None, EOS, CPU).tolist()
    assert choose(logits, requests, None, EOS, CPU).tolist() == whole
    monkeypatch.setattr(choice, "MAX_AT_ONCE", 1400)
    assert choose(logits, requests, None, EOS, CPU).tolist() == whole
