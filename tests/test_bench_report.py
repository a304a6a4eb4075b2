"""The page: its numbers are those of the metrics, nothing in a record can get out of its place, and it can be read."""

from __future__ import annotations

import dataclasses
import html
import re
import shutil
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import markupsafe
import numpy as np
import pytest

from branchwise.bench.figures import Figure, Missing, draw, figures
from branchwise.bench.records import Difference, Record
from branchwise.bench.report import commands_of, write_report
from branchwise.bench.summary import cells, in_order, shown_ratio, summarise
from branchwise.errors import UsageError
from branchwise.plots import DARK, LIGHT, Theme, paint_ratios
from tests.test_bench_metrics import record

pytest.importorskip("matplotlib")

COMMAND = "branchwise bench --model smollm2 --methods ngram"
COSTS = [{"nodes": 1, "seconds": 0.058}, {"nodes": 64, "seconds": 0.098}]
HOSTILE = '<script>alert("x")</script>$\\frac{&amp;' + "long" * 40
"""a name that would run, would be set as a formula, is escaped already, and has no place to break"""


def golden(name: str = "ngram", second: str = "code") -> list[Record]:
    """Two contestants, two categories, two states, a near-tie, and what can be told about speculation."""
    run = {"commit": "abc", "command": COMMAND, "model": "smollm2", "device": "cpu", "versions": {"torch": "2.13"}}
    found = []
    for place in range(4):
        for state, gain in (("cold", 1.5), ("warm", 2.0)):
            common: dict[str, Any] = {
                "item": f"item-{place}",
                "category": "chat" if place < 2 else second,
                "state": state,
                "tokens": 40,
                "correct": place % 2 == 0,
                "ids": tuple(range(40)),
                "run": run,
            }
            found.append(record("plain", **common, steps=40, accepted=0, drafted=0, seconds=2.0 + 0.1 * place))
            found.append(
                record(
                    name,
                    **common,
                    steps=20,
                    accepted=20,
                    drafted=160,
                    drafted_per_depth=(20, 20, 10),
                    accepted_per_depth=(12, 6, 2),
                    by_source={"target": 20, name: 20},
                    draft_passes=0,
                    phases={"prefill": 0.1, "score": 0.6},
                    seconds=2.0 / gain,
                    equal=place != 3,
                    difference=Difference(7, 11, 13, 0.0123) if place == 3 else None,
                )
            )
    return found


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_report(golden(), tmp_path_factory.mktemp("report"), COSTS).parent


@pytest.fixture(scope="module")
def page(folder: Path) -> str:
    return (folder / "index.html").read_text()


