"""With clients that leave and far too small pools, other answers are exact, and every block is released."""

from __future__ import annotations

import contextlib
import json
import os
import random
import signal
import socket
import threading
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path

import httpx
import pytest

from pd_cluster.types import Sampling
from tests.support.cluster import LiveCluster, children_of, in_parallel, together
from tests.support.engines import assert_all_same, assert_same, random_prompt
from tests.support.metrics import counts_of, told
from tests.support.reference_beams import assert_same_beams
from tests.support.steady_stream import SteadyStream

Checkpoints = Callable[..., Path]
NUM_REQUESTS, CONCURRENCY = 100, 16


SHM = ["--preemption-mode=recompute", "--kv-transport=shm"]
DIST = ["--preemption-mode=swap", "--kv-transport=dist"]
BOTH = {"prefill-0": SHM[:1], "prefill-1": DIST[:1], "decode-0": SHM[:1], "decode-1": DIST}  # shm is the default


@pytest.fixture(
    scope="module",
    params=["both", pytest.param("shm", marks=pytest.mark.slow), pytest.param("dist", marks=pytest.mark.slow)],
)
def cluster(
    request: pytest.FixtureRequest, model: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[LiveCluster]:
    """Starts two prefill and two decode instances with blocks for only a few requests, so that all must preempt.

    One of each pair recomputes preempted requests; the other swaps as far as its small swap space allows. Over shared
    memory there is one API process, otherwise two.
    """
    names = BOTH if request.param == "both" else dict.fromkeys(BOTH, {"shm": SHM, "dist": DIST}[request.param])
    flags = [
        "--block-size=8",
        "--num-blocks=40",
        "--max-model-len=160",
        "--max-num-batched-tokens=48",
        "--growth-tokens=8",
        "--swap-space=0.002",
        "--scheduling-policy=priority",
        f"--api-workers={1 if request.param == 'shm' else 2}",
    ]
    folder = tmp_path_factory.mktemp(f"pressure-{request.param}")
    with LiveCluster(folder, model, 2, 2, flags, member_arguments=names) as running:
        links = [state for i in running.instances() if i["role"] == "prefill" for state in i["links"].values()]
        assert {state.removeprefix("up ") for state in links} == {
            "both": {"(shm)", "(dist)"},
            "shm": {"(shm)"},
            "dist": {"(dist)"},
        }[request.param]
        yield running


def leave_early(cluster: LiveCluster, prompt: list[int], after_s: float, stream: bool, **fields: object) -> None:
    """Sends a request and closes the connection after `after_s`, whatever the request's state."""
    fields = {"prompt": prompt, "max_tokens": 60, "temperature": 0, "ignore_eos": True, "stream": stream, **fields}
    body = json.dumps(fields)
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    with socket.create_connection(("127.0.0.1", cluster.launch.port), timeout=30) as connection:
        connection.sendall(f"{head}\r\n\r\n{body}".encode())
        connection.settimeout(after_s)
        try:
            while connection.recv(4096):
                pass
        except TimeoutError:
            pass


def test_a_third_of_100_requests_is_aborted_at_random_moments(cluster: LiveCluster, model: Path) -> None:
    rng = random.Random(21)
    jobs: list[Callable[[], None]] = []
    stayed: list[tuple[list[int], list[int], int]] = []  # prompt, output and max_tokens
    for at in range(NUM_REQUESTS):
        prompt = random_prompt(rng, rng.randrange(1, 100))
        if at % 3 == 0:
            after_s, stream = rng.uniform(0.0, 0.6), rng.random() < 0.5
            jobs.append(lambda p=prompt, a=after_s, s=stream: leave_early(cluster, p, a, s))  # type: ignore[misc]
        else:
            num, first = rng.randrange(1, 40), rng.choice([-1, 0, 0, 0, 3])
            jobs.append(lambda p=prompt, n=num, f=first: stayed.append((p, cluster.complete(p, n, priority=f), n)))  # type: ignore[misc]
    errors = in_parallel(jobs, CONCURRENCY)
    assert not errors, f"{len(errors)} errors, the first: {errors[0]}\n{cluster.logs()}"
    cluster.assert_home()
    prompts, outputs, limits = (list(each) for each in zip(*stayed, strict=True))
    assert len(prompts) == NUM_REQUESTS - len(range(0, NUM_REQUESTS, 3))
    assert_all_same(model, prompts, outputs, limits)
    for instance in cluster.instances():
        assert instance["num_steps"] > 0, f"{instance['instance_id']} computed nothing"


def test_further_turns_go_where_their_prefix_is(cluster: LiveCluster, model: Path) -> None:
    """Each user's second turn is served by the same two instances as the first, which have its prefix cached."""
    rng = random.Random(25)

    def post(prompt: list[int]) -> tuple[str, list[int], int]:
        """Returns the serving instances, the tokens, and the number of cached prompt tokens."""
        body = {"prompt": prompt, "max_tokens": 8, "temperature": 0, "ignore_eos": True, "return_token_ids": True}
        answer = cluster.client.post(f"{cluster.url}/v1/completions", json=body)
        assert answer.status_code == 200, answer.text
        found = answer.json()
        cached = found["usage"]["prompt_tokens_details"]["cached_tokens"]
        return answer.headers["x-pd-served-by"], found["choices"][0]["token_ids"], cached

    for _ in range(20):  # until some requests overlap
        prompts = [random_prompt(rng, 40) for _ in range(4)]
        places = together([partial(post, prompt) for prompt in prompts])
        if len({served_by for served_by, *_ in places}) > 1:
            break
    else:
        pytest.fail("one pair did everything")
    cluster.assert_home()  # waits for heartbeats, which also report the caches' contents
    for prompt, (served_by, output, _) in zip(prompts, places, strict=True):
        whole = [*prompt, *output, *random_prompt(rng, 10)]
        again, tokens, cached = post(whole)
        assert (again, cached >= 40) == (served_by, True)
        assert_same(model, whole, tokens, 8)
    cluster.assert_home()


def test_choices_under_pressure(cluster: LiveCluster) -> None:
    """Several sequences of one prompt that exceed the pool equal their results in an idle cluster."""
    rng = random.Random(23)
    prompts = [random_prompt(rng, rng.randrange(1, 60)) for _ in range(8)]
    fields = {"n": 3, "temperature": 1.0, "ignore_eos": True}
    asks = [partial(cluster.complete_choices, prompt, 40, seed=at, **fields) for at, prompt in enumerate(prompts)]
    outputs = together(asks)
    assert outputs == [ask() for ask in asks], "results differ from the same requests alone"
    assert {len(choices) for choices in outputs} == {3}
    cluster.assert_home()


def test_beams_under_pressure(cluster: LiveCluster, model: Path) -> None:
    """With more beams than the pools hold, while every third client leaves, the others get generate()'s tokens."""
    rng = random.Random(24)
    fields = {"use_beam_search": True, "n": 3, "ignore_eos": True}
    sampling = Sampling(n=3, beam_width=3, max_tokens=30, temperature=0.0, ignore_eos=True)
    jobs: list[Callable[[], None]] = []
    for at in range(18):
        prompt = random_prompt(rng, rng.randrange(1, 90))
        if at % 3 == 0:
            after_s = rng.uniform(0.0, 0.6)
            jobs.append(lambda p=prompt, a=after_s: leave_early(cluster, p, a, stream=False, **fields))  # type: ignore[misc]
        else:
            jobs.append(
                lambda p=prompt: assert_same_beams(model, p, cluster.complete_choices(p, 30, **fields), sampling)  # type: ignore[misc]
            )
    errors = in_parallel(jobs, concurrency=8)
    assert not errors, f"{len(errors)} errors, the first: {errors[0]}\n{cluster.logs()}"
    cluster.assert_home()


def test_long_outputs_overflow_the_decode_pool(cluster: LiveCluster, model: Path) -> None:
    """Each sequence grows to 19 of 40 blocks, so no three fit: preemption is constant, without a deadlock."""
    rng = random.Random(22)
    prompts = [random_prompt(rng, rng.randrange(30, 60)) for _ in range(12)]
    outputs = cluster.complete_together(prompts, 90, ignore_eos=True)
    cluster.assert_home()
    decodes = [i for i in cluster.instances() if i["role"] == "decode"]
    assert sum(i["num_preemptions"] for i in decodes) > 0, "no preemption: the pools are too large for this test"
    found = told(cluster)
    for name in ("decode-0", "decode-1"):  # preempted sequences have all ended
        assert found["vllm:request_num_preemptions_sum", name] == found["vllm:num_preemptions_total", name]
    assert {len(output) for output in outputs} == {90}
    assert outputs == [cluster.complete(prompt, 90, ignore_eos=True) for prompt in prompts], "they differ alone"
    cluster.assert_home()


def test_drains_and_roles_under_a_steady_stream(cluster: LiveCluster) -> None:
    """Drains, undrains and role changes back and forth lose no request, change no token and leave nothing held."""

    def do(name: str, what: str, **fields: object) -> None:
        cluster.order(f"/instances/{name}/{what}", **fields)

    def is_now(name: str, **fields: str) -> Callable[[], bool]:
        return lambda: fields.items() <= cluster.instance(name).items()

    stream = SteadyStream(cluster, longest=60)
    with stream.running():
        do("decode-1", "drain")
        cluster.wait_until("drained", is_now("decode-1", state="drained"))
        do("decode-1", "undrain")
        do("prefill-1", "role", role="decode")
        cluster.wait_until("decode", is_now("prefill-1", role="decode"))
        cluster.wait_until("linked", cluster.is_whole)
        do("decode-0", "role", role="prefill", timeout_s=0.0)  # its requests continue elsewhere
        cluster.wait_until("prefill", is_now("decode-0", role="prefill"))
        cluster.wait_until("linked", cluster.is_whole)
        do("decode-0", "role", role="decode")
        do("prefill-1", "role", role="prefill")
        cluster.wait_until("as before", lambda: all(is_now(n, role=n[:-2])() for n in ("decode-0", "prefill-1")))
        cluster.wait_until("linked", cluster.is_whole)
    cluster.assert_home()


def test_every_api_process_tells_the_counts_of_all(cluster: LiveCluster) -> None:
    """Every API process reports the sum for requests over separate connections, and one request in flight."""
    cluster.assert_home()
    before = counts_of(cluster)

    def all_have(num_requests: int) -> bool:
        """Whether all of many new connections, and so all processes, report this number."""
        wanted = {"prompt_tokens_total": 3, "generation_tokens_total": 2, "request_success_length": 1}
        made = [counts_of(cluster) - before for _ in range(12)]
        return all(each[name] == number * num_requests for each in made for name, number in wanted.items())

    def load() -> set[int]:
        return {httpx.get(f"{cluster.url}/load", trust_env=False).json()["server_load"] for _ in range(12)}

    body = {"prompt": [1, 2, 3], "max_tokens": 2, "ignore_eos": True}
    for _ in range(10):
        assert httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=30, trust_env=False).status_code == 200
    cluster.wait_until("all tell of 10 requests", lambda: all_have(10))
    assert told(cluster)["pd_cluster:api_processes_alive", ""] == max(1, len(api_processes(cluster)))
    cluster.wait_until("nothing is in flight", lambda: load() == {0})
    with socket.create_connection(("127.0.0.1", cluster.launch.port), timeout=30) as connection:
        connection.sendall(b"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: 2\r\n\r\n")
        cluster.wait_until("all tell of one in flight", lambda: load() == {1})
    cluster.wait_until("all tell of none", lambda: load() == {0})


