"""The network of a head in training: what a row may see, and that it computes what drafting computes."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from branchwise.draft.head.network import Head, HeadConfig
from branchwise.train.head.unroll import unroll, visible

WIDTH, ROWS, DEPTH = 24, 9, 4
FORMS = {
    "eagle": {},
    "two layers": {"layers": 2},
    "carry": {"carry": True},
    "low gate": {"gate": "low"},
    "fspad": {"carry": True, "gate": "full"},
    "parallel": {"masks": 5},
    "parallel with bias": {"masks": 5, "bias": 4, "layers": 2},
}


def head_of(form: str, taps: int = 2) -> Head:
    torch.manual_seed(0)
    sizes = {
        "width": WIDTH,
        "taps": tuple(map(str, range(taps))),
        "heads": 4,
        "kv_heads": 2,
        "head_width": 6,
        "mlp": 32,
    }
    head = Head(HeadConfig(**sizes, **FORMS[form]), 1 / 100 ** (torch.arange(3) / 3)).double()
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return head


def inputs(seed: int = 1) -> tuple[list[Tensor], Tensor]:
    rng = torch.Generator().manual_seed(seed)
    states = [torch.randn(2, ROWS, WIDTH, generator=rng, dtype=torch.float64) for _ in range(2)]
    return states, torch.randn(2, ROWS, WIDTH, generator=rng, dtype=torch.float64)


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize("window", [None, 3])
def test_no_row_sees_what_comes_after_its_anchor(form: str, window: int | None) -> None:
    """Hidden states after the anchor, and tokens after the row's own, move nothing; those before them do."""
    head = head_of(form)
    states, tokens = inputs()
    before = unroll(head, head.features(states), tokens, DEPTH, window)
    assert len(before) == DEPTH
    for place in range(ROWS):
        moved = [state.clone() for state in states]
        moved[1][:, place] += 1
        after = unroll(head, head.features(moved), tokens, DEPTH, window)
        other = tokens.clone()
        other[:, place] -= 1
        spoken = unroll(head, head.features(states), other, DEPTH, window)
        for depth in range(DEPTH):
            changed = (after[depth] - before[depth]).abs().amax(dim=(0, 2)) > 1e-12
            heard = (spoken[depth] - before[depth]).abs().amax(dim=(0, 2)) > 1e-12
            # The first rows of a depth have no anchor, and are not trained on.
            for row in range(depth, ROWS):
                assert not changed[row] or place <= row - depth, f"depth {depth}: row {row} sees states of {place}"
                last = row - depth if head.config.masks else row  # a mask stands for a token that is not known
                assert not heard[row] or place <= last, f"depth {depth}: row {row} sees the token behind {place}"
                if window is None:
                    assert changed[row] == (place <= row - depth)
                    assert heard[row] == (place <= last)


def test_a_row_sees_its_own_branch_and_no_other() -> None:
    rows, depths = torch.arange(6).repeat(3), torch.arange(3).repeat_interleave(6)
    seen = visible(rows, depths, rows, depths)
    for query, (row, depth) in enumerate(zip(rows.tolist(), depths.tolist(), strict=True)):
        keys = {(int(rows[key]), int(depths[key])) for key in seen[query].nonzero().flatten()}
        anchor = row - depth
        assert keys == {(place, 0) for place in range(anchor + 1)} | {
            (anchor + j, j) for j in range(1, depth + 1) if 0 <= anchor + j < 6
        }
