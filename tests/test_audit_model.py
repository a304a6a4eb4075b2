"""The audit of a model: exact probabilities, honest words, and planted mistakes that it must find."""

from __future__ import annotations

import gzip
import json
from collections.abc import Sequence
from dataclasses import replace
from itertools import count
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from torch import Tensor
from transformers import LlamaConfig, PreTrainedModel, PreTrainedTokenizerFast
from typer.testing import CliRunner

from branchwise.audit.findings import Word
from branchwise.audit.model import ModelAudit, ModelAuditor, OwnProbs, Plan
from branchwise.backends.transformers.target import TransformersTarget
from branchwise.cli.audit import app, read_prompts, split_names
from branchwise.control.guard import Guard
from branchwise.core.batch import TreeBatch
from branchwise.core.rng import Chance
from branchwise.core.sampling import SamplingParams
from branchwise.core.sequence import SequenceState
from branchwise.core.target_probs import TargetProbs
from branchwise.core.tree import DraftTree, Draw
from branchwise.draft import DRAFTERS, build_drafter, build_policy
from branchwise.draft.auto import AutoDrafter
from branchwise.draft.base import Budget, Drafter
from branchwise.draft.head.drafter import HeadDrafter
from branchwise.draft.model.draft_model import Weights
from branchwise.draft.model.drafter import ModelDrafter
from branchwise.engine import Engine
from branchwise.errors import PairingError, UnknownName, UsageError
from branchwise.llm import LLM
from branchwise.progress import Progress, silent
from branchwise.testing import RandomDrafter
from branchwise.verify import VERIFIERS, Verdicts, Verifier
from branchwise.verify.match import Match
from tests.conformance.architectures import COMMON, build
from tests.heads import random_head

WORDS = ["<pad>", "<s>", "</s>", *"abcdefghijklmnopqrst"]
PROMPTS = ["a b c d a b c", "t s r q p", "h h h h i i i i"]


def tokenizer() -> PreTrainedTokenizerFast:
    words = Tokenizer(WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<pad>"))
    words.pre_tokenizer = Whitespace()
    return PreTrainedTokenizerFast(
        tokenizer_object=words, bos_token="<s>", eos_token="</s>", pad_token="<pad>", clean_up_tokenization_spaces=False
    )


def tiny_model() -> PreTrainedModel:
    model = build(LlamaConfig(**(COMMON | {"vocab_size": len(WORDS), "num_hidden_layers": 2})))
    model.get_output_embeddings().weight.mul_(3.0)  # distributions that have an opinion
    model.get_output_embeddings().weight[2].mul_(0.2)  # and texts that seldom end
    return model


@pytest.fixture(scope="module")
def llm() -> LLM:
    model = tiny_model()
    target = TransformersTarget(model, slots=33, max_nodes=64)
    return LLM("tiny", model, tokenizer(), Engine(target, build_drafter("none"), VERIFIERS.build("match")))


@pytest.fixture(autouse=True)
def _registries(monkeypatch: pytest.MonkeyPatch) -> None:
    """What a test registers does not outlive it."""
    for registry in (DRAFTERS, VERIFIERS):
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))


PLAN = Plan(samples=800, length=2, seed=5, greedy_tokens=16, near_ties=False)
QUICK = Plan(samples=250, length=2, seed=5, greedy_tokens=8, near_ties=False, limit=0.25)


class Sharpened(Match):
    """Planted: the next token comes from a distribution that is a little too sure of itself."""

    name = "sharpened"

    @staticmethod
    def _draw(probs: TargetProbs, node: Tensor, chance: Chance, depth: int) -> Tensor:
        if probs.greedy:
            return probs.best(node)
        return chance.token(probs.at(node) ** 1.3, depth)


