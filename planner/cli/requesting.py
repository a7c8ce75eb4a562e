"""From options to a request: checks the words, traces the model, collects the decisions."""

import os
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, cast, get_args

from planner.cli.graph_folder import graph_folder, rule_folder
from planner.cli.options import Options, flag
from planner.cli.texts import say
from planner.cli.values import (
    batch_multiple_of,
    memory_limit,
    padding_of,
    parse_buckets,
    parse_chunks,
    parse_count,
    parse_expert_overlap,
    parse_margin,
    parse_mesh,
    parse_pads,
    parse_percent,
    parse_places,
    parse_shards,
    placing_of,
)
from planner.cli.waiting import waiting
from planner.errors import RequestError, unknown_name
from planner.faults import refuse
from planner.graph.expert_load import EVEN

if TYPE_CHECKING:
    from collections.abc import Callable, Mapping, Sequence

    from rich.console import Console

    from planner.api.search_options import SearchOptions
    from planner.graph.operator_graph import OperatorGraph
    from planner.models.zoo import BuiltModel
    from planner.plan.plan import Plan
    from planner.sharding.update import Update
    from planner.strategy_search.request.request import (
        Alltoall,
        Default,
        Objective,
        Placing,
        SearchRequest,
        Shard,
    )
    from planner.strategy_search.request.space import ContextBy, Pinned, Running

SEARCHED_AXES = 2
"""Maximum number of mesh axes for which all meshes are searched; meshes with more axes must be given."""

DEGREES = ("tensor", "pipeline", "data", "context")
"""The degrees whose product is the number of devices. Experts use some of these devices."""
ALLTOALL: "Mapping[str, Alltoall]" = {"all": True, "node": "node", "none": False, "auto": "auto"}
"""Links with the all-to-all, by the words of the command line."""
_PLACES: "Mapping[Placing, str | None]" = {"auto": "auto", "given": "none", "fit": None}
"""`place` of `planner.search`, beside tables with places in `update`."""
_MANUAL = ("tensor", "data", "context", "expert", "zero", "replicas", "sequence_parallel", "micro_batch")


def check(options: Options) -> None:
    """Raise RequestError for unknown words and for options that contradict each other."""
    from planner.fp8_recipes import RECIPES
    from planner.graph.fp8 import WORD
    from planner.plan.plan import OPTIMIZERS, PRECISIONS, RECOMPUTATION
    from planner.sharding.update import GRADIENT_DTYPES, GRADIENTS, MOMENT_DTYPES
    from planner.strategy_search.request.request import ALGORITHMS, DEFAULTS, OBJECTIVES
    from planner.strategy_search.request.space import ContextBy

    named = ("model", "software")  # these say which names there are
    empty = [flag(name) for name in options.given() if getattr(options, name) == "" and name not in named]
    if empty:
        raise RequestError(f"{empty[0]} is empty; give a value, or leave it out")
    words: tuple[tuple[str, tuple[str, ...]], ...] = (
        ("search", ALGORITHMS),
        ("objective", OBJECTIVES),
        ("precision", (*PRECISIONS, WORD)),
        ("fp8", tuple(RECIPES)),
        ("optimizer", OPTIMIZERS),
        ("recompute", RECOMPUTATION),
        ("context_by", get_args(ContextBy)),
        ("default", DEFAULTS),
        ("alltoall_on", tuple(ALLTOALL)),
        ("gradients", GRADIENTS),
        ("gradient_dtype", GRADIENT_DTYPES),
        ("moment_dtype", MOMENT_DTYPES),
    )
    for name, known in words:
        value = getattr(options, name)
        if value is not None and value not in known:
            raise RequestError(unknown_name(f"value for {flag(name)}", value, known))
    _check_contradictions(options)
    _check_degrees(options)


def _check_contradictions(options: Options) -> None:
    manual = next((name for name in _MANUAL if getattr(options, name) is not None), None)
    pairs = (
        ("mesh", manual, "both decide the degrees"),
        ("micro_batch", "micro_batches", "determine each other"),
        ("pareto", "top", "ask for different lists of plans"),
        ("simplicity", "pareto", "contradict each other: the front has the fastest plans"),
        ("simplicity", "top", "contradict each other: that list has the fastest plans"),
        ("simplicity", "engine", "contradict each other: plans for an engine have its pattern"),
        ("forward_only", "schedule", "both decide the order of passes"),
        ("forward_only", "recompute", "contradict each other: nothing is kept for a backward pass"),
        ("forward_only", "engine", "contradict each other: engines train"),
        ("forward_only", "optimizer", "contradict each other: no weights are updated"),
    )
    if options.pareto and options.objective not in (None, "cost"):
        raise RequestError(
            f"--pareto and --objective {options.objective} ask for different plans; give one of them; --pareto alone is"
            " time against memory, --pareto --objective cost time against cost"
        )
    if options.alltoall_on is not None and options.alltoall is not None:
        raise RequestError("--alltoall-on and --[no-]alltoall both say where the all-to-all is; give one of them")
    if options.write_all and not options.pareto and (options.top or 1) == 1:
        raise RequestError("--write-all writes the plans of a list; give --top N or --pareto, too, or leave it out")
    for one, other, what in pairs:
        if other is not None and getattr(options, one) and getattr(options, other) not in (None, False):
            raise RequestError(f"{flag(one)} and {flag(other)} {what}; give one of them")


