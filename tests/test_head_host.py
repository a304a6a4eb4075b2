"""A head on a CPU in few calls finds what its network says, row by row, tree by tree and text by text."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor, nn

from branchwise.backends.int8 import Bytes, Numbers
from branchwise.backends.native import byte_product, row_functions
from branchwise.backends.packed import Lent, PanelMatrix, Product
from branchwise.backends.quantized import InEightBits, Installed, install_products
from branchwise.backends.transformers.target import TransformersTarget
from branchwise.core.sequence import SequenceState
from branchwise.draft import build_drafter, build_policy
from branchwise.draft.head import drafter as drafter_module
from branchwise.draft.head.cache import HeadCache
from branchwise.draft.head.drafter import HeadDrafter
from branchwise.draft.head.file import TrainedHead
from branchwise.draft.head.host import HostHead
from branchwise.draft.head.network import Head, HeadConfig
from branchwise.draft.head.trees.attention import Behind, attention
from tests.test_head_ahead import Noting, written
from tests.test_head_drafter import TAPS, VOCABULARY, model_of
from tests.test_head_training import FORMS

pytestmark = pytest.mark.skipif(row_functions() is None, reason="needs a C compiler and OpenMP")

WIDTH = 32
ALL = FORMS | {
    "speculators": {"norm_before_residual": True, "carry_normed": True, "query_norm": True, "attention_bias": True}
}
HERE = [form for form, options in ALL.items() if "cross" not in options]
KINDS = ["floats", pytest.param("bytes", marks=pytest.mark.skipif(byte_product() is None, reason="needs AVX-512 VNNI"))]


def panels_of(weight: Tensor) -> Product:
    return PanelMatrix(weight)


def bytes_of(weight: Tensor) -> Product:
    return InEightBits(Bytes(Numbers.of(weight)), weight.shape[1])


def install(model: nn.Module, kind: str) -> Callable[[Tensor], Product]:
    """Products that functions in C can read, in the place of linear layers."""
    product_of = panels_of if kind == "floats" else bytes_of
    for layer in model.modules():
        if type(layer) is nn.Linear:
            layer.__dict__["forward"] = Lent(product_of(layer.weight), layer)
    return product_of


def head_of(form: str) -> Head:
    torch.manual_seed(1)
    sizes: dict[str, Any] = {"width": WIDTH, "taps": TAPS, "heads": 4, "kv_heads": 2, "head_width": 8, "mlp": 32}
    head = Head(HeadConfig(**sizes | ALL[form]), 1 / 100 ** (torch.arange(4) / 4))
    for weight in head.parameters():
        torch.nn.init.normal_(weight, std=0.3) if weight.ndim == 2 else torch.nn.init.uniform_(weight, 0.5, 1.5)
    return head.eval().requires_grad_(False)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", HERE)
@torch.no_grad()
def test_rows_are_those_of_the_network(form: str, kind: str) -> None:
    """Of two texts of different lengths, in trees in which not every node sees every other."""
    head = head_of(form)
    install(head, kind)
    caches = [HeadCache(head.config, 3, torch.device("cpu"), torch.float32) for _ in range(2)]
    host = HostHead.of(head, caches[0])
    assert host is not None
    slots, lengths = torch.tensor([2, 0]), torch.tensor([7, 3])
    for cache in caches:
        torch.manual_seed(2)
        cache.store.normal_()
    for first, rows in ((0, 3), (3, 3), (1, 1)):
        features = torch.randn(2, rows, WIDTH) if head.config.taps else None
        embeddings, own = torch.randn(2, rows, WIDTH), torch.rand(2, rows, 6) < 0.5
        own[:, torch.arange(rows), first + torch.arange(rows)] = True
        cell_depths = torch.tensor([0, 0, 1, 1, 2, 2]).expand(2, -1)
        behind = Behind(first, own, torch.arange(rows).expand(2, -1), cell_depths)
        attend = attention(caches[1], slots, lengths, behind, kernels=False)
        positions = lengths[:, None] + behind.depths
        found, wanted = (
            host.read(slots, lengths, features, embeddings, behind),
            head(features, embeddings, positions, attend),
        )
        for one, other in zip(found, wanted, strict=True):
            torch.testing.assert_close(one, other, rtol=2e-5, atol=2e-5)
        torch.testing.assert_close(caches[0].store, caches[1].store, rtol=2e-5, atol=2e-5)


@given(st.integers(1, 2), st.integers(1, 3), st.integers(1, 40), st.integers(0, 5), st.integers(0, 2**20))
@torch.no_grad()
def test_the_most_probable_tokens_are_those_of_torch(batch: int, rows: int, size: int, few: int, seed: int) -> None:
    head = head_of("carry")
    install(head, "floats")
    cache = HeadCache(head.config, 3, torch.device("cpu"), torch.float32)
    host, draw = HostHead.of(head, cache), torch.Generator().manual_seed(seed)
    assert host is not None
    torch.nn.init.uniform_(head.output_norm.weight, 0.5, 1.5, generator=draw)
    table = torch.randperm(100, generator=draw)[:size]
    weight, extra = torch.randn(size, WIDTH, generator=draw), torch.randn(few, WIDTH, generator=draw)
    slots, predict = torch.tensor([2, 0])[:batch], torch.randn(batch, rows, WIDTH, generator=draw)
    cache.extra_tokens[2, :few] = 100 + torch.arange(few)
    cache.extra_rows[2, :few] = extra * head.output_norm.weight
    count = min(size, 3)
    tokens, values = host.best(lambda states, bias: states @ weight.T, table, predict, slots, count)
    for text in range(batch):
        with_extra = few if slots[text] == 2 else 0
        own = torch.cat([weight, extra[:with_extra]])
        wanted = (head.output(predict[text]) @ own.T).log_softmax(dim=-1).topk(count)
        names = torch.cat([table, 100 + torch.arange(with_extra)])
        torch.testing.assert_close(values[text], wanted.values, rtol=1e-4, atol=1e-4)
        assert torch.equal(tokens[text], names[wanted.indices])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("form", HERE)
@torch.no_grad()
def test_trees_and_texts_are_those_of_the_network(form: str, kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """With prompts in chunks, texts that come and go, and rows that have left a window."""
    monkeypatch.setattr(drafter_module, "install_products", lambda head, _: Installed(install(head, kind), 1.0))
    model, noted, read = model_of(hidden_size=WIDTH), [], list[int]()
    own = HostHead.read
    monkeypatch.setattr(HostHead, "read", lambda self, *rows: read.append(1) or own(self, *rows))
    for here in (True, False):
        if not here:
            monkeypatch.setattr(HostHead, "of", classmethod(lambda cls, head, cache: None))
        target = TransformersTarget(model, slots=2, context=128, max_nodes=32)
        trained = TrainedHead(head_of(form), torch.randperm(VOCABULARY)[:30].sort().values, *names(target))
        drafter = Noting(trained, tree=build_policy("topk:12,depth=4,width=3"))
        texts = written(target, drafter, prefill_tokens=7)  # type: ignore[arg-type]
        noted.append((drafter.noted, [(text.token_ids, text.stats.accepted_tokens) for text in texts]))
        assert bool(read) is here
        read.clear()
    assert noted[0] == noted[1]
    plain = written(TransformersTarget(model, slots=2, context=128), build_drafter("none"))  # type: ignore[arg-type]
    assert [text.token_ids for text in plain] == [text.token_ids for text in texts]


def names(target: TransformersTarget) -> tuple[str, str]:
    assert target.info.weights is not None
    return target.info.name, target.info.weights


def test_a_head_of_another_kind_is_computed_as_its_network_says() -> None:
    head = head_of("carry")
    cache = HeadCache(head.config, 1, torch.device("cpu"), torch.float32)
    assert HostHead.of(head, cache) is None, "products of a library"
    install(head, "floats")
    assert HostHead.of(head, cache) is not None
    assert HostHead.of(head.bfloat16(), cache) is None
    crossing = head_of("cross")
    install(crossing, "floats")
    assert HostHead.of(crossing, HeadCache(crossing.config, 1, torch.device("cpu"), torch.float32)) is None


@torch.no_grad()
def test_rows_that_follow_a_text_are_written_behind_it() -> None:
    head = head_of("carry")
    install(head, "floats")
    cache = HeadCache(head.config, 2, torch.device("cpu"), torch.float32)
    host, sequence = HostHead.of(head, cache), SequenceState([1, 2, 3])
    assert host is not None
    cache.open(sequence)
    features, embeddings = torch.randn(1, 5, WIDTH), torch.randn(1, 5, WIDTH)
    whole = host.follow([sequence], features, embeddings)
    first = host.follow([sequence], features[:, :2], embeddings[:, :2])
    cache.lengths[sequence] = 2
    second = host.follow([sequence], features[:, 2:], embeddings[:, 2:])
    for part, one, other in zip(whole, first, second, strict=True):
        assert torch.equal(part, torch.cat([one, other], dim=1))


def test_a_drafter_on_a_cpu_has_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(drafter_module, "install_products", lambda head, _: Installed(install(head, "floats"), 1.0))
    target = TransformersTarget(model_of(hidden_size=WIDTH), slots=1, context=64)
    drafter = HeadDrafter(TrainedHead(head_of("fspad"), torch.arange(VOCABULARY), *names(target)))
    drafter.bind(target.info)
    assert drafter._host is not None
    assert drafter._ahead is not None
    assert drafter._ahead._head._host is not None


@pytest.mark.skipif(byte_product() is None, reason="needs AVX-512 VNNI")
@pytest.mark.parametrize(("width", "size"), [(512, 0.25), (32, 1.0)])
def test_a_large_head_multiplies_in_bytes_where_we_have_a_product(width: int, size: float) -> None:
    layers = nn.Sequential(nn.Linear(width, 1024), nn.Linear(1024, width)).requires_grad_(False)
    rows = torch.randn(3, width)
    wanted = layers(rows)
    installed = install_products(layers, "")
    assert installed.bytes == size
    assert all(isinstance(vars(layer).get("forward"), Lent) is (size < 1) for layer in layers)
    torch.testing.assert_close(layers(rows), wanted, rtol=0.05, atol=0.05 if size < 1 else 1e-5)
    weight = torch.randn(64, width)
    torch.testing.assert_close(installed.product_of(weight)(rows, None), rows @ weight.T, rtol=0.05, atol=2.0)
