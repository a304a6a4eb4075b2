"""What a server is sent that is no good, and what it says to that: the tests and the table of docs/serve.md.

python -m tests.bad_inputs            ask a server of a tiny model and print the table of what it answered
python -m tests.bad_inputs --write    and put it into docs/serve.md
"""

from __future__ import annotations

import json
import re
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import httpx

from branchwise.serve.settings import Limits
from tests.serving import Served, serving, tiny_llm

PAGE = Path(__file__).parents[1] / "docs" / "serve.md"
PLACE = re.compile(r"(<!-- bad inputs -->\n).*?(<!-- /bad inputs -->\n)", re.DOTALL)
LIMITS = Limits(
    body_bytes=20_000, choices=4, stops=3, stop_letters=10, biases=5, prompts=3, new_tokens=100, requests=5, queue=6
)


@dataclass(frozen=True)
class Bad:
    """One input, and the answer that it should get."""

    says: str
    sent: dict[str, Any] | bytes | None
    """fields of a request that is otherwise good, or a whole body"""
    status: int = 400
    param: str | None = None
    code: str | None = None
    path: str = "/v1/completions"
    method: str = "POST"

    def send(self, client: httpx.Client) -> httpx.Response:
        body = self.sent
        if isinstance(body, dict):
            usual = {"messages": [{"role": "user", "content": "a"}]} if "chat" in self.path else {"prompt": "hello"}
            # Not httpx's own JSON, which refuses infinite numbers.
            body = json.dumps({**(usual if self.path.startswith("/v1") else {}), **body}).encode()
        return client.request(self.method, self.path, content=body)


CHAT = "/v1/chat/completions"
WRONG, LIMIT, UNSUPPORTED, NO_JSON = "invalid_value", "limit_exceeded", "unsupported_value", "invalid_json"
SCHEMA = {"name": "x", "schema": {"type": "nothing"}}
IMAGE = [{"type": "image_url", "image_url": {"url": "x"}}]

