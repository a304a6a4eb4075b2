"""What clients of a server get: the model's own text, whole or streamed, alone or among others."""

from __future__ import annotations

import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import openai
import pytest
import torch

from branchwise.audit.server import Server as Audited
from branchwise.llm import LLM
from tests.serving import Served, byte_tokenizer, read_events, serving, tiny_llm

PROMPTS = ["one two three", "abcabcabcabc", "x", "to be or not to be, that is", "ÄÖÜ", "0101010101"]
LONG = "a prompt of more than thirty-two tokens, whose rows are worth a copy"


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(tiny_llm) as client:
        yield client


@pytest.fixture(scope="module")
def plain() -> LLM:
    """The same model, in the hands of the test, without a drafter."""
    return tiny_llm("none")


@pytest.fixture
def client(served: Served) -> Iterator[openai.OpenAI]:
    with openai.OpenAI(base_url=f"{served.address}/v1", api_key="none", max_retries=0) as made:
        yield made


def chatted(text: str) -> list[dict[str, str]]:
    return [{"role": "user", "content": text}]


def test_the_openai_client_gets_the_text_of_the_model(client: openai.OpenAI, plain: LLM) -> None:
    expected = plain.generate("Hello!", max_new_tokens=20)
    answer = client.chat.completions.create(
        model="tiny", messages=chatted("Hello!"), max_completion_tokens=20, temperature=0
    )
    assert answer.object == "chat.completion"
    assert answer.choices[0].message.content == expected.text
    assert answer.choices[0].message.role == "assistant"
    assert answer.choices[0].finish_reason == expected.finish_reason
    assert answer.usage is not None
    assert (answer.usage.prompt_tokens, answer.usage.completion_tokens) == (expected.prompt_tokens, 20)
    assert [model.id for model in client.models.list()] == ["tiny"]
    assert client.models.retrieve("tiny").id == "tiny"


def test_the_openai_client_streams_the_same_text(client: openai.OpenAI, plain: LLM) -> None:
    stream = client.chat.completions.create(
        model="tiny",
        messages=chatted("Hello!"),
        max_tokens=20,
        temperature=0,
        stream=True,
        stream_options={"include_usage": True},
    )
    chunks = list(stream)
    assert chunks[0].choices[0].delta.role == "assistant"
    text = "".join(chunk.choices[0].delta.content or "" for chunk in chunks if chunk.choices)
    assert text == plain.generate("Hello!", max_new_tokens=20).text
    assert [chunk.choices[0].finish_reason for chunk in chunks[:-1]] == [None] * (len(chunks) - 2) + ["length"]
    assert [chunk.usage for chunk in chunks[:-1]] == [None] * (len(chunks) - 1)
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 20


def test_a_stream_of_completions_ends_with_done(served: Served) -> None:
    asked = {"prompt": "hello", "max_tokens": 6, "temperature": 0, "stream": True}
    with served.stream("POST", "/v1/completions", json=asked) as answer:
        assert answer.headers["content-type"].startswith("text/event-stream")
        events = read_events(answer)
    assert events[-1] == "[DONE]"
    chunks = [json.loads(event) for event in events[:-1]]
    assert {chunk["object"] for chunk in chunks} == {"text_completion"}
    text = "".join(chunk["choices"][0]["text"] for chunk in chunks)
    assert text == served.complete("hello", max_tokens=6, temperature=0)["choices"][0]["text"]
    assert chunks[-1]["choices"][0]["finish_reason"] == "length"


def test_greedy_texts_among_sixteen_mixed_requests_are_those_of_the_model_alone(served: Served, plain: LLM) -> None:
    def ask(number: int) -> str:
        greedy = number % 2 == 0
        options: dict[str, Any] = {} if greedy else {"temperature": 1.2, "top_p": 0.9, "top_k": 40, "seed": number}
        options |= {"presence_penalty": 0.5} if number % 3 == 1 else {}
        options |= {"logprobs": 1} if number % 5 == 0 else {}
        length = 10 + 3 * (number % 4)
        found = served.complete(PROMPTS[number % 6], max_tokens=length, **{"temperature": 0} | options)
        return str(found["choices"][0]["text"])

    with ThreadPoolExecutor(16) as pool:
        texts = list(pool.map(ask, range(16)))
    for number in range(0, 16, 2):
        penalty = 0.5 if number % 3 == 1 else 0.0
        length = 10 + 3 * (number % 4)
        alone = plain.generate(PROMPTS[number % 6], max_new_tokens=length, raw=True, presence_penalty=penalty)
        assert texts[number] == alone.text


