"""A tree by simulation, against the rule written out slowly."""

from __future__ import annotations

import itertools
import math
import random
from collections import defaultdict
from functools import cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from branchwise.audit.exact import TOLERANCE, emitted
from branchwise.audit.instances import Drafts, Instance
from branchwise.core.sampling import SamplingParams
from branchwise.core.sequence import SequenceState
from branchwise.core.tree import Draw
from branchwise.draft import TREES, build_drafter
from branchwise.draft.base import Budget
from branchwise.draft.builder import Candidate, TreeBuilder
from branchwise.draft.policies.puct import WIDTH, SearchNode, select
from branchwise.draft.policies.topk import TopKRequest
from branchwise.draft.sampler import GreedySampler, SeededSampler
from branchwise.errors import UsageError
from branchwise.verify import VERIFIERS
from tests.conformance.test_drafters import assert_writes_like_plain_decoding
from tests.strategies import grown, random_rule, tokens_to

Path = tuple[int, ...]
Memory = dict[Path, list[tuple[int, float]]]
AMPLE = Budget(nodes=999, depth=99)


def random_memory(seed: int, tokens: int = 5, ties: bool = False) -> Memory:
    """What is known of every path up to three tokens: sometimes nothing, never all, of the root always something."""
    rng, memory = random.Random(seed), {}
    for length in range(4):
        for path in itertools.product(range(tokens), repeat=length):
            kept = rng.sample(range(tokens), rng.randint(0 if path else 1, tokens))
            weights = [1 + rng.randrange(2) if ties else rng.random() + 0.01 for _ in kept]
            whole = sum(weights) + 0.5
            memory[path] = sorted(((t, w / whole) for t, w in zip(kept, weights, strict=True)), key=lambda f: -f[1])
    return memory


def looking(memory: Memory):  # type: ignore[no-untyped-def]
    return lambda path: [Candidate(token, mass, (*path, token)) for token, mass in memory.get(path, [])]


def paths_of(tree: TreeBuilder) -> list[Path]:
    return [tuple(tokens_to(tree, node)) for node in range(1, len(tree))]


def slow_tree(memory: Memory, root: int, nodes: int, simulations: int, length: int) -> list[Path]:
    """ADED's search with dictionaries of prefixes and the rule in full at every child."""
    visits: dict[Path, int] = defaultdict(int)
    earned: dict[Path, float] = defaultdict(float)
    stream = random.Random(root)

    def value(path: Path, token: int, prior: float) -> float:
        child = (*path, token)
        if not visits[child]:
            return math.inf
        explore = (32 + math.log((visits[path] + 8 + 1) / 8)) * prior * math.sqrt(visits[path]) / (1 + visits[child])
        return earned[child] / visits[child] + explore

    for _ in range(simulations):
        path: Path = ()
        masses: list[float] = []
        new = False
        while not new and len(path) < length and memory.get(path):
            token, mass = max(memory[path], key=lambda found: value(path, *found))
            path, new = (*path, token), not visits[*path, token]
            masses.append(mass)
        end = path
        while new and len(end) < length:
            at, drawn = stream.random(), None
            for token, mass in memory.get(end, []):
                at -= mass
                if at < 0:
                    drawn = token, mass
                    break
            if drawn is None:
                break
            end = (*end, drawn[0])
            masses.append(drawn[1])
        for size in range(len(path) + 1):
            visits[path[:size]] += 1
            earned[path[:size]] += sum(masses)
    # Among equals the order of the heap: whoever's parent joined first, and then the better sibling.
    tree: list[Path] = [()]
    while len(tree) <= nodes:
        rest = [
            ((*path, token), number, rank)
            for number, path in enumerate(tree)
            for rank, (token, _) in enumerate(memory.get(path, []))
            if visits[*path, token] and (*path, token) not in tree
        ]
        if not rest:
            break
        tree.append(min(rest, key=lambda found: (-visits[found[0]], found[1], found[2]))[0])
    return tree[1:]


@given(st.integers(0, 200), st.integers(1, 30), st.integers(1, 60), st.integers(1, 5), st.booleans())
def test_the_tree_is_that_of_the_rule_written_out(
    seed: int, nodes: int, simulations: int, length: int, ties: bool
) -> None:
    memory, root = random_memory(seed, 3, ties), seed % 7
    tree = TREES.build(f"puct:{nodes},simulations={simulations},length={length}").lay(root, (), looking(memory), AMPLE)
    assert tree.tokens[0] == root
    assert paths_of(tree) == slow_tree(memory, root, nodes, simulations, length)


def test_the_papers_size_is_the_same_too() -> None:
    for seed in range(4):
        memory = random_memory(seed)
        tree = TREES.build("puct:64").lay(9, (), looking(memory), AMPLE)
        assert paths_of(tree) == slow_tree(memory, 9, 64, 150, 4)


@pytest.mark.parametrize("visits", [1, 5, 150])
def test_the_weight_of_masses_is_the_papers_to_the_last_digit(visits: int) -> None:
    node, earning, promising = (SearchNode(Candidate(0, 0.0, None)) for _ in range(3))
    node.visits, node.children = visits, [earning, promising]
    promising.bonus = 1.0
    weight = (32 + math.log((visits + 8 + 1) / 8)) * math.sqrt(visits)
    earning.mean = weight * (1 + 1e-9)
    assert select(node) is earning
    earning.mean = weight * (1 - 1e-9)
    assert select(node) is promising


