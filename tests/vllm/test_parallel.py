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


def answers(process: subprocess.Popen[str]) -> tuple[list[list[int]], list[int], list[Any]]:
    """Greedy texts, the lengths of sampled ones, and by rank what was drafted in every step."""
    printed, _ = process.communicate(timeout=570)
    found = [line for line in printed.splitlines() if line.startswith("TEXTS ")]
    assert found, printed[-3000:]
    greedy, lengths, drafted = json.loads(found[0].removeprefix("TEXTS "))
    return greedy, lengths, drafted


def test_a_tensor_parallel_group_writes_what_one_rank_writes(plain: Any, model: Path) -> None:
    more = {"tensor_parallel_size": 2, "distributed_executor_backend": "mp"}
    process = started(model, more, PROMPTS, VLLM_ALLOW_INSECURE_SERIALIZATION="1")  # functions go to the workers
    greedy, lengths, drafted = answers(process)
    assert greedy == texts(plain, PROMPTS, params())
    assert set(lengths) == {24}
    assert len(drafted) == 2
    assert drafted[0] == drafted[1], "the ranks drafted different tokens"
    assert sum(len(chain) for step in drafted[0] for chain in step) > 100


def test_two_data_parallel_engines_write_what_one_writes(plain: Any, model: Path) -> None:
    more = {"data_parallel_size": 2}
    greedy, lengths, _ = answers(started(model, more, PROMPTS, VLLM_ENABLE_V1_MULTIPROCESSING="1"))
    assert greedy == texts(plain, PROMPTS, params())
    assert set(lengths) == {24}
