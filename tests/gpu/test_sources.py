"""Several sources of drafts on a device: whoever drafts behind a verdict, texts are those of plain decoding."""

from __future__ import annotations

from collections import Counter

import pytest
import torch

from branchwise.backends.transformers.target import TransformersTarget
from branchwise.control.guard import PLAIN
from branchwise.draft import build_drafter, build_policy
from branchwise.draft.auto import AutoDrafter
from branchwise.draft.head.drafter import HeadDrafter
from branchwise.draft.model.draft_model import Weights
from branchwise.draft.model.drafter import ModelDrafter
from branchwise.engine import Engine
from branchwise.engine.warmup import warm_up
from branchwise.verify import VERIFIERS
from tests.conformance.architectures import build, served
from tests.gpu.test_ready import schedule
from tests.heads import random_head
from tests.test_inflight import Watched
from tests.test_sources import Anyhow

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def auto_of(target: TransformersTarget, *, model: bool = True) -> AutoDrafter:
    drafter = AutoDrafter()
    drafter._head = HeadDrafter(random_head(target.info, table=90))
    if model:
        weights = Weights("same", build(served()["llama"], device="cuda"), None)
        drafter._model = ModelDrafter(weights, tree=build_policy("topk:1"))
    return drafter


@pytest.mark.parametrize("seed", range(3))
def test_texts_of_a_schedule_are_those_of_plain_decoding_whoever_drafts(seed: int) -> None:
    model = build(served()["llama"], device="cuda")
    plain = Engine(TransformersTarget(model, slots=4), build_drafter("none"), VERIFIERS.build("match"))
    expected = [one.token_ids for one in schedule(plain, 24, seed)]
    target = Watched(model, slots=4)
    guard = Anyhow(["head", "memories", "model, flat", "model, deep"], seed)
    engine = Engine(target, auto_of(target), VERIFIERS.build("match"), guard=guard)
    made = schedule(engine, 24, seed)
    for one, text in zip(made, expected, strict=True):
        common = min(len(one.token_ids), len(text))  # some are cancelled, at other steps
        assert one.token_ids[:common] == text[:common]
    assert {source for source, _ in guard.recorded} == {PLAIN, 0, 1, 2, 3}
    assert {name for one in made for name in one.stats.drafted_by_source} == {"head", "memories", "model"}
    assert target.served > 10, "where the same source goes on, passes begin ahead"


def test_no_step_compiles_or_records_after_a_warm_up_of_several_sources() -> None:
    target = TransformersTarget(build(served()["llama"], device="cuda"), slots=4)
    engine = Engine(target, auto_of(target, model=False), VERIFIERS.build("match"))
    warm_up(engine, progress=False)
    happened: Counter[str] = Counter()
    for generation in schedule(engine, 40, seed=1):
        happened.update(generation.stats.prepared)
    assert not happened
