"""What speculation did for a request, in the fields that vLLM gives to `metrics.speculative_decoding`."""

from __future__ import annotations

from collections.abc import Iterable
from itertools import zip_longest
from typing import Any

from branchwise.engine.stats import Stats


def drafts(stats: Stats) -> int:
    """Steps in which something was drafted."""
    return stats.drafted_per_depth[0] if stats.drafted_per_depth else 0


def added(counts: Iterable[list[int]]) -> list[int]:
    """Lists of counts, added place by place."""
    return [sum(column) for column in zip_longest(*counts, fillvalue=0)]


def speculative_decoding(all_stats: Iterable[Stats]) -> dict[str, Any]:
    """The numbers of one request, over all of its texts.

    A tree has several nodes at a depth, so more tokens are drafted in a step than can be accepted; `num_spec_tokens` is
    the depth of the deepest tree, and entry k of the histogram counts the drafted steps that accepted k tokens.
    """
    stats = list(all_stats)
    steps = sum(map(drafts, stats))
    drafted = sum(one.drafted_tokens for one in stats)
    accepted = sum(one.accepted_tokens for one in stats)
    reached = [steps, *added(one.accepted_per_depth for one in stats)]  # entry k: steps that accepted k or more
    return {
        "mean_acceptance_length": 1 + accepted / steps if steps else 1.0,
        "draft_acceptance_rate": accepted / drafted if drafted else 0.0,
        "acceptance_histogram": [here - beyond for here, beyond in zip(reached, [*reached[1:], 0], strict=True)],
        "num_spec_steps": steps,
        "num_accepted_draft_tokens": accepted,
        "num_draft_tokens": drafted,
        "num_spec_tokens": max((len(one.drafted_per_depth) for one in stats), default=0),
    }
