"""The message if a limit of the planner was reached before there was a plan: which limit, what is large, and what
helps."""

from planner.errors import LateError, LimitError
from planner.limits import check_late, limit_of, more_of
from planner.strategy_search.request.request import SearchRequest

NO_PLAN = "no plan that fits was found before the search was stopped"

_MANY = 1000  # operators


def check_begin(request: SearchRequest) -> None:
    """Raise LateError where the time limit was over before the search of a request begins; LimitError where the planner
    has no memory left."""
    try:
        check_late()
    except LimitError as error:
        if error.by == "memory":
            raise
        raise LateError(
            f"reading {request.model.reference} took all the time: {error}, and nothing was searched; give it more time"
            " (--time-limit)"
        ) from error


def nothing_before(request: SearchRequest, error: LimitError | MemoryError) -> LimitError:
    """The error of a request for which no plan was found before a limit was reached."""
    if str(error).startswith(NO_PLAN):
        assert isinstance(error, LimitError)
        return error
    by = limit_of(error)
    why = str(error) or "the system gave no more memory"
    count = len(request.graph.operators)
    ways = [more_of(by)]
    if count > _MANY:
        ways.append("trace less: a loop over tokens in Python makes operators for each of them, a fused scan makes few")
        if request.model.sequence_length is not None:
            ways.append("a shorter --seq-len")
    if request.algorithm != "recursive_programming":
        ways.append("--search recursive_programming")
    text = f"{NO_PLAN}; {', or '.join(ways)}. {request.model.reference} has {count} operators, and {why}"
    return LimitError(text, by=by)
