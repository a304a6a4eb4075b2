"""The statistics of the audits: cells that add up, alarms as rare as stated, distances found as surely as stated."""

from __future__ import annotations

import itertools
import math
import subprocess
import sys
from collections.abc import Callable, Mapping

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from branchwise.audit.blocks import EXPECTED, Block, BlockTest, BlockTests, Floats, Partition, _pool, g_test
from branchwise.audit.findings import SUSPICIOUS, Activity, Finding, Word, check_demands, judge, shorten
from branchwise.errors import UsageError

ACTIVE = Activity(drafted=100, accepted=40)
STOP = 0


def toy_law(seed: int, vocabulary: int, sharpness: float, zeros: bool) -> Callable[[Block], Floats | None]:
    """A fixed random distribution after every prefix; token 0 ends a text."""

    def probs(prefix: Block) -> Floats | None:
        if prefix and prefix[-1] == STOP:
            return None
        rng = np.random.default_rng([seed, *map(int, prefix)])
        found = rng.exponential(size=vocabulary) ** sharpness
        if zeros:
            found[rng.integers(vocabulary)] = 0.0
        return found / found.sum()

    return probs


def every_text(probs: Callable[[Block], Floats | None], vocabulary: int, length: int) -> dict[Block, float]:
    """All texts of at most `length` tokens with their probabilities, straight from the definition."""
    texts: dict[Block, float] = {(): 1.0}
    for _ in range(length):
        longer: dict[Block, float] = {}
        for text, mass in texts.items():
            following = probs(text)
            if following is None:
                longer[text] = mass
            else:
                longer |= {(*text, token): mass * float(following[token]) for token in range(vocabulary)}
        texts = longer
    return texts


@given(
    seed=st.integers(0, 1000),
    vocabulary=st.integers(2, 5),
    length=st.integers(1, 4),
    samples=st.sampled_from([1, 7, 60, 500, 4000, 10**6]),
    sharpness=st.sampled_from([0.0, 1.0, 6.0]),
    zeros=st.booleans(),
)
def test_every_text_lies_in_one_cell_and_cells_have_the_mass_of_their_texts(
    seed: int, vocabulary: int, length: int, samples: int, sharpness: float, zeros: bool
) -> None:
    probs = toy_law(seed, vocabulary, sharpness, zeros)
    partition = Partition(probs, length=length, samples=samples)
    masses = np.zeros(len(partition))
    for text, mass in every_text(probs, vocabulary, length).items():
        cell = partition.cell_of(text)
        assert cell != Partition.IMPOSSIBLE or mass == 0
        first = probs(())
        if samples >= 2 * EXPECTED and first is not None and first[int(text[0])] == 0:
            assert cell == Partition.IMPOSSIBLE
        masses[cell] += mass
    assert partition.probabilities == pytest.approx(masses, abs=1e-12)
    assert partition.probabilities.sum() == pytest.approx(1, abs=1e-12)
    assert partition.probabilities[Partition.IMPOSSIBLE] == 0
    assert (partition.probabilities >= 0).all()


@given(seed=st.integers(0, 1000), length=st.integers(1, 3), known=st.integers(0, 4), samples=st.integers(1, 2000))
def test_tokens_that_a_server_does_not_name_lie_with_any_other_token(
    seed: int, length: int, known: int, samples: int
) -> None:
    letters = "abcd"
    whole = toy_law(seed, 4, 2.0, zeros=False)

    def numbers(prefix: Block) -> Block:
        return tuple(letters.index(str(token)) + 1 for token in prefix)  # no letter ends a text

    def stated(prefix: Block) -> Mapping[str, float]:
        found = whole(numbers(prefix))
        assert found is not None
        best = sorted(range(4), key=lambda token: -found[token])[:known]
        return {letters[token]: float(found[token]) for token in best}

    partition = Partition(stated, length=length, samples=samples)
    masses = np.zeros(len(partition))
    for text in itertools.product(letters, repeat=length):
        mass = 1.0
        for depth in range(length):
            found = whole(numbers(text[:depth]))
            assert found is not None
            mass *= float(found[letters.index(text[depth])])
        masses[partition.cell_of(text)] += mass
    assert partition.probabilities == pytest.approx(masses, abs=1e-5)  # some mass is kept for tokens never named
    assert partition.cell_of(("never heard of",) * length) == partition.cell_of(())
    assert partition.cell_of(("a",)) in range(1, len(partition))  # a text that ended early has its place


