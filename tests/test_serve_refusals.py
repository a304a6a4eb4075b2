"""What a server refuses: in OpenAI's form, with the right status, and without harm to anybody."""

from __future__ import annotations

import json
from collections.abc import Iterator
from typing import Any

import openai
import pytest

from branchwise.engine import Engine
from branchwise.errors import UnknownName
from branchwise.serve.settings import Limits
from tests.bad_inputs import BAD, LIMITS, PAGE, PLACE, Bad, table
from tests.serving import Brake, Served, eventually, raw_request, serving, tiny_llm


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


@pytest.mark.parametrize("bad", BAD, ids=lambda bad: bad.says)
def test_what_is_no_good_is_refused(served: Served, bad: Bad) -> None:
    assert_refused(bad.send(served), bad.status, param=bad.param, code=bad.code)


def test_the_page_shows_what_is_refused(served: Served) -> None:
    found = PLACE.search(PAGE.read_text())
    assert found is not None
    assert found[0] == found[1] + table(served) + found[2], "run python -m tests.bad_inputs --write"


def test_a_body_that_is_too_large_is_refused_whatever_its_headers_say(served: Served) -> None:
    head = b"POST /v1/completions HTTP/1.1\r\nHost: x\r\n"
    stated = raw_request(served.port, head + b"Content-Length: 99999999\r\n\r\n")
    assert stated.startswith(b"HTTP/1.1 413 ")
    chunk = b"1000\r\n" + b" " * 0x1000 + b"\r\n"
    unstated = raw_request(served.port, head + b"Transfer-Encoding: chunked\r\n\r\n" + 6 * chunk)
    assert unstated.startswith(b"HTTP/1.1 413 ")
    assert json.loads(unstated.split(b"\r\n\r\n", 1)[1])["error"]["code"] == "body_too_large"


def test_the_context_ends_a_text(served: Served) -> None:
    answer = served.post("/v1/completions", json={"prompt": "a" * 120, "max_tokens": 50, "temperature": 0})
    assert answer.json()["choices"][0]["finish_reason"] == "length"  # the context ends it


def test_fields_that_nobody_knows_are_ignored_and_named(served: Served) -> None:
    asked = {"prompt": "a", "max_tokens": 1, "best_guess": 1, "user": "me", "line\r\nbreak": 1, "tools": []}
    answer = served.post("/v1/completions", json=asked)
    assert answer.status_code == 200
    assert answer.headers["x-ignored-fields"] == "best_guess"


def test_a_name_that_only_the_engine_finds_unknown_is_refused_too(
    served: Served, monkeypatch: pytest.MonkeyPatch
) -> None:
    def submit(*given: object, **more: object) -> None:
        raise UnknownName("Unknown task 'lax'.")

    monkeypatch.setattr(Engine, "submit", submit)
    assert_refused(served.post("/v1/completions", json={"prompt": "a", "max_tokens": 1}), 400)


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
