"""The dashboard's routes: its files, its sessions, and the guard of its data.

All routes are under /dashboard, and so is the cookie's path: browsers never send it to /v1. The files contain no data,
so anybody who reaches the port may load them. `SessionGuard` guards the data that the pages request. All routes answer
only under the port's own host names.
"""

from __future__ import annotations

import hmac
from dataclasses import dataclass
from urllib.parse import SplitResult, urlsplit

import msgspec
from fastapi import APIRouter, Request
from fastapi.responses import JSONResponse, RedirectResponse, Response

from pd_cluster.api.middleware.admin_access import AdminAccess, HostNames
from pd_cluster.api.middleware.http_bodies import LOOKING, guarded_by, read_as, read_body
from pd_cluster.errors import Forbidden, Overloaded, Refused, Unauthorized, called
from pd_cluster.extras.dashboard.dashboard_sessions import CODE_LIFE_S, LOOKS_PER_S, SESSION_LIFE_S, Session, Sessions
from pd_cluster.extras.dashboard.page_files import PAGE, page_files

HOME = "/dashboard/"
DATA = "/dashboard/api"
COOKIE = "pd_cluster_dashboard"
COMMAND_HEADER = "x-pd-dashboard"
FOREVER = "public, max-age=31536000, immutable"
POLICY = (
    "default-src 'none'; script-src 'self'; style-src 'self'; img-src 'self' data:; connect-src 'self'; "
    "base-uri 'none'; form-action 'none'; frame-ancestors 'none'"
)
HEADERS = {
    "Content-Security-Policy": POLICY,
    "X-Content-Type-Options": "nosniff",
    "X-Frame-Options": "DENY",
    "Referrer-Policy": "no-referrer",
    "Cross-Origin-Opener-Policy": "same-origin",
    "Cross-Origin-Resource-Policy": "same-origin",
    "Cache-Control": "no-cache",
}


class Code(msgspec.Struct, forbid_unknown_fields=True):
    code: str


class PageView(msgspec.Struct, frozen=True):
    """The parts that a page may show. `is_whole`: a page shows everything, with commands; otherwise it shows only
    figures.

    `takes_keys`: users may log in with API keys.
    """

    is_whole: bool = True
    takes_keys: bool = False


def cookie_of(view: PageView) -> str:
    """Returns the cookie's name, which differs for each port, because all ports of a host share cookies."""
    return COOKIE if view.is_whole else f"{COOKIE}_public"


class SessionGuard:
    """Lets a session read data; a command also needs this page's origin and the session's command token."""

    def __init__(self, sessions: Sessions, view: PageView, hosts: HostNames) -> None:
        self.sessions, self.cookie, self.hosts = sessions, cookie_of(view), hosts

    def check(self, request: Request) -> None:
        """Raises Unauthorized and Forbidden."""
        self.hosts.check(request)
        session = self.session_of(request)
        if session is None:
            raise Unauthorized(
                "no session of the dashboard: open a new link, which `pd-cluster dashboard` prints", code="no_session"
            )
        if request.method in LOOKING:
            return
        check_origin(request)
        if not hmac.compare_digest(request.headers.get(COMMAND_HEADER, "").encode(), session.command_token.encode()):
            raise Forbidden(f"{COMMAND_HEADER}: not this session's token; reload the page")

    def check_pace(self, request: Request) -> None:
        """Counts a query. Raises Overloaded."""
        if not self.sessions.may_look(request.cookies.get(self.cookie, "")):
            raise Overloaded(f"this session may query at most {LOOKS_PER_S:g} times a second")

    def session_of(self, request: Request) -> Session | None:
        return self.sessions.find(request.cookies.get(self.cookie, ""))


def check_origin(request: Request) -> None:
    """Raises Forbidden unless the browser's headers say that a page of this host and port sent the request."""
    host = request.headers.get("host", "")
    if not host or _origin(request).netloc != host:
        raise Forbidden("Origin: only the dashboard's own pages may send commands")


def _origin(request: Request) -> SplitResult:
    try:
        return urlsplit(request.headers.get("origin", ""))
    except ValueError:  # such as http://[
        return urlsplit("")


