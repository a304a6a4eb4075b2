"""The kernels of the table against its plain functions, case by case, in Triton's interpreter; `tests/gpu` has the same
on a device."""

from __future__ import annotations

import math
import random
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from branchwise.backends.base import Execution, Prefill
from branchwise.core.sequence import SequenceState
from branchwise.core.topology import Topology, chain_topology, topology
from branchwise.draft.policies.template import Ranks, ways
from branchwise.draft.policies.topk import TopK
from branchwise.draft.recycle.adjacency import ACCEPTED, HALF_DOWN, PADDING, REJECTED
from branchwise.draft.recycle.drafter import MOST_WIDTH, Recycle
from branchwise.testing import ToyTarget
from tests import device_twins
from tests.device_twins import OnDevice
from tests.hopper import Compiled, compiled_by, interpreted
from tests.test_recycle import AMPLE, VOCABULARY, Slow, assert_holds, bound, noise, scene, teach

try:
    from branchwise.draft.recycle import kernels
except ImportError:
    kernels = None  # type: ignore[assignment]

pytestmark = pytest.mark.usefixtures("interpreter")


# Learning


@dataclass(frozen=True)
class Case:
    """Some steps of a table that learns; whatever nobody should look at is NaN or no token."""

    catches: str
    """the bug that this case would show"""
    vocabulary: int = 90
    k: int = 3
    batch: int = 1
    nodes: int = 5
    rate: float = 0.4
    carried: int = 4
    """different tokens that the nodes carry"""
    padding: float = 0.2
    """of the nodes but the first"""
    impossible: float = 0.0
    """of the tokens of a distribution"""
    spread: float = 3.0
    tied: bool = False
    """logits are whole numbers"""
    spare: tuple[int, int, int] = (0, 0, 0)
    """texts, nodes and tokens that lie behind, as in a pass with room for more"""
    numbers: torch.dtype = torch.int32
    """of tokens and marks"""
    tile: tuple[int, int] | None = (1, 1)
    """lanes and blocks of a program: blocks have 64 tokens for every lane"""
    steps: int = 2

    def tiles(self) -> kernels.Tiling | None:
        return self.tile and kernels.Tiling(*self.tile)


CASES = [
    Case("one node alone: the loop over the others finds itself", nodes=1, steps=3),
    Case("a table that is full: what stays is not asked of the new row, or the sum is that of one part", steps=5),
    Case("a vocabulary that ends in the middle of a group: what lies behind a row is read", 61, spare=(0, 0, 3)),
    Case("a vocabulary of less than a group: threads that read nothing win", 5, k=5),
    Case("several parts: their sums are not taken against one maximum", 400, spread=8.0),
    Case("several blocks: a winner is looked for where the first block has it", 300, tile=(1, 5)),
    Case("blocks and parts: a part starts where another does", 900, k=4, tile=(2, 3)),
    Case("blocks that are no power of two: groups of the next part are read again", 500, k=4, tile=(1, 3)),
    Case("the tiling that is chosen", 700, tile=None),
    Case("one successor: a block of one", k=1),
    Case("five successors, no power of two: the sixth is kept", k=5, steps=4),
    Case("sixteen successors: more than there are groups in a block of one load", 200, k=16, tile=(2, 1)),
    Case("as many successors as tokens: the best of a part are fewer than are asked for", 12, k=12, tile=(2, 1)),
    Case("two parts, one of them short: its missing tokens are taken for tokens", 66, k=5, tile=(1, 1)),
    Case("texts in a batch: one text's distribution is read for another's node", batch=3, nodes=3, carried=5),
    Case("a pass with room for more: rows are counted without it", batch=2, nodes=4, spare=(1, 2, 16), carried=2),
    Case("one token everywhere: several nodes write, or an accepted one counts before a rejected one", 70, carried=1),
    Case("tokens of 8 bytes, as after a prompt", numbers=torch.int64),
    Case("the new distribution alone counts", rate=1.0, steps=3),
    Case("most tokens are impossible: minus infinity from itself is no number", 200, impossible=0.97, steps=3),
    Case("nothing but the first node counts: padding is read, or writes", nodes=7, padding=1.0),
    Case("equal logits: a token comes twice, or none of two does", 150, k=6, tied=True, spread=1.0, tile=(1, 2)),
    Case("high logits: exponentials overflow", spread=3000.0),
    Case("more nodes than are looked at in one go: a later one is overlooked", nodes=300, padding=0.97, carried=2),
]  # fmt: skip