BAD = (
    # Bodies
    Bad("no body", b"", code=NO_JSON),
    Bad("half a body", b"{", code=NO_JSON),
    Bad("a body that is a list", b"[]", code=WRONG),
    Bad("a body that is null", b"null", code=WRONG),
    Bad("bytes that are no UTF-8", b'{"prompt": "\xff"}', code=NO_JSON),
    Bad("half a surrogate pair", b'{"prompt": "\\ud800"}', code=NO_JSON),
    Bad("NaN", b'{"prompt": NaN}', param="prompt", code=WRONG),
    Bad("ten thousand brackets", b"[" * 10_000, code=NO_JSON),
    Bad("more bytes than `--max-body`", b" " * 20_001, 413, code="body_too_large"),
    # Prompts
    Bad("no prompt", {"prompt": None}, param="prompt", code=WRONG),
    Bad("a prompt of the wrong type", {"prompt": {"a": 1}}, param="prompt", code=WRONG),
    Bad("an empty prompt", {"prompt": ""}),
    Bad("an empty list", {"prompt": []}, param="prompt"),
    Bad("too many prompts", {"prompt": ["a"] * 4}, param="prompt", code=LIMIT),
    Bad("a token outside the vocabulary", {"prompt": [1, 999_999]}, param="prompt"),
    Bad("a negative token", {"prompt": [1, -1]}, param="prompt"),
    Bad("a prompt beyond the context", {"prompt": "a" * 200}, param="prompt", code="context_length_exceeded"),
    # Conversations
    Bad("no messages", {"messages": []}, param="messages", code=WRONG, path=CHAT),
    Bad("messages that are text", {"messages": "hello"}, param="messages", code=WRONG, path=CHAT),
    Bad(
        "a role that nobody has",
        {"messages": [{"role": "king", "content": "a"}]},
        param="messages",
        code=WRONG,
        path=CHAT,
    ),
    Bad("a picture", {"messages": [{"role": "user", "content": IMAGE}]}, param="messages", code=WRONG, path=CHAT),
    Bad("a message without text", {"messages": [{"role": "user", "content": ""}]}, param="messages", path=CHAT),
    # Values
    Bad("a temperature that is text", {"temperature": "hot"}, param="temperature", code=WRONG),
    Bad("a negative temperature", {"temperature": -1}, param="temperature", code=WRONG),
    Bad("a temperature above 100", {"temperature": 100.5}, param="temperature", code=WRONG),
    Bad("an infinite temperature", {"temperature": float("inf")}, param="temperature", code=WRONG),
    Bad("`top_p` of zero", {"top_p": 0}, param="top_p", code=WRONG),
    Bad("a huge `top_k`", {"top_k": 10**30}, param="top_k", code=WRONG),
    Bad("`max_tokens` below zero", {"max_tokens": -1}, param="max_tokens", code=WRONG),
    Bad("`max_tokens` that are no whole number", {"max_tokens": 1.5}, param="max_tokens", code=WRONG),
    Bad("more tokens than `--max-new-tokens`", {"max_tokens": 101}, param="max_tokens", code=LIMIT),
    Bad("true for a number", {"n": True}, param="n", code=WRONG),
    Bad("more choices than `--max-choices`", {"n": 5}, param="n", code=LIMIT),
    Bad("more texts than `--max-queue`", {"n": 4, "prompt": ["a", "b"]}, param="n", code=LIMIT),
    Bad("too many stop strings", {"stop": ["a", "b", "c", "d"]}, param="stop", code=LIMIT),
    Bad("a long stop string", {"stop": "a" * 11}, param="stop", code=LIMIT),
    Bad("an empty stop string", {"stop": ["a", ""]}, param="stop"),
    Bad("a bias of a word", {"logit_bias": {"word": 1}}, param="logit_bias"),
    Bad("a bias of a token that is not there", {"logit_bias": {"99999": 1}}),
    Bad("too many biases", {"logit_bias": {str(token): 1 for token in range(6)}}, param="logit_bias", code=LIMIT),
    Bad(
        "a penalty that would divide by nothing", {"repetition_penalty": 1e-300}, param="repetition_penalty", code=WRONG
    ),
    Bad("too many alternatives", {"logprobs": 21}, param="logprobs", code=WRONG),
    Bad("too many alternatives in a chat", {"logprobs": True, "top_logprobs": 21}, 400, "top_logprobs", WRONG, CHAT),
    Bad("alternatives without `logprobs`", {"top_logprobs": 3}, param="top_logprobs", path=CHAT),
    Bad("the alternatives of a chat in a completion", {"top_logprobs": 2}, param="top_logprobs", code=UNSUPPORTED),
    Bad("`stream_options` without a stream", {"stream_options": {"include_usage": True}}, param="stream_options"),
    Bad("a task where no pack of specialists drafts", {"task": "code"}, param="task"),
    Bad("a task that is no text", {"task": 1}, param="task", code=WRONG),
    # Forms
    Bad("a form of an unknown kind", {"response_format": {"type": "xml"}}, param="response_format", code=WRONG),
    Bad("a form without its schema", {"response_format": {"type": "json_schema"}}, param="response_format"),
    Bad(
        "a schema that is none",
        {"response_format": {"type": "json_schema", "json_schema": SCHEMA}},
        param="response_format",
    ),
    Bad("a regular expression that is none", {"guided_regex": "("}, param="guided_regex"),
    Bad("two forms", {"guided_regex": "a", "guided_choice": ["a"]}, param="guided_choice"),
    Bad("a form without an end", {"guided_regex": "a", "ignore_eos": True}, param="ignore_eos"),
    # What is not supported
    Bad("a suffix", {"suffix": "x"}, param="suffix", code=UNSUPPORTED),
    Bad("the best of several", {"best_of": 3}, param="best_of", code=UNSUPPORTED),
    Bad("the best of true", {"best_of": True}, param="best_of", code=UNSUPPORTED),
    Bad("a beam search of 0", {"use_beam_search": 0}, param="use_beam_search", code=UNSUPPORTED),
    Bad("a beam search", {"use_beam_search": True}, param="use_beam_search", code=UNSUPPORTED),
    # Paths and models
    Bad("another model", {"model": "other"}, 404, "model", "model_not_found"),
    Bad("a model that is not there", None, 404, "model", "model_not_found", "/v1/models/other", "GET"),
    Bad("a path that is not there", None, 404, path="/v1/nothing", method="GET"),
    Bad("a path above the root", None, 404, path="/../../etc/passwd", method="GET"),
    Bad("another method", None, 405, method="GET"),
    # Tokens
    Bad("neither prompt nor messages", {}, param="prompt", path="/tokenize"),
    Bad("tokens outside the vocabulary", {"tokens": [999_999]}, param="prompt", path="/detokenize"),
    Bad("tokens that are text", {"tokens": "a"}, param="tokens", code=WRONG, path="/detokenize"),
)


def table(client: Served) -> str:
    """The inputs with what a server answers to them."""
    lines = ["| input | path | status | `param` | `code` |", "|---|---|---|---|---|"]
    for bad in BAD:
        answer = bad.send(client)
        error = answer.json()["error"]
        told = " | ".join(f"`{error[name]}`" if error[name] else "" for name in ("param", "code"))
        lines.append(f"| {bad.says} | `{bad.path}` | {answer.status_code} | {told} |")
    return "\n".join(lines) + "\n"


def main() -> None:
    with serving(lambda: tiny_llm(slots=2), limits=LIMITS) as client:
        found = table(client)
    print(found, end="")
    if "--write" in sys.argv:
        PAGE.write_text(PLACE.sub(lambda place: place[1] + found + place[2], PAGE.read_text()))


if __name__ == "__main__":
    main()
