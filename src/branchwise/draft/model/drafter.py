"""A smaller model as the source of distributions: `model:ID_OR_PATH[,temperature=…,top-k=…,trim=N,recall=X]`.

Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", and Chen et al., "Accelerating Large
Language Model Decoding with Speculative Sampling" (both 2023); every paper on trees since then drafts like this.

The draft model runs on the same class as the target, with its own KV cache (`draft_model.py`). One pass writes the new
tokens of the texts and computes the distributions after their roots; then every level is one pass over its new nodes,
for all texts together.
"""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
from torch import Tensor

from branchwise.backends.base import Execution, Scored, TargetInfo
from branchwise.backends.quantized import AUTO, BITS, WEIGHTS, choose_weights
from branchwise.core.sampling import SamplingParams
from branchwise.core.sequence import SequenceState
from branchwise.core.tree import DraftTree
from branchwise.draft.base import Budget
from branchwise.draft.builder import NodeProbs, TreePolicy
from branchwise.draft.drawn.drawing import tree_draft_of
from branchwise.draft.model.ahead import ModelAhead
from branchwise.draft.model.draft_model import DraftKVCache, Head, Weights
from branchwise.draft.model.reading import BatchReading, Reading, Readings
from branchwise.draft.model.vocabulary import Vocabulary, common, frequent_tokens
from branchwise.draft.policies.paths import Chain
from branchwise.draft.policies.template import Ranks
from branchwise.draft.recall import TargetProbsMixer
from branchwise.draft.tree_drafter import ExpandRequest, TreeDrafter
from branchwise.errors import ModelError, UsageError
from branchwise.models import ALIASES, resolve
from branchwise.registry import check_known
from branchwise.verify import Verdict, Verdicts

if TYPE_CHECKING:
    from branchwise.backends.transformers.target import TransformersTarget

FOR_GREEDY = 0.6
"""The temperature of draft distributions for a greedy text. It is below 1 because the best token of the draft is the
target's best token more often than its probability says. It matters to policies that weigh nodes by their probability
(DySpec uses 0.6)."""


