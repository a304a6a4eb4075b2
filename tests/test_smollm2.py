"""The real default model in the loop, float32: what speculation writes is what the model writes."""

from __future__ import annotations

from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from itertools import zip_longest

import pytest
import torch

from branchwise.core.text import TextStream
from branchwise.draft.base import Drafter
from branchwise.engine import Engine
from branchwise.errors import UsageError
from branchwise.llm import LLM
from branchwise.testing import RandomDrafter, TruthDrafter
from branchwise.verify import VERIFIERS
from tests.prompts import PROMPTS

LENGTH = 32
pytestmark = pytest.mark.filterwarnings("ignore:.*generation flags.*")


@pytest.fixture(scope="module")
def reference(smollm2: LLM) -> dict[str, list[int]]:
    """Greedy output of transformers' own `generate`."""
    outputs = {}
    for prompt in PROMPTS:
        ids = torch.tensor([smollm2.encode(prompt)])
        found = smollm2.model.generate(
            ids,
            attention_mask=torch.ones_like(ids),
            max_new_tokens=LENGTH,
            do_sample=False,
            eos_token_id=sorted(smollm2.stop_tokens),
        )
        outputs[prompt] = found[0, ids.shape[1] :].tolist()
    return outputs


def test_the_prompts_are_varied_enough_to_mean_something(reference: dict[str, list[int]]) -> None:
    assert len(reference) >= 20
    assert len({tuple(tokens) for tokens in reference.values()}) >= 20
    assert any(len(tokens) < LENGTH for tokens in reference.values())  # some answers end by themselves


@pytest.mark.parametrize("draft", ["none", "ngram"])
def test_greedy_output_equals_transformers_generate(smollm2: LLM, reference: dict[str, list[int]], draft: str) -> None:
    llm = smollm2.with_drafter(draft)
    for prompt in PROMPTS:
        assert llm.generate(prompt, max_new_tokens=LENGTH).token_ids == reference[prompt], prompt


@pytest.mark.parametrize("draft", ["none", "ngram"])
def test_greedy_output_in_a_batch_equals_transformers_generate(
    smollm2: LLM, reference: dict[str, list[int]], draft: str
) -> None:
    """Twenty prompts share six slots, so sequences of different ages and lengths run together."""
    completions = smollm2.with_drafter(draft).generate(PROMPTS, max_new_tokens=LENGTH)
    assert [completion.token_ids for completion in completions] == [reference[prompt] for prompt in PROMPTS]


@pytest.fixture(scope="module")
def sampled(smollm2: LLM) -> dict[str, list[int]]:
    """Plain decoding at temperature 0.8 with a fixed seed."""
    return {
        prompt: smollm2.generate(prompt, max_new_tokens=LENGTH, temperature=0.8, seed=17).token_ids
        for prompt in PROMPTS[:6]
    }


def drafting(llm: LLM, drafter: Drafter) -> LLM:
    engine = Engine(llm.engine.target, drafter, VERIFIERS.build("match"))
    return LLM(llm.name, llm.model, llm.tokenizer, engine)


@pytest.mark.parametrize("kind", ["no skill", "truth", "truth among decoys", "ngram"])
def test_the_same_seed_writes_the_same_text_with_and_without_drafting(
    smollm2: LLM, sampled: dict[str, list[int]], kind: str
) -> None:
    vocabulary = smollm2.engine.target.vocabulary
    truth = {tuple(smollm2.encode(prompt)): tokens for prompt, tokens in sampled.items()}
    drafter = {
        "no skill": RandomDrafter(vocabulary, nodes=8),
        "truth": TruthDrafter(truth, vocabulary),
        "truth among decoys": TruthDrafter(truth, vocabulary, decoys=2),
        "ngram": smollm2.with_drafter("ngram:max=3,min=1").engine.drafter,
    }[kind]
    llm = drafting(smollm2, drafter)
    for prompt, expected in sampled.items():
        completion = llm.generate(prompt, max_new_tokens=LENGTH, temperature=0.8, seed=17)
        assert completion.token_ids == expected
        if kind.startswith("truth"):
            assert completion.stats.mean_acceptance_length > 3
    together = llm.generate(list(sampled), max_new_tokens=LENGTH, temperature=0.8, seed=17)
    assert [completion.token_ids for completion in together] == list(sampled.values())


def test_logprobs_equal_a_plain_forward_under_speculation(smollm2: LLM, sampled: dict[str, list[int]]) -> None:
    prompt = PROMPTS[0]
    truth = {tuple(smollm2.encode(prompt)): sampled[prompt]}
    drafter = TruthDrafter(truth, smollm2.engine.target.vocabulary, decoys=1)
    llm = drafting(smollm2, drafter)
    completion = llm.generate(prompt, max_new_tokens=LENGTH, temperature=0.8, seed=17, logprobs=True, top_logprobs=3)
    assert completion.stats.accepted_tokens > 0
    assert completion.logprobs is not None
    ids = smollm2.encode(prompt) + completion.token_ids
    with torch.inference_mode():
        probs = smollm2.model(input_ids=torch.tensor([ids])).logits[0].float().log_softmax(dim=-1)
    start = len(ids) - len(completion.token_ids)
    expected = [probs[start + i - 1, token].item() for i, token in enumerate(completion.token_ids)]
    assert completion.logprobs == pytest.approx(expected, abs=2e-3)
    best = probs[start - 1 : -1].topk(3, dim=-1)
    for piece, tokens, values in zip(completion.pieces, best.indices.tolist(), best.values.tolist(), strict=True):
        assert [value for _, value in piece.top] == pytest.approx(values, abs=2e-3)
        assert piece.top[0][0] == tokens[0] or values[0] - values[1] < 4e-3


