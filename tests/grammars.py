"""Small tokenizers for grammars: six tokens that can be enumerated, and a byte-level one as models have them."""

from __future__ import annotations

from collections.abc import Sequence
from functools import cache

import pytest

pytest.importorskip("llguidance")

from llguidance import LLTokenizer
from tokenizers import Tokenizer, decoders, models, pre_tokenizers, trainers
from transformers import PreTrainedTokenizerFast

from branchwise.constrain import Grammar, GrammarCompiler, Limits, compiler_for

TOKENS = (b"<end>", b"a", b"b", b"c", b"ab", b"ba")
END = 0


class Letters:
    """As llguidance asks for a tokenizer: the longest token that fits comes first."""

    eos_token_id = END
    bos_token_id = None
    tokens = TOKENS
    special_token_ids = (END,)

    def __call__(self, text: str | bytes) -> list[int]:
        left, found = text.encode() if isinstance(text, str) else text, list[int]()
        while left:
            fitting = [token for token in range(1, len(TOKENS)) if left.startswith(TOKENS[token])]
            best = max(fitting, key=lambda token: len(TOKENS[token]), default=END)
            found += [best] if fitting else []
            left = left[len(TOKENS[best]) if fitting else 1 :]
        return found


def letters_compiler(limits: Limits | None = None) -> GrammarCompiler:
    from llguidance._tokenizer import TokenizerWrapper

    return GrammarCompiler(LLTokenizer(TokenizerWrapper(Letters())), limits)


@cache
def letters(regex: str) -> Grammar:
    """The texts that a regular expression matches, in the six tokens."""
    return letters_compiler().compile(regex=regex)


def spelled(tokens: Sequence[int]) -> str:
    """The text of an output in the six tokens, without its end."""
    return b"".join(TOKENS[token] for token in tokens if token != END).decode()


@cache
def byte_level() -> PreTrainedTokenizerFast:
    """A tokenizer of 400 tokens over all bytes, two of which end a text."""
    tokenizer = Tokenizer(models.BPE())
    tokenizer.pre_tokenizer = pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = decoders.ByteLevel()
    texts = ['{"name": "Ada", "age": 36, "tags": ["poet", "engineer"], "ok": true, "none": null}'] * 20
    tokenizer.train_from_iterator(
        texts,
        trainers.BpeTrainer(
            vocab_size=400,
            special_tokens=["<end>", "<turn>"],
            initial_alphabet=pre_tokenizers.ByteLevel.alphabet(),
            show_progress=False,
        ),
    )
    return PreTrainedTokenizerFast(tokenizer_object=tokenizer, eos_token="<end>")


def byte_compiler(vocabulary: int) -> GrammarCompiler:
    """For a model with so many tokens, some of which its tokenizer does not know."""
    return compiler_for(byte_level(), vocabulary, frozenset({0, 1}))
