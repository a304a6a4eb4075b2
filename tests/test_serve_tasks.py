"""Requests that say what their text is about, to a server whose draft model is a pack of specialists."""

from __future__ import annotations

import json
from collections import Counter
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import openai
import pytest
from typer.testing import CliRunner

from branchwise.backends.transformers.target import TransformersTarget
from branchwise.cli import app
from branchwise.draft import build_drafter
from branchwise.draft.model.specialists import Specialists
from branchwise.engine import Engine
from branchwise.llm import LLM
from branchwise.methods import Method
from branchwise.train.merge import merge
from branchwise.verify import VERIFIERS
from tests.browser import browsing
from tests.serving import Served, serving
from tests.test_experts import tokenizer
from tests.test_merge import saved, tiny, tuned
from tests.test_serve_page import DONE, READY, TEXT

TASKS = ("code", "law")
PROMPT = "w5 w6 w7"
OWN = Method("own", "model:pack")


@pytest.fixture(scope="module")
def made(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder, base = tmp_path_factory.mktemp("made"), tiny()
    saved(base, folder / "base")
    for seed, task in enumerate(TASKS, start=1):
        saved(tuned(base, seed), folder / task)
    merge(str(folder / "base"), {task: str(folder / task) for task in TASKS}, folder / "pack", "int8")
    return folder


@pytest.fixture(scope="module")
def client(made: Path) -> Iterator[Served]:
    def load() -> LLM:
        model, words = tiny(7), tokenizer()
        words.chat_template = "{% for m in messages %}{{ m.content }}{% endfor %}"
        engine = Engine(
            TransformersTarget(model, slots=2, tokenizer=words),
            build_drafter(f"model:{made / 'pack'}"),
            VERIFIERS.build("match"),
        )
        return LLM("tiny", model, words, engine)

    with serving(load, method=OWN) as client:
        yield client


class Drafted:
    """Which specialists drafted since."""

    def __init__(self, client: Served) -> None:
        drafter = client.llm.engine.drafter
        assert isinstance(drafter, Specialists)
        self._seen = drafter._seen
        self._before = self._now()

    def _now(self) -> Counter[str]:
        return Counter({task: steps for task, (steps, _) in self._seen.items()})

    def __call__(self) -> set[str]:
        return set(self._now() - self._before)


def test_the_specialist_of_the_task_drafts_for_both_kinds_of_completions(client: Served) -> None:
    asked: Any = {"model": "tiny", "max_tokens": 12, "temperature": 0, "extra_body": {"task": "law"}}
    with openai.OpenAI(base_url=f"{client.address}/v1", api_key="none", max_retries=0) as official:
        drafted = Drafted(client)
        found = official.completions.create(prompt=PROMPT, **asked).choices[0].text
        chat = official.chat.completions.create(messages=[{"role": "user", "content": PROMPT}], **asked)
        assert drafted() == {"law"}
    drafted = Drafted(client)
    other = client.post("/v1/completions", json={"prompt": PROMPT, **asked, "task": "code", "extra_body": None})
    assert drafted() == {"code"}
    assert other.json()["choices"][0]["text"] == found == chat.choices[0].message.content
    assert other.headers["X-Ignored-Fields"] == "extra_body"


def test_every_choice_of_a_request_has_its_task(client: Served) -> None:
    drafted = Drafted(client)
    client.complete([PROMPT, "w9"], n=2, max_tokens=8, seed=1, task="code")
    assert drafted() == {"code"}
    client.complete(PROMPT, max_tokens=12, task="law", method="own")  # the server's method by its name
    assert drafted() == {"code", "law"}


def test_a_task_that_nobody_drafts_for_is_refused_with_those_that_are_known(client: Served) -> None:
    def refused(**asked: Any) -> Any:
        answer = client.post("/v1/completions", json={"prompt": PROMPT, "max_tokens": 4, **asked})
        assert answer.status_code == 400, answer.text
        error = answer.json()["error"]
        assert (error["type"], error["param"]) == ("invalid_request_error", "task")
        return error["message"]

    assert refused(task="laws") == "Unknown task 'laws'. Did you mean 'law'? Known: code, law."
    assert refused(task="laws", stream=True) == "Unknown task 'laws'. Did you mean 'law'? Known: code, law."
    assert "no specialists" in refused(task="law", method="plain")
    assert "at most 80" in refused(task="a" * 81)
    lanes = client.server.runner.lanes
    assert lanes is not None
    assert not lanes._others, "a lane was made for a request that is refused"


def test_people_and_programs_can_read_which_tasks_there_are(client: Served) -> None:
    assert client.get("/v1/methods").json()["tasks"] == list(TASKS)
    schemas = client.get("/openapi.json").json()["components"]["schemas"]
    for form in ("CompletionAsked", "ChatAsked"):
        assert schemas[form]["properties"]["task"]["anyOf"][0] == {"type": "string", "maxLength": 80}


@pytest.mark.filterwarnings("ignore::branchwise.errors.LargeDraftWarning")
def test_the_command_takes_a_task(made: Path) -> None:
    pack = ["--draft-model", str(made / "pack"), "--method", "emr"]
    words = ["generate", PROMPT, "--model", str(made / "base"), "--raw", "-n", "12", "--json", "--dtype", "float32"]
    done = CliRunner().invoke(app, [*words, *pack, "--task", "law"])
    assert done.exit_code == 0, done.output
    assert len(json.loads(done.stdout)["token_ids"]) == 12
    wrong = CliRunner().invoke(app, [*words, *pack, "--task", "laws"])
    assert wrong.exit_code
    assert "Unknown task 'laws'" in str(wrong.exception)
    without = CliRunner().invoke(app, [*words, "--method", "plain", "--task", "law"])
    assert "no specialists" in str(without.exception)


def test_the_playground_asks_for_the_task_that_is_chosen(client: Served, tmp_path: Path) -> None:
    hidden = "document.getElementById('task').parentElement.hidden"
    with browsing(tmp_path) as page:
        page.go(f"{client.address}/")
        page.wait(READY)
        assert page.run("[...document.getElementById('task').options].map(o => o.value)") == ["", *TASKS]
        assert page.run(hidden) is False
        page.choose("#method", "ngram")
        assert page.run(hidden) is True
        page.choose("#method", "")
        page.choose("#task", "law")
        page.run("document.getElementById('race').checked = true; document.getElementById('length').value = 12")
        drafted = Drafted(client)
        page.run("document.getElementById('prompt').focus()")
        page.type(PROMPT)
        page.press("Enter")
        page.wait(DONE)
        own, plain = page.run(TEXT)
        assert own == plain
        assert drafted() == {"law"}
        assert not page.problems
