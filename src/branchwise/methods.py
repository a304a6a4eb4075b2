"""Methods: a drafter, the tree it grows and the verifier that accepts its tokens, under one name.

A method is the name of a preset (presets.toml) or a spec `draft/tree/verify` whose empty or missing parts take their
defaults: `ngram/chain:8`, `model/paths:4x6/cascade`, `ngram//match`. The drafter `model` runs the user's draft model,
`head` the user's trained head, and `auto` chooses among these two and drafters of its own.
"""

from __future__ import annotations

import tomllib
import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import NamedTuple

from branchwise.draft import DRAFTERS, TREES, build_drafter, build_policy
from branchwise.draft.base import Drafter
from branchwise.errors import LossyWarning, UnknownName, UsageError
from branchwise.registry import nearest, split_spec
from branchwise.verify import VERIFIERS, Verifier, check_pairing

MODEL = "model"
"""the drafter that runs a draft model"""
RETRIEVAL = "retrieval"
"""the drafter that reads an index"""
HEAD = "head"
"""the drafter that runs a trained head"""
NESTED = "nested"
"""the drafter that runs a draft model with exits"""


class Blank(NamedTuple):
    """A part that a drafter needs and only the user can name."""

    what: str
    option: str
    value: str
    """the placeholder in a command line"""
    hint: str


BLANKS = {
    MODEL: Blank("a draft model", "--draft-model", "ID", "such as a smaller model with the tokenizer of the target"),
    RETRIEVAL: Blank("an index", "--index", "DIR", "a folder that `branchwise index build` made"),
    HEAD: Blank("a trained head", "--head", "FILE", "a file that `branchwise train head --model MODEL` wrote"),
    NESTED: Blank(
        "a draft model with exits", "--draft-model", "FOLDER", "a folder that `branchwise train nested` made"
    ),
}
"""the drafters that need a model, a folder or a file, each with that part"""
FUSED = "fused:"
AUTO = "auto"
"""the drafter that chooses among all sources that it has"""
CHOICES = (MODEL, HEAD)
"""further drafters that `auto` may choose from if the user names their part"""
DEFAULT = "default"
"""the method if the user asks for none"""
LOSSY = "lossy"
"""a part of the name of every verifier that changes the distribution"""
DISTANCES = {
    "lossy-longest": (0.171, "fork-lossy:2x3,stop=confidence:0.7 over 3 tokens, every outcome of 6 small distributions")
}
"""for lossy verifiers, the largest distance from the target's distribution that `branchwise audit methods` found, and
the trees on which it did"""


