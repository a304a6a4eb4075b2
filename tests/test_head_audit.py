"""Every form of a head with every verifier that fits: the emitted distribution is the target's.

On three tokens all that a head can draft is enumerated, with the code that serves users: its own passes, cache and
trees. Only the draws are prescribed. A head proposes the tokens of its table and those of the prompt, so q has a zero
or none. What is enumerated is a step in mid-text, beside another text, because a head drafts from what it kept.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from typer.testing import CliRunner

from branchwise.audit.blocks import Block, Floats, Partition, g_test
from branchwise.audit.exact import emitted
from branchwise.audit.findings import Word
from branchwise.audit.instances import Drafts, Instance
from branchwise.audit.model import ModelAuditor, Plan
from branchwise.audit.policies import ScriptedSampler
from branchwise.backends.transformers.target import TransformersTarget
from branchwise.cli.audit import app
from branchwise.core.sampling import SamplingParams
from branchwise.core.sequence import SequenceState
from branchwise.core.tree import DraftTree, Draw
from branchwise.draft import build_drafter, build_policy, tree_drafter
from branchwise.draft.base import Budget
from branchwise.draft.head.drafter import HeadDrafter
from branchwise.draft.sampler import sampler_for
from branchwise.engine import Engine, Request
from branchwise.llm import LLM
from branchwise.testing import ToyTarget
from branchwise.train.head.run import FORMS
from branchwise.verify import VERIFIERS, check_pairing
from tests.heads import let_drafting_pay, random_head
from tests.test_audit_model import PROMPTS, tiny_model, tokenizer

VOCABULARY, DEPTH = 3, 2
TREES = ["chain:2", "paths:2x2", "rsd-c:2,1", "dynamic:3", "topk:4,depth=2,width=2", "ranks:mcsd"]
"""of every kind of draw; those of the last two are laid on the device"""
TEXTS = ["the table alone", "a token of the prompt"]
FITTING = [name for name in VERIFIERS if not name.startswith("lossy")]
ROUNDING = 1e-8
"""a head computes in float32: the same row differs in its last digits with what else is in the pass"""


def in_mid_text(drafter: HeadDrafter, target: ToyTarget, prompt: list[int]) -> list[SequenceState]:
    """A text after some steps, and another one beside it."""
    engine = Engine(target, drafter, VERIFIERS.build("match"), Budget(64, DEPTH))
    prompts = [prompt, [0, 1, 2, 2, 1]]
    texts = [engine.submit(Request(tuple(p), SamplingParams(1.0, seed=7), max_new_tokens=40)) for p in prompts]
    for _ in range(3):
        engine.step()
    assert min(len(text.token_ids) for text in texts) >= 3
    return [text.sequence for text in texts]


def every_draft(
    drafter: HeadDrafter, texts: Sequence[SequenceState], monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[float, DraftTree]]:
    """Every tree that can be drafted for the first of these texts, and its probability."""
    scripts: list[list[int]] = [[]]
    while scripts:
        sampler = ScriptedSampler(scripts.pop())

        def choose(sequence: SequenceState, device: Any = None, sampler: Any = sampler) -> Any:
            return sampler if sequence is texts[0] else sampler_for(sequence, device)

        monkeypatch.setattr(tree_drafter, "sampler_for", choose)
        [tree, _] = drafter.draft(texts, [Budget(64, DEPTH)] * 2)
        scripts += sampler.others
        yield sampler.weight, exact(tree)


def exact(tree: DraftTree) -> DraftTree:
    """The same with q in float64: what a row of float32 lacks to 1 is rounding, and not the head's."""
    if tree.q is None:
        return tree
    q = tree.q.double()
    inner = [node for node, below in enumerate(tree.children) if below]
    torch.testing.assert_close(q[inner].sum(dim=1), torch.ones(len(inner), dtype=q.dtype), atol=1e-6, rtol=0)
    return replace(tree, q=q / q.sum(dim=1, keepdim=True).clamp_min(1e-9))


