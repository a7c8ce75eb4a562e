"""`plan show` and `plan verify`: read a plan file, check it against its model, and price it anew."""

import contextlib
from collections.abc import Iterator
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any

import typer

from costmodels import CostModelError
from hardware_profiles import HardwareProfileError, InvalidProfileError
from planner.cli.errors import OUTPUT_SCHEMA_VERSION, reporting
from planner.cli.output import plan_content, rank_content, write_json
from planner.cli.printing import console_of
from planner.cli.spoken import hardware_of, model_of
from planner.cli.texts import say
from planner.cli.waiting import Waiting, waiting
from planner.errors import PlanFileError, PlannerError, RequestError

if TYPE_CHECKING:
    from planner.plan.binding.model_of import PlannedModel
    from planner.plan.compare.least_work import LeastWork
    from planner.plan.compare.verify import Verdict
    from planner.plan.plan import Plan

Hardware = Annotated[
    str | None,
    typer.Option(metavar="FILE", help="TOML file of the plan's hardware profile, if it has one.", callback=hardware_of),
]

_OF_MODEL = (
    "Model of the plan, if it is not in the zoo. Give package.module:factory or a config.json. Without this option the"
    " graph in the plan file is used: what a plan file names is never imported or opened."
)
OfModel = Annotated[str | None, typer.Option("--model", metavar="NAME", help=_OF_MODEL, callback=model_of)]
ExecutedModel = Annotated[str | None, typer.Option("--model", metavar="NAME", help=_OF_MODEL, callback=model_of)]

AsJson = Annotated[bool, typer.Option("--json", help="Print one JSON object.")]


def judge(plan_file: Path, hardware: str | None, model: str | None, wait: Waiting) -> "tuple[Verdict, PlannedModel]":
    """Load a plan, trace its model again and verify it. Errors name the file."""
    from planner.plan.file import load_plan

    plan = load_plan(plan_file)
    with naming(plan_file):
        return _judged(plan, hardware, model, wait)


@contextlib.contextmanager
def naming(plan_file: Path) -> Iterator[None]:
    """Add the file name to errors raised inside."""
    try:
        yield
    except PlannerError as error:
        raise type(error)(f"{plan_file}: {error}") from error
    except InvalidProfileError:  # names the file of the profile, which is at fault
        raise
    except (HardwareProfileError, CostModelError) as error:
        raise PlanFileError(f"{plan_file}: {error}") from error


def _judged(plan: "Plan", hardware: str | None, given: str | None, wait: Waiting) -> "tuple[Verdict, PlannedModel]":
    from planner.plan.binding.machine import machine_of
    from planner.plan.compare.verify import verify as check

    cluster = machine_of(plan.cluster, hardware)
    wait.phase("tracing the model")
    model = traced_again(plan, given)
    wait.phase("checking the plan")
    return check(plan, model.graph, model.batch, cluster), model


def traced_again(plan: "Plan", given: str | None) -> "PlannedModel":
    """The graph of a plan's model: from the model that is `given`, the zoo, or the plan itself. Raises ModelError if
    none of these has it."""
    from planner.plan.binding.model_of import carried_model

    there = (carried_model(plan) or _kept_graph(plan)) if given is None else None
    if there is not None:
        return there
    again = built_again(plan, given)
    if given is None:
        _keep_graph(plan, again)
    return again


def _kept_graph(plan: "Plan") -> "PlannedModel | None":
    """The cached graph of a zoo model, which saves most of the time of many commands; None if there is none for this
    plan, or it has rules found by trial."""
    from planner.cli.graph_folder import cache_folder
    from planner.models.zoo import is_of_zoo
    from planner.plan.binding.model_of import PlannedModel
    from planner.plan.graph_cache import graph_key, read_graph
    from planner.plan.plan import PRECISIONS

    folder, model = cache_folder(None), plan.model
    if folder is None or not is_of_zoo(model.reference):
        return None
    dtype = PRECISIONS[plan.training.precision]
    for length in (None, model.sequence_length):
        key = graph_key(model.reference, dtype=dtype, sequence_length=length)
        kept = None if key is None else read_graph(folder, key)
        if kept is not None and kept.graph.fingerprint() == model.fingerprint:
            ruled = any(operator.rule is not None for operator in kept.graph.operators)
            return None if ruled else PlannedModel(graph=kept.graph, batch=kept.batch, built=None)
    return None


def _keep_graph(plan: "Plan", again: "PlannedModel") -> None:
    """Cache the graph of a zoo model for the next command, if possible."""
    from planner.cli.graph_folder import cache_folder
    from planner.models.zoo import is_of_zoo
    from planner.plan.carried import Carried
    from planner.plan.graph_cache import graph_key, keep_graph
    from planner.plan.plan import PRECISIONS

    folder, model = cache_folder(None), plan.model
    if folder is None or again.built is None or not is_of_zoo(model.reference):
        return
    length = again.built.sequence_length
    key = graph_key(model.reference, dtype=PRECISIONS[plan.training.precision], sequence_length=length)
    if key is not None:
        keep_graph(folder, key, Carried(graph=again.graph, batch=again.batch, sequence_length=length))


def built_again(plan: "Plan", given: str | None, why: str = "") -> "PlannedModel":
    """The same for commands that execute the model or its operators, which the graph in a file cannot do; `why` says
    what for."""
    from planner.cli.tracing import traced
    from planner.plan.binding.model_of import PlannedModel, build_planned

    built = build_planned(plan, given, why=why)
    return PlannedModel(graph=traced(built), batch=built.batch, built=built)


