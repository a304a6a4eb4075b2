"""The table of successors on a device: it learns and looks up there what it does on the host."""

from __future__ import annotations

import warnings

import pytest
import torch

from branchwise.draft import build_drafter
from branchwise.draft.growth import Growth
from branchwise.draft.paths import Paths
from branchwise.draft.ranks import Ranks
from branchwise.draft.recycle import Recycle
from branchwise.draft.topk import TopK
from branchwise.engine import Engine, Request
from branchwise.sampling import SamplingParams
from branchwise.target import Nodes, Scored
from branchwise.target.transformers import TransformersTarget
from branchwise.testing import ToyTarget
from branchwise.verify import VERIFIERS, Verdicts
from tests.conformance.architectures import build, served
from tests.test_recycle import AMPLE, VOCABULARY, bound, noise, scene, teach

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


def bound_there(tree: Growth) -> Recycle:
    target = ToyTarget(VOCABULARY)
    target.device = torch.device("cuda")
    drafter = Recycle(tree=tree)
    drafter.bind(target)
    return drafter


@pytest.mark.parametrize("tree", [Ranks(), Paths("3x4"), TopK(40)])
def test_a_device_learns_and_drafts_what_the_host_would(tree: Growth) -> None:
    there, here = bound_there(tree), bound(tree=tree)
    here.on_device = there.on_device  # by the same rules
    for seed in range(4):
        sequences, trees, scored, verdicts = scene(seed)
        for drafter, device in ((there, "cuda"), (here, "cpu")):
            drafter.begin(sequences[0], noise(1, VOCABULARY, seed=seed).to(device))
            drafter._drafted = trees
            teach(drafter, sequences, Scored(scored.logits.to(device)), verdicts)
            drafter._drafted = drafter.draft(sequences, [AMPLE] * 2)
        for one, other in zip(there._drafted, here._drafted, strict=True):
            assert one.parents == other.parents
            assert one.tokens.tolist() == other.tokens.tolist()
    for token in range(VOCABULARY):
        assert [found.token for found in there.after(token)] == [found.token for found in here.after(token)]


def test_a_tree_of_ranks_is_looked_up_without_waiting_for_the_device() -> None:
    drafter = bound_there(Ranks())
    sequences, trees, scored, verdicts = scene(1)
    scored = Scored(scored.logits.cuda())
    for checked in (False, False, True):  # what a shape needs is sent once, and the second time it is recorded
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the mode is a prototype
            torch.cuda.set_sync_debug_mode("error" if checked else "default")
        try:
            drafter._drafted = trees
            teach(drafter, sequences, scored, verdicts)
            drafter.draft(sequences, [AMPLE] * 2)
        finally:
            torch.cuda.set_sync_debug_mode("default")


def test_paths_are_drawn_without_waiting_for_the_device_before_they_are_read() -> None:
    drafter = bound_there(Paths("3x4"))
    sequences, trees, scored, verdicts = scene(1)
    scored = Scored(scored.logits.cuda())
    for checked in (False, False, True):
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that the mode is a prototype
            torch.cuda.set_sync_debug_mode("error" if checked else "default")
        try:
            drafter._drafted = trees
            teach(drafter, sequences, scored, verdicts)
            if checked:
                assert drafter._paths is not None
                drafter._paths._drawn(sequences)
        finally:
            torch.cuda.set_sync_debug_mode("default")
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
    judge = target.captured(engine.verifier)
    names = {key[0] for key in judge._graphs}  # type: ignore[attr-defined]
    assert ("match" if verify == "auto" else "undrafted") in names
    assert len(names) > 1


def test_what_is_learned_from_a_recorded_pass_is_what_is_learned_from_any() -> None:
    """Caught here: recording that counts as learning, and a graph that reads where the last pass has been."""
    anywhere, recorded = bound_there(Ranks()), bound_there(Ranks())
    _, trees, scored, _ = scene(0)
    batch, nodes, _ = scored.logits.shape
    logits, paths = scored.logits.cuda(), torch.zeros(batch, nodes, dtype=torch.int64, device="cuda")
    told = Nodes(
        torch.zeros(batch, nodes, dtype=torch.int32, device="cuda"),
        torch.zeros(batch, nodes, 1, dtype=torch.int32, device="cuda"),
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
        for place, part in zip(told, anywhere._nodes(logits), strict=True):
            place.copy_(part)
        judged = Verdicts(paths, paths[:, 0])
        anywhere.heed(Scored(logits.clone()), judged)
        recorded.heed(Scored(logits, nodes=told), judged)
        assert torch.equal(anywhere.table.tokens, recorded.table.tokens)
        assert torch.equal(anywhere.table.masses, recorded.table.masses)
    assert recorded._learning._recorded


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
