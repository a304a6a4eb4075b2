"""From logits to the target's distribution: temperature, cuts, penalties, bias.

Stages run in this order: processors, penalties, bias, temperature, top-k, top-p, min-p. History-dependent stages see
each node's own path, never the flat list of drafted tokens. Distributions are float32.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import NamedTuple, SupportsIndex

import torch
from torch import Tensor

from branchwise.core.rows import filled_blocks, row_sum
from branchwise.errors import UsageError

Processor = Callable[[Sequence[int], Tensor], Tensor]
"""(all tokens up to and including the node, logits (vocabulary,)) -> logits; must depend on nothing else"""

COLDEST = 1e-30
"""lower temperatures give the same distribution in float32, but dividing by them would overflow the logits"""


LIMITS: dict[str, tuple[Callable[[float], bool], str]] = {
    "temperature": (lambda value: value >= 0, "at least 0"),
    "top_k": (lambda value: value >= 0, "at least 0 (0 keeps all tokens)"),
    "top_p": (lambda value: 0 < value <= 1, "above 0 and at most 1"),
    "min_p": (lambda value: 0 <= value <= 1, "between 0 and 1"),
    "repetition_penalty": (lambda value: value > 0, "above 0"),
    "presence_penalty": (math.isfinite, "a finite number"),
    "frequency_penalty": (math.isfinite, "a finite number"),
}


@dataclass(frozen=True)
class SamplingParams:
    """How the next token is chosen. The default is greedy."""

    temperature: float = 0.0
    top_k: int = 0
    """keep the k most probable tokens; 0 keeps all"""
    top_p: float = 1.0
    """keep the most probable tokens that together reach this mass"""
    min_p: float = 0.0
    """keep tokens at least this fraction as probable as the most probable one"""
    repetition_penalty: float = 1.0
    """divide the logits of tokens seen in prompt or output by this, or multiply them if they are negative"""
    presence_penalty: float = 0.0
    """subtract this once from the logits of tokens seen in the output"""
    frequency_penalty: float = 0.0
    """subtract this from the logit of a token for every time it was seen in the output"""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    """None draws a fresh seed for every request; requests with the same seed share their noise, position by position"""
    processors: tuple[Processor, ...] = ()

    def __post_init__(self) -> None:
        for name, (allowed, rule) in LIMITS.items():
            value = getattr(self, name)
            if not isinstance(value, int | float):
                raise UsageError(f"{name} must be a number, not {value!r}.")
            if not (allowed(value) and math.isfinite(value)):
                raise UsageError(f"{name} must be {rule}, not {value}.")
        if not isinstance(self.seed, SupportsIndex | None):
            raise UsageError(f"seed must be a whole number, not {self.seed!r}.")
        if any(token < 0 or math.isnan(bias) or bias == math.inf for token, bias in self.logit_bias.items()):
            raise UsageError("logit_bias maps token ids to finite numbers (or -inf to forbid a token).")

    def check_vocabulary(self, size: int) -> None:
        """Refuse token ids that the model does not have; called once, before a request joins a batch."""
        if self.logit_bias and max(self.logit_bias) >= size:
            raise UsageError(f"logit_bias names token {max(self.logit_bias)}, but the vocabulary ends at {size - 1}.")

    @property
    def greedy(self) -> bool:
        return self.temperature == 0

    @property
    def looks_back(self) -> bool:
        """Whether the distribution depends on more than the logits of its node."""
        penalised = self.repetition_penalty != 1 or self.presence_penalty != 0 or self.frequency_penalty != 0
        return penalised or bool(self.processors)


@dataclass(frozen=True)
class Context:
    """The text before a distribution: all tokens up to and including its node, and where the output begins."""

    tokens: Sequence[int]
    prompt_length: int


class History(NamedTuple):
    """The tokens before every row of a batch, as tensors on the device of its logits."""

    seen: Tensor
    """(batch, n, vocabulary) bool: tokens of the prompt or of the output, those of the row's own path included"""
    counts: Tensor
    """(batch, n, vocabulary) float32: how often each token is in the output, the row's own path included"""


COLUMNS = {
    "greedy": torch.bool,
    "temperature": torch.float32,
    "top_k": torch.int64,
    "top_p": torch.float32,
    "min_p": torch.float32,
    "repetition_penalty": torch.float32,
    "presence_penalty": torch.float32,
    "frequency_penalty": torch.float32,
}
"""the parameters that a device reads from tensors"""