def test_the_likeliest_prefixes_get_cells_first_whatever_their_length() -> None:
    probs = {(): [0.9, 0.1], (0,): [0.8, 0.2], (0, 0): [0.99, 0.01]}
    partition = Partition(lambda prefix: np.array(probs.get(prefix, [0.5, 0.5])), length=3, samples=100)
    assert partition.prefixes[:5] == [(), (0,), (0, 0), (0, 0, 0), (0, 1)]
    assert (0, 0, 1) not in partition.prefixes  # it would expect less than 1 count


def test_a_prefix_is_not_refined_into_cells_that_expect_too_little() -> None:
    asked: list[Block] = []

    def probs(prefix: Block) -> Floats:
        asked.append(prefix)
        return np.full(10, 0.1)

    partition = Partition(probs, length=3, samples=90)
    assert asked == [(), *((token,) for token in range(7))][: len(asked)]
    assert all(len(prefix) < 2 for prefix in partition.prefixes)
    assert min(partition.probabilities[2:]) * 90 >= EXPECTED


@given(
    probs=st.lists(st.floats(1e-6, 1), min_size=1, max_size=30), counts=st.integers(0, 2000), seed=st.integers(0, 1000)
)
def test_pooled_cells_expect_enough_and_lose_nothing(probs: list[float], counts: int, seed: int) -> None:
    masses = np.array(probs) / sum(probs)
    observed = np.random.default_rng(seed).multinomial(counts, masses).astype(float)
    pooled, merged = _pool(observed, masses, counts)
    assert pooled.sum() == counts
    assert merged.sum() == pytest.approx(1)
    assert len(merged) == 1 or merged.min() * counts >= EXPECTED


def flat(cells: int) -> Floats:
    """Uneven probabilities: the last cells expect few counts."""
    probs = np.linspace(3, 0.2, cells)
    return probs / probs.sum()


@pytest.mark.parametrize(("cells", "samples"), [(4, 300), (12, 400), (50, 1000)])
def test_p_values_of_a_correct_decoder_are_as_rare_as_they_say(cells: int, samples: int) -> None:
    rng = np.random.default_rng(cells)
    counts = rng.multinomial(samples, flat(cells), size=4000)
    values = np.array([g_test(row, flat(cells)).p_value for row in counts])
    for level in (0.5, 0.1, 0.02):
        assert (values <= level).mean() == pytest.approx(level, abs=4.5 * math.sqrt(level / 4000))


def test_a_correct_decoder_is_accused_no_more_often_than_stated_over_all_tests() -> None:
    rng = np.random.default_rng(7)
    probs = [flat(cells) for cells in (3, 8, 20, 60, 60)]
    alarms = 0
    for _ in range(1000):
        tests = BlockTests(tuple(g_test(rng.multinomial(500, row), row) for row in probs), false_alarm=0.05)
        alarms += min(tests.adjusted) <= 0.05
    assert alarms / 1000 < 0.05 + 4 * math.sqrt(0.05 / 1000)
    assert alarms  # the rate is used up, not merely kept


def test_the_sum_of_many_sparse_tests_keeps_its_middle() -> None:
    """Catches a G without Williams' correction, whose mean is too large by some percent where cells expect little."""
    rng = np.random.default_rng(1)
    probs = np.full(10, 0.1)
    values = []
    for _ in range(400):
        tests = BlockTests(tuple(g_test(row, probs) for row in rng.multinomial(60, probs, size=30)))
        values.append(tests.family[-1].p_value)
    assert np.mean(np.array(values) <= 0.5) == pytest.approx(0.5, abs=0.09)


