"""Rows of docs/requirements.md that no other test covers: the document's commands, tables, variables and flags."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from unittest.mock import MagicMock

import pytest
import torch
import transformers

from pd_cluster.cluster.members.rank_table_place import find_place
from pd_cluster.engine.assembly.build_engine import build_core
from pd_cluster.errors import ConfigError
from pd_cluster.settings.serve_options import ServeOptions
from pd_cluster.settings.vllm_flags import normalize
from pd_cluster.types import Request, RequestSpec, Sampling
from ranktable_tools import check, generate, write
from ranktable_tools import cli as ranktable_cli
from ranktable_tools.cluster_keys import write_keys
from ranktable_tools.table_files import PRIVATE
from tests.support.engines import assert_same, make_core
from tests.support.engines import generate as run_engine
from tests.support.serve_command import serve_command, settings_in

ROOT = Path(__file__).resolve().parents[2]
GEN = "--mode gen --prefill-server-list 4,5 --decode-server-list 6,7 --api-server"
ON_CPU = "--device cpu --server-ip 127.0.0.1"
FAKE_HCCN_TOOL = '#!/bin/sh\n[ "$1 $3 $4" = "-i -ip -g" ] && echo "ipaddr:29.0.0.$2"\n'

Checkpoints = Callable[..., Path]


# ---- rank table tool


def shell(line: str, folder: Path, *first_on_path: Path) -> subprocess.CompletedProcess[str]:
    """Runs a line as typed by an operator after `export LLM_TOOLS_PATH=…`."""
    path = [*map(str, first_on_path), str(Path(sys.executable).parent), os.environ["PATH"]]
    env = {**os.environ, "LLM_TOOLS_PATH": str(ROOT / "scripts"), "PATH": os.pathsep.join(path)}
    command = ["sh", "-c", line]
    return subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=60, check=False)


def test_the_documents_rank_table_lines(tmp_path: Path) -> None:
    """Tables go to ./save_dir or, without --save-dir, to the current folder, and are merged with another machine's."""
    tool = tmp_path / "bin" / "hccn_tool"
    tool.parent.mkdir()
    tool.write_text(FAKE_HCCN_TOOL)
    tool.chmod(0o755)
    script = "python ${LLM_TOOLS_PATH}/PD_separate/pd_ranktable_tools.py"
    # the line unchanged, with hccn_tool, and on CPU
    for save_dir, folder, more in (("--save-dir ./save_dir", tmp_path / "save_dir", ""), ("", tmp_path, ON_CPU)):
        done = shell(f"{script} {GEN} {save_dir} {more}", tmp_path, tool.parent)
        assert done.returncode == 0, done.stderr
        (file,) = folder.glob("global_ranktable_*.json")
        address = file.stem.removeprefix("global_ranktable_")
        with socket.socket() as listening:
            listening.bind((address, 0))  # fails for an address of another machine
        locals_ = {path.name for path in folder.glob("local_*")}
        assert locals_ == {f"local_ranktable_{address}_{which}.json" for which in ("45", "67", "host")}
        groups = json.loads(file.read_text())["server_group_list"]
        ips = {d["device_id"]: d["device_ip"] for g in groups for s in g["server_list"] for d in s.get("device", [])}
        assert ips == {i: "127.0.0.1" if more else f"29.0.0.{i}" for i in ("4", "5", "6", "7")}
    other = ["--decode-server-list=0", "--server-ip=10.0.0.9", f"--save-dir={tmp_path / 'other'}"]
    first = ["--prefill-server-list=1", "--api-server", "--server-ip=10.0.0.8", f"--save-dir={tmp_path / 'one'}"]
    for machine in (other, first):
        assert ranktable_cli.reference_main(["--mode", "gen", "--device", "cpu", *machine]) == 0
    both = "./one/global_ranktable_10.0.0.8.json ./other/global_ranktable_10.0.0.9.json"
    for save_dir, folder in (("--save-dir ./save_dir", tmp_path / "save_dir"), ("", tmp_path)):
        done = shell(f"{script} --mode merge --global-ranktable-list {both} {save_dir}", tmp_path)
        assert done.returncode == 0, done.stderr
        merged = json.loads((folder / "global_ranktable_merge.json").read_text())
        assert [group["server_count"] for group in merged["server_group_list"]] == ["1", "1", "1"]


def test_the_documents_start_line(tmp_path: Path) -> None:
    refused = shell("sh ${LLM_TOOLS_PATH}/PD_separate/start_servers.sh --no-such-flag", tmp_path)
    assert (refused.returncode, refused.stderr.count("\n")) == (1, 1)
    assert "--no-such-flag" in refused.stderr


