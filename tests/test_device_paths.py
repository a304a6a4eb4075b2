"""Paths drawn over a table on a device: the trees of the host, the same from the kernel, and the target's
distribution."""

from __future__ import annotations

import random
from dataclasses import replace
from pathlib import Path

import pytest
import torch
from torch import Tensor

from branchwise.backends.base import Execution
from branchwise.core.sampling import SamplingParams
from branchwise.core.sequence import SequenceState
from branchwise.core.tree import DraftTree
from branchwise.draft import build_policy
from branchwise.draft.base import Budget
from branchwise.draft.policies.paths import Paths
from branchwise.draft.recycle.adjacency import MOST_PATHS, DevicePaths
from branchwise.draft.recycle.drafter import Recycle
from branchwise.testing import ToyTarget
from branchwise.verify import VERIFIERS
from tests import device_twins
from tests.conformance.test_drafters import assert_writes_like_plain_decoding
from tests.device_twins import OnDevice, draw_paths
from tests.hopper import Compiled, compiled_by
from tests.test_lookup import assert_first_tokens_have_the_law

SPECS = ["chain:1", "chain:6", "paths:4x6", "paths:3x2", "paths:5x4@2", "paths:2x3@1"]
VOCABULARY = 700
"""three blocks of a race"""


def table_of(seed: int, width: int, vocabulary: int = VOCABULARY) -> dict[str, Tensor]:
    """What may have been learned: rows with few or many successors, some of which follow nearly everything; a third of
    all rows is empty."""
    generator = torch.Generator().manual_seed(seed)
    order = torch.rand(vocabulary, vocabulary, generator=generator)
    order[:, :: vocabulary // 5] += 0.5
    masses = torch.rand(vocabulary, width, generator=generator) ** 3 / width
    masses[torch.rand(vocabulary, width, generator=generator) < 0.3] = 0
    masses[torch.rand(vocabulary, generator=generator) < 0.3] = 0
    masses = masses.half().sort(dim=1, descending=True).values
    tokens = torch.where(masses > 0, order.topk(width, dim=1).indices, 0)
    return {"tokens": tokens.int(), "masses": masses}


def both(spec: str, width: int) -> tuple[Recycle, OnDevice]:
    """The same growth on the host and as on a device."""
    here, there = (kind(k=width, tree=build_policy(spec)) for kind in (Recycle, OnDevice))
    for drafter in (here, there):
        drafter.bind(ToyTarget(VOCABULARY).info)
    return here, there


def texts(rng: random.Random, count: int) -> list[SequenceState]:
    found = []
    for _ in range(count):
        tokens = [rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 30))]
        temperature = rng.choice([0.0, 0.7, 1.0])
        found.append(SequenceState(tokens, SamplingParams(temperature, seed=rng.getrandbits(63))))
    return found


def assert_same(one: DraftTree, other: DraftTree) -> None:
    assert one.tokens.tolist() == other.tokens.tolist()
    assert (one.parents, one.draw, one.leaves) == (other.parents, other.draw, other.leaves)
    assert (one.q is None) == (other.q is None)
    assert one.q is None or other.q is None or torch.equal(one.q, other.q)


@pytest.mark.parametrize("width", [1, 3, 8])
@pytest.mark.parametrize("spec", SPECS)
def test_trees_drawn_on_a_device_are_those_of_the_host(spec: str, width: int) -> None:
    rng, (here, there) = random.Random(spec), both(spec, width)
    sizes = set()
    for turn in range(12):
        for drafter in (here, there):
            drafter.restore(table_of(turn, width))
        sequences = texts(rng, rng.choice([1, 2, 3, 5, 8]))
        few = [Budget(64, 64), Budget(64, 2), Budget(64, 0), Budget(1, 9), Budget(7, 9), Budget(12, 3), Budget(64, -1)]
        budgets = [rng.choice(few) for _ in sequences]
        drawn = there.draft(sequences, budgets)
        for one, other in zip(drawn, here.draft(sequences, budgets), strict=True):
            assert_same(one, other)
            sizes.add(len(one))
        assert there._drafted is drawn
    assert min(sizes) == 1, "no row was empty"
    assert max(sizes) > build_policy(spec).length  # type: ignore[attr-defined]


def test_the_same_token_may_lead_every_path() -> None:
    """Caught here: a place that is empty, which says token 0 of mass 0, wiping out what is known of token 0."""
    here, there = both("paths:3x3", 4)
    tokens, masses = torch.zeros(VOCABULARY, 4, dtype=torch.int32), torch.zeros(VOCABULARY, 4, dtype=torch.float16)
    masses[5, 0] = masses[0, 0] = 0.5
    for drafter in (here, there):
        drafter.restore({"tokens": tokens, "masses": masses})
    text = SequenceState([5], SamplingParams(1.0, seed=1))
    [one], [other] = (drafter.draft([text], [Budget(64, 9)]) for drafter in (there, here))
    assert_same(one, other)
    assert one.tokens.tolist() == [5, 0, 0, 0]
    assert one.q is not None
    assert one.q[:, 0].tolist() == [1, 1, 1]


