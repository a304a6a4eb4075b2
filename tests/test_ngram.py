"""Prompt lookup against a brute-force search."""

from __future__ import annotations

import gc
from collections.abc import Callable

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from branchwise.core.sequence import SequenceState
from branchwise.core.tree import DraftTree, Draw
from branchwise.draft import build_drafter
from branchwise.draft.base import Budget, Drafter, NoDrafter
from branchwise.draft.lookup.base import WIDTH, ppm_backoff
from branchwise.draft.lookup.ngram import PLACES, Index, NGram
from branchwise.draft.policies.paths import Chain
from branchwise.draft.policies.topk import TopK
from branchwise.verify import VERIFIERS
from tests.conformance.test_drafters import assert_writes_like_plain_decoding

texts = st.lists(st.integers(0, 2), min_size=1, max_size=40)
sizes = st.tuples(st.integers(1, 4), st.integers(1, 4)).map(sorted)
AMPLE = Budget(nodes=99, depth=99)


def find_by_hand(tokens: list[int], low: int, high: int) -> int | None:
    """The slow truth: the longest n-gram first, then the most recent earlier place that something follows."""
    for size in range(high, low - 1, -1):
        for place in range(len(tokens) - 1, size - 1, -1):
            if tokens[place - size : place] == tokens[len(tokens) - size :]:
                return place
    return None


def draft(tokens: list[int], budget: Budget = AMPLE, **options: int) -> list[int]:
    """The tokens drafted behind the root."""
    length = options.pop("length", 8)
    [tree] = NGram(tree=Chain(length), **options).draft([SequenceState(list(tokens))], [budget])
    assert int(tree.tokens[0]) == tokens[-1]
    assert tree.parents == tuple(range(-1, len(tree) - 1))
    return tree.tokens[1:].tolist()


@given(texts, sizes)
def test_the_index_finds_what_a_search_finds(tokens: list[int], bounds: list[int]) -> None:
    low, high = bounds
    assert Index(range(high, low - 1, -1)).find(tokens) == find_by_hand(tokens, low, high)


@given(texts, sizes, st.lists(st.integers(1, 5), max_size=10))
def test_a_text_read_in_parts_gives_the_same_as_read_at_once(
    tokens: list[int], bounds: list[int], steps: list[int]
) -> None:
    low, high = bounds
    growing, end = Index(range(high, low - 1, -1)), 0
    for step in steps:
        end = min(end + step, len(tokens))
        assert growing.find(tokens[:end]) == find_by_hand(tokens[:end], low, high)


@given(texts, sizes, st.integers(1, 12))
def test_a_draft_continues_the_place_and_goes_round_at_the_end(
    tokens: list[int], bounds: list[int], length: int
) -> None:
    low, high = bounds
    place = find_by_hand(tokens, low, high)
    expected: list[int] = []
    if place is not None:
        text = list(tokens)
        for i in range(length):
            text.append(text[place + i])  # what was drafted is text as well: this is what going round means
        expected = text[len(tokens) :]
    assert draft(tokens, max=high, min=low, length=length) == expected


@given(texts, st.integers(1, 10), st.integers(0, 10), st.integers(1, 10))
def test_a_draft_stays_within_every_limit(tokens: list[int], nodes: int, depth: int, length: int) -> None:
    whole = draft(tokens, max=3, min=1, length=99)
    limited = draft(tokens, Budget(nodes, depth), max=3, min=1, length=length)
    assert limited == whole[: min(nodes - 1, depth, length)]


def test_the_longest_match_wins_over_a_more_recent_one() -> None:
    assert draft([1, 2, 3, 9, 2, 3, 8, 1, 2, 3], max=3, min=2, length=1) == [9]
    assert draft([1, 2, 3, 9, 2, 3, 8, 1, 2, 3], max=2, min=2, length=1) == [8]


def test_the_most_recent_of_equal_matches_wins() -> None:
    assert draft([1, 2, 7, 1, 2, 8, 1, 2], length=1) == [8]


