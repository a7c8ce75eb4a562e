"""The page in a browser: it loads without errors and without a network, and what should move moves."""

from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe

from planner.report.data.lanes import Bar, Lane
from planner.report.html import page as page_text
from tests.unit.report.reports import reported

Open = Callable[..., Any]
DRAWN = "document.documentElement.dataset.figures !== undefined"
RANGE = "document.getElementById('chart-timeline').layout.xaxis.range"


@pytest.fixture
def opened(browser: Any, page_file: Path) -> Iterator[Open]:
    """Opens the page in a window; at the end it must have loaded nothing and complained of nothing."""
    contexts, complaints, requests, files = [], [], [], set()

    def open_page(*, width: int = 1280, scheme: str = "light", file: Path = page_file) -> Any:
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: requests.append(request.url))
        files.add(file.as_uri())
        page.goto(file.as_uri())
        page.wait_for_function(DRAWN)
        return page

    yield open_page
    for context in contexts:
        context.close()
    assert complaints == []
    assert {url for url in requests if not url.startswith("data:")} <= files


@pytest.mark.thorough
def test_every_figure_is_drawn_and_can_be_zoomed_and_pointed_at(opened: Open) -> None:
    page = opened()
    assert page.evaluate("document.documentElement.dataset.figures") == "drawn"
    charts = page.locator(".chart").all()
    assert len(charts) >= 7
    for chart in charts:
        assert chart.locator("svg.main-svg").count() > 0
        assert chart.locator("path").count() > 0
    assert page.evaluate("document.documentElement.scrollWidth <= window.innerWidth")
    whole = page.evaluate(RANGE)
    page.get_by_role("button", name="Zoom in").click()
    assert page.evaluate(RANGE)[1] < whole[1]
    assert page.get_by_role("status").filter(has_text="Shown: ").is_visible()
    page.get_by_role("button", name="Whole step").click()
    bar = page.locator("#chart-timeline .bars .point path").first.bounding_box()
    page.mouse.move(bar["x"] + bar["width"] / 2, bar["y"] + bar["height"] / 2)
    hover = page.locator("#chart-timeline .hoverlayer .hovertext")
    hover.wait_for()
    for words in ("forward", "micro-batch 0", "stage 0"):
        assert words in hover.text_content()


@pytest.mark.thorough
def test_names_of_a_legend_leave_out_what_they_name(opened: Open) -> None:
    page = opened()
    for key in ("timeline", "memory"):
        drawn = f"document.getElementById('chart-{key}').data.filter(one => one.visible !== false).map(one => one.name)"
        whole, name = page.evaluate(drawn), page.locator(f"#figure-{key} .legend button").first
        assert name.get_attribute("aria-pressed") == "true"
        name.press("Enter")
        assert name.get_attribute("aria-pressed") == "false"
        assert page.evaluate(drawn) == [one for one in whole if one != name.text_content()] != whole
        page.get_by_role("button", name="Switch to dark colours").click()  # what is left out stays so
        assert name.text_content() not in page.evaluate(drawn)
        page.get_by_role("button", name="Switch to light colours").click()
        name.click()
        assert page.evaluate(drawn) == whole


@pytest.mark.thorough
def test_every_name_of_a_legend_is_drawn(opened: Open) -> None:
    """Else its button would do nothing."""
    page = opened()
    for chart in page.locator(".chart").all():
        key = chart.get_attribute("data-figure")
        drawn = set(page.evaluate(f"document.getElementById('chart-{key}').data.map(one => one.name)"))
        named = page.locator(f"#figure-{key} .legend button").all_text_contents()
        assert set(named) <= drawn, key


@pytest.mark.cases(0, 2)
@pytest.mark.parametrize("scheme", ["light", "dark"])
@pytest.mark.parametrize("width", [1280, 360])
def test_axe_finds_nothing_against_accessibility(opened: Open, scheme: str, width: int) -> None:
    """The rules of WCAG 2.2 up to AA, and axe's own best practices: names, roles, contrast, headings, focus."""
    page = opened(scheme=scheme, width=width)
    page.evaluate("document.querySelectorAll('details').forEach(one => { one.open = true; })")
    found = Axe().run(page).response["violations"]
    assert [(one["id"], [node["html"][:200] for node in one["nodes"]][:5]) for one in found] == []


@pytest.mark.thorough
def test_axe_would_find_something(opened: Open) -> None:
    page = opened()
    page.evaluate("document.getElementById('theme').removeAttribute('aria-label')")
    page.evaluate("document.getElementById('theme').textContent = ''")
    assert [one["id"] for one in Axe().run(page).response["violations"]] == ["button-name"]


