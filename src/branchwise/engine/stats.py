"""What speculation did for one request."""

from __future__ import annotations

import time
from collections import Counter
from collections.abc import Collection, Sequence
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import torch

from branchwise.core.tree import DraftTree

PHASES = ("draft", "score", "verify", "commit")
BINS = 10
"""equal parts of the range of draft probabilities"""


class StepTime(NamedTuple):
    """One step of a text. Times of a device are known late: on a device they may be those of the step before."""

    nodes: int
    """drafted nodes below the root"""
    tokens: int
    """emitted tokens"""
    seconds: float
    batch: int = 1
    """texts that took part"""


@dataclass
class Stats:
    steps: int = 0
    drafted_tokens: int = 0
    accepted_tokens: int = 0
    """drafted tokens that were emitted"""
    emitted_tokens: int = 0
    drafted_per_depth: list[int] = field(default_factory=list)
    """index d - 1: steps whose tree reached depth d"""
    accepted_per_depth: list[int] = field(default_factory=list)
    """index d - 1: steps that accepted a node at depth d"""
    tried_by_prob: list[int] = field(default_factory=list)
    """first draws below accepted nodes, by draft probability in `BINS` bins; empty unless `Engine.counts_probs`"""
    accepted_by_prob: list[int] = field(default_factory=list)
    """how many of these draws were accepted"""
    seconds: dict[str, float] = field(default_factory=lambda: dict.fromkeys(PHASES, 0.0))
    """time of the steps this request took part in, by phase"""
    prefill_seconds: float = 0.0
    reused_tokens: int = 0
    """prompt tokens whose keys and values came from another text, in place of a prefill"""
    accepted_by_source: dict[str, int] = field(default_factory=dict)
    """emitted drafted tokens, by the source that proposed them"""
    drafted_by_source: dict[str, int] = field(default_factory=dict)
    """drafted nodes, by source"""
    each: list[StepTime] = field(default_factory=list)
    """the steps in order"""
    prepared: dict[str, int] = field(default_factory=dict)
    """steps that compiled or recorded something, or ran eagerly what is usually recorded, by kind (`cuda.counts`)"""
    rested: int = 0
    """steps in which the guard let nothing be drafted"""
    drafting_speed: float | None = None
    """the latest speed of drafted steps relative to plain decoding, by which the guard decides; 2.0 is twice as fast"""
    wall_seconds: float = 0.0
    """time from the first prompt token to the end of the text, everything between steps included"""

    def record(
        self,
        tree: DraftTree,
        emitted: int,
        seconds: dict[str, float],
        sources: Sequence[str],
        drafter: str = "",
        batch: int = 1,
        prepared: Collection[str] = (),
    ) -> None:
        """Count one step, which `emitted` this many tokens of this text. `sources` proposed the accepted tokens among
        them, `drafter` all nodes whose tree names no source; `prepared` is what the step had to compile or record."""
        self.steps += 1
        self.emitted_tokens += emitted
        for phase, spent in seconds.items():
            self.seconds[phase] += spent
        for kind in prepared:
            self.prepared[kind] = self.prepared.get(kind, 0) + 1
        nodes = len(tree) - 1
        self.each.append(StepTime(nodes, emitted, sum(seconds.values()), batch))
        if nodes:
            self._record_draft(tree, nodes, sources, drafter)

    def _record_draft(self, tree: DraftTree, nodes: int, sources: Sequence[str], drafter: str) -> None:
        accepted, depth = len(sources), tree.depth
        self.drafted_tokens += nodes
        self.accepted_tokens += accepted
        for counts, reached in ((self.drafted_per_depth, depth), (self.accepted_per_depth, accepted)):
            counts.extend([0] * (depth - len(counts)))
            for level in range(reached):
                counts[level] += 1
        for source in sources:
            self.accepted_by_source[source] = self.accepted_by_source.get(source, 0) + 1
        drafted = Counter(tree.sources[1:]) if tree.sources else {drafter: nodes}
        for source, some in drafted.items():
            self.drafted_by_source[source] = self.drafted_by_source.get(source, 0) + some

    def count_probs(self, tree: DraftTree, path: Sequence[int]) -> None:
        """Count the first draw below every accepted node by its draft probability: DySpec's premise is that this
        predicts its acceptance. Trees that were drawn on a device are left out: to read q would be to wait for it."""
        known = path[1:] if tree.trusted else path  # what the target itself drew needs no luck
        if tree.q is None or tree.tokens.device.type != "cpu":
            return
        firsts = [(node, below[0]) for node in known if (below := tree.children[node])]
        if not firsts:
            return
        if not self.tried_by_prob:
            self.tried_by_prob, self.accepted_by_prob = [0] * BINS, [0] * BINS
        nodes, children = (list(part) for part in zip(*firsts, strict=True))
        accepted = set(path)
        for child, prob in zip(children, tree.q[nodes, tree.tokens[children]].tolist(), strict=True):
            place = min(int(prob * BINS), BINS - 1)
            self.tried_by_prob[place] += 1
            self.accepted_by_prob[place] += child in accepted

    @property
    def acceptance_by_prob(self) -> list[float | None]:
        """For each bin of draft probabilities, the share of first draws that was accepted; None for a bin without."""
        pairs = zip(self.accepted_by_prob, self.tried_by_prob, strict=True)
        return [taken / tried if tried else None for taken, tried in pairs]

    @property
    def mean_acceptance_length(self) -> float:
        """Tokens per step as vLLM counts them: the target's own token and the accepted drafts."""
        return 1 + self.accepted_tokens / self.steps if self.steps else 0.0

    @property
    def acceptance_per_depth(self) -> list[float]:
        """Of the steps whose tree reached a depth, the share that accepted a node there."""
        return [a / d for a, d in zip(self.accepted_per_depth, self.drafted_per_depth, strict=True)]

    @property
    def tokens_per_second(self) -> float:
        """Emitted tokens over the time of the steps; prefill is not counted."""
        spent = sum(self.seconds.values())
        return self.emitted_tokens / spent if spent else 0.0

    def as_dict(self) -> dict[str, Any]:
        return {
            "steps": self.steps,
            "drafted_tokens": self.drafted_tokens,
            "accepted_tokens": self.accepted_tokens,
            "mean_acceptance_length": self.mean_acceptance_length,
            "accepted_by_source": dict(self.accepted_by_source),
            "acceptance_per_depth": self.acceptance_per_depth,
            "rested": self.rested,
            "tokens_per_second": self.tokens_per_second,
            "seconds": dict(self.seconds),
            "prefill_seconds": self.prefill_seconds,
            "reused_tokens": self.reused_tokens,
            "prepared": dict(self.prepared),
        }


