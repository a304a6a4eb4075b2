"""Methods by name: every preset can be built, fits its verifier, stays within 24 nodes, and stands in the README."""

from __future__ import annotations

import json
import sys
import warnings
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

from branchwise.cli import app, main
from branchwise.core.sampling import SamplingParams
from branchwise.core.tree import Draw
from branchwise.draft import build_drafter, build_policy
from branchwise.draft.base import Budget, Drafter
from branchwise.draft.head.drafter import HeadDrafter
from branchwise.engine import Engine, Request
from branchwise.errors import BranchwiseError, LargeDraftWarning, LossyWarning, UsageError
from branchwise.llm import LLM, load
from branchwise.methods import PLAIN, PRESETS, Method, choose_method, find_method, find_methods, table
from branchwise.testing import ToyTarget
from branchwise.train.head.run import FORMS
from branchwise.verify import VERIFIERS, Verifier, check_pairing
from tests.heads import let_drafting_pay, random_head

ROOT = Path(__file__).parents[1]
NAMES = [
    "speculative",
    "block",
    "mcsd",
    "mcsd-iid",
    "improved-mcsd",
    "improved-mcsd-lossy",
    "specinfer",
    "spectr",
    "rsd-c",
    "rsd-s",
    "dyspec",
    "dyspec-threshold",
    "sequoia",
    "opt-tree",
    "gsd",
    "gbv",
    "cascade",
    "traversal",
    "vocabtrim",
    "distillspec",
    "s2d",
    "uncurl",
    "emr",
]
HEADED = ["eagle", "eagle-sampled", "fspad", "parallelspec", "head-cascade"]
"""presets that draft with a trained head"""
GROWN = [name for name in [*NAMES, *HEADED] if PRESETS[name].lossless]


FREE = ["ngram", "default", "prompt-lookup", "token-recycling", "stand", "suffix", "aded"]
"""presets that need no model and no index"""
RETRIEVING = ["rest", "rasd", "rasd-free"]


def on_toys(name: str) -> Method:
    """A preset whose draft model is the toy target itself, disturbed."""
    preset = PRESETS[name]
    return Method(name, "disturbed:sigma=0.7", preset.tree, preset.verify)


def parts_on(target: ToyTarget, name: str) -> tuple[Drafter, Verifier]:
    """The drafter and the verifier of a preset on a toy, where a random head stands for a trained one."""
    preset = PRESETS[name]
    if name not in HEADED:
        return on_toys(name).build()
    head = random_head(target.info, name if name in FORMS else "carry")
    return HeadDrafter(head, tree=build_policy(preset.tree or "")), VERIFIERS.build(preset.verify)


def test_the_presets_of_the_literature_are_all_here() -> None:
    assert set(PRESETS) == {"plain", *FREE, *RETRIEVING, *NAMES, *HEADED}
    assert [name for name, method in PRESETS.items() if not method.lossless] == ["improved-mcsd-lossy"]
    assert {name for name, method in PRESETS.items() if method.needs_draft_model} == {"rasd", *NAMES}
    assert {name for name, method in PRESETS.items() if method.needs_index} == set(RETRIEVING)
    assert {name for name, method in PRESETS.items() if method.needs_head} == set(HEADED)
    for name, method in PRESETS.items():
        assert method.name == name
        assert method.about.endswith(".")
        assert method.paper or name == "plain"


@pytest.mark.parametrize("name", [name for name in HEADED if name != "head-cascade"])
def test_a_preset_says_which_form_of_a_head_it_is(name: str) -> None:
    form = name.removesuffix("-sampled")
    assert form in FORMS
    assert f"`branchwise train head --form {form}` trains it." in PRESETS[name].about


@pytest.mark.parametrize("name", [*NAMES, *HEADED])
def test_a_preset_draws_what_its_verifier_takes(name: str) -> None:
    method = PRESETS[name]
    assert method.tree is not None
    verifier = VERIFIERS.build(method.verify)
    check_pairing(verifier, build_policy(method.tree).draw, name)
    # A rule that changes the distribution says so in its name, and no other does.
    assert getattr(verifier, "lossless", True) is method.lossless is ("lossy" not in name)


