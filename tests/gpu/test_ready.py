"""After a warm-up no step compiles, records or leaves its graphs, whatever texts ask for and whenever they come."""

from __future__ import annotations

import logging
import random
from collections import Counter
from typing import Any

import pytest
import torch

from branchwise.backends.transformers.target import TransformersTarget
from branchwise.core.sampling import SamplingParams
from branchwise.draft import build_drafter
from branchwise.draft.base import Drafter
from branchwise.draft.head.drafter import HeadDrafter
from branchwise.engine import Engine, Generation, Request
from branchwise.engine.warmup import warm_up
from branchwise.train.head.run import FORMS
from branchwise.verify import VERIFIERS
from tests.conformance.architectures import build, served
from tests.heads import random_head

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

WAYS: list[dict[str, Any]] = [
    {},
    {"temperature": 1.0},
    {"temperature": 0.7, "top_p": 0.8},
    {"temperature": 0.9, "top_k": 5, "min_p": 0.01},
    {"logit_bias": {3: -torch.inf, 5: 2.0}},
    {"temperature": 1.3, "logit_bias": {7: 1.0}},
    {"repetition_penalty": 1.3},
    {"temperature": 0.8, "top_p": 0.9, "presence_penalty": 0.6, "frequency_penalty": 0.2},
    {"temperature": 1.0, "repetition_penalty": 0.9, "frequency_penalty": 0.7, "logit_bias": {5: 1.0}},
]


def schedule(engine: Engine, texts: int, seed: int) -> list[Generation]:
    """Texts that join and leave at random, of random lengths and ways of choosing tokens. None comes near the end of
    the context, where trees must be cut."""
    rng = random.Random(seed)
    left = [
        Request(
            tuple(rng.randrange(90) for _ in range(rng.randrange(2, 20))),
            SamplingParams(seed=rng.randrange(99), **rng.choice(WAYS)),
            max_new_tokens=rng.randrange(1, 40),
            logprobs=rng.random() < 0.2,
        )
        for _ in range(texts)
    ]
    made = []
    while left or engine.busy:
        if left and rng.random() < 0.4:
            made.append(engine.submit(left.pop()))
        if made and rng.random() < 0.02:
            engine.cancel(rng.choice(made))
        engine.step()
    return made


@pytest.mark.parametrize("drafter", ["none", "memories", "carry", "parallelspec", "longspec"])
def test_no_step_compiles_or_records_after_a_warm_up(drafter: str, caplog: pytest.LogCaptureFixture) -> None:
    target = TransformersTarget(build(served()["llama"], device="cuda"), slots=4)
    head = HeadDrafter(random_head(target.info, drafter, table=90)) if drafter in FORMS else None
    drafts: Drafter = head or build_drafter(drafter)
    engine = Engine(target, drafts, VERIFIERS.build("match"))
    warm_up(engine, progress=False)
    caplog.set_level(logging.DEBUG, logger="branchwise.cuda.counts")
    happened: Counter[str] = Counter()
    steps = 0
    for generation in schedule(engine, 40, seed=1):
        happened.update(generation.stats.prepared)
        steps += generation.stats.steps
    assert steps > 100
    assert not happened, f"of {steps} steps: {[record.getMessage() for record in caplog.records]}"


def test_texts_of_a_schedule_are_those_of_plain_decoding() -> None:
    model = build(served()["llama"], device="cuda")
    texts = []
    for drafts in (None, HeadDrafter):
        target = TransformersTarget(model, slots=4)
        drafter = build_drafter("none") if drafts is None else HeadDrafter(random_head(target.info, table=90))
        engine = Engine(target, drafter, VERIFIERS.build("match"))
        texts.append([one.token_ids for one in together(engine)])
    assert texts[0] == texts[1]


def together(engine: Engine) -> list[Generation]:
    """The same requests whatever the speed of the engine, several at a time."""
    made = []
    for number, way in enumerate(WAYS * 2):
        prompt = tuple((5 * number + place) % 90 for place in range(3 + number))
        made.append(engine.submit(Request(prompt, SamplingParams(seed=number, **way), max_new_tokens=30 + number)))
    while engine.busy:
        engine.step()
    return made
