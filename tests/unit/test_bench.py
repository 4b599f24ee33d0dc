"""Results of the benchmark: event streams, percentiles, goals and the JSON file."""

from __future__ import annotations

import asyncio
import json
import random
from pathlib import Path

import httpx
import numpy
import pytest

from pd_cluster import result_tables as report
from pd_cluster.bench.serve_bench import Measured, ServeBench, _results, check_shape, make_bodies
from pd_cluster.client.instance_list import Traffic, fetch_instances
from pd_cluster.client.streaming_client import Recorder, Sample, make_client, measure
from pd_cluster.errors import ConfigError
from pd_cluster.result_tables import Report, Result, check_writable, percentile, percentiles, spread

USAGE = {"prompt_tokens": 5, "completion_tokens": 5, "total_tokens": 10}


def event(data: object) -> bytes:
    return b"data: " + json.dumps(data, ensure_ascii=False).encode() + b"\n\n"


def piece(text: str) -> bytes:
    return event({"choices": [{"index": 0, "text": text}]})


def delta(**fields: str) -> bytes:
    return event({"choices": [{"index": 0, "delta": fields}]})


DONE = event({"choices": [], "usage": USAGE}) + b"data: [DONE]\n\n"


# ---- the stream


def test_times_of_a_stream() -> None:
    recorder = Recorder(start_s=10.0)
    assert recorder.feed(piece("a"), 10.5) == "a"
    assert recorder.feed(piece("b") + piece("c"), 10.7) == "bc"
    assert recorder.feed(piece(""), 10.8) == ""
    assert recorder.feed(piece("d"), 11.3) == "d"
    assert not recorder.ended
    recorder.feed(DONE, 11.4)
    assert recorder.ended
    sample = recorder.finish(11.5, 200, ("prefill-0", "decode-0"))
    assert sample.error is None
    assert sample.ttft_s == pytest.approx(0.5)
    assert sample.itl_s == pytest.approx([0.2, 0.6])
    assert sample.tpot_s == pytest.approx(0.8 / 4)  # the server's usage counts five tokens
    assert sample.e2e_s == pytest.approx(1.5)
    assert (sample.num_prompt_tokens, sample.num_output_tokens, sample.text) == (5, 5, "abcd")


@pytest.mark.parametrize("seed", range(6))
def test_any_split_of_the_bytes_gives_the_same_text(seed: int) -> None:
    """The bytes may be split inside a character or at Unicode line separators, which do not end lines here."""
    text = ["né", "\u2028", "\x85", "日本", "\r\n", "data: [DONE]"]
    stream = b": a comment\r\n\n" + b"".join(map(piece, text)) + DONE
    rng = random.Random(seed)
    cuts = sorted(rng.sample(range(1, len(stream)), 12))
    recorder = Recorder(0.0)
    for first, last in zip([0, *cuts], [*cuts, len(stream)], strict=True):
        recorder.feed(stream[first:last], 1.0)
    sample = recorder.finish(2.0)
    assert (sample.error, sample.text) == (None, "".join(text))


def test_tokens_that_came_with_the_first_are_not_timed() -> None:
    """Token ids show how many tokens arrived together, and count as an arrival even without text."""
    recorder = Recorder(0.0)
    recorder.feed(event({"choices": [{"text": "ab", "token_ids": [1, 2, 3]}]}), 1.0)
    recorder.feed(event({"choices": [{"text": "", "token_ids": [4]}]}), 1.5)
    recorder.feed(event({"choices": [{"text": "c", "token_ids": [5]}]}) + DONE, 2.0)
    sample = recorder.finish(2.0)
    assert (sample.ttft_s, sample.tpot_s, sample.itl_s) == (1.0, 0.5, [0.5, 0.5])
    at_once = Recorder(0.0)
    at_once.feed(event({"choices": [{"text": "abc", "token_ids": [1, 2, 3, 4, 5]}]}) + DONE, 1.0)
    assert at_once.finish(1.0).tpot_s is None
    chat = Recorder(0.0)
    chat.feed(delta(role="assistant", content=""), 0.1)
    chat.feed(delta(content="7"), 0.3)
    chat.feed(delta() + DONE, 0.9)
    sample = chat.finish(1.0)
    assert (sample.text, sample.ttft_s, sample.itl_s, sample.error) == ("7", 0.3, [], None)


