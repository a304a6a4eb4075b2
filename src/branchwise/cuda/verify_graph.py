"""A verdict as one CUDA graph.

A verifier on a device is a few hundred small kernels, and launching them takes longer than running them. Its Python
code never branches on a sampled value, so its operations can be traced once for a shape (`make_fx`), fused by the
compiler, captured into a graph and replayed on new values. The rule itself stays in the verifier's own file.

`match` needs only the token that each text draws after each node. Two kernels of ours compute these tokens and the
verdicts (`draw.py`), whatever the sampling parameters: so one graph of a size serves all texts, and nothing is
compiled.
"""

from __future__ import annotations

import copy
from collections import Counter, OrderedDict
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any, NamedTuple

import torch
from torch import Tensor

from branchwise.core.batch import LOOKED_UP, TABLES, TreeBatch, TreeLayout
from branchwise.core.rng import Chance, SeededChance
from branchwise.core.target_probs import TargetProbs, WarpedProbs
from branchwise.core.tree import Draw
from branchwise.cuda import compiled
from branchwise.cuda.choices import Choices
from branchwise.cuda.counts import count
from branchwise.cuda.graphs import Pool, at_first_sight, have_kernels, on
from branchwise.cuda.inputs import PinnedBuffer
from branchwise.cuda.laid import lie_still
from branchwise.verify import Verdicts, Verifier
from branchwise.verify.auto import Auto, choose
from branchwise.verify.match import Match, Undrafted, rule_for

MOST = 64  # graphs that are kept, the most recently used
MOST_SHAPES = 4096
CAPTURE_AFTER = 3
"""the number of times a shape must occur before it is captured: some tree policies hardly ever repeat a shape"""

JUDGED = ("tokens", "parents", "depths")
"""the tables that our kernels for `match` read"""
Program = Callable[..., Tensor]  # of `GraphInputs.flat`


class CapturedVerifier(Verifier):
    """A verifier that is captured for every shape when it occurs for the `seen`-th time, and replayed after that. Its
    verdicts are in the graph's memory: read them before the next call."""

    def __init__(self, verifier: Verifier, *, compile: bool = True, seen: int = 1, texts: int = 64) -> None:
        """`texts` is the largest number of texts in a batch."""
        self.verifier = verifier
        self.name = verifier.name
        self.accepts: frozenset[Draw] = verifier.accepts
        self._compile = compile
        self._seen = seen
        self._texts = texts
        self._choices: Choices | None = None
        self._times: Counter[Any] = Counter()
        self._pool: Pool | None = None
        self._graphs: OrderedDict[Any, Recording] = OrderedDict()
        self._known_places: set[Any] = set()

    def __call__(self, batch: TreeBatch, probs: TargetProbs, chance: Chance) -> Verdicts:
        assert isinstance(probs, WarpedProbs), "only verdicts on real passes are recorded"
        assert isinstance(chance, SeededChance), "only seeded randomness is recorded"
        verifier = rule_for(choose(batch) if isinstance(self.verifier, Auto) else self.verifier, batch, probs)
        drawn = not isinstance(verifier, Match | Undrafted)  # those two read no q
        choices = self._brought(probs) if isinstance(verifier, Match) else None
        if (choices is None and not probs.capturable) or (drawn and batch.q is None):
            count("eager", f"{verifier.name} with a text that looks back")
            return self.verifier(batch, probs, chance)
        reads = verifier.reads if choices is None else JUDGED
        resident = self._resident(batch, reads)
        places = tuple((table.data_ptr(), table.stride(), table.dtype) for table in resident.values())
        key = verifier.name, places, *key_of(batch, probs, reads, by_kernel=choices is not None)
        recording = self._graphs.get(key)
        if recording is None:
            self._times[key] += 1
            rare = self._times[key] < self._seen and not at_first_sight()
            if choices is None and not probs.greedy and rare:
                count("eager", f"{verifier.name} over {len(batch)} x {batch.nodes} nodes")
                return self.verifier(batch, probs, chance)
            if len(self._times) > MOST_SHAPES:
                self._times.clear()
            if choices is None:
                probs.bring()
            rows = batch.pad_shape.inner or batch.nodes  # enough for all later batches of this shape
            q = batch.q.new_zeros(len(batch), rows, batch.q.shape[2]) if drawn else None  # type: ignore[union-attr]
            # The graph reads the logits where they are: a recorded pass writes them to the same address every time.
            self._pool = self._pool or Pool(probs.logits.device)
            brought = [name for name in reads if name not in resident]
            numbers = Numbers(batch, chance, brought, probs.logits.device)
            # Greedy texts need no seeds, and below a bare root no token is looked up.
            numbers.needless = isinstance(verifier, Match) and (not brought or batch.nodes == 1)
            inputs = GraphInputs(numbers.on_device, probs.logits, q, tuple(resident.values()))
            bare = choices or probs.without_texts()
            program = as_program(verifier, batch, bare, reads, tuple(resident))
            fused = self._compile and not probs.greedy and choices is None
            adjusted = bare if isinstance(bare, WarpedProbs) else None
            self._graphs[key] = recording = Recording(self._pool, program, adjusted, numbers, inputs, fused)
            if len(self._graphs) > MOST:
                self._graphs.popitem(last=False)
        self._graphs.move_to_end(key)
        found = recording(batch, probs, chance, batch.q if drawn else None)
        return Verdicts.written(found, with_tokens=batch.host_tokens is None)

    def _brought(self, probs: WarpedProbs) -> Choices | None:
        """The sampling parameters for our kernels, written to the device; None if the device has no kernels, if a text
        has a logits processor of its own, or if the batch is larger than announced."""
        device, texts = probs.logits.device, probs._sequences
        if probs._warp.processes or not have_kernels(device) or len(texts) > self._texts:
            return None
        if self._choices is None:
            self._choices = Choices(self._texts, probs.logits.shape[-1], device)
        self._choices.bring(texts)
        return self._choices

    def _resident(self, batch: TreeBatch, reads: Sequence[str]) -> dict[str, Tensor]:
        """The tables of trees that were drafted on the device, if earlier ones had the same addresses: then a graph
        reads them there. Trees of several texts that are stacked again for every step have none."""
        if not lie_still(batch):
            return {}
        tables = {name: batch.host(name) for name in reads}
        there = {name: table for name, table in tables.items() if table.device.type != "cpu"}
        places = tuple(table.data_ptr() for table in there.values())
        if places in self._known_places:
            return there
        if len(self._known_places) > MOST_SHAPES:
            self._known_places.clear()
        self._known_places.add(places)
        return {}


