"""Token Recycling: tokens that the target found probable after a token are proposed after the same token again.

Luo et al., "Turning Trash into Treasure: Accelerating Inference of Large Language Models with Token Recycling" (arXiv
2408.08696). A pass over a tree computes distributions for all its nodes, and most of them are discarded with the nodes.
The drafter keeps the best successors of every token in a table, rejected tokens included. Unlike the paper's table,
this one learns from the prompt first, and keeps running averages of the model's probabilities at temperature 1, so that
a tree can grow where they are high.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

from branchwise.backends.base import Needs, Prefill, Scored, ScoredNodes, TargetInfo
from branchwise.core.batch import lay_out
from branchwise.core.sequence import SequenceState
from branchwise.core.topology import Topology
from branchwise.core.tree import DraftTree, Draw
from branchwise.cuda.graphs import GraphedFunction, have_kernels
from branchwise.cuda.inputs import BATCHES, PinnedBuffer, fitting
from branchwise.draft.base import Budget, LearningDrafter
from branchwise.draft.builder import Candidate, TreePolicy
from branchwise.draft.lookup.base import LookupDrafter
from branchwise.draft.policies.paths import Paths
from branchwise.draft.policies.template import Ranks, places_in, ways
from branchwise.draft.policies.topk import TopK
from branchwise.draft.recycle.adjacency import ACCEPTED, MOST_PATHS, PADDING, REJECTED, AdjacencyTable, DevicePaths
from branchwise.draft.recycle.topk import HostTopTokens, ReportedTopTokens, host_top_tokens, top_tokens_at
from branchwise.errors import UsageError
from branchwise.verify import Verdict, Verdicts

PREFILL = 128
"""number of distributions of a prompt that are learned from, the last ones"""
MOST_PARTS = 256
"""most shapes of smaller trees whose indices are kept on the device"""
MOST_WIDTH = 16
"""most successors of a token that the kernels are used for: they find them one after the other"""


class Recycle(LookupDrafter, LearningDrafter):
    """`recycle:k=8,rate=0.5,rows=16`: a table of k successors for every token.

    A new distribution has the weight `rate` in the average, or 1 if its token is seen for the first time. On the host a
    step learns from at most `rows` nodes of a text: the end of the accepted path, then rejected nodes level by level,
    because their tokens are often written soon.

    On a device with kernels the table is on the device if the policy is a tree of ranks, whose tokens are looked up on
    the device, or paths, which are drawn on it (`DevicePaths`). The table then learns from all nodes, and nothing is
    read back. Other trees are laid on the host, with the table on the host; the device then reports the best tokens
    after each node.
    """

    name = "recycle"

    def __init__(self, k: int = 8, rate: float = 0.5, rows: int = 16, tree: TreePolicy | None = None) -> None:
        if k < 1 or not 0 < rate <= 1 or rows < 1:
            raise UsageError("Drafter 'recycle' takes k and rows of at least 1 and a rate above 0 and up to 1.")
        super().__init__(tree or TopK(64, depth=8, width=k))
        self.k, self.rate, self.rows = k, rate, rows
        self.on_device = False
        """whether the table is on the device, and kernels learn, look up trees of ranks and draw paths"""
        self._table: AdjacencyTable | None = None
        self._bound_to: tuple[int, int, torch.device] | None = None
        self._whole: Topology | None = None
        """shape of the largest tree that is looked up"""
        self._paths: DevicePaths | None = None
        self._parts: dict[Topology, Tensor] = {}  # indices of the nodes of a smaller tree in the whole, on the device
        self._roots: dict[int, PinnedBuffer] = {}  # by the number of texts
        self._ahead: Tensor | None = None
        """(texts, nodes): tokens of whole trees below the tokens of the last verdicts"""
        self._expected: list[tuple[SequenceState, int]] = []
        """the text of each of these trees, and its expected root"""
        self._next: list[DraftTree] | None = None
        """the same trees, cut to budgets"""

    @property
    def table(self) -> AdjacencyTable:
        assert self._table is not None, "the table has as many rows as the target has tokens: bind it first"
        return self._table

    @property
    def needs(self) -> Needs:
        return replace(super().needs, prefill_logits=PREFILL, topk=0 if self.on_device else 2 * self.k)

    def bind(self, target: TargetInfo) -> None:
        if target is not self.target:
            self._paths = None
        super().bind(target)
        width = min(self.k, target.vocabulary)
        fits = isinstance(self.tree, Ranks) or (isinstance(self.tree, Paths) and self.tree.count <= MOST_PATHS)
        fits &= width <= MOST_WIDTH and target.execution.kernels
        self.on_device = fits and have_kernels(target.device)
        wanted = target.vocabulary, width, target.device if self.on_device else torch.device("cpu")
        self._captures = target.execution.graphs
        if self._table is None or self._bound_to != wanted:
            self._move_to(*wanted)

    def _move_to(self, vocabulary: int, width: int, place: torch.device) -> None:
        """Create the table on a device, with what was learned so far if it fits."""
        known, self._table = self._table, AdjacencyTable(vocabulary, width, place)
        if known is not None and known.tokens.shape == self._table.tokens.shape:
            self._table.put({"tokens": known.tokens.cpu(), "masses": known.masses.cpu()})
        self._bound_to, self._whole, self._paths = (vocabulary, width, place), None, None
        self._ahead = self._next = None
        self._parts.clear()
        self._roots.clear()
        if self.on_device:
            self._tables = self._table.tokens, self._table.masses
            how = {"capture": self._captures, "learner": self._kernels.learn_marked, "rate": self.rate}
            self._learning = GraphedFunction(learn_judged, place, self._tables, writes=True, **how)

    def locate(self, sequence: SequenceState) -> int:
        return sequence.root

    def candidates(self, cursor: int | None) -> list[Candidate]:
        return [] if cursor is None else self.table.row(cursor)

    def advance(self, cursor: int | None, token: int) -> int:
        return token

    def draft(self, sequences: Sequence[SequenceState], budgets: Sequence[Budget]) -> list[DraftTree]:
        if self.on_device and isinstance(self.tree, Paths):
            assert self.target is not None, "a table is bound to a target"
            self._paths = self._paths or DevicePaths(self.tree, *self._tables, self.target, self._kernels.draw_paths)
            self._drafted = self._paths(sequences, budgets)
            return self._drafted
        if not self.on_device or not isinstance(self.tree, Ranks):
            return super().draft(sequences, budgets)
        wanted = [(sequence, sequence.root) for sequence in sequences]
        # Trees that were looked up in advance are right if the batch is the same and every root is as expected.
        expected = wanted == self._expected
        trees, self._next = self._next if expected else None, None
        if trees is None:
            found, self._ahead = self._ahead if expected else None, None
            found = self.looked_up([root for _, root in wanted]) if found is None else found
            trees = self._within(found, budgets)
        self.tree.drafted()
        self._drafted = trees
        return trees

    def draft_next(self, budgets: Sequence[Budget]) -> list[DraftTree] | None:
        if self._ahead is None or not isinstance(self.tree, Ranks):
            return None
        if min(budget.depth for budget in budgets) < self.tree.shape.depth:  # the trees may have to be smaller
            return None
        self._next, self._ahead = self._within(self._ahead, budgets), None
        return self._next

    def _within(self, found: Tensor, budgets: Sequence[Budget]) -> list[DraftTree]:
        """Trees of the tokens `found` (at least as many texts as budgets, nodes), cut to budgets."""
        assert isinstance(self.tree, Ranks), "only a tree of ranks is looked up"
        self.tree.begin_batch(len(budgets), self.target)
        shapes = [self.tree.within(budget, self.table.width) for budget in budgets]
        pairs = zip(found, shapes, strict=False)
        return [DraftTree(self._part(row, shape), shape.parents, Draw.FIXED) for row, shape in pairs]

    def looked_up(self, roots: list[int]) -> Tensor:
        """(roots, nodes): the tokens of whole trees, without waiting for the device; the next call overwrites them.
        Tokens after a token with an empty row are arbitrary, and are verified like all others."""
        size = fitting(len(roots), BATCHES)  # one of a few sizes, each of which is recorded
        if size not in self._roots:
            self._roots[size] = PinnedBuffer(size, self.table.tokens.device)
        buffer = self._roots[size]
        buffer.host[: len(roots)] = roots
        return self._looked(buffer.copy())[: len(roots)]

    def _looked(self, roots: Tensor) -> Tensor:
        if self._whole is None:
            assert isinstance(self.tree, Ranks), "only a tree of ranks is looked up"
            table, self._whole = self.table.tokens, self.tree.whole(self.table.width)
            ranks = torch.tensor(ways(self._whole), dtype=torch.int32).to(table.device, non_blocking=True)
            self._lookup = GraphedFunction(self._kernels.walk, table.device, (table, ranks), capture=self._captures)
        found: Tensor = self._lookup(roots)
        return found

    def _part(self, whole: Tensor, shape: Topology) -> Tensor:
        """(nodes,): the tokens of a smaller tree, gathered from a whole one: look-ups are recorded for one shape
        only."""
        assert self._whole is not None, "nothing was looked up"
        if shape is self._whole:
            return whole
        if shape not in self._parts:
            if len(self._parts) > MOST_PARTS:
                self._parts.clear()
            self._parts[shape] = _upload(places_in(self._whole, shape), whole)
        return whole.index_select(0, self._parts[shape])

    def start(self, sequence: SequenceState, prefill: Prefill) -> None:
        if not len(logits := prefill.logits):
            return
        tokens = sequence.tokens[-1 - len(logits) : -1]
        if self.on_device:
            # Padded to one shape for prompts of all lengths: kernels are compiled for every shape.
            left = max(PREFILL - len(logits), 0)
            uploaded = _upload([*tokens, *[0] * left], logits)[None]
            marks = _upload([*[ACCEPTED] * len(logits), *[PADDING] * left], logits)[None]
            padded = torch.nn.functional.pad(logits, (0, 0, 0, left))[None]
            self._kernels.learn_marked(*self._tables, uploaded, padded, marks, rate=self.rate)
            self.table.forget_read()
        else:
            self._learn_in_turn(tokens, host_top_tokens(logits, self.table.width))

    def update_on_device(self, scored: Scored, verdicts: Verdicts) -> None:
        """Enqueue learning from all nodes and the look-up of the next trees, before the host reads the verdict."""
        # After an interrupted step no trees may be left.
        self._ahead = self._next = None
        self._expected = []
        if not self.on_device:
            return
        nodes = scored.nodes or self._nodes(scored.logits)
        inputs = nodes.tokens, nodes.ancestor_bits, nodes.slots, scored.logits, verdicts.paths
        if scored.nodes is None:  # a pass that was not recorded, whose logits have no fixed address
            learn_judged(*self._tables, *inputs, learner=self._kernels.learn_marked, rate=self.rate)
        else:
            self._learning(*inputs)
        self.table.forget_read()
        self._ahead = self._looked(verdicts.tokens) if isinstance(self.tree, Ranks) else None

    def learn(self, sequences: Sequence[SequenceState], scored: Scored, verdicts: Sequence[Verdict]) -> None:
        if self.on_device:
            self._expected = [(sequence, verdict.token) for sequence, verdict in zip(sequences, verdicts, strict=True)]
            return
        nodes = [_worth(tree, verdict.path, self.rows) for tree, verdict in zip(self._drafted, verdicts, strict=True)]
        drafted = [tree.tokens.tolist() for tree in self._drafted]
        tokens = [tree[node] for tree, few in zip(drafted, nodes, strict=True) for node in few]
        wide = scored.logits.shape[1]
        rows = [text * wide + node for text, few in enumerate(nodes) for node in few]
        self._learn_in_turn(tokens, top_tokens_at(scored, rows, self.table.width))

    def save(self) -> dict[str, Tensor]:
        return {"tokens": self.table.tokens.cpu().clone(), "masses": self.table.masses.cpu().clone()}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        self.table.put(tensors)

    def _learn_in_turn(self, tokens: list[int], found: HostTopTokens | ReportedTopTokens) -> None:
        """Average the distributions after tokens into the table, in their order: in several turns, each of which has
        every token at most once."""
        turns: list[dict[int, int]] = []  # token -> row
        for row, token in enumerate(tokens):
            turn = next((turn for turn in turns if token not in turn), None)
            if turn is None:
                turns.append(turn := {})
            turn[token] = row
        for turn in turns:
            self.table.mix(turn, found, self.rate)

    def _nodes(self, logits: Tensor) -> ScoredNodes:
        """The nodes of the trees that were drafted last, padded like the pass over them."""
        batch, nodes, _ = logits.shape
        rows = [tree.tokens.to(logits.device, non_blocking=True) for tree in self._drafted]
        tokens = torch.nn.utils.rnn.pad_sequence(rows, batch_first=True)
        tokens = torch.nn.functional.pad(tokens, (0, nodes - tokens.shape[1], 0, batch - len(rows)))
        slots = [*range(len(rows)), *[-1] * (batch - len(rows))]
        layout = lay_out(tuple(tree.topology for tree in self._drafted), nodes)
        bits = torch.nn.functional.pad(_upload(layout.ancestor_bits, logits), (0, 0, 0, 0, 0, batch - len(rows)))
        uploaded = _upload(slots, logits)
        return ScoredNodes(tokens, bits, uploaded, torch.zeros_like(uploaded))

    @property
    def _kernels(self) -> Any:
        from branchwise.draft.recycle import kernels  # Triton is installed only on machines with a CUDA device

        return kernels


def learn_judged(
    table: Tensor,
    masses: Tensor,
    tokens: Tensor,
    ancestor_bits: Tensor,
    slots: Tensor,
    logits: Tensor,
    paths: Tensor,
    *,
    learner: Callable[..., None],
    rate: float,
) -> None:
    """Learn from the nodes of a pass, given as in `ScoredNodes`, and from the accepted paths (batch, depth + 1)."""
    real = (ancestor_bits != 0).any(dim=2) & (slots >= 0)[:, None]
    accepted = torch.zeros_like(real).scatter(1, paths.clamp_min(0), True)  # the padding of a path marks its root
    learner(table, masses, tokens, logits, torch.where(accepted, ACCEPTED, REJECTED) * real, rate=rate)


def _worth(tree: DraftTree, path: tuple[int, ...], most: int) -> list[int]:
    """The nodes to learn from on the host, at most `most`: some rejected ones, then the end of the accepted path."""
    path = path[-most:]
    others = [node for node in range(1, len(tree)) if node not in path]
    return [*others[: most - len(path)], *path]


def _upload(numbers: Sequence[int] | NDArray[np.integer], like: Tensor) -> Tensor:
    """Numbers on the device of a tensor, without waiting for it."""
    return torch.tensor(numbers).to(like.device, non_blocking=True)