def show(
    plan_file: Annotated[Path, typer.Argument(help="A plan file.")],
    hardware: Hardware = None,
    rank: Annotated[
        int | None, typer.Option(help="Show one rank: its stage, its peers, and the shards that it holds.")
    ] = None,
    layouts: Annotated[
        bool,
        typer.Option("--layouts", help="Show sharding as factors and layouts in place of the names of patterns."),
    ] = False,
    model: OfModel = None,
    as_json: AsJson = False,
) -> None:
    """Show a plan: degrees, sharding, time and memory; or what one rank holds.

    plan show llama70b-64.json
    plan show llama70b-64.json --rank 37
    """
    with reporting(as_json):
        from planner.plan.layout.rank_view import rank_view
        from planner.plan.layout.roles import roles
        from planner.report.rank import print_rank
        from planner.report.terminal import print_plan

        if layouts and rank is not None:
            raise RequestError(f"--layouts: --rank {rank} shows the shards that the rank holds; leave it out")
        with waiting() as wait:
            verdict, _ = judge(plan_file, hardware, model, wait)
        if rank is not None:
            plan, view = verdict.bound.plan, rank_view(verdict.bound, roles(verdict.bound), rank)
            if as_json:
                write_json("plan show --rank", rank_content(view, plan))
            else:
                print_rank(console_of(), view, plan.mesh.names, plan.cluster.devices)
            return
        if as_json:
            content = plan_content(verdict.bound.plan, roles(verdict.bound), verdict.prediction)
            write_json("plan show", {**content, "fits": verdict.fits, "remarks": list(verdict.remarks)})
            return
        console = console_of()
        print_plan(console, verdict.bound, roles(verdict.bound), verdict.prediction, layouts=layouts)
        for remark in verdict.remarks:
            console.print(f"\nThe plan was changed since it was priced: {remark}")


def verify(
    plan_file: Annotated[Path, typer.Argument(help="A plan file.")],
    hardware: Hardware = None,
    model: OfModel = None,
    as_json: AsJson = False,
) -> None:
    """Check independently that a plan is legal, fits in memory, and costs what it says. Exit code 1 if not.

    Also bounds how much faster any plan could be, from the file alone: by computation, without communication and
    memory. The bound of the search is tighter; it is repeated, not proved again.

        plan verify llama70b-64.json
    """
    with reporting(as_json):
        from planner.api.checking import check_provable, verified
        from planner.models.zoo import is_of_zoo
        from planner.plan.binding.machine import machine_of

        with waiting() as wait:
            verdict, known = judge(plan_file, hardware, model, wait)
            with naming(plan_file):
                check_provable(verdict, known)
            found = verified(verdict, known, machine_of(verdict.bound.plan.cluster, hardware), wait.phase)
        if as_json:
            write_json("plan verify", _verdict_content(verdict, found.least))
        else:
            plan = verdict.bound.plan
            _print_verdict(verdict, carried=known.built is None and not is_of_zoo(plan.model.reference))
            for line in _bound_lines(verdict, found.least):
                say(line)
        raise typer.Exit(0 if found.holds else 1)


def _bound_lines(verdict: "Verdict", least: "LeastWork | str") -> Iterator[str]:
    """The part of the optimality proof that is checked again, and the part that the file only states."""
    from planner.report.units import percent_text, seconds_text

    plan, step = verdict.bound.plan, verdict.prediction.step_seconds
    if isinstance(least, str):
        yield f"no bound: {least}"
    elif least.contradicts(step):
        yield f"impossible: the work of a step alone takes {seconds_text(least.seconds)} of {least.devices} devices"
    else:
        yield (
            f"no plan on {least.devices} devices takes less than {seconds_text(least.seconds)}, the work of a step"
            f" shared by all ({percent_text(least.gap(step))} faster); checked here, whatever the plan"
        )
    proof = plan.provenance
    if verdict.as_stated and proof.gap < 1:
        by = "by the work alone" if plan.schedule_kind.v_shaped else "by memory and communication too"
        yield (
            f"the file says {percent_text(proof.gap)}, {by} ({proof.search}); not checked"
            " here: search again to prove it"
        )


def _print_verdict(verdict: "Verdict", *, carried: bool) -> None:
    from planner.plan.words import applied_update, gradient_words
    from planner.report.units import bytes_text, seconds_text

    prediction, words = verdict.prediction, gradient_words(applied_update(verdict.bound.plan))
    peak, capacity = bytes_text(prediction.peak_bytes), bytes_text(prediction.capacity_bytes)
    say(f"legal; {seconds_text(prediction.step_seconds)} a step, {peak} of {capacity} per device{words}")
    if verdict.outside is not None:
        say(f"does not fit: {verdict.outside}")
    elif not verdict.fits:
        say(f"does not fit: {bytes_text(prediction.peak_bytes - prediction.capacity_bytes)} too much")
    for remark in verdict.remarks:
        say(f"differs from the file: {remark}")
    if carried:
        say("checked against the graph in the file; --model NAME checks it against the model")


def _verdict_content(verdict: "Verdict", least: "LeastWork | str") -> dict[str, Any]:
    prediction = verdict.prediction
    bounded = None if isinstance(least, str) else least
    return {
        "schema_version": OUTPUT_SCHEMA_VERSION,
        "fits": verdict.fits,
        "as_stated": verdict.as_stated,
        "step_seconds": prediction.step_seconds,
        "peak_bytes": prediction.peak_bytes,
        "capacity_bytes": prediction.capacity_bytes,
        "remarks": list(verdict.remarks),
        "gap_in_file": verdict.bound.plan.provenance.gap if verdict.as_stated else None,
        "bound": None
        if bounded is None
        else {
            "seconds": bounded.seconds,
            "gap": bounded.gap(prediction.step_seconds),
            "devices": bounded.devices,
            "work_seconds": dict(bounded.terms),
        },
        "no_bound": least if isinstance(least, str) else None,
    }
