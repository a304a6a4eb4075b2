"""Growing trees: a policy decides which nodes to expand, a source says what could follow them.

A policy is a coroutine. It yields the tree so far and the nodes whose distributions it needs, receives them, draws, and
in the end returns the tree. So one pass of a source can serve the requests of all sequences of a batch. A policy that
draws a whole level at once yields that too, and the draws of all sequences are made together. Over a table that is
looked up, a policy that draws nothing may take a shorter way: `lay` reads candidates one node at a time, on the host.

What keeps it exact: a policy may look at nodes that are drawn, never at the token whose admission it is deciding, and
the q it records is the very distribution that it drew from.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Generator, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from branchwise.backends.base import TargetInfo
from branchwise.core.batch import PadShape
from branchwise.core.sequence import SequenceState
from branchwise.core.tree import DraftTree, Draw
from branchwise.draft.base import Budget
from branchwise.draft.sampler import DraftSampler, SampleRequest
from branchwise.draft.sparse import Probs, ProbsBatch, table
from branchwise.verify import Verdict

Cursor = Any
"""a position in the tables of a drafter, in a form of its own; None if it knows nothing of the text up to there"""


class Candidate(NamedTuple):
    """A token that may come next."""

    token: int
    mass: float
    """its estimated probability: above 0, and together with the other candidates of a cursor at most 1"""
    cursor: Cursor
    """the position after it"""
    source: str = ""
    """the drafter that proposed it, if several drafters are fused"""


Candidates = Callable[[Cursor], Sequence[Candidate]]
"""what may come next at a cursor, most probable first"""

new = tuple.__new__
"""`new(Candidate, (token, mass, cursor, source))` costs less than the constructor: a step may make hundreds"""


@dataclass
class TreeBuilder:
    """A tree while it grows. Nodes are in the order in which they joined, parents before their children."""

    tokens: list[int]
    parents: list[int] = field(default_factory=lambda: [-1])
    depths: list[int] = field(default_factory=lambda: [0])
    probs: dict[int, Probs] = field(default_factory=dict)
    """node -> the distribution that its children are drawn from"""
    sources: dict[int, str] = field(default_factory=dict)
    """node -> the drafter that proposed it, if several do"""
    draws: list[int] = field(default_factory=list)
    """for a tree drawn with replacement: the node that each draw came to"""
    trusted: bool = False
    """whether the first level is drawn from what the target wants (`DraftTree.trusted`)"""

    def __len__(self) -> int:
        return len(self.tokens)

    def add(self, parent: int, token: int, source: str = "") -> int:
        """Add a node, and return its number."""
        self.tokens.append(token)
        self.parents.append(parent)
        self.depths.append(self.depths[parent] + 1)
        node = len(self.tokens) - 1
        if source:
            self.sources[node] = source
        return node

    def expand(self, nodes: list[int]) -> Generator[tuple[TreeBuilder, list[int]], NodeProbs, ProbsBatch]:
        """Ask for the distributions after nodes; what is drawn from them is recorded as q."""
        found = yield self, nodes
        probs = found.drawable
        self.probs.update(zip(nodes, probs, strict=True))
        return probs

    def leading(self, nodes: int) -> TreeBuilder:
        """The tree of the first nodes, with their sources. A tree that was drawn cannot be cut."""
        assert not self.probs
        sources = {node: source for node, source in self.sources.items() if node < nodes}
        return TreeBuilder(self.tokens[:nodes], self.parents[:nodes], self.depths[:nodes], sources=sources)

    def path(self, node: int) -> list[int]:
        """The tokens from below the root to a node."""
        return [self.tokens[one] for one in reversed(self.branch(node))]

    def branch(self, node: int) -> list[int]:
        """A node and those above it, the root excluded."""
        found = []
        while node > 0:
            found.append(node)
            node = self.parents[node]
        return found

    @property
    def places(self) -> dict[int, int]:
        """node -> its place in level order; siblings keep the order in which they joined"""
        order = sorted(range(len(self)), key=self.depths.__getitem__)
        return {node: place for place, node in enumerate(order)}

    def finish(self, draw: Draw, leaves: tuple[int, ...] = ()) -> DraftTree:
        """The tree in level order."""
        place = self.places
        order = list(place)
        parents = tuple(place.get(self.parents[node], -1) for node in order)
        q = None
        if draw is not Draw.FIXED and len(self) > 1:
            q = table([self.probs.get(node) for node in order[: max(parents) + 1]])
        tokens = torch.tensor([self.tokens[node] for node in order])
        ends = tuple(place[leaf] for leaf in leaves)
        draws = tuple(place[node] for node in self.draws) if draw is Draw.WITH_REPLACEMENT else ()
        sources = tuple(self.sources.get(node, "") for node in order) if self.sources else ()
        trusted = self.trusted and draw is Draw.FORK
        return DraftTree(tokens, parents, draw, q, ends, draws, trusted=trusted, sources=sources)


def drawable(probs: Tensor) -> Tensor:
    """Distributions without masses so small that a verifier could not divide by them."""
    kind = torch.finfo(probs.dtype)
    below = kind.tiny * (1 - kind.eps)  # the largest of those; on the host `where` takes far longer
    return torch.nn.functional.threshold(probs, below, 0.0)


@dataclass(eq=False)
class NodeProbs:
    """The distributions after the nodes that a policy asked for."""

    found: ProbsBatch
    hidden: Tensor | None = None
    """(nodes, width): the inputs of a draft model's head, if the policy needs them"""

    @cached_property
    def probs(self) -> Tensor:
        """(nodes, vocabulary) float32"""
        return self.found if isinstance(self.found, Tensor) else table(self.found)

    @property
    def drawable(self) -> ProbsBatch:
        """The same to draw from, in the form in which the source has them."""
        return drawable(self.found) if isinstance(self.found, Tensor) else self.found


