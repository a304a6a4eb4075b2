"""Prefix reuse in the server: what is written is the same, and rows stay with the key they were computed for."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest

from branchwise.draft import TREES
from branchwise.draft.base import Drafter
from branchwise.draft.head.drafter import HeadDrafter
from tests.heads import random_head
from tests.serving import Served, read_events, serving, tiny_llm
from tests.test_serve_metrics import metrics_of

SYSTEM = {"role": "system", "content": "Answer in few words, and say so where you do not know."}
FIRST = {"role": "user", "content": "Where do rivers begin?"}


def random_head_drafter() -> Drafter:
    info = tiny_llm("none", slots=1).engine.target.info
    return HeadDrafter(random_head(info, "carry", table=4), tree=TREES.build("chain:3"))


DRAFTERS: dict[str, Callable[[], str | Drafter]] = {
    "ngram": lambda: "ngram",
    "memories": lambda: "memories",
    "head": random_head_drafter,
}


@pytest.fixture(scope="module", params=DRAFTERS)
def servers(request: pytest.FixtureRequest) -> Iterator[tuple[Served, Served]]:
    """Of the same model and drafter, without a prefix cache and with one."""
    draft = DRAFTERS[request.param]
    with (
        serving(lambda: tiny_llm(draft(), context=400, prefix_cache=False)) as plain,
        serving(lambda: tiny_llm(draft(), context=400)) as reusing,
    ):
        yield plain, reusing


def chat(client: Served, *messages: dict[str, str], **options: Any) -> Any:
    body = {"messages": [SYSTEM, *messages], "max_tokens": 12, "ignore_eos": True, **options}
    answer = client.post("/v1/chat/completions", json=body)
    assert answer.status_code == 200, answer.text
    return answer.json()


def cached(answer: Any) -> int:
    return int(answer["usage"]["prompt_tokens_details"]["cached_tokens"])


@pytest.mark.parametrize("sampling", [{"temperature": 0}, {"temperature": 1, "seed": 3}, {"seed": 3, "n": 3}])
def test_conversations_are_the_same_with_and_without_it(
    servers: tuple[Served, Served], sampling: dict[str, Any]
) -> None:
    told: list[list[Any]] = []
    for client in servers:
        client.llm.engine.drop_prefixes()
        first = chat(client, FIRST, **sampling)
        said = first["choices"][0]["message"]
        second = chat(client, FIRST, said, {"role": "user", "content": "And where do they end?"}, **sampling)
        told.append([first, second])
    plain, reusing = told
    assert [answer["choices"] for answer in reusing] == [answer["choices"] for answer in plain]
    assert [cached(answer) for answer in plain] == [0, 0]
    assert cached(reusing[0]) == 0
    # All of the first turn is there but for its last token; how the answer is read again is the tokenizer's matter.
    assert cached(reusing[1]) >= reusing[0]["usage"]["prompt_tokens"] - 2


def test_a_stream_says_it_in_its_last_event() -> None:
    body = {"prompt": SYSTEM["content"], "max_tokens": 4, "stream": True, "stream_options": {"include_usage": True}}
    with serving(tiny_llm) as client:
        for expected in (0, len(SYSTEM["content"]) - 1):
            with client.stream("POST", "/v1/completions", json=body) as answer:
                last = read_events(answer)[-2]
            assert f'"prompt_tokens_details":{{"cached_tokens":{expected}}}' in last


@pytest.mark.parametrize("shared", [False, True])
def test_rows_are_reused_for_another_key_only_if_that_is_allowed(shared: bool) -> None:
    asked = {"prompt": SYSTEM["content"], "max_tokens": 4}
    with serving(tiny_llm, keys=("one", "two"), share_prefixes=shared) as client:

        def ask(key: str) -> int:
            return cached(client.post("/v1/completions", json=asked, headers={"Authorization": f"Bearer {key}"}).json())

        whole = len(SYSTEM["content"]) - 1
        assert [ask("one"), ask("one")] == [0, whole]
        assert ask("two") == (whole if shared else 0)


def test_a_few_texts_are_kept_and_the_one_used_longest_ago_goes_first() -> None:
    prompts = [f"{letter}{SYSTEM['content']}" for letter in "abc"]
    with serving(lambda: tiny_llm(slots=3, prefix_cache=2)) as client:
        engine = client.llm.engine
        assert engine.scheduler.prefixes is not None

        def ask(number: int) -> int:
            found = cached(client.complete(prompts[number], max_tokens=2))
            assert len(engine.scheduler.prefixes or ()) <= 2
            return found

        assert [ask(0), ask(1), ask(0), ask(2)][2] > 0
        assert ask(0) > 0  # used after the second, which made room for the third
        assert ask(1) == 0
        assert engine.target.free_slots == 3


def test_counters_and_choices() -> None:
    with serving(tiny_llm) as client:
        found = client.complete(SYSTEM["content"], max_tokens=2, n=3)
        assert cached(found) == 0  # of a prompt that counts once
        length = len(SYSTEM["content"])
        told = metrics_of(client)
        assert told["prefix_cache_queries_total"] == 3 * length
        assert told["prefix_cache_hits_total"] == 2 * (length - 1)
        assert told["prompt_tokens_total"] == length
