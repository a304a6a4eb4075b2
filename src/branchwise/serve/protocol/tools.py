"""Functions that a model may call: what a request says about them, and the form of an answer that has to call one.

The names of the fields are OpenAI's. The chat template decides how a model writes its calls; `calls.py` reads them.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Sequence
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from branchwise.constrain.grammar import JSON_STYLE
from branchwise.serve.protocol.calls import CallFormat
from branchwise.serve.protocol.failures import Refusal
from branchwise.serve.protocol.formats import Wanted

MOST_TOOLS = 128

Name = Annotated[str, Field(pattern=r"^[A-Za-z0-9_.-]{1,64}$")]
Strict = ConfigDict(strict=True, extra="ignore")


class Function(BaseModel):
    """`strict` changes nothing here: where a call is wanted its schema is always followed."""

    model_config = Strict

    name: Name
    description: str | None = None
    parameters: dict[str, Any] | None = None


class Tool(BaseModel):
    model_config = Strict

    type: Literal["function"]
    function: Function

    def as_dict(self) -> dict[str, Any]:
        """The function as chat templates read it; some expect every function to have parameters."""
        said = self.function.model_dump(exclude_none=True)
        return {"type": "function", "function": {"parameters": NO_PARAMETERS, **said}}


class NamedFunction(BaseModel):
    model_config = Strict

    name: Name


class NamedTool(BaseModel):
    model_config = Strict

    type: Literal["function"]
    function: NamedFunction


class CalledFunction(BaseModel):
    model_config = Strict

    name: str
    arguments: str


class Called(BaseModel):
    """A call in the history of a conversation."""

    model_config = Strict

    id: str | None = None
    type: Literal["function"] = "function"
    function: CalledFunction

    def as_dict(self) -> dict[str, Any]:
        """The call as chat templates read it: with its arguments as an object."""
        try:
            arguments = json.loads(self.function.arguments or "{}")
        except ValueError:
            arguments = None
        if not isinstance(arguments, dict):
            said = "The arguments of a tool call are a JSON object, written as a text."
            raise Refusal(400, said, param="messages", code="invalid_value")
        function = {"name": self.function.name, "arguments": arguments}
        return {"id": self.id, "type": "function", "function": function}


NO_PARAMETERS: dict[str, Any] = {"type": "object", "properties": {}}


class Tooled(BaseModel):
    """The fields of a chat that say which tools may be called, and which must be."""

    tools: Annotated[list[Tool], Field(max_length=MOST_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None

    def check_tools(self) -> None:
        names = [tool.function.name for tool in self.tools or ()]
        if len(set(names)) < len(names):
            raise Refusal(400, "Two tools have the same name.", param="tools")
        if self.tool_choice in (None, "none", "auto"):
            return
        if not names:
            raise Refusal(400, "tool_choice asks for a call; name the tools too.", param="tool_choice")
        if isinstance(self.tool_choice, NamedTool) and self.tool_choice.function.name not in names:
            raise Refusal(400, "tool_choice names a function that is none of the tools.", param="tool_choice")

    @property
    def offered(self) -> list[Tool]:
        """The tools that the model is told about."""
        return [] if self.tool_choice == "none" else self.tools or []

    @property
    def must_call(self) -> list[Tool]:
        """The tools of which the model has to call one."""
        if isinstance(self.tool_choice, NamedTool):
            return [tool for tool in self.offered if tool.function.name == self.tool_choice.function.name]
        return self.offered if self.tool_choice == "required" else []

    @property
    def several(self) -> bool:
        """Whether one answer may hold several calls."""
        return self.parallel_tool_calls is not False and not isinstance(self.tool_choice, NamedTool)


def grammar_of(tools: Sequence[Tool], form: CallFormat, tokens: Collection[str], *, several: bool) -> Wanted:
    """The form of an answer that calls one of these tools, or several of them one after another. Tags that are single
    tokens of the model, which `tokens` holds, are written as these."""
    rules = []
    for number, tool in enumerate(tools):
        name = json.dumps(tool.function.name)
        # The schema stays the root of its own document, so that its references hold.
        schema = {"x-guidance": JSON_STYLE, **_closed(tool.function.parameters or NO_PARAMETERS), "type": "object"}
        before = _spelt([form.opening, f'{form.inside}{{"name": {name}, "{form.arguments}": '], tokens)
        behind = _spelt(["}" + form.inside, form.closing], tokens)
        rules.append(f"call_{number}: {before} arguments_{number} {behind}")
        rules.append(f"arguments_{number}: %json {json.dumps(schema, ensure_ascii=False)}")
    one = " | ".join(f"call_{number}" for number in range(len(tools)))
    more = f" ({json.dumps(form.between)} call)*" if several and form.several else ""
    return Wanted("tools", {"grammar": "\n".join([f"start: call{more}", f"call: {one}", *rules])})


def _spelt(parts: Sequence[str], tokens: Collection[str]) -> str:
    """Texts one after another, in the dialect of llguidance."""
    return " ".join(part if part in tokens else json.dumps(part) for part in parts if part)


def _closed(parameters: dict[str, Any]) -> dict[str, Any]:
    """A schema of parameters that does not mention further properties forbids them: the function has no use for any."""
    said = {"additionalProperties", "unevaluatedProperties", "allOf", "anyOf", "oneOf", "$ref"} & parameters.keys()
    return parameters if said or "properties" not in parameters else {**parameters, "additionalProperties": False}