class SecondBest(Match):
    """Planted: greedy decoding takes the second best token once a text has grown."""

    name = "second-best"

    @staticmethod
    def _draw(probs: TargetProbs, node: Tensor, chance: Chance, depth: int) -> Tensor:
        if not probs.greedy:
            return chance.token(probs.at(node), depth)
        logits = probs.logits[torch.arange(len(node)), node]  # type: ignore[attr-defined]
        return logits.topk(2, dim=-1).indices[:, 1] if depth else logits.argmax(dim=-1)


class ReplacesFromTheTarget(Verifier):
    """Planted: what token verification rejects is drawn again from p, not from what p has left over q."""

    name = "replaces-from-p"
    accepts = frozenset({Draw.PATHS})

    def __call__(self, batch: TreeBatch, probs: TargetProbs, chance: Chance) -> Verdicts:
        if probs.greedy:
            return Match()(batch, probs, chance)
        root = torch.zeros(len(batch), dtype=torch.long)
        p = probs.at(root)
        q = torch.stack([tree.q[0] for tree in batch.trees if tree.q is not None])
        token = batch.tokens[:, 1]
        odds = (p.gather(1, token[:, None]) / q.gather(1, token[:, None])).clamp(max=1)
        accepted = chance.first(odds, 0) == 0
        paths = torch.where(accepted[:, None], torch.tensor([[0, 1]]), torch.tensor([[0, -1]]))
        after = torch.where(accepted, 1, 0)
        return Verdicts(paths, chance.pick(probs.at(after)))


class Guess(Drafter):
    """Chains of two tokens drawn from a fixed random distribution, which it may lie about."""

    name = "guess"
    draw = Draw.PATHS

    def __init__(self, honest: bool = True) -> None:
        self.honest = honest
        self.probs = torch.softmax(2 * torch.randn(len(WORDS), generator=torch.Generator().manual_seed(2)), dim=-1)
        self._generator = torch.Generator().manual_seed(3)

    def draft(self, sequences: Sequence[SequenceState], budgets: Sequence[Budget]) -> list[DraftTree]:
        return [self._draft(*pair) for pair in zip(sequences, budgets, strict=True)]

    def _draft(self, sequence: SequenceState, budget: Budget) -> DraftTree:
        length = min(2, budget.depth)
        if not length:
            return DraftTree.root(sequence.root)
        drawn = torch.multinomial(self.probs, length, replacement=True, generator=self._generator)
        drawn = drawn if self.honest else self.probs.argmax().repeat(length)
        tokens = torch.cat([torch.tensor([sequence.root]), drawn])
        return DraftTree(tokens, tuple(range(-1, length)), Draw.PATHS, self.probs.expand(length + 1, -1), (length,))


def audit(
    llm: LLM, draft: Any = None, verify: str = "match", plan: Plan = PLAN, progress: Progress = silent
) -> ModelAudit:
    drafter = RandomDrafter(len(WORDS), nodes=12) if draft is None else draft
    found = ModelAuditor(llm, PROMPTS, plan, progress).audit(drafter, verify=verify)
    assert not llm.engine.busy
    assert llm.engine.target.free_slots == 33  # nothing stays behind
    return found


def test_the_exact_law_is_the_models_own_after_every_prefix(llm: LLM) -> None:
    prompt = llm.encode(PROMPTS[0])
    probs = OwnProbs(llm, prompt, SamplingParams(temperature=0.7))
    with torch.inference_mode():
        logits = llm.model(input_ids=torch.tensor([[*prompt, 7, 9]])).logits[0].double()
    for prefix, row in (((), -3), ((7,), -2), ((7, 9), -1)):
        assert probs(prefix) == pytest.approx(torch.softmax(logits[row] / 0.7, dim=-1).numpy(), abs=1e-5)
    assert probs((7, 2)) is None  # the text has ended


