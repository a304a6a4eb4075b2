"""Compile and record at load what requests need, so that the first request is as fast as the second.

On a GPU the first steps of a process compile kernels and record CUDA graphs: for the prefill, for every size of tree
that the drafter tries in a batch of every size, for the verdict of greedy and of sampled texts. So short texts go
through the engine at load, alone and together, then some with longer prompts. The drafter forgets what it learned from
them, except for what steps cost. Compiled kernels stay in the user's cache.
"""

from __future__ import annotations

import gc
import os
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager, nullcontext
from dataclasses import replace

import torch

from branchwise.backends.base import TargetInfo
from branchwise.core.sampling import SamplingParams
from branchwise.cuda.graphs import recording_at_first_sight
from branchwise.cuda.inputs import BATCHES
from branchwise.draft.base import LearningDrafter
from branchwise.engine.engine import Engine
from branchwise.engine.request import Generation, Request
from branchwise.models.cache import cache_dir, read_notes, write_notes
from branchwise.progress import showing, silent

STEPS = 64
"""steps for each source of drafts: enough to try, record and time every size of tree"""
SAMPLED_STEPS = 12
"""the same for each of the `TEMPERATURES`"""
TEMPERATURES = (0.7, 1.0)
"""temperatures of sampled texts: unless a rule is a kernel of ours, its verdicts at 1 are another program"""
PROMPT_TOKENS = 24
LONGER_PROMPTS: tuple[tuple[int, ...], ...] = (
    *((tokens,) for tokens in (40, 100, 200, 400, 900)),
    *((40,) * texts for texts in (2, 4, 8)),
    *((tokens, *(60,) * 7) for tokens in (450, 900)),
    (90, 400, 1500),
    (60, 90) * 8,
    (200, 230) * 4,
    (350, 400) * 8,
    (350, 400) * 64,
)
"""tokens of prompts that are read together, at most as many as there are slots: other kernels read longer prompts or
more of them, shorter ones are padded, and a full batch asks once for the memory that it needs"""
TURNS = (1, 4, 16)
"""how many texts begin like an earlier one and join together"""
LONGER_STEPS = 4
"""steps after each of these groups of prompts"""
TIMES = "warmup.json"
"""file in the cache that says how long warm-up took the last time"""


def keep_compiled_kernels() -> None:
    """Let Triton and torch's compiler keep what they compile in the user's cache; call it before either is used."""
    for variable, folder in (("TRITON_CACHE_DIR", "triton"), ("TORCHINDUCTOR_CACHE_DIR", "inductor")):
        os.environ.setdefault(variable, str(cache_dir() / "kernels" / folder))


def warm_up(engine: Engine, progress: bool | None = None) -> float:
    """Let short texts go through the engine. Returns the seconds it took; 0.0 on a host, where nothing is recorded."""
    info = engine.target.info
    if not engine.pipelined:
        return 0.0
    start = time.perf_counter()
    sizes, turns = [size for size in BATCHES if size < info.slots] + [info.slots], max(1, len(engine.drafter.sources))
    rounds = [(texts, 0.0, turns * STEPS) for texts in sizes]
    rounds += [(1, warmth, turns * SAMPLED_STEPS) for warmth in TEMPERATURES]
    shown = showing() if progress is not False else nullcontext(silent)
    with shown as show, _forgetting(engine), recording_at_first_sight():
        last = _last_times().get(_key(engine))
        took = "" if last is None else f" (last time {last:.0f} s)"
        whole, done = sum(steps for _, _, steps in rounds), 0
        for texts, temperature, steps in rounds:
            if engine.guard is not None:
                engine.guard.rehearse(steps)
            for _ in _steps(engine, [PROMPT_TOKENS] * texts, temperature, steps):
                show(f"compiling and recording passes over {texts} text{'s' * (texts > 1)}{took}", done, whole)
                done += 1
        for lengths in LONGER_PROMPTS:
            for _ in _steps(engine, lengths[: info.slots], 0.0, LONGER_STEPS):
                show(f"reading longer prompts{took}", done, whole)
        for texts in TURNS:
            show(f"reading prompts that begin alike{took}", done, whole)
            _take_turns(engine, min(texts, info.slots))
    seconds = time.perf_counter() - start
    _remember(_key(engine), seconds)
    return seconds


