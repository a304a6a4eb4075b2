"""The losses of heads and students for one row of logits, and their gradients, as Triton kernels: they read the tens of
thousands of logits a few times and write no intermediate results.

The plain `judge` of `train.head.loss` and `judged` of `train.student.divergence` are the reference. Without a CUDA
device only tests import this file, and run it in Triton's interpreter.
"""

# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator, no-untyped-def"

from __future__ import annotations

import torch
import triton
import triton.language as tl
from torch import Tensor

NOTHING = tl.constexpr(-1.0e30)
"""the logit outside the vocabulary; it is finite, so that differences are numbers"""


BLOCK = 4096
"""the number of logits that a program holds at a time"""


def judge(guess: Tensor, truth: Tensor, wanted: Tensor, weights: Tensor) -> Tensor:
    """The losses (rows,) of the logits `guess` (rows, tokens), which are overwritten by the gradients of the weighted
    losses."""
    rows, tokens = guess.shape
    losses = torch.empty(rows, device=guess.device)
    block = min(BLOCK, triton.next_power_of_2(tokens))
    _judge[(rows,)](guess, truth, wanted, weights, losses, tokens, block, num_warps=8)
    return losses


@triton.jit
def _judge(guess, truth, wanted, weights, losses, tokens: tl.constexpr, block: tl.constexpr):
    row = tl.program_id(0)
    guess += row.to(tl.int64) * tokens
    truth += row.to(tl.int64) * tokens
    columns = tl.arange(0, block)
    # Sums over all logits, relative to the highest so far: those of both softmaxes, and that of the truth times the
    # difference of the logits.
    highest_g = tl.full((), NOTHING, tl.float32)
    highest_t = tl.full((), NOTHING, tl.float32)
    total_g, total_t, apart = 0.0, 0.0, 0.0
    for start in range(0, tokens, block):
        inside = start + columns < tokens
        g = tl.load(guess + start + columns, mask=inside, other=NOTHING).to(tl.float32)
        t = tl.load(truth + start + columns, mask=inside, other=NOTHING).to(tl.float32)
        higher_g, higher_t = tl.maximum(highest_g, tl.max(g, axis=0)), tl.maximum(highest_t, tl.max(t, axis=0))
        share = tl.exp(t - higher_t)
        total_g = total_g * tl.exp(highest_g - higher_g) + tl.sum(tl.exp(g - higher_g), axis=0)
        total_t = total_t * tl.exp(highest_t - higher_t) + tl.sum(share, axis=0)
        apart = apart * tl.exp(highest_t - higher_t) + tl.sum(share * (t - g), axis=0)
        highest_g, highest_t = higher_g, higher_t
    log_g, log_t = highest_g + tl.log(total_g), highest_t + tl.log(total_t)
    best = tl.load(wanted + row)
    weight = tl.load(weights + row)
    surprise = log_g - tl.load(guess + best).to(tl.float32)
    tl.store(losses + row, 0.5 * weight * (apart / total_t - log_t + log_g + surprise))
    tl.debug_barrier()  # the best logit is read before it becomes a gradient
    for start in range(0, tokens, block):
        inside = start + columns < tokens
        g = tl.load(guess + start + columns, mask=inside, other=NOTHING).to(tl.float32)
        t = tl.load(truth + start + columns, mask=inside, other=NOTHING).to(tl.float32)
        hit = tl.where(start + columns == best, 0.5, 0.0)
        slope = weight * (tl.exp(g - log_g) - 0.5 * tl.exp(t - log_t) - hit)
        tl.store(guess + start + columns, slope.to(guess.dtype.element_ty), mask=inside)


# Students

DIVERGENCES = ("fkl", "rkl", "js", "tv")


def diverge(guess: Tensor, truth: Tensor, kind: str, temperature: float) -> tuple[Tensor, Tensor]:
    """The divergence (rows,) of logits (rows, tokens), and its gradient with respect to the student's logits."""
    rows, tokens = guess.shape
    values, slopes = (
        torch.empty(rows, device=guess.device),
        torch.empty_like(guess, memory_format=torch.contiguous_format),
    )
    block = min(BLOCK, triton.next_power_of_2(tokens))
    steps = guess.stride(0), truth.stride(0)
    if rows:
        _diverge[(rows,)](
            guess, truth, slopes, values, *steps, 1 / temperature, tokens, block, DIVERGENCES.index(kind), num_warps=8
        )
    return values, slopes


