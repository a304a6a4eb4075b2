"""Drafting from memory: the trees that are laid over one, the distributions that are drawn from it, and the
distribution of the texts."""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given
from torch import Tensor

from branchwise.audit.blocks import Partition, g_test
from branchwise.core.sampling import SamplingParams
from branchwise.core.sequence import SequenceState
from branchwise.core.tree import Draw
from branchwise.draft import DRAFTERS, build_drafter, build_policy
from branchwise.draft.base import Budget, Drafter
from branchwise.draft.builder import Candidate, Cursor, TreePolicy
from branchwise.draft.lookup.base import LookupDrafter
from branchwise.engine import Engine, Request
from branchwise.errors import UsageError
from branchwise.testing import ToyTarget
from branchwise.verify import VERIFIERS
from tests.strategies import best_first
from tests.test_index import write as write_index

FALSE_ALARM = 1e-4
"""of every statistical test here"""
Table = dict[int, dict[int, float]]


class Given(LookupDrafter):
    """A lookup drafter with a given table of what may follow each token."""

    name = "given"

    def __init__(self, table: Table, tree: TreePolicy | None = None) -> None:
        super().__init__(tree or build_policy("topk:9"))
        self.table = table

    def locate(self, sequence: SequenceState) -> Cursor:
        return sequence.root

    def candidates(self, cursor: Cursor) -> Sequence[Candidate]:
        return sorted((Candidate(t, m, t) for t, m in self.table.get(cursor, {}).items()), key=lambda one: -one.mass)


@st.composite
def tables(draw: st.DrawFn) -> Table:
    vocabulary = draw(st.integers(1, 5))
    table: Table = {}
    for token in range(vocabulary):
        weights = draw(st.lists(st.integers(0, 9), min_size=vocabulary, max_size=vocabulary))
        left = draw(st.integers(1, 9))
        table[token] = {t: weight / (sum(weights) + left) for t, weight in enumerate(weights) if weight}
    return table


def every_path(table: Table, root: int, depth: int) -> dict[tuple[int, ...], float]:
    """How probable every path below the root is."""
    found: dict[tuple[int, ...], float] = {}
    level = {(): 1.0}
    for _ in range(depth):
        level = {
            (*path, token): reach * mass
            for path, reach in level.items()
            for token, mass in table.get(path[-1] if path else root, {}).items()
        }
        found |= level
    return found


@given(tables(), st.integers(0, 12), st.integers(0, 3))
def test_the_best_nodes_are_found_in_order(table: Table, nodes: int, depth: int) -> None:
    tree, reach = best_first(0, 0, Given(table).candidates, nodes=nodes, depth=depth)
    paths = every_path(table, 0, depth)
    assert len(tree) - 1 == min(nodes, len(paths))
    assert reach[1:] == pytest.approx(sorted(paths.values(), reverse=True)[: len(tree) - 1])
    drafted = [tuple(tree.path(node)) for node in range(1, len(tree))]
    assert len(set(drafted)) == len(drafted), "siblings are different"
    assert [paths[path] for path in drafted] == pytest.approx(reach[1:])


@given(tables(), st.integers(0, 12), st.integers(0, 3), st.integers(1, 5), st.sampled_from([0.0, 0.02, 0.2]))
def test_siblings_that_wait_for_their_turn_come_as_if_all_were_in_the_heap(
    table: Table, nodes: int, depth: int, width: int, least: float
) -> None:
    """Many masses are equal here: of equal paths the one comes first that could be thought of first."""
    candidates = Given(table).candidates
    waiting: list[tuple[float, int, tuple[int, ...]]] = []
    drafted: list[tuple[int, ...]] = []
    path, reach, number = (), 1.0, 0
    while len(drafted) < nodes:
        for found in candidates(path[-1] if path else 0)[: width if len(path) < depth else 0]:
            if reach * found.mass >= least:
                waiting.append((-reach * found.mass, number, (*path, found.token)))
            number += 1
        if not waiting:
            break
        waiting.sort()
        value, _, path = waiting.pop(0)
        reach = -value
        drafted.append(path)
    tree, _ = best_first(0, 0, candidates, nodes=nodes, depth=depth, width=width, least=least)
    assert [tuple(tree.path(node)) for node in range(1, len(tree))] == drafted


