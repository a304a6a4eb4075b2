"""Any decoder of transformers as a target: trees of several sequences scored in one pass.

On a host every pass is a plain forward of the model over masked attention. On a GPU the tokens, positions and masks of
a pass are packed into one buffer (`cuda/inputs.py`), its attention runs in our kernels, and passes are recorded as CUDA
graphs, one for every (batch, nodes) bucket.
"""

from __future__ import annotations

import logging
import weakref
from collections.abc import Sequence
from contextlib import nullcontext
from dataclasses import replace
from functools import partial
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from branchwise.backends.base import (
    USUAL_NODES,
    CachedRows,
    Chunk,
    Execution,
    Needs,
    Prefill,
    Scored,
    ScoredNodes,
    TargetInfo,
    weakly,
)
from branchwise.backends.quantized import conversion_of
from branchwise.backends.transformers.check import check_against_own_forward
from branchwise.backends.transformers.kv_cache import KVCache, Layout, PartialTree, batch_ancestors
from branchwise.backends.transformers.prefill import LONG_PROMPT, PREFILL_NODES, RecordedPrefill
from branchwise.backends.transformers.probe import context_limit, fitting_context
from branchwise.backends.transformers.runner import ModelRunner, bytes_read, embedding_rows
from branchwise.backends.transformers.sequences import SlottedTarget
from branchwise.backends.transformers.weights import weights_fingerprint
from branchwise.core.batch import TreeBatch, TreeLayout
from branchwise.core.rows import pack_array, top_tokens
from branchwise.core.sequence import SequenceState
from branchwise.core.tree import DeviceShape
from branchwise.cuda.advance import advance_inputs
from branchwise.cuda.graphs import Graphs, InflightPass, have_kernels
from branchwise.cuda.inputs import BATCHES, PassInputs, PassTensors, fitting, size_for
from branchwise.cuda.laid import lie_still
from branchwise.cuda.layers.fuse import Fusion
from branchwise.cuda.layers.groups import Group, groups_of
from branchwise.cuda.verify_graph import CAPTURE_AFTER, CapturedVerifier
from branchwise.errors import UnsupportedModel, UsageError
from branchwise.registry import nearest
from branchwise.verify import Verdict, Verdicts, Verifier

log = logging.getLogger(__name__)

PREFILL_CHUNK, PREFILL_CHUNK_ON_DEVICE = 512, 2048
"""the most prompt tokens that one pass writes, on a host and in our kernels"""
SHORTEST_CONTEXT = 8  # the comparison at load needs this many tokens

_known: weakref.WeakKeyDictionary[PreTrainedModel, Layout] = weakref.WeakKeyDictionary()
"""models that passed probe and comparison, and the layout that the probe found; these run once for a model"""

_unfusible: weakref.WeakSet[PreTrainedModel] = weakref.WeakSet()  # models whose fused form failed the comparison


