"""A head of any form drafts behind the verdict, before the host has read it, what it would draft level by level.

The kernels of the target's passes are stood in for by torch (`attention_twins.py`), and those of the head by its own
plain way; `tests/gpu/test_heads.py` is the same on a device.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any, NamedTuple

import pytest
import torch

from branchwise.backends.base import TargetInfo
from branchwise.core.sampling import SamplingParams
from branchwise.core.sequence import SequenceState
from branchwise.core.tree import DraftTree
from branchwise.draft import build_drafter, build_policy
from branchwise.draft.base import Budget, Drafter
from branchwise.draft.head.drafter import HeadDrafter
from branchwise.draft.head.following import Unread
from branchwise.draft.head.prompt import MOST_ROWS
from branchwise.draft.head.prompt_graphs import RecordedPrompts, size_of, together
from branchwise.draft.head.trees.catching_up import CatchingUp
from branchwise.draft.head.trees.waiting import STEPS, Waiting
from branchwise.engine import Engine, Generation, Request
from branchwise.verify import VERIFIERS
from tests import attention_twins
from tests.test_head_drafter import FORMS, VOCABULARY, model_of, trained
from tests.test_inflight import Watched

PROMPTS = ((1, 2, 3), tuple(range(20)), (5, 30))
DEEPEST = 6
"""levels of the trees"""
OTHERS = [form for form, options in FORMS.items() if options.keys() & {"masks", "window", "cross"}]


@pytest.fixture(autouse=True)
def _twins(monkeypatch: pytest.MonkeyPatch) -> None:
    attention_twins.install(monkeypatch)


class Noting(HeadDrafter):
    """Notes the branches of its trees, each tree with the text that it stands behind."""

    def __init__(self, *given: Any, **more: Any) -> None:
        super().__init__(*given, **more)
        self.noted: dict[tuple[int, ...], list[tuple[int, ...]]] = {}
        self.begun = 0
        """batches whose trees had been laid behind the verdict before"""

    def draft(self, sequences: Sequence[SequenceState], budgets: Sequence[Budget]) -> list[DraftTree]:
        ahead = self._ahead
        self.begun += ahead is not None and (ahead._behind or ahead._next) is not None and ahead._foresaw(sequences)
        trees = super().draft(sequences, budgets)
        window, spare = self._cache.window, self._cache.spare
        for sequence, budget, tree in zip(sequences, budgets, trees, strict=True):
            assert not window or self._cache.held(sequence) <= window + 2 * spare, "a window grows with its text"
            if budget.depth >= DEEPEST and len(sequence.tokens) > 1:
                nodes = [node for node in range(1, len(tree)) if tree.path(node)[0] == 0]
                paths = sorted(tuple(tree.tokens[tree.path(node)].tolist()) for node in nodes)
                assert self.noted.setdefault(tuple(sequence.tokens), paths) == paths
        return trees


class LevelByLevel(Noting):
    """With the host between two levels."""

    def bind(self, target: TargetInfo) -> None:
        super().bind(target)
        self._ahead = None


def written(target: Watched, drafter: Drafter, temperature: float = 0.0, **options: Any) -> list[Generation]:
    engine = Engine(target, drafter, VERIFIERS.build("match"), **options)
    sampling = SamplingParams(temperature=temperature, seed=4)
    texts = [engine.submit(Request(prompt, sampling, max_new_tokens=20 + 9 * n)) for n, prompt in enumerate(PROMPTS)]
    while engine.busy:
        engine.step()
    return texts


@pytest.mark.parametrize("shape", ["topk:12,depth=4,width=4", "topk:2,depth=6,width=2", "ranks:mcsd"])
@pytest.mark.parametrize("form", OTHERS)
@torch.no_grad()
def test_trees_laid_behind_a_verdict_are_those_of_the_host(form: str, shape: str) -> None:
    """With prompts in chunks, texts that come and go, and rows that have left a window."""
    model, noted = model_of(), []
    for kind in (Noting, LevelByLevel):
        target = Watched(model, slots=2, context=128, max_nodes=32, kernels=True)
        drafter = kind(trained(target, form), tree=build_policy(shape))
        texts = written(target, drafter, prefill_tokens=7)
        assert (drafter._ahead is None) == (kind is LevelByLevel)
        assert drafter.begun > 10 or drafter._ahead is None
        noted.append((drafter.noted, [(text.token_ids, text.stats.accepted_tokens) for text in texts]))
    assert noted[0] == noted[1]
    assert len(noted[0][0]) > 40
    plain = written(Watched(model, slots=2, context=128, kernels=True), build_drafter("none"))
    assert [text.token_ids for text in plain] == [text.token_ids for text in texts]
    assert sum(text.stats.accepted_tokens for text in texts) > 2


@pytest.mark.parametrize("form", OTHERS)
@torch.no_grad()
def test_sampled_texts_are_those_of_plain_decoding(form: str) -> None:
    """Drafted by the noise of their draws, which is more often right, so that longer paths are kept."""
    model = model_of()
    target = Watched(model, slots=3, context=128, max_nodes=32, kernels=True)
    drafter = Noting(trained(target, form), tree=build_policy("topk:12,depth=4,width=4"))
    texts = written(target, drafter, 0.8)
    assert drafter.begun > 10
    plain = written(Watched(model, slots=3, context=128, kernels=True), build_drafter("none"), 0.8)
    assert [text.token_ids for text in plain] == [text.token_ids for text in texts]
    assert max(len(text.stats.accepted_per_depth) for text in texts) > 1
    assert sum(text.stats.accepted_tokens for text in texts) > 20


@torch.no_grad()
def test_a_text_that_moves_to_another_slot_is_found_there() -> None:
    """A text that is cancelled while its prompt is written leaves a slot before that of one which goes on."""
    model, noted = model_of(), []
    for kind in (Noting, LevelByLevel):
        target = Watched(model, slots=3, context=128, max_nodes=32, kernels=True)
        target.prefill_piece = lambda prompt: 2  # type: ignore[method-assign]
        drafter = kind(trained(target, "cross"), tree=build_policy("topk:12,depth=4,width=4"))
        engine = Engine(target, drafter, VERIFIERS.build("match"), prefill_tokens=4)
        first = engine.submit(Request((5, 30), max_new_tokens=40))
        engine.step()
        long = engine.submit(Request(tuple(range(36)) * 3, max_new_tokens=9))
        text = engine.submit(Request((1, 2), max_new_tokens=40))
        while len(text.token_ids) < 4:
            engine.step()
        before = target.places([text.sequence])
        engine.cancel(long)
        assert target.places([text.sequence]) != before
        while engine.busy:
            engine.step()
        noted.append((drafter.noted, first.token_ids, text.token_ids))
        assert not long.token_ids
    assert noted[0] == noted[1]


class Read(NamedTuple):
    texts: int
    rows: int


@pytest.mark.parametrize("form", [form for form in FORMS if form not in OTHERS])
@torch.no_grad()
def test_what_waits_of_texts_is_read_by_what_is_recorded(form: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a device: whole prompts, of one text or of several, and the ends of those whose beginnings were inherited,
    also of more rows than one pass reads; a very long end is read in one pass of the network."""
    ends: list[Read] = []
    prompts: list[Read] = []

    def noted_by(reads: list[Read], kind: type[Waiting | RecordedPrompts]) -> None:
        own = kind.read

        def read(self: Any, unread: Mapping[SequenceState, Unread]) -> None:
            reads.append(Read(len(unread), max(map(len, unread.values()))))
            own(self, unread)

        monkeypatch.setattr(kind, "read", read)

    noted_by(ends, Waiting)
    noted_by(prompts, RecordedPrompts)
    beginning = tuple(range(3, 33))
    further = [(1,), (2, 3, 4), tuple(range(18)), tuple(range(40)) * 2, (7, 7)]
    others = [tuple(range(70)), (6,) * 20]
    first = [(*beginning, 5), *(tuple(token % VOCABULARY for token in one) for one in others)]
    model, noted = model_of(), []
    for kind in (Noting, LevelByLevel):
        with monkeypatch.context() as device:
            device.setattr(CatchingUp, "_records", kind is Noting)
            target = Watched(model, slots=3, context=200, max_nodes=32, kernels=True)
            drafter = kind(trained(target, form), tree=build_policy("topk:12,depth=4,width=4"))
            engine = Engine(target, drafter, VERIFIERS.build("match"), prefix_cache=True)
            texts = [engine.submit(Request(first[0], max_new_tokens=40))]
            texts += [engine.submit(Request(prompt, max_new_tokens=9)) for prompt in first[1:]]
            while len(texts[0].token_ids) < 16:
                engine.step()
            texts += [engine.submit(Request((*beginning, *end), max_new_tokens=12)) for end in further]
            while engine.busy:
                engine.step()
        assert sum(text.stats.reused_tokens > 0 for text in texts) > len(further) - 2
        noted.append((drafter.noted, [(text.token_ids, text.stats.accepted_tokens) for text in texts]))
    assert noted[0] == noted[1]
    assert {one.texts for one in ends} == {1, 2}
    assert 2 * STEPS < max(one.rows for one in ends) < len(further[3])
    assert max(one.texts for one in prompts) > 1
    assert max(one.rows for one in prompts) == len(others[0]) - 1


def test_prompts_share_a_pass_while_there_is_room_for_it() -> None:
    texts = [SequenceState([0]) for _ in range(40)]
    rows = dict(zip(texts, [60, 60, 400, 4000, 4000, 10, *[500] * 34], strict=True))
    groups = together(rows)
    assert [one for group in groups for one in group] == texts
    sizes = [size_of(len(group), max(rows[one] for one in group)) for group in groups]
    assert all(size.texts * size.rows <= MOST_ROWS for size in sizes)
    assert [len(group) for group in groups] == [3, 1, 1, 16, 16, 3]
