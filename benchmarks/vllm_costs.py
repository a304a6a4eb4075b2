"""What drafting inside vLLM costs the host, by the number of requests in a step; without vLLM and without a model.

Requests go through the proposer as in a worker with a GPU, which reports the best tokens of every row: texts are real
prompts, read on token by token, and what a pass would report is their next token with random others beside it. Seconds
are those of the processor, so a busy machine changes them little.

    python benchmarks/vllm_costs.py --model FOLDER --prompts spec_bench.jsonl --out vllm-costs.jsonl
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from itertools import takewhile
from pathlib import Path
from typing import Any

import torch
from measure import kept, provenance
from transformers import AutoTokenizer

from branchwise.backends.base import Scored, TargetInfo
from branchwise.bench.prompts import load_items
from branchwise.integrations.vllm.settings import Settings
from branchwise.integrations.vllm.texts import Asked, Texts

REPORTED = 16
LEAST = 160
"""tokens of a text: it is read from a third on"""


def reported(follows: list[int], vocabulary: int) -> Scored:
    """A pass over so many rows: the token that follows each, and random ones."""
    rows = len(follows)
    tokens = torch.randint(vocabulary, (1, rows, REPORTED)).float()
    tokens[0, :, 0] = torch.tensor(follows)
    masses = torch.full((1, rows, REPORTED), 0.02)
    masses[:, :, 0] = 0.5
    return Scored(torch.empty(1, rows, vocabulary, device="meta"), topk=torch.stack([tokens, masses], dim=2))


def cost(texts: list[list[int]], vocabulary: int, settings: Settings, steps: int) -> dict[str, Any]:
    """Milliseconds of a request in a step, for all these requests at once."""
    target = TargetInfo("costs", vocabulary, 4096, 9, len(texts))
    known = Texts(settings, target)
    asked, lengths = Asked(temperature=1.0), [len(text) // 3 for text in texts]
    drafts: list[list[int]] = [[] for _ in texts]
    spent = drafted = count = 0.0
    for step in range(steps):
        for row, text in enumerate(texts):
            if lengths[row] + 1 >= len(text):
                continue
            follows = text[lengths[row] : -1]
            accepted = sum(takewhile(bool, (int(a == b) for a, b in zip(drafts[row], follows, strict=False))))
            scored = reported((text + text)[lengths[row] : lengths[row] + len(drafts[row]) + 1], vocabulary)
            lengths[row] += accepted + 1
            start = time.process_time()
            one = known.read(row, text[: lengths[row]], asked, drafts[row], scored)
            drafts[row] = known.draft(one, 8)
            if step:  # the first one reads the prompt
                spent, drafted, count = spent + time.process_time() - start, drafted + len(drafts[row]), count + 1
    return {"milliseconds": 1000 * spent / count, "drafted": drafted / count, "count": int(count)}


def measured(arguments: argparse.Namespace) -> Iterator[dict[str, Any]]:
    torch.manual_seed(0)
    torch.set_num_threads(1)
    named = {key: value.name if isinstance(value, Path) else value for key, value in vars(arguments).items()}
    yield {"record": "provenance", **provenance(torch.device("cpu"), argparse.Namespace(**named))}
    tokenizer = AutoTokenizer.from_pretrained(arguments.model)
    texts = [list(tokenizer(item.turns[0])["input_ids"]) for item in load_items([arguments.prompts])]
    texts = [text[: 2 * LEAST] for text in texts if len(text) >= LEAST]
    for draft in ("memories", "recycle", "suffix", "ngram"):
        for batch in (1, 4, 16, 64):
            found = cost(texts[:batch], len(tokenizer), Settings(draft=draft, share="all"), arguments.steps)
            yield {"record": "cost", "draft": draft, "batch": batch, **found}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", type=Path, required=True, help="a folder with a tokenizer")
    parser.add_argument("--prompts", type=Path, required=True)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--commit", default=None)
    parser.add_argument("--out", type=Path, required=True)
    for record in kept(measured(parser.parse_args()), parser.parse_args().out):
        if record["record"] == "cost":
            print({key: round(value, 3) if isinstance(value, float) else value for key, value in record.items()})


if __name__ == "__main__":
    main()
