"""A prefill/decode cluster of worker processes that belongs to this process, and its router.

The processes are started by command line, as `pd-cluster up` does, so they never run the caller's program.
"""

from __future__ import annotations

import asyncio
import contextlib
import logging
import os
import shutil
import subprocess
import tempfile
import time
from functools import partial
from pathlib import Path

from pd_cluster.checkpoints.prompt_adapter_folder import AdapterFolder
from pd_cluster.cluster.members.adapter_registry import AdapterBook, AdapterRules
from pd_cluster.cluster.members.cluster_control import ClusterControl
from pd_cluster.cluster.members.cluster_credentials import credentials_of
from pd_cluster.cluster.members.rank_table_place import find_place, node_ports
from pd_cluster.cluster.members.worker_membership import Membership, membership_of
from pd_cluster.cluster.placement.routing_policy import linked_pairs, why_unavailable
from pd_cluster.cluster.processes.launch_preloader import LaunchPreloader
from pd_cluster.cluster.processes.launch_settings import Launch
from pd_cluster.cluster.processes.launcher import Member, plan_cluster
from pd_cluster.cluster.processes.port_reservations import Reservations
from pd_cluster.cluster.weights.weight_updates import WeightRules, WeightUpdates
from pd_cluster.errors import KEEPS_MARKS, ConfigError
from pd_cluster.service.serving_context import ServingContext
from pd_cluster.settings.process_configs import ApiConfig
from pd_cluster.settings.process_settings import KeyFiles
from pd_cluster.settings.serve_options import without_keys

log = logging.getLogger(__name__)

START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 10.0
POLL_S = 0.1
NUM_LAST_LINES = 3  # lines of a process that could not start, shown as the reason


class SplitCluster:
    """Must be constructed on the event loop that it will use."""

    def __init__(self, config: ApiConfig, launch: Launch) -> None:
        self._config = config
        self._launch = launch
        self.folder = Path(tempfile.mkdtemp(prefix="pd-cluster-"))  # mode 0700
        self._ports = Reservations()
        self.processes: dict[str, subprocess.Popen[bytes]] = {}
        self._watching: asyncio.Task[None] | None = None
        self._working: list[asyncio.Task[None]] = []
        self.preloader: LaunchPreloader | None = None
        self._book: AdapterBook | None = None
        self._context: ServingContext[Membership] | None = None

    @property
    def context(self) -> ServingContext[Membership]:
        assert self._context is not None  # set by `start`
        return self._context

    async def start(self) -> None:
        """Starts the processes; waits until a handover is possible. Raises ConfigError if a process ends before."""
        self.preloader = LaunchPreloader(self._launch)
        *workers, scheduler = plan_cluster(self._launch, self.folder, self._ports)
        for member in workers:
            self._spawn(member)
        place = find_place(scheduler.env)
        roster_of = partial(membership_of, place, node_ports(scheduler.env, place), self._config.timeouts)
        self._context = ServingContext(self._config, credentials_of(place, KeyFiles()), roster_of)
        self.context.start()
        if self._config.engine.adapters.are_wanted:
            self._book = self._adapter_book()
            self._working.append(asyncio.create_task(self._book.run()))
        self._watching = asyncio.create_task(self.context.roster.run())
        self._working.append(self._watching)
        await self._until_linked(time.monotonic() + START_TIMEOUT_S)

    async def load_adapter(self, folder: AdapterFolder) -> None:
        """Loads an adapter; returns when all workers have it. Raises RequestError."""
        assert self._book is not None  # the engine takes adapters
        await self._book.load(folder.digest[-32:], str(folder.path), replaces=True)

    def weight_updates(self, rules: WeightRules) -> WeightUpdates:
        context = self.context
        control = ClusterControl(
            context.roster, context.mailbox, context.router, self._config.timeouts.request_timeout_s
        )
        context.roster.weight_sources.send_from(rules.root)
        return WeightUpdates(context.roster, context.mailbox.send, control, rules)

    def _adapter_book(self) -> AdapterBook:
        rules = AdapterRules(self._config.engine.adapters, "/", (), self._config.timeouts.drain_timeout_s)
        return AdapterBook(self.context.roster, self.context.router.adapters, self.context.adapters, rules)

    async def close(self) -> None:
        """Ends the processes by signals, then kills the rest; a second Ctrl-C kills now. Removes the rank tables."""
        try:
            for task in self._working:
                task.cancel()
            await asyncio.gather(*self._working, return_exceptions=True)
            for _ in range(2):  # the second signal does not wait for requests
                for process in self._running:
                    process.terminate()
                await self._until_ended(time.monotonic() + STOP_TIMEOUT_S / 2)
        finally:
            for process in self._running:
                process.kill()
                process.wait()
            if self._context is not None:
                self._context.mailbox.close()
            if self.preloader is not None:
                self.preloader.close()
            self._ports.close()
            shutil.rmtree(self.folder, ignore_errors=True)

    @property
    def _running(self) -> list[subprocess.Popen[bytes]]:
        return [process for process in self.processes.values() if process.poll() is None]

    async def _until_ended(self, deadline_s: float) -> None:
        while self._running and time.monotonic() < deadline_s:
            await asyncio.sleep(POLL_S / 4)

    async def _until_linked(self, deadline_s: float) -> None:
        num_pairs = self._launch.num_prefill * self._launch.num_decode
        while len(linked_pairs(self.context.roster.instances)) < num_pairs:
            self._raise_ended()
            self._raise_refused()
            if time.monotonic() > deadline_s:
                why = why_unavailable(self.context.roster.instances)
                raise ConfigError(f"the worker processes were not ready within {START_TIMEOUT_S:g} s: {why}")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_S):
                    await self.context.roster.change()

    def _raise_ended(self) -> None:
        for name, process in self.processes.items():
            if process.poll() is not None:
                lines = self._log_file(name).read_text(errors="replace").splitlines()[-NUM_LAST_LINES:]
                last = lines[-1].removeprefix("pd-cluster: ") if lines else "it said nothing"
                raise ConfigError(f"{name} could not start (exit code {process.returncode}): {last}")
        if self._watching is not None and self._watching.done():
            self._watching.result()

    def _raise_refused(self) -> None:
        """Raises ConfigError for a permanently refused link, which waiting would not change."""
        for prefill in self.context.roster.instances:
            for decode in self.context.roster.instances:
                link = prefill.link_to(decode)
                if decode.role == "decode" and link.phase == "refused":
                    raise ConfigError(f"{prefill.name} and {decode.name} cannot be linked: {link.reason}")

    def _log_file(self, name: str) -> Path:
        return self.folder / f"{name}.log"

    def _spawn(self, member: Member) -> None:
        assert self.preloader is not None
        env, files = self.preloader.for_worker()
        with self._log_file(member.name).open("wb") as lines:
            self.processes[member.name] = subprocess.Popen(
                member.command,
                env={**without_keys(os.environ), **member.env, **env, KEEPS_MARKS: "1"},
                pass_fds=files,
                stdin=subprocess.DEVNULL,
                stdout=lines,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C goes to this process, which then ends them
            )
