"""The endpoint picker: its messages against Envoy's definitions, its choice, its answers, and its server over gRPC.

test_scheduler_watch.py tests how it observes schedulers.
"""

from __future__ import annotations

import asyncio
import json
import os
import signal
from collections import Counter
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import pytest
from google.protobuf.descriptor import FieldDescriptor
from typer.testing import CliRunner

from pd_cluster.cluster.processes.port_reservations import free_ports
from pd_cluster.commands.cli import app
from pd_cluster.extras.gateway import messages_pb2, picker_server
from pd_cluster.extras.gateway.envoy_names import FULL_DUPLEX_STREAMED, OVERWRITE_OR_ADD
from pd_cluster.extras.gateway.messages_pb2 import HealthCheckRequest, ProcessingRequest, ProcessingResponse
from pd_cluster.extras.gateway.picker_certificate import Certificate
from pd_cluster.extras.gateway.picker_exchange import DESTINATION, NAMESPACE, SUBSET, SUBSET_NAMESPACE, Exchange
from pd_cluster.extras.gateway.picker_server import ListenAddress, Picker
from pd_cluster.extras.gateway.scheduler_choice import AllFull, NoneReady, SchedulerChoice
from pd_cluster.extras.gateway.scheduler_watch import SchedulerWatch
from tests.support.certificates import make_certificate
from tests.support.says_load import serve_load

ROOT = Path(__file__).resolve().parents[2]
RECORDED = json.loads((ROOT / "tests" / "data" / "envoy_messages.json").read_text(encoding="utf-8"))
A, B, C = "10.0.0.1:9000", "10.0.0.2:9000", "[fd00::3]:9000"
MESSAGES = messages_pb2.DESCRIPTOR.message_types_by_name
KINDS = {getattr(FieldDescriptor, f"TYPE_{kind.upper()}"): kind for kind in ("bool", "bytes", "int32", "string")}

# ---- messages


@pytest.mark.parametrize("name", [name for name in MESSAGES if not name.startswith("HealthCheck")])
def test_fields_are_envoys(name: str) -> None:
    theirs = {number: rest for number, *rest in RECORDED["messages"][name]["fields"]}
    for field in MESSAGES[name].fields:
        other, kind, is_repeated, one_of = theirs[field.number]
        choice = field.containing_oneof.name if field.containing_oneof else ""
        assert (field.name, field.is_repeated, choice) == (other, is_repeated, one_of)
        own = field.message_type.name if field.message_type else KINDS[field.type]
        assert own == kind.rpartition(".")[2]


def test_numbers_of_enums_are_envoys() -> None:
    names = {"FULL_DUPLEX_STREAMED": FULL_DUPLEX_STREAMED, "OVERWRITE_IF_EXISTS_OR_ADD": OVERWRITE_OR_ADD}
    assert RECORDED["enums"] == names


# ---- the choice


def report(choice: SchedulerChoice, loads: dict[str, int | None]) -> None:
    """Reports the load of all schedulers; None: the scheduler takes no requests."""
    choice.set_addresses(loads)
    for address, load in loads.items():
        choice.report(address, is_ready=load is not None, load=load)


def reported(**more: Any) -> SchedulerChoice:
    choice = SchedulerChoice(**more)
    report(choice, {A: 3, B: 1, C: None})
    return choice


def test_the_one_with_the_fewest_requests_is_chosen_and_counts_what_was_sent_since() -> None:
    choice = reported()
    assert [choice.choose()[0] for _ in range(6)] == [B, B, A, B, A, B]
    report(choice, {A: 0, B: 0})
    assert [choice.choose()[0] for _ in range(4)] == [A, B, A, B], "equally loaded schedulers must take turns"
    assert reported(num_fallbacks=1).choose() == [B, A]


def test_those_that_take_no_requests_are_not_chosen() -> None:
    choice = reported()
    assert {choice.choose()[0] for _ in range(9)} == {A, B}
    report(choice, {A: None, C: None})
    assert not choice.is_ready
    with pytest.raises(NoneReady):
        choice.choose()
    report(choice, {C: 7})
    assert choice.choose() == [C]


def test_where_all_are_full_none_is_chosen() -> None:
    choice = reported(most=3)
    assert [choice.choose()[0] for _ in range(2)] == [B, B]
    with pytest.raises(AllFull):
        choice.choose()
    report(choice, {A: 2})
    assert choice.choose() == [A]


