"""Serves a list of arrivals with a simulated cluster. Start reading at `simulate`.

The simulation is deterministic: it uses no clock and no random numbers, and iterates over no sets.
"""

from __future__ import annotations

import asyncio
import contextlib
import gc
import logging
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

from pd_cluster.bench.outcomes import InstanceSample, Outcome
from pd_cluster.bench.request_arrivals import Arrival
from pd_cluster.cluster.streams.request_origin import RequestOrigin
from pd_cluster.cluster.streams.request_stream import RequestStream
from pd_cluster.costs.linear_costs import Costs
from pd_cluster.errors import PdClusterError
from pd_cluster.simulate.event_script import ScriptLine
from pd_cluster.simulate.instance_assembly import Assembly
from pd_cluster.simulate.simulated_cluster import SimulatedCluster
from pd_cluster.simulate.simulated_layout import Simulated, SimulatedLayout
from pd_cluster.simulate.virtual_time_loop import VirtualTimeLoop
from pd_cluster.types import RequestSpec, Sampling

RARELY = 200_000, 20, 100  # thresholds of the garbage collector: objects, and collections of the younger generations
LEAST_SAMPLE_S, NUM_SAMPLES = 1.0, 300  # the shortest time between samples of all instances, and the most samples

Progressed = Callable[[], None]


def simulate(
    layout: SimulatedLayout,
    costs: Costs,
    arrivals: Sequence[Arrival],
    script: Sequence[ScriptLine] = (),
    progressed: Progressed = lambda: None,
) -> Simulated:
    """Returns the outcomes of requests and the samples of instances.

    Calls `progressed` when a request ends. Raises ConfigError for an impossible layout or script.
    """
    layout.check()
    with _rare_collections(), asyncio.Runner(loop_factory=VirtualTimeLoop) as runner:
        return runner.run(Simulation(layout, costs, arrivals, progressed).run(script))


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Suppresses the logs of simulated processes, because a simulation reports events instead."""
    before = logging.root.manager.disable
    logging.disable(logging.ERROR)
    try:
        yield
    finally:
        logging.disable(before)


@contextlib.contextmanager
def _rare_collections() -> Iterator[None]:
    """Makes garbage collection rare, because a simulation's objects only grow in number and few are in cycles."""
    usual = gc.get_threshold()
    gc.set_threshold(*RARELY)
    gc.freeze()  # modules outlive the simulation
    try:
        yield
    finally:
        gc.unfreeze()
        gc.set_threshold(*usual)


@dataclass(slots=True)
class ReadRequest:
    """One request as its client sees it. Times are those of the event loop."""

    sent_s: float
    first_s: float | None = None
    last_s: float | None = None
    num_tokens: int = 0
    stream: RequestStream | None = None
    error: str = ""


