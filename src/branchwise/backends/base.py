"""The target: the model whose output distribution is kept, behind six verbs.

    reserve(sequence)            take a slot of the KV cache
    prefill(chunks)              write keys and values of further prompt tokens, of several prompts in one pass
    fork(source, sequence)       open a sequence with the tokens of another one, by a copy of its cache rows
    score(sequences, batch)      one forward pass over every node of every tree; row i has the logits after node i
    commit(sequences, verdicts)  keep the cache rows of the accepted paths
    close(sequence)              give the slot back

A target that `keeps_rows` has three more, so that a text can begin with cached rows of another one
(engine/prefixes.py):

    inherit(source, sequence, rows)  take a slot whose first rows are those of another sequence
    retire(sequence)             give the slot back, and leave its rows in it until the slot is needed
    holds(sequence)              whether the rows of a sequence are still cached

The prefill leaves out the last token of a prompt, which is the first root. So between steps the cache of a sequence
holds exactly its tokens without the last one. docs/add-a-target.md builds a target step by step.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property, partial
from typing import Any, NamedTuple, Protocol
from weakref import proxy

import torch
from torch import Tensor

from branchwise.core.batch import PadShape, TreeBatch
from branchwise.core.sequence import SequenceState
from branchwise.errors import UsageError
from branchwise.verify import Verdict, Verdicts, Verifier

CPU = torch.device("cpu")


USUAL_NODES, LARGEST = 128, 1024
"""the number of nodes that one pass scores, the root included: as a rule, and at most"""


def nodes_for(largest: int) -> int:
    """How many nodes a pass must score for trees of up to `largest` nodes below the root."""
    return min(max(USUAL_NODES, largest + 1), LARGEST)


@dataclass(frozen=True)
class Needs:
    """What a drafter asks of the passes of its target. A pass computes and copies nothing beyond that."""

    prefill_logits: int = 0  # for how many of the last prompt tokens, the root excluded, the logits are kept
    hidden_layers: tuple[str, ...] = ()
    """names of modules (`TargetInfo.layers`) whose outputs come with every pass, prefill included"""
    topk: int = 0  # how many of the most probable tokens after every node are computed on the device with the pass
    pad_shape: PadShape | None = None
    """the least size of a batch of its trees, so that CUDA graphs see the same shapes at every step"""
    cached_layer: str | None = None
    """the name of a layer (`TargetInfo.layers`) whose KV cache the drafter reads between steps (`TargetInfo.cached`);
    this costs the pass nothing"""

    @classmethod
    def joined(cls, parts: Iterable[Needs]) -> Needs:
        """What several drafters ask for together, except for the shape of their trees."""
        every = list(parts)
        return cls(
            prefill_logits=max(needs.prefill_logits for needs in every),
            hidden_layers=tuple(dict.fromkeys(layer for needs in every for layer in needs.hidden_layers)),
            topk=max(needs.topk for needs in every),
            cached_layer=next((needs.cached_layer for needs in every if needs.cached_layer is not None), None),
        )


@dataclass(frozen=True)
class Execution:
    """How passes run on a device."""

    kernels: bool = False  # tree attention by our own Triton kernels
    graphs: bool = False  # passes recorded as CUDA graphs
    compile: bool = False  # layers compiled before they are recorded
    layers: bool = False  # common decoder layers run as few kernels of our own


def weakly(method: Any) -> Callable[..., Any]:
    """A method that does not keep its object alive: a target holds most of a device's memory, and must be freed at
    once."""
    return partial(method.__func__, proxy(method.__self__))


class CachedRows(NamedTuple):
    """The cached keys and values of one layer, (batch, heads, tokens, width) each, for as many tokens as the longest
    sequence has committed. Rows after the end of a shorter sequence are padding."""

    keys: Tensor
    """the keys as attention reads them, after rotary positions if the model has these"""
    values: Tensor


@dataclass(frozen=True, eq=False)
class TargetInfo:
    """The properties of a target that drafters and the engine may read."""

    name: str
    vocabulary: int
    context: int  # the most tokens that a sequence may hold
    max_nodes: int  # the largest tree that one pass may score, root included
    slots: int  # sequences that can be open at the same time
    device: torch.device = CPU
    dtype: torch.dtype = torch.float32
    fingerprint: str = ""  # a digest of the model's shape and its tokenizer, whatever the weights
    tokenizer: Any = None  # the transformers tokenizer, if there is one
    hidden_width: int = 0  # the width of a hidden state
    layers: tuple[str, ...] = ()  # modules whose hidden states can be asked for, first layer first
    weight_bytes: int | None = None  # bytes of weights that a pass over one row reads
    execution: Execution = Execution()
    bucket: Callable[[int, int], tuple[int, int]] = lambda batch, nodes: (batch, nodes)
    """the bucket (batch, nodes) to which a pass over this many trees and nodes is padded"""
    score: Callable[[Sequence[SequenceState], TreeBatch], Scored] | None = None
    """a pass of the target, for a drafter that drafts with the target itself"""
    embeddings: tuple[Tensor, Tensor] | None = None
    """the input and the output embeddings, (vocabulary, width) each"""
    weights: str = ""
    """a digest of the weights: the same with any tokenizer, different for other weights of the same shape"""
    cached: Callable[[str, Sequence[SequenceState]], CachedRows] | None = None
    """a function that returns the keys and values of a layer for the committed tokens of sequences, which between steps
    are all tokens but the last. They are views of the cache if possible, valid until the next pass, commit or change of
    slots. Without sequences only their shapes mean anything"""
    cached_layer: Callable[[str], CachedRows] | None = None
    """a function that returns the keys and values of a layer in all slots, (slots, heads, rows, width). Their addresses
    stay the same as long as the target exists, so a CUDA graph can read them; tensors tell it the slots and lengths"""
    places: Callable[[Sequence[SequenceState]], list[int]] | None = None
    """a function that returns the slots of sequences; they may change when a sequence is opened or closed"""
    quantised: str = ""
    """"int8" or "int4" if the weights of linear layers have 8 or 4 bits; `dtype` is that of everything else"""


class ScoredNodes(NamedTuple):
    """The nodes of a pass in device memory, padding included."""

    tokens: Tensor  # (batch, nodes)
    ancestor_bits: Tensor  # (batch, nodes, words): ancestors as bits, itself included; padding has none
    slots: Tensor  # (batch,): -1 for a tree without a sequence
    lengths: Tensor  # (batch,): committed tokens before the root


@dataclass(frozen=True, eq=False)
class Scored:
    """The output of one pass of the target."""

    logits: Tensor
    """(batch, nodes, vocabulary) before any warping, in the dtype of the model; row i has the logits after node i"""
    hidden: Mapping[str, Tensor] = field(default_factory=dict)
    """layer -> (batch, nodes, width), for the layers that the drafter needs"""
    topk: Tensor | None = None
    """(batch, nodes, 2, k) float32: the k most probable tokens after every node and their probabilities, if a drafter
    needs them; the host copies these instead of whole rows of logits"""
    nodes: ScoredNodes | None = None  # the scored nodes, if they are in device memory

    def cut(self, batch: int, nodes: int) -> Scored:
        """The output without the padding of a recorded pass."""
        hidden = {layer: states[:batch, :nodes] for layer, states in self.hidden.items()}
        return Scored(self.logits[:batch, :nodes], hidden, None if self.topk is None else self.topk[:batch, :nodes])

    @cached_property
    def host_topk(self) -> Tensor | None:
        """`topk` on the host, copied once."""
        return None if self.topk is None else self.topk.cpu()


class Chunk(NamedTuple):
    """Consecutive tokens of a prompt."""

    sequence: SequenceState
    tokens: Sequence[int]
    keep: int = 0  # for how many of the last tokens the logits are returned

    def pieces(self, size: int) -> Iterator[Chunk]:
        """The same tokens as chunks of at most `size` tokens."""
        for start in range(0, max(len(self.tokens), 1), size):
            tokens = self.tokens[start : start + size]
            left = len(self.tokens) - start - len(tokens)
            yield Chunk(self.sequence, tokens, min(max(self.keep - left, 0), len(tokens)))


@dataclass(frozen=True, eq=False)
class Prefill:
    """The output of the prefill of a prompt, or of a chunk of it."""

    logits: Tensor  # (rows, vocabulary): the logits after the last tokens, as many as were asked for
    hidden: Mapping[str, Tensor] = field(default_factory=dict)
    """layer -> (tokens, width), for the layers that the drafter needs"""

    def part_for(self, needs: Needs) -> Prefill:
        """The part that one of several drafters needs. It has fewer logits than needed if this prefill has fewer."""
        hidden = {layer: self.hidden[layer] for layer in needs.hidden_layers}
        return Prefill(self.logits[max(len(self.logits) - needs.prefill_logits, 0) :], hidden)

    @classmethod
    def joined(cls, parts: Sequence[Prefill]) -> Prefill:
        """Consecutive chunks as one."""
        if len(parts) == 1:
            return parts[0]
        hidden = {layer: torch.cat([part.hidden[layer] for part in parts]) for layer in parts[0].hidden}
        return cls(torch.cat([part.logits for part in parts]), hidden)


class Target(ABC):
    """The base class of targets: a backend subclasses it, sets `info` and implements the six verbs."""

    info: TargetInfo
    prefill_chunk = 512  # the most prompt tokens that one pass writes
    keeps_rows = False  # whether `inherit`, `retire` and `holds` are implemented

    @property
    def vocabulary(self) -> int:
        return self.info.vocabulary

    @property
    def context(self) -> int:
        return self.info.context

    @property
    def max_nodes(self) -> int:
        return self.info.max_nodes

    @property
    def slots(self) -> int:
        return self.info.slots

    @property
    def device(self) -> torch.device:
        return self.info.device

    @property
    @abstractmethod
    def free_slots(self) -> int:
        """How many more sequences can be opened."""

    def require(self, needs: Needs) -> None:
        """Make passes report what a drafter needs from now on. By default they report logits alone."""
        if needs.hidden_layers:
            raise UsageError(f"{self.info.name} reports no hidden states, and the drafter needs them.")
        if needs.cached_layer is not None:
            raise UsageError(f"{self.info.name} shows no keys and values, and the drafter needs them.")

    def bucket(self, batch: int, nodes: int) -> tuple[int, int]:
        """The bucket (batch, nodes) to which a pass over this many trees and nodes is padded."""
        return batch, nodes

    def prefill_piece(self, prompt: int) -> int:
        """How many tokens one pass writes of a prompt that has `prompt` tokens. The number is small if a pass over
        pieces of several prompts takes hardly longer than over one. By default a piece is as large as a chunk may
        be."""
        return self.prefill_chunk

    @abstractmethod
    def reserve(self, sequence: SequenceState) -> None: ...

    @abstractmethod
    def prefill(self, chunks: Sequence[Chunk]) -> list[Prefill]: ...

    @abstractmethod
    def fork(self, source: SequenceState, sequence: SequenceState) -> Prefill:
        """Open `sequence` with a copy of the cached rows of `source`. Returns the prefill of the source."""

    @abstractmethod
    def score(self, sequences: Sequence[SequenceState], batch: TreeBatch) -> Scored: ...

    @abstractmethod
    def commit(self, sequences: Sequence[SequenceState], verdicts: Sequence[Verdict]) -> None: ...

    @abstractmethod
    def close(self, sequence: SequenceState) -> None:
        """Free the slot of a sequence, running or retired."""

    def inherit(self, source: SequenceState, sequence: SequenceState, rows: int, *, moved: bool) -> None:
        """Take a slot, as `reserve` does, whose first `rows` rows are those of the sequence `source`, open or retired,
        which has the same tokens up to there. The rows are copied, or `moved` if the source is retired and no longer
        needed."""
        raise NotImplementedError

    def retire(self, sequence: SequenceState) -> None:
        """Give the slot of an open sequence back, and leave the rows of its tokens without the last one there as long
        as no other sequence needs the slot; those used longest ago go first. Retired ones count as `free_slots`."""
        self.close(sequence)

    def holds(self, sequence: SequenceState) -> bool:
        """Whether the rows of a sequence are cached. They are until it is closed, or retired and its slot reused."""
        raise NotImplementedError

    def open(self, sequence: SequenceState, keep: int = 0) -> Prefill:
        """Reserve a slot and write the whole prompt; the logits after its last `keep` tokens before the root."""
        self.reserve(sequence)
        try:
            return self.extend(sequence, sequence.tokens[:-1], keep)
        except BaseException:
            self.close(sequence)
            raise

    def extend(self, sequence: SequenceState, tokens: Sequence[int], keep: int = 0) -> Prefill:
        """Write further tokens of one sequence, chunk by chunk."""
        chunks = Chunk(sequence, tokens, keep).pieces(self.prefill_chunk)
        return Prefill.joined([found for chunk in chunks for found in self.prefill([chunk])])


class Inflight(Protocol):
    """A forward pass enqueued before the previous verdict has reached the host."""

    committed: bool  # whether the previous verdict was committed; until then the pass has no result

    def result(self, sequences: Sequence[SequenceState], batch: TreeBatch) -> Scored | None:
        """The output of the pass, if it was made for these sequences and trees and nothing has overwritten it; else
        None."""


class PipelinedTarget(Target):
    """A target on a device, where the next pass is enqueued while the host still waits for the verdict."""

    @property
    @abstractmethod
    def pipelined(self) -> bool:
        """Whether passes can be enqueued ahead. The same class may run on a host, where that gains nothing."""

    @abstractmethod
    def capture(self, verifier: Verifier) -> Verifier:
        """The same verifier, recorded as the passes are."""

    @abstractmethod
    def commit_on_device(self, scored: Scored, verdicts: Verdicts) -> None:
        """Enqueue the move of the cache rows of accepted paths before the host has read the verdicts; `commit` then
        only counts the rows."""

    @abstractmethod
    def launch(self, sequences: Sequence[SequenceState], batch: TreeBatch, after: Verdicts) -> Inflight | None:
        """Enqueue the pass over the next trees, whose roots are the tokens of `after`; None if it cannot be."""
