"""Inputs of a pass that stands behind a verdict take from the device what the host does not know yet."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from branchwise.core.rows import words_for
from branchwise.core.tree import DeviceShape
from branchwise.cuda.advance import advance_inputs
from branchwise.cuda.inputs import PassInputs, Size
from branchwise.verify import Verdicts
from tests.hopper import Compiled, as_on_hopper, compiled_by, interpreted

TEXTS, STEPS = 3, 4


def test_inputs_step_on_behind_what_was_accepted() -> None:
    inputs = PassInputs(Size(2, 3, 1), torch.device("cpu"))
    places = inputs.tokens, inputs.positions, inputs.lengths, inputs.starts
    for place, value in zip(places, (9, 20, 20, 22), strict=True):
        place.fill_(value)
    after = Verdicts(torch.tensor([[0, 2, -1], [0, -1, -1]]), torch.tensor([41, 42]))
    advance_inputs(inputs, 2, None, None, after)
    assert inputs.lengths.tolist() == [22, 21]
    assert inputs.starts.tolist() == [24, 23]
    assert inputs.positions.tolist() == [[22] * 3, [21] * 3]
    assert inputs.tokens.tolist() == [[41, 9, 9], [42, 9, 9]]


def test_nodes_from_the_device_are_brought_and_moved() -> None:
    inputs = PassInputs(Size(1, 3, 1), torch.device("cpu"))
    inputs.lengths.fill_(20)
    inputs.starts.fill_(20)
    bits = torch.tensor([[[1], [3], [7]]], dtype=torch.int32)
    shape = DeviceShape(torch.tensor([[-1, 0, 1]]), torch.tensor([[0, 1, 2]]), bits)
    after = Verdicts(torch.tensor([[0, 2, -1]]), torch.tensor([41]))
    advance_inputs(inputs, 1, torch.tensor([[0, 7, 8]]), shape, after)
    assert inputs.tokens.tolist() == inputs.drafted.tolist() == [[41, 7, 8]]
    assert inputs.positions.tolist() == [[22, 23, 24]]
    assert (inputs.lengths.tolist(), inputs.starts.tolist()) == ([22], [22])
    assert inputs.depths.tolist() == [[0, 1, 2]]
    assert inputs.key_depths[0, :3].tolist() == [0, 1, 2]
    assert inputs.ancestor_bits.tolist() == [[[1], [3], [7]]]


def filled(rng: torch.Generator, nodes: int) -> PassInputs:
    """Inputs of a pass as some pass before left them; of their rows one pads the batch."""
    inputs = PassInputs(Size(TEXTS + 1, nodes, words_for(nodes)), torch.device("cpu"))
    for place in (inputs.tokens, inputs.depths, inputs.key_depths, inputs.ancestor_bits, inputs.lengths, inputs.starts):
        place.copy_(torch.randint(50, place.shape, generator=rng))
    inputs.positions.copy_(inputs.lengths[:, None] + inputs.depths)
    inputs.drafted.copy_(torch.randint(50, inputs.drafted.shape, generator=rng))
    return inputs


def parts_of(inputs: PassInputs) -> dict[str, Tensor]:
    return {name: part for name, part in vars(inputs).items() if isinstance(part, Tensor)}


@interpreted
@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize("nodes", [1, 5, 40])
@pytest.mark.parametrize("moves", [True, False])
@pytest.mark.parametrize("brings", ["nothing", "tokens", "trees"])
def test_a_kernel_does_the_same_at_once(brings: str, nodes: int, moves: bool) -> None:
    advance_kernel = pytest.importorskip("branchwise.cuda.advance_kernel", reason="needs Triton's interpreter")
    rng = torch.Generator().manual_seed(nodes)
    pair = [filled(torch.Generator().manual_seed(7), nodes) for _ in range(2)]
    shorter = max(1, nodes - 2)
    drafted = torch.randint(50, (TEXTS, shorter), generator=rng) if brings != "nothing" else None
    depths, bits = (
        torch.randint(9, (TEXTS, shorter), generator=rng),
        torch.randint(99, (TEXTS, shorter, words_for(shorter)), generator=rng, dtype=torch.int32),
    )
    laid = DeviceShape(depths, depths, bits) if brings == "trees" else None
    rows = torch.randint(-1, nodes, (TEXTS + 1, STEPS + 1), generator=rng)  # a verdict may be of a padded batch
    after = Verdicts(rows[:, :STEPS], rows[:, STEPS].abs()) if moves else None
    advance_inputs(pair[0], TEXTS, drafted, laid, after)
    if drafted is not None or moves:
        advance_kernel.advance(pair[1], TEXTS, drafted, laid, after)
    wanted, found = map(parts_of, pair)
    assert wanted.keys() == found.keys() >= {"tokens", "positions", "lengths", "starts", "ancestor_bits", "drafted"}
    for name in wanted:
        assert torch.equal(wanted[name], found[name]), name


def compile_all() -> None:
    """Call the launcher with a kernel that is compiled and not run."""
    from branchwise.cuda import advance_kernel

    advance_kernel._advance = Compiled(advance_kernel._advance)
    vars(advance_kernel)["early"] = as_on_hopper
    inputs, rows = filled(torch.Generator(), 40), torch.zeros(TEXTS, STEPS + 1, dtype=torch.long)
    depths, bits = torch.zeros(TEXTS, 40, dtype=torch.long), torch.zeros(TEXTS, 40, 2, dtype=torch.int32)
    after = Verdicts(rows[:, :STEPS], rows[:, STEPS])
    advance_kernel.advance(inputs, TEXTS, depths, DeviceShape(depths, depths, bits), after)
    advance_kernel.advance(inputs, TEXTS, None, None, after)


@interpreted
def test_the_kernel_compiles_for_a_device(tmp_path: Path) -> None:
    assert compiled_by(__name__, tmp_path) == ["_advance"] * 2
