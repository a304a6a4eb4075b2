"""Golden texts: the token ids that every preset and every verifier wrote, in one file.

    python -m tests.golden                     compare what is written now with the file; exits with 1 where they differ
    python -m tests.golden --only toy          the toy target alone, in a minute
    python -m tests.golden --write             write the file anew

A change that is meant to change no text changes no line of `data/golden.json`. There are two targets: the toy with
exact tiny distributions, on which the target itself with noise stands in for a draft model, and SmolLM2 in float32,
whose draft model is its own first layers. Heads are random. Every entry has texts decoded alone, and three prompts
decoded as a batch.
"""

from __future__ import annotations

import argparse
import json
import multiprocessing
import sys
import warnings
from collections.abc import Iterator, Sequence
from concurrent.futures import ProcessPoolExecutor
from dataclasses import replace
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import torch

from branchwise.backends.base import Target
from branchwise.core.sampling import SamplingParams
from branchwise.core.tree import Draw
from branchwise.draft.model import vocabulary
from branchwise.draft.model.draft_model import Weights
from branchwise.engine import Engine, Request
from branchwise.errors import LossyWarning
from branchwise.index import About, fingerprint
from branchwise.index.build import Writer
from branchwise.llm import LLM, load
from branchwise.methods import PRESETS, Method
from branchwise.testing import ToyTarget
from branchwise.verify import VERIFIERS
from tests.heads import random_head
from tests.test_index import write as write_index

FILE = Path(__file__).parent / "data" / "golden.json"
TEMPERATURES = (0.0, 0.8, 1.0)
SEED = 18
TREES = {
    Draw.FIXED: "topk:12,depth=4,width=3",
    Draw.WITHOUT_REPLACEMENT: "rsd-c:3,2,1",
    Draw.WITH_REPLACEMENT: "iid:3,2,1",
    Draw.PATHS: "paths:3x4",
    Draw.FORK: "fork-lossy:3x3",
}
"""a tree for every kind of draw, so that every verifier judges all that it accepts"""

TOY_VOCABULARY, TOY_LENGTH = 6, 24
TOY_PROMPTS = [(1, 2, 3, 1, 2), (4,), (5, 0, 5, 0, 5, 0, 5)]
REAL_LENGTH = 8
REAL_PROMPTS = [
    "Repeat after me: the cat sat on the mat, the cat sat on the mat.",
    "Name three rivers and the seas that they reach.",
    "def add(a, b):",
]


def verifiers(draft: str) -> Iterator[Method]:
    """Every verifier with every kind of draw that it accepts."""
    for name in VERIFIERS:
        for draw, tree in TREES.items():
            if draw in VERIFIERS.find(name).accepts:
                yield Method(f"{name} on {tree}", draft, tree, name)


def texts(
    target: Target, method: Method, prompts: list[tuple[int, ...]], length: int, alone: int
) -> dict[str, list[list[int]]]:
    """Entry -> texts, for every temperature: of the first prompts one by one, and of all as a batch."""
    written = {}
    for temperature in TEMPERATURES:
        sampling = SamplingParams(temperature=temperature, seed=SEED)
        requests = [Request(prompt, sampling, max_new_tokens=length) for prompt in prompts]
        single = [text for request in requests[:alone] for text in run(target, method, [request])]
        written |= {f"T={temperature:g} alone": single, f"T={temperature:g} batch": run(target, method, requests)}
    return written


def run(target: Target, method: Method, requests: list[Request]) -> list[list[int]]:
    torch.manual_seed(0)
    engine = Engine(target, *method.build())
    generations = [engine.submit(request) for request in requests]
    while engine.busy:
        engine.step()
    return [generation.token_ids for generation in generations]


def toy(folder: Path, every: int = 1) -> dict[str, Any]:
    """Of all presets and pairs of a verifier and a tree, or of every so many."""
    index = folder / "index"
    write_index(index, [[(i * i + j) % TOY_VOCABULARY for j in range(i + 3)] for i in range(40)], TOY_VOCABULARY)
    random_head(ToyTarget(TOY_VOCABULARY).info, table=TOY_VOCABULARY - 2).save(folder / "head")

    def standing_in(method: Method) -> Method:
        if method.needs_head:
            return method.drafting_with(head=str(folder / "head"))
        draft = method.draft.replace("model:trim=32768", "disturbed").replace("fused:model", "fused:trigram")
        draft = (
            draft.replace("model", "disturbed")
            .replace("nested", "disturbed")
            .replace("retrieval", f"retrieval{{}}{index}")
        )
        return replace(method, draft=draft.format("(" if "fused" in draft else ":") + (")" if "fused" in draft else ""))

    methods = [*map(standing_in, PRESETS.values()), *verifiers("disturbed:sigma=1")]
    return {m.name: texts(ToyTarget(TOY_VOCABULARY), m, TOY_PROMPTS, TOY_LENGTH, 3) for m in methods[::every]}


