"""What a server does under load: tokens a second by the number of streams, waits, errors, and whether a token is lost.

    branchwise serve --model smollm2 --max-batch 64 &
    python benchmarks/load.py --prompts spec_bench.jsonl --streams 1 4 16 64 --seconds 30
    python benchmarks/load.py --prompts spec_bench.jsonl --streams 64 --seconds 600 --tokens 16
    python benchmarks/load.py --prompts spec_bench.jsonl --streams --overhead 3 --second-turn 3

Every prompt is first asked for alone. Under load, so many streams ask for one prompt after the other, and each answer
is compared with the one that the prompt got alone: token by token, greedy or with its seed. In 16 bits a near-tie may
fall differently beside other texts. Such an answer is counted apart, if both tokens were equally probable to 0.25 where
the texts part; all others must be the same, and in 32 bits every one. And every answer must account for itself: one
end, as many tokens as its `usage` says, and the bytes of its tokens joined are its text.

`--library` drives the engine in this process with the same requests, where nothing can be served.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import math
import os
import threading
import time
from collections import Counter
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Protocol

import httpx
import psutil
import torch
from measure import interval, kept, progress, provenance

import branchwise
from branchwise.bench.prompts import FREE, read_items
from branchwise.core.sampling import SamplingParams
from branchwise.core.text import TextStream
from branchwise.engine import Generation, Request
from branchwise.llm import LLM
from branchwise.openai_client import Client

NEAR = 0.25
"""by how much the log-probabilities of two tokens may differ that are a near-tie in 16 bits: between 16 and 32 logits
are multiples of an eighth there"""
QUESTION = "Say the same in other words."
Message = dict[str, str]


@dataclass(frozen=True)
class Asked:
    messages: tuple[Message, ...]
    tokens: int
    seed: int | None
    """None: greedy"""


@dataclass
class Answer:
    """One answer and when it came; times are of `perf_counter`."""

    sent: float
    text: str = ""
    tokens: list[tuple[Any, float]] = field(default_factory=list)
    """how each token is named, and its log-probability"""
    times: list[float] = field(default_factory=list)
    """when each token came"""
    finish: list[str] = field(default_factory=list)
    prompt_tokens: int = 0
    stated: int = 0
    """tokens of the answer, as the server counts them"""
    spelt: bytes | None = b""
    """the bytes of the tokens; None where they are not told"""
    status: str = "200"

    @property
    def first(self) -> float:
        return self.times[0] - self.sent

    @property
    def fault(self) -> str | None:
        """What is wrong with it by itself."""
        if self.status != "200":
            return f"status {self.status}"
        if len(self.finish) != 1:
            return "not one end"
        if self.stated != len(self.tokens):
            return "usage is not the tokens that came"
        if self.spelt is not None and self.spelt.decode("utf-8", "replace") != self.text:
            return "tokens are not the text"
        return None

    def apart(self, alone: Answer) -> float | None:
        """By how much the log-probabilities of the first tokens that are not the same differ; None if all are."""
        pairs = zip(self.tokens, alone.tokens, strict=False)
        found = (abs(logprob - expected) for (token, logprob), (other, expected) in pairs if token != other)
        return next(found, None)

    def against(self, alone: Answer) -> str:
        """`same`, `near-tie` or `different`."""
        if (apart := self.apart(alone)) is not None:
            return "near-tie" if apart <= NEAR else "different"
        return "same" if (len(self.tokens), self.text) == (len(alone.tokens), alone.text) else "different"


class Drive(Protocol):
    """Whatever answers."""

    async def ask(self, asked: Asked, answer: Answer) -> None:
        """Ask, and fill in the answer as it comes."""
        ...

    def counters(self) -> dict[str, float]:
        """Seconds by phase and of the processor, drafted and accepted tokens, since the start."""
        ...


class Served:
    """A server at an address."""

    def __init__(self, address: str, client: httpx.AsyncClient, pid: int | None) -> None:
        self.pages = Client(address)
        self.client = client
        self.process = None if pid is None else psutil.Process(pid)

    async def ask(self, asked: Asked, answer: Answer) -> None:
        choosing = {"temperature": 0} if asked.seed is None else {"temperature": 1, "seed": asked.seed}
        body = {"messages": asked.messages, "max_tokens": asked.tokens, "logprobs": True, **choosing}
        body |= {"stream": True, "stream_options": {"include_usage": True}}
        try:
            async with self.client.stream("POST", "/v1/chat/completions", json=body) as reply:
                if reply.is_error:
                    answer.status = str(reply.status_code)
                    return
                async for event in _events(reply):
                    self._read(event, answer)
        except httpx.HTTPError as error:
            answer.status = type(error).__name__
        if answer.finish[:1] == ["stop"] and answer.tokens:
            answer.spelt = answer.spelt and answer.spelt.removesuffix(str(answer.tokens[-1][0]).encode())

    def _read(self, event: dict[str, Any], answer: Answer) -> None:
        now = time.perf_counter()
        if "error" in event:
            answer.status = str(event["error"]["code"])
        if usage := event.get("usage"):
            answer.prompt_tokens, answer.stated = usage["prompt_tokens"], usage["completion_tokens"]
        for choice in event.get("choices", ()):
            answer.text += choice["delta"].get("content") or ""
            answer.finish += [choice["finish_reason"]] if choice["finish_reason"] else []
            for token in (choice["logprobs"] or {}).get("content") or ():
                answer.tokens.append((token["token"], token["logprob"]))
                answer.times.append(now)
                if answer.spelt is not None:
                    answer.spelt = None if token["bytes"] is None else answer.spelt + bytes(token["bytes"])

    def counters(self) -> dict[str, float]:
        found = {}
        for line in (self.pages.page("/metrics") or "").splitlines():
            name, _, value = line.rpartition(" ")
            if line.startswith("#"):
                continue
            if "phase_seconds_total" in name:
                found[name.split('phase="')[1].split('"')[0]] = float(value)
            for kind in ("draft", "accepted"):
                if f"spec_decode_num_{kind}_tokens_total" in name:
                    found[f"{kind} tokens"] = float(value)
        return found if self.cpu is None else found | {"cpu": self.cpu}

    @property
    def cpu(self) -> float | None:
        """Seconds of the processor that the server has had, where it is known which process it is."""
        return None if self.process is None else sum(self.process.cpu_times()[:2])


async def _events(reply: httpx.Response) -> AsyncIterator[dict[str, Any]]:
    """Events until `[DONE]`. Lines end with a newline alone: other separators may stand inside JSON."""
    rest = b""
    async for chunk in reply.aiter_bytes():
        *lines, rest = (rest + chunk).split(b"\n")
        for line in lines:
            if line == b"data: [DONE]":
                return
            if line:
                yield json.loads(line.removeprefix(b"data: "))
    raise httpx.RemoteProtocolError("the stream ended without [DONE]")


class Library:
    """The engine itself, stepped by a thread of this process as the server steps it."""

    def __init__(self, llm: LLM) -> None:
        self.llm = llm
        self.generations: list[Generation] = []
        self._work = threading.Condition()
        self._over = False
        self._thread = threading.Thread(target=self._run, daemon=True)
        self._thread.start()

    def _run(self) -> None:
        while True:
            with self._work:
                self._work.wait_for(lambda: self._over or self.llm.engine.busy)
                if self._over:
                    return
            self.llm.engine.step()

    def close(self) -> None:
        with self._work:
            self._over = True
            self._work.notify()
        self._thread.join()

    async def ask(self, asked: Asked, answer: Answer) -> None:
        loop, updates = asyncio.get_running_loop(), asyncio.Queue[tuple[float, Any, Any]]()
        answer.spelt = None
        sampling = SamplingParams() if asked.seed is None else SamplingParams(temperature=1.0, seed=asked.seed)
        prompt = tuple(self.llm.encode(list(asked.messages)))
        request = Request(prompt, sampling, asked.tokens, self.llm.stop_tokens, logprobs=True)

        def deliver(generation: Generation, pieces: Any) -> None:
            update = (time.perf_counter(), list(pieces), generation.finish_reason)
            loop.call_soon_threadsafe(updates.put_nowait, update)

        with self._work:
            generation = self.llm.engine.submit(request, TextStream(self.llm.decode, ()), on_output=deliver)
            self.generations.append(generation)
            self._work.notify()
        while not answer.finish:
            now, pieces, finish = await updates.get()
            answer.text += "".join(piece.text for piece in pieces)
            answer.tokens += [(piece.token, piece.logprob) for piece in pieces]
            answer.times += [now] * len(pieces)
            answer.finish += [finish.value] if finish else []
        answer.prompt_tokens, answer.stated = len(prompt), len(generation.token_ids)

    def counters(self) -> dict[str, float]:
        found: Counter[str] = Counter()
        for one in (generation.stats for generation in self.generations):
            whole = sum(step.seconds for step in one.each)
            share = sum(step.seconds / step.batch for step in one.each) / whole if whole else 0.0
            found.update(
                {"prefill": one.prefill_seconds} | {name: share * spent for name, spent in one.seconds.items()}
            )
            found.update({"draft tokens": one.drafted_tokens, "accepted tokens": one.accepted_tokens})
        return dict(found) | {"cpu": time.process_time()}


def percentile(values: Sequence[float], part: float) -> float:
    """The smallest value that a part of them does not exceed."""
    return sorted(values)[max(0, math.ceil(part * len(values)) - 1)] if values else math.nan


async def asking(drive: Drive, asked: Asked) -> Answer:
    answer = Answer(time.perf_counter())
    await drive.ask(asked, answer)
    return answer


async def alone(drive: Drive, questions: Sequence[Asked]) -> list[Answer]:
    """What every question gets while nobody else asks."""
    found = []
    await asking(drive, Asked(({"role": "user", "content": FREE[0]},), 8, None))  # what is used first takes longer
    for number, asked in enumerate(questions):
        progress(f"alone: {number + 1} of {len(questions)}")
        found.append(await asking(drive, asked))
        if fault := found[-1].fault:
            raise SystemExit(f"Prompt {number} failed alone: {fault}.")
    return found


async def loaded(
    drive: Drive, questions: Sequence[Asked], expected: Sequence[Answer], streams: int, seconds: float, most: int | None
) -> dict[str, Any]:
    """So many streams at once, each of which asks again as soon as it has its answer."""
    before, load = drive.counters(), os.getloadavg()[0]
    begin, number = time.perf_counter(), 0
    sent: dict[int, Answer] = {}
    done: list[tuple[int, Answer, float]] = []

    async def stream() -> None:
        nonlocal number
        while time.perf_counter() - begin < seconds and (most is None or number < most):
            mine, number = number, number + 1
            which = mine % len(questions)
            # Ahead of a text are the prompts that were sent before and have no token yet, and its own.
            others = [other % len(questions) for other, answer in sent.items() if not answer.times]
            ahead = sum(expected[prompt].first for prompt in (which, *others))
            answer = sent[mine] = Answer(time.perf_counter())
            await drive.ask(questions[which], answer)
            done.append((which, sent.pop(mine), ahead))
            progress(f"{streams} streams: {len(done)} answers, {time.perf_counter() - begin:.0f} s")

    await asyncio.gather(*(stream() for _ in range(streams)))
    span = min(seconds, time.perf_counter() - begin)
    after = drive.counters()
    whole = [(which, answer, ahead) for which, answer, ahead in done if answer.fault is None and answer.times]
    firsts = [answer.first for _, answer, _ in whole]
    apart = [gap for which, answer, _ in whole if (gap := answer.apart(expected[which])) is not None]
    paces = [(a.times[-1] - a.times[0]) / (len(a.times) - 1) for _, a, _ in whole if len(a.times) > 1]
    return {
        "kind": "load",
        "streams": streams,
        "seconds": span,
        "answers": len(done),
        "tokens": sum(len(answer.tokens) for _, answer, _ in done),
        "tokens_per_second": sum(moment - begin <= span for _, a, _ in done for moment in a.times) / span,
        "first": {"p50": percentile(firsts, 0.5), "p95": percentile(firsts, 0.95)},
        "ahead": {"p50": percentile([x for *_, x in whole], 0.5), "p95": percentile([x for *_, x in whole], 0.95)},
        "first_over_ahead": percentile([a.first / ahead for _, a, ahead in whole], 0.95),
        "per_token": {"p50": percentile(paces, 0.5), "p95": percentile(paces, 0.95)},
        "compared": Counter(answer.against(expected[which]) for which, answer, _ in whole),
        "apart": {"p50": percentile(apart, 0.5), "p95": percentile(apart, 0.95), "most": max(apart)} if apart else None,
        "faults": Counter(answer.fault for _, answer, _ in done if answer.fault is not None),
        "counters": {name: value - before.get(name, 0) for name, value in after.items()},
        "load_average": [load, os.getloadavg()[0]],
    }


async def overhead(served: Served, llm: LLM, questions: Sequence[Asked], turns: int) -> AsyncIterator[dict[str, Any]]:
    """One stream through HTTP and through `LLM.stream`, in turns; the server is another process of the same model."""

    def stream(asked: Asked) -> tuple[float, int]:
        begin = time.perf_counter()
        chunks = llm.stream(list(asked.messages), max_new_tokens=asked.tokens, logprobs=True)
        tokens = sum(len(chunk.pieces) for chunk in chunks)
        return time.perf_counter() - begin, tokens

    async def served_stream(asked: Asked) -> tuple[float, int]:
        begin = time.perf_counter()
        answer = await asking(served, asked)
        return time.perf_counter() - begin, len(answer.tokens)

    for turn in range(-1, turns):
        for number, asked in enumerate(questions):
            found = {}
            for who in ("http", "library") if (turn + number) % 2 else ("library", "http"):
                before = (served.cpu or 0.0) if who == "http" else time.process_time()
                seconds, tokens = stream(asked) if who == "library" else await served_stream(asked)
                spent = (served.cpu or math.nan) if who == "http" else time.process_time()
                found[who] = {"seconds": seconds, "tokens": tokens, "cpu": spent - before}
            progress(f"overhead: turn {turn + 1} of {turns}, prompt {number + 1} of {len(questions)}")
            if turn >= 0:
                yield {"kind": "overhead", "turn": turn, "prompt": number, **found, "load_average": os.getloadavg()[0]}


async def second_turns(drive: Drive, texts: Sequence[str], letters: int, times: int) -> AsyncIterator[dict[str, Any]]:
    """The time to the first token of a long conversation, and of its second turn."""
    for number in range(times):
        rotated = [*texts[number * 7 % len(texts) :], *texts[: number * 7 % len(texts)]]
        talk = [{"role": "user", "content": f"{number}: {' '.join(rotated)}"[:letters]}]
        first = await asking(drive, Asked(tuple(talk), 24, None))
        talk += [{"role": "assistant", "content": first.text}, {"role": "user", "content": QUESTION}]
        second = await asking(drive, Asked(tuple(talk), 24, None))
        if fault := first.fault or second.fault:
            raise SystemExit(f"A turn failed: {fault}.")
        yield {
            "kind": "second turn",
            "prompt_tokens": [first.prompt_tokens, second.prompt_tokens],
            "first": [first.first, second.first],
            "load_average": os.getloadavg()[0],
        }


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--address", default="http://127.0.0.1:8000")
    parser.add_argument(
        "--pid", type=int, help="the server's process, whose processor time tells it from busy neighbours"
    )
    parser.add_argument("--library", action="store_true", help="drive the engine in this process instead of a server")
    parser.add_argument("--prompts", type=Path, required=True, help="a file of prompts, as branchwise bench reads them")
    parser.add_argument("--limit", type=int, default=40, help="prompts, spread over the file")
    parser.add_argument("--letters", type=int, default=1200, help="of the longest prompt that is taken")
    parser.add_argument("--streams", type=int, nargs="*", default=[1, 4, 16, 64])
    parser.add_argument("--seconds", type=float, default=30.0, help="of every number of streams")
    parser.add_argument("--requests", type=int, help="end earlier, after so many")
    parser.add_argument("--tokens", type=int, default=32, help="of an answer at most")
    parser.add_argument("--seeds", action="store_true", help="sample, prompt i with the seed i, instead of greedily")
    parser.add_argument("--overhead", type=int, default=0, metavar="TURNS", help="HTTP against the library")
    parser.add_argument("--second-turn", type=int, default=0, metavar="TIMES", help="of conversations of 2,000 tokens")
    parser.add_argument("--model", default="smollm2", help="what this process loads, if it does; so are the next six")
    parser.add_argument("--fresh", action="store_true", help="prefill every prompt: keep no prefixes")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--draft", help="a drafter; the method `default` without")
    parser.add_argument("--max-batch", type=int, default=64)
    parser.add_argument("--threads", type=int)
    parser.add_argument("--note", help="what else to say about the server, such as its options")
    parser.add_argument("--commit", help="the commit that runs, where there is no git to ask")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/records/load.jsonl"))
    return parser.parse_args()


def load(arguments: argparse.Namespace) -> LLM:
    wanted = {name: getattr(arguments, name) for name in ("dtype", "device", "draft", "threads", "compile")}
    wanted["prefix_cache"] = not arguments.fresh
    return branchwise.load(arguments.model, max_batch=arguments.max_batch, **wanted)


@asynccontextmanager
async def driving(arguments: argparse.Namespace) -> AsyncIterator[Drive]:
    if arguments.library:
        library = Library(load(arguments))
        try:
            yield library
        finally:
            library.close()
        return
    limits = httpx.Limits(max_connections=None, max_keepalive_connections=None)
    async with httpx.AsyncClient(
        base_url=arguments.address, timeout=httpx.Timeout(600.0), limits=limits, trust_env=False
    ) as client:
        yield Served(arguments.address, client, arguments.pid)


async def measured(arguments: argparse.Namespace) -> AsyncIterator[dict[str, Any]]:
    texts = [item.turns[0] for item in read_items(arguments.prompts)]
    short = [text for text in texts if len(text) <= arguments.letters]
    chosen = short[:: max(1, len(short) // arguments.limit)][: arguments.limit]
    questions = [
        Asked(({"role": "user", "content": text},), arguments.tokens, number if arguments.seeds else None)
        for number, text in enumerate(chosen)
    ]
    async with driving(arguments) as drive:
        if arguments.streams:
            expected = await alone(drive, questions)
        for streams in arguments.streams:
            yield await loaded(drive, questions, expected, streams, arguments.seconds, arguments.requests)
        if arguments.overhead:
            assert isinstance(drive, Served), "the overhead is that of a server"
            llm = load(arguments)
            async for record in overhead(drive, llm, questions, arguments.overhead):
                yield record
        async for record in second_turns(drive, texts, 8000, arguments.second_turn):
            yield record


async def run(arguments: argparse.Namespace) -> list[dict[str, Any]]:
    place = torch.device("cuda" if arguments.library and torch.cuda.is_available() else "cpu")
    where = provenance(place, arguments)
    where["arguments"] |= {"prompts": arguments.prompts.name}
    found: list[dict[str, Any]] = []
    async for record in measured(arguments):
        found.append(record | {"run": where})
        kept(found, arguments.out)  # a run may be cut short
    return found


def main() -> None:
    arguments = parse()
    records = asyncio.run(run(arguments))
    print(f"\n{len(records)} records in {arguments.out}")
    summarise(records)


def summarise(records: list[dict[str, Any]]) -> None:
    levels = [record for record in records if record["kind"] == "load"]
    if levels:
        print(
            "streams  tokens/s  x one  per CPU s  answers  first token p50, p95  p95 / ahead  token p50  faults  "
            "against alone"
        )
    single = next((record["tokens_per_second"] for record in levels if record["streams"] == 1), math.nan)
    for record in levels:
        speed, first, ahead = record["tokens_per_second"], record["first"], record["ahead"]
        cpu = record["counters"].get("cpu")
        per_cpu = f"{record['tokens'] / cpu:.1f}" if cpu else ""
        print(
            f"{record['streams']:7} {speed:9.1f} {speed / single:6.2f} {per_cpu:>10} {record['answers']:8} "
            f"{first['p50']:11.2f} {first['p95']:7.2f} s {first['p95'] / ahead['p95']:12.2f} "
            f"{1000 * record['per_token']['p50']:7.0f} ms {sum(record['faults'].values()):7}  "
            + ", ".join(f"{count} {what}" for what, count in record["compared"].items())
        )
    if levels:
        told = [record["load_average"] for record in levels]
        print(f"load average of the machine: {min(map(min, told)):.1f} to {max(map(max, told)):.1f}")
    if pairs := [record for record in records if record["kind"] == "overhead"]:
        print(overhead_line(pairs))
    for record in records:
        if record["kind"] == "second turn":
            first, second = record["first"]
            tokens = record["prompt_tokens"][1]
            print(
                f"second turn, {tokens} tokens: first token after {second:.3f} s, {second / first:.2f} of the first's"
            )


def overhead_line(pairs: list[dict[str, Any]]) -> str:
    def speed(who: str) -> float:
        return sum(pair[who]["tokens"] for pair in pairs) / sum(pair[who]["seconds"] for pair in pairs)

    def ratios(what: str) -> str:
        """A token through HTTP over one of the library."""
        served, own = ([pair[who][what] / pair[who]["tokens"] for pair in pairs] for who in ("http", "library"))
        return interval([one / other for one, other in zip(served, own, strict=True)])

    return (
        f"one stream: {speed('http'):.1f} tokens/s through HTTP, {speed('library'):.1f} in the library; HTTP over "
        f"library in {len(pairs)} turns: time {ratios('seconds')}, processor time {ratios('cpu')}"
    )


if __name__ == "__main__":
    main()
