"""Several memories as one: merged trees, earned trust, provenance, and a draft model among them."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import pairwise
from typing import Any

import hypothesis.strategies as st
import pytest
import torch
from hypothesis import given

from branchwise.backends.base import Needs, Prefill, Scored
from branchwise.core.sampling import SamplingParams
from branchwise.core.sequence import SequenceState
from branchwise.core.tree import DraftTree
from branchwise.draft import DRAFTERS, build_drafter, build_policy
from branchwise.draft.base import Budget
from branchwise.draft.builder import Candidate, Cursor, NodeProbs, TreePolicy
from branchwise.draft.lookup.base import LookupDrafter
from branchwise.draft.lookup.drafted import DraftedMember
from branchwise.draft.lookup.fusion import EDGES, Calibration, FusedCursor, Fusion, split_members
from branchwise.draft.tree_drafter import ExpandRequest, TreeDrafter
from branchwise.engine import Engine, Request
from branchwise.errors import BranchwiseError, UsageError
from branchwise.testing import ToyTarget
from branchwise.verify import VERIFIERS, Verdict
from tests.strategies import best_first
from tests.test_lookup import VOCABULARY, Given, Table, assert_first_tokens_have_the_law, tables


class First(Given):
    name = "first"


class Second(Given):
    name = "second"


class Third(Given):
    name = "third"


def fused(*given: Table, tree: str = "topk:64,depth=3,width=64") -> Fusion:
    kinds = (First, Second, Third)
    fusion = Fusion("ngram", build_policy(tree))
    fusion.members = [kind(table) for kind, table in zip(kinds, given, strict=False)]
    fusion.records = [Calibration() for _ in given]
    return fusion


def paths_of(tree: DraftTree) -> set[tuple[int, ...]]:
    return {tuple(tree.tokens[tree.topology.path(node)[1:]].tolist()) for node in range(1, len(tree))}


def draft(drafter: LookupDrafter, budget: Budget | None = None) -> DraftTree:
    [tree] = drafter.draft([SequenceState([0])], [budget or Budget(65, 9)])
    return tree


@given(tables(), tables(), tables())
def test_below_the_budget_no_node_of_anyone_is_lost_and_no_sibling_is_there_twice(a: Table, b: Table, c: Table) -> None:
    fusion = fused(a, b, c, tree="topk:999,depth=2,width=64")
    tree = draft(fusion, Budget(1000, 2))
    alone = [draft(First(table, fusion.tree), Budget(1000, 2)) for table in (a, b, c)]
    steps = list(zip(tree.parents[1:], tree.tokens[1:].tolist(), strict=True))
    assert len(set(steps)) == len(steps)
    for own in alone:
        assert paths_of(own) <= paths_of(tree)


@given(tables(), tables(), st.integers(1, 12))
def test_a_small_budget_is_used_up(one: Table, other: Table, nodes: int) -> None:
    whole = draft(fused(one, other), Budget(65, 3))
    assert len(draft(fused(one, other), Budget(nodes, 3))) == min(nodes, len(whole))


def test_where_one_stops_another_goes_on() -> None:
    """Equal prefixes are one node, with a place in both."""
    tree = draft(fused({0: {1: 0.5}, 2: {3: 0.5}}, {0: {1: 0.4}, 1: {2: 0.5}}))
    assert paths_of(tree) == {(1,), (1, 2)}, "what follows 2 is known to the first only, and it has lost the thread"
    assert tree.sources == ("", "first", "second")


def test_who_knows_the_way_behind_a_token_that_another_proposed_goes_on() -> None:
    class Anywhere(First):
        def advance(self, cursor: Cursor, token: int) -> Cursor:
            return token

    fusion = fused({0: {1: 0.5}}, {0: {1: 0.4}, 1: {2: 0.5}})
    fusion.members[0] = Anywhere({0: {1: 0.5}, 2: {3: 0.5}})
    tree = draft(fusion)
    assert paths_of(tree) == {(1,), (1, 2), (1, 2, 3)}
    assert tree.sources == ("", "first", "second", "first")


def test_a_token_is_booked_on_who_was_believed_most() -> None:
    tree = draft(fused({0: {1: 0.2, 2: 0.5}}, {0: {1: 0.4, 3: 0.1}}))
    assert dict(zip(tree.tokens.tolist(), tree.sources, strict=True)) == {0: "", 1: "second", 2: "first", 3: "second"}


@given(
    tables(), tables(), st.lists(st.tuples(st.booleans(), st.floats(0, 1), st.booleans(), st.booleans()), max_size=9)
)
def test_a_token_is_worth_the_most_favourable_word_on_it(
    one: Table, other: Table, seen: list[tuple[bool, float, bool, bool]]
) -> None:
    """Against every word by itself: members in their order, of equal tokens that which was named first."""
    fusion = fused(one, other)
    for first, mass, agreed, came in seen:
        fusion.records[first].count(mass, agreed, came)
    rows = [one.get(0, {}), other.get(0, {})]
    words: dict[int, list[tuple[float, str]]] = {}
    for row, record, name in zip(rows, fusion.records, ("first", "second"), strict=True):
        for token, mass in sorted(row.items(), key=lambda item: -item[1]):
            agreed = all(token in said for said in rows)
            words.setdefault(token, []).append((believed(record, mass, agreed=agreed), name))
    best = {token: max(heard, key=lambda word: word[0]) for token, heard in words.items()}
    total = max(1.0, sum(belief for belief, _ in best.values()))
    expected = sorted(best.items(), key=lambda item: -item[1][0])
    found = fusion.candidates(FusedCursor((0, 0)))
    assert [(word.token, word.source) for word in found] == [(token, name) for token, (_, name) in expected]
    assert [word.mass for word in found] == pytest.approx([belief / total for _, (belief, _) in expected])


def slow_tree(
    known: Sequence[Table], records: Sequence[Calibration], nodes: int, depth: int
) -> list[tuple[tuple[int, ...], str, float]]:
    """The rule of a fusion and of the heap word by word: (path, source, how probable), in the order of joining."""

    def children(path: tuple[int, ...]) -> list[tuple[int, float, str]]:
        words: dict[int, list[tuple[float, str]]] = {}
        follows = [all(b in table.get(a, {}) for a, b in pairwise((0, *path))) for table in known]
        rows = [table.get((0, *path)[-1], {}) if own else {} for table, own in zip(known, follows, strict=True)]
        for row, record, name in zip(rows, records, ("first", "second", "third"), strict=False):
            for token, mass in sorted(row.items(), key=lambda item: -item[1]):
                agreed = sum(token in other for other in rows) > 1
                words.setdefault(token, []).append((believed(record, mass, agreed=agreed), name))
        best = {token: max(heard, key=lambda word: word[0]) for token, heard in words.items()}
        total = max(1.0, sum(belief for belief, _ in best.values()))
        ranked = sorted(best.items(), key=lambda item: -item[1][0])
        return [(token, belief / total, name) for token, (belief, name) in ranked]

    reach: dict[tuple[int, ...], float] = {(): 1.0}
    joined: list[tuple[tuple[int, ...], str, float]] = []
    while len(joined) < nodes:
        waiting = [
            ((*path, token), name, reach[path] * mass)
            for path in reach  # the oldest first, and of equal paths the first is taken
            if len(path) < depth
            for token, mass, name in children(path)
            if (*path, token) not in reach
        ]
        if not waiting:
            break
        joined.append(max(waiting, key=lambda node: node[2]))
        reach[joined[-1][0]] = joined[-1][2]
    return joined


@given(
    st.lists(tables(), min_size=1, max_size=3),
    st.lists(st.tuples(st.integers(0, 2), st.floats(0, 1), st.booleans(), st.booleans()), max_size=30),
    st.integers(1, 16),
    st.integers(1, 4),
)
def test_the_tree_is_that_of_the_rule_word_by_word(
    known: list[Table], seen: list[tuple[int, float, bool, bool]], nodes: int, depth: int
) -> None:
    """Whatever is put off, kept or left out for speed, no node, no source and no order is another for it."""
    fusion = fused(*known)
    for number, mass, agreed, came in seen:
        fusion.records[number % len(known)].count(mass, agreed, came)
    tree, reach = best_first(0, fusion.locate(SequenceState([0])), fusion.candidates, nodes=nodes, depth=depth)
    expected = slow_tree(known, fusion.records, nodes, depth)
    assert [tuple(tree.path(node)) for node in range(1, len(tree))] == [path for path, _, _ in expected]
    assert [tree.sources[node] for node in range(1, len(tree))] == [source for _, source, _ in expected]
    assert reach[1:] == pytest.approx([value for _, _, value in expected])


def test_masses_of_several_are_together_at_most_one() -> None:
    fusion = fused({0: {1: 0.9}}, {0: {2: 0.9}}, {0: {3: 0.6}})
    found = fusion.candidates(FusedCursor((0, 0, 0)))
    assert sum(one.mass for one in found) == pytest.approx(1)
    assert [one.token for one in found] == [1, 2, 3]


# Trust


def believed(record: Calibration, mass: float, *, agreed: bool) -> float:
    """What a token is worth that a memory gives this mass."""
    heard: dict[int, float] = {}
    record.apply("someone", [Candidate(7, mass, None)], {7} if agreed else (), heard, {})
    return heard[7]


def test_a_record_believes_a_memory_until_it_has_seen_otherwise() -> None:
    record = Calibration()
    assert believed(record, 0.65, agreed=False) == pytest.approx(0.65)
    for _ in range(100):
        record.count(0.65, False, came=False)
    assert believed(record, 0.65, agreed=False) < 0.05
    assert believed(record, 0.65, agreed=True) == pytest.approx(0.65), "what others said too has a record of its own"
    assert believed(record, 0.15, agreed=False) == pytest.approx(0.15)
    for _ in range(2000):
        record.fade()
    assert believed(record, 0.65, agreed=False) == pytest.approx(0.65, abs=0.01), "what is long ago counts no more"


@pytest.mark.parametrize("mass", [1e-9, *EDGES, 0.999, 1.0])
def test_every_mass_has_a_cell(mass: float) -> None:
    record = Calibration()
    record.count(mass, True, came=True)
    assert believed(record, mass, agreed=True) > mass or mass == 1.0


def test_trust_shifts_the_budget_to_who_earns() -> None:
    """Both are equally sure; one is always wrong."""
    wrong: Table = {t: {(t + 2) % 4: 0.5} for t in range(4)}
    right: Table = {t: {(t + 1) % 4: 0.5} for t in range(4)}
    fusion = fused(wrong, right, tree="topk:1,depth=1,width=1")
    sequence = SequenceState([0])
    sources = []
    for step in range(12):
        [tree] = fusion.draft([sequence], [Budget(2, 1)])
        sources.append(tree.sources[1])
        token = (step + 1) % 4
        hit = int(tree.tokens[1]) == token
        after = (token + 1) % 4
        verdict = Verdict((0, 1), after) if hit else Verdict((0,), token)
        fusion.update([sequence], Scored(torch.zeros(1, 2, 4)), [verdict])
        sequence.tokens += [token, after] if hit else [token]
        if hit:
            break
    assert sources[0] == "first"
    assert sources[-1] == "second", "and it was not drafted when it earned that"


def test_trust_is_kept_and_comes_back() -> None:
    fusion = fused({0: {1: 0.5}}, {0: {2: 0.5}})
    for _ in range(9):
        fusion.records[1].count(0.5, False, came=True)
    other = fused({0: {1: 0.5}}, {0: {2: 0.5}})
    other.restore(fusion.save())
    assert [one.token for one in other.candidates(FusedCursor((0, 0)))] == [2, 1]
    assert believed(other.records[1], 0.5, agreed=False) == pytest.approx(
        believed(fusion.records[1], 0.5, agreed=False)
    )
    turned = fused({}, {})
    turned.members.reverse()
    turned.restore(fusion.save())
    assert believed(turned.records[0], 0.5, agreed=False) > 0.5, "trust belongs to a name and not to a place"


@pytest.mark.parametrize(
    "records",
    [
        {},
        dict.fromkeys(("first", "third"), torch.zeros(2, 2 * len(EDGES) + 2)),
        dict.fromkeys(("first", "second"), torch.full((2, 2 * len(EDGES) + 2), torch.nan)),
        dict.fromkeys(("first", "second"), torch.stack([torch.zeros(26), torch.ones(26)])),
    ],
    ids=["none", "of others", "no numbers", "more hits than tries"],
)
def test_records_that_cannot_be_are_refused(records: dict[str, torch.Tensor]) -> None:
    with pytest.raises(UsageError, match="start afresh"):
        fused({}, {}).restore(records)


def test_members_learn_and_end_with_the_fusion() -> None:
    calls: list[Any] = []

    class Learner(Given):
        name = "learner"

        @property
        def needs(self) -> Needs:
            return Needs(prefill_logits=2, hidden_layers=("embedding",), topk=5)

        def start(self, sequence: SequenceState, prefill: Prefill) -> None:
            calls.append(("start", len(prefill.logits), list(prefill.hidden)))

        def learn(self, sequences: Sequence[SequenceState], scored: Scored, verdicts: Sequence[Verdict]) -> None:
            assert len(self._drafted) == len(sequences)
            calls.append("learn")

        def finish(self, sequence: SequenceState) -> None:
            calls.append("finish")

    fusion = fused({0: {1: 0.5}})
    fusion.members.append(Learner({}))
    fusion.records.append(Calibration())
    assert fusion.needs == Needs(prefill_logits=2, hidden_layers=("embedding",), topk=5)
    engine = Engine(ToyTarget(4), fusion, VERIFIERS.build("match"))
    engine.submit(Request((0, 1, 2, 3), max_new_tokens=1))
    engine.step()
    assert calls == [("start", 2, ["embedding"]), "learn", "finish"]


def test_stats_and_pieces_say_who_earned_each_token() -> None:
    table: Table = {t: dict.fromkeys(range(4), 0.2) for t in range(4)}
    halves = [{t: {u: m for u, m in row.items() if u % 2 == odd} for t, row in table.items()} for odd in (0, 1)]
    engine = Engine(ToyTarget(4), fused(*halves), VERIFIERS.build("match"))
    made = engine.submit(Request((0, 1), max_new_tokens=30))
    while engine.busy:
        engine.step()
    earned = made.stats.accepted_by_source
    assert set(earned) == {"first", "second"}
    assert sum(earned.values()) == made.stats.accepted_tokens
    for piece in made.pieces:
        assert piece.drafted == bool(piece.source)
        if piece.drafted:
            assert piece.source == ("second" if piece.token % 2 else "first")


# Specs


@pytest.mark.parametrize(
    ("text", "specs"),
    [
        ("ngram", ["ngram"]),
        ("ngram+trigram", ["ngram", "trigram"]),
        ("ngram(max=3,min=1)+trigram", ["ngram:max=3,min=1", "trigram"]),
        ("model(a/b-c.gguf,top-k=3)+retrieval(some/dir)", ["model:a/b-c.gguf,top-k=3", "retrieval:some/dir"]),
    ],
)
def test_members_are_named_with_their_options(text: str, specs: list[str]) -> None:
    assert split_members(text) == specs


@pytest.mark.parametrize(
    "spec", ["fused:", "fused:+", "fused:ngram+", "fused:ngram trigram", "fused:ngram(max=3", "fused:()"]
)
def test_what_is_no_fusion_is_one_sentence(spec: str) -> None:
    with pytest.raises(BranchwiseError, match=r"^[^\n]+$"):
        build_drafter(spec)


@pytest.mark.parametrize(
    ("spec", "why"),
    [
        ("fused:ngram+ngram(max=3)", "each of its drafters once"),
        ("fused:none", "remembers nothing"),
        ("fused:fused(ngram)+trigram", "not fused again"),
        ("fused:ngrm", "Did you mean 'ngram'"),
    ],
)
def test_what_cannot_be_fused_is_refused(spec: str, why: str) -> None:
    with pytest.raises(BranchwiseError, match=why):
        build_drafter(spec)


def test_options_reach_the_member() -> None:
    drafter: Any = build_drafter("fused:ngram(max=3,min=1)+trigram")
    assert list(drafter.members[0].sizes) == [3, 2, 1]


# A draft model among memories


class Model(TreeDrafter):
    """What a draft model is to `DraftedMember`: it grows a tree from distributions."""

    name, cost = "model", 0.25

    def __init__(self, probs: torch.Tensor, tree: TreePolicy) -> None:
        super().__init__(tree)
        self.probs = probs

    def look(self, requests: Sequence[ExpandRequest]) -> list[NodeProbs]:
        self.passes += 1
        return [NodeProbs(self.probs.expand(len(request.nodes), -1)) for request in requests]


def with_model(probs: list[float], table: Table, tree: str, monkeypatch: pytest.MonkeyPatch, **options: Any) -> Fusion:
    class Stub(Model):
        def __init__(self, tree: TreePolicy) -> None:
            super().__init__(torch.tensor(probs), tree)

    monkeypatch.setattr(DRAFTERS, "_entries", {**DRAFTERS._entries, "model": Stub, "first": First})
    fusion = Fusion("model", build_policy(tree), **options)
    fusion.members.append(First(table))
    fusion.records.append(Calibration())
    fusion.bind(ToyTarget(len(probs)).info)
    return fusion


def test_what_is_retrieved_is_attached_to_the_models_tree_and_pruned_by_its_law(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    table: Table = {0: {2: 0.5, 3: 0.4}, 2: {1: 0.5}, 3: {1: 0.9}}
    fusion = with_model([0.0, 0.7, 0.295, 0.005], table, "topk:64,depth=9,width=9", monkeypatch)
    tree = draft(fusion, Budget(65, 2))
    model = {path for path in paths_of(tree) if 3 not in path}
    assert {(1,), (2,), (1, 1), (2, 1), (1, 2), (2, 2)} <= model
    assert not [path for path in paths_of(tree) if path[0] == 3], "the model holds 3 for too improbable"
    sources = dict(zip(nodes_of(tree), tree.sources[1:], strict=True))
    assert sources[(1,)] == "model"
    assert sources[(2,)] == "first", "0.5 against 0.295"


def test_how_much_is_pruned_and_how_large_the_models_tree_is_are_options(monkeypatch: pytest.MonkeyPatch) -> None:
    table: Table = {0: {2: 0.5, 3: 0.4}, 3: {1: 0.9}}
    given = [0.0, 0.7, 0.295, 0.005], table, "topk:64,depth=9,width=9", monkeypatch
    first = [{path[0] for path in paths_of(draft(with_model(*given, prune=prune)))} for prune in (0.0, 0.01, 0.3)]
    assert first == [{1, 2, 3}, {1, 2}, {1}]
    small = with_model([0.0, 0.7, 0.3, 0.0], {}, "topk:64,depth=9,width=9", monkeypatch, nodes=2, depth=1, width=2)
    assert paths_of(draft(small)) == {(1,), (2,)}
    with pytest.raises(UsageError, match="prunes"):
        Fusion("ngram", prune=1.5)


@pytest.mark.parametrize(
    ("tree", "verify"), [("paths:2x2", "cascade"), ("rsd-s:2x2", "traversal"), ("rsd-c:2,1", "rrs")]
)
def test_a_tree_drawn_from_a_model_and_what_was_retrieved_keeps_the_targets_law(
    tree: str, verify: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    probs = [(1 + token) / sum(range(1, VOCABULARY + 1)) for token in range(VOCABULARY)]
    table: Table = {token: {(token + 1) % VOCABULARY: 0.6, 0: 0.3} for token in range(VOCABULARY)}
    assert_first_tokens_have_the_law(with_model(probs, table, tree, monkeypatch, depth=2), verify)


def nodes_of(tree: DraftTree) -> list[tuple[int, ...]]:
    return [tuple(tree.tokens[tree.topology.path(node)[1:]].tolist()) for node in range(1, len(tree))]


def test_passes_and_cost_are_those_of_the_model(monkeypatch: pytest.MonkeyPatch) -> None:
    fusion = with_model([0.25] * 4, {}, "topk:6,depth=2,width=3", monkeypatch)
    draft(fusion, Budget(7, 2))
    assert fusion.passes == 2
    assert fusion.cost == 0.25
    assert isinstance(fusion.members[0], DraftedMember)


def test_a_fusion_with_a_model_writes_what_plain_decoding_writes(monkeypatch: pytest.MonkeyPatch) -> None:
    texts = []
    for drafter in (
        build_drafter("none"),
        with_model([0.4, 0.3, 0.2, 0.1], {0: {1: 0.5}}, "topk:9,depth=3,width=3", monkeypatch),
    ):
        engine = Engine(ToyTarget(4, slots=2), drafter, VERIFIERS.build("match"))
        made = [engine.submit(Request((0, t), SamplingParams(0.9, seed=3), max_new_tokens=30)) for t in range(3)]
        while engine.busy:
            engine.step()
        texts.append([text.token_ids for text in made])
    assert texts[0] == texts[1]


def test_a_place_that_is_lost_says_nothing() -> None:
    assert fused({0: {1: 0.5}}).candidates(None) == ()
    assert list(fused({0: {1: 0.5}}).candidates(FusedCursor((None,)))) == []
    assert Candidate(1, 0.5, None).source == ""
