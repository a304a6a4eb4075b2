"""The lossy rule: exact with one branch, biased with more by as much as it says, and the longest run wins."""

from __future__ import annotations

import itertools
from collections import defaultdict
from dataclasses import replace

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from torch import Tensor
from typer.testing import CliRunner

from branchwise.audit.enumeration import Enumerator, outcomes
from branchwise.audit.exact import RootedFork, emitted_by_forks
from branchwise.audit.instances import Drafts, ExactProbs, Instance
from branchwise.cli import app
from branchwise.core.batch import TABLES, TreeBatch
from branchwise.core.rng import SeededChance
from branchwise.core.sampling import SamplingParams
from branchwise.core.sequence import SequenceState
from branchwise.core.target_probs import WarpedProbs
from branchwise.core.tree import DraftTree, Draw
from branchwise.cuda.verify_graph import GraphInputs, Numbers, as_program, trace
from branchwise.draft import TREES
from branchwise.errors import UsageError
from branchwise.verify import VERIFIERS, Verdict, Verdicts
from branchwise.verify.longest import Longest, after_stop
from tests.conformance.test_verifiers import WORLDS
from tests.strategies import tokens_to, worlds

TOLERANCE = 1e-9


# How far it is from the target's distribution


@pytest.mark.parametrize("known", [True, False], ids=["distribution known", "distribution unknown"])
@pytest.mark.parametrize("where", WORLDS)
def test_one_branch_is_speculative_sampling_and_lossless(where: str, known: bool) -> None:
    for lazy in (True, False):
        assert emitted_by_forks(WORLDS[where], 1, known=known, lazy=lazy)[0] < TOLERANCE


@settings(max_examples=25)
@given(worlds())
def test_one_branch_is_lossless_on_any_laws_and_host_and_device_agree_on_more(instance: Instance) -> None:
    for known in (True, False):
        assert emitted_by_forks(instance, 1, known=known)[0] < TOLERANCE
        on_host, on_device = (emitted_by_forks(instance, 2, known=known, lazy=lazy) for lazy in (True, False))
        assert on_host == pytest.approx(on_device, abs=1e-12)


def test_the_distance_is_there_and_grows_with_the_branches_and_with_a_worse_draft() -> None:
    found = {
        (sigma, width): np.mean([emitted_by_forks(Instance.random(3, 2, 2, sigma, (s,)), width)[0] for s in range(4)])
        for sigma in (0.3, 1.0, 2.0)
        for width in (1, 2, 3)
    }
    for sigma in (0.3, 1.0, 2.0):
        assert found[sigma, 1] < TOLERANCE
        assert 0.005 < found[sigma, 2] < found[sigma, 3]
    for width in (2, 3):
        assert found[0.3, width] < found[1.0, width] < found[2.0, width]
    assert found[2.0, 3] > 0.1


def test_the_distance_where_only_one_first_token_is_continued_well_by_hand() -> None:
    # The draft knows what follows token 0 and is always wrong behind the others. Token 0 is kept whenever it is among
    # the first: always with three branches; with two, unless it is the one left out.
    follow = np.array([[0.0, 1.0, 0.0], [1.0, 0.0, 0.0], [1.0, 0.0, 0.0]])
    p = (np.array([[0.2, 0.4, 0.4]]), follow, np.full((9, 3), 1 / 3))
    q = (p[0], np.array([[0.0, 1.0, 0.0], [0.0, 0.0, 1.0], [0.0, 1.0, 0.0]]))
    instance = Instance(p, q, paths=3)
    assert emitted_by_forks(instance, 3)[0] == pytest.approx(0.8)
    left_out = 2 * 0.4 * 0.4 / 0.6
    assert emitted_by_forks(instance, 2)[0] == pytest.approx(1 - left_out - 0.2)
    assert emitted_by_forks(instance, 1)[0] == pytest.approx(0)


def test_it_accepts_more_than_one_branch_alone() -> None:
    # What it is lossy for.
    instance = Instance.random(3, 3, 2, 1.0, (0,))
    efficiencies = [emitted_by_forks(instance, width)[1] for width in (1, 2)]
    assert 1 < efficiencies[0] < efficiencies[1] < 3


# The rule, written down once more without tensors


