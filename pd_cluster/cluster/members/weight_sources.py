"""Chooses which process sends a version's files to an instance without them, and gives the two each other's addresses.

docs/protocol/weights.md, "Copies", has the state × event table. Runs on the event loop; threads send this process's
own files.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from pathlib import Path
from typing import Protocol

from pd_cluster import wire
from pd_cluster.checkpoints.replaced_weights import version_files
from pd_cluster.cluster.instances.instance_state import Instance
from pd_cluster.net.folder_transfer import FolderFiles, ReceiverAddress, send_in_background
from pd_cluster.net.payload_channel import PayloadSender

log = logging.getLogger(__name__)

OWN_NAME = "the scheduler"


class SourceMailbox(Protocol):
    """The part of the mailbox that is needed here."""

    @property
    def public_key(self) -> bytes: ...
    def payload_sender(self) -> PayloadSender: ...
    def send(self, conn: str, body: wire.Body) -> None: ...


class WeightSources:
    """`instances`: the live list of a membership."""

    def __init__(self, mailbox: SourceMailbox, instances: Sequence[Instance]) -> None:
        self._mailbox, self._instances = mailbox, instances
        self._offered: dict[int, wire.WeightVersion] = {}  # by epoch: the current version, and the one being checked
        self._roots: tuple[Path, ...] = ()  # the folders below which this process may send
        self._named: dict[str, tuple[int, str]] = {}  # connection of a receiver -> epoch and source

    def offer(self, present: wire.WeightVersion, checking: wire.WeightVersion | None = None) -> None:
        """Sets the versions whose files instances may request."""
        self._offered = {each.epoch: each for each in (present, checking) if each is not None}

    def send_from(self, *roots: Path) -> None:
        """Lets this process send versions whose folders lie below these."""
        self._roots = roots

    def sought(self, conn: str, receiver: Instance, seek: wire.SeekWeights) -> None:
        """Names a source to an instance: one that has not failed for this instance and is not sending."""
        self._named.pop(conn, None)
        if seek.is_over:
            return
        version = self._offered.get(seek.epoch)
        if version is None:
            self._answer(conn, wire.TakeWeights(seek.epoch, problem="it is not an offered version"))
            return
        busy = {source for _, source in self._named.values()}
        candidates = {
            each.key: each.info.public_key
            for each in self._instances
            if each is not receiver and each.info is not None and _has(each, version.epoch)
        }
        if self._may_send(version):
            candidates[OWN_NAME] = self._mailbox.public_key
        left = [name for name in candidates if name not in seek.failed]
        if free := [name for name in left if name not in busy]:
            self._named[conn] = version.epoch, free[0]
            self._answer(conn, wire.TakeWeights(version.epoch, free[0], candidates[free[0]]))
        else:
            why = "" if left else "no source is left" if candidates else "none has them"
            self._answer(conn, wire.TakeWeights(version.epoch, problem=why))

    def addressed(self, conn: str, receiver: Instance, address: wire.WeightAddress) -> None:
        """Starts the transfer from the named source to a receiver, whose host is taken from this process's list."""
        version = self._offered.get(address.epoch)
        if version is None or self._named.get(conn) != (address.epoch, address.source):
            return
        if address.source == OWN_NAME:
            folder = Path(version.path)
            to = ReceiverAddress(receiver.host, address.port, address.public_key)
            send_in_background(self._mailbox.payload_sender(), to, lambda: FolderFiles(folder, version_files(folder)))
            return
        for each in self._instances:
            if each.conn and each.key == address.source:
                order = wire.SendWeights(version, receiver.host, address.port, address.public_key)
                self._mailbox.send(each.conn, order)

    def closed(self, conn: str) -> None:
        self._named.pop(conn, None)

    def _may_send(self, version: wire.WeightVersion) -> bool:
        folder = Path(version.path)
        return any(folder.is_relative_to(root) for root in self._roots)

    def _answer(self, conn: str, answer: wire.TakeWeights) -> None:
        self._mailbox.send(conn, answer)


def _has(instance: Instance, epoch: int) -> bool:
    status = instance.load.weights
    return bool(instance.conn) and (status.held.epoch == epoch or (status.checked == epoch and not status.problem))
