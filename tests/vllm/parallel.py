"""Run by `test_parallel.py` in processes of its own: writes texts with several workers or engines.

python -m tests.vllm.parallel MODEL '{"tensor_parallel_size": 2}' '[[1, 2], [3]]'
"""

from __future__ import annotations

import json
import sys
from pathlib import Path

from tests.vllm.engines import PROPOSER, engine, params, texts

OPTIONS = {"share": "all", "floor": 0.01, "chain": "drawn"}


def main() -> None:
    model, more, prompts = Path(sys.argv[1]), json.loads(sys.argv[2]), json.loads(sys.argv[3])
    llm = engine(model, {"model": PROPOSER}, OPTIONS, **more)
    greedy = texts(llm, prompts, params())
    sampled = texts(llm, prompts, params(temperature=0.8))  # ranks that disagree would stop here or write nonsense
    print("TEXTS " + json.dumps([greedy, [len(text) for text in sampled]]), flush=True)


if __name__ == "__main__":
    main()
