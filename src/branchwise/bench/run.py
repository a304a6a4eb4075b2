"""The contest: every contestant on every item, in turn, one record at a time.

If interleaved, all contestants write one item before the next item begins, and their order rotates from item to item,
so that a machine that gets slower, or a first call that is slow for the others' benefit, affects all alike.

Answers are compared with the baseline's. In float32 greedy answers must be equal, and sampled ones too under `match`
with the same seeds. In lower precision a pass over a tree rounds differently from a pass over one token; the gap
between the logits of the two tokens shows such a near-tie.
"""

from __future__ import annotations

import dataclasses
import hashlib
import json
import zlib
from collections.abc import Sequence
from dataclasses import dataclass
from itertools import zip_longest
from typing import Any

import torch

from branchwise.bench.contest import Answer, Asked, Contestant
from branchwise.bench.prompts import Item
from branchwise.bench.records import PLAIN, Comparison, Difference, Key, Ledger, Record, hash_ids
from branchwise.errors import UsageError
from branchwise.llm import LLM
from branchwise.progress import Progress, silent
from branchwise.registry import check_known

ORDERS = ("interleaved", "sequential")
WARM_UP = 16
"""tokens that every contestant writes untimed; on a device a whole answer, so that all CUDA graphs are recorded"""


@dataclass(frozen=True)
class Rules:
    """Settings that all contestants share."""

    max_new_tokens: int
    temperature: float = 0.0
    top_p: float = 1.0
    top_k: int = 0
    seed: int = 0
    full_length: bool = False
    """whether the end of text is forbidden, so that all answers have one length"""
    batch: int = 1
    rounds: int = 1
    order: str = "interleaved"
    state: str = "cold"

    def __post_init__(self) -> None:
        for name, value in (("max-new-tokens", self.max_new_tokens), ("batch", self.batch), ("repeat", self.rounds)):
            if value < 1:
                raise UsageError(f"--{name} must be at least 1, not {value}.")
        check_known("order", self.order, ORDERS)


@dataclass(frozen=True)
class Play:
    """A contestant's turn on the items of one group, in one round."""

    contestant: Contestant
    round: int
    number: int
    """the number of the group"""
    items: tuple[Item, ...]

    @property
    def keys(self) -> list[Key]:
        name = self.contestant.name
        return [Key(name, item.id, turn, self.round) for item in self.items for turn in range(turns_of(item))]


def plan(contestants: Sequence[Contestant], items: Sequence[Item], rules: Rules) -> list[Play]:
    """All plays in the order in which they happen."""
    groups = [tuple(items[start : start + rules.batch]) for start in range(0, len(items), rules.batch)]
    if rules.order == "sequential":
        return [
            Play(contestant, turn, number, group)
            for contestant in contestants
            for turn in range(rules.rounds)
            for number, group in enumerate(groups)
        ]
    plays = []
    for turn in range(rules.rounds):
        for number, group in enumerate(groups):
            shift = (turn + number) % len(contestants)
            rotated = [*contestants[shift:], *contestants[:shift]]
            plays += [Play(contestant, turn, number, group) for contestant in rotated]
    return plays


