"""Requests that choose their method, and requests that ask to see their steps."""

from __future__ import annotations

import json
import math
import threading
from collections.abc import Iterator
from itertools import pairwise
from typing import Any

import pytest

from branchwise.engine import Request
from branchwise.errors import QueueFull
from branchwise.methods import PRESETS, find_any
from branchwise.serve.lanes import Lane, Lanes
from branchwise.serve.protocol.choosing import DRAFTERS, VERIFY, fits
from branchwise.verify import VERIFIERS
from tests.serving import Served, eventually, read_events, serving, tiny_llm

PROMPT = "one two one two one two"


@pytest.fixture(scope="module")
def client() -> Iterator[Served]:
    with serving(tiny_llm, method=PRESETS["ngram"]) as client:
        yield client


def events(client: Served, **body: Any) -> list[Any]:
    asked = {"prompt": PROMPT, "max_tokens": 24, "temperature": 0, "stream": True, **body}
    with client.stream("POST", "/v1/completions", json=asked) as answer:
        assert answer.status_code == 200, answer.read()
        assert "X-Ignored-Fields" not in answer.headers
        return [json.loads(data) for data in read_events(answer) if data != "[DONE]"]


def refused(client: Served, **body: Any) -> Any:
    answer = client.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 4, **body})
    assert answer.status_code == 400, answer.text
    return answer.json()["error"]


def lanes_of(client: Served) -> Lanes:
    lanes = client.server.runner.lanes
    assert lanes is not None
    return lanes


# ---- seeing steps ------------------------------------------------------------------------------------------------


def test_a_trace_tells_every_step_and_every_token(client: Served) -> None:
    found = events(client, trace=True, logprobs=1)
    steps = [step for event in found for step in event["branchwise"]["steps"]]
    tokens = [token for event in found for token in event["branchwise"]["tokens"]]
    assert (
        "".join(token["text"] for token in tokens)
        == client.complete(PROMPT, max_tokens=24, temperature=0)["choices"][0]["text"]
    )
    assert sum(step["emitted"] for step in steps) == len(tokens) == 24
    assert any(len(step["path"]) > 1 for step in steps), "nothing was accepted: the test shows too little"
    spelt = [token for event in found for token in event["choices"][0]["logprobs"]["tokens"]]
    place = 0
    for step, following in pairwise([*steps, None]):
        assert step is not None
        nodes, path = step["nodes"], step["path"]
        assert nodes[0]["parent"] == -1
        assert all(0 <= node["parent"] < number for number, node in enumerate(nodes) if number)
        assert [nodes[node]["parent"] for node in path[1:]] == path[:-1]
        emitted = [*(nodes[node]["token"] for node in path[1:]), step["own"]["token"]][: step["emitted"]]
        assert emitted == spelt[place : place + step["emitted"]]
        sources = [*(nodes[node]["source"] for node in path[1:]), ""][: step["emitted"]]
        assert sources == [token["source"] for token in tokens[place : place + step["emitted"]]]
        place += step["emitted"]
        assert following is None or following["nodes"][0]["token"] == step["own"]["token"]
        assert set(step["ms"]) == {"draft", "score", "verify", "commit"}


def test_the_p_of_a_trace_is_that_of_the_model(client: Served) -> None:
    """The tokens that were emitted have logprobs besides."""
    found = events(client, trace=True, logprobs=0)
    wanted = [logprob for event in found for logprob in event["choices"][0]["logprobs"]["token_logprobs"]]
    told: list[float] = []
    for step in (step for event in found for step in event["branchwise"]["steps"]):
        told += [*(step["nodes"][node]["p"] for node in step["path"][1:]), step["own"]["p"]][: step["emitted"]]
    assert told == pytest.approx([math.exp(logprob) for logprob in wanted], rel=1e-3)


def test_the_q_of_a_trace_is_what_siblings_were_drawn_with(client: Served) -> None:
    found = events(client, trace=True, draft="disturbed", tree="rsd-c:3,2", verify="rrs", temperature=1.0, seed=5)
    nodes = [node for event in found for step in event["branchwise"]["steps"] for node in step["nodes"][1:]]
    assert nodes
    assert all(0 < node["q"] <= 1 and 0 <= node["p"] <= 1 and node["source"] == "disturbed" for node in nodes)


def test_who_does_not_ask_gets_no_trace(client: Served) -> None:
    assert all("branchwise" not in event for event in events(client))
    assert "trace is for streams" in refused(client, trace=True)["message"]


def test_texts_beside_a_traced_one_have_no_trace(client: Served) -> None:
    quiet: list[Any] = []
    thread = threading.Thread(target=lambda: quiet.extend(events(client, max_tokens=60)))
    thread.start()
    assert any("branchwise" in event for event in events(client, trace=True, max_tokens=60))
    thread.join(60)
    assert quiet
    assert all("branchwise" not in event for event in quiet)


