"""The tokens that a draft model can propose: those of its tokens that the target has too.

Children are always drawn from a distribution over the target's vocabulary, with 0 for tokens that the draft model
cannot propose. Any such distribution is lossless, because it is recorded as q.

A draft model with another tokenizer drafts over the tokens whose spelling both share (Timor et al., "Accelerating LLM
Inference with Lossless Speculative Decoding Algorithms for Heterogeneous Vocabularies", arXiv 2502.05202). A trimmed
draft model computes only the head rows of tokens that the target writes often (Goel et al., "VocabTrim", arXiv
2506.22694; FR-Spec, arXiv 2502.14856): counts over text that the target generated choose better than counts over any
other text. `branchwise calibrate vocab` counts, and stores the counts of each target in the cache folder. A trained
head is trimmed by the same counts.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from functools import cached_property
from pathlib import Path
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from branchwise.backends.base import TargetInfo
from branchwise.draft.state import Format
from branchwise.errors import ModelError
from branchwise.models import cache_dir

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LEAST_OVERLAP = 0.2
"""the least share of the smaller vocabulary that must be in both; with less, a draft model could hardly ever propose
what the target writes"""


@dataclass(frozen=True, eq=False)
class Vocabulary:
    """Columns of a draft model's logits, and the tokens of the target that they correspond to."""

    size: int
    """size of the target's vocabulary"""
    columns: Tensor
    """(n,) int64: tokens of the draft model, which are columns of its logits"""
    tokens: Tensor
    """(n,) int64, ascending: the same tokens in the target's vocabulary"""
    own: int
    """size of the draft model's vocabulary"""
    same: bool
    """whether a token has the same number in both"""

    @classmethod
    def shared(cls, size: int, own: int) -> Vocabulary:
        """The vocabulary of a target and a draft model with the same tokenizer; either may have padded its head."""
        ids = torch.arange(min(size, own))
        return cls(size, ids, ids, own, same=True)

    def __post_init__(self) -> None:
        assert len(self.tokens.unique()) == len(self.tokens), "a token of the target stands for two of the draft model"

    def keep(self, wanted: Tensor) -> Vocabulary:
        """This vocabulary restricted to the `wanted` tokens of the target."""
        kept = torch.isin(self.tokens, wanted.to(self.tokens.device))
        return replace(self, columns=self.columns[kept], tokens=self.tokens[kept])

    def to(self, device: torch.device) -> Vocabulary:
        return replace(self, columns=self.columns.to(device), tokens=self.tokens.to(device))

    @cached_property
    def whole(self) -> bool:
        """Whether the draft model's columns are exactly the target's tokens."""
        return self.same and len(self.tokens) == self.size == self.own

    @cached_property
    def draft_of(self) -> dict[int, int]:
        """token of the target -> token of the draft model"""
        return dict(zip(self.tokens.tolist(), self.columns.tolist(), strict=True))

    def draft_token(self, token: int) -> int:
        """The token of the draft model for a token of the target; 0 if it has none."""
        if self.same:
            return token if token < self.own else 0
        return self.draft_of.get(token, 0)

    @cached_property
    def place_of(self) -> dict[int, int]:
        """token of the target -> its place among those that can be proposed"""
        return {token: place for place, token in enumerate(self.tokens.tolist())}

    def spread(self, probs: Tensor) -> Tensor:
        """(rows, size): distributions over the target's vocabulary, given those over the tokens that can be proposed,
        (rows, n)."""
        if self.whole:
            return probs
        return probs.new_zeros(len(probs), self.size).index_copy_(1, self.tokens, probs)


def common(
    target: PreTrainedTokenizerBase, size: int, draft: PreTrainedTokenizerBase, own: int, name: str
) -> Vocabulary:
    """The vocabulary that two tokenizers share; a ModelError if it is too small to draft with."""
    ours, theirs = target.get_vocab(), draft.get_vocab()
    if ours == theirs:
        return Vocabulary.shared(size, own)
    spelled = spellings(draft)
    found: dict[int, int] = {}
    for spelling, token in spellings(target).items():  # "end of text" comes last: an equal spelling has precedence
        if spelling in spelled and token < size and spelled[spelling] < own:
            found.setdefault(token, spelled[spelling])
    overlap = len(found) / min(len(ours), len(theirs))
    if overlap < LEAST_OVERLAP:
        raise ModelError(
            f"The draft model {name} has another tokenizer, and only {overlap:.0%} of the smaller vocabulary is in "
            f"both ({LEAST_OVERLAP:.0%} are needed); use a draft model of the target's family."
        )
    tokens, columns = torch.tensor(sorted(found.items())).unbind(1)
    return Vocabulary(size, columns, tokens, own, same=False)


