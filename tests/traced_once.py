"""Models of the zoo are traced once for many commands: a small one costs as much to trace as all else that is done."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import Any

import pytest

import planner.api.importing_plans
import planner.api.jobs
import planner.api.planned
import planner.api.plans
import planner.cli.tracing
from tests.kept import kept


@contextmanager
def traced_once() -> Iterator[None]:
    """What the command line and `planner.search` trace of models of the zoo is kept: graphs, which nothing changes."""
    with _remembering(lambda model: model.published, kept):
        yield


@contextmanager
def users_traced_once() -> Iterator[None]:
    """Models of the user's, too, whose files do not change: otherwise they are traced whenever they are asked for."""
    with _remembering(lambda model: not model.published, lambda _, make: make()):
        yield


@contextmanager
def _remembering(which: Callable[[Any], bool], make: Callable[[str, Callable[[], Any]], Any]) -> Iterator[None]:
    known: dict[object, Any] = {}

    def remembering(trace: Callable[..., Any]) -> Callable[..., Any]:
        def remembered(model: Any, **options: bool) -> Any:
            if not which(model):
                return trace(model, **options)
            dtype = next(model.module.parameters()).dtype
            key = (model.reference, model.batch, model.sequence_length, dtype, options.get("full", False))
            if key not in known:
                known[key] = make(f"zoo {key}", partial(trace, model, **options))
            return known[key]

        return remembered

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(planner.cli.tracing, "traced", remembering(planner.cli.tracing.traced))
        for place in (planner.api.importing_plans, planner.api.jobs, planner.api.planned, planner.api.plans):
            patch.setattr(place, "traced_model", remembering(place.traced_model))
        yield
