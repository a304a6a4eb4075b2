"""One careless verifier, planted by a plugin, and all three audits: each must find it, and pass the right one."""

from __future__ import annotations

import json
import random
import runpy
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from branchwise.audit.findings import Word
from branchwise.audit.instances import ExactProbs
from branchwise.audit.model import ModelAuditor, Plan
from branchwise.cli import app as whole
from branchwise.cli.audit import app
from branchwise.core.batch import TreeBatch
from branchwise.core.rng import SeededChance
from branchwise.core.tree import DraftTree, Draw
from branchwise.draft import build_drafter
from branchwise.errors import UsageError
from branchwise.llm import LLM
from branchwise.verify import VERIFIERS
from tests.test_audit_model import PROMPTS, llm  # noqa: F401
from tests.test_audit_server import END, LETTERS, P, Q, Toy, _no_waiting, word_of  # noqa: F401

PLUGIN = Path(__file__).parents[1] / "docs" / "examples" / "careless.py"
CASES = Path(__file__).parent / "data" / "verification_cases.json"
TOKENS = [*LETTERS, END]


@pytest.fixture(autouse=True)
def _registry(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VERIFIERS, "_entries", dict(VERIFIERS._entries))


def test_the_exact_audit_finds_it() -> None:
    words = ["--plugin", str(PLUGIN), "audit", "verifiers", "--verify", "token,careless", "--instances", "1"]
    found = CliRunner().invoke(whole, words)
    assert found.exit_code == 1, found.output
    assert "NOT LOSSLESS" in [line.strip() for line in found.output.splitlines()]
    assert "The emitted distribution is not the target's: careless." in found.output


def test_the_audit_of_a_model_finds_it(llm: LLM) -> None:  # noqa: F811
    runpy.run_path(str(PLUGIN))
    plan = Plan(samples=800, length=2, seed=6, greedy_tokens=8, near_ties=False)
    words = {
        rule: ModelAuditor(llm, PROMPTS, plan).audit(build_drafter("disturbed:2.0", "paths:1x2"), verify=rule)
        for rule in ("token", "careless")
    }
    assert words["token"].finding.word is Word.LOSSLESS, words["token"].finding.evidence
    assert words["careless"].finding.word is Word.NOT_LOSSLESS, words["careless"].finding.evidence


@pytest.mark.parametrize(("rule", "word"), [("token", Word.LOSSLESS), ("careless", Word.NOT_LOSSLESS)])
def test_the_audit_of_a_server_finds_it(rule: str, word: Word) -> None:
    runpy.run_path(str(PLUGIN))
    verifier = VERIFIERS.build(rule)

    def step(last: str, rng: random.Random) -> str:
        """The first token of one step of Branchwise over the toy's distributions."""
        p, q = (torch.tensor([[probs[last][token] for token in TOKENS]]) for probs in (P, Q))
        drafted = rng.choices(range(len(TOKENS)), q[0].tolist())
        tree = DraftTree(torch.tensor([0, *drafted]), (-1, 0), Draw.PATHS, q, (1,))
        chance = SeededChance(torch.tensor([rng.getrandbits(62)]), torch.tensor([0]))
        [verdict] = verifier(TreeBatch([tree]), ExactProbs(torch.stack([p, p], dim=1)), chance).read()
        return TOKENS[drafted[0] if len(verdict.path) > 1 else verdict.token]

    assert word_of(Toy(step)) is word


def test_the_frozen_cases_print_one_line_a_case_and_verifier() -> None:
    found = CliRunner().invoke(app, ["verifiers", "--cases", str(CASES), "--verify", "token,rrs", "--json"])
    assert found.exit_code == 0, found.output
    lines = [json.loads(line) for line in found.output.splitlines()]
    assert len(lines) == 14 * 3
    assert {(line["verifier"], line["drafts"]) for line in lines} == {
        ("token", "paths"),
        ("rrs", "paths"),
        ("rrs", "rsd-c"),
    }
    frozen = json.loads(CASES.read_text())["cases"]
    for line in lines:
        assert set(line) == {"case", "verifier", "drafts", "tv", "block_efficiency", "lp"}
        assert line["tv"] < 1e-9
        if line["verifier"] == "token":
            assert line["block_efficiency"] == pytest.approx(
                frozen[line["case"]]["block_efficiency"]["token"], abs=1e-9
            )
            assert line["lp"] == pytest.approx(frozen[line["case"]]["optimum"]["lp i.i.d. paths"], abs=1e-7)


def test_the_table_has_a_bar_for_every_verifier_and_the_plot_is_a_picture(tmp_path: Path) -> None:
    picture = tmp_path / "audit.png"
    words = ["verifiers", "--instances", "1", "--verify", "block,cascade", "--plot", str(picture)]
    found = CliRunner().invoke(app, words)
    assert found.exit_code == 0, found.output
    assert [line.split()[1] for line in found.output.splitlines() if "█" in line].count("cascade") == 3
    assert "LOSSLESS" in [line.strip() for line in found.output.splitlines()]
    assert picture.read_bytes()[:4] == b"\x89PNG"


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (["--instances", "0"], "instances must be at least 1"),
        (["--vocab", "1"], "vocab must be at least 2"),
        (["--vocab", "9", "--depth", "4"], "more than can be enumerated"),
        (["--cases", "missing.json"], "missing.json cannot be read"),
        (["--verify", "cascad"], "Did you mean 'cascade'"),
        (["--instances", "1", "--verify", "block", "--plot", "audit.pdf"], "PNG"),
    ],
)
def test_a_wrong_request_is_one_sentence(words: list[str], message: str) -> None:
    found = CliRunner().invoke(app, ["verifiers", *words])
    assert isinstance(found.exception, UsageError | Exception)
    assert message in str(found.exception)


def test_a_plugin_that_fails_is_one_sentence(tmp_path: Path) -> None:
    broken = tmp_path / "broken.py"
    broken.write_text("raise ValueError('no')")
    for file, message in ((broken, "failed: ValueError: no"), (tmp_path / "none.py", "There is no plugin")):
        found = CliRunner().invoke(whole, ["--plugin", str(file), "models"])
        assert isinstance(found.exception, UsageError)
        assert message in str(found.exception)
