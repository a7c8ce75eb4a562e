"""The look of all tables, on wide terminals and on narrow ones."""

from collections.abc import Iterator

from rich.console import Console, ConsoleOptions, RenderResult
from rich.table import Table
from rich.text import Text

_FOLDED = 24
"""Characters of a word that may be folded."""

_BETWEEN = 2
"""Characters between two columns."""


def table_of(title: str, *columns: str) -> Table:
    """A plain table; long words are folded."""
    table = _Table(
        title=title or None, title_justify="left", title_style="bold", box=None, pad_edge=False, header_style="dim"
    )
    for column in columns:
        table.add_column(column, overflow="fold")
    return table


class _Table(Table):
    """A table that is told line by line where its columns would be narrower than their words."""

    def __rich_console__(self, console: Console, options: ConsoleOptions) -> RenderResult:
        if self._least_width() <= options.max_width:
            yield from super().__rich_console__(console, options)
            return
        if self.title:
            yield Text.from_markup(f"[bold]{self.title}[/bold]")
        for row in zip(*(column.cells for column in self.columns), strict=True):
            yield from self._told(row)

    def _least_width(self) -> int:
        """Characters that the longest words of all columns take beside each other; the longest of all may be folded."""
        words = (
            max((len(word) for cell in (column.header, *column.cells) for word in _plain(cell).split()), default=0)
            for column in self.columns
        )
        return sum(min(longest, _FOLDED) for longest in words) + _BETWEEN * (len(self.columns) - 1)

    def _told(self, row: tuple[object, ...]) -> Iterator[Text]:
        """A row as its first cell, and below it the others with the names of their columns."""
        first, *others = (str(cell) for cell in row)
        headers = [str(column.header) for column in self.columns[1:]]
        indent = "  " if first else ""
        if first:
            yield Text.from_markup(first)
        for header, cell in zip(headers, others, strict=True):
            if cell:
                yield Text.from_markup(f"{indent}{header + ': ' if header and self.show_header else ''}{cell}")


def _plain(cell: object) -> str:
    return Text.from_markup(str(cell)).plain
