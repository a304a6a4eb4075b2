"""Methods: a drafter, the tree it grows and the verifier that judges it, under one name.

A method is a preset by name, or a spec `draft/tree/verify` whose empty or missing parts take their defaults:
`ngram/chain:8`, `model/paths:4x6/cascade`, `ngram//match`. The drafter `model` is whatever model the user drafts with.
"""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from dataclasses import dataclass, replace

from branchwise.draft import DRAFTERS, TREES, build_drafter
from branchwise.draft.base import Drafter
from branchwise.errors import LossyWarning, UnknownName, UsageError
from branchwise.registry import nearest, split_spec
from branchwise.verify import VERIFIERS, Verifier, check_pairing

MODEL = "model"
"""the drafter that runs a draft model"""
RETRIEVAL = "retrieval"
"""the drafter that looks things up in an index"""
BLANKS = {
    MODEL: ("a draft model", "--draft-model", "such as a smaller model with the tokenizer of the target"),
    RETRIEVAL: ("an index", "--index", "a folder that `branchwise index build` made"),
}
"""drafters that mean nothing without a name that only the user knows: what it is, the option that says it, a hint"""
FUSED = "fused:"
DEFAULT = "default"
"""the method of whoever asks for none"""
LOSSY = "lossy"
"""the word in the name of everything that changes the distribution"""
DISTANCES = {"lossy-longest": (0.208, "fork-lossy:2x2 over 3 tokens, every outcome of 6 small distributions")}
"""how far lossy verifiers are from the target's distribution at most, and on what `branchwise audit methods` measured
it"""


@dataclass(frozen=True)
class Method:
    name: str
    draft: str
    tree: str | None = None
    verify: str = "match"
    paper: str = ""
    """short, with its arXiv id"""
    about: str = ""
    """one sentence"""

    @property
    def lossless(self) -> bool:
        """Whether texts have the target's distribution. A rule that changes it has the word in its name."""
        return LOSSY not in self.verify

    @property
    def blanks(self) -> list[str]:
        """The drafters of which the user has yet to say the name: of a model, or of an index."""
        named = (split_spec(spec) for spec in members_of(self.draft))
        return [name for name, positional, _ in named if name in BLANKS and not positional]

    @property
    def needs_draft_model(self) -> bool:
        return MODEL in self.blanks

    @property
    def needs_index(self) -> bool:
        return RETRIEVAL in self.blanks

    @property
    def command(self) -> str:
        """What runs it."""
        words = [f" {BLANKS[name][1]} {'ID' if name == MODEL else 'DIR'}" for name in self.blanks]
        return f"branchwise generate PROMPT --method {self.name}{''.join(words)}"

    def drafting_with(self, draft_model: str | None = None, index: str | None = None) -> Method:
        """This method with the draft model of a spec `ID[,temperature=…]`, or an index `DIR[,max=…]`.

        Their options come before the method's own.
        """
        given = {MODEL: draft_model, RETRIEVAL: index}
        for name, (what, option, hint) in BLANKS.items():
            if given[name] is not None and name not in self.blanks:
                raise UsageError(f"Method {self.name!r} drafts without {what}; leave out {option}.")
            if not given[name] and name in self.blanks:
                raise UsageError(f"Method {self.name!r} needs {what}; name one with {option}, {hint}.")
        specs = []
        for spec in members_of(self.draft):
            name, positional, options = split_spec(spec)
            if name in self.blanks and not positional:
                said = split_spec(f"{name}:{given[name]}")[2]
                own = [f"{key}={value}" for key, value in options.items() if key not in said]
                spec = f"{name}:{','.join([given[name] or '', *own])}"
            specs.append(spec)
        return replace(self, draft=specs[0] if not self.draft.startswith(FUSED) else FUSED + fuse_specs(specs))

    def warn_if_lossy(self) -> None:
        """Nobody changes the distribution of a model without having been told.

        Whoever loads, joins or runs a method calls this. The place of the warning is always this one, and its sentence
        says nothing of the drafter, so that Python's own filters show it once.
        """
        if not self.lossless:
            warnings.warn(self._changed, LossyWarning, stacklevel=1)

    @property
    def _changed(self) -> str:
        begun = f"Verifier {self.verify!r} is lossy: it changes the distribution of the model's texts."
        measured = DISTANCES.get(split_spec(self.verify)[0])
        if measured is None:
            return f"{begun} How far it is from the target's distribution was not measured."
        distance, world = measured
        here = f"{self.tree or 'other trees'} on the vocabulary of a model"
        return (
            f"{begun} Its distance from the target's distribution was measured on {world}, and is up to "
            f"{distance:.3f} there; for {here} it is not known."
        )

    def build(self) -> tuple[Drafter, Verifier]:
        """A fresh drafter and verifier; a pair that would not be lossless is refused."""
        drafter, verifier = build_drafter(self.draft, self.tree), VERIFIERS.build(self.verify)
        check_pairing(verifier, drafter.draw, drafter.name)
        return drafter, verifier


