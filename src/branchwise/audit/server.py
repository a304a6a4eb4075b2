"""The audit of a server: blocks that it samples against the probabilities that a reference server states.

Both are asked through `/v1/completions` with logprobs, which OpenAI, vLLM, SGLang, llama.cpp and others serve. The
audited server writes many short texts; the reference, the same model without speculation, writes one token at a time
and states its probability and those of its alternatives. Tokens are compared as the strings that logprobs report.
"""

from __future__ import annotations

import math
import re
from collections import defaultdict
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import dataclass, field
from typing import Any

from branchwise.audit.blocks import Block, BlockTests, Partition
from branchwise.audit.findings import INTERRUPTED, Activity, Finding, check_demands, judge, shorten
from branchwise.errors import UsageError
from branchwise.openai_client import NEUTRAL, Client, Forms
from branchwise.progress import Progress, silent

HINTS = {
    "key": "Give a key with --api-key or in OPENAI_API_KEY.",
    "model": "name one with --model",
    "timeout": "give it longer with --timeout.",
}
TOP_LOGPROBS = (20, 5)
"""how many alternatives the reference is asked for; the second number if it refuses the first"""

ROUND = 64
"""the most requests that are sent before the missing texts are counted again"""

ATTEMPTS = 4
"""how often the reference is asked while its texts end at once: for such a text some servers state no probabilities"""

_SPECIAL = re.compile(r"<[^<>\s]*>|\[[A-Z_]+\]|")
_COUNTER = re.compile(r"^\S*spec_decode_num_(draft|accepted)_tokens(?:_total)?(?:\{.*\})?\s+([0-9.eE+]+)", re.MULTILINE)


@dataclass(frozen=True)
class Answer:
    """One text as a server reported it."""

    tokens: tuple[str, ...]
    text: str
    tops: tuple[dict[str, float], ...]
    """for each token the most probable tokens in its place, with their probabilities"""
    prompt_tokens: int | None
    """the number of tokens of the prompt, if the server reports it"""


class Server(Client):
    """A server that completes prompts and reports logprobs, asked in the richest of the given forms it accepts."""

    def __init__(self, url: str, forms: Sequence[dict[str, Any]] = ({},), **options: Any) -> None:
        super().__init__(url, **options)
        self.forms = Forms(forms)

    def __call__(self, prompt: str) -> list[Answer]:
        return self.forms.send(lambda form: self.complete(prompt, **form))

    def complete(self, prompt: str, **options: Any) -> list[Answer]:
        """Texts that continue a prompt, with the tokens and logprobs that the server reports."""
        answer = self.ask("/v1/completions", {"model": self.model, "prompt": prompt, **options})
        try:
            choices = list(answer["choices"])
            prompt_tokens = (answer.get("usage") or {}).get("prompt_tokens")
        except (KeyError, TypeError, AttributeError):
            choices = []
        if not choices:
            raise UsageError(f"The server at {self.url} answered a completion without choices.")
        return [self._read(choice, prompt_tokens) for choice in choices]

    def counters(self) -> tuple[int, int] | None:
        """Tokens drafted and accepted since the server started; None if it does not count them as vLLM does."""
        counts: dict[str, float] = defaultdict(float)
        for kind, value in _COUNTER.findall(self.page("/metrics") or ""):
            counts[kind] += float(value)
        return (int(counts["draft"]), int(counts["accepted"])) if len(counts) == 2 else None

    def _read(self, choice: Any, prompt_tokens: Any) -> Answer:
        try:
            text = str(choice["text"])
            logprobs = choice.get("logprobs")
            if logprobs is None:
                raise UsageError(f"The server at {self.url} returned no logprobs; audit a server that reports them.")
            if "content" in logprobs:  # as chat completions report them; llama.cpp does so everywhere
                entries = logprobs["content"]
                tokens = [str(entry["token"]) for entry in entries]
                tops = [
                    _probabilities((top["token"], top["logprob"]) for top in entry.get("top_logprobs") or ())
                    for entry in entries
                ]
            else:
                tokens = [str(token) for token in logprobs["tokens"]]
                tops = [_probabilities((top or {}).items()) for top in logprobs.get("top_logprobs") or ()]
        except (KeyError, TypeError, ValueError, AttributeError):
            raise self.malformed() from None
        return Answer(tuple(tokens), text, tuple(tops), prompt_tokens if isinstance(prompt_tokens, int) else None)


