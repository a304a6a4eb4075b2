"""The automaton against searching by hand, and what is believed with it."""

from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Callable

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from branchwise.core.sequence import SequenceState
from branchwise.core.tree import Draw
from branchwise.draft import build_drafter
from branchwise.draft.base import Budget, Drafter
from branchwise.draft.builder import Candidate
from branchwise.draft.lookup.base import CERTAIN, WIDTH, ppm_backoff
from branchwise.draft.lookup.suffix import CONTEXTS, END, LEAD, LINKS, NOWHERE, REACH, ROOT, Automaton, Suffix
from branchwise.draft.policies.topk import TopK
from branchwise.errors import UsageError
from branchwise.testing import ToyTarget
from branchwise.verify import VERIFIERS
from tests.conformance.test_drafters import assert_writes_like_plain_decoding
from tests.strategies import best_first

texts = st.lists(st.integers(0, 2), min_size=1, max_size=LINKS)
AMPLE = Budget(nodes=99, depth=99)


def places(tokens: list[int], stretch: list[int]) -> list[int]:
    """The positions behind every occurrence of a stretch, the end of the text included."""
    size = len(stretch)
    return [end for end in range(size, len(tokens) + 1) if tokens[end - size : end] == stretch]


def longest_repeated_end(tokens: list[int]) -> int:
    """The slow truth: how long the longest end of a text is that stands in it before."""
    return next(
        size for size in range(len(tokens) - 1, -1, -1) if len(places(tokens, tokens[len(tokens) - size :])) > 1
    )


def followers(tokens: list[int], stretch: list[int]) -> list[tuple[int, int]]:
    """What followed a stretch, the most recent first, and how often that was followed in its turn, at least once."""
    found: dict[int, int] = {}
    for place in reversed(places(tokens, stretch)):
        if place < len(tokens) and tokens[place] not in found:
            longer = places(tokens, [*stretch, tokens[place]])
            found[tokens[place]] = max(1, sum(end < len(tokens) for end in longer))
    return list(found.items())


# The automaton


@given(texts)
def test_the_longest_end_that_occurred_before_is_known_after_every_token(tokens: list[int]) -> None:
    automaton = Automaton()
    for end in range(1, len(tokens) + 1):
        automaton.read(tokens[end - 1 : end])
        text = tokens[:end]
        state, length = automaton.match
        assert length == longest_repeated_end(text)
        if length:
            assert automaton.continuations(state) == followers(text, text[end - length :])
            assert automaton.followed[state] == sum(place < end for place in places(text, text[end - length :]))


@given(texts)
def test_every_stretch_has_its_state_and_nothing_else_has_one(tokens: list[int]) -> None:
    automaton = Automaton(tokens)
    assert len(automaton.length) <= max(2 * len(tokens), 2)
    stretches = {tuple(tokens[a:b]) for a in range(len(tokens)) for b in range(a + 1, len(tokens) + 1)}
    for stretch in stretches:
        state = ROOT
        for token in stretch:
            state = automaton.step(state, token)
        assert automaton.length[automaton.link[state]] < len(stretch) <= automaton.length[state]
        assert automaton.continuations(state) == followers(tokens, list(stretch))
        for token in range(3):
            assert (automaton.step(state, token) != NOWHERE) == ((*stretch, token) in stretches)


@given(texts, st.lists(st.integers(0, 3), max_size=20))
def test_another_text_is_matched_from_its_end(tokens: list[int], other: list[int]) -> None:
    state, length = (automaton := Automaton(tokens)).find(other)
    assert length == max(size for size in range(len(other) + 1) if places(tokens, other[len(other) - size :]))
    assert length <= automaton.length[state]
    if length:
        assert automaton.continuations(state) == followers(tokens, other[len(other) - length :])


def test_a_text_of_one_token_over_and_over_takes_linear_work() -> None:
    automaton = Counting([7] * 5000)
    assert automaton.match[1] == 4999
    assert automaton.steps < 3 * 5000
    assert sum(automaton.followed) <= (LINKS + 2) * 5000


