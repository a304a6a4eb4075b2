"""Operations on rows: gather, sum, blank out, pack into bits. A row gives the same result alone and in a batch.

A row over a vocabulary has 150,000 numbers, so these functions avoid copying and converting rows.
"""

from __future__ import annotations

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor

BLOCK = 256


def gather_rows(table: Tensor, nodes: Tensor) -> Tensor:
    """The entries of a table (batch, nodes, …) at nodes (batch,) or (batch, n). Possibly a view: do not write to it."""
    size = table.shape[1]
    if table.device.type == "cpu" and len(table) == 1 and nodes.numel() == 1:
        return table[0, int(nodes)].expand(*nodes.shape, *table.shape[2:])
    trees = torch.arange(len(nodes), device=nodes.device) * size
    places = nodes + (trees if nodes.ndim == 1 else trees[:, None])
    found = table.reshape(-1, *table.shape[2:]).index_select(0, places.flatten())
    return found.view(*nodes.shape, *table.shape[2:])


def row_sum(rows: Tensor) -> Tensor:
    """(…,) float64: the sum of each row (…, vocabulary).

    Blocks are summed in the rows' own type and then in float64: exact enough, at a tenth of the cost of converting
    every number. A block is so small that torch does not split it between threads, so a row has the same sum alone and
    in a batch.
    """
    if rows.dtype == torch.float64 or rows.shape[-1] <= BLOCK:
        return rows.sum(dim=-1, dtype=torch.float64)
    if rows.device.type != "cpu":  # one launch less, and the compiler never materialises the padding
        return filled_blocks(rows).sum(dim=-1).sum(dim=-1, dtype=torch.float64)
    whole = rows.shape[-1] // BLOCK * BLOCK
    blocks: Tensor = rows[..., :whole].unflatten(-1, (-1, BLOCK)).sum(dim=-1)
    return blocks.sum(dim=-1, dtype=torch.float64) + rows[..., whole:].sum(dim=-1, dtype=torch.float64)


def filled_blocks(rows: Tensor, value: float = 0.0) -> Tensor:
    """(…, blocks, BLOCK): rows (…, vocabulary) in blocks, the last block padded with `value`."""
    filled = torch.nn.functional.pad(rows, (0, -rows.shape[-1] % BLOCK), value=value)
    blocks: Tensor = filled.unflatten(-1, (-1, BLOCK))
    return blocks


def in_memory(numbers: Tensor) -> Tensor:
    """The same numbers, materialised: `as_strided` needs memory, so the compiler cannot recompute the numbers inside
    the loop that uses them."""
    return numbers.as_strided(numbers.shape, numbers.stride())


def blank(rows: Tensor, tokens: Tensor) -> Tensor:
    """Rows (…, vocabulary) with 0 on one token each (…,). The given rows are overwritten if that is cheaper: on a
    device the comparison is fused into the kernel that reads the rows next, and a write would be its own kernel."""
    if rows.device.type == "cpu":
        return rows.scatter_(-1, tokens[..., None], 0.0)
    return rows.where(torch.arange(rows.shape[-1], device=rows.device) != tokens[..., None], 0.0)


def top_tokens(logits: Tensor, count: int) -> Tensor:
    """(…, 2, count) float32: the most probable tokens of logits (…, vocabulary), in falling order, and their
    probabilities.

    Token ids are small enough to be exact in float32.
    """
    with torch.inference_mode():
        values, tokens = logits.topk(count, dim=-1)
        masses = (values.float() - logits.float().logsumexp(dim=-1, keepdim=True)).exp()
        return torch.stack([tokens.float(), masses], dim=-2)


WORD = 32
"""the number of columns whose bits share a word"""


def words_for(columns: int) -> int:
    return -(-columns // WORD)


def pack_bits(marks: Tensor) -> Tensor:
    """(…, words) int32 from bool (…, columns): bit j % 32 of word j // 32 is column j."""
    bits: Tensor = torch.nn.functional.pad(marks.int(), (0, -marks.shape[-1] % WORD)).unflatten(-1, (-1, WORD))
    # Distinct powers of two add up without a carry; the last of them is the sign bit.
    return (bits << torch.arange(WORD, dtype=torch.int32, device=bits.device)).sum(dim=-1, dtype=torch.int32)


def pack_array(marks: NDArray[np.bool_]) -> NDArray[np.int32]:
    """`pack_bits` of an array. Every tree of a new shape needs it, and numpy takes a thirtieth of torch's time."""
    columns = marks.shape[-1]
    packed = np.zeros((*marks.shape[:-1], 4 * words_for(columns)), dtype=np.uint8)
    packed[..., : -(-columns // 8)] = np.packbits(marks, axis=-1, bitorder="little")
    return packed.view("<i4")


def unpack_bits(words: Tensor, columns: int) -> Tensor:
    """(…, columns) bool from int32 (…, words)."""
    places = torch.arange(columns, dtype=torch.int32, device=words.device)
    return (words[..., (places // 32).long()] >> (places % 32)) & 1 != 0
