"""Drafting from an index: what it proposes, how far it trusts it, and which targets it takes."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from branchwise.core.sampling import SamplingParams
from branchwise.core.sequence import SequenceState
from branchwise.core.tree import Draw
from branchwise.draft import build_drafter
from branchwise.draft.base import Budget
from branchwise.draft.lookup.base import LookupDrafter
from branchwise.draft.lookup.retrieval import CHILDREN, Retrieval, trust
from branchwise.engine import Engine, Request
from branchwise.errors import PairingError, UsageError
from branchwise.index.build import build_index
from branchwise.testing import ToyTarget
from branchwise.verify import VERIFIERS
from tests.test_index import tokenizer, write


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    texts = [[1, 2, 3, 4, 5, 6, 7], [1, 2, 3, 4, 0], [9, 2, 3, 8], [9, 2, 3, 8], [9, 2, 3, 8], [1, 2, 3, 4, 5, 6, 7]]
    return write(tmp_path / "index", texts, 10).folder


def test_it_continues_the_longest_end_of_the_text(folder: Path) -> None:
    drafter = build_drafter(f"retrieval:{folder}", "topk:4,depth=9")
    assert drafter.name == "retrieval"
    assert drafter.draw is Draw.FIXED
    (tree,) = drafter.draft([SequenceState([5, 1, 2, 3])], [Budget(9, 9)])  # three tokens match, so 8 is not expected
    assert tree.tokens.tolist() == [3, 4, 5, 0, 6]
    (tree,) = drafter.draft([SequenceState([7, 2, 3])], [Budget(9, 9)])
    assert set(tree.tokens.tolist()) == {3, 4, 8, 5, 0}
    assert tree.parents[:3] == (-1, 0, 0)


def test_all_texts_of_a_batch_get_their_own_tree(folder: Path) -> None:
    drafter = Retrieval(str(folder))
    trees = drafter.draft(
        [SequenceState([9, 2, 3]), SequenceState([2]), SequenceState([4, 4]), SequenceState([3, 4, 5])],
        [Budget(3, 3)] * 3 + [Budget(1, 3)],
    )
    assert [tree.tokens.tolist() for tree in trees] == [[3, 8], [2], [4], [5]]


def test_min_and_max_bound_the_match(folder: Path) -> None:
    def matched(text: list[int], **options: int) -> int | None:
        place = Retrieval(str(folder), **options).locate(SequenceState(text))
        return place and place.length

    assert matched([1, 2, 3, 4]) == 4
    assert matched([1, 2, 3, 4], max=3) == 3
    assert matched([0, 3, 4]) == 2
    assert matched([0, 3, 4], min=3) is None
    assert matched([3], min=2) is None
    assert matched([3], min=1) == 1
    assert matched([*range(10, 30), 3], min=1) == 1


def test_masses_grow_with_the_match_and_the_count_and_are_no_more_than_one(folder: Path) -> None:
    drafter = Retrieval(str(folder))
    long, short = drafter.locate(SequenceState([9, 2, 3])), drafter.locate(SequenceState([2, 3]))
    (sure,) = drafter.candidates(long)
    first, second = drafter.candidates(short)
    assert (sure.token, first.token, second.token) == (8, 4, 8)
    assert 0 < second.mass <= first.mass < sure.mass < 1
    assert first.mass + second.mass <= 1
    for length in range(1, 40):
        for hits in (1, 2, 64):
            assert 0 < trust(length, hits) < trust(length, hits + 1) < trust(length + 1, hits + 1) < 1


@given(st.lists(st.integers(0, 12), min_size=1, max_size=8))
def test_looking_changes_nothing_and_tokens_are_distinct(text: list[int]) -> None:
    drafter = HELD
    place = drafter.locate(SequenceState(text))
    found = drafter.candidates(place)
    assert drafter.candidates(place) == found
    assert len({entry.token for entry in found}) == len(found) <= CHILDREN
    assert sum(entry.mass for entry in found) <= 1
    assert [-entry.mass for entry in found] == sorted(-entry.mass for entry in found)
    for entry in found:
        assert 0 <= entry.token < 10
    assert drafter.advance(place, 11) is None


def _held() -> Retrieval:
    from tempfile import TemporaryDirectory

    rng = random.Random(2)
    with TemporaryDirectory() as folder:
        write(Path(folder) / "index", [[rng.randrange(10) for _ in range(300)] for _ in range(4)], 10, shard=256)
        return Retrieval(f"{folder}/index", min=1, hits=20)


HELD = _held()


@pytest.mark.parametrize(
    ("tree", "temperature"),
    [
        (None, 0.0),
        (None, 0.8),
        ("topk:9,depth=3", 0.0),
        ("topk:9,depth=3", 0.8),
        ("paths:2x3", 0.0),
        ("rsd-s:3x3", 0.0),
    ],
)
def test_the_text_is_that_of_plain_decoding(tree: str | None, temperature: float, tmp_path: Path) -> None:
    """Also where the index holds what will be written, so that much is accepted."""

    def run(draft: str, tree: str | None, verify: str) -> tuple[list[list[int]], int]:
        engine = Engine(ToyTarget(6, slots=2), build_drafter(draft, tree), VERIFIERS.build(verify))
        sampling = SamplingParams(temperature=temperature, seed=5)
        done = [engine.submit(Request(p, max_new_tokens=40, sampling=sampling)) for p in ((1, 2), (3,), (4, 4, 4))]
        steps = 0
        while engine.busy:
            engine.step()
            steps += 1
        return [generation.token_ids for generation in done], steps

    plain, slow = run("none", None, "match")
    write(tmp_path / "index", [list(text) for text in plain] + [[0, 1, 2, 3, 4, 5] * 4], 6)
    if tree is None or tree.startswith("topk"):
        written, steps = run(f"retrieval:{tmp_path / 'index'},min=1", tree, "match")
        assert written == plain
        assert steps < slow / 2
    else:
        written, steps = run(f"retrieval:{tmp_path / 'index'},min=1", tree, "traversal")
        assert written == plain
        assert steps < slow


def test_a_target_with_another_tokenizer_is_refused(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("w1 w2 w3 w4")
    build_index(tmp_path / "index", [tmp_path / "a.txt"], tokenizer(), model="tiny")
    target = ToyTarget(51).info
    Retrieval(str(tmp_path / "index")).bind(replace(target, tokenizer=tokenizer()))
    other = replace(target, tokenizer=tokenizer([f"v{n}" for n in range(50)]))
    with pytest.raises(PairingError, match=r"built with the tokenizer of tiny, and the target has another; build one"):
        Retrieval(str(tmp_path / "index")).bind(other)


def test_without_a_tokenizer_the_target_must_have_all_tokens(folder: Path) -> None:
    Retrieval(str(folder)).bind(ToyTarget(10).info)
    with pytest.raises(PairingError):
        Retrieval(str(folder)).bind(ToyTarget(9).info)


@pytest.mark.parametrize(
    ("spec", "words"),
    [
        ("retrieval", "needs 'folder', as in retrieval:FOLDER,max=16,min=2"),
        ("retrieval:nowhere", "There is no index nowhere"),
        ("retrieval:nowhere,min=0", "1 <= min <= max"),
        ("retrieval:nowhere,min=5,max=4", "min=5, max=4"),
        ("retrieval:nowhere,hits=0", "hits=0"),
    ],
)
def test_what_it_cannot_draft_from_is_told_at_once(spec: str, words: str) -> None:
    with pytest.raises(UsageError, match=words):
        build_drafter(spec)


def test_it_learns_nothing(folder: Path) -> None:
    drafter = Retrieval(str(folder))
    assert not drafter.learns
    assert type(drafter).learn is LookupDrafter.learn
