"""Chains, paths and shapes that a head draws on the device ahead of the host, all levels in one recording
(`draft.drawn`).

These trees equal those that the host would draw level by level, with the same noise and the same distributions. Draws
must be independent of the verdict that judges them, so trees come from the states of committed tokens alone. If a step
was interrupted, so that its verdict never counted, the verdict is undone before anything else is drawn.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import functional

from branchwise.backends.base import Scored, TargetInfo
from branchwise.core.sampling import SamplingParams
from branchwise.core.sequence import SequenceState
from branchwise.core.tree import DraftTree
from branchwise.draft.base import Budget
from branchwise.draft.constrained import place_of
from branchwise.draft.drawn.drawing import RESTS, Drawing, Told, arrived, fetched
from branchwise.draft.drawn.trees import Drawn, Passes, Roots, TreeDraft
from branchwise.draft.head.trees.catching_up import CatchingUp
from branchwise.draft.head.trees.device import HeadOnDevice
from branchwise.draft.model.reading import BatchReading
from branchwise.verify import Verdicts

Reading = Callable[[list[SamplingParams]], BatchReading]
"""makes the reading of a head's logits for sampling parameters"""


class Inner(NamedTuple):
    """The nodes of one level that have children, as constants on the device."""

    first: int
    """the cell of the first of these nodes, counted from the end of the text"""
    above: Tensor
    """(rows,): the rows of their parents in the level before"""
    own: Tensor
    """(1, rows, cells): the cells after the text that they attend to"""


class Extra(NamedTuple):
    """Tokens outside the table that can be proposed in each text too."""

    tokens: Tensor
    """(batch, some): the tokens, -1 for none"""
    rows: Tensor
    """(batch, some, width): their output rows"""


class DrawnHead(HeadOnDevice):
    """A head that computes the logits after the nodes of drawn trees."""

    def __init__(self, draft: TreeDraft, vocabulary: int, *parts: Any) -> None:
        super().__init__(*parts)
        self._vocabulary = vocabulary
        device = self._table.device
        self.cells = max(1, draft.below)
        self._inner = [
            Inner(level.first, level.above.to(device), self._padded(level.seen)[None].to(device))
            for level in draft.levels
        ]
        columns = draft.levels[-1].columns if draft.levels else torch.zeros(1, dtype=torch.long)
        self._cell_depths = self._padded(columns).to(device)

    def _padded(self, cells: Tensor) -> Tensor:
        """(…, cells), padded to the cells that a whole tree takes."""
        return functional.pad(cells, (0, self.cells - cells.shape[-1]))

    def passes(self, slots: Tensor, lengths: Tensor, roots: Tensor) -> Passes:
        """The passes over trees below `roots`, of texts with `lengths` rows; (batch,) each."""
        return HeadPasses(self, slots, lengths.long(), roots.long())

    def extra(self, slots: Tensor) -> Extra:
        tokens = self.cache.extra_tokens[slots]
        return Extra(tokens, self._output[tokens.clamp_min(0)])

    def logits(self, predict: Tensor, extra: Extra) -> Tensor:
        """(batch, nodes, vocabulary): the logits of the tokens of the table and of each text's extra tokens, given what
        rows `predict` (batch, nodes, width)."""
        read = self.head.output(predict)
        listed = self._product(read, None).to(predict.dtype)
        # A missing extra token is written to the place of the table's first token, with the same logit.
        known = (extra.tokens >= 0)[:, None]
        own = torch.where(known, (read @ extra.rows.transpose(1, 2)).to(predict.dtype), listed[..., :1])
        places = torch.where(known, extra.tokens[:, None], self._table[0]).expand_as(own)
        logits = predict.new_full((*predict.shape[:2], self._vocabulary), -torch.inf)
        return logits.index_copy_(2, self._table, listed).scatter_(2, places, own)


class HeadPasses(Passes):
    """Passes in torch, operation by operation."""

    def __init__(self, head: DrawnHead, slots: Tensor, lengths: Tensor, roots: Tensor) -> None:
        self._head, self._slots, self._lengths = head, slots, lengths
        self._extra = head.extra(slots)
        predict, self._carry = head._at_roots(slots, roots)
        self.roots = Roots(lengths, roots, head.logits(predict, self._extra))

    def below(self, tokens: Tensor, level: int) -> Tensor:
        first, above, own = self._head._inner[level - 1]
        carry, own = self._carry[:, above], own.expand(len(tokens), -1, -1)
        tokens = tokens.clamp_min(0)  # -1 if a distribution had no more tokens
        predict, self._carry = self._head._below(self._slots, self._lengths, carry, tokens, first, own, level)
        return self._head.logits(predict, self._extra)


class Unsettled(NamedTuple):
    """A text whose verdict is on the device, and may never count."""

    sequence: SequenceState
    slot: int
    length: int
    """number of its tokens before the verdict"""


