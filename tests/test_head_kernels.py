"""A head drafts by a few kernels what it drafts operation by operation."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch
from torch import Tensor

from branchwise.backends.base import CachedRows
from branchwise.draft import build_policy
from branchwise.draft.base import Budget
from branchwise.draft.drawn.drawing import tree_draft_of
from branchwise.draft.head.cache import MOST_EXTRA, HeadCache
from branchwise.draft.head.network import Head, HeadConfig
from branchwise.draft.head.trees.best_first import BestFirstDraft
from branchwise.draft.head.trees.drawn import DrawnHead
from branchwise.draft.policies.topk import TopK
from tests.hopper import ADA, HOPPER, Compiled, Device, as_on_hopper, compiled_by, interpreted

pytestmark = pytest.mark.usefixtures("interpreter")
DEVICE = torch.device("cuda" if torch.cuda.is_available() else "cpu")
VOCABULARY, SLOTS = 90, 5


class Drafts:
    """The same head twice, with a cache each: by kernels, and operation by operation."""

    def __init__(self, shape: str, rng: torch.Generator, *, copies: int = 0, **options: Any) -> None:
        fused = pytest.importorskip("branchwise.draft.head.trees.fused", reason="needs Triton's interpreter")
        sizes = {
            "width": 24,
            "taps": ("a", "b", "c"),
            "heads": 4,
            "kv_heads": 2,
            "head_width": 12,
            "mlp": 40,
            **options,
        }
        width, half = sizes["width"], sizes["head_width"] // 2
        head = Head(HeadConfig(**sizes), 1 / 100 ** (torch.arange(half) / half))
        for weight in head.parameters():
            torch.nn.init.normal_(weight, std=0.3 * (24 / width) ** 0.5, generator=rng)
        head.eval().requires_grad_(False).to(DEVICE)
        embeddings, output = (torch.randn(VOCABULARY, width, generator=rng).to(DEVICE) for _ in range(2))
        table = torch.randperm(VOCABULARY, generator=rng)[:70].to(DEVICE)
        tree = build_policy(shape)
        self.caches = [HeadCache(head.config, SLOTS, DEVICE, torch.float32) for _ in range(2)]
        store = torch.randn(self.caches[0].store.shape, generator=rng)
        foreseen = torch.randn(self.caches[0].foreseen.shape, generator=rng)
        shown = torch.randn(2, SLOTS, sizes["kv_heads"], 90, sizes["head_width"], generator=rng).to(DEVICE)
        cached = (lambda: CachedRows(*shown)) if head.config.cross else None
        states = torch.randn(2, SLOTS + 1, width, generator=rng)
        history = table[:3].cpu()[torch.randint(3, self.caches[0].tokens.shape, generator=rng)]
        rest = torch.tensor(sorted(set(range(VOCABULARY)) - set(table.tolist()))).to(DEVICE)
        for cache in self.caches:
            cache.store.copy_(store)
            cache.tokens.copy_(history)
            cache.predicted.copy_(states[0])
            cache.carried.copy_(states[1] if options.get("carry") else states[0])
            cache.foreseen.copy_(foreseen)
            cache.firsts += torch.arange(SLOTS + 1, device=DEVICE) if head.config.window else 0
            cache.seats.copy_(torch.tensor([3, 0, 4, 1, 2, 0]))
            for slot in range(SLOTS):
                own = rest[slot : slot + 3 * slot]
                cache.extra_tokens[slot, : len(own)], cache.extra_rows[slot, : len(own)] = own, output[own]
            assert cache.extra_tokens.shape[1] == MOST_EXTRA
        parts = embeddings, output, table, None, cached
        kind = fused.FusedDraft if fused.FusedDraft.fits(head.config) else fused.PickedDraft
        self.head, self.parts = head, parts
        self.fused: BestFirstDraft = kind(tree, head, self.caches[0], *parts, copies=copies)
        self.fused._kernels = True
        self.plain = BestFirstDraft(tree, head, self.caches[1], *parts, copies=copies)
        self.plain._kernels = False

    def compare_caches(self) -> None:
        for name in ("store", "predicted", "carried", "foreseen"):
            found, wanted = (getattr(cache, name) for cache in self.caches)
            scratch = SLOTS  # the slot of padding, which nobody reads
            if name == "store":
                found, wanted = found[:, :, :scratch], wanted[:, :, :scratch]
            else:
                found, wanted = found[:scratch], wanted[:scratch]
            torch.testing.assert_close(found, wanted, rtol=1e-4, atol=1e-4)
        found, wanted = (cache.tokens[:SLOTS] for cache in self.caches)
        written = self.written(found)
        assert torch.equal(found[written], wanted[written])

    def written(self, history: torch.Tensor) -> torch.Tensor:
        """Which tokens of the texts count: whatever pads a path is written behind its text, or nowhere."""
        return torch.arange(history.shape[1], device=DEVICE) < self.ends[:, None]

    ends = torch.full((SLOTS,), 60, device=DEVICE)
    """rows of the texts"""


def apart(numbers: torch.Tensor) -> torch.Tensor:
    """As verdicts have them: beside other columns."""
    return torch.stack([numbers - 7, numbers, numbers + 3], dim=1)


WIDE = {"width": 320, "heads": 12, "kv_heads": 2, "head_width": 128, "mlp": 272}
"""heads as wide as Qwen2's, and inputs of more than one piece"""
OPTIONS: list[dict[str, Any]] = [{}, {"carry": True}, {"layers": 2, "carry": True}, {"carry": True, "gate": "full"}]
OTHERS: list[dict[str, Any]] = [{"masks": 2, "bias": 3}, {"window": 6, "cross": "a"}, {"window": 3, "masks": 4}]
"""whose network torch computes"""


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize(
    ("shape", "batch"), [("topk:9,depth=3,width=3", 3), ("topk:40,depth=4,width=4", 1), ("topk:3,depth=1,width=5", 2)]
)
@pytest.mark.parametrize("copies", [0, 2, 9])
def test_trees_are_laid_as_without_kernels(options: dict[str, Any], shape: str, batch: int, copies: int) -> None:
    rng = torch.Generator().manual_seed(batch)
    drafts = Drafts(shape, rng, copies=copies, **options)
    slots = torch.randperm(SLOTS, generator=rng)[:batch].int()
    lengths = torch.randint(1, 60, (batch,), generator=rng).int()
    roots = torch.randint(VOCABULARY, (batch,), generator=rng)
    drawn = [part.to(DEVICE) for part in (slots, lengths, apart(roots))]
    drawn[2] = drawn[2][:, 1]
    found, wanted = (draft.grow(*drawn) for draft in (drafts.fused, drafts.plain))
    for ours, theirs in zip(found, wanted, strict=True):
        assert torch.equal(ours.long(), theirs.long())
    assert copies < 9 or int(found[2].max()) > drafts.plain._grown, "no copy is deeper than what the head drafts"
    drafts.compare_caches()