class StatedProbs:
    """The distribution after a prompt and the first tokens of an answer, as the reference states it."""

    def __init__(self, reference: Server, prompt: str) -> None:
        self.reference = reference
        self.prompt = prompt
        self._prompt_tokens: int | None = None
        self._strings_are_text = True

    def __call__(self, prefix: Block) -> dict[str, float] | None:
        """The known tokens with their probabilities, or None if the server would not read the text as these tokens."""
        if prefix and not self._strings_are_text:
            return None
        answer = self._ask(self.prompt + "".join(map(str, prefix)))
        if answer is None:
            return None
        if not prefix:
            self._prompt_tokens = answer.prompt_tokens
            # Some servers spell tokens in another way than the text does; joined, they would be another text.
            self._strings_are_text = answer.tokens[0] == answer.text or not distinct(answer.tokens[0])
        elif self._prompt_tokens is not None and answer.prompt_tokens != self._prompt_tokens + len(prefix):
            return None  # prompt and prefix were read as other tokens than they were written as
        return {token: share for token, share in answer.tops[0].items() if distinct(token)}

    def _ask(self, text: str) -> Answer | None:
        for _ in range(ATTEMPTS):
            answer = self.reference(text)[0]
            if answer.tokens and not (answer.tops and answer.tops[0]):
                raise UsageError(f"The reference at {self.reference.url} returned no top logprobs to compare with.")
            if answer.tokens:
                return answer
        return None


def distinct(token: str) -> bool:
    """Whether a token is identified by its string.

    Tokens with parts of a character are not, nor are special tokens, which some servers report at the end of a text and
    others omit. They count as "any other token".
    """
    return not ("\ufffd" in token or token.startswith("bytes:") or _SPECIAL.fullmatch(token))


@dataclass(frozen=True)
class ServerAudit:
    """What the audit of a server found."""

    url: str
    model: str
    reference: str
    reference_model: str
    length: int
    limit: float
    tests: BlockTests
    activity: Activity | None
    finding: Finding

    def as_dict(self) -> dict[str, Any]:
        return {
            "server": self.url,
            "model": self.model,
            "reference": self.reference,
            "reference_model": self.reference_model,
            **self.finding.as_dict(),
            "length": self.length,
            "limit": self.limit,
            "blocks": self.tests.as_dict(),
            "drafted_tokens": self.activity and self.activity.drafted,
            "accepted_tokens": self.activity and self.activity.accepted,
        }


@dataclass
class Gathered:
    """The blocks of one prompt."""

    prompt: str
    partition: Partition
    blocks: list[Block] = field(default_factory=list)

    @property
    def strange(self) -> bool:
        """Whether no text starts with a token that the reference named, though those have most of the mass."""
        unnamed = self.partition.cell_of(())
        never = all(self.partition.cell_of(block[:1]) == unnamed for block in self.blocks)
        return len(self.blocks) >= 20 and never and self.partition.probabilities[unnamed] < 0.5


