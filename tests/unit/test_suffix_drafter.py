"""Suffix drafts equal their definition, stay within a scope, and use bounded memory."""

from __future__ import annotations

import gc
import random
import tracemalloc
from collections import Counter, OrderedDict
from collections.abc import Sequence

import pytest

from pd_cluster.engine.draft.suffix_drafter import MAX_POSITIONS, SuffixDrafter
from pd_cluster.types import Request, RequestSpec, Sampling

Scope = tuple[str, str]


def request_of(prompt: Sequence[int], scope: Scope = ("", ""), output: Sequence[int] = ()) -> Request:
    order = RequestSpec(
        prompt_token_ids=list(prompt), sampling=Sampling(max_tokens=99), cache_salt=scope[0], variant=scope[1]
    )
    request = Request("r", order)
    request.output_token_ids += output
    return request


class Definition:
    """Implements SuffixDrafter's contract by scans of all texts."""

    def __init__(self, depth: int, most_outputs: int, factor: float, min_prob: float) -> None:
        self.depth, self.most_outputs, self.factor, self.min_prob = depth, most_outputs, factor, min_prob
        self.scopes: OrderedDict[Scope, list[list[int]]] = OrderedDict()

    def draft(self, request: Request, most: int) -> list[int]:
        tokens, scope = request.token_ids(0, request.num_tokens), (request.order.cache_salt, request.order.variant)
        if scope in self.scopes:
            self.scopes.move_to_end(scope)
        drafts = [
            self.of_texts(texts, tokens[-self.depth + 1 :], most)
            for texts in ([tokens], self.scopes.get(scope, [])[::-1])
        ]
        return max(drafts, key=lambda draft: draft[1])[0]

    def of_texts(self, texts: list[list[int]], last: list[int], most: int) -> tuple[list[int], float]:
        places = []
        for text in texts:
            for place in range(len(text) - 1, 0, -1):
                pairs = zip(text[place - 1 :: -1], last[::-1], strict=False)
                length = next((i for i, (a, b) in enumerate(pairs) if a != b), min(place, len(last)))
                if length:
                    places.append((length, text[place:]))
        places.sort(key=lambda place: -place[0].bit_length())
        best: tuple[list[int], float] = ([], 0.0)
        for length in range(self.depth - 1, 0, -1):
            limit = min(most, int(length * self.factor + 1e-6), self.depth - length)
            draft = self.likeliest([after for matched, after in places[:MAX_POSITIONS] if matched >= length], limit)
            best = draft if draft[1] > best[1] else best
        return best

    def likeliest(self, afters: list[list[int]], limit: int) -> tuple[list[int], float]:
        found: list[int] = []
        score, prob = 0.0, 1.0
        while len(found) < limit and (afters := [after for after in afters if len(after) > len(found)]):
            ((token_id, count),) = Counter(after[len(found)] for after in afters).most_common(1)
            prob *= count / len(afters)
            if prob < self.min_prob:
                break
            afters = [after for after in afters if after[len(found)] == token_id]
            found.append(token_id)
            score += prob
        return found, score

    def ended(self, request: Request) -> None:
        scope, num_prompt = (request.order.cache_salt, request.order.variant), len(request.prompt_token_ids)
        if not self.most_outputs or not request.output_token_ids:
            return
        self.scopes.setdefault(scope, []).append(
            request.token_ids(max(0, num_prompt - self.depth + 1), request.num_tokens)
        )
        self.scopes.move_to_end(scope)
        if sum(map(len, self.scopes.values())) > self.most_outputs:
            oldest = next(iter(self.scopes))
            self.scopes[oldest].pop(0)
            if not self.scopes[oldest]:
                del self.scopes[oldest]


