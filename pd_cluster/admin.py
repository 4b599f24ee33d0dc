"""Asks a scheduler's admin address. Knows nothing of what it answers."""

from __future__ import annotations

import httpx

from pd_cluster.errors import PdClusterError

ANSWER_TIMEOUT_S = 5.0


async def ask(admin_url: str, path: str) -> httpx.Response:
    """Whatever status it has. Raises PdClusterError that names the address when nobody answers."""
    url = f"{admin_url.rstrip('/')}{path}"
    try:
        async with httpx.AsyncClient(timeout=ANSWER_TIMEOUT_S, trust_env=False) as client:
            return await client.get(url)
    except (httpx.HTTPError, httpx.InvalidURL) as error:
        reason = str(error) or type(error).__name__
        raise PdClusterError(
            f"no scheduler answers at {url}: {reason}; give its admin address with --admin "
            f"(by default the public port + 1, on the scheduler's own host)"
        ) from None


def not_an_admin(response: httpx.Response) -> PdClusterError:
    """Somebody answered, but not as an admin address does."""
    return PdClusterError(
        f"{response.url} does not answer as a scheduler's admin address (HTTP {response.status_code}); "
        f"give it with --admin (by default the public port + 1)"
    )
