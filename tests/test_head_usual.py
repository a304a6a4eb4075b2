"""Where nobody says which tree, a head drafts what pays on its device."""

from __future__ import annotations

import pytest
import torch

from branchwise.backends.toy import ToyTarget
from branchwise.draft.head.drafter import HeadDrafter
from branchwise.draft.head.file import TrainedHead
from branchwise.draft.head.trees.paced import PacedDraft
from branchwise.draft.head.usual import DEVICE, HOST, Usual, usual_on
from branchwise.draft.policies.topk import TopK
from tests.heads import random_head

USUAL = Usual(TopK(5, depth=2, width=2), table=40, copies=3)


def bound(monkeypatch: pytest.MonkeyPatch, *, ranked: bool = True, **said: object) -> tuple[HeadDrafter, int]:
    """A drafter, and how many tokens it may copy."""
    monkeypatch.setattr("branchwise.draft.head.drafter.usual_on", lambda device: USUAL)
    target = ToyTarget(100)
    head = random_head(target.info, table=90)
    monkeypatch.setattr(TrainedHead, "ranked", ranked)
    drafter = HeadDrafter(head, **said)  # type: ignore[arg-type]
    drafter.bind(target.info)
    assert drafter._ahead is not None
    return drafter, drafter._ahead._draft._copies


def test_what_is_usual_depends_on_the_device() -> None:
    assert usual_on(torch.device("cpu")) is HOST
    assert usual_on(torch.device("cuda")) is DEVICE


def test_nothing_said_is_what_is_usual(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter, copies = bound(monkeypatch)
    assert (drafter.tree, len(drafter._table), copies) == (USUAL.tree, 40, 3)
    assert isinstance(drafter._ahead._draft, PacedDraft)


def test_what_is_said_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter, copies = bound(monkeypatch, table=50, copies=0)
    assert (drafter.tree, len(drafter._table), copies) == (USUAL.tree, 50, 0)


def test_with_a_tree_nothing_else_is_assumed(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = TopK(4, depth=2, width=2)
    drafter, copies = bound(monkeypatch, tree=tree)
    assert (drafter.tree, len(drafter._table), copies) == (tree, 90, 0)
    assert not isinstance(drafter._ahead._draft, PacedDraft)


def test_a_table_in_no_order_is_not_cut(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter, _ = bound(monkeypatch, ranked=False)
    assert len(drafter._table) == 90