class Counting(Automaton):
    """Counts how often it looks for a token behind a state, and for all tokens behind it."""

    steps = 0

    def step(self, state: int, token: int) -> int:
        self.steps += 1
        return super().step(state, token)

    def continuations(self, state: int) -> list[tuple[int, int]]:
        self.steps += 1
        return super().continuations(state)


def long_text(size: int, seed: int = 0) -> list[int]:
    """Words of a few thousand, some far more common than others, and stretches that are copied from before."""
    rng = random.Random(seed)
    tokens: list[int] = []
    while len(tokens) < size:
        if tokens and rng.random() < 0.05:
            start = rng.randrange(len(tokens))
            tokens += tokens[start : start + rng.randint(2, 60)]
        else:
            tokens.append(int(4000 ** rng.random()))
    return tokens[:size]


@pytest.fixture(scope="module")
def long() -> tuple[list[int], Counting]:
    tokens = long_text(200_000)
    return tokens, Counting(tokens)


def test_a_long_text_gives_what_a_search_finds(long: tuple[list[int], Counting]) -> None:
    """200,000 tokens, about a megabyte of text; searched as a string, which is quick enough by hand."""
    tokens, automaton = long
    text = "".join(map(chr, tokens))
    assert len(automaton.length) < 2 * len(tokens)
    assert automaton.steps < 8 * len(tokens)
    rng = random.Random(1)
    state, length, checked, sum_of_lengths = ROOT, 0, 0, 0
    start = rng.randrange(len(tokens))
    query = tokens[start : start + 300] + long_text(300, seed=2) + tokens[:100]
    for end, token in enumerate(query, start=1):
        state, length = automaton.follow(state, length, token)
        if end % 20:
            continue
        read = "".join(map(chr, query[:end]))
        assert read[end - length :] in text
        assert length == end or read[end - length - 1 :] not in text
        sum_of_lengths += length
        if length > 1:
            stretch = read[end - length :]
            ends, place = [], text.find(stretch)
            while place >= 0:
                ends.append(place + length)
                place = text.find(stretch, place + 1)
            last: dict[int, None] = {}
            for behind in reversed(ends):
                if behind < len(text):
                    last.setdefault(ord(text[behind]))
            assert [token for token, _ in automaton.continuations(state)] == list(last)[:WIDTH]
            checked += 1
    assert checked > 20
    assert sum_of_lengths > 500


def test_a_look_up_does_not_grow_with_the_text() -> None:
    for size in (1_000, 30_000):
        sequence, drafter = SequenceState(long_text(size)), Suffix(min=1)
        drafter._texts[sequence] = automaton = Counting()
        for common in (1, 2, 3, 1, 1):
            sequence.tokens.append(common)
            place = drafter.locate(sequence)
            automaton.steps = 0
            tree, _ = best_first(sequence.root, place, drafter.candidates, nodes=64, depth=16)
            assert len(tree) == 65
            assert automaton.steps <= 64 * 2 * CONTEXTS
            assert all(len(drafter.candidates(one.cursor)) <= WIDTH for one in drafter.candidates(place))


# What is believed


def believed_by_hand(tokens: list[int], drafted: list[int], least: int) -> dict[int, float]:
    """The slow truth for one text: contexts that occurred at different places, the longest first."""
    whole = [*tokens, *drafted]
    longest = next(
        size
        for size in range(len(whole) - 1 if not drafted else len(whole), -1, -1)
        if size <= len(tokens) and len(places(tokens, whole[len(whole) - size :])) > (not drafted)
    )
    contexts: dict[tuple[int, ...], int] = {}
    for size in range(longest, least - 1, -1):
        contexts.setdefault(tuple(places(tokens, whole[len(whole) - size :])), size)
    believed: dict[int, float] = {}
    left = 1.0
    for ends, size in list(contexts.items())[:CONTEXTS]:
        total = sum(end < len(tokens) for end in ends)
        left = ppm_backoff(believed, left, followers(tokens, whole[len(whole) - size :]), size, total)
        if left < CERTAIN:
            break
    return believed


