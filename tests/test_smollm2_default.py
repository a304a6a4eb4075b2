"""The real model with the default method, in the quick tier: greedy and sampled texts are those of the model."""

from __future__ import annotations

import pytest
import torch

from branchwise.engine import Engine
from branchwise.llm import LLM
from branchwise.methods import DEFAULT, PRESETS
from tests.prompts import PROMPTS

CHOSEN = [PROMPTS[6], PROMPTS[3]]
LENGTH = 16


@pytest.fixture(scope="module")
def default(smollm2: LLM) -> LLM:
    engine = Engine(smollm2.engine.target, *PRESETS[DEFAULT].build())
    return LLM("smollm2", smollm2.model, smollm2.tokenizer, engine)


@pytest.mark.filterwarnings("ignore:.*generation flags.*")
def test_greedy_output_equals_transformers_generate(smollm2: LLM, default: LLM) -> None:
    for prompt in CHOSEN:
        ids = torch.tensor([smollm2.encode(prompt)])
        found = smollm2.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=LENGTH,
            do_sample=False,
            eos_token_id=sorted(smollm2.stop_tokens),
        )
        answer = default.generate(prompt, max_new_tokens=LENGTH)
        assert answer.token_ids == found[0, ids.shape[1] :].tolist()
        assert answer.stats.drafted_tokens > 0


def test_sampled_output_is_that_of_plain_decoding_alone_and_in_a_batch(smollm2: LLM, default: LLM) -> None:
    options = {"max_new_tokens": LENGTH, "temperature": 0.8, "seed": 5}
    plain = [smollm2.generate(prompt, **options).token_ids for prompt in CHOSEN]  # type: ignore[call-overload]
    alone = [default.generate(prompt, **options).token_ids for prompt in CHOSEN]  # type: ignore[call-overload]
    together = [answer.token_ids for answer in default.generate(CHOSEN, **options)]  # type: ignore[call-overload]
    assert plain == alone == together
