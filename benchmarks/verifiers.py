"""What a verdict costs: every verifier on the same distributions, side by side.

The distributions look like those of a language model (a few tokens carry the mass, a long tail the rest) over a
vocabulary of 151,936; drafts are four paths of six tokens, or, for verifiers of trees drawn without replacement, the
tree 4,1,1,1,1,1. A time is from scored logits to the verdict on the host: warping, the rule, the drawn token, one sync.
On a GPU there are three modes:

    placed    captured in a graph, logits and q where it reads them, as a scoring pass and a drafter may write them
    graph     the same graph, logits and q elsewhere: the time is with their copies
    eager     kernel by kernel

Verifiers take turns on every draft. What matters most comes first, graphs and large batches, and every number is
printed and written as soon as it is known, so that a run that is cut short has them.

    python benchmarks/verifiers.py [--device cuda] [--modes placed graph] [--out FILE.jsonl]
"""

from __future__ import annotations

import argparse
import copy
import json
import statistics
from itertools import product
from pathlib import Path
from typing import Any

import torch
from measure import interval, progress, provenance, timed
from torch import Tensor

from branchwise.core.batch import LOOKED_UP, PadShape, TreeBatch
from branchwise.core.rng import SeededChance
from branchwise.core.sampling import SamplingParams
from branchwise.core.sequence import SequenceState
from branchwise.core.target_probs import WarpedProbs
from branchwise.core.tree import DraftTree, Draw
from branchwise.cuda.verify_graph import CapturedVerifier
from branchwise.draft import TREES
from branchwise.draft.base import Budget
from branchwise.draft.builder import NodeProbs, TreeBuilder, TreePolicy, grow_with
from branchwise.draft.sampler import SeededSampler
from branchwise.verify import VERIFIERS, Verifier

SIMILARITIES = {"close": 0.5, "medium": 1.0, "far": 2.0}
"""noise between the logits of target and drafter"""
CAPTURED = ("placed", "graph")
EAGER = ("eager",)


def main() -> None:
    arguments = parse()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    device = torch.device(arguments.device)
    run = provenance(device, arguments)
    count = 0
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    with arguments.out.open("w") as file:
        for modes, batch in product(chosen(arguments.modes, device), sorted(arguments.batch, reverse=True)):
            verifiers = built(arguments.verifiers, modes)
            for similarity in arguments.similarity:
                found = measure(verifiers, modes, device, similarity, SIMILARITIES[similarity], batch, arguments)
                file.writelines(json.dumps({**record, "run": run}) + "\n" for record in found)
                file.flush()
                summarise(found)
                count += len(found)
    print(f"{count} records in {arguments.out}")


def chosen(wanted: list[str], device: torch.device) -> list[list[str]]:
    """How verifiers are to run, in order, what shares a graph side by side; without a GPU there are no graphs."""
    here = [CAPTURED, EAGER] if device.type == "cuda" else [EAGER]
    found = [[mode for mode in modes if mode in wanted] for modes in here]
    if not any(found):
        raise SystemExit(f"There are no graphs on {device}; leave out --modes {' '.join(wanted)}.")
    return [modes for modes in found if modes]


def built(names: list[str], modes: list[str]) -> dict[str, Verifier]:
    """Fresh verifiers: those in graphs keep the memory of every shape they have seen."""
    rules = {name: VERIFIERS.build(name) for name in names}
    return rules if modes[0] in EAGER else {name: CapturedVerifier(rule) for name, rule in rules.items()}


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--vocabulary", type=int, default=151_936)
    parser.add_argument("--similarity", nargs="+", choices=SIMILARITIES, default=list(SIMILARITIES))
    parser.add_argument("--batch", type=int, nargs="+", default=[1])
    parser.add_argument("--drafts", type=int, default=12, help="batches of drafts")
    parser.add_argument("--repeat", type=int, default=5, help="verdicts on each, with other seeds")
    lossless = [name for name in VERIFIERS if name != "auto" and getattr(VERIFIERS.find(name), "lossless", True)]
    parser.add_argument("--verifiers", nargs="+", default=lossless)
    parser.add_argument("--modes", nargs="+", choices=(*CAPTURED, *EAGER), default=[*CAPTURED, *EAGER])
    parser.add_argument("--commit", help="the commit that runs, where there is no git to ask")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/records/verifiers.jsonl"))
    return parser.parse_args()


