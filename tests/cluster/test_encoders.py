"""Separate encoders across real processes: what they compute, and how requests continue when they fail."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.cluster import test_picture_kinds
from tests.cluster.test_pictures import (
    CONVERSATIONS,
    FLAGS,
    NUM_TOKENS,
    VIDEO_URL,
    Stream,
    assert_exact,
    body_of,
    chat_of,
    expected,
    expected_of_video,
    film,
    num_encoded,
    post,
    tokens,
)
from tests.support import picture_kinds
from tests.support.clips import make_seer
from tests.support.cluster import LiveCluster
from tests.support.netns import CannotMakeNamespaces, Network, SpreadCluster
from tests.support.pictures import picture

ROOM = ["--num-blocks=256", "--max-model-len=1800"]
NO_STORE = {"prefill-0": ["--mm-encoder-cache-tokens=0", "--no-enable-prefix-caching"]}


@pytest.fixture(scope="module")
def model(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return make_seer(tmp_path_factory.mktemp("model"), "qwen3_vl", max_position_embeddings=4096)


@pytest.fixture
def cluster(model: Path, tmp_path: Path) -> Iterator[LiveCluster]:
    with LiveCluster(tmp_path, model, arguments=[*FLAGS, *ROOM], num_encode=1) as running:
        yield running


def metric(cluster: LiveCluster, name: str, instance: str) -> float:
    lines = cluster.client.get(f"{cluster.url}/metrics").text.splitlines()
    found = [line for line in lines if line.startswith(f"pd_cluster:{name}_total{{") and instance in line]
    return sum(float(line.split()[-1]) for line in found)


def counted(cluster: LiveCluster, name: str, instance: str, number: float) -> None:
    cluster.wait_until(f"{name} is {number:g}", lambda: metric(cluster, name, instance) == number)


def stop_rank(cluster: LiveCluster, number: signal.Signals) -> None:
    """Signals the encoder's rank process; gets the pid from the scheduler, as the encoder's port is on another host."""
    (pid,) = cluster.instance("encode-0")["rank_pids"]
    os.kill(pid, number)


def assert_answers(cluster: LiveCluster, model: Path, *parts: Any) -> None:
    assert tokens(post(cluster, chat_of([*parts]))) == expected(model, *parts)


def begun(cluster: LiveCluster, parts: list[Any]) -> Stream:
    """Starts a chat whose prompt waits for the encoder."""
    stream = Stream(cluster, chat_of(parts))
    cluster.wait_until("it waits for the encoder", lambda: cluster.instance("prefill-0")["num_waiting"] == 1)
    return stream


def linked(cluster: LiveCluster, encoder: str = "encode-0", prefill: str = "prefill-0") -> bool:
    links = {peer.split("@")[0]: state for peer, state in cluster.instance(prefill)["links"].items()}
    return links.get(encoder, "").startswith("up")


def test_an_encoder_computes_images_and_is_killed_in_mid_request(cluster: LiveCluster, model: Path) -> None:
    assert_exact(cluster, model)
    counted(cluster, "images_encoded", "encode-0", 5)
    counted(cluster, "images_from_encoders", "prefill-0", 5)
    assert num_encoded(cluster, "prefill-0") == 0
    received = metric(cluster, "feature_bytes", "prefill-0")
    assert received > 0
    counted(cluster, "feature_bytes", "encode-0", received)

    cluster.kill_rank("encode-0", signal.SIGSTOP)
    parts = [picture(21), "x", picture(22)]
    stream = begun(cluster, parts)
    cluster.kill("encode-0")
    assert stream.end() == expected(model, *parts)
    cluster.await_exit("encode-0")
    counted(cluster, "encoder_fallbacks", "prefill-0", 2)
    counted(cluster, "images_encoded", "prefill-0", 2)
    cluster.assert_home()


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_an_encoder_that_stands_still(model: Path, tmp_path: Path) -> None:
    """If a connected encoder computes nothing, a deadline ends the wait, and no late result is used."""
    flags = [*FLAGS, *ROOM, "--encode-timeout=1", "--dead-after=60"]
    with LiveCluster(tmp_path, model, arguments=flags, num_encode=1) as cluster:
        cluster.kill_rank("encode-0", signal.SIGSTOP)
        assert_answers(cluster, model, picture(31), "x", picture(32))
        counted(cluster, "encoder_fallbacks", "prefill-0", 2)
        cluster.kill_rank("encode-0", signal.SIGCONT)
        assert_answers(cluster, model, "z", picture(33))
        counted(cluster, "images_from_encoders", "prefill-0", 1)
        cluster.assert_home()


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_two_encoders_keep_what_comes_again(model: Path, tmp_path: Path) -> None:
    """Prefill caches nothing, so it requests each image again; the digest routes it to the encoder that has it."""
    both = ("encode-0", "encode-1")
    with LiveCluster(tmp_path, model, arguments=[*FLAGS, *ROOM], num_encode=2, member_arguments=NO_STORE) as cluster:
        for _ in range(3):
            for seed in range(8):
                assert_answers(cluster, model, "ab", picture(seed), "c")
        cluster.wait_until("each was computed once", lambda: sum(num_encoded(cluster, each) for each in both) == 8)
        assert sum(metric(cluster, "encoder_cache_hits", each) for each in both) == 16
        assert all(num_encoded(cluster, each) > 0 for each in both), "digests must spread images over both"
        cluster.kill("encode-1")
        for seed in range(8, 12):
            assert_answers(cluster, model, "ab", picture(seed), "c")
        cluster.await_exit("encode-1")
        cluster.wait_until("it is forgotten", lambda: [i["role"] for i in cluster.instances()].count("encode") == 1)
        cluster.start_member("encode-1")
        cluster.await_ready()
        for seed in range(12, 18):
            assert_answers(cluster, model, "ab", picture(seed), "c")
        cluster.wait_until("the new life computes", lambda: num_encoded(cluster, "encode-1") > 0)
        cluster.assert_home()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_two_ranks_and_videos(model: Path, tmp_path: Path) -> None:
    """Rank 0 gets an encoder's features and passes them to rank 1; without the encoder, ranks share the work."""
    flags, tp = [*FLAGS, *ROOM], {"prefill-0": 2, "decode-0": 1}
    with LiveCluster(tmp_path, model, arguments=flags, tp_sizes=tp, num_encode=1) as cluster:
        assert_exact(cluster, model)
        counted(cluster, "images_from_encoders", "prefill-0", 5)
        assert tokens(post(cluster, body_of("ab", film(VIDEO_URL), "c"))) == expected_of_video(model)
        cluster.wait_until("pairs of frames came", lambda: metric(cluster, "images_from_encoders", "prefill-0") > 6)
        assert num_encoded(cluster, "prefill-0") == 0
        cluster.kill_rank("encode-0", signal.SIGSTOP)
        parts = [picture(41), picture(42), picture(43)]
        stream = begun(cluster, parts)
        cluster.kill("encode-0")
        assert stream.end() == expected(model, *parts)
        counted(cluster, "images_encoded", "prefill-0", 3)
        cluster.assert_home()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_numbers_are_those_of_prefills_own_tower(model: Path, tmp_path: Path) -> None:
    """Logprobs with an encoder equal those without, bit for bit."""

    def answers(cluster: LiveCluster) -> list[Any]:
        bodies = [chat_of(parts, logprobs=True, top_logprobs=3) for parts in CONVERSATIONS]
        bodies.append(body_of("ab", film(VIDEO_URL), "c", logprobs=True))
        return [post(cluster, body).json()["choices"][0]["logprobs"] for body in bodies]

    found = []
    for num_encode in (0, 1):
        folder = tmp_path / str(num_encode)
        folder.mkdir()
        with LiveCluster(folder, model, arguments=[*FLAGS, *ROOM], num_encode=num_encode) as cluster:
            found.append(answers(cluster))
            counted(cluster, "encoder_fallbacks", "prefill-0", 0)
            assert (metric(cluster, "images_from_encoders", "prefill-0") > 0) == bool(num_encode)
    assert found[0] == found[1]
    assert len(found[0][0]["content"]) == NUM_TOKENS


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_a_killed_prefill_and_an_aborted_request(model: Path, tmp_path: Path) -> None:
    flags = [*FLAGS, *ROOM, "--api-workers=2"]
    with LiveCluster(tmp_path, model, num_prefill=2, arguments=flags, num_encode=1) as cluster:
        cluster.kill_rank("encode-0", signal.SIGSTOP)
        parts = ["k", picture(51), picture(52)]
        stream = Stream(cluster, chat_of(parts))
        names = ("prefill-0", "prefill-1")

        def waiting() -> list[str]:
            return [name for name in names if cluster.instance(name)["num_waiting"]]

        cluster.wait_until("it waits for the encoder", lambda: bool(waiting()))
        (victim,) = waiting()
        cluster.kill(victim)
        cluster.kill_rank("encode-0", signal.SIGCONT)
        assert stream.end() == expected(model, *parts)
        cluster.restart(victim)
        cluster.kill_rank("encode-0", signal.SIGSTOP)
        before = [metric(cluster, "encoder_fallbacks", name) for name in names]
        with pytest.raises(httpx.TimeoutException):
            httpx.post(f"{cluster.url}/v1/chat/completions", json=chat_of([picture(53)]), timeout=0.5, trust_env=False)
        cluster.wait_until("nobody waits for it any more", lambda: not waiting())
        cluster.kill_rank("encode-0", signal.SIGCONT)
        cluster.assert_home()
        assert [metric(cluster, "encoder_fallbacks", name) for name in names] == before


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_over_gloo(model: Path, tmp_path: Path) -> None:
    """Over gloo, as between hosts, answers are exact, also with an encoder that is killed or stopped midway."""
    flags = [*FLAGS, *ROOM, "--kv-transport=dist"]
    with LiveCluster(tmp_path, model, arguments=flags, num_encode=1) as cluster:
        links = cluster.instance("prefill-0")["links"]
        assert [state for peer, state in links.items() if peer.startswith("encode-0@")] == ["up (dist)"]
        assert_exact(cluster, model)
        counted(cluster, "images_from_encoders", "prefill-0", 5)
        counted(cluster, "feature_bytes", "encode-0", metric(cluster, "feature_bytes", "prefill-0"))
        for number, seed in ((signal.SIGKILL, 71), (signal.SIGSTOP, 72)):
            cluster.kill_rank("encode-0", signal.SIGSTOP)
            parts = [picture(seed), "x", picture(seed + 10)]
            stream = begun(cluster, parts)
            cluster.kill_rank("encode-0", number)
            assert stream.end() == expected(model, *parts)
            cluster.kill("encode-0")
            cluster.restart("encode-0")
            assert_answers(cluster, model, "y", picture(seed + 20))
        counted(cluster, "encoder_fallbacks", "prefill-0", 4)
        cluster.assert_home()


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_encoders_that_cannot_be_paired_are_named(model: Path, tmp_path: Path) -> None:
    members = {
        "encode-0": ["--dtype=bfloat16"],
        "encode-1": ["--kv-transport=dist"],
        "prefill-0": ["--kv-transport=shm"],
    }
    cluster = LiveCluster(tmp_path, model, arguments=[*FLAGS, *ROOM], num_encode=2, member_arguments=members)
    try:
        cluster.start()

        def reason(encoder: str) -> str:
            found = cluster.instance("prefill-0")["links"]
            return next((state for peer, state in found.items() if peer.startswith(f"{encoder}@")), "")

        cluster.wait_until("the cluster serves", lambda: cluster.health()[0] == 200, 90)
        names = ("encode-0", "encode-1")
        cluster.wait_until("both are refused", lambda: all(reason(name).startswith("refused") for name in names))
        assert "--dtype bfloat16, the prefill instance --dtype float32" in reason("encode-0")
        assert "a transport that --kv-transport allows at both ends: " in reason("encode-1")
        assert "(the encoder has dist)" in reason("encode-1")
        assert_exact(cluster, model)
        counted(cluster, "images_encoded", "prefill-0", 5)
    finally:
        cluster.stop()


