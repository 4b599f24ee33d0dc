"""The endpoint picker: its messages beside Envoy's own, its choice, its answers, and its server by a gRPC client."""

from __future__ import annotations

import asyncio
import json
from collections import Counter
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from functools import partial
from pathlib import Path
from typing import Any

import grpc
import grpc.aio
import httpx
import pytest
from typer.testing import CliRunner

from pd_cluster.cluster.processes.ports import free_ports
from pd_cluster.commands.cli import app
from pd_cluster.gateway.choice import AllFull, Choice, NoneReady
from pd_cluster.gateway.exchange import DESTINATION, NAMESPACE, SUBSET, SUBSET_NAMESPACE, Exchange
from pd_cluster.gateway.messages import (
    CLASSES,
    FULL_DUPLEX_STREAMED,
    MESSAGES,
    OVERWRITE_OR_ADD,
    HealthCheckRequest,
    HealthCheckResponse,
    ProcessingRequest,
    ProcessingResponse,
)
from pd_cluster.gateway.server import Picker
from pd_cluster.gateway.watch import SchedulerWatch

ROOT = Path(__file__).resolve().parents[2]
RECORDED = json.loads((ROOT / "tests" / "data" / "envoy_messages.json").read_text(encoding="utf-8"))
A, B, C = "10.0.0.1:9000", "10.0.0.2:9000", "[fd00::3]:9000"
# ---- messages


@pytest.mark.parametrize("name", [name for name in MESSAGES if not name.startswith("HealthCheck")])
def test_fields_are_envoys(name: str) -> None:
    theirs = {number: rest for number, *rest in RECORDED["messages"][name]["fields"]}
    for field in MESSAGES[name]:
        other, kind, is_repeated, one_of = theirs[field.number]
        assert (field.name, field.many, field.one_of) == (other, is_repeated, one_of)
        ours = field.kind.removeprefix(".").replace("MetadataEntry", "FilterMetadataEntry")
        assert ours == (kind if field.kind.startswith(".") else kind.rpartition(".")[2])


def test_numbers_of_enums_are_envoys() -> None:
    assert RECORDED["enums"] == {
        "FULL_DUPLEX_STREAMED": FULL_DUPLEX_STREAMED,
        "OVERWRITE_IF_EXISTS_OR_ADD": OVERWRITE_OR_ADD,
    }


# ---- the choice


def reported(**more: Any) -> Choice:
    choice = Choice(**more)
    choice.report({A: 3, B: 1, C: None})
    return choice


def test_the_one_with_the_fewest_requests_is_chosen_and_counts_what_was_sent_since() -> None:
    choice = reported()
    assert [choice.choose()[0] for _ in range(6)] == [B, B, A, B, A, B]
    choice.report({A: 0, B: 0})
    assert [choice.choose()[0] for _ in range(4)] == [A, B, A, B], "equals take turns"


def test_those_that_take_no_requests_are_not_chosen() -> None:
    choice = reported()
    assert Counter(choice.choose()[0] for _ in range(50)).keys() == {A, B}
    choice.report({A: None, C: None})
    assert not choice.is_ready
    with pytest.raises(NoneReady):
        choice.choose()
    choice.report({C: 7})
    assert choice.choose() == [C]


def test_only_those_that_the_gateway_allows() -> None:
    choice = reported()
    assert choice.choose([A, "10.9.9.9:9000", A]) == [A]
    for among in ([], [C], ["10.9.9.9:9000"]):
        with pytest.raises(NoneReady):
            choice.choose(among)


def test_where_all_are_full_none_is_chosen() -> None:
    choice = reported(most=3)
    assert [choice.choose()[0] for _ in range(2)] == [B, B]
    with pytest.raises(AllFull):
        choice.choose()
    choice.report({A: 2})
    assert choice.choose() == [A]


def test_fallbacks_follow_in_order() -> None:
    choice = Choice(num_fallbacks=1)
    choice.report({A: 3, B: 1, C: 2})
    assert choice.choose() == [B, C]


# ---- the answers


def headers(**more: Any) -> Any:
    request = ProcessingRequest()
    request.request_headers.headers.headers.add(key=DESTINATION, raw_value=b"192.0.2.66:1")
    request.protocol_config.SetInParent()
    for name, value in more.items():
        setattr(request.protocol_config, name, value)
    return request


