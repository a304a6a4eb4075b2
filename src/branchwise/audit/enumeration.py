"""Enumerates every outcome of a verifier, each with its exact probability.

A verifier runs on a batch. Whenever it asks for a random decision, the enumerator takes one outcome for each row and
notes the others. Then it runs the verifier again with those prescribed, until no outcome is left. The verifier is the
code that serves users; it cannot tell the difference.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass

import torch
from torch import Tensor

from branchwise.verify import Verdicts

Key = tuple[str, int]
"""identifies a decision: its kind and number, which a verifier uses once in a step"""


@dataclass(frozen=True, eq=False)
class Outcomes:
    """Verdicts with the probability of all decisions that led to them."""

    rows: Tensor
    """(outcomes,): which row of the batch each belongs to"""
    weights: Tensor
    """(outcomes,) float64; those of one row sum to 1"""
    verdicts: Verdicts


def outcomes(
    verify: Callable[[Tensor, Enumerator], Verdicts],
    rows: int,
    most: int = 1 << 17,
    chance: type[Enumerator] | None = None,
) -> Iterator[Outcomes]:
    """Every outcome of a verifier for `rows` rows.

    `verify` runs it on the given rows (which may repeat) with the given chance; `most` bounds the rows of one run. A
    subclass as `chance` may leave some decisions out.
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
    """What the next run does: which rows, and the prescribed outcome of each decision."""

    rows: Tensor
    weights: Tensor
    """the probability of all prescribed outcomes, also of decisions that this run does not ask for: a batch may ask a
    row for a decision that only other rows need, and a smaller batch may not."""
    ways: dict[Key, Tensor]
    """for each row an outcome, or nothing (-1)"""

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
        """(rows,): of all decisions made and prescribed"""
        self.made: dict[Key, Tensor] = {}
        """decisions in the order in which they were made"""
        self.forks: list[Fork] = []
        self._hopes: dict[int, tuple[Tensor, Tensor]] = {}
        self._tossed: dict[int, Tensor] = {}
        """by number: the rows for which a coin has decided something"""

    def first(self, odds: Tensor, draw: int) -> Tensor:
        odds = odds.double().clone()  # what the verifier handed over stays its own
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
        """One way for each row, (batch,), out of outcomes with these weights (batch, ways)."""
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
        """The remaining outcomes: as before up to each fork, at the fork the other way, then free."""
        keys = list(dict.fromkeys([*self._script.ways, *self.made]))
        numbers = {key: number for number, key in enumerate(self.made)}
        columns: dict[Key, list[Tensor]] = {key: [] for key in keys}
        for fork in self.forks:
            for key in keys:
                if key == fork.key:
                    column = fork.ways
                elif key in numbers and numbers[key] < fork.before:
                    column = self.made[key][fork.rows]
                else:  # what was prescribed stays so, also where this run did not come by
                    column = self._script.ways.get(key, self._free)[fork.rows]
                columns[key].append(column)
        rows = torch.cat([fork.rows for fork in self.forks])
        weights = torch.cat([fork.weights for fork in self.forks])
        return Script(self._script.rows[rows], weights, {key: torch.cat(parts) for key, parts in columns.items()})


@dataclass(frozen=True, eq=False)
class Fork:
    """Outcomes that were not taken."""

    before: int
    """how many decisions had been made"""
    key: Key
    rows: Tensor
    ways: Tensor
    weights: Tensor
    """the probability of having come here and of going that way"""
