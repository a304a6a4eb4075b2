"""A target of a few tokens with exact tiny distributions: for tests, examples and audits."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

import torch
from torch import Tensor

from branchwise.backends.base import CachedRows, Chunk, Needs, Prefill, Scored, Target, TargetInfo, weakly
from branchwise.core.batch import TreeBatch
from branchwise.core.sequence import SequenceState
from branchwise.core.tree import DraftTree
from branchwise.errors import UsageError
from branchwise.verify import Verdict

KEY_WIDTH = 4
"""the width of the keys and values of its one head"""


class ToyTarget(Target):
    """A model whose logits are a fixed random function of the whole prefix, and so are the hidden states, keys and
    values of its one layer, "embedding". Its embeddings are random rows, which its logits do not depend on. It keeps
    account of a KV cache and asserts that a real cache would hold the committed tokens."""

    keeps_rows = True

    def __init__(
        self,
        vocabulary: int = 8,
        *,
        context: int = 512,
        max_nodes: int = 64,
        slots: int = 4,
        seed: int = 0,
        padded: bool = False,
        prefill_chunk: int = 512,
        prefill_piece: int | None = None,
    ) -> None:
        """`padded` pads passes to more trees and nodes than are asked for, as CUDA graphs do."""
        self.padded = padded
        self.seed = seed
        self.prefill_chunk = prefill_chunk
        self._piece = prefill_piece or prefill_chunk
        self.passes = 0
        self.prefills: list[list[int]] = []  # tokens of every chunk of every prefill pass
        info = TargetInfo("toy", vocabulary, context, max_nodes, slots, fingerprint=f"toy-{vocabulary}-{seed}")
        noise = torch.Generator().manual_seed(seed)
        rows = torch.randn(2, vocabulary, vocabulary, generator=noise)
        self.info = replace(
            info,
            hidden_width=vocabulary,
            layers=("embedding",),
            bucket=weakly(self.bucket),
            score=weakly(self.score),
            embeddings=(rows[0], rows[1]),
            weights=info.fingerprint,
            cached=weakly(self.cached),
        )
        self._needs = Needs()
        self._cached: dict[SequenceState, list[int]] = {}
        self._retired: dict[SequenceState, list[int]] = {}  # least recently used first
        self._prefilled: dict[SequenceState, list[Prefill]] = {}
        self._scored: dict[SequenceState, tuple[DraftTree, Tensor]] = {}

    def prefill_piece(self, prompt: int) -> int:
        return self._piece

    @property
    def free_slots(self) -> int:
        return self.slots - len(self._cached)

    def require(self, needs: Needs) -> None:
        unknown = {*needs.hidden_layers, needs.cached_layer} - {*self.info.layers, None}
        if unknown:
            raise UsageError(f"The toy target has no layer {unknown.pop()!r}; it has {self.info.layers[0]!r}.")
        layers = (*self._needs.hidden_layers, *needs.hidden_layers)
        self._needs = Needs(hidden_layers=tuple(dict.fromkeys(layers)))

    def bucket(self, batch: int, nodes: int) -> tuple[int, int]:
        return (batch + 2, min(nodes + 3, self.max_nodes)) if self.padded else (batch, nodes)

    def logits(self, tokens: Sequence[int]) -> Tensor:
        """(vocabulary,): the logits after these tokens."""
        return 2 * self._random(tokens, self.vocabulary)

    def _random(self, tokens: Sequence[int], count: int) -> Tensor:
        generator = torch.Generator().manual_seed(hash((self.seed, *tokens)) % (1 << 62))
        return torch.randn(count, generator=generator)

    def hidden(self, tokens: Sequence[int]) -> Tensor:
        """(width,): the hidden state of the last of these tokens."""
        return self.logits((*tokens, -1))

    def cached(self, layer: str, sequences: Sequence[SequenceState]) -> CachedRows:
        texts = [self._cached[sequence] for sequence in sequences]
        rows = torch.zeros(2, len(texts), 1, max(map(len, texts), default=0), KEY_WIDTH)
        for text, tokens in enumerate(texts):
            for place in range(len(tokens)):
                rows[:, text, 0, place] = self._random((*tokens[: place + 1], -2), 2 * KEY_WIDTH).view(2, KEY_WIDTH)
        return CachedRows(rows[0], rows[1])

    def reserve(self, sequence: SequenceState) -> None:
        self._seat(sequence, [])

    def _seat(self, sequence: SequenceState, cached: list[int], spared: SequenceState | None = None) -> None:
        assert self.free_slots > 0, "more sequences are opened than there are slots"
        if len(self._cached) + len(self._retired) == self.slots:
            del self._retired[next(one for one in self._retired if one is not spared)]
        self._cached[sequence] = cached
        self._prefilled[sequence] = []

    def prefill(self, chunks: Sequence[Chunk]) -> list[Prefill]:
        self.prefills.append([len(chunk.tokens) for chunk in chunks])
        return [self._prefill(*chunk) for chunk in chunks]

    def _prefill(self, sequence: SequenceState, tokens: Sequence[int], keep: int) -> Prefill:
        cached = self._cached[sequence]
        ends = range(len(cached) + 1, len(cached) + len(tokens) + 1)
        cached += tokens
        logits = [self.logits(cached[:end]) for end in ends[len(tokens) - keep :]]
        states = [self.hidden(cached[:end]) for end in ends] or [torch.zeros(0, self.vocabulary)]
        hidden = {layer: torch.stack(states).view(-1, self.vocabulary) for layer in self._needs.hidden_layers}
        found = Prefill(torch.stack(logits) if logits else torch.zeros(0, self.vocabulary), hidden)
        self._prefilled[sequence].append(found)
        return found

    def fork(self, source: SequenceState, sequence: SequenceState) -> Prefill:
        assert sequence.tokens == source.tokens, "a fork has other tokens than its source"
        self._seat(sequence, list(self._cached[source]))
        self._prefilled[sequence] = self._prefilled[source]
        return Prefill.joined(self._prefilled[source])

    def score(self, sequences: Sequence[SequenceState], batch: TreeBatch) -> Scored:
        self.passes += 1
        logits = torch.zeros(len(batch), batch.nodes, self.vocabulary)
        hidden = {layer: torch.zeros(logits.shape) for layer in self._needs.hidden_layers}
        for row, (sequence, tree) in enumerate(zip(sequences, batch.trees, strict=False)):
            cached = self._cached[sequence]
            assert cached == sequence.tokens[:-1], "the cache is out of step with its sequence"
            tokens = batch.tokens[row]
            assert int(tokens[0]) == sequence.root, "a tree does not start at the root"
            self._scored[sequence] = (tree, tokens)
            for node in range(len(tree)):
                path = cached + tokens[tree.path(node)].tolist()
                logits[row, node] = self.logits(path)
                for states in hidden.values():
                    states[row, node] = self.hidden(path)
        return Scored(logits, hidden)

    def commit(self, sequences: Sequence[SequenceState], verdicts: Sequence[Verdict]) -> None:
        for sequence, verdict in zip(sequences, verdicts, strict=True):
            tree, tokens = self._scored.pop(sequence)
            assert tuple(tree.path(verdict.path[-1])) == verdict.path, "an accepted path has a gap"
            self._cached[sequence] += tokens[list(verdict.path)].tolist()

    def inherit(self, source: SequenceState, sequence: SequenceState, rows: int, *, moved: bool) -> None:
        cached = self._retired.pop(source) if source in self._retired else self._cached[source]
        assert rows <= len(cached), "a sequence inherits more rows than there are"
        assert cached[:rows] == sequence.tokens[:rows], "a sequence inherits rows of other tokens"
        assert not moved or source not in self._cached, "rows of a running text are taken away"
        if not moved and source not in self._cached:
            self._retired[source] = cached
        self._seat(sequence, cached[:rows], spared=source)

    def retire(self, sequence: SequenceState) -> None:
        cached = self._cached.pop(sequence)[: len(sequence.tokens) - 1]
        assert cached == sequence.tokens[: len(cached)], "the cache is out of step with its sequence"
        self._retired[sequence] = cached
        del self._prefilled[sequence]

    def holds(self, sequence: SequenceState) -> bool:
        return sequence in self._cached or sequence in self._retired

    def close(self, sequence: SequenceState) -> None:
        if self._retired.pop(sequence, None) is None:
            del self._cached[sequence], self._prefilled[sequence]
