"""A nested draft model: each exit is the model of its first layers, whatever was skipped before it."""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor

from branchwise.audit.findings import Word
from branchwise.audit.model import Plan
from branchwise.backends.transformers.runner import bytes_read
from branchwise.backends.transformers.target import TransformersTarget
from branchwise.core.sequence import SequenceState
from branchwise.draft import build_drafter, build_policy
from branchwise.draft.builder import TreeBuilder
from branchwise.draft.model.draft_model import Weights
from branchwise.draft.nested.cache import NestedKVCache
from branchwise.draft.nested.drafter import NestedDrafter
from branchwise.draft.nested.exits import NEVER, best_exit, best_ladder, expected, read_samples
from branchwise.draft.nested.parts import first_layers
from branchwise.draft.nested.segments import Segments
from branchwise.engine import Engine, Request
from branchwise.errors import BranchwiseError, ModelError, PairingError, UnsupportedModel, UsageError
from branchwise.train.student.model import with_layers
from branchwise.verify import VERIFIERS
from tests import attention_twins
from tests.conformance.architectures import build, served
from tests.test_audit_model import audit, llm, tiny_model, tokenizer
from tests.test_model_drafter import VOCABULARY, tiny

__all__ = ["llm"]

EXITS = (1, 2, 4)
DEEPEST = (NEVER, NEVER)


def nested_model(seed: int = 1, exits: Sequence[int] = EXITS, vocabulary: int = VOCABULARY) -> Any:
    model = tiny(seed, layers=exits[-1], vocabulary=vocabulary)
    model.config.exits = list(exits)
    return model.eval().requires_grad_(False)


def cache_of(model: Any, thresholds: Sequence[float], exits: Sequence[int] = EXITS, slots: int = 3) -> NestedKVCache:
    weights = Weights("nested", model, None)

    def acquire() -> TransformersTarget:
        return weights.acquire(slots, 100)

    return NestedKVCache(weights, acquire, lambda token: token, Segments(model, exits), thresholds)


class Growing:
    """A text and the trees that grow at its end; what is accepted is up to chance."""

    def __init__(self, length: int, rng: random.Random) -> None:
        self.rng = rng
        self.tokens = [rng.randrange(VOCABULARY) for _ in range(length)]
        self.sequence = SequenceState(self.tokens[:1])
        self.tree = TreeBuilder([self.tokens[-1]])
        self.known = [0]
        """nodes whose distributions were asked for"""

    def begin(self) -> None:
        self.tree, self.known = TreeBuilder([self.tokens[-1]]), [0]

    def sprout(self) -> list[int]:
        """Up to three nodes below known ones."""
        found = []
        for _ in range(self.rng.randint(1, 3)):
            parent, token = self.rng.choice(self.known), self.rng.randrange(VOCABULARY)
            found.append(self.tree.add(parent, token))
        self.known += found
        return found

    def text(self, node: int) -> list[int]:
        return [*self.tokens, *self.tree.path(node)]

    def accept(self) -> None:
        node = self.rng.choice(self.known)
        self.tokens = [*self.text(node), self.rng.randrange(VOCABULARY)]


def own(model: Any, tokens: list[int]) -> Tensor:
    """What a model itself finds after a text."""
    with torch.no_grad():
        found: Tensor = model(torch.tensor([tokens])).logits[0, -1]
    return found


def check(
    found: Tensor, places: Sequence[slice], models: Sequence[Any], texts: list[list[list[int]]], wanted: Any
) -> None:
    for row, (place, some) in enumerate(zip(places, texts, strict=True)):
        for logits, tokens in zip(found[row, place], some, strict=True):
            torch.testing.assert_close(logits, own(models[wanted(tokens)], tokens), atol=1e-4, rtol=1e-4)


def grow(cache: NestedKVCache, texts: Sequence[Growing], models: Sequence[Any], wanted: Any, steps: int) -> None:
    """Steps of several texts together, every distribution compared with that of the model it should come from."""
    sequences = [text.sequence for text in texts]
    for _ in range(steps):
        for text in texts:
            text.begin()
        found, places = cache.roots(sequences, [text.tokens for text in texts], [text.tree for text in texts])
        check(found, places, models, [[text.tokens] for text in texts], wanted)
        for _ in range(2):
            nodes = [text.sprout() for text in texts]
            found, places = cache.sprouts(sequences, nodes)
            paths = [[text.text(node) for node in some] for text, some in zip(texts, nodes, strict=True)]
            check(found, places, models, paths, wanted)
        for text in texts:
            text.accept()


