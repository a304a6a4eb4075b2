"""Trees that a draft model draws ahead of the host are those that it grows level by level, token for token and q for q.

The kernels of the passes are stood in for by torch (`attention_twins.py`); `tests/gpu/test_model_ahead.py` is the same
on a device, where all of it is recorded."""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from branchwise.backends.base import Scored, ScoredNodes, TargetInfo
from branchwise.backends.transformers.target import TransformersTarget
from branchwise.core.batch import TreeBatch
from branchwise.core.rows import BLOCK
from branchwise.core.sampling import SamplingParams
from branchwise.core.sequence import SequenceState
from branchwise.core.tree import DraftTree
from branchwise.cuda.inputs import BATCHES, fitting
from branchwise.draft import build_policy
from branchwise.draft.base import Budget
from branchwise.draft.drawn import choice
from branchwise.draft.drawn.drawing import Drawing
from branchwise.draft.drawn.trees import Drawn, TreeDraft, draw_keys
from branchwise.draft.model import reading
from branchwise.draft.model.ahead import ModelAhead
from branchwise.draft.model.draft_model import Weights
from branchwise.draft.model.drafter import ModelDrafter
from branchwise.draft.model.reading import BatchReading
from branchwise.draft.model.vocabulary import Vocabulary, save_counts
from branchwise.draft.sampler import PICKS
from branchwise.engine import Engine, Generation, Request
from branchwise.verify import VERIFIERS, Verdict, Verdicts
from tests import attention_twins
from tests.test_inflight import Watched
from tests.test_model_drafter import tiny

VOCABULARY = 300
"""more than a block, so that blocks race too"""
PROMPTS = [(1, 2, 3, 4, 5), (6,), tuple(range(1, 24)), (7, 8)]
WAYS = [
    SamplingParams(temperature=0.8, seed=5),
    SamplingParams(),
    SamplingParams(temperature=1.0, seed=2, top_k=3),
    SamplingParams(temperature=1.3, seed=1 << 62, top_p=0.7, min_p=0.02),
]
TREES = [
    ("chain:4", "block"),
    ("chain:1", "token"),
    ("paths:3x3", "cascade"),
    ("paths:2x4@2", "traversal"),
    ("rsd-c:3,2,1", "rrs"),
    ("template:sequoia-24", "traversal"),
]


@pytest.fixture(autouse=True)
def _twins(monkeypatch: pytest.MonkeyPatch) -> None:
    attention_twins.install(monkeypatch)


Noted = tuple[tuple[int, ...], list[int], tuple[int, ...], tuple[int, ...], Tensor | None]


class Noting(ModelDrafter):
    """Notes its trees, each with the text that it stands behind."""

    def __init__(self, *given, **more) -> None:  # type: ignore[no-untyped-def]
        super().__init__(*given, **more)
        self.noted: list[Noted] = []
        self.ahead = 0
        """batches whose trees had been drawn behind the verdict before"""
        self.interrupts: list[bool] = []

    def draft(self, sequences: Sequence[SequenceState], budgets: Sequence[Budget]) -> list[DraftTree]:
        found = None if self._ahead is None else self._ahead._found
        grown, trees = self.passes, super().draft(sequences, budgets)
        self.ahead += found is not None and self.passes == grown
        for sequence, tree in zip(sequences, trees, strict=True):
            tokens, q = tree.tokens.tolist()[1:], None if tree.q is None else tree.q.clone()
            self.noted.append((tuple(sequence.tokens), tokens, tree.parents, tree.leaves, q))
        return trees

    def update(self, sequences: Sequence[SequenceState], scored: Scored, verdicts: Sequence[Verdict]) -> None:
        super().update(sequences, scored, verdicts)
        if self.interrupts and self.interrupts.pop():
            raise KeyboardInterrupt


class LevelByLevel(Noting):
    """With the host between two levels."""

    def _on_device(self, target: TargetInfo) -> ModelAhead | None:
        return None


def target_of(slots: int = 3, vocabulary: int = VOCABULARY) -> Watched:
    return Watched(tiny(0, layers=1, vocabulary=vocabulary), slots=slots, context=96, max_nodes=32, kernels=True)


