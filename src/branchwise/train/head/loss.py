"""The loss of a head: half its divergence from the target's distribution, half its surprise at the target's best token.

Both are over the token table. The logits of a batch would not fit into memory, so they are made in chunks; of each
chunk its loss is kept and the gradient by its inputs, never the logits.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional

from branchwise.cuda.graphs import have_kernels


def loss_of(outputs: Tensor, rows: Tensor, states: Tensor, wanted: Tensor, weights: Tensor, chunk: int) -> Tensor:
    """The weighted sum of the losses of normed outputs (depths, tokens, width).

    All depths are judged by the same states (tokens, width) of the target, and the same places of its best tokens in
    the table. `weights` are (depths, tokens).
    """
    loss: Tensor = _Loss.apply(outputs, rows, states, wanted, weights, chunk)  # type: ignore[no-untyped-call]
    return loss


class _Loss(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, outputs: Tensor, rows: Tensor, states: Tensor, wanted: Tensor, weights: Tensor, chunk: int
    ) -> Tensor:
        slopes = torch.empty_like(outputs)
        total = outputs.new_zeros((), dtype=torch.float32)
        judged = judge
        if have_kernels(outputs.device):
            from branchwise.cuda.distil import judge as judged
        for start in range(0, len(states), chunk):
            part = slice(start, start + chunk)
            truth = functional.linear(states[part], rows)
            for depth, output in enumerate(outputs):
                guess = functional.linear(output[part], rows)
                total += judged(guess, truth, wanted[part], weights[depth, part]).sum()
                torch.mm(guess, rows, out=slopes[depth, part])
        ctx.save_for_backward(slopes)
        return total

    @staticmethod
    def backward(ctx: Any, *slope: Tensor) -> Any:
        (slopes,) = ctx.saved_tensors
        return slopes * slope[0].to(slopes.dtype), None, None, None, None, None


def judge(guess: Tensor, truth: Tensor, wanted: Tensor, weights: Tensor) -> Tensor:
    """The losses (rows,) of logits (rows, tokens), which become the gradients of the weighted losses."""
    said, meant = guess.float().log_softmax(dim=-1), truth.float().log_softmax(dim=-1)
    divergence = functional.kl_div(said, meant, log_target=True, reduction="none").sum(dim=-1)
    surprise = functional.nll_loss(said, wanted, reduction="none")
    slope = said.exp() - 0.5 * meant.exp()
    slope[torch.arange(len(slope), device=slope.device), wanted] -= 0.5
    guess.copy_(weights[:, None] * slope)
    return 0.5 * weights * (divergence + surprise)
