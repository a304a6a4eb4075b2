"""A draft model that drafts on the device ahead of the host: the trees that follow a verdict are drawn before the host
has read it, all levels in one CUDA graph.

Tokens and q stay on the device, so nothing waits between drafting and scoring. Only the shape of several paths, which
merge where they agree, is known when they are drawn: verifiers look it up on the host, which reads the tokens of the
paths once, when their tree is wanted.
"""

from __future__ import annotations

import weakref
from collections import OrderedDict
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from typing import Any, NamedTuple

import torch
from torch import Tensor

from branchwise.backends.base import Scored, TargetInfo, weakly
from branchwise.core.sampling import SamplingParams
from branchwise.core.sequence import SequenceState
from branchwise.core.tree import DraftTree
from branchwise.cuda.graphs import GraphedFunction
from branchwise.cuda.inputs import BATCHES, PassTensors, PinnedBuffer, fitting
from branchwise.draft.base import Budget
from branchwise.draft.model.draft_model import TREE_ROWS, DraftKVCache
from branchwise.draft.model.passes import Drawn, Run, Texts, TreeDraft, gain
from branchwise.draft.model.reading import BatchReading
from branchwise.verify import Verdict, Verdicts

MOST_WAYS = 16
"""ways of sampling, for a number of texts, that are kept recorded, those used last"""

RESTS = 16
"""batches that are left to the host after one that it had to grow: what a text lacks once it lacks often"""

Drafting = tuple[BatchReading, GraphedFunction[Drawn]]
"""for one number of texts and one structure of their sampling: how logits are read, and all that follows"""
Passing = Callable[[int], AbstractContextManager[None]]
"""held while so many passes of the draft model are made, or recorded"""


class Foreseen(NamedTuple):
    """A text as it is after the verdict behind which its next tree was drawn."""

    sequence: SequenceState
    seed: int
    before: int
    """tokens that it had in front of the verdict"""
    gained: list[int]

    def is_now(self, sequence: SequenceState) -> bool:
        same = sequence is self.sequence and sequence.rng_seed == self.seed
        return same and sequence.tokens[self.before :] == self.gained