def _check_degrees(options: Options) -> None:
    """Checks without the model: the product of the degrees is the number of devices, or leaves a whole number for the
    open degrees."""
    from planner.strategy_search.request.refusals import degrees_fault

    refuse(degrees_fault(pinned_of(options), options.device_count), RequestError)


def request_of(options: Options, console: "Console") -> "SearchRequest":
    """Trace the model and build the search request, as `planner.search` does."""
    from planner.api import requesting
    from planner.cli.tracing import traced

    noted = _noted if options.speaks else _unheard
    sources, by_hand = _sources(options.shard_from or ()), parse_shards(options.shard or ())

    def trace(model: "BuiltModel") -> "OperatorGraph":
        with waiting(console) as wait:
            wait.phase(f"tracing {options.reference}")
            return traced(model, full=options.full_trace)

    caller = requesting.Caller(
        traced=trace,
        noted=noted,
        more_shards=lambda graph: _taken_over(sources, by_hand, graph),
    )
    asked = _asked(options, by_hand, _with_mesh(pinned_of(options), sources))
    return requesting.request_of(
        options.reference,
        options.profile,
        requesting.checked(asked),
        devices=options.device_count,
        software=options.software,
        caller=caller,
    )


def _asked(options: Options, shards: "tuple[Shard, ...]", pinned: "Pinned") -> "SearchOptions":
    """The options in the types of `planner.search`."""
    from planner.strategy_search.job import machine_from

    pad: list[str | dict[str, int]] = ["auto"] if padding_of(options.pad or ()) == "auto" else []
    if (multiple := batch_multiple_of(options.pad or ())) is not None:
        pad.append({"batch": multiple})
    limit, margin = options.memory_limit, options.memory_margin
    return {
        "cluster": options.cluster,
        "engine": options.engine,
        "seq_len": options.seq_len,
        "global_batch": options.global_batch,
        "imbalance": EVEN if options.imbalance is None else options.imbalance,
        "tokens_once": options.tokens_once,
        "precision": options.precision,
        "fp8": options.fp8,
        "fp8_layers": options.fp8_layers or (),
        "fp8_left_out": options.fp8_left_out or (),
        "fp8_gathered": options.fp8_gathered,
        "fp8_experts": options.fp8_experts,
        "fp8_dispatch": options.fp8_dispatch,
        "fp8_history": options.fp8_history,
        "fp8_margin": options.fp8_margin,
        "optimizer": options.optimizer or "adamw",
        "pinned": pinned,
        "shard": shards,
        "default": cast("Default", options.default or "search"),
        "place": _PLACES[placing_of(options.place or ())],
        "pad": pad,
        "update": update_of(options),
        "search": options.search or "dynamic_programming",
        "objective": cast("Objective", options.objective or "time"),
        "top": max(options.top or 1, 2 if options.explain else 1),
        "time_limit": options.time_limit,
        "memory_limit": None if limit is None else memory_limit(limit, machine_from(options.profile)),
        "memory_margin": None if margin is None else parse_margin(margin),
        "simplicity": simplicity_of(options),
        "alltoall": False if options.alltoall is False else ALLTOALL[options.alltoall_on or "all"],
        "certify": options.certify,
        "rule_cache": rule_folder(options),
        "graph_cache": graph_folder(options),
    }


def simplicity_of(options: Options) -> float:
    """By how much a simpler plan may be slower: zero if a list of the fastest plans was requested, or the plan is for
    an engine."""
    from planner.strategy_search.request.request import SIMPLICITY

    if options.pareto or (options.top or 1) > 1 or options.engine is not None:
        return 0.0
    return SIMPLICITY if options.simplicity is None else parse_percent("simplicity", options.simplicity, most=50)


def retracing(options: Options, request: "SearchRequest") -> "Callable[[int], SearchRequest] | None":
    """A function that makes the same request for another sequence length; None if the model has no length, or only its
    own."""
    from planner.cli.tracing import traced
    from planner.strategy_search.job import named_job

    name = request.model.reference
    if ":" in name or request.model.sequence_length is None:
        return None

    def retrace(length: int) -> "SearchRequest":
        job = named_job(
            name,
            request.cluster,
            lambda model: traced(model, full=options.full_trace),
            sequence_length=length,
            precision=request.precision,
            graph_cache=graph_folder(options),
        )
        return replace(request, graph=job.graph, batch=job.batch, model=job.model)

    return retrace


