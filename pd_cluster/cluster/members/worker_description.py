"""Fetches a worker's description of itself, from an address where any program may listen."""

from __future__ import annotations

import httpx
import msgspec

from pd_cluster.process_messages import InstanceInfo

MOST_INFO_NBYTES = 4 << 20  # --hf-overrides alone may have 1 MiB


async def fetch_description(client: httpx.AsyncClient, url: str, params: dict[str, str]) -> InstanceInfo:
    """Returns the description at this URL.

    Raises httpx.HTTPError, and ValueError or RecursionError for invalid content.
    """
    content = bytearray()
    async with client.stream("GET", url, params=params, headers={"Accept-Encoding": "identity"}) as answer:
        async for part in answer.aiter_raw():  # raw: a decompressed part could have any size
            content += part
            if len(content) > MOST_INFO_NBYTES:
                raise ValueError(f"{url} sends more than {MOST_INFO_NBYTES} bytes")
    return msgspec.json.decode(content, type=InstanceInfo)