@dataclass
class Lesson:
    """What a table is told in one step."""

    tokens: Tensor
    logits: Tensor
    marks: Tensor

    def last(self) -> dict[int, Tensor]:
        """token -> distribution of the node that counts: accepted ones last, then those that stand last."""
        found = {}
        for mark in (REJECTED, ACCEPTED):
            for text, node in (self.marks == mark).nonzero().tolist():
                found[int(self.tokens[text, node])] = self.logits[text, node]
        return found


def lesson(case: Case, step: int, dtype: torch.dtype, device: str = "cpu") -> Lesson:
    generator = torch.Generator().manual_seed(1000 * step + len(case.catches))
    rng = random.Random(f"{case.catches} {step}")
    texts, nodes, behind = case.spare
    logits = torch.full((case.batch + texts, case.nodes + nodes, case.vocabulary + behind), torch.nan)
    tokens = torch.full(logits.shape[:2], 1 << 30, dtype=case.numbers)
    marks = torch.full(logits.shape[:2], ACCEPTED, dtype=case.numbers)
    marks[: case.batch, : case.nodes] = PADDING
    carried = random.Random(case.catches).sample(range(case.vocabulary), case.carried)  # the same in every step
    for text in range(case.batch):
        for node in range(case.nodes):
            if (text, node) != (0, 0) and rng.random() < case.padding:
                continue
            marks[text, node] = rng.choice((REJECTED, ACCEPTED))
            tokens[text, node] = rng.choice(carried)
            probs = case.spread * torch.randn(case.vocabulary, generator=generator)
            probs = probs.round() if case.tied else probs
            ruled_out = torch.rand(case.vocabulary, generator=generator) < case.impossible
            ruled_out[rng.randrange(case.vocabulary)] = False
            logits[text, node, : case.vocabulary] = probs.masked_fill(ruled_out, -math.inf)
    there = logits.to(device, dtype)[: case.batch, : case.nodes, : case.vocabulary]
    tokens, marks = (it.to(device)[: case.batch, : case.nodes] for it in (tokens, marks))
    return Lesson(tokens, there, marks)


def assert_learns_like_the_plain_one(case: Case, dtype: torch.dtype, device: str = "cpu") -> None:
    shape = case.vocabulary, case.k
    tokens, masses = torch.zeros(shape, dtype=torch.int32), torch.zeros(shape, dtype=torch.float16)
    tokens, masses = tokens.to(device), masses.to(device)
    for step in range(case.steps):
        told = lesson(case, step, dtype, device)
        inputs, before = (told.tokens, told.logits, told.marks), (tokens.clone(), masses.clone())
        plain = tokens.clone(), masses.clone()
        device_twins.learn_marked(*plain, *inputs, rate=case.rate)
        kernels.learn_marked(tokens, masses, *inputs, rate=case.rate, tiles=case.tiles())
        assert_averaged(before, (tokens, masses), told.last(), case.rate)
        torch.testing.assert_close(masses, plain[1], rtol=2**-10, atol=2**-24)
        if not case.tied and dtype == torch.float32:
            assert torch.equal(tokens, plain[0])


def assert_averaged(
    before: tuple[Tensor, Tensor], after: tuple[Tensor, Tensor], probs: dict[int, Tensor], rate: float
) -> None:
    """Rows of tokens that were met hold averages of what they held and of the distribution, and all others what they
    held."""
    untouched = [token for token in range(len(before[0])) if token not in probs]
    assert torch.equal(before[0][untouched], after[0][untouched])
    assert torch.equal(before[1][untouched], after[1][untouched])
    for token, logits in probs.items():
        p = torch.softmax(logits.double(), dim=0).tolist()
        least = sorted(p)[-before[0].shape[1]]
        held = {old: mass for old, mass in row(before, token) if mass > 0}
        share = rate if held else 1.0
        found = row(after, token)
        masses = [mass for _, mass in found]
        assert masses == sorted(masses, reverse=True)
        assert sum(masses) <= 1
        real = [successor for successor, mass in found if mass > 0]
        assert len(set(real)) == len(real)
        for successor, mass in found:
            expected = (1 - share) * held.get(successor, 0.0) + share * p[successor]
            if mass == 0:
                assert successor == 0
            else:
                assert math.isclose(mass, expected * HALF_DOWN, rel_tol=2**-10, abs_tol=2**-24)
                assert successor in held or p[successor] >= least * (1 - 1e-6)


