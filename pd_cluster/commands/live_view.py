"""`pd-cluster up` in a terminal: log lines scroll above a table of the cluster that stays at the bottom."""

from __future__ import annotations

import asyncio
import contextlib

from rich.console import Console
from rich.live import Live

from pd_cluster.client.admin_client import Admin
from pd_cluster.cluster.processes.launch_settings import Launch
from pd_cluster.cluster.processes.launcher import Cluster, run_until_signal
from pd_cluster.commands.top_command import ClusterSamples, bottom
from pd_cluster.errors import PdClusterError

PERIOD_S = 1.0


def run_live(launch: Launch, console: Console | None = None) -> int:
    """Serves until a signal; returns the exit code. Raises ConfigError."""
    console = console or Console(highlight=False, markup=False, soft_wrap=True)

    def say(line: str) -> None:
        console.print(line, markup=False, highlight=False, soft_wrap=True)

    async def watch(cluster: Cluster) -> None:
        admin = Admin(cluster.launch.admin_url, str(cluster.admin_token_file))
        seen = ClusterSamples()
        with Live(console=console, auto_refresh=False, transient=True, redirect_stdout=False) as live:
            while True:
                with contextlib.suppress(PdClusterError):  # the scheduler may be restarting
                    await seen.look(admin)
                    live.update(bottom(seen, console.width), refresh=True)
                await asyncio.sleep(PERIOD_S)

    return asyncio.run(run_until_signal(launch, say, watch))
