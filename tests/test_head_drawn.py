"""Chains, paths and shapes that a head draws ahead of the host are those that it grows level by level, token for token
and q for q.

The kernels of the target's passes are stood in for by torch (`attention_twins.py`); `tests/gpu/test_heads.py` is the
same on a device, where all of it is recorded.
"""

from __future__ import annotations

from collections.abc import Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import pytest
import torch
from torch import Tensor

from branchwise.backends.base import Scored, TargetInfo
from branchwise.backends.transformers.target import TransformersTarget
from branchwise.core.batch import TreeBatch
from branchwise.core.sampling import SamplingParams
from branchwise.core.sequence import SequenceState
from branchwise.core.tree import DraftTree
from branchwise.cuda.graphs import WARMUPS, GraphedFunction
from branchwise.draft import build_policy
from branchwise.draft.base import Budget
from branchwise.draft.drawn.drawing import Drawing
from branchwise.draft.drawn.trees import Drawn, TreeDraft
from branchwise.draft.head.drafter import HeadDrafter
from branchwise.draft.head.file import TrainedHead
from branchwise.draft.head.network import Head, HeadConfig
from branchwise.draft.head.trees.drawn import DrawnAhead
from branchwise.draft.tree_drafter import ExpandRequest
from branchwise.engine import Engine, Generation, Request
from branchwise.verify import VERIFIERS, Verdict
from tests import attention_twins
from tests.test_head_drafter import FORMS, TAPS, WIDTH, model_of
from tests.test_inflight import Watched

VOCABULARY = 300
"""more than a block, so that blocks race too"""
TABLE = 200
PROMPTS = [(1, 2, 3, 4, 250), (6, 7), tuple(range(270, 293)), (7, 8, 9)]
"""with tokens that are not in the table"""
WAYS = [
    SamplingParams(temperature=0.8, seed=5),
    SamplingParams(),
    SamplingParams(temperature=1.0, seed=2, top_k=3),
    SamplingParams(temperature=1.3, seed=1 << 62, top_p=0.7, min_p=0.002),
]
TREES = [
    ("chain:4", "block"),
    ("chain:1", "token"),
    ("paths:3x3", "cascade"),
    ("paths:3x3", "gbv"),
    ("paths:2x4@2", "traversal"),
    ("rsd-c:3,2,1", "rrs"),
    ("template:sequoia-24", "traversal"),
]
OTHERS = [form for form, options in FORMS.items() if options]


@pytest.fixture(autouse=True)
def _twins(monkeypatch: pytest.MonkeyPatch) -> None:
    attention_twins.install(monkeypatch)


Noted = tuple[tuple[int, ...], list[int], tuple[int, ...], tuple[int, ...], Tensor | None]


class Noting(HeadDrafter):
    """Notes its trees, each with the text that it stands behind."""

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        self.noted: list[Noted] = []
        self.ahead = 0
        """batches whose trees had been drawn behind the verdict before"""
        self.looks = 0
        """levels that the host has grown"""
        self.interrupts: list[bool] = []

    def draft(self, sequences: Sequence[SequenceState], budgets: Sequence[Budget]) -> list[DraftTree]:
        ahead, before = self._ahead, self.looks
        foreseen = isinstance(ahead, DrawnAhead) and ahead._found is not None and ahead._foresaw(sequences)
        trees = super().draft(sequences, budgets)
        self.ahead += foreseen and self.looks == before
        for sequence, tree in zip(sequences, trees, strict=True):
            tokens, q = tree.tokens.tolist()[1:], None if tree.q is None else tree.q.clone()
            self.noted.append((tuple(sequence.tokens), tokens, tree.parents, tree.leaves, q))
        return trees

    def look(self, requests: Sequence[ExpandRequest]) -> Any:
        self.looks += 1
        return super().look(requests)

    def update(self, sequences: Sequence[SequenceState], scored: Scored, verdicts: Sequence[Verdict]) -> None:
        interrupt = self.interrupts.pop() if self.interrupts else ""
        if interrupt == "before":
            raise KeyboardInterrupt
        super().update(sequences, scored, verdicts)
        if interrupt == "after":
            raise KeyboardInterrupt


