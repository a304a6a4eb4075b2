"""A smaller model as the source of distributions: `model:ID_OR_PATH[,temperature=…,top-k=…,trim=N,recall=X]`.

Leviathan et al., "Fast Inference from Transformers via Speculative Decoding", and Chen et al., "Accelerating Large
Language Model Decoding with Speculative Sampling" (both 2023); every paper on trees since drafts so.

The draft model runs on the class of transformers targets, with slots of its own (`draft_kv.py`). One pass writes what
is new in the texts and finds what follows their roots; then every level is one pass over its new nodes, for all texts.
"""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import replace
from functools import partial
from typing import Any

import torch
from torch import Tensor

from branchwise.backends.base import TargetInfo
from branchwise.core.sampling import SamplingParams, Warp
from branchwise.core.sequence import SequenceState
from branchwise.core.tree import DraftTree
from branchwise.cuda.padded import PaddedGraphedFunction
from branchwise.draft.base import Budget
from branchwise.draft.builder import NodeProbs, TreePolicy
from branchwise.draft.model.draft_kv import DraftKVCache
from branchwise.draft.model.draft_model import Head, Weights
from branchwise.draft.model.mixing import TargetProbsMixer
from branchwise.draft.model.trim import frequent_tokens
from branchwise.draft.model.vocabulary import Vocabulary, common
from branchwise.draft.policies.chain import Chain
from branchwise.draft.tree_drafter import ExpandRequest, TreeDrafter
from branchwise.errors import ModelError, UsageError
from branchwise.models import ALIASES, resolve

FOR_GREEDY = 0.6
"""The temperature at which distributions are read where the text is greedy: that the best token is the target's best
one is more probable than that it would be drawn. Policies that weigh nodes by their probability (DySpec uses 0.6) need
to know."""

MOST_READINGS = 8
"""ways of sampling for which a reading is kept, those used last"""


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
    ) -> None:
        """`model` is a name, or weights that are loaded already. `temperature` and `top_k` are the draft's own; by
        default it is warped as the text is.

        `trim` computes the distributions of the N tokens only that the target writes most. `recall` mixes in what the
        target said after the same two tokens.
        """
        super().__init__(tree or Chain())
        if temperature is not None and not temperature > 0:
            raise UsageError(f"A draft model draws at a temperature above 0, not {temperature}.")
        if top_k is not None and top_k < 1:
            raise UsageError(f"A draft model keeps at least its most probable token, not top-k={top_k}.")
        if trim is not None and trim < 1:
            raise UsageError(f"A trimmed head keeps at least 1 token, not trim={trim}.")
        if isinstance(model, str) and model not in ALIASES:
            resolve(model)  # whoever misspelt the name should not wait for the target
        self.model, self.temperature, self.top_k, self.trim = model, temperature, top_k, trim
        self.recall = None if recall is None else TargetProbsMixer(recall)
        self._spelled: dict[SequenceState, Spelled] = {}
        self._readings: OrderedDict[object, Reading] = OrderedDict()

    def bind(self, target: TargetInfo) -> None:
        super().bind(target)
        given = self.model
        self.weights = given if isinstance(given, Weights) else Weights.of(given, target.dtype, target.device)
        self.vocabulary = self._common(target)
        if self.trim is not None:
            self.vocabulary = self.vocabulary.keep(frequent_tokens(target, self.trim))
        if not len(self.vocabulary.tokens):
            raise ModelError(f"No token that the target writes often is one of {self.weights.name}; raise trim.")
        self.vocabulary = self.vocabulary.to(target.device)
        self._readings.clear()
        self._head: Head | None = None
        if self.trim is not None or self.tree.needs_hidden:
            self._head = self.weights.own_head(None if self.trim is None else self.vocabulary.columns)
        # The same text may take more tokens of another tokenizer.
        context = self.weights.context(target.context + 1 if self.vocabulary.same else 2 * target.context)
        execution = target.execution
        if self.tree.needs_hidden:
            execution = replace(execution, graphs=False)  # the input of a head in a recorded pass stays in its graph
        acquire = partial(self.weights.acquire, target.slots, context, self._head, execution)
        self.weights.release(acquire())  # a model that cannot be served is refused here
        self._following = DraftKVCache(acquire, self.weights.release, self.vocabulary.draft_token)
        self._context = context
        rows = None if self.trim is None else len(self.vocabulary.columns)
        self.cost = None if target.weight_bytes is None else self.weights.bytes_read(rows) / target.weight_bytes

    def finish(self, sequence: SequenceState) -> None:
        self._following.close(sequence)
        self._spelled.pop(sequence, None)

    def draft(self, sequences: Sequence[SequenceState], budgets: Sequence[Budget]) -> list[DraftTree]:
        return super().draft(sequences, [self._within(*pair) for pair in zip(sequences, budgets, strict=True)])

    def look(self, requests: Sequence[ExpandRequest]) -> list[NodeProbs]:
        # Trees grow side by side, so all ask about their roots in the first round and about nodes below in the others.
        roots = [request.nodes == [0] for request in requests]
        assert all(roots) or not any(roots), "trees of one batch grow level by level together"
        self.passes += 1
        with self.weights.lock, self._headed():
            logits, places = self._roots(requests) if roots[0] else self._sprouts(requests)
            hidden = self._head.seen if self._head is not None and self.tree.needs_hidden else None
        probs = self._probs(requests, [logits[row, at] for row, at in enumerate(places)])
        return [
            NodeProbs(own, None if hidden is None else hidden[row, at])
            for row, (own, at) in enumerate(zip(probs, places, strict=True))
        ]

    def _roots(self, requests: Sequence[ExpandRequest]) -> tuple[Tensor, list[slice]]:
        sequences = [request.sequence for request in requests]
        for sequence in sequences:
            self._following.open(sequence)
        texts = [self._text(sequence) for sequence in sequences]
        logits, places = self._following.roots(sequences, texts, [request.tree for request in requests])
        return logits, [slice(place, place + 1) for place in places]

    def _sprouts(self, requests: Sequence[ExpandRequest]) -> tuple[Tensor, list[slice]]:
        logits = self._following.sprouts(
            [request.sequence for request in requests], [request.nodes for request in requests]
        )
        return logits, [slice(len(request.nodes)) for request in requests]

    # Distributions

    def _probs(self, requests: Sequence[ExpandRequest], logits: Sequence[Tensor]) -> list[Tensor]:
        """For every wish (nodes, the target's vocabulary): the distributions to draw from.

        Texts that are sampled in one way are read together.
        """
        ways: dict[Reading, list[int]] = {}
        for row, request in enumerate(requests):
            ways.setdefault(self._reading(request.sequence.sampling), []).append(row)
        found: dict[int, Tensor] = {}
        for reading, rows in ways.items():
            parts = [logits[row] for row in rows]
            probs = reading(torch.cat(parts) if len(parts) > 1 else parts[0])
            found.update(zip(rows, probs.split([len(part) for part in parts]), strict=True))
        if self.recall is None:
            return [found[row] for row in range(len(requests))]
        return [
            self.recall.mix(request.sequence, request.tree, request.nodes, found[row])
            for row, request in enumerate(requests)
        ]

    def _reading(self, sampling: SamplingParams) -> Reading:
        bias = tuple(sampling.logit_bias.items())
        way = sampling.temperature, sampling.top_k, sampling.top_p, sampling.min_p, bias
        if way not in self._readings:
            self._readings[way] = Reading(self._sampling(sampling), self.vocabulary, trimmed=self.trim is not None)
            if len(self._readings) > MOST_READINGS:
                self._readings.popitem(last=False)
        self._readings.move_to_end(way)
        return self._readings[way]

    def _sampling(self, sampling: SamplingParams) -> SamplingParams:
        """How distributions are warped: as the text's are, as far as they do not depend on what stands before."""
        bias = sampling.logit_bias
        if bias and not self.vocabulary.whole:
            places = self.vocabulary.place_of
            bias = {places[token]: value for token, value in bias.items() if token in places}
        own: dict[str, Any] = {"logit_bias": bias, "top_k": self.top_k or 0}
        if sampling.temperature > 0:
            own |= {"top_k": self.top_k or sampling.top_k, "top_p": sampling.top_p, "min_p": sampling.min_p}
        return SamplingParams(temperature=self.temperature or sampling.temperature or FOR_GREEDY, **own)

    @contextmanager
    def _headed(self) -> Iterator[None]:
        """Put a head of our own in the place of the model's for one pass, where there is one."""
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
        """What the context of the draft model leaves room for."""
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
        """What the draft model's tokenizer makes of them; a part of a character that it cannot read is left out."""
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


