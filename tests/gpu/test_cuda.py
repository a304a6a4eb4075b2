"""The same promises on a CUDA device."""

from __future__ import annotations

import random

import pytest
import torch

from branchwise.backends.transformers.target import TransformersTarget
from branchwise.core.batch import TreeBatch
from branchwise.core.rng import SeededChance, race_on
from branchwise.core.sampling import SamplingParams
from branchwise.core.sequence import SequenceState
from branchwise.core.target_probs import WarpedProbs
from branchwise.draft import build_drafter
from branchwise.engine import Engine, Request
from branchwise.testing import RandomDrafter, TruthDrafter
from branchwise.verify import VERIFIERS, Verdict
from tests.conformance.architectures import VOCABULARY, build, served
from tests.conformance.test_target import assert_scores_equal_own_forward, random_tree

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

SERVED = served()


@pytest.mark.parametrize("family", SERVED)
def test_tree_scores_equal_the_models_own_forward_before_and_after_commits(family: str) -> None:
    model = build(SERVED[family], device="cuda")
    target = TransformersTarget(model, slots=3, max_nodes=12, prefill_chunk=7)
    rng = random.Random(family)
    sequences = [SequenceState([rng.randrange(VOCABULARY) for _ in range(length)]) for length in (23, 1, 12)]
    for sequence in sequences:
        target.open(sequence)
    for _ in range(3):
        trees = [random_tree(rng, sequence.root, rng.randint(1, 9)) for sequence in sequences]
        assert_scores_equal_own_forward(model, target, sequences, trees)
        verdicts = [
            Verdict(tuple(tree.topology.path(rng.randrange(len(tree)))), rng.randrange(VOCABULARY)) for tree in trees
        ]
        target.commit(sequences, verdicts)
        for sequence, tree, verdict in zip(sequences, trees, verdicts, strict=True):
            sequence.tokens += [*tree.tokens[list(verdict.path[1:])].tolist(), verdict.token]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("family", SERVED)
def test_low_precision_passes_the_probe(family: str, dtype: torch.dtype) -> None:
    """Loading compares a batch of trees with the model's own forward."""
    TransformersTarget(build(SERVED[family], dtype, "cuda"), slots=2)


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_speculation_writes_what_plain_decoding_writes(temperature: float) -> None:
    model = build(SERVED["llama"], device="cuda")
    target = TransformersTarget(model, slots=3)
    sampling = SamplingParams(temperature=temperature, seed=3)
    prompts = [(5, 6, 7, 5, 6), (9,), (4, 4, 4, 4)]

    def write(drafter: object) -> dict[tuple[int, ...], list[int]]:
        engine = Engine(target, drafter, VERIFIERS.build("match"))  # type: ignore[arg-type]
        generations = [engine.submit(Request(p, sampling=sampling, max_new_tokens=40)) for p in prompts]
        while engine.busy:
            engine.step()
        return {prompt: generation.token_ids for prompt, generation in zip(prompts, generations, strict=True)}

    plain = write(build_drafter("none"))
    for drafter in (build_drafter("ngram"), RandomDrafter(VOCABULARY), TruthDrafter(plain, VOCABULARY, decoys=1)):
        assert write(drafter) == plain


def test_a_draw_does_not_depend_on_the_device() -> None:
    rng = random.Random(2)
    sequences = [
        SequenceState([1, 2, 3], SamplingParams(temperature=1.0, top_k=20, top_p=0.9, seed=s)) for s in range(6)
    ]
    trees = [random_tree(rng, 3, 10) for _ in sequences]
    logits = torch.randn(6, 10, VOCABULARY)
    seeds = torch.tensor([sequence.seed for sequence in sequences])
    roots = torch.full((6,), 2)
    found = []
    for device in ("cpu", "cuda"):
        batch = TreeBatch(trees, device)
        probs = WarpedProbs(logits.to(device), batch, sequences)
        chance = SeededChance(seeds.to(device), roots.to(device))
        found.append(VERIFIERS.build("match")(batch, probs, chance).read())
        row = torch.rand(6, 50, generator=torch.Generator().manual_seed(1)).to(device)
        found[-1] += [chance.pick(row, 0).tolist(), race_on(row, seeds.to(device), 5).tolist()]
    assert found[0] == found[1]