@dataclass(frozen=True, slots=True)
class PublicLinks:
    """Makes links to the dashboard at the public port. `url`: its address from this host, with the root path."""

    sessions: Sessions
    url: str

    def new(self) -> dict[str, str | float]:
        return _new_link(self.sessions, self.url)


def dashboard_routes(guard: SessionGuard, access: AdminAccess, links: PublicLinks | None = None) -> APIRouter:
    """Makes the admin port's routes for files and sessions; routes of data must call `guard.check`."""
    routes = APIRouter()

    @routes.post("/dashboard/codes", dependencies=[guarded_by(access.check_token)])
    async def new_code() -> dict[str, str | float]:
        return _new_link(guard.sessions)

    @routes.post("/dashboard/public-codes", dependencies=[guarded_by(access.check_token)])
    async def new_public_code() -> dict[str, str | float]:
        if links is None:
            raise Refused(f"the public port has no dashboard: start the scheduler with {called('public_dashboard')}")
        return links.new()

    @routes.post(f"{DATA}/session", dependencies=[guarded_by(guard.hosts.check)])
    async def begin(request: Request) -> Response:
        check_origin(request)
        asked = read_as(await read_body(request), Code)
        return begun(request, *exchanged(guard.sessions, asked.code), PageView())

    routes.include_router(session_routes(guard, PageView()))
    return routes


def _new_link(sessions: Sessions, base: str = "") -> dict[str, str | float]:
    code = sessions.new_code()
    return {"code": code, "path": f"{base}{HOME}#code={code}", "expires_after_s": CODE_LIFE_S}


def exchanged(sessions: Sessions, code: str) -> tuple[str, Session]:
    """Raises Unauthorized."""
    found = sessions.exchange(code)
    if found is None:
        raise Unauthorized(
            "code: used, too old or unknown; `pd-cluster dashboard` prints a new link", code="invalid_code"
        )
    return found


def begun(request: Request, cookie: str, session: Session, view: PageView, root_path: str = "") -> Response:
    """Returns the answer that sets the session's cookie, which browsers send only to the dashboard."""
    answer = JSONResponse(_told(session, view), headers=HEADERS)
    answer.set_cookie(
        cookie_of(view),
        cookie,
        max_age=int(SESSION_LIFE_S),
        path=f"{root_path}/dashboard",
        httponly=True,
        samesite="strict",
        secure=_origin(request).scheme == "https",  # the scheme that the browser sees, before any proxy
    )
    return answer


def _told(session: Session | None, view: PageView) -> dict[str, str | bool | None]:
    """Returns the data that a page needs at its start."""
    return {"command_token": session.command_token if session is not None else None, **msgspec.structs.asdict(view)}


def session_routes(guard: SessionGuard, view: PageView, root_path: str = "") -> APIRouter:
    """Makes the routes that both ports have: a session's state and end, and the files."""
    routes = APIRouter(dependencies=[guarded_by(guard.hosts.check)])

    @routes.get(f"{DATA}/session")
    async def session(request: Request) -> Response:
        told = _told(guard.session_of(request), view)
        return JSONResponse(told, headers={**HEADERS, "Cache-Control": "no-store"})

    @routes.delete(f"{DATA}/session", dependencies=[guarded_by(guard.check)])
    async def end(request: Request) -> Response:
        guard.sessions.end(request.cookies.get(guard.cookie, ""))
        answer = JSONResponse({"status": "ended"}, headers=HEADERS)
        answer.delete_cookie(guard.cookie, path=f"{root_path}/dashboard")
        return answer

    @routes.get("/dashboard")
    async def home() -> Response:
        return RedirectResponse(f"{root_path}{HOME}")

    @routes.get("/dashboard/{name:path}")
    async def file(name: str, request: Request) -> Response:
        found = page_files().get(name or PAGE)
        if found is None:
            return Response("no such file\n", 404, headers=HEADERS, media_type="text/plain")
        headers = {**HEADERS, "Vary": "Accept-Encoding"}
        if found.is_forever:
            headers["Cache-Control"] = FOREVER
        if "gzip" not in request.headers.get("accept-encoding", ""):
            return Response(found.content, headers=headers, media_type=found.media_type)
        return Response(found.packed, headers={**headers, "Content-Encoding": "gzip"}, media_type=found.media_type)

    return routes
