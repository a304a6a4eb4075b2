"""What users give is understood, or refused in a sentence."""

from __future__ import annotations

from typing import Any

import pytest

from branchwise.errors import UsageError
from branchwise.prompt import is_one, messages_of, stop_strings


@pytest.mark.parametrize(
    ("given", "found"), [(None, ()), ("", ()), ("end", ("end",)), ([], ()), (["a", "b"], ("a", "b")), (("a",), ("a",))]
)
def test_stop_strings_are_one_several_or_none(given: Any, found: tuple[str, ...]) -> None:
    assert stop_strings(given) == found


@pytest.mark.parametrize("given", [5, 1.5, True, [1], ["a", None], {"a": 1}.values(), b"end"])
def test_stop_strings_of_another_kind_are_refused(given: Any) -> None:
    with pytest.raises(UsageError, match=r"stop must be a string or a list of strings, not"):
        stop_strings(given)


def test_an_empty_stop_string_is_refused() -> None:
    with pytest.raises(UsageError, match="must not be empty"):
        stop_strings(["a", ""])


def test_one_conversation_is_told_from_several() -> None:
    talk = [{"role": "user", "content": "Hi"}]
    assert is_one("Hi")
    assert is_one(talk)
    assert not is_one([talk, talk])
    assert not is_one(["Hi", "Ho"])
    assert messages_of("Hi") == messages_of(talk) == talk


@pytest.mark.parametrize("given", [[{"role": "user"}], [{"role": "user", "content": 5}], 7, ["Hi"]])
def test_what_is_no_prompt_is_refused(given: Any) -> None:
    with pytest.raises(UsageError, match="A prompt is a text, or a list of messages"):
        messages_of(given)
