"""Handles for the KV cache of an earlier request's prompt: opaque, signed and short-lived.

A router that splits requests computes a prompt with one request and generates the answer with another. The handle sends
both to the same instances and proves that they belong together; it does not reveal the location of the cache.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import secrets
import time
from collections.abc import Callable, Mapping, Sequence
from typing import Annotated, Any, NamedTuple

import msgspec
from msgspec import Meta, Struct

from pd_cluster.errors import RequestError
from pd_cluster.kv.prefix_index import token_bytes
from pd_cluster.types import RequestSpec

FIELD = "kv_transfer_params"
TTL_S = 600
NONCE_NBYTES, TIME_NBYTES, MAC_NBYTES = 8, 8, 32
KNOWN = ("do_remote_decode", "do_remote_prefill", "handle", "expires_at")


class KVHandle(Struct):
    """A handle. Clients send it back unchanged, with the same prompt."""

    do_remote_prefill: Annotated[bool, Meta(extra_json_schema={"const": True})]
    handle: Annotated[str, Meta(description="The opaque handle for the prompt's KV cache.")]
    expires_at: Annotated[int, Meta(description="Unix time, in seconds.")]


class KVPlan(NamedTuple):
    """The effect of a request's kv_transfer_params. `session`: requests of a session go to the same instances."""

    session: str
    told: KVHandle | None  # the handle to put into the answer


class KVHandles:
    """`secret`: the same in all processes that serve one cluster."""

    def __init__(self, secret: bytes, model: str, clock: Callable[[], float] = time.time) -> None:
        self._secret = hmac.digest(secret, b"handles of KV cache", "sha256")
        self._model, self._clock = model, clock

    def plan(self, asked: Mapping[str, Any], owner: str, orders: Sequence[RequestSpec], is_streamed: bool) -> KVPlan:
        """Reads the parameters. `owner`: the tenant of the key. Raises RequestError."""
        for name, value in asked.items():
            if name not in KNOWN and value is not None:
                raise _wrong(
                    name[:64], "clients cannot give locations; send only the handle of an earlier answer, unchanged"
                )
        if len(orders) > 1:
            raise RequestError(f"{FIELD}: {len(orders)} prompts; give one", param=FIELD)
        (order,) = orders
        handle = asked.get("handle")
        if handle is not None:
            if asked.get("do_remote_decode"):
                raise _wrong("do_remote_decode", "only without a handle")
            return KVPlan(self._session(self._checked(handle, owner, order)), None)
        if asked.get("do_remote_decode") is not True:
            raise RequestError(f"{FIELD}: give do_remote_decode: true, or the handle of an earlier answer", param=FIELD)
        if is_streamed:
            raise RequestError("stream: a stream cannot carry a handle; leave stream out", param="stream")
        nonce, expires = secrets.token_bytes(NONCE_NBYTES), int(self._clock()) + TTL_S
        head = nonce + expires.to_bytes(TIME_NBYTES, "big")
        made = base64.urlsafe_b64encode(head + self._mac(head, owner, order)).decode()
        return KVPlan(self._session(nonce), KVHandle(do_remote_prefill=True, handle=made, expires_at=expires))

    def _checked(self, handle: Any, owner: str, order: RequestSpec) -> bytes:
        """Returns the handle's nonce. Raises RequestError."""
        try:
            raw = base64.b64decode(handle if isinstance(handle, str) else "", b"-_", validate=True)
        except ValueError:
            raw = b""
        head, mac = raw[: NONCE_NBYTES + TIME_NBYTES], raw[NONCE_NBYTES + TIME_NBYTES :]
        if len(mac) != MAC_NBYTES or not hmac.compare_digest(mac, self._mac(head, owner, order)):
            raise _wrong("handle", "is not one that this server gave for this prompt, model and API key")
        if int.from_bytes(head[NONCE_NBYTES:], "big") < self._clock():
            raise _wrong("handle", f"is over {TTL_S} s old; compute the prompt again")
        return head[:NONCE_NBYTES]

    def _mac(self, head: bytes, owner: str, order: RequestSpec) -> bytes:
        whose = msgspec.json.encode([owner, self._model, order.variant, order.cache_salt, len(order.images)])
        tokens = hashlib.sha256(token_bytes(order.prompt_token_ids)).digest()
        return hmac.digest(self._secret, head + hashlib.sha256(whose).digest() + tokens, "sha256")

    def _session(self, nonce: bytes) -> str:
        return f"kv-{nonce.hex()}"


def _wrong(name: str, why: str) -> RequestError:
    return RequestError(f"{FIELD}.{name}: {why}", param=FIELD)