@pytest.mark.thorough
def test_the_timeline_zooms_by_mouse_buttons_and_keys(opened: Open) -> None:
    page = opened()
    whole = page.evaluate(RANGE)
    page.get_by_role("button", name="Zoom in").click()
    zoomed = page.evaluate(RANGE)
    assert zoomed[1] - zoomed[0] == pytest.approx((whole[1] - whole[0]) / 2)
    page.get_by_role("button", name="Later").click()
    assert page.evaluate(RANGE)[0] > zoomed[0]
    chart = page.locator("#chart-timeline")
    chart.focus()
    page.keyboard.press("0")
    assert page.evaluate(RANGE) == pytest.approx(whole)
    page.keyboard.press("+")
    page.keyboard.press("ArrowLeft")
    assert page.evaluate(RANGE)[1] < zoomed[1]
    page.get_by_role("button", name="Whole step").click()
    chart.scroll_into_view_if_needed()
    box = chart.locator(".nsewdrag").first.bounding_box()
    page.mouse.move(box["x"] + box["width"] / 4, box["y"] + box["height"] / 2)
    page.mouse.down()
    page.mouse.move(box["x"] + box["width"] / 2, box["y"] + box["height"] / 2, steps=4)
    page.mouse.up()
    page.wait_for_function(f"{RANGE}[1] < {whole[1] * 0.9}")
    dragged = page.evaluate(RANGE)
    assert dragged[0] == pytest.approx(whole[1] / 4, rel=0.05)


@pytest.mark.thorough
def test_cells_tell_by_mouse_and_by_arrow_keys(opened: Open) -> None:
    page = opened()
    tip, blocks = page.locator("#tip"), page.locator(".cells").first.locator(".cell")
    assert not tip.is_visible()
    blocks.nth(1).hover()
    assert "Block 0" in tip.text_content()
    blocks.first.focus()
    page.keyboard.press("ArrowRight")
    page.keyboard.press("ArrowRight")
    assert "Block 1" in tip.text_content()
    assert page.locator(".cells").first.locator('[tabindex="0"]').count() == 1
    page.keyboard.press("Escape")
    assert not tip.is_visible()
    page.locator(".strip").nth(1).locator(".cell").first.hover()
    assert "kept for the backward pass" in tip.text_content()


@pytest.mark.thorough
def test_both_themes_and_the_toggle(opened: Open) -> None:
    page = opened(scheme="dark")
    background = "getComputedStyle(document.body).backgroundColor"
    bar = "document.querySelector('#chart-time .bars .point path').style.fill"
    dark, dark_bar = page.evaluate(background), page.evaluate(bar)
    page.get_by_role("button", name="Switch to light colours").click()
    assert page.evaluate(background) != dark
    assert page.evaluate(bar) != dark_bar
    page.emulate_media(color_scheme="light")
    page.emulate_media(color_scheme="dark")  # what was chosen stays
    assert page.evaluate(background) != dark


@pytest.mark.thorough
def test_a_narrow_window_scrolls_down_only(opened: Open) -> None:
    page = opened(width=360)
    assert page.evaluate("document.documentElement.scrollWidth") <= 360
    for details in page.locator("details").all():
        details.evaluate("element => { element.open = true; }")
    assert page.evaluate("document.documentElement.scrollWidth") <= 360


@pytest.mark.thorough
def test_the_keyboard_reaches_the_report_first(opened: Open) -> None:
    page = opened()
    page.keyboard.press("Tab")
    focused = page.locator(":focus")
    assert focused.text_content() == "Skip to the report"
    assert focused.evaluate("element => getComputedStyle(element).outlineStyle") != "none"
    page.keyboard.press("Enter")
    assert page.evaluate("document.activeElement.id") == "main"


@pytest.mark.thorough
def test_print_is_light_and_has_its_tables(opened: Open) -> None:
    page = opened(scheme="dark")
    page.evaluate("window.dispatchEvent(new Event('beforeprint'))")
    page.emulate_media(media="print")
    assert page.evaluate("document.documentElement.dataset.theme") == "light"
    assert not page.locator(".tools").first.is_visible()
    assert page.locator("#figure-time table").is_visible()
    assert len(page.pdf(format="A4")) > 10_000
    page.evaluate("window.dispatchEvent(new Event('afterprint'))")
    assert page.evaluate("document.documentElement.dataset.theme") == "dark"


@pytest.mark.thorough
def test_a_step_of_very_many_passes_draws_few_bars_and_loses_none(opened: Open, tmp_path: Path) -> None:
    """80,000 passes: a few thousand bars at once, which stand for all; zoomed in, each is itself."""
    report, each = reported("several groups").report, 20_000
    one = report.lanes.seconds / each
    bars = tuple(
        Bar(
            start=number * one,
            end=(number + 0.9) * one,
            kind="backward" if number % 2 else "forward",
            micro_batch=number // 2,
            chunk=0,
            slice=0,
            count=1,
            busy=0.9 * one,
        )
        for number in range(each)
    )
    lanes = [Lane(rank=lane.rank, stream=lane.stream, bars=bars) for lane in report.lanes.lanes]
    file = tmp_path / "many.html"
    file.write_text(page_text(replace(report, lanes=replace(report.lanes, lanes=tuple(lanes)))), encoding="utf-8")
    page = opened(file=file)
    told = (
        "document.getElementById('chart-timeline').data.flatMap(trace => trace.hovertext).filter(text => text !== '')"
    )
    whole = page.evaluate(told)
    assert 100 < len(whole) <= 4000
    assert sum(int(text[3:].partition(" ")[0]) for text in whole) == each * len(lanes)
    for _ in range(9):
        page.get_by_role("button", name="Zoom in").click()
    near = page.evaluate(told)
    assert 100 < len(near) <= 4000
    assert all("of micro-batch" in text for text in near)
