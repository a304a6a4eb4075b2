"""What the audits print: tables of tests, differences, and the finding with its evidence."""

from __future__ import annotations

import json
from typing import TYPE_CHECKING, Any

from branchwise.cli.console import console

if TYPE_CHECKING:
    from rich.console import Console

    from branchwise.audit.blocks import BlockTests
    from branchwise.audit.findings import Finding
    from branchwise.audit.methods import MethodAudited
    from branchwise.audit.model import Greedy


def exit_code(findings: list[Finding]) -> int:
    """The worst code: 1 if a difference is proven, else 3 if a test could not decide, else 0."""
    codes = {finding.exit_code for finding in findings}
    return next((code for code in (1, 3) if code in codes), 0)


def print_json(audit: str, findings: list[Finding], results: list[dict[str, Any]]) -> None:
    worst = next(finding for finding in findings if finding.exit_code == exit_code(findings))
    print_json_object(audit, worst.word.value, results)


def print_json_object(audit: str, finding: str, results: list[dict[str, Any]]) -> None:
    from branchwise import __version__

    print(json.dumps({"audit": audit, "branchwise": __version__, "finding": finding, "audits": results}))


def print_exact(shown: Console, broken: list[str], evidence: str) -> None:
    """The finding of an audit that enumerates: `broken` names what is not exact, `evidence` says what was proven."""
    shown.print()
    if broken:
        shown.print("NOT LOSSLESS", style="bold red")
        shown.print(f"  The emitted distribution is not the target's: {', '.join(broken)}.")
    elif evidence:
        shown.print("LOSSLESS", style="bold green")
        shown.print(f"  {evidence}")


def print_methods(audits: list[MethodAudited], broken: list[str], worlds: str) -> None:
    from rich.table import Table

    shown = console()
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("method", "enumerated tree", "verifier", "drafts", "tokens/step", "distance", "verdict"):
        numeric = column in ("drafts", "tokens/step", "distance")
        table.add_column(column, justify="right" if numeric else "left", no_wrap=True)
    for audit in audits:
        table.add_row(
            audit.method.name,
            audit.tree,
            audit.method.verify,
            "" if audit.drafts is None else f"{audit.drafts:,}",
            "" if audit.block_efficiency is None else f"{audit.block_efficiency:.3f}",
            f"{audit.tv:.1e}" if audit.lossless else f"{audit.tv:.3f}",
            audit.verdict,
        )
    shown.print(table)
    lossless = [audit.tv for audit in audits if audit.method.lossless]
    evidence = f"Every outcome of {len(lossless)} methods on {worlds} was followed; the largest distance is "
    print_exact(shown, broken, f"{evidence}{max(lossless):.1e}." if lossless else "")
    for audit in audits:
        if not audit.method.lossless:
            shown.print(
                f"  {audit.method.name} is lossy: on the same distributions and {audit.tree} its distance is up to "
                f"{audit.tv:.3f}; for {audit.method.tree} it is not known."
            )


def print_tests(shown: Console, title: str, tests: BlockTests) -> None:
    from rich.table import Table

    shown.print(f"\n{title}")
    table = Table(box=None, header_style="bold", pad_edge=False)
    for column in ("context", "blocks", "cells", "G", "p (Holm)", "distance", "by chance", "detectable"):
        table.add_column(column, justify="left" if column == "context" else "right", no_wrap=True)
    for test, adjusted in zip(tests.family, tests.adjusted, strict=True):
        table.add_row(
            test.context,
            f"{test.samples:,}",
            str(test.cells),
            f"{test.statistic:.1f}",
            f"{adjusted:.2g}",
            f"{test.distance:.3f}",
            f"{test.expected_distance:.3f}",
            f"{test.detectable(tests.level):.3f}",
        )
    shown.print(table)
    silent = [test.context for test in tests.contexts if not test.says_something]
    if silent:
        shown.print(f"Without a test, because no two cells expect enough blocks: {'; '.join(silent)}.")


def print_differences(shown: Console, *comparisons: Greedy | None) -> None:
    from branchwise.audit.findings import shorten

    for comparison in comparisons:
        for difference in comparison.differences if comparison else ():
            shown.print(
                f"{comparison.dtype if comparison else ''} greedy, {shorten(difference.prompt)}: after "
                f"{difference.position} tokens {difference.speculative!r} in place of {difference.plain!r}, "
                f"logits {difference.gap:.3g} apart"
            )


def print_finding(shown: Console, finding: Finding) -> None:
    shown.print()
    shown.print(finding.word.value, style={0: "bold green", 1: "bold red", 3: "bold yellow"}[finding.exit_code])
    for sentence in finding.evidence:
        shown.print(f"  {sentence}")
