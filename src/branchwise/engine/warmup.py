"""Compile and record at load what a request needs, so that the first request runs at the speed of the second.

On a GPU the first steps of a process compile kernels and record CUDA graphs: of the prefill, of every size of tree that
the drafter tries, of the verdict for greedy and for sampled texts. So a few short texts go through the engine at load,
and the drafter forgets what it learned from them. Compiled kernels stay in the user's cache.
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager, nullcontext, suppress

import torch

from branchwise.core.sampling import SamplingParams
from branchwise.draft.base import LearningDrafter
from branchwise.engine.engine import Engine
from branchwise.engine.request import Request
from branchwise.errors import ModelError
from branchwise.models.cache import cache_dir, workspace
from branchwise.progress import showing, silent

GREEDY_TOKENS = 96
"""enough steps for every size of tree to be tried, recorded and timed"""
SAMPLED_TOKENS = 16
TEMPERATURES = (0.0, 0.7, 1.0)
"""one text each: the verdicts of greedy texts, of tempered ones and of those at temperature 1 are different programs"""
PROMPT_TOKENS = 24
TIMES = "warmup.json"
"""in the cache: how long it took the last time"""


def keep_compiled_kernels() -> None:
    """Let Triton and the compiler of torch keep what they compile in the user's cache; asked before either is used."""
    for variable, folder in (("TRITON_CACHE_DIR", "triton"), ("TORCHINDUCTOR_CACHE_DIR", "inductor")):
        os.environ.setdefault(variable, str(cache_dir() / "kernels" / folder))


def warm_up(engine: Engine, progress: bool | None = None) -> float:
    """Let short texts go through the engine; returns the seconds it took, 0.0 on a host, where nothing is recorded."""
    info = engine.target.info
    if not engine.pipelined:
        return 0.0
    start = time.perf_counter()
    with showing() if progress is not False else nullcontext(silent) as show, _forgetting(engine):
        last = _last_times().get(_key(engine))
        took = "" if last is None else f" (last time {last:.0f} s)"
        whole = GREEDY_TOKENS + SAMPLED_TOKENS * (len(TEMPERATURES) - 1)
        done = 0
        for temperature in TEMPERATURES:
            tokens = GREEDY_TOKENS if temperature == 0 else SAMPLED_TOKENS
            tokens = min(tokens, info.context - PROMPT_TOKENS - 1)
            prompt = tuple((7 * number + 3) % info.vocabulary for number in range(PROMPT_TOKENS))
            generation = engine.submit(Request(prompt, SamplingParams(temperature=temperature, seed=0), tokens))
            try:
                while not generation.finished:
                    show(f"compiling and recording passes{took}", done + len(generation.token_ids), whole)
                    engine.step()
            finally:
                engine.cancel(generation)
            done += tokens
    seconds = time.perf_counter() - start
    _remember(_key(engine), seconds)
    return seconds


@contextmanager
def _forgetting(engine: Engine) -> Iterator[None]:
    """Let the drafter know afterwards what it knew before."""
    parts = (engine.drafter, *engine.drafter.members)
    before = [(part, part.save()) for part in parts if isinstance(part, LearningDrafter) and part.learns]
    try:
        yield
    finally:
        for part, state in before:
            part.restore(state)


def _key(engine: Engine) -> str:
    info = engine.target.info
    device = torch.cuda.get_device_name(info.device) if info.device.type == "cuda" else info.device.type
    return f"{info.fingerprint} {info.dtype} {device} compile={info.execution.compile} {engine.drafter.name}"


def _last_times() -> dict[str, float]:
    try:
        found = json.loads((cache_dir() / TIMES).read_text())
    except (OSError, ValueError):
        return {}
    return {str(key): float(value) for key, value in found.items()} if isinstance(found, dict) else {}


def _remember(key: str, seconds: float) -> None:
    """A hint for the next time: if it cannot be written, nothing is lost."""
    with suppress(ModelError), workspace() as work:
        (work / TIMES).write_text(json.dumps(_last_times() | {key: round(seconds, 1)}, indent=1))
        os.replace(work / TIMES, cache_dir() / TIMES)