class LevelByLevel(Noting):
    """With the host between two levels."""

    def bind(self, target: TargetInfo) -> None:
        super().bind(target)
        self._ahead = None


def target_of(slots: int = 3, max_nodes: int = 32) -> Watched:
    model = model_of(vocab_size=VOCABULARY)
    return Watched(model, slots=slots, context=128, max_nodes=max_nodes, kernels=True)


def head_for(info: TargetInfo, form: str = "carry") -> TrainedHead:
    torch.manual_seed(1)
    sizes = {"width": WIDTH, "taps": TAPS, "heads": 4, "kv_heads": 2, "head_width": 6, "mlp": 32}
    head = Head(HeadConfig(**sizes | FORMS[form]), 1 / 100 ** (torch.arange(3) / 3))
    for weight in head.parameters():
        if weight.ndim == 2:
            torch.nn.init.normal_(weight, std=0.3)
    return TrainedHead(head.eval().requires_grad_(False), torch.randperm(VOCABULARY)[:TABLE], info.name, info.weights)


def write(
    drafter: HeadDrafter, verify: str, ways: Sequence[SamplingParams], target: Watched, batch: int = 4, **options: Any
) -> list[Generation]:
    engine = Engine(target, drafter, VERIFIERS.build(verify), **options)
    assert engine.pipelined
    asked = [
        engine.submit(Request(prompt, ways[row % len(ways)], max_new_tokens=22 + 5 * row))
        for row, prompt in enumerate(PROMPTS[:batch])
    ]
    while engine.busy:
        with suppress(KeyboardInterrupt):
            engine.step()
    return asked


def both(tree: str, verify: str, ways: Sequence[SamplingParams], form: str = "carry", **options: Any) -> list[Noting]:
    """Drawn ahead and level by level: the same trees, and the same texts."""
    found, drafters = [], []
    for kind in (Noting, LevelByLevel):
        target = target_of()
        drafters.append(kind(head_for(target.info, form), tree=build_policy(tree)))
        texts = write(drafters[-1], verify, ways, target, **options)
        found.append([(one.token_ids, one.stats.accepted_per_depth) for one in texts])
    assert_same(*drafters)
    assert found[0] == found[1]
    assert isinstance(drafters[0]._ahead, DrawnAhead)
    return drafters


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
    """Four texts in three slots, with prompts in chunks: some end, one joins, and steps go on with those that are
    left."""
    ahead, _ = both(tree, verify, ways, prefill_tokens=9)
    if len(ways) == 1 or tree.startswith(("chain", "paths")):  # others lack tokens of distributions that are cut
        assert ahead.ahead > 10
        assert ahead.looks == 0, "the host has grown a tree"
    outside = {token for _, tokens, *_ in ahead.noted for token in tokens} - {*ahead._table.tolist()}
    assert outside <= {token for prompt in PROMPTS for token in prompt}
    if ways == WAYS[:1] and tree != "chain:1":
        assert outside, "no token of a prompt was drawn that is not in the table"


