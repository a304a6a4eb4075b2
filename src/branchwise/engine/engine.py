"""The engine: generations that run together on one target, step by step.

Threads may share an engine. `submit` and `cancel` return at once, even during a step; calls of `step` take turns.
"""

from __future__ import annotations

import threading
import warnings
from collections.abc import Callable, Sequence
from itertools import repeat
from typing import NamedTuple

import torch

from branchwise.backends.base import LARGEST, PipelinedTarget, Target
from branchwise.control.guard import Guard
from branchwise.core.sequence import SequenceState
from branchwise.core.text import TextStream
from branchwise.cuda.counts import counted, since
from branchwise.draft.base import Budget, Drafter, LearningDrafter
from branchwise.engine.guarded import GuardedDrafter, may_rest
from branchwise.engine.lingering import Lingering
from branchwise.engine.pipelined import PipelinedStep
from branchwise.engine.request import FinishReason, Generation, Pending, Piece, Request
from branchwise.engine.scheduler import Scheduler
from branchwise.engine.step import Outcome, Step
from branchwise.engine.trace import PHASE, trace_of
from branchwise.errors import CutWarning, LargeDraftWarning, UsageError
from branchwise.registry import check_known
from branchwise.verify import Verifier, check_pairing


class StepFacts(NamedTuple):
    """What the statistics of every text in a step record of it."""

    seconds: dict[str, float]
    """seconds by phase"""
    batch: int
    """how many texts took part"""
    prepared: frozenset[str]
    """what the step had to compile or record"""
    drafter: str
    """the source of nodes whose tree names none"""
    rested: bool = False
    """whether the guard let nothing be drafted"""
    drafting_speed: float | None = None
    """speed of drafted steps relative to plain decoding, by which the guard decides; 2.0 is twice as fast"""


