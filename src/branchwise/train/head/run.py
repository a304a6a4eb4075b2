"""Training a head from nothing: the target writes texts, the head learns from them, and the best head is kept.

Everything lies in one folder beside the head, texts first, so that the same command goes on where it was ended.
"""

from __future__ import annotations

import json
import random
import time
from collections import Counter
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from branchwise.backends.base import TargetInfo
from branchwise.draft.head.file import TrainedHead
from branchwise.draft.head.network import Block, Cross, Head, HeadConfig
from branchwise.draft.head.speculators import usual_inputs
from branchwise.errors import UsageError
from branchwise.llm import LLM
from branchwise.progress import Progress, silent
from branchwise.train import prompts
from branchwise.train.head.cross import rotary_frequencies
from branchwise.train.head.learn import Learner, Recipe, Text, Watched, batches
from branchwise.train.texts import Writer, without_loops

HEAT = ((0.0, 0.6), (0.6, 0.25), (1.0, 0.15))
"""(temperature, share of the answers)"""
HELD_OUT = 0.02
SCORED = 8
"""batches of held-out texts"""
SHARES = {
    "general": {"own turns": 0.38, "asked": 0.38, "read": 0.15, "code": 0.09},
    "code": {"own turns": 0.14, "asked": 0.07, "read": 0.05, "code": 0.12, "own code": 0.36, "programming": 0.26},
}
"""of the texts of a kind, by where their prompts come from"""
LEAST, LONGEST = 8, 2048
"""tokens of a text that is given, prompt included; what is longer is cut"""
TRIAL, USUAL = "the", 80
"""what is continued to see how fast a model writes on a CPU, and how many such tokens a text costs: it has about twice
as many, written several texts at a time"""
TURN = 96
"""tokens of a user turn at most that the target writes itself"""
ARTICLE = 192
"""tokens of a text that is written to be read again"""
TAPPED = (1 / 15, 0.5, 0.9, 1.0)
"""depths of the tapped layers: late layers say most, the last one most of all"""
LEAST_LAYERS = 7
"""of a target in which the layers of eagle-3 are different ones"""


FORMS: dict[str, dict[str, Any]] = {
    "eagle": {"carry": False},
    "carry": {"carry": True},
    "fspad": {"carry": True, "gate": "full"},
    "fspad-gate": {"carry": False, "gate": "full"},
    "parallelspec": {"carry": False, "masks": 6, "bias": 128},
    "two-layers": {"carry": True, "layers": 2},
    "speculators": {"carry": False, "taps": "eagle-3", "tap_norms": "none"},
    "longspec": {"carry": False, "window": 256, "cross": True, "states": False},
    "longspec-states": {"carry": True, "window": 256, "cross": True},
}
"""published forms of a head, and ours. `speculators` is EAGLE-3 as vLLM reads it by default; a window is half of what
texts to learn from have, as LongSpec's was"""


@dataclass(frozen=True)
class Sizes:
    """How a head is built, as shares of its target."""

    mlp: int
    layers: int = 1
    carry: bool = True
    gate: str = "none"
    masks: int = 0
    bias: int = 0
    window: int = 0
    cross: bool = False
    """whether it attends to keys and values of the target's last layer"""
    states: bool = True
    """whether it reads hidden states of the target"""
    table: int = 32_768
    taps: str = "late"
    """which layers it reads: late (`TAPPED`) or those of eagle-3"""
    tap_norms: str = "each"


def tapped(info: TargetInfo, count: int, taps: str = "late") -> tuple[str, ...]:
    """The layers to read, of the decoder layers of a target."""
    layers = info.layers[:count]
    if taps == "eagle-3" and count >= LEAST_LAYERS:
        return tuple(layers[number - 1] for number in usual_inputs(count))
    return tuple(dict.fromkeys(layers[max(0, round(share * count) - 1)] for share in TAPPED))


def blank_head(model: Any, info: TargetInfo, sizes: Sizes) -> Head:
    """An untrained head that fits a target."""
    config = model.config.get_text_config()
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    width, last = config.hidden_size // heads, info.layers[config.num_hidden_layers - 1]
    if sizes.cross:  # as wide as the heads that it attends to
        width = config.to_dict().get("head_dim") or width
    shape = HeadConfig(
        width=config.hidden_size,
        taps=tapped(info, config.num_hidden_layers, sizes.taps) if sizes.states else (),
        heads=heads,
        kv_heads=kv_heads,
        head_width=width,
        mlp=sizes.mlp,
        layers=sizes.layers,
        carry=sizes.carry,
        gate=sizes.gate,
        masks=sizes.masks,
        bias=sizes.bias,
        tap_norms=sizes.tap_norms,
        window=sizes.window,
        cross=last if sizes.cross else "",
    )
    theta = float((config.rope_parameters or {}).get("rope_theta", 10_000.0))
    plain = theta ** (-torch.arange(0, width, 2) / width)
    head = Head(shape, rotary_frequencies(model, width) if sizes.cross else plain)
    for block in head.modules():
        if isinstance(block, Block | Cross):  # at first a row says what it reads
            torch.nn.init.zeros_(block.out.weight)
        if isinstance(block, Block):
            torch.nn.init.zeros_(block.down.weight)
    return head


