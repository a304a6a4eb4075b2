"""Templates: the shape is given and only tokens are drawn, siblings without replacement; files are read with care."""

from __future__ import annotations

import itertools
import json
from collections import Counter
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from branchwise.audit.exact import emitted
from branchwise.audit.instances import Drafts, Instance
from branchwise.core.topology import Topology, topology
from branchwise.core.tree import Draw
from branchwise.draft import TREES, build_drafter
from branchwise.draft.base import Budget
from branchwise.draft.policies.template import SHAPES, as_json, find_shape, read_template, write_template
from branchwise.draft.sampler import GreedySampler, SeededSampler
from branchwise.errors import BranchwiseError, UnknownName, UsageError
from branchwise.verify import VERIFIERS
from tests.conformance.test_drafters import assert_writes_like_plain_decoding
from tests.slow_truth import without_replacement
from tests.strategies import Rule, grown, random_rule, tokens_to
from tests.test_builder import assert_law
from tests.test_topk import paths_of, requests

UNEVEN = (-1, 0, 0, 0, 1, 1, 3, 4, 4, 6)
"""the first child has two children and the third has one; of the next level the first has two and the last has one"""


@pytest.fixture
def uneven(tmp_path: Path) -> str:
    write_template(tmp_path / "uneven.json", UNEVEN, "for tests")
    return f"template:{tmp_path / 'uneven.json'}"


FITTING = [name for name in VERIFIERS if Draw.WITHOUT_REPLACEMENT in VERIFIERS.find(name).accepts]


# Shapes


@pytest.mark.parametrize("name", SHAPES)
def test_a_named_shape_is_what_is_grown(name: str) -> None:
    tree = grown(f"template:{name}", random_rule(9, 1), SeededSampler(1, 0))
    assert tree.parents == SHAPES[name]
    assert 24 <= len(tree) - 1 <= 28
    assert tree.draw is Draw.WITHOUT_REPLACEMENT
    assert list(tree.parents) == sorted(tree.parents)


def test_a_smaller_budget_takes_the_leading_levels_that_fit_whole(uneven: str) -> None:
    rule = cache(random_rule(5, 2))
    sizes = [1, 4, 7, 10]
    for spec, shape, ends in ((uneven, UNEVEN, sizes), ("template:mcsd", SHAPES["mcsd"], [1, 5, 13, 29])):
        for nodes, depth in itertools.product((1, 2, 3, 4, 5, 6, 7, 9, 10, 12, 13, 14, 28, 29, 30), range(5)):
            tree = grown(spec, rule, SeededSampler(nodes, depth), Budget(nodes, depth), root=3)
            levels = max(level for level, end in enumerate(ends) if level <= depth and end <= nodes)
            assert tree.parents == shape[: ends[levels]]
            assert int(tree.tokens[0]) == 3


def test_whichever_level_it_stops_at_its_mask_is_a_part_of_the_whole(uneven: str) -> None:
    policy = TREES.build(uneven)
    rule, whole = random_rule(5, 2), topology(UNEVEN)
    assert policy.shape is whole
    for depth, nodes in enumerate((1, 4, 7, 10)):
        tree = grown(uneven, rule, GreedySampler(), Budget(99, depth))
        assert len(tree) == nodes
        assert tree.topology.ancestors.data_ptr() == whole.ancestors.data_ptr()
        assert torch.equal(tree.topology.ancestors, Topology(tree.parents).ancestors)


@pytest.mark.parametrize(("spec", "nodes"), [("chain:5", (1, 2, 3, 4, 5, 6)), ("rsd-c:3,2", (1, 4, 10))])
def test_so_is_that_of_a_chain_and_of_constant_branching(spec: str, nodes: tuple[int, ...]) -> None:
    places = set()
    for depth, size in enumerate(nodes):
        tree = grown(spec, random_rule(5, 2), SeededSampler(0, 0), Budget(99, depth))
        assert len(tree) == size
        places.add(tree.topology.ancestors.data_ptr())
    assert len(places) == 1


# Draws


