"""The table of successors on a device: it learns and looks up there what it does on the host."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import pytest
import torch

from branchwise.backends.base import Execution, Prefill, Scored, ScoredNodes
from branchwise.backends.transformers.target import TransformersTarget
from branchwise.core.sampling import SamplingParams
from branchwise.cuda.graphs import have_kernels
from branchwise.draft import build_drafter
from branchwise.draft.builder import TreePolicy
from branchwise.draft.policies.paths import Paths
from branchwise.draft.policies.template import Ranks
from branchwise.draft.policies.topk import TopK
from branchwise.draft.recycle.drafter import Recycle
from branchwise.engine import Engine, Request
from branchwise.testing import ToyTarget
from branchwise.verify import VERIFIERS, Verdicts
from tests.conformance.architectures import build, served
from tests.device_twins import OnDevice
from tests.test_recycle import AMPLE, VOCABULARY, bound, noise, scene, teach
from tests.test_recycle_kernels import (
    CASES,
    SHAPES,
    Case,
    assert_a_broken_law_empties_its_row_and_no_other,
    assert_equal_logits_go_to_the_lowest_tokens,
    assert_learns_like_the_plain_one,
    assert_padding_alone_changes_nothing,
    assert_walks_like_the_plain_one,
    kernels,
    lesson,
)

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")

by_kernels = pytest.mark.skipif(
    not torch.cuda.is_available() or not have_kernels(torch.device("cuda")), reason="there are no kernels for it"
)
both_ways = pytest.mark.parametrize("plain", [False, True], ids=["kernels", "plain"])


def bound_there(tree: TreePolicy, plain: bool = False) -> Recycle:
    execution = Execution(kernels=not plain, graphs=True)
    target = replace(ToyTarget(VOCABULARY).info, device=torch.device("cuda"), execution=execution)
    drafter = Recycle(tree=tree)
    drafter.bind(target)
    assert drafter.on_device == (isinstance(tree, Ranks | Paths) and not plain and have_kernels(target.device))
    return drafter


@both_ways
@pytest.mark.parametrize("tree", [Ranks(), Paths("3x4"), TopK(40)])
def test_a_device_learns_and_drafts_what_the_host_would(tree: TreePolicy, plain: bool) -> None:
    there = bound_there(tree, plain)
    here = bound(tree=tree, kind=OnDevice if there.on_device else Recycle)  # by the same rules
    for seed in range(4):
        sequences, trees, scored, verdicts = scene(seed)
        for drafter, device in ((there, "cuda"), (here, "cpu")):
            drafter.start(sequences[0], Prefill(noise(1, VOCABULARY, seed=seed).to(device)))
            drafter._drafted = trees
            teach(drafter, sequences, Scored(scored.logits.to(device)), verdicts)
            drafter._drafted = drafter.draft(sequences, [AMPLE] * 2)
        for one, other in zip(there._drafted, here._drafted, strict=True):
            assert one.parents == other.parents
            assert one.tokens.tolist() == other.tokens.tolist()
    for token in range(VOCABULARY):
        assert [found.token for found in there.candidates(token)] == [found.token for found in here.candidates(token)]


@contextmanager
def nobody_waits() -> Iterator[None]:
    """A wait for the device is an error."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # that the mode is a prototype
        torch.cuda.set_sync_debug_mode("error")
    try:
        yield
    finally:
        torch.cuda.set_sync_debug_mode("default")


@by_kernels
def test_a_tree_of_ranks_is_looked_up_without_waiting_for_the_device() -> None:
    drafter = bound_there(Ranks())
    sequences, trees, scored, verdicts = scene(1)
    scored = Scored(scored.logits.cuda())
    for checked in (False, False, True):  # what a shape needs is sent once, and the second time it is recorded
        with nobody_waits() if checked else nullcontext():
            drafter._drafted = trees
            teach(drafter, sequences, scored, verdicts)
            drafter.draft(sequences, [AMPLE] * 2)


