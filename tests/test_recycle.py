"""The table of successors against a dictionary, on the host and as it runs on a device."""

from __future__ import annotations

import math
import random
from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from branchwise.backends.base import Prefill, Scored
from branchwise.core.rows import top_tokens
from branchwise.core.sampling import SamplingParams
from branchwise.core.sequence import SequenceState
from branchwise.core.tree import DraftTree
from branchwise.draft import build_drafter, build_policy
from branchwise.draft.base import Budget
from branchwise.draft.policies.template import Ranks, places_in
from branchwise.draft.policies.topk import TopK
from branchwise.draft.recycle import topk as peaks_module
from branchwise.draft.recycle.adjacency import MOST_READ, AdjacencyTable
from branchwise.draft.recycle.drafter import PREFILL, Recycle
from branchwise.draft.recycle.topk import Sums, host_top_tokens, reported, top_tokens_at
from branchwise.engine import Engine, Request
from branchwise.errors import UsageError
from branchwise.testing import ToyTarget
from branchwise.verify import VERIFIERS, Verdict, Verdicts
from tests import device_twins
from tests.conformance.test_drafters import assert_writes_like_plain_decoding
from tests.device_twins import OnDevice
from tests.test_topk import paths_of

VOCABULARY = 12
AMPLE = Budget(nodes=99, depth=99)
TargetProbs = dict[int, dict[int, float]]


@dataclass
class Slow:
    """The table as a dictionary: token -> successor -> average."""

    k: int
    rate: float
    rows: TargetProbs = field(default_factory=dict)

    def learn(self, token: int, logits: Tensor) -> None:
        new = torch.softmax(logits.double(), dim=0).tolist()
        best = sorted(range(len(new)), key=lambda successor: -new[successor])[: self.k]
        old = self.rows.get(token)
        if old is None:
            mixed = {successor: new[successor] for successor in best}
        else:
            mixed = {successor: (1 - self.rate) * mass + self.rate * new[successor] for successor, mass in old.items()}
            mixed |= {successor: self.rate * new[successor] for successor in best if successor not in old}
        self.rows[token] = dict(sorted(mixed.items(), key=lambda pair: -pair[1])[: self.k])


def bound(vocabulary: int = VOCABULARY, slots: int = 4, kind: type[Recycle] = Recycle, **options: object) -> Recycle:
    drafter = kind(**options)  # type: ignore[arg-type]
    drafter.bind(ToyTarget(vocabulary, slots=slots).info)
    return drafter


def noise(*shape: int, seed: int = 0, spread: float = 2.0) -> Tensor:
    return spread * torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def assert_holds(table: AdjacencyTable, slow: Slow) -> None:
    for token in range(len(table)):
        row, expected = table.row(token), slow.rows.get(token, {})
        assert [found.token for found in row] == list(expected), token
        for found in row:
            assert math.isclose(found.mass, expected[found.token], rel_tol=8e-3)
            assert found.cursor == found.token
        assert sum(found.mass for found in row) <= 1


def scene(
    seed: int, texts: int = 2, nodes: int = 14
) -> tuple[list[SequenceState], list[DraftTree], Scored, list[Verdict]]:
    """Random trees with repeated tokens, their logits, and an accepted path in each."""
    rng = random.Random(seed)
    sequences, trees, verdicts = [], [], []
    for text in range(texts):
        parents = [-1]
        for node in range(1, nodes - 3 * text):
            parents.append(rng.randint(max(parents[-1], 0), node - 1))
        tokens = [rng.randrange(VOCABULARY) for _ in parents]
        sequences.append(SequenceState([rng.randrange(VOCABULARY), tokens[0]]))
        tree = DraftTree(torch.tensor(tokens), tuple(parents))
        trees.append(tree)
        verdicts.append(Verdict(tuple(tree.topology.path(rng.randrange(len(tree)))), rng.randrange(VOCABULARY)))
    return sequences, trees, Scored(noise(texts, nodes, VOCABULARY, seed=seed)), verdicts


