"""Passes that begin before the host has read what they stand behind, run here in Triton's interpreter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from branchwise.backends.base import Scored
from branchwise.backends.transformers import target as target_module
from branchwise.backends.transformers.target import TransformersTarget
from branchwise.core.batch import PadShape, TreeBatch
from branchwise.core.sampling import SamplingParams
from branchwise.core.sequence import SequenceState
from branchwise.core.topology import topology
from branchwise.core.tree import DraftTree
from branchwise.cuda.graphs import InflightPass
from branchwise.draft import build_policy
from branchwise.draft.base import Budget, Drafter, NoDrafter
from branchwise.draft.head.drafter import HeadDrafter
from branchwise.draft.model.draft_model import Weights
from branchwise.draft.model.drafter import ModelDrafter
from branchwise.draft.model.usual import RankedShape
from branchwise.draft.policies.template import Ranks
from branchwise.engine import Engine, Generation, Request, prefixes
from branchwise.verify import VERIFIERS, Verdict, Verdicts
from tests.conformance.architectures import VOCABULARY, build, served
from tests.device_twins import OnDevice
from tests.heads import random_head
from tests.test_guarded import AtRandom
from tests.test_sources import Anyhow, Several

pytestmark = pytest.mark.usefixtures("interpreter")

PROMPTS = [(5, 6), (60,), (2, 8)]
SHAPE = topology((-1, 0, 0, 1, 1))


class Successors(Drafter):
    """Drafts from a table that the texts of a greedy run filled, and foresees its trees where the verdicts lie."""

    name = "successors"

    def __init__(self, texts: Sequence[Sequence[int]], ahead: bool = True) -> None:
        self.table = torch.randint(VOCABULARY, (VOCABULARY, 2), generator=torch.Generator().manual_seed(1))
        for text in texts:
            for token, following in pairwise(text):
                self.table[token, 0] = following
        self.ahead = ahead
        self.interrupts: list[bool] = []
        self._tokens: Tensor | None = None
        self._foreseen: list[DraftTree] | None = None

    def draft(self, sequences: Sequence[SequenceState], budgets: Sequence[Budget]) -> list[DraftTree]:
        found, self._foreseen = self._foreseen, None
        roots = [sequence.root for sequence in sequences]
        if found is not None and len(found) == len(roots) and self._tokens[: len(roots)].tolist() == roots:  # type: ignore[index]
            return found
        return [self._tree(root, budget) for root, budget in zip(roots, budgets, strict=True)]

    def update_on_device(self, scored: Scored, verdicts: Verdicts) -> None:
        self._tokens, self._foreseen = verdicts.tokens.clone(), None

    def draft_next(self, budgets: Sequence[Budget]) -> list[DraftTree] | None:
        if not self.ahead or min(budget.depth for budget in budgets) < SHAPE.depth:
            return None
        assert self._tokens is not None
        roots = self._tokens[: len(budgets)].tolist()
        self._foreseen = [self._tree(root, budget, wrong=True) for root, budget in zip(roots, budgets, strict=True)]
        return self._foreseen

    def update(self, sequences: Sequence[SequenceState], scored: Scored, verdicts: Sequence[Verdict]) -> None:
        if self.interrupts and self.interrupts.pop():
            raise KeyboardInterrupt

    def _tree(self, root: int, budget: Budget, wrong: bool = False) -> DraftTree:
        if budget.depth < SHAPE.depth:
            return DraftTree.root(root)
        first, second = self.table[root].tolist()
        tokens = [0 if wrong else root, first, second, *self.table[first].tolist()]
        return DraftTree(torch.tensor(tokens), SHAPE.parents)


class Watched(TransformersTarget):
    """Counts the passes that were enqueued ahead and those of them that served. As on a device, a pass that is enqueued
    overwrites the logits and the hidden states of the one before."""

    begun = served = 0
    _last: tuple[torch.Tensor, ...] = ()

    def score(self, *given) -> Scored:  # type: ignore[no-untyped-def]
        found = super().score(*given)
        self._last = found.logits, *found.hidden.values()
        return found

    def launch(self, *given) -> InflightPass | None:  # type: ignore[no-untyped-def]
        found = super().launch(*given)
        if found is None:
            return None
        with torch.inference_mode():
            new = found.scored.logits, *found.scored.hidden.values()
            for part in self._last:
                if part.data_ptr() not in [other.data_ptr() for other in new]:
                    part.fill_(torch.nan)
        self._last = new
        self.begun += 1
        own = found.result

        def result(*given) -> Scored | None:  # type: ignore[no-untyped-def]
            scored = own(*given)
            self.served += scored is not None
            return scored

        found.result = result  # type: ignore[method-assign]
        return found


@pytest.fixture
def target() -> Watched:
    pytest.importorskip("triton", reason="needs Triton's interpreter")
    config = served()["llama"]
    small = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = build(type(config)(**config.to_dict() | small))
    return Watched(model, slots=4, context=64, max_nodes=32, kernels=True)


def write(target: TransformersTarget, drafter: Drafter, **about) -> list[Generation]:  # type: ignore[no-untyped-def]
    engine = Engine(target, drafter, VERIFIERS.build("match"))
    longest = (11, 9, 8)
    asked = [
        engine.submit(Request(prompt, max_new_tokens=most, **about))
        for prompt, most in zip(PROMPTS, longest, strict=True)
    ]
    while engine.busy:
        try:
            engine.step()
        except KeyboardInterrupt:
            continue
    return asked


def texts_of(asked: Sequence[Generation]) -> list[list[int]]:
    return [one.token_ids for one in asked]


PLAIN: list[list[int]] = []


@pytest.fixture
def plain(target: Watched) -> list[list[int]]:
    """What is written when every pass waits for its verdicts; the same for every test, and so written once."""
    if not PLAIN:
        PLAIN.extend(texts_of(write(target, Successors([], ahead=False))))
        assert target.begun == 0
    return PLAIN


def test_texts_are_the_same_and_most_passes_had_begun(target: Watched, plain: list[list[int]]) -> None:
    """Of three texts in a batch of four, which end at different times; each end makes a pass anew."""
    drafted = write(target, Successors([[*p, *t] for p, t in zip(PROMPTS, plain, strict=True)]))
    assert texts_of(drafted) == plain
    assert sum(one.stats.accepted_tokens for one in drafted) > 2, "too little was moved"
    few = target.served
    assert few > 0
    assert texts_of(write(target, NoDrafter())) == plain
    assert target.served - few >= 5
    assert target.begun - target.served <= 2, "passes were begun for nothing"


def test_a_table_foresees_its_trees(target: Watched, plain: list[list[int]]) -> None:
    engine = Engine(target, OnDevice(tree=Ranks("mcsd")), VERIFIERS.build("match"))
    generation = engine.submit(Request(PROMPTS[0], max_new_tokens=11))
    while engine.busy:
        engine.step()
    assert generation.token_ids == plain[0]
    assert generation.stats.drafted_tokens > 0
    assert target.served > 0


@pytest.mark.parametrize("drafts", [False, True])
def test_sampled_texts_are_the_same(target: Watched, drafts: bool) -> None:
    sampling = SamplingParams(temperature=0.9, seed=3)
    expected = texts_of(write(target, Successors([], ahead=False), sampling=sampling))
    drafter = Successors([[*p, *t] for p, t in zip(PROMPTS, expected, strict=True)]) if drafts else NoDrafter()
    assert texts_of(write(target, drafter, sampling=sampling)) == expected  # type: ignore[arg-type]
    assert target.served > 0


def test_a_text_that_stops_leaves_a_pass_behind_that_nobody_uses(target: Watched, plain: list[list[int]]) -> None:
    stop = plain[0][3]
    found = texts_of(write(target, NoDrafter(), stop_tokens=frozenset({stop})))
    assert found == [text[: text.index(stop) + 1] if stop in text else text for text in plain]
    assert target.begun > target.served


@pytest.mark.parametrize("step", [0, 2])
def test_an_interrupted_step_is_made_again(target: Watched, plain: list[list[int]], step: int) -> None:
    """Its pass had begun the next one behind a verdict that was never committed."""
    drafter = Successors([[*p, *t] for p, t in zip(PROMPTS, plain, strict=True)])
    drafter.interrupts = [True, *[False] * step]
    assert texts_of(write(target, drafter)) == plain
    assert not drafter.interrupts
    assert target.served > 0


@pytest.mark.parametrize("call", [1, 3])
def test_a_commit_that_was_interrupted_is_made_again(
    target: Watched, plain: list[list[int]], call: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A pass that had begun stands one verdict further on than the text."""
    own, calls = target.store.keep, iter(range(1000))

    def keep(*given, **more) -> None:  # type: ignore[no-untyped-def]
        if next(calls) == call:
            raise KeyboardInterrupt
        own(*given, **more)

    monkeypatch.setattr(target.store, "keep", keep)
    assert texts_of(write(target, NoDrafter())) == plain


