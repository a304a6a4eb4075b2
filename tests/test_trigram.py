"""Tri-grams against a slow count of everything that was ever read."""

from __future__ import annotations

import gc
import random
import weakref
from unittest import mock

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from branchwise.core.sampling import SamplingParams
from branchwise.core.sequence import SequenceState
from branchwise.core.tree import Draw
from branchwise.draft import build_drafter
from branchwise.draft.base import Budget
from branchwise.draft.lookup import trigram
from branchwise.draft.lookup.trigram import Trigram
from branchwise.engine import Engine, Request
from branchwise.errors import UsageError
from branchwise.testing import ToyTarget
from branchwise.verify import VERIFIERS
from tests.conformance.test_drafters import assert_writes_like_plain_decoding

texts = st.lists(st.integers(0, 3), min_size=1, max_size=60)
AMPLE = Budget(nodes=99, depth=99)


def slow_memory(credits: list[tuple[int, int, int]], size: int, successors: int, most: int) -> dict:  # type: ignore[type-arg]
    """pair -> [(successor, count)], best first: one list of [time, pair, token, count], searched for everything."""
    entries: list[list] = []  # type: ignore[type-arg]
    for time, (first, second, token) in enumerate(credits):
        pair = (first, second)
        own = [entry for entry in entries if entry[1] == pair]
        entry = next((entry for entry in own if entry[2] == token), None)
        if entry is None:
            if len(own) == successors:
                entries.remove(min(own, key=lambda entry: (entry[3], entry[0])))
            entry = [time, pair, token, 0]
            entries.append(entry)
        entry[0], entry[3] = time, entry[3] + 1
        if entry[3] > most:
            for entry in own:
                entry[3] //= 2
        entries = [entry for entry in entries if entry[3] > 0]
        seen = {pair: max(entry[0] for entry in entries if entry[1] == pair) for pair in {e[1] for e in entries}}
        if len(seen) > size:
            oldest = min(seen, key=lambda pair: seen[pair])
            entries = [entry for entry in entries if entry[1] != oldest]
    ranked = sorted(entries, key=lambda entry: (-entry[3], -entry[0]))
    return {
        pair: [(entry[2], entry[3]) for entry in ranked if entry[1] == pair] for pair in {entry[1] for entry in ranked}
    }


def credits_of(tokens: list[int]) -> list[tuple[int, int, int]]:
    return list(zip(tokens, tokens[1:], tokens[2:], strict=False))


def believed(drafter: Trigram, pair: tuple[int, int]) -> list[tuple[int, float]]:
    return [(found.token, found.mass) for found in drafter.candidates(pair)]


@given(st.lists(texts, min_size=1, max_size=4), st.integers(1, 9), st.integers(1, 4), st.integers(1, 6))
def test_what_is_known_is_what_a_slow_count_knows(read: list[list[int]], size: int, successors: int, most: int) -> None:
    with mock.patch.object(trigram, "MOST", most):
        drafter = Trigram(size=size, successors=successors)
        for tokens in read:
            drafter.locate(SequenceState(tokens))
    known = slow_memory([credit for tokens in read for credit in credits_of(tokens)], size, successors, most)
    pairs = [(first, second) for first in range(4) for second in range(4)]
    assert {pair for pair in pairs if drafter.candidates(pair)} == set(known)
    for pair, row in known.items():
        whole = sum(count for _, count in row) + len(row)
        assert believed(drafter, pair) == [(token, count / whole) for token, count in row]
        assert [found.cursor for found in drafter.candidates(pair)] == [(pair[1], token) for token, _ in row]
    last = read[-1]
    assert drafter.locate(SequenceState(last[-2:])) == (tuple(last[-2:]) if len(last) > 1 else None)


@given(texts, st.lists(st.integers(0, 5), max_size=20))
def test_every_occurrence_counts_once_however_slowly_a_text_grows(tokens: list[int], steps: list[int]) -> None:
    slow, end = Trigram(), 1
    sequence = SequenceState(tokens[:1])
    for step in [*steps, len(tokens)]:
        slow.locate(sequence)
        sequence.tokens += tokens[end : end + step]
        end += step
        for found in slow.candidates((0, 0)):  # an answer from before must not outlive what it was made of
            assert found.mass < 1
    slow.locate(sequence)
    quick = Trigram()
    quick.locate(SequenceState(tokens))
    assert slow._rows == quick._rows
    for pair in quick._rows:
        assert slow.candidates(pair) == quick.candidates(pair)


def test_masses_are_counts_with_something_left_for_what_is_unknown() -> None:
    drafter = Trigram()
    drafter.locate(SequenceState([1, 2, 3, 1, 2, 3, 1, 2, 4]))
    assert believed(drafter, (1, 2)) == [(3, 2 / 5), (4, 1 / 5)]
    assert believed(drafter, (2, 3)) == [(1, 2 / 3)]  # seen twice, and never anything else
    assert drafter.candidates((2, 4)) == drafter.candidates((7, 7)) == drafter.candidates(None) == []


