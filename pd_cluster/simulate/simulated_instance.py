"""One life of an instance: a real worker and its loop, whose steps take the time that the costs say.

A turn of the loop runs when its step begins; the effects of the step follow when it ends. In between mail waits, as it
does during a real step, except for mail that a real mailbox answers at once.
"""

from __future__ import annotations

import queue
from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from pd_cluster import wire
from pd_cluster.costs.linear_costs import StepWork
from pd_cluster.engine.handover.engine_events import ConnClosed, ConnOpened, Event, Mail
from pd_cluster.engine.step.step_timing import work_of
from pd_cluster.engine.worker.worker import IDLE_WAIT_S, TICK_S, Worker
from pd_cluster.engine.worker.worker_loop import Loop
from pd_cluster.simulate.equal_steps import num_equal_steps, take_equal_steps
from pd_cluster.simulate.event_agenda import Agenda
from pd_cluster.simulate.shared_host import SharedHost
from pd_cluster.simulate.simulated_lanes import Wires
from pd_cluster.simulate.simulated_mailboxes import SimulatedMailboxes, SimulatedPost
from pd_cluster.simulate.simulated_runner import Chunks, SimulatedRunner
from pd_cluster.simulate.simulation_records import Notes
from pd_cluster.simulate.step_progress import RunProgress, StepRun
from pd_cluster.simulate.virtual_time_loop import VirtualClock
from pd_cluster.types import LinkState, TokenOutput

BEAT_GAP_S = 0.02  # the same value as in net/mailbox.py
NO_STEP, SOON_S = -1.0, 1e-12
NUM_TIMED = 2  # about this many steps of a run are timed
LEAST_RUN = 3  # fewer equal steps do not form a run
MOST_RUN_S = 0.5  # the longest run of equal steps without a turn; equals the interval of heartbeats


class StepClock:
    """The simulated time. In a turn, after its step, the time when the step ends."""

    def __init__(self, clock: VirtualClock) -> None:
        self._clock, self.ahead_s = clock, 0.0

    def __call__(self) -> float:
        return self._clock.now_s + self.ahead_s


@dataclass(frozen=True, slots=True)
class SimulationContext:
    """The parts that instances share. `host`: the shared host; None: instances do not slow each other down."""

    agenda: Agenda
    mail: SimulatedMailboxes
    notes: Notes
    host: SharedHost | None = None


class InstancePost(SimulatedPost):
    """Implements link_ends.Post. Messages that are sent after a step wait until the step ends."""

    def __init__(self, owner: SimulatedInstance) -> None:
        super().__init__(owner.around.mail, owner.peer)
        self._owner, self._agenda = owner, owner.around.agenda
        self._beaten_s, self._beats_soon = float("-inf"), False

    def send(self, conn: str, body: wire.Body) -> None:
        self._owner.later(lambda: self._send(conn, body))

    def _send(self, conn: str, body: wire.Body) -> None:
        if isinstance(body, wire.Outputs):
            self._owner.around.notes.sent(self._owner.name, body.tokens, self._agenda.now())
        super().send(conn, body)

    def beat(self) -> None:
        self._owner.later(self._beat)

    def beat_soon(self) -> None:
        self._owner.later(self._plan_beat)

    def _plan_beat(self) -> None:
        if not self._beats_soon:
            self._beats_soon = True
            self._agenda.at(max(self._agenda.now(), self._beaten_s + BEAT_GAP_S), self._beat)

    def _beat(self) -> None:
        self._beaten_s, self._beats_soon = self._agenda.now(), False
        for conn in self._owner.schedulers:
            super().send(conn, wire.Heartbeat(self._owner.worker.load))


