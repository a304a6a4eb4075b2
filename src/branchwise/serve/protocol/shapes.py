"""Answers in OpenAI's two shapes, as one object and as the chunks of a stream."""

from __future__ import annotations

import json
import time
from abc import ABC, abstractmethod
from collections.abc import Callable, Sequence
from typing import Any
from uuid import uuid4

from branchwise.engine import FinishReason, Piece
from branchwise.serve.protocol.calls import Arguments, Call, CallReader, Said, Text
from branchwise.serve.protocol.spelling import Spelling

FINISH = {
    FinishReason.STOP: "stop",
    FinishReason.LENGTH: "length",
    FinishReason.CANCELLED: "length",  # the server is ending: for the client the text is cut short, as by a limit
}
DONE = "data: [DONE]\n\n"
Parts = dict[str, Any]


def event(data: Parts) -> str:
    """One event of a stream. JSON of one line holds no line ends, so an event is one line."""
    return f"data: {json.dumps(data, ensure_ascii=False, separators=(',', ':'))}\n\n"


def usage(prompt_tokens: int, completion_tokens: int, cached_tokens: int) -> Parts:
    """The token counts of a request; `cached_tokens` of its prompts were in the KV cache."""
    return {
        "prompt_tokens": prompt_tokens,
        "completion_tokens": completion_tokens,
        "total_tokens": prompt_tokens + completion_tokens,
        "prompt_tokens_details": {"cached_tokens": cached_tokens},
    }


class Shape(ABC):
    """The form of the answers of one path; every request gets its own."""

    prefix: str
    whole: str
    chunk: str

    def __init__(self, model: str, spelling: Spelling | None, reading: Callable[[], CallReader] | None = None) -> None:
        """With a `spelling`, logprobs are reported; with a `reading`, tool calls are."""
        self.id = f"{self.prefix}-{uuid4().hex}"
        self.created = int(time.time())
        self.model = model
        self.spelling = spelling
        self.reading = reading

    def answer(self, choices: Sequence[Parts], **more: Any) -> Parts:
        return self._head(self.whole) | {"choices": list(choices), **more}

    def part(self, choices: Sequence[Parts], **more: Any) -> Parts:
        return self._head(self.chunk) | {"choices": list(choices), **more}

    def _head(self, kind: str) -> Parts:
        return {"id": self.id, "object": kind, "created": self.created, "model": self.model}

    def opening(self, index: int, echo: str, pieces: Sequence[Piece] = ()) -> Parts | None:
        """What a stream says about a choice before its first token, or None; an echo with logprobs has prompt
        tokens."""
        return None

    @abstractmethod
    def choice(self, index: int, text: str, pieces: Sequence[Piece], finish: str | None) -> Parts: ...

    @abstractmethod
    def deltas(self, index: int, text: str, pieces: Sequence[Piece], finish: str | None) -> list[Parts]:
        """What a stream says about more text of a choice: at least one event."""


class CompletionShape(Shape):
    prefix, whole, chunk = "cmpl", "text_completion", "text_completion"

    def __init__(self, model: str, spelling: Spelling | None, reading: Callable[[], CallReader] | None = None) -> None:
        super().__init__(model, spelling, reading)
        self._offsets: dict[int, int] = {}  # letters of each choice so far

    def opening(self, index: int, echo: str, pieces: Sequence[Piece] = ()) -> Parts | None:
        return self.choice(index, echo, pieces, None) if echo else None

    def choice(self, index: int, text: str, pieces: Sequence[Piece], finish: str | None) -> Parts:
        return {"index": index, "text": text, "logprobs": self._logprobs(index, pieces), "finish_reason": finish}

    def deltas(self, index: int, text: str, pieces: Sequence[Piece], finish: str | None) -> list[Parts]:
        return [self.choice(index, text, pieces, finish)]

    def _logprobs(self, index: int, pieces: Sequence[Piece]) -> Parts | None:
        if self.spelling is None:
            return None
        offsets = []
        for piece in pieces:
            offsets.append(self._offsets.setdefault(index, 0))
            self._offsets[index] += len(piece.text)
        return {
            "tokens": [self.spelling.text(piece.token) for piece in pieces],
            "token_logprobs": [piece.logprob for piece in pieces],
            "top_logprobs": [self._top(self.spelling, piece) for piece in pieces]
            if any(p.top for p in pieces)
            else None,
            "text_offset": offsets,
        }

    def _top(self, spelling: Spelling, piece: Piece) -> dict[str, float | None] | None:
        """The most probable tokens, and the token itself even if it is not one of them. Of tokens with the same
        spelling the most probable is reported. The first token of a prompt has no alternatives."""
        if piece.logprob is None:
            return None
        found: dict[str, float | None] = {}
        for token, logprob in (*piece.top, (piece.token, piece.logprob)):
            found.setdefault(spelling.text(token), logprob)
        return found