@pytest.mark.slow
@pytest.mark.timeout(200)
def test_sleep_roles_and_a_drain(model: Path, tmp_path: Path) -> None:
    with LiveCluster(tmp_path, model, arguments=[*FLAGS, *ROOM], num_encode=1) as cluster:
        cluster.order("/sleep?level=2")
        cluster.order("/wake_up")
        cluster.wait_until("all are awake", lambda: all(not i["sleep_level"] for i in cluster.instances()))
        assert_exact(cluster, model)
        counted(cluster, "images_encoded", "encode-0", 5)
        answer = cluster.ask_admin("POST", "/instances/encode-0/role", json={"role": "decode"})
        assert (answer.status_code, "no language model" in answer.text) == (409, True)
        cluster.order("/instances/encode-0/drain")
        assert_answers(cluster, model, "d", picture(61))
        counted(cluster, "images_encoded", "prefill-0", 1)
        os.kill(cluster.processes["encode-0"].pid, signal.SIGTERM)
        assert cluster.await_exit("encode-0") == 0
        cluster.assert_home()


@pytest.mark.slow
@pytest.mark.timeout(300)
def test_between_hosts_and_a_cut_cable(model: Path, tmp_path: Path) -> None:
    """An encoder on another host sends features encrypted; if it is cut off, requests wait but stay exact."""
    try:
        with Network(["left", "right"]) as network, network.visit():
            where = {"prefill-0": "left", "decode-0": "left", "encode-0": "right"}
            with SpreadCluster(network, where, tmp_path, model, arguments=[*FLAGS, *ROOM]) as cluster:
                links = cluster.instance("prefill-0")["links"]
                assert sorted(links.values()) == ["up (curve)", "up (shm)"]
                assert_exact(cluster, model)
                counted(cluster, "images_from_encoders", "prefill-0", 5)
                stop_rank(cluster, signal.SIGSTOP)
                parts = [picture(81), "x", picture(82)]
                stream = begun(cluster, parts)
                network.pull("right")
                stop_rank(cluster, signal.SIGCONT)
                assert stream.end() == expected(model, *parts)
                counted(cluster, "encoder_fallbacks", "prefill-0", 2)
                network.plug("right")
                cluster.wait_until("it is linked again", lambda: linked(cluster), 60)
                assert_answers(cluster, model, "y", picture(83))
                counted(cluster, "encoder_fallbacks", "prefill-0", 2)
                cluster.assert_home()
    except CannotMakeNamespaces as error:
        pytest.skip(f"this machine has no network namespaces: {error}")


@pytest.mark.slow
@pytest.mark.timeout(200)
@pytest.mark.parametrize("name", picture_kinds.KINDS)
def test_every_kind_of_tower(tmp_path: Path, name: str) -> None:
    folder = picture_kinds.make_kind(tmp_path / "model", name)
    parts = ["x", picture(3, 40, 16), "y", picture(4, 17, 33), "z"]
    with LiveCluster(tmp_path / "cluster", folder, arguments=test_picture_kinds.FLAGS, num_encode=1) as cluster:
        answer = post(cluster, test_picture_kinds.body_of(parts))
        assert tokens(answer) == test_picture_kinds.expected(folder, name, parts)
        counted(cluster, "images_from_encoders", "prefill-0", 2)
        counted(cluster, "images_encoded", "prefill-0", 0)
        cluster.assert_home()
