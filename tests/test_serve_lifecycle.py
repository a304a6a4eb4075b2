"""The life of requests and of the server: who leaves frees a slot, who fails fails alone, and the end cuts no line."""

from __future__ import annotations

import json
import logging
import threading
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import httpx
import pytest
import torch

from branchwise.errors import ModelError
from branchwise.llm import LLM
from branchwise.serve.runner import MOST_FAILURES, State
from tests.serving import Brake, Served, eventually, free_slots_of, read_events, serving, tiny_llm

STREAM = {"prompt": "0101", "max_tokens": 100, "temperature": 0, "stream": True}


def open_stream(client: Served, **options: Any) -> tuple[httpx.Client, Any]:
    """A stream on a connection of its own, which can be closed under it."""
    own = httpx.Client(base_url=client.address, timeout=60, trust_env=False)
    return own, own.stream("POST", "/v1/completions", json={**STREAM, **options})


# Clients that leave


def test_a_client_that_leaves_its_stream_frees_its_slots() -> None:
    llm = tiny_llm(slots=2)
    brake = Brake(llm)
    with serving(lambda: llm) as client:
        brake.hold()
        own, stream = open_stream(client, n=2)
        with stream:
            brake.wait()
            assert len(client.server.runner.live) == 2
        own.close()
        eventually(lambda: not client.server.runner.live)  # while the pass is still held: nothing waits for it
        brake.release()
        eventually(lambda: free_slots_of(client) == 2)
        assert client.complete("a", max_tokens=1)["choices"]


def test_a_client_that_leaves_before_its_answer_frees_its_slot() -> None:
    llm = tiny_llm(slots=1)
    brake = Brake(llm)
    with serving(lambda: llm) as client:
        brake.hold()
        with pytest.raises(httpx.ReadTimeout):
            httpx.post(
                f"{client.address}/v1/completions", json={**STREAM, "stream": False}, timeout=0.5, trust_env=False
            )
        eventually(lambda: not client.server.runner.live)
        brake.release()
        eventually(lambda: free_slots_of(client) == 1)


def test_a_client_that_leaves_while_it_waits_never_gets_a_slot() -> None:
    llm = tiny_llm(slots=1)
    brake = Brake(llm)
    with serving(lambda: llm) as client:
        brake.hold()
        first, running = open_stream(client)
        with running as answer:
            brake.wait()
            second, waiting = open_stream(client, prompt="other")
            with waiting:
                assert client.server.runner.waiting == 1
            second.close()
            eventually(lambda: client.server.runner.waiting == 0)
            brake.release()
            events = read_events(answer)
        first.close()
        assert events[-1] == "[DONE]"


def test_choices_that_are_left_while_they_wait_for_the_rows_of_the_first_take_no_slot() -> None:
    llm = tiny_llm(slots=4)
    brake = Brake(llm)
    with serving(lambda: llm) as client:
        brake.hold()
        own, stream = open_stream(client, prompt="a prompt that is long enough to be shared", n=8)
        with stream:
            brake.wait()
            assert free_slots_of(client) == 3
        own.close()
        eventually(lambda: not client.server.runner.live)
        brake.release()
        eventually(lambda: free_slots_of(client) == 4)


# Failures


def test_a_text_that_cannot_be_decoded_fails_alone() -> None:
    llm = tiny_llm()
    decode, [poison] = llm.decode, llm.encode("!", raw=True)

    def failing(tokens: Sequence[int]) -> str:
        if poison in tokens:
            raise ValueError("no such text")
        return decode(tokens)

    llm.decode = failing  # type: ignore[method-assign]
    brake = Brake(llm)
    with serving(lambda: llm) as client, ThreadPoolExecutor(2) as pool:
        expected = client.complete("0101", max_tokens=20, temperature=0)["choices"][0]["text"]
        brake.hold()
        good = pool.submit(client.complete, "0101", max_tokens=20, temperature=0)
        bad = pool.submit(
            client.post, "/v1/completions", json={"prompt": "a", "max_tokens": 20, "logit_bias": {str(poison): 100}}
        )
        eventually(lambda: len(client.server.runner.live) == 2)
        brake.release()
        assert bad.result().status_code == 500
        assert bad.result().json()["error"]["code"] == "generation_failed"
        assert good.result()["choices"][0]["text"] == expected
        eventually(lambda: free_slots_of(client) == llm.engine.target.slots)


