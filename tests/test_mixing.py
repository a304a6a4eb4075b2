"""Recall: the target's distributions as statistics of the draft. It stays lossless, helps where pairs of tokens repeat,
and its memory is bounded and a text's own.

Statistical tests run on fixed seeds. `FALSE_ALARM` of test_growth.py is how often each would fail had they been fresh.
"""

from __future__ import annotations

import gc
import itertools
from collections import Counter
from collections.abc import Sequence
from functools import cache

import numpy as np
import pytest
import torch
from torch import Tensor

from branchwise.audit.exact import emitted
from branchwise.audit.instances import DRAWS, Drafts, Instance
from branchwise.backends.base import Scored
from branchwise.core.sampling import SamplingParams
from branchwise.core.sequence import SequenceState as Text
from branchwise.core.topology import branched
from branchwise.core.tree import DraftTree
from branchwise.draft import build_drafter
from branchwise.draft.builder import Judged, TreeBuilder
from branchwise.draft.recall import KEPT, ROWS, TargetProbsMixer, worth_reading
from branchwise.engine import Engine, Generation, Request
from branchwise.errors import UsageError
from branchwise.testing import ToyTarget
from branchwise.verify import VERIFIERS, Verdict
from tests.test_builder import TEXTS, Remembered, assert_law, sampled, target_law

V = 5


def logits(nodes: int, seed: int = 0, vocabulary: int = V) -> Tensor:
    return 2 * torch.randn(nodes, vocabulary, generator=torch.Generator().manual_seed(seed))


def learnt(recall: TargetProbsMixer, text: Text, tokens: list[int], verdict: Verdict, rows: Tensor) -> None:
    """A step with a chain of these tokens, the root first."""
    recall.learn([Judged(text, DraftTree.chain(tokens), rows, verdict)])


def mixed(recall: TargetProbsMixer, text: Text, path: Sequence[int], probs: Tensor) -> Tensor:
    """What is drawn from after the tokens of a path below the root, where the source says `distribution`."""
    tree, node = TreeBuilder([text.root]), 0
    for token in path:
        node = tree.add(node, token)
    return recall.mix(text, tree, [node], probs[None])[0]


EVEN = torch.full((V,), 1 / V)


# What is remembered


def test_a_law_comes_back_after_the_same_two_tokens_wherever_they_stand() -> None:
    recall, rows = TargetProbsMixer(0.25), logits(3)
    text = Text([4, 1, 2], SamplingParams(temperature=0.5))
    learnt(recall, text, [2, 3, 0], Verdict((0, 1, 2), 1), rows)
    for pair, row in (((1, 2), rows[0]), ((2, 3), rows[1]), ((3, 0), rows[2])):
        expected = 0.75 * EVEN + 0.25 * (row / 0.5).softmax(dim=-1)
        assert torch.allclose(mixed(recall, text, [0, *pair], EVEN), expected, atol=1e-6)
        assert torch.allclose(mixed(recall, text, pair, EVEN), expected, atol=1e-6)
    at_root = 0.75 * EVEN + 0.25 * (rows[0] / 0.5).softmax(dim=-1)
    assert torch.allclose(mixed(recall, text, [], EVEN), at_root, atol=1e-6)
    assert torch.equal(mixed(recall, text, [3, 2], EVEN), EVEN)
    assert torch.equal(mixed(recall, text, [4, 3], EVEN), EVEN), "the last token alone is not enough"


def test_the_newest_law_counts() -> None:
    recall, text = TargetProbsMixer(0.5), Text([1, 2], SamplingParams(temperature=1.0))
    for seed in (1, 2):
        learnt(recall, text, [2], Verdict((0,), 1), logits(1, seed))
    expected = 0.5 * EVEN + 0.5 * logits(1, 2)[0].softmax(dim=-1)
    assert torch.allclose(mixed(recall, text, [], EVEN), expected, atol=1e-6)


def test_what_followed_an_accepted_node_counts_before_what_followed_a_rejected_one() -> None:
    recall, text, rows = TargetProbsMixer(0.5), Text([1, 1], SamplingParams(temperature=1.0)), logits(2)
    learnt(recall, text, [1, 1], Verdict((0,), 2), rows)  # both after the pair 1 1
    expected = 0.5 * EVEN + 0.5 * rows[0].softmax(dim=-1)
    assert torch.allclose(mixed(recall, text, [], EVEN), expected, atol=1e-6)


