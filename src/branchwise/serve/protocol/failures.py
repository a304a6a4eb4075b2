"""Errors in OpenAI's form, {"error": {"message", "type", "param", "code"}}, with the status that clients expect."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse
from starlette.exceptions import HTTPException

from branchwise.errors import BranchwiseError, QueueFull

TYPES = {401: "authentication_error", 404: "not_found_error", 405: "invalid_request_error", 429: "rate_limit_error"}
"""types of the statuses below 500 that are not simply an invalid request"""
RETRY_SECONDS = "1"


class Refusal(Exception):
    """An answer that is an error, raised."""

    def __init__(
        self,
        status: int,
        message: str,
        *,
        param: str | None = None,
        code: str | None = None,
        headers: Mapping[str, str] | None = None,
    ) -> None:
        super().__init__(message)
        self.status = status
        self.param = param
        self.code = code
        self.headers = dict(headers or {})
        if status in (429, 503):
            self.headers.setdefault("Retry-After", RETRY_SECONDS)

    @property
    def body(self) -> dict[str, Any]:
        kind = TYPES.get(self.status, "invalid_request_error" if self.status < 500 else "server_error")
        return {"error": {"message": str(self), "type": kind, "param": self.param, "code": self.code}}

    @property
    def response(self) -> JSONResponse:
        return JSONResponse(self.body, self.status, self.headers)


def refusal_of(error: BranchwiseError, param: str | None = None) -> Refusal:
    """A refusal for a mistake that the engine found in a request."""
    if isinstance(error, QueueFull):
        return Refusal(429, str(error), code="queue_full")
    return Refusal(400, str(error), param=param)


def install(app: FastAPI) -> None:
    """Send every error of the app in this form, those of unknown paths, wrong methods and bugs included."""

    async def refused(request: Request, error: Any) -> JSONResponse:
        found: Refusal = error
        return found.response

    async def unknown(request: Request, error: Any) -> JSONResponse:
        found: HTTPException = error
        message = {404: "There is nothing at this path.", 405: "This path takes another method."}
        said = message.get(found.status_code, str(found.detail))
        return Refusal(found.status_code, said, headers=found.headers).response

    async def failed(request: Request, error: Exception) -> JSONResponse:
        return Refusal(500, "The server failed on this request; its log says how.").response

    app.add_exception_handler(Refusal, refused)
    app.add_exception_handler(HTTPException, unknown)
    app.add_exception_handler(Exception, failed)
