"""Any decoder of transformers as a target.

The model class stays as it is. Its attention and its masks are routed here (`hooks.py`), its keys and values through
`Cache`. Outside a pass the model is left exactly as it was found.
"""

from __future__ import annotations

import inspect
import logging
import os
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor, nn
from torch.nn.attention import SDPBackend, sdpa_kernel
from transformers import PreTrainedModel, PreTrainedTokenizerBase

from branchwise.backends.base import Nodes, Scored
from branchwise.backends.transformers.hooks import AttentionHook
from branchwise.backends.transformers.kv_cache import KVCache, Layout, PartialTree, batch_ancestors
from branchwise.backends.transformers.probe import Probe, ProbeCache, check_against_own_forward, context_limit
from branchwise.core.batch import TreeBatch, TreeLayout, lay_out
from branchwise.core.rows import pack_array, top_tokens
from branchwise.core.sequence import SequenceState
from branchwise.core.topology import chain_topology
from branchwise.cuda.fuse import Fusion, Group, groups_of
from branchwise.cuda.graphs import GraphedFunction, Graphs, PassOutputs, have_kernels
from branchwise.cuda.inflight import InflightPass, standing, step_on
from branchwise.cuda.inputs import PassInputs, size_for
from branchwise.errors import ModelError, UnsupportedModel, UsageError
from branchwise.registry import nearest
from branchwise.verify import Verdict, Verdicts, Verifier

log = logging.getLogger(__name__)

LAUNCHED = 2048
"""a longer text is written by launching one kernel after the other, in larger chunks: there the launches are hidden"""
WIDE = 64
"""where trees are smaller, texts are not written through their pass"""
SHORTEST_CONTEXT = 8
"""what the comparison at load needs"""

_known: weakref.WeakKeyDictionary[PreTrainedModel, Layout] = weakref.WeakKeyDictionary()
"""models that passed the probe, which is asked once in the life of a model"""

_unfusible: weakref.WeakSet[PreTrainedModel] = weakref.WeakSet()
"""models whose joined maps did not pass it"""

_turns: weakref.WeakKeyDictionary[PreTrainedModel, threading.RLock] = weakref.WeakKeyDictionary()


