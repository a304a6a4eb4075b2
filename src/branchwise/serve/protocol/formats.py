"""The form that an answer must have: OpenAI's `response_format`, and the fields of vLLM for the same and more.

vLLM has `structured_outputs` with one of json, regex, choice, grammar and json_object; earlier versions had a field
`guided_…` for each. All of them become something that `branchwise.constrain` compiles.
"""

from __future__ import annotations

import re
from dataclasses import dataclass
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from branchwise.constrain import Grammar, Limits, compiler_for
from branchwise.errors import UsageError
from branchwise.llm import LLM
from branchwise.serve.protocol.failures import Refusal, refusal_of

ANY_OBJECT = {"type": "object"}
MOST_CHOICES = 1024

Schema = dict[str, Any] | str
Choices = Annotated[list[str], Field(min_length=1, max_length=MOST_CHOICES)]


class Strict(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")


class NamedSchema(Strict):
    """`strict` changes nothing here: a schema is always followed."""

    name: str | None = None
    schema_: Annotated[dict[str, Any], Field(alias="schema")]


class ResponseFormat(Strict):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: NamedSchema | None = None


class StructuredOutputs(Strict):
    json_: Annotated[Schema | None, Field(alias="json")] = None
    regex: str | None = None
    choice: Choices | None = None
    grammar: str | None = None
    json_object: bool | None = None


@dataclass(frozen=True)
class Wanted:
    """The form that a field asks for."""

    field: str
    source: dict[str, Any]
    """the argument of `GrammarCompiler.compile`"""


class Formed(BaseModel):
    """The fields of a request that say which form its answer must have."""

    response_format: ResponseFormat | None = None
    structured_outputs: StructuredOutputs | None = None
    guided_json: Schema | None = None
    guided_regex: str | None = None
    guided_choice: Choices | None = None
    guided_grammar: str | None = None

    @property
    def wanted(self) -> Wanted | None:
        """The form that the answer must have, or None; two forms are refused."""
        found = [*self._of_openai(), *self._of_vllm()]
        if len(found) > 1:
            fields = " and ".join(dict.fromkeys(one.field for one in found))
            raise Refusal(400, f"An answer has one form, and {fields} ask for several.", param=found[1].field)
        return found[0] if found else None

    def _of_openai(self) -> list[Wanted]:
        asked = self.response_format
        if asked is None or asked.type == "text":
            return []
        if asked.type == "json_object":
            return [Wanted("response_format", {"json_schema": ANY_OBJECT})]
        if asked.json_schema is None:
            raise Refusal(400, "A response_format of json_schema needs its json_schema.", param="response_format")
        return [Wanted("response_format", {"json_schema": asked.json_schema.schema_})]

    def _of_vllm(self) -> list[Wanted]:
        given = self.structured_outputs or StructuredOutputs()
        found = [
            Wanted(field, {kind: source})
            for field, kind, source in (
                ("structured_outputs", "json_schema", given.json_),
                ("structured_outputs", "json_schema", ANY_OBJECT if given.json_object else None),
                ("structured_outputs", "regex", given.regex),
                ("structured_outputs", "regex", _one_of(given.choice)),
                ("structured_outputs", "grammar", given.grammar),
                ("guided_json", "json_schema", self.guided_json),
                ("guided_regex", "regex", self.guided_regex),
                ("guided_choice", "regex", _one_of(self.guided_choice)),
                ("guided_grammar", "grammar", self.guided_grammar),
            )
            if source is not None
        ]
        if self.structured_outputs is not None and not any(one.field == "structured_outputs" for one in found):
            said = "structured_outputs needs one of json, regex, choice, grammar and json_object."
            raise Refusal(400, said, param="structured_outputs")
        return found


def _one_of(texts: list[str] | None) -> str | None:
    """A regular expression for any of these texts. Only letters with a meaning in regular expressions are escaped,
    because not every letter may be."""
    return None if texts is None else "|".join(re.sub(r"[\\.+*?()|\[\]{}^$#&\-~]", r"\\\g<0>", text) for text in texts)


def compiled(llm: LLM, wanted: Wanted, limits: Limits) -> Grammar:
    """The form in the tokens of the model. A form that no text can follow is refused. Takes a while for large forms."""
    try:
        compiler = compiler_for(llm.tokenizer, llm.engine.target.info.vocabulary, llm.stop_tokens, limits)
        grammar = compiler.compile(**wanted.source)
    except UsageError as error:
        raise refusal_of(error, wanted.field) from None
    # Some grammars turn out too complex only when asked for the first tokens, which is the client's mistake.
    first = grammar.constrain(0).here
    if not any(first.bits) or first.error:
        raise Refusal(400, first.error or "No text has this form.", param=wanted.field)
    return grammar
