"""The client of a comparison: guidellm, as in `bench load`. It treats all servers alike and uses no admin address."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

from pd_cluster.bench.load.guidellm_process import Guidellm
from pd_cluster.bench.load.load_bench import LoadPlan, folder_for, run_load
from pd_cluster.bench.load.scenario_file import rows_of
from pd_cluster.bench.load_report import LoadRun
from pd_cluster.bench.outcomes import Slo
from pd_cluster.bench.request_arrivals import Arrival


@dataclass(frozen=True, slots=True)
class GuidellmLoad:
    guidellm: Guidellm
    num_processes: int = 1  # guidellm's processes that send requests

    @classmethod
    def find(cls, command: str, num_processes: int) -> GuidellmLoad:
        """`command`: guidellm's command; "": an installed one. Raises ConfigError with install instructions."""
        return cls(Guidellm.find(command), num_processes)

    async def __call__(self, url: str, arrivals: Sequence[Arrival], slo: Slo, concurrency: int) -> LoadRun:
        """Raises PdClusterError."""
        with folder_for("") as folder:
            plan = LoadPlan(
                title="",
                rows=list(rows_of(arrivals)),
                guidellm=self.guidellm,
                folder=folder,
                slo=slo,
                num_processes=self.num_processes,
                profile=f"kind=concurrent,streams=[{concurrency}]" if concurrency else "",
            )
            (run,) = await run_load(plan, url, None)
        return run
