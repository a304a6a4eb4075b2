"""Which tokens a trimmed draft head keeps: those that the target itself writes most.

Goel et al., "VocabTrim" (arXiv 2506.22694): counts over text that the target generated choose better than counts over
any other text. `branchwise calibrate vocab` makes the table; it lies in the cache, one for each target.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError, safe_open
from safetensors.torch import save_file
from torch import Tensor

from branchwise.backends.base import TargetInfo
from branchwise.errors import ModelError
from branchwise.models import cache_dir
from branchwise.models.cache import workspace


def table_of(target: TargetInfo) -> Path:
    """Where the counts of a target lie."""
    return cache_dir() / "vocab" / f"{target.fingerprint}.safetensors"


def save_counts(target: TargetInfo, counts: Tensor, about: dict[str, str]) -> Path:
    """Keep how often the target wrote each token (vocabulary,); a file is whole or not there."""
    path = table_of(target)
    with workspace() as work:
        save_file({"counts": counts.to(torch.int64).contiguous()}, work / path.name, metadata=about)
        path.parent.mkdir(parents=True, exist_ok=True)
        (work / path.name).replace(path)
    return path


def read_counts(target: TargetInfo) -> Tensor:
    path = table_of(target)
    if not path.exists():
        raise ModelError(
            "A trimmed head needs to know which tokens the target writes; count them once with: "
            "branchwise calibrate vocab --model TARGET"
        )
    try:
        with safe_open(path, framework="pt") as file:
            counts: Tensor = file.get_tensor("counts")
    except (SafetensorError, OSError) as error:
        raise ModelError(f"The counts in {path} cannot be read ({error}); make them again.") from None
    if counts.shape != (target.vocabulary,):
        raise ModelError(f"The counts in {path} are not of this target; make them again.")
    return counts


def frequent_tokens(target: TargetInfo, count: int) -> Tensor:
    """(count,) int64, ascending: what the target writes most; of tokens it never wrote, short spellings first."""
    counts = read_counts(target).double()
    if count >= len(counts):
        return torch.arange(len(counts))
    counts[_basic(target)] += 0.5  # only ever breaks ties: counts are whole
    order = counts.argsort(descending=True, stable=True)
    return order[:count].sort().values


def _basic(target: TargetInfo) -> Tensor:
    """Tokens that any text may need: single characters and bytes, and the ends of a text."""
    tokenizer: Any = target.tokenizer
    if tokenizer is None:
        return torch.zeros(0, dtype=torch.long)
    short = {number for token, number in tokenizer.get_vocab().items() if len(token) == 1 or token.startswith("<0x")}
    wanted = short | {number for number in tokenizer.all_special_ids if number is not None}
    return torch.tensor(sorted(number for number in wanted if number < target.vocabulary), dtype=torch.long)