def test_a_cut_between_two_equal_tokens_is_not_taken_for_exact(llm: LLM) -> None:
    """Catches a decoder accused because rounding kept the other of two tokens."""
    prompt = llm.encode(PROMPTS[0])
    logits = OwnProbs(llm, prompt, SamplingParams(temperature=1.0))(())
    assert logits is not None
    third = int(np.argsort(-logits)[2])
    model = tiny_model()
    weight = model.get_output_embeddings().weight
    weight[5 if third != 5 else 6] = weight[third]
    twin = LLM("twin", model, llm.tokenizer, Engine(TransformersTarget(model, slots=2), *parts()))
    assert OwnProbs(twin, prompt, SamplingParams(temperature=1.0, top_k=3))(()) is not None  # ties are kept together
    probs = OwnProbs(twin, prompt, SamplingParams(temperature=1.0, top_k=3))
    weight[5 if third != 5 else 6] *= 1 + 1e-6
    assert probs(()) is None
    share = float(np.sort(logits)[::-1][:3].sum())
    assert OwnProbs(llm, prompt, SamplingParams(temperature=1.0, top_p=share))(()) is None
    assert OwnProbs(llm, prompt, SamplingParams(temperature=1.0, top_p=share - 1e-3))(()) is not None


def parts() -> tuple[Any, Any]:
    return build_drafter("none"), VERIFIERS.build("match")


@pytest.mark.parametrize(
    "sampling",
    [SamplingParams(1.0), SamplingParams(0.7, top_k=6), SamplingParams(1.2, top_p=0.8)],
    ids=["whole", "top-k", "top-p"],
)
def test_match_is_lossless(llm: LLM, sampling: SamplingParams) -> None:
    found = audit(llm, plan=replace(PLAN, length=3, sampling=sampling))
    assert found.finding.word is Word.LOSSLESS, found.finding.evidence
    assert found.activity.accepted > 0
    assert found.activity.rejected > 0
    assert len(found.tests.family) == len(PROMPTS) + 1
    assert found.greedy is not None
    assert found.greedy.differences == []
    assert found.tests.samples == 2400


