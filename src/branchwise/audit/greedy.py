"""Greedy texts with and without speculation, compared token by token.

In float32 they must be equal up to numerical ties. In bfloat16 a pass over a tree rounds differently from a pass over
one token, so differences in bfloat16 are near-ties: they are reported and decide nothing.
"""

from __future__ import annotations

import copy
from dataclasses import asdict, dataclass
from itertools import takewhile
from typing import Any

import torch

from branchwise.audit.findings import shorten
from branchwise.backends.transformers.target import TransformersTarget
from branchwise.draft import build_drafter
from branchwise.engine import Engine
from branchwise.llm import LLM
from branchwise.verify import VERIFIERS

TIE = 1e-3
"""logits closer than this are equal within the precision of float32"""


@dataclass(frozen=True)
class Difference:
    """Where a greedy text first leaves the text of plain decoding."""

    prompt: str
    position: int
    """tokens of the answer before it"""
    plain: str
    speculative: str
    gap: float
    """between the logits of the two tokens in the model's own forward pass"""


@dataclass(frozen=True)
class Greedy:
    """Greedy texts with and without speculation."""

    dtype: str
    prompts: int
    tokens: int
    """of plain decoding"""
    differences: tuple[Difference, ...]

    @property
    def decisive(self) -> list[Difference]:
        """Differences that rounding does not explain; only float32 promises equality."""
        return [d for d in self.differences if self.dtype == "float32" and not d.gap < TIE]

    def as_dict(self) -> dict[str, Any]:
        return {**asdict(self), "differences": [asdict(difference) for difference in self.differences]}


def first_difference(llm: LLM, prompt: str, tokens: list[int], plain: list[int], speculative: list[int]) -> Difference:
    """Where the two continuations of a prompt, which is given with its tokens, part."""
    position = len(list(takewhile(lambda pair: pair[0] == pair[1], zip(plain, speculative, strict=False))))
    gap = float("inf")  # one text ends where the other goes on after the same tokens
    if position < min(len(plain), len(speculative)):
        logits = own_logits(llm, tokens + plain[:position])
        gap = abs(float(logits[plain[position]] - logits[speculative[position]]))
    return Difference(
        prompt=prompt,
        position=position,
        plain=llm.decode(plain[position : position + 1]),
        speculative=llm.decode(speculative[position : position + 1]),
        gap=gap,
    )


def own_logits(llm: LLM, tokens: list[int]) -> torch.Tensor:
    """(vocabulary,) float32: what follows these tokens."""
    target = llm.engine.target
    assert isinstance(target, TransformersTarget), "an LLM runs on a model of transformers"
    return target.own_logits(torch.tensor([tokens], device=target.device))[0, -1].float()


def in_bfloat16(llm: LLM, slots: int) -> LLM:
    """A copy as if loaded in bfloat16: weights are rounded, position tables are not."""
    model = copy.deepcopy(llm.model)
    for parameter in model.parameters():
        if parameter.is_floating_point():
            parameter.data = parameter.data.to(torch.bfloat16)
    target = llm.engine.target
    rounded = TransformersTarget(model, slots=slots, context=target.context, max_nodes=target.max_nodes)
    return LLM(llm.name, model, llm.tokenizer, Engine(rounded, build_drafter("none"), VERIFIERS.build("match")))


def dtype_of(llm: LLM) -> str:
    return str(llm.model.dtype).removeprefix("torch.")


def accusation(difference: Difference) -> str:
    return (
        f"{shorten(difference.prompt)}: greedy float32 text leaves plain decoding after {difference.position} tokens, "
        f"{difference.speculative!r} in place of {difference.plain!r} with logits {difference.gap:.3g} apart."
    )


def notes_of(greedy: Greedy | None, near_ties: Greedy | None) -> list[str]:
    notes = []
    if greedy is not None:
        ties = len(greedy.differences) - len(greedy.decisive)
        equal = greedy.prompts - len(greedy.differences)
        tied = f"; {ties} left it at a numerical tie" if ties else ""
        notes.append(
            f"Greedy in float32: {equal} of {greedy.prompts} texts ({greedy.tokens:,} tokens) "
            f"equal plain decoding{tied}."
        )
    if near_ties is not None:
        gaps = [difference.gap for difference in near_ties.differences]
        widest = f", at near-ties with logits at most {max(gaps):.2g} apart" if gaps else ""
        notes.append(
            f"Greedy in {near_ties.dtype}: {len(gaps)} of {near_ties.prompts} texts leave plain decoding{widest}; "
            "this decides nothing."
        )
    return notes
