"""Kernels against the plain attention, case by case, in Triton's interpreter; `tests/gpu` has the same on a device."""

from __future__ import annotations

import itertools
import random
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from branchwise.backends.transformers.attention import attend, tree_mask
from branchwise.core.rows import pack_bits
from tests.hopper import Compiled, as_on_hopper, compiled_by, interpreted

try:
    from branchwise.cuda import kernels
except ImportError:
    kernels = None  # type: ignore[assignment]

pytestmark = pytest.mark.usefixtures("interpreter")


@dataclass(frozen=True)
class Case:
    """One pass over a store that holds NaN wherever the pass has nothing to look for."""

    catches: str
    """the bug that this case would show"""
    lengths: tuple[int, ...]
    nodes: int
    heads: tuple[int, int] = (4, 2)
    """of queries and of keys"""
    width: int = 16
    value_width: int = 0
    """0: as the keys"""
    before: int = 0
    """rows of the tree that earlier passes wrote"""
    spare: int = 0
    """rows behind the tree that nobody sees and nobody wrote, as in a captured pass with room for more"""
    padding: int = 0
    """texts without a slot, at the end of the batch"""
    window: int | None = None
    softcap: float | None = None
    splits: int | None = 1
    tile: tuple[int, int] = (16, 16)
    """rows and keys of a block"""
    full: bool = False
    """the store ends with the tree of the longest text, without its spare rows"""
    transposed: bool = True
    """the query comes as a model makes it, nodes before heads"""

    @property
    def columns(self) -> int:
        return self.before + self.nodes + self.spare

    @property
    def capacity(self) -> int:
        return max(self.lengths) + self.columns + (-self.spare if self.full else 3)

    def tiles(self) -> kernels.Tiling:
        rows, keys = self.tile
        return kernels.Tiling(rows, keys, splits=self.splits or 1, warps=4, stages=2)


