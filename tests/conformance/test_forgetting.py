"""One suite for everything that learns: what has forgotten its texts drafts like one that never saw them."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import pytest

from branchwise.control.costs import PassCostModel
from branchwise.core.sampling import SamplingParams
from branchwise.draft.base import Drafter
from branchwise.draft.head.trees import paced
from branchwise.draft.policies import adaptive
from branchwise.engine import Engine, Request
from branchwise.engine.warmup import memory_of
from branchwise.methods import AUTO, PRESETS
from branchwise.testing import ToyTarget
from branchwise.verify import VERIFIERS, Verifier
from tests.conformance.test_drafters import SHIPPED, VOCABULARY

PROMPTS = [(1, 2, 3, 1, 2), (4,), (5, 0, 5, 0, 5, 0, 5)]
PRESETS_ALONE = [name for name, method in PRESETS.items() if not method.blanks]


class Measured(PassCostModel):
    """Of a machine on which all passes of a size take the same time, which is known: clocks decide nothing."""

    knows_plain = True  # type: ignore[assignment]
    plain_seconds = 1.0  # type: ignore[assignment]

    def record(self, rows: int, seconds: float) -> None:
        pass

    def knows(self, rows: int) -> bool:
        return True

    def costs(self, wanted: Sequence[int], *, hoped: bool = False) -> list[float]:
        return [1 + rows / 40 for rows in wanted]

    def unclear(self, rows: int, speed: float) -> bool:
        return False


@pytest.fixture(autouse=True)
def _measured(monkeypatch: pytest.MonkeyPatch) -> None:
    for module in (adaptive, paced):
        monkeypatch.setattr(module, "cost_model_of", lambda target, size: Measured())


def of_drafter(name: str) -> tuple[Drafter, Verifier]:
    drafter = SHIPPED[name]({})
    fitting = next(name for name in VERIFIERS if drafter.draw in VERIFIERS.build(name).accepts)
    return drafter, VERIFIERS.build(fitting)


MAKERS: dict[str, Callable[[], tuple[Drafter, Verifier]]] = {
    **{f"drafter {name}": lambda name=name: of_drafter(name) for name in SHIPPED if name != AUTO},  # type: ignore[misc]
    **{f"preset {name}": PRESETS[name].build for name in PRESETS_ALONE},
}
"""all but the one that chooses among several of them by how long they take"""


def written(engine: Engine, temperature: float) -> list[tuple[Any, ...]]:
    """The texts, and what was drafted and accepted on the way."""
    sampling = SamplingParams(temperature, seed=3)
    made = [engine.submit(Request(prompt, sampling, max_new_tokens=24)) for prompt in PROMPTS]
    while engine.busy:
        engine.step()
    stats = [generation.stats for generation in made]
    return [
        (generation.token_ids, one.steps, one.drafted_tokens, one.accepted_by_source)
        for generation, one in zip(made, stats, strict=True)
    ]


@pytest.mark.parametrize("temperature", [0.0, 0.9])
@pytest.mark.parametrize("name", MAKERS)
def test_what_has_forgotten_drafts_as_at_first(name: str, temperature: float) -> None:
    engine = Engine(ToyTarget(VOCABULARY, slots=3), *MAKERS[name]())
    forget = memory_of(engine)
    first = written(engine, temperature)
    forget()
    assert written(engine, temperature) == first


def test_what_learns_drafts_otherwise_if_it_does_not_forget() -> None:
    """So the suite can fail."""
    engine = Engine(ToyTarget(VOCABULARY, slots=3), *of_drafter("recycle"))
    assert written(engine, 0.0) != written(engine, 0.0)
