"""The token that a kernel draws behind every node is the one that warping the row and racing its tokens gives."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from torch import Tensor

from branchwise.core.batch import TreeBatch
from branchwise.core.rng import SeededChance
from branchwise.core.sampling import SamplingParams, Warp
from branchwise.core.sequence import SequenceState
from branchwise.core.target_probs import WarpedProbs
from branchwise.verify.match import Match, at_once
from tests.strategies import trees
from tests.test_attention import Compiled, compiled_by, interpreted

pytestmark = pytest.mark.usefixtures("interpreter")


def drawn_by_kernel(
    logits: Tensor, depths: Tensor, seeds: Tensor, roots: Tensor, sampling: list[SamplingParams]
) -> Tensor:
    from branchwise.cuda.choices import Choices
    from branchwise.cuda.draw import draw_tokens

    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    choices = Choices(len(sampling), logits.shape[-1], device)
    choices.bring(sampling)
    places = [part.to(device) for part in (logits, depths, seeds, roots)]
    return draw_tokens(*places, choices.parameters, choices.bias).cpu()


def drawn_in_full(
    logits: Tensor, depths: Tensor, seeds: Tensor, roots: Tensor, sampling: list[SamplingParams]
) -> Tensor:
    warp = Warp(sampling, logits.shape[-1], "cpu")
    drawn = SeededChance(seeds, roots).tokens(warp(logits), depths)
    greedy = torch.tensor([params.greedy for params in sampling])
    return torch.where(greedy[:, None], warp.adjust(logits).argmax(dim=-1), drawn)


def choices_of(vocabulary: int) -> st.SearchStrategy[SamplingParams]:
    return st.builds(
        SamplingParams,
        temperature=st.sampled_from([0.0, 0.01, 0.7, 1.0, 3.0]),
        top_k=st.sampled_from([0, 1, 2, 7, vocabulary, vocabulary + 9]),
        top_p=st.sampled_from([1.0, 0.999, 0.9, 0.5, 0.01]),
        min_p=st.sampled_from([0.0, 0.02, 0.3, 1.0]),
        logit_bias=st.dictionaries(
            st.integers(0, vocabulary - 1), st.sampled_from([-torch.inf, -3.0, 0.5, 12.0]), max_size=3
        ),
    )


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_a_kernel_draws_what_warping_and_racing_give(data: st.DataObject) -> None:
    pytest.importorskip("triton")
    vocabulary = data.draw(st.sampled_from([5, 256, 300, 4500]))
    batch, nodes = data.draw(st.integers(1, 3)), data.draw(st.integers(1, 2))
    sampling = data.draw(st.lists(choices_of(vocabulary), min_size=batch, max_size=batch))
    rng = torch.Generator().manual_seed(data.draw(st.integers(0, 999)))
    logits = (3 * torch.randn(batch, nodes, vocabulary, generator=rng)).to(data.draw(st.sampled_from(DTYPES)))
    depths = torch.randint(1, 9, (batch, nodes), generator=rng)
    depths[:, 0] = 0
    seeds, roots = torch.randint(1 << 40, (2, batch), generator=rng)
    case = logits, depths, seeds, roots, sampling
    found, wanted = drawn_by_kernel(*case), drawn_in_full(*case)
    if not torch.equal(found, wanted):
        warped = Warp(sampling, vocabulary, "cpu")(logits.double().float())
        for text, node in (found != wanted).nonzero().tolist():  # a cut at the very edge may fall either way
            assert near_the_edge(warped[text, node], sampling[text], logits[text, node])


DTYPES = [torch.float32, torch.bfloat16]


def near_the_edge(warped: Tensor, params: SamplingParams, logits: Tensor) -> bool:
    """Whether tokens together have the share that is wanted but for rounding, or one of them the least that is kept."""
    whole = Warp([SamplingParams(temperature=params.temperature, top_k=params.top_k, logit_bias=params.logit_bias)],
                 logits.shape[-1], "cpu")(logits[None].float())[0].double()  # fmt: skip
    masses = whole.sort(descending=True).values.cumsum(0)
    close = (masses - params.top_p).abs().min() < 1e-5
    least = (whole / whole.max() - params.min_p).abs().min() < 1e-6
    return bool(close or least)


def test_padding_is_left_alone() -> None:
    pytest.importorskip("triton")
    logits = torch.randn(2, 3, 40)
    depths = torch.tensor([[0, 1, 0], [0, 0, 0]])
    found = drawn_by_kernel(logits, depths, torch.zeros(2).long(), torch.zeros(2).long(), [SamplingParams()] * 2)
    best: Any = logits.argmax(dim=-1)
    assert found[0].tolist() == [int(best[0, 0]), int(best[0, 1]), 0]
    assert found[1].tolist() == [int(best[1, 0]), 0, 0]


def test_of_equal_logits_the_first_is_the_best() -> None:
    pytest.importorskip("triton")
    logits = torch.zeros(1, 1, 5000)
    logits[0, 0, [4321, 17, 4097]] = 2.0
    found = drawn_by_kernel(logits, torch.zeros(1, 1).long(), torch.zeros(1).long(), torch.zeros(1).long(),
                            [SamplingParams()])  # fmt: skip
    assert found.tolist() == [[17]]


@settings(max_examples=12, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(data=st.data())
def test_match_gives_the_same_verdict_on_drawn_tokens_as_on_distributions(data: st.DataObject) -> None:
    pytest.importorskip("triton")
    from branchwise.cuda.choices import Choices
    from branchwise.cuda.verify_graph import Drawn

    vocabulary = 6
    drafted = data.draw(st.lists(trees(vocabulary=vocabulary, max_depth=3, max_width=3), min_size=2, max_size=2))
    batch = TreeBatch(drafted)
    sampling = [SamplingParams(temperature=data.draw(st.sampled_from([0.0, 1.0])), seed=1) for _ in drafted]
    texts = [SequenceState([int(tree.tokens[0])], params) for tree, params in zip(drafted, sampling, strict=True)]
    logits = torch.randn(2, batch.nodes, vocabulary, generator=torch.Generator().manual_seed(batch.nodes))
    chance = SeededChance(torch.tensor([3, 4]), torch.tensor([5, 6]))
    choices = Choices(2, vocabulary, torch.device("cpu"))
    choices.bring(sampling)
    found = at_once(batch, Drawn(logits, batch, chance, choices), chance).read()
    assert found == Match()(batch, WarpedProbs(logits, batch, texts), chance).read()


@interpreted
def test_the_kernel_compiles_for_a_hopper_gpu(tmp_path: Path) -> None:
    assert compiled_by("tests.test_draw", tmp_path) == ["_draw"] * 2


def compile_all() -> None:
    """Rows of SmolLM2 and of Qwen2.5-Coder."""
    from branchwise.cuda import draw

    draw._draw = Compiled(draw._draw)
    for vocabulary in (49_152, 151_936):
        logits = torch.zeros(2, 16, vocabulary, dtype=torch.bfloat16)
        numbers = torch.zeros(2, dtype=torch.int64)
        places = torch.zeros(2, 16, dtype=torch.int64), numbers, numbers
        draw.draw_tokens(logits, *places, torch.zeros(64, 5), torch.zeros(64, vocabulary))
