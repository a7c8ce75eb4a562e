"""A training job: which model is trained on which machine, and all defaults for that.

The command line, `planner.search`, imports and validation take their defaults from here. So the same words mean the
same job everywhere:

    devices         as many as the profile says that it has
    software        PyTorch, which is our runtime
    precision       bf16; fp16 on devices without matrix units for bf16; fp32 on CPUs
    sequence        the model's own length
    global batch    4 samples per device, 32 of images, 2,048 of clicks (`planner.models`); where the model computes
                    with one batch alone, the next multiple of it
"""

import logging
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from hardware_profiles import (
    PYTORCH,
    Cluster,
    Machine,
    TopologyError,
    compose,
    device_type_of,
    load_machine,
    load_software,
    parts_of,
)
from hardware_profiles.memory_intervals import peak_spread
from planner.errors import RequestError, unknown_name
from planner.graph.operator_graph import OperatorGraph
from planner.models.adapters import refuse_unread
from planner.plan.binding.machine import computing_in
from planner.plan.carried import Carried
from planner.plan.graph_cache import graph_key, keep_graph, read_graph
from planner.plan.outline import model_reference
from planner.plan.plan import PRECISIONS, ModelReference
from planner.sharding.discover import discover
from planner.sharding.fixed_batch import batch_fault
from planner.strategy_search.request.fixed_batch import with_fixed_batch
from planner.strategy_search.request.fp8_layers import with_fp8_layers
from planner.strategy_search.request.per_replica import with_replica_count
from planner.strategy_search.request.request import SearchRequest

if TYPE_CHECKING:
    from planner.models.zoo import BuiltModel

_LOG = logging.getLogger(__name__)
"""Messages for --verbose."""

SAMPLES_PER_DEVICE = 4
"""Default samples of a step per device: for sequences, and for samples of unknown kind."""

IMAGES_PER_DEVICE = 32
"""The same for images: Goyal et al. 2017 (arXiv 1706.02677), section 2."""

_IMAGES, _COLOURS = 4, 3  # dims of images, B C H W, and size of C

PRECISION = "bf16"
"""Default precision of accelerators that have matrix units for it."""

Trace = Callable[["BuiltModel"], OperatorGraph]
"""Traces a built model."""


def default_precision(cluster: Machine) -> str:
    """The default precision: bf16, on CPUs fp32, and fp16 if a device has no matrix units for bf16 (V100, Ascend
    910A)."""
    if device_type_of(cluster) == "cpu":
        return "fp32"
    peaks = [dict(part.device.peak_flops) for part in parts_of(cluster)]
    return "fp16" if any(peak.get(PRECISION, 0.0) < peak.get("fp16", 0.0) for peak in peaks) else PRECISION


def machine_from(
    profile: Machine | str, *, levels: str | None = None, software: str | None = None, devices: int | None = None
) -> Machine:
    """The machine of a profile, given by name or file, or of groups of several profiles, with `devices` in use.

    `levels` replaces the levels of the profile (`hardware_profiles.compose`), `software` is the name of a training
    stack. A machine that is passed as an object keeps its own software, with the interval of measured peaks of that
    stack if it has none.

    Raises:
        HardwareProfileError: for a profile or software that is not known.
        RequestError: for bad levels, and for any levels of several groups, which have levels of their own.
    """
    machine = profile if not isinstance(profile, str) else load_machine(profile)
    if levels is not None:
        machine = _composed(machine, levels)
    if software is not None or isinstance(profile, str):
        machine = machine.with_software(load_software(PYTORCH.name if software is None else software))
    machine = _with_interval_of_peaks(machine)
    return machine if devices is None else machine.with_devices(devices)


def _with_interval_of_peaks(machine: Machine) -> Machine:
    """The machine with the interval of measured peaks of its stack (`peak_spread`), if it was built in Python without
    one."""
    software = machine.software
    if (software.peak_low, software.peak_high) != (1.0, 1.0):
        return machine
    spread = peak_spread(software.name)
    return machine.with_software(replace(software, peak_low=spread.low, peak_high=spread.high))


def with_memory_margin(machine: Machine, margin: float) -> Machine:
    """The machine with this share of a predicted peak left free, instead of the margin from errors of measured runs.
    Raises RequestError for a share below 0 or above 1."""
    if not 0 <= margin <= 1:
        raise RequestError(f"memory_margin = {margin}: it is a share of the predicted peak, from 0 to 1")
    return machine.with_software(replace(machine.software, peak_high=1.0 + margin))


