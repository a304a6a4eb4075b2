"""What a pack of specialists gives: acceptance and size beside each specialist, and beside one common student.

A student of some layers of the target learns from its texts of three tasks; then it learns on, for each task from texts
of that task alone, and, for as long, from all of them: three specialists and the common student. The specialists become
packs. What the target accepts of each is measured on held-out answers to every task, and texts of all tasks are written
by the engine with a specialist that is named, and with the one that the bandit finds.

    python benchmarks/packs.py --model smollm2 --layers 0 10 20 29 --minutes 4 --more 3 --out packs.jsonl
    python benchmarks/packs.py --tiny --out packs.jsonl
"""

from __future__ import annotations

import argparse
import copy
import statistics
import time
from collections.abc import Iterator
from contextlib import nullcontext
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch
from making import TASKS, World, first_layers, real_world, tiny_world, tune
from measure import kept, progress, provenance, recorded

from branchwise.backends.transformers.target import TransformersTarget
from branchwise.core.sampling import SamplingParams
from branchwise.draft import build_drafter
from branchwise.draft.model.pack import load_specialist
from branchwise.engine import Engine, Request
from branchwise.models.cache import bytes_in
from branchwise.train.experts.usage import Text, acceptance
from branchwise.train.merge import merge
from branchwise.verify import VERIFIERS


def main() -> None:
    arguments = parse()
    summarise(recorded(arguments.read) if arguments.read else kept(measured(arguments), arguments.out))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="the target")
    parser.add_argument("--tiny", action="store_true", help="a small target of three languages in its place")
    parser.add_argument("--layers", type=int, nargs="+", default=[0, 10, 20, 29], help="of the target, in the student")
    parser.add_argument("--minutes", type=float, default=4.0, help="of learning all tasks")
    parser.add_argument("--more", type=float, default=3.0, help="minutes of learning on, for each specialist")
    parser.add_argument("--texts", type=int, default=4000, help="of each task, to learn from")
    parser.add_argument("--held-out", type=int, default=16, help="prompts of each task to measure with")
    parser.add_argument("--tokens", type=int, default=192, help="of an answer")
    parser.add_argument("--tree", default="chain:5")
    parser.add_argument("--rate", type=float, default=3e-4)
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--commit", help="the commit that runs, where there is no git to ask")
    parser.add_argument("--out", type=Path, default=Path("packs.jsonl"))
    parser.add_argument("--folder", type=Path, help="keep students and packs here")
    parser.add_argument("--read", type=Path, help="summarise these records; nothing is measured")
    return parser.parse_args()


