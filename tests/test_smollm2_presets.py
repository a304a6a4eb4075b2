"""Every lossless preset with a draft model on the real default model: what it writes is what the model writes.

Two draft models: the target itself, which knows the truth, and a random one, which knows nothing.
"""

from __future__ import annotations

import pytest
import torch
from transformers import LlamaConfig, LlamaForCausalLM

from branchwise.draft.model import vocabulary
from branchwise.draft.model.draft_model import Weights
from branchwise.engine import Engine
from branchwise.llm import LLM
from branchwise.methods import PRESETS, Method, find_method

METHODS = [method for method in PRESETS.values() if method.blanks == ["model"] and method.lossless]
PROMPT = "Name three rivers and the seas that they reach."
LENGTH = 10


@pytest.fixture(scope="module")
def drafts(smollm2: LLM) -> list[Weights]:
    """Known by names that `model:` finds without loading anything."""
    torch.manual_seed(0)
    config = LlamaConfig(
        vocab_size=smollm2.model.config.vocab_size,
        hidden_size=32,
        intermediate_size=32,
        num_hidden_layers=1,
        num_attention_heads=2,
        max_position_embeddings=512,
    )
    random = LlamaForCausalLM(config).eval()
    found = [
        Weights(name, model.requires_grad_(False), smollm2.tokenizer)
        for name, model in (("own/truth", smollm2.model), ("own/random", random))
    ]
    for weights in found:
        Weights._loaded[weights.name, torch.float32, "cpu", "auto"] = weights
    return found


@pytest.fixture(autouse=True)
def _counts(smollm2: LLM, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> None:
    """A trimmed head needs counts; here the lower half of the vocabulary is the frequent one."""
    table = tmp_path_factory.getbasetemp() / "counts.safetensors"
    monkeypatch.setattr(vocabulary, "table_of", lambda target: table)
    if not table.exists():
        vocabulary.save_counts(smollm2.engine.target.info, torch.arange(smollm2.engine.target.vocabulary, 0, -1), {})


def write(smollm2: LLM, method: Method, **options: object) -> tuple[list[int], float]:
    drafter, verifier = method.build()
    engine = Engine(smollm2.engine.target, drafter, verifier)
    llm = LLM("smollm2", smollm2.model, smollm2.tokenizer, engine)
    answer = llm.generate(PROMPT, max_new_tokens=LENGTH, **options)  # type: ignore[arg-type]
    return answer.token_ids, answer.stats.mean_acceptance_length


@pytest.mark.usefixtures("drafts")
@pytest.mark.parametrize("method", METHODS, ids=lambda method: method.name)
def test_greedy_text_is_that_of_plain_decoding(smollm2: LLM, method: Method) -> None:
    plain, _ = write(smollm2, PRESETS["plain"])
    lengths = {}
    for draft in ("own/truth", "own/random"):
        text, lengths[draft] = write(smollm2, find_method(method.name, draft))
        assert text == plain, draft
    assert lengths["own/truth"] > 2.5 > 1.5 > lengths["own/random"] >= 1


@pytest.mark.usefixtures("drafts")
@pytest.mark.parametrize("method", [m for m in METHODS if m.verify == "match"], ids=lambda method: method.name)
def test_sampled_text_is_that_of_plain_decoding_seed_for_seed(smollm2: LLM, method: Method) -> None:
    plain, _ = write(smollm2, PRESETS["plain"], temperature=0.9, seed=3)
    for draft in ("own/truth", "own/random"):
        assert write(smollm2, find_method(method.name, draft), temperature=0.9, seed=3)[0] == plain


@pytest.mark.usefixtures("drafts")
@pytest.mark.parametrize("name", ["block", "cascade", "rsd-s"])
def test_who_drafts_from_the_targets_own_law_is_accepted_to_the_end(smollm2: LLM, name: str) -> None:
    # p = q: these rules take the whole of a drawn path. Catches distributions of another temperature, position or text.
    text, length = write(smollm2, find_method(name, "own/truth"), temperature=0.8, seed=1)
    assert len(text) == LENGTH
    assert length > 4
