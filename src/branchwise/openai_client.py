"""A client of OpenAI-compatible servers, for the audit and the benchmark; every failure is a `UsageError`."""

from __future__ import annotations

import json
import os
import threading
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from functools import cached_property
from typing import Any, TypeVar

import httpx

from branchwise.errors import UsageError

NEUTRAL = {"top_k": -1, "min_p": 0.0, "repetition_penalty": 1.0}
"""values that turn off truncation and penalties that servers have by default; they are outside OpenAI's protocol, so
servers may refuse them"""
PAUSES = (0.5, 2.0)
"""seconds of waiting before a request that a busy server refused is sent again"""
BUSY = (429, 500, 502, 503, 504)
REFUSING = (400, 413, 422, 501)
"""statuses by which a server says that it does not accept a request in this form"""
HINTS = {"key": "Give a key in OPENAI_API_KEY.", "model": "name one", "timeout": "is it still loading, or stuck?"}
"""what to do about a missing key, an unknown model and a timeout; a command may override these with its own options"""

T = TypeVar("T")


class Refused(UsageError):
    """The server does not accept a request in this form, but may accept another form."""


class Client:
    """Requests to one server. `key` defaults to OPENAI_API_KEY, `timeout` is in seconds without a byte."""

    def __init__(
        self,
        url: str,
        *,
        model: str | None = None,
        key: str | None = None,
        timeout: float = 60.0,
        hints: Mapping[str, str] = HINTS,
    ) -> None:
        try:
            host = httpx.URL(url).host if url.startswith(("http://", "https://")) else ""
        except httpx.InvalidURL:
            host = ""
        if not host:
            raise UsageError(f"{url!r} is not the address of a server; one looks like http://127.0.0.1:8000.")
        self.url = url.rstrip("/").removesuffix("/completions").removesuffix("/v1").rstrip("/")
        self.timeout = timeout
        self._model = model
        self._hints = {**HINTS, **hints}
        headers = {"Accept": "application/json"}
        if key := (key or os.environ.get("OPENAI_API_KEY", "")).strip():
            if not (key.isascii() and key.isprintable()):
                raise UsageError("The API key holds characters that cannot be sent.")
            headers["Authorization"] = f"Bearer {key}"
        self._http = httpx.Client(
            headers=headers,
            timeout=timeout,
            follow_redirects=True,
            # A proxy of the system cannot reach a server on this machine.
            trust_env=not (host in ("localhost", "::1") or host.startswith("127.")),
            # A new connection for every request, so that none is stale and every thread can have one.
            limits=httpx.Limits(max_connections=None, max_keepalive_connections=0),
        )

    @cached_property
    def model(self) -> str:
        """The given name of the model, or the first model that the server lists."""
        if self._model is not None:
            return self._model
        found = self.ask("/v1/models")
        try:
            return str(found["data"][0]["id"])
        except (KeyError, IndexError, TypeError):
            raise UsageError(f"The server at {self.url} lists no model; {self._hints['model']}.") from None

    def ask(self, path: str, payload: Mapping[str, Any] | None = None) -> Any:
        """The JSON value of an answer, by GET without a payload and by POST with one. A busy server is asked again."""
        for pause in (*PAUSES, None):
            try:
                reply = self._http.request("GET" if payload is None else "POST", self.url + path, json=payload)
            except httpx.RequestError as error:
                dropped = isinstance(error, httpx.ReadError | httpx.WriteError | httpx.RemoteProtocolError)
                if pause is None or not dropped:
                    raise self._failure(error, path) from None
            else:
                if not reply.is_error:
                    return self._parse(reply.content, path)
                if pause is None or reply.status_code not in BUSY:
                    raise self._refusal(path, reply)
            time.sleep(pause)
        raise AssertionError("the last attempt returns or raises")

    def stream(self, path: str, payload: Mapping[str, Any]) -> Iterator[Any]:
        """The JSON values of a streamed answer as they arrive; a server that does not stream sends one value."""
        begun = False
        try:
            with self._http.stream("POST", self.url + path, json=payload) as reply:
                if reply.is_error:
                    reply.read()
                    raise self._refusal(path, reply)
                begun = True
                yield from self._events(reply, path)
        except httpx.RequestError as error:
            cut_short = begun and not isinstance(error, httpx.TimeoutException)
            raise (self.broken() if cut_short else self._failure(error, path)) from None

    def page(self, path: str) -> str | None:
        """The text at a path, or None if the server has none."""
        try:
            reply = self._http.get(self.url + path)
        except httpx.RequestError:
            return None
        return None if reply.is_error else reply.text

    def broken(self) -> UsageError:
        return UsageError(f"The server at {self.url} closed the stream before the answer ended; look into its log.")

    def malformed(self) -> UsageError:
        return UsageError(f"The server at {self.url} returned a completion in a form that is not in OpenAI's protocol.")

    def _events(self, reply: httpx.Response, path: str) -> Iterator[Any]:
        bare, streaming = b"", False
        for line in _lines(reply):
            kind, colon, data = line.strip().partition(b":")
            if kind == b"data" and colon:
                streaming = True
                if data.strip() == b"[DONE]":
                    return
                yield self._parse(data, path)
            elif not streaming:
                bare += line + b"\n"
        if not streaming:
            yield self._parse(bare, path)

    def _parse(self, data: bytes, path: str) -> Any:
        try:
            return json.loads(data)
        except ValueError:
            raise UsageError(f"The answer of {self.url} to {path} is not JSON; is it OpenAI-compatible?") from None

    def _refusal(self, path: str, reply: httpx.Response) -> UsageError:
        code = reply.status_code
        hints = dict.fromkeys((401, 403), self._hints["key"])
        hints[404] = "Is it an OpenAI-compatible server, and is the model's name right?"
        sentence = f"The server at {self.url} answered {path} with {code}: {_message(reply)}. {hints.get(code, '')}"
        return (Refused if code in REFUSING else UsageError)(sentence.strip())

    def _failure(self, error: httpx.RequestError, path: str) -> UsageError:
        if isinstance(error, httpx.TimeoutException):
            waited = f"gave no answer to {path} within {self.timeout:g} seconds"
            return UsageError(f"The server at {self.url} {waited}; {self._hints['timeout']}")
        return UsageError(f"No server answers at {self.url}: {_reason(error)}.")