def test_a_load_has_the_requests_that_were_sent_before_it_was_asked_for() -> None:
    choice = SchedulerChoice(most=3)
    report(choice, {A: 0})
    choice.choose()
    num_seen = choice.num_sent(A)
    choice.choose()  # while the report is in transit
    choice.report(A, is_ready=True, load=1, num_seen=num_seen)
    choice.choose()
    with pytest.raises(AllFull):
        choice.choose()


def test_a_load_that_is_not_known_is_the_mean_of_the_others() -> None:
    choice = SchedulerChoice()
    report(choice, {A: 9, B: 3, C: 0})
    choice.report(C, is_ready=True, num_seen=0)  # another scheduler at the address, with 6 requests of others
    assert [choice.choose()[0] for _ in range(6)] == [B, B, B, C, B, C]
    choice.report(A, is_ready=True)
    choice.report(B, is_ready=True)
    choice.report(C, is_ready=True)
    assert Counter(choice.choose()[0] for _ in range(6)) == {A: 2, B: 2, C: 2}, "without reports they must take turns"


def test_a_load_that_is_not_known_refuses_nothing() -> None:
    choice = SchedulerChoice(most=2)
    report(choice, {A: 9, B: 0})
    choice.report(B, is_ready=True)
    assert [choice.choose() for _ in range(5)] == [[B]] * 5, "a scheduler without a report may be idle"
    choice.set_addresses([B])
    assert [choice.choose() for _ in range(5)] == [[B]] * 5
    choice.report(B, is_ready=True, load=2)
    with pytest.raises(AllFull):
        choice.choose()


# ---- the answers


def headers(**more: Any) -> Any:
    request = ProcessingRequest()
    request.request_headers.headers.headers.add(key=DESTINATION, raw_value=b"192.0.2.66:1")
    request.protocol_config.SetInParent()
    for name, value in more.items():
        setattr(request.protocol_config, name, value)
    return request


def answered(exchange: Exchange, request: Any) -> Any:
    """Encodes the request, and returns the decoded answer to it."""
    answer = exchange.answer(ProcessingRequest.FromString(request.SerializeToString()))
    return None if answer is None else ProcessingResponse.FromString(answer.SerializeToString())


def picked(answer: Any) -> str:
    """Returns the chosen endpoint; asserts that header and metadata agree."""
    (option,) = answer.request_headers.response.header_mutation.set_headers
    assert option.header.key == DESTINATION
    assert option.append_action == OVERWRITE_OR_ADD, "a client's own header must be replaced"
    found = str(answer.dynamic_metadata[NAMESPACE][DESTINATION])
    assert option.header.raw_value.decode() == found
    return found


@pytest.mark.parametrize(
    ("written", "chosen"),
    [([A], A), (f"{A}, {C}", A), ([A, "10.9.9.9:9000", A], A), ([], ""), ([C], ""), ({"a": 1}, "")],
)
def test_the_subset_of_the_gateway_is_kept(written: Any, chosen: str) -> None:
    request = headers()
    request.metadata_context.filter_metadata[SUBSET_NAMESPACE].update({SUBSET: written})
    answer = answered(Exchange(reported()), request)
    assert picked(answer) == chosen if chosen else answer.immediate_response.status.code == 503


@pytest.mark.parametrize(("most", "loads", "status"), [(0, {A: None}, 503), (0, {}, 503), (1, {A: 1, B: 4}, 429)])
def test_a_refusal_is_an_answer_in_openais_shape(most: int, loads: dict[str, int | None], status: int) -> None:
    choice = SchedulerChoice(most)
    report(choice, loads)
    exchange = Exchange(choice)
    found = answered(exchange, headers()).immediate_response
    assert found.status.code == status == exchange.status
    assert exchange.is_over
    assert json.loads(found.body)["error"]["message"]
    sent = {each.header.key: each.header.raw_value for each in found.headers.set_headers}
    assert sent == {"content-type": b"application/json", "retry-after": b"1"}


def part(kind: str, body: bytes, is_last: bool = False) -> Any:
    request = ProcessingRequest()
    getattr(request, kind).body, getattr(request, kind).end_of_stream = body, is_last
    return request


