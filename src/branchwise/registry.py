"""Names for parts, loaded only when asked for.

A registry maps a name to "module:Object", so that listing names imports nothing and an optional package is needed only
by the part that uses it. A spec is `name` or `name:args`, where args are positional values and key=value options
separated by commas: `chain:8`, `ngram:min=2,max=4`. Text in parentheses is one value.
"""

from __future__ import annotations

import difflib
import importlib
import inspect
import re
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from branchwise.errors import UnknownName, UsageError


def nearest(name: str, known: Mapping[str, object] | list[str]) -> str:
    """' Did you mean …?' with the closest known name, or an empty text; can be put between two sentences."""
    close = difflib.get_close_matches(name, list(known), n=1, cutoff=0.5)
    return f" Did you mean {close[0]!r}?" if close else ""


def check_known(kind: str, name: str, known: Iterable[str], or_else: str = "") -> None:
    """Refuse a name that is not known."""
    if name not in (names := list(known)):
        raise UnknownName(f"Unknown {kind} {name!r}.{nearest(name, names)} Known: {', '.join(names)}{or_else}.")


def split_spec(spec: str) -> tuple[str, list[str], dict[str, str]]:
    """`name:a,b,key=value` as (name, [a, b], {key: value})."""
    name, _, rest = spec.partition(":")
    positional, options = [], {}
    for part in filter(None, map(str.strip, re.split(r",(?![^()]*\))", rest))):  # but not at commas in parentheses
        key, equals, value = part.partition("=")
        key = key.strip().replace("-", "_")
        if not equals or "(" in key:
            positional.append(part)
        elif key in options:
            raise UsageError(f"{spec!r} gives {key!r} twice.")
        else:
            options[key] = value.strip()
    return name.strip(), positional, options


def split_specs(text: str) -> list[str]:
    """The specs in a text, which commas or blanks separate; a comma inside a spec, as in rsd-c:4,2 or
    ngram:max=4,min=2, belongs to it."""
    specs: list[str] = []
    for part in text.split():
        for number, piece in enumerate(part.split(",")):
            key, option, _ = piece.partition("/")[0].partition("=")
            inside = number > 0 and specs and ":" in specs[-1] and (piece[:1].isdigit() or (option and ":" not in key))
            if inside:
                specs[-1] += f",{piece}"
            elif piece:
                specs.append(piece)
    return specs


class Registry:
    """The parts of one kind: their names, the module of each, and how to build a part from a spec."""

    def __init__(self, kind: str, entries: Mapping[str, str]) -> None:
        self.kind = kind
        self._entries: dict[str, str | type] = dict(entries)

    def __iter__(self) -> Iterator[str]:
        return iter(self._entries)

    def register(self, name: str, part: str | type) -> None:
        """Add a part of your own: the class, or "package.module:Object" to import it when asked for."""
        self._entries[name] = part

    def find(self, name: str) -> Any:
        """The class of a name; its module is imported now."""
        check_known(self.kind, name, sorted(self._entries))
        entry = self._entries[name]
        if not isinstance(entry, str):
            return entry
        module, _, attribute = entry.partition(":")
        try:
            return getattr(importlib.import_module(module), attribute)
        except ModuleNotFoundError as error:
            raise UsageError(
                f"{self.kind.capitalize()} {name!r} needs the package {error.name}, which is not here. "
                f"Install it with: pip install {error.name}"
            ) from error

    def build(self, spec: str, **given: Any) -> Any:
        """Build the part that a spec describes. `given` are values from the caller; a part gets those that it names."""
        name, positional, options = split_spec(spec)
        part, subject = self.find(name), f"{self.kind.capitalize()} {name!r}"
        parameters = inspect.signature(part).parameters
        values: dict[str, Any] = {key: value for key, value in given.items() if key in parameters}
        own = [p for p in parameters.values() if p.name not in given]
        listed: list[Any] = []
        for many in [p for p in own if p.kind is p.VAR_POSITIONAL]:  # a list of any length, as in rsd-c:4,2,1
            listed = [_convert(subject, many, text) for text in positional]
            own, positional = [p for p in own if p is not many], []
        if len(positional) > len(own):
            raise UsageError(f"{subject} takes at most {len(own)} values, as in {_usage(name, own)}.")
        values |= {p.name: _convert(subject, p, text) for p, text in zip(own, positional, strict=False)}
        options_of = {p.name: p for p in own}
        for key, text in options.items():
            if key not in options_of:
                raise UsageError(f"{subject} has no option {key!r}.{nearest(key, options_of)} Use {_usage(name, own)}.")
            if key in values:
                raise UsageError(f"{spec!r} gives {key!r} twice.")
            values[key] = _convert(subject, options_of[key], text)
        for p in own:
            if p.default is p.empty and p.name not in values:
                raise UsageError(f"{subject} needs {p.name!r}, as in {_usage(name, own)}.")
        return part(*listed, **values)


def _usage(name: str, own: list[inspect.Parameter]) -> str:
    shown = [p.name.upper() if p.default is p.empty else f"{p.name}={p.default}" for p in own]
    return f"{name}:{','.join(shown)}" if shown else name


def _convert(subject: str, parameter: inspect.Parameter, text: str) -> Any:
    # An annotation is a type, or the name of a type if the module defers annotations.
    annotation = getattr(parameter.annotation, "__name__", str(parameter.annotation)).split(" | ")[0]
    wanted = {"int": int, "float": float, "str": str}.get(annotation)
    if wanted is None:
        raise UsageError(f"{subject} takes {parameter.name!r} from Python only, not from a spec.")
    try:
        return wanted(text)
    except ValueError:
        raise UsageError(f"{subject} takes {parameter.name} as {wanted.__name__}, not {text!r}.") from None