def teach(drafter: Recycle, sequences: list[SequenceState], scored: Scored, verdicts: list[Verdict]) -> None:
    """What the engine tells after a step."""
    longest = max(len(verdict.path) for verdict in verdicts)
    paths = [[*verdict.path, *[-1] * (longest - len(verdict.path))] for verdict in verdicts]
    tokens = torch.tensor([verdict.token for verdict in verdicts])
    judged = [numbers.to(scored.logits.device, non_blocking=True) for numbers in (torch.tensor(paths), tokens)]
    drafter.update_on_device(scored, Verdicts(*judged))
    drafter.learn(sequences, scored, verdicts[: len(sequences)])


# The best tokens of a distribution


@given(st.sampled_from([1, 5, 63, 64, 130, 640, 1500]), st.integers(1, 12), st.integers(0, 99), st.booleans())
def test_the_best_tokens_are_those_of_a_sorted_vocabulary(vocabulary: int, k: int, seed: int, tied: bool) -> None:
    logits = noise(6, vocabulary, seed=seed)  # more than are worked on at once
    if tied:
        logits = logits.round()
    logits = logits.bfloat16() if seed % 2 else logits
    probs = torch.softmax(logits.double(), dim=1)
    best = probs.sort(dim=1, descending=True).values[:, :k]
    found, of_device = host_top_tokens(logits, k), top_tokens(logits, min(k, vocabulary))
    for tokens, masses in ((found.tokens, found.masses), of_device.unbind(dim=1)):
        tokens, masses = torch.as_tensor(tokens).long(), torch.as_tensor(masses)
        assert torch.allclose(masses.double(), best, rtol=1e-5)
        assert torch.allclose(probs.gather(1, tokens), best, rtol=1e-9)
        assert all(len(set(row)) == min(k, vocabulary) for row in tokens.tolist())
    rows, others = [5, 0], torch.randint(0, vocabulary, (2, 4))
    looked_up = torch.from_numpy(found.of(rows, others.numpy())).double()
    assert torch.allclose(looked_up, probs[rows].gather(1, others), rtol=1e-5)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_some_rows_are_looked_at_however_large_they_are_and_all_are_left_as_they_were(dtype: torch.dtype) -> None:
    logits = (1000 * noise(9, 130, seed=3)).to(dtype)  # 2 of 130 tokens are in no stripe
    logits[4, 129] = 9000
    before, rows = logits.clone(), torch.tensor([8, 4, 4, 0, 7, 1])
    some, every = host_top_tokens(logits, 5, rows), host_top_tokens(logits, 5)
    assert torch.equal(logits, before)
    assert some.tokens.tolist() == every.tokens[rows].tolist()
    assert some.masses.tolist() == every.masses[rows].tolist()
    assert some.masses[1].tolist() == [1, 0, 0, 0, 0]
    assert int(some.tokens[1, 0]) == 129
    line = np.array([[3, 129]])
    assert some.of([4], line).tolist() == every.of([7], line).tolist()


def test_rows_of_a_pass_are_summed_once_for_all_memories(monkeypatch: pytest.MonkeyPatch) -> None:
    summed: list[list[int]] = []

    def sums(logits: Tensor, rows: Tensor) -> Sums:
        summed.append(rows.tolist())
        return original(logits, rows)

    original = peaks_module._sums
    scored, other = Scored(noise(2, 7, 130).bfloat16()), Scored(noise(2, 7, 130, seed=1))
    asked = [(scored, [9, 3, 0, 4], 5), (scored, [4, 9], 6), (scored, [3, 9, 4, 0], 5), (other, [9, 3], 4)]
    asked += [(scored, [4, 5], 6), (scored, [5], 9), (other, [3, 9], 5)]
    for found, rows, k in asked:
        alone = host_top_tokens(found.logits.flatten(0, 1), k, torch.tensor(rows))
        with monkeypatch.context() as patch:
            patch.setattr(peaks_module, "_sums", sums)
            here = top_tokens_at(found, rows, k)
        assert here.tokens.tolist() == alone.tokens.tolist()
        assert here.masses.tolist() == alone.masses.tolist()
        line = np.arange(0, 130, 7)[None]
        assert here.of([len(rows) - 1], line).tolist() == alone.of([len(rows) - 1], line).tolist()
    assert summed == [[9, 3, 0, 4], [9, 3], [4, 5]]
    assert scored in peaks_module._seen
    before = len(peaks_module._seen)
    del scored, asked, found
    assert len(peaks_module._seen) == before - 1


