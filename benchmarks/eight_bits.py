"""What weights of 8 and 4 bits are worth on a CPU.

1. Products with all linear layers of the model over 1 to 16 rows, by every way that torch offers: how long, and whether
   a row gives the same bits alone and among others. Ways that do not are shown for comparison; nothing here uses them.
2. Passes of the whole model over 1 to 16 nodes, in every kind of weights.
3. Tokens per second of plain decoding and of `default`, beside llama.cpp on GGUF files, from the same token ids and on
   the same number of threads. The drafted text must be that of plain decoding.

Everything that is compared takes turns in one process. Each measurement is one JSON line with its provenance.

    python benchmarks/eight_bits.py [--threads N] [--gguf FILE.gguf]... [--out FILE.jsonl]

llama.cpp runs where the package xllamacpp is found; by default on the file that the model comes from.
"""

from __future__ import annotations

import argparse
import os
import statistics
import time
import warnings
from collections.abc import Callable, Iterator
from importlib.util import find_spec
from pathlib import Path
from typing import Any

import torch
from measure import interval, kept, progress, provenance
from torch import Tensor
from torch.nn import functional

import branchwise
from branchwise.backends.exact import is_exact
from branchwise.backends.int8 import WAYS, Numbers, Way
from branchwise.backends.quantized import linear_layers
from branchwise.bench.contest import Asked, Contestant, Ours
from branchwise.bench.peers import build_peer
from branchwise.bench.prompts import EDITING, FREE
from branchwise.core.batch import TreeBatch
from branchwise.core.sequence import SequenceState
from branchwise.core.tree import DraftTree
from branchwise.errors import BranchwiseError
from branchwise.llm import LLM
from branchwise.methods import choose_method
from branchwise.models import load_model

ROWS = (1, 4, 8, 16)
KINDS = ("float32", "bfloat16", "int8", "int4")
METHODS = ("plain", "default")
HOPELESS = 10.0
"""times as long as float32, from which on a product is not measured any further"""
CPU = torch.device("cpu")

Product = Callable[[Tensor], Tensor]

CLOCKS = {"wall": time.perf_counter, "cpu": time.process_time}
clock = time.perf_counter
"""on a machine that others use, CPU time of one thread says what wall time does not"""


def main() -> None:
    global clock
    arguments = parse()
    clock = CLOCKS[arguments.clock]
    if arguments.threads:
        torch.set_num_threads(arguments.threads)
    run = provenance(CPU, arguments)
    parts = {"products": products, "passes": passes, "decoding": decoding}
    measured = (
        {"kind": part, **record, "load": os.getloadavg()[0], "run": run}
        for part in arguments.parts.split(",")
        for record in parts[part](arguments)
    )
    records = kept(measured, arguments.out)
    print(f"{len(records)} records in {arguments.out}, {torch.get_num_threads()} threads")
    summarise(records)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--kinds", default=",".join(KINDS), help="weights to compare")
    parser.add_argument("--parts", default="products,passes,decoding")
    parser.add_argument("--gguf", action="append", default=[], help="files for llama.cpp; may be repeated")
    parser.add_argument("--tokens", type=int, default=48, help="tokens to write for each prompt")
    parser.add_argument("--prompts", type=int, default=3, help="prompts of free writing, and as many of editing")
    parser.add_argument("--repeat", type=int, default=2, help="rounds over the prompts")
    parser.add_argument("--passes", type=int, default=15, help="timed products and passes of each size")
    parser.add_argument("--context", type=int, default=256, help="tokens in the cache when passes are timed")
    parser.add_argument("--clock", choices=CLOCKS, default="wall", help="cpu: CPU time of this process, all threads")
    parser.add_argument("--commit", help="the commit that runs, where there is no git to ask")
    parser.add_argument("--out", type=Path, default=Path("benchmarks/records/eight-bits.jsonl"))
    return parser.parse_args()


def timed(call: Callable[..., Any], *given: Any) -> tuple[float, Any]:
    start = clock()
    found = call(*given)
    return clock() - start, found


# Products


