"""What a step costs on a GPU, and how far that is from what the memory allows.

A pass reads every weight once, so bytes over bandwidth is its floor. Here: that floor, with the bandwidth measured in
the same run; passes over 1 to 128 nodes behind contexts of 1k to 16k tokens; batches of up to 64 texts; and everything
that a step does besides its pass. Passes are timed in turn, one size after the other, round by round.

    python benchmarks/gpu.py --model smollm2
    python benchmarks/gpu.py --shape llama-8b        # random weights: step costs alone, labelled so
    python benchmarks/gpu.py --profile               # besides, what each kernel takes of a step

`branchwise bench --device cuda` plays whole texts against transformers.
"""

from __future__ import annotations

import argparse
import json
import random
import statistics
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from measure import interval, progress, provenance

from branchwise.backends.transformers.probe import context_limit
from branchwise.backends.transformers.runner import bytes_read
from branchwise.backends.transformers.target import TransformersTarget
from branchwise.core.batch import PadShape, TreeBatch
from branchwise.core.sampling import SamplingParams
from branchwise.core.sequence import SequenceState
from branchwise.core.tree import DraftTree
from branchwise.draft import build_drafter
from branchwise.draft.recycle.drafter import Recycle
from branchwise.engine import Engine, Generation, Request
from branchwise.methods import PRESETS
from branchwise.models import load_model
from branchwise.verify import VERIFIERS

SHAPES: dict[str, dict[str, Any]] = {
    "smollm2": {
        "vocab_size": 49152,
        "hidden_size": 576,
        "intermediate_size": 1536,
        "num_hidden_layers": 30,
        "num_attention_heads": 9,
        "num_key_value_heads": 3,
        "tie_word_embeddings": True,
        "max_position_embeddings": 32768,
    },
    "llama-8b": {
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "max_position_embeddings": 32768,
    },
}
NODES = (1, 8, 16, 32, 64, 96, 128)
STEPS = {
    "none": ("none", None, "match", 0.0),
    "default": (PRESETS["default"].draft, PRESETS["default"].tree, "match", 0.0),
    "token-recycling": ("recycle", "ranks:recycling-80", "match", 0.0),
    "block": ("recycle", "chain:6", "block", 1.0),
    "cascade": ("recycle", "paths:4x6", "cascade", 1.0),
}
"""drafter, tree, verifier and temperature of whole steps"""
TOGETHER = ("none", "default")
"""of these, with several texts at once"""
PROMPT, TEXT = 600, 200
PROFILED = 20
"""steps whose kernels are summed"""
MOST_TIME = 16
"""kernels that are printed for a step; the records have all"""


def main() -> None:
    arguments = parse()
    path, records = arguments.out, []
    path.parent.mkdir(parents=True, exist_ok=True)
    with path.open("w") as file:
        try:
            for record in measured(arguments):  # each is kept at once: a run may be cut short
                file.write(json.dumps(record) + "\n")
                file.flush()
                records.append(record)
        except KeyboardInterrupt:
            print("Interrupted; what was measured is kept.")
    print(f"{len(records)} records in {path}")
    if records:
        summarise(records)


