"""Calls read from answers: as they are written, however the text is cut, with the result of the whole."""

from __future__ import annotations

import json
from typing import Any

import pytest
from hypothesis import example, given, settings
from hypothesis import strategies as st

from branchwise.serve.protocol.calls import PLAIN, TAGGED, CallFormat, CallReader
from branchwise.serve.protocol.letters import At, Letters
from branchwise.serve.protocol.shapes import ChatShape

NAMES = ["look", "wait"]
CALL = '<tool_call>\n{"name": "look", "arguments": {"up": true}}\n</tool_call>'
PLAIN_CALL = '{"name": "look", "parameters": {"up": true}}'
Read = tuple[str | None, list[tuple[str, str]], str]
"""text, calls and why it ended"""


def shape(form: CallFormat, *, several: bool = True) -> ChatShape:
    return ChatShape("tiny", None, lambda: CallReader(form, NAMES, several=several))


def whole(form: CallFormat, answer: str, *, several: bool = True) -> Read:
    found = shape(form, several=several).choice(0, answer, [], "stop")
    message = found["message"]
    calls = [(call["function"]["name"], call["function"]["arguments"]) for call in message.get("tool_calls", [])]
    return message["content"], calls, found["finish_reason"]


def streamed(form: CallFormat, parts: list[str], *, several: bool = True) -> Read:
    """What a client has in the end that adds up events, and holds them to OpenAI's form."""
    made, content = shape(form, several=several), ""
    calls: list[dict[str, Any]] = []
    finish: list[str] = []
    for number, part in enumerate(parts):
        for event in made.deltas(0, part, [], "stop" if number == len(parts) - 1 else None):
            assert not finish, "something came behind the end"
            delta = event["delta"]
            assert len(delta) < 2
            assert delta.get("content") != ""
            content += delta.get("content", "")
            finish += [event["finish_reason"]] if event["finish_reason"] else []
            for told in delta.get("tool_calls", []):
                if told["index"] == len(calls):
                    assert (told["type"], told["id"][:5], told["function"]["arguments"]) == ("function", "call_", "")
                    calls.append(told["function"])
                else:  # further arguments belong to the call that began last
                    assert told["index"] == len(calls) - 1
                    assert set(told) == {"index", "function"}
                    assert set(told["function"]) == {"arguments"}
                    calls[-1]["arguments"] += told["function"]["arguments"]
    [reason] = finish
    return content or (None if calls else ""), [(call["name"], call["arguments"]) for call in calls], reason


