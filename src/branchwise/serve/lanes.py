"""Lanes: engines with other methods than the server's own, over the same weights, for requests that name a method.

A lane has a small KV cache of its own. It is made on the engine's thread when a request first names its method. Only a
few exist at a time: if another is wanted, the idle lane that was used longest ago is dropped. Lanes with texts to write
get equal shares of the time, however long their steps take, so that two of them can be watched side by side.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Iterator
from concurrent.futures import Future
from contextlib import contextmanager

import torch

from branchwise.backends import TARGETS
from branchwise.engine import Engine
from branchwise.errors import BranchwiseError, QueueFull, UsageError
from branchwise.llm import LLM
from branchwise.methods import Method
from branchwise.serve import journal

SLOTS = 2
"""texts that a lane writes together"""
CONTEXT = 4096
"""the most tokens of a text in a lane"""

Key = tuple[str, str | None, str]


class Lane:
    """An engine, and its share of the time of the thread that steps all of them."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self.failures = 0
        """how many steps in a row have failed"""
        self.awaited = 0
        """requests that were given this lane and have not submitted their texts yet"""
        self.spent = 0.0
        """seconds of its steps, counted as if it had always been busy"""

    @property
    def has_work(self) -> bool:
        return self.engine.busy

    @contextmanager
    def turn(self) -> Iterator[None]:
        began = time.perf_counter()
        try:
            yield
        finally:
            self.spent += time.perf_counter() - began


class Lanes:
    def __init__(self, llm: LLM, lock: threading.Condition, *, most: int, queue: int | None) -> None:
        """`most` lanes may exist besides the main one, and `queue` texts wait in each. `lock` is the runner's."""
        self.llm = llm
        self.main = Lane(llm.engine)
        self.most = most
        self._lock = lock
        self._queue = queue
        self._others: dict[Key, Lane] = {}  # the one used longest ago first
        self._wanted: list[tuple[Method, Future[Lane]]] = []
        self._now = 0.0
        self.main.engine.scheduler.queue = queue

    # From the event loop

    def find(self, method: Method) -> Future[Lane]:
        """The lane of a method, once it exists; the caller then submits to it, or lets it go."""
        found: Future[Lane] = Future()
        with self._lock:
            if not self._give(method, found):
                self._wanted.append((method, found))
                self._lock.notify()
        return found

    def let_go(self, lane: Lane) -> None:
        """Note that a caller of `find` has submitted its texts, or will not; the lock is held."""
        lane.awaited -= 1

    # On the engine's thread

    @property
    def has_work(self) -> bool:
        """Whether a lane has work, or is wanted; the lock is held."""
        return bool(self._wanted) or self.main.has_work or any(lane.has_work for lane in self._others.values())

    def next(self) -> Lane | None:
        """The lane whose step comes next: among those that have work, the one that has had the least time. A lane that
        was idle has no claim to that time."""
        with self._lock:
            busy = [lane for lane in (self.main, *self._others.values()) if lane.has_work]
        if not busy:
            return None
        for lane in busy:
            lane.spent = max(lane.spent, self._now)
        chosen = min(busy, key=lambda lane: lane.spent)
        self._now = chosen.spent
        return chosen

    def make_wanted(self) -> None:
        """Make the lanes that requests wait for; a request that cannot have one is told why."""
        while self._wanted:
            with self._lock:
                method, found = self._wanted.pop(0)
                if self._give(method, found):
                    continue
            try:
                made = self._made(method)
            except BranchwiseError as error:
                _refuse(found, error)
            except torch.OutOfMemoryError:
                _refuse(found, QueueFull("The device has no memory for another method; try again later."))
            except Exception as error:
                journal.write_failure("making a lane", error)
                _refuse(found, UsageError(f"This method cannot be run here ({type(error).__name__})."))
            else:
                with self._lock:
                    self._others[_key(method)] = made
                    self._give(method, found)

    def _give(self, method: Method, found: Future[Lane]) -> bool:
        """Hand over a lane that exists already; the lock is held."""
        lane = self._others.pop(_key(method), None)
        if lane is None:
            return False
        self._others[_key(method)] = lane  # now the last one used
        if found.set_running_or_notify_cancel():  # False if the request was given up meanwhile
            lane.awaited += 1
            found.set_result(lane)
        return True

    def _made(self, method: Method) -> Lane:
        self._make_room()
        drafter, verifier = method.build()
        info = self.llm.engine.target.info
        target = TARGETS.find("transformers")(
            self.llm.model,
            slots=min(SLOTS, info.slots),
            context=min(CONTEXT, info.context),
            max_nodes=info.max_nodes,
            tokenizer=info.tokenizer,
            kernels=info.execution.kernels,
            graphs=info.execution.graphs,
            compile=info.execution.compile,
            layers=info.execution.layers,
        )
        # Without a guard: a client that names a method wants to see what it drafts, even if that is slow here.
        return Lane(Engine(target, drafter, verifier, queue=self._queue))

    def _make_room(self) -> None:
        with self._lock:
            while len(self._others) >= self.most:
                idle = [key for key, lane in self._others.items() if not (lane.has_work or lane.awaited)]
                if not idle:
                    raise QueueFull(f"{self.most} methods besides the server's own are at work; try again later.")
                del self._others[idle[0]]

    def drop(self, lane: Lane) -> None:
        """Forget a lane whose steps keep failing; the lock is held."""
        self._others = {key: other for key, other in self._others.items() if other is not lane}

    def refuse_all(self) -> None:
        """Refuse all lanes that are wanted, because the server is ending; the lock is held."""
        for _, found in self._wanted:
            _refuse(found, QueueFull("The server is ending; ask another one, or try again later."))
        self._wanted.clear()


def _refuse(found: Future[Lane], error: Exception) -> None:
    if found.set_running_or_notify_cancel():
        found.set_exception(error)


def _key(method: Method) -> Key:
    return method.draft, method.tree, method.verify
