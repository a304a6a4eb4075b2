"""Calls of functions in what a model writes: how its chat template wants them written, and how they are read.

Text becomes a call at the letter with which its name is known and its arguments begin; from that letter on the
arguments are passed on as they are written. Text that fails to become a call before that letter stays text. If a call
fails after that letter, it keeps its arguments as far as they were JSON, and the rest is text again: what was passed on
is never taken back, so the answer is the same whether it is read at once or piece by piece.
"""

from __future__ import annotations

from collections.abc import Collection
from dataclasses import dataclass, field
from typing import Any
from uuid import uuid4

from jinja2 import Environment, TemplateError, meta

from branchwise.serve.protocol.letters import SPACE, At, Letters


@dataclass(frozen=True)
class CallFormat:
    """How a model writes calls."""

    arguments: str
    """the name of the field that holds the arguments"""
    opening: str = ""
    closing: str = ""
    """the tags around a call; without tags an answer is a call from its first letter on, or holds none"""
    inside: str = ""
    """what stands between a tag and its call"""
    between: str = ""
    """what stands between two calls"""
    several: bool = False
    """whether an answer can have more than one call"""


TAGGED = CallFormat("arguments", "<tool_call>", "</tool_call>", "\n", "\n", several=True)
"""<tool_call>{"name": …, "arguments": …}</tool_call>, as Hermes and Qwen write it"""
PLAIN = CallFormat("parameters")
"""{"name": …, "parameters": …}, as Llama 3 writes it"""


def format_of(template: str) -> CallFormat | None:
    """How a model with this chat template writes calls; None if it knows no tools, or writes another form."""
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


@dataclass(frozen=True)
class Text:
    """A further piece of the text of an answer."""

    text: str


@dataclass(frozen=True)
class Call:
    """The beginning of a call."""

    index: int
    name: str
    id: str = field(default_factory=lambda: f"call_{uuid4().hex}")

    def as_dict(self, arguments: str = "") -> dict[str, Any]:
        return {"id": self.id, "type": "function", "function": {"name": self.name, "arguments": arguments}}


@dataclass(frozen=True)
class Arguments:
    """A further piece of the arguments of the latest call."""

    index: int
    text: str


Said = Text | Call | Arguments


class CallReader:
    """Reads one answer, piece by piece."""

    def __init__(self, form: CallFormat, names: Collection[str], *, several: bool) -> None:
        """`names` are those of the functions that may be called. Without `several` the first call is the only one."""
        self.form = form
        self.names = names
        self.several = several
        self.told = 0
        """the number of calls so far"""
        self._held = ""
        self._said: list[Said] = []
        self._reads = self._text if form.opening else self._call
        self._written = Written(names, form)
        self._before = ""  # the tag of the call that is being read, with the white space before the tag

    def push(self, text: str, *, last: bool = False) -> list[Said]:
        """What this further piece of text makes known, in order; with `last` also all that was held back."""
        self._held += text
        self._said = []
        while self._reads(last):
            pass
        return self._said

    # Each of these methods reads the text that is held; True if something else begins after it, False if it needs more.

    def _text(self, last: bool) -> bool:
        """White space before calls and after the last is part of their form, so it is held back like half a tag."""
        opening = self.form.opening
        start = self._held.find(opening) if opening else -1
        if start >= 0:
            self._tell(self._take(len(self._held[:start].rstrip())))
            self._before = self._take(self._held.index(opening) + len(opening))
            self._written, self._reads = Written(self.names, self.form), self._call
            return True
        if last and self.told:
            self._held = self._held.rstrip()
        self._tell(self._take(len(self._held) - (0 if last else _waiting(self._held, opening))))
        return False

    def _call(self, last: bool) -> bool:
        written = self._written
        self._take(written.push(self._held))
        if written.is_call:
            self._tell_call(written)
        if not (last or written.failed or written.complete):
            return False
        if not written.is_call:
            self._tell(self._before)
        if written.failed or not written.is_call:
            self._held = written.rest + self._held
        self._reads = self._closing if written.is_call else self._text
        return True

    def _closing(self, last: bool) -> bool:
        """The tag after a call, which may be missing."""
        closing, found = self.form.closing, self._held.lstrip()
        if closing.startswith(found) and not last:
            return False
        if closing.startswith(found) or (closing and found.startswith(closing)):
            self._held = found[len(closing) :]
        self._reads = self._text
        return True

    def _take(self, count: int) -> str:
        taken, self._held = self._held[:count], self._held[count:]
        return taken

    def _tell(self, text: str) -> None:
        match self._said:
            case [*others, Text(before)]:
                self._said = [*others, Text(before + text)]
            case others if text:
                self._said = [*others, Text(text)]

    def _tell_call(self, written: Written) -> None:
        if written.index is None and (self.several or not self.told):
            written.index = self.told
            self.told += 1
            self._said.append(Call(written.index, written.name or ""))
        if (arguments := written.further()) and written.index is not None:
            self._said.append(Arguments(written.index, arguments))


