"""Learning: a student follows the distributions of its target through texts, at one exit or at several.

One pass of the student gives all its exits: the shared norm and head make a distribution of the states after the first
2, 4, 6 layers each, and their losses are summed (Kavehzadeh et al., S2D, arXiv 2407.01955). The target's states are
computed anew for every batch. Learning rates follow the clock, as for heads.
"""

from __future__ import annotations

import random
import time
import warnings
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.attention import sdpa_kernel

from branchwise.draft.head.cache import KERNELS
from branchwise.draft.nested.parts import layers_of, norm_of
from branchwise.train.corpus import Text, padded
from branchwise.train.keeping import kept_whole
from branchwise.train.student.divergence import distilled
from branchwise.train.student.own import OwnTexts
from branchwise.train.student.score import Judge, Score


@dataclass(frozen=True)
class Recipe:
    """How a student is trained."""

    minutes: float
    """minutes of learning, on the clock"""
    steps: int | None = None
    """the number of steps to take instead, however long they take"""
    divergence: str = "fkl"
    temperature: float = 1.0
    """temperature of both distributions in the loss, and of the texts that the student writes"""
    on_policy: float = 0.0
    """share of the batches that the student writes"""
    span: int = 24
    """tokens that the student writes of a text"""
    tokens: int = 16_384
    """tokens of a batch"""
    rate: float = 1e-3
    """learning rate of AdamW; that of Muon, which updates the matrices of the layers, is scaled to it"""
    warm: float = 0.03
    flat: float = 0.2
    """shares of the time: the rate rises during `warm`, is flat until `flat`, and falls to zero"""
    clip: float = 1.0
    chunk: int = 4096
    """rows whose logits are in memory at a time"""
    depth: int = 5
    """tokens of the drafts whose block efficiency is reported"""
    seed: int = 0


class Taught:
    """A student with access to its exits."""

    def __init__(self, model: Any, exits: Sequence[int] = ()) -> None:
        """`exits` are numbers of layers in ascending order, the last of them all; by default that one alone."""
        self.model = model
        _, layers = layers_of(model)
        self.exits = tuple(exits) or (len(layers),)
        assert self.exits[-1] == len(layers), "the last exit is after the last layer"
        self._watched = [layers[number - 1] for number in self.exits[:-1]]
        self._norm = norm_of(model)[1] if self._watched else None

    def __call__(self, tokens: Tensor) -> list[Tensor]:
        """(batch, length, width) for each exit: the states that the head reads."""
        seen: list[Tensor] = []

        def keep(module: nn.Module, inputs: Any, output: Any) -> None:
            seen.append(output[0] if isinstance(output, tuple) else output)

        hooks = [layer.register_forward_hook(keep) for layer in self._watched]
        try:
            last = self.model.base_model(tokens, use_cache=False).last_hidden_state
        finally:
            for hook in hooks:
                hook.remove()
        return [*(self._norm(state) for state in seen), last] if self._norm is not None else [last]