@pytest.mark.parametrize("options", OTHERS, ids=str)
def test_trees_of_any_form_are_laid_as_without_kernels(options: dict[str, Any]) -> None:
    rng = torch.Generator().manual_seed(4)
    drafts = Drafts("topk:14,depth=4,width=3", rng, **options)
    drawn = [torch.tensor(part, device=DEVICE) for part in ([3, 0], [9, 41], [5, 60])]
    found, wanted = (draft.grow(drawn[0].int(), drawn[1].int(), drawn[2]) for draft in (drafts.fused, drafts.plain))
    for ours, theirs in zip(found, wanted, strict=True):
        assert torch.equal(ours.long(), theirs.long())
    drafts.compare_caches()


@pytest.mark.parametrize("options", OPTIONS, ids=str)
@pytest.mark.parametrize("shape", ["paths:3x3", "template:mcsd", "chain:1"])
@torch.inference_mode()
def test_what_follows_the_nodes_of_drawn_trees_is_the_same_without_kernels(options: dict[str, Any], shape: str) -> None:
    fused = pytest.importorskip("branchwise.draft.head.trees.fused", reason="needs Triton's interpreter")
    rng = torch.Generator().manual_seed(2)
    drafts = Drafts("topk:2,depth=2,width=2", rng, **options)
    make = tree_draft_of(build_policy(shape), VOCABULARY, DEVICE)
    assert make is not None
    draft = make([Budget(64, 64)])
    slots, lengths, roots = (torch.tensor(part, device=DEVICE) for part in ([3, 0, SLOTS], [9, 41, 0], [5, 60, 7]))
    found = []
    for kind, cache, kernels in zip((fused.FusedDrawnHead, DrawnHead), drafts.caches, (True, False), strict=True):
        head = kind(draft, VOCABULARY, drafts.head, cache, *drafts.parts)
        head._kernels = kernels
        noise = torch.Generator().manual_seed(3)
        passes = head.passes(slots, lengths.int(), roots.int())
        said = [passes.roots.logits]
        for number, level in enumerate(draft.levels):
            tokens = torch.randint(VOCABULARY, (3, len(level.above)), generator=noise)
            tokens[0, 0] = -1  # as where a distribution had no more
            said.append(passes.below(tokens.to(DEVICE), number + 1))
        found.append((passes.roots.positions, passes.roots.tokens, *said))
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-4, atol=1e-4)
    assert found[0][2].shape == (3, 1, VOCABULARY)
    assert bool(found[0][2].isinf().any()), "every token is in the table"
    drafts.compare_caches()


