"""Texts that a model writes, thousands at a time: what heads and students learn from.

Every text has a slot of its own in one KV cache. A step computes and draws one token of every text without the host; on
CUDA it is one recorded graph over our own attention. Now and then the host takes finished texts out and puts the next
prompts into their slots.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import torch
from torch import Tensor
from torch.nn import functional
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

from branchwise.cuda.graphs import GraphedFunction, have_kernels

PREFILL = 1 << 16
"""the most tokens of a pass over prompts"""
SPENT = 0.7
"""the share of free memory that a KV cache takes; the rest is for logits and prompts"""
LOOK = 16
"""how many steps lie between two checks of which texts have finished"""
_names = (f"branchwise-writer-{number}" for number in itertools.count())


class Writer:
    """Writes texts with a transformers model. Use it as a context: the model gets another attention."""

    def __init__(self, model: Any, stops: Sequence[int], slots: int) -> None:
        self.model = model
        self.slots = slots
        self.device: torch.device = model.device
        self._stops = torch.tensor(sorted(stops), device=self.device)
        self._name = next(_names)
        self._kernels = have_kernels(self.device)
        self._filling: Tensor | None = None
        """slots whose prompts are being written; None in a step"""

    def __enter__(self) -> Writer:
        AttentionInterface.register(self._name, self._attend)
        AttentionMaskInterface.register(self._name, lambda **_: None)
        self._own = self.model.config._attn_implementation
        self.model.set_attn_implementation(self._name)
        return self

    def __exit__(self, *_: object) -> None:
        self.model.set_attn_implementation(self._own)
        for interface in (AttentionInterface, AttentionMaskInterface):
            interface._global_mapping.pop(self._name, None)
        self._store = torch.zeros(0)
        vars(self).pop("_step", None)  # the step exists only after the first text

    @torch.inference_mode()
    def write(
        self,
        prompts: Sequence[Sequence[int]],
        temperatures: Sequence[float],
        length: int,
        seed: int = 0,
        progress: Callable[[int], None] = lambda done: None,
    ) -> list[list[int]]:
        """An answer of at most `length` tokens to every prompt, with the token that ended it, if one did."""
        if not prompts:
            return []
        torch.manual_seed(seed)
        rows = max(map(len, prompts)) + length
        self._store = torch.zeros(0)  # frees the last cache first
        slots = min(self.slots, len(prompts), self._fitting(rows))
        self._make_room(slots, rows, length)
        waiting = sorted(range(len(prompts)), key=lambda number: len(prompts[number]))
        answers: list[list[int]] = [[] for _ in prompts]
        running: dict[int, int] = {}  # slot -> index of its prompt
        done = 0
        while waiting or running:
            free = [slot for slot in range(slots) if slot not in running]
            begun = dict(zip(free, waiting, strict=False))
            del waiting[: len(begun)]
            for group in self._groups(begun, prompts):
                self._fill(group, [prompts[begun[slot]] for slot in group], [temperatures[begun[s]] for s in group])
            running |= begun
            for _ in range(LOOK):
                self._step()
            alive = self._alive.tolist()
            ended = [slot for slot in running if not alive[slot]]
            for slot, (answer, count) in zip(ended, self._taken(ended), strict=True):
                answers[running.pop(slot)] = answer[:count]
            done += len(ended)
            progress(done)
        return answers

    def _size(self, slots: int, rows: int) -> tuple[int, ...]:
        """The shape of the KV cache: keys and values, layers, slots, heads, rows, width."""
        config = self.model.config.get_text_config()
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        return 2, config.num_hidden_layers, slots, config.num_key_value_heads, rows, width

    def _fitting(self, rows: int) -> int:
        """How many slots of `rows` rows fit into memory."""
        if self.device.type != "cuda":
            return self.slots
        torch.cuda.empty_cache()
        free, _ = torch.cuda.mem_get_info(self.device)
        slot: int = math.prod(self._size(1, rows)) * self.model.dtype.itemsize
        return max(1, int(SPENT * free) // slot)

    def _make_room(self, slots: int, rows: int, length: int) -> None:
        self._store = torch.zeros(self._size(slots, rows), device=self.device, dtype=self.model.dtype)
        self._token, self._lengths, self._count = (
            torch.zeros(slots, device=self.device, dtype=kind) for kind in (torch.long, torch.int32, torch.long)
        )
        """for every slot the last token, the rows in the cache before it, and the number of tokens that were written"""
        self._alive = torch.zeros(slots, device=self.device, dtype=torch.bool)
        self._heat = torch.zeros(slots, 1, device=self.device)
        self._written = torch.zeros(slots, length, device=self.device, dtype=torch.long)
        self._slots = torch.arange(slots, device=self.device, dtype=torch.int32)
        self._depths = torch.zeros(slots, 1, device=self.device, dtype=torch.int32)
        self._bits = torch.ones(slots, 1, 1, device=self.device, dtype=torch.int32)
        state = self._token, self._lengths, self._count, self._alive, self._written
        self._step = GraphedFunction(self._advance, self.device, state, writes=True)

    def _groups(self, begun: dict[int, int], prompts: Sequence[Sequence[int]]) -> list[list[int]]:
        """Groups of slots whose prompts are written in one pass; prompts come in order of their length."""
        groups: list[list[int]] = []
        for slot, number in begun.items():
            if not groups or (len(groups[-1]) + 1) * len(prompts[number]) > PREFILL:
                groups.append([])
            groups[-1].append(slot)
        return groups

    def _fill(self, slots: list[int], prompts: list[Sequence[int]], heat: list[float]) -> None:
        """Write prompts without their last tokens, which the first step reads."""
        places, longest = torch.tensor(slots, device=self.device), max(map(len, prompts)) - 1
        if longest:
            tokens = torch.zeros(len(prompts), longest, dtype=torch.long)
            for row, prompt in zip(tokens, prompts, strict=True):
                row[: len(prompt) - 1] = torch.tensor(prompt[:-1])
            self._filling = places
            positions = torch.arange(longest, device=self.device).expand(len(prompts), -1)
            self.model.base_model(tokens.to(self.device), position_ids=positions, use_cache=False)
            self._filling = None
        self._token[places] = torch.tensor([prompt[-1] for prompt in prompts], device=self.device)
        lengths = torch.tensor([len(prompt) - 1 for prompt in prompts], device=self.device, dtype=torch.int32)
        self._lengths[places], self._count[places], self._alive[places] = lengths, 0, True
        self._heat[places, 0] = torch.tensor(heat, device=self.device, dtype=torch.float32)

    def _taken(self, slots: list[int]) -> list[tuple[list[int], int]]:
        places = torch.tensor(slots, device=self.device, dtype=torch.long)
        return list(zip(self._written[places].tolist(), self._count[places].tolist(), strict=True))

    def _advance(self, token: Tensor, lengths: Tensor, count: Tensor, alive: Tensor, written: Tensor) -> None:
        """Write one more token of every text that is alive; other texts stay as they are."""
        logits = self.model(token[:, None], position_ids=lengths[:, None].long(), use_cache=False).logits[:, -1]
        noise = torch.empty_like(logits, dtype=torch.float32).exponential_().log_()
        drawn = (logits.float() - noise * self._heat).argmax(dim=-1)  # Gumbel noise times the temperature
        place = count.clamp_max(written.shape[1] - 1)[:, None]
        written.scatter_(1, place, torch.where(alive, drawn, written.gather(1, place)[:, 0])[:, None])
        token.copy_(torch.where(alive, drawn, token))
        lengths += alive
        count += alive
        alive &= ~torch.isin(drawn, self._stops) & (count < written.shape[1])

    def _attend(
        self,
        module: Any,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: None = None,
        scaling: float | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        """(batch, tokens, heads, width): attention of one layer over the texts in its slots."""
        keys, values = self._store[:, module.layer_idx]
        scale = query.shape[-1] ** -0.5 if scaling is None else scaling
        if self._filling is not None:  # prompts stand at the beginning of their slots, so each sees only itself
            keys[self._filling, :, : key.shape[2]], values[self._filling, :, : key.shape[2]] = key, value
            found = functional.scaled_dot_product_attention(
                query, key, value, is_causal=True, scale=scale, enable_gqa=True
            )
            return found.transpose(1, 2), None
        rows = torch.arange(len(query), device=query.device)
        keys[rows, :, self._lengths], values[rows, :, self._lengths] = key[:, :, 0], value[:, :, 0]
        if self._kernels:
            from branchwise.cuda import kernels

            found = kernels.tree_attention(
                query, keys, values, self._slots, self._lengths, self._depths, self._depths, self._bits, scale=scale
            )
            return found, None
        seen = torch.arange(keys.shape[2], device=query.device) <= self._lengths[:, None]
        found = functional.scaled_dot_product_attention(
            query, keys, values, seen[:, None, None], scale=scale, enable_gqa=True
        )
        return found.transpose(1, 2), None


def without_loops(answers: Sequence[Sequence[int]], size: int = 8, times: int = 4, rest: int = 24) -> list[list[int]]:
    """Answers that are cut where the same run of `size` tokens stands for the `times`-th time; `rest` more tokens are
    kept to show the loop."""
    cut = []
    for answer in answers:
        seen: dict[tuple[int, ...], int] = {}
        end = len(answer)
        for at in range(len(answer) - size + 1):
            run = tuple(answer[at : at + size])
            seen[run] = seen.get(run, 0) + 1
            if seen[run] == times:
                end = min(end, at + size + rest)
                break
        cut.append(list(answer[:end]))
    return cut
