"""Dice: the draws of a level are those of its nodes one by one, on the host as at fixed places, from rows as from few
tokens; and what is few becomes the q that was drawn from.

Nothing here is left to chance: seeds are fixed or given by hypothesis. Blocks of few tokens are summed in another order
than rows are, so with other seeds a photo finish could end otherwise, about once in ten million draws.
"""

from __future__ import annotations

import itertools
import random
from collections.abc import Callable
from collections.abc import Sequence as Rows

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from branchwise.audit.growths import ScriptedDice
from branchwise.chance import BLOCK, SeededChance, key_of, race, signed, wait_of
from branchwise.draft import TREES, Budget, build_growth
from branchwise.draft import dice as dice_module
from branchwise.draft import replayed as replayed_module
from branchwise.draft import urn as urn_module
from branchwise.draft.dice import Dice, Races, SeededDice, SureDice, Throw, dice_of, thrown
from branchwise.draft.few import TINY, Few, scattered, table
from branchwise.draft.grown import Grown, Wish
from branchwise.draft.growth import Found, Growth, Sapling, grow_with
from branchwise.draft.paths import Paths
from branchwise.draft.replayed import Replayed
from branchwise.draft.topk import Likeliest
from branchwise.draft.urn import Opening
from branchwise.sampling import SamplingParams
from branchwise.sequence import Sequence
from branchwise.testing import ToyTarget
from branchwise.tree import DraftTree
from tests.strategies import Rule, tokens_to

HOST = torch.device("cpu")
SIZES = (5, BLOCK, BLOCK + 1, 4 * BLOCK, 5 * BLOCK + 77)
"""vocabularies of one block, of whole blocks, and of blocks of which the last is not full"""
int64s = st.integers(-(1 << 63), (1 << 63) - 1)


def chance_of(seed: int, root: int) -> SeededChance:
    return SeededChance(torch.tensor([seed]), torch.tensor([root]), role="draft")


def rows_of(count: int, vocabulary: int, seed: int) -> Tensor:
    return (3 * torch.randn(count, vocabulary, generator=torch.Generator().manual_seed(seed))).softmax(dim=-1)


class Overwriting:
    """What `Replay` does on a device: whoever asks again finds the answer in the same place."""

    def __init__(self, function: Callable[..., Tensor], device: torch.device, *, capture: bool = True) -> None:
        self._function = function
        self._found: dict[tuple[int, ...], Tensor] = {}

    def __call__(self, *places: Tensor) -> Tensor:
        key = tuple(place.data_ptr() for place in places)
        found = self._function(*places)
        return self._found.setdefault(key, found.clone()).copy_(found)


