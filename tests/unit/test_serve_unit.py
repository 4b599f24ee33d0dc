"""A worker's place in a unit from the rank table or flags; every contradiction gives a one-line error."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from pd_cluster.checkpoints.checkpoint import Checkpoint
from pd_cluster.commands.serve_start import Start, start_of
from pd_cluster.commands.serve_unit import unit_of
from pd_cluster.errors import ConfigError
from pd_cluster.settings.engine_config import SHIPPED_MODEL
from pd_cluster.settings.process_configs import UnitPlace
from pd_cluster.settings.serve_options import ServeOptions
from ranktable_tools import generate, merge, write
from ranktable_tools.table_files import PRIVATE, write_file

JOIN = {"role": "decode", "join": "127.0.0.1:9002", "data_parallel_size": 2}
DENSE = Checkpoint.open(str(SHIPPED_MODEL))
SPARSE = replace(DENSE, config={**DENSE.config, "n_routed_experts": 8})


def start(folder: Path, name: str, hosts: int = 1, **given: Any) -> Start:
    """Reads a worker's flags, with a table of two prefill and four decode instances, grouped by host."""
    parts, files = [], {}
    for host in range(hosts):
        made = generate(
            prefill=[[4], [5]] if not host else [],
            decode=[[each] for each in range(4 // hosts)],
            api_server=not host,
            server_ip=f"10.0.0.{host}",
            device_kind="cpu",
        )
        parts.append(write(made, folder)[0])
        here = 4 // hosts * host
        names = [*(["prefill-0", "prefill-1"] if not host else []), *(f"decode-{here + i}" for i in range(4 // hosts))]
        files |= {each: folder / file for each, file in zip([*names, "scheduler"], made.locals, strict=False)}
    whole = write_file(folder / "whole.json", merge(parts).to_json(), PRIVATE)
    env = {"GLOBAL_RANK_TABLE_FILE_PATH": str(whole), "RANK_TABLE_FILE_PATH": str(files[name])}
    return start_of(ServeOptions(model=str(SHIPPED_MODEL), device="cpu", **given), env)


def joined(**given: Any) -> Start:
    return start_of(ServeOptions(model=str(SHIPPED_MODEL), **{**JOIN, **given}), {})


@pytest.mark.parametrize(
    ("name", "size", "place"),
    [
        ("prefill-1", 2, UnitPlace(name="prefill-0..1", rank=1, size=2)),
        ("decode-3", 2, UnitPlace(name="decode-2..3", rank=1, size=2)),
        ("decode-0", 4, UnitPlace(name="decode-0..3", rank=0, size=4)),
        ("decode-1", 1, None),
    ],
)
def test_the_table_gives_the_place(tmp_path: Path, name: str, size: int, place: UnitPlace | None) -> None:
    rank = {} if place is None else {"data_parallel_rank": place.rank}
    for own in ({}, rank):  # flags with which vLLM's guides start each rank
        assert unit_of(start(tmp_path, name, data_parallel_size=size, **own), SPARSE) == place


def test_flags_give_the_place_outside_of_tables() -> None:
    assert unit_of(joined(data_parallel_rank=1), SPARSE) == UnitPlace(name="decode-joined", rank=1, size=2)


def test_without_experts_instances_are_independent(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    caplog.set_level("INFO")
    assert unit_of(start(tmp_path, "decode-1", data_parallel_size=3), DENSE) is None
    (line,) = caplog.messages
    assert line.startswith("--data-parallel-size 3: a model without experts")


@pytest.mark.parametrize(
    ("name", "given", "told"),
    [
        ("decode-1", {"data_parallel_size": 3}, "3: .*whole.json has 4 decode instances, which is not a multiple"),
        ("decode-1", {"data_parallel_size": 2, "data_parallel_rank": 0}, "-rank 0: .* 2 give decode-1 rank 1"),
        ("decode-1", {"data_parallel_rank": 1}, "--data-parallel-rank 1: --data-parallel-size is 1"),
        ("scheduler", {"data_parallel_rank": 0}, "-rank 0: only for prefill and decode workers"),
    ],
)
def test_contradictions(tmp_path: Path, name: str, given: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told) as caught:
        unit_of(start(tmp_path, name, **given), SPARSE)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("given", "told"),
    [
        ({}, "--data-parallel-size 2: with --join no rank table gives this worker's rank; give --data"),
        ({"data_parallel_rank": 2}, "--data-parallel-rank 2: --data-parallel-size is 2; give less"),
        ({"role": "encode"}, "--data-parallel-size 2: an encoder has one device and no unit"),
    ],
)
def test_contradictions_outside_of_tables(given: dict[str, Any], told: str) -> None:
    with pytest.raises(ConfigError, match=told):
        joined(**given)


def test_a_unit_over_hosts_needs_their_trust(tmp_path: Path) -> None:
    assert unit_of(start(tmp_path, "decode-3", 2, data_parallel_size=2), SPARSE) is not None, "expected two per host"
    with pytest.raises(ConfigError, match=r"decode-0..3 .* over gloo \(10.0.0.0, 10.0.0.1\).* give all --trust-netw"):
        unit_of(start(tmp_path, "decode-3", 2, data_parallel_size=4), SPARSE)
    trusted = start(tmp_path, "decode-3", 2, data_parallel_size=4, trust_network=True)
    assert unit_of(trusted, SPARSE) == UnitPlace(name="decode-0..3", rank=3, size=4)


def test_members_have_equal_devices(tmp_path: Path) -> None:
    made = generate(
        prefill=[[0]], decode=[[1], [2, 3]], api_server=True, server_ip="10.0.0.1", device_kind="cpu"
    )  # fmt: skip
    table, _, local, *_ = write(made, tmp_path)
    env = {"GLOBAL_RANK_TABLE_FILE_PATH": str(table), "RANK_TABLE_FILE_PATH": str(local)}
    options = ServeOptions(model=str(SHIPPED_MODEL), data_parallel_size=2)
    with pytest.raises(ConfigError, match=r"decode-0..1 have 1, 2 devices in .*; they need equal numbers"):
        unit_of(start_of(options, env), SPARSE)
