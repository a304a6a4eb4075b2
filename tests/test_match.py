"""Match: against a recursive form that reads like its definition, against plain decoding, and against the exact
distribution."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Callable, Iterator, Sequence
from functools import cache

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from branchwise.core.batch import TreeBatch
from branchwise.core.rng import SeededChance
from branchwise.core.sampling import Context, SamplingParams, warp
from branchwise.core.sequence import SequenceState
from branchwise.core.target_probs import WarpedProbs
from branchwise.core.tree import DraftTree, Draw
from branchwise.verify import Verdict, Verdicts
from branchwise.verify.match import Match
from tests.strategies import path_trees, trees

VOCABULARY = 4
Tokens = tuple[int, ...]


@cache
def toy_logits(prefix: Tokens) -> Tensor:
    """(vocabulary,): a fixed random function of every token before, quantised so that ties occur."""
    generator = torch.Generator().manual_seed(hash(prefix) % (1 << 62))
    return torch.randn(VOCABULARY, generator=generator).mul(6).round().div(4)


def score(sequences: Sequence[SequenceState], batch: TreeBatch) -> WarpedProbs:
    """What a target would find: row i is what follows the path to node i. Padding holds nonsense."""
    logits = torch.full((len(batch), batch.nodes, VOCABULARY), float("nan"))
    for row, (sequence, tree) in enumerate(zip(sequences, batch.trees, strict=True)):
        for node in range(len(tree)):
            logits[row, node] = toy_logits((*sequence.tokens[:-1], *tree.tokens[tree.topology.path(node)].tolist()))
    return WarpedProbs(logits, batch, sequences)


def chance_for(sequences: Sequence[SequenceState]) -> SeededChance:
    seeds = torch.tensor([sequence.seed for sequence in sequences])
    return SeededChance(seeds, torch.tensor([len(sequence.tokens) - 1 for sequence in sequences]))


def verify(sequences: Sequence[SequenceState], drafted: Sequence[DraftTree]) -> list[Verdict]:
    batch = TreeBatch(drafted)
    return Match()(batch, score(sequences, batch), chance_for(sequences)).read()


def next_token(sequence: SequenceState, prefix: list[int]) -> int:
    """Plain decoding, one token at a time, with nothing of the tree in sight."""
    probs = warp(toy_logits(tuple(prefix))[None], [sequence.sampling], [Context(prefix, sequence.prompt_length)])
    if sequence.sampling.greedy:
        return int(probs.argmax())
    return int(SeededChance(torch.tensor([sequence.seed]), torch.tensor([len(prefix) - 1])).token(probs, 0))


def walk(tree: DraftTree, node: int, prefix: list[int], draw: Callable[[list[int]], int]) -> Verdict:
    """The slow truth: draw the target's token; if a child carries it, go on from there."""
    token = draw(prefix)
    for child, parent in enumerate(tree.parents):
        if parent == node and tree.tokens[child] == token:
            below = walk(tree, child, [*prefix, token], draw)
            return Verdict((node, *below.path), below.token)
    return Verdict((node,), token)


params = st.sampled_from(
    [
        SamplingParams(seed=1),
        SamplingParams(temperature=1.0, seed=2),
        SamplingParams(temperature=0.8, top_p=0.9, top_k=3, seed=3),
        SamplingParams(temperature=2.0, repetition_penalty=1.5, frequency_penalty=0.5, seed=-4),
        SamplingParams(presence_penalty=1.0, seed=5),
        SamplingParams(temperature=0.7, min_p=0.1, logit_bias={1: 1.0}, seed=2**70),
    ]
)
prompts = st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=5)


def rooted(tree: DraftTree, root: int) -> DraftTree:
    return DraftTree(torch.cat([torch.tensor([root]), tree.tokens[1:]]), tree.parents, tree.draw, tree.q, tree.leaves)


