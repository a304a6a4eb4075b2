"""What trained heads give: tokens a pass by category, and tokens a second beside plain decoding and Token Recycling.

The target writes answers to the prompts once, greedy or at a temperature. Tokens a pass come from replaying these
against trees of a head (`branchwise.train.head.replay`, which counts the passes that the engine makes with `match`),
over the whole answer, within its first tokens, and without answers that repeat themselves. Speed is measured with real
decoding, methods in turn.

    python benchmarks/heads.py --heads carry.head eagle.head --prompts spec_bench.jsonl
    python benchmarks/heads.py --heads smollm2.head --prompts spec_bench.jsonl --speed --chains --trees
"""

from __future__ import annotations

import argparse
import statistics
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from itertools import islice
from pathlib import Path
from typing import Any, NamedTuple, TypeGuard

import torch
from measure import interval, kept, progress, provenance, recorded

from branchwise.bench.prompts import load_items
from branchwise.core.sampling import SamplingParams
from branchwise.draft import build_drafter
from branchwise.draft.base import Drafter, LearningDrafter
from branchwise.draft.head.speculators import read_head
from branchwise.engine import Engine, Generation, Request
from branchwise.llm import LLM, load
from branchwise.plots import pyplot, save
from branchwise.provenance import without_folder
from branchwise.train.corpus import Text
from branchwise.train.head.learn import Score, Watched
from branchwise.train.head.replay import Replay, Shape
from branchwise.train.texts import Writer, without_loops
from branchwise.verify import VERIFIERS

DEPTH, WIDTH = 8, 8
"""of replayed trees"""
ROUNDS = 4
"""texts that queue for a place in a batch of several"""


class Method(NamedTuple):
    """A way to write. `itself` drafts with the target: what a head would give that had learned all there is."""

    draft: str
    tree: str | None = None
    temperature: float = 0.0
    copies: int = 0
    """tokens that a head may copy"""
    verifier: str = "match"


METHODS = {
    "none": Method("none"),
    "token-recycling": Method("recycle", "ranks:recycling-80"),
    "memories": Method("memories"),
    "suffix": Method("suffix"),
    "head 15": Method("head", "topk:15,depth=4,width=6"),
    "head 31": Method("head", "topk:31,depth=5,width=8"),
    "head 63": Method("head", "topk:63,depth=6,width=8"),
    "head 63, copies": Method("head", "topk:63,depth=6,width=8", copies=15),
    "head as shipped": Method("head"),
    "none, T = 1": Method("none", temperature=1.0),
    "head 31, T = 1": Method("head", "topk:31,depth=5,width=8", temperature=1.0),
    "head as shipped, T = 1": Method("head", temperature=1.0),
    "itself 31, T = 1": Method("itself", "topk:31,depth=5,width=8", temperature=1.0),
    "head chain 5, block, T = 1": Method("head", "chain:5", temperature=1.0, verifier="block"),
    "head 6x5, gbv, T = 1": Method("head", "paths:6x5", temperature=1.0, verifier="gbv"),
    "head 6x5, cascade, T = 1": Method("head", "paths:6x5", temperature=1.0, verifier="cascade"),
    "head 6x5, traversal, T = 1": Method("head", "paths:6x5", temperature=1.0, verifier="traversal"),
    "head 24, traversal, T = 1": Method("head", "template:sequoia-24", temperature=1.0, verifier="traversal"),
}


class Answer(NamedTuple):
    category: str
    text: Text
    loops: bool
    """whether it repeats itself"""


