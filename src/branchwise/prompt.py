"""What users give: a prompt, which is a text or a conversation, and the strings that end an answer."""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

from branchwise.errors import UsageError

Message = Mapping[str, Any]
"""{"role": "user", "content": "…"}, and any further fields that the chat template reads"""
Prompt = str | Sequence[Message]
"""a text, which a chat model sees as one user message, or a conversation"""


def messages_of(prompt: Any) -> list[dict[str, Any]]:
    if isinstance(prompt, str):
        return [{"role": "user", "content": prompt}]
    try:
        messages = [{**message} for message in prompt]
        if all(isinstance(message["role"], str) and isinstance(message["content"], str) for message in messages):
            return messages
    except (TypeError, KeyError):
        pass
    raise UsageError('A prompt is a text, or a list of messages like {"role": "user", "content": "a text"}.')


def is_one(prompt: Any) -> bool:
    """Whether this is one text or one conversation, and not a list of them."""
    if isinstance(prompt, str) or not isinstance(prompt, Sequence):
        return True
    return len(prompt) > 0 and isinstance(prompt[0], Mapping)


def stop_strings(given: object) -> tuple[str, ...]:
    """The strings that end a text, given one, several, or none."""
    found = [given] if given and isinstance(given, str) else given or ()
    if not isinstance(found, Collection) or not all(isinstance(one, str) for one in found):
        raise UsageError(f"stop must be a string or a list of strings, not {given!r}.")
    if "" in found:
        raise UsageError("A stop string must not be empty.")
    return tuple(found)
