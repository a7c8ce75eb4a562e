"""`plan ui` in a browser: choose, search, watch, pin, compare, download; by mouse and keyboard, wide and narrow."""

from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from axe_playwright_python.sync_playwright import Axe

from planner.plan.file import load_plan
from planner.ui import Server
from tests.unit.ui.serving import serving

Open = Callable[..., Any]
READY, DONE, FINAL = "html[data-ready=yes]", "html[data-search=done]", "html[data-plan=final]"
WAIT = 120_000.0  # milliseconds that a search may take on a busy machine


@pytest.fixture(scope="module")
def server() -> Iterator[Server]:
    with serving() as found:
        yield found


@pytest.fixture
def opened(browser: Any, server: Server) -> Iterator[Open]:
    """Opens the page; at the end it must have asked nobody else and complained of nothing."""
    contexts, complaints, requests = [], [], []

    def open_page(*, width: int = 1400, scheme: str = "light", address: str = server.address) -> Any:
        context = browser.new_context(viewport={"width": width, "height": 900}, color_scheme=scheme)
        contexts.append(context)
        page = context.new_page()
        page.set_default_timeout(WAIT)
        page.on("console", lambda message: complaints.append(message.text))
        page.on("pageerror", lambda error: complaints.append(str(error)))
        page.on("request", lambda request: requests.append(request.url))
        page.goto(address)
        await_(page, READY)
        return page

    yield open_page
    for context in contexts:
        context.close()
    refusals = ("400 (Bad Request)", "403 (Forbidden)")  # which the page says itself
    assert [one for one in complaints if not any(refusal in one for refusal in refusals)] == []
    own = f"http://127.0.0.1:{server.port}/"
    assert {url for url in requests if not url.startswith(("data:", own))} == set()


def await_(page: Any, state: str) -> None:
    """Wait for the page to say so; its policy lets no text be evaluated, which other ways to wait do."""
    page.locator(state).wait_for(state="attached")


def search(page: Any, **fields: str) -> None:
    """Fill in a small job, and wait for its best plan."""
    for name, text in {"model": "llama-tiny", "devices": "2", "global_batch": "8", "seq_len": "64", **fields}.items():
        page.locator(f"[name={name}]").fill(text)
    page.get_by_role("button", name="Search", exact=True).click()
    await_(page, FINAL)


@pytest.mark.thorough
@pytest.mark.slow
def test_a_search_a_pin_a_kept_plan_and_a_download(opened: Open, tmp_path: Path) -> None:
    page = opened()
    search(page)
    assert "llama-tiny" in page.locator("#live-job").text_content()
    assert page.locator("#live-figures div").count() >= 5
    assert "no plan in the search space" in page.locator("#live-proof").text_content()
    assert page.locator("#chart circle.best").count() == 1
    with page.expect_download() as waiting:
        page.locator("#download").click()
    waiting.value.save_as(tmp_path / "plan.json")
    assert load_plan(tmp_path / "plan.json").cluster.devices == 2

    page.get_by_role("button", name="Keep beside").click()
    assert page.locator("#difference").text_content() == "Both plans are equally fast."
    await_(page, DONE)  # the front
    page.locator("[data-degree=tensor]").select_option("2")
    page.get_by_role("button", name="Unpin tensor 2").wait_for()
    await_(page, FINAL)
    assert "With the pinned values a step is" in page.locator("#live-pins-cost").text_content()
    assert "tensor 2" in page.locator("#live-rows").text_content()
    assert page.locator("#other-rows tr").count() > 0
    assert "than this one" in page.locator("#difference").text_content()

    page.get_by_role("button", name="Unpin tensor 2").click()
    await_(page, FINAL)
    assert page.locator("#live-pins-cost").is_hidden()
    page.get_by_role("button", name="Remove", exact=True).click()
    assert page.locator("#other").is_hidden()


@pytest.mark.thorough
@pytest.mark.slow
def test_a_strategy_is_pinned_by_the_keyboard_alone(opened: Open) -> None:
    page = opened()
    page.keyboard.press("Tab")
    assert page.locator(":focus").text_content() == "Skip to the plan"
    page.locator("[name=model]").focus()
    for text in ("llama-tiny", "", "2", "8", "64"):
        if text:
            page.keyboard.press("Control+A")
            page.keyboard.type(text)
        page.keyboard.press("Tab")
    page.locator("[name=seq_len]").press("Enter")
    await_(page, FINAL)
    await_(page, DONE)
    page.locator("[data-degree=pipeline]").select_option("1")
    await_(page, DONE)
    button = page.locator("[data-operator*=up_proj]").first
    button.focus()
    page.keyboard.press("Enter")
    page.locator("#strategy-rows button").first.wait_for()
    page.keyboard.press("Escape")
    assert not page.locator("#strategies").is_visible()
    assert page.locator(":focus").get_attribute("data-operator") is not None
    page.keyboard.press("Enter")
    last = page.locator("#strategy-rows button").last
    last.wait_for()
    wanted = last.get_attribute("aria-label").removeprefix("Pin ")
    last.focus()
    page.keyboard.press("Enter")
    page.locator("#pinned button", has_text=f"= {wanted}").wait_for()
    await_(page, DONE)
    assert page.locator("[data-operator*=up_proj]").first.text_content() == wanted