def test_a_text_without_memory_fails_alone() -> None:
    llm = tiny_llm()
    reserve = llm.engine.target.reserve

    def tight(sequence: Any) -> None:
        if len(sequence.tokens) == 7:
            raise torch.OutOfMemoryError
        reserve(sequence)

    llm.engine.target.reserve = tight  # type: ignore[method-assign]
    with serving(lambda: llm) as client, ThreadPoolExecutor(2) as pool:
        good = pool.submit(client.complete, "0101", max_tokens=30, temperature=0)
        bad = client.post("/v1/completions", json={"prompt": "1234567"})
        assert bad.status_code == 500
        assert "out of memory" in bad.json()["error"]["message"]
        assert good.result()["usage"]["completion_tokens"] == 30


def test_a_prompt_that_cannot_be_written_fails_alone() -> None:
    llm = tiny_llm()
    brake = Brake(llm)
    prefill = llm.engine.target.prefill

    def failing(chunks: Any) -> Any:
        if any(len(chunk.sequence.tokens) == 7 for chunk in chunks):
            raise RuntimeError("a broken kernel")
        return prefill(chunks)

    llm.engine.target.prefill = failing  # type: ignore[method-assign]
    with serving(lambda: llm) as client, ThreadPoolExecutor(2) as pool:
        brake.hold()
        good = pool.submit(client.complete, "0101", max_tokens=30, temperature=0)
        brake.wait()
        bad = pool.submit(client.post, "/v1/completions", json={"prompt": "1234567"})
        eventually(lambda: len(client.server.runner.live) == 2)
        brake.release()
        assert bad.result().status_code == 500
        assert good.result()["usage"]["completion_tokens"] == 30
        assert client.get("/ready").status_code == 200


def test_a_failed_step_fails_its_texts_and_the_server_goes_on() -> None:
    llm = tiny_llm(slots=1)
    brake = Brake(llm)
    with serving(lambda: llm) as client, ThreadPoolExecutor(2) as pool:
        brake.hold()
        running = pool.submit(client.post, "/v1/completions", json=STREAM)
        brake.wait()
        waiting = pool.submit(client.complete, "0101", max_tokens=5, temperature=0)
        eventually(lambda: len(client.server.runner.live) == 2)
        # The error of one step: the second text, which waits for the slot of the first, goes on.
        score = llm.engine.target.score

        def once(*arguments: Any) -> Any:
            llm.engine.target.score = score  # type: ignore[method-assign]
            raise RuntimeError("a broken step")

        llm.engine.target.score = once  # type: ignore[method-assign]
        brake.release()
        events = running.result().text.strip().split("\n\n")
        assert json.loads(events[-2].removeprefix("data: "))["error"]["code"] == "generation_failed"
        assert events[-1] == "data: [DONE]"
        assert waiting.result()["usage"]["completion_tokens"] == 5
        assert client.get("/health").status_code == 200
        assert free_slots_of(client) == 1


def test_a_server_whose_steps_keep_failing_is_no_longer_ready() -> None:
    llm = tiny_llm()
    brake = Brake(llm)
    with serving(lambda: llm) as client:
        brake.failure = RuntimeError("a broken device")
        for _ in range(MOST_FAILURES):
            assert client.get("/ready").status_code == 200
            assert client.post("/v1/completions", json={"prompt": "abc"}).status_code == 500
        eventually(lambda: client.server.runner.state is State.BROKEN)
        assert client.get("/ready").status_code == client.get("/health").status_code == 503
        refused = client.post("/v1/completions", json={"prompt": "abc"})
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "server_broken"


def test_an_engine_whose_slots_cannot_be_freed_is_given_up_at_once_and_left_alone() -> None:
    llm = tiny_llm()
    brake = Brake(llm)
    steps = []
    with serving(lambda: llm) as client:
        step, close = llm.engine.step, llm.engine.target.close

        def failing(sequence: Any) -> None:
            raise RuntimeError("a broken cache")

        llm.engine.target.close = failing  # type: ignore[method-assign]
        llm.engine.step = lambda: steps.append(1) or step()  # type: ignore[method-assign,func-returns-value]
        brake.failure = RuntimeError("a broken device")
        assert client.post("/v1/completions", json={"prompt": "abc"}).status_code == 500
        eventually(lambda: client.server.runner.state is State.BROKEN)
        assert client.get("/health").json() == {"status": "broken"}
        llm.engine.target.close = close  # type: ignore[method-assign]
    assert len(steps) == 1