@pytest.mark.parametrize("batch", [1, 3])
def test_trees_of_a_head_are_passed_over_before_the_host_knows_where_they_stand(target: Watched, batch: int) -> None:
    tree = build_policy("topk:7,depth=2,width=4")
    texts = []
    for drafter in (NoDrafter(), HeadDrafter(random_head(target.info), tree=tree)):
        target.served = 0
        engine = Engine(target, drafter, VERIFIERS.build("match"))
        asked = [engine.submit(Request(prompt, max_new_tokens=20)) for prompt in PROMPTS[:batch]]
        while engine.busy:
            engine.step()
        texts.append(texts_of(asked))
    assert texts[0] == texts[1]
    assert target.served > 4


@pytest.mark.parametrize("batch", [1, 3])
def test_a_head_that_rests_reads_later_what_a_pass_ahead_has_overwritten(target: Watched, batch: int) -> None:
    """Its trees are those that it would have drafted without a rest."""
    found, texts = [], []
    for guard in (False, AtRandom(1), AtRandom(2)):
        drafter = Noting(random_head(target.info), tree=build_policy("topk:7,depth=2,width=4"))
        engine = Engine(target, drafter, VERIFIERS.build("match"), guard=guard)
        target.served = 0
        asked = [engine.submit(Request(prompt, max_new_tokens=24)) for prompt in PROMPTS[:batch]]
        while engine.busy:
            engine.step()
        texts.append(texts_of(asked))
        found.append(drafter.drafted)
        assert target.served > 4
        assert all(bool(one.stats.rested) is bool(guard) for one in asked)
    assert texts[0] == texts[1] == texts[2]
    for rested in found[1:]:
        common = found[0].keys() & rested.keys()
        assert len(common) > 5
        assert all(found[0][text] == rested[text] for text in common)


