"""What the weights of a model are known by: a head that was trained on some must not draft for others.

A few numbers of every weight are hashed, so that a fine-tuned model is another model, even where it was trained in some
layers only. They are rounded to bfloat16 first: a model has the same fingerprint on every device, and in float32,
bfloat16 and float16 alike. Two loads count as other weights: one that another library quantised, and one in float16 of
weights that bfloat16 and float16 do not hold exactly, such as those of most GGUF files, because it is rounded twice. A
model that was quantised here (`converted.py`) keeps the fingerprint of the weights it was made from: its hidden states
are nearly those that a head has learned from.
"""

from __future__ import annotations

import hashlib
import json

import torch
from torch import Tensor
from transformers import PreTrainedModel

SAMPLED = 16
"""numbers of each weight"""
STRIDE = 2_654_435_761
"""between them, round and round a weight: a prime, so that they are of different rows and columns"""
LEAST = torch.finfo(torch.float16).tiny
"""what is smaller counts as 0, since float16 rounds it further than bfloat16"""


def weights_fingerprint(model: PreTrainedModel) -> str:
    """The same for every load of these weights, with any tokenizer."""
    config = model.config.get_text_config()
    named = dict(model.named_parameters())
    shape = [config.model_type, {name: list(weight.shape) for name, weight in named.items()}]
    found = hashlib.sha256(json.dumps(shape).encode())
    numbers = torch.cat([sampled(weight) for weight in named.values()]).to(torch.bfloat16).cpu()
    numbers = torch.where(numbers.abs() < LEAST, 0.0, numbers)
    found.update(numbers.view(torch.int16).numpy().tobytes())
    return found.hexdigest()[:16]


def sampled(weight: Tensor) -> Tensor:
    """(`SAMPLED`,) float32: always the same places of a weight."""
    places = torch.arange(SAMPLED) * STRIDE % weight.numel()
    return weight.detach()[tuple(torch.unravel_index(places.to(weight.device), weight.shape))].float()