def test_a_stream_that_fails_says_why() -> None:
    recorder = Recorder(0.0)
    recorder.feed(piece("a"), 0.1)
    recorder.feed(event({"error": {"message": "decode-0 was lost", "type": "server_error"}}) + DONE + piece("b"), 0.2)
    sample = recorder.finish(0.3)
    assert (sample.error, sample.text) == ("decode-0 was lost", "a")
    recorder = Recorder(0.0)
    recorder.feed(piece("a") + b"data: {half", 0.1)
    assert recorder.finish(0.2).error == "the stream ended without [DONE]"
    assert Recorder(0.0).finish(0.2).ttft_s is None
    recorder = Recorder(0.0)
    recorder.feed(b"data: <html>\n", 0.1)
    assert "<html>" in str(recorder.finish(0.2).error)


def ask(handler: httpx.MockTransport, deadline_s: float = 5.0) -> Sample:
    async def run() -> Sample:
        async with httpx.AsyncClient(transport=handler) as client:
            return await measure(client, "http://server/v1/completions", {"prompt": [1]}, deadline_s=deadline_s)

    return asyncio.run(run())


def test_a_request_asks_for_a_stream_with_usage() -> None:
    def serve(request: httpx.Request) -> httpx.Response:
        sent = json.loads(request.content)
        asked = {"stream": True, "stream_options": {"include_usage": True}, "return_token_ids": True}
        assert sent == {"prompt": [1], **asked}
        headers = {"content-type": "text/event-stream", "x-pd-served-by": "prefill-1,decode-0"}
        return httpx.Response(200, headers=headers, content=piece("a") + DONE)

    sample = ask(httpx.MockTransport(serve))
    assert (sample.error, sample.status, sample.text) == (None, 200, "a")
    assert sample.served_by == ("prefill-1", "decode-0")


def test_refusals_and_silence_are_told() -> None:
    body = {"error": {"message": "prompt: no tokens", "type": "invalid_request_error"}}
    sample = ask(httpx.MockTransport(lambda request: httpx.Response(400, json=body)))
    assert (sample.error, sample.status) == ("HTTP 400: prompt: no tokens", 400)
    sample = ask(httpx.MockTransport(lambda request: httpx.Response(502, text="Bad Gateway")))
    assert sample.error == "HTTP 502: Bad Gateway"
    sample = ask(httpx.MockTransport(lambda request: httpx.Response(200, json={"choices": []})))
    assert "stream of events" in str(sample.error)

    async def hang(request: httpx.Request) -> httpx.Response:
        await asyncio.sleep(60)
        raise AssertionError

    def refuse(request: httpx.Request) -> httpx.Response:
        raise httpx.ConnectError("refused")

    assert ask(httpx.MockTransport(hang), deadline_s=0.02).error == "not finished within 0.02 s"
    assert "refused" in str(ask(httpx.MockTransport(refuse)).error)


# ---- the report


@pytest.mark.parametrize("count", [1, 2, 3, 10, 101])
def test_percentiles_are_numpys(count: int) -> None:
    rng = random.Random(count)
    values = [rng.expovariate(1.0) for _ in range(count)]
    for percent in (0, 25, 50, 90, 99, 100):
        assert percentile(values, percent) == pytest.approx(numpy.percentile(values, percent))


def test_spread_is_the_interquartile_range_by_the_median() -> None:
    assert spread([1, 2, 3, 4, 5]) == pytest.approx(2 / 3)
    assert spread([7, 7, 7]) == 0
    assert spread([1]) is spread([]) is spread([0, 0]) is None


def test_goals() -> None:
    rows: tuple[tuple[report.Better, float | None, float | None, bool | None], ...] = (
        ("lower", 1.0, None, None),
        ("lower", None, 2.0, False),
        ("lower", 2.0, 2.0, True),
        ("lower", 2.1, 2.0, False),
        ("higher", 2.0, 2.0, True),
        ("higher", 1.9, 2.0, False),
        ("lower", 0, 0, True),
    )
    for better, value, goal, met in rows:
        assert Result(name="x", value=value, unit="ms", better=better, goal=goal).met is met
    (nothing, *_) = percentiles("ttft", [], "ms")
    assert (nothing.name, nothing.value, nothing.samples, nothing.met) == ("ttft_p50", None, 0, None)