@pytest.mark.usefixtures("interpreter")
@pytest.mark.parametrize(("count", "length", "common"), [(1, 1, 0), (1, 6, 0), (4, 6, 0), (3, 2, 0), (5, 4, 2)])
def test_the_kernel_draws_the_same(count: int, length: int, common: int) -> None:
    """Padding of a block included: three and five paths, three successors."""
    pytest.importorskip("triton", reason="needs Triton's interpreter")
    from branchwise.draft.recycle import paths_kernel

    rng, drafted = random.Random(count), 0
    for turn, width in enumerate([1, 3, 8]):
        table = table_of(turn, width)
        told = torch.tensor(
            [[text.root, text.rng_seed, len(text.tokens) - 1, text.sampling.temperature == 0] for text in texts(rng, 6)]
        )
        found = []
        for way in (draw_paths, paths_kernel.draw_paths):
            q = torch.full((6, count * (length - 1) + 1, VOCABULARY), 7.0)  # what an earlier step left
            rows = way(table["tokens"], table["masses"], told, q, count=count, length=length, common=common)
            found.append((rows, q))
        assert torch.equal(found[0][0], found[1][0])
        assert torch.equal(found[0][1], found[1][1])
        drafted += int((found[0][0] >= 0).any(dim=(1, 2, 3)).sum())
    assert 0 < drafted < 18


def test_no_more_is_drawn_than_a_pass_may_score() -> None:
    drawing = DevicePaths(Paths("4x60"), *table_of(0, 3).values(), ToyTarget(VOCABULARY, max_nodes=33).info, draw_paths)
    assert drawing._q.shape[1:] == (29, VOCABULARY)
    text = SequenceState([next(token for token in range(9) if table_of(0, 3)["masses"][token, 0] > 0)])
    [tree] = drawing([text], [Budget(33, 99)])
    assert tree.depth == 8


def test_another_target_may_score_more() -> None:
    drafter = OnDevice(tree=build_policy("chain:20"))
    text = SequenceState([4], SamplingParams(1.0, seed=2))
    for nodes in (8, 32):
        drafter.bind(ToyTarget(VOCABULARY, max_nodes=nodes).info)
        drafter.table.masses[:, 0] = 1
        [tree] = drafter.draft([text], [Budget(nodes, 99)])
        assert tree.depth == min(nodes - 1, 20)


@pytest.mark.parametrize(
    ("spec", "there"),
    [
        *((spec, True) for spec in ("chain:4", "paths:3x3", "paths:3x3@1", "ranks:recycling-80")),
        *(
            (spec, False)
            for spec in ("chain:4,stop=confidence:0.4", "topk:8", "rsd-c:2,2", f"paths:{MOST_PATHS + 1}x2")
        ),
    ],
)
@pytest.mark.parametrize("kernels", [True, False])
def test_paths_are_drawn_where_the_target_is_if_there_are_kernels(
    spec: str, there: bool, kernels: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("branchwise.draft.recycle.drafter.have_kernels", lambda device: kernels)
    monkeypatch.setattr(Recycle, "_kernels", device_twins)
    drafter = Recycle(tree=build_policy(spec))
    some = torch.device("meta")
    drafter.bind(replace(ToyTarget(VOCABULARY).info, device=some, execution=Execution(kernels=True)))
    assert drafter.on_device == (there and kernels)
    assert drafter.table.tokens.device.type == ("meta" if there and kernels else "cpu")


# Texts


@pytest.mark.parametrize("spec", ["chain:4", "paths:3x3"])
def test_the_text_is_that_of_plain_decoding(spec: str) -> None:
    assert_writes_like_plain_decoding(lambda _: OnDevice(tree=build_policy(spec)), VERIFIERS.build("match"))


@pytest.mark.parametrize(
    ("spec", "verify"), [("chain:3", "block"), ("paths:2x2", "cascade"), ("paths:3x2@1", "traversal")]
)
def test_the_first_tokens_have_the_targets_law(spec: str, verify: str) -> None:
    assert_first_tokens_have_the_law(OnDevice(tree=build_policy(spec)), verify)


# The interpreter takes much that the compiler does not.


def test_the_kernel_compiles_for_a_hopper_gpu(tmp_path: Path) -> None:
    pytest.importorskip("triton", reason="needs Triton")
    assert compiled_by("tests.test_device_paths", tmp_path) == ["_draw"] * 2


def compile_all() -> None:
    from branchwise.draft.recycle import paths_kernel

    paths_kernel._draw = Compiled(paths_kernel._draw)
    for count, common, width in ((1, 0, 8), (4, 1, 5)):
        table, numbers = torch.zeros(50, width, dtype=torch.int32), torch.zeros(2, 4, dtype=torch.int64)
        q = torch.zeros(2, 19, 50)
        paths_kernel.draw_paths(table, table.half(), numbers, q, count=count, length=6, common=common)
