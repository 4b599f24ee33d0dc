"""`pd-cluster up` when its output cannot be written."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pd_cluster.cluster.processes.launch_settings import LASTING_STREAMS, Launch
from pd_cluster.cluster.processes.launcher import plan_cluster
from pd_cluster.errors import ConfigError

SAYS = (
    "from pd_cluster.cluster.processes.launcher import tell\nfor _ in range(3):\n    tell('a line – ' + 5000 * 'x')\n"
)


def test_a_full_disk_or_a_reader_that_has_gone_costs_the_lines_of_the_log_and_nothing_else() -> None:
    read, write = os.pipe()
    os.close(read)
    with Path("/dev/full").open("wb") as full, os.fdopen(write, "wb") as pipe:
        ended = [
            subprocess.run([sys.executable, "-c", SAYS], stdout=each, stderr=-1, timeout=60) for each in (full, pipe)
        ]
    for done in ended:
        assert (done.returncode, done.stderr) == (0, b"")


def test_lines_leave_at_once_and_whole() -> None:
    done = subprocess.run([sys.executable, "-c", SAYS], capture_output=True, text=True, timeout=60, check=False)
    assert done.stdout == 3 * ("a line – " + 5000 * "x" + "\n")


def test_streams_outlive_their_scheduler_unless_the_operator_says_otherwise(tmp_path: Path) -> None:
    *workers, scheduler = plan_cluster(Launch().with_lasting_streams({}), tmp_path)
    assert scheduler.env.items() >= LASTING_STREAMS.items()
    assert not any(each.env.keys() & LASTING_STREAMS.keys() for each in workers)
    for launch, env in (
        (Launch(in_effect=["--resume-window=0"]), {}),
        (Launch(in_effect=["--resume-window", "60"]), {}),
        (Launch(openai=False), {}),
        (Launch(), {"PD_CLUSTER_SERVE_RESUME_WINDOW": "60"}),
    ):
        assert launch.with_lasting_streams(env) == launch


def test_each_worker_gets_the_size_of_its_role_s_units(tmp_path: Path) -> None:
    launch = Launch(num_prefill=2, num_decode=2, unit_sizes={"prefill": 1, "decode": 2})
    flags = {
        each.name: [flag for flag in each.command if "data-parallel" in flag] for each in plan_cluster(launch, tmp_path)
    }
    own = ["--data-parallel-size=2"]
    assert flags == {"prefill-0": [], "prefill-1": [], "decode-0": own, "decode-1": own, "scheduler": []}
    with pytest.raises(ConfigError, match="--decode 3: expected a multiple of 2, the --data-parallel-size of decode"):
        Launch(num_decode=3, unit_sizes={"decode": 2})


def test_hybrid_instances_join_a_scheduler_without_a_table(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5,6,7")
    numbers = {"num_prefill": 0, "num_decode": 0, "num_hybrid": 2}
    launch = Launch(**numbers, tp_sizes={"hybrid": 2}, api_keys=["sk-a"], arguments=["--max-num-seqs=4"])
    *workers, scheduler = plan_cluster(launch, tmp_path)
    assert [each.name for each in workers] == ["hybrid-0", "hybrid-1"]
    assert launch.num_ranks == 4
    (join,) = [flag.partition("=")[2] for flag in scheduler.command if flag.startswith("--join-port")]
    flags = {"--role=decode", f"--join=127.0.0.1:{join}", "--max-num-seqs=4", "--tensor-parallel-size=2"}
    for each, devices in zip(workers, ("4,5", "6,7"), strict=True):
        assert flags <= {*each.command}
        assert (each.env["CUDA_VISIBLE_DEVICES"], each.env["RANK_TABLE_FILE_PATH"]) == (devices, "")
        assert each.env["OMP_NUM_THREADS"]
        assert "sk-a" not in each.env.values()
    assert [each.env["ASCEND_RT_VISIBLE_DEVICES"] for each in workers] == ["0,1", "2,3"]
    assert scheduler.is_scheduler
    assert "--role=scheduler" in scheduler.command
    assert "sk-a" in scheduler.env.values()
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "4,5")
    with pytest.raises(ConfigError, match="CUDA_VISIBLE_DEVICES=4,5: 2 hybrid instances need 4 devices"):
        plan_cluster(launch, tmp_path)
    with pytest.raises(ConfigError, match="2 hybrid instances cannot be combined"):
        Launch(num_hybrid=2)
    with pytest.raises(ConfigError, match="2: hybrid instances have all experts"):
        Launch(**numbers, unit_sizes={"decode": 2})


def test_a_model_without_a_chat_template_is_asked_for_completions(tmp_path: Path) -> None:
    assert Launch().has_chat_template, "the shipped model has a chat template"
    assert not Launch(model=str(tmp_path)).has_chat_template
    assert Launch(model=str(tmp_path), arguments=["--chat-template=x.jinja"]).has_chat_template
    (tmp_path / "tokenizer_config.json").write_text('{"chat_template": "{{ messages }}"}')
    assert Launch(model=str(tmp_path)).has_chat_template
