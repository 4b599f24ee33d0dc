"""`--config FILE` reads flags from YAML; the command line takes precedence, and errors name the file and the key."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

from pd_cluster.errors import ConfigError
from pd_cluster.settings.flag_file import expanded
from tests.unit.test_flags import HONOURED, parse

FILE = """
model: some/folder
max_model_len: 4096
api-server-count: 2
served-model-name: [chat, small]
enable-prefix-caching: false
enable-force-include-usage: true
enable-auto-tool-choice: false
auto-role: true
override-generation-config: {temperature: 0.5}
allowed-origins: ["*"]
compilation-config: {level: 3}
seed: null
"""


@pytest.fixture
def file(tmp_path: Path) -> str:
    path = tmp_path / "serve.yaml"
    path.write_text(FILE)
    return str(path)


def options_of(*argv: str) -> tuple[dict[str, object], list[str]]:
    return parse(*expanded(argv, HONOURED))


def test_a_file_gives_flags(file: str) -> None:
    wanted = {"model": "some/folder", "max_model_len": 4096, "api_workers": 2, "seed": None}
    wanted |= {"enable_prefix_caching": False, "enable_force_include_usage": True, "enable_auto_tool_choice": False}
    wanted |= {
        "auto_role": "true",
        "override_generation_config": '{"temperature": 0.5}',
        "served_model_name": ["chat", "small"],
    }
    for argv in (["--config", file], [f"--config={file}"]):
        options, warnings = options_of(*argv)
        assert {name: options[name] for name in wanted} == wanted
        assert [each.partition(" ")[0] for each in warnings] == ["--compilation-config"]


def test_the_command_line_goes_before_the_file(file: str) -> None:
    options, _ = options_of(
        *("--max_model_len", "8", "--config", file, "--served-model-name", "mine", "--enable-prefix-caching"),
        *("--api-workers=3",),
    )
    wanted = {"max_model_len": 8, "served_model_name": ["mine"], "enable_prefix_caching": True, "api_workers": 3}
    assert {name: options[name] for name in wanted} == wanted
    assert options["model"] == "some/folder"


def test_values_and_switches_as_vllm_writes_them(tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text(
        "max-model-len: 32k\nkv-cache-memory-bytes: 4G\nno-enable-prefix-caching: true\nenable_lora: false\n"
        "limit-mm-per-prompt: {image: 2}\nnnodes: 1\nenable-expert-parallel: false\nno-numa-bind: true\n"
        "collect-detailed-traces: [model, worker]\nmax-num-queued-reqs: 9\ndp-supervisor-zebra: 3\n"
    )
    options, warnings = options_of("--config", str(path), "--max-connections=7")
    assert (options["max_model_len"], options["kv_cache_memory"], options["enable_lora"]) == (32_000, 4.0, False)
    assert options["enable_prefix_caching"] is False
    assert options["limit_mm_per_prompt"] == '{"image": 2}'
    assert options["max_connections"] == 7, "an alias must set the same setting"
    assert [each.partition(" ")[0] for each in warnings] == [
        *(
            "--nnodes",
            "--no-numa-bind",
            "--collect-detailed-traces",
            "--dp-supervisor-zebra",
        ),
    ]
    assert options_of("--config", str(path), "--enable-prefix-caching")[0]["enable_prefix_caching"] is True


@pytest.mark.parametrize(
    "text", ["numa-bind: true", "trust-request-mm-kwargs: false", "nnodes: 2", "max-num-active-seqs: 3"]
)
def test_a_file_with_what_is_refused(tmp_path: Path, text: str) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text(text)
    name = f"--{'no-' * text.endswith('false')}{text.partition(':')[0]}"
    with pytest.raises(ConfigError, match=f"^{name}( [23])?: "):
        options_of("--config", str(path))


@pytest.mark.parametrize(
    ("text", "message"),
    [
        ("[1]", "expected a mapping"),
        ("1: 2", "expected a mapping"),
        ("a: [", "is not YAML"),
        ("max-model-lenn: 4", "unknown flag --max-model-lenn; did you mean --max-model-len"),
        ("config: other.yaml", "unknown flag --config"),
    ],
)
def test_a_file_that_is_wrong(tmp_path: Path, text: str, message: str) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text(text)
    with pytest.raises(ConfigError, match=message) as caught:
        expanded(["--config", str(path)], HONOURED)
    assert str(path) in str(caught.value)


@pytest.mark.parametrize("argv", [["--config"], ["--config", "--port"], ["--config=a", "--config=b"], ["--config=/no"]])
def test_not_one_file(argv: list[str]) -> None:
    with pytest.raises(ConfigError, match="cannot be read" if argv == ["--config=/no"] else "expected one file"):
        expanded(argv, HONOURED)


def test_the_command_reads_it(tmp_path: Path) -> None:
    path = tmp_path / "serve.yaml"
    path.write_text("model: m\nmax-model-len: -3")
    env = {**os.environ, "NO_COLOR": "1"}
    command = [sys.executable, "-m", "pd_cluster", "serve", "--config", str(path), "--role", "scheduler"]
    ended = subprocess.run(command, env=env, capture_output=True, text=True, timeout=60)
    assert ended.returncode == 1
    assert "--max-model-len -3: must be at least 1" in ended.stderr