def answered(exchange: Exchange, request: Any) -> Any:
    """Returns what is read of the answer to what is written."""
    answer = exchange.answer(ProcessingRequest.FromString(request.SerializeToString()))
    return None if answer is None else ProcessingResponse.FromString(answer.SerializeToString())


def picked(answer: Any) -> str:
    """Returns the endpoint, which header and metadata have alike."""
    (option,) = answer.request_headers.response.header_mutation.set_headers
    assert option.header.key == DESTINATION
    assert option.append_action == OVERWRITE_OR_ADD, "a client's own is replaced"
    found = str(answer.dynamic_metadata[NAMESPACE][DESTINATION])
    assert option.header.raw_value.decode() == found
    return found


def test_the_headers_are_answered_with_the_endpoint() -> None:
    answer = answered(Exchange(reported()), headers())
    assert picked(answer) == B
    assert answer.request_headers.response.clear_route_cache


@pytest.mark.parametrize("written", [[A], f"{A}, {C}"])
def test_the_subset_of_the_gateway_is_kept(written: Any) -> None:
    request = headers()
    request.metadata_context.filter_metadata.add(key=SUBSET_NAMESPACE).value.update({SUBSET: written})
    assert picked(answered(Exchange(reported()), request)) == A


@pytest.mark.parametrize("written", [[], [C], "", {"a": 1}, 7])
def test_a_subset_of_none_that_is_ready_is_503(written: Any) -> None:
    request = headers()
    request.metadata_context.filter_metadata.add(key=SUBSET_NAMESPACE).value.update({SUBSET: written})
    assert answered(Exchange(reported()), request).immediate_response.status.code == 503


@pytest.mark.parametrize(("most", "loads", "status"), [(0, {A: None}, 503), (0, {}, 503), (1, {A: 1, B: 4}, 429)])
def test_a_refusal_is_an_answer_in_openais_shape(most: int, loads: dict[str, int | None], status: int) -> None:
    choice = Choice(most)
    choice.report(loads)
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
    assert picked(answered(duplex, headers(**modes))) == B
    assert picked(answered(plain, headers(**{f"{kind}_mode": 2}))) == B
    for body, is_last in ((b"\x00\xff" * 9, False), (b"", False), (b"end", True)):
        request = part(kind, body, is_last)
        mutation = getattr(answered(duplex, request), kind).response.body_mutation
        assert mutation.HasField("streamed_response")
        assert (mutation.streamed_response.body, mutation.streamed_response.end_of_stream) == (body, is_last)
        answer = answered(plain, request)
        assert answer.WhichOneof("response") == kind
        assert not getattr(answer, kind).response.HasField("body_mutation")


@pytest.mark.parametrize("kind", ["response_headers", "request_trailers", "response_trailers"])
def test_other_messages_are_let_through(kind: str) -> None:
    exchange = Exchange(reported())
    request = ProcessingRequest()
    getattr(request, kind).SetInParent()
    answer = answered(exchange, request)
    assert answer.WhichOneof("response") == kind
    assert answer.ByteSize() <= 4


def test_what_wants_no_answer_gets_none() -> None:
    exchange = Exchange(reported())
    assert answered(exchange, ProcessingRequest()) is None
    watching = headers()
    watching.observability_mode = True
    assert answered(exchange, watching) is None


# ---- the server

Ask = Callable[..., Any]


@asynccontextmanager
async def served(choice: Choice) -> AsyncIterator[tuple[Picker, Any]]:
    picker = Picker(choice)
    server = grpc.aio.server(handlers=picker.handlers)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    async with grpc.aio.insecure_channel(f"127.0.0.1:{port}") as channel:
        yield picker, channel
    await server.stop(None)


def test_a_stream_over_grpc() -> None:
    async def go() -> None:
        choice = reported()
        async with served(choice) as (_, channel):
            ask = channel.stream_stream(
                "/envoy.service.ext_proc.v3.ExternalProcessor/Process",
                request_serializer=ProcessingRequest.SerializeToString,
                response_deserializer=ProcessingResponse.FromString,
            )
            sent = [headers(request_body_mode=FULL_DUPLEX_STREAMED), part("request_body", b"{}", True)]
            found = [each async for each in ask(iter(sent), timeout=10)]
            assert [each.WhichOneof("response") for each in found] == ["request_headers", "request_body"]
            choice.report({})
            found = [each async for each in ask(iter(sent), timeout=10)]
            assert [each.WhichOneof("response") for each in found] == ["immediate_response"], "and it is over"

    asyncio.run(go())


