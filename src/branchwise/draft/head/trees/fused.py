"""The trees of a head with a few kernels for each level: `BestFirstDraft` if Triton's kernels run, and the network of a
`DrawnHead`.

A level of the best tree is nine launches instead of eighty, twelve with a gate: the products of the layer
(`cuda.heads.rows`), attention, the best tokens of the table (`cuda.heads.best_tokens`) and the choice of the next nodes
(`cuda.heads.tree`). If the products do not support the form of a network, torch computes it, and the rest is the same.
"""

from __future__ import annotations

from dataclasses import fields
from functools import cache
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn import Module

from branchwise.core.rows import WORD, pack_bits, unpack_bits, words_for
from branchwise.cuda.heads.best_tokens import best_tokens
from branchwise.cuda.heads.rows import MOST_TAPS, Embedded, down, gate_up, join, mix, project, read, select
from branchwise.cuda.heads.tree import Laid, Level, Proposed, follow, lay, pick, propose_copy, remember
from branchwise.cuda.kernels import tree_attention
from branchwise.cuda.products import Summed
from branchwise.draft.drawn.trees import Passes, Roots
from branchwise.draft.head.network import HeadConfig
from branchwise.draft.head.trees.best_first import BestFirstDraft
from branchwise.draft.head.trees.copies import log_hits
from branchwise.draft.head.trees.device import HeadOnDevice, with_norm
from branchwise.draft.head.trees.drawn import DrawnHead
from branchwise.draft.policies.topk import TopK

OPTIONS = "width", "taps", "heads", "kv_heads", "head_width", "mlp", "layers", "carry", "gate", "epsilon"
"""options of a network that the kernels support; all others must have their defaults"""


class Outputs(NamedTuple):
    """What rows predict and what they carry on, (rows, width) each."""

    predict: Summed
    carry: Summed


class Weights(NamedTuple):
    """The matrices of a layer."""

    qkv: Tensor
    out: Tensor
    gate_up: Tensor
    down: Tensor


class GateWeights(NamedTuple):
    """The matrices of FSPAD's gate."""

    mix: Tensor
    bias: Tensor
    select: Tensor
    """the rows of `Gate.select`, then those of `Gate.up`, with norms multiplied in"""
    down: Tensor


class PickedDraft(BestFirstDraft):
    """Kernels choose and lay the nodes; torch computes the network, which may have any form."""

    lays_in_place = True

    def __init__(self, tree: TopK, *parts: Any, copies: int = 0) -> None:
        super().__init__(tree, *parts, copies=copies)
        if not self._kernels:  # in an interpreter
            self._list_for_kernels()

    def _shape(self, tree: TopK, copies: int) -> None:
        super()._shape(tree, copies)
        self._places: dict[int, Laid] = {}
        """number of texts -> tensors that trees of this shape are written to"""
        copy_levels = torch.arange(1, copies + 1, device=self._levels.device)
        self._all_levels = torch.cat([self._levels, copy_levels])

    def grow(self, slots: Tensor, lengths: Tensor, roots: Tensor) -> tuple[Tensor, ...]:
        batch, width, device = len(slots), self._width, roots.device
        kinds = torch.float32, torch.int64, torch.int64
        proposed = Proposed(*(torch.empty(batch, len(self._all_levels), dtype=kind, device=device) for kind in kinds))
        names = self._table, self.cache.extra_tokens, slots
        extra, epsilon = (self.cache.extra_rows, self.cache.extra_tokens), self.head.config.epsilon
        none = filled(-1, torch.int64, device, batch, 1)
        unseen = filled(0, torch.int32, device, batch, 1, words_for(max(1, self.cells)))
        level = Level(filled(0, torch.float32, device, batch, 1), none, none, none, unseen)
        (rows, at), first = self._root_rows(slots, roots), 0
        for depth in range(1, self._grown + 1):
            best = best_tokens(
                rows.predict, at, epsilon, self._normed_rows, self._table_parts, *extra, slots, lengths,
                self.cache.draws, depth, width,
            )  # fmt: skip
            cell = (depth - 1) * width
            level = pick(best, names, level, at, proposed, first, cell, width)
            first += at.shape[1] * width
            if depth == self._grown:
                break
            rows, at = self._level_rows(rows, level, slots, lengths, cell, depth), numbers(batch, width, device)
        if self._copies:
            propose_copy(proposed, self.cache.tokens, slots, lengths, log_hits(device), self._copies)
        if batch not in self._places:
            self._places[batch] = Laid.place(batch, self.nodes, device)
        lay(proposed, self._all_levels, roots, self._places[batch], self.depth)
        return self._places[batch]

    def _root_rows(self, slots: Tensor, roots: Tensor) -> tuple[Outputs, Tensor]:
        """Outputs (rows, width) of the rows before the roots, and the index of each root's row, (batch, 1)."""
        predict, carry = self._at_roots(slots.long(), roots.long())
        rows = Outputs(Summed.of(predict[:, 0]), Summed.of(carry[:, 0]))
        return rows, numbers(len(slots), 1, slots.device)

    def _level_rows(
        self, above: Outputs, level: Level, slots: Tensor, lengths: Tensor, cell: int, depth: int
    ) -> Outputs:
        """Outputs of the nodes of a level, text by text; `above` are the outputs of the level before."""
        own = unpack_bits(level.bits, max(1, self.cells))
        carry = above.carry.states[level.states]
        predict, carry = self._below(slots.long(), lengths.long(), carry, level.tokens, cell, own, depth)
        return Outputs(Summed.of(predict.flatten(0, 1)), Summed.of(carry.flatten(0, 1)))


