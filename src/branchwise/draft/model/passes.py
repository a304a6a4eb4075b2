"""Passes of a draft model as functions of tensors: from the tokens that a text has gained to the nodes after its end.

One pass writes the rows of the accepted tokens and of the new root, even if some of them were written before; then
every level is one pass over its nodes that have children.
"""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch import Tensor
from torch.nn import functional

from branchwise.core.rows import WORD, pack_bits, words_for
from branchwise.cuda.inputs import PassTensors
from branchwise.draft.drawn.trees import Level, Passes, Roots, TreeDraft

Run = Callable[[PassTensors], Tensor]
"""a pass of the draft model; returns logits (batch, nodes, columns of its head)"""


class ModelLevels:
    """The rows, depths and attention of the nodes of every pass over a tree, as inputs of a draft model."""

    def __init__(self, draft: TreeDraft, own: int) -> None:
        """`own` is the size of the draft model's vocabulary; it cannot read tokens of the target beyond that."""
        line = torch.arange(draft.steps)
        gained = Level(0, line, line, line[:, None] >= line, line)  # the tokens that a text has gained are a chain
        self._levels = [gained, *draft.levels]
        self._device = draft.device
        self._laid: dict[tuple[int, int], tuple[Tensor, Tensor, Tensor]] = {}
        self.steps, self.own = draft.steps, own

    def first(self, number: int) -> int:
        """The row, counted from the end of the text, that the first node of a level is written to."""
        return self._levels[number].first

    def on_device(self, batch: int, number: int) -> tuple[Tensor, Tensor, Tensor]:
        """Depths, depths of rows, and attention bits of a level for `batch` texts. Recorded passes read these tensors,
        so they stay where they are."""
        if (batch, number) not in self._laid:
            _, depths, columns, seen, _ = self._levels[number]
            padded = functional.pad(columns, (0, WORD * words_for(len(columns)) - len(columns)))
            first, second, third = (
                part.int().expand(batch, *part.shape).contiguous().to(self._device)
                for part in (depths, padded, pack_bits(seen))
            )
            self._laid[batch, number] = first, second, third
        return self._laid[batch, number]


class ModelPasses(Passes):
    """The passes over trees of texts in `slots` (batch,), -1 for padding, given what the texts have `gained` (see
    `gain`)."""

    def __init__(self, run: Run, levels: ModelLevels, slots: Tensor, gained: Tensor) -> None:
        self._run, self._levels, self._slots = run, levels, slots.int()
        written, counts, ahead = gained[0].int(), gained[1].int(), gained[2:].T
        last = (counts - 1).clamp_min(0)
        # The padding of these tokens is written after them, where it is never read, at valid positions.
        line = torch.arange(levels.steps, dtype=torch.int32, device=ahead.device)
        positions = written[:, None] + torch.minimum(line, last[:, None])
        logits = self._pass(written, ahead, 0, positions)
        every, place = torch.arange(len(ahead), device=ahead.device), last.long()
        self._lengths = written + counts
        self.roots = Roots(self._lengths.long() - 1, ahead[every, place], logits[every, place][:, None])

    def below(self, tokens: Tensor, level: int) -> Tensor:
        return self._pass(self._lengths, tokens, level)

    def _pass(self, lengths: Tensor, tokens: Tensor, number: int, positions: Tensor | None = None) -> Tensor:
        """The logits after tokens (batch, nodes) of a level, of texts with `lengths` rows, (batch,) int32."""
        depths, key_depths, bits = self._levels.on_device(len(tokens), number)
        first = self._levels.first(number)
        starts = lengths + first if first else lengths
        positions = lengths[:, None] + depths if positions is None else positions
        known = torch.where(tokens < self._levels.own, tokens.clamp_min(0), 0).int().contiguous()
        return self._run(PassTensors(known, positions, depths, self._slots, lengths, starts, key_depths, bits))


def gain(gained: Tensor, lengths: Tensor, tokens: Tensor, paths: Tensor, following: Tensor) -> None:
    """Write to `gained` (2 + steps, batch) what texts gain by verdicts: the number of rows of each text that the draft
    model has written, the number of tokens that the text has gained, and these tokens.

    `lengths` (batch,) are the numbers of tokens before the roots of the trees, and `tokens` (batch, nodes) those of
    their nodes. `paths` (batch, steps or less), padded with -1, were accepted, and one token of `following` (batch,)
    comes after each."""
    steps = len(gained) - 2
    paths = functional.pad(paths, (0, steps - paths.shape[1]), value=-1)  # trees that were cut have shorter paths
    last = functional.pad(paths[:, 1:] < 0, (0, 1), value=True)
    below = functional.pad(tokens.long().gather(1, paths.clamp_min(0)[:, 1:]), (0, 1))
    gained[0] = lengths + 1  # the root has a row too
    gained[1] = (paths >= 0).sum(dim=1)
    gained[2:] = torch.where(last, following[:, None], below).T
