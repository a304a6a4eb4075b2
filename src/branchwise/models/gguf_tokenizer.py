"""The tokenizer that a GGUF file describes, built from its header."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from branchwise.errors import UnsupportedModel
from branchwise.models.gguf import Header

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase

_UNKNOWN, CONTROL, _USER_DEFINED = 2, 3, 4  # values of tokenizer.ggml.token_type

_SPLIT_LLAMA3 = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}"
    r"| ?[^\s\p{L}\p{N}]+[\r\n]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)
_SPLIT_QWEN2 = _SPLIT_LLAMA3.replace(r"\p{N}{1,3}", r"\p{N}")
_SPLIT_TEKKEN = (
    r"[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]*[\p{Ll}\p{Lm}\p{Lo}\p{M}]+"
    r"|[^\r\n\p{L}\p{N}]?[\p{Lu}\p{Lt}\p{Lm}\p{Lo}\p{M}]+[\p{Ll}\p{Lm}\p{Lo}\p{M}]*"
    r"|\p{N}| ?[^\s\p{L}\p{N}]+[\r\n/]*|\s*[\r\n]+|\s+(?!\S)|\s+"
)


class _Split(NamedTuple):
    """How a byte-level vocabulary cuts text before it merges; the file gives only the name of it."""

    regex: str | None = None  # None: GPT-2's own
    single_digits: bool = False  # before the regex
    nfc: bool = False
    whole_words: bool = False  # a piece that is a token is taken as it is, without merging
    bos: bool = False  # whether a text begins with bos where the file does not say


_SPLITS: dict[str, _Split] = {
    name: split
    for names, split in (
        ("gpt-2 phi-2 mpt olmo jais", _Split()),
        ("smollm starcoder refact command-r codeshell exaone", _Split(single_digits=True)),
        ("llama-bpe llama3 llama-v3 falcon3", _Split(_SPLIT_LLAMA3, whole_words=True, bos=True)),
        ("dbrx smaug-bpe", _Split(_SPLIT_LLAMA3)),
        ("qwen2 deepseek-r1-qwen", _Split(_SPLIT_QWEN2, nfc=True)),
        ("stablelm2", _Split(_SPLIT_QWEN2)),
        ("tekken", _Split(_SPLIT_TEKKEN, whole_words=True, bos=True)),
    )
    for name in names.split()
}


def tokenizer_of(path: Path, header: Header) -> PreTrainedTokenizerBase:
    """The tokenizer that the file describes.

    Byte-level vocabularies are built here and not by transformers, whose versions differ: 5.17 mistakes bos
    for eos and forgets special tokens, and none up to 5.22 knows that SmolLM splits numbers into digits.
    """
    from transformers import AutoTokenizer, PreTrainedTokenizerFast

    metadata = header.metadata
    tokens: list[str] = metadata.get("tokenizer.ggml.tokens", [])
    model, pre = metadata.get("tokenizer.ggml.model"), metadata.get("tokenizer.ggml.pre")
    settings: dict[str, Any] = {"clean_up_tokenization_spaces": False}
    for role, key in {"bos": "bos", "eos": "eos", "unk": "unknown", "pad": "padding"}.items():
        token_id = metadata.get(f"tokenizer.ggml.{key}_token_id")
        settings[f"{role}_token"] = None if token_id is None else tokens[token_id]
    settings["pad_token"] = settings["pad_token"] or settings["eos_token"]
    if template := metadata.get("tokenizer.chat_template"):
        settings["chat_template"] = template
    if length := metadata.get(f"{header.architecture}.context_length"):
        settings["model_max_length"] = length

    if model == "gpt2" and pre in _SPLITS:
        backend, bos = _byte_level(metadata, _SPLITS[pre]), _SPLITS[pre].bos
    elif model == "llama":
        backend, bos = AutoTokenizer.from_pretrained(path.parent, gguf_file=str(path)).backend_tokenizer, True
    else:
        raise UnsupportedModel(
            f"{path} has a tokenizer of the kind {model!r} with the splitting rule {pre!r}, unknown here. "
            f"Known: 'llama', and 'gpt2' with {', '.join(_SPLITS)}."
        )
    if metadata.get("tokenizer.ggml.add_bos_token", bos) and settings["bos_token"]:
        from tokenizers.processors import TemplateProcessing

        first = settings["bos_token"]
        backend.post_processor = TemplateProcessing(
            single=[first, "$A"],
            pair=[first, "$A", "$B"],
            special_tokens=[(first, metadata["tokenizer.ggml.bos_token_id"])],
        )
    build: Any = PreTrainedTokenizerFast
    tokenizer: PreTrainedTokenizerBase = build(tokenizer_object=backend, **settings)
    return tokenizer


def _byte_level(metadata: dict[str, Any], split: _Split) -> Any:
    from tokenizers import AddedToken, Regex, Tokenizer, decoders, normalizers, pre_tokenizers
    from tokenizers.models import BPE

    tokens: list[str] = metadata["tokenizer.ggml.tokens"]
    kinds: list[int] = metadata.get("tokenizer.ggml.token_type", [])
    merges = [tuple(merge.split(" ", 1)) for merge in metadata["tokenizer.ggml.merges"]]
    vocab = {token: i for i, token in enumerate(tokens)}
    backend = Tokenizer(BPE(vocab=vocab, merges=merges, ignore_merges=split.whole_words))
    steps: list[Any] = [pre_tokenizers.Digits(individual_digits=True)] if split.single_digits else []
    if split.regex is not None:
        steps.append(pre_tokenizers.Split(Regex(split.regex), behavior="isolated"))
    steps.append(pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=split.regex is None))
    backend.pre_tokenizer = pre_tokenizers.Sequence(steps)
    backend.decoder = decoders.ByteLevel()
    if split.nfc:
        backend.normalizer = normalizers.NFC()
    marked = [(AddedToken(tokens[i], normalized=False), kind) for i, kind in enumerate(kinds)]
    backend.add_special_tokens([token for token, kind in marked if kind in (_UNKNOWN, CONTROL)])
    backend.add_tokens([token for token, kind in marked if kind == _USER_DEFINED])
    return backend