def leave_to_itself() -> None:
    """Let the garbage collector skip all objects that exist by now. Libraries and compilers leave so many of them that
    a full collection takes most of a second, in the middle of a text or when the process ends. Skipped objects are
    never freed, so this is for processes that keep their model until they end."""
    gc.collect()
    gc.freeze()


def _steps(engine: Engine, lengths: Sequence[int], temperature: float, steps: int) -> Iterator[None]:
    """This many steps of texts with prompts of these `lengths`, which are cancelled in the end. Texts that fill a small
    context earlier are replaced."""
    info = engine.target.info
    generations: list[Generation] = []
    try:
        for _ in range(steps):
            if not generations or any(generation.finished for generation in generations):
                for generation in generations:
                    engine.cancel(generation)
                asked = [_request(info, number, temperature, length) for number, length in enumerate(lengths)]
                generations = [engine.submit(request) for request in asked]
            yield
            engine.step()
    finally:
        for generation in generations:
            engine.cancel(generation)


def _take_turns(engine: Engine, texts: int) -> None:
    """Some steps of this many texts that begin like an earlier text and inherit its rows."""
    first = _request(engine.target.info, 0, 0.0, PROMPT_TOKENS)
    further = [_request(engine.target.info, number, 0.0, 2).prompt for number in range(texts)]
    most = max(first.max_new_tokens - 2, 1)
    turns = [replace(first, prompt=first.prompt + tokens, max_new_tokens=most) for tokens in further]
    for requests in ([first], turns):
        generations = [engine.submit(request) for request in requests]
        try:
            for _ in range(LONGER_STEPS):
                engine.step()
        finally:
            for generation in generations:
                engine.cancel(generation)


def _request(info: TargetInfo, number: int, temperature: float, length: int) -> Request:
    length = min(length, info.context // 2)
    prompt = tuple((7 * place + 3 + number) % info.vocabulary for place in range(length))
    sampling = SamplingParams(temperature=temperature, seed=number)
    return Request(prompt, sampling, info.context - length, scope=object())  # every prompt is prefilled


@contextmanager
def _forgetting(engine: Engine) -> Iterator[None]:
    forget = memory_of(engine)
    try:
        yield
    finally:
        forget()


def memory_of(engine: Engine) -> Callable[[], None]:
    """A function that puts the drafter's memory back to what it is now, and lets the guard judge the drafter anew.
    Compiled and recorded programs stay, and so do the known times of steps."""
    parts = (engine.drafter, *engine.drafter.members)
    before = [(part, part.save(), part.texts) for part in parts if isinstance(part, LearningDrafter) and part.learns]

    def forget() -> None:
        engine.drop_prefixes()
        for part, state, texts in before:
            part.restore({name: tensor.clone() for name, tensor in state.items()})
            part.texts = texts  # the seeds of its draws go on from here
        engine.drafter.forget()
        if engine.guard is not None:
            engine.guard.forget()

    return forget


def _key(engine: Engine) -> str:
    info = engine.target.info
    device = torch.cuda.get_device_name(info.device) if info.device.type == "cuda" else info.device.type
    return f"{info.fingerprint} {info.dtype} {device} compile={info.execution.compile} {engine.drafter.name}"


def _last_times() -> dict[str, float]:
    return {key: float(value) for key, value in read_notes(cache_dir() / TIMES).items()}


def _remember(key: str, seconds: float) -> None:
    """Write a hint for the next time; nothing is lost if it cannot be written."""
    write_notes(cache_dir() / TIMES, _last_times() | {key: round(seconds, 1)})
