"""What a target is asked, and the texts that it answers: for a run in memory, or line by line into a file.

A file is written in rounds. The questions and the progress are kept beside it, so that after Ctrl-C or a crash the same
command goes on, and writes what an unbroken run would have written.
"""

from __future__ import annotations

import json
import os
import random
import re
import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch

from branchwise.errors import UsageError
from branchwise.llm import LLM
from branchwise.progress import Progress, silent
from branchwise.train import prompts
from branchwise.train.corpus import LEAST, Text, Texts, checked_texts
from branchwise.train.keeping import kept_whole, with_room
from branchwise.train.texts import Writer, without_loops

HEAT = ((0.0, 0.6), (0.6, 0.25), (1.0, 0.15))
"""(temperature, share of the answers)"""
SHARES = {
    "general": {"own turns": 0.38, "asked": 0.38, "read": 0.15, "code": 0.09},
    "code": {"own turns": 0.14, "asked": 0.07, "read": 0.05, "code": 0.12, "own code": 0.36, "programming": 0.26},
    "topics": {"asked": 1.0},
    "turns": {"own turns": 1.0},
}
"""how the texts of a kind are divided by the origin of their prompts: topics and tasks, the target's own user turns,
texts of its own to be read, programs"""
TURN = 96
"""the most tokens of a user turn that the target writes itself"""
ARTICLE = 192
"""the most tokens of a text that is written to be read again"""
SHORTEST = 5
"""the fewest tokens of an answer that is kept"""
SLOTS, SLOTS_ON_DEVICE = 8, 4096
"""texts that are written together"""
TRIAL, USUAL = "the", 80
"""a text to continue, which shows how fast a model writes on a CPU, and the tokens at that speed that a text costs: a
text has about twice as many tokens, but several texts are written at a time"""


@dataclass(frozen=True)
class Asked:
    """What a target is asked."""

    prompt: str
    raw: bool = False
    """whether the prompt is continued as it is, without the chat template"""
    temperature: float = 0.0
    topics: tuple[str, ...] = ()
    held_out: bool = False

    def shown(self, tokenizer: Any) -> str:
        """The prompt as the model reads it."""
        return self.prompt if self.raw else prompts.as_turn(tokenizer, self.prompt)


class Scribe:
    """A target that writes, with its tokenizer."""

    def __init__(self, writer: Writer, tokenizer: Any, stops: Sequence[int], progress: Progress = silent) -> None:
        self.writer, self.tokenizer, self.stops, self.progress = writer, tokenizer, stops, progress

    def encode(self, text: str) -> list[int]:
        found: list[int] = self.tokenizer(text, add_special_tokens=False)["input_ids"]
        return found

    def decode(self, tokens: Sequence[int]) -> str:
        """The text of these tokens, without the token that ended it."""
        text: str = self.tokenizer.decode([token for token in tokens if token not in self.stops])
        return text

    def write(self, shown: Sequence[str], heat: Sequence[float], length: int, what: str, seed: int) -> list[list[int]]:
        tokens = [self.encode(text) for text in shown]
        return self.writer.write(tokens, heat, length, seed, lambda done: self.progress(what, done, len(shown)))