def real(folder: Path, share: tuple[int, int] = (0, 1)) -> dict[str, Any]:
    """The share (i, n) is every n-th method from the i-th on: several processes divide the work."""
    llm = load("smollm2", draft="none", dtype="float32", device="cpu", max_batch=3)
    target, prompts = llm.engine.target, [tuple(llm.encode(prompt)) for prompt in REAL_PROMPTS]
    draft = first_layers(llm, 2)  # held here: models that are loaded are known only as long as somebody uses them
    Weights._loaded[draft.name, torch.float32, "cpu", "auto"] = draft
    vocabulary.table_of = lambda target: folder / "counts.safetensors"  # type: ignore[assignment]
    vocabulary.save_counts(target.info, torch.arange(target.vocabulary, 0, -1), {})
    index = folder / "real-index"
    about = About("smollm2", fingerprint(llm.tokenizer), target.vocabulary, (), ())
    with Writer(index, about, shard=1 << 10) as writer:
        for prompt in prompts:
            writer.extend(list(prompt))
            writer.end_document()
        writer.finish(["prompts"])
    random_head(target.info, table=1000).save(folder / "real-head")
    found = {}
    presets = [
        method for method in PRESETS.values() if "nested" not in method.blanks
    ]  # what is timed decides its exits
    for method in [*presets, *verifiers("model")][share[0] :: share[1]]:
        wanted = {"draft_model": draft.name} if "model" in method.blanks else {}
        wanted |= {"index": str(index)} if "retrieval" in method.blanks else {}
        wanted |= {"head": str(folder / "real-head")} if "head" in method.blanks else {}
        found[method.name] = texts(target, method.drafting_with(**wanted), prompts, REAL_LENGTH, 1)
        print(f"smollm2 {method.name}", file=sys.stderr)
    return found


def first_layers(llm: LLM, count: int) -> Weights:
    """The first layers of a model under its own head: a draft model that knows a little."""
    config = type(llm.model.config).from_dict(llm.model.config.to_dict() | {"num_hidden_layers": count})
    model = type(llm.model)(config).eval().requires_grad_(False)
    model.load_state_dict(llm.model.state_dict(), strict=False)
    return Weights("own/first-layers", model, llm.tokenizer)


PARTS = ("toy", "smollm2")


def written(parts: Sequence[str], jobs: int = 1) -> dict[str, Any]:
    """The texts of these parts, those of SmolLM2 by so many processes."""
    tasks = [(part, (job, jobs)) for part in parts for job in range(jobs if part == "smollm2" else 1)]
    found: dict[str, Any] = {part: {} for part in parts}
    if len(tasks) == 1:
        return {tasks[0][0]: _write(tasks[0])}
    with ProcessPoolExecutor(jobs, multiprocessing.get_context("spawn")) as pool:
        for (part, _), texts in zip(tasks, pool.map(_write, tasks), strict=True):
            found[part] |= texts
    order = [method.name for method in (*PRESETS.values(), *verifiers("model"))]
    return {part: {name: found[part][name] for name in order if name in found[part]} for part in parts}


def _write(task: tuple[str, tuple[int, int]]) -> dict[str, Any]:
    warnings.simplefilter("ignore", LossyWarning)
    part, share = task
    with TemporaryDirectory() as folder:
        return toy(Path(folder)) if part == "toy" else real(Path(folder), share)


def differences(found: dict[str, Any], known: dict[str, Any]) -> list[str]:
    """Every entry that is not in both, or not the same."""

    def flat(part: dict[str, Any], name: str = "") -> dict[str, Any]:
        if not isinstance(part, dict):
            return {name: part}
        return {key: text for inner in part for key, text in flat(part[inner], f"{name}/{inner}").items()}

    here, there = flat(found), flat({part: known[part] for part in found})
    return sorted(key for key in here.keys() | there.keys() if here.get(key) != there.get(key))


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--only", choices=PARTS, action="append")
    parser.add_argument("--write", action="store_true")
    parser.add_argument("--jobs", type=int, default=1, help="processes that share the texts of SmolLM2")
    arguments = parser.parse_args()
    parts = arguments.only or list(PARTS)
    found = written(parts, arguments.jobs)
    if arguments.write:
        whole = {"command": "python -m tests.golden --write", **(json.loads(FILE.read_text()) if FILE.exists() else {})}
        text = json.dumps(whole | found, indent=1)
        FILE.write_text(_compact(text) + "\n")
        return 0
    wrong = differences(found, json.loads(FILE.read_text()))
    print("\n".join([*wrong, f"{len(wrong)} entries differ from {FILE.name} ({', '.join(parts)})"]))
    return bool(wrong)


def _compact(text: str) -> str:
    """Texts of one entry on one line."""
    import re

    return re.sub(r"\[[\s\d,\[\]-]+\]", lambda found: re.sub(r"\s+", "", found.group()), text)


if __name__ == "__main__":
    sys.exit(main())
