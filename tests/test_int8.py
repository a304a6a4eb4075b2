"""Weights of 8 and 4 bits: rows give the same bits alone and in trees, and a converted model is kept as it was made."""

from __future__ import annotations

import importlib
import json
import logging
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

import branchwise
from branchwise import models
from branchwise.backends import exact, quantized
from branchwise.backends.exact import is_exact, same_sums, slow_product
from branchwise.backends.int8 import MOST, WAYS, Bytes, IntMM, Numbers, TwoNibbles, Way, WholeNumbers, nibbles
from branchwise.backends.native import byte_product
from branchwise.backends.quantized import QuantizedLinear, choose_weights, conversion_of, layers_of_one_input
from branchwise.backends.transformers import converted
from branchwise.backends.transformers.converted import convert, load_converted
from branchwise.backends.transformers.target import TransformersTarget
from branchwise.backends.transformers.weights import weights_fingerprint
from branchwise.cli import main
from branchwise.core.batch import TreeBatch
from branchwise.core.sequence import SequenceState
from branchwise.core.tree import DraftTree
from branchwise.draft.head.shipped import shipped_head
from branchwise.errors import UnknownName, UnsupportedModel, UsageError
from branchwise.models.load import read_skeleton
from branchwise.provenance import device_name
from branchwise.verify import Verdict
from tests.conformance.architectures import build, served
from tests.test_audit_model import tiny_model, tokenizer
from tests.tiny_gguf import cache_fixture  # noqa: F401

OUTSIDE = ("gpt2", "mixtral", "qwen2-moe")
"""families that keep matrices outside of linear layers"""
FAMILIES = ("llama", "qwen2", "gemma2", "phi", "opt", "mistral")


@cache
def ways(bits: int = 8) -> list[type[Way]]:
    """Those that work on this machine."""
    found = []
    for way in WAYS[bits]:
        matrix = Numbers.of(torch.randn(24, 64, generator=torch.Generator().manual_seed(0)), bits)
        try:
            if is_exact(way(matrix), matrix):
                found.append(way)
        except (RuntimeError, AttributeError, ValueError):
            continue
    return found


# Products


@given(
    st.integers(1, 70), st.integers(1, 5), st.integers(2, 20), st.integers(0, 2**20), st.sampled_from([1e-5, 1.0, 1e4])
)
def test_a_row_gives_the_same_bits_alone_and_among_others(
    out: int, groups: int, count: int, seed: int, size: float
) -> None:
    draw = torch.Generator().manual_seed(seed)
    weight = torch.randn(out, 32 * groups, generator=draw)
    rows = torch.randn(count, 32 * groups, generator=draw) * size * torch.rand(count, 1, generator=draw)
    rows[seed % count] = 0
    for bits in WAYS:
        matrix = Numbers.of(weight, bits)
        for way in ways(bits):
            product = way(matrix)
            found = product(rows.clone())
            for start in range(count):
                for end in (start + 1, count):
                    assert torch.equal(product(rows[start:end].clone()), found[start:end]), way.name
            wanted = rows @ matrix.weight.t()
            error = (found - wanted).norm(dim=1)
            assert (error <= 0.05 * rows.norm(dim=1) * matrix.weight.norm(dim=1).max() + 1e-6).all(), way.name


@given(st.integers(1, 40), st.integers(1, 130), st.integers(1, 9), st.integers(0, 2**20))
def test_whole_numbers_are_summed_exactly(out: int, width: int, count: int, seed: int) -> None:
    draw = torch.Generator().manual_seed(seed)
    matrix = Numbers.of(torch.randn(out, width, generator=draw))
    rows = torch.randn(count, width, generator=draw)
    rows[0] = matrix.numbers[0].float().sign()
    for way in ways():
        if issubclass(way, WholeNumbers):
            product = way(matrix)
            right = same_sums(product(rows.clone()), slow_product(rows, matrix, way.levels))
            # torch's plain product goes wrong on some x86 CPUs if a row has one number beyond a multiple of four, which
            # rows of no model have; the trial at load must see it.
            assert right or (way is IntMM and width % 4 == 1 and not is_exact(product, matrix)), way.name
    if width % 4 == 0:
        assert torch.equal(IntMM(matrix)(rows.clone()), slow_product(rows, matrix, 127))


