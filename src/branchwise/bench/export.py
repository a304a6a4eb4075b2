"""Records in the formats of other projects, so that their tools can read a run of ours.

Each function takes the records of one contestant (see `summary.by_contestant`), and leaves out what they do not hold.
"""

from __future__ import annotations

import csv
import io
import json
from collections.abc import Sequence
from itertools import pairwise
from typing import Any

from branchwise.bench.metrics import group_sizes, shares, sum_per_depth
from branchwise.bench.records import Record
from branchwise.bench.summary import Row


def spec_bench_lines(records: Sequence[Record]) -> list[str]:
    """The answer file of Spec-Bench (Xia et al., 2024): one JSON line for each question, a choice for each round.

    `wall_time` of an answer is its share of the time of its batch. Records hold how many steps accepted each number of
    tokens, but not their order. So `accept_lengths` has every length as often as it occurred, the longest first, which
    is all that Spec-Bench's mean needs. It is empty if the contestant does not report acceptance.
    """
    times = {id(record): spent for record, spent in zip(records, shares(records), strict=True)}
    lines = []
    for item in dict.fromkeys(record.item for record in records):
        own = sorted((record for record in records if record.item == item), key=lambda record: record.turn)
        choices = []
        for index, played in enumerate(sorted({(record.state, record.round) for record in own})):
            turns = [record for record in own if (record.state, record.round) == played]
            choices.append(
                {
                    "index": index,
                    "turns": [record.text for record in turns],
                    "decoding_steps": [record.steps for record in turns],
                    "new_tokens": [record.tokens for record in turns],
                    "wall_time": [times[id(record)] for record in turns],
                    "accept_lengths": [length for record in turns for length in accept_lengths(record)],
                }
            )
        line = {
            "question_id": int(number) if (number := item.rpartition("/")[2]).isdecimal() else item,
            "category": own[0].category,
            "model_id": f"{model}-{own[0].contestant}" if (model := own[0].run.get("model")) else own[0].contestant,
            "choices": choices,
        }
        lines.append(json.dumps(line, ensure_ascii=False))
    return lines


def accept_lengths(record: Record) -> list[int]:
    """Tokens of every step, the target's own one included, the longest first; empty if the record does not say.

    Of the steps that accepted a node at depth d, those that accepted none at d + 1 accepted d tokens.
    """
    if record.steps is None or sum(record.accepted_per_depth) != record.accepted:
        return []
    reached = [record.steps, *record.accepted_per_depth, 0]
    counts = [here - deeper for here, deeper in pairwise(reached)]
    return [length for length in range(len(counts), 0, -1) for _ in range(counts[length - 1])]


def vllm_result(records: Sequence[Record]) -> dict[str, Any]:
    """The result that `vllm bench serve --save-result` would write, under its names.

    A draft of vLLM is a step that drafted, so steps without a draft do not lower its acceptance length, and its rates
    per position are shares of all drafts. Its rates are percentages. Records hold no times of single tokens.
    """
    first, duration = records[0], sum(shares(records))
    read, written = sum(record.prompt_tokens for record in records), sum(record.tokens for record in records)
    result = {
        "date": first.run.get("time"),
        "backend": "branchwise",
        "label": first.contestant,
        "model_id": first.run.get("model"),
        "num_prompts": len(records),
        "max_concurrency": max(group_sizes(records).values()),
        "duration": duration,
        "completed": len(records),
        "failed": 0,
        "total_input_tokens": read,
        "total_output_tokens": written,
        "request_throughput": len(records) / duration if duration else None,
        "output_throughput": written / duration if duration else None,
        "total_token_throughput": (read + written) / duration if duration else None,
    }
    return {key: value for key, value in result.items() if value is not None} | _vllm_speculation(records)


def _vllm_speculation(records: Sequence[Record]) -> dict[str, Any]:
    known = [r for r in records if r.drafted_per_depth and r.drafted is not None and r.accepted is not None]
    drafted, accepted = sum(r.drafted or 0 for r in known), sum(r.accepted or 0 for r in known)
    if not drafted:  # vLLM leaves out the keys too
        return {}
    drafts = sum_per_depth(known, "drafted_per_depth")[0]
    return {
        "spec_decode_acceptance_rate": 100 * accepted / drafted,
        "spec_decode_acceptance_length": 1 + accepted / drafts,
        "spec_decode_num_drafts": drafts,
        "spec_decode_draft_tokens": drafted,
        "spec_decode_accepted_tokens": accepted,
        "spec_decode_per_position_acceptance_rates": [
            taken / drafts for taken in sum_per_depth(known, "accepted_per_depth")
        ],
    }


def csv_text(rows: Sequence[Row]) -> str:
    """The summary for spreadsheets: one line per contestant and category, missing numbers empty.

    The acceptance rates of all depths are in one cell, separated by blanks.
    """
    text = io.StringIO()
    lines = csv.DictWriter(text, CSV, extrasaction="ignore")
    lines.writeheader()
    for row in rows:
        depths = " ".join(f"{share:.4f}" for share in row.acceptance_per_depth)
        ratio = row.speed_up
        speed = {"speed_up": ratio.value, "speed_up_low": ratio.low, "speed_up_high": ratio.high} if ratio else {}
        lines.writerow(vars(row) | {"acceptance_per_depth": depths} | speed)
    return text.getvalue()


CSV = (
    "contestant", "kind", "category", "state", "requests", "tokens", "seconds", "tokens_per_second",
    "speed_up", "speed_up_low", "speed_up_high", "mean_acceptance_length", "block_efficiency", "nodes_per_step",
    "draft_passes_per_step", "memory_bound_speed_up", "acceptance_per_depth", "accuracy", "cut_share",
    "followed_share", "guessed_share", "output_length",
)  # fmt: skip
