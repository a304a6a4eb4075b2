"""The audit of methods: tree policy and verifier together, through every draft and every coin.

A method is audited with its own policy and its own rule, on a tree small enough to enumerate and on small distributions
in place of the draft model's, or of the trained head's. A draft model may change its distributions before it draws from
them (temperature, remembered distributions of the target). That makes other distributions, and those of the instances
are as good as any. A trimmed draft model, and a trained head with its table, know only some tokens: their distributions
have zeros, so one token is cut out for them. `branchwise audit model --head FILE` audits a head itself.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from branchwise.audit.exact import TOLERANCE, emitted, emitted_by_forks
from branchwise.audit.instances import SIMILARITIES, Drafts, Instance
from branchwise.core.tree import Draw
from branchwise.draft import DRAFTERS, TREES, build_drafter, build_policy
from branchwise.draft.base import Budget
from branchwise.draft.builder import TreeBuilder, TreeCoroutine, TreePolicy
from branchwise.draft.head.drafter import HeadDrafter
from branchwise.draft.lookup.ngram import NGram
from branchwise.draft.policies.stop import Stopping
from branchwise.draft.sampler import DraftSampler
from branchwise.draft.tree_drafter import TreeDrafter
from branchwise.errors import UsageError
from branchwise.methods import HEAD, MODEL, Method
from branchwise.models import DEFAULT_MODEL
from branchwise.registry import split_spec
from branchwise.verify import VERIFIERS, check_pairing

VOCABULARY = 3
SEEDS = (0, 1)
"""the seeds of the instances of each similarity"""
DEPTH = 3
"""the depth of the instances; no tree is deeper"""
FORK = (2, 3)
"""branches and depth of a lossy fork: deep enough that a stop, which is asked from the second level on, can end it;
`branchwise.methods.DISTANCES` has what was measured on it"""

SMALL = {
    "chain": "chain:3",
    "paths": "paths:2x2",
    "rsd-c": "rsd-c:2,2",
    "iid": "iid:2,2",
    "rsd-s": "rsd-s:2x2",
    "dynamic": "dynamic:4",
    "threshold": "threshold:0.15,4",
    "topk": "topk:4,depth=2,width=2",
    "paced": "paced:4,depth=2,width=2",
    "graph": "graph:5,width=2,depth=3,repeat=0",
    "puct": "puct:4,simulations=20,length=2",
    "ranks": "ranks:mcsd",
    "paced-ranks": "paced-ranks:mcsd",
    "template": "template:sequoia-24",
    "fork-lossy": f"fork-lossy:{FORK[0]}x{FORK[1]}",
}
"""for every policy a tree with few nodes; a template keeps its first levels"""
DELAYED = "paths:2x3@1"
STOP = "confidence:0.7"
"""chosen for three tokens, so that levels are often unsure: a stop that never stops would prove nothing"""
FEW = Budget(nodes=25, depth=2)
"""the budget of a template"""


@dataclass(frozen=True)
class MethodAudited:
    """What the audit of a method found, over all instances."""

    method: Method
    tree: str
    """the tree that was enumerated"""
    tv: float
    """the largest total-variation distance of the emitted distribution from the target's"""
    block_efficiency: float | None = None
    """expected tokens per step, the mean over the instances"""
    drafts: int | None = None
    """the number of trees that can be drafted, over all instances"""

    @property
    def lossless(self) -> bool:
        return self.tv < TOLERANCE

    @property
    def kept(self) -> bool:
        """Whether the method does what its name says: only a method called lossy may change the distribution."""
        return self.lossless or not self.method.lossless

    @property
    def verdict(self) -> str:
        return "LOSSLESS" if self.lossless else "NOT LOSSLESS" if self.method.lossless else "LOSSY"

    def as_dict(self) -> dict[str, Any]:
        return {
            "method": self.method.name,
            "tree": self.tree,
            "verify": self.method.verify,
            "verdict": self.verdict,
            "tv": self.tv,
            "block_efficiency": self.block_efficiency,
            "drafts": self.drafts,
            "instances": len(SIMILARITIES) * len(SEEDS),
            "vocabulary": VOCABULARY,
        }


