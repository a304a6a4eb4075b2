"""Converts a GGUF file for transformers: dequantised once to float32 safetensors, and cached with its tokenizer."""

from __future__ import annotations

import importlib.metadata
import json
import math
import re
import struct
from pathlib import Path
from typing import Any

from branchwise.errors import ModelError, UnsupportedModel, first_line
from branchwise.models.cache import cache_dir, require_space, workspace
from branchwise.models.gguf import CONTROL, Header, read_header, tokenizer_of
from branchwise.models.gguf_reading import read_once
from branchwise.models.show import bar, quiet

# Part of the name of every converted folder: raise it if a conversion would come out differently.
CONVERTED_FORMAT = 1


def converted_folder(digest: str) -> Path:
    """The folder of the converted copy of the file with this sha256, whether it exists or not."""
    return cache_dir() / "converted" / f"{digest[:16]}-v{CONVERTED_FORMAT}"


def intact(folder: Path) -> Path:
    """`folder`, if every file has the size that was written, which finds truncated files cheaply; else an error."""
    try:
        sizes: dict[str, int] = json.loads((folder / "branchwise.json").read_text())["files"]
        wrong = [name for name, size in sizes.items() if (folder / name).stat().st_size != size]
    except (OSError, ValueError, LookupError, TypeError, AttributeError):
        wrong = ["a file"]
    if wrong:
        raise ModelError(f"The converted copy {folder} is damaged ({wrong[0]}). Delete it and run again.")
    return folder


def convert_gguf(path: Path, digest: str, name: str, source: str, progress: bool | None) -> Path:
    """Write the safetensors copy of a GGUF file and return its folder. If another process was faster, its copy is
    used."""
    header = read_header(path)
    _require_architecture(path, header)
    target = converted_folder(digest)
    with workspace() as work:
        require_space(4 * sum(tensor.elements for tensor in header.tensors), f"Converting {path.name}")
        new = work / "converted"
        with quiet(), bar(f"Converting {path.name}, once", None, progress), read_once():
            _write_safetensors(path, header, new)
        about = {
            "name": name,
            "source": source,
            "sha256": digest,
            "versions": {package: _version(package) for package in ("branchwise", "transformers", "gguf")},
            "files": {file.name: file.stat().st_size for file in sorted(new.iterdir())},
        }
        (new / "branchwise.json").write_text(json.dumps(about, indent=2) + "\n")
        target.parent.mkdir(exist_ok=True)
        try:
            new.rename(target)
        except OSError:
            if not target.is_dir():
                raise
    return target


def _require_architecture(path: Path, header: Header) -> None:
    from transformers.modeling_gguf_pytorch_utils import GGUF_SUPPORTED_ARCHITECTURES

    def plain(name: str) -> str:
        return re.sub("[-_]", "", name)

    readable = sorted(set(GGUF_SUPPORTED_ARCHITECTURES) - {"general", "tokenizer", "t5", "umt5", "t5encoder"})
    if plain(header.architecture) not in map(plain, readable):
        raise UnsupportedModel(
            f"{path} holds a model of the architecture {header.architecture!r}, which transformers cannot "
            f"read as a causal language model from GGUF. It reads: {', '.join(readable)}."
        )
    scaling = header.metadata.get(f"{header.architecture}.rope.scaling.type", "none")
    if scaling != "none" and plain(header.architecture) != "gptoss":
        # transformers silently ignores these keys, which would make another model.
        raise UnsupportedModel(
            f"{path} scales its positions ({scaling}), which transformers does not read from GGUF. "
            "Load the model from a folder or a hub id instead."
        )