def test_a_seed_writes_the_same_again_and_is_that_of_the_library(served: Served, plain: LLM) -> None:
    asked = {"max_tokens": 12, "temperature": 0.9, "seed": 7}
    first, second = (served.complete("seeded", **asked)["choices"][0]["text"] for _ in range(2))
    expected = plain.generate("seeded", max_new_tokens=12, temperature=0.9, seed=7, raw=True).text
    assert first == second == expected
    assert served.complete("seeded", **asked | {"seed": 8})["choices"][0]["text"] != first


def test_a_text_may_be_hotter_than_with_openai(client: openai.OpenAI, plain: LLM) -> None:
    asked: Any = {"model": "tiny", "prompt": "to be or not", "seed": 5, "max_tokens": 24, "logit_bias": {"70": 12}}
    found = client.completions.create(**asked, temperature=9).choices[0].text
    same: Any = {"raw": True, "seed": 5, "max_new_tokens": 24, "logit_bias": {70: 12.0}}
    hot, warm = (plain.generate("to be or not", temperature=heat, **same).text for heat in (9, 2))
    assert found == hot != warm


def test_a_request_that_says_nothing_samples(served: Served) -> None:
    texts = {served.complete("anything", max_tokens=12)["choices"][0]["text"] for _ in range(4)}
    assert len(texts) > 1


@pytest.mark.parametrize("prompt", ["short", LONG])
def test_choices_differ_and_each_is_the_text_of_its_own_seed(served: Served, prompt: str) -> None:
    asked = {"max_tokens": 10, "temperature": 1, "seed": 3}
    choices = served.complete(prompt, n=3, **asked)["choices"]
    assert [choice["index"] for choice in choices] == [0, 1, 2]
    assert len({choice["text"] for choice in choices}) == 3
    for number, choice in enumerate(choices):
        assert served.complete(prompt, **asked | {"seed": 3 + number})["choices"][0]["text"] == choice["text"]


def test_choices_of_a_long_prompt_share_one_prefill(served: Served, monkeypatch: pytest.MonkeyPatch) -> None:
    served.llm.engine.drop_prefixes()
    target, written = served.llm.engine.target, list[int]()
    prefill = target.prefill

    def counted(chunks: Any) -> Any:
        written.append(sum(len(chunk.tokens) for chunk in chunks))
        return prefill(chunks)

    monkeypatch.setattr(target, "prefill", counted)
    served.complete(LONG, n=3, max_tokens=4)
    assert sum(written) == len(LONG) - 1
    assert target.free_slots == target.slots
    served.complete(LONG[1:], n=7, max_tokens=4)  # more than there are slots
    assert sum(written) == len(LONG) - 1 + len(LONG) - 2
    assert target.free_slots == target.slots


def test_several_prompts_and_prompts_of_token_ids(served: Served) -> None:
    ids = [byte_tokenizer()(prompt)["input_ids"] for prompt in PROMPTS[:3]]
    asked = {"max_tokens": 8, "temperature": 0}
    alone = [served.complete(prompt, **asked)["choices"][0]["text"] for prompt in PROMPTS[:3]]
    for prompts in (PROMPTS[:3], ids):
        found = served.complete(prompts, **asked)
        assert [choice["text"] for choice in found["choices"]] == alone
        assert found["usage"]["prompt_tokens"] == sum(map(len, ids))
    assert served.complete(ids[0], **asked)["choices"][0]["text"] == alone[0]
    twice = served.complete(PROMPTS[:2], n=2, **asked)["choices"]
    assert [choice["text"] for choice in twice] == [alone[0], alone[0], alone[1], alone[1]]


def test_an_echo_begins_with_the_prompt(served: Served) -> None:
    asked = {"max_tokens": 8, "temperature": 0}
    alone = served.complete("hello", **asked)["choices"][0]["text"]
    for prompt in ("hello", byte_tokenizer()("hello")["input_ids"]):
        assert served.complete(prompt, echo=True, **asked)["choices"][0]["text"] == "hello" + alone


@pytest.mark.parametrize("listed", [False, True])
def test_a_stop_string_ends_a_text_and_is_no_part_of_it(served: Served, listed: bool) -> None:
    whole = served.complete("0101", max_tokens=30, temperature=0)["choices"][0]["text"]
    stop = whole[5:7]
    found = served.complete("0101", max_tokens=30, temperature=0, stop=[stop, "never"] if listed else stop)
    assert found["choices"][0]["text"] == whole[: whole.index(stop)]
    assert found["choices"][0]["finish_reason"] == "stop"


def test_the_model_ends_a_text_itself_unless_it_is_not_to(served: Served) -> None:
    end = {"logit_bias": {"0": 100}, "temperature": 0, "max_tokens": 5}
    [choice] = served.complete("hello", **end)["choices"]
    assert (choice["text"], choice["finish_reason"]) == ("", "stop")
    [choice] = served.complete("hello", ignore_eos=True, **end)["choices"]
    assert choice["finish_reason"] == "length"


