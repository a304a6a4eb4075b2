"""Inside transformers' own `generate`: the same output, and refusals by name."""

from __future__ import annotations

import functools
import gc
import weakref
from concurrent.futures import ThreadPoolExecutor

import pytest
import torch
from transformers import LogitsProcessor, LogitsProcessorList, PreTrainedModel, StoppingCriteria

import branchwise
from branchwise.backends.base import TargetInfo
from branchwise.core.sequence import SequenceState
from branchwise.draft.lookup.ngram import NGram
from branchwise.errors import LossyWarning, UsageError
from tests.conformance.architectures import VOCABULARY, build, served

pytestmark = pytest.mark.filterwarnings("ignore:.*generation flags.*")


@pytest.fixture(params=["llama", "gemma3", "gpt2"])
def model(request: pytest.FixtureRequest) -> PreTrainedModel:
    return build(served()[request.param])


def inputs(rows: list[list[int]]) -> dict[str, torch.Tensor]:
    """Rows padded on the left with 0."""
    width = max(map(len, rows))
    ids = [[0] * (width - len(row)) + row for row in rows]
    mask = [[0] * (width - len(row)) + [1] * len(row) for row in rows]
    return {"input_ids": torch.tensor(ids), "attention_mask": torch.tensor(mask)}


def random_rows(lengths: list[int]) -> list[list[int]]:
    return [torch.randint(3, VOCABULARY, (length,)).tolist() for length in lengths]


@pytest.mark.parametrize("drafter", ["none", "ngram:max=2,min=1", None])
def test_greedy_output_equals_generate(model: PreTrainedModel, drafter: str | None) -> None:
    given = inputs(random_rows([9]))
    own = model.generate(**given, max_new_tokens=24, do_sample=False)
    ours = model.generate(
        **given, max_new_tokens=24, do_sample=False, custom_generate=branchwise.hf.generate, drafter=drafter
    )
    assert torch.equal(own, ours)


def test_left_padded_rows_equal_their_rows_alone(model: PreTrainedModel) -> None:
    rows = random_rows([4, 11, 7])
    together = model.generate(
        **inputs(rows), max_new_tokens=16, do_sample=False, custom_generate=branchwise.hf.generate, drafter="ngram"
    )
    for row, output in zip(rows, together, strict=True):
        alone = model.generate(**inputs([row]), max_new_tokens=16, do_sample=False)[0, len(row) :]
        assert output[11 : 11 + len(alone)].tolist() == alone.tolist()
        assert (output[11 + len(alone) :] == 0).all()  # rows that ended early are padded


def test_logits_processors_run_along_each_nodes_path(model: PreTrainedModel) -> None:
    """A penalty on repeats and a minimum length depend on the path; a flat list of drafted tokens would differ."""
    given = inputs(random_rows([8]))
    options = {
        "max_new_tokens": 24,
        "do_sample": False,
        "repetition_penalty": 1.5,
        "no_repeat_ngram_size": 2,
        "min_new_tokens": 20,
    }
    own = model.generate(**given, **options)
    ours = model.generate(
        **given, **options, custom_generate=branchwise.hf.generate, drafter="ngram:max=1,min=1", tree="chain:4"
    )
    assert torch.equal(own, ours)


def test_processors_see_the_padding_of_their_row_as_in_generate() -> None:
    """A minimum length counts it, and a penalty on repeats finds the padding token in it."""
    model = build(served()["llama"])
    given = inputs(random_rows([3, 9]))
    options = {
        "max_new_tokens": 16,
        "do_sample": False,
        "repetition_penalty": 1.5,
        "min_length": 20,
        "eos_token_id": [2, 40],
    }
    own = model.generate(**given, **options)
    ours = model.generate(**given, **options, custom_generate=branchwise.hf.generate, drafter="ngram:max=1,min=1")
    assert torch.equal(own, ours)


def test_sampling_follows_torchs_seed_and_does_not_depend_on_the_drafter() -> None:
    model = build(served()["llama"])
    given = inputs(random_rows([6, 3]))
    options = {"max_new_tokens": 20, "do_sample": True, "temperature": 0.9, "top_k": 12}
    outputs = []
    for drafter in ("none", "ngram:max=2,min=1", "ngram:max=2,min=1"):
        torch.manual_seed(7)
        outputs.append(model.generate(**given, **options, custom_generate=branchwise.hf.generate, drafter=drafter))
    assert torch.equal(outputs[0], outputs[1])
    assert torch.equal(outputs[1], outputs[2])
    assert not torch.equal(
        outputs[2], model.generate(**given, **options, custom_generate=branchwise.hf.generate, drafter="none")
    )


