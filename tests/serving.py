"""A server of a tiny model on this machine, for tests: a real socket, the event loop in a thread."""

from __future__ import annotations

import socket
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import httpx
from tokenizers import AddedToken, Tokenizer, decoders, models, pre_tokenizers
from transformers import LlamaConfig, PreTrainedTokenizerFast

from branchwise.backends.transformers.target import TransformersTarget
from branchwise.draft import build_drafter
from branchwise.draft.base import Drafter
from branchwise.engine import Engine
from branchwise.llm import LLM
from branchwise.serve.runner import State
from branchwise.serve.server import Server, listen
from branchwise.serve.settings import Limits, Settings
from branchwise.verify import VERIFIERS
from tests.conformance.architectures import COMMON, build

SPECIAL = ["<|end|>", "<|start|>"]
TEMPLATE = "{% for m in messages %}<|start|>{{ m.role }}\n{{ m.content }}<|end|>{% endfor %}<|start|>assistant:"
ALPHABET = sorted(pre_tokenizers.ByteLevel.alphabet())


def byte_tokenizer() -> PreTrainedTokenizerFast:
    """One token a byte, and two special ones."""
    vocabulary = {letter: number for number, letter in enumerate([*SPECIAL, *ALPHABET])}
    made = Tokenizer(models.BPE(vocabulary, merges=[]))
    made.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    made.decoder = decoders.ByteLevel()
    made.add_special_tokens([AddedToken(token, special=True) for token in SPECIAL])
    return PreTrainedTokenizerFast(
        tokenizer_object=made, eos_token="<|end|>", chat_template=TEMPLATE, clean_up_tokenization_spaces=False
    )


def tiny_llm(
    draft: str | Drafter = "ngram", *, slots: int = 4, context: int = 128, prefix_cache: int | bool = True
) -> LLM:
    """A random model that writes bytes, in float32."""
    size = {"vocab_size": len(SPECIAL) + len(ALPHABET), "num_hidden_layers": 2, "max_position_embeddings": context}
    size |= {"eos_token_id": 0, "pad_token_id": 0}
    model = build(LlamaConfig(**(COMMON | size)))
    model.get_output_embeddings().weight.mul_(3.0)  # distributions that have an opinion
    model.get_output_embeddings().weight[:2].mul_(0.1)  # and texts that seldom end
    target = TransformersTarget(model, slots=slots, max_nodes=32, context=context)
    drafter = build_drafter(draft) if isinstance(draft, str) else draft
    engine = Engine(target, drafter, VERIFIERS.build("match"), prefix_cache=prefix_cache)
    return LLM("tiny", model, byte_tokenizer(), engine)


class Served(httpx.Client):
    """A client of a server that runs in this process."""

    def __init__(self, server: Server, port: int) -> None:
        super().__init__(base_url=f"http://127.0.0.1:{port}", timeout=60, trust_env=False)
        self.server = server
        self.port = port

    @property
    def llm(self) -> LLM:
        assert self.server.runner.llm is not None
        return self.server.runner.llm

    @property
    def address(self) -> str:
        return f"http://127.0.0.1:{self.port}"

    def complete(self, prompt: Any, **options: Any) -> Any:
        answer = self.post("/v1/completions", json={"model": "tiny", "prompt": prompt, **options})
        assert answer.status_code == 200, answer.text
        return answer.json()


@contextmanager
def serving(
    load: Callable[[], LLM], *, wait: bool = True, grace: float = 30.0, limits: Limits | None = None, **settings: Any
) -> Iterator[Served]:
    """A server of what `load` loads, ended at the end; with `wait` once it is ready."""
    server = Server(load, Settings(("tiny",), limits or Limits(), grace=grace, **settings))
    loaded = threading.Event()
    server.on_loaded = loaded.set
    listening = listen("127.0.0.1", 0)
    port = listening.getsockname()[1]  # a server that ends at once closes it
    thread = threading.Thread(target=server.run, args=([listening],))
    thread.start()
    try:
        with Served(server, port) as client:
            if wait:
                assert loaded.wait(60)
                assert server.runner.state is State.READY
            yield client
    finally:
        server.should_exit = True
        thread.join(30)
        assert not thread.is_alive()
        server.runner.stop(30)


def free_slots_of(client: Served) -> int:
    return client.llm.engine.target.free_slots


def read_events(answer: httpx.Response) -> list[str]:
    """The data of the events of a stream."""
    return [line.removeprefix("data: ") for line in answer.iter_lines() if line]


def raw_request(port: int, data: bytes) -> bytes:
    """What the server answers to bytes that are no proper request."""
    with socket.create_connection(("127.0.0.1", port), timeout=30) as connection:
        connection.sendall(data)
        connection.shutdown(socket.SHUT_WR)
        found = b""
        while chunk := connection.recv(65536):
            found += chunk
        return found


class Brake:
    """Holds the passes of a model back while a test looks at what waits; each pass asks it first."""

    def __init__(self, llm: LLM) -> None:
        self._go = threading.Event()
        self._go.set()
        self._reached = threading.Event()
        self.failure: Exception | None = None
        """raised by the passes to come, if there is one"""
        target = llm.engine.target
        score = target.score

        def braked(*arguments: Any) -> Any:
            self._reached.set()
            assert self._go.wait(60)
            if self.failure is not None:
                raise self.failure
            return score(*arguments)

        target.score = braked  # type: ignore[method-assign]

    def hold(self) -> None:
        self._go.clear()
        self._reached.clear()

    def wait(self) -> None:
        """Until a pass is being held."""
        assert self._reached.wait(60)

    def release(self) -> None:
        self._go.set()


def eventually(holds: Callable[[], bool]) -> None:
    """Wait for something that another thread brings about."""
    end = time.monotonic() + 60
    while not holds():
        assert time.monotonic() < end, "it did not come about"
        time.sleep(0.005)
