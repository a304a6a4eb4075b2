"""Models in 8 or 4 bits, converted once and kept in the cache with their distance from the model in float32.

    cache/quantised/KEY/weights.safetensors     integers and scales of linear layers; the rest as it was
    cache/quantised/KEY/branchwise.json         the source of the weights, their distance, and the digest of the file

A copy whose file does not match its digest is replaced.
"""

from __future__ import annotations

import hashlib
import json
import logging
import os
import shutil
import zlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch
from safetensors import SafetensorError
from safetensors.torch import load_file, save_file
from torch import Tensor, nn
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from branchwise.backends.exact import tried
from branchwise.backends.int8 import Numbers
from branchwise.backends.quantized import (
    AUTO,
    FORMAT,
    PAYS,
    Conversion,
    Distance,
    install,
    is_large,
    layers_of_one_input,
    quantised,
    rest_of,
    trial,
)
from branchwise.backends.transformers.weights import weights_fingerprint
from branchwise.errors import ModelError
from branchwise.models import load_model, load_skeleton, local_folder
from branchwise.models.cache import cache_dir, require_space, workspace
from branchwise.models.show import bar
from branchwise.provenance import device_name

log = logging.getLogger(__name__)

NUMBERS, SCALE = ".numbers", ".scale"

TEXT = """The river rises in the hills above the old town, where three springs meet under a stone bridge. In summer
it is shallow enough to wade, and children build dams of pebbles that the next rain carries away. "Nobody owns the
water," the miller used to say, "but everybody wants it." He kept a diary for forty years: the height of the flood in
1954, the price of flour, the names of the dogs.

def mean(values):
    if not values:
        raise ValueError("mean of an empty list")
    return sum(values) / len(values)

1. Preheat the oven to 180 degrees. 2. Mix 250 g of flour with two eggs and a pinch of salt. 3. Bake for 25 minutes,
until a needle comes out clean. What is 17 times 24? First, 17 times 20 is 340; then 17 times 4 is 68; together that
makes 408. The committee decided on Tuesday that the proposal, which had been discussed at length in March, would be
sent to all member states before the end of the year. Water boils at 100 degrees Celsius at sea level and at a lower
temperature in the mountains, because the air pressure there is lower.
"""
"""the text on which the distance is measured: prose, code, a recipe, arithmetic, news"""
MOST_TOKENS = 256
"""the most tokens of that text that are used"""
PIECE = 1 << 20
"""how many bytes of a file are read at a time"""


