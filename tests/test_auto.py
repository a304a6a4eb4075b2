"""The default drafter: memories, the head that comes with the package for a target or that a user names, and a draft
model if a user names one."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from branchwise.backends.base import TargetInfo
from branchwise.backends.toy import ToyTarget
from branchwise.core.tree import Draw
from branchwise.draft import build_drafter, build_policy
from branchwise.draft.auto import AutoDrafter
from branchwise.draft.base import Drafter
from branchwise.draft.head import shipped
from branchwise.draft.head.drafter import HeadDrafter
from branchwise.draft.head.file import TrainedHead
from branchwise.draft.head.shipped import shipped_head
from branchwise.draft.head.usual import HOST
from branchwise.draft.model.draft_model import Weights
from branchwise.draft.model.drafter import ModelDrafter
from branchwise.draft.model.usual import usual_trees
from branchwise.draft.state import load_state, parts_of, save_state
from branchwise.engine import Engine, Generation, Request
from branchwise.errors import ModelError, UsageError
from branchwise.verify import VERIFIERS
from tests.heads import let_drafting_pay, random_head
from tests.test_model_drafter import tiny

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
    assert not drafter.sources, "there is nothing to choose from"
    alone = drafter._first
    assert isinstance(alone, HeadDrafter)
    assert alone.tree is (HOST.tree if tree is None else drafter.tree)
    assert [text.token_ids for text in texts] == [text.token_ids for text in written(head, build_drafter("none"))]
    assert not alone._texts, "texts that have ended are not forgotten"
    assert drafter.cost == alone.cost
    assert drafter.passes == alone.passes > 0
    assert drafter.paces is alone.paces is (tree is None)
    assert all(set(text.stats.drafted_by_source) == {"head"} for text in texts)


def test_another_target_is_drafted_for_by_memories_alone(head: ToyTarget) -> None:
    """As if they were asked for by name: there is nothing to choose from."""
    other, drafter = ToyTarget(13), build_drafter("auto")
    assert isinstance(drafter, AutoDrafter)
    engine = Engine(other, drafter, VERIFIERS.build("match"), guard=True)
    assert engine.guard is None
    assert not drafter.sources
    texts = written(other, drafter)
    assert drafter.needs == drafter.memories.needs
    assert drafter.paces is drafter.memories.paces is True
    assert [text.token_ids for text in texts] == [text.token_ids for text in written(other, build_drafter("none"))]
    assert shipped_head(other.info) is None


def test_a_head_that_the_user_names_takes_the_place_of_the_shipped_one(head: ToyTarget, tmp_path: Path) -> None:
    random_head(head.info, table=5).save(tmp_path / "mine")
    drafter = build_drafter(f"auto:head({tmp_path}/mine,temperature=0.7)")
    drafter.bind(head.info)
    named = drafter._first
    assert isinstance(named, HeadDrafter)
    assert named.temperature == 0.7
    assert len(named._table) == 5


def test_what_memories_have_learned_is_the_state_whatever_else_drafts(head: ToyTarget, tmp_path: Path) -> None:
    """A state of one target serves the same target without a head as well."""
    drafter = build_drafter("auto")
    written(head, drafter)
    save_state(drafter, tmp_path / "state", head.info)
    assert sorted(parts_of(drafter)) == ["auto", "recycle", "stand"]
    again = build_drafter("auto")
    again.bind(head.info)
    assert load_state(again, tmp_path / "state", head.info)
    for name, part in parts_of(drafter).items():
        for key, tensor in part.save().items():
            assert torch.equal(tensor, parts_of(again)[name].save()[key])


def test_a_draft_model_of_another_vocabulary_is_refused_as_anywhere(monkeypatch: pytest.MonkeyPatch) -> None:
    drafter = AutoDrafter()
    drafter._model = ModelDrafter(Weights("small", tiny(1, layers=1, vocabulary=9), None), tree=build_policy("topk:1"))
    with pytest.raises(ModelError, match="The draft model small has 9 tokens and the target 13"):
        drafter.bind(ToyTarget(13).info)


@pytest.mark.parametrize(
    "named", ["model", "head", "recycle(k=3)", "model(a)+model(b)", "model(a)+suffix", "model(a(b))", "model(a),2"]
)
def test_what_auto_cannot_choose_from_is_refused(named: str) -> None:
    with pytest.raises(UsageError, match=r"takes model\(ID\), head\(FILE\), or both|at most|no option"):
        build_drafter(f"auto:{named}")


def test_the_trees_of_a_draft_model_are_fixed_and_fit_its_cost() -> None:
    cpu, gpu = torch.device("cpu"), torch.device("cuda")
    gains = [tree.gain for cost in (0.01, 0.1, 0.3, 2.0, None) for tree in usual_trees(cpu, cost)]  # type: ignore[attr-defined]
    assert gains == [0.05, 0.2, 0.6, 0.9, 0.2]
    flat, deep = usual_trees(gpu, 0.1)
    assert all(tree.draw is Draw.FIXED for tree in (*usual_trees(cpu, 0.1), flat, deep))
    assert [(len(tree.shape), tree.shape.depth) for tree in (flat, deep)] == [(16, 3), (32, 7)]  # type: ignore[attr-defined]
    dear = [(len(tree.shape), tree.shape.depth) for tree in usual_trees(gpu, 0.32)]  # type: ignore[attr-defined]
    assert dear == [(13, 2), (16, 3)], "seven passes of a model of a third of the target's bytes never pay"
    assert usual_trees(gpu, None)[1].shape.depth == 7  # type: ignore[attr-defined]


def test_what_is_shipped_is_small_and_for_the_target_that_it_is_named_for() -> None:
    assert sorted(shipped.FILES.values()) == sorted(file.name for file in DATA.iterdir())
    for weights, name in shipped.FILES.items():
        trained = TrainedHead.load(DATA / name)
        assert trained.weights == weights
        assert (DATA / name).stat().st_size < 10e6
        assert trained.about["recipe"]["minutes"] < 12
        assert trained.about["curve"][-1]["hits"][0] > 0.7
