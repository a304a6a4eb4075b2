"""Every method with a draft model on one real pair, and what drafting costs beside the two models.

Qwen2.5-Coder 1.5B is the target and 0.5B drafts for it, in bfloat16. Two questions:

1. What does each preset give at an equal budget of 24 nodes below the root? All presets on the first ten prompts of
   each file, 96 tokens, at temperature 0 and 1, plain decoding in the same run, contestants in turn on every prompt.
   It is `branchwise bench`, called twice; after Ctrl-C the same command goes on.
2. What does drafting cost outside the forward passes of the two models (`--overhead`)? The share of a step with 32
   nodes, draft passes per level, and drafting for eight texts together against each of them alone.

    python benchmarks/drafting.py --model TARGET --draft-model DRAFT --prompts HUMANEVAL GSM8K [--device cuda]
    python benchmarks/drafting.py --model TARGET --draft-model DRAFT --overhead

Prompts are files of the user; no prompt set is part of this repository. `vocabtrim` needs `branchwise calibrate vocab`
first.
"""

from __future__ import annotations

import argparse
import json
import statistics
import sys
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from measure import interval, progress, provenance

import branchwise
from branchwise.bench.prompts import EDITING, FREE
from branchwise.cli import app
from branchwise.core.sampling import SamplingParams
from branchwise.engine import Engine, Generation, Request
from branchwise.errors import BranchwiseError
from branchwise.llm import LLM
from branchwise.methods import PRESETS, Method

RECORDS = Path(__file__).parent / "records"
NODES = 24
TOKENS = 96
PROMPTS = 10
WITH_MODEL = [name for name, method in PRESETS.items() if method.blanks == ["model"]]
TEMPERATURES = (0.0, 1.0)

WIDE = {
    "chain": "chain:32",
    "paths": "paths:4x8",
    "rsd-c": "rsd-c:4,1,1,1,1,1,1,1",
    "rsd-s": "rsd-s:4x8",
    "dynamic": "dynamic:32",
    "threshold": "threshold:0.01,32",
    "topk": "topk:32,depth=8,width=8",
    "graph": "graph:32,width=4,depth=8,repeat=1",
}
"""trees of 32 nodes, each policy once"""
RULES = {
    "chain": "block",
    "paths": "cascade",
    "rsd-c": "traversal",
    "rsd-s": "traversal",
    "topk": "match",
    "graph": "match",
}
TOGETHER = 8
AHEAD = 64
"""texts may be so much longer than they get, so that no tree is cut at their end"""


def main() -> None:
    arguments = parse()
    if arguments.overhead:
        overhead(arguments)
        return
    if not arguments.prompts:
        raise SystemExit("Name files of prompts with --prompts, such as HumanEval's and GSM8K's.")
    for temperature in arguments.temperatures:
        sys.argv = ["branchwise", *map(str, command(arguments, temperature))]  # what the records say ran
        code = app(sys.argv[1:], standalone_mode=False)
        if code:
            sys.exit(code)


def command(arguments: argparse.Namespace, temperature: float) -> list[Any]:
    """`branchwise bench` with everything that is asked for here."""
    optional = {
        f"--{name}": value for name in ("threads", "commit", "batch", "context") if (value := vars(arguments)[name])
    }
    return [
        *("bench", "--model", arguments.model, "--draft-model", arguments.draft_model),
        *("--methods", ",".join(arguments.methods or WITH_MODEL)),
        *(word for file in arguments.prompts for word in ("--prompts", file)),
        *("--limit", arguments.limit, "--max-new-tokens", TOKENS, "--temperature", f"{temperature:g}"),
        *("--budget", NODES, "--dtype", "bfloat16", "--device", arguments.device),
        *(word for option in optional.items() for word in option),
        *("--out", arguments.out / f"drafting-{name_of(arguments.device)}-t{temperature:g}.jsonl"),
    ]


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", required=True, help="the target: a GGUF file, a folder or a hub id")
    parser.add_argument("--draft-model", required=True, help="the draft model, as --model")
    parser.add_argument("--prompts", type=Path, nargs="*", default=[], help="files as branchwise bench takes them")
    parser.add_argument("--limit", type=int, default=PROMPTS, help="the first prompts of each category")
    parser.add_argument("--temperatures", type=float, nargs="*", default=TEMPERATURES, help="a table each")
    parser.add_argument("--methods", nargs="*", help="presets, or with --overhead trees; all by default")
    parser.add_argument("--overhead", action="store_true", help="measure what drafting costs beside the models")
    parser.add_argument("--tokens", type=int, default=48, help="tokens of a text with --overhead")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--batch", type=int, help="prompts that are answered together, for the table of presets")
    parser.add_argument("--context", type=int, help="the most tokens of a text, so that all caches find room on a GPU")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--out", type=Path, default=RECORDS, help="folder of the records")
    parser.add_argument("--commit", help="the commit that runs, where there is no git to ask")
    return parser.parse_args()


def name_of(device: str) -> str:
    """How a record's file calls a machine."""
    return "cpu" if device == "cpu" else torch.cuda.get_device_name().split()[-1].lower()


# ---- overhead ----------------------------------------------------------------------------------------------------


