"""The tree of a draft model as a memory: what it has just drafted can be looked up like anything else.

So a model takes its place among the memories of a fusion (RASD, arXiv 2503.03434). Where it has looked it also has a
law, against which what others retrieved can be held.
"""

from __future__ import annotations

from collections.abc import Sequence as Rows

from torch import Tensor

from branchwise.draft import DRAFTERS, Budget
from branchwise.draft.dice import Dice, Throw
from branchwise.draft.growth import Found, Growing
from branchwise.draft.memory import Next, Place, Remembering
from branchwise.draft.topk import TopK
from branchwise.sequence import Sequence
from branchwise.target import Scored, Target
from branchwise.tree import DraftTree
from branchwise.verify import Verdict

TREE = TopK(24, depth=6, width=8)
"""what the model drafts: in a fusion, depth comes from the memories"""


class Ahead(Remembering):
    """A draft model among memories. Its place is the path from the root, and behind its tree it knows nothing."""

    name = "model"

    def __init__(self, spec: str) -> None:
        super().__init__(TREE)
        self._watched = Watched(TREE)
        self._drafter = DRAFTERS.build(spec, tree=self._watched)
        self._known: dict[Sequence, Drafted] = {}

    @property
    def cost(self) -> float | None:
        return self._drafter.cost  # type: ignore[no-any-return]

    def bind(self, target: Target) -> None:
        super().bind(target)
        self._drafter.bind(target)

    def close(self, sequence: Sequence) -> None:
        super().close(sequence)
        self._drafter.close(sequence)
        self._known.pop(sequence, None)

    def look_ahead(self, sequences: Rows[Sequence], budgets: Rows[Budget]) -> None:
        """Draft for all texts together, before anyone asks."""
        trees = self._drafter.draft(sequences, budgets)
        self.passes = self._drafter.passes
        for sequence, tree in zip(sequences, trees, strict=True):
            self._known[sequence] = Drafted(tree, self._watched.laws.pop(sequence, {}))

    def learn(self, sequences: Rows[Sequence], scored: Scored, verdicts: Rows[Verdict]) -> None:
        """What the draft model recalls of the target it learns from the tree that was scored, whoever drafted it."""
        self._drafter._drafted = self._drafted
        self._drafter.observe(sequences, scored, verdicts)

    def find(self, sequence: Sequence) -> Place:
        return self._known[sequence], ()

    def after(self, place: Place) -> Rows[Next]:
        drafted, path = place
        return [Next(token, mass, (drafted, (*path, token))) for token, mass in drafted.below.get(path, ())]

    def law(self, place: Place) -> Tensor | None:
        """(vocabulary,): what the model found behind a path, where it looked."""
        drafted, path = place
        found: Tensor | None = drafted.laws.get(path)
        return found


class Drafted:
    """A tree and the laws it was made from, by the tokens below the root."""

    def __init__(self, tree: DraftTree, laws: dict[tuple[int, ...], Tensor]) -> None:
        self.laws = laws
        self.below: dict[tuple[int, ...], list[tuple[int, float]]] = {}
        paths: list[tuple[int, ...]] = [()]
        for token, parent in zip(tree.tokens[1:].tolist(), tree.parents[1:], strict=True):
            above = paths[parent]
            paths.append((*above, token))
            self.below.setdefault(above, []).append((token, min(float(laws[above][token]), 1.0)))


class Watched:
    """A growth whose laws are kept as they pass by."""

    def __init__(self, growth: TopK) -> None:
        self.growth = growth
        self.draw = growth.draw
        self.laws: dict[Sequence, dict[tuple[int, ...], Tensor]] = {}

    def grow(self, root: int, budget: Budget, dice: Dice) -> Growing:
        return self.growth.grow(root, budget, dice)

    def plant(self, sequence: Sequence, budget: Budget, dice: Dice) -> Growing:
        laws = self.laws[sequence] = {}
        growing = self.grow(sequence.root, budget, dice)
        found: Found | None = None
        while True:
            try:
                asked = growing.send(found)
            except StopIteration as end:
                finished: DraftTree = end.value
                return finished
            found = yield asked
            if isinstance(asked, Throw):
                continue
            tree, nodes = asked
            laws.update((tuple(tree.path(node)), law) for node, law in zip(nodes, found.laws, strict=True))