@by_kernels
def test_paths_are_drawn_without_waiting_for_the_device_before_they_are_read() -> None:
    drafter = bound_there(Paths("3x4"))
    sequences, trees, scored, verdicts = scene(1)
    scored = Scored(scored.logits.cuda())
    for checked in (False, False, True):
        with nobody_waits() if checked else nullcontext():
            drafter._drafted = trees
            teach(drafter, sequences, scored, verdicts)
            if drafter._paths is not None:
                drafter._paths._drawn(sequences)
        drafter.draft(sequences, [AMPLE] * 2)
    assert drafter._paths is not None
    assert drafter._paths._draw._recorded


@pytest.mark.parametrize(("tree", "verify"), [("chain:6", "block"), ("paths:4x6", "cascade"), ("paths:4x6", "auto")])
def test_texts_drawn_on_the_device_are_judged_from_graphs(tree: str, verify: str) -> None:
    """Whatever was drafted, nothing at all included: after a while no shape is new."""
    target = TransformersTarget(build(served()["llama"], device="cuda"), slots=3)
    engine = Engine(target, build_drafter("recycle", tree), VERIFIERS.build(verify))
    sampling, accepted = SamplingParams(temperature=0.9, seed=4), 0
    for prompts in ([(5, 6, 7)], [(5, 6, 7), (9,), (30, 31)]) * 3:
        made = [engine.submit(Request(p, max_new_tokens=60, sampling=sampling)) for p in prompts]
        while engine.busy:
            engine.step()
        assert all(len(text.token_ids) == 60 for text in made)
        accepted += sum(text.stats.accepted_tokens for text in made)
    assert accepted > 0
    judge = target.capture(engine.verifier)
    names = {key[0] for key in judge._graphs}  # type: ignore[attr-defined]
    assert ("match" if verify == "auto" else "undrafted") in names
    assert len(names) > 1


@by_kernels
def test_what_is_learned_from_a_recorded_pass_is_what_is_learned_from_any() -> None:
    """Caught here: recording that counts as learning, and a graph that reads where the last pass has been."""
    anywhere, recorded = bound_there(Ranks()), bound_there(Ranks())
    _, trees, scored, _ = scene(0)
    batch, nodes, _ = scored.logits.shape
    logits, paths = scored.logits.cuda(), torch.zeros(batch, nodes, dtype=torch.int64, device="cuda")
    nodes_there = ScoredNodes(
        torch.zeros(batch, nodes, dtype=torch.int32, device="cuda"),
        torch.zeros(batch, nodes, 1, dtype=torch.int32, device="cuda"),
        torch.zeros(batch, dtype=torch.int32, device="cuda"),
        torch.zeros(batch, dtype=torch.int32, device="cuda"),
    )
    for seed in range(5):
        _, trees, scored, verdicts = scene(seed)
        assert scored.logits.shape == logits.shape
        logits.copy_(scored.logits)
        paths.fill_(-1)
        for row, verdict in zip(paths, verdicts, strict=True):
            row[: len(verdict.path)] = torch.tensor(verdict.path)
        anywhere._drafted = trees
        for place, part in zip(nodes_there, anywhere._nodes(logits), strict=True):
            place.copy_(part)
        judged = Verdicts(paths, paths[:, 0])
        anywhere.update_on_device(Scored(logits.clone()), judged)
        recorded.update_on_device(Scored(logits, nodes=nodes_there), judged)
        assert torch.equal(anywhere.table.tokens, recorded.table.tokens)
        assert torch.equal(anywhere.table.masses, recorded.table.masses)
    assert recorded._learning._recorded


# The kernels themselves: the cases of the interpreter, and what only a device can show

LARGE = [
    Case("SmolLM2, a tree: 16 bytes at a time, two blocks a program", 49_152, 8, nodes=96, carried=40, tile=None),
    Case("SmolLM2, a batch of trees: a whole row a program", 49_152, 8, 16, 96, carried=99, tile=None, steps=1),
    Case("Qwen2.5, 16 successors: the largest tile", 151_936, 16, 2, 81, carried=40, tile=None),
    Case("rows that begin anywhere: no two numbers are read at once", 50_257, 5, nodes=20, carried=9, tile=None),
    Case("rows with room behind them", 32_001, 8, nodes=9, carried=5, spare=(1, 3, 31), tile=None),
]


