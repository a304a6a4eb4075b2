"""Grammars for the tokens of a model, compiled by llguidance (https://github.com/guidance-ai/llguidance).

JSON is written as Python's `json.dumps` writes it, with one space after colons and commas and none elsewhere, because a
model that may choose its white space can write it for ever. A schema that wants it otherwise says so in `x-guidance`,
as {"x-guidance": {"whitespace_flexible": true}}.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import TYPE_CHECKING, Any
from weakref import WeakKeyDictionary

from branchwise.constrain.constraint import Constraint, explained
from branchwise.core.sampling import SamplingParams
from branchwise.errors import UsageError

if TYPE_CHECKING:
    from llguidance import LLMatcher, LLTokenizer
    from transformers import PreTrainedTokenizerBase

JSON_STYLE = {"whitespace_flexible": False, "item_separator": ", ", "key_separator": ": "}
MOST_GRAMMARS = 64
"""how many compiled grammars are kept for a model"""


@dataclass(frozen=True)
class Limits:
    """How large a grammar may be. A larger one is refused before it takes time or memory."""

    characters: int = 200_000
    """characters of a schema, a regular expression or a grammar, as given"""
    symbols: int = 100_000
    """symbols of its rules"""
    fuel: int = 1_000_000
    """steps of compiling its regular expressions; 50,000 take a millisecond"""


@dataclass(frozen=True, eq=False)
class Grammar:
    """What a text may be, in the tokens of a model."""

    matcher: LLMatcher
    """a matcher at its beginning; every request gets a copy"""
    ends: tuple[int, ...]
    """the tokens that end a text"""

    def constrain(self, prompt_length: int) -> Constraint:
        """The constraint of one request, whose prompt has `prompt_length` tokens."""
        return Constraint(self.matcher, self.ends, prompt_length)

    def applied_to(self, sampling: SamplingParams, prompt_length: int) -> SamplingParams:
        """The sampling parameters of one request that follows this grammar. Every request needs its own."""
        return replace(sampling, processors=(*sampling.processors, self.constrain(prompt_length)))


class GrammarCompiler:
    """Compiles grammars for one tokenizer, and keeps the latest ones."""

    def __init__(self, tokenizer: LLTokenizer, limits: Limits | None = None) -> None:
        """`tokenizer` knows which tokens end a text."""
        self.tokenizer = tokenizer
        self.limits = limits or Limits()
        self._compiled = lru_cache(MOST_GRAMMARS)(self._compile)

    def compile(
        self,
        *,
        json_schema: Mapping[str, Any] | str | None = None,
        regex: str | None = None,
        grammar: str | None = None,
    ) -> Grammar:
        """The grammar of exactly one of: a JSON schema, a regular expression that the whole text must match, or rules
        in the dialect of Lark that llguidance reads."""
        kind, text = _stated(json_schema, regex, grammar)
        if len(text) > self.limits.characters:
            raise UsageError(
                f"The {kind} has {len(text)} characters, and at most {self.limits.characters} are allowed; shorten it."
            )
        return self._compiled(kind, text)

    def _compile(self, kind: str, text: str) -> Grammar:
        from llguidance import LLMatcher, LLParserLimits

        rules = _rules_of(kind, text)
        limits = LLParserLimits(
            max_grammar_size=self.limits.symbols, initial_lexer_fuel=self.limits.fuel, verbose_errors=False
        )
        wrong, why = LLMatcher.validate_grammar_with_warnings(rules, self.tokenizer, limits=limits)
        matcher = LLMatcher(self.tokenizer, rules, limits=limits, log_level=0)
        if wrong or matcher.is_error():
            raise _refused(kind, why[0] if wrong else matcher.get_error())
        return Grammar(matcher, tuple(self.tokenizer.eos_tokens))


def check_grammar(
    *, json_schema: Mapping[str, Any] | str | None = None, regex: str | None = None, grammar: str | None = None
) -> None:
    """Refuse a grammar that no model could follow, before a model is loaded; takes exactly one of the sources of
    `GrammarCompiler.compile`."""
    with _installed():
        from llguidance import LLMatcher
    kind, text = _stated(json_schema, regex, grammar)
    if wrong := LLMatcher.validate_grammar(_rules_of(kind, text)):
        raise _refused(kind, wrong)


def _stated(schema: Mapping[str, Any] | str | None, regex: str | None, grammar: str | None) -> tuple[str, str]:
    """The kind of the source that was given, and its text."""
    given = {"JSON schema": schema, "regular expression": regex, "grammar": grammar}
    [(kind, source), *others] = [(kind, source) for kind, source in given.items() if source is not None]
    if others:
        raise UsageError(f"A text follows a {kind} or a {others[0][0]}, not both.")
    text = _schema_text(source) if kind == "JSON schema" else source
    if not isinstance(text, str):
        raise UsageError(f"A {kind} is a text, not {type(text).__name__}.")
    return kind, text


def _rules_of(kind: str, text: str) -> Any:
    from llguidance import LLMatcher

    if kind == "JSON schema":
        return LLMatcher.grammar_from_json_schema(text, defaults=JSON_STYLE)  # type: ignore[arg-type]
    return LLMatcher.grammar_from_regex(text) if kind == "regular expression" else LLMatcher.grammar_from_lark(text)


def _refused(kind: str, why: str) -> UsageError:
    """An error about a source. A regular expression is compiled as a rule of a grammar, so only the part of the message
    about the expression itself is kept."""
    reason = explained(why)
    return UsageError(f"The {kind} cannot be followed: {reason.rpartition(' error: ')[2]}.")


@contextmanager
def _installed() -> Iterator[None]:
    try:
        yield
    except ImportError:
        raise UsageError(
            "A text that follows a grammar needs llguidance. Install it with: pip install 'branchwise[grammar]'"
        ) from None


def _schema_text(schema: Mapping[str, Any] | str | None) -> Any:
    """A schema as JSON, whether it was given as a text or as a mapping."""
    try:
        stated = json.loads(schema) if isinstance(schema, str) else schema
        if not isinstance(stated, Mapping | bool):
            raise UsageError(f"A JSON schema is an object, not {type(stated).__name__}.")
        return json.dumps(stated, ensure_ascii=False)
    except (TypeError, ValueError, RecursionError) as error:
        raise UsageError(f"The JSON schema is not JSON: {explained(str(error))}.") from None


_compilers: WeakKeyDictionary[Any, dict[tuple[Any, ...], GrammarCompiler]] = WeakKeyDictionary()


def compiler_for(
    tokenizer: PreTrainedTokenizerBase,
    vocabulary: int,
    ends: Sequence[int] | frozenset[int],
    limits: Limits | None = None,
) -> GrammarCompiler:
    """The compiler for a tokenizer and a model with `vocabulary` tokens, of which `ends` end a text. It is made only
    once, because reading the whole vocabulary takes a second."""
    with _installed():
        import llguidance.hf
    if not ends:
        raise UsageError("A text that follows a grammar ends with it, and this model has no token that ends a text.")
    known, key = _compilers.setdefault(tokenizer, {}), (vocabulary, frozenset(ends), limits)
    if key not in known:
        try:
            tokens = llguidance.hf.from_tokenizer(tokenizer, n_vocab=vocabulary, eos_token=sorted(ends))  # type: ignore[arg-type]
        except (ValueError, RuntimeError) as error:
            raise UsageError(f"Grammars cannot be followed in the tokens of this model: {error}.") from None
        known[key] = GrammarCompiler(tokens, limits)
    return known[key]