@pytest.mark.parametrize("kind", ["request_body", "response_body"])
def test_bodies_go_on_unchanged(kind: str) -> None:
    duplex, plain = Exchange(reported()), Exchange(reported())
    modes = {f"{kind}_mode": FULL_DUPLEX_STREAMED}
    answer = answered(duplex, headers(**modes))
    assert picked(answer) == B
    assert answer.request_headers.response.clear_route_cache
    assert picked(answered(plain, headers(**{f"{kind}_mode": 2}))) == B
    for body, is_last in ((b"\x00\xff" * 9, False), (b"", False), (b"end", True)):
        request = part(kind, body, is_last)
        mutation = getattr(answered(duplex, request), kind).response.body_mutation
        assert mutation.HasField("streamed_response")
        assert (mutation.streamed_response.body, mutation.streamed_response.end_of_stream) == (body, is_last)
        answer = answered(plain, request)
        assert answer.WhichOneof("response") == kind
        assert not getattr(answer, kind).response.HasField("body_mutation")


def test_other_messages_are_let_through_or_want_no_answer() -> None:
    exchange, watching = Exchange(reported()), headers()
    for kind in ("response_headers", "request_trailers", "response_trailers"):
        request = ProcessingRequest()
        getattr(request, kind).SetInParent()
        answer = answered(exchange, request)
        assert answer.WhichOneof("response") == kind
        assert answer.ByteSize() <= 4
    watching.observability_mode = True
    assert answered(exchange, ProcessingRequest()) is answered(exchange, watching) is None


# ---- the server


@asynccontextmanager
async def served(choice: SchedulerChoice) -> AsyncIterator[tuple[Picker, Any]]:
    picker = Picker(choice)
    made = grpc.aio.server(handlers=picker.handlers)
    port = made.add_insecure_port("127.0.0.1:0")
    await made.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield picker, channel
    await made.stop(None)


async def test_a_stream_over_grpc() -> None:
    choice = reported()
    sent = [headers(request_body_mode=FULL_DUPLEX_STREAMED), part("request_body", b"{}", True)]
    async with served(choice) as (_, channel):
        for kinds in (["request_headers", "request_body"], ["immediate_response"]):  # the last one ends the exchange
            found = [each async for each in asking(channel)(iter(sent), timeout=10)]
            assert [each.WhichOneof("response") for each in found] == kinds
            choice.set_addresses([])


async def test_health_is_readiness() -> None:
    choice = SchedulerChoice()
    async with served(choice) as (picker, channel):
        ask = checking(channel)

        async def status(service: str) -> int:
            found = await ask(HealthCheckRequest(service=service), timeout=10)
            return int(found.status)

        names = ("", "readiness", "liveness", "envoy.service.ext_proc.v3.ExternalProcessor")
        assert [await status(name) for name in names] == [2, 2, 1, 2]
        report(choice, {A: 0})
        assert [await status(name) for name in names] == [1, 1, 1, 1]
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await status("other")
        assert caught.value.code() is grpc.StatusCode.NOT_FOUND
        picker.is_ending = True
        assert [await status(name) for name in names] == [2, 2, 1, 2]


def asking(channel: Any) -> Any:
    return channel.stream_stream(
        "/envoy.service.ext_proc.v3.ExternalProcessor/Process",
        request_serializer=ProcessingRequest.SerializeToString,
        response_deserializer=ProcessingResponse.FromString,
    )


def checking(channel: Any, method: str = "Check") -> Any:
    make = channel.unary_unary if method == "Check" else channel.unary_stream
    return make(
        f"/grpc.health.v1.Health/{method}",
        request_serializer=HealthCheckRequest.SerializeToString,
        response_deserializer=messages_pb2.HealthCheckResponse.FromString,
    )


