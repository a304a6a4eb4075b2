"""Texts that a model writes, thousands at a time: what heads and students learn from.

A pass serves one token of every text. Prompts of a group are padded on the left, so all texts of a group write their
keys and values into one column, and attention reads the columns that are used so far; nothing is recorded or paged.
"""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional
from transformers import AttentionInterface
from transformers.masking_utils import AttentionMaskInterface

PREFILL = 1 << 16
"""tokens of a pass over prompts"""
LOOK = 16
"""tokens after which finished texts are looked for"""
_names = (f"branchwise-writer-{number}" for number in itertools.count())


class Writer:
    """Writes texts with a transformers model. Use it as a context: it lends the model another attention."""

    def __init__(self, model: nn.Module, stops: Sequence[int], slots: int) -> None:
        self.model: Any = model
        self.slots = slots
        self.device: torch.device = self.model.device
        self._stops = torch.tensor(sorted(stops), device=self.device)
        self._name = next(_names)
        self._keys: list[Tensor] = []
        self._values: list[Tensor] = []
        self._start, self._mask = 0, torch.zeros(0)

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
        self._keys, self._values = [], []

    def write(
        self,
        prompts: Sequence[Sequence[int]],
        temperatures: Sequence[float],
        length: int,
        seed: int = 0,
        progress: Callable[[int], None] = lambda done: None,
    ) -> list[list[int]]:
        """An answer of at most `length` tokens to every prompt, with the token that ended it if one did."""
        order = sorted(range(len(prompts)), key=lambda number: len(prompts[number]))
        answers: list[list[int]] = [[] for _ in prompts]
        rng = torch.Generator(self.device).manual_seed(seed)
        for start in range(0, len(order), self.slots):
            group = order[start : start + self.slots]
            heat = torch.tensor([temperatures[number] for number in group], device=self.device)
            for number, answer in self._group([prompts[number] for number in group], heat, length, rng):
                answers[group[number]] = answer
            progress(start + len(group))
        return answers

    @torch.inference_mode()
    def _group(
        self, prompts: Sequence[Sequence[int]], heat: Tensor, length: int, rng: torch.Generator
    ) -> Iterator[tuple[int, list[int]]]:
        longest = max(map(len, prompts))
        tokens = torch.zeros(len(prompts), longest, dtype=torch.long)
        for row, prompt in enumerate(prompts):
            tokens[row, longest - len(prompt) :] = torch.tensor(prompt)
        blank = torch.tensor([longest - len(prompt) for prompt in prompts], device=self.device)
        tokens = tokens.to(self.device)
        self._make_room(len(prompts), longest + length)
        last = self._prefill(tokens, blank, longest)
        alive = torch.arange(len(prompts), device=self.device)
        written = torch.full((len(prompts), length), -1, device=self.device)
        for turn in range(length):
            token = self._draw(last, heat, rng)
            written[alive, turn] = token
            if turn + 1 == length:
                break
            if turn % LOOK == LOOK - 1:
                going = ~torch.isin(written[alive], self._stops).any(dim=1)
                kept = int(going.sum())
                if kept == 0:
                    break
                if kept < 0.8 * len(alive):
                    alive, heat, blank, token = (part[going] for part in (alive, heat, blank, token))
                    self._keys = [keys[going] for keys in self._keys]
                    self._values = [values[going] for values in self._values]
            last = self._pass(token[:, None], blank, longest + turn)[:, -1]
        stopped = torch.isin(written, self._stops)
        ends = torch.where(stopped.any(dim=1), stopped.int().argmax(dim=1) + 1, (written >= 0).sum(dim=1))
        for row, (answer, end) in enumerate(zip(written.tolist(), ends.tolist(), strict=True)):
            yield row, answer[:end]

    def _prefill(self, tokens: Tensor, blank: Tensor, longest: int) -> Tensor:
        """Write the prompts, some texts at a time; the logits after each."""
        whole = self._keys, self._values
        found, size = [], max(1, PREFILL // longest)
        for start in range(0, len(tokens), size):
            part = slice(start, start + size)
            self._keys, self._values = ([rows[part] for rows in store] for store in whole)  # views: writes stay
            found.append(self._pass(tokens[part], blank[part], 0)[:, -1])
        self._keys, self._values = whole
        return torch.cat(found)

    def _pass(self, tokens: Tensor, blank: Tensor, start: int) -> Tensor:
        """Logits after the last of the tokens (batch, tokens), which stand in columns from `start` on."""
        columns = torch.arange(start + tokens.shape[1], device=self.device)
        rows = columns[start:]
        self._start = start
        seen = (columns[None, None, :] <= rows[None, :, None]) & (columns[None, None, :] >= blank[:, None, None])
        self._mask = seen | (columns == rows[:, None])  # padding sees itself, so that it stays finite
        positions = (rows[None] - blank[:, None]).clamp_min(0)
        found: Tensor = self.model(tokens, position_ids=positions, use_cache=False, logits_to_keep=1).logits
        return found

    def _attend(
        self,
        module: nn.Module,
        query: Tensor,
        key: Tensor,
        value: Tensor,
        attention_mask: None = None,
        scaling: float | None = None,
        **_: Any,
    ) -> tuple[Tensor, None]:
        layer: int = module.layer_idx  # type: ignore[assignment]
        batch, heads, rows, width = query.shape
        end = self._start + rows
        keys, values = self._keys[layer], self._values[layer]
        keys[:, :, self._start : end] = key
        values[:, :, self._start : end] = value
        keys, values = keys[:, :, :end], values[:, :, :end]
        # The query heads of a group as further rows: fused kernels with a mask would copy keys for every head.
        groups = heads // keys.shape[1]
        folded = query.reshape(batch, keys.shape[1], groups * rows, width)
        mask = self._mask[:, None].repeat(1, 1, groups, 1)
        found = functional.scaled_dot_product_attention(folded, keys, values, mask, scale=scaling)
        return found.reshape(batch, heads, rows, -1).transpose(1, 2), None

    def _make_room(self, batch: int, columns: int) -> None:
        config = self.model.config.get_text_config()
        heads = config.num_key_value_heads
        width = getattr(config, "head_dim", None) or config.hidden_size // config.num_attention_heads
        size = batch, heads, columns, width
        self._keys, self._values = (
            [torch.zeros(size, device=self.device, dtype=self.model.dtype) for _ in range(config.num_hidden_layers)]
            for _ in range(2)
        )

    def _draw(self, logits: Tensor, heat: Tensor, rng: torch.Generator) -> Tensor:
        """A token from each row at its temperature, the best one at 0."""
        noise = torch.empty_like(logits, dtype=torch.float32).exponential_(generator=rng).log_().neg_()
        scaled = logits.float() + noise * heat[:, None]  # adding noise times heat divides the logits by the heat
        return scaled.argmax(dim=-1)


def without_loops(answers: Sequence[Sequence[int]], size: int = 8, times: int = 4, rest: int = 24) -> list[list[int]]:
    """Answers cut where the same tokens stand for the so-many-th time, but for the rest that shows the loop."""
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
