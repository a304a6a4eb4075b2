"""Peers behind the OpenAI API: what they write is counted honestly, and whatever they do badly is said."""

from __future__ import annotations

import json
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest

from branchwise.bench.contest import Answer, Asked
from branchwise.bench.peers import build_peer
from branchwise.bench.peers import openai as openai_module
from branchwise.errors import UsageError
from branchwise.llm import LLM
from tests.conformance.architectures import build, served
from tests.test_bench_peers import END, llm_of


@pytest.fixture(scope="module")
def tiny() -> LLM:
    return llm_of(build(served()["llama"]))


@dataclass
class Stub:
    """What a stub server does; it answers every completion with the same words."""

    words: tuple[str, ...] = ("w5 ", "w6 ", "w7 ")
    ids: tuple[int, ...] | None = (5, 6, 7)
    usage: bool = True
    prompt_tokens: int | None = None
    """what it says that it counted; None for the truth"""
    takes_ids: bool = True
    takes_extras: bool = True
    finish: str | None = "length"
    done: bool = True
    cut: int = 7
    """bytes of a piece that is sent at once"""
    raw: bytes | None = None
    status: int = 200
    delay: float = 0.0
    models: Any = field(default_factory=lambda: {"data": [{"id": "stub"}]})
    end: bytes = b"\n\n"
    drafts: tuple[int, int, int] | None = None
    """what it says of every answer: drafts, their tokens, and those that were accepted; None if it counts nothing"""
    seen: list[dict[str, Any]] = field(default_factory=list)

    def metrics(self) -> bytes:
        """As vLLM shows them, by engine."""
        lines = ["# HELP vllm:spec_decode_num_draft_tokens Number of draft tokens."]
        for kind, each in zip(("drafts", "draft_tokens", "accepted_tokens"), self.drafts or (), strict=False):
            for engine in range(2):
                count = each * len(self.seen) * (engine == 0) + 1000 * engine
                lines.append(f'vllm:spec_decode_num_{kind}_total{{engine="{engine}"}} {float(count)}')
                lines.append(f'vllm:spec_decode_num_{kind}_created{{engine="{engine}"}} 1.79e+09')
        return "\n".join(lines).encode()

    def stream(self, request: dict[str, Any]) -> bytes:
        many = min(len(self.words), request["max_tokens"])
        lines = [b": a comment" + self.end]
        for number in range(many):
            choice: dict[str, Any] = {"index": 0, "text": self.words[number], "finish_reason": None}
            if self.ids is not None and request.get("return_token_ids"):
                choice["token_ids"] = [self.ids[number]]
            if number == many - 1:
                choice["finish_reason"] = self.finish
            lines.append(self._event({"choices": [choice]}))
        if self.usage:
            prompt = request["prompt"]
            counted = len(prompt.split() if isinstance(prompt, str) else prompt)
            usage = {"prompt_tokens": self.prompt_tokens or counted, "completion_tokens": many}
            lines.append(self._event({"choices": [], "usage": usage}))
        return b"".join([*lines, b"data: [DONE]" + self.end] if self.done else lines)

    def _event(self, event: dict[str, Any]) -> bytes:
        return b"data: " + json.dumps(event).encode() + self.end


