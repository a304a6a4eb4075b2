"""What inputs of a pass take from the device: nodes that were drafted there, and how far verdicts have moved texts."""

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
    """Without the host, bring the tokens (batch, nodes) and the shapes of so many trees that were `drafted` and `laid`
    on the device, and move everything behind the verdicts that come before."""
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
    """Write tokens but for the roots, which the host or a verdict knows, and depths and ancestors of laid trees."""
    inputs.tokens[:batch, 1 : drafted.shape[1]] = drafted[:, 1:]
    if laid is not None:
        nodes, words = laid.ancestor_bits.shape[1:]
        inputs.depths[:batch, :nodes] = laid.depths
        inputs.key_depths[:batch, :nodes] = laid.depths
        inputs.ancestor_bits[:batch, :nodes, :words] = laid.ancestor_bits
        torch.add(inputs.lengths[:batch, None], inputs.depths[:batch], out=inputs.positions[:batch])


def move_behind(inputs: PassInputs, batch: int, after: Verdicts) -> None:
    """Move texts behind the nodes that verdicts kept; the token that follows each path is the new root."""
    kept = (after.paths[:batch] >= 0).sum(dim=1).to(inputs.lengths.dtype)
    inputs.lengths[:batch] += kept
    inputs.starts[:batch] += kept
    inputs.positions[:batch] += kept[:, None]
    inputs.tokens[:batch, 0] = after.tokens[:batch]
