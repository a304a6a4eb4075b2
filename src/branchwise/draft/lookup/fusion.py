"""Several memories as one: their trees merged under one budget, and each trusted as far as it has earned.

RASD (Quan et al., arXiv 2503.03434) attaches what was retrieved to the tree of a draft model where the two agree. Here
that is the rule for all: a node has a place in every memory that expected its path, so equal prefixes are one node, and
whoever knows how to go on from there does. One heap over all of them shares the budget out by what each is believed
to earn, which is what its words came to so far.

With a draft model, the model drafts first, and its distribution prunes what the others retrieved at the nodes it looked
at; then one heap shares the budget.
"""

from __future__ import annotations

import re
from bisect import bisect
from collections.abc import Container, Sequence

import torch
from torch import Tensor

from branchwise.backends.base import Scored, Target
from branchwise.core.sequence import SequenceState
from branchwise.core.tree import DraftTree
from branchwise.draft import DRAFTERS
from branchwise.draft.base import Budget
from branchwise.draft.builder import TreePolicy
from branchwise.draft.lookup.base import Candidate, Cursor, LookupDrafter, new
from branchwise.draft.model.member import DraftModelMember
from branchwise.draft.policies.adaptive_size import AdaptiveSize
from branchwise.errors import UsageError
from branchwise.registry import split_spec
from branchwise.verify import Verdict

EDGES = (0.02, 0.05, 0.1, 0.2, 0.3, 0.4, 0.5, 0.6, 0.7, 0.8, 0.9, 0.97)
"""between them, what a memory says of a token is taken to mean one thing"""
PRIOR = 6.0
"""how many tries a memory's own word counts for, before it has a record"""
FADING = 0.995
"""of what was seen is left a step later"""
IMPROBABLE = 0.01
"""what a draft model gives less to is not worth a node, whoever retrieved it"""


class Record:
    """How often what a memory said came true, by how sure it was and whether another one said the same."""

    def __init__(self) -> None:
        cells = 2 * (len(EDGES) + 1)
        self.tries, self.hits = [0.0] * cells, [0.0] * cells

    def speak(
        self,
        name: str,
        found: Sequence[Candidate],
        agreed: Container[int],
        believed: dict[int, float],
        speakers: dict[int, str],
    ) -> None:
        """Note how probable each token is that the memory names, if others agree on these, and that it says so, where
        nobody is believed as much."""
        tries, hits, heard = self.tries, self.hits, believed.get
        for token, mass, _, _ in found:
            cell = 2 * bisect(EDGES, mass) + (token in agreed)
            belief = (PRIOR * mass + hits[cell]) / (PRIOR + tries[cell])
            if belief > heard(token, 0.0):
                believed[token], speakers[token] = belief, name

    def count(self, mass: float, agreed: bool, came: bool) -> None:
        cell = 2 * bisect(EDGES, mass) + agreed
        self.tries[cell] += 1
        self.hits[cell] += came

    def fade(self) -> None:
        self.tries = [FADING * count for count in self.tries]
        self.hits = [FADING * count for count in self.hits]


class Junction:
    """Where every member stands, and what each says there, once somebody asks."""

    __slots__ = ("places", "said")

    def __init__(self, places: Sequence[Cursor]) -> None:
        self.places = places
        self.said: list[Sequence[Candidate]] | None = None


class Ranking(Sequence[Candidate]):
    """What may come next at a junction, the best first. It is put in words when asked for: few of many join a tree."""

    __slots__ = ("believed", "here", "speakers", "tokens", "total")

    def __init__(self, here: Junction, believed: dict[int, float], speakers: dict[int, str]) -> None:
        self.here, self.believed, self.speakers = here, believed, speakers
        self.total = max(1.0, sum(believed.values()))
        self.tokens = sorted(believed, key=believed.__getitem__, reverse=True)  # of equals that which was found first

    def __len__(self) -> int:
        return len(self.tokens)

    def __getitem__(self, rank: int) -> Candidate:  # type: ignore[override]
        token = self.tokens[rank]
        return new(Candidate, (token, self.believed[token] / self.total, (self.here, token), self.speakers[token]))


