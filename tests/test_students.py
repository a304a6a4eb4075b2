"""Students: what is learned is the divergence that was asked for, from the texts that were asked for."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn import functional
from transformers import LlamaForCausalLM

from branchwise.backends.transformers.target import TransformersTarget
from branchwise.errors import ModelError, UsageError
from branchwise.progress import Progress, silent
from branchwise.train.corpus import Text
from branchwise.train.keeping import kept_whole
from branchwise.train.student.divergence import KINDS, distilled, divergence, judged
from branchwise.train.student.learn import Learner, Recipe, Taught
from branchwise.train.student.model import begin, check_out, check_output, export, parse_layers, spread_layers
from branchwise.train.student.own import OwnTexts
from branchwise.train.student.run import Run
from branchwise.train.student.score import Judge
from branchwise.train.texts import Writer
from tests.test_audit_model import tiny_model, tokenizer
from tests.test_model_drafter import VOCABULARY, tiny

RECIPE = Recipe(1.0, steps=30, tokens=700, rate=3e-2, depth=3, chunk=256)


def plain(p: Tensor, q: Tensor, kind: str) -> Tensor:
    """The formulas of the paper."""

    def kl(p: Tensor, q: Tensor) -> Tensor:
        return (p * (p.log() - q.log())).sum(-1)

    m = (p + q) / 2
    formulas = {
        "fkl": lambda: kl(p, q),
        "rkl": lambda: kl(q, p),
        "js": lambda: (kl(p, m) + kl(q, m)) / 2,
        "tv": lambda: (p - q).abs().sum(-1) / 2,
    }
    return formulas[kind]()


@pytest.mark.parametrize("temperature", [1.0, 0.6])
@pytest.mark.parametrize("kind", KINDS)
def test_value_and_gradient_are_those_of_the_plain_formula(kind: str, temperature: float) -> None:
    rng = torch.Generator().manual_seed(0)
    guess, truth = (3 * torch.randn(7, 11, generator=rng, dtype=torch.float64) for _ in range(2))
    weights = torch.rand(7, generator=rng, dtype=torch.float64)
    values, slopes = [], []
    for way in (
        lambda z: divergence(z, truth, kind, temperature),
        lambda z: plain((truth / temperature).softmax(-1), (z / temperature).softmax(-1), kind),
    ):
        logits = guess.clone().requires_grad_(True)
        found = way(logits)
        (weights * found).sum().backward()
        values.append(found.detach())
        slopes.append(logits.grad)
    torch.testing.assert_close(values[0], values[1])
    torch.testing.assert_close(slopes[0], slopes[1])
    assert float(slopes[1].abs().max()) > 1e-3


@pytest.mark.parametrize("kind", KINDS)
def test_chunks_have_the_gradients_of_the_whole(kind: str) -> None:
    rng = torch.Generator().manual_seed(1)
    hidden, states = (torch.randn(10, 6, generator=rng, dtype=torch.float64) for _ in range(2))
    teacher = functional.linear
    rows, padded = torch.randn(9, 6, generator=rng).double(), torch.randn(12, 6, generator=rng).double()
    padded[:9] = rows
    found = []
    for chunk in (3, 100):
        given, weight = hidden.clone().requires_grad_(True), rows.clone().requires_grad_(True)
        loss = distilled(
            given, lambda x, w=weight: teacher(x, w), states, lambda x: teacher(x, padded), kind, 1.0, chunk
        )
        loss.backward()
        found.append([loss.detach(), given.grad, weight.grad])
    torch.testing.assert_close(found[0], found[1])


@pytest.mark.parametrize("chunk", [3, 100])
@pytest.mark.parametrize("kind", KINDS)
def test_a_head_that_is_a_matrix_has_the_gradients_of_any_other(kind: str, chunk: int) -> None:
    rng = torch.Generator().manual_seed(1)
    hidden, states = (torch.randn(10, 6, generator=rng, dtype=torch.float64) for _ in range(2))
    teacher = torch.randn(9, 6, generator=rng).double()
    found = []
    for wrapped in (False, True):
        given, head = hidden.clone().requires_grad_(True), torch.nn.Linear(6, 12, bias=False).double()
        with torch.no_grad():
            head.weight.copy_(torch.linspace(-1, 1, 72).view(12, 6))
        way = (lambda x, head=head: head(x)) if wrapped else head
        loss = distilled(given, way, states, lambda x: functional.linear(x, teacher), kind, 0.7, chunk)
        (3 * loss).backward()
        found.append([loss.detach().float(), given.grad, head.weight.grad])
    torch.testing.assert_close(found[0], found[1])
    assert float(found[0][2].abs().max()) > 1e-3


@pytest.mark.parametrize("tokens", [1, 37, 4100])
@pytest.mark.parametrize("kind", KINDS)
def test_the_kernel_says_what_the_plain_divergence_says(kind: str, tokens: int) -> None:
    kernel = pytest.importorskip("branchwise.cuda.distil")
    rng = torch.Generator().manual_seed(tokens)
    guess, truth = 4 * torch.randn(2, 3, tokens + 2, generator=rng)[:, :, :tokens]
    for temperature in (1.0, 0.6):
        expected = judged(guess, truth, kind, temperature)
        found = kernel.diverge(guess, truth, kind, temperature)
        torch.testing.assert_close(found, expected, rtol=1e-3, atol=5e-5)


def taught_by() -> LlamaForCausalLM:
    """A target with something to learn: its next token depends on the last one alone."""
    model = tiny(2, layers=2).requires_grad_(False)
    for layer in model.model.layers:
        torch.nn.init.zeros_(layer.self_attn.o_proj.weight)
        torch.nn.init.zeros_(layer.mlp.down_proj.weight)
    return model


def texts_of(model: Any, count: int = 60, length: int = 24, heat: float = 1.0, seed: int = 0) -> list[Text]:
    rng = torch.Generator().manual_seed(seed)
    prompts = [torch.randint(0, VOCABULARY, (3,), generator=rng).tolist() for _ in range(count)]
    with Writer(model, [], 32) as writer:
        answers = writer.write(prompts, [heat] * count, length, seed)
    return [Text(torch.tensor([*p, *a], dtype=torch.int32), 3, heat) for p, a in zip(prompts, answers, strict=True)]


def run_of(folder: Path, recipe: Recipe = RECIPE, progress: Progress = silent, exits: tuple[int, ...] = ()) -> Run:
    target = taught_by()
    student = tiny(9, layers=2)
    info = TransformersTarget(target, slots=1, context=64).info
    return Run(student, target, info, folder, recipe, exits, progress=progress)


def blind(target: Any, texts: list[Text]) -> float:
    """The acceptance of a drafter that knows how often tokens come, and nothing of the text before them."""
    rows = torch.cat([target(text.tokens.long()[None]).logits[0, text.prompt - 1 : -1].softmax(-1) for text in texts])
    return float(torch.minimum(rows, rows.mean(0)).sum(-1).mean())


@pytest.mark.parametrize("kind", KINDS)
def test_a_student_rises_above_what_it_began_with_in_texts_that_it_never_saw(tmp_path: Path, kind: str) -> None:
    run = run_of(tmp_path, replace(RECIPE, divergence=kind))
    texts = texts_of(run.target)
    learner = run.run(texts[10:], texts[:10], 1e9)
    before, after = (learner.curve[at]["exits"][0] for at in (0, -1))
    assert after["acceptance"] > max(before["acceptance"], blind(run.target, texts[:10])) + 0.1
    assert after["block"] > before["block"] + 0.1


def test_a_student_learns_nothing_of_texts_from_what_the_target_says_elsewhere(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Shuffled among the places of a batch, the target's distributions teach how often tokens come, and no more."""
    own, rng = Learner.states, torch.Generator().manual_seed(0)

    def shuffled(self: Learner, texts: Any) -> Any:
        found, states, tokens, where = own(self, texts)
        return found, states[torch.randperm(len(states), generator=rng)], tokens, where

    run = run_of(tmp_path)
    texts = texts_of(run.target)
    learner = Learner(Taught(run.student), run.target, RECIPE)
    with monkeypatch.context() as patched:
        patched.setattr(Learner, "states", shuffled)
        while not learner.finished:
            learner.learn(texts[10:30])
    assert learner.score([texts[:10]])[0].acceptance < blind(run.target, texts[:10]) + 0.05


