"""The demo: what it says about equal tokens and about the gain is true of the answers."""

from __future__ import annotations

from dataclasses import replace

import pytest
import torch

from branchwise.cli.demo import COPY, DISTURBED, GAINED, LOST, Trial, _comparison, _conclusion, _gain
from branchwise.engine.stats import Stats
from branchwise.errors import BranchwiseError
from branchwise.llm import LLM, Completion
from tests.test_calibrate import model
from tests.test_cli import run


def answer(*tokens: int, steps: int = 1, accepted: int = 0, seconds: float = 1.0) -> Completion:
    stats = Stats(steps=steps, accepted_tokens=accepted, emitted_tokens=len(tokens), seconds={"score": seconds})
    return Completion("", list(tokens), None, "length", stats, prompt_tokens=3, seed=0, pieces=[])


@pytest.fixture(scope="module")
def llm() -> LLM:
    return model()


def test_equal_answers_are_called_equal(llm: LLM) -> None:
    assert _comparison(llm, "a b c", answer(3, 4), answer(3, 4)) == "All 2 tokens are equal."


@pytest.mark.parametrize("drafted", [(3, 5), (3,), (3, 4, 5)])
def test_a_difference_in_float32_is_a_bug(llm: LLM, drafted: tuple[int, ...]) -> None:
    with pytest.raises(BranchwiseError, match="please report it"):
        _comparison(llm, "a b c", answer(3, 4), answer(*drafted))


def test_a_difference_in_bfloat16_is_shown_with_its_logit_gap() -> None:
    llm = model()
    llm.model.to(torch.bfloat16)
    logits = llm.model(input_ids=torch.tensor([[*llm.encode("a b c"), 3]])).logits[0, -1].float()
    said = _comparison(llm, "a b c", answer(3, 4, 9), answer(3, 5, 9))
    assert said.startswith(f"The first 1 tokens are equal, then {llm.decode([4])!r} against {llm.decode([5])!r}")
    assert f"logit gap of {abs(logits[4] - logits[5]).item():.3f}" in said


def test_the_gain_is_tokens_per_pass_over_time_per_pass() -> None:
    tokens = range(12)
    plain = [answer(*tokens, steps=12, seconds=seconds) for seconds in (12.0, 11.0, 99.0)]
    drafted = answer(*tokens, steps=4, accepted=8, seconds=6.0)
    said = _gain(Trial("copy", COPY, plain, [drafted, replace(drafted), replace(drafted)]))
    assert said == (
        "copy: 8 of 12 tokens were drafted and accepted. 3.00 times the tokens per pass, at 1.50 times the time per "
        "pass: 2.00 times the speed."
    )


@pytest.mark.parametrize(
    ("seconds", "concluded"),
    [(6.0, f"{GAINED} So it is."), (14.0, LOST), (3.0, DISTURBED)],
    ids=["faster", "slower", "a pass over trees quicker than one over a token"],
)
def test_the_conclusion_is_drawn_from_the_numbers(seconds: float, concluded: str) -> None:
    tokens = range(12)
    plain, drafted = answer(*tokens, steps=12, seconds=12.0), answer(*tokens, steps=4, accepted=8, seconds=seconds)
    assert _conclusion([Trial("copy", COPY, [plain], [drafted])], "So it is.") == concluded


def test_the_demo_shows_a_copy_and_free_writing() -> None:
    done = run("demo", "-n", "12", "--dtype", "float32", "--threads", "1")
    assert done.returncode == 0, done.stderr
    assert done.stderr == ""
    assert done.stdout.startswith("smollm2 in float32 on 1 CPU threads, greedy, method default")
    assert done.stdout.count("All 12 tokens are equal.") == 2
    assert "free writing: " in done.stdout
    assert any(conclusion in done.stdout for conclusion in (GAINED, LOST, DISTURBED))