class Reading:
    """How the logits of a draft model become distributions over the target's vocabulary, for one way of sampling."""

    def __init__(self, sampling: SamplingParams, vocabulary: Vocabulary, *, trimmed: bool) -> None:
        """A trimmed head has a column for every token that can be proposed, and no other."""
        device = vocabulary.tokens.device
        self._vocabulary = vocabulary
        self._columns = None if trimmed or vocabulary.whole else vocabulary.columns
        self._warp = Warp([sampling], len(vocabulary.tokens), device)
        self._warp.bring()
        self._replayed = PaddedGraphedFunction(self._probs, device) if not sampling.logit_bias else None

    def __call__(self, logits: Tensor) -> Tensor:
        """(nodes, the target's vocabulary), given logits (nodes, columns of the head)."""
        if self._replayed is None:
            return self._probs(logits)
        probs = self._replayed(logits)[: len(logits)]
        return probs.clone() if self._replayed.fixed else probs

    def _probs(self, logits: Tensor) -> Tensor:
        if self._columns is not None:
            logits = logits[:, self._columns]
        return self._vocabulary.spread(sound(self._warp(logits[None])[0]))


def sound(probs: Tensor) -> Tensor:
    """Laws (rows, tokens), where a row that overflowed or lost all its mass draws any token alike.

    A verifier divides by q. What is drawn must have been possible, whatever a draft model made of its numbers.
    """
    masses = probs.sum(dim=-1, keepdim=True)
    good = masses.isfinite() & (masses > 0)
    if probs.device.type == "cpu" and bool(good.all()):
        return probs
    return torch.where(good, probs, 1 / probs.shape[-1])


class Spelled:
    """A text of the target in the tokens of another tokenizer."""

    def __init__(self) -> None:
        self.tokens: list[int] = []
        self.read = 0
        """how many of the target's tokens it covers"""