class DrawnAhead(CatchingUp):
    """Trees that a policy draws, as large as a pass of the target can score."""

    draws = True

    def __init__(self, target: TargetInfo, draft: TreeDraft, head: DrawnHead, reading: Reading) -> None:
        self._draft, self._drawn_head = draft, head
        self._drawing = Drawing(target, reading)
        self._found: Drawn | None = None
        """drawn trees whose roots are the tokens of the last verdicts"""
        self._told: Told | None = None
        """what the host must know of these trees, on its way to the host"""
        self._rests = 0
        """number of batches that are still left to the host"""
        cache = head.cache
        self._states = cache.predicted, cache.carried, cache.foreseen
        self._before = tuple(map(torch.zeros_like, self._states))
        """(slots, …): copies of the states before the last verdict"""
        self._unsettled: list[Unsettled] = []
        """texts of the last verdict, until it is known to count"""
        super().__init__(target, head, draft.depth, head.cells)

    def _record(self) -> None:
        super()._record()
        self._drawing.start(self._draft, self._drawn_head.passes)

    def _put_by(self, sequences: Sequence[SequenceState], slots: Sequence[int]) -> None:
        """Keep a copy of the states before a verdict. This must not be recorded: a recording runs its operations more
        than once, and the second run would copy states that the verdict has changed already."""
        self._unsettled = []
        for now, before in zip(self._states, self._before, strict=True):
            before.copy_(now)
        self._unsettled = [Unsettled(*one, len(one[0].tokens)) for one in zip(sequences, slots, strict=True)]

    def _settle(self) -> None:
        """Undo verdicts whose tokens never joined their texts."""
        lost = [
            slot
            for sequence, slot, length in self._unsettled
            if len(sequence.tokens) == length and self._cache.slot.get(sequence) == slot
        ]
        self._unsettled = []
        if lost:
            slots = torch.tensor(lost).to(self._target.device)
            with torch.inference_mode():
                for now, before in zip(self._states, self._before, strict=True):
                    now[slots] = before[slots]

    def _drop(self) -> None:
        super()._drop()
        self._found = self._told = None

    def begin(self) -> None:
        self._settle()

    def rest(self, sequences: Sequence[SequenceState], *, read: bool = True) -> list[DraftTree]:
        self._settle()
        return super().rest(sequences, read=read)

    def leave(self) -> None:
        self._settle()
        super().leave()

    def draft(self, sequences: Sequence[SequenceState], budgets: Sequence[Budget]) -> list[DraftTree] | None:
        found, trees, told = self._found, self._next, self._told
        if not self._foresaw(sequences):
            found = trees = told = None
        self._rests, rests = max(self._rests - 1, 0), self._rests
        self.leave()
        if rests or any(place_of(sequence) is not None for sequence in sequences):
            return None
        self._cache.let_go(sequences)
        if found is None:
            found = self._grown(sequences)
        if self._draft.tells and self._draft.fails(arrived(told or fetched(found.told)), budgets):
            self._rests = RESTS
            return None
        self._sequences, self._depth = tuple(sequences), self._draft.depth
        self._hold(max(map(self._cache.held, sequences)) + self._room)
        whole = trees is not None and self._draft.whole(budgets)
        return trees if trees is not None and whole else self._draft.trees(found, sequences, budgets)

    def draft_next(self, budgets: Sequence[Budget]) -> list[DraftTree] | None:
        draft, found = self._draft, self._found
        if found is None or not draft.resident or not draft.whole(budgets):
            return None
        if draft.tells and self._target.device.type == "cpu" and draft.fails(found.told.tolist(), budgets):
            return None  # on a GPU the host cannot know this yet, and a pass over such trees is wasted
        self._next = draft.trees(found, self._sequences, budgets)
        return self._next

    def update(self, scored: Scored, verdicts: Verdicts, hidden: Sequence[Tensor]) -> None:
        self._drop()
        sequences, nodes = self._sequences, scored.nodes
        if nodes is None or not sequences:
            return  # the host reads the rows
        slots = self._slots(sequences)
        self._put_by(sequences, slots)
        _, ends = self._written(nodes, verdicts, hidden)
        self._found = self._drawing(sequences, len(nodes.slots), slots, self._cache.padding, *ends)
        self._told = fetched(self._found.told) if self._draft.tells else None

    def _grown(self, sequences: Sequence[SequenceState]) -> Drawn:
        """Trees below the roots of these texts."""
        _, ends = self._begun(sequences)
        return self._drawing(sequences, len(ends.roots), self._slots(sequences), self._cache.padding, *ends)

    def _slots(self, sequences: Sequence[SequenceState]) -> list[int]:
        return [self._cache.slot[sequence] for sequence in sequences]
