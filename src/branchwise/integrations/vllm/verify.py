"""Verification inside vLLM: the replacement of its `rejection_sample`.

A batch has three kinds of requests. A greedy request follows the argmax. A request whose chain was drawn, with q, is
verified as a block (`verify/block.py`). For any other request, vLLM's own sampler draws tokens from the target, and the
chain is kept as long as it agrees with them (`match`), so every emitted token is the target's own draw.

vLLM draws the token after a whole chain before it verifies. So after the last node the distribution is certain of that
token, and a verifier that gets there picks it.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence

import torch
from torch import Tensor

from branchwise.core.batch import TreeBatch
from branchwise.core.rng import Chance, SeededChance, mix_int
from branchwise.core.rows import row_sum
from branchwise.core.sampling import one_hot
from branchwise.core.topology import chain_topology
from branchwise.core.tree import DraftTree, Draw
from branchwise.verify.block import Block

NOTHING = -1
"""vLLM's placeholder after the tokens of a request"""

Seeds = Mapping[int, tuple[int, int]]
"""request -> its seed, and the position of the first token that is verified"""
NO_SEEDS: Seeds = {}
Draws = Callable[[Tensor, dict[int, torch.Generator]], Tensor]
"""draws a token for every row of logits (rows, vocabulary), with the given generators for some rows"""


def generator_seed(seed: int, position: int) -> int:
    """The seed of the draw at a position of a text. It depends on nothing else, so drafts and batch cannot change what
    a seeded request writes."""
    return mix_int(mix_int(seed) + position + 1) >> 1


def generator_at(seed: int, position: int, device: torch.device) -> torch.Generator:
    return torch.Generator(device).manual_seed(generator_seed(seed, position))


def verify(
    drafts: Tensor,
    lengths: Sequence[int],
    logits: Tensor,
    bonus: Tensor,
    *,
    q: Tensor | None = None,
    drawn: Sequence[bool] = (),
    greedy: Tensor | bool = True,
    seeds: Seeds = NO_SEEDS,
    draws: Draws | None = None,
    chance: Callable[[Tensor], Chance] | None = None,
) -> Tensor:
    """(batch, longest + 1) int32: the tokens that every request emits, then `NOTHING`.

    `drafts` (rows,) are the chains one after another, of these `lengths`. `logits` (rows, vocabulary) judge the drafted
    tokens, after all warping. `bonus` (batch,) are the tokens after whole chains. `q` (rows, vocabulary) is valid for
    requests that are `drawn`. `greedy` (batch,) may be True or False for all. `chance` makes the randomness of the
    requests (n,) that are verified as blocks.
    """
    layout = Layout(lengths, drafts.device)
    taken = _taken(logits, layout, greedy, seeds, draws)
    out = layout.emitted(drafts, taken, bonus)
    blocks = [request for request, one in enumerate(drawn) if one and lengths[request]]
    if q is None or greedy is True or not blocks:
        return out
    chosen = torch.tensor(blocks)
    found = verify_blocks(drafts, lengths, logits, q, bonus, blocks, (chance or fresh_chance(seeds, drafts))(chosen))
    chosen = chosen.to(drafts.device)
    rows = torch.full_like(out[chosen], NOTHING)
    rows[:, : found.shape[1]] = found.to(rows.dtype)
    out[chosen] = rows if isinstance(greedy, bool) else torch.where(greedy[chosen, None], out[chosen], rows)
    return out


def fresh_chance(seeds: Seeds, like: Tensor) -> Callable[[Tensor], Chance]:
    """The randomness of one step. For a seeded request it comes from its seed and position, for others from torch's
    generator, whose state is the same on all ranks."""

    def chance(requests: Tensor) -> Chance:
        fresh = torch.randint(1 << 62, (len(requests),), device=like.device)
        for row, request in enumerate(requests.tolist()):
            if request in seeds:
                fresh[row] = generator_seed(*seeds[request])
        return SeededChance(fresh, torch.zeros_like(fresh))

    return chance


