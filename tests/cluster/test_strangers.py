"""Attacks by another user of the host, who knows all public facts and the protocol, but reads no private file.

Also attacks with the cluster's secret but without the scheduler's key. Neither gets tokens or changes workers'
behaviour.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import json
import os
import tempfile
import time
import urllib.request
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import httpx
import pytest
import zmq
from zmq.utils import z85
from zmq.utils.monitor import recv_monitor_message

from pd_cluster import wire
from pd_cluster.types import RequestSpec, Sampling
from ranktable_tools import generate, write
from ranktable_tools.cluster_keys import read_scheduler_key, read_secret
from tests.support.another_user import answer_of_another_user
from tests.support.cluster import LiveCluster

Checkpoints = Callable[..., Path]
HANDSHAKE_MS = 3000
ANSWER_MS = 1500
PATIENCE = 20  # factor for waits for expected messages
LAST = zmq.EVENT_HANDSHAKE_FAILED_AUTH | zmq.EVENT_HANDSHAKE_FAILED_NO_DETAIL | zmq.EVENT_HANDSHAKE_FAILED_PROTOCOL
LAST |= zmq.EVENT_HANDSHAKE_SUCCEEDED | zmq.EVENT_DISCONNECTED | zmq.EVENT_CLOSED

pytestmark = pytest.mark.skipif(os.getuid() != 0, reason="only root may become another user")


@pytest.fixture(scope="module")
def cluster(checkpoint: Checkpoints, tmp_path_factory: pytest.TempPathFactory) -> Iterator[LiveCluster]:
    folder = tmp_path_factory.mktemp("strangers")
    with LiveCluster(folder, checkpoint("llama"), arguments=["--api-key=sk-the-clients-own"]) as running:
        running.client.headers["Authorization"] = "Bearer sk-the-clients-own"
        yield running


# ---- the attacker, in a separate process


def instance_of(port: int) -> dict[str, Any]:
    with urllib.request.urlopen(f"http://127.0.0.1:{port}/instance", timeout=10) as answer:
        found: dict[str, Any] = json.loads(answer.read())
        return found


def regenerated() -> bytes:
    """Returns the cluster's global table, regenerated from public facts."""
    with tempfile.TemporaryDirectory() as folder:
        made = generate(prefill=[[0]], decode=[[1]], api_server=True, server_ip="127.0.0.1", device_kind="cpu")
        return write(made, Path(folder))[0].read_bytes()


def private_keys(secret: bytes) -> dict[str, bytes]:
    """Returns private keys that might plausibly be derived from a secret."""
    label = b"pd-cluster from rank table: scheduler key 1"
    named = {"derived": hmac.digest(label, secret, "sha256"), "the secret": hashlib.sha256(secret).digest()}
    return {**named, "its bytes": secret[:32]}


def tell(
    info: Mapping[str, Any],
    private: bytes,
    server_key: bytes,
    bodies: Sequence[wire.Body],
    name: str = "scheduler",
    patience: int = 1,
) -> dict[str, Any]:
    """Poses as a scheduler with this name and key; returns whether the connection opened, and the answers."""
    with zmq.Context() as context, context.socket(zmq.DEALER) as socket:
        socket.setsockopt(zmq.LINGER, 0)
        secret_key = z85.encode(private)
        socket.curve_serverkey, socket.curve_secretkey = z85.encode(server_key), secret_key
        socket.curve_publickey = zmq.curve_public(secret_key)
        monitor = socket.get_monitor_socket(LAST)
        socket.connect(f"tcp://127.0.0.1:{info['control_port']}")
        opened = bool(monitor.poll(patience * HANDSHAKE_MS))
        opened = opened and recv_monitor_message(monitor)["event"] == zmq.EVENT_HANDSHAKE_SUCCEEDED
        if opened:
            for body in bodies:
                socket.send(wire.encode(wire.Envelope(name, 7, info["epoch"], body)))
        answers: list[str] = []
        deadline_s = time.monotonic() + 60
        while opened and socket.poll(patience * ANSWER_MS):
            assert time.monotonic() < deadline_s, f"heartbeats, and no more answers than {answers}"
            body = wire.decode(socket.recv()).body
            answers += [type(body).__name__] if not isinstance(body, wire.Heartbeat) else []
            if isinstance(body, wire.Outputs) or len(answers) == len(bodies):
                break
        socket.disable_monitor()
    return {"opened": opened, "answers": answers}


