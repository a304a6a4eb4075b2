"""The door: what is decided before a request is read. Does it have a key, is the model ready, are too many inside?"""

from __future__ import annotations

import asyncio
import hashlib
import hmac
from collections.abc import Sequence

from fastapi import Request
from starlette.types import ASGIApp, Message, Receive, Scope, Send

from branchwise.serve import journal
from branchwise.serve.metrics import Metrics
from branchwise.serve.protocol.failures import Refusal
from branchwise.serve.runner import Runner, State
from branchwise.serve.settings import Settings

KEPT = ("/v1/", "/tokenize", "/detokenize")
"""paths that need a key, if the server has keys; health and metrics are for those who run the server"""
WRITTEN_DOWN = "branchwise.written_down"
"""set in the scope of a request that has, or will have, a line of its own in the journal"""

WHO = "branchwise.who"
"""where the scope of a request holds the number of its key"""

NOT_READY = {
    State.LOADING: "The model is loading; try again later.",
    State.DRAINING: "The server is ending; ask another one, or try again later.",
    State.BROKEN: "The engine has failed; the log of the server says how.",
}


class Door:
    """Wraps the whole app, so that a request counts as inside until the last byte of its answer is sent."""

    def __init__(self, app: ASGIApp, runner: Runner, settings: Settings, metrics: Metrics) -> None:
        self.app = app
        self.runner = runner
        self.settings = settings
        self.metrics = metrics
        self.inside = 0
        self.empty = asyncio.Event()
        self.empty.set()

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        if scope["type"] != "http" or not scope["path"].startswith(KEPT):
            return await self.app(scope, receive, send)

        async def noting(message: Message) -> None:
            if message["type"] == "http.response.start" and message["status"] >= 400:
                self._note(scope, message["status"])
            await send(message)

        try:
            self._admit(Request(scope))
        except Refusal as refusal:
            return await refusal.response(scope, receive, noting)
        self.inside += 1
        self.empty.clear()
        try:
            await self.app(scope, receive, noting)
        except Exception as error:  # the client has got a 500; the error may hold anything
            journal.write_failure("a request", error)
        finally:
            self.inside -= 1
            if not self.inside:
                self.empty.set()

    def _admit(self, request: Request) -> None:
        request.scope[WHO] = check_key(request, self.settings.keys)
        if request.method != "POST":
            return
        if self.runner.state is not State.READY:
            raise Refusal(503, NOT_READY[self.runner.state], code=f"server_{self.runner.state}")
        if self.inside >= self.settings.limits.requests:
            said = f"{self.inside} requests are being answered already, which is as many as may be; try again later."
            raise Refusal(429, said, code="too_many_requests")

    def _note(self, scope: Scope, status: int) -> None:
        self.metrics.refused(status)
        if not scope.get(WRITTEN_DOWN):
            journal.write(event="refused", path=scope["path"][:80], status=status)


def check_key(request: Request, keys: Sequence[str]) -> int | None:
    """The number of the key that a request brings. If the server has keys, a request without one is refused. The
    comparison takes equally long for all keys, so that its time reveals nothing about them."""
    if not keys:
        return None
    scheme, _, given = request.headers.get("authorization", "").partition(" ")
    digest = hashlib.sha256(given.strip().encode("utf-8", "surrogateescape")).digest()
    same = [hmac.compare_digest(digest, hashlib.sha256(key.encode()).digest()) for key in keys]
    if scheme.lower() != "bearer" or not any(same):
        headers = {"WWW-Authenticate": "Bearer"}
        raise Refusal(401, "The API key is missing or wrong.", code="invalid_api_key", headers=headers)
    return same.index(True)
