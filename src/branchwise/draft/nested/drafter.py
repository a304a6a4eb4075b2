"""A draft model in which a node leaves early if the model is sure: `nested:FOLDER[,threshold=…]`.

Kavehzadeh et al., "S2D: Sorted Speculative Decoding", arXiv 2407.01955. One model whose first layers are draft models
too (`branchwise train nested`) drafts for every target with its tokenizer: nodes leave early for a small target, and go
deeper for a large one. The exit of a node decides what runs next, so the host must read the result of every exit. On a
GPU that takes longer than the saved layers: so all drafts leave at the exit that is best for the target, which makes it
a draft model like any other, unless a threshold is named.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

import numpy as np
from numpy.typing import NDArray

from branchwise.backends.base import Execution, TargetInfo
from branchwise.backends.quantized import FLOAT
from branchwise.draft.builder import TreePolicy
from branchwise.draft.model.ahead import ModelAhead
from branchwise.draft.model.draft_model import DraftKVCache, Weights
from branchwise.draft.model.drafter import ModelDrafter
from branchwise.draft.nested.cache import NestedKVCache
from branchwise.draft.nested.exits import NEVER, USUAL, Ladder, best_exit, best_ladder, fixed_ladder, read_samples
from branchwise.draft.nested.parts import exits_of
from branchwise.draft.nested.segments import Segments
from branchwise.errors import ModelError, PairingError, UsageError
from branchwise.models import local_folder

if TYPE_CHECKING:
    from branchwise.backends.transformers.target import TransformersTarget


class NestedDrafter(ModelDrafter):
    name = "nested"

    def __init__(
        self,
        model: str | Weights,
        threshold: float | None = None,
        temperature: float | None = None,
        top_k: int | None = None,
        trim: int | None = None,
        tree: TreePolicy | None = None,
    ) -> None:
        """`threshold` is the least probability of the best token of an exit with which a draft leaves at the exit; by
        default measurements from training and at load decide. The other options are those of `model`."""
        super().__init__(model, temperature, top_k, trim, tree=tree, weights=FLOAT)
        if threshold is not None and not 0 <= threshold <= 1:
            raise UsageError(f"A threshold is a probability, such as threshold=0.5, not {threshold}.")
        self._refuse_hidden()
        self.threshold = threshold

    def _refuse_hidden(self) -> None:
        if self.tree.needs_hidden:
            raise PairingError("Exits differ in their hidden states; a nested model needs a tree that asks for none.")

    def bind(self, target: TargetInfo) -> None:
        super().bind(target)
        self._refuse_hidden()  # again: a tree may ask for hidden states once it knows its draft model
        if self.only is None and self.ladder.cost is not None:
            self.cost = self.ladder.cost

    def _loaded_for(self, target: TargetInfo) -> Weights:
        whole = super()._loaded_for(target)
        self.exits = self._checked(whole)
        self._samples = self._measured()
        self.only: int | None = None
        """number of layers after which all drafts leave; None if each leaves when the model is sure"""
        if target.execution.kernels and self.threshold is None:
            self.only = self._best_for(target, whole)
            return whole.first_layers(self.only)
        return whole

    def _checked(self, whole: Weights) -> tuple[int, ...]:
        config = whole.model.config
        exits, layers = exits_of(config), config.get_text_config().num_hidden_layers
        if len(exits) < 2 or list(exits) != sorted({*exits}) or not (exits[0] > 0 and exits[-1] == layers):
            raise ModelError(
                f"{whole.name} has no exits that end at its {layers} layers; make such a model with "
                "`branchwise train nested`, or draft with the whole one: --draft-model."
            )
        return exits

    def _measured(self) -> NDArray[np.float64] | None:
        given = self.model
        return None if isinstance(given, Weights) else read_samples(local_folder(given), self.exits)

    def _best_for(self, target: TargetInfo, whole: Weights) -> int:
        """The number of layers after which all drafts had best leave; all layers if nothing was measured."""
        from branchwise.backends.transformers.runner import bytes_read  # transformers takes seconds to import

        if self._samples is None:
            return self.exits[-1]
        read = [bytes_read(whole.first_layers(layers).model, self.trim) for layers in self.exits]
        return self.exits[best_exit(self._samples, [some / (target.weight_bytes or 1) for some in read])]

    def _execution(self, target: TargetInfo) -> Execution:
        found = super()._execution(target)
        return found if self.only is not None else replace(found, kernels=False, graphs=False, compile=False)

    def _on_device(self, target: TargetInfo) -> ModelAhead | None:
        return None if self.only is None else super()._on_device(target)

    def _cache(self, acquire: Callable[[], TransformersTarget]) -> DraftKVCache:
        if self.only is not None:
            return super()._cache(acquire)
        segments, slots = Segments(self.weights.model, self.exits), acquire()
        with self._passing(0):
            seconds = segments.tried(slots)
        self.weights.release(slots)
        self.ladder = self._chosen(seconds)
        thresholds = self.ladder.thresholds
        return NestedKVCache(self.weights, acquire, self.vocabulary.draft_token, segments, thresholds)

    def _chosen(self, seconds: list[float]) -> Ladder:
        if self.threshold is not None or self._samples is None:
            return fixed_ladder(len(self.exits), USUAL if self.threshold is None else self.threshold)
        assert self.target is not None
        # No pass of the target was timed yet. So the bytes that it reads give the cost of the whole draft model, and
        # the measured times give the shares of its parts.
        whole = self._share(self.target)
        *segments, head = (whole * part / sum(seconds) for part in seconds)
        return best_ladder(self._samples, segments, head)

    def reasons(self, batch: int) -> list[str]:
        if self.only is not None:
            return [f"All drafts leave after {self.only} of {self.exits[-1]} layers, so that no host looks at them."]
        cache = self._following
        assert isinstance(cache, NestedKVCache)
        shown = []
        for layers, threshold in zip(self.exits, self.ladder.thresholds, strict=False):
            shown.append(f"{layers} layers are not looked at" if threshold == NEVER else f"{layers} if {threshold:g}")
        found = f"It leaves after {', '.join(shown)} sure, else after {self.exits[-1]} layers."
        if total := sum(cache.left.values()):
            found += " It left after " + ", ".join(f"{n}: {cache.left[n] / total:.0%}" for n in self.exits) + "."
        return [found]
