"""Grammars: every text follows its own, and speculation changes nothing of what plain constrained decoding writes."""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from functools import cache
from itertools import pairwise
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from branchwise.audit.blocks import Partition, g_test
from branchwise.constrain import Grammar, Limits, check_grammar
from branchwise.core.batch import TreeBatch
from branchwise.core.sampling import SamplingParams
from branchwise.core.sequence import SequenceState
from branchwise.core.target_probs import WarpedProbs
from branchwise.core.tree import DraftTree, Draw
from branchwise.draft import build_drafter
from branchwise.draft.base import Budget, Drafter
from branchwise.engine import Engine, FinishReason, Generation, Request
from branchwise.engine.pipelined import PipelinedStep
from branchwise.errors import UsageError
from branchwise.testing import RandomDrafter, ToyTarget, TruthDrafter
from branchwise.verify import VERIFIERS
from tests.conformance.test_drafters import DOUBLES, SHIPPED
from tests.doubles import PipelinedToy
from tests.grammars import END, TOKENS, byte_compiler, byte_level, letters, letters_compiler, spelled
from tests.heads import let_drafting_pay
from tests.strategies import trees

VOCABULARY = len(TOKENS)
PROMPTS = [(1, 2, 3, 1, 2), (4,), (5, 0, 5, 0, 5, 0, 5), (3,)]
REGEXES = ["a(b|c)*cab", "(ab|c){2,9}", "abab[bc]{3}aa", "(a|b|c)+"]


def submit(engine: Engine, grammar: Grammar | None, prompt: tuple[int, ...], **options: Any) -> Generation:
    sampling = options.pop("sampling", SamplingParams())
    if grammar is not None:
        sampling = grammar.applied_to(sampling, len(prompt))
    return engine.submit(Request(prompt, sampling, stop_tokens=frozenset({END}), **options))


def finish(engine: Engine) -> None:
    while engine.busy:
        engine.step()


def write(
    drafter: Drafter, verify: str = "match", sampling: SamplingParams | None = None, target: ToyTarget | None = None
) -> list[Generation]:
    """One text for each regular expression, and one that is free, as a batch that does not fit into the slots."""
    engine = Engine(target or ToyTarget(VOCABULARY, slots=3), drafter, VERIFIERS.build(verify))
    options = {"sampling": sampling or SamplingParams(), "max_new_tokens": 40}
    made = [submit(engine, letters(regex), prompt, **options) for regex, prompt in zip(REGEXES, PROMPTS, strict=True)]
    made.append(submit(engine, None, PROMPTS[0], **options))
    finish(engine)
    return made


@cache
def plain(temperature: float) -> list[list[int]]:
    made = write(build_drafter("none"), sampling=SamplingParams(temperature, seed=5))
    return [generation.token_ids for generation in made]


# What is written


@pytest.mark.parametrize("temperature", [0.0, 0.9])
def test_texts_follow_their_own_grammar_and_end_with_it(temperature: float) -> None:
    *constrained, free = write(build_drafter("none"), sampling=SamplingParams(temperature, seed=5))
    for regex, generation in zip(REGEXES, constrained, strict=True):
        if generation.finish_reason is FinishReason.STOP:
            assert re.fullmatch(regex, spelled(generation.token_ids)), regex
            assert generation.token_ids[-1] == END
        else:
            assert len(generation.token_ids) == 40
    assert sum(one.finish_reason is FinishReason.STOP for one in constrained) >= 2
    alone = Engine(ToyTarget(VOCABULARY), build_drafter("none"), VERIFIERS.build("match"))
    same = submit(alone, None, PROMPTS[0], sampling=SamplingParams(temperature, seed=5), max_new_tokens=40)
    finish(alone)
    assert free.token_ids == same.token_ids, "a text without a grammar does not notice the others"


