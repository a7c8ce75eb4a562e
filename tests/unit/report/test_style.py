"""Colours of the page can be told from what they stand on, in both themes (WCAG 2.1, criteria 1.4.3 and 1.4.11)."""

import re
from functools import cache
from importlib import resources

import pytest

THEMES = ("light", "dark")
TEXT, GRAPHICS = 4.5, 3.0


@cache
def colours(theme: str) -> dict[str, str]:
    """Words of the style sheet and their values in a theme."""
    style = resources.files("planner.report.html").joinpath("assets/style.css").read_text(encoding="utf-8")
    rules = re.findall(r":root([^{]*)\{(.*?)\}", style, re.DOTALL)
    found = {name: dict(re.findall(r"--([\w-]+): (#\w{6})", body)) for name, body in rules}
    light, dark = found[" "], found['[data-theme="dark"] ']
    assert light.keys() == dark.keys()
    return light if theme == "light" else dark


def luminance(colour: str) -> float:
    parts = [int(colour[at : at + 2], 16) / 255 for at in (1, 3, 5)]
    red, green, blue = (part / 12.92 if part <= 0.04045 else ((part + 0.055) / 1.055) ** 2.4 for part in parts)
    return 0.2126 * red + 0.7152 * green + 0.0722 * blue


def contrast(one: str, other: str) -> float:
    high, low = sorted((luminance(one), luminance(other)), reverse=True)
    return (high + 0.05) / (low + 0.05)


def test_black_on_white_is_the_most() -> None:
    assert contrast("#000000", "#ffffff") == pytest.approx(21.0)


@pytest.mark.parametrize("theme", THEMES)
def test_text_can_be_read(theme: str) -> None:
    known = colours(theme)
    for text in ("text", "soft", "accent"):
        for ground in ("page", "surface"):
            assert contrast(known[text], known[ground]) >= TEXT, (text, ground)
    for fill in (*(f"series-{number}" for number in range(1, 9)), "bubble"):
        assert contrast(known["ink"], known[fill]) >= TEXT, fill


@pytest.mark.parametrize("theme", THEMES)
def test_bars_can_be_seen(theme: str) -> None:
    known = colours(theme)
    grounds = {"page", "surface", "text", "soft", "line", "grid", "ink"}
    for word in known.keys() - grounds:
        assert contrast(known[word], known["surface"]) >= GRAPHICS, word