def main() -> None:
    arguments = parse()
    records = recorded(arguments.read) if arguments.read else kept(measured(arguments), arguments.out)
    if arguments.read is None:
        print(f"{len(records)} records in {arguments.out}")
    summarise(records)
    if arguments.plot is not None:
        draw(records, arguments.plot)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--heads", nargs="+", help="files that `branchwise train head` wrote")
    parser.add_argument("--prompts", type=Path, nargs="+", help="files of prompts, as `branchwise bench`")
    parser.add_argument("--limit", type=int, help="prompts of each category")
    parser.add_argument("--tokens", type=int, default=160, help="of an answer, at most")
    parser.add_argument("--tables", type=int, nargs="*", default=[32_768], help="tokens that heads may propose")
    parser.add_argument("--chains", type=int, nargs="*", default=[4, 6], help="lengths of replayed chains")
    parser.add_argument("--trees", type=int, nargs="*", default=[16, 32, 64], help="nodes of replayed trees")
    parser.add_argument("--copies", type=int, nargs="*", default=[0], help="tokens that replayed trees may copy")
    parser.add_argument("--temperature", type=float, default=0.0, help="of the answers; trees meet them with `match`")
    parser.add_argument("--first", type=int, default=48, help="tokens of the beginning of an answer, counted apart")
    parser.add_argument(
        "--share",
        type=share,
        default=(1, 1),
        metavar="K/N",
        help="replay every N-th answer, from the K-th on: processes that share a device, whose records add up",
    )
    parser.add_argument("--speed", action="store_true", help="tokens a second as well")
    parser.add_argument("--methods", nargs="*", choices=METHODS, default=[*METHODS], help="what --speed measures")
    parser.add_argument("--turns", type=int, default=5, help="how often each method writes each text, for --speed")
    parser.add_argument("--each", type=int, default=1, help="prompts of each category, for --speed")
    parser.add_argument("--batches", type=int, nargs="*", default=[1], help="texts at once, for --speed")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--compile", action="store_true")
    parser.add_argument("--commit", help="the commit that runs, where there is no git to ask")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "records" / "heads.jsonl")
    parser.add_argument("--plot", type=Path, help="draw the learning curves of the heads as a PNG file")
    parser.add_argument("--read", type=Path, help="summarise and draw these records; nothing is measured")
    arguments = parser.parse_args()
    if arguments.read is None and not (arguments.heads and arguments.prompts):
        parser.error("give --heads and --prompts, or --read")
    return arguments


def share(text: str) -> tuple[int, int]:
    first, of = (int(part) for part in text.split("/"))
    if not 1 <= first <= of:
        raise ValueError(text)
    return first, of