def load_converted(
    name: str,
    weights: str,
    *,
    dtype: torch.dtype = torch.float32,
    trust_remote_code: bool = False,
    progress: bool | None = None,
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    """The model `name` in 8 or 4 bits on the CPU, from the cache if it has a copy. `auto` is 8 bits if a trial finds
    that they pay on this machine, else `dtype`; a model that fits into the caches of a CPU is not tried."""
    options: dict[str, Any] = {"trust_remote_code": trust_remote_code, "progress": progress}
    scheme = "int8" if weights == AUTO else weights
    place = _place(name, scheme, progress)
    note = None if place is None else _read_note(place)
    if place is not None and note is not None and (weights != AUTO or _paid(note, dtype)):
        try:
            return _read(name, place, note, options)
        except _Damaged as error:
            log.warning("The copy of %s in %s is made again: %s.", name, scheme, error)
    model, tokenizer = load_model(name, dtype=torch.float32, device="cpu", **options)
    if weights == AUTO and not (is_large(model) and trial(model, dtype).gain >= PAYS):
        return (model, tokenizer) if dtype == model.dtype else load_model(name, dtype=dtype, device="cpu", **options)
    place = place or _place(name, scheme, progress)
    numbers, rest = convert(model, tokenizer, scheme, progress)
    if place is not None:
        try:
            bits = {layer: matrix.bits for layer, matrix in numbers.items()}
            _write(place, name, model, rest | _as_tensors(numbers), bits, dtype)
        except ModelError as error:  # it serves without a copy too, and is converted again the next time
            log.warning("%s", error)
    return model, tokenizer


def convert(
    model: PreTrainedModel, tokenizer: Any, scheme: str, progress: bool | None = None
) -> tuple[dict[str, Numbers], dict[str, Tensor]]:
    """Quantise a model in float32 in place and measure its distance. Returns what a file must hold: the quantised
    matrices of linear layers, and everything else."""
    with bar(f"Converting {type(model).__name__} to {scheme}, once", None, progress):
        text = _tokens(model, tokenizer)
        fingerprint, wanted = weights_fingerprint(model), _logprobs(model, text)
        groups = layers_of_one_input(model, text[:, :4])
        numbers, rest = quantised(model, scheme), dict(rest_of(model))
        way = install(model, numbers, groups)
        found = _logprobs(model, text)
        gap = (wanted.exp() * (wanted - found)).sum(dim=-1)
        equal = (wanted.argmax(dim=-1) == found.argmax(dim=-1)).float()
        distance = Distance(max(0.0, float(gap.mean())), float(equal.mean()), text.numel())
    _mark(model, Conversion(scheme, way, fingerprint, distance), groups)
    return numbers, rest


def _tokens(model: PreTrainedModel, tokenizer: Any) -> Tensor:
    """(1, tokens): the text, or arbitrary tokens if there is no tokenizer."""
    count = int(model.config.get_text_config().vocab_size)
    ids = [(31 * i + 7) % count for i in range(64)] if tokenizer is None else tokenizer(TEXT)["input_ids"]
    return torch.tensor([ids[:MOST_TOKENS]])


@torch.inference_mode()
def _logprobs(model: PreTrainedModel, tokens: Tensor) -> Tensor:
    found: Tensor = model(input_ids=tokens, use_cache=False).logits
    return found.float().log_softmax(dim=-1)


def _mark(model: nn.Module, conversion: Conversion, groups: Sequence[Sequence[str]]) -> None:
    vars(model)["_conversion"], vars(model)["_groups"] = conversion, groups  # goes with copies of the model


# The cache


class _Damaged(Exception):
    """A converted copy cannot be used, because its file is damaged or belongs to another model."""


def _place(name: str, scheme: str, progress: bool | None) -> Path | None:
    """The folder of the converted copy, whether it exists or not; None for a hub model that is not on this machine
    yet."""
    source = local_folder(name, progress=progress)
    if source is None:
        return None
    files = sorted(file for kind in ("*.json", "*.safetensors") for file in source.glob(kind))
    about = [FORMAT, scheme, [(file.name, file.stat().st_size, file.stat().st_mtime_ns) for file in files]]
    return cache_dir() / "quantised" / hashlib.sha256(json.dumps(about).encode()).hexdigest()[:16]


def _read_note(place: Path) -> dict[str, Any] | None:
    try:
        note = json.loads((place / "branchwise.json").read_text(encoding="utf-8"))
    except (OSError, ValueError):
        return None
    return note if isinstance(note, dict) else None


def _here(dtype: torch.dtype) -> str:
    """The conditions on which the result of a trial depends."""
    machine = device_name(torch.device("cpu"))
    return f"{machine}, {torch.get_num_threads()} threads, torch {torch.__version__}, beside {dtype}"


def _paid(note: dict[str, Any], dtype: torch.dtype) -> bool:
    """Whether a trial on this machine has found that 8 bits pay."""
    return note.get("machine") == _here(dtype) and bool(note.get("gain", 0.0) >= PAYS)


def _as_tensors(numbers: dict[str, Numbers]) -> dict[str, Tensor]:
    found = {}
    for name, matrix in numbers.items():
        found[name + NUMBERS], found[name + SCALE] = matrix.numbers, matrix.scale
    return found


def _write(
    place: Path, name: str, model: PreTrainedModel, tensors: dict[str, Tensor], bits: dict[str, int], dtype: torch.dtype
) -> None:
    conversion: Conversion = vars(model)["_conversion"]
    with workspace() as work:
        require_space(sum(tensor.nbytes for tensor in tensors.values()), f"{name} in {conversion.scheme}")
        new = work / "quantised"
        new.mkdir()
        save_file({key: tensor.contiguous().clone() for key, tensor in tensors.items()}, new / "weights.safetensors")
        note = {
            "name": f"{name} {conversion.scheme}",
            "source": name,
            "scheme": conversion.scheme,
            "way": conversion.way,
            "weights": conversion.weights,
            "distance": conversion.distance._asdict(),
            "groups": vars(model)["_groups"],
            "bits": bits,
            "gain": _gain(tensors, dtype),
            "machine": _here(dtype),
            "crc32": _checksum(new / "weights.safetensors"),
        }
        (new / "branchwise.json").write_text(json.dumps(note, indent=2) + "\n", encoding="utf-8")
        place.parent.mkdir(exist_ok=True)
        shutil.rmtree(place, ignore_errors=True)
        try:
            os.rename(new, place)
        except OSError:
            if not place.is_dir():  # another process was faster
                raise


def _gain(tensors: dict[str, Tensor], dtype: torch.dtype) -> float:
    """How many times as fast as in floating point the products with 8 bits are on this machine."""
    shapes = [(len(tensor), tensor.shape[1]) for name, tensor in tensors.items() if name.endswith(NUMBERS)]
    return tried(shapes, 8, dtype).gain


def _checksum(file: Path) -> int:
    """A checksum against damage: a cryptographic digest of gigabytes would take most of the time to load them."""
    found = 0
    with file.open("rb") as opened:
        while piece := opened.read(PIECE):
            found = zlib.crc32(piece, found)
    return found


def _read(
    name: str, place: Path, note: dict[str, Any], options: dict[str, Any]
) -> tuple[PreTrainedModel, PreTrainedTokenizerBase]:
    file = place / "weights.safetensors"
    try:
        with bar(f"Reading {name} in {note['scheme']}", None, options["progress"]):
            if _checksum(file) != note["crc32"]:
                raise _Damaged("its file is not what was written")
            tensors = load_file(file)
        numbers = {
            str(key): Numbers(tensors.pop(key + NUMBERS), tensors.pop(key + SCALE), int(bits))
            for key, bits in note["bits"].items()
        }
        distance, groups = Distance(**note["distance"]), [[str(one) for one in group] for group in note["groups"]]
        scheme, fingerprint = str(note["scheme"]), str(note["weights"])
    except (OSError, SafetensorError, KeyError, TypeError, ValueError) as error:
        raise _Damaged(f"it cannot be read ({type(error).__name__})") from error
    model, tokenizer = load_skeleton(name, **options)
    missing, unexpected = model.load_state_dict(tensors, strict=False, assign=True)
    if unexpected or {key.removesuffix(".weight") for key in missing} - set(numbers):
        raise _Damaged("it holds the weights of another model")
    model.tie_weights()
    way = install(model, numbers, groups)
    _mark(model, Conversion(scheme, way, fingerprint, distance), groups)
    return model.requires_grad_(False), tokenizer