def overhead(arguments: argparse.Namespace) -> None:
    llm = branchwise.load(
        arguments.model,
        draft="none",
        dtype="bfloat16",
        device=arguments.device,
        threads=arguments.threads,
        context=2048,
        max_batch=TOGETHER,
    )
    run = {**provenance(llm.model.device, arguments), "dtype": "bfloat16"}
    run["arguments"] = {name: told(value) for name, value in run["arguments"].items()}
    records = []
    for tree in arguments.methods or WIDE:
        method = Method(tree, f"model:{arguments.draft_model}", WIDE[tree], RULES.get(tree, "rrs"))
        prompts = [*FREE, *EDITING][:TOGETHER]
        for texts in (*([prompt] for prompt in prompts), prompts):  # each alone, then all together
            records += measured(llm, method, texts, arguments.tokens)
    path = arguments.out / f"drafting-overhead-{name_of(arguments.device)}.jsonl"
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("".join(json.dumps({**record, "run": run}) + "\n" for record in records))
    print(f"{len(records)} records in {path}")
    summarise(records)


def told(value: Any) -> Any:
    """An argument as a record holds it: where files lie on this machine is nobody's business."""
    if isinstance(value, list):
        return [told(one) for one in value]
    return Path(value).name if isinstance(value, str | Path) and Path(value).is_absolute() else value


def measured(llm: LLM, method: Method, prompts: list[str], tokens: int) -> Iterator[dict[str, Any]]:
    """A record for every step after the first, in which caches fill: its time, the models' own, and what it drafted."""
    drafter, verifier = method.build()
    engine = Engine(llm.engine.target, drafter, verifier)
    models = [llm.model, drafter.weights.model]  # type: ignore[attr-defined]
    batch = len(prompts)
    sampling = SamplingParams(temperature=1.0, seed=0)
    most = tokens + AHEAD
    generations = [engine.submit(Request(tuple(llm.encode(prompt)), sampling, most)) for prompt in prompts]
    step = 0
    while all(len(generation.token_ids) < tokens for generation in generations):  # a full batch of whole trees
        progress(f"{method.name}, {batch} texts, step {step}")
        before = [counts(generation) for generation in generations]
        passes = drafter.passes  # type: ignore[attr-defined]
        with inside(models) as clock:
            start = now(llm)
            engine.step()
            seconds = now(llm) - start
        added = [
            [after - earlier for after, earlier in zip(counts(generation), past, strict=True)]
            for generation, past in zip(generations, before, strict=True)
        ]
        if step:
            yield {
                "tree": method.name,
                "spec": method.tree,
                "verifier": method.verify,
                "batch": batch,
                "step": step,
                "seconds": seconds,
                "models": clock[0],
                "draft": added[0][2],
                "nodes": sum(nodes for nodes, _, _ in added),
                "levels": max(levels for _, levels, _ in added),
                "passes": drafter.passes - passes,  # type: ignore[attr-defined]
            }
        step += 1
    for generation in generations:
        engine.cancel(generation)


def counts(generation: Generation) -> tuple[int, int, float]:
    """Nodes and levels drafted so far, and the time that took."""
    stats = generation.stats
    return stats.drafted_tokens, sum(stats.drafted_per_depth), stats.seconds["draft"]


@contextmanager
def inside(models: list[torch.nn.Module]) -> Iterator[list[float]]:
    """Seconds within the forward passes of these models; on CUDA each is waited for, which costs nothing to a share."""
    spent, starts, handles = [0.0], [0.0], []

    def begin(module: torch.nn.Module, *_: Any) -> None:
        wait(module)
        starts[0] = time.perf_counter()

    def end(module: torch.nn.Module, *_: Any) -> None:
        wait(module)
        spent[0] += time.perf_counter() - starts[0]

    for model in models:
        handles += [model.register_forward_pre_hook(begin), model.register_forward_hook(end)]
    try:
        yield spent
    finally:
        for handle in handles:
            handle.remove()


def wait(module: torch.nn.Module) -> None:
    if next(module.parameters()).device.type == "cuda":
        torch.cuda.synchronize()


def now(llm: LLM) -> float:
    wait(llm.model)
    return time.perf_counter()


def summarise(records: list[dict[str, Any]]) -> None:
    """The three numbers for each tree: time outside the models, passes per level, eight texts against one."""
    for tree in dict.fromkeys(record["tree"] for record in records):
        one, many = (
            [r for r in records if r["tree"] == tree and (r["batch"] > 1) is several] for several in (False, True)
        )
        if not one:
            continue
        outside = interval([1 - r["models"] / r["seconds"] for r in one])
        nodes = statistics.mean(r["nodes"] for r in one)
        passes = sum(r["passes"] for r in one) / sum(r["levels"] for r in one)
        print(
            f"{one[0]['spec']}, {one[0]['verifier']}: {nodes:.1f} nodes a step, {1e3 * median(one, 'seconds'):.1f} ms"
        )
        print(f"  outside the two models {outside} of the step, {passes:.2f} draft passes a level")
        if many:
            ratio = median(many, "draft") / median(one, "draft")
            alone, together = (statistics.median(r["draft"] / r["passes"] for r in these) for these in (one, many))
            print(
                f"  drafting for {many[0]['batch']} texts takes {ratio:.2f} times one, "
                f"and a pass of it {together / alone:.2f} times one"
            )


def median(records: list[dict[str, Any]], field: str) -> float:
    return statistics.median(record[field] for record in records)


if __name__ == "__main__":
    try:
        main()
    except BranchwiseError as error:
        sys.exit(f"drafting.py: {error}")
