"""Passes of a model, and other functions of tensors, as CUDA graphs.

A pass over a few nodes is hundreds of small kernels, and launching them one by one takes the host many times as long as
the device takes to run them. All that differs from pass to pass lies in `PassInputs` at fixed addresses. So a pass is
recorded once for every size, when that size is first needed, and after that replayed with one launch.
"""

from __future__ import annotations

import gc
import logging
import threading
from collections import OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from functools import partial
from importlib.util import find_spec
from typing import Any, Generic, TypeVar

import torch
from torch import Tensor

from branchwise.backends.base import Scored
from branchwise.core.batch import TreeBatch
from branchwise.core.sequence import SequenceState
from branchwise.cuda.counts import count, watch_triton
from branchwise.cuda.inputs import PassInputs, Size
from branchwise.errors import first_line
from branchwise.progress import showing

MOST = 48  # graphs that a target or a function keeps, the most recently used; each holds memory for its outputs
MOST_SEEN = 1024  # keys of calls that are remembered until they come a second time
WARMUPS = 2  # runs before a recording, in which libraries choose and compile their kernels

log = logging.getLogger(__name__)

T = TypeVar("T")

_turn = threading.Lock()  # only one thread records at a time


class Pool:
    """The memory pool of graphs that never run at the same time: those of one target, or those of one verifier."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._keeper: torch.cuda.CUDAGraph | None = None  # a pool ends with its last graph, so a small one stays

    def record(self, run: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
        """The graph of a function, and the tensors that the function returns, to which every replay writes. The graph
        reads the same addresses as the function, so the caller must keep those tensors alive."""
        with _turn, on(self._device), nothing_collected():
            here, side = torch.cuda.current_stream(), torch.cuda.Stream()
            side.wait_stream(here)
            try:
                with torch.cuda.stream(side):
                    for _ in range(WARMUPS):
                        run()
            finally:
                here.wait_stream(side)
            torch.cuda.synchronize()
            capture = partial(torch.cuda.graph, stream=_recorder(here), capture_error_mode="thread_local")
            try:
                if self._keeper is None:
                    self._keeper = torch.cuda.CUDAGraph()
                    with capture(self._keeper):
                        torch.zeros(1, device=self._device)
                graph = torch.cuda.CUDAGraph()
                with capture(graph, pool=self._keeper.pool()):
                    found = run()
                count("recorded", run)
            except BaseException:
                self._keeper = None  # torch allocates nothing more from the pool of a failed recording
                torch.cuda.set_stream(here)  # if it failed at its end, torch is still on the recording stream
                raise
            return graph, found


_recorders: dict[torch.device, torch.cuda.Stream] = {}


def _recorder(here: torch.cuda.Stream) -> torch.cuda.Stream:
    """The stream on which a device is recorded. Nothing else runs on it, because matrix products keep a scratch space
    for every stream. torch's default recording stream belongs to the first device that ever recorded."""
    if here.device not in _recorders:
        # torch hands out streams from a small pool; no other code here uses this priority.
        _recorders[here.device] = torch.cuda.Stream(here.device, priority=-1)
    return _recorders[here.device]


