"""Applies the instructions of docs/extending.md to a copy of the package."""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from PIL import Image

from pd_cluster import LLM
from pd_cluster.settings.engine_config import SHIPPED_MODEL
from tests.support.checkpoints import reference_greedy
from tests.support.clips import clip, file_of
from tests.support.prompt_adapters import make_prompt_adapter

ROOT = Path(__file__).parents[2]
PAGE = (ROOT / "docs/extending.md").read_text("utf-8")
SECTIONS = dict(re.findall(r"^## (.+?)\n(.*?)(?=^## |\Z)", PAGE, re.MULTILINE | re.DOTALL))
MOST_FILES = {
    "A routing policy": 1,
    "A stage": 2,
    "A sampling parameter": 4,
    "An API extension": 2,
    "A setting": 1,
    "A transport": 2,
    "A fused model": 1,
    "A kind of attention": 2,
}
TOGETHER = ("A routing policy", "A stage", "A setting", "A kind of attention")  # their scripts share a process
POLICY = """
from pd_cluster.cluster.placement.routing_policy import POLICIES
from pd_cluster.settings.serve_options import ServeOptions
from tests.unit.test_routing_policy import ASK, instance, link
instances = [instance(name) for name in ("prefill-0", "prefill-1", "decode-0", "decode-1")]
for prefill in instances[:2]:
    link(prefill, *instances[2:])
for each in (instances[0], instances[2]):
    each.num_outstanding = 1
print(*(each.name for each in POLICIES["fewest-requests"](instances, ASK)))
print(ServeOptions(routing_policy="fewest-requests").routing(POLICIES).policy)
"""
STAGE = """
import pd_cluster.engine.assembly.build_worker
from pd_cluster.engine.stages.background import Background
from pd_cluster.types import RequestSpec
from tests.support.worker_world import PROMPT, World, sampling
world = World(stages_of=lambda scheduler, legs, clock: [Background(legs.table)])
world.submit("chat", PROMPT, sampling(1))
world.order("batch", RequestSpec(PROMPT, sampling(1), batch="b"))
world.order("aborted", RequestSpec(PROMPT, sampling(1), batch="b"))
for at in range(40):
    if at == 1:
        world.mail(pd_cluster.wire.Abort("aborted", 0))
    world.step()
    got = {name: len(world.post.tokens[name][0]) for name in ("chat", "batch", "aborted")}
    assert not got["batch"] or got["chat"] == sampling().max_tokens, got
world.assert_home()
print(got)
"""
SAMPLING = """
import pd_cluster
from pd_cluster import LLM, SamplingParams
from pd_cluster.errors import RequestError

def cut(llm, **own):
    given = SamplingParams(temperature=3.0, max_tokens=24, ignore_eos=True, seed=3, logprobs=1, **own)
    (answer,) = llm.generate(["1 2 3"], given)[0].outputs
    steps = zip(answer.token_ids, answer.logprobs)
    pairs = [(each[token].logprob, max(other.logprob for other in each.values())) for token, each in steps]
    return [chosen < 2 * best - 1e-4 for chosen, best in pairs]

if __name__ == "__main__":
    with LLM(pd_cluster.__file__.replace("__init__.py", "models/tiny-chat"), max_model_len=64) as llm:
        print(any(cut(llm)), any(cut(llm, top_a=1.0)))
        for given in (SamplingParams(top_a=1.5), SamplingParams(top_a=0.5, use_beam_search=True, n=2)):
            try:
                llm.generate(["1"], given)
            except RequestError as error:
                print(error)
"""
EXTENSION = """
import asyncio
import httpx
from pd_cluster.api.admin.admin_app import ShownCluster, admin_app, describe
from pd_cluster.api.admin.timeline_routes import LocalTimelines
from pd_cluster.api.api_extension import ClusterView, PublicPort, api_extensions
from pd_cluster.api.middleware.admin_access import AdminAccess
from pd_cluster.cluster.overview.cluster_overview import Overview
from pd_cluster.cluster.records.request_stats import RequestStats
from pd_cluster.process_messages import Busy
from pd_cluster.settings.http_settings import HttpConfig
from pd_cluster.settings.routing_settings import RoutingConfig
from tests.support.elastic_world import ElasticWorld

async def main():
    world = ElasticWorld()
    overview = Overview(world.membership, lambda: (RequestStats().snapshot(), Busy()), RoutingConfig())
    access = AdminAccess("secret", is_open_to_read=False)
    instances = lambda: [describe(each) for each in world.elastic.instances]
    view = ClusterView(overview, instances, "a model", HttpConfig(), access, PublicPort("127.0.0.1", 9))
    shown = ShownCluster(overview, "a model", None, api_extensions(view))
    app = admin_app(world.elastic, LocalTimelines(world.router.timelines), access, shown=shown)
    async with httpx.AsyncClient(transport=httpx.ASGITransport(app), base_url="http://localhost") as client:
        print((await client.get("/counts")).status_code)
        print((await client.get("/counts", headers={"Authorization": "Bearer secret"})).json())
        print((await client.get("/dashboard/")).status_code)

asyncio.run(main())
"""
SETTING = """
from pd_cluster.settings.serve_options import ServeOptions
print(ServeOptions(model="x", max_prefill_seqs=3).engine().max_prefill_seqs)
"""
TRANSPORT = """
import pd_cluster
from pd_cluster import LLM, SamplingParams
if __name__ == "__main__":
    model = pd_cluster.__file__.replace("__init__.py", "models/tiny-chat")
    greedy = SamplingParams(temperature=0.0, max_tokens=8)
    with LLM(model, max_model_len=64, prefill=1, decode=1, kv_transport="proc") as llm:
        split = llm.generate(["1 2 3"], greedy)[0].outputs[0].token_ids
    with LLM(model, max_model_len=64) as llm:
        print(split == llm.generate(["1 2 3"], greedy)[0].outputs[0].token_ids)
"""
FUSED = """
import json
import sys
from pd_cluster import LLM, SamplingParams
if __name__ == "__main__":
    import logging
    logging.basicConfig(level=logging.INFO, stream=sys.stdout, format="%(message)s")
    greedy = SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True)
    for settings in json.loads(sys.argv[2]):
        with LLM(sys.argv[1], max_model_len=64, **settings) as llm:
            print(llm.generate([{"prompt_token_ids": [1, 2, 3]}], greedy)[0].outputs[0].token_ids)
"""