def test_health_is_readiness() -> None:
    async def go() -> None:
        choice = Choice()
        async with served(choice) as (picker, channel):
            ask = channel.unary_unary(
                "/grpc.health.v1.Health/Check",
                request_serializer=HealthCheckRequest.SerializeToString,
                response_deserializer=HealthCheckResponse.FromString,
            )

            async def status(service: str) -> int:
                found = await ask(HealthCheckRequest(service=service), timeout=10)
                return int(found.status)

            names = ("", "readiness", "liveness", "envoy.service.ext_proc.v3.ExternalProcessor")
            assert [await status(name) for name in names] == [2, 2, 1, 2]
            choice.report({A: 0})
            assert [await status(name) for name in names] == [1, 1, 1, 1]
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await status("other")
            assert caught.value.code() is grpc.StatusCode.NOT_FOUND
            picker.is_ending = True
            assert [await status(name) for name in names] == [2, 2, 1, 2]

    asyncio.run(go())


# ---- the looks


WELL = (200, "{}")


def looks(answers: dict[str, dict[str, tuple[int, str]]], key: str = "") -> dict[str, int | None]:
    """Returns what a look at these hosts reports, by host; each serves (status, content) at a path."""
    seen: dict[str, int | None] = {}

    class Seen(Choice):
        def report(self, loads: Any) -> None:
            seen.update({address.partition(":")[0]: load for address, load in loads.items()})

    async def serve(host: str, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        while head := await reader.readuntil(b"\r\n\r\n"):
            status, content = answers[host][head.split()[1].decode()]
            if key and f"Authorization: Bearer {key}".encode() not in head:
                status = 401
            writer.write(f"HTTP/1.1 {status} X\r\nContent-Length: {len(content)}\r\n\r\n{content}".encode())

    async def go() -> None:
        (port,) = free_ports(1)
        served = [host for host, paths in answers.items() if paths]
        servers = [await asyncio.start_server(partial(serve, host), host, port) for host in served]
        watch = SchedulerWatch(Seen(), [(host, port) for host in answers], 0.5, 5.0, key)
        async with httpx.AsyncClient(trust_env=False) as client:
            await watch.look(client)
        for each in servers:
            each.close()

    asyncio.run(go())
    return seen


def test_a_look_tells_who_takes_requests_and_how_many_each_has() -> None:
    answers = {
        "127.0.0.1": {"/health": WELL, "/load": (200, '{"server_load":5}')},
        "127.0.0.2": {"/health": (503, "{}"), "/load": (200, '{"server_load":0}')},
        "127.0.0.3": {},
        "127.0.0.4": {"/health": WELL, "/load": (200, "<html>")},
        "127.0.0.5": {"/health": WELL, "/load": (401, "{}")},
        "127.0.0.6": {"/health": (200, "x" * (2 << 20))},
    }
    loads = {"127.0.0.1": 5, "127.0.0.5": 0}
    assert looks(answers) == {host: loads.get(host) for host in answers}
    assert looks({"127.0.0.1": answers["127.0.0.1"]}, "k") == {"127.0.0.1": 5}


@pytest.mark.parametrize(
    ("flags", "told"),
    [
        (["--schedulers", "a"], "--schedulers 'a': expected HOST:PORT"),
        (["--schedulers", "https://a:9000"], "--schedulers 'https://a:9000': expected HOST:PORT"),
        (["--schedulers", "a:9000,"], "--schedulers '': expected HOST:PORT"),
        (["--schedulers", "a:1", "--ssl-certfile", "x"], "--ssl-certfile and --ssl-keyfile"),
        (["--schedulers", "a:1", "--ssl-certfile", "/x", "--ssl-keyfile", "/y"], "--ssl-keyfile /y: No such file"),
        (["--schedulers", "a:1", "--log-format", "xml"], "--log-format 'xml'"),
    ],
)
def test_wrong_flags_are_named(flags: list[str], told: str) -> None:
    result = CliRunner().invoke(app, ["endpoint-picker", *flags])
    assert told in str(result.exception)


def test_every_message_has_a_class() -> None:
    assert CLASSES.keys() == MESSAGES.keys()
    assert ProcessingResponse().SerializeToString() == b""
