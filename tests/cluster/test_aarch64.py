"""A tiny cluster of aarch64 Python processes under qemu-aarch64, compared with transformers' tokens on this host.

Only with PD_CLUSTER_TEST_AARCH64=FOLDER, which scripts/aarch64_check.sh makes. Deadlines are long, because emulation
takes minutes to import torch. The test's own process, and the reference, run natively.
"""

from __future__ import annotations

import random
import sys
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import httpx
import pytest

from pd_cluster.client.instance_list import links_of
from tests.support import aarch64_python
from tests.support.checkpoints import make_checkpoint
from tests.support.cluster import LiveCluster, together
from tests.support.engines import assert_all_same, random_prompt

START_S, ANSWER_S = 3000.0, 900.0
FLAGS = [
    *("--spawn", "--device=cpu", "--num-blocks=64", "--max-model-len=256"),
    *("--heartbeat-interval=5", "--dead-after=120", "--connect-timeout=120", "--credit-timeout=300"),
    *("--transfer-timeout=300", "--collective-timeout=300", "--step-timeout=0", "--request-timeout=0"),
]
MAX_TOKENS = 6

pytestmark = [
    pytest.mark.slow,
    pytest.mark.timeout(2 * START_S),
    pytest.mark.skipif(not aarch64_python.FOLDER, reason=f"{aarch64_python.VARIABLE} names no folder"),
]


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_checkpoint(tmp_path_factory.mktemp("model"), "llama", num_hidden_layers=2)


@pytest.fixture(scope="module")
def cluster(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    """Yields a prefill instance with a decode instance over gloo and one over shared memory."""
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(sys, "executable", str(aarch64_python.python()))
        patch.setattr("tests.support.cluster.START_TIMEOUT_S", START_S)
        patch.setattr("tests.support.cluster.POLL_S", 3.0)  # polling loads the emulated scheduler
        for name, value in aarch64_python.environment().items():
            patch.setenv(name, value)
        transports = {"decode-0": ["--kv-transport=dist"], "decode-1": ["--kv-transport=shm"]}
        with LiveCluster(
            tmp_path_factory.mktemp("aarch64"), model, num_decode=2, arguments=FLAGS, member_arguments=transports
        ) as running:
            running.client.timeout = httpx.Timeout(ANSWER_S)
            yield running


def test_tokens_are_those_of_this_host(cluster: LiveCluster, model: Path) -> None:
    rng = random.Random(4)
    prompts = [random_prompt(rng, length) for length in (3, 40, 70, 20)]

    asks = [partial(cluster.complete, prompt, MAX_TOKENS) for prompt in prompts]
    assert_all_same(model, prompts, together(asks, timeout_s=START_S), MAX_TOKENS)
    links = links_of(cluster.instance("prefill-0"))
    assert {peer: link.over for peer, link in links.items()} == {"decode-0": "dist", "decode-1": "shm"}
    received = [cluster.instance(name)["kv_received_nbytes"] for name in ("decode-0", "decode-1")]
    print(f"KV bytes received over gloo and over shared memory: {received}")
    assert all(received)


def test_a_chat_over_openai_s_api(cluster: LiveCluster) -> None:
    body = {"messages": [{"role": "user", "content": "Hello"}], "temperature": 0, "max_tokens": MAX_TOKENS}
    answer = httpx.post(f"{cluster.url}/v1/chat/completions", json=body, timeout=ANSWER_S, trust_env=False).json()
    assert answer["usage"]["completion_tokens"] > 0
    assert answer["choices"][0]["finish_reason"] in ("stop", "length")
    print(f"Hello: {answer['choices'][0]['message']['content']!r}")


def test_workers_compute_with_the_c_kernels(cluster: LiveCluster) -> None:
    """Workers use the cross-compiled C kernels; kernels for another processor would not load."""
    for name in ("prefill-0", "decode-0", "decode-1"):
        assert "fused layers, C kernels, attention by C" in cluster.log_file(name).read_text()
