"""Writes one upload, a multipart body, to disk as it arrives, within the owner's quota."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import NamedTuple
from urllib.parse import urlsplit

from starlette.requests import ClientDisconnect, Request

from pd_cluster.api.middleware.http_callers import count_request, owner_of
from pd_cluster.errors import Forbidden, RequestError
from pd_cluster.service.files.file_store import UPLOAD_TIMEOUT_S, FileObject, FileStore
from pd_cluster.service.schema.error_bodies import BodyTooLarge

IDLE_TIMEOUT_S = 60.0
WRITTEN_NBYTES = 1 << 20  # size of one write
FORM_NBYTES = 64 << 10  # maximum size of the form without its file
SHORTEST_S, LONGEST_S = 3600, 2_592_000  # OpenAI's limits of a file's lifetime
MAX_LENGTH_NUM_DIGITS = 18


class UploadTerms(NamedTuple):
    purpose: str
    ttl_s: float | None


async def received_file(http: Request, store: FileStore, allowed_origins: tuple[str, ...]) -> FileObject:
    """Receives an upload; removes the file if it fails. Raises RequestError, QuotaExceeded, StorageFull."""
    from pd_cluster.api.files.multipart_form import MultipartForm

    count_request(http)
    check_origin(http, allowed_origins)
    form, most_nbytes = MultipartForm(http.headers.get("content-type", "")), store.config.max_file_mib << 20
    declared = http.headers.get("content-length", "")
    nbytes = int(declared) if declared.isdecimal() and len(declared) <= MAX_LENGTH_NUM_DIGITS else 0
    if nbytes > most_nbytes + FORM_NBYTES:
        raise too_large(store)
    upload = await store.on_thread(store.begin, owner_of(http), nbytes)
    try:
        buffered = bytearray()
        async for chunk in _chunks(http):
            buffered += form.feed(chunk)
            if upload.nbytes + len(buffered) > most_nbytes:
                raise too_large(store)
            if len(buffered) >= WRITTEN_NBYTES:
                await store.on_thread(store.write, upload, bytes(buffered))
                buffered.clear()
        form.end()
        terms = terms_of(form.fields)
        await store.on_thread(store.write, upload, bytes(buffered))
        return await store.on_thread(store.complete, upload, form.filename, terms.ttl_s)
    except BaseException:
        await asyncio.shield(store.on_thread(store.discard, upload))
        raise


def too_large(store: FileStore) -> BodyTooLarge:
    return BodyTooLarge(f"the file is larger than {store.config.max_file_mib} MiB (--max-file-size)", param="file")


async def _chunks(http: Request) -> AsyncIterator[bytes]:
    """Yields the body. Raises RequestError if the client stops sending or takes over an hour."""
    stream = http.stream()
    try:
        async with asyncio.timeout(UPLOAD_TIMEOUT_S):
            while True:
                async with asyncio.timeout(IDLE_TIMEOUT_S):
                    chunk = await anext(stream, None)
                if chunk is None:
                    return
                yield chunk
    except TimeoutError:
        raise RequestError(
            f"the upload paused for {IDLE_TIMEOUT_S:g} s, or took more than an hour; send the file again"
        ) from None
    except ClientDisconnect:
        raise RequestError("the client left before its file was complete") from None


def terms_of(fields: dict[str, str]) -> UploadTerms:
    """Raises RequestError for an unsupported purpose, and for a lifetime that OpenAI does not allow."""
    purpose = fields.get("purpose", "")
    if purpose != "batch":
        raise RequestError(
            f"purpose: {purpose[:40]!r}; expected batch: files are kept for batches only", param="purpose"
        )
    anchor, seconds = (fields.get(f"expires_after[{name}]") for name in ("anchor", "seconds"))
    if anchor is None and seconds is None:
        return UploadTerms(purpose, None)
    return UploadTerms(purpose, lifetime_s("expires_after", anchor, seconds))


def lifetime_s(field: str, anchor: object, seconds: object) -> float:
    """Raises RequestError."""
    if anchor != "created_at":
        raise RequestError(f"{field}.anchor: expected created_at", param=field)
    text = str(seconds)
    if not (text.isdecimal() and len(text) <= len(str(LONGEST_S)) and SHORTEST_S <= int(text) <= LONGEST_S):
        raise RequestError(f"{field}.seconds: expected {SHORTEST_S} to {LONGEST_S}", param=field)
    return float(text)


def check_origin(http: Request, allowed_origins: tuple[str, ...]) -> None:
    """Raises Forbidden for pages of other sites, because browsers send their forms without a preflight."""
    origin = http.headers.get("origin")
    if origin is None or origin in allowed_origins or "*" in allowed_origins:
        return
    if urlsplit(origin).netloc != http.headers.get("host", ""):
        raise Forbidden(f"pages of {origin[:200]} may not upload files here (--allowed-origins)")
