"""A draft model that drafts on the device ahead of the host: the trees after a verdict are drawn before the host has
read the verdict, all levels in one CUDA graph.

Tokens and q stay on the device, so nothing waits between drafting and scoring. One exception: several paths merge where
they agree, so the shape of their tree is known only when they are drawn. Verifiers need the shape on the host, so the
host then reads the tokens of the paths once per tree.
"""

from __future__ import annotations

import weakref
from collections.abc import Callable, Sequence
from contextlib import AbstractContextManager
from functools import partial
from typing import Any, NamedTuple

import torch
from torch import Tensor

from branchwise.backends.base import Scored, TargetInfo, weakly
from branchwise.core.sampling import SamplingParams
from branchwise.core.sequence import SequenceState
from branchwise.core.tree import DraftTree
from branchwise.cuda.graphs import GraphedFunction
from branchwise.cuda.inputs import BATCHES, PassTensors, fitting
from branchwise.draft.base import Budget
from branchwise.draft.drawn.drawing import RESTS, Drawing, Told, arrived, fetched
from branchwise.draft.drawn.trees import Drawn, TreeDraft
from branchwise.draft.model.draft_model import TREE_ROWS, DraftKVCache
from branchwise.draft.model.passes import ModelLevels, ModelPasses, Run, gain
from branchwise.draft.model.reading import BatchReading
from branchwise.verify import Verdict, Verdicts

Passing = Callable[[int], AbstractContextManager[None]]
"""a context manager that is held while this many passes of the draft model are made or recorded"""


class Foreseen(NamedTuple):
    """The state of a text after a verdict, for which its next tree was drawn on the device."""

    sequence: SequenceState
    seed: int
    before: int
    """number of its tokens before the verdict"""
    gained: list[int]
    """tokens that the verdict adds"""

    def is_now(self, sequence: SequenceState) -> bool:
        """Whether a sequence is in this state."""
        same = sequence is self.sequence and sequence.rng_seed == self.seed
        return same and sequence.tokens[self.before :] == self.gained