def test_what_leads_to_surer_tokens_is_visited_more() -> None:
    # Two tokens of one mass: behind the second the text is known, behind the first anything may come. A reward that is
    # always the same, as in the paper's code, would not tell them apart.
    memory: Memory = {(): [(0, 0.1), (1, 0.1)], (0,): [(t, 0.001) for t in range(9)]}
    memory |= {(1,): [(2, 0.9)], (1, 2): [(3, 0.9)], (1, 2, 3): [(4, 0.9)]}
    tree = TREES.build("puct:1,simulations=100").lay(0, (), looking(memory), AMPLE)
    assert paths_of(tree) == [(1,)]


def test_the_root_decides_the_rollouts_and_nothing_else_does() -> None:
    policy, state, shapes = TREES.build("puct:8,simulations=60"), random.getstate(), set()
    memory = random_memory(0, ties=True)
    for root in range(20):
        one, same = (policy.lay(root, (), looking(memory), AMPLE) for _ in range(2))
        assert one == same
        shapes.add(tuple(paths_of(one)))
    assert len(shapes) > 1, "rollouts are drawn"
    assert random.getstate() == state


def test_one_way_to_go_on_is_a_chain() -> None:
    memory: Memory = {tuple(range(n)): [(n, 0.5)] for n in range(9)}
    assert paths_of(TREES.build("puct:24").lay(0, (), looking(memory), AMPLE)) == [
        (0,),
        (0, 1),
        (0, 1, 2),
        (0, 1, 2, 3),
    ]


def test_nothing_known_is_a_root_alone_and_one_look() -> None:
    asked = []

    def after(place: object) -> list[Candidate]:
        asked.append(place)
        return []

    tree = TREES.build("puct:24").lay(4, None, after, AMPLE)
    assert tree.tokens == [4]
    assert asked == [None]


def test_every_budget_is_kept() -> None:
    memory = random_memory(1)
    policy = TREES.build("puct:20,simulations=40")
    for nodes in range(1, 26):
        for depth in range(6):
            tree = policy.lay(2, (), looking(memory), Budget(nodes, depth))
            assert paths_of(tree) == (slow_tree(memory, 2, min(20, nodes - 1), 40, min(4, depth)) if depth else [])
            assert max(tree.depths) <= depth


def test_who_proposed_a_token_is_kept() -> None:
    def after(path: Path) -> list[Candidate]:
        return [Candidate(0, 0.5, (*path, 0), "one"), Candidate(1, 0.3, (*path, 1), "other")]

    tree = TREES.build("puct:10,simulations=40").lay(0, (), after, AMPLE)
    assert {tree.tokens[node]: source for node, source in tree.sources.items()} == {0: "one", 1: "other"}
    assert set(tree.sources) == set(range(1, len(tree)))


# Over distributions


def test_over_laws_the_tree_is_the_same_and_no_law_is_asked_for_twice() -> None:
    for seed in range(5):
        rule, asked = cache(random_rule(15, seed)), []
        tree = grown("puct:12,simulations=25,length=3", rule, GreedySampler(), root=seed, asked=asked)

        def after(path: Path, rule=rule) -> list[Candidate]:  # type: ignore[no-untyped-def]
            [likely] = TopKRequest.of(GreedySampler(), rule(path)[None], WIDTH).alone()
            return [Candidate(token, math.exp(value), (*path, token)) for token, value in likely]

        layout = TREES.build("puct:12,simulations=25,length=3").lay(seed, (), after, AMPLE).finish(Draw.FIXED)
        assert torch.equal(tree.tokens, layout.tokens)
        assert tree.parents == layout.parents
        assert [nodes for nodes in asked if len(nodes) != 1] == []
        assert len({nodes[0] for nodes in asked}) == len(asked)


def test_its_one_tree_keeps_the_law_of_the_target() -> None:
    for seed in range(3):
        drafts = Drafts.grown(TREES.build("puct:4,simulations=20,length=2"), Instance.random(3, 2, 2, 1.0, (seed,)))
        assert len(drafts.trees) == 1
        distance, efficiency = emitted(VERIFIERS.build("match"), drafts)
        assert distance < TOLERANCE
        assert efficiency > 1


def test_the_noise_that_judges_has_no_part_in_it() -> None:
    rule = cache(random_rule(5, 3))
    trees = [grown("puct:12,simulations=20", rule, SeededSampler(seed, 0)) for seed in range(3)]
    texts = [SequenceState([1, 2, 3, 1, 2, 4, 1, 2], SamplingParams(temperature=1.0, seed=seed)) for seed in range(3)]
    trees += [build_drafter("trigram", "puct:12").draft([text], [AMPLE])[0] for text in texts]
    for tree, like in zip(trees, [trees[0]] * 3 + [trees[3]] * 3, strict=True):
        assert torch.equal(tree.tokens, like.tokens)
        assert tree.parents == like.parents
        assert tree.draw is Draw.FIXED
        assert len(tree) > 2


@pytest.mark.parametrize("draft", ["trigram", "disturbed:1"])
def test_texts_are_those_of_plain_decoding(draft: str) -> None:
    spec = "puct:9,simulations=12,length=3"
    assert_writes_like_plain_decoding(lambda truth: build_drafter(draft, spec), VERIFIERS.build("match"))


@pytest.mark.parametrize("spec", ["puct:0", "puct:8,simulations=0", "puct:8,length=0"])
def test_a_search_that_is_none_is_a_sentence(spec: str) -> None:
    with pytest.raises(UsageError, match="as in puct:24,simulations=150"):
        TREES.build(spec)


def test_it_needs_a_number_of_nodes() -> None:
    with pytest.raises(UsageError, match="needs 'nodes', as in puct:NODES,simulations=150,length=4"):
        TREES.build("puct")