class Stopwatch:
    """Time by phase, lap by lap.

    On the host a lap ends when its work is done. A CUDA device runs behind the host: its laps end with events on its
    stream, which are read after they have passed, so that measuring never waits.
    """

    def __init__(self, device: torch.device | None = None) -> None:
        self._device = device
        self._cuda = device is not None and device.type == "cuda"
        self._laps: list[tuple[str, Any, Any]] = []
        self._spare: list[Any] = []  # events that were read, to be used again
        self.start()

    def start(self) -> None:
        if self._cuda:
            self._stream = torch.cuda.current_stream(self._device)
        else:
            self._laps = []  # laps of a step that failed half-way
        self._last = self._mark()

    def lap(self, phase: str) -> None:
        """Book the time since the last lap."""
        now = self._mark()
        self._laps.append((phase, self._last, now))
        self._last = now

    def settle(self) -> dict[str, float]:
        """Seconds by phase of the laps that are over; laps that still run are reported the next time."""
        seconds: dict[str, float] = {}
        running = []
        for phase, start, end in self._laps:
            if self._cuda and not end.query():
                running.append((phase, start, end))
                continue
            spent = start.elapsed_time(end) / 1e3 if self._cuda else end - start
            seconds[phase] = seconds.get(phase, 0.0) + spent
            if self._cuda:
                self._spare.append(start)  # the end of one lap is the start of the next
        self._laps = running
        return seconds

    def _mark(self) -> Any:
        if not self._cuda:
            return time.perf_counter()
        event = self._spare.pop() if self._spare else torch.cuda.Event(enable_timing=True)
        event.record(self._stream)
        return event
