"""A draft model that drafts ahead of the host: plain decoding against its trees, and what a pass of either model costs.

Every prompt is written by each contestant in turn, at temperature 0 and 1: plain decoding, trees that the device draws
in one recording, and with `--levels` the same trees with the host between two levels. Steps are timed as they follow
each other for a user. What the device spends on drafting and on passes of the target is read from its own clock, around
what is enqueued for each; where the host comes late, the device waits, and that counts too.

    python benchmarks/chains.py --model coder-1.5b.gguf --draft-model coder-0.5b.gguf --prompts humaneval.jsonl.gz
    python benchmarks/chains.py --shape qwen2.5-coder      # random weights: what passes cost, labelled so

With random weights nothing is said about texts: how many tokens are accepted then means nothing.
"""

from __future__ import annotations

import argparse
import random
import statistics
import sys
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from measure import interval, kept, progress, provenance
from transformers import Qwen2Config, Qwen2ForCausalLM

from branchwise.backends.base import TargetInfo
from branchwise.backends.transformers.target import TransformersTarget
from branchwise.bench.prompts import EDITING, FREE, Item, load_items
from branchwise.core.sampling import SamplingParams
from branchwise.draft import build_drafter, build_policy
from branchwise.draft.base import Drafter
from branchwise.draft.model.ahead import ModelAhead
from branchwise.draft.model.draft_model import Weights
from branchwise.draft.model.drafter import ModelDrafter
from branchwise.engine import Engine, Request
from branchwise.errors import BranchwiseError
from branchwise.models import load_model
from branchwise.verify import VERIFIERS

QWEN: dict[str, Any] = {"vocab_size": 151936, "tie_word_embeddings": True, "max_position_embeddings": 32768}
SHAPES: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "qwen2.5-coder": (
        {
            "hidden_size": 1536,
            "intermediate_size": 8960,
            "num_hidden_layers": 28,
            "num_attention_heads": 12,
            "num_key_value_heads": 2,
            **QWEN,
        },
        {
            "hidden_size": 896,
            "intermediate_size": 4864,
            "num_hidden_layers": 24,
            "num_attention_heads": 14,
            "num_key_value_heads": 2,
            **QWEN,
        },
    ),
    "tiny": (
        {"hidden_size": 32, "intermediate_size": 64, "num_hidden_layers": 2, "num_attention_heads": 4}
        | {"num_key_value_heads": 2, "vocab_size": 640, "max_position_embeddings": 512},
        {"hidden_size": 16, "intermediate_size": 32, "num_hidden_layers": 1, "num_attention_heads": 2}
        | {"num_key_value_heads": 1, "vocab_size": 640, "max_position_embeddings": 512},
    ),
}
"""a target and its draft model"""
TREES = ("chain:4", "chain:6", "paths:4x6")
TEMPERATURES = (0.0, 1.0)
PROMPT = 200
"""tokens of a prompt for random weights"""
Span = tuple[Any, Any]


class LevelByLevel(ModelDrafter):
    """With the host between two levels, on any device."""

    def _on_device(self, target: TargetInfo) -> ModelAhead | None:
        return None


def main() -> None:
    arguments = parse()
    records = kept(measured(arguments), arguments.out)
    print(f"{len(records)} records in {arguments.out}")
    summarise(records)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", help="the target: a GGUF file, a folder or a hub id")
    parser.add_argument("--draft-model", help="the draft model, as --model")
    parser.add_argument("--shape", choices=SHAPES, help="random weights of this shape in the place of both")
    parser.add_argument("--prompts", type=Path, nargs="*", default=[], help="files as branchwise bench takes them")
    parser.add_argument("--limit", type=int, default=5, help="the first prompts of each category")
    parser.add_argument("--trees", nargs="*", default=TREES, help="what the draft model drafts")
    parser.add_argument("--levels", action="store_true", help="the same trees level by level too")
    parser.add_argument("--trim", type=int, help="the same trees with a head cut to so many tokens (calibrate vocab)")
    parser.add_argument("--temperatures", type=float, nargs="*", default=TEMPERATURES)
    parser.add_argument("--tokens", type=int, default=128, help="tokens of a text")
    parser.add_argument("--batch", type=int, default=1, help="texts that are written together")
    parser.add_argument("--context", type=int, default=2048)
    parser.add_argument("--no-compile", dest="compile", action="store_false", help="record layers as they are")
    parser.add_argument("--device", default="cuda")
    parser.add_argument("--commit", help="the commit that runs, where there is no git to ask")
    parser.add_argument("--out", type=Path, default=Path("chains.jsonl"))
    arguments = parser.parse_args()
    if not arguments.shape and not (arguments.model and arguments.draft_model):
        parser.error("name --model and --draft-model, or a --shape of random weights")
    return arguments


