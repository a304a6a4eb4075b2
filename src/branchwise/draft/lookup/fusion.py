"""Several lookup drafters as one: their trees merged under one budget, each weighed by its record.

RASD (Quan et al., arXiv 2503.03434) attaches what was retrieved to the tree of a draft model where the two agree. Here
this holds for all members: a node has a cursor in every member that expected its path, so equal prefixes are one node,
and every member that knows a continuation of the node contributes. One heap over all candidates shares out the budget
by calibrated probability: how often candidates of that member and that mass came true so far. A draft model or a
trained head drafts first; the distributions of a model prune what the others retrieved at the nodes that it expanded.
"""

from __future__ import annotations

import re
from bisect import bisect
from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
from torch import Tensor

from branchwise.backends.base import Needs, Prefill, Scored, TargetInfo
from branchwise.core.sequence import SequenceState
from branchwise.core.tree import DraftTree
from branchwise.draft import DRAFTERS
from branchwise.draft.base import Budget, LearningDrafter, not_a_state, reusable_by_all
from branchwise.draft.builder import Candidate, Cursor, TreePolicy, new
from branchwise.draft.lookup.base import LookupDrafter
from branchwise.draft.lookup.drafted import JUDGES, DraftedMember
from branchwise.draft.policies.adaptive import AdaptiveSize
from branchwise.draft.policies.topk import TopK
from branchwise.errors import UsageError
from branchwise.registry import split_spec
from branchwise.verify import Verdict

EDGES = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.97)
"""edges of the bins of masses; candidates of one bin are calibrated together"""
PRIOR = 6.0
"""the weight, in tries, of a member's own mass before it has a record"""
DOUBTED = 0.2
"""the share of its mass that a memory's candidate has before the memory has a record, if a draft model or a head has
proposed candidates at this node and no other member agrees"""
FADING = 0.995
"""the factor by which counts shrink from one step to the next"""
IMPROBABLE = 0.01
"""a token with less probability in the draft model is not worth a node, whichever member retrieved it"""


class Calibration:
    """How often the candidates of a member came true, by their mass and by whether another member agreed."""

    def __init__(self) -> None:
        cells = 2 * (len(EDGES) + 1)
        self.tries, self.hits = [0.0] * cells, [0.0] * cells

    def apply(
        self,
        name: str,
        found: Sequence[Candidate],
        agreed: set[int],
        masses: dict[int, float],
        sources: dict[int, str],
        trust: float = 1.0,
    ) -> None:
        """Enter the calibrated masses of a member's candidates; `agreed` are the tokens that several members propose.
        For each token the highest mass of all members stays, with the name of the member. `trust` is the share of its
        own mass that a candidate has before the member has a record, if no other member agrees."""
        tries, hits, known = self.tries, self.hits, masses.get
        for token, mass, _, _ in found:
            agrees = token in agreed
            cell = 2 * bisect(EDGES, mass) + agrees
            prior = PRIOR * (mass if agrees else trust * mass)
            calibrated = (prior + hits[cell]) / (PRIOR + tries[cell])
            if calibrated > known(token, 0.0):
                masses[token], sources[token] = calibrated, name

    def count(self, mass: float, agreed: bool, came: bool) -> None:
        cell = 2 * bisect(EDGES, mass) + agreed
        self.tries[cell] += 1
        self.hits[cell] += came

    def fade(self) -> None:
        self.tries = [FADING * count for count in self.tries]
        self.hits = [FADING * count for count in self.hits]


@dataclass(eq=False, slots=True)
class FusedCursor:
    """The cursors of all members at one node, and their candidates once they were looked up."""

    cursors: Sequence[Cursor]
    candidates: list[Sequence[Candidate]] | None = None


class FusedCandidates(Sequence[Candidate]):
    """The candidates of a fused cursor, best first. Each is made when it is read: few of many join a tree."""

    __slots__ = ("here", "masses", "sources", "tokens", "total")

    def __init__(self, here: FusedCursor, masses: dict[int, float], sources: dict[int, str]) -> None:
        self.here, self.masses, self.sources = here, masses, sources
        self.total = max(1.0, sum(masses.values()))
        self.tokens = sorted(masses, key=masses.__getitem__, reverse=True)  # stable: equals in the order found

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, rank: int) -> Candidate:  # type: ignore[override]
        token = self.tokens[rank]
        return new(Candidate, (token, self.masses[token] / self.total, (self.here, token), self.sources[token]))


