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
"""of a prompt that are written one after the other while texts wait for the next step"""
SCORED_TOKENS = 256
"""of a prompt that are written at once where the logits behind all of them are wanted, which take memory"""

MOST_HELD = 0.5
"""tokens of rows that linger, of those of the texts beside them: a pass reads the keys and values of both"""


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
        """`queue` is how many requests may wait for a slot; None for any number. `prefill_tokens` of prompts are
        written between two steps while texts are running, by default as many as a pass may write. `prefix_cache` is how
        many texts that have ended are kept for prompts that begin like them; with 0 all prompts are prefilled."""
        self.target = target
        self.drafter = drafter
        self.queue = queue
        self.prefill_tokens = prefill_tokens or target.prefill_chunk
        self.prefixes = Prefixes(target, drafter, prefix_cache) if prefix_cache else None
        self.prefilling: list[Generation] = []
        """they have a slot, and their prompts are not wholly in the cache"""
        self.running: list[Generation] = []
        """in the order of their slots, rows that linger among them"""
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
        """Rows of texts that have ended."""
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
        put_off = 0
        while put_off < self.target.free_slots and (generation := self._after(put_off)) is not None:
            if self.prefixes is not None and self.prefixes.is_coming(generation, self.prefilling, self.running):
                put_off += 1  # it keeps a slot
            elif self._take(generation):
                failed += self._enter(generation)
        if self.prefilling and self.running:
            failed += self._prefill(self._chunks(self.prefill_tokens))
        while self.prefilling and not self.running:  # no text waits for a step meanwhile
            failed += self._prefill(self._chunks(self.target.prefill_chunk))
        return failed

    def release(self) -> None:
        """Free the slots of what was cancelled; rows linger for the sake of those that go on."""
        while self._cancelled:
            generation = self._cancelled.popleft()
            generation.flush()
            generation.stop_clock()
            self.leave(generation)
        self.thin_out(sparing=True)

    def linger(self, generation: Generation, behind: Sequence[int]) -> None:
        """Let the row of a generation that has ended stay in its place; a pass has these tokens `behind` its text."""
        self.running[self.running.index(generation)] = Lingering.of(generation, behind)

    def thin_out(self, *, sparing: bool = False) -> None:
        """Let go of rows that linger, but `sparing` those that cost the others little."""
        lingering = self.lingering
        if sparing and lingering and self._cost_little(lingering):
            return
        for row in lingering:
            self.leave(row)

    def _cost_little(self, lingering: Sequence[Lingering]) -> bool:
        """Whether a pass over the other rows alone would hardly be shorter."""
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
                # The last takes its place, as in the KV cache: a pass over sequences in slot order copies no rows.
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
        """Who waits behind so many others."""
        with self._inbox:
            return self._waiting[others] if others < len(self._waiting) else None

    def _take(self, generation: Generation) -> bool:
        """Let it wait no longer; whether it still did."""
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
            generation.finish_reason = FinishReason.CANCELLED  # the others must not wait behind it for ever
            raise
        self.prefilling.append(generation)
        return []

    def _seat(self, generation: Generation) -> None:
        """Take a slot, with the rows of a text that the prompt begins like, if there is one."""
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
            self.prefixes.sync()  # somebody may have made room

    def _chunks(self, budget: int) -> list[Chunk]:
        """The next tokens of the prompts that are being written, the oldest first, at most `budget` of them."""
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
        """Behind how many of the next tokens of a prompt the drafter needs logits."""
        after = len(generation.sequence.tokens) - 1 - generation.prefilled - tokens
        return min(max(self.drafter.needs.prefill_logits - after, 0), tokens)

    def _share(self, prompt: int, fair: int) -> int:
        """How many tokens of a prompt are written at once, if that many would be a fair share."""
        piece = self.target.prefill_piece(prompt)
        pieces = max(1, fair // piece)
        return piece * (min(pieces, MOST_PIECES) if self.running else pieces)

    def _prefill(self, chunks: list[Chunk]) -> list[Generation]:
        written = {chunk.sequence: chunk for chunk in chunks}
        generations = [generation for generation in self.prefilling if generation.sequence in written]
        try:
            found = self.target.prefill(chunks) if chunks else []
        except torch.OutOfMemoryError:
            # The last that came leaves, so that there is room for the others.
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
        """Report the tokens of a chunk, if that is wanted; what remains of its logits is what the drafter needs."""
        if not generation.request.prompt_logprobs:
            return part
        first, rows = generation.prefilled + 1, len(part.logits)
        tokens = generation.sequence.tokens[first : first + rows]
        generation.prompt_scores += token_scores(part.logits, tokens, generation.request.top_logprobs)
        return replace(part, logits=part.logits[rows - self._keep(generation, rows) :])

    def _start(self) -> list[Generation]:
        """Let those run whose prompts are in the cache, in the order in which they came."""
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
