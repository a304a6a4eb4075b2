"""From logits to distributions, against a slow truth written from the definitions and against transformers' own
processors."""

from __future__ import annotations

import dataclasses
import math
import re
from collections.abc import Iterator, Sequence
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import assume, given
from hypothesis import strategies as st
from torch import Tensor
from transformers import (
    LogitsProcessorList,
    MinPLogitsWarper,
    RepetitionPenaltyLogitsProcessor,
    TemperatureLogitsWarper,
    TopKLogitsWarper,
    TopPLogitsWarper,
)

from branchwise.core.sampling import Context, SamplingParams, adjust, one_hot, unnormalised, warp
from branchwise.errors import UsageError

EMPTY = Context((), 0)


def normal(rows: int, vocabulary: int, *, seed: int = 0, scale: float = 3.0) -> Tensor:
    return scale * torch.randn(rows, vocabulary, generator=torch.Generator().manual_seed(seed))


def law_of(logits: Sequence[float] | Tensor, context: Context = EMPTY, **params: Any) -> Tensor:
    """(vocabulary,) the distribution of one row."""
    return warp(torch.as_tensor(logits)[None], [SamplingParams(**params)], [context])[0]


class Reference:
    """The slow truth: one row, float64, full sorts. `margin` is how close any cut came to going the other way."""

    def __init__(self, logits: Sequence[float], params: SamplingParams, context: Context) -> None:
        self.margin = math.inf
        scores = np.array(logits, dtype=np.float64)
        prompt, output = context.tokens[: context.prompt_length], context.tokens[context.prompt_length :]
        for token in {*prompt, *output}:
            factor = params.repetition_penalty
            scores[token] = scores[token] / factor if scores[token] > 0 else scores[token] * factor
        for token in set(output):
            scores[token] -= params.presence_penalty
            scores[token] -= params.frequency_penalty * list(output).count(token)
        for token, bias in params.logit_bias.items():
            scores[token] += bias
        self.scores = scores
        self.probs = self._greedy() if params.greedy else self._sampled(params)

    def _greedy(self) -> np.ndarray:
        probs = np.zeros_like(self.scores)
        probs[self.scores.argmax()] = 1
        return probs

    def _sampled(self, params: SamplingParams) -> np.ndarray:
        scores = self.scores / params.temperature
        probs = self._normal(np.exp(scores - scores.max()))
        if params.top_k:
            probs = self._keep(probs, np.sort(probs)[::-1][min(params.top_k, len(probs)) - 1])
        if params.top_p < 1:
            falling = np.sort(probs)[::-1]
            before = np.concatenate([[0.0], np.cumsum(falling)[:-1]])
            self.margin = min(self.margin, abs(before - params.top_p)[falling > 0].min())
            probs = self._keep(probs, falling[before < params.top_p][-1])
        floor = params.min_p * probs.max()
        if 0 < params.min_p < 1:
            self.margin = min(self.margin, abs(probs - floor)[probs > 0].min())
        return self._keep(probs, floor)

    def _keep(self, probs: np.ndarray, floor: float) -> np.ndarray:
        return self._normal(np.where(probs >= floor, probs, 0))

    @staticmethod
    def _normal(probs: np.ndarray) -> np.ndarray:
        return probs / probs.sum()


params_of_any_kind = st.builds(
    SamplingParams,
    temperature=st.sampled_from([0.0, 0.3, 0.8, 1.0, 2.5]),
    top_k=st.sampled_from([0, 0, 1, 2, 5, 8, 9, 100]),
    top_p=st.sampled_from([1.0, 1.0, 0.05, 0.4, 0.9, 0.99]),
    min_p=st.sampled_from([0.0, 0.0, 0.02, 0.3, 1.0]),
    repetition_penalty=st.sampled_from([1.0, 1.0, 0.7, 1.5]),
    presence_penalty=st.sampled_from([0.0, 0.0, -0.5, 1.25]),
    frequency_penalty=st.sampled_from([0.0, 0.0, -0.25, 0.75]),
    logit_bias=st.dictionaries(st.integers(0, 7), st.sampled_from([-math.inf, -2.0, 3.5]), max_size=3),
)
VOCABULARY = 9
tied_logits = st.lists(st.integers(-4, 4).map(float), min_size=VOCABULARY, max_size=VOCABULARY)
free_logits = st.lists(st.floats(-9, 9, width=32), min_size=VOCABULARY, max_size=VOCABULARY)
contexts = st.builds(
    lambda prompt, output: Context([*prompt, *output], len(prompt)),
    st.lists(st.integers(0, VOCABULARY - 1), min_size=1, max_size=6),
    st.lists(st.integers(0, VOCABULARY - 1), max_size=6),
)
rows_of_any_kind = st.tuples(st.one_of(tied_logits, free_logits), params_of_any_kind, contexts)