def world(target: ToyTarget, text: SequenceState) -> Instance:
    """The target's distributions after every continuation of a text."""
    p = [
        np.stack(
            [
                target.logits([*text.tokens, *prefix]).double().softmax(dim=0).numpy()
                for prefix in itertools.product(range(VOCABULARY), repeat=level)
            ]
        )
        for level in range(DEPTH + 1)
    ]
    return Instance(tuple(p), tuple(p[:-1]), paths=2)


def enumerated(
    form: str, tree: str, text: str, monkeypatch: pytest.MonkeyPatch, kind: type[HeadDrafter] = HeadDrafter
) -> Drafts:
    target = ToyTarget(VOCABULARY, slots=2)
    trained = random_head(target.info, form, table=2)
    [other] = set(range(VOCABULARY)) - set(trained.table.tolist())
    first, second = trained.table.tolist()
    prompt = [first, second, first] if text == "the table alone" else [other, first, second]
    drafter = kind(trained, tree=build_policy(tree))
    texts = in_mid_text(drafter, target, prompt)
    found = list(every_draft(drafter, texts, monkeypatch))
    weights = torch.tensor([weight for weight, _ in found], dtype=torch.float64)
    assert abs(float(weights.sum()) - 1) < 1e-9
    proposed = {token for _, one in found for token in one.tokens[1:].tolist()}
    known = text != "the table alone"
    assert (other in proposed) <= known, "a token was proposed that the head does not know"
    assert (other in proposed) is known or drafter.draw is Draw.FIXED, "a token of the prompt is never proposed"
    return Drafts(world(target, texts[0]), [one for _, one in found], weights)


@pytest.mark.parametrize("text", TEXTS)
@pytest.mark.parametrize("tree", TREES)
@pytest.mark.parametrize("form", FORMS)
def test_the_emitted_law_is_the_target_s(form: str, tree: str, text: str, monkeypatch: pytest.MonkeyPatch) -> None:
    drafts = enumerated(form, tree, text, monkeypatch)
    if drafts.trees[0].draw is Draw.FIXED:
        assert len(drafts.trees) == 1
    else:
        assert len(drafts.trees) >= 4
    for name in FITTING:
        verifier = VERIFIERS.build(name)
        if drafts.trees[0].draw in verifier.accepts:
            distance, efficiency = emitted(verifier, drafts)
            assert distance < ROUNDING, f"{name} on {tree} of a head {form}"
            assert 1 < efficiency <= DEPTH + 1


def test_every_verifier_fits_one_of_the_trees() -> None:
    draws = {build_policy(tree).draw for tree in TREES}
    assert all(VERIFIERS.build(name).accepts & draws for name in FITTING)


