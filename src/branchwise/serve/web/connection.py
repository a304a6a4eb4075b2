"""The connection to a client: a body read within its limits, and events that stop when the client is gone."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Callable, Coroutine, Mapping
from typing import Any, TypeVar

from fastapi import Request
from fastapi.responses import StreamingResponse
from starlette.types import Receive, Scope, Send

from branchwise.serve.protocol.failures import Refusal
from branchwise.serve.settings import Limits

T = TypeVar("T")


class ClientGone(Exception):
    """The client has left and does not wait for the answer any more."""


async def read_body(request: Request, limits: Limits) -> bytes:
    """The body of a request. A body that is too large is refused as soon as that is known, whatever its headers say."""
    too_large = Refusal(413, f"A request may have {limits.body_bytes} bytes at most.", code="body_too_large")
    stated = request.headers.get("content-length", "0")
    if not stated.isdecimal() or len(stated) > 18 or int(stated) > limits.body_bytes:
        raise too_large
    body = bytearray()
    try:
        async with asyncio.timeout(limits.body_seconds):
            async for chunk in request.stream():
                body += chunk
                if len(body) > limits.body_bytes:
                    raise too_large
    except TimeoutError:
        raise Refusal(408, "The body of the request did not arrive in time.", code="timeout") from None
    return bytes(body)


async def while_connected(request: Request, work: Coroutine[Any, Any, T]) -> T:
    """The result of some work. If the client leaves before, the work is cancelled, and `ClientGone` raised."""
    working, watching = asyncio.create_task(work), asyncio.create_task(_gone(request))
    try:
        await asyncio.wait({working, watching}, return_when=asyncio.FIRST_COMPLETED)
        if working.done():
            return working.result()
        raise ClientGone
    finally:
        for task in (working, watching):
            task.cancel()
        await asyncio.gather(working, watching, return_exceptions=True)


async def _gone(request: Request) -> None:
    while (await request.receive())["type"] != "http.disconnect":
        pass


class EventStream(StreamingResponse):
    """Server-sent events; `on_close` is called when the stream ends, for whatever reason."""

    def __init__(self, events: AsyncIterator[str], on_close: Callable[[], None], headers: Mapping[str, str]) -> None:
        # A proxy that buffers or changes the stream would hold tokens back.
        headers = {"Cache-Control": "no-cache, no-transform", "X-Accel-Buffering": "no", **headers}
        super().__init__(events, headers=headers, media_type="text/event-stream")
        self._on_close = on_close

    async def __call__(self, scope: Scope, receive: Receive, send: Send) -> None:
        try:
            await super().__call__(scope, receive, send)
        finally:
            self._on_close()
