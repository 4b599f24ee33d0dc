"""Updates the served weights: checks new ones on every instance, then changes all instances while no request runs.

docs/protocol/weights.md has the state × event table. Knows nothing of HTTP. Runs on the event loop, and reads files on
threads.
"""

from __future__ import annotations

import asyncio
import logging
import shutil
from collections.abc import Awaitable, Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Literal, Protocol

from msgspec.structs import replace

from pd_cluster import wire
from pd_cluster.checkpoints.replaced_weights import check_replacement
from pd_cluster.checkpoints.weight_files import weights_nbytes
from pd_cluster.cluster.instances.instance_state import Instance
from pd_cluster.cluster.members.cluster_control import PauseMode
from pd_cluster.cluster.weights.received_folder import ReceivedFolder, linked, remove_received
from pd_cluster.cluster.weights.weight_receiver import WeightReceiver
from pd_cluster.errors import ConfigError, DeadlineExceeded, ModelNotFound, Refused, RequestError, told
from pd_cluster.net.folder_transfer import LEAST_NBYTES_PER_S
from pd_cluster.process_messages import JoinTrainer, SentTensor

log = logging.getLogger(__name__)

CHECK_TIMEOUT_S = 600.0  # to read every byte; sending the files takes additional time
CHANGE_TIMEOUT_S = 600.0
UPDATE_TIMEOUT_S = 3600.0  # between two commands of one update
DEFAULT_NAME = "default"  # the name of weights without a name

Phase = Literal["serving", "started", "checked", "changing"]


class WeightMembers(Protocol):
    """The part of a roster that updates need. `weights`: the version that all instances must have."""

    instances: list[Instance]
    weights: wire.WeightVersion

    async def change(self) -> None: ...
    def change_weights(self, version: wire.WeightVersion) -> None: ...
    def offer_weights(self, version: wire.WeightVersion) -> None: ...
    def may_load_weights(self) -> list[Instance]: ...
    def lacking_weights(self) -> list[Instance]: ...
    def set_back_lacking(self) -> None: ...


class RequestControl(Protocol):
    async def while_empty(self, mode: PauseMode, job: Callable[[], Awaitable[None]]) -> None:
        """See ClusterControl."""


@dataclass(frozen=True, slots=True)
class WeightRules:
    """`root`: the folder that contains all versions. `base`: the model's folder. `hosts`: the trainers' addresses;
    None: any. `received`: the folder for tensors; None: `root`.
    """

    root: Path
    base: Path
    hosts: frozenset[str] | None = frozenset()
    received: Path | None = None
    may_change: bool = True  # False: other schedulers use the same instances