@st.composite
def skilled_trees(draw: st.DrawFn, sequence: SequenceState) -> DraftTree:
    """Any tree, or one that holds what will be written, among siblings that are wrong."""
    if draw(st.booleans()):
        return rooted(draw(trees(VOCABULARY)), sequence.root)
    tokens, parents, parent, prefix = [sequence.root], [-1], 0, list(sequence.tokens)
    for _ in range(draw(st.integers(0, 4))):
        token = next_token(sequence, prefix)
        prefix.append(token)
        before = draw(st.lists(st.integers(0, VOCABULARY - 1).filter(lambda t, token=token: t != token), max_size=2))
        after = draw(
            st.lists(st.integers(0, VOCABULARY - 1), max_size=2)
        )  # may repeat the true token: the first counts
        parents += [parent] * (len(before) + 1 + len(after))
        parent = len(tokens) + len(before)
        tokens += [*before, token, *after]
    return DraftTree(torch.tensor(tokens), tuple(parents))


@st.composite
def batches(draw: st.DrawFn, size: int = 3) -> tuple[list[SequenceState], list[DraftTree]]:
    sequences = [SequenceState(draw(prompts), draw(params)) for _ in range(draw(st.integers(1, size)))]
    for sequence in sequences:
        sequence.tokens += draw(st.lists(st.integers(0, VOCABULARY - 1), max_size=3))
    return sequences, [draw(skilled_trees(sequence)) for sequence in sequences]


@given(batches())
def test_a_verdict_is_that_of_the_recursive_form(batch: tuple[list[SequenceState], list[DraftTree]]) -> None:
    sequences, drafted = batch
    for sequence, tree, verdict in zip(sequences, drafted, verify(sequences, drafted), strict=True):
        assert verdict == walk(tree, 0, sequence.tokens, lambda prefix, s=sequence: next_token(s, prefix))


@given(batches(size=4))
def test_a_batch_gives_each_sequence_what_it_gets_alone(batch: tuple[list[SequenceState], list[DraftTree]]) -> None:
    sequences, drafted = batch
    alone = [verify([sequence], [tree])[0] for sequence, tree in zip(sequences, drafted, strict=True)]
    assert verify(sequences, drafted) == alone


@given(batches(size=1))
def test_greedy_keeps_the_longest_path_that_the_target_would_write(
    batch: tuple[list[SequenceState], list[DraftTree]],
) -> None:
    [sequence], [tree] = batch
    sequence = SequenceState(sequence.tokens)
    [verdict] = verify([sequence], [tree])
    written: list[int] = []
    for _ in range(tree.depth + 1):
        written.append(next_token(sequence, sequence.tokens + written))
    matching = [
        path
        for path in map(tree.topology.path, range(len(tree)))
        if tree.tokens[path[1:]].tolist() == written[: len(path) - 1]
    ]
    # Where siblings repeat a token the first is followed, so the longest path by tokens may not be the one taken.
    if len({(parent, int(token)) for parent, token in zip(tree.parents, tree.tokens, strict=True)}) == len(tree):
        assert list(verdict.path) == max(matching, key=len)
    assert list(verdict.path) in matching
    assert verdict.token == written[len(verdict.path) - 1]


Grow = Callable[[SequenceState, list[int]], DraftTree]


def no_skill(sequence: SequenceState, truth: list[int]) -> DraftTree:
    generator = torch.Generator().manual_seed(len(sequence.tokens))
    tokens = torch.randint(VOCABULARY, (7,), generator=generator)
    return rooted(DraftTree(tokens, (-1, 0, 0, 1, 1, 2, 3)), sequence.root)


def all_truth(sequence: SequenceState, truth: list[int]) -> DraftTree:
    return DraftTree.chain([sequence.root, *truth[:3]])


def truth_among_siblings(sequence: SequenceState, truth: list[int]) -> DraftTree:
    wrong = [(token + 1) % VOCABULARY for token in truth[:2]]
    return DraftTree(torch.tensor([sequence.root, wrong[0], truth[0], wrong[1], truth[1]]), (-1, 0, 0, 2, 2))


def adversary(sequence: SequenceState, truth: list[int]) -> DraftTree:
    """Everything but the truth at first, and the truth below the wrong token."""
    wrong = [token for token in range(VOCABULARY) if token != truth[0]]
    return DraftTree(torch.tensor([sequence.root, *wrong, truth[1], truth[0]]), (-1, 0, 0, 0, 1, 2))