def sub_models(model: Any) -> list[Any]:
    return [with_layers(model, range(number)) for number in EXITS]


@pytest.mark.parametrize("exit", range(3))
def test_each_exit_is_the_model_of_its_first_layers_alone(exit: int) -> None:
    model = nested_model()
    thresholds = [NEVER, NEVER]
    if exit < 2:
        thresholds[exit] = 0.0
    rng = random.Random(exit)
    cache = cache_of(model, thresholds)
    grow(cache, [Growing(length, rng) for length in (3, 30)], sub_models(model), lambda tokens: exit, 4)
    assert set(cache.left) == {EXITS[exit]}


def smallest_sure(models: Sequence[Any], thresholds: Sequence[float]) -> Any:
    """The rule, told by models that know nothing of each other."""

    def number(tokens: list[int]) -> int:
        sure = [float(own(model, tokens).softmax(-1).max()) for model in models]
        return next(n for n, bound in enumerate((*thresholds, 0.0)) if bound <= 1 and sure[n] >= bound)

    return number


@pytest.mark.parametrize("thresholds", [(0.5, 0.5), (NEVER, 0.6), (0.7, NEVER)])
def test_a_node_leaves_at_the_first_exit_that_is_sure_and_has_its_distribution(thresholds: tuple[float, float]) -> None:
    model, rng = nested_model(), random.Random(4)
    models = sub_models(model)
    cache = cache_of(model, thresholds)
    texts = [Growing(length, rng) for length in (2, 25, 9)]
    grow(cache, texts, models, smallest_sure(models, thresholds), 5)
    assert len(cache.left) >= 2, "exits are mixed"


def test_the_cache_after_mixed_exits_is_that_of_the_deepest_run() -> None:
    """One deep node makes every row before it whole, in the text and in the tree."""
    model, rng = nested_model(), random.Random(5)
    models = sub_models(model)
    thresholds = (0.6, 0.6)
    cache = cache_of(model, thresholds)
    texts = [Growing(length, rng) for length in (4, 20)]
    grow(cache, texts, models, smallest_sure(models, thresholds), 6)
    assert len(cache.left) == 3
    cache.thresholds = (0.0, 0.0, 0.0)
    grow(cache, texts, models, lambda tokens: 0, 2)
    seen = cache.beside().seen
    shallow = [int((seen[slot, : len(cache.cached(text.sequence))] < 3).sum()) for slot, text in enumerate(texts)]
    assert min(shallow) > 0, "some rows left early"
    cache.thresholds = (*DEEPEST, 0.0)
    deep = cache_of(model, DEEPEST)
    for one in (cache, deep):
        for text in texts:
            text.begin()
        one.roots([text.sequence for text in texts], [text.tokens for text in texts], [text.tree for text in texts])
    for slot, text in enumerate(texts):
        rows = len(text.tokens)
        for layer in range(EXITS[-1]):
            for kind in ("layers_keys", "layers_values"):
                mixed, whole = (getattr(one.slots.store, kind)[layer][slot, :, :rows] for one in (cache, deep))
                torch.testing.assert_close(mixed, whole, atol=1e-4, rtol=1e-4)
                assert bool((whole != 0).any())


def test_rows_go_with_the_text_that_inherits_them() -> None:
    model, rng = nested_model(), random.Random(6)
    models = sub_models(model)
    thresholds = (0.6, 0.6)
    cache = cache_of(model, thresholds)
    first = Growing(6, rng)
    grow(cache, [first], models, smallest_sure(models, thresholds), 5)
    second = Growing(1, rng)
    second.tokens = [*first.tokens[:-2], 3, 4]
    cache.inherit(first.sequence, second.sequence, second.tokens, moved=False)
    assert cache.cached(second.sequence)
    cache.thresholds = (*DEEPEST, 0.0)
    grow(cache, [second, first], models, lambda tokens: 2, 2)


@pytest.mark.parametrize("name", ["qwen2-window", "qwen3", "mistral-narrow"])
def test_exits_of_other_families_and_of_layers_with_windows(name: str) -> None:
    model = build(served()[name])
    exits = (1, 3)
    rng = random.Random(7)
    models = [with_layers(model, range(number)) for number in exits]
    thresholds = (0.12,)
    cache = cache_of(model, thresholds, exits)
    grow(cache, [Growing(14, rng)], models, smallest_sure(models, thresholds), 4)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_model_that_its_layers_do_not_make_up_is_refused(dtype: torch.dtype) -> None:
    model = build(served()["gemma2"]).to(dtype)
    model.config.exits = [1, 3]
    model.config.final_logit_softcapping = 0.01  # what its head says is squeezed afterwards
    with pytest.raises(UnsupportedModel):
        NestedDrafter(Weights("gemma", model, None)).bind(TransformersTarget(build(served()["gemma2"])).info)


