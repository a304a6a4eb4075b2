"""Learning: a head follows its target through texts that the target wrote.

Hidden states are computed anew for every batch and never stored. At every depth the head learns the target's
distribution over the token table and its most probable token. Learning rates follow the clock, so that a run uses
exactly its given minutes. A checkpoint holds everything that the next step needs.
"""

from __future__ import annotations

import random
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torch.nn import functional
from torch.nn.attention import sdpa_kernel

from branchwise.backends.base import CachedRows
from branchwise.backends.transformers.probe import context_limit
from branchwise.draft.head.cache import KERNELS
from branchwise.draft.head.network import Head
from branchwise.train.corpus import Text, padded
from branchwise.train.head.cross import LayerCache, moved_keys, moved_positions
from branchwise.train.head.loss import loss_of
from branchwise.train.head.unroll import unroll
from branchwise.train.keeping import kept_whole


@dataclass(frozen=True)
class Recipe:
    """How a head is trained; the numbers were compared on SmolLM2 (docs/heads.md)."""

    minutes: float
    """minutes of learning, on the clock"""
    steps: int | None = None
    """the number of steps to take instead, however long they take"""
    depth: int = 5
    decay: float = 0.8
    """the weight of each depth, as a share of the one above"""
    tokens: int = 32_768
    """tokens of a batch"""
    muon: float = 0.02
    adam: float = 1e-3
    warm: float = 0.03
    flat: float = 0.2
    """shares of the time: the rate rises during `warm`, is flat until `flat`, and falls to zero"""
    clip: float = 1.0
    chunk: int = 8192
    """rows whose logits are in memory at a time"""
    moved: float = 0.75
    """share of the batches whose positions are moved far into a text; only for a head with cross-attention"""
    seed: int = 0


@dataclass
class Score:
    """What a head would have drafted in held-out texts."""

    hits: list[float]
    """for each depth how often its best token was the target's best token, given that all before it were"""

    @property
    def tokens(self) -> float:
        """Tokens a pass of a chain of this depth."""
        kept, whole = 1.0, 1.0
        for hit in self.hits:
            kept *= hit
            whole += kept
        return whole


class Observed(NamedTuple):
    """The results of a pass of the target over whole texts."""

    hidden: list[Tensor]
    """outputs of the tapped layers, (batch, length, width) each"""
    last: Tensor
    """(batch, length, width): the states that the output rows read"""
    cached: CachedRows | None
    """keys and values (batch, heads, length, width) of a layer, for a head with cross-attention"""


class Watched:
    """A target model in training: hidden states of some layers, keys and values of one, embedding and output rows."""

    def __init__(self, model: Any, taps: Sequence[str], table: Tensor, cross: str = "") -> None:
        self.model, self.cross = model, cross
        self.taps = [model.get_submodule(name) for name in taps]
        self.embeddings: Tensor = self.model.get_input_embeddings().weight
        self.output: Tensor = self.model.get_output_embeddings().weight
        self.table, self.rows = table, self.output[table]
        self.place = torch.full((len(self.output),), -1, device=table.device)
        self.place[table] = torch.arange(len(table), device=table.device)

    @torch.no_grad()
    def __call__(self, tokens: Tensor) -> Observed:
        cache = LayerCache(self.cross) if self.cross else None
        seen: dict[int, Tensor] = {}

        def keep(number: int) -> Any:
            return lambda _, __, out: seen.__setitem__(number, out[0] if isinstance(out, tuple) else out)

        hooks = [tap.register_forward_hook(keep(number)) for number, tap in enumerate(self.taps)]
        try:
            last = self.model.base_model(tokens, use_cache=False, past_key_values=cache).last_hidden_state
        finally:
            for hook in hooks:
                hook.remove()
        return Observed([seen[number] for number in range(len(self.taps))], last, None if cache is None else cache.rows)