def questions(scribe: Scribe, count: int, kind: str, avoid: Sequence[str], seed: int) -> list[Asked]:
    """About `count` things to ask, none of which is close to one in `avoid`; some of them the target asks itself."""
    share = Counter({name: round(count * part) for name, part in SHARES[kind].items()})
    own = share["own turns"]
    begun = [prompts.user_prefix(scribe.tokenizer)] * own
    turns = [scribe.decode(text) for text in scribe.write(begun, [1.0] * own, TURN, "user turns", seed)]
    programs = list[str]()
    if opened := prompts.openings(share["own code"], seed):
        found = scribe.write(opened, [1.0] * len(opened), TURN, "programs", seed + 3)
        programs = [first + scribe.decode(rest) for first, rest in zip(opened, found, strict=True)]
    articles = [prompts.as_turn(scribe.tokenizer, text) for text in prompts.asked(share["read"] // 2, seed + 1)]
    read = scribe.write(articles, [0.6] * len(articles), ARTICLE, "texts to read", seed + 1)
    asked = [
        *dict.fromkeys(text.strip() for text in turns if text.strip()),
        *prompts.asked(share["asked"], seed),
        *prompts.reading([scribe.decode(text) for text in read], share["read"], seed),
        *prompts.programming(programs, share["programming"], seed),
    ]
    begun = [*prompts.code(share["code"], seed), *filter(None, dict.fromkeys(map(prompts.beginning, programs)))]
    whole = [Asked(text) for text in prompts.without_copies(asked, avoid)]
    return [*whole, *(Asked(text, raw=True) for text in prompts.without_copies(begun, avoid))]


def heated(asked: Sequence[Asked], seed: int, temperature: float | None = None) -> list[Asked]:
    """The same prompts, at temperatures with the shares of `HEAT`, or all at `temperature`."""
    if temperature is not None:
        return [replace(one, temperature=temperature) for one in asked]
    rng = random.Random(seed)
    heat = rng.choices([heat for heat, _ in HEAT], [part for _, part in HEAT], k=len(asked))
    return [replace(one, temperature=chosen) for one, chosen in zip(asked, heat, strict=True)]


def parted(asked: Sequence[Asked], share: float, seed: int) -> list[Asked]:
    """The same prompts, held out by topic: no prompt to learn from has a topic that is held out. A prompt without a
    known topic is held out by chance, with the same share."""
    known = prompts.topics()
    pattern = re.compile("|".join(rf"\b{re.escape(topic)}\b" for topic in sorted(known, key=len, reverse=True)), re.I)
    chosen = random.Random(f"held out {seed}").sample(known, max(1, round(share * len(known)))) if share > 0 else []
    out = {topic.lower() for topic in chosen}
    found = []
    for one in asked:
        topics = tuple(sorted({match.lower() for match in pattern.findall(one.prompt)}))
        by_itself = random.Random(f"held out {seed} {one.prompt}").random() < share
        found.append(replace(one, topics=topics, held_out=bool(out & {*topics}) if topics else by_itself))
    return found


def write_texts(
    model: Any,
    tokenizer: Any,
    stops: Sequence[int],
    count: int,
    *,
    kind: str = "general",
    length: int = 288,
    slots: int = 256,
    avoid: Sequence[str] = (),
    seed: int = 0,
    progress: Progress = silent,
) -> list[Text]:
    """About `count` texts of the target, none of whose prompts is close to one in `avoid`."""
    with Writer(model, stops, slots) as writer:
        scribe = Scribe(writer, tokenizer, stops, progress)
        asked = heated(questions(scribe, count, kind, avoid, seed), seed)
        shown = [one.shown(tokenizer) for one in asked]
        heat = [one.temperature for one in asked]
        answers = without_loops(scribe.write(shown, heat, length, "answers", seed + 2))
        kept = []
        for text, answer, warm in zip(shown, answers, heat, strict=True):
            prompt = scribe.encode(text)
            if len(answer) >= SHORTEST:
                kept.append(Text(torch.tensor([*prompt, *answer], dtype=torch.int32), len(prompt), warm))
        return kept


def prepare(
    llm: LLM,
    folder: Path,
    count: int,
    *,
    seed: int,
    avoid: Sequence[str],
    kind: str = "general",
    data: Path | None = None,
    learner: str = "head",
    progress: Progress = silent,
) -> tuple[list[Text], list[Text]]:
    """Texts to learn from, and held-out texts: those in the folder, else those of the file `data`, else new ones."""
    texts = Texts(folder / "texts.pt")
    if not texts.file.exists() and data is not None:
        texts.write(checked_texts(data, llm.tokenizer, learner))
    if not texts.file.exists():
        options = {"kind": kind, "slots": slots_on(llm), "avoid": avoid, "seed": seed, "progress": progress}
        texts.write(write_texts(llm.model, llm.tokenizer, sorted(llm.stop_tokens), count, **options))  # type: ignore[arg-type]
    return texts.read()


def slots_on(llm: LLM) -> int:
    return SLOTS if llm.engine.target.device.type == "cpu" else SLOTS_ON_DEVICE


def hours_to_write(llm: LLM, count: int) -> float:
    """About how many hours a model on a CPU takes to write `count` texts; 0 on a GPU, which needs minutes."""
    if llm.engine.target.device.type != "cpu":
        return 0.0
    llm.generate(TRIAL, max_new_tokens=2, raw=True)
    start = time.perf_counter()
    written = llm.generate(TRIAL, max_new_tokens=4, raw=True, ignore_eos=True)
    seconds = (time.perf_counter() - start) / max(1, len(written.token_ids))
    return count * USUAL * seconds / 3600


# A file, line by line


@dataclass(frozen=True)
class Written:
    """What a file of texts holds."""

    texts: int
    held_out: int
    tokens: int
    """tokens of all answers"""
    cut: int
    """how many texts were cut because they ran into a loop"""
    left_out: int
    """how many answers were too short to learn from"""


@dataclass
class TextFile:
    """A file of texts that is being written."""

    out: Path
    settings: dict[str, Any]
    """the settings that decide the texts; a file that was begun with other settings is not continued"""
    together: int
    """how many texts a round has"""
    length: int = 288
    """the most tokens of an answer"""
    seed: int = 0

    def __post_init__(self) -> None:
        self.partial, self.state = (self.out.with_name(f".{self.out.name}.{what}") for what in ("part", "state"))

    def write(self, scribe: Scribe, ask: Callable[[], list[Asked]]) -> Written:
        """Let the target answer, from where an earlier run ended; `ask` is called only once in the life of a file."""
        asked, done = self._begin(ask)
        rounds = range(0, len(asked), self.together)
        for number in range(done["rounds"], len(rounds)):
            some = asked[rounds[number] : rounds[number] + self.together]
            lines, counted = self._round(scribe, some, number, rounds[number], len(asked))
            with with_room(self.partial), self.partial.open("ab") as out:
                out.write("".join(f"{line}\n" for line in lines).encode())
                out.flush()
                os.fsync(out.fileno())
            for name, value in counted.items():
                done["counted"][name] += value
            done |= {"rounds": number + 1, "bytes": self.partial.stat().st_size}
            self._keep(asked, done)
        self.partial.replace(self.out)
        self.state.unlink()
        return Written(**done["counted"])

    def _begin(self, ask: Callable[[], list[Asked]]) -> tuple[list[Asked], dict[str, Any]]:
        if self.state.exists():
            kept = json.loads(self.state.read_text())
            if kept["settings"] != self.settings:
                raise UsageError(
                    f"{self.out} was begun with other settings; name another file, or remove {self.state}."
                )
            asked = [Asked(**one | {"topics": tuple(one["topics"])}) for one in kept["asked"]]
            os.truncate(self.partial, kept["done"]["bytes"])  # drops what a round had written when it was interrupted
            return asked, kept["done"]
        asked = ask()
        if not asked:
            raise UsageError("There is nothing to ask: every prompt is close to one that is to be avoided.")
        done: dict[str, Any] = {"rounds": 0, "bytes": 0, "counted": asdict(Written(0, 0, 0, 0, 0))}
        with with_room(self.partial):
            self.partial.write_bytes(b"")
        self._keep(asked, done)
        return asked, done

    def _keep(self, asked: Sequence[Asked], done: dict[str, Any]) -> None:
        kept = {"settings": self.settings, "done": done, "asked": [asdict(one) for one in asked]}
        kept_whole(self.state, json.dumps(kept))

    def _round(
        self, scribe: Scribe, asked: Sequence[Asked], number: int, first: int, of: int
    ) -> tuple[list[str], dict[str, int]]:
        shown, heat = [one.shown(scribe.tokenizer) for one in asked], [one.temperature for one in asked]
        tokens = [scribe.encode(text) for text in shown]
        whole = scribe.writer.write(
            tokens, heat, self.length, self.seed + 2 + number, lambda done: scribe.progress("texts", first + done, of)
        )
        lines, counted = list[str](), Counter[str]()
        for one, answer, full in zip(asked, without_loops(whole), whole, strict=True):
            # Readers of the file leave out texts that are too short to learn from, prompt included.
            if len(answer) < SHORTEST or len(answer) + len(scribe.encode(one.shown(scribe.tokenizer))) <= LEAST:
                counted["left_out"] += 1
                continue
            cut = len(answer) < len(full)
            counted.update(texts=1, held_out=one.held_out, tokens=len(answer), cut=cut)
            lines.append(json.dumps(dict(self._line(one, scribe.tokenizer.decode(answer), cut)), ensure_ascii=False))
        return lines, counted

    def _line(self, one: Asked, answer: str, cut: bool) -> Iterator[tuple[str, Any]]:
        yield from (("prompt", one.prompt), ("answer", answer), ("temperature", one.temperature))
        yield from (("topic", ", ".join(one.topics)), ("held_out", one.held_out))
        yield from ((name, True) for name, value in (("raw", one.raw), ("cut", cut)) if value)
