"""Counters and times for Prometheus, under the names that vLLM uses.

What changes with every step is read from the texts when the page is asked for, so that steps pay nothing.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from copy import deepcopy
from dataclasses import dataclass, field

from prometheus_client import CollectorRegistry, Counter, Histogram, generate_latest
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from branchwise.engine import Generation
from branchwise.engine.stats import Stats
from branchwise.serve.runner import Runner
from branchwise.serve.speculation import added, drafts

SECONDS = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1, 2.5, 5, 10, 30, 60, 120, 300, 600)
TOKEN_SECONDS = (0.0002, 0.0005, 0.001, 0.0025, 0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1)


@dataclass
class Totals:
    """What was counted for texts, summed."""

    drafts: int = 0
    drafted: int = 0
    accepted: int = 0
    accepted_per_depth: list[int] = field(default_factory=list)
    written: int = 0
    prompts: int = 0
    """tokens of the prompts whose prefill has begun"""
    reused: int = 0
    """how many of them had their keys and values in the cache"""
    by_source: dict[str, float] = field(default_factory=dict)
    phases: dict[str, float] = field(default_factory=dict)

    def add(self, generation: Generation) -> None:
        stats = generation.stats
        if generation.began is not None:
            self.prompts += generation.sequence.prompt_length
        self.reused += stats.reused_tokens
        self.drafts += drafts(stats)
        self.drafted += stats.drafted_tokens
        self.accepted += stats.accepted_tokens
        self.accepted_per_depth = added([self.accepted_per_depth, list(stats.accepted_per_depth)])
        self.written += stats.emitted_tokens
        for sums, more in ((self.by_source, dict(stats.accepted_by_source)), (self.phases, _own_seconds(stats))):
            for name, value in more.items():
                sums[name] = sums.get(name, 0) + value


def _own_seconds(stats: Stats) -> dict[str, float]:
    """Seconds by phase, without those that belong to the other texts of the same steps."""
    each = list(stats.each)
    whole = sum(step.seconds for step in each)
    share = sum(step.seconds / step.batch for step in each) / whole if whole else 0.0
    return {"prefill": stats.prefill_seconds} | {phase: share * spent for phase, spent in stats.seconds.items()}


class Metrics:
    """The metrics of one server; this object is a collector of its own registry."""

    def __init__(self, runner: Runner, model: str) -> None:
        self.runner = runner
        self.model = model
        self.ended = Totals()
        """totals of the texts that have ended; guarded by the lock of the runner"""
        runner.on_end = self._ended
        self.registry = CollectorRegistry()
        self.registry.register(self)
        self._first = self._times("time_to_first_token_seconds", "until the first token", SECONDS)
        self._whole = self._times("e2e_request_latency_seconds", "of whole requests", SECONDS)
        self._each = self._times("time_per_output_token_seconds", "between tokens after the first", TOKEN_SECONDS)
        self._prompt = self._count("prompt_tokens", "tokens of prompts", "model_name").labels(model)
        self._success = self._count("request_success", "texts by their end", "model_name", "finished_reason")
        self._refused = self._count("request_refused", "requests by the status of their refusal", "status")

    def _times(self, name: str, says: str, bounds: tuple[float, ...]) -> Histogram:
        made = Histogram(f"branchwise:{name}", says, ["model_name"], buckets=bounds, registry=self.registry)
        return made.labels(self.model)

    def _count(self, name: str, says: str, *labels: str) -> Counter:
        return Counter(f"branchwise:{name}", says, labels, registry=self.registry)

    def page(self) -> bytes:
        return generate_latest(self.registry)

    def prompt(self, tokens: int) -> None:
        self._prompt.inc(tokens)

    def answered(self, reasons: Iterable[str], seconds: float, first: float | None, tokens: int, texts: int) -> None:
        """Count a request that has ended: why each text did, the time, that until the first token, and what was
        written."""
        for reason in reasons:
            self._success.labels(self.model, reason).inc()
        self._whole.observe(seconds)
        if first is not None:
            self._first.observe(first)
            if tokens > texts:
                self._each.observe((seconds - first) * texts / (tokens - texts))

    def refused(self, status: int) -> None:
        self._refused.labels(str(status)).inc()

    def _ended(self, generation: Generation) -> None:
        self.ended.add(generation)

    # Called by the registry

    def describe(self) -> Iterable[Metric]:
        return ()

    def collect(self) -> Iterator[Metric]:
        runner = self.runner
        with runner.lock:  # so that each text is either alive or counted
            now, totals = list(runner.live), deepcopy(self.ended)
            for generation in now:
                totals.add(generation)
        running = sum(generation.began is not None for generation in now)
        yield self._gauge("num_requests_running", "texts that have a slot", running)
        yield self._gauge("num_requests_waiting", "texts that wait for a slot", len(now) - running)
        if runner.llm is not None:
            target = runner.engine.target
            yield self._gauge("kv_slots", "sequences that fit into the KV cache", target.slots)
            yield self._gauge("kv_slots_used", "of them in use", target.slots - target.free_slots)
        yield self._counter("spec_decode_num_drafts", "steps that drafted", totals.drafts)
        yield self._counter("spec_decode_num_draft_tokens", "drafted tokens", totals.drafted)
        yield self._counter("spec_decode_num_accepted_tokens", "of them accepted", totals.accepted)
        depths = {str(depth): count for depth, count in enumerate(totals.accepted_per_depth)}
        accepted = "spec_decode_num_accepted_tokens_per_pos"
        yield self._counters(accepted, "steps that accepted a token at a depth", "position", depths)
        yield self._counter("generation_tokens", "written tokens", totals.written)
        if runner.llm is not None and runner.engine.scheduler.prefixes is not None:
            queries = "prompt tokens that were looked for in the KV cache"
            yield self._counter("prefix_cache_queries", queries, totals.prompts)
            yield self._counter("prefix_cache_hits", "of them found there", totals.reused)
        by_source = "accepted_tokens_by_source"
        yield self._counters(by_source, "accepted tokens by who drafted them", "source", totals.by_source)
        yield self._counters("phase_seconds", "time of prefills and of the parts of steps", "phase", totals.phases)

    def _gauge(self, name: str, says: str, value: float) -> Metric:
        found = GaugeMetricFamily(f"branchwise:{name}", says, labels=["model_name"])
        found.add_metric([self.model], value)
        return found

    def _counter(self, name: str, says: str, value: float) -> Metric:
        found = CounterMetricFamily(f"branchwise:{name}", says, labels=["model_name"])
        found.add_metric([self.model], value)
        return found

    def _counters(self, name: str, says: str, label: str, values: Mapping[str, float]) -> Metric:
        found = CounterMetricFamily(f"branchwise:{name}", says, labels=["model_name", label])
        for key, value in values.items():
            found.add_metric([self.model, key], value)
        return found
