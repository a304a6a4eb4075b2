"""How well the number of nodes is chosen, in worlds of which everything is known.

A world is a machine, which says what a pass over so many rows costs, and a source, which promises candidates and keeps
its promises or does not (`branchwise.testing`). The controller sees the times of passes, with noise, and what was
accepted. Its speed is compared with that of the best size that never changes, which only hindsight knows, and with that
of plain decoding. The first steps, in which it has yet to learn what passes cost, are not counted.

    python benchmarks/controller.py
    python benchmarks/controller.py --read FILE.jsonl
"""

from __future__ import annotations

import argparse
import random
from collections.abc import Iterator, Mapping, Sequence
from itertools import product
from pathlib import Path
from statistics import mean
from typing import Any

import torch
from measure import kept, progress, provenance, recorded

from branchwise.draft.policies.adaptive import AdaptiveSize
from branchwise.testing import COSTS, SOURCES, World

NOISES = (0.05, 0.2)


def main() -> None:
    arguments = parse()
    if arguments.read:
        records = recorded(arguments.read)
    else:
        records = kept(measured(arguments), arguments.out)
        print(f"{len(records)} records in {arguments.out}")
    summarise(records)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--seeds", type=int, default=3, help="texts in every world")
    parser.add_argument("--noises", type=float, nargs="+", default=NOISES, help="of the times of passes, as shares")
    parser.add_argument("--learning", type=int, default=20, help="first steps that are not counted")
    parser.add_argument("--steps", type=int, default=800, help="steps that are")
    parser.add_argument("--commit", help="the commit that runs, where there is no git to ask")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "records" / "controller.jsonl")
    parser.add_argument("--read", type=Path, help="show these records; nothing is measured")
    return parser.parse_args()


def measured(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    run = provenance(torch.device("cpu"), arguments)
    run["arguments"].pop("read")
    for noise, cost, source, seed in product(arguments.noises, COSTS, SOURCES, range(arguments.seeds)):
        progress(f"noise {noise:.0%}, {cost}, {source}, seed {seed}")
        promised, true = SOURCES[source]
        world, policy = World(promised, true, COSTS[cost], noise, rng=random.Random(seed)), AdaptiveSize()
        world.speed(policy, arguments.learning)
        yield {
            "noise": noise,
            "cost": cost,
            "source": source,
            "seed": seed,
            "speed": world.speed(policy, arguments.steps),
            "hindsight": world.hindsight,
            "plain": world.plain,
            "run": run,
        }


def summarise(records: Sequence[Mapping[str, Any]]) -> None:
    """Mean and least of all worlds, then the mean of every world beside hindsight, by machine and source."""
    for noise in dict.fromkeys(record["noise"] for record in records):
        own = [record for record in records if record["noise"] == noise]
        print(f"noise of {noise:.0%}, {len(own)} texts")
        for against in ("hindsight", "plain"):
            shares = {(r["cost"], r["source"], r["seed"]): r["speed"] / r[against] for r in own}
            worst = min(shares, key=shares.__getitem__)
            least = f"{shares[worst]:.3f} at least ({worst[0]}, {worst[1]}, seed {worst[2]})"
            print(f"  over {against:10} {mean(shares.values()):.3f} on average, {least}")
        sources = list(dict.fromkeys(record["source"] for record in own))
        print(f"  {'of hindsight':12}" + "".join(f"{source:>11}" for source in sources))
        for cost in dict.fromkeys(record["cost"] for record in own):
            line = ""
            for source in sources:
                found = [r["speed"] / r["hindsight"] for r in own if (r["cost"], r["source"]) == (cost, source)]
                line += f"{mean(found):11.3f}" if found else f"{'':11}"
            print(f"  {cost:12}{line}".rstrip())


if __name__ == "__main__":
    main()
