"""Distributions behind n-grams against a slow dictionary; the oldest are forgotten, and memory is bounded."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from branchwise.backends.base import Prefill, Scored
from branchwise.core.sampling import SamplingParams
from branchwise.core.sequence import SequenceState
from branchwise.core.tree import DraftTree
from branchwise.draft import build_drafter
from branchwise.draft.base import Budget
from branchwise.draft.lookup.stand import MOST_READ, Stand
from branchwise.engine import Engine, Request
from branchwise.errors import UsageError
from branchwise.testing import ToyTarget
from branchwise.verify import VERIFIERS, Verdict
from tests.conformance.test_drafters import assert_writes_like_plain_decoding

VOCABULARY = 7
AMPLE = Budget(nodes=99, depth=99)
Gram = tuple[int, ...]


class Slow:
    """Every n-gram with its average and how often it was met, the one met longest ago first."""

    def __init__(self, max: int, min: int, k: int, ngrams: int) -> None:
        self.max, self.min, self.k, self.ngrams = max, min, k, ngrams
        self.known: dict[Gram, tuple[int, dict[int, float]]] = {}

    def learn(self, text: list[int], logits: Tensor) -> None:
        new = torch.softmax(logits.double(), dim=0).tolist()
        best = sorted(range(len(new)), key=lambda token: -new[token])[: self.k]
        for size in range(self.min, min(self.max, len(text)) + 1):
            gram = tuple(text[len(text) - size :])
            count, old = self.known.pop(gram, (0, {}))
            mixed = {token: mass * count / (count + 1) for token, mass in old.items()}
            for token in best:
                mixed[token] = mixed.get(token, 0.0) + new[token] / (count + 1)
            kept = dict(sorted(mixed.items(), key=lambda pair: -pair[1])[: self.k])
            self.known[gram] = count + 1, kept
            while len(self.known) > self.ngrams:
                del self.known[next(iter(self.known))]

    def after(self, text: list[int]) -> dict[int, float]:
        for size in range(self.max, self.min - 1, -1):
            if len(text) >= size and tuple(text[len(text) - size :]) in self.known:
                return self.known[tuple(text[len(text) - size :])][1]
        return {}


def noise(*shape: int, seed: int = 0) -> Tensor:
    return 2 * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def assert_answers(drafter: Stand, slow: Slow, texts: list[list[int]]) -> None:
    assert len(drafter) == len(slow.known)
    for text in texts:
        row, expected = drafter.candidates(drafter.locate(SequenceState(text))), slow.after(text)
        assert [found.token for found in row] == list(expected)
        for found in row:
            assert math.isclose(found.mass, expected[found.token], rel_tol=1e-4)
            assert found.cursor == tuple([*text, found.token][-drafter.max :])
        assert sum(found.mass for found in row) <= 1 + 1e-6


def bound(vocabulary: int = VOCABULARY, **options: object) -> Stand:
    drafter = Stand(**options)  # type: ignore[arg-type]
    drafter.bind(ToyTarget(vocabulary).info)
    return drafter


def some_texts(seed: int, count: int, length: int = 12, tokens: int = 3) -> list[list[int]]:
    rng = random.Random(seed)
    return [[rng.randrange(tokens) for _ in range(rng.randint(1, length))] for _ in range(count)]


@given(
    st.integers(0, 999),
    st.tuples(st.integers(1, 4), st.integers(1, 4)).map(sorted),
    st.integers(1, 8),
    st.sampled_from([1, 3, 10, 999]),
)
def test_an_ngram_knows_what_a_dictionary_would(seed: int, bounds: list[int], k: int, ngrams: int) -> None:
    low, high = bounds
    drafter, slow = bound(max=high, min=low, k=k, ngrams=ngrams), Slow(high, low, k, ngrams)
    for number, text in enumerate(some_texts(seed, 5)):
        if len(text) < 2:
            continue
        rows = random.Random(number).randint(1, len(text) - 1)
        logits = noise(rows, VOCABULARY, seed=seed + number)
        drafter.start(SequenceState(text), Prefill(logits))
        for row in range(rows):
            slow.learn(text[: len(text) - rows + row], logits[row])
    assert_answers(drafter, slow, some_texts(seed + 1, 30, length=6))


@pytest.mark.parametrize("seed", range(6))
def test_a_step_teaches_the_accepted_path(seed: int) -> None:
    rng = random.Random(seed)
    drafter, slow = bound(k=4), Slow(4, 2, 4, 99)
    for step in range(4):
        texts = some_texts(10 * seed + step, 3, tokens=2)
        trees, verdicts = [], []
        for text in texts:
            parents = [-1]
            for node in range(1, rng.randint(2, 10)):
                parents.append(rng.randint(max(parents[-1], 0), node - 1))
            tokens = [text[-1], *(rng.randrange(2) for _ in parents[1:])]
            tree = DraftTree(torch.tensor(tokens), tuple(parents))
            trees.append(tree)
            verdicts.append(Verdict(tuple(tree.topology.path(rng.randrange(len(tree)))), 0))
        scored = Scored(noise(3, 12, VOCABULARY, seed=step))
        drafter._drafted = trees
        drafter.learn([SequenceState(text) for text in texts], scored, verdicts)
        for text, tree, verdict, logits in zip(texts, trees, verdicts, scored.logits, strict=True):
            for end, node in enumerate(verdict.path):
                accepted = [int(tree.tokens[before]) for before in verdict.path[1 : end + 1]]
                slow.learn([*text, *accepted], logits[node])
    assert_answers(drafter, slow, some_texts(seed + 1, 40, length=6, tokens=2))


def test_the_longest_known_ngram_answers() -> None:
    drafter = bound()
    for text, best in (([1, 2, 3, 4], 5), ([6, 2, 3, 4], 6), ([6, 6, 3, 4], 1)):
        logits = torch.zeros(1, VOCABULARY)
        logits[0, best] = 9.0
        drafter.start(SequenceState([*text, 0]), Prefill(logits))
    for text, best in (([1, 2, 3, 4], 5), ([0, 1, 2, 3, 4], 5), ([6, 2, 3, 4], 6), ([0, 6, 3, 4], 1)):
        assert drafter.candidates(drafter.locate(SequenceState(text)))[0].token == best
    assert drafter.candidates(drafter.locate(SequenceState([0, 0]))) == []
    assert drafter.candidates(drafter.locate(SequenceState([4]))) == []
    assert drafter.candidates(None) == []


def test_three_laws_behind_an_ngram_count_alike() -> None:
    drafter = bound(k=VOCABULARY)
    probs = torch.softmax(noise(3, VOCABULARY), dim=1)
    for row in probs:
        drafter.start(SequenceState([1, 2, 0]), Prefill(row.log()[None]))
    found = {found.token: found.mass for found in drafter.candidates((1, 2))}
    for token, mass in enumerate(probs.mean(dim=0).tolist()):
        assert math.isclose(found[token], mass, rel_tol=1e-4)


def test_the_ngram_met_longest_ago_is_forgotten() -> None:
    drafter = bound(max=2, ngrams=3)
    for gram in ((1, 1), (2, 2), (3, 3), (1, 1), (4, 4)):
        drafter.start(SequenceState([*gram, 0]), Prefill(noise(1, VOCABULARY)))
    assert [bool(drafter.candidates((token, token))) for token in (1, 2, 3, 4)] == [True, False, True, True]


def test_memory_is_bounded_over_200_000_tokens() -> None:
    drafter = bound(vocabulary=64, k=4, ngrams=2000)
    rng = random.Random(0)
    logits = noise(64, 64)
    for _ in range(200_000 // 64):
        drafter.start(SequenceState([rng.randrange(64) for _ in range(65)]), Prefill(logits))
        assert len(drafter._read) <= MOST_READ
    assert len(drafter) == len(drafter._lines) == len(drafter._tokens) == 2000


def test_a_second_request_is_written_in_fewer_steps() -> None:
    drafter = build_drafter("stand")
    engine = Engine(ToyTarget(50), drafter, VERIFIERS.build("match"))
    assert drafter.learns  # type: ignore[attr-defined]
    request = Request((1, 2, 3, 4, 5, 6), max_new_tokens=40)
    steps = []
    for _ in range(2):
        generation = engine.submit(request)
        while engine.busy:
            engine.step()
        steps.append(generation.stats.steps)
    assert steps[0] > 30  # n-grams hardly repeat in a text of such noise
    assert steps[1] < 10


@pytest.mark.parametrize("tree", ["topk:16", "ranks:recycling-80"])
def test_the_text_is_that_of_plain_decoding(tree: str) -> None:
    assert_writes_like_plain_decoding(lambda _: build_drafter("stand:min=1", tree), VERIFIERS.build("match"))


@pytest.mark.parametrize("spec", ["paths:2x3", "rsd-s:3x3", "dynamic:8"])
def test_trees_can_be_drawn_from_it(spec: str) -> None:
    drafter = build_drafter("stand:min=1", spec)
    engine = Engine(ToyTarget(VOCABULARY), drafter, VERIFIERS.build("auto"))
    engine.submit(Request((1, 2, 3), max_new_tokens=40, sampling=SamplingParams(temperature=0.8, seed=3)))
    drawn = 0
    while engine.busy:
        engine.step()
        drawn += sum(len(tree) > 1 and tree.q is not None for tree in drafter._drafted)  # type: ignore[attr-defined]
    assert drawn > 5


# State


def taught(**options: object) -> Stand:
    drafter = bound(**options)
    for seed, text in enumerate(some_texts(3, 6)):
        if len(text) > 1:
            drafter.start(SequenceState(text), Prefill(noise(len(text) - 1, VOCABULARY, seed=seed)))
    return drafter


def everything(drafter: Stand) -> list[tuple[Gram, list[object], int]]:
    return [(gram, list(drafter.candidates(gram)), int(drafter._counts[line])) for gram, line in drafter._lines.items()]


def test_what_was_learnt_can_be_saved_and_restored() -> None:
    drafter, other = taught(), bound()
    saved, before = drafter.save(), everything(drafter)
    drafter.start(SequenceState([1, 1, 0]), Prefill(noise(2, VOCABULARY, seed=77)))
    other.restore(saved)
    assert everything(other) == before != everything(drafter)
    for one in (other, fresh := bound()):
        if one is fresh:
            one.restore(saved)
        one.start(SequenceState([2, 2, 0]), Prefill(noise(2, VOCABULARY, seed=78)))
    assert everything(other) == everything(fresh)
    empty = bound()
    other.restore(empty.save())
    assert len(other) == 0
    assert other.candidates((1, 1)) == []


def test_what_was_said_before_a_state_came_back_is_not_said_again() -> None:
    drafter, other = bound(), bound()
    for one, seed in ((drafter, 1), (other, 2)):
        one.start(SequenceState([1, 1, 0]), Prefill(noise(2, VOCABULARY, seed=seed)))
    assert drafter.candidates((1, 1)) != other.candidates((1, 1))
    drafter.restore(other.save())
    assert drafter.candidates((1, 1)) == other.candidates((1, 1)) != []


def test_a_smaller_memory_takes_over_what_was_met_last() -> None:
    drafter, small = taught(), bound(ngrams=5)
    small.restore(drafter.save())
    assert everything(small) == everything(drafter)[-5:]


def damaged(saved: dict[str, Tensor]) -> list[tuple[str, dict[str, Tensor]]]:
    def change(name: str, place: tuple[int, ...], value: float) -> dict[str, Tensor]:
        tensor = saved[name].clone()
        tensor[place] = value
        return {**saved, name: tensor}

    pairs = saved["grams"].tolist().index([-1, -1, *saved["grams"][saved["grams"][:, 1] < 0][0, 2:].tolist()])
    twice = {name: torch.cat([tensor, tensor[:1]]) for name, tensor in saved.items()}
    return [
        ("should hold", {name: tensor for name, tensor in saved.items() if name != "counts"}),
        ("should hold", {**saved, "masses": saved["masses"].half()}),
        ("not about n-grams of 4", {**saved, "grams": saved["grams"][:, 1:]}),
        ("not about n-grams of 4", {**saved, "counts": saved["counts"][1:]}),
        ("outside the vocabulary", change("grams", (0, 3), VOCABULARY)),
        ("outside the vocabulary", change("tokens", (0, 0), VOCABULARY)),
        ("outside the vocabulary", change("grams", (0, 3), -2)),
        ("fewer than 2 tokens", change("grams", (pairs, 2), -1)),
        ("fewer than 2 tokens", change("grams", (0, 3), -1)),
        ("twice or never", change("counts", (0,), 0)),
        ("not probabilities", change("masses", (0, 0), math.nan)),
        ("not probabilities", change("masses", (0, 0), 1.5)),
        ("twice in a row", change("tokens", (0, 1), int(saved["tokens"][0, 0]))),
        ("not in order", change("masses", (0, 0), 1e-9)),
        ("comes twice", twice),
    ]


@pytest.mark.parametrize("case", range(15))
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(case: int) -> None:
    drafter = taught(k=5)
    before = everything(drafter)
    [why, wrong] = damaged(drafter.save())[case]
    with pytest.raises(UsageError, match=why):
        drafter.restore(wrong)
    assert everything(drafter) == before


def test_options_outside_their_range_are_refused() -> None:
    for spec in ("stand:min=0", "stand:max=2,min=3", "stand:k=0", "stand:ngrams=0"):
        with pytest.raises(UsageError, match="needs 1 <= min <= max"):
            build_drafter(spec)
    [tree] = bound().draft([SequenceState([3])], [AMPLE])
    assert tree.tokens.tolist() == [3]