class Layout:
    """Where the chains of a batch lie in a flat tensor of rows."""

    def __init__(self, lengths: Sequence[int], device: torch.device) -> None:
        self.lengths = torch.tensor(lengths, dtype=torch.long)
        self.longest = max(lengths, default=0)
        ends = self.lengths.cumsum(0)
        self.starts = ends - self.lengths
        owner = torch.repeat_interleave(torch.arange(len(lengths)), self.lengths)
        self.places = (torch.arange(len(owner)) - self.starts[owner]).to(device)
        """(rows,): the place of each row in its chain"""
        self.owner = owner.to(device)
        """(rows,): the request of each row"""

    def emitted(self, drafts: Tensor, taken: Tensor, bonus: Tensor) -> Tensor:
        """The emitted tokens if every request takes the tokens `taken` (rows,) while its drafts agree."""
        lengths = self.lengths.to(drafts.device)
        out = torch.full((len(lengths), self.longest + 1), NOTHING, dtype=torch.int32, device=drafts.device)
        agrees = torch.zeros(len(lengths), self.longest + 1, dtype=torch.bool, device=drafts.device)
        agrees[self.owner, self.places] = drafts == taken
        out[self.owner, self.places] = taken.to(out.dtype)
        out.scatter_(1, lengths[:, None], bonus[:, None].to(out.dtype))
        kept = agrees.long().cumprod(dim=1).sum(dim=1)
        return out.masked_fill_(torch.arange(self.longest + 1, device=out.device) > kept[:, None], NOTHING)


def _taken(logits: Tensor, layout: Layout, greedy: Tensor | bool, seeds: Seeds, draws: Draws | None) -> Tensor:
    """(rows,): the token that the target takes at every row."""
    if greedy is True or not len(logits):
        return logits.argmax(dim=-1)
    assert draws is not None, "sampled requests need a sampler"
    generators = {
        int(layout.starts[request]) + place: generator_at(seed, position + place, logits.device)
        for request, (seed, position) in seeds.items()
        for place in range(int(layout.lengths[request]))
    }
    drawn = draws(logits, generators).to(torch.long)
    return drawn if isinstance(greedy, bool) else torch.where(greedy[layout.owner], logits.argmax(dim=-1), drawn)


class ChainProbs:
    """The target's distributions along chains that lie one after another; after a whole chain comes its bonus token."""

    greedy = False
    together = False

    def __init__(self, logits: Tensor, starts: Tensor, lengths: Tensor, bonus: Tensor) -> None:
        """`logits` (rows, vocabulary); `starts`, `lengths` and `bonus` (batch,)."""
        self.logits, self.starts, self.lengths, self.bonus = logits, starts, lengths, bonus
        self.lazy = logits.device.type == "cpu"

    def at(self, nodes: Tensor) -> Tensor:
        wide = nodes if nodes.ndim == 2 else nodes[:, None]
        places = self.starts[:, None] + torch.minimum(wide, self.lengths[:, None] - 1)
        probs = self.logits[places].softmax(dim=-1, dtype=torch.promote_types(self.logits.dtype, torch.float32))
        probs = probs / row_sum(probs)[..., None].to(probs.dtype)
        behind = wide == self.lengths[:, None]
        if not self.lazy or bool(behind.any()):
            certain = one_hot(self.bonus, probs.shape[-1]).to(probs.dtype)[:, None]
            probs = torch.where(behind[..., None], certain, probs)
        return probs if nodes.ndim == 2 else probs[:, 0]

    def best(self, nodes: Tensor) -> Tensor:
        return self.at(nodes).argmax(dim=-1)


def verify_blocks(
    drafts: Tensor,
    lengths: Sequence[int],
    logits: Tensor,
    q: Tensor,
    bonus: Tensor,
    requests: Sequence[int],
    chance: Chance,
) -> Tensor:
    """(requests, longest + 1): what these requests emit by block verification; arguments as in `verify`."""
    ends = torch.tensor(lengths, dtype=torch.long).cumsum(0).tolist()
    device, chosen = drafts.device, torch.tensor(requests)
    trees = []
    for request in requests:
        rows, last = slice(ends[request] - lengths[request], ends[request]), lengths[request]
        tokens = torch.nn.functional.pad(drafts[rows].to(torch.long), (1, 0))
        trees.append(DraftTree(tokens, chain_topology(last + 1).parents, Draw.PATHS, q[rows], (last,)))
    sizes = torch.tensor(lengths)[chosen].to(device)
    starts = torch.tensor(ends)[chosen].to(device) - sizes
    behind = bonus[chosen.to(device)].to(torch.long)
    batch = TreeBatch(trees, device)
    verdicts = Block()(batch, ChainProbs(logits, starts, sizes, behind), chance)
    kept = (verdicts.paths >= 0).sum(dim=1) - 1
    out = torch.nn.functional.pad(batch.tokens[:, 1:], (0, 1))
    out.scatter_(1, kept[:, None], verdicts.tokens[:, None])
    return out.masked_fill_(torch.arange(out.shape[1], device=device) > kept[:, None], NOTHING)