LOOK, WAIT = ("look", '{"up": true}'), ("wait", "{}")
ANSWERS: list[tuple[CallFormat, str, str, list[tuple[str, str]]]] = [
    (TAGGED, CALL, "", [LOOK]),
    (TAGGED, f"So: \n\n{CALL}\n", "So:", [LOOK]),
    (TAGGED, f'{CALL}\n<tool_call>{{"name": "wait"}}</tool_call>', "", [LOOK, WAIT]),
    (TAGGED, f"a {CALL} b ", "a b", [LOOK]),
    (TAGGED, "1 < 2 <tool", "1 < 2 <tool", []),
    (TAGGED, "x  \n", "x  \n", []),
    # As it is written, not as it could be
    (TAGGED, CALL.replace("true", '[ 1.50,"\\ud83d"]'), "", [("look", '{"up": [ 1.50,"\\ud83d"]}')]),
    (TAGGED, CALL.replace("true", '"</tool_call>"'), "", [("look", '{"up": "</tool_call>"}')]),
    # In another order, with other fields
    (TAGGED, '<tool_call>{"arguments": {"up": true}, "name": "look"}</tool_call>', "", [LOOK]),
    (TAGGED, '<tool_call>{"id": {"name": 1}, "n\\u0061me": "look", "arguments": {"up": true}}', "", [LOOK]),
    (TAGGED, CALL.replace("}}", '}, "arguments": 3, "name": 7}'), "", [LOOK]),
    # No calls
    (TAGGED, "<tool_call>nothing</tool_call> then", "<tool_call>nothing</tool_call> then", []),
    (TAGGED, CALL.replace("look", "fly"), CALL.replace("look", "fly"), []),
    (TAGGED, CALL.replace("{", "[", 1), CALL.replace("{", "[", 1), []),
    (TAGGED, CALL.replace('{"up": true}', "7"), CALL.replace('{"up": true}', "7"), []),
    (TAGGED, CALL.replace('"look"', "7"), CALL.replace('"look"', "7"), []),
    (TAGGED, CALL.replace("name", "nom"), CALL.replace("name", "nom"), []),
    (TAGGED, " <tool_call>{} x", " <tool_call>{} x", []),
    (TAGGED, f"<tool_call> {CALL}", "<tool_call>", [LOOK]),
    (TAGGED, f'<tool_call>{{"a {CALL} b', '<tool_call>{"a b', [LOOK]),
    # Cut, or ended without their tags
    (TAGGED, CALL[:20], CALL[:20], []),
    (TAGGED, CALL[: CALL.index("true") + 2], "", [("look", '{"up": tr')]),
    (TAGGED, CALL[: CALL.index("}}") + 1], "", [LOOK]),
    (TAGGED, CALL[:-3], "", [LOOK]),
    (TAGGED, CALL[: -len("</tool_call>")], "", [LOOK]),  # as models end that have a token for it
    # Begun as calls, and broken: text from there on
    (TAGGED, f"a\n{CALL.replace('true', 'tru.')} b", "a.}}\n</tool_call> b", [("look", '{"up": tru')]),
    (TAGGED, CALL.replace("}}", "}"), "", [LOOK]),
    (TAGGED, CALL.replace("true}}", "tr"), "", [("look", '{"up": tr')]),
    (TAGGED, f"{CALL.replace('}}', '}, 1}')}\n", ", 1}\n</tool_call>", [LOOK]),
    (TAGGED, f"{CALL.replace('true', '1,')}\n{CALL}", "}}\n</tool_call>", [("look", '{"up": 1,'), LOOK]),
    (PLAIN, PLAIN_CALL, "", [LOOK]),
    (PLAIN, f"\n {PLAIN_CALL}\n", "", [LOOK]),
    (PLAIN, '{"name": "look", "arguments": {"up": true}}', "", [LOOK]),
    (PLAIN, '{"name": "wait"}', "", [WAIT]),
    (PLAIN, '{"up": true}', '{"up": true}', []),
    (PLAIN, f"Well, {PLAIN_CALL}", f"Well, {PLAIN_CALL}", []),
    (PLAIN, "[1]", "[1]", []),
    (PLAIN, " \n", " \n", []),
    (PLAIN, f"{PLAIN_CALL}; {PLAIN_CALL}", f"; {PLAIN_CALL}", [LOOK]),
    (PLAIN, PLAIN_CALL[:-4], "", [("look", '{"up": tr')]),
]


@pytest.mark.parametrize(("form", "answer", "text", "calls"), ANSWERS)
def test_calls_are_found_however_the_text_comes(
    form: CallFormat, answer: str, text: str, calls: list[tuple[str, str]]
) -> None:
    found = whole(form, answer)
    assert found == (text or (None if calls else ""), calls, "tool_calls" if calls else "stop")
    for size in (1, 2, 3, 7):
        parts = [answer[start : start + size] for start in range(0, len(answer), size)]
        assert streamed(form, [*parts, ""]) == streamed(form, parts) == found


def test_without_several_the_first_call_is_the_only_one() -> None:
    answer = f"a {CALL} b {CALL.replace('look', 'wait')} c"
    assert whole(TAGGED, answer, several=False) == ("a b c", [LOOK], "tool_calls")
    assert streamed(TAGGED, list(answer), several=False) == ("a b c", [LOOK], "tool_calls")


BITS = [
    "<tool_call>",
    "</tool_call>",
    "<",
    "{",
    "}",
    "[",
    "]",
    ",",
    ": ",
    '"',
    "\\",
    "\n",
    " ",
    "é",
    "1",
    "-",
    "tru",
    "e",
]
BITS += ['"name": ', '"name": "look", ', '"wait"', '"arguments": ', '"parameters": {', CALL, PLAIN_CALL, CALL[:50], "a"]
BITS += ['<tool_call>{"name": "look", "arguments": {', PLAIN_CALL[:33]]


@given(st.data(), st.sampled_from([TAGGED, PLAIN]), st.booleans())
def test_joined_events_are_the_whole_answer_for_any_text_and_any_cut(
    data: st.DataObject, form: CallFormat, several: bool
) -> None:
    answer = "".join(data.draw(st.lists(st.sampled_from(BITS) | st.text(max_size=3), max_size=12)))
    cuts = sorted(data.draw(st.lists(st.integers(0, len(answer)), max_size=20)))
    parts = [answer[start:end] for start, end in zip([0, *cuts], [*cuts, len(answer)], strict=True)]
    assert streamed(form, parts, several=several) == whole(form, answer, several=several)


