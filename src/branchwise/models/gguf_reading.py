"""Makes transformers read a GGUF file faster, by caching what it repeats.

transformers parses a file for the configuration and again for the weights, token by token of the vocabulary, and builds
its table of tensor names again for every module of the model. That takes three quarters of the time of converting a
small model.
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
    """Inside this context a file is parsed once, and a table of names is built once."""
    import gguf as library
    import numpy as np

    gguf: Any = library

    class Reader(gguf.GGUFReader):  # type: ignore[misc]
        """Reads the file as a plain array: an access to a memory-mapped array costs ten times as much."""

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
