"""The network of a trained head: one or two decoder layers over hidden states of the target.

Row t reads the target's hidden states at token t and the embedding of token t + 1, and predicts token t + 2. The target
has no hidden states at drafted tokens yet: their rows read a vector that the row before them carried on. Embeddings and
output rows are no part of the network: they are the target's, or come with the head (`TrainedHead`).

The published forms are options of this one network:

    EAGLE          Li et al., arXiv 2401.15077, 2406.16858, 2503.01840: rows feed each other, one pass a level
    FSPAD          Gui et al., arXiv 2408.15562: `gate` lets the embedding select among the features, `carry` gives the
                   next row a separate vector instead of the predicting one
    EAGLE 3, 3.1   as vLLM's `speculators` store them: `tap_norms`, `norm_before_residual` and `carry_normed` say where
                   norms are applied; `query_norm` and `attention_bias` belong to the layer's family (`speculators.py`)
    ParallelSpec   Xiao et al., arXiv 2410.05589: `masks` are rows for tokens that are not known yet, so that one pass
                   predicts all depths; `bias` corrects each depth by the token drafted before it
    LongSpec       Yang et al., arXiv 2502.17421: a row attends to a `window` of the last rows, and with `cross` also to
                   the keys and values that the target has cached, so that the head's own cache has a constant size;
                   rows read no hidden states
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from functools import partial
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional

from branchwise.backends.native import normed

Attend = Callable[[int, Tensor, Tensor, Tensor], Tensor]
"""attention of one layer: (number of the layer, queries (batch, heads, rows, head width), keys of the new rows, values
of the new rows) -> (batch, heads, rows, head width)"""
Look = Callable[[Tensor], Tensor]
"""attention to keys and values of the target: queries (batch, heads, rows, head width) -> the same shape"""

GATES = ("none", "low", "full")
TAP_NORMS = ("each", "joined", "none")
LOW_RANK = 64
"""rank of the low gate"""


@dataclass(frozen=True)
class HeadConfig:
    """Sizes and options of a head."""

    width: int
    """width of the head's own states, and of the target's hidden states unless `tap_width` is set"""
    taps: tuple[str, ...]
    """layers of the target whose outputs the head reads (`TargetInfo.layers`); none if it reads embeddings alone"""
    heads: int
    kv_heads: int
    head_width: int
    mlp: int
    """width of the gated MLP"""
    layers: int = 1
    carry: bool = False
    """FSPAD's split: whether one output predicts, and another one is carried on to the next row"""
    gate: str = "none"
    """FSPAD's feature sampling: none, low (a gate of low rank), full (as published)"""
    masks: int = 0
    """ParallelSpec: number of depths after the first that are predicted in the same pass"""
    bias: int = 0
    """in a parallel head: rank of the correction by the token drafted before"""
    window: int = 0
    """LongSpec: number of the last rows that a row attends to, itself included; 0 for all"""
    cross: str = ""
    """LongSpec: the layer of the target (`TargetInfo.layers`) whose keys and values every block attends to as well; it
    has as many key heads as the head, of the same width"""
    epsilon: float = 1e-5
    tap_width: int = 0
    """width of the target's hidden states, if it is not `width`"""
    tap_norms: str = "each"
    """norms of the tapped hidden states: one for each tap, a joined one for all, or none"""
    norm_before_residual: bool = False
    """whether the residual of the first layer is the normed features instead of the features themselves"""
    carry_normed: bool = False
    """EAGLE 3.1: whether the next row reads the predicting state after its norm, so that it does not grow from row to
    row"""
    query_norm: bool = False
    """whether queries and keys are normed head by head, as in Qwen 3"""
    attention_bias: bool = False

    def __post_init__(self) -> None:
        if self.tap_norms not in TAP_NORMS:
            raise ValueError(f"unknown tap norms {self.tap_norms!r}; known: {', '.join(TAP_NORMS)}")
        if self.carry_normed and (self.carry or self.masks):
            raise ValueError("only a head that carries on what predicts can carry it normed")
        if self.gate not in GATES:
            raise ValueError(f"unknown gate {self.gate!r}; known: {', '.join(GATES)}")
        if self.carry and self.masks:
            raise ValueError("a parallel head carries nothing from row to row")
        if self.bias and not self.masks:
            raise ValueError("only a parallel head needs a bias by the token before")
        if not self.taps and not self.cross:
            raise ValueError("a head reads hidden states of the target, or its keys and values")
        if not self.taps and (self.carry or self.masks or self.gate != "none"):
            raise ValueError("a head without hidden states has none to gate, to carry on or to mask")

    @property
    def read_width(self) -> int:
        """Width of the hidden states of all taps together."""
        return len(self.taps) * (self.tap_width or self.width)


class Rows(NamedTuple):
    """The outputs of a pass, both (batch, rows, width)."""

    predict: Tensor
    """states that the output rows turn into logits"""
    carry: Tensor
    """states that the next row reads instead of hidden states"""