@pytest.mark.parametrize(
    ("depth", "most_outputs", "factor", "min_prob"),
    [(24, 100, 1.0, 0.1), (24, 5, 2.5, 0.0), (6, 100, 4.0, 0.3), (17, 0, 1.0, 0.1), (2, 3, 1.0, 0.5), (1, 9, 1, 0)],
)
def test_a_draft_is_that_of_the_definition(depth: int, most_outputs: int, factor: float, min_prob: float) -> None:
    rng = random.Random(f"{depth} {most_outputs}")
    scopes = [("", ""), ("salt", ""), ("salt", "lora")]
    num_drafted = 0
    for num_symbols in (2, 3, 5, 40):
        drafter = SuffixDrafter(depth, most_outputs, factor, min_prob, 1 << 24)
        definition = Definition(depth, most_outputs, factor, min_prob)
        phrases = [[rng.randrange(num_symbols) for _ in range(rng.randrange(1, 40))] for _ in range(6)]
        running: list[Request] = []
        for _ in range(150):
            if len(running) < 3:
                running.append(request_of(rng.choice(phrases) * rng.randrange(3), rng.choice(scopes)))
            request, most = rng.choice(running), rng.randrange(1, 17)
            draft = list(drafter.draft(request, most))
            assert draft == definition.draft(request, most)
            num_drafted += len(draft)
            kind = rng.random()
            if kind < 0.4:
                request.output_token_ids += rng.choice(phrases)[: rng.randrange(1, 30)]
            elif kind < 0.8:
                request.output_token_ids += [rng.randrange(num_symbols) for _ in range(rng.randrange(4))]
            elif kind < 0.86:
                del request.output_token_ids[rng.randrange(len(request.output_token_ids) + 1) :]
            elif kind < 0.9:
                request.output_token_ids = list(rng.choice(phrases))
            else:
                running.remove(request)
                drafter.ended(request)
                definition.ended(request)
                assert drafter.earlier.num_outputs == sum(map(len, definition.scopes.values())) <= most_outputs
    assert (num_drafted > 200) == (depth > 1)


def test_nobody_drafts_from_outputs_of_another_scope() -> None:
    secret = [*range(100, 160)]
    drafter = SuffixDrafter(24, 10, 1.0, 0.1, 1 << 24)
    drafter.ended(request_of([1, 2, 3], ("tenant", "lora"), secret))
    for scope in (("", ""), ("tenant", ""), ("other", "lora"), ("lora", "tenant")):
        assert drafter.draft(request_of([1, 2, 3], scope, secret[:20]), 8) == []
    assert drafter.draft(request_of([1, 2, 3], ("tenant", "lora"), secret[:20]), 8) == secret[20:28]
    assert drafter.draft(request_of([1, 2, 3], ("tenant", "lora")), 8) == secret[:3]  # after the same prompt


def test_a_loop_and_a_majority() -> None:
    drafter = SuffixDrafter(24, 10, 1.0, 0.1, 1 << 24)
    assert drafter.draft(request_of([], output=[9, *[1, 2, 3] * 9]), 16) == [1, 2, 3] * 4  # a match of 12
    for last in (7, 8, 8, 8, 7):
        drafter.ended(request_of([], output=[4, 5, 6, last, last, 0]))
    assert drafter.draft(request_of([], output=[4, 5, 6]), 16) == [8, 8, 0]


def test_bytes_are_bounded_and_the_least_recent_go_first() -> None:
    rng = random.Random(7)
    most_nbytes = 3_000_000
    drafter = SuffixDrafter(24, 10_000, 1.0, 0.1, most_nbytes)
    outputs: dict[Scope, list[int]] = {}
    running = [request_of([rng.randrange(5000) for _ in range(num)]) for num in (10, 2000, 12000)]
    peak = 0
    for number in range(300):
        scope = (f"s{number % 40}", "")
        outputs[scope] = [rng.randrange(5000) for _ in range(rng.choice([20, 300, 3000]))]
        drafter.ended(request_of([], scope, outputs[scope]))
        for request in running:
            drafter.draft(request, 4)
            request.output_token_ids.append(rng.randrange(5000))
        peak = max(peak, drafter.nbytes)
        assert drafter.nbytes <= most_nbytes
    assert peak > 0.7 * most_nbytes
    found = [bool(drafter.draft(request_of([], scope, tokens[:10]), 4)) for scope, tokens in outputs.items()]
    by_end = found[300 % 40 :] + found[: 300 % 40]
    assert by_end == sorted(by_end)  # the remaining ones ended last
    assert 3 < sum(by_end) < 40
    num_outputs = drafter.earlier.num_outputs
    giant = request_of([rng.randrange(9) for _ in range(100_000)])
    assert drafter.draft(giant, 4) == []  # a sequence that does not fit must not evict others
    assert drafter.earlier.num_outputs == num_outputs
    del running, request
    gc.collect()
    assert drafter.nbytes == drafter.earlier.nbytes


def test_reported_bytes_are_those_allocated() -> None:
    rng = random.Random(8)
    requests = [
        request_of([rng.randrange(1000) for _ in range(num)], ("", str(num % 7))) for num in range(100, 5000, 60)
    ]
    for request in requests:
        request.output_token_ids = [rng.randrange(1000) for _ in range(400)]
    drafter = SuffixDrafter(24, 1000, 1.0, 0.1, 1 << 28)
    tracemalloc.start()
    for request in requests[::2]:
        drafter.draft(request, 1)
    for request in requests[1::2]:
        drafter.ended(request)
    allocated = tracemalloc.get_traced_memory()[0]
    tracemalloc.stop()
    assert 0.8 * allocated < drafter.nbytes < 1.05 * allocated
