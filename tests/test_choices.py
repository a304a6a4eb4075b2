"""What a device knows of texts: counted step by step it is what counting all of their tokens gives."""

from __future__ import annotations

import gc
import random
import weakref
from collections import Counter
from collections.abc import Sequence

import pytest
import torch

from branchwise.core.sampling import SamplingParams
from branchwise.core.sequence import SequenceState
from branchwise.cuda.choices import IN_PROMPT, PARAMETERS, Choices, TokenCounts

VOCABULARY = 7
CPU = torch.device("cpu")
PENALISED = SamplingParams(frequency_penalty=0.5, seed=1)


def text(*prompt: int, output: Sequence[int] = (), sampling: SamplingParams = PENALISED) -> SequenceState:
    made = SequenceState(list(prompt), sampling)
    made.tokens += output
    return made


def counted_anew(text: SequenceState) -> list[int]:
    written, prompt = Counter(text.output), set(text.tokens[: text.prompt_length])
    return [written[token] + IN_PROMPT * (token in prompt) for token in range(VOCABULARY)]


def check(counts: TokenCounts, texts: Sequence[SequenceState]) -> None:
    rows = counts.bring(texts)
    assert len(set(rows.values())) == len(texts)
    for one in texts:
        assert counts.table[rows[one]].tolist() == counted_anew(one)


def test_tokens_are_counted_in_prompt_and_output() -> None:
    counts = TokenCounts(2, VOCABULARY, CPU)
    one = text(3, 3, 5, output=[5, 6, 6])
    row = counts.bring([one])[one]
    assert counts.table[row].tolist() == [0, 0, 0, IN_PROMPT, 0, IN_PROMPT + 1, 2]


@pytest.mark.parametrize("seed", range(5))
def test_counts_are_right_whoever_joins_leaves_and_comes_back(seed: int) -> None:
    """More texts than rows, in any order; some are cancelled for good, some are forks of others."""
    rng = random.Random(seed)
    counts = TokenCounts(4, VOCABULARY, CPU)
    texts: list[SequenceState] = []
    for _ in range(80):
        if len(texts) < 2 or rng.random() < 0.3:
            new = text(*(rng.randrange(VOCABULARY) for _ in range(rng.randint(1, 4))))
            if texts and rng.random() < 0.3:
                new.tokens, new.prompt_length = list(texts[0].tokens), texts[0].prompt_length
            texts.append(new)
        if len(texts) > 3 and rng.random() < 0.2:
            texts.pop(rng.randrange(len(texts)))
        check(counts, rng.sample(texts, rng.randint(1, min(4, len(texts)))))
        for one in texts:
            one.tokens += [rng.randrange(VOCABULARY) for _ in range(rng.choice([0, 1, 3]))]


def test_only_new_tokens_go_to_the_device(monkeypatch: pytest.MonkeyPatch) -> None:
    """Also for those beside whom a text leaves, and for one that is away for a while."""
    counts, sent = TokenCounts(3, VOCABULARY, CPU), []
    count = counts._count
    monkeypatch.setattr(counts, "_count", lambda *parts: (sent.append(tuple(map(len, parts))), count(*parts)))
    a, b = text(1, 2, 3), text(4, 5)
    for batch in ([a, b], [b], [a, b], [b, a]):
        check(counts, batch)
        for one in batch:
            one.tokens += [6, 6]
    assert sent == [(2, 5, 0), (0, 0, 2), (0, 0, 2 + 2), (0, 0, 2 + 2)]


def test_a_text_that_was_cut_back_is_counted_anew() -> None:
    counts, one = TokenCounts(1, VOCABULARY, CPU), text(1, 2, output=[3, 4, 4])
    check(counts, [one])
    del one.tokens[3:]
    check(counts, [one])
    one.tokens += [5]
    check(counts, [one])


def test_a_new_text_takes_the_row_of_one_that_is_gone_and_else_of_the_one_longest_unasked() -> None:
    counts = TokenCounts(3, VOCABULARY, CPU)
    texts = [text(number) for number in range(3)]
    rows = counts.bring(texts)
    oldest = rows[texts[1]]
    counts.bring([texts[2], texts[0]])
    new = text(4)
    assert counts.bring([new]) == {new: oldest}
    gone = counts.bring([texts[0]])[texts[0]]
    rows.clear()
    del texts[0]
    another = text(5)
    assert counts.bring([another]) == {another: gone}
    check(counts, [another, new, texts[1]])


def test_an_interrupt_leaves_no_token_counted_twice(monkeypatch: pytest.MonkeyPatch) -> None:
    counts, a, b = TokenCounts(2, VOCABULARY, CPU), text(1, 2), text(3)
    check(counts, [a, b])
    a.tokens += [4, 4]
    count = counts._count

    def interrupted(*parts: object) -> None:
        count(*parts)  # type: ignore[arg-type]
        raise KeyboardInterrupt

    with monkeypatch.context() as patch:
        patch.setattr(counts, "_count", interrupted)
        with pytest.raises(KeyboardInterrupt):
            counts.bring([a, b])
    check(counts, [b, a])


def test_nobody_is_kept_alive_by_being_counted() -> None:
    choices = Choices(2, VOCABULARY, CPU)
    texts = [text(1), text(2)]
    choices.bring(texts)
    gone = weakref.ref(texts[0])
    gc.disable()
    try:
        del texts
        assert gone() is None
    finally:
        gc.enable()


def row_of(choices: Choices, place: int) -> dict[str, float]:
    return dict(zip(PARAMETERS, choices.parameters[place].tolist(), strict=True))


def test_each_text_names_the_row_in_which_it_is_counted() -> None:
    """Texts without a penalty name none, and padding that of the text it repeats."""
    choices, plain = Choices(4, VOCABULARY, CPU), text(1, sampling=SamplingParams(temperature=0.5))
    a, b = text(2), text(3, output=[3])
    for batch in ([a, plain, b], [plain, b, b, b], [a, b], [a, b], [b, a], [a, b, plain, plain]):
        choices.bring(batch)
        for place, one in enumerate(batch):
            found = row_of(choices, place)
            assert found["frequency_penalty"] == one.sampling.frequency_penalty
            if one is plain:
                assert found["counted"] == -1
            else:
                assert choices.counts.table[int(found["counted"])].tolist() == counted_anew(one)
        for one in (a, b):
            one.tokens += [5, 6]


def test_texts_that_nobody_penalises_are_not_counted(monkeypatch: pytest.MonkeyPatch) -> None:
    choices = Choices(2, VOCABULARY, CPU)
    monkeypatch.setattr(choices.counts, "_count", lambda *parts: pytest.fail("somebody counts"))
    for sampling in (SamplingParams(), SamplingParams(temperature=1.0, logit_bias={1: 2.0})):
        for _ in range(2):
            choices.bring([text(1, sampling=sampling), text(2, sampling=sampling)])