@given(texts, st.integers(1, 3), st.lists(st.integers(0, 2), max_size=5))
def test_beliefs_are_those_of_all_matches_from_the_longest_on(tokens: list[int], least: int, turns: list[int]) -> None:
    drafter = Suffix(min=least)
    place, drafted = drafter.locate(SequenceState(list(tokens))), []
    for turn in [*turns, 0]:
        found = drafter.candidates(place)
        assert {one.token: one.mass for one in found} == pytest.approx(believed_by_hand(tokens, drafted, least))
        check(found)
        assert drafter.candidates(place) == found
        if not found:
            break
        chosen = found[turn % len(found)]
        place, drafted = chosen.cursor, [*drafted, chosen.token]


def check(found: list[Candidate]) -> None:
    """What every memory promises of what may come next."""
    masses = [one.mass for one in found]
    assert masses == sorted(masses, reverse=True)
    assert all(mass > 0 for mass in masses)
    assert sum(masses) <= 1 + 1e-9
    assert len({one.token for one in found}) == len(found) <= WIDTH


def after(tokens: list[int], **options: int) -> dict[int, float]:
    drafter = Suffix(**options)
    return {one.token: one.mass for one in drafter.candidates(drafter.locate(SequenceState(list(tokens))))}


def drafted(tokens: list[int], nodes: int = 6, **options: int) -> list[int]:
    [tree] = Suffix(tree=TopK(nodes, depth=nodes, width=1), **options).draft([SequenceState(list(tokens))], [AMPLE])
    return tree.tokens[1:].tolist()


def test_evidence_grows_with_length_and_with_counts() -> None:
    two, three = 4 / 2**1.5, 4 / 3**1.5
    assert after([1, 2, 9, 1, 2]) == {9: pytest.approx(1 / (1 + two))}
    assert after([5, 1, 2, 9, 5, 1, 2]) == {9: pytest.approx(1 / (1 + three))}
    assert after([1, 2, 9, 1, 2, 9, 0, 1, 2]) == {9: pytest.approx(2 / (2 + two))}
    assert after([1, 2, 9, 1, 2, 8, 1, 2]) == {8: pytest.approx(1 / (2 + two)), 9: pytest.approx(1 / (2 + two))}


def test_what_the_longest_match_leaves_open_goes_to_shorter_ones() -> None:
    two, three = 4 / 2**1.5, 4 / 3**1.5
    found = after([3, 1, 2, 9, 4, 1, 2, 8, 3, 1, 2])
    assert found[9] == pytest.approx(1 / (1 + three))
    assert found[8] == pytest.approx(three / (1 + three) * 1 / (1 + two))  # the 9 is not counted again


def test_shorter_matches_are_not_asked_where_the_longest_is_certain() -> None:
    for size, expected in ((20, [99, 7]), (50, [99])):
        run = list(range(size))
        assert list(after([*run[-2:], 7, *run, 99, *run])) == expected


def test_of_equal_counts_the_most_recent_comes_first() -> None:
    assert list(after([1, 2, 7, 1, 2, 8, 1, 2])) == [8, 7]
    assert list(after([1, 2, 7, 0, 1, 2, 7, 4, 1, 2, 8, 1, 2])) == [7, 8]


def test_the_end_of_the_text_does_not_continue_itself() -> None:
    assert drafted([1]) == drafted([1, 2, 3], min=1) == []
    assert drafted([1, 5, 2, 1]) == []
    assert drafted([1, 5, 2, 1], nodes=2, min=1) == [5, 2]


def test_a_repetition_goes_on_for_as_long_as_it_is_wanted() -> None:
    assert drafted([5, 1, 2, 1, 2], nodes=7) == [1, 2, 1, 2, 1, 2, 1]
    assert drafted([4, 4, 4], nodes=5) == [4] * 5


def test_nothing_known_is_a_root_alone_and_a_fixed_one() -> None:
    drafter = Suffix()
    [tree] = drafter.draft([SequenceState([1, 2, 3])], [AMPLE])
    assert tree.tokens.tolist() == [3]
    assert tree.draw is drafter.draw is Draw.FIXED