def test_there_is_a_way_on_every_machine() -> None:
    assert IntMM in ways()


@pytest.mark.skipif(byte_product() is None, reason="needs a CPU with AVX-512 VNNI, and a C compiler")
@pytest.mark.parametrize("count", [128, 129, 300])
def test_rows_of_a_long_prompt_are_multiplied_in_parts(count: int) -> None:
    product, rows = Bytes(Numbers.of(torch.randn(48, 64))), torch.randn(count, 64) * torch.rand(count, 1)
    assert torch.equal(product(rows), torch.cat([product(row[None]) for row in rows]))


@pytest.mark.skipif(byte_product() is None, reason="needs a CPU with AVX-512 VNNI, and a C compiler")
def test_our_own_product_is_exact_wherever_it_is() -> None:
    """Were it not, the trial would leave it out, and nobody would know."""
    assert Bytes in ways()


def test_without_a_product_of_our_own_another_way_is_taken(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("branchwise.backends.int8.byte_product", lambda: None)
    exact._tried.cache_clear()
    try:
        assert exact.tried([(40, 96), (96, 64)]).best not in (None, Bytes)
    finally:
        exact._tried.cache_clear()


@given(st.integers(1, 30), st.integers(1, 4), st.integers(0, 2**20))
def test_numbers_are_the_nearest_ones(out: int, groups: int, seed: int) -> None:
    weight = torch.randn(out, 32 * groups, generator=torch.Generator().manual_seed(seed))
    weight[0] = 0
    eight, four = Numbers.of(weight, 8), Numbers.of(weight, 4)
    assert eight.numbers.abs().max() <= MOST
    assert ((eight.weight - weight).abs() <= 0.5001 * eight.scale).all()
    assert four.numbers.min() >= -8
    assert four.numbers.max() <= 7
    error = (four.weight - weight).abs().view(out, groups, 32)
    # The largest is -8, of the other sign 8 does not fit; scales are rounded to bfloat16.
    assert (error <= (1.0 + 8 / 128) * four.scale.abs()[:, :, None]).all()
    assert error.mean() < 0.35 * four.scale.abs().mean()


def test_two_products_of_four_bits_are_one_of_eight() -> None:
    numbers = torch.arange(-MOST, MOST + 1, dtype=torch.int8).view(1, -1)
    high, low = nibbles(numbers).to(torch.int16)
    assert (16 * high + low == numbers[0]).all()
    for part in (high, low):
        assert part.min() >= -8
        assert part.max() <= 7
    if TwoNibbles in ways():
        matrix, rows = Numbers.of(torch.randn(50, 96)), torch.randn(7, 96)
        torch.testing.assert_close(TwoNibbles(matrix)(rows), rows @ matrix.weight.t(), rtol=0, atol=0.4)


class OneScaleForAll(IntMM):
    """Planted: all rows of a call share a scale, as torch's dynamic quantisation has it."""

    def __call__(self, rows: Tensor) -> Tensor:
        scale = rows.abs().max() / 127
        return self.multiply((rows / scale).round().to(torch.int8), scale.expand(len(rows), 1).contiguous())


class Saturating(IntMM):
    """Planted: sums end at 16 bits, as those of older CPUs do."""

    def multiply(self, rows: Tensor, scale: Tensor) -> Tensor:
        sums = torch._int_mm(rows, self._numbers).clamp(-(2**15), 2**15 - 1)
        return sums.float() * self._scale * scale


class AnotherOrder(IntMM):
    """Planted: alone a row is summed in floating point, in another order than among others."""

    def __call__(self, rows: Tensor) -> Tensor:
        return super().__call__(rows) if len(rows) > 1 else rows @ (self._numbers.float() * self._scale)


@pytest.mark.parametrize("planted", [OneScaleForAll, Saturating, AnotherOrder])
def test_a_way_that_is_not_exact_is_found(planted: type[IntMM], monkeypatch: pytest.MonkeyPatch) -> None:
    matrix = Numbers.of(torch.randn(40, 96))
    assert is_exact(IntMM(matrix), matrix)
    assert not is_exact(planted(matrix), matrix)
    monkeypatch.setitem(WAYS, 8, (planted, IntMM))
    exact._tried.cache_clear()
    try:
        assert exact.tried([(40, 96), (96, 64)]).best is IntMM
    finally:
        exact._tried.cache_clear()


# Models


def quantised_model(family: str = "llama", scheme: str = "int8") -> Any:
    config = served()[family]
    # A multiple of 32, as in real models: torch rounds activation functions in another way where a vector is not full.
    setattr(config, "ffn_dim" if family == "opt" else "intermediate_size", 64)
    model = build(config)
    convert(model, None, scheme)
    return model


def plain_rows(target: TransformersTarget, prompt: list[int], path: list[int]) -> list[Tensor]:
    """The logits after each token of a path, by plain decoding."""
    sequence, found = SequenceState(list(prompt)), []
    target.open(sequence)
    for token in [*path, 0]:
        tree = DraftTree(torch.tensor([sequence.root]), (-1,))
        found.append(target.score([sequence], TreeBatch([tree], target.device)).logits[0, 0].clone())
        target.commit([sequence], [Verdict((0,), token)])
        sequence.tokens.append(token)
    target.close(sequence)
    return found


def random_tree(root: int, nodes: int, vocabulary: int, draw: torch.Generator) -> DraftTree:
    parents = [-1]
    for node in range(1, nodes):  # in level order
        least = max(parents[-1], 0)
        parents.append(int(torch.randint(least, node, (), generator=draw)))
    tokens = torch.randint(vocabulary, (nodes,), generator=draw)
    tokens[0] = root
    seen: set[tuple[int, int]] = set()
    for node in range(1, nodes):  # siblings differ
        while (parents[node], int(tokens[node])) in seen:
            tokens[node] = (int(tokens[node]) + 1) % vocabulary
        seen.add((parents[node], int(tokens[node])))
    return DraftTree(tokens, tuple(parents))


def assert_trees_score_as_plain_decoding_does(target: TransformersTarget, sizes: list[int], seed: int) -> None:
    assert unlike_plain_decoding(target, sizes, seed) == []


def unlike_plain_decoding(target: TransformersTarget, sizes: list[int], seed: int) -> list[tuple[int, int]]:
    """Sequence and node of all rows that trees of several sequences in one pass do not share bit for bit."""
    draw, count = torch.Generator().manual_seed(seed), target.vocabulary
    prompts = [torch.randint(count, (3 + 9 * i,), generator=draw).tolist() for i in range(len(sizes))]
    sequences = [SequenceState(list(prompt)) for prompt in prompts]
    for sequence in sequences:
        target.open(sequence)
    trees = [random_tree(prompt[-1], size, count, draw) for prompt, size in zip(prompts, sizes, strict=True)]
    logits = target.score(sequences, TreeBatch(trees, target.device)).logits.clone()
    for sequence in sequences:
        target.close(sequence)
    found = set()
    for row, (prompt, tree) in enumerate(zip(prompts, trees, strict=True)):
        for leaf in range(len(tree)):
            path = tree.topology.path(leaf)
            wanted = plain_rows(target, prompt, tree.tokens[path[1:]].tolist())
            for node, expected in zip(path, wanted, strict=True):
                if not torch.equal(logits[row, node], expected):
                    found.add((row, node))
    return sorted(found)


@pytest.mark.parametrize("scheme", ["int8", "int4"])
@pytest.mark.parametrize("family", FAMILIES)
def test_a_tree_scores_bit_for_bit_as_plain_decoding_does(family: str, scheme: str) -> None:
    if scheme == "int4" and not ways(4):
        pytest.skip("torch has no product with 4 bits for this CPU")
    target = TransformersTarget(quantised_model(family, scheme), slots=4, context=64)
    assert target.info.quantised == scheme
    for seed in range(2):
        assert_trees_score_as_plain_decoding_does(target, [9, 1, 4], seed)
        assert_trees_score_as_plain_decoding_does(target, [6], seed)


def test_in_float32_the_same_comparison_fails() -> None:
    """Else it could not find anything."""
    torch.manual_seed(0)
    target = TransformersTarget(tiny_model(), slots=4, context=64)
    assert any(unlike_plain_decoding(target, [12], seed) for seed in range(6))


@pytest.mark.parametrize("family", sorted(served()))
def test_a_family_is_quantised_as_a_whole_or_refused(family: str) -> None:
    model = build(served()[family])
    before = sum(parameter.numel() for parameter in model.parameters())
    if family in OUTSIDE:
        with pytest.raises(UnsupportedModel, match="outside linear layers"):
            convert(model, None, "int8")
        assert sum(parameter.numel() for parameter in model.parameters()) == before
        return
    convert(model, None, "int8")
    matrices = [name for name, parameter in model.named_parameters() if parameter.ndim > 1 and "embed" not in name]
    assert all("lm_head" in name or "wte" in name or "wpe" in name for name in matrices), matrices
    found = conversion_of(model)
    assert found is not None
    assert found.distance.kl < 0.1
    TransformersTarget(model, slots=2, context=64)  # passes the comparison with its own forward


def test_layers_of_one_input_are_one_product_unless_it_is_written_to() -> None:
    model = tiny_model()
    groups = layers_of_one_input(model, torch.tensor([[1, 2, 3]]))
    assert [[name.rsplit(".", 1)[1] for name in group] for group in groups[:2]] == [
        ["q_proj", "k_proj", "v_proj"],
        ["gate_proj", "up_proj"],
    ]

    class Writing(torch.nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.first, self.second = torch.nn.Linear(4, 4), torch.nn.Linear(4, 4)

        def forward(self, input_ids: Tensor, use_cache: bool) -> Tensor:
            rows = input_ids.float()
            return self.first(rows) + self.second(rows.add_(1))  # type: ignore[no-any-return]

    assert layers_of_one_input(Writing(), torch.ones(1, 4, dtype=torch.long)) == []


# Loading


@pytest.fixture(scope="module", name="folder")
def folder_fixture(tmp_path_factory: pytest.TempPathFactory) -> Path:
    path = tmp_path_factory.mktemp("tiny")
    tiny_model().save_pretrained(path)
    tokenizer().save_pretrained(path)
    return path


def loaded(folder: Path, weights: str = "int8", **settings: Any) -> branchwise.LLM:
    return branchwise.load(str(folder), weights=weights, device="cpu", **settings)


def logits_of(llm: Any) -> Tensor:
    with torch.inference_mode():
        found: Tensor = llm(input_ids=torch.tensor([[1, 2, 3, 4, 5]]), use_cache=False).logits
    return found


PROMPT = "the cat sat on the mat and the cat"


@pytest.mark.parametrize(
    "method", ["ngram", "token-recycling", "disturbed/paths:2x3/match", "disturbed/topk:12,depth=3,width=4/match"]
)
def test_drafted_texts_are_those_of_plain_decoding(folder: Path, method: str) -> None:
    llm = loaded(folder, draft="none")
    for options in ({}, {"temperature": 0.9, "seed": 3}):
        wanted = llm.generate(PROMPT, raw=True, max_new_tokens=40, ignore_eos=True, **options)
        found = llm.with_method(method).generate(PROMPT, raw=True, max_new_tokens=40, ignore_eos=True, **options)
        assert found.token_ids == wanted.token_ids
        assert found.model == f"{folder} int8"


def test_the_distance_is_that_of_the_two_models(folder: Path) -> None:
    exact, words = models.load_model(str(folder), dtype=torch.float32, device="cpu")
    llm = loaded(folder)
    assert llm.conversion is not None
    distance = llm.conversion.distance
    tokens = torch.tensor([words(converted.TEXT)["input_ids"][: converted.MOST_TOKENS]])
    with torch.inference_mode():
        p, q = (model(input_ids=tokens).logits.log_softmax(-1) for model in (exact, llm.model))
    kl = torch.nn.functional.kl_div(q, p, log_target=True, reduction="none").sum(-1).mean()
    assert distance.kl == pytest.approx(float(kl), rel=1e-3, abs=1e-6)
    assert distance.equal == pytest.approx(float((p.argmax(-1) == q.argmax(-1)).float().mean()))
    assert distance.tokens == tokens.numel()
    assert 0 < distance.kl < 0.05
    if ways(4):
        coarse = loaded(folder, "int4").conversion
        assert coarse is not None
        assert coarse.distance.kl > distance.kl


def test_heads_of_the_float_model_are_accepted(folder: Path) -> None:
    exact, _ = models.load_model(str(folder), dtype=torch.float32, device="cpu")
    info = loaded(folder).engine.target.info
    assert info.weights == weights_fingerprint(exact)
    assert info.embeddings is not None
    given, rows = info.embeddings
    assert torch.equal(given, exact.get_input_embeddings().weight)
    torch.testing.assert_close(rows, exact.get_output_embeddings().weight, rtol=0, atol=2e-2)
    assert info.weight_bytes is not None
    float_bytes = TransformersTarget(exact).info.weight_bytes
    assert float_bytes is not None
    assert info.weight_bytes < 0.5 * float_bytes


# The cache


def weights_file(cache: Path) -> Path:
    [file] = cache.glob("quantised/*/weights.safetensors")
    return file


def test_the_second_load_reads_the_converted_copy(folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    first = loaded(folder)
    size = weights_file(cache).stat().st_size
    assert size < 0.6 * (folder / "model.safetensors").stat().st_size
    monkeypatch.setattr(converted, "load_model", None)  # would fail
    second = loaded(folder)
    assert torch.equal(logits_of(first.model), logits_of(second.model))
    assert second.conversion == first.conversion
    assert second.name == f"{folder} int8"
    assert second.stop_tokens == first.stop_tokens
    assert second.engine.target.info.weights == first.engine.target.info.weights


def test_tied_and_untied_embeddings_come_back(cache: Path, tmp_path: Path) -> None:
    for family in ("llama", "gemma2"):
        model = build(served()[family])
        model.save_pretrained(tmp_path / family)
        tokenizer().save_pretrained(tmp_path / family)
        first, _ = load_converted(str(tmp_path / family), "int8")
        second, _ = load_converted(str(tmp_path / family), "int8")
        assert torch.equal(logits_of(first), logits_of(second))
        tied = [bool(found.config.tie_word_embeddings) for found in (first, second)]
        assert tied[0] == tied[1]
        for found in (first, second):
            head, given = found.get_output_embeddings(), found.get_input_embeddings()
            assert isinstance(head, QuantizedLinear)
            assert (head.weight is given.weight) == tied[0]


def _truncate(file: Path) -> None:
    file.write_bytes(file.read_bytes()[:-40])


def _tamper(file: Path) -> None:
    data = bytearray(file.read_bytes())
    data[-10] ^= 1
    file.write_bytes(data)


def _lose(file: Path) -> None:
    file.unlink()


def _break_the_note(file: Path) -> None:
    (file.parent / "branchwise.json").write_text("{")


def _strip_the_note(file: Path) -> None:
    note = file.parent / "branchwise.json"
    note.write_text(json.dumps({**json.loads(note.read_text()), "distance": {}}))


@pytest.mark.parametrize("damage", [_truncate, _tamper, _lose, _break_the_note, _strip_the_note])
def test_a_damaged_copy_is_made_again(folder: Path, cache: Path, damage: Any, caplog: pytest.LogCaptureFixture) -> None:
    first = logits_of(loaded(folder).model)
    file = weights_file(cache)
    written = file.read_bytes()
    damage(file)
    with caplog.at_level(logging.WARNING):
        assert torch.equal(logits_of(loaded(folder).model), first)
    if damage is not _break_the_note:  # which is as good as none
        assert "made again" in caplog.text
    assert weights_file(cache).read_bytes() == written
    assert torch.equal(logits_of(loaded(folder).model), first)


def test_another_model_in_the_same_folder_is_converted_anew(cache: Path, tmp_path: Path) -> None:
    place = tmp_path / "model"
    tokenizer().save_pretrained(place)
    model = tiny_model()
    model.save_pretrained(place)
    first = logits_of(loaded(place).model)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.mul_(1.1)
    model.save_pretrained(place)
    assert not torch.equal(logits_of(loaded(place).model), first)


def test_a_cache_that_cannot_be_written_is_done_without(folder: Path, tmp_path: Path, monkeypatch: Any) -> None:
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("BRANCHWISE_CACHE", str(tmp_path / "file"))
    assert loaded(folder).conversion is not None


def test_auto_takes_eight_bits_where_they_pay(folder: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def gain(times: float) -> Any:
        return lambda *_: exact.Trial({None: times, IntMM: 1.0})

    monkeypatch.setattr(quantized, "tried", gain(9.9))
    assert loaded(folder, "auto").conversion is None, "it fits into the caches"
    monkeypatch.setattr(quantized, "LARGE", 1)
    monkeypatch.setattr(quantized, "tried", gain(1.1))
    monkeypatch.setattr(converted, "tried", gain(1.1))
    assert loaded(folder, "auto").conversion is None
    assert not list(cache.glob("quantised/*"))
    monkeypatch.setattr(quantized, "tried", gain(2.0))
    monkeypatch.setattr(converted, "tried", gain(2.0))
    found = loaded(folder, "auto").conversion
    assert found is not None
    assert found.scheme == "int8"
    with monkeypatch.context() as patch:  # remembered, so that the float model is not read again
        patch.setattr(converted, "load_model", None)
        assert loaded(folder, "auto").conversion == found
    monkeypatch.setattr(converted, "device_name", lambda device: "another machine")
    monkeypatch.setattr(quantized, "tried", gain(1.1))
    assert loaded(folder, "auto").conversion is None
    assert device_name(torch.device("cpu")) != "another machine"
    model, _ = load_converted(str(folder), "auto", dtype=torch.bfloat16)
    assert model.dtype == torch.bfloat16
    assert conversion_of(model) is None


# What is refused


def test_what_cannot_be_is_refused_with_a_remedy(folder: Path) -> None:
    with pytest.raises(UsageError, match="add --device cpu"):
        choose_weights("int8", "auto", "cuda")
    with pytest.raises(UsageError, match="leave out --dtype"):
        choose_weights("int4", torch.bfloat16, "cpu")
    with pytest.raises(UnknownName, match="int8"):
        loaded(folder, "int9")
    assert choose_weights("auto", "auto", "cuda") == "float"
    assert choose_weights("auto", "bfloat16", "cpu") == "float"
    assert choose_weights("float", "bfloat16", "cuda") == "float"
    with pytest.raises(UnsupportedModel, match="no linear layers"):
        quantized.linear_layers(torch.nn.Embedding(3, 4))
    with pytest.raises(UnsupportedModel, match="Conv1d"):
        quantized.linear_layers(torch.nn.Sequential(torch.nn.Linear(3, 4), torch.nn.Conv1d(3, 3, 3)))


def test_four_bits_are_refused_where_torch_has_no_product(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(WAYS, 4, ())
    exact._tried.cache_clear()
    try:
        with pytest.raises(UsageError, match="use --weights int8"):
            loaded(folder, "int4")
    finally:
        exact._tried.cache_clear()


def test_a_skeleton_is_the_model_without_its_weights(folder: Path) -> None:
    model, words = read_skeleton(folder)
    exact, _ = models.load_model(str(folder), dtype=torch.float32, device="cpu")
    assert {name: part.shape for name, part in model.state_dict().items()} == {
        name: part.shape for name, part in exact.state_dict().items()
    }
    assert not model.training
    assert words.get_vocab() == tokenizer().get_vocab()
    for name, buffer in exact.named_buffers():
        assert torch.equal(buffer, model.get_buffer(name))


# The command line


def run(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], *words: object) -> tuple[int, str, str]:
    monkeypatch.setattr(sys, "argv", ["branchwise", *map(str, words)])
    with pytest.raises(SystemExit) as ended:
        main()
    told = capsys.readouterr()
    return int(ended.value.code or 0), told.out, told.err


def test_commands_name_the_target_and_its_distance(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    loading = ["--model", folder, "--device", "cpu", "--weights", "int8"]
    code, out, err = run(monkeypatch, capsys, "generate", PROMPT, "--raw", *loading, "-n", 8, "--json")
    assert code == 0, err
    assert json.loads(out)["model"] == f"{folder} int8"
    assert "int8: mean KL divergence 0.0" in err
    code, out, err = run(monkeypatch, capsys, "models", "--json")
    [entry] = [entry for entry in json.loads(out)["cached"] if entry["name"].endswith(" int8")]
    assert "most probable tokens equal" in entry["distance"]
    code, out, err = run(monkeypatch, capsys, "explain", PROMPT, "--raw", *loading, "-n", 8, "--json")
    assert code == 0, err
    assert json.loads(out)["weights"] == "int8"
    (tmp_path / "prompts.txt").write_text(PROMPT)
    asked = ["--prompts", tmp_path / "prompts.txt", "-n", 8, "--out", tmp_path / "bench.jsonl", "--json"]
    code, out, err = run(monkeypatch, capsys, "bench", *asked, *loading)
    assert code == 0, err
    record = json.loads((tmp_path / "bench.jsonl").read_text().splitlines()[0])
    assert record["run"]["model"] == f"{folder.name} int8"
    assert record["run"]["weights"]["scheme"] == "int8"
    assert record["run"]["weights"]["distance"][2] > 0


def test_a_mistake_is_one_sentence(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for words, said in (
        (["--weights", "int9"], "int8"),
        (["--weights", "int8", "--dtype", "bfloat16"], "leave out --dtype"),
    ):
        code, _, err = run(monkeypatch, capsys, "generate", "Hi", "--model", folder, "--device", "cpu", *words)
        assert code == 2
        assert said in err
        assert len(err.strip().splitlines()) == 1


def test_the_audit_of_an_int8_target_is_lossless(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "prompts.txt").write_text("the cat sat\na dog")
    asked = ["--prompts", tmp_path / "prompts.txt", "--samples", 400, "--length", 2, "--detect", 0.3, "--seed", 1]
    drafting = ["--draft", "disturbed", "--tree", "paths:2x3", "--verify", "match", "--raw", "--greedy-tokens", 24]
    loading = ["--model", folder, "--device", "cpu", "--weights", "int8"]
    code, out, err = run(monkeypatch, capsys, "audit", "model", *loading, *asked, *drafting)
    assert code == 0, out + err
    assert "LOSSLESS" in out
    assert "NOT LOSSLESS" not in out
    assert "int8" in out


# The real model


@pytest.fixture(scope="module")
def real(tmp_path_factory: pytest.TempPathFactory) -> branchwise.LLM:
    return branchwise.load("smollm2", weights="int8", device="cpu", draft="none", max_batch=2)


def test_smollm2_drafts_with_its_head_and_writes_what_plain_decoding_writes(real: branchwise.LLM) -> None:
    assert real.conversion is not None
    assert real.conversion.distance.kl < 0.05
    head = shipped_head(real.engine.target.info)
    assert head is not None
    for prompt in ("Write a haiku about rivers.", "Repeat: one two three one two three one two three"):
        wanted = real.generate(prompt, max_new_tokens=32)
        found = real.with_method("eagle", head=str(head)).generate(prompt, max_new_tokens=32)
        assert found.token_ids == wanted.token_ids
        assert found.stats.mean_acceptance_length > 1.3


def test_smollm2_scores_trees_bit_for_bit(real: branchwise.LLM) -> None:
    target = real.engine.target
    assert isinstance(target, TransformersTarget)
    assert_trees_score_as_plain_decoding_does(target, [8], seed=1)
    assert_trees_score_as_plain_decoding_does(target, [5, 3], seed=2)


def test_the_benchmark_times_products_and_passes(
    folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parents[1] / "benchmarks"))
    out = tmp_path / "records.jsonl"
    words = ["--model", str(folder), "--kinds", "float32,int8", "--parts", "products,passes", "--passes", "2"]
    monkeypatch.setattr(sys, "argv", ["eight_bits.py", *words, "--context", "24", "--out", str(out)])
    engine = torch.backends.quantized.engine
    try:
        importlib.import_module("eight_bits").main()
    finally:
        torch.backends.quantized.engine = engine
    records = [json.loads(line) for line in out.read_text().splitlines()]
    timed = {(record["weights"], record["rows"]) for record in records if record["kind"] == "passes"}
    assert timed == {(kind, rows) for kind in ("float32", "int8") for rows in (1, 4, 8, 16)}
    exact = {record["way"]: record["exact"] for record in records if record["kind"] == "products"}
    assert "float32" in exact
    assert all(found for way, found in exact.items() if way.startswith("int"))
    assert not any(found for way, found in exact.items() if way.startswith("linear_dynamic"))
    assert all(record["seconds"] > 0 and record["run"]["commit"] for record in records)
    assert "passes, int8: ms by rows 1:" in capsys.readouterr().out