def test_threads_that_share_a_model_do_not_disturb_each_other() -> None:
    model = build(served()["llama"])
    given = inputs(random_rows([4]))
    options = {"max_new_tokens": 30, "do_sample": False, "custom_generate": branchwise.hf.generate}
    expected = model.generate(**given, **options)
    with ThreadPoolExecutor(4) as pool:
        outputs = list(pool.map(lambda _: model.generate(**given, **options), range(8)))
    assert all(torch.equal(output, expected) for output in outputs)
    assert model.config._attn_implementation == "eager"


def test_a_short_answer_to_a_short_prompt_is_served() -> None:
    model = build(served()["llama"])
    output = model.generate(**inputs([[5]]), max_new_tokens=1, do_sample=False, custom_generate=branchwise.hf.generate)
    assert output.shape == (1, 2)


def test_the_model_is_left_as_it_was_found() -> None:
    model = build(served()["llama"])
    given = inputs(random_rows([6]))
    before = model.generate(**given, max_new_tokens=8, do_sample=False)
    implementation, config = model.config._attn_implementation, model.config.to_dict()
    model.generate(**given, max_new_tokens=8, do_sample=False, custom_generate=branchwise.hf.generate)
    assert model.config._attn_implementation == implementation
    assert model.config.to_dict() == config
    assert torch.equal(model.generate(**given, max_new_tokens=8, do_sample=False), before)


def test_tokens_are_reported_as_they_come() -> None:
    model = build(served()["llama"])
    rows = random_rows([5, 2])
    told: list[tuple[int, int]] = []
    output = model.generate(
        **inputs(rows),
        max_new_tokens=10,
        do_sample=False,
        custom_generate=branchwise.hf.generate,
        token_callback=lambda row, token: told.append((row, token)),
    )
    for row in range(2):
        tokens = [token for where, token in told if where == row]
        assert output[row, 5 : 5 + len(tokens)].tolist() == tokens


def test_a_callback_that_raises_leaves_no_sequence_open() -> None:
    class Watched(NGram):
        closed = 0

        def finish(self, sequence: SequenceState) -> None:
            self.closed += 1

    def interrupt(row: int, token: int) -> None:
        raise KeyboardInterrupt

    model, drafter = build(served()["llama"]), Watched()
    with pytest.raises(KeyboardInterrupt):
        model.generate(
            **inputs(random_rows([5, 2])),
            max_new_tokens=10,
            do_sample=False,
            custom_generate=branchwise.hf.generate,
            drafter=drafter,
            token_callback=interrupt,
        )
    assert drafter.closed == 2


class Spelling:
    """The part of a tokenizer that tells one model from another."""

    def get_vocab(self) -> dict[str, int]:
        return {"a": 0}


def test_a_tokenizer_reaches_the_target() -> None:
    class Reading(NGram):
        def bind(self, target: TargetInfo) -> None:
            found.append(target.tokenizer)

    found: list[object] = []
    model, tokenizer = build(served()["llama"]), Spelling()
    options = {"max_new_tokens": 2, "do_sample": False, "drafter": Reading()}
    model.generate(
        **inputs([[5, 6]]), **options, custom_generate=functools.partial(branchwise.hf.generate, tokenizer=tokenizer)
    )
    model.generate(**inputs([[5, 6]]), **options, custom_generate=branchwise.hf.generate)
    assert found == [tokenizer, None]


@pytest.mark.filterwarnings("ignore::branchwise.errors.LargeDraftWarning")
def test_a_draft_model_is_loaded_once_in_the_life_of_a_model(monkeypatch: pytest.MonkeyPatch) -> None:
    loaded: list[weakref.ref[PreTrainedModel]] = []

    def load(*options: object) -> tuple[PreTrainedModel, None]:
        draft = build(served()["llama"])
        loaded.append(weakref.ref(draft))
        return draft, None

    monkeypatch.setattr("branchwise.draft.model.draft_model._load", load)
    model = build(served()["llama"])
    given = inputs(random_rows([5, 3]))
    own = model.generate(**given, max_new_tokens=8, do_sample=False)
    options = {"do_sample": False, "custom_generate": branchwise.hf.generate, "drafter": "model:smollm2"}
    for tree in ("chain:3", "chain:4"):
        gc.collect()
        assert torch.equal(own, model.generate(**given, max_new_tokens=8, **options, tree=tree))
    assert len(loaded) == 1
    reference = weakref.ref(model)
    del model
    gc.collect()
    assert reference() is None
    assert loaded[0]() is None


