"""Heads learn what can be learned of a tiny target, nothing else, and go on where they were ended."""

from __future__ import annotations

import warnings
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from transformers import LlamaForCausalLM

from branchwise.backends.transformers.target import TransformersTarget
from branchwise.errors import UsageError
from branchwise.progress import Progress, silent
from branchwise.train.corpus import Text
from branchwise.train.head.cross import LayerCache, moved_keys, rotary_frequencies
from branchwise.train.head.learn import Learner, Recipe, Watched
from branchwise.train.head.run import FORMS, Sizes, Training, blank_head
from branchwise.train.texts import Writer, without_loops
from tests.test_head_drafter import VOCABULARY, model_of

SIZES = Sizes(mlp=32, table=VOCABULARY)
STEPS = 80
LONG = {"carry": False, "window": 8, "cross": True, "states": False}


def ruled(seed: int = 0) -> LlamaForCausalLM:
    """A target that follows one rule: after token i comes token 7 i + 3."""
    model = model_of(seed, num_hidden_layers=2, tie_word_embeddings=False)
    for layer in model.model.layers:
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
        torch.nn.init.zeros_(layer.mlp.down_proj.weight)
    tokens = torch.arange(VOCABULARY)
    model.lm_head.weight[(7 * tokens + 3) % VOCABULARY] = 8 * model.model.embed_tokens.weight[tokens]
    return model


def texts_of(model: LlamaForCausalLM, count: int = 60, length: int = 40) -> list[Text]:
    rng = torch.Generator().manual_seed(0)
    prompts = [torch.randint(0, VOCABULARY, (3,), generator=rng).tolist() for _ in range(count)]
    with Writer(model, [], 32) as writer:
        answers = writer.write(prompts, [2.0] * count, length)
    return [Text(torch.tensor([*p, *a], dtype=torch.int32), 3) for p, a in zip(prompts, answers, strict=True)]


def training(folder: Path, model: LlamaForCausalLM, progress: Progress = silent, **sizes: object) -> Training:
    target = TransformersTarget(model, slots=1, context=64)
    recipe = Recipe(1.0, steps=STEPS, depth=3, tokens=600)
    return Training(model, target.info, folder, replace(SIZES, **sizes), recipe, progress)


@pytest.mark.parametrize(
    "options",
    [{}, {"carry": False, "gate": "full"}, {"carry": False, "masks": 3, "bias": 8}, FORMS["speculators"], LONG],
)
def test_a_head_learns_a_rule(tmp_path: Path, options: dict[str, object]) -> None:
    model = ruled()
    texts = texts_of(model)
    head = training(tmp_path, model, **options).run(texts[8:], texts[:8], 1e9)
    assert min(head.about["curve"][-1]["hits"][: 1 if options.get("masks") else 3]) > 0.9


def test_moved_positions_do_not_change_what_the_target_computes(monkeypatch: pytest.MonkeyPatch) -> None:
    """It reads its text where it stands; keys are turned to where it would have put them, and nothing else changes."""
    model = model_of(2, max_position_embeddings=4096)
    target = TransformersTarget(model, slots=1, context=64)
    head = blank_head(model, target.info, replace(SIZES, **LONG))
    for weight in head.parameters():
        torch.nn.init.normal_(weight, std=0.3)
    watched = Watched(model, head.config.taps, torch.arange(VOCABULARY), head.config.cross)
    learner = Learner(head, watched, Recipe(1.0, depth=3, moved=1.0))
    texts = texts_of(model, 3)
    found, states, tokens, counted = learner._unrolled(texts)
    moved, *same = learner._unrolled(texts, moved=True)
    assert all(torch.equal(*pair) for pair in zip((states, tokens, counted), same, strict=True))
    assert not torch.allclose(found[0], moved[0])
    again = Learner(head, watched, Recipe(1.0, depth=3, moved=1.0))._unrolled(texts, moved=True)[0]
    assert torch.equal(again[0], moved[0])  # seed and step decide
    monkeypatch.setattr("branchwise.train.head.cross.ANCHORS", 0)
    whole = learner._unrolled(texts, moved=True)[0]
    torch.testing.assert_close(whole, found, atol=5e-3, rtol=5e-3)  # only distances to the anchors have changed

    # Keys of the first layer know no others, so that they can stand anywhere; moved as a whole, those of all can.
    places = torch.arange(tokens.shape[1])
    for layer, anchors in (("model.layers.0", 3), ("model.layers.2", 0)):
        positions = places + 3000 * (places >= anchors)
        plain, far = LayerCache(layer), LayerCache(layer)
        for cache, at in ((plain, places), (far, positions)):
            model.base_model(tokens, position_ids=at[None], past_key_values=cache, use_cache=False)
        assert plain.rows is not None
        turned = moved_keys(plain.rows, positions, rotary_frequencies(model, 6))
        torch.testing.assert_close(turned, far.rows, atol=2e-3, rtol=1e-3)
        assert not torch.allclose(plain.rows.keys, turned.keys, atol=1e-1)


