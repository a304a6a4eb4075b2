"""The playground in a headless Chromium, as people use it; screenshots are kept in BRANCHWISE_SCREENSHOTS, if set."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator
from importlib.resources import files
from pathlib import Path
from typing import Any

import pytest

from branchwise.methods import PRESETS
from tests.browser import Browser, browsing
from tests.serving import Brake, Served, eventually, read_events, serving, tiny_llm

PAGE = files("branchwise.serve") / "page"
PROMPT = "one two one two one two"
HOSTILE = '<img src=x onerror="document.title = 1"> & "quotes"'
TEXT = "[...document.querySelectorAll('.run')].map(r => r.querySelector('.text').textContent)"
DONE = "document.getElementById('send').textContent === 'Send' && document.querySelectorAll('.run .tok').length > 0"
READY = "document.getElementById('status').textContent.includes('ready')"


def shown(name: str) -> str:
    return f"document.getElementById('{name}').textContent"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with browsing(tmp_path_factory.mktemp("browser")) as browser:
        yield browser


@pytest.fixture(scope="module")
def server() -> Iterator[Served]:
    with serving(lambda: tiny_llm(context=512), method=PRESETS["ngram"]) as client:
        yield client


@pytest.fixture
def page(browser: Browser, server: Served) -> Iterator[Browser]:
    """The page as it is opened on a desk."""
    browser.problems.clear()
    browser.size(1280, 860)
    browser.prefer("light")
    browser.go(f"{server.address}/")
    browser.wait(READY)
    yield browser
    assert not browser.problems


def shoot(page: Browser, tmp_path: Path, name: str) -> bytes:
    folder = Path(os.environ.get("BRANCHWISE_SCREENSHOTS") or tmp_path)
    folder.mkdir(parents=True, exist_ok=True)
    return page.shoot(folder / f"{name}.png")


def ask(page: Browser, prompt: str = PROMPT) -> None:
    """Type and send, by keyboard alone."""
    page.run("document.getElementById('length').value = 24; document.getElementById('prompt').focus()")
    page.type(prompt)
    page.press("Enter")
    page.wait(DONE)


def traced(server: Served, **body: Any) -> tuple[str, list[Any], list[Any]]:
    """What the server says of the same text: its text, its tokens, its steps."""
    asked = {"messages": [{"role": "user", "content": PROMPT}], "max_tokens": 24, "temperature": 0, "seed": 1, **body}
    with server.stream("POST", "/v1/chat/completions", json=asked | {"stream": True, "trace": True}) as answer:
        told = [json.loads(data).get("branchwise") for data in read_events(answer) if data != "[DONE]"]
    tokens = [token for part in told if part for token in part["tokens"]]
    steps = [step for part in told if part for step in part["steps"]]
    return "".join(token["text"] for token in tokens), tokens, steps


# ---- the files ---------------------------------------------------------------------------------------------------


def test_the_page_asks_nothing_of_other_servers(server: Served) -> None:
    answer = server.get("/")
    assert answer.headers["content-type"].startswith("text/html")
    policy = answer.headers["content-security-policy"]
    assert "default-src 'none'" in policy
    assert "unsafe" not in policy
    names = re.findall(r'(?:src|href)="([^"]*)"', answer.text)
    assert {"app.js", "style.css", "icon.svg"} <= set(names)
    for file in PAGE.iterdir():
        text = server.get("/" if file.name == "index.html" else f"/{file.name}").text
        assert text == file.read_text()
        assert not re.search(r"(?:https?:)?//[a-z]", text.replace("http://www.w3.org/2000/svg", ""))
        names += re.findall(r'from "\./([^"]*)"', text)
    for name in set(names):
        assert (PAGE / name).is_file(), name
    assert 'style="' not in answer.text, "the policy forbids it"


def test_what_the_page_asks_for_is_there(server: Served) -> None:
    """Every element that a script names has its place, once."""
    html = (PAGE / "index.html").read_text()
    places = re.findall(r'id="([^"]*)"', html)
    assert len(places) == len(set(places))
    for file in PAGE.iterdir():
        if file.name.endswith(".js"):
            assert set(re.findall(r'\bat\("([^"]*)"\)', file.read_text())) <= set(places)


def test_without_a_playground_there_is_no_page() -> None:
    with serving(tiny_llm, playground=False) as client:
        assert client.get("/").status_code == 404
        assert client.get("/app.js").status_code == 404


# ---- in a browser ------------------------------------------------------------------------------------------------


def test_tokens_arrive_and_are_coloured_by_who_drafted_them(page: Browser, server: Served, tmp_path: Path) -> None:
    text, tokens, steps = traced(server)
    brake = Brake(server.llm)
    brake.hold()
    page.run("document.getElementById('length').value = 24; document.getElementById('prompt').focus()")
    page.type(PROMPT)
    page.press("Enter")
    try:
        brake.wait()
        assert page.run("document.querySelectorAll('.run .tok').length") == 0
        assert page.run(shown("send")) == "Stop"
    finally:
        brake.release()
    page.wait(DONE)
    assert page.run(TEXT) == [text]
    seen = page.run("[...document.querySelectorAll('.run .tok')].map(t => t.title.replace('drafted by ', ''))")
    assert seen == [token["source"] for token in tokens]
    assert "ngram" in seen
    assert "" in seen
    colours = page.run("[...document.querySelectorAll('.run .tok')].map(t => getComputedStyle(t).backgroundColor)")
    pairs = set(zip(seen, colours, strict=True))
    assert len({colour for source, colour in pairs if source}) != 0
    assert not {colour for source, colour in pairs if source} & {"rgba(0, 0, 0, 0)"}
    assert page.run(shown("m-steps")) == str(len(steps))
    assert page.run(shown("m-length")) == f"{24 / len(steps):.2f}"
    assert float(page.run(shown("m-speed"))) > 0
    drafted = sum(bool(token["source"]) for token in tokens)
    assert page.run("document.querySelector('#legend [data-source=ngram] b').textContent") == str(drafted)
    shoot(page, tmp_path, "answer")


def test_a_token_opens_the_tree_of_its_step(page: Browser, server: Served, tmp_path: Path) -> None:
    _, tokens, steps = traced(server)
    ask(page)
    place = next(place for place, token in enumerate(tokens) if token["source"])
    page.run(f"document.querySelectorAll('.run .tok')[{place}].click()")
    number, first = 0, 0
    while first + steps[number]["emitted"] <= place:
        first += steps[number]["emitted"]
        number += 1
    step = steps[number]
    assert page.run(shown("where")).startswith(f"Step {number + 1} of {len(steps)}")
    assert page.run("document.querySelectorAll('#drawing .node').length") == len(step["nodes"]) + 1
    assert page.run("document.querySelectorAll('#drawing .node.kept:not(.own)').length") == len(step["path"])
    kept = f"kept {len(step['path']) - 1} token"
    assert kept in page.run(shown("story"))
    page.point("#drawing [data-node='1']")
    assert page.run("!document.getElementById('tip').hidden")
    assert "drafted by ngram; the model gives it p =" in page.run(shown("tip"))
    shoot(page, tmp_path, "tree")
    here = page.run("[...document.querySelectorAll('.run .tok')].map(t => t.classList.contains('here'))")
    assert here == [first <= one < first + step["emitted"] for one in range(len(tokens))]


def test_the_keyboard_goes_through_steps_and_nodes(page: Browser) -> None:
    ask(page)
    page.run("document.querySelector('.run .text').focus()")
    page.run("document.querySelector('.run .tok').click()")
    assert page.run(shown("where")).startswith("Step 1 of")
    page.press("ArrowRight")
    assert page.run(shown("where")).startswith("Step 2 of")
    page.press("ArrowLeft")
    page.press("ArrowLeft")
    assert page.run(shown("where")).startswith("Step 1 of")
    page.run("document.getElementById('drawing').focus()")
    assert "where the step began" in page.run(shown("node"))
    page.press("ArrowRight")
    assert "p =" in page.run(shown("node")) or "own token" in page.run(shown("node"))
    assert page.run(shown("where")).startswith("Step 1 of"), "arrows in the tree do not leave the step"
    order = []
    page.run("document.activeElement.blur()")
    for _ in range(40):
        page.press("Tab")
        order.append(page.run("document.activeElement.id || document.activeElement.className"))
    reached = {"save", "open", "theme", "text", "prompt", "race", "send", "strip", "back", "play", "next", "drawing"}
    assert reached <= set(order)


def test_another_drafter_is_a_choice_away(page: Browser, server: Served) -> None:
    assert page.run("document.getElementById('task').parentElement.hidden") is True  # nothing here has specialists
    page.choose("#draft", "recycle")
    assert page.run("document.getElementById('method').value") == "-"
    trees = page.run("[...document.getElementById('tree').options].map(o => o.value)")
    assert "paths:2x4" in trees
    page.choose("#tree", "")
    assert page.run("[...document.getElementById('verify').options].map(o => o.value)") == ["match"]
    page.choose("#tree", "paths:2x4")
    assert "cascade" in page.run("[...document.getElementById('verify').options].map(o => o.value)")
    page.choose("#verify", "cascade")
    ask(page)
    assert page.run("document.querySelector('.run h3 span').textContent") == "recycle / paths:2x4 / cascade"
    sources = page.run("[...document.querySelectorAll('#legend [data-source]')].map(e => e.dataset.source)")
    assert set(sources) <= {"", "recycle"}
    assert page.run(TEXT) == [traced(server)[0]]
    page.choose("#method", "plain")
    assert page.run("document.getElementById('draft').value") == "none"


def test_plain_decoding_runs_beside_and_writes_the_same(page: Browser, server: Served, tmp_path: Path) -> None:
    page.run("document.getElementById('race').click()")
    ask(page)
    assert page.run(TEXT) == [traced(server)[0]] * 2
    assert page.run("document.querySelector('.verdict').textContent").startswith("✓ The same text, ")
    assert page.run("document.querySelectorAll('.run.plain .tok[title]').length") == 0
    speeds = page.run("[...document.querySelectorAll('.run h3 b')].map(e => parseFloat(e.textContent))")
    assert all(speed > 0 for speed in speeds)
    shoot(page, tmp_path, "race")


def test_a_conversation_goes_on_and_can_be_stopped(page: Browser, server: Served) -> None:
    ask(page)
    brake = Brake(server.llm)
    brake.hold()
    page.run("document.getElementById('prompt').focus()")
    page.type("more")
    page.press("Enter")
    try:
        brake.wait()
        page.press("Escape")
        page.wait("document.getElementById('send').textContent === 'Send'")
    finally:
        brake.release()
    assert page.run("document.querySelectorAll('.turn').length") == 2
    eventually(lambda: not server.server.runner.live)


def test_dark_is_dark_by_preference_and_by_switch(page: Browser, tmp_path: Path) -> None:
    paper = "getComputedStyle(document.documentElement).backgroundColor"

    def light() -> bool:
        return sum(map(int, re.findall(r"\d+", page.run(paper))[:3])) > 384

    assert light()
    page.prefer("dark")
    assert not light()
    ask(page)
    shoot(page, tmp_path, "dark")
    page.point("#theme", click=True)
    assert light()
    page.run("localStorage.clear()")


def test_a_phone_needs_no_horizontal_scroll(page: Browser, tmp_path: Path) -> None:
    page.size(390, 844, phone=True)
    page.run("document.getElementById('settings').open = true; document.getElementById('race').click()")
    ask(page, PROMPT + "x" * 80)
    for place in ("left", "composer", "right"):
        page.run(f"document.getElementById('{place}').scrollIntoView()")
        assert page.run("[document.documentElement.scrollWidth, innerWidth]") == [390, 390]
        shoot(page, tmp_path, f"phone-{place}")
    seen = "[...document.querySelectorAll('button, select, textarea')].filter(e => e.offsetParent)"
    heights = page.run(f"{seen}.filter(e => !e.closest('#strip')).map(e => e.getBoundingClientRect().height)")
    assert min(heights) >= 28, "fingers are not needles"


def test_a_replay_is_saved_and_opened_without_a_server(browser: Browser, tmp_path: Path) -> None:
    browser.keep_downloads(tmp_path)
    browser.size(1280, 860)
    file = tmp_path / "branchwise-replay.json"
    with serving(lambda: tiny_llm(context=512), method=PRESETS["ngram"]) as client:
        browser.go(f"{client.address}/")
        browser.wait(READY)
        browser.run("document.getElementById('race').click()")
        ask(browser)
        written, told = browser.run(TEXT), browser.run(shown("m-length"))
        browser.point("#save", click=True)
        eventually(file.is_file)
        browser.go(f"{client.address}/")
        browser.wait(READY)
    browser.give("#file", file)
    browser.wait("document.querySelectorAll('.run .tok').length > 0")
    assert browser.run(TEXT) == written
    assert browser.run(shown("m-length")) == told
    assert browser.run("document.querySelectorAll('#drawing .node').length") > 1
    browser.point("#play", click=True)
    browser.wait(f"{shown('play')} === '▶'")
    assert browser.run(TEXT) == written
    saved = json.loads(file.read_text())
    saved["turns"][0]["prompt"] = saved["turns"][0]["runs"][0]["tokens"][0]["text"] = HOSTILE
    saved["turns"][0]["runs"][0]["steps"][0]["own"]["token"] = HOSTILE
    file.write_text(json.dumps(saved))
    browser.give("#file", file)
    browser.wait("document.querySelector('.said').textContent.includes('<img')")
    assert browser.run("document.querySelectorAll('.turn img').length") == 0
    saved["turns"][0]["runs"][0]["steps"][0]["nodes"][0]["parent"] = 7
    for wrong, says in ((json.dumps(saved), "damaged"), ("{}", "not a replay"), ("no", "not JSON")):
        file.write_text(wrong)
        browser.give("#file", file)
        browser.wait(f"{shown('status')}.includes({json.dumps(says)})")


def test_a_server_with_keys_is_asked_with_one(browser: Browser) -> None:
    with serving(lambda: tiny_llm(context=512), keys=("sesame",)) as client:
        browser.size(1280, 860)
        browser.go(f"{client.address}/")
        for key in ("wrong", "sesame"):
            browser.wait("document.getElementById('door').open")
            browser.run("document.getElementById('key').focus()")
            browser.type(key)
            browser.press("Enter")
            browser.wait("!document.getElementById('door').open || document.getElementById('key').value === ''")
        browser.wait(READY)
        ask(browser)
        assert browser.run("document.querySelectorAll('.problem').length") == 0
        browser.run("sessionStorage.clear()")
