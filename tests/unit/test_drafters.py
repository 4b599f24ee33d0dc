"""Drafts from the sequence and from predictions equal those of plain scans, and long prompts delay no step."""

from __future__ import annotations

import gc
import random
import tracemalloc
from collections.abc import Sequence
from itertools import pairwise

import pytest

from pd_cluster.engine.draft import prediction_drafter, token_history
from pd_cluster.engine.draft.context_index import MAX_CHAIN_STEPS, ContextIndex, IndexedText, hash_contexts
from pd_cluster.engine.draft.drafter import Drafter
from pd_cluster.engine.draft.ngram_drafter import NgramDrafter
from pd_cluster.engine.draft.prediction_drafter import (
    LONGEST_MATCH,
    MAX_POSITIONS,
    SINGLE_MATCH_DISTANCE,
    SINGLE_MATCH_TOKENS,
    PairIndex,
    PredictionDrafter,
)
from pd_cluster.engine.draft.token_history import TokenHistory
from pd_cluster.types import Request, RequestSpec, Sampling


def request_of(prompt: Sequence[int], predicted: Sequence[int] = (), variant: str = "") -> Request:
    order = RequestSpec(
        prompt_token_ids=list(prompt), sampling=Sampling(max_tokens=99), prediction=tuple(predicted), variant=variant
    )
    return Request("r", order)


def change(rng: random.Random, request: Request, num_symbols: int) -> None:
    """Appends a few tokens, or replaces the output by a shorter or different one, as a resumed request does."""
    output = request.output_token_ids
    if rng.random() < 0.03:
        del output[rng.randrange(len(output) + 1) :]
    elif rng.random() < 0.03:
        request.output_token_ids = [rng.randrange(num_symbols) for _ in range(rng.randrange(60))]
    elif output and rng.random() < 0.03:
        output[-1:] = [(output[-1] + 1) % num_symbols] * rng.randrange(1, 4)
    elif len(output) > 8 and rng.random() < 0.3:
        start = rng.randrange(len(output) - 4)
        output += output[start : start + rng.randrange(1, 12)]
    else:
        output += [rng.randrange(num_symbols) for _ in range(rng.randrange(4))]


def scan_ngrams(tokens: list[int], shortest: int, longest: int, most: int) -> list[int]:
    for length in range(min(longest, len(tokens) - 1), shortest - 1, -1):
        for place in range(len(tokens) - 1, length - 1, -1):
            if tokens[place - length : place] == tokens[-length:]:
                copied = list(tokens)
                for at in range(place, place + most):
                    copied.append(copied[at])
                return copied[len(tokens) :]
    return []


@pytest.mark.parametrize("bounds", [(1, 1), (2, 4), (5, 5), (1, 9)])
@pytest.mark.parametrize("num_symbols", [2, 3, 5])
def test_an_ngram_draft_is_that_of_a_scan(bounds: tuple[int, int], num_symbols: int) -> None:
    rng = random.Random(f"{bounds} {num_symbols}")
    drafter = NgramDrafter(*bounds)
    num_drafts = 0
    for num_virtual in (0, 0, 0, 7):
        variant = f"prompt-{num_virtual}-{'0' * 64}" if num_virtual else ""
        prompt = [0] * num_virtual + [rng.randrange(num_symbols) for _ in range(rng.choice([0, 1, 3, 60, 700]))]
        request = request_of(prompt, variant=variant)
        for _ in range(80):
            most = rng.randrange(1, 17)
            tokens = request.token_ids(num_virtual, request.num_tokens)
            expected = scan_ngrams(tokens, *bounds, most)
            assert list(drafter.draft(request, most)) == expected
            num_drafts += bool(expected)
            change(rng, request, num_symbols)
        drafter.ended(request)
    assert num_drafts > 50
    assert not drafter.nbytes


