"""--root-path: the server answers under a proxy's prefix, whether or not the proxy strips it."""

from __future__ import annotations

from starlette.types import ASGIApp, Receive, Scope, Send


class RootPath:
    """Puts the prefix before every path exactly once, and sets it in the scope, as ASGI requires."""

    def __init__(self, app: ASGIApp, root_path: str) -> None:
        self._app = app
        self._root_path = root_path

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "lifespan":
            path, root = scope["path"], self._root_path
            has_it = path == root or path.startswith(f"{root}/")
            scope = {**scope, "root_path": root, "path": path if has_it else root + path}
        await self._app(scope, receive, send)
