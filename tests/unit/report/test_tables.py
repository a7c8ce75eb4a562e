"""Tables on narrow terminals."""

import pytest
from rich.table import Table

from planner.report.console import PlainConsole
from planner.report.table import table_of

HEADERS = ("hardware", "devices", "step time", "tokens/s", "device-hours", "memory left", "")
ROWS = (
    ("ascend-910b-64gb", "16", "1.91 ms", "4,283,874", "15.6k", "76.5 GiB", "fastest, cheapest"),
    ("h100-80gb[node=4@450,cluster@25]:8,a100-80gb:8", "16", "3.35 ms", "2,445,437", "27.3k", "75.3 GiB", ""),
)


def printed(table: Table, width: int) -> list[str]:
    console = PlainConsole(width=width)
    with console.capture() as captured:
        console.print(table)
    return [line.rstrip() for line in captured.get().splitlines()]


def cases(keys: int) -> Table:
    table = table_of("", *HEADERS, keys=keys)
    for row in ROWS:
        table.add_row(*row)
    return table


@pytest.mark.parametrize("width", [62, 80])
def test_a_table_with_keys_is_printed_in_parts(width: int) -> None:
    lines = printed(cases(2), width)
    assert max(len(line) for line in lines) <= width
    headers = [line for line in lines if line.startswith("hardware")]
    assert [word for line in headers for word in line.split()[2:]] == " ".join(HEADERS[2:]).split()
    for cell in ROWS[0]:
        assert any(cell in line for line in lines), "no cell but that of a long name is wrapped"
    assert sum(line.startswith("ascend-910b-64gb  ") for line in lines) == len(headers) > 1


def test_a_table_that_fits_is_one_and_one_that_is_too_wide_in_any_parts_is_told() -> None:
    assert len(printed(cases(2), 140)) == 3
    table = table_of("", "engine", "step time", "recomputation", keys=1)
    table.columns[1].justify = "right"
    table.add_row("torchtitan", "1.38 ms", "selective")
    assert any("1.38 ms" in line for line in printed(table, 34)), "units stay beside their numbers"
    assert "  step time: 1.91 ms" in printed(cases(2), 40)
    assert "  step time: 1.91 ms" in printed(cases(0), 70)


def test_columns_are_as_wide_as_their_words() -> None:
    table = table_of("", "engine", "degrees", "micro-batches", "recomputation")
    table.add_row("runtime of this project", "data 2 x pipeline 4", "1 of 32", "none")
    lines = printed(table, 56)
    assert max(len(line) for line in lines) <= 56
    assert all(any(word in line for line in lines) for word in ("micro-batches", "recomputation", "pipeline"))