class WeightUpdates:
    """`phase`: the phase of the current update."""

    def __init__(
        self,
        membership: WeightMembers,
        send: Callable[[str, wire.Body], None],
        control: RequestControl,
        rules: WeightRules,
    ) -> None:
        """`send`: to an instance's connection."""
        self._membership, self._send, self._control, self._rules = membership, send, control, rules
        self._root = rules.root.resolve()
        self._received_root = self._root if rules.received is None else rules.received
        self._one_at_a_time = asyncio.Lock()
        self._number = 0  # the number of the last check; epochs never repeat
        self._checked: wire.WeightVersion | None = None
        self._mode: PauseMode = "wait"
        self._receiver: WeightReceiver | None = None
        self._received: ReceivedFolder | None = None  # the tensors of the current update
        self._linked: Path | None = None  # this server's folder of links to the checked files
        self._expiry: asyncio.TimerHandle | None = None
        self.phase: Phase = "serving"
        self.num_changes = self.num_refused = 0

    @property
    def current(self) -> wire.WeightVersion:
        return self._membership.weights

    def versions(self) -> dict[str, int]:
        """Returns instance name -> epoch of its weights, for ready instances."""
        return {each.name: each.load.weights.held.epoch for each in self._membership.instances if each.is_ready}

    async def start(self, mode: PauseMode) -> None:
        """Begins an update; `mode`: how to treat requests that run when it finishes. Raises Refused."""
        async with self._one_at_a_time:
            if self.phase != "serving":
                raise Refused("an update has been started; finish it, or POST /abort_weight_update")
            self._check_members()
            await self._drop_received()  # the tensors of an update that has expired
            self._mode = mode
            self._enter("started")

    async def take(self, folder: str, tensors: list[SentTensor]) -> None:
        """Takes weights from the trainer's group if `tensors` are given, otherwise from a folder."""
        await (self._take_tensors(tensors) if tensors else self._take_folder(folder))

    async def _take_folder(self, name: str) -> None:
        """Checks a folder on every instance; changes no weights. Raises Refused, RequestError, DeadlineExceeded."""
        async with self._one_at_a_time:
            if self.phase not in ("started", "checked"):
                raise Refused("no update has been started; POST /start_weight_update first")
            self._checked = None
            self._enter("started")
            await self._drop_received()
            await self._check(self._folder(name))

    async def join(self, trainer: JoinTrainer) -> None:
        """Joins a trainer's group; leaves an earlier one. Raises RequestError, Refused, DeadlineExceeded."""
        if self._rules.hosts is not None and trainer.address not in self._rules.hosts:
            raise RequestError(
                f"master_address: {trainer.address[:256]!r} is not in --weight-update-hosts", "init_info"
            )
        async with self._one_at_a_time:
            await self._leave()
            self._receiver = await WeightReceiver.joined(trainer)

    async def leave(self) -> None:
        """Leaves the trainer's group, and drops the tensors that were received from it."""
        if self._receiver is not None:
            self._receiver.kill()  # a running command may wait for it
        async with self._one_at_a_time:
            await self._leave()

    async def _take_tensors(self, tensors: list[SentTensor]) -> None:
        """Receives tensors of the update. Raises RequestError, Refused, DeadlineExceeded."""
        async with self._one_at_a_time:
            if self.phase not in ("started", "checked"):
                raise Refused("no update has been started; POST /start_weight_update first")
            if self._receiver is None:
                raise Refused("no trainer's group has been joined; POST /init_weight_transfer_engine first")
            if self._received is None:
                self._number = max(self._number, self.current.epoch) + 1
                make = partial(ReceivedFolder, self._received_root, self._rules.base, self._number)
                self._received = await asyncio.to_thread(make)
            self._checked = None
            self._enter("started")
            file = self._received.next_file(tensors)
            try:
                await self._receiver.receive(tensors, file)
            except BaseException:
                await self._leave()  # otherwise a later command would receive tensors that it does not expect
                raise
            self._received.add(tensors, file)

    async def _leave(self) -> None:
        receiver, self._receiver = self._receiver, None
        if receiver is not None:
            await receiver.close()
        await self._drop_received()

    async def _drop_received(self) -> None:
        received, self._received = self._received, None
        if received is not None:
            await asyncio.to_thread(received.remove)
        own, self._linked = self._linked, None
        if own is not None:
            await asyncio.to_thread(shutil.rmtree, own, ignore_errors=True)

    async def _check(self, folder: Path) -> None:
        """Checks a folder here and on every instance. Raises RequestError, Refused, DeadlineExceeded."""
        try:
            digest = await asyncio.to_thread(check_replacement, self._rules.base, folder)
        except ConfigError as error:
            self.num_refused += 1
            raise RequestError(f"folder: {told(error.text)}", "folder") from None
        self._number = max(self._number, self.current.epoch) + 1
        own = folder
        if self._received is None and self._rules.received is None:
            own = await asyncio.to_thread(linked, self._root, folder, self._number)
            self._linked = own if own != folder else None
        version = wire.WeightVersion(self._number, folder.name, digest, str(own))
        self._membership.offer_weights(version)
        await self._check_everywhere(version)
        self._checked = version
        self._enter("checked")

    async def finish(self, name: str = "") -> wire.WeightVersion:
        """Changes the weights of all instances, and returns their new version.

        Raises Refused; also DeadlineExceeded, if requests do not end in time (then nothing has changed) or an instance
        does not load the weights in time (then it takes no requests until it has).
        """
        async with self._one_at_a_time:
            if self._received is not None:
                await asyncio.to_thread(self._received.complete)
                await self._check(self._received.path)
            if self._checked is None:
                raise Refused("no weights have been checked; POST /update_weights first")
            version = replace(self._checked, name=name or self._checked.name)
            self._enter("changing")
            try:
                await self._control.while_empty(self._mode, lambda: self._change(version))
            except BaseException:
                has_changed = self.current.epoch >= version.epoch
                self._enter("serving" if has_changed else "checked")
                if has_changed:
                    self._received = self._linked = None  # not removed, because late instances still read the folder
                raise
            self._enter("serving")
            self._received = self._linked = None  # not removed, because the folder has the current weights
            await asyncio.to_thread(remove_received, self._received_root, Path(version.path))
            self.num_changes += 1
            return version

    async def abort(self) -> None:
        """Drops an unfinished update; the weights stay as they are."""
        if self._received is not None and self._receiver is not None and self._one_at_a_time.locked():
            self._receiver.kill()  # the receiver may wait for the trainer
        async with self._one_at_a_time:
            await self._drop_received()
            self._enter("serving")

    async def rename(self, name: str) -> None:
        """Gives the current weights another name, for tokens that are computed from now on."""
        async with self._one_at_a_time:
            self._membership.change_weights(replace(self.current, name=name))

    # ---- internal

    def _enter(self, phase: Phase) -> None:
        self.phase = phase
        if self._expiry is not None:
            self._expiry.cancel()
            self._expiry = None
        if phase == "serving":
            self._checked = None
        elif phase != "changing":
            self._expiry = asyncio.get_running_loop().call_later(UPDATE_TIMEOUT_S, self._expire)

    def _expire(self) -> None:
        if self.phase in ("started", "checked") and not self._one_at_a_time.locked():
            log.warning("the update of weights is aborted: no command for %g s", UPDATE_TIMEOUT_S)
            self._enter("serving")

    def _check_members(self) -> None:
        """Raises Refused if an instance cannot change its weights together with the others."""
        if not self._rules.may_change:
            raise Refused("one of several schedulers cannot pause all requests; stop the other schedulers first")
        for instance in self._membership.instances:
            if instance.unit:
                raise Refused(f"{instance.name} is in {instance.unit}, and instances of a unit keep their weights")
            if instance.role == "encode":
                raise Refused(f"{instance.name} encodes pictures with weights of its own; stop it first")

    def _folder(self, name: str) -> Path:
        """Returns a version's folder. Raises RequestError, ModelNotFound."""
        try:
            folder = (self._root / name).resolve()
            is_there = folder.is_dir()  # raises for names that no file system accepts
        except (OSError, ValueError, RuntimeError):
            raise RequestError("folder: is not a valid name", "folder") from None
        if folder == self._root or not folder.is_relative_to(self._root):
            raise RequestError(f"folder: {name[:256]!r} is not below --weights-dir {self._root}", "folder")
        if not is_there:
            raise ModelNotFound(f"folder: there is no folder {str(folder)[:512]}", "folder")
        return folder

    async def _check_everywhere(self, version: wire.WeightVersion) -> None:
        """Checks a version on all instances that can load it. If no instance is connected at the moment, waits for one.

        Raises Refused with the first instance's reason, and DeadlineExceeded.
        """
        sent: set[str] = set()

        def asked() -> list[Instance]:
            """Returns the instances that must answer, and sends the check to new ones; those that are gone need not
            answer.
            """
            found = self._membership.may_load_weights()
            for conn in {each.conn for each in found} - sent:
                self._send(conn, wire.CheckWeights(version))
                sent.add(conn)
            return found

        def lacking() -> list[Instance]:
            found = asked()
            return (
                [i for i in found if i.load.weights.checked != version.epoch]
                if found
                else [*self._membership.instances]
            )

        nbytes = await asyncio.to_thread(weights_nbytes, Path(version.path))
        await self._until(lacking, CHECK_TIMEOUT_S + nbytes / LEAST_NBYTES_PER_S)
        found = asked()
        for instance in found:
            if problem := instance.load.weights.problem:
                self.num_refused += 1
                raise Refused(f"{instance.name}: {told(problem)}")
        if not found:
            raise Refused("the cluster has no instances; GET /instances shows them")

    async def _change(self, version: wire.WeightVersion) -> None:
        """Changes all instances. Raises DeadlineExceeded; late instances get no requests until they have it."""
        self._membership.change_weights(version)
        try:
            await self._until(self._membership.lacking_weights, CHANGE_TIMEOUT_S)
        finally:
            self._membership.set_back_lacking()
        log.warning("all instances have weights %s (version %d)", version.name, version.epoch)

    async def _until(self, lacking: Callable[[], list[Instance]], timeout_s: float) -> None:
        """Waits until `lacking` returns no instance. Raises DeadlineExceeded."""
        try:
            async with asyncio.timeout(timeout_s):
                while lacking():
                    await self._membership.change()
        except TimeoutError:
            names = ", ".join(each.name for each in lacking())
            raise DeadlineExceeded(f"{names}: no answer within {timeout_s:g} s; GET /instances shows why") from None