@given(st.lists(rows_of_any_kind, min_size=1, max_size=5))
def test_laws_are_those_of_the_definitions(rows: list[tuple[list[float], SamplingParams, Context]]) -> None:
    references = [Reference(*row) for row in rows]
    for reference in references:
        ordered = np.unique(reference.scores[np.isfinite(reference.scores)])
        assume(reference.margin > 1e-5)  # a cut on a knife's edge may fall either way in float32
        assume(len(ordered) < 2 or np.diff(ordered).min() > 1e-4)  # and near ties become ties
    logits, sampling, before = (list(column) for column in zip(*rows, strict=True))
    found = warp(torch.tensor(logits), sampling, before)
    assert found.dtype == torch.float32
    expected = np.stack([reference.probs for reference in references])
    np.testing.assert_allclose(found.numpy(), expected, atol=2e-6)
    kept = (found > 0).numpy()
    assert kept[expected > 1e-30].all()
    assert not kept[expected == 0].any()


@given(st.lists(rows_of_any_kind, min_size=1, max_size=5))
def test_laws_of_a_device_are_those_of_the_host(rows: list[tuple[list[float], SamplingParams, Context]]) -> None:
    """A device divides once, after the cuts, which may not depend on what a row is multiplied with."""
    logits, sampling, before = (list(column) for column in zip(*rows, strict=True))
    references = [Reference(*row) for row in rows]
    for reference in references:
        ordered = np.unique(reference.scores[np.isfinite(reference.scores)])
        assume(reference.margin > 1e-5)
        assume(len(ordered) < 2 or np.diff(ordered).min() > 1e-4)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(torch, "softmax", lambda scaled, dim: unnormalised(scaled))
        found = warp(torch.tensor(logits), sampling, before)
    np.testing.assert_allclose(found.numpy(), np.stack([reference.probs for reference in references]), atol=2e-6)
    np.testing.assert_allclose(found.double().sum(dim=-1).numpy(), 1.0, atol=1e-6)
    host = warp(torch.tensor(logits), sampling, before)
    assert torch.equal(found > 1e-30, host > 1e-30)


def test_unnormalised_laws_are_one_on_the_best_token_and_nothing_where_it_is_forbidden() -> None:
    logits = normal(3, 1000) * 20 + 500  # more than one block, and the last one is not full
    logits[0, 7] = -torch.inf
    logits[1, 999] = 1e4
    rows = unnormalised(logits)
    assert (rows.amax(dim=-1) == 1).all()
    assert torch.equal(rows.argmax(dim=-1), logits.argmax(dim=-1))
    assert rows[0, 7] == 0
    torch.testing.assert_close(rows / rows.sum(dim=-1, keepdim=True), logits.softmax(dim=-1))


@given(st.lists(rows_of_any_kind, min_size=2, max_size=4))
def test_a_law_does_not_depend_on_its_batch(rows: list[tuple[list[float], SamplingParams, Context]]) -> None:
    logits, sampling, before = (list(column) for column in zip(*rows, strict=True))
    together = warp(torch.tensor(logits), sampling, before)
    for i in range(len(rows)):
        alone = warp(torch.tensor(logits[i : i + 1]), sampling[i : i + 1], before[i : i + 1])
        assert torch.equal(alone[0], together[i])


@pytest.fixture
def two_threads() -> Iterator[None]:
    before = torch.get_num_threads()
    torch.set_num_threads(2)
    yield
    torch.set_num_threads(before)