def update_of(options: Options) -> "Update":
    """How gradients are clipped, reduced and applied. Raises RequestError for an impossible combination."""
    from planner.sharding.update import AUTO_GATHERS, Update, update_fault
    from planner.strategy_search.request.per_replica import parse_per_replica

    buckets, gathers = options.buckets or "auto", options.gathers or AUTO_GATHERS
    if options.no_overlap:
        if options.buckets not in (None, "none") or options.gathers == "ahead":
            raise RequestError("--no-overlap sends nothing while something computes; leave out --buckets and --gathers")
        buckets, gathers = "none", options.gathers or "each"
    patterns, count = parse_per_replica(options.per_replica or ())
    update = Update(
        gradients=options.gradients or "mean",
        gradient_dtype=options.gradient_dtype or "mixed",
        master_weights=options.master_weights is not False,
        moment_dtype=options.moment_dtype or "fp32",
        clip_norm=options.clip_norm,
        broadcast=options.broadcast,
        buckets=parse_buckets(buckets),
        gathers=gathers,
        zero_by=options.zero_by or "slices",
        local_parameters=tuple(options.local_parameters or ()),
        placed=parse_places(options.place or ()),
        padded=parse_pads(options.pad or ()),
        per_replica=patterns,
        replicas=count,
    )
    refuse(update_fault(update), RequestError, lambda option: f"{flag(option)}:")
    return update


def _noted(note: str) -> None:
    """Print a note about operators on stderr: those without a row in the rule table, attention that drops."""
    say(f"note: {note}", err=True)


def _unheard(note: str) -> None:
    """Does nothing: of a command that is quiet."""


def _one_at_a_time(options: Options) -> int | None:
    """The requested number of interleaved micro-batches."""
    asked = None if options.interleave is None else parse_count("interleave", options.interleave)
    if options.no_overlap and asked not in (None, 1):
        raise RequestError("--no-overlap has no micro-batches that take turns; leave out --no-overlap, or --interleave")
    return 1 if options.no_overlap else asked


def pinned_of(options: Options) -> "Pinned":
    """The degrees and other decisions made by hand."""
    from costmodels import FORWARD
    from planner.strategy_search.request.offload import parse_offload
    from planner.strategy_search.request.space import Pinned

    return Pinned(
        pipeline=options.pipeline,
        virtual_stages=None
        if options.virtual_stages is None
        else parse_count("virtual-stages", options.virtual_stages),
        interleave=_one_at_a_time(options),
        tensor_overlap=parse_chunks(options.tensor_overlap, none=options.no_overlap),
        expert_overlap=parse_expert_overlap(options.expert_overlap, none=options.no_overlap),
        slices=None if options.slices is None else parse_count("slices", options.slices),
        schedule=FORWARD if options.forward_only else options.schedule,
        data=options.data,
        context=options.context,
        context_by=cast("ContextBy | None", options.context_by),
        ulysses=options.ulysses,
        zigzag=options.zigzag,
        tensor=options.tensor,
        expert=options.expert,
        zero=options.zero,
        replicas=options.replicas,
        sequence_parallel=options.sequence_parallel,
        micro_batch=options.micro_batch,
        micro_batches=options.micro_batches,
        mesh=None if options.mesh is None else parse_mesh(options.mesh),
        node=1 if options.tokens_once is None else options.tokens_once,
        recompute=cast("Running | None", options.recompute),
        offload=None if options.offload is None else parse_offload(options.offload),
    )


def _taken_over(
    sources: "Sequence[_Source]", by_hand: "tuple[Shard, ...]", graph: "OperatorGraph"
) -> "tuple[Shard, ...]":
    """Strategies from plan files. --shard has priority, and later files have priority over earlier ones."""
    from planner.strategy_search.request.shards_from import as_shards, listed_strategies

    found: dict[str, tuple[str, ...]] = {}
    for source in sources:
        try:
            found.update(listed_strategies(source.plan, source.pattern, graph))
        except RequestError as error:
            raise RequestError(f"--shard-from {source.text}: {error}") from error
    return as_shards(found, by_hand)


@dataclass(frozen=True, slots=True, kw_only=True)
class _Source:
    """A plan file to take strategies from, and the operators they are for."""

    text: str
    plan: "Plan"
    pattern: str


def _sources(texts: "Sequence[str]") -> "tuple[_Source, ...]":
    """The file and pattern of `--shard-from`: PLAN, or PLAN:PATTERN."""
    from planner.plan.file import load_plan

    found = []
    for text in texts:
        path, colon, pattern = text.rpartition(":")
        if os.path.exists(text) or not colon:
            path, pattern = text, "*"
        found.append(_Source(text=text, plan=load_plan(path), pattern=pattern))
    return tuple(found)


def _with_mesh(pinned: "Pinned", sources: "Sequence[_Source]") -> "Pinned":
    """If strategies are for a mesh with more axes than are searched, require that mesh."""
    for source in sources:
        sizes = source.plan.mesh.sizes
        if len(sizes) > SEARCHED_AXES and pinned.mesh is None and not pinned.manual:
            return replace(pinned, mesh=sizes)
    return pinned
