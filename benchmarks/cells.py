"""Whether speculation pays in every cell: so many texts at once, by so many ways of choosing tokens.

Methods run beside plain decoding on one loaded model, in turn on every group of prompts, in an order that alternates.
A group is as many prompts of one category as the batch holds, or, where a category has fewer, of all categories mixed.
Times are of whole answers, prompts included, and tokens are counted by id. Every engine is warmed up as `load` does it;
no pass of a cell goes untimed, so what a first request still has to prepare shows in the first turn.

    python benchmarks/cells.py --prompts spec_bench.jsonl [--compile] [--methods default ngram] [--plot cells.png]
    python benchmarks/cells.py --prompts spec_bench.jsonl --device cpu --batches 1 4 --max-batch 4 --limit 4 --tokens 32
    python benchmarks/cells.py --read FILE.jsonl [--plot cells.png]

An engine lives through the whole run. What its drafter learned from texts is put back to what it was at load before
every turn, because a turn asks the same questions again and a memory would know the answers; `--keep-memory` lets it.
"""

from __future__ import annotations

import argparse
import statistics
import zlib
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from operator import itemgetter
from pathlib import Path
from typing import Any

import torch
from measure import interval, kept, progress, provenance, recorded, timed

from branchwise.bench.prompts import Item, load_items
from branchwise.core.sampling import SamplingParams
from branchwise.draft.base import LearningDrafter
from branchwise.engine import Engine, Generation, Request
from branchwise.engine.stats import PHASES
from branchwise.engine.warmup import leave_to_itself, warm_up
from branchwise.errors import UsageError
from branchwise.llm import LLM, load
from branchwise.methods import PLAIN, find_methods
from branchwise.plots import LIGHT, check_plot, paint_ratios, pyplot, save

WAYS: dict[str, tuple[str, dict[str, Any]]] = {
    "greedy": ("greedy", {}),
    "t1": ("T = 1", {"temperature": 1.0}),
    "bias": ("greedy, bias", {}),
    "nucleus": ("T = 0.8, top-p 0.9", {"temperature": 0.8, "top_p": 0.9}),
}
"""ways of choosing tokens: what tables call them, and their options; `bias` forbids the end of a text besides"""
CATEGORIES = ["math_reasoning", "summarization", "translation"]
"""of Spec-Bench, each with more prompts than a group needs: reasoning, much to copy, and little to foresee"""
SEED = 1


@dataclass(frozen=True)
class Group:
    """Prompts that are submitted together."""

    category: str | None
    """None if they are of several"""
    items: Sequence[Item]


@dataclass
class Side:
    """What one engine did in a cell, turn by turn."""

    tokens: list[int] = field(default_factory=list)
    seconds: list[float] = field(default_factory=list)
    by_category: dict[str, list[tuple[int, float]]] = field(default_factory=dict)
    """tokens and seconds of every turn, of the groups that hold one category"""
    phases: dict[str, float] = field(default_factory=lambda: dict.fromkeys(("prefill", *PHASES), 0.0))
    """seconds of steps; `prefill` is until the last prompt of a group was written"""
    passes: int = 0
    """steps of the engine, however many texts took part"""
    steps: int = 0
    """steps of texts"""
    drafted: int = 0
    rested: int = 0
    """steps of texts in which the engine let nothing be drafted because it would not pay, if it says so"""
    prepared: Counter[str] = field(default_factory=Counter)
    """steps of texts in which something was compiled, recorded, or run without either, if the engine says so"""
    ids: dict[tuple[int, str], list[int]] = field(default_factory=dict)
    """the answers, by turn and item"""

    @property
    def speeds(self) -> list[float]:
        return [tokens / seconds for tokens, seconds in zip(self.tokens, self.seconds, strict=True)]

    def as_dict(self) -> dict[str, Any]:
        stepping = sum(self.phases[phase] for phase in PHASES)
        return {
            "tokens": self.tokens,
            "seconds": self.seconds,
            "tokens_per_second": sum(self.tokens) / sum(self.seconds),
            "phases": dict(self.phases),
            "verify_share": self.phases["verify"] / stepping if stepping else None,
            "passes": self.passes,
            "tokens_per_step": sum(self.tokens) / self.steps,
            "nodes_per_step": self.drafted / self.steps,
            "rested": self.rested / self.steps,
            "prepared": dict(self.prepared),
        }


