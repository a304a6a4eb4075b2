"""Log-probabilities of prompts: those of the model, chunk by chunk, whatever the drafter needs of the same logits."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from branchwise.backends.base import Needs, Prefill
from branchwise.backends.toy import ToyTarget
from branchwise.core.sequence import SequenceState
from branchwise.engine import Engine, FinishReason, Generation, Request, scores
from branchwise.errors import UsageError
from branchwise.testing import RandomDrafter
from branchwise.verify import VERIFIERS

VOCABULARY = 6
PROMPT = tuple((7 * n + n // 3) % VOCABULARY for n in range(41))


class Reading(RandomDrafter):
    """Needs some logits of the prefill itself."""

    needs = Needs(prefill_logits=5)
    found: torch.Tensor

    def start(self, sequence: SequenceState, prefill: Prefill) -> None:
        self.found = prefill.logits


def write(engine: Engine, **options: Any) -> Generation:
    generation = engine.submit(Request(PROMPT, prompt_logprobs=True, top_logprobs=2, **options))
    while engine.busy:
        engine.step()
    return generation


@pytest.mark.parametrize("chunk", [3, 64])
@pytest.mark.parametrize("tokens", [0, 4])
def test_every_token_but_the_first_has_the_logprob_of_the_model(
    chunk: int, tokens: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(scores, "ROWS", 2)
    target, drafter = ToyTarget(VOCABULARY, prefill_chunk=chunk), Reading(VOCABULARY)
    engine = Engine(target, drafter, VERIFIERS.build("match"), prefix_cache=True)
    rows = torch.stack([target.logits(PROMPT[:length]).float() for length in range(1, len(PROMPT))])
    logprobs = rows.log_softmax(-1)
    for _ in range(2):  # a second time nothing is taken from the text before
        text = write(engine, max_new_tokens=tokens)
        assert text.stats.reused_tokens == 0
        assert text.finish_reason is FinishReason.LENGTH
        assert len(text.token_ids) == tokens
        found = [score.logprob for score in text.prompt_scores]
        assert found == pytest.approx([float(row[token]) for row, token in zip(logprobs, PROMPT[1:], strict=True)])
        best = logprobs.topk(2)
        tops = [[token for token, _ in score.top] for score in text.prompt_scores]
        assert tops == best.indices.tolist()
        assert torch.allclose(drafter.found.float(), rows[-5:])
    assert target.free_slots == target.slots


def test_a_text_of_no_tokens_is_one_whose_prompt_is_scored() -> None:
    with pytest.raises(UsageError, match="at least 1"):
        Request(PROMPT, max_new_tokens=0)


def test_without_memory_for_its_scores_a_text_fails_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*_: Any) -> None:
        raise torch.OutOfMemoryError

    monkeypatch.setattr("branchwise.engine.scheduler.token_scores", full)
    target = ToyTarget(VOCABULARY)
    engine = Engine(target, RandomDrafter(VOCABULARY), VERIFIERS.build("match"))
    other = engine.submit(Request(PROMPT, max_new_tokens=3))
    assert write(engine, max_new_tokens=0).finish_reason is FinishReason.ERROR
    assert len(other.token_ids) == 3
    assert target.free_slots == target.slots