@dataclass
class Learner:
    student: Taught
    target: Any
    recipe: Recipe
    own: OwnTexts | None = None
    elapsed: float = 0.0
    """seconds of learning so far, those of earlier runs included"""
    steps: int = 0
    written: int = 0
    """steps on texts that the student wrote"""
    best: float = 0.0
    curve: list[dict[str, Any]] = field(default_factory=list)
    """all scores so far, each with its time"""

    def __post_init__(self) -> None:
        model = self.student.model.train().requires_grad_(True)
        apart = {id(part.weight) for part in (model.get_input_embeddings(), model.get_output_embeddings())}
        weights = list(model.parameters())
        matrices = [weight for weight in weights if weight.ndim == 2 and id(weight) not in apart]
        others = [weight for weight in weights if weight.ndim != 2 or id(weight) in apart]
        muon: Any = torch.optim.Muon
        self.optimisers: list[torch.optim.Optimizer] = [
            muon(matrices, lr=self.recipe.rate, momentum=0.95, weight_decay=0.0, adjust_lr_fn="match_rms_adamw"),
            torch.optim.AdamW(others, lr=self.recipe.rate, betas=(0.9, 0.95), weight_decay=0.0),
        ]

    @property
    def device(self) -> torch.device:
        found: torch.device = self.target.device
        return found

    @property
    def done(self) -> float:
        """The share of the run that is over."""
        recipe = self.recipe
        return self.elapsed / (60 * recipe.minutes) if recipe.steps is None else self.steps / recipe.steps

    @property
    def rate(self) -> float:
        """The learning rate at this time."""
        done, recipe = self.done, self.recipe
        if done < recipe.warm:
            return recipe.rate * max(done / recipe.warm, 0.02)
        return recipe.rate * (1.0 if done < recipe.flat else max(0.0, (1 - done) / (1 - recipe.flat)))

    @property
    def finished(self) -> bool:
        return self.done >= 1

    @property
    def on_policy(self) -> bool:
        """Whether the next step learns from what the student writes: seed and step decide."""
        drawn = random.Random(f"on-policy {self.recipe.seed} {self.steps}").random()
        return self.own is not None and drawn < self.recipe.on_policy

    @contextmanager
    def quickly(self) -> Iterator[None]:
        """Use half precision on CUDA, and attention without cuDNN, which makes a new plan for every length."""
        device = self.device.type
        with torch.autocast(device, torch.bfloat16, enabled=device == "cuda"), sdpa_kernel(KERNELS):
            yield

    def learn(self, texts: Sequence[Text]) -> float:
        """Take one step on a batch, or on a batch that the student writes in its place, and return its loss."""
        start = time.perf_counter()
        if self.on_policy:
            assert self.own is not None
            texts = self.own.next(self.student.model)
            self.written += 1
        for optimiser in self.optimisers:
            for group in optimiser.param_groups:
                group["lr"] = self.rate
        loss = self.loss(texts)
        loss.backward()
        nn.utils.clip_grad_norm_(self.student.model.parameters(), self.recipe.clip)
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

    def loss(self, texts: Sequence[Text]) -> Tensor:
        """The sum of the divergences at all exits."""
        with self.quickly():
            found, states, _, _ = self.states(texts)
            head, teacher = self.student.model.get_output_embeddings(), self.target.get_output_embeddings()
            how = self.recipe.divergence, self.recipe.temperature, self.recipe.chunk
            return torch.stack([distilled(hidden, head, states, teacher, *how) for hidden in found]).sum()

    def states(self, texts: Sequence[Text]) -> tuple[list[Tensor], Tensor, Tensor, tuple[Tensor, ...]]:
        """For the places before tokens of answers: what the student's head reads at each exit and what the target's
        head reads, (rows, width) each, the tokens that follow (rows,), and the indices of these places in the batch."""
        tokens, answers = padded(texts, self.device)
        where = answers[:, 1:].nonzero(as_tuple=True)
        with torch.no_grad():
            states = self.target.base_model(tokens, use_cache=False).last_hidden_state[:, :-1][where]
        found = [state[:, :-1][where] for state in self.student(tokens)]
        return found, states, tokens[:, 1:][where], where

    @torch.no_grad()
    def score(self, batches: Sequence[Sequence[Text]]) -> list[Score]:
        """What drafts of each exit would have been worth in held-out texts."""
        model = self.student.model.eval()
        judges = [Judge(self.recipe.depth) for _ in self.student.exits]
        head, teacher = model.get_output_embeddings(), self.target.get_output_embeddings()
        with self.quickly():
            for texts in batches:
                found, states, tokens, where = self.states(texts)
                heat = [1.0 if text.temperature is None else text.temperature for text in texts]
                heats = torch.tensor(heat, device=self.device)[where[0]]
                for judge in judges:
                    judge.begin(where, tokens, heats)
                for start in range(0, len(states), self.recipe.chunk):
                    part = slice(start, start + self.recipe.chunk)
                    truth = teacher(states[part])
                    for judge, hidden in zip(judges, found, strict=True):
                        judge.see(part, head(hidden[part]), truth)
                for judge in judges:
                    judge.end()
        model.train()
        return [judge.score for judge in judges]

    # Checkpoints

    def save(self, file: Path) -> None:
        """Everything that the next step needs, in one file that replaces the old one as a whole."""
        kept = {name: vars(self)[name] for name in ("elapsed", "steps", "written", "best", "curve")}
        kept |= {
            "student": self.student.model.state_dict(),
            "optimisers": [optimiser.state_dict() for optimiser in self.optimisers],
            "own": None if self.own is None else self.own.state(),
        }
        kept_whole(file, kept)

    def restore(self, file: Path) -> None:
        kept = torch.load(file, map_location=self.device, weights_only=True)
        self.student.model.load_state_dict(kept["student"])
        for optimiser, state in zip(self.optimisers, kept["optimisers"], strict=True):
            optimiser.load_state_dict(state)
        if self.own is not None and kept["own"] is not None:
            self.own.restore(kept["own"])
        for name in ("elapsed", "steps", "written", "best", "curve"):
            setattr(self, name, kept[name])