class Simulation:
    def __init__(
        self, layout: SimulatedLayout, costs: Costs, arrivals: Sequence[Arrival], progressed: Progressed
    ) -> None:
        self._layout, self._costs = layout, costs
        self._arrivals = sorted(arrivals, key=lambda each: each.at_s)
        self._progressed = progressed
        self._answer = Simulated()
        self._outcomes: dict[int, Outcome] = {}

    async def run(self, script: Sequence[ScriptLine]) -> Simulated:
        assembly = Assembly(self._layout, self._costs)
        self._cluster = cluster = SimulatedCluster(self._layout, assembly)
        await cluster.begin()
        self._begun_s = cluster.agenda.now()
        failed: asyncio.Future[None] = asyncio.get_running_loop().create_future()
        for line in script:
            cluster.agenda.at(self._begun_s + line.at_s, _or_fail, failed, cluster.happens, line)
        sampling = asyncio.ensure_future(self._sample())
        serving = asyncio.ensure_future(self._serve_all())
        await asyncio.wait([serving, failed], return_when=asyncio.FIRST_COMPLETED)
        (failed if failed.done() else serving).result()
        sampling.cancel()
        await cluster.end()
        answer = self._answer
        answer.outcomes = [self._outcomes[number] for number in range(len(self._arrivals))]
        answer.events = [(at_s - self._begun_s, what) for at_s, what in cluster.events]
        answer.gaps = cluster.notes.gaps
        answer.duration_s = max((each.last_s or each.sent_s for each in answer.outcomes), default=0.0)
        return answer

    async def _serve_all(self) -> None:
        loop, mail = asyncio.get_running_loop(), self._cluster.mail
        async with asyncio.TaskGroup() as group:
            for number, arrival in enumerate(self._arrivals):
                due_s = self._begun_s + arrival.at_s
                if due_s > loop.time():
                    await asyncio.sleep(due_s - loop.time())
                read_s = mail.handled_s(self._costs.host.request_s)
                group.create_task(self._serve(number, arrival, read_s))

    async def _serve(self, number: int, arrival: Arrival, read_s: float) -> None:
        """Serves one request. The scheduler begins to handle it at `read_s`."""
        loop = asyncio.get_running_loop()
        seen = ReadRequest(sent_s=self._begun_s + arrival.at_s)
        if read_s > loop.time():
            await asyncio.sleep(read_s - loop.time())

        def routed(stream: RequestStream) -> None:
            seen.stream = stream
            self._cluster.notes.open(stream.request_id)

        try:
            async for token in self._cluster.router.serve(order_of(arrival, number), routed, origin=RequestOrigin()):
                seen.last_s = loop.time()
                if seen.first_s is None:
                    seen.first_s = seen.last_s
                seen.num_tokens += 1 + len(token.earlier)
        except PdClusterError as error:
            seen.error = str(error)
        self._outcomes[number] = self._outcome(number, arrival, seen)
        self._progressed()

    def _outcome(self, number: int, arrival: Arrival, seen: ReadRequest) -> Outcome:
        stream, begun_s = seen.stream, self._begun_s
        prefill_s = handover_s = None
        gap_s, names, num_cached = 0.0, ("", ""), 0
        if stream is not None:
            notes = self._cluster.notes.close(stream.request_id)
            names, num_cached = (stream.prefill.name, stream.decode.name), stream.num_cached_tokens or 0
            computed = [at_s for name, at_s in notes.first_tokens if name == names[0]]
            joined = [at_s for name, at_s in notes.first_tokens if name == names[1] != names[0]]
            prefill_s = computed[-1] - seen.sent_s if computed else None
            handover_s = joined[-1] - computed[-1] if joined and computed else None
            gap_s = notes.longest_gap_s(seen.first_s) if seen.first_s is not None else 0.0
        return Outcome(
            request_id=f"r{number}",
            sent_s=seen.sent_s - begun_s,
            first_s=None if seen.first_s is None else seen.first_s - begun_s,
            last_s=None if seen.last_s is None else seen.last_s - begun_s,
            num_prompt_tokens=arrival.num_prompt_tokens,
            num_cached_tokens=num_cached,
            num_output_tokens=seen.num_tokens,
            longest_gap_s=gap_s,
            prefill_s=prefill_s,
            handover_s=handover_s,
            prefill=names[0],
            decode=names[1],
            error=seen.error,
        )

    async def _sample(self) -> None:
        last_s = self._arrivals[-1].at_s if self._arrivals else 0.0
        period_s = max(LEAST_SAMPLE_S, last_s / NUM_SAMPLES)
        while True:
            self._answer.samples += self._samples(asyncio.get_running_loop().time() - self._begun_s)
            await asyncio.sleep(period_s)

    def _samples(self, at_s: float) -> list[InstanceSample]:
        found = []
        for name, life in self._cluster.lives.items():
            scheduler = life.worker.core.scheduler
            found.append(
                InstanceSample(
                    at_s=at_s,
                    name=name,
                    role="prefill" if life.is_prefill else "hybrid" if self._layout.num_hybrid else "decode",
                    num_running=len(scheduler.running),
                    num_waiting=len(scheduler.waiting) + life.worker.handover.imports.num_queued,
                    num_held_blocks=scheduler.blocks.num_held,
                    num_blocks=scheduler.blocks.num_blocks,
                )
            )
        return found


def _or_fail(failed: asyncio.Future[None], do: Callable[[ScriptLine], None], line: ScriptLine) -> None:
    try:
        do(line)
    except PdClusterError as error:
        if not failed.done():
            failed.set_exception(error)


# Block ids modulo this number are token ids; ids from here on fill prompts, or ends of prompts, without block ids.
MOST_IDS = 1 << 30


def order_of(arrival: Arrival, number: int) -> RequestSpec:
    """Returns the request for the router. All tokens of a block are its id, so equal ids make equal prefixes."""
    num, size = arrival.num_prompt_tokens, arrival.block_tokens
    token_ids: list[int] = []
    for hash_id in arrival.hash_ids:
        token_ids += [hash_id % MOST_IDS] * size
    if len(token_ids) < num:
        token_ids += [MOST_IDS + number % (MOST_IDS - 1)] * (num - len(token_ids))
    del token_ids[num:]
    sampling = Sampling(max_tokens=arrival.num_output_tokens, temperature=0.0, ignore_eos=True)
    return RequestSpec(token_ids, sampling, session=arrival.session)
