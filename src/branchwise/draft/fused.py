"""Several memories as one: their trees merged under one budget, and each trusted as far as it has earned.

RASD (Quan et al., arXiv 2503.03434) attaches what was retrieved to the tree of a draft model where the two agree. Here
that is the rule for all: a node has a place in every memory that expected its path, so equal prefixes are one node, and
whoever knows how to go on from there does. One heap over all of them shares the budget out by what each is believed
to earn, which is what its words came to so far.

With a draft model, the model drafts first, and its law prunes what the others retrieved at the nodes it looked at; then
one heap shares the budget.
"""

from __future__ import annotations

import re
from bisect import bisect
from collections.abc import Sequence as Rows

import torch
from torch import Tensor

from branchwise.draft import DRAFTERS, Budget
from branchwise.draft.ahead import Ahead
from branchwise.draft.growth import Growth
from branchwise.draft.memory import Next, Place, Remembering
from branchwise.draft.pace import Paced
from branchwise.errors import UsageError
from branchwise.registry import split_spec
from branchwise.sequence import Sequence
from branchwise.target import Scored, Target
from branchwise.tree import DraftTree
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

    def believe(self, mass: float, agreed: bool) -> float:
        """How probable a token is that the memory gives this mass."""
        cell = 2 * bisect(EDGES, mass) + agreed
        return (PRIOR * mass + self.hits[cell]) / (PRIOR + self.tries[cell])

    def count(self, mass: float, agreed: bool, came: bool) -> None:
        cell = 2 * bisect(EDGES, mass) + agreed
        self.tries[cell] += 1
        self.hits[cell] += came

    def fade(self) -> None:
        self.tries = [FADING * count for count in self.tries]
        self.hits = [FADING * count for count in self.hits]


class Junction:
    """Where the members stand behind a token, worked out when somebody asks: most nodes of a heap are never reached."""

    __slots__ = ("above", "places", "said", "token")

    def __init__(self, places: tuple[Place, ...] | None, above: Junction | None = None, token: int = -1) -> None:
        self.places, self.above, self.token = places, above, token
        self.said: list[Rows[Next]] | None = None