# Trees have at most 24 nodes below the root, so that methods can be compared at an equal cost of the target. On a real
# pair depth buys more than width, and costs a draft pass a level: a chain is 6 to 8 deep, and a tree of 24 nodes is 6
# deep and about 4 wide. Methods that share a kind of draw share the tree, so that what differs is the verifier.
PLAIN = Method("plain", "none", about="The target alone, one token a pass: what all others are measured against.")
PRESETS = {
    method.name: method
    for method in (
        PLAIN,
        Method(
            "ngram",
            "ngram",
            "chain:8",
            paper="Saxena, Prompt Lookup Decoding, 2023",
            about="Proposes what followed the last tokens where they stood before; needs no model.",
        ),
        Method(
            DEFAULT,
            "memories",
            paper="our own; see memory.md",
            about="What we advise without a draft model: recent predictions and repeated text, as many nodes as pay.",
        ),
        Method(
            "prompt-lookup",
            "ngram:max=3,min=1",
            "chain:10",
            paper="Saxena, Prompt Lookup Decoding, 2023",
            about="What followed the last three, two or one tokens earlier in the text.",
        ),
        Method(
            "token-recycling",
            "recycle",
            "ranks:recycling-80",
            paper="Luo et al., Token Recycling, 2408.08696",
            about="A table of what the target last found likely after each token, on a fixed tree.",
        ),
        # Drawn from what was remembered, so that sampled texts gain by a verifier that reads q.
        Method(
            "stand",
            "stand",
            "template:sequoia-24",
            "traversal",
            "Song et al., STAND, 2506.04708",
            "Averaged distributions after the last four to two tokens, drawn from without replacement.",
        ),
        Method(
            "suffix",
            "suffix",
            "topk:24,depth=24,width=4",
            paper="Hu et al., SAM-Decoding, 2411.10666; Oliaro et al., SuffixDecoding, 2411.04975",
            about="What followed the longest repetition that ends the text, trusted by its length.",
        ),
        Method(
            "rest",
            "retrieval",
            "topk:24,depth=10,width=8",
            paper="He et al., REST, 2311.08252",
            about="What follows the end of the text in an indexed corpus.",
        ),
        Method(
            "aded",
            "trigram",
            "puct:24",
            paper="Liu et al., ADED, 2407.12021",
            about="Three-token statistics that adapt as the text is written, searched like a game tree.",
        ),
        Method(
            "rasd",
            "fused:model+retrieval",
            "topk:24,depth=12,width=8",
            paper="Quan et al., RASD, 2503.03434",
            about="A draft model's tree, with what was retrieved attached where the two agree.",
        ),
        Method(
            "rasd-free",
            "fused:recycle+suffix(min=1)+retrieval",
            "paced:63",
            paper="Quan et al., RASD, 2503.03434",
            about="RASD with a table in the place of the draft model.",
        ),
        Method(
            "speculative",
            MODEL,
            "chain:6",
            "token",
            "Leviathan et al., 2211.17192; Chen et al., 2302.01318",
            "One path, each token accepted or rejected by itself.",
        ),
        # Block verification loses nothing to depth but the draft's time, so its chain is longer.
        Method(
            "block",
            MODEL,
            "chain:8",
            "block",
            "Sun et al., 2403.10444",
            "One path, accepted as a block: the most that one path can give.",
        ),
        # The paper's 4,2,2 has 28 nodes and 3 levels; this one trades width for depth.
        Method(
            "mcsd",
            MODEL,
            "rsd-c:2,2,1,1,1,1",
            "rrs",
            "Yang et al., MCSD, 2401.06706",
            "Distinct tokens at the first levels, tried one after the other.",
        ),
        # The target's distributions come into the draft as statistics, and a level whose every node is unsure is the
        # last.
        Method(
            "improved-mcsd",
            "model:recall=0.3",
            "rsd-c:2,2,1,1,1,1,stop=confidence:0.4",
            "rrs",
            "Lu et al., improved MCSD, 2409.10644",
            "MCSD that remembers the target's distributions as draft statistics and stops where the draft is unsure.",
        ),
        Method(
            "improved-mcsd-lossy",
            MODEL,
            "fork-lossy:4x6",
            "lossy-longest",
            "Lu et al., improved MCSD, 2409.10644",
            "The first tokens are the target's own and the longest branch wins, which changes the distribution.",
        ),
        Method(
            "specinfer",
            MODEL,
            "paths:4x6",
            "mss",
            "Miao et al., SpecInfer, 2305.09781",
            "Independent paths in one tree, tried token by token.",
        ),
        Method(
            "gbv",
            MODEL,
            "paths:4x6",
            "gbv",
            "Thomas and Pal, 2602.16961",
            "The most promising of several independent paths, accepted as a block.",
        ),
        # Of all verifiers of independent paths it accepts most.
        Method(
            "cascade",
            MODEL,
            "paths:4x6",
            "cascade",
            "our own; see how-it-works.md",
            "Block verification of one path after the other: where one stops, the others go on.",
        ),
        Method(
            "rsd-c",
            MODEL,
            "rsd-c:4,1,1,1,1,1",
            "rrs",
            "Jeon et al., RSD, 2402.14160",
            "Distinct first tokens drawn without replacement, a path below each.",
        ),
        # Traversal never accepts less than recursive rejection on the same tree.
        Method(
            "rsd-s",
            MODEL,
            "rsd-s:4x6",
            "traversal",
            "Jeon et al., RSD, 2402.14160",
            "A stochastic beam: distinct prefixes of the whole draft at every level.",
        ),
        Method(
            "traversal",
            MODEL,
            "rsd-c:4,1,1,1,1,1",
            "traversal",
            "Weng et al., 2505.12398",
            "The tree of rsd-c, accepted from the leaves upwards.",
        ),
        Method(
            "dyspec",
            MODEL,
            "dynamic:24",
            "rrs",
            "Xiong et al., DySpec, 2410.11744",
            "The tree grows where a node is most likely to be accepted.",
        ),
        # The paper's choice for n nodes is about 1/n; a lower one spends them all on the first levels.
        Method(
            "dyspec-threshold",
            MODEL,
            "threshold:0.04,24",
            "rrs",
            "Xiong et al., DySpec, 2410.11744",
            "DySpec a level at a time: every node whose value passes a threshold, which is steered to the wanted size.",
        ),
        Method(
            "sequoia",
            MODEL,
            "template:sequoia-24",
            "rrs",
            "Chen et al., Sequoia, 2402.12374",
            "A fixed shape, the best for a measured acceptance; `branchwise tree optimise` makes one for a pair.",
        ),
        # The gain lies between the cost of a draft pass and that of a target pass, as the paper advises.
        Method(
            "opt-tree",
            MODEL,
            "topk:24,depth=8,width=8,gain=0.5",
            "match",
            "Wang et al., OPT-Tree, 2406.17276",
            "The tree of the most probable paths, as deep as one more level pays.",
        ),
        Method(
            "gsd",
            MODEL,
            "graph:24,width=4,depth=6,repeat=1",
            "match",
            "Gong et al., GSD, 2407.16207",
            "Paths that run into the same words share what follows, which is drafted once.",
        ),
        # A quarter of the vocabularies of today, as in the paper.
        Method(
            "vocabtrim",
            "model:trim=32768",
            "chain:8",
            "block",
            "Goel et al., VocabTrim, 2506.22694",
            "The draft model's head knows only the tokens that the target uses most: `branchwise calibrate vocab`.",
        ),
    )
}