def test_a_repetition_is_continued_periodically() -> None:
    assert draft([5, 1, 2, 1, 2], max=2, min=2, length=5) == [1, 2, 1, 2, 1]
    assert draft([4, 4, 4], max=2, min=2, length=4) == [4, 4, 4, 4]


def test_nothing_found_is_a_root_alone() -> None:
    assert draft([1, 2, 3, 4]) == []
    assert draft([1]) == []


def test_a_match_shorter_than_min_is_no_match() -> None:
    assert draft([1, 5, 2, 1], max=4, min=2) == []
    assert draft([1, 5, 2, 1], max=4, min=1, length=2) == [5, 2]


def test_a_drafter_follows_each_sequence_as_it_grows() -> None:
    drafter = NGram(max=3, min=1, tree=Chain(4))
    one, other = SequenceState([1, 2, 1]), SequenceState([3, 3])
    for more_one, more_other in (([], []), ([2, 5, 1], [1, 3]), ([2], [3, 3, 3])):
        one.tokens += more_one
        other.tokens += more_other
        together = drafter.draft([one, other], [AMPLE, AMPLE])
        fresh = NGram(max=3, min=1, tree=Chain(4)).draft([one, other], [AMPLE, AMPLE])
        for a, b in zip(together, fresh, strict=True):
            assert torch.equal(a.tokens, b.tokens)


def test_a_text_is_read_even_in_steps_without_room_to_draft() -> None:
    drafter = NGram(max=2, min=2, tree=Chain(1))
    sequence = SequenceState([1, 2, 3])
    [tree] = drafter.draft([sequence], [Budget(nodes=1, depth=0)])
    assert len(tree) == 1
    sequence.tokens += [1, 2]
    [tree] = drafter.draft([sequence], [AMPLE])
    assert tree.tokens.tolist() == [2, 3]


def test_a_finished_sequence_leaves_nothing_behind() -> None:
    drafter = NGram()
    drafter.draft([SequenceState([1, 2, 3])], [AMPLE])
    gc.collect()
    assert len(drafter._indexes) == 0


def test_a_draft_is_fixed() -> None:
    [tree] = NGram(min=1).draft([SequenceState([1, 1])], [AMPLE])
    assert tree.draw is NGram.draw is Draw.FIXED
    assert tree.q is None


def test_drafting_nothing_is_a_root_for_every_sequence() -> None:
    drafted: list[DraftTree] = NoDrafter().draft([SequenceState([1, 2]), SequenceState([3])], [AMPLE] * 2)
    assert [tree.tokens.tolist() for tree in drafted] == [[2], [3]]


# A tree of alternatives


def believed_by_hand(tokens: list[int], end: list[int], low: int, high: int) -> dict[int, float]:
    """The slow truth: of every n-gram, the longest first, what followed at its last places."""
    believed: dict[int, float] = {}
    left = 1.0
    for size in range(high, low - 1, -1):
        gram = end[-size:]
        behind = [place for place in range(size, len(tokens)) if tokens[place - size : place] == gram][-PLACES:]
        if not behind or len(gram) < size:
            continue
        counts: dict[int, int] = {}
        for place in reversed(behind):
            counts[tokens[place]] = counts.get(tokens[place], 0) + 1
        left = ppm_backoff(believed, left, list(counts.items()), size)
    return believed


@given(texts, sizes, st.lists(st.integers(0, 2), max_size=5))
def test_beliefs_are_those_of_all_n_grams_from_the_longest_on(
    tokens: list[int], bounds: list[int], turns: list[int]
) -> None:
    low, high = bounds
    drafter = NGram(max=high, min=low)
    place, end = drafter.locate(SequenceState(list(tokens))), list(tokens)
    for turn in [*turns, 0]:
        found = drafter.candidates(place)
        assert {one.token: one.mass for one in found} == pytest.approx(believed_by_hand(tokens, end, low, high))
        masses = [one.mass for one in found]
        assert masses == sorted(masses, reverse=True)
        assert sum(masses) <= 1
        assert drafter.candidates(place) == found
        if not found:
            break
        chosen = found[turn % len(found)]
        place, end = chosen.cursor, [*end, chosen.token]


