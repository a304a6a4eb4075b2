"""Growing trees: a policy decides which nodes to expand, a source gives the distributions after them.

`TreePolicy.grow` is a coroutine. It yields the tree so far and the nodes whose distributions it needs, receives these,
draws, and in the end returns the tree. So one pass of a source can serve the requests of all sequences of a batch. A
policy that draws a whole level at once yields the draws as a request too, and those of all sequences are made together.

A lookup drafter computes nothing, so a policy that draws nothing can do without the coroutine. To `lay` a tree is to
build it directly from the candidates of the tables, one node at a time, on the host.

Two rules keep this exact. A policy may look at nodes that are drawn, but never at the token whose admission it is
deciding. And the q that it records is the very distribution that it drew from.
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
"""a position in the tables of a drafter, in a form that each drafter chooses; None if the drafter knows nothing of the
text up to this position"""


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
"""a function from a cursor to the tokens that may come next, most probable first"""

new = tuple.__new__
"""`new(Candidate, (token, mass, cursor, source))` costs less than the constructor: a step may make hundreds"""


@dataclass
class TreeBuilder:
    """A tree while it grows. Nodes are in the order in which they were added, parents before their children."""

    tokens: list[int]
    parents: list[int] = field(default_factory=lambda: [-1])
    depths: list[int] = field(default_factory=lambda: [0])
    probs: dict[int, Probs] = field(default_factory=dict)
    """node -> the distribution that its children are drawn from"""
    sources: dict[int, str] = field(default_factory=dict)
    """node -> the drafter that proposed it, if several do"""
    draws: list[int] = field(default_factory=list)
    """for a tree drawn with replacement: the node of each draw"""
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
        """Ask for the distributions after nodes, and record them as the q of their children."""
        found = yield self, nodes
        probs = found.drawable
        self.probs.update(zip(nodes, probs, strict=True))
        return probs

    def leading(self, nodes: int) -> TreeBuilder:
        """The tree of the first `nodes` nodes, with their sources. A tree that was drawn cannot be cut."""
        assert not self.probs
        sources = {node: source for node, source in self.sources.items() if node < nodes}
        return TreeBuilder(self.tokens[:nodes], self.parents[:nodes], self.depths[:nodes], sources=sources)

    def path(self, node: int) -> list[int]:
        """The tokens on the path from the root to a node, the root's excluded."""
        return [self.tokens[one] for one in reversed(self.branch(node))]

    def branch(self, node: int) -> list[int]:
        """A node and its ancestors, the root excluded."""
        found = []
        while node > 0:
            found.append(node)
            node = self.parents[node]
        return found

    @property
    def places(self) -> dict[int, int]:
        """node -> its place in level order; siblings keep the order in which they were added"""
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
    """Distributions in which masses too small for a verifier to divide by are 0."""
    kind = torch.finfo(probs.dtype)
    below = kind.tiny * (1 - kind.eps)  # the largest mass that is too small; on the host `where` takes far longer
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
        """The same distributions to draw from, in the form in which the source has them."""
        return drawable(self.found) if isinstance(self.found, Tensor) else self.found


TreeCoroutine = Generator[tuple[TreeBuilder, list[int]] | SampleRequest, Any, DraftTree]
"""yields (tree, nodes to expand) for their `NodeProbs`, or a `SampleRequest` for its draws; returns the tree"""


def grow_with(growing: TreeCoroutine, look: Callable[[TreeBuilder, list[int]], NodeProbs]) -> DraftTree:
    """Grow one tree by itself, over the distributions that `look` returns."""
    answer: Any = None
    while True:
        try:
            request = growing.send(answer)
        except StopIteration as end:
            tree: DraftTree = end.value
            return tree
        answer = request.alone() if isinstance(request, SampleRequest) else look(*request)


def tree_of_paths(root: int, paths: list[list[list[int]]], q: Tensor, length: int, draw: Draw) -> DraftTree:
    """The tree of the first `length` levels of paths that a device has drawn. Each path is a list of (token, node);
    paths that begin alike share nodes. `q` are the distributions after the nodes of the tree."""
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
    """The tree of one sequence, and what a step found about it."""

    sequence: SequenceState
    tree: DraftTree
    logits: Tensor
    """(nodes, vocabulary): the logits after each node; there may be more rows than the tree has nodes"""
    verdict: Verdict


class TreePolicy(ABC):
    """Decides which nodes a tree gets. A subclass sets `draw` and supplies `grow`.

    A policy that draws nothing may also set `lays` and supply `lay`. A lookup drafter then calls for every batch, in
    this order, `begin_batch`, `lay_all` and `drafted`, and never `grow`.
    """

    draw: Draw
    """how the trees of this policy are drawn"""
    learns: bool = False
    """whether the policy keeps something from one request to the next"""
    needs_hidden: bool = False
    """whether the policy looks at the hidden states of a draft model"""
    stoppable: bool = False
    """whether its trees may end before any level but the first: the policy grows level by level, never takes a node
    back, and its trees are drawn in the same way if the last levels are missing"""
    lays: bool = False
    """whether the policy supplies `lay`: it draws nothing, and can build its tree directly from candidates"""

    @property
    def pad_shape(self) -> PadShape | None:
        """The least size of a batch of its trees on a device, so that verdicts are recorded for one shape."""
        return None

    @property
    def largest(self) -> int:
        """The number of nodes below the root of its largest tree; 0 if only the budget bounds it."""
        return 0

    @property
    def watches(self) -> bool:
        """Whether `update` learns from steps; if not, the drafter does not split the logits by sequence for it."""
        return type(self).update is not TreePolicy.update

    def bind(self, target: TargetInfo, draft: Callable[[], str]) -> None:
        """Prepare for a target and its draft model, called only for a draft model; `draft()` is the fingerprint of its
        weights. Called before anything is grown, and again for another target."""

    @abstractmethod
    def grow(self, root: int, budget: Budget, sampler: DraftSampler) -> TreeCoroutine:
        """The coroutine of a tree below a root token."""

    def grow_for(self, sequence: SequenceState, budget: Budget, sampler: DraftSampler) -> TreeCoroutine:
        """The coroutine of the next tree of a sequence; a policy overrides it to use what it knows of the sequence."""
        return self.grow(sequence.root, budget, sampler)

    def lay(self, root: int, cursor: Cursor, candidates: Candidates, budget: Budget) -> TreeBuilder:
        """The tree that `grow` would return, built directly: `cursor` is the position of the root in the tables of a
        drafter, and `candidates` finds what may come after it and after every node."""
        raise NotImplementedError(f"{type(self).__name__} grows over distributions alone")

    def lay_all(
        self, roots: Sequence[int], cursors: Sequence[Cursor], candidates: Candidates, budgets: Sequence[Budget]
    ) -> list[TreeBuilder]:
        """The trees of a batch, one by one with `lay`; a policy overrides it to share nodes out among all of them."""
        texts = zip(roots, cursors, budgets, strict=True)
        return [self.lay(root, cursor, candidates, budget) for root, cursor, budget in texts]

    def begin_batch(self, size: int, target: TargetInfo | None) -> None:
        """Called before the trees of a batch of `size` sequences are laid."""

    def drafted(self) -> None:
        """Called when the trees of a batch are laid, just before the pass that scores them, which a policy may time."""

    def update(self, judged: Sequence[Judged]) -> None:
        """Learn from a step; called before its tokens join the sequences."""

    def forget(self) -> None:
        """Forget statistics about the sequences so far, which say nothing about later ones, but not what steps cost."""


class WrappedPolicy(TreePolicy):
    """A policy that delegates everything to another one; a subclass overrides what it changes."""

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
