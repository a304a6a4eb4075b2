"""The inputs of a pass that are computed on the device: drafted nodes, and the lengths of texts after verdicts."""

from __future__ import annotations

import torch
from torch import Tensor

from branchwise.core.tree import DeviceShape
from branchwise.cuda.graphs import have_kernels, on
from branchwise.cuda.inputs import PassInputs
from branchwise.verify import Verdicts


def advance_inputs(
    inputs: PassInputs, batch: int, drafted: Tensor | None, laid: DeviceShape | None, after: Verdicts | None
) -> None:
    """Complete the inputs of a pass over `batch` trees on the device, without the host: copy the tokens `drafted`
    (batch, nodes) and the tree shapes `laid` there, and advance all texts past the previous verdicts `after`."""
    if drafted is None and after is None:
        return
    if have_kernels(inputs.tokens.device):
        from branchwise.cuda.advance_kernel import advance

        with on(inputs.tokens.device):
            advance(inputs, batch, drafted, laid, after)
        return
    if drafted is not None:
        bring_nodes(inputs, batch, drafted, laid)
    if after is not None:
        move_behind(inputs, batch, after)
    if drafted is not None:
        inputs.drafted[:batch] = inputs.tokens[:batch]


def bring_nodes(inputs: PassInputs, batch: int, drafted: Tensor, laid: DeviceShape | None) -> None:
    """Write all tokens but the roots, which come from the host or a verdict, and the depths and ancestors of trees that
    were laid out on the device."""
    inputs.tokens[:batch, 1 : drafted.shape[1]] = drafted[:, 1:]
    if laid is not None:
        nodes, words = laid.ancestor_bits.shape[1:]
        inputs.depths[:batch, :nodes] = laid.depths
        inputs.key_depths[:batch, :nodes] = laid.depths
        inputs.ancestor_bits[:batch, :nodes, :words] = laid.ancestor_bits
        torch.add(inputs.lengths[:batch, None], inputs.depths[:batch], out=inputs.positions[:batch])


def move_behind(inputs: PassInputs, batch: int, after: Verdicts) -> None:
    """Advance texts past the accepted nodes; the token after each accepted path is the new root."""
    kept = (after.paths[:batch] >= 0).sum(dim=1).to(inputs.lengths.dtype)
    inputs.lengths[:batch] += kept
    inputs.starts[:batch] += kept
    inputs.positions[:batch] += kept[:, None]
    inputs.tokens[:batch, 0] = after.tokens[:batch]
