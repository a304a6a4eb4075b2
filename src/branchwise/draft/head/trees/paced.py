"""The most probable tree of a head on a host, as large as pays.

On a host every level takes time, and every row makes the pass of the target longer, the second row most of all. So a
level that is unlikely to be reached is not grown, and as many nodes are kept as give most tokens a second. This is
decided by passes that are timed during generation, and by how often what the head proposed came true (`control`). If no
node pays, nothing is drafted.
"""

from __future__ import annotations

import math
import time
from collections.abc import Sequence
from itertools import accumulate
from typing import Any, NamedTuple

import numpy as np
import torch
from torch import Tensor

from branchwise.backends.base import TargetInfo
from branchwise.control.choice import Rest, Terms, best
from branchwise.control.costs import PassCostModel, batch_size_class, cost_model_of
from branchwise.control.trust import Kept, Trust, what_came
from branchwise.core.rows import WORD, words_for
from branchwise.core.tree import DraftTree
from branchwise.draft.head.trees.best_first import BestFirstDraft
from branchwise.draft.head.trees.copies import NOTHING, copied, with_copy
from branchwise.draft.policies.topk import TopK
from branchwise.verify import Verdict

UNLIKELY = 0.3
"""the least probability of a level's best path with which another level is grown below it"""


class Said(NamedTuple):
    """The proposed nodes of one text, with the probabilities that the head gave them."""

    masses: list[float]
    """probability of each node after its parent"""
    tokens: list[int]
    parents: list[int]
    chosen: list[int]
    """indices of the nodes that were drafted"""

    def kept(self, verdict: Verdict) -> dict[int, bool]:
        """node -> whether it came true, for all proposed nodes that a verdict decides, drafted or not."""
        path = [-1, *(self.chosen[node - 1] for node in verdict.path[1:])]
        found = what_came(self.tokens, self.parents, path, verdict.token)
        return {node: came for node, came in found.items() if self.masses[node]}


class Rows(NamedTuple):
    """Nodes of one text that are expanded together."""

    values: list[float]
    """log-probabilities of their paths"""
    nodes: list[int]
    """their indices among the proposed nodes, -1 for the root"""


class Proposed(NamedTuple):
    """All proposed nodes of the tree of one text, level by level, and after them those of a copy."""

    values: list[float]
    """log-probabilities of their paths"""
    tokens: list[int]
    parents: list[int]
    """indices of their parents, -1 for the root"""

    def add(self, rows: Rows, logprobs: list[list[float]], tokens: list[list[int]]) -> None:
        """Add the tokens that are proposed after each of some nodes."""
        for value, node, said, named in zip(*rows, logprobs, tokens, strict=True):
            self.values.extend(value + more for more in said)
            self.tokens.extend(named)
            self.parents.extend([node] * len(named))

    @property
    def masses(self) -> list[float]:
        """The probability of each node after its parent; 0 for a missing node."""
        above = [self.values[parent] if parent >= 0 else 0.0 for parent in self.parents]
        pairs = zip(self.values, above, strict=True)
        return [math.exp(min(0.0, value - over)) if value > NOTHING else 0.0 for value, over in pairs]

    @property
    def ranked(self) -> list[int]:
        """The nodes, the most probable path first; of equal paths, the one that was proposed first."""
        return sorted(range(len(self.values)), key=self.values.__getitem__, reverse=True)

    def best(self, count: int) -> list[int]:
        """The `count` nodes with the most probable paths, in ascending order."""
        return sorted(self.ranked[:count])

    def laid(self, root: int, chosen: list[int]) -> tuple[list[list[int]], list[list[int]]]:
        """Tokens, parents and depths of the root and the chosen nodes, and their ancestors as bits of words. A node
        whose parent was not chosen is padding."""
        place = {-1: 0} | {node: number for number, node in enumerate(chosen, start=1)}
        tokens, parents, depths, reach = [root], [-1], [0], [1]
        for number, node in enumerate(chosen, start=1):
            above = place.get(self.parents[node], -1)
            real = above >= 0 and reach[above] > 0
            tokens.append(self.tokens[node] if real else 0)
            parents.append(above if real else -1)
            depths.append(depths[above] + 1 if real else 0)
            reach.append(reach[above] | 1 << number if real else 0)
        words = words_for(len(tokens))
        bits = [[one >> WORD * word & (1 << WORD) - 1 for word in range(words)] for one in reach]
        return [tokens, parents, depths], bits


