"""In which precisions a plan is proved: in float64, in which nothing hides in rounding, and in its own.

An operator of the user's may have no kernel for float64, or none for fp32 either. Every call of one is tried, as where
its rule is found (`planner.sharding.discover.trial`), and the proof takes the widest precision that all of them have.
"""

from collections.abc import Sequence
from dataclasses import replace

from planner.graph.call import Call, Typed, typed_call
from planner.graph.operator_graph import OperatorGraph, TensorType
from planner.plan.plan import PRECISIONS
from planner.plan.shrinking.shrink import EXACT
from planner.sharding.discover.find import one_thread
from planner.sharding.discover.trial import settings, small_calls, try_call

_NARROW = ("bfloat16", "float16")
_WIDE = tuple(name for name, dtype in PRECISIONS.items() if dtype == "float32")
"""Precisions in which processes on CPUs compute alike, in fp32."""


def precisions_of(graph: OperatorGraph, own: str) -> tuple[tuple[str, ...], str]:
    """Precisions for the proof of a plan of this graph that trains in `own`; and why float64 is none of them, empty
    where it is."""
    calls = sorted({typed_call(graph, op) for op in graph.operators if op.rule is not None}, key=repr)
    why = _first([_why_not(call, doubles=True) for call in calls])
    if not why:
        return (EXACT,) if own in _WIDE else (EXACT, own), ""
    if own in _WIDE or _first([_why_not(call, doubles=False) for call in calls]):
        return (own,), why
    return ("fp32", own), why


def _first(reasons: Sequence[str]) -> str:
    return next(filter(None, reasons), "")


@one_thread()
def _why_not(call: Call, *, doubles: bool) -> str:
    """Why a call that runs in its own precision, forward and backward or forward alone, does not in float64 (`doubles`)
    or fp32; empty where it does."""
    for small in small_calls(call):
        for setting in settings(small):
            if setting.doubles or isinstance(try_call(small, setting, seed=0), str):
                continue
            found = try_call(_in_fp32(small), replace(setting, doubles=doubles), seed=0)
            return f"{call.op}: {found}" if isinstance(found, str) else ""
    return ""


def _in_fp32(call: Call) -> Call:
    def of(value: Typed) -> Typed:
        if isinstance(value, TensorType):
            return replace(value, dtype="float32") if value.dtype in _NARROW else value
        return tuple(of(item) for item in value) if isinstance(value, tuple) else value

    return replace(
        call,
        arguments=tuple(of(value) for value in call.arguments),
        keywords=tuple((name, of(value)) for name, value in call.keywords),
        results=(),
    )
