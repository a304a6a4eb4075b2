"""What heads give behind long contexts: tokens a pass, and the memory of their KV cache.

Each question stands behind as much other text (of the same prompts) as makes its context so long. The target answers
greedily, and the answers are replayed against trees of each head (`branchwise.train.head.replay`). Memory is that of
the cache of a head that has drafted for such a text.

    python benchmarks/long_heads.py --heads carry.head longspec.head --prompts spec_bench.jsonl --contexts 512 4096 8000
    python benchmarks/long_heads.py --blank carry longspec --prompts spec_bench.jsonl --limit 1

`--blank` builds untrained heads of these forms: they show what a cache takes, and nothing else.
"""

from __future__ import annotations

import argparse
import itertools
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

import torch
from measure import kept, progress, provenance, recorded

from branchwise.bench.prompts import Item, load_items
from branchwise.core.sampling import SamplingParams
from branchwise.draft.head.drafter import HeadDrafter
from branchwise.draft.head.file import TrainedHead
from branchwise.engine import Engine, Request
from branchwise.llm import LLM, load
from branchwise.train.corpus import Text
from branchwise.train.head.replay import Shape
from branchwise.train.head.run import FORMS, Sizes, blank_head
from branchwise.train.texts import Writer
from branchwise.verify import VERIFIERS
from heads import chatted, replay_of

TABLE = 16_384
SHAPES = {"chain 4": Shape.chain(4), "tree 32": Shape(32, 8, 8)}


def main() -> None:
    arguments = parse()
    records = recorded(arguments.read) if arguments.read else kept(measured(arguments), arguments.out)
    summarise(records)


def parse() -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", default="smollm2")
    parser.add_argument("--heads", nargs="+", help="files that `branchwise train head` wrote")
    parser.add_argument("--blank", nargs="+", default=[], choices=FORMS, help="forms of untrained heads: memory alone")
    parser.add_argument("--prompts", type=Path, nargs="+", help="files of prompts, as `branchwise bench`")
    parser.add_argument("--contexts", type=int, nargs="+", default=[512, 1024, 4096, 8000], help="tokens of a prompt")
    parser.add_argument("--limit", type=int, default=2, help="prompts of each category")
    parser.add_argument("--tokens", type=int, default=128, help="of an answer, at most")
    parser.add_argument("--device", default="auto")
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--commit", help="the commit that runs, where there is no git to ask")
    parser.add_argument("--out", type=Path, default=Path(__file__).parent / "records" / "long-heads.jsonl")
    parser.add_argument("--read", type=Path, help="summarise these records; nothing is measured")
    arguments = parser.parse_args()
    if arguments.read is None and not ((arguments.heads or arguments.blank) and arguments.prompts):
        parser.error("give --prompts and --heads or --blank, or --read")
    return arguments


def measured(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    llm = load(arguments.model, draft="none", device=arguments.device, dtype=arguments.dtype, warmup=False)
    run = provenance(llm.engine.target.device, arguments)
    names = {name: [Path(file).name for file in getattr(arguments, name) or ()] for name in ("heads", "prompts")}
    run["arguments"] |= names  # whose folders are nobody's business
    items = load_items(arguments.prompts, limit=arguments.limit)
    for context, form in itertools.product(arguments.contexts, arguments.blank):
        prompt = torch.tensor(behind(llm, items, 0, context), dtype=torch.int32)
        held = memory(llm, blank(llm, form), Text(prompt, len(prompt)))
        yield {"model": arguments.model, "head": form, "context": context, "texts": 1, "memory": held, "run": run}
    for context in arguments.contexts if arguments.heads else ():
        texts = answered(llm, [behind(llm, items, number, context) for number in range(len(items))], arguments.tokens)
        for file in arguments.heads:
            about = {"model": arguments.model, "head": Path(file).name, "context": context, "texts": len(texts)}
            yield {**about, **replayed(llm, file, texts), "memory": memory(llm, file, texts[0]), "run": run}


def behind(llm: LLM, items: Sequence[Item], number: int, context: int) -> list[int]:
    """A question behind so much of the other prompts that its prompt has about `context` tokens, and no more."""
    others = "\n\n".join(turn for item in (*items[number + 1 :], *items[:number]) for turn in item.turns)
    other = llm.tokenizer(others, add_special_tokens=False)["input_ids"]
    other *= -(-context // len(other))
    room = context - len(turned(llm, "\n\n" + items[number].turns[0]))
    read = llm.tokenizer.decode(other[: max(0, room)])
    return turned(llm, f"{read}\n\n{items[number].turns[0]}")[-context:]


def turned(llm: LLM, content: str) -> list[int]:
    return chatted(llm, [{"role": "user", "content": content}])


def answered(llm: LLM, prompts: Sequence[list[int]], tokens: int) -> list[Text]:
    progress(f"{len(prompts)} answers behind {max(map(len, prompts))} tokens")
    slots = 64 if llm.engine.target.device.type == "cuda" else 8
    with Writer(llm.model, sorted(llm.stop_tokens), slots) as writer:
        answers = writer.write(prompts, [0.0] * len(prompts), tokens)
    whole = zip(prompts, answers, strict=True)
    return [Text(torch.tensor([*prompt, *answer], dtype=torch.int32), len(prompt)) for prompt, answer in whole]


def replayed(llm: LLM, file: str, texts: Sequence[Text]) -> dict[str, Any]:
    replay = replay_of(llm, file, TABLE)
    passes = dict.fromkeys(SHAPES, 0)
    for number, text in enumerate(texts):
        progress(f"{Path(file).name}: answer {number + 1} of {len(texts)}")
        for name, shape in SHAPES.items():
            passes[name] += replay.passes(text, [shape])[0]
    return {"tokens": sum(len(text.tokens) - text.prompt for text in texts), "passes": passes}


def blank(llm: LLM, form: str) -> TrainedHead:
    info = llm.engine.target.info
    head = blank_head(llm.model, info, Sizes(5 * info.hidden_width, **FORMS[form])).eval().requires_grad_(False)
    return TrainedHead(head, torch.arange(TABLE), info.name, info.weights)


def memory(llm: LLM, file: str | TrainedHead, text: Text) -> int:
    """Bytes of a head's cache for one text that it has drafted for."""
    drafter = HeadDrafter(file)
    engine = Engine(llm.engine.target, drafter, VERIFIERS.build("match"))
    prompt = tuple(text.tokens[: text.prompt].tolist())
    engine.submit(Request(prompt, SamplingParams(0.0), max_new_tokens=8))
    while engine.busy:
        engine.step()
    return drafter.cache_bytes // (llm.engine.target.info.slots + 1)


def summarise(records: Sequence[dict[str, Any]]) -> None:
    print(f"{'head':14}{'context':>9}{'texts':>7}" + "".join(f"{name:>10}" for name in SHAPES) + f"{'cache':>10}")
    for record in records:
        line = f"{Path(record['head']).stem:14}{record['context']:9}{record['texts']:7}"
        found = record.get("passes")
        line += "".join(f"{record['tokens'] / found[name]:10.2f}" if found else f"{'–':>10}" for name in SHAPES)
        print(f"{line}{record['memory'] / 1024:7.0f} KB")


if __name__ == "__main__":
    main()
