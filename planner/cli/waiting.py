"""What a command is doing, on a terminal while somebody waits."""

import contextlib
import sys
from collections.abc import Callable, Iterator


@contextlib.contextmanager
def waiting() -> Iterator[Callable[[str], None]]:
    """A line on stderr that says what is done, to be told it; nothing without a terminal."""
    from rich.console import Console

    console = Console(file=sys.stderr, quiet=not sys.stderr.isatty())
    with console.status("") as status:
        yield lambda text: status.update(text)
