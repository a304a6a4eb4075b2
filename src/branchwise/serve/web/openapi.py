"""The server's own description in OpenAPI's form: its paths, what requests may say, what answers look like.

Bodies are read by hand, because mistakes are reported in OpenAI's form. So their schemas come from the models that read
them, with the limits of this server.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

from pydantic.json_schema import models_json_schema

from branchwise import __version__
from branchwise.serve.protocol.schema import (
    HARMLESS,
    UNSUPPORTED,
    ChatAsked,
    CompletionAsked,
    DetokenizeAsked,
    Form,
    TokenizeAsked,
)
from branchwise.serve.settings import Limits, Settings

PATH = "/openapi.json"
BODIES: dict[str, type[Form]] = {
    "/v1/completions": CompletionAsked,
    "/v1/chat/completions": ChatAsked,
    "/tokenize": TokenizeAsked,
    "/detokenize": DetokenizeAsked,
}
STATUSES = {
    400: "A value is wrong; `param` names its field.",
    401: "There is no key, or a wrong one.",
    404: "There is no such model.",
    408: "The body came too slowly.",
    413: "The body is too large.",
    429: "The queue or the server is full; `Retry-After` says when to come back.",
    500: "The text failed.",
    503: "The server is loading, ending or broken.",
}
ASKING = (400, 404, 408, 413, 429, 500, 503)
"""the statuses of every path that takes a body"""

Schema = dict[str, Any]
TEXT, WHOLE, NUMBER = ({"type": kind} for kind in ("string", "integer", "number"))


def document(settings: Settings) -> Schema:
    """The whole OpenAPI document."""
    _, shared = models_json_schema(
        [(form, "validation") for form in BODIES.values()], ref_template="#/components/schemas/{model}"
    )
    schemas: dict[str, Schema] = shared["$defs"]
    for form in BODIES.values():
        schemas[form.__name__]["properties"]["model"]["anyOf"][0]["enum"] = list(settings.names)
    for path in ("/v1/completions", "/v1/chat/completions"):
        _describe(schemas[BODIES[path].__name__]["properties"], settings.limits)
    about = {"title": "Branchwise", "version": __version__, "description": "A language model in OpenAI's protocol."}
    schemes = {"securitySchemes": {"key": {"type": "http", "scheme": "bearer"}}} if settings.keys else {}
    return {
        "openapi": "3.1.0",
        "info": about,
        "paths": _paths(bool(settings.keys)),
        "components": {"schemas": schemas | ANSWERS, **schemes},
    }


def _describe(properties: dict[str, Schema], limits: Limits) -> None:
    """Add the limits of this server, and for each unsupported field the values that mean the same as leaving it out."""
    for name, values in UNSUPPORTED.items():
        properties.setdefault(name, {"enum": [None, *values]})
    for name in HARMLESS:
        properties.setdefault(name, {})
    _bounded(properties["n"], "maximum", limits.choices)
    _bounded(properties["stop"], "maxItems", limits.stops)
    _bounded(properties["logit_bias"], "maxProperties", limits.biases)
    for name in ("max_tokens", "max_completion_tokens"):
        if name in properties and limits.new_tokens is not None:
            _bounded(properties[name], "maximum", limits.new_tokens)


def _bounded(schema: Schema, bound: str, value: int) -> None:
    """Set a bound in the schema of a field that may also be null: on its number, list or object, not on the null."""
    kind = {"maximum": "integer", "maxItems": "array", "maxProperties": "object"}[bound]
    for form in schema["anyOf"]:
        if form.get("type") == kind:
            form[bound] = min(value, form.get(bound, value))


def _paths(locked: bool) -> dict[str, Schema]:
    def get(says: str, answer: Schema, *statuses: int, key: bool = False) -> Schema:
        return {"get": _operation(says, answer, statuses, locked and key)}

    def post(path: str, says: str, answer: Schema) -> Schema:
        body = {"required": True, "content": {"application/json": {"schema": _ref(BODIES[path].__name__)}}}
        return {"post": _operation(says, answer, ASKING, locked) | {"requestBody": body}}

    state = _json(_ref("State"))
    name = {"name": "name", "in": "path", "required": True, "schema": TEXT}
    return {
        "/v1/chat/completions": post("/v1/chat/completions", "Answer a conversation.", _streamed("ChatCompletion")),
        "/v1/completions": post("/v1/completions", "Continue texts.", _streamed("Completion")),
        "/v1/models": get("List the names of the model.", _json(_ref("ModelList")), key=True),
        "/v1/models/{name}": get("Describe the model.", _json(_ref("Model")), 404, key=True) | {"parameters": [name]},
        "/v1/methods": get("List the methods that requests may name.", _json(_ref("MethodList")), 503, key=True),
        "/tokenize": post("/tokenize", "Turn text into tokens.", _json(_ref("Tokenized"))),
        "/detokenize": post("/detokenize", "Turn tokens into text.", _json(_object(prompt=TEXT))),
        "/health": {"get": _stating("Whether the process should live on.", state)},
        "/ready": {"get": _stating("Whether requests should be sent here.", state)},
        "/metrics": get("Counters for Prometheus.", {"text/plain": {"schema": TEXT}}),
        PATH: get("This description.", _json({"type": "object"})),
    }


def _operation(says: str, answer: Schema, statuses: Iterable[int], locked: bool) -> Schema:
    errors = {str(status): _error(status) for status in (*statuses, *([401] if locked else []))}
    found: Schema = {"summary": says, "responses": {"200": {"description": "The answer.", "content": answer}} | errors}
    return found | ({"security": [{"key": []}]} if locked else {})


def _stating(says: str, state: Schema) -> Schema:
    """A path whose answer has the same form whether it is well or not."""
    answers = {status: {"description": what, "content": state} for status, what in (("200", "Yes."), ("503", "No."))}
    return {"summary": says, "responses": answers}


def _error(status: int) -> Schema:
    found: Schema = {"description": STATUSES[status], "content": _json(_ref("Error"))}
    if status in (429, 503):
        found["headers"] = {"Retry-After": {"schema": TEXT, "description": "Seconds to wait."}}
    return found


def _json(schema: Schema) -> Schema:
    return {"application/json": {"schema": schema}}


def _streamed(name: str) -> Schema:
    says = f"With `stream`: a part of a {name}, an Error, or `[DONE]`."
    return _json(_ref(name)) | {"text/event-stream": {"schema": _object(data=TEXT | {"description": says})}}


def _ref(name: str) -> Schema:
    return {"$ref": f"#/components/schemas/{name}"}


def _object(**properties: Schema) -> Schema:
    """An object that has all of these fields; a field whose schema allows null may be null."""
    return {"type": "object", "properties": properties, "required": list(properties)}


def _list(of: Schema) -> Schema:
    return {"type": "array", "items": of}


def _maybe(schema: Schema) -> Schema:
    return {"anyOf": [schema, {"type": "null"}]}


def _answer(kind: str, **choice: Schema) -> Schema:
    end = _maybe({"enum": ["stop", "length", "tool_calls"]})
    usage = _object(prompt_tokens=WHOLE, completion_tokens=WHOLE, total_tokens=WHOLE)
    choices = _list(_object(index=WHOLE, **choice, finish_reason=end))
    return _object(id=TEXT, object={"const": kind}, created=WHOLE, model=TEXT, choices=choices, usage=usage)


_TOKEN = _object(token=TEXT, logprob=_maybe(NUMBER), bytes=_maybe(_list(WHOLE)))
_TOKENS = _list(_TOKEN | {"properties": _TOKEN["properties"] | {"top_logprobs": _list(_TOKEN)}})
_COMPLETED = _object(
    tokens=_list(TEXT),
    token_logprobs=_list(_maybe(NUMBER)),
    top_logprobs=_maybe(_list(_maybe({"type": "object", "additionalProperties": _maybe(NUMBER)}))),
    text_offset=_list(WHOLE),
)
_MODEL = _object(id=TEXT, object={"const": "model"}, created=WHOLE, owned_by=TEXT, max_model_len=_maybe(WHOLE))
ANSWERS: dict[str, Schema] = {
    "Error": _object(error=_object(message=TEXT, type=TEXT, param=_maybe(TEXT), code=_maybe(TEXT))),
    "Completion": _answer("text_completion", text=TEXT, logprobs=_maybe(_COMPLETED)),
    "ChatCompletion": _answer(
        "chat.completion",
        message=_object(role={"const": "assistant"}, content=_maybe(TEXT)),
        logprobs=_maybe(_object(content=_maybe(_TOKENS))),
    ),
    "Model": _MODEL,
    "ModelList": _object(object={"const": "list"}, data=_list(_ref("Model"))),
    "MethodList": _object(
        serving=_maybe({"type": "object"}),
        tasks=_list(TEXT),
        lanes=WHOLE,
        methods=_list({"type": "object"}),
        drafters=_list({"type": "object"}),
        verifiers={"type": "object"},
    ),
    "Tokenized": _object(count=WHOLE, max_model_len=WHOLE, tokens=_list(WHOLE), token_strs=_maybe(_list(TEXT))),
    "State": _object(status={"enum": ["loading", "ready", "draining", "broken"]}),
}