@by_kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.catches)
def test_learning_equals_the_plain_one(case: Case, dtype: torch.dtype) -> None:
    assert_learns_like_the_plain_one(case, dtype, "cuda")


@by_kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
@pytest.mark.parametrize("case", LARGE, ids=lambda case: case.catches)
def test_learning_from_real_shapes(case: Case, dtype: torch.dtype) -> None:
    """With the tiling that is chosen for them."""
    assert_learns_like_the_plain_one(case, dtype, "cuda")


@by_kernels
def test_who_runs_first_does_not_matter() -> None:
    """Two nodes that write one row would not do so in the same order every time."""
    told = lesson(Case("", 5000, 8, 4, 96, carried=7), 0, torch.bfloat16, "cuda")
    tables = []
    for _ in range(50):
        tokens = torch.zeros(5000, 8, dtype=torch.int32, device="cuda")
        masses = torch.zeros(5000, 8, dtype=torch.float16, device="cuda")
        for _ in range(2):
            kernels.learn_marked(tokens, masses, told.tokens, told.logits, told.marks, rate=0.3)
        tables.append((tokens, masses))
    for tokens, masses in tables[1:]:
        assert torch.equal(tokens, tables[0][0])
        assert torch.equal(masses, tables[0][1])


@by_kernels
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32], ids=str)
def test_equal_logits_go_to_the_lowest_tokens(dtype: torch.dtype) -> None:
    assert_equal_logits_go_to_the_lowest_tokens(dtype, "cuda")


@by_kernels
@pytest.mark.parametrize("tile", [(1, 2), (2, 2)])
def test_a_broken_law_empties_its_row_and_no_other(tile: tuple[int, int]) -> None:
    assert_a_broken_law_empties_its_row_and_no_other(tile, "cuda")


@by_kernels
def test_padding_alone_changes_nothing() -> None:
    assert_padding_alone_changes_nothing("cuda")


@by_kernels
@pytest.mark.parametrize("width", [8, 11])
@pytest.mark.parametrize("name", SHAPES)
def test_a_tree_is_that_of_the_plain_look_up(name: str, width: int) -> None:
    assert_walks_like_the_plain_one(SHAPES[name], width, "cuda")


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("batch", [1, 3])
def test_what_is_recommended_drafts_on_the_device_and_changes_no_text(temperature: float, batch: int) -> None:
    prompts = [(5, 6, 7), (9,), (30, 31)][:batch]
    texts = []
    for draft in ("none", "memories"):
        target = TransformersTarget(build(served()["llama"], device="cuda"), slots=3)
        engine = Engine(target, build_drafter(draft), VERIFIERS.build("match"))
        sampling = SamplingParams(temperature=temperature, seed=4)
        generations = [engine.submit(Request(p, max_new_tokens=90, sampling=sampling)) for p in prompts]
        while engine.busy:
            engine.step()
        texts.append([generation.token_ids for generation in generations])
    assert texts[0] == texts[1]
    stats = [generation.stats for generation in generations]
    assert all(one.drafted_tokens > 80 for one in stats), "nothing was drafted"
    assert sum(one.accepted_tokens for one in stats) > 0


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("tree", [Ranks(), TopK(24)])
def test_the_text_is_that_of_plain_decoding(tree: Ranks | TopK, temperature: float) -> None:
    texts = []
    for drafts in (False, True):
        target = TransformersTarget(build(served()["llama"], device="cuda"), slots=3)
        drafter = Recycle(tree=tree)
        engine = Engine(target, drafter, VERIFIERS.build("match"))
        if not drafts:
            engine.most = type(AMPLE)(1, 0)
        sampling = SamplingParams(temperature=temperature, seed=4)
        generations = [engine.submit(Request(p, max_new_tokens=40, sampling=sampling)) for p in ((5, 6, 7), (9,))]
        while engine.busy:
            engine.step()
        texts.append([generation.token_ids for generation in generations])
    assert texts[0] == texts[1]
