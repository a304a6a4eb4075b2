"""Foresight: predicting what the target will draw from the noise of its draw, which is known before the distribution.

A text draws its token in a position by a race (`core.rng`): every token arrives after a waiting time of its own,
divided by its probability. Waiting times depend on the seed and the position alone, so a drafter can compute them. It
then expects not the most probable tokens but those that will arrive first if its own probabilities are right. As these
are not quite right, a token's chance is its speed, probability over waiting time, as a share of all speeds: that is the
chance that it wins if the logarithms of the target's probabilities were off by standard Gumbel noise. As in the race,
blocks of the vocabulary come first, and then the tokens of a block.

Only `match` allows foresight. `match` emits the target's own draw whatever the tree holds, so a tree may depend on the
very noise that will judge it. Other rules compare the draft with the target, and must judge it by noise that the draft
does not depend on.

Daliri, Musco and Suresh, "Coupling without Communication and Drafter-Invariant Speculative Decoding" (arXiv
2408.07978), let a chain share the noise of its target. Here whole trees are ranked by it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from branchwise.core.rng import GAMMA, mix, mix_int, signed, spaced, stream_of
from branchwise.core.rows import BLOCK
from branchwise.core.sequence import SequenceState

STREAM = stream_of("verify", "token", 0)
"""the part of a key that the target's draws have in common"""
COLDEST = 0.02
"""the lowest temperature at which foresight is used; below it the noise hardly changes what is drawn"""


def dice_of(sequence: SequenceState) -> int:
    """The number that all keys of a text's draws are derived from."""
    return signed(mix_int(mix_int(sequence.rng_seed) + STREAM))


def temperature_of(sequence: SequenceState) -> float:
    """The temperature of a text; 0 if it is too low for foresight."""
    temperature = sequence.sampling.temperature
    return temperature if temperature >= COLDEST else 0.0


def keys_of(dice: Tensor, positions: Tensor) -> Tensor:
    """The keys of the draws in these positions."""
    return mix(dice + positions.long() * GAMMA)


def waits(keys: Tensor, names: Tensor) -> Tensor:
    """(…, names): the waiting times of the runners `names`, in the draws with these `keys` (…,)."""
    bits = (mix(keys[..., None] + spaced(names)) >> 41) & 0x7FFFFF  # 23 bits decide: float32 has no more
    return -torch.log((bits.float() + 0.5) * 2.0**-23)


def foreseen(
    logits: Tensor, names: Tensor, keys: Tensor, sampled: Tensor, extra: Tensor, known: Tensor, vocabulary: int
) -> Tensor:
    """(batch, rows, tokens + more): the logarithm of each token's chance to be drawn after each row.

    `logits` (batch, rows, tokens) are those of the draft, at the temperature of each text, for the tokens `names`
    (tokens,). `extra` (batch, rows, more) are the logits of further tokens `known` (batch, more) of each text, -1 for
    none; their chances come last. `keys` (batch, rows) are the keys of the draws. `sampled` (batch,) says which texts
    draw: in the others all tokens wait equally long, so chances are the probabilities of the draft.

    An approximation: the chance of a token within its block ignores the extra tokens of that block, except itself. All
    tokens share one sum.
    """
    top = torch.maximum(logits.amax(-1, keepdim=True), extra.amax(-1, keepdim=True)).clamp_min(-1e30)
    mass, more = (logits - top).exp(), (extra - top).exp().masked_fill((known < 0)[:, None], 0.0)
    blocks = torch.arange(-(-vocabulary // BLOCK), device=logits.device)
    drawn = sampled[:, None, None]
    first = torch.where(drawn, waits(mix(keys), blocks), 1.0)
    second = torch.where(drawn, waits(keys, names), 1.0)
    own = torch.where(drawn, waits(keys, known.clamp_min(0)[:, None]), 1.0)
    owners, theirs = (names // BLOCK).expand_as(mass), (known.clamp_min(0) // BLOCK)[:, None].expand_as(more)
    speed, own_speed = mass / second, more / own
    empty = mass.new_zeros(*mass.shape[:2], len(blocks))
    masses, speeds = empty.scatter_add(2, owners, mass), empty.scatter_add(2, owners, speed)
    whole = (masses / first).sum(-1, keepdim=True) + (more / first.gather(2, theirs)).sum(-1, keepdim=True)
    listed = (masses / first / speeds).nan_to_num(0.0).gather(2, owners) * speed
    beside = masses.gather(2, theirs) + more, speeds.gather(2, theirs) + own_speed
    others = (beside[0] / first.gather(2, theirs) * own_speed / beside[1]).nan_to_num(0.0)
    chances: Tensor = torch.cat([listed, others], dim=2) / whole
    return chances.log()


def keys_behind(sequence: SequenceState, depths: Sequence[int]) -> Tensor:
    """(nodes,): the keys of the draws after nodes at these depths of the next tree."""
    return keys_of(torch.tensor(dice_of(sequence)), torch.tensor(depths) + len(sequence.tokens))


def foreseen_probs(probs: Tensor, keys: Tensor) -> Tensor:
    """(nodes, vocabulary): chances to be drawn after nodes, given the distributions of a draft and the keys."""
    device, keys = probs.device, keys.to(probs.device, non_blocking=True)
    names, none = torch.arange(probs.shape[1], device=device), probs.new_zeros(1, len(probs), 1)
    nobody, sampled = torch.full((1, 1), -1, device=device), torch.ones(1, dtype=torch.bool, device=device)
    return foreseen(probs.log()[None], names, keys[None], sampled, none, nobody, probs.shape[1])[0, :, :-1].exp()