class Engine:
    """Runs generations together on one target. Sequences join and leave between steps."""

    def __init__(
        self,
        target: Target,
        drafter: Drafter,
        verifier: Verifier,
        most: Budget | None = None,
        *,
        queue: int | None = None,
        prefill_tokens: int | None = None,
        prefix_cache: int | bool = False,
        guard: Guard | bool = False,
    ) -> None:
        """`most` bounds every tree; by default only the target does. `queue` bounds how many requests may wait, and
        `prefill_tokens` how much of their prompts is written between two steps, as `Scheduler` says. With a
        `prefix_cache` prompts begin with cached rows of texts that begin alike, running or ended; the number says how
        many ended texts are kept, True as many as there are slots. With a `guard` nothing is drafted while drafting
        would be slower than plain decoding, unless the drafter sees to that itself. A drafter with several sources
        always has a guard, which chooses among them."""
        check_pairing(verifier, drafter.draw, drafter.name)
        drafter.bind(target.info)
        drafter.let_foresee(verifier.name == "match")
        target.require(drafter.needs)
        self.target = target
        self.drafter = drafter
        self.verifier = verifier
        given = most or Budget(target.info.max_nodes, target.info.context)
        self.most = Budget(min(given.nodes, target.info.max_nodes), given.depth)
        self.guard: Guard | None = None
        self._guarded: GuardedDrafter | None = None
        stepping = drafter
        if drafter.sources or (guard and may_rest(drafter)):
            sources = drafter.sources or (drafter,)
            learning = [one.name for one in sources if isinstance(one, LearningDrafter) and one.learns]
            names = [source.name for source in sources]
            self.guard = guard if isinstance(guard, Guard) else Guard(target.info, names, learning)
            stepping = self._guarded = GuardedDrafter(drafter, self.guard, same_text=verifier.name == "match")
        kept = target.info.slots if prefix_cache is True else int(prefix_cache)
        self.scheduler = Scheduler(target, stepping, queue=queue, prefill_tokens=prefill_tokens, prefix_cache=kept)
        if isinstance(target, PipelinedTarget) and target.pipelined:
            self._step: Step = PipelinedStep(target, stepping, verifier, self.most)
        else:
            self._step = Step(target, stepping, verifier, self.most)
        self.turn = threading.RLock()
        """held during a step, because a step advances the texts of all threads"""
        self._stepping = False
        self.counts_probs = False
        """whether statistics count acceptance by draft probability, for which every step reads q"""
        self._seeding = threading.Lock()

    def warn(self) -> None:
        """Warn if the trees of the method do not fit into a pass, or the draft model is too large to gain anything.
        Every function that loads a method for users calls this."""
        wanted, most = self.drafter.largest + 1, self.most.nodes
        if wanted > most == self.target.info.max_nodes:
            lift = f"load it with max_nodes={min(wanted, LARGEST)} (--max-nodes {min(wanted, LARGEST)})"
            warnings.warn(
                f"Trees of {wanted - 1} nodes are cut to {most - 1}: the target scores {most} nodes in a pass, "
                f"the root included; {lift if most < LARGEST else f'no pass scores more than {LARGEST}'}.",
                CutWarning,
                stacklevel=2,
            )
        cost = self.drafter.cost
        if cost is not None and cost >= 1 and self.drafter.name != "disturbed":  # which is the target, on purpose
            warnings.warn(
                f"A pass of the draft model reads {cost:.1f} times the bytes of a pass of the target, so drafting with "
                "it hardly pays; use a smaller model of the target's family.",
                LargeDraftWarning,
                stacklevel=2,
            )

    @property
    def busy(self) -> bool:
        return self.scheduler.busy

    def submit(
        self,
        request: Request,
        text: TextStream | None = None,
        *,
        like: SequenceState | None = None,
        on_output: Callable[[Generation, list[Piece]], None] | None = None,
    ) -> Generation:
        """Queue a request; it joins the others between two steps, as soon as a slot is free. Never waits.

        `on_output(generation, pieces)` is called on the thread that steps, after every step that added something and
        when the generation ends. `like` is a sequence of the same tokens that the caller has opened on the target and
        keeps open until the request runs: its cache rows are copied in place of a prefill.
        """
        info = self.target.info
        if len(request.prompt) >= info.context:
            raise UsageError(
                f"The prompt has {len(request.prompt)} tokens and the context holds {info.context}, "
                "the answer included; shorten the prompt."
            )
        if not 0 <= min(request.prompt) <= max(request.prompt) < info.vocabulary:
            raise UsageError(f"The prompt holds token ids outside the vocabulary of {info.vocabulary}.")
        request.sampling.check_vocabulary(info.vocabulary)
        if request.task is not None:
            if not self.drafter.tasks:
                raise UsageError(f"What drafts here has no specialists, so leave out the task {request.task!r}.")
            check_known("task", request.task, self.drafter.tasks)
        generation = Generation(request, SequenceState(list(request.prompt), request.sampling), text, on_output, like)
        if (constraint := generation.constraint) is not None:
            if constraint.prompt_length != len(request.prompt):
                raise UsageError("A constraint belongs to one request; make one of the grammar for each prompt.")
            if not request.stop_tokens.issuperset(constraint.ends):
                raise UsageError(f"A grammar ends its text with tokens {constraint.ends}; they must be stop_tokens.")
        if request.task is not None:
            self.drafter.assign(generation.sequence, request.task)
        with self._seeding:
            self._assign_seed(generation.sequence)
        self.scheduler.submit(generation)
        return generation

    def cancel(self, generation: Generation) -> None:
        """End a generation where it is; what it has emitted stays. Its slot is free before the next step."""
        self.scheduler.cancel(generation)
        if self.turn.acquire(blocking=False):  # no other thread steps: free the slot now
            try:
                if not self._stepping:
                    self.scheduler.release()
            finally:
                self.turn.release()

    def drop_prefixes(self) -> None:
        """Free the cached rows of texts that have ended."""
        with self.turn:
            if self.scheduler.prefixes is not None:
                self.scheduler.prefixes.clear()

    def step(self) -> list[Generation]:
        """Advance every running sequence by at least one token; returns the generations that moved."""
        with self.turn:
            self._stepping = True
            try:
                return self._advance()
            finally:
                self._stepping = False

    def _advance(self) -> list[Generation]:
        scheduler = self.scheduler
        if self._guarded is not None and scheduler.joining:
            self._guarded.disturbed()
        for generation in scheduler.admit():
            self._run_out(generation)
        if scheduler.busy and not scheduler.running and not scheduler.prefilling:
            raise UsageError("Every slot is taken by texts of another engine; finish those, or load with more slots.")
        for generation in [one for one in scheduler.running if not one.request.max_new_tokens]:
            self._finish(generation, FinishReason.LENGTH)
            generation.report()
        before = counted()
        outcomes = self._outcomes()
        if not outcomes:
            return []
        seconds = self._step.clock.settle()
        seconds.pop(PHASE, None)
        moved = [generation for generation in outcomes if not isinstance(generation, Lingering)]
        facts = self._facts(seconds, len(moved), since(before))
        for generation, outcome in outcomes.items():
            if isinstance(generation, Lingering):
                generation.sequence.tokens += outcome.tokens
            else:
                self._emit(generation, outcome, facts)
        scheduler.thin_out(sparing=self._step.works_ahead)
        for generation in moved:
            generation.report()
        return moved

    def _outcomes(self) -> dict[Generation, Outcome]:
        """What a step finds for every running generation. Where the device has no memory for all of them, the latest
        leave, one after the other, until it has: a step that fails has committed nothing."""
        scheduler, step = self.scheduler, self._step
        while scheduler.running:
            generations = list(scheduler.running)
            if step.interrupted:
                # The step comes again, and with its seeds the same draws would: the drafter may have learned from them.
                for generation in generations:
                    self._assign_seed(generation.sequence)
                step.interrupted = False
            step.clock.start()
            try:
                return dict(zip(generations, step(generations, joining=scheduler.joining), strict=True))
            except torch.OutOfMemoryError:
                if scheduler.lingering:
                    scheduler.thin_out()
                else:
                    self._run_out(generations[-1])
        return {}

    def _assign_seed(self, sequence: SequenceState) -> None:
        """The tokens of `match` do not depend on the draft, so there the seed of the text always serves."""
        if self.verifier.name != "match":
            sequence.rng_seed = self.drafter.derive_seed(sequence)

    def _facts(self, seconds: dict[str, float], batch: int, prepared: frozenset[str]) -> StepFacts:
        guarded = self._guarded
        if guarded is None or self.guard is None:
            return StepFacts(seconds, batch, prepared, self.drafter.source)
        speed = None if self.drafter.sources else self.guard.speed
        return StepFacts(seconds, batch, prepared, guarded.drafting, guarded.rested, speed)

    def _emit(self, generation: Generation, outcome: Outcome, facts: StepFacts) -> None:
        """Hand out the accepted tokens and the target's own one, up to the first that ends the text."""
        if generation.finished:  # cancelled during the step
            return
        tree, verdict, logprobs, tops, seen = outcome
        sources = [tree.sources[node] if tree.sources else facts.drafter for node in verdict.path[1:]]
        tokens, request = outcome.tokens, generation.request
        found = logprobs if request.logprobs and logprobs else repeat(None)
        asked = repeat([]) if tops is None else (top[: request.top_logprobs] for top in tops)
        pending = list(map(Pending, tokens, [*sources, ""], found, asked))
        emitted = len(tokens)
        if generation.constraint is not None:
            generation.constraint.settle([*generation.sequence.tokens, *tokens])
            generation.error = generation.constraint.error
        if self._goes_on(generation, tokens):
            generation.sequence.tokens += tokens
            generation.pending += pending
        else:
            for number, one in enumerate(pending, start=1):
                if (reason := self._append(generation, one)) is not None:
                    self._finish(generation, reason, behind=tokens[number:])
                    emitted = number
                    break
        if generation.error is not None and not generation.finished:
            self._finish(generation, FinishReason.ERROR)
        if generation.prefill_clock is not None:
            self._settle_prefill(generation)  # the verdict came after it, so it is over
        if seen is not None and generation.request.trace:
            generation.traces.append(trace_of(seen, tree, verdict, emitted, facts.drafter, facts.seconds, facts.batch))
        if self.counts_probs:
            generation.stats.count_probs(tree, verdict.path)
        stats = generation.stats
        stats.record(tree, emitted, facts.seconds, sources[:emitted], facts.drafter, facts.batch, facts.prepared)
        stats.rested += facts.rested
        stats.drafting_speed = facts.drafting_speed

    def reasons(self, batch: int) -> list[str]:
        """What would be drafted for so many texts, and by which numbers, in sentences."""
        chosen = self.guard.reasons(batch) if self.guard is not None and self.drafter.sources else []
        return [*chosen, *self.drafter.reasons(batch)]

    def _goes_on(self, generation: Generation, tokens: Sequence[int]) -> bool:
        """Whether a text surely does not end with any of these tokens, and need not become text before the next step:
        with many texts the host is what is slow."""
        request, sequence = generation.request, generation.sequence
        room = min(self.target.info.context, sequence.prompt_length + request.max_new_tokens) - len(sequence.tokens)
        looks = request.stop_when is not None or (generation.text is not None and generation.text.may_stop)
        return self.pipelined and not looks and len(tokens) < room and request.stop_tokens.isdisjoint(tokens)

    def _append(self, generation: Generation, one: Pending) -> FinishReason | None:
        """Add one token; returns why the text ends with it, if it does."""
        request, sequence, text = generation.request, generation.sequence, generation.text
        sequence.tokens.append(one.token)
        generation.pending.append(one)
        asked = request.stop_when is not None and request.stop_when(sequence.tokens)
        stops = asked or one.token in request.stop_tokens
        full = len(sequence.tokens) >= self.target.info.context
        full |= len(sequence.tokens) - sequence.prompt_length >= request.max_new_tokens
        if stops or full:
            generation.flush()
        elif not self.pipelined or (text is not None and text.may_stop):
            generation.detokenize()
        if stops or (text is not None and text.stopped):
            return FinishReason.STOP
        return FinishReason.LENGTH if full else None

    @property
    def pipelined(self) -> bool:
        """Whether the device works ahead of the host; then tokens become text while the next step runs."""
        return isinstance(self._step, PipelinedStep)

    def _run_out(self, generation: Generation) -> None:
        """End a generation for which the device has no memory; the others go on."""
        running = len(self.scheduler.running)
        generation.error = (
            f"The device ran out of memory with {running} texts at work, this one at {len(generation.sequence.tokens)} "
            "tokens; load with a shorter context or a smaller max_batch."
        )
        self._finish(generation, FinishReason.ERROR)
        generation.report()
        if self.target.info.device.type == "cuda":
            torch.cuda.empty_cache()

    def _settle_prefill(self, generation: Generation) -> None:
        if generation.prefill_clock is not None:
            generation.stats.prefill_seconds = generation.prefill_clock.settle().get("prefill", 0.0)
            generation.prefill_clock = None

    def _finish(self, generation: Generation, reason: FinishReason, behind: Sequence[int] | None = None) -> None:
        """End a text, by a step that has these tokens `behind` its end."""
        if reason is FinishReason.LENGTH:  # also of a prompt that was read and not continued
            self._settle_prefill(generation)
        generation.flush()
        generation.stop_clock()
        if generation.error is not None:
            reason = FinishReason.ERROR
        goes_on = reason is not FinishReason.ERROR and self._step.works_ahead and generation.may_linger
        if behind is not None and goes_on:
            self.scheduler.linger(generation, behind)
        generation.finish_reason = reason  # set last: another thread that sees it finds all of the text, and no more
        self.scheduler.leave(generation)  # its slot is the row's, where that lingers
