"""Where random decisions come from: keys, the generator, and drawing from a distribution.

Statistical tests run on fixed keys, so they always give the same answer. `FALSE_ALARM` is how often each would
have failed for a sound generator had the keys been fresh.
"""

from __future__ import annotations

import itertools
import math
import zlib
from collections.abc import Callable

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from scipy import stats
from torch import Tensor

from branchwise.core.rng import GAMMA, SeededChance, mix, race, race_on, signed, to_uniform
from branchwise.core.rows import BLOCK
from branchwise.core.sampling import SamplingParams
from branchwise.core.sequence import SequenceState
from tests.device_twins import race_among
from tests.strategies import probs

FALSE_ALARM = 1e-4
MANY = 1 << 14
FINE = 1 << 12
"""tokens of a flat distribution: so many that equal draws are no accident"""

int64s = st.integers(-(1 << 63), (1 << 63) - 1)


def chance(seeds: list[int] | Tensor, roots: list[int] | Tensor) -> SeededChance:
    return SeededChance(torch.as_tensor(seeds), torch.as_tensor(roots))


def flat(batch: int, vocabulary: int = FINE) -> Tensor:
    return torch.full((batch, vocabulary), 1 / vocabulary)


def noise(seeds: list[int] | Tensor, roots: list[int] | Tensor, purpose: str = "pick", draw: int = 0) -> np.ndarray:
    """(batch,) the uniforms behind draws of one purpose."""
    if purpose == "coin":
        return chance(seeds, roots)._tossed(draw, 1)[:, 0].numpy()
    return to_uniform(chance(seeds, roots)._keys(purpose, torch.as_tensor(roots), draw)).numpy()


def toss(ask: SeededChance, odds: Tensor, draw: int) -> Tensor:
    """(batch,) bool: one coin."""
    return ask.first(odds[:, None], draw) == 0


# The generator


def split_mix(x: int) -> int:
    """SplitMix64's mixer in whole numbers, as published."""
    mask = (1 << 64) - 1
    x = ((x ^ (x >> 30)) * 0xBF58476D1CE4E5B9) & mask
    x = ((x ^ (x >> 27)) * 0x94D049BB133111EB) & mask
    return x ^ (x >> 31)


def test_mix_gives_the_published_numbers() -> None:
    # The first outputs of SplitMix64 from state 1234567, as listed by Rosetta Code and others.
    state = torch.tensor(1234567) + GAMMA * torch.arange(1, 6)
    assert [value % (1 << 64) for value in mix(state).tolist()] == [
        6457827717110365317,
        3203168211198807973,
        9817491932198370423,
        4593380528125082431,
        16408922859458223821,
    ]


@given(st.lists(int64s, min_size=1, max_size=20))
def test_mix_equals_whole_number_arithmetic(values: list[int]) -> None:
    expected = [signed(split_mix(value % (1 << 64))) for value in values]
    assert mix(torch.tensor(values)).tolist() == expected


@given(st.integers(-(1 << 70), 1 << 70))
def test_signed_keeps_the_64_bits(value: int) -> None:
    assert signed(value) % (1 << 64) == value % (1 << 64)
    assert -(1 << 63) <= signed(value) < 1 << 63


@given(int64s)
def test_uniforms_are_the_upper_bits_below_one(value: int) -> None:
    uniform = to_uniform(torch.tensor(value)).item()
    assert uniform == (value % (1 << 64) >> 11) / (1 << 53)
    assert 0 <= uniform < 1


# Keys


@given(st.lists(st.tuples(int64s, st.integers(0, 1 << 40)), min_size=2, max_size=6), st.integers(0, 9))
def test_a_draw_is_the_same_alone_and_in_a_batch(keys: list[tuple[int, int]], draw: int) -> None:
    seeds, roots = (list(column) for column in zip(*keys, strict=True))
    probs = flat(len(keys), 2 * BLOCK + 9)
    together = chance(seeds, roots)
    alone = [chance([seed], [root]) for seed, root in keys]
    half = torch.full((len(keys),), 0.5)
    for ask in (
        lambda c, n: c.token(probs[:n], 3),
        lambda c, n: toss(c, half[:n], draw),
        lambda c, n: c.pick(probs[:n], draw),
    ):
        assert torch.equal(ask(together, len(keys)), torch.cat([ask(one, 1) for one in alone]))