def test_what_is_too_improbable_is_not_thought_of() -> None:
    table = {0: {1: 0.6, 2: 0.3}, 1: {0: 0.5}, 2: {0: 0.5}}
    tree, reach = best_first(0, 0, Given(table).candidates, nodes=9, depth=2, least=0.2)
    assert [tree.path(node) for node in range(1, len(tree))] == [[1], [2], [1, 0]]
    assert reach == pytest.approx([1.0, 0.6, 0.3, 0.3])


def test_a_tree_over_a_memory_keeps_to_its_budget_and_its_width() -> None:
    table = {t: dict.fromkeys(range(4), 0.2) for t in range(4)}
    drafter = Given(table, build_policy("topk:20,depth=3,width=2"))
    for nodes, depth in ((1, 5), (4, 5), (99, 1), (99, 0)):
        [tree] = drafter.draft([SequenceState([0])], [Budget(nodes, depth)])
        assert len(tree) <= nodes
        assert tree.depth <= min(depth, 3)
        assert max((len(below) for below in tree.children), default=0) <= 2
        assert tree.draw is Draw.FIXED


# What is drawn


def test_trees_are_drawn_from_what_is_remembered() -> None:
    table = {0: {1: 0.3, 2: 0.1}, 1: {2: 0.5}, 2: {1: 0.2, 0: 0.2}}
    drafter = Given(table, build_policy("paths:2x2"))
    drafter.bind(ToyTarget(4).info)
    drawn: Counter[int] = Counter()
    for seed in range(600):
        [tree] = drafter.draft([SequenceState([3, 0], SamplingParams(1.0, seed=seed))], [Budget(9, 9)])
        assert tree.q is not None
        assert tree.q[0].tolist() == pytest.approx([0, 0.75, 0.25, 0])
        for node, below in enumerate(tree.children):
            expected = table[int(tree.tokens[node])]
            if below:
                assert tree.q[node].tolist() == pytest.approx(
                    [expected.get(t, 0) / sum(expected.values()) for t in range(4)]
                )
        drawn[int(tree.tokens[tree.paths[0][1]])] += 1
    sigma = math.sqrt(600 * 0.75 * 0.25)
    assert abs(drawn[1] - 450) < 3.9 * sigma, "a false alarm of 1e-4"


def test_where_nothing_is_known_the_law_before_is_drawn_from() -> None:
    drafter = Given({0: {1: 0.5}}, build_policy("chain:3"))
    drafter.bind(ToyTarget(3).info)
    [tree] = drafter.draft([SequenceState([0], SamplingParams(1.0, seed=1))], [Budget(9, 9)])
    assert tree.tokens.tolist() == [0, 1, 1, 1]
    assert tree.q is not None
    assert tree.q.tolist() == [[0, 1, 0]] * 3
    [tree] = drafter.draft([SequenceState([2], SamplingParams(1.0, seed=1))], [Budget(9, 9)])
    assert len(tree) == 1, "at the root nothing known is nothing drafted"


# The distribution of the texts


VOCABULARY, LENGTH, TEXTS, TEMPERATURE = 5, 3, 700, 0.8


class ShortSighted(ToyTarget):
    """A target whose distributions depend on the last two tokens, so that there is something to remember."""

    def logits(self, tokens: Sequence[int]) -> Tensor:
        return short_sighted(tuple(tokens[-2:]))


@cache
def short_sighted(tokens: tuple[int, ...]) -> Tensor:
    return ToyTarget(VOCABULARY).logits(tokens)


@cache
def prompt() -> tuple[int, ...]:
    """What the target itself could have written, so that its memory is of use."""
    engine = Engine(ShortSighted(VOCABULARY), build_drafter("none"), VERIFIERS.build("match"))
    made = engine.submit(Request((1, 2), SamplingParams(TEMPERATURE, seed=1), max_new_tokens=40))
    while engine.busy:
        engine.step()
    return (1, 2, *made.token_ids)


@cache
def law_after(block: tuple[int, ...]) -> object:
    logits = ShortSighted(VOCABULARY).logits((*prompt(), *block))
    return torch.softmax(logits.double() / TEMPERATURE, dim=-1).numpy()