def pretend_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Fixed places and answers that are overwritten, on the host."""

    def fixed(self: Replayed, function: Callable[..., Tensor], device: torch.device, *, capture: bool = True) -> None:
        plain(self, function, device, capture=capture)
        self.fixed = True

    plain = Replayed.__init__
    monkeypatch.setattr(Replayed, "__init__", fixed)
    monkeypatch.setattr(replayed_module, "Replay", Overwriting)


@pytest.fixture
def as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    pretend_a_device(monkeypatch)


# Keys


@given(int64s, st.integers(0, 1 << 40), st.sampled_from(["pick", "order", "wait"]), st.integers(0, (1 << 31) - 1))
def test_keys_are_those_of_the_seeded_chance(seed: int, root: int, purpose: str, draw: int) -> None:
    assert signed(key_of("draft", purpose, seed, root, draw)) == int(chance_of(seed, root).keys(purpose, draw))


@given(int64s, st.integers(0, 1 << 40), st.integers(0, (1 << 31) - 1))
def test_waits_are_those_of_the_seeded_chance(seed: int, root: int, draw: int) -> None:
    waited = float(chance_of(seed, root).waits(draw))
    assert wait_of(key_of("draft", "wait", seed, root, draw)) == pytest.approx(waited, rel=1e-14)
    assert SeededDice(seed, root).wait(draw) == pytest.approx(waited, rel=1e-14)


# Levels of rows


def one_by_one(laws: Tensor, draws: list[tuple[int, int]], seed: int, root: int) -> list[int]:
    """The draws of a level as they always were: a race for every node."""
    chance = chance_of(seed, root)
    return [int(race(laws[row][None], chance.keys("pick", draw))) for row, draw in draws]


def check_levels(dice: SeededDice, seed: int, root: int) -> None:
    """Levels of all sizes, large ones before small ones too: places keep what lay there."""
    chance = chance_of(seed, root)
    for vocabulary in SIZES:
        for count in (3, 1, 4, 2, 7):
            laws = rows_of(count, vocabulary, seed)
            draws = [(turn * 5 % count, 100 * count + turn) for turn in range(2 * count + 1)]
            assert dice.picks_from(laws, draws) == one_by_one(laws, draws, seed, root)
            sizes, numbers = [1 + row % 3 for row in range(count)], list(range(40, 40 + count))
            alone = [
                [token for token in chance.order(law[None], size, draw)[0].tolist() if token >= 0]
                for law, size, draw in zip(laws, sizes, numbers, strict=True)
            ]
            assert dice.orders(laws, sizes, numbers) == alone


@pytest.mark.parametrize("seed", range(4))
def test_the_draws_of_a_level_are_those_of_its_nodes(seed: int) -> None:
    check_levels(SeededDice(seed, 9), seed, 9)


@pytest.mark.usefixtures("as_on_a_device")
def test_they_are_the_same_at_fixed_places() -> None:
    races = Races()
    for seed in range(3):
        check_levels(SeededDice(seed, 9, races), seed, 9)


def test_an_order_ends_where_its_law_does() -> None:
    laws = torch.tensor([[0.0, 0.5, 0.0, 0.5], [0.25, 0.25, 0.25, 0.25]])
    for dice in (SeededDice(1, 1), SureDice()):
        first, second = dice.orders(laws, [3, 3], [0, 1])
        assert sorted(first) == [1, 3]
        assert len(set(second)) == 3


def test_a_greedy_text_takes_the_best_tokens_and_then_the_best_again() -> None:
    laws = torch.tensor([[0.1, 0.6, 0.3, 0.0], [0.0, 0.3, 0.0, 0.7]])
    draws = [(0, 0), (1, 1), (0, 2), (1, 3), (1, 4)]
    assert SureDice().picks_from(laws, draws) == [1, 3, 2, 1, 3]
    assert SureDice().picks_from([few_of(law) for law in laws], draws) == [1, 3, 2, 1, 3]


def test_a_greedy_text_leaves_nothing_to_chance() -> None:
    law = torch.tensor([0.3, 0.5, 0.2])
    greedy, sampled = (Sequence([1, 2], SamplingParams(temperature=heat, seed=4)) for heat in (0.0, 0.7))
    assert dice_of(greedy).picks(law, range(3)) == [1, 0, 2]
    assert dice_of(sampled).picks(law, range(30)) == SeededDice(4, 1).picks(law, range(30))


# Few tokens


def few_of(law: Tensor) -> Few:
    """The same law, as a memory would tell it."""
    return Few({token: float(law[token]) for token in law.nonzero()[:, 0].tolist()}, len(law), HOST)


def sparse(vocabulary: int, seed: int) -> Tensor:
    """(vocabulary,): a dozen tokens at most, some of them near each other."""
    chosen = random.Random(f"{vocabulary} {seed}")
    near = chosen.randrange(vocabulary)
    tokens = {min(near + chosen.randrange(20), vocabulary - 1) for _ in range(chosen.randrange(1, 6))}
    tokens |= {chosen.randrange(vocabulary) for _ in range(chosen.randrange(8))}
    law = torch.zeros(vocabulary)
    law[sorted(tokens)] = torch.tensor([chosen.random() ** 4 + 1e-6 for _ in tokens])
    return law / law.sum()


@pytest.mark.parametrize("vocabulary", [*SIZES, 49_152])
def test_few_tokens_are_drawn_as_a_row_is(vocabulary: int) -> None:
    for seed in range(60):
        law = sparse(vocabulary, seed)
        draws, dice = list(range(8)), SeededDice(seed, 3)
        assert dice.picks(few_of(law), draws) == dice.picks(law, draws)
        assert dice.order(few_of(law), 5, 9) == dice.order(law, 5, 9)


@given(st.dictionaries(st.integers(0, 999), st.floats(1e-30, 1), min_size=1, max_size=12))
def test_what_is_drawn_from_is_what_is_recorded(weights: dict[int, float]) -> None:
    law = Few.of(weights, 1000, HOST)
    [row] = table([law])
    assert {token: float(row[token]) for token in row.nonzero()[:, 0].tolist()} == law.masses
    assert law.mass == pytest.approx(1, rel=1e-6)
    assert min(law.masses.values()) >= TINY
    whole = sum(weights.values())
    for token, mass in law.masses.items():
        assert mass == pytest.approx(weights[token] / whole, rel=1e-6)


def test_what_no_verifier_could_divide_by_is_left_out() -> None:
    assert Few.of({1: 1.0, 2: 1e-39, 3: 1.0}, 4, HOST).masses == {1: 0.5, 3: 0.5}


def test_a_token_that_the_target_does_not_have_is_refused() -> None:
    # In a table it would be a token of the next row.
    with pytest.raises(AssertionError, match="no such token"):
        Few.of({1: 1.0, 4: 1.0}, 4, HOST)


def test_a_table_holds_few_tokens_rows_and_nothing() -> None:
    row, few = rows_of(1, 300, 1)[0], Few.of({7: 1.0, 299: 3.0}, 300, HOST)
    quarter = torch.zeros(300)
    quarter[7], quarter[299] = 0.25, 0.75
    assert torch.equal(table([few, None, row, few]), torch.stack([quarter, torch.zeros(300), row, quarter]))
    assert torch.equal(table([row, None]), torch.stack([row, torch.zeros(300)]))


def test_a_device_makes_the_same_table_from_places_and_masses() -> None:
    masses = torch.tensor([0.25, 0.1, 0.75], dtype=torch.float64)
    told = torch.stack([torch.tensor([3, 9, 11]), masses.view(torch.int64)])
    expected = torch.zeros(3, 4)
    expected[0, 3], expected[2, 1], expected[2, 3] = masses.float()
    assert torch.equal(scattered(told, (3, 4)), expected)


# Policies


def rule(vocabulary: int) -> Rule:
    return lambda prefix: sparse(vocabulary, hash(prefix))


def grown_from(growth: Growth, law: Callable[[tuple[int, ...]], Tensor | Few], dice: Dice) -> DraftTree:
    def look(tree: Sapling, nodes: list[int]) -> Found:
        laws = [law(tuple(tree.path(node))) for node in nodes]
        return Found(torch.stack(laws) if isinstance(laws[0], Tensor) else laws)  # type: ignore[arg-type]

    return grow_with(growth.grow(3, Budget(99, 5), dice), look)


@pytest.mark.parametrize("common", [0, 2])
def test_every_path_is_the_one_that_its_own_draws_make(common: int) -> None:
    # Few tokens, so that paths part and meet: two that agree with another between them are still one.
    count, length = 5, 3
    for seed in range(20):
        tree = grown_from(Paths(f"{count}x{length}@{common}"), rule(4), SeededDice(seed, 4))
        expected: list[tuple[int, ...]] = []
        for path in range(count):
            tokens: tuple[int, ...] = ()
            for level in range(length):
                number = level * count + (path if level >= common else 0)
                tokens += (int(race(rule(4)(tokens)[None], chance_of(seed, 4).keys("pick", number))),)
            expected.append(tokens)
        drawn = [tuple(tokens_to(tree, node)) for node in range(len(tree))]
        assert [drawn[leaf] for leaf in tree.leaves] == (expected if common == 0 else [])
        assert set(drawn) == {path[:level] for path in expected for level in range(length + 1)}


DRAWN = [
    "chain:4",
    "paths:4x3",
    "paths:3x4@2",
    "rsd-c:3,2,1",
    "rsd-s:3x3",
    "dynamic:9",
    "threshold:0.05,9",
    "template:mcsd",
    "fork-lossy:3x3",
    "chain:5,stop=confidence:0.3",
    "rsd-c:2,2,2,stop=entropy:1.0",
]
FIXED = ["topk:9", "graph:9", "ranks:mcsd", "puct:9"]


@pytest.mark.parametrize("spec", DRAWN + FIXED)
@pytest.mark.parametrize("greedy", [False, True])
def test_a_policy_grows_the_same_tree_from_few_tokens_as_from_rows(spec: str, greedy: bool) -> None:
    law = rule(700)
    for seed in range(6):
        trees = [
            grown_from(build_growth(spec), source, SureDice() if greedy else SeededDice(seed, 4))
            for source in (law, lambda prefix: few_of(law(prefix)))
        ]
        rows, few = trees
        assert few.tokens.tolist() == rows.tokens.tolist()
        assert (few.parents, few.leaves) == (rows.parents, rows.leaves)
        assert (few.q is None) == (rows.q is None) == (spec in FIXED)
        if rows.q is not None and few.q is not None:
            assert torch.equal(few.q, rows.q)


@pytest.mark.parametrize("spec", ["paths:2x2", "rsd-c:2,1", "dynamic:3"])
def test_the_audit_follows_few_tokens_as_it_follows_rows(spec: str) -> None:
    def weights(law: Callable[[tuple[int, ...]], Tensor | Few]) -> dict[tuple[int, ...], float]:
        scripts, found = [list[int]()], dict[tuple[int, ...], float]()
        while scripts:
            dice = ScriptedDice(scripts.pop())
            tree = grown_from(TREES.build(spec), law, dice)
            scripts += dice.others
            drawn = (*tree.tokens.tolist(), *tree.parents, *tree.leaves)
            found[drawn] = found.get(drawn, 0.0) + dice.weight
        return found

    law = rule(3)
    rows, few = weights(law), weights(lambda prefix: few_of(law(prefix)))
    assert few == pytest.approx(rows)
    assert sum(rows.values()) == pytest.approx(1)


@pytest.mark.usefixtures("as_on_a_device")
@pytest.mark.parametrize("spec", DRAWN)
def test_a_policy_grows_the_same_tree_at_fixed_places(spec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(urn_module, "lies_on_host", lambda laws: False)
    races, law = Races(), rule(700)
    for seed in range(3):
        here = grown_from(build_growth(spec), law, SeededDice(seed, 4, races))
        plain = grown_from(build_growth(spec), lambda prefix: few_of(law(prefix)), SeededDice(seed, 4))
        assert here.tokens.tolist() == plain.tokens.tolist()
        assert here.q is not None
        assert plain.q is not None
        assert torch.equal(here.q, plain.q)


# Several texts at once


@pytest.mark.parametrize("kind", ["picks", "orders", "urns", "likeliest"])
@pytest.mark.parametrize("greedy", [False, True])
def test_what_is_drawn_for_several_texts_in_one_go_is_what_each_draws_alone(
    kind: str, greedy: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Caught here: keys of one text used for another, and rows of one text taken for those of the next."""
    monkeypatch.setattr(dice_module, "lies_on_host", lambda laws: False)
    races, throws = Races(), []
    for text, count in enumerate((3, 1, 2)):
        dice = SureDice(races) if greedy else SeededDice(11 * text, 5 + text, races)
        laws, numbers = rows_of(count, 700, text), [40 + row for row in range(count)]
        if kind == "likeliest":
            throws.append(Likeliest.of(dice, laws, 3))
        elif kind == "picks":
            throws.append(Throw(dice, laws, [(row % count, 7 * row) for row in range(2 * count)]))
        elif kind == "orders":
            throws.append(Throw(dice, laws, list(enumerate(numbers)), [2 + row % 2 for row in range(count)]))
        else:
            throws.append(Opening(dice, laws, list(enumerate(numbers)), [3] * count))
    alone = [throw.alone() for throw in throws]
    asked: list[int] = []
    own = torch.Tensor.tolist
    monkeypatch.setattr(torch.Tensor, "tolist", lambda self: asked.append(1) or own(self))
    assert thrown(throws) == alone
    assert len(asked) == 1, "a look at the device for every text"


