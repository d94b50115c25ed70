"""The site's link to the server: takes the SuperNode's requests on loopback and carries them over mutual TLS.

Flower's SuperNode can't present a client certificate, so it talks to this process, which can. It also mends two waits
that are fixed in Flower: the SuperNode's poll for messages every three seconds becomes a long poll (an empty answer is
held back and the question asked again; so are answers that an object isn't there yet, or that the server can't answer
now), and a SuperNode that was killed need not wait for a minute until the SuperLink believes that it was: the link
takes its old activation back, with the proof of identity that the new one brings.

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

from fedplat.flower.fleet import (
    ACTIVATE,
    DEACTIVATE,
    HEARTBEAT,
    PULL_MESSAGES,
    PULL_OBJECT,
    STILL_ACTIVE,
    activated_node,
    deactivation,
)
from fedplat.flower.objects import is_not_there_yet
from fedplat.polling import Patience

HOLD_S = 20.0
"""How long an empty answer is held back: below the 30 s after which the SuperNode gives up."""
FIRST_POLL_S, LONGEST_POLL_S = 0.05, 1.0
RETRY_S = 0.2
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
        self._patience = Patience(FIRST_POLL_S, LONGEST_POLL_S)

    async def forward(self, request: Request) -> Response:
        if not _NAME.fullmatch(request.path_params["name"]):  # httpx would resolve "..", and leave the fleet API
            return Response(status_code=404)
        path, body = request.url.path, await _body(request)
        if body is None:
            return Response(status_code=413)
        headers = [(name, value) for name, value in request.headers.raw if name.decode("latin-1").lower() not in _HOP]
        headers.append((b"accept-encoding", b"identity"))
        try:
            if path == ACTIVATE:
                answer = await self._activate(body, headers)
            else:
                answer = await self._ask_until(request, path, body, headers)
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

    async def _ask_until(self, request: Request, path: str, body: bytes, headers: Headers) -> Answer:
        """Ask until there is an answer for the SuperNode, or until it would give up."""
        until = time.monotonic() + HOLD_S
        while True:
            answer = await self._ask(path, body, headers)
            pause_s = self._pause_s(path, answer)
            if pause_s is None or time.monotonic() >= until or await request.is_disconnected():
                break
            await asyncio.sleep(pause_s)
        if path != HEARTBEAT and (path != PULL_MESSAGES or answer.content):
            self._patience.restart()  # something goes on: a request may follow soon
        return answer

    def _pause_s(self, path: str, answer: Answer) -> float | None:
        """When to ask again in the SuperNode's place; None: the answer is for the SuperNode."""
        if answer.status_code >= httpx.codes.INTERNAL_SERVER_ERROR:
            return RETRY_S  # the server's database is locked, and the SuperNode would drop its message
        if answer.status_code != httpx.codes.OK:
            return None
        if path == PULL_MESSAGES and not answer.content:
            return self._patience.pause_s()
        return FIRST_POLL_S if path == PULL_OBJECT and is_not_there_yet(answer.content) else None

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