def test_the_first_token_of_a_text_has_no_pair() -> None:
    recall, text = TargetProbsMixer(0.5), Text([1], SamplingParams(temperature=1.0))
    learnt(recall, text, [1], Verdict((0,), 2), logits(1))
    assert torch.equal(mixed(recall, text, [], EVEN), EVEN)


def test_the_most_probable_tokens_of_a_large_vocabulary_are_kept_as_a_law() -> None:
    size = 400
    recall, text, rows = TargetProbsMixer(0.5), Text([1, 2], SamplingParams(temperature=1.0)), logits(1, 0, size)
    learnt(recall, text, [2], Verdict((0,), 1), rows)
    probs = mixed(recall, text, [], torch.full((size,), 1 / size))
    top = rows[0].topk(KEPT)
    assert set((probs > 1 / size).nonzero()[:, 0].tolist()) <= set(top.indices.tolist())
    assert torch.allclose(probs[top.indices], 0.5 / size + 0.5 * top.values.softmax(dim=-1), atol=1e-6)
    assert float(probs.double().sum()) == pytest.approx(1, abs=1e-6)


def test_the_law_of_the_source_is_not_written_to() -> None:
    recall, text = TargetProbsMixer(0.5), Text([1, 2], SamplingParams(temperature=1.0))
    learnt(recall, text, [2], Verdict((0,), 1), logits(1))
    probs = EVEN.clone()
    mixed(recall, text, [], probs)
    assert torch.equal(probs, EVEN)


def test_accepted_nodes_are_read_first_and_of_a_large_tree_no_more_than_some() -> None:
    tree = DraftTree(torch.arange(13), branched([3, 3]))
    assert worth_reading(tree, Verdict((0, 2, 8), 1)) == [0, 2, 8, 1, 3, 7, 9]
    wide = DraftTree(torch.arange(41), branched([40]))
    assert worth_reading(wide, Verdict((0, 30), 1)) == [0, 30, *range(1, ROWS - 1)]


