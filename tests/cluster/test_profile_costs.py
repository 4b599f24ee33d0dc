"""`pd-cluster profile` with real processes: its costs predict steps that it has not measured."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from statistics import median

import pytest

from pd_cluster.bench.profile_messages import Steps
from pd_cluster.bench.profile_steps import counted, warm_up
from pd_cluster.bench.profiled_engine_process import started
from pd_cluster.costs.cost_files import read_costs
from pd_cluster.settings.engine_config import SHIPPED_MODEL, EngineConfig

pytestmark = pytest.mark.slow
HELD_OUT = (Steps(num_rows=6, num_context=100, num_steps=12), Steps(num_prompt_tokens=180, num_steps=4))


async def test_a_profile_predicts_steps_that_were_not_measured(tmp_path: Path) -> None:
    file = tmp_path / "costs.json"
    command = [sys.executable, "-m", "pd_cluster", "profile", "--seconds", "6", "--out", str(file)]
    done = subprocess.run([*command, "--", "--max-num-seqs=16"], capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stdout + done.stderr
    costs = read_costs(file)
    assert costs.is_measured
    assert (costs.max_num_seqs, costs.device) == (16, "cpu")
    assert costs.handover.setup_s > 0
    assert costs.host.request_s > 0
    assert set(costs.error) == {"step", "handover", "decode_beside_prefill", "prefill_beside_decode"}
    engine = EngineConfig(model=str(SHIPPED_MODEL), device="cpu", max_num_seqs=16)
    async with started(engine, ("prefill", "decode"), tmp_path) as engines:
        await warm_up(engines)
        for asked in HELD_OUT:
            steps = counted(asked, await engines[1].run(asked))
            measured_s = median(step.took_s for step in steps)
            predicted_s = median(costs.step.seconds(step.work) for step in steps)
            assert 1 / 2.5 < predicted_s / measured_s < 2.5, "this must hold on a busy machine, too"
