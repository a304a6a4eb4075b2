"""The parts of a model before and after its layers, in one kernel each: embeddings, rotary positions, the last norm.

As torch operations these are some twenty launches, a tenth of a pass over a small model. Embeddings are written in the
form in which the first layer reads them. Cosines and sines of a position are the same in every pass, so they are looked
up. Each part is compared with the model's own once. A part that differs is left to the model, and so are all parts if
the output of the whole model then differs (`cuda.layers.fuse`). Without a CUDA device only tests import this file.
"""

# mypy: disable-error-code="import-untyped, import-not-found, untyped-decorator, no-untyped-def"

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
import triton
import triton.language as tl
from torch import Tensor, nn

from branchwise.cuda.early import begin, early
from branchwise.cuda.layers.groups import patched
from branchwise.cuda.layers.rows import MOST_EARLY, Rows, parts_of
from branchwise.cuda.layers.usual import epsilon_of
from branchwise.errors import first_line

log = logging.getLogger(__name__)

MOST_POSITIONS = 1 << 16
"""the most positions of a table, because it takes memory for all of them"""
TRIED = 9
"""the number of rows in a comparison"""
ROUNDING = 2**-6
"""the largest relative difference between elements of two norms: two roundings to bfloat16"""


@dataclass(eq=False)
class Ends:
    """The parts that are computed by kernels; None for a part that the model computes."""

    embedding: nn.Embedding | None
    rotary: nn.Module | None
    table: Tensor
    """(positions, 2, width): the cosines and sines of positions"""
    norm: nn.Module | None
    epsilon: float

    @property
    def replaced(self) -> Iterator[tuple[nn.Module, Callable[..., Any]]]:
        """Modules and the functions that replace their forward; `embedded` replaces that of the embeddings."""
        if self.rotary is not None:
            yield self.rotary, self.turns
        if self.norm is not None:
            yield self.norm, self.normed

    def embedded(self, tokens: Tensor, norm: Tensor) -> tuple[Tensor, Rows]:
        """(batch, nodes, width): the embeddings of tokens, plain and as a layer that begins with `norm` reads them."""
        assert self.embedding is not None
        rows = embed(tokens.flatten(), self.embedding.weight, norm)
        return rows.states.view(*tokens.shape, -1), rows

    def turns(self, states: Tensor, position_ids: Tensor, *more: Any, **options: Any) -> tuple[Tensor, Tensor]:
        """Cosines and sines (batch, nodes, width) of positions (batch, nodes). The model itself computes those of
        positions of another shape, which models with images use, and of calls with further arguments."""
        if more or options or position_ids.ndim != 2:
            found = type(self.rotary).forward(self.rotary, states, position_ids, *more, **options)  # type: ignore[union-attr]
            return found[0], found[1]
        found = look_up(position_ids.flatten(), self.table).view(*position_ids.shape, 2, -1)
        return found[:, :, 0], found[:, :, 1]

    def normed(self, states: Tensor) -> Tensor:
        assert self.norm is not None
        return normed(states, self.norm.get_parameter("weight"), self.epsilon)


@torch.inference_mode()
def ends_of(model: nn.Module, parent: nn.Module, positions: int) -> Ends:
    """The `Ends` of a model. Its embeddings, rotary positions and last norm are parts of `parent`, beside its
    layers."""
    parts = dict(parent.named_children())
    embedding, rotary, norm = (parts.get(name) for name in ("embed_tokens", "rotary_emb", "norm"))
    weight = next(model.parameters())
    width = norm.get_parameter("weight").shape[0] if norm is not None else 1
    found = Ends(None, None, weight.new_empty(0, 2, 0), None, 0.0)
    noise = torch.randn(1, TRIED, width, generator=torch.Generator().manual_seed(0)).to(weight)
    noise = torch.cat([noise, noise / 1024])  # the smaller ones show what keeps a norm from dividing by zero
    if type(embedding) is nn.Embedding and embedding.max_norm is None and not patched(embedding):
        found.embedding = embedding
    if norm is not None:

        def norms() -> tuple[Tensor, Tensor]:
            found.epsilon = epsilon_of(norm)
            return norm(noise), normed(noise, norm.get_parameter("weight"), found.epsilon)

        if _same(norm, norms):
            found.norm = norm
    if rotary is not None and positions <= MOST_POSITIONS:

        def tables() -> tuple[Tensor, Tensor]:
            """What few positions alone have, and what they have in a table of all."""
            every = torch.arange(positions, device=weight.device)[None]
            found.table = torch.stack(rotary(noise, every), dim=2)[0].contiguous()
            some = torch.cat([every[:, :TRIED], every[:, -1:]], dim=1)
            alone = [torch.stack(rotary(noise, part), dim=2) for part in (some[:, :TRIED], some[:, TRIED:])]
            return torch.cat(alone, dim=1), torch.stack(found.turns(noise, some), dim=2)

        if _same(rotary, tables, rounding=0.0):
            found.rotary = rotary
    return found


