"""The part of a target that opens, forks, retires and closes sequences whose keys and values lie in slots."""

from __future__ import annotations

from branchwise.backends.base import PipelinedTarget, Prefill
from branchwise.backends.transformers.kv_cache import KVCache
from branchwise.backends.transformers.runner import ModelRunner
from branchwise.core.sequence import SequenceState
from branchwise.errors import UsageError


class SlottedTarget(PipelinedTarget):
    keeps_rows = True
    store: KVCache
    runner: ModelRunner

    def __init__(self) -> None:
        self._prefills: dict[SequenceState, Prefill] = {}  # of sequences opened by `open`, for their forks
        self._passes = 0  # counts passes and changes of slots: either invalidates the results of an enqueued pass

    @property
    def free_slots(self) -> int:
        return self.store.free_slots

    def holds(self, sequence: SequenceState) -> bool:
        return self.store.holds(sequence)

    def reserve(self, sequence: SequenceState) -> None:
        self._check_length(sequence)
        self._passes += 1
        self.store.open(sequence)

    def open(self, sequence: SequenceState, keep: int = 0) -> Prefill:
        self._prefills[sequence] = found = super().open(sequence, keep)
        return found

    def fork(self, source: SequenceState, sequence: SequenceState) -> Prefill:
        assert sequence.tokens == source.tokens, "a fork has other tokens than its source"
        assert self.store.length(source) == len(source.tokens) - 1, "the cache is out of step with its sequence"
        self._passes += 1
        self.store.fork(source, sequence)
        return self._prefills.get(source) or self.runner.nothing_written()

    def inherit(self, source: SequenceState, sequence: SequenceState, rows: int, *, moved: bool) -> None:
        self._check_length(sequence)
        self._passes += 1
        take = self.store.take_over if moved else self.store.fork
        take(source, sequence, rows)

    def retire(self, sequence: SequenceState) -> None:
        self._passes += 1  # slots move
        self._prefills.pop(sequence, None)
        self.store.retire(sequence, min(self.store.length(sequence), len(sequence.tokens) - 1))

    def close(self, sequence: SequenceState) -> None:
        self._passes += 1  # slots move
        self._prefills.pop(sequence, None)
        self.store.close(sequence)

    def _check_length(self, sequence: SequenceState) -> None:
        if (length := len(sequence.tokens)) > self.info.context:
            raise UsageError(f"The prompt has {length} tokens and the context holds {self.info.context}; shorten it.")
