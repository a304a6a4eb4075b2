"""A model cut into segments at its exits: a deeper pass continues from the states of a shallower one.

A segment is the model's own class with some of its layers and no weight copied, so whatever the class does around its
layers (masks, positions) it does for every segment too. An exit is the norm and the head after a segment.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor, nn

from branchwise.core.sequence import SequenceState
from branchwise.draft.nested.parts import config_of_layers, layers_of, norm_of, shallow
from branchwise.errors import UnsupportedModel

if TYPE_CHECKING:
    from branchwise.backends.transformers.target import TransformersTarget

TOLERANCE, ROUNDED = 0.01, 0.05
"""The largest allowed distance between the logits of the segments together and those of the model, as a share of the
norm of the latter: in float32, and in 16 bits, where attention rounds differently. Six untrained layers of SmolLM2 are
off by 0.015 on a CPU."""
TOKENS = 4
"""Length of the text on which this is checked."""
TRIALS = 3
"""Number of timed passes, of which the fastest counts."""


class Segments:
    def __init__(self, model: Any, exits: Sequence[int]) -> None:
        self.model, self.exits = model, tuple(exits)
        name, _ = layers_of(model)
        owner = name.rpartition(".")[0]
        self._norm = norm_of(model)[1]
        body = model.get_submodule(owner)
        self._bodies = [
            _cut(body, name.rpartition(".")[2], norm_of(model)[0].rpartition(".")[2], first, last)
            for first, last in zip((0, *self.exits), self.exits, strict=False)
        ]

    def run(self, number: int, given: Tensor, positions: Tensor, slots: TransformersTarget) -> Tensor:
        """(batch, nodes, width): states after a segment, given tokens (batch, nodes) or the states before the
        segment."""
        body, runner = self._bodies[number], slots.runner
        kind = "inputs_embeds" if given.is_floating_point() else "input_ids"
        with runner.passing():
            body.config._attn_implementation_internal = runner.hook.name
            found: Tensor = body(
                **{kind: given}, position_ids=positions, past_key_values=slots.store, use_cache=True
            ).last_hidden_state
        return found

    def logits(self, states: Tensor, slots: TransformersTarget) -> Tensor:
        """(…, vocabulary): the logits of an exit, given states (…, width)."""
        with slots.runner.passing():
            found: Tensor = self.model.get_output_embeddings()(self._norm(states))
        return found

    def tried(self, slots: TransformersTarget) -> list[float]:
        """Seconds of each segment for one token and, last, of the head. A model whose segments together do not compute
        the same logits is refused."""
        store, key, device = slots.store, SequenceState([0]), slots.device
        tokens = torch.arange(TOKENS, device=device)[None] % slots.info.vocabulary
        store.open(key)
        try:
            states = self._through(tokens, slots, key)
            own, found = slots.own_logits(tokens).float(), self.logits(states[-1], slots).float()
            allowed = TOLERANCE if states[-1].dtype.itemsize > 2 else ROUNDED
            if own.shape == found.shape and float((own - found).norm()) > allowed * float(own.norm()):
                raise UnsupportedModel(
                    f"{type(self.model).__name__} does something between its layers or after its head that its exits "
                    "would miss; draft with the whole model: --draft-model."
                )
            store.advance(key, TOKENS)
            times = [[0.0]] * (len(self.exits) + 1)
            for _ in range(TRIALS):
                times = [[*some, one] for some, one in zip(times, self._timed(tokens[:, :1], slots, key), strict=True)]
            return [min(some[1:]) for some in times]
        finally:
            store.close(key)

    def _through(self, tokens: Tensor, slots: TransformersTarget, key: SequenceState) -> list[Tensor]:
        steps = torch.arange(tokens.shape[1], device=tokens.device)[None]
        positions = slots.store.begin([key], steps, None).lengths[:, None] + steps
        states = [tokens]
        for number in range(len(self.exits)):
            states.append(self.run(number, states[-1], positions, slots))
        return states

    def _timed(self, token: Tensor, slots: TransformersTarget, key: SequenceState) -> list[float]:
        step = torch.zeros_like(token)
        positions = slots.store.begin([key], step, None).lengths[:, None] + step
        state, found, start = token, list[float](), _now(token.device)
        for number in range(len(self.exits)):
            state = self.run(number, state, positions, slots)
            found.append(_now(token.device) - start)
            start = _now(token.device)
        self.logits(state, slots)
        return [*found, _now(token.device) - start]


def _now(device: torch.device) -> float:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    return time.perf_counter()


def _cut(body: Any, layers: str, norm: str, first: int, last: int) -> Any:
    """The same module with the layers from `first` to before `last` only, and nothing after them."""
    part = shallow(body)
    part.config = config_of_layers(body.config, first, last)
    part._modules[layers] = nn.ModuleList(body._modules[layers][first:last])
    part._modules[norm] = nn.Identity()
    return part