@pytest.mark.usefixtures("two_threads")
def test_a_large_law_does_not_depend_on_its_batch() -> None:
    # Catches sums in float32: threads share out a single long row, and so add it up in another order.
    logits = normal(4, 150_000)
    sampling = [
        SamplingParams(temperature=0.8, top_p=0.9),
        SamplingParams(temperature=1.0),
        SamplingParams(temperature=1.3, top_k=50),
        SamplingParams(temperature=0.7, top_k=3000, top_p=0.95, min_p=0.001),
    ]
    together = warp(logits, sampling, [EMPTY] * 4)
    for i in range(4):
        assert torch.equal(warp(logits[i : i + 1], sampling[i : i + 1], [EMPTY])[0], together[i])


# Greedy


@given(st.lists(tied_logits, min_size=1, max_size=4))
def test_greedy_takes_the_first_of_the_best(rows: list[list[float]]) -> None:
    probs = warp(torch.tensor(rows), [SamplingParams()] * len(rows), [EMPTY] * len(rows))
    assert probs.argmax(dim=-1).tolist() == [row.index(max(row)) for row in rows]
    assert ((probs == 0) | (probs == 1)).all()
    assert (probs.sum(dim=-1) == 1).all()


def test_a_greedy_row_among_sampled_ones_is_certain() -> None:
    logits = normal(3, 50)
    hot = SamplingParams(temperature=5.0, top_p=0.9)
    probs = warp(logits, [hot, SamplingParams(top_k=5, top_p=0.5, min_p=0.1), hot], [EMPTY] * 3)
    assert torch.equal(probs[1], one_hot(logits.argmax(dim=-1), 50)[1])
    assert (probs[0] > 0).sum() > 1


def test_greedy_sees_penalties_and_bias() -> None:
    logits = torch.tensor([2.0, 1.9, 0.0])
    assert law_of(logits, Context([9, 0], 1), presence_penalty=0.2).argmax() == 1
    assert law_of(logits, logit_bias={0: -math.inf, 1: -math.inf}).argmax() == 2


# Temperature


@pytest.mark.parametrize("temperature", [1e-300, 1e-46, 1e-38, 1e-12])
def test_a_tiny_temperature_is_nearly_greedy_and_never_nan(temperature: float) -> None:
    logits = normal(1, 1000, scale=30.0)[0]
    probs = law_of(logits, temperature=temperature)
    assert probs.argmax() == logits.argmax()
    assert probs.max() == 1
    assert law_of([4.0, 4.0, 1.0], temperature=temperature).tolist() == [0.5, 0.5, 0.0]


def test_a_huge_temperature_flattens_the_law() -> None:
    assert law_of([10.0, -10.0, 0.0, 5.0], temperature=1e30).tolist() == [0.25] * 4


# Cuts


def test_tokens_that_tie_with_the_last_one_kept_stay() -> None:
    tied = torch.tensor([1.0, 3.0, 1.0, 2.0, 1.0])
    for params in ({"top_k": 3}, {"top_p": 0.85}, {"min_p": math.exp(-2) * 0.999}):
        assert (law_of(tied, temperature=1.0, **params) > 0).all()
    for params in ({"top_k": 2}, {"top_p": 0.7}, {"min_p": math.exp(-2) * 1.001}):
        assert (law_of(tied, temperature=1.0, **params) > 0).tolist() == [False, True, False, True, False]


def test_top_p_keeps_the_token_that_reaches_the_mass_and_no_more() -> None:
    logits = torch.tensor([0.5, 0.25, 0.125, 0.125]).log()
    assert law_of(logits, temperature=1.0, top_p=0.5).tolist() == [1, 0, 0, 0]
    assert (law_of(logits, temperature=1.0, top_p=0.51) > 0).tolist() == [True, True, False, False]
    assert (law_of(logits, temperature=1.0, top_p=0.76) > 0).all()


@pytest.mark.parametrize("params", [{"top_p": 1e-9}, {"top_p": 1e-60}, {"top_k": 1}, {"min_p": 1.0}])
def test_the_strictest_cut_keeps_the_best_token(params: dict[str, Any]) -> None:
    logits = normal(1, 400)[0]
    assert torch.equal(law_of(logits, temperature=1.5, **params), one_hot(logits.argmax()[None], 400)[0])


