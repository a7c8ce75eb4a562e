"""Models of the zoo are traced once for many commands: a small one costs as much to trace as all else that is done."""

from collections.abc import Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import planner.cli.tracing
from planner.models.zoo import ZOO
from tests.kept import kept


@contextmanager
def traced_once(*, users: bool = False) -> Iterator[None]:
    """What the command line traces is kept: graphs, which nothing changes. A model of the user's is traced whenever it
    is asked for, as its file may have changed, unless they are known not to (`users`)."""
    known: dict[object, Any] = {}
    trace = planner.cli.tracing.traced

    def remembered(model: Any, *, full: bool = False) -> Any:
        ours = model.reference.partition("+")[0] in ZOO
        if not users and not ours:
            return trace(model, full=full)
        dtype = next(model.module.parameters()).dtype
        key = (model.reference, model.batch, model.sequence_length, dtype, full)
        if key not in known:
            make = partial(trace, model, full=full)
            known[key] = kept(f"zoo {key}", make) if ours else make()
        return known[key]

    planner.cli.tracing.traced = remembered
    try:
        yield
    finally:
        planner.cli.tracing.traced = trace