def test_gen_finds_this_machines_address(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is the address from which the default route sends."""
    routed = MagicMock()
    routed.return_value.__enter__.return_value.getsockname.return_value = ("10.0.0.18", 4711)
    monkeypatch.setattr(socket, "socket", routed)
    monkeypatch.chdir(tmp_path)
    assert ranktable_cli.reference_main([*GEN.split(), "--device", "cpu"]) == 0
    assert {path.name for path in tmp_path.iterdir()} == {
        *("cluster.secret", "scheduler.key", "admin.token"),  # additional files, not in the document
        "global_ranktable_10.0.0.18.json",
        *(f"local_ranktable_10.0.0.18_{which}.json" for which in ("45", "67", "host")),
    }
    groups = json.loads((tmp_path / "global_ranktable_10.0.0.18.json").read_text())["server_group_list"]
    assert {server["server_ip"] for group in groups for server in group["server_list"]} == {"10.0.0.18"}


def test_an_option_counts_in_its_own_mode(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """In the other mode stderr names the option, and the files do not change."""
    gen = [*GEN.split(), *ON_CPU.split(), "--save-dir"]
    assert ranktable_cli.reference_main([*gen, str(tmp_path)]) == 0
    table = str(tmp_path / "global_ranktable_127.0.0.1.json")
    merge = ["--mode", "merge", "--global-ranktable-list", table, "--save-dir"]
    for mode, command, foreign in (
        ("merge", merge, ["--prefill-server-list", "8"]),
        ("merge", merge, ["--decode-server-list", "8"]),
        ("merge", merge, ["--api-server"]),
        ("gen", gen, ["--global-ranktable-list", "x.json"]),
    ):
        plain, told = tmp_path / "plain", tmp_path / "told"
        assert ranktable_cli.reference_main([*command, str(plain)]) == 0
        capsys.readouterr()
        assert ranktable_cli.reference_main([*command, str(told), *foreign]) == 0
        assert capsys.readouterr().err == f"note: {foreign[0]} has no effect with --mode {mode}\n"
        expected, found = ({path.name: path.read_bytes() for path in at.glob("*.json")} for at in (plain, told))
        assert found == expected


# ---- rank tables


def tables(folder: Path) -> list[Path]:
    """Returns the files of the global table and of the local tables of prefill, decode and scheduler."""
    made = generate(prefill=[[4, 5]], decode=[[6, 7]], api_server=True, server_ip="127.0.0.1", device_kind="cpu")
    write_keys(folder, PRIVATE)
    return write(made, folder)


def test_a_cluster_has_every_kind_of_instance(tmp_path: Path) -> None:
    for group in range(3):  # scheduler, prefill, decode
        table, *local_tables = tables(tmp_path / str(group))
        value = json.loads(table.read_text())
        value["server_group_list"][group].update(server_count="0", server_list=[])
        table.write_text(json.dumps(value))
        (fault,) = check(table)
        assert fault.field == f"server_group_list[{group}].server_count"
        for local in local_tables:
            with pytest.raises(ConfigError, match=r"server_group_list\[\d\]\.server_count"):
                find_place({"GLOBAL_RANK_TABLE_FILE_PATH": str(table), "RANK_TABLE_FILE_PATH": str(local)})


# ---- flags


def options_of(*argv: str) -> ServeOptions:
    """Returns the options that `pd-cluster serve` parses from flags."""
    context = serve_command().make_context("serve", normalize(["serve", *argv])[1:])
    return ServeOptions(**settings_in(context))


def test_the_documents_flags_bound_the_steps(checkpoint: Checkpoints) -> None:
    """Steps fill up to --max-num-batched-tokens, --max-num-seqs run at once, and answers equal the reference's."""
    folder = checkpoint("llama", max_position_embeddings=4096)
    flags = ["--tensor-parallel-size=1", "--max-model-len=4096", "--num-blocks=1200", "--max-num-seqs=20"]
    config = options_of(f"--model={folder}", *flags, "--max-num-batched-tokens=4096").engine()
    core, runner = build_core(config)
    assert runner.max_model_len == 4096
    sampling = Sampling(max_tokens=4, temperature=0.0, ignore_eos=True)
    prompts = [[(17 * at + 5 * i * i) % 256 for i in range(450)] for at in range(24)]
    requests = [
        Request(f"r{at}", RequestSpec(prompt, sampling), arrival_s=float(at)) for at, prompt in enumerate(prompts)
    ]
    for request in requests:
        core.scheduler.add(request)
    num_tokens, num_seqs = [], []
    while core.scheduler.requests:
        num_tokens.append(core.step().plan.num_tokens)
        num_seqs.append(len(core.scheduler.running))
    assert max(num_tokens) == num_tokens[0] == 4096
    assert max(num_seqs) == 20
    for at in (0, 23):
        assert_same(folder, prompts[at], requests[at].output_token_ids, sampling.max_tokens)


def test_tensor_parallel_size_is_the_number_of_devices(tmp_path: Path) -> None:
    files = tables(tmp_path)
    env = {"GLOBAL_RANK_TABLE_FILE_PATH": str(files[0]), "RANK_TABLE_FILE_PATH": str(files[2])}
    command = [sys.executable, "-m", "pd_cluster", "serve", "--model=m", "--tensor-parallel-size=1"]
    done = subprocess.run(command, env={**os.environ, **env}, capture_output=True, text=True, timeout=60, check=False)
    assert (done.returncode, done.stderr.count("\n")) == (1, 1)
    assert done.stderr.startswith("pd-cluster: --tensor-parallel-size 1: ")
    assert "2 devices; the two must be equal" in done.stderr


def test_weights_as_they_are_downloaded(checkpoint: Checkpoints, tmp_path: Path) -> None:
    """Serves bfloat16 weights in several files with an index, like official checkpoints."""
    whole = checkpoint("llama")
    for file in whole.iterdir():
        if file.suffix != ".safetensors":
            (tmp_path / file.name).write_bytes(file.read_bytes())
    model = transformers.AutoModelForCausalLM.from_pretrained(whole, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path, max_shard_size="100KB")
    assert (tmp_path / "model.safetensors.index.json").exists()
    assert len(list(tmp_path.glob("*.safetensors"))) > 2
    assert json.loads((tmp_path / "config.json").read_text())["dtype"] == "bfloat16"
    prompt = list(b"Once upon a time")
    (output,) = run_engine(make_core(tmp_path, num_blocks=64), [prompt], Sampling(max_tokens=16, temperature=0.0))
    assert_same(tmp_path, prompt, output, 16)