class ModelDrafter(TreeDrafter):
    name = "model"

    def __init__(
        self,
        model: str | Weights,
        temperature: float | None = None,
        top_k: int | None = None,
        trim: int | None = None,
        recall: float | None = None,
        tree: TreePolicy | None = None,
        task: str | None = None,
        weights: str | None = None,
    ) -> None:
        """`model` is a name, or loaded weights. `temperature` and `top_k` warp the draft's distributions; by default
        they are warped like those of the text. `trim` restricts the head to the N tokens that the target writes most.
        `recall` is the share of the target's earlier distribution after the same two tokens, which is mixed in. `task`
        selects a specialist, if the model is a pack. `weights` says how to quantise the draft model, as `--weights`
        does for the target. By default a draft model on a CPU in float32 has 8 bits if that pays: texts keep their
        distribution."""
        super().__init__(tree or Chain())
        if temperature is not None and not temperature > 0:
            raise UsageError(f"A draft model draws at a temperature above 0, not {temperature}.")
        if top_k is not None and top_k < 1:
            raise UsageError(f"A draft model keeps at least its most probable token, not top-k={top_k}.")
        if trim is not None and trim < 1:
            raise UsageError(f"A trimmed head keeps at least 1 token, not trim={trim}.")
        if weights is not None:
            check_known("weights", weights, WEIGHTS)
        if isinstance(model, str) and model not in ALIASES:
            resolve(model)  # a misspelt name is refused before the target is loaded
        self.model, self.temperature, self.top_k, self.trim, self.task = model, temperature, top_k, trim, task
        self.bits = weights
        self.recall = None if recall is None else TargetProbsMixer(recall)
        self._spelled: dict[SequenceState, Spelled] = {}
        self._readings = Readings(self._reading)
        self._ahead: ModelAhead | None = None
        """drafts on the device ahead of the host; None if the host must grow the trees"""

    def bind(self, target: TargetInfo) -> None:
        from branchwise.backends.transformers.probe import context_limit  # transformers takes seconds to import

        super().bind(target)
        self.weights = self._loaded_for(target)
        self.tree.bind(target, lambda: self.weights.fingerprint)
        self.vocabulary = self._common(target)
        if self.trim is not None:
            self.vocabulary = self.vocabulary.keep(frequent_tokens(target, self.trim))
        if not len(self.vocabulary.tokens):
            raise ModelError(f"No token that the target writes often is one of {self.weights.name}; raise trim.")
        self.vocabulary = self.vocabulary.to(target.device)
        self._readings = Readings(self._reading)
        self._head: Head | None = None
        if self.trim is not None or self.tree.needs_hidden:
            self._head = self.weights.own_head(None if self.trim is None else self.vocabulary.columns)
        # With another tokenizer, the same text may have more tokens.
        wanted = target.context + 1 if self.vocabulary.same else 2 * target.context
        self._context = min(wanted, context_limit(self.weights.model.config))
        acquire = partial(self.weights.acquire, target.slots, self._context, self._head, self._execution(target))
        self.weights.release(acquire())  # a model that cannot be served is refused here
        self._following = self._cache(acquire)
        self._ahead = self._on_device(target)
        self.cost = None if target.weight_bytes is None else self._share(target)

    def _loaded_for(self, target: TargetInfo) -> Weights:
        if isinstance(self.model, Weights):
            return self.model
        dtype = torch.float32 if self.bits in BITS else target.dtype  # of all that is not quantised
        weights = choose_weights(self.bits or AUTO, dtype, target.device.type)
        return Weights.of(self.model, dtype, target.device, self.task, weights)

    def let_foresee(self, allowed: bool) -> None:
        """Trees of ranks never use foresight: on the device they are laid ahead of the host without it, and so they are
        everywhere."""
        self.foresees = allowed and not isinstance(self.tree, Ranks)

    def _share(self, target: TargetInfo) -> float:
        """The bytes that a pass of the draft model reads, as a share of those that a pass of the target reads."""
        from branchwise.backends.transformers.runner import bytes_read  # transformers takes seconds to import

        rows = None if self.trim is None else len(self.vocabulary.columns)
        return bytes_read(self.weights.model, rows) / (target.weight_bytes or 1)

    def _execution(self, target: TargetInfo) -> Execution:
        """How passes of the draft model are executed."""
        if self.tree.needs_hidden:  # hidden states of a recorded pass are not visible outside its graph
            return replace(target.execution, graphs=False)
        return target.execution

    def _cache(self, acquire: Callable[[], TransformersTarget]) -> DraftKVCache:
        return DraftKVCache(self.weights, acquire, self.vocabulary.draft_token)

    def with_tree(self, tree: TreePolicy) -> ModelDrafter:
        """A drafter with the same draft model and another tree policy, made after `bind`. Both keep texts in the same
        cache."""
        assert self.target is not None
        other = copy.copy(self)
        other.tree, other.draw = tree, tree.draw
        other._ahead = other._on_device(self.target)
        return other

    def finish(self, sequence: SequenceState) -> None:
        self._following.close(sequence)
        self._spelled.pop(sequence, None)

    def inherit(self, source: SequenceState, sequence: SequenceState, rows: int, *, moved: bool) -> None:
        self._following.inherit(source, sequence, self._text(sequence), moved=moved)

    def retire(self, sequence: SequenceState) -> None:
        self._following.retire(sequence)
        self._spelled.pop(sequence, None)

    def drop(self, sequence: SequenceState) -> None:
        self._following.close(sequence)

    def draft(self, sequences: Sequence[SequenceState], budgets: Sequence[Budget]) -> list[DraftTree]:
        budgets = [self._within(*pair) for pair in zip(sequences, budgets, strict=True)]
        if self._ahead is not None and self.kept_probs is None:  # distributions are kept on the host only
            trees = self._ahead.draft(sequences, [self._text(sequence) for sequence in sequences], budgets)
            if trees is not None:
                self._drafted = trees
                return trees
        return super().draft(sequences, budgets)

    def rest(self, sequences: Sequence[SequenceState]) -> list[DraftTree]:
        if self._ahead is not None:
            self._ahead.rest()
        return super().rest(sequences)

    def draft_next(self, budgets: Sequence[Budget]) -> list[DraftTree] | None:
        return None if self._ahead is None else self._ahead.draft_next(budgets)

    def update_on_device(self, scored: Scored, verdicts: Verdicts) -> None:
        if self._ahead is not None:
            self._ahead.update(scored, verdicts)

    def update(self, sequences: Sequence[SequenceState], scored: Scored, verdicts: Sequence[Verdict]) -> None:
        super().update(sequences, scored, verdicts)
        self.foresee(sequences, verdicts)

    def foresee(self, sequences: Sequence[SequenceState], verdicts: Sequence[Verdict]) -> None:
        """Called when the host has read the verdicts; the next trees may be drawn on the device already."""
        if self._ahead is not None:
            self._ahead.follow(sequences, self._drafted, verdicts)

    def look(self, requests: Sequence[ExpandRequest]) -> list[NodeProbs]:
        # Trees grow level by level together: all expand their roots in the first round, and other nodes afterwards.
        roots = [request.nodes == [0] for request in requests]
        assert all(roots) or not any(roots), "trees of one batch grow level by level together"
        sequences = [request.sequence for request in requests]
        with self._passing(1):
            if roots[0]:
                texts = [self._text(sequence) for sequence in sequences]
                logits, places = self._following.roots(sequences, texts, [request.tree for request in requests])
            else:
                logits, places = self._following.sprouts(sequences, [request.nodes for request in requests])
            hidden = self._head.seen if self._head is not None and self.tree.needs_hidden else None
        probs = self._probs(requests, [logits[row, at] for row, at in enumerate(places)])
        return [
            NodeProbs(own, None if hidden is None else hidden[row, at])
            for row, (own, at) in enumerate(zip(probs, places, strict=True))
        ]

    # Distributions

    def _probs(self, requests: Sequence[ExpandRequest], logits: Sequence[Tensor]) -> list[Tensor]:
        """For every request the distributions to draw from (nodes, the target's vocabulary). Texts with the same
        sampling parameters are warped together."""
        ways: dict[Reading, list[int]] = {}
        for row, request in enumerate(requests):
            ways.setdefault(self._readings.of(request.sequence.sampling), []).append(row)
        found: dict[int, Tensor] = {}
        for reading, rows in ways.items():
            parts = [logits[row] for row in rows]
            probs = reading(torch.cat(parts) if len(parts) > 1 else parts[0])
            found.update(zip(rows, probs.split([len(part) for part in parts]), strict=True))
        return [self._mixed(request, found[row]) for row, request in enumerate(requests)]

    def _reading(self, sampling: SamplingParams) -> Reading:
        return Reading(self._sampling(sampling), self.vocabulary, trimmed=self.trim is not None)

    def _sampling(self, sampling: SamplingParams) -> SamplingParams:
        """The sampling parameters of the draft: those of the text, except what depends on earlier tokens, such as
        penalties."""
        bias = sampling.logit_bias
        if bias and not self.vocabulary.whole:
            places = self.vocabulary.place_of
            bias = {places[token]: value for token, value in bias.items() if token in places}
        own: dict[str, Any] = {"logit_bias": bias, "top_k": self.top_k or 0}
        if sampling.temperature > 0:
            own |= {"top_k": self.top_k or sampling.top_k, "top_p": sampling.top_p, "min_p": sampling.min_p}
        return SamplingParams(temperature=self.temperature or sampling.temperature or FOR_GREEDY, **own)

    def _on_device(self, target: TargetInfo) -> ModelAhead | None:
        """Drafting ahead of the host, if kernels make the passes and both models have the same tokens; else None. Also
        None for recall, and for policies whose decisions depend on what was drawn: these need the host."""
        made = tree_draft_of(self.tree, len(self.vocabulary.tokens), target.device)
        if made is None or not target.execution.kernels or not self.vocabulary.same or self.recall is not None:
            return None
        own = self.vocabulary.own
        return ModelAhead(made, self._following, target, self._context, own, self._batch_reading, self._passing)

    def _batch_reading(self, sampling: list[SamplingParams]) -> BatchReading:
        own = [self._sampling(params) for params in sampling]
        return BatchReading(own, self.vocabulary, trimmed=self.trim is not None)

    @contextmanager
    def _passing(self, passes: int) -> Iterator[None]:
        """Held while `passes` passes of the draft model are made."""
        self.passes += passes
        with self.weights.lock, self._headed():
            yield

    @contextmanager
    def _headed(self) -> Iterator[None]:
        """Replace the head of the model by the head of this drafter, if it has one, during a pass."""
        model = self.weights.model
        own = None if self._head is None else model.get_output_embeddings()
        if own is not None:
            model.set_output_embeddings(self._head)
        try:
            yield
        finally:
            if own is not None:
                model.set_output_embeddings(own)

    # Texts

    def _within(self, sequence: SequenceState, budget: Budget) -> Budget:
        """The part of a budget that fits in the context of the draft model."""
        room = self._context - len(self._text(sequence)) - 1
        return Budget(budget.nodes, max(0, min(budget.depth, room))) if room > 0 else Budget(1, 0)

    def _text(self, sequence: SequenceState) -> list[int]:
        """The text in tokens of the draft model."""
        if self.vocabulary.same:
            fits = self.vocabulary.own >= self.vocabulary.size
            return sequence.tokens if fits else [self.vocabulary.draft_token(token) for token in sequence.tokens]
        spelled = self._spelled.setdefault(sequence, Spelled())
        if not spelled.read:
            spelled.tokens = self._spell(sequence.tokens[: sequence.prompt_length])
            spelled.read = sequence.prompt_length
        for token in sequence.tokens[spelled.read :]:
            own = self.vocabulary.draft_of.get(token)
            spelled.tokens += self._spell([token]) if own is None else [own]
        spelled.read = len(sequence.tokens)
        return spelled.tokens

    def _spell(self, tokens: list[int]) -> list[int]:
        """The same text in tokens of the draft model; an incomplete character is left out."""
        theirs: Any = self.weights.tokenizer
        text = self.target.tokenizer.decode(tokens, skip_special_tokens=False)  # type: ignore[union-attr]
        return list(theirs(text, add_special_tokens=False, verbose=False)["input_ids"])

    def _common(self, target: TargetInfo) -> Vocabulary:
        weights, tokenizer = self.weights, target.tokenizer
        if tokenizer is not None and weights.tokenizer is not None:
            return common(tokenizer, target.vocabulary, weights.tokenizer, weights.vocabulary, weights.name)
        if weights.vocabulary != target.vocabulary:
            raise ModelError(
                f"The draft model {weights.name} has {weights.vocabulary} tokens and the target {target.vocabulary}; "
                "without a tokenizer of the target they cannot be matched."
            )
        return Vocabulary.shared(target.vocabulary, weights.vocabulary)


@dataclass
class Spelled:
    """A text of the target in the tokens of another tokenizer."""

    tokens: list[int] = field(default_factory=list)
    read: int = 0
    """the number of the target's tokens that are converted so far"""
