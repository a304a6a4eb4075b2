"""Draft models in 8 bits: they are quantised where that pays, draft exactly what they say, and change no text."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch

import branchwise
from branchwise.backends import exact, quantized
from branchwise.backends.int8 import IntMM
from branchwise.backends.quantized import QuantizedLinear, choose_weights, conversion_of
from branchwise.backends.transformers import converted
from branchwise.cli import main
from branchwise.draft.model.draft_model import Head, Weights
from branchwise.errors import UnknownName, UnsupportedModel, UsageError
from tests.conformance.architectures import build, served
from tests.test_audit_model import WORDS, tokenizer
from tests.test_int8 import folder_fixture  # noqa: F401
from tests.tiny_gguf import cache_fixture  # noqa: F401

pytestmark = pytest.mark.filterwarnings("ignore::branchwise.errors.LargeDraftWarning")

PROMPT = "a dog ran"


@pytest.fixture(name="others")
def others_fixture(tmp_path: Path) -> Path:
    """A draft model that cannot be quantised."""
    config = served()["mixtral"]
    config.vocab_size = len(WORDS)
    build(config).save_pretrained(tmp_path / "mixtral")
    tokenizer().save_pretrained(tmp_path / "mixtral")
    return tmp_path / "mixtral"


@pytest.fixture(autouse=True)
def _fresh(monkeypatch: pytest.MonkeyPatch) -> None:
    """Weights that another drafter has loaded are not shared with it."""
    monkeypatch.setattr(Weights, "_loaded", {})


def gaining(monkeypatch: pytest.MonkeyPatch, times: float, large: int = 1) -> None:
    """Let a trial find that 8 bits are so many times as fast, for models of at least so many weights."""
    Weights._loaded.clear()
    for module in (quantized, converted):
        monkeypatch.setattr(module, "tried", lambda *_: exact.Trial({None: times, IntMM: 1.0}))
    monkeypatch.setattr(quantized, "LARGE", large)


def drafting(folder: Path, draft: str, method: str = "speculative", **settings: Any) -> branchwise.LLM:
    settings = {"dtype": "float32", "guard": False, **settings}
    return branchwise.load(str(folder), device="cpu", method=method, draft_model=draft, **settings)


def scheme_of(llm: branchwise.LLM) -> str | None:
    """How the draft model is quantised."""
    drafter: Any = llm.engine.drafter
    found = conversion_of(drafter.weights.model)
    return None if found is None else found.scheme


def test_a_draft_model_has_eight_bits_where_they_pay(
    folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gaining(monkeypatch, 9.9, large=1 << 20)
    assert scheme_of(drafting(folder, str(folder))) is None, "it fits into the caches"
    gaining(monkeypatch, 1.1)
    assert scheme_of(drafting(folder, str(folder))) is None
    assert not list(cache.glob("quantised/*"))
    gaining(monkeypatch, 2.0)
    llm = drafting(folder, str(folder))
    assert scheme_of(llm) == "int8"
    assert llm.conversion is None, "the target stays as it is"
    assert scheme_of(drafting(folder, f"{folder},weights=float")) is None
    assert scheme_of(drafting(folder, str(folder), dtype="bfloat16")) is None


def test_a_draft_model_that_is_quantised_reads_fewer_bytes(folder: Path, cache: Path) -> None:
    costs = [drafting(folder, f"{folder},weights={weights}").engine.drafter.cost for weights in ("float", "int8")]
    assert costs[0] == 1.0
    assert costs[1] is not None
    assert costs[1] < 0.5


@pytest.mark.parametrize(
    "method",
    ["chain:3/match", "chain:3/block", "paths:2x3/cascade", "rsd-c:2,2,1/traversal", "topk:6,depth=3,width=2/match"],
)
def test_texts_are_those_of_plain_decoding(folder: Path, cache: Path, method: str) -> None:
    plain = branchwise.load(str(folder), device="cpu", dtype="float32", draft="none")
    llm = drafting(folder, f"{folder},weights=int8", f"model/{method}")
    assert scheme_of(llm) == "int8"
    asked: list[dict[str, Any]] = [{}] + [{"temperature": 0.9, "seed": 3}] * method.endswith("match")
    for options in asked:
        wanted = plain.generate(PROMPT, raw=True, max_new_tokens=24, ignore_eos=True, **options)
        found = llm.generate(PROMPT, raw=True, max_new_tokens=24, ignore_eos=True, **options)
        assert found.token_ids == wanted.token_ids
        assert found.stats.accepted_tokens > 0


def test_the_heads_of_a_quantised_model_give_its_logits(folder: Path, cache: Path) -> None:
    """The whole one has the same bits; rows of it are those of its weights in floating point."""
    weights = Weights.of(str(folder), torch.float32, torch.device("cpu"), weights="int8")
    layer: Any = weights.model.get_output_embeddings()
    assert isinstance(layer, QuantizedLinear)
    hidden = torch.randn(3, 2, layer.in_features, generator=torch.Generator().manual_seed(1))
    whole, rows = weights.own_head(), torch.tensor([5, 1, 9])
    assert isinstance(whole, Head)
    assert torch.equal(whole(hidden), layer(hidden))
    assert whole.seen is hidden
    assert not list(whole.children()), "its weights would count twice"
    assert torch.allclose(weights.own_head(rows)(hidden), layer(hidden)[..., rows], rtol=0.05, atol=0.05)


def test_what_cannot_be_quantised_drafts_as_it_is(
    folder: Path, others: Path, cache: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    gaining(monkeypatch, 2.0)
    assert scheme_of(drafting(folder, str(others))) is None
    with pytest.raises(UnsupportedModel, match="outside linear layers"):
        drafting(folder, f"{others},weights=int8")


def test_what_cannot_be_is_refused(folder: Path) -> None:
    with pytest.raises(UnknownName, match="int8"):
        drafting(folder, f"{folder},weights=int9")
    with pytest.raises(UsageError, match="for CPUs"):
        choose_weights("int8", torch.float32, "cuda")


def test_a_target_in_sixteen_bits_may_have_a_draft_in_eight(folder: Path, cache: Path) -> None:
    llm = drafting(folder, f"{folder},weights=int8", dtype="bfloat16")
    assert scheme_of(llm) == "int8"
    plain = branchwise.load(str(folder), device="cpu", dtype="bfloat16", draft="none")
    found = llm.generate(PROMPT, raw=True, max_new_tokens=12, ignore_eos=True)
    assert found.stats.accepted_tokens > 0
    assert found.token_ids == plain.generate(PROMPT, raw=True, max_new_tokens=12, ignore_eos=True).token_ids


def test_the_audit_of_a_draft_in_eight_bits_is_lossless(
    folder: Path, cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prompts.txt").write_text("the cat sat\na dog")
    words = ["branchwise", "audit", "model", "--model", str(folder), "--device", "cpu", "--dtype", "float32"]
    words += [
        "--method",
        "block",
        "--draft-model",
        f"{folder},weights=int8",
        "--prompts",
        str(tmp_path / "prompts.txt"),
    ]
    words += ["--samples", "400", "--length", "2", "--detect", "0.3", "--seed", "1", "--raw", "--greedy-tokens", "24"]
    monkeypatch.setattr(sys, "argv", words)
    with pytest.raises(SystemExit) as ended:
        main()
    told = capsys.readouterr()
    assert ended.value.code == 0, told.out + told.err
    assert "LOSSLESS" in told.out
    assert "NOT LOSSLESS" not in told.out
