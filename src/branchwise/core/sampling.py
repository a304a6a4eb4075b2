"""From logits to the target's distribution: temperature, cuts, penalties, bias.

Stages run in one order: processors, penalties, bias, temperature, top-k, top-p, min-p. History-dependent stages see
each node's own path, never the flat list of drafted tokens. Distributions are float32.
"""

from __future__ import annotations

import math
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any, NamedTuple

import torch
from torch import Tensor

from branchwise.core.rows import filled_blocks, row_sum
from branchwise.errors import UsageError

Processor = Callable[[Sequence[int], Tensor], Tensor]
"""(all tokens up to and including the node, logits (vocabulary,)) -> logits; must depend on nothing else"""

COLDEST = 1e-30
"""a lower temperature gives the same distribution in float32, and would overflow the logits on the way"""


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
    """divide (or multiply) the logits of tokens seen in prompt or output"""
    presence_penalty: float = 0.0
    """subtract once from tokens seen in the output"""
    frequency_penalty: float = 0.0
    """subtract for every time a token was seen in the output"""
    logit_bias: Mapping[int, float] = field(default_factory=dict)
    seed: int | None = None
    """None draws a fresh seed for every request; requests with one seed share their noise, position by position"""
    processors: tuple[Processor, ...] = ()

    def __post_init__(self) -> None:
        for name in (
            "temperature",
            "top_k",
            "top_p",
            "min_p",
            "repetition_penalty",
            "presence_penalty",
            "frequency_penalty",
        ):
            if not isinstance(getattr(self, name), int | float):
                raise UsageError(f"{name} must be a number, not {getattr(self, name)!r}.")
        checks = [
            ("temperature", self.temperature, self.temperature >= 0, "at least 0"),
            ("top_k", self.top_k, self.top_k >= 0, "at least 0 (0 keeps all tokens)"),
            ("top_p", self.top_p, 0 < self.top_p <= 1, "above 0 and at most 1"),
            ("min_p", self.min_p, 0 <= self.min_p <= 1, "between 0 and 1"),
            ("repetition_penalty", self.repetition_penalty, self.repetition_penalty > 0, "above 0"),
            ("presence_penalty", self.presence_penalty, True, "a finite number"),
            ("frequency_penalty", self.frequency_penalty, True, "a finite number"),
        ]
        for name, value, inside, rule in checks:
            if not (inside and math.isfinite(value)):
                raise UsageError(f"{name} must be {rule}, not {value}.")
        if any(token < 0 or math.isnan(bias) or bias == math.inf for token, bias in self.logit_bias.items()):
            raise UsageError("logit_bias maps token ids to finite numbers (or -inf to forbid a token).")

    def check_vocabulary(self, size: int) -> None:
        """Refuse tokens that the model does not have; asked once, before a request joins a batch."""
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
    """What stands before a distribution: all tokens up to and including its node, and where the output begins."""

    tokens: Sequence[int]
    prompt_length: int


class History(NamedTuple):
    """The tokens before every row of a batch, as tensors on the device of its logits."""

    seen: Tensor
    """(batch, n, vocabulary) bool: tokens of the prompt or of the output, those of the row's own path included"""
    counts: Tensor
    """(batch, n, vocabulary) float32: how often each token is in the output, the row's own path included"""