def close_to(vocabulary: int = VOCABULARY) -> Weights:
    """A draft model that is often right: the target with noise."""
    model = tiny(0, layers=1, vocabulary=vocabulary)
    with torch.no_grad():
        for number, weight in enumerate(model.parameters()):
            noise = torch.randn(weight.shape, generator=torch.Generator().manual_seed(number))
            weight.add_(0.15 * weight.std() * noise)
    return Weights("noisy", model, None)


def write(
    drafter: ModelDrafter, verify: str, ways: Sequence[SamplingParams], target: Watched | None = None, batch: int = 4
) -> list[Generation]:
    engine = Engine(target or target_of(), drafter, VERIFIERS.build(verify))
    asked = [
        engine.submit(Request(prompt, ways[row % len(ways)], max_new_tokens=22 + 5 * row))
        for row, prompt in enumerate(PROMPTS[:batch])
    ]
    while engine.busy:
        with suppress(KeyboardInterrupt):
            engine.step()
    return asked


def assert_same(one: Noting, other: Noting) -> None:
    assert len(one.noted) == len(other.noted) > 10
    for mine, theirs in zip(one.noted, other.noted, strict=True):
        assert mine[:4] == theirs[:4]
        assert (mine[4] is None) == (theirs[4] is None)
        if mine[4] is not None and theirs[4] is not None:
            assert torch.allclose(mine[4], theirs[4], rtol=1e-4, atol=1e-6)
            assert torch.equal(mine[4] > 0, theirs[4] > 0)


@pytest.mark.parametrize("ways", [WAYS[:1], WAYS[1:2], WAYS], ids=["drawn", "greedy", "of all kinds"])
@pytest.mark.parametrize(("tree", "verify"), TREES)
def test_trees_are_those_of_level_by_level(tree: str, verify: str, ways: list[SamplingParams]) -> None:
    """Four texts in three slots: some end, one joins, and steps go on with those that are left."""
    ahead, levels = (kind(close_to(), tree=build_policy(tree)) for kind in (Noting, LevelByLevel))
    found, expected = write(ahead, verify, ways), write(levels, verify, ways)
    if len(ways) == 1 or tree.startswith(("chain", "paths")):  # others lack tokens of distributions that are cut
        assert ahead.ahead > 10
    assert_same(ahead, levels)
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    assert sum(one.stats.accepted_tokens for one in found) > 10