class Fusion(LookupDrafter, LearningDrafter):
    """`fused:a+b[+c][,prune=0.01,nodes=24,depth=6,width=8]`: lookup drafters, with their options in parentheses, as in
    `recycle+suffix(keep=9999)`. The other options are for a draft model or a head among the members.

    A token that several members propose counts for the member with the highest mass, of equals for the first. A cursor
    is a `FusedCursor`, or a pair of a `FusedCursor` and a token after it, whose cursors are computed when it is read:
    most nodes of a heap are never reached.
    """

    name = "fused"
    members: list[LookupDrafter]

    def __init__(
        self,
        members: str,
        tree: TreePolicy | None = None,
        prune: float = IMPROBABLE,
        nodes: int = 24,
        depth: int = 6,
        width: int = 8,
    ) -> None:
        """Tokens that a draft model finds less probable than `prune` are left out, whichever member proposed them; 0
        prunes nothing. `nodes`, `depth` and `width` shape the tree of the draft model or head itself; deeper nodes come
        from lookup drafters."""
        super().__init__(tree or AdaptiveSize())
        if not 0 <= prune < 1:
            raise UsageError(f"A fusion prunes what is less probable than 0 to 1, not prune={prune}.")
        self.prune = prune
        drafted = TopK(nodes, depth=depth, width=width)
        self.members = [_member(spec, drafted) for spec in split_members(members)]
        names = [member.name for member in self.members]
        if len(set(names)) < len(names):
            raise UsageError(f"A fusion has each of its drafters once, not {members!r}.")
        drafting = [member for member in self.members if isinstance(member, DraftedMember)]
        if len(drafting) > 1:
            raise UsageError(f"A fusion has one drafter that computes, not {members!r}.")
        self.drafting = drafting[0] if drafting else None
        self.records = [Calibration() for _ in self.members]

    @property
    def needs(self) -> Needs:
        return replace(Needs.joined(member.needs for member in self.members), pad_shape=super().needs.pad_shape)

    def bind(self, target: TargetInfo) -> None:
        super().bind(target)
        for member in self.members:
            member.bind(target)
        if self.drafting is not None:
            self.cost = self.drafting.cost

    def start(self, sequence: SequenceState, prefill: Prefill) -> None:
        for member in self.members:
            member.start(sequence, prefill.part_for(member.needs))

    def finish(self, sequence: SequenceState) -> None:
        super().finish(sequence)
        for member in self.members:
            member.finish(sequence)

    def reusable(self, source: SequenceState, sequence: SequenceState, rows: int) -> int:
        return reusable_by_all(self.members, source, sequence, rows)

    def inherit(self, source: SequenceState, sequence: SequenceState, rows: int, *, moved: bool) -> None:
        for member in self.members:
            member.inherit(source, sequence, rows, moved=moved)

    def retire(self, sequence: SequenceState) -> None:
        super().finish(sequence)
        for member in self.members:
            member.retire(sequence)

    def drop(self, sequence: SequenceState) -> None:
        for member in self.members:
            member.drop(sequence)

    def forget(self) -> None:
        super().forget()
        for place, member in enumerate(self.members):
            member.forget()
            if member is self.drafting:
                self.records[place] = Calibration()

    def save(self) -> dict[str, Tensor]:
        """The calibration of each memory. What the memories have learned they save themselves."""
        return {name: torch.tensor([record.tries, record.hits]) for name, record in self._saved().items()}

    def _saved(self) -> dict[str, Calibration]:
        named = zip(self.members, self.records, strict=True)
        return {member.name: record for member, record in named if member is not self.drafting}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        own = self.save()
        if tensors.keys() != own.keys() or any(tensors[name].shape != own[name].shape for name in own):
            raise not_a_state(self.name, "it should hold the records of these drafters")
        for name, record in self._saved().items():
            tries, hits = tensors[name]
            if not bool(((hits >= 0) & (hits <= tries) & tries.isfinite()).all()):
                raise not_a_state(self.name, "its records are no counts")
            record.tries, record.hits = tries.tolist(), hits.tolist()

    def draft(self, sequences: Sequence[SequenceState], budgets: Sequence[Budget]) -> list[DraftTree]:
        if self.drafting is not None:
            self.drafting.draft_ahead(sequences, budgets)
            self.passes = self.drafting.passes
        return super().draft(sequences, budgets)

    def locate(self, sequence: SequenceState) -> Cursor:
        return FusedCursor([member.locate(sequence) for member in self.members])

    def candidates(self, cursor: Cursor) -> Sequence[Candidate]:
        """The proposed tokens, each with the highest of its calibrated masses."""
        if cursor is None:
            return ()
        here = self._resolve(cursor)
        proposed = self._pruned(here)
        agreed = _agreed(proposed)
        masses: dict[int, float] = {}
        sources: dict[int, str] = {}
        drafted = self.drafting is not None and bool(proposed[self.members.index(self.drafting)])
        for member, record, found in zip(self.members, self.records, proposed, strict=True):
            if found:
                trust = DOUBTED if drafted and member is not self.drafting else 1.0
                record.apply(member.name, found, agreed, masses, sources, trust)
        return FusedCandidates(here, masses, sources)

    def advance(self, cursor: Cursor, token: int) -> Cursor:
        return self._resolve(cursor), token

    def learn(self, sequences: Sequence[SequenceState], scored: Scored, verdicts: Sequence[Verdict]) -> None:
        """Count which candidates along the accepted path came true, drafted or not; then the members learn."""
        if self._cursors:
            for record in self.records:
                record.fade()
            for sequence, tree, verdict in zip(sequences, self._drafted, verdicts, strict=True):
                self._count(self._cursors[sequence], tree, verdict)
        for member in self.members:
            member._drafted = self._drafted
            member.update(sequences, scored, verdicts)

    def _count(self, cursor: Cursor, tree: DraftTree, verdict: Verdict) -> None:
        drafted = tree.tokens.tolist()
        for token in [*(drafted[node] for node in verdict.path[1:]), verdict.token]:
            here = self._resolve(cursor)
            proposed = self._proposed(here)
            agreed = _agreed(proposed)
            for record, found in zip(self.records, proposed, strict=True):
                for one in found:
                    record.count(one.mass, one.token in agreed, one.token == token)
            cursor = here, token

    def _resolve(self, cursor: Cursor) -> FusedCursor:
        """The cursors of all members after the token of a pair; a member that did not propose the token must
        `advance`."""
        if isinstance(cursor, FusedCursor):
            return cursor
        above, token = cursor
        cursors: list[Cursor] = []
        for member, before, found in zip(self.members, above.cursors, self._proposed(above), strict=True):
            behind = None
            for one in found:
                if one.token == token:
                    behind = one.cursor
                    break
            cursors.append(member.advance(before, token) if behind is None and before is not None else behind)
        return FusedCursor(cursors)

    def _proposed(self, here: FusedCursor) -> list[Sequence[Candidate]]:
        """The candidates of each member."""
        if here.candidates is None:
            here.candidates = [
                () if cursor is None else member.candidates(cursor)
                for member, cursor in zip(self.members, here.cursors, strict=True)
            ]
        return here.candidates

    def _pruned(self, here: FusedCursor) -> list[Sequence[Candidate]]:
        """The candidates of each member, without tokens that are too improbable in the draft model, if it has expanded
        this node."""
        proposed = self._proposed(here)
        if self.drafting is None or not self.drafting.judges or not self.prune:
            return proposed
        cursor = here.cursors[self.members.index(self.drafting)]
        probs = None if cursor is None else self.drafting.probs(cursor)
        if probs is None:
            return proposed
        tokens = sorted({one.token for found in proposed for one in found})
        likely = {token for token, mass in zip(tokens, probs[tokens].tolist(), strict=True) if mass >= self.prune}
        return [[one for one in found if one.token in likely] for found in proposed]


