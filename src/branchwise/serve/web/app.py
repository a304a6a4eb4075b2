"""The paths of the server."""

from __future__ import annotations

import asyncio
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from functools import cached_property
from typing import Any, TypeVar

from fastapi import FastAPI, Request
from fastapi.responses import JSONResponse, Response
from prometheus_client import CONTENT_TYPE_LATEST
from starlette.middleware.cors import CORSMiddleware
from starlette.types import ASGIApp

from branchwise.draft.head.shipped import shipped_head
from branchwise.errors import BranchwiseError
from branchwise.serve.lanes import Lane
from branchwise.serve.metrics import Metrics
from branchwise.serve.protocol import failures
from branchwise.serve.protocol.choosing import check_task, chosen, offered, refuse_choice
from branchwise.serve.protocol.failures import Refusal, refusal_of
from branchwise.serve.protocol.prompts import Prompts
from branchwise.serve.protocol.schema import (
    Asked,
    ChatAsked,
    CompletionAsked,
    DetokenizeAsked,
    Form,
    TokenizeAsked,
    parse,
)
from branchwise.serve.protocol.shapes import ChatShape, CompletionShape, Shape
from branchwise.serve.protocol.spelling import Spelling
from branchwise.serve.runner import Runner, State
from branchwise.serve.settings import Settings
from branchwise.serve.web import openapi
from branchwise.serve.web.answering import Answering
from branchwise.serve.web.connection import read_body
from branchwise.serve.web.door import NOT_READY, WHO, Door
from branchwise.serve.web.playground import add_pages

METRICS_HEADER = "x-branchwise-metrics"
F = TypeVar("F", bound=Form)
T = TypeVar("T")


class Service:
    """What all paths share."""

    def __init__(self, runner: Runner, settings: Settings) -> None:
        self.runner = runner
        self.settings = settings
        self.metrics = Metrics(runner, settings.names[0])
        self.since = int(time.time())
        self._tokenizer = ThreadPoolExecutor(1, thread_name_prefix="tokenizer")

    @cached_property
    def prompts(self) -> Prompts:
        assert self.runner.llm is not None
        return Prompts(self.runner.llm, self.settings.limits)

    @cached_property
    def spelling(self) -> Spelling:
        assert self.runner.llm is not None
        return Spelling(self.runner.llm)

    async def read(self, request: Request, form: type[F]) -> F:
        """The parsed request."""
        asked = parse(form, await read_body(request, self.settings.limits), self.settings.limits)
        named = asked.model_dump(include={"model"}).get("model")
        if named is not None and named not in self.settings.names:
            said = f"This server has no such model; it has {self.settings.names[0]}."
            raise Refusal(404, said, param="model", code="model_not_found")
        return asked

    async def tokenizing(self, work: Callable[..., T], *arguments: Any) -> T:
        """Turn texts into tokens on another thread: long texts take a while, and the event loop goes on meanwhile."""
        return await asyncio.get_running_loop().run_in_executor(self._tokenizer, work, *arguments)

    async def answer(self, request: Request, form: type[Asked], shape: type[Shape]) -> Response:
        asked = await self.read(request, form)
        asked.metrics = asked.metrics or request.headers.get(METRICS_HEADER, "").lower() in ("1", "true")
        who = None if self.settings.share_prefixes else request.scope[WHO]
        order = await self.tokenizing(self.prompts.order, asked, who)
        if self.runner.state is not State.READY:  # the server may have begun to end since the request came in
            raise Refusal(503, NOT_READY[self.runner.state])
        made = shape(self.settings.names[0], self.spelling if asked.wants_logprobs else None, order.reading)
        spelling = self.spelling if asked.trace else None
        lane = await self.lane(asked)
        answering = Answering(self.runner, self.metrics, asked, order, made, lane=lane, spelling=spelling)
        return await answering.respond(request)

    async def lane(self, asked: Asked) -> Lane | None:
        """The lane of a request that names a method, else None. Only the server's own method may draft with a pack."""
        method = chosen(asked, self.settings.method, self.head) if asked.chooses else None
        check_task(asked.task, self.runner.engine.drafter.tasks if method is None else ())
        if method is None:
            return None
        lanes = self.runner.lanes
        if not self.settings.lanes or lanes is None:
            raise refuse_choice()
        try:
            return await asyncio.wrap_future(lanes.find(method))
        except BranchwiseError as error:
            raise refusal_of(error, "method") from None

    @cached_property
    def head(self) -> str | None:
        """The file of the trained head for the model, or None."""
        assert self.runner.llm is not None
        shipped = shipped_head(self.runner.engine.target.info)
        return self.settings.head or (None if shipped is None else str(shipped))

    def model(self, name: str) -> dict[str, Any]:
        context = None if self.runner.llm is None else self.runner.engine.target.info.context
        about = {"object": "model", "created": self.since, "owned_by": "branchwise"}
        return {"id": name, **about, "max_model_len": context}