MEMORIES = [
    name
    for name in DRAFTERS
    if isinstance(DRAFTERS.find(name), type)
    and issubclass(DRAFTERS.find(name), LookupDrafter)
    and name not in ("fused", "retrieval")
]
SPECS = [*MEMORIES, "fused:recycle+suffix", "retrieval"]
WAYS = [("chain:3", "block"), ("paths:2x2", "cascade"), ("rsd-c:2,1", "rrs"), ("dynamic:5", "traversal")]
CASES = [
    *((spec, *way) for spec in SPECS for way in WAYS[1:]),
    ("recycle", *WAYS[0]),
    ("fused:recycle+suffix", "topk:6,depth=3,width=3", "match"),
]


@pytest.mark.parametrize(("spec", "tree", "verify"), CASES)
def test_the_first_tokens_have_the_targets_law(spec: str, tree: str, verify: str, tmp_path: Path) -> None:
    """Also while the memory learns from the texts before, and from the prompt that all of them share."""
    if spec == "retrieval":
        write_index(tmp_path / "index", [list(prompt())], VOCABULARY)
        spec = f"retrieval:{tmp_path / 'index'},min=1"
    assert_first_tokens_have_the_law(build_drafter(spec, tree), verify)


def assert_first_tokens_have_the_law(drafter: Drafter, verify: str) -> None:
    engine = Engine(ShortSighted(VOCABULARY, slots=100), drafter, VERIFIERS.build(verify))
    made = [
        engine.submit(Request(prompt(), SamplingParams(TEMPERATURE, seed=seed), max_new_tokens=LENGTH + 1))
        for seed in range(TEXTS)
    ]
    while engine.busy:
        engine.step()
    partition = Partition(law_after, length=LENGTH, samples=TEXTS)  # type: ignore[arg-type]
    found = g_test(partition.count(tuple(text.token_ids[:LENGTH]) for text in made), partition.probabilities)
    assert found.p_value > FALSE_ALARM, found
    assert found.freedom > 10
    assert sum(text.stats.accepted_tokens for text in made) > TEXTS / 4, "a draft that is never right shows nothing"


class Coin(ToyTarget):
    """Two tokens, each as probable as the other, whatever stands before."""

    def logits(self, tokens: Sequence[int]) -> Tensor:
        return torch.zeros(self.vocabulary)


def test_texts_of_one_seed_do_not_tell_a_memory_of_each_others_draws() -> None:
    """A memory that has seen a text of this seed knows something of its draws.

    Were they the draws of the next text of that seed as well, that would write what a first text had written three
    times in four.
    """
    same = 0
    for seed in range(400):
        engine = Engine(Coin(2), build_drafter("trigram", "rsd-c:1"), VERIFIERS.build("rrs"))
        texts = []
        for own in (10_000 + seed, seed, seed):
            made = engine.submit(Request((0, 1), SamplingParams(1.0, seed=own), max_new_tokens=2))
            while engine.busy:
                engine.step()
            texts.append(made.token_ids[0])
        same += texts[2] == texts[0]
    assert abs(same - 200) < 39, "a false alarm of 1e-4"


def test_a_text_alone_has_the_draws_of_its_seed() -> None:
    fixed, drawn = build_drafter("trigram"), build_drafter("trigram", "rsd-c:2")
    for drafter, expected in ((fixed, [7, 7]), (drawn, [7])):
        engine = Engine(ToyTarget(4), drafter, VERIFIERS.build("auto"))
        noises = [engine.submit(Request((0, 1), SamplingParams(1.0, seed=7))).sequence.rng_seed for _ in range(2)]
        assert noises[: len(expected)] == expected
        assert len(set(noises)) == 3 - len(expected)


def test_a_memory_of_one_model_is_not_used_for_another() -> None:
    drafter: Any = build_drafter("trigram")
    drafter.bind(ToyTarget(4).info)
    drafter.bind(ToyTarget(4).info)
    with pytest.raises(UsageError, match="has learned for a model with 4 tokens, and this one has 5"):
        drafter.bind(ToyTarget(5).info)


def test_places_of_a_text_that_ended_are_forgotten() -> None:
    for spec in SPECS[:-1]:
        drafter: Any = build_drafter(spec, "topk:4")
        drafter.bind(ToyTarget(4).info)
        sequence = SequenceState([0, 1, 0, 1])
        drafter.draft([sequence], [Budget(5, 2)])
        drafter.finish(sequence)
        assert not drafter._cursors