class SimulatedInstance:
    """Implements SimulatedPeer. Has no worker before `power_on`."""

    kind: Literal["worker"] = "worker"

    def __init__(self, name: str, peer: str, around: SimulationContext, slowdown: float = 1.0) -> None:
        self.name, self.peer, self.around, self.slowdown = name, peer, around, slowdown
        self.clock, self.wires = StepClock(around.agenda.clock), Wires()
        self.inbox: queue.SimpleQueue[Event] = queue.SimpleQueue()
        self.schedulers: list[str] = []  # connections
        self.post = InstancePost(self)
        self.is_dead = False
        self._later: list[Callable[[], None]] | None = None  # effects of the step; None: no step, or equal steps
        self._step_s = NO_STEP  # the time that the current turn's step takes at full speed
        self._progress: RunProgress | None = None
        self._sampling: list[str] = []  # requests that get a token in the current step
        self._has_news = False  # whether there is news that a later tick will report
        self._num_prompt_tokens = 0  # computed here and reported by a tick
        self._links: dict[str, LinkState] = {}
        self._are_up = True  # whether all links are up
        self._end = 0  # counts scheduled ends and wakes; only the last one is valid
        self._wakes_s = float("inf")

    def power_on(self, worker: Worker, runner: SimulatedRunner) -> None:
        self.worker, self._runner = worker, runner
        self._loop = Loop(self.inbox, worker)
        self.around.mail.add(self)

    @property
    def is_prefill(self) -> bool:
        return self.worker.handover.is_prefill

    # ---- mail

    def on_opened(self, conn: str, peer: str, kind: str) -> None:
        if kind == "scheduler":
            self.schedulers.append(conn)
        self.put(ConnOpened(conn, peer, kind))

    def on_message(self, conn: str, peer: str, body: wire.Body) -> None:
        if isinstance(body, wire.Credit):
            self.wires.credited_s[body.transfer_id] = self.around.agenda.now()
        if isinstance(body, wire.Submit) and body.leg == "decode" and self._progress is not None:
            self.inbox.put(Mail(conn, peer, body))  # affects no step until its KV cache is offered, which happens later
        elif not self.worker.intercept(conn, body):
            self.put(Mail(conn, peer, body))

    def on_closed(self, conn: str, peer: str, reason: str) -> None:
        if conn in self.schedulers:
            self.schedulers.remove(conn)
        self.put(ConnClosed(conn, peer, reason))

    def put(self, event: Event) -> None:
        """Passes an event to the loop, which handles it before its next step."""
        self.inbox.put(event)
        self._has_news = True
        if self._progress is None:
            self._wake_at(self.around.agenda.now())
        elif self._later is None:  # a run of equal steps ends with the current step
            self._progress.cut(self.around.agenda.now())
            self._plan_end()

    def later(self, do: Callable[[], None]) -> None:
        """Runs an action when the current turn's step has ended, or at once if there is no step."""
        if self.clock.ahead_s and self._later is not None:
            self._later.append(do)
        else:
            do()

    # ---- turns and steps

    def began(self, chunks: Chunks, seconds: float) -> None:
        """Called by the runner with the step of this turn."""
        now_s = self.around.agenda.now()
        self._step_s, self._later, self.wires.step_s = seconds, [], now_s
        self.clock.ahead_s = seconds * self._factor or SOON_S
        self._sampling = [request.request_id for request, num in chunks if num >= request.num_behind]
        for request, _ in chunks:
            request.gathers = True  # clients' reading is not simulated, so tokens may be sent in groups
        self._has_news = True

    def _turn(self) -> None:
        self._step_s, self._wakes_s = NO_STEP, float("inf")
        self._loop.turn(wait_s=0.0)
        self.clock.ahead_s = 0.0
        if self._step_s == NO_STEP:
            self._rest()
        else:
            self._begin(StepRun(self._step_s))

    def _begin(self, run: StepRun) -> None:
        self._progress = RunProgress(run, self.around.agenda.now(), self._factor)
        if self.around.host is not None:
            self.around.host.changed(self, computes=True)
        self._plan_end()

    @property
    def _factor(self) -> float:
        """The factor by which steps currently take longer."""
        return self.slowdown * (self.around.host.factor(self) if self.around.host is not None else 1.0)

    def set_speed(self, slowdown: float) -> None:
        """Sets how much longer steps take from now on, including the current one."""
        self.slowdown = slowdown
        self.change_pace()

    def change_pace(self) -> None:
        """Continues the current steps with the new slowdown, after neighbours have started or stopped computing."""
        if self._progress is not None:
            self._progress.slow(self.around.agenda.now(), self._factor)
            self._plan_end()

    def _plan_end(self) -> None:
        assert self._progress is not None
        self._end += 1
        self.around.agenda.at(self._progress.end_s, self._ended, self._end)

    def _ended(self, number: int) -> None:
        if number != self._end or self.is_dead or (progress := self._progress) is None:
            return
        was_run, self._progress = self._later is None, None
        if was_run:
            self._take(progress, progress.run.num_steps)
        self._release()
        if self.around.host is not None:
            self.around.host.changed(self, computes=False)
        if not was_run and self.inbox.empty() and (run := self._equal_run()) is not None:
            self._begin(run)
        else:
            self._turn()

    def _release(self) -> None:
        """Runs the effects of the step that has ended."""
        now_s, notes = self.around.agenda.now(), self.around.notes
        for request_id in self._sampling:
            notes.sampled(self.name, request_id, now_s)
        self._sampling = []
        waiting, self._later = self._later or [], None
        for do in waiting:
            do()

    def _equal_run(self) -> StepRun | None:
        """Returns the equal steps that the loop would compute if no mail came; None: it must take a turn."""
        core = self.worker.core
        if self.worker.handover.imports.imminent_s is not None:
            return None
        if (most := num_equal_steps(core.scheduler)) < LEAST_RUN:
            return None
        work = self._decode_work()
        first_s, next_s = (self._runner.seconds(_behind(work, at)) for at in range(2))
        run = StepRun(first_s, max(0.0, next_s - first_s), most)
        num_prompt_tokens = core.scheduler.num_prefix_query_tokens
        limit_s = (
            MOST_RUN_S if num_prompt_tokens == self._num_prompt_tokens else TICK_S
        )  # a tick reports the blocks of computed prompts
        self._num_prompt_tokens = num_prompt_tokens
        return StepRun(run.first_s, run.growth_s, min(most, run.num_within(limit_s)))

    def _decode_work(self) -> StepWork:
        return work_of([(request, 1) for request in self.worker.core.scheduler.running], is_computed=False)

    def _take(self, progress: RunProgress, num_steps: int) -> None:
        """Records equal steps as computed. The worker's fit of costs gets only some of them."""
        worker, run, now_s = self.worker, progress.run, self.around.agenda.now()
        work, timing = self._decode_work(), worker.timing
        took = StepRun(run.first_s * progress.factor, run.growth_s * progress.factor, num_steps)
        for at in range(0, num_steps, 1 + num_steps // NUM_TIMED):
            timing.computed(_behind(work, at), took.first_s + took.growth_s * at, work.num_rows)
        names = [request.request_id for request in worker.core.scheduler.running]
        take_equal_steps(worker.core.scheduler, num_steps)
        worker.core.num_steps += num_steps
        self.around.notes.sampled_often(self.name, names, now_s, took)

    def die(self) -> None:
        """Ends this life. The results of its completed steps count as sent."""
        if self._progress is not None and self._later is None:
            self._progress.cut(self.around.agenda.now())
            if num_steps := self._progress.run.num_steps - 1:
                self._take(self._progress, num_steps)
        for request in self.worker.core.scheduler.running:
            if num := request.num_unsent:
                *earlier, last = request.output_token_ids[-num:]
                position = len(request.output_token_ids) - 1
                token = TokenOutput(
                    request.request_id, request.attempt, request.index, position, last, earlier=tuple(earlier)
                )
                self.around.mail.send(self.peer, request.client, wire.Outputs([token]))
        self.is_dead = True
        self.around.mail.remove(self.peer)
        if self.around.host is not None:
            self.around.host.changed(self, computes=False)

    def _rest(self) -> None:
        """Schedules the next turn of an idle loop, if one is needed."""
        now_s, wait_s = self.around.agenda.now(), self.worker.wait_s
        links = self.worker.handover.out_links.states()
        if links is not self._links:
            self._links, self._are_up = links, all(link.is_up for link in links.values())
        if not self.inbox.empty():
            self._wake_at(now_s)
        elif wait_s < IDLE_WAIT_S:
            self._wake_at(now_s + wait_s)
        elif self._has_news or not self._are_up:
            self._has_news = False
            self._wake_at(now_s + TICK_S)

    def _wake_at(self, when_s: float) -> None:
        if when_s < self._wakes_s:
            self._wakes_s = when_s
            self._end += 1
            self.around.agenda.at(when_s, self._wake, self._end)

    def _wake(self, number: int) -> None:
        if number == self._end and not self.is_dead and self._progress is None:
            self._turn()


def _behind(work: StepWork, num_steps: int) -> StepWork:
    """Returns the work of the decode step that follows after `num_steps` equal steps."""
    return work._replace(num_context_tokens=work.num_context_tokens + num_steps * work.num_rows)
