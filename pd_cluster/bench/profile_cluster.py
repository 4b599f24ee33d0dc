"""Measures a cluster of two instances for `pd-cluster profile`: the handover, and the host's own work."""

from __future__ import annotations

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
from pd_cluster.client.admin_client import Admin
from pd_cluster.client.streaming_client import Sample, make_client, measure
from pd_cluster.cluster.processes.launch_settings import Launch
from pd_cluster.cluster.processes.launcher import Cluster
from pd_cluster.costs.cost_fit import fit_step
from pd_cluster.costs.linear_costs import Costs, HandoverCost, HostCost, StepCost, StepWork
from pd_cluster.errors import GenerationError
from pd_cluster.result_tables import progress

LENGTHS = (16, 128, 512, 1024)
LONG_ANSWER = 64
SHORT_ANSWER = 2
NUM_EACH = 3  # minimum number of requests of each kind
MOST_EACH = 40


class Handovers(NamedTuple):
    cost: HandoverCost
    error: float


class ClusterCosts(NamedTuple):
    handover: Handovers
    host: HostCost

    def add_to(self, costs: Costs) -> Costs:
        error = {**costs.error, "handover": self.handover.error}
        return replace(costs, handover=self.handover.cost, host=self.host, error=error)


async def measure_cluster(launch: Launch, ready: EngineReady, step: StepCost, seconds: float) -> ClusterCosts:
    """Starts one prefill and one decode instance, and sends them one request at a time. Raises PdClusterError."""
    longest = ready.max_model_len - LONG_ANSWER
    lengths = [each for each in LENGTHS if each <= min(longest, ready.max_num_batched_tokens)] or [max(1, longest // 2)]
    async with running(launch) as cluster, make_client() as client:
        asked = _Asked(cluster, client)
        for length in (lengths[0], lengths[-1]):
            await asked.send(length, SHORT_ANSWER)  # not counted, because it opens links
        handovers: defaultdict[int, list[float]] = defaultdict(list)
        short, long = SpentTime(), SpentTime()
        ends_s, num_done = time.monotonic() + seconds, 0
        with progress("requests to two instances", NUM_EACH * (len(lengths) + 1)) as advance:
            while num_done < NUM_EACH or (time.monotonic() < ends_s and num_done < MOST_EACH):
                for length in lengths:
                    spent = short if length == lengths[0] else SpentTime()
                    await asked.counted(length, SHORT_ANSWER, spent)
                    if (took_s := await asked.handover_s()) is not None:
                        handovers[length * ready.kv_token_nbytes].append(took_s)
                    advance() if num_done < NUM_EACH else None
                await asked.counted(lengths[0], LONG_ANSWER, long)
                advance() if num_done < NUM_EACH else None
                num_done += 1
    return ClusterCosts(fit_handover(handovers), host_cost(short, long, step, lengths[0]))


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

    async def handover_s(self) -> float | None:
        """Returns the time from the last step of the last request's prompt until its decode began; None if unknown."""
        listed = (await self._admin.ask("/requests?limit=1")).json()["requests"]
        if not listed:
            return None
        answer = (await self._admin.ask(f"/requests/{listed[0]['request_id']}/timeline")).json()
        return _between(list(_moments(answer)))


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
