"""One request's exchange with the gateway: the picker's answer to each message. The rules are in
docs/protocol/membership.md.

Pure: the caller reads and writes the stream. The picker changes no body, and no headers but its own.
"""

from __future__ import annotations

from collections.abc import Sequence
from json import dumps
from typing import Any

from pd_cluster.extras.gateway.envoy_names import FULL_DUPLEX_STREAMED, OVERWRITE_OR_ADD
from pd_cluster.extras.gateway.messages_pb2 import ProcessingResponse
from pd_cluster.extras.gateway.scheduler_choice import AllFull, NoneReady, SchedulerChoice

DESTINATION = "x-gateway-destination-endpoint"
NAMESPACE, SUBSET_NAMESPACE, SUBSET = "envoy.lb", "envoy.lb.subset_hint", f"{DESTINATION}-subset"
MOST_SUBSET = 4096
RETRY_AFTER_S = 1
REFUSED = {
    NoneReady: (503, "no scheduler takes requests now", "unavailable"),
    AllFull: (429, "all schedulers are at their limit of requests", "overloaded"),
}


class Exchange:
    """Answers the messages of one ext_proc stream in order. `is_over`: no further answer follows."""

    def __init__(self, choice: SchedulerChoice) -> None:
        self._choice = choice
        self._request_mode = self._response_mode = 0  # without protocol_config Envoy does not support full duplex
        self.is_over = False
        self.status = 0  # the HTTP status of an immediate answer; 0: none was given

    def answer(self, request: Any) -> Any | None:
        """Returns the ProcessingResponse to a ProcessingRequest; None: the gateway expects none."""
        if request.HasField("protocol_config"):
            self._request_mode = request.protocol_config.request_body_mode
            self._response_mode = request.protocol_config.response_body_mode
        kind = request.WhichOneof("request")
        if kind is None or request.observability_mode:  # in observability mode the gateway waits for no answer
            return None
        response = ProcessingResponse()
        if kind == "request_headers":
            self._pick(_allowed(request), response)
        elif kind in ("request_body", "response_body"):
            mode = self._request_mode if kind == "request_body" else self._response_mode
            part, common = getattr(request, kind), getattr(response, kind).response
            common.SetInParent()
            if mode == FULL_DUPLEX_STREAMED:  # the gateway sends upstream only the body in this answer
                streamed = common.body_mutation.streamed_response
                streamed.body, streamed.end_of_stream = part.body, part.end_of_stream
        else:
            getattr(response, kind).SetInParent()
        return response

    def _pick(self, allowed: Sequence[str] | None, response: Any) -> None:
        try:
            picked = ",".join(self._choice.choose(allowed))
        except (NoneReady, AllFull) as refusal:
            self._refuse(type(refusal), response.immediate_response)
            return
        common = response.request_headers.response
        _set(common.header_mutation, DESTINATION, picked)
        common.clear_route_cache = True  # the gateway's routes may depend on the header
        response.dynamic_metadata.update({NAMESPACE: {DESTINATION: picked}})

    def _refuse(self, why: type[Exception], immediate: Any) -> None:
        self.status, text, code = REFUSED[why]
        self.is_over = True
        immediate.status.code = self.status
        immediate.details = f"pd_cluster_{code}"
        kind = "rate_limit_error" if self.status == 429 else "server_error"
        immediate.body = dumps({"error": {"message": text, "type": kind, "param": None, "code": code}}).encode()
        _set(immediate.headers, "content-type", "application/json")
        _set(immediate.headers, "retry-after", str(RETRY_AFTER_S))


def _set(mutation: Any, name: str, value: str) -> None:
    made = mutation.set_headers.add()
    made.header.key, made.header.raw_value = name, value.encode()
    made.append_action = OVERWRITE_OR_ADD  # replaces a header of this name from the client


def _allowed(request: Any) -> list[str] | None:
    """Returns the endpoints to which the gateway limits the choice; None: no limit."""
    metadata = request.metadata_context.filter_metadata
    if SUBSET_NAMESPACE not in metadata or SUBSET not in metadata[SUBSET_NAMESPACE].fields:
        return None
    found = metadata[SUBSET_NAMESPACE].fields[SUBSET]
    if found.WhichOneof("kind") == "string_value":
        return [each.strip() for each in found.string_value.split(",")][:MOST_SUBSET]
    return [each.string_value for each in found.list_value.values[:MOST_SUBSET]]
