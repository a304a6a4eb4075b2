"""A verdict as one CUDA graph.

A verifier on a device is a few hundred small kernels, and launching them costs more than running them. It never looks
at a drawn value, so its operations can be recorded once for a shape (`make_fx`), fused by the compiler, captured into a
graph and replayed on new values. The rule itself stays where it is, in the verifier's own file.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any, NamedTuple

import torch
from torch import Tensor

from branchwise.chance import SeededChance
from branchwise.laws import ModelLaws
from branchwise.tree import LOOKED_UP, Draw, Forest
from branchwise.verify import Verdicts, Verifier

TABLES = ("tokens", "parents", "depths", *LOOKED_UP)
"""what a verifier may read of a forest"""


class Captured:
    """A verifier that is compiled and captured when a shape is first seen, and replayed from then on.

    Its verdicts lie in the graph's own memory: read them before the next call.
    """

    def __init__(self, verifier: Verifier, *, compile: bool = True, warmups: int = 3) -> None:
        self.verifier = verifier
        self.name = verifier.name
        self.accepts: frozenset[Draw] = verifier.accepts
        self._compile = compile
        self._warmups = warmups
        self._graphs: dict[Any, Recording] = {}

    def __call__(self, forest: Forest, laws: ModelLaws, chance: SeededChance) -> Verdicts:
        if not laws.capturable or forest.q is None:
            return self.verifier(forest, laws, chance)
        numbers, key = numbers_of(forest, chance), key_of(forest, laws)
        if key not in self._graphs:
            rows = forest.room.inner or forest.nodes  # whatever will come
            q = forest.q.new_zeros(len(forest), rows, forest.q.shape[2])
            places = Places(packed(numbers), laws.logits.clone(), q)
            program = as_program(self.verifier, forest, laws)
            self._graphs[key] = Recording(program, places, self._compile, self._warmups)
        return Verdicts.written(self._graphs[key](numbers, laws.logits, forest.q))

    def places(self, forest: Forest, laws: ModelLaws) -> Places:
        """Where the graph that a batch of this shape was captured in reads.

        Whoever scores the next batch may write its logits there, and whoever drafts it its q (into the first rows): a
        verdict on tensors that begin there copies nothing.
        """
        return self._graphs[key_of(forest, laws)].places


Program = Callable[[Tensor, Tensor, Tensor], Tensor]


def as_program(verifier: Verifier, forest: Forest, laws: ModelLaws) -> Program:
    """A verifier as a function of tensors alone, for all batches of the same shapes."""
    shapes = shapes_of(forest)

    def program(numbers: Tensor, logits: Tensor, q: Tensor) -> Tensor:
        batch = len(logits)
        seeds, roots, *parts = numbers.split([batch, batch, *(shape.numel() for shape in shapes)])
        same = copy.copy(forest)
        same.__dict__.update({name: part.view(shape) for name, part, shape in zip(TABLES, parts, shapes, strict=True)})
        same.__dict__["q"] = q
        return verifier(same, laws.over(logits, same), SeededChance(seeds, roots)).rows

    return program


def key_of(forest: Forest, laws: ModelLaws) -> tuple[Any, ...]:
    """What two batches must agree in for one graph to serve both."""
    assert forest.q is not None
    return (shapes_of(forest), laws.logits.shape, laws.logits.dtype, forest.q.dtype, *forest.widths, laws.shape)


def shapes_of(forest: Forest) -> tuple[torch.Size, ...]:
    return tuple(getattr(forest, name).shape for name in TABLES)


def numbers_of(forest: Forest, chance: SeededChance) -> list[Tensor]:
    """What a program splits up again: seeds and roots, then the tables."""
    return [chance.seeds, chance.roots, forest.tokens, forest.parents, forest.depths, forest.numbers]


class Places(NamedTuple):
    """Where a graph reads its inputs."""

    numbers: Tensor
    """one after the other, so that one launch brings them all"""
    logits: Tensor
    q: Tensor


class Recording:
    """One captured graph with the places that it reads."""

    def __init__(self, program: Program, places: Places, compile: bool, warmups: int) -> None:
        self.places = places
        run: Any = trace(program, places)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side), torch.no_grad():
            if compile:
                run = compiled_or_not(run, places)
            for _ in range(warmups):
                run(*places)
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(self._graph):
            self._found: Tensor = run(*places)

    def __call__(self, numbers: list[Tensor], logits: Tensor, q: Tensor) -> Tensor:
        bring(logits, self.places.logits)  # long copies first: what follows is launched while they run
        rows = min(q.shape[1], self.places.q.shape[1])  # nobody reads the rows of leaves
        bring(q[:, :rows], self.places.q[:, :rows])
        packed(numbers, self.places.numbers)
        self._graph.replay()
        return self._found


def bring(values: Tensor, place: Tensor) -> None:
    """Copy values to their place, unless it is there that they were written."""
    if values.data_ptr() != place.data_ptr():
        place.copy_(values)


def packed(numbers: list[Tensor], place: Tensor | None = None) -> Tensor:
    """All tables as one flat tensor."""
    return torch.cat([table.reshape(-1) for table in numbers], out=place)


def compiled_or_not(run: torch.fx.GraphModule, places: Places) -> Any:
    """The compiled program; where the compiler fails, the program as it is, which is slower and no less right.

    Places in tables are not checked for every token that is read there: no verifier reads beyond them, and uncompiled
    every one of them is checked.
    """
    fused = torch.compile(run, fullgraph=True, dynamic=False, options={"assert_indirect_indexing": False})
    try:
        fused(*places)
    except Exception as error:
        logging.getLogger(__name__).warning("A verdict is captured uncompiled: %s", str(error).splitlines()[0])
        return run
    return fused


def trace(program: Program, inputs: Places) -> torch.fx.GraphModule:
    """The operations that a program of tensors performs, whatever Python it is written in."""
    from torch.fx.experimental.proxy_tensor import make_fx

    with torch.no_grad():
        return work_out_once(make_fx(program)(*inputs))


def work_out_once(graph: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Let numbers that whole rows depend on be values in memory: all that float64 rounded to the rows' own type.

    The compiler would carry their formula into the loop over a row, and divide in float64 for every token. What is
    looked at by its strides has to lie somewhere.
    """
    for node in graph.graph.find_nodes(op="call_function", target=torch.ops.aten._to_copy.default):
        found, before = node.meta["val"], node.args[0].meta["val"]
        if (before.dtype, found.dtype) == (torch.float64, torch.float32):
            with graph.graph.inserting_after(node):
                kept = graph.graph.call_function(torch.ops.aten.as_strided.default, (node, found.shape, found.stride()))
            node.replace_all_uses_with(kept, delete_user_cb=lambda user, kept=kept: user is not kept)
    graph.recompile()
    return graph
