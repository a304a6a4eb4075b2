"""What a request may say: OpenAI's fields, and those that vLLM added for local models.

A value of the wrong type is refused. A field that we know and do not support is refused, unless its value asks for what
we do anyway. An unknown field is ignored and named in the answer's header `X-Ignored-Fields`: clients send fields of
other servers and of later versions, and expect an answer all the same.
"""

from __future__ import annotations

import re
from typing import Annotated, Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field, ValidationError

from branchwise.engine.request import MOST_TOP
from branchwise.serve.protocol.choosing import Chosen
from branchwise.serve.protocol.failures import Refusal
from branchwise.serve.protocol.formats import Formed
from branchwise.serve.protocol.tools import Called, Tooled
from branchwise.serve.settings import Limits

LARGEST = 2**31 - 1

Count = Annotated[int, Field(ge=1, le=LARGEST)]
Penalty = Annotated[float, Field(ge=-100, le=100)]

UNSUPPORTED: dict[str, tuple[Any, ...]] = {
    "audio": (),
    "best_of": (1,),
    "function_call": ("none",),
    "functions": ([],),
    "length_penalty": (1, 1.0),
    "min_tokens": (0,),
    "modalities": (["text"],),
    "prompt_logprobs": (0,),
    "suffix": ("",),
    "tool_choice": ("none", "auto"),
    "tools": ([],),
    "top_logprobs": (0,),
    "use_beam_search": (False,),
}
"""fields that would change an answer, and the values with which they do not; null never does"""

HARMLESS = frozenset(
    {
        "metadata",
        "parallel_tool_calls",
        "prediction",
        "priority",
        "prompt_cache_key",
        "reasoning_effort",
        "request_id",
        "safety_identifier",
        "service_tier",
        "store",
        "user",
        "verbosity",
    }
)
"""fields that are known and never change an answer of ours"""


class Form(BaseModel):
    model_config = ConfigDict(strict=True, extra="allow", allow_inf_nan=False)

    @property
    def ignored(self) -> list[str]:
        """Names of unknown fields; only plain words, since a header repeats them."""
        unknown = set(self.model_extra or ()) - HARMLESS - set(UNSUPPORTED)
        return sorted(name for name in unknown if re.fullmatch(r"[A-Za-z0-9_-]{1,40}", name))[:20]

    def check(self, limits: Limits) -> None:
        """Refuse what exceeds the limits, and what we cannot do."""
        for name, harmless in UNSUPPORTED.items():
            value = (self.model_extra or {}).get(name)
            # In Python False equals 0, in JSON it does not.
            same = [one for one in harmless if one == value and isinstance(one, bool) is isinstance(value, bool)]
            if value is not None and not same:
                raise Refusal(400, f"{name} is not supported by this server.", param=name, code="unsupported_value")


