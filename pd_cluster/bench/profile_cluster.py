"""Measures a cluster of two instances for `pd-cluster profile`: served prompts, handovers, and the host's own work."""

from __future__ import annotations

import asyncio
import random
import time
from collections import defaultdict
from collections.abc import Iterator, Mapping
from pathlib import Path
from statistics import median
from typing import Any, NamedTuple

import httpx
from msgspec.structs import replace

from pd_cluster.bench.profile_messages import EngineReady
from pd_cluster.bench.serve_bench import NUM_TOKEN_IDS, SEED, running
from pd_cluster.bench.served_steps import Timeline, served_steps, with_served
from pd_cluster.client.admin_client import Admin
from pd_cluster.client.streaming_client import Sample, make_client, measure
from pd_cluster.cluster.processes.launch_settings import Launch
from pd_cluster.cluster.processes.launcher import Cluster
from pd_cluster.costs.cost_fit import Sample as StepSample
from pd_cluster.costs.cost_fit import fit_step
from pd_cluster.costs.linear_costs import Costs, HandoverCost, HostCost, StepCost, StepWork
from pd_cluster.errors import GenerationError
from pd_cluster.result_tables import progress

LENGTHS = (16, 128, 512, 1024)
LOADED_LENGTH = 512
LONG_ANSWER = 64
SHORT_ANSWER = 2
NUM_EACH = 3  # minimum number of requests of each kind
MOST_EACH = 40
AT_ONCE, AT_ONCE_SHARE = 4, 0.4  # requests at a time under load, and the share of the time for this load


class Handovers(NamedTuple):
    cost: HandoverCost
    error: float


class ClusterCosts(NamedTuple):
    """`alone`, `beside`: see `served_steps.with_served`."""

    handover: Handovers
    host: HostCost
    alone: list[StepSample]
    beside: list[StepSample]

    def add_to(self, costs: Costs) -> Costs:
        error = {**costs.error, "handover": self.handover.error}
        costs = replace(costs, handover=self.handover.cost, host=self.host, error=error)
        return with_served(costs, self.alone, self.beside)


