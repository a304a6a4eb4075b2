"""A draft model keeps the target's distribution under verifiers that read q, whichever way its own distributions came
about.

Short texts from one prompt, each with a seed of its own, against exact probabilities from the target's plain forward
pass. The seeds are fixed; of 10,000 correct decoders one would fail such a test.
"""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from transformers import LlamaForCausalLM

from branchwise.audit.blocks import Block, Floats, Partition, g_test
from branchwise.backends.transformers.target import TransformersTarget
from branchwise.core.sampling import SamplingParams
from branchwise.core.sequence import SequenceState
from branchwise.core.tree import DraftTree
from branchwise.draft.base import Budget
from branchwise.draft.builder import NodeProbs, TreeBuilder, TreePolicy
from branchwise.draft.model.draft_model import Weights
from branchwise.draft.model.drafter import ModelDrafter
from branchwise.draft.model.vocabulary import save_counts
from branchwise.draft.policies.paths import Chain, Paths
from branchwise.draft.policies.rsd import Branching
from branchwise.draft.recall import TargetProbsMixer
from branchwise.draft.tree_drafter import ExpandRequest
from branchwise.engine import Engine, Generation, Request
from branchwise.verify import VERIFIERS
from tests.test_model_drafter import byte_level, tiny
from tests.test_sampler import pretend_a_device

FALSE_ALARM = 1e-4
TEXTS = 1500
SLOTS = 50
LENGTH = 3
"""tokens of a text that are compared"""
TEMPERATURE = 1.6
"""where these tiny models have an opinion, and a token still two bits"""

WORDS = ["the", "Ġcat", "Ġsat", "Ġon", "Ġmat", "Ġdog", "."]
OTHERS = ["Ġran", "Ġmat", "the", ".", "Ġcat", "a", "Ġdog", "Ġon"]
"""of another tokenizer; both spell the end of a text alike"""
PROMPT = (6, 6, 6)
"""the target repeats it often, so there is something to recall"""


class Watched(ModelDrafter):
    """Keeps the distributions that it said and those that its trees recorded."""

    def __init__(self, *arguments: Any, **options: Any) -> None:
        super().__init__(*arguments, **options)
        self.said: list[Tensor] = []
        self.recorded: list[Tensor] = []

    def look(self, requests: Sequence[ExpandRequest]) -> list[NodeProbs]:
        found = super().look(requests)
        self.said += [one.probs for one in found]
        return found

    def draft(self, sequences: Sequence[SequenceState], budgets: Sequence[Budget]) -> list[DraftTree]:
        trees = super().draft(sequences, budgets)
        for tree in trees:
            if tree.q is not None:
                self.recorded.append(tree.q[[node for node, children in enumerate(tree.children) if children]])
        return trees


@cache
def large() -> LlamaForCausalLM:
    return tiny(1, vocabulary=len(WORDS) + 1)


@cache
def small(vocabulary: int) -> LlamaForCausalLM:
    return tiny(4, layers=1, vocabulary=vocabulary)


class Counted(TargetProbsMixer):
    """Counts how often it knew something."""

    known = 0

    def mix(self, sequence: SequenceState, tree: TreeBuilder, nodes: Sequence[int], probs: Tensor) -> Tensor:
        mixed = super().mix(sequence, tree, nodes, probs)
        self.known += mixed is not probs
        return mixed


VARIANTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "its own warping": {"temperature": 0.9, "top_k": 4},
    "trimmed": {"trim": 4},
    "recalling": {},
    "another tokenizer": {},
}


def pair(variant: str, tree: TreePolicy) -> tuple[TransformersTarget, Watched]:
    ours, theirs = byte_level(WORDS), byte_level(OTHERS if variant == "another tokenizer" else WORDS)
    target = TransformersTarget(large(), slots=SLOTS + 1, tokenizer=ours)
    save_counts(target.info, torch.tensor([0, 9, 0, 9, 0, 0, 9, 9]), {})
    drafter = Watched(Weights("tiny", small(len(theirs)), theirs), tree=tree, **VARIANTS[variant])
    drafter.recall = Counted(0.5) if variant == "recalling" else None
    return target, drafter


