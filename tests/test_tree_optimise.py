"""Sequoia's dynamic programme: the best shape of all, counted acceptance, and the command that writes a template."""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Sequence
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from tokenizers import Tokenizer
from tokenizers.models import WordLevel
from tokenizers.pre_tokenizers import Whitespace
from transformers import LlamaConfig, PreTrainedTokenizerFast
from typer.testing import CliRunner

from branchwise.backends.base import Needs, Scored
from branchwise.backends.transformers.target import TransformersTarget
from branchwise.cli import app
from branchwise.core.topology import topology
from branchwise.draft import TREES, build_drafter
from branchwise.draft.base import Drafter
from branchwise.draft.policies.template import SHAPES, TYPICAL, read_template
from branchwise.engine import Engine
from branchwise.errors import PairingError, UsageError
from branchwise.llm import LLM
from branchwise.testing import ToyTarget
from branchwise.tune.sequoia import Acceptance, Shape, Shapes, Witness, best_size, measure_acceptance, shares
from branchwise.verify import VERIFIERS, Verdict
from tests.conformance.architectures import COMMON, build

Nested = tuple["Nested", ...]
"""a tree as the trees below its root, in order"""


def best_shape(rates: Sequence[float], nodes: int, depth: int) -> Shape:
    return Shapes(rates, nodes, depth).best(nodes, depth)


@cache
def forests(nodes: int, depth: int) -> list[Nested]:
    """All ordered lists of trees with so many nodes in all and at most so many levels."""
    if nodes == 0:
        return [()]
    if depth == 0:
        return []
    return [
        (first, *rest)
        for size in range(1, nodes + 1)
        for first in forests(size - 1, depth - 1)
        for rest in forests(nodes - size, depth)
    ]


def worth(tree: Nested, rates: list[float]) -> float:
    """What a step is expected to emit, by playing it: children are tried in order until one is accepted."""
    total, left = 1.0, 1.0
    for rate, child in zip(rates, tree, strict=False):
        total += left * rate * worth(child, rates)
        left *= 1 - rate
    return total


def nested(parents: tuple[int, ...], node: int = 0) -> Nested:
    return tuple(nested(parents, child) for child, parent in enumerate(parents) if parent == node and child)


def test_there_are_as_many_shapes_as_there_should_be() -> None:
    assert [len(forests(n, n)) for n in range(7)] == [1, 1, 2, 5, 14, 42, 132]  # Catalan numbers


rates_lists = st.lists(st.one_of(st.floats(0, 1), st.sampled_from([0.0, 0.5, 1.0])), min_size=1, max_size=4)


@given(rates_lists, st.integers(1, 7), st.integers(1, 5))
def test_no_shape_of_all_is_worth_more(rates: list[float], nodes: int, depth: int) -> None:
    found = best_shape(rates, nodes, depth)
    tree = nested(found.parents)
    every = [shape for n in range(nodes + 1) for shape in forests(n, depth)]
    assert tree in every
    assert worth(tree, rates) == pytest.approx(found.worth)
    assert found.worth == pytest.approx(max(worth(shape, rates) for shape in every))
    assert list(found.parents) == sorted(found.parents)
    assert max(map(len, topology(found.parents).children)) <= len(rates)


def test_shares_are_how_often_a_child_is_the_one_that_is_accepted() -> None:
    assert shares([0.5, 0.5, 1.0, 0.3]) == [0.5, 0.25, 0.25, 0.0]
    # A rate that is high after rejections must not count as if there had been none.
    assert best_shape([0.9, 0.9], 2, 2).parents == (-1, 0, 1)


def test_one_programme_knows_the_shapes_of_all_sizes() -> None:
    shapes = Shapes(TYPICAL, 12, 6)
    for nodes in range(1, 13):
        for depth in range(1, 7):
            assert shapes.best(nodes, depth) == best_shape(TYPICAL, nodes, depth)
            assert shapes.worth(nodes, depth) == shapes.best(nodes, depth).worth
    assert shapes.worth(3, 6) == pytest.approx(1 + 0.8 + 0.64 + 0.512)


