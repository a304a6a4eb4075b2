"""The shape of the house: what imports what, which names are public, that the README tells the truth."""

from __future__ import annotations

import ast
import re
from collections import Counter
from functools import cache
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
    {"openai_client", "plots", "prompt", "provenance", "registry"},
    {"core", "models", "index"},
    {"constrain", "verify", "backends", "cuda", "control", "draft"},
    {"engine", "testing", "methods"},
    {"llm", "hf"},
    {"tune", "train", "audit", "bench", "serve", "integrations"},
    {"cli", "__main__"},
]
"""folders and files of the package from the ground up: each imports from its own level or below, never from above"""

MOST_LINES = 400
MOST_FILES = 16

# What does not keep a rule yet. Each is compared exactly, so that it can only shrink; it is to be empty.

KNOWN_CYCLES: set[tuple[str, ...]] = set()
"""files that import each other, directly or through the others named"""

LONG_FILES: set[str] = set()

FULL_FOLDERS: set[str] = set()

UNDECLARED: dict[str, int] = {}
"""files that ask our own objects with `hasattr` or `getattr` what their protocol should declare, and how often"""

FOREIGN = {
    "backends/transformers/probe.py": (2, "a transformers config has the fields of its family only"),
    "backends/transformers/runner.py": (1, "only some modules of a transformers model have a config"),
    "bench/peers/transformers.py": (1, "a transformers generation config has the fields of its version only"),
    "cuda/kernels.py": (1, "not every torch tells how much shared memory a program may ask for"),
    "hf.py": (2, "a transformers generation config, and logits processors and stopping criteria of users"),
    "models/place.py": (1, "torch.cpu names instruction sets of some processors only"),
    "models/load.py": (3, "a transformers config has the fields of its family only"),
    "registry.py": (1, "an annotation may be a class or a string"),
    "train/texts.py": (1, "a transformers config has the fields of its family only"),
}
"""files that ask objects of other packages, how often, and why these cannot declare it; this list is to stay"""


def name_of(path: Path) -> str:
    """`src/branchwise/verify/match.py` -> `branchwise.verify.match`; a package has the name of its folder."""
    return ".".join(("branchwise", *path.relative_to(SOURCE).with_suffix("").parts)).removesuffix(".__init__")


PATHS = {name_of(path): path for path in sorted(SOURCE.rglob("*.py"))}
FILES = {path.relative_to(SOURCE).as_posix(): path for path in PATHS.values()}


@cache
def syntax(path: Path) -> tuple[ast.AST, ...]:
    return tuple(ast.walk(ast.parse(path.read_text())))


def imports(name: str) -> set[str]:
    """The modules that a module names in imports anywhere in it: in functions and for type checkers too."""
    found = set()
    for node in syntax(PATHS[name]):
        if isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{name} imports by a relative name"
            inside = [f"{node.module}.{alias.name}" for alias in node.names]
            found |= {one if one in PATHS else str(node.module) for one in inside}
        elif isinstance(node, ast.Import):
            found |= {alias.name for alias in node.names}
    return found & set(PATHS) - {name}


def short(name: str) -> str:
    return name.removeprefix("branchwise.")


def part(name: str) -> str:
    """`branchwise.verify.match` -> `verify`."""
    return name.split(".")[1]


BELOW_TOP = [name for name in PATHS if name != "branchwise"]


@pytest.mark.parametrize("name", BELOW_TOP)
def test_imports_point_downwards(name: str) -> None:
    level = {folder: number for number, folders in enumerate(LEVELS) for folder in folders}
    above = [other for other in imports(name) - {"branchwise"} if level[part(other)] > level[part(name)]]
    assert not above, f"{name} is below {', '.join(sorted(above))}"


def test_every_file_has_its_level() -> None:
    assert {part(name) for name in BELOW_TOP} == set().union(*LEVELS)


def cycles(graph: dict[str, set[str]]) -> dict[tuple[str, ...], list[str]]:
    """The sets of modules that reach each other, each with a shortest way from a module of it back to itself."""
    found: dict[tuple[str, ...], list[str]] = {}
    reached: dict[str, dict[str, str]] = {}  # from each module: what it reaches, and through which module last
    for start in graph:
        ways = reached[start] = {}
        front = [start]
        while front:
            front = [
                other for one in front for other in graph[one] if other not in ways and ways.setdefault(other, one)
            ]
    for start, ways in reached.items():
        if start not in ways:
            continue
        circle = tuple(sorted(name for name in ways if start in reached[name]))
        back = [start]
        while len(back) == 1 or back[0] != start:
            back.insert(0, ways[back[0]])
        if circle not in found or len(back) < len(found[circle]):
            found[circle] = back
    return found


def test_no_two_files_import_each_other() -> None:
    circles = cycles({short(name): set(map(short, imports(name))) for name in PATHS})
    ways = "; ".join(" -> ".join(way) for way in circles.values())
    assert circles.keys() == KNOWN_CYCLES, f"files import each other: {ways}"


def test_a_circle_is_found_directly_and_through_others() -> None:
    graph = {"a": {"b"}, "b": {"c"}, "c": {"a", "d"}, "d": set(), "e": {"f"}, "f": {"e"}, "g": {"a", "e"}}
    assert cycles(graph) == {("a", "b", "c"): ["a", "b", "c", "a"], ("e", "f"): ["e", "f", "e"]}
    assert cycles({"a": {"b", "c"}, "b": {"c"}, "c": set()}) == {}


def test_no_file_is_too_long() -> None:
    long = {name for name, path in FILES.items() if len(path.read_text().splitlines()) > MOST_LINES}
    assert long == LONG_FILES, f"a file of the package has at most {MOST_LINES} lines"


def test_no_folder_is_too_full() -> None:
    files = Counter(path.parent for path in SOURCE.rglob("*") if path.is_file() and "__pycache__" not in path.parts)
    full = {folder.relative_to(SOURCE).as_posix() for folder, count in files.items() if count > MOST_FILES}
    assert full == FULL_FOLDERS, f"a folder of the package holds at most {MOST_FILES} files"


def probes(path: Path) -> int:
    """Calls of `hasattr`, and of `getattr` with a default."""
    called = [node for node in syntax(path) if isinstance(node, ast.Call) and isinstance(node.func, ast.Name)]
    return sum(call.func.id == "hasattr" or (call.func.id == "getattr" and len(call.args) == 3) for call in called)  # type: ignore[attr-defined]


def test_protocols_declare_what_is_asked_of_objects() -> None:
    found = Counter({name: count for name, path in FILES.items() if (count := probes(path))})
    known = Counter(UNDECLARED) + Counter({name: count for name, (count, _) in FOREIGN.items()})
    assert found == known, f"declare in the protocol what is asked in {sorted((found - known) | (known - found))}"


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


def test_what_stands_behind_a_command_is_a_comment() -> None:
    """Else who pastes the line gives it as arguments, and an apostrophe leaves the shell waiting for another."""
    pages = [ROOT / "README.md", *sorted((ROOT / "docs").glob("*.md"))]
    commands = [
        line
        for page in pages
        for line in page.read_text().splitlines()
        if re.match(r"(\.venv/bin/)?branchwise [a-z]", line) and "  " in line
    ]
    assert commands
    assert [line for line in commands if not re.search(r"  #", line)] == []


def test_the_readme_names_every_file_of_the_package() -> None:
    readme = (ROOT / "README.md").read_text()
    for path in SOURCE.rglob("*.py"):
        if path.name not in ("__init__.py", "__main__.py"):
            assert re.search(rf"\b{path.name}\b", readme), f"{path.name} is missing in the README's file tree"
