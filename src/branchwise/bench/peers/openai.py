"""Any OpenAI-compatible server, asked through `/v1/completions` with a stream.

Prompts go as token ids. A server that takes only text gets the text, and its own count of the prompt's tokens must be
ours: otherwise it would continue another prompt than everyone else.
"""

from __future__ import annotations

import http.client
import json
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import contextmanager
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

from branchwise.audit.server import NEUTRAL, Refused, Server, message_of, reason_of
from branchwise.bench.contest import Answer, Asked
from branchwise.bench.records import PEER
from branchwise.errors import UsageError
from branchwise.llm import LLM

TIMEOUT = 300.0
"""seconds without a sign of life; a server may have others to serve, or still be loading"""

REFUSING = (400, 413, 422, 501)
"""answers that say: not in this form"""


@dataclass
class Told:
    """What the stream of one answer has told so far."""

    text: str = ""
    ids: list[int] | None = None
    finish_reason: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    first_token: float | None = None
    """seconds from the request"""


class OpenAI:
    """Prompts of a batch are sent at once, each in a request of its own."""

    kind = PEER
    comparable = False
    usage = "openai:URL,model=NAME"

    def __init__(self, place: str | None, *, name: str, llm: LLM, threads: int | None = None) -> None:
        if place is None:
            raise UsageError(f"Peer 'openai' needs the address of a server; write it as {self.usage}.")
        url, _, model = place.partition(",model=")
        self.name = name
        self.server = StreamingServer(url.strip(), model=model.strip() or None, timeout=TIMEOUT)
        self._llm = llm
        # Richest first. Extras are no part of OpenAI's protocol, and text is not what everyone else starts from.
        self._forms = [(ids, extras) for ids in (True, False) for extras in (True, False)]
        self._settled = False

    def forget(self) -> None: ...

    def write(self, prompts: Sequence[Sequence[int]], asked: Asked) -> list[Answer]:
        _ = self.server.model
        if not self._settled:
            self._settle(prompts[0][:1], asked)  # one token, so that a server remembers nothing of the prompt
        with ThreadPoolExecutor(len(prompts)) as pool:
            jobs = [(prompt, asked, asked.seeds[number : number + 1]) for number, prompt in enumerate(prompts)]
            start = time.perf_counter()
            found = list(pool.map(lambda job: self._ask(*job), jobs))
            seconds = time.perf_counter() - start
        return [self._answer(told, len(prompt), seconds) for told, prompt in zip(found, prompts, strict=True)]

    def _settle(self, prompt: Sequence[int], asked: Asked) -> None:
        """Find the richest form that the server takes, before any clock runs."""
        while not self._settled:
            try:
                self._ask(prompt, asked, asked.seeds[:1], most=1)
                self._settled = True
            except Refused:
                if len(self._forms) == 1:
                    raise
                del self._forms[0]

    def _ask(self, prompt: Sequence[int], asked: Asked, seeds: Sequence[int], most: int | None = None) -> Told:
        ids, extras = self._forms[0]
        payload: dict[str, Any] = {
            "prompt": list(prompt) if ids else self._llm.tokenizer.decode(list(prompt), skip_special_tokens=False),
            "max_tokens": most or asked.max_new_tokens,
            "temperature": asked.temperature,
            "top_p": asked.top_p,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if seeds:
            payload["seed"] = seeds[0] % (1 << 31)
        if asked.forbidden:
            payload["logit_bias"] = {str(token): -100 for token in sorted(asked.forbidden)}
        if extras:
            payload |= {**NEUTRAL, "top_k": asked.top_k or -1, "return_token_ids": True}
            # Every request pays for its own prefill, as everyone's does: in the words of llama.cpp and of vLLM.
            payload |= {"cache_prompt": False, "cache_salt": uuid.uuid4().hex}
            payload |= {"stop_token_ids": sorted(asked.stop_tokens)} if asked.stop_tokens else {"ignore_eos": True}
            payload |= {} if ids else {"add_special_tokens": False}
        return self.server.stream(payload)

    def _answer(self, told: Told, prompt_tokens: int, seconds: float) -> Answer:
        counted = told.usage.get("prompt_tokens")
        if isinstance(counted, int) and counted != prompt_tokens:
            raise UsageError(
                f"The server at {self.server.url} read a prompt of {prompt_tokens} tokens as {counted}, so it would "
                "continue another text; serve the same model, and by a server that takes token ids."
            )
        answer = Answer(
            ids=told.ids or [],
            finish_reason="stop" if told.finish_reason == "stop" else "length",
            seconds=seconds,
            text=told.text,
            phases={} if told.first_token is None else {"prefill": told.first_token},
        )
        if told.ids is None:
            tokens = told.usage.get("completion_tokens")
            answer.tokens = tokens if isinstance(tokens, int) else None
            answer.ids = list(self._llm.tokenizer(told.text, add_special_tokens=False, verbose=False)["input_ids"])
            answer.counted_by = "retokenised" if answer.tokens is None else "usage"
        return answer


class StreamingServer(Server):
    """The server that audits know, with answers that come as a stream."""

    @cached_property
    def model(self) -> str:
        """The name to ask for: the given one, or the first that the server lists."""
        if self._model is not None:
            return self._model
        with self._open("/v1/models") as reply:
            body = reply.read()
        try:
            return str(json.loads(body)["data"][0]["id"])
        except (ValueError, KeyError, IndexError, TypeError):
            raise UsageError(
                f"The server at {self.url} lists no model; name one as openai:{self.url},model=NAME."
            ) from None

    def stream(self, payload: dict[str, Any]) -> Told:
        told = Told()
        start = time.perf_counter()
        with self._open("/v1/completions", {"model": self.model, **payload}) as reply:
            for event in self._events(reply):
                self._hear(event, told, start)
        if told.finish_reason is None:
            raise self._broken()
        return told

    def _events(self, reply: http.client.HTTPResponse) -> Iterator[Any]:
        """The JSON objects of a stream. A server that does not stream sends one, without `data:`."""
        bare = b""
        streaming = False
        for line in reply:
            kind, colon, data = line.strip().partition(b":")
            if kind == b"data" and colon:
                streaming = True
                if data.strip() == b"[DONE]":
                    return
                yield self._parse(data)
            elif not streaming:
                bare += line
        if not streaming:
            yield self._parse(bare)

    def _parse(self, data: bytes) -> Any:
        try:
            return json.loads(data)
        except ValueError:
            raise UsageError(
                f"The server at {self.url} answered /v1/completions with something that is not JSON; "
                "is it OpenAI-compatible?"
            ) from None

    def _hear(self, event: Any, told: Told, start: float) -> None:
        try:
            if event.get("error"):
                said = event["error"]
                said = said.get("message", said) if isinstance(said, dict) else said
                raise UsageError(
                    f"The server at {self.url} failed in the middle of an answer: {str(said).rstrip('.')}."
                )
            told.usage |= event.get("usage") or {}
            for choice in event["choices"]:
                text, ids = choice.get("text") or "", choice.get("token_ids")
                if (text or ids) and told.first_token is None:
                    told.first_token = time.perf_counter() - start
                told.text += text
                if ids is not None:
                    told.ids = (told.ids or []) + [int(token) for token in ids]
                told.finish_reason = choice.get("finish_reason") or told.finish_reason
        except (KeyError, TypeError, ValueError, AttributeError):
            raise UsageError(
                f"The server at {self.url} returned a completion in a form that OpenAI's protocol does not have."
            ) from None

    @contextmanager
    def _open(self, path: str, payload: dict[str, Any] | None = None) -> Iterator[http.client.HTTPResponse]:
        """A reply that is still coming in; whatever goes wrong while it is read is one sentence."""
        body = None if payload is None else json.dumps(payload).encode()
        request = urllib.request.Request(self.url + path, data=body, headers=self._headers)
        try:
            reply = self._opener.open(request, timeout=self.timeout)
        except urllib.error.HTTPError as error:
            raise self._refusal(path, error.code, message_of(error)) from None
        except (OSError, http.client.HTTPException) as error:
            reason = error.reason if isinstance(error, urllib.error.URLError) else error
            if isinstance(reason, TimeoutError):
                raise self._silent() from None
            raise UsageError(f"No server answers at {self.url}: {reason_of(reason)}.") from None
        with reply:
            try:
                yield reply
            except TimeoutError:
                raise self._silent() from None
            except (OSError, http.client.HTTPException):
                raise self._broken() from None

    def _refusal(self, path: str, code: int, message: str) -> UsageError:
        hint = {
            401: " Give a key in OPENAI_API_KEY.",
            403: " Give a key in OPENAI_API_KEY.",
            404: " Is it an OpenAI-compatible server, and is the model's name right?",
        }.get(code, "")
        kind = Refused if code in REFUSING else UsageError
        return kind(f"The server at {self.url} answered {path} with {code}: {message}.{hint}")

    def _silent(self) -> UsageError:
        return UsageError(
            f"The server at {self.url} said nothing for {self.timeout:g} seconds; is it still loading, or stuck?"
        )

    def _broken(self) -> UsageError:
        return UsageError(f"The server at {self.url} closed the stream before the answer ended; look into its log.")
