"""`branchwise train stop`: what is collected, what is learned from it, and what the command says.

Statistical tests run on fixed seeds, so they always give the same answer. `FALSE_ALARM` is how often each would have
failed for a sound build had the seeds been fresh.
"""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from scipy import stats
from torch import Tensor
from typer.testing import CliRunner

from branchwise.cli import app
from branchwise.core.sampling import SamplingParams
from branchwise.draft import build_policy
from branchwise.draft.builder import NodeProbs, TreePolicy
from branchwise.draft.noisy_target import NoisyTarget
from branchwise.draft.policies.stop import Scorer, features, read_scorer, write_scorer
from branchwise.draft.tree_drafter import ExpandRequest
from branchwise.engine import Engine, Request
from branchwise.errors import BranchwiseError, PairingError, UsageError
from branchwise.testing import ToyTarget
from branchwise.train.stop import Fan, Judge, Samples, collect, fit, hold_out
from branchwise.verify import VERIFIERS
from tests.test_builder import Remembered

FALSE_ALARM = 1e-4
PROMPTS = [(n % 6, n // 6) for n in range(10)]


class Seeing(NoisyTarget):
    """A drafter with hidden states: the distribution itself, and numbers that say nothing."""

    def look(self, requests: Sequence[ExpandRequest]) -> list[NodeProbs]:
        found = super().look(requests)
        return [
            NodeProbs(there.probs, torch.cat([there.probs, torch.ones(len(there.probs), 2)], dim=1)) for there in found
        ]


def collected(kind: str = "hard", sigma: float = 1.0, **options: Any) -> Samples:
    fan = Fan(kind)
    options = {"samples": 400, "length": 40, **options}
    return collect(options.pop("target", Remembered(6)), Seeing(sigma, tree=fan), fan, PROMPTS, **options)


# Collecting


@pytest.mark.parametrize("kind", ["soft", "hard"])
def test_samples_are_the_nodes_below_the_root_with_both_laws_as_the_text_wants_them(kind: str) -> None:
    class Recording(Fan):
        def take(self) -> dict[int, NodeProbs]:
            self.last = super().take()
            return self.last

    fan, target, temperature = Recording(kind, width=4), ToyTarget(6), 0.6
    judge = Judge(fan)
    engine = Engine(target, Seeing(1.0, tree=fan), judge)
    prompts = [(1, 2), (3,), (4, 4, 4)]
    for n, prompt in enumerate(prompts):
        engine.submit(
            Request(prompt, SamplingParams(temperature=temperature, seed=n), max_new_tokens=1 if n == 1 else 9)
        )
    trees = []
    draft, engine.drafter.draft = engine.drafter.draft, lambda *given: trees.append(draft(*given)) or trees[-1]  # type: ignore[func-returns-value, method-assign]
    moved = [generation.request.prompt for generation in engine.step()]
    drafted = {moved[row] for row in judge.samples}
    assert drafted == {(1, 2), (4, 4, 4)}, "a text that ends with the next token drafts nothing"
    for row, (seen, labels) in judge.samples.items():
        tree = trees[0][row]
        assert tree.parents == (-1, 0, 0, 0, 0)
        assert torch.equal(seen, features(kind, fan.last[row]))
        for child, label, q in zip(tree.tokens[1:].tolist(), labels.tolist(), fan.last[row].probs, strict=True):
            p = torch.softmax(target.logits([*moved[row], child]) / temperature, dim=-1)
            goal = float(torch.minimum(p, q).sum()) if kind == "soft" else float(p.argmax() == q.argmax())
            assert label == pytest.approx(goal, abs=1e-6)


def test_a_drafter_that_is_the_target_is_always_right() -> None:
    assert collected("soft", sigma=0.0).labels.min() > 1 - 1e-5
    assert collected("hard", sigma=0.0).labels.min() == 1


def test_labels_fall_as_the_drafter_gets_worse() -> None:
    for kind in ("soft", "hard"):
        near, far = (float(collected(kind, sigma).labels.mean()) for sigma in (0.3, 2.0))
        assert near > far + 0.2


def test_every_prompt_brings_its_part() -> None:
    samples = collected(samples=400)
    assert len(samples.features) == len(samples.labels) == len(samples.texts)
    counts = samples.texts.bincount(minlength=len(PROMPTS))
    assert counts.min() >= 40
    assert counts.max() <= 40 + 6, "at most one step more than asked for"


def test_a_text_that_ends_too_early_is_written_again_with_other_draws(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Request] = []
    submit = Engine.submit
    monkeypatch.setattr(Engine, "submit", lambda self, request: asked.append(request) or submit(self, request))  # type: ignore[func-returns-value]
    samples = collected(samples=400, stop_tokens=frozenset({0, 1, 2}))
    assert samples.texts.bincount().min() >= 40
    assert len(asked) > 2 * len(PROMPTS)
    seeds = [request.sampling.seed for request in asked]
    assert len(set(seeds)) == len(seeds)


def test_texts_that_draft_nothing_are_told_and_not_written_for_ever() -> None:
    with pytest.raises(UsageError, match="fewer than 50 drafted nodes"):
        collected(length=1)


def test_the_same_seed_collects_the_same_samples() -> None:
    one, same, other = collected(seed=1), collected(seed=1), collected(seed=2)
    assert torch.equal(one.features, same.features)
    assert torch.equal(one.labels, same.labels)
    assert not torch.equal(one.labels[:100], other.labels[:100])


def test_an_interrupted_collection_leaves_no_text_open() -> None:
    def interrupt(what: str, done: int, of: int) -> None:
        if done > 100:
            raise KeyboardInterrupt

    target = ToyTarget(6)
    with pytest.raises(KeyboardInterrupt):
        collected(target=target, progress=interrupt)
    assert target.free_slots == target.slots
    collected(target=target)
    assert target.free_slots == target.slots


def test_progress_ends_at_what_was_asked_for() -> None:
    told: list[tuple[int, int]] = []
    collected(samples=200, progress=lambda what, done, of: told.append((done, of)))
    assert told == sorted(told)
    assert told[-1] == (200, 200)


def test_a_drafter_without_hidden_states_teaches_no_soft_stop() -> None:
    fan = Fan("soft")
    with pytest.raises(PairingError, match="no hidden states to learn from; use a draft model, or --kind hard"):
        collect(ToyTarget(6), NoisyTarget(tree=fan), fan, PROMPTS, samples=100)


# Learning


def synthetic(count: int = 1500, width: int = 11, sharpness: float = 3.0, hard: bool = True, seed: int = 0) -> Samples:
    """The first feature decides; the others say nothing."""
    noise = torch.Generator().manual_seed(seed)
    x = torch.randn(count, width, generator=noise)
    share = torch.sigmoid(sharpness * x[:, 0])
    return Samples(x, torch.bernoulli(share, generator=noise) if hard else share, torch.arange(count) % 10)


def better_than_chance(scores: Tensor, labels: Tensor) -> bool:
    """Whether nodes that were accepted score higher; by the test of Mann and Whitney."""
    good, bad = scores[labels > 0.5].numpy(), scores[labels <= 0.5].numpy()
    return bool(stats.mannwhitneyu(good, bad, alternative="greater").pvalue < FALSE_ALARM)


def test_a_hard_stop_tells_nodes_of_fresh_texts_apart() -> None:
    network, lesson = fit("hard", collected("hard", samples=800), epochs=5)
    fresh = collected("hard", samples=400, seed=1000)
    scores = Scorer("hard", network, 0.4, "").scores(fresh.features)
    assert better_than_chance(scores, fresh.labels)
    assert not better_than_chance(scores[torch.randperm(len(scores))], fresh.labels)
    assert lesson.loss < lesson.blind_loss
    assert lesson.label_stopped < lesson.label_kept


def test_a_soft_stop_learns_from_hidden_states_how_much_is_accepted() -> None:
    network, lesson = fit("soft", collected("soft", samples=800), epochs=5)
    assert [layer.out_features for layer in network if hasattr(layer, "out_features")] == [512, 256, 1]
    assert lesson.loss < lesson.blind_loss
    samples = synthetic(hard=False, width=20)
    network, lesson = fit("soft", samples, threshold=0.5, epochs=8)
    scores = Scorer("soft", network, 0.5, "").scores(synthetic(hard=False, width=20, seed=1).features)
    assert float((scores - synthetic(hard=False, width=20, seed=1).labels).abs().mean()) < 0.15
    assert lesson.label_stopped < 0.3
    assert lesson.label_kept > 0.7
    assert 0.4 < lesson.stopped < 0.6


def test_what_a_blind_guess_would_lose() -> None:
    _, lesson = fit("hard", synthetic(sharpness=0.0), epochs=1)
    assert lesson.blind_loss == pytest.approx(0.693, abs=0.01)
    _, lesson = fit("soft", Samples(torch.randn(100, 4), torch.full((100,), 0.9), torch.arange(100) % 10), epochs=1)
    assert lesson.blind_loss == pytest.approx(0.325, abs=0.001)  # the entropy of 0.9


@pytest.mark.parametrize(("threshold", "stopped"), [(1e-9, 0.0), (1 - 1e-9, 1.0)])
def test_a_threshold_that_decides_nothing_is_told(threshold: float, stopped: float) -> None:
    _, lesson = fit("hard", synthetic(), epochs=1, threshold=threshold)
    assert lesson.stopped == stopped
    assert [lesson.label_stopped, lesson.label_kept].index(None) == stopped


def test_rare_and_frequent_hard_labels_weigh_the_same() -> None:
    samples = Samples(torch.zeros(1000, 11), (torch.arange(1000) % 10 > 0).float(), torch.arange(1000) // 10 % 10)
    for kind, goal in (("hard", 0.5), ("soft", 0.9)):
        network, _ = fit(kind, samples, epochs=10)
        assert Scorer(kind, network, 0.4, "").scores(torch.zeros(1, 11)).item() == pytest.approx(goal, abs=0.03)


def test_features_may_have_any_scale() -> None:
    plain = synthetic()
    large = Samples(plain.features * 1000 + 5000, plain.labels, plain.texts)
    (_, one), (_, other) = fit("hard", plain, epochs=3), fit("hard", large, epochs=3)
    assert other.loss == pytest.approx(one.loss, abs=1e-3)


def test_texts_that_are_tested_with_are_not_learned_from() -> None:
    learn, test = hold_out(synthetic())
    assert set(test.texts.tolist()) == {4, 9}
    assert set(learn.texts.tolist()) == {0, 1, 2, 3, 5, 6, 7, 8}
    few = synthetic()
    learn, test = hold_out(Samples(few.features, few.labels, few.texts % 3))
    assert set(test.texts.tolist()) == {2}
    with pytest.raises(UsageError, match="at least two"):
        hold_out(Samples(few.features, few.labels, few.texts * 0))


def test_the_epoch_with_the_lowest_held_out_loss_is_kept() -> None:
    noise = synthetic(count=300, width=200, sharpness=0.0, hard=False)
    noise = Samples(noise.features, torch.rand(300).round(), noise.texts)  # nothing to learn but the samples by heart
    one, whole = fit("soft", noise, epochs=1)[1], fit("soft", noise, epochs=10)[1]
    assert whole.epoch < 10
    assert whole.loss <= one.loss
    assert fit("soft", noise, epochs=whole.epoch)[1].loss == whole.loss


def test_the_rate_of_learning_halves_with_every_epoch(monkeypatch: pytest.MonkeyPatch) -> None:
    rates: list[float] = []
    step = torch.optim.Adam.step

    def watched(self: torch.optim.Adam, *given: Any) -> Any:
        rates.append(self.param_groups[0]["lr"])
        return step(self, *given)

    monkeypatch.setattr(torch.optim.Adam, "step", watched)
    fit("hard", synthetic(count=100), epochs=3, batch=100)
    assert rates == pytest.approx([1e-3, 5e-4, 2.5e-4])


def test_the_same_seed_learns_the_same_and_draws_nothing_from_others() -> None:
    torch.manual_seed(7)
    one, _ = fit("hard", synthetic(), epochs=2, seed=3)
    after = torch.rand(1)
    torch.manual_seed(7)
    assert torch.equal(after, torch.rand(1))
    torch.manual_seed(8)
    same, _ = fit("hard", synthetic(), epochs=2, seed=3)
    other, _ = fit("hard", synthetic(), epochs=2, seed=4)
    assert torch.equal(one[0].weight, same[0].weight)  # type: ignore[arg-type]
    assert not torch.equal(one[0].weight, other[0].weight)  # type: ignore[arg-type]


def test_labels_that_never_differ_are_told() -> None:
    samples = synthetic()
    for label, word in ((1.0, "always"), (0.0, "never")):
        with pytest.raises(UsageError, match=f"{word} agree on these texts"):
            fit("hard", Samples(samples.features, torch.full_like(samples.labels, label), samples.texts))


# The command


@pytest.fixture
def toy(monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that loads at once."""

    def load(model: str, **options: Any) -> Any:
        engine = SimpleNamespace(target=ToyTarget(6, slots=options["max_batch"]), pipelined=False)
        return SimpleNamespace(
            name=model,
            conversion=None,
            engine=engine,
            stop_tokens=frozenset(),
            encode=lambda text, raw: [ord(character) % 6 for character in text][:12],
        )

    monkeypatch.setattr("branchwise.llm.load", load)


def train(*arguments: str) -> Any:
    return CliRunner().invoke(app, ["train", "stop", *arguments])


@pytest.mark.usefixtures("toy")
def test_the_command_writes_a_file_that_a_tree_can_use(tmp_path: Path) -> None:
    out = tmp_path / "stop.safetensors"
    words = ["--draft", "disturbed:1", "--samples", "300", "--epochs", "2", "--threshold", "0.45", "--out", str(out)]
    done = train(*words)
    assert done.exit_code == 0, done.output
    assert f"stop=learned:{out}" in done.output
    assert "against" in done.output
    policy = build_policy(f"chain:12,stop=learned:{out}")
    assert policy.stop.threshold == 0.45
    scorer = read_scorer(out)
    assert (scorer.kind, scorer.draft, scorer.notes["model"]) == ("hard", "disturbed:1", "smollm2")
    assert {"samples", "held_out", "loss", "blind_loss", "seed", "temperature"} <= set(scorer.notes)
    before = out.read_bytes()
    found = json.loads(train(*words, "--json").output)
    assert found["file"] == str(out)
    assert found["samples"] + found["held_out"] >= 300
    assert out.read_bytes() == before, "same seed, same file; a stop may be trained again in its place"
    assert train(*words, "--seed", "1").exit_code == 0
    assert out.read_bytes() != before


@pytest.mark.usefixtures("toy")
def test_prompts_come_from_a_file(tmp_path: Path) -> None:
    (tmp_path / "prompts.txt").write_text("one river\ntwo rivers\nthree rivers\n")
    words = ("--draft", "disturbed", "--samples", "100", "--epochs", "1", "--out", str(tmp_path / "stop"))
    assert train(*words, "--prompts", str(tmp_path / "prompts.txt")).exit_code == 0
    (tmp_path / "prompts.txt").write_text("one river\n")
    assert isinstance(train(*words, "--prompts", str(tmp_path / "prompts.txt")).exception, UsageError)


@pytest.mark.usefixtures("toy")
def test_an_interrupted_command_leaves_the_old_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "stop.safetensors"
    words = ("--draft", "disturbed", "--samples", "100", "--epochs", "1", "--out", str(out))
    assert train(*words).exit_code == 0
    before = out.read_bytes()

    def interrupted(*_: object, **__: object) -> None:
        raise KeyboardInterrupt

    for place in ("branchwise.train.stop.collect", "branchwise.train.stop.fit", "os.replace"):
        with monkeypatch.context() as patch:
            patch.setattr(place, interrupted)
            assert train(*words, "--seed", "5").exit_code != 0
        assert out.read_bytes() == before
        assert list(tmp_path.iterdir()) == [out]


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        ((), "Name what drafts, with --draft-model"),
        (("--draft", "disturbed", "--draft-model", "x"), "one of the two"),
        (("--draft", "disturbed", "--kind", "firm"), "a stop is soft or hard"),
        (("--draft", "disturbed", "--samples", "0"), "--samples must be at least 1"),
        (("--draft", "disturbed", "--epochs", "0"), "--epochs must be at least 1"),
        (("--draft", "disturbed", "--threshold", "1"), "--threshold must be between 0 and 1"),
        (("--draft", "disturbed", "--temperature", "-1"), "temperature must be at least 0"),
        (("--draft", "ngram"), "'ngram' has no distributions that a stop could look at"),
        (("--draft", "distrubed"), "Did you mean 'disturbed'"),
        (("--draft", "disturbed", "--out", "nowhere/stop"), "cannot be written to nowhere/stop"),
        (("--draft", "disturbed", "--out", "."), "cannot be written to"),
        (("--draft", "disturbed", "--out", "letter.txt"), "letter.txt exists and is no stop"),
        (("--draft", "disturbed", "--prompts", "nothing.txt"), "nothing.txt cannot be read"),
    ],
)
def test_a_mistake_is_one_sentence_before_anything_is_loaded(
    arguments: tuple[str, ...], words: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "letter.txt").write_text("Dear neighbour,")
    monkeypatch.setattr("branchwise.llm.load", lambda *_, **__: pytest.fail("a model was loaded"))
    error = train(*arguments).exception
    assert isinstance(error, BranchwiseError)
    assert words in str(error)
    assert "\n" not in str(error)
    assert (tmp_path / "letter.txt").read_text() == "Dear neighbour,"


def test_a_draft_model_is_short_for_its_spec() -> None:
    from branchwise.cli.options import drafter_spec

    assert drafter_spec(None, "org/small") == "model:org/small"
    assert drafter_spec("disturbed:2", None) == "disturbed:2"


def test_help_teaches_and_is_instant() -> None:
    code = (
        "import sys; from typer.testing import CliRunner; from branchwise.cli import app;"
        "r = CliRunner().invoke(app, ['train', 'stop', '--help'], env={'COLUMNS': '200'});"
        "assert r.exit_code == 0, r.output;"
        "heavy = {'torch', 'transformers', 'numpy'} & set(sys.modules); assert not heavy, heavy; print(r.output)"
    )
    done = subprocess.run([sys.executable, "-c", code], check=True, timeout=60, capture_output=True, text=True)
    for word in ("--draft-model", "--kind", "hidden states", "entropy", "stop=learned:stop.safetensors", "--threshold"):
        assert word in done.stdout


def test_a_trained_stop_works_in_a_tree(tmp_path: Path) -> None:
    samples = collected("soft", samples=300)
    scorer = Scorer("soft", fit("soft", samples, epochs=2)[0], 0.5, "seeing")
    write_scorer(scorer, tmp_path / "stop")

    def depth(threshold: float) -> float:
        policy: TreePolicy = build_policy(f"chain:6,stop=learned:{tmp_path / 'stop'},threshold={threshold}")
        engine = Engine(ToyTarget(6), Seeing(1.0, tree=policy), VERIFIERS.build("block"))
        text = engine.submit(Request((1, 2), SamplingParams(temperature=1.0, seed=1), max_new_tokens=40))
        while engine.busy:
            engine.step()
        return text.stats.drafted_tokens / text.stats.steps

    assert depth(0.01) > depth(float(scorer.scores(samples.features).median())) > 1 >= depth(0.99)