TreeCoroutine = Generator[tuple[TreeBuilder, list[int]] | SampleRequest, Any, DraftTree]
"""yields (tree, nodes to expand) for their `NodeProbs`, or a `SampleRequest` for its draws; returns the tree"""


def grow_with(growing: TreeCoroutine, look: Callable[[TreeBuilder, list[int]], NodeProbs]) -> DraftTree:
    """Grow one tree alone, over the distributions of `look`."""
    answer: Any = None
    while True:
        try:
            request = growing.send(answer)
        except StopIteration as end:
            tree: DraftTree = end.value
            return tree
        answer = request.alone() if isinstance(request, SampleRequest) else look(*request)


def tree_of_paths(root: int, paths: list[list[list[int]]], q: Tensor, length: int, draw: Draw) -> DraftTree:
    """The first levels of paths that a device has drawn and numbered, each a list of (token, node), merged where they
    agree; `q` are the distributions after its nodes."""
    nodes, ends = {0: (-1, root)}, [0] * len(paths)
    for level in range(length):
        for path, steps in enumerate(paths):
            token, node = steps[level]
            nodes[node] = ends[path], token
            ends[path] = node
    parents, tokens = zip(*(nodes[node] for node in range(len(nodes))), strict=True)
    leaves = tuple(ends) if draw is Draw.PATHS else ()
    return DraftTree(torch.tensor(tokens), parents, draw, q[: max(parents) + 1] if length else None, leaves)


class Judged(NamedTuple):
    """What a step found about the tree of one sequence."""

    sequence: SequenceState
    tree: DraftTree
    logits: Tensor
    """(nodes, vocabulary), at least as many nodes as the tree has"""
    verdict: Verdict