class PacedDraft(BestFirstDraft):
    def __init__(self, target: TargetInfo, level_cost: float, tree: TopK, *parts: Any, copies: int = 0) -> None:
        """`level_cost` is the cost of a level, in passes of the target."""
        super().__init__(tree, *parts, copies=copies)
        self._target = target
        self._costs = PassCostModel()
        self._texts = 0
        """number of texts of a batch, whose rows come before those of padding"""
        self._made = 0
        """number of levels that the current trees have so far"""
        self._laid: tuple[int, float] | None = None
        """rows of the target's current pass, and when it began"""
        self._level_cost = level_cost
        self._rests: dict[int, Rest] = {}
        """size of a batch -> its `Rest`: what pays for one text may cost too much for many"""
        self._rest, self._resting = Rest(), False
        self._begun = 0.0
        """when the step began"""
        self._trust, self._trust_in_copies = Trust(), Trust()
        self._said: list[Said] = []
        """proposed nodes of the trees that were grown last, text by text"""
        self._asked: list[Said] = []
        """proposed nodes of the trees that are scored, text by text"""

    def grow(self, slots: Tensor, lengths: Tensor, roots: Tensor) -> tuple[Tensor, ...]:
        """As `BestFirstDraft.grow`, but with lists: for so few numbers a host is faster with them."""
        slots, lengths = slots.long(), lengths.long()
        self._texts, width = int((slots != self.cache.padding).sum()), self._width
        every, texts = np.arange(len(slots))[:, None], [Proposed([], [], []) for _ in slots]
        predict, carry = self._at_roots(slots, roots.long())
        rows = [Rows([0.0], [-1]) for _ in slots]
        own = np.zeros((len(slots), 1, max(1, self.cells)), dtype=np.bool_)
        first, own_cells = 0, np.eye(width, dtype=np.bool_)
        for depth in range(1, self._grown + 1):
            likely = self._best(predict, slots, lengths, depth, width)
            for text, at, *said in zip(texts, rows, likely.logprobs.tolist(), likely.tokens.tolist(), strict=True):
                text.add(at, *said)
            new = [text.values[first:] for text in texts]
            if self._ends_at(depth, max(map(max, new))):
                break
            best = [sorted(range(len(values)), key=values.__getitem__, reverse=True)[:width] for values in new]
            rows = [
                Rows([values[node] for node in nodes], [first + node for node in nodes])
                for values, nodes in zip(new, best, strict=True)
            ]
            tokens = on_host([[text.tokens[node] for node in at.nodes] for text, at in zip(texts, rows, strict=True)])
            above = on_host(best) // width
            if self.grammars is not None:
                self.grammars.descend(above, tokens)
            first, cell = first + len(new[0]), (depth - 1) * width
            own = own[every, above.numpy()]
            own[:, :, cell : cell + width] |= own_cells
            predict, carry = self._below(
                slots, lengths, carry[torch.from_numpy(every), above], tokens, cell, torch.from_numpy(own), depth
            )
        if self._copies:
            texts = self._with_copies(texts, slots, lengths)
        masses = [text.masses for text in texts]
        size = self._size(texts, [self._worth(*pair) for pair in zip(masses, (t.parents for t in texts), strict=True)])
        chosen = [text.best(size) for text in texts]
        self._said = [
            Said(mass, text.tokens, text.parents, nodes)
            for mass, text, nodes in zip(masses, texts, chosen, strict=True)
        ]
        laid = [text.laid(root, nodes) for text, root, nodes in zip(texts, roots.tolist(), chosen, strict=True)]
        numbers, reach = zip(*laid, strict=True)
        tokens, parents, depths = on_host(numbers).unbind(1)
        return tokens, parents, depths, torch.from_numpy(np.array(reach, np.int64).astype(np.uint32).view(np.int32))

    def _with_copies(self, texts: list[Proposed], slots: Tensor, lengths: Tensor) -> list[Proposed]:
        nodes = tuple(torch.from_numpy(np.array([text[part] for text in texts])) for part in range(3))
        found = with_copy(nodes, copied(self.cache.tokens[slots], lengths, self._copies), self._grown)  # type: ignore[arg-type]
        return [Proposed(*parts) for parts in zip(*(part.tolist() for part in found), strict=True)]

    def _ends_at(self, depth: int, most: float) -> bool:
        """Whether no level is grown below level `depth`; `most` is the log-probability of its best path."""
        self._made = depth
        return depth == self._grown or not self._costs.knows_plain or math.exp(most) < UNLIKELY

    def _worth(self, masses: list[float], parents: list[int]) -> list[float]:
        """The probabilities of the paths of nodes, corrected by how often such nodes came true."""
        found: list[float] = []
        for node, (mass, parent) in enumerate(zip(masses, parents, strict=True)):
            found.append((found[parent] if parent >= 0 else 1.0) * self._trusted(node, len(masses)).worth(mass))
        return found

    def _trusted(self, node: int, nodes: int) -> Trust:
        return self._trust_in_copies if node >= nodes - self._copies else self._trust

    def _size(self, texts: list[Proposed], worth: list[list[float]]) -> int:
        """The number of nodes of each text that gives most tokens a second, for all texts together."""
        if not self._costs.knows_plain:
            return 0  # once in a while a plain step must be timed
        most = min(self.nodes - 1, len(texts[0].values))
        real = [*zip(texts, worth, strict=True)][: self._texts]
        gains = [[paths[node] for node in text.ranked[:most]] for text, paths in real]
        reached = [*accumulate(sum(gain) / len(real) for gain in zip(*gains, strict=True))]
        tokens = [1.0, *(1 + more for more in reached)]
        spent = self._made * self._level_cost
        costs = [spent + cost for cost in self._costs.costs(range(1, most + 2), hoped=True)]
        size = best(tokens, costs)
        return 0 if self._costs.unclear(1 + size, tokens[size] / costs[size] * costs[0]) else size

    def rests(self, batch: int) -> bool:
        size = batch_size_class(batch)
        self._costs = cost_model_of(self._target, batch)
        self._rest = self._rests.setdefault(size, Rest(Terms().for_texts(size)))
        self._begun, self._resting = time.perf_counter(), self._rest.advance()
        if self._resting:
            self._said = []
        return self._resting

    def begin(self) -> None:
        asked, self._begun = self._begun, time.perf_counter()
        if self._costs.knows_plain:
            self._rest.invest((self._begun - asked) / self._costs.plain_seconds)

    def drafted(self, trees: Sequence[DraftTree]) -> None:
        self._laid = max(map(len, trees)), time.perf_counter()
        self._asked = self._said

    def scored(self, verdicts: Sequence[Verdict]) -> None:
        if self._laid is None:
            return
        rows, start = self._laid
        self._laid = None
        now = time.perf_counter()
        self._costs.record(rows, now - start)
        if not self._resting and self._costs.knows_plain:
            tokens = sum(len(verdict.path) for verdict in verdicts) / len(verdicts)
            self._rest.record(tokens, (now - self._begun) / self._costs.plain_seconds)
        for said, verdict in zip(self._asked, verdicts, strict=False):
            seen: dict[Trust, list[Kept]] = {}
            for node, came in said.kept(verdict).items():
                seen.setdefault(self._trusted(node, len(said.masses)), []).append(Kept(said.masses[node], came))
            for trust, kept in seen.items():
                trust.record(kept)

    def forget(self) -> None:
        self._trust, self._trust_in_copies = Trust(), Trust()
        self._rests.clear()


def on_host(numbers: Any) -> Tensor:
    """Lists of integers as an int64 tensor on the host, whatever torch's default device and dtype are."""
    return torch.from_numpy(np.array(numbers, np.int64))