class Fusion(LookupDrafter):
    """`fused:a+b[+c]`: drafters that remember, with their options in parentheses, as in `recycle+suffix(keep=9999)`.

    A token that several propose is booked on the one that is believed most, and of equals on the first. A place is a
    junction, or one and a token behind it: most nodes of a heap are never reached.
    """

    name = "fused"

    def __init__(self, members: str, tree: TreePolicy | None = None) -> None:
        super().__init__(tree or AdaptiveSize())
        self.members = [_member(spec) for spec in split_members(members)]
        names = [member.name for member in self.members]
        if len(set(names)) < len(names):
            raise UsageError(f"A fusion has each of its drafters once, not {members!r}.")
        self.model = next((member for member in self.members if isinstance(member, DraftModelMember)), None)
        self.records = [Record() for _ in self.members]
        self.wants_prefill = max(member.wants_prefill for member in self.members)
        self.learns = True  # how far each is to be trusted

    def bind(self, target: Target) -> None:
        super().bind(target)
        for member in self.members:
            member.bind(target)
        if self.model is not None:
            self.cost = self.model.cost

    def begin(self, sequence: SequenceState, logits: Tensor) -> None:
        for member in self.members:
            if member.wants_prefill:
                member.begin(sequence, logits[-member.wants_prefill :])  # type: ignore[attr-defined]

    def close(self, sequence: SequenceState) -> None:
        super().close(sequence)
        for member in self.members:
            member.close(sequence)

    def save(self) -> dict[str, Tensor]:
        """How far each is trusted; what they remember is their own to save."""
        named = zip(self.members, self.records, strict=True)
        return {member.name: torch.tensor([record.tries, record.hits]) for member, record in named}

    def restore(self, tensors: dict[str, Tensor]) -> None:
        def forms(found: dict[str, Tensor]) -> dict[str, object]:
            return {name: (tensor.shape, tensor.dtype) for name, tensor in found.items()}

        if forms(tensors) != forms(self.save()):
            raise UsageError("The state holds no records of these drafters; start a new one.")
        for member, record in zip(self.members, self.records, strict=True):
            tries, hits = tensors[member.name]
            if not bool(((hits >= 0) & (hits <= tries) & tries.isfinite()).all()):
                raise UsageError("The records in the state are no counts; start a new one.")
            record.tries, record.hits = tries.tolist(), hits.tolist()

    def draft(self, sequences: Sequence[SequenceState], budgets: Sequence[Budget]) -> list[DraftTree]:
        if self.model is not None:
            self.model.look_ahead(sequences, budgets)
            self.passes = self.model.passes
        return super().draft(sequences, budgets)

    def find(self, sequence: SequenceState) -> Cursor:
        return Junction([member.find(sequence) for member in self.members])

    def after(self, place: Cursor) -> Sequence[Candidate]:
        """Of all that is said of a token the most favourable, each word taken for what it is worth."""
        if place is None:
            return ()
        here = self._arrived(place)
        said = self._pruned(here)
        agreed = _agreed(said)
        believed: dict[int, float] = {}
        speakers: dict[int, str] = {}
        for member, record, found in zip(self.members, self.records, said, strict=True):
            if found:
                record.speak(member.name, found, agreed, believed, speakers)
        return Ranking(here, believed, speakers)

    def step(self, place: Cursor, token: int) -> Cursor:
        return self._arrived(place), token

    def learn(self, sequences: Sequence[SequenceState], scored: Scored, verdicts: Sequence[Verdict]) -> None:
        """What was said along the accepted path, drafted or not, came true or did not; then the members learn."""
        for record in self.records:
            record.fade()
        for sequence, tree, verdict in zip(sequences, self._drafted, verdicts, strict=True):
            self._judge(self._places[sequence], tree, verdict)
        for member in self.members:
            member._drafted = self._drafted
            member.update(sequences, scored, verdicts)

    def _judge(self, place: Cursor, tree: DraftTree, verdict: Verdict) -> None:
        drafted = tree.tokens.tolist()
        for token in [*(drafted[node] for node in verdict.path[1:]), verdict.token]:
            here = self._arrived(place)
            said = self._said(here)
            agreed = _agreed(said)
            for record, found in zip(self.records, said, strict=True):
                for one in found:
                    record.count(one.mass, one.token in agreed, one.token == token)
            place = here, token

    def _arrived(self, place: Cursor) -> Junction:
        """Where each member stands once the token is read. One that did not expect it may know its way all the same."""
        if isinstance(place, Junction):
            return place
        above, token = place
        places: list[Cursor] = []
        for member, where, found in zip(self.members, above.places, self._said(above), strict=True):
            behind = None
            for one in found:
                if one.token == token:
                    behind = one.place
                    break
            places.append(member.step(where, token) if behind is None and where is not None else behind)
        return Junction(places)

    def _said(self, here: Junction) -> list[Sequence[Candidate]]:
        if here.said is None:
            here.said = [
                () if where is None else member.after(where)
                for member, where in zip(self.members, here.places, strict=True)
            ]
        return here.said

    def _pruned(self, here: Junction) -> list[Sequence[Candidate]]:
        """What is said, without what the draft model, where it has looked, holds for too improbable."""
        said = self._said(here)
        if self.model is None:
            return said
        where = here.places[self.members.index(self.model)]
        probs = None if where is None else self.model.probs(where)
        if probs is None:
            return said
        tokens = sorted({one.token for found in said for one in found})
        likely = {token for token, mass in zip(tokens, probs[tokens].tolist(), strict=True) if mass >= IMPROBABLE}
        return [[one for one in found if one.token in likely] for found in said]


def _agreed(said: list[Sequence[Candidate]]) -> set[int]:
    """What several speak of. What a distribution prunes it prunes for all, so of what is left this is the same."""
    seen: set[int] = set()
    agreed: set[int] = set()
    for found in said:
        if found:
            tokens = {one.token for one in found}
            if seen:
                agreed |= seen & tokens
            seen |= tokens
    return agreed


def split_members(text: str) -> list[str]:
    """`recycle+suffix(keep=9,min=2)+retrieval(DIR)` as specs; options in parentheses become those of a spec."""
    parts = re.findall(r"([\w-]+)(?:\(([^()]*)\))?(?:\+|$)", text)
    written = "+".join(f"{name}({inside})" if inside else name for name, inside in parts)
    if not parts or written != text.replace("()", ""):
        raise UsageError(f"A fusion names memories with a + between them, as in fused:recycle+suffix, not {text!r}.")
    return [f"{name}:{inside}" if inside else name for name, inside in parts]


def _member(spec: str) -> LookupDrafter:
    if split_spec(spec)[0] == DraftModelMember.name:
        return DraftModelMember(spec)
    member = DRAFTERS.build(spec)
    if not isinstance(member, LookupDrafter):
        raise UsageError(f"Drafter {member.name!r} remembers nothing that could be fused.")
    if isinstance(member, Fusion):
        raise UsageError("A fusion is not fused again; name its drafters with a + between them.")
    return member
