"""A prefill/decode cluster of worker processes that belongs to this process, and the router that sends requests there.

They are started by command line, as `pd-cluster up` starts them: nothing of the caller's program runs in them.
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
from pathlib import Path

from pd_cluster.api.edge import Edge
from pd_cluster.cluster.credentials import KeyFiles, credentials_of
from pd_cluster.cluster.launch_preloader import LaunchPreloader
from pd_cluster.cluster.launcher import Launch, Member, plan_cluster
from pd_cluster.cluster.membership import Membership, instances_of
from pd_cluster.cluster.place import find_place, node_ports
from pd_cluster.cluster.policy import linked_pairs, why_unavailable
from pd_cluster.config import ApiConfig, without_keys
from pd_cluster.errors import ConfigError

log = logging.getLogger(__name__)

START_TIMEOUT_S = 300.0
STOP_TIMEOUT_S = 10.0
POLL_S = 0.1
NUM_LAST_LINES = 3  # of a process that could not start, told as the reason


class SplitCluster:
    """On the event loop that it is made on."""

    def __init__(self, config: ApiConfig, launch: Launch) -> None:
        self._config = config
        self._launch = launch
        self._folder = Path(tempfile.mkdtemp(prefix="pd-cluster-"))  # mode 0700
        self._processes: dict[str, subprocess.Popen[bytes]] = {}
        self._watching: asyncio.Task[None] | None = None
        self._preloader: LaunchPreloader | None = None
        self.edge: Edge
        self.membership: Membership

    async def start(self) -> None:
        """Until a request can be handed over. Raises ConfigError when a process ends before that."""
        self._preloader = LaunchPreloader(self._launch)
        *workers, scheduler = plan_cluster(self._launch, self._folder)
        for member in workers:
            self._spawn(member)
        place = find_place(scheduler.env)
        self.edge = Edge(self._config, credentials_of(place, KeyFiles()))
        instances = instances_of(place, node_ports(scheduler.env, place))
        router, identity = self.edge.router, self.edge.checkpoint.identity
        overrides = self.edge.checkpoint.hf_overrides
        timeouts = self._config.timeouts
        self.membership = Membership(place, instances, self.edge.mailbox, timeouts, identity, router.on_lost, overrides)
        self.edge.mailbox.start()
        self.edge.follow(self.membership)
        self._watching = asyncio.create_task(self.membership.run())
        await self._until_linked(time.monotonic() + START_TIMEOUT_S)

    async def close(self) -> None:
        """Ends the processes: asks, waits, kills. Removes the rank tables. Cut short by a second Ctrl-C, kills."""
        try:
            if self._watching is not None:
                self._watching.cancel()
                await asyncio.gather(self._watching, return_exceptions=True)
                self.edge.mailbox.close()
            for _ in range(2):  # the second signal does not wait for requests
                for process in self._running:
                    process.terminate()
                await self._until_ended(time.monotonic() + STOP_TIMEOUT_S / 2)
        finally:
            for process in self._running:
                process.kill()
                process.wait()
            if self._preloader is not None:
                self._preloader.close()
            shutil.rmtree(self._folder, ignore_errors=True)

    @property
    def _running(self) -> list[subprocess.Popen[bytes]]:
        return [process for process in self._processes.values() if process.poll() is None]

    async def _until_ended(self, deadline_s: float) -> None:
        while self._running and time.monotonic() < deadline_s:
            await asyncio.sleep(POLL_S / 4)

    async def _until_linked(self, deadline_s: float) -> None:
        num_pairs = self._launch.num_prefill * self._launch.num_decode
        while len(linked_pairs(self.membership.instances)) < num_pairs:
            self._raise_ended()
            if time.monotonic() > deadline_s:
                why = why_unavailable(self.membership.instances)
                raise ConfigError(f"the worker processes were not ready within {START_TIMEOUT_S:g} s: {why}")
            with contextlib.suppress(TimeoutError):
                async with asyncio.timeout(POLL_S):
                    await self.membership.change()

    def _raise_ended(self) -> None:
        for name, process in self._processes.items():
            if process.poll() is not None:
                lines = self._log_file(name).read_text(errors="replace").splitlines()[-NUM_LAST_LINES:]
                last = lines[-1].removeprefix("pd-cluster: ") if lines else "it said nothing"
                raise ConfigError(f"{name} could not start (exit code {process.returncode}): {last}")
        if self._watching is not None and self._watching.done():
            self._watching.result()

    def _log_file(self, name: str) -> Path:
        return self._folder / f"{name}.log"

    def _spawn(self, member: Member) -> None:
        assert self._preloader is not None
        env, files = self._preloader.for_worker()
        with self._log_file(member.name).open("wb") as lines:
            self._processes[member.name] = subprocess.Popen(
                member.command,
                env={**without_keys(os.environ), **member.env, **env},
                pass_fds=files,
                stdin=subprocess.DEVNULL,
                stdout=lines,
                stderr=subprocess.STDOUT,
                start_new_session=True,  # Ctrl-C is for this process, which then ends them
            )
