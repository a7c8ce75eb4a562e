"""The training job of a call: a model as it is named, built or traced, and the machine."""

import os
import sys
import warnings
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Any

from hardware_profiles import Machine
from hardware_profiles.nicknames import full_profile
from planner.api.checks import file_path, number
from planner.api.kinds import kind_of
from planner.api.search_options import SearchOptions
from planner.api.speaking import said_to_caller
from planner.errors import RequestError
from planner.graph.operator_graph import OperatorGraph
from planner.models.nicknames import full_model
from planner.strategy_search.job import Job, Trace, given_job, machine_from, named_job

if TYPE_CHECKING:
    from planner.models.zoo import BuiltModel

HARDWARE = "h100-80gb"


@dataclass(frozen=True, kw_only=True, repr=False)
class TracedModel:
    """A model as a graph of operators, on example inputs of `batch` samples. `search` can use it many times without
    tracing again."""

    job: Job

    @property
    def graph(self) -> OperatorGraph:
        return self.job.graph

    @property
    def batch(self) -> int:
        return self.job.batch

    @property
    def name(self) -> str:
        return self.job.model.reference

    def __repr__(self) -> str:
        return f"TracedModel({self.name!r}, {len(self.graph.operators)} operators, {self.job.precision})"


def machine_given(
    hardware: Machine | str | os.PathLike[str],
    *,
    cluster: str | None = None,
    software: str | None = None,
    devices: int | None = None,
) -> Machine:
    """The machine of the arguments. Raises RequestError, HardwareProfileError."""
    if isinstance(hardware, os.PathLike):
        hardware = os.fspath(hardware)
    if not isinstance(hardware, str) and not hasattr(hardware, "with_devices"):
        raise RequestError(f"hardware is {kind_of(hardware)}: give the name or file of a profile, or a machine")
    if hardware == "":
        raise RequestError("hardware is empty: give the name or file of a profile, or a machine")
    number("devices", devices)
    named = full_profile(hardware) if isinstance(hardware, str) else hardware
    return machine_from(named, levels=cluster, software=software, devices=devices)


def job_of(
    model: Any,
    machine: Machine,
    seq_len: int | None,
    args: Any,
    kwargs: Any,
    batch: int | None,
    *,
    precision: str | None,
    global_batch: int | None = None,
    rule_cache: str | os.PathLike[str] | None = None,
    graph_cache: str | os.PathLike[str] | None = None,
    traced: Trace | None = None,
    noted: Callable[[str], None] | None = None,
) -> Job:
    """The job of a model: one that is named, a torch module, a graph, or a TracedModel. `traced` traces a model that is
    named; `noted` gets notes on its operators, which are warnings where nothing is given."""
    if isinstance(model, TracedModel):
        if seq_len is not None or args or kwargs or batch is not None or precision not in (None, model.job.precision):
            raise RequestError("the model is traced: say seq_len, precision and example inputs to planner.trace")
        return replace(model.job, cluster=machine, asked_batch=global_batch)
    if not isinstance(args, tuple | list) or not isinstance(kwargs, Mapping | None):
        raise RequestError("args, kwargs: give a tuple and a dict of example inputs, as the module is called")
    asked: dict[str, Any] = {
        "precision": precision,
        "global_batch": global_batch,
        "rule_cache": None if rule_cache is None else file_path("rule_cache", rule_cache),
        "noted": noted or warned,
    }
    if isinstance(model, os.PathLike):
        model = os.fspath(model)
    if isinstance(model, str):
        if args or kwargs or batch is not None:
            raise RequestError("args, kwargs, batch: leave them out; example inputs are for a torch module, not a name")
        kept = None if graph_cache is None else file_path("graph_cache", graph_cache)
        trace = traced or traced_model
        return named_job(full_model(model), machine, trace, sequence_length=seq_len, graph_cache=kept, **asked)
    if not isinstance(model, OperatorGraph) and not callable(getattr(model, "named_parameters", None)):
        raise RequestError(f"model is {kind_of(model)}: give a name, a torch module, or what planner.trace returned")
    if seq_len is not None:
        raise RequestError("seq_len is for models that are named; example inputs say how long their sequences are")
    return given_job(model, machine, args=tuple(args), kwargs=kwargs, batch=batch, **asked)


def warned(note: str) -> None:
    """Warn at the line that called the planner, of parameters in place of options."""
    level, frame = 1, sys._getframe()
    while frame.f_back is not None and frame.f_globals.get("__name__", "").partition(".")[0] == _PACKAGE:
        level, frame = level + 1, frame.f_back
    warnings.warn(said_to_caller(note, _PARAMETERS), stacklevel=level)


_PACKAGE = __name__.partition(".")[0]
_PARAMETERS = ("model", "hardware", "devices", "software", *SearchOptions.__annotations__)


def traced_model(model: "BuiltModel") -> OperatorGraph:
    """The graph of a built model."""
    from planner.graph.trace import trace
    from planner.graph.tracing.on_meta import without_data

    bare = without_data(model.module, on_host=model.on_host)
    return trace(bare, model.args, model.kwargs, compared=model.compared)