def test_the_score_is_the_acceptance_and_the_block_efficiency_of_the_rule(tmp_path: Path) -> None:
    """Against a slow count: drafts drawn from the student, accepted with min(1, p/q), over many texts of the target."""
    target = tiny(2, layers=3).requires_grad_(False)
    student = tiny(2, layers=2).requires_grad_(False)
    learner = Learner(Taught(student), target, replace(RECIPE, depth=2))
    texts = texts_of(target, 300, length=2)
    [score] = learner.score([texts])
    first = torch.stack([text.tokens[:3].long() for text in texts])
    with torch.no_grad():
        kept = 0.0
        p, q = (model(first).logits[:, -1].softmax(-1) for model in (target, student))
        both = torch.minimum(p, q)
        for token in range(VOCABULARY):  # all first drafts, each with its probability of being kept
            longer = torch.cat([first, torch.full((len(first), 1), token)], dim=1)
            p, q = (model(longer).logits[:, -1].softmax(-1) for model in (target, student))
            kept += float((both[:, token] * (1 + torch.minimum(p, q).sum(-1))).mean())
    assert score.block == pytest.approx(1 + kept, abs=0.06)
    greedy = [replace(text, temperature=0.0) for text in texts_of(target, 20, length=12, heat=0.0)]
    [same] = Learner(Taught(target), target, replace(RECIPE, depth=4)).score([greedy])
    assert (same.acceptance, same.agreement, same.block) == pytest.approx((1, 1, 5))