class Forms:
    """Forms of a request, the richest first; the first request finds the richest that the server accepts."""

    def __init__(self, forms: Sequence[Any]) -> None:
        self._forms = list(forms)
        self._lock = threading.Lock()
        self.settled = False

    @property
    def best(self) -> Any:
        return self._forms[0]

    def send(self, request: Callable[[Any], T]) -> T:
        """Call `request` with the best form. Threads wait while the first request tries one form after another."""
        with self._lock:
            while not self.settled:
                try:
                    found = request(self.best)
                except Refused:
                    if len(self._forms) == 1:
                        raise
                    del self._forms[0]
                else:
                    self.settled = True
                    return found
        return request(self.best)


def _lines(reply: httpx.Response) -> Iterator[bytes]:
    """Lines that end with a newline. httpx's own `iter_lines` also splits at Unicode separators inside JSON."""
    rest = b""
    for chunk in reply.iter_bytes():
        *lines, rest = (rest + chunk).split(b"\n")
        yield from lines
    yield rest


def _message(reply: httpx.Response) -> str:
    """What the server says about an error, as one line."""
    text = reply.text[:100_000]
    try:
        said = json.loads(text)
        for name in ("error", "message", "detail"):
            if isinstance(said, dict) and name in said:
                said = said[name]
        text = said if isinstance(said, str) else json.dumps(said)
    except ValueError:
        text = "" if text.lstrip().startswith("<") else text
    return " ".join(text.split()).rstrip(".")[:300] or reply.reason_phrase


def _reason(error: BaseException) -> str:
    """The system's reason, such as "Connection refused"; httpx keeps it as the cause of its own exception."""
    inner: BaseException | None = error
    while inner is not None:
        if isinstance(inner, OSError) and inner.strerror:
            return inner.strerror.rstrip(".")
        inner = inner.__cause__ or inner.__context__
    return str(error).rstrip(".") or type(error).__name__
