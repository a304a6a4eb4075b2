"""Answers that must have a form: JSON of a schema, one of several texts, a regular expression, a grammar."""

from __future__ import annotations

import json
import re
import sys
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest

pytest.importorskip("llguidance")

from branchwise.constrain import Limits as GrammarLimits
from branchwise.llm import LLM
from branchwise.serve.settings import Limits
from tests.serving import Served, byte_tokenizer, read_events, serving, tiny_llm

PLACE: dict[str, Any] = {
    "type": "object",
    "properties": {"x": {"type": "integer", "minimum": 0, "maximum": 99}, "up": {"type": "boolean"}},
    "required": ["x", "up"],
    "additionalProperties": False,
}
AS_PLACE: Any = {"type": "json_schema", "json_schema": {"name": "place", "schema": PLACE, "strict": True}}
SHORT = {str(byte_tokenizer().convert_tokens_to_ids(letter)): 60 for letter in '"}'}
"""strings and objects end soon"""


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    limits = Limits(grammar=GrammarLimits(characters=2000))
    with serving(lambda: tiny_llm(context=256), limits=limits) as client:
        yield client


@pytest.fixture(scope="module")
def plain() -> LLM:
    return tiny_llm("none", context=256)


def chat(served: Served, **options: Any) -> Any:
    return served.post("/v1/chat/completions", json={"messages": [{"role": "user", "content": "Hi"}], **options})


def is_place(text: str) -> bool:
    value = json.loads(text)
    return set(value) == {"x", "up"} and 0 <= value["x"] <= 99 and isinstance(value["up"], bool)


def test_the_openai_client_gets_json_of_its_schema_as_the_library_writes_it(served: Served, plain: LLM) -> None:
    with openai.OpenAI(base_url=f"{served.address}/v1", api_key="none", max_retries=0) as client:
        answer = client.chat.completions.create(
            model="tiny", messages=[{"role": "user", "content": "Hi"}], response_format=AS_PLACE, temperature=0
        )
    [choice] = answer.choices
    assert choice.finish_reason == "stop"
    assert is_place(choice.message.content or "")
    assert choice.message.content == plain.generate("Hi", json_schema=PLACE).text


def test_every_choice_follows_the_schema_by_itself(served: Served) -> None:
    choices = chat(served, response_format=AS_PLACE, n=6, seed=1, temperature=2).json()["choices"]
    texts = [choice["message"]["content"] for choice in choices]
    assert all(map(is_place, texts))
    assert len(set(texts)) > 1


def test_any_object_is_an_object(served: Served) -> None:
    for seed in range(4):
        asked = {"response_format": {"type": "json_object"}, "seed": seed, "max_tokens": 100, "logit_bias": SHORT}
        [choice] = chat(served, **asked).json()["choices"]
        assert choice["finish_reason"] == "stop"
        assert isinstance(json.loads(choice["message"]["content"]), dict)
    [choice] = chat(served, response_format={"type": "text"}, max_tokens=5, ignore_eos=True).json()["choices"]
    assert choice["finish_reason"] == "length"


ODD = ['say "a/b"?', "1.5 (or so) [x] {y} ^$ #&-~ \\ | +*", "line\nend <é€>"]

FIELDS: dict[str, tuple[dict[str, Any], str]] = {
    "a regular expression": ({"structured_outputs": {"regex": "[0-9]{3}-[a-c]+x"}}, "[0-9]{3}-[a-c]+x"),
    "the same in the earlier field": ({"guided_regex": "[0-9]{3}"}, "[0-9]{3}"),
    "one of several texts": ({"structured_outputs": {"choice": ODD}}, "|".join(map(re.escape, ODD))),
    "the same for texts": ({"guided_choice": ["yes", "no"]}, "yes|no"),
    "rules": ({"structured_outputs": {"grammar": 'start: "a" "b"+ "c"'}}, "ab+c"),
    "earlier rules": ({"guided_grammar": 'start: "a" /[0-9]{2}/'}, "a[0-9]{2}"),
    "a schema": ({"structured_outputs": {"json": {"enum": ["a", 1]}}}, '"a"|1'),
    "a schema as a text": ({"guided_json": '{"type": "boolean"}'}, "true|false"),
}


@pytest.mark.parametrize(("fields", "pattern"), FIELDS.values(), ids=FIELDS)
def test_the_fields_of_vllm_are_followed(served: Served, fields: dict[str, Any], pattern: str) -> None:
    bias = {str(byte_tokenizer().convert_tokens_to_ids(letter)): 20 for letter in "xc"}
    found = served.complete("Hi", n=3, temperature=1, seed=5, max_tokens=90, logit_bias=bias, **fields)
    for choice in found["choices"]:
        assert choice["finish_reason"] == "stop"
        assert re.fullmatch(pattern, choice["text"]), choice["text"]