class Texts:
    """The texts that a head learns from, in one file."""

    def __init__(self, file: Path) -> None:
        self.file = file

    def read(self) -> tuple[list[Text], list[Text]]:
        """Texts to learn from, and held-out ones."""
        kept = torch.load(self.file, weights_only=True)
        tokens = kept["tokens"].split(kept["lengths"].tolist())
        texts = [Text(part, prompt) for part, prompt in zip(tokens, kept["prompts"].tolist(), strict=True)]
        random.Random(0).shuffle(texts)
        count = max(1, round(HELD_OUT * len(texts)))
        return texts[count:], texts[:count]

    def write(self, texts: Sequence[Text]) -> None:
        partial = self.file.with_name(f".{self.file.name}.part")
        torch.save(
            {
                "tokens": torch.cat([text.tokens for text in texts]),
                "lengths": torch.tensor([len(text.tokens) for text in texts]),
                "prompts": torch.tensor([text.prompt for text in texts]),
            },
            partial,
        )
        partial.replace(self.file)


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
    """So many texts of the target, none of whose prompts is close to one in `avoid`."""
    share = Counter({name: round(count * part) for name, part in SHARES[kind].items()})
    with Writer(model, stops, slots) as writer:

        def written(asked: Sequence[str], heat: Sequence[float], length: int, what: str, seed: int) -> list[list[int]]:
            return writer.write(
                [tokenizer(text, add_special_tokens=False)["input_ids"] for text in asked],
                heat,
                length,
                seed,
                lambda done: progress(what, done, len(asked)),
            )

        def decode(tokens: Sequence[int]) -> str:
            text: str = tokenizer.decode([token for token in tokens if token not in stops])
            return text

        own = share["own turns"]
        begun = [prompts.user_prefix(tokenizer)] * own
        turns = [decode(text) for text in written(begun, [1.0] * own, TURN, "user turns", seed)]
        programs = list[str]()
        if opened := prompts.openings(share["own code"], seed):
            found = written(opened, [1.0] * len(opened), TURN, "programs", seed + 3)
            programs = [first + decode(rest) for first, rest in zip(opened, found, strict=True)]
        articles = prompts.asked(share["read"] // 2, seed + 1)
        texts = written(
            [prompts.as_turn(tokenizer, text) for text in articles],
            [0.6] * len(articles),
            ARTICLE,
            "texts to read",
            seed + 1,
        )
        asked = [
            *dict.fromkeys(text.strip() for text in turns if text.strip()),
            *prompts.asked(share["asked"], seed),
            *prompts.reading([decode(text) for text in texts], share["read"], seed),
            *prompts.programming(programs, share["programming"], seed),
        ]
        begun = [*prompts.code(share["code"], seed), *filter(None, dict.fromkeys(map(prompts.beginning, programs)))]
        whole = [
            *(prompts.as_turn(tokenizer, text) for text in prompts.without_copies(asked, avoid)),
            *prompts.without_copies(begun, avoid),
        ]
        rng = random.Random(seed)
        heat = rng.choices([heat for heat, _ in HEAT], [part for _, part in HEAT], k=len(whole))
        answers = without_loops(written(whole, heat, length, "answers", seed + 2))
    kept = []
    for text, answer in zip(whole, answers, strict=True):
        prompt = tokenizer(text, add_special_tokens=False)["input_ids"]
        if len(answer) > 4:
            kept.append(Text(torch.tensor([*prompt, *answer], dtype=torch.int32), len(prompt)))
    return kept


def given_texts(file: Path, tokenizer: Any) -> list[Text]:
    """Texts of a file: what another run wrote (`texts.pt`), or lines of JSON, {"prompt", "answer"} or {"text"}."""
    if file.suffix == ".pt":
        learn, held_out = Texts(file).read()
        return [*held_out, *learn]
    found = []
    for number, line in enumerate(file.read_text().splitlines(), 1):
        try:
            known = json.loads(line) if line.strip() else {}
        except ValueError:
            raise UsageError(f"Line {number} of {file} is no JSON.") from None
        if known and not (known.keys() >= {"prompt", "answer"} or "text" in known):
            raise UsageError(f"Line {number} of {file} has neither prompt and answer nor text.")
        if known:
            before = prompts.as_turn(tokenizer, known["prompt"]) if "prompt" in known else ""
            prompt = tokenizer(before, add_special_tokens=False)["input_ids"] if before else []
            answer = tokenizer(known["answer"] if before else known["text"], add_special_tokens=False)["input_ids"]
            if len(prompt) + len(answer) > LEAST:
                tokens = torch.tensor([*prompt, *answer], dtype=torch.int32)[:LONGEST]
                found.append(Text(tokens, max(1, len(prompt))))
    return found


def prepare(
    llm: LLM,
    folder: Path,
    count: int,
    *,
    seed: int,
    avoid: Sequence[str],
    kind: str = "general",
    data: Path | None = None,
    progress: Progress = silent,
) -> tuple[list[Text], list[Text]]:
    """Texts to learn from and held-out ones: those in the folder, or those of a file, or new ones."""
    texts = Texts(folder / "texts.pt")
    if not texts.file.exists() and data is not None:
        given = given_texts(data, llm.tokenizer)
        if len(given) < 2:
            raise UsageError(f"{data} holds {len(given)} texts of more than {LEAST} tokens; a head learns from many.")
        texts.write(given)
    if not texts.file.exists():
        slots = 4096 if llm.engine.target.device.type == "cuda" else 8
        texts.write(
            write_texts(
                llm.model,
                llm.tokenizer,
                sorted(llm.stop_tokens),
                count,
                kind=kind,
                slots=slots,
                avoid=avoid,
                seed=seed,
                progress=progress,
            )
        )
    return texts.read()


def hours_to_write(llm: LLM, count: int) -> float:
    """About how long a model on a CPU takes to write so many texts; 0 on a GPU, where it is minutes."""
    if llm.engine.target.device.type != "cpu":
        return 0.0
    llm.generate(TRIAL, max_new_tokens=2, raw=True)
    start = time.perf_counter()
    written = llm.generate(TRIAL, max_new_tokens=4, raw=True, ignore_eos=True)
    seconds = (time.perf_counter() - start) / max(1, len(written.token_ids))
    return count * USUAL * seconds / 3600


def frequent(texts: Sequence[Text], vocabulary: int, count: int) -> Tensor:
    """(count,) tokens, those that answers have most first."""
    answers = torch.cat([text.tokens[text.prompt :] for text in texts])
    counts = torch.bincount(answers.long(), minlength=vocabulary)
    return counts.argsort(descending=True, stable=True)[:count]


@dataclass
class Training:
    """A run that can be ended at any moment and gone on with."""

    model: Any
    info: TargetInfo
    folder: Path
    sizes: Sizes
    recipe: Recipe
    progress: Progress = silent
    scored: Callable[[dict[str, Any]], None] = lambda entry: None
    """told every entry of the learning curve"""
    texts: Mapping[str, Any] = field(default_factory=dict)
    """what was asked of the texts: those of a folder were written once and would not follow"""

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        asked = {"target": self.info.weights, "sizes": asdict(self.sizes), "recipe": asdict(self.recipe)}
        asked["texts"] = dict(self.texts)
        known = self.folder / "run.json"
        if known.exists() and json.loads(known.read_text()) != asked:
            raise UsageError(f"{self.folder} holds another run; choose another --out, or remove it.")
        known.write_text(json.dumps(asked))

    def run(self, texts: Sequence[Text], held_out: Sequence[Text], every: float = 20.0) -> TrainedHead:
        """Learn until the time is over; scored and saved every so many seconds."""
        device, vocabulary = self.info.device, self.info.vocabulary
        table = frequent(texts, vocabulary, min(self.sizes.table, vocabulary)).to(device)
        torch.manual_seed(self.recipe.seed)
        head = blank_head(self.model, self.info, self.sizes).to(device)
        watched = Watched(self.model, head.config.taps, table, head.config.cross)
        learner = Learner(head, watched, self.recipe)
        state, best = self.folder / "state.pt", self.folder / "best.pt"
        if state.exists():
            learner.restore(state)
        test = next_batches(held_out, self.recipe.tokens, SCORED)
        stream = batches(texts, self.recipe.tokens, self.recipe.seed)
        for _ in range(learner.steps):
            next(stream)  # a run that goes on does not see the same batches again
        due = learner.elapsed + every
        while not learner.finished:
            loss = learner.learn(next(stream))
            if learner.elapsed >= due or learner.finished:
                due = learner.elapsed + every
                score = learner.score(test)
                learner.curve.append(
                    {"seconds": learner.elapsed, "steps": learner.steps, "loss": loss, "hits": score.hits}
                )
                if score.tokens > learner.best:
                    learner.best = score.tokens
                    torch.save(head.state_dict(), best)
                learner.save(state)
                self.scored(learner.curve[-1])
            self.progress(f"learning, loss {loss:.2f}", round(100 * learner.done), 100)
        if best.exists():
            head.load_state_dict(torch.load(best, weights_only=True))
        head.eval().requires_grad_(False)
        about = {"recipe": asdict(self.recipe), "curve": learner.curve, "steps": learner.steps, "texts": len(texts)}
        return TrainedHead(head.float().cpu(), table.cpu(), self.info.name, self.info.weights, about)


def next_batches(texts: Sequence[Text], tokens: int, count: int) -> list[list[Text]]:
    """The first batches of these texts; fewer if there are fewer texts."""
    found: list[list[Text]] = []
    left = len(texts)
    for batch in batches(texts, tokens, 0):
        found.append(batch)
        left -= len(batch)
        if left <= 0 or len(found) == count:
            return found
    return found
