"""Operators that compare samples of a batch with one another, such as the scores of a contrastive loss.

    q (batch, d) @ d.t() (d, batch)  ->  logits (batch, batch)

Such a result has pairs of samples: twice the batch makes four times as many numbers. With several micro-batches each
compares only its own samples, which is another loss than that of the whole batch, not a mean of parts of it.
"""

import math
from typing import cast

from planner.errors import RequestError
from planner.graph.operator_graph import Operator, OperatorGraph
from planner.sharding.rescale import batch_growths

_FOUND = "compared samples"


def comparing_samples(graph: OperatorGraph, batch: int) -> str | None:
    """What a user must know of a model whose loss compares samples, if micro-batches are to be chosen. `batch` is the
    leading dim of its inputs. None where no operator compares samples, and where the batch cannot be changed."""
    if (_FOUND, batch) not in graph.derived:
        graph.derived[_FOUND, batch] = _first(graph, batch)
    found = cast("Operator | None", graph.derived[_FOUND, batch])
    if found is None:
        return None
    return (
        f"operator '{found.name}', called in {found.place}, compares samples with one another: with several"
        " micro-batches each compares only its own samples, which is another loss; --micro-batches 1 compares those of"
        " the whole batch"
    )


def _first(graph: OperatorGraph, batch: int) -> Operator | None:
    """The first operator with a result of pairs of samples."""
    try:
        growths = batch_growths(graph, batch)
    except RequestError:
        return None
    made = ((op, name) for op in graph.operators for name in op.results if name is not None)
    return next((op for op, name in made if math.prod(dim.scale for dim in growths[name]) > 2), None)
