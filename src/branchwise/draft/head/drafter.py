"""Drafting with a trained head: `head:FILE[,table=N,trim=N,temperature=…,copies=N]`, or a folder of `speculators`.

After a step the head reads the hidden states of the tokens that were kept, in one pass for all texts, which gives the
distributions after the new roots. Then every level of a tree is one pass over its new nodes; a parallel head has
predicted all levels in the first pass already.

A head may also attend to keys and values that the target has cached: a row of a text attends to those of the tokens up
to its own, as in training, and a drafted row to those of all committed tokens.
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from functools import partial
from pathlib import Path

import numpy as np
import torch
from torch import Tensor

from branchwise.backends.base import Needs, Prefill, Scored, TargetInfo
from branchwise.backends.quantized import Installed, install_products
from branchwise.core.sampling import SamplingParams
from branchwise.core.sequence import SequenceState
from branchwise.core.tree import DraftTree
from branchwise.draft.base import NOTHING, Budget
from branchwise.draft.builder import NodeProbs, TreePolicy
from branchwise.draft.head.cache import MOST_EXTRA, look_at, seen_in
from branchwise.draft.head.file import TrainedHead, own_or_shared
from branchwise.draft.head.following import Following, Unread, along, draft_params, packed, stacked
from branchwise.draft.head.host import FEW, HostHead
from branchwise.draft.head.network import Look
from branchwise.draft.head.prompt import read_unread, reads_at_once
from branchwise.draft.head.sharing import SharingDrafter
from branchwise.draft.head.speculators import read_head
from branchwise.draft.head.trees.ahead import ahead_of
from branchwise.draft.head.trees.catching_up import CatchingUp
from branchwise.draft.head.trees.device import HeadParts
from branchwise.draft.head.usual import DEVICE, Usual, check_options, usual_on
from branchwise.draft.model.reading import BatchReading, Reading, Readings
from branchwise.draft.model.vocabulary import Vocabulary
from branchwise.draft.policies.topk import TopK
from branchwise.draft.tree_drafter import ExpandRequest
from branchwise.errors import ModelError, UsageError
from branchwise.verify import Verdict, Verdicts

CHUNK = 512
"""most rows of a prompt that one pass writes"""
MOST_UNREAD = 128
"""number of unread rows of a text from which on they are read even while other drafters draft"""


class HeadDrafter(SharingDrafter):
    name = "head"

    def __init__(
        self,
        file: str | TrainedHead,
        table: int | None = None,
        temperature: float | None = None,
        tree: TreePolicy | None = None,
        copies: int | None = None,
        trim: int | None = None,
    ) -> None:
        """`table` keeps the N most frequent tokens of the head's table; `trim` keeps those among the N that the target
        writes most, as counted by `branchwise calibrate vocab`. `temperature` warps the draft's distributions, by
        default as the text's own (1 if greedy). Up to `copies` tokens of a `topk` tree continue an earlier occurrence
        of the end of the text. Without a `tree`, tree, table and copies are by default what pays on the device."""
        super().__init__(tree or self.default_tree())
        check_options(table, trim, temperature, copies)
        self._tree_given, self._copies = tree is not None, copies
        self.trained = file if isinstance(file, TrainedHead) else read_head(Path(file).expanduser())
        if table is not None and not self.trained.ranked:
            raise UsageError(f"The tokens of {file} are not in the order of frequency; leave out table={table}.")
        self._taps = self.trained.head.config.taps
        self.wanted, self.trim, self.temperature = table, trim, temperature
        self._ahead: CatchingUp | None = None
        """drafts without the host's loop over levels; None if the policy does not allow it"""
        self._rests = False  # whether nothing is drafted in this step
        self._kept: list[Tensor] = []
        """for each tap the states along accepted paths (texts, steps, width), if the next pass may overwrite them"""

    @staticmethod
    def default_tree() -> TreePolicy:
        return DEVICE.tree

    @property
    def needs(self) -> Needs:
        cross = self.trained.head.config.cross
        return Needs(hidden_layers=self._taps, pad_shape=super().needs.pad_shape, cached_layer=cross or None)

    def bind(self, target: TargetInfo) -> None:
        super().bind(target)
        self.trained.check(target)
        if target.embeddings is None:
            raise ModelError(f"{target.name} shows no embeddings, and a head reads them.")
        usual = usual_on(target.device)
        self._taps = self.trained.taps(target)
        self._embeddings = own_or_shared(self.trained.embeddings, target.embeddings[0])
        installed = self._copy_network(target)
        table, copies = self._choose_defaults(usual)
        self._table, self._rows, self._output, self._listed = self.trained.proposed(target, table, self.trim)
        self._product = installed.product_of(self._rows)
        self._vocabulary = Vocabulary.shared(target.vocabulary, target.vocabulary).to(target.device)
        self._open_cache(self.head.config, target)
        self._chunk = self._cache.spare if self._window else CHUNK
        self._host = HostHead.of(self.head, self._cache)
        self._readings = Readings(self._reading)
        if target.weight_bytes is not None:
            weights = sum(weight.nbytes for weight in self.head.parameters()) + self._rows.nbytes
            self.cost = installed.bytes * weights / target.weight_bytes
        self._ahead, self.paces = None, False
        if not self.head.config.cross or target.cached_layer is not None:  # else the target hides where its cache lies
            self._ahead = self._on_device(target, usual, copies, installed)

    def _copy_network(self, target: TargetInfo) -> Installed:
        """Copy the network, because other targets may share the weights of the file. Frequencies are never rounded:
        positions grow, and keys of the target would not fit queries of the head."""
        self.head = copy.deepcopy(self.trained.head).to(target.device, target.dtype)
        self.head.frequencies = self.trained.head.frequencies.float().to(target.device)
        return install_products(self.head, target.quantised)

    def _choose_defaults(self, usual: Usual) -> tuple[int | None, int]:
        """The size of the table and the number of copies. Options that the user left out get the values that pay on the
        device; so does the tree, which is set here."""
        table, copies = self.wanted, self._copies
        if not self._tree_given:
            self.tree, copies = usual.tree, usual.copies if copies is None else copies
            table = usual.table if table is self.trim is None and self.trained.ranked else table
        return table, copies or 0

    def _on_device(self, target: TargetInfo, usual: Usual, copies: int, installed: Installed) -> CatchingUp | None:
        """Drafting without the host's loop over levels, if the tree allows it; sets `paces`."""
        config, product_of, on_host = self.head.config, installed.product_of, target.device.type == "cpu"
        cached = partial(target.cached_layer, config.cross) if config.cross and target.cached_layer else None
        parts = HeadParts(
            self.head, self._cache, self._embeddings, self._output, self._table, self._rows, cached, product_of
        )
        laid = type(self.tree) is TopK and not self.tree.gain
        self.paces = laid and not self._tree_given and (reads_at_once(config) or not on_host)
        copies = 0 if config.window else copies  # tokens of a text are not kept in a window
        smaller = () if self._tree_given else usual.smaller
        pace = (self.cost or 0.0) if self.paces and on_host else None
        return ahead_of(self.tree, target, self._batch_reading, parts, copies, smaller, pace)

    @torch.inference_mode()
    def start(self, sequence: SequenceState, prefill: Prefill) -> None:
        text = self._texts.get(sequence)
        if text is None:  # nothing was inherited
            self._cache.open(sequence, self.unseen(sequence))
        new = len(sequence.tokens) - 1 - self._cache.lengths[sequence] - (len(text.unread) if text else 0)
        hidden = [part[max(0, len(part) - new) :] for part in map(prefill.hidden.__getitem__, self._taps)]
        if text is None:
            text = self._texts[sequence] = Following(Unread.of_prompt(hidden, new, self._table.device))
        else:
            text.unread.add(stacked(hidden, new, self._table.device), 0, new)
        prompt = np.array(sequence.tokens)
        text.extra = [*dict.fromkeys(prompt[~self._listed[prompt]][::-1].tolist())][:MOST_EXTRA]  # the last ones first

    def _propose(self, sequences: Sequence[SequenceState]) -> None:
        """Put the tokens of new prompts that are not in the table into the cache, so that they can be proposed."""
        if new := {sequence: text for sequence in sequences if not (text := self._texts[sequence]).proposed}:
            extra = {sequence: text.propose() for sequence, text in new.items()}
            self._cache.propose(extra, self._output, self.head.output_norm.weight, foresees=self.foresees)

    def _read_prompts(self, sequences: Sequence[SequenceState]) -> None:
        """Read the prompts that are wholly unread, if the head can read a prompt in one pass."""
        texts, fits = self._texts, reads_at_once(self.head.config)
        fresh = [one for one in sequences if fits and not self._cache.lengths[one] and len(texts[one].unread)]
        read_unread(self.head, self._cache, self._embeddings, {one: texts[one].unread for one in fresh}, self._features)

    def draft(self, sequences: Sequence[SequenceState], budgets: Sequence[Budget]) -> list[DraftTree]:
        self._rests, self._kept = False, []
        known = [self.knows(sequence) for sequence in sequences]
        ahead = self._ahead if self.kept_probs is None else None  # distributions are kept on the host only
        if ahead is None or ahead.draws or self._table.device.type == "cpu":
            # With missing states a fixed tree on a device is poor but free; sampled and host trees are skipped.
            budgets = [budget if knows else NOTHING for knows, budget in zip(known, budgets, strict=True)]
        trees = None if ahead is None else self._draft_ahead(ahead, sequences, budgets, any(known))
        if trees is None:
            if self._ahead is not None:
                self._ahead.leave()
            return super().draft(sequences, budgets)
        self._drafted = trees
        return trees

    @torch.inference_mode()
    def _draft_ahead(
        self, ahead: CatchingUp, sequences: Sequence[SequenceState], budgets: Sequence[Budget], known: bool
    ) -> list[DraftTree] | None:
        """The next trees; `known`: states of at least one text are complete. None if the host must grow the trees."""
        if ahead.rests(len(sequences)):
            return self.rest(sequences)
        self._propose(sequences)
        waiting = {sequence: self._texts[sequence].unread for sequence in sequences}
        if ahead.stands_aside(sequences) or not known:
            Unread.settle([*waiting.values()])
            return ahead.rest(sequences, read=not any(map(len, waiting.values())))
        self._read_prompts(ahead.read(waiting))
        ahead.begin()
        if behind := [sequence for sequence, unread in waiting.items() if len(unread)]:
            self._roots(behind)
        return ahead.draft(sequences, budgets)

    def rest(self, sequences: Sequence[SequenceState]) -> list[DraftTree]:
        """Bare roots. States that are not read now are read together later."""
        for sequence in sequences:
            self.knows(sequence)  # also forgets states of an interrupted step
        self._rests, self._kept = True, []
        self._drafted = super().rest(sequences) if self._ahead is None else self._ahead.rest(sequences)
        return self._drafted

    @torch.inference_mode()
    def draft_next(self, budgets: Sequence[Budget]) -> list[DraftTree] | None:
        return None if self._ahead is None else self._ahead.draft_next(budgets)

    @torch.inference_mode()
    def update_on_device(self, scored: Scored, verdicts: Verdicts) -> None:
        if self._rests:
            self.follow_on_device(scored, verdicts)
        elif self._ahead is not None:
            self._ahead.update(scored, verdicts, [scored.hidden[tap] for tap in self._taps])

    def forget(self) -> None:
        super().forget()
        if self._ahead is not None:
            self._ahead.forget()

    def reasons(self, batch: int) -> list[str]:
        return [] if self._ahead is None else self._ahead.reasons(batch)

    @torch.inference_mode()
    def update(self, sequences: Sequence[SequenceState], scored: Scored, verdicts: Sequence[Verdict]) -> None:
        super().update(sequences, scored, verdicts)
        if self._ahead is not None and self._ahead.follow(sequences, verdicts):
            return
        self._keep(sequences, scored, verdicts)

    @torch.inference_mode()
    def follow_on_device(self, scored: Scored, verdicts: Verdicts) -> None:
        paths = verdicts.paths[:, : scored.logits.shape[1]]  # a recorded verdict has columns for longer ones
        self._kept = [along(paths, scored.hidden[tap]) for tap in self._taps]

    @torch.inference_mode()
    def follow(self, sequences: Sequence[SequenceState], scored: Scored, verdicts: Sequence[Verdict]) -> None:
        """Keep the new states. Texts with many unread states are read first: that is worth a pass, and frees memory."""
        if self._ahead is not None:
            self._ahead.leave()
        known = [sequence for sequence in sequences if self.knows(sequence)]
        if behind := [sequence for sequence in known if len(self._texts[sequence].unread) >= MOST_UNREAD]:
            self._roots(behind)
        self._keep(sequences, scored, verdicts)

    def _keep(self, sequences: Sequence[SequenceState], scored: Scored, verdicts: Sequence[Verdict]) -> None:
        """Keep the states of accepted tokens until they are read."""
        paths = [range(len(verdict.path)) if self._kept else verdict.path for verdict in verdicts]
        hidden = self._kept or [scored.hidden[tap] for tap in self._taps]
        states, end = packed(hidden, paths, self._table.device), 0
        self._kept = []
        for sequence, verdict in zip(sequences, verdicts, strict=True):
            start, end = end, end + len(verdict.path)
            text = self._texts[sequence]
            if text.misses_nothing(sequence, self._cache.lengths):
                text.unread.add(states, start, end)

    def _features(self, hidden: Sequence[Tensor], rows: int) -> Tensor:
        """(rows, width): the features of hidden states; (rows, 0) for a head that reads no hidden states."""
        features = self.head.features([state.to(self.head.dtype) for state in hidden])
        return self._rows.new_zeros(rows, 0) if features is None else features

    @torch.inference_mode()
    def look(self, requests: Sequence[ExpandRequest]) -> list[NodeProbs]:
        roots = [request.nodes == [0] for request in requests]
        assert all(roots) or not any(roots), "trees of one batch grow level by level together"
        if roots[0]:
            predicted = self._roots([request.sequence for request in requests])
        elif self.head.config.masks:
            foreseen = [self._cache.foreseen[self._cache.slot[request.sequence]] for request in requests]
            depths = [[request.tree.depths[node] for node in request.nodes] for request in requests]
            predicted = [rows[[min(n, len(rows)) - 1 for n in at]] for rows, at in zip(foreseen, depths, strict=True)]
        else:
            predicted = self._level(requests)
        return [NodeProbs(self._probs(request, rows)) for request, rows in zip(requests, predicted, strict=True)]

    # Passes

    def _roots(self, sequences: Sequence[SequenceState]) -> list[Tensor]:
        """Read all unread rows of the texts; returns what is predicted after their roots, (1, width) each."""
        self.passes += 1
        self._propose(sequences)
        self._read_prompts(sequences)
        while behind := [sequence for sequence in sequences if len(self._texts[sequence].unread) > self._chunk]:
            self._catch_up(behind)
        if behind := [sequence for sequence in sequences if len(self._texts[sequence].unread)]:
            self._catch_up(behind)  # after an interrupted step a text has nothing unread
        found = []
        for sequence in sequences:
            text, slot = self._texts[sequence], self._cache.slot[sequence]
            text.root = self._cache.lengths[sequence] - 1
            text.carried, text.cells = {0: self._cache.carried[slot]}, {}
            found.append(self._cache.predicted[slot, None])
        return found

    def _catch_up(self, sequences: Sequence[SequenceState]) -> None:
        """One pass over the next unread rows of these texts."""
        self._cache.let_go(sequences)
        texts, lengths, device = [self._texts[one] for one in sequences], self._cache.lengths, self._table.device
        counts = [min(self._chunk, len(text.unread)) for text in texts]
        taken = [self._features(text.unread.by_tap(n), n) for text, n in zip(texts, counts, strict=True)]
        masks = self.head.config.masks * all(n == len(text.unread) for text, n in zip(texts, counts, strict=True))
        first = torch.tensor([self._cache.first[sequence] for sequence in sequences])[:, None]
        rows = max(counts) + masks
        features = taken[0].new_zeros(len(sequences), rows, taken[0].shape[1])
        embeddings = features.new_zeros(len(sequences), rows, self.head.config.width)
        places, anchors = torch.full((2, len(sequences), rows), -1)  # -1 for padding
        for row, (sequence, part, count) in enumerate(zip(sequences, taken, counts, strict=True)):
            start = lengths[sequence]
            after = torch.tensor(sequence.tokens[start + 1 : start + count + 1]).to(device, non_blocking=True)
            assert len(after) == count, "a head must know the token after every state that it reads"
            features[row, :count], embeddings[row, :count] = part, self._embeddings[after]
            if masks:
                features[row, count : count + masks] = self.head.mask_feature
                embeddings[row, count : count + masks] = self.head.mask_embeddings
            places[row, : count + masks] = torch.arange(start, start + count + masks)
            anchors[row, : count + masks] = places[row, : count + masks].clamp_max(start + count - 1)
        if self._host is not None and rows <= FEW:
            predict, carry = self._host.follow(sequences, features, embeddings)
        else:
            cells = torch.where(places < 0, -1, places - first)
            attend = self._cache.attend(sequences, cells, seen_in(self._window, cells))
            positions, look = places.clamp_min(0).to(device, non_blocking=True), self._look(sequences, anchors)
            predict, carry = self.head(features, embeddings, positions, attend, look)
        for row, (sequence, text, count) in enumerate(zip(sequences, texts, counts, strict=True)):
            if not self._window:
                self._cache.note(sequence, count)
            lengths[sequence] += count
            text.unread.drop(count)
            slot = self._cache.slot[sequence]
            if masks:
                self._cache.foreseen[slot] = predict[row, count : count + masks]
            self._cache.predicted[slot], self._cache.carried[slot] = predict[row, count - 1], carry[row, count - 1]

    def _level(self, requests: Sequence[ExpandRequest]) -> list[Tensor]:
        """One pass over nodes below the root; returns what is predicted after each, (nodes, width) for each text."""
        self.passes += 1
        sequences = [request.sequence for request in requests]
        texts = [self._texts[sequence] for sequence in sequences]
        rows = max(len(request.nodes) for request in requests)
        ends = [text.root + 1 - self._cache.first[s] for text, s in zip(texts, sequences, strict=True)]
        keys = max(end + len(t.cells) + len(r.nodes) for end, t, r in zip(ends, texts, requests, strict=True))
        cells, positions = torch.full((len(requests), rows), -1), torch.zeros(len(requests), rows, dtype=torch.long)
        tokens, seen = torch.zeros_like(positions), torch.zeros(len(requests), rows, keys, dtype=torch.bool)
        features = self._rows.new_zeros(len(requests), rows, self.head.config.width)
        for row, (request, text, end) in enumerate(zip(requests, texts, ends, strict=True)):
            tree = request.tree
            for place, node in enumerate(request.nodes):
                cell = text.cells.setdefault(node, end + len(text.cells))
                cells[row, place], tokens[row, place] = cell, tree.tokens[node]
                positions[row, place] = text.root + tree.depths[node]
                seen[row, place, max(0, end + tree.depths[node] - self._window) if self._window else 0 : end] = True
                branch = [text.cells[above] for above in tree.branch(node)]
                seen[row, place, branch[: self._window or None]] = True
            features[row, : len(request.nodes)] = torch.stack([text.carried[tree.parents[n]] for n in request.nodes])
        device = features.device
        attend = self._cache.attend(sequences, cells, seen)
        look = self._look(sequences, torch.tensor([[text.root] for text in texts]))
        predict, carry = self.head(features, self._embeddings[tokens.to(device)], positions.to(device), attend, look)
        for row, (request, text) in enumerate(zip(requests, texts, strict=True)):
            text.carried |= {node: carry[row, place] for place, node in enumerate(request.nodes)}
        return [predict[row, : len(request.nodes)] for row, request in enumerate(requests)]

    def _look(self, sequences: Sequence[SequenceState], anchors: Tensor) -> Look | None:
        """Attention to the target's keys and values of the tokens up to `anchors`, which are those of `look_at`."""
        if not self.head.config.cross:
            return None
        assert self.target is not None
        assert self.target.cached is not None
        return look_at(*self.target.cached(self.head.config.cross, sequences), anchors)

    # Distributions

    def _probs(self, request: ExpandRequest, predict: Tensor) -> Tensor:
        """(nodes, vocabulary): distributions over the table and the tokens of the prompt."""
        tokens = torch.tensor([request.tree.tokens[node] for node in request.nodes], device=self._rows.device)
        previous = self._embeddings[tokens] if self.head.config.bias else None
        logits = predict.new_full((len(predict), self._vocabulary.size), -torch.inf)
        logits[:, self._table] = self._product(self.head.output(predict, previous), None)
        if count := len(self._texts[request.sequence].extra):
            extra = self._cache.extra_tokens[self._cache.slot[request.sequence], :count]
            logits[:, extra] = self.head.logits(predict, self._output[extra], previous)
        return self._readings.of(request.sequence.sampling)(logits)

    def _batch_reading(self, sampling: list[SamplingParams]) -> BatchReading:
        own = [draft_params(params, self.temperature) for params in sampling]
        return BatchReading(own, self._vocabulary, trimmed=False)

    def _reading(self, sampling: SamplingParams) -> Reading:
        return Reading(draft_params(sampling, self.temperature), self._vocabulary, trimmed=False)