def key_by_hand(seed: int, position: int, purpose: str, draw: int) -> int:
    """In whole numbers: seed, then purpose and draw, then position, mixed after each."""
    number, draw = (draw, 0) if purpose == "coin" else (0, draw)
    stream = zlib.crc32(f"verify {purpose}".encode()) << 31 | draw
    key = split_mix((split_mix(seed % 2**64) + stream) % 2**64)
    key = split_mix((key + position * 0x9E3779B97F4A7C15) % 2**64)
    return split_mix((key + number * 0x9E3779B97F4A7C15) % 2**64) if purpose == "coin" else key


@given(int64s, st.integers(0, 1 << 40), st.sampled_from(["token", "coin", "pick"]), st.integers(0, 1 << 30))
def test_keys_are_made_as_written(seed: int, position: int, purpose: str, draw: int) -> None:
    draw %= 200 if purpose == "coin" else 1 << 31
    assert noise([seed], [position], purpose, draw)[0] == (key_by_hand(seed, position, purpose, draw) >> 11) / 2**53


def test_every_kind_of_decision_has_its_own_noise() -> None:
    seeds, roots = torch.arange(MANY), torch.full((MANY,), 30)
    ask, even = chance(seeds, roots), flat(MANY, 2)
    heads = {
        "token": chance(seeds, roots - 1).token(even, 0) == 0,  # the position that the others have as their root
        "coin": toss(ask, torch.full((MANY,), 0.5), 0),
        "pick": ask.pick(even, 0) == 0,
    }
    for one, other in itertools.combinations(heads.values(), 2):
        assert stats.binomtest(int((one == other).sum()), MANY).pvalue > FALSE_ALARM


