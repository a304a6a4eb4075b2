"""A verdict as one CUDA graph.

A verifier on a device is a few hundred small kernels, and launching them costs more than running them. It never looks
at a drawn value, so its operations can be recorded once for a shape (`make_fx`), fused by the compiler, captured into a
graph and replayed on new values. The rule itself stays where it is, in the verifier's own file.
"""

from __future__ import annotations

import copy
import logging
from collections.abc import Callable
from typing import Any

import torch
from torch import Tensor

from branchwise.chance import SeededChance
from branchwise.laws import ModelLaws
from branchwise.tree import Draw, Forest
from branchwise.verify import Verdicts, Verifier

TABLES = ("tokens", "parents", "depths", "lengths", "paths", "children", "levels", "postorder", "forks")
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
        tables = [getattr(forest, name) for name in TABLES]
        inputs = [*tables, laws.logits, chance.seeds, chance.roots, forest.q]
        key = (
            *(table.shape for table in tables),
            laws.logits.shape,
            laws.logits.dtype,
            forest.q.dtype,
            *forest.widths,
            laws.shape,
        )
        if key not in self._graphs:
            places = [tensor.clone() for tensor in inputs]
            places[-1] = forest.q.new_zeros(len(forest), forest.nodes, forest.q.shape[2])  # whatever rows will come
            self._graphs[key] = Recording(self._program(forest, laws), places, self._compile, self._warmups)
        return Verdicts(*self._graphs[key](inputs))

    def _program(self, forest: Forest, laws: ModelLaws) -> Callable[..., tuple[Tensor, Tensor]]:
        """The verifier as a function of tensors alone."""

        def program(*inputs: Tensor) -> tuple[Tensor, Tensor]:
            *tables, logits, seeds, roots, q = inputs
            same = copy.copy(forest)
            same.__dict__.update(zip(TABLES, tables, strict=True), q=q)
            found = self.verifier(same, laws.over(logits, same), SeededChance(seeds, roots))
            return found.paths, found.tokens

        return program


class Recording:
    """One captured graph with the places that its inputs are copied to."""

    def __init__(self, program: Callable[..., Any], places: list[Tensor], compile: bool, warmups: int) -> None:
        self._places = places
        run: Any = trace(program, self._places)
        side = torch.cuda.Stream()
        side.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(side), torch.no_grad():
            if compile:
                run = compiled_or_not(run, self._places)
            for _ in range(warmups):
                run(*self._places)
        torch.cuda.current_stream().wait_stream(side)
        self._graph = torch.cuda.CUDAGraph()
        with torch.no_grad(), torch.cuda.graph(self._graph):
            self._found = run(*self._places)

    def __call__(self, inputs: list[Tensor]) -> tuple[Tensor, Tensor]:
        *places, q = self._places
        torch._foreach_copy_(places, inputs[:-1])
        q[:, : inputs[-1].shape[1]].copy_(inputs[-1])
        self._graph.replay()
        paths, tokens = self._found
        return paths, tokens


def compiled_or_not(run: torch.fx.GraphModule, places: list[Tensor]) -> Any:
    """The compiled program; where the compiler fails, the program as it is, which is slower and no less right."""
    fused = torch.compile(run, fullgraph=True, dynamic=False)
    try:
        fused(*places)
    except Exception as error:
        logging.getLogger(__name__).warning("A verdict is captured uncompiled: %s", str(error).splitlines()[0])
        return run
    return fused


def trace(program: Callable[..., Any], inputs: list[Tensor]) -> torch.fx.GraphModule:
    """The operations that a program of tensors performs, whatever Python it is written in."""
    from torch.fx.experimental.proxy_tensor import make_fx

    with torch.no_grad():
        return make_fx(program)(*inputs)
