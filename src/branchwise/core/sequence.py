"""One text being written: what drafter, target and verifier know about it."""

from __future__ import annotations

import secrets
from dataclasses import dataclass, field

from branchwise.core.sampling import SamplingParams


@dataclass(eq=False)
class SequenceState:
    """Prompt and output so far. The last token is the root of the next tree: emitted, not yet in the KV cache."""

    tokens: list[int]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    prompt_length: int = field(init=False)
    seed: int = field(init=False)
    rng_seed: int = field(init=False)
    """the seed of the draws of the text: `seed`, or another seed if a drafter must not meet the same draws twice"""

    def __post_init__(self) -> None:
        assert self.tokens, "a sequence has at least a root"
        self.prompt_length = len(self.tokens)
        given = self.sampling.seed
        self.seed = self.rng_seed = secrets.randbits(63) if given is None else given % (1 << 63)

    @property
    def root(self) -> int:
        return self.tokens[-1]

    @property
    def output(self) -> list[int]:
        return self.tokens[self.prompt_length :]
