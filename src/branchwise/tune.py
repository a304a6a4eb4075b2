"""What a step costs here and now: t(n), the time to score n nodes, and what each drafter adds.

    turn   every size scored once, in an order that changes from turn to turn, so that no size owns a quiet moment
    pace   how slow the machine was in a turn, as against the others; it is taken out before sizes are compared
    cliff  a size that costs clearly more than the size before, more than the sizes beside it grow and more than noise

Budgets need the shape of t(n) more than its height: on tiled hardware one node too many can cost as much as sixteen.
So the sizes between which the cost jumps are searched until the jump stands between two neighbours, and what was
found that way is confirmed with fresh passes, because the largest of many noisy rises is mostly noise.

Costs are kept in the cache as `tune/DIGEST.json`. The digest covers everything that would make them stale.
"""

from __future__ import annotations

import contextlib
import hashlib
import json
import math
import os
import platform
import random
import time
from bisect import bisect_left
from collections.abc import Callable, Iterator, Mapping
from collections.abc import Sequence as Rows
from dataclasses import asdict, dataclass, field, replace
from importlib.metadata import version
from itertools import pairwise
from pathlib import Path
from statistics import median, quantiles
from typing import TYPE_CHECKING, Any

import torch

from branchwise.engine import Engine, Request
from branchwise.errors import BranchwiseError, ModelError, UsageError
from branchwise.models.cache import cache_dir, workspace
from branchwise.sequence import Sequence
from branchwise.target import Target
from branchwise.tree import DraftTree, Forest

if TYPE_CHECKING:
    from branchwise.draft import Drafter
    from branchwise.llm import LLM
    from branchwise.stats import Stats

SIZES = (1, 2, 4, 8, 9, 16, 17, 24, 32, 33, 48, 64, 65, 96, 128)
"""what is timed by default: doubling, and one more where tiles end, since a stair seen only at its edges is a line"""
CLIFF = 0.1
"""the least rise from one size to the next, as a share of its cost, that is worth a word"""
STEEPER = 2.0
"""how much more than the sizes beside it a cliff must rise"""
ERRORS = 3.0
"""how many standard errors a rise must be away from nothing"""
MOST_PROBES = 24
"""pairs of sizes that may be added in search of cliffs"""
PROBES_AT_ONCE = 8
MOST_CLIFFS = 8
FEWEST_TURNS = 3
"""a median of fewer is the first accident"""
WARM_UPS = 2
"""untimed passes for each size: libraries choose their kernels on first use"""
VERSION = 1
"""of the files in the cache"""

Clock = Callable[[], float]
Progress = Callable[[str, int, int], None]
"""(what is being done, turns done, turns in all)"""
Turn = Mapping[int, float]
"""nodes -> seconds"""


@dataclass(frozen=True)
class Key:
    """What was measured, where and how: everything that would make the numbers stale."""

    model: str
    architecture: str
    """digest of the model's configuration: two models may share a name"""
    dtype: str
    precision: str
    """of float32 matrix products"""
    device: str
    threads: int
    batch: int
    context: int
    nodes: tuple[int, ...]
    repeat: int
    versions: Mapping[str, str]
    source: str
    """digest of our own code that runs in a pass: a source tree changes between versions"""

    @property
    def path(self) -> Path:
        digest = hashlib.sha256(json.dumps(asdict(self), sort_keys=True).encode()).hexdigest()
        return cache_dir() / "tune" / f"{digest[:32]}.json"


@dataclass(frozen=True)
class Point:
    """The cost of one size, with the machine's pace taken out; half of the passes lie between `low` and `high`."""

    nodes: int
    seconds: float
    low: float
    high: float


@dataclass(frozen=True)
class Cliff:
    nodes: int
    """the first size on the dear side"""
    times: float
    """its cost, as a multiple of the size before"""

    @property
    def stay_at(self) -> int:
        return self.nodes - 1