class FusedHead(HeadOnDevice):
    """Kernels compute the network too. They read the states of a root from its slot, those of a node from its row."""

    def __init__(self, *given: Any, **options: Any) -> None:
        super().__init__(*given, **options)
        head = self.head
        self._join = with_norm(head.join.weight, *(norm.get_parameter("weight") for norm in head.tap_norms))
        self._blocks = [self._weights(number, block) for number, block in enumerate(head.blocks)]
        self._gate = None if head.gate is None else self._gate_weights(head.gate)
        self._sizes = Summed.of(self.embeddings).squares

    def _gate_weights(self, gate: Module) -> GateWeights:
        of, norm = gate.get_parameter, self.head.embedding_norm.weight
        chosen, offered = with_norm(of("select.weight"), norm), with_norm(of("up.weight"), of("norm.weight"))
        return GateWeights(
            with_norm(of("mix.weight"), norm, torch.ones_like(norm)),
            of("mix.bias"),
            torch.cat([chosen, offered]),
            of("down.weight"),
        )

    def _weights(self, number: int, block: Module) -> Weights:
        first = self.head.feature_norm.weight, self.head.embedding_norm.weight
        of = block.get_parameter
        norms = (of("input_norm.weight"),) if number else first
        return Weights(
            with_norm(of("qkv.weight"), *norms),
            of("out.weight"),
            with_norm(of("gate_up.weight"), of("mlp_norm.weight")),
            of("down.weight"),
        )

    @staticmethod
    def fits(config: HeadConfig) -> bool:
        others = [option for option in fields(config) if option.name not in OPTIONS]
        usual = all(getattr(config, option.name) == option.default for option in others)
        return usual and config.gate != "low" and len(config.taps) <= MOST_TAPS

    def catch_up(
        self, slots: Tensor, lengths: Tensor, tokens: Tensor, paths: Tensor, following: Tensor, *hidden: Tensor
    ) -> Tensor:
        device = slots.device
        after, ends, last = follow(paths, tokens, following, lengths, slots, self.cache.tokens)
        features = join(hidden, self._join, paths, self.head.config.epsilon)
        every, before = numbers(*paths.shape, device), in_order(*paths.shape, device)
        rows = self._layers(features, every, after, slots, lengths, before, cell=0, position=0, advance=1)
        remember(rows.states, last, slots, self.cache.predicted, self.cache.carried)
        return ends

    def _level_of(
        self,
        states: Summed,
        at: Tensor,
        tokens: Tensor,
        slots: Tensor,
        lengths: Tensor,
        bits: Tensor,
        cell: int,
        depth: int,
    ) -> Outputs:
        """Outputs of nodes `depth` levels below the roots; the other arguments are those of `_layers`."""
        found = self._layers(states, at, tokens, slots, lengths, bits, cell=cell, position=depth - 1, advance=0)
        outputs = found.states.shape[1] // self.head.config.width
        return Outputs(found.part(0, outputs), found.part(outputs - 1, outputs))

    def _layers(
        self,
        states: Summed,
        at: Tensor,
        tokens: Tensor,
        slots: Tensor,
        lengths: Tensor,
        bits: Tensor,
        *,
        cell: int,
        position: int,
        advance: int,
    ) -> Summed:
        """(rows, width or twice that): what rows predict, and what they carry on if that is something else.

        Rows read states[at] and tokens, (batch, rows) each; the other arguments are those of `cuda.heads.rows.read`.
        """
        head, config = self.head, self.head.config
        (batch, count), device = at.shape, slots.device
        depths = filled(0, torch.int32, device, batch, count)  # only windows need depths and columns
        columns = filled(0, torch.int32, device, batch, WORD * bits.shape[2])
        embedded, own = Embedded(self.embeddings, self._sizes, tokens), numbers(batch, count, device)
        if self._gate is not None:
            mixed = mix(states, at, embedded, self._gate.mix, self._gate.bias, config.epsilon)
            inner = select(mixed, embedded, self._gate.select, config.epsilon)
            states, at = down(inner, self._gate.down, mixed.states), own
        for number, weights in enumerate(self._blocks):
            cache = self.cache.store[0, number], self.cache.store[1, number]
            query = read(
                states, at, None if number else embedded, weights.qkv, head.frequencies, cache, slots,
                lengths, cell=cell, position=position, advance=advance, heads=config.heads, epsilon=config.epsilon,
            )  # fmt: skip
            scale = config.head_width**-0.5
            found = tree_attention(query.transpose(1, 2), *cache, slots, lengths, depths, columns, bits, scale=scale)
            attended = project(found.view(batch * count, -1), weights.out, states.states, at)
            inner = gate_up(attended, weights.gate_up, config.epsilon)
            states, at = down(inner, weights.down, attended.states), own
        return states