class ModelAhead:
    """Drafts the trees of one step after the other on the device of the target, ahead of the host."""

    def __init__(
        self,
        made: Callable[[Sequence[Budget]], TreeDraft],
        following: DraftKVCache,
        target: TargetInfo,
        context: int,
        own: int,
        reading: Callable[[list[SamplingParams]], BatchReading],
        passing: Passing,
    ) -> None:
        """`made` makes the `TreeDraft` of budgets, `following` is the KV cache, and `context` the most tokens of the
        draft model. Its tokens equal those of the target up to the size `own` of its vocabulary. `reading` makes the
        reading of its logits for sampling parameters."""
        self._made, self._following, self._target = made, following, target
        self._context, self._own, self._passing = context, own, passing
        self._drawing = Drawing(target, reading)
        self._draft: TreeDraft | None = None
        self._slots: weakref.ref[Any] | None = None
        """the draft model's cache slots, which all recordings read and write"""
        self._gain = GraphedFunction(gain, target.device, capture=target.execution.graphs)
        self._sequences: tuple[SequenceState, ...] = ()
        """texts of the target's next or last pass, if their trees were drawn here"""
        self._found: Drawn | None = None
        """drawn trees whose roots are the tokens of the last verdicts"""
        self._told: Told | None = None
        """what the host must know of these trees, on its way to the host"""
        self._expected: list[Foreseen] = []
        """states of the texts that these trees were drawn for"""
        self._next: list[DraftTree] | None = None
        """these trees, within budgets"""
        self._rests = 0
        """number of batches that are still left to the host"""

    def draft(
        self, sequences: Sequence[SequenceState], texts: Sequence[list[int]], budgets: Sequence[Budget]
    ) -> list[DraftTree] | None:
        """The next trees of sequences, whose `texts` are in tokens of the draft model; None if the host must grow
        them."""
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
            # The rows of the tokens that the verdict kept, and of the root, are written already.
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
        """Drop the trees drawn so far, because nothing is drafted in this step; the next trees start from the texts as
        they are then."""
        self._found, self._next, self._told, self._sequences = None, None, None, ()
        self._expected = []

    def draft_next(self, budgets: Sequence[Budget]) -> list[DraftTree] | None:
        draft = self._draft
        if self._found is None or draft is None or not draft.resident or not draft.whole(budgets):
            return None
        if draft.tells and self._target.device.type == "cpu" and draft.fails(self._found.told.tolist(), budgets):
            return None  # on a GPU the host cannot know this yet, and a pass over such trees is wasted
        self._next = draft.trees(self._found, self._sequences, budgets)
        return self._next

    def update(self, scored: Scored, verdicts: Verdicts) -> None:
        """Enqueue the rows of the tokens that a verdict kept, and the next trees."""
        self._found = self._next = self._told = None
        self._expected = []
        nodes, sequences, draft = scored.nodes, self._sequences, self._draft
        if nodes is None or not sequences or draft is None:
            return
        longest = max(len(self._following.cached(sequence)) for sequence in sequences)
        if longest + draft.steps + draft.depth >= self._context:
            return
        size = len(nodes.slots)
        gained = self._drawing.place("gained", size, 2 + draft.steps)
        self._drawing.overwritten("gained", size)
        paths = verdicts.paths[:, : draft.steps]  # a recorded verdict has columns for longer ones
        with torch.inference_mode():
            self._gain(gained, nodes.lengths, nodes.tokens, paths, verdicts.tokens)
        self._found = self._drawn(draft, sequences, size, gained)
        self._told = fetched(self._found.told) if draft.tells else None

    def follow(
        self, sequences: Sequence[SequenceState], trees: Sequence[DraftTree], verdicts: Sequence[Verdict]
    ) -> None:
        """Called when the host has read the verdicts: note the states of texts that the next trees are drawn for."""
        if self._found is None:
            return
        self._expected = [
            Foreseen(sequence, sequence.rng_seed, len(sequence.tokens), [*verdict.kept_of(tree), verdict.token])
            for sequence, tree, verdict in zip(sequences, trees, verdicts, strict=True)
        ]

    def _foresaw(self, sequences: Sequence[SequenceState], texts: Sequence[list[int]]) -> bool:
        """Whether the texts are in the states that trees were drawn for after the last verdict."""
        return len(sequences) == len(self._expected) and all(
            one.is_now(sequence) and text[: one.before] == self._following.cached(sequence)
            for one, sequence, text in zip(self._expected, sequences, texts, strict=True)
        )

    # Drawing

    def _grown(self, draft: TreeDraft, sequences: Sequence[SequenceState], texts: Sequence[list[int]]) -> Drawn | None:
        """Trees below the roots of texts, given their tokens on the host; None if the cache has no room for them."""
        if max(map(len, texts)) + draft.depth >= self._context or draft.steps + draft.below > TREE_ROWS:
            return None
        ahead = self._following.unwritten(sequences, texts, draft.steps)
        if draft is not self._draft or self._slots is None or self._slots() is not self._following.slots:
            self._begin(draft)
        size = fitting(len(sequences), BATCHES)
        written = [len(self._following.cached(sequence)) for sequence in sequences]
        numbers = [[start, len(new), *new] for start, new in zip(written, ahead, strict=True)]
        gained = self._drawing.upload("gained", size, numbers, [0] * (2 + draft.steps))
        found = self._drawn(draft, sequences, size, gained)
        self._following.count(sequences, ahead)
        return found

    def _begin(self, draft: TreeDraft) -> None:
        """Draft trees of `draft` in the current slots; all recordings belong to these."""
        self._draft, self._slots = draft, weakref.ref(self._following.slots)
        self._drawing.start(draft, partial(ModelPasses, self._run(), ModelLevels(draft, self._own)))

    def _drawn(self, draft: TreeDraft, sequences: Sequence[SequenceState], size: int, gained: Tensor) -> Drawn:
        """Trees of texts, padded to `size` texts, given what each has gained (`passes.gain`)."""
        slots = self._following.seats(sequences, draft.steps + draft.below)
        with self._passing(draft.depth):
            return self._drawing(sequences, size, slots, -1, gained)

    def _run(self) -> Run:
        """A pass in the current slots; it refers to them weakly, so that a recording does not keep them alive."""
        run = weakly(self._following.slots.run_packed)

        def logits(inputs: PassTensors) -> Tensor:
            found: Tensor = run(inputs).logits
            return found

        return logits