@dataclass(frozen=True)
class Method:
    name: str
    draft: str
    tree: str | None = None
    verify: str = "match"
    paper: str = ""
    """a short reference, with the arXiv id"""
    about: str = ""
    """a description in one sentence"""

    @property
    def lossless(self) -> bool:
        """Whether texts have the target's distribution."""
        return bool(VERIFIERS.find(split_spec(self.verify)[0]).lossless)

    @property
    def blanks(self) -> list[str]:
        """The drafters whose model, index or head the user has not named yet."""
        named = (split_spec(spec) for spec in members_of(self.draft))
        return [name for name, positional, _ in named if name in BLANKS and not positional]

    @property
    def takes(self) -> list[str]:
        """The drafters whose model, index or head the user may name: those that it needs, or may choose from."""
        drafter, named, _ = split_spec(self.draft)
        if drafter != AUTO:
            return self.blanks
        return [name for name in CHOICES if not any(f"{name}(" in part for part in named)]

    @property
    def needs_draft_model(self) -> bool:
        return MODEL in self.blanks or NESTED in self.blanks

    @property
    def needs_index(self) -> bool:
        return RETRIEVAL in self.blanks

    @property
    def needs_head(self) -> bool:
        return HEAD in self.blanks

    @property
    def command(self) -> str:
        """The command line that runs the method."""
        options = {name: f"{BLANKS[name].option} {BLANKS[name].value}" for name in self.takes}
        words = [f" {said}" if name in self.blanks else f" [{said}]" for name, said in options.items()]
        return f"branchwise generate PROMPT --method {self.name}{''.join(words)}"

    def drafting_with(
        self, draft_model: str | None = None, index: str | None = None, head: str | None = None
    ) -> Method:
        """This method with the draft model of a spec `ID[,temperature=…]`, an index `DIR[,max=…]`, or a trained head
        `FILE[,table=…]`.

        Their options override the method's own.
        """
        given = _by_drafter(draft_model, index, head)
        for name, (what, option, _, hint) in BLANKS.items():
            taken = any(BLANKS[other].option == option for other in self.takes)
            if given[name] is not None and not taken:
                raise UsageError(f"Method {self.name!r} drafts without {what}; leave out {option}.")
            if not given[name] and (name in self.blanks or (given[name] is not None and name in self.takes)):
                raise UsageError(f"Method {self.name!r} needs {what}; name one with {option}, {hint}.")
        if split_spec(self.draft)[0] == AUTO:
            joined = [*split_spec(self.draft)[1], *(f"{name}({given[name]})" for name in CHOICES if given[name])]
            return replace(self, draft=":".join([AUTO, *filter(None, ["+".join(joined)])]))
        specs = []
        for spec in members_of(self.draft):
            name, positional, options = split_spec(spec)
            if name in self.blanks and not positional:
                said = split_spec(f"{name}:{given[name]}")[2]
                own = [f"{key}={value}" for key, value in options.items() if key not in said]
                spec = f"{name}:{','.join([given[name] or '', *own])}"
            specs.append(spec)
        if not self.draft.startswith(FUSED):
            return replace(self, draft=specs[0])
        split = (spec.partition(":") for spec in specs)
        fused = "+".join(f"{name}({options})" if options else name for name, _, options in split)
        settings = "".join(f",{key}={value}" for key, value in split_spec(self.draft)[2].items())
        return replace(self, draft=FUSED + fused + settings)

    def warn_if_lossy(self) -> None:
        """Warn if the method is lossy; every function that loads or runs a method calls this.

        The warning is always raised at the same line and does not name the drafter, so Python's filters show it once.
        """
        if self.lossless:
            return
        text = f"Verifier {self.verify!r} is lossy: it changes the distribution of the model's texts."
        if (name := split_spec(self.verify)[0]) in DISTANCES:
            distance, world = DISTANCES[name]
            text += (
                f" Its distance from the target's distribution was measured on {world}, and is up to {distance:.3f} "
                f"there; for {self.tree or 'other trees'} on the vocabulary of a model it is not known."
            )
        else:
            text += " How far it is from the target's distribution was not measured."
        warnings.warn(text, LossyWarning, stacklevel=1)

    def build(self) -> tuple[Drafter, Verifier]:
        """A new drafter and a new verifier; a pair that would not be lossless is refused."""
        drafter, verifier = build_drafter(self.draft, self.tree), VERIFIERS.build(self.verify)
        check_pairing(verifier, drafter.draw, drafter.name)
        return drafter, verifier


_TABLE = tomllib.loads(Path(__file__).with_name("presets.toml").read_text(encoding="utf-8"))
PRESETS = {name: Method(name, **parts) for name, parts in _TABLE.items()}
PLAIN = PRESETS["plain"]
"""the target alone, the baseline of all comparisons"""


def find_method(spec: str, draft_model: str | None = None, index: str | None = None, head: str | None = None) -> Method:
    """The method of a name or a spec `draft/tree/verify`, with those of draft model, index and head that it takes."""
    method = find_any(spec)
    options = {BLANKS[name].option for name in method.takes}
    values = {"--draft-model": draft_model, "--index": index, "--head": head}
    return method.drafting_with(*(value if option in options else None for option, value in values.items()))


def find_methods(
    specs: Sequence[str], draft_model: str | None = None, index: str | None = None, head: str | None = None
) -> list[Method]:
    """Methods that share a draft model, an index and a head; each of these must be taken by a method."""
    taken = {BLANKS[name].option for spec in specs for name in find_any(spec).takes}
    for name, value in _by_drafter(draft_model, index, head).items():
        if value is not None and BLANKS[name].option not in taken:
            raise UsageError(f"No method here drafts with {BLANKS[name].what}; leave out {BLANKS[name].option}.")
    return [find_method(spec, draft_model, index, head) for spec in specs]


def choose_method(
    method: str | Method | None = None,
    *,
    draft: str | None = None,
    tree: str | None = None,
    verify: str | None = None,
    draft_model: str | None = None,
    index: str | None = None,
    head: str | None = None,
) -> Method:
    """The method that a user asks for: by name, or by its parts."""
    if method is not None:
        for option, value in (("draft", draft), ("tree", tree), ("verify", verify)):
            if value is not None:
                raise UsageError(
                    f"--method {method if isinstance(method, str) else method.name} has a drafter, a tree and a "
                    f"verifier of its own; leave out --{option}, or say all three in its place."
                )
        if isinstance(method, str):
            return find_methods([method], draft_model, index, head)[0]
        named = draft_model is not None or index is not None or head is not None
        return method.drafting_with(draft_model, index, head) if named else method
    values = {MODEL: draft_model, RETRIEVAL: index, HEAD: head}
    said = [name for name, value in values.items() if value is not None]
    if draft is not None and said and not Method("", draft).takes:
        raise UsageError(f"Give --draft or {BLANKS[said[0]].option}, not both.")
    default = PRESETS[DEFAULT]
    chosen_from = index is None and verify in (None, default.verify)
    if draft is None and tree is None and (chosen_from or not said):
        default = default.drafting_with(draft_model, head=head)
        return default if verify is None else replace(default, name=f"{DEFAULT}//{verify}", verify=verify)
    if draft is None:
        draft = FUSED + "+".join(said) if len(said) > 1 else next(iter(said), "ngram")
    name = "/".join(part or "" for part in (draft, tree, verify)).rstrip("/")
    chosen = Method(name, draft, tree, verify or "match")
    return chosen.drafting_with(draft_model, index, head) if chosen.takes else chosen


