"""What a newcomer waits for on a GPU: a fresh process until its first answer, and whether the second is any faster.

    python benchmarks/first_use.py                 load, then two requests of 23 tokens
    python benchmarks/first_use.py --compile       with compiled layers
    python benchmarks/first_use.py --no-warmup     what the warm-up spares the first request

Start it in a fresh process each time; BRANCHWISE_CACHE names a folder without kernels for the very first use.
"""

from __future__ import annotations

import argparse
import time

START = time.perf_counter()

PROMPTS = ("Write a haiku about rivers.", "Name three rivers and the seas that they reach.")
TOKENS = 23


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--no-warmup", action="store_true")
    arguments = parser.parse_args()

    import branchwise

    llm = branchwise.load(arguments.model, compile=arguments.compile, max_batch=1, warmup=not arguments.no_warmup)
    loaded = time.perf_counter() - START
    print(f"ready after {loaded:.1f} s")
    for number, prompt in enumerate(PROMPTS, start=1):
        begun, first = time.perf_counter(), 0.0
        for chunk in llm.stream(prompt, max_new_tokens=TOKENS, ignore_eos=True):
            first = first or (time.perf_counter() - begun if chunk.pieces else 0.0)
        print(f"request {number}: first token {first:.3f} s, end {time.perf_counter() - begun:.3f} s")


if __name__ == "__main__":
    main()