class FusedDraft(FusedHead, PickedDraft):
    """Kernels compute the network, and choose and lay the nodes."""

    def _root_rows(self, slots: Tensor, roots: Tensor) -> tuple[Outputs, Tensor]:
        last = Summed.of(self.cache.last)  # both halves at once, which halves the launches
        return Outputs(*map(Summed, *last)), slots[:, None]

    def _level_rows(
        self, above: Outputs, level: Level, slots: Tensor, lengths: Tensor, cell: int, depth: int
    ) -> Outputs:
        return self._level_of(above.carry, level.states, level.tokens, slots, lengths, level.bits, cell, depth)


class FusedDrawnHead(FusedHead, DrawnHead):
    """Kernels compute the network, and torch makes the draws."""

    def __init__(self, *parts: Any) -> None:
        super().__init__(*parts)
        self._bits = [pack_bits(level.own) for level in self._inner]

    def passes(self, slots: Tensor, lengths: Tensor, roots: Tensor) -> Passes:
        return FusedPasses(self, slots, lengths.int(), roots.long())


class FusedPasses(Passes):
    """Passes by the kernels of a level; the first level reads the states of roots from their slots."""

    def __init__(self, head: FusedDrawnHead, slots: Tensor, lengths: Tensor, roots: Tensor) -> None:
        self._head, self._slots, self._lengths = head, slots.int(), lengths
        self._extra = head.extra(slots)
        self._carry, self._at = Summed.of(head.cache.carried), slots[:, None]
        self.roots = Roots(lengths.long(), roots, head.logits(head.cache.predicted[slots][:, None], self._extra))

    def below(self, tokens: Tensor, level: int) -> Tensor:
        (first, above, _), bits = self._head._inner[level - 1], self._head._bits[level - 1]
        batch, rows = tokens.shape
        tokens = tokens.clamp_min(0).contiguous()  # -1 if a distribution had no more tokens
        found = self._head._level_of(
            self._carry,
            self._at[:, above].contiguous(),
            tokens,
            self._slots,
            self._lengths,
            bits.expand(batch, -1, -1).contiguous(),
            first,
            level,
        )
        self._carry, self._at = found.carry, numbers(batch, rows, tokens.device)
        return self._head.logits(found.predict.states.unflatten(0, (batch, rows)), self._extra)


# Constants, cached because recorded graphs hold their addresses


@cache
def numbers(batch: int, count: int, device: torch.device) -> Tensor:
    """(batch, count): the numbers of the rows of all texts."""
    return torch.arange(batch * count, device=device).view(batch, count)


@cache
def in_order(batch: int, steps: int, device: torch.device) -> Tensor:
    """(batch, steps, words): the attention bits of rows after a text, each of which attends to those before it."""
    return pack_bits(torch.ones(steps, steps, dtype=torch.bool, device=device).tril()).repeat(batch, 1, 1)


@cache
def filled(value: int, dtype: torch.dtype, device: torch.device, *shape: int) -> Tensor:
    return torch.full(shape, value, dtype=dtype, device=device)
