"""A tree of a given shape: only its tokens are drawn.

Chen et al., "Sequoia: Scalable, Robust, and Hardware-aware Speculative Decoding" (arXiv 2402.12374). If the i-th
child of a node is accepted about as often at every node, the best shape can be worked out beforehand: `branchwise tree
optimise` does it for a pair of models on this machine. Siblings are drawn without replacement, and the first drawn has
the largest part of the shape below it. The shape looks at the order of the draws and never at the tokens.

The nodes of a shape are numbered level by level, and in a level by their parents. So a tree that stops early is the
beginning of the whole, and so is its mask: the sliced mask of improved MCSD (Lu et al. 2024, arXiv 2409.10644).
"""

from __future__ import annotations

import json
from itertools import pairwise
from pathlib import Path
from typing import Any

from branchwise.core.topology import branched, plant
from branchwise.core.tree import Draw
from branchwise.draft.base import Budget
from branchwise.draft.builder import TreeBuilder, TreeCoroutine, TreePolicy
from branchwise.draft.sampler import DraftSampler, SampleRequest
from branchwise.errors import UnknownName, UsageError
from branchwise.registry import nearest

SHAPES: dict[str, tuple[int, ...]] = {
    "mcsd": branched([4, 2, 2]),
    "fork": branched([4, 1, 1, 1, 1, 1]),
    "sequoia-24": (-1, 0, 0, 0, 1, 1, 2, 4, 4, 5, 6, 7, 7, 8, 9, 10, 11, 11, 12, 13, 14, 15, 16, 22, 23),
}
"""Parents by name.

    mcsd          4, then 2, then 2 children, 28 nodes (Yang et al. 2024, arXiv 2401.06706)
    fork          the four chains of improved MCSD, 24 nodes
    sequoia-24    Sequoia's dynamic programme for 24 nodes, at most 8 deep, and the rates of acceptance in `TYPICAL`
"""

TYPICAL = (0.8, 0.4, 0.3, 0.2, 0.2, 0.1, 0.1, 0.1)
"""How often a child is accepted after its elder siblings were rejected: round numbers for a draft model that knows its
target well. `branchwise tree optimise` measures those of a pair."""

MOST_NODES = 1024


class Template(TreePolicy):
    """`template:NAME` or `template:FILE.json`: that shape, or as many whole levels of it as the budget holds."""

    draw = Draw.WITHOUT_REPLACEMENT
    stoppable = True

    def __init__(self, shape: str) -> None:
        self.shape = plant(find_shape(shape))

    def grow(self, root: int, budget: Budget, sampler: DraftSampler) -> TreeCoroutine:
        tree = TreeBuilder([root])
        places = {0: 0}  # node of the shape -> node of the tree
        for level, below in pairwise(self.shape.levels[: max(budget.depth, 0) + 1]):
            if below[-1] >= budget.nodes:
                break
            # A distribution may carry fewer tokens than the shape has children: a missing child is missing with all
            # below it.
            nodes = [node for node in level if node in places and self.shape.children[node]]
            if not nodes:
                break
            found = yield tree, [places[node] for node in nodes]
            probs = found.drawable
            tree.probs.update((places[node], row) for node, row in zip(nodes, probs, strict=True))
            sizes = [len(self.shape.children[node]) for node in nodes]
            orders = yield SampleRequest(sampler, probs, list(enumerate(nodes)), sizes)
            for node, order in zip(nodes, orders, strict=True):
                for child, token in zip(self.shape.children[node], order, strict=False):
                    places[child] = tree.add(places[node], token)
        return tree.finish(self.draw)


def find_shape(name: str) -> tuple[int, ...]:
    """The parents of a shape that comes with Branchwise or lies in a file."""
    if name in SHAPES:
        return SHAPES[name]
    if name.endswith(".json") or "/" in name:
        return read_template(Path(name).expanduser())
    raise UnknownName(
        f"Unknown template {name!r}.{nearest(name, SHAPES)} Known: {', '.join(sorted(SHAPES))}, or a FILE.json as "
        "`branchwise tree optimise` writes it."
    )


def read_template(file: Path) -> tuple[int, ...]:
    """The parents in a template file."""

    def refuse(why: str) -> UsageError:
        return UsageError(f"The template {file} {why}; write a new one with `branchwise tree optimise --out {file}`.")

    try:
        stored: Any = json.loads(file.read_bytes())
    except OSError as error:
        raise refuse(f"cannot be read: {error.strerror}") from None
    except (ValueError, RecursionError):
        raise refuse("is not JSON") from None
    if not isinstance(stored, dict) or stored.get("branchwise") != "template":
        raise refuse("is JSON of another kind")
    if stored.get("version") != 1:
        raise refuse(f"has the version {stored.get('version')!r}, and this Branchwise reads 1")
    parents = stored.get("parents")
    if not isinstance(parents, list) or any(type(parent) is not int for parent in parents) or len(parents) < 2:
        raise refuse("has no list of parents with at least one node below the root")
    if parents[0] != -1 or any(not 0 <= parent < node for node, parent in enumerate(parents) if node):
        raise refuse("must begin with -1 for the root, and every other node needs an earlier one as its parent")
    if len(parents) > MOST_NODES:
        raise refuse(f"has {len(parents)} nodes, more than the {MOST_NODES} that a pass could score")
    if any(parent > after for parent, after in pairwise(parents)):
        raise refuse("is not in level order, in which parents never go back")
    return tuple(parents)


def write_template(file: Path, parents: tuple[int, ...], note: str) -> None:
    try:
        file.write_text(as_json(parents, note) + "\n", encoding="utf-8")
    except OSError as error:
        raise UsageError(f"The template {file} cannot be written: {error.strerror}.") from None


def as_json(parents: tuple[int, ...], note: str) -> str:
    """What a template file holds."""
    return json.dumps({"branchwise": "template", "version": 1, "parents": parents, "note": note}, ensure_ascii=False)