def test_the_memory_of_a_text_is_bounded_and_the_oldest_is_forgotten(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("branchwise.draft.recall.PAIRS", 3)
    recall, text = TargetProbsMixer(0.5), Text([9, 0], SamplingParams(temperature=1.0))
    for token in range(1, 5):
        learnt(recall, text, [text.root], Verdict((0,), token), logits(1, token))
        text.tokens.append(token)
    assert list(recall._memories[text]) == [(0, 1), (1, 2), (2, 3)]
    learnt(recall, text, [4, 0, 1], Verdict((0, 1, 2), 1), logits(3))
    # The pair 0 1 was met again, so it is not the oldest any more.
    assert set(recall._memories[text]) == {(3, 4), (4, 0), (0, 1)}


def test_a_memory_is_a_text_s_own_and_goes_with_it() -> None:
    # Texts of one seed share their noise: through a shared memory one would know what another is about to draw.
    recall = TargetProbsMixer(0.5)
    one, other = (Text([1, 2], SamplingParams(temperature=1.0, seed=1)) for _ in range(2))
    learnt(recall, one, [2], Verdict((0,), 1), logits(1))
    assert torch.equal(mixed(recall, other, [], EVEN), EVEN)
    assert not torch.equal(mixed(recall, one, [], EVEN), EVEN)
    del one
    gc.collect()
    assert len(recall._memories) == 0


@pytest.mark.parametrize("share", [0, 1, -0.1, 1.5, float("nan")])
def test_a_share_that_is_none_is_refused(share: float) -> None:
    with pytest.raises(UsageError, match=r"share between 0 and 1, such as recall=0\.3"):
        build_drafter(f"disturbed:1,recall={share}")


def test_it_is_off_by_default() -> None:
    assert build_drafter("disturbed").recall is None  # type: ignore[attr-defined]
    assert build_drafter("disturbed:1,recall=0.3").recall.share == 0.3  # type: ignore[attr-defined]


# Lossless


@pytest.mark.parametrize("name", ["token", "block", "cascade", "rrs", "traversal"])
def test_the_emitted_law_is_the_target_s_when_the_draft_is_a_mixture(name: str) -> None:
    instance = Instance.random(3, 2, 2, 2.0, (3,))
    recall, text = TargetProbsMixer(0.4), Text([1, 0], SamplingParams(temperature=1.0))
    learnt(recall, text, [0, 2, 1], Verdict((0, 1, 2), 0), logits(3, 0, 3))

    def row(prefix: tuple[int, ...]) -> np.ndarray:
        code = int("0" + "".join(map(str, prefix)), 3)
        return mixed(recall, text, prefix, torch.from_numpy(instance.q[len(prefix)][code])).numpy()

    q = tuple(np.array([row(prefix) for prefix in itertools.product(range(3), repeat=n)]) for n in range(2))
    assert not np.allclose(q[0], instance.q[0])
    assert (np.abs(q[1] - instance.q[1]).max(axis=1) > 0.01).tolist() == [False, False, True]
    for kind, draw in DRAWS.items():
        verifier = VERIFIERS.build(name)
        if draw in verifier.accepts:
            assert emitted(verifier, Drafts.of(kind, Instance(instance.p, q, 2)))[0] < 1e-9


def run(target: ToyTarget, draft: str, tree: str, name: str, requests: Sequence[Request]) -> list[Generation]:
    engine = Engine(target, build_drafter(draft, tree), VERIFIERS.build(name))
    generations = [engine.submit(request) for request in requests]
    while engine.busy:
        engine.step()
    return generations


@pytest.mark.parametrize(("name", "tree"), [("block", "chain:2"), ("traversal", "rsd-c:2,1")])
def test_short_texts_have_the_law_of_the_target(name: str, tree: str) -> None:
    found = run(Remembered(3, slots=200), "disturbed:1,recall=0.5", tree, name, sampled(range(TEXTS)))
    assert_law(Counter(tuple(generation.token_ids) for generation in found), target_law())


def test_what_is_recorded_is_the_mixture_that_was_drawn_from() -> None:
    target, text = ToyTarget(V), Text([1, 2], SamplingParams(temperature=1.0, seed=4))
    target.open(text)
    plain, mixing = build_drafter("disturbed:1", "chain:1"), build_drafter("disturbed:1,recall=0.5", "chain:1")
    rows = logits(2)
    for drafter in (plain, mixing):
        drafter.bind(target.info)
    budget = Engine(target, plain, VERIFIERS.build("block")).most
    mixing.draft([text], [budget])
    mixing.update([text], Scored(rows[None]), [Verdict((0,), 1)])
    [before], [after] = plain.draft([text], [budget]), mixing.draft([text], [budget])
    assert before.q is not None
    assert after.q is not None
    assert torch.allclose(after.q[0], 0.5 * before.q[0] + 0.5 * rows[0].softmax(dim=-1), atol=1e-6)


def test_a_text_does_not_depend_on_the_texts_beside_it() -> None:
    requests = [Request((1, n % 3), SamplingParams(temperature=1.0, seed=n % 2), max_new_tokens=12) for n in range(6)]

    def texts(requests: list[Request], slots: int) -> list[list[int]]:
        found = run(Remembered(3, slots=slots), "disturbed:1,recall=0.5", "paths:2x3", "cascade", requests)
        return [generation.token_ids for generation in found]

    assert texts(requests, 4) == [texts([request], 1)[0] for request in requests]


# What it is good for


@cache
def after(pair: tuple[int, ...]) -> Tensor:
    return ToyTarget(V).logits(pair)


class Bigrams(ToyTarget):
    """A target that looks at two tokens only."""

    def logits(self, tokens: Sequence[int]) -> Tensor:
        return after(tuple(tokens[-2:]))


@pytest.mark.parametrize("temperature", [0.0, 1.0])
def test_where_pairs_of_tokens_repeat_more_is_accepted(temperature: float) -> None:
    requests = [
        Request((1, 2, n), SamplingParams(temperature=temperature, seed=n), max_new_tokens=60) for n in range(4)
    ]

    def accepted(draft: str) -> float:
        found = run(Bigrams(V), draft, "chain:3", "block", requests)
        return 240 / sum(generation.stats.steps for generation in found)

    plain, some, most = (accepted(f"disturbed:2{recall}") for recall in ("", ",recall=0.3", ",recall=0.8"))
    assert plain < some < most
    assert most > 1.2 * plain


def test_where_nothing_repeats_the_text_is_still_that_of_plain_decoding() -> None:
    # The distributions of this target depend on all tokens before, so what is remembered misleads.
    requests = [Request((1, 2, n), SamplingParams(), max_new_tokens=40) for n in range(3)]
    plain = Engine(ToyTarget(V), build_drafter("none"), VERIFIERS.build("match"))
    truth = [plain.submit(request) for request in requests]
    while plain.busy:
        plain.step()
    found = run(ToyTarget(V), "disturbed:1,recall=0.5", "chain:3", "block", requests)
    assert [generation.token_ids for generation in found] == [generation.token_ids for generation in truth]