def row(table: tuple[Tensor, Tensor], token: int) -> list[tuple[int, float]]:
    return list(zip(table[0][token].tolist(), table[1][token].tolist(), strict=True))


@interpreted
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.catches)
def test_learning_equals_the_plain_one(case: Case) -> None:
    assert_learns_like_the_plain_one(case, torch.float32)


@interpreted
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("case", [case for case in CASES if case.catches.startswith(("blocks and", "a pass with"))])
def test_learning_in_low_precision(case: Case, dtype: torch.dtype) -> None:
    """Caught here: numbers of 2 bytes that are compared or summed as they are."""
    assert_learns_like_the_plain_one(case, dtype)


@interpreted
@settings(max_examples=30)
@given(
    st.integers(1, 400), st.integers(1, 9), st.sampled_from([0.0, 0.5, 0.99]), st.sampled_from([0.5, 20.0]), st.data()
)
def test_any_laws_are_averaged(vocabulary: int, k: int, impossible: float, spread: float, data: st.DataObject) -> None:
    """Caught here: an edge between groups, blocks and parts that no case above has."""
    case = Case(
        str(data.draw(st.integers(0, 9999), "seed")),
        vocabulary,
        min(k, vocabulary),
        nodes=3,
        carried=min(2, vocabulary),
        impossible=impossible,
        spread=spread,
        tied=data.draw(st.booleans(), "tied"),
        tile=data.draw(st.sampled_from([(2, 1), (2, 2), (4, 3), None]), "tile"),
    )
    assert_learns_like_the_plain_one(case, data.draw(st.sampled_from([torch.float32, torch.bfloat16]), "dtype"))


def assert_equal_logits_go_to_the_lowest_tokens(dtype: torch.dtype, device: str = "cpu") -> None:
    """However a row is cut: a stable sort says which they are."""
    logits = noise(1, 2, 500, seed=5, spread=1.0).round().to(device, dtype)
    _, best = logits[0].sort(dim=1, descending=True, stable=True)
    there, marks = torch.tensor([[3, 7]]).to(device), torch.full((1, 2), ACCEPTED, device=device)
    for tile in ((1, 1), (2, 1), (1, 4), (2, 4)):
        tokens = torch.zeros(500, 7, dtype=torch.int32, device=device)
        masses = torch.zeros(500, 7, dtype=torch.float16, device=device)
        kernels.learn_marked(tokens, masses, there, logits, marks, rate=0.5, tiles=kernels.Tiling(*tile))
        assert tokens[[3, 7]].tolist() == best[:, :7].tolist()


@interpreted
def test_equal_logits_go_to_the_lowest_tokens() -> None:
    assert_equal_logits_go_to_the_lowest_tokens(torch.float32)


def assert_a_broken_law_empties_its_row_and_no_other(tile: tuple[int, int], device: str = "cpu") -> None:
    """As in the plain version. A token that is none would be looked up later, and lie anywhere in memory."""
    logits = noise(1, 4, 256).to(device)
    logits[0, 3] = -torch.full((256,), math.nan)  # with a sign, as a CPU makes it
    broken = logits.clone()
    broken[0, 0], broken[0, 1, 77] = -math.inf, math.nan
    tokens = torch.zeros(256, 4, dtype=torch.int32, device=device)
    masses = torch.zeros(256, 4, dtype=torch.float16, device=device)
    there, marks = torch.tensor([[3, 7, 9, 2]]).to(device), torch.full((1, 4), REJECTED, device=device)
    for probs in (logits, broken):
        kernels.learn_marked(tokens, masses, there, probs, marks, rate=0.5, tiles=kernels.Tiling(*tile))
    assert not tokens[[3, 7, 2]].any()
    assert not masses[[3, 7, 2]].any()
    assert (masses[9] > 0).all()


