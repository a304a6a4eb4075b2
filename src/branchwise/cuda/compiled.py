"""Tracing functions of tensors and compiling them with torch."""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor

from branchwise.errors import first_line


def compiled_or_not(run: torch.fx.GraphModule, given: Sequence[Tensor | None], what: str) -> Any:
    """The compiled program; if the compiler fails, the program itself, which is slower but equally right. Compiled code
    does not check indices into tables. They are always in range, and uncompiled code checks them all."""
    fused = torch.compile(run, fullgraph=True, dynamic=False, options={"assert_indirect_indexing": False})
    try:
        fused(*given)
    except Exception as error:
        logging.getLogger(__name__).warning("%s uncompiled: %s", what, first_line(error))
        return run
    return fused


def traced(program: Callable[..., Any], given: Sequence[Tensor | None]) -> torch.fx.GraphModule:
    """The operations that a program of tensors performs."""
    from torch.fx.experimental.proxy_tensor import make_fx

    with torch.no_grad():
        return work_out_once(make_fx(program)(*given))


def work_out_once(graph: torch.fx.GraphModule) -> torch.fx.GraphModule:
    """Force scalars of a row that are rounded from float64 to float32 into memory, by reading them with `as_strided`.
    Otherwise the compiler would inline their formula into the loop over the row, and divide in float64 for every
    token."""
    for node in graph.graph.find_nodes(op="call_function", target=torch.ops.aten._to_copy.default):
        found, before = node.meta["val"], node.args[0].meta["val"]
        if (before.dtype, found.dtype) == (torch.float64, torch.float32):
            with graph.graph.inserting_after(node):
                kept = graph.graph.call_function(torch.ops.aten.as_strided.default, (node, found.shape, found.stride()))
            node.replace_all_uses_with(kept, delete_user_cb=lambda user, kept=kept: user is not kept)
    graph.recompile()
    return graph
