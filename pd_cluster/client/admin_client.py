"""Queries a scheduler's admin address, with the admin token if one is found. Knows nothing of the answers' contents."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import httpx

from pd_cluster.client.trusted_certificates import reason_of, trusted
from pd_cluster.cluster.members.cluster_credentials import find_admin_token
from pd_cluster.cluster.processes.running_clusters import RunningCluster, running_clusters
from pd_cluster.errors import ConfigError, PdClusterError, Unauthorized

ANSWER_TIMEOUT_S = 5.0
DEFAULT_ADMIN = "http://127.0.0.1:9001"
DEFAULT_URL = "http://127.0.0.1:9000"


@dataclass(frozen=True, slots=True)
class Admin:
    """An admin address and its token file: the given one, or the one next to the global rank table."""

    url: str
    token_file: str = ""
    env: Mapping[str, str] = field(default_factory=dict)

    def token(self) -> str:
        """The token; empty if no file is named. Raises ConfigError for a file that cannot be used."""
        return find_admin_token(self.env, self.token_file)

    @classmethod
    def find(cls, url: str, token_file: str, env: Mapping[str, str]) -> Admin:
        """Takes a missing address or token file from the cluster that `up` runs on this host. Raises ConfigError."""
        if url and (token_file or env.get("GLOBAL_RANK_TABLE_FILE_PATH")):
            return cls(url, token_file, env)
        if not url and env.get("GLOBAL_RANK_TABLE_FILE_PATH"):
            return cls(DEFAULT_ADMIN, token_file, env)
        found = [
            each
            for each in running_clusters(env)
            if url.rstrip("/") in ("", each.admin) and token_file in ("", each.token_file)
        ]
        if len(found) > 1:
            raise ConfigError(f"several clusters run here; choose one: {_listed(found, '--admin')}")
        if not found:
            return cls(url or DEFAULT_ADMIN, token_file, env)
        return cls(found[0].admin, found[0].token_file, env)

    async def ask(self, path: str, body: dict[str, Any] | None = None) -> httpx.Response:
        """Returns the response, whatever its status; a request with a body is a command. Raises PdClusterError if no
        response comes.
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


def public_url(env: Mapping[str, str]) -> str:
    """Returns the public address of the cluster that `up` runs on this host, or the default one. Raises ConfigError."""
    found = [each for each in running_clusters(env) if each.url]
    if len(found) > 1:
        raise ConfigError(f"several clusters run here; choose one: {_listed(found, '--url')}")
    return found[0].url if found else DEFAULT_URL


def _listed(clusters: Sequence[RunningCluster], flag: str) -> str:
    return ", ".join(f"{flag} {each.admin if flag == '--admin' else each.url} ({each.model})" for each in clusters)


def raise_unauthorized(response: httpx.Response) -> None:
    """Raises Unauthorized, with a remedy, if the token was missing or wrong."""
    if response.status_code == 401:
        raise Unauthorized(
            f"{response.url} refuses this token, or none was given: use --admin-token-file FILE (`pd-cluster up` "
            "names the file when it is ready), or set GLOBAL_RANK_TABLE_FILE_PATH as for the scheduler, with its "
            "admin.token next to the table"
        )


def not_an_admin(response: httpx.Response) -> PdClusterError:
    """Returns the error for an answer that does not come from an admin address."""
    return PdClusterError(
        f"{response.url} does not answer as a scheduler's admin address (HTTP {response.status_code}); "
        f"give it with --admin (by default the public port + 1)"
    )