@contextmanager
def nothing_collected() -> Iterator[None]:
    """Disable the garbage collector meanwhile: if it frees a graph during a recording, the recording fails."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


@contextmanager
def restored(*tensors: Tensor) -> Iterator[None]:
    """Undo writes to these tensors inside the context: a recording calls its function several times."""
    before = [tensor.clone() for tensor in tensors]
    try:
        yield
    finally:
        for tensor, value in zip(tensors, before, strict=True):
            tensor.copy_(value)


def on(device: torch.device) -> AbstractContextManager[object]:
    """Launch on this device: graphs and kernels go to the current one, wherever their tensors are."""
    here = device.type != "cuda" or device.index in (None, torch.cuda.current_device())
    return nullcontext() if here else torch.cuda.device(device)


def have_kernels(device: torch.device) -> bool:
    """Whether our own kernels run on a device: CUDA from Ampere on, with Triton installed."""
    if device.type != "cuda" or find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


_at_first_sight = False


@contextmanager
def recording_at_first_sight() -> Iterator[None]:
    """Record functions at their first call inside this context: what occurs once in a warm-up may occur again."""
    global _at_first_sight
    before, _at_first_sight = _at_first_sight, True
    try:
        yield
    finally:
        _at_first_sight = before


def at_first_sight() -> bool:
    return _at_first_sight


class GraphedFunction(Generic[T]):
    """A function of tensors on a device, recorded for the addresses that it reads, and replayed after that. The caller
    writes new values to the same tensors; the next call with them overwrites the output. On the host, or if recording
    fails, it is the function itself."""

    def __init__(
        self,
        function: Callable[..., T],
        device: torch.device,
        own: Sequence[Tensor] = (),
        *,
        writes: bool = False,
        still: Callable[..., AbstractContextManager[object]] | None = None,
        capture: bool = True,
        **options: Any,
    ) -> None:
        """`own` are constant first arguments. Recording calls the function several times and must leave no trace: if
        the function `writes` to its own tensors, these are restored, and `still` is a context in which its other
        arguments have no effect. `capture`: whether recording is allowed."""
        self._function = function
        self._device = device
        self._own = own
        self._options = options
        self._writes = own if writes else ()
        self._still = still or (lambda *places: nullcontext())
        self._pool = Pool(device)
        self._recorded: OrderedDict[Any, tuple[torch.cuda.CUDAGraph, T]] = OrderedDict()
        self._seen: set[Any] = set()
        self.captures = capture and device.type == "cuda"

    def __call__(self, *places: Tensor) -> T:
        if not self.captures:
            return self._run(*places)
        # A graph reads addresses. It is right for any tensor there of the same shape, so no tensor is kept alive.
        key = tuple((place.data_ptr(), place.shape, place.stride(), place.dtype) for place in places)
        with on(self._device):
            if key not in self._recorded and not self._record(key, places):
                count("eager", f"{self._function.__name__} {[tuple(place.shape) for place in places]}")
                return self._run(*places)
            self._recorded.move_to_end(key)
            graph, found = self._recorded[key]
            graph.replay()
            return found

    def _record(self, key: Any, places: Sequence[Tensor]) -> bool:
        """Record the function if it was called with these tensors before. False if it is not recorded: at the first
        call, for lack of memory, or because it cannot be."""
        if key not in self._seen and not at_first_sight():
            if len(self._seen) > MOST_SEEN:
                self._seen.clear()
            self._seen.add(key)
            return False
        try:
            with restored(*self._writes), self._still(*places):
                self._recorded[key] = self._pool.record(lambda: self._run(*places))
        except torch.OutOfMemoryError:
            return False
        except RuntimeError as error:
            self.captures = False
            log.warning("%s runs without a CUDA graph: %s", self._function.__name__, first_line(error))
            return False
        if len(self._recorded) > MOST:
            self._recorded.popitem(last=False)
        return True

    def _run(self, *places: Tensor) -> T:
        with on(self._device):
            return self._function(*self._own, *places, **self._options)


class PaddedGraphedFunction:
    """A recorded function of rows over a vocabulary, for drafting on a device between two passes of a model.

    A recording reads fixed addresses, so inputs (rows, …) are copied there first, padded to a few sizes, so that few
    recordings are needed. On the host it is the function itself.
    """

    def __init__(self, function: Callable[..., Tensor], device: torch.device, *, capture: bool = True) -> None:
        self._device = device
        self._replay = GraphedFunction(function, device, capture=capture)
        self._places: dict[Any, list[Tensor]] = {}
        self.fixed = device.type != "cpu"  # whether inputs are copied to fixed addresses

    def __call__(self, *inputs: Tensor) -> Tensor:
        """The output of the function, to be read or copied before the next call overwrites it. On a device inputs and
        output are padded with meaningless rows."""
        if not self.fixed:
            return self._replay(*inputs)
        with torch.inference_mode():  # outputs of a model's pass may be inference tensors
            return self._replay(*self._brought(inputs))

    def _brought(self, inputs: tuple[Tensor, ...]) -> list[Tensor]:
        sizes = tuple((1 << (len(rows) - 1).bit_length(), *rows.shape[1:]) for rows in inputs)  # powers of two
        key = sizes, tuple(rows.dtype for rows in inputs)
        if key not in self._places:
            kinds = zip(sizes, inputs, strict=True)
            self._places[key] = [torch.zeros(size, dtype=rows.dtype, device=self._device) for size, rows in kinds]
        for place, rows in zip(self._places[key], inputs, strict=True):
            place[: len(rows)].copy_(rows, non_blocking=True)
        return self._places[key]


@dataclass(eq=False)
class Recorded:
    """The inputs of a pass, the graph that reads them, and its output. Graph and output are None before the
    recording."""

    inputs: PassInputs
    graph: torch.cuda.CUDAGraph | None = None
    found: Scored | None = None


class Graphs:
    """The passes of one model over one KV cache."""

    def __init__(self, name: str, device: torch.device, *, capture: bool) -> None:
        self._name = name
        self._device = device
        self._pool = Pool(device)
        self._ready: OrderedDict[Size, Recorded] = OrderedDict()
        self.captures = capture and device.type == "cuda"  # otherwise every pass is launched kernel by kernel
        if self.captures:
            watch_triton()

    def forget(self) -> None:
        """Drop all recordings; sizes are recorded again when they are needed."""
        self._ready.clear()

    def knows(self, size: Size) -> bool:
        """Whether a pass of this size needs no recording: it is recorded, or nothing is."""
        return not self.captures or (size in self._ready and self._ready[size].graph is not None)

    def ready(self, size: Size) -> Recorded:
        """The inputs of this size, for the caller to fill and to give to `run`."""
        if size in self._ready:
            self._ready.move_to_end(size)
        else:
            self._ready[size] = Recorded(PassInputs(size, self._device))
            if len(self._ready) > MOST:
                self._ready.popitem(last=False)
        return self._ready[size]

    def run(self, recorded: Recorded, run: Callable[[PassInputs], Scored]) -> Scored:
        """The output of the pass `run` over filled inputs, padding included. The next pass of this size overwrites
        it."""
        with on(self._device):
            if recorded.graph is None and self.captures:
                self._record(recorded, run)
            if recorded.graph is None or recorded.found is None:
                count("eager", recorded.inputs.size)
                return run(recorded.inputs)
            recorded.graph.replay()
            return recorded.found

    def _record(self, recorded: Recorded, run: Callable[[PassInputs], Scored]) -> None:
        """Record the pass over filled inputs. If a model cannot be recorded, none of its passes is tried again."""
        size = recorded.inputs.size
        try:
            with showing() as progress:
                progress(f"recording a pass over {size.batch} x {size.nodes} nodes", 0, 0)
                recorded.graph, recorded.found = self._pool.record(lambda: run(recorded.inputs))
        except torch.OutOfMemoryError:
            raise
        except RuntimeError as error:
            self.captures = False
            log.warning("%s cannot be captured in a CUDA graph and runs without: %s", self._name, first_line(error))


@dataclass(eq=False)
class InflightPass:
    """A pass enqueued before the previous verdict reaches the host: its sequences and trees, and its output.

    A verdict is in device memory some time before the host has read it. If the next trees are known by then, the pass
    over them needs only the new length and the last token of each text, and the device knows both. The pass has no
    result until the verdict is committed, and only for these sequences and trees.
    """

    sequences: tuple[SequenceState, ...]
    batch: TreeBatch
    scored: Scored
    intact: Callable[[], bool]  # whether no other pass has overwritten the results and no slot has moved since
    committed: bool = False  # whether the previous verdict was committed

    def result(self, sequences: Sequence[SequenceState], batch: TreeBatch) -> Scored | None:
        if not (self.committed and self.intact() and self._serves(sequences, batch)):
            return None
        if batch.host_tokens is None:
            batch.tokens = self.batch.tokens
        return self.scored

    def _serves(self, sequences: Sequence[SequenceState], batch: TreeBatch) -> bool:
        mine, theirs = self.batch.trees, batch.trees
        if self.sequences != tuple(sequences) or (self.batch.nodes, len(mine)) != (batch.nodes, len(theirs)):
            return False
        # Any two bare roots are interchangeable: the device knows which token the root is.
        return all(one is other or len(one) == len(other) == 1 for one, other in zip(mine, theirs, strict=True))
