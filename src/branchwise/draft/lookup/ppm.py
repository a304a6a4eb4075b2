"""From counts to probabilities: how probable is a token that was seen behind the end of a text before?

Cleary and Witten, "Data Compression Using Adaptive Coding and Partial String Matching" (1984): the longest context
assigns its mass first, and what it leaves goes to the next shorter one, which is asked about other tokens only. A
context leaves more the shorter it is and the less often it was seen.
"""

from __future__ import annotations

from collections.abc import Collection
from math import sqrt

DOUBT = 4.0
"""How many occurrences make a context of one token half certain; one of n tokens needs n ** 1.5 times fewer. So a token
that was seen once is expected again one time in five behind one token, and nine times in ten behind ten."""
CERTAIN = 0.02
"""if less mass than this is left, shorter contexts need not be asked"""
WIDTH = 8
"""candidates at one position"""


def ppm_backoff(
    masses: dict[int, float], left: float, counts: Collection[tuple[int, int]], length: int, total: int = 0
) -> float:
    """Assign tokens their part of the mass that longer contexts left; returns what this context leaves.

    A context of `length` tokens was followed by these tokens so often in `counts`, and by any token `total` times, if
    that is more. It assigns nothing to tokens that have a mass already.
    """
    fresh: list[tuple[int, int]] = []
    counted = 0
    for pair in counts:
        if pair[0] in masses:
            total -= pair[1]
        else:
            fresh.append(pair)
            counted += pair[1]
    if not fresh:
        return left
    doubt = DOUBT / (length * sqrt(length))
    whole = (total if total > counted else counted) + doubt
    for token, count in fresh:
        masses[token] = left * count / whole
    return left * doubt / whole


def ranked(masses: dict[int, float]) -> list[int]:
    """The most probable tokens, best first; of equally probable ones the first that was found."""
    return sorted(masses, key=masses.__getitem__, reverse=True)[:WIDTH]
