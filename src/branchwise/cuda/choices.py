"""How each text of a batch chooses its tokens, as numbers at a fixed place of a device."""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np
import torch
from torch import Tensor

from branchwise.core.sampling import SamplingParams
from branchwise.cuda.inputs import PinnedBuffer

PARAMETERS = ("temperature", "top_k", "top_p", "min_p", "biased")
"""of a text, in this order; `biased` is 1 where it has a bias"""


class Choices:
    """The sampling parameters of up to so many texts. Those of a step that has others than the last one are written
    anew; all else is left as it lies, for kernels that were recorded with these places."""

    def __init__(self, most: int, vocabulary: int, device: torch.device) -> None:
        self._buffer = PinnedBuffer(most * len(PARAMETERS), device, torch.float32)
        self.parameters: Tensor = self._buffer.device_copy.view(most, len(PARAMETERS))
        self.bias = torch.zeros(most, vocabulary, device=device)
        self._known: list[SamplingParams] = []

    def bring(self, sampling: Sequence[SamplingParams]) -> None:
        if self._known == list(sampling):
            return
        self._known = []  # after an interrupt nothing counts as written
        rows = [
            (params.temperature, params.top_k, params.top_p, params.min_p, bool(params.logit_bias))
            for params in sampling
        ]
        self._buffer.host[: len(rows) * len(PARAMETERS)] = np.array(rows, dtype=np.float32).reshape(-1)
        self._buffer.copy()
        entries = [(row, *entry) for row, params in enumerate(sampling) for entry in params.logit_bias.items()]
        if entries:
            device = self.bias.device
            places, tokens = torch.tensor([entry[:2] for entry in entries]).T.to(device, non_blocking=True)
            self.bias[: len(rows)].zero_()
            self.bias[places, tokens] = torch.tensor([entry[2] for entry in entries]).to(device, non_blocking=True)
        self._known = list(sampling)
