"""The audit of a server: right and wrong ones of a toy model on this machine, and everything a server can do badly."""

from __future__ import annotations

import json
import math
import random
import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from typing import Any

import pytest
from typer.testing import CliRunner

from branchwise import openai_client
from branchwise.audit.findings import Word
from branchwise.audit.server import Answer, Server, ServerAudit, StatedProbs, audit_server, distinct
from branchwise.cli.audit import app
from branchwise.errors import UsageError

LETTERS = "abcdef"
END = "</s>"
PROMPTS = ["fab", "d"]


def bigram(seed: int) -> dict[str, dict[str, float]]:
    """After every letter a distribution over the letters and the end of the text."""
    rng = random.Random(seed)
    probs = {}
    for letter in LETTERS:
        weights = {token: rng.expovariate(1) ** 1.5 for token in [*LETTERS, END]}
        weights[END] = 0.1 * sum(weights.values())
        probs[letter] = {token: weight / sum(weights.values()) for token, weight in weights.items()}
    return probs


P = bigram(0)
Q = bigram(1)


def draw(probs: dict[str, float], rng: random.Random) -> str:
    return rng.choices(list(probs), list(probs.values()))[0]


def honest(last: str, rng: random.Random) -> str:
    return draw(P[last], rng)


def speculative(last: str, rng: random.Random, drafted: str | None = None) -> str:
    """Token verification: accept with min(1, p/q), replace from what p has left over q."""
    p, q = P[last], Q[last]
    token = drafted or draw(q, rng)
    if rng.random() * q[token] < p[token]:
        return token
    return draw({other: max(p[other] - q[other], 0.0) for other in p}, rng)


def argmax_draft(last: str, rng: random.Random) -> str:
    """Known defect: drafts by argmax and records the softmax as q."""
    return speculative(last, rng, drafted=max(Q[last], key=Q[last].__getitem__))


def greedy_bias(last: str, rng: random.Random) -> str:
    """One token in five is the most probable one."""
    return max(P[last], key=P[last].__getitem__) if rng.random() < 0.2 else draw(P[last], rng)


@dataclass
class Toy:
    """What a toy server does."""

    step: Callable[[str, random.Random], str] = honest
    model: str = "toy"
    most_logprobs: int = 50
    allows_n: bool = True
    ignores_n: bool = False
    knows_extras: bool = True
    logprobs: bool = True
    chat_form: bool = False
    usage: bool = True
    reports_end: bool = True
    spell: Callable[[str], str] = str
    key: str | None = None
    counters: Callable[[], tuple[int, int]] | None = None
    busy: int = 0
    """requests to turn away before the next answer"""
    answer: Callable[[str], bytes | int] | None = None
    """raw bytes, or a status, in place of every answer to a path"""
    delay: float = 0.0
    seen: list[dict[str, Any]] = field(default_factory=list)
    rng: random.Random = field(default_factory=lambda: random.Random(11))
    lock: threading.Lock = field(default_factory=threading.Lock)

    def complete(self, request: dict[str, Any]) -> tuple[int, dict[str, Any]]:
        with self.lock:
            self.seen.append(request)
            if self.busy:
                self.busy -= 1
                return 503, {"error": {"message": "busy"}}
            if request["model"] != self.model:
                return 404, {"error": {"message": f"The model {request['model']} does not exist."}}
            if request.get("logprobs", 0) > self.most_logprobs:
                return 400, {"error": {"message": f"logprobs must be at most {self.most_logprobs}"}}
            if "n" in request and not self.allows_n:
                return 422, {"detail": [{"loc": ["body", "n"], "msg": "Extra inputs are not permitted"}]}
            if "top_k" in request and not self.knows_extras:
                return 400, {"error": "unknown parameter top_k"}
            assert request["temperature"] == 1
            assert request["top_p"] == 1
            count = 1 if self.ignores_n else request.get("n", 1)
            choices = [self._choice(request) for _ in range(count)]
        usage = {"usage": {"prompt_tokens": len(request["prompt"])}} if self.usage else {}
        return 200, {"choices": choices, **usage}

    def _choice(self, request: dict[str, Any]) -> dict[str, Any]:
        last, tokens, tops, ended = request["prompt"][-1], [], [], False
        for _ in range(request["max_tokens"]):
            probs = P[last]
            token = self.step(last, self.rng)
            ended = token == END
            if ended and not self.reports_end:
                break
            best = sorted(probs, key=lambda other: -probs[other])[: request.get("logprobs", 0)]
            tokens.append(token)
            tops.append({self.spell(other): math.log(probs[other]) for other in best})
            if ended:
                break
            last = token
        text = "".join(token for token in tokens if token != END)
        names = [self.spell(token) for token in tokens]
        logprobs: dict[str, Any] | None = {"tokens": names, "top_logprobs": tops}
        if self.chat_form:
            listed = [[{"token": t, "logprob": p} for t, p in top.items()] for top in tops]
            entries = [{"token": n, "top_logprobs": top} for n, top in zip(names, listed, strict=True)]
            logprobs = {"content": entries}
        return {
            "text": text,
            "finish_reason": "stop" if ended else "length",
            "logprobs": logprobs if self.logprobs else None,
        }