@interpreted
@pytest.mark.filterwarnings("ignore:invalid value encountered", "ignore:All-NaN slice")
@pytest.mark.parametrize("tile", [(1, 2), (2, 2)])
def test_a_broken_law_empties_its_row_and_no_other(tile: tuple[int, int]) -> None:
    assert_a_broken_law_empties_its_row_and_no_other(tile)


def assert_padding_alone_changes_nothing(device: str = "cpu") -> None:
    tokens = torch.arange(24, dtype=torch.int32, device=device).view(8, 3) % 8
    masses = torch.full((8, 3), 0.25, dtype=torch.float16, device=device)
    before = tokens.clone(), masses.clone()
    logits = torch.full((2, 3, 8), torch.nan, device=device)
    there = torch.full((2, 3), -5, dtype=torch.int32, device=device)
    kernels.learn_marked(tokens, masses, there, logits, torch.full_like(there, PADDING), rate=0.5)
    assert torch.equal(tokens, before[0])
    assert torch.equal(masses, before[1])


@interpreted
def test_padding_alone_changes_nothing() -> None:
    """Caught here: a first node that is taken for a real one."""
    assert_padding_alone_changes_nothing()


@interpreted
@pytest.mark.parametrize("k", [1, 5, 8, 16])
@pytest.mark.parametrize("vocabulary", [16, 63, 4096, 49_152, 50_257, 151_936, 262_144])
@pytest.mark.parametrize("rows", [1, 96, 128, 1536, 8192])
def test_a_tiling_covers_a_vocabulary_and_fills_the_device(rows: int, vocabulary: int, k: int) -> None:
    tiles = kernels.tiling(rows, vocabulary, k)
    parts = -(-vocabulary // tiles.tokens)
    assert k <= tiles.tokens // tiles.blocks // kernels.GROUP.value  # or the k best share groups
    assert 1 <= tiles.blocks <= 8
    assert tiles.tokens < 2 * vocabulary + 64 * k  # a program is not mostly padding
    if vocabulary >= 49_152:
        assert tiles.lanes == 128
        assert parts * rows >= 132 or tiles.blocks == 1
    fewest = -(-vocabulary // (8 * tiles.tokens // tiles.blocks))
    assert rows * parts <= 528 or parts <= fewest


# Looking up

SHAPES = {
    "recycling-80": Ranks("recycling-80").shape,
    "sequoia-24": Ranks("sequoia-24").shape,
    "a chain": chain_topology(12),
    "a root": chain_topology(1),
    "150 nodes": topology((-1, *[node // 3 for node in range(149)])),
}


def test_ways_lead_to_their_nodes() -> None:
    shape = topology((-1, 0, 0, 1, 2, 2, 5))
    assert ways(shape) == [[-1] * 3, [0, -1, -1], [1, -1, -1], [0, 0, -1], [1, 0, -1], [1, 1, -1], [1, 1, 0]]
    assert ways(chain_topology(1)) == [[]]


def assert_walks_like_the_plain_one(shape: Topology, width: int, device: str = "cpu") -> None:
    generator = torch.Generator().manual_seed(len(shape))
    table = torch.randint(0, 60, (60, width), dtype=torch.int32, generator=generator).to(device)
    table[::7] = 0  # nothing is known after these
    roots = torch.tensor([3, 59, 0, 14], dtype=torch.int32).to(device)
    there = torch.tensor(ways(shape), dtype=torch.int32).to(device)
    found = kernels.walk(table, there, roots)
    assert found.dtype == torch.int64
    assert torch.equal(found, device_twins.walk(table, there, roots))
    among_others = torch.stack([roots + 1, roots], dim=1).long()[:, 1]  # as in the rows of verdicts
    assert torch.equal(found, kernels.walk(table, there, among_others))


@interpreted
@pytest.mark.parametrize("width", [8, 11])
@pytest.mark.parametrize("name", SHAPES)
def test_a_tree_is_that_of_the_plain_look_up(name: str, width: int) -> None:
    """Caught here: a level too few, a rank of another node, and nodes beyond those of one program."""
    assert_walks_like_the_plain_one(SHAPES[name], width)


# The drafter


class ByKernels(OnDevice):
    """As on a device that has kernels, with a table on the host."""

    @property
    def _kernels(self) -> Any:
        return kernels


@interpreted
def test_a_drafter_learns_and_drafts_by_kernels_what_a_dictionary_holds() -> None:
    """Caught here: a drafter that learns by one version and looks up by another, or that learns a prompt by neither."""
    drafter, plain, slow = (
        ByKernels(k=3, tree=Ranks("fork")),
        bound(k=3, tree=Ranks("fork"), kind=OnDevice),
        Slow(3, 0.5),
    )
    drafter.bind(ToyTarget(VOCABULARY, slots=4).info)
    start = noise(4, VOCABULARY, seed=9)
    for one in (drafter, plain):
        one.start(SequenceState([1, 2, 5, 8, 0]), Prefill(start))
    for token, probs in zip((1, 2, 5, 8), start, strict=True):
        slow.learn(token, probs)
    for seed in range(2):
        sequences, trees, scored, verdicts = scene(seed, nodes=7)
        for one in (drafter, plain):
            one._drafted = trees
            teach(one, sequences, scored, verdicts)
        last: dict[int, Tensor] = {}
        for accepted in (False, True):
            for text, (tree, verdict) in enumerate(zip(trees, verdicts, strict=True)):
                for node in verdict.path if accepted else set(range(len(tree))) - set(verdict.path):
                    last[int(tree.tokens[node])] = scored.logits[text, node]
        for token, probs in last.items():
            slow.learn(token, probs)
        drafts = [one.draft(sequences, [AMPLE] * 2) for one in (drafter, plain)]
        for mine, other in zip(*drafts, strict=True):
            assert mine.parents == other.parents
            assert mine.tokens.tolist() == other.tokens.tolist()
    assert_holds(drafter.table, slow)
    assert drafter._learning._options["learner"] is kernels.learn_marked
    assert drafter._lookup._function is kernels.walk


def test_a_table_is_on_the_device_if_there_are_kernels_for_it(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("branchwise.draft.recycle.drafter.have_kernels", lambda device: device.type == "meta")
    monkeypatch.setattr(Recycle, "_kernels", device_twins)

    def taken(device: str = "meta", k: int = 8, tree: Any = None, **options: bool) -> bool:
        execution = Execution(**{"kernels": True, "graphs": True, "compile": True, **options})
        drafter = Recycle(k=k, tree=tree or Ranks())
        drafter.bind(replace(ToyTarget(40).info, device=torch.device(device), execution=execution))
        assert drafter.table.tokens.device.type == (device if drafter.on_device else "cpu")
        return drafter.on_device

    assert taken()
    assert taken(kernels=True)
    assert taken(k=MOST_WIDTH)
    assert not taken(k=MOST_WIDTH + 1)
    assert not taken(kernels=False)
    assert not taken("cpu")
    assert not taken(tree=TopK(8))


# The interpreter takes much that the compiler does not.


@interpreted
def test_the_kernels_compile_for_a_hopper_gpu(tmp_path: Path) -> None:
    found = compiled_by("tests.test_recycle_kernels", tmp_path)
    assert found == ["_peaks", "_average", "_peaks", "_average", "_walk", "_walk"]


def compile_all() -> None:
    """Call every launcher with kernels that are compiled and not run."""
    for name in ("_peaks", "_average", "_walk"):
        setattr(kernels, name, Compiled(getattr(kernels, name)))
    for dtype, numbers, vocabulary, k in (
        (torch.bfloat16, torch.int32, 49_152, 8),
        (torch.float32, torch.int64, 50_257, 5),
    ):
        tokens = torch.zeros(2, 3, dtype=numbers)
        table = torch.zeros(vocabulary, k, dtype=torch.int32)
        logits = torch.zeros(2, 3, vocabulary, dtype=dtype)
        kernels.learn_marked(table, table.half(), tokens, logits, tokens, rate=0.5)
    ranks = torch.zeros(81, 6, dtype=torch.int32)
    for roots in (torch.zeros(4, dtype=torch.int32), torch.zeros(4, 9, dtype=torch.int64)[:, 3]):
        kernels.walk(table, ranks, roots)
