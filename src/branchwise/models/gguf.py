"""Reads the header of a GGUF file, after a check that the file is complete, and builds the tokenizer that it
describes."""

from __future__ import annotations

import importlib.util
import math
import mmap
import struct
from pathlib import Path
from typing import TYPE_CHECKING, Any, NamedTuple

from branchwise.errors import ModelError, UnsupportedModel

if TYPE_CHECKING:
    from transformers import PreTrainedTokenizerBase


class _Tensor(NamedTuple):
    name: str
    elements: int
    ggml_type: int
    offset: int  # from the start of the file


class Header(NamedTuple):
    """The metadata and the tensor table of a GGUF file, which come before the weights."""

    metadata: dict[str, Any]
    tensors: list[_Tensor]

    @property
    def architecture(self) -> str:
        return str(self.metadata.get("general.architecture", ""))


_SCALARS = {0: "B", 1: "b", 2: "H", 3: "h", 4: "I", 5: "i", 6: "f", 7: "?", 10: "Q", 11: "q", 12: "d"}
_STRING, _ARRAY = 8, 9


class _Cursor:
    """Reads values one after another and never past the end: a truncated header raises `struct.error`."""

    def __init__(self, blob: mmap.mmap) -> None:
        self.blob, self.at = blob, 0

    def numbers(self, kinds: str) -> tuple[Any, ...]:
        values = struct.unpack_from("<" + kinds, self.blob, self.at)
        self.at += struct.calcsize("<" + kinds)
        return values

    def string(self) -> str:
        (length,) = self.numbers("Q")
        if length > len(self.blob) - self.at:
            raise struct.error("a string ends behind the file")
        self.at += length
        return self.blob[self.at - length : self.at].decode("utf-8", errors="replace")

    def value(self, kind: int) -> Any:
        if kind == _STRING:
            return self.string()
        if kind == _ARRAY:
            of, count = self.numbers("IQ")
            if count > len(self.blob):
                raise struct.error("an array ends behind the file")
            if of == _STRING:
                return [self.string() for _ in range(count)]
            return list(self.numbers(f"{count}{_SCALARS[of]}"))
        return self.numbers(_SCALARS[kind])[0]


def read_header(path: Path) -> Header:
    """The header of a GGUF file, after a check that the file is complete. `gguf.GGUFReader` would take seconds for a
    large vocabulary, and would raise arbitrary numpy errors on a damaged file."""
    size = path.stat().st_size
    with path.open("rb") as file:
        if file.read(4) != b"GGUF":
            raise ModelError(f"{path} is not a GGUF file: it does not begin with the letters GGUF.")
        with mmap.mmap(file.fileno(), 0, access=mmap.ACCESS_READ) as blob:
            try:
                header = _parse(_Cursor(blob), path)
            except struct.error as error:
                raise ModelError(f"{path} is truncated: its header does not end.") from error
            except (LookupError, ArithmeticError, TypeError, ValueError, MemoryError) as error:
                raise ModelError(f"{path} is damaged: its header makes no sense.") from error
    if not header.architecture or not header.tensors:
        raise ModelError(f"{path} does not hold a model: its header names no architecture or no tensors.")
    parts = header.metadata.get("split.count")
    if isinstance(parts, int) and parts > 1:
        raise ModelError(f"{path} is one of {parts} parts. Merge them with llama-gguf-split.")
    if missing := [name for name in ("gguf", "accelerate") if importlib.util.find_spec(name) is None]:
        raise ModelError(f'Reading GGUF needs {" and ".join(missing)}. Install with "pip install {" ".join(missing)}"')
    from gguf import GGML_QUANT_SIZES, GGMLQuantizationType

    end = 0
    for tensor in header.tensors:
        try:
            block, block_bytes = GGML_QUANT_SIZES[GGMLQuantizationType(tensor.ggml_type)]
        except (KeyError, ValueError) as error:
            raise ModelError(
                f"{path} holds tensors of the GGML type {tensor.ggml_type}, unknown to the gguf package. "
                "Upgrade that, or get the model in another quantisation."
            ) from error
        end = max(end, tensor.offset + tensor.elements // block * block_bytes)
    if end > size:
        raise ModelError(f"{path} is truncated: it has {size} of the {end} bytes that it should. Get it again.")
    return header


def _parse(cursor: _Cursor, path: Path) -> Header:
    _, version = cursor.numbers("II")
    if version not in (2, 3):
        raise ModelError(f"{path} is GGUF version {version}. Versions 2 and 3 are read.")
    tensor_count, value_count = cursor.numbers("QQ")
    metadata = {}
    for _ in range(value_count):
        key = cursor.string()
        metadata[key] = cursor.value(*cursor.numbers("I"))
    table = []
    for _ in range(tensor_count):
        name = cursor.string()
        (dimensions,) = cursor.numbers("I")
        shape = cursor.numbers(f"{dimensions}Q")
        table.append((name, math.prod(shape), *cursor.numbers("IQ")))
    alignment = metadata.get("general.alignment", 32)
    start = -(-cursor.at // alignment) * alignment
    return Header(metadata, [_Tensor(name, size, kind, start + at) for name, size, kind, at in table])


# The tokenizer

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
    """How a byte-level tokenizer splits text before it merges; the file gives only the name of the rule."""

    regex: str | None = None  # None: GPT-2's own
    single_digits: bool = False  # whether digits are split before the regex
    nfc: bool = False
    whole_words: bool = False  # whether a piece that is a token stays whole, without merging
    bos: bool = False  # whether a text begins with bos if the file does not say


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
    """The tokenizer that the file describes. Byte-level vocabularies are built here and not by transformers, whose
    versions differ: 5.17 mistakes bos for eos and forgets special tokens, and none up to 5.22 knows that SmolLM splits
    numbers into digits."""
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