def test_an_api_process_that_dies_is_started_again(cluster: LiveCluster, model: Path) -> None:
    """After kill -9 of an API process during streams, only its own clients notice, and nothing stays held."""
    pids = api_processes(cluster)
    if not pids:
        pytest.skip("this cluster's scheduler serves by itself")
    assert len(pids) == 2
    prompt = random_prompt(random.Random(26), 30)
    begun = threading.Semaphore(0)
    outputs: list[list[int]] = []
    before = counts_of(cluster)

    def stream() -> None:
        outputs.append(streamed(cluster, prompt, 100, begun))

    def kill() -> None:
        for _ in range(4):
            assert begun.acquire(timeout=30)
        os.kill(pids[0], signal.SIGKILL)

    errors = in_parallel([*[stream] * 8, kill], concurrency=9)
    assert all(isinstance(error, httpx.HTTPError) for error in errors), errors
    assert len(outputs) + len(errors) == 8
    for output in outputs:
        assert_same(model, prompt, output, 100)
    cluster.wait_until("two API processes", lambda: len(set(api_processes(cluster)) - {pids[0]}) == 2)
    cluster.wait_until("both serve", lambda: all(serves(cluster) for _ in range(12)))
    cluster.assert_home()
    for _ in range(12):
        assert before <= counts_of(cluster), "an API process lost the dead one's counts"
    kept = cluster.client.get(f"{cluster.admin_url}/requests").json()["requests"]
    assert {request["status"] for request in kept} <= {"finished", "running", "failed"}
    assert len(kept) > 5