@dataclass(frozen=True)
class Costs:
    """t(n) on one machine, for one model, dtype, batch and context. Nodes are counted per sequence, root included."""

    points: tuple[Point, ...]
    """by size, from one node on"""
    cliffs: tuple[Cliff, ...]
    """by size"""
    key: Key
    measured: str
    """when, in UTC"""
    remembered: bool = field(default=False, compare=False)
    """read from the cache rather than measured now"""

    def __post_init__(self) -> None:
        sizes = [point.nodes for point in self.points]
        if not sizes or sizes[0] != 1 or any(a >= b for a, b in pairwise(sizes)):
            raise UsageError(f"Costs start with one node and go on by size, not {sizes}.")
        if not all(math.isfinite(point.seconds) and point.seconds > 0 for point in self.points):
            raise UsageError("Every cost must be a positive number of seconds.")

    def seconds(self, nodes: float) -> float:
        """The cost of a pass over n nodes: as measured, on the line between two points, or beyond the last one.

        Between two points it never leaves what they cost.
        """
        if nodes < 1:
            raise UsageError(f"A pass scores at least one node, not {nodes}.")
        last = self.points[-1]
        if nodes > last.nodes:
            return last.seconds + self._slope * (nodes - last.nodes)
        place = bisect_left(self.points, nodes, key=lambda point: point.nodes)
        right = self.points[place]
        if right.nodes == nodes:
            return right.seconds
        left = self.points[place - 1]
        share = (nodes - left.nodes) / (right.nodes - left.nodes)
        return left.seconds + share * (right.seconds - left.seconds)

    def ratio(self, nodes: float) -> float:
        """The cost of a pass over n nodes in passes over one."""
        return self.seconds(nodes) / self.points[0].seconds

    @property
    def _slope(self) -> float:
        """Seconds per node at the end, over the second half of all sizes: the last two alone may be a cliff."""
        last = self.points[-1]
        if last.nodes == 1:
            return last.seconds  # nothing is known; that a node costs a pass is the cautious guess
        middle = [point for point in self.points if 2 * point.nodes <= last.nodes][-1]
        return max(0.0, (last.seconds - middle.seconds) / (last.nodes - middle.nodes))


@dataclass(frozen=True)
class DraftCost:
    """What a drafter adds to a step, from the draft phase of short texts; `low` and `high` hold half of the prompts."""

    drafter: str
    seconds: float
    """per step"""
    low: float
    high: float
    drafted: float
    """nodes below the root per step, over all texts"""
    steps: int


def measure(
    target: Target,
    *,
    model: str | None = None,
    batch: int = 1,
    context: int = 512,
    nodes: Rows[int] | None = None,
    repeat: int = 9,
    fresh: bool = False,
    clock: Clock = time.perf_counter,
    progress: Progress | None = None,
) -> Costs:
    """Time passes over trees of different sizes behind `context` tokens, for `batch` sequences together.

    `nodes` are the sizes to begin with (`SIZES` as far as they fit by default); `repeat` passes are timed for each.
    The clock is that of the wall, stopped when the device is done: a step pays for the host's work too. What was
    measured before under the same circumstances is read from the cache, unless `fresh`.
    """
    sizes = _fitting(target, batch, context, nodes)
    if repeat < FEWEST_TURNS:
        raise UsageError(f"repeat must be at least {FEWEST_TURNS}, not {repeat}.")
    key = _key(target, model, batch, context, sizes, repeat)
    if not fresh and (known := _recall(key)) is not None:
        return known
    with _opened(target, batch, context) as sequences:
        stand = Stand(target, sequences, repeat, clock, progress)
        curve = Curve()
        curve.add(stand.turns(sizes, "timing passes"))
        _refine(stand, curve)
        cliffs = _confirmed(stand, curve)
    now = time.strftime("%Y-%m-%dT%H:%M:%SZ", time.gmtime())
    costs = Costs(curve.points(), cliffs, key, now)
    _keep(costs)
    return costs


def measure_drafter(
    llm: LLM,
    drafter: str | Drafter,
    prompts_ids: Rows[Rows[int]],
    *,
    tree: str | None = None,
    max_new_tokens: int = 48,
    progress: Progress | None = None,
) -> DraftCost:
    """Let a drafter work on real text, one prompt after the other, and take the draft phase of each step.

    The phase holds what a step pays before the target runs: the draft, and the tree on its way to the device. Nothing
    of this is cached: it takes seconds, and a drafter may be the user's own code, or have learnt since.
    """
    if not prompts_ids:
        raise UsageError("There is no prompt to draft for; give at least one.")
    drafting = llm.with_drafter(drafter, tree)
    engine, ends = drafting.engine, llm.stop_tokens
    _write(engine, Request(tuple(prompts_ids[0]), max_new_tokens=4, stop_tokens=ends))  # to warm up
    texts: list[Stats] = []
    for number, ids in enumerate(prompts_ids, start=1):
        texts.append(_write(engine, Request(tuple(ids), max_new_tokens=max_new_tokens, stop_tokens=ends)))
        if progress:
            progress(f"drafting with {engine.drafter.name}", number, len(prompts_ids))
    steps = sum(stats.steps for stats in texts)
    low, middle, high = _quartiles([stats.seconds["draft"] / stats.steps for stats in texts])
    return DraftCost(
        drafter=drafter if isinstance(drafter, str) else drafter.name,
        seconds=middle,
        low=low,
        high=high,
        drafted=sum(stats.drafted_tokens for stats in texts) / steps,
        steps=steps,
    )