def test_a_head_refuses_keys_that_do_not_turn_as_a_whole() -> None:
    model = model_of(num_hidden_layers=1)
    with pytest.raises(UsageError, match="another --form"):
        rotary_frequencies(model, 8)


def test_a_head_does_not_learn_noise(tmp_path: Path) -> None:
    """The best tokens of a random network cannot be foreseen in texts that were held out."""
    model = model_of(3, num_hidden_layers=2)
    texts = texts_of(model)
    head = training(tmp_path, model).run(texts[8:], texts[:8], 1e9)
    assert head.about["curve"][-1]["hits"][0] < 0.5


def test_a_run_that_was_ended_goes_on(tmp_path: Path) -> None:
    """It ends where an unbroken one does, to the last bit."""
    model = ruled()
    texts = texts_of(model, 40)
    whole = training(tmp_path / "whole", model).run(texts[8:], texts[:8], 0.0)

    def end(message: str, done: int, total: int) -> None:
        if done >= 50:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        training(tmp_path / "ended", model, end).run(texts[8:], texts[:8], 0.0)
    head = training(tmp_path / "ended", model).run(texts[8:], texts[:8], 0.0)
    assert head.about["steps"] == whole.about["steps"] == STEPS
    for name, weight in whole.head.state_dict().items():
        assert torch.equal(head.head.state_dict()[name], weight), name
    with pytest.raises(UsageError, match="another run"):
        training(tmp_path / "ended", model, mlp=48)


def test_a_run_with_other_texts_is_another_run(tmp_path: Path) -> None:
    run = replace(training(tmp_path / "one", ruled()), folder=tmp_path / "two", texts={"kind": "code", "avoid": []})
    replace(run)
    for texts in ({"kind": "general", "avoid": []}, {"kind": "code", "avoid": ["an evaluation"]}):
        with pytest.raises(UsageError, match="another run"):
            replace(run, texts=texts)


def test_a_warning_of_a_cpu_without_bfloat16_is_not_shown(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    model = ruled()
    texts, own = texts_of(model, 12), torch.optim.Muon.step

    def step(self: torch.optim.Muon) -> None:
        warnings.warn("mkldnn_matmul failed, switching to BLAS gemm", UserWarning, stacklevel=1)
        own(self)

    monkeypatch.setattr(torch.optim.Muon, "step", step)
    run = training(tmp_path, model)
    with warnings.catch_warnings():
        warnings.simplefilter("error", UserWarning)
        replace(run, folder=tmp_path / "short", recipe=replace(run.recipe, steps=1)).run(texts[4:], texts[:4])


def test_answers_are_those_of_the_model() -> None:
    model = model_of()
    prompts = [[1, 2, 3], [4, 5, 6, 7, 8], [9], [10, 11]]
    with Writer(model, [39], 3) as writer:
        answers = writer.write(prompts, [0.0] * 4, 20)
        drawn = writer.write([[1, 2]] * 600, [1.0] * 600, 1, seed=1)
    for prompt, answer in zip(prompts, answers, strict=True):
        given = torch.tensor([prompt])
        found = model.generate(
            given, attention_mask=torch.ones_like(given), do_sample=False, max_new_tokens=20, eos_token_id=39,
            pad_token_id=0,
        )[0, len(prompt) :].tolist()  # fmt: skip
        assert answer == found
    counts = torch.bincount(torch.tensor([text[0] for text in drawn if text]), minlength=VOCABULARY) / 600
    wanted = model(torch.tensor([[1, 2]])).logits[0, -1].softmax(0)
    assert float((counts - wanted)[:39].abs().sum()) / 2 < 0.12


def test_loops_are_cut() -> None:
    loop = [1, 2, 3, 4, 5, 6, 7, 8, 9]
    plain = list(range(100))
    cut, kept = without_loops([loop * 20, plain])
    assert kept == plain
    assert len(cut) == 3 * 9 + 8 + 24
