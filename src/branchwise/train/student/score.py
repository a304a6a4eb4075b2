"""What drafts would have been worth in texts of the target, without drafting any.

The probability that the first k drafted tokens are all accepted is the sum over them of the product of min(p, q), which
is the mean over texts of the target of the product of min(1, q/p). So it can be counted along the target's own texts,
each at the temperature at which it was drawn. A greedy text keeps a draft as long as the best tokens agree. Block
efficiency is one token plus these probabilities, averaged over every place of a text where a whole draft fits.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

SAMPLES = 1024
"""how many places are kept as samples"""


@dataclass(frozen=True)
class Score:
    acceptance: float
    """1 - TV at temperature 1, averaged over the tokens of answers"""
    agreement: float
    """how often student and target have the same best token"""
    block: float
    """tokens a pass of the target with a chain of the given depth"""


class Judge:
    """Compares the distributions of a student with those of its target, batch by batch."""

    def __init__(self, depth: int) -> None:
        self.depth = depth
        self._sums = torch.zeros(3, dtype=torch.float64)  # acceptance, agreement, places
        self._blocks = torch.zeros(2, dtype=torch.float64)
        self.samples: list[Tensor] = []
        """(rows, 2): the student's largest probability, and how likely its draft is accepted"""

    def begin(self, where: tuple[Tensor, ...], tokens: Tensor, heats: Tensor) -> None:
        """Begin a batch: for each place its text and position, the token that follows, and the temperature."""
        self._where, self._tokens, self._heats = where, tokens, heats
        self._kept = torch.zeros(len(tokens), device=tokens.device)

    def see(self, part: slice, guess: Tensor, truth: Tensor) -> None:
        """Add the logits (rows, vocabulary) of some places of the batch."""
        size = min(guess.shape[-1], truth.shape[-1])
        guess, truth = guess[:, :size].float(), truth[:, :size].float()
        q, p = guess.softmax(-1), truth.softmax(-1)
        accepted = torch.minimum(p, q).sum(-1)
        best = guess.argmax(-1)
        agreed = best == truth.argmax(-1)
        self._sums += torch.tensor([float(accepted.sum()), float(agreed.sum()), len(p)], dtype=torch.float64)
        if sum(map(len, self.samples)) < SAMPLES:
            self.samples.append(torch.stack([q.amax(-1), accepted], dim=1).cpu())
        heat, tokens = self._heats[part, None], self._tokens[part, None]
        warm = heat.clamp_min(1e-3)
        ratio = (guess / warm).log_softmax(-1).gather(1, tokens) - (truth / warm).log_softmax(-1).gather(1, tokens)
        kept = torch.where(heat > 0, ratio.exp().clamp_max(1.0), (best[:, None] == tokens).float())
        self._kept[part] = kept[:, 0]

    def end(self) -> None:
        """End a batch of which all places were seen."""
        rows, columns = self._where
        if not len(rows):
            return
        table = torch.full((int(rows.max()) + 1, int(columns.max()) + 1), torch.nan, device=rows.device)
        table[self._where] = self._kept
        if table.shape[1] < self.depth:
            return
        # A window that leaves the answer contains a NaN.
        runs = table.unfold(1, self.depth, 1).cumprod(-1).sum(-1)
        whole = runs[~runs.isnan()]
        self._blocks += torch.tensor([float(whole.sum()), len(whole)], dtype=torch.float64)

    @property
    def score(self) -> Score:
        accepted, agreed, places = self._sums.tolist()
        kept, windows = self._blocks.tolist()
        return Score(accepted / max(1, places), agreed / max(1, places), 1 + kept / max(1, windows))