def test_places_that_a_draft_does_not_fit_in_do_not_count() -> None:
    judge = Judge(2)
    where = torch.tensor([0, 0, 0, 1]), torch.tensor([4, 5, 6, 2])
    judge.begin(where, torch.zeros(4, dtype=torch.long), torch.ones(4))
    logits = torch.zeros(4, 3)
    judge.see(slice(0, 4), logits, logits)
    judge.end()
    assert judge.score.block == pytest.approx(3)
    assert float(judge._blocks[1]) == 2


# Data of its own


def test_what_the_student_writes_is_the_student_s(tmp_path: Path) -> None:
    """Greedy, each continuation is what the student itself, as it is now, finds most probable."""
    target = taught_by()
    student = tiny(7, layers=1)
    texts = texts_of(target, 12)
    own = OwnTexts(texts, tokens=120, span=5, temperature=0.0, seed=3, batches=3)

    def check(batch: list[Text]) -> None:
        begun = [tuple(text.tokens.tolist()) for text in texts]
        for text in batch:
            tokens = text.tokens.long()
            assert any(whole[: text.prompt] == tuple(tokens[: text.prompt].tolist()) for whole in begun)
            with torch.no_grad():
                best = student(tokens[None]).logits[0].argmax(-1)
            assert best[text.prompt - 1 : -1].tolist() == tokens[text.prompt :].tolist()

    first = own.next(student)
    check(first)
    while own.waiting:
        check(own.next(student))
    with torch.no_grad():
        for weight in student.parameters():
            weight.neg_()
    check(own.next(student))
    assert own.rounds == 2


def test_the_share_of_own_batches_is_the_one_asked_for(tmp_path: Path) -> None:
    run = run_of(tmp_path, replace(RECIPE, on_policy=0.5, span=6, steps=16))
    texts = texts_of(run.target)
    learner = run.run(texts[10:], texts[:10], 1e9)
    assert 3 < learner.written < 13
    assert learner.curve[-1]["exits"][0]["acceptance"] > learner.curve[0]["exits"][0]["acceptance"]


# Runs


@pytest.mark.parametrize("on_policy", [0.0, 0.4])
def test_a_run_that_was_ended_goes_on_to_the_last_bit(tmp_path: Path, on_policy: float) -> None:
    recipe = replace(RECIPE, steps=8, on_policy=on_policy, span=6)
    whole, ended = run_of(tmp_path / "whole", recipe), run_of(tmp_path / "ended", recipe)
    texts = texts_of(whole.target, 40)
    whole.run(texts[8:], texts[:8], 0.0)

    def end(message: str, done: int, total: int) -> None:
        if done >= 50:
            raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        replace(ended, progress=end).run(texts[8:], texts[:8], 0.0)
    (tmp_path / "ended" / ".state.pt.part").write_bytes(b"half a checkpoint, as a kill leaves it")
    again = run_of(tmp_path / "ended", recipe)
    learner = again.run(texts[8:], texts[:8], 0.0)
    assert learner.steps == 8
    for name, weight in whole.student.state_dict().items():
        assert torch.equal(again.student.state_dict()[name], weight), name
    with pytest.raises(UsageError, match="another run"):
        run_of(tmp_path / "ended", replace(recipe, divergence="tv"))


