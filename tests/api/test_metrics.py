"""GET /metrics and /load, read with Prometheus' own parser: known requests give exact differences."""

from __future__ import annotations

import json
import socket
from collections.abc import Iterator
from contextlib import contextmanager

import httpx

from tests.support.cluster import LiveCluster
from tests.support.metrics import Counts, counts_of, told

PROMPT = [17] * 20
OF_CACHES = ("prompt_tokens_cached_total",)
OF_ONE_REQUEST = (
    "time_to_first_token_seconds e2e_request_latency_seconds request_queue_time_seconds handover_seconds "
    "request_prefill_time_seconds request_decode_time_seconds request_inference_time_seconds request_prompt_tokens "
    "request_max_num_generation_tokens request_params_n request_params_max_tokens "
    "request_prefill_kv_computed_tokens request_time_per_output_token_seconds"
)


def arrived(num_answers: int, max_tokens: int) -> dict[str, int]:
    """Returns the expected counts of one request with PROMPT."""
    counts = {"requests": 1, "prompt_tokens": 20, "prompt_pairs": 190, "answers": num_answers, "max_tokens": max_tokens}
    return {f"arrived_{name}_total": count for name, count in counts.items()}


@contextmanager
def difference(cluster: LiveCluster, **expected: int) -> Iterator[None]:
    """Asserts that the block soon changes the request metrics by exactly this difference."""
    cluster.assert_home()
    before = counts_of(cluster)
    yield
    wanted = Counts({name: number for name, number in expected.items() if number})

    def made() -> bool:
        found = counts_of(cluster) - before
        for name in OF_CACHES:  # these depend on earlier tests
            found.pop(name, None)
        return found == wanted

    try:
        cluster.wait_until("the counts are as expected", made)
    except AssertionError as error:
        raise AssertionError(f"{counts_of(cluster) - before} and not {wanted}") from error


def test_what_dashboards_query_of_instances_moves(cluster: LiveCluster) -> None:
    cluster.assert_home()
    before = told(cluster)
    for _ in range(2):
        cluster.complete([17] * 100, 2, ignore_eos=True)
    cluster.assert_home()
    after = told(cluster)

    def made(name: str, instance_id: str = "prefill-0") -> float:
        return after[name, instance_id] - before[name, instance_id]

    assert made("vllm:prefix_cache_hits_total") >= 96  # the second time, all blocks of 16 except the last token's
    assert made("vllm:prefix_cache_queries_total") >= made("vllm:gpu_prefix_cache_hits_total") >= 96
    assert after["pd_cluster:num_cached_blocks", "decode-0"] > 0
    assert (made("pd_cluster:handovers_finished_total"), made("pd_cluster:handovers_failed_total")) == (2, 0)
    for name in ("vllm:num_requests_running", "vllm:kv_cache_usage_perc", "pd_cluster:leaked_blocks"):
        assert after[name, "prefill-0"] == 0, name


def test_an_answer_of_known_length(cluster: LiveCluster) -> None:
    with difference(
        cluster,
        prompt_tokens_total=20,
        generation_tokens_total=8,
        request_success_length=1,
        request_generation_tokens=1,
        inter_token_latency_seconds=7,
        time_per_output_token_seconds=7,
        **arrived(1, 8),
        **dict.fromkeys(OF_ONE_REQUEST.split(), 1),
    ):
        sums = told(cluster)
        cluster.complete(PROMPT, 8, ignore_eos=True)
    after = told(cluster)

    def took(name: str) -> float:
        return after[f"vllm:{name}_sum", ""] - sums[f"vllm:{name}_sum", ""]

    assert [took(f"request_{what}_tokens") for what in ("prompt", "generation", "max_num_generation")] == [20, 8, 8]
    assert (took("request_params_n"), took("request_params_max_tokens")) == (1, 8)
    parts = [took(f"request_{what}_time_seconds") for what in ("queue", "prefill", "decode")]
    assert all(part >= 0 for part in parts)
    assert abs(sum(parts) - took("e2e_request_latency_seconds")) < 1e-4  # each is rounded to millionths
    assert abs(parts[0] + parts[1] - took("time_to_first_token_seconds")) < 1e-4