def test_nodes_that_are_worth_nothing_are_left_out() -> None:
    assert best_shape([1.0, 0.5], 9, 3).parents == (-1, 0, 1, 2)
    assert best_shape([0.0], 9, 3).parents == (-1,)
    assert best_shape([0.4], 9, 1).parents == (-1, 0)


def test_the_named_shape_is_that_of_the_programme() -> None:
    assert SHAPES["sequoia-24"] == best_shape(TYPICAL, 24, 8).parents


@pytest.mark.parametrize(
    ("rates", "nodes", "depth"),
    [([], 3, 3), ([1.1], 3, 3), ([-0.1], 3, 3), ([math.nan], 3, 3), ([0.5], 0, 3), ([0.5], 3, 0)],
)
def test_rates_and_sizes_that_are_none_are_a_sentence(rates: list[float], nodes: int, depth: int) -> None:
    with pytest.raises(UsageError, match="at least"):
        best_shape(rates, nodes, depth)


# Size


def test_the_size_takes_the_least_time_for_a_token() -> None:
    shapes = Shapes(TYPICAL, 24, 8)

    def cost(nodes: int) -> float:
        return 1.0 if nodes <= 9 else 2.0 + 0.01 * nodes  # a cliff behind 9 nodes, the root included

    found = best_size(shapes, cost, 0.05)
    times = {(n, d): (cost(n + 1) + d * 0.05) / shapes.worth(n, d) for n in range(1, 25) for d in range(1, 9) if d <= n}
    assert found.seconds == pytest.approx(min(times.values()))
    assert found.nodes == 8
    assert found.worth == shapes.worth(found.nodes, found.depth)
    assert found.plain == 1.0
    assert best_size(shapes, lambda nodes: 1.0, 0.0).nodes == 24
    assert best_size(shapes, lambda nodes: 1.0, 0.0).depth == 8
    assert best_size(shapes, lambda nodes: 1.0, 0.9).depth < 4
    dear = best_size(shapes, lambda nodes: float(nodes), 0.5)
    assert (dear.nodes, dear.depth) == (1, 1)
    assert dear.seconds > dear.plain


# Acceptance


WORDS = ["<pad>", "</s>", *"abcdefgh"]


@pytest.fixture
def llm() -> LLM:
    words = Tokenizer(WordLevel({word: number for number, word in enumerate(WORDS)}, unk_token="<pad>"))
    words.pre_tokenizer = Whitespace()
    tokenizer = PreTrainedTokenizerFast(tokenizer_object=words, eos_token="</s>", pad_token="<pad>")
    model = build(LlamaConfig(**(COMMON | {"vocab_size": len(WORDS), "max_position_embeddings": 512})))
    target = TransformersTarget(model, slots=2, context=256)
    return LLM("tiny", model, tokenizer, Engine(target, build_drafter("none"), VERIFIERS.build("match")))


def counted(tree: str, verdicts: list[tuple[int, ...]], width: int) -> Witness:
    """What is counted where a tree of a spec meets these verdicts."""
    from branchwise.core.sampling import SamplingParams
    from branchwise.core.sequence import SequenceState
    from branchwise.draft.base import Budget

    witness = Witness(build_drafter("disturbed:0", tree), width)
    target = ToyTarget(6)
    witness.bind(target.info)
    sequence = SequenceState([1, 2], SamplingParams(temperature=1.0, seed=1))
    target.open(sequence)
    for path in verdicts:
        witness.draft([sequence], [Budget(99, 9)])
        witness.update([sequence], Scored(torch.zeros(1, len(witness.drafter._drafted[0]), 4)), [Verdict(path, 0)])
    return witness


def test_children_are_counted_until_one_is_accepted() -> None:
    # rsd-c:3,2: the root 0 has 1, 2, 3; those have 4 and 5, 6 and 7, 8 and 9.
    nothing = counted("rsd-c:3,2", [(0,)], 4)
    assert (nothing.tried, nothing.accepted) == ([1, 1, 1, 0], [0, 0, 0, 0])
    second = counted("rsd-c:3,2", [(0, 2)], 4)  # the second is accepted, the third never judged, both below rejected
    assert (second.tried, second.accepted) == ([2, 2, 0, 0], [0, 1, 0, 0])
    deep = counted("rsd-c:3,2", [(0, 3, 8)], 4)
    assert (deep.tried, deep.accepted) == ([2, 1, 1, 0], [1, 0, 1, 0])
    both = counted("rsd-c:3,2", [(0, 2), (0, 3, 8)], 4)
    assert (both.tried, both.accepted) == ([4, 3, 1, 0], [1, 1, 1, 0])
    assert Acceptance(tuple(both.accepted), tuple(both.tried)).rates == [0.25, 1 / 3, 1.0, 0.0]