def find_method(spec: str, draft_model: str | None = None, index: str | None = None) -> Method:
    """The method of a name or of a `draft/tree/verify` spec; `draft_model` and `index` are for one that needs them."""
    method = find_any(spec)
    return method.drafting_with(
        draft_model if method.needs_draft_model else None, index if method.needs_index else None
    )


def find_methods(specs: Sequence[str], draft_model: str | None = None, index: str | None = None) -> list[Method]:
    """Methods that share a draft model and an index; at least one must want each."""
    for name, value in ((MODEL, draft_model), (RETRIEVAL, index)):
        if value is not None and not any(name in find_any(spec).blanks for spec in specs):
            what, option, _ = BLANKS[name]
            raise UsageError(f"No method here drafts with {what}; leave out {option}.")
    return [find_method(spec, draft_model, index) for spec in specs]


def choose_method(
    method: str | Method | None = None,
    *,
    draft: str | None = None,
    tree: str | None = None,
    verify: str | None = None,
    draft_model: str | None = None,
    index: str | None = None,
) -> Method:
    """What a user asks for: a method, mostly by name, or its parts one by one."""
    if method is not None:
        for option, value in (("draft", draft), ("tree", tree), ("verify", verify)):
            if value is not None:
                name = method if isinstance(method, str) else method.name
                raise UsageError(
                    f"--method {name} has a drafter, a tree and a verifier of its own; leave out --{option}, or say "
                    "all three in its place."
                )
        if isinstance(method, Method):
            named = draft_model is None and index is None
            return method if named else method.drafting_with(draft_model, index)
        return find_methods([method], draft_model, index)[0]
    said = [name for name, value in ((MODEL, draft_model), (RETRIEVAL, index)) if value is not None]
    if draft is not None and said and not Method("", draft).blanks:
        raise UsageError(f"Give --draft or {BLANKS[said[0]][1]}, not both.")
    if draft is None and tree is None and not said:
        return (
            PRESETS[DEFAULT]
            if verify is None
            else replace(PRESETS[DEFAULT], name=f"{DEFAULT}//{verify}", verify=verify)
        )
    if draft is None:
        draft = FUSED + "+".join(said) if len(said) > 1 else next(iter(said), "ngram")
    name = "/".join(part or "" for part in (draft, tree, verify)).rstrip("/")
    chosen = Method(name, draft, tree, verify or "match")
    return chosen.drafting_with(draft_model, index) if said else chosen