# ---- choosing ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "choice",
    [
        {"method": "plain"},
        {"method": "default"},
        {"method": "recycle/topk:12"},
        {"draft": "suffix", "tree": "paths:2x4", "verify": "cascade"},
        {"draft": "ngram:max=3,min=1", "tree": "chain:5"},
    ],
    ids=str,
)
def test_a_chosen_method_writes_the_text_of_the_server_s_own(client: Served, choice: dict[str, str]) -> None:
    plain = client.complete(PROMPT, max_tokens=24, temperature=0)["choices"][0]["text"]
    assert client.complete(PROMPT, max_tokens=24, temperature=0, **choice)["choices"][0]["text"] == plain


def test_with_match_a_seed_writes_the_same_text_in_every_lane(client: Served) -> None:
    def text(**choice: str) -> str:
        return str(client.complete(PROMPT, max_tokens=24, temperature=1, seed=7, **choice)["choices"][0]["text"])

    assert text() == text(method="plain") == text(draft="recycle", tree="paths:2x4")


def test_the_drafter_that_was_chosen_drafts(client: Served) -> None:
    def sources(**choice: str) -> set[str]:
        steps = [step for event in events(client, trace=True, **choice) for step in event["branchwise"]["steps"]]
        return {node["source"] for step in steps for node in step["nodes"][1:]}

    assert sources() == {"ngram"}
    assert sources(method="ngram") == {"ngram"}
    assert sources(draft="trigram") == {"trigram"}
    assert sources(method="plain") == set()


@pytest.mark.parametrize(
    ("choice", "says"),
    [
        ({"method": "cascade"}, "drafts with a draft model, which requests cannot name"),
        ({"method": "eagle"}, "a trained head, which requests cannot name"),
        ({"method": "rest"}, "an index, which requests cannot name"),
        ({"method": "model:folder"}, "Unknown method 'model'"),
        ({"method": "suffx"}, "Unknown method 'suffx'. Did you mean 'suffix'?"),
        ({"method": "defualt"}, "Unknown method 'defualt'. Did you mean 'default'?"),
        ({"method": "auto:head(file)"}, "options that are numbers"),
        ({"draft": "head", "tree": "chain:4"}, "a trained head, which requests cannot name"),
        ({"draft": "fused:ngram+retrieval(folder)"}, "Unknown drafter 'fused'"),
        ({"draft": "ngram", "tree": "template:shape.json"}, "named with numbers"),
        ({"draft": "ngram", "tree": "ranks:/etc/hostname"}, "named with numbers"),
        ({"draft": "ngram", "tree": "chain:8,stop=learned:file"}, "named with numbers"),
        ({"method": "ngram/template:/etc/hostname"}, "draft/tree/verify"),
        ({"draft": "ngram", "tree": "rsd-c:90,90,90"}, "at most 128 nodes"),
        ({"draft": "ngram", "tree": "paths:99x99"}, "at most 128 nodes"),
        ({"draft": "ngram", "tree": "topk:8,depth=999"}, "at most 128 nodes"),
        ({"method": "improved-mcsd-lossy"}, "changes the distribution"),
        ({"draft": "ngram", "verify": "lossy-longest"}, "Unknown verifier"),
        ({"draft": "ngram", "tree": "chain:4", "verify": "rrs"}, "Verifiers that fit"),
        ({"draft": "none", "tree": "chain:4"}, "grows no tree"),
        ({"method": "ngram", "tree": "chain:4"}, "give it, or these"),
        ({"tree": "chain:4"}, "Name a drafter"),
        ({"method": "x" * 81}, "80"),
    ],
    ids=str,
)
def test_what_clients_may_not_name_is_refused_with_a_sentence(
    client: Served, choice: dict[str, str], says: str
) -> None:
    error = refused(client, **choice)
    assert says in error["message"]
    assert error["param"] in ("method", "draft")


def test_without_lanes_every_text_has_the_server_s_own_method() -> None:
    with serving(tiny_llm, lanes=0, method=PRESETS["ngram"]) as client:
        assert "started without lanes" in refused(client, method="plain")["message"]
        assert client.complete(PROMPT, max_tokens=4, method="ngram")
        assert client.get("/v1/methods").json()["methods"] == []


def test_what_is_offered_can_be_had(client: Served) -> None:
    offered = client.get("/v1/methods").json()
    assert offered["serving"]["name"] == "ngram"
    names = [method["name"] for method in offered["methods"]]
    assert {"plain", "ngram", "default", "token-recycling", "stand"} <= set(names)
    assert not {"cascade", "eagle", "rest", "improved-mcsd-lossy"} & set(names)
    assert "head" not in [drafter["name"] for drafter in offered["drafters"]], "there is no head for this model"
    for drafter in offered["drafters"]:
        assert "match" in drafter["fits"][""]
        trees = list(drafter["fits"])
        for tree, verifiers in drafter["fits"].items():
            method = find_any(f"{drafter['name']}/{tree}/{verifiers[-1]}")
            method.build()
        assert len(trees) > 5 or drafter["name"] == "none"