def test_a_bug_in_the_handling_of_a_request_is_its_own_and_is_written_down(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    def failing(*_: Any) -> Any:
        raise RuntimeError("a bug\nwith two lines")

    caplog.set_level(logging.INFO, logger="branchwise.requests")
    with serving(tiny_llm) as client:
        with monkeypatch.context() as patch:
            patch.setattr("branchwise.serve.protocol.prompts.Prompts.order", failing)
            answer = client.post("/v1/completions", json={"prompt": "a"})
        assert answer.status_code == 500
        assert "bug" not in answer.text
        assert client.complete("a", max_tokens=1)["choices"]
    [line] = [line for line in caplog.messages if "RuntimeError" in line]
    assert json.loads(line)["message"] == "a bug\nwith two lines"


# The beginning and the end


def test_the_socket_is_open_before_the_model_is_loaded() -> None:
    go_on = threading.Event()

    def load() -> LLM:
        assert go_on.wait(60)
        return tiny_llm()

    with serving(load, wait=False) as client:
        assert client.get("/health").json() == {"status": "loading"}
        assert client.get("/ready").status_code == 503
        refused = client.post("/v1/completions", json={"prompt": "a"})
        assert refused.status_code == 503
        assert refused.headers["retry-after"]
        assert client.get("/v1/models").json()["data"][0]["id"] == "tiny"
        assert client.get("/metrics").status_code == 200
        go_on.set()
        eventually(lambda: client.get("/ready").status_code == 200)
        assert client.complete("a", max_tokens=1)["choices"]


def test_a_model_that_does_not_load_ends_the_server() -> None:
    def load() -> LLM:
        raise ModelError("There is no such model.")

    with serving(load, wait=False) as client:
        eventually(lambda: client.server.should_exit)
        assert str(client.server.runner.failure) == "There is no such model."


def drain(client: Served) -> None:
    """What a SIGTERM does."""
    loop = client.server._loop
    assert loop is not None
    loop.call_soon_threadsafe(client.server.drain)
    eventually(lambda: client.server.runner.state is State.DRAINING)


def test_a_server_that_ends_lets_running_texts_end_and_takes_no_new_ones() -> None:
    llm = tiny_llm()
    brake = Brake(llm)
    with serving(lambda: llm) as client, ThreadPoolExecutor(1) as pool:
        expected = client.complete("0101", max_tokens=100, temperature=0)["choices"][0]["text"]
        brake.hold()
        running = pool.submit(client.post, "/v1/completions", json=STREAM)
        brake.wait()
        drain(client)
        refused = client.post("/v1/completions", json={"prompt": "a"})
        assert refused.status_code == 503
        assert refused.json()["error"]["code"] == "server_draining"
        assert client.get("/ready").status_code == 503
        assert client.get("/health").status_code == 200
        brake.release()
        events = [event.removeprefix("data: ") for event in running.result().text.strip().split("\n\n")]
        assert events[-1] == "[DONE]"
        assert "".join(json.loads(event)["choices"][0]["text"] for event in events[:-1]) == expected
        eventually(lambda: client.server.should_exit)


def test_texts_that_outlast_the_grace_end_with_a_reason_and_done() -> None:
    llm = tiny_llm()
    target = llm.engine.target
    score = target.score

    def slow(*arguments: Any) -> Any:
        time.sleep(0.05)
        return score(*arguments)

    target.score = slow  # type: ignore[method-assign]
    with serving(lambda: llm, grace=0.2) as client:
        with client.stream("POST", "/v1/completions", json=STREAM) as answer:
            lines = answer.iter_lines()
            first = next(lines)
            drain(client)
            events = [first, *(line for line in lines if line)]
        assert events[-1] == "data: [DONE]"
        last = json.loads(events[-2].removeprefix("data: "))
        assert last["choices"][0]["finish_reason"] == "length"
        assert len(events) < 80
        eventually(lambda: client.server.should_exit)
        assert target.free_slots == target.slots
