"""Paths drawn on a device, over a table of successors that lies there.

The host draws a path level by level, and every level would be a look at the device. Here all paths of all texts go down
the table in one recorded function: one copy tells it which texts, one look shows what was drawn, and q is written
beside that from the very masses that were drawn with. With the same table and the same seed these are the tokens, the
nodes and the distributions of the host, `Paths.grow` over `SparseProbs`, number for number; `draw` says how, and the
kernel of `paths_kernel.py` does the same in one launch.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch
from torch import Tensor

from branchwise.backends.base import Target
from branchwise.core.batch import PadShape
from branchwise.core.rng import GAMMA, _first, mix, stream_of
from branchwise.core.rows import BLOCK
from branchwise.core.sequence import SequenceState
from branchwise.core.tree import DraftTree, Draw
from branchwise.cuda.graphs import GraphedFunction, have_kernels
from branchwise.cuda.inputs import BATCHES, PinnedBuffer, fitting
from branchwise.draft.base import Budget
from branchwise.draft.policies.paths import Paths

PICKS = stream_of("draft", "pick", 0)
"""where the draws of `SeededSampler` begin: a draft made with the noise that judges it is no draw"""
TOLD = 4
"""numbers that are told of a text: its root, its noise, where the root stands, and whether nothing is left to chance"""
WIDEST_KERNEL = 64
"""paths, or successors of a token, that one program holds"""


class DevicePaths:
    """The paths of a growth over a table, its tokens and masses (vocabulary, width) on a device."""

    def __init__(self, policy: Paths, tokens: Tensor, masses: Tensor, target: Target) -> None:
        self.policy = policy
        vocabulary, width = tokens.shape
        # Nobody asks for more than a pass may score.
        length = max(policy.within(Budget(target.max_nodes, policy.length)), 1)
        rows = PadShape.for_paths(policy.count, length).inner
        self._q = torch.zeros(0, rows, vocabulary, device=tokens.device)
        self._told: dict[int, PinnedBuffer] = {}  # by the number of texts
        self._draw = GraphedFunction(
            self._way(target, width),
            tokens.device,
            (tokens, masses),
            capture=getattr(target, "graphs", True),
            count=policy.count,
            length=length,
            common=policy.common,
        )

    def __call__(self, sequences: Sequence[SequenceState], budgets: Sequence[Budget]) -> list[DraftTree]:
        """A tree for every text. Those that come next overwrite its q."""
        drawn = self._drawn(sequences).tolist()  # the one look
        return [
            self._tree(sequence.root, min(self.policy.within(budget), len(paths[0])), paths, q)
            for sequence, budget, paths, q in zip(sequences, budgets, drawn, self._q, strict=False)
        ]

    def _drawn(self, sequences: Sequence[SequenceState]) -> Tensor:
        """(texts, paths, levels, 2): what `draw` found; q lies beside it."""
        size = fitting(len(sequences), BATCHES)  # few sizes, each of which is recorded
        if size not in self._told:
            self._told[size] = PinnedBuffer(size * TOLD, self._q.device, torch.int64)
        if len(self._q) < size:
            self._q = self._q.new_zeros(size, *self._q.shape[1:])
        told = self._told[size]
        told.here.reshape(size, TOLD)[: len(sequences)] = [
            (sequence.root, sequence.rng_seed, len(sequence.tokens) - 1, sequence.sampling.temperature == 0)
            for sequence in sequences
        ]
        return self._draw(told.bring().view(size, TOLD), self._q[:size])

    def _tree(self, root: int, length: int, paths: list[list[list[int]]], q: Tensor) -> DraftTree:
        """The first levels of drawn paths, each a list of its (token, node)."""
        if paths[0][0][0] < 0:
            return DraftTree.root(root)  # the table knows nothing there
        nodes, ends = {0: (-1, root)}, [0] * len(paths)
        for level in range(length):
            for path, steps in enumerate(paths):
                token, node = steps[level]
                nodes[node] = ends[path], token
                ends[path] = node
        parents, tokens = zip(*(nodes[node] for node in range(len(nodes))), strict=True)
        draw = self.policy.draw
        leaves = tuple(ends) if draw is Draw.PATHS else ()
        return DraftTree(torch.tensor(tokens), parents, draw, q[: max(parents) + 1] if length else None, leaves)

    def _way(self, target: Target, width: int) -> Callable[..., Tensor]:
        by_kernel = have_kernels(self._q.device) and getattr(target, "kernels", True)
        if not by_kernel or max(self.policy.count, width) > WIDEST_KERNEL:
            return draw
        from branchwise.draft.recycle.paths_kernel import draw_paths_kernel

        return draw_paths_kernel


def draw(table: Tensor, masses: Tensor, told: Tensor, q: Tensor, *, count: int, length: int, common: int) -> Tensor:
    """(texts, count, length, 2) int64: the tokens of paths and the nodes that they become, -1 where nothing is known.

    `table` and `masses` (vocabulary, width) are the successors of every token, best first; `told` (texts, 4) is what
    is known of the texts. `q` (texts, rows, vocabulary) is overwritten with the distributions behind the nodes.

    The distribution behind a token are its successors; where there are none, the distribution before stays. Nodes are
    numbered level by level: those of one parent in a row, in the order in which paths first come to them.
    """
    root, rng_seed, position, sure = (numbers[:, None] for numbers in told.unbind(dim=1))
    texts, rows, vocabulary = q.shape
    path = torch.arange(count, device=q.device).expand(texts, -1)
    probs, rank, node = root.expand(-1, count), path, torch.zeros_like(path)
    known, size = held(masses, root), torch.ones_like(root)
    places, values, found = [], [], []
    for level in range(length):
        apart = level >= common
        tokens, weights = table[probs].long(), masses[probs].double()  # (texts, paths, width)
        likely = (weights / weights.sum(dim=2, keepdim=True)).float()
        places.append((torch.arange(texts, device=q.device)[:, None] * rows + node)[..., None] * vocabulary + tokens)
        values.append(torch.where(known[..., None] & (weights > 0), likely, 0.0))

        draws = level * count + (path if apart else 0)
        keys = mix(mix(mix(rng_seed) + PICKS + draws) + position * GAMMA)
        drawn = race_among(tokens.flatten(0, 1), likely.double().flatten(0, 1), keys.expand_as(path).flatten())
        # Without chance paths at one node take its best tokens in turn, and the best where there are no more.
        many, turn = (weights > 0).sum(dim=2), rank if apart else torch.zeros_like(rank)
        best = tokens.gather(2, torch.where(turn < many, turn, 0)[..., None])[..., 0]
        if apart:
            rank = torch.where(rank < many, 0, rank - many + 1)
        token = torch.where(sure > 0, best, drawn.view_as(path))

        same = (node[:, :, None] == node[:, None, :]) & (token[:, :, None] == token[:, None, :])
        first = torch.where(same, path[:, None, :], count).amin(dim=2)
        order = node * count + first
        before = (first == path)[:, None, :] & (order[:, None, :] < order[:, :, None])
        node = size + before.sum(dim=2)
        size = size + (first == path).sum(dim=1, keepdim=True)
        found.append(torch.where(known[..., None], torch.stack([token, node], dim=2), -1))
        probs = torch.where(held(masses, token), token, probs)
    # Several paths write what is behind one node, and all the same; an empty place means token 0, and 0 is no more.
    q.zero_().view(-1).scatter_reduce_(0, torch.cat(places).flatten(), torch.cat(values).flatten(), "amax")
    return torch.stack(found, dim=2)


def race_among(tokens: Tensor, masses: Tensor, keys: Tensor) -> Tensor:
    """(draws,) int64: what `race` draws from distributions that are a few tokens (draws, few) with masses (draws, few)
    float64.

    A token without a mass stands for nothing.
    """
    blocks = tokens // BLOCK
    shared = blocks[:, :, None] == blocks[:, None, :]
    sums = torch.where(masses > 0, (shared * masses[:, None, :]).sum(dim=2), 0.0)
    winner = blocks.gather(1, _first(sums, mix(keys), blocks)[:, None])
    inside = _first(torch.where(blocks == winner, masses, 0.0), keys, tokens)
    return tokens.gather(1, inside[:, None])[:, 0]


def held(masses: Tensor, tokens: Tensor) -> Tensor:
    """Of which tokens (texts, n) a successor is known."""
    return (masses[tokens] > 0).any(dim=2)