class TransformersTarget:
    """Trees scored on a transformers model, several sequences in one pass."""

    def __init__(
        self,
        model: PreTrainedModel,
        *,
        slots: int = 8,
        context: int | None = None,
        max_nodes: int = 128,
        prefill_chunk: int = 512,
        tokenizer: PreTrainedTokenizerBase | None = None,
        kernels: bool | None = None,
        graphs: bool = True,
        compile: bool = False,
    ) -> None:
        """`tokenizer` is for drafters that must know what the tokens mean.

        `kernels` attends to trees with the kernels of a device, by default where there are some, and `graphs` records
        such passes; without them the model runs as it does on the host. `compile` fuses what is recorded, which takes a
        while when a size is first seen.
        """
        self.model = model
        self.tokenizer = tokenizer
        self.name = type(model).__name__
        self.device = model.device
        self.dtype = model.dtype
        if model.training:
            raise UsageError(
                f"{self.name} is in training mode, where dropout blurs its distribution; call model.eval() first."
            )
        if len({parameter.device for parameter in model.parameters()}) > 1:
            raise UnsupportedModel(f"{self.name} is spread over several devices; load it on one.")
        self.max_nodes = max_nodes
        self.compile = compile
        self.prefill_chunk = prefill_chunk
        self._forward_parameters = inspect.signature(model.forward).parameters
        configs: list[Any] = [module.config for module in model.modules() if hasattr(module, "config")]
        self._configs = list({id(config): config for config in configs}.values())
        self._route = AttentionHook()
        weakref.finalize(self, self._route.unregister)

        layout = _known.get(model) or self._probe()
        limit = context_limit(model.config)
        if context is not None and context < SHORTEST_CONTEXT:
            raise UsageError(f"A context holds at least {SHORTEST_CONTEXT} tokens, not {context}.")
        if context is not None and context > limit:
            raise UsageError(f"{self.name} has a context of {limit} tokens; {context} cannot be served.")
        self.context = self._fit(context or limit, layout.bytes_per_row(self.dtype) * slots, asked=context is not None)
        self.kernels = have_kernels(self.device) if kernels is None else kernels
        self.store = KVCache(
            layout,
            slots=slots,
            rows=self.context + max_nodes,
            dtype=self.dtype,
            device=self.device,
            by_kernels=self.kernels,
            record=graphs,
        )
        self._route.store = self.store
        taken = layout.bytes_per_row(self.dtype) * slots * self.store.rows
        log.info("Keys and values of %d texts of %d tokens take %.2f GiB.", slots, self.context, taken / 2**30)
        self.graphs = graphs
        self._graphs: Graphs | None = None
        self._fusion: Fusion | None = None
        self._best = 0
        self._moved = False  # whether the rows that the last pass accepted are where they belong
        self._begun: InflightPass | None = None
        self._stepping = GraphedFunction(step_on, self.device, still=standing, capture=graphs)
        self._captured: dict[Any, Verifier] = {}
        groups = self._groups() if self.kernels and model not in _unfusible else []
        if self.kernels:
            self._graphs = Graphs(self.name, self.device, capture=graphs)
        if groups:
            self._fusion = Fusion(model, self.store, groups, compile=False)
        if model not in _known:
            self._check()
            if slots > 1:  # with one slot nothing was seen of a batch
                _known[model] = layout
        if self.kernels and compile:
            self._fusion = Fusion(model, self.store, [] if model in _unfusible else groups, compile=True)
            self._forget()

    def _check(self) -> None:
        """Compare with the model's own forward; where a fused form is to blame, do without it."""
        try:
            check_against_own_forward(self)
        except Exception:
            if self._fusion is None:
                raise
            self._fusion = None
            self._forget()
            check_against_own_forward(self)
            _unfusible.add(self.model)

    def _forget(self) -> None:
        if self._graphs is not None:
            self._graphs.forget()

    @property
    def vocabulary(self) -> int:
        return int(self.model.config.get_text_config().vocab_size)

    @property
    def slots(self) -> int:
        return self.store.slots

    @property
    def free_slots(self) -> int:
        return self.store.free_slots

    def open(self, sequence: SequenceState, tell: int = 0) -> Tensor:
        if len(sequence.tokens) > self.context:
            raise UsageError(
                f"The prompt has {len(sequence.tokens)} tokens and the context holds {self.context}; shorten it."
            )
        self.store.open(sequence)
        try:
            return self.follow(sequence, sequence.tokens[:-1], tell)
        except BaseException:
            self.store.close(sequence)
            raise

    def fork(self, source: SequenceState, sequence: SequenceState) -> None:
        assert sequence.tokens == source.tokens, "a fork has other tokens than its source"
        assert self.store.length(source) == len(source.tokens) - 1, "the cache is out of step with its sequence"
        self.store.fork(source, sequence)

    def score(self, sequences: Sequence[SequenceState], batch: TreeBatch, taps: Sequence[str] = ()) -> Scored:
        assert batch.nodes <= self.max_nodes, "a tree is larger than the target allows"
        self._moved = False
        begun, self._begun = self._begun, None
        for sequence in sequences:
            assert self.store.length(sequence) == len(sequence.tokens) - 1, "the cache is out of step with its sequence"
        if self._graphs is not None and not taps:
            if begun is None or not begun.serves(sequences, batch):
                return self._score_inputs(sequences, batch)
            if batch.host_tokens is None:
                batch.tokens = begun.batch.tokens
            return begun.scored
        current = self.store.begin(sequences, batch.depths, batch_ancestors(batch, self.device))
        hidden: dict[str, Tensor] = {}
        with self._tapped(taps, hidden):
            logits = self._run(batch.tokens, current.lengths[:, None] + batch.depths, self.store)
        return Scored(logits, hidden)

    @property
    def scores_ahead(self) -> bool:
        return self._graphs is not None

    def launch(self, sequences: Sequence[SequenceState], batch: TreeBatch, found: Verdicts) -> Scored | None:
        assert self._graphs is not None, "passes begin ahead where kernels make them"
        furthest = max(map(self.store.length, sequences)) + found.paths.shape[1] + batch.nodes
        if not self._moved or furthest > self.store.rows:
            return None
        if not self._graphs.knows(size_for(len(batch), batch.nodes, batch.nodes)):
            return None  # a recording would count as part of this step
        scored = self._score_inputs(sequences, batch, behind=found)
        self._begun = InflightPass(tuple(sequences), batch, scored)
        return scored

    def _score_inputs(
        self, sequences: Sequence[SequenceState], tree_batch: TreeBatch, behind: Verdicts | None = None
    ) -> Scored:
        told = tree_batch.host_tokens
        tokens, layout = tree_batch.drafted if told is None else told, tree_batch.layout
        roots = [sequence.root for sequence in sequences]
        inputs, found = self._replay(
            sequences, tokens, layout.depths, layout.seen, roots=roots, layout=layout, behind=behind
        )
        batch, nodes = layout.depths.shape
        if told is None:
            tree_batch.tokens = inputs.tokens[:batch, :nodes].long()
        told_there = Nodes(
            inputs.tokens[:batch, :nodes], inputs.seen[:batch, :nodes], inputs.slots[:batch], inputs.lengths[:batch]
        )
        return Scored(found.logits, best=found.best, nodes=told_there)

    def capture(self, verifier: Verifier) -> Verifier:
        """The same verifier, recorded as the passes are."""
        if self._graphs is None or not self._graphs.captures:
            return verifier
        from branchwise.cuda.verify_graph import SEEN, CapturedVerifier

        kind = type(verifier), repr(vars(verifier))
        if kind not in self._captured:  # engines that come and go use what the first of them recorded
            self._captured[kind] = CapturedVerifier(verifier, compile=self.compile, seen=SEEN)  # type: ignore[assignment]
        return self._captured[kind]

    def room(self, batch: int, nodes: int) -> tuple[int, int]:
        """For how many trees and nodes a pass is made ready where so many are wanted; the host makes no graphs."""
        if self._graphs is None:
            return batch, nodes
        size = size_for(batch, nodes, nodes)
        return size.batch, min(size.nodes, self.max_nodes)

    def update_on_device(self, scored: Scored, found: Verdicts) -> None:
        if scored.nodes is not None and self.store.by_kernels:
            if scored.logits.shape[1] > 1:  # otherwise nothing but roots was scored
                self.store.move(scored.nodes.slots, scored.nodes.lengths, found.paths)
            self._moved = True

    def commit(self, sequences: Sequence[SequenceState], verdicts: Sequence[Verdict]) -> None:
        moved, self._moved = self._moved, False
        self.store.keep(sequences, [verdict.path for verdict in verdicts], moved_there=moved)
        if self._begun is not None:  # only now: whoever was interrupted before makes this step again
            self._begun.committed = self._begun.sequences == tuple(sequences)

    def close(self, sequence: SequenceState) -> None:
        self._begun = None  # slots may move
        self.store.close(sequence)

    def own_logits(self, tokens: Tensor) -> Tensor:
        """(batch, length, vocabulary): what the model itself finds after every token, without anything of ours.

        Tokens are ids (batch, length), or in their place embeddings (batch, length, width). The model's eager attention
        is the reference, because faster ones of transformers have dropped soft caps in silence.
        """
        given = {"inputs_embeds" if tokens.is_floating_point() else "input_ids": tokens}
        with torch.inference_mode(), self._attending("eager"):
            logits: Tensor = self.model(**given, use_cache=False).logits
        return logits

    def _probe(self) -> Layout:
        probe, cache = Probe(self.name, self.model.config), ProbeCache(self.name, self.device)
        self._route.probe, self._route.store = probe, cache
        try:
            return probe.run(self._run, cache)
        finally:
            self._route.probe = self._route.store = None

    def _groups(self) -> list[Group]:
        sequence = SequenceState([0, 0, 0])

        def one_pass() -> None:
            self.open(sequence)
            self.close(sequence)

        with self._attending(self._route.name):  # nobody else's pass
            return groups_of(self.model, one_pass)

    # For a draft model: text that is followed, and trees that grow level by level

    def follow(self, sequence: SequenceState, tokens: Sequence[int], tell: int = 0) -> Tensor:
        """Write keys and values of further tokens; (at most `tell`, vocabulary): what follows the last of them."""
        recorded = self._graphs is not None and self._graphs.captures and len(tokens) <= LAUNCHED
        recorded &= self.max_nodes >= WIDE
        write = self._write_recorded if recorded else self._write_launched
        size = self.max_nodes if recorded else self.prefill_chunk
        told, left = [], len(tokens)
        for first in range(0, len(tokens), size):
            chunk = tokens[first : first + size]
            left -= len(chunk)
            told.append(write(sequence, chunk, min(max(tell - left, 0), len(chunk))))
            self.store.advance(sequence, len(chunk))
        return torch.cat(told) if told else torch.zeros(0, self.vocabulary, device=self.device)

    def _write_launched(self, sequence: SequenceState, tokens: Sequence[int], tell: int) -> Tensor:
        steps = torch.arange(len(tokens), device=self.device)[None]
        current = self.store.begin([sequence], steps, None)
        ids = torch.tensor(tokens, device=self.device)[None]
        with without_plans(self.device):
            # The head over a whole prompt is not cheap.
            logits = self._run(ids, current.lengths[:, None] + steps, self.store, keep=max(tell, 1))[0]
        return logits[len(logits) - tell :]

    def _write_recorded(self, sequence: SequenceState, tokens: Sequence[int], tell: int) -> Tensor:
        """A chain in the pass of the largest trees: less is launched, and nothing anew for another length."""
        layout = lay_out((chain_topology(len(tokens)),), self.max_nodes)
        padded = np.zeros((1, self.max_nodes), dtype=np.int64)
        padded[0, : len(tokens)] = tokens
        _, found = self._replay([sequence], padded, layout.depths, layout.seen, layout=layout)
        return found.logits[0, len(tokens) - tell : len(tokens)].clone()  # the next chunk overwrites it

    def sprout(
        self,
        sequences: Sequence[SequenceState],
        tokens: NDArray[np.int64],
        depths: NDArray[np.int64],
        ancestors: NDArray[np.bool_],
        written: PartialTree | None = None,
    ) -> Tensor:
        """(batch, nodes, vocabulary): what follows new nodes of trees whose other nodes were scored before.

        `tokens` and `depths` (batch, nodes) are those of the new nodes; depth 0 stands right behind the committed
        tokens. `ancestors` (batch, nodes, columns) marks for each the rows of its tree that it sees, its own included.
        """
        if self._graphs is not None:
            return self._replay(sequences, tokens, depths, pack_array(ancestors), written)[1].logits
        places = torch.from_numpy(depths).to(self.device)
        current = self.store.begin(sequences, places, torch.from_numpy(ancestors).to(self.device), written)
        return self._run(torch.from_numpy(tokens).to(self.device), current.lengths[:, None] + places, self.store)

    def _replay(
        self,
        sequences: Sequence[SequenceState],
        tokens: NDArray[np.int64] | Tensor,
        depths: NDArray[np.int64],
        seen: NDArray[np.int32],
        written: PartialTree | None = None,
        *,
        roots: Sequence[int] | None = None,
        layout: TreeLayout | None = None,
        behind: Verdicts | None = None,
    ) -> tuple[PassInputs, PassOutputs]:
        """A pass by kernels over nodes (batch, nodes), from its graph where there is one, and what it was told.

        There may be fewer sequences than trees; nothing is kept of the trees behind them. They may stand `behind`
        verdicts that are not committed yet.
        """
        assert self._graphs is not None
        self._begun = None  # graphs share memory, so what it finds is overwritten
        batch, nodes = depths.shape
        before = written.rows if written else [0] * len(sequences)
        size = size_for(batch, nodes, max(before) + nodes)
        steps = 0 if behind is None else behind.paths.shape[1]
        slots, lengths = self.store.seat(sequences, before, steps + nodes, steps + size.nodes)
        recorded = self._graphs.ready(size)
        recorded.inputs.fill(
            slots,
            lengths,
            tokens,
            depths,
            seen,
            written.rows if written else None,
            written.depths if written else None,
            roots=roots,
            layout=layout,
        )
        if behind is not None:
            inputs = recorded.inputs
            told = (places[:batch] for places in (inputs.tokens, inputs.positions, inputs.lengths, inputs.starts))
            self._stepping(*told, behind.paths, behind.tokens)
        logits, best = self._graphs.run(recorded, self._run_inputs)
        return recorded.inputs, PassOutputs(logits[:batch, :nodes], None if best is None else best[:batch, :nodes])

    def _run_inputs(self, inputs: PassInputs) -> PassOutputs:
        # The model is fused only while no other target of it runs.
        with self._attending(self._route.name), self._fusion() if self._fusion is not None else nullcontext():
            self.store.current = inputs
            logits = self._run(inputs.tokens, inputs.positions, self.store)
        return PassOutputs(logits, top_tokens(logits, self._best) if self._best else None)

    def tell_best(self, count: int) -> None:
        """From now on passes on a device also say which tokens are best, at least so many."""
        if self._graphs is not None and count > self._best:
            self._best = min(count, self.vocabulary)
            self._forget()

    def _run(self, tokens: Tensor, positions: Tensor, cache: Any, keep: int = 0) -> Tensor:
        """One forward pass of the model with our attention; `keep` rows of logits from the end, 0 for all."""
        extra = {"logits_to_keep": keep} if "logits_to_keep" in self._forward_parameters else {}
        with torch.inference_mode(), self._attending(self._route.name):
            output = self.model(
                input_ids=tokens, position_ids=positions, past_key_values=cache, use_cache=True, **extra
            )
        logits: Tensor = output.logits
        return logits

    @contextmanager
    def _attending(self, name: str) -> Iterator[None]:
        """Let the model's attention go through a registered implementation for one pass.

        Which one it uses is a property of the model, so targets that share a model take turns.
        """
        with _turns.setdefault(self.model, threading.RLock()):
            found = [config._attn_implementation_internal for config in self._configs]
            for config in self._configs:
                config._attn_implementation_internal = name
            try:
                yield
            finally:
                for config, implementation in zip(self._configs, found, strict=True):
                    config._attn_implementation_internal = implementation

    @contextmanager
    def _tapped(self, taps: Sequence[str], hidden: dict[str, Tensor]) -> Iterator[None]:
        """Catch the output of named layers during one pass."""

        def catch(name: str) -> Callable[..., None]:
            def hook(module: nn.Module, inputs: Any, output: Any) -> None:
                hidden[name] = output[0] if isinstance(output, tuple) else output

            return hook

        layers = {name: self._layer(name) for name in taps}
        handles = [layer.register_forward_hook(catch(name)) for name, layer in layers.items()]
        try:
            yield
        finally:
            for handle in handles:
                handle.remove()

    def _layer(self, name: str) -> nn.Module:
        modules: dict[str, nn.Module] = dict(self.model.named_modules())
        if name not in modules:
            raise UsageError(f"{self.name} has no layer {name!r} to tap.{nearest(name, modules)}")
        return modules[name]

    def _fit(self, context: int, bytes_per_token: int, *, asked: bool) -> int:
        """Shorten the context to what the device can hold, or say with numbers why it cannot."""
        free = _free_memory(self.device)
        room = int(free * 0.8) // bytes_per_token - self.max_nodes
        if context <= room:
            return context
        if asked or room < 512:
            raise ModelError(
                f"Keys and values of {context} tokens need {context * bytes_per_token / 2**30:.1f} GiB and "
                f"{free / 2**30:.1f} GiB are free; ask for a context of at most {max(room, 0)} or for fewer slots."
            )
        return room


def without_plans(device: torch.device) -> AbstractContextManager[None]:
    """Attention without cuDNN, which makes a new plan, for longer than the pass takes, for every length of a prompt."""
    if device.type != "cuda":
        return nullcontext()
    ways = [SDPBackend.FLASH_ATTENTION, SDPBackend.EFFICIENT_ATTENTION, SDPBackend.MATH]
    return sdpa_kernel(ways)


def _free_memory(device: torch.device) -> int:
    """Bytes that a store may think of; on the CPU half the machine, since rows cost nothing until they are used."""
    if device.type == "cuda":
        free, _ = torch.cuda.mem_get_info(device)
        return free
    try:
        return os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES") // 2
    except (AttributeError, ValueError, OSError):  # not every system tells
        return 1 << 34