@contextmanager
def serving(stub: Stub) -> Iterator[str]:
    class Handler(BaseHTTPRequestHandler):
        protocol_version = "HTTP/1.1"

        def do_GET(self) -> None:
            counted = self.path == "/metrics" and stub.drafts is not None
            self._whole(200, stub.metrics() if counted else json.dumps(stub.models).encode())

        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            stub.seen.append(request)
            time.sleep(stub.delay)
            if stub.status != 200 or (stub.raw is not None and not stub.raw.startswith(b"data")):
                self._whole(stub.status, stub.raw or b"")
            elif not stub.takes_ids and not isinstance(request["prompt"], str):
                self._whole(400, b'{"error": {"message": "prompt must be a string"}}')
            elif not stub.takes_extras and "ignore_eos" in request:
                self._whole(422, b'{"detail": "Extra inputs are not permitted"}')
            else:
                self._pieces(stub.stream(request) if stub.raw is None else stub.raw)

        def _pieces(self, body: bytes) -> None:
            self.send_response(200)
            self.send_header("Content-Type", "text/event-stream")
            self.send_header("Transfer-Encoding", "chunked")
            self.end_headers()
            for start in range(0, len(body), stub.cut):
                piece = body[start : start + stub.cut]
                self.wfile.write(f"{len(piece):x}\r\n".encode() + piece + b"\r\n")
                self.wfile.flush()
            if stub.finish is not None:  # else the connection just ends
                self.wfile.write(b"0\r\n\r\n")
            self.close_connection = True

        def _whole(self, status: int, body: bytes) -> None:
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)
            self.close_connection = True

        def log_message(self, format: str, *args: Any) -> None:
            pass

    class Quiet(ThreadingHTTPServer):
        def handle_error(self, request: Any, client_address: Any) -> None:
            pass  # a client that gave up

    server = Quiet(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        thread.join()
        server.server_close()


ASKED = Asked(3, forbidden=frozenset({END}), seeds=(7, 8, 9))


def ask(stub: Stub, llm: LLM, asked: Asked = ASKED, prompts: list[list[int]] | None = None, more: str = "") -> Answer:
    with serving(stub) as url:
        return build_peer(f"openai:{url}/v1{more}", llm, threads=None).write(prompts or [[5, 6, 7, 8]], asked)[0]


@pytest.mark.parametrize("cut", [1, 7, 10_000])
@pytest.mark.parametrize("end", [b"\n\n", b"\r\n\r\n"])
def test_a_stream_is_read_whatever_its_pieces(tiny: LLM, cut: int, end: bytes) -> None:
    answer = ask(Stub(cut=cut, end=end), tiny)
    assert (answer.ids, answer.text, answer.finish_reason) == ([5, 6, 7], "w5 w6 w7 ", "length")
    assert answer.counted_by == "ids"
    assert 0 < answer.phases["prefill"] <= answer.seconds


def test_a_server_that_gives_no_ids_is_counted_by_its_usage(tiny: LLM) -> None:
    answer = ask(Stub(ids=None, words=("w5 ", "w6", " w7")), tiny)
    assert (answer.counted_by, answer.ids) == ("usage", [5, 6, 7])
    assert answer.tokens == 3


def test_a_server_that_counts_nothing_is_retokenised(tiny: LLM) -> None:
    answer = ask(Stub(ids=None, usage=False), tiny)
    assert (answer.counted_by, answer.ids) == ("retokenised", [5, 6, 7])


@pytest.mark.parametrize(
    ("drafts", "accepted", "steps"),
    [((0, 0, 0), 0, 3), ((1, 4, 1), 1, 2), ((1, 2, 2), 2, 2), ((1, 4, 3), 2, 2)],
    ids=["none", "one of four", "to the end", "beyond the end"],
)
def test_what_a_server_drafted_is_what_it_counted_meanwhile(
    tiny: LLM, drafts: tuple[int, int, int], accepted: int, steps: int
) -> None:
    answer = ask(Stub(drafts=drafts), tiny)
    assert (answer.drafted, answer.accepted, answer.steps) == (drafts[1], accepted, steps)
    assert sum(answer.by_source.values()) == 3


@pytest.mark.parametrize(
    ("drafts", "prompts"),
    [(None, 1), ((2, 8, 7), 1), ((4, 4, 4), 1), ((1, 4, 1), 2)],
    ids=["counts nothing", "served others", "more drafts than tokens", "a batch"],
)
def test_what_a_server_drafted_is_not_guessed(tiny: LLM, drafts: tuple[int, int, int] | None, prompts: int) -> None:
    answer = ask(Stub(drafts=drafts), tiny, prompts=[[5, 6, 7, 8]] * prompts)
    assert answer.steps is answer.drafted is answer.accepted is None


def test_the_request_says_all_that_was_asked(tiny: LLM) -> None:
    stub = Stub()
    ask(stub, tiny, Asked(3, 0.8, 0.9, 20, forbidden=frozenset({END}), seeds=(7,)), more=",model=mine")
    sent = stub.seen[-1]
    expected = {
        "model": "mine",
        "prompt": [5, 6, 7, 8],
        "max_tokens": 3,
        "temperature": 0.8,
        "top_p": 0.9,
        "top_k": 20,
        "seed": 7,
        "stream": True,
        "logit_bias": {"2": -100},
        "ignore_eos": True,
    }
    assert {name: sent[name] for name in expected} == expected
    ask(stub, tiny, Asked(3, stop_tokens=frozenset({END, 40})))
    sent = stub.seen[-1]
    assert (sent["model"], sent["stop_token_ids"], sent["top_k"]) == ("stub", [END, 40], -1)
    assert not {"ignore_eos", "logit_bias", "seed"} & set(sent)


def test_a_server_that_refuses_ids_gets_the_text_of_the_same_tokens(tiny: LLM) -> None:
    stub = Stub(takes_ids=False)
    answer = ask(stub, tiny)
    assert stub.seen[-1]["prompt"] == "w5 w6 w7 w8"
    assert answer.ids == [5, 6, 7]


def test_a_server_that_refuses_extras_is_asked_without_them(tiny: LLM) -> None:
    stub = Stub(takes_extras=False)
    answer = ask(stub, tiny)
    assert stub.seen[-1]["prompt"] == [5, 6, 7, 8]
    assert stub.seen[-1]["logit_bias"] == {"2": -100}
    assert answer.counted_by == "usage"


def test_a_server_that_reads_another_prompt_is_refused(tiny: LLM) -> None:
    with pytest.raises(UsageError, match="read a prompt of 4 tokens as 5"):
        ask(Stub(takes_ids=False, prompt_tokens=5), tiny)


def test_a_batch_is_sent_at_once_with_a_seed_for_each(tiny: LLM) -> None:
    stub = Stub(delay=0.2)
    with serving(stub) as url:
        peer = build_peer(f"openai:{url}", tiny, threads=None)
        answers = peer.write([[5], [6, 7], [8]], ASKED)
    assert [answer.ids for answer in answers] == [[5, 6, 7]] * 3
    assert {(tuple(sent["prompt"]), sent["seed"]) for sent in stub.seen[1:]} == {((5,), 7), ((6, 7), 8), ((8,), 9)}
    assert answers[0].seconds < 0.5
    assert len({answer.seconds for answer in answers}) == 1


def test_a_server_that_does_not_stream_is_read_all_the_same(tiny: LLM) -> None:
    whole = {"choices": [{"text": "w5 w6", "finish_reason": "stop"}], "usage": {"completion_tokens": 2}}
    answer = ask(Stub(raw=json.dumps(whole, indent=1).encode()), tiny)
    assert (answer.ids, answer.finish_reason) == ([5, 6], "stop")


def test_a_stream_without_its_last_word_is_whole_if_the_answer_ended(tiny: LLM) -> None:
    assert ask(Stub(done=False), tiny).ids == [5, 6, 7]


def broken(**does: Any) -> Callable[[LLM], Answer]:
    return lambda llm: ask(Stub(**does), llm)


@pytest.mark.parametrize(
    ("call", "says"),
    [
        (broken(finish=None, done=False), "closed the stream before the answer ended"),
        (broken(finish=None, done=True), "closed the stream before the answer ended"),
        (broken(raw=b""), "not JSON"),
        (broken(raw=b"<html>hello</html>"), "not JSON"),
        (broken(raw=b"data: {broken\n\n"), "not JSON"),
        (broken(raw=b'data: {"choices": 3}\n\n'), "form that is not in OpenAI's protocol"),
        (broken(raw=b"data: [1]\n\n"), "form that is not in OpenAI's protocol"),
        (broken(raw=b'data: {"error": {"message": "out of memory."}}\n\n'), "middle of an answer: out of memory.$"),
        (broken(status=500, raw=b'{"error": {"message": "CUDA died"}}'), "with 500: CUDA died.$"),
        (broken(status=500, raw=b"<html>"), "with 500: Internal Server Error"),
        (broken(status=401, raw=b'{"error": "no key"}'), "401: no key. Give a key in OPENAI_API_KEY"),
        (broken(status=404, raw=b"{}"), "404.*is the model's name right"),
        (broken(status=400, raw=b'{"error": {"message": "too long"}}'), "400: too long"),
        (broken(models={"data": []}), "lists no model; name one as openai:"),
        (broken(models=[]), "lists no model"),
    ],
)
def test_whatever_a_server_does_badly_is_one_sentence(tiny: LLM, call: Callable[[LLM], Answer], says: str) -> None:
    with pytest.raises(UsageError, match=says):
        call(tiny)


def test_a_server_that_is_not_there_is_one_sentence(tiny: LLM) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = free.getsockname()[1]
    with pytest.raises(UsageError, match=r"No server answers at .*Connection refused"):
        build_peer(f"openai:http://127.0.0.1:{port}", tiny, threads=None).write([[5]], ASKED)


def test_a_server_that_says_nothing_is_given_up(tiny: LLM, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai_module, "TIMEOUT", 0.1)
    with pytest.raises(UsageError, match=r"gave no answer to /v1/completions within 0\.1 seconds; is it still loading"):
        ask(Stub(delay=0.5), tiny)