def _composed(machine: Machine, levels: str) -> Machine:
    if not isinstance(machine, Cluster):
        raise RequestError(
            f"--cluster '{levels}': of several groups of devices each has levels of its own; write them in brackets"
            " behind its profile, as in --hardware 'h100-80gb[node=8,cluster@25]:32,a100-80gb:32'"
        )
    try:
        return compose(machine, levels)
    except TopologyError as error:
        raise RequestError(f"--cluster '{levels}': {error}") from error


@dataclass(frozen=True, kw_only=True)
class Job:
    """A traced model on a machine, with nothing left open. The example inputs of the model have `batch` samples.

    Attributes:
        samples_per_device: of a step, if the user does not say.
        asked_batch: samples of a step that the user asked for.
        only_batch: why the model computes only with micro-batches of `batch` samples; None if it computes with any.
    """

    model: ModelReference
    graph: OperatorGraph
    batch: int
    cluster: Machine
    precision: str
    samples_per_device: int = SAMPLES_PER_DEVICE
    asked_batch: int | None = None
    only_batch: str | None = None

    @property
    def global_batch(self) -> int:
        """Samples of a step."""
        return self.samples_per_device * self.cluster.devices if self.asked_batch is None else self.asked_batch

    def request(self, **asked: Any) -> SearchRequest:
        """A request for plans of this job; `asked` are other fields of `SearchRequest`. If none of them says which
        linear layers are in fp8, the search decides. Raises RequestError."""
        if asked.get("fp8_layers") and not asked.get("fp8"):
            raise RequestError(f"fp8_layers: {', '.join(asked['fp8_layers'])} is to be in fp8; name a recipe (fp8)")
        request = SearchRequest(
            model=self.model,
            graph=self.graph,
            batch=self.batch,
            cluster=computing_in(self.cluster, self.precision),
            precision=self.precision,
            global_batch=self.global_batch,
            **{"fp8_layers": (), **asked},
        )
        request = with_fp8_layers(request)
        request = with_replica_count(request, self.only_batch)
        if self.only_batch is None:
            return request
        return with_fixed_batch(request, self.only_batch, given=self.asked_batch is not None)


def named_job(
    name: str,
    cluster: Machine,
    trace: Trace,
    *,
    sequence_length: int | None = None,
    precision: str | None = None,
    global_batch: int | None = None,
    rule_cache: Path | None = None,
    graph_cache: Path | None = None,
    noted: Callable[[str], None] = lambda _: None,
) -> Job:
    """The job of a named model: of the zoo, of a configuration, or of a factory.

    Args:
        trace: traces the built model.
        graph_cache: a folder that keeps traced graphs (`planner.plan.graph_cache`).
        rule_cache: see `discover`, which finds rules for operators that have none and reports through `noted` what the
            user must know about them.
        noted: also gets what of a `config.json` is not in its model.

    Raises ModelError if the model cannot be built or traced, RuleError if an operator cannot get a rule.
    """
    precision = default_precision(cluster) if precision is None else _known(precision)
    with_rules: list[OperatorGraph] = []

    def ruled(graph: OperatorGraph) -> OperatorGraph:
        with_rules.append(discover(graph, rule_cache, noted))
        return with_rules[-1]

    found = traced_named(name, trace, PRECISIONS[precision], sequence_length, graph_cache, ruled, noted)
    graph = with_rules[0] if with_rules else ruled(found.graph)
    return Job(
        model=model_reference(graph, name=name, sequence_length=found.sequence_length, batch=found.batch),
        graph=graph,
        batch=found.batch,
        cluster=cluster,
        precision=precision,
        samples_per_device=samples_per_device(graph, found.batch, name),
        asked_batch=global_batch,
        only_batch=found.only_batch,
    )


def traced_named(
    name: str,
    trace: Trace,
    dtype: str,
    sequence_length: int | None,
    cache: Path | None,
    ruled: Callable[[OperatorGraph], OperatorGraph] | None = None,
    noted: Callable[[str], None] = lambda _: None,
) -> Carried:
    """The graph of a named model: from the cache, or traced and, where possible, kept. A model that is not ours is
    traced at a second batch, too, if `ruled` gives its operators rules; without `ruled` it is not kept."""
    from planner.models.zoo import build_model, is_of_zoo

    key = None if cache is None else graph_key(name, dtype=dtype, sequence_length=sequence_length)
    kept = None if cache is None or key is None else read_graph(cache, key)
    if kept is not None:
        _tell(kept.notes, noted)
        return kept
    built = build_model(name, dtype=dtype, sequence_length=sequence_length)
    _tell(built.notes, noted)
    graph, fault = trace(built), None
    refuse_unread(graph.consumers.keys(), [n for n, one in built.module.named_parameters() if one.requires_grad])
    if not (is_of_zoo(name) or _is_ours(built.module)):
        key = None if ruled is None else key
        fault = ruled and _batch_fault(built, ruled(graph), trace)
    traced = Carried(
        graph=graph, batch=built.batch, sequence_length=built.sequence_length, only_batch=fault, notes=built.notes
    )
    if cache is not None and key is not None and (why := keep_graph(cache, key, traced)):
        _LOG.info("the graph of %s is not kept: %s", name, why)
    return traced


