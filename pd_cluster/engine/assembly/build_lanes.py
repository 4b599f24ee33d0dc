"""Builds rank 0's connections to the other ranks, and the ends of lanes on all ranks."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from pd_cluster.engine.assembly.build_ranks import Inbox
from pd_cluster.engine.handover.engine_events import Event, StopEngine
from pd_cluster.engine.handover.links.link_ends import LaneEnds, LocalLanes
from pd_cluster.engine.ranks import rank_messages as to
from pd_cluster.engine.ranks.hang_watchdog import end_within
from pd_cluster.engine.ranks.lead_runner import LeadRunner, Watch
from pd_cluster.engine.ranks.rank_channel import Channel
from pd_cluster.engine.ranks.remote_lanes import RankLanes
from pd_cluster.engine.step.engine_core import EngineCore
from pd_cluster.errors import InstanceLost
from pd_cluster.net.mailbox import Mailbox
from pd_cluster.settings.process_configs import WorkerConfig


def followers_of(config: WorkerConfig) -> list[Channel]:
    """Returns the connections to the instance's other ranks."""
    return [Channel(fd, to.FromFollower, config.timeouts.collective_timeout_s) for fd in config.ranks.fds]


def lanes_of(
    config: WorkerConfig,
    core: EngineCore,
    local: LocalLanes,
    mailbox: Mailbox,
    inbox: Inbox,
    tell_lost: Callable[[str], None],
) -> LaneEnds:
    """Returns the creator of the lanes' ends. Also begins to watch the followers if there are any."""
    lead, wait_s = core.runner, config.timeouts.collective_timeout_s
    if not isinstance(lead, LeadRunner):
        return local
    lanes = RankLanes(local, lead.followers, lambda: lead.progress, mailbox.send, inbox.put)
    lost = partial(on_rank_lost, config.ranks.size, wait_s, inbox, tell_lost)
    Watch(lead.followers, _message_handler_of(lead, lanes, inbox.put), lost, wait_s).start()
    return lanes


def _message_handler_of(
    runner: LeadRunner, lanes: RankLanes, put: Callable[[Event], None]
) -> Callable[[to.OfLanes | to.LoadedAdapter | to.TierReport], None]:
    """Returns a function that forwards a follower's messages. `put` passes an event to the engine's thread."""

    def hear(message: to.OfLanes | to.LoadedAdapter | to.TierReport) -> None:
        if isinstance(message, to.LoadedAdapter):
            runner.adapters.hear(message)
        elif isinstance(message, to.TierReport):
            put(message.report)
        else:
            lanes.hear(message)

    return hear


def on_rank_lost(size: int, wait_s: float, inbox: Inbox, tell_lost: Callable[[str], None], rank: int, why: str) -> None:
    """Stops the engine's loop.

    A loop that waits for the lost rank never finishes its round, so a timer also ends the process. Nothing else would
    end it: NCCL's watchdog does not cover calls that a CUDA graph replays.
    """
    error = InstanceLost(f"rank {rank} of {size} {why}")
    inbox.put(StopEngine(error))
    end_within(2 * wait_s)
    tell_lost(str(error))