@dataclass
class Learner:
    head: Head
    target: Watched
    recipe: Recipe
    elapsed: float = 0.0
    """seconds of learning so far, those of earlier runs included"""
    steps: int = 0
    best: float = 0.0
    curve: list[dict[str, Any]] = field(default_factory=list)
    """all scores so far, each with its time"""

    def __post_init__(self) -> None:
        matrices = [weight for weight in self.head.parameters() if weight.ndim == 2]
        others = [weight for weight in self.head.parameters() if weight.ndim != 2]
        self.optimisers: list[torch.optim.Optimizer] = [
            torch.optim.Muon(matrices, lr=self.recipe.muon, momentum=0.95, weight_decay=0.0),
            torch.optim.AdamW(others, lr=self.recipe.adam, betas=(0.9, 0.95), weight_decay=0.0),
        ]

    @property
    def done(self) -> float:
        """The share of the run that is over."""
        recipe = self.recipe
        return self.elapsed / (60 * recipe.minutes) if recipe.steps is None else self.steps / recipe.steps

    @property
    def rate(self) -> float:
        """The share of the full learning rates at this time."""
        done, recipe = self.done, self.recipe
        if done < recipe.warm:
            return max(done / recipe.warm, 0.02)
        return 1.0 if done < recipe.flat else max(0.0, (1 - done) / (1 - recipe.flat))

    @property
    def finished(self) -> bool:
        return self.done >= 1

    @contextmanager
    def _quickly(self) -> Iterator[None]:
        """Use half precision on CUDA, and attention without cuDNN, which makes a new plan for every length."""
        device = self.target.table.device.type
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"), sdpa_kernel(KERNELS):
            yield

    def learn(self, texts: Sequence[Text]) -> float:
        """Take one step on a batch, and return its loss."""
        start = time.perf_counter()
        for optimiser, full in zip(self.optimisers, (self.recipe.muon, self.recipe.adam), strict=True):
            for group in optimiser.param_groups:
                group["lr"] = full * self.rate
        loss = self._loss(texts, moved=True)
        loss.backward()
        nn.utils.clip_grad_norm_(self.head.parameters(), self.recipe.clip)
        with warnings.catch_warnings():
            # Muon multiplies in bfloat16. On a CPU without fast bfloat16, torch warns with a stack of C++ frames.
            warnings.filterwarnings("ignore", "mkldnn_matmul failed", UserWarning)
            for optimiser in self.optimisers:
                optimiser.step()
                optimiser.zero_grad(set_to_none=True)
        value = float(loss.detach())
        self.steps += 1
        self.elapsed += time.perf_counter() - start
        return value

    @torch.no_grad()
    def score(self, batches: Sequence[Sequence[Text]]) -> Score:
        """Hits by depth over held-out texts."""
        hits = torch.zeros(2, self.recipe.depth)
        for texts in batches:
            right: Tensor | None = None
            for depth, (rows, good) in enumerate(self._hits(texts)):
                # A depth counts only if all depths before it, of the same anchor, were right.
                if right is not None:
                    rows = rows & functional.pad(right[:, :-1], (1, 0))
                right = rows & good
                hits[0, depth] += float(right.sum())
                hits[1, depth] += float(rows.sum())
        return Score((hits[0] / hits[1].clamp_min(1)).tolist())

    # What a batch is

    def _batch(self, texts: Sequence[Text]) -> tuple[Tensor, Tensor]:
        """(batch, length) tokens, and which tokens belong to an answer."""
        longest = max(len(text.tokens) for text in texts)
        length = 2 - (2 - longest) // 8 * 8  # a multiple of eight rows, which attention kernels prefer
        return padded(texts, self.target.table.device, length)

    def _unrolled(self, texts: Sequence[Text], *, moved: bool = False) -> tuple[list[Tensor], Tensor, Tensor, Tensor]:
        """Predictions by depth, the target's states that judge each of them, the tokens, and the rows that count. With
        `moved`, some batches get moved positions."""
        tokens, answers = self._batch(texts)
        positions = self._positions(tokens.shape[1] - 2) if moved else None
        with self._quickly():
            hidden, last, cached = self.target(tokens)
            embeddings = self.target.embeddings[tokens[:, 1:-1]]
            features = self.head.features([state[:, :-2] for state in hidden])
            if cached is not None:
                cached = CachedRows(*(part[:, :, :-2] for part in cached))
                cached = cached if positions is None else moved_keys(cached, positions, self.head.frequencies)
            found = unroll(self.head, features, embeddings, self.recipe.depth, cached, positions)
        return found, last[:, 1:-1], tokens, answers[:, 2:]

    def _positions(self, rows: int) -> Tensor | None:
        """(rows,): moved positions of this step's batch, or None for plain ones. Seed and step decide, so that a
        continued run does what an unbroken one would."""
        rng = random.Random(f"positions {self.recipe.seed} {self.steps}")
        if not self.head.config.cross or rng.random() >= self.recipe.moved:
            return None
        farthest = context_limit(self.target.model.config)
        return moved_positions(rows, farthest, rng).to(self.target.table.device)

    def _loss(self, texts: Sequence[Text], *, moved: bool = False) -> Tensor:
        found, states, tokens, counted = self._unrolled(texts, moved=moved)
        chosen = counted.nonzero(as_tuple=True)
        places, known = self._best(states[chosen])
        taken = tuple(index[known] for index in chosen)
        weights = torch.stack([(taken[1] >= depth).float() for depth in range(len(found))])
        weights *= self._decays(len(found)) / weights.sum(dim=1, keepdim=True).clamp_min(1)
        with self._quickly():
            outputs = torch.stack([self.head.output(rows[taken], self._before(tokens, taken)) for rows in found])
        rows = self.target.rows
        return loss_of(outputs.to(rows.dtype), rows, states[taken], places[known], weights, self.recipe.chunk)

    def _decays(self, depths: int) -> Tensor:
        return (self.recipe.decay ** torch.arange(depths, device=self.target.table.device))[:, None]

    def _before(self, tokens: Tensor, rows: tuple[Tensor, ...]) -> Tensor | None:
        """(rows, width): embeddings of the tokens before those that the rows predict, if the head uses them."""
        return self.target.embeddings[tokens[:, 1:-1][rows]] if self.head.config.bias else None

    @torch.no_grad()
    def _best(self, states: Tensor) -> tuple[Tensor, Tensor]:
        """The target's best tokens as indices of the table, and whether the table has them, (rows,) each."""
        chunks = states.split(self.recipe.chunk)
        best = torch.cat([functional.linear(part, self.target.output).argmax(-1) for part in chunks])
        places = self.target.place[best]
        return places.clamp_min(0), places >= 0

    def _hits(self, texts: Sequence[Text]) -> Iterator[tuple[Tensor, Tensor]]:
        """For each depth the rows that count, and the rows whose best token is the target's, (batch, rows) each."""
        found, states, tokens, counted = self._unrolled(texts)
        chosen = counted.nonzero(as_tuple=True)
        wanted, known = self._best(states[chosen])
        for depth, predict in enumerate(found):
            with self._quickly():
                output = self.head.output(predict[chosen], self._before(tokens, chosen)).to(states.dtype)
            chunks = output.split(self.recipe.chunk)
            best = torch.cat([functional.linear(part, self.target.rows).argmax(-1) for part in chunks])
            good = torch.zeros_like(counted).index_put_(chosen, (best == wanted) & known)
            yield counted & (torch.arange(counted.shape[1], device=counted.device) >= depth), good

    # Checkpoints

    def save(self, file: Path) -> None:
        """Everything that the next step needs, in one file that replaces the old one as a whole."""
        kept_whole(
            file,
            {
                "head": self.head.state_dict(),
                "optimisers": [optimiser.state_dict() for optimiser in self.optimisers],
                "elapsed": self.elapsed,
                "steps": self.steps,
                "best": self.best,
                "curve": self.curve,
            },
        )

    def restore(self, file: Path) -> None:
        kept = torch.load(file, map_location=self.target.table.device, weights_only=True)
        self.head.load_state_dict(kept["head"])
        for optimiser, state in zip(self.optimisers, kept["optimisers"], strict=True):
            optimiser.load_state_dict(state)
        self.elapsed, self.steps, self.best, self.curve = (kept[name] for name in ("elapsed", "steps", "best", "curve"))
