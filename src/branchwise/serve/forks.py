"""One prefill for several texts of one prompt: the prompt is written once, and its cache rows are copied.

The copy has a slot of its own until the last of the texts has begun, so there is one at a time, and only where enough
slots are free for it to pay.
"""

from __future__ import annotations

from collections.abc import Sequence

from branchwise.core.sequence import SequenceState
from branchwise.engine import Engine, Generation
from branchwise.serve import journal

LEAST_TOKENS = 32
"""shorter prompts are written side by side in one pass, which costs as little as copying them"""


class Forks:
    """Asked between steps, on the thread that steps."""

    def __init__(self, engine: Engine) -> None:
        self.engine = engine
        self._source: SequenceState | None = None
        self._group: list[Generation] = []

    def plan(self, group: Sequence[Generation], ahead: int) -> None:
        """Let texts of one prompt that all wait, behind `ahead` others, share a prefill, if it pays."""
        target, prompt = self.engine.target, group[0].request.prompt
        room = target.free_slots - ahead - 1  # one is for the source
        waiting = all(generation.began is None and not generation.finished for generation in group)
        # While other texts run, a long prompt is written chunk by chunk between their steps, as the scheduler does it.
        long = len(prompt) > target.prefill_chunk and bool(self.engine.scheduler.running)
        if self._source is not None or not waiting or room < 2 or len(prompt) < LEAST_TOKENS or long:
            return
        source = SequenceState(list(prompt))
        with self.engine.turn:
            try:
                target.open(source, self.engine.scheduler.drafter.needs.prefill_logits)
            except Exception as error:  # then each is written by itself, and meets it there
                journal.write_failure("sharing a prompt", error)
                return
        self._source, self._group = source, list(group)
        for generation in group:
            generation.like = source

    @property
    def due(self) -> bool:
        """Whether there is a source that nobody needs any more."""
        begun = all(generation.began is not None or generation.finished for generation in self._group)
        return self._source is not None and begun

    def settle(self) -> None:
        """Give the slot of the source back once nobody needs it."""
        if self.due:
            assert self._source is not None
            source, self._source, self._group = self._source, None, []
            with self.engine.turn:
                self.engine.target.close(source)
