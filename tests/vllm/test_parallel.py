"""Several ranks and engines: a tensor-parallel group drafts alike, data-parallel engines each for themselves."""

from __future__ import annotations

import json
import os
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


def test_two_data_parallel_engines_write_what_one_writes(plain: Any, model: Path) -> None:
    more = {"data_parallel_size": 2}
    greedy, lengths = answers(started(model, more, PROMPTS, VLLM_ENABLE_V1_MULTIPROCESSING="1"))
    assert greedy == texts(plain, PROMPTS, params())
    assert set(lengths) == {24}