class TreePolicy(ABC):
    """Decides which nodes a tree gets. A policy subclasses it, sets `draw` and supplies `grow`."""

    draw: Draw
    """how its trees are drawn"""
    learns: bool = False
    """whether it keeps something from one request to the next"""
    needs_hidden: bool = False
    """whether it looks at the hidden states of a draft model"""
    stoppable: bool = False
    """whether its trees may end before any level but the first: it grows level by level, never takes a node back, and
    its trees are drawn in the same way if the last levels are missing"""
    lays: bool = False
    """whether it supplies `lay`"""

    @property
    def pad_shape(self) -> PadShape | None:
        """The least size of a batch of its trees on a device, where verdicts are recorded for one shape."""
        return None

    @property
    def largest(self) -> int:
        """Nodes below the root of its largest tree; 0 if only the budget bounds it."""
        return 0

    @property
    def watches(self) -> bool:
        """Whether `update` learns from steps; if not, nobody tells their rows apart for it."""
        return type(self).update is not TreePolicy.update

    def bind(self, target: TargetInfo, draft: Callable[[], str]) -> None:
        """The draft model of a target grows its trees; `draft()` is the fingerprint of its weights. Called before
        anything is grown, and again for another target."""

    @abstractmethod
    def grow(self, root: int, budget: Budget, sampler: DraftSampler) -> TreeCoroutine:
        """A tree below a root token."""

    def grow_for(self, sequence: SequenceState, budget: Budget, sampler: DraftSampler) -> TreeCoroutine:
        """The next tree of a sequence; a policy that knows something of the sequence uses it here."""
        return self.grow(sequence.root, budget, sampler)

    def lay(self, root: int, cursor: Cursor, candidates: Candidates, budget: Budget) -> TreeBuilder:
        """The tree that `grow` would return, over candidates from a cursor on."""
        raise NotImplementedError(f"{type(self).__name__} grows over distributions alone")

    def lay_all(
        self, roots: Sequence[int], cursors: Sequence[Cursor], candidates: Candidates, budgets: Sequence[Budget]
    ) -> list[TreeBuilder]:
        """The trees of a batch; a policy that decides over them together does so here."""
        texts = zip(roots, cursors, budgets, strict=True)
        return [self.lay(root, cursor, candidates, budget) for root, cursor, budget in texts]

    def begin_batch(self, size: int, target: TargetInfo | None) -> None:
        """The trees of so many sequences are about to be laid."""

    def drafted(self) -> None:
        """The trees of a batch are laid, and their pass follows."""

    def update(self, judged: Sequence[Judged]) -> None:
        """Learn from a step; called before its tokens join the sequences."""

    def forget(self) -> None:
        """The texts so far say nothing of later ones. What steps cost stays known."""


class WrappedPolicy(TreePolicy):
    """A policy in the name of another one: a subclass changes some of what it does, and all the rest is the other's."""

    def __init__(self, policy: TreePolicy) -> None:
        self.policy, self.draw = policy, policy.draw
        self.learns, self.needs_hidden = policy.learns, policy.needs_hidden
        self.stoppable, self.lays = policy.stoppable, policy.lays

    @property
    def pad_shape(self) -> PadShape | None:
        return self.policy.pad_shape

    @property
    def largest(self) -> int:
        return self.policy.largest

    @property
    def watches(self) -> bool:
        return self.policy.watches

    def bind(self, target: TargetInfo, draft: Callable[[], str]) -> None:
        self.policy.bind(target, draft)
        self.needs_hidden = self.policy.needs_hidden

    def grow(self, root: int, budget: Budget, sampler: DraftSampler) -> TreeCoroutine:
        return self.policy.grow(root, budget, sampler)

    def grow_for(self, sequence: SequenceState, budget: Budget, sampler: DraftSampler) -> TreeCoroutine:
        return self.policy.grow_for(sequence, budget, sampler)

    def lay(self, root: int, cursor: Cursor, candidates: Candidates, budget: Budget) -> TreeBuilder:
        return self.policy.lay(root, cursor, candidates, budget)

    def lay_all(
        self, roots: Sequence[int], cursors: Sequence[Cursor], candidates: Candidates, budgets: Sequence[Budget]
    ) -> list[TreeBuilder]:
        return self.policy.lay_all(roots, cursors, candidates, budgets)

    def begin_batch(self, size: int, target: TargetInfo | None) -> None:
        self.policy.begin_batch(size, target)

    def drafted(self) -> None:
        self.policy.drafted()

    def update(self, judged: Sequence[Judged]) -> None:
        self.policy.update(judged)

    def forget(self) -> None:
        self.policy.forget()