def _agreed(proposed: list[Sequence[Candidate]]) -> set[int]:
    """Tokens that several members propose. Pruning removes a token for all members at once, so the tokens that stay
    are agreed or not as before."""
    known: set[int] = set()
    agreed: set[int] = set()
    for found in filter(None, proposed):
        tokens = {one.token for one in found}
        agreed |= known & tokens
        known |= tokens
    return agreed


def split_members(text: str) -> list[str]:
    """`recycle+suffix(keep=9,min=2)+retrieval(DIR)` as specs; options in parentheses become those of a spec."""
    parts = re.findall(r"([\w-]+)(?:\(([^()]*)\))?(?:\+|$)", text)
    written = "+".join(f"{name}({inside})" if inside else name for name, inside in parts)
    if not parts or written != text.replace("()", ""):
        raise UsageError(f"A fusion names memories with a + between them, as in fused:recycle+suffix, not {text!r}.")
    return [f"{name}:{inside}" if inside else name for name, inside in parts]


def _member(spec: str, drafted: TreePolicy) -> LookupDrafter:
    """The member of a spec; `drafted` is the tree policy of a draft model or head."""
    if split_spec(spec)[0] in JUDGES:
        return DraftedMember(DRAFTERS.build(spec, tree=drafted))
    member = DRAFTERS.build(spec)
    if not isinstance(member, LookupDrafter):
        raise UsageError(f"Drafter {member.name!r} remembers nothing that could be fused.")
    if isinstance(member, Fusion):
        raise UsageError("A fusion is not fused again; name its drafters with a + between them.")
    return member
