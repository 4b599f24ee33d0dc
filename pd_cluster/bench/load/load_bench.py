"""`pd-cluster bench load`: guidellm sends the requests; the report adds the cluster's timelines."""

from __future__ import annotations

import asyncio
import contextlib
import sys
import tempfile
import time
from collections.abc import AsyncIterator, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path

from pd_cluster.bench.load.guidellm_process import Guidellm
from pd_cluster.bench.load.guidellm_results import GuidellmRun, read_results
from pd_cluster.bench.load.load_samples import LoadSamples, sampled
from pd_cluster.bench.load.request_stages import can_be_asked, with_stages
from pd_cluster.bench.load.scenario_file import LoadRow, Scenario, write_rows
from pd_cluster.bench.load_report import LoadRun
from pd_cluster.bench.outcomes import Slo
from pd_cluster.bench.serve_bench import (
    ServeBench,
    admin_above,
    ask_model,
    make_bodies,
    running,
    send_all,
    sigterm_ends_it,
)
from pd_cluster.client.admin_client import Admin
from pd_cluster.client.streaming_client import make_client
from pd_cluster.cluster.processes.launch_settings import Launch
from pd_cluster.cluster.processes.launcher import Cluster
from pd_cluster.errors import ConfigError, PdClusterError

PLACEHOLDER_TARGET, PLACEHOLDER_MODEL = "http://127.0.0.1:1", "model"  # placeholders in a scenario to check
WARM_UP = ServeBench(input_len=32, output_len=8)
NUM_WARM_UP = 4
SAY_EVERY_S = 15.0


@dataclass(frozen=True, slots=True, kw_only=True)
class LoadPlan:
    """A load, and the guidellm that sends it. `folder`: the folder of guidellm's scenario and reports."""

    title: str
    rows: Sequence[LoadRow]
    guidellm: Guidellm
    folder: Path
    slo: Slo = field(default_factory=Slo)
    profile: str = ""  # guidellm's profile; "": requests are sent at the rows' own times
    max_s: float = 0.0  # the maximum duration of each of guidellm's runs; 0: no limit
    num_processes: int = 1  # guidellm's processes

    def scenario(self, target: str, model: str) -> Path:
        """Writes the scenario; returns its file. Raises ConfigError."""
        return Scenario(
            target=target,
            model=model,
            is_chat=self.rows[0].is_chat,
            num_requests=len(self.rows),
            profile=self.profile,
            max_s=self.max_s,
            slo=self.slo,
        ).write(self.folder)

    def check(self) -> None:
        """Raises ConfigError for a load that guidellm would refuse. Called before anything starts."""
        self.guidellm.check(self.scenario(PLACEHOLDER_TARGET, PLACEHOLDER_MODEL))

    def check_lengths(self, max_model_len: int | None) -> None:
        """Raises ConfigError for a request longer than the model's context."""
        for number, row in enumerate(self.rows, 1):
            total = (row.num_prompt_tokens or 0) + row.num_output_tokens
            if max_model_len is not None and total > max_model_len:
                raise ConfigError(
                    f"request {number} has {row.num_prompt_tokens} prompt tokens and {row.num_output_tokens} output "
                    f"tokens, together {total}; the model's context is {max_model_len} tokens. Ask for shorter ones: "
                    "--input-len, --output-len, --trace-lengths"
                )


async def run_alone(plan: LoadPlan, launch: Launch) -> list[LoadRun]:
    """Starts a cluster and measures it after a few warm-up requests. Raises PdClusterError."""
    with sigterm_ends_it():
        async with running(launch) as cluster:
            admin = admin_of(cluster)
            async with make_client(NUM_WARM_UP) as client:
                model, _ = await ask_model(client, launch.url)
                bodies = make_bodies(WARM_UP, model, NUM_WARM_UP)
                await send_all(client, launch.url, bodies, NUM_WARM_UP, "warming up")
            return await run_load(plan, launch.url, admin)


