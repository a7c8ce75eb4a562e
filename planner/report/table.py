"""The look of all tables."""

from rich.table import Table


def table_of(title: str, *columns: str) -> Table:
    """A plain table; long words are folded."""
    table = Table(title=title, title_justify="left", title_style="bold", box=None, pad_edge=False, header_style="dim")
    for column in columns:
        table.add_column(column, overflow="fold")
    return table
