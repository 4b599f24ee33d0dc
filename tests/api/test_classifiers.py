"""/classify and /pooling with a sequence classifier over a split cluster, against transformers; --pooler-config."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import numpy as np
import pytest

from pd_cluster.checkpoints.checkpoint import Checkpoint
from pd_cluster.errors import ConfigError
from pd_cluster.settings.engine_config import EngineConfig
from pd_cluster.types import Pooling
from tests.support.classifiers import LABELS, make_classifier, reference_classes
from tests.support.cluster import LiveCluster
from tests.support.vectors import reference_vector

IDS = [[5, 6, 7, 8], [9] * 40, [10, 11]]
FLAGS = ["--max-model-len=256", "--num-blocks=128", '--pooler-config={"pooling_type": "MEAN", "use_activation": false}']


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_classifier(tmp_path_factory.mktemp("classifier"))


@pytest.fixture(scope="module")
def cluster(folder: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    with LiveCluster(tmp_path_factory.mktemp("classes"), folder, arguments=FLAGS) as running:
        yield running
        running.assert_home()


def post(cluster: LiveCluster, path: str, **body: Any) -> httpx.Response:
    return cluster.client.post(f"{cluster.url}{path}", json=body)


def test_classes_are_those_of_transformers(cluster: LiveCluster, folder: Path) -> None:
    logits = np.array([reference_classes(folder, prompt) for prompt in IDS])
    shares = np.exp(logits) / np.exp(logits).sum(axis=1, keepdims=True)
    answer = post(cluster, "/classify", input=IDS).json()
    assert (answer["object"], answer["usage"]["prompt_tokens"]) == ("list", sum(map(len, IDS)))
    assert answer["id"].startswith("classify-")
    data = answer["data"]
    assert np.allclose([each["probs"] for each in data], shares, atol=1e-5)
    assert [each["label"] for each in data] == [LABELS[at] for at in logits.argmax(axis=1)]
    assert {each["num_classes"] for each in data} == {len(LABELS)}
    raw = post(cluster, "/classify", input=IDS, use_activation=False).json()["data"]
    assert np.allclose([each["probs"] for each in raw], logits, atol=1e-4)
    pooled = post(cluster, "/pooling", input=IDS).json()["data"]
    assert [each["data"] for each in pooled] == [each["probs"] for each in data]


def test_a_classifier_takes_no_logits_processors(folder: Path) -> None:
    with pytest.raises(ConfigError, match="is a classifier, which chooses no tokens; leave it out"):
        Checkpoint.of(EngineConfig(model=str(folder), logits_processors=("module:Class",)))


def test_the_pooler_config_counts_for_vectors(cluster: LiveCluster, folder: Path) -> None:
    for path, name, more in (("/v1/embeddings", "embedding", {}), ("/pooling", "data", {"task": "embed"})):
        data = post(cluster, path, input=IDS, **more).json()["data"]
        for each, prompt in zip(data, IDS, strict=True):
            expected = reference_vector(folder, prompt, Pooling(kind="mean", normalizes=False))
            assert np.allclose(each[name], expected, atol=1e-4)


def test_a_classifier_generates_nothing(cluster: LiveCluster) -> None:
    for path, body in (("/v1/completions", {"prompt": [5]}), ("/inference/v1/generate", {"token_ids": [5]})):
        answer = post(cluster, path, **body)
        assert answer.status_code == 400
        assert "use /classify" in answer.json()["error"]["message"]
