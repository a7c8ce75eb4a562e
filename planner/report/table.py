"""The style of all tables, on wide and narrow terminals.

wider than the terminal     each column is at least as wide as its longest word, and the widest are wrapped
no room for these words     with `keys`: several tables below each other, each with the first columns
                            else line by line
"""

from collections.abc import Iterator, Sequence
from copy import copy
from typing import Any

from rich.cells import cell_len
from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Column, Table
from rich.text import Text

from hardware_profiles.foreign import printable

_FOLDED = 24
"""Length from which a word may be folded."""

_BETWEEN = 2
"""Width of the gap between columns."""


def table_of(title: str, *columns: str, keys: int = 0) -> Table:
    """A plain table; long words are folded. Cells are text, never markup: bold text is a `rich.text.Text`. The first
    `keys` columns name a row, in each part of a table that is too wide."""
    table = _Table(
        title=Text(printable(title, "\n"), style="bold") if title else None,
        title_justify="left",
        box=None,
        pad_edge=False,
        header_style="dim",
    )
    table.keys = keys
    for column in columns:
        table.add_column(Text(printable(column)), overflow="fold")
    return table


class _Table(Table):
    """A table that is printed in parts, or line by line, if its columns would be narrower than their words."""

    keys = 0

    def add_row(self, *cells: RenderableType | None, **options: Any) -> None:
        super().add_row(*(Text(printable(cell)) if isinstance(cell, str) else cell for cell in cells), **options)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        least = [_longest_word(column, whole=bool(self.keys)) for column in self.columns]
        wanted = [_longest_line(column) for column in self.columns]
        if _total(least) <= options.max_width:
            if _total(wanted) > options.max_width:
                for column, width in zip(self.columns, _widths(least, wanted, options.max_width), strict=True):
                    column.width = width
            yield from super().__rich_console__(console, options)
            return
        if self.title:
            yield self.title
        if self.keys and _total([*least[: self.keys], max(wanted[self.keys :])]) <= options.max_width:
            for number, part in enumerate(self._parts(options.max_width, least, wanted)):
                if number:
                    yield Text("")
                yield part
            return
        for row in zip(*(column.cells for column in self.columns), strict=True):
            yield from self._told(row)

    def _parts(self, width: int, least: Sequence[int], wanted: Sequence[int]) -> Iterator["_Table"]:
        """Tables of the other columns, as many in each as fit beside the keys."""
        keys, at = range(self.keys), self.keys
        while at < len(self.columns):
            end = at + 1
            while end < len(self.columns) and _total([*least[: self.keys], *wanted[at : end + 1]]) <= width:
                end += 1
            part = copy(self)
            part.title, part.keys = None, 0
            part.columns = [copy(self.columns[place]) for place in (*keys, *range(at, end))]
            for place, column in enumerate(part.columns):
                column._index = place
                column.min_width = None if place < self.keys else _longest_line(column)
            yield part
            at = end

    def _told(self, row: tuple[object, ...]) -> Iterator[Text]:
        """A row as its first cell, followed by the other cells on lines with their column names."""
        first, *others = (cell if isinstance(cell, Text) else Text(str(cell)) for cell in row)
        headers = [str(column.header) for column in self.columns[1:]]
        indent = "  " if first else ""
        if first:
            yield first
        for header, cell in zip(headers, others, strict=True):
            if cell:
                yield Text.assemble(f"{indent}{header + ': ' if header and self.show_header else ''}", cell)


def _longest_word(column: Column, whole: bool = False) -> int:
    """Minimum width of a column; long words may be folded. With `whole`, numbers keep their units."""
    numbers = whole and column.justify == "right"
    words = [*str(column.header).split(), *(word for cell in column.cells for word in _words(str(cell), numbers))]
    least = max((min(cell_len(word), _FOLDED) for word in words), default=0)
    return least if column.min_width is None else column.min_width


def _words(text: str, whole: bool) -> list[str]:
    return [text] if whole else text.split()


def _longest_line(column: Column) -> int:
    """Width of a column that is not wrapped."""
    texts = (str(cell) for cell in (column.header, *column.cells))
    return max((cell_len(line) for text in texts for line in text.splitlines()), default=0)


def _total(widths: Sequence[int]) -> int:
    """Width of a table with columns of these widths."""
    return sum(widths) + _BETWEEN * (len(widths) - 1)


def _widths(least: Sequence[int], wanted: Sequence[int], width: int) -> list[int]:
    """Widths of columns that fit together: what is left beside the least goes to the columns that lack least first."""
    found, left = list(least), width - _total(least)
    lacking = sorted(range(len(found)), key=lambda place: wanted[place] - least[place])
    for after, place in enumerate(lacking):
        more = min(max(0, wanted[place] - least[place]), left // (len(lacking) - after))
        found[place] += more
        left -= more
    return found