@contextmanager
def serving(toy: Toy) -> Iterator[str]:
    """A toy server on a free port."""

    class Handler(BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            if self.path == "/metrics" and toy.counters is not None:
                drafted, accepted = toy.counters()
                page = f'# HELP\nvllm:spec_decode_num_draft_tokens_total{{model_name="toy"}} {drafted:.1f}\n'
                page += f'vllm:spec_decode_num_accepted_tokens_total{{model_name="toy"}} {accepted:.1f}\n'
                self._send(200, page.encode())
            elif self.path == "/v1/models":
                self._json(200, {"data": [{"id": toy.model}]})
            else:
                self._json(404, {"error": {"message": "Not Found"}})

        def do_POST(self) -> None:
            request = json.loads(self.rfile.read(int(self.headers["Content-Length"])))
            if toy.key is not None and self.headers.get("Authorization") != f"Bearer {toy.key}":
                self._json(401, {"error": {"message": "Incorrect API key."}})
            elif self.path == "/v1/completions":
                self._json(*toy.complete(request))
            else:
                self._json(404, {"error": {"message": "Not Found"}})

        def _json(self, status: int, answer: dict[str, Any]) -> None:
            self._send(status, json.dumps(answer).encode())

        def _send(self, status: int, body: bytes) -> None:
            time.sleep(toy.delay)
            if toy.answer is not None and self.path != "/metrics":
                found = toy.answer(self.path)
                status, body = (found, b"<html>no</html>") if isinstance(found, int) else (200, found)
            self.send_response(status)
            self.send_header("Content-Length", str(len(body)))
            self.end_headers()
            self.wfile.write(body)

        def log_message(self, format: str, *args: Any) -> None:
            pass

    class Quiet(ThreadingHTTPServer):
        request_queue_size = 64  # a client that finds the queue full tries again a second later

        def handle_error(self, request: Any, client_address: Any) -> None:
            pass  # a client that gave up

    server = Quiet(("127.0.0.1", 0), Handler)
    thread = threading.Thread(target=server.serve_forever, kwargs={"poll_interval": 0.01})
    thread.start()
    try:
        yield f"http://127.0.0.1:{server.server_port}"
    finally:
        server.shutdown()
        server.server_close()
        thread.join()


@pytest.fixture(autouse=True)
def _no_waiting(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(openai_client, "PAUSES", (0.01, 0.01))
    monkeypatch.delenv("OPENAI_API_KEY", raising=False)


def audit(toy: Toy, reference: Toy | None = None, **options: Any) -> ServerAudit:
    given = {"samples": 1000, "threads": 4} | options
    with serving(toy) as url, serving(reference or Toy()) as truth:
        return audit_server(url, truth, PROMPTS, **given)


def word_of(toy: Toy, reference: Toy | None = None, **options: Any) -> Word:
    return audit(toy, reference, **options).finding.word


@pytest.mark.parametrize("step", [honest, speculative])
def test_a_correct_server_is_lossless(step: Callable[[str, random.Random], str]) -> None:
    found = audit(Toy(step))
    assert found.finding.word is Word.LOSSLESS, found.finding.evidence
    assert found.tests.samples >= 2000
    assert len(found.tests.family) == 3
    assert max(test.cells for test in found.tests.contexts) > len(LETTERS) + 1  # second tokens are told apart too
    assert any("not known" in sentence for sentence in found.finding.evidence)
    assert json.loads(json.dumps(found.as_dict()))["finding"] == "LOSSLESS"


@pytest.mark.parametrize("step", [argmax_draft, greedy_bias])
def test_a_biased_server_is_not_lossless(step: Callable[[str, random.Random], str]) -> None:
    found = audit(Toy(step))
    assert found.finding.word is Word.NOT_LOSSLESS, found.finding.evidence
    assert "after Holm" in found.finding.evidence[0]


def test_a_bias_that_begins_with_the_second_token_is_found() -> None:
    """Most engines sample the first token from the prompt's own pass and speculate from the second on."""
    toy = Toy()

    def late(last: str, rng: random.Random) -> str:
        return honest(last, rng) if last in ("b", "d") else argmax_draft(last, rng)

    toy.step = late
    assert word_of(toy) is Word.NOT_LOSSLESS


def test_few_samples_decide_nothing() -> None:
    assert word_of(Toy(greedy_bias), samples=10) is Word.UNDECIDED


@pytest.mark.parametrize(
    ("toy", "reference"),
    [
        (Toy(allows_n=False), Toy(allows_n=False)),
        (Toy(ignores_n=True), Toy()),
        (Toy(knows_extras=False), Toy(knows_extras=False)),
        (Toy(knows_extras=False, allows_n=False), Toy(knows_extras=False, most_logprobs=5)),
        (Toy(), Toy(most_logprobs=5)),
        (Toy(chat_form=True), Toy(chat_form=True)),
        (Toy(usage=False), Toy(usage=False)),
        (Toy(reports_end=False), Toy()),
        (Toy(), Toy(reports_end=False)),
        (Toy(key="secret"), Toy(key="secret")),
        (Toy(busy=2), Toy(busy=2)),
    ],
    ids=[
        "n is refused",
        "n is ignored",
        "cuts cannot be told",
        "almost nothing is known",
        "five logprobs",
        "logprobs as in chats",
        "no usage",
        "the end is left out",
        "the reference leaves the end out",
        "keys",
        "busy at first",
    ],
)
def test_servers_of_many_kinds_are_audited(toy: Toy, reference: Toy) -> None:
    biased = Toy(**{**toy.__dict__, "step": argmax_draft, "seen": [], "rng": random.Random(1)})
    options: dict[str, Any] = {"samples": 300, "limit": 0.25, "key": toy.key, "length": 2}
    found = audit(toy, reference, **options)
    assert found.finding.word is Word.LOSSLESS, found.finding.evidence
    assert word_of(biased, reference, **options) is Word.NOT_LOSSLESS


def test_what_a_server_cuts_by_default_is_switched_off_where_it_allows_that() -> None:
    toy = Toy()
    audit(toy, samples=20)
    assert {"top_k": -1, "min_p": 0.0}.items() <= toy.seen[-1].items()
    found = audit(Toy(knows_extras=False), samples=20)
    assert any("refuses top_k and min_p" in sentence for sentence in found.finding.evidence)


def test_tokens_spelt_otherwise_than_the_text_are_compared_one_at_a_time() -> None:
    """Joined, such strings would be another text, after which the reference would state another distribution."""
    spelt = Toy(spell=lambda token: f"▁{token}")
    found = audit(spelt, Toy(spell=lambda token: f"▁{token}"), samples=600, limit=0.2)
    assert found.finding.word is Word.UNDECIDED
    assert "Only first tokens were compared" in found.finding.evidence[0]
    assert min(found.tests.adjusted) > 0.05
    assert max(test.cells for test in found.tests.contexts) <= len(LETTERS) + 1


def test_a_text_that_is_read_as_other_tokens_is_not_taken_for_its_tokens() -> None:
    class Merging(Server):
        """A tokenizer that reads "fa" as one token."""

        def complete(self, prompt: str, **options: Any) -> list[Answer]:
            read = len(prompt) - prompt.count("fa")
            return [Answer(("a",), "a", ({"a": 0.5, "b": 0.5},), read)]

    probs = StatedProbs(Merging("http://127.0.0.1:1"), "d")
    assert probs(()) == {"a": 0.5, "b": 0.5}
    assert probs(("b", "a")) == {"a": 0.5, "b": 0.5}
    assert probs(("f", "a")) is None


def test_servers_that_name_their_tokens_differently_are_not_accused() -> None:
    found = audit(Toy(spell=lambda token: f"Ġ{token}"), samples=200)
    assert found.finding.word is Word.UNDECIDED
    assert "spell its tokens alike" in found.finding.evidence[0]


def test_a_server_that_counts_its_drafts_must_have_accepted_and_rejected_some() -> None:
    def counting(drafted: int, accepted: int) -> Callable[[], tuple[int, int]]:
        asked = iter(range(10))

        def counters() -> tuple[int, int]:
            turn = next(asked)
            return 100 + drafted * turn, 50 + accepted * turn

        return counters

    found = audit(Toy(speculative, counters=counting(30, 10)))
    assert found.finding.word is Word.LOSSLESS
    assert found.activity is not None
    assert (found.activity.drafted, found.activity.accepted) == (30, 10)
    for drafted, accepted in ((0, 0), (30, 0), (30, 30)):
        assert word_of(Toy(speculative, counters=counting(drafted, accepted))) is Word.UNDECIDED


def test_a_server_that_always_writes_the_same_gets_a_hint() -> None:
    found = audit(Toy(lambda last, rng: "a"), samples=100)
    assert found.finding.word is Word.NOT_LOSSLESS
    assert any("fixed seed" in sentence for sentence in found.finding.evidence)


def test_models_of_different_names_are_mentioned() -> None:
    found = audit(Toy(model="one"), Toy(model="two"), samples=20)
    assert any("one and two" in sentence for sentence in found.finding.evidence)


def test_ctrl_c_loses_nothing_and_decides_nothing() -> None:
    def interrupt(what: str, done: int, of: int) -> None:
        if what == "texts: d" and done >= 300:
            raise KeyboardInterrupt

    found = audit(Toy(), progress=interrupt)
    assert found.finding.word is Word.UNDECIDED
    assert "interrupted" in found.finding.evidence[0]
    assert [test.context for test in found.tests.contexts] == ["fab"]


@pytest.mark.parametrize(
    ("token", "told_apart"),
    [
        *((token, True) for token in (" the", "<", "<div", "\n", "[", "[1]")),
        *((token, False) for token in ("", "</s>", "<|im_end|>", "<0x0A>", "[EOS]", "\ufffd", "bytes:\\xe2")),
    ],
)
def test_tokens_whose_string_does_not_tell_them_apart_are_pooled(token: str, told_apart: bool) -> None:
    assert distinct(token) is told_apart


# What can go wrong


def refuse(match: str, toy: Toy, reference: Toy | None = None, **options: Any) -> None:
    with pytest.raises(UsageError, match=match) as caught:
        audit(toy, reference, samples=20, **options)
    assert "\n" not in str(caught.value)


def test_missing_logprobs_are_one_sentence_about_what_is_missing() -> None:
    refuse("returned no logprobs; audit a server that reports them", Toy(logprobs=False))
    refuse("returned no logprobs", Toy(), Toy(logprobs=False))
    refuse("reference at .* returned no top logprobs", Toy(), Toy(answer=only(completion(tops=None))))
    refuse("with 400: logprobs must be at most 0", Toy(most_logprobs=0))


def completion(tops: Any) -> bytes:
    logprobs = {"tokens": ["a"], "top_logprobs": tops}
    return json.dumps({"choices": [{"text": "a", "logprobs": logprobs}]}).encode()


def only(body: bytes | int) -> Callable[[str], bytes | int]:
    """This answer to completions, a proper list of models."""
    return lambda path: json.dumps({"data": [{"id": "toy"}]}).encode() if path == "/v1/models" else body


@pytest.mark.parametrize(
    ("body", "words"),
    [
        (b"<html>It works!</html>", "not JSON; is it OpenAI-compatible"),
        (b"\xff\xfe", "not JSON"),
        (b"[]", "without choices"),
        (b"{}", "without choices"),
        (b'{"choices": []}', "without choices"),
        (b'{"choices": {"a": 1}}', "in a form that is not in OpenAI's protocol"),
        (b'{"choices": [{"text": "a", "logprobs": {"tokens": 5}}]}', "in a form that"),
        (b'{"choices": [{"text": "a", "logprobs": []}]}', "in a form that"),
        (b'{"choices": [{"logprobs": {}}]}', "in a form that"),
        (b'{"choices": [{"text": "a", "logprobs": {"content": [{}]}}]}', "in a form that"),
        (completion([{"a": "many"}]), "in a form that"),
        (500, r"/v1/completions with 500: Internal Server Error\."),
        (404, r"with 404: Not Found\. Is it an OpenAI-compatible server"),
        (403, "with 403: Forbidden.*--api-key"),
    ],
)
def test_answers_that_were_not_promised_are_one_sentence(body: bytes | int, words: str) -> None:
    refuse(words, Toy(answer=only(body)))


def test_a_server_without_models_asks_for_a_name() -> None:
    refuse("lists no model; name one with --model", Toy(answer=lambda path: b"{}"))


def test_a_wrong_model_or_key_is_one_sentence() -> None:
    refuse(r"with 404: The model other does not exist\.", Toy(), model="other")
    refuse("with 401: Incorrect API key.*OPENAI_API_KEY", Toy(key="secret"), key="wrong")
    refuse("characters that cannot be sent", Toy(), key="wrong\nkey")


def test_the_key_of_the_environment_is_used(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OPENAI_API_KEY", "secret")
    assert word_of(Toy(key="secret"), Toy(key="secret"), samples=20) is Word.UNDECIDED


def test_a_server_that_does_not_answer_in_time_is_one_sentence() -> None:
    refuse("gave no answer to /v1/models within 0.1 seconds; give it longer", Toy(delay=0.4), timeout=0.1)


def test_a_refused_connection_is_one_sentence() -> None:
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))  # bound and not listening: nobody answers
        url = f"http://127.0.0.1:{taken.getsockname()[1]}"
        with pytest.raises(UsageError, match=rf"No server answers at {url}: Connection refused\."):
            audit_server(url, url, PROMPTS)


def test_a_server_that_hangs_up_is_one_sentence() -> None:
    refuse(r"No server answers at .*Server disconnected without sending a response\.", Toy(hang_up))


def hang_up(last: str, rng: random.Random) -> str:
    raise ConnectionAbortedError


@pytest.mark.parametrize(
    "url", ["", "localhost:8000", "ftp://host", "http://", "http://[::1", "http://host:port", "file:///etc/hosts"]
)
def test_what_is_no_address_is_one_sentence(url: str) -> None:
    with pytest.raises(UsageError, match="is not the address of a server"):
        Server(url)


@pytest.mark.parametrize("tail", ["", "/", "/v1", "/v1/", "/v1/completions"])
def test_an_address_may_end_as_people_write_it(tail: str) -> None:
    assert Server(f"http://host:8000{tail}").url == "http://host:8000"


@pytest.mark.parametrize(
    ("options", "words"),
    [
        ({"samples": 0}, "samples"),
        ({"length": 0}, "length"),
        ({"threads": 0}, "threads"),
        ({"per_request": 0}, "n must be"),
        ({"timeout": 0}, "timeout"),
        ({"false_alarm": 1}, "false-alarm"),
        ({"limit": 1}, "distance to detect"),
    ],
)
def test_numbers_that_make_no_sense_are_refused_before_anyone_is_asked(options: dict[str, Any], words: str) -> None:
    with pytest.raises(UsageError, match=words):
        audit_server("http://127.0.0.1:1", "http://127.0.0.1:1", PROMPTS, **options)
    with pytest.raises(UsageError, match="no prompts"):
        audit_server("http://127.0.0.1:1", "http://127.0.0.1:1", [])


# The command line


@pytest.mark.parametrize(
    ("step", "samples", "code", "word"),
    [
        (speculative, "1000", 0, "LOSSLESS"),
        (argmax_draft, "1000", 1, "NOT LOSSLESS"),
        (speculative, "10", 3, "UNDECIDED"),
    ],
)
def test_the_command_prints_the_word_and_exits_with_its_code(
    step: Callable[[str, random.Random], str], samples: str, code: int, word: str, tmp_path: Any
) -> None:
    (tmp_path / "prompts.txt").write_text("\n".join(PROMPTS))
    with serving(Toy(step)) as url, serving(Toy()) as truth:
        words = ["server", url, "--reference", truth, "--samples", samples, "--prompts", str(tmp_path / "prompts.txt")]
        shown = CliRunner().invoke(app, words)
        told = CliRunner().invoke(app, [*words, "--json"])
    assert shown.exit_code == told.exit_code == code, shown.output
    assert word in [line.strip() for line in shown.stdout.splitlines()]
    found = json.loads(told.stdout)
    assert told.stdout.count("\n") == 1
    assert found["finding"] == word
    assert found["audits"][0]["server"] == url
