"""The public port with API keys from a file, over a real router whose instances a test scripts."""

from __future__ import annotations

import asyncio
from pathlib import Path
from typing import Any

from pd_cluster import wire
from pd_cluster.cluster.tenancy.tenant_counts import by_tenant
from pd_cluster.extras.key_file.key_file import KeyFile, digest_of, write_key_file
from pd_cluster.extras.key_file.key_store import KeyStore
from pd_cluster.extras.key_file.key_table import KeyTable
from pd_cluster.extras.key_file.shared_rate_limits import SharedRateLimits, tag_of
from pd_cluster.process_messages import ApiKey
from pd_cluster.settings.http_settings import HttpConfig
from tests.support.public_port import NAMES, Answer, make_app, send
from tests.support.router_world import World, token

SALT = "5a" * 32
SECOND_NS = 10**9
MINUTE_NS = 60 * SECOND_NS
PROMPT = [1, 2, 3]
COMPLETION = {"model": "tiny", "prompt": PROMPT, "max_tokens": 10}
WAIT_S = 60.0


def key_of(key: str, **fields: Any) -> ApiKey:
    """Returns an API key whose id is the key itself."""
    return ApiKey(digest=digest_of(SALT, key.encode()), **{"id": key, "tenant": "team", **fields})


class Port:
    """The app, its router, and the state of the rate limits, whose clock advances only on request."""

    def __init__(self, folder: Path, keys: tuple[ApiKey, ...], openai: bool = True, **http: Any) -> None:
        self.now_ns, self.now_s = MINUTE_NS, 1_000_000.0
        self.file = folder / "keys.json"
        write_key_file(self.file, KeyFile(SALT, keys))
        config = HttpConfig(key_file=str(self.file), **http)
        self.world = World()
        self.store = KeyStore(config, NAMES, SharedRateLimits.create(lambda: self.now_ns))
        self.counts = self.world.router.stats.tenants
        self.keys = KeyTable(self.store.keys, self.store.memory, self.counts, lambda: self.now_s)
        self.app, self.drain = make_app(folder, config, openai, router=self.world.router, file_keys=self.keys)

    def change(self, *keys: ApiKey) -> None:
        write_key_file(self.file, KeyFile(SALT, keys))
        self.keys.replace(self.store.reload())

    async def ask(self, key: str, method: str, path: str, **fields: Any) -> Answer:
        return await send(self.app, method, path, [("Authorization", f"Bearer {key}")], fields or b"")

    async def submitted(self, num_before: int = 0) -> str:
        """Waits until both legs of the last request have been sent; returns its id."""
        async with asyncio.timeout(WAIT_S):
            while len(self.world.mailbox.of(wire.Submit)) < num_before + 2:
                await asyncio.sleep(0)
        request_id: str = self.world.mailbox.of(wire.Submit)[-1][1].request_id
        return request_id

    def answer(self, request_id: str, num_tokens: int, index: int = 0) -> None:
        """Delivers both instances' messages for a whole sequence to the router."""
        prefill, decode = (conn for conn, body in self.world.mailbox.of(wire.Submit) if body.request_id == request_id)
        for position in range(num_tokens):
            finish = "stop" if position + 1 == num_tokens else None
            self.world.outputs(prefill if not position else decode, token(request_id, position, 7, finish, 0, index))

    def left(self, key: str) -> tuple[int, int]:
        (at,) = [at for at, each in enumerate(self.store.keys.keys) if each.id == key]
        found = self.store.memory.take(self.store.keys.slots[at], tag_of(self.store.keys.keys[at].digest))
        assert found is not None
        return found[1].requests.remaining, found[1].tokens.remaining

    def counted(self, name: str) -> dict[str, int]:
        return by_tenant(self.counts.counters(), f"tenant_{name}")