@pytest.mark.parametrize("pays", [False, True])
@pytest.mark.parametrize("name", [*SHIPPED, *DOUBLES])
def test_every_drafter_writes_what_plain_constrained_decoding_writes(
    name: str, pays: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    if pays:
        let_drafting_pay(monkeypatch)
    truth = {prompt: tokens + [1] * 9 for prompt, tokens in zip([*PROMPTS, PROMPTS[0]], plain(0.9), strict=True)}
    for temperature in (0.0, 0.9):
        made = write((SHIPPED | DOUBLES)[name](truth), sampling=SamplingParams(temperature, seed=5))
        assert [generation.token_ids for generation in made] == plain(temperature)


DRAWN = [("chain:3", "block"), ("chain:3", "token"), ("paths:2x2", "cascade"), ("paths:2x2", "gbv")]
DRAWN += [("rsd-c:2,1", "rrs"), ("paths:2x2", "mss"), ("dynamic:5", "traversal"), ("paths:2x2", "k-seq")]


@pytest.mark.parametrize("drafter", ["disturbed", "recycle", "suffix"])
@pytest.mark.parametrize(("tree", "verify"), DRAWN)
def test_greedy_texts_are_the_same_with_every_rule(drafter: str, tree: str, verify: str) -> None:
    made = write(build_drafter(drafter, tree), verify)
    assert [generation.token_ids for generation in made] == plain(0.0)


LENGTH, TEXTS, TEMPERATURE, REGEX, PROMPT = 3, 600, 1.2, "(ab|ba|c)+(bb)?", (1, 2)
FALSE_ALARM = 1e-4


@cache
def constrained_law(block: tuple[int, ...]) -> np.ndarray:
    """Mask, renormalise: by a matcher that has read nothing but this block. Nothing but the end follows the end."""
    if END in block:
        return np.eye(VOCABULARY)[END]
    probs = torch.softmax(ToyTarget(VOCABULARY).logits((*PROMPT, *block)).double() / TEMPERATURE, dim=-1).numpy()
    matcher = letters(REGEX).matcher.deep_copy()
    assert matcher.consume_tokens(list(block))
    bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little", count=VOCABULARY)
    masked = probs * bits
    return masked / masked.sum()


CASES = [("disturbed", *way) for way in DRAWN] + [("recycle", *way) for way in DRAWN[::2]]
CASES += [("fused:recycle+suffix", "topk:6,depth=3,width=3", "match"), ("disturbed", "topk:6,depth=3", "match")]


@pytest.mark.parametrize(("drafter", "tree", "verify"), CASES)
def test_the_first_tokens_have_the_law_of_plain_constrained_decoding(drafter: str, tree: str, verify: str) -> None:
    engine = Engine(ToyTarget(VOCABULARY, slots=100), build_drafter(drafter, tree), VERIFIERS.build(verify))
    made = [
        submit(
            engine, letters(REGEX), PROMPT, sampling=SamplingParams(TEMPERATURE, seed=seed), max_new_tokens=LENGTH + 1
        )
        for seed in range(TEXTS)
    ]
    finish(engine)
    blocks = [tuple([*text.token_ids, *[END] * LENGTH][:LENGTH]) for text in made]
    partition = Partition(constrained_law, length=LENGTH, samples=TEXTS)
    found = g_test(partition.count(iter(blocks)), partition.probabilities)
    assert found.p_value > FALSE_ALARM, found
    assert found.freedom > 5
    assert sum(text.stats.accepted_tokens for text in made) > TEXTS / 4, "a draft that is never right shows nothing"


def test_the_pipelined_step_follows_grammars() -> None:
    target = PipelinedToy(VOCABULARY, slots=3)
    engine = Engine(target, build_drafter("none"), VERIFIERS.build("match"))
    assert isinstance(engine._step, PipelinedStep)
    for temperature in (0.0, 0.9):
        made = write(build_drafter("none"), sampling=SamplingParams(temperature, seed=5), target=target)
        assert [generation.token_ids for generation in made] == plain(temperature)
    assert target.used > 10


@pytest.mark.parametrize("name", ["none", "head", "recycle", "no skill", "model"])
def test_rules_that_read_all_rows_at_once_follow_grammars(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a device, where the rows of nodes that the grammar does not reach are computed as well."""
    made = WarpedProbs.__init__

    def at_once(probs: WarpedProbs, *given: Any) -> None:
        made(probs, *given)
        probs.lazy, probs.together = False, True

    wanted = {temperature: plain(temperature) for temperature in (0.0, 0.9)}
    monkeypatch.setattr(WarpedProbs, "__init__", at_once)
    let_drafting_pay(monkeypatch)
    for temperature, texts in wanted.items():
        found = write((SHIPPED | DOUBLES)[name]({}), sampling=SamplingParams(temperature, seed=5))
        assert [generation.token_ids for generation in found] == texts


# What may follow a node


@given(trees(vocabulary=VOCABULARY, max_depth=4), st.integers(0, 2**32 - 1), st.sampled_from(REGEXES))
def test_every_node_is_masked_after_its_own_path_whatever_is_asked_first(
    tree: DraftTree, seed: int, regex: str
) -> None:
    rng = np.random.default_rng(seed)
    grammar, logits = letters(regex), torch.randn(1, len(tree), VOCABULARY)
    sequence = SequenceState([2, 4], grammar.applied_to(SamplingParams(temperature=1.0), 2))
    probs = WarpedProbs(logits, TreeBatch([tree]), [sequence])
    for node in rng.permutation(len(tree)):
        path = tree.tokens[tree.path(int(node))[1:]].tolist()
        allowed = what_may_follow(grammar, path)
        if allowed is not None:
            wanted = torch.softmax(logits[0, node], dim=-1) * allowed
            assert torch.allclose(probs.at(torch.tensor([node]))[0], wanted / wanted.sum(), atol=1e-6)


def what_may_follow(grammar: Grammar, path: Sequence[int]) -> torch.Tensor | None:
    """By a fresh matcher that reads the path alone; None where no text leads."""
    matcher = grammar.matcher.deep_copy()
    for token in [*path, None]:
        bits = np.unpackbits(np.frombuffer(matcher.compute_bitmask(), np.uint8), bitorder="little", count=VOCABULARY)
        if token is None:
            return torch.from_numpy(bits)
        if token == END or not bits[token]:
            return None
        matcher.consume_token(token)
    raise AssertionError


def test_what_is_written_is_kept_and_the_rest_forgotten() -> None:
    constraint = letters("(a|b)*c").constrain(1)
    below = constraint.find([9, 1, 2, 4])
    assert below.allows(3)
    assert constraint.find([9, 5]) is not below
    constraint.settle([9, 1, 2])
    assert constraint.find([9, 1, 2, 4]) is below, "the branch that the text took"
    assert set(constraint.here.below) == {4}
    assert constraint.find([9, 1]).allows(5), "a step that is taken back"
    assert constraint.find([9, 1, 2, 4]) is not below
    assert constraint.error is None


def test_a_text_that_parameters_drive_out_of_its_grammar_ends_with_an_error() -> None:
    engine = Engine(ToyTarget(VOCABULARY), build_drafter("none"), VERIFIERS.build("match"))
    against = SamplingParams(logit_bias={3: -float("inf")})
    wrong = submit(engine, letters("abcab"), PROMPTS[0], sampling=against, max_new_tokens=9)
    right = submit(engine, letters("abcab"), PROMPTS[0], max_new_tokens=9)
    finish(engine)
    assert wrong.finish_reason is FinishReason.ERROR
    assert "left its grammar" in str(wrong.error)
    assert spelled(right.token_ids) == "abcab"


def test_a_grammar_that_becomes_too_complex_ends_its_text_and_no_other(monkeypatch: pytest.MonkeyPatch) -> None:
    grammar = letters("a(b|c)*a")

    class Failing:
        """Fails behind the third token, as one that met a limit of its own."""

        def __init__(self) -> None:
            self.matcher, self.read = grammar.matcher.deep_copy(), 0

        def deep_copy(self) -> Failing:
            return Failing()

        def consume_tokens(self, tokens: list[int]) -> bool:
            self.read += len(tokens)
            return self.matcher.consume_tokens(tokens)

        def rollback(self, count: int) -> bool:
            self.read -= count
            return self.matcher.rollback(count)

        def compute_bitmask(self) -> bytes:
            return self.matcher.compute_bitmask()

        def is_error(self) -> bool:
            return self.read >= 3

        def get_error(self) -> str:
            return "too many items\n<state>"

    engine = Engine(ToyTarget(VOCABULARY), RandomDrafter(VOCABULARY), VERIFIERS.build("match"))
    hard = Grammar(Failing(), (END,))  # type: ignore[arg-type]
    avoid = SamplingParams(logit_bias={1: -50.0})
    made = [submit(engine, one, PROMPTS[0], sampling=avoid, max_new_tokens=8) for one in (hard, grammar)]
    finish(engine)
    assert made[0].finish_reason is FinishReason.ERROR
    assert "too complex for this text: too many items" in str(made[0].error)
    assert len(made[0].token_ids) == 4
    assert made[1].finish_reason is FinishReason.LENGTH


def test_a_constraint_serves_one_request() -> None:
    engine = Engine(ToyTarget(VOCABULARY), build_drafter("none"), VERIFIERS.build("match"))
    sampling = letters("ab").applied_to(SamplingParams(), 3)
    with pytest.raises(UsageError, match="belongs to one request"):
        engine.submit(Request((1,), sampling))
    with pytest.raises(UsageError, match="must be stop_tokens"):
        engine.submit(Request((1, 2, 3), sampling))


def test_choices_of_one_prompt_and_cancelled_texts_do_not_disturb_each_other() -> None:
    engine = Engine(ToyTarget(VOCABULARY, slots=2), build_drafter("suffix"), VERIFIERS.build("match"))
    options = {"sampling": SamplingParams(1.0, seed=3), "max_new_tokens": 30}
    made = [submit(engine, letters("(ab|c){2,9}"), (1, 2), **options) for _ in range(4)]
    engine.step()
    engine.cancel(made[0])
    finish(engine)
    assert made[1].token_ids == made[2].token_ids == made[3].token_ids
    assert made[1].token_ids[: len(made[0].token_ids)] == made[0].token_ids
    assert re.fullmatch("(ab|c){2,9}", spelled(made[1].token_ids))


# What is drafted


@pytest.mark.parametrize("name", ["ngram", "suffix", "recycle:k=3", "memories", "stand", "fused:recycle+suffix"])
def test_what_must_come_is_drafted_for_free_and_the_end_with_it(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    let_drafting_pay(monkeypatch)
    engine = Engine(ToyTarget(VOCABULARY), build_drafter(name), VERIFIERS.build("match"))
    made = submit(engine, letters("cccbbbccc"), (1, 2), max_new_tokens=40)
    finish(engine)
    assert spelled(made.token_ids) == "cccbbbccc"
    assert made.stats.steps <= 3, "ten tokens, none of which the model chooses"
    if name == "suffix":
        assert {piece.source for piece in made.pieces} <= {"grammar", ""}


def test_a_head_drafts_what_must_come_even_if_its_table_lacks_it(monkeypatch: pytest.MonkeyPatch) -> None:
    let_drafting_pay(monkeypatch)
    engine = Engine(ToyTarget(VOCABULARY), SHIPPED["head"]({}), VERIFIERS.build("match"))
    made = [
        submit(engine, letters("c{9}b{9}"), (1, 2), max_new_tokens=40),
        submit(engine, None, (3,), max_new_tokens=9),
    ]
    finish(engine)
    assert spelled(made[0].token_ids) == "c" * 9 + "b" * 9
    assert made[0].stats.steps <= 5


@pytest.mark.parametrize("tree", ["paths:2x3", "rsd-c:2,2", "dynamic:6", "topk:6,depth=3", "ranks"])
@pytest.mark.parametrize("name", ["disturbed", "recycle", "suffix"])
def test_nothing_that_is_forbidden_is_drafted(name: str, tree: str) -> None:
    grammar, drafted = letters("(ab|c){2,9}"), 0
    drafter, target = build_drafter(name, tree), ToyTarget(VOCABULARY)
    drafter.bind(target.info)
    target.require(drafter.needs)
    prompt = [1, 2, 3, 3, 1, 2, 3]
    sequence = SequenceState(list(prompt), grammar.applied_to(SamplingParams(1.0, seed=1), len(prompt)))
    drafter.start(sequence, target.open(sequence, drafter.needs.prefill_logits))
    [found] = drafter.draft([sequence], [Budget(12, 4)])
    for node in range(1, len(found)):
        *above, token = found.tokens[found.path(node)[1:]].tolist()
        allowed = what_may_follow(grammar, above)
        if allowed is not None:
            drafted += 1
            assert allowed[token], (above, token)
            if found.draw is not Draw.FIXED:
                assert found.q is not None
                assert not found.q[found.parents[node]][~allowed.bool()].any(), "q is what was drawn from"
    assert drafted


# JSON, in the tokens of a real tokenizer

BYTES = len(byte_level()) + 8


@st.composite
def schemas(draw: st.DrawFn, depth: int = 2) -> tuple[dict[str, Any], Callable[[Any], bool]]:
    """A schema, and whether a value is one of it."""
    kind = draw(
        st.sampled_from(["boolean", "null", "enum", "integer", "string", "array", "object"][: 7 if depth else 5])
    )
    if kind == "enum":
        values = draw(st.lists(st.sampled_from(["x", "yes", "no", 1, 2, True, None, "é\n"]), min_size=1, max_size=3))
        return {"enum": values}, lambda value: json.dumps(value) in map(json.dumps, values)
    if kind == "integer":
        low = draw(st.integers(-20, 20))
        high = low + draw(st.integers(0, 300))
        return {
            "type": kind,
            "minimum": low,
            "maximum": high,
        }, lambda value: type(value) is int and low <= value <= high
    if kind == "string":
        most = draw(st.integers(0, 3))
        return {"type": kind, "maxLength": most}, lambda value: isinstance(value, str) and len(value) <= most
    if kind == "array":
        inner, fits = draw(schemas(depth=depth - 1))
        return {"type": kind, "items": inner, "maxItems": 2}, lambda value: len(value) <= 2 and all(map(fits, value))
    if kind == "object":
        parts = {name: draw(schemas(depth=depth - 1)) for name in draw(st.sets(st.sampled_from("abc"), min_size=1))}
        needed = draw(st.sets(st.sampled_from(sorted(parts))))
        schema = {"type": kind, "properties": {name: part for name, (part, _) in parts.items()}}
        schema |= {"required": sorted(needed), "additionalProperties": False}
        return schema, lambda value: needed <= set(value) and all(parts[name][1](value[name]) for name in value)
    return {"type": kind}, lambda value: value is None if kind == "null" else isinstance(value, bool)


@settings(max_examples=25)
@given(schemas(), st.sampled_from([0.0, 1.0]))
def test_json_is_always_of_its_schema(drawn: tuple[dict[str, Any], Callable[[Any], bool]], temperature: float) -> None:
    schema, fits = drawn
    grammar = byte_compiler(BYTES).compile(json_schema=schema)
    sampling, texts = SamplingParams(temperature, seed=7), []
    for drafter in ("none", "suffix"):
        engine = Engine(ToyTarget(BYTES), build_drafter(drafter), VERIFIERS.build("match"))
        made = engine.submit(
            Request((5, 6, 7), grammar.applied_to(sampling, 3), max_new_tokens=300, stop_tokens=frozenset({0, 1}))
        )
        finish(engine)
        texts.append(made.token_ids)
    assert texts[0] == texts[1]
    assert made.finish_reason is FinishReason.STOP
    value = json.loads(byte_level().decode(made.token_ids[:-1]))
    assert fits(value), value
    assert all(token < len(byte_level()) for token in made.token_ids)


def test_every_token_that_ends_a_text_may_end_it() -> None:
    place = byte_compiler(BYTES).compile(regex="a?").constrain(0).here
    assert place.allows(0)
    assert place.allows(1)
    assert place.forced is None
    over = byte_compiler(BYTES).compile(regex="").constrain(0).here
    assert over.forced in (0, 1)


def test_json_is_spaced_as_python_writes_it_unless_the_schema_wants_otherwise() -> None:
    schema: dict[str, Any] = {"type": "object", "properties": {"a": {"const": 1}, "b": {"const": [1, 2]}}}
    schema |= {"required": ["a", "b"], "additionalProperties": False}
    tokens = byte_level()(json.dumps({"a": 1, "b": [1, 2]}), add_special_tokens=False)["input_ids"]
    assert byte_compiler(BYTES).compile(json_schema=schema).matcher.validate_tokens(tokens) == len(tokens)
    spaced = byte_level()('{\n "a" : 1,"b":[1,2]}', add_special_tokens=False)["input_ids"]
    assert byte_compiler(BYTES).compile(json_schema=schema).matcher.validate_tokens(spaced) < len(spaced)
    flexible = schema | {"x-guidance": {"whitespace_flexible": True, "item_separator": ",", "key_separator": ":"}}
    assert byte_compiler(BYTES).compile(json_schema=flexible).matcher.validate_tokens(spaced) == len(spaced)


# What is refused


@pytest.mark.parametrize(
    ("given", "words"),
    [
        ({"regex": "a("}, "regular expression cannot be followed: .*unclosed group"),
        ({"json_schema": "{no"}, "JSON schema is not JSON: Expecting property name"),
        ({"json_schema": [1]}, "JSON schema is an object, not list"),
        ({"json_schema": {"type": "objekt"}}, "JSON schema cannot be followed: Invalid type: objekt"),
        ({"json_schema": {"not": {}}}, "Unimplemented keys"),
        ({"json_schema": {"const": float("nan"), "x": {1}}}, "JSON schema is not JSON"),
        ({"grammar": "start: foo"}, 'grammar cannot be followed: .*unknown name: "foo"'),
        ({"regex": "a", "grammar": "start: /a/"}, "a regular expression or a grammar, not both"),
        ({"regex": 5}, "A regular expression is a text, not int"),
    ],
)
def test_a_grammar_that_cannot_be_followed_is_one_sentence(given: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words) as caught:
        letters_compiler().compile(**given)
    assert "\n" not in str(caught.value)
    with pytest.raises(UsageError, match=words):
        check_grammar(**given)


def test_what_is_wrong_with_a_regular_expression_is_said_without_the_rule_around_it() -> None:
    with pytest.raises(UsageError) as caught:
        check_grammar(regex="([")
    assert str(caught.value) == "The regular expression cannot be followed: unclosed character class."


@pytest.mark.parametrize(
    "given", [{"regex": "[0-9]+"}, {"grammar": 'start: "yes" | "no"'}, {"json_schema": {"type": "object"}}], ids=str
)
def test_a_grammar_that_can_be_followed_passes_without_a_model(given: dict[str, Any]) -> None:
    check_grammar(**given)


@pytest.mark.parametrize(
    ("limits", "given", "words"),
    [
        (Limits(characters=5), {"regex": "abcabc"}, "has 6 characters, and at most 5"),
        (Limits(symbols=50), {"json_schema": {"enum": [[str(i)] for i in range(99)]}}, "too big"),
        (Limits(fuel=1000), {"json_schema": {"enum": [str(i) for i in range(999)]}}, "too big"),
    ],
)
def test_grammars_beyond_a_limit_are_refused(limits: Limits, given: dict[str, Any], words: str) -> None:
    letters_compiler().compile(**given)
    with pytest.raises(UsageError, match=words):
        letters_compiler(limits).compile(**given)


def test_what_was_compiled_is_kept() -> None:
    compiler = letters_compiler()
    found = compiler.compile(json_schema={"type": "boolean"})
    assert compiler.compile(json_schema='{"type":  "boolean"}') is found
    assert byte_compiler(BYTES) is byte_compiler(BYTES)


def test_a_lark_grammar_is_followed() -> None:
    grammar = letters_compiler().compile(grammar='start: pair+\npair: "a" "b"')
    engine = Engine(ToyTarget(VOCABULARY), TruthDrafter({(1,): [4, 4, 4]}, VOCABULARY), VERIFIERS.build("match"))
    made = submit(engine, grammar, (1,), max_new_tokens=9)
    finish(engine)
    text = spelled(made.token_ids)
    assert all(a != b for a, b in pairwise(text))
    assert text.startswith("ab")