def main() -> None:
    arguments = parse()
    if arguments.read:
        records = recorded(arguments.read)
        summarise(records)
    else:
        try:
            records = kept(measured(arguments), arguments.out)
        except KeyboardInterrupt:
            records = recorded(arguments.out)
            print("Interrupted; the cells that were measured are kept.")
        print(f"{len(records)} records in {arguments.out}")
        tabulate(records)
    if arguments.plot and records:
        draw(records, arguments.plot)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--methods", nargs="+", default=["default"], help="names or specs, as `branchwise bench`")
    parser.add_argument("--draft-model", help="of methods that draft with a model")
    parser.add_argument("--head", help="file of a trained head, of methods that draft with one")
    parser.add_argument("--prompts", type=Path, nargs="+", help="files of prompts, as `branchwise bench`")
    parser.add_argument("--categories", nargs="+", default=CATEGORIES, help="of those prompts; `all` for every one")
    parser.add_argument("--limit", type=int, default=16, help="prompts of each category")
    parser.add_argument("--batches", type=int, nargs="+", default=[1, 4, 16, 64], help="texts at once")
    parser.add_argument("--ways", nargs="+", default=[*WAYS], choices=[*WAYS], help="of choosing tokens")
    parser.add_argument("--tokens", type=int, default=128, help="of an answer, at most")
    parser.add_argument("--turns", type=int, default=3, help="times that every group is asked")
    parser.add_argument("--keep-memory", action="store_true", help="let drafters remember the answers of earlier turns")
    parser.add_argument("--max-batch", type=int, default=64, help="slots for texts, whatever the batches")
    parser.add_argument("--context", type=int, default=2048, help="tokens of a slot; longer prompts are left out")
    parser.add_argument("--compile", action="store_true", help="compile layers before a GPU records them")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--commit", help="the commit that runs, where there is no git to ask")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "records" / "cells.jsonl")
    parser.add_argument("--read", type=Path, help="show these records; nothing is measured")
    parser.add_argument("--plot", type=Path, help="draw a heat map of the cells into this PNG file")
    arguments = parser.parse_args()
    if arguments.read is None and not arguments.prompts:
        parser.error("give --prompts or --read")
    if arguments.max_batch < max(arguments.batches):
        parser.error(f"--max-batch {arguments.max_batch} has no room for a batch of {max(arguments.batches)}")
    if arguments.plot:
        check_plot(arguments.plot)
    return arguments


# ---- measuring ---------------------------------------------------------------------------------------------------