@pytest.mark.parametrize("top_k", [0, 12, 13, 10**9])
def test_a_top_k_of_nothing_or_of_everything_keeps_all(top_k: int) -> None:
    logits = normal(1, 12)[0]
    assert torch.equal(law_of(logits, temperature=1.0, top_k=top_k), law_of(logits, temperature=1.0))


def test_later_cuts_see_what_earlier_ones_left() -> None:
    # .4 .3 .2 .1: top-k 2 leaves 4/7 and 3/7, of which top-p 0.5 keeps the first; of the whole it would keep two.
    logits = torch.tensor([0.4, 0.3, 0.2, 0.1]).log()
    assert law_of(logits, temperature=1.0, top_k=2, top_p=0.5).tolist() == [1, 0, 0, 0]
    assert (law_of(logits, temperature=1.0, top_p=0.5) > 0).sum() == 2


@pytest.mark.parametrize("scale", [0.0, 0.001, 0.3, 1.0, 4.0])
@pytest.mark.parametrize("top_p", [0.01, 0.5, 0.9, 0.999])
def test_partial_selection_equals_a_full_sort(scale: float, top_p: float) -> None:
    # The flat ones keep far more than the 256 and 2048 tokens that are looked at first.
    logits = normal(3, 5000, scale=scale)
    sampling = [SamplingParams(temperature=1.0, top_p=p) for p in (top_p, 0.3, 1.0)]
    found = warp(logits, sampling, [EMPTY] * 3)
    for row, params, probs in zip(logits, sampling, found, strict=True):
        reference = Reference(row.tolist(), params, EMPTY)
        kept, expected = probs > 0, torch.from_numpy(reference.probs > 0)
        # Where rounding decides which token reaches the mass, one more or less is right as well.
        assert (kept ^ expected).sum() <= 1
        np.testing.assert_allclose(
            probs.double()[kept & expected], reference.probs[(kept & expected).numpy()], rtol=1e-3
        )


def test_nuclei_of_every_size_were_among_them() -> None:
    sizes = [int((law_of(normal(1, 5000, scale=s)[0], temperature=1.0, top_p=0.9) > 0).sum()) for s in (4, 2, 1, 0.3)]
    assert sizes[0] < 256 < sizes[1] < 2048 < sizes[3]


def test_a_flat_law_has_no_least_probable_token_to_cut() -> None:
    assert (law_of(torch.zeros(3000), temperature=1.0, top_p=0.1) > 0).all()


