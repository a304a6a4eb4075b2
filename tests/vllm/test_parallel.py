"""Several ranks and engines: a tensor-parallel group drafts alike, data-parallel engines each for themselves."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from pathlib import Path
from typing import Any

from tests.vllm.engines import PROMPT, params, texts

ROOT = Path(__file__).parents[2]
PROMPTS = [[number, *PROMPT] for number in range(6)]


def started(model: Path, more: dict[str, Any], prompts: list[list[int]], **environment: str) -> subprocess.Popen[str]:
    command = [sys.executable, "-m", "tests.vllm.parallel", str(model), json.dumps(more), json.dumps(prompts)]
    known = {**os.environ, "OMP_NUM_THREADS": "1", **environment}
    return subprocess.Popen(command, cwd=ROOT, env=known, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True)


def answers(process: subprocess.Popen[str]) -> tuple[list[list[int]], list[int]]:
    printed, _ = process.communicate(timeout=570)
    found = [line for line in printed.splitlines() if line.startswith("TEXTS ")]
    assert found, printed[-3000:]
    greedy, lengths = json.loads(found[0].removeprefix("TEXTS "))
    return greedy, lengths


def test_a_tensor_parallel_group_writes_what_one_rank_writes(plain: Any, model: Path) -> None:
    more = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    greedy, lengths = answers(started(model, more, PROMPTS))
    assert greedy == texts(plain, PROMPTS, params())
    assert set(lengths) == {24}


def test_two_data_parallel_engines_each_write_their_part(plain: Any, model: Path) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    together = {"VLLM_DP_SIZE": "2", "VLLM_DP_MASTER_IP": "127.0.0.1", "VLLM_DP_MASTER_PORT": port}
    halves = PROMPTS[:3], PROMPTS[3:]
    processes = [
        started(model, {}, half, VLLM_DP_RANK=str(rank), VLLM_DP_RANK_LOCAL=str(rank), **together)
        for rank, half in enumerate(halves)
    ]
    found = [answers(process) for process in processes]
    assert found[0][0] + found[1][0] == texts(plain, PROMPTS, params())
    assert {length for _, lengths in found for length in lengths} == {24}
