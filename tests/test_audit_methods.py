"""`branchwise audit methods`: policies and verifiers together, and a policy or a rule that is wrong is found."""

from __future__ import annotations

import json
import warnings

import pytest
import torch
from typer.testing import CliRunner

from branchwise.audit import methods as audit
from branchwise.audit.methods import MethodAudited, audit_method, drafted, instances, small
from branchwise.cli import app
from branchwise.core.batch import TreeBatch
from branchwise.core.rng import Chance
from branchwise.core.target_probs import TargetProbs
from branchwise.core.tree import Draw
from branchwise.draft import TREES, build_policy
from branchwise.draft.base import Budget
from branchwise.draft.builder import TreeBuilder, TreeCoroutine, TreePolicy
from branchwise.draft.sampler import DraftSampler
from branchwise.errors import BranchwiseError, LossyWarning
from branchwise.methods import PRESETS, find_any
from branchwise.registry import split_spec
from branchwise.verify import VERIFIERS, Verdicts
from branchwise.verify.token import Token

LOSSLESS = [name for name, method in PRESETS.items() if method.lossless]


class Audits(dict[str, MethodAudited]):
    """A preset is audited when it is first asked for."""

    def __missing__(self, name: str) -> MethodAudited:
        self[name] = audit_method(PRESETS[name])
        return self[name]


@pytest.fixture(scope="module")
def audits() -> Audits:
    return Audits()


@pytest.mark.parametrize("name", LOSSLESS)
def test_a_lossless_preset_is_lossless(name: str, audits: Audits) -> None:
    found = audits[name]
    assert found.tv < 1e-9
    assert found.verdict == "LOSSLESS"
    assert found.kept
    assert found.block_efficiency is not None
    assert found.block_efficiency > 1 or name == "plain"


def test_what_was_enumerated_is_the_policy_of_the_method(audits: Audits) -> None:
    for name in LOSSLESS:
        tree = PRESETS[name].tree
        if PRESETS[name].needs_draft_model or PRESETS[name].needs_head:
            assert tree is not None
            assert split_spec(audits[name].tree)[0] == split_spec(tree)[0]
            assert ("stop=" in audits[name].tree) is ("stop=" in tree)
    assert audits["plain"].tree == "the root alone"
    assert audits["ngram"].tree == "a fixed chain of 3"


def test_verifiers_of_the_same_trees_stand_in_the_known_order(audits: Audits) -> None:
    def gain(name: str) -> float:
        return audits[name].block_efficiency or 0.0

    assert gain("speculative") < gain("block")
    assert gain("specinfer") < gain("spectr") < gain("cascade")
    assert gain("mcsd-iid") < gain("mcsd"), "distinct tokens cover more"
    assert gain("gbv") < gain("cascade")
    assert gain("rsd-c") < gain("traversal")
    assert gain("improved-mcsd") < gain("mcsd"), "a stop that never stops proves nothing"
    assert gain("vocabtrim") < gain("block"), "a trimmed head knows fewer tokens"


def test_the_lossy_preset_is_far_from_the_law_and_says_so(audits: Audits) -> None:
    found = audits["improved-mcsd-lossy"]
    assert 0.01 < found.tv < 1
    assert found.verdict == "LOSSY"
    assert found.kept, "what is called lossy may be lossy"
    with pytest.warns(LossyWarning, match="changes the distribution") as told:
        PRESETS["improved-mcsd-lossy"].warn_if_lossy()
    PRESETS["cascade"].warn_if_lossy()  # a warning is an error here
    [text] = (str(one.message) for one in told)
    worlds = len(list(instances(found.method)))
    assert (
        f"measured on {found.tree} over {audit.VOCABULARY} tokens, every outcome of {worlds} small distributions"
        in text
    )
    assert (
        f"up to {found.tv:.3f} there; for fork-lossy:4x6,stop=learned on the vocabulary of a model it is not known."
        in text
    )


def test_a_warning_is_shown_once_whoever_gives_it() -> None:
    """As Python shows them by default. A command warns before it loads, and what it loads warns again."""
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("default")
        for name in ("improved-mcsd-lossy", "model/fork-lossy:4x6,stop=learned/lossy-longest"):
            find_any(name).warn_if_lossy()
        find_any("model/fork-lossy:3x6/lossy-longest").warn_if_lossy()
    assert ["fork-lossy:4x6" in str(one.message) for one in told] == [True, False]


@pytest.mark.parametrize(
    ("spec", "tree"),
    [
        ("disturbed//match", "paths:2x2"),
        ("model//match", "chain:3"),
        ("model:no/such", "chain:3"),
        ("head", "topk:4,depth=2,width=2"),
        ("head:no/such,table=5//match", "topk:4,depth=2,width=2"),
    ],
)
def test_a_drafter_without_a_tree_is_audited_with_its_own(spec: str, tree: str) -> None:
    method = find_any(spec)
    assert drafted(method, next(instances(method)))[0] == tree


def test_every_tree_of_the_registry_has_a_small_one() -> None:
    assert set(audit.SMALL) == set(TREES)
    assert small("paths:4x6") == "paths:2x2"
    assert build_policy(small("paths:4x6@3")).draw is Draw.WITHOUT_REPLACEMENT
    with pytest.raises(BranchwiseError, match="no small tree"):
        small("unknown:4")


