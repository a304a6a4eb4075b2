"""A mutant is one text in one file, replaced; a family of them has the tests of which one must fail."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

BASE = "tests/conformance/test_verifiers.py"
"""what is tested of every rule"""


@dataclass(frozen=True)
class Mutant:
    family: Family
    file: str
    """below src/branchwise"""
    old: str
    """occurs once in the file"""
    new: str
    equivalent: str = ""
    """why no test could tell, where none can"""

    @property
    def name(self) -> str:
        return f"{self.file}: {' '.join(self.old.split())}  ->  {' '.join(self.new.split()) or 'nothing'}"

    def apply(self, source: Path) -> None:
        path = source / "branchwise" / self.file
        text = path.read_text()
        assert text.count(self.old) == 1, f"{self.name}: the text occurs {text.count(self.old)} times"
        path.write_text(text.replace(self.old, self.new))


@dataclass(frozen=True)
class Family:
    name: str
    tests: Sequence[str]
    """what runs, in this order, until the first failure"""
    changes: Mapping[str, Sequence[tuple[str, ...]]]
    """by file: `old`, `new` and if need be `equivalent` of each mutant"""

    def mutants(self) -> Iterator[Mutant]:
        for file, changes in self.changes.items():
            for change in changes:
                yield Mutant(self, file, *change)
