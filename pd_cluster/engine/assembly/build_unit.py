"""Builds the parts of a unit for rank 0 of one of its members; `unit/unit_meeting.py` builds the followers' parts."""

from __future__ import annotations

import hashlib
from collections.abc import Callable
from typing import NamedTuple

from pd_cluster import wire
from pd_cluster.checkpoints.checkpoint import Checkpoint
from pd_cluster.devices.device import Device
from pd_cluster.engine.handover.links.network_policy import why_no_unit
from pd_cluster.engine.unit.member_connections import MemberConnections, UnitPost
from pd_cluster.engine.unit.unit_meeting import AnyUnitGroup, UnitMeeting, group_of
from pd_cluster.errors import ConfigError
from pd_cluster.model.loading.model_loader import resolve_dtype
from pd_cluster.model.parallel.device_unit_group import UnitEnds
from pd_cluster.model.planning.pool_sizing import default_step_tokens
from pd_cluster.settings.engine_config import EngineConfig
from pd_cluster.settings.process_configs import WorkerConfig
from ranktable_tools.host_addresses import is_one_host

# Settings that all members must share. They determine which rows one member computes for another, the order of these
# rows, and the proofs that all members compute at load.
EQUAL = (
    *("tensor_parallel_size", "max_num_batched_tokens", "quantization", "expert_placement_strategy"),
    *("attention_backend", "block_size"),
)
# Settings that determine how many rows the largest step has. Members with accelerators compute that step when they
# load.
EQUAL_ON_DEVICES = ("max_num_seqs", "max_model_len")


class UnitParts(NamedTuple):
    """This member's connections to the unit's other members, and the meeting of its ranks with their ranks."""

    mates: MemberConnections
    meeting: UnitMeeting

    def group(self, config: WorkerConfig, device: Device, begin: Callable[[], None]) -> AnyUnitGroup:
        """Returns this rank's end of the exchange; the ranks meet later, once weights are loaded.

        The meeting begins with a call of `begin`, which opens the mailbox and reports that this member is forming.
        """

        def meet() -> UnitEnds:
            begin()
            try:
                self.mates.await_all(config.timeouts.connect_timeout_s)
            except ConfigError:
                self.mates.post.await_confirmed(
                    config.timeouts.dead_after_s
                )  # so that the other members report the difference, too
                raise
            hosts = [config.server_ip, *self.mates.hosts()]
            if not config.trusts_network and any(not is_one_host(hosts[0], host) for host in hosts):
                # The checks of `serve` cover only members that a rank table lists.
                raise ConfigError(why_no_unit(self.mates.place.name, hosts))
            return self.meeting.meet()

        return group_of(config, device, meet)


def unit_of(config: WorkerConfig, post: UnitPost, device: Device, lost: Callable[[str], None]) -> UnitParts | None:
    """Returns rank 0's parts of the unit; None if the instance is in no unit.

    When another member is lost, the mailbox's thread calls `lost(why)`, which also ends this member.
    """
    place = config.unit
    if place is None:
        return None

    def lose(rank: int, name: str, reason: str) -> None:
        lost(f"{name}, member {rank} of {place.size} of this unit, is lost: {reason}")

    def take(key: wire.UnitKey) -> None:
        meeting.put(key)

    mates = MemberConnections(place, terms_of(config.engine, device), post, lose, take)
    meeting = UnitMeeting(config, device, mates.send)

    return UnitParts(mates, meeting)


def terms_of(engine: EngineConfig, device: Device) -> dict[str, str]:
    """Returns what must be equal for all members, as texts that fit a message: settings, kind of device, model."""
    checkpoint = Checkpoint.of(engine)
    names = EQUAL + (EQUAL_ON_DEVICES if device.is_accelerator else ())
    terms = {
        "model": checkpoint.identity,
        "device": device.kind,
        "dtype": resolve_dtype(engine.dtype, checkpoint, device),  # what "auto" means depends on the processor
        "hf_overrides": checkpoint.hf_overrides,
        **{name: str(getattr(engine, name)) for name in names},
    }
    if engine.max_num_batched_tokens is None:
        terms["max_num_batched_tokens"] = str(default_step_tokens(device))
    return {name: text if len(text) <= wire.MOST_TEXT else _digest(text) for name, text in terms.items()}


def _digest(text: str) -> str:
    return f"a value with the digest {hashlib.sha256(text.encode()).hexdigest()[:12]}"