def after(tokens: list[int], **options: int) -> dict[int, float]:
    drafter = NGram(**options)
    return {one.token: one.mass for one in drafter.candidates(drafter.locate(SequenceState(list(tokens))))}


def test_more_counts_and_longer_n_grams_are_believed_more() -> None:
    once, twice = after([1, 2, 9, 1, 2]), after([1, 2, 9, 1, 2, 9, 1, 2], max=2)
    longer = after([0, 1, 2, 9, 0, 1, 2])
    assert list(once) == list(twice) == list(longer) == [9]
    assert once[9] == pytest.approx(1 / (1 + 4 / 2**1.5))
    assert once[9] < longer[9] < 1
    assert once[9] < twice[9] < 1


def test_frequent_tokens_come_first_and_of_equal_ones_the_most_recent() -> None:
    assert list(after([1, 2, 7, 1, 2, 8, 1, 2])) == [8, 7]
    assert list(after([1, 2, 7, 0, 1, 2, 7, 4, 1, 2, 8, 1, 2], max=2)) == [7, 8]
    assert list(after([3, 1, 2, 9, 1, 2, 8, 1, 2, 8, 3, 1, 2], max=3)) == [9, 8]  # the longer n-gram speaks first


def test_only_the_last_places_are_looked_at() -> None:
    text = [1, 2, 7] + [1, 2, 8] * PLACES
    assert list(after([*text, 1, 2], max=2)) == [8]
    many = [token for number in range(10, 40) for token in (1, number)]
    assert len(after([*many, 1], max=1, min=1)) == PLACES <= WIDTH


def test_a_tree_holds_the_alternatives() -> None:
    drafter = NGram(tree=TopK(4, depth=2, width=2))
    [tree] = drafter.draft([SequenceState([1, 2, 7, 5, 1, 2, 8, 6, 1, 2])], [AMPLE])
    assert tree.draw is drafter.draw is Draw.FIXED
    assert (tree.tokens.tolist(), tree.parents) == ([2, 8, 7, 6, 5], (-1, 0, 0, 1, 2))


def test_a_chain_is_copied_and_other_trees_are_grown_as_they_say() -> None:
    assert build_drafter("ngram", "chain:3").draw is Draw.FIXED
    assert build_drafter("ngram", "paths:2x3").draw is Draw.PATHS
    assert build_drafter("ngram", "rsd-c:2,1").draw is Draw.WITHOUT_REPLACEMENT


def test_memory_is_of_the_texts_that_are_open() -> None:
    drafter, sequence = NGram(tree=TopK(4)), SequenceState([1, 2, 3] * 50)
    drafter.draft([sequence], [AMPLE])
    assert list(drafter._indexes) == [sequence]
    sequence.tokens += range(150)
    drafter.draft([sequence], [AMPLE])
    assert len(drafter._indexes[sequence].tokens) == 300
    drafter.finish(sequence)
    assert not drafter._indexes
    assert len(drafter.draft([sequence], [AMPLE])[0]) == 1
    assert len(drafter.draft([SequenceState([1, 2, 3, 1, 2])], [AMPLE])[0]) > 1


@pytest.mark.parametrize(
    ("draft", "tree", "verify"),
    [
        ("ngram:max=3,min=1", "chain:5", "match"),
        ("ngram:max=3,min=1", "topk:12,depth=6,width=3", "match"),
        ("ngram:max=3,min=1", "paths:2x3", "match"),
        ("ngram:max=3,min=1", "rsd-c:3,1", "rrs"),
    ],
)
def test_the_text_is_that_of_plain_decoding(draft: str, tree: str, verify: str) -> None:
    make: Callable[[object], Drafter] = lambda truth: build_drafter(draft, tree)  # noqa: E731
    assert_writes_like_plain_decoding(make, VERIFIERS.build(verify))
