"""A simple replacement of the simulator: instances are queues, without routing or blocks; a handover only takes time.

It serves to test the search's logic; production searches with `pd_cluster.simulate`.
"""

from __future__ import annotations

import heapq
from collections.abc import Sequence

from pd_cluster.bench.outcomes import InstanceSample, Outcome
from pd_cluster.bench.request_arrivals import Arrival
from pd_cluster.costs.linear_costs import Costs
from pd_cluster.plan.load_estimate import prompt_seconds, row_step_seconds
from pd_cluster.simulate.simulated_layout import Simulated, SimulatedLayout


class Decoder:
    """An instance whose sequences share steps; those beyond its seats wait in order. A hybrid's prompts pause all."""

    def __init__(self, name: str, costs: Costs, seats: int) -> None:
        self.name, self._costs, self._seats = name, costs, seats
        self.waiting: list[tuple[float, int, Arrival]] = []
        self.free_s = 0.0  # when its last prompt is computed
        self.held: list[tuple[float, float]] = []  # begin and end of each prompt's computation

    def finish(self, num_samples: list[InstanceSample]) -> dict[int, tuple[float, float]]:
        """Returns the times of each request's first and last token."""
        heapq.heapify(self.waiting)
        running: dict[int, tuple[float, float]] = {}  # request -> (tokens left, begin)
        found, now = dict[int, tuple[float, float]](), 0.0
        held = sorted(self.held)
        while self.waiting or running:
            while self.waiting and len(running) < self._seats and (self.waiting[0][0] <= now or not running):
                ready_s, number, arrival = heapq.heappop(self.waiting)
                now = max(now, ready_s)
                running[number] = (float(arrival.num_output_tokens), now)
            while held and held[0][1] <= now:
                held.pop(0)
            if held and held[0][0] <= now:
                now = held.pop(0)[1]
                continue
            step_s = row_step_seconds(self._costs, len(running), 100.0)
            least = min(left for left, _ in running.values())
            until = min([self.waiting[0][0]] if self.waiting and len(running) < self._seats else [1e18])
            until = min(until, held[0][0] if held else 1e18)
            num_steps = max(1.0, min(least, (until - now) / step_s))
            now += num_steps * step_s
            num_samples.append(
                InstanceSample(at_s=now, name=self.name, role="decode", num_running=len(running), num_blocks=1)
            )
            for number, (left, began_s) in list(running.items()):
                running[number] = (left - num_steps, began_s)
                if left - num_steps < 1e-9:
                    found[number] = (began_s + step_s, now)
                    del running[number]
        return found


def simulate_queues(layout: SimulatedLayout, costs: Costs, arrivals: Sequence[Arrival], seed: int = 0) -> Simulated:
    """Implements plan.trials.Simulate."""
    seats = layout.max_num_seqs or costs.max_num_seqs
    chunk = layout.max_num_batched_tokens or costs.max_num_batched_tokens
    decoders = [Decoder(f"d{i}", costs, seats) for i in range(layout.num_decode or layout.num_hybrid)]
    prefills = decoders if layout.num_hybrid else [Decoder(f"p{i}", costs, seats) for i in range(layout.num_prefill)]
    computed = dict[int, float]()
    for number, each in enumerate(arrivals):
        by = min(prefills, key=lambda one: one.free_s)
        began_s = max(each.at_s, by.free_s)
        by.free_s = began_s + prompt_seconds(costs, each.num_prompt_tokens, chunk)
        computed[number] = by.free_s
        to, ready_s = by, by.free_s
        if layout.num_hybrid:
            by.held.append((began_s, by.free_s))
        else:
            to = decoders[number % len(decoders)]
            ready_s += costs.handover.seconds(each.num_prompt_tokens * costs.kv_token_nbytes)
        to.waiting.append((ready_s, number, each))
    answer = Simulated()
    times = {number: found for one in decoders for number, found in one.finish(answer.samples).items()}
    for number, each in enumerate(arrivals):
        first_s, last_s = times[number]
        answer.outcomes.append(
            Outcome(
                request_id=str(number),
                sent_s=each.at_s,
                first_s=first_s,
                last_s=max(first_s, last_s),
                num_prompt_tokens=each.num_prompt_tokens,
                num_output_tokens=each.num_output_tokens,
                prefill_s=computed[number] - each.at_s,
            )
        )
    answer.duration_s = max(each.last_s or 0.0 for each in answer.outcomes) - arrivals[0].at_s
    return answer