def _write(engine: Engine, request: Request) -> Stats:
    generation = engine.submit(request)
    try:
        while not generation.finished:
            engine.step()
    finally:
        engine.cancel(generation)
    return generation.stats


# Measuring


class Stand:
    """Open sequences of a target, and trees of any size to time on them."""

    def __init__(
        self, target: Target, sequences: Rows[Sequence], repeat: int, clock: Clock, progress: Progress | None
    ) -> None:
        self.target = target
        self.sequences = sequences
        self.repeat = repeat
        self.clock = clock
        self.progress = progress
        self._random = random.Random(1)
        self._forests: dict[int, Forest] = {}

    def turns(self, sizes: Rows[int], purpose: str) -> list[Turn]:
        """Time every size once a turn."""
        for nodes in sizes:
            if nodes not in self._forests:
                self._forests[nodes] = self._forest(nodes)
                for _ in range(WARM_UPS):
                    self._time(nodes)
        order = list(sizes)
        turns: list[Turn] = []
        for number in range(1, self.repeat + 1):
            self._random.shuffle(order)
            turns.append({nodes: self._time(nodes) for nodes in order})
            if self.progress:
                self.progress(purpose, number, self.repeat)
        return turns

    def _forest(self, nodes: int) -> Forest:
        trees = [
            DraftTree.chain([sequence.root, *_random_tokens(self._random, self.target, nodes - 1)])
            for sequence in self.sequences
        ]
        return Forest(trees, self.target.device)

    def _time(self, nodes: int) -> float:
        self._wait()
        start = self.clock()
        self.target.score(self.sequences, self._forests[nodes])
        self._wait()
        return self.clock() - start

    def _wait(self) -> None:
        if self.target.device.type == "cuda":
            torch.cuda.synchronize(self.target.device)


class Curve:
    """What was timed so far, every turn divided by its pace."""

    def __init__(self) -> None:
        self._samples: dict[int, list[float]] = {}
        self._slopes: set[tuple[int, int]] = set()

    def add(self, turns: Rows[Turn]) -> None:
        """Take in turns over the same sizes; those known from before tell how the pace has changed since."""
        usual = {n: self.seconds(n) for n in turns[0] if n in self._samples}
        usual = usual or {n: median(turn[n] for turn in turns) for n in turns[0]}
        for turn in turns:
            pace = median(turn[n] / seconds for n, seconds in usual.items())
            for n, seconds in turn.items():
                self._samples.setdefault(n, []).append(seconds / pace)

    def seconds(self, nodes: int) -> float:
        return median(self._samples[nodes])

    def points(self) -> tuple[Point, ...]:
        found = []
        for nodes in sorted(self._samples):
            low, middle, high = _quartiles(self._samples[nodes])
            found.append(Point(nodes, middle, low, high))
        return tuple(found)

    def suspects(self) -> list[tuple[int, int]]:
        """Sizes between which the cost rises enough to hide a cliff, the steepest first, but for proven slopes."""
        found = []
        for a, b in pairwise(sorted(self._samples)):
            rise = self.seconds(b) - self.seconds(a)
            if b - a > 1 and (a, b) not in self._slopes and self._tells(rise, a, b, CLIFF):
                found.append((rise / self.seconds(a), a, b))
        return [(a, b) for _, a, b in sorted(found, reverse=True)]

    def judge(self, a: int, place: int, b: int) -> None:
        """Was it a slope? A cliff between a and b lifts the sizes near their middle off the line, by half its height.

        Two neighbours are asked: stairs that begin at a and at the middle have every second one on the line.
        """
        share = (place - a) / (b - a)
        if 0.25 <= share <= 0.75 and all(self._on_line(a, nodes, b) for nodes in (place, place + 1)):
            self._slopes |= {(a, place), (place + 1, b)}

    def _on_line(self, a: int, nodes: int, b: int) -> bool:
        line = self.seconds(a) + (nodes - a) / (b - a) * (self.seconds(b) - self.seconds(a))
        return abs(self.seconds(nodes) - line) < CLIFF / 4 * line

    def edges(self) -> list[int]:
        """Sizes that may be cliffs, the highest first: they cost more than the size before."""
        found = []
        for a, b in pairwise(sorted(self._samples)):
            rise = self.seconds(b) - self.seconds(a)
            if b - a == 1 and self._tells(rise, a, b, CLIFF / 2):
                found.append((rise / self.seconds(a), b))
        return [nodes for _, nodes in sorted(found, reverse=True)]

    def _tells(self, rise: float, a: int, b: int, share: float) -> bool:
        noise = math.hypot(_error(self._samples[a]), _error(self._samples[b]))
        return rise > max(share * self.seconds(a), ERRORS * noise)