def test_of_equals_the_one_seen_last_comes_first() -> None:
    drafter = Trigram()
    drafter.locate(SequenceState([1, 2, 3, 1, 2, 4]))
    assert [found.token for found in drafter.candidates((1, 2))] == [4, 3]


def test_a_new_successor_takes_the_place_of_the_least_and_of_those_the_oldest() -> None:
    drafter = Trigram(successors=2)
    drafter.locate(SequenceState([1, 2, 3, 1, 2, 3, 1, 2, 4, 1, 2, 5]))
    assert believed(drafter, (1, 2)) == [(3, 2 / 5), (5, 1 / 5)]
    drafter = Trigram(successors=2)
    drafter.locate(SequenceState([1, 2, 3, 1, 2, 4, 1, 2, 5]))
    assert [found.token for found in drafter.candidates((1, 2))] == [5, 4]


def test_what_is_forgotten_is_no_longer_answered() -> None:
    drafter = Trigram(size=2)
    drafter.locate(SequenceState([1, 2, 3]))
    assert drafter.candidates((1, 2))
    drafter.locate(SequenceState([4, 5, 6]))
    assert drafter.candidates((1, 2))
    drafter.locate(SequenceState([7, 8, 9]))
    assert drafter.candidates((1, 2)) == []
    assert drafter.candidates((4, 5))


def test_what_counted_most_for_long_gives_way_to_what_is_new() -> None:
    drafter = Trigram()
    drafter.locate(SequenceState([1, 2, 3] * 200))
    assert believed(drafter, (1, 2))[0][1] <= trigram.MOST / (trigram.MOST + 1)
    drafter.locate(SequenceState([1, 2, 5] * (trigram.MOST + 1)))
    assert [found.token for found in drafter.candidates((1, 2))] == [5, 3]


def test_a_tree_follows_the_text_from_pair_to_pair() -> None:
    drafter = build_drafter("trigram", "topk:9,depth=3,width=2")
    [tree] = drafter.draft([SequenceState([1, 2, 3, 4, 5, 1, 2])], [AMPLE])
    assert tree.tokens.tolist() == [2, 3, 4, 5]
    assert tree.parents == (-1, 0, 1, 2)
    assert tree.draw is Draw.FIXED


@pytest.mark.parametrize("tokens", [[1], [1, 2], [1, 2, 3], [1, 1]])
def test_a_text_that_repeats_nothing_is_not_drafted_for(tokens: list[int]) -> None:
    [tree] = Trigram().draft([SequenceState(tokens)], [AMPLE])
    assert len(tree) == 1


def test_texts_of_a_batch_and_of_earlier_requests_share_what_is_known() -> None:
    drafter = Trigram()
    one, other = SequenceState([1, 2, 3]), SequenceState([9, 1, 2])
    trees = drafter.draft([one, other], [AMPLE, AMPLE])
    assert [len(tree) for tree in trees] == [1, 2]
    drafter.finish(one)
    drafter.finish(other)
    assert len(drafter.draft([SequenceState([5, 1, 2])], [AMPLE])[0]) == 2
    assert drafter.learns


def test_the_last_tokens_of_a_text_are_read_when_it_ends() -> None:
    drafter, sequence = Trigram(), SequenceState([1, 2])
    drafter.locate(sequence)
    sequence.tokens += [3]
    drafter.finish(sequence)
    assert believed(drafter, (1, 2)) == [(3, 1 / 2)]
    drafter.finish(SequenceState([4]))  # one that was never drafted for


def test_a_finished_text_leaves_only_its_counts_behind() -> None:
    drafter, sequence = Trigram(), SequenceState([1, 2, 3])
    drafter.draft([sequence], [AMPLE])
    drafter.finish(sequence)
    kept = weakref.ref(sequence)
    del sequence
    gc.collect()
    assert kept() is None


def test_memory_stays_bounded_over_two_hundred_thousand_tokens() -> None:
    rng = random.Random(3)
    drafter = Trigram(size=500, successors=4)
    for _ in range(20):
        tokens = [rng.randrange(60) for _ in range(10_000)]
        drafter.locate(SequenceState(tokens))
        for place in list(drafter._rows)[-400:]:
            drafter.candidates(place)
        assert len(drafter._rows) == 500
        assert len(drafter._looked_up) <= trigram.LOOKED_UP
        assert max(map(len, drafter._rows.values())) <= 4
        newest = (tokens[-3], tokens[-2])
        assert tokens[-1] in [found.token for found in drafter.candidates(newest)]


def test_answers_at_hand_are_few_and_true() -> None:
    rng = random.Random(4)
    drafter = Trigram()
    with mock.patch.object(trigram, "LOOKED_UP", 5):
        for _ in range(300):
            drafter.locate(SequenceState([rng.randrange(4) for _ in range(6)]))
            pair = rng.randrange(4), rng.randrange(4)
            answer = drafter.candidates(pair)
            assert len(drafter._looked_up) <= 5
            drafter._looked_up.clear()
            assert drafter.candidates(pair) == answer
            assert drafter.candidates(pair) is drafter.candidates(pair) or not answer