class Head(nn.Module):
    frequencies: Tensor

    def __init__(self, config: HeadConfig, frequencies: Tensor) -> None:
        """`frequencies` (head width / 2) are those of the target's rotary positions."""
        super().__init__()
        self.config = config
        width, norm = config.width, partial(Norm, config)
        self.register_buffer("frequencies", frequencies.float(), persistent=False)
        norms = {"each": len(config.taps), "joined": 1, "none": 0}[config.tap_norms]
        self.tap_norms = nn.ModuleList(norm(config.read_width // norms) for _ in range(norms))
        self.embedding_norm, self.output_norm = norm(), norm()
        # Without hidden states `join` maps the embedding alone: if output rows equal embeddings, a row that started as
        # the embedding of its own token would first have to unlearn to predict this token.
        self.join = nn.Linear(config.read_width or width, width, bias=False)
        if config.taps:
            self.feature_norm = norm()
        self.blocks = nn.ModuleList()
        for number in range(config.layers):
            first, last = number == 0, number == config.layers - 1
            inputs, outputs = 2 if first and config.taps else 1, 2 if last and config.carry else 1
            self.blocks.append(Block(config, inputs=inputs, outputs=outputs))
        self.gate = None if config.gate == "none" else Gate(config)
        if config.masks:
            self.mask_feature = nn.Parameter(torch.randn(width) * 0.02)
            self.mask_embeddings = nn.Parameter(torch.randn(config.masks, width) * 0.02)
        if config.bias:
            self.bias_down = nn.Linear(width, config.bias, bias=False)
            self.bias_up = nn.Linear(config.bias, width, bias=False)
            nn.init.zeros_(self.bias_up.weight)

    @property
    def dtype(self) -> torch.dtype:
        return self.embedding_norm.weight.dtype

    def features(self, hidden: Sequence[Tensor]) -> Tensor | None:
        """(…, width): the features that a row reads, made of the hidden states of the tapped layers, (…, width) each;
        None if the head taps none."""
        if not self.config.taps:
            return None
        if self.config.tap_norms == "each":
            hidden = [norm(state) for norm, state in zip(self.tap_norms, hidden, strict=True)]
        read = torch.cat(list(hidden), dim=-1)
        if self.config.tap_norms == "joined":
            read = self.tap_norms[0](read)
        joined: Tensor = self.join(read)
        return joined

    def forward(
        self,
        features: Tensor | None,
        embeddings: Tensor,
        positions: Tensor,
        attend: Attend,
        look: Look | None = None,
        wanted: Tensor | None = None,
    ) -> Rows:
        """One pass over rows, given their features (or what earlier rows carried on) and the embeddings of the next
        tokens, (batch, rows, width) each.

        `positions` (batch, rows) are those of the tokens whose hidden states the rows read. `look` is for a head that
        attends to keys and values of the target. If one row of each text is `wanted` (batch,), the outputs have this
        row alone, and the last layer computes only keys and values of the others.
        """
        embedded = self.embedding_norm(embeddings)
        if not self.config.taps:
            state, read = self.join(embedded), None
        else:
            assert features is not None, "a head that reads hidden states was given none"
            state = features if self.gate is None else self.gate(features, embedded)
            normed = self.feature_norm(state)
            read = torch.cat([normed, embedded], dim=-1)
            if self.config.norm_before_residual:
                state = normed
        angles = positions[:, None, :, None] * self.frequencies
        turn = angles.cos().to(state.dtype), angles.sin().to(state.dtype)
        for number, block in enumerate(self.blocks):
            last = number == len(self.blocks) - 1
            state = block(
                state, None if number else read, turn, partial(attend, number), look, wanted if last else None
            )
        if self.config.carry:
            return Rows(*state.chunk(2, dim=-1))
        return Rows(state, self.output_norm(state) if self.config.carry_normed else state)

    def output(self, predict: Tensor, previous: Tensor | None = None) -> Tensor:
        """(…, width): the states that are multiplied with the output rows, given what rows `predict`."""
        normed: Tensor = self.output_norm(predict if previous is None else self.corrected(predict, previous))
        return normed

    def corrected(self, predict: Tensor, previous: Tensor) -> Tensor:
        """(…, width): what a parallel head with a bias predicts, corrected by the embedding (…, width) of the previous
        token; other heads correct nothing."""
        if not self.config.bias:
            return predict
        correction: Tensor = self.bias_up(self.bias_down(self.embedding_norm(previous)))
        return predict + correction

    def logits(self, predict: Tensor, rows: Tensor, previous: Tensor | None = None) -> Tensor:
        """(…, tokens): logits, given the output rows (tokens, width)."""
        return functional.linear(self.output(predict, previous), rows)


class Norm(nn.RMSNorm):
    """A norm that computes in the precision of its input: no kernel takes two precisions at once."""

    eps: float

    def __init__(self, config: HeadConfig, width: int | None = None) -> None:
        super().__init__(config.width if width is None else width, eps=config.epsilon)

    def forward(self, x: Tensor) -> Tensor:
        if torch.is_inference_mode_enabled():
            return normed(x, self.weight, self.eps)
        return functional.rms_norm(x, self.normalized_shape, self.weight.to(x.dtype), self.eps)


class Block(nn.Module):
    """A decoder layer. In the first layer of a head with features, attention reads features and embeddings side by
    side."""

    def __init__(self, config: HeadConfig, *, inputs: int, outputs: int) -> None:
        super().__init__()
        width, head, bias = config.width, config.head_width, config.attention_bias
        self.heads, self.kv_heads, self.outputs = config.heads, config.kv_heads, outputs
        self.qkv = nn.Linear(inputs * width, (config.heads + 2 * config.kv_heads) * head, bias=bias)
        self.out = nn.Linear(config.heads * head, width, bias=bias)
        self.query_norm = Norm(config, head) if config.query_norm else nn.Identity()
        self.key_norm = Norm(config, head) if config.query_norm else nn.Identity()
        self.input_norm = Norm(config) if inputs == 1 else nn.Identity()
        self.cross = Cross(config) if config.cross else None
        self.mlp_norm = Norm(config)
        self.gate_up = nn.Linear(width, 2 * config.mlp, bias=False)
        self.down = nn.Linear(config.mlp, outputs * width, bias=False)

    def forward(
        self,
        state: Tensor,
        read: Tensor | None,
        turn: tuple[Tensor, Tensor],
        attend: Callable[[Tensor, Tensor, Tensor], Tensor],
        look: Look | None,
        wanted: Tensor | None = None,
    ) -> Tensor:
        """`read` is the normed input of attention; by default the normed `state`."""
        if read is None:
            read = self.input_norm(state)
        batch, rows, _ = read.shape
        shaped = self.qkv(read).view(batch, rows, self.heads + 2 * self.kv_heads, -1).transpose(1, 2)
        query, key, value = shaped.split([self.heads, self.kv_heads, self.kv_heads], dim=1)
        query, key = rotated(self.query_norm(query), *turn), rotated(self.key_norm(key), *turn)
        if wanted is not None:
            every = torch.arange(batch, device=wanted.device)
            state, query = state[every, wanted, None], query[every, :, wanted, None]
        found = attend(query, key, value)
        state = state + self.out(found.transpose(1, 2).flatten(2))
        if self.cross is not None:
            assert look is not None, "a head that attends to its target was shown no keys and values"
            state = state + self.cross(state, turn, look)
        gate, up = self.gate_up(self.mlp_norm(state)).chunk(2, dim=-1)
        out: Tensor = state.repeat(1, 1, self.outputs) + self.down(functional.silu(gate) * up)
        return out


class Cross(nn.Module):
    """LongSpec's second attention, between the first attention and the MLP. It has only queries: keys and values are
    those in the target's cache."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        self.heads = config.heads
        self.norm = Norm(config)
        self.query = nn.Linear(config.width, config.heads * config.head_width, bias=False)
        self.out = nn.Linear(config.heads * config.head_width, config.width, bias=False)

    def forward(self, state: Tensor, turn: tuple[Tensor, Tensor], look: Look) -> Tensor:
        batch, rows, _ = state.shape
        query = self.query(self.norm(state)).view(batch, rows, self.heads, -1).transpose(1, 2)
        found: Tensor = self.out(look(rotated(query, *turn)).transpose(1, 2).reshape(batch, rows, -1))
        return found


class Gate(nn.Module):
    """FSPAD's feature sampling: the embedding of the next token selects among the features."""

    def __init__(self, config: HeadConfig) -> None:
        super().__init__()
        width = config.width
        self.full = config.gate == "full"
        if self.full:
            self.mix = nn.Linear(2 * width, width)
            self.norm = Norm(config)
            self.up, self.select = nn.Linear(width, config.mlp, bias=False), nn.Linear(width, config.mlp, bias=False)
            self.down = nn.Linear(config.mlp, width, bias=False)
        else:
            self.down = nn.Linear(width, LOW_RANK, bias=False)
            self.up = nn.Linear(LOW_RANK, width, bias=False)

    def forward(self, features: Tensor, embedded: Tensor) -> Tensor:
        if not self.full:
            found: Tensor = features * (1 + self.up(self.down(embedded)).tanh())
            return found
        mixed: Tensor = self.mix(torch.cat([embedded, features], dim=-1))
        selected: Tensor = self.down(functional.silu(self.select(embedded)) * self.up(self.norm(mixed)))
        return mixed + selected


def rotated(states: Tensor, cos: Tensor, sin: Tensor) -> Tensor:
    """States turned by rotary positions; the two halves of a head are the parts of complex numbers."""
    first, second = states.chunk(2, dim=-1)
    return torch.cat([first * cos - second * sin, second * cos + first * sin], dim=-1)
