"""Describes the sender of a request: its fair share, its timeout, its permitted models and its cached prompts.

Knows nothing of keys (api_key_auth.py) or of how prompts are cached.
"""

from __future__ import annotations

import hashlib
import json
import math
from collections.abc import Callable
from dataclasses import dataclass, field

from pd_cluster.cluster.streams.request_origin import PromptGroup, RequestOwner
from pd_cluster.service.callers.usage_meter import Meter


def nothing() -> None:
    """Ignores the event."""


@dataclass(frozen=True, slots=True)
class Caller:
    """The sender of one request."""

    client: str = ""  # an API key's tenant, or a peer's address
    tenant: str = ""  # "" if all callers share cached prompts
    client_timeout_s: float = math.inf  # how long the client waits for an answer to begin
    # called when the router has the request
    arrived: Callable[[], None] = field(default=nothing, compare=False)
    group: PromptGroup | None = field(default=None, compare=False, repr=False)  # the group of the request's prompts
    models: tuple[str, ...] | None = None  # the served names that the caller may use; None: all
    meter: Meter | None = field(default=None, compare=False, repr=False)  # counts this request; None without keys
    batch: str = ""  # the name of a group of answers that are needed only together; "": no group
    session: str = ""  # the session of requests that name none themselves
    base_priority: int = 0  # added to a request's own priority

    @property
    def owner(self) -> RequestOwner:
        return RequestOwner(self.client, self.client_timeout_s, self.group)

    def priority(self, own: int | None) -> int:
        """Returns the priority of a request with or without its own priority; lower numbers come first."""
        return self.base_priority + (own or 0)

    def may_use(self, model: str) -> bool:
        return self.models is None or model in self.models

    def salt(self, own: str | None) -> str:
        """Returns the salt of cached prompts, unique for each pair of a tenant and the request's `own` salt."""
        if not self.tenant:
            return own or ""
        return hashlib.sha256(json.dumps([self.tenant, own or ""]).encode()).hexdigest()

    def own_salt(self, own: str | None) -> str:
        """Returns the salt of data that callers never share, even if they share cached prompts."""
        return hashlib.sha256(json.dumps(["client", self.client, own or ""]).encode()).hexdigest()


NOBODY = Caller()
