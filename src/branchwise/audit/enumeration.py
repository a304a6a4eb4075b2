"""Enumerates every outcome of a verifier, each with its exact probability.

A verifier runs on a batch. Whenever it asks for a random decision, the enumerator takes one outcome for each row and
notes the others. Then it runs the verifier again with these prescribed, until no outcome is left. The verifier is the
code that serves users; it cannot tell the difference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from branchwise.verify import Verdicts

Key = tuple[str, int]
"""identifies a decision by its kind and number; a verifier uses each key once in a step"""


@dataclass(frozen=True, eq=False)
class Outcomes:
    """Verdicts with the probability of all decisions that led to them."""

    rows: Tensor
    """(outcomes,): the row of the batch to which each outcome belongs"""
    weights: Tensor
    """(outcomes,) float64: the probability of each outcome; those of one row sum to 1 over all runs"""
    verdicts: Verdicts


def outcomes(
    verify: Callable[[Tensor, Enumerator], Verdicts],
    rows: int,
    most: int = 1 << 17,
    chance: type[Enumerator] | None = None,
) -> Iterator[Outcomes]:
    """Every outcome of a verifier for `rows` rows.

    `verify` runs the verifier on the given rows (which may repeat) with the given chance; `most` bounds the rows of one
    run. `chance` may be a subclass that leaves some decisions out.
    """
    scripts = [Script(torch.arange(rows), torch.ones(rows, dtype=torch.float64), {})]
    while scripts:
        script = scripts.pop()
        if len(script.rows) > most:
            scripts += script.split(most)
            continue
        follow = (chance or Enumerator)(script)
        verdicts = verify(script.rows, follow)
        yield Outcomes(script.rows, follow.weights, verdicts)
        if follow.forks:
            scripts.append(follow.next())


@dataclass(frozen=True, eq=False)
class Script:
    """The input of the next run: its rows, and the prescribed outcome of each decision."""

    rows: Tensor
    weights: Tensor
    """the probability of all prescribed outcomes, also of decisions that this run does not ask for: in a batch a row
    may be asked for a decision that only other rows need, and in a smaller batch it may not"""
    ways: dict[Key, Tensor]
    """for each decision the outcome (rows,) that is prescribed for each row, or -1"""

    def split(self, most: int) -> list[Script]:
        return [
            Script(
                self.rows[i : i + most],
                self.weights[i : i + most],
                {key: column[i : i + most] for key, column in self.ways.items()},
            )
            for i in range(0, len(self.rows), most)
        ]


class Enumerator:
    """Follows a script of prescribed outcomes, takes any outcome of other decisions, and notes the remaining ones."""

    def __init__(self, script: Script) -> None:
        self._script = script
        self._free = torch.full_like(script.rows, -1)
        self.weights = script.weights
        """(rows,): the probability of all decisions made or prescribed"""
        self.made: dict[Key, Tensor] = {}
        """decisions in the order in which they were made"""
        self.forks: list[Fork] = []
        self._hopes: dict[int, tuple[Tensor, Tensor]] = {}
        self._tossed: dict[int, Tensor] = {}
        """for each coin number the rows (rows,) bool in which it was tossed with odds between 0 and 1"""

    def first(self, odds: Tensor, draw: int) -> Tensor:
        odds = odds.double().clone()  # a copy: the tensor belongs to the verifier
        for column in range(odds.shape[1]):
            decides = (odds[:, column] > 0) & (odds[:, column] < 1)
            before = self._tossed.get(draw + column)
            assert before is None or not (before & decides).any(), f"the verifier tossed coin {draw + column} twice"
            self._tossed[draw + column] = decides if before is None else before | decides
            if draw + column in self._hopes:
                hope, bound = self._hopes[draw + column]
                assert (odds[:, column] <= bound + 1e-12).all(), f"the odds of coin {draw + column} pass their bound"
                odds[:, column] = torch.where(hope, (odds[:, column] / bound).clamp_max(1).nan_to_num(0.0), 0.0)
        failed = torch.nn.functional.pad((1 - odds).cumprod(dim=1), (1, 0), value=1.0)
        return self._decide("first", draw, torch.cat([failed[:, :-1] * odds, failed[:, -1:]], dim=1))

    def hopes(self, bounds: Tensor, draw: int) -> Tensor:
        assert bounds.shape[1] == 1, "hopes are asked for one coin at a time"
        bound = bounds[:, 0].double()
        hope = self._decide("hopes", draw, torch.stack([1 - bound, bound], dim=1)) == 1
        self._hopes[draw] = (hope, bound)
        return hope[:, None]

    def pick(self, probs: Tensor, draw: int = 0) -> Tensor:
        probs = probs.double()
        return self._decide("pick", draw, probs / probs.sum(dim=1, keepdim=True))

    def token(self, probs: Tensor, depth: int) -> Tensor:
        return self._decide("token", depth, probs.double())

    def _decide(self, kind: str, draw: int, weights: Tensor) -> Tensor:
        """(batch,): one outcome for each row, out of outcomes with these weights (batch, ways)."""
        key = (kind, draw)
        assert key not in self.made, f"the verifier asked twice for {kind} {draw}"
        prescribed = self._script.ways.get(key, self._free)
        decided = torch.where(prescribed >= 0, prescribed, weights.argmax(dim=1))
        others = (weights > 0) & (prescribed < 0)[:, None]
        others.scatter_(1, decided[:, None], False)
        rows, ways = others.nonzero(as_tuple=True)
        if len(rows):
            self.forks.append(Fork(len(self.made), key, rows, ways, self.weights[rows] * weights[rows, ways]))
        self.made[key] = decided
        taken = weights.gather(1, decided[:, None])[:, 0]
        self.weights = torch.where(prescribed >= 0, self.weights, self.weights * taken)
        return decided

    def next(self) -> Script:
        """The script of the remaining outcomes: up to each fork as before, at the fork the other outcome, then free."""
        keys = list(dict.fromkeys([*self._script.ways, *self.made]))
        numbers = {key: number for number, key in enumerate(self.made)}
        columns: dict[Key, list[Tensor]] = {key: [] for key in keys}
        for fork in self.forks:
            for key in keys:
                if key == fork.key:
                    column = fork.ways
                elif key in numbers and numbers[key] < fork.before:
                    column = self.made[key][fork.rows]
                else:  # what was prescribed stays so, even if this run did not ask for it
                    column = self._script.ways.get(key, self._free)[fork.rows]
                columns[key].append(column)
        rows = torch.cat([fork.rows for fork in self.forks])
        weights = torch.cat([fork.weights for fork in self.forks])
        return Script(self._script.rows[rows], weights, {key: torch.cat(parts) for key, parts in columns.items()})


@dataclass(frozen=True, eq=False)
class Fork:
    """Outcomes of one decision that a run did not take."""

    before: int
    """the number of decisions made before it"""
    key: Key
    rows: Tensor
    ways: Tensor
    weights: Tensor
    """the probability of reaching the fork and taking this outcome"""