VALUES = st.recursive(
    st.none() | st.booleans() | st.floats(allow_nan=False, allow_infinity=False) | st.integers() | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=6,
)
OBJECTS = st.dictionaries(st.text(max_size=5), VALUES, max_size=4)
STYLES = st.fixed_dictionaries({"indent": st.sampled_from([None, 0, 2]), "ensure_ascii": st.booleans()})


@settings(max_examples=30)
@given(st.lists(st.tuples(st.sampled_from(NAMES), OBJECTS, STYLES), min_size=1, max_size=3), st.booleans())
def test_whatever_arguments_are_written_are_told(calls: list[tuple[str, Any, Any]], reversed_fields: bool) -> None:
    answer, expected = "Text", []
    for name, arguments, style in calls:
        fields = [f'"name": "{name}"', f'"arguments": {json.dumps(arguments, **style)}']
        answer += f" <tool_call>{{{', '.join(fields[:: -1 if reversed_fields else 1])}}}</tool_call>\n"
        expected.append((name, json.dumps(arguments, **style)))
    assert whole(TAGGED, answer) == streamed(TAGGED, list(answer)) == ("Text", expected, "tool_calls")


def test_what_can_be_no_tag_does_not_wait() -> None:
    made = shape(TAGGED)

    def told(text: str) -> list[Any]:
        return [event["delta"] for event in made.deltas(0, text, [], None)]

    assert told("abc <") == [{"content": "abc"}]
    assert told("b> d\n<tool_call") == [{"content": " <b> d"}]
    assert told('> {"name": "loo') == [{}]
    assert told('k", "arguments": ') == [{}]
    begun, first = told('{"up')
    assert begun["tool_calls"][0]["function"] == {"name": "look", "arguments": ""}
    assert first == {"tool_calls": [{"index": 0, "function": {"arguments": '{"up'}}]}
    assert told('": "</tool_call') == [{"tool_calls": [{"index": 0, "function": {"arguments": '": "</tool_call'}}]}]
    assert told('>"}') == [{"tool_calls": [{"index": 0, "function": {"arguments": '>"}'}}]}]
    assert told("}</tool_call>\n<tool_call>1") == [{"content": "\n<tool_call>1"}]
    plain = shape(PLAIN)
    assert [plain.deltas(0, text, [], None)[0]["delta"] for text in ("So", " {")] == [
        {"content": "So"},
        {"content": " {"},
    ]


# ---- JSON that is still being written ----------------------------------------------------------------------------


def read(text: str) -> tuple[bool, bool]:
    """Whether a text is an object, and whether it begins one."""
    letters = Letters()
    for letter in text:
        if letters.at is At.END or not letters.push(letter):
            return False, False
    return letters.at is At.END, True


def no_constant(name: str) -> None:
    raise ValueError(f"{name} is no JSON")


def is_object(text: str) -> bool:
    try:
        return isinstance(json.loads(text, parse_constant=no_constant), dict)
    except ValueError:
        return False


@settings(max_examples=50)
@given(OBJECTS, STYLES)
def test_every_beginning_of_an_object_is_one(value: Any, style: Any) -> None:
    letters = Letters()
    for letter in json.dumps(value, **style):
        assert letters.at is not At.END
        assert letters.push(letter)
    assert letters.at is At.END


@given(
    st.lists(
        st.sampled_from([*'{}[],:"\\ue.-+019 \n\t', '"a"', '"a":', "true", "null", "fal", "NaN", "\x01"]), max_size=10
    )
)
@example(['"a":', "-"])
@example(['"a":', "0", "1"])
@example(['"a":', "1", ".", "e", "1"])
@example(['"a":', "1", "e"])
@example(['"a":', "[", ",", "]"])
@example(['"a":', "[", "1", "}"])
@example(['"a":', "1", ","])
@example(['"', "\\", "x", '"', ":", "1"])
@example(['"', "\\", "u", "0", "0", "e", '"', ":", "1"])
@example(['"', "\n", '"', ":", "1"])
def test_an_object_is_what_the_parser_of_python_takes_for_one(bits: list[str]) -> None:
    text = "{" + "".join(bits) + "}"
    assert read(text)[0] == is_object(text)


@pytest.mark.parametrize(
    "text", ["x", "{x", '{"a" 1', '{"a": tx', '{"a": 01', '{"a": --', '{"a": 1]', '{"a": .', "{,", '{"a": 1,}']
)
def test_what_can_be_no_object_is_known_at_once(text: str) -> None:
    assert read(text[:-1]) == (False, True)
    assert read(text) == (False, False)
