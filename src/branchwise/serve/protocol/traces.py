"""Traces of steps as the field `branchwise` of an event: for pages that show how a text came about."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from branchwise.engine import Piece
from branchwise.engine.trace import Node, StepTrace
from branchwise.serve.protocol.spelling import Spelling


def traced(pieces: Sequence[Piece], traces: Sequence[StepTrace], spelling: Spelling) -> dict[str, Any]:
    """The tokens of an event with their origin, and the steps since the last event. On a GPU the tokens of a step
    become text one step later, so `emitted` says how many tokens each step wrote; steps and tokens both come in
    order."""
    tokens = [{"text": piece.text, "token": spelling.text(piece.token), "source": piece.source} for piece in pieces]
    return {"tokens": tokens, "steps": [_step(one, spelling) for one in traces]}


def _step(step: StepTrace, spelling: Spelling) -> dict[str, Any]:
    return {
        "nodes": [_node(node, spelling) for node in step.nodes],
        "path": step.path,
        "own": {"token": spelling.text(step.token), "p": _rounded(step.p)},
        "emitted": step.emitted,
        "ms": {phase: round(1e3 * spent, 3) for phase, spent in step.seconds.items()},
        "batch": step.batch,
    }


def _node(node: Node, spelling: Spelling) -> dict[str, Any]:
    found: dict[str, Any] = {"parent": node.parent, "token": spelling.text(node.token)}
    if node.parent >= 0:
        found |= {"source": node.source, "p": _rounded(node.p)}
    if node.q is not None:
        found["q"] = _rounded(node.q)
    return found


def _rounded(probability: float | None) -> float | None:
    """Rounded to a few digits, because no reader needs more; NaN becomes null, because JSON has none."""
    return None if probability is None or probability != probability else float(f"{probability:.4g}")