def test_siblings_come_in_the_order_of_draws_without_replacement(tmp_path: Path) -> None:
    # The first drawn has a child, the second none: the shape follows the draws, whatever the tokens are.
    write_template(tmp_path / "t.json", (-1, 0, 0, 1), "")
    rule = cache(random_rule(4, 9, spread=1.0))
    counts: Counter[tuple[int, ...]] = Counter()
    for seed in range(500):
        tree = grown(f"template:{tmp_path}/t.json", rule, SeededSampler(seed, 0))
        assert tree.parents == (-1, 0, 0, 1)
        counts[tuple(tree.tokens[1:].tolist())] += 1
    probs = {
        (s, t, x): mass * float(rule((s,))[x])
        for mass, (s, t) in without_replacement(rule(()).double().numpy(), 2)
        for x in range(4)
    }
    assert_law(counts, probs)


def test_q_is_the_very_law_that_the_children_of_a_node_were_drawn_from(uneven: str) -> None:
    for seed in range(10):
        rule = cache(random_rule(4, seed))
        tree = grown(uneven, rule, SeededSampler(seed, 0))
        assert tree.q is not None
        for node, children in enumerate(tree.children):
            if children:
                assert torch.equal(tree.q[node], rule(tuple(tokens_to(tree, node))))


def test_a_sibling_is_never_drawn_from_masses_that_float32_cannot_divide_by() -> None:
    probs = torch.tensor([1.0, 2e-39, 1e-39, 1e-25, 0.0])
    tree = grown("template:mcsd", lambda prefix: probs, SeededSampler(0, 0), Budget(5, 1))
    assert tree.tokens[1:].tolist() == [0, 3]
    assert tree.q is not None
    assert tree.q[0, [1, 2, 4]].tolist() == [0, 0, 0]


def test_what_a_law_cannot_fill_stays_away_with_all_below_it(uneven: str) -> None:
    def rule(prefix: tuple[int, ...]) -> Tensor:  # two tokens at the root, one below the first, three elsewhere
        masses = {0: [0.6, 0.4, 0.0], 1: [1.0, 0.0, 0.0]}.get(len(prefix), [0.5, 0.3, 0.2])
        return torch.tensor(masses)

    tree = grown(uneven, rule, GreedySampler())
    assert paths_of(tree) == [(), (0,), (1,), (0, 0), (0, 0, 0), (0, 0, 1)]
    asked, _, _ = requests(uneven, rule)
    assert asked == [[()], [(0,)], [(0, 0)]]


def test_a_level_is_one_pass_over_the_nodes_that_have_children(uneven: str) -> None:
    asked, _, tree = requests(uneven, random_rule(6, 1))
    every = paths_of(tree)
    assert asked == [[()], [every[1], every[3]], [every[4], every[6]]]
    assert requests(uneven, random_rule(6, 1), Budget(3, 9))[0] == []


def test_where_nothing_can_be_drawn_the_tree_ends() -> None:
    tree = grown("template:fork", lambda prefix: torch.zeros(4), GreedySampler())
    assert len(tree) == 1


def test_the_same_seed_gives_the_same_tree(uneven: str) -> None:
    rule: Rule = cache(random_rule(5, 3, spread=1.0))
    tokens = [tuple(grown(uneven, rule, SeededSampler(seed, 7)).tokens.tolist()) for seed in (1, 1, 2, 3, 4)]
    assert tokens[0] == tokens[1]
    assert len(set(tokens)) > 2


# Exactness


@pytest.mark.parametrize("name", FITTING)
def test_every_verifier_that_takes_it_keeps_the_law(name: str, tmp_path: Path) -> None:
    # Shapes in which the subtrees of siblings differ: below the first, below the last, and two deep below one.
    cases = [((-1, 0, 0, 1), 3, 2), ((-1, 0, 0, 2, 2), 3, 2), ((-1, 0, 0, 1, 1, 2, 3), 2, 3)]
    for number, (parents, vocabulary, depth) in enumerate(cases):
        write_template(tmp_path / f"{number}.json", parents, "")
        for sigma in (0.5, 2.0):
            instance = Instance.random(vocabulary, depth, 2, sigma, (number, 3))
            drafts = Drafts.grown(TREES.build(f"template:{tmp_path}/{number}.json"), instance)
            assert float(drafts.weights.sum()) == pytest.approx(1.0)
            distance, efficiency = emitted(VERIFIERS.build(name), drafts)
            assert distance < 1e-9
            assert efficiency > 1


