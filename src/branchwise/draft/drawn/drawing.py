"""All draws of a tree as one recording, for texts with any sampling parameters, and numbers that the host needs of
it."""

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
"""most recordings that are kept, one for each number of texts and structure of their sampling; those used last"""
RESTS = 16
"""number of batches that are left to the host after one whose trees failed: a distribution with too few tokens is
often followed by others"""

Way = tuple[BatchReading, GraphedFunction[Drawn]]
"""for one number of texts and one structure of their sampling: the reading of logits, and the recording of all draws"""
Begin = Callable[..., Passes]
"""makes the passes over trees of texts, given their slots (batch,) and further tensors of a draft model or head"""
Told = tuple[Tensor, torch.cuda.Event | None]
"""numbers on their way to the host, and the event after which they have arrived"""


def tree_draft_of(tree: TreePolicy, width: int, device: torch.device) -> Callable[[Sequence[Budget]], TreeDraft] | None:
    """A function that makes the `TreeDraft` of a policy for budgets, over `width` tokens that can be proposed; None if
    only the host can grow such trees."""
    if isinstance(tree, Paths) and type(tree) in (Paths, Chain):
        return lambda budgets: PathDraft(tree, max(map(tree.within, budgets)), device)
    if isinstance(tree, Shaped) and type(tree) in (Template, Branching, Ranks, RankedShape):
        whole = not isinstance(tree, Branching) or shape_of(tree, 0).depth == len(tree.branching)
        return (lambda budgets: ShapeDraft(tree, width, device)) if whole else None
    return None


class Drawing:
    """Draws trees. Its inputs and outputs have fixed addresses, so that the draws can be recorded."""

    def __init__(self, target: TargetInfo, reading: Callable[[list[SamplingParams]], BatchReading]) -> None:
        """`reading` makes the reading of the drafter's logits, for texts with these sampling parameters."""
        self._target, self._reading = target, reading
        self._given: tuple[TreeDraft, Begin] | None = None
        self._ways: OrderedDict[Any, Way] = OrderedDict()
        self._last: tuple[int, list[SamplingParams], Way] | None = None
        self._places: dict[int, Drawn] = {}  # by the number of texts
        self._buffers: dict[tuple[str, int], PinnedBuffer] = {}
        self._uploaded: dict[tuple[str, int], list[int]] = {}
        """the numbers that each buffer holds on the device"""

    def start(self, draft: TreeDraft, begin: Begin) -> None:
        """Draw trees of `draft` from now on. All recordings are dropped: they belong to other trees or addresses."""
        self._given, self._last = (draft, begin), None
        for held in (self._ways, self._places, self._buffers, self._uploaded):
            held.clear()

    def __call__(
        self, sequences: Sequence[SequenceState], size: int, slots: Sequence[int], padding: int, *known: Tensor
    ) -> Drawn:
        """Trees of texts in these slots, padded to `size` texts with the slot `padding`. `known` are the further
        arguments of `Begin`, always at the same addresses."""
        _, grow = self._way(sequences, size)
        numbers = [
            [slot, sequence.rng_seed, int(sequence.sampling.greedy)]
            for slot, sequence in zip(slots, sequences, strict=True)
        ]
        about = self.upload("about", size, numbers, [padding, 0, 0])
        with torch.inference_mode():
            return grow(about, *known)

    def _way(self, sequences: Sequence[SequenceState], size: int) -> Way:
        """The way to draw for these texts, padded to `size` texts."""
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
        """The tensors that trees are written to. On a device they stay the same, because recordings that read them hold
        their addresses. On a host nothing is recorded, and every call makes new ones, so that trees keep their
        tokens."""
        if size not in self._places or self._target.device.type == "cpu":
            with torch.inference_mode(mode=False):  # so that code outside of inference mode can use them too
                self._places[size] = draft.place(size, self._target.vocabulary)
        return self._places[size]

    # Numbers of the host

    def upload(self, kind: str, size: int, rows: list[list[int]], padding: list[int]) -> Tensor:
        """(fields, size): numbers of texts at a fixed address on the device. `rows` has a row for each text; a row that
        is shorter than `padding` is filled up from it."""
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
        """(fields, size): the tensor on the device for `count` numbers of each of `size` texts."""
        if (kind, size) not in self._buffers:
            self._buffers[kind, size] = PinnedBuffer(count * size, self._target.device, torch.int64)
        return self._buffers[kind, size].device_copy.view(count, size)

    def overwritten(self, kind: str, size: int) -> None:
        """Called before the device itself writes to this place, so that the next upload is not skipped."""
        self._uploaded.pop((kind, size), None)


def fetched(told: Tensor) -> Told:
    """Start copying numbers to the host; what is enqueued from now on does not delay them."""
    if told.device.type != "cuda":
        return told, None
    numbers, over = told.to("cpu", non_blocking=True), torch.cuda.Event()
    over.record(torch.cuda.current_stream(told.device))
    return numbers, over


def arrived(told: Told) -> list[int]:
    """Wait for the numbers, and return them."""
    numbers, over = told
    if over is not None:
        over.synchronize()
    found: list[int] = numbers.tolist()
    return found
