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
import platform
import random
import statistics
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import torch
import transformers

import branchwise
from branchwise.llm import LLM
from branchwise.sequence import Sequence
from branchwise.tree import DraftTree, Forest

PROMPTS = [
    "Explain how a lock lifts a boat from one level of a canal to the next.",
    "Write a short letter that thanks a neighbour for watering the garden.",
    "List ten things to pack for a week of hiking, with a reason for each.",
    "Write a Python function that finds all prime numbers below n, and explain it.",
    "Describe the view from a hill at sunrise.",
    "What happens in a cell when it divides?",
    "Summarise the story of Robinson Crusoe for a child.",
    "Give advice to someone who wants to learn the violin as an adult.",
]
NODES = (1, 2, 4, 8, 16, 32, 64)


def main() -> None:
    arguments = parse()
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    llm = branchwise.load(
        arguments.model, draft="none", dtype=arguments.dtype, device=arguments.device, context=4096, max_batch=1
    )
    run = provenance(llm, arguments)
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
    parser.add_argument("--repeat", type=int, default=3, help="rounds over the prompts")
    parser.add_argument("--context", type=int, default=512, help="tokens in the cache when passes are timed")
    parser.add_argument("--passes", type=int, default=40, help="timed passes for each number of nodes")
    parser.add_argument("--commit", help="the commit that runs, where there is no git to ask")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/records/foundations.jsonl"))
    return parser.parse_args()


def decoding(llm: LLM, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Whole generations, prefill included, of a fixed number of tokens."""

    def own_generate(ids: list[int]) -> list[int]:
        given = torch.tensor([ids], device=llm.model.device)
        found = llm.model.generate(
            given,
            attention_mask=torch.ones_like(given),
            max_new_tokens=arguments.tokens,
            min_new_tokens=arguments.tokens,
            do_sample=False,
            pad_token_id=0,
        )
        tokens: list[int] = found[0, len(ids) :].tolist()
        return tokens

    def ours(drafter: str) -> Callable[[str], list[int]]:
        drafting = llm.with_drafter(drafter)
        # The stop tokens are forbidden on both sides, so that both write the same number of tokens.
        forbidden = dict.fromkeys(llm.stop_tokens, float("-inf"))
        return lambda text: (
            drafting.generate(text, max_new_tokens=arguments.tokens, ignore_eos=True, logit_bias=forbidden).token_ids
        )

    methods: dict[str, Callable[[str], list[int]]] = {
        "transformers.generate": lambda text: own_generate(llm.encode(text)),
        "none": ours("none"),
        "ngram": ours("ngram"),
    }
    for method in methods.values():
        method(PROMPTS[0])  # libraries choose their kernels on first use
    records = []
    for turn in range(arguments.repeat):
        for number, prompt in enumerate(PROMPTS):
            names = list(methods)
            rotation = (turn + number) % len(names)
            for name in names[rotation:] + names[:rotation]:
                seconds, tokens = timed(llm, methods[name], prompt)
                assert len(tokens) == arguments.tokens
                records.append(
                    {
                        "kind": "decoding",
                        "method": name,
                        "prompt": number,
                        "turn": turn,
                        "tokens": len(tokens),
                        "seconds": seconds,
                    }
                )
            print(f"\rdecoding: round {turn + 1}, prompt {number + 1} of {len(PROMPTS)} ", end="", file=sys.stderr)
    print(file=sys.stderr)
    return records


def scoring(llm: LLM, arguments: argparse.Namespace) -> list[dict[str, Any]]:
    """Passes over chains of different length behind the same prefix, in turn."""
    target = llm.engine.target
    rng = random.Random(0)
    sequence = Sequence([rng.randrange(1000, 20000) for _ in range(arguments.context)])
    target.open(sequence)
    drafted = [rng.randrange(1000, 20000) for _ in range(max(NODES))]
    forests = {n: Forest([DraftTree.chain([sequence.root, *drafted[: n - 1]])], target.device) for n in NODES}
    records = []
    for turn in range(-3, arguments.passes):
        for nodes, forest in forests.items():
            seconds, _ = timed(llm, target.score, [sequence], forest)
            if turn >= 0:
                records.append(
                    {"kind": "scoring", "nodes": nodes, "turn": turn, "context": arguments.context, "seconds": seconds}
                )
    target.close(sequence)
    return records


def timed(llm: LLM, call: Callable[..., Any], *arguments: Any) -> tuple[float, Any]:
    cuda = llm.model.device.type == "cuda"
    if cuda:
        torch.cuda.synchronize()
    start = time.perf_counter()
    result = call(*arguments)
    if cuda:
        torch.cuda.synchronize()
    return time.perf_counter() - start, result


def summarise(records: list[dict[str, Any]]) -> None:
    """Ratios within a turn, so that a change of the machine's speed meets both sides; medians with 95 % intervals."""
    decoding = [record for record in records if record["kind"] == "decoding"]
    baseline = {(r["prompt"], r["turn"]): r["seconds"] for r in decoding if r["method"] == "transformers.generate"}
    for method in ("none", "ngram"):
        ratios = [baseline[r["prompt"], r["turn"]] / r["seconds"] for r in decoding if r["method"] == method]
        print(f"{method}: {interval(ratios)} times the speed of transformers.generate")
    for method in ("transformers.generate", "none", "ngram"):
        speeds = [r["tokens"] / r["seconds"] for r in decoding if r["method"] == method]
        print(f"{method}: {statistics.median(speeds):.1f} tokens/s, prefill included")
    scoring = [record for record in records if record["kind"] == "scoring"]
    one = {r["turn"]: r["seconds"] for r in scoring if r["nodes"] == 1}
    for nodes in NODES:
        found = [r for r in scoring if r["nodes"] == nodes]
        ratios = [r["seconds"] / one[r["turn"]] for r in found]
        milliseconds = 1e3 * statistics.median(r["seconds"] for r in found)
        print(f"scoring {nodes:2} nodes: {interval(ratios)} times one node ({milliseconds:.1f} ms)")


def interval(values: list[float]) -> str:
    """Median with a 95 % bootstrap interval."""
    rng = random.Random(0)
    medians = sorted(statistics.median(rng.choices(values, k=len(values))) for _ in range(2000))
    return f"{statistics.median(values):.3f} [{medians[50]:.3f}, {medians[1949]:.3f}]"


def provenance(llm: LLM, arguments: argparse.Namespace) -> dict[str, Any]:
    device = llm.model.device
    return {
        "commit": arguments.commit or git("rev-parse", "HEAD"),
        "dirty": bool(git("status", "--porcelain", "--untracked-files=no")),
        "arguments": {name: value for name, value in vars(arguments).items() if name not in ("commit", "out")},
        "versions": {
            "branchwise": branchwise.__version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": transformers.__version__,
        },
        "machine": torch.cuda.get_device_name(device) if device.type == "cuda" else cpu_name(),
        "threads": torch.get_num_threads(),
        "dtype": str(llm.model.dtype).removeprefix("torch."),
        "time": time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime()),
    }


def git(*words: str) -> str | None:
    done = subprocess.run(["git", *words], capture_output=True, text=True, check=False, cwd=Path(__file__).parent)
    return done.stdout.strip() if done.returncode == 0 else None


def cpu_name() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    named = next(
        (line.partition(":")[2].strip() for line in lines if line.startswith("model name")), platform.machine()
    )
    return f"{named}, {sum(line.startswith('processor') for line in lines)} cores"


if __name__ == "__main__":
    main()