def _tell(notes: tuple[str, ...], noted: Callable[[str], None]) -> None:
    for note in notes:
        noted(note)


def given_job(
    model: Any,
    cluster: Machine,
    *,
    args: tuple[Any, ...] = (),
    kwargs: Mapping[str, Any] | None = None,
    batch: int | None = None,
    precision: str | None = None,
    global_batch: int | None = None,
    rule_cache: Path | None = None,
    noted: Callable[[str], None] = lambda _: None,
) -> Job:
    """The job of a torch module with example inputs, or of a traced graph; see `planner.search`."""
    from planner.graph.trace import trace
    from planner.graph.tracing.examples import with_samples
    from planner.graph.tracing.on_meta import on_meta

    fault, words = None, dict(kwargs or {})
    if isinstance(model, OperatorGraph):
        if batch is None:
            raise RequestError("batch: say how many samples the example inputs of the traced graph have")
        graph, name = discover(model, rule_cache, noted), "graph"
    else:
        module, name = on_meta(model), type(model).__name__
        samples = batch = _samples(args, words) if batch is None else batch
        graph = discover(trace(module, args, words), rule_cache, noted)
        fault = batch_fault(graph, batch, lambda n: trace(module, *with_samples((args, words), samples, n)))
    return Job(
        model=model_reference(graph, name=name, sequence_length=None, batch=batch),
        graph=graph,
        batch=batch,
        cluster=cluster,
        precision=default_precision(cluster) if precision is None else _known(precision),
        samples_per_device=samples_per_device(graph, batch),
        asked_batch=global_batch,
        only_batch=fault,
    )


def samples_per_device(graph: OperatorGraph, batch: int, name: str | None = None) -> int:
    """Default samples of a step per device: those of the zoo for a model with that name, or those for the kind of its
    samples."""
    from planner.models.zoo import is_of_zoo, zoo_entry

    said = zoo_entry(name).samples_per_device if name is not None and is_of_zoo(name) else None
    if said is not None:
        return said
    shapes = [graph.types[name].shape for name in graph.batched_inputs(batch) if graph.types[name].floating]
    images = any(len(shape) == _IMAGES and shape[1] == _COLOURS for shape in shapes)
    return IMAGES_PER_DEVICE if images else SAMPLES_PER_DEVICE


def _known(precision: str) -> str:
    if precision not in PRECISIONS:
        raise RequestError(unknown_name("precision", precision, PRECISIONS))
    return precision


def _samples(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> int:
    """The first dim of the first tensor of the example."""
    tensors = [value for value in (*args, *kwargs.values()) if getattr(value, "ndim", 0)]
    if not tensors:
        raise RequestError("args: give example inputs with a batch dim, or say how many samples they have: batch")
    return int(tensors[0].shape[0])


def _is_ours(module: Any) -> bool:
    """Whether a module is a model of the zoo. Some configurations are built as such models."""
    return type(module).__module__.startswith("planner.models.")


def _batch_fault(model: "BuiltModel", graph: OperatorGraph, trace: Trace) -> str | None:
    """See `batch_fault`. Similar blocks were compared when `graph` was traced. They are compared again, in another
    trace, only if the second trace shows a fault: blocks that are not alike would be such a fault."""
    fault = batch_fault(graph, model.batch, lambda n: trace(_with_samples(model, n, compared=True)))
    return fault and batch_fault(graph, model.batch, lambda n: trace(_with_samples(model, n, compared=False)))


def _with_samples(model: "BuiltModel", samples: int, *, compared: bool) -> "BuiltModel":
    from planner.graph.tracing.examples import with_samples

    args, kwargs = with_samples((model.args, dict(model.kwargs)), model.batch, samples)
    return replace(model, args=args, kwargs=kwargs, batch=samples, compared=compared)