@pytest.mark.parametrize("name", ["vocabtrim", "eagle", "head-cascade"])
def test_a_trimmed_head_never_drafts_what_it_does_not_know(name: str) -> None:
    method = PRESETS[name]
    for instance in instances(method):
        _, drafts = drafted(method, instance)
        for tree in drafts.trees:
            assert audit.VOCABULARY - 1 not in tree.tokens[1:].tolist()
    assert all((q > 0).all() for instance in instances(PRESETS["block"]) for q in instance.q)


# What is wrong is found


class Choosy(TreePolicy):
    """A policy that looks at what it drew: an unlikely token is drawn again."""

    draw = Draw.PATHS

    def grow(self, root: int, budget: Budget, sampler: DraftSampler) -> TreeCoroutine:
        tree = TreeBuilder([root])
        found = yield tree, [0]
        tree.probs[0] = probs = found.probs[0]
        [token] = sampler.picks(probs, [0])
        if probs[token] < 0.4:
            [token] = sampler.picks(probs, [1])
        return tree.finish(self.draw, (tree.add(0, token),))


class Generous(Token):
    """Takes every drafted token."""

    name = "generous"

    def __call__(self, batch: TreeBatch, probs: TargetProbs, chance: Chance) -> Verdicts:
        nodes = torch.arange(batch.nodes).expand(len(batch.tokens), -1)
        return Verdicts(nodes, chance.pick(probs.at(nodes[:, -1]), 0))


def test_a_policy_that_peeks_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(TREES, "_entries", {**TREES._entries, "choosy": Choosy})
    monkeypatch.setitem(audit.SMALL, "choosy", "choosy")
    found = audit_method(find_any("model/choosy/token"))
    assert found.tv > 1e-3
    assert found.verdict == "NOT LOSSLESS"
    assert not found.kept


def test_a_rule_that_is_too_generous_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VERIFIERS, "_entries", {**VERIFIERS._entries, "generous": Generous})
    found = audit_method(find_any("model/chain:3/generous"))
    assert found.tv > 0.05
    assert not found.kept


def test_a_rule_that_does_not_fit_is_refused() -> None:
    with pytest.raises(BranchwiseError, match="is not exact for drafter"):
        audit_method(find_any("model/rsd-c:2,1/cascade"))


def test_a_drafter_with_draws_of_its_own_is_sent_to_the_other_audit(monkeypatch: pytest.MonkeyPatch) -> None:
    from branchwise.draft import DRAFTERS

    class Own:
        draw = Draw.PATHS

    monkeypatch.setattr(DRAFTERS, "_entries", {**DRAFTERS._entries, "own": Own})
    with pytest.raises(BranchwiseError, match="branchwise audit model --draft own"):
        audit_method(find_any("own"))


# The command


def audited(*words: str) -> tuple[int, str]:
    """Exit code and output of the command, in this process: a new one would import everything again."""
    done = CliRunner().invoke(app, ["audit", "methods", *words])
    return done.exit_code, done.output


def test_the_command_shows_trees_distances_and_verdicts() -> None:
    code, shown = audited("cascade", "improved-mcsd-lossy")
    assert code == 0, shown
    cascade, lossy = (line for line in shown.splitlines() if line.startswith(("cascade", "improved")))
    assert "paths:2x2" in cascade
    assert "LOSSLESS" in cascade
    assert lossy.rstrip().endswith("LOSSY")
    assert "LOSSLESS\n  Every outcome of 1 methods on 6 random distributions over 3 tokens was followed" in shown
    assert (
        "improved-mcsd-lossy is lossy: on the same distributions and fork-lossy:2x3,stop=confidence:0.7 its distance "
        "is up to 0." in shown
    )
    assert "for fork-lossy:4x6,stop=learned it is not known." in shown


def test_the_command_prints_one_json_object() -> None:
    code, shown = audited("speculative", "--json")
    assert code == 0, shown
    found = json.loads(shown)
    assert found["finding"] == "LOSSLESS"
    [one] = found["audits"]
    assert one["method"] == "speculative"
    assert one["verdict"] == "LOSSLESS"
    assert one["tree"] == "chain:3"
    assert 0 <= one["tv"] < 1e-9


def test_the_command_fails_for_a_method_that_is_not_lossless(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(VERIFIERS, "_entries", {**VERIFIERS._entries, "generous": Generous})
    code, shown = audited("model/chain:2/generous", "block")
    assert code == 1
    assert "NOT LOSSLESS\n  The emitted distribution is not the target's: model/chain:2/generous." in shown
    code, shown = audited("model/chain:2/generous", "--json")
    assert code == 1
    assert json.loads(shown)["finding"] == "NOT LOSSLESS"


def test_an_unknown_method_is_one_sentence() -> None:
    wrong = CliRunner().invoke(app, ["audit", "methods", "cascad"]).exception
    assert isinstance(wrong, BranchwiseError)
    assert str(wrong).startswith("Unknown method 'cascad'. Did you mean 'cascade'")
    assert "\n" not in str(wrong)
