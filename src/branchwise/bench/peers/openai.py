"""Any OpenAI-compatible server, asked through `/v1/completions` with a stream.

Prompts are sent as token ids. A server that accepts only text gets the text, and must count as many prompt tokens as we
do; otherwise it would continue another prompt than the other contestants.

The drafts of a server are known if it counts them at `/metrics` as vLLM does. It counts all requests together, so only
a request that ran alone has numbers of its own.
"""

from __future__ import annotations

import re
import time
import uuid
from collections import Counter
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

from branchwise.bench.contest import Answer, Asked, Peer
from branchwise.errors import UsageError
from branchwise.llm import LLM
from branchwise.openai_client import NEUTRAL, Client, Forms

TIMEOUT = 300.0
"""the most seconds without a byte; a server may be busy with other requests, or still be loading"""
COUNTED = re.compile(
    r"^\S*spec_decode_num_(drafts|draft_tokens|accepted_tokens)(?:_total)?(?:\{.*\})?\s+([0-9.eE+]+)", re.MULTILINE
)


@dataclass
class Reply:
    """An answer, as far as its stream has arrived."""

    text: str = ""
    ids: list[int] | None = None
    finish_reason: str | None = None
    usage: dict[str, Any] = field(default_factory=dict)
    first_token: float | None = None
    """seconds from the request to the first token"""


