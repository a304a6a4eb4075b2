"""What a server refuses: in OpenAI's form, with the right status, and without harm to anybody."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from branchwise.serve.settings import Limits
from tests.serving import Brake, Served, eventually, raw_request, serving, tiny_llm

LIMITS = Limits(
    body_bytes=20_000, choices=4, stops=3, stop_letters=10, biases=5, prompts=3, new_tokens=100, requests=5, queue=6
)


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(lambda: tiny_llm(slots=2), limits=LIMITS) as client:
        yield client


def assert_refused(answer: Any, status: int, *, param: str | None = None, code: str | None = None) -> None:
    assert answer.status_code == status, answer.text
    error = answer.json()["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    if param is not None:
        assert error["param"] == param
    if code is not None:
        assert error["code"] == code


WRONG: dict[str, tuple[dict[str, Any], str]] = {
    "no prompt": ({"prompt": None}, "prompt"),
    "a prompt of the wrong type": ({"prompt": {"a": 1}}, "prompt"),
    "an empty prompt": ({"prompt": ""}, ""),
    "an empty list": ({"prompt": []}, "prompt"),
    "too many prompts": ({"prompt": ["a"] * 4}, "prompt"),
    "a token outside the vocabulary": ({"prompt": [1, 999_999]}, "prompt"),
    "a negative token": ({"prompt": [1, -1]}, "prompt"),
    "a temperature that is text": ({"temperature": "hot"}, "temperature"),
    "a negative temperature": ({"temperature": -1}, "temperature"),
    "an infinite temperature": ({"temperature": 1e999}, "temperature"),
    "top_p of zero": ({"top_p": 0}, "top_p"),
    "a huge top_k": ({"top_k": 10**30}, "top_k"),
    "max_tokens of zero": ({"max_tokens": 0}, "max_tokens"),
    "max_tokens that are no whole number": ({"max_tokens": 1.5}, "max_tokens"),
    "too many tokens": ({"max_tokens": 101}, "max_tokens"),
    "true for a number": ({"n": True}, "n"),
    "too many choices": ({"n": 5}, "n"),
    "more texts than may wait": ({"n": 4, "prompt": ["a", "b"]}, "n"),
    "too many stop strings": ({"stop": ["a", "b", "c", "d"]}, "stop"),
    "a long stop string": ({"stop": "a" * 11}, "stop"),
    "an empty stop string": ({"stop": ["a", ""]}, "stop"),
    "a bias of a word": ({"logit_bias": {"word": 1}}, "logit_bias"),
    "a bias of a token that is not there": ({"logit_bias": {"99999": 1}}, ""),
    "too many biases": ({"logit_bias": {str(token): 1 for token in range(6)}}, "logit_bias"),
    "a penalty that would divide by nothing": ({"repetition_penalty": 1e-300}, "repetition_penalty"),
    "too many alternatives": ({"logprobs": 21}, "logprobs"),
    "the alternatives of a chat": ({"top_logprobs": 2}, "top_logprobs"),
    "a suffix": ({"suffix": "x"}, "suffix"),
    "best of several": ({"best_of": 3}, "best_of"),
    "options of a stream without one": ({"stream_options": {"include_usage": True}}, "stream_options"),
}


@pytest.mark.parametrize(("wrong", "param"), WRONG.values(), ids=WRONG)
def test_a_wrong_value_is_refused_with_the_field_it_is_in(served: Served, wrong: dict[str, Any], param: str) -> None:
    asked = {"model": "tiny", "prompt": "hello", **wrong}
    answer = served.post("/v1/completions", content=json.dumps(asked))
    assert_refused(answer, 400, param=param or None)


@pytest.mark.parametrize(
    "wrong",
    [
        {"messages": []},
        {"messages": "hello"},
        {"messages": [{"role": "king", "content": "a"}]},
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        {"messages": [{"role": "user", "content": ""}]},
        {"top_logprobs": 21, "logprobs": True},
        {"top_logprobs": 3},
        {"tools": [{"type": "function", "function": {"name": "f"}}]},
    ],
)
def test_a_wrong_chat_is_refused(served: Served, wrong: dict[str, Any]) -> None:
    asked = {"messages": [{"role": "user", "content": "a"}], **wrong}
    assert_refused(served.post("/v1/chat/completions", json=asked), 400)


@pytest.mark.parametrize(
    "body",
    [b"", b"{", b"[]", b"null", b'{"prompt": "\xff"}', b'{"prompt": "\\ud800"}', b'{"prompt": NaN}', b"[" * 10_000],
    ids=["nothing", "half", "a list", "null", "bytes that are no UTF-8", "half a character", "NaN", "deep"],
)
def test_a_body_that_is_no_request_is_refused(served: Served, body: bytes) -> None:
    assert_refused(served.post("/v1/completions", content=body), 400)


def test_a_body_that_is_too_large_is_refused_whatever_its_headers_say(served: Served) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
    stated = raw_request(served.port, head + b"Content-Length: 99999999\r\n\r\n")
    assert stated.startswith(b"HTTP/1.1 413 ")
    chunk = b"1000\r\n" + b" " * 0x1000 + b"\r\n"
    unstated = raw_request(served.port, head + b"Transfer-Encoding: chunked\r\n\r\n" + 6 * chunk)
    assert unstated.startswith(b"HTTP/1.1 413 ")
    assert json.loads(unstated.split(b"\r\n\r\n", 1)[1])["error"]["code"] == "body_too_large"


def test_a_prompt_beyond_the_context_is_refused_with_the_code_of_openai(served: Served) -> None:
    answer = served.post("/v1/completions", json={"prompt": "a" * 200})
    assert_refused(answer, 400, code="context_length_exceeded")
    answer = served.post("/v1/completions", json={"prompt": "a" * 120, "max_tokens": 50, "temperature": 0})
    assert answer.json()["choices"][0]["finish_reason"] == "length"  # the context ends it


def test_paths_methods_and_models_that_are_not_there(served: Served) -> None:
    assert_refused(served.get("/v1/nothing"), 404)
    assert_refused(served.get("/../../etc/passwd"), 404)
    assert_refused(served.get("/v1/completions"), 405)
    assert_refused(served.post("/v1/completions", json={"model": "other", "prompt": "a"}), 404, code="model_not_found")
    assert_refused(served.get("/v1/models/other"), 404, code="model_not_found")


def test_fields_that_nobody_knows_are_ignored_and_named(served: Served) -> None:
    asked = {"prompt": "a", "max_tokens": 1, "best_guess": 1, "user": "me", "line\r\nbreak": 1, "tools": []}
    answer = served.post("/v1/completions", json=asked)
    assert answer.status_code == 200
    assert answer.headers["x-ignored-fields"] == "best_guess"


def test_the_openai_client_raises_its_own_errors(served: Served) -> None:
    with openai.OpenAI(base_url=f"{served.address}/v1", api_key="none", max_retries=0) as client:
        with pytest.raises(openai.BadRequestError, match="temperature"):
            client.completions.create(model="tiny", prompt="a", temperature=-1)
        with pytest.raises(openai.NotFoundError, match="no such model"):
            client.completions.create(model="other", prompt="a")


def test_a_full_queue_and_a_full_server_say_when_to_come_back() -> None:
    llm = tiny_llm(slots=1)
    brake = Brake(llm)
    with serving(lambda: llm, limits=Limits(queue=2, requests=3)) as client:
        brake.hold()
        asked = {"prompt": "a", "max_tokens": 2, "stream": True}
        with client.stream("POST", "/v1/completions", json=asked) as first:
            brake.wait()
            with client.stream("POST", "/v1/completions", json={**asked, "n": 2}) as second:
                full = client.post("/v1/completions", json=asked)
                assert_refused(full, 429, code="queue_full")
                assert full.headers["retry-after"] == "1"
                with client.stream("POST", "/v1/completions", json={**asked, "prompt": "x"}) as third:
                    assert third.status_code == 429  # the queue again
                brake.release()
                assert (len(first.read()), len(second.read())) > (0, 0)
        brake.hold()
        streams = [client.stream("POST", "/v1/completions", json=asked) for _ in range(3)]
        for stream in streams:
            assert stream.__enter__().status_code == 200
        assert_refused(client.post("/v1/completions", json=asked), 429, code="too_many_requests")
        brake.release()
        for stream in streams:
            stream.__exit__(None, None, None)
        eventually(lambda: client.server.door.inside == 0)
        assert client.complete("a", max_tokens=1)["choices"]


def test_a_server_with_keys_lets_nobody_else_in() -> None:
    llm = tiny_llm()
    with serving(lambda: llm, keys=("first", "second")) as client:
        asked = {"prompt": "a", "max_tokens": 1}
        for header in ("", "Bearer", "Bearer wrong", "Basic first", "first", "Bearer firs", "Bearer first2"):
            answer = client.post("/v1/completions", json=asked, headers={"Authorization": header})
            assert_refused(answer, 401, code="invalid_api_key")
        assert_refused(client.get("/v1/models"), 401)
        assert_refused(client.post("/tokenize", json={"prompt": "a"}), 401)
        for key in ("first", "second"):
            answer = client.post("/v1/completions", json=asked, headers={"Authorization": f"Bearer {key}"})
            assert answer.status_code == 200
        assert client.get("/health").status_code == client.get("/metrics").status_code == 200


@pytest.mark.parametrize("allowed", [False, True])
def test_a_page_of_another_origin_may_ask_only_if_it_is_allowed(allowed: bool) -> None:
    llm = tiny_llm()
    with serving(lambda: llm, keys=("key",), origins=("https://here.example",) if allowed else ()) as client:
        asks = {"Origin": "https://here.example", "Access-Control-Request-Method": "POST"}
        told = client.options("/v1/completions", headers=asks)
        assert (told.headers.get("access-control-allow-origin") == "https://here.example") is allowed
        other = client.options("/v1/completions", headers={**asks, "Origin": "https://there.example"})
        assert "access-control-allow-origin" not in other.headers