def slow_truth(tree: DraftTree, p: list[list[float]]) -> dict[Verdict, float]:
    """Every verdict of one tree with its probability; p by node."""
    tokens, children, q = tree.tokens.tolist(), tree.topology.children, tree.q
    branches = []
    for first in children[0]:
        branch = [first]
        while children[branch[-1]]:
            branch += children[branch[-1]]
        branches.append(branch)

    def runs(branch: list[int]) -> list[float]:
        """The probability of every length of the run."""
        alive, found, parent = 1.0, [], 0
        for node in branch:
            odds = min(1.0, p[parent][tokens[node]] / float(q[parent, tokens[node]]))  # type: ignore[index]
            odds = 1.0 if parent == 0 and tree.trusted else odds
            found.append(alive * (1 - odds))
            alive, parent = alive * odds, node
        return [*found, alive]

    probs: dict[Verdict, float] = defaultdict(float)
    for lengths in itertools.product(*(range(len(branch) + 1) for branch in branches)):
        weight = float(np.prod([runs(branch)[length] for branch, length in zip(branches, lengths, strict=True)]))
        best = max(lengths)
        kept = branches[lengths.index(best)][:best]
        if kept:
            probs[Verdict((0, *kept[:-1]), tokens[kept[-1]])] += weight
        elif weight > 0:
            left = [max(mass - float(other), 0) for mass, other in zip(p[0], q[0], strict=True)]  # type: ignore[index]
            for token, mass in enumerate(left):
                probs[Verdict((0,), token)] += weight * mass / sum(left)
    return {verdict: weight for verdict, weight in probs.items() if weight > 1e-15}


@pytest.mark.parametrize("lazy", [True, False], ids=["host", "device"])
@pytest.mark.parametrize("known", [True, False], ids=["distribution known", "distribution unknown"])
@pytest.mark.parametrize("width", [1, 2, 3])
def test_every_verdict_is_that_of_the_slow_truth(width: int, known: bool, lazy: bool) -> None:
    instance = Instance.random(3, 2, 2, 1.5, (7,))
    drafts = Drafts.grown(RootedFork(width, 2, torch.from_numpy(instance.p[0][0]) if known else None), instance)
    found: list[dict[Verdict, float]] = [defaultdict(float) for _ in drafts.trees]

    def verify(rows: Tensor, chance: Enumerator) -> Verdicts:
        return Longest()(drafts.batch.take(rows), ExactProbs(drafts.p[rows], lazy=lazy), chance)

    for outcome in outcomes(verify, len(drafts.trees)):
        for row, weight, verdict in zip(
            outcome.rows.tolist(), outcome.weights.tolist(), outcome.verdicts.read(), strict=True
        ):
            found[row][verdict] += weight
    for row, tree in enumerate(drafts.trees):
        seen = {verdict: weight for verdict, weight in found[row].items() if weight > 1e-15}
        assert seen == pytest.approx(slow_truth(tree, drafts.p[row].tolist()), abs=1e-12)


# By hand


V = 4


def fork(*branches: list[int], trusted: bool = True, root: int = 0) -> DraftTree:
    """Branches of one length, drawn from even distributions."""
    width, depth = len(branches), len(branches[0])
    tokens = [root, *(branch[level] for level in range(depth) for branch in branches)]
    parents = (-1, *(max(node - width, 0) for node in range(1, len(tokens))))
    return DraftTree(
        torch.tensor(tokens), parents, Draw.FORK, torch.full((max(parents) + 1, V), 1 / V), trusted=trusted
    )


def sure(tree: DraftTree, wanted: dict[int, int]) -> Tensor:
    """(nodes, V): distributions that are certain of a token: of the given one after some nodes, of the last after the
    others."""
    return torch.eye(V)[[wanted.get(node, V - 1) for node in range(len(tree))]]


def verdict_of(tree: DraftTree, p: Tensor, *, lazy: bool = True) -> Verdict:
    chance = SeededChance(torch.tensor([3]), torch.tensor([5]))
    return Longest()(TreeBatch([tree]), ExactProbs(p[None], lazy=lazy), chance).read()[0]


