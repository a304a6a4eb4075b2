"""Passes of a model, and other functions of tensors, as CUDA graphs; the only place that knows how they are recorded.

A pass over a few nodes is hundreds of small kernels, and launching them one by one takes the host many times as long
as the device takes to run them. All that differs from pass to pass lies on a sheet at a fixed place, so a pass is
recorded once for every size of sheet, when that size is first wanted, and replayed from then on with one launch.
"""

from __future__ import annotations

import gc
import logging
import threading
from collections import Counter, OrderedDict
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from importlib.util import find_spec
from typing import Any, Generic, NamedTuple, TypeVar

import torch
from torch import Tensor

from branchwise.cuda.inputs import PassInputs, Size
from branchwise.errors import first_line
from branchwise.progress import showing

MOST = 48
"""graphs of a target, or of a function, that are kept, those used last; each holds what it finds"""
MOST_SEEN = 1024
"""addresses that are remembered until they come again"""
WARMUPS = 2
"""passes before a recording, in which libraries choose and compile their kernels"""

log = logging.getLogger(__name__)

T = TypeVar("T")

_turn = threading.Lock()  # the device records for one thread at a time


class Pool:
    """The memory of graphs that never run at the same time: those of one target, or those of one verifier."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._keeper: torch.cuda.CUDAGraph | None = None
        """A pool ends with its last graph, so a small one stays."""

    def record(self, run: Callable[[], T]) -> tuple[torch.cuda.CUDAGraph, T]:
        """The graph of a function, and what it returns: where the graph will write.

        The graph reads what the function read, so whatever holds those tensors has to be kept.
        """
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
            try:
                if self._keeper is None:
                    self._keeper = torch.cuda.CUDAGraph()
                    with torch.cuda.graph(self._keeper, stream=_recorder(here), capture_error_mode="thread_local"):
                        torch.zeros(1, device=self._device)
                graph = torch.cuda.CUDAGraph()
                pool, stream = self._keeper.pool(), _recorder(here)
                with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                    found = run()
            except BaseException:
                self._keeper = None  # torch takes nothing more from the pool of a recording that broke off
                torch.cuda.set_stream(here)  # where it broke off at its end, torch stays on the stream it recorded
                raise
            return graph, found


_recorders: dict[torch.device, torch.cuda.Stream] = {}


def _recorder(here: torch.cuda.Stream) -> torch.cuda.Stream:
    """The stream on which a device is recorded, and nothing else runs: products keep a scratch space for every stream.

    torch's own is one for all devices, that of the first which ever recorded.
    """
    if here.device not in _recorders:
        # Streams are dealt out from a few; of those with this priority nobody else here takes one.
        _recorders[here.device] = torch.cuda.Stream(here.device, priority=-1)
    return _recorders[here.device]


@contextmanager
def nothing_collected() -> Iterator[None]:
    """Without the garbage collector: a graph that ends while another is recorded breaks the recording."""
    collects = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collects:
            gc.enable()


def on(device: torch.device) -> AbstractContextManager[object]:
    """Launch on this device: graphs and kernels go to the current one, wherever their tensors are."""
    here = device.type != "cuda" or device.index in (None, torch.cuda.current_device())
    return nullcontext() if here else torch.cuda.device(device)


def have_kernels(device: torch.device) -> bool:
    """Whether there are kernels of our own for it: on CUDA, from Ampere on, with Triton to make them."""
    if device.type != "cuda" or find_spec("triton") is None:
        return False
    return torch.cuda.get_device_capability(device) >= (8, 0)


class GraphedFunction(Generic[T]):
    """A function of tensors on a device, recorded for the places it reads from, and replayed from then on.

    Whoever calls it writes new values to the same places. What it returns is overwritten by the next call that finds
    its values there. On the host, and where nothing can be recorded, it is the function itself.
    """

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
        """`own` are tensors that come before all others, always the same. Recording calls the function, and that must
        not count: `writes` says that it changes those tensors, which are then restored, and `still` is a way to let the
        places it is called with say nothing meanwhile. `capture` may forbid to record."""
        self._function = function
        self._device = device
        self._own = own
        self._options = options
        self._writes = own if writes else ()
        self._still = still or (lambda *places: nullcontext())
        self._pool = Pool(device)
        self._recorded: OrderedDict[Any, tuple[torch.cuda.CUDAGraph, T]] = OrderedDict()
        self._seen: Counter[Any] = Counter()
        self.captures = capture and device.type == "cuda"

    def __call__(self, *places: Tensor) -> T:
        if not self.captures:
            return self._run(*places)
        # A graph knows addresses. It is right for whatever tensor lies there in the same shape, so none is kept.
        key = tuple(map(_place, places))
        with on(self._device):
            if key not in self._recorded and not (self._often(key) and self.record(*places)):
                return self._run(*places)
            self._recorded.move_to_end(key)
            graph, found = self._recorded[key]
            graph.replay()
            return found

    def record(self, *places: Tensor) -> bool:
        """Record it with what lies at these places now; False where that cannot be, or has no room now."""
        if not self.captures:
            return False
        before = [tensor.clone() for tensor in self._writes]
        try:
            key = tuple(map(_place, places))
            with self._still(*places):
                self._recorded[key] = self._pool.record(lambda: self._run(*places))
        except torch.OutOfMemoryError:
            return False
        except RuntimeError as error:
            self.captures = False
            log.warning("%s runs without a CUDA graph: %s", self._function.__name__, first_line(error))
            return False
        finally:
            for tensor, value in zip(self._writes, before, strict=True):
                tensor.copy_(value)
        if len(self._recorded) > MOST:
            self._recorded.popitem(last=False)
        return True

    def _run(self, *places: Tensor) -> T:
        with on(self._device):
            return self._function(*self._own, *places, **self._options)

    def _often(self, key: Any) -> bool:
        """Whether values came to these places before: what comes anywhere is not worth a recording."""
        if len(self._seen) > MOST_SEEN:
            self._seen.clear()
        self._seen[key] += 1
        return self._seen[key] > 1


def _place(tensor: Tensor) -> tuple[Any, ...]:
    return tensor.data_ptr(), tensor.shape, tensor.stride(), tensor.dtype


class PassOutputs(NamedTuple):
    """What a pass finds."""

    logits: Tensor
    """(batch, nodes, vocabulary)"""
    topk: Tensor | None
    """(batch, nodes, 2, k) float32: the most probable tokens and their probabilities, if they are asked for"""
    hidden: dict[str, Tensor]
    """layer -> (batch, nodes, width), for the layers that are asked for"""

    def cut(self, batch: int, nodes: int) -> PassOutputs:
        """Without the padding."""
        hidden = {layer: states[:batch, :nodes] for layer, states in self.hidden.items()}
        return PassOutputs(
            self.logits[:batch, :nodes], None if self.topk is None else self.topk[:batch, :nodes], hidden
        )


class Recorded:
    """A sheet, and the graph that reads it, once there is one."""

    def __init__(self, inputs: PassInputs) -> None:
        self.inputs = inputs
        self.graph: torch.cuda.CUDAGraph | None = None
        self.found: PassOutputs | None = None


class Graphs:
    """The passes of one model over one store."""

    def __init__(self, name: str, device: torch.device, *, capture: bool = True) -> None:
        self._name = name
        self._device = device
        self._pool = Pool(device)
        self._ready: OrderedDict[Size, Recorded] = OrderedDict()
        self.captures = capture and device.type == "cuda"
        """Otherwise every pass is launched kernel by kernel."""

    def forget(self) -> None:
        """Drop what is recorded; sizes are recorded again when they are wanted."""
        self._ready.clear()

    def knows(self, size: Size) -> bool:
        """Whether a pass of this size is recorded, or never will be."""
        return not self.captures or (size in self._ready and self._ready[size].graph is not None)

    def ready(self, size: Size) -> Recorded:
        """A sheet of this size, to be filled and passed over."""
        if size in self._ready:
            self._ready.move_to_end(size)
        else:
            self._ready[size] = Recorded(PassInputs(size, self._device))
            if len(self._ready) > MOST:
                self._ready.popitem(last=False)
        return self._ready[size]

    def run(self, recorded: Recorded, run: Callable[[PassInputs], PassOutputs]) -> PassOutputs:
        """What the pass over a filled sheet finds, for the whole of it. The next pass of this size overwrites it.

        `run` makes the pass; a recorded one does not need it any more.
        """
        with on(self._device):
            if recorded.graph is None and not (self.captures and self._record(recorded, run)):
                return run(recorded.inputs)
            assert recorded.graph is not None, "a pass was recorded without a graph"
            assert recorded.found is not None, "a pass was recorded without what it finds"
            recorded.graph.replay()
            return recorded.found

    def _record(self, recorded: Recorded, run: Callable[[PassInputs], PassOutputs]) -> bool:
        """Record the pass over a filled sheet; False where this model cannot be recorded, and will not be."""
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
            return False
        return True
