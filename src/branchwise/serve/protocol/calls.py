"""Calls of functions in what a model writes: how its chat template has them written, and how they are read.

A call is told when it is complete, as one event of a stream. What looks like a call and is none is text.
"""

from __future__ import annotations

import json
from abc import ABC, abstractmethod
from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from jinja2 import Environment, TemplateError, meta


@dataclass(frozen=True)
class Call:
    name: str
    arguments: str
    """as JSON"""
    id: str = field(default_factory=lambda: f"call_{uuid4().hex}")

    def as_dict(self) -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": self.arguments}}


@dataclass(frozen=True)
class Said:
    """What came to be known of an answer: text and calls."""

    text: str = ""
    calls: tuple[Call, ...] = ()


class CallReader(ABC):
    """Reads one answer, piece by piece."""

    def __init__(self, form: CallFormat, names: Collection[str], *, several: bool) -> None:
        self.form = form
        self.names = names
        """of the functions that may be called"""
        self.several = several
        self.told = 0
        """calls so far"""
        self._held = ""

    def push(self, text: str, *, last: bool = False) -> Said:
        """What is known with this much more of the text, and with `last` all the rest."""
        said = self._read(text, last)
        calls = said.calls if self.several else said.calls[: max(1 - self.told, 0)]
        self.told += len(calls)
        return Said(said.text, calls)

    @abstractmethod
    def _read(self, text: str, last: bool) -> Said: ...

    def _call(self, written: str) -> Call | None:
        """The call that a JSON object describes, if it does."""
        try:
            found = json.loads(written)
        except (ValueError, RecursionError):
            return None
        if not isinstance(found, dict) or found.get("name") not in self.names:
            return None
        arguments = found.get(self.form.arguments, found.get("arguments", {}))
        if not isinstance(arguments, dict):
            return None
        return Call(found["name"], json.dumps(arguments, ensure_ascii=False))


class TaggedReader(CallReader):
    """Calls in tags; what stands before and between them is text."""

    def _read(self, text: str, last: bool) -> Said:
        self._held += text
        before, calls = "", list[Call]()
        opening, closing = self.form.opening, self.form.closing
        while (start := self._held.find(opening)) >= 0:
            end = self._held.find(closing, start)
            if end < 0 and not last:
                break
            end = len(self._held) if end < 0 else end + len(closing)
            written = self._held[start:end]
            call = self._call(written.removeprefix(opening).removesuffix(closing))
            # White space before calls and behind the last is part of their form.
            before += self._held[:start].rstrip() if call else self._held[:end]
            self._held = self._held[end:]
            calls += [call] if call else []
        if start < 0:  # nothing is open: what could become a tag, or stand in front of one, waits
            if last and (self.told or calls):
                self._held = self._held.rstrip()
            kept = 0 if last else _waiting(self._held, opening)
            before += self._held[: len(self._held) - kept]
            self._held = self._held[len(self._held) - kept :]
        return Said(before, tuple(calls))


class PlainReader(CallReader):
    """An answer that is a call as a whole, or none."""

    _may_be_call = True

    def _read(self, text: str, last: bool) -> Said:
        self._held += text
        self._may_be_call &= self._held.lstrip()[:1] in ("", "{")
        if self._may_be_call and not last:
            return Said()
        held, self._held = self._held, ""
        call = self._call(held) if self._may_be_call else None
        return Said(held) if call is None else Said(calls=(call,))


@dataclass(frozen=True)
class CallFormat:
    """How a model writes calls."""

    reader: type[CallReader]
    arguments: str
    """the name of the field with the arguments"""
    opening: str = ""
    closing: str = ""
    """tags around a call"""
    inside: str = ""
    """between a tag and its call"""
    between: str = ""
    """two calls"""
    several: bool = False
    """whether an answer can have more than one"""


TAGGED = CallFormat(TaggedReader, "arguments", "<tool_call>", "</tool_call>", "\n", "\n", several=True)
"""<tool_call>{"name": …, "arguments": …}</tool_call>, as Hermes and Qwen"""
PLAIN = CallFormat(PlainReader, "parameters")
"""{"name": …, "parameters": …}, as Llama 3"""


def format_of(template: str) -> CallFormat | None:
    """How calls are written by a model with this chat template; None if it knows no tools, or writes them otherwise."""
    try:
        asks = "tools" in meta.find_undeclared_variables(Environment(extensions=EXTENSIONS).parse(template))
    except TemplateError:
        asks = "tools" in template
    if not asks:
        return None
    if "<tool_call>" in template:
        return None if "<function=" in template or "<arg_key>" in template else TAGGED
    return PLAIN if '"parameters": ' in template.replace("\\", "") else None


EXTENSIONS = ["jinja2.ext.loopcontrols", "jinja2.ext.do"]


def _waiting(text: str, tag: str) -> int:
    """How many letters at the end of a text may be the beginning of a tag, with the white space in front of it."""
    sizes = range(min(len(tag) - 1, len(text)), 0, -1)
    begun = next((size for size in sizes if tag.startswith(text[-size:])), 0)
    whole = text[: len(text) - begun]
    return begun + len(whole) - len(whole.rstrip())
