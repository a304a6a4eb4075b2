"""Trees of up to 1,024 nodes: drafted whole, scored as the model itself would, and never cut without a word."""

from __future__ import annotations

import warnings

import pytest
import torch

from branchwise.backends.base import LARGEST, USUAL_NODES, nodes_for
from branchwise.backends.transformers.target import TransformersTarget
from branchwise.core.batch import TreeBatch
from branchwise.core.sampling import SamplingParams
from branchwise.core.tree import DraftTree
from branchwise.draft import TREES, build_drafter, build_policy
from branchwise.draft.base import Budget
from branchwise.draft.head.drafter import HeadDrafter
from branchwise.draft.model.drafter import ModelDrafter
from branchwise.draft.sampler import SeededSampler
from branchwise.engine import Engine, Request
from branchwise.errors import CutWarning, UsageError
from branchwise.llm import load
from branchwise.methods import find_any, largest_tree
from branchwise.testing import ToyTarget
from branchwise.verify import VERIFIERS
from tests.heads import random_head
from tests.strategies import grown, random_rule
from tests.test_model_drafter import tiny, weights

SIZES = {
    "chain:12": 12,
    "paths:3x4": 12,
    "paths:3x4@2": 8,
    "rsd-c:3,2,1": 15,
    "rsd-s:3x4": 12,
    "iid:2,2": 6,
    "dynamic:20": 20,
    "threshold:0.000001,20": 20,
    "topk:20,depth=4,width=8": 20,
    "template:mcsd": 28,
    "ranks:mcsd": 28,
    "fork-lossy:3x4": 12,
    "graph:20,width=4,depth=6": 20,
}


@pytest.mark.parametrize("spec", SIZES)
def test_a_policy_says_how_large_its_trees_are(spec: str) -> None:
    assert build_policy(spec).largest == SIZES[spec]
    assert build_policy(f"{spec},stop=entropy:9").largest == SIZES[spec] if build_policy(spec).stoppable else True
    tree = grown(spec, random_rule(9, 1, spread=0.3), SeededSampler(3, 0), Budget(99, 99))
    merged = spec.startswith(("paths", "iid", "graph"))
    assert len(tree) - 1 <= SIZES[spec] if merged else len(tree) - 1 == SIZES[spec]


def test_every_policy_does() -> None:
    others = {"paced": "paced:20", "paced-ranks": "paced-ranks:mcsd", "puct": "puct:20"}
    assert {spec.partition(":")[0] for spec in SIZES} | set(others) == set(TREES)
    assert [build_policy(spec).largest for spec in others.values()] == [20, 28, 20]


def test_a_pass_has_room_for_the_trees_of_its_methods() -> None:
    assert [nodes_for(size) for size in (0, 127, 128, 768, 5000)] == [USUAL_NODES, 128, 129, 769, LARGEST]
    methods = [find_any("plain"), find_any("dyspec"), find_any("model/dynamic:768/rrs")]
    assert largest_tree(methods) == 768
    assert largest_tree([find_any("plain")]) == 0


def engine(nodes: int, spec: str, most: Budget | None = None) -> Engine:
    return Engine(ToyTarget(9, max_nodes=nodes), build_drafter("disturbed:1", spec), VERIFIERS.build("match"), most)


def test_a_tree_that_is_cut_is_spoken_of() -> None:
    with pytest.warns(CutWarning) as told:
        engine(128, "dynamic:768").warn()
    [text] = (str(one.message) for one in told)
    assert text == (
        "Trees of 768 nodes are cut to 127: the target scores 128 nodes in a pass, the root included; "
        "load it with max_nodes=769 (--max-nodes 769)."
    )
    with pytest.warns(CutWarning, match="cut to 1023.*no pass scores more than 1024"):
        engine(1024, "dynamic:2000").warn()
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine(769, "dynamic:768").warn()
        engine(128, "dynamic:768", Budget(25, 9)).warn()  # as the user wants it
        engine(128, "paths:4x6").warn()


def test_a_head_that_grows_small_trees_on_a_host_is_not_said_to_be_cut() -> None:
    target = ToyTarget(max_nodes=32)
    drafter = HeadDrafter(random_head(target.info))
    assert drafter.largest > 31, "on a GPU its trees are larger"
    made = Engine(target, drafter, VERIFIERS.build("match"))
    assert 0 < drafter.largest < 31
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        made.warn()


@pytest.mark.parametrize("nodes", [1, 1025])
def test_a_pass_of_a_size_that_there_is_not_is_refused(nodes: int) -> None:
    with pytest.raises(UsageError, match=f"at least 2 and at most 1024, not {nodes}"):
        load(max_nodes=nodes)


def test_a_tree_of_a_thousand_nodes_is_scored_as_the_model_itself_scores_it() -> None:
    model = tiny(0)
    target = TransformersTarget(model, slots=1, context=64, max_nodes=LARGEST)
    policy = build_policy("dynamic:1023")
    tree = grown(policy, random_rule(9, 1, spread=2.0), SeededSampler(1, 0), Budget(LARGEST, 40), root=3)
    assert len(tree) == LARGEST
    sequence = engine_text(target)
    tree.tokens[0] = sequence.root
    logits = target.score([sequence], TreeBatch([DraftTree(tree.tokens, tree.parents)])).logits[0]
    for node in (0, 500, 1023):
        path = [*sequence.tokens, *tree.tokens[tree.path(node)[1:]].tolist()]
        own = model(torch.tensor([path])).logits[0, -1]
        torch.testing.assert_close(logits[node], own, atol=1e-4, rtol=1e-4)


def engine_text(target: TransformersTarget):  # type: ignore[no-untyped-def]
    """A text whose prompt is in the cache."""
    running = Engine(target, build_drafter("none"), VERIFIERS.build("match"))
    generation = running.submit(Request((1, 2, 3), SamplingParams(), max_new_tokens=30))
    running.step()
    return generation.sequence


def test_a_draft_model_grows_a_tree_of_hundreds_of_nodes_and_the_text_stays() -> None:
    def text(drafter, nodes: int) -> tuple[list[int], int]:  # type: ignore[no-untyped-def]
        target = TransformersTarget(tiny(0), slots=1, context=64, max_nodes=nodes)
        running = Engine(target, drafter, VERIFIERS.build("match" if drafter.name == "none" else "rrs"))
        found = running.submit(Request((1, 2, 3), SamplingParams(), max_new_tokens=6))
        largest = 0
        while running.busy:
            running.step()
            largest = max([largest, *(len(tree) for tree in getattr(drafter, "_drafted", []))])
        return found.token_ids, largest

    drafter = ModelDrafter(weights(), tree=build_policy("dynamic:300"))
    written, largest = text(drafter, nodes_for(drafter.largest))
    assert largest == 301
    assert written == text(build_drafter("none"), 128)[0]
