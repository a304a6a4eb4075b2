"""The texts that one request asked for, on their way from the engine's thread to the event loop."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Callable
from contextlib import suppress
from dataclasses import dataclass, field

from branchwise.engine import FinishReason, Generation, Piece
from branchwise.engine.trace import StepTrace
from branchwise.serve.lanes import Lane


@dataclass(frozen=True)
class Update:
    """What a step added to one of a request's texts."""

    index: int
    pieces: list[Piece]
    finish: FinishReason | None = None
    """why the text ends here; None if it goes on"""
    error: str | None = None
    """the error that ended the text, if one did"""
    traces: list[StepTrace] = field(default_factory=list)
    """the traces of its steps, if the request asks for them"""

    @property
    def text(self) -> str:
        return "".join(piece.text for piece in self.pieces)


class Writing:
    """Texts being written. Iterating over it gives their updates until all have ended; `cancel` ends the rest."""

    def __init__(self, cancel: Callable[[Generation], None], lane: Lane) -> None:
        self.lane = lane
        """the lane in which the texts are written"""
        self.generations: list[Generation] = []
        self.began = time.perf_counter()
        self.first: float | None = None
        """seconds until the first token of any text"""
        self._cancel = cancel
        self._loop = asyncio.get_running_loop()
        self._updates: asyncio.Queue[Update] = asyncio.Queue()
        self._open: set[int] = set()

    def expect(self, index: int) -> None:
        self._open.add(index)

    async def __aiter__(self) -> AsyncIterator[Update]:
        while self._open:
            update = await self._updates.get()
            if update.index not in self._open:
                continue
            if update.finish is not None:
                self._open.discard(update.index)
            yield update

    def cancel(self) -> None:
        """End these texts, because the client does not wait for them any more."""
        self._open.clear()
        for generation in self.generations:
            self._cancel(generation)

    # On the engine's thread

    def put(self, update: Update) -> None:
        if self.first is None and update.pieces:
            self.first = time.perf_counter() - self.began
        with suppress(RuntimeError):  # the event loop is gone, and with it all clients
            self._loop.call_soon_threadsafe(self._updates.put_nowait, update)