class Fixed(TreePolicy):
    """A policy that draws nothing, in place of a drafter without distributions, such as `ngram`."""

    draw = Draw.FIXED

    def __init__(self, *tokens: int) -> None:
        self.tokens = tokens

    def grow(self, root: int, budget: Budget, sampler: DraftSampler) -> TreeCoroutine:
        tree, node = TreeBuilder([root]), 0
        for token in self.tokens:
            node = tree.add(node, token)
        yield from ()  # a policy is a generator, even if it asks for nothing
        return tree.finish(self.draw)


def audit_method(method: Method) -> MethodAudited:
    if not method.lossless:  # its steps end at a drafted token, so its distribution is computed differently
        policy = build_policy(tree := small(method.tree or "fork-lossy"))
        stop = policy.stop if isinstance(policy, Stopping) else None
        distances = [emitted_by_forks(instance, FORK[0], stop=stop)[0] for instance in instances(method)]
        return MethodAudited(method, tree, max(distances))
    verifier = VERIFIERS.build(method.verify)
    tree, found, count = "", [], 0
    for instance in instances(method):
        tree, drafts = drafted(method, instance)
        check_pairing(verifier, drafts.trees[0].draw, method.name)
        found.append(emitted(verifier, drafts))
        count += len(drafts.trees)
    efficiency = float(np.mean([efficiency for _, efficiency in found]))
    return MethodAudited(method, tree, max(tv for tv, _ in found), efficiency, count)


def instances(method: Method) -> Iterator[Instance]:
    """The small instances of a method: every method, in every audit, has the same seeds."""
    name, _, options = split_spec(method.draft)
    trimmed = name == HEAD or "trim" in options
    for sigma, seed in itertools.product(SIMILARITIES.values(), SEEDS):
        instance = Instance.random(VOCABULARY, DEPTH if method.lossless else FORK[1], 2, sigma, (seed,))
        yield without_last_token(instance) if trimmed else instance


def without_last_token(instance: Instance) -> Instance:
    """The instance with a drafter that does not know the last token."""
    tables = [np.where(np.arange(VOCABULARY) < VOCABULARY - 1, table, 0.0) for table in instance.q]
    return replace(instance, q=tuple(table / table.sum(axis=1, keepdims=True) for table in tables))


def drafted(method: Method, instance: Instance) -> tuple[str, Drafts]:
    """The small tree that stands for the tree of the method, and everything that can be drafted on it."""
    name, _, _ = split_spec(method.draft)
    drafter = DRAFTERS.find(name)
    # An n-gram drafter may copy a chain from the text, with nothing drawn.
    built = build_drafter(method.draft, method.tree) if issubclass(drafter, NGram) else None
    if issubclass(drafter, TreeDrafter) and not (isinstance(built, NGram) and built.copied):
        spec = small(method.tree or default_tree(method.draft))
        if spec.startswith("template"):
            drafts = Drafts.grown(build_policy(spec), instance, FEW)
            return f"{spec}, {drafts.batch.depth} levels", drafts
        return spec, Drafts.grown(build_policy(spec), instance)
    if drafter.draw is not Draw.FIXED:
        raise UsageError(f"Drafter {name!r} cannot be enumerated; use branchwise audit model --draft {method.draft}.")
    if name == "none":
        return "the root alone", Drafts.grown(Fixed(), instance)
    return f"a fixed chain of {DEPTH}", Drafts.grown(Fixed(*range(DEPTH)), instance)


def small(tree: str) -> str:
    """The tree policy of `tree` with few nodes; a stop stays a stop."""
    name, _, options = split_spec(tree)
    if name not in SMALL:
        raise UsageError(f"There is no small tree to stand for {tree}; trees that can be audited: {', '.join(SMALL)}.")
    spec = DELAYED if name == "paths" and "@" in tree else SMALL[name]
    return f"{spec},stop={STOP}" if "stop" in options else spec


def default_tree(draft: str) -> str:
    """The name of the tree that a drafter grows by default."""
    # The tree does not depend on the draft model or the head, so none is loaded.
    name, _, _ = split_spec(draft)
    if name == HEAD:
        grown: TreePolicy = HeadDrafter.default_tree()
    else:
        built: Any = build_drafter(f"{MODEL}:{DEFAULT_MODEL}" if name == MODEL else draft)
        grown = built.tree
    return next(tree for tree in TREES if TREES.find(tree) is type(grown))
