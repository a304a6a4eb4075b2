"""Training a head from nothing: the target writes texts, the head learns from them, and the best head is kept.

Everything is kept in one folder beside the head, the texts first, so that the same command can continue.
"""

from __future__ import annotations

import json
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
from branchwise.progress import Progress, silent
from branchwise.train.corpus import Text, batches, next_batches
from branchwise.train.head.cross import rotary_frequencies
from branchwise.train.head.learn import Learner, Recipe, Watched
from branchwise.train.keeping import kept_whole

SCORED = 8
"""how many batches of held-out texts are scored"""
TAPPED = (1 / 15, 0.5, 0.9, 1.0)
"""depths of the tapped layers: late layers say most, the last one most of all"""
LEAST_LAYERS = 7
"""the fewest layers of a target in which the layers of eagle-3 differ from each other"""


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
"""published forms of a head, and ours. `speculators` is EAGLE-3 as vLLM reads it by default; a window is half the
length of the texts to learn from, as LongSpec's was"""


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
    """whether the head attends to keys and values of the target's last layer"""
    states: bool = True
    """whether the head reads hidden states of the target"""
    table: int = 32_768
    taps: str = "late"
    """which layers the head reads: late (`TAPPED`) or those of eagle-3"""
    tap_norms: str = "each"


def tapped(info: TargetInfo, count: int, taps: str = "late") -> tuple[str, ...]:
    """The layers that a head reads, chosen among the first `count` of a target."""
    layers = info.layers[:count]
    if taps == "eagle-3" and count >= LEAST_LAYERS:
        return tuple(layers[number - 1] for number in usual_inputs(count))
    return tuple(dict.fromkeys(layers[max(0, round(share * count) - 1)] for share in TAPPED))


def blank_head(model: Any, info: TargetInfo, sizes: Sizes) -> Head:
    """An untrained head that fits a target."""
    config = model.config.get_text_config()
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    width, last = config.hidden_size // heads, info.layers[config.num_hidden_layers - 1]
    if sizes.cross:  # as wide as the target's heads, to which it attends
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
        if isinstance(block, Block | Cross):  # at first every block passes on what it reads
            torch.nn.init.zeros_(block.out.weight)
        if isinstance(block, Block):
            torch.nn.init.zeros_(block.down.weight)
    return head


def frequent(texts: Sequence[Text], vocabulary: int, count: int) -> Tensor:
    """(at most count,) tokens: the most frequent in answers first, then the most frequent in prompts. Tokens that no
    text has are left out, because their ids say nothing about them."""
    answers, whole = (
        torch.bincount(torch.cat(parts).long(), minlength=vocabulary).double()
        for parts in ([text.tokens[text.prompt :] for text in texts], [text.tokens for text in texts])
    )
    order = (answers + whole / (whole.sum() + 1)).argsort(descending=True, stable=True)
    return order[: min(count, int((whole > 0).sum()))]


@dataclass
class Training:
    """A run that can be interrupted at any moment and continued."""

    model: Any
    info: TargetInfo
    folder: Path
    sizes: Sizes
    recipe: Recipe
    progress: Progress = silent
    scored: Callable[[dict[str, Any]], None] = lambda entry: None
    """called with every entry of the learning curve"""
    texts: Mapping[str, Any] = field(default_factory=dict)
    """the settings of the texts; a folder with other settings is refused, because its texts would not follow them"""

    def __post_init__(self) -> None:
        self.folder.mkdir(parents=True, exist_ok=True)
        asked = {"target": self.info.weights, "sizes": asdict(self.sizes), "recipe": asdict(self.recipe)}
        asked["texts"] = dict(self.texts)
        known = self.folder / "run.json"
        if known.exists() and json.loads(known.read_text()) != asked:
            raise UsageError(f"{self.folder} holds another run; choose another --out, or remove it.")
        known.write_text(json.dumps(asked))

    def run(self, texts: Sequence[Text], held_out: Sequence[Text], every: float = 20.0) -> TrainedHead:
        """Learn until the time is over, and score and save every `every` seconds."""
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
            next(stream)  # a continued run must not see the same batches again
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
                    kept_whole(best, head.state_dict())
                learner.save(state)
                self.scored(learner.curve[-1])
            self.progress(f"learning, loss {loss:.2f}", round(100 * learner.done), 100)
        if best.exists():
            head.load_state_dict(torch.load(best, weights_only=True))
        head.eval().requires_grad_(False)
        about = {"recipe": asdict(self.recipe), "curve": learner.curve, "steps": learner.steps, "texts": len(texts)}
        return TrainedHead(head.float().cpu(), table.cpu(), self.info.name, self.info.weights, about)