class Warp:
    """Turns the logits of a batch into distributions; row b of every call is warped by sampling[b].

    Parameters are copied to the device once, when they are first needed.
    """

    def __init__(self, sampling: Sequence[SamplingParams], vocabulary: int, device: torch.device | str) -> None:
        self.sampling = sampling
        self.greedy = all(params.greedy for params in sampling)
        self.looks_back = any(params.looks_back for params in sampling)
        self.processes = any(params.processors for params in sampling)
        self.adjusts = self.looks_back or any(params.logit_bias for params in sampling)

        self._device = device
        self._vocabulary = vocabulary
        self._columns: dict[str, Tensor] = {}
        self._some_certain = any(params.greedy for params in sampling)
        self._plain = all(params.temperature == 1 for params in sampling)
        self._largest_k = max((params.top_k for params in sampling if params.top_k < vocabulary), default=0)
        self._cuts_p = min(float(params.top_p) for params in sampling) < 1
        self._cuts_min_p = max(float(params.min_p) for params in sampling) > 0

    @property
    def structure(self) -> tuple[object, ...]:
        """The properties in which two warps must agree if the same operations are to serve both; all else are values in
        tensors."""
        return (
            len(self.sampling),
            self.greedy,
            self._some_certain,
            self._plain,
            self._largest_k,
            self._cuts_p,
            self._cuts_min_p,
            any(params.logit_bias for params in self.sampling),
        )

    def assign(self, other: Warp) -> None:
        """Copy the parameters of another warp of the same structure into the tensors that are on the device already."""
        if self.sampling == other.sampling:
            return
        for name, column in self._columns.items():
            column.copy_(other._column(name), non_blocking=True)
        if self._bias is not None and other._bias is not None:
            self._bias.copy_(other._bias, non_blocking=True)
        self.sampling = other.sampling

    def bring(self) -> None:
        """Copy all parameters to the device, before operations are recorded there."""
        if self.adjusts:
            _ = self._bias
        if not self.greedy:
            for name in COLUMNS:
                self._column(name)

    def _column(self, name: str) -> Tensor:
        """(batch, 1, 1): one parameter of every text."""
        if name not in self._columns:
            values = [getattr(params, name) for params in self.sampling]
            self._columns[name] = torch.tensor(values, dtype=COLUMNS[name], device=self._device)[:, None, None]
        return self._columns[name]

    @cached_property
    def _bias(self) -> Tensor | None:
        """(batch, 1, vocabulary), if any text has a bias."""
        if not any(params.logit_bias for params in self.sampling):
            return None
        bias = torch.zeros(len(self.sampling), 1, self._vocabulary)
        for row, params in zip(bias, self.sampling, strict=True):
            row[0, list(params.logit_bias)] = torch.tensor(list(params.logit_bias.values()), dtype=torch.float32)
        return bias.to(self._device, non_blocking=True)

    def __call__(
        self, logits: Tensor, contexts: Sequence[Context] | None = None, history: History | None = None
    ) -> Tensor:
        """The distributions (…, vocabulary) float32 of logits (batch, vocabulary) or (batch, n, vocabulary).

        `contexts` has an entry for each row, in order; None is enough if no distribution looks back.
        """
        if logits.ndim == 2:
            return self(logits[:, None], contexts, history)[:, 0]
        logits = self.adjust(logits, contexts, history)
        if self.greedy:
            return one_hot(logits.argmax(dim=-1), logits.shape[-1])
        # A greedy row among sampled rows is warped at a very low temperature and replaced at the end.
        scaled = logits if self._plain else logits / self._column("temperature").clamp_min(COLDEST)
        probs = torch.softmax(scaled, dim=-1) if scaled.device.type == "cpu" else unnormalised(scaled)
        if self._largest_k or self._cuts_p or self._cuts_min_p:
            probs = self._keep_min_p(self._keep_top_p(self._keep_top_k(probs)))
        # The softmax over 150,000 tokens is off by 1e-5 in float32, so it is normalised again.
        probs = probs / row_sum(probs)[..., None].to(probs.dtype)
        if self._some_certain:
            probs = torch.where(self._column("greedy"), one_hot(logits.argmax(dim=-1), logits.shape[-1]), probs)
        return probs

    def adjust(
        self, logits: Tensor, contexts: Sequence[Context] | None = None, history: History | None = None
    ) -> Tensor:
        """The stages before temperature, same shape, float32; greedy decoding takes the argmax of these.

        The tokens before each row are given as its context, or for a whole batch on a device as its `history`.
        """
        logits = logits.float()
        if not self.adjusts or not logits.numel():
            return logits
        rows = logits[:, None] if logits.ndim == 2 else logits
        if contexts is not None:
            params = [params for params in self.sampling for _ in range(rows.shape[1])]
            flat = rows.flatten(0, 1).unbind()
            rows = torch.stack(list(map(_penalise, flat, params, contexts))).view(rows.shape)
        elif history is not None:
            factor = self._column("repetition_penalty")
            rows = torch.where(history.seen, torch.where(rows > 0, rows / factor, rows * factor), rows)
            penalty = self._column("presence_penalty") + self._column("frequency_penalty") * history.counts
            rows = rows - torch.where(history.counts > 0, penalty, 0.0)
        return (rows if self._bias is None else rows + self._bias).view(logits.shape)

    def _keep_top_k(self, probs: Tensor) -> Tensor:
        if not self._largest_k:
            return probs
        top = probs.topk(self._largest_k, dim=-1).values
        k = self._column("top_k")
        index = (k - 1).clamp(0, self._largest_k - 1).expand(-1, probs.shape[1], -1)
        floor = top.gather(-1, index).where((k > 0) & (k <= self._largest_k), 0.0)
        # Tokens that tie with the k-th stay, so the cut does not depend on the order of a sort.
        return probs.where(probs >= floor, 0.0)

    def _keep_top_p(self, probs: Tensor) -> Tensor:
        if not self._cuts_p:
            return probs
        share = self._column("top_p")
        wanted = share * row_sum(probs)[..., None].to(probs.dtype)
        # Sorting a whole vocabulary costs more than a pass of a small model; nearly always few tokens have the mass.
        size = probs.shape[-1] if probs.is_cuda else min(256, probs.shape[-1])
        while True:
            top = probs.topk(size, dim=-1).values
            before = top.cumsum(dim=-1) - top  # mass of the more probable tokens
            if size == probs.shape[-1] or bool(((before[..., -1:] >= wanted) | (share >= 1)).all()):
                break
            size = min(size * 8, probs.shape[-1])
        kept = (before < wanted).sum(dim=-1, keepdim=True)
        floor = top.gather(-1, (kept - 1).clamp_min(0))
        return probs.where((probs >= floor) | (share >= 1), 0.0)

    def _keep_min_p(self, probs: Tensor) -> Tensor:
        if not self._cuts_min_p:
            return probs
        return probs.where(probs >= self._column("min_p") * probs.amax(dim=-1, keepdim=True), 0.0)


