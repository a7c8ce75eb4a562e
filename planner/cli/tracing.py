"""Tracing on the command line: if a model cannot be traced, only our one-line error is printed."""

import contextlib
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from planner.graph.operator_graph import OperatorGraph
    from planner.models.zoo import BuiltModel


def traced(model: "BuiltModel", *, full: bool = False) -> "OperatorGraph":
    """The graph of a built model (see `trace` for `full`). Errors that torch logs and raises are not shown twice."""
    from planner.graph.trace import trace
    from planner.graph.tracing.on_meta import without_data

    with _no_logging():
        bare = without_data(model.module, on_host=model.on_host)
        return trace(bare, model.args, model.kwargs, full=full, compared=model.compared)


@contextlib.contextmanager
def _no_logging() -> Iterator[None]:
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)