def measured(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    if arguments.tiny:
        world, steps = tiny_world(96, arguments.held_out, min(arguments.tokens, 64)), {"first": 40, "more": 60}
        layers, rate = [0], 2e-3
    else:
        asked = (
            arguments.model,
            arguments.device,
            arguments.dtype,
            arguments.texts,
            arguments.held_out,
            arguments.tokens,
        )
        world, steps, layers, rate = real_world(*asked), {}, arguments.layers, arguments.rate
    run = {**provenance(world.model.device, arguments), "dtype": str(world.model.dtype).removeprefix("torch.")}
    lessons = {task: world.answers(world.model, world.learned[task], number) for number, task in enumerate(TASKS)}
    answers = {task: world.answers(world.model, world.measured[task], 9) for task in TASKS}
    every = [text for task in TASKS for text in lessons[task]]

    def learn(student: Any, texts: list[Text], part: str) -> Any:
        minutes = arguments.minutes if part == "first" else arguments.more
        told = progress
        tune(
            student,
            world.model,
            texts,
            steps=steps.get(part, 0),
            minutes=minutes,
            rate=rate if part == "first" else rate / 2,
            told=lambda step, loss: told(f"{part}: step {step}, loss {loss:.3f}"),
        )
        return student

    base = learn(first_layers(world.model, layers), every, "first")
    students = {task: learn(copy.deepcopy(base), lessons[task], "more") for task in TASKS}
    students["common"] = learn(copy.deepcopy(base), every, "more")
    dtype = world.model.dtype
    with nullcontext(arguments.folder) if arguments.folder else TemporaryDirectory() as place:
        folder = Path(place)
        for name, student in {"base": base, **students}.items():
            student.to(torch.bfloat16).save_pretrained(folder / name)
            world.tokenizer.save_pretrained(folder / name)
        own = {task: str(folder / task) for task in TASKS}
        packs = {kind: merge(str(folder / "base"), own, folder / kind, kind) for kind in ("int8", "exact")}
        for name, student in {"base": base, **students}.items():
            found = {task: acceptance(world.model, student.to(dtype), answers[task]) for task in TASKS}
            yield {"what": "student", "name": name, "acceptance": found, "bytes": bytes_in(folder / name), "run": run}
        for kind, merged in packs.items():
            for task in TASKS:
                one, _ = load_specialist(str(folder / kind), task=task, dtype=dtype, device=str(world.model.device))
                found = {other: acceptance(world.model, one, answers[other]) for other in TASKS}
                told = vars(merged.tasks[task])
                yield {
                    "what": "pack",
                    "name": kind,
                    "task": task,
                    "acceptance": found,
                    "bytes": merged.bytes,
                    **told,
                    "run": run,
                }
        yield from spoken(arguments, world, folder, run)


def spoken(arguments: argparse.Namespace, world: World, folder: Path, run: dict[str, Any]) -> Iterator[dict[str, Any]]:
    """Texts that the engine writes alone, ways in turn: tokens a step and a second. The first of each way warms up."""
    target = TransformersTarget(world.model, slots=1, tokenizer=world.tokenizer)
    ways = {"plain": "none", "common": f"model:{folder / 'common'}", "bandit": f"model:{folder / 'int8'}"}
    ways |= {"named": f"model:{folder / 'int8'}", "specialist": ""}
    engines = {
        name: Engine(target, build_drafter(spec, None if spec == "none" else arguments.tree), rule(name))
        for name, spec in ways.items()
        if spec
    }
    for task in TASKS:
        own = build_drafter(f"model:{folder / task}", arguments.tree)
        engines["specialist"] = Engine(target, own, rule("specialist"))
        steps: dict[str, list[float]] = {name: [] for name in ways}
        speed: dict[str, list[float]] = {name: [] for name in ways}
        prompts = world.measured[task]
        for number, prompt in enumerate([prompts[0], *prompts]):
            for name, engine in engines.items():
                sampling = SamplingParams(temperature=1.0, seed=number)
                stops = frozenset([world.tokenizer.eos_token_id])
                start = time.perf_counter()
                request = Request(tuple(prompt), sampling, world.length, stops, task=task if name == "named" else None)
                text = engine.submit(request)
                while engine.busy:
                    engine.step()
                if number:
                    steps[name].append(len(text.token_ids) / text.stats.steps)
                    speed[name].append(len(text.token_ids) / (time.perf_counter() - start))
        for name in ways:
            yield {
                "what": "speed",
                "task": task,
                "method": name,
                "tokens a step": statistics.mean(steps[name]),
                "tokens a second": statistics.mean(speed[name]),
                "run": run,
            }


def rule(name: str) -> Any:
    return VERIFIERS.build("match" if name == "plain" else "block")


def summarise(records: list[dict[str, Any]]) -> None:
    for record in records:
        if record["what"] == "speed":
            print(
                f"{record['task']:5s} by {record['method']:10s} {record['tokens a step']:.2f} tokens a step, "
                f"{record['tokens a second']:.1f} a second"
            )
            continue
        name = record["name"] if record["what"] == "student" else f"{record['name']} pack, {record['task']}"
        shown = "  ".join(f"{task} {value:.3f}" for task, value in record["acceptance"].items())
        print(f"{name:16s} {record['bytes'] / 1e6:8.2f} MB  accepted: {shown}")


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