class Noting(HeadDrafter):
    """Remembers what was drafted behind which text."""

    def draft(self, sequences: Sequence[SequenceState], budgets: Sequence[Budget]) -> list[DraftTree]:
        trees = super().draft(sequences, budgets)
        self.drafted = getattr(self, "drafted", {})
        for sequence, tree, budget in zip(sequences, trees, budgets, strict=True):
            self.drafted[(*sequence.tokens, budget.depth >= 2)] = tree.tokens[1:].tolist()
        return trees


@pytest.mark.parametrize("seed", [1, 2])
def test_sources_take_turns_and_passes_still_begin_ahead(target: Watched, seed: int) -> None:
    """A head, a table and a draft model that all draft behind the verdict. The head's trees are those that it would
    have drafted alone, though passes ahead have overwritten the states of its texts."""
    found, texts = [], []
    for guard in (False, Anyhow(["head", "table", "model"], seed)):
        head = Noting(random_head(target.info), tree=build_policy("topk:7,depth=2,width=4"))
        model = ModelDrafter(Weights("same", target.model, None), tree=RankedShape((-1, 0, 0, 1)))
        drafter: Drafter = Several(head, OnDevice(tree=Ranks("mcsd")), model) if guard else head
        engine = Engine(target, drafter, VERIFIERS.build("match"), guard=guard)
        target.served = 0
        asked = [engine.submit(Request(prompt, max_new_tokens=24)) for prompt in PROMPTS[:2]]
        while engine.busy:
            engine.step()
        assert target.served > 4
        texts.append(texts_of(asked))
        found.append(head.drafted)
        if guard:
            assert {name for one in asked for name in one.stats.drafted_by_source} == {"head", "recycle", "model"}
    assert texts[0] == texts[1]
    common = found[0].keys() & found[1].keys()
    assert len(common) > 3
    assert all(found[0][text] == found[1][text] for text in common)