def test_a_chat_takes_parts_of_text_and_several_roles(served: Served) -> None:
    parts = [{"type": "text", "text": "Hel"}, {"type": "text", "text": "lo"}]
    asked = {"max_tokens": 10, "temperature": 0}
    texts = []
    for system, content in (("system", parts), ("developer", "Hello")):
        messages = [{"role": system, "content": "Be brief."}, {"role": "user", "content": content}]
        found = served.post("/v1/chat/completions", json={"messages": messages, **asked}).json()
        texts.append(found["choices"][0]["message"]["content"])
    assert texts[0] == texts[1]


def test_logprobs_are_those_of_a_plain_forward(served: Served, plain: LLM) -> None:
    found = served.complete("0101010101", max_tokens=12, temperature=0, logprobs=1)["choices"][0]["logprobs"]
    assert len(found["tokens"]) == len(found["token_logprobs"]) == len(found["text_offset"]) == 12
    ids = plain.encode("0101010101", raw=True)
    written = plain.generate("0101010101", max_new_tokens=12, raw=True).token_ids
    logits = plain.model(torch.tensor([ids + written])).logits[0, len(ids) - 1 : -1]
    expected = logits.log_softmax(-1).gather(1, torch.tensor(written)[:, None])[:, 0]
    assert found["token_logprobs"] == pytest.approx(expected.tolist(), abs=1e-4)


def test_an_echo_with_logprobs_scores_the_prompt_as_a_plain_forward_does(served: Served, plain: LLM) -> None:
    prompt = "scored: \u20ac 01010101010101"
    ids = plain.encode(prompt, raw=True)
    expected = plain.model(torch.tensor([ids])).logits[0, :-1].log_softmax(-1)
    own = expected.gather(1, torch.tensor(ids[1:])[:, None])[:, 0].tolist()
    asked = {"echo": True, "logprobs": 3, "temperature": 0}
    alone = served.complete(prompt, max_tokens=4, temperature=0, logprobs=3)["choices"][0]
    for given in (prompt, ids):
        for tokens in (0, 4):
            found = served.complete(given, max_tokens=tokens, **asked)
            assert found["usage"]["completion_tokens"] == tokens
            [choice] = found["choices"]
            assert choice["finish_reason"] == "length"
            assert choice["text"] == prompt + (alone["text"] if tokens else "")
            told = choice["logprobs"]
            assert told["token_logprobs"][0] is None
            assert told["top_logprobs"][0] is None
            assert told["token_logprobs"][1 : len(ids)] == pytest.approx(own, abs=1e-4)
            assert told["token_logprobs"][len(ids) :] == (alone["logprobs"]["token_logprobs"] if tokens else [])
            best = [sorted(top.values(), reverse=True)[:3] for top in told["top_logprobs"][1 : len(ids)]]
            assert best == [pytest.approx(row, abs=1e-4) for row in expected.topk(3).values.tolist()]
            assert [told["text_offset"][place] for place in (0, 8, 11, 12)] == [
                0,
                8,
                9,
                10,
            ]  # three bytes of a character
    streamed = served.post("/v1/completions", json={"prompt": prompt, "max_tokens": 4, "stream": True, **asked})
    parts = [json.loads(line)["choices"][0] for line in read_events(streamed)[:-1]]
    assert "".join(part["text"] for part in parts) == prompt + alone["text"]
    assert [one for part in parts for one in part["logprobs"]["token_logprobs"]] == told["token_logprobs"]
    assert [one for part in parts for one in part["logprobs"]["text_offset"]] == told["text_offset"]


def test_nothing_but_the_prompt_comes_back_with_an_echo_alone(served: Served) -> None:
    found = served.complete(["hello", "you"], echo=True, max_tokens=0, n=2)["choices"]
    assert [choice["text"] for choice in found] == ["hello", "hello", "you", "you"]
    assert {choice["logprobs"] for choice in found} == {None}
    refused = served.post("/v1/completions", json={"prompt": "hello", "max_tokens": 0})
    assert (refused.status_code, refused.json()["error"]["param"]) == (400, "max_tokens")


def test_logprobs_of_a_chat_name_tokens_and_their_bytes(client: openai.OpenAI, plain: LLM) -> None:
    asked: dict[str, Any] = {"model": "tiny", "messages": chatted("Hi"), "max_tokens": 8, "temperature": 0}
    [choice] = client.chat.completions.create(logprobs=True, **asked).choices
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    spelt = bytes(byte for entry in choice.logprobs.content for byte in entry.bytes or [])
    assert spelt.decode(errors="replace") == choice.message.content
    expected = plain.generate("Hi", max_new_tokens=8, logprobs=True).logprobs
    assert [entry.logprob for entry in choice.logprobs.content] == pytest.approx(expected, abs=1e-4)
    streamed = client.chat.completions.create(logprobs=True, stream=True, **asked)
    parts = [chunk.choices[0].logprobs for chunk in streamed]
    assert [entry for part in parts if part for entry in part.content or []] == choice.logprobs.content