@dataclass
class Contest:
    """A run that writes a ledger; requests that the ledger already holds are not repeated."""

    llm: LLM
    contestants: Sequence[Contestant]
    items: Sequence[Item]
    rules: Rules
    ledger: Ledger
    run: dict[str, Any]
    """the provenance that goes into every record"""
    progress: Progress = silent

    def __post_init__(self) -> None:
        check_same_run(self.ledger, self.run)

    def play(self) -> None:
        plays = plan(self.contestants, self.items, self.rules)
        total = sum(len(play.keys) for play in plays)
        if all(self._is_done(play) for play in plays):
            self._compare()
            return
        self._warm_up()
        for place, play in enumerate(plays):
            self.progress(f"{play.contestant.name}: {play.items[0].id}", len(self.ledger.records), total)
            learning = self.rules.state == "warm" and play.contestant.learns
            if not self._is_done(play) or (learning and any(not self._is_done(later) for later in plays[place:])):
                self._play(play)
            if place + 1 == len(plays) or plays[place + 1].items != play.items:
                self._compare()
        self.progress("done", len(self.ledger.records), total)

    def _is_done(self, play: Play) -> bool:
        return all(self.ledger.get(key) for key in play.keys)

    def _warm_up(self) -> None:
        """Let all contestants write untimed, with the shapes and options of the contest, to choose kernels and fill
        caches."""
        items = self.items[: self.rules.batch]
        prompts = [first_prompt(item, self.llm) for item in items]
        asked = self._asked(items, 0, 0)
        if self.llm.engine.target.device.type == "cpu":
            asked = dataclasses.replace(asked, max_new_tokens=min(WARM_UP, asked.max_new_tokens))
        for contestant in self.contestants:
            self.progress(f"{contestant.name}: warming up", len(self.ledger.records), 0)
            contestant.warm_up(prompts, asked)

    def _play(self, play: Play) -> None:
        """Write the dialogues of a group, turn by turn; each continues with this contestant's own answers."""
        if self.rules.state == "cold":
            play.contestant.forget()
        for turn in range(max(map(turns_of, play.items))):
            items = [item for item in play.items if turn < turns_of(item)]
            keys = [Key(play.contestant.name, item.id, turn, play.round) for item in items]
            # A drafter that learns must see earlier turns again, even if their records exist.
            if play.contestant.learns or not all(map(self.ledger.get, keys)):
                prompts = [self._prompt(item, key) for item, key in zip(items, keys, strict=True)]
                answers = play.contestant.write(prompts, self._asked(items, turn, play.round))
                for item, key, prompt, answer in zip(items, keys, prompts, answers, strict=True):
                    if self.ledger.get(key) is None:
                        self.ledger.add(self._record(play, item, turn, prompt, answer))

    def _prompt(self, item: Item, key: Key) -> list[int]:
        """The token ids that an answer follows: the dialogue so far, with the contestant's own answers."""
        if key.turn == 0:  # without a chat template, a model takes one text and no conversation
            return first_prompt(item, self.llm)
        said = []
        for turn in range(key.turn):
            before = self.ledger.get(key._replace(turn=turn))
            assert before is not None
            said += [{"role": "user", "content": item.turns[turn]}, {"role": "assistant", "content": before.text}]
        return self.llm.encode([*said, {"role": "user", "content": item.turns[key.turn]}])

    def _asked(self, items: Sequence[Item], turn: int, round: int) -> Asked:
        ends, rules = self.llm.stop_tokens, self.rules
        names = (f"{rules.seed}/{item.id}/{turn}/{round}" for item in items)
        return Asked(
            max_new_tokens=rules.max_new_tokens,
            temperature=rules.temperature,
            top_p=rules.top_p,
            top_k=rules.top_k,
            stop_tokens=frozenset() if rules.full_length else ends,
            forbidden=ends if rules.full_length else frozenset(),
            seeds=tuple(zlib.crc32(name.encode()) for name in names),
        )

    def _record(self, play: Play, item: Item, turn: int, prompt: list[int], answer: Answer) -> Record:
        ended = answer.finish_reason == "stop" and answer.ids[-1:] and answer.ids[-1] in self.llm.stop_tokens
        text = answer.text if answer.text is not None else self.llm.decode(answer.ids[:-1] if ended else answer.ids)
        last = turn == turns_of(item) - 1
        manner = item.manner(text) if item.manner is not None and last else None
        tokens = len(answer.ids) if answer.tokens is None else answer.tokens
        values: dict[str, Any] = vars(answer) | {"tokens": tokens, "text": text}
        for name in ("ids", "drafted_per_depth", "accepted_per_depth", "tried_by_prob", "accepted_by_prob"):
            values[name] = tuple(values[name])
        return Record(
            contestant=play.contestant.name,
            kind=play.contestant.kind,
            suite=item.suite,
            category=item.category,
            item=item.id,
            turn=turn,
            round=play.round,
            group=f"{play.contestant.name}/{play.round}/{play.number}/{turn}",
            state=self.rules.state,
            prompt_tokens=len(prompt),
            prompt_hash=hash_ids(prompt),
            ids_hash=hash_ids(answer.ids),
            correct=item.check(text) if item.check is not None and last else None,
            followed=None if manner is None else manner.followed,
            guessed=None if manner is None else manner.guessed,
            run=self.run,
            **values,
        )

    def _compare(self) -> None:
        """Compare the answers that must equal the baseline's, were not compared yet, and have a baseline by now.

        These are greedy answers of all contestants, and sampled answers of contestants that share the baseline's random
        numbers. Answers in dialogues whose earlier turns differ have other prompts and are not compared.
        """
        names = {rival.name for rival in self.contestants if rival.comparable or self.rules.temperature == 0}
        records = self.ledger.records
        plain = {record.key[1:]: record for record in records if record.kind == PLAIN}
        for record in records:
            baseline = plain.get(record.key[1:])
            wanted = record.contestant in names and record.kind != PLAIN and record.counted_by == "ids"
            if wanted and record.equal is None and baseline and record.prompt_hash == baseline.prompt_hash:
                self.ledger.add_comparison(self._compared(record, baseline))

    def _compared(self, record: Record, baseline: Record) -> Comparison:
        prompt = self._prompt(next(item for item in self.items if item.id == record.item), baseline.key)
        assert hash_ids(prompt) == baseline.prompt_hash, "the questions are not those that were answered"
        if record.ids == baseline.ids:
            return Comparison(record.key, True, None)
        return Comparison(record.key, False, first_difference(record.ids, baseline.ids, prompt, self.llm))