async def test_streams_are_limited_and_health_is_not(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(picker_server, "MOST_STREAMS", 2)
    monkeypatch.setattr(picker_server, "MOST_WATCHES", 1)
    async with served(reported()) as (_, channel):
        watching = checking(channel, "Watch")(HealthCheckRequest(), timeout=10)
        assert (await watching.read()).status == 1
        streams = [asking(channel)(timeout=10) for _ in range(2)]
        for each in streams:
            await each.write(headers())
            await each.read()
        for refused in (
            asking(channel)(iter([headers()]), timeout=10),
            checking(channel, "Watch")(HealthCheckRequest()),
        ):
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await anext(aiter(refused))
            assert caught.value.code() is grpc.StatusCode.RESOURCE_EXHAUSTED
        assert (await checking(channel)(HealthCheckRequest(service="liveness"), timeout=10)).status == 1
        await streams[0].done_writing()
        assert await streams[0].read() == grpc.aio.EOF
        found = [each async for each in asking(channel)(iter([headers()]), timeout=10)]
        assert len(found) == 1, "its place must be free again"


@asynccontextmanager
async def running(certificate: Certificate | None = None) -> AsyncIterator[tuple[int, asyncio.Task[None]]]:
    """Runs a picker as its command does, with an idle scheduler; yields its port once it knows that scheduler."""
    port, scheduler_port = free_ports(2)
    choice = SchedulerChoice()
    watch = SchedulerWatch(choice, [("127.0.0.1", scheduler_port)], 0.05, 5.0)
    scheduler = await asyncio.start_server(partial(serve_load, load=int), "127.0.0.1", scheduler_port)
    async with asyncio.timeout(60):
        task = asyncio.create_task(
            picker_server.serve(watch, choice, ListenAddress("127.0.0.1", port, certificate), 30.0)
        )
        while not choice.is_ready:
            assert not task.done()
            await asyncio.sleep(0.01)
        yield port, task
        await task
    scheduler.close()


def test_only_streams_of_requests_are_waited_for_at_sigterm_and_a_second_one_ends_them() -> None:
    async def go(has_stream: bool) -> None:
        async with running() as (port, task), grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
            watching = checking(channel, "Watch")(HealthCheckRequest())
            assert (await watching.read()).status == 1
            if has_stream:
                stream = asking(channel)()
                await stream.write(headers(request_body_mode=FULL_DUPLEX_STREAMED))
                await stream.read()
            os.kill(os.getpid(), signal.SIGTERM)
            assert (await watching.read()).status == 2
            assert await watching.read() == grpc.aio.EOF
            if has_stream:
                await stream.write(part("request_body", b"x"))
                assert (await stream.read()).WhichOneof("response") == "request_body", "the picker must continue"
                assert not task.done()
                os.kill(os.getpid(), signal.SIGTERM)
            await task

    for has_stream in (False, True):
        asyncio.run(go(has_stream))


async def test_what_ends_the_looks_ends_the_picker_at_once() -> None:
    class Broken(SchedulerWatch):
        async def run(self) -> None:
            await begun.wait()
            raise LookupError

    begun, choice, (port,) = asyncio.Event(), reported(), free_ports(1)
    watch = Broken(choice, [], 0.5, 5.0)
    task = asyncio.create_task(picker_server.serve(watch, choice, ListenAddress("127.0.0.1", port), 30.0))
    async with asyncio.timeout(10), grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        stream = asking(channel)(wait_for_ready=True)
        await stream.write(headers(request_body_mode=FULL_DUPLEX_STREAMED))
        await stream.read()
        begun.set()
        with pytest.raises(LookupError):
            await task


async def test_a_renewed_certificate_is_shown_to_new_connections(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    first, second = (make_certificate(tmp_path, name) for name in ("first", "second"))
    old, new = (each.certfile.read_bytes() for each in (first, second))
    made = Certificate(str(first.certfile), str(first.keyfile))
    async with running(made) as (port, _):

        async def answers(trusted: bytes) -> None:
            credentials = grpc.ssl_channel_credentials(trusted)
            options = [("grpc.use_local_subchannel_pool", 1)]
            async with grpc.aio.secure_channel(f"localhost:{port}", credentials, options) as channel:
                await checking(channel)(HealthCheckRequest(service="liveness"), timeout=10)

        await answers(old)
        first.keyfile.write_text("half written")
        await answers(old)
        first.becomes(second)
        await answers(new)
        with pytest.raises(grpc.aio.AioRpcError) as caught:
            await answers(old)
        assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
        os.kill(os.getpid(), signal.SIGTERM)
    assert "TLS continues with the earlier files" in caplog.text


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--schedulers", "[fe80::1%eth9]:9000"], "gateways cannot use a scoped address"),
        (["--schedulers", "https://a:9000"], "--schedulers 'https://a:9000': expected HOST:PORT"),
        (["--schedulers", "a:9000,"], "--schedulers '': expected HOST:PORT"),
        (["--schedulers", "a:1", "--ssl-certfile", "x"], "--ssl-certfile and --ssl-keyfile"),
        (
            ["--schedulers", "a:1", "--metrics-key", "clé"],
            "--metrics-key: keys may contain only printable ASCII characters",
        ),
        (
            ["--schedulers", "a:1", f"--ssl-certfile={__file__}", f"--ssl-keyfile={__file__}"],
            f"{__file__}: not a PEM file of",
        ),
    ],
)
def test_wrong_flags_are_named(flags: list[str], told: str) -> None:
    result = CliRunner().invoke(app, ["endpoint-picker", *flags])
    assert told in str(result.exception)