CASES = [
    Case("a root alone behind nothing: the softmax over one key divides by zero or reads the prefix", (0,), 1),
    Case("a tree behind nothing: the first block is taken for one of the prefix", (0,), 7),
    Case("one committed row: a prefix shorter than a block is skipped or seen whole", (1,), 5),
    Case("a prefix of exactly one block: the tree's first row is seen without a bit", (16,), 6),
    Case("a prefix of a block and one row: the last committed row is looked up among the bits", (17,), 6),
    Case("texts of different lengths in one batch: one length serves all", (40, 0, 16, 3), 5),
    Case("more rows than a tile holds: the second tile repeats the nodes of the first", (21,), 19),
    Case("nine heads over three: rows and heads are packed in another order than unpacked", (21,), 7, heads=(9, 3)),
    Case("32 heads over 8: the head of the keys is that of the query", (18,), 3, heads=(32, 8), splits=2),
    Case("as many heads of keys as of queries: a group of one", (18,), 5, heads=(8, 8)),
    Case("one head of keys for all: the stride over key heads is used for the text", (18, 5), 3, heads=(16, 1)),
    Case("head width 64 at blocks of its own: strides of a row and of a block are swapped", (33,), 4, width=64),
    Case("head width 80, padded: elements behind a row are taken in", (33,), 4, heads=(2, 1), width=80),
    Case("head width 96 with values of 64: the output has the keys' width", (9,), 4, (3, 1), 96, value_width=64),
    Case("values wider than keys: elements behind the keys' width are cut off", (9,), 4, (3, 1), 32, value_width=80),
    Case("head width 128 on a tile of 32 rows", (50,), 9, heads=(8, 2), width=128, tile=(32, 32)),
    Case("head width 256 with a cap and a window, as in Gemma 2", (30,), 4, (2, 1), 256, window=9, softcap=5.0),
    Case("a node in the second word: the word index is dropped", (7,), 40, heads=(2, 2)),
    Case("words 1 to 4: the sign bit of a word spills into its neighbours", (2,), 128, (1, 1), tile=(64, 32)),
    Case("nine words, few nodes: a growing tree's earlier rows are masked as nodes of this pass", (11,), 5, before=280),
    Case("earlier rows, split: a split takes another text's tree", (11, 70), 5, before=30, splits=4),
    Case("rows that nobody sees behind the tree: what overflowed in them is weighed by zero", (11,), 5, spare=60),
    Case("a store that ends inside the spare rows: rows of nobody are read", (11, 4), 5, spare=60, full=True),
    Case("a store that ends there, split: the last share is not cut", (11,), 5, spare=60, full=True, splits=4),
    Case("two splits: the sums of the parts are not rescaled by their maxima", (90,), 6, splits=2),
    Case("eight splits over uneven blocks: the last blocks belong to nobody", (100, 37), 6, splits=8),
    Case("more splits than blocks: an empty part counts, or its unwritten values do", (5, 0), 3, splits=8),
    Case("splits that are no power of two: the padding of the merge counts", (75,), 3, splits=3),
    Case("splits of a padded value width: the merge reads the next row", (75,), 3, (2, 1), 16, 24, splits=4),
    Case("a tree over two shares: a bit is counted from the start of a share", (20,), 33, splits=2),
    Case("padding in a batch: a text without a slot reads before the store", (20, 3), 4, padding=2),
    Case("padding in a batch, split: parts of nobody are merged", (20, 3), 4, padding=1, splits=4),
    Case("nothing but padding beside an empty text", (0,), 1, padding=3, splits=2),
    Case("a window inside the prefix: off by one at its far end", (50,), 6, window=20),
    Case("a window of one: a node sees its parent, or not itself", (10,), 6, window=1),
    Case("a window that ends in the tree: a node's row is taken for its depth", (10,), 30, window=3),
    Case("a window that only deep nodes have left: the first block follows the deepest", (40,), 30, window=8),
    Case("a window longer than the text: the first block is negative", (13, 2), 5, window=500),
    Case("a window, split: shares are taken from keys that nobody sees", (200, 9), 5, window=40, splits=4),
    Case("a window, earlier rows: depths of the pass are read for the tree's", (30, 4), 5, before=40, window=4),
    Case("a soft cap: applied after the base changes, or to the mask", (30,), 6, softcap=2.0),
    Case("a soft cap with scores far above it: the power overflows", (30,), 6, softcap=0.05, splits=2),
    Case("a query whose heads come before its nodes: strides are assumed", (30, 8), 6, (6, 2), transposed=False),
    Case("tiles of 128 rows, blocks of 64 keys", (130,), 22, (12, 2), splits=2, tile=(128, 64)),
]  # fmt: skip


@dataclass
class Pass:
    """The arguments of a case."""

    query: Tensor
    keys: Tensor
    values: Tensor
    slots: Tensor
    lengths: Tensor
    depths: Tensor
    key_depths: Tensor
    ancestors: Tensor
    options: dict[str, Any] = field(default_factory=dict)

    def run(self, **more: Any) -> Tensor:
        seen = pack_bits(self.ancestors)
        arguments = (self.query, self.keys, self.values, self.slots, self.lengths, self.depths, self.key_depths, seen)
        return kernels.tree_attention(*arguments, **self.options, **more)

    def truth(self) -> Tensor:
        """Text by text in float64, by the plain attention over the rows of its slot; zeros for padding."""
        batch, heads, nodes, _ = self.query.shape
        expected = self.query.new_zeros(batch, nodes, heads, self.values.shape[3], dtype=torch.float64)
        for text, (slot, length) in enumerate(zip(self.slots.tolist(), self.lengths.tolist(), strict=True)):
            if slot < 0:
                continue
            columns = int(self.ancestors[text].any(dim=0).nonzero().max()) + 1
            one = slice(text, text + 1)
            mask = tree_mask(
                self.lengths[one].long(),
                self.depths[one].long(),
                self.ancestors[one, :, :columns],
                length + columns,
                self.options["window"],
                torch.float64,
                self.key_depths[one, :columns].long(),
            )
            key, value = (it[slot, :, : length + columns][None].double() for it in (self.keys, self.values))
            found = attend(
                self.query[one].double(),
                key,
                value,
                mask,
                causal=False,
                scale=self.options["scale"],
                softcap=self.options["softcap"],
            )
            expected[text] = found[0].transpose(0, 1)
        return expected