def as_program(
    verifier: Verifier,
    tree_batch: TreeBatch,
    probs: WarpedProbs | Choices,
    reads: Sequence[str] = TABLES,
    resident: Sequence[str] = (),
) -> Program:
    """A verifier as a function of tensors alone, for all batches of the same shapes. `probs` are probs without texts,
    or the `Choices` of our kernels if the verifier only needs a token after every node. Of the tables that it reads,
    the `resident` ones are separate arguments, and the others are packed into the numbers."""
    brought = [name for name in reads if name not in resident]
    shapes, with_tokens = [tree_batch.host(name).shape for name in brought], tree_batch.host_tokens is None
    bare = shape_of(tree_batch)

    def program(numbers: Tensor, logits: Tensor, q: Tensor | None, *given: Tensor) -> Tensor:
        batch = len(logits)
        seeds, roots, *parts = numbers.split([batch, batch, *(shape.numel() for shape in shapes)])
        tables = {name: part.view(shape) for name, part, shape in zip(brought, parts, shapes, strict=True)}
        if isinstance(probs, Choices):
            from branchwise.cuda.draw import judge  # needs Triton

            tables |= dict(zip(resident, given, strict=True))
            tokens, parents, depths = (tables[name] for name in JUDGED)
            return judge(logits, tokens, parents, depths, seeds, roots, probs, with_tokens=with_tokens)
        same = copy.copy(bare)
        tables |= dict(zip(resident, (table.long() for table in given), strict=True))
        if "ancestor_bits" in tables:
            tables["ancestor_bits"] = tables["ancestor_bits"].int()
        same.__dict__.update(tables, q=q)
        chance = SeededChance(seeds, roots)
        found = verifier(same, probs.over(logits, same), chance)
        return (found.with_tokens(same.tokens) if with_tokens else found).rows

    return program


def shape_of(batch: TreeBatch) -> TreeBatch:
    """A batch without its tensors: a program is kept for long, and distributions over a vocabulary are large."""
    _ = batch.widths
    bare = copy.copy(batch)
    for name in ("q", "layout", "host_tokens", *TABLES):
        bare.__dict__.pop(name, None)
    bare._host = {}
    bare.trees = tuple(SimpleNamespace(draw=tree.draw, leaves=tree.leaves) for tree in batch.trees)  # type: ignore[misc]
    return bare