def test_where_tokens_came_from_and_what_steps_had(cluster: LiveCluster) -> None:
    """The second time all of the prompt except its last block is cached; decode receives only what it lacks."""
    found: list[dict[str, float]] = []
    for _ in range(2):
        cluster.assert_home()
        before = told(cluster)
        cluster.complete([29] * 40, 4, ignore_eos=True)
        cluster.assert_home()
        after = told(cluster)
        found.append({f"{name} {of}": after[name, of] - before.get((name, of), 0) for name, of in after})
    for made, num_cached in zip(found, (0, 32), strict=True):
        assert made["vllm:prompt_tokens_by_source_total local_compute"] == 40 - num_cached
        assert made["vllm:prompt_tokens_by_source_total local_cache_hit"] == num_cached
        assert made["vllm:request_prefill_kv_computed_tokens_sum "] == 40 - num_cached
        for what in ("queries", "hits"):
            assert made[f"vllm:external_prefix_cache_{what}_total decode-0"] == 40 - num_cached
            assert made[f"vllm:external_prefix_cache_{what}_total prefill-0"] == 0
        assert made["vllm:iteration_tokens_total_sum prefill-0"] == 40 - num_cached
        steps = [made[f"vllm:iteration_tokens_total_{what} decode-0"] for what in ("count", "sum")]
        assert steps == [3, 3]
        for of in ("prefill-0", "decode-0"):
            assert made[f"vllm:request_num_preemptions_count {of}"] == 1
            assert made[f"vllm:request_num_preemptions_sum {of}"] == 0


def test_sequences_count_by_their_own_ends(cluster: LiveCluster) -> None:
    """Three sequences of one prompt, which is computed once, count by their own ends."""
    with difference(
        cluster,
        prompt_tokens_total=20,
        generation_tokens_total=12,
        request_success_length=3,
        request_generation_tokens=3,
        inter_token_latency_seconds=9,
        time_per_output_token_seconds=9,
        **arrived(3, 12),
        **dict.fromkeys(OF_ONE_REQUEST.split(), 1),
    ):
        assert len(cluster.complete_choices(PROMPT, 4, n=3, temperature=1.0, seed=3, ignore_eos=True)) == 3


def test_a_stop_string_ends_a_sequence_as_stop(cluster: LiveCluster) -> None:
    """Tokens generated after the stop string do not count."""
    body = {"prompt": PROMPT, "max_tokens": 60, "temperature": 0, "ignore_eos": True}
    text = cluster.client.post(f"{cluster.url}/v1/completions", json=body).json()["choices"][0]["text"]
    cluster.assert_home()
    before = counts_of(cluster)
    answer = cluster.ask("/v1/completions", {**body, "stop": [text[10:14]]})
    made = counts_of(cluster) - before
    assert answer["choices"][0]["finish_reason"] == "stop"
    assert made["request_success_stop"] == 1
    assert made["generation_tokens_total"] == answer["usage"]["completion_tokens"] < 60
    assert made["request_success_length"] == made["request_success_abort"] == 0


def test_who_leaves_counts_as_abort_and_takes_no_time(cluster: LiveCluster) -> None:
    """If an answer is complete before its client leaves, the test tries another client."""
    body = {"prompt": PROMPT, "max_tokens": 230, "temperature": 0, "ignore_eos": True, "stream": True}

    def leave() -> Counts:
        cluster.assert_home()
        before = counts_of(cluster)
        with httpx.stream("POST", f"{cluster.url}/v1/completions", json=body, timeout=60, trust_env=False) as answer:
            assert next(answer.iter_lines()).startswith("data: {")
        ends = ("request_success_abort", "request_success_length")
        cluster.wait_until("it has ended", lambda: sum((counts_of(cluster) - before)[end] for end in ends) == 1)
        return counts_of(cluster) - before

    made = next(made for made in (leave() for _ in range(10)) if made["request_success_abort"])
    assert made["prompt_tokens_total"] == 20
    assert 0 < made["generation_tokens_total"] < 230
    assert made["time_to_first_token_seconds"] == 1
    assert not made["e2e_request_latency_seconds"]
    assert not made["request_generation_tokens"]
    cluster.assert_home()
    assert told(cluster)["pd_cluster:open_streams", ""] == 0


def test_load_is_the_number_of_requests_in_flight(cluster: LiveCluster) -> None:
    """A request counts from its first byte; requests for /load do not count."""

    def load() -> object:
        return cluster.client.get(f"{cluster.url}/load").json()

    assert load() == {"server_load": 0}
    body = json.dumps({"prompt": PROMPT, "max_tokens": 1}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Type: application/json\r\nContent-Length: {len(body)}"
    with socket.create_connection(("127.0.0.1", cluster.launch.port), timeout=30) as connection:
        connection.sendall(f"{head}\r\n\r\n".encode())
        cluster.wait_until("it is in flight", lambda: load() == {"server_load": 1})
        connection.sendall(body)
        assert connection.recv(4096).startswith(b"HTTP/1.1 200")
    cluster.wait_until("it is answered", lambda: load() == {"server_load": 0})