def measured(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    llm = load(
        arguments.model,
        draft="none",
        device=arguments.device,
        dtype=arguments.dtype,
        max_batch=max(arguments.batches),
        warmup=False,
        compile=arguments.compile,
    )
    run = provenance(llm.engine.target.device, arguments)
    run["arguments"] |= {"heads": [Path(file).name for file in arguments.heads]}  # whose folders are nobody's business
    run["arguments"] |= {"prompts": [file.name for file in arguments.prompts], "model": without_folder(llm.name)}
    for record in measured_with(llm, arguments):
        yield {"model": without_folder(llm.name), **record, "run": run}


def measured_with(llm: LLM, arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    answers, (first, of) = answered(llm, arguments), arguments.share
    for file in arguments.heads:
        if first == 1:
            yield learned(file)
        for table in arguments.tables if arguments.chains or arguments.trees else ():
            yield from replayed(llm, file, table, answers[first - 1 :: of], arguments)
    if arguments.speed:
        for batch in arguments.batches:
            yield from spent(llm, arguments, answers, batch)


def learned(file: str) -> dict[str, Any]:
    """The size of a head and its learning curve."""
    trained = read_head(Path(file))
    weights = sum(weight.numel() for weight in trained.head.parameters())
    known = {name: trained.about.get(name) for name in ("texts", "steps", "curve")}
    size = {"weights": weights, "bytes": Path(file).stat().st_size}
    return {"kind": "learned", "head": Path(file).name, **size, **known}


def answered(llm: LLM, arguments: argparse.Namespace) -> list[Answer]:
    """Answers to all turns; later turns stand behind the answers to those before them."""
    items = load_items(arguments.prompts, limit=arguments.limit)
    found, chats = [], [list[dict[str, str]]() for _ in items]
    stops = sorted(llm.stop_tokens)
    slots = 512 if llm.engine.target.device.type == "cuda" else 8
    with Writer(llm.model, stops, slots) as writer:
        for turn in range(max(len(item.turns) for item in items)):
            asked = [number for number, item in enumerate(items) if turn < len(item.turns)]
            prompts = []
            for number in asked:
                chats[number].append({"role": "user", "content": items[number].turns[turn]})
                prompts.append(encoded(llm, items[number], chats[number]))
            fitting = [place for place, prompt in enumerate(prompts) if len(prompt) + arguments.tokens < 2048]
            progress(f"turn {turn + 1}: {len(fitting)} answers")
            written = writer.write(
                [prompts[place] for place in fitting], [arguments.temperature] * len(fitting), arguments.tokens
            )
            for place, answer in zip(fitting, written, strict=True):
                number = asked[place]
                text = Text(torch.tensor([*prompts[place], *answer], dtype=torch.int32), len(prompts[place]))
                [cut] = without_loops([answer])
                found.append(Answer(items[number].category, text, len(cut) < len(answer)))
                said = str(llm.tokenizer.decode([token for token in answer if token not in stops]))
                chats[number].append({"role": "assistant", "content": said})
    return found


def encoded(llm: LLM, item: Any, chat: list[dict[str, str]]) -> list[int]:
    return llm.encode(item.turns[0], raw=True) if item.raw else chatted(llm, chat)


def chatted(llm: LLM, chat: list[dict[str, str]]) -> list[int]:
    shown = llm.tokenizer.apply_chat_template(chat, tokenize=False, add_generation_prompt=True)
    found: list[int] = llm.tokenizer(shown, add_special_tokens=False)["input_ids"]
    return found


def replayed(
    llm: LLM, file: str, table: int, answers: Sequence[Answer], arguments: argparse.Namespace
) -> Iterator[dict[str, Any]]:
    """Tokens and passes of the answers of each category, those with loops apart, for chains and trees."""
    replay = replay_of(llm, file, table)
    groups = [[Shape.chain(length)] for length in arguments.chains]
    trees = {
        f"tree {nodes}{f', {copies} copied' if copies else ''}": Shape(nodes, DEPTH, WIDTH, copies)
        for nodes in arguments.trees
        for copies in arguments.copies
    }
    groups += [list(trees.values())] if trees else []
    names = [*(f"chain {length}" for length in arguments.chains), *trees]
    read = sum(weight.nbytes for weight in replay.head.parameters()) + replay.target.rows.nbytes
    whole = llm.engine.target.info.weight_bytes
    about = {
        "kind": "replay",
        "head": Path(file).name,
        "table": len(replay.target.table),
        "cost": read / whole if whole else None,
        "temperature": arguments.temperature,
    }
    sums: dict[tuple[str, bool, str], list[Counter[str]]] = {}
    for number, (category, text, loops) in enumerate(answers):
        progress(f"{Path(file).name}: answer {number + 1} of {len(answers)}")
        parts = {"all": text}
        if arguments.first:
            parts[f"first {arguments.first}"] = Text(text.tokens[: text.prompt + arguments.first], text.prompt)
        for part, cut in parts.items():
            passes = [count for shapes in groups for count in replay.passes(cut, shapes)]
            counts, totals = sums.setdefault((category, loops, part), [Counter(), Counter()])
            counts.update(answers=1, tokens=len(cut.tokens) - cut.prompt)
            totals.update(dict(zip(names, passes, strict=True)))
    for (category, loops, part), (counts, totals) in sums.items():
        yield {**about, "category": category, "loops": loops, "part": part, **counts, "passes": dict(totals)}


def replay_of(llm: LLM, file: str, table: int) -> Replay:
    """A head beside its target, with so many tokens that it may propose."""
    trained = read_head(Path(file))
    target = llm.engine.target
    network = trained.head.to(target.device, target.info.dtype)
    network.frequencies = trained.head.frequencies.float()
    tokens = trained.table[:table].to(target.device)
    return Replay(network, Watched(llm.model, network.config.taps, tokens, network.config.cross))


class Way(NamedTuple):
    """A method, with a head if it drafts with one."""

    method: str
    head: str | None


def spent(llm: LLM, arguments: argparse.Namespace, answers: Sequence[Answer], batch: int) -> Iterator[dict[str, Any]]:
    """Seconds of real decoding, prefill included, of the first prompts of each category, or of several rounds of these
    that queue for a batch; methods in turn, each of which knows at the beginning of a turn what it knew at the
    beginning of the first."""
    chosen = first_of_each(answers, arguments.each)
    chosen *= -(-(ROUNDS * batch if batch > 1 else 1) // len(chosen))
    table = arguments.tables[0]
    ways = [
        Way(method, head)
        for method in arguments.methods
        for head in (arguments.heads if METHODS[method].draft == "head" else [None])
    ]
    engines = {
        way: Engine(
            llm.engine.target, drafter_of(way, table, arguments.model), VERIFIERS.build(METHODS[way.method].verifier)
        )
        for way in ways
    }
    known = {engine.drafter: engine.drafter.save() for engine in engines.values() if learns(engine.drafter)}
    for turn in range(-2, arguments.turns):  # sizes are recorded when they come for the second time
        for way, engine in engines.items():
            progress(f"{batch} texts, {way.method}, turn {turn + 1}")
            sampling = SamplingParams(METHODS[way.method].temperature, seed=2 + turn)
            if engine.drafter in known:
                engine.drafter.restore(known[engine.drafter])
            asked = [tuple(answer.text.tokens[: answer.text.prompt].tolist()) for answer in chosen]
            start = time.perf_counter()
            texts, waiting = list[Generation](), iter(asked)
            while len(texts) < len(asked) or engine.busy:
                for prompt in islice(waiting, batch - sum(not text.finished for text in texts)):
                    texts.append(engine.submit(Request(prompt, sampling, max_new_tokens=128)))
                engine.step()
            seconds = time.perf_counter() - start
            if turn >= 0:
                counted: dict[str, Any] = {"tokens": sum(len(text.token_ids) for text in texts), "seconds": seconds}
                counted["steps"] = sum(text.stats.steps for text in texts)
                laps = [text.stats.seconds | {"prefill": text.stats.prefill_seconds} for text in texts]
                counted["laps"] = {name: sum(lap[name] for lap in laps) for name in laps[0]}
                counted["categories"] = by_category(chosen, texts)
                head = Path(way.head).name if way.head else None
                yield {"kind": "speed", "head": head, "table": table, "batch": batch, "method": way.method, **counted}


def first_of_each(answers: Sequence[Answer], count: int) -> list[Answer]:
    """The first answers of each category."""
    categories = dict.fromkeys(answer.category for answer in answers)
    return [a for category in categories for a in [a for a in answers if a.category == category][:count]]


def by_category(answers: Sequence[Answer], texts: Sequence[Generation]) -> dict[str, dict[str, int]]:
    found: dict[str, Counter[str]] = {}
    for answer, text in zip(answers, texts, strict=True):
        found.setdefault(answer.category, Counter()).update(tokens=len(text.token_ids), steps=text.stats.steps)
    return {category: dict(counts) for category, counts in found.items()}


def drafter_of(way: Way, table: int, model: str) -> Drafter:
    method = METHODS[way.method]
    copies = f",copies={method.copies}" if method.copies else ""
    specs = {"head": f"head:{way.head},table={table}{copies}", "itself": f"model:{model}"}
    return build_drafter(specs.get(method.draft, method.draft), method.tree)


def learns(drafter: Drafter) -> TypeGuard[LearningDrafter]:
    return isinstance(drafter, LearningDrafter) and drafter.learns


def summarise(records: Sequence[dict[str, Any]]) -> None:
    for record in records:
        if record["kind"] == "learned":
            seconds = f", {record['curve'][-1]['seconds']:.0f} s of learning" if record["curve"] else ""
            size = f"{record['weights'] / 1e6:.1f} M weights, {record['bytes'] / 1e6:.1f} MB"
            print(f"{Path(record['head']).stem:14} {size}, {record['texts']} texts, {record['steps']} steps{seconds}")
    found = [record for record in records if record["kind"] == "replay"]
    for table, part in dict.fromkeys((r["table"], r["part"]) for r in found):
        these = [r for r in found if (r["table"], r["part"]) == (table, part)]
        heads, shapes = list(dict.fromkeys(r["head"] for r in these)), list(these[0]["passes"])
        answers = sum(r["answers"] for r in these if r["head"] == heads[0])
        length = "whole answers" if part == "all" else f"the {part} tokens of answers"
        told = f"tokens a pass, {length}, {answers} of them, table of {table}"
        if len(heads) == 1:
            compare(f"{heads[0]}, {told}", {shape: (heads[0], shape) for shape in shapes}, these)
        for shape in shapes if len(heads) > 1 else ():
            compare(f"{shape}, {told}", {Path(head).stem: (head, shape) for head in heads}, these)
    found = [record for record in records if record["kind"] == "speed"]
    for batch, method, head in dict.fromkeys((r["batch"], r["method"], r["head"]) for r in found):
        these = [r for r in found if (r["batch"], r["method"], r["head"]) == (batch, method, head)]
        plain = "none, T = 1" if "T = 1" in method else "none"
        ratios = [
            r["tokens"] / r["seconds"] / (one["tokens"] / one["seconds"])
            for r, one in zip(these, (r for r in found if (r["batch"], r["method"]) == (batch, plain)), strict=False)
        ]
        speed = statistics.median(r["tokens"] / r["seconds"] for r in these)
        steps = sum(r["tokens"] for r in these) / sum(r["steps"] for r in these)
        beside = f", {interval(ratios)} x plain in {len(these)} turns" if ratios else ""
        name = f"{method}, {head}" if head else method
        drafting = sum(r["laps"]["draft"] + r["laps"]["commit"] for r in these) / sum(r["steps"] for r in these)
        step = f"{steps:.2f} tokens a step, {1e3 * drafting:.3f} ms of it drafting"
        print(f"{batch} texts, {name}: {speed:.0f} tokens/s, {step}{beside}")
    for batch in dict.fromkeys(r["batch"] for r in found if "categories" in r):
        steps_by_category([r for r in found if r["batch"] == batch and "categories" in r], batch)


def steps_by_category(records: Sequence[dict[str, Any]], batch: int) -> None:
    """Tokens a step of methods that wrote the same prompts."""
    several = len({r["head"] for r in records if r["head"]}) > 1
    ways = {
        f"{r['method']}, {Path(r['head']).stem}" if several and r["head"] else r["method"]: (r["method"], r["head"])
        for r in records
    }
    width = 2 + max(map(len, ways))
    print(f"tokens a step by category, {batch} texts:")
    print(" " * 16 + "".join(f"{name:>{width}}" for name in ways))
    for category in records[0]["categories"]:
        line = f"  {category:14}"
        for way in ways.values():
            own = [r["categories"][category] for r in records if (r["method"], r["head"]) == way]
            line += f"{sum(r['tokens'] for r in own) / sum(r['steps'] for r in own):{width}.2f}"
        print(line)


def compare(title: str, columns: dict[str, tuple[str, str]], records: Sequence[dict[str, Any]]) -> None:
    """Tokens a pass of heads and shapes, by category."""
    kinds = {"all": records, "without loops": [r for r in records if not r["loops"]]}
    for category in dict.fromkeys(r["category"] for r in records):
        kinds[category] = [r for r in records if r["category"] == category]
    width = 2 + max(12, *map(len, columns))
    print(f"{title}:")
    print(" " * 16 + "".join(f"{name:>{width}}" for name in columns))
    for kind, rows in kinds.items():
        line = f"  {kind:14}"
        for head, shape in columns.values():
            own = [r for r in rows if r["head"] == head]
            line += f"{tokens_a_pass(own, shape):{width}.2f}"
        print(line)
    if all(r.get("cost") for r in records):  # MBSU: the speed-up if time were weights read, as in docs/benchmarks.md
        line = f"  {'MBSU':14}"
        for head, shape in columns.values():
            own = [r for r in records if r["head"] == head]
            levels = int(shape.split()[1]) if shape.startswith("chain") else DEPTH
            line += f"{tokens_a_pass(own, shape) / (1 + own[0]['cost'] * levels):{width}.2f}"
        print(line)


def tokens_a_pass(records: Sequence[dict[str, Any]], shape: str) -> float:
    passes: int = sum(r["passes"][shape] for r in records)
    tokens: int = sum(r["tokens"] for r in records)
    return tokens / max(1, passes)


def draw(records: Sequence[dict[str, Any]], file: Path) -> None:
    """Tokens a pass that chains would have given in held-out texts while the heads learned."""
    plt = pyplot()
    figure, axis = plt.subplots(figsize=(7, 4))
    for record in records:
        if record["kind"] == "learned" and record["curve"]:
            values = [Score(scored["hits"]).tokens for scored in record["curve"]]
            minutes = [scored["seconds"] / 60 for scored in record["curve"]]
            axis.plot(minutes, values, "o-", markersize=3, linewidth=1, label=Path(record["head"]).stem)
    axis.set(xlabel="minutes of learning", ylabel="tokens a pass of a chain, held-out texts")
    axis.legend(fontsize=8, frameon=False)
    axis.spines[["top", "right"]].set_visible(False)
    save(figure, file)


if __name__ == "__main__":
    main()