def _refine(stand: Stand, curve: Curve) -> None:
    """Split where the cost jumps. Both ends are timed again beside the new sizes, so that all share their turns."""
    left = MOST_PROBES
    while suspects := curve.suspects()[: min(left, PROBES_AT_ONCE)]:
        probes = [(a, _roundest(a, b), b) for a, b in suspects]
        sizes = {nodes for a, place, b in probes for nodes in (a, place, place + 1, b)}
        curve.add(stand.turns(sorted(sizes), "looking for cliffs"))
        for probe in probes:
            curve.judge(*probe)
        left -= len(probes)


def _roundest(a: int, b: int) -> int:
    """The roundest number in binary from a on, so that it and the next lie before b: where tiles end."""
    return max(range(a, b - 1), key=lambda nodes: nodes & -nodes)


def _confirmed(stand: Stand, curve: Curve) -> tuple[Cliff, ...]:
    """The cliffs among the steepest edges, judged by fresh turns over each edge and the sizes beside it."""
    edges = curve.edges()[:MOST_CLIFFS]
    if not edges:
        return ()
    largest = curve.points()[-1].nodes
    sizes = sorted({nodes for edge in edges for nodes in range(edge - 2, edge + 2) if 1 <= nodes <= largest})
    turns = stand.turns(sizes, "confirming cliffs")
    curve.add(turns)
    return tuple(
        Cliff(edge, median(turn[edge] / turn[edge - 1] for turn in turns))
        for edge in sorted(edges)
        if _is_cliff(edge, turns)
    )


def _is_cliff(edge: int, turns: Rows[Turn]) -> bool:
    """Differences are taken within a turn, where the machine had one pace."""
    rises = [turn[edge] - turn[edge - 1] for turn in turns]
    beside = [
        median(turn[nodes] - turn[nodes - 1] for turn in turns)
        for nodes in (edge - 1, edge + 1)
        if nodes in turns[0] and nodes - 1 in turns[0]
    ]
    least = median(rises) - ERRORS * _error(rises)
    return median(rises) >= CLIFF * median(turn[edge - 1] for turn in turns) and least > STEEPER * max([0.0, *beside])


def _error(values: Rows[float]) -> float:
    """The standard error of a median, from the median distance to it, which outliers do not move."""
    middle = median(values)
    deviation = 1.4826 * median(abs(value - middle) for value in values)
    return 1.2533 * deviation / math.sqrt(len(values))


def _quartiles(values: Rows[float]) -> tuple[float, float, float]:
    if len(values) == 1:
        return values[0], values[0], values[0]
    low, _, high = quantiles(values, n=4, method="inclusive")
    return low, median(values), high


def _fitting(target: Target, batch: int, context: int, nodes: Rows[int] | None) -> tuple[int, ...]:
    """The sizes to begin with, one node always among them, checked against what the target can hold."""
    for name, value in (("batch", batch), ("context", context), ("nodes", min(nodes, default=0) if nodes else 1)):
        if value < 1:
            raise UsageError(f"{name} must be at least 1, not {value}.")
    if target.free_slots < batch:
        raise UsageError(
            f"A batch of {batch} needs as many slots and {target.free_slots} are free; ask for a smaller batch, "
            "or load with a larger max_batch."
        )
    most = min(target.max_nodes, target.context - context)
    if most < 1:
        raise UsageError(
            f"{context} tokens and a tree do not fit into a context of {target.context}; "
            f"ask for at most {target.context - 1}."
        )
    if nodes and max(nodes) > most:
        raise UsageError(
            f"A tree of {max(nodes)} nodes behind {context} tokens is more than the target holds; "
            f"ask for at most {most} nodes, or for a shorter context."
        )
    wanted = nodes or [*(size for size in SIZES if size <= most), min(most, SIZES[-1])]
    return tuple(sorted({1, *wanted}))


