"""Trees that know the target's draws hold more of them, and change none."""

from __future__ import annotations

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from branchwise.core.rng import SeededChance
from branchwise.core.rows import BLOCK
from branchwise.core.sampling import SamplingParams
from branchwise.core.sequence import SequenceState
from branchwise.draft.auto import AutoDrafter
from branchwise.draft.foresight import foreseen_probs, keys_behind
from branchwise.draft.noisy_target import NoisyTarget
from branchwise.draft.policies.topk import TopK
from branchwise.engine import Engine, Request
from branchwise.testing import ToyTarget
from branchwise.verify import VERIFIERS


@given(st.integers(0, 1 << 40), st.sampled_from([7, BLOCK, BLOCK + 1, 3 * BLOCK + 50]), st.integers(1, 30))
def test_what_a_race_draws_is_the_likeliest_of_its_block_which_is_the_likeliest(
    seed: int, vocabulary: int, length: int
) -> None:
    """If a draft is right about all probabilities, whatever the seed, the position and the size of a vocabulary."""
    rng = torch.Generator().manual_seed(seed)
    sequence = SequenceState([0] * length, SamplingParams(temperature=1.0, seed=seed))
    probs, depths = (3 * torch.randn(5, vocabulary, generator=rng)).softmax(dim=-1), [0, 1, 1, 2, 5]
    chance = SeededChance(torch.tensor([sequence.rng_seed]), torch.tensor([length - 1]))
    drawn = chance.tokens(probs[None], torch.tensor([depths]))[0]
    chances = foreseen_probs(probs, keys_behind(sequence, depths))
    torch.testing.assert_close(chances.sum(dim=-1), torch.ones(5), rtol=1e-4, atol=1e-4)
    blocks = torch.arange(vocabulary) // BLOCK
    for row, token in zip(chances, drawn, strict=True):
        of_blocks = torch.zeros(int(blocks[-1]) + 1).index_add(0, blocks, row)
        assert of_blocks.argmax() == token // BLOCK
        assert row[token] == row[blocks == token // BLOCK].max()


def written(drafter: NoisyTarget, temperature: float, *, foresees: bool) -> tuple[list[list[int]], int]:
    """Texts, and in how many steps they were written."""
    engine = Engine(ToyTarget(vocabulary=40), drafter, VERIFIERS.build("match"))
    assert drafter.foresees
    drafter.let_foresee(foresees)
    texts = [
        engine.submit(Request((1, 2, 3), SamplingParams(temperature=temperature, seed=seed), 24)) for seed in range(8)
    ]
    while engine.busy:
        engine.step()
    return [text.token_ids for text in texts], sum(text.stats.steps for text in texts)


@pytest.mark.parametrize("sigma", [0.0, 0.5])
def test_trees_that_know_the_draws_hold_more_of_them(sigma: float) -> None:
    tree = TopK(4, depth=4, width=2)
    texts, steps = written(NoisyTarget(sigma, tree=tree), 1.0, foresees=False)
    same, fewer = written(NoisyTarget(sigma, tree=tree), 1.0, foresees=True)
    assert same == texts
    assert fewer < 0.75 * steps


def test_a_greedy_text_draws_nothing_that_could_be_known() -> None:
    tree = TopK(4, depth=4, width=2)
    assert written(NoisyTarget(1.0, tree=tree), 0.0, foresees=True) == written(
        NoisyTarget(1.0, tree=tree), 0.0, foresees=False
    )


def test_no_rule_but_match_lets_a_draft_look_at_its_noise() -> None:
    drafter = NoisyTarget(tree=TopK(4))
    Engine(ToyTarget(), drafter, VERIFIERS.build("match"))
    assert drafter.foresees
    drawn = NoisyTarget()  # paths
    for rule in ("match", "block", "token"):
        Engine(ToyTarget(), drawn, VERIFIERS.build(rule))
        assert drawn.foresees == (rule == "match")


def test_the_sources_of_auto_are_told() -> None:
    drafter = AutoDrafter()
    Engine(ToyTarget(), drafter, VERIFIERS.build("match"))
    assert drafter.memories.foresees
    drafter.let_foresee(False)
    assert not drafter.memories.foresees
