"""The style of all tables, on wide and narrow terminals."""

from collections.abc import Iterator
from typing import Any

from rich.console import Console, ConsoleOptions, RenderableType, RenderResult
from rich.table import Table
from rich.text import Text

from hardware_profiles.foreign import printable

_FOLDED = 24
"""Length from which a word may be folded."""

_BETWEEN = 2
"""Width of the gap between columns."""


def table_of(title: str, *columns: str) -> Table:
    """A plain table; long words are folded. Cells are text, never markup: bold text is a `rich.text.Text`."""
    table = _Table(
        title=Text(printable(title, "\n"), style="bold") if title else None,
        title_justify="left",
        box=None,
        pad_edge=False,
        header_style="dim",
    )
    for column in columns:
        table.add_column(Text(printable(column)), overflow="fold")
    return table


class _Table(Table):
    """A table that is printed line by line if its columns would be narrower than their words."""

    def add_row(self, *cells: RenderableType | None, **options: Any) -> None:
        super().add_row(*(Text(printable(cell)) if isinstance(cell, str) else cell for cell in cells), **options)

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self._least_width() <= options.max_width:
            yield from super().__rich_console__(console, options)
            return
        if self.title:
            yield self.title
        for row in zip(*(column.cells for column in self.columns), strict=True):
            yield from self._told(row)

    def _least_width(self) -> int:
        """Minimum width: the longest words of all columns side by side; long words may be folded."""
        words = (
            max((len(word) for cell in (column.header, *column.cells) for word in str(cell).split()), default=0)
            for column in self.columns
        )
        return sum(min(longest, _FOLDED) for longest in words) + _BETWEEN * (len(self.columns) - 1)

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