@pytest.mark.parametrize(("cells", "samples"), [(2, 300), (20, 1000), (50, 3000)])
def test_the_stated_distance_is_found_nine_times_in_ten_in_the_hardest_direction(cells: int, samples: int) -> None:
    probs = np.full(cells, 1 / cells)
    level = 1e-3
    distance = g_test(np.full(cells, samples // cells), probs).detectable(level)
    half = np.where(np.arange(cells) < cells // 2, 1.0, -1.0)
    found = {}
    for name, direction in (
        ("hardest", half / cells),
        ("one cell", np.append(1.0, np.full(cells - 1, -1 / (cells - 1)))),
    ):
        away = direction / np.abs(direction).sum() * 2 * distance
        shifted = probs + np.where(probs + away < 0, 0, away)
        rows = np.random.default_rng(3).multinomial(samples, shifted / shifted.sum(), size=600)
        found[name] = np.mean([g_test(row, probs).p_value <= level for row in rows])
    assert found["hardest"] == pytest.approx(0.9, abs=0.05)
    assert found["one cell"] >= found["hardest"] - 0.05


def test_more_samples_find_smaller_distances_and_more_cells_need_more_samples() -> None:
    def detectable(cells: int, samples: int) -> float:
        return g_test(np.full(cells, samples // cells), np.full(cells, 1 / cells)).detectable(1e-3)

    assert detectable(10, 4000) == pytest.approx(detectable(10, 1000) / 2, rel=0.01)
    assert detectable(40, 1000) > detectable(10, 1000)
    assert g_test(np.array([5]), np.array([1.0])).detectable(1e-3) == 1.0  # one cell tells nothing


def test_all_contexts_together_find_a_bias_that_none_shows_alone() -> None:
    rng = np.random.default_rng(0)
    probs = np.full(10, 0.1)
    biased = probs + np.where(np.arange(10) < 5, 0.007, -0.007)
    tests = BlockTests(tuple(g_test(rng.multinomial(1000, biased), probs, str(i)) for i in range(40)))
    assert min(tests.adjusted[:-1]) > tests.false_alarm
    assert tests.family[-1].context == "all contexts together"
    assert tests.adjusted[-1] <= tests.false_alarm
    assert judge(tests, activity=ACTIVE).word is Word.NOT_LOSSLESS


def test_a_drafter_that_records_another_law_than_it_drew_from_is_found_with_few_samples() -> None:
    """Drafting by argmax and recording the softmax as q: .75/.25/0 in place of .30/.50/.20."""
    probs, wrong = np.array([0.3, 0.5, 0.2]), np.array([0.75, 0.25, 0.0])
    test = g_test(np.random.default_rng(0).multinomial(100, wrong), probs, "a context")
    finding = judge(BlockTests((test,)), activity=ACTIVE)
    assert finding.word is Word.NOT_LOSSLESS
    assert finding.evidence[0].startswith("a context: G = ")


def test_one_block_that_cannot_be_is_proof() -> None:
    partition = Partition(lambda prefix: np.array([0.5, 0.5, 0.0]), length=2, samples=1000)
    blocks: list[Block] = [(0, 1), (1, 0)] * 499 + [(0, 0), (0, 2)]
    test = g_test(partition.count(blocks), partition.probabilities, "here")
    assert test.impossible == 1
    assert test.p_value == 0
    finding = judge(BlockTests((test,)), activity=ACTIVE)
    assert finding.word is Word.NOT_LOSSLESS
    assert finding.evidence == ("here: 1 of 1,000 blocks hold a token that cannot stand there.",)


def test_holm_adjusts_as_its_definition_says() -> None:
    values = [0.01, 0.04, 0.03, 0.005]

    class Known(BlockTest):
        @property
        def p_value(self) -> float:
            return self.statistic

    tests = BlockTests(tuple(Known(str(p), 10, 2, p, 1, 0, 0.0, 0.0) for p in values))
    assert tests.family[:4] == tests.contexts
    fifth = tests.family[4].p_value  # of the sum of the statistics
    ordered = sorted([*values, fifth])
    expected = {p: max(min(1, (5 - j) * ordered[j]) for j in range(i + 1)) for i, p in enumerate(ordered)}
    assert tests.adjusted == pytest.approx([expected[p] for p in [*values, fifth]])
    assert tests.level == pytest.approx(1e-3 / 5)


def family_of(samples: int, bias: float = 0.0, false_alarm: float = 1e-3) -> BlockTests:
    """Counts as even as they come, shifted by a bias from one half of the cells to the other."""
    probs = np.full(10, 0.1)
    shift = np.where(np.arange(10) < 5, bias, -bias) / 5
    return BlockTests((g_test(np.round((probs + shift) * samples).astype(np.int64), probs, "a context"),), false_alarm)


def check(finding: Finding, word: Word, exit_code: int, *words: str) -> None:
    assert finding.word is word, finding.evidence
    assert finding.exit_code == exit_code
    for piece in words:
        assert any(piece in sentence for sentence in finding.evidence), finding.evidence
    assert finding.as_dict() == {"finding": word.value, "evidence": list(finding.evidence)}


def test_lossless_is_said_with_its_power_and_its_false_alarm_rate() -> None:
    finding = judge(family_of(5000), activity=ACTIVE, notes=["By the way."])
    check(finding, Word.LOSSLESS, 0, "1 test on 5,000 blocks", "false-alarm rate of 0.001", "with probability 0.9")
    assert finding.evidence[-1] == "By the way."
    check(judge(family_of(5000), activity=None), Word.LOSSLESS, 0)


def test_not_lossless_is_said_for_a_test_or_for_a_proof() -> None:
    check(judge(family_of(5000, 0.1), activity=ACTIVE), Word.NOT_LOSSLESS, 1, "a context: G =", "after Holm")
    check(judge(family_of(5000), activity=ACTIVE, proofs=["Seen."]), Word.NOT_LOSSLESS, 1, "Seen.")
    check(judge(family_of(10), activity=None, proofs=["Seen."]), Word.NOT_LOSSLESS, 1, "Seen.")


def test_undecided_is_said_where_the_tests_could_have_found_too_little() -> None:
    check(judge(family_of(100), activity=ACTIVE), Word.UNDECIDED, 3, "100 blocks a distance of", "0.1 is asked for")
    check(judge(family_of(10), activity=ACTIVE), Word.UNDECIDED, 3, "No context could be tested")
    check(judge(BlockTests(()), activity=ACTIVE), Word.UNDECIDED, 3, "No context could be tested")
    check(judge(family_of(5000), activity=ACTIVE, limit=0.001), Word.UNDECIDED, 3, "0.001 is asked for")


def test_undecided_is_said_for_a_p_value_that_is_suspicious_and_not_decisive() -> None:
    p = family_of(5000, 0.03).adjusted[0]
    decisive, near, far = p * 1.01, p / (SUSPICIOUS - 1), p / (SUSPICIOUS + 1)
    check(judge(family_of(5000, 0.03, decisive), activity=ACTIVE), Word.NOT_LOSSLESS, 1)
    check(judge(family_of(5000, 0.03, near), activity=ACTIVE), Word.UNDECIDED, 3, "suspicious and not decisive")
    check(judge(family_of(5000, 0.03, far), activity=ACTIVE), Word.LOSSLESS, 0)


@pytest.mark.parametrize(
    ("activity", "word"), [(Activity(50, 0), "accepted"), (Activity(50, 50), "rejected"), (Activity(0, 0), "accepted")]
)
def test_undecided_is_said_where_the_rule_was_not_put_to_the_test(activity: Activity, word: str) -> None:
    check(judge(family_of(5000), activity=activity), Word.UNDECIDED, 3, f"none was {word}")


def test_undecided_is_said_where_something_was_left_untested_and_no_difference_found() -> None:
    check(judge(family_of(5000), activity=ACTIVE, gaps=["Left out."]), Word.UNDECIDED, 3, "Left out.")
    check(judge(family_of(5000, 0.1), activity=ACTIVE, gaps=["Left out."]), Word.NOT_LOSSLESS, 1)


def test_a_doubt_leaves_even_a_difference_undecided_and_shows_it() -> None:
    finding = judge(family_of(5000, 0.1), activity=ACTIVE, doubts=["Stopped."])
    check(finding, Word.UNDECIDED, 3, "Stopped.", "a context: G =")


@pytest.mark.parametrize("rate", [0, -1, 0.5, float("nan")])
def test_demands_that_no_audit_can_meet_are_refused(rate: float) -> None:
    check_demands(1e-3, 0.1, samples=1)
    with pytest.raises(UsageError, match="false-alarm rate must be above 0"):
        check_demands(rate, 0.1)
    with pytest.raises(UsageError, match="distance to detect must be above 0"):
        check_demands(1e-3, rate if rate != 0.5 else 1.0)
    with pytest.raises(UsageError, match="samples must be at least 1, not 0"):
        check_demands(1e-3, 0.1, samples=0)


def test_a_report_says_everything_as_plain_values() -> None:
    found = family_of(5000).as_dict()
    assert found["samples"] == 5000
    assert {"context", "samples", "cells", "statistic", "freedom", "p_value", "adjusted_p_value"} <= set(
        found["tests"][0]
    )
    assert family_of(10).as_dict()["contexts_without_a_test"] == ["a context"]


def test_names_of_contexts_are_short_and_one_line() -> None:
    assert shorten("a\n  b") == "a b"
    assert len(shorten("word " * 50)) == 40


def test_importing_the_audits_imports_nothing_heavy() -> None:
    code = (
        "import sys, branchwise.audit, branchwise.cli.audit;"
        "heavy = {'torch', 'transformers', 'numpy', 'scipy', 'rich.table'} & set(sys.modules); assert not heavy, heavy"
    )
    subprocess.run([sys.executable, "-c", code], check=True, timeout=60)