# The table


@dataclass
class AsTensors:
    """What was found on the host, as tensors."""

    found: Any

    @property
    def tokens(self) -> Tensor:
        return torch.from_numpy(self.found.tokens)

    @property
    def masses(self) -> Tensor:
        return torch.from_numpy(self.found.masses)

    def of(self, rows: Tensor, tokens: Tensor) -> Tensor:
        return torch.from_numpy(self.found.of(rows.tolist(), tokens.numpy()))


@given(st.integers(0, 999), st.integers(1, 9), st.sampled_from([0.3, 0.5, 1.0]), st.booleans(), st.booleans())
def test_the_host_averages_like_a_device_number_for_number(
    seed: int, k: int, rate: float, tied: bool, reporting: bool
) -> None:
    rng, table = random.Random(seed), AdjacencyTable(130, k)
    for turn in range(6):
        logits = noise(7, 130, seed=7 * seed + turn, spread=rng.choice([0.5, 3.0, 20.0]))
        logits = logits.round().bfloat16() if tied else logits
        probs = {key: rng.randrange(7) for key in rng.sample(range(9), 5)}
        keys, rows = torch.tensor(list(probs)), torch.tensor(list(probs.values()))
        found = reported(top_tokens(logits, 2 * k).numpy(), k) if reporting else host_top_tokens(logits, k)
        expected = device_twins.averaged(table.tokens[keys], table.masses[keys], AsTensors(found), rows, rate)
        others = [key for key in range(130) if key not in probs]
        before = table.tokens[others], table.masses[others]
        table.mix(probs, found, rate)
        assert torch.equal(table.tokens[keys], expected[0])
        assert torch.equal(table.masses[keys], expected[1])
        assert torch.equal(table.tokens[others], before[0])
        assert torch.equal(table.masses[others], before[1])


@given(st.lists(st.integers(0, 3), min_size=1, max_size=30), st.integers(1, 12), st.sampled_from([0.2, 0.5, 1.0]))
def test_the_table_holds_what_a_dictionary_would(tokens: list[int], k: int, rate: float) -> None:
    drafter, slow = bound(k=k, rate=rate), Slow(k, rate)
    logits = noise(len(tokens), VOCABULARY, seed=len(tokens))
    drafter.start(SequenceState([*tokens, 0]), Prefill(logits))
    for token, row in zip(tokens, logits, strict=True):
        slow.learn(token, row)
    assert_holds(drafter.table, slow)


def test_tokens_that_fall_out_lose_their_place() -> None:
    drafter = bound(k=2, rate=0.5)
    for best, second in ((0, 1), (2, 3), (2, 3), (2, 3)):
        logits = torch.full((1, VOCABULARY), -9.0)
        logits[0, best], logits[0, second] = 5.0, 4.0
        drafter.start(SequenceState([7, 7]), Prefill(logits))
    assert [found.token for found in drafter.candidates(7)] == [2, 3]
    first, _ = drafter.candidates(7)
    # 2 had half its mass when it joined, then three quarters, then seven eighths; a fresh start would have the whole.
    assert math.isclose(first.mass, 0.875 * math.e / (1 + math.e), rel_tol=0.01)


def test_rows_never_seen_propose_nothing() -> None:
    drafter = bound()
    assert all(not drafter.candidates(token) for token in range(VOCABULARY))
    assert drafter.candidates(None) == []
    [tree] = drafter.draft([SequenceState([3])], [AMPLE])
    assert tree.tokens.tolist() == [3]


def test_impossible_tokens_are_not_proposed() -> None:
    drafter = bound()
    logits = torch.full((1, VOCABULARY), -math.inf)
    logits[0, 4] = 0.0
    drafter.start(SequenceState([1, 2]), Prefill(logits))
    [only] = drafter.candidates(1)
    assert only.token == 4
    assert 0.999 < only.mass <= 1


def test_a_row_never_holds_more_than_all_mass() -> None:
    drafter = bound(k=VOCABULARY, rate=0.3)
    for seed in range(300):
        drafter.start(SequenceState([seed % 3, 0]), Prefill(noise(1, VOCABULARY, seed=seed, spread=1.0)))
    for token in range(3):
        assert 0.98 < sum(found.mass for found in drafter.candidates(token)) <= 1