def _write_safetensors(path: Path, header: Header, folder: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    auto: Any = AutoModelForCausalLM
    # By its whole path: transformers looks for the file's name in the working directory first.
    place: dict[str, Any] = {"pretrained_model_name_or_path": path.parent, "gguf_file": str(path)}
    try:
        tokenizer = tokenizer_of(path, header)
        config = AutoConfig.from_pretrained(**place)
        if set(factors := _rope_factors(path, header)) - {1.0}:
            config.rope_parameters = _llama3_rope(path, factors, config)
        model, info = auto.from_pretrained(**place, config=config, dtype="float32", output_loading_info=True)
    except ModelError:
        raise
    except Exception as error:
        raise ModelError(f"transformers could not read {path}: {first_line(error)}.") from error

    stored = sum(tensor.elements for tensor in header.tensors if tensor.name != "rope_freqs.weight")
    placed = {id(tensor): tensor.numel() for tensor in model.state_dict(keep_vars=True).values()}
    if info["missing_keys"] or info["mismatched_keys"] or stored != sum(placed.values()):
        # transformers skips tensors that have no parameter, and fills parameters without a tensor with noise.
        raise UnsupportedModel(
            f"{path} holds {stored} parameters, and transformers has places for {sum(placed.values())}. "
            "Load the model from a folder or a hub id instead."
        )

    # save_pretrained refuses a model that came from a quantised file, although it is plain float32 by now.
    model.hf_quantizer = None
    del model.config.quantization_config
    for config in (model.config, model.generation_config):
        config.bos_token_id = tokenizer.bos_token_id
        config.eos_token_id = tokenizer.eos_token_id
        config.pad_token_id = tokenizer.pad_token_id
    model.generation_config.eos_token_id = _end_tokens(header.metadata)
    try:
        model.save_pretrained(folder)
        tokenizer.save_pretrained(folder)
    except Exception as error:  # a full disk raises an OSError or a SafetensorError
        raise OSError(first_line(error)) from error


def _rope_factors(path: Path, header: Header) -> list[float]:
    """The divisors of the rotary frequencies, if the file has them (Llama 3.1 and later); else none."""
    for tensor in header.tensors:
        if tensor.name == "rope_freqs.weight":
            with path.open("rb") as file:
                file.seek(tensor.offset)
                return list(struct.unpack(f"<{tensor.elements}f", file.read(4 * tensor.elements)))
    return []


def _llama3_rope(path: Path, factors: list[float], config: Any) -> dict[str, Any]:
    """The rotary settings from which these factors were computed. transformers ignores the tensor of factors; without
    it a Llama 3.1 would be wrong from the first token on."""
    theta, factor, low, high, trained = config.rope_parameters["rope_theta"], max(factors), 1.0, 4.0, 8192
    for i, found in enumerate(factors):
        turns = trained / (2 * math.pi * theta ** (i / len(factors)))  # rotations within the trained length
        smooth = min(max((turns - low) / (high - low), 0.0), 1.0)
        if not math.isclose(found, 1 / ((1 - smooth) / factor + smooth), rel_tol=1e-3):
            raise UnsupportedModel(
                f"{path} scales its positions in a way that is not Llama 3's. "
                "Load the model from a folder or a hub id instead."
            )
    return {
        "rope_type": "llama3",
        "rope_theta": theta,
        "factor": factor,
        "low_freq_factor": low,
        "high_freq_factor": high,
        "original_max_position_embeddings": trained,
    }


def _end_tokens(metadata: dict[str, Any]) -> list[int]:
    """All tokens that end a turn: those that the file declares, and control tokens with a known spelling. Most GGUF
    files declare one end token, but chat models have two, the end of a turn and the end of a text."""
    tokens, kinds = metadata["tokenizer.ggml.tokens"], metadata.get("tokenizer.ggml.token_type", [])
    named = [metadata.get(f"tokenizer.ggml.{which}_token_id") for which in ("eos", "eot", "eom")]
    spelled = {"<|im_end|>", "<|endoftext|>", "<|eot_id|>", "<|eom_id|>", "<|end|>", "<end_of_turn>"}
    by_name = [i for i, kind in enumerate(kinds) if kind == CONTROL and tokens[i] in spelled]
    return list(dict.fromkeys(token for token in (*named, *by_name) if token is not None))


def _version(package: str) -> str | None:
    try:
        return importlib.metadata.version(package)
    except importlib.metadata.PackageNotFoundError:
        return None