def test_any_of_the_texts_can_come(served: Served) -> None:
    found = served.complete("Hi", n=24, temperature=5, seed=5, max_tokens=90, guided_choice=ODD)
    assert {choice["text"] for choice in found["choices"]} == set(ODD)


def test_free_texts_beside_those_of_a_form_are_those_of_the_model_alone(served: Served, plain: LLM) -> None:
    def ask(number: int) -> str:
        forms: list[dict[str, Any]] = [{}, {"guided_json": PLACE}, {"guided_regex": "[ab]{9}"}]
        asked = {"max_tokens": 30, "temperature": 0, "logprobs": 2 if number % 2 else None}
        return str(served.complete("abcabcabc", **asked, **forms[number % 3])["choices"][0]["text"])

    with ThreadPoolExecutor(9) as pool:
        texts = list(pool.map(ask, range(9)))
    forms: list[dict[str, Any]] = [{}, {"json_schema": PLACE}, {"regex": "[ab]{9}"}]
    alone = [plain.generate("abcabcabc", max_new_tokens=30, raw=True, **form).text for form in forms]
    assert texts == alone * 3


def test_a_stream_of_a_form_is_its_text(served: Served) -> None:
    asked = {"guided_json": PLACE, "temperature": 0, "max_tokens": 40}
    whole = served.complete("Hi", **asked)["choices"][0]["text"]
    with served.stream("POST", "/v1/completions", json={"prompt": "Hi", "stream": True, **asked}) as answer:
        lines = [line.removeprefix("data: ") for line in answer.iter_lines() if line]
    assert "".join(json.loads(line)["choices"][0]["text"] for line in lines[:-1]) == whole


def schema_format(schema: Any) -> dict[str, Any]:
    return {"response_format": {"type": "json_schema", "json_schema": {"name": "it", "schema": schema}}}


REFUSED: dict[str, tuple[dict[str, Any], str, str]] = {
    "a type that is not one": (schema_format({"type": "objekt"}), "response_format", "Invalid type"),
    "a keyword that cannot be followed": (schema_format({"not": {}}), "response_format", "Unimplemented"),
    "a schema that is no object": (schema_format(5), "response_format", "an object"),
    "no schema": ({"response_format": {"type": "json_schema"}}, "response_format", "json_schema"),
    "an unknown format": ({"response_format": {"type": "xml"}}, "response_format", ""),
    "a large schema": (schema_format({"enum": ["a" * 2000]}), "response_format", "2000 are allowed"),
    "an expression without an end": ({"guided_regex": "a("}, "guided_regex", "unclosed group"),
    "rules without a name": ({"guided_grammar": "start: foo"}, "guided_grammar", "unknown name"),
    "a text that is no schema": ({"guided_json": "{"}, "guided_json", "not JSON"),
    "no texts": ({"guided_choice": []}, "guided_choice", ""),
    "nothing": ({"structured_outputs": {}}, "structured_outputs", "one of"),
    "two forms": ({"guided_regex": "a", **schema_format({})}, "guided_regex", "one form"),
    "two in one": ({"structured_outputs": {"regex": "a", "choice": ["a"]}}, "structured_outputs", "one form"),
    "no end": ({"guided_regex": "a", "ignore_eos": True}, "ignore_eos", "ends"),
}


@pytest.mark.parametrize(("asked", "param", "words"), REFUSED.values(), ids=REFUSED)
def test_a_form_that_cannot_be_followed_is_refused(
    served: Served, asked: dict[str, Any], param: str, words: str
) -> None:
    answer = chat(served, max_tokens=5, **asked)
    assert answer.status_code == 400, answer.text
    error = answer.json()["error"]
    assert error["param"] == param
    assert words in error["message"]


def test_a_form_that_becomes_too_complex_fails_by_itself(served: Served) -> None:
    answer = chat(served, max_tokens=5, guided_regex="(((a{99}){99}){99}){99}")
    assert answer.status_code == 400
    error = answer.json()["error"]
    assert (error["code"], error["param"], error["type"]) == ("form_failed", "guided_regex", "invalid_request_error")
    assert "too complex" in error["message"]
    *events, done = read_events(chat(served, max_tokens=5, guided_regex="(((b{99}){99}){99}){99}", stream=True))
    assert done == "[DONE]"
    assert json.loads(events[-1])["error"] == error
    assert chat(served, guided_regex="a{3}").json()["choices"][0]["message"]["content"] == "aaa"


def test_without_the_extra_a_form_is_refused_with_what_to_install(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setitem(sys.modules, "llguidance.hf", None)
    answer = chat(served, guided_regex="a")
    assert answer.status_code == 400
    assert "pip install 'branchwise[grammar]'" in answer.json()["error"]["message"]
    assert chat(served, max_tokens=2).status_code == 200