@pytest.mark.parametrize("lazy", [True, False], ids=["host", "device"])
def test_the_longest_run_wins_and_its_last_token_is_the_next_root(lazy: bool) -> None:
    tree = fork([0, 1, 2], [1, 1, 2], [2, 1, 2])  # nodes 1 2 3, then 4 5 6, then 7 8 9
    assert verdict_of(tree, sure(tree, {1: 1, 2: 1, 5: 2}), lazy=lazy) == Verdict((0, 2, 5), 2)
    assert verdict_of(tree, sure(tree, {1: 1, 3: 1}), lazy=lazy) == Verdict((0, 1), 1), "the first of two"
    assert verdict_of(tree, sure(tree, {5: 2}), lazy=lazy) == Verdict((0,), 0), "a later success does not count"


@pytest.mark.parametrize("lazy", [True, False], ids=["host", "device"])
def test_a_first_level_of_the_target_s_own_is_not_tested(lazy: bool) -> None:
    tree = fork([0, 1], [1, 1])
    p = sure(tree, {0: 1, 1: 1})
    assert verdict_of(tree, p, lazy=lazy) == Verdict((0, 1), 1)
    assert verdict_of(replace(tree, trusted=False), p, lazy=lazy) == Verdict((0,), 1)
    assert verdict_of(replace(tree, trusted=False), sure(tree, {0: 3}), lazy=lazy) == Verdict((0,), 3)


@pytest.mark.parametrize("lazy", [True, False], ids=["host", "device"])
def test_a_tree_without_branches_takes_the_law_that_is_known(lazy: bool) -> None:
    bare = DraftTree(torch.tensor([0]), (-1,), Draw.FORK)
    p = torch.eye(V)[[2]]
    assert verdict_of(bare, p, lazy=lazy) == Verdict((0,), 2)
    assert verdict_of(replace(bare, q=torch.eye(V)[[1]], trusted=True), p, lazy=lazy) == Verdict((0,), 1)


def test_what_is_wanted_after_a_stop() -> None:
    p, q = torch.tensor([0.5, 0.3, 0.2]), torch.tensor([0.2, 0.7, 0.1])
    assert torch.allclose(after_stop(p, q, torch.tensor(True)), torch.tensor([0.3, 0.0, 0.1]))
    assert torch.equal(after_stop(p, q, torch.tensor(False)), p)
    assert torch.equal(after_stop(p, p, torch.tensor(True)), p), "a rejection that only rounding can make"


# Batches


SAMPLING = [SamplingParams(temperature=1.0), SamplingParams(), SamplingParams(temperature=0.7), SamplingParams()]


def batch_of(seed: int, *, same_shape: bool = False) -> tuple[list[DraftTree], list[SequenceState], Tensor]:
    """Forks of several shapes, trusted and not, and one without branches; logits for their nodes."""
    rng = np.random.default_rng(seed)
    shapes = [(3, 2)] * 4 if same_shape else [(3, 2), (1, 3), (2, 1), (2, 3)]
    trees = []
    for row, (width, depth) in enumerate(shapes):
        firsts = rng.permutation(V)[:width].tolist()
        branches = [[first, *rng.integers(0, V, depth - 1).tolist()] for first in firsts]
        trees.append(fork(*branches, trusted=bool((row + seed) % 2)))
    if not same_shape:
        trees.append(DraftTree(torch.tensor([1]), (-1,), Draw.FORK))
    sequences = [SequenceState([0], replace(SAMPLING[row % 4], seed=row)) for row in range(len(trees))]
    nodes = max(map(len, trees))
    return trees, sequences, torch.from_numpy(rng.standard_normal((len(trees), nodes, V))).float() * 2


def verdicts(
    trees: list[DraftTree], sequences: list[SequenceState], logits: Tensor, seeds: list[int], lazy: bool
) -> list[Verdict]:
    batch = TreeBatch(trees)
    probs = WarpedProbs(logits[:, : batch.nodes], batch, sequences)
    probs.lazy = lazy
    return Longest()(batch, probs, SeededChance(torch.tensor(seeds), torch.tensor(seeds) + 2)).read()