def spellings(tokenizer: PreTrainedTokenizerBase) -> dict[object, int]:
    """The bytes of every token, independent of how its tokenizer writes them -> the token. The key of a special token
    is its own spelling; the end-of-text token also has the key "end of text"."""
    vocabulary = tokenizer.get_vocab()
    special = set(tokenizer.all_special_tokens) | {str(t) for t in tokenizer.added_tokens_decoder.values() if t.special}
    byte_level = sum(token.startswith("Ġ") for token in vocabulary) > sum(token.startswith("▁") for token in vocabulary)
    found: dict[object, int] = {}
    for token, number in vocabulary.items():
        if token in special:
            found[token] = number
            continue
        spelled = _bytes_of_byte_level(token) if byte_level else _bytes_of_pieces(token)
        if spelled is not None:
            found.setdefault(spelled, number)
    if isinstance(tokenizer.eos_token_id, int):
        found["end of text"] = tokenizer.eos_token_id
    return found


_PRINTABLE = [*range(33, 127), *range(161, 173), *range(174, 256)]
_OTHERS = [byte for byte in range(256) if byte not in _PRINTABLE]
_BYTES = {chr(byte): byte for byte in _PRINTABLE} | {chr(256 + n): byte for n, byte in enumerate(_OTHERS)}
"""the printable character that byte-level tokenizers write for a byte (itself, or one from 256 on) -> the byte"""


def _bytes_of_byte_level(token: str) -> bytes | None:
    known = all(character in _BYTES for character in token)
    return bytes(_BYTES[character] for character in token) if known else None


def _bytes_of_pieces(token: str) -> bytes:
    """The bytes of a token as sentencepiece writes it: ▁ for a blank, <0x0A> for a byte."""
    if len(token) == 6 and token.startswith("<0x") and token.endswith(">"):
        return bytes([int(token[3:5], 16)])
    return token.replace("▁", " ").encode()


# Tokens that a trimmed head keeps

FORMAT = Format("token table", "count tokens with: branchwise calibrate vocab --model TARGET", ModelError)


def table_of(target: TargetInfo) -> Path:
    """The file with the counts of a target."""
    return cache_dir() / "vocab" / f"{target.fingerprint}.safetensors"


def save_counts(target: TargetInfo, counts: Tensor, about: dict[str, str], background: Tensor | None = None) -> Path:
    """Store how often the target wrote each token (vocabulary,), with a description of the count; `background` are
    counts over other text, which rank the tokens that the target did not write."""
    path, others = table_of(target), torch.zeros_like(counts) if background is None else background
    FORMAT.write(path, about, {"counts": counts.long(), "background": others.long()}, parents=True)
    return path


def read_counts(target: TargetInfo) -> tuple[Tensor, Tensor]:
    """The counts over what the target wrote, and over other text."""
    path = table_of(target)
    if not path.exists():
        raise ModelError(f"A trimmed head needs to know which tokens the target writes; {FORMAT.remedy}.")
    counts, background = FORMAT.read(path, lambda _, tensors: (tensors["counts"], tensors["background"]))
    if not counts.shape == background.shape == (target.vocabulary,):
        raise ModelError(f"The counts in {path} are not of this target; {FORMAT.remedy}.")
    return counts, background


def ranked_tokens(target: TargetInfo, count: int) -> Tensor:
    """(at most count,) int64: the tokens that the target writes most. Of the tokens that it never wrote, those that any
    text may need come first (`_basic`), then the most frequent in other text. Tokens without any count are left out:
    nothing says which of them are frequent."""
    counts, background = read_counts(target)
    if count >= len(counts):
        return torch.arange(len(counts))
    worth = counts.double() + 0.25 * background / (background.max() + 1)  # only breaks ties: counts are integers
    worth[_basic(target)] += 0.5
    known = int((worth > 0).sum())
    return worth.argsort(descending=True, stable=True)[: min(count, known)]


def frequent_tokens(target: TargetInfo, count: int) -> Tensor:
    """As `ranked_tokens`, in ascending order."""
    return ranked_tokens(target, count).sort().values


def kept_places(table: Tensor, first: int | None, trim: int | None, target: TargetInfo) -> Tensor:
    """Places in the table of a trained head: the `first` ones, or with `trim` those of the tokens that the target
    writes most."""
    if trim is None:
        return torch.arange(len(table))[:first]
    place = torch.full((target.vocabulary,), -1)
    place[table] = torch.arange(len(table))
    found = place[ranked_tokens(target, trim)]
    found = found[found >= 0]
    if not len(found):
        raise ModelError("No token that the target writes often is one of the head; raise trim.")
    return found


def _basic(target: TargetInfo) -> Tensor:
    """Tokens that any text may need: single characters, bytes and special tokens."""
    tokenizer: Any = target.tokenizer
    if tokenizer is None:
        return torch.zeros(0, dtype=torch.long)
    short = {number for token, number in tokenizer.get_vocab().items() if len(token) == 1 or token.startswith("<0x")}
    wanted = short | {number for number in tokenizer.all_special_ids if number is not None}
    return torch.tensor(sorted(number for number in wanted if number < target.vocabulary), dtype=torch.long)
