"""The network of a head in training: what a row may see, and that it computes what drafting computes."""

from __future__ import annotations

import random

import pytest
import torch
from torch import Tensor

from branchwise.backends.base import CachedRows
from branchwise.draft.head.network import Head, HeadConfig
from branchwise.train.head.cross import moved_keys, moved_positions
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
    "window": {"window": 2, "layers": 2},
    "cross": {"cross": "model.layers.2", "carry": True},
    "longspec": {"cross": "model.layers.2", "window": 5, "taps": ()},
    "longspec with states": {"cross": "model.layers.2", "window": 8, "layers": 2},
    "parallel longspec": {"cross": "model.layers.2", "window": 4, "masks": 5},
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
    head = Head(HeadConfig(**sizes | FORMS[form]), 1 / 100 ** (torch.arange(3) / 3)).double()
    for parameter in head.parameters():
        torch.nn.init.normal_(parameter, std=0.4)
    return head


def inputs(seed: int = 1) -> tuple[list[Tensor], Tensor, CachedRows]:
    """Hidden states, embeddings, and keys and values of a target."""
    rng = torch.Generator().manual_seed(seed)
    states = [torch.randn(2, ROWS, WIDTH, generator=rng, dtype=torch.float64) for _ in range(2)]
    tokens = torch.randn(2, ROWS, WIDTH, generator=rng, dtype=torch.float64)
    return states, tokens, CachedRows(*torch.randn(2, 2, 2, ROWS, 6, generator=rng, dtype=torch.float64))


@pytest.mark.parametrize("form", FORMS)
def test_no_row_sees_what_comes_after_its_anchor(form: str) -> None:
    """Hidden states, keys and values after the anchor, and tokens after the row's own, move nothing; those before them
    do, in a window those that lie in it."""
    head = head_of(form)
    states, tokens, cached = inputs()
    reach = head.config.layers * (head.config.window - 1) if head.config.window else ROWS

    def predicted(states: list[Tensor], tokens: Tensor, cached: CachedRows) -> list[Tensor]:
        return unroll(head, head.features(states), tokens, DEPTH, cached if head.config.cross else None)

    before = predicted(states, tokens, cached)
    assert len(before) == DEPTH
    for place in range(ROWS):
        moved = [state.clone() for state in states]
        moved[1][:, place] += 1
        other = tokens.clone()
        other[:, place] -= 1
        keys, values = cached.keys.clone(), cached.values.clone()
        keys[:, :, place] += 1
        values[:, :, place] += 1
        after = predicted(moved, tokens, cached)
        spoken = predicted(states, other, cached)
        turned = predicted(states, tokens, cached._replace(keys=keys))
        looked = predicted(states, tokens, cached._replace(values=values))
        for depth in range(DEPTH):

            def differs(found: list[Tensor], depth: int = depth) -> list[bool]:
                apart: list[bool] = ((found[depth] - before[depth]).abs().amax(dim=(0, 2)) > 1e-12).tolist()
                return apart

            changed, heard, by_keys, by_values = map(differs, (after, spoken, turned, looked))
            # The first rows of a depth have no anchor, and are not trained on.
            for row in range(depth, ROWS):
                anchor = row - depth
                last = anchor if head.config.masks else row  # a mask stands for a token that is not known
                assert not changed[row] or place <= anchor, f"depth {depth}: row {row} sees states of {place}"
                assert not heard[row] or place <= last, f"depth {depth}: row {row} sees the token behind {place}"
                if not head.config.window:
                    assert changed[row] == (place <= anchor)
                    assert heard[row] == (place <= last)
                elif not head.config.carry and head.config.masks + depth == 0:
                    assert heard[row] == (row - reach <= place <= row)
                shown = bool(head.config.cross) and place <= anchor
                assert by_values[row] == shown
                assert by_keys[row] == (shown and anchor > 0), "a single key has all the weight, whatever it is"


def test_a_row_sees_its_own_branch_and_no_other() -> None:
    rows, depths = torch.arange(6).repeat(3), torch.arange(3).repeat_interleave(6)
    seen = visible(rows, depths, rows, depths)
    for query, (row, depth) in enumerate(zip(rows.tolist(), depths.tolist(), strict=True)):
        keys = {(int(rows[key]), int(depths[key])) for key in seen[query].nonzero().flatten()}
        anchor = row - depth
        assert keys == {(place, 0) for place in range(anchor + 1)} | {
            (anchor + j, j) for j in range(1, depth + 1) if 0 <= anchor + j < 6
        }


@pytest.mark.parametrize("form", ["cross", "longspec", "longspec with states"])
def test_a_text_that_is_moved_as_a_whole_is_predicted_as_before(form: str) -> None:
    """Only distances count, so that where a text stands teaches a head nothing but the distance to its anchors."""
    head = head_of(form)
    states, tokens, cached = inputs()
    positions = torch.arange(ROWS) + 5000
    plain = unroll(head, head.features(states), tokens, DEPTH, cached)
    moved = moved_keys(cached, positions, head.frequencies)
    found = unroll(head, head.features(states), tokens, DEPTH, moved, positions)
    torch.testing.assert_close(found, plain, atol=1e-9, rtol=1e-9)
    positions[:3] -= 5000
    jumped = unroll(
        head, head.features(states), tokens, DEPTH, moved_keys(cached, positions, head.frequencies), positions
    )
    assert bool(((jumped[0] - plain[0])[:, 4:].abs() > 1e-3).any())


def test_positions_are_moved_behind_a_few_anchors() -> None:
    rng = random.Random(0)
    jumps = set()
    for _ in range(200):
        positions = moved_positions(20, 1000, rng)
        steps = positions.diff()
        assert int(positions[-1]) < 1000
        assert int(positions[0]) == 0 or bool((steps == 1).all())
        jumps |= {place + 1 for place, step in enumerate(steps.tolist()) if step > 1}
    assert jumps == {1, 2, 3, 4}
    assert moved_positions(20, 10, rng).tolist() == list(range(20))  # a text that fills the context stays
