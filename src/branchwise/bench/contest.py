"""Contestants: plain decoding, methods and peers, all with one method of their own:

    write(prompts, asked)   the answers to a batch of token ids, with the time they took

All count by token ids. What a contestant does not report stays None; it is never guessed.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Protocol

import torch

from branchwise.bench.records import METHOD, PEER, PLAIN
from branchwise.control.guard import Guard
from branchwise.core.sampling import SamplingParams
from branchwise.cuda.graphs import recording_at_first_sight
from branchwise.draft.base import Budget
from branchwise.engine import Engine, Generation, Request
from branchwise.engine.warmup import memory_of, warm_up
from branchwise.llm import LLM
from branchwise.methods import PLAIN as PLAIN_METHOD
from branchwise.methods import Method


@dataclass(frozen=True)
class Asked:
    """Parameters of a request, the same for every contestant."""

    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    stop_tokens: frozenset[int] = frozenset()
    """tokens that end an answer; empty if answers are to have the full length"""
    forbidden: frozenset[int] = frozenset()
    """tokens that must not be written: the end-of-text tokens, if answers are to have the full length"""
    seeds: tuple[int, ...] = ()
    """one seed for each prompt, the same for every contestant"""


@dataclass
class Answer:
    """One answer of a batch. Its fields are those of `records.Record`."""

    ids: list[int]
    finish_reason: str
    seconds: float
    text: str | None = None
    """the text; None if it is to be decoded from the ids"""
    counted_by: str = "ids"
    tokens: int | None = None
    """the number of tokens by a server's own count; None: the number of ids"""
    steps: int | None = None
    drafted: int | None = None
    accepted: int | None = None
    drafted_per_depth: Sequence[int] = ()
    accepted_per_depth: Sequence[int] = ()
    tried_by_prob: Sequence[int] = ()
    accepted_by_prob: Sequence[int] = ()
    by_source: dict[str, int] = field(default_factory=dict)
    target_passes: int | None = None
    draft_passes: int | None = None
    draft_cost: float | None = None
    target_cost: float | None = None
    phases: dict[str, float] = field(default_factory=dict)


class Contestant(Protocol):
    name: str
    kind: str
    """`records.PLAIN`, METHOD or PEER"""
    comparable: bool = False
    """whether its sampled answers must equal the baseline's for equal seeds; greedy answers always must"""
    learns: bool = False
    """whether what it wrote changes how fast it writes later requests"""

    def write(self, prompts: Sequence[Sequence[int]], asked: Asked) -> list[Answer]: ...

    def forget(self) -> None:
        """Drop everything learned from earlier prompts."""

    def warm_up(self, prompts: Sequence[Sequence[int]], asked: Asked) -> None:
        """Write an answer that is not timed, and forget it."""
        self.write(prompts, asked)
        self.forget()


class Peer(Contestant):
    """Another engine as a contestant."""

    kind = PEER
    usage: str | None = None
    """how a spec names what the peer needs, such as a file; None if it takes options of the registry"""


class Ours(Contestant):
    """A method on a loaded model, by the engine that users run. Contestants share weights and KV cache."""

    def __init__(self, llm: LLM, method: Method, most: Budget | None = None, *, guard: bool = False) -> None:
        """`most` bounds every tree, to compare methods at an equal budget or depth. Under a `guard` a method drafts
        nothing while it is slower than plain decoding."""
        self.name = f"{method.name}+guard" if guard else method.name
        self._guard: Guard | bool = guard
        self.kind = PLAIN if method == PLAIN_METHOD else METHOD
        self.comparable = method.verify == "match"
        self._llm = llm
        self._method = method
        self._most = most
        self._target_costs: dict[int, float] = {}
        self._build()

    def _build(self) -> None:
        drafter, verifier = self._method.build()
        self._engine = Engine(self._llm.engine.target, drafter, verifier, self._most, guard=self._guard)
        self._engine.counts_probs = True
        self._engine.warn()
        self._guard = self._engine.guard or self._guard  # its times are the machine's, not the prompts'
        self.learns = drafter.learns
        self._fresh = memory_of(self._engine) if self._engine.pipelined else None

    def forget(self) -> None:
        # A new drafter would make the device record its graphs again.
        if self._fresh is None:
            self._build()
        else:
            self._fresh()

    def warm_up(self, prompts: Sequence[Sequence[int]], asked: Asked) -> None:
        if self._engine.guard is not None:
            warm_up(self._engine, progress=False)  # also measures the costs of the guard's sources
        with recording_at_first_sight():
            super().warm_up(prompts, asked)

    def write(self, prompts: Sequence[Sequence[int]], asked: Asked) -> list[Answer]:
        requests = [
            Request(
                prompt=tuple(prompt),
                sampling=SamplingParams(
                    temperature=asked.temperature,
                    top_p=asked.top_p,
                    top_k=asked.top_k,
                    seed=seed,
                    logit_bias=dict.fromkeys(asked.forbidden, float("-inf")),
                ),
                max_new_tokens=asked.max_new_tokens,
                stop_tokens=asked.stop_tokens,
            )
            for prompt, seed in zip(prompts, asked.seeds, strict=True)
        ]
        engine = self._engine
        passes = engine.drafter.passes
        start = synchronized(engine.target.device)
        generations: list[Generation] = []
        try:
            generations += [engine.submit(request) for request in requests]
            while engine.busy:
                engine.step()
        finally:
            for generation in generations:
                engine.cancel(generation)
        seconds = synchronized(engine.target.device) - start
        drafted = engine.drafter.passes - passes
        return [self._answer(generation, seconds, drafted) for generation in generations]

    def _target_cost(self, nodes: int) -> float | None:
        """Bytes that a pass over `nodes` nodes reads, divided by those of a pass over one node; nodes share all weights
        but the experts of a mixture."""
        if self._engine.target.info.weight_bytes is None:
            return None
        if nodes not in self._target_costs:
            from branchwise.backends.transformers.runner import bytes_read  # transformers takes seconds to import

            model = self._llm.model
            self._target_costs[nodes] = bytes_read(model, nodes=nodes) / bytes_read(model)
        return self._target_costs[nodes]

    def _answer(self, generation: Generation, seconds: float, draft_passes: int) -> Answer:
        assert generation.finish_reason is not None
        generation.check()
        stats = generation.stats
        drafted = {} if self.kind == PLAIN else {self._engine.drafter.source: 0} | stats.accepted_by_source
        return Answer(
            ids=generation.token_ids,
            finish_reason=generation.finish_reason.value,
            seconds=seconds,
            steps=stats.steps,
            drafted=stats.drafted_tokens,
            accepted=stats.accepted_tokens,
            drafted_per_depth=stats.drafted_per_depth,
            accepted_per_depth=stats.accepted_per_depth,
            tried_by_prob=stats.tried_by_prob,
            accepted_by_prob=stats.accepted_by_prob,
            by_source={"target": stats.emitted_tokens - stats.accepted_tokens} | drafted,
            target_passes=stats.steps,
            draft_passes=draft_passes,
            draft_cost=self._engine.drafter.cost,
            target_cost=self._target_cost(1 + round(stats.drafted_tokens / max(stats.steps, 1))),
            phases={"prefill": stats.prefill_seconds, **stats.seconds},
        )


def synchronized(device: torch.device) -> float:
    """The time when a device has finished all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