def test_eight_successors_of_49152_tokens_are_less_than_2_megabytes() -> None:
    table = AdjacencyTable(49_152, 8)
    assert table.tokens.nbytes < 2_000_000
    assert table.tokens.nbytes + table.masses.nbytes == 49_152 * 8 * 6 < 2_400_000


# Learning


@pytest.mark.parametrize("seed", range(8))
@pytest.mark.parametrize("most", [1, 3, 8])
def test_the_host_learns_from_the_path_and_from_rejected_nodes_near_the_root(seed: int, most: int) -> None:
    sequences, trees, scored, verdicts = scene(seed)
    drafter, slow = bound(k=3, rows=most), Slow(3, 0.5)
    drafter._drafted = trees
    teach(drafter, sequences, scored, verdicts)
    for text, (tree, verdict) in enumerate(zip(trees, verdicts, strict=True)):
        path = list(verdict.path)[max(len(verdict.path) - most, 0) :]
        others = [node for node in range(1, len(tree)) if node not in path]
        for node in [*others[: most - len(path)], *path]:
            slow.learn(int(tree.tokens[node]), scored.logits[text, node])
    assert_holds(drafter.table, slow)


@pytest.mark.parametrize("seed", range(8))
def test_a_device_learns_from_all_nodes_and_the_accepted_ones_come_last(seed: int) -> None:
    drafter, slow = bound(k=3, kind=OnDevice), Slow(3, 0.5)
    for step in range(3):
        sequences, trees, scored, verdicts = scene(100 * seed + step)
        drafter._drafted = trees
        teach(drafter, sequences, scored, verdicts)
        last: dict[int, Tensor] = {}  # once a step for every token, whoever writes last
        for accepted in (False, True):
            for text, (tree, verdict) in enumerate(zip(trees, verdicts, strict=True)):
                for node in verdict.path if accepted else set(range(len(tree))) - set(verdict.path):
                    last[int(tree.tokens[node])] = scored.logits[text, node]
        for token, row in last.items():
            slow.learn(token, row)
    assert_holds(drafter.table, slow)


def test_nothing_is_learned_from_padding_or_from_trees_without_a_text() -> None:
    """Caught here: padding of a recorded batch, whose token 0 would get the distributions of nobody."""
    sequences, trees, scored, verdicts = scene(3)
    tables = []
    for spare in (0, 2):
        drafter = bound(k=3, kind=OnDevice)
        drafter._drafted = trees
        padded = torch.nn.functional.pad(scored.logits, (0, 0, 0, 3 * spare, 0, spare), value=7.0)
        nodes = drafter._nodes(padded)
        assert (nodes.slots < 0).sum() == spare
        root_only = torch.zeros_like(nodes.ancestor_bits)
        root_only[len(trees) :, 0, 0] = 1  # as in the packed inputs of trees without a text
        nodes = nodes._replace(ancestor_bits=nodes.ancestor_bits | root_only)
        teach(drafter, sequences, Scored(padded, nodes=nodes), verdicts + [Verdict((0,), 0)] * spare)
        tables.append(drafter.save())
    assert torch.equal(tables[0]["tokens"], tables[1]["tokens"])
    assert torch.equal(tables[0]["masses"], tables[1]["masses"])