@pytest.mark.parametrize(("tree", "depth"), [("chain:4", 4), ("rsd-c:2,2", 2), ("ranks:mcsd", 3)])
def test_trees_of_known_shapes_are_drafted_without_the_host(
    tree: str, depth: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One call draws all levels, and the pass over them begins before the host knows what they are."""
    target, drafter = target_of(), Noting(close_to(), tree=build_policy(tree))
    monkeypatch.setattr(TransformersTarget, "sprout", None)
    [text] = write(drafter, "auto", WAYS[:1], target, batch=1)
    steps = text.stats.steps
    assert drafter.ahead == steps - 1, "only the first tree was drawn from what the host said"
    assert target.served > steps / 2
    assert depth * steps <= drafter.passes <= depth * (steps + 1)


@pytest.mark.parametrize(("tree", "verify"), [("chain:3", "block"), ("rsd-c:2,2", "rrs"), ("ranks:mcsd", "match")])
def test_as_on_a_device_trees_lie_at_one_place_and_the_host_never_sees_their_tokens(
    tree: str, verify: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next trees are written over those that the host is still reading the verdict of."""
    levels, ways = LevelByLevel(close_to(), tree=build_policy(tree)), WAYS[:2]
    expected = write(levels, verify, ways)
    places: dict[tuple[int, int], Drawn] = {}

    def place(self: Drawing, draft: TreeDraft, size: int) -> Drawn:
        return places.setdefault((id(draft), size), draft.place(size, VOCABULARY))

    monkeypatch.setattr(Drawing, "_place", place)
    monkeypatch.setattr(TreeBatch, "host_tokens", None)
    ahead, target = Noting(close_to(), tree=build_policy(tree)), target_of()
    found = write(ahead, verify, ways, target)
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    assert [one.stats.accepted_per_depth for one in found] == [one.stats.accepted_per_depth for one in expected]
    assert target.served > 3
    if tree != "ranks:mcsd":
        assert_same(ahead, levels)


@pytest.mark.parametrize("tree", ["chain:3", "paths:2x3"])
@pytest.mark.parametrize("step", [0, 1, 4])
def test_an_interrupted_step_is_drafted_for_again(tree: str, step: int) -> None:
    """Its next paths were drawn behind a verdict that was never committed."""
    found = []
    for kind, interrupts in ((Noting, [True, *[False] * step]), (LevelByLevel, [])):
        drafter = kind(close_to(), tree=build_policy(tree))
        drafter.interrupts = list(interrupts)
        found.append([one.token_ids for one in write(drafter, "cascade", WAYS, batch=3)])
        assert not drafter.interrupts
    assert found[0] == found[1]


@pytest.mark.parametrize(
    ("own", "options"),
    [
        (VOCABULARY - 20, {}),
        (VOCABULARY + 20, {}),
        (VOCABULARY, {"temperature": 0.5, "top_k": 2}),
        (VOCABULARY, {"trim": VOCABULARY - 40}),
    ],
    ids=["fewer tokens", "more tokens", "its own warping", "trimmed"],
)
def test_distributions_are_those_of_the_drafter(
    own: int, options: dict[str, float], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("BRANCHWISE_CACHE", str(tmp_path))
    target = target_of()
    save_counts(target.info, torch.arange(VOCABULARY), {})
    # As with one tokenizer, where models of a family have padded their vocabularies differently.
    monkeypatch.setattr(ModelDrafter, "_common", lambda self, _: Vocabulary.shared(VOCABULARY, own))
    weights = Weights("another", tiny(1, layers=1, vocabulary=own), None)
    drafters = [kind(weights, tree=build_policy("chain:3"), **options) for kind in (Noting, LevelByLevel)]
    ways = [SamplingParams(0.9, seed=3, logit_bias={5: 4.0, 290: 3.0}), *WAYS[:2]]
    texts = [[one.token_ids for one in write(drafter, "token", ways, target)] for drafter in drafters]
    assert texts[0] == texts[1]
    assert_same(*drafters)
    assert drafters[0].ahead > 5


def test_near_the_end_of_the_draft_models_context_the_host_drafts() -> None:
    """Positions beyond it do not exist for some models."""
    found = []
    for kind in (Noting, LevelByLevel):
        weights = close_to()
        weights.model.config.max_position_embeddings = 32
        drafter = kind(weights, tree=build_policy("chain:4"))
        texts = write(drafter, "block", WAYS)
        found.append((drafter, [one.token_ids for one in texts]))
        assert max(len(text) for text, *_ in drafter.noted) > 32
    assert found[0][1] == found[1][1]
    assert_same(found[0][0], found[1][0])
    assert found[0][0].ahead > 1


def test_what_decides_on_the_host_is_left_to_it() -> None:
    info = target_of().info
    kinds: list[dict[str, object]] = [
        {"tree": build_policy("chain:4,stop=confidence:0.4")},
        {"tree": build_policy("rsd-s:2x2")},
        {"recall": 0.3},
    ]
    for options in kinds:
        drafter = ModelDrafter(close_to(), **options)  # type: ignore[arg-type]
        drafter.bind(info)
        assert drafter._ahead is None
    plain = Watched(tiny(0, layers=1), slots=1, kernels=False)
    drafter = ModelDrafter(Weights("tiny", tiny(1, layers=1), None))
    drafter.bind(plain.info)
    assert drafter._ahead is None, "without kernels passes wait for the host in any case"


def test_trees_of_ranks_are_those_of_level_by_level() -> None:
    """Nothing is drawn of them, so nothing but their tokens has to come from the device."""
    ways, target = [WAYS[0], WAYS[1]], target_of()
    ahead, levels = (kind(close_to(), tree=build_policy("ranks:mcsd")) for kind in (Noting, LevelByLevel))
    found, expected = write(ahead, "match", ways, target), write(levels, "match", ways)
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    assert [one.stats.accepted_per_depth for one in found] == [one.stats.accepted_per_depth for one in expected]
    assert ahead.ahead > 5
    assert target.served > 3


def test_where_a_distribution_has_too_few_tokens_the_host_grows_the_tree() -> None:
    """Its nodes are numbered as they are, and those that would have been drawn below a missing one are not there."""
    few = [SamplingParams(1.0, seed=2, top_k=2), *WAYS[:1]]
    ahead, levels = (kind(close_to(), tree=build_policy("template:mcsd")) for kind in (Noting, LevelByLevel))
    found, expected = write(ahead, "rrs", few), write(levels, "rrs", few)
    assert_same(ahead, levels)
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    assert len({parents for _, _, parents, _, _ in ahead.noted}) > 2, "no token was missing"


def test_a_draft_model_runs_as_the_target_does() -> None:
    """Recorded where it is recorded, compiled where it is compiled."""
    for how in ({"compile": True}, {"graphs": False}):
        target = Watched(tiny(0, layers=1), slots=1, context=32, kernels=True, **how)
        drafter = ModelDrafter(Weights("tiny", tiny(1, layers=1), None))
        drafter.bind(target.info)
        [(_, slots)] = drafter.weights._idle
        assert slots.info.execution == target.info.execution


# Verdicts of all kinds


class Steps:
    """A drafter on texts whose verdicts are given, beside one that reads every text anew."""

    def __init__(self, tree: str, texts: Sequence[SequenceState]) -> None:
        self.texts, self.policy = texts, tree
        self.target = target_of(slots=len(texts))
        self.drafter = Noting(close_to(), tree=build_policy(tree))
        self.drafter.bind(self.target.info)

    def draft(self, batch: Sequence[int], budgets: Sequence[Budget]) -> list[DraftTree]:
        """Trees for these texts, which are those of the draft model after the whole text."""
        sequences = [self.texts[text] for text in batch]
        trees = self.drafter.draft(sequences, budgets)
        slow = LevelByLevel(close_to(), tree=build_policy(self.policy))
        slow.bind(self.target.info)
        expected = slow.draft(sequences, budgets)
        for one, other in zip(trees, expected, strict=True):
            assert (one.tokens.tolist()[1:], one.parents) == (other.tokens.tolist()[1:], other.parents)
            assert one.leaves == other.leaves
            assert one.q is None or torch.allclose(one.q, other.q, rtol=1e-4, atol=1e-6)  # type: ignore[arg-type]
        return trees

    def judge(self, batch: Sequence[int], trees: Sequence[DraftTree], kept: Sequence[int], over: bool) -> None:
        """Keep so much of the first path of each tree, and another token, unless the step breaks off before it is
        `over`."""
        sequences, size = [self.texts[text] for text in batch], fitting(len(batch), BATCHES)
        padded = [*trees, *[DraftTree.root(0)] * (size - len(trees))]
        nodes = max(map(len, padded))
        tokens, paths = torch.zeros(size, nodes, dtype=torch.int32), torch.full((size, nodes), -1)
        lengths, slots = torch.zeros(size, dtype=torch.int32), torch.full((size,), -1, dtype=torch.int32)
        paths[:, 0] = 0
        following, verdicts = torch.zeros(size, dtype=torch.long), []
        for row, (sequence, tree) in enumerate(zip(sequences, trees, strict=True)):
            tokens[row, : len(tree)] = tree.tokens
            path = tree.path(len(tree) - 1)[: kept[row] + 1]
            paths[row, : len(path)] = torch.tensor(path)
            lengths[row], slots[row] = len(sequence.tokens) - 1, row
            following[row] = (7 * len(sequence.tokens) + row) % VOCABULARY
            verdicts.append(Verdict(tuple(path), int(following[row])))
        about = ScoredNodes(tokens, torch.zeros(size, nodes, 1, dtype=torch.int32), slots, lengths)
        scored = Scored(torch.zeros(size, nodes, VOCABULARY), nodes=about)
        self.drafter.update_on_device(scored, Verdicts(paths, following))
        if not over:
            return
        self.drafter.update(sequences, scored, verdicts)
        for sequence, tree, verdict in zip(sequences, trees, verdicts, strict=True):
            sequence.tokens += [*verdict.kept_of(tree), verdict.token]


@pytest.mark.parametrize("tree", ["chain:3", "paths:3x2", "paths:2x3@1", "template:mcsd", "rsd-c:2,2"])
@settings(max_examples=12)
@given(data=st.data())
def test_trees_are_right_whatever_verdicts_keep(tree: str, data: st.DataObject) -> None:
    """In batches that change, behind steps that broke off, with budgets that cut, for texts that were rewritten."""
    draw = data.draw
    texts = [SequenceState(list(PROMPTS[row]), draw(st.sampled_from(WAYS))) for row in range(3)]
    steps = Steps(tree, texts)
    batch = draw(st.permutations(range(3)))[: draw(st.integers(1, 3))]
    for _ in range(5):
        if draw(st.integers(0, 3)) == 0:
            batch = draw(st.permutations(range(3)))[: draw(st.integers(1, 3))]
        if draw(st.integers(0, 7)) == 0:
            del texts[batch[0]].tokens[draw(st.integers(1, len(texts[batch[0]].tokens))) :]
        budgets = [Budget(32, draw(st.sampled_from([8, 8, 8, 2, 1, 0]))) for _ in batch]
        trees = steps.draft(batch, budgets)
        kept = [draw(st.integers(0, one.depth)) for one in trees]
        steps.judge(batch, trees, kept, over=draw(st.integers(0, 4)) > 0)
        if max(len(text.tokens) for text in texts) > 60:
            break


def test_steps_that_break_off_again_and_again_are_drafted_for_in_the_same_way() -> None:
    """What a verdict wrote that never counted lies where the host says the same as before."""
    steps = Steps("chain:3", [SequenceState(list(PROMPTS[0]), WAYS[0])])
    for _ in range(4):
        trees = steps.draft([0], [Budget(32, 8)])
        steps.judge([0], trees, [2], over=False)


# Choices


@pytest.mark.parametrize("count", [1, 3])
@pytest.mark.parametrize("apart", [True, False])
def test_a_choice_that_was_traced_serves_other_parameters_and_keys(
    count: int, apart: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """What is compiled for the first texts of a structure is asked by all others."""
    monkeypatch.setattr(choice, "compiled_or_not", lambda run, given, what: run)
    monkeypatch.setattr(reading, "sound", lambda probs: probs)  # which looks at values on a host alone
    vocabulary = Vocabulary.shared(VOCABULARY, VOCABULARY)
    ways = [[SamplingParams(0.7, top_k=4), SamplingParams(0.9, top_k=4)], [SamplingParams(0.5, top_k=4)] * 2]
    readings = [BatchReading(way, vocabulary, trimmed=False) for way in ways]
    assert readings[0].structure == readings[1].structure
    fused = choice.Picks(readings[0], count, greedy=True, drawn=True, compile=True)
    readings[0].bring()
    noise = torch.Generator().manual_seed(3)
    for turn in range(4):
        plain = choice.Picks(BatchReading(ways[turn % 2], vocabulary, trimmed=False), count, greedy=True, drawn=True)
        readings[0].assign(plain.reading)
        logits = torch.randn(2, count, VOCABULARY, generator=noise)
        first = torch.tensor([[0, 0, 2], [0, 1, 1]])[:, :count]
        keys = torch.randint(1 << 62, (2, count), generator=noise)
        greedy = torch.tensor([turn % 2, 1])
        for one, other in zip(
            fused(logits, first, keys, greedy, apart=apart),
            plain(logits, first, keys, greedy, apart=apart),
            strict=True,
        ):
            assert torch.equal(one, other)
        seeds, draws = torch.tensor([turn, 5]), torch.arange(3)
        wanted = draw_keys(PICKS, draws, seeds, keys[:, 0])
        assert wanted.unique().numel() == 6
        assert torch.equal(fused.keys(PICKS, draws, seeds, keys[:, 0]), wanted)
    assert len(fused._programs) == 2


@settings(deadline=None)
@given(
    shape=st.tuples(st.integers(1, 3), st.integers(1, 2)),
    vocabulary=st.integers(1, 4 * BLOCK + 3),
    count=st.integers(1, 5),
    kinds=st.integers(2, 4000),
    seed=st.integers(0, 99),
)
def test_the_largest_numbers_are_found_block_by_block(
    shape: tuple[int, int], vocabulary: int, count: int, kinds: int, seed: int
) -> None:
    """Many are equal if there are few kinds of numbers: then any of them will do, but for one alone the first."""
    vocabulary = max(vocabulary, count * BLOCK + 1)
    probs = torch.randint(kinds, (*shape, vocabulary), generator=torch.Generator().manual_seed(seed)) / kinds
    masses, tokens = choice.largest_by_blocks(probs, count)
    assert torch.equal(masses, probs.topk(count, dim=-1).values)
    assert torch.equal(probs.gather(-1, tokens), masses)
    assert all(len(set(row)) == count for row in tokens.flatten(0, 1).tolist())
    if count == 1:
        assert torch.equal(tokens[..., 0], probs.argmax(dim=-1))
