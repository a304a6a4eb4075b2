"""The output of audits: tables of tests, differences, and the finding with its evidence."""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from branchwise.cli.console import bare_table, console

if TYPE_CHECKING:
    from rich.console import Console

    from branchwise.audit.blocks import BlockTests
    from branchwise.audit.methods import MethodAudited
    from branchwise.audit.model import Greedy, ModelAudit
    from branchwise.audit.server import ServerAudit


def print_audits(kind: str, audits: Sequence[ModelAudit | ServerAudit], titles: Sequence[str], as_json: bool) -> int:
    """Print audits; returns the worst exit code: 1 if a difference is proven, else 3 if a test is undecided, else 0."""
    from branchwise.audit.model import ModelAudit

    worst = min((audit.finding for audit in audits), key=lambda finding: (1, 3, 0).index(finding.exit_code))
    if as_json:
        print_json(kind, worst.word.value, [audit.as_dict() for audit in audits])
    else:
        shown = console()
        for audit, title in zip(audits, titles, strict=True):
            print_tests(shown, title, audit.tests)
            if isinstance(audit, ModelAudit):
                print_differences(shown, audit.greedy, audit.near_ties)
            shown.print()
            style = {0: "bold green", 1: "bold red", 3: "bold yellow"}[audit.finding.exit_code]
            shown.print(audit.finding.word.value, style=style)
            for sentence in audit.finding.evidence:
                shown.print(f"  {sentence}")
    return worst.exit_code


def print_json(kind: str, finding: str, results: list[dict[str, Any]]) -> None:
    from branchwise import __version__

    print(json.dumps({"audit": kind, "branchwise": __version__, "finding": finding, "audits": results}))


def print_exact(shown: Console, broken: list[str], evidence: str) -> None:
    """Print the finding of an audit that enumerates: `broken` names what is not exact, `evidence` says what was
    proven."""
    shown.print()
    if broken:
        shown.print("NOT LOSSLESS", style="bold red")
        shown.print(f"  The emitted distribution is not the target's: {', '.join(broken)}.")
    elif evidence:
        shown.print("LOSSLESS", style="bold green")
        shown.print(f"  {evidence}")


def print_methods(audits: Sequence[MethodAudited], as_json: bool) -> int:
    """Print audited methods; returns 1 if a method changes the distribution without being called lossy, else 0."""
    from branchwise.audit.instances import SIMILARITIES
    from branchwise.audit.methods import SEEDS, VOCABULARY

    broken = [audit.method.name for audit in audits if not audit.kept]
    if as_json:
        word = "NOT LOSSLESS" if broken else "LOSSLESS"
        print_json("methods", word, [audit.as_dict() for audit in audits])
        return bool(broken)
    shown = console()
    columns = ("method", "enumerated tree", "verifier", "drafts", "tokens/step", "distance", "verdict")
    table = bare_table(*columns, left=("method", "enumerated tree", "verifier", "verdict"))
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
    worlds = f"{len(SIMILARITIES) * len(SEEDS)} random distributions over {VOCABULARY} tokens"
    evidence = f"Every outcome of {len(lossless)} methods on {worlds} was followed; the largest distance is "
    print_exact(shown, broken, f"{evidence}{max(lossless):.1e}." if lossless else "")
    for audit in audits:
        if not audit.method.lossless:
            shown.print(
                f"  {audit.method.name} is lossy: on the same distributions and {audit.tree} its distance is up to "
                f"{audit.tv:.3f}; for {audit.method.tree} it is not known."
            )
    return bool(broken)


def print_tests(shown: Console, title: str, tests: BlockTests) -> None:
    shown.print(f"\n{title}")
    columns = ("context", "blocks", "cells", "G", "p (Holm)", "distance", "by chance", "detectable")
    table = bare_table(*columns, left=["context"])
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

    for comparison in filter(None, comparisons):
        for difference in comparison.differences:
            shown.print(
                f"{comparison.dtype} greedy, {shorten(difference.prompt)}: after {difference.position} tokens "
                f"{difference.speculative!r} in place of {difference.plain!r}, logits {difference.gap:.3g} apart"
            )
