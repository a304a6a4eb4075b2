"""A server after many requests of every kind is as it was: its memory, its slots, its threads, its tasks."""

from __future__ import annotations

import asyncio
import gc
import json
import socket
import threading
from collections import Counter
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from itertools import cycle, islice

import httpx
import psutil
import pytest

from branchwise.core.sequence import SequenceState
from branchwise.engine import Generation
from branchwise.serve.web.answering import Answering
from branchwise.serve.writing import Writing
from tests.serving import Served, eventually, free_slots_of, serving, tiny_llm

LONG = "a prompt of more than thirty-two tokens, whose rows are worth a copy"
MOST_GROWTH = 16 << 20
"""bytes that the process may grow by, which is more than allocators hold back and less than a leak would take"""
WATCHED = (Generation, SequenceState, Writing, Answering, asyncio.Task)


def whole(client: httpx.Client, number: int) -> int:
    asked = {"prompt": f"text {number}", "max_tokens": 1 + number % 8, "seed": number, "logprobs": number % 3}
    return client.post("/v1/completions", json=asked).status_code


def several(client: httpx.Client, number: int) -> int:
    asked = {"prompt": [LONG, f"and {number}"], "n": 2, "max_tokens": 4, "stop": "e"}
    return client.post("/v1/completions", json=asked).status_code


def formed(client: httpx.Client, number: int) -> int:
    asked = {"prompt": "a", "max_tokens": 8, "guided_regex": f"[ab]{{1,{1 + number % 9}}}"}
    return client.post("/v1/completions", json=asked).status_code


def streamed(client: httpx.Client, number: int) -> int:
    chat = {"messages": [{"role": "user", "content": f"hello {number}"}], "max_tokens": 6, "stream": True}
    with client.stream("POST", "/v1/chat/completions", json=chat) as answer:
        assert answer.read().endswith(b"data: [DONE]\n\n")
        return answer.status_code


def left_while_streamed(client: httpx.Client, number: int) -> int:
    asked = {"prompt": "a b c", "max_tokens": 100, "stream": True, "ignore_eos": True, "n": 1 + number % 2}
    with client.stream("POST", "/v1/completions", json=asked) as answer:
        next(answer.iter_bytes())
        return answer.status_code


def left_while_waiting(client: httpx.Client, number: int) -> int:
    """A client that does not stay for its answer."""
    body = json.dumps({"prompt": f"gone {number}", "max_tokens": 100, "ignore_eos": True}).encode()
    head = f"POST /v1/completions HTTP/1.1\r\nHost: x\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with socket.create_connection((client.base_url.host, client.base_url.port or 80)) as connection:
        connection.sendall(head + body)
    return 499


def refused(client: httpx.Client, number: int) -> int:
    wrong = [{"prompt": ""}, {"prompt": "a", "n": 0}, {"model": "other", "prompt": "a"}, {"prompt": "a" * 500}]
    return client.post("/v1/completions", json=wrong[number % len(wrong)]).status_code


def counted(client: httpx.Client, number: int) -> int:
    return client.post("/tokenize", json={"prompt": f"text {number}", "return_token_strs": True}).status_code


KINDS: list[Callable[[httpx.Client, int], int]] = [
    whole,
    streamed,
    refused,
    several,
    left_while_streamed,
    formed,
    left_while_waiting,
    counted,
]


def send(served: Served, requests: int) -> Counter[int]:
    """Requests of all kinds, four at a time."""
    kinds = list(enumerate(islice(cycle(KINDS), requests)))
    with httpx.Client(base_url=served.address, timeout=60, trust_env=False) as client, ThreadPoolExecutor(4) as pool:
        return Counter(pool.map(lambda job: job[1](client, job[0] // len(KINDS)), kinds))


def standing(served: Served) -> dict[str, int]:
    """What a server holds while nobody asks for anything."""
    runner, server = served.server.runner, served.server
    eventually(lambda: not runner.live and not runner.engine.busy and server.door.inside == 0)
    eventually(lambda: not server.server_state.connections)
    gc.collect()
    alive = Counter(type(one) for one in gc.get_objects())
    return {kind.__name__: alive[kind] for kind in WATCHED} | {
        "threads": threading.active_count(),
        "tasks": len(server.server_state.tasks),
        "slots": free_slots_of(served),
    }


@pytest.mark.parametrize("requests", [120, 2000])
def test_a_server_is_as_it_was_after_many_requests(requests: int) -> None:
    llm = tiny_llm()
    with serving(lambda: llm) as served:
        first = send(served, 80)  # caches fill, threads begin
        assert set(first) == {200, 400, 404, 499}
        before, memory = standing(served), psutil.Process().memory_info().rss
        assert before["slots"] == llm.engine.target.slots
        text = served.complete("to be", max_tokens=20, temperature=0)["choices"]
        served.close()
        found = send(served, requests)
        assert sum(found.values()) == requests
        assert set(found) == {200, 400, 404, 499}
        assert standing(served) == before
        assert psutil.Process().memory_info().rss - memory < MOST_GROWTH
        with httpx.Client(base_url=served.address, trust_env=False) as client:
            asked = {"prompt": "to be", "max_tokens": 20, "temperature": 0}
            assert client.post("/v1/completions", json=asked).json()["choices"] == text
