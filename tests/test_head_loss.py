"""The loss of a head: its chunks, its gradient and its kernel, against the loss as it is written on paper."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor
from torch.nn import functional

from branchwise.train.head import loss

DEPTHS, TOKENS, WIDTH, TABLE = 3, 11, 8, 37


def case(seed: int = 0) -> dict[str, Tensor]:
    rng = torch.Generator().manual_seed(seed)
    return {
        "outputs": torch.randn(DEPTHS, TOKENS, WIDTH, generator=rng, requires_grad=True),
        "rows": torch.randn(TABLE, WIDTH, generator=rng),
        "states": torch.randn(TOKENS, WIDTH, generator=rng),
        "wanted": torch.randint(TABLE, (TOKENS,), generator=rng),
        "weights": torch.rand(DEPTHS, TOKENS, generator=rng),
    }


def on_paper(outputs: Tensor, rows: Tensor, states: Tensor, wanted: Tensor, weights: Tensor) -> Tensor:
    said, meant = (outputs @ rows.T).log_softmax(-1), (states @ rows.T).log_softmax(-1)
    divergence = (meant.exp() * (meant - said)).sum(-1)
    surprise = -said.gather(-1, wanted.expand(DEPTHS, -1)[..., None])[..., 0]
    return (weights * (divergence + surprise) / 2).sum()


@pytest.mark.parametrize("chunk", [1, 4, 100])
def test_loss_and_gradient_do_not_depend_on_chunks(chunk: int) -> None:
    given = case()
    expected = on_paper(**given)
    (slope,) = torch.autograd.grad(expected, given["outputs"])
    found = loss.loss_of(**given, chunk=chunk)
    (own,) = torch.autograd.grad(3 * found, given["outputs"])
    torch.testing.assert_close(found, expected)
    torch.testing.assert_close(own, 3 * slope)


@pytest.mark.parametrize("tokens", [1, 16, 37, 2100])
def test_the_kernel_says_what_the_plain_loss_says(tokens: int) -> None:
    kernel = pytest.importorskip("branchwise.cuda.distil")
    rng = torch.Generator().manual_seed(tokens)
    guess, truth = 9 * torch.randn(2, 5, tokens, generator=rng)
    wanted, weights = torch.randint(tokens, (5,), generator=rng), torch.rand(5, generator=rng)
    plain = guess.clone()
    expected = loss.judge(plain, truth, wanted, weights)
    found = kernel.judge(guess, truth, wanted, weights)
    torch.testing.assert_close(found, expected, rtol=1e-4, atol=1e-5)
    torch.testing.assert_close(guess, plain, rtol=1e-4, atol=1e-6)


def test_a_perfect_head_has_nothing_left_to_learn_but_the_best_token() -> None:
    given = case()
    truth = functional.linear(given["states"], given["rows"])
    slopes = truth.clone()
    loss.judge(slopes, truth, truth.argmax(-1), torch.ones(TOKENS))
    assert (slopes.gather(1, truth.argmax(-1)[:, None]) <= 0).all()
    torch.testing.assert_close(slopes.sum(-1), torch.zeros(TOKENS), atol=1e-5, rtol=0)