def extended(tmp_path: Path, *sections: str) -> Path:
    """Copies the package and applies these sections' patches."""
    for package in ("pd_cluster", "ranktable_tools"):
        shutil.copytree(ROOT / package, tmp_path / package)  # includes compiled files, which take seconds to make
    for section in sections:
        apply(section, tmp_path)
    return tmp_path


def apply(section: str, tmp_path: Path) -> None:
    (patch,) = re.findall(r"```diff\n(.*?)```", SECTIONS[section], re.S)
    assert patch.count("\n+++ ") == MOST_FILES[section]
    (tmp_path / "patch").write_text(patch, "utf-8")
    done = subprocess.run(["git", "apply", "patch"], cwd=tmp_path, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    files = re.findall(r"^\+\+\+ b/(.+)$", patch, re.MULTILINE)
    for check in (["check"], ["format", "--check"]):
        command = [sys.executable, "-m", "ruff", *check, "--no-cache", "--config", str(ROOT / "pyproject.toml"), *files]
        done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, check=False)
        assert done.returncode == 0, done.stdout


def run(folder: Path, code: str, *arguments: str, module: str = "") -> str:
    (folder / "script.py").write_text(code, "utf-8")
    command = [sys.executable, "-P", *(["-m", module] if module else ["script.py"]), *arguments]
    env = {**os.environ, "PYTHONPATH": f"{folder}{os.pathsep}{ROOT}", "TERM": "dumb", "COLUMNS": "200"}
    done = subprocess.run(command, cwd=folder, env=env, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_policy_setting_stage_and_attention(tmp_path: Path, checkpoint: Callable[[str], Path]) -> None:
    """The stage holds back a batch request until the chat request ends; one aborted meanwhile never begins.

    The new attention serves prompts and decode, in one process and over the split, which hands over its planes.
    """
    folder, model = extended(tmp_path, *TOGETHER), checkpoint("llama")
    settings = [{"enable_chunked_prefill": True, "max_num_batched_tokens": 2}, {"prefill": 1, "decode": 1}]
    lines = run(folder, POLICY + SETTING + STAGE + FUSED, str(model), json.dumps(settings)).splitlines()
    assert lines[:4] == ["prefill-1 decode-1", "fewest-requests", "3", "{'chat': 8, 'batch': 8, 'aborted': 0}"]
    assert any("fused layers" in line for line in lines)
    tokens = [json.loads(line) for line in lines if line.startswith("[")]
    assert tokens == [reference_greedy(model, [1, 2, 3], 8)] * 2
    screen = run(folder, "", "serve", "--help-all", module="pd_cluster")
    for word in ("predicted-ttft", "fewest-requests", "--max-prefill-seqs"):
        assert word in screen


@pytest.mark.slow
def test_a_sampling_parameter(tmp_path: Path) -> None:
    """Tokens excluded by the parameter are not sampled; without it, some are."""
    lines = run(extended(tmp_path, "A sampling parameter"), SAMPLING).splitlines()
    assert lines[0] == "True False"
    assert lines[1].startswith("top_a: 1.5")
    assert lines[2].startswith("top_a: 0.5 is not for beam search")


def test_an_api_extension(tmp_path: Path) -> None:
    """The extension's route requires the admin token, and the dashboard still answers beside it."""
    refused, counts, dashboard = run(extended(tmp_path, "An API extension"), EXTENSION).splitlines()
    assert (refused, dashboard) == ("401", "200")
    assert counts.startswith("{'ready': ")


@pytest.mark.slow
def test_a_transport(tmp_path: Path) -> None:
    """The page's transport passes the transport tests, and a split cluster over it gives the tokens of one process."""
    folder = extended(tmp_path, "A transport")
    harness = ROOT / "tests/unit/test_transport.py"
    options = ("-vv", "-k", "proc", f"--rootdir={ROOT}", "-o", f"pythonpath={folder}")
    assert "test_named_blocks_move_and_no_others[proc-0] PASSED" in run(
        folder, "", str(harness), *options, module="pytest"
    )
    assert run(folder, TRANSPORT) == "True\n"
    assert "proc (same host and user)" in run(folder, "", "serve", "--help-all", module="pd_cluster")


@pytest.mark.slow
def test_a_fused_model(tmp_path: Path, checkpoint: Callable[[str], Path]) -> None:
    folder = extended(tmp_path, "A fused model")
    model = checkpoint("seed_oss")
    lines = run(folder, FUSED, str(model), "[{}]").splitlines()
    assert any("fused layers" in line for line in lines)
    (tokens,) = (json.loads(line) for line in lines if line.startswith("["))
    assert tokens == reference_greedy(model, [1, 2, 3], 8)


# ---- the Python of README and of other pages


SEES = SHIPPED_MODEL.parent / "tiny-vision"

pytestmark = pytest.mark.usefixtures("one_thread")


def run_page(page: str, names: dict[str, Path]) -> dict[str, Any]:
    """Runs a page's code blocks; returns the names that they define."""
    defined: dict[str, Any] = {}
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / page).read_text("utf-8"), re.DOTALL)
    assert blocks
    for block in blocks:
        for name, path in names.items():
            block = block.replace(f'"{name}"', f'"{path}"')
        exec(compile(block, page, "exec"), defined)
    return defined


