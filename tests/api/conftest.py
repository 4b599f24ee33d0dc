"""A small cluster for all API tests, OpenAI's own client for it, and a cluster whose model calls tools and reasons."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import openai
import pytest

from pd_cluster.text.tokenizer import Tokenizer
from tests.support.cluster import LiveCluster, SpawnedCluster
from tests.support.scripted_scenarios import FAMILIES

MAX_MODEL_LEN = 256
FLAGS = [
    f"--max-model-len={MAX_MODEL_LEN}",
    "--num-blocks=128",
    "--trust-request-chat-template",
    "--prefix-retention=3600",
]
KEYS = {"one": "sk-first-0123456789", "two": "sk-second_0123456789"}  # tenant -> key
METRICS_KEY = "mk-0123456789"
MAX_FILE_MIB = 33  # larger than the limit of other bodies
GUARDED_FLAGS = [
    *("--api-workers=2", "--root-path=/llm", "--enable-request-id-headers", "--max-logprobs=-1"),
    *('--allowed-origins=["https://a.example"]', *(f"--api-key-tenant={name}" for name in KEYS)),
]
SCRIPTED_FLAGS = [
    *("--max-model-len=4096", "--num-blocks=600", "--enable-auto-tool-choice", "--resume-window=30"),
]
SCRIPTED_PARSERS = ["--tool-call-parser=hermes", "--reasoning-parser=qwen3"]


@pytest.fixture(scope="session")
def cluster(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    with LiveCluster(tmp_path_factory.mktemp("api"), model, arguments=FLAGS) as running:
        yield running


@pytest.fixture(scope="session")
def client(cluster: LiveCluster) -> Iterator[openai.OpenAI]:
    """Yields OpenAI's client without retries."""
    with openai.OpenAI(base_url=f"{cluster.url}/v1", api_key="none", max_retries=0, timeout=60) as made:
        yield made


@pytest.fixture(scope="session")
def tokenizer(model: Path) -> Tokenizer:
    return Tokenizer(model)


@pytest.fixture(scope="session")
def plain(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    """Yields a cluster with USE_OPENAI=0; asserts after its last test that nothing is held."""
    with LiveCluster(tmp_path_factory.mktemp("plain"), model, arguments=FLAGS, openai=False) as running:
        yield running
        running.assert_home()


@pytest.fixture(scope="session")
def guarded(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    """Yields two API processes with keys (in the environment, as under `up`) and folders for responses and files."""
    folder = tmp_path_factory.mktemp("guarded")
    flags = [*FLAGS, *GUARDED_FLAGS, f"--response-store={folder / 'kept'}", f"--files-dir={folder / 'files'}"]
    flags += [f"--max-file-size={MAX_FILE_MIB}", "--files-tenant-mib=200"]
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("PD_CLUSTER_SERVE_API_KEY", " ".join(KEYS.values()))
        patch.setenv("PD_CLUSTER_SERVE_METRICS_KEY", METRICS_KEY)
        cluster = SpawnedCluster(folder, model, arguments=flags)
        cluster.start()
    try:
        cluster.await_ready()
        yield cluster
        cluster.assert_home()
    finally:
        cluster.stop()


@pytest.fixture(scope="session")
def scripted_model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Returns a model that answers with the scenarios of FAMILIES["qwen3"]."""
    return FAMILIES["qwen3"].make(tmp_path_factory.mktemp("qwen3"))


@pytest.fixture(scope="session")
def scripted(scripted_model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    flags = [*SCRIPTED_FLAGS, *SCRIPTED_PARSERS]
    with LiveCluster(tmp_path_factory.mktemp("scripted"), scripted_model, arguments=flags) as running:
        yield running


def client_of(cluster: LiveCluster, name: str) -> openai.OpenAI:
    """Makes OpenAI's client with the key of this tenant."""
    return openai.OpenAI(base_url=f"{cluster.url}/v1", api_key=KEYS[name], max_retries=0, timeout=60)


@pytest.fixture
def one(guarded: LiveCluster) -> Iterator[openai.OpenAI]:
    with client_of(guarded, "one") as client:
        yield client


@pytest.fixture
def two(guarded: LiveCluster) -> Iterator[openai.OpenAI]:
    with client_of(guarded, "two") as client:
        yield client
