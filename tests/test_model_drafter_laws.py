"""A draft model keeps the target's law under verifiers that read q, whichever way its own laws came about.

Short texts from one prompt, each with a seed of its own, against exact probabilities from the target's plain forward
pass. The seeds are fixed; of 10,000 correct decoders one would fail such a test.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from branchwise.audit.blocks import Block, Floats, Partition, g_test
from branchwise.draft import Budget
from branchwise.draft.chain import Chain
from branchwise.draft.grown import Wish
from branchwise.draft.growth import Found, Growth
from branchwise.draft.model import ModelDrafter
from branchwise.draft.paths import Paths
from branchwise.draft.rsd import Branching
from branchwise.draft.trim import save_counts
from branchwise.draft.weights import Weights
from branchwise.engine import Engine, Generation, Request
from branchwise.sampling import SamplingParams
from branchwise.sequence import Sequence
from branchwise.target.transformers import TransformersTarget
from branchwise.tree import DraftTree
from branchwise.verify import VERIFIERS
from tests.test_model_drafter import byte_level, tiny

FALSE_ALARM = 1e-4
TEXTS = 1500
SLOTS = 50
LENGTH = 3
"""tokens of a text that are compared; the last of them mostly comes from a second tree"""
TEMPERATURE = 1.3

WORDS = ["the", "Ġcat", "Ġsat", "Ġon", "Ġmat", "Ġdog", "."]
OTHERS = ["Ġran", "Ġmat", "the", ".", "Ġcat", "a", "Ġdog", "Ġon"]
"""of another tokenizer; both spell the end of a text alike"""
PROMPT = (0, 3, 3, 3)


class Watched(ModelDrafter):
    """Keeps the laws that it said and those that its trees recorded."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.said: list[Tensor] = []
        self.recorded: list[Tensor] = []

    def look(self, wishes: Rows[Wish]) -> list[Found]:
        found = super().look(wishes)
        self.said += [one.laws for one in found]
        return found

    def draft(self, sequences: Rows[Sequence], budgets: Rows[Budget]) -> list[DraftTree]:
        trees = super().draft(sequences, budgets)
        for tree in trees:
            if tree.q is not None:
                self.recorded.append(tree.q[[node for node, children in enumerate(tree.children) if children]])
        return trees


@cache
def large() -> LlamaForCausalLM:
    return tiny(0, vocabulary=len(WORDS) + 1)


@cache
def small(vocabulary: int) -> LlamaForCausalLM:
    return tiny(1, layers=1, vocabulary=vocabulary)


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "its own warping": {"temperature": 0.9, "top_k": 4},
    "trimmed": {"trim": 4},
    "recalling": {"recall": 0.5},
    "another tokenizer": {},
}


def pair(variant: str, tree: Growth) -> tuple[TransformersTarget, Watched]:
    ours, theirs = byte_level(WORDS), byte_level(OTHERS if variant == "another tokenizer" else WORDS)
    target = TransformersTarget(large(), slots=SLOTS + 1, tokenizer=ours)
    save_counts(target, torch.tensor([9, 1, 2, 9, 3, 9, 4, 9]), {})
    return target, Watched(Weights("tiny", small(len(theirs)), theirs), tree=tree, **VARIANTS[variant])


def write(target: TransformersTarget, drafter: Watched, verify: str, texts: int) -> list[Generation]:
    engine = Engine(target, drafter, VERIFIERS.build(verify))
    start = Sequence(list(PROMPT))
    target.open(start)
    made = [
        engine.submit(Request(PROMPT, SamplingParams(TEMPERATURE, seed=seed), max_new_tokens=LENGTH + 1), like=start)
        for seed in range(texts)
    ]
    while engine.busy:
        engine.step()
    return made


@cache
def law_after(block: Block) -> Floats:
    with torch.inference_mode():
        logits = large()(torch.tensor([[*PROMPT, *block]])).logits[0, -1]
    law: Floats = torch.softmax(logits.double() / TEMPERATURE, dim=-1).numpy()
    return law


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRANCHWISE_CACHE", str(tmp_path))


@pytest.mark.parametrize(
    ("verify", "tree", "variant"),
    [
        ("token", Chain(2), "plain"),
        ("token", Chain(2), "another tokenizer"),
        ("block", Chain(3), "trimmed"),
        ("block", Chain(3), "recalling"),
        ("cascade", Paths("2x3"), "its own warping"),
        ("cascade", Paths("2x3"), "another tokenizer"),
        ("rrs", Branching(2, 1), "recalling"),
        ("traversal", Branching(2, 2), "trimmed"),
    ],
    ids=lambda value: type(value).__name__ if not isinstance(value, str) else value,
)
def test_the_first_tokens_have_the_targets_law(verify: str, tree: Growth, variant: str) -> None:
    made = write(*pair(variant, tree), verify, TEXTS)
    partition = Partition(law_after, length=LENGTH, samples=TEXTS)
    found = g_test(partition.count(tuple(one.token_ids) for one in made), partition.probabilities)
    print(verify, variant, found)
    assert found.p_value > FALSE_ALARM
    assert found.freedom > 20
    accepted = sum(one.stats.accepted_tokens for one in made)
    assert TEXTS / 4 < accepted < TEXTS * LENGTH * 0.9, "a law that is kept with nothing accepted or rejected says little"