class Reader(HTMLParser):
    """The tables of a page as texts, and its tags."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tables: list[list[list[str]]] = []
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attrs)))
        if tag == "table":
            self.tables.append([])
        elif tag == "tr":
            self.tables[-1].append([])
        elif tag in ("td", "th"):
            self.tables[-1][-1].append("")

    def handle_data(self, data: str) -> None:
        if self.tables and self.tables[-1] and self.tables[-1][-1] and self.lasttag in ("td", "th", "span"):
            self.tables[-1][-1][-1] += data


def test_the_tables_hold_the_numbers_of_the_metrics(page: str) -> None:
    rows = summarise(golden())
    titles, lines = cells(in_order(rows, per_category=False))
    tables = Reader(page).tables
    assert tables[0] == [titles, *lines]
    assert tables[2] == [["contestant", "compared", "equal", "max gap"], ["ngram", "8", "6", "0.0123"]]
    assert tables[3][1] == ["ngram", "item-3", "0", "0", "7", "11", "13", "0.0123"]
    assert shown_ratio(rows[3].speed_up) in tables[0][2]


def test_the_alternative_texts_say_the_finding_in_numbers(page: str) -> None:
    texts = [attributes["alt"] or "" for tag, attributes in Reader(page).tags if tag == "img"]
    assert len(texts) == 9
    overall = next(row for row in summarise(golden()) if row.contestant == "ngram")
    assert f"ngram is {shown_ratio(overall.speed_up)} times as fast" in texts[0]
    by_category = {row.category: row.speed_up.value for row in summarise(golden()) if row.speed_up}
    assert texts[1] == (
        f"2 of 2 are faster than plain decoding, from {by_category['chat']:.2f} for ngram in chat to "
        f"{by_category['code']:.2f} for ngram in code."
    )
    assert texts[2] == "ngram accepts 60% at depth 1 and 20% at depth 3."
    assert all(re.search(r"\d", text) for text in texts)


def test_the_figures_lie_beside_the_page_in_light_and_dark(folder: Path) -> None:
    files = sorted(path.name for path in folder.glob("*.png"))
    assert len(files) == 18
    assert {"speed-up.png", "speed-up-dark.png", "scoring-cost.png", "where-it-pays-dark.png"} <= set(files)
    assert all((folder / name).read_bytes().startswith(b"\x89PNG") for name in files)


def test_each_figure_has_the_command_that_measured_it(page: str) -> None:
    assert page.count(html.escape(COMMAND)) >= 8


def test_a_command_is_rebuilt_from_arguments() -> None:
    given = {"suite": ["a", "b"], "max_new_tokens": 8, "full_length": True, "limit": None, "greedy": False}
    assert commands_of([record(run={"arguments": given})]) == [
        "branchwise bench --suite a --suite b --max-new-tokens 8 --full-length"
    ]


def test_the_page_asks_nothing_of_the_network(page: str) -> None:
    tags = Reader(page).tags
    assert not {"script", "link", "iframe", "object"} & {tag for tag, _ in tags}
    sources = [
        value or "" for _, attributes in tags for name, value in attributes.items() if name in ("src", "srcset", "href")
    ]
    assert sources
    assert all(source.startswith("data:image/png;base64,") for source in sources)
    assert "http" not in re.sub(r"base64,[^\"]*|http-equiv", "", page)


@pytest.fixture(scope="module")
def hostile(tmp_path_factory: pytest.TempPathFactory) -> Path:
    records = [
        dataclasses.replace(one, text=HOSTILE, run={**one.run, "model": HOSTILE, "command": HOSTILE, HOSTILE: HOSTILE})
        for one in golden(HOSTILE, HOSTILE)
    ]
    return write_report(records, tmp_path_factory.mktemp("hostile") / "new" / "folder")


def test_what_records_hold_stays_text(hostile: Path) -> None:
    page = hostile.read_text()
    assert "<script" not in page
    assert markupsafe.escape(HOSTILE) in page
    assert Reader(page).tables[0][2][0] == HOSTILE


def test_the_same_records_give_the_same_bytes(folder: Path, page: str, tmp_path: Path) -> None:
    write_report(golden(), tmp_path, COSTS)
    for path in folder.iterdir():
        assert path.read_bytes() == (tmp_path / path.name).read_bytes(), path.name


def test_what_is_absent_is_named_and_not_drawn(tmp_path: Path) -> None:
    page = write_report([record("plain"), record("server")], tmp_path).read_text()
    assert [path.name for path in sorted(tmp_path.glob("*.png"))] == ["speed-up-dark.png", "speed-up.png"]
    for sentence in (
        "No contestant and the baseline have done the same requests in two categories.",
        "No contestant says at which depth its drafts were accepted.",
        "No contestant says how many nodes it drafted.",
        "No contestant says where its time went.",
        "No contestant says who proposed its tokens.",
        "All records are cold; run the benchmark in the other state too to compare.",
        "No item of these records has a checker.",
        "No answer was compared with the baseline&#x27;s.".replace("&#x27;", "'"),
        "The records do not say which command measured them.",
        "The records do not say where they come from.",
    ):
        assert sentence in page
    assert "Cost of a pass" not in page


def test_without_a_baseline_there_is_no_speed_up() -> None:
    alone = [record()]
    assert figures(alone, summarise(alone), [])[0] == Missing(
        "Speed-up by category", "No contestant has requests that the baseline has done too."
    )
    assert isinstance(figures(alone, summarise(alone), [])[-1], Missing)


def test_runs_that_cannot_be_compared_are_told(tmp_path: Path) -> None:
    runs = [{"machine": "one", "arguments": {"batch": 1}}, {"machine": "two", "arguments": {"batch": 4}}]
    page = write_report([record(item=str(place), run=run) for place, run in enumerate(runs)], tmp_path).read_text()
    assert "runs that differ in machine, batch;" in page


def test_runs_of_different_models_or_devices_are_not_joined(tmp_path: Path) -> None:
    runs = [{"device": "cpu"}, {"device": "H200"}]
    with pytest.raises(UsageError, match=r"more than one device \(H200, cpu\)"):
        write_report([record(item=str(place), run=run) for place, run in enumerate(runs)], tmp_path)


def test_many_contestants_keep_colours_and_marks_apart() -> None:
    records = [record(name, item) for name in ("plain", *(f"method-{place}" for place in range(9))) for item in "ab"]
    found = figures(records, summarise(records), None)[0]
    assert isinstance(found, Figure)
    assert "4 more are in the summary table" in found.finding
    assert draw(found, LIGHT) != draw(found, DARK)


def test_batches_stand_side_by_side_where_it_pays() -> None:
    gains = {1: {"chat": 2.0, "code": 1.5}, 16: {"chat": 0.8, "code": 1.1}}
    records = [
        record(name, category, category=category, seconds=seconds, run={"arguments": {"batch": batch}})
        for batch, by_category in gains.items()
        for category, gain in by_category.items()
        for name, seconds in (("plain", 1.0), ("ngram", 1 / gain))
    ]
    found = figures(records, summarise(records), None)[1]
    assert isinstance(found, Figure)
    assert found.finding == (
        "3 of 4 are faster than plain decoding, "
        "from 0.80 for ngram, batch 16 in chat to 2.00 for ngram, batch 1 in chat."
    )
    assert draw(found, LIGHT) != draw(found, DARK)
    alone = [one for one in records if one.category == "chat"]
    assert isinstance(figures(alone, summarise(alone), None)[1], Missing)


def test_many_contestants_go_down_the_page_where_it_pays() -> None:
    names = ("plain", *(f"method-{place}" for place in range(9)))
    records = [record(name, item, category=item) for name in names for item in "ab"]
    found = figures(records, summarise(records), None)[1]
    assert isinstance(found, Figure)
    few = figures(records[:4], summarise(records[:4]), None)[1]
    assert isinstance(few, Figure)
    assert found.height > 2 * few.height
    assert png_size(draw(found, LIGHT))[0] == png_size(draw(few, LIGHT))[0]


def png_size(image: bytes) -> tuple[int, int]:
    return int.from_bytes(image[16:20], "big"), int.from_bytes(image[20:24], "big")


@pytest.mark.parametrize("theme", [LIGHT, DARK], ids=lambda theme: theme.name)
def test_a_heat_map_is_paper_at_one_and_equally_strong_on_both_sides(theme: Theme) -> None:
    from matplotlib.colors import to_hex
    from matplotlib.figure import Figure as Canvas

    def colours(*ratios: float | None) -> tuple[list[str], list[str]]:
        axes = Canvas().add_subplot()
        paint_ratios(axes, theme, ["a"], [str(place) for place in range(len(ratios))], [ratios])
        boxes = [to_hex(box.get_facecolor()[0]) for box in axes.collections]
        return boxes, [text.get_text() for text in axes.texts]

    below, above = theme.colours[1], theme.colours[0]
    assert colours(0.5, 1.0, 2.0) == ([below, theme.paper, above], ["0.50", "1.00", "2.00"])
    assert colours(None, 3.0) == ([above], ["3.00"]), "what was not measured stays empty"
    assert colours(0.02, 4.0)[0] == [below, above], "what is far beyond takes no colour from the others"
    [almost] = colours(1.02)[0]
    assert almost not in (theme.paper, above), "what hardly differs stays pale"


def test_an_empty_report_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UsageError, match="no records"):
        write_report([], tmp_path)


def test_a_folder_that_cannot_be_written_is_told(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="cannot be written"):
        write_report([record()], tmp_path / "file")


def test_without_matplotlib_the_install_line_is_told(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    with pytest.raises(UsageError, match=re.escape("pip install 'branchwise[plot]'")):
        write_report(golden(), tmp_path)


# ---- in a browser ------------------------------------------------------------------------------------------------

DARK_MODE = "--blink-settings=preferredColorScheme=0"


def browse(page: Path, *options: str) -> str:
    browser = shutil.which("chromium")
    if browser is None:
        pytest.skip("chromium is not installed; apt-get install chromium")
    command = [
        browser,
        "--headless=new",
        "--no-sandbox",
        "--disable-gpu",
        "--hide-scrollbars",
        f"--user-data-dir={page.parent / 'profile'}",
    ]
    return subprocess.run(
        [*command, *options, page.as_uri()], capture_output=True, text=True, timeout=60, check=True
    ).stdout


def screenshot(page: Path, width: int, *options: str) -> Any:
    """(height, width, 3) of what a reader sees, in 0 to 1."""
    from matplotlib.image import imread

    file = page.with_suffix(".shot.png")
    browse(page, f"--screenshot={file}", f"--window-size={width},1600", *options)
    return imread(file)[..., :3]


def test_the_page_is_seen_and_darkens_where_the_reader_wants_it_dark(hostile: Path) -> None:
    light, dark = screenshot(hostile, 360), screenshot(hostile, 360, DARK_MODE)
    assert light.shape[1] == 360
    assert light.mean() > 0.8
    assert dark.mean() < 0.3
    for seen in (light, dark):
        colours = np.unique((seen.reshape(-1, 3) * 8).astype(int), axis=0)
        assert len(colours) > 20  # text, lines and the hues of the figures


def test_a_phone_needs_no_horizontal_scroll(hostile: Path) -> None:
    """In a frame, because a window of the browser is never narrower than 500 pixels."""
    measure = "<script>parent.document.title = document.documentElement.scrollWidth + ' ' + innerWidth</script></body>"
    text = re.sub(r"<meta http-equiv[^>]*>", "", hostile.read_text())  # which forbids all scripts
    inner = text.replace("<details>", "<details open>").replace("</body>", measure)
    frame = hostile.with_name("frame.html")
    frame.write_text(f'<title></title><iframe style="width: 360px; border: 0" srcdoc="{html.escape(inner)}"></iframe>')
    found = re.search(r"<title>(\d+) (\d+)</title>", browse(frame, "--dump-dom"))
    assert found is not None
    assert found.groups() == ("360", "360")


def of_two_models() -> list[Record]:
    """The same problems, styles and contestants with two models; the second is twice as fast and follows no form."""
    found = []
    for model, speed in (("small", 1.0), ("large", 2.0)):
        for place in range(4):
            common: dict[str, Any] = {
                "suite": "stylebench",
                "category": f"{('cot', 'cod')[place % 2]}/gsm8k",
                "item": f"item-{place}",
                "correct": model == "large",
                "followed": model == "small",
                "guessed": place == 0,
                "run": {"model": model, "device": "cpu", "dtype": "float32"},
            }
            found.append(record("plain", **common, seconds=4.0 / speed))
            found.append(record("default", **common, seconds=1.0 / speed, equal=True))
    return found


def test_models_are_compared_each_with_its_own_plain_decoding(tmp_path: Path) -> None:
    page = write_report(of_two_models(), tmp_path / "report").read_text()
    tables = Reader(page).tables
    overall = {line[0]: dict(zip(tables[0][0], line, strict=True)) for line in tables[0][1:]}
    assert set(overall) == {"small: plain", "small: default", "large: plain", "large: default"}
    assert overall["small: default"]["speed-up"].startswith("4.00")
    assert overall["large: default"]["speed-up"].startswith("4.00")
    styles = next(table for table in tables if table[0][0] == "style")
    assert styles[0][1:5] == ["contestant", "accuracy", "format", "guessed"]
    shown = {tuple(line[:2]): line[2:5] for line in styles[1:]}
    assert shown["cot", "small: default"] == ["0.0%", "100%", "50%"]
    assert shown["cod", "large: plain"] == ["100.0%", "0%", "0%"]
    assert "their times cannot be compared" not in page


def test_without_styles_there_is_no_table_of_styles(page: str) -> None:
    assert "Styles by model" not in page