def measured(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """All records, each with what it was measured on; what is asked for most comes first."""
    device = torch.device("cuda")
    model = (
        random_model(arguments.shape)
        if arguments.shape
        else load_model(arguments.model, dtype=torch.bfloat16, device="cuda")[0]
    )
    arguments.model = Path(arguments.model).name  # whose folder is nobody's business
    about = {"model": arguments.shape or arguments.model, "weights": "random" if arguments.shape else "real"}
    run = {**provenance(device, arguments), "dtype": "bfloat16"}
    run["arguments"].pop("out", None)
    bandwidth, size = measured_bandwidth(), bytes_read(model)
    yield {**about, "kind": "floor", "bytes": size, "bandwidth": bandwidth, "seconds": size / bandwidth, "run": run}
    longest = context_limit(model.config)
    arguments.contexts = [context for context in arguments.contexts if context <= longest]
    for mode in arguments.modes:
        target = TransformersTarget(
            model,
            slots=max(arguments.batches),
            context=max(arguments.contexts),
            kernels=mode != "eager",
            compile=mode == "compiled",
        )
        for record in measured_on(target, arguments):
            yield {**about, **record, "mode": mode, "run": run}
        del target
        torch.cuda.empty_cache()


def measured_on(target: TransformersTarget, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    first, *longer = arguments.contexts
    yield from passes(target, [(first, 1, nodes) for nodes in arguments.nodes], arguments.rounds)
    if not arguments.passes:
        yield from steps(target, arguments)
        if "token-recycling" in arguments.methods:
            yield from lookups(target, arguments.rounds)
        if arguments.profile:
            yield from kernels(target, arguments)
        yield from together(target, arguments)
    several = [(first, batch, nodes) for batch in arguments.batches if batch > 1 for nodes in (1, 16)]
    yield from passes(target, several, arguments.rounds)
    behind_more = [(context, 1, nodes) for context in longer for nodes in arguments.nodes]
    yield from passes(target, behind_more, arguments.rounds)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="a model with real weights")
    parser.add_argument("--shape", choices=SHAPES, help="random weights of this shape in its place")
    parser.add_argument("--modes", nargs="*", default=["graph", "compiled"], choices=["eager", "graph", "compiled"])
    parser.add_argument("--nodes", type=int, nargs="*", default=NODES)
    parser.add_argument("--contexts", type=int, nargs="*", default=[1024, 4096, 16384])
    parser.add_argument("--batches", type=int, nargs="*", default=[1, 4, 16, 64])
    parser.add_argument("--rounds", type=int, default=20, help="timed passes of each size")
    parser.add_argument("--passes", action="store_true", help="passes alone, no steps")
    parser.add_argument("--methods", nargs="*", default=[*STEPS], choices=[*STEPS], help="whose steps are timed")
    parser.add_argument("--text", type=int, default=TEXT, help="tokens of a text that steps write")
    parser.add_argument("--profile", action="store_true", help="steps kernel by kernel too, by torch's profiler")
    parser.add_argument("--commit", help="the commit that runs, where there is no git to ask")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "records" / "gpu.jsonl")
    return parser.parse_args()


def random_model(shape: str) -> Any:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(0)
    with torch.device("cuda"):
        torch.set_default_dtype(torch.bfloat16)
        try:
            return LlamaForCausalLM(LlamaConfig(**SHAPES[shape])).eval().requires_grad_(False)
        finally:
            torch.set_default_dtype(torch.float32)


def measured_bandwidth() -> float:
    """Bytes a second of a long copy, read and written counted."""
    source = torch.zeros(1 << 30, dtype=torch.int32, device="cuda")
    goal = torch.empty_like(source)
    times = [device_seconds(lambda: goal.copy_(source), 5) for _ in range(5)]
    return 2 * source.numel() * 4 / statistics.median(times)


def device_seconds(call: Callable[[], Any], times: int) -> float:
    """Seconds of the device for one of several calls in a row."""
    start, end = (torch.cuda.Event(enable_timing=True) for _ in range(2))
    start.record()
    for _ in range(times):
        call()
    end.record()
    end.synchronize()
    return start.elapsed_time(end) / 1e3 / times


def passes(target: TransformersTarget, wanted: list[tuple[int, int, int]], rounds: int) -> Iterator[dict[str, Any]]:
    """Passes behind contexts, for batches, over so many nodes."""
    rng = random.Random(0)
    for context, batch in dict.fromkeys((context, batch) for context, batch, _ in wanted):
        texts = [SequenceState([rng.randrange(1000, 20000) for _ in range(context - 200)])]
        target.open(texts[0])
        for _ in range(batch - 1):
            texts.append(SequenceState(list(texts[0].tokens)))
            target.fork(texts[0], texts[-1])
        sizes = [nodes for one, many, nodes in wanted if (one, many) == (context, batch)]
        forests = {
            nodes: TreeBatch([tree(nodes, rng) for _ in texts], "cuda", PadShape(nodes=nodes)) for nodes in sizes
        }
        for turn in range(-3, rounds):
            for nodes, tree_batch in forests.items():
                progress(f"context {context}, {batch} texts, {nodes} nodes, round {turn + 1}")
                torch.cuda.synchronize()
                start = time.perf_counter()
                target.score(texts, tree_batch)
                torch.cuda.synchronize()
                seconds = time.perf_counter() - start
                device = device_seconds(lambda: target.score(texts, tree_batch), 3)  # noqa: B023
                if turn >= 0:
                    yield {
                        "kind": "pass",
                        "context": context,
                        "batch": batch,
                        "nodes": nodes,
                        "turn": turn,
                        "call": seconds,
                        "seconds": device,
                    }
        for text in texts:
            target.close(text)


