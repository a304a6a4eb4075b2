"""The tokens that a trimmed draft head keeps: those that the target itself writes most often.

Goel et al., "VocabTrim" (arXiv 2506.22694): counts over text that the target generated choose better than counts over
any other text. `branchwise calibrate vocab` counts, and stores the counts of each target in the cache.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from branchwise.backends.base import TargetInfo
from branchwise.draft.artifact import Format
from branchwise.errors import ModelError
from branchwise.models import cache_dir

FORMAT = Format("token table", "count tokens with: branchwise calibrate vocab --model TARGET", ModelError)


def table_of(target: TargetInfo) -> Path:
    """The file with the counts of a target."""
    return cache_dir() / "vocab" / f"{target.fingerprint}.safetensors"


def save_counts(target: TargetInfo, counts: Tensor, about: dict[str, str]) -> Path:
    """Keep how often the target wrote each token (vocabulary,), with a few words about the count."""
    path = table_of(target)
    FORMAT.write(path, about, {"counts": counts.to(torch.int64)}, parents=True)
    return path


def read_counts(target: TargetInfo) -> Tensor:
    path = table_of(target)
    if not path.exists():
        raise ModelError(f"A trimmed head needs to know which tokens the target writes; {FORMAT.remedy}.")
    counts = FORMAT.read(path, lambda _, tensors: tensors["counts"])
    if counts.shape != (target.vocabulary,):
        raise ModelError(f"The counts in {path} are not of this target; {FORMAT.remedy}.")
    return counts


def frequent_tokens(target: TargetInfo, count: int) -> Tensor:
    """(count,) int64, ascending: the tokens that the target writes most; of those it never wrote, short ones first."""
    counts = read_counts(target).double()
    if count >= len(counts):
        return torch.arange(len(counts))
    counts[_basic(target)] += 0.5  # only breaks ties: counts are integers
    order = counts.argsort(descending=True, stable=True)
    return order[:count].sort().values


def _basic(target: TargetInfo) -> Tensor:
    """Tokens that any text may need: single characters, bytes and special tokens."""
    tokenizer: Any = target.tokenizer
    if tokenizer is None:
        return torch.zeros(0, dtype=torch.long)
    short = {number for token, number in tokenizer.get_vocab().items() if len(token) == 1 or token.startswith("<0x")}
    wanted = short | {number for number in tokenizer.all_special_ids if number is not None}
    return torch.tensor(sorted(number for number in wanted if number < target.vocabulary), dtype=torch.long)