def test_a_lossy_verifier_is_told() -> None:
    model = build(served()["llama"])
    with pytest.warns(LossyWarning, match="changes the distribution"):
        model.generate(
            **inputs([[5, 6]]),
            max_new_tokens=2,
            do_sample=False,
            custom_generate=branchwise.hf.generate,
            drafter="disturbed",
            tree="fork-lossy:2x2",
            verifier="lossy-longest",
        )


def test_a_dictionary_is_returned_where_it_is_asked_for() -> None:
    model = build(served()["llama"])
    given = inputs(random_rows([4]))
    found = model.generate(
        **given, max_new_tokens=4, do_sample=False, return_dict_in_generate=True, custom_generate=branchwise.hf.generate
    )
    assert found.sequences.shape == (1, 8)


class Stateful(LogitsProcessor):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return scores


class Watching(StoppingCriteria):
    def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: object) -> bool:  # type: ignore[override]
        return False


@pytest.mark.parametrize(
    ("option", "reason"),
    [
        ({"num_beams": 2}, "num_beams=1"),
        ({"output_scores": True, "return_dict_in_generate": True}, "output_scores"),
        ({"logits_processor": LogitsProcessorList([Stateful()])}, "Stateful"),
        ({"stopping_criteria": [Watching()]}, "Watching"),
        ({"token_type_ids": torch.tensor([[1, 1, 1, 1]])}, "token_type_ids would be ignored"),
        ({"position_ids": torch.tensor([[3, 4, 5, 6]])}, "position_ids"),
        ({"drafter": "ngran"}, "Did you mean 'ngram'"),
        ({"verifier": "math"}, "Did you mean 'match'"),
    ],
)
def test_what_cannot_run_on_a_tree_is_refused_by_name(option: dict[str, object], reason: str) -> None:
    model = build(served()["gpt2"])
    with pytest.raises(branchwise.BranchwiseError, match=reason):
        model.generate(
            **inputs(random_rows([4])),
            max_new_tokens=4,
            do_sample=False,
            custom_generate=branchwise.hf.generate,
            **option,
        )


def test_a_processor_that_says_it_is_pure_is_run() -> None:
    class Forbid(LogitsProcessor):
        pure = True

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
            return scores.index_fill(1, torch.tensor([first]), -torch.inf)

    model = build(served()["llama"])
    given = inputs(random_rows([4]))
    first = int(model.generate(**given, max_new_tokens=1, do_sample=False)[0, -1])
    processors = LogitsProcessorList([Forbid()])
    options = {"max_new_tokens": 12, "do_sample": False, "logits_processor": processors}
    own = model.generate(**given, **options)
    assert torch.equal(own, model.generate(**given, **options, custom_generate=branchwise.hf.generate))


def test_stopping_criteria_are_asked_about_every_row_with_its_padding() -> None:
    class Width(StoppingCriteria):
        pure = True

        def __call__(self, input_ids: torch.Tensor, scores: torch.Tensor, **kwargs: object) -> torch.Tensor:  # type: ignore[override]
            return torch.full((len(input_ids),), input_ids.shape[1] >= 13)

    model = build(served()["llama"])
    given = inputs(random_rows([4, 9]))
    options = {"max_new_tokens": 20, "do_sample": False, "stopping_criteria": [Width()], "eos_token_id": None}
    own = model.generate(**given, **options)
    assert own.shape == (2, 13)
    assert torch.equal(own, model.generate(**given, **options, custom_generate=branchwise.hf.generate))


def test_rows_that_end_early_are_padded_as_generate_pads_them() -> None:
    """Without a padding token, with the first of several tokens that end a text."""
    model = build(served()["llama"])
    model.config.pad_token_id = model.generation_config.pad_token_id = None
    given = inputs([[5, 6, 7, 8], [9, 30, 31, 32]])
    end = int(model.generate(**given, max_new_tokens=2, do_sample=False, pad_token_id=0)[0, -1])
    options = {"max_new_tokens": 6, "do_sample": False, "eos_token_id": [end, 3]}
    own = model.generate(**given, **options)
    assert torch.equal(own, model.generate(**given, **options, custom_generate=branchwise.hf.generate))


def test_autocast_is_refused() -> None:
    model = build(served()["llama"])
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(UsageError, match="autocast"):
        model.generate(**inputs([[5, 6]]), max_new_tokens=2, do_sample=False, custom_generate=branchwise.hf.generate)


def test_right_padding_is_refused() -> None:
    model = build(served()["llama"])
    given = {"input_ids": torch.tensor([[5, 6, 0]]), "attention_mask": torch.tensor([[1, 1, 0]])}
    with pytest.raises(UsageError, match="left padding"):
        model.generate(**given, max_new_tokens=4, do_sample=False, custom_generate=branchwise.hf.generate)
