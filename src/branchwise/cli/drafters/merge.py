"""`branchwise train merge`: specialists of one base as a pack that drafts for every task."""

from __future__ import annotations

import json
from dataclasses import asdict
from pathlib import Path
from typing import Annotated

from typer import Argument, Option

from branchwise.cli.options import AsJson
from branchwise.progress import showing
from branchwise.registry import check_known


def merge(
    base: Annotated[str, Argument(metavar="BASE", help="What all specialists were fine-tuned from.")],
    specialists: Annotated[
        list[str], Argument(metavar="SPECIALIST…", help="Fine-tunes of it, as FOLDER or as TASK=FOLDER.")
    ],
    out: Annotated[Path, Option(help="The folder to write; it must not exist.")] = Path("pack"),
    delta: Annotated[str, Option(help="Store what they share in int8, or exact.")] = "int8",
    as_json: AsJson = False,
) -> None:
    """Merge fine-tunes of one draft model into a pack.

    Every specialist can be restored from what all share, one bit for every weight, and one factor for every tensor.
    The pack drafts: --draft-model PACK,task=code, or --draft-model PACK, which finds out what a text is about.

    branchwise train merge student code=student-code math=student-math chat=student-chat --out pack
    """
    from branchwise.draft.model.pack import KINDS
    from branchwise.train.folder import check_folder

    check_known("kind of delta", delta, KINDS)
    check_folder(out)
    from branchwise.train import merge as merging

    names = merging.named(specialists)
    with showing() as progress:
        found = merging.merge(base, names, out, delta, progress)
    if as_json:
        told = {task: asdict(one) for task, one in found.tasks.items()}
        print(json.dumps({"folder": str(out), "bytes": found.bytes, "specialists": found.specialists, "tasks": told}))
        return
    for task, one in found.tasks.items():
        print(
            f"{task}: {one.agreement:.0%} of its changes have the elected sign, and its weights are off by "
            f"{one.distance:.0%} of their distance from the base."
        )
    print(f"{found.bytes / 1e6:.1f} MB, for {len(names)} specialists of {found.specialists / 1e6:.1f} MB.")
    print(f"Use it with --draft-model {out}, or --draft-model {out},task={next(iter(names))}")
