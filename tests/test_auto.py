"""The default drafter: the head that comes with the package for a target, or else memories."""

from __future__ import annotations

from pathlib import Path

import pytest

from branchwise.backends.base import TargetInfo
from branchwise.backends.toy import ToyTarget
from branchwise.draft import build_drafter
from branchwise.draft.auto import AutoDrafter
from branchwise.draft.base import Drafter
from branchwise.draft.head import shipped
from branchwise.draft.head.drafter import HeadDrafter
from branchwise.draft.head.file import TrainedHead
from branchwise.draft.head.shipped import shipped_head
from branchwise.draft.head.usual import HOST
from branchwise.engine import Engine, Generation, Request
from branchwise.verify import VERIFIERS
from tests.heads import let_drafting_pay, random_head

DATA = Path(shipped.__file__).with_name("data")


def written(target: ToyTarget, drafter: Drafter) -> list[Generation]:
    engine = Engine(target, drafter, VERIFIERS.build("match"))
    texts = [engine.submit(Request(prompt, max_new_tokens=20)) for prompt in ((1, 2), (3, 4, 5))]
    while engine.busy:
        engine.step()
    return texts


@pytest.fixture
def head(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> ToyTarget:
    """A target for which a head was shipped."""
    target = ToyTarget(11)
    random_head(target.info).save(tmp_path / "toy.safetensors")

    def found(info: TargetInfo) -> Path | None:
        return tmp_path / "toy.safetensors" if info.weights == target.info.weights else None

    monkeypatch.setattr("branchwise.draft.auto.shipped_head", found)
    return target


@pytest.mark.parametrize("tree", [None, "topk:3,depth=2,width=2"])
def test_a_target_with_a_head_is_drafted_for_by_it(
    head: ToyTarget, tree: str | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    let_drafting_pay(monkeypatch)
    drafter = build_drafter("auto", tree)
    assert isinstance(drafter, AutoDrafter)
    texts = written(head, drafter)
    alone = drafter._alone
    assert isinstance(alone, HeadDrafter)
    assert alone.tree is (HOST.tree if tree is None else drafter.tree)
    assert [text.token_ids for text in texts] == [text.token_ids for text in written(head, build_drafter("none"))]
    assert not alone._texts, "texts that have ended are not forgotten"
    assert drafter.cost == alone.cost
    assert all(text.stats.drafted_tokens for text in texts)


def test_another_target_is_drafted_for_by_memories(head: ToyTarget) -> None:
    other, drafter = ToyTarget(13), build_drafter("auto")
    assert isinstance(drafter, AutoDrafter)
    texts = written(other, drafter)
    assert drafter._alone is None
    assert [text.token_ids for text in texts] == [text.token_ids for text in written(other, build_drafter("none"))]
    assert shipped_head(other.info) is None


def test_what_is_shipped_is_small_and_for_the_target_that_it_is_named_for() -> None:
    assert sorted(shipped.FILES.values()) == sorted(file.name for file in DATA.iterdir())
    for weights, name in shipped.FILES.items():
        trained = TrainedHead.load(DATA / name)
        assert trained.weights == weights
        assert (DATA / name).stat().st_size < 10e6
        assert trained.about["recipe"]["minutes"] < 12
        assert trained.about["curve"][-1]["hits"][0] > 0.7