def measured(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A record for every text and contestant; the first text of a contestant at a temperature is not counted."""
    device = torch.device(arguments.device)
    (model, tokenizer), weights = models(arguments)
    prompts = prompts_of(arguments, tokenizer, int(model.config.vocab_size))
    trees = "none", *arguments.trees
    for name in ("model", "draft_model", "prompts", "trees"):  # where files lie on this machine is nobody's business
        setattr(arguments, name, told(getattr(arguments, name)))
    run = {**provenance(device, arguments), "dtype": str(model.dtype).removeprefix("torch.")}
    about = {"weights": "random" if arguments.shape else "real", "batch": arguments.batch, "run": run}
    target = TransformersTarget(
        model, slots=arguments.batch, context=arguments.context, tokenizer=tokenizer, compile=arguments.compile
    )
    engines = dict(one for tree in trees for one in made(target, weights, tree, arguments))
    groups = [prompts[place : place + arguments.batch] for place in range(0, len(prompts), arguments.batch)]
    for temperature in arguments.temperatures:
        for turn, group in enumerate([groups[0], *groups]):
            for name, engine in engines.items():
                progress(f"{name}, temperature {temperature:g}, texts {turn} of {len(groups)}")
                found = written(engine, group, temperature, arguments.tokens)
                if turn:
                    yield {"contestant": name, "temperature": temperature, "texts": turn, **found, **about}


def models(arguments: argparse.Namespace) -> tuple[tuple[Any, Any], Weights]:
    """The target with its tokenizer, and the draft model."""
    if arguments.shape:
        target, draft = (random_model(shape, arguments.device) for shape in SHAPES[arguments.shape])
        return (target, None), Weights(f"random {arguments.shape}", draft, None)
    kind = torch.bfloat16
    return (
        load_model(arguments.model, dtype=kind, device=arguments.device),
        Weights.of(arguments.draft_model, kind, torch.device(arguments.device)),
    )


def random_model(shape: dict[str, Any], device: str) -> Any:
    torch.manual_seed(0)
    with torch.device(device):
        torch.set_default_dtype(torch.bfloat16 if device != "cpu" else torch.float32)
        try:
            return Qwen2ForCausalLM(Qwen2Config(**shape)).eval().requires_grad_(False)
        finally:
            torch.set_default_dtype(torch.float32)


def prompts_of(arguments: argparse.Namespace, tokenizer: Any, vocabulary: int) -> list[tuple[int, ...]]:
    if tokenizer is None:
        rng = random.Random(0)
        size = min(PROMPT, arguments.context // 4)
        return [tuple(rng.randrange(vocabulary) for _ in range(size)) for _ in range(arguments.limit)]
    if not arguments.prompts:
        return [chatted(tokenizer, prompt) for prompt in [*FREE, *EDITING][: arguments.limit]]
    return [encoded(tokenizer, item) for item in load_items(arguments.prompts, limit=arguments.limit)]


def encoded(tokenizer: Any, item: Item) -> tuple[int, ...]:
    text = item.turns[0]
    return tuple(tokenizer(text)["input_ids"]) if item.raw else chatted(tokenizer, text)


def chatted(tokenizer: Any, prompt: str) -> tuple[int, ...]:
    chat = [{"role": "user", "content": prompt}]
    shown = tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    return tuple(tokenizer(shown, add_special_tokens=False)["input_ids"])


def told(value: Any) -> Any:
    """A value without the folders of files in it."""
    if isinstance(value, list | tuple):
        return [told(one) for one in value]
    if isinstance(value, str) and ":" in value:
        return ":".join(map(told, value.split(":")))
    return Path(value).name if isinstance(value, str | Path) else value


def made(
    target: TransformersTarget, weights: Weights, tree: str, arguments: argparse.Namespace
) -> Iterator[tuple[str, Engine]]:
    """The engines of a tree by name."""
    if tree == "none":
        yield "none", Engine(target, build_drafter("none"), VERIFIERS.build("match"))
        return
    ways: dict[str, ModelDrafter] = {"": ModelDrafter(weights, tree=build_policy(tree))}
    if arguments.levels:
        ways[" by level"] = LevelByLevel(weights, tree=build_policy(tree))
    if arguments.trim:
        ways[f", {arguments.trim} tokens"] = ModelDrafter(weights, trim=arguments.trim, tree=build_policy(tree))
    for way, drafter in ways.items():
        yield f"{told(tree)}{way}", Engine(target, drafter, VERIFIERS.build("auto"))


def written(engine: Engine, prompts: Sequence[tuple[int, ...]], temperature: float, tokens: int) -> dict[str, Any]:
    """What texts took that are written together, once all of their prompts are read."""
    device = engine.target.info.device
    sampling = SamplingParams(temperature, seed=1)
    texts = [engine.submit(Request(prompt, sampling, tokens)) for prompt in prompts]
    while not all(text.token_ids for text in texts):
        engine.step()
    before, steps, passes = sum(len(text.token_ids) for text in texts), 0, engine.drafter.passes
    with clocked(engine, device) as spans:
        settle(device)
        start = time.perf_counter()
        while engine.busy:
            engine.step()
            steps += 1
        settle(device)
        seconds = time.perf_counter() - start
    emitted = sum(len(text.token_ids) for text in texts) - before
    drafted = engine.drafter.passes - passes
    return {
        "seconds": seconds,
        "steps": steps,
        "tokens": emitted,
        "draft_passes": drafted,
        "draft_seconds": spent(spans["draft"], device),
        "target_seconds": spent(spans["target"], device),
    }


@contextmanager
def clocked(engine: Engine, device: torch.device) -> Iterator[dict[str, list[Span]]]:
    """When the device began and ended what is enqueued for drafting and for passes of the target."""
    spans: dict[str, list[Span]] = {"draft": [], "target": []}
    watched: list[tuple[Drafter | TransformersTarget, str, str]] = [
        (engine.drafter, "draft", "draft"),
        (engine.drafter, "update_on_device", "draft"),
        (engine.target, "score", "target"),  # type: ignore[list-item]
        (engine.target, "launch", "target"),  # type: ignore[list-item]
    ]
    for owner, method, kind in watched:
        owner.__dict__[method] = watching(getattr(owner, method), spans[kind], device)
    try:
        yield spans
    finally:
        for owner, method, _ in watched:
            del owner.__dict__[method]


def watching(method: Callable[..., Any], spans: list[Span], device: torch.device) -> Callable[..., Any]:
    def call(*given: Any) -> Any:
        start = mark(device)
        found = method(*given)
        spans.append((start, mark(device)))
        return found

    return call


def mark(device: torch.device) -> Any:
    if device.type != "cuda":
        return time.perf_counter()
    event = torch.cuda.Event(enable_timing=True)
    event.record()
    return event


def spent(spans: Sequence[Span], device: torch.device) -> float:
    if device.type != "cuda":
        return sum(end - start for start, end in spans)
    return sum(start.elapsed_time(end) for start, end in spans) / 1e3


def settle(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize()


def summarise(records: Sequence[dict[str, Any]]) -> None:
    """For each temperature and contestant: speed against plain decoding, text by text, and what passes cost. Medians of
    the texts, because a first verdict of its kind may be compiled in the middle of one."""
    if records and records[0]["weights"] == "random":
        print("Random weights: passes cost what they would, and how much is accepted means nothing.")
    head = f"{'temperature':>11}  {'contestant':24}{'tokens/s':>9}{'of plain':>22}{'a step':>8}{'step ms':>9}"
    print(f"{head}{'draft ms':>10}{'a pass':>8}{'target ms':>11}")
    for temperature in dict.fromkeys(record["temperature"] for record in records):
        these = [record for record in records if record["temperature"] == temperature]
        plain = {record["texts"]: speed(record) for record in these if record["contestant"] == "none"}
        for name in dict.fromkeys(record["contestant"] for record in these):
            own = [record for record in these if record["contestant"] == name]
            steps, passes = (sum(record[field] for record in own) for field in ("steps", "draft_passes"))
            step, draft, target = (
                1e3 * statistics.median(record[field] / record["steps"] for record in own)
                for field in ("seconds", "draft_seconds", "target_seconds")
            )
            ratios = [speed(record) / plain[record["texts"]] for record in own]
            line = f"{temperature:11g}  {name:24}{statistics.median(map(speed, own)):9.1f}{interval(ratios):>22}"
            line += f"{sum(r['tokens'] for r in own) / steps:8.2f}{step:9.2f}"
            each = f"{draft * steps / passes:8.2f}" if passes else f"{'':8}"
            print(f"{line}{draft:10.2f}{each}{target:11.2f}")


def speed(record: dict[str, Any]) -> float:
    return float(record["tokens"] / record["seconds"])


if __name__ == "__main__":
    try:
        main()
    except BranchwiseError as error:
        sys.exit(f"chains.py: {error}")
