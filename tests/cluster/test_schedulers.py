"""Three schedulers over the same workers: any may die under load, and one live scheduler owns membership."""

from __future__ import annotations

import contextlib
import random
import signal
import time
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest

from tests.support.cluster import LiveCluster
from tests.support.engines import random_prompt
from tests.support.traffic import Judge, Outcome, Traffic, make_asks

pytestmark = pytest.mark.slow

Checkpoints = Callable[..., Path]
NUM_SCHEDULERS = 3
REQUEST_TIMEOUT_S = 60.0
FLAGS = [f"--request-timeout={REQUEST_TIMEOUT_S:g}", "--dead-after=8"]  # a busy machine must not count as dead
PATIENCE_S = 20.0  # allows for a busy machine
CONCURRENCY = 8  # at each scheduler


class Schedulers:
    """A cluster with several schedulers, each at its own ports."""

    def __init__(self, cluster: LiveCluster) -> None:
        self.cluster = cluster
        self.names = cluster.launch.scheduler_names
        self.urls = dict(zip(self.names, cluster.launch.urls, strict=True))
        token = (cluster.folder / "admin.token").read_text().strip()
        self.client = httpx.Client(timeout=10, trust_env=False, headers={"Authorization": f"Bearer {token}"})

    def admin(self, name: str) -> str:
        return f"http://127.0.0.1:{self.cluster.members[name].port + 1}"

    def look_at(self, name: str) -> None:
        """Sends the cluster's queries to this scheduler from now on."""
        self.cluster.url, self.cluster.admin_url = self.urls[name], self.admin(name)

    def seen(self, name: str) -> dict[str, Any]:
        found: dict[str, Any] = self.client.get(f"{self.admin(name)}/overview").json()["scheduler"]
        return found

    def instances(self, name: str) -> dict[str, dict[str, Any]]:
        found = self.client.get(f"{self.admin(name)}/instances").json()["instances"]
        return {each["instance_id"]: each for each in found}

    def command(self, name: str, path: str, **body: Any) -> httpx.Response:
        return self.client.post(f"{self.admin(name)}/instances/{path}", json=body)

    def owner(self, among: Sequence[str] | None = None) -> str:
        """Waits until these schedulers agree on one owner among them; returns it."""
        among = self.names if among is None else among
        found: list[str] = []

        def agree() -> bool:
            found[:] = {self.seen(name)["owner"] for name in among}
            return len(found) == 1 and found[0] in among

        self.cluster.wait_until("the schedulers agree on an owner", agree, PATIENCE_S)
        return found[0]

    def others(self, name: str) -> list[str]:
        return [each for each in self.names if each != name]

    def die(self, name: str) -> None:
        self.cluster.kill(name)
        self.cluster.await_exit(name)

    def return_(self, name: str) -> None:
        self.cluster.start_member(name)
        self.look_at(name)
        self.cluster.await_ready()


@pytest.fixture(scope="module")
def schedulers(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Schedulers]:
    folder = tmp_path_factory.mktemp("schedulers")
    with LiveCluster(folder, model, 1, 2, FLAGS, num_schedulers=NUM_SCHEDULERS) as cluster:
        found = Schedulers(cluster)
        for name in found.names:
            found.look_at(name)
            cluster.await_ready()
        yield found


def test_each_serves_and_one_of_them_owns_membership(schedulers: Schedulers) -> None:
    prompt = random_prompt(random.Random(3), 12)
    answers = []
    for name in schedulers.names:
        schedulers.look_at(name)
        answers.append(schedulers.cluster.complete(prompt, 16))
    assert answers == [answers[0]] * NUM_SCHEDULERS
    owner = schedulers.owner()
    follower = schedulers.others(owner)[0]
    refused = schedulers.command(follower, "decode-1/drain")
    assert refused.status_code == 409, refused.text
    assert f"{follower} does not own membership: {owner} does, at {schedulers.admin(owner)}" in refused.text
    asleep = schedulers.client.post(f"{schedulers.admin(owner)}/sleep")
    assert asleep.status_code == 409, asleep.text


