"""Serve the pages with starlette and uvicorn, which are imported here alone and only when they are needed."""

from __future__ import annotations

import asyncio
import logging
import signal
import socket
from collections.abc import Callable, Sequence
from importlib.util import find_spec
from pathlib import Path
from typing import TYPE_CHECKING, Any

from zlaunch.errors import LaunchError
from zlaunch.ui.access import PageAccess
from zlaunch.ui.board import Board
from zlaunch.ui.html import as_text
from zlaunch.ui.jobs import shown_jobs
from zlaunch.ui.pages import Page, list_page, message_page, queue_page, runs_page, sweep_page
from zlaunch.view.page import STYLE

if TYPE_CHECKING:
    from starlette.applications import Starlette
    from starlette.requests import Request
    from starlette.responses import Response
    from starlette.types import ASGIApp, Message, Receive, Scope, Send

_MOST_COMPARED = 8
_STATIC = Path(__file__).parent / "static"
_TYPES = {".js": "text/javascript", ".css": "text/css"}
_HEADERS = {
    "content-security-policy": "default-src 'none'; script-src 'self'; style-src 'self' 'unsafe-inline'; "
    "img-src data:; connect-src 'self'; form-action 'self'; base-uri 'none'; frame-ancestors 'none'",
    "cache-control": "no-store",
    "referrer-policy": "no-referrer",
    "x-content-type-options": "nosniff",
    "cross-origin-resource-policy": "same-origin",
}
"""Headers of every answer. Scripts come from our own file alone, so planted HTML could run none."""


def check_installed() -> None:
    """Raise LaunchError where the server's packages are missing."""
    if missing := [name for name in ("starlette", "uvicorn") if find_spec(name) is None]:
        raise LaunchError(f"zlaunch ui needs {' and '.join(missing)}: pip install 'zlaunch[ui]'")


def listen(host: str, port: int) -> socket.socket:
    """Return a socket that listens; port 0 takes a free one. Raises LaunchError."""
    try:
        family, _, _, _, where = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)[0]
        listener = socket.socket(family, socket.SOCK_STREAM)
        try:
            listener.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
            listener.bind(where)
            listener.listen(128)
        except BaseException:
            listener.close()
            raise
    except OSError as error:
        text = f"cannot listen at {host}, port {port}: {error.strerror}"
        raise LaunchError(text + ("; --port 0 takes a free port" if port else "")) from None
    return listener


def serve(board: Board, access: PageAccess, listener: socket.socket) -> None:
    """Answer requests until SIGINT or SIGTERM."""
    import uvicorn

    config = uvicorn.Config(
        make_app(board, access),
        http="h11",
        ws="none",
        lifespan="off",
        loop="asyncio",
        log_config=None,
        log_level="error",
        access_log=False,
        proxy_headers=False,
        server_header=False,
        timeout_graceful_shutdown=1,
    )
    # an answer that is under way at the end is not finished, which uvicorn logs with a traceback
    logging.getLogger("uvicorn.error").addFilter(_is_no_cancellation)
    # uvicorn raises the signal again after it has ended; the caller removes its files then
    signal.signal(signal.SIGTERM, signal.default_int_handler)
    try:
        uvicorn.Server(config).run(sockets=[listener])
    except KeyboardInterrupt:
        pass


def _is_no_cancellation(record: logging.LogRecord) -> bool:
    return record.exc_info is None or not isinstance(record.exc_info[1], asyncio.CancelledError)


def make_app(board: Board, access: PageAccess) -> ASGIApp:
    """Return the application: the pages behind the check of Note [Who may see the pages]."""
    from starlette.applications import Starlette
    from starlette.responses import HTMLResponse, Response
    from starlette.routing import Route

    def answer(make: Callable[[Request], Page]) -> Callable[[Request], Response]:
        def respond(request: Request) -> Response:
            try:
                page = make(request)
            except LaunchError as error:
                page = message_page(str(error), 404)
            except OSError as error:
                page = message_page(f"{error.filename or 'a file'}: {error.strerror}", 500)
            is_part = request.query_params.get("part") == "main"
            text = as_text(str(page.main) if is_part else page.whole())
            return HTMLResponse(text, page.code, headers={"x-poll": str(page.poll_s)})

        return respond

    def static(request: Request) -> Response:
        path = _STATIC / str(request.url.path).lstrip("/")
        return Response(path.read_bytes(), media_type=_TYPES[path.suffix])

    def compare(request: Request) -> Page:
        names = list(dict.fromkeys(request.query_params.getlist("run")))
        if not 0 < len(names) <= _MOST_COMPARED:
            return message_page(f"Choose one to {_MOST_COMPARED} runs to compare, not {len(names)}.", 400)
        return runs_page(board.open(names))

    def run(request: Request) -> Page:
        return runs_page(board.open([request.query_params.get("name", "")]))

    def queue(request: Request) -> Page:
        return queue_page(board, shown_jobs(), board.sweeps())

    def sweep(request: Request) -> Page:
        return sweep_page(board, board.open_sweep(request.query_params.get("name", "")))

    def report_style(request: Request) -> Response:
        return Response(STYLE, media_type="text/css")

    routes = [
        Route("/", answer(lambda request: list_page(board, board.runs()))),
        Route("/run", answer(run)),
        Route("/compare", answer(compare)),
        Route("/queue", answer(queue)),
        Route("/sweep", answer(sweep)),
        Route("/report.css", report_style),
        *(Route(f"/{path.name}", static) for path in sorted(_STATIC.iterdir()) if path.suffix in _TYPES),
    ]
    return _Guard(Starlette(routes=routes), access)


class _Guard:
    """Lets requests through that Note [Who may see the pages] allows, and adds headers to all answers."""

    def __init__(self, app: Starlette, access: PageAccess) -> None:
        self._app = app
        self._access = access

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http":
            return
        from starlette.requests import Request

        async def send_with_headers(message: Message) -> None:
            if message["type"] == "http.response.start":
                more = [(name.encode(), value.encode()) for name, value in _HEADERS.items()]
                message = {**message, "headers": [*message["headers"], *more]}
            await send(message)

        app = self._refusal(Request(scope)) or self._app
        await app(scope, receive, send_with_headers)

    def _refusal(self, request: Request) -> Response | None:
        """Return the answer to a request that does not reach the pages."""
        from starlette.responses import PlainTextResponse, RedirectResponse

        if not self._access.knows(request.headers.get("host", "")):
            text = "This Host header names another machine. Open the address that zlaunch ui printed.\n"
            return PlainTextResponse(text, 403)
        given = request.query_params.get("token")
        if given is not None and self._access.holds(given):
            rest = [(name, value) for name, value in request.query_params.multi_items() if name != "token"]
            answer = RedirectResponse(_with_query(request.url.path, rest), 303)
            cookie = self._access.cookie
            answer.set_cookie(cookie, self._access.token, httponly=True, samesite="lax", path="/")
            return answer
        if self._access.holds(request.cookies.get(self._access.cookie, "")):
            return None
        return PlainTextResponse("Open the address with the token that zlaunch ui printed.\n", 403)


def _with_query(path: str, query: Sequence[tuple[str, Any]]) -> str:
    from urllib.parse import quote, urlencode

    where = "/" + quote(path.lstrip("/"))  # `//host` would lead elsewhere
    return f"{where}?{urlencode(query)}" if query else where
