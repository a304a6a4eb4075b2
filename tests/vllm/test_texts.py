"""Texts that vLLM writes with our proposer: those of plain vLLM if greedy, and their law if sampled."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.vllm.engines import PROMPT, law, params, texts, use

DRAFTERS = ["memories", "recycle", "suffix", "ngram", "stand", "trigram", "fused:recycle+ngram"]
PROMPTS = [PROMPT, [7, 8, 9] * 5, [3], list(range(16)), [5, 5, 5, 5, 11], PROMPT * 4]
MANY = 800
"""texts of one chi-square test"""
SURE = 1e-4
"""a p-value below this is no accident"""


@pytest.mark.parametrize("draft", DRAFTERS)
@pytest.mark.parametrize("chain", ["best", "drawn"])
def test_greedy_texts_are_those_of_plain_vllm(plain: Any, ours: Any, draft: str, chain: str) -> None:
    proposer = use(ours, draft=draft, chain=chain, share="all", floor=0.01)
    truth = texts(plain, PROMPTS, params())
    assert texts(ours, PROMPTS, params()) == truth
    assert texts(ours, PROMPTS, params()) == truth  # with what it has learned, and with cached prefixes
    ours.llm_engine.step()  # it tells the worker which requests have ended
    assert not proposer.texts.open


@pytest.mark.parametrize("draft", DRAFTERS)
@pytest.mark.parametrize(("chain", "verify"), [("best", "auto"), ("drawn", "auto")])
def test_sampled_texts_have_the_law_of_the_target(ours: Any, model: Path, draft: str, chain: str, verify: str) -> None:
    use(ours, draft=draft, chain=chain, verify=verify, share="all", floor=0.01)
    found = texts(ours, [PROMPT] * MANY, params(temperature=0.7, max_tokens=3))
    assert law(model, 3, 0.7).p_value(found) > SURE


@pytest.mark.parametrize("chain", ["best", "drawn"])
def test_sampled_texts_have_the_law_of_the_target_by_vllms_own_rule(ours: Any, model: Path, chain: str) -> None:
    """With temperatures that are written, on the CPU too, and with q for what is drawn."""
    use(ours, draft="memories", chain=chain, verify="vllm", share="all", floor=0.01)
    found = texts(ours, [PROMPT] * MANY, params(temperature=0.7, max_tokens=3))
    assert law(model, 3, 0.7).p_value(found) > SURE


@pytest.mark.parametrize("chain", ["best", "drawn"])
@pytest.mark.parametrize("cut", [{"top_k": 4}, {"top_p": 0.8}, {"top_k": 6, "top_p": 0.9}])
def test_texts_of_cut_distributions_have_their_law(ours: Any, model: Path, chain: str, cut: dict[str, Any]) -> None:
    use(ours, chain=chain, share="all", floor=0.01)
    found = texts(ours, [PROMPT] * MANY, params(temperature=0.9, max_tokens=2, **cut))
    assert law(model, 2, 0.9, **cut).p_value(found) > SURE


def test_a_batch_of_mixed_requests_serves_each_as_it_asks(plain: Any, ours: Any, model: Path) -> None:
    use(ours, chain="drawn", share="all", floor=0.01)
    kinds = [
        params(),
        params(temperature=0.7, max_tokens=3),
        params(temperature=1.0, top_k=3, max_tokens=2),
        params(temperature=0.8, seed=7),
        params(repetition_penalty=1.3),
    ]
    count = 120
    prompts = [{"prompt_token_ids": PROMPT} for _ in range(count * len(kinds))]
    answers = ours.generate(prompts, kinds * count, use_tqdm=False)
    found = [
        [list(answer.outputs[0].token_ids) for answer in answers[kind :: len(kinds)]] for kind in range(len(kinds))
    ]
    assert found[0] == texts(plain, [PROMPT], kinds[0]) * count
    assert law(model, 3, 0.7).p_value(found[1]) > SURE
    assert law(model, 2, 1.0, top_k=3).p_value(found[2]) > SURE
    assert found[3] == found[3][:1] * count
    assert found[4] == texts(plain, [PROMPT], kinds[4]) * count


@pytest.mark.parametrize("sampling", [{"temperature": 0.9, "seed": 5}, {"temperature": 1.0, "seed": 6, "top_k": 5}])
def test_a_seeded_text_is_the_same_whatever_is_drafted(ours: Any, sampling: dict[str, Any]) -> None:
    found = []
    for options in ({"floor": 0.999}, {"draft": "suffix"}, {"draft": "memories", "chain": "drawn", "floor": 0.01}):
        use(ours, share="all", **options)
        found.append(texts(ours, PROMPTS, params(**sampling)))
        found.append(texts(ours, PROMPTS, params(**sampling))[:1] + found[-1][1:])
    assert all(one == found[0] for one in found)
    assert found[0] != texts(ours, PROMPTS, params(**sampling | {"seed": 99}))


def test_a_seeded_prompt_may_be_read_in_chunks(ours: Any) -> None:
    """The prompt is longer than what one pass reads beside others."""
    use(ours, share="all", floor=0.01)
    long, sampling = PROMPT * 16, params(temperature=0.9, seed=4, max_tokens=12)
    alone = texts(ours, [long], sampling)
    ours.reset_prefix_cache()
    assert texts(ours, [[2], *[[number, *long] for number in range(3)], long], sampling)[-1:] == alone


def test_a_step_without_drafts_survives_top_k(ours: Any) -> None:
    """vLLM alone ends here with an error: `max(): Expected reduction dim`."""
    use(ours, draft="ngram")
    assert [len(text) for text in texts(ours, [[3]], params(temperature=1.0, top_k=5, max_tokens=6))] == [6]


def test_tenants_share_what_they_wrote_with_nobody_else(ours: Any) -> None:
    proposer = use(ours, draft="recycle", share="tenant", floor=0.0)
    drafted: list[list[int]] = []
    propose = proposer.propose

    def noting(*given: Any, **named: Any) -> list[list[int]]:
        found: list[list[int]] = propose(*given, **named)
        drafted.append(found[0])
        return found

    proposer.propose = noting

    def first_draft(tenant: str | None) -> list[int]:
        drafted.clear()
        texts(ours, [[3]], params(extra_args=None if tenant is None else {"branchwise_tenant": tenant}))
        return drafted[0]

    assert first_draft("acme") == []
    assert first_draft("acme") != []
    assert first_draft("umbrella") == first_draft(None) == first_draft(None) == []


def test_an_aborted_request_is_closed_and_the_others_go_on(plain: Any, ours: Any) -> None:
    proposer = use(ours, share="all", floor=0.01)
    engine_ = ours.llm_engine
    found: dict[str, list[int]] = {}
    names = {f"request {number}": prompt for number, prompt in enumerate(PROMPTS)}
    internal = {
        engine_.add_request(name, {"prompt_token_ids": prompt}, params()): name for name, prompt in names.items()
    }
    for step in range(200):
        if not engine_.has_unfinished_requests():
            break
        for output in engine_.step():
            found[output.request_id] = list(output.outputs[0].token_ids)
        if step == 3:
            engine_.abort_request(["request 1"])
    engine_.step()
    assert internal
    truth = dict(zip(names, texts(plain, PROMPTS, params()), strict=True))
    del truth["request 1"]
    assert {name: found[name] for name in truth} == truth
    assert len(found["request 1"]) < 24
    assert not proposer.texts.open