def unmix(y: int) -> int:
    """The inverse of the mixer: whoever wants a certain noise can compute the seed that gives it."""

    def unshift(value: int, bits: int) -> int:
        found = value
        for _ in range(64 // bits):
            found = value ^ (found >> bits)
        return found

    y = unshift(y, 31) * pow(0x94D049BB133111EB, -1, 2**64) % 2**64
    y = unshift(y, 27) * pow(0xBF58476D1CE4E5B9, -1, 2**64) % 2**64
    return unshift(y, 30)


def test_a_noise_of_zero_accepts_nothing_impossible() -> None:
    # Once in 2^53 draws; catches `<=`.
    seed = signed(unmix(-(zlib.crc32(b"verify coin") << 31) % 2**64))
    assert noise([seed], [0], "coin")[0] == 0
    assert toss(chance([seed], [0]), torch.tensor([0.0, 1e-30]), 0).tolist() == [False, True]


def test_what_a_seed_draws_stays_what_it_was() -> None:
    # A change of these numbers changes what every seed writes; it belongs in the log.
    keys = [("token", 0), ("coin", 0), ("coin", 1), ("pick", 0)]
    assert [noise([7], [11], purpose, draw)[0] for purpose, draw in keys] == [
        6.25009338330873e-05,
        0.9373531410048274,
        0.03782120929549715,
        0.2234541776196941,
    ]


def test_every_part_of_the_key_changes_the_draw() -> None:
    keys = itertools.product(range(12), range(12), ["token", "coin", "pick"], range(12))
    seen = {noise([seed], [root], purpose, draw)[0] for seed, root, purpose, draw in keys}
    assert len(seen) == 12 * 12 * 3 * 12


def test_counting_up_seeds_does_not_repeat_the_draws_of_another_seed() -> None:
    # Catches keys that join seed and draw before mixing: there seed 0, draw 1 was seed 1, draw 0.
    seeds = torch.arange(256)
    seen = {u for draw in range(64) for u in noise(seeds, torch.zeros(256, dtype=torch.long), "coin", draw)}
    assert len(seen) == 256 * 64


def test_token_noise_belongs_to_the_position_and_not_to_the_step() -> None:
    seeds = torch.arange(64)
    probs = flat(64)
    from_far = chance(seeds, torch.full((64,), 5)).token(probs, 3)
    assert torch.equal(from_far, chance(seeds, torch.full((64,), 8)).token(probs, 0))
    assert torch.equal(from_far, chance(seeds, torch.full((64,), 2)).token(probs, 6))
    assert not torch.equal(from_far, chance(seeds, torch.full((64,), 5)).token(probs, 4))


def test_other_draws_belong_to_the_step() -> None:
    seeds, probs = torch.arange(64), flat(64)
    here, there = chance(seeds, torch.full((64,), 5)), chance(seeds, torch.full((64,), 6))
    half = torch.full((64,), 0.5)
    for draw in range(3):
        assert not torch.equal(toss(here, half, draw), toss(there, half, draw))
        assert not torch.equal(here.pick(probs, draw), there.pick(probs, draw))


@pytest.mark.parametrize("seed", [0, -1, 2**62, 2**63, 2**64 + 5, -(2**70)])
def test_any_whole_number_is_a_seed(seed: int) -> None:
    sequence = SequenceState([1], SamplingParams(seed=seed))
    assert 0 <= sequence.seed < 1 << 63
    assert 0 <= chance([sequence.seed], [0]).pick(flat(1), 0).item() < FINE


def test_a_request_without_a_seed_gets_a_fresh_one() -> None:
    assert SequenceState([1]).seed != SequenceState([1]).seed
    assert SequenceState([1], SamplingParams(seed=3)).seed == 3


# Uniform and independent


ALONG: dict[str, Callable[[], np.ndarray]] = {
    "seeds counted up": lambda: noise(torch.arange(MANY), torch.zeros(MANY, dtype=torch.long)),
    "seeds far apart": lambda: noise(torch.arange(MANY) << 40, torch.full((MANY,), 9)),
    "positions": lambda: noise(torch.full((MANY,), 3), torch.arange(MANY), "token"),
    "draws": lambda: np.array([noise([5], [17], "coin", draw)[0] for draw in range(MANY // 4)]),
}


@pytest.mark.parametrize("along", ALONG)
def test_noise_is_uniform(along: str) -> None:
    assert stats.kstest(ALONG[along](), "uniform").pvalue > FALSE_ALARM


@pytest.mark.parametrize("along", ALONG)
def test_neighbours_are_independent(along: str) -> None:
    values = ALONG[along]()
    for lag in (1, 2, 3):
        assert independent(values[:-lag], values[lag:])


@pytest.mark.parametrize(
    ("one", "other"),
    [
        (("token", 0), ("pick", 0)),
        (("token", 0), ("coin", 0)),
        (("coin", 0), ("pick", 0)),
        (("coin", 0), ("order", 0)),
        (("coin", 0), ("coin", 1)),
        (("pick", 1), ("pick", 2)),
    ],
)
def test_purposes_and_draws_are_independent(one: tuple[str, int], other: tuple[str, int]) -> None:
    seeds = torch.arange(MANY) % 128
    roots = torch.arange(MANY) // 128
    assert independent(noise(seeds, roots, *one), noise(seeds, roots, *other))


@pytest.mark.parametrize(("seed_step", "root_step"), [(1, 1), (1, -1), (2, 1), (7, 3)])
def test_seeds_and_positions_do_not_trade_places(seed_step: int, root_step: int) -> None:
    seeds, roots = torch.arange(MANY) % 128 + 50, torch.arange(MANY) // 128 + 50
    shifted = noise(seeds + seed_step, roots + root_step, "token")
    assert independent(noise(seeds, roots, "token"), shifted)


def independent(a: np.ndarray, b: np.ndarray, bins: int = 12) -> bool:
    table, _, _ = np.histogram2d(a, b, bins=bins, range=[[0, 1], [0, 1]])
    return bool(stats.chisquare(table.ravel()).pvalue > FALSE_ALARM)


def test_the_noise_of_an_order_is_independent_between_tokens() -> None:
    # Flat distributions over two and three tokens: all orders are equally likely.
    first = race_on(flat(MANY, 3), mix(torch.arange(MANY)), 3)
    _, counts = first.unique(dim=0, return_counts=True)
    assert len(counts) == 6
    assert stats.chisquare(counts.numpy()).pvalue > FALSE_ALARM


# Decisions


def test_a_coin_succeeds_as_often_as_its_odds() -> None:
    draws = chance(torch.arange(MANY), torch.zeros(MANY, dtype=torch.long))
    for draw, probability in enumerate((0.01, 0.3, 0.5, 0.97)):
        accepted = int(toss(draws, torch.full((MANY,), probability), draw).sum())
        assert stats.binomtest(accepted, MANY, probability).pvalue > FALSE_ALARM


def test_a_coin_never_errs_on_what_is_certain() -> None:
    draws = chance(torch.arange(MANY), torch.zeros(MANY, dtype=torch.long))
    assert toss(draws, torch.ones(MANY), 0).all()
    assert not toss(draws, torch.zeros(MANY), 0).any()


@given(st.lists(st.sampled_from([0.0, 0.2, 0.5, 0.9, 1.0]), min_size=1, max_size=9), st.integers(0, 80), st.data())
def test_the_first_success_of_several_coins_is_found_in_one_call_or_in_many(
    odds: list[float], draw: int, data: st.DataObject
) -> None:
    ask = chance(torch.arange(64), torch.full((64,), 3))
    rows = torch.tensor(odds).expand(64, -1)
    found = ask.first(rows, draw)
    tossed = torch.stack([toss(ask, rows[:, i], draw + i) for i in range(len(odds))], dim=1)
    for row, first in zip(tossed.tolist(), found.tolist(), strict=True):
        assert first == (row.index(True) if any(row) else len(odds))
    cut = data.draw(st.integers(1, len(odds)))
    head, tail = ask.first(rows[:, :cut], draw), ask.first(rows[:, cut:], draw + cut)
    assert torch.equal(found, torch.where(head < cut, head, cut + tail))


def test_a_drafter_s_noise_is_not_the_verifier_s() -> None:
    seeds, roots = torch.arange(MANY), torch.zeros(MANY, dtype=torch.long)
    even = flat(MANY, 2)
    verifier, drafter = SeededChance(seeds, roots), SeededChance(seeds, roots, role="draft")
    half = torch.full((MANY,), 0.5)
    for ask in (lambda c: c.pick(even) == 0, lambda c: toss(c, half, 0), lambda c: c.token(even, 0)):
        same = int((ask(verifier) == ask(drafter)).sum())
        assert stats.binomtest(same, MANY).pvalue > FALSE_ALARM


def test_token_and_pick_follow_their_law() -> None:
    probs = torch.tensor([0.05, 0.0, 0.5, 0.2, 0.25])
    draws = chance(torch.arange(MANY), torch.zeros(MANY, dtype=torch.long))
    for drawn in (draws.token(probs.expand(MANY, 5), 0), draws.pick(7 * probs.expand(MANY, 5), 0)):
        counts = drawn.bincount(minlength=5)
        assert counts[1] == 0
        possible = probs > 0
        expected = probs[possible].double() / probs.double().sum() * MANY
        assert stats.chisquare(counts[possible].numpy(), expected.numpy()).pvalue > FALSE_ALARM


# Drawing by a race


def race_by_hand(probs: list[float], key: int) -> int:
    """The slow truth in whole numbers: blocks race with the mass of their tokens, then the tokens of the winner."""

    def time(key: int, name: int, mass: float) -> float:
        bits = split_mix((key + name * 0x9E3779B97F4A7C15) % 2**64) >> 12
        return -math.log((bits + 0.5) / 2**52) / mass if mass else math.inf

    tokens = range(len(probs))
    if len(probs) > BLOCK:
        starts = range(0, len(probs), BLOCK)
        masses = {start: sum(probs[start : start + BLOCK]) for start in starts}
        first = min(starts, key=lambda start: time(split_mix(key), start // BLOCK, masses[start]))
        tokens = range(first, min(first + BLOCK, len(probs)))
    return min(tokens, key=lambda token: time(key, token, probs[token]))


@given(st.one_of(probs(), probs(scale=3.7), probs(scale=1e-6)), st.lists(int64s, min_size=1, max_size=8))
def test_the_token_that_arrives_first_wins(row: Tensor, keys: list[int]) -> None:
    found = race(row.expand(len(keys), -1), torch.tensor(keys))
    assert found.tolist() == [race_by_hand(row.tolist(), key % 2**64) for key in keys]
    assert (row[found] > 0).all()


@given(probs(), int64s, st.integers(0, 1 << 40), st.integers(0, 9))
def test_token_and_pick_race_on_their_own_keys(row: Tensor, seed: int, root: int, number: int) -> None:
    ask = chance([seed], [root])
    token_key = key_by_hand(seed, root + number + 1, "token", 0)  # the position that the token will have
    assert ask.token(row[None], depth=number).tolist() == [race_by_hand(row.tolist(), token_key)]
    pick_key = key_by_hand(seed, root, "pick", number)
    assert ask.pick(row[None], draw=number).tolist() == [race_by_hand(row.tolist(), pick_key)]


@pytest.mark.parametrize("vocabulary", [BLOCK, BLOCK + 1, 5 * BLOCK, 5 * BLOCK + 77])
def test_a_vocabulary_of_several_blocks_races_block_by_block(vocabulary: int) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    probs = torch.softmax(2 * torch.randn(vocabulary, generator=generator), dim=-1)
    keys = torch.arange(64) * GAMMA
    found = race(probs.expand(64, -1), keys)
    assert found.tolist() == [race_by_hand(probs.tolist(), int(key) % 2**64) for key in keys]


@given(st.lists(st.tuples(probs(min_vocabulary=6, max_vocabulary=6), int64s), min_size=2, max_size=5))
def test_a_race_keeps_its_rows_apart(rows: list[tuple[Tensor, int]]) -> None:
    p, keys = torch.stack([row for row, _ in rows]), torch.tensor([key for _, key in rows])
    alone = [race(p[i : i + 1], keys[i : i + 1]) for i in range(len(rows))]
    assert torch.equal(race(p, keys), torch.cat(alone))


@pytest.mark.parametrize("vocabulary", [9, 5 * BLOCK - 3])
def test_a_race_among_few_tokens_is_that_of_their_rows(vocabulary: int) -> None:
    generator = torch.Generator().manual_seed(vocabulary)
    draws = 400
    tokens = torch.stack([torch.randperm(vocabulary, generator=generator)[:6] for _ in range(draws)])
    masses = torch.rand(draws, 6, generator=generator) ** 4
    masses[:, 1:][torch.rand(draws, 5, generator=generator) < 0.3] = 0
    tokens = torch.where(masses > 0, tokens, 0)  # an empty place names a token that may be among the others
    rows = torch.zeros(draws, vocabulary).scatter_add_(1, tokens, masses)
    keys = mix(torch.arange(draws))
    assert torch.equal(race_among(tokens, masses.double(), keys), race(rows, keys))


def test_a_race_over_several_blocks_follows_its_law() -> None:
    """Masses that differ between and within blocks, some blocks without any."""
    generator = torch.Generator().manual_seed(4)
    probs = torch.rand(6 * BLOCK, generator=generator) ** 6
    probs[BLOCK : 2 * BLOCK] = 0
    probs[::3] = 0
    counts = torch.zeros(len(probs), dtype=torch.long)
    for start in range(0, 4 * MANY, MANY):
        keys = mix(torch.arange(start, start + MANY))
        counts += race(probs.expand(MANY, -1), keys).bincount(minlength=len(probs))
    assert counts[probs == 0].sum() == 0
    expected = probs.double() / probs.double().sum() * counts.sum()
    rare = expected < 10  # pooled, so that every cell is large enough for the test
    found = np.append(counts[~rare].numpy(), counts[rare].sum())
    goals = np.append(expected[~rare].numpy(), expected[rare].sum())
    assert stats.chisquare(found, goals / goals.sum() * found.sum()).pvalue > FALSE_ALARM


@pytest.mark.parametrize("bits", [0, 2**64 - 1])
def test_the_extremes_of_noise_neither_lose_a_token_nor_make_one(bits: int) -> None:
    # Token 0 has the least or the greatest noise there is; catches the logarithm of 0 and times of 0 / 0.
    key = torch.tensor([signed(unmix(bits))])
    assert race(torch.tensor([[1.0, 0.0, 0.0]]), key).tolist() == [0]
    assert race(torch.tensor([[0.0, 1e-30, 0.0]]), key).tolist() == [1]
    assert race(torch.tensor([[0.5, 0.5]]), key).tolist() == [0 if bits else 1]


def test_a_law_without_mass_still_names_a_token() -> None:
    # Batched verifiers draw for rows that nobody reads; the answer only has to be a valid index.
    for vocabulary in (5, 3 * BLOCK + 1):
        found = race(torch.zeros(2, vocabulary), torch.tensor([3, 4]))
        assert ((found >= 0) & (found < vocabulary)).all()


def test_rounding_of_a_law_does_not_change_what_is_drawn_from_it() -> None:
    """Catches a draw by running sums: there a rare token is narrower than the rounding of all tokens before it, and
    the same seed would write other texts with a draft than without."""
    generator = torch.Generator().manual_seed(2)
    logits = 3 * torch.randn(49_152, generator=generator)
    keys = mix(torch.arange(2000))
    exact = torch.softmax(logits, dim=-1)
    rounded = torch.softmax(logits + 1e-5 * torch.randn(len(logits), generator=generator), dim=-1)
    pairs = [(race(exact.expand(50, -1), part), race(rounded.expand(50, -1), part)) for part in keys.split(50)]
    assert sum(int((a != b).sum()) for a, b in pairs) <= 1


# Orders without replacement


def order_probability(probs: list[float], order: tuple[int, ...]) -> float:
    """The slow truth: draw, remove, renormalise."""
    probability, left = 1.0, 1.0
    for token in order:
        probability *= probs[token] / left
        left -= probs[token]
    return probability


@pytest.mark.parametrize("probs", [[0.4, 0.3, 0.2, 0.1], [0.85, 0.05, 0.05, 0.05], [0.5, 0.0, 0.25, 0.25]])
@pytest.mark.parametrize("k", [1, 2, 3])
def test_an_order_has_the_law_of_drawing_without_replacement(probs: list[float], k: int) -> None:
    drawn = race_on(torch.tensor(probs).expand(MANY, -1), mix(torch.arange(MANY) + 21 * MANY), k)
    possible = list(itertools.permutations([token for token, mass in enumerate(probs) if mass], k))
    expected = {order: order_probability(probs, order) for order in possible}
    counts = dict.fromkeys(possible, 0)
    for row in drawn.tolist():
        counts[tuple(row)] += 1  # an impossible order has no entry
    goals = np.array(list(expected.values()))
    assert stats.chisquare(list(counts.values()), goals / goals.sum() * MANY).pvalue > FALSE_ALARM


@given(probs(), st.integers(1, 16), int64s)
def test_an_order_names_every_token_at_most_once_and_none_without_mass(p: Tensor, k: int, key: int) -> None:
    row = race_on(p[None], torch.tensor([key]), k)[0].tolist()
    possible = int((p > 0).sum())
    named = row[: min(k, possible)]
    assert len(row) == k
    assert len(set(named)) == len(named)
    assert all(p[token] > 0 and token >= 0 for token in named)
    assert row[len(named) :] == [-1] * (k - len(named))


@given(probs(), int64s)
def test_an_order_is_a_race_for_every_place_among_those_left(row: Tensor, key: int) -> None:
    left, expected = row.tolist(), []
    for place in range(int((row > 0).sum())):
        expected.append(race_by_hand(left, split_mix((key + place) % 2**64)))
        left[expected[-1]] = 0.0
    assert race_on(row[None], torch.tensor([key]), len(expected))[0].tolist() == expected


def test_an_order_leaves_its_law_as_it_was() -> None:
    probs = torch.tensor([[0.1, 0.2, 0.3, 0.4]])
    before = probs.clone()
    race_on(probs, torch.tensor([3]), 4)
    assert torch.equal(probs, before)


def test_an_order_over_several_blocks_names_every_token_once() -> None:
    probs = flat(1, 2 * BLOCK + 3)
    assert sorted(race_on(probs, torch.tensor([3]), probs.shape[1])[0].tolist()) == list(range(probs.shape[1]))


def test_an_order_need_not_be_of_a_normalised_law() -> None:
    probs = torch.tensor([[0.1, 0.2, 0.3, 0.4]])
    key = torch.tensor([3])
    assert torch.equal(race_on(probs, key, 4), race_on(17 * probs, key, 4))