@pytest.mark.parametrize("spec", ["trigram:size=0", "trigram:successors=0"])
def test_a_memory_without_room_is_a_sentence(spec: str) -> None:
    with pytest.raises(UsageError, match="at least 1 pair"):
        build_drafter(spec)


# Texts


@pytest.mark.parametrize("tree", [None, "topk:12,depth=3,width=4", "puct:12,simulations=30"])
def test_texts_are_those_of_plain_decoding_cold_and_warm(tree: str | None) -> None:
    drafter = build_drafter("trigram", tree)
    for _ in range(2):
        assert_writes_like_plain_decoding(lambda truth: drafter, VERIFIERS.build("match"))


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_text_that_was_written_before_takes_fewer_steps(temperature: float) -> None:
    engine = Engine(ToyTarget(40), build_drafter("trigram"), VERIFIERS.build("match"))

    def steps() -> int:
        sampling = SamplingParams(temperature=temperature, seed=3)
        generation = engine.submit(Request((1, 2, 3), sampling, max_new_tokens=60))
        while engine.busy:
            engine.step()
        return generation.stats.steps

    cold, warm = steps(), steps()
    assert warm < 0.6 * cold


# Saved and restored


def known(texts: list[list[int]], **options: int) -> Trigram:
    drafter = Trigram(**options)
    for tokens in texts:
        drafter.locate(SequenceState(tokens))
    return drafter


@given(st.lists(texts, min_size=0, max_size=3), texts)
def test_a_memory_restored_drafts_and_forgets_as_the_one_that_was_saved(read: list[list[int]], more: list[int]) -> None:
    before, after = known(read, size=8, successors=2), known([[7, 8, 9]], size=8, successors=2)
    after.restore(before.save())
    for _ in range(2):
        assert list(after._rows.items()) == list(before._rows.items())
        assert [list(row.items()) for row in after._rows.values()] == [
            list(row.items()) for row in before._rows.values()
        ]
        [one], [other] = (drafter.draft([SequenceState(list(more))], [AMPLE]) for drafter in (before, after))
        assert one.tokens.tolist() == other.tokens.tolist()
        assert one.parents == other.parents


def test_a_smaller_memory_takes_what_is_newest_and_counts_most() -> None:
    large = known([[1, 2, 3, 1, 2, 3, 1, 2, 4, 1, 2, 5], [6, 7, 8]])
    small = Trigram(size=2, successors=2)
    small.restore(large.save())
    assert list(small._rows) == [(1, 2), (6, 7)]
    assert [found.token for found in small.candidates((1, 2))] == [3, 5]


def test_an_answer_from_before_does_not_outlive_the_memory_it_was_of() -> None:
    drafter = known([[1, 2, 3]])
    assert drafter.candidates((1, 2))
    drafter.restore(known([[1, 2, 9]]).save())
    assert [found.token for found in drafter.candidates((1, 2))] == [9]


def test_tensors_that_do_not_fit_are_a_sentence_and_change_nothing() -> None:
    good = known([[1, 2, 3, 1, 2, 4, 2, 1]]).save()
    drafter = known([[5, 5, 5]])
    drafter.bind(ToyTarget(6).info)
    before = dict(drafter._rows)
    drafter.restore(good)
    drafter._rows = dict(before)

    def changed(name: str, value: object) -> dict[str, torch.Tensor]:
        return {**good, name: torch.as_tensor(value)}

    whole = {name: tensor.tolist() for name, tensor in good.items()}
    as_is = torch.int32
    damaged = [
        {name: tensor for name, tensor in good.items() if name != "counts"},
        {},
        *(changed(name, tensor[:-1]) for name, tensor in good.items()),
        *(changed(name, tensor.float()) for name, tensor in good.items()),
        *(changed(name, torch.tensor(7, dtype=as_is)) for name in good),
        *(changed(name, tensor[None]) for name, tensor in good.items()),
        changed("tokens", torch.tensor([6, *whole["tokens"][1:]], dtype=as_is)),
        changed("tokens", torch.tensor([-1, *whole["tokens"][1:]], dtype=as_is)),
        changed("pairs", torch.tensor([[1, 6], *whole["pairs"][1:]], dtype=as_is)),
        changed("pairs", torch.tensor([whole["pairs"][1], *whole["pairs"][1:]], dtype=as_is)),
        changed("counts", torch.tensor([0, *whole["counts"][1:]], dtype=as_is)),
        changed("counts", torch.tensor([trigram.MOST + 1, *whole["counts"][1:]], dtype=as_is)),
        changed("tokens", torch.full_like(good["tokens"], 3)),
        changed("successors", torch.tensor([0, *whole["successors"][1:]], dtype=as_is)),
        changed("successors", torch.tensor([-1, *whole["successors"][1:]], dtype=as_is)),
    ]
    for tensors in damaged:
        with pytest.raises(UsageError, match="no tri-grams of its vocabulary"):
            drafter.restore(tensors)
        assert drafter._rows == before