def test_wide_heads_draft_as_without_kernels() -> None:
    rng = torch.Generator().manual_seed(3)
    drafts = Drafts("topk:9,depth=3,width=3", rng, carry=True, **WIDE)
    drawn = [torch.tensor(part, device=DEVICE) for part in ([3, 0], [9, 41], [5, 60])]
    found, wanted = (draft.grow(drawn[0].int(), drawn[1].int(), drawn[2]) for draft in (drafts.fused, drafts.plain))
    for ours, theirs in zip(found, wanted, strict=True):
        assert torch.equal(ours.long(), theirs.long())
    drafts.compare_caches()


@pytest.mark.parametrize("options", [*OPTIONS, {"carry": True, **WIDE}, *OTHERS], ids=str)
def test_rows_of_a_verdict_are_written_as_without_kernels(options: dict[str, Any]) -> None:
    rng = torch.Generator().manual_seed(1)
    drafts = Drafts("topk:9,depth=3,width=3", rng, **options)
    slots, lengths = torch.tensor([2, 0, 4, SLOTS], dtype=torch.int32), torch.tensor([7, 1, 40, 0], dtype=torch.int32)
    tokens = torch.randint(VOCABULARY, (4, 10), generator=rng).int()
    paths = torch.tensor([[0, 3, 7, -1], [0, -1, -1, -1], [0, 1, 4, 9], [-1, -1, -1, -1]], dtype=torch.int32)
    following = torch.randint(VOCABULARY, (4,), generator=rng)
    hidden = [torch.randn(4, 10, options.get("width", 24), generator=rng) for _ in range(3)]
    before = drafts.caches[0].predicted.clone(), drafts.caches[0].foreseen.clone()
    wider = torch.nn.functional.pad(paths, (0, 2), value=-1)  # a recorded verdict has columns for longer paths
    drawn = [part.to(DEVICE) for part in (slots, lengths, tokens, wider, apart(following), *hidden)]
    drawn[3], drawn[4] = drawn[3][:, :4], drawn[4][:, 1]
    found, wanted = (draft.catch_up(*drawn) for draft in (drafts.fused, drafts.plain))
    assert found.tolist() == wanted.tolist() == [10, 2, 44, 0]
    drafts.ends = torch.tensor([2, 0, 10, 0, 44], device=DEVICE)
    drafts.compare_caches()
    assert not torch.equal(drafts.caches[0].predicted, before[0])
    assert torch.equal(drafts.caches[0].foreseen, before[1]) != bool(options.get("masks"))


