"""The step: draft, score, verify, commit, emit; for every running sequence at once.

There is no special first step (prefill leaves out the last prompt token, which is the first root), no greedy mode and
no batch of one. Plain decoding is this loop with a drafter that proposes nothing.
"""

from __future__ import annotations

import logging
import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from enum import StrEnum

import numpy as np
import torch

from branchwise.backends.base import Scored, Target
from branchwise.core.batch import PadShape, TreeBatch
from branchwise.core.rng import SeededChance
from branchwise.core.sampling import SamplingParams
from branchwise.core.sequence import SequenceState
from branchwise.core.target_probs import WarpedProbs
from branchwise.core.text import TextStream
from branchwise.core.tree import DraftTree
from branchwise.draft.base import Budget, Drafter
from branchwise.engine.stats import Stats, Stopwatch
from branchwise.errors import ModelError, UsageError
from branchwise.verify import Verdict, Verdicts, Verifier, check_pairing

log = logging.getLogger(__name__)

ANY_ROOM = PadShape()


class FinishReason(StrEnum):
    STOP = "stop"
    """a stop token or stop string"""
    LENGTH = "length"
    """the wanted length or the end of the context"""
    CANCELLED = "cancelled"
    ERROR = "error"
    """the device had no memory for it"""


@dataclass(frozen=True)
class Request:
    """What is to be written."""

    prompt: tuple[int, ...]
    sampling: SamplingParams = field(default_factory=SamplingParams)
    max_new_tokens: int = 256
    stop_tokens: frozenset[int] = frozenset()
    stop_when: Callable[[Sequence[int]], bool] | None = None
    """asked after every emitted token with all tokens so far"""
    logprobs: bool = False
    """report the log-probability of each emitted token under the unwarped model"""

    def __post_init__(self) -> None:
        if not self.prompt:
            raise UsageError("The prompt is empty; there is nothing to continue.")
        if self.max_new_tokens < 1:
            raise UsageError(f"max_new_tokens must be at least 1, not {self.max_new_tokens}.")


@dataclass(frozen=True)
class Piece:
    """One emitted token."""

    token: int
    text: str
    """what it adds to the text; empty while a character or a stop string is incomplete"""
    drafted: bool
    """accepted from the draft; otherwise the target's own"""
    logprob: float | None
    source: str = ""
    """who drafted it: the drafter, or that of its sources which proposed the token"""


@dataclass(eq=False)
class Generation:
    """A request on its way through the engine."""

    request: Request
    sequence: SequenceState
    text: TextStream | None = None
    """follows the output where someone reads it as it comes, or where stop strings end it"""
    like: SequenceState | None = None
    """an open sequence of the same tokens, from which its cache rows are copied"""
    pieces: list[Piece] = field(default_factory=list)
    unsaid: list[tuple[int, str, float | None]] = field(default_factory=list)
    """tokens that are no pieces yet, who drafted them, and how probable they were: text can wait, the device cannot"""
    stats: Stats = field(default_factory=Stats)
    prefill: Stopwatch | None = None
    """runs until the prefill is known to be over"""
    finish_reason: FinishReason | None = None
    error: str | None = None
    """what happened and what helps, where it ended with an error"""

    @property
    def finished(self) -> bool:
        return self.finish_reason is not None

    def check(self) -> None:
        """Raise what it ended with, where that was an error."""
        if self.error is not None:
            raise ModelError(self.error)

    @property
    def token_ids(self) -> list[int]:
        return self.sequence.output

    def say(self, *, last: bool = False) -> None:
        """Make pieces of the tokens that came; another thread may take each as soon as it is there."""
        while self.unsaid:
            token, source, logprob = self.unsaid.pop(0)
            silent = self.text is None or token in self.request.stop_tokens
            shown = "" if silent else self.text.push(token)  # type: ignore[union-attr]
            shown += self._held() if last and not self.unsaid else ""
            self.pieces.append(Piece(token, shown, bool(source), logprob, source))

    def fall_silent(self) -> None:
        """Nothing will follow: release what was held back, with the last piece where there is one."""
        self.say(last=True)
        held = self._held()  # by pieces that are there already
        if held and self.pieces:
            self.pieces[-1] = replace(self.pieces[-1], text=self.pieces[-1].text + held)

    def _held(self) -> str:
        return "" if self.text is None else self.text.finish()

    def budget(self, most: Budget, context: int, further: int = 0) -> Budget:
        """What a tree may hold so that nothing in it is past the wanted length or the context, if it stands so many
        tokens further on."""
        tokens = len(self.sequence.tokens) + further
        wanted = self.request.max_new_tokens - (tokens - self.sequence.prompt_length)
        room = context - tokens
        return Budget(most.nodes, depth=min(wanted, room, most.depth + 1) - 1)