def audit_server(
    url: str,
    reference: str,
    prompts: Sequence[str],
    samples: int = 1000,
    *,
    length: int = 3,
    model: str | None = None,
    reference_model: str | None = None,
    key: str | None = None,
    reference_key: str | None = None,
    per_request: int = 16,
    threads: int = 8,
    timeout: float = 60.0,
    false_alarm: float = 1e-3,
    limit: float = 0.1,
    progress: Progress = silent,
) -> ServerAudit:
    """Ask whether a server keeps the distribution that the reference states, with `samples` texts for each prompt.

    `per_request` texts are asked for at once if the server allows it, in `threads` requests at a time. Ctrl-C ends
    the audit with what was gathered.
    """
    if not prompts:
        raise UsageError("There are no prompts to audit with.")
    check_demands(false_alarm, limit, samples=samples, length=length, threads=threads, n=per_request)
    if timeout <= 0:
        raise UsageError(f"timeout must be above 0 seconds, not {timeout}.")
    asked = {"max_tokens": length, "temperature": 1, "top_p": 1, "logprobs": 1}
    forms = [asked | extra | many for many in ({"n": per_request}, {}) for extra in (NEUTRAL, {})]
    audited = Server(url, forms, model=model, key=key, timeout=timeout, hints=HINTS)
    forms = [asked | extra | {"max_tokens": 1, "logprobs": top} for top in TOP_LOGPROBS for extra in (NEUTRAL, {})]
    stating = Server(reference, forms, model=reference_model, key=reference_key or key, timeout=timeout, hints=HINTS)
    gathered: list[Gathered] = []
    doubts: list[str] = []
    before = audited.counters()
    pool = ThreadPoolExecutor(threads)
    try:
        at_once = len(audited(prompts[0]))  # a faulty server shows its fault before the work begins
        probs = [StatedProbs(stating, prompt) for prompt in prompts]
        jobs = [pool.submit(Partition, row, length=length, samples=samples) for row in probs]
        for done, _ in enumerate(as_completed(jobs), start=1):
            progress("probabilities of the reference", done, len(jobs))
        gathered += [Gathered(prompt, job.result()) for prompt, job in zip(prompts, jobs, strict=True)]
        for entry in gathered:
            _sample(pool, audited, entry, samples, at_once, progress)
    except KeyboardInterrupt:
        doubts.append(INTERRUPTED)
    finally:  # leaving early does not wait for requests that have not been sent
        pool.shutdown(wait=False, cancel_futures=True)
    after = audited.counters()
    activity = None if before is None or after is None else Activity(after[0] - before[0], after[1] - before[1])
    sampled = [entry for entry in gathered if entry.blocks]
    tested = (entry.partition.test(entry.blocks, shorten(entry.prompt)) for entry in sampled)
    tests = BlockTests(tuple(tested), false_alarm)
    if sampled and all(entry.strange for entry in sampled):
        doubts.append(
            "No text starts with a token that the reference names: do both servers serve the same model and spell its "
            "tokens alike?"
        )
    gaps = []
    if sampled and all(len(prefix) < 2 for entry in sampled for prefix in entry.partition.prefixes):
        gaps.append(
            "Only first tokens were compared, and most servers speculate from the second on; take more samples, or a "
            "reference whose logprobs spell tokens as its texts do."
        )
    notes = _notes(audited, stating, sampled, activity)
    return ServerAudit(
        url=audited.url,
        model=audited.model,
        reference=stating.url,
        reference_model=stating.model,
        length=length,
        limit=limit,
        tests=tests,
        activity=activity,
        finding=judge(tests, activity=activity, limit=limit, doubts=doubts, gaps=gaps, notes=notes),
    )


def _sample(
    pool: ThreadPoolExecutor, server: Server, entry: Gathered, samples: int, at_once: int, progress: Progress
) -> None:
    """Ask for the texts of one prompt, about `at_once` with each request.

    Every text that was asked for counts, because texts that come back first have other tokens than texts that take
    longer.
    """
    while len(entry.blocks) < samples:
        requests = math.ceil((samples - len(entry.blocks)) / at_once)
        jobs = [pool.submit(server, entry.prompt) for _ in range(min(requests, ROUND))]
        for done, _ in enumerate(as_completed(jobs), start=1):
            progress(f"texts: {shorten(entry.prompt)}", min(len(entry.blocks) + done * at_once, samples), samples)
        entry.blocks += [answer.tokens for job in jobs for answer in job.result()]


def _notes(server: Server, reference: Server, gathered: Sequence[Gathered], activity: Activity | None) -> list[str]:
    notes = []
    if server.model != reference.model:
        notes.append(f"The servers name their models differently: {server.model} and {reference.model}.")
    if "top_k" not in server.forms.best:
        notes.append("The server refuses top_k and min_p; if it truncates by default, that shows as a difference.")
    if activity is None:
        notes.append("Whether the server speculated is not known: it shows no spec_decode counters at /metrics.")
    varied = [entry for entry in gathered if len(entry.blocks) >= 20]
    if varied and all(len(set(entry.blocks)) == 1 for entry in varied):
        notes.append("Every text of a prompt was the same; does the server sample with a fixed seed?")
    return notes


def _probabilities(pairs: Any) -> dict[str, float]:
    """Tokens to probabilities; tokens of the same string share one entry."""
    found: dict[str, float] = defaultdict(float)
    for token, logprob in pairs:
        if logprob is not None:
            found[str(token)] += math.exp(min(float(logprob), 0.0))
    return found
