"""Two questions about the foundations, answered on the machine that asks.

1. Is plain decoding through our loop at least as fast as transformers' own `generate`?
2. What does scoring n nodes cost, measured in passes over one node?

Everything that is compared runs interleaved in one process, on the same weights, from the same token ids, and is
counted by token ids. Each measurement is one JSON line with its provenance; the summary is a function of those lines.

    python benchmarks/foundations.py [--device cuda] [--out FILE.jsonl]
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
from measure import interval, progress, provenance, timed

import branchwise
from branchwise.bench.prompts import EDITING, FREE
from branchwise.core.batch import TreeBatch
from branchwise.core.sequence import SequenceState
from branchwise.core.tree import DraftTree
from branchwise.llm import LLM

PROMPTS = [("free writing", prompt) for prompt in FREE] + [("editing", prompt) for prompt in EDITING]
BASELINE = "transformers.generate"
NODES = (1, 2, 4, 8, 16, 32, 64)


def main() -> None:
    arguments = parse()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    llm = branchwise.load(
        arguments.model, draft="none", dtype=arguments.dtype, device=arguments.device, context=4096, max_batch=1
    )
    run = {**provenance(llm.model.device, arguments), "dtype": str(llm.model.dtype).removeprefix("torch.")}
    records = [*decoding(llm, arguments), *scoring(llm, arguments)]
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    with arguments.out.open("w") as file:
        for record in records:
            file.write(json.dumps({**record, "run": run}) + "\n")
    print(f"{len(records)} records in {arguments.out}")
    summarise(records)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--dtype", default="bfloat16")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--tokens", type=int, default=96, help="tokens to write for each prompt")
    parser.add_argument("--repeat", type=int, default=2, help="rounds over the prompts")
    parser.add_argument("--context", type=int, default=512, help="tokens in the cache when passes are timed")
    parser.add_argument("--passes", type=int, default=40, help="timed passes for each number of nodes")
    parser.add_argument("--commit", help="the commit that runs, where there is no git to ask")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/records/foundations.jsonl"))
    return parser.parse_args()


def decoding(llm: LLM, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Whole generations, prefill included, of a fixed number of tokens: the end of text is forbidden on both sides."""
    forbidden = dict.fromkeys(llm.stop_tokens, float("-inf"))

    def own_generate(prompt: str) -> dict[str, Any]:
        ids = torch.tensor([llm.encode(prompt)], device=llm.model.device)
        found = llm.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=arguments.tokens,
            min_new_tokens=arguments.tokens,
            do_sample=False,
            pad_token_id=0,
        )
        return {"tokens": found.shape[1] - ids.shape[1]}

    def ours(drafter: str) -> Callable[[str], dict[str, Any]]:
        drafting = llm.with_drafter(drafter)

        def write(prompt: str) -> dict[str, Any]:
            done = drafting.generate(prompt, max_new_tokens=arguments.tokens, ignore_eos=True, logit_bias=forbidden)
            return {"tokens": len(done.token_ids), "steps": done.stats.steps, "accepted": done.stats.accepted_tokens}

        return write

    methods = {BASELINE: own_generate, "none": ours("none"), "ngram": ours("ngram")}
    for method in methods.values():
        method(FREE[0])  # libraries choose their kernels on first use
    records = []
    for turn in range(arguments.repeat):
        for number, (kind, prompt) in enumerate(PROMPTS):
            names = list(methods)
            rotation = (turn + number) % len(names)
            for name in names[rotation:] + names[:rotation]:
                seconds, found = timed(llm.model.device, methods[name], prompt)
                assert found["tokens"] == arguments.tokens
                about = {"kind": "decoding", "method": name, "prompts": kind, "prompt": number, "turn": turn}
                records.append({**about, "seconds": seconds, **found})
            progress(f"decoding: round {turn + 1} of {arguments.repeat}, prompt {number + 1} of {len(PROMPTS)}")
    return records


def scoring(llm: LLM, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Passes over chains of different length behind the same prefix, in turn."""
    target = llm.engine.target
    rng = random.Random(0)
    sequence = SequenceState([rng.randrange(1000, 20000) for _ in range(arguments.context)])
    target.open(sequence)
    drafted = [rng.randrange(1000, 20000) for _ in range(max(NODES))]
    forests = {n: TreeBatch([DraftTree.chain([sequence.root, *drafted[: n - 1]])], target.device) for n in NODES}
    records = []
    for turn in range(-3, arguments.passes):
        for nodes, batch in forests.items():
            seconds, _ = timed(llm.model.device, target.score, [sequence], batch)
            if turn >= 0:
                records.append(
                    {"kind": "scoring", "nodes": nodes, "turn": turn, "context": arguments.context, "seconds": seconds}
                )
    target.close(sequence)
    return records


def summarise(records: list[dict[str, Any]]) -> None:
    """Ratios within a turn, so that a change of the machine's speed meets both sides; medians with 95 % intervals."""
    decoding = [record for record in records if record["kind"] == "decoding"]
    baseline = {(r["prompt"], r["turn"]): r["seconds"] for r in decoding if r["method"] == BASELINE}
    for kind in ("free writing", "editing"):
        for method in (BASELINE, "none", "ngram"):
            found = [r for r in decoding if r["method"] == method and r["prompts"] == kind]
            speed = statistics.median(r["tokens"] / r["seconds"] for r in found)
            line = f"{kind}, {method}: {speed:.1f} tokens/s"
            if method != BASELINE:
                ratio = interval([baseline[r["prompt"], r["turn"]] / r["seconds"] for r in found])
                length = 1 + sum(r["accepted"] for r in found) / sum(r["steps"] for r in found)
                line += f", {ratio} times {BASELINE}, mean acceptance length {length:.2f}"
            print(line)
    plain = [baseline[r["prompt"], r["turn"]] / r["seconds"] for r in decoding if r["method"] == "none"]
    print(f"all prompts, none: {interval(plain)} times {BASELINE}")
    scoring = [record for record in records if record["kind"] == "scoring"]
    one = {r["turn"]: r["seconds"] for r in scoring if r["nodes"] == 1}
    for nodes in NODES:
        passes = [r for r in scoring if r["nodes"] == nodes]
        milliseconds = 1e3 * statistics.median(r["seconds"] for r in passes)
        ratio = interval([r["seconds"] / one[r["turn"]] for r in passes])
        print(f"scoring {nodes:2} nodes: {ratio} times one node ({milliseconds:.1f} ms)")


if __name__ == "__main__":
    main()
