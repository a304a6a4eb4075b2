"""Admission: who waits, whose prompt is being prefilled, who runs.

`submit` and `cancel` only touch an inbox and never wait for a running step. Between two steps the scheduler lets
requests in, first come first served: it reserves slots while there are any and prefills prompts in chunks, several of
them in one pass, at most `prefill_tokens` tokens a step while texts are running. So a long prompt delays the others by
one chunk a step, and never by all of it. Where a pass over pieces of several prompts takes hardly longer than one over
a piece, as on a GPU, prompts that wait are written side by side.

With a prefix cache (`prefixes.py`) a prompt that begins like another text has the cached rows of that one, and only the
rest of it is prefilled. Of requests that begin alike and come together, such as several answers to one prompt, the
first is prefilled, and the others wait for its rows.
"""

from __future__ import annotations

import threading
import time
from collections import deque
from collections.abc import Sequence
from dataclasses import replace

import torch

from branchwise.backends.base import Chunk, Prefill, Target
from branchwise.draft.base import Drafter
from branchwise.engine.lingering import Lingering
from branchwise.engine.prefixes import Prefixes
from branchwise.engine.request import FinishReason, Generation
from branchwise.engine.scores import token_scores
from branchwise.engine.stats import Stopwatch
from branchwise.errors import QueueFull

MOST_PIECES = 4
"""the most pieces of one prompt in a prefill while other texts wait for their next step"""
SCORED_TOKENS = 256
"""the most tokens of one prompt in a prefill if the request wants the logits after each of them, which take memory"""
MOST_HELD = 0.5
"""how many tokens lingering rows may hold, as a share of those of the running texts: a pass reads the keys and values
of both"""