def test_a_witness_passes_on_whatever_the_engine_asks_of_its_drafter() -> None:
    asked = {name for name, member in vars(Drafter).items() if callable(member) or isinstance(member, property)}
    assert {"bind", "start", "draft", "draft_next", "needs"} <= asked
    assert {name for name in asked if not name.startswith("__")} <= set(vars(Witness))
    drafter, target = build_drafter("recycle", "rsd-c:2"), ToyTarget(6).info
    witness = Witness(drafter, 2)
    witness.bind(target)
    assert drafter.target is target  # type: ignore[attr-defined]
    assert witness.needs == drafter.needs != Needs()
    assert (witness.name, witness.draw, witness.learns) == (drafter.name, drafter.draw, True)


def test_acceptance_is_counted_on_texts_and_follows_the_skill_of_the_drafter(llm: LLM) -> None:
    def rates(sigma: float, temperature: float = 1.0) -> list[float]:
        found = measure_acceptance(
            llm,
            build_drafter(f"disturbed:{sigma}", "rsd-c:3,3"),
            [[2 + n, 2] for n in range(4)],
            width=3,
            temperature=temperature,
            max_new_tokens=12,
        )
        assert found.tried[0] > 10
        assert found.tried[1] == found.tried[0] - found.accepted[0]
        return found.rates

    assert rates(0.0) == [1.0, 0.0, 0.0]  # the target's own distribution is accepted at once
    assert rates(0.0, temperature=0.0) == [1.0, 0.0, 0.0]
    assert 1 > rates(1.0)[0] > rates(5.0)[0] > 0
    assert llm.engine.target.free_slots == 2


def test_what_draws_no_siblings_is_refused(llm: LLM) -> None:
    for drafter in (
        build_drafter("ngram"),
        build_drafter("disturbed", "paths:2x2"),
        build_drafter("disturbed", "topk:4"),
    ):
        with pytest.raises(PairingError, match="draws no siblings one after the other"):
            measure_acceptance(llm, drafter, [[2, 3]], width=2)
    with pytest.raises(UsageError, match="no prompt"):
        measure_acceptance(llm, build_drafter("disturbed", "rsd-c:2"), [], width=2)


def test_slots_are_given_back_where_a_drafter_fails(llm: LLM) -> None:
    drafter = build_drafter("disturbed", "rsd-c:2")
    drafter.draft = lambda sequences, budgets: 1 / 0  # type: ignore[method-assign, assignment, return-value]
    with pytest.raises(ZeroDivisionError):
        measure_acceptance(llm, drafter, [[2, 3]], width=2)
    assert llm.engine.target.free_slots == 2


# The command