def test_all_exits_learn_together(tmp_path: Path) -> None:
    run = run_of(tmp_path, exits=(1, 2))
    texts = texts_of(run.target)
    learner = run.run(texts[10:], texts[:10], 1e9)
    for number in range(2):
        before, after = (learner.curve[at]["exits"][number] for at in (0, -1))
        assert before["layers"] == number + 1
        assert after["acceptance"] > before["acceptance"] + 0.1


def test_what_an_exit_learns_from_is_its_sub_model() -> None:
    model = tiny(3, layers=3)
    tokens = torch.randint(0, VOCABULARY, (2, 9))
    with torch.no_grad():
        first, last = Taught(model, (1, 3))(tokens)
        alone = begin("layers:0", model, None, torch.device("cpu"))
        torch.testing.assert_close(first, alone.model(tokens).last_hidden_state)
        torch.testing.assert_close(last, model.model(tokens).last_hidden_state)


# Where it begins, and where it ends


def test_a_student_of_all_layers_is_its_target() -> None:
    model = tiny(3, layers=3)
    tokens = torch.randint(0, VOCABULARY, (2, 9))
    again = begin("layers:0,1,2", model, None, torch.device("cpu"))
    assert torch.equal(again(tokens).logits, model(tokens).logits)
    turned = begin("layers:2,1,0", model, None, torch.device("cpu"))
    assert not torch.allclose(turned(tokens).logits, model(tokens).logits)


def test_layers_that_are_none_are_refused() -> None:
    assert parse_layers("layers:0,14,29", 30) == [0, 14, 29]
    with pytest.raises(UsageError, match="The target has layers 0 to 29, and no layer 30"):
        parse_layers("layers:0,30", 30)
    with pytest.raises(UsageError, match="names no layers; write numbers"):
        parse_layers("layers:first", 30)
    assert spread_layers(4, 30) == "layers:0,10,19,29"
    assert spread_layers(1, 30) == "layers:29"
    with pytest.raises(UsageError, match="has 3 layers, fewer than 4"):
        spread_layers(4, 3)


def test_a_model_with_another_tokenizer_or_without_weights_is_refused(tmp_path: Path) -> None:
    other = tokenizer()
    other.add_tokens(["something else"])
    tiny_model().save_pretrained(tmp_path / "other")
    other.save_pretrained(tmp_path / "other")
    with pytest.raises(ModelError, match="has another tokenizer than the target"):
        begin(str(tmp_path / "other"), tiny_model(), tokenizer(), torch.device("cpu"))
    (tmp_path / "other" / "model.safetensors").unlink()
    with pytest.raises(ModelError, match="there are no safetensors beside its config"):
        begin(str(tmp_path / "other"), tiny_model(), tokenizer(), torch.device("cpu"))


def test_a_folder_appears_as_a_whole_or_not_at_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "student"
    check_out(out)

    def full(*_: object, **__: object) -> None:
        raise OSError(28, "No space left on device")

    with monkeypatch.context() as patched:
        patched.setattr(type(tokenizer()), "save_pretrained", full)
        with pytest.raises(UsageError, match=r"student cannot be written: No space left on device. Make room"):
            export(tiny_model(), tokenizer(), out, {}, torch.float32)
    assert not list(tmp_path.iterdir())
    export(tiny_model(), tokenizer(), out, {"target": "tiny"}, torch.float32)
    assert (out / "training.json").read_text()
    with pytest.raises(UsageError, match="exists; name a new folder"):
        check_out(out)
    with pytest.raises(UsageError, match="There is no folder"):
        check_out(tmp_path / "nowhere" / "student")


def test_a_checkpoint_for_which_there_is_no_room_leaves_the_last_one(tmp_path: Path) -> None:
    file = tmp_path / "state.pt"
    kept_whole(file, {"steps": 1})
    (tmp_path / ".state.pt.part").symlink_to("/dev/full")
    with pytest.raises(UsageError, match="No space left on device"):
        kept_whole(file, {"steps": 2})
    assert torch.load(file) == {"steps": 1}
    kept_whole(file, {"steps": 3})
    assert torch.load(file) == {"steps": 3}


def test_a_model_that_changes_its_logits_is_refused() -> None:
    class Squeezed(LlamaForCausalLM):
        def forward(self, *words: Any, **options: Any) -> Any:
            found = super().forward(*words, **options)
            found.logits = found.logits.clamp(-0.1, 0.1)
            return found

    check_output(tiny(0), "tiny")
    squeezed = Squeezed(tiny(0).config)
    with pytest.raises(ModelError, match="changes its logits after its head"):
        check_output(squeezed, "squeezed")