@pytest.mark.parametrize("name", FITTING)
def test_texts_are_those_of_plain_decoding(name: str, uneven: str) -> None:
    # Greedy with every verifier, and with `match` sampled ones seed for seed.
    assert_writes_like_plain_decoding(lambda truth: build_drafter("disturbed:1", uneven), VERIFIERS.build(name))


def test_with_a_stop_it_may_end_early(uneven: str) -> None:
    never, always = (build_drafter("disturbed", f"{uneven},stop=confidence:{t}") for t in ("0.0001", "0.9999"))
    for drafter in (never, always):
        assert_writes_like_plain_decoding(lambda truth, drafter=drafter: drafter, VERIFIERS.build("match"))  # type: ignore[misc]
    assert always.passes < never.passes  # type: ignore[attr-defined]


# Files


def test_what_is_written_is_read_again(tmp_path: Path) -> None:
    file = tmp_path / "tree.json"
    write_template(file, UNEVEN, "für Tests")
    assert read_template(file) == UNEVEN
    assert json.loads(file.read_text(encoding="utf-8")) == {
        "branchwise": "template",
        "version": 1,
        "parents": list(UNEVEN),
        "note": "für Tests",
    }
    assert json.loads(as_json((-1, 0), "")) | {"parents": [-1, 0]} == json.loads(as_json((-1, 0), ""))
    with pytest.raises(UsageError, match="cannot be written: No such file or directory"):
        write_template(tmp_path / "nowhere" / "t.json", UNEVEN, "")


GOOD: dict[str, Any] = {"branchwise": "template", "version": 1, "parents": [-1, 0, 0, 1]}


@pytest.mark.parametrize(
    ("content", "sentence"),
    [
        (b'{"branch', "is not JSON"),
        (b"\xff\xfe\x00", "is not JSON"),
        (b"[" * 100_000, "is not JSON"),
        (b"7", "is JSON of another kind"),
        (GOOD | {"branchwise": "tune"}, "is JSON of another kind"),
        (GOOD | {"version": 2}, "has the version 2, and this Branchwise reads 1"),
        (GOOD | {"parents": None}, "has no list of parents"),
        (GOOD | {"parents": [-1, 0, "0"]}, "has no list of parents"),
        (GOOD | {"parents": [-1, False]}, "has no list of parents"),
        (GOOD | {"parents": [-1]}, "at least one node below the root"),
        (GOOD | {"parents": [0, 0]}, "must begin with -1 for the root"),
        (GOOD | {"parents": [-1, 1]}, "needs an earlier one as its parent"),
        (GOOD | {"parents": [-1, -1, 0]}, "needs an earlier one as its parent"),
        (GOOD | {"parents": [-1, 0, 1, 0]}, "is not in level order"),
        (GOOD | {"parents": [-1, 0, 0, 2, 1]}, "is not in level order"),
        (GOOD | {"parents": list(range(-1, 2000))}, "has 2001 nodes, more than the 1024"),
    ],
)
def test_a_damaged_file_is_a_sentence(content: Any, sentence: str, tmp_path: Path) -> None:
    file = tmp_path / "tree.json"
    file.write_bytes(content if isinstance(content, bytes) else json.dumps(content).encode())
    with pytest.raises(UsageError) as caught:
        TREES.build(f"template:{file}")
    assert sentence in str(caught.value)
    assert str(caught.value).endswith("tree.json`.")
    assert "branchwise tree optimise" in str(caught.value)


def test_a_missing_file_or_a_folder_is_a_sentence(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match=r"none\.json cannot be read: No such file"):
        TREES.build(f"template:{tmp_path}/none.json")
    with pytest.raises(UsageError, match="cannot be read: Is a directory"):
        TREES.build(f"template:{tmp_path}/")


def test_an_unknown_name_is_told_the_nearest() -> None:
    with pytest.raises(UnknownName, match=r"Unknown template 'nope'. Known: fork, mcsd, sequoia-24, or a FILE.json"):
        TREES.build("template:nope")
    with pytest.raises(UnknownName, match="Did you mean 'sequoia-24'"):
        find_shape("sequoia-42")
    with pytest.raises(BranchwiseError, match="needs 'shape'"):
        TREES.build("template")