@given(st.lists(texts, min_size=2, max_size=3), st.lists(texts, min_size=1, max_size=3))
def test_texts_of_a_batch_know_nothing_of_each_other(starts: list[list[int]], steps: list[list[int]]) -> None:
    drafter, sequences = Suffix(min=1), [SequenceState(list(start)) for start in starts]
    for step in [[], *steps]:
        for number, sequence in enumerate(sequences):
            sequence.tokens += step[number:]
        together = drafter.draft(sequences, [AMPLE] * len(sequences))
        for sequence, tree in zip(sequences, together, strict=True):
            [alone] = Suffix(min=1).draft([SequenceState(list(sequence.tokens))], [AMPLE])
            assert (tree.tokens.tolist(), tree.parents) == (alone.tokens.tolist(), alone.parents)


def test_a_text_that_ended_leaves_nothing_and_may_begin_again() -> None:
    drafter, sequence = Suffix(), SequenceState([1, 2, 3, 1, 2])
    first = drafter.draft([sequence], [AMPLE])[0].tokens.tolist()
    assert list(drafter._texts) == [sequence]
    drafter.finish(sequence)
    assert not drafter._texts
    assert drafter.draft([sequence], [AMPLE])[0].tokens.tolist() == first != [2]
    assert not drafter.learns


# Earlier answers


def answer(drafter: Suffix, tokens: list[int], prompt: int = 1) -> None:
    """One request from beginning to end."""
    sequence = SequenceState(tokens[:prompt])
    drafter.draft([sequence], [AMPLE])
    sequence.tokens += tokens[prompt:]
    drafter.draft([sequence], [AMPLE])
    drafter.finish(sequence)


def known(drafter: Suffix, tokens: list[int]) -> list[int]:
    return [one.token for one in drafter.candidates(drafter.locate(SequenceState(list(tokens))))]


def test_earlier_answers_are_searched_where_they_are_kept() -> None:
    for keep, expected in ((0, []), (100, [13])):
        drafter = Suffix(keep=keep)
        answer(drafter, [10, 11, 12, 13, 14])
        assert known(drafter, [7, 11, 12]) == expected
        assert drafter.learns == (keep > 0)


def test_of_a_prompt_only_its_end_is_kept_and_an_answer_ends_where_it_ends() -> None:
    drafter = Suffix(keep=100)
    answer(drafter, list(range(10, 40)), prompt=20)
    assert known(drafter, [29 - LEAD, 30 - LEAD]) == []
    assert known(drafter, [30 - LEAD, 31 - LEAD]) == [32 - LEAD]
    answer(drafter, [50, 51, 52])
    assert known(drafter, [38, 39]) == known(drafter, [51, 52]) == []
    answer(drafter, [60, 50, 51])
    assert known(drafter, [50, 51]) == [52]  # the other one ended there
    assert min(drafter._answers.tokens) == END


def test_the_longer_match_speaks_first_whether_of_this_text_or_of_another() -> None:
    drafter = Suffix(keep=100)
    answer(drafter, [1, 2, 3, 4])
    assert known(drafter, [2, 3, 9, 0, 2, 3]) == [9, 4]  # equally long: of this text first
    assert known(drafter, [2, 3, 9, 1, 2, 3]) == [4, 9]
    assert known(drafter, [1, 2, 3, 9, 2, 3]) == [9, 4]


def test_matches_in_several_texts_go_on_side_by_side() -> None:
    """Both lead to 4; behind it, the match with the answer is longer and goes on with 5."""
    drafter = Suffix(keep=100, min=1, tree=TopK(3, depth=3, width=1))
    answer(drafter, [1, 2, 3, 4, 5, 6])
    [tree] = drafter.draft([SequenceState([3, 4, 0, 2, 3])], [AMPLE])
    assert tree.tokens.tolist() == [3, 4, 5, 6]
    [four] = drafter.candidates(drafter.locate(SequenceState([3, 4, 0, 2, 3])))
    assert [one.token for one in drafter.candidates(four.cursor)] == [5, 0]


def test_the_oldest_answers_are_forgotten_and_the_youngest_never() -> None:
    drafter = Suffix(keep=60)
    for number in range(20):
        start = 10 * number
        answer(drafter, list(range(start, start + 9)))
        assert known(drafter, [start + 3, start + 4]) == [start + 5]
        kept = sum(map(len, drafter._answers.generations))
        assert kept <= 60
        if number >= 6:
            assert known(drafter, [start - 57, start - 56]) == []
        if number >= 3:
            assert kept >= 30
            assert known(drafter, [start - 17, start - 16]) == [start - 15]


