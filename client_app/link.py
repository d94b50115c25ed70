"""The site's link to the server: takes the SuperNode's requests on loopback and carries them over mutual TLS.

Flower's SuperNode can't present a client certificate, so it talks to this process, which can. It also turns the
SuperNode's poll for messages (every three seconds, fixed in Flower) into a long poll: an empty answer is held back and
the question asked again, so that a message is taken up at once. So are the answers that an object isn't there yet, and
that the server has no answer now.
"""

import asyncio
import ssl
import time

import httpx
from starlette.applications import Starlette
from starlette.requests import Request
from starlette.responses import Response
from starlette.routing import Route

from fedplat.flower.objects import is_not_there_yet
from fedplat.polling import Patience

POLL_PATH, OBJECT_PATH, HEARTBEAT_PATH = (
    f"/v1/fleet/{call}" for call in ("pull-messages", "pull-object", "send-node-heartbeat")
)
HOLD_S = 20.0
"""How long an empty answer is held back: below the 30 s after which the SuperNode gives up."""
FIRST_POLL_S, LONGEST_POLL_S = 0.05, 1.0
RETRY_S = 0.2
LARGEST_BODY = 16 << 20
_HOP = frozenset({"host", "connection", "content-length", "transfer-encoding", "accept-encoding", "keep-alive"})
_NOT_BACK = _HOP | {"content-encoding", "date"}


class Link:
    """Forwards to one server."""

    def __init__(self, server: str, context: ssl.SSLContext) -> None:
        self._client = httpx.AsyncClient(base_url=f"https://{server}", verify=context, timeout=60.0)
        self._patience = Patience(FIRST_POLL_S, LONGEST_POLL_S)

    async def forward(self, request: Request) -> Response:
        body = await request.body()
        if len(body) > LARGEST_BODY:
            return Response(status_code=413)
        headers = {name: value for name, value in request.headers.items() if name not in _HOP}
        path, until = request.url.path, time.monotonic() + HOLD_S
        while True:
            try:
                answer = await self._client.post(path, content=body, headers=headers)
            except httpx.TransportError:
                return Response("the server can't be reached", status_code=503)
            pause_s = self._pause_s(path, answer)
            if pause_s is None or time.monotonic() >= until or await request.is_disconnected():
                break
            await asyncio.sleep(pause_s)
        if path != HEARTBEAT_PATH and (path != POLL_PATH or answer.content):
            self._patience.restart()  # something goes on: a request may follow soon
        kept = {
            name: value for name, value in answer.headers.items() if name not in _HOP | {"content-encoding", "date"}
        }
        return Response(answer.content, answer.status_code, kept)

    def _pause_s(self, path: str, answer: httpx.Response) -> float | None:
        """When to ask again in the SuperNode's place; None: the answer is for the SuperNode."""
        if answer.is_server_error:  # the server's database is locked, and the SuperNode would drop its message
            return RETRY_S
        if answer.status_code != httpx.codes.OK:
            return None
        if path == POLL_PATH and not answer.content:
            return self._patience.pause_s()
        return FIRST_POLL_S if path == OBJECT_PATH and is_not_there_yet(answer.content) else None

    def app(self) -> Starlette:
        return Starlette(routes=[Route("/v1/fleet/{rest:path}", self.forward, methods=["POST"])])