def test_the_verifiers_that_are_told_are_those_that_keep_the_distribution() -> None:
    assert set(VERIFY) == {name for name in VERIFIERS if VERIFIERS.find(name).lossless} - {"auto"}
    assert "rrs" not in fits("ngram")["chain:8"]
    assert set(DRAFTERS) >= {"none", "ngram", "recycle"}


# ---- lanes -------------------------------------------------------------------------------------------------------


def test_there_are_as_many_lanes_as_may_be_and_the_oldest_goes(client: Served) -> None:
    for tree in ("chain:2", "chain:3", "chain:4", "chain:3"):
        client.complete(PROMPT, max_tokens=2, draft="ngram", tree=tree)
    assert [key[1] for key in lanes_of(client)._others] == ["chain:4", "chain:3"]


def long(tree: str) -> dict[str, Any]:
    return {"prompt": PROMPT, "max_tokens": 90, "stream": True, "draft": "ngram", "tree": tree, "ignore_eos": True}


def test_a_client_that_leaves_frees_the_slot_of_its_lane(client: Served) -> None:
    body = long("chain:6")
    with client.stream("POST", "/v1/completions", json=body) as answer:
        next(answer.iter_lines())
    lane = lanes_of(client)._others["ngram", "chain:6", "match"]
    eventually(lambda: lane.engine.target.free_slots == lane.engine.target.slots and not lane.has_work)


def test_a_lane_whose_steps_keep_failing_goes_and_the_server_stays(client: Served) -> None:
    choice = {"draft": "ngram", "tree": "chain:7"}
    client.complete(PROMPT, max_tokens=2, **choice)
    lane = lanes_of(client)._others["ngram", "chain:7", "match"]

    def fail(*arguments: Any) -> Any:
        raise RuntimeError("broken on purpose")

    lane.engine.target.score = fail  # type: ignore[method-assign]
    for _ in range(3):
        assert client.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 2, **choice}).status_code == 500
    eventually(lambda: lane not in lanes_of(client)._others.values())
    assert client.get("/ready").status_code == 200
    assert client.complete(PROMPT, max_tokens=2, **choice), "it is made anew"


class Still(Lane):
    """A lane that always has work, whose steps take as long as it is told."""

    has_work = True

    def __init__(self, seconds: float) -> None:
        self.spent, self.seconds, self.steps = 0.0, seconds, 0


def test_lanes_share_the_time_and_not_the_steps() -> None:
    lanes = Lanes.__new__(Lanes)
    slow, quick, late = Still(3.0), Still(1.0), Still(1.0)
    lanes.main, lanes._others, lanes._now, lanes._lock = slow, {("", None, ""): quick}, 0.0, threading.Condition()

    def turn() -> None:
        lane = lanes.next()
        assert isinstance(lane, Still)
        lane.spent += lane.seconds
        lane.steps += 1

    for _ in range(40):
        turn()
    assert (slow.steps, quick.steps) == (10, 30)
    lanes._others["late", None, ""] = late
    for _ in range(14):
        turn()
    assert (slow.steps, quick.steps, late.steps) == (12, 36, 6), "who comes late has no claim to the time before"


def test_a_lane_goes_when_nobody_waits_for_it_or_writes_in_it() -> None:
    lock = threading.Condition()
    lanes = Lanes(tiny_llm(), lock, most=1, queue=None)
    left, waits = lanes.find(PRESETS["plain"]), lanes.find(PRESETS["plain"])
    assert left.cancel()
    lanes.make_wanted()
    lane = waits.result(5)
    assert lane.awaited == 1
    busy = lanes.find(PRESETS["ngram"])
    lanes.make_wanted()
    with pytest.raises(QueueFull, match="at work"):
        busy.result(5)
    generation = lane.engine.submit(Request((5, 6, 7), max_new_tokens=4))
    with lock:
        lanes.let_go(lane)
    busy = lanes.find(PRESETS["ngram"])
    lanes.make_wanted()
    with pytest.raises(QueueFull, match="at work"):
        busy.result(5)
    while not generation.finished:
        assert lanes.next() is lane
        lane.engine.step()
    goes = lanes.find(PRESETS["ngram"])
    lanes.make_wanted()
    assert goes.result(5) is not lane


def test_nobody_waits_for_a_lane_of_a_server_that_ends() -> None:
    with serving(tiny_llm) as client:
        lanes = lanes_of(client)
        client.server.runner.stop(30)
        found = lanes.find(PRESETS["plain"])
        with client.server.runner.lock:
            lanes.refuse_all()
        with pytest.raises(QueueFull, match="ending"):
            found.result(5)
