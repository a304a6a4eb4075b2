"""The one thread that loads the model and steps its engine while there is something to write.

Everything that touches the device happens on it. The event loop submits and cancels without waiting for a step, and
gets what was written through `Writing`.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Sequence
from enum import StrEnum
from functools import partial

from branchwise.core.text import TextStream
from branchwise.engine import Engine, FinishReason, Generation, Piece
from branchwise.llm import LLM
from branchwise.serve import journal
from branchwise.serve.protocol.prompts import Order
from branchwise.serve.writing import Update, Writing

MOST_FAILURES = 3
"""steps in a row that may fail before the engine is given up"""


class State(StrEnum):
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    """what runs may end, nothing new begins"""
    BROKEN = "broken"
    """the model did not load, or its steps keep failing"""


class Runner:
    def __init__(self, load: Callable[[], LLM], *, queue: int | None = None) -> None:
        """`load` is called on the engine's thread; `queue` is how many texts may wait for a slot."""
        self.state = State.LOADING
        self.failure: BaseException | None = None
        """why the model did not load"""
        self.on_loaded: Callable[[], None] = lambda: None
        """called on the engine's thread when loading has ended, well or badly"""
        self.on_end: Callable[[Generation], None] = lambda generation: None
        """called when a text has ended, however it did; with `lock` held"""
        self.live: dict[Generation, tuple[Writing, int]] = {}
        """texts that were submitted and have not ended"""
        self.lock = threading.Condition()
        """held for moments; whoever gives the thread something to do notifies it"""
        self.llm: LLM | None = None
        self._load = load
        self._queue = queue
        self._ending = False
        self._stopping = False
        self._failures = 0
        self._thread = threading.Thread(target=self._run, name="engine", daemon=True)

    # From the event loop

    def start(self) -> None:
        self._thread.start()

    @property
    def engine(self) -> Engine:
        assert self.llm is not None, "the model is not loaded yet"
        return self.llm.engine

    @property
    def waiting(self) -> int:
        """Texts that have no slot yet."""
        with self.lock:
            return sum(generation.began is None for generation in self.live)

    def submit(self, order: Order) -> Writing:
        """Begin to write; raises `UsageError`, and `QueueFull` if too many wait. All of the texts begin, or none."""
        assert self.llm is not None
        writing = Writing(self.cancel)
        with self.lock:
            try:
                for index in range(len(order.requests)):
                    self._submit(order, index, writing)
            except BaseException:
                for generation in writing.generations:
                    self.live.pop(generation, None)
                    self.engine.scheduler.cancel(generation)
                raise
            self.lock.notify()
        return writing

    def _submit(self, order: Order, index: int, writing: Writing) -> None:
        assert self.llm is not None
        # A tokenizer that fails on one text must not end the step of all: the text ends, and says so.
        decode = _Guarded(self.llm.decode, partial(self._fail, writing, index))
        deliver = partial(self._deliver, writing, index)
        generation = self.llm.engine.submit(order.requests[index], TextStream(decode, order.stops), on_output=deliver)
        writing.expect(index)
        writing.generations.append(generation)
        self.live[generation] = (writing, index)

    def cancel(self, generation: Generation) -> None:
        """End a text that nobody waits for; its slot is free before the next step."""
        with self.lock:
            if self._forget(generation):
                self.engine.scheduler.cancel(generation)
                self.lock.notify()

    def drain(self) -> None:
        """Let nothing new begin."""
        if self.state in (State.READY, State.LOADING):
            self.state = State.DRAINING

    def end_all(self) -> None:
        """End what is still being written, between two steps."""
        with self.lock:
            self._ending = True
            self.lock.notify()

    def stop(self, timeout: float) -> bool:
        """End the thread, unless it is loading; whether it has ended."""
        with self.lock:
            self._ending = self._stopping = True
            self.lock.notify()
        if self.llm is not None:
            self._thread.join(timeout)
        return not self._thread.is_alive()

    # On the engine's thread

    def _run(self) -> None:
        try:
            llm = self._load()
        except BaseException as error:  # Ctrl-C too: whoever started the server must be told
            self.failure, self.state = error, State.BROKEN
            self.on_loaded()
            return
        llm.engine.scheduler.queue = self._queue
        with self.lock:
            self.llm = llm
            if self.state is State.LOADING:
                self.state = State.READY
        self.on_loaded()
        while self._wait():
            self._step()

    def _wait(self) -> bool:
        """Sleep until there is something to do; False when that is to end."""
        with self.lock:
            while not (self._ending or (self.engine.busy and self.state is not State.BROKEN)):
                self.lock.wait()
            if self._ending:
                self._end(list(self.live), FinishReason.CANCELLED)
                self._ending = False
            return not self._stopping

    def _step(self) -> None:
        try:
            self.engine.step()
            self._failures = 0
        except Exception as error:
            journal.write_failure("a step of the engine", error)
            self._recover(error)

    def _deliver(self, writing: Writing, index: int, generation: Generation, pieces: list[Piece]) -> None:
        if generation.finished:
            with self.lock:
                if not self._forget(generation):
                    return
        writing.put(Update(index, pieces, generation.finish_reason, generation.error))

    def _fail(self, writing: Writing, index: int, error: Exception) -> None:
        """End one text in the middle of a step; the others go on."""
        journal.write_failure("a text", error)
        with self.lock:  # held by `submit` until all of the texts are known
            generation = writing.generations[index]
            self._end([generation], FinishReason.ERROR, f"The text could not be decoded ({type(error).__name__}).")
            self.engine.scheduler.cancel(generation)

    def _recover(self, error: Exception) -> None:
        """Fail the texts that a failed step was about, and go on with the others."""
        self._failures += 1
        scheduler = self.engine.scheduler
        with self.lock:
            # A prompt that could not be written has been ended by the scheduler; then it was not the others' fault.
            cancelled = FinishReason.CANCELLED
            culprits = [generation for generation in self.live if generation.finish_reason is cancelled]
            culprits = culprits or [*scheduler.running, *scheduler.prefilling]
            given_up = self._failures >= MOST_FAILURES
            ended = list(self.live) if given_up else culprits
            self._end(ended, FinishReason.ERROR, f"The engine failed on this text ({type(error).__name__}).")
            for generation in ended:
                scheduler.cancel(generation)
        try:
            with self.engine.turn:
                scheduler.release()
                self.engine.drop_prefixes()  # nobody knows what is in the cache of a text that failed
        except Exception as further:
            journal.write_failure("freeing the slots of failed texts", further)
            given_up = True
        if given_up:
            self.state = State.BROKEN

    def _end(self, generations: Sequence[Generation], reason: FinishReason, error: str | None = None) -> None:
        """Tell whoever waits that texts have ended, with what they had; the lock is held."""
        for generation in generations:
            found = self.live.get(generation)
            if found is None:
                continue
            writing, index = found
            writing.cut = reason is FinishReason.CANCELLED
            if reason is FinishReason.CANCELLED:
                self.engine.scheduler.cancel(generation)
                generation.flush()  # the text that was held back
                generation.report()  # goes through `_deliver`
            if self._forget(generation):
                writing.put(Update(index, [], reason, error))

    def _forget(self, generation: Generation) -> bool:
        """Book a text that has ended, once; the lock is held."""
        if self.live.pop(generation, None) is None:
            return False
        self.on_end(generation)
        return True


class _Guarded:
    """A decoder that reports what it raises and goes on without text."""

    def __init__(self, decode: Callable[[Sequence[int]], str], on_failure: Callable[[Exception], None]) -> None:
        self._decode = decode
        self._on_failure = on_failure

    def __call__(self, tokens: Sequence[int]) -> str:
        try:
            return self._decode(tokens)
        except Exception as error:
            self._on_failure(error)
            return ""
