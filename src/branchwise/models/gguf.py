"""The header of a GGUF file, read in a moment and trusted only once the file is known to be whole."""

from __future__ import annotations

import importlib.util
import math
import mmap
import struct
from pathlib import Path
from typing import Any, NamedTuple

from branchwise.errors import ModelError


class _Tensor(NamedTuple):
    name: str
    elements: int
    ggml_type: int
    offset: int  # from the start of the file


class Header(NamedTuple):
    """What a GGUF file says about itself before the weights begin."""

    metadata: dict[str, Any]
    tensors: list[_Tensor]

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", ""))


_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


class _Cursor:
    """Reads values one after another and never past the end: a truncated header raises `struct.error`."""

    def __init__(self, blob: mmap.mmap) -> None:
        self.blob, self.at = blob, 0

    def numbers(self, kinds: str) -> tuple[Any, ...]:
        values = struct.unpack_from("<" + kinds, self.blob, self.at)
        self.at += struct.calcsize("<" + kinds)
        return values

    def string(self) -> str:
        (length,) = self.numbers("Q")
        if length > len(self.blob) - self.at:
            raise struct.error("a string ends behind the file")
        self.at += length
        return self.blob[self.at - length : self.at].decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            of, count = self.numbers("IQ")
            if count > len(self.blob):
                raise struct.error("an array ends behind the file")
            if of == _STRING:
                return [self.string() for _ in range(count)]
            return list(self.numbers(f"{count}{_SCALARS[of]}"))
        return self.numbers(_SCALARS[kind])[0]


def read_header(path: Path) -> Header:
    """Metadata and tensor table of a GGUF file, once it is known that the file is whole.

    Not left to `gguf.GGUFReader`, which takes seconds for a large vocabulary and meets a damaged file with
    whatever numpy happens to raise.
    """
    size = path.stat().st_size
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ModelError(f"{path} is not a GGUF file: it does not begin with the letters GGUF.")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as blob:
            try:
                header = _parse(_Cursor(blob), path)
            except struct.error as error:
                raise ModelError(f"{path} is truncated: its header does not end.") from error
            except (LookupError, ArithmeticError, TypeError, ValueError, MemoryError) as error:
                raise ModelError(f"{path} is damaged: its header makes no sense.") from error
    if not header.architecture or not header.tensors:
        raise ModelError(f"{path} does not hold a model: its header names no architecture or no tensors.")
    parts = header.metadata.get("split.count")
    if isinstance(parts, int) and parts > 1:
        raise ModelError(f"{path} is one of {parts} parts. Merge them with llama-gguf-split.")
    if missing := [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]:
        raise ModelError(f'Reading GGUF needs {" and ".join(missing)}. Install with "pip install {" ".join(missing)}"')
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    end = 0
    for tensor in header.tensors:
        try:
            block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(tensor.ggml_type)]
        except (KeyError, ValueError) as error:
            raise ModelError(
                f"{path} holds tensors of the GGML type {tensor.ggml_type}, unknown to the gguf package. "
                "Upgrade that, or get the model in another quantisation."
            ) from error
        end = max(end, tensor.offset + tensor.elements // block * block_bytes)
    if end > size:
        raise ModelError(f"{path} is truncated: it has {size} of the {end} bytes that it should. Get it again.")
    return header


def _parse(cursor: _Cursor, path: Path) -> Header:
    cursor.numbers("I")
    (version,) = cursor.numbers("I")
    if version not in (2, 3):
        raise ModelError(f"{path} is GGUF version {version}. Versions 2 and 3 are read.")
    tensor_count, value_count = cursor.numbers("QQ")
    metadata = {}
    for _ in range(value_count):
        key = cursor.string()
        metadata[key] = cursor.value(*cursor.numbers("I"))
    table = []
    for _ in range(tensor_count):
        name = cursor.string()
        (dimensions,) = cursor.numbers("I")
        shape = cursor.numbers(f"{dimensions}Q")
        table.append((name, math.prod(shape), *cursor.numbers("IQ")))
    alignment = metadata.get("general.alignment", 32)
    start = -(-cursor.at // alignment) * alignment
    return Header(metadata, [_Tensor(name, size, kind, start + at) for name, size, kind, at in table])
