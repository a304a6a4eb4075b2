"""`branchwise train data`: texts of a target, which heads and students learn from."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from typer import Option

from branchwise.cli.console import print_notice
from branchwise.cli.options import AsJson, Target, at_least, grouped
from branchwise.errors import UsageError
from branchwise.progress import showing
from branchwise.registry import check_known

Kind = Annotated[
    str, Option(help="What is asked: general, code, topics (tasks about topics) or turns (the model's own user turns).")
]
Avoid = Annotated[list[Path] | None, Option(help="Prompts of an evaluation, which no text may begin with; repeatable.")]


@grouped
def data(
    *,
    target: Target,
    out: Annotated[Path, Option(help="The file to write, JSON lines.")] = Path("texts.jsonl"),
    texts: Annotated[int, Option(help="About how many texts; with --prompts, at most.")] = 60_000,
    prompts: Annotated[
        list[Path] | None, Option(help="Prompts to ask, as for `branchwise bench`; repeatable.", show_default="made up")
    ] = None,
    kind: Kind = "general",
    length: Annotated[int, Option(help="The most tokens of an answer.")] = 288,
    temperature: Annotated[
        float | None,
        Option("--temperature", "-t", help="Temperature of all answers.", show_default="60 % 0, 25 % 0.6, 15 % 1"),
    ] = None,
    held_out: Annotated[float, Option(help="Share of the topics that are not learned from.")] = 0.05,
    together: Annotated[
        int | None, Option(help="Texts of a round, after which they are kept.", show_default="by the hardware")
    ] = None,
    avoid: Avoid = None,
    seed: Annotated[int, Option(help="The same seed asks the same.")] = 0,
    as_json: AsJson = False,
) -> None:
    """Let the target write texts to learn from.

    Heads and students learn from the file: --data texts.jsonl. After Ctrl-C the same command goes on.

    branchwise train data --target smollm2 --out texts.jsonl
    """
    at_least(1, texts=texts, length=length, together=together)
    if not 0 <= held_out < 1:
        raise UsageError(f"--held-out is a share of at least 0 and less than 1, not {held_out}.")
    if temperature is not None and not temperature >= 0:
        raise UsageError(f"--temperature must be at least 0, not {temperature}.")
    if out.exists() or not out.absolute().parent.is_dir():
        raise UsageError(f"Texts cannot be written to {out}; name a new file in a folder that exists.")
    from branchwise.bench.prompts import load_items
    from branchwise.train.texts import Writer
    from branchwise.train.writing import SHARES, Asked, Scribe, TextFile, heated, parted, questions, slots_on

    check_known("kind", kind, SHARES)
    items = load_items(prompts)[:texts] if prompts else []
    evaluation = [turn for item in load_items(avoid) for turn in item.turns] if avoid else []
    llm = target.load(draft="none", max_batch=1)
    stops, slots = sorted(llm.stop_tokens), slots_on(llm)
    rounds = together or 2 * slots
    settings = {
        "target": llm.engine.target.info.weights,
        "texts": texts,
        "kind": None if prompts else kind,
        "prompts": [item.id for item in items],
        "avoid": [file.name for file in avoid or ()],
        "held_out": held_out,
        "temperature": temperature,
        "length": length,
        "seed": seed,
        "together": rounds,
    }
    file = TextFile(out, settings, rounds, length, seed)
    try:
        with showing() as progress, Writer(llm.model, stops, slots) as writer:
            scribe = Scribe(writer, llm.tokenizer, stops, progress)

            def ask() -> list[Asked]:
                given = [Asked(item.turns[0], raw=item.raw) for item in items]
                asked = given or questions(scribe, texts, kind, evaluation, seed)
                return parted(heated(asked, seed, temperature), held_out, seed)

            found = file.write(scribe, ask)
    except KeyboardInterrupt:
        print_notice(f"Stopped; the same command goes on with what is in {file.partial}.")
        raise
    share = found.cut / max(1, found.texts)
    if as_json:
        print(json.dumps({"file": str(out), **asdict(found), "cut_share": share}))
        return
    print(
        f"{found.texts:,} texts, {found.tokens:,} tokens of answers, {found.held_out:,} texts held out by topic, "
        f"{share:.1%} cut where they ran into a loop, {found.left_out:,} too short to keep."
    )
    print(f"Use it with branchwise train student --data {out}, or train head --data {out}")
