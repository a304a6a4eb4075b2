"""Reading prompts with a head: the first rows of texts, in one pass.

A row attends only to the rows before it and itself, so attention needs no cache. Drafting continues after the last row;
of the other rows it needs only keys and values, which are a small part of the work. All of this is enqueued after the
target's pass over the prompt, which the host does not wait for.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence

import numpy as np
import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import sdpa_kernel

from branchwise.core.sequence import SequenceState
from branchwise.draft.head.cache import KERNELS, HeadCache
from branchwise.draft.head.following import Unread
from branchwise.draft.head.network import Head, HeadConfig

MOST = 4096
"""most rows of a prompt that are read like this"""
MOST_ROWS = 8192
"""most rows of several prompts in one pass, each padded to the longest of them"""
MOST_TOGETHER = 16
"""most prompts of a pass"""
LEAST = 64
"""least rows of a pass on a device"""


def reads_at_once(config: HeadConfig) -> bool:
    """Whether a row of a prompt depends on all rows before it and on nothing else, so that one pass can read a
    prompt."""
    return not (config.masks or config.window or config.cross)


def usual(rows: int, device: torch.device) -> int:
    """The number of rows that `rows` are padded to: on a device a power of two. The device's library of products loads
    another kernel for nearly every size, which takes milliseconds the first time; these few sizes are loaded at
    warm-up."""
    return rows if device.type == "cpu" else max(LEAST, 1 << (rows - 1).bit_length())


def joined(parts: Sequence[Tensor]) -> Tensor:
    """The rows of texts one after the other, and after them padding up to a usual size."""
    rows = sum(map(len, parts))
    return functional.pad(torch.cat([*parts]), (0, 0, 0, usual(rows, parts[0].device) - rows))


def together(sequences: Sequence[SequenceState], device: torch.device) -> list[list[SequenceState]]:
    """Groups of prompts that are read in one pass: on a device as many as allowed, in powers of two, because a pass
    over few rows is bound by its kernel launches; on a host one prompt each."""
    groups: list[list[SequenceState]] = []
    longest = 0
    for sequence in sequences:
        longest = max(longest, usual(len(sequence.tokens), device))
        full = device.type == "cpu" or len(groups[-1]) == MOST_TOGETHER if groups else True
        if full or (len(groups[-1]) + 1) * longest > MOST_ROWS:
            groups.append([])
            longest = usual(len(sequence.tokens), device)
        groups[-1].append(sequence)
    return [part for group in groups for part in _halved(group)]


def _halved(group: Sequence[SequenceState]) -> Iterator[list[SequenceState]]:
    """Parts of a group: the largest power of two of them, then the same of the rest."""
    while group:
        size = 1 << (len(group).bit_length() - 1)
        yield [*group[:size]]
        group = group[size:]


def read_unread(
    head: Head,
    cache: HeadCache,
    embeddings: Tensor,
    unread: Mapping[SequenceState, Unread],
    features: Callable[[Sequence[Tensor], int], Tensor],
) -> None:
    """Write the first rows of texts of which nothing was read yet, in as few passes as possible. `features` makes the
    features of a given number of rows from their hidden states, (rows, width) for each tap."""
    for group in together([*unread], embeddings.device):
        texts = [unread[sequence] for sequence in group]
        counts = [min(MOST, len(text)) for text in texts]
        by_tap = zip(*(text.by_tap(MOST) for text in texts), strict=True)
        read_prompts(head, cache, embeddings, group, features([*map(joined, by_tap)], sum(counts)), counts)
        for text, count in zip(texts, counts, strict=True):
            text.drop(count)


def read_prompts(
    head: Head,
    cache: HeadCache,
    embeddings: Tensor,
    sequences: Sequence[SequenceState],
    features: Tensor,
    counts: Sequence[int],
) -> None:
    """Write the first rows of texts, `counts` of each. `features` (rows, width) has the rows of one text after those of
    another, and then padding.

    Shorter texts are padded after their rows. Their rows do not attend to the padding, and later rows overwrite it.
    """
    cells, device, texts, own = max(counts), features.device, len(sequences), features[: sum(counts)]
    longest = usual(cells, device)
    cache.hold(cells)
    tokens, places = np.zeros((texts, longest), dtype=np.int64), np.arange(texts * longest).reshape(texts, longest)
    for row, (sequence, count) in enumerate(zip(sequences, counts, strict=True)):
        tokens[row, :count] = sequence.tokens[1 : count + 1]
    real = np.arange(longest) < np.array(counts)[:, None]
    # One copy for all numbers, because each copy is a launch.
    numbers = [cache.slot[sequence] for sequence in sequences], np.array(counts) - 1, places[real], tokens.ravel()
    uploaded = torch.from_numpy(np.concatenate(numbers)).to(device, non_blocking=True)
    slots, last, rows, flat = uploaded.split([texts, texts, len(own), texts * longest])
    after = flat.view(texts, longest)
    cache.tokens[slots, :cells] = after[:, :cells]
    read = own.new_zeros(texts * longest, own.shape[1]).index_copy_(0, rows, own)
    read, positions = read.view(texts, longest, -1), torch.arange(longest, device=device)
    # If only the last row has queries, it attends to all rows except the padding of its text.
    shorter = None if min(counts) == longest else (positions <= last[:, None])[:, None, None]

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        for kept, new in zip(cache.store[:, layer], (key, value), strict=True):
            kept[slots, :, :cells] = new[:, :, :cells]
        if query.shape[2] == longest:
            return functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)
        return functional.scaled_dot_product_attention(query, key, value, shorter, enable_gqa=True)

    with sdpa_kernel(KERNELS):
        predict, carry = head(read, embeddings[after], positions.expand(len(sequences), -1), attend, wanted=last)
    cache.predicted[slots], cache.carried[slots] = predict[:, 0], carry[:, 0]
    for sequence, count in zip(sequences, counts, strict=True):
        cache.lengths[sequence] = count
