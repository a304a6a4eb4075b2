"""How far a student's distribution q is from its target's p, and the gradient that brings it closer.

Zhou et al., "DistillSpec", arXiv 2310.08461. A drafted token is accepted with probability 1 - TV(p, q). Each divergence
keeps its value and its gradient by the student's logits, (rows, vocabulary) once, and not the softmaxes and logarithms
that autograd would keep. The logits of a batch would still fill the memory, so they are made in chunks. A chunk keeps
only the gradients of its inputs. If the head is more than a matrix, the backward pass makes its logits again.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

from branchwise.cuda.graphs import have_kernels

KINDS = {
    "fkl": "forward KL, KL(p | q): covers all that the target may say",
    "rkl": "reverse KL, KL(q | p): keeps to what the target says most",
    "js": "Jensen-Shannon: between the two",
    "tv": "total variation: the acceptance itself; learns little where the two hardly overlap",
}


def distilled(
    hidden: Tensor, head: Any, states: Tensor, teacher: Any, kind: str, temperature: float, chunk: int
) -> Tensor:
    """The mean divergence of what `head` makes of hidden states (rows, width) of the student from what `teacher` makes
    of the states (rows, width) of the target."""
    if type(head) is nn.Linear and [name for name, _ in head.named_parameters()] == ["weight"]:
        found: Tensor = _Distilled.apply(  # type: ignore[no-untyped-call]
            hidden, head.weight, states, teacher, kind, temperature, chunk
        )
        return found

    def part(hidden: Tensor, states: Tensor) -> Tensor:
        with torch.no_grad():
            truth = teacher(states)
        guess = head(hidden)
        size = min(guess.shape[-1], truth.shape[-1])  # either model may have padded its vocabulary
        return divergence(guess[..., :size], truth[..., :size], kind, temperature).sum()

    total = hidden.new_zeros((), dtype=torch.float32)
    for start in range(0, len(hidden), chunk):
        rows = slice(start, start + chunk)
        sum_of_part: Any = checkpoint(part, hidden[rows], states[rows], use_reentrant=False)
        total = total + sum_of_part
    return total / max(1, len(hidden))


class _Distilled(torch.autograd.Function):
    """The same for a head that is one matrix: a chunk keeps its gradients, so that no logits are made twice."""

    @staticmethod
    def forward(
        ctx: Any,
        hidden: Tensor,
        weight: Tensor,
        states: Tensor,
        teacher: Any,
        kind: str,
        temperature: float,
        chunk: int,
    ) -> Tensor:
        device = hidden.device.type
        half = torch.is_autocast_enabled(device)
        dtype = torch.get_autocast_dtype(device) if half else hidden.dtype
        given, rows = hidden.to(dtype), weight.to(dtype)
        by_hidden, by_weight = torch.empty_like(given), torch.zeros_like(weight)
        total = hidden.new_zeros((), dtype=torch.promote_types(hidden.dtype, torch.float32))
        for start in range(0, len(hidden), chunk):
            part = slice(start, start + chunk)
            guess, truth = functional.linear(given[part], rows), teacher(states[part])
            size = min(guess.shape[-1], truth.shape[-1])  # either model may have padded its vocabulary
            value, slope = judged(guess[:, :size], truth[:, :size], kind, temperature)
            total += value.sum()
            by_hidden[part] = slope @ rows[:size]
            by_weight[:size] += slope.T @ given[part]
        count = max(1, len(hidden))
        ctx.save_for_backward(by_hidden.to(hidden.dtype) / count, by_weight / count)
        return total / count

    @staticmethod
    def backward(ctx: Any, *slope: Tensor) -> Any:
        by_hidden, by_weight = ctx.saved_tensors
        return by_hidden * slope[0].to(by_hidden.dtype), by_weight * slope[0].to(by_weight.dtype), *[None] * 5


def divergence(guess: Tensor, truth: Tensor, kind: str, temperature: float = 1.0) -> Tensor:
    """(rows,): of softmax(guess / temperature) from softmax(truth / temperature), logits (rows, vocabulary) each."""
    found: Tensor = _Divergence.apply(guess, truth, kind, temperature)  # type: ignore[no-untyped-call]
    return found


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, guess: Tensor, truth: Tensor, kind: str, temperature: float) -> Tensor:
        value, slope = judged(guess, truth, kind, temperature)
        ctx.save_for_backward(slope)
        return value

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> Any:
        (slope,) = ctx.saved_tensors
        return slope * slopes[0][:, None].to(slope.dtype), None, None, None


def judged(guess: Tensor, truth: Tensor, kind: str, temperature: float) -> tuple[Tensor, Tensor]:
    """The divergence (rows,), and its gradient (rows, vocabulary) by the logits `guess`."""
    if have_kernels(guess.device):
        from branchwise.cuda.distil import diverge

        return diverge(guess, truth, kind, temperature)
    kept = torch.promote_types(guess.dtype, torch.float32)
    log_q = functional.log_softmax(guess.to(kept) / temperature, dim=-1)
    log_p = functional.log_softmax(truth.to(kept) / temperature, dim=-1)
    value, slope = _judged(log_p, log_q, kind)
    return value, (slope / temperature).to(guess.dtype)


def _judged(log_p: Tensor, log_q: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """The divergence (rows,), and its gradient (rows, vocabulary) by the logits of q.

    If g is the gradient by q, the gradient by its logits is q (g - E_q g).
    """
    p, q = log_p.exp(), log_q.exp()
    if kind == "fkl":
        return (p * (log_p - log_q)).sum(-1), q - p
    if kind == "rkl":
        apart = log_q - log_p
        value = (q * apart).sum(-1)
        return value, q * (apart - value[:, None])
    if kind == "js":
        log_m = torch.logaddexp(log_p, log_q) - torch.log(torch.tensor(2.0, dtype=p.dtype, device=p.device))
        apart = 0.5 * (log_q - log_m)
        mean = (q * apart).sum(-1)
        return mean + 0.5 * (p * (log_p - log_m)).sum(-1), q * (apart - mean[:, None])
    assert kind == "tv", f"a divergence is one of {', '.join(KINDS)}"
    side = 0.5 * torch.sign(q - p)
    return 0.5 * (p - q).abs().sum(-1), q * (side - (q * side).sum(-1, keepdim=True))
