"""The shape of the house: what imports what, which names are public, that the README tells the truth."""

from __future__ import annotations

import ast
import re
from pathlib import Path

import pytest

import branchwise
from branchwise.audit.exact import emitted
from branchwise.audit.instances import DRAWS, Drafts, Instance
from branchwise.draft import DRAFTERS, build_drafter
from branchwise.verify import VERIFIERS
from tests.conformance.test_drafters import assert_writes_like_plain_decoding

ROOT = Path(__file__).parents[1]
SOURCE = ROOT / "src" / "branchwise"

LEVELS = [
    {"errors", "progress"},
    {"openai_client", "plots", "provenance", "registry"},
    {"core", "models", "index"},
    {"verify", "backends", "cuda", "draft"},
    {"engine", "testing", "methods"},
    {"llm", "hf"},
    {"tune", "train", "audit", "bench"},
    {"cli", "__main__"},
]
"""from the ground up: a module imports from its own level or below, never from above"""


def part(module: str) -> str:
    """`branchwise.verify.match` -> `verify`."""
    return module.split(".")[1] if "." in module else ""


def imports(path: Path) -> set[str]:
    """The parts of Branchwise that a file imports anywhere in it, also inside functions."""
    found = set()
    for node in ast.walk(ast.parse(path.read_text())):
        names = []
        if isinstance(node, ast.ImportFrom) and node.module:
            names = [node.module] if node.module != "branchwise" else [f"branchwise.{a.name}" for a in node.names]
        elif isinstance(node, ast.Import):
            names = [alias.name for alias in node.names]
        found |= {part(name) for name in names if name.startswith("branchwise.")}
    return found


def files() -> list[Path]:
    return [path for path in SOURCE.rglob("*.py") if path != SOURCE / "__init__.py"]


@pytest.mark.parametrize("path", files(), ids=lambda path: str(path.relative_to(SOURCE)))
def test_imports_point_downwards(path: Path) -> None:
    level = {name: number for number, names in enumerate(LEVELS) for name in names}
    own = path.relative_to(SOURCE).parts[0].removesuffix(".py")
    assert not {name for name in imports(path) & set(level) if level[name] > level[own]}


def test_every_file_has_its_level() -> None:
    known = set().union(*LEVELS)
    assert {path.relative_to(SOURCE).parts[0].removesuffix(".py") for path in files()} == known


def test_the_public_names_are_exactly_these() -> None:
    assert branchwise.__all__ == [
        "LLM",
        "BranchwiseError",
        "Chunk",
        "Completion",
        "DraftTree",
        "SamplingParams",
        "hf",
        "load",
    ]
    for name in branchwise.__all__:
        assert getattr(branchwise, name) is not None
    assert dir(branchwise) == sorted(branchwise.__all__)
    with pytest.raises(AttributeError):
        branchwise.nothing_of_this_name  # noqa: B018


def snippets() -> list[str]:
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    return [code for page in pages for code in re.findall(r"```python\n(.*?)```", page.read_text(), re.DOTALL)]


@pytest.mark.parametrize("code", snippets())
@pytest.mark.filterwarnings("ignore:.*generation flags.*")
def test_the_python_snippets_of_the_documentation_run(code: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for registry in (DRAFTERS, VERIFIERS):  # what a page registers must not outlive it
        monkeypatch.setattr(registry, "_entries", dict(registry._entries))
    before = [*DRAFTERS, *VERIFIERS]
    exec(compile(code, "snippet", "exec"), {"__name__": "snippet"})
    added = [name for name in (*DRAFTERS, *VERIFIERS) if name not in before]
    for name in added:
        drafter = DRAFTERS.build(name) if name in DRAFTERS else build_drafter("ngram")
        verifier = VERIFIERS.build(name if name in VERIFIERS else "match")
        if name in VERIFIERS:
            for draws in (kind for kind, draw in DRAWS.items() if draw in verifier.accepts):
                distance, _ = emitted(verifier, Drafts.of(draws, Instance.random(3, 2, 2, sigma=1.0, seed=(0,))))
                assert distance < 1e-9
        if drafter.draw not in verifier.accepts:
            continue
        assert_writes_like_plain_decoding(lambda truth, drafter=drafter: drafter, verifier)  # type: ignore[misc]


def test_there_are_snippets_to_run() -> None:
    assert len(snippets()) >= 3


def test_the_readme_names_every_file_of_the_package() -> None:
    readme = (ROOT / "README.md").read_text()
    for path in SOURCE.rglob("*.py"):
        if path.name not in ("__init__.py", "__main__.py"):
            assert re.search(rf"\b{path.name}\b", readme), f"{path.name} is missing in the README's file tree"
