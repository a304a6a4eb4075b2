"""What a head reads of a prompt: the first rows of a text, in one pass.

Each sees those before it and nothing else, so attention needs neither mask nor cache. Whatever goes to the device does
so behind the target's pass over the prompt, which the host does not wait for.
"""

from __future__ import annotations

import torch
from torch import Tensor
from torch.nn import functional
from torch.nn.attention import SDPBackend, sdpa_kernel

from branchwise.core.sequence import SequenceState
from branchwise.draft.head.cache import HeadCache
from branchwise.draft.head.network import Head, HeadConfig

MOST = 4096
"""rows of a prompt that are read so"""
KERNELS = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
"""without cuDNN, which plans anew for every length"""


def reads_at_once(config: HeadConfig) -> bool:
    """Whether rows of a prompt depend on those before them alone, and on all of these."""
    return not (config.masks or config.window or config.cross)


def read_prompt(head: Head, cache: HeadCache, embeddings: Tensor, sequence: SequenceState, features: Tensor) -> int:
    """Write the first rows of a text, which read these features (rows, width); returns how many were written."""
    count = min(len(features), MOST)
    if count == 0:
        return 0
    cache.hold(count)
    slot, device = cache.slot[sequence], features.device
    cache.note(sequence, count)
    after = cache.tokens[slot, :count]

    def attend(layer: int, query: Tensor, key: Tensor, value: Tensor) -> Tensor:
        for kept, new in zip(cache.store[:, layer, slot], (key, value), strict=True):
            kept[:, :count] = new[0]
        return functional.scaled_dot_product_attention(query, key, value, is_causal=True, enable_gqa=True)

    with sdpa_kernel(KERNELS):
        predict, carry = head(
            features[None, :count], embeddings[after][None], torch.arange(count, device=device)[None], attend
        )
    cache.predicted[slot], cache.carried[slot] = predict[0, -1], carry[0, -1]
    cache.lengths[sequence] = count
    return count
