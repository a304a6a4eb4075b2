"""One suite for every registered drafter: trees within the budget, text as plain decoding writes it."""

from __future__ import annotations

import random
from collections.abc import Callable
from pathlib import Path
from tempfile import TemporaryDirectory

import pytest

from branchwise.backends.base import TargetInfo
from branchwise.core.sampling import SamplingParams
from branchwise.core.sequence import SequenceState
from branchwise.draft import DRAFTERS, TREES, build_drafter
from branchwise.draft.auto import AutoDrafter
from branchwise.draft.base import Budget, Drafter
from branchwise.draft.head.drafter import HeadDrafter
from branchwise.draft.model.draft_model import Weights
from branchwise.draft.model.drafter import ModelDrafter
from branchwise.draft.nested.drafter import NestedDrafter
from branchwise.engine import Engine, Request
from branchwise.testing import ContrarianDrafter, RandomDrafter, ToyTarget, TruthDrafter
from branchwise.verify import VERIFIERS, Verifier, check_pairing
from tests.heads import Contrary, Knowing, Truth, random_head
from tests.test_index import write
from tests.test_model_drafter import tiny

VOCABULARY = 6
PROMPTS = [(1, 2, 3, 1, 2), (4,), (5, 0, 5, 0, 5, 0, 5)]
LENGTH = 50
INFO = ToyTarget(VOCABULARY).info

DOUBLES: dict[str, Callable[[Truth], Drafter]] = {
    "no skill": lambda truth: RandomDrafter(VOCABULARY),
    "truth": lambda truth: TruthDrafter(truth, VOCABULARY, decoys=1),
    "adversarial": lambda truth: ContrarianDrafter(truth, VOCABULARY),
    "head, truth": lambda truth: Knowing(random_head(INFO), truth, TREES.build("paths:2x3")),
    "head, adversarial": lambda truth: Contrary(random_head(INFO), truth, TREES.build("paths:2x3")),
}


class AnyModel(ModelDrafter):
    """A random draft model with as many tokens as the target."""

    def __init__(self) -> None:
        super().__init__(Weights("tiny", tiny(1, layers=1), None), tree=TREES.build("paths:2x3"))

    def bind(self, target: TargetInfo) -> None:
        self.model = Weights("tiny", tiny(1, layers=1, vocabulary=target.vocabulary), None)
        super().bind(target)


class AnyNested(NestedDrafter):
    """A random draft model with two exits and as many tokens as the target."""

    def __init__(self) -> None:
        super().__init__(self._weights(VOCABULARY), threshold=0.5, tree=TREES.build("paths:2x3"))

    def bind(self, target: TargetInfo) -> None:
        self.model = self._weights(target.vocabulary)
        super().bind(target)

    @staticmethod
    def _weights(vocabulary: int) -> Weights:
        model = tiny(1, layers=2, vocabulary=vocabulary)
        model.config.exits = [1, 2]
        return Weights("tiny", model, None)


def any_index() -> Drafter:
    """What random texts hold; the files are gone when it drafts, but they are mapped."""
    rng = random.Random(0)
    with TemporaryDirectory() as folder:
        texts = [[rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 60))] for _ in range(40)]
        write(Path(folder) / "index", texts, VOCABULARY, shard=1 << 9)
        return build_drafter(f"retrieval:{folder}/index")


def any_head() -> Drafter:
    """A random head that can propose four of the six tokens, and those of a prompt."""
    with TemporaryDirectory() as folder:
        random_head(INFO, table=4).save(Path(folder) / "head")
        return build_drafter(f"head:{folder}/head")


class AnyAuto(AutoDrafter):
    """With a random head and a random draft model."""

    def __init__(self) -> None:
        super().__init__()
        self._head = HeadDrafter(random_head(INFO, table=4))
        self._model = ModelDrafter(Weights("tiny", tiny(1, layers=1, vocabulary=VOCABULARY), None))


NOT_BY_NAME: dict[str, Callable[[], Drafter]] = {
    "auto": AnyAuto,
    "model": AnyModel,
    "nested": AnyNested,
    "retrieval": any_index,
    "head": any_head,
    "fused": lambda: build_drafter("fused:recycle+suffix+trigram"),
}
"""those that need something of the user"""

SHIPPED: dict[str, Callable[[Truth], Drafter]] = {
    name: lambda truth, name=name: NOT_BY_NAME.get(name, lambda: build_drafter(name))()  # type: ignore[misc]
    for name in DRAFTERS
}


def assert_writes_like_plain_decoding(make: Callable[[Truth], Drafter], verifier: Verifier) -> None:
    """Greedy with every verifier; sampled, seed for seed, with `match`, whose noise belongs to the position."""
    for temperature in (0.0, 0.9) if verifier.name == "match" else (0.0,):
        sampling = SamplingParams(temperature=temperature, seed=21)
        plain = run(build_drafter("none"), VERIFIERS.build("match"), sampling)
        assert run(make(plain), verifier, sampling) == plain


def run(drafter: Drafter, verifier: Verifier, sampling: SamplingParams) -> Truth:
    engine = Engine(ToyTarget(VOCABULARY, slots=2), drafter, verifier)
    generations = [engine.submit(Request(p, max_new_tokens=LENGTH, sampling=sampling)) for p in PROMPTS]
    while engine.busy:
        engine.step()
    return {prompt: generation.token_ids for prompt, generation in zip(PROMPTS, generations, strict=True)}


@pytest.mark.parametrize("verifier", list(VERIFIERS))
@pytest.mark.parametrize("name", [*SHIPPED, *DOUBLES])
def test_the_text_is_that_of_plain_decoding(name: str, verifier: str) -> None:
    make = (SHIPPED | DOUBLES)[name]
    rule = VERIFIERS.build(verifier)
    if make({}).draw not in rule.accepts:
        pytest.skip(f"{verifier} does not take trees drawn {make({}).draw.value}")
    assert_writes_like_plain_decoding(make, rule)


@pytest.mark.parametrize("name", SHIPPED)
def test_every_tree_starts_at_the_root_and_stays_within_the_budget(name: str) -> None:
    rng = random.Random(0)
    drafter, target = SHIPPED[name]({}), ToyTarget(VOCABULARY, slots=3)
    drafter.bind(target.info)
    target.require(drafter.needs)
    for _ in range(60):
        sequences = [SequenceState([rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 30))]) for _ in range(3)]
        budgets = [Budget(nodes=rng.randint(1, 12), depth=rng.randint(0, 6)) for _ in sequences]
        for sequence in sequences:
            drafter.start(sequence, target.open(sequence, drafter.needs.prefill_logits))
        trees = drafter.draft(sequences, budgets)
        for sequence in sequences:
            target.close(sequence)
            drafter.finish(sequence)
        assert len(trees) == 3
        for sequence, budget, tree in zip(sequences, budgets, trees, strict=True):
            assert int(tree.tokens[0]) == sequence.root
            assert len(tree) <= budget.nodes
            assert tree.depth <= budget.depth
            assert tree.draw is drafter.draw


@pytest.mark.parametrize("name", SHIPPED)
def test_some_verifier_fits(name: str) -> None:
    drafter = SHIPPED[name]({})
    fitting = [verifier for verifier in VERIFIERS if drafter.draw in VERIFIERS.build(verifier).accepts]
    assert fitting
    check_pairing(VERIFIERS.build(fitting[0]), drafter.draw, drafter.name)