class OpenAI(Peer):
    """Sends the prompts of a batch at once, each in a request of its own."""

    usage = "openai:URL,model=NAME"

    def __init__(self, place: str | None, *, name: str, llm: LLM, threads: int | None = None) -> None:
        if place is None:
            raise UsageError(f"Peer 'openai' needs the address of a server; write it as {self.usage}.")
        url, _, model = place.partition(",model=")
        self.name = name
        hints = {"model": f"name one as openai:{url.strip()},model=NAME"}
        self.server = Client(url.strip(), model=model.strip() or None, timeout=TIMEOUT, hints=hints)
        self._llm = llm
        # Richest form first. Extras are not part of OpenAI's protocol, and other contestants start from token ids.
        self._forms = Forms([(ids, extras) for ids in (True, False) for extras in (True, False)])

    def write(self, prompts: Sequence[Sequence[int]], asked: Asked) -> list[Answer]:
        _ = self.server.model  # the name is asked for before the clock starts, and so is the form
        if not self._forms.settled:  # one token, so that the server caches nothing of the prompt
            self._forms.send(lambda form: self._ask(form, replace(asked, max_new_tokens=1), prompts[0][:1], 0))
        before = self._counts() if len(prompts) == 1 else None
        with ThreadPoolExecutor(len(prompts)) as pool:
            start = time.perf_counter()
            ask = partial(self._ask, self._forms.best, asked)
            found = list(pool.map(ask, prompts, range(len(prompts))))
            seconds = time.perf_counter() - start
        answers = [self._answer(reply, len(prompt), seconds) for reply, prompt in zip(found, prompts, strict=True)]
        if before is not None and (after := self._counts()) is not None:
            after.subtract(before)
            add_counts(answers[0], after)
        return answers

    def _counts(self) -> Counter[str] | None:
        """Counts of drafts, drafted tokens and accepted tokens since the server started; None if it has none."""
        counts: Counter[str] = Counter()
        for kind, value in COUNTED.findall(self.server.page("/metrics") or ""):
            counts[kind] += int(float(value))
        return counts if len(counts) == 3 else None

    def _ask(self, form: tuple[bool, bool], asked: Asked, prompt: Sequence[int], number: int) -> Reply:
        """Stream the answer to a prompt; `number` is the prompt's place in the batch, which selects its seed."""
        ids, extras = form
        payload: dict[str, Any] = {
            "model": self.server.model,
            "prompt": list(prompt) if ids else self._llm.tokenizer.decode(list(prompt), skip_special_tokens=False),
            "max_tokens": asked.max_new_tokens,
            "temperature": asked.temperature,
            "top_p": asked.top_p,
            "stream": True,
            "stream_options": {"include_usage": True},
        }
        if asked.seeds:
            payload["seed"] = asked.seeds[number] % (1 << 31)
        if asked.forbidden:
            payload["logit_bias"] = {str(token): -100 for token in sorted(asked.forbidden)}
        if extras:
            payload |= {**NEUTRAL, "top_k": asked.top_k or -1, "return_token_ids": True}
            # Every request must pay for its own prefill, as everywhere; the options are llama.cpp's and vLLM's.
            payload |= {"cache_prompt": False, "cache_salt": uuid.uuid4().hex}
            payload |= {"stop_token_ids": sorted(asked.stop_tokens)} if asked.stop_tokens else {"ignore_eos": True}
            payload |= {} if ids else {"add_special_tokens": False}
        reply, start = Reply(), time.perf_counter()
        for event in self.server.stream("/v1/completions", payload):
            self._read(event, reply, start)
        if reply.finish_reason is None:
            raise self.server.broken()
        return reply

    def _read(self, event: Any, reply: Reply, start: float) -> None:
        """Add an event of the stream to the reply."""
        try:
            if said := event.get("error"):
                said = str(said.get("message", said) if isinstance(said, dict) else said).rstrip(".")
                raise UsageError(f"The server at {self.server.url} failed in the middle of an answer: {said}.")
            reply.usage |= event.get("usage") or {}
            for choice in event["choices"]:
                text, ids = choice.get("text") or "", choice.get("token_ids")
                if (text or ids) and reply.first_token is None:
                    reply.first_token = time.perf_counter() - start
                reply.text += text
                if ids is not None:
                    reply.ids = (reply.ids or []) + [int(token) for token in ids]
                reply.finish_reason = choice.get("finish_reason") or reply.finish_reason
        except (KeyError, TypeError, ValueError, AttributeError):
            raise self.server.malformed() from None

    def _answer(self, reply: Reply, prompt_tokens: int, seconds: float) -> Answer:
        counted = reply.usage.get("prompt_tokens")
        if isinstance(counted, int) and counted != prompt_tokens:
            raise UsageError(
                f"The server at {self.server.url} read a prompt of {prompt_tokens} tokens as {counted}, so it would "
                "continue another text; serve the same model, and by a server that takes token ids."
            )
        answer = Answer(
            ids=reply.ids or [],
            finish_reason="stop" if reply.finish_reason == "stop" else "length",
            seconds=seconds,
            text=reply.text,
            phases={} if reply.first_token is None else {"prefill": reply.first_token},
        )
        if reply.ids is None:
            tokens = reply.usage.get("completion_tokens")
            answer.tokens = tokens if isinstance(tokens, int) else None
            answer.ids = list(self._llm.tokenizer(reply.text, add_special_tokens=False, verbose=False)["input_ids"])
            answer.counted_by = "retokenised" if answer.tokens is None else "usage"
        return answer


def add_counts(answer: Answer, counts: Counter[str]) -> None:
    """Add what a server counted while it wrote an answer. A pass emits one token more than it accepts, and the first
    pass, which reads the prompt, has no draft.

    An answer may end inside a draft: tokens that were accepted after its end were not written. If more tokens than
    those of one draft are left over, the server also wrote other answers, so the counts say nothing about this one.
    """
    tokens = len(answer.ids) if answer.tokens is None else answer.tokens
    drafts, drafted, counted = (counts[kind] for kind in ("drafts", "draft_tokens", "accepted_tokens"))
    written = min(counted, tokens - drafts)
    if written < 0 or (counted - written) * drafts >= max(drafted, 1):
        return
    answer.drafted, answer.accepted = drafted, written
    answer.steps = answer.target_passes = max(tokens - written, drafts + 1)
    answer.by_source = {"target": tokens - written, "draft": written}
