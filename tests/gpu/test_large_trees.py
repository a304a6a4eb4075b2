"""Trees of up to 1,024 nodes on a GPU: beyond the sizes that are usually recorded, and as exact."""

from __future__ import annotations

import pytest
import torch

from branchwise.backends.base import LARGEST, nodes_for
from branchwise.backends.transformers.target import TransformersTarget
from branchwise.core.batch import TreeBatch
from branchwise.core.sampling import SamplingParams
from branchwise.core.tree import DraftTree
from branchwise.draft import build_drafter, build_policy
from branchwise.draft.base import Budget, Drafter
from branchwise.draft.model.draft_model import Weights
from branchwise.draft.model.drafter import ModelDrafter
from branchwise.draft.sampler import SeededSampler
from branchwise.engine import Engine, Request
from branchwise.verify import VERIFIERS
from tests.strategies import grown, random_rule
from tests.test_model_drafter import tiny

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="no CUDA device")


def test_a_tree_of_a_thousand_nodes_is_scored_as_the_model_itself_scores_it() -> None:
    model = tiny(0).cuda()
    target = TransformersTarget(model, slots=1, context=64, max_nodes=LARGEST)
    tree = grown("dynamic:1023", random_rule(9, 1, spread=2.0), SeededSampler(1, 0), Budget(LARGEST, 40))
    assert len(tree) == LARGEST
    engine = Engine(target, build_drafter("none"), VERIFIERS.build("match"))
    generation = engine.submit(Request((1, 2, 3), SamplingParams(), max_new_tokens=30))
    engine.step()
    sequence = generation.sequence
    tree.tokens[0] = sequence.root
    logits = target.score([sequence], TreeBatch([DraftTree(tree.tokens, tree.parents)], "cuda")).logits[0]
    for node in (0, 300, 700, 1023):
        path = [*sequence.tokens, *tree.tokens[tree.path(node)[1:]].tolist()]
        own = model(torch.tensor([path], device="cuda")).logits[0, -1]
        torch.testing.assert_close(logits[node].float(), own.float(), atol=2e-3, rtol=2e-3)


@pytest.mark.parametrize("spec", ["dynamic:768", "threshold:0.0005,768"])
def test_a_draft_model_grows_hundreds_of_nodes_and_greedy_texts_stay(spec: str) -> None:
    def text(drafter: Drafter, nodes: int) -> tuple[list[int], int]:
        target = TransformersTarget(tiny(0).cuda(), slots=1, context=64, max_nodes=nodes)
        engine = Engine(target, drafter, VERIFIERS.build("match" if drafter.name == "none" else "rrs"))
        found = engine.submit(Request((1, 2, 3), SamplingParams(), max_new_tokens=12))
        largest = 0
        while engine.busy:
            engine.step()
            largest = max(largest, *(step.nodes for step in found.stats.each), 0)
        return found.token_ids, largest

    drafter = ModelDrafter(Weights("tiny draft", tiny(1, layers=1).cuda(), None), tree=build_policy(spec))
    written, largest = text(drafter, nodes_for(drafter.largest))
    assert largest > 500
    assert written == text(build_drafter("none"), 128)[0]
