"""With more gloo pairs than may be open, idle pairs close and reopen, and survive the loss of either end meanwhile."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from pd_cluster.client.instance_list import links_of
from tests.support.cluster import LiveCluster

pytestmark = pytest.mark.slow  # about half a minute: four rank processes and a dozen drains

Checkpoints = Callable[..., Path]
PROMPT = [5, 7, 11, 13, 17, 19, 23, 29]
DECODES = ("decode-0", "decode-1", "decode-2")


@pytest.fixture(scope="module")
def cluster(checkpoint: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    arguments = ["--num-blocks=64", "--kv-transport=dist", "--kv-open-links=1", "--dead-after=6"]
    folder = tmp_path_factory.mktemp("rests")
    with LiveCluster(folder, checkpoint("llama"), 1, 3, arguments) as running:
        yield running


def states(cluster: LiveCluster) -> dict[str, str]:
    return {peer.split("@")[0]: state.phase for peer, state in links_of(cluster.instance("prefill-0")).items()}


def order(cluster: LiveCluster, command: str, name: str) -> None:
    cluster.order(f"/instances/{name}/{command}")
    wanted = ("drained",) if command == "drain" else ("ready",)
    cluster.wait_until(f"{name} is {wanted}", lambda: cluster.instance(name)["state"] in wanted)


def steer(cluster: LiveCluster, target: str) -> None:
    """Drains all decode instances except `target`."""
    is_drained = {name: cluster.instance(name)["state"] == "drained" for name in DECODES}
    if is_drained[target]:
        order(cluster, "undrain", target)
    for name in [each for each in DECODES if each != target and not is_drained[each]]:
        order(cluster, "drain", name)


def test_a_request_over_each_of_more_pairs_than_may_be_open(cluster: LiveCluster) -> None:
    assert sorted(states(cluster).values()) == ["resting", "resting", "up"]
    expected = cluster.complete(PROMPT, 6)
    for name in (*DECODES, DECODES[0]):
        steer(cluster, name)
        assert cluster.complete(PROMPT, 6) == expected
        cluster.wait_until(
            f"only the link to {name} is open",
            lambda name=name: states(cluster) == {each: "up" if each == name else "resting" for each in DECODES},
        )
    cluster.assert_home()


@pytest.mark.parametrize("is_opened", [True, False], ids=["while its pair is opened", "while its pair is closed"])
def test_a_decode_instance_is_killed(cluster: LiveCluster, is_opened: bool) -> None:
    """Stops the instance first, so that P is certainly in the middle of opening or closing."""
    expected = cluster.complete(PROMPT, 6)
    (open_,) = [name for name, phase in states(cluster).items() if phase == "up"]
    asleep = next(name for name in DECODES if name != open_)
    victim = asleep if is_opened else open_
    steer(cluster, asleep)
    pids = cluster.rank_pids(victim)
    for pid in pids:
        os.kill(pid, signal.SIGSTOP)
    answers: list[Any] = []
    asking = threading.Thread(target=lambda: answers.append(cluster.complete(PROMPT, 6)))
    asking.start()
    cluster.wait_until(f"the link to {open_} rests", lambda: states(cluster).get(open_, "resting") == "resting")
    if is_opened:
        order(cluster, "undrain", open_)  # so that the request can continue
    for pid in pids:
        os.kill(pid, signal.SIGKILL)
    asking.join(100)
    assert answers == [expected], cluster.logs()
    cluster.await_exit(victim)
    cluster.start_member(victim)
    cluster.wait_until("all are there again", lambda: len(states(cluster)) == len(DECODES))
    for name in [each for each in DECODES if cluster.instance(each)["state"] == "drained"]:
        order(cluster, "undrain", name)
    cluster.wait_until("all are linked", cluster.is_whole)
    assert cluster.complete(PROMPT, 6) == expected
    cluster.assert_home()


def test_the_prefill_instance_is_killed_while_a_pair_is_opened(cluster: LiveCluster) -> None:
    """D's end is being opened at that time; nothing of it must remain."""
    expected = cluster.complete(PROMPT, 6)
    asleep = next(name for name, phase in states(cluster).items() if phase == "resting")
    steer(cluster, asleep)
    answers: list[Any] = []
    asking = threading.Thread(target=lambda: answers.append(cluster.complete(PROMPT, 6)))
    asking.start()
    cluster.kill_rank("prefill-0")
    cluster.await_exit("prefill-0")
    cluster.start_member("prefill-0")
    asking.join(60)
    assert answers == [expected], cluster.logs()
    for name in [each for each in DECODES if cluster.instance(each)["state"] == "drained"]:
        order(cluster, "undrain", name)
    cluster.wait_until("all are linked", cluster.is_whole)
    assert sorted(states(cluster).values()) == ["resting", "resting", "up"]
    assert cluster.complete(PROMPT, 6) == expected
    cluster.assert_home()