async def measure_cluster(launch: Launch, ready: EngineReady, step: StepCost, seconds: float) -> ClusterCosts:
    """Starts one prefill and one decode instance; sends them one request at a time, then several.

    Raises PdClusterError.
    """
    longest = ready.max_model_len - LONG_ANSWER
    lengths = [each for each in LENGTHS if each <= min(longest, ready.max_num_batched_tokens)] or [max(1, longest // 2)]
    async with running(launch) as cluster, make_client(AT_ONCE) as client:
        asked = _Asked(cluster, client)
        for length in (lengths[0], lengths[-1]):
            await asked.send(length, SHORT_ANSWER)  # not counted, because it opens links
        handovers: defaultdict[int, list[float]] = defaultdict(list)
        short, long, timelines = SpentTime(), SpentTime(), list[Timeline]()
        ends_s, num_done = time.monotonic() + (1 - AT_ONCE_SHARE) * seconds, 0
        with progress("requests to two instances", NUM_EACH * (len(lengths) + 1)) as advance:
            while num_done < NUM_EACH or (time.monotonic() < ends_s and num_done < MOST_EACH):
                for length in lengths:
                    spent = short if length == lengths[0] else SpentTime()
                    await asked.counted(length, SHORT_ANSWER, spent)
                    timelines += (found := await asked.timelines(1))
                    if found and (took_s := _between(list(_moments(found[0])))) is not None:
                        handovers[length * ready.kv_token_nbytes].append(took_s)
                    advance() if num_done < NUM_EACH else None
                await asked.counted(lengths[0], LONG_ANSWER, long)
                advance() if num_done < NUM_EACH else None
                num_done += 1
        beside = await asked.at_once(min(lengths, key=lambda each: abs(each - LOADED_LENGTH)), AT_ONCE_SHARE * seconds)
    host = host_cost(short, long, step, lengths[0])
    return ClusterCosts(fit_handover(handovers), host, served_steps(timelines), served_steps(beside))


def fit_handover(found: Mapping[int, list[float]]) -> Handovers:
    """Fits setup time and time per byte to the median time of each size."""
    samples = [(StepWork(num_rows=1, num_prompt_tokens=nbytes), median(took_s)) for nbytes, took_s in found.items()]
    if not samples:
        return Handovers(HandoverCost(), 0.0)
    cost, error = fit_step(samples)
    return Handovers(HandoverCost(cost.step_s + cost.row_s, cost.prompt_token_s), error)


class SpentTime:
    """The sums of times over requests of one kind."""

    def __init__(self) -> None:
        self.num_requests = self.num_tokens = 0
        self.cpu_s = 0.0
        self.gaps_s: list[float] = []


def host_cost(short: SpentTime, long: SpentTime, step: StepCost, num_prompt_tokens: int) -> HostCost:
    """Derives the scheduler's time per request and per message from long and short answers.

    The host's share of a decode step is the time between tokens minus the time of the step itself.
    """
    short_s, long_s = (each.cpu_s / each.num_requests for each in (short, long))
    more = (long.num_tokens / long.num_requests) - (short.num_tokens / short.num_requests)
    message_s = max(0.0, (long_s - short_s) / more) if more > 0 else 0.0
    request_s = max(0.0, short_s - message_s * short.num_tokens / short.num_requests)
    alone_s = step.seconds(StepWork(num_rows=1, num_context_tokens=num_prompt_tokens + LONG_ANSWER // 2))
    return HostCost(
        step_s=max(0.0, median(long.gaps_s) - alone_s) if long.gaps_s else 0.0,
        request_s=request_s,
        message_s=message_s,
    )


class _Asked:
    """Requests to a cluster, one at a time."""

    def __init__(self, cluster: Cluster, client: httpx.AsyncClient) -> None:
        launch = cluster.launch
        self._client, self._url, self._model = client, f"{launch.url}/v1/completions", launch.model_name
        self._pid = cluster.pid_of("scheduler")
        self._admin = Admin(launch.admin_url, str(cluster.admin_token_file))
        self._rng = random.Random(SEED)

    async def send(self, num_prompt_tokens: int, num_output_tokens: int) -> Sample:
        """Sends a new prompt. Raises GenerationError."""
        body = {
            "model": self._model,
            "prompt": [self._rng.randrange(NUM_TOKEN_IDS) for _ in range(num_prompt_tokens)],
            "max_tokens": num_output_tokens,
            "temperature": 0,
            "ignore_eos": True,
            "skip_special_tokens": False,  # so that every token has text and can be timed
        }
        sample = await measure(self._client, self._url, body)
        if sample.error:
            raise GenerationError(f"a request of {num_prompt_tokens} tokens failed: {sample.error}")
        return sample

    async def counted(self, num_prompt_tokens: int, num_output_tokens: int, spent: SpentTime) -> None:
        before_s = cpu_s(self._pid)
        sample = await self.send(num_prompt_tokens, num_output_tokens)
        spent.cpu_s += cpu_s(self._pid) - before_s
        spent.num_requests += 1
        spent.num_tokens += sample.num_output_tokens
        spent.gaps_s += sample.itl_s[1:]

    async def at_once(self, num_prompt_tokens: int, seconds: float) -> list[Timeline]:
        """Sends long answers AT_ONCE at a time, so that prompts are computed beside them; returns their timelines."""
        ends_s, num_sent = time.monotonic() + seconds, 0

        async def sends() -> None:
            nonlocal num_sent
            while num_sent < AT_ONCE * NUM_EACH or time.monotonic() < ends_s:
                num_sent += 1
                await self.send(num_prompt_tokens, LONG_ANSWER)

        await asyncio.gather(*(sends() for _ in range(AT_ONCE)))
        found = await self.timelines(min(num_sent, AT_ONCE * MOST_EACH))
        return found[: max(1, len(found) - AT_ONCE)]  # without the oldest, whose prompts had no decodes beside them

    async def timelines(self, num: int) -> list[Timeline]:
        """Returns the timelines of the last requests, the newest first."""
        listed = (await self._admin.ask(f"/requests?limit={num}")).json()["requests"]
        return [(await self._admin.ask(f"/requests/{each['request_id']}/timeline")).json() for each in listed]


def _moments(timeline: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    for event in timeline["events"]:
        if event["who"] == timeline["prefill"] and event["what"] == "first token":
            yield "computed", 1e-3 * event["at_ms"]
        elif event["who"] == timeline["decode"] and event["what"] == "decode start":
            yield "decodes", 1e-3 * event["at_ms"]


def _between(moments: list[tuple[str, float]]) -> float | None:
    found = dict(moments)
    took_s = found.get("decodes", 0.0) - found.get("computed", 0.0)
    return took_s if len(found) == 2 and took_s > 0 else None


def cpu_s(pid: int) -> float:
    """Returns the CPU seconds that a process's threads have used."""
    total_ns = 0
    for task in Path(f"/proc/{pid}/task").iterdir():
        try:
            total_ns += int((task / "schedstat").read_text().split()[0])
        except (OSError, ValueError, IndexError):
            continue  # the thread has just ended
    return 1e-9 * total_ns
