"""Queries a scheduler's admin address, with the admin token if one is found. Knows nothing of the answers."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import httpx

from pd_cluster.client.trust import reason_of, trusted
from pd_cluster.cluster.members.credentials import find_admin_token
from pd_cluster.errors import PdClusterError, Unauthorized

ANSWER_TIMEOUT_S = 5.0


@dataclass(frozen=True, slots=True)
class Admin:
    """An admin address and its token file: a named one, or the one beside the global rank table."""

    url: str
    token_file: str = ""
    env: Mapping[str, str] = field(default_factory=dict)

    def token(self) -> str:
        """The token; empty if no file is named. Raises ConfigError for a file that cannot be used."""
        return find_admin_token(self.env, self.token_file)

    async def ask(self, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
        """Returns the response, whatever its status; a request with a body is a command. Raises PdClusterError if none
        comes.
        """
        url = f"{self.url.rstrip('/')}{path}"
        token = self.token()
        headers = {"Authorization": f"Bearer {token}"} if token else {}
        try:
            async with httpx.AsyncClient(
                timeout=ANSWER_TIMEOUT_S,
                trust_env=False,
                headers=headers,
                verify=url.startswith("https:") and trusted(self.env),
            ) as client:
                return await (client.get(url) if body is None else client.post(url, json=body))
        except (httpx.HTTPError, httpx.InvalidURL) as error:
            raise PdClusterError(
                f"no scheduler answers at {url}: {reason_of(error)}; give its admin address with --admin "
                f"(by default the public port + 1, on the scheduler's own host)"
            ) from None


def raise_unauthorized(response: httpx.Response) -> None:
    """Raises Unauthorized, with a way out, if the token was missing or wrong."""
    if response.status_code == 401:
        raise Unauthorized(
            f"{response.url} does not take this token, or none was given: --admin-token-file FILE (of `pd-cluster up`: "
            f"the file that it names when it is ready), or GLOBAL_RANK_TABLE_FILE_PATH as the scheduler has it, "
            f"with its admin.token beside the table"
        )


def not_an_admin(response: httpx.Response) -> PdClusterError:
    """Returns the error for an answer that no admin address gives."""
    return PdClusterError(
        f"{response.url} does not answer as a scheduler's admin address (HTTP {response.status_code}); "
        f"give it with --admin (by default the public port + 1)"
    )
