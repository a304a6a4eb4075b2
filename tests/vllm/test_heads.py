"""A head that we export, inside vLLM: it drafts what it drafts here, and block verification reads its q."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import takewhile
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import LlamaForCausalLM

from branchwise.backends.transformers.target import TransformersTarget
from branchwise.core.sampling import SamplingParams
from branchwise.core.sequence import SequenceState
from branchwise.core.tree import DraftTree
from branchwise.draft import build_policy
from branchwise.draft.base import Budget
from branchwise.draft.head.drafter import HeadDrafter
from branchwise.draft.head.export import Verifier, export_speculators
from branchwise.draft.head.file import TrainedHead
from branchwise.engine import Engine, Request
from branchwise.integrations.vllm import register
from branchwise.train.head.run import FORMS, Sizes, blank_head
from branchwise.verify import VERIFIERS
from tests.vllm.engines import CONTEXT, PROMPT, VOCABULARY, engine, law, params, runner_of, texts, write_model

LENGTH = 3
WRITTEN = 20
PROMPTS = [PROMPT, [7, 8, 9] * 4, [3, 3, 1], list(range(VOCABULARY))]
Drafted = dict[tuple[int, ...], list[int]]
"""the tokens of a text -> what was drafted behind them"""


@pytest.fixture(scope="module")
def deep(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A target with as many layers as a head of three taps wants."""
    return write_model(tmp_path_factory.mktemp("deep"), layers=8)


@pytest.fixture(scope="module")
def head(deep: Path, tmp_path_factory: pytest.TempPathFactory) -> tuple[TrainedHead, TransformersTarget, Path]:
    model = LlamaForCausalLM.from_pretrained(deep, dtype=torch.float32).eval().requires_grad_(False)
    target = TransformersTarget(model, slots=4, context=CONTEXT, max_nodes=32)
    torch.manual_seed(5)
    network = blank_head(model, target.info, Sizes(mlp=64, **FORMS["speculators"]))
    for weight in network.parameters():
        torch.nn.init.normal_(weight, mean=float(weight.ndim == 1), std=0.3)
    table = torch.randperm(VOCABULARY)[: VOCABULARY - 3]
    trained = TrainedHead(network.eval().requires_grad_(False), table, target.info.name, target.info.weights)
    folder = tmp_path_factory.mktemp("heads") / "exported"
    export_speculators(trained, folder, target.info, Verifier(str(deep), ("LlamaForCausalLM",), CONTEXT))
    return trained, target, folder


class Noting(HeadDrafter):
    """Notes its chains by the text that they follow."""

    chains: Drafted

    def draft(self, sequences: Sequence[SequenceState], budgets: Sequence[Budget]) -> list[DraftTree]:
        trees = super().draft(sequences, budgets)
        for sequence, tree in zip(sequences, trees, strict=True):
            self.chains[tuple(sequence.tokens)] = tree.tokens[1:].tolist()
        return trees


def drafted_here(head: TrainedHead, target: TransformersTarget) -> tuple[list[list[int]], Drafted]:
    drafter = Noting(head, tree=build_policy(f"topk:{LENGTH},depth={LENGTH},width=1"))
    drafter.chains = {}
    writing = Engine(target, drafter, VERIFIERS.build("match"))
    generations = [writing.submit(Request(tuple(prompt), SamplingParams(), WRITTEN)) for prompt in PROMPTS]
    while writing.busy:
        writing.step()
    return [list(generation.token_ids) for generation in generations], drafter.chains


def drafted_there(llm: Any) -> Drafted:
    """Notes what vLLM drafts from now on."""
    runner, found = runner_of(llm), Drafted()
    original = runner.propose_draft_token_ids

    def propose(scheduler_output: Any, sampled: Any, *rest: Any, **named: Any) -> Any:
        drafts = original(scheduler_output, sampled, *rest, **named)
        for row, name in enumerate(runner.input_batch.req_ids):
            kept = [int(token) for token in sampled[row] if token >= 0]
            request = runner.requests[name]
            written = [*request.prompt_token_ids, *request.output_token_ids]
            if kept:  # tokens join the request behind this call
                found[(*written, *kept)] = [int(token) for token in drafts[row]]
        return drafts

    runner.propose_draft_token_ids = propose
    return found


def test_an_exported_head_drafts_in_vllm_what_it_drafts_here(
    deep: Path, head: tuple[TrainedHead, TransformersTarget, Path]
) -> None:
    trained, target, folder = head
    answers, here = drafted_here(trained, target)
    llm = engine(deep, {"method": "eagle3", "model": str(folder), "num_speculative_tokens": LENGTH})
    there = drafted_there(llm)
    assert texts(llm, PROMPTS, params(max_tokens=WRITTEN)) == answers
    table = set(trained.table.tolist())
    compared = 0
    for prompt in PROMPTS:
        for text in (text for text in here.keys() & there.keys() if text[: len(prompt)] == tuple(prompt)):
            if len(text) - len(prompt) >= WRITTEN - LENGTH:
                continue  # here chains end with the answer
            # Here a head also proposes tokens of the text that are not in its table.
            own = list(takewhile(table.__contains__, here[text]))
            assert there[text][: len(own)] == own
            compared += len(own)
    assert compared > 100


def test_texts_of_an_exported_head_have_the_law_of_the_target_by_block(
    deep: Path, head: tuple[TrainedHead, TransformersTarget, Path]
) -> None:
    """vLLM's V1 runner accepts `block` and ignores it; with the plugin it is ours, with the head's q."""
    register()
    how = {"rejection_sample_method": "block", "draft_sample_method": "probabilistic"}
    llm = engine(deep, {"method": "eagle3", "model": str(head[2]), "num_speculative_tokens": LENGTH, **how})
    found = texts(llm, [PROMPT] * 800, params(temperature=0.7, max_tokens=3))
    assert runner_of(llm).drafter._enable_probabilistic_draft_probs
    assert law(deep, 3, 0.7).p_value(found) > 1e-4
