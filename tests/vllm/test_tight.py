"""Engines that are short of room: prompts in chunks, and requests that are preempted with drafts.

The file is the last one in order: an engine that ends takes what all engines of a process share along.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.vllm.engines import PROMPT, PROPOSER, Law, engine, params, runner_of, texts, use, warped


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
    truth = texts(plain, prompts, sampling)
    assert texts(llm, prompts, sampling) == truth
    assert texts(llm, prompts, sampling) == truth  # where prefixes are cached, from the cache
    tight = "num_gpu_blocks_override" in more
    assert bool(counted(llm, "num_preemptions")) == tight
    assert bool(counted(llm, "prefix_cache_hits")) != tight
    llm.llm_engine.step()
    assert not runner_of(llm).drafter.texts.open
    if tight:
        drawn_texts_keep_their_law(llm, model)


def drawn_texts_keep_their_law(llm: Any, model: Path) -> None:
    """A request is preempted where its text grows into another block of the cache, and loses a chain that was drawn."""
    use(llm, share="all", floor=0.01, chain="drawn")
    before, prompt = counted(llm, "num_preemptions"), (PROMPT * 3)[:31]
    found = texts(llm, [prompt] * 600, params(temperature=0.7, max_tokens=3))
    assert counted(llm, "num_preemptions") > before
    assert Law(model, prompt, 3, warped(0.7)).p_value(found) > 1e-4


def counted(llm: Any, name: str) -> float:
    return sum(metric.value for metric in llm.get_metrics() if metric.name == f"vllm:{name}")
