"""What a step costs on this machine: t(n), the time of a pass over n nodes, and what each drafter adds.

    turn   every size timed once, in an order that changes from turn to turn, so that noise falls on all sizes alike
    pace   how slow the machine was in a turn, relative to the others; divided out before sizes are compared
    cliff  a size that costs clearly more than the size before: more than its neighbours grow, and more than noise

Budgets need the shape of t(n) more than its height: on tiled hardware one node too many can cost as much as sixteen.
So the interval of a jump is bisected until the jump lies between two neighbouring sizes, and then confirmed with new
passes, because the largest of many noisy rises is mostly noise.

Costs are kept in the cache as `tune/DIGEST.json`. The digest covers everything that would make them stale.
"""

from __future__ import annotations

from branchwise.tune.costs import Cliff, Costs, Point
from branchwise.tune.drafters import DraftCost, measure_drafter
from branchwise.tune.passes import measure

__all__ = ["Cliff", "Costs", "DraftCost", "Point", "measure", "measure_drafter"]