class StreamOptions(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    include_usage: bool | None = None


class Asked(Formed, Chosen, Form):
    """The fields that both kinds of completions take."""

    model: str | None = None
    n: Count | None = None
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    stop: str | list[str] | None = None
    seed: int | None = None
    max_tokens: Count | None = None
    temperature: Annotated[float, Field(ge=0, le=100)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    top_k: Annotated[int, Field(ge=-1, le=LARGEST)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(ge=0.01, le=100)] | None = None
    presence_penalty: Penalty | None = None
    frequency_penalty: Penalty | None = None
    logit_bias: dict[str, Annotated[float, Field(ge=-100, le=100)]] | None = None
    ignore_eos: bool | None = None
    metrics: bool | None = None
    """report in the answer what speculation did"""

    @property
    def stops(self) -> tuple[str, ...]:
        return (self.stop,) if isinstance(self.stop, str) else tuple(self.stop or ())

    @property
    def biases(self) -> dict[int, float]:
        return {int(token): bias for token, bias in (self.logit_bias or {}).items()}

    @property
    def include_usage(self) -> bool:
        return bool(self.stream_options and self.stream_options.include_usage)

    @property
    def wants_logprobs(self) -> bool:
        raise NotImplementedError

    @property
    def alternatives(self) -> int:
        """How many alternatives are reported for each token."""
        raise NotImplementedError

    @property
    def wanted_tokens(self) -> int | None:
        return self.max_tokens

    def check(self, limits: Limits) -> None:
        super().check(limits)
        _at_most("n", self.n or 1, limits.choices)
        _at_most("max_tokens", self.wanted_tokens or 1, limits.new_tokens)
        _at_most("stop", len(self.stops), limits.stops, " strings")
        _at_most("stop", max(map(len, self.stops), default=0), limits.stop_letters, " characters each")
        _at_most("logit_bias", len(self.logit_bias or ()), limits.biases, " tokens")
        if "" in self.stops:
            raise Refusal(400, "A stop string must not be empty.", param="stop")
        if not all(re.fullmatch("[0-9]{1,10}", token) for token in self.logit_bias or ()):
            raise Refusal(400, "logit_bias maps token ids, as strings of digits, to numbers.", param="logit_bias")
        if self.stream_options is not None and not self.stream:
            raise Refusal(400, "stream_options is for streams; set stream too.", param="stream_options")
        if self.trace and not self.stream:
            raise Refusal(400, "trace is for streams; set stream too.", param="trace")
        if self.wanted is not None and self.ignore_eos:
            raise Refusal(400, "A text that has a form ends with it; leave out ignore_eos.", param="ignore_eos")


class CompletionAsked(Asked):
    max_tokens: Annotated[int, Field(ge=0, le=LARGEST)] | None = None
    prompt: str | list[str] | list[int] | list[list[int]]
    logprobs: Annotated[int, Field(ge=0, le=MOST_TOP)] | bool | None = None
    echo: bool | None = None
    add_special_tokens: bool | None = None

    @property
    def prompts(self) -> list[str] | list[list[int]]:
        """One entry for each text to continue."""
        if isinstance(self.prompt, str):
            return [self.prompt]
        if self.prompt and isinstance(self.prompt[0], int):
            return [self.prompt]
        return self.prompt  # type: ignore[return-value]

    @property
    def wants_logprobs(self) -> bool:
        return self.logprobs is not None and self.logprobs is not False

    @property
    def alternatives(self) -> int:
        return int(self.logprobs or 0)

    def check(self, limits: Limits) -> None:
        super().check(limits)
        _at_most("prompt", len(self.prompts), limits.prompts, " texts")
        if not self.prompts:
            raise Refusal(400, "The list of prompts is empty.", param="prompt")
        if self.max_tokens == 0 and not self.echo:
            raise Refusal(400, "max_tokens may be 0 with echo alone; nothing would be written.", param="max_tokens")


class TextPart(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    type: Literal["text"]
    text: str


class Message(BaseModel):
    model_config = ConfigDict(strict=True, extra="ignore")

    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | list[TextPart] | None = None
    tool_calls: list[Called] | None = None
    """calls that an assistant has made"""
    tool_call_id: str | None = None
    """the id of the call that a tool answers"""
    name: str | None = None

    @property
    def text(self) -> str:
        if isinstance(self.content, list):
            return "".join(part.text for part in self.content)
        return self.content or ""

    @property
    def tells_of_tools(self) -> bool:
        return self.role == "tool" or bool(self.tool_calls)

    def as_dict(self) -> dict[str, Any]:
        said: dict[str, Any] = {"role": "system" if self.role == "developer" else self.role, "content": self.text}
        if self.tool_calls:
            said["tool_calls"] = [call.as_dict() for call in self.tool_calls]
        more = {"tool_call_id": self.tool_call_id, "name": self.name} if self.role == "tool" else {}
        return said | {key: value for key, value in more.items() if value is not None}


class ChatAsked(Tooled, Asked):
    messages: Annotated[list[Message], Field(min_length=1)]
    max_completion_tokens: Count | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MOST_TOP)] | None = None

    @property
    def wants_logprobs(self) -> bool:
        return bool(self.logprobs)

    @property
    def alternatives(self) -> int:
        return self.top_logprobs or 0

    @property
    def wanted_tokens(self) -> int | None:
        return self.max_tokens if self.max_completion_tokens is None else self.max_completion_tokens

    def check(self, limits: Limits) -> None:
        super().check(limits)
        if self.alternatives and not self.logprobs:
            raise Refusal(400, "top_logprobs come with logprobs; set logprobs to true.", param="top_logprobs")
        self.check_tools()
        if self.must_call and self.wanted is not None:
            said = f"An answer that must call a tool has the form of the call; leave out {self.wanted.field}."
            raise Refusal(400, said, param=self.wanted.field)
        if self.must_call and self.ignore_eos:
            raise Refusal(400, "A call ends its answer; leave out ignore_eos.", param="ignore_eos")


class TokenizeAsked(Form):
    model: str | None = None
    prompt: str | None = None
    messages: list[Message] | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None

    def check(self, limits: Limits) -> None:
        super().check(limits)
        if (self.prompt is None) == (not self.messages):
            raise Refusal(400, "Give a prompt or messages, one of the two.", param="prompt")


class DetokenizeAsked(Form):
    model: str | None = None
    tokens: list[Annotated[int, Field(ge=0, le=LARGEST)]]


F = TypeVar("F", bound=Form)


def parse(form: type[F], body: bytes, limits: Limits) -> F:
    """The body of a request, checked; a mistake is reported with the name of its field, never with its value."""
    try:
        asked = form.model_validate_json(body)
    except ValidationError as error:
        found = error.errors(include_url=False, include_context=False, include_input=False)
        if found[0]["type"] == "json_invalid":
            raise Refusal(400, "The body is not JSON in UTF-8.", code="invalid_json") from None
        field = str(found[0]["loc"][0]) if found[0]["loc"] else None
        alike = {one["msg"] for one in found if one["loc"][:1] == found[0]["loc"][:1]}
        said = found[0]["msg"] if len(alike) == 1 else "the value has a form or a type that is not allowed"
        raise Refusal(400, f"{field or 'The body'}: {said}.", param=field, code="invalid_value") from None
    asked.check(limits)
    return asked


def _at_most(name: str, value: int, most: int | None, unit: str = "") -> None:
    if most is not None and value > most:
        raise Refusal(400, f"{name} may be {most}{unit} at most, not {value}.", param=name, code="limit_exceeded")
