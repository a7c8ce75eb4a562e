"""Files of others are read within limits, and what is beyond them is refused in one line."""

import errno
import os
from pathlib import Path
from typing import Annotated, Literal

import pytest
from pydantic import BaseModel, ConfigDict, Field, ValidationError

from hardware_profiles.foreign import (
    SETTINGS,
    AbsentFileError,
    ForeignTextError,
    Limits,
    form_fault,
    literal,
    parse_csv,
    parse_json,
    parse_python,
    parse_toml,
    printable,
    read_text,
)
from tests.refusals import refused

DEEP = 10_000


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("{", "not valid JSON at line 1, column 2"),
        (" \n", "it is empty"),
        ('{"a": 1, "a": 2}', "the key 'a' stands twice"),
        ("[" * DEEP, "nested too deeply"),
        ("[" * 70 + "]" * 70, "nested too deeply: at most 64 levels"),
        ('{"a": {"b": [0, NaN]}}', "a.b.1: NaN and infinity"),
        ('{"a": 1e400}', "a: NaN and infinity"),
        ('{"a": 9223372036854775808}', "a: the number 9223372036854775808 does not fit in 64 bits"),
        ("9" * 5000, "a number is too long"),
        ("9" * 400, "the number of 1329 bits"),
        ('{"a": "\\ud800"}', "a: the text '\\ud800' has a zero, or half a surrogate"),
        ('["\\u0000"]', "0: the text '\\x00' has a zero"),
        ("[" + "1," * 20_000 + "1]", "more than 16384 values"),
        (" " * 2**17, "131072 characters are too many; at most 65536"),
    ],
)
def test_json_beyond_the_limits_is_refused(text: str, words: str) -> None:
    with pytest.raises(ForeignTextError) as caught:
        parse_json(text, Limits(size=2**16, values=2**14))
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a = ", "not a TOML file: Invalid value"),
        ("a = 1\na = 2", "not a TOML file: Cannot overwrite"),
        (f"a = {'[' * DEEP}", "nested too deeply"),
        (f"a{'.a' * 100} = 1", "nested too deeply"),
        (f"a{'.a' * DEEP} = 1", "line 1 has more than 1000 points"),
        (f"a = {'9' * 5000}", "a number is too long"),
        ("a = [1.0, nan]", "a.1: NaN and infinity"),
        ('a = "\\u0000"', "a: the text"),
    ],
)
def test_toml_beyond_the_limits_is_refused(text: str, words: str) -> None:
    with pytest.raises(ForeignTextError) as caught:
        parse_toml(text)
    assert words in str(caught.value)


@pytest.mark.parametrize(
    ("text", "words"),
    [
        ("a =", "not a Python file: invalid syntax at line 1"),
        (f"a = {'(' * 300}", "too many nested parentheses"),
        (f"a = {'-' * DEEP}1", "nested too deeply"),
        (f"a = {'1 + ' * DEEP}1", "nested too deeply"),
        (f"a{'.a' * 100} = 1", "nested too deeply"),
    ],
)
def test_python_beyond_the_limits_is_refused(text: str, words: str) -> None:
    with pytest.raises(ForeignTextError) as caught:
        parse_python(text)
    assert words in str(caught.value)


@pytest.mark.parametrize("text", ["f()", "{[]: 1}", "[1, a]"])
def test_what_is_no_literal_is_refused(text: str) -> None:
    with refused(ForeignTextError, "line 1", text):
        literal(parse_python(text).body[0].value)  # type: ignore[attr-defined]


def test_rows_have_the_number_of_their_first_line() -> None:
    assert list(parse_csv('a,b\n\n"1\n2",3\n4,5\n')) == [(1, ["a", "b"]), (3, ["1\n2", "3"]), (5, ["4", "5"])]
    for text, facts in (
        ('a\n"b', ("line 2",)),
        ("," * 2000, ("line 1", 2001, 1000)),
        ("a\n" + "b" * 200_000, ("line 2", 131072)),
        ("a\n" + "b" * 20_000, ("line 2", 16384)),
    ):
        with refused(ForeignTextError, *facts):
            list(parse_csv(text))