def products(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """All linear layers of the model one after the other."""
    model, _ = load_model(arguments.model, dtype=torch.float32, device="cpu")
    weights = [layer.weight.detach() for layer in linear_layers(model).values()]
    ways = {name: made for name in offered() if (made := attempted(name, weights)) is not None}
    with torch.inference_mode():
        for turn in range(-1, arguments.passes):
            for rows in ROWS:
                given = {width: torch.randn(rows, width) for width in {weight.shape[1] for weight in weights}}
                for name, (each, exact) in ways.items():
                    seconds, _ = timed(lambda each=each, given=given: [one(given[w]) for one, w in each])
                    if turn >= 0:
                        about = {"way": name, "rows": rows, "turn": turn, "exact": exact}
                        yield {**about, "seconds": seconds}
            progress(f"products: round {turn + 1} of {arguments.passes}")


def offered() -> list[str]:
    engines = [f"linear_dynamic {engine}" for engine in torch.backends.quantized.supported_engines if engine != "none"]
    ours = [f"int{bits} {way.name}" for bits, ways in WAYS.items() for way in ways]
    return ["float32", "bfloat16", *ours, "weight_int8pack_mm", *engines]


def attempted(name: str, weights: list[Tensor]) -> tuple[list[tuple[Product, int]], bool] | None:
    """The products of all layers with their widths, and whether rows are independent of each other; None if this CPU
    has no such product, or only one that is hopelessly slow."""
    made: list[tuple[Product, int]] = []
    first = weights[0]
    rows = torch.randn(16, first.shape[1])
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            product = product_of(name, first)
            (spent, _), (own, _) = (
                min((timed(way, rows.clone()) for _ in range(3)), key=lambda found: found[0])
                for way in (product, product_of("float32", first))
            )
            if spent > HOPELESS * own:
                print(f"{name}: {spent / own:.0f} times as long as float32, not measured any further")
                return None
            made = [(product_of(name, weight), weight.shape[1]) for weight in weights]
    except (RuntimeError, AttributeError, ValueError) as error:
        print(f"{name}: {str(error).splitlines()[0][:100]}")
        return None
    if isinstance(product, Way):
        return made, is_exact(product, Numbers.of(first, product.bits))
    found = product(rows)
    return made, all(torch.equal(product(rows[:n].clone()), found[:n]) for n in range(1, 16))


def product_of(name: str, weight: Tensor) -> Product:
    if name == "float32":
        return lambda rows: functional.linear(rows, weight)
    if name == "bfloat16":
        low = weight.bfloat16()
        return lambda rows: functional.linear(rows.bfloat16(), low)
    kind, _, way = name.partition(" ")
    if kind.startswith("int"):
        bits = int(kind.removeprefix("int"))
        [found] = [one for one in WAYS[bits] if one.name == way]
        return found(Numbers.of(weight, bits))
    matrix = Numbers.of(weight)
    scale = matrix.scale[:, 0].contiguous()
    if name == "weight_int8pack_mm":
        return lambda rows: torch._weight_int8pack_mm(rows, matrix.numbers, scale)
    torch.backends.quantized.engine = way
    zeros = torch.zeros(len(scale), dtype=torch.int64)
    made = torch._make_per_channel_quantized_tensor(matrix.numbers, scale.double(), zeros, 0)
    packed: Any = torch.ops.quantized.linear_prepack(made, None)
    dynamic: Any = torch.ops.quantized.linear_dynamic
    return lambda rows: dynamic(rows, packed, False)


# The whole model


def loaded(arguments: argparse.Namespace) -> dict[str, LLM]:
    found = {}
    for kind in arguments.kinds.split(","):
        options: dict[str, Any] = {"weights": kind} if kind.startswith("int") else {"dtype": kind}
        try:
            found[kind] = branchwise.load(arguments.model, draft="none", device="cpu", max_batch=1, **options)
        except BranchwiseError as error:
            print(f"{kind}: {error}")
    return found


def about(llm: LLM) -> dict[str, Any]:
    made = llm.conversion
    return {} if made is None else {"way": made.way, "distance": made.distance._asdict()}


def passes(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Passes over chains behind the same prefix."""
    models = loaded(arguments)
    count = min(llm.engine.target.vocabulary for llm in models.values())
    tokens = [(97 * i + 5) % count for i in range(arguments.context + max(ROWS))]
    sequences = {kind: SequenceState(tokens[: arguments.context]) for kind in models}
    for kind, llm in models.items():
        llm.engine.target.open(sequences[kind])
    for turn in range(-1, arguments.passes):
        for nodes in ROWS:
            for kind, llm in models.items():
                drafted = tokens[arguments.context : arguments.context + nodes - 1]
                batch = TreeBatch([DraftTree.chain([sequences[kind].root, *drafted])], CPU)
                seconds, _ = timed(llm.engine.target.score, [sequences[kind]], batch)
                if turn >= 0:
                    yield {"weights": kind, "rows": nodes, "turn": turn, "seconds": seconds, **about(llm)}
        progress(f"passes: round {turn + 1} of {arguments.passes}")


def decoding(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    """Whole answers of a fixed length, greedy, each with a new drafter."""
    models = loaded(arguments)
    one = next(iter(models.values()))
    contestants: dict[tuple[str, str], tuple[LLM, Contestant]] = {
        (kind, method): (llm, Ours(llm, choose_method(method))) for kind, llm in models.items() for method in METHODS
    }
    if find_spec("xllamacpp") is not None:
        for file in arguments.gguf or [None]:
            name = "llama.cpp" if file is None else f"llama.cpp {Path(file).stem}"
            spec = "llama.cpp" if file is None else f"llama.cpp:{file}"
            contestants[name, "plain"] = one, build_peer(spec, one, threads=torch.get_num_threads())
    asked = Asked(arguments.tokens, forbidden=one.stop_tokens, seeds=(0,))
    chosen = [*FREE[: arguments.prompts], *EDITING[: arguments.prompts]]
    for llm, contestant in contestants.values():
        contestant.write([llm.encode(FREE[-1])], asked)  # libraries choose their kernels on first use
    for turn in range(arguments.repeat):
        for number, prompt in enumerate(chosen):
            ids = one.encode(prompt)
            names = list(contestants)
            shift = (turn + number) % len(names)
            texts: dict[tuple[str, str], list[int]] = {}
            found = []
            for name in names[shift:] + names[:shift]:
                llm, contestant = contestants[name]
                contestant.forget()
                seconds, [answer] = timed(contestant.write, [ids], asked)
                texts[name] = answer.ids
                spent = seconds * (1 - answer.phases.get("prefill", 0.0) / answer.seconds)
                record = {"weights": name[0], "method": name[1], "prompt": number, "turn": turn, "steps": answer.steps}
                found.append({**record, "tokens": len(answer.ids), "seconds": seconds, "decode": spent})
            for record in found:
                kind = record["weights"]
                same = texts[kind, "plain"] == texts[kind, record["method"]]
                yield {**record, "equal": same, **(about(models[kind]) if kind in models else {})}
            progress(f"decoding: round {turn + 1} of {arguments.repeat}, prompt {number + 1} of {len(chosen)}")


# The summary


def summarise(records: list[dict[str, Any]]) -> None:
    """Medians; ratios are within a turn, so that a change of the machine's speed meets both sides."""
    for part, key in (("products", "way"), ("passes", "weights")):
        found = [record for record in records if record["kind"] == part]
        for name in dict.fromkeys(record[key] for record in found):
            own = [record for record in found if record[key] == name]
            times = [
                f"{rows}: {1e3 * statistics.median(r['seconds'] for r in own if r['rows'] == rows):.1f}"
                for rows in sorted({record["rows"] for record in own})
            ]
            exact = "" if own[0].get("exact", True) else "  (rows depend on each other)"
            print(f"{part}, {name}: ms by rows {', '.join(times)}{exact}")
    found = [record for record in records if record["kind"] == "decoding"]
    base = {(r["prompt"], r["turn"]): r["decode"] for r in found if (r["weights"], r["method"]) == ("float32", "plain")}
    peers = {(r["prompt"], r["turn"]): r["decode"] for r in found if r["weights"].startswith("llama.cpp")}
    for name in dict.fromkeys((record["weights"], record["method"]) for record in found):
        own = [record for record in found if (record["weights"], record["method"]) == name]
        speed = sum(r["tokens"] for r in own) / sum(r["decode"] for r in own)
        line = f"{' '.join(name)}: {speed:.1f} tokens/s without the prompt"
        for title, others in (("float32 plain", base), ("llama.cpp", peers)):
            if others and own[0]["decode"] is not None:
                line += f", {interval([others[r['prompt'], r['turn']] / r['decode'] for r in own])} times {title}"
        unequal = sum(not record["equal"] for record in own)
        print(line + (f", {unequal} of {len(own)} texts differ from plain" if unequal else ""))


if __name__ == "__main__":
    main()