def test_prompts_of_all_lengths_are_learned_from_in_one_shape(monkeypatch: pytest.MonkeyPatch) -> None:
    # Or kernels are compiled anew, which takes longer than many answers, whenever a length is the first of its kind.
    shapes = set()

    def learner(table: Tensor, masses: Tensor, tokens: Tensor, logits: Tensor, marks: Tensor, *, rate: float) -> None:
        shapes.add((tokens.shape, logits.shape, marks.shape))
        original(table, masses, tokens, logits, marks, rate=rate)

    original = device_twins.learn_marked
    monkeypatch.setattr(device_twins, "learn_marked", learner)
    for length in (1, 16, 37, PREFILL):
        drafter, slow = bound(kind=OnDevice), Slow(8, 0.5)
        tokens = [(5 * place + place // 7) % VOCABULARY for place in range(length)]
        logits = noise(length, VOCABULARY, seed=length)
        drafter.start(SequenceState([*tokens, 3]), Prefill(logits))
        for token, row in dict(zip(tokens, logits, strict=True)).items():  # once for every token, the last time it came
            slow.learn(token, row)
        assert_holds(drafter.table, slow)
    assert len(shapes) == 1


def test_a_key_that_comes_twice_comes_with_the_same_row(monkeypatch: pytest.MonkeyPatch) -> None:
    # The order of writes on a device is not defined, so all must write the same; the host would not notice.
    written: list[tuple[int, int]] = []

    def averaged(tokens: Tensor, masses: Tensor, found: object, rows: Tensor, rate: float) -> tuple[Tensor, Tensor]:
        written.extend(zip(tokens[:, 0].tolist(), rows.tolist(), strict=True))
        return tokens, masses

    drafter = bound(kind=OnDevice)
    drafter.table.tokens[:] = torch.arange(VOCABULARY, dtype=torch.int32)[:, None]  # every row names its key
    monkeypatch.setattr(device_twins, "averaged", averaged)
    sequences, drafter._drafted, scored, verdicts = scene(2)
    teach(drafter, sequences, scored, verdicts)
    assert len(set(written)) == len({key for key, _ in written}) < len(written)


def test_logits_of_bfloat16_are_understood() -> None:
    sequences, trees, scored, verdicts = scene(5)
    for on_device in (False, True):
        tables = []
        for logits in (scored.logits.bfloat16(), scored.logits.bfloat16().float()):
            drafter = bound(kind=OnDevice if on_device else Recycle)
            drafter._drafted = trees
            teach(drafter, sequences, Scored(logits), verdicts)
            tables.append(drafter.save())
        assert torch.equal(tables[0]["tokens"], tables[1]["tokens"])
        assert torch.equal(tables[0]["masses"], tables[1]["masses"])


def test_the_prompt_seeds_the_table_and_the_next_request_starts_warm() -> None:
    engine = Engine(ToyTarget(VOCABULARY), drafter := build_drafter("recycle"), VERIFIERS.build("match"))
    assert drafter.learns
    request = Request((1, 2, 3, 4), max_new_tokens=30)
    first, lengths = [], []
    for _ in range(2):
        generation = engine.submit(request)
        engine.step()
        first.append(generation.stats.drafted_tokens)
        while engine.busy:
            engine.step()
        lengths.append(generation.stats.steps)
    assert isinstance(drafter, Recycle)
    assert all(drafter.candidates(token) for token in (1, 2, 3))
    assert first[0] == 0  # the root, 4, was not followed by anything yet
    assert first[1] > 0
    assert lengths[1] <= lengths[0] < 30


# Trees


@pytest.mark.parametrize("k", [8, 3])
@pytest.mark.parametrize("shape", ["recycling-80", "mcsd", "sequoia-24"])
def test_a_tree_looked_up_on_a_device_is_that_of_the_host(shape: str, k: int) -> None:
    there, here = bound(k=k, tree=Ranks(shape), kind=OnDevice), bound(k=k, tree=Ranks(shape))
    everything = SequenceState([*range(VOCABULARY), 0])
    for drafter in (there, here):
        drafter.start(everything, Prefill(noise(VOCABULARY, VOCABULARY, seed=3)))
    sequences = [SequenceState([token]) for token in range(5)]
    few = [Budget(17, 9), AMPLE, Budget(1, 4), Budget(40, 2)]
    budgets = [AMPLE, *(few if k == 8 else [AMPLE] * 4)]  # the host does not know how few successors will be found
    looked_up, layout = there.draft(sequences, budgets), here.draft(sequences, budgets)
    for one, other, budget in zip(looked_up, layout, budgets, strict=True):
        assert one.parents == other.parents
        assert one.tokens.tolist() == other.tokens.tolist()
        assert one.draw is other.draw
        assert len(one) <= budget.nodes
        assert one.depth <= budget.depth
    assert there._drafted is looked_up
    assert len(layout[0]) > 20


def test_trees_are_looked_up_before_the_host_knows_their_roots(monkeypatch: pytest.MonkeyPatch) -> None:
    """Caught here: trees of other texts, or of texts that did not go on with what was found."""
    drafter = bound(k=3, tree=Ranks("mcsd"), kind=OnDevice)
    sequences, trees, scored, verdicts = scene(4, texts=3, nodes=9)

    def step() -> None:
        drafter._drafted = trees
        teach(drafter, sequences, scored, verdicts)

    step()
    for sequence, verdict in zip(sequences, verdicts, strict=True):
        sequence.tokens.append(verdict.token)
    told: list[list[int]] = []
    look = drafter.looked_up
    monkeypatch.setattr(drafter, "looked_up", lambda roots: (told.append(roots), look(roots))[1])

    def drafts(texts: list[SequenceState]) -> list[list[int]]:
        return [tree.tokens.tolist() for tree in drafter.draft(texts, [AMPLE] * len(texts))]

    found = drafts(sequences)
    assert not told
    assert found == drafts(sequences)  # a second time nothing is at hand
    assert told == [[verdict.token for verdict in verdicts]]
    for texts in (sequences[:2], sequences[::-1], [*sequences, SequenceState([3])]):
        step()
        assert [row[0] for row in drafts(texts)] == [text.root for text in texts]
    step()
    sequences[1].tokens.append((sequences[1].root + 1) % VOCABULARY)
    assert [row[0] for row in drafts(sequences)] == [text.root for text in sequences]
    assert len(told) == 5


def test_a_step_that_is_interrupted_leaves_no_trees_behind() -> None:
    """Caught here: trees below tokens that nobody read, taken for those of the step before."""
    drafter = bound(k=3, tree=Ranks("mcsd"), kind=OnDevice)
    [sequence], trees, scored, [verdict] = scene(4, texts=1, nodes=9)
    drafter._drafted = trees
    teach(drafter, [sequence], scored, [verdict])
    sequence.tokens.append(verdict.token)
    drafter.update_on_device(scored, Verdicts(torch.tensor([[0]]), torch.tensor([(verdict.token + 1) % VOCABULARY])))
    [tree] = drafter.draft([sequence], [AMPLE])
    assert int(tree.tokens[0]) == sequence.root


def test_what_empty_rows_propose_does_no_harm() -> None:
    there, here = bound(tree=Ranks(), kind=OnDevice), bound(tree=Ranks())
    for drafter in (there, here):
        drafter.start(SequenceState([1, 2, 3, 0]), Prefill(noise(3, VOCABULARY, seed=4)))
    for root in range(VOCABULARY):
        [one], [other] = there.draft([SequenceState([root])], [AMPLE]), here.draft([SequenceState([root])], [AMPLE])
        assert set(paths_of(other)) <= set(paths_of(one))
        assert len(one) == 81
        assert len(other) < 81


@pytest.mark.parametrize("kind", [Recycle, OnDevice])
@pytest.mark.parametrize("tree", ["ranks:recycling-80", "ranks:fork", "topk:16"])
def test_the_text_is_that_of_plain_decoding(tree: str, kind: type[Recycle]) -> None:
    assert_writes_like_plain_decoding(lambda _: kind(tree=build_policy(tree)), VERIFIERS.build("match"))


@pytest.mark.parametrize("spec", ["paths:2x3", "rsd-s:3x3", "rsd-c:3,2", "dynamic:8"])
def test_trees_can_be_drawn_from_the_table(spec: str) -> None:
    drafter = build_drafter("recycle", spec)
    target = ToyTarget(VOCABULARY)
    engine = Engine(target, drafter, VERIFIERS.build("rrs" if spec.startswith("rsd") else "auto"))
    engine.submit(Request((1, 2, 3), max_new_tokens=40, sampling=SamplingParams(temperature=0.8, seed=3)))
    drawn = 0
    while engine.busy:
        engine.step()
        for tree in drafter._drafted:  # type: ignore[attr-defined]
            if len(tree) > 1:
                drawn += 1
                assert tree.q is not None
                assert torch.allclose(tree.q.sum(dim=1).max(), torch.tensor(1.0))
    assert drawn > 5


def test_what_a_device_tells_of_a_law_serves_like_the_law() -> None:
    """Where all that matters was among the best tokens; the others count as impossible."""
    whole, few = AdjacencyTable(VOCABULARY, 4), AdjacencyTable(VOCABULARY, 4)
    for seed in range(40):
        logits = 6 * noise(3, VOCABULARY, seed=seed)
        every = top_tokens(logits, VOCABULARY).numpy()
        probs = {seed % 5: 2, 5 + seed % 5: 0, 10: 1}
        whole.mix(probs, host_top_tokens(logits, 4), 0.4)
        few.mix(probs, reported(every, 4), 0.4)
        for token in range(VOCABULARY):
            one, other = whole.row(token), few.row(token)
            assert [found.token for found in one] == [found.token for found in other]
            assert [found.mass for found in one] == pytest.approx([found.mass for found in other], abs=1e-3)
    cut = reported(every[:, :, :6], 4)
    assert cut.of([0], every[:1, 0, 5:7].astype(np.int64)).tolist() == [[every[0, 1, 5], 0.0]]


def test_nodes_are_learned_from_what_a_pass_told() -> None:
    """No row of logits is looked at where the best tokens came along."""
    here, there = bound(), bound()
    sequences, trees, scored, verdicts = scene(3)
    best = top_tokens(scored.logits, VOCABULARY)
    for drafter, found in ((here, scored), (there, Scored(torch.full_like(scored.logits, math.nan), topk=best))):
        drafter._drafted = trees
        teach(drafter, sequences, found, verdicts)
    learned = 0
    for token in range(VOCABULARY):
        one, other = here.candidates(token), there.candidates(token)
        assert [found.token for found in one] == [found.token for found in other]
        learned += len(one)
    assert learned > 8


# State


def test_what_was_learnt_can_be_saved_and_restored() -> None:
    drafter, other = bound(), bound()
    drafter.start(SequenceState([1, 2, 1, 5, 0]), Prefill(noise(4, VOCABULARY)))
    saved = drafter.save()
    other.restore(saved)
    drafter.start(SequenceState([1, 0]), Prefill(noise(1, VOCABULARY, seed=9)))
    fresh = bound()
    assert fresh.candidates(1) == []
    fresh.restore(saved)  # what was saved has not moved since
    for token in range(VOCABULARY):
        assert other.candidates(token) == fresh.candidates(token)
    assert drafter.candidates(1) != other.candidates(1)
    assert drafter.candidates(2) == other.candidates(2) != []


def damaged(saved: dict[str, Tensor]) -> list[tuple[str, dict[str, Tensor]]]:
    def change(name: str, row: int, place: int, value: float) -> dict[str, Tensor]:
        tensor = saved[name].clone()
        tensor[row, place] = value
        return {**saved, name: tensor}

    twice = saved["tokens"].clone()
    twice[1, 1] = twice[1, 0]
    return [
        ("should hold", {"tokens": saved["tokens"]}),
        ("should hold", {**saved, "more": saved["tokens"]}),
        ("successors where", {**saved, "tokens": saved["tokens"][:-1]}),
        ("successors where", {**saved, "masses": saved["masses"][:, 1:]}),
        ("should hold", {**saved, "masses": saved["masses"].float()}),
        ("outside the vocabulary", change("tokens", 0, 0, VOCABULARY)),
        ("outside the vocabulary", change("tokens", 3, 2, -1)),
        ("not probabilities", change("masses", 1, 7, -0.1)),
        ("not probabilities", change("masses", 1, 0, math.nan)),
        ("not probabilities", change("masses", 1, 0, 1.5)),
        ("not in order", change("masses", 3, 7, 0.5)),
        ("twice", {**saved, "tokens": twice}),
    ]


@pytest.mark.parametrize("case", range(12))
def test_a_state_that_does_not_fit_is_refused_and_changes_nothing(case: int) -> None:
    drafter = bound()
    drafter.start(SequenceState([1, 2, 0]), Prefill(noise(2, VOCABULARY)))
    saved = drafter.save()
    [why, wrong] = damaged(saved)[case]
    with pytest.raises(UsageError, match=why):
        drafter.restore(wrong)
    assert all(torch.equal(tensor, saved[name]) for name, tensor in drafter.save().items())


def test_memory_is_bounded_over_200_000_tokens() -> None:
    vocabulary = 3000
    drafter = bound(vocabulary=vocabulary)
    rng, logits = random.Random(0), noise(64, vocabulary)
    for _ in range(200_000 // 64 // 8):  # texts of 512 tokens, of which the last 64 have distributions
        sequence = SequenceState([rng.randrange(vocabulary) for _ in range(8 * 64 + 1)])
        drafter.start(sequence, Prefill(logits))
        drafter.draft([sequence], [AMPLE])
        assert len(drafter.table._read) <= MOST_READ
    for token in range(vocabulary):
        drafter.candidates(token)
        assert len(drafter.table._read) <= MOST_READ
    assert drafter.table.tokens.shape == drafter.table.masses.shape == (vocabulary, 8)


def test_rows_that_were_read_are_read_again_once_written() -> None:
    drafter = bound()
    drafter.start(SequenceState([1, 0]), Prefill(noise(1, VOCABULARY)))
    before = drafter.candidates(1)
    assert drafter.candidates(1) is before
    drafter.start(SequenceState([1, 0]), Prefill(noise(1, VOCABULARY, seed=1)))
    assert drafter.candidates(1) != before


def test_another_engine_on_the_same_target_keeps_the_table() -> None:
    drafter, target = Recycle(), ToyTarget(VOCABULARY)
    drafter.bind(target.info)
    drafter.start(SequenceState([1, 0]), Prefill(noise(1, VOCABULARY)))
    drafter.bind(ToyTarget(VOCABULARY).info)
    assert drafter.candidates(1)
    with pytest.raises(UsageError, match="build a new one"):
        drafter.bind(ToyTarget(VOCABULARY + 1).info)


def test_options_outside_their_range_are_refused() -> None:
    for spec in ("recycle:k=0", "recycle:rate=0", "recycle:rate=1.5", "recycle:rows=0"):
        with pytest.raises(UsageError, match="takes k and rows of at least 1"):
            build_drafter(spec)
    assert isinstance(Recycle().tree, TopK)


class Overwriting:
    """What `GraphedFunction` does on a device: whoever asks again finds the answer in the same place."""

    def __init__(
        self, function: Callable[..., Tensor], device: torch.device, own: tuple[Tensor, ...] = (), **ways: Any
    ):
        options = {name: value for name, value in ways.items() if name not in ("writes", "capture")}
        self._run = lambda *places: function(*own, *places, **options)
        self._found: dict[tuple[Any, ...], Tensor] = {}

    def __call__(self, *places: Tensor) -> Tensor | None:
        if (found := self._run(*places)) is None:
            return None
        key = tuple((place.data_ptr(), place.shape) for place in places)
        return self._found.setdefault(key, found.clone()).copy_(found)


def test_trees_of_two_shapes_do_not_overwrite_each_other(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("branchwise.draft.recycle.drafter.GraphedFunction", Overwriting)
    drafter = bound(tree=Ranks(), kind=OnDevice)
    everything = SequenceState([*range(VOCABULARY), 0])
    drafter.start(everything, Prefill(noise(VOCABULARY, VOCABULARY, seed=3)))
    one, other = SequenceState([1, 4]), SequenceState([1, 9])
    alone = [drafter.draft([text], [AMPLE])[0].tokens.tolist() for text in (one, other)]
    found = drafter.draft([one, other, one], [AMPLE, Budget(64, 2), Budget(20, 9)])
    assert found[0].tokens.tolist() == alone[0]
    assert found[1].tokens.tolist() == [alone[1][place] for place in places_in(Ranks().shape, found[1].topology)]
    assert found[2].tokens.tolist() == [alone[0][place] for place in places_in(Ranks().shape, found[2].topology)]


def test_what_was_learned_moves_with_the_table() -> None:
    drafter = bound(k=3)
    drafter.start(SequenceState([1, 2, 3, 0]), Prefill(noise(3, VOCABULARY, seed=4)))
    before = drafter.save()
    drafter._bound_to = None  # as if it had lain on another device
    drafter.bind(ToyTarget(VOCABULARY).info)
    after = drafter.save()
    assert torch.equal(before["tokens"], after["tokens"])
    assert torch.equal(before["masses"], after["masses"])
    assert drafter.candidates(1)