def test_a_long_prompt_is_indexed_in_slices_newest_part_first(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(token_history, "INDEX_TOKENS", 1500)
    rng = random.Random(2)
    request = request_of([rng.randrange(1000) for _ in range(8000)])
    kept = TokenHistory(request, [2, 3, 4, 5], 5)
    text, per_call = kept.text, token_history.TOKENS_PER_CALL // 4
    left = [8000 - per_call]
    while kept.num_unindexed:
        request.output_token_ids.append(rng.randrange(1000))
        kept.extend(request)
        left.append(kept.num_unindexed)
        spans = [(index.first, index.stop) for index in text.indexes]
        assert spans[-1][1] == text.end
        assert all(stop == start for (_, stop), (start, _) in pairwise(spans[1:]))  # only the first may follow a gap
        assert spans[0][1] <= spans[1][0]
    assert all(0 < before - after <= per_call for before, after in pairwise(left))
    assert text.tokens[5 : text.end].tolist() == request.token_ids(0, request.num_tokens)
    for place in range(text.reach + 5, text.end):
        hashes = hash_contexts(text.tokens[place - 5 : place][::-1], [2, 3, 4, 5])
        assert all(place in text.places(which, value) for which, value in enumerate(hashes)), place


def test_places_added_one_by_one_and_together_are_the_same() -> None:
    rng = random.Random(3)
    tokens = [rng.randrange(3) for _ in range(900)]
    alone, together = (IndexedText([1, 2, 4], 4, 900) for _ in range(2))
    for text in (alone, together):
        text.put_index(0, text.end, 100)
    for token_id in tokens:
        alone.append([token_id])
    for start in range(0, 900, 150):
        together.append(tokens[start : start + 150])
    assert alone.hashes() == together.hashes()
    for which, value in enumerate(alone.hashes()):
        assert [*together.places(which, value)][:20] == [*alone.places(which, value)][:20] != []


def test_a_look_up_follows_a_chain_only_so_far() -> None:
    text = IndexedText([1], 1, 4000)
    text.put_index(0, text.end, 4000)
    text.append([7] * 4000)
    assert [*text.places(0, text.hashes()[0])] == [*range(text.end - 1, text.end - 1 - MAX_CHAIN_STEPS, -1)]
    assert ContextIndex([1, 2], 1, 1000).nbytes == 2 * 4 * (1000 + 1024)


def test_reported_bytes_are_those_allocated_and_go_with_the_request() -> None:
    rng = random.Random(4)
    prompts = [[rng.randrange(1000) for _ in range(num)] for num in (100, 3000, 30000)]
    requests = [request_of(prompt) for prompt in prompts]
    drafter = NgramDrafter(3, 5)
    tracemalloc.start()
    for _ in range(40):
        for request in requests:
            drafter.draft(request, 4)
            request.output_token_ids += range(50)
    gc.collect()
    allocated = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert 0.85 * allocated < drafter.nbytes < 1.05 * allocated
    assert drafter.nbytes < 48 * sum(request.num_tokens for request in requests)
    del requests, request
    gc.collect()
    assert not drafter.nbytes


class ScannedPrediction:
    """Implements PredictionDrafter's contract by scans."""

    def __init__(self, prediction: tuple[int, ...]) -> None:
        self.prediction = prediction
        self.place, self.sure, self.num_astray = 0, 0, 0

    def follow(self, output: list[int], num_fresh: int) -> None:
        fresh = output[len(output) - num_fresh :]
        num_equal = 0
        while num_equal < num_fresh and self.prediction[self.place :][:1] == (fresh[num_equal],):
            num_equal += 1
            self.place += 1
        if num_equal:
            self.sure, self.num_astray = self.place, 0
        if num_equal < num_fresh:
            self.num_astray += num_fresh - num_equal
            self.place = self.find(output)

    def find(self, output: list[int]) -> int:
        last, nowhere = output[-LONGEST_MATCH:], len(self.prediction)
        for length in range(len(last), 1, -1):
            found = [
                place
                for place in range(length, len(self.prediction) + 1)
                if list(self.prediction[place - length : place]) == last[-length:]
            ]
            if found:
                return min(found, key=lambda place: (place < self.sure, abs(place - self.sure)))
        if self.num_astray > SINGLE_MATCH_TOKENS:
            return nowhere
        near = self.prediction[self.sure : self.sure + SINGLE_MATCH_DISTANCE]
        return self.sure + (near.index(last[-1]) + 1 if last[-1] in near else self.num_astray)


def edited(rng: random.Random, tokens: Sequence[int], share: float, num_symbols: int) -> list[int]:
    """Deletes, replaces or inserts tokens with probability `share`; may also move a block."""
    found: list[int] = []
    for token_id in tokens:
        kind = rng.choice(["delete", "insert", "replace"]) if rng.random() < share else ""
        if kind in ("insert", "replace"):
            found += [rng.randrange(num_symbols) for _ in range(rng.randrange(1, 4))]
        if kind in ("", "insert"):
            found.append(token_id)
    at = rng.randrange(len(found) + 1)
    return found[at:] + found[:at] if rng.random() < 0.3 else found


def test_a_prediction_is_followed_as_by_scans() -> None:
    rng = random.Random(5)
    for case in range(60):
        num_symbols = rng.choice([4, 20, 500])
        # With few symbols a pair occurs at more places than are compared, so keep the prediction short.
        predicted = tuple(rng.randrange(num_symbols) for _ in range(rng.randrange(1, 60 if num_symbols == 4 else 400)))
        answer = edited(rng, predicted, rng.choice([0, 0.05, 0.3]), num_symbols)
        request = request_of([1, 2], predicted)
        drafter, scanned = PredictionDrafter(), ScannedPrediction(predicted)
        assert list(drafter.draft(request, 5)) == list(predicted[:5])
        while answer:
            num_fresh = rng.randrange(1, 7)
            fresh, answer = answer[:num_fresh], answer[num_fresh:]
            request.output_token_ids += fresh
            scanned.follow(request.output_token_ids, len(fresh))
            most = rng.randrange(1, 17)
            assert list(drafter.draft(request, most)) == list(predicted[scanned.place :][:most]), case
            if rng.random() < 0.03:
                request.output_token_ids = request.output_token_ids[: rng.randrange(len(request.output_token_ids) + 1)]
                scanned = ScannedPrediction(predicted)
                if request.output_token_ids:
                    scanned.follow(request.output_token_ids, len(request.output_token_ids))
                assert list(drafter.draft(request, 3)) == list(predicted[scanned.place :][:3])


def test_places_of_pairs_are_those_of_a_scan_over_all_parts(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(prediction_drafter, "PART", 37)
    rng = random.Random(9)
    tokens = [rng.randrange(3) for _ in range(1000)]
    index = PairIndex(tokens)
    for _ in range(1000 // 37 + 1):
        index.nearest((0, 0), 0)
    for sure in rng.sample(range(1001), 60):
        pair = [rng.randrange(3), rng.randrange(3)]
        places = [place for place in range(2, 1001) if tokens[place - 2 : place] == pair]
        behind, before = [p for p in places if p >= sure], [p for p in places if p < sure]
        assert index.nearest(pair, sure) == behind[:MAX_POSITIONS] + before[::-1][:MAX_POSITIONS]


def test_a_prediction_with_edits_takes_few_steps() -> None:
    rng = random.Random(6)
    predicted = [rng.randrange(3000) for _ in range(12000)]  # needs several parts of the index
    answer = edited(rng, predicted, 0.05, 3000)
    request, drafter = request_of([1], predicted), PredictionDrafter()
    num_steps = 0
    while len(request.output_token_ids) < len(answer):
        drafts = list(drafter.draft(request, 12))
        rest = answer[len(request.output_token_ids) :]
        num_right = next((i for i, (a, b) in enumerate(zip(drafts, rest, strict=False)) if a != b), len(drafts))
        request.output_token_ids += rest[: num_right + 1]
        num_steps += 1
    assert len(answer) / num_steps > 6  # a step gives up to 12 drafts and one token; edits are at most 20 tokens apart
    assert drafter.draft(request_of([1]), 4) == ()


def test_all_are_drafters() -> None:
    drafters: list[Drafter] = [NgramDrafter(1, 2), PredictionDrafter()]
    assert [drafter.name for drafter in drafters] == ["ngram", "prediction"]
