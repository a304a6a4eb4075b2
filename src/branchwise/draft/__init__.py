"""Drafters and tree policies by name, and how a spec becomes one."""

from __future__ import annotations

import inspect
import re
from typing import Any

from branchwise.draft.base import Drafter
from branchwise.errors import PairingError
from branchwise.registry import Registry, split_spec

DRAFTERS = Registry(
    "drafter",
    {
        "auto": "branchwise.draft.auto:AutoDrafter",
        "disturbed": "branchwise.draft.noisy_target:NoisyTarget",
        "fused": "branchwise.draft.lookup.fusion:Fusion",
        "head": "branchwise.draft.head.drafter:HeadDrafter",
        "memories": "branchwise.draft.lookup.memories:DefaultDrafter",
        "model": "branchwise.draft.model.specialists:DraftModel",
        "nested": "branchwise.draft.nested.drafter:NestedDrafter",
        "ngram": "branchwise.draft.lookup.ngram:NGram",
        "none": "branchwise.draft.base:NoDrafter",
        "recycle": "branchwise.draft.recycle.drafter:Recycle",
        "retrieval": "branchwise.draft.lookup.retrieval:Retrieval",
        "stand": "branchwise.draft.lookup.stand:Stand",
        "suffix": "branchwise.draft.lookup.suffix:Suffix",
        "trigram": "branchwise.draft.lookup.trigram:Trigram",
    },
)

TREES = Registry(
    "tree",
    {
        "chain": "branchwise.draft.policies.paths:Chain",
        "fork-lossy": "branchwise.draft.policies.paths:Fork",
        "iid": "branchwise.draft.policies.iid:Independent",
        "paths": "branchwise.draft.policies.paths:Paths",
        "ranks": "branchwise.draft.policies.template:Ranks",
        "rsd-c": "branchwise.draft.policies.rsd:Branching",
        "rsd-s": "branchwise.draft.policies.rsd:Beam",
        "dynamic": "branchwise.draft.policies.dynamic:Dynamic",
        "threshold": "branchwise.draft.policies.dynamic:Threshold",
        "graph": "branchwise.draft.policies.topk:Graph",
        "paced": "branchwise.draft.policies.adaptive:AdaptiveSize",
        "paced-ranks": "branchwise.draft.policies.adaptive:AdaptiveRanks",
        "puct": "branchwise.draft.policies.puct:Puct",
        "template": "branchwise.draft.policies.template:Template",
        "topk": "branchwise.draft.policies.topk:TopK",
    },
)


STOPS = Registry(
    "stop",
    {
        "confidence": "branchwise.draft.policies.stop:Confidence",
        "entropy": "branchwise.draft.policies.stop:Entropy",
        "learned": "branchwise.draft.policies.stop:Learned",
    },
)


def build_policy(tree: str) -> Any:
    """The policy of a spec such as `chain:8`, or with a rule that stops early, `chain:12,stop=confidence:0.4`."""
    shape, *stops = re.split(r"[:,]\s*stop=", tree, maxsplit=1)  # the rest belongs to the stop, commas included
    policy = TREES.build(shape)
    return STOPS.build(stops[0]).applied_to(policy, shape) if stops else policy


def build_drafter(draft: str, tree: str | None = None) -> Drafter:
    """The drafter of a spec such as `ngram:max=4`, with the tree policy of a spec such as `chain:8`."""
    policy = None if tree is None else build_policy(tree)
    name, _, _ = split_spec(draft)
    if policy is not None and "tree" not in inspect.signature(DRAFTERS.find(name)).parameters:
        raise PairingError(f"Drafter {name!r} grows no tree; leave out --tree {tree}.")
    drafter: Any = DRAFTERS.build(draft, tree=policy)
    return drafter  # type: ignore[no-any-return]