@pytest.mark.timeout(300)
def test_kill_9_of_each_in_turn_under_load(schedulers: Schedulers, model: Path) -> None:
    cluster = schedulers.cluster
    for turn, name in enumerate(schedulers.names):
        per_scheduler = make_asks(random.Random(50 + turn), 120, 12, 120, 48)
        judge = Judge(model, per_scheduler, REQUEST_TIMEOUT_S)
        with contextlib.ExitStack() as stack:
            traffics = {
                each: stack.enter_context(Traffic(schedulers.urls[each], per_scheduler, CONCURRENCY))
                for each in schedulers.names
            }
            for traffic in traffics.values():
                traffic.more(40)
            doomed = traffics[name]
            cluster.wait_until("it is busy", lambda doomed=doomed: len(doomed.outcomes) > 10, PATIENCE_S)  # type: ignore[misc]
            was_owner = schedulers.owner() == name
            schedulers.die(name)
            died_s = time.monotonic()
            if was_owner:
                successor = schedulers.owner(schedulers.others(name))
                took_s = time.monotonic() - died_s
                print(f"{name} was the owner; {successor} owns membership after {took_s:.2f} s")
            for each in schedulers.others(name):
                traffics[each].finish()
            doomed.__exit__()
        for each in schedulers.others(name):
            counts = judge.check(traffics[each].outcomes)
            assert counts == {"answered": len(per_scheduler)}, (each, counts)
        assert any(outcome.broken for outcome in doomed.outcomes), "it died without a running request"
        assert_clear_ends(judge, doomed.outcomes)
        schedulers.look_at(schedulers.others(name)[0])
        cluster.assert_home()
        schedulers.return_(name)
        cluster.assert_home()
    cluster.assert_home()


def assert_clear_ends(judge: Judge, outcomes: Sequence[Outcome]) -> None:
    """Asserts that failed clients saw a broken or refused connection, and only right tokens until then."""
    for outcome in outcomes:
        if outcome.broken:
            assert any(each in outcome.broken for each in ("RemoteProtocolError", "ReadError", "ConnectError")), outcome
        for tokens in outcome.choices.values():
            judge.check_tokens(outcome, tokens)


@pytest.mark.timeout(120)
def test_a_drain_outlives_its_owner_and_all_follow_a_role(schedulers: Schedulers) -> None:
    cluster = schedulers.cluster
    owner = schedulers.owner()
    assert schedulers.command(owner, "decode-1/drain").status_code == 200

    def all_see(state: str, names: Sequence[str]) -> Callable[[], bool]:
        return lambda: all(schedulers.instances(name)["decode-1"]["state"] == state for name in names)

    cluster.wait_until("all see the drain", all_see("drained", schedulers.names), PATIENCE_S)
    schedulers.die(owner)
    rest = schedulers.others(owner)
    successor = schedulers.owner(rest)
    assert all_see("drained", rest)()
    assert schedulers.command(successor, "decode-1/undrain").status_code == 200
    cluster.wait_until("it is in service again", all_see("ready", rest), PATIENCE_S)
    assert schedulers.command(successor, "decode-1/role", role="prefill").status_code == 200

    def role(names: Sequence[str], wanted: str) -> Callable[[], bool]:
        return lambda: all(schedulers.instances(name)["decode-1"]["role"] == wanted for name in names)

    cluster.wait_until("all follow the role", role(rest, "prefill"), PATIENCE_S)
    schedulers.return_(owner)  # joins, and follows
    cluster.wait_until("one that joins follows", role(schedulers.names, "prefill"), PATIENCE_S)
    assert schedulers.command(schedulers.owner(), "decode-1/role", role="decode").status_code == 200
    cluster.wait_until("it is back", role(schedulers.names, "decode"), PATIENCE_S)
    schedulers.look_at(owner)
    cluster.await_ready()
    cluster.assert_home()


@pytest.mark.timeout(120)
def test_an_owner_that_stood_still_owns_nothing_afterwards(schedulers: Schedulers) -> None:
    cluster = schedulers.cluster
    owner = schedulers.owner()
    term = schedulers.seen(owner)["term"]
    cluster.kill(owner, signal.SIGSTOP)
    try:
        successor = schedulers.owner(schedulers.others(owner))
        assert schedulers.seen(successor)["term"] > term
        cluster.kill("decode-1")  # a change that only the new owner may announce
        cluster.await_exit("decode-1")
    finally:
        cluster.kill(owner, signal.SIGCONT)
    assert schedulers.owner() == successor
    cluster.start_member("decode-1")
    for name in schedulers.names:
        schedulers.look_at(name)
        cluster.await_ready()
        prompt = random_prompt(random.Random(9), 10)
        assert len(cluster.complete(prompt, 8)) == 8
    cluster.assert_home()


@pytest.mark.timeout(120)
def test_a_scheduler_that_ends_in_order_lets_go_at_once(schedulers: Schedulers) -> None:
    cluster = schedulers.cluster
    owner = schedulers.owner()
    cluster.kill(owner, signal.SIGTERM)
    assert cluster.await_exit(owner) == 0
    began_s = time.monotonic()
    schedulers.owner(schedulers.others(owner))
    print(f"another owns membership {time.monotonic() - began_s:.2f} s after the end of the last owner")
    schedulers.return_(owner)
