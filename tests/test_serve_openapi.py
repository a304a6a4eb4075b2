"""The server's description of itself, and what becomes of requests that are generated from it."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from fastapi import FastAPI
from hypothesis import HealthCheck, Phase, given, seed, settings
from schemathesis import Case, GenerationMode
from schemathesis.checks import CheckFunction
from schemathesis.specs.openapi import checks

from branchwise.serve.settings import Limits
from branchwise.serve.web.openapi import PATH, STATUSES
from tests.serving import Served, eventually, free_slots_of, serving, tiny_llm

LIMITS = Limits(new_tokens=12, choices=3, prompts=4, stops=4, biases=8)
SHARES = {"/v1/completions": 0.45, "/v1/chat/completions": 0.35, "/tokenize": 0.1, "/detokenize": 0.05}
"""of the requests; the paths without a body share the rest"""
PLAIN = {"messages", "prompt", "model", "n", "stream", "seed", "max_tokens", "temperature", "top_p", "top_k", "min_p"}
PLAIN |= {"presence_penalty", "frequency_penalty", "repetition_penalty", "metrics", "user", "add_special_tokens"}
"""fields that ask for nothing that could be impossible; those that describe forms mostly are, if they are made up"""
CHECKS: list[CheckFunction] = [
    schemathesis.checks.not_a_server_error,
    checks.status_code_conformance,
    checks.content_type_conformance,
    checks.response_schema_conformance,
    checks.negative_data_rejection,
]


@pytest.fixture(scope="module")
def served() -> Iterator[Served]:
    with serving(tiny_llm, limits=LIMITS) as client:
        yield client


def test_the_document_describes_every_path_of_the_app(served: Served) -> None:
    document = served.get(PATH).json()
    app = served.server.door.app
    assert isinstance(app, FastAPI)
    routes = {
        (route.path.replace(":path", ""), method.lower())
        for route in app.routes
        if route.include_in_schema
        for method in route.methods
    }
    described = {(path, kind) for path, item in document["paths"].items() for kind in item if kind != "parameters"}
    assert described == routes
    named = set(json.dumps(document).split('"#/components/schemas/')[1:])
    assert {name.split('"')[0] for name in named} == set(document["components"]["schemas"])


def test_the_document_tells_the_limits_of_this_server(served: Served) -> None:
    schemas = served.get(PATH).json()["components"]["schemas"]
    for form in ("CompletionAsked", "ChatAsked"):
        asked = schemas[form]["properties"]
        assert [asked[name]["anyOf"][0]["maximum"] for name in ("n", "max_tokens")] == [3, 12]
        assert asked["stop"]["anyOf"][1]["maxItems"] == 4
        assert asked["model"]["anyOf"][0]["enum"] == ["tiny"]
    assert schemas["CompletionAsked"]["properties"]["best_of"] == {"enum": [None, 1]}


def test_a_server_with_keys_says_so() -> None:
    with serving(tiny_llm, keys=("key",)) as client:
        document = client.get(PATH).json()
        assert document["paths"]["/v1/models"]["get"]["security"] == [{"key": []}]
        assert "security" not in document["paths"]["/health"]["get"]


@pytest.mark.parametrize("requests", [200, 10_000])
def test_generated_requests_are_answered_as_the_document_says(served: Served, requests: int) -> None:
    """Requests that the document allows and requests that it does not: never a 500, always OpenAI's form."""
    schema = schemathesis.openapi.from_url(f"{served.address}{PATH}")
    before = served.complete("to be or not", max_tokens=12, temperature=0)["choices"]
    operations = {found.ok().label: found.ok() for found in schema.get_all_operations()}
    statuses: Counter[int] = Counter()
    for label, operation in operations.items():
        path = label.split()[1]
        share = SHARES.get(path, (1 - sum(SHARES.values())) / (len(operations) - len(SHARES)))
        for mode in GenerationMode:
            if mode is GenerationMode.POSITIVE or path in SHARES:
                parts = 2 if path in SHARES else 1
                cases = operation.as_strategy(generation_mode=mode)
                if mode is GenerationMode.POSITIVE:
                    cases = cases | cases.map(plain)
                _send(cases, round(requests * share / parts), statuses)
    assert sum(statuses.values()) >= 0.9 * requests
    assert set(statuses) <= {200, *STATUSES} - {500, 503}
    assert min(statuses[200], statuses[400]) > requests / 20
    assert served.complete("to be or not", max_tokens=12, temperature=0)["choices"] == before
    eventually(lambda: not served.server.runner.live and served.server.door.inside == 0)
    assert free_slots_of(served) == served.llm.engine.target.slots


def plain(case: Case) -> Case:
    """A request that most servers would have an answer to."""
    if isinstance(case.body, dict) and {"prompt", "messages"} & set(case.body):
        case.body = {name: value for name, value in case.body.items() if name in PLAIN}
    return case


def _send(strategy: Any, count: int, statuses: Counter[int]) -> None:
    @seed(0)
    @settings(
        max_examples=max(count, 1),
        deadline=None,
        database=None,
        phases=[Phase.generate],
        suppress_health_check=list(HealthCheck),
    )
    @given(strategy)
    def each(case: Case) -> None:
        response = case.call()
        statuses[response.status_code] += 1
        case.validate_response(response, checks=CHECKS)
        if response.status_code >= 400 and response.status_code != 405:
            assert set(response.json()["error"]) == {"message", "type", "param", "code"}

    each()
