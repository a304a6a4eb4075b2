"""Run by `test_parallel.py` in processes of its own: writes texts with several workers or engines.

python -m tests.vllm.parallel MODEL '{"tensor_parallel_size": 2}' '[[1, 2], [3]]'
"""

from __future__ import annotations

import asyncio
import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.vllm.engines import PROPOSER, arguments, engine, params, texts

OPTIONS = {"share": "all", "floor": 0.01, "chain": "drawn"}


def note(worker: Any) -> None:
    """In a worker: keep what its proposer drafts."""
    drafter = worker.model_runner.drafter
    propose, drafter.noted = drafter.propose, []

    def noting(*given: Any, **named: Any) -> list[list[int]]:
        found: list[list[int]] = propose(*given, **named)
        drafter.noted.append(found)
        return found

    drafter.propose = noting


def noted(worker: Any) -> list[list[list[int]]]:
    found: list[list[list[int]]] = worker.model_runner.drafter.noted
    return found


async def served(given: dict[str, Any], prompts: list[list[int]], kinds: Sequence[Any]) -> list[list[list[int]]]:
    """As a server writes them: engines that are data-parallel exist there alone."""
    from vllm.sampling_params import RequestOutputKind
    from vllm.v1.engine.async_llm import AsyncLLM

    from vllm import AsyncEngineArgs

    llm = AsyncLLM.from_engine_args(AsyncEngineArgs(**given))

    async def written(name: str, prompt: list[int], kind: Any) -> list[int]:
        tokens: list[int] = []
        kind = kind.clone()
        kind.output_kind = RequestOutputKind.FINAL_ONLY
        async for output in llm.generate({"prompt_token_ids": prompt}, kind, request_id=name):
            tokens = list(output.outputs[0].token_ids)
        return tokens

    try:
        return [
            await asyncio.gather(*(written(f"{turn}-{row}", prompt, kind) for row, prompt in enumerate(prompts)))
            for turn, kind in enumerate(kinds)
        ]
    finally:
        llm.shutdown()


def main() -> None:
    model, more, prompts = Path(sys.argv[1]), json.loads(sys.argv[2]), json.loads(sys.argv[3])
    given = model, {"model": PROPOSER}, OPTIONS
    kinds = params(), params(temperature=0.8)  # ranks that disagree would stop here or write nonsense
    drafted: list[Any] = []
    if "data_parallel_size" in more:
        greedy, sampled = asyncio.run(served(arguments(*given, **more), prompts, kinds))
    else:
        llm = engine(*given, **more)
        llm.collective_rpc(note)
        greedy, sampled = (texts(llm, prompts, kind) for kind in kinds)
        drafted = llm.collective_rpc(noted)
    print("TEXTS " + json.dumps([greedy, [len(text) for text in sampled], drafted]), flush=True)


if __name__ == "__main__":
    main()