class ChatShape(Shape):
    prefix, whole, chunk = "chatcmpl", "chat.completion", "chat.completion.chunk"

    def __init__(self, model: str, spelling: Spelling | None, reading: Callable[[], CallReader] | None = None) -> None:
        super().__init__(model, spelling, reading)
        self._readers: dict[int, CallReader] = {}

    def opening(self, index: int, echo: str, pieces: Sequence[Piece] = ()) -> Parts | None:
        return {"index": index, "delta": {"role": "assistant", "content": ""}, "logprobs": None, "finish_reason": None}

    def choice(self, index: int, text: str, pieces: Sequence[Piece], finish: str | None) -> Parts:
        said, finish = self._said(index, text, finish)
        content = "".join(one.text for one in said if isinstance(one, Text))
        calls = [one.as_dict(_arguments(said, one)) for one in said if isinstance(one, Call)]
        message: Parts = {"role": "assistant", "content": content or None if calls else content, "refusal": None}
        if calls:
            message["tool_calls"] = calls
        return {"index": index, "message": message, "logprobs": self._logprobs(pieces), "finish_reason": finish}

    def deltas(self, index: int, text: str, pieces: Sequence[Piece], finish: str | None) -> list[Parts]:
        """A call and its arguments have events of their own, because clients add up the events with the index of a
        call. The first event has the logprobs, the last one the finish reason."""
        said, finish = self._said(index, text, finish)
        silent: Parts = {"index": index, "logprobs": None, "finish_reason": None}
        found = [{**silent, "delta": delta} for delta in [_delta(one) for one in said] or [{}]]
        found[0]["logprobs"] = self._logprobs(pieces)
        found[-1]["finish_reason"] = finish
        return found

    def _said(self, index: int, text: str, finish: str | None) -> tuple[list[Said], str | None]:
        """Text and calls of a choice, and its finish reason once it has ended."""
        if self.reading is None:
            return [Text(text)] if text else [], finish
        reader = self._readers.setdefault(index, self.reading())
        said = reader.push(text, last=finish is not None)
        return said, "tool_calls" if finish == "stop" and reader.told else finish

    def _logprobs(self, pieces: Sequence[Piece]) -> Parts | None:
        if self.spelling is None:
            return None
        entries = [
            _entry(self.spelling, piece.token, piece.logprob)
            | {"top_logprobs": [_entry(self.spelling, *other) for other in piece.top]}
            for piece in pieces
        ]
        return {"content": entries, "refusal": None}


def _entry(spelling: Spelling, token: int, logprob: float | None) -> Parts:
    return {"token": spelling.text(token), "logprob": logprob, "bytes": spelling.utf8(token)}


def _arguments(said: Sequence[Said], call: Call) -> str:
    return "".join(one.text for one in said if isinstance(one, Arguments) and one.index == call.index)


def _delta(said: Said) -> Parts:
    match said:
        case Text(text):
            return {"content": text}
        case Call(place):
            return {"tool_calls": [{"index": place, **said.as_dict()}]}
        case Arguments(place, text):
            return {"tool_calls": [{"index": place, "function": {"arguments": text}}]}
