"""The likeliest tokens by kernels are those of logits in memory."""

from __future__ import annotations

import pytest
import torch

from branchwise.draft.foresight import foreseen, keys_of

pytestmark = pytest.mark.usefixtures("interpreter")


@pytest.mark.parametrize("warmth", [0.0, 0.7, 1.0])
@pytest.mark.parametrize(
    ("batch", "rows", "width", "tokens", "extra", "count"),
    [
        (1, 1, 48, 100, 5, 3),
        (1, 8, 64, 300, 70, 8),
        (3, 5, 24, 64, 1, 1),
        (2, 40, 32, 130, 20, 4),
        (1, 4, 8, 1400, 9, 3),
        (1, 40, 16, 64, 1, 9),
    ],
)
def test_best_tokens_are_those_of_logits_in_memory(
    batch: int, rows: int, width: int, tokens: int, extra: int, count: int, warmth: float
) -> None:
    """Tokens of few blocks of the vocabulary and of many, beside each other and alone; texts that draw nothing; and
    fewer tokens of a prompt than are wanted."""
    kernels = pytest.importorskip("branchwise.cuda.heads.best_tokens")
    rng = torch.Generator().manual_seed(tokens)
    vocabulary, depth = 1500, 2
    names = torch.cat([torch.randperm(512, generator=rng), 512 + torch.randperm(900, generator=rng)])[:tokens]
    names = names.sort().values
    table = torch.randn(tokens, width, generator=rng)
    whole = torch.randn(2 * batch * rows, width + 5, generator=rng)  # rows hold more than what is read
    chosen = torch.randint(len(whole), (batch, rows), generator=rng)
    states = torch.nn.functional.rms_norm(whole[chosen][..., :width], (width,), eps=1e-5)
    slots = torch.randperm(batch + 2, generator=rng)[:batch]
    lengths = torch.randint(1, 90, (batch,), generator=rng, dtype=torch.int32)
    more = torch.randn(batch + 2, extra, width, generator=rng)
    known = torch.randint(-100, vocabulary, (batch + 2, extra), generator=rng).clamp_min(-1)
    dice = torch.randint(-(1 << 62), 1 << 62, (batch + 2,), generator=rng)
    temperatures = torch.where(torch.arange(batch + 2) % 2 == slots[0] % 2, warmth, 0.0)
    own = torch.einsum("brd,bed->bre", states, more[slots]).masked_fill((known[slots] < 0)[:, None], -torch.inf)
    scale = torch.where(temperatures > 0, temperatures, 1.0)[slots, None, None]
    keys = keys_of(dice[slots], lengths + depth)[:, None].expand(-1, rows)
    logits = states @ table.T / scale
    chances = foreseen(logits, names, keys, temperatures[slots] > 0, own / scale, known[slots], vocabulary)
    if not warmth:
        torch.testing.assert_close(chances, torch.cat([logits, own], dim=-1).log_softmax(dim=-1), rtol=1e-4, atol=1e-4)
    expected = chances.topk(count, dim=-1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    whole, chosen, table, more, known, slots, lengths, names, dice, temperatures = (
        part.to(device) for part in (whole, chosen, table, more, known, slots, lengths, names, dice, temperatures)
    )
    parts = kernels.Parts.of(names, vocabulary)
    rows = kernels.Summed.of(whole[:, :width])
    found = kernels.best_tokens(
        rows, chosen, 1e-5, table, parts, more, known, slots, lengths, (dice, temperatures), depth, count
    )
    values, places = (part.cpu() for part in found)
    torch.testing.assert_close(values, expected.values, rtol=1e-4, atol=1e-4)
    assert torch.equal(places.long(), expected.indices)