def write(target: TransformersTarget, drafter: Watched, verify: str, texts: int, length: int) -> list[Generation]:
    engine = Engine(target, drafter, VERIFIERS.build(verify))
    start = SequenceState(list(PROMPT))
    target.open(start)
    requests = [Request(PROMPT, SamplingParams(TEMPERATURE, seed=seed), max_new_tokens=length) for seed in range(texts)]
    made = [engine.submit(request, like=start) for request in requests]
    while engine.busy:
        engine.step()
    return made


@cache
def law_after(block: Block) -> Floats:
    with torch.inference_mode():
        logits = large()(torch.tensor([[*PROMPT, *block]])).logits[0, -1]
    probs: Floats = torch.softmax(logits.double() / TEMPERATURE, dim=-1).numpy()
    return probs


@pytest.fixture(autouse=True)
def _cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("BRANCHWISE_CACHE", str(tmp_path))


@pytest.mark.parametrize(
    ("variant", "tree", "verify"),
    [
        ("plain", Chain(3), "block"),
        ("its own warping", Paths("2x2"), "cascade"),
        ("trimmed", Branching(2, 1), "traversal"),
        ("recalling", Chain(1), "token"),  # shallow trees: a second one recalls what the first one met
        ("recalling", Branching(2), "rrs"),
        ("another tokenizer", Chain(2), "token"),
        ("another tokenizer", Paths("2x2"), "cascade"),
    ],
    ids=lambda value: value if isinstance(value, str) else type(value).__name__.lower(),
)
def test_the_first_tokens_have_the_targets_law(variant: str, tree: TreePolicy, verify: str) -> None:
    target, drafter = pair(variant, tree)
    # One token more, where the last that is compared is to come from a tree that recalls the one before.
    made = write(target, drafter, verify, TEXTS, LENGTH + (variant == "recalling"))
    partition = Partition(law_after, length=LENGTH, samples=TEXTS)
    found = g_test(partition.count(tuple(text.token_ids) for text in made), partition.probabilities)
    assert found.p_value > FALSE_ALARM, found
    # What would make it say little: few cells, a draft that is never or always right, a memory without a use.
    assert found.freedom > 30
    accepted, written = sum(text.stats.accepted_tokens for text in made), sum(len(text.token_ids) for text in made)
    assert 0.2 < accepted / written < 0.6
    assert drafter.recall is None or drafter.recall.known > TEXTS / 10  # type: ignore[attr-defined]


@pytest.mark.parametrize("variant", VARIANTS)
def test_every_law_that_is_said_or_recorded_is_one(variant: str) -> None:
    for tree, verify in ((Paths("2x3"), "cascade"), (Branching(2, 2), "traversal")):
        target, drafter = pair(variant, tree)
        write(target, drafter, verify, texts=12, length=12)
        for probs in (torch.cat(drafter.said), torch.cat(drafter.recorded)):
            assert len(probs) > 100
            assert probs.shape[1] == target.vocabulary
            assert probs.isfinite().all()
            assert (probs >= 0).all()
            assert float((probs.double().sum(dim=1) - 1).abs().max()) < 1e-5


@pytest.mark.parametrize("variant", VARIANTS)
def test_laws_that_are_read_at_fixed_places_are_the_same(variant: str, monkeypatch: pytest.MonkeyPatch) -> None:
    # Catches a distribution of one level that is overwritten by the next one, before it is recorded as q or while it is
    # kept.
    for tree, verify in ((Paths("3x3"), "cascade"), (Branching(2, 2), "traversal")):
        texts, probs, said = [], [], []
        for fixed in (False, True):
            with monkeypatch.context() as patch:
                if fixed:
                    pretend_a_device(patch)
                target, drafter = pair(variant, tree)
                texts.append([text.token_ids for text in write(target, drafter, verify, texts=4, length=8)])
                probs.append(torch.cat(drafter.recorded))
                said.append(torch.cat(drafter.said))
        assert texts[0] == texts[1]
        assert torch.equal(*probs)
        assert torch.equal(*said)