@pytest.mark.cases(1, 4)
@pytest.mark.slow
@pytest.mark.parametrize(("width", "scheme"), [(420, "dark"), (1400, "light"), (420, "light"), (1400, "dark")])
def test_axe_finds_nothing_and_nothing_is_wider_than_the_window(opened: Open, width: int, scheme: str) -> None:
    page = opened(width=width, scheme=scheme)
    assert Axe().run(page).response["violations"] == []
    search(page)
    page.get_by_role("button", name="Keep beside").click()
    await_(page, DONE)
    found = Axe().run(page).response["violations"]
    assert [(one["id"], [node["html"][:200] for node in one["nodes"]][:5]) for one in found] == []
    assert page.evaluate("document.documentElement.scrollWidth") <= width


@pytest.mark.thorough
@pytest.mark.slow
def test_what_cannot_be_planned_and_unknown_models_are_said(opened: Open) -> None:
    page = opened()
    page.locator("[name=model]").fill("no-such-model")
    page.get_by_role("button", name="Search", exact=True).click()
    alert = page.get_by_role("alert")
    alert.wait_for()
    assert "no-such-model" in alert.text_content()


@pytest.mark.thorough
@pytest.mark.slow
def test_the_plan_that_is_shown_is_the_one_asked_about(opened: Open) -> None:
    """A search that finds nothing leaves the plan before it on the page; strategies come in any order."""
    page = opened()
    search(page)
    await_(page, DONE)
    page.locator("[data-degree=pipeline]").select_option("2")
    await_(page, DONE)
    page.locator("[data-degree=tensor]").select_option("2")
    page.get_by_role("alert").wait_for()
    page.locator("#engine").select_option("torchtitan")
    with page.expect_download() as waiting:
        page.locator("#settings").click()
    assert waiting.value.suggested_filename == "llama-tiny-2-torchtitan.zip"

    page.get_by_role("button", name="Unpin tensor 2").click()
    await_(page, DONE)
    page.locator("[data-degree=pipeline]").select_option("1")
    await_(page, DONE)
    held = list[Any]()
    page.route("**/operator?*", lambda route: route.continue_() if held else held.append(route))
    first, other = page.locator("[data-operator*=up_proj]").first, page.locator("[data-operator*=lm_head]").first
    first.click()
    page.wait_for_timeout(200)
    page.keyboard.press("Escape")
    other.click()
    page.locator("#strategy-rows button").first.wait_for()
    told = page.locator("#strategy-rows").text_content()
    with page.expect_response(lambda answer: "up_proj" in answer.url):
        held[0].continue_()
    page.wait_for_timeout(200)
    assert page.locator("#strategy-rows").text_content() == told


@pytest.mark.thorough
@pytest.mark.slow
def test_pins_cost_nothing_beside_another_job(opened: Open, server: Server) -> None:
    page = opened()
    search(page)
    await_(page, DONE)
    page.locator("[name=global_batch]").fill("1x")
    page.locator("[data-degree=data]").select_option("2")
    assert page.locator(DONE).count() == 1, "what is no number begins no search"
    page.locator("[name=global_batch]").fill("64")
    page.locator("[data-degree=pipeline]").select_option("1")
    await_(page, FINAL)
    assert "global batch 64" in page.locator("#live-job").text_content()
    assert page.locator("#live-pins-cost").is_hidden()
    token, server.token = server.token, "of another server"
    try:
        page.get_by_role("button", name="Search", exact=True).click()
        page.get_by_role("alert").wait_for()
        assert "open the address that plan ui has printed" in page.get_by_role("alert").text_content()
    finally:
        server.token = token


@pytest.mark.thorough
def test_another_address_is_refused(browser: Any, server: Server) -> None:
    context = browser.new_context()
    page = context.new_page()
    answer = page.goto(f"http://127.0.0.1:{server.port}/?token=wrong")
    assert answer.status == 403
    assert "plan ui has printed" in page.text_content("body")
    context.close()