@contextlib.contextmanager
def _opened(target: Target, batch: int, context: int) -> Iterator[list[Sequence]]:
    """Sequences of random tokens, each its own: in a mixture of experts equal ones would share theirs."""
    rng = random.Random(0)
    opened: list[Sequence] = []
    try:
        for _ in range(batch):
            sequence = Sequence(_random_tokens(rng, target, context))
            target.open(sequence)
            opened.append(sequence)
        yield opened
    finally:
        for sequence in reversed(opened):
            target.close(sequence)


def _random_tokens(rng: random.Random, target: Target, count: int) -> list[int]:
    return [rng.randrange(target.vocabulary) for _ in range(count)]


# Remembering


def _key(target: Target, model: str | None, batch: int, context: int, nodes: tuple[int, ...], repeat: int) -> Key:
    from branchwise import __version__

    return Key(
        model=model or str(getattr(target, "name", type(target).__name__)),
        architecture=_architecture(target),
        dtype=str(getattr(target, "dtype", "unknown")).removeprefix("torch."),
        precision=torch.get_float32_matmul_precision(),
        device=device_name(target.device),
        threads=torch.get_num_threads(),
        batch=batch,
        context=context,
        nodes=nodes,
        repeat=repeat,
        versions={
            "branchwise": __version__,
            "python": platform.python_version(),
            "torch": torch.__version__,
            "transformers": version("transformers"),
        },
        source=_source(),
    )


def device_name(device: torch.device) -> str:
    """The processor that computes, as its maker calls it."""
    if device.type == "cuda":
        return torch.cuda.get_device_name(device)
    name = platform.processor() or platform.machine()
    with contextlib.suppress(OSError):
        for line in Path("/proc/cpuinfo").read_text().splitlines():
            if line.startswith("model name"):
                name = line.partition(":")[2].strip()
                break
    return f"{name}, {os.cpu_count()} cores"


def _architecture(target: Target) -> str:
    config = getattr(getattr(target, "model", None), "config", None)
    stated = config.to_dict() if config is not None else {}
    for where_it_came_from in ("_name_or_path", "transformers_version"):
        stated.pop(where_it_came_from, None)
    whole = [type(target).__qualname__, target.vocabulary, stated]
    return hashlib.sha256(json.dumps(whole, sort_keys=True, default=str).encode()).hexdigest()[:16]


def _source() -> str:
    root, digest = Path(__file__).parent, hashlib.sha256()
    for pattern in ("target/*.py", "tree.py", "tune.py"):
        for file in sorted(root.glob(pattern)):
            digest.update(file.name.encode() + b"\0" + file.read_bytes() + b"\0")
    return digest.hexdigest()[:16]


def _recall(key: Key) -> Costs | None:
    """What the cache knows; a file that is damaged, or of something else, is as good as none."""
    try:
        stored = json.loads(key.path.read_text(encoding="utf-8"))
        if stored["version"] != VERSION or stored["key"] != _as_json(asdict(key)):
            return None
        return Costs(
            points=tuple(Point(**point) for point in stored["points"]),
            cliffs=tuple(Cliff(**cliff) for cliff in stored["cliffs"]),
            key=key,
            measured=str(stored["measured"]),
            remembered=True,
        )
    except (OSError, ValueError, KeyError, TypeError, BranchwiseError):
        return None


def _keep(costs: Costs) -> None:
    """Write the file aside and rename it into place. A cache that cannot be written costs the next measurement only."""
    path = costs.key.path
    whole = asdict(replace(costs, remembered=False))
    del whole["remembered"]
    with contextlib.suppress(ModelError), workspace() as work:
        (work / path.name).write_text(json.dumps({"version": VERSION, **whole}), encoding="utf-8")
        path.parent.mkdir(exist_ok=True)
        os.replace(work / path.name, path)


def _as_json(value: Any) -> Any:
    """As it would come back from a file: tuples as lists."""
    return json.loads(json.dumps(value))