def random_forest(texts: int, rows: int, rng: random.Random) -> tuple[Tensor, Tensor]:
    """(texts, rows) depths and (texts, rows, rows) ancestors of trees.

    One in four nodes is a child of the last, so that trees are deep; one in ten is padding, which sees only itself.
    """
    depths = torch.zeros(texts, rows, dtype=torch.int32)
    ancestors = torch.eye(rows, dtype=torch.bool).repeat(texts, 1, 1)
    for text, node in itertools.product(range(texts), range(1, rows)):
        if rng.random() < 0.1:
            continue
        parent = node - 1 if rng.random() < 0.25 else rng.randrange(node)
        depths[text, node] = depths[text, parent] + 1
        ancestors[text, node] |= ancestors[text, parent]
    return depths, ancestors


def surrounded(shape: tuple[int, ...], dtype: torch.dtype) -> Tensor:
    """NaN with NaN around it: another slot before and behind, and further rows."""
    slots, heads, rows, width = shape
    return torch.full((slots + 2, heads, rows + 5, width), torch.nan, dtype=dtype)[1:-1, :, :rows]


def prepare(case: Case, dtype: torch.dtype, device: str = "cpu") -> Pass:
    rng, generator = random.Random(case.catches), torch.Generator().manual_seed(len(case.catches))
    texts, batch = len(case.lengths), len(case.lengths) + case.padding
    heads, kv_heads = case.heads
    written = case.before + case.nodes
    all_depths, all_ancestors = random_forest(batch, written, rng)
    ancestors = torch.nn.functional.pad(all_ancestors[:, case.before :], (0, case.spare))
    key_depths = torch.nn.functional.pad(all_depths, (0, case.spare))
    slots = torch.tensor([*rng.sample(range(texts + 2), texts), *[-1] * case.padding], dtype=torch.int32)
    lengths = torch.tensor([*case.lengths, *[7] * case.padding], dtype=torch.int32)

    def rows(width: int) -> Tensor:
        store = surrounded((texts + 2, kv_heads, case.capacity, width), dtype)
        for slot, length in zip(slots.tolist(), case.lengths, strict=False):
            part = store[slot, :, : length + written]
            part.copy_(torch.randn(part.shape, generator=generator))
        return store

    keys, values = rows(case.width), rows(case.value_width or case.width)
    query = 2 * torch.randn(batch, case.nodes, heads, case.width, generator=generator).to(dtype)
    query = query.transpose(1, 2) if case.transposed else query.transpose(1, 2).contiguous()
    tensors = (query, keys, values, slots, lengths, all_depths[:, case.before :].contiguous(), key_depths, ancestors)
    options = {"scale": case.width**-0.5, "softcap": case.softcap, "window": case.window, "splits": case.splits}
    if device != "cpu":  # a copy of a view would lose what lies around it
        views = [it._base.to(device)[1:-1, :, : case.capacity] for it in (keys, values)]  # type: ignore[union-attr]
        moved = [it.to(device) for it in (query, *tensors[3:])]
        tensors = (moved[0], *views, *moved[1:])  # type: ignore[assignment]
    return Pass(*tensors, options)


ERROR = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1.5e-2}
"""the most that an element may be off, as a part of the largest"""


def assert_equals_truth(given: Pass, **more: Any) -> None:
    found, expected = given.run(**more), given.truth()
    assert found.is_contiguous()
    assert found.dtype == given.query.dtype
    assert found.shape == expected.shape
    error = ((found.double() - expected).abs().max() / expected.abs().max()).item()
    assert error < ERROR[found.dtype], error  # NaN is not


@interpreted
@pytest.mark.parametrize("case", CASES, ids=lambda case: case.catches)
def test_tree_attention_equals_the_plain_one(case: Case) -> None:
    assert_equals_truth(prepare(case, torch.float32), tiles=case.tiles())


@interpreted
@pytest.mark.parametrize("splits", [1, 4])
def test_a_node_that_sees_nothing_finds_zeros(splits: int) -> None:
    """So are nodes that fill up a pass. Of a text without a committed row they see nothing at all."""
    case = Case("", (0, 20), 5, splits=splits)
    given = prepare(case, torch.float32)
    given.ancestors[:, 3:] = False
    found = given.run(tiles=case.tiles())
    assert not found[0, 3:].any()
    assert found.isfinite().all()


