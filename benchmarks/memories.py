"""What drafting from memory costs: the draft, the update behind it, and what is held.

Every memory drafts on the same real texts, SmolLM2 in bfloat16, greedy. Trees have up to 64 nodes, as many as a memory
knows. A draft is from the texts to the trees, an update from the verdict to the drafter being ready for the next step:
both are outside every pass of the model. Over tri-grams stand the heap of `topk` and the walks of `puct`, as the paper
has them and as deep as the heap, with the same nodes to spend: tokens a step say whether walks pay for their time.

    python benchmarks/memories.py [--index DIR] [--out FILE.jsonl]

`--index` adds `retrieval`; `branchwise index build` makes one, and its size is told by `branchwise index info`.
"""

from __future__ import annotations

import argparse
import gc
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FunctionType, ModuleType
from typing import Any

import numpy as np
import torch
from measure import interval, progress, provenance
from torch import Tensor

import branchwise
from branchwise.bench.prompts import EDITING, FREE
from branchwise.draft import build_drafter
from branchwise.draft.base import Drafter
from branchwise.engine import Engine, Request
from branchwise.llm import LLM
from branchwise.verify import VERIFIERS

TREES = {
    "topk": "topk:64,depth=16,width=8",
    "ranks": "ranks:recycling-80",
    "puct": "puct:64",
    "deep puct": "puct:64,length=16",
    "paced": "paced:63",
}
SOURCES = [
    ("recycle", "topk"),
    ("recycle", "ranks"),
    ("stand", "topk"),
    ("trigram", "topk"),
    ("trigram", "puct"),
    ("trigram", "deep puct"),
    ("ngram:min=1", "topk"),
    ("suffix:min=1", "topk"),
    ("suffix:min=1,keep=100000", "topk"),
    ("fused:recycle+suffix(min=1)", "topk"),
    ("fused:recycle+stand(max=3)+suffix(min=1)", "topk"),
    ("fused:recycle+stand(max=3)+suffix(min=1)", "paced"),
]
RETRIEVING = [("retrieval:{}", "topk"), ("fused:recycle+suffix(min=1)+retrieval({})", "topk")]


def main() -> None:
    arguments = parse()
    llm = branchwise.load(draft="none", dtype="bfloat16", device=arguments.device, threads=arguments.threads)
    run = provenance(llm.model.device, arguments)
    run["arguments"]["index"] = arguments.index and arguments.index.name
    sources = [*SOURCES, *(RETRIEVING if arguments.index else [])]
    records = []
    for source, tree in sources:
        about = {"source": source.format("DIR"), "tree": TREES[tree], "run": run}
        found = measured(llm, source.format(arguments.index), TREES[tree], arguments.tokens)
        records += [{**about, **record} for record in found]
    arguments.out.parent.mkdir(parents=True, exist_ok=True)
    arguments.out.write_text("".join(json.dumps(record) + "\n" for record in records))
    print(f"{len(records)} records in {arguments.out}")
    summarise(records)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--index", type=Path, help="folder of an index for this model")
    parser.add_argument("--tokens", type=int, default=96, help="of each text")
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--commit", help="the commit that runs, where there is no git to ask")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/records/memories.jsonl"))
    return parser.parse_args()


def measured(llm: LLM, source: str, tree: str, tokens: int) -> Iterator[dict[str, Any]]:
    """A record for every step, of all texts one after the other; the memory goes on learning."""
    drafter = build_drafter(source, tree)
    engine = Engine(llm.engine.target, drafter, VERIFIERS.build("match"))
    drafts, updates = clocked(drafter, "draft"), clocked(drafter, "observe")
    for number, prompt in enumerate((FREE[0], EDITING[0], EDITING[1])):
        progress(f"{source}, {tree}: text {number + 1}")
        made = engine.submit(Request(tuple(llm.encode(prompt)), max_new_tokens=tokens, stop_tokens=llm.stop_tokens))
        nodes = written = 0
        while not made.finished:
            engine.step()
            yield {
                "text": number,
                "draft": drafts.pop(),
                "update": updates.pop(),
                "nodes": made.stats.drafted_tokens - nodes,
                "tokens": made.stats.emitted_tokens - written,
                "bytes": held(drafter),
            }
            nodes, written = made.stats.drafted_tokens, made.stats.emitted_tokens


def clocked(drafter: Drafter, verb: str) -> list[float]:
    """Let a verb of a drafter note how long it takes."""
    found: list[float] = []
    own: Callable[..., Any] = getattr(drafter, verb)

    def timed(*given: Any) -> Any:
        start = time.perf_counter()
        result = own(*given)
        found.append(time.perf_counter() - start)
        return result

    setattr(drafter, verb, timed)
    return found


def held(drafter: Drafter) -> int:
    """Bytes that a drafter holds: all data that can be reached from it, except its target. A mapped file counts."""
    met, waiting, total = {id(drafter.target)}, [vars(drafter)], 0  # type: ignore[attr-defined]
    while waiting:
        one = waiting.pop()
        array = isinstance(one, Tensor | np.ndarray)
        key = torch.as_tensor(one).data_ptr() if array else id(one)  # an array may be a view of a tensor
        if key in met or isinstance(one, type | ModuleType | FunctionType):
            continue
        met.add(key)
        total += one.nbytes if array else sys.getsizeof(one)
        waiting += [] if array else gc.get_referents(one)
    return total


def summarise(records: list[dict[str, Any]]) -> None:
    """Milliseconds a step, medians with 95 % intervals and the slowest tenth; and what is held, also behind a text."""
    for source, tree in dict.fromkeys((r["source"], r["tree"]) for r in records):
        own = [r for r in records if (r["source"], r["tree"]) == (source, tree)]
        nodes, drafts, updates = ([r[name] for r in own] for name in ("nodes", "draft", "update"))
        tokens, most = statistics.mean(r["tokens"] for r in own), max(r["bytes"] for r in own) / 1e6
        left = {r["text"]: f"{r['bytes'] / 1e6:.2f}" for r in own}.values()  # of each text the last step, which ends it
        print(f"{source}, {tree}: {statistics.mean(nodes):.1f} nodes and {tokens:.2f} tokens a step")
        print(f"  holds  {most:.2f} MB at most, {', '.join(left)} MB when a text has ended")
        for name, values in (("draft", drafts), ("update", updates)):
            slow = statistics.quantiles(values, n=10)[-1]
            print(f"  {name:6} {interval([1e3 * value for value in values])} ms, a tenth above {1e3 * slow:.2f}")
        full = [1e3 * r["draft"] for r in own if r["nodes"] >= 60]
        if len(full) > 9:
            print(f"  draft of 60 nodes and more {interval(full)} ms")


if __name__ == "__main__":
    main()
