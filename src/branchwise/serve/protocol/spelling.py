"""How a single token is written where logprobs are reported: as the text it adds, and as its bytes."""

from __future__ import annotations

import re
from functools import lru_cache

from branchwise.core.text import BROKEN
from branchwise.llm import LLM

_BYTE = re.compile(r"<0x([0-9A-Fa-f]{2})>")


class Spelling:
    """Spells the tokens of one tokenizer; a part of a character as OpenAI does, `bytes:\\xe2\\x82`."""

    def __init__(self, llm: LLM) -> None:
        self._tokenizer = llm.tokenizer
        self._special = frozenset(llm.tokenizer.all_special_ids)
        ordinary = list(llm.tokenizer("a", add_special_tokens=False)["input_ids"])
        # Some tokenizers drop the space before the first word of a text, so a token is decoded after another one.
        self._before = ordinary[-1:]
        self.text = lru_cache(maxsize=1 << 16)(self._text)

    def _text(self, token: int) -> str:
        if token in self._special:
            return str(self._tokenizer.convert_ids_to_tokens(token))
        text = self._decode([*self._before, token])[len(self._decode(self._before)) :]
        found = self._raw(token) if BROKEN in text else None
        return text if found is None else "bytes:" + "".join(f"\\x{byte:02x}" for byte in found)

    def utf8(self, token: int) -> list[int] | None:
        text = self.text(token)
        if text.startswith("bytes:") or BROKEN in text:
            found = self._raw(token)
            return None if found is None else list(found)
        return list(text.encode("utf-8", "replace"))

    def _decode(self, tokens: list[int]) -> str:
        return str(
            self._tokenizer.decode(tokens, skip_special_tokens=False, clean_up_tokenization_spaces=False)
            if tokens
            else ""
        )

    def _raw(self, token: int) -> bytes | None:
        """The bytes of a token that is no text by itself, if the vocabulary holds them."""
        entry = str(self._tokenizer.convert_ids_to_tokens(token))
        if (byte := _BYTE.fullmatch(entry)) is not None:
            return bytes([int(byte[1], 16)])
        alphabet = _byte_alphabet()
        return bytes(alphabet[letter] for letter in entry) if all(letter in alphabet for letter in entry) else None


@lru_cache(maxsize=1)
def _byte_alphabet() -> dict[str, int]:
    """The 256 characters with which byte-level vocabularies spell bytes."""
    printable = [*range(33, 127), *range(161, 173), *range(174, 256)]
    rest = iter(range(256, 512))
    return {chr(byte if byte in printable else next(rest)): byte for byte in range(256)}
