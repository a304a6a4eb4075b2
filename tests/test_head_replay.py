"""Replayed passes are those of the engine."""

from __future__ import annotations

import pytest
import torch

from branchwise.backends.transformers.target import TransformersTarget
from branchwise.draft import build_policy
from branchwise.draft.head.drafter import HeadDrafter
from branchwise.engine import Engine, Request
from branchwise.train.head.learn import Text, Watched
from branchwise.train.head.replay import Replay, Shape
from branchwise.verify import VERIFIERS
from tests.test_head_drafter import VOCABULARY, model_of, trained
from tests.test_head_training import FORMS


@pytest.mark.parametrize("form", FORMS)
@pytest.mark.parametrize(
    ("spec", "shape"),
    [
        ("chain:3", Shape.chain(3)),
        ("topk:7,depth=4,width=3", Shape(7, 4, 3)),
        ("topk:24,depth=5,width=6", Shape(24, 5, 6)),
    ],
)
def test_a_replay_counts_the_passes_that_the_engine_makes(form: str, spec: str, shape: Shape) -> None:
    model = model_of()
    target = TransformersTarget(model, slots=1, context=128, max_nodes=32)
    head = trained(target, form, table=VOCABULARY - 3)
    engine = Engine(target, HeadDrafter(head, tree=build_policy(spec)), VERIFIERS.build("match"))
    config = head.head.config
    replay = Replay(head.head, Watched(model, config.taps, head.table, config.cross))
    accepted = 0
    for prompt in [(1, 2, 3), (5,), tuple(range(20)), (39, 38, 37, 36)]:
        generation = engine.submit(Request(prompt, max_new_tokens=40))
        while engine.busy:
            engine.step()
        text = Text(torch.tensor([*prompt, *generation.token_ids], dtype=torch.int32), len(prompt))
        assert replay.passes(text, [shape]) == [generation.stats.steps]
        accepted += len(generation.token_ids) - generation.stats.steps
    assert accepted > 0 or shape.width == 1