@pytest.mark.parametrize("name", ["llama", "qwen2-window", "gemma2"])
def test_the_model_of_its_first_layers_shares_all_weights_and_is_that_of_these_layers(name: str) -> None:
    model = nested_model() if name == "llama" else build(served()[name])
    layers = model.config.num_hidden_layers
    tokens, known = torch.arange(1, 15)[None], {id(weight) for weight in model.parameters()}
    before = model(tokens).logits
    for count in range(1, layers):
        part = first_layers(model, count)
        torch.testing.assert_close(part(tokens).logits, with_layers(model, range(count))(tokens).logits)
        assert {id(weight) for weight in part.parameters()} < known
        assert part.config.num_hidden_layers == count
    assert model.config.num_hidden_layers == layers
    assert torch.equal(model(tokens).logits, before)


# The drafter


def assert_texts_of_plain_decoding(target: TransformersTarget, drafter: NestedDrafter) -> None:
    texts = []
    for method in (build_drafter("none"), drafter):
        engine = Engine(target, method, VERIFIERS.build("match"))
        made = [engine.submit(Request(prompt, max_new_tokens=30)) for prompt in ((1, 2, 3), (4, 5) * 12)]
        while engine.busy:
            engine.step()
        texts.append([one.token_ids for one in made])
    assert texts[0] == texts[1]


def test_texts_are_those_of_plain_decoding_and_exits_are_mixed() -> None:
    nested = NestedDrafter(Weights("nested", nested_model(), None), threshold=0.6, tree=build_policy("paths:2x3"))
    assert_texts_of_plain_decoding(TransformersTarget(tiny(0), slots=2), nested)
    assert len(nested._following.left) >= 2  # type: ignore[attr-defined]
    assert "layers" in nested.reasons(1)[0]


def test_a_device_drafts_ahead_with_the_exit_that_is_best_for_its_target(monkeypatch: pytest.MonkeyPatch) -> None:
    attention_twins.install(monkeypatch)
    # The first exit is right half the time, the second hardly more often.
    monkeypatch.setattr(NestedDrafter, "_measured", lambda self: np.array([[[0.5] * 3, [0.5, 0.52, 0.9]]]))
    weights, chosen = Weights("nested", nested_model(), None), []
    for layers in (2, 60):  # beside a large target a deep exit costs little
        target = TransformersTarget(tiny(8, layers=layers), slots=2, context=64, max_nodes=16, kernels=True)
        drafter = NestedDrafter(weights, tree=build_policy("chain:3"))
        assert_texts_of_plain_decoding(target, drafter)
        assert drafter.only is not None
        assert drafter._ahead is not None, "no host between levels"
        assert target.info.weight_bytes is not None
        own = bytes_read(first_layers(weights.model, drafter.only))
        assert drafter.cost == pytest.approx(own / target.info.weight_bytes)
        assert f"after {drafter.only} of 4 layers" in drafter.reasons(1)[0]
        chosen.append(drafter.only)
    assert chosen == [1, 4]
    named = NestedDrafter(weights, threshold=0.5, tree=build_policy("chain:3"))
    named.bind(target.info)
    assert named.only is None, "a threshold asks for a look at every node"
    assert named._ahead is None


@pytest.mark.parametrize("verify", ["token", "block"])
def test_the_audit_finds_nothing_in_sampled_drafts_of_mixed_exits(llm: Any, verify: str) -> None:
    vocabulary = llm.engine.target.info.vocabulary
    model = nested_model(3, vocabulary=vocabulary)
    drafter = NestedDrafter(Weights("nested", model, None), threshold=0.5, tree=build_policy("chain:3"))
    plan = Plan(samples=250, length=2, seed=5, greedy_tokens=8, near_ties=False, limit=0.25)
    found = audit(llm, drafter, verify, plan=plan)
    assert found.finding.word is Word.LOSSLESS, found.finding.evidence
    assert len(drafter._following.left) >= 2  # type: ignore[attr-defined]


