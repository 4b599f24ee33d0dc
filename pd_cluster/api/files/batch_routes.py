"""/v1/batches: files of requests to answer within a day, with OpenAI's API."""

from __future__ import annotations

from collections.abc import Callable
from typing import Annotated, Any, Literal

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import Response
from msgspec import Meta

from pd_cluster.api.files.file_routes import ends_of, listing, paging_of
from pd_cluster.api.files.file_upload import lifetime_s
from pd_cluster.api.middleware.direct_routes import PlainRoute
from pd_cluster.api.middleware.http_bodies import json_of, read_as, read_request
from pd_cluster.api.middleware.http_callers import caller_of, owner_of
from pd_cluster.api.openapi.operations import Operation, path_parameter
from pd_cluster.errors import RequestError
from pd_cluster.service.files.batch_states import ENDPOINTS, BatchObject, Endpoint
from pd_cluster.service.files.batch_store import BatchStore

BATCHES = "/v1/batches"
ONE = "/v1/batches/{batch_id}"
MAX_LISTED, DEFAULT_LISTED = 100, 20
MAX_METADATA, MAX_KEY_NUM_CHARS, MAX_VALUE_NUM_CHARS = 16, 64, 512
ALL_ERRORS = (400, 404, 413, 429, 507)
BATCH_ID = path_parameter("batch_id")


class Lifetime(msgspec.Struct):
    anchor: Literal["created_at"]
    seconds: int


class BatchRequest(msgspec.Struct):
    """A new batch."""

    input_file_id: Annotated[str, Meta(description="A file with the purpose batch, in JSON lines.")]
    endpoint: Annotated[Endpoint, Meta(description="The url of every line.")]
    completion_window: Literal["24h"]
    metadata: dict[str, str] | None = None
    output_expires_after: Annotated[
        Lifetime | None,
        Meta(description="How long the output files are kept."),
    ] = None


class BatchList(msgspec.Struct):
    object: Literal["list"]
    data: list[BatchObject]
    first_id: str | None
    last_id: str | None
    has_more: Annotated[bool, Meta(description="If true, ask again with `after` set to last_id.")]


class _NamedValues(msgspec.Struct):
    """The fields whose errors name the allowed values."""

    endpoint: Any = None
    completion_window: Any = None


def batch_routes(store: BatchStore, created: Callable[[], None]) -> APIRouter:
    """`created`: called after a batch is created."""
    routes = APIRouter(route_class=PlainRoute)
    on_thread = store.files.on_thread

    @routes.post(
        BATCHES,
        openapi_extra=Operation(
            "Answer the requests of a file.", BatchObject, BatchRequest, errors=(400, 404, 413, 429, 507)
        ),
    )
    async def create_batch(http: Request) -> Response:
        request = await read_request(http, batch_request)
        ttl_s = None
        if (given := request.output_expires_after) is not None:
            ttl_s = lifetime_s("output_expires_after", given.anchor, given.seconds)
        batch = BatchObject(
            id="",
            endpoint=request.endpoint,
            input_file_id=request.input_file_id,
            created_at=0,
            expires_at=0,
            metadata=request.metadata,
        )
        made = await on_thread(store.create, batch, owner_of(http), caller_of(http).models, ttl_s)
        created()
        return json_of(made)

    @routes.get(
        BATCHES,
        openapi_extra=Operation("Your batches, the newest first.", BatchList, errors=(400, 404, 507)).at(
            *listing(MAX_LISTED, DEFAULT_LISTED)
        ),
    )
    async def list_batches(http: Request) -> Response:
        paging = paging_of(http, MAX_LISTED, DEFAULT_LISTED)._replace(is_ascending=False)
        found = await on_thread(store.batches_of, owner_of(http), paging)
        shown = found[: paging.limit]
        first_id, last_id = ends_of(batch.id for batch in shown)
        return json_of(BatchList("list", shown, first_id, last_id, has_more=len(found) > len(shown)))

    @routes.get(ONE, openapi_extra=Operation("A batch.", BatchObject, errors=(404, 507)).at(BATCH_ID))
    async def retrieve_batch(http: Request) -> Response:
        return json_of(await on_thread(store.find, owner_of(http), http.path_params["batch_id"]))

    @routes.post(
        ONE + "/cancel",
        openapi_extra=Operation("End a batch early; answers so far are kept.", BatchObject, errors=(404, 409, 507)).at(
            BATCH_ID
        ),
    )
    async def cancel_batch(http: Request) -> Response:
        return json_of(await on_thread(store.cancel, owner_of(http), http.path_params["batch_id"]))

    return routes


def batch_request(body: bytes) -> BatchRequest:
    """Raises RequestError that names the allowed values."""
    fields = read_as(body, _NamedValues)
    for name, known in (("endpoint", ENDPOINTS), ("completion_window", ("24h",))):
        if (given := getattr(fields, name)) is not None and given not in known:
            shown = str(given)[:80]
            raise RequestError(
                f"{name}: {shown!r}; expected {' or '.join(known)}", param=name, code="unsupported_value"
            )
    request = read_as(body, BatchRequest)
    metadata = request.metadata or {}
    if len(metadata) > MAX_METADATA or any(
        len(key) > MAX_KEY_NUM_CHARS or len(value) > MAX_VALUE_NUM_CHARS for key, value in metadata.items()
    ):
        raise RequestError(
            f"metadata: expected at most {MAX_METADATA} names of at most {MAX_KEY_NUM_CHARS} characters, with values "
            f"of at most {MAX_VALUE_NUM_CHARS}",
            param="metadata",
        )
    return request