@interpreted
@pytest.mark.parametrize("splits", [1, 2, 4])
def test_an_overflow_in_the_text_is_not_hidden(splits: int) -> None:
    case = Case("", (50, 20), 5, splits=splits)
    given = prepare(case, torch.float32)
    given.keys[given.slots[0], 0, 33] = torch.nan
    found = given.run(tiles=case.tiles())
    assert found[0, :, :2].isnan().all()
    assert found[0, :, 2:].isfinite().all()
    assert found[1].isfinite().all()


@interpreted
@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
@pytest.mark.parametrize("case", [case for case in CASES if case.catches.startswith(("texts of", "a window, s"))])
def test_tree_attention_in_low_precision(case: Case, dtype: torch.dtype) -> None:
    assert_equals_truth(prepare(case, dtype), tiles=case.tiles())


@interpreted
def test_the_chosen_tiling_finds_the_same() -> None:
    assert_equals_truth(prepare(Case("", (300, 20), 6, splits=None), torch.float32))


@interpreted
@pytest.mark.parametrize("size", [2, 4])
@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("nodes", [1, 8, 64, 128])
@pytest.mark.parametrize("keys", [2048, 32000])
@pytest.mark.parametrize(("batch", "heads", "group"), [(1, 3, 3), (1, 8, 4), (8, 3, 3), (64, 8, 4)])
def test_a_tiling_fills_the_device_and_no_more(
    batch: int, heads: int, group: int, nodes: int, width: int, size: int, keys: int
) -> None:
    rows = nodes * group
    found = kernels.tiling(batch=batch, heads=heads, rows=rows, keys=keys, width=width, size=size)
    tiles = batch * heads * -(-rows // found.rows)
    assert found.rows in (16, 32, 64, 128)
    assert found.rows < 2 * rows or found.rows == 16  # a tile is not mostly padding
    assert tiles * found.splits > 66 or found.splits == keys // (2 * found.keys)
    assert found.splits == 1 or tiles * found.splits <= 1.1 * 264
    assert found.stages * found.keys * 2 * width * size + found.rows * (width + found.keys) * size < 227 * 1024


@interpreted
@pytest.mark.parametrize("shared", [65_536, 101_376])
@pytest.mark.parametrize("width", [64, 128, 256])
@pytest.mark.parametrize("rows", [4, 64, 512])
def test_a_tiling_fits_a_smaller_device(rows: int, width: int, shared: int) -> None:
    """Wide heads with large trees would stop in the middle of a text: loading tries small trees alone."""
    found = kernels.tiling(batch=1, heads=8, rows=rows, keys=4000, width=width, size=2, shared=shared)
    blocks = 2 * (found.stages - 1) * found.keys * width
    assert 2 * (found.rows * width + blocks + found.rows * found.keys) <= shared
    assert min(found.rows, found.keys) >= 16


@interpreted
def test_a_short_store_is_not_split_into_less_than_two_blocks() -> None:
    found = kernels.tiling(batch=1, heads=3, rows=3, keys=300, width=64, size=2)
    assert found.splits == 2


def test_bits_stand_in_order_and_the_last_is_the_sign() -> None:
    ancestors = torch.zeros(1, 3, 70, dtype=torch.bool)
    ancestors[0, 0, [0, 33, 69]] = True
    ancestors[0, 1, 31] = True
    ancestors[0, 2, :64] = True
    assert pack_bits(ancestors).tolist() == [[[1, 2, 32], [-(2**31), 0, 0], [-1, -1, 0]]]
    assert pack_bits(ancestors).dtype == torch.int32


@interpreted
@pytest.mark.parametrize("nodes", [1, 5, 16, 21])
def test_written_rows_lie_where_their_text_starts(nodes: int) -> None:
    assert_rows_are_written(nodes)


def assert_rows_are_written(nodes: int, dtype: torch.dtype = torch.float32, device: str = "cpu") -> None:
    """Values are narrower than keys, the third text has no slot, and the last reaches the end of the store."""
    capacity = 40
    keys, values = (torch.randn(4, 3, capacity + 2, width, device=device).to(dtype) for width in (24, 16))
    new_keys, new_values = (torch.randn(4, nodes, 3, width, device=device).to(dtype) for width in (24, 16))
    slots, starts = [2, 0, -1, 3], [0, 7, 5, capacity - 4]
    expected = keys.clone(), values.clone()
    for text, (slot, start) in enumerate(zip(slots, starts, strict=True)):
        for store, new in zip(expected, (new_keys, new_values), strict=True):
            kept = min(nodes, capacity - start)
            if slot >= 0:
                store[slot, :, start : start + kept] = new[text, :kept].transpose(0, 1)
    kernels.write_rows(
        keys[:, :, :capacity],
        values[:, :, :capacity],
        new_keys.transpose(1, 2),
        new_values.transpose(1, 2),
        torch.tensor(slots, dtype=torch.int32, device=device),
        torch.tensor(starts, dtype=torch.int32, device=device),
    )
    assert torch.equal(keys, expected[0])
    assert torch.equal(values, expected[1])


PATHS = {
    "a path that is in place already": (0, 1, 2, 3),
    "goals that are sources of later steps": (0, 2, 3, 4, 5, 6),
    "goals that are sources, and gaps": (0, 1, 3, 4, 7, 8, 30),
    "the root alone": (0,),
    "far apart": (0, 9, 20, 31),
    "nothing": (),
}


@interpreted
def test_kept_rows_move_to_the_front_of_their_tree() -> None:
    assert_rows_are_kept()


def assert_rows_are_kept(width: int = 24, dtype: torch.dtype = torch.float32, device: str = "cpu") -> None:
    """All paths in one batch, in slots of their own, and one in a text without a slot."""
    layers, heads, capacity, steps = 3, 2, 50, 9
    tensor = torch.randn(layers, len(PATHS) + 2, heads, capacity, width, device=device).to(dtype)
    slots = [4, 1, 0, 5, 2, 7, -1]
    lengths = [0, 3, 19, 5, 1, 2, 4]
    paths = [*PATHS.values(), (0, 3)]
    expected = tensor.clone()
    for slot, length, path in zip(slots, lengths, paths, strict=True):
        if slot >= 0:
            for goal, node in enumerate(path):
                expected[:, slot, :, length + goal] = tensor[:, slot, :, length + node]
    padded = torch.tensor([[*path, *[-1] * (steps - len(path))] for path in paths], dtype=torch.int32, device=device)
    numbers = (torch.tensor(it, dtype=torch.int32, device=device) for it in (slots, lengths))
    kernels.keep_rows(tensor, *numbers, padded)
    assert torch.equal(tensor, expected)


@interpreted
def test_wide_rows_move_in_blocks() -> None:
    assert_rows_are_kept(width=600)


# The interpreter takes much that the compiler does not.


@interpreted
def test_the_kernels_compile_for_a_hopper_gpu(tmp_path: Path) -> None:
    assert compiled_by("tests.test_attention", tmp_path) == ["_attend", "_merge", "_attend", "_write", "_keep"]


def compile_all() -> None:
    """Call every launcher with kernels that are compiled and not run."""
    for name in ("_attend", "_merge", "_write", "_keep"):
        setattr(kernels, name, Compiled(getattr(kernels, name)))
    vars(kernels)["early"] = as_on_hopper
    for case in (
        Case("", (9,), 3, (9, 3), 64, splits=2, tile=(16, 64)),
        Case("", (9,), 22, (3, 1), 80, 64, window=5, softcap=3.0, tile=(64, 64)),
    ):
        prepare(case, torch.bfloat16).run(tiles=case.tiles())
    keys = torch.zeros(2, 3, 16, 64, dtype=torch.bfloat16)
    one = torch.zeros(1, dtype=torch.int32)
    kernels.write_rows(keys, keys, keys[:1, :, :4], keys[:1, :, :4], one, one)
    kernels.keep_rows(keys[None], one, one, torch.zeros(1, 5, dtype=torch.int32))