@pytest.mark.parametrize("name", [*NAMES, *HEADED])
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_preset_drafts_at_most_24_nodes_and_is_cut_to_any_budget(name: str, temperature: float) -> None:
    target = ToyTarget(16, seed=3)
    for budget in (None, Budget(13, 4)):
        drafter, verifier = parts_on(target, name)
        engine = Engine(target, drafter, verifier, budget)
        sampling = SamplingParams(temperature=temperature, seed=4)
        generation = engine.submit(Request((1, 2, 3), sampling, max_new_tokens=16))
        largest = deepest = 0
        while not generation.finished:
            before = generation.stats.drafted_tokens
            engine.step()
            largest = max(largest, generation.stats.drafted_tokens - before)
        deepest = len(generation.stats.drafted_per_depth)
        assert 0 < largest <= (24 if budget is None else 12)
        assert deepest <= (8 if budget is None else 4)


@pytest.mark.parametrize("name", FREE)
@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_a_preset_without_a_model_keeps_to_any_budget_and_writes_the_same(
    name: str, temperature: float, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sampled, seed for seed, with `match`; what is drawn has its distribution tested elsewhere."""
    let_drafting_pay(monkeypatch)
    target, texts = ToyTarget(4, seed=3), []
    for method, most in ((PLAIN, None), (PRESETS[name], None), (PRESETS[name], Budget(6, 3))):
        drafter, verifier = method.build()
        engine = Engine(target, drafter, verifier, most)
        made = engine.submit(Request((1, 2, 3) * 4, SamplingParams(temperature, seed=4), max_new_tokens=40))
        while not made.finished:
            engine.step()
        texts.append(made.token_ids)
        assert (made.stats.drafted_tokens > 0) is (method != PLAIN)
        assert len(made.stats.drafted_per_depth) <= (3 if most else 99)
    if temperature == 0 or PRESETS[name].verify == "match":
        assert texts[0] == texts[1] == texts[2]


@pytest.mark.parametrize("name", GROWN)
def test_a_lossless_preset_writes_the_greedy_text_of_plain_decoding(name: str) -> None:
    target = ToyTarget(16, seed=8)
    texts = []
    for drafter, verifier in ((build_drafter("none"), VERIFIERS.build("match")), parts_on(target, name)):
        engine = Engine(target, drafter, verifier)
        generation = engine.submit(Request((1, 2), max_new_tokens=24))
        while not generation.finished:
            engine.step()
        texts.append(generation.token_ids)
    assert texts[0] == texts[1]


# Names and specs


def test_a_draft_model_joins_a_preset_with_its_options() -> None:
    assert find_method("cascade", "org/small").draft == "model:org/small"
    assert find_method("cascade", "small,temperature=0.7").draft == "model:small,temperature=0.7"
    assert find_method("improved-mcsd", "small").draft == "model:small,recall=0.3"
    # What the user says of the draft model comes before what the preset says.
    assert find_method("improved-mcsd", "small,recall=0.1,top-k=5").draft == "model:small,recall=0.1,top-k=5"
    assert find_method("cascade", "small").name == "cascade"
    assert find_method("rest", index="a/dir").draft == "retrieval:a/dir"
    assert find_method("rasd", "org/small,top-k=5", "dir,max=8").draft == (
        "fused:model(org/small,top-k=5)+retrieval(dir,max=8)"
    )
    assert find_method("eagle", head="a/head").draft == "head:a/head"
    assert find_method("head:,table=5/chain:3/block", head="h,table=9,temperature=0.7") == Method(
        "head:,table=5/chain:3/block", "head:h,table=9,temperature=0.7", "chain:3", "block"
    )
    assert find_method("fused:ngram(max=3)+retrieval", index="d").draft == "fused:ngram(max=3)+retrieval(d)"
    assert find_method("fused:ngram+retrieval,prune=0.1,nodes=9", index="d").draft == (
        "fused:ngram+retrieval(d),prune=0.1,nodes=9"
    )
    assert find_method("model/chain:3/token", "small") == Method(
        "model/chain:3/token", "model:small", "chain:3", "token"
    )


@pytest.mark.parametrize(
    ("spec", "parts"),
    [
        ("ngram", ("ngram", "chain:8", "match")),
        ("ngram/chain:4", ("ngram", "chain:4", "match")),
        ("ngram//match", ("ngram", None, "match")),
        ("disturbed:sigma=2/rsd-c:4,2,1/rrs", ("disturbed:sigma=2", "rsd-c:4,2,1", "rrs")),
        ("model:org/name", ("model:org/name", None, "match")),
        ("model:org/name/paths:4x6/cascade", ("model:org/name", "paths:4x6", "cascade")),
        ("model:/a/folder/chain:6", ("model:/a/folder", "chain:6", "match")),
        ("model:org/name,trim=9//auto", ("model:org/name,trim=9", None, "auto")),
        # A folder may be called like a tree or a verifier.
        ("model:/data/match/x", ("model:/data/match/x", None, "match")),
        ("model:/data/match", ("model:/data/match", None, "match")),
        ("model:/data/chain/x", ("model:/data/chain/x", None, "match")),
        ("model:/data/chain/match/x/paths:4x6/gbv", ("model:/data/chain/match/x", "paths:4x6", "gbv")),
        ("model:/data/chain:3/x/paths:4x6/gbv", ("model:/data/chain:3/x", "paths:4x6", "gbv")),
        ("model:/data/match/x//auto", ("model:/data/match/x", None, "auto")),
        ("model:/data/chain", ("model:/data", "chain", "match")),
        ("model:/data/chain//", ("model:/data/chain", None, "match")),
        ("model:a/b/template:/match/chain/c.json/rrs", ("model:a/b", "template:/match/chain/c.json", "rrs")),
        ("model:a/b/template:/match/c.json", ("model:a/b", "template:/match/c.json", "match")),
        ("disturbed/template:/match/b.json/rrs", ("disturbed", "template:/match/b.json", "rrs")),
        ("disturbed/template:/a/b.json/rrs", ("disturbed", "template:/a/b.json", "rrs")),
        ("retrieval:a/b,max=3/topk:4/match", ("retrieval:a/b,max=3", "topk:4", "match")),
        ("head:a/b.st,table=3/paths:2x2/block", ("head:a/b.st,table=3", "paths:2x2", "block")),
        ("fused:model(a/b)+retrieval(c/d)/topk:4", ("fused:model(a/b)+retrieval(c/d)", "topk:4", "match")),
        ("fused:ngram(max=3,min=1)+suffix", ("fused:ngram(max=3,min=1)+suffix", None, "match")),
        ("auto:model(a/b,top-k=2)+head(c/d)", ("auto:model(a/b,top-k=2)+head(c/d)", None, "match")),
        ("auto:head(/a/b.st)/chain:3/block", ("auto:head(/a/b.st)", "chain:3", "block")),
        ("recycle/ranks:/a/b.json/match", ("recycle", "ranks:/a/b.json", "match")),
        ("disturbed/chain:9,stop=learned:a/b.st/token", ("disturbed", "chain:9,stop=learned:a/b.st", "token")),
    ],
)
def test_a_spec_has_three_parts_and_names_of_files_may_hold_slashes(
    spec: str, parts: tuple[str, str | None, str]
) -> None:
    found = find_method(spec)
    assert (found.draft, found.tree, found.verify) == parts


def test_what_a_user_says_part_by_part_is_a_method_too() -> None:
    assert choose_method() == PRESETS["default"]
    assert choose_method(verify="auto").draft == PRESETS["default"].draft
    assert choose_method(tree="chain:4", verify="match") == Method("ngram/chain:4/match", "ngram", "chain:4")
    assert choose_method(draft_model="small", verify="auto").draft == "model:small"
    assert choose_method("cascade", draft_model="small") == find_method("cascade", "small")
    assert choose_method(index="dir").draft == "retrieval:dir"
    assert choose_method(head="file").draft == "auto:head(file)"
    assert choose_method(head="file", tree="chain:4").draft == "head:file"
    assert choose_method(draft="head", tree="chain:4", head="file") == Method("head/chain:4", "head:file", "chain:4")
    assert choose_method(index="dir", draft_model="small").draft == "fused:model(small)+retrieval(dir)"
    assert choose_method(index="dir", draft="fused:ngram+retrieval").draft == "fused:ngram+retrieval(dir)"
    assert [method.draft for method in find_methods(["ngram", "block"], "small")] == ["ngram", "model:small"]


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"method": "casade"}, "Did you mean 'cascade'"),
        ({"method": "cascade"}, "needs a draft model; name one with --draft-model"),
        ({"method": "cascade", "draft_model": ""}, "needs a draft model"),
        ({"method": "model//token"}, "needs a draft model"),
        ({"method": "ngram", "draft_model": "small"}, "leave out --draft-model"),
        ({"method": "cascade", "draft_model": "small", "tree": "chain:4"}, "leave out --tree"),
        ({"method": "cascade", "draft_model": "small", "draft": "ngram"}, "leave out --draft,"),
        ({"method": "ngram", "verify": "match"}, "leave out --verify"),
        ({"draft": "ngram", "draft_model": "small"}, "--draft or --draft-model, not both"),
        ({"draft": "ngram", "index": "dir"}, "--draft or --index, not both"),
        ({"method": "rest"}, "needs an index; name one with --index"),
        ({"method": "rest", "index": "dir", "draft_model": "small"}, "leave out --draft-model"),
        ({"method": "eagle"}, "'eagle' needs a trained head; name one with --head, a file that `branchwise train head"),
        ({"draft": "head"}, "'head' needs a trained head; name one with --head"),
        ({"draft": "model"}, "'model' needs a draft model; name one with --draft-model"),
        ({"method": "eagle", "draft_model": "small"}, "leave out --draft-model"),
        ({"method": "cascade", "draft_model": "small", "head": "file"}, "leave out --head"),
        ({"method": "default", "draft_model": ""}, "needs a draft model; name one with --draft-model"),
        ({"method": "default", "index": "dir"}, "leave out --index"),
        ({"draft": "auto", "index": "dir"}, "'auto' drafts without an index; leave out --index"),
        ({"method": "auto:head(one)", "head": "two"}, "leave out --head"),
        ({"draft": "ngram", "head": "file"}, "--draft or --head, not both"),
        ({"method": "ngram/chain:8/match/more"}, "more than three parts"),
        ({"method": "model:a/b/chain:8/token/more"}, "more than three parts"),
    ],
)
def test_a_wrong_method_is_one_sentence(given: dict[str, str], words: str) -> None:
    with pytest.raises(BranchwiseError, match=words):
        choose_method(**given)  # type: ignore[arg-type]


def test_a_method_of_a_pair_that_does_not_fit_is_refused() -> None:
    with pytest.raises(BranchwiseError, match="is not exact for drafter"):
        find_method("disturbed/rsd-c:2,1/cascade").build()
    with pytest.raises(BranchwiseError, match="is not exact for drafter"):
        find_method("disturbed/chain:4/lossy-longest").build()


def test_a_misspelt_verifier_is_not_taken_for_a_folder() -> None:
    assert find_method("model:a/b/chain:8/tokn").verify == "tokn"


def test_whoever_names_a_draft_model_or_a_head_lets_the_default_choose_from_it_too() -> None:
    default = PRESETS["default"]
    assert choose_method(draft_model="org/small,top-k=5") == replace(default, draft="auto:model(org/small,top-k=5)")
    assert choose_method(draft_model="small", head="a/head").draft == "auto:model(small)+head(a/head)"
    assert choose_method("default", draft_model="small") == choose_method(draft_model="small")
    assert choose_method(draft="auto", draft_model="small").draft == "auto:model(small)"
    assert choose_method("auto:head(h)", draft_model="small").draft == "auto:head(h)+model(small)"
    assert choose_method(draft_model="small", verify="match").draft == "auto:model(small)"
    assert [method.draft for method in find_methods(["default", "block", "plain"], "small")] == [
        "auto:model(small)", "model:small", "none"
    ]  # fmt: skip
    assert default.takes == ["model", "head"]
    assert find_method("default", "small").takes == ["head"]
    assert not default.blanks, "it needs none of them"
    assert default.command == "branchwise generate PROMPT --method default [--draft-model ID] [--head FILE]"


# What users see


def test_the_readme_shows_the_presets() -> None:
    assert table() in (ROOT / "README.md").read_text(), "run python benchmarks/tables.py"


def test_the_table_tells_a_lossy_method_from_the_others() -> None:
    rows = {row.split("`")[1]: row for row in table().splitlines()[2:]}
    assert set(rows) == set(PRESETS)
    assert [name for name, row in rows.items() if "changed (lossy)" in row] == ["improved-mcsd-lossy"]
    assert all("kept" in row for name, row in rows.items() if name != "improved-mcsd-lossy")


def listed(*words: str) -> str:
    done = CliRunner().invoke(app, ["methods", *words])
    assert done.exit_code == 0, done.output
    return done.output


def test_methods_lists_every_preset() -> None:
    lines = {line.split()[0]: line for line in listed().splitlines() if line.split()}
    assert set(PRESETS) <= set(lines)
    assert "paths:4x6" in lines["cascade"]
    assert " lossy " in lines["improved-mcsd-lossy"]
    assert " lossless " in lines["improved-mcsd"]


def test_methods_prints_json_and_tells_more_of_one() -> None:
    found = json.loads(listed("--json"))["methods"]
    assert [method["name"] for method in found] == list(PRESETS)
    assert set(found[0]) == {
        "name", "about", "paper", "draft", "tree", "verify", "lossless", "needs_draft_model", "needs_index",
        "needs_head", "command",
    }  # fmt: skip
    one = listed("rsd-s")
    assert "branchwise generate PROMPT --method rsd-s --draft-model ID" in one
    assert "2402.14160" in one
    wrong = CliRunner().invoke(app, ["methods", "rsd-z"]).exception
    assert isinstance(wrong, BranchwiseError)
    assert str(wrong).startswith("Unknown method 'rsd-z'. Did you mean 'rsd-s'")


MISTAKES = [
    (("--method", "casade"), "Unknown method 'casade'. Did you mean 'cascade'?"),
    (("--method", "cascade"), "Method 'cascade' needs a draft model; name one with --draft-model"),
    (("--method", "ngram", "--draft-model", "smollm2"), "leave out --draft-model"),
    (("--method", "ngram", "--index", "x"), "leave out --index"),
    (("--method", "rest"), "Method 'rest' needs an index; name one with --index"),
    (("--method", "rasd", "--index", "x"), "Method 'rasd' needs a draft model"),
    (("--method", "eagle"), "Method 'eagle' needs a trained head; name one with --head"),
    (("--method", "ngram", "--head", "x"), "leave out --head"),
    (("--method", "eagle", "--head", "no/such/file"), "The head no/such/file cannot be read"),
    (("--method", "block", "--draft-model", "no/such/folder/at/all"), "no/such/folder/at/all"),
    (("--method", "default", "--draft-model", "no/such/folder/at/all"), "no/such/folder/at/all"),
    (("--method", "default", "--head", "no/such/file"), "The head no/such/file cannot be read"),
]


@pytest.mark.parametrize("command", ["generate Hi", "chat", "audit model", "tune", "bench"])
@pytest.mark.parametrize(("words", "sentence"), MISTAKES)
def test_every_command_that_takes_a_method_says_what_is_wrong_with_it(
    command: str,
    words: tuple[str, ...],
    sentence: str,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    """In this process, as `test_cli.py` does it in a new one."""
    if command == "bench":
        words = tuple(word.replace("--method", "--methods") for word in words)
    monkeypatch.setattr(sys, "argv", ["branchwise", *command.split(), *words])
    with pytest.raises(SystemExit) as ended:
        main()
    told = capsys.readouterr()
    assert ended.value.code == 2
    assert told.out == ""
    assert told.err.startswith("branchwise: ")
    assert told.err.count("\n") == 1
    assert sentence in told.err


@pytest.mark.parametrize("command", ["generate Hi", "chat", "audit model"])
@pytest.mark.parametrize("part", [("--draft", "ngram"), ("--tree", "chain:4"), ("--verify", "match")])
def test_a_method_and_a_part_of_one_exclude_each_other(
    command: str, part: tuple[str, str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["branchwise", *command.split(), "--method", "ngram", *part])
    with pytest.raises(SystemExit) as ended:
        main()
    assert ended.value.code == 2
    assert f"leave out {part[0]}," in capsys.readouterr().err


# On a real model, which drafts for itself


def test_a_method_by_name_writes_what_the_model_would_have_written(smollm2: LLM) -> None:
    with pytest.warns(LargeDraftWarning, match=r"reads 1\.0 times the bytes.*use a smaller model"):
        drafting = smollm2.with_method("cascade", draft_model="smollm2,weights=float")
    assert drafting.engine.verifier.name == "cascade"
    plain, answer = (llm.generate("Name a colour.", max_new_tokens=7) for llm in (smollm2, drafting))
    assert answer.token_ids == plain.token_ids
    assert answer.stats.mean_acceptance_length > 3
    assert find_method("cascade", "smollm2").build()[0].draw is Draw.PATHS


def test_whoever_joins_or_loads_a_lossy_method_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    lossy = replace(on_toys("improved-mcsd-lossy"), name="lossy")
    llm = LLM("toy", None, None, Engine(ToyTarget(16), *PLAIN.build()))  # type: ignore[arg-type]
    for join in (
        lambda: llm.with_method(lossy),
        lambda: llm.with_method("disturbed:sigma=0.7/fork-lossy:4x6/lossy-longest"),
        lambda: llm.with_drafter("disturbed", "fork-lossy:4x6", "lossy-longest"),
        lambda: llm.with_drafter(build_drafter("disturbed", "fork-lossy:4x6"), verify="lossy-longest"),
    ):
        with pytest.warns(
            LossyWarning,
            match="is lossy: it changes the distribution.*measured on fork-lossy:2x3,stop=confidence:0.7 over 3 tokens",
        ):
            assert join().engine.verifier.name == "lossy-longest"
    llm.with_method(on_toys("cascade"))  # a warning is an error here

    def no_weights(*given: Any, **options: Any) -> None:
        raise ZeroDivisionError

    monkeypatch.setattr("branchwise.llm.load_model", no_weights)
    for given in ({"method": lossy}, {"draft": lossy.draft, "tree": lossy.tree, "verify": lossy.verify}):
        with pytest.warns(LossyWarning), pytest.raises(ZeroDivisionError):  # before the weights are there
            load(**given)  # type: ignore[arg-type]


def test_a_lossy_rule_of_ones_own_was_not_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(VERIFIERS._entries, "my-lossy", "branchwise.verify.longest:Longest")
    with pytest.warns(LossyWarning, match="'my-lossy:3' is lossy: it changes the distribution.*was not measured"):
        Method("mine", "ngram", None, "my-lossy:3").warn_if_lossy()


@pytest.mark.filterwarnings("default::branchwise.errors.LossyWarning")
@pytest.mark.parametrize("command", ["generate Hi", "chat", "audit model", "tune"])
def test_every_command_tells_once_that_a_method_is_lossy(
    command: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    def no_weights(*given: Any, **options: Any) -> None:
        raise UsageError("no weights")

    monkeypatch.setattr("branchwise.llm.load_model", no_weights)
    monkeypatch.setattr(warnings, "showwarning", warnings.showwarning)  # main changes it
    words = ["--method", "improved-mcsd-lossy", "--draft-model", "smollm2"]
    monkeypatch.setattr(sys, "argv", ["branchwise", *command.split(), *words])
    with pytest.raises(SystemExit):
        main()
    told = capsys.readouterr()
    assert told.out == ""
    lossy, ended = told.err.splitlines()
    assert lossy.startswith("branchwise: Verifier 'lossy-longest' is lossy: it changes the distribution")
    assert "for fork-lossy:4x6,stop=learned on the vocabulary of a model it is not known" in lossy
    assert ended == "branchwise: no weights"


def test_load_takes_a_method_and_refuses_what_does_not_go_with_it() -> None:
    with pytest.raises(BranchwiseError, match="needs a draft model"):
        load(method="cascade")
    with pytest.raises(BranchwiseError, match="leave out --tree"):
        load(method="ngram", tree="chain:4")
    with pytest.raises(BranchwiseError, match="A drafter of your own"):
        load(draft=build_drafter("ngram"), method="ngram")