FORGED = (
    wire.Hello("scheduler"),
    wire.Submit("stolen", 0, "t", "hybrid", "", RequestSpec([5, 6, 7], Sampling(max_tokens=4)), 30.0),
    wire.Peers([]),
)


def key_of(info: Mapping[str, Any]) -> bytes:
    return base64.b64decode(info.get("public_key") or "")


def attack(ports: Mapping[str, int], guesses: Mapping[str, bytes]) -> list[str]:
    """Attacks with each secret of `guesses` and with the table's; returns the successes."""
    with pytest.raises(PermissionError):
        next(Path("/root").iterdir())
    table = regenerated()
    derived = hmac.digest(b"pd-cluster secret from rank table", table, "sha256")
    known = {"the table": table, "the secret that follows from it": derived, **guesses}
    worked = []
    for name, port in ports.items():
        info = instance_of(port)
        for what, secret in known.items():
            tag = hmac.new(secret, b"pd-cluster tag", hashlib.sha256).hexdigest()[:8]
            if tag in json.dumps(info):
                worked.append(f"{name} confirms {what}")
            for how, private in private_keys(secret).items():
                own = z85.decode(zmq.curve_public(z85.encode(private)))
                for server_key in {own, key_of(info) or own}:
                    found = tell(info, private, server_key, FORGED)
                    if found["opened"] or found["answers"]:
                        worked.append(f"{name}, {what}, {how}: {found}")
    return worked


# ---- the outcome


def is_untouched(cluster: LiveCluster) -> None:
    """Asserts that the link stayed up and serves, and that only the scheduler greeted a worker."""
    assert cluster.is_whole()
    before = cluster.instance("prefill-0")["kv_sent_nbytes"]
    prompt = [before % 200 + at for at in range(40)]  # a new prompt each time
    assert len(cluster.complete(prompt, 4)) == 4
    cluster.wait_until("handed over", lambda: cluster.instance("prefill-0")["kv_sent_nbytes"] > before)
    for name in ("prefill-0", "decode-0"):
        lines = cluster.log_file(name).read_text().splitlines()
        schedulers = {line.split()[-3] for line in lines if line.endswith("is connected")}
        assert sum(each.startswith("scheduler@") for each in schedulers) == 1, schedulers
        assert not any("link to decode-0 is down" in line for line in lines)
    cluster.assert_home()


def ports_of(cluster: LiveCluster) -> dict[str, int]:
    return {name: cluster.members[name].port for name in ("prefill-0", "decode-0")}


def test_the_schedulers_key_does_open(cluster: LiveCluster) -> None:
    """Shows that the right key works, without which the other tests would prove nothing."""
    key = read_scheduler_key(cluster.folder / "scheduler.key")
    for port in ports_of(cluster).values():
        info = instance_of(port)
        told = tell(info, key, key_of(info), [wire.Hello("scheduler")], "scheduler-9", PATIENCE)
        assert told == {"opened": True, "answers": ["Welcome"]}


def test_another_user_of_the_host(cluster: LiveCluster) -> None:
    ports = ports_of(cluster)
    assert answer_of_another_user(lambda: attack(ports, {})) == []
    is_untouched(cluster)


def test_the_clusters_secret_without_the_schedulers_key(cluster: LiveCluster) -> None:
    ports, known = ports_of(cluster), read_secret(cluster.folder / "cluster.secret")
    guesses = {"cluster.secret": known.secret, "the pinned key": known.schedulers[0]}
    assert answer_of_another_user(lambda: attack(ports, guesses)) == []
    is_untouched(cluster)


def test_no_guess_can_be_checked_against_what_everybody_may_read(cluster: LiveCluster) -> None:
    """A worker's public key is random for each process, so no guess can be checked against it."""
    before = instance_of(cluster.members["decode-0"].port)
    cluster.kill("decode-0")
    cluster.await_exit("decode-0")
    cluster.start_member("decode-0")
    pid = cluster.processes["decode-0"].pid
    cluster.wait_until("it is back", lambda: cluster.instance("decode-0")["pid"] == pid and cluster.is_whole())
    after = instance_of(cluster.members["decode-0"].port)
    own = {"epoch", "pid", "rank_pids", "control_port", "public_key"}
    assert {name for name in before if before[name] != after[name]} == own
    assert httpx.get(f"{cluster.url}/health", trust_env=False).status_code == 200
