"""/v1/files: files for batches, with OpenAI's API."""

from __future__ import annotations

import os
from collections.abc import AsyncIterator, Iterable
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import Response, StreamingResponse
from msgspec import Meta

from pd_cluster.api.files.file_upload import received_file
from pd_cluster.api.middleware.direct_routes import PlainRoute
from pd_cluster.api.middleware.http_bodies import json_of
from pd_cluster.api.middleware.http_callers import owner_of
from pd_cluster.api.openapi.operations import Operation, path_parameter, query_parameter
from pd_cluster.errors import RequestError
from pd_cluster.service.files.file_store import FileObject, FileStore
from pd_cluster.service.files.kept_rows import Paging

FILES = "/v1/files"
ONE = "/v1/files/{file_id}"
MAX_LISTED = 10_000
READ_NBYTES = 256 << 10
FILE_ID = path_parameter("file_id")
PURPOSES = ("batch", "batch_output")


class FileList(msgspec.Struct):
    object: Literal["list"]
    data: list[FileObject]
    first_id: str | None
    last_id: str | None
    has_more: Annotated[bool, Meta(description="If true, ask again with `after` set to last_id.")]


class FileDeleted(msgspec.Struct):
    id: str
    object: Literal["file"]
    deleted: Annotated[bool, Meta(extra_json_schema={"const": True})]


def listing(most: int, default: int, *more: dict[str, Any]) -> tuple[dict[str, Any], ...]:
    """Returns the query parameters of a list."""
    limit = {"type": "integer", "minimum": 1, "maximum": most, "default": default}
    return (query_parameter("limit", limit), query_parameter("after", {"type": "string"}), *more)


def paging_of(http: Request, most: int, default: int) -> Paging:
    """Raises RequestError."""
    asked = http.query_params
    limit, order = asked.get("limit", str(default)), asked.get("order", "desc")
    if not (limit.isascii() and limit.isdecimal() and len(limit) <= len(str(most)) and 1 <= int(limit) <= most):
        raise RequestError(f"limit: expected 1 to {most}", param="limit")
    if order not in ("asc", "desc"):
        raise RequestError("order: expected asc or desc", param="order")
    return Paging(int(limit), asked.get("after", ""), order == "asc")


def ends_of(ids: Iterable[str]) -> tuple[str | None, str | None]:
    """Returns the first and last ids."""
    found = list(ids)
    return (found[0], found[-1]) if found else (None, None)


def file_routes(store: FileStore, allowed_origins: tuple[str, ...]) -> APIRouter:
    routes = APIRouter(route_class=PlainRoute)
    by = query_parameter("order", {"type": "string", "enum": ["asc", "desc"], "default": "desc"})
    of = query_parameter("purpose", {"type": "string", "enum": [*PURPOSES]})

    @routes.post(FILES, openapi_extra=_upload())
    async def upload_file(http: Request) -> Response:
        return json_of(await received_file(http, store, allowed_origins))

    @routes.get(
        FILES,
        openapi_extra=Operation("Your files.", FileList, errors=(400, 404, 507)).at(
            *listing(MAX_LISTED, MAX_LISTED, by, of)
        ),
    )
    async def list_files(http: Request) -> Response:
        paging, purpose = paging_of(http, MAX_LISTED, MAX_LISTED), http.query_params.get("purpose", "")
        found = await store.on_thread(store.files_of, owner_of(http), purpose, paging)
        shown = found[: paging.limit]
        first_id, last_id = ends_of(file.id for file in shown)
        return json_of(FileList("list", shown, first_id, last_id, has_more=len(found) > len(shown)))

    @routes.get(ONE, openapi_extra=_of_one("Information about a file.", FileObject))
    async def retrieve_file(http: Request) -> Response:
        return json_of(await store.on_thread(store.find, owner_of(http), http.path_params["file_id"]))

    @routes.delete(ONE, openapi_extra=_of_one("Remove a file.", FileDeleted, 409))
    async def delete_file(http: Request) -> Response:
        file_id = http.path_params["file_id"]
        await store.on_thread(store.delete, owner_of(http), file_id)
        return json_of(FileDeleted(file_id, "file", deleted=True))

    @routes.get(ONE + "/content", openapi_extra=_content())
    async def file_content(http: Request) -> Response:
        found, fd = await store.on_thread(store.open, owner_of(http), http.path_params["file_id"])
        headers = {
            "Content-Length": str(found.bytes),
            "Content-Disposition": "attachment",
            "X-Content-Type-Options": "nosniff",
        }
        return StreamingResponse(_read(store, fd), headers=headers, media_type="application/octet-stream")

    return routes


async def _read(store: FileStore, fd: int) -> AsyncIterator[bytes]:
    try:
        while part := await store.on_thread(os.read, fd, READ_NBYTES):
            yield part
    finally:
        os.close(fd)


def _of_one(summary: str, answer: type[msgspec.Struct], *errors: int) -> Operation:
    return Operation(summary, answer, errors=(400, 404, 507, *errors)).at(FILE_ID)


def _upload() -> Operation:
    """Describes the multipart body."""
    operation = Operation("Upload a file for a batch.", FileObject, errors=(400, 403, 413, 429, 507))
    fields = {
        "file": {"type": "string", "format": "binary"},
        "purpose": {"type": "string", "enum": ["batch"]},
        "expires_after[anchor]": {"type": "string", "enum": ["created_at"]},
        "expires_after[seconds]": {"type": "integer"},
    }
    schema = {"type": "object", "required": ["file", "purpose"], "properties": fields}
    operation["requestBody"] = {"required": True, "content": {"multipart/form-data": {"schema": schema}}}
    return operation


def _content() -> Operation:
    operation = _of_one("The content of a file.", FileObject)
    content = {"application/octet-stream": {"schema": {"type": "string", "format": "binary"}}}
    operation["responses"]["200"] = {"description": "The file's bytes.", "content": content}
    return operation
