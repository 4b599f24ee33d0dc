"""Who sends a request: whose turns its work takes, and whose cached prompts it may find.

Knows nothing of keys (auth.py) or of how prompts are cached.
"""

from __future__ import annotations

import hashlib
import json
from dataclasses import dataclass

from starlette.requests import Request

SCOPE = "pd_cluster.caller"  # where a request's ASGI scope says who was let in


@dataclass(frozen=True, slots=True)
class Caller:
    """`client`: an API key's tenant, or a peer's address. `tenant`: "" where all callers share cached prompts."""

    client: str = ""
    tenant: str = ""

    def salt(self, own: str | None) -> str:
        """The salt of cached prompts. A request's `own` counts within its tenant; no two pairs have the same salt."""
        if not self.tenant:
            return own or ""
        return hashlib.sha256(json.dumps([self.tenant, own or ""]).encode()).hexdigest()


NOBODY = Caller()


def caller_of(http: Request) -> Caller:
    """The caller whom a key let in; without keys, the peer's address."""
    known = http.scope.get(SCOPE)
    if isinstance(known, Caller):
        return known
    return Caller(http.client.host) if http.client else NOBODY