def adjust(logits: Tensor, sampling: Sequence[SamplingParams], contexts: Sequence[Context]) -> Tensor:
    """The stages before temperature for rows (rows, vocabulary); row i follows sampling[i] after contexts[i]."""
    return Warp(sampling, logits.shape[-1], logits.device).adjust(logits, contexts)


def warp(logits: Tensor, sampling: Sequence[SamplingParams], contexts: Sequence[Context]) -> Tensor:
    """The distribution of each row, (rows, vocabulary) float32; row i follows sampling[i] after contexts[i]."""
    return Warp(sampling, logits.shape[-1], logits.device)(logits, contexts)


def unnormalised(logits: Tensor) -> Tensor:
    """The softmax (…, vocabulary) without its division: every row is 1 at its most probable token.

    The cuts compare numbers within a row, and in the end the row is divided by the sum of what is left, so a device
    saves the first division. On the host one softmax is faster.
    """
    # In blocks, because a compiler gives a whole row to one processor, and the rows are few.
    best = filled_blocks(logits, -torch.inf).amax(dim=-1).amax(dim=-1, keepdim=True)
    return (logits - best).exp()


def one_hot(tokens: Tensor, vocabulary: int) -> Tensor:
    """(…, vocabulary) float32: for each token the distribution that has all its mass on it."""
    probs = torch.zeros(*tokens.shape, vocabulary, device=tokens.device)
    return probs.scatter_(-1, tokens[..., None], 1.0)


def _penalise(row: Tensor, params: SamplingParams, context: Context) -> Tensor:
    """Processors and penalties of one row (vocabulary,)."""
    for process in params.processors:
        row = process(context.tokens, row.clone())  # a copy: a processor may write to its row
    if params.repetition_penalty != 1:
        seen = torch.tensor(list(set(context.tokens)), device=row.device)
        values = row[seen]
        factor = params.repetition_penalty
        row = row.index_put((seen,), torch.where(values > 0, values / factor, values * factor))
    output = Counter(context.tokens[context.prompt_length :])
    if output and (params.presence_penalty or params.frequency_penalty):
        seen = torch.tensor(list(output), device=row.device)
        counts = torch.tensor(list(output.values()), device=row.device)
        row = row.index_put((seen,), row[seen] - params.presence_penalty - params.frequency_penalty * counts)
    return row
