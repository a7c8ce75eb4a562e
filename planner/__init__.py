"""An auto-parallel planner: traces a PyTorch model, searches how to split it over a cluster, and writes the plan.

The parts, from the ground up (each imports only from those before it):

    errors, limits            what may go wrong; the time and memory that planning may take
    graph, models             what a model computes
    sharding, pricing         how it can be split, and what that costs
    plan                      what was decided: the file, its checks, its price
    strategy_search, report, export    who makes plans, shows them, carries them elsewhere
    cli                       the command line

What it is for, from Python (docs/python.md):

    trace(model), search(model, hardware, ...)        a model as a graph; the best plans for it, as a SearchResult
    pareto(model, hardware, ...)                      the fastest plans for less and less memory, or cost, as a Front
    estimate(model or plan, hardware, ...)            what one configuration costs, as a Plan
    compare(model, hardware, devices=...), capacity   days, cost, scaling; how many devices
    load(path), save(plan, path)                      plan files
    explain(plan), diff(plan, plan), report(plan)     what limits a plan, how two differ, a page
    advise(settings)                                  what to change in a configuration of an engine
    export(plan, engine), import_plan(settings)       carried elsewhere, and from there
    verify(plan), audit(plan), prove(plan)            checked: its figures, one rank of each stage, small runs
    validate(csv), fit(runs, path), replan(plan, hardware)   measured runs: compared, a profile corrected, a new plan
    compare_measured(plan, record), calibrate(path)   a plan beside its run, part by part; a profile of this machine
    Pinned, Update, shard                             what is decided by hand
    StackedSamples                                    a model that takes samples packed, as images of known sizes
    PlannerError                                      what is raised on purpose; one that says what to do instead
"""

import sys
from importlib import import_module
from types import ModuleType
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from planner.api.calibrating import calibrate
    from planner.api.checking import prove, verify
    from planner.api.comparing import capacity, compare
    from planner.api.decisions import shard
    from planner.api.fitting import fit
    from planner.api.fronts import pareto
    from planner.api.importing_plans import import_plan
    from planner.api.jobs import TracedModel
    from planner.api.measured import compare_measured
    from planner.api.plans import advise, audit, diff, explain, export, load, report, save, validate
    from planner.api.replanning import replan
    from planner.api.searching import estimate, search, trace
    from planner.errors import PlannerError
    from planner.graph.tracing.stacked import StackedSamples
    from planner.plan.file import load_plan, save_plan
    from planner.plan.plan import Plan
    from planner.sharding.discover import discover
    from planner.sharding.update import Update
    from planner.strategy_search.request.space import Pinned
    from planner.strategy_search.result import Progress, SearchResult

_LAZY = {
    "Pinned": "planner.strategy_search.request.space",
    "Plan": "planner.plan.plan",
    "PlannerError": "planner.errors",
    "Progress": "planner.strategy_search.result",
    "SearchResult": "planner.strategy_search.result",
    "StackedSamples": "planner.graph.tracing.stacked",
    "TracedModel": "planner.api.jobs",
    "Update": "planner.sharding.update",
    "advise": "planner.api.plans",
    "audit": "planner.api.plans",
    "calibrate": "planner.api.calibrating",
    "capacity": "planner.api.comparing",
    "compare": "planner.api.comparing",
    "compare_measured": "planner.api.measured",
    "diff": "planner.api.plans",
    "discover": "planner.sharding.discover",
    "estimate": "planner.api.searching",
    "explain": "planner.api.plans",
    "export": "planner.api.plans",
    "fit": "planner.api.fitting",
    "import_plan": "planner.api.importing_plans",
    "load": "planner.api.plans",
    "load_plan": "planner.plan.file",
    "pareto": "planner.api.fronts",
    "prove": "planner.api.checking",
    "replan": "planner.api.replanning",
    "report": "planner.api.plans",
    "save": "planner.api.plans",
    "save_plan": "planner.plan.file",
    "search": "planner.api.searching",
    "shard": "planner.api.decisions",
    "trace": "planner.api.searching",
    "validate": "planner.api.plans",
    "verify": "planner.api.checking",
}

__all__ = [
    "Pinned",
    "Plan",
    "PlannerError",
    "Progress",
    "SearchResult",
    "StackedSamples",
    "TracedModel",
    "Update",
    "advise",
    "audit",
    "calibrate",
    "capacity",
    "compare",
    "compare_measured",
    "diff",
    "discover",
    "estimate",
    "explain",
    "export",
    "fit",
    "import_plan",
    "load",
    "load_plan",
    "pareto",
    "prove",
    "replan",
    "report",
    "save",
    "save_plan",
    "search",
    "shard",
    "trace",
    "validate",
    "verify",
]


class _CalledHouse(ModuleType):
    """`planner.report` and `planner.export` are folders of modules and functions of the same name: both may be had."""

    @property
    def _function(self) -> Any:
        return _loaded(self.__name__.rpartition(".")[2])

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._function(*args, **kwargs)

    @property
    def __signature__(self) -> Any:
        from inspect import signature

        return signature(self._function)


class _Face(ModuleType):
    """Modules that Python puts here as it imports them stay callable where they share the name of a function."""

    def __setattr__(self, name: str, value: Any) -> None:
        if name in _LAZY and isinstance(value, ModuleType):
            value.__class__ = _CalledHouse
        super().__setattr__(name, value)


sys.modules[__name__].__class__ = _Face


def _loaded(name: str) -> Any:
    """A name, loaded when it is first used: importing the planner loads neither torch nor numpy."""
    if name in _LAZY:
        return getattr(import_module(_LAZY[name]), name)
    raise AttributeError(f"module 'planner' has no attribute '{name}'", name=name, obj=sys.modules[__name__])


if not TYPE_CHECKING:  # type checkers would take every name for one of this module
    __getattr__ = _loaded


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})