class ModelAhead:
    """Trees of a draft model that follow each other on the device of its target."""

    def __init__(
        self,
        made: Callable[[Sequence[Budget]], TreeDraft],
        following: DraftKVCache,
        target: TargetInfo,
        context: int,
        reading: Callable[[list[SamplingParams]], BatchReading],
        passing: Passing,
    ) -> None:
        """`made` makes trees for budgets; `context` is the most tokens of the draft model, whose tokens are those of
        the target, and `reading` reads its logits for texts that are sampled so."""
        self._made, self._following, self._target = made, following, target
        self._context, self._reading, self._passing = context, reading, passing
        self._draft: TreeDraft | None = None
        self._slots: weakref.ref[Any] | None = None
        """the slots that it drafts in, and that all recordings read and write"""
        self._ways: OrderedDict[Any, Drafting] = OrderedDict()
        self._last: tuple[int, list[SamplingParams], Drafting] | None = None
        self._places: dict[int, Drawn] = {}  # by the number of texts
        self._buffers: dict[tuple[str, int], PinnedBuffer] = {}
        self._uploaded: dict[tuple[str, int], list[int]] = {}
        """what they hold"""
        self._gain = GraphedFunction(gain, target.device, capture=target.execution.graphs)
        self._sequences: tuple[SequenceState, ...] = ()
        """texts of the pass that is made next or was made last, if their trees were drawn here"""
        self._found: Drawn | None = None
        """trees below the tokens of the last verdicts"""
        self._told: tuple[Tensor, torch.cuda.Event | None] | None = None
        """what the host has to know of them, on its way"""
        self._expected: list[Foreseen] = []
        self._next: list[DraftTree] | None = None
        self._rests = 0
        """batches that are left to the host"""

    def draft(
        self, sequences: Sequence[SequenceState], texts: Sequence[list[int]], budgets: Sequence[Budget]
    ) -> list[DraftTree] | None:
        """The next trees of texts, which are given in tokens of the draft model; None if the host has to grow them."""
        found, trees, told = self._found, self._next, self._told
        self._found, self._next, self._told, self._sequences = None, None, None, ()
        self._rests, rests = max(self._rests - 1, 0), self._rests
        if rests:
            return None
        draft = self._draft
        if draft is None or not draft.serves(budgets):
            draft, found = self._made(budgets), None
        if not draft.depth or not any(budget.depth > 0 and budget.nodes > 1 for budget in budgets):
            return None
        if found is not None and self._foresaw(sequences, texts):
            # Its rows are written: those of the tokens that the verdict kept, and of the root.
            known = [len(self._following.cached(sequence)) for sequence in sequences]
            self._following.count(sequences, [text[end:] for text, end in zip(texts, known, strict=True)])
        else:
            trees, told, found = None, None, self._grown(draft, sequences, texts)
        if found is None:
            return None
        if draft.tells and draft.fails(arrived(told or fetched(found.told)), budgets):
            self._rests = RESTS
            return None
        self._sequences = tuple(sequences)
        return draft.trees(found, sequences, budgets) if trees is None else trees

    def rest(self) -> None:
        """Nothing is drafted in this step, and nothing behind it: the next trees begin with what texts are by then."""
        self._found, self._next, self._told, self._sequences = None, None, None, ()
        self._expected = []

    def draft_next(self, budgets: Sequence[Budget]) -> list[DraftTree] | None:
        draft = self._draft
        if self._found is None or draft is None or not draft.resident or not draft.whole(budgets):
            return None
        if draft.tells and self._target.device.type == "cpu" and draft.fails(self._found.told.tolist(), budgets):
            return None  # a device does not know yet, and a pass over such trees is made in vain
        self._next = draft.trees(self._found, self._sequences, budgets)
        return self._next

    def update(self, scored: Scored, verdicts: Verdicts) -> None:
        """Enqueue the rows of what a verdict kept, and the next trees."""
        self._found = self._next = self._told = None
        self._expected = []
        nodes, sequences, draft = scored.nodes, self._sequences, self._draft
        if nodes is None or not sequences or draft is None:
            return
        longest = max(len(self._following.cached(sequence)) for sequence in sequences)
        if longest + draft.steps + draft.depth >= self._context:
            return
        size = len(nodes.slots)
        gained = self._fields("gained", size, 2 + draft.steps).device_copy.view(-1, size)
        self._uploaded.pop(("gained", size), None)
        paths = verdicts.paths[:, : draft.steps]  # a recorded verdict has columns for longer ones
        with torch.inference_mode():
            self._gain(gained, nodes.lengths, nodes.tokens, paths, verdicts.tokens)
        self._found = self._drawn(draft, sequences, size)
        self._told = fetched(self._found.told) if draft.tells else None

    def follow(
        self, sequences: Sequence[SequenceState], trees: Sequence[DraftTree], verdicts: Sequence[Verdict]
    ) -> None:
        """The host has read the verdicts behind which the next trees are drawn."""
        if self._found is None:
            return
        self._expected = [
            Foreseen(sequence, sequence.rng_seed, len(sequence.tokens), [*verdict.kept_of(tree), verdict.token])
            for sequence, tree, verdict in zip(sequences, trees, verdicts, strict=True)
        ]

    def _foresaw(self, sequences: Sequence[SequenceState], texts: Sequence[list[int]]) -> bool:
        """Whether the texts are those, and as long, that trees were drawn for behind the last verdict."""
        return len(sequences) == len(self._expected) and all(
            one.is_now(sequence) and text[: one.before] == self._following.cached(sequence)
            for one, sequence, text in zip(self._expected, sequences, texts, strict=True)
        )

    # Drawing

    def _grown(self, draft: TreeDraft, sequences: Sequence[SequenceState], texts: Sequence[list[int]]) -> Drawn | None:
        """Trees below the roots of texts that the host knows; None if there is no room for them."""
        if max(map(len, texts)) + draft.depth >= self._context or draft.rows > TREE_ROWS:
            return None
        ahead = self._following.unwritten(sequences, texts, draft.steps)
        if draft is not self._draft or self._slots is None or self._slots() is not self._following.slots:
            self._begin(draft)
        size = fitting(len(sequences), BATCHES)
        written = [len(self._following.cached(sequence)) for sequence in sequences]
        numbers = [[start, len(new), *new] for start, new in zip(written, ahead, strict=True)]
        self._upload("gained", size, numbers, [0] * (2 + draft.steps))
        found = self._drawn(draft, sequences, size)
        self._following.count(sequences, ahead)
        return found

    def _begin(self, draft: TreeDraft) -> None:
        """Draft so, in the slots at hand; whatever is recorded belongs to these."""
        self._draft, self._slots, self._last = draft, weakref.ref(self._following.slots), None
        for held in (self._ways, self._places, self._buffers, self._uploaded):
            held.clear()

    def _drawn(self, draft: TreeDraft, sequences: Sequence[SequenceState], size: int) -> Drawn:
        """Trees of texts, padded to so many, given what each has gained."""
        _, grow = self._way(draft, sequences, size)
        about, gained = self._about(draft, sequences, size), self._buffers["gained", size].device_copy.view(-1, size)
        with self._passing(draft.depth), torch.inference_mode():
            return grow(about, gained)

    def _way(self, draft: TreeDraft, sequences: Sequence[SequenceState], size: int) -> Drafting:
        """How to draft for these texts, padded to so many."""
        sampling = [sequence.sampling for sequence in sequences]
        if self._last is not None and self._last[:2] == (size, sampling):
            return self._last[2]
        reading = self._reading([*sampling, *sampling[-1:] * (size - len(sampling))])
        some = {params.greedy for params in sampling}
        key = size, True in some, False in some, *reading.structure
        if key not in self._ways:
            reading.bring()
            how, run = self._target.execution, self._run()
            choose = draft.choice(reading, greedy=True in some, drawn=False in some, compile=how.compile)

            def draw_trees(about: Tensor, gained: Tensor) -> Drawn:
                return draft.grow(run, choose, self._place(draft, size), Texts(*about), gained)

            self._ways[key] = reading, GraphedFunction(draw_trees, self._target.device, capture=how.graphs)
            if len(self._ways) > MOST_WAYS:
                self._ways.popitem(last=False)
        self._ways.move_to_end(key)
        self._ways[key][0].assign(reading)
        self._last = size, sampling, self._ways[key]
        return self._ways[key]

    def _run(self) -> Run:
        """A pass in the slots at hand, which it does not keep."""
        run = weakly(self._following.slots.run_packed)

        def logits(inputs: PassTensors) -> Tensor:
            found: Tensor = run(inputs).logits
            return found

        return logits

    def _place(self, draft: TreeDraft, size: int) -> Drawn:
        """Where trees are written: always the same place on a device, because what reads them is recorded for it. On a
        host nothing is, and trees keep what they hold."""
        if size not in self._places or self._target.device.type == "cpu":
            with torch.inference_mode(mode=False):  # whoever reads them need not know how they were written
                self._places[size] = draft.place(size, self._target.vocabulary)
        return self._places[size]

    # Numbers of the host

    def _about(self, draft: TreeDraft, sequences: Sequence[SequenceState], size: int) -> Tensor:
        """(3, size): slots and seeds of texts, and which are greedy."""
        slots = self._following.seats(sequences, draft.rows)
        numbers = [
            [slot, sequence.rng_seed, int(sequence.sampling.greedy)]
            for slot, sequence in zip(slots, sequences, strict=True)
        ]
        return self._upload("about", size, numbers, [-1, 0, 0])

    def _upload(self, kind: str, size: int, rows: list[list[int]], padding: list[int]) -> Tensor:
        """(fields, size): numbers of texts at a fixed place of the device; rows may be shorter than their padding."""
        filled = [[*row, *padding[len(row) :]] for row in rows] + [padding] * (size - len(rows))
        numbers = [number for column in zip(*filled, strict=True) for number in column]
        key, buffer = (kind, size), self._fields(kind, size, len(padding))
        if self._uploaded.get(key) != numbers:
            self._uploaded.pop(key, None)  # after an interrupt nothing counts as uploaded
            buffer.host[:] = numbers
            buffer.copy()
            self._uploaded[key] = numbers
        return buffer.device_copy.view(len(padding), size)

    def _fields(self, kind: str, size: int, count: int) -> PinnedBuffer:
        """The place of so many numbers of every text."""
        if (kind, size) not in self._buffers:
            self._buffers[kind, size] = PinnedBuffer(count * size, self._target.device, torch.int64)
        return self._buffers[kind, size]


def fetched(told: Tensor) -> tuple[Tensor, torch.cuda.Event | None]:
    """Numbers on their way to the host: what is enqueued from now on does not delay them."""
    if told.device.type != "cuda":
        return told, None
    numbers, over = told.to("cpu", non_blocking=True), torch.cuda.Event()
    over.record(torch.cuda.current_stream(told.device))
    return numbers, over


def arrived(told: tuple[Tensor, torch.cuda.Event | None]) -> list[int]:
    numbers, over = told
    if over is not None:
        over.synchronize()
    found: list[int] = numbers.tolist()
    return found
