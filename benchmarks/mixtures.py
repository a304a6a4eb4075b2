"""What a mixture accepts of its own reduction: by how many experts are kept, by which way, for which task.

The mixture is made of a dense model (`making.py`) and written to a folder. For each task its experts are reduced to
fewer and fewer, by every way; what the whole mixture accepts is measured on held-out answers to that task, and to the
others. The best of each size then drafts in the engine, beside plain decoding, in turns.

    python benchmarks/mixtures.py --model smollm2 --minutes 8 --experts 8 --out mixtures.jsonl
    python benchmarks/mixtures.py --tiny --out mixtures.jsonl
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from making import TASKS, World, real_world, tiny_world, tune, upcycled
from measure import kept, progress, provenance, recorded

from branchwise.backends.transformers.runner import bytes_read
from branchwise.backends.transformers.target import TransformersTarget
from branchwise.core.sampling import SamplingParams
from branchwise.draft import build_drafter, build_policy
from branchwise.draft.base import Drafter
from branchwise.draft.model.draft_model import Weights
from branchwise.draft.model.drafter import ModelDrafter
from branchwise.engine import Engine, Request
from branchwise.train.experts.reduce import WAYS, grouped, reduced
from branchwise.train.experts.usage import Text, acceptance, usage_of
from branchwise.verify import VERIFIERS


def main() -> None:
    arguments = parse()
    summarise(recorded(arguments.read) if arguments.read else kept(measured(arguments), arguments.out))


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2", help="the dense model that the mixture is made of")
    parser.add_argument("--tiny", action="store_true", help="a small target of three languages in its place")
    parser.add_argument("--experts", type=int, default=8)
    parser.add_argument("--active", type=int, default=2)
    parser.add_argument("--keep", type=int, nargs="+", help="experts that are kept; several sizes without")
    parser.add_argument("--noise", type=float, default=0.3, help="by which experts differ at first, of their spread")
    parser.add_argument("--minutes", type=float, default=8.0, help="of tuning the mixture")
    parser.add_argument("--texts", type=int, default=4000, help="of each task, to tune it on")
    parser.add_argument("--held-out", type=int, default=24, help="prompts of each task; a quarter is measured with")
    parser.add_argument("--tokens", type=int, default=128, help="of an answer")
    parser.add_argument("--tree", default="chain:4")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--commit", help="the commit that runs, where there is no git to ask")
    parser.add_argument("--out", type=Path, default=Path("mixtures.jsonl"))
    parser.add_argument("--folder", type=Path, help="keep the mixture and the best reductions of it here")
    parser.add_argument("--read", type=Path, help="summarise these records; nothing is measured")
    return parser.parse_args()


def measured(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    if arguments.tiny:
        world, steps = tiny_world(64, arguments.held_out, min(arguments.tokens, 24)), 200
    else:
        asked = (
            arguments.model,
            arguments.device,
            arguments.dtype,
            arguments.texts,
            arguments.held_out,
            arguments.tokens,
        )
        world, steps = real_world(*asked), 0
    run = {**provenance(world.model.device, arguments), "dtype": str(world.model.dtype).removeprefix("torch.")}
    mixture = upcycled(world.model, arguments.experts, arguments.active, arguments.noise)
    lessons = [
        text for number, task in enumerate(TASKS) for text in world.answers(world.model, world.learned[task], number)
    ]
    start = time.perf_counter()
    done = tune(
        mixture,
        world.model,
        lessons,
        steps=steps,
        minutes=arguments.minutes,
        rate=1e-3 if arguments.tiny else 1e-4,
        balance=0.01,
        told=lambda step, loss: progress(f"tuning the mixture: step {step}, loss {loss:.3f}"),
    )
    mixture = mixture.to(world.model.dtype)
    put_aside(arguments.folder, "mixture", mixture, world)
    target = TransformersTarget(mixture, slots=8, tokenizer=world.tokenizer)
    texts = {task: answered(target, world, task) for task in TASKS}
    measured_on = {task: found[3::4] for task, found in texts.items()}
    yield {
        "what": "mixture",
        "steps": done,
        "seconds": time.perf_counter() - start,
        "like the dense model": acceptance(world.model, mixture, measured_on["chat"]),
        "run": run,
    }
    for task in TASKS:
        yield from reductions(arguments, world, mixture, target, texts, measured_on, task, run)


def reductions(
    arguments: argparse.Namespace,
    world: World,
    mixture: Any,
    target: TransformersTarget,
    texts: dict[str, list[Text]],
    measured_on: dict[str, list[Text]],
    task: str,
    run: dict[str, Any],
) -> Iterator[dict[str, Any]]:
    usages = usage_of(mixture, [text for number, text in enumerate(texts[task]) if number % 4 != 3])
    sizes = [size for size in arguments.keep or (8, 6, 4, 3, 2, 1, 16, 32) if size <= arguments.experts]
    for active in dict.fromkeys((arguments.active, 1)):
        for keep in sorted({size for size in sizes if size >= active}, reverse=True):
            best: tuple[float, Any] = (-1.0, None)
            for way in WAYS if keep < arguments.experts else WAYS[:1]:
                made = reduced(mixture, usages, [grouped(usage, keep, way) for usage in usages], way, active)
                found = {other: acceptance(mixture, made, measured_on[other]) for other in TASKS}
                yield {
                    "what": "reduction",
                    "task": task,
                    "keep": keep,
                    "active": active,
                    "way": way,
                    "acceptance": found,
                    "cost": bytes_read(made) / bytes_read(mixture),
                    "bytes": sum(weight.nbytes for weight in made.parameters()),
                    "share": [float(usage.share.sort(descending=True).values[:keep].sum()) for usage in usages],
                    "run": run,
                }
                best = max(best, (found[task], made), key=lambda pair: pair[0])
            put_aside(arguments.folder, f"{task}-{keep}-{active}", best[1], world)
            drafter = ModelDrafter(Weights("reduced", best[1], world.tokenizer), tree=build_policy(arguments.tree))
            ways: dict[str, Drafter] = {"plain": build_drafter("none"), "reduced": drafter}
            for name, numbers in decoded(
                target, ways, [text.tokens[: text.prompt] for text in measured_on[task]], world
            ).items():
                yield {
                    "what": "speed",
                    "task": task,
                    "keep": keep,
                    "active": active,
                    "method": name,
                    **numbers,
                    "run": run,
                }


def put_aside(folder: Path | None, name: str, model: Any, world: World) -> None:
    """Keep a model where `--model` and `--draft-model` find it."""
    if folder is not None:
        model.save_pretrained(folder / name)
        world.tokenizer.save_pretrained(folder / name)


def answered(target: TransformersTarget, world: World, task: str) -> list[Text]:
    """What the mixture itself answers at temperature 1."""
    engine = Engine(target, build_drafter("none"), VERIFIERS.build("match"))
    stops = frozenset([world.tokenizer.eos_token_id])
    found = [
        engine.submit(Request(tuple(prompt), SamplingParams(temperature=1.0, seed=number), world.length, stops))
        for number, prompt in enumerate(world.measured[task])
    ]
    while engine.busy:
        engine.step()
    return [Text(one.sequence.tokens, one.sequence.prompt_length) for one in found if one.token_ids]


def decoded(
    target: TransformersTarget, ways: dict[str, Drafter], prompts: list[list[int]], world: World
) -> dict[str, dict[str, float]]:
    """Tokens a step and a second of every way, texts alone and in turns; the first text of each warms up."""
    engines = {
        name: Engine(target, drafter, VERIFIERS.build("match" if name == "plain" else "block"))
        for name, drafter in ways.items()
    }
    steps: dict[str, list[float]] = {name: [] for name in ways}
    speed: dict[str, list[float]] = {name: [] for name in ways}
    stops = frozenset([world.tokenizer.eos_token_id])
    for number, prompt in enumerate([prompts[0], *prompts]):
        for name, engine in engines.items():
            start = time.perf_counter()
            text = engine.submit(
                Request(tuple(prompt), SamplingParams(temperature=1.0, seed=number), world.length, stops)
            )
            while engine.busy:
                engine.step()
            if number:
                steps[name].append(len(text.token_ids) / text.stats.steps)
                speed[name].append(len(text.token_ids) / (time.perf_counter() - start))
    return {
        name: {"tokens a step": statistics.mean(steps[name]), "tokens a second": statistics.mean(speed[name])}
        for name in ways
    }


def summarise(records: list[dict[str, Any]]) -> None:
    for record in records:
        if record["what"] == "mixture":
            print(f"the mixture draws {record['like the dense model']:.3f} of what the dense model draws")
        elif record["what"] == "reduction":
            shown = "  ".join(f"{task} {value:.3f}" for task, value in record["acceptance"].items())
            print(
                f"for {record['task']:5s} keep {record['keep']:2d} active {record['active']} {record['way']:8s} "
                f"cost {record['cost']:.2f}  accepted: {shown}"
            )
        else:
            print(
                f"    {record['task']} keep {record['keep']} active {record['active']} {record['method']:8s} "
                f"{record['tokens a step']:.2f} tokens a step, {record['tokens a second']:.1f} a second"
            )


if __name__ == "__main__":
    torch.manual_seed(0)
    main()
