"""The core works without its extras; a feature that needs a missing extra says so in one line."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

import pd_cluster
from pd_cluster.extra_table import load

PACKAGE = Path(pd_cluster.__file__).parent
# Extra -> statements and commands that use it.
USES: dict[str, list[str]] = {
    "dashboard": ["pd-cluster dashboard --admin nowhere"],
    "encoders": ["pd-cluster serve --model nowhere --role encode"],
    "fastdeploy": ["from pd_cluster.fastdeploy.engine.request import RequestOutput"],
    "gateway": ["pd-cluster endpoint-picker --schedulers nowhere"],
    "key_file": [
        *("pd-cluster keys list --file nowhere", "pd-cluster keys new --file /nowhere/keys --tenant a"),
        "from pd_cluster.api.middleware.file_keys import file_keys\nfile_keys(None, 0, None)",
    ],
    "lmdeploy": [
        "from pd_cluster import pipeline",
        "import pd_cluster.vl",
        *(f"from pd_cluster import {name}" for name in ("messages", "pytorch", "turbomind")),
    ],
    "node_keys": [
        "pd-cluster keys node list --file nowhere",
        "from pd_cluster.net.node_trust import node_trust\n"
        "from pd_cluster.settings.process_configs import Credentials\n"
        "node_trust(Credentials(b'', trusted_nodes='nowhere'))",
        "from pd_cluster.cluster.members.cluster_credentials import credentials_of\n"
        "from pd_cluster.cluster.members.rank_table_place import place_alone\n"
        "from pd_cluster.settings.process_settings import KeyFiles\n"
        "credentials_of(place_alone('scheduler', '127.0.0.1'), KeyFiles(node_key='nowhere'))",
    ],
    "request_log": [
        "from pd_cluster.service.generation.generation_watch import request_log as made\n"
        "from pd_cluster.settings.request_log_settings import RequestLogSettings\n"
        "made(RequestLogSettings(has_requests=True))"
    ],
    "resumable_streams": [
        "from types import SimpleNamespace\n"
        "from pd_cluster.api.routes.stream_resumption import stream_resumption\n"
        "from pd_cluster.settings.resume_settings import ResumeSettings\n"
        "settings = SimpleNamespace(resume=ResumeSettings(window_s=1))\n"
        "stream_resumption(SimpleNamespace(settings=settings))"
    ],
    "quantize": ["pd-cluster quantize nowhere nothing"],
}
TRY_ALL = """
import contextlib, io, json, sys
from pd_cluster.commands.cli import main

def line_of(use):
    if not use.startswith("pd-cluster "):
        exec(use)
        return ""
    sys.argv, errors = [*use.split()], io.StringIO()
    with contextlib.redirect_stderr(errors), contextlib.suppress(SystemExit):
        main()
    return errors.getvalue().strip()

lines = []
for use in json.loads(sys.argv[1]):
    try:
        lines.append(line_of(use))
    except Exception as error:  # an installed extra refuses these arguments
        lines.append(str(error))
print(json.dumps(lines))
"""
CORE = """
import importlib, sys
from pathlib import Path
import pd_cluster
root = Path(pd_cluster.__file__).parent
for file in sorted(root.rglob("*.py")):
    name = ".".join(file.relative_to(root.parent).with_suffix("").parts).removesuffix(".__init__")
    try:
        name.endswith("__main__") or importlib.import_module(name)
    except ImportError as error:
        assert error.name.partition(".")[0] in ("fla", "flashinfer", "guidellm", "torch_npu", "triton"), (name, error)
assert not any(name.startswith("pd_cluster.extras") for name in sys.modules)
from pd_cluster.cluster.processes.launch_settings import Launch
assert not Launch(num_schedulers=2).with_lasting_streams({}).scheduler_variables
with pd_cluster.LLM(sys.argv[2]) as llm:
    (answer,) = llm.chat([{"role": "user", "content": "hello"}], pd_cluster.SamplingParams(max_tokens=4))
assert len(answer.outputs[0].token_ids) == 4
"""


def copy_without(folder: Path, *extras: str) -> dict[str, str]:
    """Copies the package without these extras, or without any. Returns the environment that imports the copy."""
    left_out = {PACKAGE / "extras" / name for name in extras} or {PACKAGE / "extras"}

    def ignored(where: str, names: list[str]) -> set[str]:
        return {name for name in names if Path(where, name) in left_out}

    folder.mkdir()
    for package in (PACKAGE, PACKAGE.parent / "ranktable_tools"):
        shutil.copytree(package, folder / package.name, ignore=ignored, copy_function=os.symlink)
    return {**os.environ, "PYTHONPATH": str(folder)}


def run(code: str, environment: dict[str, str], *arguments: str) -> str:
    done = subprocess.run(
        [sys.executable, "-P", "-c", code, *arguments], env=environment, capture_output=True, text=True, timeout=200
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


def test_every_extra_is_known_and_can_be_loaded() -> None:
    assert {path.name for path in (PACKAGE / "extras").iterdir() if (path / "__init__.py").exists()} == {*USES}
    for extra in USES:
        assert load(extra).__name__ == f"pd_cluster.extras.{extra}"


def test_the_core_serves_without_any_extra(tmp_path: Path) -> None:
    bare = copy_without(tmp_path / "bare")
    uses = [(extra, use) for extra, each in USES.items() for use in each]
    tried = json.dumps([use for _, use in uses])
    lines = json.loads(run(CORE + TRY_ALL, bare, tried, str(PACKAGE / "models" / "tiny-chat")))
    for (extra, use), line in zip(uses, lines, strict=True):
        way_out = f"which this installation lacks: restore pd_cluster/extras/{extra}"
        assert line.endswith(f" needs the extra {extra!r}, {way_out}"), use
        assert len(line.splitlines()) == 1


@pytest.mark.slow
@pytest.mark.parametrize("extra", USES)
def test_one_extra_is_missing(extra: str, tmp_path: Path) -> None:
    uses = [(each, use) for each in USES for use in USES[each]]
    lines = json.loads(run(TRY_ALL, copy_without(tmp_path / "copy", extra), json.dumps([use for _, use in uses])))
    assert ["restore" in line for line in lines] == [each == extra for each, _ in uses]
