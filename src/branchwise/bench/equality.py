"""Whether an answer is the baseline's, token for token, and how close the first difference was.

In float32 greedy answers must be equal, and sampled ones too under `match` with the same seeds. In lower precision a
pass over a tree rounds differently from a pass over one token; the gap between the two logits shows such a near-tie.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import torch

from branchwise.bench.records import PLAIN, Comparison, Difference, Record
from branchwise.llm import LLM


def compare(record: Record, baseline: Record, prompt: Sequence[int], llm: LLM) -> Comparison:
    """Compare an answer with the baseline's to the same token ids."""
    if record.ids == baseline.ids:
        return Comparison(record.key, True, None)
    return Comparison(record.key, False, first_difference(record.ids, baseline.ids, prompt, llm))


def first_difference(ids: Sequence[int], expected: Sequence[int], prompt: Sequence[int], llm: LLM) -> Difference:
    pairs = zip(ids, expected, strict=False)
    place = next((i for i, (one, other) in enumerate(pairs) if one != other), min(len(ids), len(expected)))
    token = ids[place] if place < len(ids) else None
    wanted = expected[place] if place < len(expected) else None
    gap = None
    if token is not None and wanted is not None:
        logits = next_logits(llm, [*prompt, *expected[:place]])
        gap = abs(float(logits[token]) - float(logits[wanted]))
    return Difference(place, token, wanted, gap)


def next_logits(llm: LLM, tokens: Sequence[int]) -> torch.Tensor:
    """(vocabulary,) float32: the logits after these tokens, from one plain pass of the model."""
    with torch.inference_mode():
        ids = torch.tensor([list(tokens)], device=llm.model.device)
        logits: torch.Tensor = llm.model(input_ids=ids).logits[0, -1].float()
    return logits


def to_compare(records: Iterable[Record], comparable: set[str], greedy: bool) -> list[tuple[Record, Record]]:
    """The answers that must equal the baseline's and were not compared yet, each with the baseline's.

    Greedy answers of all contestants; sampled ones only of contestants that share the baseline's random numbers.
    Answers in dialogues whose earlier turns differ have other prompts and are not compared.
    """
    records = list(records)
    plain = {record.key[1:]: record for record in records if record.kind == PLAIN}
    return [
        (record, plain[record.key[1:]])
        for record in records
        if record.kind != PLAIN
        and record.equal is None
        and record.counted_by == "ids"
        and (greedy or record.contestant in comparable)
        and record.key[1:] in plain
        and record.prompt_hash == plain[record.key[1:]].prompt_hash
    ]
