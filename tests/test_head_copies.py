"""Copies in the trees of a head: what they are, how they join what the head proposes, and that they change no text."""

from __future__ import annotations

import math
import random

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from branchwise.backends.transformers.target import TransformersTarget
from branchwise.core.sampling import SamplingParams
from branchwise.draft import build_drafter, build_policy
from branchwise.draft.head.drafter import HeadDrafter
from branchwise.draft.head.trees.copies import HITS, NOTHING, REACH, Copy, copied, with_copy
from branchwise.engine import Engine, Generation, Request
from branchwise.errors import UsageError
from branchwise.verify import VERIFIERS
from tests.conformance.architectures import build, served
from tests.heads import random_head

TEXTS = st.lists(st.integers(0, 2), min_size=1, max_size=40)


def by_hand(text: list[int], count: int) -> tuple[int, list[int]]:
    """How many tokens agree, up to the reach, and what followed the last place where so many do."""
    best, place = 0, 0
    for end in range(len(text) - 1):
        agreeing = 0
        while agreeing < min(REACH, end + 1) and text[end - agreeing] == text[-1 - agreeing]:
            agreeing += 1
        if agreeing >= best:
            best, place = agreeing, end
    longer = list(text) if best else [0] * (place + 1 + count)
    while len(longer) < place + 1 + count:
        longer.append(longer[len(longer) - (len(text) - 1 - place)])
    return best, longer[place + 1 : place + 1 + count]


@given(texts=st.lists(TEXTS, min_size=1, max_size=3), count=st.integers(1, 9))
def test_a_copy_is_what_followed_the_longest_match(texts: list[list[int]], count: int) -> None:
    cells = max(map(len, texts)) + 3
    history = torch.full((len(texts), cells), 1)  # behind a text stands what was drafted once
    for row, text in enumerate(texts):
        history[row, : len(text)] = torch.tensor(text)
    found = copied(history, torch.tensor([len(text) for text in texts]), count)
    for text, tokens, values in zip(texts, found.tokens.tolist(), found.values.tolist(), strict=True):
        agreed, wanted = by_hand(text, count)
        if not agreed:
            assert values == pytest.approx([NOTHING] * count)
            continue
        assert tokens == wanted
        hits = [HITS[min(agreed + step, REACH) - 1] for step in range(count)]
        assert values == pytest.approx([math.log(math.prod(hits[: step + 1])) for step in range(count)], rel=1e-4)


def paths_of(values: list[float], tokens: list[int], parents: list[int]) -> dict[tuple[int, ...], float]:
    """The value of every path; a path that comes twice would be told twice."""
    found: dict[tuple[int, ...], float] = {}
    names: dict[int, tuple[int, ...]] = {-1: ()}
    for number, (value, token, parent) in enumerate(zip(values, tokens, parents, strict=True)):
        if value > NOTHING / 2:
            assert parent < number
            names[number] = (*names[parent], token)
            assert names[number] not in found
            found[names[number]] = value
    return found


@given(seed=st.integers(0, 10**6), depth=st.integers(1, 4), count=st.integers(1, 7))
def test_a_copy_joins_the_nodes_that_it_shares_with_the_head(seed: int, depth: int, count: int) -> None:
    rng = random.Random(seed)
    values, tokens, parents, level = [], [], [], [(-1, 0.0)]
    for _ in range(depth):
        below = []
        for parent, value in level:
            for token in rng.sample(range(3), rng.randint(1, 2)):
                values.append(value - rng.random() - 0.01)
                tokens.append(token)
                parents.append(parent)
                below.append((len(values) - 1, values[-1]))
        level = below
    branch = [rng.randrange(3) for _ in range(count)]
    falling = torch.tensor([rng.random() + 0.01 for _ in branch]).cumsum(0)
    copy = Copy(torch.tensor([branch]), -falling[None])
    proposed = torch.tensor([values]), torch.tensor([tokens]), torch.tensor([parents])
    found = paths_of(*(part[0].tolist() for part in with_copy(proposed, copy, depth)))
    wanted = paths_of(values, tokens, parents)
    for step in range(count):
        path = tuple(branch[: step + 1])
        wanted[path] = max(wanted.get(path, -math.inf), -float(falling[step]))
    assert found == pytest.approx(wanted)
    for path, value in found.items():  # so that the best nodes are a tree
        assert len(path) == 1 or value <= found[path[:-1]]


def written(
    target: TransformersTarget, copies: int | None, temperature: float, prompts: list[tuple[int, ...]]
) -> list[Generation]:
    drafter = build_drafter("none")
    if copies is not None:
        tree = build_policy("topk:12,depth=2,width=3")
        drafter = HeadDrafter(random_head(target.info, table=90), tree=tree, copies=copies)
    engine = Engine(target, drafter, VERIFIERS.build("match"))
    sampling = SamplingParams(temperature=temperature, seed=4)
    texts = [engine.submit(Request(prompt, sampling, max_new_tokens=80)) for prompt in prompts]
    while engine.busy:
        engine.step()
    return texts


@pytest.mark.parametrize("temperature", [0.0, 0.8])
def test_copies_change_no_text_and_reach_deeper_than_the_head(temperature: float) -> None:
    model = build(served()["llama"])
    target = TransformersTarget(model, slots=2)
    prompts = [(5, 6, 7, 8, 9) * 6, (9, 5), tuple(range(30))]  # more texts than slots
    plain, without, found = (written(target, copies, temperature, prompts) for copies in (None, 0, 9))
    assert (
        [text.token_ids for text in found] == [text.token_ids for text in without] == [text.token_ids for text in plain]
    )
    if temperature == 0:  # a small model soon repeats itself
        assert sum(text.stats.steps for text in found) < sum(text.stats.steps for text in without)
        assert max(len(text.stats.accepted_per_depth) for text in found) == 9
        assert any(text.stats.accepted_per_depth[5] for text in found)


def test_fewer_than_no_copies_are_refused() -> None:
    target = TransformersTarget(build(served()["llama"]), slots=1)
    with pytest.raises(UsageError, match="copies=-1"):
        HeadDrafter(random_head(target.info, table=90), copies=-1)
