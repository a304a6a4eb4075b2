"""Paths that a draft model draws ahead of the host are those that it draws level by level, token for token and q for q.

The kernels of the passes are stood in for by torch (`attention_twins.py`); `tests/gpu/test_model_ahead.py` is the same
on a device, where all of it is recorded."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
import torch
from torch import Tensor

from branchwise.backends.base import TargetInfo
from branchwise.core.sampling import SamplingParams
from branchwise.core.sequence import SequenceState
from branchwise.core.tree import DraftTree
from branchwise.draft import build_policy
from branchwise.draft.base import Budget
from branchwise.draft.model.ahead import PathsAhead
from branchwise.draft.model.draft_model import Weights
from branchwise.draft.model.drafter import ModelDrafter
from branchwise.engine import Engine, Generation, Request
from branchwise.verify import VERIFIERS
from tests import attention_twins
from tests.test_inflight import Watched
from tests.test_model_drafter import tiny

VOCABULARY = 300
"""more than a block, so that blocks race too"""
PROMPTS = [(1, 2, 3, 4, 5), (6,), tuple(range(1, 24)), (7, 8)]
WAYS = [
    SamplingParams(temperature=0.8, seed=5),
    SamplingParams(),
    SamplingParams(temperature=1.0, seed=2, top_k=3),
    SamplingParams(temperature=1.3, seed=1 << 62, top_p=0.7, min_p=0.02),
]


@pytest.fixture(autouse=True)
def _twins(monkeypatch: pytest.MonkeyPatch) -> None:
    attention_twins.install(monkeypatch)


Noted = tuple[tuple[int, ...], list[int], tuple[int, ...], tuple[int, ...], Tensor | None]


class Noting(ModelDrafter):
    """Notes its trees, each with the text that it stands behind."""

    def __init__(self, *given, **more) -> None:  # type: ignore[no-untyped-def]
        super().__init__(*given, **more)
        self.noted: list[Noted] = []

    def draft(self, sequences: Sequence[SequenceState], budgets: Sequence[Budget]) -> list[DraftTree]:
        trees = super().draft(sequences, budgets)
        for sequence, tree in zip(sequences, trees, strict=True):
            tokens, q = tree.tokens.tolist()[1:], None if tree.q is None else tree.q.clone()
            self.noted.append((tuple(sequence.tokens), tokens, tree.parents, tree.leaves, q))
        return trees


class LevelByLevel(Noting):
    """With the host between two levels."""

    def _on_device(self, target: TargetInfo) -> PathsAhead | None:
        return None


def target_of(slots: int = 3, vocabulary: int = VOCABULARY) -> Watched:
    return Watched(tiny(0, layers=1, vocabulary=vocabulary), slots=slots, context=96, max_nodes=32, kernels=True)


def close_to(vocabulary: int = VOCABULARY) -> Weights:
    """A draft model that is often right: the target with noise."""
    model = tiny(0, layers=1, vocabulary=vocabulary)
    with torch.no_grad():
        for number, weight in enumerate(model.parameters()):
            noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(number))
            weight.add_(0.15 * weight.std() * noise)
    return Weights("noisy", model, None)


def write(
    drafter: ModelDrafter, verify: str, ways: Sequence[SamplingParams], target: Watched | None = None, batch: int = 4
) -> list[Generation]:
    engine = Engine(target or target_of(), drafter, VERIFIERS.build(verify))
    asked = [
        engine.submit(Request(prompt, ways[row % len(ways)], max_new_tokens=22 + 5 * row))
        for row, prompt in enumerate(PROMPTS[:batch])
    ]
    while engine.busy:
        engine.step()
    return asked


def assert_same(one: Noting, other: Noting) -> None:
    assert len(one.noted) == len(other.noted) > 10
    for mine, theirs in zip(one.noted, other.noted, strict=True):
        assert mine[:4] == theirs[:4]
        assert (mine[4] is None) == (theirs[4] is None)
        if mine[4] is not None and theirs[4] is not None:
            assert torch.allclose(mine[4], theirs[4], rtol=1e-4, atol=1e-6)
            assert torch.equal(mine[4] > 0, theirs[4] > 0)


@pytest.mark.parametrize("ways", [WAYS[:1], WAYS[1:2], WAYS], ids=["drawn", "greedy", "of all kinds"])
@pytest.mark.parametrize(
    ("tree", "verify"),
    [("chain:4", "block"), ("chain:1", "token"), ("paths:3x3", "cascade"), ("paths:2x4@2", "traversal")],
)
def test_paths_are_those_of_level_by_level(tree: str, verify: str, ways: list[SamplingParams]) -> None:
    """Four texts in three slots: some end, one joins, and steps go on with those that are left."""
    ahead, levels = (kind(close_to(), tree=build_policy(tree)) for kind in (Noting, LevelByLevel))
    found, expected = write(ahead, verify, ways), write(levels, verify, ways)
    assert_same(ahead, levels)
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    assert sum(one.stats.accepted_tokens for one in found) > 10


def test_a_chain_is_drafted_without_the_host(monkeypatch: pytest.MonkeyPatch) -> None:
    """One replay draws all its levels, and the pass over it begins before the host knows what it is."""
    target, drafter = target_of(), Noting(close_to(), tree=build_policy("chain:4"))
    grown: list[int] = []
    own = PathsAhead._grown

    def watched(self: PathsAhead, *given) -> object:  # type: ignore[no-untyped-def]
        grown.append(len(drafter.noted))
        return own(self, *given)

    monkeypatch.setattr(PathsAhead, "_grown", watched)
    [text] = write(drafter, "block", WAYS[:1], target, batch=1)
    assert grown == [0], "only the first tree was drawn from what the host said"
    assert target.served > text.stats.steps / 2
    assert drafter.passes >= 4 * (text.stats.steps - 1)
