"""How far a student's distribution q is from its target's p, and which way it should go.

Zhou et al., "DistillSpec", arXiv 2310.08461. A drafted token is accepted with probability 1 - TV(p, q). Each divergence
leaves behind its value and its gradient by the student's logits, (rows, vocabulary) once, never what autograd would
keep of softmaxes and logarithms. Logits of a batch would still fill the memory, so they are made in chunks, and made
again for the way back.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from torch.utils.checkpoint import checkpoint

KINDS = {
    "fkl": "forward KL, KL(p | q): covers all that the target may say",
    "rkl": "reverse KL, KL(q | p): keeps to what the target says most",
    "js": "Jensen-Shannon: between the two",
    "tv": "total variation: the acceptance itself; learns little where the two hardly overlap",
}


def distilled(
    hidden: Tensor, head: Any, states: Tensor, teacher: Any, kind: str, temperature: float, chunk: int
) -> Tensor:
    """The mean divergence of what `head` makes of hidden states (rows, width) from what `teacher` makes of the states
    (rows, width) of the target."""

    def part(hidden: Tensor, states: Tensor) -> Tensor:
        with torch.no_grad():
            truth = teacher(states)
        guess = head(hidden)
        size = min(guess.shape[-1], truth.shape[-1])  # either may have padded its vocabulary
        return divergence(guess[..., :size], truth[..., :size], kind, temperature).sum()

    total = hidden.new_zeros((), dtype=torch.float32)
    for start in range(0, len(hidden), chunk):
        rows = slice(start, start + chunk)
        found: Any = checkpoint(part, hidden[rows], states[rows], use_reentrant=False)
        total = total + found
    return total / max(1, len(hidden))


def divergence(guess: Tensor, truth: Tensor, kind: str, temperature: float = 1.0) -> Tensor:
    """(rows,): of softmax(guess / temperature) from softmax(truth / temperature), logits (rows, vocabulary) each."""
    found: Tensor = _Divergence.apply(guess, truth, kind, temperature)  # type: ignore[no-untyped-call]
    return found


class _Divergence(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, guess: Tensor, truth: Tensor, kind: str, temperature: float) -> Tensor:
        kept = torch.promote_types(guess.dtype, torch.float32)
        log_q = functional.log_softmax(guess.to(kept) / temperature, dim=-1)
        log_p = functional.log_softmax(truth.to(kept) / temperature, dim=-1)
        value, slope = _judged(log_p, log_q, kind)
        ctx.save_for_backward((slope / temperature).to(guess.dtype))
        return value

    @staticmethod
    def backward(ctx: Any, *slopes: Tensor) -> Any:
        (slope,) = ctx.saved_tensors
        return slope * slopes[0][:, None].to(slope.dtype), None, None, None


def _judged(log_p: Tensor, log_q: Tensor, kind: str) -> tuple[Tensor, Tensor]:
    """The divergence (rows,), and its gradient (rows, vocabulary) by the logits of q.

    Where g is the gradient by q itself, that by its logits is q (g - E_q g).
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