class TransformersTarget(SlottedTarget):
    """Trees scored on a transformers model, several sequences in one pass."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        slots: int = 8,
        context: int | None = None,
        max_nodes: int = USUAL_NODES,
        prefill_chunk: int | None = None,
        tokenizer: PreTrainedTokenizerBase | None = None,
        kernels: bool | None = None,
        graphs: bool = True,
        compile: bool = False,
        layers: bool | None = None,
    ) -> None:
        """`tokenizer` is for drafters that read the text of tokens. `kernels` runs tree attention in our Triton
        kernels, by default if the device supports them, and `graphs` records such passes; without kernels the model
        runs as it does on a host. `layers` runs common decoder layers in few kernels too, by default on a device in
        bfloat16, and `compile` compiles the other layers before they are recorded."""
        super().__init__()
        self.model = model
        self.runner = ModelRunner(model)
        name, device, dtype = self.runner.name, model.device, model.dtype
        if model.training:
            raise UsageError(f"{name} is in training mode, where dropout blurs its output; call model.eval() first.")
        if len({parameter.device for parameter in model.parameters()}) > 1:
            raise UnsupportedModel(f"{name} is spread over several devices; load it on one.")
        layout = _known.get(model) or self.runner.probe()
        kernels = have_kernels(device) if kernels is None else kernels
        if layers is None:  # float32: the library's sums round less; float16: too narrow for rows before their norm
            layers = device.type != "cpu" and dtype == torch.bfloat16
        execution = Execution(kernels, graphs, compile, kernels and layers)
        if not execution.kernels:
            self.runner.settle(layout)
        limit = context_limit(model.config)
        if context is not None and context < SHORTEST_CONTEXT:
            raise UsageError(f"A context holds at least {SHORTEST_CONTEXT} tokens, not {context}.")
        if context is not None and context > limit:
            raise UsageError(f"{name} has a context of {limit} tokens; {context} cannot be served.")
        row_bytes = layout.bytes_per_row(dtype) * slots
        length = fitting_context(context or limit, row_bytes, max_nodes, device, asked=context is not None)
        converted = conversion_of(model)
        self.prefill_chunk = prefill_chunk or (PREFILL_CHUNK_ON_DEVICE if execution.kernels else PREFILL_CHUNK)
        self.info = TargetInfo(
            name,
            self.runner.vocabulary,
            length,
            max_nodes,
            slots,
            device,
            dtype,
            self.runner.fingerprint(tokenizer),
            tokenizer,
            int(model.config.get_text_config().hidden_size),
            self.runner.layer_names(len(layout.keys)),
            bytes_read(model),
            execution,
            weakly(self.bucket),
            weakly(self.score),
            embedding_rows(model),
            weights_fingerprint(model) if converted is None else converted.weights,
            weakly(self.cached),
            weakly(self.cached_layer),
            weakly(self.places),
            "" if converted is None else converted.scheme,
        )
        rows = length + max_nodes
        # Integer products are exact in any order, and so are attention sums in float64, after rounding to float32.
        wide = converted is not None and dtype == torch.float32 and not self.runner.settled_layers
        kept = torch.float64 if wide else dtype
        self.store = KVCache(layout, slots, rows, kept, device, by_kernels=execution.kernels, record=graphs)
        self.runner.hook.store = self.store
        log.info("Keys and values of %d texts of %d tokens take %.2f GiB.", slots, length, row_bytes * rows / 2**30)

        self._topk = 0
        self._moved = False  # whether `commit_on_device` has moved the rows that the last pass accepted
        self._graphs: Graphs | None = None
        self._filled: tuple[PassInputs, tuple[SequenceState, ...], tuple[int, ...]] | None = None
        """the inputs of the last pass, its sequences and their slots"""
        self._captured: dict[Any, Verifier] = {}
        self._fusion: Fusion | None = None
        groups = self._groups() if execution.kernels and model not in _unfusible else []
        # Not earlier: joining layers moves their weights, and an older graph would read memory that is freed by now.
        self._graphs = Graphs(name, device, capture=graphs) if execution.kernels else None
        if groups:
            self._fusion = Fusion(self.store, groups)
        if model not in _known:
            self._check()
            if slots > 1:  # with one slot the comparison has seen no batch
                _known[model] = layout
        if execution.kernels and (execution.layers or compile):
            every = [model.get_submodule(layer) for layer in self.info.layers[: len(layout.keys)]]
            groups = [] if model in _unfusible else groups
            self._fusion = Fusion(self.store, groups, every, kernels=execution.layers, compile=compile)
            self._fusion.around(model, rows, partial(check_against_own_forward, self, self.runner))
            self.info = replace(self.info, execution=replace(execution, layers=self._fusion.has_own_layers))
            self._forget()

    def require(self, needs: Needs) -> None:
        before = self.runner.hidden_layers, self._topk
        self.runner.watch(needs.hidden_layers)
        if needs.cached_layer is not None:
            self.cached(needs.cached_layer, ())  # refuses a name that is no layer
        if self._graphs is not None:
            self._topk = max(self._topk, min(needs.topk, self.info.vocabulary))
        if before != (self.runner.hidden_layers, self._topk):
            self._forget()

    def bucket(self, batch: int, nodes: int) -> tuple[int, int]:
        if self._graphs is None:
            return batch, nodes
        size = size_for(batch, nodes, nodes)
        return size.batch, min(size.nodes, self.info.max_nodes)

    def cached(self, layer: str, sequences: Sequence[SequenceState]) -> CachedRows:
        """Keys and values of a decoder layer for the committed tokens of these sequences (`TargetInfo.cached`)."""
        found = self.store.committed(self._layer(layer), sequences)
        return CachedRows(*(part.to(self.info.dtype) for part in found))

    def cached_layer(self, layer: str) -> CachedRows:
        number = self._layer(layer)
        return CachedRows(self.store.layers_keys[number], self.store.layers_values[number])

    def places(self, sequences: Sequence[SequenceState]) -> list[int]:
        return self.store.places(sequences)

    def _layer(self, name: str) -> int:
        known = list(self.info.layers[: len(self.store.layers_keys)])
        if name not in known:
            raise UsageError(f"{self.info.name} has no layer {name!r} with keys and values.{nearest(name, known)}")
        return known.index(name)

    # Prompts

    def prefill(self, chunks: Sequence[Chunk]) -> list[Prefill]:
        self._passes += 1
        eagerly = partial(self.runner.prefill, self.store)
        if not self._records_prompts:
            return eagerly(chunks)
        parts = self.store, self._recorded_piece, self._write, self.runner.nothing_written
        return RecordedPrefill(*parts, eagerly)(chunks)

    @property
    def _records_prompts(self) -> bool:
        return self._graphs is not None and self._graphs.captures and self.info.max_nodes >= PREFILL_NODES

    def prefill_piece(self, prompt: int) -> int:
        recorded = self._records_prompts and prompt < LONG_PROMPT
        return self._recorded_piece if recorded else super().prefill_piece(prompt)

    @property
    def _recorded_piece(self) -> int:
        """The number of tokens of one prompt that a recorded pass writes, however large trees may be."""
        return min(self.info.max_nodes, USUAL_NODES)

    def _write(self, sequences: Sequence[SequenceState], tokens: NDArray[np.int64], layout: TreeLayout) -> Scored:
        return self._replay(sequences, tokens, layout.depths, layout.ancestor_bits, layout=layout)[1]

    # Trees

    def score(self, sequences: Sequence[SequenceState], batch: TreeBatch) -> Scored:
        assert batch.nodes <= self.info.max_nodes, "a tree is larger than the target allows"
        self._moved = False
        for sequence in sequences:
            assert self.store.length(sequence) == len(sequence.tokens) - 1, "the cache is out of step with its sequence"
        if self._graphs is not None:
            return self._score_packed(sequences, batch)
        self._passes += 1
        current = self.store.begin(sequences, batch.depths, batch_ancestors(batch, self.device))
        return Scored(*self.runner.run(batch.tokens, current.lengths[:, None] + batch.depths, self.store))

    def _score_packed(
        self, sequences: Sequence[SequenceState], batch: TreeBatch, after: Verdicts | None = None
    ) -> Scored:
        drafted = batch.drafted if batch.host_tokens is None else batch.host_tokens
        layout, roots = batch.layout, [sequence.root for sequence in sequences]
        inputs, found = self._replay(
            sequences,
            drafted,
            layout.depths,
            layout.ancestor_bits,
            roots=roots,
            layout=layout,
            laid=batch.laid,
            after=after,
            still=lie_still(batch),
        )
        size, nodes = layout.depths.shape
        tokens, ancestor_bits = inputs.tokens[:size, :nodes], inputs.ancestor_bits[:size, :nodes]
        if batch.host_tokens is None:
            batch.tokens = inputs.drafted[:size, :nodes]
        return replace(found, nodes=ScoredNodes(tokens, ancestor_bits, inputs.slots[:size], inputs.lengths[:size]))

    def sprout(
        self,
        sequences: Sequence[SequenceState],
        tokens: NDArray[np.int64],
        depths: NDArray[np.int64],
        ancestors: NDArray[np.bool_],
        written: PartialTree | None = None,
    ) -> Tensor:
        """(batch, nodes, vocabulary): the logits after new nodes of a draft model's trees, which grow level by level.
        Depth 0 is the position right after the committed tokens. `ancestors` (batch, nodes, columns) marks for each new
        node the rows of its tree that it attends to, its own included."""
        if self._graphs is not None:
            return self._replay(sequences, tokens, depths, pack_array(ancestors), written)[1].logits
        self._passes += 1
        places = torch.from_numpy(depths).to(self.device)
        current = self.store.begin(sequences, places, torch.from_numpy(ancestors).to(self.device), written)
        ids = torch.from_numpy(tokens).to(self.device)
        return self.runner.run(ids, current.lengths[:, None] + places, self.store)[0]

    def commit(self, sequences: Sequence[SequenceState], verdicts: Sequence[Verdict]) -> None:
        moved, self._moved = self._moved, False
        self.store.keep(sequences, [verdict.path for verdict in verdicts], moved=moved)

    # On a device, before the verdict has reached the host

    @property
    def pipelined(self) -> bool:
        return self._graphs is not None

    def capture(self, verifier: Verifier) -> Verifier:
        if self._graphs is None or not self._graphs.captures:
            return verifier
        kind = type(verifier), repr(vars(verifier))
        if kind not in self._captured:  # later engines reuse what the first one recorded
            self._captured[kind] = CapturedVerifier(
                verifier,
                compile=self.info.execution.compile,
                seen=CAPTURE_AFTER,
                texts=fitting(self.info.slots, BATCHES),
            )
        return self._captured[kind]

    def commit_on_device(self, scored: Scored, verdicts: Verdicts) -> None:
        if scored.nodes is not None and self.store.by_kernels:
            if scored.logits.shape[1] > 1:  # if only roots were scored, no row moves
                self.store.move(scored.nodes.slots, scored.nodes.lengths, verdicts.paths)
            self._moved = True

    def launch(self, sequences: Sequence[SequenceState], batch: TreeBatch, after: Verdicts) -> InflightPass | None:
        assert self._graphs is not None, "passes are enqueued ahead if they are packed"
        furthest = max(map(self.store.length, sequences)) + after.paths.shape[1] + batch.nodes
        if not self._moved or furthest > self.store.rows:
            return None
        if not self._graphs.knows(size_for(len(batch), batch.nodes, batch.nodes)):
            return None  # a recording would count as part of this step
        scored = self._score_packed(sequences, batch, after)
        passes = self._passes
        return InflightPass(tuple(sequences), batch, scored, lambda: self._passes == passes)

    # Passes

    def _replay(
        self,
        sequences: Sequence[SequenceState],
        tokens: NDArray[np.int64] | Tensor,
        depths: NDArray[np.int64],
        ancestor_bits: NDArray[np.int32],
        written: PartialTree | None = None,
        *,
        roots: Sequence[int] | None = None,
        layout: TreeLayout | None = None,
        laid: DeviceShape | None = None,
        after: Verdicts | None = None,
        still: bool = False,
    ) -> tuple[PassInputs, Scored]:
        """A pass by kernels over nodes (batch, nodes), and its inputs. Trees beyond the number of sequences are
        padding. Roots may be the tokens of verdicts `after` which the pass is enqueued and which are not committed yet.
        Trees that were `laid` out on the device may be `still`, at the same addresses in every step."""
        assert self._graphs is not None
        self._passes += 1  # graphs share memory: whatever an enqueued pass found is overwritten
        batch, nodes = depths.shape
        before = written.rows if written else [0] * len(sequences)
        size = size_for(batch, nodes, max(before) + nodes)
        steps = 0 if after is None else after.paths.shape[1]
        slots, lengths = self.store.seat(sequences, before, steps + nodes, steps + size.nodes)
        recorded = self._graphs.ready(size)
        inputs = recorded.inputs
        rows, row_depths = (written.rows, written.depths) if written else (None, None)
        # After a pass over the same inputs, all that is new of a tree laid out on the device is there already.
        filled, self._filled = self._filled, None
        pass_over = inputs, tuple(sequences), tuple(slots)
        if after is None or laid is None or not still or filled != pass_over:
            inputs.fill(slots, lengths, tokens, depths, ancestor_bits, rows, row_depths, roots=roots, layout=layout)
        advance_inputs(inputs, batch, tokens if isinstance(tokens, Tensor) else None, laid, after)
        self._filled = pass_over
        return inputs, self._graphs.run(recorded, self.run_packed).cut(batch, nodes)

    def run_packed(self, inputs: PassTensors) -> Scored:
        """A pass by kernels over inputs on the device: launched at once, or recorded if the caller records."""
        # The model is fused only inside this context, because other targets may share it.
        fused = nullcontext() if self._fusion is None else self._fusion()
        with self.runner.attending(self.runner.hook.name), fused:
            self.store.current = inputs
            logits, hidden = self.runner.run(inputs.tokens, inputs.positions, self.store)
        return Scored(logits, hidden, top_tokens(logits, self._topk) if self._topk else None)

    def own_logits(self, tokens: Tensor) -> Tensor:
        """The logits of the model's own forward after every token (batch, length), without any of our code."""
        return self.runner.own_logits(tokens)

    def _groups(self) -> list[Group]:
        sequence = SequenceState([0, 0, 0])

        def one_pass() -> None:
            self.open(sequence)
            self.close(sequence)

        with self.runner.attending(self.runner.hook.name):  # no other target's pass in between
            return groups_of(self.model, one_pass)

    def _check(self) -> None:
        """Compare with the model's own forward. If that fails in a fused form, compare again without it."""
        try:
            check_against_own_forward(self, self.runner)
        except Exception:
            if self._fusion is None:
                raise
            self._fusion = None
            self._forget()
            check_against_own_forward(self, self.runner)
            _unfusible.add(self.model)

    def _forget(self) -> None:
        if self._graphs is not None:
            self._graphs.forget()