def test_the_file_has_the_documented_shape(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    results = [
        *percentiles("ttft", [1.23456789, 2.0, 4.0], "ms", percents=(50,)),
        Result(name="errors", value=1, unit="requests", better="lower", samples=3, goal=0),
        Result(name="kv_moved", value=None, unit="bytes", better="lower"),
    ]
    file = tmp_path / "out.json"
    made = Report("pd-cluster bench serve", results)
    made.write(str(file))
    written = json.loads(file.read_text())
    assert list(written) == ["command", "machine", "commit", "results"]
    assert " cores, " in written["machine"]
    fields = ["name", "value", "unit", "better", "samples", "spread", "goal", "met"]
    assert written["results"][1] == dict(
        zip(fields, ["errors", 1, "requests", "lower", 3, None, 0, False], strict=True)
    )
    assert [(r["value"], r["met"]) for r in written["results"]] == [(2.0, None), (1, False), (None, None)]
    made.show("title")
    lines = capsys.readouterr().out.splitlines()
    assert lines[0] == "title"
    assert lines[-2].split() == ["errors", "1", "requests", "-", "3", "≤", "0", "NO"]


def test_a_file_that_cannot_be_written_is_named_before_measuring(tmp_path: Path) -> None:
    check_writable("")
    check_writable(str(tmp_path / "new.json"))
    for bad in (tmp_path, tmp_path / "no" / "new.json"):
        with pytest.raises(ConfigError, match="--json"):
            check_writable(str(bad))


# ---- bench serve


def test_figures_leave_failed_requests_out_but_count_them() -> None:
    good = Sample(ttft_s=0.1, tpot_s=0.01, itl_s=[0.01], num_prompt_tokens=8, num_output_tokens=20)
    bad = Sample(ttft_s=9.0, error="decode-0 was lost")

    def values(*samples: Sample) -> dict[str, float | None]:
        return {r.name: r.value for r in _results(ServeBench(num_requests=3), Measured([*samples], 2.0, 4096, ""))}

    figures = values(good, good, bad)
    assert figures["ttft_p99"] == pytest.approx(100)
    assert [figures[name] for name in ("output_tokens", "requests", "kv_moved", "errors")] == [20, 1, 4096, 1]
    none = values(bad)
    assert none["output_tokens"] is none["ttft_p50"] is None


def test_prompts_are_seeded_valid_and_all_different() -> None:
    bench = ServeBench(input_len=64, output_len=7)
    bodies = make_bodies(bench, "tiny", 8)
    assert bodies == make_bodies(bench, "tiny", 8)
    prompts = [body["prompt"] for body in bodies]
    assert all(len(p) == 64 and min(p) >= 0 and max(p) < 256 for p in prompts)
    assert len({tuple(p) for p in prompts}) == 8
    assert bodies[0]["max_tokens"] == 7
    assert bodies[0]["ignore_eos"] is True


def test_a_shape_that_does_not_fit_names_the_flags() -> None:
    bench = ServeBench(input_len=100, output_len=28)
    check_shape(bench, 128)
    check_shape(bench, None)
    with pytest.raises(ConfigError, match=r"--input-len 100 --output-len 28: together 128 tokens.* 127 tokens"):
        check_shape(bench, 127)


# ---- /instances


def test_traffic_is_summed_over_instances() -> None:
    entries = [
        {"kv_sent_nbytes": 3, "kv_received_nbytes": 0, "epoch": "a"},
        {"kv_sent_nbytes": 0, "kv_received_nbytes": 2, "epoch": "b"},
    ]
    assert Traffic.of(entries) == Traffic(3, 2, frozenset("ab"))


def test_nobody_at_the_admin_address_is_one_line_with_the_way_out() -> None:
    with pytest.raises(Exception, match=r"http://127.0.0.1:1/instances.*--admin") as raised:
        asyncio.run(fetch_instances("http://127.0.0.1:1/"))
    assert "\n" not in str(raised.value)


def test_requests_carry_the_servers_key(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("OPENAI_API_KEY", "VLLM_API_KEY"):
        monkeypatch.delenv(name, raising=False)
    assert "authorization" not in make_client().headers
    for name, value in (("OPENAI_API_KEY", "a"), ("VLLM_API_KEY", "b")):
        monkeypatch.setenv(name, value)
        assert make_client().headers["authorization"] == f"Bearer {value}"
