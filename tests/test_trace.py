"""What steps looked like, for requests that ask for it: on a host, ahead of it, and for trees laid on a device."""

from __future__ import annotations

import pytest
import torch

from branchwise.backends.toy import ToyTarget
from branchwise.core.batch import TreeBatch
from branchwise.core.sampling import SamplingParams
from branchwise.core.tree import DeviceShape, LaidTree
from branchwise.draft import build_drafter
from branchwise.draft.base import Drafter
from branchwise.engine import Engine, Generation, Request
from branchwise.engine.trace import read, see, trace_of
from branchwise.verify import VERIFIERS, Verdict, Verdicts
from tests.doubles import PipelinedDouble, PipelinedToy

VOCABULARY = 8
PROMPT = (1, 2, 3, 1, 2)


def write(target: ToyTarget, drafter: Drafter, *, verify: str = "match", trace: bool = True) -> Generation:
    engine = Engine(target, drafter, VERIFIERS.build(verify))
    request = Request(PROMPT, SamplingParams(temperature=1.0, seed=3), 30, trace=trace, logprobs=True)
    generation = engine.submit(request)
    while engine.busy:
        engine.step()
    return generation


def check(generation: Generation) -> None:
    """Steps and tokens tell the same story, and p is the probability that logprobs say."""
    emitted, probs, tokens = [], [], generation.token_ids
    for step in generation.traces:
        path = [step.nodes[node] for node in step.path]
        assert path[0] == (-1, [*PROMPT, *emitted][-1], "", None, None)
        assert [node.parent for node in path[1:]] == step.path[:-1]
        emitted += [*(node.token for node in path[1:]), step.token][: step.emitted]
        probs += [*(node.p for node in path[1:]), step.p][: step.emitted]
    assert emitted == tokens
    wanted = torch.tensor([piece.logprob for piece in generation.pieces]).exp()
    torch.testing.assert_close(torch.tensor(probs), wanted, rtol=1e-4, atol=1e-6)
    assert len(generation.traces) == generation.stats.steps
    assert sum(len(step.nodes) - 1 for step in generation.traces) == generation.stats.drafted_tokens


@pytest.mark.parametrize("padded", [False, True], ids=["as drafted", "padded"])
def test_a_trace_tells_what_the_target_thinks_of_every_node(padded: bool) -> None:
    generation = write(ToyTarget(VOCABULARY, padded=padded), build_drafter("ngram:max=2,min=1"))
    check(generation)
    assert generation.stats.accepted_tokens
    assert {node.source for step in generation.traces for node in step.nodes[1:]} == {"ngram"}


def test_a_trace_of_the_pipelined_step_is_that_of_its_own_pass() -> None:
    """The next pass is made before the host reads the verdict, and must not show in this step."""
    target = PipelinedToy(VOCABULARY)
    generation = write(target, PipelinedDouble(VOCABULARY))
    check(generation)
    assert target.used


def test_what_was_drawn_has_its_q() -> None:
    generation = write(ToyTarget(VOCABULARY), build_drafter("disturbed", "rsd-c:3,2"), verify="rrs")
    check(generation)
    below: dict[tuple[int, int], float] = {}
    for number, step in enumerate(generation.traces):
        for node in step.nodes[1:]:
            assert node.q is not None
            below[number, node.parent] = below.get((number, node.parent), 0.0) + node.q
    assert all(0 < total <= 1 + 1e-5 for total in below.values())


def test_looking_is_no_part_of_the_time_of_a_step_and_nobody_pays_who_does_not_ask() -> None:
    generation = write(ToyTarget(VOCABULARY), build_drafter("ngram"))
    assert set(generation.traces[0].seconds) == {"draft", "score", "verify", "commit"} == set(generation.stats.seconds)
    assert not write(ToyTarget(VOCABULARY), build_drafter("ngram"), trace=False).traces


def test_the_shape_of_a_tree_that_was_laid_on_a_device_is_read_from_there() -> None:
    """Its host-side parents are those of a stand-in, and padding lies between its nodes."""
    parents = torch.tensor([-1, 0, -1, 1, 0])  # node 2 is padding
    tokens = torch.tensor([5, 6, 0, 7, 2])
    bits = torch.tensor([[1], [3], [0], [11], [17]], dtype=torch.int32)
    tree = LaidTree.of(tokens, DeviceShape(parents, torch.tensor([0, 1, 0, 2, 1]), bits), depth=2)
    batch = TreeBatch([tree])
    logits = torch.randn(1, 5, VOCABULARY, generator=torch.Generator().manual_seed(0))
    found = Verdicts(torch.tensor([[0, 1, 3, -1]]), torch.tensor([4]))
    [row] = read(see(batch, logits, found))
    step = trace_of(row, tree, Verdict((0, 1, 3), 4), 3, "head", {}, 1)
    probs = logits[0].softmax(dim=-1)
    assert [(node.parent, node.token, node.source) for node in step.nodes] == [
        (-1, 5, ""),
        (0, 6, "head"),
        (1, 7, "head"),
        (0, 2, "head"),
    ]
    assert step.path == [0, 1, 2]
    wanted = [probs[0, 6], probs[1, 7], probs[0, 2]]
    assert [node.p for node in step.nodes[1:]] == pytest.approx([float(p) for p in wanted])
    assert step.p == pytest.approx(float(probs[3, 4]))
