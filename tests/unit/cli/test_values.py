"""Sizes as people write them."""

import pytest

from hardware_profiles import load_profile
from hardware_profiles.mixed import load_mixed
from planner.cli.values import memory_limit, parse_memory
from planner.errors import RequestError
from tests.refusals import refused


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("64", 64 * 2**30), ("0.5 GiB", 2**29), ("3MiB", 3 * 2**20), ("2kib", 2**11), ("1TiB", 2**40),
        ("64GB", 64 * 10**9), ("5mb", 5 * 10**6), ("2TB", 2 * 10**12),
    ],
)  # fmt: skip
def test_units_are_binary_or_decimal_as_they_are_written(text: str, size: int) -> None:
    assert parse_memory(text) == size


def test_a_size_without_a_unit_says_what_it_is_read_as(capsys: pytest.CaptureFixture[str]) -> None:
    parse_memory("64", "--planner-memory")
    assert capsys.readouterr().err == "note: --planner-memory 64 is 64 GiB\n"
    parse_memory("64GiB")
    assert capsys.readouterr().err == ""


def test_a_limit_that_no_device_reaches_is_not_taken_in_silence(capsys: pytest.CaptureFixture[str]) -> None:
    """4096 are GiB, which nobody means: refused. With its unit the limit is harmless, and said to be."""
    machine = load_profile("h100-80gb")
    assert memory_limit("80", machine) == 80 * 2**30  # as much as is installed
    with refused(RequestError, "--memory-limit", "4096", "h100-80gb", "80", "4096MiB"):
        memory_limit("4096", machine)
    capsys.readouterr()
    assert memory_limit("4096GiB", machine) == 4096 * 2**30
    assert "--memory-limit 4096GiB limits nothing" in capsys.readouterr().err
    assert memory_limit("79GiB", machine) == 79 * 2**30
    assert capsys.readouterr().err == ""


def test_a_limit_is_compared_with_the_largest_device(capsys: pytest.CaptureFixture[str]) -> None:
    machine = load_mixed("a100-40gb:8,h100-80gb:8")
    memory_limit("60GiB", machine)
    assert capsys.readouterr().err == ""


@pytest.mark.parametrize(("text", "hardware"), [("141", "h200-141gb"), ("186", "gb200-186gb"), ("288", "b300-288gb")])
def test_the_memory_that_a_device_is_sold_with_is_a_limit(
    text: str, hardware: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """A few GiB more than there are limit nothing, and MiB of that number are not what was meant."""
    assert memory_limit(text, load_profile(hardware)) == int(text) * 2**30
    assert f"--memory-limit {text} limits nothing" in capsys.readouterr().err
