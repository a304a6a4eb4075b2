"""A comparison at load: are trees scored as the model's own forward pass would score their paths?"""

from __future__ import annotations

import inspect
from contextlib import ExitStack
from statistics import median

import torch
from torch import Tensor

from branchwise.backends.base import Target
from branchwise.backends.transformers.probe import refusal
from branchwise.backends.transformers.runner import ModelRunner
from branchwise.core.batch import TreeBatch
from branchwise.core.sequence import SequenceState
from branchwise.core.tree import DraftTree

EXACT = 1e-3  # the largest relative error of any node in float32
ROUNDED = 0.1
"""the largest error of the median node in lower precision: a wrong mask or position affects most nodes, and by more"""
MOST_ROUNDED = 0.3
"""the largest error of the median node in a model that magnifies rounding beyond `ROUNDED`; see `own_rounding`"""
NUDGES = 4
"""the number of random roundings that `own_rounding` tries"""


def check_against_own_forward(target: Target, runner: ModelRunner) -> None:
    """Score two small trees in one pass and compare with the model's own forward along their longest paths. That
    catches what no keyword shows, such as positions that a model takes from the cache instead of from the call."""
    count = target.vocabulary
    first = SequenceState([(11 * i + 5) % count for i in range(3)])
    second = SequenceState([(7 * i + 3) % count for i in range(5)])
    comb = DraftTree(torch.tensor([first.root, 4 % count, 8 % count, 1, 6 % count]), (-1, 0, 0, 2, 3))
    fork = DraftTree(torch.tensor([second.root, 9 % count, 2 % count]), (-1, 0, 0))
    # Both longest paths have six tokens, so one reference batch needs no padding.
    cases = [(first, comb), (second, fork)][: target.free_slots]
    sequences, trees = zip(*cases, strict=True)
    with ExitStack() as undo:
        for sequence in sequences:
            target.open(sequence)
            undo.callback(target.close, sequence)
        logits = target.score(sequences, TreeBatch(trees, target.device)).logits
    tokens, places = [], []
    for row, (sequence, tree) in enumerate(cases):
        path = tree.topology.path(len(tree) - 1)
        tokens.append(sequence.tokens + tree.tokens[path[1:]].tolist())
        places += [(row, node, len(sequence.tokens) - 1 + depth) for depth, node in enumerate(path)]
    texts = torch.tensor(tokens, device=target.device)
    own = runner.own_logits(texts)
    errors = [_relative_error(logits[row, node], own[row, place]) for row, node, place in places]
    if target.info.dtype == torch.float32 and not target.info.quantised:
        error, most = max(errors), EXACT
    else:
        error, most = (median(errors), ROUNDED)  # rounding may send nodes to other experts or levels
        if error >= most:
            rounding = own_rounding(runner, texts, own, [(row, place) for row, _, place in places])
            most = max(most, min(MOST_ROUNDED, 2 * rounding))
    if not error < most:
        raise refusal(target.info.name, f"trees scored in one pass differ from its own forward by {error:.1%}")


def own_rounding(runner: ModelRunner, texts: Tensor, own: Tensor, places: list[tuple[int, int]]) -> float:
    """The median relative change of the model's own logits (batch, length, vocabulary) if the embeddings of its tokens
    are rounded to the next number up or down. In some models it is so large that any two correct ways to compute them
    differ as much. Both sides use eager attention, since a faster one may leave something out."""
    if "inputs_embeds" not in inspect.signature(runner.model.forward).parameters:
        return 0.0
    embeddings = runner.model.get_input_embeddings()(texts).detach()
    moved = []
    for seed in range(NUDGES):
        signs = torch.randint(2, embeddings.shape, generator=torch.Generator().manual_seed(seed)) * 2.0 - 1.0
        steps = 1 + signs.to(embeddings.device) * torch.finfo(embeddings.dtype).eps / 2
        nudged = runner.own_logits((embeddings.float() * steps).to(embeddings.dtype))
        moved += [_relative_error(nudged[row, place], own[row, place]) for row, place in places]
    return median(moved)


def _relative_error(found: Tensor, own: Tensor) -> float:
    """The relative error of one row of logits, up to a constant, which softmax ignores."""
    found, own = (row.float() - row.float().mean() for row in (found, own))
    return float((found - own).norm() / own.norm().clamp_min(1e-9))
