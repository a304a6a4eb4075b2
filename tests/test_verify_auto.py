"""Auto: it picks by how the trees were drawn, and is then what it picked, coin for coin."""

from __future__ import annotations

import pytest
import torch

from branchwise.core.batch import TreeBatch
from branchwise.core.tree import DraftTree, Draw
from branchwise.verify import VERIFIERS
from branchwise.verify.auto import Auto, choose
from tests.test_verify_batches import Batch

FIXED = DraftTree.chain([1, 2, 3])
ONE = DraftTree(torch.tensor([0, 1]), (-1, 0), Draw.PATHS, torch.full((1, 4), 0.25), leaves=(1,))
TWO = DraftTree(torch.tensor([0, 1]), (-1, 0), Draw.PATHS, torch.full((1, 4), 0.25), leaves=(1, 1))
DISTINCT = DraftTree(torch.tensor([0, 1, 2]), (-1, 0, 0), Draw.WITHOUT_REPLACEMENT, torch.full((1, 4), 0.25))
ROOT = DraftTree.root(0)


@pytest.mark.parametrize(
    ("trees", "name"),
    [
        ([FIXED], "match"),
        ([ROOT], "match"),
        ([FIXED, ROOT], "match"),
        ([ONE], "block"),
        ([ROOT, ONE], "block"),
        ([TWO], "cascade"),  # two draws that agree are two draws
        ([ONE, TWO, ROOT], "cascade"),
        ([DISTINCT], "traversal"),
        ([ROOT, DISTINCT], "traversal"),
    ],
)
def test_what_is_picked(trees: list[DraftTree], name: str) -> None:
    assert choose(TreeBatch(trees)).name == name


def test_it_accepts_what_those_it_picks_accept() -> None:
    assert Auto.accepts == frozenset(Draw) - {Draw.FORK}
    for trees in ([FIXED], [ONE], [TWO], [DISTINCT]):
        assert trees[0].draw in choose(TreeBatch(trees)).accepts


@pytest.mark.parametrize("spec", ["paths:1x4", "paths:3x3", "rsd-c:3,2,1"])
@pytest.mark.parametrize("lazy", [True, False], ids=["host", "device"])
def test_it_gives_the_verdicts_of_what_it_picks(spec: str, lazy: bool) -> None:
    for seed in range(8):
        batch = Batch([spec] * 4, seed)
        picked = choose(TreeBatch(batch.trees)).name
        assert picked in VERIFIERS
        assert batch.verdicts("auto", lazy=lazy) == batch.verdicts(picked, lazy=lazy)