def lookalike(sequence: SequenceState, truth: list[int]) -> DraftTree:
    """The true token one level too deep, where its noise would be another position's."""
    return DraftTree.chain([sequence.root, (truth[0] + 1) % VOCABULARY, truth[0], truth[1]])


@pytest.mark.parametrize("grow", [no_skill, all_truth, truth_among_siblings, adversary, lookalike])
@pytest.mark.parametrize("temperature", [0.0, 0.8, 1.0, 5.0])
@pytest.mark.parametrize(
    "options", [{}, {"top_p": 0.9}, {"frequency_penalty": 0.7, "repetition_penalty": 1.2}], ids=str
)
def test_with_the_same_seed_the_output_equals_plain_decoding(
    grow: Grow, temperature: float, options: dict[str, float]
) -> None:
    length = 24
    for seed in range(3):
        sampling = SamplingParams(temperature=temperature, seed=seed, **options)  # type: ignore[arg-type]
        plain = SequenceState([1, 2, 3], sampling)
        for _ in range(length + 4):
            plain.tokens.append(next_token(plain, plain.tokens))
        sequence, steps = SequenceState([1, 2, 3], sampling), 0
        while len(sequence.output) < length:
            tree = grow(sequence, plain.output[len(sequence.output) :])
            [verdict] = verify([sequence], [tree])
            sequence.tokens += [*tree.tokens[list(verdict.path[1:])].tolist(), verdict.token]
            steps += 1
            assert sequence.output == plain.output[: len(sequence.output)]
        if grow is all_truth:
            assert steps == length // 4
        if grow in (adversary, lookalike):
            assert steps == length


def test_a_one_node_tree_is_plain_decoding() -> None:
    for seed in range(20):
        sequence = SequenceState([1, 2], SamplingParams(temperature=1.0, seed=seed))
        assert verify([sequence], [DraftTree.root(2)]) == [Verdict((0,), next_token(sequence, sequence.tokens))]


def test_any_draw_is_accepted_but_the_lossy_one() -> None:
    # Forks continue a step that ended without a token of the target; only the lossy rule ends steps so.
    assert Match.accepts == frozenset(Draw) - {Draw.FORK}


@given(path_trees(VOCABULARY), st.integers(0, 5))
def test_how_a_tree_was_drawn_does_not_matter(tree: DraftTree, seed: int) -> None:
    sequence = SequenceState([2, 0], SamplingParams(temperature=1.0, seed=seed))
    fixed = DraftTree(tree.tokens, tree.parents)
    assert verify([sequence], [rooted(tree, 0)]) == verify([sequence], [rooted(fixed, 0)])


def test_a_batch_that_is_drawn_to_the_end_gives_the_same_verdicts(monkeypatch: pytest.MonkeyPatch) -> None:
    # On a device no walk ends early: rows that are done go on being drawn, and must not change.
    sequences = [SequenceState([1, 2], SamplingParams(temperature=1.0, seed=seed)) for seed in range(8)]
    drafted = [no_skill(sequence, []) for sequence in sequences[:4]]
    drafted += [DraftTree.chain([2, *plain_output(sequence, 3)]) for sequence in sequences[4:]]
    early = verify(sequences, drafted)
    monkeypatch.setattr("branchwise.verify.match.settled", lambda probs, done: False)
    assert verify(sequences, drafted) == early
    assert {len(verdict.path) for verdict in early} >= {1, 4}


def plain_output(sequence: SequenceState, length: int) -> list[int]:
    tokens = list(sequence.tokens)
    for _ in range(length):
        tokens.append(next_token(sequence, tokens))
    return tokens[len(sequence.tokens) :]


def test_a_walk_reads_no_rows_once_every_tree_is_done() -> None:
    sequences = [SequenceState([1, 2], SamplingParams(temperature=1.0, seed=seed)) for seed in range(2)]
    [wrong, other] = [(plain_output(sequence, 1)[0] + 1) % VOCABULARY for sequence in sequences]
    batch = TreeBatch([DraftTree.chain([2, wrong, 0, 0, 0]), DraftTree.chain([2, other, 1])])
    probs = score(sequences, batch)
    asked: list[list[int]] = []
    rows = probs.at
    probs.at = lambda nodes: asked.append(nodes.tolist()) or rows(nodes)  # type: ignore[func-returns-value,method-assign]
    Match()(batch, probs, chance_for(sequences))
    assert asked == [[0, 0]]