def converse(engine: Engine, prompt: Sequence[int], most: int) -> list[Generation]:
    """A conversation, and others that begin like it while it runs and when it has ended."""
    first = engine.submit(Request(tuple(prompt), max_new_tokens=most))
    while engine.busy:
        engine.step()
    turn = (*prompt, *first.token_ids, 7, 8, 9)
    second = engine.submit(Request(turn, max_new_tokens=most + 3))
    for _ in range(2):
        engine.step()
    others = [engine.submit(Request((*turn[: len(turn) - cut], 3, 4), max_new_tokens=most)) for cut in (2, 9)]
    while engine.busy:
        engine.step()
    again = engine.submit(Request(turn, max_new_tokens=most))
    while engine.busy:
        engine.step()
    return [first, second, *others, again]


@pytest.mark.parametrize("name", ["none", "table", "model", "head"])
def test_texts_that_begin_with_cached_rows_are_written_and_drafted_for_alike(
    target: Watched, name: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows change places while a pass that stands behind them has begun."""
    monkeypatch.setattr(prefixes, "WORTHWHILE", 2)
    drafters: dict[str, Callable[[], Drafter]] = {
        "none": NoDrafter,
        "table": lambda: OnDevice(tree=Ranks("mcsd")),
        "model": lambda: ModelDrafter(Weights("tiny", target.model, None), tree=build_policy("chain:2")),
        "head": lambda: Noting(random_head(target.info), tree=build_policy("topk:7,depth=2,width=4")),
    }
    found = []
    for cached in (False, True):
        engine = Engine(target, drafters[name](), VERIFIERS.build("match"), prefix_cache=cached)
        found.append((converse(engine, (5, 6, 11, 4, 60, 2), 8), engine))
        engine.drop_prefixes()
        assert target.free_slots == 4
    (whole, _), (begun, _) = found
    assert texts_of(begun) == texts_of(whole)
    assert [one.stats.reused_tokens > 0 for one in begun] == [False, True, True, True, True]
    if name == "model":  # it drafts what the target writes
        assert sum(one.stats.accepted_tokens for one in begun) == sum(one.stats.accepted_tokens for one in whole) > 0
    if name == "head":
        drafted = [engine.drafter.drafted for _, engine in found]  # type: ignore[attr-defined]
        assert len(drafted[0].keys() & drafted[1].keys()) > 10
        assert all(drafted[1][text] == drafted[0][text] for text in drafted[0].keys() & drafted[1].keys())


def test_a_table_that_rests_foresees_its_trees_again(target: Watched, plain: list[list[int]]) -> None:
    guard = AtRandom(0)
    engine = Engine(target, OnDevice(tree=Ranks("mcsd")), VERIFIERS.build("match"), guard=guard)
    generation = engine.submit(Request(PROMPTS[0], max_new_tokens=11))
    while engine.busy:
        engine.step()
    assert generation.token_ids == plain[0]
    assert generation.stats.drafted_tokens > 0
    assert generation.stats.rested > 0
    assert target.served > 0


@pytest.mark.parametrize(("tree", "verify"), [("chain:2", "block"), ("paths:2x2", "cascade"), ("rsd-c:2,1", "rrs")])
def test_trees_of_a_draft_model_are_passed_over_before_the_host_knows_where_they_stand(
    target: Watched, tree: str, verify: str
) -> None:
    """By the kernels themselves; `test_model_ahead.py` has the rest, with stand-ins for them."""
    found = []
    for shown in (False, True):  # whoever keeps distributions has trees grown level by level
        drafter = ModelDrafter(Weights("same", target.model, None), temperature=1.5, tree=build_policy(tree))
        drafter.kept_probs = {} if shown else None
        target.served = 0
        engine = Engine(target, drafter, VERIFIERS.build(verify))
        sampling = SamplingParams(temperature=0.9, seed=3)
        asked = [engine.submit(Request(prompt, sampling, max_new_tokens=6)) for prompt in PROMPTS[:2]]
        while engine.busy:
            engine.step()
        assert sum(one.stats.accepted_tokens for one in asked) > 0
        assert (target.served > 0) == (not shown and "paths" not in tree)
        found.append(texts_of(asked))
    assert found[0] == found[1]


def test_where_there_is_no_memory_for_it_a_pass_does_not_begin(
    target: Watched, plain: list[list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    own, calls = target_module.advance_inputs, iter(range(1000))

    def moving(*given: Any) -> None:
        if given[-1] is not None and next(calls) % 2:
            raise torch.OutOfMemoryError("CUDA out of memory")
        own(*given)

    monkeypatch.setattr(target_module, "advance_inputs", moving)
    assert texts_of(write(target, NoDrafter())) == plain
    assert target.served > 0


def test_nothing_of_a_pass_that_nobody_uses_stays_in_the_slots(target: Watched, plain: list[list[int]]) -> None:
    """It wrote rows behind the end of a text."""
    stopped = frozenset({plain[0][3]})
    write(target, Successors([[*p, *t] for p, t in zip(PROMPTS, plain, strict=True)]), stop_tokens=stopped)
    assert not any(tensor.any() for tensor in target.store._tensors.values())


def test_a_bounded_depth_does_not_keep_a_pass_from_beginning(target: Watched, plain: list[list[int]]) -> None:
    """As in a contest of methods at an equal depth."""
    drafter = Successors([[*p, *t] for p, t in zip(PROMPTS, plain, strict=True)])
    engine = Engine(target, drafter, VERIFIERS.build("match"), Budget(8, SHAPE.depth))
    generation = engine.submit(Request(PROMPTS[0], max_new_tokens=9))
    while engine.busy:
        engine.step()
    assert generation.token_ids == plain[0][:9]
    assert target.served > 0


def test_idle_time_behind_a_pass_that_nobody_uses_is_nobodys(target: Watched, plain: list[list[int]]) -> None:
    engine = Engine(target, NoDrafter(), VERIFIERS.build("match"))
    for idle in (0.0, 100.0):
        engine._step.clock._last -= idle  # as if that had been long ago
        generation = engine.submit(Request(PROMPTS[0], max_new_tokens=9, stop_tokens=frozenset({plain[0][3]})))
        while engine.busy:
            engine.step()
        assert sum(generation.stats.seconds.values()) < 50


def test_engines_that_share_a_target_take_nothing_from_each_other(target: Watched, plain: list[list[int]]) -> None:
    engines = [Engine(target, NoDrafter(), VERIFIERS.build("match")) for _ in range(2)]
    asked = [one.submit(Request(prompt, max_new_tokens=5)) for one, prompt in zip(engines, PROMPTS, strict=False)]
    while any(engine.busy for engine in engines):
        for engine in engines:
            if engine.busy:
                engine.step()
    assert texts_of(asked) == [text[:5] for text in plain[:2]]
    assert target.begun > target.served  # each score overwrites what the other had begun


def test_a_text_that_joins_finds_its_own_pass(target: Watched, plain: list[list[int]]) -> None:
    engine = Engine(target, NoDrafter(), VERIFIERS.build("match"))
    asked = [engine.submit(Request(PROMPTS[0], max_new_tokens=9))]
    for _ in range(3):
        engine.step()
    asked.append(engine.submit(Request(PROMPTS[1], max_new_tokens=6)))
    while engine.busy:
        engine.step()
    assert texts_of(asked) == [plain[0][:9], plain[1][:6]]
    assert target.served > 2


def test_logprobs_are_right_although_the_next_pass_overwrites_the_logits(target: Watched) -> None:
    told = [write(target, drafter, logprobs=True) for drafter in (Successors([], ahead=False), NoDrafter())]
    first, second = ([[piece.logprob for piece in one.pieces] for one in asked] for asked in told)
    for one, other in zip(first, second, strict=True):
        assert one == pytest.approx(other, abs=1e-4)
    assert target.served > 5


def test_at_the_end_of_the_slots_nothing_is_begun_that_would_not_fit(target: Watched) -> None:
    target = Watched(target.model, slots=1, context=9, max_nodes=3, kernels=True)
    engine = Engine(target, NoDrafter(), VERIFIERS.build("match"))
    generation = engine.submit(Request((5, 6, 7), max_new_tokens=100))
    while engine.busy:
        engine.step()
    assert len(generation.sequence.tokens) == 9


def test_a_pass_is_begun_behind_moved_rows_and_lasts_until_slots_move_or_another_runs(target: Watched) -> None:
    texts = [SequenceState([5, 6, 7]), SequenceState([8, 9])]
    for text in texts:
        target.open(text)
    batch = TreeBatch([DraftTree.root(text.root) for text in texts])
    scored = target.score(texts, batch)
    found = Verdicts(torch.zeros(2, 1, dtype=torch.long), torch.tensor([3, 4]))
    assert target.launch(texts, batch, found) is None, "rows may not be where they belong"
    target.commit_on_device(scored, found)
    far = Verdicts(torch.zeros(2, target.store.rows, dtype=torch.long), found.tokens)
    assert target.launch(texts, batch, far) is None, "it might reach beyond the slots"
    enqueued = target.launch(texts, batch, found)
    assert enqueued is not None
    assert enqueued.intact()
    alone = np.zeros((1, 1), dtype=np.int64)
    target.sprout(texts[:1], alone, alone, np.ones((1, 1, 1), dtype=np.bool_))
    assert not enqueued.intact()
    target.commit_on_device(scored, found)
    again = target.launch(texts, batch, found)
    assert again is not None
    assert again.intact()
    target.close(texts[0])
    assert not again.intact()


def test_begun_is_for_the_same_texts_and_trees_behind_a_committed_verdict() -> None:
    texts = [SequenceState([1]), SequenceState([2])]
    tree, other = (DraftTree.chain([0, token]) for token in (3, 4))
    bare = DraftTree.root(0)
    batch = TreeBatch([tree, bare])
    intact = [True]
    begun = InflightPass((texts[0], texts[1]), batch, Scored(torch.zeros(2, 2, 5)), lambda: intact[0])
    assert begun.result(texts, batch) is None
    begun.committed = True
    assert begun.result(texts, batch) is begun.scored
    assert begun.result(texts, TreeBatch([tree, DraftTree.root(7)])) is begun.scored
    assert begun.result(texts[::-1], batch) is None
    assert begun.result(texts[:1], TreeBatch([tree])) is None
    assert begun.result(texts, TreeBatch([other, bare])) is None
    assert begun.result(texts, TreeBatch([bare, bare])) is None
    assert begun.result(texts, TreeBatch([bare, tree])) is None
    assert begun.result(texts, TreeBatch([tree, other])) is None
    assert begun.result(texts, TreeBatch([tree, bare], pad_shape=PadShape(nodes=4))) is None
    intact[0] = False
    assert begun.result(texts, batch) is None
