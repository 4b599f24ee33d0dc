"""The route of the overview: instances, problems, and samples of the last minutes, in one answer.

The admin port shows all of it. `public_overview_routes` shows clients only figures, without addresses, processes and
reasons.
"""

from __future__ import annotations

import math
import reprlib
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import Response

from pd_cluster import __version__
from pd_cluster.cluster.overview.cluster_overview import Overview
from pd_cluster.errors import RequestError

Instances = Callable[[], list[dict[str, Any]]]
PUBLIC_FIELDS = (
    *("instance_id", "role", "next_role", "service", "state", "sleep_level", "num_running", "num_waiting"),
    *("num_landing", "num_exporting", "num_blocks", "num_free_blocks", "num_cached_blocks", "num_held_blocks"),
    "groups",
    *("num_preemptions", "num_swap_blocks", "num_free_swap_blocks", "num_prefix_query_tokens"),
    *("num_encoded_images", "num_landed_images", "num_encoder_fallbacks", "feature_nbytes"),
    *("num_prefix_hit_tokens", "num_steps", "kv_sent_nbytes", "kv_received_nbytes", "tiers"),
    *("unit", "unit_rank", "unit_size", "num_rounds", "num_idle_rounds", "exchange_s"),
)
SHARED_S = 0.25  # maximum age of a shared answer at the public port; a page queries it every half second
MOST_SHARED = 16  # maximum number of different answers that are kept for that long


def overview_routes(overview: Overview, instances: Instances, model: str) -> APIRouter:
    """Makes the route of the admin port. `instances`: returns the entries of /instances."""
    return _routes(Answers(overview.to_json, instances, model).new)


def public_overview_routes(overview: Overview, instances: Instances, model: str) -> APIRouter:
    shown = Answers(overview.to_public, lambda: [_public(each) for each in instances()], model)
    return _routes(SharedAnswers(shown.new).get)


@dataclass(frozen=True, slots=True)
class Answers:
    """`shown(since_s, since_mark)`: returns the overview without instances, with only the later samples and marks."""

    shown: Callable[[float, int], dict[str, Any]]
    instances: Instances
    model: str

    def new(self, since_s: float, since_mark: int) -> bytes:
        """Returns JSON, encoded here because FastAPI would first walk through all samples."""
        return msgspec.json.encode(
            {
                "version": __version__,
                "model": self.model,
                "instances": self.instances(),
                **self.shown(since_s, since_mark),
            }
        )


class SharedAnswers:
    """Gives the same answer to equal queries within SHARED_S, so that many pages cost hardly more than one."""

    def __init__(self, new: Callable[[float, int], bytes], clock: Callable[[], float] = time.monotonic) -> None:
        self._new, self._clock = new, clock
        self._kept: dict[tuple[float, int], bytes] = {}
        self._since_s = -math.inf

    def get(self, since_s: float, since_mark: int) -> bytes:
        now_s = self._clock()
        if now_s - self._since_s >= SHARED_S:
            self._kept, self._since_s = {}, now_s
        asked = since_s, since_mark
        found = self._kept.get(asked)
        if found is None:
            found = self._new(since_s, since_mark)
            if len(self._kept) < MOST_SHARED:
                self._kept[asked] = found
        return found


def _public(instance: dict[str, Any]) -> dict[str, Any]:
    """Returns the fields that clients may see, which exclude peers' epochs and the reasons why links failed."""
    links = {peer.partition("@")[0]: state.partition(":")[0] for peer, state in instance["links"].items()}
    return {**{name: instance[name] for name in PUBLIC_FIELDS}, "links": links}


def _routes(answer: Callable[[float, int], bytes]) -> APIRouter:
    routes = APIRouter()

    @routes.get("/overview")
    async def whole(request: Request) -> Response:
        """Answers a query. `since`: only samples after this Unix time. `since_mark`: only marks after this number."""
        body = answer(_number(request, "since", -math.inf), int(_number(request, "since_mark", 0)))
        return Response(body, media_type="application/json", headers={"Cache-Control": "no-store"})

    return routes


def _number(request: Request, name: str, default: float) -> float:
    """Raises RequestError."""
    text = request.query_params.get(name)
    if text is None:
        return default
    try:
        value = float(text)
    except ValueError:
        value = math.nan
    if not math.isfinite(value):
        raise RequestError(f"{name}: {reprlib.repr(text)} is not a number", param=name)
    return value
