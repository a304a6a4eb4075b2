"""Prompts that begin with cached rows of other texts on a device, where passes are recorded and enqueued ahead."""

from __future__ import annotations

from collections.abc import Callable

import pytest
import torch

from branchwise.backends.transformers.target import TransformersTarget
from branchwise.draft import build_drafter, build_policy
from branchwise.draft.base import Drafter
from branchwise.draft.head.drafter import HeadDrafter
from branchwise.draft.model.draft_model import Weights
from branchwise.draft.model.drafter import ModelDrafter
from branchwise.engine import Engine
from branchwise.verify import VERIFIERS
from tests.conformance.architectures import VOCABULARY, build, served
from tests.heads import random_head
from tests.test_inflight import converse, texts_of

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

PROMPT = tuple((11 * n + n // 4) % VOCABULARY for n in range(30))
DRAFTERS: dict[str, Callable[[TransformersTarget], Drafter]] = {
    "none": lambda target: build_drafter("none"),
    "recycle": lambda target: build_drafter("recycle"),
    "head, best first": lambda target: head(target, "topk:31,depth=5,width=4"),
    "head, ranks": lambda target: head(target, "ranks:recycling-80"),
    "model": lambda target: ModelDrafter(Weights("tiny", target.model, None), tree=build_policy("chain:3")),
}


def head(target: TransformersTarget, shape: str) -> Drafter:
    return HeadDrafter(random_head(target.info, table=90), tree=build_policy(shape))


@pytest.mark.parametrize("slots", [1, 3])
@pytest.mark.parametrize("name", DRAFTERS)
def test_texts_and_drafts_are_those_of_whole_prompts(name: str, slots: int) -> None:
    target = TransformersTarget(build(served()["llama"], device="cuda"), slots=slots)
    found = []
    for cached in (False, True):
        engine = Engine(target, DRAFTERS[name](target), VERIFIERS.build("match"), prefix_cache=cached)
        found.append(converse(engine, PROMPT, 16))
        engine.drop_prefixes()
        assert target.free_slots == slots
    whole, begun = found
    assert texts_of(begun) == texts_of(whole)
    assert begun[1].stats.reused_tokens == len(PROMPT) + 16 - 1
    assert all(one.stats.reused_tokens for one in begun[1:])
    if name.startswith("head"):  # a table has learned less of prompts that were not prefilled
        assert [one.stats.accepted_per_depth for one in begun] == [one.stats.accepted_per_depth for one in whole]