def measure(
    verifiers: dict[str, Verifier],
    modes: list[str],
    device: torch.device,
    similarity: str,
    sigma: float,
    batch: int,
    arguments: argparse.Namespace,
) -> list[dict[str, Any]]:
    """Every verifier on every batch of drafts, in turn."""
    world = {Draw.PATHS: TREES.build("paths:4x6"), Draw.WITHOUT_REPLACEMENT: TREES.build("rsd-c:4,1,1,1,1,1")}
    records = []
    for number in range(-1, arguments.drafts):
        drafts = {
            draw: draft(policy, number, sigma, batch, arguments.vocabulary, device) for draw, policy in world.items()
        }
        for turn in range(arguments.repeat):
            for name, verifier in verifiers.items():
                without = Draw.WITHOUT_REPLACEMENT in verifier.accepts and name != "match"
                trees, logits = drafts[Draw.WITHOUT_REPLACEMENT if without else Draw.PATHS]
                sequences = [
                    SequenceState([0, 1], SamplingParams(temperature=1.0, seed=1000 * number + 20 * turn + row))
                    for row in range(batch)
                ]
                room = PadShape() if without else PadShape.for_paths(4, 6)
                tree_batch = TreeBatch(trees, device, room if device.type == "cuda" else None)
                seeds = torch.tensor([sequence.seed for sequence in sequences], device=device)
                chance = SeededChance(seeds, torch.ones_like(seeds))
                logits = torch.nn.functional.pad(logits, (0, 0, 0, tree_batch.nodes - logits.shape[1]))
                probs = WarpedProbs(logits, tree_batch, sequences)
                for table in ("widths", "q", *LOOKED_UP):
                    getattr(tree_batch, table)  # part of the draft, not of the verdict
                if number < 0 or turn == 0:
                    verifier(tree_batch, probs, chance)  # tables are looked up, kernels chosen, graphs captured
                    if number < 0:
                        continue
                for mode in modes:
                    if mode == "placed":
                        read, probs = placed(verifier, tree_batch, probs)
                    else:
                        read, probs = tree_batch, WarpedProbs(logits, tree_batch, sequences)
                    chance = SeededChance(seeds, torch.ones_like(seeds))
                    seconds, verdicts = timed(device, lambda v=verifier, f=read, p=probs, c=chance: v(f, p, c).read())
                    tokens = statistics.mean(len(verdict.path) for verdict in verdicts)
                    about = {"similarity": similarity, "batch": batch, "verifier": name, "mode": mode}
                    records.append({**about, "draft": number, "turn": turn, "seconds": seconds, "tokens": tokens})
        progress(f"{' and '.join(modes)}, {similarity}, batch {batch}: {number + 1} of {arguments.drafts}")
    return records


def placed(verifier: Verifier, batch: TreeBatch, probs: WarpedProbs) -> tuple[TreeBatch, WarpedProbs]:
    """The same batch of trees and distributions, with logits and q where the graph reads them."""
    assert isinstance(verifier, CapturedVerifier)
    assert batch.q is not None
    inputs = verifier._graphs[next(reversed(verifier._graphs))].inputs  # of the graph that was replayed last
    q = inputs.q[:, : batch.q.shape[1]]
    q.copy_(batch.q[:, : q.shape[1]])
    inputs.logits.copy_(probs.logits)
    same = copy.copy(batch)
    same.__dict__["q"] = q
    return same, probs.over(inputs.logits, same)


def draft(
    policy: TreePolicy, number: int, sigma: float, batch: int, vocabulary: int, device: torch.device
) -> tuple[list[DraftTree], Tensor]:
    """Trees of a batch and the target's logits (batch, nodes, vocabulary) over them."""
    trees, logits = [], []
    for row in range(batch):
        generator = torch.Generator().manual_seed(1_000_003 * (number + 1) + row)
        found: dict[int, Tensor] = {}

        def look(
            _: TreeBuilder, nodes: list[int], found: dict[int, Tensor] = found, generator: torch.Generator = generator
        ) -> NodeProbs:
            for node in nodes:
                found[node] = target_logits(vocabulary, generator)
            noise = [sigma * torch.randn(vocabulary, generator=generator) for _ in nodes]
            return NodeProbs(torch.stack([(found[n] + e).softmax(dim=-1) for n, e in zip(nodes, noise, strict=True)]))

        tree = grow_with(policy.grow(1, Budget(128, 6), SeededSampler(number * 64 + row, 1)), look)
        for leaf in range(len(tree)):
            found.setdefault(leaf, target_logits(vocabulary, generator))
        trees.append(DraftTree(tree.tokens.to(device), tree.parents, tree.draw, tree.q.to(device), tree.leaves))
        logits.append(torch.stack([found[node] for node in range(len(tree))]))
    return trees, torch.nn.utils.rnn.pad_sequence(logits, batch_first=True).to(device)


def target_logits(vocabulary: int, generator: torch.Generator) -> Tensor:
    """(vocabulary,): a power distribution over tokens in random order, as language models have it, more or less
    sharp."""
    ranks = torch.randperm(vocabulary, generator=generator) + 1.0
    sharpness = 1.2 + float(torch.rand(1, generator=generator))
    return -sharpness * ranks.log() + 0.3 * torch.randn(vocabulary, generator=generator)


def summarise(records: list[dict[str, Any]]) -> None:
    """Milliseconds per verdict, and as a multiple of `block` on the same draft, medians with 95 % intervals."""
    for similarity, batch, mode in dict.fromkeys((r["similarity"], r["batch"], r["mode"]) for r in records):
        same = [r for r in records if (r["similarity"], r["batch"], r["mode"]) == (similarity, batch, mode)]
        block = {(r["draft"], r["turn"]): r["seconds"] for r in same if r["verifier"] == "block"}
        print(f"{similarity}, batch {batch}, {mode}:", flush=True)
        for name in dict.fromkeys(r["verifier"] for r in same):
            own = [r for r in same if r["verifier"] == name]
            spread = interval([1e3 * r["seconds"] for r in own])
            ratio = (
                f", {interval([r['seconds'] / block[r['draft'], r['turn']] for r in own])} times block" if block else ""
            )
            tokens = statistics.mean(r["tokens"] for r in own)
            print(f"  {name:10} {spread} ms{ratio}, {tokens:.2f} tokens a step", flush=True)


if __name__ == "__main__":
    main()
