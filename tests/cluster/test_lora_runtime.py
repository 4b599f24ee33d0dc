"""Loading and unloading adapters in a serving cluster with two API processes and a two-rank prefill instance."""

from __future__ import annotations

import json
import random
import re
import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest
from prometheus_client.parser import text_string_to_metric_families

from tests.cluster.test_death import PROMPT, Streaming
from tests.support.adapted_asks import assert_own_tokens, completing
from tests.support.adapters import make_adapter, merged, merged_models
from tests.support.canary import Canary
from tests.support.cluster import LiveCluster
from tests.support.engines import assert_all_same, random_prompt
from tests.support.hostile_adapters import HOSTILE

Checkpoints = Callable[..., Path]
LONG = 1500  # tokens, so that the answer outlasts the metrics' interval
MAX_TOKENS = 12
INFO = "vllm:lora_requests_info"


@pytest.fixture(scope="module")
def models(checkpoint: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    base, folder = checkpoint("llama", max_position_embeddings=2048), tmp_path_factory.mktemp("adapters")
    return merged_models(base, folder, {"first": 4, "second": 5, "third": 6}, within="root")


@pytest.fixture(scope="module")
def root(models: dict[str, Path]) -> Path:
    return models["first"].parent / "root"


class Served(LiveCluster):
    def command(self, path: str, status: int = 200, token: str | None = None, **body: Any) -> str:
        answer = self.ask_admin("POST", path, token, json=body)
        assert answer.status_code == status, answer.text
        return answer.text if status == 200 else str(answer.json()["error"]["message"])

    def load(self, name: str, path: Path | str, status: int = 200, **fields: Any) -> str:
        return self.command("/v1/load_lora_adapter", status, lora_name=name, lora_path=str(path), **fields)

    def unload(self, name: str, status: int = 200) -> str:
        return self.command("/v1/unload_lora_adapter", status, lora_name=name)

    def names(self) -> list[str]:
        listed = httpx.get(f"{self.url}/v1/models", trust_env=False).json()["data"]
        return [each["id"] for each in listed[1:]]

    def names_of_model(self) -> list[str]:
        listed = httpx.get(f"{self.url}/v1/models", trust_env=False).json()["data"]
        return [each["id"] for each in listed if "parent" not in each]

    def used(self) -> dict[str, str]:
        """Returns the labels of vLLM's adapter metric."""
        text = httpx.get(f"{self.url}/metrics", timeout=30, trust_env=False).text
        (family,) = [each for each in text_string_to_metric_families(text) if each.name == INFO]
        (sample,) = family.samples
        return dict(sample.labels)

    def status(self, name: str) -> int:
        """Sends a request on a new connection, which any API process may accept; returns the status."""
        body = {"model": name, "prompt": [5], "max_tokens": 1}
        return httpx.post(f"{self.url}/v1/completions", json=body, timeout=60, trust_env=False).status_code

    def assert_gives(self, names: dict[str, Path], seed: int) -> None:
        """Checks many requests at once against the merged models."""
        rng = random.Random(seed)
        asks = [(name, random_prompt(rng, n)) for name in names for n in (1, 33, 70)]
        assert_own_tokens(names, asks, completing(self, asks, MAX_TOKENS).run(), MAX_TOKENS)


@pytest.fixture(scope="module")
def cluster(models: dict[str, Path], root: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    flags = ["--enable-lora", "--max-loras=2", "--max-cpu-loras=3", "--num-blocks=512"]
    own = {"scheduler": ["--allow-runtime-lora", f"--lora-root={root}", "--api-workers=2"]}
    with Served(
        tmp_path_factory.mktemp("runtime"),
        models[""],
        arguments=[*flags, f"--lora-modules=first={root}/first"],
        member_arguments=own,
        tp_sizes={"prefill-0": 2},
    ) as running:
        yield running


def test_an_adapter_is_had_once_its_load_is_answered(cluster: Served, models: dict[str, Path], root: Path) -> None:
    assert cluster.status("second") == 404
    assert "added successfully" in cluster.load("second", "second")
    assert {cluster.status("second") for _ in range(8)} == {200}
    assert cluster.names() == ["first", "second"]
    cluster.assert_gives({name: models[name] for name in ("", "first", "second")}, seed=1)
    assert "removed successfully" in cluster.unload("second")
    assert {cluster.status("second") for _ in range(8)} == {404}
    cluster.assert_home()


def test_an_adapter_by_sagemakers_routes(cluster: Served, models: dict[str, Path]) -> None:
    """An adapter's name may contain slashes, as models' names do."""
    cluster.command("/adapters", 401, "wrong", name="team/second", src="second")
    assert "registered" in cluster.command("/adapters", name="team/second", src="second")
    assert cluster.names() == ["first", "team/second"]
    shown = httpx.get(f"{cluster.url}/v1/models/team/second", trust_env=False).json()
    assert (shown["id"], shown["parent"]) == ("team/second", cluster.names_of_model()[0])
    cluster.assert_gives({"team/second": models["second"]}, seed=3)
    assert cluster.ask_admin("DELETE", "/adapters/team/second", "wrong").status_code == 401
    assert cluster.ask_admin("DELETE", "/adapters/team/second").status_code == 200
    assert {cluster.status("team/second") for _ in range(8)} == {404}
    assert cluster.ask_admin("DELETE", "/adapters/team/second").status_code == 404
    cluster.assert_home()


def test_what_cannot_be_loaded_changes_nothing(cluster: Served, root: Path, tmp_path: Path) -> None:
    before = cluster.names()
    cluster.command("/v1/load_lora_adapter", 401, "wrong", lora_name="x", lora_path="")
    assert "there is no adapter 'second'" in cluster.unload("second", 404)
    assert "there is no folder" in cluster.load("x", root / "nothing", 404)
    assert "is not below --lora-root" in cluster.load("x", "../merged-first", 400)
    outside = tmp_path / "outside"
    shutil.copytree(root / "second", outside)
    (root / "link").symlink_to(outside)
    assert "is not below --lora-root" in cluster.load("x", "link", 400)
    (root / "link").unlink()
    assert "the model itself" in cluster.load("tiny", "second", 400)
    assert "is already loaded" in cluster.load("first", "second", 400)
    assert "not an adapter's name" in cluster.load("/a/b", "second", 400)
    assert cluster.names() == before


def test_hostile_folders_are_named_errors_and_disturb_nobody(
    cluster: Served, checkpoint: Checkpoints, models: dict[str, Path], root: Path
) -> None:
    """A repeated stream and an adapter's requests continue unchanged meanwhile; nothing of any bad folder stays."""
    wider = checkpoint("llama", hidden_size=128, intermediate_size=96)
    make_adapter(root / "wider", wider)
    with Canary(cluster).singing() as canary:
        assert re.search(r"-0: .*do not fit", cluster.load("wider", "wider", 400))
        for spoil, why in HOSTILE:
            folder = root / spoil.__name__
            shutil.copytree(root / "second", folder)
            spoil(folder)
            said = cluster.load("hostile", spoil.__name__, 400)
            assert re.search(why, said), said
            assert cluster.status("hostile") == 404
            shutil.rmtree(folder)
        num_songs = canary.num_songs
        cluster.wait_until("another song is over", lambda: canary.num_songs > num_songs)
    assert cluster.names() == ["first"]
    cluster.assert_gives({name: models[name] for name in ("", "first")}, seed=11)
    cluster.assert_home()


def test_a_name_may_stand_for_another_content(cluster: Served, models: dict[str, Path]) -> None:
    """After a name moves to another adapter, the same prompt uses no block computed with the first one."""
    cluster.load("moving", "second")
    cluster.assert_gives({"moving": models["second"]}, seed=3)
    assert "is already loaded" in cluster.load("moving", "third", 400)
    cluster.load("moving", "third", load_inplace=True)
    cluster.assert_gives({"moving": models["third"]}, seed=3)
    cluster.unload("moving")


def test_more_are_published_than_there_is_room_for(cluster: Served, models: dict[str, Path], tmp_path: Path) -> None:
    """With four adapters and memory for three, on one and two ranks, each is read again when requested."""
    adapter = make_adapter(models["first"].parent / "root" / "fourth", models[""], seed=9)
    fourth = merged(models[""], adapter, tmp_path / "merged")
    for name in ("second", "third", "fourth"):
        cluster.load(name, name)
    for seed in range(2):
        cluster.assert_gives({**models, "fourth": fourth}, seed=20 + seed)
    assert cluster.log_file("decode-0").read_text().count("was dropped") > 0
    for name in ("second", "third", "fourth"):
        cluster.unload(name)
    cluster.assert_home()


def test_a_folder_that_is_gone_when_it_is_read_again(cluster: Served, models: dict[str, Path], root: Path) -> None:
    """A missing folder fails only its adapter's requests, until the folder is back."""
    make_adapter(root / "other", models[""], seed=12)
    for name in ("second", "third", "other"):
        cluster.load(name, name)
    assert [cluster.status(name) for name in ("first", "third", "other")] == [200] * 3  # all that fit in memory
    (root / "second").rename(root / "moved")
    try:
        with Canary(cluster).singing():
            for _ in range(2):
                body = {"model": "second", "prompt": [5], "max_tokens": 1}
                answer = httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=60, trust_env=False)
                assert answer.status_code == 500, answer.text
                assert "could not be read again" in answer.json()["error"]["message"]
                assert str(root) not in answer.text
        assert f"{root}/second: no such folder" in cluster.log_file("decode-0").read_text()
    finally:
        (root / "moved").rename(root / "second")
    cluster.assert_gives({"second": models["second"], "": models[""]}, seed=13)
    for name in ("second", "third", "other"):
        cluster.unload(name)
    cluster.assert_home()


def test_one_that_is_unloaded_ends_its_requests(cluster: Served, models: dict[str, Path]) -> None:
    """A running stream continues to its end with the unloaded adapter, and stays visible in the metrics."""
    cluster.load("second", "second")
    is_shown = False

    def shown_or_over() -> bool:
        nonlocal is_shown
        is_shown = cluster.used()["running_lora_adapters"] == "second"
        return is_shown or stream.has_ended

    for _ in range(20):
        stream = Streaming(cluster.url, LONG, model="second")
        begun = json.loads(stream.next()[1])["choices"][0]["token_ids"]
        cluster.wait_until("the metric names it", shown_or_over)
        if is_shown:
            break
    assert is_shown
    cluster.unload("second")
    assert cluster.status("second") == 404
    (rest,) = stream.to_the_end()
    assert len(begun + rest) == LONG
    assert_all_same(models["second"], [PROMPT], [(begun + rest)[:64]], 64)
    idle = {"max_lora": "2", "running_lora_adapters": "", "waiting_lora_adapters": ""}
    cluster.wait_until("the metric names none", lambda: cluster.used() == idle)
    cluster.assert_home()


def test_a_folder_that_is_removed_while_it_is_used(cluster: Served, models: dict[str, Path], root: Path) -> None:
    """A loaded adapter keeps serving; a starting worker reports the missing folder, and loads it once it is back."""
    cluster.load("second", "second")
    (root / "second").rename(root / "moved")
    try:
        with Canary(cluster).singing():
            cluster.assert_gives({"second": models["second"], "": models[""]}, seed=6)
        cluster.kill("decode-0")
        cluster.await_exit("decode-0")
        cluster.start_member("decode-0")
        missing = f"{root}/second: no such folder"
        cluster.wait_until("it says why", lambda: missing in str(cluster.instance("decode-0")["reason"]))
        assert cluster.instance("decode-0")["state"] != "ready"
    finally:
        (root / "moved").rename(root / "second")
    cluster.await_ready()
    cluster.assert_gives({"second": models["second"], "": models[""]}, seed=7)
    cluster.unload("second")
    cluster.assert_home()
