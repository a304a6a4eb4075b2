"""A machine with other work on it: what waiting threads do while one of them has lost its core.

    python benchmarks/crowded.py --out benchmarks/records/crowded-smollm2-cpu.jsonl
    python benchmarks/crowded.py --read benchmarks/records/crowded-smollm2-cpu.jsonl

Fresh processes take turns, each with its own count of spins after which a waiting thread sleeps (GOMP_SPINCOUNT): that
of libgomp, that which `import branchwise` sets, and one thread, which waits for nobody. Beside them run as many busy
loops as there are cores taken.
"""

from __future__ import annotations

import argparse
import json
import os
import subprocess
import sys
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import median
from typing import Any

import torch
from measure import kept, progress, provenance, recorded

from branchwise import SPINS

WAYS = {"libgomp's 300,000": ("300000", None), f"ours, {int(SPINS):,}": (SPINS, None), "one thread": (SPINS, 1)}
"""spins, and threads if not all cores"""
BUSY = "while True: pass"
WRITE = """
import json, sys, branchwise
given = json.loads(sys.argv[1])
llm = branchwise.load(given["model"], weights=given["weights"], threads=given["threads"], max_batch=1)
llm.generate("Hello.", max_new_tokens=8)
texts = [llm.generate(prompt, max_new_tokens=given["tokens"], ignore_eos=True) for prompt in given["prompts"]]
spent = sum(sum(text.stats.seconds.values()) for text in texts)
print(json.dumps({"tokens": sum(len(text.token_ids) for text in texts), "seconds": spent}))
"""
PROMPTS = ("Write a haiku about rivers.", "Name three rivers and the seas that they reach.")


def main() -> None:
    arguments = parse()
    if arguments.read is not None:
        records = recorded(arguments.read)
    else:
        records = kept(measured(arguments), arguments.out)
        print(f"{len(records)} records in {arguments.out}")
    summarise(records)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--weights", nargs="+", default=["float", "int8"])
    parser.add_argument("--taken", type=int, nargs="+", default=[0, 1], help="cores that other work holds")
    parser.add_argument("--tokens", type=int, default=32, help="of each of two answers")
    parser.add_argument("--rounds", type=int, default=5)
    parser.add_argument("--commit", help="the commit that runs, where there is no git to ask")
    parser.add_argument("--out", type=Path, default=Path("crowded.jsonl"))
    parser.add_argument("--read", type=Path, help="show these records; nothing is measured")
    return parser.parse_args()


def measured(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    run = provenance(torch.device("cpu"), arguments)
    run["arguments"].pop("read")
    for number, taken, weights, way in product(range(arguments.rounds), arguments.taken, arguments.weights, WAYS):
        progress(f"round {number}, {taken} cores taken, {weights}, {way}")
        spins, threads = WAYS[way]
        given = {"model": arguments.model, "weights": weights, "threads": threads, "tokens": arguments.tokens}
        busy = [subprocess.Popen([sys.executable, "-c", BUSY]) for _ in range(taken)]
        try:
            done = subprocess.run(
                [sys.executable, "-c", WRITE, json.dumps({**given, "prompts": PROMPTS})],
                env={**os.environ, "GOMP_SPINCOUNT": spins},
                check=True,
                capture_output=True,
                text=True,
            )
        finally:
            for process in busy:
                process.kill()
                process.wait()
        yield {"round": number, "taken": taken, "weights": weights, "way": way, **json.loads(done.stdout), "run": run}


def summarise(records: Sequence[Mapping[str, Any]]) -> None:
    """Tokens a second, medians over rounds with the least and the most."""
    ways = list(dict.fromkeys(record["way"] for record in records))
    print(f"{'weights':9}{'cores taken':13}" + "".join(f"{way:>28}" for way in ways))
    for weights, taken in dict.fromkeys((record["weights"], record["taken"]) for record in records):
        line = f"{weights:9}{taken:<13}"
        for way in ways:
            own = [r for r in records if (r["weights"], r["taken"], r["way"]) == (weights, taken, way)]
            speeds = sorted(record["tokens"] / record["seconds"] for record in own)
            line += f"{f'{median(speeds):.1f} [{speeds[0]:.1f}, {speeds[-1]:.1f}]':>28}"
        print(line)


if __name__ == "__main__":
    main()
