"""A request from its body to the last byte of its answer, whole or streamed."""

from __future__ import annotations

import time
from collections import defaultdict
from collections.abc import AsyncIterator

from fastapi import Request
from fastapi.responses import JSONResponse, Response

from branchwise.engine import FinishReason, Piece
from branchwise.errors import UnknownName, UsageError
from branchwise.serve import journal
from branchwise.serve.lanes import Lane
from branchwise.serve.metrics import Metrics
from branchwise.serve.protocol.failures import Refusal, refusal_of
from branchwise.serve.protocol.prompts import Order
from branchwise.serve.protocol.schema import Asked
from branchwise.serve.protocol.shapes import DONE, FINISH, Parts, Shape, event, usage
from branchwise.serve.protocol.spelling import Spelling
from branchwise.serve.protocol.traces import traced
from branchwise.serve.runner import Runner
from branchwise.serve.speculation import speculative_decoding
from branchwise.serve.web.connection import ClientGone, EventStream, while_connected
from branchwise.serve.web.door import WRITTEN_DOWN
from branchwise.serve.writing import Update

GONE = 499
"""the status in logs of a request whose client left"""


class Answering:
    """One request that was understood, until it is answered and has its line in the journal."""

    def __init__(
        self,
        runner: Runner,
        metrics: Metrics,
        asked: Asked,
        order: Order,
        shape: Shape,
        *,
        lane: Lane | None = None,
        spelling: Spelling | None = None,
    ) -> None:
        """The request is written in a `lane`, by default the server's own. A `spelling` spells the tokens to show."""
        self.metrics = metrics
        self.asked = asked
        self.order = order
        self.shape = shape
        try:
            self.writing = runner.submit(order, lane)
        except (UsageError, UnknownName) as error:
            raise refusal_of(error) from None
        self._spelling = spelling
        metrics.prompt(order.prompt_tokens)
        self._finish: dict[int, FinishReason] = {}
        self._status = 200
        self._closed = False

    @property
    def headers(self) -> dict[str, str]:
        ignored = {"X-Ignored-Fields": ", ".join(self.asked.ignored)} if self.asked.ignored else {}
        return {"X-Request-Id": self.shape.id, **ignored}

    async def respond(self, request: Request) -> Response:
        request.scope[WRITTEN_DOWN] = True
        if self.asked.stream:
            return EventStream(self._events(), self.close, self.headers)
        try:
            return JSONResponse(await while_connected(request, self._whole()), headers=self.headers)
        except ClientGone:
            self._status = GONE
            return Response(status_code=GONE)
        except Refusal as error:
            self._status = error.status
            raise
        finally:
            self.close()

    async def _whole(self) -> Parts:
        pieces: dict[int, list[Piece]] = defaultdict(list)
        async for update in self.writing:
            self._note(update)
            pieces[update.index] += update.pieces
        choices = []
        for index in range(len(self.order.requests)):
            text = self._echo(index) + "".join(piece.text for piece in pieces[index])
            told = [*self._prompt_pieces(index), *pieces[index]]
            choices.append(self.shape.choice(index, text, told, FINISH[self._finish[index]]))
        return self.shape.answer(choices, usage=self._usage(), **self._asked_metrics())

    async def _events(self) -> AsyncIterator[str]:
        counting = {"usage": None} if self.asked.include_usage else {}
        self._status = GONE  # until the last event is sent
        try:
            unopened = set(range(len(self.order.requests)))
            for index in sorted(unopened) if self.order.spelt is None else ():
                unopened.discard(index)
                if (opening := self.shape.opening(index, self._echo(index))) is not None:
                    yield event(self.shape.part([opening], **counting))
            async for update in self.writing:
                self._note(update)
                if update.index in unopened:  # its prompt has been read by now
                    unopened.discard(update.index)
                    told = self._prompt_pieces(update.index)
                    opening = self.shape.opening(update.index, self._echo(update.index), told)
                    yield event(self.shape.part([opening] if opening else [], **counting))
                if update.text or update.finish or update.traces or self.shape.spelling is not None:
                    finish = None if update.finish is None else FINISH[update.finish]
                    first, *others = self.shape.deltas(update.index, update.text, update.pieces, finish)
                    yield event(self.shape.part([first], **counting, **self._traced(update)))
                    for delta in others:
                        yield event(self.shape.part([delta], **counting))
            closing = {"usage": self._usage()} if self.asked.include_usage else {}
            if closing := closing | self._asked_metrics():
                yield event(self.shape.part([], **closing))
            self._status = 200
        except Refusal as error:
            self._status = error.status
            yield event(error.body)
        yield DONE

    def _traced(self, update: Update) -> Parts:
        if not self.asked.trace or self._spelling is None:
            return {}
        return {"branchwise": traced(update.pieces, update.traces, self._spelling)}

    def _note(self, update: Update) -> None:
        """Remember why a text ended; a text that failed fails the request."""
        if update.finish is not None:
            self._finish[update.index] = update.finish
        if update.error is not None or update.finish is FinishReason.ERROR:
            raise self._failure(update)

    def _failure(self, update: Update) -> Refusal:
        """A text that cannot follow its grammar is the client's mistake; any other failure is ours."""
        constraint = self.writing.generations[update.index].constraint
        if constraint is not None and constraint.error is not None:
            field = None if self.asked.wanted is None else self.asked.wanted.field
            return Refusal(400, constraint.error, param=field, code="form_failed")
        return Refusal(500, update.error or "The text could not be written.", code="generation_failed")

    def _echo(self, index: int) -> str:
        return self.order.echoes[index // self.order.choices]

    def _prompt_pieces(self, index: int) -> list[Piece]:
        """The tokens of a prompt that is echoed with logprobs, in the same form as those of the answer."""
        if self.order.spelt is None:
            return []
        spelt, generation = self.order.spelt[index // self.order.choices], self.writing.generations[index]
        [first, *others] = generation.request.prompt
        found = zip(others, spelt[1:], generation.prompt_scores, strict=False)  # fewer scores if it was cut
        rest = [Piece(token, text, False, logprob, top=top) for token, text, (logprob, top) in found]
        return [Piece(first, spelt[0], False, None), *rest]

    @property
    def _written(self) -> int:
        return sum(len(generation.token_ids) for generation in self.writing.generations)

    @property
    def _cached(self) -> int:
        """Tokens of the prompts that came from the KV cache. Only the first choice of each prompt counts: the others
        take all of theirs from it."""
        return sum(generation.stats.reused_tokens for generation in self.writing.generations[:: self.order.choices])

    def _usage(self) -> Parts:
        return usage(self.order.prompt_tokens, self._written, self._cached)

    def _speculation(self) -> Parts:
        return speculative_decoding(generation.stats for generation in self.writing.generations)

    def _asked_metrics(self) -> Parts:
        return {"metrics": {"speculative_decoding": self._speculation()}} if self.asked.metrics else {}

    def close(self) -> None:
        """Free what still runs, count the request, and write its line in the journal."""
        if self._closed:
            return
        self._closed = True
        self.writing.cancel()
        seconds, writing = time.perf_counter() - self.writing.began, self.writing
        reasons = [self._reason(index) for index in range(len(self.order.requests))]
        self.metrics.answered(reasons, seconds, writing.first, self._written, len(reasons))
        journal.write(
            event="request",
            id=self.shape.id,
            kind=self.shape.whole,
            status=self._status,
            stream=bool(self.asked.stream),
            texts=len(reasons),
            prompt_tokens=self.order.prompt_tokens,
            cached_tokens=self._cached,
            completion_tokens=self._written,
            finish_reasons=sorted(set(reasons)),
            seconds=round(seconds, 4),
            first_token_seconds=None if writing.first is None else round(writing.first, 4),
            ignored=self.asked.ignored,
            speculative_decoding=self._speculation(),
        )

    def _reason(self, index: int) -> str:
        found = self._finish.get(index)
        if found in (FinishReason.STOP, FinishReason.LENGTH):
            return str(found)
        return "error" if found is FinishReason.ERROR else "abort"
