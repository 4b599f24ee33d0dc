"""All routes of the API for clients: for the public port, and for `run-batch`, which has no port."""

from __future__ import annotations

from collections.abc import Iterator

from fastapi import APIRouter

from pd_cluster.api.routes.message_routes import message_count_routes, message_routes
from pd_cluster.api.routes.model_routes import model_routes
from pd_cluster.api.routes.openai_routes import openai_routes
from pd_cluster.api.routes.pooling.class_routes import class_routes
from pd_cluster.api.routes.pooling.cohere_embed_routes import cohere_embed_routes
from pd_cluster.api.routes.pooling.score_routes import score_routes
from pd_cluster.api.routes.pooling.vector_routes import vector_routes
from pd_cluster.api.routes.response_routes import input_routes, kept_response_routes, response_routes
from pd_cluster.api.routes.stream_resumption import stream_resumption
from pd_cluster.api.routes.tokens.derender_routes import derender_routes
from pd_cluster.api.routes.tokens.inference_routes import inference_routes
from pd_cluster.api.routes.tokens.render_routes import render_routes
from pd_cluster.api.routes.tokens.token_routes import token_routes
from pd_cluster.service.answers.response_store import ResponseStore
from pd_cluster.service.text_service import TextService

OPENAI_ROUTES = (
    *(openai_routes, model_routes, token_routes, message_routes, message_count_routes),
    *(vector_routes, cohere_embed_routes, score_routes, class_routes),
    *(inference_routes, render_routes, derender_routes),
)


def api_routes(service: TextService, store: ResponseStore | None) -> Iterator[APIRouter]:
    """Yields the routes. `store`: stores responses; None: responses are not stored."""
    for routes in OPENAI_ROUTES:
        yield routes(service)
    yield from stream_resumption(service).routes()
    for make in (response_routes, input_routes, kept_response_routes):
        yield make(service, store)