def test_one_nested_model_serves_targets_of_any_size() -> None:
    weights = Weights("nested", nested_model(), None)
    drafter = NestedDrafter(weights, threshold=0.6, tree=build_policy("chain:3"))
    costs = []
    for layers in (2, 6):
        target = TransformersTarget(tiny(8, layers=layers), slots=1)
        plain, drafted = (Engine(target, one, VERIFIERS.build("match")) for one in (build_drafter("none"), drafter))
        made = [engine.submit(Request((1, 2, 3), max_new_tokens=12)) for engine in (plain, drafted)]
        for engine in (plain, drafted):
            while engine.busy:
                engine.step()
        assert made[0].token_ids == made[1].token_ids
        costs.append(drafter.cost)
    assert costs[0] > costs[1]


@pytest.mark.parametrize("exits", [None, [2], [2, 3], [4, 2], [0, 4]])
def test_a_model_without_exits_is_refused(exits: list[int] | None) -> None:
    model = nested_model()
    model.config.exits = exits
    with pytest.raises(ModelError, match=r"has no exits that end at its 4 layers; make such a model with"):
        NestedDrafter(Weights("plain", model, None)).bind(TransformersTarget(tiny(0)).info)


def test_wrong_options_are_refused_with_a_sentence() -> None:
    weights = Weights("nested", nested_model(), None)
    with pytest.raises(UsageError, match="A threshold is a probability"):
        NestedDrafter(weights, threshold=1.5)
    with pytest.raises(BranchwiseError):
        build_drafter("nested:/no/such/folder")
    hidden = build_policy("chain:3")
    hidden.needs_hidden = True
    with pytest.raises(PairingError, match="asks for none"):
        NestedDrafter(weights, tree=hidden)


# Thresholds


def test_thresholds_follow_costs_and_what_was_measured() -> None:
    rng = np.random.default_rng(0)
    first, last = rng.uniform(0, 1, 500), rng.uniform(0.7, 1, 500)
    samples = np.stack([np.stack([first, last], 1), np.stack([first, last], 1)], axis=1)  # as sure as it is right
    cheap, dear = (best_ladder(samples, (0.02, more), 0.01) for more in (0.01, 2.0))
    assert dear.thresholds == (0.0,), "a second segment that costs two passes of the target pays for nobody"
    assert cheap.thresholds[0] >= 0.7
    free = best_ladder(samples, (0.02, 0.0), 0.5)
    assert free.thresholds == (NEVER,), "a look that costs more than the layers it could save is not made"
    found = expected(samples, (0.1, 0.2), 0.05, (0.5,))
    share = float((first >= 0.5).mean())
    assert found.shares == pytest.approx((share, 1 - share))
    assert found.cost == pytest.approx(0.15 + (1 - share) * 0.25)
    assert found.acceptance == pytest.approx(float(np.where(first >= 0.5, first, last).mean()))


def test_one_exit_for_all_follows_costs_and_what_was_measured() -> None:
    samples = np.array([[[0.9, 0.1], [0.5, 0.8]]])  # how sure it is says nothing of how right
    assert best_exit(samples, (0.1, 0.2)) == 1
    assert best_exit(samples, (0.1, 0.9)) == 0


def test_a_file_of_measurements_is_read_and_a_wrong_one_refused(tmp_path: Path) -> None:
    assert read_samples(tmp_path, (1, 2)) is None
    file = tmp_path / "exits.json"
    file.write_text(json.dumps({"exits": [1, 2], "samples": [[0.5, 0.6, 0.7, 0.8]]}))
    samples = read_samples(tmp_path, (1, 2))
    assert samples is not None
    assert samples.tolist() == [[[0.5, 0.6], [0.7, 0.8]]]
    for text in (
        "{",
        "{}",
        json.dumps({"exits": [1, 3], "samples": [[0.5] * 4]}),
        json.dumps({"exits": [1, 2], "samples": []}),
    ):
        file.write_text(text)
        with pytest.raises(ModelError, match="cannot be used"):
            read_samples(tmp_path, (1, 2))


def test_a_folder_drafts_by_its_measurements(tmp_path: Path, llm: Any) -> None:
    model = tiny_model()
    model.config.exits = [1, 2]
    model.save_pretrained(tmp_path / "nested")
    tokenizer().save_pretrained(tmp_path / "nested")
    (tmp_path / "nested" / "exits.json").write_text(
        json.dumps({"exits": [1, 2], "samples": [[0.1, 0.9, 0.1, 0.9], [0.9, 0.9, 0.9, 0.9]]})
    )
    drafter = build_drafter(f"nested:{tmp_path / 'nested'}", "chain:3")
    drafter.bind(llm.engine.target.info)
    assert isinstance(drafter, NestedDrafter)
    assert drafter.ladder.cost == drafter.cost
    assert drafter.ladder.acceptance == pytest.approx(0.9)