def streamed(cluster: LiveCluster, prompt: list[int], num_tokens: int, begun: threading.Semaphore) -> list[int]:
    """Returns a stream's tokens, read over a new connection; releases `begun` at the first token."""
    fields = {"max_tokens": num_tokens, "temperature": 0, "ignore_eos": True, "stream": True, "return_token_ids": True}
    where, body = f"{cluster.url}/v1/completions", {"prompt": prompt, **fields}
    found: list[int] = []
    with httpx.stream("POST", where, json=body, timeout=60, trust_env=False) as answer:
        assert answer.status_code == 200, answer.read()
        for line in answer.iter_lines():
            if line.startswith("data: {"):
                if not found:
                    begun.release()
                found += json.loads(line[6:])["choices"][0].get("token_ids") or []
    return found


def api_processes(cluster: LiveCluster) -> list[int]:
    children = children_of(cluster.processes["scheduler"].pid)
    return [pid for pid in children if b"api_process" in Path(f"/proc/{pid}/cmdline").read_bytes()]


def serves(cluster: LiveCluster) -> bool:
    """Whether a new connection, which any API process may accept, is served."""
    body = {"prompt": [1, 2, 3], "max_tokens": 2}
    with contextlib.suppress(httpx.HTTPError):
        return httpx.post(f"{cluster.url}/v1/completions", json=body, timeout=5, trust_env=False).status_code == 200
    return False


