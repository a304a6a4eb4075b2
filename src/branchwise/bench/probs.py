"""The figure of acceptance by draft probability."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from branchwise.bench.figures import Figure, Missing
from branchwise.bench.figures import _label as label
from branchwise.bench.figures import _look as look
from branchwise.bench.figures import _names as names
from branchwise.bench.figures import _sentence as sentence
from branchwise.bench.summary import ALL, Row
from branchwise.plots import Theme

if TYPE_CHECKING:
    from matplotlib.axes import Axes


def acceptance_by_prob(rows: Sequence[Row]) -> Figure | Missing:
    title = "Acceptance by draft probability"
    known = [row for row in rows if row.category == ALL and any(share is not None for share in row.acceptance_by_prob)]
    if not known:
        return Missing(title, "No contestant drew its drafts on the host, where their probabilities are counted.")

    def points(row: Row) -> list[tuple[float, float]]:
        width = 1 / len(row.acceptance_by_prob)
        shares = enumerate(row.acceptance_by_prob)
        return [(width * (place + 0.5), share) for place, share in shares if share is not None]

    def paint(axes: Axes, theme: Theme) -> None:
        for row in known:
            probs, shares = zip(*points(row), strict=True)
            own = look(row.contestant, names(rows), theme)
            axes.plot(probs, [100 * share for share in shares], markersize=4, linewidth=1.4, **own)
        axes.set_xlim(0, 1)
        axes.set_ylim(0, 100)
        label(axes, theme, "draft probability", "accepted, %")

    def ends(row: Row) -> str:
        (low, first), *_, (high, last) = points(row) * 2
        return f"{row.contestant} accepts {first:.0%} near {low:.2f} and {last:.0%} near {high:.2f}"

    return Figure(
        "acceptance-by-prob",
        title,
        sentence(map(ends, known)),
        "Of the first tokens drawn below accepted nodes, the share that was accepted, by the probability that the "
        "drafter gave them: DySpec's premise is that it rises.",
        2.4,
        paint,
    )
