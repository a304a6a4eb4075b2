"""Heads for tests: random ones that fit a target, as files are, and heads of every degree of skill."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import Tensor

from branchwise.backends.base import TargetInfo
from branchwise.control.choice import Rest
from branchwise.control.costs import PassCostModel
from branchwise.draft.builder import TreePolicy
from branchwise.draft.head.drafter import HeadDrafter
from branchwise.draft.head.file import TrainedHead
from branchwise.draft.head.network import Head, HeadConfig
from branchwise.draft.tree_drafter import ExpandRequest
from branchwise.train.head.run import FORMS

SIZES: dict[str, Any] = {"heads": 2, "kv_heads": 1, "head_width": 4, "mlp": 16}
SURE = 0.9
"""how probable a head that knows the truth says it is"""


def let_drafting_pay(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes over any number of rows cost the same: for models so small that on a real machine nothing would pay."""
    monkeypatch.setattr(PassCostModel, "knows_plain", True)
    monkeypatch.setattr(PassCostModel, "costs", lambda model, wanted, hoped=False: [1.0 for _ in wanted])
    monkeypatch.setattr(PassCostModel, "unclear", lambda model, rows, speed: False)
    monkeypatch.setattr(Rest, "advance", lambda rest: False)
    monkeypatch.setattr(Rest, "is_resting", False)


def random_head(info: TargetInfo, form: str = "carry", table: int | None = None, seed: int = 1) -> TrainedHead:
    """A head of a form that was never trained: it proposes so many tokens of its target, all by default."""
    torch.manual_seed(seed)
    options = dict(FORMS[form])
    options["taps"] = (info.layers[0], info.layers[-1]) if options.pop("states", True) else ()
    options["cross"] = info.layers[-2:][0] if options.get("cross") else ""  # the last decoder layer, before a norm
    options["window"] = 3 if options.get("window") else 0  # texts of tests are short
    sizes = dict(SIZES)
    if options["cross"]:
        assert info.cached is not None
        _, sizes["kv_heads"], _, sizes["head_width"] = info.cached(options["cross"], ()).keys.shape
        sizes["heads"] = 2 * sizes["kv_heads"]
    config = HeadConfig(width=info.hidden_width, **sizes, **options)
    half = config.head_width // 2
    head = Head(config, 1 / 100 ** (torch.arange(half) / half))
    for weight in head.parameters():
        if weight.ndim == 2:
            torch.nn.init.normal_(weight, std=0.5)
    tokens = torch.randperm(info.vocabulary)[:table]
    return TrainedHead(head.eval().requires_grad_(False), tokens, info.name, info.weights)


Truth = dict[tuple[int, ...], list[int]]
"""the tokens of a prompt -> what plain decoding writes after them"""


class Knowing(HeadDrafter):
    """A head with the passes, the cache and the trees of any other, which knows what will be written."""

    def __init__(self, trained: TrainedHead, truth: Truth, tree: TreePolicy) -> None:
        super().__init__(trained, tree=tree)
        self.truth = truth

    def _probs(self, request: ExpandRequest, predict: Tensor) -> Tensor:
        probs, sequence = super()._probs(request, predict), request.sequence
        text = self.truth[tuple(sequence.tokens[: sequence.prompt_length])]
        for row, node in enumerate(request.nodes):
            self._tell(probs[row], text[len(sequence.output) + request.tree.depths[node]])
        return probs

    def _tell(self, probs: Tensor, token: int) -> None:
        probs *= 1 - SURE
        probs[token] += SURE


class Contrary(Knowing):
    """Adversarial: it knows what will be written and is sure of anything else."""

    def _tell(self, probs: Tensor, token: int) -> None:
        probs[token] = 0
        probs /= probs.sum()
