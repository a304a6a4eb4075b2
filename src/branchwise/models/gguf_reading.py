"""GGUF files as transformers reads them, without what it does more than once.

It parses a file anew for the configuration and for the weights, token by token of the vocabulary, and makes its table
of tensor names anew for every module of the model: three quarters of the time in which a small model is converted.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from typing import Any

_turn = threading.Lock()  # one conversion at a time


@contextmanager
def read_once() -> Iterator[None]:
    """Meanwhile a file is parsed once, and a table of names is made once."""
    import gguf as library
    import numpy as np

    gguf: Any = library

    class Reader(gguf.GGUFReader):  # type: ignore[misc]
        """Looks into the file as an array: every look into a mapped file costs as much as ten."""

        data: Any
        _array: Any = None

        def _get(self, *given: Any, **options: Any) -> Any:
            mapped, self._array = self.data, np.asarray(self.data) if self._array is None else self._array
            self.data = self._array
            try:
                return super()._get(*given, **options)
            finally:
                self.data = mapped

    with _turn:
        reader, name_map = gguf.GGUFReader, gguf.get_tensor_name_map
        gguf.GGUFReader, gguf.get_tensor_name_map = cache(Reader), cache(name_map)
        try:
            yield
        finally:
            gguf.GGUFReader, gguf.get_tensor_name_map = reader, name_map
