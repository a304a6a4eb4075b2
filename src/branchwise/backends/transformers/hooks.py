"""The way of one target into the attention of its model: functions of its own, under a name that no other target has.

Nothing can travel through the forward call, because some families drop keywords that they do not know. So each target
registers its own functions with transformers, bound to its store.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable
from typing import Any

from torch import Tensor, nn
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from branchwise.backends.transformers.attention import Window
from branchwise.backends.transformers.kv_cache import KVCache
from branchwise.backends.transformers.probe import Probe, ProbeCache

_names = (f"branchwise-{number}" for number in itertools.count())


class AttentionHook:
    """The attention and mask functions of one target, under a name that no other target has."""

    def __init__(self) -> None:
        self.name = next(_names)
        self.store: KVCache | ProbeCache | None = None
        self.probe: Probe | None = None
        AttentionInterface.register(self.name, self.attend)
        AttentionMaskInterface.register(self.name, self.mask)

    def unregister(self) -> None:
        for interface in (AttentionInterface, AttentionMaskInterface):
            interface._global_mapping.pop(self.name, None)

    def mask(
        self,
        *,
        mask_function: Callable[..., Tensor],
        local_size: int | None = None,
        use_vmap: bool = False,
        **kwargs: Any,
    ) -> Window:
        """What the model passes to each layer as its mask: no tensor, just the layer's window."""
        if self.probe is not None:
            self.probe.see_mask(mask_function, local_size, use_vmap)
        return Window(local_size)

    def attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: Window,
        *,
        scaling: float | None = None,
        softcap: float | None = None,
        **kwargs: Any,
    ) -> tuple[Tensor, None]:
        """Attention of one layer over the rows that the store returned, (batch, heads, rows, width)."""
        if self.probe is not None:
            self.probe.see_attention(attention_mask, kwargs)
        assert self.store is not None
        assert self.store.current is not None, "a model was routed here outside a pass"
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        return self.store.current.attend(query, key, value, attention_mask.size, scale, softcap), None
