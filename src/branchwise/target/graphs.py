"""Passes of a model as CUDA graphs; the only place that knows of them.

A pass over a few nodes is hundreds of small kernels, and launching them one by one takes the host many times as long
as the device takes to run them. All that differs from pass to pass lies on a sheet at a fixed place, so a pass is
recorded once for every size of sheet, when that size is first wanted, and replayed from then on with one launch.
"""

from __future__ import annotations

import logging
import sys
import threading
from collections import OrderedDict
from collections.abc import Callable
from typing import NamedTuple, TypeVar

import torch
from torch import Tensor

from branchwise.target.sheet import Sheet, Size

MOST = 48
"""graphs that are kept, those used last; each holds the logits of its size"""
WARMUPS = 2
"""passes before a recording, in which libraries choose and compile their kernels"""

log = logging.getLogger(__name__)

_turn = threading.Lock()  # the device records for one thread at a time

_keepers: dict[torch.device, torch.cuda.CUDAGraph] = {}
"""All graphs of a device take their memory from one pool, since they never run at the same time. A pool ends with its
last graph, so one of each device stays."""


T = TypeVar("T")


class Found(NamedTuple):
    """What a pass over a sheet finds."""

    logits: Tensor
    """(batch, nodes, vocabulary)"""
    best: Tensor | None
    """(batch, nodes, 2, k) float32: best tokens and their probabilities, where they are asked for"""


class Graphs:
    """The passes of one model over one store."""

    def __init__(self, name: str, run: Callable[[Sheet], Found], device: torch.device, *, capture: bool = True) -> None:
        """`run` makes a pass over what a sheet tells and says what it found; without `capture` every time anew."""
        self._name = name
        self._run = run
        self._device = device
        self._capture = capture and device.type == "cuda"
        self._ready: OrderedDict[Size, Recorded] = OrderedDict()

    @property
    def captures(self) -> bool:
        return self._capture

    def forget(self) -> None:
        """Drop what is recorded; sizes are recorded again when they are wanted."""
        self._ready.clear()

    def sheet(self, size: Size) -> Sheet:
        """The sheet of this size, to be filled before `replay`."""
        return self._of(size).sheet

    def replay(self, size: Size) -> Found:
        """What the pass over a whole sheet finds. The next pass of this size overwrites it."""
        recorded = self._of(size)
        if recorded.graph is None and not (self._capture and self._record(recorded)):
            return self._run(recorded.sheet)
        assert recorded.graph is not None, "a pass was recorded without a graph"
        assert recorded.found is not None, "a pass was recorded without what it finds"
        recorded.graph.replay()
        return recorded.found

    def _of(self, size: Size) -> Recorded:
        if size in self._ready:
            self._ready.move_to_end(size)
        else:
            self._ready[size] = Recorded(Sheet(size, self._device))
            if len(self._ready) > MOST:
                self._ready.popitem(last=False)
        return self._ready[size]

    def _record(self, recorded: Recorded) -> bool:
        """Record the pass over a filled sheet; False where this model cannot be recorded, and will not be."""
        size = recorded.sheet.size
        if sys.stderr.isatty():
            print(f"\rRecording a pass over {size.batch} x {size.nodes} nodes …\033[K", end="", file=sys.stderr)
        try:
            with _turn:
                recorded.graph, recorded.found = record(lambda: self._run(recorded.sheet), self._device)
        except RuntimeError as error:
            self._capture = False
            _keepers.pop(self._device, None)  # torch takes nothing more from the pool of a recording that broke off
            reason = str(error).strip().splitlines()[0] if str(error).strip() else type(error).__name__
            log.warning("%s cannot be captured in a CUDA graph and runs without: %s", self._name, reason)
            return False
        finally:
            if sys.stderr.isatty():
                print("\r\033[K", end="", file=sys.stderr)
        return True


class Recorded:
    """A sheet, and the graph that reads it, once there is one."""

    def __init__(self, sheet: Sheet) -> None:
        self.sheet = sheet
        self.graph: torch.cuda.CUDAGraph | None = None
        self.found: Found | None = None


def record(run: Callable[[], T], device: torch.device) -> tuple[torch.cuda.CUDAGraph, T]:
    """The graph of a function, and where it writes what it returns."""
    here = torch.cuda.current_stream(device)
    side = torch.cuda.Stream(device)
    side.wait_stream(here)
    with torch.cuda.stream(side):
        for _ in range(WARMUPS):
            run()
    here.wait_stream(side)
    torch.cuda.synchronize(device)
    if device not in _keepers:
        _keepers[device] = torch.cuda.CUDAGraph()
        with torch.cuda.graph(_keepers[device]):
            torch.zeros(1, device=device)
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, pool=_keepers[device].pool()):
        found = run()
    return graph, found