class Written:
    """The object that describes a call, as far as it has been written."""

    def __init__(self, names: Collection[str], form: CallFormat) -> None:
        self.name: str | None = None
        self.index: int | None = None
        """the number of the call in the answer, once it is passed on"""
        self.failed = False
        self._names = names
        self._fields = (form.arguments, "arguments")
        self._letters = Letters()
        self._key = ""
        self._arguments: list[str] | None = None  # those that `further` has not returned yet
        self._inside = False  # whether the arguments are being read
        self._rest: list[str] = []

    @property
    def is_call(self) -> bool:
        return self.name is not None and self._arguments is not None

    @property
    def complete(self) -> bool:
        return self._letters.at is At.END

    @property
    def rest(self) -> str:
        """What was written, to be read again as text; of a call what came since it is one, without arguments."""
        return "".join(self._rest)

    def further(self) -> str:
        """The arguments that have come since the last call of this method."""
        found, self._arguments = "".join(self._arguments or ()), []
        return found

    def push(self, text: str) -> int:
        """Read on, and return how many letters belong to the object: reading stops before a letter that does not fit,
        or when the object is complete."""
        for place, letter in enumerate(text):
            if self.complete:
                return place
            was_call = self.is_call
            if not self._fits(letter):
                self.failed = True
                return place
            if self.is_call and not was_call:
                self._rest.clear()
            elif not (self.is_call and self._inside):
                self._rest.append(letter)
            if self._inside and self._arguments is not None:
                self._arguments.append(letter)
                self._inside = self._letters.depth > 1
        return len(text)

    def _fits(self, letter: str) -> bool:
        """Whether the object still describes a call with this letter; also notes what the letter begins or ends."""
        letters, at, outermost = self._letters, self._letters.at, self._letters.depth == 1
        if not letters.push(letter):
            return False
        if outermost and at is At.VALUE and letter not in SPACE:
            if self._key == "name" and self.name is None:
                return letter == '"'
            if self._key in self._fields and self._arguments is None:
                if letter != "{":
                    return False
                self._arguments, self._inside = [], True
        elif outermost and at is At.STRING and letters.at is At.COLON:
            self._key = letters.string
        elif outermost and at is At.STRING and letters.at is At.NEXT and self._key == "name" and self.name is None:
            if letters.string not in self._names:
                return False
            self.name = letters.string
        elif self.complete and self.name is not None and self._arguments is None:
            self._arguments = ["{}"]
        return True


def _waiting(text: str, tag: str) -> int:
    """How many letters at the end of a text may be the beginning of a tag, the white space before it included."""
    sizes = range(min(len(tag) - 1, len(text)), 0, -1)
    begun = next((size for size in sizes if tag.startswith(text[-size:])), 0)
    whole = text[: len(text) - begun]
    return begun + len(whole) - len(whole.rstrip())