@pytest.fixture
def run(llm: LLM, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[..., Any]:
    monkeypatch.setattr("branchwise.llm.load", lambda model, **options: llm)
    monkeypatch.setenv("BRANCHWISE_CACHE", str(tmp_path / "cache"))
    prompts = tmp_path / "prompts.txt"
    prompts.write_text("a b c a\nd e f\n")
    short = ["--prompts", str(prompts), "-n", "12", "--width", "3", "--nodes", "7", "--depth", "3"]
    return lambda *words: CliRunner().invoke(app, ["tree", "optimise", *short, *words])


def test_the_command_writes_a_template_that_a_tree_can_have(run: Callable[..., Any], tmp_path: Path) -> None:
    file = tmp_path / "tree.json"
    done = run("--draft", "disturbed:1", "--fill", "--out", str(file))
    assert done.exit_code == 0, done.output + str(done.exception)
    assert done.stderr == ""
    parents = read_template(file)
    assert 2 <= len(parents) <= 8
    assert TREES.build(f"template:{file}").shape.parents == parents
    assert "child 1: " in done.stdout
    assert f"--tree template:{file}" in done.stdout
    assert "ms a token" not in done.stdout
    note = json.loads(file.read_text())["note"]
    assert note.startswith("tiny drafted for by disturbed:1 at temperature 1: ")
    again = run("--draft", "disturbed:1", "--fill", "--out", str(file))  # a template may be replaced
    assert again.exit_code == 0
    assert read_template(file) == parents


def test_without_a_file_the_template_itself_is_printed_and_nothing_else(run: Callable[..., Any]) -> None:
    done = run("--draft", "disturbed:0", "--fill")
    assert done.exit_code == 0, done.output + str(done.exception)
    found = json.loads(done.stdout)
    assert found["branchwise"] == "template"
    assert found["parents"] == [-1, 0, 1, 2]  # every first child is accepted: one chain of the depth that is allowed


def test_without_fill_the_size_is_what_passes_cost_here(
    run: Callable[..., Any], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from branchwise import tune
    from branchwise.tune import Costs, DraftCost, Point
    from branchwise.tune.costs import key_of

    asked: dict[str, Any] = {}

    def measured(target: Any, **options: Any) -> Costs:
        asked.update(options)
        points = [Point(n, 1.0 if n <= 2 else 50.0, 1.0, 50.0) for n in (1, 2, 3, 8)]
        return Costs(tuple(points), (), key_of(target, "tiny", 1, 8, (1, 2, 3, 8), 3), "now")

    monkeypatch.setattr(tune, "measure", measured)
    monkeypatch.setattr(tune, "measure_drafter", lambda *given, **options: DraftCost("d", 8.0, 8.0, 8.0, 4.0, 9))
    done = run("--draft", "disturbed:0", "--out", str(tmp_path / "tree.json"))
    assert done.exit_code == 0, done.output + str(done.exception)
    assert asked["nodes"] == [1, 2, 4, 8]
    assert read_template(tmp_path / "tree.json") == (-1, 0)
    # A pass of the target takes 1 s, one level of the draft 8 / 4 s, and two tokens come of it.
    assert "1500.00 ms a token expected, 1000.00 without a draft." in done.stdout
    assert "makes nothing faster here" in done.stdout


def test_it_times_for_real(run: Callable[..., Any]) -> None:
    done = run("--draft", "disturbed:1", "--nodes", "3", "-n", "6")
    assert done.exit_code == 0, done.output + str(done.exception)
    assert 2 <= len(json.loads(done.stdout)["parents"]) <= 4


@pytest.mark.parametrize(
    ("words", "sentence"),
    [
        ([], "Name what drafts"),
        (["--draft", "disturbed", "--draft-model", "x"], "one of the two"),
        (["--draft", "none"], "'none' draws from no distribution"),
        (["--draft", "disturbd"], "Did you mean 'disturbed'"),
        (["--draft", "disturbed:-1"], "sigma of at least 0"),
        (["--draft", "disturbed", "--nodes", "0"], "nodes must be at least 1"),
        (["--draft", "disturbed", "--depth", "0"], "depth must be at least 1"),
        (["--draft", "disturbed", "--width", "0"], "width must be at least 1"),
        (["--draft", "disturbed", "-n", "0"], "max-new-tokens must be at least 1"),
        (["--draft", "disturbed", "-t", "-1"], "temperature"),
        (["--draft", "disturbed", "--nodes", "500"], "at most 127 nodes below the root"),
        (["--draft", "disturbed", "--prompts", "nowhere.txt"], "cannot be read"),
        (["--draft", "disturbed", "--out", "tree.txt"], "A template is a JSON file, such as tree.json"),
        (["--draft", "disturbed", "--out", "nowhere/tree.json"], "cannot be written to nowhere/tree.json"),
    ],
)
def test_a_mistake_in_the_request_is_a_sentence(run: Callable[..., Any], words: list[str], sentence: str) -> None:
    done = run(*words)
    assert done.exit_code != 0
    assert sentence in str(done.exception)
    assert done.stdout == ""


def test_what_is_no_template_is_never_overwritten(run: Callable[..., Any], tmp_path: Path) -> None:
    file = tmp_path / "mine.json"
    file.write_text("{}")
    done = run("--draft", "disturbed", "--out", str(file))
    assert "exists and is no template" in str(done.exception)
    assert file.read_text() == "{}"