def test_greedy_asks_chance_for_nothing() -> None:
    sequence = SequenceState([1, 2])
    batch = TreeBatch([DraftTree.chain([2, *plain_output(sequence, 2)])])
    [verdict] = Match()(batch, score([sequence], batch), chance=None).read()  # type: ignore[arg-type]
    assert verdict.path == (0, 1, 2)


def test_verdicts_are_read_without_their_padding() -> None:
    verdicts = Verdicts(torch.tensor([[0, 2, -1], [0, -1, -1], [0, 1, 3]]), torch.tensor([7, 8, 9]))
    assert verdicts.read() == [Verdict((0, 2), 7), Verdict((0,), 8), Verdict((0, 1, 3), 9)]


# The exact distribution, by following every outcome


class EnumeratingChance:
    """Answers with prescribed tokens, then with the first possible one, and keeps the probability of its answers."""

    def __init__(self, prescribed: Tokens) -> None:
        self.prescribed = prescribed
        self.answers: list[int] = []
        self.open: list[Tokens] = []
        """beginnings that no one has followed yet"""
        self.probability = 1.0

    def token(self, probs: Tensor, depth: int) -> Tensor:
        assert len(self.answers) == depth, "a position's noise is used once"
        row = probs[0].double() / probs[0].double().sum()
        if depth < len(self.prescribed):
            answer = self.prescribed[depth]
        else:
            answer, *others = row.nonzero()[:, 0].tolist()
            self.open += [(*self.answers, other) for other in others]
        self.probability *= float(row[answer])
        self.answers.append(answer)
        return torch.tensor([answer])

    def accept(self, probability: Tensor, draw: int) -> Tensor:
        raise AssertionError("match accepts nothing by chance")

    pick = order = accept  # type: ignore[assignment]


def every_outcome(sequence: SequenceState, tree: DraftTree) -> Iterator[tuple[Tokens, float]]:
    """The emitted tokens of one step, with their probability."""
    batch = TreeBatch([tree])
    probs = score([sequence], batch)
    waiting: list[Tokens] = [()]
    while waiting:
        chance = EnumeratingChance(waiting.pop())
        [verdict] = Match()(batch, probs, chance).read()
        waiting += chance.open
        yield (*tree.tokens[list(verdict.path[1:])].tolist(), verdict.token), chance.probability


def target_law(sequence: SequenceState, length: int, written: Tokens = ()) -> dict[Tokens, float]:
    """The probability of every continuation of `written` to `length` tokens, by plain decoding."""
    if len(written) == length:
        return {written: 1.0}
    prefix = [*sequence.tokens, *written]
    probs = warp(toy_logits(tuple(prefix))[None], [sequence.sampling], [Context(prefix, sequence.prompt_length)])[
        0
    ].double()
    found: dict[Tokens, float] = {}
    for token in probs.nonzero()[:, 0].tolist():
        for text, probability in target_law(sequence, length, (*written, token)).items():
            found[text] = probability * float(probs[token] / probs.sum())
    return found


@given(trees(VOCABULARY, max_depth=3, max_width=3), prompts, params.filter(lambda p: not p.greedy))
def test_the_law_of_what_is_emitted_is_exactly_the_target_s(
    tree: DraftTree, prompt: list[int], sampling: SamplingParams
) -> None:
    sequence = SequenceState(prompt, sampling)
    tree = rooted(tree, sequence.root)
    length = tree.depth + 1
    emitted: dict[Tokens, float] = defaultdict(float)
    for written, probability in every_outcome(sequence, tree):
        for text, rest in target_law(sequence, length, written).items():
            emitted[text] += probability * rest
    truth = target_law(sequence, length)
    distance = sum(abs(emitted[text] - truth.get(text, 0.0)) for text in {*emitted, *truth}) / 2
    assert distance < 1e-9