async def run_against(plan: LoadPlan, url: str, admin: Admin) -> list[LoadRun]:
    """Measures a running server. Raises PdClusterError."""
    with sigterm_ends_it():
        return await run_load(plan, url, admin)


async def run_load(plan: LoadPlan, url: str, admin: Admin | None) -> list[LoadRun]:
    """Returns a report for each of guidellm's runs; a profile may make several runs. Raises PdClusterError.

    `admin` None: reports contain only the client's view.
    """
    async with make_client(1) as client:
        model, max_model_len = await ask_model(client, url)
    plan.check_lengths(max_model_len)
    silent = "" if admin is None else await can_be_asked(admin)
    if silent:
        print(f"note: the report has only the client's view: {silent}", file=sys.stderr, flush=True)
    for stale in plan.folder.glob("requests-*.jsonl"):
        stale.unlink()
    write_rows(iter(plan.rows), plan.folder)
    guidellm = await plan.guidellm.run(plan.scenario(url, model), plan.num_processes, len(plan.rows))
    async with sampled(guidellm.process.pid, None if silent else admin) as samples, _spoken(plan):
        await guidellm.wait()
    runs, conclusions = read_results(plan.folder)
    if not runs:
        raise PdClusterError(f"guidellm sent nothing; its output is in {guidellm.log}")
    for conclusion in conclusions:
        print(f"guidellm's conclusion: {conclusion}", flush=True)
    return [await _joined(plan, run, samples, None if silent else admin) for run in runs]


def admin_of(cluster: Cluster) -> Admin:
    return Admin(cluster.launch.admin_url, str(cluster.admin_token_file))


def addresses_of(url: str, admin: str, token_file: str, env: Mapping[str, str]) -> tuple[str, Admin]:
    """Returns a running server's address and its admin address, by default at the next port. Raises ConfigError."""
    url = url.rstrip("/").removesuffix("/v1")
    return url, Admin.find(admin or admin_above(url).rstrip("/"), token_file, env)


@contextlib.contextmanager
def folder_for(given: str) -> Iterator[Path]:
    """Yields the folder for guidellm's files: the given one, or a temporary one. Raises ConfigError."""
    if not given:
        with tempfile.TemporaryDirectory(prefix="pd-cluster-load-") as temporary:
            yield Path(temporary)
        return
    folder = Path(given).absolute()
    try:
        folder.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise ConfigError(f"--folder {given}: {error.strerror}") from None
    yield folder


async def _joined(plan: LoadPlan, run: GuidellmRun, samples: LoadSamples, admin: Admin | None) -> LoadRun:
    outcomes, stop_s = run.outcomes, run.start_s + run.duration_s
    if admin is not None:
        outcomes, note = await with_stages(outcomes, admin)
        if note:
            print(f"note: {note}", flush=True)
    if run.num_cut_off:
        print(f"note: {run.num_cut_off} requests that the run's end cut off are left out", flush=True)
    return LoadRun(
        title=f"{plan.title}; {run.name}",
        duration_s=run.duration_s,
        outcomes=outcomes,
        samples=samples.between(run.start_s, stop_s),
        slo=plan.slo,
        gaps=run.gaps,
        client_core_share=samples.client_core_share(run.start_s, stop_s),
    )


@contextlib.asynccontextmanager
async def _spoken(plan: LoadPlan) -> AsyncIterator[None]:
    """Prints regularly how long the load has been running."""
    started_s = time.monotonic()
    expected = "" if plan.profile else f" of about {plan.rows[-1].at_s:.0f} s and the last answers"

    async def say() -> None:
        while True:
            await asyncio.sleep(SAY_EVERY_S)
            print(f"load: {time.monotonic() - started_s:.0f} s{expected}", flush=True)

    task = asyncio.create_task(say())
    try:
        yield
    finally:
        task.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await task
