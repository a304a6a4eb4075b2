"""How a student begins: with layers of its target, or as an existing model; and the folder that it ends in."""

from __future__ import annotations

import copy
import json
import shutil
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import torch

from branchwise.draft.nested.parts import layers_of
from branchwise.errors import ModelError, UnsupportedModel, UsageError
from branchwise.models import load_model
from branchwise.models.show import quiet
from branchwise.train.keeping import with_room

LAYERS = "layers:"
NOTE = "training.json"
"""the file beside the weights that says where a student comes from"""


def parse_layers(init: str, count: int) -> list[int]:
    """The layers that `layers:0,14,29` names, of a target with `count` layers."""
    names = init.removeprefix(LAYERS).split(",")
    try:
        layers = [int(name) for name in names]
    except ValueError:
        raise UsageError(f"{init!r} names no layers; write numbers, as in layers:0,{count // 2},{count - 1}.") from None
    if unknown := [layer for layer in layers if not 0 <= layer < count]:
        raise UsageError(f"The target has layers 0 to {count - 1}, and no layer {unknown[0]}.")
    return layers


def spread_layers(wanted: int, count: int) -> str:
    """An `init` with `wanted` layers of a target, its first and last layer included."""
    if wanted > count:
        raise UsageError(f"The target has {count} layers, fewer than {wanted}.")
    chosen = [round(number * (count - 1) / max(1, wanted - 1)) for number in range(wanted)]
    return LAYERS + ",".join(map(str, chosen if wanted > 1 else [count - 1]))


def begin(init: str, target: Any, tokenizer: Any, device: torch.device) -> Any:
    """A student in float32, before any learning."""
    if init.startswith(LAYERS):
        count = target.config.get_text_config().num_hidden_layers
        return with_layers(target, parse_layers(init, count)).to(device)
    student, own = load_model(init, dtype=torch.float32, device=str(device))
    if own.get_vocab() != tokenizer.get_vocab():
        raise ModelError(
            f"{init} has another tokenizer than the target, so it cannot learn its distributions; begin with a model "
            "of the target's family, or with some of its layers (layers:0,…)."
        )
    return student


def with_layers(target: Any, layers: Sequence[int]) -> Any:
    """A model of the target's own kind with copies of these layers, its embeddings, norm and head."""
    name, _ = layers_of(target)
    config = copy.deepcopy(target.config)
    text = config.get_text_config()
    text.num_hidden_layers = len(layers)
    if kinds := text.to_dict().get("layer_types"):
        text.layer_types = [kinds[layer] for layer in layers]
    config.dtype = torch.float32
    with torch.random.fork_rng(devices=[]):  # the noise is overwritten, so it must use up no randomness
        student = type(target)(config).to(torch.float32)
    known = {key: weight for key, weight in target.state_dict().items() if not key.startswith(f"{name}.")}
    for place, layer in enumerate(layers):
        before = f"{name}.{layer}."
        known |= {
            f"{name}.{place}.{key.removeprefix(before)}": weight
            for key, weight in target.state_dict().items()
            if key.startswith(before)
        }
    try:
        student.load_state_dict(known)
    except RuntimeError as error:
        raise UnsupportedModel(f"Layers of {type(target).__name__} cannot be taken one by one: {error}.") from error
    student.generation_config = copy.deepcopy(target.generation_config)
    return student.eval()


def check_output(model: Any, name: str) -> None:
    """Refuse a model that does more with its last states than multiply them by its head: the loss assumes that."""
    tokens = torch.arange(4, device=model.device)[None] % model.config.get_text_config().vocab_size
    with torch.no_grad():
        own = model(tokens, use_cache=False).logits.float()
        made = model.get_output_embeddings()(model.base_model(tokens, use_cache=False).last_hidden_state).float()
    if not torch.allclose(own, made, rtol=1e-2, atol=1e-2 * float(own.abs().max())):
        raise UnsupportedModel(f"{name} changes its logits after its head, which a student cannot learn from here.")


def check_out(folder: Path) -> None:
    """Refuse a folder that holds something, or that cannot be made."""
    if folder.exists() and not (folder.is_dir() and not any(folder.iterdir())):
        raise UsageError(f"{folder} exists; name a new folder, or remove it.")
    if not folder.absolute().parent.is_dir():
        raise UsageError(f"There is no folder {folder.parent} to put {folder.name} into.")


def export(
    student: Any, tokenizer: Any, folder: Path, note: dict[str, Any], dtype: torch.dtype, **files: dict[str, Any]
) -> None:
    """Write a folder that `--draft-model` and transformers load: weights, tokenizer, what was done, and `files` of
    JSON. The folder appears as a whole."""
    partial = folder.with_name(f".{folder.name}.part")
    shutil.rmtree(partial, ignore_errors=True)
    with with_room(folder):
        try:
            partial.mkdir()
            saved = copy.deepcopy(student).to(dtype)
            saved.config.dtype = dtype
            with quiet(bars=False):
                saved.save_pretrained(partial)
                tokenizer.save_pretrained(partial)
            (partial / NOTE).write_text(json.dumps(note, indent=1))
            for name, value in files.items():
                (partial / f"{name}.json").write_text(json.dumps(value))
            if folder.exists():
                folder.rmdir()
            partial.rename(folder)
        finally:
            shutil.rmtree(partial, ignore_errors=True)
