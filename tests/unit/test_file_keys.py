"""API keys from a file at the public port: models, expiry, tenants and replacement."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from pathlib import Path

import pytest

from pd_cluster import wire
from pd_cluster.extras.key_file.key_file import KeyFile, digest_of, write_key_file
from tests.support.keyed_port import COMPLETION, SALT, Port, key_of

Make = Callable[..., Port]


@pytest.fixture
def make(tmp_path: Path) -> Make:
    return lambda *keys, **more: Port(tmp_path, keys, **more)


async def test_a_key_sees_its_own_models_alone(make: Make) -> None:
    port = make(key_of("k", models=("org/tiny", "elsewhere")), key_of("all"))
    listed = (await port.ask("k", "GET", "/v1/models")).json()["data"]
    assert [each["id"] for each in listed] == ["org/tiny"]
    assert len((await port.ask("all", "GET", "/v1/models")).json()["data"]) == 2
    messages = [{"role": "user", "content": "a"}]
    for model in ("tiny", "nothing", "elsewhere", "/models/tiny"):
        bodies = []
        for method, path, fields in (
            ("GET", f"/v1/models/{model}", {}),
            ("POST", "/v1/completions", {**COMPLETION, "model": model}),
            ("POST", "/v1/chat/completions", {"messages": messages, "model": model}),
            ("POST", "/tokenize", {"prompt": "a", "model": model}),
            ("POST", "/tokenize", {"messages": messages, "model": model}),
            ("POST", "/detokenize", {"tokens": [1], "model": model}),
        ):
            answer = await port.ask("k", method, path, **fields)
            assert answer.status == 404, (model, path)
            bodies.append(answer.json()["error"])
        said = f"the model '{model}' does not exist; this server has org/tiny"
        assert {(body["message"], body["code"]) for body in bodies} == {(said, "model_not_found")}
    assert (await port.ask("k", "POST", "/tokenize", prompt="a")).status == 200, "it must get its own tenant"
    assert (await port.ask("k", "GET", "/v1/models/org/tiny")).status == 200


async def test_a_key_that_is_over_opens_nothing(make: Make) -> None:
    port = make(key_of("k", expires_s=1_000_100.0))
    assert (await port.ask("k", "GET", "/v1/models")).status == 200
    port.now_s += 100
    answer = await port.ask("k", "POST", "/tokenize", prompt="a")
    assert (answer.status, answer.num_received, answer.headers["www-authenticate"]) == (401, 0, "Bearer")
    assert answer.json()["error"]["message"] == "the API key 'k' has expired"
    for key in ("", "K", "k ", "kk", SALT, digest_of(SALT, b"k")):
        assert (await port.ask(key, "GET", "/v1/models")).status == 401, key


async def test_new_keys_do_not_disturb_what_runs(make: Make) -> None:
    port = make(key_of("k", tokens_per_minute=60), key_of("stays", tokens_per_minute=60))
    asking = [asyncio.ensure_future(port.ask(key, "POST", "/v1/completions", **COMPLETION)) for key in ("k", "stays")]
    await port.submitted(2)
    port.change(key_of("new", tokens_per_minute=60), key_of("stays", tokens_per_minute=30))
    assert (await port.ask("k", "GET", "/v1/models")).status == 401
    assert (port.left("new"), port.left("stays")) == ((0, 60), (0, 30)), "tokens beyond the limit must be lost"
    for request_id in dict.fromkeys(body.request_id for _, body in port.world.mailbox.of(wire.Submit)):
        port.answer(request_id, 2)
    assert [(await each).status for each in asking] == [200, 200]
    assert (port.left("new"), port.left("stays")) == ((0, 60), (0, 30))


async def test_a_key_that_went_while_its_body_came_gets_no_further(make: Make) -> None:
    """Covers another process reading the changed keys before this one does."""
    port = make(key_of("k", tokens_per_minute=60))
    write_key_file(port.file, KeyFile(SALT, ()))
    port.store.reload()
    answer = await port.ask("k", "POST", "/v1/completions", **COMPLETION)
    assert (answer.status, answer.num_received, port.world.mailbox.sent) == (401, 0, [])


async def test_tenants_of_both_kinds_share_caches_by_name(make: Make) -> None:
    port = make(key_of("old"), key_of("new"), key_of("b", tenant="b"), api_keys=("flag",), tenants=("team",))
    salts = []
    for at, key in enumerate(("old", "new", "flag", "b")):
        asking = asyncio.ensure_future(port.ask(key, "POST", "/v1/completions", **COMPLETION))
        request_id = await port.submitted(2 * at)
        salts.append(port.world.mailbox.of(wire.Submit)[-1][1].order.cache_salt)
        port.answer(request_id, 1)
        assert (await asking).status == 200
    assert len({*salts[:3]}) == 1
    assert salts[3] not in salts[:3]
    assert port.counted("finished") == {"team": 3, "b": 1}


async def test_metrics_have_no_key_in_them(make: Make) -> None:
    port = make(key_of("sk-secret"), metrics_key="mk")
    await port.ask("sk-secret", "POST", "/tokenize", prompt="a")
    metrics = (await port.ask("mk", "GET", "/metrics")).body
    assert b'outcome="finished",tenant="team"} 1.0' in metrics
    assert b"secret" not in metrics
    assert (await port.ask("sk-secret", "GET", "/metrics")).status == 401
