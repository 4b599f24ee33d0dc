"""Resources that a request holds until it reaches the router: a reserved place in the queue, and memory for its body.

A generating request that would wait too long is refused before its body is read. Bodies share a memory budget, in which
one client's share is at most what remains free for others. Knows nothing of routes.
"""

from __future__ import annotations

from starlette.requests import Request
from starlette.types import ASGIApp, Receive, Scope, Send

from pd_cluster.api.middleware.http_callers import ARRIVED, caller_of, client_of
from pd_cluster.cluster.queueing.fair_queue import Client
from pd_cluster.cluster.routing.request_admission import RequestAdmission
from pd_cluster.errors import Overloaded
from pd_cluster.service.concurrency.fair_byte_budget import FairByteBudget
from pd_cluster.service.concurrency.fair_slots import current_client

SCOPE = "pd_cluster.arrival"  # the key of a request's RequestReservation in its ASGI scope
BODIES_NBYTES = 256 << 20  # the memory for all bodies whose requests have not reached the router
SMALL_NBYTES = 64 << 10  # this part of each body is not counted, because connections buffer as much anyway
CHARS_PER_TOKEN = 4  # a guess, until the text is tokenized
UNTOLD_NBYTES = 1 << 10  # assumed for a body of undeclared length


class BodyBudget(FairByteBudget):
    def __init__(self, total_nbytes: int | None = None) -> None:
        super().__init__(BODIES_NBYTES if total_nbytes is None else total_nbytes)

    def take(self, client: str, nbytes: int) -> None:
        """Takes memory for a body. Raises Overloaded if it exceeds the client's share."""
        if not self.has_capacity(client, nbytes):
            raise Overloaded(
                f"bodies of {self.taken_nbytes >> 20} MiB are being read, {self.of(client) >> 20} MiB of them yours, "
                f"and {max(1, nbytes >> 20)} MiB more exceed your share; send fewer at a time"
            )
        super().take(client, nbytes)


class RequestReservation:
    """The resources of one request, until the router has the request or the request ends."""

    __slots__ = ("_admission", "_budget", "_client", "_nbytes", "_num_tokens", "_of_body")

    def __init__(self, admission: RequestAdmission, budget: BodyBudget) -> None:
        self._admission, self._budget = admission, budget
        self._client: Client | None = None
        self._num_tokens = self._nbytes = 0
        self._of_body = ""  # the client to whom the body's memory is charged

    def asks(self, http: Request, nbytes: int | None) -> None:
        """Reserves a place in the queue. `nbytes`: the size of the request's body, if known. Raises Overloaded."""
        num_tokens = (UNTOLD_NBYTES if nbytes is None else nbytes) // CHARS_PER_TOKEN
        self._client = self._admission.arrives(caller_of(http).owner, num_tokens)
        self._num_tokens = num_tokens

    def reads(self, http: Request, nbytes: int) -> None:
        """Takes memory for a body of this size, present or expected. Raises Overloaded."""
        more = nbytes - SMALL_NBYTES - self._nbytes
        if more > 0:
            self._of_body = caller_of(http).client
            self._budget.take(self._of_body, more)
            self._nbytes += more

    def is_over(self) -> None:
        """Releases everything. Further calls do nothing."""
        if self._nbytes:
            self._budget.give_back(self._of_body, self._nbytes)
            self._nbytes = 0
        if self._client is not None:
            self._admission.departs(self._client, self._num_tokens)
            self._client = None


class ReservationMiddleware:
    """Gives each request a RequestReservation; a layer between the API keys and the routes."""

    def __init__(self, app: ASGIApp, admission: RequestAdmission, budget: BodyBudget | None = None) -> None:
        self._app, self._admission, self._budget = app, admission, budget or BodyBudget()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] == "http":
            current_client.set(client_of(scope))  # each request has its own task and context
        if scope["type"] != "http" or scope["method"] != "POST":
            await self._app(scope, receive, send)
            return
        arrival = RequestReservation(self._admission, self._budget)
        try:
            await self._app({**scope, SCOPE: arrival, ARRIVED: arrival.is_over}, receive, send)
        finally:
            arrival.is_over()


def arrival_of(http: Request) -> RequestReservation | None:
    """Returns the request's RequestReservation; None at ports without a queue."""
    found: RequestReservation | None = http.scope.get(SCOPE)
    return found