class Scheduler:
    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        *,
        queue: int | None = None,
        prefill_tokens: int | None = None,
        prefix_cache: int = 0,
    ) -> None:
        """`queue` is how many requests may wait for a slot; None for any number. `prefill_tokens` bounds the tokens of
        prompts that are written between two steps while texts are running; by default it is what one pass may write.
        `prefix_cache` is how many ended texts are kept for prompts that begin like them; with 0 all prompts are
        prefilled."""
        self.target = target
        self.drafter = drafter
        self.queue = queue
        self.prefill_tokens = prefill_tokens or target.prefill_chunk
        self.prefixes = Prefixes(target, drafter, prefix_cache) if prefix_cache else None
        self.prefilling: list[Generation] = []
        """generations that have a slot, and whose prompts are not wholly in the cache"""
        self.running: list[Generation] = []
        """running generations in the order of their slots, lingering rows among them"""
        self._waiting: deque[Generation] = deque()
        self._cancelled: deque[Generation] = deque()
        self._inbox = threading.Lock()
        """held for moments, never during a pass"""

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._cancelled or self.prefilling or self.running)

    @property
    def joining(self) -> bool:
        """Whether a request will join, or go on with its prefill, before the next step."""
        room = self.target.free_slots or self.lingering
        return bool(self.prefilling or (self._waiting and room) or self._cancelled)

    @property
    def lingering(self) -> list[Lingering]:
        """Rows of ended texts that are still in the batch."""
        return [one for one in self.running if isinstance(one, Lingering)]

    # From any thread, at any time

    def submit(self, generation: Generation) -> None:
        with self._inbox:
            if self.queue is not None and len(self._waiting) >= self.queue:
                raise QueueFull(
                    f"{len(self._waiting)} requests are waiting already, which is as many as may; try again later."
                )
            self._waiting.append(generation)

    def cancel(self, generation: Generation) -> None:
        """End a generation at once; its slot is free before the next step."""
        with self._inbox:
            if generation.finished:
                return
            generation.finish_reason = FinishReason.CANCELLED
            if generation in self._waiting:
                self._waiting.remove(generation)
            else:
                self._cancelled.append(generation)

    # Between steps, on the thread that steps

    def admit(self) -> list[Generation]:
        """Free cancelled slots, fill free ones, write the next chunks; returns those that ran out of memory."""
        self.release()
        if self._waiting or self.prefilling:
            self.thin_out()
        failed: list[Generation] = []
        skipped = 0  # requests that wait for the rows of an earlier one; a slot stays reserved for each
        while skipped < self.target.free_slots and (generation := self._after(skipped)) is not None:
            if self.prefixes is not None and self.prefixes.is_coming(generation, self.prefilling, self.running):
                skipped += 1
            elif self._take(generation):
                failed += self._enter(generation)
        if self.prefilling and self.running:
            failed += self._prefill(self._chunks(self.prefill_tokens))
        while self.prefilling and not self.running:  # no text waits for a step meanwhile
            failed += self._prefill(self._chunks(self.target.prefill_chunk))
        return failed

    def release(self) -> None:
        """Free the slots of cancelled texts; rows may linger for the texts that go on."""
        while self._cancelled:
            generation = self._cancelled.popleft()
            generation.flush()
            generation.stop_clock()
            self.leave(generation)
        self.thin_out(sparing=True)

    def linger(self, generation: Generation, behind: Sequence[int]) -> None:
        """Keep the row of an ended generation in its place; a pass has written the tokens `behind` its text."""
        self.running[self.running.index(generation)] = Lingering.of(generation, behind)

    def thin_out(self, *, sparing: bool = False) -> None:
        """Free lingering rows; `sparing` keeps them while they cost the other texts little."""
        lingering = self.lingering
        if sparing and lingering and self._cost_little(lingering):
            return
        for row in lingering:
            self.leave(row)

    def _cost_little(self, lingering: Sequence[Lingering]) -> bool:
        """Whether a pass without the lingering rows would be hardly shorter."""
        rows, texts = len(self.running), len(self.running) - len(lingering)
        if not texts or self.target.bucket(texts, 1) != self.target.bucket(rows, 1):
            return False
        held, whole = (sum(len(one.sequence.tokens) for one in group) for group in (lingering, self.running))
        return held <= MOST_HELD * (whole - held)

    def leave(self, generation: Generation) -> None:
        """Free the slot of a generation that has ended, if it has one."""
        if isinstance(generation, Lingering):
            generation.restore()
        for group in (self.running, self.prefilling):
            if generation in group:
                # The last one takes its place, as in the KV cache: a pass over sequences in slot order copies no rows.
                place, last = group.index(generation), group.pop()
                if last is not generation:
                    group[place] = last
                # Drafters know a text from when it runs, and after an error memory is scarce.
                whole = group is self.running and generation.finish_reason is not FinishReason.ERROR
                if self.prefixes is not None and whole:
                    self.prefixes.keep(generation)
                else:
                    self.target.close(generation.sequence)
                    self.drafter.finish(generation.sequence)

    def _after(self, others: int) -> Generation | None:
        """The waiting generation that has this many `others` before it."""
        with self._inbox:
            return self._waiting[others] if others < len(self._waiting) else None

    def _take(self, generation: Generation) -> bool:
        """Take a generation from the queue; False if it was cancelled meanwhile."""
        with self._inbox:
            if generation.finished:
                return False
            self._waiting.remove(generation)
            return True

    def _enter(self, generation: Generation) -> list[Generation]:
        generation.prefill_clock, generation.began = Stopwatch(self.target.info.device), time.perf_counter()
        try:
            self._seat(generation)
        except torch.OutOfMemoryError:
            return [generation]
        except BaseException:
            generation.finish_reason = FinishReason.CANCELLED  # or the others would wait for it for ever
            raise
        self.prefilling.append(generation)
        return []

    def _seat(self, generation: Generation) -> None:
        """Reserve a slot; if a cached text begins like the prompt, its rows come along."""
        sequence = generation.sequence
        if generation.like is not None:
            generation.prefill = [self.target.fork(generation.like, sequence)]
            generation.prefilled = len(sequence.tokens) - 1
        elif self.prefixes is not None and (found := self.prefixes.find(generation, self.running)) is not None:
            self.prefixes.begin(found, sequence)
            generation.prefilled = generation.stats.reused_tokens = found.rows
        else:
            self.target.reserve(sequence)
        if self.prefixes is not None:
            self.prefixes.sync()  # reserving a slot may have evicted a cached text

    def _chunks(self, budget: int) -> list[Chunk]:
        """The next chunks of prompts that are being written, oldest prompt first, at most `budget` tokens in all."""
        left = budget = min(budget, self.target.prefill_chunk)
        chunks = []
        for generation in self.prefilling:
            prompt = generation.sequence.tokens[:-1]
            share = self._share(len(prompt), budget // len(self.prefilling))
            scored = generation.request.prompt_logprobs
            share = min(share, left, SCORED_TOKENS if scored else left)
            tokens = prompt[generation.prefilled : generation.prefilled + share]
            if tokens:
                keep = len(tokens) if scored else self._keep(generation, len(tokens))
                chunks.append(Chunk(generation.sequence, tokens, keep))
                left -= len(tokens)
        return chunks

    def _keep(self, generation: Generation, tokens: int) -> int:
        """After how many of the next tokens of a prompt the drafter needs logits."""
        after = len(generation.sequence.tokens) - 1 - generation.prefilled - tokens
        return min(max(self.drafter.needs.prefill_logits - after, 0), tokens)

    def _share(self, prompt: int, fair: int) -> int:
        """How many tokens of a prompt are written at once, given its `fair` share of the budget: whole pieces."""
        piece = self.target.prefill_piece(prompt)
        pieces = max(1, fair // piece)
        return piece * (min(pieces, MOST_PIECES) if self.running else pieces)

    def _prefill(self, chunks: list[Chunk]) -> list[Generation]:
        written = {chunk.sequence: chunk for chunk in chunks}
        generations = [generation for generation in self.prefilling if generation.sequence in written]
        try:
            found = self.target.prefill(chunks) if chunks else []
        except torch.OutOfMemoryError:
            # The latest one leaves, to make room for the others.
            self.leave(generations[-1])
            return [generations[-1]]
        except BaseException:
            for generation in generations:
                generation.finish_reason = FinishReason.CANCELLED
                self.leave(generation)
            raise
        failed = []
        for generation, chunk, part in zip(generations, chunks, found, strict=True):
            try:
                generation.prefill.append(self._scored(generation, part))
            except torch.OutOfMemoryError:
                self.leave(generation)
                failed.append(generation)
            generation.prefilled += len(chunk.tokens)
        return failed + self._start()

    def _scored(self, generation: Generation, part: Prefill) -> Prefill:
        """Score the tokens of a chunk, if the request asks for it; only the logits that the drafter needs remain."""
        if not generation.request.prompt_logprobs:
            return part
        first, rows = generation.prefilled + 1, len(part.logits)
        tokens = generation.sequence.tokens[first : first + rows]
        generation.prompt_scores += token_scores(part.logits, tokens, generation.request.top_logprobs)
        return replace(part, logits=part.logits[rows - self._keep(generation, rows) :])

    def _start(self) -> list[Generation]:
        """Start the generations whose prompts are wholly in the cache, in the order in which they came."""
        failed = []
        for generation in list(self.prefilling):
            if generation.prefilled < len(generation.sequence.tokens) - 1:
                continue
            parts, generation.prefill = generation.prefill, []
            self.prefilling.remove(generation)
            self.running.append(generation)
            if not parts:  # a prompt of one token, which is the root, or one of which all rows were inherited
                parts = self.target.prefill([Chunk(generation.sequence, [])])
            try:
                self.drafter.start(generation.sequence, Prefill.joined(parts))
            except torch.OutOfMemoryError:
                failed.append(generation)
            if generation.prefill_clock is not None:
                generation.prefill_clock.lap("prefill")
        return failed