def test_rows_that_keep_all_do_not_make_others_sort_everything(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes: list[int] = []
    topk = Tensor.topk

    def recording(probs: Tensor, size: int, dim: int = -1) -> Any:
        sizes.append(size)
        return topk(probs, size, dim=dim)

    monkeypatch.setattr(Tensor, "topk", recording)
    logits = normal(3, 50_000, scale=6.0)
    cut, free, greedy = (SamplingParams(temperature=1.0, top_p=0.9), SamplingParams(temperature=1.0), SamplingParams())
    warp(logits, [cut, free, greedy], [EMPTY] * 3)
    assert sizes
    assert max(sizes) < 5000


# Penalties and bias


def test_repetition_penalty_counts_prompt_and_output() -> None:
    logits = torch.tensor([[2.0, -2.0, 2.0, -2.0, 1.0]])
    found = adjust(logits, [SamplingParams(repetition_penalty=2.0)], [Context([0, 1, 2, 2], 2)])
    assert found.tolist() == [[1.0, -4.0, 1.0, -2.0, 1.0]]


def test_presence_and_frequency_penalties_count_only_output() -> None:
    logits = torch.zeros(1, 5)
    context = Context([0, 0, 1, 2, 2, 2], 3)
    assert adjust(logits, [SamplingParams(presence_penalty=0.5)], [context]).tolist() == [[0, 0, -0.5, 0, 0]]
    assert adjust(logits, [SamplingParams(frequency_penalty=0.5)], [context]).tolist() == [[0, 0, -1.5, 0, 0]]
    both = SamplingParams(presence_penalty=0.5, frequency_penalty=-0.25)
    assert adjust(logits, [both], [Context([1, 1, 2, 3], 1)]).tolist() == [[0, -0.25, -0.25, -0.25, 0]]


def test_an_output_without_tokens_is_not_penalised() -> None:
    logits = normal(1, 6)
    params = SamplingParams(presence_penalty=1.0, frequency_penalty=1.0)
    assert torch.equal(adjust(logits, [params], [Context([1, 2, 3], 3)]), logits)


def test_bias_is_added_and_minus_infinity_forbids() -> None:
    probs = law_of(torch.zeros(4), temperature=1.0, logit_bias={1: math.log(3), 2: -math.inf})
    np.testing.assert_allclose(probs, [0.2, 0.6, 0, 0.2], atol=1e-6)
    assert probs[2] == 0


@pytest.mark.parametrize("token", [4, 7])
def test_a_bias_beyond_the_vocabulary_gets_one_sentence(token: int) -> None:
    assert law_of(torch.zeros(4), temperature=1.0, logit_bias={3: 1.0}).argmax() == 3
    with pytest.raises(UsageError, match=rf"logit_bias names token {token}, but the vocabulary ends at 3\.$"):
        SamplingParams(logit_bias={0: 1.0, token: 1.0}).check_vocabulary(4)
    SamplingParams(logit_bias={0: 1.0, 3: 1.0}).check_vocabulary(4)


def test_processors_run_first_in_order_and_see_all_tokens() -> None:
    calls: list[tuple[str, list[int]]] = []

    def double(tokens: Sequence[int], row: Tensor) -> Tensor:
        calls.append(("double", list(tokens)))
        return 2 * row

    def add(tokens: Sequence[int], row: Tensor) -> Tensor:
        calls.append(("add", list(tokens)))
        return row + 1

    params = SamplingParams(processors=(double, add), logit_bias={0: 10.0})
    assert adjust(torch.tensor([[1.0, 2.0]]), [params], [Context([5, 6], 1)]).tolist() == [[13.0, 5.0]]
    assert calls == [("double", [5, 6]), ("add", [5, 6])]


def test_each_row_is_adjusted_by_its_own_params_and_context() -> None:
    logits = torch.ones(3, 4)
    sampling = [SamplingParams(repetition_penalty=2.0), SamplingParams(), SamplingParams(presence_penalty=1.0)]
    found = adjust(logits, sampling, [Context([0], 1), Context([0], 0), Context([3], 0)])
    assert found.tolist() == [[0.5, 1, 1, 1], [1, 1, 1, 1], [1, 1, 1, 0]]


def test_logits_are_never_changed_in_place() -> None:
    logits = normal(2, 300)
    before = logits.clone()
    params = SamplingParams(
        temperature=0.7, top_k=9, top_p=0.8, min_p=0.01, repetition_penalty=1.3, logit_bias={1: 2.0}
    )
    warp(logits, [params] * 2, [Context([1, 2], 1)] * 2)
    assert torch.equal(logits, before)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float64])
def test_laws_are_float32_whatever_the_model_computes_in(dtype: torch.dtype) -> None:
    logits = normal(2, 40).to(dtype)
    sampling = [SamplingParams(temperature=1.0, top_p=0.9), SamplingParams()]
    probs = warp(logits, sampling, [EMPTY] * 2)
    assert probs.dtype == torch.float32
    assert torch.equal(probs, warp(logits.float(), sampling, [EMPTY] * 2))
    assert adjust(logits, sampling, [EMPTY] * 2).dtype == torch.float32


# Transformers


