"""A router over two prefill and two decode instances, with a recording mailbox."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncGenerator, Coroutine
from typing import Any, cast

from pd_cluster import wire
from pd_cluster.cluster.instances.instance_state import Instance
from pd_cluster.cluster.instances.roster import RosterFollower
from pd_cluster.cluster.placement.routing_policy import least_loaded
from pd_cluster.cluster.placement.routing_rules import ReplayLimits, RoutingRules
from pd_cluster.cluster.records.request_stats import RequestStats
from pd_cluster.cluster.routing.request_admission import RequestAdmission
from pd_cluster.cluster.routing.router import Router
from pd_cluster.cluster.streams.request_origin import RequestOrigin
from pd_cluster.cluster.streams.stream_table import StreamTable
from pd_cluster.process_messages import InstanceInfo
from pd_cluster.types import FinishReason, LegEnd, LinkState, PromptOutput, RequestSpec, Role, Sampling, TokenOutput
from tests.support.mail import RecordedMail

PROMPT = [1, 2, 3]
SAMPLING = Sampling(max_tokens=4)
WAIT_S = 60.0


INFINITY = float("inf")


class FakeMembership:
    def __init__(self, instances: list[Instance]) -> None:
        self.instances = instances
        self.changed = asyncio.Event()

    def watch(self, follower: RosterFollower) -> None:
        """Does nothing, because tests notify the router themselves."""

    async def change(self) -> None:
        await self.changed.wait()
        self.changed.clear()


class World:
    """A router over two prefill and two decode instances, all linked."""

    def __init__(self, request_timeout_s: float = 0.0, **rules: Any) -> None:
        self.instances = [ready(name) for name in ("prefill-0", "prefill-1", "decode-0", "decode-1")]
        links = {i.key: LinkState("up", ("shm",)) for i in self.instances if i.role == "decode"}
        for prefill in self.instances[:2]:
            prefill.load = wire.Load(links=links)
        self.mailbox = RecordedMail()
        self.membership = FakeMembership(self.instances)
        rules["request_timeout_s"] = request_timeout_s
        self.router = Router(self.mailbox.send, self.membership, RoutingRules(least_loaded, **rules))

    def serve(self, sampling: Sampling = SAMPLING, **more: Any) -> AsyncGenerator[TokenOutput, None]:
        """`more`: further fields of the request and its origin, and arguments of `Router.serve`."""
        asked = {name: more.pop(name) for name in RequestSpec.__struct_fields__ if name in more}
        origin = {name: more.pop(name) for name in RequestOrigin._fields if name in more}
        serving = self.router.serve(RequestSpec(PROMPT, sampling, **asked), origin=RequestOrigin(**origin), **more)
        return cast("AsyncGenerator[TokenOutput, None]", serving)

    async def begin(
        self, sampling: Sampling = SAMPLING, **more: Any
    ) -> tuple[AsyncGenerator[TokenOutput, None], asyncio.Task[TokenOutput], str]:
        """Starts a request; returns its iterator, the task that awaits its first token, and its id."""
        serving = self.serve(sampling, **more)
        num_before = len(self.mailbox.of(wire.Submit))
        first = asyncio.ensure_future(anext(serving))
        while len(self.mailbox.of(wire.Submit)) < num_before + 2 and not first.done():
            await asyncio.sleep(0)
        return serving, first, self.mailbox.of(wire.Submit)[-1][1].request_id

    async def until(self, kind: type[wire.Body], number: int) -> list[tuple[str, Any]]:
        """Waits until `number` messages of this kind were sent, and returns them."""
        while len(found := self.mailbox.of(kind)) < number:
            await asyncio.sleep(0)
        return found

    def outputs(
        self, conn: str, *tokens: TokenOutput, ended: LegEnd | None = None, prompt: PromptOutput | None = None
    ) -> None:
        prompts = [prompt] if prompt is not None else []
        self.router.on_outputs(conn, wire.Outputs(list(tokens), [ended] if ended is not None else [], prompts))

    def lose(self, name: str, reason: str = "the connection was closed") -> None:
        """Marks an instance as lost, as membership does."""
        instance = next(i for i in self.instances if i.name == name)
        instance.state = "unreachable"
        self.router.on_lost(instance, reason)

    def come_back(self, name: str, epoch: int = 0) -> None:
        """Brings an instance back, as membership does; a different epoch means that it restarted."""
        instance = next(i for i in self.instances if i.name == name)
        instance.info = info_of(name, instance.role, epoch=epoch)
        instance.state, instance.ready_s = "ready", asyncio.get_running_loop().time()

    def aborted(self, index: int = -1) -> list[str]:
        """Returns the instances at which one sequence, or the whole request, was aborted."""
        return sorted(conn for conn, body in self.mailbox.of(wire.Abort) if body.index == index)

    async def leave(
        self, serving: AsyncGenerator[TokenOutput, None], waiting: asyncio.Task[TokenOutput] | None = None
    ) -> None:
        """Closes the iterator, even while a task awaits its next token; asserts that no request is left."""
        if waiting is not None:
            waiting.cancel()
            await asyncio.gather(waiting, return_exceptions=True)
        await serving.aclose()
        self.assert_home()

    def assert_home(self) -> None:
        assert self.router.num_streams == 0
        assert [(i.num_outstanding, i.outstanding_tokens) for i in self.instances] == [(0, 0)] * 4
        assert not any(i.num_long or i.long_tokens for i in self.instances)


def admission_of(stats: RequestStats | None = None) -> RequestAdmission:
    """Returns the admission of a router without instances and streams, which waits for no replays."""
    stats = stats or RequestStats()
    rules = RoutingRules(least_loaded, replay=ReplayLimits(together_s=0.0))
    return RequestAdmission(StreamTable(lambda *_: None, stats), FakeMembership([]), rules, stats)


def info_of(name: str, role: Role, **fields: Any) -> InstanceInfo:
    """Returns a ready worker's description of itself."""
    known = {"state": "ready", "server_ip": "127.0.0.1", "device_ids": ["0"], "epoch": 0, "pid": 1}
    return InstanceInfo(name=name, role=role, **{**known, **fields})


def ready(name: str) -> Instance:
    role: Role = "prefill" if name.startswith("prefill") else "decode"
    return Instance(name, role, "127.0.0.1", 1, ["0"], state="ready", conn=f"to-{name}", heard_s=INFINITY)


def token(
    request_id: str,
    position: int,
    token_id: int = 7,
    finish: FinishReason | None = None,
    attempt: int = 0,
    index: int = 0,
) -> TokenOutput:
    return TokenOutput(request_id, attempt, index, position, token_id, finish)


def run(test: Coroutine[Any, Any, None]) -> None:
    asyncio.run(asyncio.wait_for(test, WAIT_S))


async def rest_of(serving: AsyncGenerator[TokenOutput, None]) -> list[int]:
    return [item.position async for item in serving]


async def turns(number: int = 20) -> None:
    """Yields to the event loop often enough for all other tasks to become idle."""
    for _ in range(number):
        await asyncio.sleep(0)
