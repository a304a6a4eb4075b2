"""What inputs of a pass take from the device: nodes that were drafted there, and how far verdicts have moved texts."""

from __future__ import annotations

from contextlib import AbstractContextManager

import torch
from torch import Tensor

from branchwise.core.tree import DeviceShape
from branchwise.cuda.graphs import GraphedFunction, restored
from branchwise.cuda.inputs import PassInputs
from branchwise.verify import Verdicts


class InputMover:
    """Moves inputs without the host, in as few launches as can be: these take longer than what is launched."""

    def __init__(self, device: torch.device, *, capture: bool) -> None:
        self._device = device
        self._moves: dict[int, Tensor] = {}
        """by the size of a batch: a place for what verdicts say of it"""
        self._note = GraphedFunction(note_moves, device, capture=capture)
        self._advance = GraphedFunction(advance_inputs, device, still=inputs_restored, capture=capture)
        self._bring_and_advance = GraphedFunction(bring_and_advance, device, still=brought_restored, capture=capture)

    def __call__(
        self,
        inputs: PassInputs,
        batch: int,
        drafted: Tensor | None,
        laid: DeviceShape | None,
        after: Verdicts | None,
        *,
        still: bool,
    ) -> None:
        """Bring tokens (batch, nodes) and shapes that were `drafted` and `laid` on the device, and move everything
        behind the verdicts that come before. `still`: they lie at the same place at every step."""
        tokens, positions, lengths, *shapes = inputs.places(batch)
        starts, known = inputs.starts[:batch], inputs.drafted[:batch]
        moves = None if after is None else self._noted(after)
        if drafted is None:
            if moves is not None:
                self._advance(tokens, positions, lengths, starts, moves)
            return
        nodes = [drafted] if laid is None else [drafted, laid.depths, laid.ancestor_bits]
        if laid is not None and moves is not None and still:
            places = tokens, positions, lengths, starts, known, *shapes
            self._bring_and_advance(*places, moves, *nodes)
            return
        bring_nodes(tokens, positions, lengths, *shapes, *nodes)
        if moves is not None:
            self._advance(tokens, positions, lengths, starts, moves)
        known.copy_(tokens)

    def _noted(self, after: Verdicts) -> Tensor:
        """What verdicts say of the next inputs, always at the same place: these are recorded for it, whatever the size
        of the trees that the verdicts are about."""
        batch = len(after.tokens)
        if batch not in self._moves:
            self._moves[batch] = torch.zeros(batch, 2, dtype=torch.int64, device=self._device)
        self._note(self._moves[batch], after.paths, after.tokens)
        return self._moves[batch]


def note_moves(moves: Tensor, paths: Tensor, following: Tensor) -> None:
    """Write (batch, 2): how many nodes accepted paths (batch, steps) have, which are padded with -1, and the token that
    follows each, the new root."""
    moves[:, 0] = (paths >= 0).sum(dim=1)
    moves[:, 1] = following


def bring_nodes(
    tokens: Tensor,
    positions: Tensor,
    lengths: Tensor,
    depths: Tensor,
    key_depths: Tensor,
    ancestor_bits: Tensor,
    drafted: Tensor,
    *laid: Tensor,
) -> None:
    """Write to inputs of a pass, (batch, …) each, tokens (batch, nodes) that were drafted on the device, but for the
    roots, and depths and ancestors of trees that were laid there."""
    tokens[:, 1 : drafted.shape[1]] = drafted[:, 1:]
    if laid:
        new_depths, bits = laid
        nodes = new_depths.shape[1]
        depths[:, :nodes] = new_depths
        key_depths[:, :nodes] = new_depths
        ancestor_bits[:, :nodes, : bits.shape[2]] = bits
        torch.add(lengths[:, None], depths, out=positions)


def bring_and_advance(
    tokens: Tensor,
    positions: Tensor,
    lengths: Tensor,
    starts: Tensor,
    known: Tensor,
    depths: Tensor,
    key_depths: Tensor,
    ancestor_bits: Tensor,
    moves: Tensor,
    *drafted: Tensor,
) -> None:
    """`bring_nodes` and `advance_inputs` at once: launching takes longer than what is launched. What verifiers are to
    know of the tokens is written to `known`."""
    bring_nodes(tokens, positions, lengths, depths, key_depths, ancestor_bits, *drafted)
    advance_inputs(tokens, positions, lengths, starts, moves)
    known.copy_(tokens)


def advance_inputs(tokens: Tensor, positions: Tensor, lengths: Tensor, starts: Tensor, moves: Tensor) -> None:
    """Move the inputs of a pass, (batch, nodes) and (batch,), behind what verdicts kept (`note_moves`)."""
    kept = moves[:, 0].to(lengths.dtype)
    lengths += kept
    starts += kept
    positions += kept[:, None]
    tokens[:, 0] = moves[:, 1]


def inputs_restored(*places: Tensor) -> AbstractContextManager[None]:
    """Undo what `advance_inputs` does meanwhile."""
    return restored(*places[:4])


def brought_restored(*places: Tensor) -> AbstractContextManager[None]:
    """Undo what `bring_and_advance` does meanwhile."""
    return restored(*places[:8])
