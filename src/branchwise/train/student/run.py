"""A run that makes a student: writes texts, learns from them, keeps the best student, and writes its folder.

Everything is kept in one folder beside the student, the texts first, so that the same command can continue.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch

from branchwise.backends.base import TargetInfo
from branchwise.errors import UsageError
from branchwise.progress import Progress, silent
from branchwise.train.corpus import Text, batches, next_batches
from branchwise.train.keeping import kept_whole
from branchwise.train.student.learn import Learner, Recipe, Taught
from branchwise.train.student.own import OwnTexts
from branchwise.train.student.score import SAMPLES, Judge

SCORED = 8
"""how many batches of held-out texts are scored"""

Entry = dict[str, Any]
"""an entry of the learning curve: seconds, steps, loss, and for each exit acceptance, agreement and block efficiency"""


@dataclass
class Run:
    """A run that can be interrupted at any moment and continued."""

    student: Any
    """a model in float32 that has learned nothing yet"""
    target: Any
    info: TargetInfo
    folder: Path
    recipe: Recipe
    exits: Sequence[int] = ()
    stops: Sequence[int] = ()
    """tokens that end a text"""
    asked: Mapping[str, Any] = field(default_factory=dict)
    """how the student begins, and the settings of the texts; a folder with other settings is refused"""
    progress: Progress = silent
    scored: Callable[[Entry], None] = lambda entry: None
    """called with every entry of the learning curve"""

    def __post_init__(self) -> None:
        try:
            self.folder.mkdir(parents=True, exist_ok=True)
        except OSError as error:
            raise UsageError(f"{self.folder} cannot be made: {error.strerror or error}.") from None
        asked = {"target": self.info.weights, "exits": list(self.exits), "recipe": asdict(self.recipe)}
        asked |= {"asked": dict(self.asked)}
        known = self.folder / "run.json"
        if known.exists() and json.loads(known.read_text()) != asked:
            raise UsageError(f"{self.folder} holds another run; choose another --out, or remove it.")
        kept_whole(known, json.dumps(asked))

    def run(self, texts: Sequence[Text], held_out: Sequence[Text], every: float = 20.0) -> Learner:
        """Learn until the time is over, and score and save every `every` seconds. The best student is kept."""
        recipe = self.recipe
        torch.manual_seed(recipe.seed)
        own = None
        if recipe.on_policy > 0:
            own = OwnTexts(texts, recipe.tokens, recipe.span, recipe.temperature, recipe.seed, self.stops)
        learner = Learner(Taught(self.student, self.exits), self.target, recipe, own)
        state, best = self.folder / "state.pt", self.folder / "best.pt"
        if state.exists():
            learner.restore(state)
        test = next_batches(held_out, recipe.tokens, SCORED)
        stream = batches(texts, recipe.tokens, recipe.seed)
        for _ in range(learner.steps):
            next(stream)  # a continued run must not see the same batches again
        if not learner.curve:
            self._score(learner, test, None, best)
        due = learner.elapsed + every
        while not learner.finished:
            loss = learner.learn(next(stream))
            if learner.elapsed >= due or learner.finished:
                due = learner.elapsed + every
                self._score(learner, test, loss, best)
                learner.save(state)
            self.progress(f"learning, loss {loss:.3f}", round(100 * learner.done), 100)
        self.student.load_state_dict(torch.load(best, map_location=learner.device, weights_only=True))
        self.student.eval().requires_grad_(False)
        return learner

    def _score(self, learner: Learner, test: Sequence[Sequence[Text]], loss: float | None, best: Path) -> None:
        found = learner.score(test)
        entry: Entry = {"seconds": learner.elapsed, "steps": learner.steps, "loss": loss}
        entry["exits"] = [{"layers": n, **asdict(one)} for n, one in zip(learner.student.exits, found, strict=True)]
        learner.curve.append(entry)
        worth = sum(one.block for one in found)
        if worth > learner.best:
            learner.best = worth
            kept_whole(best, self.student.state_dict())
        self.scored(entry)


@torch.no_grad()
def calibrated(learner: Learner, held_out: Sequence[Text]) -> list[list[float]]:
    """For sampled places of held-out texts, how sure each exit was, and how likely its draft would be accepted."""
    model = learner.student.model.eval()
    judges = [Judge(1) for _ in learner.student.exits]
    head, teacher = model.get_output_embeddings(), learner.target.get_output_embeddings()
    with learner.quickly():
        for texts in next_batches(held_out, learner.recipe.tokens, SCORED):
            found, states, tokens, where = learner.states(texts)
            some = torch.linspace(0, len(states) - 1, min(SAMPLES, len(states)), device=states.device).long()
            truth = teacher(states[some])
            for judge, hidden in zip(judges, found, strict=True):
                judge.begin((where[0][some], where[1][some]), tokens[some], torch.ones(len(some), device=some.device))
                judge.see(slice(0, len(some)), head(hidden[some]), truth)
    samples = [torch.cat(judge.samples)[:SAMPLES] for judge in judges]
    table = torch.stack(samples, dim=1).permute(0, 2, 1).reshape(len(samples[0]), -1)
    return [[round(value, 4) for value in row] for row in table.tolist()]
