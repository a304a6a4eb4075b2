"""The texts that are being written, with a state for each request, and the drafters that learn from them.

A drafter serves one request, those of one tenant, or all. Requests that share a drafter share what it has learned, and
how often drafts are accepted reveals something about the texts that it has learned from. So nothing is shared unless
asked for.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, field

import torch

from branchwise.backends.base import Prefill, Scored, TargetInfo
from branchwise.core.sampling import SamplingParams
from branchwise.core.sequence import SequenceState
from branchwise.draft import DRAFTERS, build_drafter
from branchwise.draft.lookup.base import LookupDrafter
from branchwise.draft.lookup.fusion import Fusion
from branchwise.errors import UsageError
from branchwise.integrations.vllm.chains import Laid, best_chain, chain_of, drawn_chain
from branchwise.integrations.vllm.settings import Settings
from branchwise.registry import split_spec
from branchwise.verify import Verdict

TENANT = "branchwise_tenant"
"""the extra argument of a request that names its tenant"""
TREE = "topk:1"
"""the tree policy of every drafter; chains are laid here, so it must learn and time nothing"""
NO_PREFILL = torch.zeros(0, 0)
"""empty prefill logits: vLLM computes logits of the last prompt token only"""


@dataclass(frozen=True)
class Asked:
    """The parts of a request that drafting depends on."""

    temperature: float = 0.0
    seeded: bool = False
    constrained: bool = False
    """whether a grammar constrains the text, which cuts drafts by their tokens"""
    tenant: str | None = None
    most: int | None = None
    """the most tokens that the text may have, prompt included"""


@dataclass(eq=False)
class Text:
    """One request."""

    sequence: SequenceState
    drafter: LookupDrafter
    asked: Asked
    laid: Laid | None = None
    """the last chain that was drafted"""


@dataclass
class Drafters:
    """One drafter for all requests, one for each tenant, or one for each request."""

    settings: Settings
    target: TargetInfo
    tenants: OrderedDict[str, LookupDrafter] = field(default_factory=OrderedDict)

    def __post_init__(self) -> None:
        self._everyone = self._new()  # made even if unused, so that a wrong spec is refused before the first request

    @property
    def reported(self) -> int:
        """How many tokens after each node a device has to report for the drafter."""
        return self._everyone.needs.topk

    def of(self, asked: Asked) -> LookupDrafter:
        if self.settings.share == "all":
            return self._everyone
        if self.settings.share == "request" or asked.tenant is None:
            return self._new()
        drafter = self.tenants.pop(asked.tenant, None) or self._new()
        self.tenants[asked.tenant] = drafter
        while len(self.tenants) > self.settings.tenants:
            self.tenants.popitem(last=False)
        return drafter

    def _new(self) -> LookupDrafter:
        drafter = build_lookup_drafter(self.settings.draft)
        drafter.bind(self.target)
        return drafter


def build_lookup_drafter(spec: str) -> LookupDrafter:
    """The drafter of a spec; refuses a drafter that needs a model."""
    spec = "memories" if spec == "auto" else spec
    free = issubclass(DRAFTERS.find(split_spec(spec)[0]), LookupDrafter)
    drafter = build_drafter(spec, TREE) if free else None
    if not isinstance(drafter, LookupDrafter) or (isinstance(drafter, Fusion) and drafter.drafting is not None):
        raise UsageError(
            f"Inside vLLM {spec!r} cannot draft: only drafters without a model do, such as memories, suffix or "
            "fused:recycle+ngram. vLLM runs draft models and exported heads itself; see docs/vllm.md."
        )
    return drafter


class Texts:
    """All open requests, by their names in vLLM."""

    def __init__(self, settings: Settings, target: TargetInfo, seed: int = 0) -> None:
        self.settings, self.seed = settings, seed
        self.drafters = Drafters(settings, target)
        self.open: dict[str | int, Text] = {}

    def read(
        self, name: str | int, tokens: Sequence[int], asked: Asked, verified: Sequence[int], scored: Scored | None
    ) -> Text:
        """Bring a request up to date. `tokens` are all that it has, `verified` are the drafts of its last step, and
        `scored` is what that pass found after its root and after each draft, if known."""
        text = self.open.get(name)
        known = 0 if text is None else len(text.sequence.tokens)
        if text is None or len(tokens) <= known or tokens[known - 1] != text.sequence.root:
            self.close([name])
            text = self._start(name, tokens[:-1] or tokens, asked)
            known = len(text.sequence.tokens)
        written = list(tokens[known:])
        if written:
            self._learn(text, written, verified, scored)
        text.sequence.tokens += written
        return text

    def draft(self, text: Text, length: int) -> list[int]:
        """The next chain of a request, of at most `length` tokens."""
        if text.asked.most is not None:
            length = min(length, text.asked.most - len(text.sequence.tokens) - 1)
        if length < 1:
            text.laid = None
            return []
        lay = drawn_chain if self.draws(text.asked) else best_chain
        text.laid = lay(text.drafter, text.sequence, length, self.settings.floor)
        return text.laid.tokens

    def draws(self, asked: Asked) -> bool:
        """Whether a chain is drawn. For a greedy text drawing has no use. A seeded text must not depend on earlier
        drafts, which it would with drawn chains. A grammar would cut drawn drafts by their tokens, which biases
        them."""
        return self.settings.chain == "drawn" and asked.temperature > 0 and not asked.seeded and not asked.constrained

    def close(self, names: Iterable[str | int]) -> None:
        for name in names:
            if (text := self.open.pop(name, None)) is not None:
                text.drafter.finish(text.sequence)

    def keep(self, names: Collection[str | int]) -> None:
        """Close all requests but these."""
        self.close([name for name in self.open if name not in names])

    def _start(self, name: str | int, prompt: Sequence[int], asked: Asked) -> Text:
        # The seed is the same on every rank of a tensor-parallel group, and differs between requests.
        digest = hashlib.blake2b(f"{self.seed}/{name}".encode(), digest_size=8).digest()
        sampling = SamplingParams(temperature=asked.temperature, seed=int.from_bytes(digest, "little") >> 1)
        text = Text(SequenceState(list(prompt), sampling), self.drafters.of(asked), asked)
        text.drafter.start(text.sequence, Prefill(NO_PREFILL))
        self.open[name] = text
        return text

    def _learn(self, text: Text, written: list[int], verified: Sequence[int], scored: Scored | None) -> None:
        sequence, drafter = text.sequence, text.drafter
        kept = len(written) - 1
        if scored is None or list(verified[:kept]) != written[:-1]:
            return  # without scores, `locate` will read the tokens when something is drafted
        laid, text.laid = text.laid, None
        cursor = drafter.locate(sequence) if laid is None else laid.cursor
        drafter.resume({sequence: cursor}, [chain_of([sequence.root, *verified])])
        drafter.update([sequence], scored, [Verdict(tuple(range(kept + 1)), written[-1])])