def _same(module: nn.Module, both: Callable[[], tuple[Tensor, Tensor]], rounding: float = ROUNDING) -> bool:
    """Whether a module and its replacement give the same output."""
    if patched(module):
        return False  # somebody else stands for it
    try:
        own, other = both()
        return own.dtype == other.dtype and torch.allclose(own.float(), other.float(), rtol=rounding, atol=0.0)
    except Exception as error:
        log.info("A %s runs as it is: %s", type(module).__name__, first_line(error))
        return False


# Kernels


def embed(tokens: Tensor, table: Tensor, norm: Tensor) -> Rows:
    """The embeddings of tokens (rows,), in the form that a layer beginning with a norm of these weights reads."""
    rows, width = len(tokens), table.shape[1]
    states, weighted = (table.new_empty(rows, width) for _ in range(2))
    parts = parts_of(rows, width, table.element_size())
    squares = torch.empty(rows, parts, device=table.device)
    _embed[(rows, parts)](
        tokens, table, norm, states, weighted, squares, table.stride(0), width,
        columns=width // parts, block=triton.next_power_of_2(width // parts), parts=parts, num_warps=1,
        **_sooner(table, rows),
    )  # fmt: skip
    return Rows(states, weighted, squares)


def look_up(positions: Tensor, table: Tensor) -> Tensor:
    """(rows, …): the entries of a table (positions, …) for these positions (rows,)."""
    count = table[0].numel()
    out = table.new_empty(len(positions), *table.shape[1:])
    _look_up[(len(positions),)](
        positions, table, out, len(table), count, block=triton.next_power_of_2(count), num_warps=1,
        **_sooner(table, len(positions)),
    )  # fmt: skip
    return out


def normed(states: Tensor, weight: Tensor, epsilon: float) -> Tensor:
    """The RMS norm of states (…, width)."""
    states = states.contiguous()
    rows, width, out = states.numel() // states.shape[-1], states.shape[-1], torch.empty_like(states)
    _norm[(rows,)](
        states, weight, out, epsilon, width=width, block=triton.next_power_of_2(width), num_warps=4,
        **_sooner(states, rows),
    )  # fmt: skip
    return out


def _sooner(tensor: Tensor, rows: int) -> dict[str, bool]:
    return early(tensor.device) if rows <= MOST_EARLY else {"early": False}


@triton.jit(do_not_specialize=["stride", "width"])
def _embed(
    tokens, table, norm, states, weighted, squares, stride, width,
    columns: tl.constexpr, block: tl.constexpr, parts: tl.constexpr, early: tl.constexpr,
):  # fmt: skip
    begin(early)
    row, part = tl.program_id(0), tl.program_id(1)
    at = tl.arange(0, block)
    inside = at < columns
    column = part * columns + at
    token = tl.maximum(tl.load(tokens + row), 0).to(tl.int64)
    state = tl.load(table + token * stride + column, mask=inside, other=0.0)
    wide = state.to(tl.float32)
    times = wide * tl.load(norm + column, mask=inside, other=0.0).to(tl.float32)
    place = row.to(tl.int64) * width + column
    tl.store(states + place, state, mask=inside)
    tl.store(weighted + place, times.to(weighted.dtype.element_ty), mask=inside)
    tl.store(squares + row * parts + part, tl.sum(wide * wide, axis=0))


@triton.jit(do_not_specialize=["most", "count"])
def _look_up(positions, table, out, most, count, block: tl.constexpr, early: tl.constexpr):
    begin(early)
    row, at = tl.program_id(0), tl.arange(0, block)
    inside = at < count
    position = tl.minimum(tl.maximum(tl.load(positions + row), 0), most - 1).to(tl.int64)  # padding may be anywhere
    tl.store(out + row.to(tl.int64) * count + at, tl.load(table + position * count + at, mask=inside), mask=inside)


@triton.jit
def _norm(states, weight, out, epsilon, width: tl.constexpr, block: tl.constexpr, early: tl.constexpr):
    begin(early)
    row, at = tl.program_id(0).to(tl.int64), tl.arange(0, block)
    inside = at < width
    state = tl.load(states + row * width + at, mask=inside, other=0.0).to(tl.float32)
    scale = 1.0 / tl.sqrt(tl.sum(state * state, axis=0) / width + epsilon)
    found = (state * scale).to(out.dtype.element_ty).to(tl.float32)
    weights = tl.load(weight + at, mask=inside, other=0.0).to(tl.float32)
    tl.store(out + row * width + at, (found * weights).to(out.dtype.element_ty), mask=inside)