@pytest.mark.parametrize(
    "params",
    [
        {"temperature": 0.7},
        {"temperature": 1.0, "top_k": 20},
        {"temperature": 1.0, "top_p": 0.8},
        {"temperature": 1.0, "min_p": 0.05},
        {"temperature": 1.0, "repetition_penalty": 1.3},
        {"temperature": 1.4, "top_k": 30, "top_p": 0.9, "min_p": 0.02, "repetition_penalty": 0.8},
        {"temperature": 0.6, "top_k": 40, "top_p": 0.95, "min_p": 0.1, "repetition_penalty": 1.2},
    ],
    ids=str,
)
def test_laws_equal_those_of_transformers(params: dict[str, Any]) -> None:
    chain = LogitsProcessorList()
    if "repetition_penalty" in params:
        chain.append(RepetitionPenaltyLogitsProcessor(params["repetition_penalty"]))
    chain.append(TemperatureLogitsWarper(params["temperature"]))
    if "top_k" in params:
        chain.append(TopKLogitsWarper(params["top_k"]))
    if "top_p" in params:
        chain.append(TopPLogitsWarper(params["top_p"]))
    if "min_p" in params:
        chain.append(MinPLogitsWarper(params["min_p"]))
    generator = torch.Generator().manual_seed(7)
    logits = normal(16, 500, seed=7)
    history = torch.randint(500, (16, 30), generator=generator)
    expected = torch.softmax(chain(history, logits.clone()), dim=-1)
    contexts = [Context(tokens, 10) for tokens in history.tolist()]
    found = warp(logits, [SamplingParams(**params)] * 16, contexts)
    assert torch.equal(found > 0, expected > 0)
    torch.testing.assert_close(found, expected, atol=1e-6, rtol=1e-5)


# Ranges


@pytest.mark.parametrize(
    ("params", "message"),
    [
        ({"temperature": -0.1}, "temperature must be at least 0, not -0.1."),
        ({"temperature": math.nan}, "temperature must be at least 0, not nan."),
        ({"temperature": math.inf}, "temperature must be at least 0, not inf."),
        ({"top_k": -1}, "top_k must be at least 0 (0 keeps all tokens), not -1."),
        ({"top_p": 0.0}, "top_p must be above 0 and at most 1, not 0.0."),
        ({"top_p": 1.01}, "top_p must be above 0 and at most 1, not 1.01."),
        ({"top_p": math.nan}, "top_p must be above 0 and at most 1, not nan."),
        ({"min_p": -0.01}, "min_p must be between 0 and 1, not -0.01."),
        ({"min_p": 1.5}, "min_p must be between 0 and 1, not 1.5."),
        ({"repetition_penalty": 0.0}, "repetition_penalty must be above 0, not 0.0."),
        ({"repetition_penalty": math.inf}, "repetition_penalty must be above 0, not inf."),
        ({"presence_penalty": math.inf}, "presence_penalty must be a finite number, not inf."),
        ({"frequency_penalty": math.nan}, "frequency_penalty must be a finite number, not nan."),
        ({"seed": "a"}, "seed must be a whole number, not 'a'."),
        ({"seed": 1.5}, "seed must be a whole number, not 1.5."),
        ({"logit_bias": {-1: 1.0}}, "logit_bias maps token ids to finite numbers (or -inf to forbid a token)."),
        ({"logit_bias": {1: math.inf}}, "logit_bias maps token ids to finite numbers (or -inf to forbid a token)."),
        ({"logit_bias": {1: math.nan}}, "logit_bias maps token ids to finite numbers (or -inf to forbid a token)."),
    ],
    ids=str,
)
def test_a_value_outside_its_range_gets_one_sentence(params: dict[str, Any], message: str) -> None:
    with pytest.raises(UsageError, match=f"^{re.escape(message)}$"):
        SamplingParams(**params)


def test_values_at_the_edge_of_their_range_are_fine() -> None:
    SamplingParams(temperature=0, top_k=0, top_p=1, min_p=0, logit_bias={0: -math.inf})
    SamplingParams(min_p=1.0, presence_penalty=-3.0, frequency_penalty=-3.0, repetition_penalty=1e-3)


def test_params_say_what_they_need() -> None:
    plain = SamplingParams()
    assert plain.greedy
    assert not plain.looks_back
    assert not SamplingParams(temperature=0.1).greedy
    assert not SamplingParams(logit_bias={1: 1.0}, top_k=3, min_p=0.1, top_p=0.5, temperature=1.0).looks_back
    for name in ("repetition_penalty", "presence_penalty", "frequency_penalty"):
        assert SamplingParams(**{name: 0.5}).looks_back
    assert SamplingParams(processors=(lambda tokens, row: row,)).looks_back


def test_params_cannot_be_changed() -> None:
    with pytest.raises(dataclasses.FrozenInstanceError):
        SamplingParams().temperature = 1.0  # type: ignore[misc]