def steps(target: TransformersTarget, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Whole steps of the engine on one text, with the nodes of each; a first text is not counted.

    They follow each other as they do for a user: a step ends when the host has read what it accepted, and what it
    leaves to the device runs on beside the next one.
    """
    for name, engine, text in written(target, arguments):
        progress(f"steps of {name}")
        ended = time.perf_counter()
        while engine.busy:
            before, drafted = dict(text.stats.seconds), text.stats.drafted_tokens
            engine.step()
            seconds, ended = time.perf_counter() - ended, time.perf_counter()
            phases = {phase: spent - before.get(phase, 0.0) for phase, spent in text.stats.seconds.items()}
            nodes = 1 + text.stats.drafted_tokens - drafted
            room = engine.drafter.needs.pad_shape or PadShape()
            rows = target.bucket(1, max(room.nodes, nodes))[1]
            if text.stats.steps > 1:  # the first one also writes the prompt
                about = {"method": name, "step": text.stats.steps, "nodes": nodes, "rows": rows}
                yield {"kind": "step", **about, "seconds": seconds, **phases}


def written(target: TransformersTarget, arguments: argparse.Namespace) -> Iterator[tuple[str, Engine, Generation]]:
    """Of each method its engine and a text that waits to be written, when the same text was written once before."""
    rng = random.Random(1)
    words = [rng.randrange(1000, 20000) for _ in range(40)]
    prompt = tuple(rng.choice(words) for _ in range(PROMPT))
    for name in arguments.methods:
        draft, shape, verifier, temperature = STEPS[name]
        progress(f"first steps of {name}")
        engine = Engine(target, build_drafter(draft, shape), VERIFIERS.build(verifier))
        request = Request(prompt, SamplingParams(temperature, seed=1), max_new_tokens=arguments.text)
        engine.submit(request)
        while engine.busy:
            engine.step()
        yield name, engine, engine.submit(request)


def kernels(target: TransformersTarget, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """What the device does in a step of each method, summed by kernel; the profiler slows the host, not the kernels."""
    for name, engine, text in written(target, arguments):
        for _ in range(PROFILED // 2):
            engine.step()  # the prompt, and sizes that are tried first
        torch.cuda.synchronize()
        first = text.stats.steps
        with torch.profiler.profile(activities=[torch.profiler.ProfilerActivity.CUDA]) as profiler:
            while engine.busy and text.stats.steps < first + PROFILED:
                engine.step()
            torch.cuda.synchronize()
        steps = text.stats.steps - first
        engine.cancel(text)
        for event in profiler.key_averages():
            if event.self_device_time_total > 0:
                yield {
                    "kind": "kernel",
                    "method": name,
                    "kernel": event.key[:80],
                    "times": event.count / steps,
                    "seconds": event.self_device_time_total / 1e6 / steps,
                }


def lookups(target: TransformersTarget, rounds: int) -> Iterator[dict[str, Any]]:
    """A tree of Token Recycling looked up in a table on the device, and nothing else."""
    drafter = build_drafter(*STEPS["token-recycling"][:2])
    assert isinstance(drafter, Recycle)
    drafter.bind(target.info)
    for turn in range(-3, rounds):
        torch.cuda.synchronize()
        start = time.perf_counter()
        found = drafter.looked_up([1000])
        torch.cuda.synchronize()
        call = time.perf_counter() - start
        device = device_seconds(lambda: drafter.looked_up([1000]), 20)
        if turn >= 0:
            yield {"kind": "lookup", "nodes": found.shape[1] - 1, "turn": turn, "call": call, "seconds": device}


def together(target: TransformersTarget, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Steps of several texts at once, for as long as all of them are being written; the first texts are not counted."""
    rng = random.Random(2)
    prompts = [tuple(rng.randrange(1000, 20000) for _ in range(100)) for _ in range(max(arguments.batches))]
    for batch in arguments.batches:
        for name in [name for name in TOGETHER if name in arguments.methods]:
            draft, shape, verifier, _ = STEPS[name]
            engine = Engine(target, build_drafter(draft, shape), VERIFIERS.build(verifier))
            for warm in (False, True):
                texts = [engine.submit(Request(prompt, max_new_tokens=arguments.text)) for prompt in prompts[:batch]]
                progress(f"{batch} texts with {name}" if warm else f"first {batch} texts with {name}")
                engine.step()
                ended = time.perf_counter()
                while not any(text.finished for text in texts):
                    before = sum(len(text.sequence.tokens) for text in texts)
                    engine.step()
                    seconds, ended = time.perf_counter() - ended, time.perf_counter()
                    tokens = sum(len(text.sequence.tokens) for text in texts) - before
                    if warm:
                        about = {"kind": "together", "batch": batch, "method": name}
                        yield {**about, "seconds": seconds, "tokens": tokens}
                for text in texts:
                    engine.cancel(text)


def tree(nodes: int, rng: random.Random) -> DraftTree:
    """Half a chain, half branches: the shape of a pass does not depend on what it is told."""
    parents = [-1]
    for node in range(1, nodes):
        parents.append(max(parents[-1], node - 1 - rng.randrange(3), 0))
    return DraftTree(torch.tensor([rng.randrange(1000, 20000) for _ in parents]), tuple(parents))


def summarise(records: list[dict[str, Any]]) -> None:
    floor = next(record for record in records if record["kind"] == "floor")
    print(
        f"floor {1e3 * floor['seconds']:.3f} ms: {floor['bytes'] / 1e9:.2f} GB at {floor['bandwidth'] / 1e12:.2f} TB/s"
    )
    found = [record for record in records if record["kind"] == "pass"]
    for key in dict.fromkeys((r["mode"], r["context"], r["batch"], r["nodes"]) for r in found):
        these = [r for r in found if (r["mode"], r["context"], r["batch"], r["nodes"]) == key]
        mode, context, batch, nodes = key
        device, call = (interval([1e3 * r[field] for r in these]) for field in ("seconds", "call"))
        print(f"{mode}, context {context}, {batch} texts, {nodes} nodes: {device} ms, as a call {call} ms")
    found = [record for record in records if record["kind"] == "step"]
    for mode, method in dict.fromkeys((r["mode"], r["method"]) for r in found):
        these = [r for r in found if (r["mode"], r["method"]) == (mode, method)]
        whole, outside = [1e3 * r["seconds"] for r in these], outside_the_pass(these, records)
        told = f", {interval(outside)} of it outside the pass" if outside else ""
        print(f"{mode}, a step of {method}: {interval(whole)} ms{told}")
    found = [record for record in records if record["kind"] == "kernel"]
    for mode, method in dict.fromkeys((r["mode"], r["method"]) for r in found):
        these = sorted((r for r in found if (r["mode"], r["method"]) == (mode, method)), key=lambda r: -r["seconds"])
        whole = 1e3 * sum(r["seconds"] for r in these)
        print(f"{mode}, a step of {method}: {whole:.3f} ms in {sum(r['times'] for r in these):.0f} kernels")
        for r in these[:MOST_TIME]:
            print(f"    {1e3 * r['seconds']:.3f} ms in {r['times']:.1f}: {r['kernel']}")
    found = [record for record in records if record["kind"] == "lookup"]
    for mode in dict.fromkeys(r["mode"] for r in found):
        these = [r for r in found if r["mode"] == mode]
        device, call = (interval([1e3 * r[field] for r in these]) for field in ("seconds", "call"))
        print(f"{mode}, {these[0]['nodes']} nodes looked up in a table: {device} ms, as a call {call} ms")
    found = [record for record in records if record["kind"] == "together"]
    speeds: dict[tuple[str, str, int], float] = {}
    for key in dict.fromkeys((r["mode"], r["method"], r["batch"]) for r in found):
        these = [r for r in found if (r["mode"], r["method"], r["batch"]) == key]
        mode, method, batch = key
        speeds[key] = statistics.mean(r["tokens"] for r in these) / statistics.median(r["seconds"] for r in these)
        ratio = speeds[key] / speeds.get((mode, method, 1), speeds[key])
        print(
            f"{mode}, {batch} texts of {method}: {interval([1e3 * r['seconds'] for r in these])} ms a step, "
            f"{speeds[key]:.0f} tokens/s, {ratio:.1f} times one"
        )


def outside_the_pass(steps: list[dict[str, Any]], records: list[dict[str, Any]]) -> list[float]:
    """Milliseconds of each step beyond a pass of its size, as passes were timed behind the first context.

    Between two passes the device also waits for the host, so the time of a pass within a step says too little.
    """
    passes: dict[tuple[str, int], list[float]] = {}
    alone = [r for r in records if r["kind"] == "pass" and r["batch"] == 1]
    for record in alone:
        if record["context"] == alone[0]["context"]:
            passes.setdefault((record["mode"], record["nodes"]), []).append(1e3 * record["seconds"])
    sizes = sorted({nodes for _, nodes in passes})
    found = []
    for step in steps:
        size = next((size for size in sizes if size >= step.get("rows", step["nodes"])), None)
        if size is not None:  # of a larger one no pass was timed
            found.append(1e3 * step["seconds"] - statistics.median(passes[step["mode"], size]))
    return found


if __name__ == "__main__":
    main()