class Warp:
    """From the logits of a batch to its distributions; row b of every call follows sampling[b].

    What the parameters say goes to the device once, when it is first needed, so that further distributions can be asked
    for without waiting for the host.
    """

    def __init__(self, sampling: Sequence[SamplingParams], vocabulary: int, device: torch.device | str) -> None:
        self.sampling = sampling
        self.greedy = all(params.greedy for params in sampling)
        self.looks_back = any(params.looks_back for params in sampling)
        self.processes = any(params.processors for params in sampling)
        self.adjusts = self.looks_back or any(params.logit_bias for params in sampling)

        self._device = device
        self._vocabulary = vocabulary
        self._some_certain = any(params.greedy for params in sampling)
        self._plain = all(params.temperature == 1 for params in sampling)
        self._ks = [params.top_k if params.top_k < vocabulary else 0 for params in sampling]
        self._largest_k = max(self._ks)
        self._cuts_p = min(float(params.top_p) for params in sampling) < 1
        self._cuts_min_p = max(float(params.min_p) for params in sampling) > 0

    @property
    def structure(self) -> tuple[object, ...]:
        """What two warps must agree in for the same operations to serve both; all else are values in tensors."""
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
        """Take the parameters of another warp of the same structure, in the tensors that are on the device already."""
        if self.sampling == other.sampling:
            return
        for name in ("_certain", "_temperature", "_k", "_all_k", "_p", "_min_p", "_bias"):
            if isinstance(mine := self.__dict__.get(name), Tensor):
                mine.copy_(Warp.__dict__[name].func(other), non_blocking=True)
        self.sampling = other.sampling

    def bring(self) -> None:
        """Have everything on the device before operations are recorded there."""
        if self.adjusts:
            _ = self._bias
        if not self.greedy:
            _ = self._certain, self._temperature, self._k, self._all_k, self._p, self._min_p

    def _column(self, values: list[Any]) -> Tensor:
        return torch.tensor(values, device=self._device)[:, None, None]

    @cached_property
    def _certain(self) -> Tensor:
        return self._column([params.greedy for params in self.sampling])

    @cached_property
    def _bias(self) -> Tensor | None:
        """(batch, 1, vocabulary), if any text has a bias."""
        if not any(params.logit_bias for params in self.sampling):
            return None
        bias = torch.zeros(len(self.sampling), 1, self._vocabulary)
        for row, params in zip(bias, self.sampling, strict=True):
            row[0, list(params.logit_bias)] = torch.tensor(list(params.logit_bias.values()), dtype=torch.float32)
        return bias.to(self._device, non_blocking=True)

    @cached_property
    def _penalties(self) -> tuple[Tensor, Tensor, Tensor]:
        """Repetition, presence and frequency penalty of every text, each (batch, 1, 1)."""
        return (
            self._column([float(params.repetition_penalty) for params in self.sampling]),
            self._column([float(params.presence_penalty) for params in self.sampling]),
            self._column([float(params.frequency_penalty) for params in self.sampling]),
        )

    @cached_property
    def _temperature(self) -> Tensor:
        # A greedy row among sampled ones passes through as a very cold one and is replaced at the end.
        return self._column([max(float(params.temperature), COLDEST) for params in self.sampling])

    @cached_property
    def _k(self) -> Tensor:
        return self._column([max(k, 1) for k in self._ks])

    @cached_property
    def _all_k(self) -> Tensor:
        return self._column([k == 0 for k in self._ks])

    @cached_property
    def _p(self) -> Tensor:
        return self._column([float(params.top_p) for params in self.sampling])

    @cached_property
    def _min_p(self) -> Tensor:
        return self._column([float(params.min_p) for params in self.sampling])

    def __call__(
        self, logits: Tensor, contexts: Sequence[Context] | None = None, history: History | None = None
    ) -> Tensor:
        """The distributions (…, vocabulary) float32 of logits (batch, vocabulary) or (batch, n, vocabulary).

        `contexts` has an entry for each row, in order; None will do where no distribution looks back.
        """
        if logits.ndim == 2:
            return self(logits[:, None], contexts, history)[:, 0]
        logits = self.adjust(logits, contexts, history)
        if self.greedy:
            return one_hot(logits.argmax(dim=-1), logits.shape[-1])
        scaled = logits if self._plain else logits / self._temperature
        probs = torch.softmax(scaled, dim=-1) if scaled.device.type == "cpu" else unnormalised(scaled)
        if self._largest_k or self._cuts_p or self._cuts_min_p:
            probs = self._keep_min_p(self._keep_top_p(self._keep_top_k(probs)))
        probs = probs / row_sum(probs)[..., None].to(
            probs.dtype
        )  # softmax over 150,000 tokens is off by 1e-5 in float32
        if self._some_certain:
            probs = torch.where(self._certain, one_hot(logits.argmax(dim=-1), logits.shape[-1]), probs)
        return probs

    def adjust(
        self, logits: Tensor, contexts: Sequence[Context] | None = None, history: History | None = None
    ) -> Tensor:
        """The stages before temperature, same shape, float32; greedy decoding takes the argmax of these.

        What comes before a row is given as its context, row by row, or as tensors for the whole batch, which a device
        needs: it then does the same without the host.
        """
        logits = logits.float()
        if not self.adjusts or not logits.numel():
            return logits
        if contexts is None and logits.device.type != "cpu":
            return self._adjust_batch(logits[:, None] if logits.ndim == 2 else logits, history).view(logits.shape)
        flat = logits.reshape(-1, logits.shape[-1])
        each = len(flat) // len(self.sampling)
        rows = []
        for index, row in enumerate(flat.unbind()):
            params = self.sampling[index // each]
            if contexts is not None:
                for process in params.processors:
                    row = process(contexts[index].tokens, row.clone())  # it may write to its row; ours is the model's
                row = _penalise(row, params, contexts[index])
            rows.append(_bias(row, params))
        return torch.stack(rows).view(logits.shape)

    def _adjust_batch(self, logits: Tensor, history: History | None) -> Tensor:
        """Penalties and bias of a whole batch (batch, n, vocabulary) as tensor operations."""
        if history is not None:
            repetition, presence, frequency = self._penalties
            repeated = torch.where(logits > 0, logits / repetition, logits * repetition)
            logits = torch.where(history.seen, repeated, logits)
            logits = logits - torch.where(history.counts > 0, presence + frequency * history.counts, 0.0)
        return logits if self._bias is None else logits + self._bias

    def _keep_top_k(self, probs: Tensor) -> Tensor:
        if not self._largest_k:
            return probs
        top = probs.topk(self._largest_k, dim=-1).values
        index = (self._k - 1).expand(-1, probs.shape[1], -1)
        floor = top.gather(-1, index).masked_fill(self._all_k, 0.0)
        # Tokens that tie with the k-th stay, so the cut does not depend on the order of a sort.
        return probs.where(probs >= floor, 0.0)

    def _keep_top_p(self, probs: Tensor) -> Tensor:
        if not self._cuts_p:
            return probs
        share = self._p
        wanted = share * row_sum(probs)[..., None].to(probs.dtype)
        # Sorting a whole vocabulary costs more than a pass of a small model; the mass nearly always lies in few tokens.
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
        return probs.where(probs >= self._min_p * probs.amax(dim=-1, keepdim=True), 0.0)


def adjust(logits: Tensor, sampling: Sequence[SamplingParams], contexts: Sequence[Context]) -> Tensor:
    """The stages before temperature for rows (rows, vocabulary); row i follows sampling[i] after contexts[i]."""
    return Warp(sampling, logits.shape[-1], logits.device).adjust(logits, contexts)


def warp(logits: Tensor, sampling: Sequence[SamplingParams], contexts: Sequence[Context]) -> Tensor:
    """The distribution of each row, (rows, vocabulary) float32; row i follows sampling[i] after contexts[i]."""
    return Warp(sampling, logits.shape[-1], logits.device)(logits, contexts)


def unnormalised(logits: Tensor) -> Tensor:
    """Laws (…, vocabulary) times a number for each row, 1 on its best token.

    Cuts compare the numbers of one row, and all of them are divided by their total in the end. So on a device, where a
    pass over all rows costs, none is spent on a first division; on the host one softmax is faster than these steps.
    """
    # In blocks, because a compiler gives a whole row to one processor, and there are few rows.
    best = filled_blocks(logits, -torch.inf).amax(dim=-1).amax(dim=-1, keepdim=True)
    return (logits - best).exp()


def one_hot(tokens: Tensor, vocabulary: int) -> Tensor:
    """(…, vocabulary) float32: the distribution that is certain of each token."""
    probs = torch.zeros(*tokens.shape, vocabulary, device=tokens.device)
    return probs.scatter_(-1, tokens[..., None], 1.0)


def _penalise(row: Tensor, params: SamplingParams, context: Context) -> Tensor:
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


def _bias(row: Tensor, params: SamplingParams) -> Tensor:
    if not params.logit_bias:
        return row
    tokens = torch.tensor(list(params.logit_bias), device=row.device)
    return row.index_put((tokens,), row[tokens] + torch.tensor(list(params.logit_bias.values()), device=row.device))
