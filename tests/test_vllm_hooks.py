"""What is taken from vLLM: all of it by name and signature, or nothing; and what the hooks then do, on doubles."""

from __future__ import annotations

import logging
import random
import sys
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from branchwise.errors import UnknownName, UsageError
from branchwise.integrations.vllm import Proposer, hooks, plugin, register
from branchwise.integrations.vllm.hooks import HOOKED, READ, RUNNER, install, why_not
from branchwise.integrations.vllm.settings import Settings
from branchwise.integrations.vllm.verify import generator_seed
from tests.vllm_doubles import VOCABULARY, config, install_doubles

Runner = Any
LENGTH = 20


@pytest.fixture
def runner_class(monkeypatch: pytest.MonkeyPatch) -> Runner:
    return install_doubles(monkeypatch)


@pytest.fixture
def table() -> torch.Tensor:
    torch.manual_seed(4)
    return 2 * torch.randn(VOCABULARY, VOCABULARY)


def greedy(table: torch.Tensor, prompt: list[int], length: int = LENGTH) -> list[int]:
    text = list(prompt)
    for _ in range(length):
        text.append(int(table[text[-1]].argmax()))
    return text[len(prompt) :]


def write(runner: Runner, names: list[str], length: int = LENGTH) -> dict[str, list[int]]:
    while any(len(runner.requests[name].output_token_ids) < length for name in names):
        runner.step([name for name in names if len(runner.requests[name].output_token_ids) < length])
    return {name: runner.requests[name].output_token_ids[:length] for name in names}


# All or nothing


def test_the_hooks_are_put_in_place_once(runner_class: Runner) -> None:
    assert install()
    wrapped = runner_class._sample
    assert wrapped.__wrapped__ is not None
    assert install()
    assert runner_class._sample is wrapped