def measured(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """A record for every cell and method, as soon as the cell is measured."""
    methods = find_methods(arguments.methods, arguments.draft_model, None, arguments.head)
    wanted = () if arguments.categories == ["all"] else arguments.categories
    items = load_items(arguments.prompts, categories=wanted)
    llm = load(
        arguments.model,
        method=methods[0],  # its engine is then the one that users have
        device=arguments.device,
        dtype=arguments.dtype,
        threads=arguments.threads,
        context=arguments.context,
        max_batch=arguments.max_batch,
        compile=arguments.compile,
        warmup=False,
        progress=False,
    )
    room = llm.engine.target.info.context - arguments.tokens
    items = first_of_each([item for item in items if len(encoded(llm, item)) <= room], arguments.limit)
    if not items:
        raise UsageError("No prompt fits into the context; choose a larger --context or other prompts.")
    run = {**provenance(llm.model.device, arguments), "dtype": str(llm.model.dtype).removeprefix("torch.")}
    run["arguments"] = without_folders(run["arguments"])
    engines = {method.name: llm.with_method(method).engine for method in (PLAIN, *methods[1:])}
    engines[methods[0].name] = llm.engine
    warmed = {name: warm_up(engine, progress=False) for name, engine in engines.items()}
    leave_to_itself()
    about = {"model": Path(arguments.model).name, "prompts": len(items), "warm_up": warmed, "run": run}
    fresh = {} if arguments.keep_memory else {name: learned(engine) for name, engine in engines.items()}
    for batch in arguments.batches:
        groups = grouped(items, batch)
        for way in arguments.ways:
            sides = cell(llm, engines, groups, way, arguments, fresh)
            for method in methods:
                record = compared(sides[PLAIN.name], sides[method.name], exact=method.verify == "match")
                record = {**about, "method": method.name, "batch": batch, "way": way, "groups": len(groups), **record}
                record["reasons"] = engines[method.name].reasons(batch)
                print(line(record), flush=True)
                yield record


def without_folders(asked: Mapping[str, Any]) -> dict[str, Any]:
    """Arguments as records keep them: whose folders a file lies in is nobody's business."""
    named = ("prompts", "draft_model", "head", "model", "plot", "read")
    found = {name: value for name, value in asked.items() if name not in named or value is None}
    for name in named:
        value = asked.get(name)
        if value is not None:
            found[name] = [Path(one).name for one in value] if isinstance(value, list) else Path(value).name
    return found


def first_of_each(items: Sequence[Item], limit: int) -> list[Item]:
    """The first prompts of every category."""
    found: dict[str, list[Item]] = {}
    for item in items:
        found.setdefault(item.category, []).append(item)
    return [item for own in found.values() for item in own[:limit]]


def grouped(items: Sequence[Item], batch: int) -> list[Group]:
    """Groups of `batch` prompts, each of one category if every category can fill one, else of all of them mixed."""
    kinds: dict[str | None, list[Item]] = {}
    for item in items:
        kinds.setdefault(item.category, []).append(item)
    if min(map(len, kinds.values())) < batch:
        kinds = {None: list(items)} if len(kinds) > 1 else kinds
    return [
        Group(category, own[start : start + batch])
        for category, own in kinds.items()
        for start in range(0, len(own), batch)
    ]


def cell(
    llm: LLM,
    engines: Mapping[str, Engine],
    groups: Sequence[Group],
    way: str,
    arguments: argparse.Namespace,
    fresh: Mapping[str, Sequence[tuple[LearningDrafter, dict[str, torch.Tensor]]]],
) -> dict[str, Side]:
    """All turns of a cell: every group is answered by all engines, one after the other, before the next group."""
    sides = {name: Side() for name in engines}
    for turn in range(arguments.turns):
        for state in fresh.values():
            for drafter, tensors in state:
                drafter.restore({name: tensor.clone() for name, tensor in tensors.items()})
        for side in sides.values():
            side.tokens.append(0)
            side.seconds.append(0.0)
        for number, group in enumerate(groups):
            progress(f"{way}, {len(group.items)} texts, turn {turn + 1}, group {number + 1} of {len(groups)}")
            requests = [asked(llm, item, way, turn, arguments.tokens) for item in group.items]
            order = [*engines] if (turn + number) % 2 == 0 else [*engines][::-1]
            for name in order:
                write(engines[name], requests, group, turn, sides[name])
    return sides


def asked(llm: LLM, item: Item, way: str, turn: int, tokens: int) -> Request:
    """The same for all engines: with the same seed, `match` writes what plain decoding writes."""
    ends, forbidding = llm.stop_tokens, way == "bias"
    options = {"logit_bias": dict.fromkeys(ends, float("-inf"))} if forbidding else WAYS[way][1]
    seed = zlib.crc32(f"{SEED}/{item.id}/{turn}".encode())
    sampling = SamplingParams(seed=seed, **options)
    return Request(tuple(encoded(llm, item)), sampling, tokens, frozenset() if forbidding else ends)


def encoded(llm: LLM, item: Item) -> list[int]:
    return llm.encode(item.turns[0], raw=item.raw)


def write(engine: Engine, requests: Sequence[Request], group: Group, turn: int, side: Side) -> None:
    """Answer a group as `LLM.generate` answers a list, and book it."""
    texts: list[Generation] = []

    def answer() -> None:
        texts.extend(engine.submit(request) for request in requests)
        while engine.busy:
            # All texts of a step share its times: those of one text, before and after, are the step's.
            running = [one for one in engine.scheduler.running if not one.finished][:1]
            before = dict(running[0].stats.seconds) if running else {}
            moved = engine.step()
            if moved:
                side.passes += 1
                for phase, spent in moved[0].stats.seconds.items():
                    side.phases[phase] += spent - before.get(phase, 0.0)

    try:
        seconds, _ = timed(engine.target.device, answer)
    finally:
        for text in texts:
            engine.cancel(text)
    tokens = 0
    for text, item in zip(texts, group.items, strict=True):
        text.check()
        tokens += len(text.token_ids)
        side.steps += text.stats.steps
        side.drafted += text.stats.drafted_tokens
        side.rested += getattr(text.stats, "rested", 0)
        side.prepared.update(getattr(text.stats, "prepared", {}))
        side.ids[turn, item.id] = text.token_ids
    # All are submitted at once: when the longest prefill is over, all are. Texts that are ready step meanwhile.
    side.phases["prefill"] += max(text.stats.prefill_seconds for text in texts)
    side.tokens[turn] += tokens
    side.seconds[turn] += seconds
    if group.category is not None:
        turns = side.by_category.setdefault(group.category, [])
        turns.extend([(0, 0.0)] * (turn + 1 - len(turns)))
        turns[turn] = (turns[turn][0] + tokens, turns[turn][1] + seconds)


def learned(engine: Engine) -> list[tuple[LearningDrafter, dict[str, torch.Tensor]]]:
    """What an engine's drafters know, to be put back later."""
    parts = (engine.drafter, *engine.drafter.members)
    own = [part for part in parts if isinstance(part, LearningDrafter) and part.learns]
    return [(part, {name: tensor.clone() for name, tensor in part.save().items()}) for part in own]


def compared(plain: Side, own: Side, exact: bool) -> dict[str, Any]:
    """A method beside plain decoding: both sides, and its speed over plain decoding's turn by turn.

    `exact` says that it must write the very texts of plain decoding, but for rounding; then equal texts are counted.
    """
    ratios = [mine / other for mine, other in zip(own.speeds, plain.speeds, strict=True)]
    categories = {
        name: [
            (tokens / seconds) / (others / theirs)
            for (tokens, seconds), (others, theirs) in zip(turns, plain.by_category[name], strict=True)
        ]
        for name, turns in own.by_category.items()
    }
    same = [ids == plain.ids[key] for key, ids in own.ids.items()] if exact else []
    return {
        "ratios": ratios,
        "categories": categories,
        "texts": len(own.ids),
        "equal": sum(same) if exact else None,
        "plain": plain.as_dict(),
        "own": own.as_dict(),
    }


# ---- telling -----------------------------------------------------------------------------------------------------


def line(record: Mapping[str, Any]) -> str:
    own, plain = record["own"], record["plain"]
    verdict = "" if own["verify_share"] is None else f", verdict {own['verify_share']:.0%} of it"
    equal = "" if record["equal"] is None else f", {record['equal']}/{record['texts']} texts equal"
    prepared = "".join(f", {count} {name}" for name, count in own["prepared"].items() if count)
    rested = f", {own['rested']:.0%} of steps without a draft" if own.get("rested") else ""
    return (
        f"batch {record['batch']:2}, {WAYS[record['way']][0]}: {record['method']} "
        f"{own['tokens_per_second']:.0f} tokens/s, plain {plain['tokens_per_second']:.0f}: "
        f"{interval(record['ratios'])}, first turn {record['ratios'][0]:.3f}; {own['tokens_per_step']:.2f} tokens and "
        f"{own['nodes_per_step']:.1f} nodes a step of {1e3 * sum(own['seconds']) / own['passes']:.2f} ms "
        f"(plain {1e3 * sum(plain['seconds']) / plain['passes']:.2f}){verdict}{rested}{equal}{prepared}"
    )


def summarise(records: Sequence[Mapping[str, Any]]) -> None:
    """The cells one by one, then as a table."""
    for record in records:
        print(line(record))
    tabulate(records)


def tabulate(records: Sequence[Mapping[str, Any]]) -> None:
    """Speed over plain decoding by batch and way of choosing tokens, over all prompts and by category."""
    for method in dict.fromkeys(record["method"] for record in records):
        own = [record for record in records if record["method"] == method]
        ways = list(dict.fromkeys(record["way"] for record in own))
        print(f"\n{method}: times as fast as plain decoding, median of turns with a 95 % interval")
        print(f"{'batch':>5}  {'prompts':15}" + "".join(f"{WAYS[way][0]:>22}" for way in ways))
        for batch in sorted({record["batch"] for record in own}):
            cells = {record["way"]: record for record in own if record["batch"] == batch}
            kinds = dict.fromkeys(name for record in cells.values() for name in record["categories"])
            ratios = {"all": {way: record["ratios"] for way, record in cells.items()}}
            ratios |= {
                name: {way: record["categories"][name] for way, record in cells.items() if name in record["categories"]}
                for name in kinds
            }
            for name, found in ratios.items():
                texts = "".join(f"{interval(found[way]) if way in found else '':>22}" for way in ways)
                print(f"{batch if name == 'all' else '':>5}  {name:15}{texts}".rstrip())


def draw(records: Sequence[Mapping[str, Any]], file: Path) -> None:
    """For every method a heat map of its cells, and one of categories by cell."""
    names = list(dict.fromkeys(record["method"] for record in records))
    batches = sorted({record["batch"] for record in records})
    ways = list(dict.fromkeys(record["way"] for record in records))
    lines = max(len(batches), len({name for record in records for name in record["categories"]}))
    widths = [1.1 * len(ways), 0.62 * len(batches) * len(ways)]
    size = (3.5 + sum(widths), 1.2 + len(names) * (1.2 + 0.42 * lines))
    figure, places = pyplot().subplots(len(names), 2, figsize=size, squeeze=False, width_ratios=widths)
    for (left, right), method in zip(places, names, strict=True):
        own = [record for record in records if record["method"] == method]
        cells = {(r["batch"], r["way"]): statistics.median(r["ratios"]) for r in own}
        paint_ratios(
            left,
            LIGHT,
            [f"batch {batch}" for batch in batches],
            [WAYS[way][0].replace(", ", "\n") for way in ways],
            [[cells.get((batch, way)) for way in ways] for batch in batches],
        )
        left.set_title(f"{method}: times as fast as plain decoding", fontsize=9, loc="left")
        kinds = list(dict.fromkeys(name for record in own for name in record["categories"]))
        single = sorted((record for record in own if record["categories"]), key=itemgetter("batch"))
        if not kinds:
            right.set_axis_off()
            continue
        ratios = [[record["categories"].get(kind) for record in single] for kind in kinds]
        paint_ratios(
            right,
            LIGHT,
            kinds,
            [f"{record['batch']}\n{record['way']}" for record in single],
            [[None if turns is None else statistics.median(turns) for turns in row] for row in ratios],
        )
        right.set_title("by category, where groups hold one", fontsize=9, loc="left")
    save(figure, file)


if __name__ == "__main__":
    main()