@pytest.mark.parametrize(("tree", "verify"), [("chain:4", "block"), ("paths:3x3", "cascade"), ("rsd-c:2,2,1", "rrs")])
@pytest.mark.parametrize("form", OTHERS)
def test_heads_of_every_form_draw_so(form: str, tree: str, verify: str) -> None:
    """Parallel ones, which have no passes between levels, windows, and those that attend to the target's cache."""
    assert both(tree, verify, WAYS[:2], form)[0].ahead > 10


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize(("tree", "verify"), [("chain:3", "block"), ("paths:2x2", "cascade")])
def test_a_head_by_kernels_draws_what_the_host_draws(tree: str, verify: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rows of verdicts and levels both."""
    fused = pytest.importorskip("branchwise.draft.head.trees.fused", reason="needs Triton's interpreter")
    for place in ("trees.ahead", "trees.device"):
        monkeypatch.setattr(f"branchwise.draft.head.{place}.have_kernels", lambda device: True)
    found, drafters = [], []
    for kind in (Noting, LevelByLevel):
        target = target_of()
        drafters.append(kind(head_for(target.info), tree=build_policy(tree)))
        engine = Engine(target, drafters[-1], VERIFIERS.build(verify))
        asked = [engine.submit(Request(prompt, WAYS[0], max_new_tokens=9)) for prompt in PROMPTS[:2]]
        while engine.busy:
            engine.step()
        found.append([one.token_ids for one in asked])
    assert isinstance(drafters[0]._ahead, DrawnAhead)
    assert isinstance(drafters[0]._ahead._head, fused.FusedDrawnHead)
    assert found[0] == found[1]
    assert_same(*drafters)
    assert drafters[0].ahead > 3


@pytest.mark.parametrize(("tree", "depth"), [("chain:4", 4), ("rsd-c:2,2", 2)])
def test_trees_of_known_shapes_are_drawn_without_the_host(tree: str, depth: int) -> None:
    """One call draws all levels, and the pass over them begins before the host knows what they are."""
    target = target_of()
    drafter = Noting(head_for(target.info), tree=build_policy(tree))
    [text] = write(drafter, "auto", WAYS[:1], target, batch=1)
    steps = text.stats.steps
    assert drafter.ahead == steps - 1, "only the first tree was drawn from what the host said"
    assert drafter.looks == 0
    assert target.served > steps / 2


@pytest.mark.parametrize(("tree", "verify"), [("chain:3", "block"), ("rsd-c:2,2", "rrs")])
def test_as_on_a_device_trees_lie_at_one_place_and_the_host_never_sees_their_tokens(
    tree: str, verify: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next trees are written over those that the host is still reading the verdict of."""
    plain = target_of()
    levels = LevelByLevel(head_for(plain.info), tree=build_policy(tree))
    expected = write(levels, verify, WAYS[:2], plain)
    places: dict[tuple[int, int], Drawn] = {}

    def place(self: Drawing, draft: TreeDraft, size: int) -> Drawn:
        return places.setdefault((id(draft), size), draft.place(size, VOCABULARY))

    monkeypatch.setattr(Drawing, "_place", place)
    monkeypatch.setattr(TreeBatch, "host_tokens", None)
    target = target_of()
    ahead = Noting(head_for(target.info), tree=build_policy(tree))
    found = write(ahead, verify, WAYS[:2], target)
    assert [one.token_ids for one in found] == [one.token_ids for one in expected]
    assert [one.stats.accepted_per_depth for one in found] == [one.stats.accepted_per_depth for one in expected]
    assert target.served > 3
    assert_same(ahead, levels)


class AsRecorded(GraphedFunction[Any]):
    """On a host: runs its function as often as a recording and its first replay do, every time."""

    def __call__(self, *places: Tensor) -> Any:
        return [self._run(*places) for _ in range(WARMUPS + 1)][-1]


@pytest.mark.parametrize("form", ["carry", "parallel with bias", "longspec"])
@pytest.mark.parametrize("tree", ["chain:3", "paths:2x3"])
@pytest.mark.parametrize("place", ["before", "after"])
def test_a_verdict_that_never_counted_is_undone(
    form: str, tree: str, place: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It lies on the device when the step breaks off, before the host has followed it or after. What is drawn next must
    know nothing of it: it was decided by the same noise."""
    monkeypatch.setattr("branchwise.draft.head.trees.catching_up.GraphedFunction", AsRecorded)
    found = []
    for kind, interrupts in ((Noting, [place, "", "", place, "", place, ""]), (LevelByLevel, [])):
        target = target_of()
        drafter = kind(head_for(target.info, form), tree=build_policy(tree))
        drafter.interrupts = list(interrupts)  # type: ignore[arg-type]
        texts = write(drafter, "cascade", WAYS, target, batch=3)
        assert not drafter.interrupts
        drawn: dict[tuple[int, ...], list[int]] = {}
        for text, tokens, *_ in drafter.noted:
            assert drawn.setdefault(text, tokens) == tokens, "what is drafted again is another tree"
        found.append(([one.token_ids for one in texts], drawn))
    assert found[0] == found[1]


def test_where_a_distribution_has_too_few_tokens_the_host_grows_the_tree() -> None:
    """Its nodes are numbered as they are, and those that would have been drawn below a missing one are not there."""
    few = [SamplingParams(1.0, seed=2, top_k=2), *WAYS[:1]]
    ahead, _ = both("template:mcsd", "rrs", few)
    assert ahead.looks > 3
    assert len({parents for _, _, parents, _, _ in ahead.noted}) > 2, "no token was missing"


@pytest.mark.parametrize("options", [{"temperature": 0.5}, {"table": 30}], ids=str)
def test_options_of_the_drafter_count(options: dict[str, Any]) -> None:
    ways = [SamplingParams(0.9, seed=3, logit_bias={5: 4.0, 290: 3.0}), *WAYS[:2]]
    drafters = []
    for kind in (Noting, LevelByLevel):
        target = target_of()
        drafters.append(kind(head_for(target.info), tree=build_policy("chain:3"), **options))
        write(drafters[-1], "token", ways, target)
    assert_same(*drafters)
    assert drafters[0].ahead > 5


def test_what_decides_on_the_host_is_left_to_it() -> None:
    info = target_of().info
    for tree in ("chain:4,stop=confidence:0.4", "rsd-s:2x2", "dynamic:4"):
        drafter = HeadDrafter(head_for(info), tree=build_policy(tree))
        drafter.bind(info)
        assert drafter._ahead is None
    plain = TransformersTarget(model_of(vocab_size=VOCABULARY), slots=1, kernels=False)
    for bound in (plain.info, replace(info, max_nodes=1)):
        drafter = HeadDrafter(head_for(bound), tree=build_policy("chain:4"))
        drafter.bind(bound)
        assert drafter._ahead is None, "without kernels passes wait for the host in any case"


def test_under_a_grammar_the_host_draws() -> None:
    """It knows what is allowed; other texts of the batch are drawn with it, and ahead again when it is done."""
    pytest.importorskip("llguidance")
    from tests.grammars import END, letters

    found = []
    for kind in (Noting, LevelByLevel):
        target = target_of()
        drafter = kind(head_for(target.info), tree=build_policy("chain:3"))
        engine = Engine(target, drafter, VERIFIERS.build("block"))
        constrained = letters("(ab|c){9,40}").applied_to(WAYS[0], len(PROMPTS[0]))
        asked = [
            engine.submit(Request(PROMPTS[0], constrained, max_new_tokens=12, stop_tokens=frozenset({END}))),
            engine.submit(Request(PROMPTS[1], WAYS[0], max_new_tokens=40)),
        ]
        while engine.busy:
            engine.step()
        found.append([one.token_ids for one in asked])
        if kind is Noting:
            assert drafter.looks > 3
            assert drafter.ahead > 3
    assert found[0] == found[1]
    assert set(found[0][0]) <= set(range(6)), "the text left its grammar"


def test_no_more_is_drawn_than_a_pass_may_score() -> None:
    target = target_of(max_nodes=8)
    drafter = Noting(head_for(target.info), tree=build_policy("chain:20"))
    write(drafter, "block", WAYS[:1], target, batch=2)
    assert max(len(tokens) for _, tokens, *_ in drafter.noted) == 7
    assert drafter.ahead > 5


def test_somebody_who_keeps_distributions_gets_them_from_the_host() -> None:
    found = []
    for kept in (None, {}):
        target = target_of()
        drafter = Noting(head_for(target.info), tree=build_policy("chain:3"))
        drafter.kept_probs = kept  # type: ignore[assignment]
        found.append([one.token_ids for one in write(drafter, "block", WAYS[:1], target)])
        assert (drafter.looks > 0) == (kept is not None)
    assert found[0] == found[1]
    assert kept
