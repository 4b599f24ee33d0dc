"""Handles for KV cache are bound to prompt, model, key and time; altered ones are refused."""

from __future__ import annotations

import base64
from typing import Any

import msgspec
import pytest

from pd_cluster.errors import RequestError
from pd_cluster.service.generation.kv_handles import TTL_S, KVHandles
from pd_cluster.types import RequestSpec, Sampling

ASKED = {"do_remote_decode": True}


class World:
    def __init__(self, secret: bytes = b"s" * 32, model: str = "m") -> None:
        self.now_s = 1000.0
        self.handles = KVHandles(secret, model, lambda: self.now_s)

    def plan(self, asked: Any, owner: str = "a", streams: bool = False, num: int = 1, **order: Any) -> Any:
        one = RequestSpec(**{"prompt_token_ids": [1, 2, 3], "sampling": Sampling(), **order})
        return self.handles.plan(asked, owner, [one] * num, streams)


def test_both_requests_are_of_one_session_in_every_process() -> None:
    first, second = World(), World()
    made = first.plan(ASKED)
    handle = msgspec.to_builtins(made.told)
    assert first.plan(handle) == second.plan(handle)
    assert second.plan({"handle": handle["handle"]}).session == made.session
    assert second.plan(handle).told is None
    assert first.plan(ASKED).session != made.session


@pytest.mark.parametrize(
    "other",
    [{"owner": "b"}, {"prompt_token_ids": [1, 2, 4]}, {"variant": "adapter"}, {"cache_salt": "other"}],
)
def test_a_handle_is_for_one_prompt_model_and_key(other: dict[str, Any]) -> None:
    world = World()
    handle = msgspec.to_builtins(world.plan(ASKED).told)
    world.plan(handle)
    with pytest.raises(RequestError, match="is not one that this server gave"):
        world.plan(handle, **other)
    for foreign in (World(b"t" * 32), World(model="n")):
        with pytest.raises(RequestError, match="is not one that this server gave"):
            foreign.plan(handle)


def test_a_handle_is_over_after_a_while() -> None:
    world = World()
    handle = msgspec.to_builtins(world.plan(ASKED).told)
    assert handle["expires_at"] == 1000 + TTL_S
    world.now_s += TTL_S
    world.plan(handle)
    world.now_s += 1
    with pytest.raises(RequestError, match=rf"^kv_transfer_params.handle: is over {TTL_S} s old"):
        world.plan(handle)
    raw = bytearray(base64.urlsafe_b64decode(handle["handle"]))
    raw[14] += 1  # a later time
    with pytest.raises(RequestError, match="is not one that this server gave"):
        world.plan({"handle": base64.urlsafe_b64encode(raw).decode()})


@pytest.mark.parametrize(
    ("asked", "what"),
    [
        ({"do_remote_decode": True, "remote_host": "10.0.0.1"}, "remote_host: clients cannot give locations"),
        ({"remote_block_ids": [1]}, "remote_block_ids: clients"),
        ({"handle": 5}, "handle: is not one"),
        ({"handle": "AAAA"}, "handle: is not one"),
        ({"handle": "\udfff" * 9}, "handle: is not one"),
        ({"handle": "A" * 10_000}, "handle: is not one"),
        ({"handle": "A", "do_remote_decode": True}, "do_remote_decode: only without"),
    ],
)
def test_nothing_else_is_taken(asked: dict[str, Any], what: str) -> None:
    with pytest.raises(RequestError) as caught:
        World().plan(asked)
    assert str(caught.value).startswith(f"kv_transfer_params.{what}")
    assert caught.value.param == "kv_transfer_params"


def test_a_handle_is_for_a_whole_answer_to_one_prompt() -> None:
    for asked in ({"do_remote_decode": False}, {"do_remote_prefill": True}):
        with pytest.raises(RequestError, match=r"^kv_transfer_params: give do_remote_decode: true, or the handle"):
            World().plan(asked)
    with pytest.raises(RequestError, match=r"^kv_transfer_params: 2 prompts"):
        World().plan(ASKED, num=2)
    with pytest.raises(RequestError, match=r"^stream: "):
        World().plan(ASKED, streams=True)
