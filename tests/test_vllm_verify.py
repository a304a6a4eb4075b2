"""Verification inside vLLM: exact by enumeration, whatever else is in the batch, and keyed by position where seeded."""

from __future__ import annotations

import pytest
import torch
from torch import Tensor

from branchwise.audit.exact import emitted
from branchwise.audit.instances import Drafts, Instance
from branchwise.core.batch import TreeBatch
from branchwise.core.rng import Chance
from branchwise.core.target_probs import TargetProbs
from branchwise.core.tree import Draw
from branchwise.integrations.vllm.verify import NOTHING, generator_at, verify
from branchwise.verify import Verdicts, Verifier
from branchwise.verify.block import Block


class InVllm(Verifier):
    """A chain that goes through the tensors of vLLM: flat rows of logits, and a bonus that was drawn before."""

    name = "block in vLLM"
    accepts = frozenset({Draw.PATHS})

    def __call__(self, batch: TreeBatch, probs: TargetProbs, chance: Chance) -> Verdicts:
        depth, every = batch.depth, torch.arange(len(batch))
        nodes = torch.arange(depth + 1).expand(len(batch), -1)
        p = probs.at(nodes)
        bonus = chance.pick(p[:, -1], draw=1)
        assert batch.q is not None
        found = verify(
            batch.tokens[:, 1:].flatten(),
            [depth] * len(batch),
            p[:, :-1].flatten(0, 1).log(),
            bonus,
            q=batch.q[:, :depth].flatten(0, 1),
            drawn=[True] * len(batch),
            greedy=False,
            draws=lambda logits, generators: logits.argmax(dim=-1),
            chance=lambda requests: chance,
        )
        kept = (found != NOTHING).sum(dim=1) - 1
        tokens = found[every, kept].long()
        return Verdicts(torch.where(nodes <= kept[:, None], nodes, NOTHING), tokens)


@pytest.mark.parametrize(("depth", "sigma"), [(1, 1.0), (2, 0.3), (2, 2.0), (3, 1.0)])
def test_chains_are_verified_exactly_and_as_far_as_a_block_can(depth: int, sigma: float) -> None:
    drafts = Drafts.of("paths", Instance.random(3, depth, 1, sigma=sigma, seed=(depth, 7)))
    distance, efficiency = emitted(InVllm(), drafts)
    assert distance < 1e-9
    assert efficiency == pytest.approx(emitted(Block(), drafts)[1])


def by_race(logits: Tensor, generators: dict[int, torch.Generator]) -> Tensor:
    """As vLLM samples: an exponential race, with the noise of its generator where a row has one."""
    noise = torch.empty_like(logits).exponential_()
    for row, generator in generators.items():
        noise[row].exponential_(generator=generator)
    return (logits.softmax(dim=-1) / noise).argmax(dim=-1)


def test_greedy_requests_keep_what_agrees_with_the_argmax() -> None:
    logits = torch.eye(6)[[1, 2, 3, 4, 5]] * 9
    found = verify(torch.tensor([1, 2, 0, 4, 5]), [3, 0, 2], logits, torch.tensor([5, 4, 3]))
    assert found.tolist() == [[1, 2, 3, -1], [4, -1, -1, -1], [4, 5, 3, -1]]
    assert found.dtype == torch.int32


def test_a_step_without_drafts_emits_the_bonus() -> None:
    empty = torch.zeros(0, dtype=torch.long), [0, 0], torch.zeros(0, 5), torch.tensor([3, 1])
    assert verify(*empty, greedy=False, draws=by_race).tolist() == [[3], [1]]


def test_the_kinds_of_one_batch_do_not_disturb_each_other() -> None:
    """Greedy, drawn, drawn but greedy, and undrawn: each as it is alone."""
    torch.manual_seed(1)
    lengths, vocabulary = [2, 3, 2, 1, 0], 7
    logits = torch.randn(sum(lengths), vocabulary)
    q = torch.randn(sum(lengths), vocabulary).softmax(dim=-1)
    drafts, bonus = torch.randint(vocabulary, (sum(lengths),)), torch.tensor([1, 2, 3, 4, 5])
    greedy = torch.tensor([True, False, True, False, False])
    seeds = {request: (40 + request, 9) for request in range(5)}
    together = verify(
        drafts, lengths, logits, bonus, q=q, drawn=[False, True, True, False, False], greedy=greedy, seeds=seeds,
        draws=by_race,
    )  # fmt: skip
    start = 0
    for request, length in enumerate(lengths):
        rows = slice(start, start + length)
        alone = verify(
            drafts[rows], [length], logits[rows], bonus[request : request + 1], q=q[rows], drawn=[request == 1],
            greedy=greedy[request : request + 1], seeds={0: seeds[request]}, draws=by_race,
        )  # fmt: skip
        assert together[request, : length + 1].tolist() == alone[0].tolist()
        assert (together[request, length + 1 :] == NOTHING).all()
        start += length


def test_seeded_requests_take_the_same_tokens_whatever_was_drafted() -> None:
    """Noise belongs to positions, so a token is the same in a long draft, in a short one and without any."""
    torch.manual_seed(2)
    logits = torch.randn(4, 50)
    noise = [torch.empty(50).exponential_(generator=generator_at(11, 30 + place, logits.device)) for place in range(4)]
    truth = [int((row.softmax(dim=-1) / waits).argmax()) for row, waits in zip(logits, noise, strict=True)]
    for drafts in ([*truth[:2], 0], truth[:3], [7, 7, 7], truth[:1]):
        found = verify(
            torch.tensor(drafts), [len(drafts)], logits[: len(drafts)], torch.tensor([truth[len(drafts)]]),
            greedy=False, seeds={0: (11, 30)}, draws=by_race,
        )[0]  # fmt: skip
        emitted_tokens = found[found != NOTHING].tolist()
        assert emitted_tokens == truth[: len(emitted_tokens)]


@pytest.mark.parametrize("drawn", [True, False])
def test_emitted_tokens_have_the_law_of_the_target(drawn: bool) -> None:
    """Many requests at once, from float32 logits and torch's own generator."""
    torch.manual_seed(3)
    many, vocabulary = 40_000, 4
    logits, q = torch.tensor([0.5, 0.0, -1.0, 1.0]), torch.tensor([0.4, 0.3, 0.2, 0.1])
    drafts = torch.multinomial(q, many, replacement=True) if drawn else torch.ones(many, dtype=torch.long)
    found = verify(
        drafts, [1] * many, logits.expand(many, -1), torch.zeros(many, dtype=torch.long), q=q.expand(many, -1),
        drawn=[drawn] * many, greedy=False, draws=by_race,
    )  # fmt: skip
    counts = torch.bincount(found[:, 0].long(), minlength=vocabulary).double()
    expected = many * logits.double().softmax(dim=-1)
    assert float(((counts - expected) ** 2 / expected).sum()) < 22  # chi-square, 3 degrees of freedom: p above 6e-5
