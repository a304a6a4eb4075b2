"""Tools: what a chat template is told of them, and calls that are read from what the model writes."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest
from tokenizers import AddedToken

pytest.importorskip("llguidance")

from branchwise.backends.transformers.target import TransformersTarget
from branchwise.draft import build_drafter
from branchwise.engine import Engine
from branchwise.llm import LLM
from branchwise.serve.protocol.calls import PLAIN, TAGGED, CallFormat, format_of
from branchwise.verify import VERIFIERS
from tests.serving import TEMPLATE, Served, byte_tokenizer, read_events, serving, tiny_llm

START = "<|start|>system\n{% for tool in tools or [] %}{{ tool | tojson }}{% endfor %}<|end|>"
HERMES = (
    START + "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}{% for call in m.tool_calls or [] %}"
    "<tool_call>\n{{ call.function | tojson }}\n</tool_call>{% endfor %}<|end|>{% endfor %}<|start|>assistant:"
)
LLAMA = (
    START + "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}{% for call in m.tool_calls or [] %}"
    '{"name": "{{ call.function.name }}", "parameters": {{ call.function.arguments | tojson }}}{% endfor %}<|end|>'
    "{% endfor %}<|start|>assistant:"
)
TEMPLATES = {"hermes": HERMES, "llama": LLAMA}
UP: dict[str, Any] = {
    "type": "object",
    "properties": {"up": {"$ref": "#/$defs/Up"}},
    "required": ["up"],
    "$defs": {"Up": {"type": "boolean"}},
}
TOOLS: Any = [
    {"type": "function", "function": {"name": "look", "description": "Look up.", "parameters": UP}},
    {"type": "function", "function": {"name": "wait"}},
]
NAMES = ["look", "wait"]
HI: Any = [{"role": "user", "content": "Hi"}]
END = {str(byte_tokenizer().eos_token_id): 60}
"""answers end where they can"""


def load(template: str) -> LLM:
    llm = tiny_llm(context=1024)
    llm.tokenizer.chat_template = template
    return llm


def load_with_tags(special: bool) -> LLM:
    """A model that has tokens for the tags."""
    llm = load(HERMES)
    tags = [AddedToken(tag, special=special, normalized=False) for tag in ("<tool_call>", "</tool_call>")]
    llm.tokenizer.add_tokens(tags, special_tokens=special)
    llm.model.resize_token_embeddings(len(llm.tokenizer))
    target = TransformersTarget(llm.model, slots=4, max_nodes=32, context=1024)
    engine = Engine(target, build_drafter("ngram"), VERIFIERS.build("match"), prefix_cache=True)
    return LLM("tiny", llm.model, llm.tokenizer, engine)


@pytest.fixture(scope="module", params=TEMPLATES)
def served(request: pytest.FixtureRequest) -> Iterator[Served]:
    with serving(lambda: load(TEMPLATES[request.param])) as client:
        yield client


@pytest.fixture(scope="module")
def tagged() -> Iterator[Served]:
    with serving(lambda: load(HERMES)) as client:
        yield client


def chat(served: Served, **options: Any) -> Any:
    return served.post("/v1/chat/completions", json={"messages": HI, "tools": TOOLS, "logit_bias": END, **options})


def of_look(call: Any) -> bool:
    arguments = json.loads(call["function"]["arguments"])
    return call["function"]["name"] == "look" and set(arguments) == {"up"} and isinstance(arguments["up"], bool)


def test_a_call_that_is_required_always_parses(served: Served) -> None:
    found = chat(served, tool_choice="required", parallel_tool_calls=False, n=6, temperature=3, seed=1).json()
    for choice in found["choices"]:
        assert choice["finish_reason"] == "tool_calls"
        assert choice["message"]["content"] is None
        [call] = choice["message"]["tool_calls"]
        assert (call["type"], call["id"][:5]) == ("function", "call_")
        assert of_look(call) or call["function"] == {"name": "wait", "arguments": "{}"}
    ids = {choice["message"]["tool_calls"][0]["id"] for choice in found["choices"]}
    assert len(ids) == 6


def test_the_function_that_is_named_is_called_whole_and_streamed(served: Served) -> None:
    named: Any = {"type": "function", "function": {"name": "look"}}
    with openai.OpenAI(base_url=f"{served.address}/v1", api_key="none", max_retries=0) as client:
        asked: Any = {"model": "tiny", "messages": HI, "tools": TOOLS, "tool_choice": named, "seed": 2}
        [choice] = client.chat.completions.create(**asked).choices
        [call] = choice.message.tool_calls or []
        assert call.type == "function"
        assert of_look(call.model_dump())
        chunks = [chunk.choices[0] for chunk in client.chat.completions.create(stream=True, **asked)]
    begun, *others = [part for chunk in chunks for part in chunk.delta.tool_calls or []]
    assert begun.function is not None
    assert (begun.index, begun.type, begun.function.name, begun.function.arguments) == (0, "function", "look", "")
    assert begun.id
    assert {(part.index, part.id, part.type, part.function and part.function.name) for part in others} == {
        (0, None, None, None)
    }
    pieces = [part.function.arguments or "" for part in others if part.function]
    assert "".join(pieces) == call.function.arguments
    assert len(pieces) > 1, "they did not come as they were written"
    assert not any(chunk.delta.content for chunk in chunks)
    assert [chunk.finish_reason for chunk in chunks if chunk.finish_reason] == ["tool_calls"]


@pytest.mark.parametrize("special", [False, True])
def test_tags_can_be_tokens_of_their_own(special: bool) -> None:
    with serving(lambda: load_with_tags(special)) as client:
        opening, closing = client.llm.tokenizer.convert_tokens_to_ids(["<tool_call>", "</tool_call>"])
        found = chat(client, tool_choice="required", parallel_tool_calls=False, logprobs=True, seed=1).json()
        [choice] = found["choices"]
        assert len(choice["message"]["tool_calls"]) == 1
        tokens = [entry["token"] for entry in choice["logprobs"]["content"]]
        assert (tokens[0], tokens[-2]) == ("<tool_call>", "</tool_call>")
        free = chat(client, max_tokens=3, temperature=0, logit_bias={str(opening): 100, str(closing): 90}).json()
        assert free["choices"][0]["message"]["content"] == "<tool_call>" * 3


def test_the_helper_of_the_client_adds_up_several_calls(tagged: Served) -> None:
    both = f"Wait.\n{CALL}\n{WAITING}"
    asked: Any = {"model": "tiny", "messages": HI, "tools": TOOLS, "extra_body": {"guided_choice": [both]}}
    with openai.OpenAI(base_url=f"{tagged.address}/v1", api_key="none", max_retries=0) as client:
        with client.chat.completions.stream(**asked) as stream:
            done = [event for event in stream if event.type == "tool_calls.function.arguments.done"]
            found: Any = stream.get_final_completion().choices[0]
        whole: Any = client.chat.completions.create(**asked).choices[0]
    for choice in (found, whole):
        assert (choice.message.content, choice.finish_reason) == ("Wait.", "tool_calls")
        functions = [call.function for call in choice.message.tool_calls]
        assert [(one.name, one.arguments) for one in functions] == [("look", '{"up": true}'), ("wait", "{}")]
    assert [(event.index, event.name) for event in done] == [(0, "look"), (1, "wait")]


def test_a_call_that_is_cut_has_the_arguments_that_were_written(tagged: Served) -> None:
    cut = CALL.index("true") + 2
    asked = {"guided_choice": [CALL], "max_tokens": cut}
    whole = chat(tagged, **asked).json()["choices"][0]
    assert (whole["message"]["content"], whole["finish_reason"]) == (None, "length")
    assert whole["message"]["tool_calls"][0]["function"] == {"name": "look", "arguments": '{"up": tr'}
    with tagged.stream(
        "POST", "/v1/chat/completions", json={"messages": HI, "tools": TOOLS, "stream": True, **asked}
    ) as answer:
        events = [json.loads(data)["choices"][0] for data in read_events(answer) if data != "[DONE]"]
    told = [part["function"] for event in events for part in event["delta"].get("tool_calls", [])]
    assert "".join(part["arguments"] for part in told) == '{"up": tr'
    assert [event["finish_reason"] for event in events if event["finish_reason"]] == ["length"]


def test_several_calls_can_come_if_they_may(tagged: Served) -> None:
    more = {str(byte_tokenizer().eos_token_id): -3}
    found = chat(tagged, tool_choice="required", max_tokens=300, logit_bias=more, seed=4).json()
    calls = found["choices"][0]["message"]["tool_calls"]
    assert len(calls) > 1
    assert len({call["id"] for call in calls}) == len(calls)


WAITING = '<tool_call>{"name": "wait"}</tool_call>'
CALL = '<tool_call>\n{"name": "look", "arguments": {"up": true}}\n</tool_call>'


def test_without_a_choice_text_is_text_and_a_call_is_a_call(tagged: Served) -> None:
    free = chat(tagged, max_tokens=8, temperature=0, logit_bias={}).json()["choices"][0]
    assert isinstance(free["message"]["content"], str)
    assert "tool_calls" not in free["message"]
    both = chat(tagged, guided_choice=[f"Wait.\n{CALL}\n{CALL}"]).json()["choices"][0]
    assert both["message"]["content"] == "Wait."
    assert len(both["message"]["tool_calls"]) == 2
    one = chat(tagged, guided_choice=[f"{CALL}\n{CALL}"], parallel_tool_calls=False).json()["choices"][0]
    assert len(one["message"]["tool_calls"]) == 1
    cut = chat(tagged, guided_choice=[CALL], max_tokens=20).json()["choices"][0]
    assert (cut["message"]["content"], cut["finish_reason"]) == (CALL[:20], "length")
    none = chat(tagged, guided_choice=[CALL], tool_choice="none").json()["choices"][0]
    assert (none["message"]["content"], none["finish_reason"]) == (CALL, "stop")


def test_the_template_sees_tools_and_what_was_called(tagged: Served) -> None:
    call = {"id": "call_1", "type": "function", "function": {"name": "look", "arguments": '{"up": true}'}}
    history = [
        *HI,
        {"role": "assistant", "content": None, "tool_calls": [call]},
        {"role": "tool", "tool_call_id": "call_1", "content": "Blue."},
    ]
    bare = chat(tagged, messages=history, tools=None, max_tokens=1).json()["usage"]["prompt_tokens"]
    text = tagged.llm.decode(tagged.post("/tokenize", json={"messages": history}).json()["tokens"])
    assert len(text) < bare  # special tokens are no text
    assert '<tool_call>\n{"name": "look", "arguments": {"up": true}}\n</tool_call>' in text
    assert "Blue." in text
    told = chat(tagged, messages=history, max_tokens=1).json()["usage"]["prompt_tokens"]
    no_parameters = {"parameters": {"type": "object", "properties": {}}}
    listed = [{"type": "function", "function": {**no_parameters, **tool["function"]}} for tool in TOOLS]
    assert told > bare
    assert tagged.llm.encode(HI, tools=listed) != tagged.llm.encode(HI)
    none = chat(tagged, messages=history, tool_choice="none", max_tokens=1).json()["usage"]["prompt_tokens"]
    assert none == bare


REFUSED: dict[str, tuple[dict[str, Any], str]] = {
    "no tools to choose from": ({"tools": None, "tool_choice": "required"}, "tool_choice"),
    "a function that is not there": ({"tool_choice": {"type": "function", "function": {"name": "fly"}}}, "tool_choice"),
    "another choice": ({"tool_choice": "any"}, "tool_choice"),
    "two of one name": ({"tools": [TOOLS[0], TOOLS[0]]}, "tools"),
    "a name with spaces": ({"tools": [{"type": "function", "function": {"name": "look up"}}]}, "tools"),
    "another form too": ({"tool_choice": "required", "response_format": {"type": "json_object"}}, "response_format"),
    "no end": ({"tool_choice": "required", "ignore_eos": True}, "ignore_eos"),
    "a schema that cannot be followed": (
        {
            "tool_choice": "required",
            "tools": [{"type": "function", "function": {"name": "f", "parameters": {"not": {"type": "string"}}}}],
        },
        "tools",
    ),
    "arguments that are no object": (
        {"messages": [{"role": "assistant", "tool_calls": [{"function": {"name": "look", "arguments": "up"}}]}, *HI]},
        "messages",
    ),
}


@pytest.mark.parametrize(("asked", "param"), REFUSED.values(), ids=REFUSED)
def test_what_makes_no_sense_is_refused(tagged: Served, asked: dict[str, Any], param: str) -> None:
    answer = chat(tagged, **asked)
    assert answer.status_code == 400, answer.text
    assert answer.json()["error"]["param"] == param


def test_a_template_that_knows_no_tools_refuses_them() -> None:
    with serving(lambda: load(TEMPLATE)) as client:
        for asked in ({}, {"tools": None, "messages": [*HI, {"role": "tool", "content": "Blue."}]}):
            answer = chat(client, **asked)
            assert answer.status_code == 400
            assert "knows no tools" in answer.json()["error"]["message"]
        assert chat(client, tools=None, max_tokens=2).status_code == 200
        assert chat(client, tools=[], tool_choice="auto", max_tokens=2).status_code == 200


@pytest.mark.parametrize(
    ("template", "form"),
    [
        (HERMES, TAGGED),
        (LLAMA, PLAIN),
        (TEMPLATE, None),
        ("Use <tool_call> for tools. {{ messages }}", None),  # which it does not list
        ("{{ tools }}<tool_call><function=name>", None),
        ("{{ tools }}[TOOL_CALLS]", None),
        ("{% generation %}{{ tools }} <tool_call>", TAGGED),  # a tag of transformers
    ],
)
def test_the_template_tells_how_calls_are_written(template: str, form: CallFormat | None) -> None:
    assert format_of(template) is form
