"""`cuda.advance` as one Triton kernel, because as torch operations it would be a dozen launches in every step.

Without a CUDA device only tests import this file.
"""

# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator, no-untyped-def"

from __future__ import annotations

import triton
import triton.language as tl
from torch import Tensor

from branchwise.core.tree import DeviceShape
from branchwise.cuda.early import begin, early
from branchwise.cuda.inputs import PassInputs
from branchwise.verify import Verdicts

USUAL = 128
"""the usual block size of nodes and steps; larger trees have a larger one"""


def advance(
    inputs: PassInputs, batch: int, drafted: Tensor | None, laid: DeviceShape | None, after: Verdicts | None
) -> None:
    """Does what `cuda.advance.advance_inputs` says. Arguments that are None become tensors without columns, so that one
    program serves all cases."""
    tokens, known = inputs.tokens, inputs.drafted
    brought = known[:, :0] if drafted is None else drafted
    depths = known[:, :0] if laid is None else laid.depths
    bits = inputs.ancestor_bits if laid is None else laid.ancestor_bits
    paths, following = (known[:, :0], known) if after is None else (after.paths, after.tokens)
    assert brought.stride(1) == depths.stride(1) == paths.stride(1) == 1, "a node must lie beside the next"
    assert bits.is_contiguous(), "ancestors must be whole"
    nodes, columns, words = tokens.shape[1], inputs.key_depths.shape[1], inputs.ancestor_bits.shape[2]
    _advance[(batch,)](
        paths, following, brought, depths, bits, tokens, inputs.positions, inputs.lengths, inputs.starts,
        inputs.depths, inputs.key_depths, inputs.ancestor_bits, known,
        paths.stride(0), following.stride(0), brought.stride(0), depths.stride(0),
        paths.shape[1], brought.shape[1], depths.shape[1], nodes, columns, bits.shape[2], words,
        block_steps=max(USUAL, triton.next_power_of_2(paths.shape[1])),
        block_nodes=max(USUAL, triton.next_power_of_2(nodes)), num_warps=1, **early(tokens.device),
    )  # fmt: skip


NAMES = (
    "paths", "following", "drafted", "laid_depths", "laid_bits", "tokens", "positions", "lengths", "starts", "depths",
    "key_depths", "ancestor_bits", "known",
)  # fmt: skip
SIZES = (
    "stride_path", "stride_following", "stride_drafted", "stride_depth", "steps", "drafted_nodes", "laid_nodes",
    "nodes", "columns", "laid_words", "words",
)  # fmt: skip


@triton.jit(do_not_specialize=SIZES, do_not_specialize_on_alignment=NAMES)
def _advance(
    paths, following, drafted, laid_depths, laid_bits,
    tokens, positions, lengths, starts, depths, key_depths, ancestor_bits, known,
    stride_path, stride_following, stride_drafted, stride_depth,
    steps, drafted_nodes, laid_nodes, nodes, columns, laid_words, words,
    block_steps: tl.constexpr, block_nodes: tl.constexpr, early: tl.constexpr,
):  # fmt: skip
    begin(early)
    text = tl.program_id(0)
    node, step = tl.arange(0, block_nodes), tl.arange(0, block_steps)
    inside, line = node < nodes, text * nodes + node
    length, start = tl.load(lengths + text), tl.load(starts + text)
    path = tl.load(paths + text * stride_path + step, mask=step < steps, other=-1)
    kept = tl.sum((path >= 0).to(tl.int32), axis=0)
    token = tl.load(tokens + line, mask=inside, other=0)
    mine = (node > 0) & (node < drafted_nodes)
    token = tl.where(mine, tl.load(drafted + text * stride_drafted + node, mask=mine, other=0).to(tl.int32), token)
    if steps > 0:
        token = tl.where(node == 0, tl.load(following + text * stride_following).to(tl.int32), token)
    laid = node < laid_nodes
    depth = tl.load(depths + line, mask=inside, other=0)
    depth = tl.where(laid, tl.load(laid_depths + text * stride_depth + node, mask=laid, other=0).to(tl.int32), depth)
    tl.store(depths + line, depth, mask=laid)
    tl.store(key_depths + text * columns + node, depth, mask=laid)
    if laid_nodes > 0:
        for word in range(laid_words):
            marks = tl.load(laid_bits + (text * laid_nodes + node) * laid_words + word, mask=laid, other=0)
            tl.store(ancestor_bits + line * words + word, marks, mask=laid)
    tl.debug_barrier()  # every thread must have read before any writes
    tl.store(tokens + line, token, mask=inside)
    tl.store(positions + line, length + kept + depth, mask=inside)
    tl.store(lengths + text, length + kept)
    tl.store(starts + text, start + kept)
    if drafted_nodes > 0:
        tl.store(known + line, token.to(tl.int64), mask=inside)