@pytest.mark.parametrize("form", FORMS)
def test_what_is_said_after_a_branch_does_not_depend_on_what_else_was_drawn(
    form: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row of q that knew the siblings of a node would be no distribution that the node was drawn from."""
    rows: dict[tuple[int, ...], torch.Tensor] = {}
    for tree in enumerated(form, "rsd-c:2,1", TEXTS[1], monkeypatch).trees:
        assert tree.q is not None
        for node, below in enumerate(tree.children):
            if below:
                path = tuple(tree.tokens[tree.path(node)[1:]].tolist())
                torch.testing.assert_close(rows.setdefault(path, tree.q[node]), tree.q[node], atol=1e-6, rtol=0)
    assert len(rows) == 1 + VOCABULARY


class Boasting(HeadDrafter):
    """Planted: the q that it records is surer than the one that it drew from."""

    def draft(self, sequences: Any, budgets: Any) -> list[DraftTree]:
        return [
            replace(tree, q=surer(tree.q)) if tree.q is not None else tree for tree in super().draft(sequences, budgets)
        ]


def surer(q: torch.Tensor) -> torch.Tensor:
    return q**2 / (q**2).sum(dim=1, keepdim=True).clamp_min(1e-9)


@pytest.mark.parametrize(("tree", "verify"), [("chain:2", "block"), ("paths:2x2", "cascade"), ("rsd-c:2,1", "rrs")])
def test_a_head_that_records_another_q_is_found(tree: str, verify: str, monkeypatch: pytest.MonkeyPatch) -> None:
    distance, _ = emitted(VERIFIERS.build(verify), enumerated("carry", tree, TEXTS[1], monkeypatch, Boasting))
    assert distance > 1e-3


# Through the engine, step after step

SAMPLES, SLOTS, LENGTH, FALSE_ALARM = 1500, 50, 3, 1e-4
"""the seeds are fixed; of 10,000 correct decoders one would fail such a test"""


@pytest.mark.parametrize(
    ("form", "tree", "verify"),
    [
        ("eagle", "topk:4,depth=2,width=2", "match"),
        ("carry", "paths:2x2", "cascade"),
        ("fspad", "rsd-s:2x2", "traversal"),
        ("fspad-gate", "chain:2", "block"),
        ("parallelspec", "paths:2x2", "mss"),
        ("two-layers", "threshold:0.1,4", "rrs"),
    ],
)
def test_the_first_tokens_have_the_targets_law(form: str, tree: str, verify: str) -> None:
    target = ToyTarget(4, slots=SLOTS)
    drafter = HeadDrafter(random_head(target.info, form, table=3), tree=build_policy(tree))
    check_pairing(VERIFIERS.build(verify), drafter.draw, drafter.name)
    engine = Engine(target, drafter, VERIFIERS.build(verify))
    prompt = (0, 1, 2)
    texts = [
        engine.submit(Request(prompt, SamplingParams(1.0, seed=seed), max_new_tokens=LENGTH)) for seed in range(SAMPLES)
    ]
    while engine.busy:
        engine.step()

    def law(block: Block) -> Floats:
        probs: Floats = target.logits([*prompt, *map(int, block)]).double().softmax(dim=0).numpy()
        return probs

    partition = Partition(law, length=LENGTH, samples=SAMPLES)
    found = g_test(partition.count(tuple(text.token_ids) for text in texts), partition.probabilities)
    assert found.p_value > FALSE_ALARM, found
    assert found.freedom > 5
    assert sum(text.stats.accepted_tokens for text in texts) > SAMPLES / 10


# `branchwise audit model`


@pytest.fixture(scope="module")
def llm() -> LLM:
    model = tiny_model()
    target = TransformersTarget(model, slots=33, max_nodes=32, tokenizer=tokenizer())
    return LLM("tiny", model, tokenizer(), Engine(target, build_drafter("none"), VERIFIERS.build("match")))


@pytest.mark.parametrize(("tree", "verify"), [(None, "match"), ("paths:2x2", "cascade")])
def test_the_audit_of_a_model_takes_a_head(
    tree: str | None, verify: str, llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """In bfloat16 too, where the copy of the model has the weights that the head was trained for."""
    let_drafting_pay(monkeypatch)
    random_head(llm.engine.target.info, table=12).save(tmp_path / "head")
    plan = Plan(samples=300, length=2, seed=5, greedy_tokens=8, limit=0.25)
    found = ModelAuditor(llm, PROMPTS, plan).audit(f"head:{tmp_path / 'head'}", tree, verify)
    assert found.finding.word is Word.LOSSLESS, found.finding
    assert found.activity.drafted > 0
    assert found.near_ties is not None, found.finding.notes
    assert found.near_ties.dtype == "bfloat16"


def test_the_command_takes_a_head(
    llm: LLM, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    random_head(llm.engine.target.info, table=12).save(tmp_path / "head")
    monkeypatch.setattr("branchwise.llm.load", lambda *given, **options: llm)
    (tmp_path / "prompts").write_text("a b c d a b c\n")
    words = ["--method", "head-cascade", "--head", str(tmp_path / "head"), "--prompts", str(tmp_path / "prompts")]
    few = ["--samples", "200", "--length", "1", "--greedy-tokens", "0", "--detect", "0.3", "--seed", "1"]
    done = CliRunner().invoke(app, ["model", *words, *few])
    assert done.exit_code == 0, done.output
    assert "verifier cascade" in done.output
    assert "LOSSLESS" in done.output
