"""`plan --place`: what it takes, and what is said of tables that the search has placed."""

import pytest

from planner.cli.values import parse_places, placing_of
from planner.errors import RequestError
from tests.refusals import refused


@pytest.mark.parametrize(
    ("texts", "placing", "places"),
    [
        ((), "fit", ()),
        (("auto",), "auto", ()),
        (("none",), "given", ()),
        (("tables.*=host",), "given", (("tables.*", "host"),)),
        (("tables.1.*=servers", "auto"), "auto", (("tables.1.*", "servers"),)),
    ],
)
def test_words_and_patterns(texts: tuple[str, ...], placing: str, places: tuple[tuple[str, str], ...]) -> None:
    assert placing_of(texts) == placing
    assert parse_places(texts) == places


@pytest.mark.parametrize("texts", [("none", "tables.*=host"), ("none", "auto")])
def test_none_stands_alone(texts: tuple[str, ...]) -> None:
    with refused(RequestError, "--place", "none"):
        placing_of(texts)


def test_a_word_that_is_none_is_refused() -> None:
    with refused(RequestError, "--place", "host", "PATTERN=host", "auto", "none"):
        parse_places(("host",))
