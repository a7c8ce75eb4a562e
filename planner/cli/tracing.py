"""Tracing on the command line: where a model cannot be traced, our one line is all that is said."""

import contextlib
import logging
from collections.abc import Iterator
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from planner.graph.operator_graph import OperatorGraph
    from planner.models.zoo import BuiltModel


def traced(model: "BuiltModel") -> "OperatorGraph":
    """The graph of a built model. Torch logs tracebacks of what it raises anyway; they are kept from the terminal."""
    from planner.graph.trace import trace

    with _no_logging():
        return trace(model.module, model.args, model.kwargs)


@contextlib.contextmanager
def _no_logging() -> Iterator[None]:
    before = logging.root.manager.disable
    logging.disable(logging.CRITICAL)
    try:
        yield
    finally:
        logging.disable(before)
