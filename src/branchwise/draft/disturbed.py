"""The target itself as its drafter, disturbed: a drafter of any skill for any model, to test verifiers with.

It drafts with passes of the target, so it makes nothing faster. Its use is that q is as close to p as one likes:
q = softmax(logits / temperature + sigma noise), where the noise belongs to the text before a node. sigma = 0 draws from
the target's own law, 1 is a fair draft model, 3 a bad one.
"""

from __future__ import annotations

import zlib
from array import array
from collections.abc import Sequence as Rows

import torch
from torch import Tensor

from branchwise.chance import SeededChance
from branchwise.draft import Budget
from branchwise.draft.growth import Growing, Growth, Sapling
from branchwise.draft.paths import Paths
from branchwise.errors import UsageError
from branchwise.rows import total
from branchwise.sequence import Sequence
from branchwise.target import Scored, Target
from branchwise.tree import DraftTree, Forest
from branchwise.verify import Verdict


class Disturbed:
    name = "disturbed"
    cost = 1.0

    def __init__(self, sigma: float = 1.0, tree: Growth | None = None) -> None:
        if sigma < 0:
            raise UsageError(f"Drafter 'disturbed' needs a sigma of at least 0, not {sigma}.")
        self.sigma = sigma
        self.tree = tree or Paths("2x3")
        if not hasattr(self.tree, "grow"):
            raise UsageError("Drafter 'disturbed' draws its trees; use --tree paths:KxL or rsd-c:B1,B2,….")
        self.draw = self.tree.draw
        self.passes = 0
        self._target: Target | None = None

    def bind(self, target: Target) -> None:
        self._target = target

    def draft(self, sequences: Rows[Sequence], budgets: Rows[Budget]) -> list[DraftTree]:
        assert self._target is not None
        growing = [self._plant(sequence, budget) for sequence, budget in zip(sequences, budgets, strict=True)]
        wishes: dict[int, tuple[Sapling, list[int]]] = {}
        trees: dict[int, DraftTree] = {}
        for row, grow in enumerate(growing):
            _advance(grow, None, row, wishes, trees)
        while wishes:
            saplings = [
                wishes[row][0] if row in wishes else Sapling([sequences[row].root]) for row in range(len(growing))
            ]
            forest = Forest(
                [DraftTree(torch.tensor(tree.tokens), tuple(tree.parents)) for tree in saplings], self._target.device
            )
            logits = self._target.score(sequences, forest).logits
            self.passes += 1
            served, wishes = wishes, {}
            for row, (tree, nodes) in served.items():
                laws = torch.stack([self._law(sequences[row], tree, node, logits[row, node]) for node in nodes])
                _advance(growing[row], laws, row, wishes, trees)
        return [trees[row] for row in range(len(growing))]

    def observe(self, sequences: Rows[Sequence], scored: Scored, verdicts: Rows[Verdict]) -> None:
        pass

    def _plant(self, sequence: Sequence, budget: Budget) -> Growing:
        seed, root = torch.tensor([sequence.seed]), torch.tensor([len(sequence.tokens) - 1])
        assert self._target is not None
        device = self._target.device
        return self.tree.grow(sequence.root, budget, SeededChance(seed.to(device), root.to(device), role="draft"))

    def _law(self, sequence: Sequence, tree: Sapling, node: int, logits: Tensor) -> Tensor:
        """(vocabulary,): the target's law after a node, disturbed in a way that only the text before it decides."""
        drafted = []
        while node > 0:
            drafted.append(tree.tokens[node])
            node = tree.parents[node]
        text = zlib.crc32(array("q", [*sequence.tokens, *reversed(drafted)]).tobytes())
        noise = torch.randn(len(logits), generator=torch.Generator().manual_seed(text)).to(logits.device)
        temperature = sequence.sampling.temperature or 1.0
        law = torch.softmax(logits.float() / temperature + self.sigma * noise, dim=-1)
        return law / total(law).to(law.dtype)


def _advance(
    grow: Growing,
    laws: Tensor | None,
    row: int,
    wishes: dict[int, tuple[Sapling, list[int]]],
    trees: dict[int, DraftTree],
) -> None:
    """Let a tree grow to its next wish, or to its end."""
    try:
        wishes[row] = grow.send(laws)  # type: ignore[arg-type]
    except StopIteration as end:
        trees[row] = end.value