def find_any(spec: str) -> Method:
    """The method of a spec as it is written, also where its draft model is not known yet."""
    return PRESETS.get(spec) or _parse(spec)


def table() -> str:
    """The presets as a table of Markdown."""
    lines = ["| `--method` | paper | drafter | tree | verifier | distribution |", "|---|---|---|---|---|---|"]
    for method in PRESETS.values():
        parts = (f"`{part}`" if part else "" for part in (method.draft, method.tree, method.verify))
        probs = "kept" if method.lossless else "**changed (lossy)**"
        lines.append(f"| `{method.name}` | {method.paper} | {' | '.join(parts)} | {probs} |")
    return "".join(f"{line}\n" for line in lines)


def _parse(spec: str) -> Method:
    parts = _split(spec)
    name, _, _ = split_spec(parts[0])
    if name not in DRAFTERS:
        known = [*PRESETS, *DRAFTERS]
        raise UnknownName(
            f"Unknown method {spec!r}.{nearest(name, known)} A method is a preset ({', '.join(PRESETS)}) or a spec "
            f"draft/tree/verify with a drafter of {', '.join(sorted(DRAFTERS))}."
        )
    if len(parts) > 3:
        raise UsageError(f"{spec!r} has more than three parts; a method is draft/tree/verify.")
    draft, tree, verify = [*parts, "", ""][:3]
    return Method(spec, draft, tree or None, verify or "match")


def members_of(draft: str) -> list[str]:
    """The specs of the drafters of a fusion, or the one that there is."""
    if not draft.startswith(FUSED):
        return [draft]
    from branchwise.draft.lookup.fusion import split_members

    return split_members(draft.removeprefix(FUSED))


def fuse_specs(specs: Sequence[str]) -> str:
    """What `members_of` takes apart."""
    split = (spec.partition(":") for spec in specs)
    return "+".join(f"{name}({options})" if options else name for name, _, options in split)


FILES = ("model:", "model(", "retrieval:", "retrieval(", "template:", "ranks:", "learned:")
"""what is followed by a name that may hold slashes of its own"""


def _split(spec: str) -> list[str]:
    """`draft/tree/verify` as its parts. Slashes in the name of a model or a file are no ends of parts.

    Such a name ends where all that follows is a tree, or a tree and a verifier, of which either may be empty. So a
    folder may be called `match`; one that ends like a tree is told from it by two slashes behind it: `model:a/chain//`.
    """
    words = [word.strip() for word in spec.split("/")]
    if not _names_file(words[0]):
        return [words[0], *(_tree_and_verify(words[1:]) or words[1:])]
    ends = range(1, len(words))
    for end in ends:
        if (rest := _tree_and_verify(words[end:])) is not None:
            return ["/".join(words[:end]), *rest]
    # No folder is called `chain:8`: what follows is meant to be a verifier, and is told to be none.
    for end in ends:
        if ":" in words[end] and split_spec(words[end])[0] in TREES:
            return ["/".join(words[:end]), *words[end:]]
    return [spec.strip()]


def _tree_and_verify(words: list[str]) -> list[str] | None:
    """Words between slashes as [tree, verify] or [tree], either of which may be empty; None where they are not that."""
    ways = [["/".join(words)]]
    if len(words) > 1 and (not words[-1] or split_spec(words[-1])[0] in VERIFIERS):
        ways.insert(0, ["/".join(words[:-1]), words[-1]])
    return next((way for way in ways if not way[0] or _is_tree(way[0])), None)


def _is_tree(part: str) -> bool:
    return split_spec(part)[0] in TREES and ("/" not in part or _names_file(part))


def _names_file(part: str) -> bool:
    return any(kind in part for kind in FILES)