def test_only_regular_files_are_read(tmp_path: Path) -> None:
    large, pipe, link = tmp_path / "large", tmp_path / "pipe", tmp_path / "link"
    large.write_bytes(b"x" * 11)
    link.symlink_to(large)
    os.mkfifo(pipe)
    for path, facts in (
        (tmp_path, ("directory",)),
        (pipe, ("pipe",)),
        (Path("/dev/zero"), ("device",)),
        (large, (10,)),
        (tmp_path / "a\0b", ("name",)),
    ):
        with refused(ForeignTextError, *facts):
            read_text(path, 10)
    with pytest.raises(AbsentFileError):
        read_text(tmp_path / "none")
    with refused(ForeignTextError, os.strerror(errno.ELOOP)):
        read_text(link, follow=False)
    assert read_text(link, 11) == "x" * 11


def test_bytes_that_are_no_text_are_refused(tmp_path: Path) -> None:
    path = tmp_path / "file"
    for content, fact in ((b"a\xff", "byte 1"), (b"ab\0", "character 2")):
        path.write_bytes(content)
        with refused(ForeignTextError, fact):
            read_text(path)
    path.write_bytes(b"\xef\xbb\xbfa")
    assert read_text(path) == "a"


def test_values_within_the_limits_are_read() -> None:
    assert parse_json('{"a": [1, 2.5, null, "é", -9223372036854775808]}') == {"a": [1, 2.5, None, "é", -(2**63)]}
    assert parse_json("[" * 64 + "]" * 64)
    assert parse_json("[Infinity]", Limits(finite=False)) == [float("inf")]
    assert parse_toml("[a.b]\nc = [1, {d = 2.0}]") == {"a": {"b": {"c": [1, {"d": 2.0}]}}}
    assert literal(parse_python("((4, 1), (1, 2))").body[0].value, SETTINGS) == ((4, 1), (1, 2))  # type: ignore[attr-defined]


def test_what_a_terminal_would_obey_is_spelled_out() -> None:
    assert printable("\x1b]0;\u202e\ud800\r\n\té", keep="\n") == "\\x1b]0;\\u202e\\ud800\\r\n\\té"


class Form(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True)
    count: Annotated[int, Field(ge=1, le=8)] = 1
    share: Annotated[float, Field(gt=0, lt=1)] = 0.5
    word: Literal["a", "b"] = "a"
    names: tuple[str, ...] = ()


@pytest.mark.parametrize(
    ("content", "words"),
    [
        ({"count": 0}, "count: 0 is less than 1"),
        ({"count": 9}, "count: 9 is more than 8"),
        ({"count": "x" * 99}, f"count: '{'x' * 40}' is not a whole number"),
        ({"share": 0.0}, "share: 0.0 is not more than 0"),
        ({"share": 1.5}, "share: 1.5 is not less than 1"),
        ({"word": "c"}, "word: 'c' is not 'a' or 'b'"),
        ({"names": 3}, "names: 3 is not a list"),
        ({"colour": 3, "count": 0}, "count: 0 is less than 1 (and 1 more)"),
        ({"colour": 3}, "colour: unknown key"),
        ([], "the file: it should be an object with named values"),
    ],
)
def test_what_does_not_fit_a_form_is_told_with_its_value(content: object, words: str) -> None:
    with pytest.raises(ValidationError) as caught:
        Form.model_validate(content)
    assert form_fault(caught.value) == words


def test_a_misspelled_key_is_named_beside_the_missing_one() -> None:
    class Needed(Form):
        size: int

    with pytest.raises(ValidationError) as caught:
        Needed.model_validate({"sise": 3, "count": 0})
    assert form_fault(caught.value) == "count: 0 is less than 1 (and 2 more)"
    with pytest.raises(ValidationError) as caught:
        Needed.model_validate({"sise": 3, "colour": 1})
    assert form_fault(caught.value) == "size: the key is missing; unknown key 'sise' (and 1 more)"
