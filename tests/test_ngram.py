"""Prompt lookup against a brute-force search."""

from __future__ import annotations

import gc

import torch
from hypothesis import given
from hypothesis import strategies as st

from branchwise.draft import Budget
from branchwise.draft.chain import Chain
from branchwise.draft.ngram import Index, NGram
from branchwise.draft.none import Nothing
from branchwise.sequence import Sequence
from branchwise.tree import DraftTree, Draw

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
    [tree] = NGram(tree=Chain(length), **options).draft([Sequence(list(tokens))], [budget])
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
    one, other = Sequence([1, 2, 1]), Sequence([3, 3])
    for more_one, more_other in (([], []), ([2, 5, 1], [1, 3]), ([2], [3, 3, 3])):
        one.tokens += more_one
        other.tokens += more_other
        together = drafter.draft([one, other], [AMPLE, AMPLE])
        fresh = NGram(max=3, min=1, tree=Chain(4)).draft([one, other], [AMPLE, AMPLE])
        for a, b in zip(together, fresh, strict=True):
            assert torch.equal(a.tokens, b.tokens)


def test_a_text_is_read_even_in_steps_without_room_to_draft() -> None:
    drafter = NGram(max=2, min=2, tree=Chain(1))
    sequence = Sequence([1, 2, 3])
    [tree] = drafter.draft([sequence], [Budget(nodes=1, depth=0)])
    assert len(tree) == 1
    sequence.tokens += [1, 2]
    [tree] = drafter.draft([sequence], [AMPLE])
    assert tree.tokens.tolist() == [2, 3]


def test_a_finished_sequence_leaves_nothing_behind() -> None:
    drafter = NGram()
    drafter.draft([Sequence([1, 2, 3])], [AMPLE])
    gc.collect()
    assert len(drafter._indexes) == 0


def test_a_draft_is_fixed() -> None:
    [tree] = NGram(min=1).draft([Sequence([1, 1])], [AMPLE])
    assert tree.draw is NGram.draw is Draw.FIXED
    assert tree.q is None


def test_drafting_nothing_is_a_root_for_every_sequence() -> None:
    drafted: list[DraftTree] = Nothing().draft([Sequence([1, 2]), Sequence([3])], [AMPLE] * 2)
    assert [tree.tokens.tolist() for tree in drafted] == [[2], [3]]