def test_the_scheduler_drains_with_all_its_processes(cluster: LiveCluster, model: Path) -> None:
    """The last test: during the drain streams run to their end, new connections get answers, and nothing is left."""
    prompt = random_prompt(random.Random(27), 20)
    pids = [cluster.processes["scheduler"].pid, *api_processes(cluster)]
    outputs: list[list[int]] = []
    statuses: list[bytes] = []
    begun = threading.Semaphore(0)

    def stream() -> None:
        outputs.append(streamed(cluster, prompt, 130, begun))

    def stop() -> None:
        for _ in range(3):
            assert begun.acquire(timeout=30)
        for pid in pids:  # like Ctrl-C, which signals a whole process group
            os.kill(pid, signal.SIGINT)
        while not statuses or b"503" not in statuses[-1]:  # until the signal is handled
            statuses.append(status_line(cluster))
        statuses.extend(status_line(cluster) for _ in range(8))

    with cluster.unfinished():
        assert in_parallel([*[stream] * 3, stop], concurrency=4) == []
    for output in outputs:
        assert_same(model, prompt, output, 130)
    assert {status.split()[1] for status in statuses[-9:]} == {b"503"}
    assert cluster.await_exit("scheduler") == 0
    assert not any(Path(f"/proc/{pid}").exists() for pid in pids)


def status_line(cluster: LiveCluster) -> bytes:
    """Returns the status line of /health, over a new connection."""
    with socket.create_connection(("127.0.0.1", cluster.launch.port), timeout=10) as connection:
        connection.sendall(b"GET /health HTTP/1.1\r\nHost: x\r\nConnection: close\r\n\r\n")
        return connection.recv(4096).split(b"\r\n")[0]
