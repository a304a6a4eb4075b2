"""The kernels of the attention on a device: the cases of the interpreter, and what only a device can show."""

from __future__ import annotations

import dataclasses

import pytest
import torch

from branchwise.core.rows import pack_bits
from tests.test_attention import (
    CASES,
    Case,
    assert_equals_truth,
    assert_rows_are_kept,
    assert_rows_are_written,
    kernels,
    prepare,
)

pytestmark = pytest.mark.skipif(
    not torch.cuda.is_available() or kernels is None,
    reason="needs Triton" if torch.cuda.is_available() else "needs a CUDA device",
)

DTYPES = [torch.bfloat16, torch.float16, torch.float32]

LARGE = [
    Case("SmolLM2, plain decoding: most of a tile is padding", (1000,), 1, (9, 3), 64),
    Case("SmolLM2, 64 nodes: the last tile of rows is not full", (1000,), 64, (9, 3), 64),
    Case("8B shape, 64 nodes, long: a split takes several blocks in a pipeline", (4000,), 64, (32, 8), 128),
    Case("8B shape, 128 nodes, longer: numbers outgrow what they are counted in", (16000,), 128, (32, 8), 128),
    Case("lengths in a batch: short texts end early", (4000, 1, 0, 777, 2048, 64, 63, 65), 16, (32, 8), 128),
    Case("a batch without splits", (300, 1, 0, 77) * 16, 8, (32, 8), 64),
    Case("Gemma 2: cap, window, width 256 on a full tile", (5000, 300), 40, (8, 4), 256, window=4096, softcap=50.0),
    Case("a short window in a long text: splits share what is there", (9000,), 64, (32, 8), 128, window=128),
    Case("a draft model's tree of 400 rows", (3000, 100), 32, (9, 3), 64, before=368),
    Case("width 80, long: the masked load in a pipeline", (3000,), 20, (32, 32), 80),
    Case("width 192 with values of 128, as in multi-head latent attention", (2000,), 20, (16, 16), 192, 128),
]  # fmt: skip


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float32], ids=str)
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.catches)
def test_tree_attention_equals_the_plain_one(case: Case, dtype: torch.dtype) -> None:
    assert_equals_truth(prepare(case, dtype, "cuda"), tiles=case.tiles())


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("case", LARGE, ids=lambda case: case.catches)
def test_tree_attention_of_real_shapes(case: Case, dtype: torch.dtype) -> None:
    """With the tiling that is chosen for them."""
    assert_equals_truth(prepare(dataclasses.replace(case, splits=None), dtype, "cuda"))


def test_a_captured_pass_follows_lengths_slots_and_trees() -> None:
    """The same graph on another text: the host had no say in lengths, slots or bits."""
    first = prepare(Case("first", (900, 30), 12, (9, 3), 64, splits=None), torch.bfloat16, "cuda")
    seen = pack_bits(first.ancestors)

    def run() -> torch.Tensor:
        arguments = (first.query, first.keys, first.values, first.slots, first.lengths, first.depths, first.key_depths)
        return kernels.tree_attention(*arguments, seen, scale=0.125)

    run()  # compiles
    graph = torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph):
        found = run()
    other = prepare(Case("other", (900,), 12, (9, 3), 64, padding=1, splits=None), torch.bfloat16, "cuda")
    first.keys.fill_(torch.nan)
    first.values.fill_(torch.nan)
    first.keys[: len(other.keys)] = other.keys
    first.values[: len(other.values)] = other.values
    for mine, its in zip(
        (first.query, first.slots, first.lengths, first.depths, first.key_depths, seen),
        (other.query, other.slots, other.lengths, other.depths, other.key_depths, pack_bits(other.ancestors)),
        strict=True,
    ):
        mine.copy_(its)
    graph.replay()
    expected = other.truth()
    assert (found.double() - expected).abs().max() < 1.5e-2 * expected.abs().max()
    assert not found[1].any()


def test_a_text_finds_the_same_bits_alone_and_beside_others() -> None:
    """With the same splits nothing of the neighbours enters."""
    case = Case("", (500, 70, 9), 12, (9, 3), 64, splits=4)
    given = prepare(case, torch.bfloat16, "cuda")
    together = given.run()
    for text in range(3):
        one = slice(text, text + 1)
        alone = dataclasses.replace(
            given,
            query=given.query[one],
            slots=given.slots[one],
            lengths=given.lengths[one],
            depths=given.depths[one],
            key_depths=given.key_depths[one],
            ancestors=given.ancestors[one],
        )
        assert torch.equal(alone.run()[0], together[text])


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("nodes", [1, 5, 16, 21, 128])
def test_written_rows_lie_where_their_text_starts(nodes: int, dtype: torch.dtype) -> None:
    assert_rows_are_written(nodes, dtype, "cuda")


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("width", [24, 64, 128, 600])
def test_kept_rows_move_to_the_front_of_their_tree(width: int, dtype: torch.dtype) -> None:
    for _ in range(20):  # a write that overtakes a read does not do so every time
        assert_rows_are_kept(width, dtype, "cuda")
