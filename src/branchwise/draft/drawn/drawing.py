"""All draws of a tree as one recording, for texts that are sampled in any way, and what the host has to know of it."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from branchwise.backends.base import TargetInfo
from branchwise.core.sampling import SamplingParams
from branchwise.core.sequence import SequenceState
from branchwise.cuda.graphs import GraphedFunction
from branchwise.cuda.inputs import PinnedBuffer
from branchwise.draft.base import Budget
from branchwise.draft.builder import TreePolicy
from branchwise.draft.drawn.paths import PathDraft
from branchwise.draft.drawn.shapes import Shaped, ShapeDraft, shape_of
from branchwise.draft.drawn.trees import Drawn, Passes, Texts, TreeDraft
from branchwise.draft.model.reading import BatchReading
from branchwise.draft.model.usual import RankedShape
from branchwise.draft.policies.paths import Chain, Paths
from branchwise.draft.policies.rsd import Branching
from branchwise.draft.policies.template import Ranks, Template

MOST_WAYS = 16
"""ways of sampling, for a number of texts, that are kept recorded, those used last"""
RESTS = 16
"""batches that are left to the host after one that it had to grow: what a text lacks once it lacks often"""

Way = tuple[BatchReading, GraphedFunction[Drawn]]
"""for one number of texts and one structure of their sampling: how logits are read, and all that follows"""
Begin = Callable[..., Passes]
"""makes the passes over trees of texts in these slots (batch,), given what else whoever drafts knows of them"""
Told = tuple[Tensor, torch.cuda.Event | None]
"""numbers on their way to the host"""


def tree_draft_of(tree: TreePolicy, width: int, device: torch.device) -> Callable[[Sequence[Budget]], TreeDraft] | None:
    """Makes trees of a policy for budgets on a device, over so many tokens; None if only the host can."""
    if isinstance(tree, Paths) and type(tree) in (Paths, Chain):
        return lambda budgets: PathDraft(tree, max(map(tree.within, budgets)), device)
    if isinstance(tree, Shaped) and type(tree) in (Template, Branching, Ranks, RankedShape):
        whole = not isinstance(tree, Branching) or shape_of(tree, 0).depth == len(tree.branching)
        return (lambda budgets: ShapeDraft(tree, width, device)) if whole else None
    return None


class Drawing:
    """Draws trees, each time at the same place and from numbers of the host at the same places."""

    def __init__(self, target: TargetInfo, reading: Callable[[list[SamplingParams]], BatchReading]) -> None:
        """`reading` reads the logits of whoever drafts, for texts that are sampled so."""
        self._target, self._reading = target, reading
        self._given: tuple[TreeDraft, Begin] | None = None
        self._ways: OrderedDict[Any, Way] = OrderedDict()
        self._last: tuple[int, list[SamplingParams], Way] | None = None
        self._places: dict[int, Drawn] = {}  # by the number of texts
        self._buffers: dict[tuple[str, int], PinnedBuffer] = {}
        self._uploaded: dict[tuple[str, int], list[int]] = {}
        """what they hold"""

    def start(self, draft: TreeDraft, begin: Begin) -> None:
        """Draw such trees from now on. Whatever was recorded belongs to others, or to another place."""
        self._given, self._last = (draft, begin), None
        for held in (self._ways, self._places, self._buffers, self._uploaded):
            held.clear()

    def __call__(
        self, sequences: Sequence[SequenceState], size: int, slots: Sequence[int], padding: int, *known: Tensor
    ) -> Drawn:
        """Trees of texts in these slots, padded to so many with texts in the slot of padding; `known` are what passes
        begin with, always at the same places."""
        _, grow = self._way(sequences, size)
        numbers = [
            [slot, sequence.rng_seed, int(sequence.sampling.greedy)]
            for slot, sequence in zip(slots, sequences, strict=True)
        ]
        about = self.upload("about", size, numbers, [padding, 0, 0])
        with torch.inference_mode():
            return grow(about, *known)

    def _way(self, sequences: Sequence[SequenceState], size: int) -> Way:
        """How to draw for these texts, padded to so many."""
        sampling = [sequence.sampling for sequence in sequences]
        if self._last is not None and self._last[:2] == (size, sampling):
            return self._last[2]
        reading = self._reading([*sampling, *sampling[-1:] * (size - len(sampling))])
        some = {params.greedy for params in sampling}
        key = size, True in some, False in some, *reading.structure
        if key not in self._ways:
            assert self._given is not None, "nothing was started"
            reading.bring()
            how, (draft, begin) = self._target.execution, self._given
            choose = draft.choice(reading, greedy=True in some, drawn=False in some, compile=how.compile)

            def draw_trees(about: Tensor, *known: Tensor) -> Drawn:
                texts = Texts(*about)
                return draft.grow(begin(texts.slots, *known), choose, self._place(draft, size), texts)

            self._ways[key] = reading, GraphedFunction(draw_trees, self._target.device, capture=how.graphs)
            if len(self._ways) > MOST_WAYS:
                self._ways.popitem(last=False)
        self._ways.move_to_end(key)
        self._ways[key][0].assign(reading)
        self._last = size, sampling, self._ways[key]
        return self._ways[key]

    def _place(self, draft: TreeDraft, size: int) -> Drawn:
        """Where trees are written: always the same place on a device, because what reads them is recorded for it. On a
        host nothing is, and trees keep what they hold."""
        if size not in self._places or self._target.device.type == "cpu":
            with torch.inference_mode(mode=False):  # whoever reads them need not know how they were written
                self._places[size] = draft.place(size, self._target.vocabulary)
        return self._places[size]

    # Numbers of the host

    def upload(self, kind: str, size: int, rows: list[list[int]], padding: list[int]) -> Tensor:
        """(fields, size): numbers of texts at a fixed place of the device; rows may be shorter than their padding."""
        filled = [[*row, *padding[len(row) :]] for row in rows] + [padding] * (size - len(rows))
        numbers = [number for column in zip(*filled, strict=True) for number in column]
        key, place = (kind, size), self.place(kind, size, len(padding))
        if self._uploaded.get(key) != numbers:
            self._uploaded.pop(key, None)  # after an interrupt nothing counts as uploaded
            buffer = self._buffers[key]
            buffer.host[:] = numbers
            buffer.copy()
            self._uploaded[key] = numbers
        return place

    def place(self, kind: str, size: int, count: int) -> Tensor:
        """(fields, size): the place of so many numbers of every text."""
        if (kind, size) not in self._buffers:
            self._buffers[kind, size] = PinnedBuffer(count * size, self._target.device, torch.int64)
        return self._buffers[kind, size].device_copy.view(count, size)

    def overwritten(self, kind: str, size: int) -> None:
        """The device writes other numbers there."""
        self._uploaded.pop((kind, size), None)


def fetched(told: Tensor) -> Told:
    """Numbers on their way to the host: what is enqueued from now on does not delay them."""
    if told.device.type != "cuda":
        return told, None
    numbers, over = told.to("cpu", non_blocking=True), torch.cuda.Event()
    over.record(torch.cuda.current_stream(told.device))
    return numbers, over


def arrived(told: Told) -> list[int]:
    numbers, over = told
    if over is not None:
        over.synchronize()
    found: list[int] = numbers.tolist()
    return found