class Fused(Remembering):
    """`fused:a+b[+c]`: drafters that remember, with their options in parentheses, as in `recycle+suffix(keep=9999)`.

    A token that several propose is booked on the one that is believed most, and of equals on the first.
    """

    name = "fused"

    def __init__(self, members: str, tree: Growth | None = None) -> None:
        super().__init__(tree or Paced())
        self.members = [_member(spec) for spec in split_members(members)]
        names = [member.name for member in self.members]
        if len(set(names)) < len(names):
            raise UsageError(f"A fusion has each of its drafters once, not {members!r}.")
        self.model = next((member for member in self.members if isinstance(member, Ahead)), None)
        self.records = [Record() for _ in self.members]
        self.wants_prefill = max(member.wants_prefill for member in self.members)
        self.learns = True  # how far each is to be trusted

    def bind(self, target: Target) -> None:
        super().bind(target)
        for member in self.members:
            member.bind(target)
        if self.model is not None:
            self.cost = self.model.cost

    def begin(self, sequence: Sequence, logits: Tensor) -> None:
        for member in self.members:
            if member.wants_prefill:
                member.begin(sequence, logits[-member.wants_prefill :])  # type: ignore[attr-defined]

    def close(self, sequence: Sequence) -> None:
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

    def draft(self, sequences: Rows[Sequence], budgets: Rows[Budget]) -> list[DraftTree]:
        if self.model is not None:
            self.model.look_ahead(sequences, budgets)
            self.passes = self.model.passes
        return super().draft(sequences, budgets)

    def find(self, sequence: Sequence) -> Place:
        return Junction(tuple(member.find(sequence) for member in self.members))

    def after(self, place: Place) -> Rows[Next]:
        """Of all that is said of a token the most favourable, each word taken for what it is worth."""
        if place is None:
            return ()
        said = self._pruned(place, self._said(place))
        voices = _voices(said)
        best: dict[int, tuple[float, int]] = {}
        for row, found in enumerate(said):
            believe = self.records[row].believe
            for one in found:
                token = one.token
                belief = believe(one.mass, voices[token] > 1)
                if token not in best or belief > best[token][0]:
                    best[token] = belief, row
        total = max(1.0, sum([belief for belief, _ in best.values()]))
        ranked = sorted(best.items(), key=_falling)
        return [
            Next(token, belief / total, Junction(None, place, token), self.members[row].name)
            for token, (belief, row) in ranked
        ]

    def step(self, place: Place, token: int) -> Place:
        return Junction(None, place, token)

    def learn(self, sequences: Rows[Sequence], scored: Scored, verdicts: Rows[Verdict]) -> None:
        """What was said along the accepted path, drafted or not, came true or did not; then the members learn."""
        for record in self.records:
            record.fade()
        for sequence, tree, verdict in zip(sequences, self._drafted, verdicts, strict=True):
            self._judge(self._places[sequence], tree, verdict)
        for member in self.members:
            member._drafted = self._drafted
            member.observe(sequences, scored, verdicts)

    def _judge(self, place: Place, tree: DraftTree, verdict: Verdict) -> None:
        for token in [*tree.tokens[list(verdict.path[1:])].tolist(), verdict.token]:
            said = self._said(place)
            voices = _voices(said)
            for record, found in zip(self.records, said, strict=True):
                for one in found:
                    record.count(one.mass, voices[one.token] > 1, one.token == token)
            place = Junction(None, place, token)

    def _said(self, place: Junction) -> list[Rows[Next]]:
        if place.said is None:
            places = self._places_at(place)
            place.said = [
                () if where is None else member.after(where) for member, where in zip(self.members, places, strict=True)
            ]
        return place.said

    def _places_at(self, place: Junction) -> tuple[Place, ...]:
        """Where each member stands. One that did not expect the token may know its way all the same."""
        if place.places is None:
            assert place.above is not None
            above, token = self._places_at(place.above), place.token
            expected = [
                next((one.place for one in found if one.token == token), None) for found in self._said(place.above)
            ]
            place.places = tuple(
                member.step(where, token) if behind is None and where is not None else behind
                for member, where, behind in zip(self.members, above, expected, strict=True)
            )
        return place.places

    def _pruned(self, place: Junction, said: list[Rows[Next]]) -> list[Rows[Next]]:
        """Without what the draft model, where it has looked, holds for too improbable."""
        if self.model is None:
            return said
        where = self._places_at(place)[self.members.index(self.model)]
        law = None if where is None else self.model.law(where)
        if law is None:
            return said
        tokens = sorted({one.token for found in said for one in found})
        likely = {token for token, mass in zip(tokens, law[tokens].tolist(), strict=True) if mass >= IMPROBABLE}
        return [[one for one in found if one.token in likely] for found in said]


def _voices(said: list[Rows[Next]]) -> dict[int, int]:
    """How many speak of each token. What a law prunes it prunes for all, so this is the same before and after."""
    voices: dict[int, int] = {}
    for found in said:
        for one in found:
            voices[one.token] = voices.get(one.token, 0) + 1
    return voices


def _falling(item: tuple[int, tuple[float, int]]) -> float:
    return -item[1][0]


def split_members(text: str) -> list[str]:
    """`recycle+suffix(keep=9,min=2)+retrieval(DIR)` as specs; options in parentheses become those of a spec."""
    parts = re.findall(r"([\w-]+)(?:\(([^()]*)\))?(?:\+|$)", text)
    written = "+".join(f"{name}({inside})" if inside else name for name, inside in parts)
    if not parts or written != text.replace("()", ""):
        raise UsageError(f"A fusion names memories with a + between them, as in fused:recycle+suffix, not {text!r}.")
    return [f"{name}:{inside}" if inside else name for name, inside in parts]


def _member(spec: str) -> Remembering:
    if split_spec(spec)[0] == Ahead.name:
        return Ahead(spec)
    member = DRAFTERS.build(spec)
    if not isinstance(member, Remembering):
        raise UsageError(f"Drafter {member.name!r} remembers nothing that could be fused.")
    if isinstance(member, Fused):
        raise UsageError("A fusion is not fused again; name its drafters with a + between them.")
    return member
