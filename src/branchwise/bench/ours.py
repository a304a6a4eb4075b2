"""Plain decoding and the methods of Branchwise as contestants: the engine that users run, on token ids."""

from __future__ import annotations

import time
from collections.abc import Sequence

import torch

from branchwise.bench.contest import Answer, Asked
from branchwise.bench.records import METHOD, PLAIN
from branchwise.core.sampling import SamplingParams
from branchwise.draft.base import Budget
from branchwise.engine import Engine, Generation, Request
from branchwise.llm import LLM
from branchwise.methods import PLAIN as PLAIN_METHOD
from branchwise.methods import Method


class Ours:
    """One method on a loaded model. Contestants of one model share its weights and its KV cache."""

    def __init__(self, llm: LLM, method: Method, most: Budget | None = None) -> None:
        """`most` bounds every tree, to compare methods at an equal budget or depth."""
        self.name = method.name
        self.kind = PLAIN if method == PLAIN_METHOD else METHOD
        self.comparable = method.verify == "match"
        self._llm = llm
        self._method = method
        self._most = most
        self.forget()

    def forget(self) -> None:
        drafter, verifier = self._method.build()
        self._engine = Engine(self._llm.engine.target, drafter, verifier, self._most)
        self.learns = drafter.learns

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

    def _answer(self, generation: Generation, seconds: float, draft_passes: int) -> Answer:
        assert generation.finish_reason is not None
        generation.check()
        stats = generation.stats
        drafted = {} if self.kind == PLAIN else {self._engine.drafter.name: 0} | stats.accepted_by_source
        sources = {"target": stats.emitted_tokens - stats.accepted_tokens} | drafted
        return Answer(
            ids=generation.token_ids,
            finish_reason=generation.finish_reason.value,
            seconds=seconds,
            steps=stats.steps,
            drafted=stats.drafted_tokens,
            accepted=stats.accepted_tokens,
            drafted_per_depth=stats.drafted_per_depth,
            accepted_per_depth=stats.accepted_per_depth,
            by_source=sources,
            target_passes=stats.steps,
            draft_passes=draft_passes,
            draft_cost=self._engine.drafter.cost,
            phases={"prefill": stats.prefill_seconds, **stats.seconds},
        )


def synchronized(device: torch.device) -> float:
    """The time when a device has finished all its work."""
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()
