"""Replayed passes are those of the engine."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from branchwise.backends.transformers.target import TransformersTarget
from branchwise.draft import build_policy
from branchwise.draft.head.drafter import HeadDrafter
from branchwise.engine import Engine, Request
from branchwise.train.corpus import Text
from branchwise.train.head.learn import Watched
from branchwise.train.head.replay import Replay, Shape
from branchwise.train.head.unroll import unroll
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
    compare(form, spec, shape)


@pytest.mark.parametrize("form", ["eagle", "carry"])
@pytest.mark.parametrize("copies", [1, 2, 9])
def test_a_replay_copies_as_the_engine_does(form: str, copies: int) -> None:
    compare(form, "topk:14,depth=2,width=3", Shape(12, 2, 3, copies))  # three and nine nodes are proposed


def compare(form: str, spec: str, shape: Shape) -> None:
    model = model_of()
    target = TransformersTarget(model, slots=1, context=128, max_nodes=32)
    head = trained(target, form, table=VOCABULARY - 3)
    drafter = HeadDrafter(head, tree=build_policy(spec), copies=shape.copies)
    engine = Engine(target, drafter, VERIFIERS.build("match"))
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


@pytest.mark.parametrize("form", FORMS)
@torch.no_grad()
def test_a_replay_predicts_what_training_does(form: str) -> None:
    """Node by node along the most probable path from every root, deeper than windows are wide."""
    model, depth, prompt = model_of(), 5, 3
    head = trained(TransformersTarget(model, slots=1, context=64), form, table=VOCABULARY).head
    watched = Watched(model, head.config.taps, torch.arange(VOCABULARY), head.config.cross)
    tokens = torch.randint(0, VOCABULARY, (24,), generator=torch.Generator().manual_seed(3))
    values, drafted, _ = Replay(head, watched)._grown(tokens, prompt, Shape.chain(depth))

    def logprob(path: Tensor, steps: int) -> Tensor:
        """Of the last token of a path, so many tokens behind the last that the target has read."""
        hidden, _, cached = watched(path[None])
        embeddings = watched.embeddings[path[None, 1:-1]]
        features = head.features([state[:, :-2] for state in hidden])
        predict = unroll(head, features, embeddings, steps, cached)[-1][0, -1]
        previous = embeddings[0, -1] if head.config.bias else None
        return head.logits(predict, watched.rows, previous).log_softmax(dim=-1)[path[-1]]

    for place in range(0, len(values), 4):
        text = tokens[: prompt + place]
        found = [logprob(torch.cat([text, drafted[place, :steps]]), steps) for steps in range(1, depth + 1)]
        torch.testing.assert_close(values[place], torch.stack(found).cumsum(dim=0), atol=1e-4, rtol=1e-3)