def find_any(spec: str) -> Method:
    """The method of a name or a spec, whose draft model, index or head may not be named yet."""
    if spec in PRESETS:
        return PRESETS[spec]
    parts = _split(spec)
    name, _, _ = split_spec(parts[0])
    if name not in DRAFTERS:
        raise UnknownName(
            f"Unknown method {spec!r}.{nearest(name, [*PRESETS, *DRAFTERS])} A method is a preset, which branchwise "
            f"methods lists, or a spec draft/tree/verify with a drafter of {', '.join(sorted(DRAFTERS))}."
        )
    if len(parts) > 3:
        raise UsageError(f"{spec!r} has more than three parts; a method is draft/tree/verify.")
    draft, tree, verify = [*parts, "", ""][:3]
    return Method(spec, draft, tree or None, verify or "match")


def largest_tree(methods: Sequence[Method]) -> int:
    """Nodes below the root of the largest tree that one of the methods names; 0 if none does."""
    return max((build_policy(method.tree).largest for method in methods if method.tree), default=0)


def table() -> str:
    """The presets as a Markdown table."""
    lines = ["| `--method` | paper | drafter | tree | verifier | distribution |", "|---|---|---|---|---|---|"]
    for method in PRESETS.values():
        parts = (f"`{part}`" if part else "" for part in (method.draft, method.tree, method.verify))
        probs = "kept" if method.lossless else "**changed (lossy)**"
        lines.append(f"| `{method.name}` | {method.paper} | {' | '.join(parts)} | {probs} |")
    return "".join(f"{line}\n" for line in lines)


def members_of(draft: str) -> list[str]:
    """The specs of the drafters of a fusion, or the one spec of another drafter."""
    if not draft.startswith(FUSED):
        return [draft]
    from branchwise.draft.lookup.fusion import split_members

    return split_members(",".join(split_spec(draft)[1]))


def _by_drafter(draft_model: str | None, index: str | None, head: str | None) -> dict[str, str | None]:
    """The parts that the user names, by the drafters that run them."""
    return {MODEL: draft_model, RETRIEVAL: index, HEAD: head, NESTED: draft_model}


FILES = (
    *(f"{name}{mark}" for name in ("model", "retrieval", "head", "nested", "trigram") for mark in ":("),
    *("template:", "ranks:", "learned:"),
)
"""the parts of a spec after which a file name, which may contain slashes, can follow"""


def _split(spec: str) -> list[str]:
    """`draft/tree/verify` as its parts. Slashes in the name of a model or a file do not end a part.

    Such a name ends where the rest is a tree, or a tree and a verifier, either of which may be empty. So a folder may
    be called `match`. If the last folder of a name is called like a tree, two slashes end the name: `model:a/chain//`.
    """
    words = [word.strip() for word in spec.split("/")]
    if not _names_file(words[0]):
        return [words[0], *(_tree_and_verify(words[1:]) or words[1:])]
    ends = range(1, len(words))
    for end in ends:
        if (rest := _tree_and_verify(words[end:])) is not None:
            return ["/".join(words[:end]), *rest]
    # No folder is called `chain:8`: what follows is meant as a verifier, and the error should say that it is none.
    for end in ends:
        if ":" in words[end] and split_spec(words[end])[0] in TREES:
            return ["/".join(words[:end]), *words[end:]]
    return [spec.strip()]


def _tree_and_verify(words: list[str]) -> list[str] | None:
    """Words between slashes as [tree, verify] or [tree], each of which may be empty; None if they are not these."""
    ways = [["/".join(words)]]
    if len(words) > 1 and (not words[-1] or split_spec(words[-1])[0] in VERIFIERS):
        ways.insert(0, ["/".join(words[:-1]), words[-1]])
    for tree, *verify in ways:
        if not tree or (split_spec(tree)[0] in TREES and ("/" not in tree or _names_file(tree))):
            return [tree, *verify]
    return None


def _names_file(part: str) -> bool:
    return any(kind in part for kind in FILES)
