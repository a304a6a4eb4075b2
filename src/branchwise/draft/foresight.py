"""What the target will draw, as far as a draft can know it: the noise is there before the distribution is.

A text draws its token in a position by a race (`core.rng`): every token arrives after a waiting time of its own,
divided by its probability. Waiting times depend on the seed and the position alone, so a drafter can look at them, and
expect not the tokens that are probable but those that will arrive first if it is right about their probabilities. As it
is not quite right, a token's chance is its speed, probability over waiting time, as a share of all speeds: that is the
chance that it wins if the logarithms of the target's probabilities were off by standard Gumbel noise. As in the race,
blocks of the vocabulary come first, and then the tokens of a block.

Only `match` allows it. What it emits is the target's own draw whatever the tree holds, so that a tree may depend on the
very noise that will judge it. Other rules compare the draft with the target and must judge it by noise that it does not
know.

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
"""at lower temperatures the noise decides nothing that a draft could be right about"""


def dice_of(sequence: SequenceState) -> int:
    """What all keys of a text's draws come from."""
    return signed(mix_int(mix_int(sequence.rng_seed) + STREAM))


def temperature_of(sequence: SequenceState) -> float:
    """That of the draws of a text; 0 where it draws nothing, or next to nothing."""
    temperature = sequence.sampling.temperature
    return temperature if temperature >= COLDEST else 0.0


def keys_of(dice: Tensor, positions: Tensor) -> Tensor:
    """Those of the draws in these positions."""
    return mix(dice + positions.long() * GAMMA)


def waits(keys: Tensor, names: Tensor) -> Tensor:
    """(…, names): the waiting times of runners with these names, by the draws (…,) that they belong to."""
    bits = (mix(keys[..., None] + spaced(names)) >> 41) & 0x7FFFFF  # those that decide: float32 has no more
    return -torch.log((bits.float() + 0.5) * 2.0**-23)


def foreseen(
    logits: Tensor, names: Tensor, keys: Tensor, sampled: Tensor, extra: Tensor, known: Tensor, vocabulary: int
) -> Tensor:
    """(batch, rows, tokens + more): the logarithm of each token's chance to be drawn behind each row.

    `logits` (batch, rows, tokens) of the draft for the tokens of these `names` (tokens,), at the temperature of each
    text; behind them come the `extra` logits (batch, rows, more) of tokens that each text alone `known` (batch, more),
    -1 for none, names. `keys` (batch, rows) are those of the draws, `sampled` (batch,) whether there are any: without,
    all wait equally long, and chances are the probabilities of the draft.

    The extra tokens of a block do not know of each other, and the others do not know of them; all share one sum.
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
    """(nodes,): the keys of the draws behind nodes at these depths of the next tree."""
    return keys_of(torch.tensor(dice_of(sequence)), torch.tensor(depths) + len(sequence.tokens))


def foreseen_probs(probs: Tensor, keys: Tensor) -> Tensor:
    """(nodes, vocabulary): chances to be drawn behind nodes, by their distributions in a draft and these keys."""
    device, keys = probs.device, keys.to(probs.device, non_blocking=True)
    names, none = torch.arange(probs.shape[1], device=device), probs.new_zeros(1, len(probs), 1)
    nobody, sampled = torch.full((1, 1), -1, device=device), torch.ones(1, dtype=torch.bool, device=device)
    return foreseen(probs.log()[None], names, keys[None], sampled, none, nobody, probs.shape[1])[0, :, :-1].exp()