def test_products_find_the_same_in_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """As few rows of two bytes a number are multiplied on a device; the last slices are partly or wholly empty."""
    rows = pytest.importorskip("branchwise.cuda.heads.rows")
    whole = rows._shape
    monkeypatch.setattr(rows, "_shape", lambda *given, **more: whole(*given, **more) | {"slices": 4, "piece": 16})
    options = WIDE | {"width": 328, "carry": True, "gate": "full"}
    test_trees_are_laid_as_without_kernels(options, "topk:9,depth=2,width=3", 1, 0)


@pytest.mark.parametrize(("rows", "count", "width"), [(1, 8, 8), (1, 3, 5), (2, 4, 3), (3, 5, 15), (9, 9, 20)])
@pytest.mark.parametrize("kinds", [2, 1000])
def test_the_best_nodes_of_a_level_are_expanded(rows: int, count: int, width: int, kinds: int) -> None:
    """Of equals the first; the last one proposed stands for those that are missing."""
    tree = pytest.importorskip("branchwise.cuda.heads.tree")
    rng, batch, cell, first, every = torch.Generator().manual_seed(rows), 2, 30, 7, 200

    def numbers(*shape: int, most: int = 1000) -> Tensor:
        return torch.randint(most, shape, generator=rng).to(DEVICE)

    values, places = -numbers(batch, rows, count, most=kinds).float(), numbers(batch, rows, count, most=70).int()
    table, known, slots = numbers(60), numbers(4, 10), torch.tensor([3, 1], device=DEVICE)
    words = numbers(batch, rows, 2).int() & 1023
    before = tree.Level(
        -numbers(batch, rows, most=2).float(), numbers(batch, rows), *(numbers(batch, rows),) * 2, words
    )
    rows_at, proposed = numbers(batch, rows), tree.Proposed(*(numbers(batch, every) for _ in range(3)))
    proposed = proposed._replace(values=proposed.values.float())
    found = tree.pick((values, places), (table, known, slots), before, rows_at, proposed, first, cell, width)
    for text in range(batch):
        tokens = torch.cat([table, known[slots[text]]])[places[text].flatten().long()]
        paths = (values[text] + before.values[text][:, None]).flatten()
        now = slice(first, first + rows * count)
        assert torch.equal(proposed.values[text, now], paths)
        assert torch.equal(proposed.tokens[text, now], tokens)
        assert torch.equal(proposed.parents[text, now], before.numbers[text].repeat_interleave(count))
        order = paths.sort(descending=True, stable=True).indices[:width]
        missing = width - len(order)
        assert torch.equal(found.values[text, : len(order)], paths[order])
        assert (found.values[text, len(order) :] < -1e29).all()
        order = torch.cat([order, order.new_full((missing,), rows * count - 1)])
        assert torch.equal(found.tokens[text], tokens[order])
        assert torch.equal(found.numbers[text], first + order)
        assert torch.equal(found.states[text], rows_at[text][order // count])
        for rank, (bits, row) in enumerate(zip(found.bits[text].tolist(), (order // count).tolist(), strict=True)):
            wanted = words[text, row].tolist()
            wanted[(cell + rank) // 32] |= 1 << (cell + rank) % 32
            assert [word & 0xFFFFFFFF for word in bits] == wanted


def test_of_equally_probable_nodes_the_first_is_kept_and_none_hangs_in_the_air() -> None:
    tree = pytest.importorskip("branchwise.cuda.heads.tree")
    root, levels = torch.tensor([4], device=DEVICE), torch.tensor([1, 1, 2, 2, 2, 2], device=DEVICE)

    def proposed(values: list[float], tokens: list[int], parents: list[int]) -> Any:
        return tree.Proposed(*(torch.tensor([part], device=DEVICE) for part in (values, tokens, parents)))

    even = proposed([-1.0, -2.0, -1.0, -1.0, -2.0, -2.0], [5, 6, 7, 8, 9, 10], [-1, -1, 0, 0, 1, 1])
    laid = tree.Laid.place(1, 5, DEVICE)
    tree.lay(even, levels, root, laid, 2)
    assert [part[0].tolist() for part in laid[:3]] == [[4, 5, 6, 7, 8], [-1, 0, 0, 1, 1], [0, 1, 1, 2, 2]]
    assert laid[3][0, :, 0].tolist() == [1, 0b11, 0b101, 0b1011, 0b10011]
    orphan = proposed([-1.0, -3.0, -2.5], [5, 6, 7], [-1, -1, 1])
    laid = tree.Laid.place(1, 3, DEVICE)
    tree.lay(orphan, levels[[0, 1, 2]], root, laid, 2)
    assert [part[0].tolist() for part in laid[:3]] == [[4, 5, 0], [-1, 0, -1], [0, 1, 0]]
    assert laid[3][0, :, 0].tolist() == [1, 0b11, 0]


LEVEL = ["_parts", "_merge", "_pick"]
ROWS = ["_read", "_attend", "_merge", "_add", "_gate_up", "_add"]
GATED = ["_mix", "_select", "_add", *ROWS]


def step_of(rows: list[str]) -> list[str]:
    """What a verdict launches, and the next tree of two levels."""
    return ["_follow", "_join", *rows, "_remember", *LEVEL, *rows, *LEVEL, "_copy", "_rank", "_number", "_lay"]


@interpreted
def test_the_kernels_compile_for_a_hopper_gpu(tmp_path: Path) -> None:
    assert compiled_by("tests.test_head_kernels", tmp_path) == [*step_of(GATED), *step_of(ROWS)]


@interpreted
def test_heads_of_large_models_fit_into_the_shared_memory_of_a_smaller_gpu(tmp_path: Path) -> None:
    """Programs that read eight slices of two kinds of rows at a time would ask for twice what an Ada has."""
    assert compiled_by("tests.test_head_kernels", tmp_path, "compile_wide_head") == step_of(GATED)


def compile_wide_head() -> None:
    """A verdict and the next tree of a head in the size of Llama 3 8B, for an Ada."""
    from branchwise.cuda import products

    vars(products)["shared_memory"] = lambda device: ADA.shared
    stand_in(ADA)
    compile_step(4096, torch.ones(64), heads=32, kv_heads=8, head_width=128, mlp=1536, gate="full")


def compile_all() -> None:
    """A verdict and the next tree of a head, in the sizes of SmolLM2 and of Qwen2.5-Coder-1.5B."""
    for module in stand_in(HOPPER):
        vars(module)["early"] = as_on_hopper
    compile_step(576, torch.ones(32), heads=9, kv_heads=3, head_width=64, mlp=1536, gate="full")
    compile_step(1536, torch.ones(64), heads=12, kv_heads=2, head_width=128, mlp=4096)


def stand_in(device: Device) -> list[ModuleType]:
    """Let kernels be compiled for a device; the modules that have them."""
    from branchwise.cuda import kernels
    from branchwise.cuda.heads import best_tokens, rows, tree

    modules = [best_tokens, rows, tree, kernels]
    for module in modules:
        for name, kernel in vars(module).copy().items():
            if name in step_of(GATED):  # others are called by these
                setattr(module, name, Compiled(kernel, device))
    return modules


def compile_step(width: int, frequencies: Tensor, **sizes: Any) -> None:
    from branchwise.draft.head.trees.fused import FusedDraft

    kind = torch.bfloat16
    config = HeadConfig(width=width, taps=tuple("abcd"), carry=True, **sizes)
    head = Head(config, frequencies).to(kind).requires_grad_(False)
    head.frequencies = head.frequencies.float()
    words = torch.zeros(20_000, width, dtype=kind)
    cache = HeadCache(head.config, 1, torch.device("cpu"), kind)
    draft = FusedDraft(TopK(63, 2, 8), head, cache, words, words, torch.arange(16_384), copies=15)
    one, hidden = torch.ones(1, dtype=torch.int32), [torch.zeros(1, 64, width, dtype=kind) for _ in range(4)]
    paths: Tensor = torch.zeros(1, 16, dtype=torch.long)
    ends = draft.catch_up(one, one, torch.zeros(1, 64, dtype=torch.int32), paths, one.long(), *hidden)
    draft.grow(one, ends, one.long())