class Engine:
    """Runs generations together on one target. Sequences join and leave between steps."""

    def __init__(self, target: Target, drafter: Drafter, verifier: Verifier, most: Budget | None = None) -> None:
        """`most` bounds every tree; by default only the target does."""
        check_pairing(verifier, drafter.draw, drafter.name)
        if hasattr(drafter, "bind"):
            drafter.bind(target)
        self.target = target
        self.drafter = drafter
        self.verifier = verifier
        self._judge = target.capture(verifier) if hasattr(target, "capture") else verifier
        given = most or Budget(target.max_nodes, target.context)
        self.most = Budget(min(given.nodes, target.max_nodes), given.depth)
        self._clock = Stopwatch(target.device)
        self.speaks_later = target.device.type == "cuda"
        """Whether streamed tokens become text while the next step runs. A host computes its steps itself."""
        self._waiting: deque[Generation] = deque()
        self._running: list[Generation] = []
        self._learning = False  # whether a step may have been learned from that is not committed
        self._ahead: Scored | None = None  # what the pass will find that is under way for the next step
        self.turn = threading.RLock()  # threads may share an engine; a step of one moves the texts of all

    @property
    def busy(self) -> bool:
        return bool(self._waiting or self._running)

    def submit(
        self, request: Request, text: TextStream | None = None, *, like: SequenceState | None = None
    ) -> Generation:
        """Queue a request; it runs with the others from the next step on, as soon as a slot is free.

        `like` is a sequence of the same tokens that the caller opened on the target, and that stays open until the
        request runs: its cache rows are copied in place of a prefill, so many texts from one prompt are cheap.
        """
        if len(request.prompt) >= self.target.context:
            raise UsageError(
                f"The prompt has {len(request.prompt)} tokens and the context holds {self.target.context}, "
                "the answer included; shorten the prompt."
            )
        if not 0 <= min(request.prompt) <= max(request.prompt) < self.target.vocabulary:
            raise UsageError(f"The prompt holds token ids outside the vocabulary of {self.target.vocabulary}.")
        request.sampling.check_vocabulary(self.target.vocabulary)
        generation = Generation(request, SequenceState(list(request.prompt), request.sampling), text, like)
        with self.turn:
            self._assign_seed(generation.sequence)
            self._waiting.append(generation)
        return generation

    def _assign_seed(self, sequence: SequenceState) -> None:
        """Say where the draws of a text come from, where its drafter must not meet the same draws twice."""
        if hasattr(self.drafter, "derive_seed") and self.verifier.name != "match":
            sequence.rng_seed = self.drafter.derive_seed(sequence)

    def cancel(self, generation: Generation) -> None:
        """End a generation where it stands; what it has emitted stays."""
        with self.turn:
            if generation in self._waiting:
                self._waiting.remove(generation)
                generation.finish_reason = FinishReason.CANCELLED
            elif generation in self._running:
                self._finish(generation, FinishReason.CANCELLED)

    def step(self) -> list[Generation]:
        """Advance every running sequence by at least one token; returns the generations that moved."""
        with self.turn:
            return self._step()

    def _step(self) -> list[Generation]:
        self._admit()
        if not self._running and self._waiting:
            raise UsageError("Every slot is taken by texts of another engine; finish those, or load with more slots.")
        while self._running:
            generations = list(self._running)
            if self._learning:  # a step was interrupted, and what was learned from it knows of draws that come again
                for generation in generations:
                    self._assign_seed(generation.sequence)
                self._learning = False
            self._clock.start()
            try:
                batch, scored, verdicts = self._verify(generations)
            except torch.OutOfMemoryError:
                # Nothing was committed yet. Whoever came last leaves, until there is room for the others.
                self._run_out(self._running[-1])
                continue
            sequences = [generation.sequence for generation in generations]
            self._update(sequences, scored, verdicts)
            self.target.commit(sequences, verdicts)
            self._learning = False
            if self._ahead is None:
                self._clock.lap("commit")

            seconds = self._clock.settle()
            for row, generation in enumerate(generations):
                self._emit(generation, batch.trees[row], verdicts[row], scored.logits[row], seconds)
            return generations
        return []

    def _update(self, sequences: Sequence[SequenceState], scored: Scored, verdicts: Sequence[Verdict]) -> None:
        with self._not_for_memory():
            self.drafter.update(sequences, scored, verdicts)

    def _heed(self, scored: Scored, found: Verdicts) -> None:
        """What follows from verdicts on a device is launched right behind them, and the host reads them meanwhile."""
        if hasattr(self.target, "update_on_device"):
            self.target.update_on_device(scored, found)
        if hasattr(self.drafter, "update_on_device"):
            with self._not_for_memory():
                self.drafter.update_on_device(scored, found)

    def _begin_next(self, generations: list[Generation], depth: int, found: Verdicts) -> None:
        """Where a drafter foresees its next trees, the pass over them is launched behind the verdicts too: the device
        need not wait until the host has read them."""
        if not (hasattr(self.drafter, "draft_next") and getattr(self.target, "scores_ahead", False)):
            return
        joining = self._waiting and self.target.free_slots
        if joining or any(generation.request.logprobs for generation in generations):  # which are read from this pass
            return
        least = [generation.budget(self.most, self.target.context, depth + 1) for generation in generations]
        if min(budget.depth for budget in least) < 0:  # a text may be over
            return
        self._clock.lap("commit")
        try:
            trees = self.drafter.draft_next(least)
            if trees is not None:
                sequences = [generation.sequence for generation in generations]
                # A recorded verdict has room for paths that no tree of this step has.
                paths = Verdicts(found.paths[:, : depth + 1], found.tokens)
                batch = self._batch(trees, sequences, least)
                self._ahead = self.target.launch(sequences, batch, paths)  # type: ignore[attr-defined]
        except torch.OutOfMemoryError:  # of the next step, which will say so
            pass
        self._clock.lap("score")

    @contextmanager
    def _not_for_memory(self) -> Iterator[None]:
        """Where there is no memory to learn from a step, texts go on without."""
        try:
            yield
        except torch.OutOfMemoryError:
            log.warning("The device has no memory left for drafter %r to learn from a step.", self.drafter.name)

    def _verify(self, generations: list[Generation]) -> tuple[TreeBatch, Scored, list[Verdict]]:
        """Draft for all, score all trees in one pass, and see what each text keeps."""
        sequences = [generation.sequence for generation in generations]
        budgets = [generation.budget(self.most, self.target.context) for generation in generations]
        ahead, self._ahead = self._ahead, None
        batch = self._batch(self.drafter.draft(sequences, budgets), sequences, budgets)
        self._clock.lap("draft")
        scored = self.target.score(sequences, batch)
        if scored is not ahead:  # whose time is booked already
            self._clock.lap("score")
        probs = WarpedProbs(scored.logits, batch, sequences)
        found = self._judge(batch, probs, self._chance(sequences, len(batch)))
        if batch.host_tokens is None:  # by the time somebody reads a tree, its place may hold the next one
            found = found.spelled(batch.tokens)
        self._clock.lap("verify")
        found.fetch()
        self._learning = True
        self._heed(scored, found)
        self._begin_next(generations, batch.depth, found)
        for generation in generations:  # while the device is at work
            generation.say()
        return batch, scored, found.read()[: len(sequences)]

    def _admit(self) -> None:
        while self._waiting and self.target.free_slots:
            generation = self._waiting.popleft()
            clock = Stopwatch(self.target.device)
            try:
                if generation.like is None:
                    logits = self.target.open(generation.sequence, getattr(self.drafter, "wants_prefill", 0))
                else:
                    self.target.fork(generation.like, generation.sequence)
                    logits = None
            except torch.OutOfMemoryError:
                self._run_out(generation)
                continue
            except BaseException:
                generation.finish_reason = FinishReason.CANCELLED  # the others must not wait behind it for ever
                raise
            self._running.append(generation)
            if logits is not None and len(logits):
                try:
                    self.drafter.begin(generation.sequence, logits)  # type: ignore[attr-defined]
                except torch.OutOfMemoryError:
                    self._run_out(generation)
                    continue
            clock.lap("prefill")
            generation.prefill = clock

    def _batch(
        self, trees: Sequence[DraftTree], sequences: Sequence[SequenceState], budgets: Sequence[Budget]
    ) -> TreeBatch:
        """The drafted trees as one batch; what a drafter got wrong must not reach the text."""
        if len(trees) != len(sequences):
            raise UsageError(f"Drafter {self.drafter.name!r} gave {len(trees)} trees for {len(sequences)} sequences.")
        for tree, budget in zip(trees, budgets, strict=True):
            if tree.draw is not self.drafter.draw and len(tree) > 1:
                raise UsageError(
                    f"Drafter {self.drafter.name!r} says that it draws {self.drafter.draw.value} and gave a tree drawn "
                    f"{tree.draw.value}."
                )
            if len(tree) > budget.nodes or tree.depth > budget.depth:
                raise UsageError(
                    f"Drafter {self.drafter.name!r} gave a tree beyond its budget: {len(tree)} nodes, "
                    f"{tree.depth} deep, where {budget.nodes} and {budget.depth} are allowed."
                )
        room = getattr(self.drafter, "room", None) or ANY_ROOM
        batch, nodes = self.target.room(len(trees), max(min(room.nodes, self.most.nodes), *map(len, trees)))
        roots = [sequence.root for sequence in sequences] + [0] * (batch - len(trees))
        whole = [*trees, *[DraftTree.root(0)] * (batch - len(trees))]  # trees without a text fill a recorded batch
        return TreeBatch(whole, self.target.device, room.holding(nodes), roots)

    def _chance(self, sequences: Sequence[SequenceState], batch: int) -> SeededChance:
        told = np.zeros((2, batch), dtype=np.int64)
        told[0, : len(sequences)] = [sequence.rng_seed for sequence in sequences]
        told[1, : len(sequences)] = [len(sequence.tokens) - 1 for sequence in sequences]
        seeds, roots = torch.from_numpy(told)
        return SeededChance(seeds, roots, device=self.target.device)

    def _emit(
        self, generation: Generation, tree: DraftTree, verdict: Verdict, logits: torch.Tensor, seconds: dict[str, float]
    ) -> None:
        """Hand out the accepted tokens and the target's own one, up to the first that ends the text."""
        accepted = verdict.kept_of(tree)
        tokens = [*accepted, verdict.token]
        emitted = 0
        drafters = [tree.sources[node] if tree.sources else self.drafter.name for node in verdict.path[1:]]
        for token, node in zip(tokens, verdict.path, strict=True):
            source = drafters[emitted] if emitted < len(accepted) else ""
            emitted += 1
            logprob = logits[node].float().log_softmax(dim=-1)[token].item() if generation.request.logprobs else None
            reason = self._append(generation, token, source, logprob)
            if reason is not None:
                self._finish(generation, reason)
                break
        if generation.prefill is not None:  # the verdicts came behind it, so it is over
            generation.stats.prefill_seconds = generation.prefill.settle().get("prefill", 0.0)
            generation.prefill = None
        generation.stats.record(
            nodes=len(tree) - 1,
            depth=tree.depth,
            accepted=min(emitted, len(accepted)),
            emitted=emitted,
            seconds=seconds,
            sources=drafters[:emitted],
        )

    def _append(self, generation: Generation, token: int, source: str, logprob: float | None) -> FinishReason | None:
        """Add one token; says why the text ends with it, if it does."""
        request, sequence, text = generation.request, generation.sequence, generation.text
        sequence.tokens.append(token)
        generation.unsaid.append((token, source, logprob))
        asked = request.stop_when is not None and request.stop_when(sequence.tokens)
        stops = asked or token in request.stop_tokens
        full = len(sequence.tokens) >= self.target.context
        full |= len(sequence.tokens) - sequence.prompt_length >= request.max_new_tokens
        if stops or full:
            generation.fall_silent()
        elif text is None or text.may_stop or not self.speaks_later:
            generation.say()
        if stops or (text is not None and text.stopped):
            return FinishReason.STOP
        return FinishReason.LENGTH if full else None

    def _run_out(self, generation: Generation) -> None:
        """End a generation for which there is no memory; the others go on."""
        running = len(self._running)
        generation.error = (
            f"The device ran out of memory with {running} texts at work, this one at {len(generation.sequence.tokens)} "
            "tokens; load with a shorter context or a smaller max_batch."
        )
        if generation in self._running:
            self._finish(generation, FinishReason.ERROR)
        generation.finish_reason = FinishReason.ERROR
        if self.target.device.type == "cuda":
            torch.cuda.empty_cache()

    def _finish(self, generation: Generation, reason: FinishReason) -> None:
        generation.fall_silent()
        generation.finish_reason = reason  # whoever sees that it is over finds all of it
        # The last takes the free place, as its slot does: a pass over sequences in slot order copies no cache rows.
        place, last = self._running.index(generation), self._running.pop()
        if last is not generation:
            self._running[place] = last
        self.target.close(generation.sequence)
        if hasattr(self.drafter, "close"):
            self.drafter.close(generation.sequence)