@pytest.mark.parametrize("lazy", [True, False], ids=["host", "device"])
def test_a_batch_gives_each_text_what_it_gets_alone(lazy: bool) -> None:
    lengths = set()
    for seed in range(20):
        trees, sequences, logits = batch_of(seed)
        seeds = [10 * seed + row for row in range(len(trees))]
        together = verdicts(trees, sequences, logits, seeds, lazy)
        alone = [
            verdicts([trees[row]], [sequences[row]], logits[row : row + 1], [seeds[row]], lazy)[0]
            for row in range(len(trees))
        ]
        assert together == alone == verdicts(trees, sequences, logits, seeds, not lazy)
        lengths |= {len(verdict.path) for verdict in together}
        for tree, verdict in zip(trees, together, strict=True):
            assert tuple(tree.topology.path(verdict.path[-1])) == verdict.path
    assert lengths == {1, 2, 3}


def test_a_greedy_text_keeps_the_longest_run_of_the_target_s_best_tokens() -> None:
    for seed in range(20):
        trees, sequences, logits = batch_of(seed)
        found = verdicts(trees, sequences, logits, list(range(5)), True)
        for row in (1, 3):
            tree, best = trees[row], logits[row].argmax(dim=-1).tolist()
            probs = slow_truth(tree, torch.eye(V)[best].tolist())
            assert list(probs) == [found[row]], "no coin decides"


def test_traced_on_one_batch_it_serves_every_batch_of_the_same_shapes() -> None:
    # Catches Python that looks at values, which forks are trusted among them.
    sampled = [SequenceState([0], SamplingParams(temperature=1.0, seed=row)) for row in range(4)]

    def inputs(trees: list[DraftTree], logits: Tensor) -> GraphInputs:
        batch = TreeBatch(trees)
        assert batch.q is not None
        return GraphInputs(Numbers(batch, chance, TABLES, torch.device("cpu")).on_device, logits, batch.q)

    chance = SeededChance(torch.arange(4), torch.arange(4) + 2)
    first, _, logits = batch_of(0, same_shape=True)
    probs = WarpedProbs(logits, TreeBatch(first), sampled)
    probs.lazy = False
    traced = trace(as_program(Longest(), TreeBatch(first), probs), inputs(first, logits))
    for seed in range(8):
        trees, _, logits = batch_of(seed, same_shape=True)
        found = Verdicts.written(traced(*inputs(trees, logits).flat)).read()
        assert found == verdicts(trees, sampled, logits, list(range(4)), True)


# Nobody meets it by accident


def test_whatever_is_not_lossless_says_so_in_its_name() -> None:
    lossy = {name for name in VERIFIERS if not getattr(VERIFIERS.find(name), "lossless", True)}
    assert lossy == {"lossy-longest"}
    for name in VERIFIERS:
        assert (Draw.FORK in VERIFIERS.find(name).accepts) == (name in lossy)
        assert ("lossy" in name) == (name in lossy)
    assert all(("lossy" in name) == (TREES.find(name).draw is Draw.FORK) for name in TREES if name.startswith("fork"))


def test_the_audit_of_verifiers_does_not_pretend_to_prove_it() -> None:
    found = CliRunner().invoke(app, ["audit", "verifiers", "--verify", "lossy-longest"])
    assert isinstance(found.exception, UsageError)
    assert str(found.exception) == (
        "Verifier 'lossy-longest' is lossy, there is nothing to prove; `branchwise audit methods improved-mcsd-lossy` "
        "measures its distance."
    )


@pytest.mark.parametrize(
    ("tree", "message"),
    [
        (lambda: replace(fork([0, 1], [1, 2]), parents=(-1, 0, 0, 2, 1)), "one chain a branch"),
        (lambda: replace(fork([0, 1], [1, 2]), parents=(-1, 0, 0, 1, 1)), "one chain a branch"),
        (lambda: replace(fork([0, 1]), draw=Draw.WITHOUT_REPLACEMENT), "Only a fork can be trusted"),
        (lambda: DraftTree(torch.tensor([0]), (-1,), Draw.FORK, trusted=True), "carries the distribution"),
    ],
)
def test_what_is_no_fork_is_refused(tree, message: str) -> None:  # type: ignore[no-untyped-def]
    with pytest.raises(UsageError, match=message):
        tree()


def test_the_nodes_of_a_fork_stand_branch_by_branch_in_every_level() -> None:
    tree = fork([0, 1, 2], [3, 2, 1])
    assert [tokens_to(tree, leaf) for leaf in (5, 6)] == [[0, 1, 2], [3, 2, 1]]