def key_of(
    batch: TreeBatch, probs: WarpedProbs, reads: Sequence[str] = TABLES, *, by_kernel: bool = False
) -> tuple[Any, ...]:
    """The key in which two batches must agree if one graph is to serve both. Sampling parameters that a kernel reads
    are not part of it."""
    structure = None if by_kernel else probs.structure
    about = reads, batch.nodes, probs.logits.shape, probs.logits.dtype, structure, batch.host_tokens is None
    shapes = tuple(batch.host(name).shape for name in reads if name in LOOKED_UP)
    if not shapes:
        return about
    assert batch.q is not None
    draws = frozenset(tree.draw for tree in batch.trees if len(tree) > 1)  # a bare root has no children
    return (*about, shapes, batch.q.dtype, batch.pad_shape.inner, *batch.widths, draws)


class GraphInputs(NamedTuple):
    """The tensors that a graph reads."""

    numbers: Tensor  # seeds, root positions and tables, packed for one host-to-device copy
    logits: Tensor
    q: Tensor | None
    resident: tuple[Tensor, ...] = ()
    """the tables that are read where they were drafted"""

    @property
    def flat(self) -> tuple[Tensor | None, ...]:
        """The arguments of a program, flat: tracing would split a tuple among them into separate arguments."""
        return self.numbers, self.logits, self.q, *self.resident


class Numbers:
    """The numbers of a program, written on the host and copied to a fixed address on the device before every replay.
    The layout of the nodes is written only if it changes; tokens that were drafted on the device never leave it."""

    needless = False
    """whether the program reads no numbers for greedy texts"""

    def __init__(self, batch: TreeBatch, chance: SeededChance, reads: Sequence[str], device: torch.device) -> None:
        self._reads = reads
        self._spans: dict[str, slice] = {}
        end = 0
        for name, table in self._tables(batch, chance).items():
            start, end = end, end + table.numel()
            self._spans[name] = slice(start, end)
        self._layout: TreeLayout | None = None
        self._buffer = PinnedBuffer(end, device, torch.int64)
        self.on_device = self.bring(batch, chance)

    def bring(self, batch: TreeBatch, chance: SeededChance) -> Tensor:
        host, drafted = self._buffer.host, {}
        layout, self._layout = self._layout, None  # if an interrupt comes below, everything is written again
        for name, table in self._tables(batch, chance).items():
            if table.device.type != "cpu":
                drafted[name] = table
            elif layout is not batch.layout or name not in TreeLayout._fields:
                host[self._spans[name]] = table.numpy().reshape(-1)
        self._layout = batch.layout
        numbers = self._buffer.copy()
        for name, table in drafted.items():
            numbers[self._spans[name]].view(table.shape).copy_(table)
        return numbers

    def _tables(self, batch: TreeBatch, chance: SeededChance) -> dict[str, Tensor]:
        seeds, roots = chance.host
        return {"seeds": seeds, "roots": roots, **{name: batch.host(name) for name in self._reads}}


class Recording:
    """One captured graph and the tensors that it reads."""

    def __init__(
        self,
        pool: Pool,
        program: Program,
        probs: WarpedProbs | None,
        numbers: Numbers,
        inputs: GraphInputs,
        compile: bool,
    ) -> None:
        """`probs` are those of the program if they hold sampling parameters, which every replay reads; else None."""
        self._probs = probs
        self.inputs = inputs
        self._numbers = numbers
        # A graph reads tensors that the program holds, such as temperatures, so the program stays.
        self._run: Program = compiled_or_not(trace(program, inputs), inputs) if compile else program
        with torch.no_grad():
            self._graph, self._found = pool.record(lambda: self._run(*inputs.flat))

    def __call__(self, batch: TreeBatch, probs: WarpedProbs, chance: SeededChance, q: Tensor | None) -> Tensor:
        logits = probs.logits
        if self._probs is not None:
            self._probs.assign(probs)
        bring(logits, self.inputs.logits)  # long copies first: the rest is launched while they run
        if q is not None and self.inputs.q is not None:
            rows = min(q.shape[1], self.inputs.q.shape[1])  # the rows of leaves are never read
            bring(q[:, :rows], self.inputs.q[:, :rows])
        if not (self._numbers.needless and probs.greedy):
            self._numbers.bring(batch, chance)
        with on(logits.device):
            self._graph.replay()
        return self._found


def bring(values: Tensor, place: Tensor) -> None:
    """Copy values to the address that a graph reads, unless they are there already."""
    if values.data_ptr() != place.data_ptr():
        with torch.inference_mode():  # the place may be an inference tensor, the output of a model's pass
            place.copy_(values)


def compiled_or_not(run: torch.fx.GraphModule, inputs: GraphInputs) -> Any:
    count("compiled", "a verdict")
    return compiled.compiled_or_not(run, inputs.flat, "A verdict is captured")


def trace(program: Program, inputs: GraphInputs) -> torch.fx.GraphModule:
    """The operations that a program of tensors performs, whatever Python it is written in."""
    return compiled.traced(program, inputs.flat)
