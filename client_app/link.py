"""The site's link to the server: takes the SuperNode's requests on loopback and carries them over mutual TLS.

Flower's SuperNode can't present a client certificate, so it talks to this process, which can. It also mends two waits
that are fixed in Flower: the SuperNode's poll for messages every three seconds becomes a long poll (an empty answer is
held back and the question asked again), and a SuperNode that was killed need not wait for a minute until the SuperLink
believes that it was: the link takes its old activation back, with the proof of identity that the new one brings.

Neither side is trusted with memory: bodies are counted while they arrive, and nothing is ever unpacked.
"""

import asyncio
import re
import ssl
import time
from dataclasses import dataclass
from pathlib import Path

import httpx
from starlette.applications import Starlette
from starlette.requests import ClientDisconnect, Request
from starlette.responses import Response
from starlette.routing import Route

from fedplat.flower.fleet import ACTIVATE, DEACTIVATE, PULL_MESSAGES, STILL_ACTIVE, activated_node, deactivation

HOLD_S = 20.0
"""How long an empty answer is held back: below the 30 s after which the SuperNode gives up."""
BUSY_POLL_S, IDLE_POLL_S, BUSY_FOR_S = 0.1, 1.0, 60.0
LARGEST_BODY, LARGEST_ANSWER = 16 << 20, 32 << 20
_HOP = frozenset({"host", "connection", "content-length", "transfer-encoding", "accept-encoding", "keep-alive"})
_NOT_BACK = _HOP | {"content-encoding", "date"}
_NAME = re.compile(r"[a-z-]+")
Headers = list[tuple[bytes, bytes]]


class BadAnswer(Exception):
    """The server's answer is not one that a SuperNode could have asked for."""


@dataclass(frozen=True)
class Answer:
    status_code: int
    headers: dict[str, str]
    content: bytes


class Link:
    """Forwards to one server. `memory` is a file that keeps the node's id over restarts."""

    def __init__(self, server: str, context: ssl.SSLContext, memory: Path) -> None:
        # No proxy, no .netrc: where this goes is written in the kit, not in whoever's environment.
        url = f"https://{server}"
        self._client = httpx.AsyncClient(base_url=url, verify=context, timeout=60.0, trust_env=False)
        self._memory = memory
        self._last_message = time.monotonic()

    async def forward(self, request: Request) -> Response:
        if not _NAME.fullmatch(request.path_params["name"]):  # httpx would resolve "..", and leave the fleet API
            return Response(status_code=404)
        path, body = request.url.path, await _body(request)
        if body is None:
            return Response(status_code=413)
        headers = [(name, value) for name, value in request.headers.raw if name.decode("latin-1").lower() not in _HOP]
        headers.append((b"accept-encoding", b"identity"))
        try:
            if path == PULL_MESSAGES:
                answer = await self._poll(request, body, headers)
            elif path == ACTIVATE:
                answer = await self._activate(body, headers)
            else:
                answer = await self._ask(path, body, headers)
        except BadAnswer as problem:
            return Response(str(problem), status_code=502)
        except (httpx.TransportError, ssl.SSLError):  # a TLS alert after the handshake comes as it is
            return Response("the server can't be reached", status_code=503)
        kept = {name: value for name, value in answer.headers.items() if name not in _NOT_BACK}
        return Response(answer.content, answer.status_code, kept)

    async def _ask(self, path: str, body: bytes, headers: Headers) -> Answer:
        async with self._client.stream("POST", path, content=body, headers=headers) as answer:
            if answer.headers.get("content-encoding", "identity").strip().lower() != "identity":
                raise BadAnswer("the server's answer is compressed, which nobody asked for")
            parts, size = [], 0
            async for part in answer.aiter_raw():
                size += len(part)
                if size > LARGEST_ANSWER:
                    raise BadAnswer(f"the server's answer is larger than {LARGEST_ANSWER >> 20} MiB")
                parts.append(part)
            return Answer(answer.status_code, dict(answer.headers), b"".join(parts))

    async def _poll(self, request: Request, body: bytes, headers: Headers) -> Answer:
        """Ask until there is a message, or until the SuperNode would give up."""
        until = time.monotonic() + HOLD_S
        while True:
            answer = await self._ask(PULL_MESSAGES, body, headers)
            if answer.content:
                self._last_message = time.monotonic()
            over = time.monotonic() >= until or await request.is_disconnected()
            if answer.content or answer.status_code != httpx.codes.OK or over:
                return answer
            busy = time.monotonic() - self._last_message < BUSY_FOR_S
            await asyncio.sleep(BUSY_POLL_S if busy else IDLE_POLL_S)

    async def _activate(self, body: bytes, headers: Headers) -> Answer:
        """A SuperNode starts. If the SuperLink takes its dead predecessor for alive, that one goes first."""
        answer = await self._ask(ACTIVATE, body, headers)
        known = self._known_node()
        if answer.status_code == STILL_ACTIVE and known:
            await self._ask(DEACTIVATE, deactivation(known), headers)
            answer = await self._ask(ACTIVATE, body, headers)
        if answer.status_code == httpx.codes.OK:
            self._memory.write_text(str(activated_node(answer.content)))
        return answer

    def _known_node(self) -> int:
        try:
            return int(self._memory.read_text())
        except (OSError, ValueError):
            return 0

    def app(self) -> Starlette:
        return Starlette(routes=[Route("/v1/fleet/{name}", self.forward, methods=["POST"])])


async def _body(request: Request) -> bytes | None:
    """The request's body, or None as soon as it is too large."""
    told = request.headers.get("content-length", "")
    if told.isdecimal() and int(told[:20]) > LARGEST_BODY:
        return None
    parts, size = [], 0
    try:
        async for part in request.stream():
            size += len(part)
            if size > LARGEST_BODY:
                return None
            parts.append(part)
    except ClientDisconnect:
        return None
    return b"".join(parts)
