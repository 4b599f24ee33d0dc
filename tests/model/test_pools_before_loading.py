"""Pool sizes and refusals before any weight is loaded: `check` shows the sizes, and a start refuses at once."""

from __future__ import annotations

import logging
import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import msgspec
import pytest

from pd_cluster.commands import check_command
from pd_cluster.devices.device import Device
from pd_cluster.engine.assembly.build_engine import build_core
from pd_cluster.errors import ConfigError
from pd_cluster.model.planning import pools_before_loading
from pd_cluster.model.planning.pools_before_loading import expected_pools
from pd_cluster.model.runner import load_runner
from pd_cluster.settings.engine_config import EngineConfig
from pd_cluster.settings.lora_settings import AdapterSettings
from pd_cluster.settings.speculation import Speculation

Checkpoints = Callable[..., Path]
SIZES = {"max_model_len": 64, "max_num_seqs": 8}


@pytest.mark.parametrize(
    ("architecture", "more"),
    [
        ("qwen3_next", r", 8 sequences at once and \d+ checkpoints, with states of 0\.02 MiB"),
        ("gpt_oss", r", \d+ of them in layers with windows of 24, 8 sequences at once"),
        ("llama", ", 8 sequences at once"),
    ],
)
def test_check_says_what_a_start_logs(
    checkpoint: Checkpoints,
    architecture: str,
    more: str,
    caplog: pytest.LogCaptureFixture,
    capsys: pytest.CaptureFixture[str],
) -> None:
    folder = str(checkpoint(architecture))
    with caplog.at_level(logging.INFO):
        build_core(EngineConfig(model=folder, **SIZES))[1].let_go()
    (line,) = (each.getMessage() for each in caplog.records if each.getMessage().startswith("KV pool"))
    logged = line.partition(": ")[2]
    env = {"PD_CLUSTER_SERVE_MODEL": folder, "PD_CLUSTER_SERVE_DEVICE": "cpu"}
    env |= {f"PD_CLUSTER_SERVE_{name.upper()}": str(value) for name, value in SIZES.items()}
    check_command.run(env)
    assert f"{folder}: KV pools of {logged}, if no other" in capsys.readouterr().out
    assert re.fullmatch(rf"512 tokens{more}", logged)
    found = check_command.check_report(env)["pools"]
    assert (found["num_tokens"], found["num_sequences"]) == (512, 8)


def test_ranks_and_devices_have_their_parts(checkpoint: Checkpoints, monkeypatch: pytest.MonkeyPatch) -> None:
    config = EngineConfig(model=str(checkpoint("qwen3_next")), device="cpu", **SIZES)
    whole, half = (expected_pools(msgspec.structs.replace(config, tensor_parallel_size=size)) for size in (1, 2))
    assert half.state_nbytes * 2 == whole.state_nbytes
    monkeypatch.setattr(pools_before_loading, "resolve", lambda name: Device("cuda"))
    on_gpu = expected_pools(msgspec.structs.replace(config, max_num_batched_tokens=64))
    assert str(on_gpu).startswith(
        f"{config.model}: a token takes {whole.layouts[0].token_nbytes} bytes, a state 0.02 MiB; a start logs"
    )
    assert on_gpu.to_json()["num_tokens"] is None


REFUSED: tuple[tuple[dict[str, Any], str], ...] = (
    ({"kv_host_cache_gib": 1.0}, "--kv-host-cache 1: qwen3_next keeps states"),
    ({"speculation": Speculation(methods=("ngram",))}, "--speculative-config: ngram: qwen3_next keeps states"),
    ({"adapters": AdapterSettings(enable_lora=True)}, "--enable-lora: qwen3_next keeps states"),
    ({"mamba_block_size": 1022}, "--mamba-block-size 1022: .* a multiple of --block-size"),
    ({"state_cache_gib": 1e-9}, r"--state-cache 1e-09: one state of this model takes"),
)


@pytest.mark.parametrize(("settings", "error"), REFUSED)
def test_settings_are_refused_before_weights_are_loaded(
    checkpoint: Checkpoints, settings: dict[str, Any], error: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(load_runner, "load_parts")
    with pytest.raises(ConfigError, match=f"^{error}"):
        build_core(EngineConfig(model=str(checkpoint("qwen3_next")), **SIZES, **settings))


@pytest.mark.parametrize(
    ("architecture", "kind", "settings"),
    [
        ("qwen3_next", "npu", {}),
        ("olmo_hybrid", "cuda", {}),
        ("qwen3_next", "cuda", {"attention_backend": "sdpa"}),
    ],
)
def test_devices_without_kernels_are_refused_before_weights_are_loaded(
    checkpoint: Checkpoints, architecture: str, kind: str, settings: dict[str, Any], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.delattr(load_runner, "load_parts")
    monkeypatch.setattr(load_runner, "use", lambda device: None)
    config = EngineConfig(model=str(checkpoint(architecture)), max_num_batched_tokens=64, **SIZES, **settings)
    with pytest.raises(ConfigError, match=f"^--device {kind}: {architecture} keeps states, but --attention-backend"):
        load_runner.load_runner(config, device=Device(kind))
