"""Methods: a drafter, the tree it grows and the verifier that judges it, under one name.

A method is a preset by name, or a spec `draft/tree/verify` whose empty or missing parts take their defaults:
`ngram/chain:8`, `disturbed/paths:4x6/cascade`, `ngram//match`.
"""

from __future__ import annotations

from dataclasses import dataclass

from branchwise.draft import DRAFTERS, Drafter, build_drafter
from branchwise.errors import UnknownName, UsageError
from branchwise.registry import nearest, split_spec
from branchwise.verify import VERIFIERS, Verifier, check_pairing


@dataclass(frozen=True)
class Method:
    name: str
    draft: str
    tree: str | None = None
    verify: str = "match"
    paper: str = ""

    def build(self) -> tuple[Drafter, Verifier]:
        """A fresh drafter and verifier; a pair that would not be lossless is refused."""
        drafter, verifier = build_drafter(self.draft, self.tree), VERIFIERS.build(self.verify)
        check_pairing(verifier, drafter.draw, drafter.name)
        return drafter, verifier


PLAIN = Method("plain", "none")
PRESETS = {
    method.name: method
    for method in (PLAIN, Method("ngram", "ngram", "chain:8", paper="Saxena, Prompt Lookup Decoding, 2023"))
}


def find_method(spec: str) -> Method:
    """The method of a name or of a `draft/tree/verify` spec."""
    if spec in PRESETS:
        return PRESETS[spec]
    draft, *rest = (part.strip() for part in spec.split("/"))
    name, _, _ = split_spec(draft)
    if name not in DRAFTERS:
        known = [*PRESETS, *DRAFTERS]
        raise UnknownName(
            f"Unknown method {spec!r}.{nearest(name, known)} A method is a preset ({', '.join(PRESETS)}) or a spec "
            f"draft/tree/verify with a drafter of {', '.join(sorted(DRAFTERS))}."
        )
    if len(rest) > 2:
        raise UsageError(f"{spec!r} has more than three parts; a method is draft/tree/verify.")
    tree, verify = [*rest, "", ""][:2]
    return Method(spec, draft, tree or None, verify or "match")