def test_texts_that_draw_in_different_ways_draw_by_themselves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(dice_module, "lies_on_host", lambda laws: False)
    laws = rows_of(2, 700, 1)
    throws = [
        Throw(SeededDice(1, 2), laws, [(0, 1), (1, 2)]),
        Throw(SureDice(), laws, [(0, 1)]),
        Throw(SeededDice(1, 2), laws, [(0, 3), (1, 4)], [2, 2]),
        Opening(SeededDice(1, 2), laws, [(0, 3), (1, 4)], [2, 2]),
        Likeliest.of(SeededDice(1, 2), laws, 2),
        Likeliest.of(SureDice(), laws, 3),
        Throw(SeededDice(3, 2), [Few.of({5: 0.5, 9: 0.5}, 700, laws.device)], [(0, 1)]),
    ]
    for several in (*itertools.permutations(throws, 2), throws, throws[::-1]):
        assert thrown(list(several)) == [throw.alone() for throw in several]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize(
    "spec",
    [
        "paths:3x4",
        "chain:4",
        "rsd-c:2,2",
        "template:sequoia-24",
        "paths:2x3@1",
        "rsd-s:3x3",
        "dynamic:9",
        "threshold:0.02,9",
        "topk:9,depth=3,width=3",
        "graph:9,width=3,depth=3",
        "ranks:sequoia-24",
        "fork-lossy:3x3",
    ],
)
def test_a_batch_draws_the_trees_that_its_texts_draw_alone(
    spec: str, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    target = ToyTarget(9)
    pretend_a_device(monkeypatch)  # where rows are padded
    sequences = [Sequence([1 + n, 2, n], SamplingParams(temperature, seed=n)) for n in range(5)]
    looks: list[int] = []
    own = torch.Tensor.tolist

    def trees(together: bool) -> list[DraftTree]:
        for module in (dice_module, urn_module):
            monkeypatch.setattr(module, "lies_on_host", lambda laws: not together)
        drafter = Tossing(build_growth(spec))
        drafter.bind(target)
        with monkeypatch.context() as patch:
            patch.setattr(torch.Tensor, "tolist", lambda self: looks.append(1) or own(self))
            return drafter.draft(sequences, [Budget(40, 6)] * 4 + [Budget(7, 2)])

    joint = trees(together=True)
    seen = len(looks)
    for one, other in zip(joint, trees(together=False), strict=True):
        assert one.parents == other.parents
        assert one.tokens.tolist() == other.tokens.tolist()
        if one.q is not None or other.q is not None:
            assert torch.equal(one.q, other.q)  # type: ignore[arg-type]
    # Whoever has more children than were drawn beforehand looks again for each of them.
    if not spec.startswith(("dynamic", "threshold")):
        assert seen <= max(tree.depth for tree in joint) + len(joint), "more than a look a level, and one a tree"
    assert seen < len(looks) - seen


class Tossing(Grown):
    """A drafter whose laws are made up from the last token."""

    name = "tossing"

    def look(self, wishes: Rows[Wish]) -> list[Found]:
        return [
            Found(torch.stack([rows_of(1, 9, wish.tree.tokens[node])[0] for node in wish.nodes])) for wish in wishes
        ]
