"""The one thread that loads the model and steps its engine while it has texts to write.

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
from branchwise.serve.lanes import Lane, Lanes
from branchwise.serve.protocol.prompts import Order
from branchwise.serve.writing import Update, Writing

MOST_FAILURES = 3
"""how many steps in a row may fail before the engine is given up"""


class State(StrEnum):
    LOADING = "loading"
    READY = "ready"
    DRAINING = "draining"
    """running texts may end, new ones are refused"""
    BROKEN = "broken"
    """the model did not load, or its steps keep failing"""


class Runner:
    def __init__(self, load: Callable[[], LLM], *, queue: int | None = None, lanes: int = 0) -> None:
        """`load` is called on the engine's thread; `queue` is how many texts may wait for a slot, and `lanes` how many
        methods requests may use at a time besides the loaded one."""
        self.state = State.LOADING
        self.failure: BaseException | None = None
        """the error that kept the model from loading"""
        self.on_loaded: Callable[[], None] = lambda: None
        """called on the engine's thread when loading has ended, well or badly"""
        self.on_end: Callable[[Generation], None] = lambda generation: None
        """called with `lock` held when a text has ended, for whatever reason"""
        self.live: dict[Generation, tuple[Writing, int]] = {}
        """texts that were submitted and have not ended"""
        self.lock = threading.Condition()
        """held for moments only; notified when the thread gets something to do"""
        self.llm: LLM | None = None
        self.lanes: Lanes | None = None
        """None until the model is loaded"""
        self._load = load
        self._queue = queue
        self._most_lanes = lanes
        self._ending = False
        self._stopping = False
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

    def submit(self, order: Order, lane: Lane | None = None) -> Writing:
        """Begin to write a request's texts, by default with the server's own method: all of them, or none. Raises
        `UsageError`, and `QueueFull` if too many texts wait."""
        assert self.lanes is not None
        writing = Writing(self.cancel, lane or self.lanes.main)
        with self.lock:
            if lane is not None:
                self.lanes.let_go(lane)
            try:
                for index in range(len(order.requests)):
                    self._submit(order, index, writing)
            except BaseException:
                for generation in writing.generations:
                    self.live.pop(generation, None)
                    writing.lane.engine.scheduler.cancel(generation)
                raise
            self.lock.notify()
        return writing

    def _submit(self, order: Order, index: int, writing: Writing) -> None:
        assert self.llm is not None
        # If a tokenizer fails on one text, only that text ends, with an error; the step of the others must go on.
        decode = _SafeDecode(order.decode or self.llm.decode, partial(self._fail, writing, index))
        deliver = partial(self._deliver, writing, index)
        engine = writing.lane.engine
        generation = engine.submit(order.requests[index], TextStream(decode, order.stops), on_output=deliver)
        writing.expect(index)
        writing.generations.append(generation)
        self.live[generation] = (writing, index)

    def cancel(self, generation: Generation) -> None:
        """End a text for which no client waits any more; its slot is free before the next step."""
        with self.lock:
            writing, _ = self.live.get(generation, (None, 0))
            if writing is not None and self._forget(generation):
                writing.lane.engine.scheduler.cancel(generation)
                self.lock.notify()

    def drain(self) -> None:
        """Refuse new texts from now on."""
        if self.state in (State.READY, State.LOADING):
            self.state = State.DRAINING

    def end_all(self) -> None:
        """End all texts that are being written, between two steps."""
        with self.lock:
            self._ending = True
            self.lock.notify()

    def stop(self, timeout: float) -> bool:
        """End the thread, unless it is still loading the model; returns whether it has ended."""
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
        except BaseException as error:  # also on Ctrl-C: the thread that started the server must know
            self.failure, self.state = error, State.BROKEN
            self.on_loaded()
            return
        with self.lock:
            self.llm, self.lanes = llm, Lanes(llm, self.lock, most=self._most_lanes, queue=self._queue)
            if self.state is State.LOADING:
                self.state = State.READY
        self.on_loaded()
        while self._wait():
            self._step()

    def _wait(self) -> bool:
        """Sleep until there is work; False if the thread is to end."""
        assert self.lanes is not None
        with self.lock:
            while not (self._ending or (self.lanes.has_work and self.state is not State.BROKEN)):
                self.lock.wait()
            if self._ending:
                self._cancel_all()
                self.lanes.refuse_all()
                self._ending = False
            return not self._stopping

    def _step(self) -> None:
        assert self.lanes is not None
        self.lanes.make_wanted()
        lane = self.lanes.next()
        if lane is None:
            return
        try:
            with lane.turn():
                lane.engine.step()
            lane.failures = 0
        except Exception as error:
            journal.write_failure("a step of the engine", error)
            self._recover(lane, error)

    def _deliver(self, writing: Writing, index: int, generation: Generation, pieces: list[Piece]) -> None:
        if generation.finished:
            with self.lock:
                if not self._forget(generation):
                    return
        traces, generation.traces = generation.traces, []
        writing.put(Update(index, pieces, generation.finish_reason, generation.error, traces))

    def _fail(self, writing: Writing, index: int, error: Exception) -> None:
        """End one text in the middle of a step; the others go on."""
        journal.write_failure("a text", error)
        with self.lock:  # `submit` holds it until it has listed all texts
            generation = writing.generations[index]
            self._fail_all([generation], f"The text could not be decoded ({type(error).__name__}).")
            writing.lane.engine.scheduler.cancel(generation)

    def _recover(self, lane: Lane, error: Exception) -> None:
        """Fail the texts of a failed step, and go on with the others."""
        lane.failures += 1
        scheduler = lane.engine.scheduler
        with self.lock:
            # If the scheduler has cancelled a prompt that could not be written, the running texts are innocent.
            cancelled = FinishReason.CANCELLED
            there = [generation for generation, (writing, _) in self.live.items() if writing.lane is lane]
            culprits = [generation for generation in there if generation.finish_reason is cancelled]
            culprits = culprits or [*scheduler.running, *scheduler.prefilling]
            given_up = lane.failures >= MOST_FAILURES
            ended = there if given_up else culprits
            self._fail_all(ended, f"The engine failed on this text ({type(error).__name__}).")
            for generation in ended:
                scheduler.cancel(generation)
        try:
            with lane.engine.turn:
                scheduler.release()
                lane.engine.drop_prefixes()  # the cache of a text that failed may hold anything
        except Exception as further:
            journal.write_failure("freeing the slots of failed texts", further)
            given_up = True
        if given_up:
            self._give_up(lane)

    def _give_up(self, lane: Lane) -> None:
        """Without its main lane the server is broken; another lane is dropped, and made anew if it is wanted again."""
        assert self.lanes is not None
        if lane is self.lanes.main:
            self.state = State.BROKEN
        else:
            with self.lock:
                self.lanes.drop(lane)

    def _cancel_all(self) -> None:
        """End all texts, and send clients what was written of them; the lock is held."""
        for generation, (writing, _) in list(self.live.items()):
            writing.lane.engine.scheduler.cancel(generation)
            generation.flush()  # the text that was held back
            generation.report()  # `_deliver` sends it, and forgets the text

    def _fail_all(self, generations: Sequence[Generation], error: str) -> None:
        """Tell clients that these texts have failed; the lock is held."""
        for generation in generations:
            writing, index = self.live.get(generation, (None, 0))
            if writing is not None and self._forget(generation):
                writing.put(Update(index, [], FinishReason.ERROR, error))

    def _forget(self, generation: Generation) -> bool:
        """Count a text that has ended, once; returns whether this was the first time. The lock is held."""
        if self.live.pop(generation, None) is None:
            return False
        self.on_end(generation)
        return True


class _SafeDecode:
    """Decodes tokens; reports an exception and goes on without text."""

    def __init__(self, decode: Callable[[Sequence[int]], str], on_failure: Callable[[Exception], None]) -> None:
        self._decode = decode
        self._on_failure = on_failure

    def __call__(self, tokens: Sequence[int]) -> str:
        try:
            return self._decode(tokens)
        except Exception as error:
            self._on_failure(error)
            return ""
