"""The best tokens by kernels are those of logits in memory."""

from __future__ import annotations

import pytest
import torch

pytestmark = pytest.mark.usefixtures("interpreter")


@pytest.mark.parametrize(
    ("batch", "rows", "width", "tokens", "extra", "count"),
    [(1, 1, 48, 100, 5, 3), (1, 8, 64, 300, 70, 8), (3, 5, 24, 64, 1, 1), (2, 40, 32, 130, 20, 4)],
)
def test_best_tokens_are_those_of_logits_in_memory(
    batch: int, rows: int, width: int, tokens: int, extra: int, count: int
) -> None:
    kernels = pytest.importorskip("branchwise.cuda.best_tokens")
    rng = torch.Generator().manual_seed(tokens)
    table = torch.randn(tokens, width, generator=rng)
    whole = torch.randn(2 * batch * rows, width + 5, generator=rng)  # rows hold more than what is read
    chosen = torch.randint(len(whole), (batch, rows), generator=rng)
    states = torch.nn.functional.rms_norm(whole[chosen][..., :width], (width,), eps=1e-5)
    slots = torch.randperm(batch + 2, generator=rng)[:batch]
    more = torch.randn(batch + 2, extra, width, generator=rng)
    known = torch.randint(-1, 2, (batch + 2, extra), generator=rng)
    own = torch.einsum("brd,bed->bre", states, more[slots]).masked_fill((known[slots] < 0)[:, None], -torch.inf)
    logits = torch.cat([states @ table.T, own], dim=-1)
    expected = logits.topk(count, dim=-1)
    device = torch.device("cuda" if torch.cuda.is_available() else "cpu")
    whole, chosen, table, more, known, slots = (part.to(device) for part in (whole, chosen, table, more, known, slots))
    found = kernels.best_tokens(whole, chosen, 1e-5, table, more, known, slots, count)
    values, places, total = (part.cpu() for part in found)
    torch.testing.assert_close(values, expected.values, rtol=1e-4, atol=1e-5)
    assert torch.equal(places.long(), expected.indices)
    torch.testing.assert_close(total, logits.logsumexp(-1), rtol=1e-4, atol=1e-5)