@triton.jit
def _diverge(
    guess,
    truth,
    slopes,
    values,
    guess_step,
    truth_step,
    heat,
    tokens: tl.constexpr,
    block: tl.constexpr,
    kind: tl.constexpr,
):
    row = tl.program_id(0).to(tl.int64)
    guess += row * guess_step
    truth += row * truth_step
    slopes += row * tokens
    columns = tl.arange(0, block)
    # First the sums of both softmaxes, relative to the highest so far.
    highest_g = tl.full((), NOTHING, tl.float32)
    highest_t = tl.full((), NOTHING, tl.float32)
    total_g, total_t = 0.0, 0.0
    for start in range(0, tokens, block):
        inside = start + columns < tokens
        g = tl.where(inside, tl.load(guess + start + columns, mask=inside, other=0.0).to(tl.float32) * heat, NOTHING)
        t = tl.where(inside, tl.load(truth + start + columns, mask=inside, other=0.0).to(tl.float32) * heat, NOTHING)
        higher_g, higher_t = tl.maximum(highest_g, tl.max(g, axis=0)), tl.maximum(highest_t, tl.max(t, axis=0))
        total_g = total_g * tl.exp(highest_g - higher_g) + tl.sum(tl.exp(g - higher_g), axis=0)
        total_t = total_t * tl.exp(highest_t - higher_t) + tl.sum(tl.exp(t - higher_t), axis=0)
        highest_g, highest_t = higher_g, higher_t
    log_g, log_t = highest_g + tl.log(total_g), highest_t + tl.log(total_t)
    # Then the divergence, and the mean under q of its gradient with respect to q.
    value, mean = 0.0, 0.0
    for start in range(0, tokens, block):
        inside = start + columns < tokens
        log_q = tl.load(guess + start + columns, mask=inside, other=0.0).to(tl.float32) * heat - log_g
        log_p = tl.load(truth + start + columns, mask=inside, other=0.0).to(tl.float32) * heat - log_t
        q, p = tl.where(inside, tl.exp(log_q), 0.0), tl.where(inside, tl.exp(log_p), 0.0)
        if kind == 0:
            value += tl.sum(p * (log_p - log_q), axis=0)
        elif kind == 1:
            value += tl.sum(q * (log_q - log_p), axis=0)
        elif kind == 2:
            log_m = tl.maximum(log_p, log_q) + tl.log(0.5 + 0.5 * tl.exp(-tl.abs(log_p - log_q)))
            mean += tl.sum(0.5 * q * (log_q - log_m), axis=0)
            value += tl.sum(0.5 * p * (log_p - log_m), axis=0)
        else:
            value += tl.sum(0.5 * tl.abs(p - q), axis=0)
            mean += tl.sum(0.5 * q * tl.where(q > p, 1.0, tl.where(q < p, -1.0, 0.0)), axis=0)
    if kind == 1:
        mean = value
    if kind == 2:
        value += mean
    tl.store(values + row, value)
    for start in range(0, tokens, block):
        inside = start + columns < tokens
        log_q = tl.load(guess + start + columns, mask=inside, other=0.0).to(tl.float32) * heat - log_g
        log_p = tl.load(truth + start + columns, mask=inside, other=0.0).to(tl.float32) * heat - log_t
        q, p = tl.exp(log_q), tl.exp(log_p)
        if kind == 0:
            slope = q - p
        elif kind == 1:
            slope = q * (log_q - log_p - mean)
        elif kind == 2:
            log_m = tl.maximum(log_p, log_q) + tl.log(0.5 + 0.5 * tl.exp(-tl.abs(log_p - log_q)))
            slope = q * (0.5 * (log_q - log_m) - mean)
        else:
            slope = q * (tl.where(q > p, 0.5, tl.where(q < p, -0.5, 0.0)) - mean)
        tl.store(slopes + start + columns, (slope * heat).to(slopes.dtype.element_ty), mask=inside)
