"""The handover world with a prefill engine on a device whose steps are launched ahead of the host.

A launch appends each layer to the device's queue; layers are computed while the host continues. A link's job waits for
all earlier launches, as for an event on a stream. LookAhead is production code.
"""

from __future__ import annotations

from collections import defaultdict, deque
from collections.abc import Callable, Sequence
from functools import partial

from pd_cluster import wire
from pd_cluster.engine.step.look_ahead import LookAhead
from pd_cluster.model.inputs.forward_batch import OnLayer
from pd_cluster.model.sampling.device_tokens import After, Tokens
from pd_cluster.model.sampling.sampler import Sampled
from pd_cluster.types import Request
from tests.support.handoff_engine import Memory
from tests.support.handoff_world import World


class ToyDevice:
    """Computes layers in launch order."""

    def __init__(self, memory: Memory) -> None:
        self._memory = memory
        self._queue: deque[Callable[[], None]] = deque()
        self.num_launched = self.num_done = 0

    def launch(self, chunks: Sequence[tuple[Request, int]], layer: int) -> None:
        """Copies block tables and tokens, because the host changes its own before the layer is computed."""
        for request, num_tokens in chunks:
            start = request.num_computed_tokens
            values = self._memory.contents(request, 0, start + num_tokens, layer)
            self._queue.append(partial(self._compute, list(request.tables[0]), values, start, layer))
            self.num_launched += 1

    def run_one(self) -> None:
        if self._queue:
            self._queue.popleft()()
            self.num_done += 1

    def _compute(self, table: list[int], values: list[int], start: int, layer: int) -> None:
        slots, slot = self._memory.slots[layer], self._memory.slot
        found = [slots[slot(table, position)] for position in range(start)]
        assert found == values[:start], f"a step reads foreign KV in layer {layer}"
        for position in range(start, len(values)):
            slots[slot(table, position)] = values[position]


class DeviceTokens(Tokens):
    def __init__(self, world: AheadWorld, num_rows: int) -> None:
        self._world, self._num_rows = world, num_rows
        self._stop = world.device.num_launched

    def wait(self) -> list[Sampled]:
        while self._world.device.num_done < self._stop:
            self._world.meanwhile()
            self._world.device.run_one()
        return [Sampled(0, None)] * self._num_rows


class AheadWorld(World):
    """P's mailbox, links and other threads run between its engine's steps and during them."""

    goes_ahead = True

    def start_p(self) -> None:
        super().start_p()
        self.device = ToyDevice(self.p.memories[0])
        self.ahead = LookAhead(self, self.p.scheduler)
        self.marks: defaultdict[str, deque[int]] = defaultdict(deque)  # link -> launches that each job awaits
        self._is_stepping = False
        self.num_ahead = 0

    def can_launch(self, requests: Sequence[Request]) -> bool:
        return True

    def launch(
        self, chunks: Sequence[tuple[Request, int]], after: After | None = None, on_layer: OnLayer | None = None
    ) -> DeviceTokens:
        assert after is None, "a prompt that is handed over does not decode here"
        for _, layer in self.p.order:
            self.device.launch(chunks, layer)
            self.meanwhile()
            self._read_credits()
            if on_layer is not None:
                on_layer(layer + 1)
        return DeviceTokens(self, len(chunks))

    def meanwhile(self) -> None:
        """Runs other threads and D while P's engine launches or waits."""
        if self.rng.random() < 0.5:
            self._one_event()

    # ---- P's engine

    def _p_step(self) -> None:
        if self._is_stepping:
            return
        while self.p_inbox:
            self._p_reads_inbox()
        self._is_stepping = True
        self._run_step()
        self._is_stepping = False

    def _run_step(self) -> None:
        plan, on_layer = self.ahead.plan(), None
        if plan is None:
            plan = self.p.scheduler.plan()
            on_layer = self._begins(plan)
        if not plan.chunks:
            self.exports.expire()
            return
        chosen = self.ahead.sample(plan, on_layer, self._begins)
        if chosen is None:
            self.launch(plan.chunks, None, on_layer).wait()
            ready = self.p.scheduler.computed(plan)
        else:
            ready = chosen[0]
        self._p_ends_step(plan, ready)
        self.num_ahead = self.ahead.num_ahead

    def _p_reads_inbox(self) -> None:
        if not self._is_stepping:
            super()._p_reads_inbox()

    def _p_dies(self) -> None:
        if not self._is_stepping:
            super()._p_dies()

    # ---- its links

    def ship(self, conn: str, group: int, transfer_id: str, index: int, piece: wire.KVPiece) -> None:
        self.marks[conn].append(self.device.num_launched)
        super().ship(conn, group, transfer_id, index, piece)
        lane = self.link(conn).lanes[group]
        job = lane.jobs.pop()
        request = self.p.legs[transfer_id.removeprefix("t")][0]

        def checked() -> wire.KVHeader | None:
            header = job()
            assert header is None or lane.source.holds(request, piece), f"{transfer_id} is shipped too early"
            return header

        lane.jobs.append(checked)

    def ship_end(self, conn: str, group: int, end: wire.KVEnd) -> None:
        self.marks[conn].append(self.device.num_launched)
        super().ship_end(conn, group, end)

    def _check_shipped(self, group: int, transfer_id: str, piece: wire.KVPiece) -> None:
        """Checks nothing, because the piece may not be computed yet; see `ship`."""

    def _send_job(self) -> None:
        conn = self.p_conn
        if conn is not None and self.marks[conn]:
            if self.marks[conn][0] > self.device.num_done:
                self.device.run_one()
                return
            self.marks[conn].popleft()
        super()._send_job()
