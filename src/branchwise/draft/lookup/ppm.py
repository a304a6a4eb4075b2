"""From counts to beliefs: how probable is a token that was seen behind what stands at the end of a text?

Cleary and Witten, "Data Compression Using Adaptive Coding and Partial String Matching" (1984): the longest context
speaks first, and what it leaves open goes to the next shorter one, which is asked about other tokens only. A context
leaves more open the shorter it is and the less often it was seen.
"""

from __future__ import annotations

from collections.abc import Collection
from math import sqrt

DOUBT = 4.0
"""How many occurrences make a context of one token half certain; one of n tokens needs n ** 1.5 times fewer. So what
was seen once is believed to come again one time in five behind one token, and nine times in ten behind ten."""
CERTAIN = 0.02
"""where less than this is left open, shorter contexts need not be asked"""
WIDTH = 8
"""so many tokens are thought of at a place"""


def share(
    believed: dict[int, float], left: float, counts: Collection[tuple[int, int]], length: int, total: int = 0
) -> float:
    """Give tokens their part of what longer contexts left open; returns what this one leaves.

    A context of `length` tokens was followed by these tokens so often in `counts`, and by anything `total` times, if
    that is more. It speaks only of tokens that nothing is believed of yet.
    """
    fresh: list[tuple[int, int]] = []
    seen = 0
    for pair in counts:
        if pair[0] in believed:
            total -= pair[1]
        else:
            fresh.append(pair)
            seen += pair[1]
    if not fresh:
        return left
    doubt = DOUBT / (length * sqrt(length))
    whole = (total if total > seen else seen) + doubt
    for token, count in fresh:
        believed[token] = left * count / whole
    return left * doubt / whole


def ranked(believed: dict[int, float]) -> list[int]:
    """The tokens that are thought of, the best first; of equal ones that which was found first."""
    return sorted(believed, key=believed.__getitem__, reverse=True)[:WIDTH]