@pytest.mark.parametrize("name", [*HOOKED, *READ])
def test_a_missing_name_leaves_everything_alone(
    name: str, runner_class: Runner, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    before = dict(vars(runner_class))
    original = hooks.find
    monkeypatch.setattr(hooks, "find", lambda asked: original("vllm:gone") if asked == name else original(asked))
    with caplog.at_level(logging.WARNING):
        assert not install()
        assert not install()
    assert [name in record.getMessage() for record in caplog.records] == [True]
    assert dict(vars(runner_class)) == before


@pytest.mark.parametrize("name", HOOKED)
def test_another_signature_leaves_everything_alone(
    name: str, runner_class: Runner, monkeypatch: pytest.MonkeyPatch
) -> None:
    before = dict(vars(runner_class))
    original = hooks.find

    def another(asked: str) -> Any:
        return (lambda self, something_else: None) if asked == name else original(asked)

    monkeypatch.setattr(hooks, "find", another)
    assert "something_else" in (why_not() or "")
    assert not install()
    assert dict(vars(runner_class)) == before


@pytest.mark.parametrize("version", ["0.31.2", "0.33.0", "1.0.0"])
def test_an_unknown_version_is_left_alone_and_still_drafted_for(
    version: str, runner_class: Runner, table: torch.Tensor, caplog: pytest.LogCaptureFixture
) -> None:
    """Without hooks the proposer knows rows and tokens alone."""
    vars(sys.modules["vllm"])["__version__"] = version
    with caplog.at_level(logging.WARNING):
        proposer = Proposer(config(draft="suffix", floor=0.0))
        Proposer(config())
    assert [version in record.getMessage() for record in caplog.records] == [True]
    assert not proposer.hooked
    runner = runner_class(proposer, table)
    for name, prompt in (("a", [1, 2, 1, 2]), ("b", [3, 3, 3])):
        runner.add(name, prompt)
    written = write(runner, ["a", "b"])
    assert written == {"a": greedy(table, [1, 2, 1, 2]), "b": greedy(table, [3, 3, 3])}


def test_a_build_of_a_tested_version_is_known(runner_class: Runner) -> None:
    vars(sys.modules["vllm"])["__version__"] = "0.32.0+cpu"
    assert why_not() is None


# The entry point


@pytest.fixture
def no_finders() -> Iterator[None]:
    before = list(sys.meta_path)
    yield
    sys.meta_path[:] = before


def test_the_entry_point_waits_for_the_runner(
    runner_class: Runner, monkeypatch: pytest.MonkeyPatch, no_finders: None
) -> None:
    monkeypatch.delitem(sys.modules, RUNNER)
    register()
    register()
    assert sum(isinstance(finder, plugin.AfterImport) for finder in sys.meta_path) == 1


def test_the_hooks_come_right_behind_the_import(
    tmp_path: Any, monkeypatch: pytest.MonkeyPatch, no_finders: None
) -> None:
    (tmp_path / "late_module.py").write_text("value = 1\n")
    monkeypatch.syspath_prepend(tmp_path)
    seen: list[int] = []
    sys.meta_path.insert(0, plugin.AfterImport("late_module", lambda: seen.append(sys.modules["late_module"].value)))
    import late_module  # type: ignore[import-not-found]

    assert seen == [1]
    assert late_module.__spec__.loader is not None
    monkeypatch.delitem(sys.modules, "late_module")
    import late_module

    assert seen == [1]


@pytest.mark.parametrize("where", ["at once", "behind the import"])
def test_the_entry_point_never_raises(
    where: str, runner_class: Runner, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture, tmp_path: Any,
    no_finders: None,
) -> None:  # fmt: skip
    def broken() -> bool:
        raise RuntimeError("a bug of ours")

    with caplog.at_level(logging.WARNING):
        if where == "at once":
            monkeypatch.setattr(plugin, "install", broken)
            register()
        else:
            (tmp_path / "later_module.py").write_text("")
            monkeypatch.syspath_prepend(tmp_path)
            sys.meta_path.insert(0, plugin.AfterImport("later_module", broken))
            __import__("later_module")
    assert ["a bug of ours" in record.getMessage() for record in caplog.records] == [True]


def test_a_runner_of_others_is_served_by_vllm_alone(runner_class: Runner, table: torch.Tensor) -> None:
    install()

    class Others:
        def propose(self, sampled_token_ids: list[list[int]], *rest: Any, **named: Any) -> list[list[int]]:
            return [[int(table[sampled[-1]].argmax())] for sampled in sampled_token_ids]

    runner = runner_class(Others(), table)
    runner.add("a", [1])
    runner.step(["a"])
    assert len(runner.step(["a"])["a"]) == 1, "the double rejects every draft, however right"


# Settings


@pytest.mark.parametrize(
    ("options", "match"),
    [
        ({"drafts": "memories"}, "Did you mean 'draft'"),
        ({"draft": "memoris"}, "Did you mean 'memories'"),
        ({"draft": "model:org/small"}, "only drafters without a model"),
        ({"draft": "none"}, "only drafters without a model"),
        ({"chain": "tree"}, "best, drawn"),
        ({"share": "al"}, "Did you mean 'all'"),
        ({"floor": 2.0}, "below 1"),
        ({"batch": -2}, "at least -1"),
        ({"tenants": True}, "of type int"),
    ],
)
def test_a_wrong_option_is_refused_at_start(options: dict[str, Any], match: str, runner_class: Runner) -> None:
    with pytest.raises((UsageError, UnknownName), match=match):
        Proposer(config(**options))


def test_a_device_is_not_kept_waiting_for_a_large_batch() -> None:
    assert Settings().most_requests("cpu") == Settings(batch=0).most_requests("cuda") == 0
    assert 0 < Settings().most_requests("cuda") < 64
    assert Settings(batch=3).most_requests("cuda") == Settings(batch=3).most_requests("cpu") == 3


def test_options_of_others_are_none_of_ours() -> None:
    assert Settings.read({"something": {"else": 1}}) == Settings.read(None) == Settings()


# Steps


DRAFTERS = ["memories", "recycle", "suffix", "ngram", "stand", "trigram", "fused:recycle+ngram"]


@pytest.mark.parametrize("draft", DRAFTERS)
@pytest.mark.parametrize("chain", ["best", "drawn"])
def test_greedy_texts_are_those_of_the_model_in_batches_that_change(
    draft: str, chain: str, runner_class: Runner, table: torch.Tensor
) -> None:
    """Requests come, pause with drafts, are cut short, and end in mid-draft."""
    proposer = Proposer(config(draft=draft, chain=chain, share="all", floor=0.0))
    runner = runner_class(proposer, table)
    prompts = {"a": [1, 2, 1, 2, 1], "b": [5], "c": [3, 4, 3, 4], "gone": [6, 6, 6]}
    for name, prompt in prompts.items():
        runner.add(name, prompt, max_tokens=40)
    accepted = 0
    for names, most in ((["a", "gone"], 9), (["b", "gone", "a"], 9), (["c"], 9), (["a", "gone"], 1), (["c", "b"], 2)):
        accepted += sum(len(new) - 1 for new in runner.step(names, most=most).values())
    runner.step(["a"], finished=("gone",))
    assert "gone" not in proposer.texts.open
    assert write(runner, ["a", "b", "c"]) == {name: greedy(table, prompts[name]) for name in "abc"}
    runner._update_states(type("Output", (), {"finished_req_ids": set("abc")}))
    assert not proposer.texts.open


def test_drafters_learn_from_the_logits_of_the_pass(runner_class: Runner, table: torch.Tensor) -> None:
    """Nothing repeats in a first text, and the second has all of it ahead: recycle knows the table by then."""
    proposer = Proposer(config(draft="recycle", share="all", floor=0.0))
    runner = runner_class(proposer, table)
    runner.add("a", [1])
    write(runner, ["a"])
    runner.add("b", [1])
    runner.step(["b"])
    assert len(runner.step(["b"])["b"]) == 5


@pytest.mark.parametrize(("share", "knows"), [("request", False), ("tenant", True), ("all", True)])
def test_what_is_learned_stays_with_those_who_share_it(
    share: str, knows: bool, runner_class: Runner, table: torch.Tensor
) -> None:
    proposer = Proposer(config(draft="recycle", share=share, floor=0.0))
    runner = runner_class(proposer, table)

    def first_draft(name: str, tenant: str | None) -> list[int]:
        runner.add(name, [1], extra_args=None if tenant is None else {"branchwise_tenant": tenant})
        runner.step([name])
        drafted: list[int] = list(runner.drafts[name])
        write(runner, [name])
        return drafted

    for name in ("learn", "more"):
        first_draft(name, "acme")
    truth = greedy(table, [1], 5)[1:]
    assert (first_draft("same", "acme") == truth) == knows
    if share != "all":
        assert first_draft("other", "umbrella") != truth
        assert first_draft("nobody", None) != truth


def test_tenants_that_wrote_nothing_for_longest_are_forgotten(runner_class: Runner, table: torch.Tensor) -> None:
    proposer = Proposer(config(share="tenant", tenants=2))
    runner = runner_class(proposer, table)
    for name in ("one", "two", "one again", "three"):
        runner.add(name, [1], extra_args={"branchwise_tenant": name.split()[0]})
        runner.step([name])
    assert list(proposer.texts.drafters.tenants) == ["one", "three"]


def test_q_is_handed_over_for_what_was_drawn(runner_class: Runner, table: torch.Tensor) -> None:
    proposer = Proposer(config(draft="recycle", chain="drawn", share="all", floor=0.0))
    runner = runner_class(proposer, table)
    runner.add("learn", [1], temperature=1.0)
    write(runner, ["learn"])
    for name, params in (
        ("drawn", {"temperature": 1.0}),
        ("greedy", {}),
        ("seeded", {"temperature": 1.0, "seed": 3}),
        ("bound", {"temperature": 1.0, "structured_outputs": object()}),
    ):
        runner.add(name, [1, 2], **params)
    names = ["drawn", "greedy", "seeded", "bound"]
    runner.step(names)
    assert [proposer.has_drawn(name) for name in names] == [True, False, False, False]
    drafts = {name: list(runner.drafts[name]) for name in names}
    q, start = runner._draft_probs, {name: row for row, name in enumerate(runner._draft_prob_req_ids)}
    for name in names:
        rows = q[start[name], : len(drafts[name])]
        assert torch.allclose(rows.sum(dim=1), torch.ones(len(rows)))
        certain = bool((rows.amax(dim=1) == 1).all())
        assert certain == (name != "drawn")
        assert all(rows[place, token] > 0 for place, token in enumerate(drafts[name]))
    runner.step(names)
    assert runner.seen_q is not None


@pytest.mark.parametrize("draft", DRAFTERS)
def test_ranks_draw_the_same_chains_whatever_chance_is_around_them(
    draft: str, runner_class: Runner, table: torch.Tensor
) -> None:
    """Ranks of a tensor-parallel group share the draws of vLLM's sampler and nothing else."""

    def drafts(rank: int) -> list[Any]:
        proposer = Proposer(config(draft=draft, chain="drawn", share="all", floor=0.0))
        propose, found = proposer.propose, list[Any]()

        def noting(*given: Any, **named: Any) -> list[list[int]]:
            random.seed(rank)
            with torch.random.fork_rng():
                torch.manual_seed(rank)
                found.append(propose(*given, **named))
            return found[-1]  # type: ignore[no-any-return]

        proposer.propose = noting  # type: ignore[method-assign]
        torch.manual_seed(5)
        runner = runner_class(proposer, table)
        names = ["a", "b", "c"]
        for name in names:
            runner.add(name, [1, 2, 1, 2, 1], temperature=1.0, max_tokens=40)
        for _ in range(8):
            runner.step(names)
        return found

    first = drafts(1)
    assert first == drafts(2)
    assert any(chain for step in first for chain in step)


def law_of(runner: Runner, names: list[str]) -> torch.Tensor:
    """How often the second token of an answer was which, after [1] was answered with its most probable token."""
    counts = torch.zeros(VOCABULARY, VOCABULARY)
    for name in names:
        first, second = runner.requests[name].output_token_ids[:2]
        counts[first, second] += 1
    return counts


@pytest.mark.parametrize("chain", ["best", "drawn"])
@pytest.mark.parametrize("temperature", [0.6, 1.4])
def test_sampled_tokens_have_the_law_of_the_model_beside_greedy_ones(
    chain: str, temperature: float, runner_class: Runner, table: torch.Tensor
) -> None:
    """The temperature of drafts is never written by the double's `expand_batch_to_tokens`, as on the CPU."""
    torch.manual_seed(8)
    runner = runner_class(Proposer(config(draft="recycle", chain=chain, share="all", floor=0.0)), table)
    names = [f"{number}" for number in range(400)]
    for name in names:
        runner.add(name, [1], temperature=0.0 if name.endswith("7") else temperature)
    for start in range(0, len(names), 60):
        batch = names[start : start + 60]
        runner.step(batch)
        write(runner, batch, 2)
    sampled = [name for name in names if not name.endswith("7")]
    probs = (table.double() / temperature).softmax(dim=-1)
    expected = len(sampled) * probs[1][:, None] * probs
    counts = law_of(runner, sampled).double()
    large = expected >= 5
    statistic = ((counts - expected) ** 2 / expected)[large].sum() + (
        (counts[~large].sum() - expected[~large].sum()) ** 2 / expected[~large].sum()
    )
    cells = int(large.sum())
    assert float(statistic) < cells + 4.5 * (2 * cells) ** 0.5
    assert all(runner.requests[name].output_token_ids[:2] == greedy(table, [1], 2) for name in names if name[-1] == "7")


def test_a_step_without_drafts_survives_top_k(runner_class: Runner, table: torch.Tensor, caplog: Any) -> None:
    with caplog.at_level(logging.INFO):
        runner = runner_class(Proposer(config(floor=0.0)), table)
        runner.add("a", [1], temperature=1.0, top_k=2)
        assert len(runner.step(["a"])["a"]) == 1
    assert any("steps without drafts" in record.getMessage() for record in caplog.records)


@pytest.mark.parametrize("draft", ["memories", "ngram"])
def test_seeded_texts_depend_on_seed_and_prompt_alone(draft: str, runner_class: Runner, table: torch.Tensor) -> None:
    def text(options: dict[str, Any], beside: int) -> list[int]:
        runner = runner_class(Proposer(config(**options)), table)
        runner.add("a", [1, 2, 1, 2], temperature=0.9, seed=12)
        others = [f"other {number}" for number in range(beside)]
        for name in others:
            runner.add(name, [3], temperature=1.0)
        return write(runner, [*others, "a"])["a"]

    truth = text({"floor": 0.999}, 0)
    assert text({"draft": draft, "floor": 0.0, "share": "all"}, 0) == truth
    assert text({"draft": draft, "floor": 0.0, "share": "all", "chain": "drawn"}, 3) == truth
    assert generator_seed(12, 4) != generator_seed(12, 5) != generator_seed(13, 5)


def test_vllm_verifies_if_it_is_asked_to(runner_class: Runner, table: torch.Tensor) -> None:
    runner = runner_class(Proposer(config(draft="recycle", verify="vllm", share="all", floor=0.0)), table)
    runner.add("a", [1])
    assert write(runner, ["a"]) == {"a": greedy(table, [1])}
    assert len(runner.step(["a"])["a"]) == 1, "the double rejects every draft"


def test_nothing_is_drafted_beyond_a_batch_or_an_answer(runner_class: Runner, table: torch.Tensor) -> None:
    runner = runner_class(Proposer(config(draft="recycle", share="all", floor=0.0, batch=1)), table)
    for name in "ab":
        runner.add(name, [1], max_tokens=12)
    runner.step(["a"])
    runner.step(["a", "b"])
    assert not runner.drafts["a"]
    assert not runner.drafts["b"]
    while len(runner.requests["a"].output_token_ids) < 12:
        assert len(runner.requests["a"].output_token_ids) + len(runner.drafts["a"]) < 12
        runner.step(["a"])


def test_a_prompt_that_is_no_tokens_is_not_drafted_for(runner_class: Runner, table: torch.Tensor) -> None:
    proposer = Proposer(config(floor=0.0))
    runner = runner_class(proposer, table)
    runner.add("a", [1])
    runner.step(["a"])
    proposer.expect(["a"], {"a": type("Request", (), {"prompt_token_ids": None})}, None)
    batch = runner.input_batch
    assert proposer.propose([[1]], batch.num_tokens_no_spec, batch.token_ids_cpu) == [[]]


def test_the_chain_that_is_worth_most_is_not_the_most_probable_first_token() -> None:
    from branchwise.backends.base import TargetInfo
    from branchwise.core.sequence import SequenceState
    from branchwise.draft.builder import Candidate
    from branchwise.integrations.vllm.chains import best_chain
    from branchwise.integrations.vllm.texts import build_lookup_drafter

    drafter = build_lookup_drafter("suffix")
    drafter.bind(TargetInfo("double", VOCABULARY, 64, 8, 1))
    paths: dict[Any, list[Candidate]] = {
        (): [Candidate(1, 0.5, "dead end"), Candidate(2, 0.4, "long")],
        "dead end": [],
        **{"long" + "." * n: [Candidate(3, 0.9, "long" + "." * (n + 1))] for n in range(8)},
    }
    look: Callable[[Any], list[Candidate]] = paths.__getitem__
    drafter.locate, drafter.candidates = lambda sequence: (), look  # type: ignore[method-assign]
    assert best_chain(drafter, SequenceState([7]), 4, 0.0).tokens == [2, 3, 3, 3]
    assert best_chain(drafter, SequenceState([7]), 4, 0.35).tokens == [2, 3]
    assert best_chain(drafter, SequenceState([7]), 4, 0.45).tokens == [1]
    assert best_chain(drafter, SequenceState([7]), 4, 0.6).tokens == []