def test_of_an_answer_that_is_too_long_the_end_is_kept() -> None:
    drafter = Suffix(keep=20)
    answer(drafter, list(range(100, 200)))
    assert known(drafter, [197, 198]) == [199]
    assert known(drafter, [150, 151]) == []
    assert sum(map(len, drafter._answers.generations)) <= 10


def test_memory_is_bounded_over_200_thousand_tokens() -> None:
    keep, tokens = 8_000, long_text(200_000, seed=3)
    drafter = Suffix(keep=keep)
    for start in range(0, len(tokens), 500):
        sequence = SequenceState(tokens[start : start + 500])
        sequence.prompt_length = 1
        drafter.finish(sequence)
        assert sum(map(len, drafter._answers.generations)) <= keep
        assert not drafter._texts


def test_a_long_match_with_earlier_answers_is_found_up_to_its_reach() -> None:
    drafter = Suffix(keep=1000)
    answer(drafter, list(range(100)))
    [(_, state, length)], _ = drafter.locate(SequenceState([500, *range(90)]))
    assert (state > ROOT, length) == (True, REACH)


@given(st.lists(texts, max_size=12), texts)
@settings(max_examples=50)
def test_what_is_saved_is_restored(answers: list[list[int]], text: list[int]) -> None:
    drafter, again = Suffix(keep=80, min=1), Suffix(keep=80, min=1)
    for tokens in answers:
        answer(drafter, tokens)
    again.restore({"answers": torch.tensor([5, 5, END], dtype=torch.int32)})
    again.restore(drafter.save())
    assert [list(a.tokens) for a in again._answers.generations] == [
        list(a.tokens) for a in drafter._answers.generations
    ]
    one, other = (d.candidates(d.locate(SequenceState(list(text)))) for d in (drafter, again))
    assert [(found.token, found.mass) for found in one] == [(found.token, found.mass) for found in other]


@pytest.mark.parametrize(
    "tensors",
    [
        {},
        {"other": torch.zeros(3, dtype=torch.int32)},
        {"answers": torch.zeros(3)},
        {"answers": torch.zeros(3, 3, dtype=torch.int32)},
        {"answers": torch.tensor([1, -2], dtype=torch.int32)},
        {"answers": torch.tensor([1, 6], dtype=torch.int32)},
    ],
)
def test_a_state_that_does_not_fit_is_one_sentence(tensors: dict[str, torch.Tensor]) -> None:
    drafter = Suffix(keep=80)
    drafter.bind(ToyTarget(6).info)
    answer(drafter, [1, 2, 3])
    with pytest.raises(UsageError, match="start afresh"):
        drafter.restore(tensors)
    assert known(drafter, [1, 2]) == [3]


@pytest.mark.parametrize("spec", ["suffix:keep=-1", "suffix:min=0"])
def test_options_out_of_range_are_one_sentence(spec: str) -> None:
    with pytest.raises(UsageError, match="keeps 0 or more tokens"):
        build_drafter(spec)


@pytest.mark.parametrize(
    ("draft", "tree", "verify"),
    [
        ("suffix:keep=60,min=1", "topk:12,depth=6,width=3", "match"),
        ("suffix:keep=60,min=1", "chain:5", "match"),
        ("suffix:keep=60,min=1", "paths:2x3", "match"),
        ("suffix:min=1", "rsd-c:3,1", "rrs"),
    ],
)
def test_the_text_is_that_of_plain_decoding(draft: str, tree: str, verify: str) -> None:
    make: Callable[[object], Drafter] = lambda truth: build_drafter(draft, tree)  # noqa: E731
    assert_writes_like_plain_decoding(make, VERIFIERS.build(verify))


def test_nothing_is_held_of_a_text_that_has_ended() -> None:
    drafter = Suffix(min=1)
    sequence = SequenceState([1, 2, 1, 2, 1])
    drafter.draft([sequence], [Budget(9, 9)])
    text = weakref.ref(drafter._texts[sequence])
    drafter.finish(sequence)
    gc.collect()
    assert text() is None
