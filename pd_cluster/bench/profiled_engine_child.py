"""`python -m pd_cluster.bench.profiled_engine_child`: an engine that runs and times requested steps.

Standard input has a line of JSON with its WorkerConfig, and then a line for each `Steps`; the end of input ends the
process. Standard output has EngineReady, and then a list of TimedStep for each `Steps`. Sequences that decode are added
as if a peer had sent their KV cache; its content is arbitrary. The process uses the cores that a worker would have;
knows nothing of links.
"""

from __future__ import annotations

import os
import random
import sys
import time
from typing import TYPE_CHECKING, BinaryIO

import msgspec

from pd_cluster.bench.profile_messages import EngineReady, Steps, TimedStep
from pd_cluster.engine.start.rank_main import die_with_parent, prepare
from pd_cluster.errors import PdClusterError
from pd_cluster.settings.process_configs import WorkerConfig
from pd_cluster.types import Leg, Request, RequestSpec, Sampling, TokenOutput

if TYPE_CHECKING:
    from pd_cluster.engine.step.engine_core import EngineCore
    from pd_cluster.model.runner.model_runner import ModelRunner

GREEDY = Sampling(temperature=0.0, max_tokens=1 << 20, ignore_eos=True)
FIRST = msgspec.structs.replace(GREEDY, max_tokens=1)


class TimedEngine:
    """An engine core, and requests with random prompts."""

    def __init__(self, config: WorkerConfig) -> None:
        """Loads the model as a worker does. Raises PdClusterError."""
        prepare(config)
        from pd_cluster.engine.assembly.build_engine import build_core
        from pd_cluster.engine.assembly.build_ranks import device_of
        from pd_cluster.engine.ranks.rank_cores import HostCores

        device = device_of(config)
        cores, self._device = HostCores(config, device), device.kind
        self.core: EngineCore
        self.runner: ModelRunner
        with cores.loading():
            self.core, self.runner = build_core(config.engine, device=device)
        cores.share(self.runner.threads)
        self._rng = random.Random(config.name)
        self._num_requests = 0

    @property
    def ready(self) -> EngineReady:
        from pd_cluster.kv.layer_groups import transfer_nbytes

        runner, scheduler = self.runner, self.core.scheduler
        layouts, size = [pool.layout.to_info() for pool in runner.pools], scheduler.block_size
        return EngineReady(
            max_num_seqs=runner.max_num_seqs,
            max_num_batched_tokens=runner.max_num_batched_tokens,
            max_model_len=runner.max_model_len,
            num_blocks=scheduler.blocks.num_blocks,
            block_size=size,
            device=self._device,
            kv_token_nbytes=transfer_nbytes(layouts, layouts, size) // size,
        )

    def run(self, asked: Steps) -> list[TimedStep]:
        """Runs the steps, removes all requests, and returns the timed steps."""
        for _ in range(asked.num_rows):
            self._landed(asked.num_context)
        timed: list[TimedStep] = []
        prompt: Request | None = None
        ends_s = time.monotonic() + asked.seconds
        requests = self.core.scheduler.requests
        while True:
            is_over = len(timed) >= asked.num_steps or time.monotonic() >= ends_s
            is_idle = prompt is None or prompt.key not in requests
            if is_over and (prompt is None or is_idle or not prompt.num_computed_tokens):
                break
            if is_idle and asked.num_prompt_tokens:
                prompt = self._request(asked.num_prompt_tokens, FIRST)
                self.core.scheduler.add(prompt)
            timed.append(self._step())
        for request in list(requests.values()):
            self.core.scheduler.finish(request)
        self.runner.threads.rest()
        return timed

    def _step(self) -> TimedStep:
        from pd_cluster.engine.step.step_timing import work_of

        began_s = time.monotonic()
        plan = self.core.plan()
        self.core.run(plan)
        return TimedStep(began_s, time.monotonic() - began_s, work_of(plan.chunks))

    def _request(self, num_tokens: int, sampling: Sampling, leg: Leg = "hybrid") -> Request:
        self._num_requests += 1
        prompt = [self._rng.randrange(self.runner.vocab_size) for _ in range(num_tokens)]
        name, arrival_s = f"p{self._num_requests}", float(self._num_requests)
        return Request(name, RequestSpec(prompt, sampling), arrival_s=arrival_s, leg=leg)

    def _landed(self, num_context: int) -> None:
        request, scheduler = self._request(max(1, num_context), GREEDY, "decode"), self.core.scheduler
        scheduler.land(request, len(request.prompt_token_ids))
        scheduler.landed(request)
        scheduler.start_sequences(request, [TokenOutput(request.request_id, 0, 0, 0, 1)])


def main(lines: BinaryIO, answers: BinaryIO) -> int:
    config = msgspec.json.decode(lines.readline(), type=WorkerConfig)
    config.logs.begin()
    try:
        engine = TimedEngine(config)
    except PdClusterError as error:
        _tell(answers, EngineReady(error=error.text))
        return 1
    _tell(answers, engine.ready)
    for line in lines:
        _tell(answers, engine.run(msgspec.json.decode(line, type=Steps)))
    return 0


def _tell(answers: BinaryIO, answer: EngineReady | list[TimedStep]) -> None:
    answers.write(msgspec.json.encode(answer) + b"\n")
    answers.flush()


if __name__ == "__main__":
    die_with_parent()
    own = os.fdopen(os.dup(1), "wb")
    os.dup2(2, 1)  # keeps libraries' output out of the answers
    sys.exit(main(sys.stdin.buffer, own))
