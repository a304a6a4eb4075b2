"""A head that drafts trees of several sizes ahead of the host: whichever it takes, texts are those of plain steps."""

from __future__ import annotations

import random
from collections import Counter
from collections.abc import Sequence
from typing import Any

import pytest
import torch

from branchwise.control.ladder import Ladder
from branchwise.core.sampling import SamplingParams
from branchwise.core.sequence import SequenceState
from branchwise.draft import build_drafter
from branchwise.draft.base import Drafter
from branchwise.draft.head import drafter as drafter_module
from branchwise.draft.head import prompt as prompt_module
from branchwise.draft.head.drafter import HeadDrafter
from branchwise.draft.head.trees import ahead as ahead_module
from branchwise.draft.head.trees.ahead import best_first
from branchwise.draft.head.usual import Usual
from branchwise.draft.policies.topk import TopK
from branchwise.engine import Engine, Generation, Request
from branchwise.verify import VERIFIERS
from tests.conformance.architectures import build, served
from tests.heads import random_head
from tests.test_inflight import PROMPTS, Watched

pytestmark = pytest.mark.usefixtures("interpreter")


@pytest.fixture(name="target")
def make_target() -> Watched:
    pytest.importorskip("triton", reason="needs Triton's interpreter")
    config = served()["llama"]
    small = {"num_hidden_layers": 1, "num_attention_heads": 2, "num_key_value_heads": 1}
    model = build(type(config)(**config.to_dict() | small))
    return Watched(model, slots=3, context=64, max_nodes=16, kernels=True)


WHOLE = Usual(TopK(7, depth=2, width=4), table=90, copies=0, smaller=(TopK(3, depth=2, width=2),))


@pytest.fixture(autouse=True)
def _as_on_a_device(monkeypatch: pytest.MonkeyPatch) -> None:
    def draft(target: Any, cost: float, tree: TopK, *parts: Any, copies: int) -> Any:
        return best_first(tree, *parts, copies=copies)

    monkeypatch.setattr(drafter_module, "usual_on", lambda device: WHOLE)
    monkeypatch.setattr(ahead_module, "PacedDraft", draft)


def written(target: Watched, drafter: Drafter, tokens: int = 12) -> list[Generation]:
    engine = Engine(target, drafter, VERIFIERS.build("match"))
    ways = [SamplingParams(temperature=0.9, seed=3), SamplingParams(), SamplingParams(temperature=0.7, seed=1)]
    asked = [
        engine.submit(Request(prompt, way, max_new_tokens=tokens + 3 * row))
        for row, (prompt, way) in enumerate(zip(PROMPTS, ways, strict=False))
    ]
    while engine.busy:
        engine.step()
    return asked


@pytest.mark.parametrize("patience", [0, 2, 99])
def test_texts_are_those_of_plain_decoding_whatever_size_is_drafted(
    target: Watched, patience: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    rng, taken = random.Random(patience), Counter[int]()

    def rung(ladder: Ladder, batch: int, texts: Sequence[object]) -> int:
        taken[found := rng.choice([0, 1, 2, 2])] += 1
        return found

    monkeypatch.setattr(Ladder, "rung", rung)
    monkeypatch.setattr(ahead_module, "PATIENCE", patience)
    plain = written(target, build_drafter("none"))
    drafted = written(target, HeadDrafter(random_head(target.info, table=90)))
    assert [one.token_ids for one in drafted] == [one.token_ids for one in plain]
    assert set(taken) == {0, 1, 2}
    sizes = {step.nodes for one in drafted for step in one.stats.each}
    assert 0 in sizes
    if patience == 99:  # otherwise texts are soon let go
        assert {3, 7} <= sizes
        assert sum(one.stats.accepted_tokens for one in drafted) > 0


def test_a_head_that_stands_aside_reads_no_prompt_and_drafts_for_the_next_text(
    target: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    read: list[int] = []
    own = prompt_module.read_prompts

    def watched(*given: Any) -> None:
        read.append(len(given[3]))
        own(*given)

    aside = True
    monkeypatch.setattr(prompt_module, "read_prompts", watched)
    monkeypatch.setattr(Ladder, "rung", lambda ladder, batch, texts: 0 if aside else 2)
    drafter = HeadDrafter(random_head(target.info, table=90))
    engine = Engine(target, drafter, VERIFIERS.build("match"))
    for wanted in (0, 1):
        asked = engine.submit(Request(PROMPTS[0], max_new_tokens=12))
        while engine.busy:
            engine.step()
        assert len(read) == wanted
        assert bool(asked.stats.drafted_tokens) is bool(wanted)
        aside = False


def test_a_head_with_a_ladder_needs_no_guard(target: Watched) -> None:
    drafter = HeadDrafter(random_head(target.info, table=90))
    drafter.bind(target.info)
    assert drafter.paces
    assert drafter.reasons(1) == []


def test_a_plain_step_is_timed_when_nothing_is_read_in_it_for_drafts_to_come(
    target: Watched, monkeypatch: pytest.MonkeyPatch
) -> None:
    """While a head reads along, steps without a draft take longer than plain ones, and drafting would seem to pay."""
    timed: list[tuple[int, bool]] = []
    record = Ladder.record

    def watched(ladder: Ladder, batch: int, rung: int, tokens: float, seconds: float | None, each: Any) -> None:
        timed.append((rung, seconds is not None))
        record(ladder, batch, rung, tokens, seconds, each)

    rungs = iter([1, 1])
    monkeypatch.setattr(Ladder, "rung", lambda ladder, batch, texts: next(rungs, 0))
    monkeypatch.setattr(Ladder, "record", watched)
    monkeypatch.setattr(ahead_module, "PATIENCE", 3)
    drafter = HeadDrafter(random_head(target.info, table=90))
    engine = Engine(target, drafter, VERIFIERS.build("match"))
    text = engine.submit(Request(PROMPTS[0], max_new_tokens=20))
    while not text.finished:
        engine.step()
    plain = [known for rung, known in timed if not rung]
    assert len(plain) < len(timed), "first it drafts, and so has read its prompt"
    assert plain == [False] * 4 + [True] * (len(plain) - 4)


def test_prompts_that_are_read_together_have_few_rows() -> None:
    lengths = [10, 3000, 900, 40, *[5] * 24, 9000, 1]
    texts = [SequenceState(list(range(length))) for length in lengths]
    groups = prompt_module.together(texts, torch.device("cuda"))
    assert [text for group in groups for text in group] == texts
    for group in groups:
        rows = len(group) * max(len(text.tokens) for text in group)
        assert rows <= prompt_module.MOST_ROWS or len(group) == 1
        assert len(group) <= prompt_module.MOST_TOGETHER
    assert sorted(set(map(len, groups))) == [1, 2, 8, 16], "what a device reads together are powers of two"
    assert len(prompt_module.together(texts, torch.device("cpu"))) == len(texts)