def test_alternatives_are_the_most_probable_tokens_of_a_plain_forward(
    client: openai.OpenAI, served: Served, plain: LLM
) -> None:
    def best(prompt: list[int], written: list[int], most: int) -> Any:
        logits = plain.model(torch.tensor([prompt + written])).logits[0, len(prompt) - 1 : -1]
        return logits.log_softmax(-1).topk(most)

    written = plain.generate("0101010101", max_new_tokens=12, raw=True).token_ids
    expected = best(plain.encode("0101010101", raw=True), written, 5)
    asked = {"max_tokens": 12, "temperature": 0}
    found = served.complete("0101010101", logprobs=5, **asked)["choices"][0]["logprobs"]
    assert [list(top.values()) for top in found["top_logprobs"]] == [
        pytest.approx(row, abs=1e-4) for row in expected.values.tolist()
    ]
    spelt = served.post("/tokenize", json={"prompt": "0101010101", "return_token_strs": True}).json()["token_strs"]
    assert spelt == list("0101010101")
    assert [next(iter(top)) for top in found["top_logprobs"]] == found["tokens"]
    assert served.complete("0101010101", logprobs=0, **asked)["choices"][0]["logprobs"]["top_logprobs"] is None
    # A token that is none of the most probable ones is named with them.
    drawn = served.complete("0101", logprobs=1, max_tokens=12, temperature=5, seed=1)["choices"][0]["logprobs"]
    assert max(map(len, drawn["top_logprobs"])) == 2
    for token, logprob, top in zip(drawn["tokens"], drawn["token_logprobs"], drawn["top_logprobs"], strict=True):
        assert top[token] == logprob

    written = plain.generate("Hi", max_new_tokens=8).token_ids
    expected = best(plain.encode("Hi"), written, 3)
    [choice] = client.chat.completions.create(
        model="tiny", messages=chatted("Hi"), max_tokens=8, temperature=0, logprobs=True, top_logprobs=3
    ).choices
    assert choice.logprobs is not None
    assert choice.logprobs.content is not None
    for entry, values, tokens in zip(
        choice.logprobs.content, expected.values.tolist(), expected.indices.tolist(), strict=True
    ):
        assert [top.logprob for top in entry.top_logprobs] == pytest.approx(values, abs=1e-4)
        strings = [served.post("/detokenize", json={"tokens": [token]}).json()["prompt"] for token in tokens]
        spelt = [bytes(top.bytes or []).decode(errors="replace") for top in entry.top_logprobs]
        assert spelt == strings
        assert entry.top_logprobs[0].token == entry.token


def test_an_answer_says_what_speculation_did_if_asked(served: Served) -> None:
    found = served.complete("abcabcabcabc", max_tokens=30, temperature=0, metrics=True)
    told = found["metrics"]["speculative_decoding"]
    assert set(told) == {
        "mean_acceptance_length",
        "draft_acceptance_rate",
        "acceptance_histogram",
        "num_spec_steps",
        "num_accepted_draft_tokens",
        "num_draft_tokens",
        "num_spec_tokens",
    }
    assert sum(told["acceptance_histogram"]) == told["num_spec_steps"] > 0
    counted = sum(tokens * steps for tokens, steps in enumerate(told["acceptance_histogram"]))
    assert counted == told["num_accepted_draft_tokens"]
    assert "metrics" not in served.complete("abc", max_tokens=2)
    headed = served.post(
        "/v1/completions", json={"prompt": "abc", "max_tokens": 2}, headers={"X-Branchwise-Metrics": "true"}
    )
    assert "metrics" in headed.json()


def test_tokens_of_texts_and_conversations_and_back(served: Served) -> None:
    found = served.post("/tokenize", json={"prompt": "h€", "return_token_strs": True}).json()
    assert found["count"] == 4
    assert found["token_strs"] == ["h", "bytes:\\xe2", "bytes:\\x82", "bytes:\\xac"]
    assert served.post("/detokenize", json={"tokens": found["tokens"]}).json() == {"prompt": "h€"}
    talk = served.post("/tokenize", json={"messages": chatted("h")}).json()["tokens"]
    told = served.post("/detokenize", json={"tokens": talk}).json()["prompt"]
    assert told == "<|start|>user\nh<|end|><|start|>assistant:"


def test_the_audit_of_servers_can_ask_this_one(served: Served) -> None:
    audited = Audited(served.address, [{"max_tokens": 3, "temperature": 1, "logprobs": 1, "n": 4, "top_k": -1}])
    before = audited.counters()
    answers = audited("abcabcabc")
    after = audited.counters()
    assert [len(answer.tokens) for answer in answers] == [3] * 4
    assert before is not None
    assert after is not None
    assert after[0] >= before[0]
