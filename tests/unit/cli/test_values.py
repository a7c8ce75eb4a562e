"""Sizes as people write them."""

import pytest

from planner.cli.values import parse_memory


@pytest.mark.parametrize(
    ("text", "size"),
    [
        ("64", 64 * 2**30), ("0.5 GiB", 2**29), ("3MiB", 3 * 2**20), ("2kib", 2**11), ("1TiB", 2**40),
        ("64GB", 64 * 10**9), ("5mb", 5 * 10**6), ("2TB", 2 * 10**12),
    ],
)  # fmt: skip
def test_units_are_binary_or_decimal_as_they_are_written(text: str, size: int) -> None:
    assert parse_memory(text) == size
