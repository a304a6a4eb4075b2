"""What a step costs here and now: t(n), the time to score n nodes, and what each drafter adds.

    turn   every size scored once, in an order that changes from turn to turn, so that no size owns a quiet moment
    pace   how slow the machine was in a turn, as against the others; it is taken out before sizes are compared
    cliff  a size that costs clearly more than the size before, more than the sizes beside it grow and more than noise

Budgets need the shape of t(n) more than its height: on tiled hardware one node too many can cost as much as sixteen.
So the sizes between which the cost jumps are searched until the jump stands between two neighbours, and what was
found that way is confirmed with fresh passes, because the largest of many noisy rises is mostly noise.

Costs are kept in the cache as `tune/DIGEST.json`. The digest covers everything that would make them stale.
"""

from __future__ import annotations

from branchwise.tune.cache import device_name
from branchwise.tune.costs import Cliff, Costs, Point
from branchwise.tune.drafters import DraftCost, measure_drafter
from branchwise.tune.passes import measure

__all__ = ["Cliff", "Costs", "DraftCost", "Point", "device_name", "measure", "measure_drafter"]
