"""The fingerprint of a model's weights: a head that was trained on some weights must not draft for others.

It is a hash of a few numbers of every weight, so a fine-tuned model has another fingerprint, even if only some layers
were trained. The numbers are rounded to bfloat16 first, so a model has the same fingerprint on every device, and in
float32, bfloat16 and float16. There are two exceptions: a model that another library has quantised, and a load in
float16 of weights that bfloat16 and float16 do not hold exactly, such as those of most GGUF files, because they are
rounded twice. A model that was quantised here (`converted.py`) keeps the fingerprint of its source, because its hidden
states are close to those that a head has learned from.
"""

from __future__ import annotations

import hashlib
import json

import torch
from torch import Tensor
from transformers import PreTrainedModel

SAMPLED = 16
"""the count of numbers that are taken of each weight"""
STRIDE = 2_654_435_761
"""the distance between them, modulo the size of a weight: a prime, so that they are of different rows and columns"""
LEAST = torch.finfo(torch.float16).tiny
"""the least magnitude that does not count as 0: float16 rounds smaller numbers more coarsely than bfloat16"""


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
    """(`SAMPLED`,) float32: the numbers at fixed places of a weight."""
    places = torch.arange(SAMPLED) * STRIDE % weight.numel()
    return weight.detach()[tuple(torch.unravel_index(places.to(weight.device), weight.shape))].float()
