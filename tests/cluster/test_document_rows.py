"""Rows of docs/requirements.md that need a cluster of real processes and are not covered elsewhere."""

from __future__ import annotations

import random
import shutil
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path

import httpx
import pytest

from pd_cluster.cluster.processes.launcher import plan_cluster
from tests.support.cluster import LiveCluster
from tests.support.engines import assert_same, random_prompt

NUM_BATCHED = 40
FLAGS = [f"--max-num-batched-tokens={NUM_BATCHED}", "--num-blocks=128"]

Checkpoints = Callable[..., Path]


class ScatteredCluster(LiveCluster):
    """A cluster whose decode instance has its model and tables at other paths, as in another container.

    Only the scheduler, which listens on all addresses, has a valid NODE_PORTS; no process has a valid USE_OPENAI.
    """

    def __init__(self, folder: Path, model: Path) -> None:
        self.elsewhere = folder / "elsewhere"
        shutil.copytree(model, self.elsewhere / "model")
        arguments = {"scheduler": ["--host=0.0.0.0"], "decode-0": [f"--model={self.elsewhere / 'model'}"]}
        super().__init__(folder, model, arguments=FLAGS, member_arguments=arguments)

    def start(self) -> None:
        for member in plan_cluster(self.launch, self.folder):
            env = dict(member.env)
            if member.name == "scheduler":
                del env["USE_OPENAI"]
            else:
                env.update(NODE_PORTS="these,are,no,ports", USE_OPENAI="perhaps")
            if member.name == "decode-0":
                for name in ("GLOBAL_RANK_TABLE_FILE_PATH", "RANK_TABLE_FILE_PATH"):
                    env[name] = str(shutil.copy(env[name], self.elsewhere))
                table = Path(env["GLOBAL_RANK_TABLE_FILE_PATH"])
                table.write_text(table.read_text().replace("{", '{"deploy_server": "elsewhere",', 1))
            self.members[member.name] = replace(member, env=env)
        for name in self.members:
            self.start_member(name)


@pytest.fixture(scope="module")
def cluster(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    with pytest.MonkeyPatch.context() as patch:
        patch.delenv("USE_OPENAI", raising=False)
        with ScatteredCluster(tmp_path_factory.mktemp("rows"), model) as running:
            yield running


def test_prefill_computes_the_prompt_and_decode_the_rest(cluster: LiveCluster, model: Path) -> None:
    """Checks numbers of steps: the prompt's chunks at prefill, one step per token after the first at decode."""
    cluster.assert_home()
    before = {i["instance_id"]: i["num_steps"] for i in cluster.instances()}
    prompt, max_tokens = random_prompt(random.Random(5), 2 * NUM_BATCHED + 20), 16
    output = cluster.complete(prompt, max_tokens, ignore_eos=True)
    assert len(output) == max_tokens
    cluster.assert_home()
    after = {i["instance_id"]: i["num_steps"] for i in cluster.instances()}
    assert after["prefill-0"] - before["prefill-0"] == 3
    assert after["decode-0"] - before["decode-0"] == max_tokens - 1
    assert_same(model, prompt, cluster.complete(prompt, max_tokens, cache_salt="another"), max_tokens)


def test_what_is_the_schedulers_alone(cluster: LiveCluster) -> None:
    """Workers serve without valid NODE_PORTS and USE_OPENAI; the API is OpenAI's by default; and each instance
    listens at its --host: the scheduler on all addresses, a worker at 127.0.0.1 only.
    """
    answer = cluster.client.post(f"{cluster.url}/v1/completions", json={"prompt": "hello", "max_tokens": 2})
    assert (answer.status_code, answer.json()["object"]) == (200, "text_completion")
    assert cluster.client.post(f"{cluster.url}/generate", json={"prompt": "hello"}).status_code == 404
    everywhere = f"http://127.0.0.2:{cluster.members['scheduler'].port}/health"
    assert cluster.client.get(everywhere).status_code == 200
    for name in ("prefill-0", "decode-0"):
        port = cluster.members[name].port
        assert cluster.client.get(f"http://127.0.0.1:{port}/health").status_code == 200
        with pytest.raises(httpx.ConnectError):
            cluster.client.get(f"http://127.0.0.2:{port}/health")


def test_another_global_table_is_noticed(cluster: LiveCluster) -> None:
    """A differing table is reported over the authenticated connection, only for the worker that has it."""
    lines = cluster.log_file("scheduler").read_text().splitlines()
    (line,) = [
        line for line in lines if line.endswith("was started with another global rank table than the scheduler's")
    ]
    assert " decode-0@" in line