def create_app(runner: Runner, settings: Settings) -> tuple[ASGIApp, Door]:
    """The app, and the door in front of it, which counts the requests that are inside."""
    service = Service(runner, settings)
    app = FastAPI(docs_url=None, redoc_url=None, openapi_url=None, redirect_slashes=False)
    failures.install(app)
    _completions(app, service)
    _tokens(app, service)
    _status(app, service)
    if settings.playground:
        add_pages(app)
    door = Door(app, runner, settings, service.metrics)
    if not settings.origins:
        return door, door
    # Outside the door, because a browser asks without a key whether it may ask.
    headers = ["Authorization", "Content-Type", METRICS_HEADER]
    return CORSMiddleware(door, settings.origins, allow_methods=["GET", "POST"], allow_headers=headers), door


def _completions(app: FastAPI, service: Service) -> None:
    @app.post("/v1/completions")
    async def completions(request: Request) -> Response:
        return await service.answer(request, CompletionAsked, CompletionShape)

    @app.post("/v1/chat/completions")
    async def chat(request: Request) -> Response:
        return await service.answer(request, ChatAsked, ChatShape)


def _tokens(app: FastAPI, service: Service) -> None:
    @app.post("/tokenize")
    async def tokenize(request: Request) -> Response:
        asked = await service.read(request, TokenizeAsked)
        prompts = service.prompts
        if asked.messages:
            tokens = await service.tokenizing(prompts.conversation, asked.messages)
        else:
            tokens = await service.tokenizing(prompts.tokens, asked.prompt, asked.add_special_tokens)
        strings = [service.spelling.text(token) for token in tokens] if asked.return_token_strs else None
        found = {"count": len(tokens), "max_model_len": prompts.context, "tokens": tokens, "token_strs": strings}
        return JSONResponse(found)

    @app.post("/detokenize")
    async def detokenize(request: Request) -> Response:
        asked = await service.read(request, DetokenizeAsked)
        return JSONResponse({"prompt": await service.tokenizing(service.prompts.text, asked.tokens)})


def _status(app: FastAPI, service: Service) -> None:
    runner, names = service.runner, service.settings.names

    @app.get("/v1/models")
    async def models() -> Response:
        return JSONResponse({"object": "list", "data": [service.model(name) for name in names]})

    @app.get("/v1/models/{name:path}")
    async def model(name: str) -> Response:
        if name not in names:
            raise Refusal(404, "This server has no such model.", param="model", code="model_not_found")
        return JSONResponse(service.model(name))

    @app.get("/v1/methods")
    async def methods() -> Response:
        if runner.llm is None:
            raise Refusal(503, NOT_READY[runner.state])
        settings = service.settings
        # The first call tries every drafter with every tree, which takes a while.
        known = settings.method, service.head, settings.lanes, runner.engine.drafter.tasks
        return JSONResponse(await service.tokenizing(offered, *known))

    @app.get("/health")
    async def health() -> Response:
        """Whether the process should live on."""
        return JSONResponse({"status": runner.state}, 503 if runner.state is State.BROKEN else 200)

    @app.get("/ready")
    async def ready() -> Response:
        """Whether requests should be sent here."""
        return JSONResponse({"status": runner.state}, 200 if runner.state is State.READY else 503)

    @app.get("/metrics")
    async def metrics() -> Response:
        return Response(service.metrics.page(), media_type=CONTENT_TYPE_LATEST)

    document = openapi.document(service.settings)

    @app.get(openapi.PATH)
    async def described() -> Response:
        return JSONResponse(document)
