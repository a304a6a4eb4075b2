"""A draft model that drafts on the device ahead of the host: the paths that follow a verdict are drawn before the host
has read it, all levels in one CUDA graph.

Tokens and q of a chain stay on the device, so nothing waits between drafting and scoring. Several paths are drawn in
the same way, but their tree has the shape that they were drawn in, and verifiers look that up on the host: it reads
the tokens of the paths once, when the tree is wanted.
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
from branchwise.core.topology import chain_topology
from branchwise.core.tree import DraftTree, Draw
from branchwise.cuda.graphs import GraphedFunction
from branchwise.cuda.inputs import BATCHES, PassTensors, PinnedBuffer, fitting
from branchwise.draft.base import Budget
from branchwise.draft.model.choice import Choice
from branchwise.draft.model.draft_model import TREE_ROWS, DraftKVCache
from branchwise.draft.model.paths import Drawn, PathDraft, Texts, gain
from branchwise.draft.model.reading import BatchReading
from branchwise.draft.policies.paths import Paths
from branchwise.verify import Verdict, Verdicts

MOST_WAYS = 16
"""ways of sampling, for a number of texts, that are kept recorded, those used last"""

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


class PathsAhead:
    """Paths of a draft model that follow each other on the device of its target."""

    def __init__(
        self,
        policy: Paths,
        following: DraftKVCache,
        target: TargetInfo,
        context: int,
        own: int,
        reading: Callable[[list[SamplingParams]], BatchReading],
        passing: Passing,
    ) -> None:
        """`context` and `own` are the most tokens and the vocabulary of the draft model, whose tokens are those of the
        target; `reading` reads its logits for texts that are sampled so."""
        self._policy, self._following, self._target = policy, following, target
        self._context, self._own, self._reading, self._passing = context, own, reading, passing
        self._draft: PathDraft | None = None
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
        """paths below the tokens of the last verdicts"""
        self._expected: list[Foreseen] = []
        self._next: list[DraftTree] | None = None

    def draft(
        self, sequences: Sequence[SequenceState], texts: Sequence[list[int]], budgets: Sequence[Budget]
    ) -> list[DraftTree] | None:
        """The next trees of texts, which are given in tokens of the draft model; None if the host has to grow them."""
        found, trees, self._found, self._next, self._sequences = self._found, self._next, None, None, ()
        lengths = [self._policy.within(budget) for budget in budgets]
        if not max(lengths):
            return None
        before = self._draft
        if before is not None and not self._foresaw(sequences, texts):
            found = None
        if found is not None and before is not None and max(lengths) <= before.length:
            # Its rows are written: those of the tokens that the verdict kept, and of the root.
            known = [len(self._following.cached(sequence)) for sequence in sequences]
            self._following.count(sequences, [text[end:] for text, end in zip(texts, known, strict=True)])
        else:
            trees, found = None, self._grown(sequences, texts, max(lengths))
        if found is None:
            return None
        self._sequences = tuple(sequences)
        return self._trees(found, sequences, lengths) if trees is None else trees

    def draft_next(self, budgets: Sequence[Budget]) -> list[DraftTree] | None:
        if self._found is None or self._draft is None or self._policy.count > 1:
            return None
        lengths = [self._policy.within(budget) for budget in budgets]
        if min(lengths) < self._draft.length:  # the trees may have to be smaller
            return None
        self._next = self._trees(self._found, self._sequences, lengths)
        return self._next

    def update(self, scored: Scored, verdicts: Verdicts) -> None:
        """Enqueue the rows of what a verdict kept, and the next paths."""
        self._found = self._next = None
        self._expected = []
        nodes, sequences, draft = scored.nodes, self._sequences, self._draft
        if nodes is None or not sequences or draft is None:
            return
        longest = max(len(self._following.cached(sequence)) for sequence in sequences)
        if longest + draft.steps + draft.length >= self._context:
            return
        size = len(nodes.slots)
        gained = self._fields("gained", size, 2 + draft.steps)
        self._uploaded.pop(("gained", size), None)
        paths = verdicts.paths[:, : draft.steps]  # a recorded verdict has columns for longer ones
        with torch.inference_mode():
            self._gain(gained.device_copy.view(-1, size), nodes.lengths, nodes.tokens, paths, verdicts.tokens)
        self._found = self._drawn(sequences, size, draft)

    def follow(
        self, sequences: Sequence[SequenceState], trees: Sequence[DraftTree], verdicts: Sequence[Verdict]
    ) -> None:
        """The host has read the verdicts behind which the next paths are drawn."""
        if self._found is None:
            return
        self._expected = [
            Foreseen(sequence, sequence.rng_seed, len(sequence.tokens), [*verdict.kept_of(tree), verdict.token])
            for sequence, tree, verdict in zip(sequences, trees, verdicts, strict=True)
        ]

    def _foresaw(self, sequences: Sequence[SequenceState], texts: Sequence[list[int]]) -> bool:
        """Whether the texts are those, and as long, that paths were drawn for behind the last verdict."""
        return len(sequences) == len(self._expected) and all(
            one.is_now(sequence) and text[: one.before] == self._following.cached(sequence)
            for one, sequence, text in zip(self._expected, sequences, texts, strict=True)
        )

    # Drawing

    def _grown(self, sequences: Sequence[SequenceState], texts: Sequence[list[int]], length: int) -> Drawn | None:
        """Paths of at least this length below the roots of texts that the host knows; None if there is no room."""
        length = max(length, 0 if self._draft is None else self._draft.length)
        rows = self._policy.count * length + length + 1
        if max(map(len, texts)) + length >= self._context or rows > TREE_ROWS:
            return None
        ahead = self._following.unwritten(sequences, texts, length + 1)
        draft = self._fitting(length)
        size = fitting(len(sequences), BATCHES)
        written = [len(self._following.cached(sequence)) for sequence in sequences]
        numbers = [[start, len(new), *new] for start, new in zip(written, ahead, strict=True)]
        self._upload("gained", size, numbers, [0] * (2 + draft.steps))
        found = self._drawn(sequences, size, draft)
        self._following.count(sequences, ahead)
        return found

    def _drawn(self, sequences: Sequence[SequenceState], size: int, draft: PathDraft) -> Drawn:
        """Paths of texts, padded to so many, given what each has gained."""
        _, grow = self._way(sequences, size, draft)
        about, gained = self._about(sequences, size, draft), self._buffers["gained", size].device_copy.view(-1, size)
        with self._passing(draft.length), torch.inference_mode():
            return grow(about, gained)

    def _fitting(self, length: int) -> PathDraft:
        """Paths of this length in the slots at hand; whatever is recorded belongs to these."""
        slots, draft = self._following.slots, self._draft
        if draft is None or self._slots is None or self._slots() is not slots or draft.length != length:
            run, policy = weakly(slots.run_packed), self._policy

            def logits(inputs: PassTensors) -> Tensor:
                found: Tensor = run(inputs).logits
                return found

            draft = PathDraft(logits, policy.count, length, policy.common, self._own, self._target.device)
            self._draft, self._slots = draft, weakref.ref(slots)
            self._ways.clear()
            self._last = None
            self._places.clear()
            self._buffers.clear()
            self._uploaded.clear()
        return draft

    def _way(self, sequences: Sequence[SequenceState], size: int, draft: PathDraft) -> Drafting:
        """How to draft for these texts, padded to so many."""
        sampling = [sequence.sampling for sequence in sequences]
        if self._last is not None and self._last[:2] == (size, sampling):
            return self._last[2]
        reading = self._reading([*sampling, *sampling[-1:] * (size - len(sampling))])
        some = {params.greedy for params in sampling}
        key = size, True in some, False in some, *reading.structure
        if key not in self._ways:
            reading.bring()
            how = self._target.execution
            choice = Choice(reading, draft.count, greedy=True in some, drawn=False in some, compile=how.compile)

            def draw_paths(about: Tensor, gained: Tensor) -> Drawn:
                return draft.grow(choice, self._place(draft, size), Texts(*about), gained)

            self._ways[key] = reading, GraphedFunction(draw_paths, self._target.device, capture=how.graphs)
            if len(self._ways) > MOST_WAYS:
                self._ways.popitem(last=False)
        self._ways.move_to_end(key)
        self._ways[key][0].assign(reading)
        self._last = size, sampling, self._ways[key]
        return self._ways[key]

    def _place(self, draft: PathDraft, size: int) -> Drawn:
        """Where paths are written: always the same place on a device, because what reads them is recorded for it. On a
        host nothing is, and trees keep what they hold."""
        device = self._target.device
        if size not in self._places or device.type == "cpu":
            steps = torch.zeros(size, draft.count, draft.length, 2, dtype=torch.long, device=device)
            tokens = torch.zeros(size, draft.steps, dtype=torch.long, device=device)
            q = torch.zeros(size, draft.inner, self._target.vocabulary, device=device)
            self._places[size] = Drawn(tokens, steps, q)
        return self._places[size]

    # Numbers of the host

    def _about(self, sequences: Sequence[SequenceState], size: int, draft: PathDraft) -> Tensor:
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

    # Trees

    def _trees(self, found: Drawn, sequences: Sequence[SequenceState], lengths: list[int]) -> list[DraftTree]:
        """What was drawn, in so many levels. A draw belongs to its level: fewer levels are drawn as the first of more
        are."""
        if self._policy.count == 1:
            return [self._chain(*one) for one in zip(found.tokens, found.q, lengths, strict=False)]
        drawn = found.steps.tolist()  # the only synchronisation
        return [
            self._tree(sequence.root, *one)
            for sequence, one in zip(sequences, zip(drawn, found.q, lengths, strict=False), strict=True)
        ]

    def _chain(self, tokens: Tensor, q: Tensor, length: int) -> DraftTree:
        parents = chain_topology(length + 1).parents
        return DraftTree(tokens[: length + 1], parents, Draw.PATHS, q[:length] if length else None, (length,))

    def _tree(self, root: int, paths: list[list[list[int]]], q: Tensor, length: int) -> DraftTree:
        """The first levels of drawn paths, each a list of (token, node)."""
        nodes, ends = {0: (-1, root)}, [0] * len(paths)
        for level in range(length):
            for path, steps in enumerate(paths):
                token, node = steps[level]
                nodes[node] = ends[path], token
                ends[path] = node
        parents, tokens = zip(*(nodes[node] for node in range(len(nodes))), strict=True)
        draw = self._policy.draw
        leaves = tuple(ends) if draw is Draw.PATHS else ()
        return DraftTree(torch.tensor(tokens), parents, draw, q[: max(parents) + 1] if length else None, leaves)
