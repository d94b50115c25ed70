"""The site's link to the server: takes the SuperNode's requests on loopback and carries them over mutual TLS.

Flower's SuperNode can't present a client certificate, so it talks to this process, which can. It also turns the
SuperNode's poll for messages (every three seconds, fixed in Flower) into a long poll: an empty answer is held back and
the question asked again, so that a message is taken up at once.
"""

import asyncio
import re
import ssl
import time

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

POLL_PATH = "/v1/fleet/pull-messages"
HOLD_S = 20.0
"""How long an empty answer is held back: below the 30 s after which the SuperNode gives up."""
BUSY_POLL_S, IDLE_POLL_S, BUSY_FOR_S = 0.1, 1.0, 60.0
LARGEST_BODY = 16 << 20
_HOP = frozenset({"host", "connection", "content-length", "transfer-encoding", "accept-encoding", "keep-alive"})
_NOT_BACK = _HOP | {"content-encoding", "date"}
_NAME = re.compile(r"[a-z-]+")


class Link:
    """Forwards to one server. `busy`: something arrived lately, so more may come soon."""

    def __init__(self, server: str, context: ssl.SSLContext) -> None:
        self._client = httpx.AsyncClient(base_url=f"https://{server}", verify=context, timeout=60.0)
        self._last_message = time.monotonic()

    async def forward(self, request: Request) -> Response:
        if not _NAME.fullmatch(request.path_params["name"]):  # httpx would resolve "..", and leave the fleet API
            return Response(status_code=404)
        body = await request.body()
        if len(body) > LARGEST_BODY:
            return Response(status_code=413)
        headers = [(name, value) for name, value in request.headers.raw if name.decode("latin-1") not in _HOP]
        until = time.monotonic() + HOLD_S
        while True:
            try:
                answer = await self._client.post(request.url.path, content=body, headers=headers)
            except (httpx.TransportError, ssl.SSLError):  # a TLS alert after the handshake comes as it is
                return Response("the server can't be reached", status_code=503)
            if request.url.path != POLL_PATH or answer.status_code != httpx.codes.OK:
                break
            if answer.content:
                self._last_message = time.monotonic()
                break
            if time.monotonic() >= until or await request.is_disconnected():
                break
            busy = time.monotonic() - self._last_message < BUSY_FOR_S
            await asyncio.sleep(BUSY_POLL_S if busy else IDLE_POLL_S)
        kept = {name: value for name, value in answer.headers.items() if name not in _NOT_BACK}
        return Response(answer.content, answer.status_code, kept)

    def app(self) -> Starlette:
        return Starlette(routes=[Route("/v1/fleet/{name}", self.forward, methods=["POST"])])