@pytest.mark.slow
def test_images(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    monkeypatch.chdir(tmp_path)
    Image.new("RGB", (64, 64), "red").save("cat.jpg")
    Path("clip.mp4").write_bytes(file_of(clip(1, 6, 64, 64)))
    found = run_page("docs/multimodal.md", {"Qwen2.5-VL-7B-Instruct": SEES, "Qwen2-VL-7B-Instruct": SEES})
    found["llm"].close()
    found["pipe"].close()
    assert not [message for message in caplog.messages if "failed" in message]


def test_adapters(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> None:
    polite = make_prompt_adapter(tmp_path / "polite", SHIPPED_MODEL, num_tokens=20)
    answers: list[Any] = []
    generate = LLM.generate
    monkeypatch.setattr(LLM, "generate", lambda *given, **named: answers.extend(generate(*given, **named)))
    names = {"MODEL": SHIPPED_MODEL, "/adapters/french": SHIPPED_MODEL.parent / "pirate", "/adapters/polite": polite}
    run_page("docs/adapters.md", names)
    assert not [message for message in caplog.messages if "failed" in message]
    assert len(answers) == 3
    assert all(answer.outputs[0].token_ids for answer in answers)


@pytest.mark.parametrize(("page", "engine"), [("README.md", "llm"), ("docs/features.md", "pipe")])
def test_the_blocks_of_a_page_run(page: str, engine: str, capsys: pytest.CaptureFixture[str]) -> None:
    run_page(page, {"/path/to/model": SHIPPED_MODEL})[engine].close()
    assert len(capsys.readouterr().out.strip()) > 5
