"""Connects the ranks of a unit's members.

Each tensor-parallel index has one gloo group, and on accelerators another group over NCCL or HCCL.

The rank 0s of the members exchange the keys of all groups over their connections. A follower writes its own keys into a
file of its instance, and reads the other members' keys there.
"""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable
from datetime import timedelta
from typing import Any

from torch._C._distributed_c10d import FileStore, PrefixStore, ProcessGroupGloo, Store

from pd_cluster import wire
from pd_cluster.devices.device import Device
from pd_cluster.errors import InstanceLost, first_line
from pd_cluster.model.parallel.device_unit_group import DeviceUnitGroup, UnitEnds, device_end
from pd_cluster.model.parallel.unit_group import LOAD_TIMEOUT_S, UnitGroup
from pd_cluster.settings.process_configs import WorkerConfig
from pd_cluster.transport.meeting import Meeting

log = logging.getLogger(__name__)

AnyUnitGroup = UnitGroup | DeviceUnitGroup

BEGIN, MET = "begin", "met"  # set by ranks of an instance: all members are connected; this rank has met its peers
FOREVER = timedelta(days=1000)  # a follower needs no limit, because it ends with rank 0


def group_of(config: WorkerConfig, device: Device, meet: Callable[[], UnitEnds]) -> AnyUnitGroup:
    """Returns one rank's end of its group. `meet` returns the process groups once all members are connected."""
    assert config.unit is not None
    rank, size, timeout_s = config.unit.rank, config.unit.size, config.timeouts.collective_timeout_s
    if device.is_accelerator:
        return DeviceUnitGroup(rank, size, meet, timeout_s)
    return UnitGroup(rank, size, lambda: meet().host, timeout_s)


def follower_group(config: WorkerConfig, device: Device) -> AnyUnitGroup | None:
    """Returns a follower's end of its group; None if the instance is in no unit."""
    if config.unit is None:
        return None
    rank = config.ranks.rank

    def meet() -> UnitEnds:
        with _meeting_errors():
            between = _between(config)
            between.wait([BEGIN], FOREVER)
            ends = _ends(_store_of(config, rank), config, device)
            between.set(f"{MET}-{rank}", "")
            return ends

    return group_of(config, device, meet)


class UnitMeeting:
    """Rank 0's side: lets all ranks of this instance meet those of the other members."""

    def __init__(self, config: WorkerConfig, device: Device, send: Callable[[wire.Body], None]) -> None:
        """`send` sends a message to all other members."""
        assert config.unit is not None
        self._config, self._device, self._size = config, device, config.ranks.size
        self._between = _between(config) if self._size > 1 else None
        self._meetings = [
            Meeting(
                LOAD_TIMEOUT_S,
                lambda key, value, rank=rank: send(wire.UnitKey(rank, key, value)),  # type: ignore[misc]
                config.unit.size - 1,
                _store_of(config, rank) if self._size > 1 else None,
            )
            for rank in range(self._size)
        ]

    def put(self, key: wire.UnitKey) -> None:
        """Stores a key from another member. Called on the mailbox's thread."""
        if key.tp_rank < self._size:
            self._meetings[key.tp_rank].put(key.key, key.value)

    def meet(self) -> UnitEnds:
        """Returns rank 0's ends once all ranks have met their peers. All members must be connected.

        Raises InstanceLost.
        """
        with _meeting_errors(), contextlib.ExitStack() as held:
            for meeting in self._meetings:
                held.enter_context(meeting.held())
            if self._between is not None:
                self._between.set(BEGIN, "")
            ends = _ends(self._meetings[0].store, self._config, self._device)
            if self._between is not None:
                keys = [f"{MET}-{rank}" for rank in range(1, self._size)]
                self._between.wait(keys, timedelta(seconds=LOAD_TIMEOUT_S))
            return ends


@contextlib.contextmanager
def _meeting_errors() -> Any:
    try:
        yield
    except RuntimeError as error:
        raise InstanceLost(f"the members of this unit did not meet: {first_line(error)}") from error


def _between(config: WorkerConfig) -> Store:
    """Returns the store that the ranks of an instance share, in a folder that only their user can access."""
    return PrefixStore("instance", _file(config))


def _store_of(config: WorkerConfig, rank: int) -> Store:
    return PrefixStore(f"unit-{rank}", _file(config))


def _file(config: WorkerConfig) -> Store:
    return FileStore(f"{config.ranks.store}-unit", -1)


def _ends(store: Store, config: WorkerConfig, device: Device) -> UnitEnds:
    """Blocks until all members have joined and their devices have exchanged data."""
    assert config.unit is not None
    rank, size = config.unit.rank, config.unit.size
    host = gloo_group(store, rank, size, config.bind_address)
    return UnitEnds(host, device_end(store, rank, size, device) if device.is_accelerator else None)


def gloo_group(store: Store, rank: int, size: int, host: str) -> ProcessGroupGloo:
    """Blocks until all members have joined."""
    options = ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = [ProcessGroupGloo.create_device(hostname=host)]
    options._timeout = timedelta(seconds=LOAD_TIMEOUT_S)
    options._threads = 1
    return ProcessGroupGloo(store, rank, size, options)