def test_match_is_lossless_whoever_of_several_sources_drafts(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    """They take turns: by their times none would draft for so small a model."""
    turns = count()
    monkeypatch.setattr(Guard, "choose", lambda guard, batch: next(turns) % len(guard.sources))
    drafter = AutoDrafter()
    drafter._head = HeadDrafter(random_head(llm.engine.target.info))
    drafter._model = ModelDrafter(Weights("tiny", tiny_model(), None), tree=build_policy("topk:1"))
    found = audit(llm, drafter, plan=QUICK)
    assert len(drafter.sources) == 3
    assert found.finding.word is Word.LOSSLESS, found.finding.evidence
    assert found.activity.accepted > 0
    assert found.greedy is not None
    assert found.greedy.differences == []


@pytest.mark.parametrize("verify", ["token", "block"])
def test_a_rule_that_needs_q_is_lossless_for_a_drafter_that_tells_the_truth(llm: LLM, verify: str) -> None:
    found = audit(llm, Guess(), verify)
    assert found.finding.word is Word.LOSSLESS, found.finding.evidence
    assert found.draft == "guess"


def test_a_drafter_that_lies_about_q_is_found(llm: LLM) -> None:
    """Drafting by argmax while recording the softmax as q."""
    found = audit(llm, Guess(honest=False), "token", plan=QUICK)
    assert found.finding.word is Word.NOT_LOSSLESS
    assert found.finding.exit_code == 1


@pytest.mark.parametrize(
    ("verifier", "draft"), [(Sharpened, None), (ReplacesFromTheTarget, Guess())], ids=["sharpened", "replaces-from-p"]
)
def test_a_planted_verifier_is_not_lossless(llm: LLM, verifier: Any, draft: Any) -> None:
    VERIFIERS.register(verifier.name, verifier)
    found = audit(llm, draft, verifier.name)
    assert found.finding.word is Word.NOT_LOSSLESS, found.finding.evidence
    assert "after Holm" in found.finding.evidence[0]


def test_a_greedy_text_that_leaves_plain_decoding_is_a_proof(llm: LLM) -> None:
    VERIFIERS.register("second-best", SecondBest)
    found = audit(llm, verify="second-best", plan=QUICK)
    assert found.finding.word is Word.NOT_LOSSLESS
    assert found.greedy is not None
    difference = found.greedy.decisive[0]
    assert difference.gap > 1e-3
    assert difference.plain != difference.speculative
    assert "leaves plain decoding after" in found.finding.evidence[0]


def test_numerical_ties_and_bfloat16_decide_nothing(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    VERIFIERS.register("second-best", SecondBest)
    monkeypatch.setattr("branchwise.audit.model.TIE", float("inf"))
    found = audit(llm, verify="second-best", plan=replace(QUICK, near_ties=True))
    assert found.finding.word is Word.LOSSLESS, found.finding.evidence
    assert found.greedy is not None
    assert found.greedy.differences
    assert not found.greedy.decisive
    assert found.near_ties is not None
    assert found.near_ties.dtype == "bfloat16"
    assert found.near_ties.differences
    assert any("left it at a numerical tie" in sentence for sentence in found.finding.evidence)
    assert any("this decides nothing" in sentence for sentence in found.finding.evidence)


def test_a_copy_that_does_not_fit_into_memory_costs_nothing_else(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    def full(*args: Any, **kwargs: Any) -> LLM:
        raise torch.OutOfMemoryError("out of memory\nTry less.")

    monkeypatch.setattr("branchwise.audit.model.in_bfloat16", full)
    found = audit(llm, plan=replace(QUICK, near_ties=True))
    assert found.finding.word is Word.LOSSLESS
    assert found.near_ties is None
    assert found.finding.evidence[-1] == "bfloat16 was not compared: out of memory"


def test_a_model_in_low_precision_is_sampled_and_its_greedy_texts_decide_nothing() -> None:
    model = tiny_model().to(torch.bfloat16)
    rounded = LLM("rounded", model, tokenizer(), Engine(TransformersTarget(model, slots=33), *parts()))
    VERIFIERS.register("second-best", SecondBest)
    found = audit(rounded, verify="second-best", plan=QUICK)
    assert found.greedy is None
    assert found.near_ties is not None
    assert found.near_ties.differences
    assert found.finding.word is Word.LOSSLESS, found.finding.evidence


def test_ten_samples_decide_nothing(llm: LLM) -> None:
    found = audit(llm, plan=Plan(samples=10, seed=1, greedy_tokens=0))
    assert found.finding.word is Word.UNDECIDED
    assert found.finding.exit_code == 3
    assert found.greedy is None


@pytest.mark.parametrize("draft", ["none", "ngram:min=8,max=9"])
def test_a_drafter_that_proposes_nothing_leaves_the_rule_untested(llm: LLM, draft: str) -> None:
    found = audit(llm, draft, plan=QUICK)
    assert found.finding.word is Word.UNDECIDED
    assert any("not put to the test" in sentence for sentence in found.finding.evidence)


def test_ctrl_c_loses_nothing_and_decides_nothing(llm: LLM) -> None:
    complete = 0

    def interrupt(what: str, done: int, of: int) -> None:
        nonlocal complete
        if what.startswith("match: t s r") and done >= 150:
            complete = done
            raise KeyboardInterrupt

    found = audit(llm, progress=interrupt)
    assert found.interrupted
    assert found.finding.word is Word.UNDECIDED
    assert "interrupted" in found.finding.evidence[0]
    assert [test.context for test in found.tests.contexts] == PROMPTS[:2]
    assert found.tests.contexts[0].samples == 800
    assert 100 <= found.tests.contexts[1].samples <= complete < 800
    assert found.greedy is None


def test_one_seed_gives_one_audit_and_its_report_is_json(llm: LLM) -> None:
    first, again = (audit(llm, "ngram:max=2,min=1", plan=QUICK).as_dict() for _ in range(2))
    assert first == again
    assert json.loads(json.dumps(first)) == first
    assert first["finding"] in ("LOSSLESS", "NOT LOSSLESS", "UNDECIDED")
    assert first["seed"] == 5


def test_what_is_exact_is_computed_once_for_several_verifiers(llm: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    auditor = ModelAuditor(llm, PROMPTS, QUICK)
    auditor.audit("ngram:max=2,min=1")
    monkeypatch.setattr(OwnProbs, "__call__", None)
    assert auditor.audit("ngram:max=3,min=1").tests.samples == 750


@pytest.mark.parametrize(
    ("change", "words"),
    [
        ({"sampling": SamplingParams()}, "temperature above 0"),
        ({"samples": 0}, "at least 1"),
        ({"length": 0}, "at least 1"),
        ({"greedy_tokens": -1}, "at least 0"),
        ({"false_alarm": 2.0}, "false-alarm rate"),
        ({"limit": 0.0}, "distance to detect"),
    ],
)
def test_a_plan_that_makes_no_sense_is_refused(change: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        Plan(**change)


def test_prompts_and_slots_are_checked_before_anything_runs(llm: LLM) -> None:
    with pytest.raises(UsageError, match="no prompts"):
        ModelAuditor(llm, [])
    with pytest.raises(UsageError, match="130 tokens and the context leaves room for 125"):
        ModelAuditor(llm, ["a " * 130])
    model = tiny_model()
    narrow = LLM("narrow", model, llm.tokenizer, Engine(TransformersTarget(model, slots=1), *parts()))
    with pytest.raises(UsageError, match="two free slots"):
        ModelAuditor(narrow, PROMPTS)


# The command line


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> str:
    """The tiny model as a user would have it."""
    path = tmp_path_factory.mktemp("tiny")
    tiny_model().save_pretrained(path)
    tokenizer().save_pretrained(path)
    return str(path)


@pytest.fixture
def prompts(tmp_path: Path) -> str:
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS))
    return str(tmp_path / "prompts.txt")


def run(*arguments: str) -> tuple[int, str]:
    result = CliRunner().invoke(app, list(arguments))
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise result.exception
    return result.exit_code, result.stdout


MODEL = (
    "--draft",
    "ngram:max=2,min=1",
    "--dtype",
    "float32",
    "--seed",
    "5",
    "--length",
    "2",
    "--greedy-tokens",
    "8",
    "--device",
    "cpu",
)


def test_the_command_prints_the_word_on_its_own_line_and_exits_with_its_code(folder: str, prompts: str) -> None:
    code, output = run("model", "--model", folder, *MODEL, "--prompts", prompts, "--samples", "800")
    lines = [line.strip() for line in output.splitlines()]
    assert code == 0, output
    assert "LOSSLESS" in lines
    assert any(line.startswith("all contexts together") for line in lines)
    assert any("would have been found with probability 0.9" in line for line in lines)

    VERIFIERS.register("sharpened", Sharpened)
    words = ("--prompts", prompts, "--samples", "800", "--no-near-ties", "--verify", "sharpened")
    code, output = run("model", "--model", folder, *MODEL, *words)
    assert code == 1, output
    assert "NOT LOSSLESS" in [line.strip() for line in output.splitlines()]

    words = ("--prompts", prompts, "--samples", "10", "--no-near-ties")
    code, output = run("model", "--model", folder, *MODEL, *words)
    assert code == 3, output
    assert "UNDECIDED" in [line.strip() for line in output.splitlines()]


def test_several_verifiers_share_a_model_and_the_worst_word_decides(folder: str, prompts: str) -> None:
    VERIFIERS.register("sharpened", Sharpened)
    words = (
        "--samples",
        "800",
        "--limit",
        "2",
        "--detect",
        "0.12",
        "--no-near-ties",
        "--json",
        "--verify",
        "match, sharpened",
    )
    code, output = run("model", "--model", folder, *MODEL, "--prompts", prompts, *words)
    found = json.loads(output)
    assert output.count("\n") == 1
    assert code == 1
    assert found["audit"] == "model"
    assert found["finding"] == "NOT LOSSLESS"
    assert [entry["verify"] for entry in found["audits"]] == ["match", "sharpened"]
    assert [entry["finding"] for entry in found["audits"]] == ["LOSSLESS", "NOT LOSSLESS"]
    assert found["audits"][0]["blocks"]["samples"] == 1600


@pytest.mark.parametrize(
    ("arguments", "error", "words"),
    [
        (["--verify", "mach"], UnknownName, "Did you mean 'match'"),
        (["--verify", "token"], PairingError, "is not exact for drafter 'auto'"),
        (["--verify", ","], UsageError, "no verifier"),
        (["--draft", "ngran"], UnknownName, "Did you mean 'ngram'"),
        (["--temperature", "0"], UsageError, "temperature above 0"),
        (["--top-p", "0"], UsageError, "top_p"),
        (["--false-alarm", "1"], UsageError, "false-alarm"),
        (["--detect", "0"], UsageError, "distance to detect"),
        (["--samples", "0"], UsageError, "samples must be at least 1"),
        (["--batch", "0"], UsageError, "batch must be at least 1"),
        (["--limit", "0"], UsageError, "limit must be at least 1"),
        (["--prompts", "nowhere.txt"], UsageError, "nowhere.txt cannot be read: No such file"),
    ],
)
def test_a_mistake_is_told_before_a_model_is_loaded(arguments: list[str], error: type, words: str) -> None:
    with pytest.raises(error, match=words):
        run("model", "--model", "./no-such-model", *arguments)


def test_prompt_files_of_every_form_are_read(tmp_path: Path) -> None:
    texts = {
        "plain.txt": "one\n\ntwo two\n",
        "own.jsonl": '{"prompt": "one"}\n{"prompt": "two two"}\n',
        "math.jsonl": '{"question": "one", "answer": "#### 1"}\n\n{"question": "two two", "answer": "#### 2"}\n',
    }
    for name, text in texts.items():
        (tmp_path / name).write_text(text)
        assert read_prompts(tmp_path / name) == ["one", "two two"]
        assert read_prompts(tmp_path / name, 1) == ["one"]
        (tmp_path / f"{name}.gz").write_bytes(gzip.compress(text.encode()))
        assert read_prompts(tmp_path / f"{name}.gz") == ["one", "two two"]
    assert len(read_prompts(None)) > len(read_prompts(None, 2)) == 2


@pytest.mark.parametrize(
    ("content", "words"),
    [
        (b"", "is empty"),
        (b"\n \n", "is empty"),
        (b"caf\xe9", "not UTF-8"),
        (b"\x1f\x8bbroken", "is damaged"),
        (b'{"prompt": "a"}\nb', "Line 2 of .* is not JSON"),
        (b'{"prompt": ""}', "Line 1 of .*prompt"),
        (b'{"turns": []}', "Line 1 of "),
        (b'{"question": 5}', "Line 1 of "),
    ],
)
def test_a_prompt_file_that_cannot_be_used_is_one_sentence(tmp_path: Path, content: bytes, words: str) -> None:
    (tmp_path / "prompts").write_bytes(content)
    with pytest.raises(UsageError, match=words):
        read_prompts(tmp_path / "prompts")


def test_names_of_verifiers_are_split_at_commas_outside_their_options() -> None:
    assert split_names("match") == ["match"]
    assert split_names("token, block,,gbv") == ["token", "block", "gbv"]
    assert split_names("k-seq:2,rho=3,block,gbv:x=1") == ["k-seq:2,rho=3", "block", "gbv:x=1"]
