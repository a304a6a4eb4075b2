"""Reads JSON while it is being written: whether each further letter can still lead to an object, and where in the
object that letter stands."""

from __future__ import annotations

import json
import re
from enum import Enum, auto

SPACE = " \t\n\r"
WORDS = ("true", "false", "null")
_NUMBER = re.compile(r"-?(?:0|[1-9][0-9]*)(?:\.[0-9]+)?(?:[eE][+-]?[0-9]+)?")
_NUMBER_BEGUN = re.compile(r"-?(?:(?:0|[1-9][0-9]*)(?:\.|(?:\.[0-9]+)?(?:[eE][+-]?[0-9]*)?))?")


class At(Enum):
    """What comes next."""

    OBJECT = auto()
    FIRST_KEY = auto()
    KEY = auto()
    COLON = auto()
    VALUE = auto()
    FIRST_ITEM = auto()
    NEXT = auto()
    """a comma, or the closing bracket of an object or a list"""
    STRING = auto()
    ESCAPE = auto()
    HEX = auto()
    WORD = auto()
    """the rest of a number or of true, false or null"""
    END = auto()

    @property
    def quoted(self) -> bool:
        return self in (At.STRING, At.ESCAPE, At.HEX)


class Letters:
    """Reads one object letter by letter."""

    def __init__(self) -> None:
        self.at = At.OBJECT
        self._open: list[str] = []
        self._is_key = False
        self._string: list[str] = []
        self._digits = 0  # the digits of an escape so far
        self._word = ""

    @property
    def depth(self) -> int:
        """How many objects and lists are open."""
        return len(self._open)

    @property
    def string(self) -> str:
        """The key or the string that ended last."""
        found: str = json.loads("".join(self._string))
        return found

    def push(self, letter: str) -> bool:
        """Whether the text can still become an object; once it cannot, no further letter may be pushed."""
        if self.at.quoted:
            return self._quoted(letter)
        if self.at is At.WORD:
            if _begun(self._word + letter):
                self._word += letter
                return True
            if self._word not in WORDS and not _NUMBER.fullmatch(self._word):
                return False
            self.at = At.NEXT
        return letter in SPACE or self._structural(letter)

    def _quoted(self, letter: str) -> bool:
        self._string.append(letter)
        if self.at is At.ESCAPE:
            self.at, self._digits = (At.HEX if letter == "u" else At.STRING), 0
            return letter in '"\\/bfnrtu'
        if self.at is At.HEX:
            self._digits += 1
            self.at = At.STRING if self._digits == 4 else At.HEX
            return letter in "0123456789abcdefABCDEF"
        if letter == '"':
            self.at = At.COLON if self._is_key else At.NEXT
        elif letter == "\\":
            self.at = At.ESCAPE
        return letter >= " "

    def _structural(self, letter: str) -> bool:
        match self.at, letter:
            case (At.FIRST_KEY | At.KEY | At.VALUE | At.FIRST_ITEM, '"'):
                self._is_key, self.at = self.at in (At.FIRST_KEY, At.KEY), At.STRING
                self._string = [letter]
            case (At.OBJECT | At.VALUE | At.FIRST_ITEM, "{"):
                self._open.append("}")
                self.at = At.FIRST_KEY
            case (At.VALUE | At.FIRST_ITEM, "["):
                self._open.append("]")
                self.at = At.FIRST_ITEM
            case (At.FIRST_KEY, "}") | (At.FIRST_ITEM, "]"):
                self._close()
            case (At.NEXT, "}" | "]") if self._open[-1] == letter:
                self._close()
            case (At.NEXT, ","):
                self.at = At.KEY if self._open[-1] == "}" else At.VALUE
            case (At.COLON, ":"):
                self.at = At.VALUE
            case (At.VALUE | At.FIRST_ITEM, _) if _begun(letter):
                self.at, self._word = At.WORD, letter
            case _:
                return False
        return True

    def _close(self) -> None:
        self._open.pop()
        self.at = At.NEXT if self._open else At.END


def _begun(word: str) -> bool:
    return any(known.startswith(word) for known in WORDS) or _NUMBER_BEGUN.fullmatch(word) is not None
