"""Distributions over a batch of trees: the right row of each tree, after the right path."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from branchwise.core.batch import TreeBatch
from branchwise.core.sampling import Context, SamplingParams, adjust, warp
from branchwise.core.sequence import SequenceState
from branchwise.core.target_probs import WarpedProbs, all_at_once, settled
from branchwise.core.tree import DraftTree
from tests.strategies import trees

VOCABULARY = 4


def random_logits(batch: TreeBatch, seed: int = 0) -> Tensor:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(len(batch), batch.nodes, VOCABULARY, generator=generator)


def sequences_for(batch: Sequence[DraftTree], params: Sequence[SamplingParams]) -> list[SequenceState]:
    """A sequence before each tree, ending in its root: two tokens of prompt, then an output of its own length."""
    found = []
    for row, (tree, sampling) in enumerate(zip(batch, params, strict=True)):
        sequence = SequenceState([row % VOCABULARY, 1], sampling)
        sequence.tokens += [*range(row), int(tree.tokens[0])]
        found.append(sequence)
    return found


PARAMS = [
    SamplingParams(),
    SamplingParams(temperature=0.7, top_p=0.8),
    SamplingParams(temperature=1.0, repetition_penalty=1.7, frequency_penalty=0.5),
    SamplingParams(presence_penalty=2.0),
    SamplingParams(temperature=1.3, logit_bias={2: 1.5}),
]
batches = st.lists(st.tuples(trees(VOCABULARY), st.sampled_from(PARAMS)), min_size=1, max_size=4)


@given(batches, st.data())
def test_a_row_is_the_law_after_its_node_and_that_node_s_path(
    batch: list[tuple[DraftTree, SamplingParams]], data: st.DataObject
) -> None:
    drafted, params = (list(column) for column in zip(*batch, strict=True))
    sequences = sequences_for(drafted, params)
    tree_batch = TreeBatch(drafted)
    logits = random_logits(tree_batch)
    probs = WarpedProbs(logits, tree_batch, sequences)
    nodes = [data.draw(st.integers(0, len(tree) - 1)) for tree in drafted]
    rows, best = probs.at(torch.tensor(nodes)), probs.best(torch.tensor(nodes))
    for row, (tree, node, sequence) in enumerate(zip(drafted, nodes, sequences, strict=True)):
        below, at = [], node
        while at > 0:
            below.insert(0, int(tree.tokens[at]))
            at = tree.parents[at]
        context = Context(sequence.tokens + below, sequence.prompt_length)
        alone = logits[row, node][None]
        assert torch.equal(rows[row], warp(alone, [sequence.sampling], [context])[0])
        assert best[row] == adjust(alone, [sequence.sampling], [context]).argmax()


def test_siblings_do_not_see_each_other() -> None:
    # root 0 with children 1 and 2, and 3 below 2: a repeated token is punished only below itself.
    tree = DraftTree(torch.tensor([0, 1, 2, 3]), (-1, 0, 0, 2))
    sequence = SequenceState([0], SamplingParams(presence_penalty=1.0))
    logits = torch.zeros(1, 4, VOCABULARY)
    probs = WarpedProbs(logits, TreeBatch([tree]), [sequence])
    seen: list[list[float]] = []
    for node in range(4):
        context = probs._contexts(torch.tensor([node]))
        seen.append(adjust(logits[:, node], [sequence.sampling], context)[0].tolist())
    assert seen == [[0, 0, 0, 0], [0, -1, 0, 0], [0, 0, -1, 0], [0, 0, -1, -1]]


def test_the_root_is_penalised_once_it_is_output() -> None:
    sequence = SequenceState([3, 0], SamplingParams(frequency_penalty=1.0))
    logits = torch.tensor([[[0.5, 0.4, 0.0, 0.0]]])
    assert WarpedProbs(logits, TreeBatch([DraftTree.root(0)]), [sequence]).best(torch.tensor([0])).tolist() == [0]
    sequence.tokens.append(0)
    assert WarpedProbs(logits, TreeBatch([DraftTree.root(0)]), [sequence]).best(torch.tensor([0])).tolist() == [1]


def test_processors_run_only_for_the_rows_that_are_read() -> None:
    calls: list[list[int]] = []

    def watch(tokens: Sequence[int], row: Tensor) -> Tensor:
        calls.append(list(tokens))
        return row

    tree = DraftTree.chain([7, 8, 9])
    sequence = SequenceState([5, 7], SamplingParams(processors=(watch,)))
    probs = WarpedProbs(torch.zeros(1, 3, VOCABULARY), TreeBatch([tree]), [sequence])
    assert calls == []
    probs.at(torch.tensor([1]))
    assert calls == [[5, 7, 8]]
    probs.best(torch.tensor([2]))
    assert calls == [[5, 7, 8], [5, 7, 8, 9]]


def test_padding_rows_do_not_leak_into_shorter_trees() -> None:
    batch = [DraftTree.root(1), DraftTree.chain([1, 2, 3])]
    tree_batch = TreeBatch(batch)
    logits = random_logits(tree_batch)
    logits[0, 1:] = float("nan")  # what a pass leaves in padding means nothing
    probs = WarpedProbs(logits, tree_batch, sequences_for(batch, PARAMS[1:3]))
    assert probs.at(torch.tensor([0, 2])).isfinite().all()


def test_laws_are_greedy_only_if_all_are() -> None:
    batch = [DraftTree.root(1)] * 2
    tree_batch = TreeBatch(batch)
    greedy, sampled = SamplingParams(), SamplingParams(temperature=1.0)
    assert WarpedProbs(random_logits(tree_batch), tree_batch, sequences_for(batch, [greedy, greedy])).greedy
    assert not WarpedProbs(random_logits(tree_batch), tree_batch, sequences_for(batch, [greedy, sampled])).greedy


def test_a_walk_is_settled_when_every_tree_is_done_and_never_waits_for_a_device() -> None:
    batch = TreeBatch([DraftTree.root(1)] * 2)
    probs = WarpedProbs(random_logits(batch), batch, sequences_for(batch.trees, PARAMS[:2]))
    assert settled(probs, torch.tensor([True, True]))
    assert not settled(probs, torch.tensor([True, False]))
    away = WarpedProbs(random_logits(batch).to("meta"), batch, sequences_for(batch.trees, PARAMS[:2]))
    assert not settled(away, torch.ones(2, dtype=torch.bool, device="meta"))


@given(st.lists(trees(), min_size=5, max_size=5), st.integers(0, 2**32 - 1))
def test_several_rows_of_a_tree_are_the_rows_one_by_one(batch: list[DraftTree], seed: int) -> None:
    tree_batch = TreeBatch(batch)
    probs = WarpedProbs(random_logits(tree_batch), tree_batch, sequences_for(batch, PARAMS))
    nodes = torch.randint(min(map(len, batch)), (len(batch), 3), generator=torch.Generator().manual_seed(seed))
    together = probs.at(nodes)
    assert together.shape == (len(batch), 3, VOCABULARY)
    for column in range(3):
        assert torch.equal(together[:, column], probs.at(nodes[:, column]))


def test_a_rule_that_reads_every_row_has_them_in_one_go_however_many_there_are() -> None:
    batch = TreeBatch([DraftTree.root(1)] * 2)
    probs = WarpedProbs(random_logits(batch), batch, sequences_for(batch.trees, PARAMS[1:2] * 2))
    assert all_at_once(probs) is probs
    probs.lazy, probs.together = False, False
    every, nodes = all_at_once(probs), torch.zeros(2, dtype=torch.long)
    assert every.together
    assert not probs.together
    assert torch.equal(every.at(nodes), probs.at(nodes))
    assert "_all" in vars(every)
    assert "_all" not in vars(probs)


def test_a_padded_batch_on_a_device_counts_a_text_that_has_nothing_to_add() -> None:
    # A batch is padded with its last text, whose tokens were counted in the row before.
    batch = TreeBatch([DraftTree.chain([0, 1, 2])] * 3)
    sequences = sequences_for(batch.trees[:1], PARAMS[2:3])
    logits = random_logits(batch)
    host, device = (WarpedProbs(logits, batch, sequences) for _ in range(2))
    device.lazy = False
    for node in range(3):
        nodes = torch.full((3,), node)
        torch.testing.assert_close(device.at(nodes), host.at(nodes))
