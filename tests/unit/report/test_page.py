"""The page: everything in one file, every figure with its table, the same numbers as on a terminal."""

import base64
import gzip
import io
import json
import re
from functools import cache
from html.parser import HTMLParser
from itertools import groupby, pairwise
from pathlib import Path

import pytest
from rich.console import Console

from planner.plan.layout.roles import roles
from planner.report.html import page
from planner.report.html.glossary import MEANINGS, explained
from planner.report.terminal import print_plan
from tests.unit.report.reports import reported, verdict_named

NAMES = ("no axes", "two axes", "several groups", "by hand")
EMPTY = frozenset({"meta", "link", "br", "img", "input", "hr"})


class Reader(HTMLParser):
    """Elements that are open, attributes by tag, and all text that people see."""

    def __init__(self) -> None:
        super().__init__()
        self.open: list[str] = []
        self.found: list[tuple[str, dict[str, str | None]]] = []
        self.texts: list[str] = []

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.found.append((tag, dict(attrs)))
        if tag not in EMPTY:
            self.open.append(tag)

    def handle_endtag(self, tag: str) -> None:
        assert self.open.pop() == tag

    def handle_data(self, data: str) -> None:
        if not {"script", "style"} & set(self.open):
            self.texts.append(data)


@cache
def text_of(name: str) -> str:
    return page(reported(name).report)


@cache
def read(name: str) -> Reader:
    reader = Reader()
    reader.feed(text_of(name))
    reader.close()
    assert reader.open == []
    return reader


def specs_of(name: str) -> str:
    """What the scripts of the page draw."""
    packed = re.search(r'<script type="text/plain" id="specs">(.*?)</script>', text_of(name))
    assert packed
    return gzip.decompress(base64.b64decode(packed[1])).decode()


def terminal_text(name: str) -> str:
    verdict = verdict_named(name)
    console = Console(file=io.StringIO(), width=200, highlight=False)
    print_plan(console, verdict.bound, roles(verdict.bound), verdict.prediction)
    assert isinstance(console.file, io.StringIO)
    return console.file.getvalue()


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", NAMES)
def test_nothing_is_loaded(name: str) -> None:
    for tag, attributes in read(name).found:
        assert tag not in ("img", "iframe", "object", "embed")
        assert "src" not in attributes
        target = attributes.get("href") or ""
        assert target.startswith(("#", "data:")) or not target, target
    style = re.search(r"<style>(.*?)</style>", text_of(name), re.DOTALL)
    assert style
    assert "url(" not in style[1]
    assert "@import" not in style[1]


@pytest.mark.cases(3, 1)
@pytest.mark.parametrize("name", NAMES)
def test_every_anchor_leads_somewhere_and_ids_are_unique(name: str) -> None:
    ids = [attributes["id"] for _, attributes in read(name).found if "id" in attributes]
    assert len(ids) == len(set(ids))
    for _, attributes in read(name).found:
        target = attributes.get("href") or ""
        assert not target.startswith("#") or target[1:] in ids
        labelled = attributes.get("aria-labelledby")
        assert labelled is None or labelled in ids


@pytest.mark.parametrize("name", NAMES)
def test_every_figure_has_a_label_and_a_table(name: str) -> None:
    text = text_of(name)
    charts = re.findall(r'data-figure="([^"]+)"', text)
    assert {"timeline", "memory", "memory-curve", "time", "classes", "choices", "interval"} <= set(charts)
    for key in charts:
        figure = text[text.index(f'<figure id="figure-{key}">') :].partition("</figure>")[0]
        assert 'role="img" aria-label="' in figure
        assert "<table>" in figure
        assert "<caption>" in figure
    assert set(json.loads(specs_of(name))) == set(charts)


@pytest.mark.parametrize("name", NAMES)
def test_the_page_has_landmarks_and_headings_in_order(name: str) -> None:
    tags = [tag for tag, _ in read(name).found]
    for landmark in ("header", "nav", "main", "footer"):
        assert tags.count(landmark) == 1
    levels = [int(tag[1]) for tag in tags if re.fullmatch(r"h[1-6]", tag)]
    assert levels[0] == 1
    assert levels.count(1) == 1
    assert all(after - before <= 1 for before, after in pairwise(levels))


@pytest.mark.parametrize("name", NAMES)
def test_the_numbers_are_those_of_the_terminal(name: str) -> None:
    """Every number with a unit that `plan show` prints stands on the page, and so does every row of words."""
    shown, told = " ".join(" ".join(read(name).texts).split()), " ".join(terminal_text(name).split())
    numbers = re.findall(r"[\d.,]+ (?:s|ms|µs|GiB|MiB|KiB|B)\b", told[told.index("Prediction") :])
    assert len(numbers) > 8
    for number in numbers:
        assert number in shown, number
    report = reported(name).report
    for words, text in (*report.degrees, *report.figures):
        assert f"{words.strip()} {text}".strip() in told
        assert text in shown


def test_blocks_are_listed_by_ranges() -> None:
    shown = " ".join(" ".join(read("several groups").texts).split())
    blocks = reported("several groups").report.shape.blocks
    first = blocks[0].variant
    alike = [list(run) for variant, run in groupby(blocks, key=lambda block: block.variant) if variant == first]
    ranges = (f"{run[0].number} to {run[-1].number}" if len(run) > 1 else f"{run[0].number}" for run in alike)
    text = ", ".join(ranges)
    assert re.search(rf"Blocks by variant.* {first} [a-z, _0-9]*? {text} ", shown)


def test_what_people_write_is_text_and_no_markup() -> None:
    text = text_of("no axes")
    assert "lean <script>" not in text
    assert "lean &lt;script&gt;" in text


def test_colours_of_figures_are_in_the_style_sheet_for_both_themes() -> None:
    for name in NAMES:
        text = text_of(name)
        words = set(re.findall(r'"@([a-z0-9-]+)"', specs_of(name))) | set(
            re.findall(r"--fill:var\(--([a-z0-9-]+)\)", text)
        )
        light, dark = text[: text.index('[data-theme="dark"]')], text[text.index('[data-theme="dark"]') :]
        assert words
        for word in words:
            assert f"--{word}:" in light, word
            assert f"--{word}:" in dark.partition("}")[0], word


def test_the_page_is_the_same_each_time() -> None:
    assert page(reported("by hand").report) == text_of("by hand")


def test_words_are_explained_as_in_the_glossary() -> None:
    text = (Path(__file__).resolve().parents[3] / "docs" / "glossary.md").read_text(encoding="utf-8")
    rows = dict(re.findall(r"^\| (.+?) \| (.+) \|$", text, re.MULTILINE))
    assert {word: meaning for word, (_, meaning) in MEANINGS.items()} == {word: rows[word] for word in MEANINGS}


def test_words_of_the_glossary_say_what_they_mean_once_in_a_text() -> None:
    found = explained("axis0: data <b>, axis1: column parallel")
    assert found.count("<abbr") == 2
    assert 'tabindex="0">axis0</abbr>: data &lt;b&gt;, axis1' in found
    assert "tabindex" not in explained("axis0", keyboard=False)
    titles = {attributes["title"] for tag, attributes in read("by hand").found if tag == "abbr"}
    assert len(titles) > 6
    assert not any("`" in (title or "") for title in titles)


def test_the_page_says_why_and_by_which_command() -> None:
    texts = " ".join(read("by hand").texts)
    assert "Why this plan" in texts
    assert "does not fit with these degrees" in texts
    assert "Conventional, FSDP <b>:" in " ".join(texts.split())
    assert reported("by hand").report.command in texts
    assert "Ranks on hosts" in texts