def test_penalties_write_the_same_with_and_without_drafting(smollm2: LLM) -> None:
    options = {"max_new_tokens": 24, "repetition_penalty": 1.3, "frequency_penalty": 0.2, "temperature": 0.6, "seed": 8}
    plain = smollm2.generate(PROMPTS[6], **options)  # type: ignore[call-overload]
    drafted = smollm2.with_drafter("ngram:max=2,min=1").generate(PROMPTS[6], **options)  # type: ignore[call-overload]
    assert plain.token_ids == drafted.token_ids


def test_a_streamed_character_is_never_split(smollm2: LLM) -> None:
    """The bytes of an emoji are tokens of their own; nothing of it may show before it is whole."""
    text = "naïve café 日本語 🌙👩‍🚀 done"
    tokens = smollm2.tokenizer(text, add_special_tokens=False)["input_ids"]
    assert any("\ufffd" in smollm2.decode([token]) for token in tokens)
    stream = TextStream(smollm2.decode)
    shown = [stream.push(token) for token in tokens] + [stream.finish()]
    assert "".join(shown) == text
    assert not any("\ufffd" in piece for piece in shown)


def test_streamed_text_equals_the_completion(smollm2: LLM) -> None:
    chunks = list(smollm2.with_drafter("ngram").stream(PROMPTS[19], max_new_tokens=40))
    whole = smollm2.generate(PROMPTS[19], max_new_tokens=40)
    assert chunks[-1].completion is not None
    assert "".join(str(chunk) for chunk in chunks) == chunks[-1].completion.text == whole.text
    assert chunks[-1].completion.token_ids == whole.token_ids


def test_a_stop_string_that_spans_tokens_ends_the_text_before_it(smollm2: LLM) -> None:
    prompt = PROMPTS[2]
    full = smollm2.generate(prompt, max_new_tokens=LENGTH).text
    stop = full[7:15]
    for draft in ("none", "ngram"):
        completion = smollm2.with_drafter(draft).generate(prompt, max_new_tokens=LENGTH, stop=stop)
        assert completion.text == full[: full.index(stop)]
        assert completion.finish_reason == "stop"


def test_two_streams_at_once_both_get_their_whole_text(smollm2: LLM) -> None:
    """A step moves every running text along, also the one whose stream did not ask for it."""
    prompts = PROMPTS[:2]
    expected = [smollm2.generate(prompt, max_new_tokens=12).text for prompt in prompts]
    streams = [smollm2.stream(prompt, max_new_tokens=12) for prompt in prompts]
    texts = ["", ""]
    for chunks in zip_longest(*streams):
        for i, chunk in enumerate(chunks):
            texts[i] += "" if chunk is None else chunk.text
    assert texts == expected


def test_threads_may_share_a_model(smollm2: LLM) -> None:
    expected = [smollm2.generate(prompt, max_new_tokens=8).token_ids for prompt in PROMPTS[:4]]
    with ThreadPoolExecutor(4) as pool:
        found = pool.map(lambda prompt: smollm2.generate(prompt, max_new_tokens=8).token_ids, PROMPTS[:4])
        assert list(found) == expected


def test_an_answer_carries_the_seed_that_writes_it_again(smollm2: LLM) -> None:
    first = smollm2.generate("Hi", max_new_tokens=8, temperature=1.0)
    assert smollm2.generate("Hi", max_new_tokens=8, temperature=1.0, seed=first.seed).token_ids == first.token_ids


def test_leaving_a_stream_early_frees_its_slot(smollm2: LLM) -> None:
    free = smollm2.engine.target.free_slots
    stream: Iterator[object] = smollm2.stream("Tell a long story.", max_new_tokens=50)
    next(stream)
    assert smollm2.engine.target.free_slots == free - 1
    stream.close()  # type: ignore[attr-defined]
    assert smollm2.engine.target.free_slots == free
    assert not smollm2.engine.busy


@pytest.mark.parametrize(
    "prompt", [5, [{"role": "user"}], [{"role": "user", "content": None}], [{"content": "hi"}], [["hi"]]]
)
def test_what_is_no_prompt_gets_one_sentence(smollm2: LLM, prompt: object) -> None:
    with pytest.raises(UsageError, match="A prompt is a text, or a list of messages"):
        smollm2.generate(prompt, max_new_tokens=2)  # type: ignore[call-overload]
    assert not smollm2.engine.busy


def test_options_that_do_not_exist_or_do_not_fit_get_one_sentence(smollm2: LLM) -> None:
    with pytest.raises(UsageError, match=r"no option 'temprature'.*'temperature'"):
        smollm2.generate("Hi", temprature=1.0)  # type: ignore[call-overload]
    with pytest.raises(UsageError, match="temperature must be a number"):
        smollm2.generate("Hi", temperature="hot")  # type: ignore[call-overload]
    with pytest.raises(UsageError, match="not a conversation"):
        smollm2.generate([{"role": "user", "content": "Hi"}], raw=True)
    assert smollm2.generate([]) == []


def test_conversations_and_texts_give_the_same_prompt(smollm2: LLM) -> None:
    message = {"role": "user", "content": "Who are you?"}
    assert smollm2.encode("Who are you?") == smollm2.encode([message])
    assert smollm2.encode("Who are you?", raw=True) == smollm2.tokenizer("Who are you?")["input_ids"]
    one = smollm2.generate([message], max_new_tokens=4)
    many = smollm2.generate([[message], [message]], max_new_tokens=4)
    assert one.token_ids == many[0].token_ids == many[1].token_ids
