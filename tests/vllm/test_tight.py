"""Engines that are short of room: prompts in chunks, and requests that are preempted with drafts.

The file is the last one in order: an engine that ends takes what all engines of a process share along.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.vllm.engines import PROMPT, PROPOSER, engine, params, runner_of, texts


@pytest.mark.parametrize(
    "more",
    [
        {"enable_prefix_caching": True, "max_num_batched_tokens": 16, "max_num_seqs": 4},
        {"num_gpu_blocks_override": 14, "enable_prefix_caching": False},
    ],
    ids=["chunked prefill and prefix caching", "preemption"],
)
def test_chunks_and_preemption_in_mid_draft_change_no_text(plain: Any, model: Path, more: dict[str, Any]) -> None:
    llm = engine(model, {"model": PROPOSER}, {"share": "all", "floor": 0.01}, **more)
    sampling = params(max_tokens=60)
    prompts = [[number, *PROMPT * 3] for number in range(8)]
    assert texts(llm, prompts, sampling) == texts(plain, prompts, sampling)
    preempted = next(metric.value for metric in llm.get_metrics() if metric.name == "vllm:num_preemptions")
    assert bool(preempted) == ("num_gpu_blocks_override" in more)
    llm.llm_engine.step()
    assert not runner_of(llm).drafter.texts.open
