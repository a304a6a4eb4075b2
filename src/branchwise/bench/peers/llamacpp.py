"""llama.cpp in this process, on the GGUF file that our weights come from.

xllamacpp wraps llama.cpp's own server; requests go to it by a call, not through the network. The weights stay
quantised, as its users run them, while ours were dequantised: the distribution is nearly, not exactly, the same.
"""

from __future__ import annotations

import importlib
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import torch

from branchwise.bench.contest import Answer, Asked, Peer
from branchwise.errors import ModelError, PairingError, UsageError
from branchwise.llm import LLM
from branchwise.models import ALIASES, gguf_path
from branchwise.models.gguf import read_header

SHORTEST_CONTEXT = 1024
"""the least context of each sequence, in tokens; a longer prompt doubles it, so that the file is rarely loaded again"""


class LlamaCpp(Peer):
    """Runs the prompts of a batch together, each in a slot of its own."""

    usage = "llama.cpp:PATH.gguf"

    def __init__(self, place: str | None, *, name: str, llm: LLM, threads: int | None) -> None:
        try:
            self._library: Any = importlib.import_module("xllamacpp")
        except ImportError:
            raise UsageError(
                "Peer 'llama.cpp' needs the package xllamacpp, which is not here. "
                "Install it with: pip install 'branchwise[peers]'"
            ) from None
        self.name = name
        self._path = _gguf(place or llm.source or llm.name, given=place is not None)
        its, ours = len(read_header(self._path).metadata.get("tokenizer.ggml.tokens", ())), llm.engine.target.vocabulary
        if its != ours:
            raise PairingError(
                f"{self._path} has a vocabulary of {its} tokens and {llm.name} one of {ours}; give the same model."
            )
        self._llm = llm
        # Its threads spin while they wait, so more threads than free cores are far slower than one.
        self._threads = threads or torch.get_num_threads()
        self._slots = self._context = 0
        self._server: Any = None

    def write(self, prompts: Sequence[Sequence[int]], asked: Asked) -> list[Answer]:
        self._make_room(len(prompts), max(map(len, prompts)) + asked.max_new_tokens)
        requests = [self._request(prompt, asked, number) for number, prompt in enumerate(prompts)]
        with ThreadPoolExecutor(len(requests)) as pool:
            start = time.perf_counter()
            found = list(pool.map(self._server.handle_completions, requests))
            seconds = time.perf_counter() - start
        return [self._answer(reply, asked, seconds) for reply in found]

    def _request(self, prompt: Sequence[int], asked: Asked, number: int) -> dict[str, Any]:
        request = {
            "prompt": list(prompt),
            "max_tokens": asked.max_new_tokens,
            "temperature": asked.temperature,
            "top_k": asked.top_k,
            "top_p": asked.top_p,
            "min_p": 0.0,
            "cache_prompt": False,  # as with all contestants, every request pays for its own prefill
            "return_tokens": True,
            "verbose": True,  # so that the answer contains its tokens
            "ignore_eos": not asked.stop_tokens,
            "logit_bias": [[token, False] for token in sorted(asked.forbidden)],
        }
        return request | ({"seed": asked.seeds[number] % (1 << 32)} if asked.seeds else {})

    def _answer(self, reply: dict[str, Any], asked: Asked, seconds: float) -> Answer:
        if "error" in reply:
            said = str(reply["error"].get("message", reply["error"])).rstrip(".")
            raise UsageError(f"llama.cpp refused a prompt: {said}.")
        choice, times = reply["choices"][0], reply.get("timings") or {}
        text, counted_by = str(choice["text"]), "ids"
        ids = (reply.get("__verbose") or {}).get("tokens")
        if ids is None:
            ids, counted_by = self._llm.tokenizer(text, add_special_tokens=False)["input_ids"], "retokenised"
        # llama.cpp stops at the end-of-text tokens of the file, which may differ from the stop tokens of the request.
        end = next((number for number, token in enumerate(ids, 1) if token in asked.stop_tokens), None)
        ended = end is not None or choice["finish_reason"] == "stop"
        phases = {"prefill": times.get("prompt_ms"), "decode": times.get("predicted_ms")}
        return Answer(
            ids=list(ids[:end]),
            finish_reason="stop" if ended else "length",
            seconds=seconds,
            text=None if end is not None and end < len(ids) else text,
            counted_by=counted_by,
            phases={phase: value / 1e3 for phase, value in phases.items() if value is not None},
        )

    def _make_room(self, slots: int, tokens: int) -> None:
        """Have a server with at least `slots` slots of `tokens` tokens each; loading the file again is not timed."""
        if slots <= self._slots and tokens <= self._context:
            return
        self._slots = max(slots, self._slots)
        # One token more than needed, because the server stops when a slot is full.
        self._context = max(SHORTEST_CONTEXT, self._context, 1 << tokens.bit_length())
        self._server = None  # frees the memory of the previous server
        params = self._library.CommonParams()
        params.model.path = str(self._path)
        params.n_parallel = self._slots
        params.n_ctx = self._slots * self._context
        params.cpuparams.n_threads = params.cpuparams_batch.n_threads = self._threads
        params.cache_ram_mib = 0
        params.verbosity = -1  # otherwise it writes to stderr
        params.ui = False
        if self._llm.model.device.type == "cpu":
            params.n_gpu_layers = 0
        try:
            self._server = self._library.Server(params)
        except RuntimeError:
            self._slots = self._context = 0
            raise ModelError(
                f"llama.cpp cannot load {self._path} with a context of {params.n_ctx} tokens; is there memory for it, "
                "and does this version of xllamacpp know the model?"
            ) from None


def _gguf(place: str, *, given: bool) -> Path:
    """The given file, else the file that the model was loaded from."""
    if place in ALIASES:
        return gguf_path(place)
    path = Path(place).expanduser()
    if path.is_file() and (given or path.suffix == ".gguf"):
        return path
    if given:
        raise ModelError(f"There is no file {place!r} for llama.cpp. Check the path.")
    raise UsageError(f"llama.cpp reads GGUF files, and {place} is none; give one as {LlamaCpp.usage}.")
