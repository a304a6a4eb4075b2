"""Long contexts: documents, one after another, cut to exact numbers of tokens.

Documents are files and folders as `branchwise index` reads them (`index/texts.py`): text, code, or JSON lines, which
sets of prompts are. They are joined in order and cut into pieces that do not overlap; a piece is continued as it is.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import islice
from pathlib import Path
from typing import TYPE_CHECKING, Any

from branchwise.bench.prompts import Item
from branchwise.errors import UsageError
from branchwise.index.texts import find_files, tokenised

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

LENGTHS = (4096, 8192, 16384)
PIECES = 4
"""how many pieces of each length are made, unless more are asked for"""


def long_items(
    paths: Sequence[Path], lengths: Sequence[int], answer: int, limit: int | None, tokenizer: PreTrainedTokenizerBase
) -> list[Item]:
    """For each length at most `limit` pieces, as items of the category "long/<length>". A piece and an answer of
    `answer` tokens together have that length. If a tokenizer begins every text with a special token, pieces begin with
    it too."""
    for length in lengths:
        if length <= answer:
            raise UsageError(f"A context of {length} tokens has no room for answers of {answer}; choose a smaller -n.")
    most = limit or PIECES
    start = [] if tokenizer.bos_token_id is None or not _begins(tokenizer) else [int(tokenizer.bos_token_id)]
    found = (token for tokens, _, _ in tokenised(find_files(paths), tokenizer) for token in tokens)
    text = list(islice(found, most * max(lengths)))
    items = []
    for length in lengths:
        size = length - answer - len(start)
        pieces = [text[place : place + size] for place in range(0, len(text) - size + 1, size)][:most]
        if not pieces:
            raise UsageError(
                f"The documents have {len(text):,} tokens, too few for a context of {length:,}; name more of them."
            )
        items += [
            Item(f"long/{length}/{number}", "long", f"long/{length}", (), raw=True, ids=(*start, *piece))
            for number, piece in enumerate(pieces, 1)
        ]
    return items


def _begins(tokenizer: PreTrainedTokenizerBase) -> bool:
    """Whether the tokenizer begins every text with a special token."""
    call: Any = tokenizer
    ids = call("a")["input_ids"]
    return bool(ids) and ids[0] == tokenizer.bos_token_id
