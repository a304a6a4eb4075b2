"""A head on a device: its passes begin before the host has read anything, and texts and trees are those of the host."""

from __future__ import annotations

import pytest
import torch

from branchwise.backends.transformers.target import TransformersTarget
from branchwise.core.sampling import SamplingParams
from branchwise.draft import build_drafter, build_policy
from branchwise.draft.head.drafter import HeadDrafter
from branchwise.engine import Engine, Generation, Request
from branchwise.verify import VERIFIERS
from tests.conformance.architectures import build, served
from tests.heads import random_head
from tests.test_head_ahead import LevelByLevel, Noting
from tests.test_inflight import Watched

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

PROMPTS = ((5, 6, 7), (9, 5), (30, 31))
SHAPES = ("topk:31,depth=5,width=4", "topk:15,depth=3,width=8", "ranks:recycling-80")
FORMS = ("parallelspec", "longspec", "longspec-states")
"""all depths in one pass; a window of few rows, which texts leave, and the keys and values of the target"""
CASES = [*(("carry", shape) for shape in SHAPES), *((form, shape) for form in FORMS for shape in SHAPES[::2])]


def written(
    target: TransformersTarget, shape: str | None, temperature: float, batch: int, form: str = "carry"
) -> tuple[list[Generation], int]:
    """Texts of a target, by a head that grows such trees or without a draft, and the steps that they took."""
    drafter = build_drafter("none")
    if shape is not None:
        drafter = HeadDrafter(random_head(target.info, form, table=90), tree=build_policy(shape))
    engine = Engine(target, drafter, VERIFIERS.build("match"))
    sampling = SamplingParams(temperature=temperature, seed=4)
    asked = [
        engine.submit(Request(prompt, sampling, max_new_tokens=60 + 7 * len(prompt))) for prompt in PROMPTS[:batch]
    ]
    steps = 0
    while engine.busy:
        engine.step()
        steps += 1
    return asked, steps


@pytest.mark.parametrize("batch", [1, 3])
@pytest.mark.parametrize("temperature", [0.0, 0.8])
@pytest.mark.parametrize(("form", "shape"), CASES)
def test_texts_and_trees_are_the_same_whether_passes_wait_for_the_host_or_not(
    form: str, shape: str, temperature: float, batch: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    model = build(served()["llama"], device="cuda")
    plain, _ = written(TransformersTarget(model, slots=3), None, temperature, batch)
    waiting = Watched(model, slots=3)
    monkeypatch.setattr(waiting, "launch", lambda *given: None)
    late, steps = written(waiting, shape, temperature, batch, form)
    target = Watched(model, slots=3)
    early, others = written(target, shape, temperature, batch, form)
    assert [one.token_ids for one in early] == [one.token_ids for one in late] == [one.token_ids for one in plain]
    assert [one.stats.accepted_per_depth for one in early] == [one.stats.accepted_per_depth for one in late]
    assert steps == others
    assert waiting.served == 0
    assert target.served > steps / 3
    if temperature:  # a head that was never trained finds nothing in a greedy loop
        assert sum(one.stats.accepted_tokens for one in early) > 0


@pytest.mark.parametrize(("form", "shape"), [case for case in CASES if "topk" in case[1]])
def test_one_target_writes_text_after_text(form: str, shape: str) -> None:
    """What the device holds of a text means nothing for the next one in the same slot."""
    target = TransformersTarget(build(served()["llama"], device="cuda"), slots=1)
    texts = [[one.token_ids for one in written(target, shape, 0.0, 3, form)[0]] for _ in range(2)]
    assert texts[0] == texts[1] == [one.token_ids for one in written(target, None, 0.0, 3)[0]]


@pytest.mark.parametrize(("form", "shape"), CASES)
def test_a_device_accepts_what_the_host_accepts(form: str, shape: str) -> None:
    found = []
    for device in ("cpu", "cuda"):
        target = TransformersTarget(build(served()["llama"], device=device), slots=1)
        [text], _ = written(target, shape, 0.0, 1, form)
        found.append((text.token_ids, text.stats.accepted_per_depth))
    assert found[0] == found[1]


@pytest.mark.parametrize("form", FORMS)
def test_trees_laid_behind_a_verdict_are_those_that_the_host_grows(form: str) -> None:
    """Node by node, at every step of texts that come and go."""
    model, noted = build(served()["llama"], device="cuda"), []
    for kind in (Noting, LevelByLevel):
        target = TransformersTarget(model, slots=2)
        drafter = kind(random_head(target.info, form, table=90), tree=build_policy("topk:15,depth=4,width=4"))
        engine = Engine(target, drafter, VERIFIERS.build("match"), prefill_tokens=7)
        texts = [engine.submit(Request((*prompt, *range(20)), max_new_tokens=50)) for prompt in PROMPTS]
        while engine.busy:
            engine.step()
        assert (drafter.begun > 20) == (kind is Noting)
        noted.append(([text.token_ids for text in texts], drafter.noted))
    assert noted[0] == noted[1]