def first_difference(ids: Sequence[int], expected: Sequence[int], prompt: Sequence[int], llm: LLM) -> Difference:
    """The place where two answers first differ, and the gap of the logits there: a small one is likely to be
    rounding."""
    pairs = enumerate(zip_longest(ids, expected))
    place, token, wanted = next((place, *pair) for place, pair in pairs if pair[0] != pair[1])
    gap = None
    if token is not None and wanted is not None:
        context = torch.tensor([[*prompt, *expected[:place]]], device=llm.model.device)
        with torch.inference_mode():
            logits = llm.model(input_ids=context).logits[0, -1].float()
        gap = abs(float(logits[token]) - float(logits[wanted]))
    return Difference(place, token, wanted, gap)


def digest(items: Sequence[Item]) -> str:
    """Sixteen hexadecimal digits of a hash of the prompts, because a file may hold other prompts later."""
    asked = [(item.id, item.category, item.turns, item.raw, *([item.ids] if item.ids else [])) for item in items]
    return hashlib.sha256(json.dumps(asked).encode()).hexdigest()[:16]


def fitting(items: Sequence[Item], llm: LLM, max_new_tokens: int) -> list[Item]:
    """The items that fit into the context. Dialogues are left out if the model has no chat template."""

    def length(item: Item) -> int:
        if item.ids:
            return len(item.ids) + max_new_tokens
        return sum(len(llm.encode(turn, raw=item.raw)) + max_new_tokens for turn in item.turns)

    talks = bool(llm.tokenizer.chat_template)
    return [item for item in items if (talks or turns_of(item) == 1) and length(item) <= llm.engine.target.context]


def turns_of(item: Item) -> int:
    return 1 if item.ids else len(item.turns)


def first_prompt(item: Item, llm: LLM) -> list[int]:
    """The token ids that the first answer follows."""
    return list(item.ids) or llm.encode(item.turns[0], raw=item.raw)


SAME = ("model", "dtype", "device", "machine", "threads", "seed", "source", "arguments", "questions", "versions")
"""fields that all records of one file share"""


def check_same_run(ledger: Ledger, run: dict[str, Any]) -> None:
    """Refuse to put records of different code, machines or prompts into one file."""
    for record in ledger.records[:1]:
        for name in SAME:
            before, now = record.run.get(name), run.get(name)
            if before != now:
                if isinstance(before, dict) and isinstance(now, dict):
                    name = next(key for key in {**before, **now} if before.get(key) != now.get(key))
                    before, now = before.get(name), now.get(name)
                other = f"{ledger.path} holds records of another run: its {name} is {before!r}, now it is {now!r}."
                raise UsageError(f"{other} Choose another --out, or remove the file.")
