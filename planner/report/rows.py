"""The rows (name and text) that every report of a plan has, on a terminal and on a page."""

from planner.graph.fp8 import Fp8
from planner.plan.layout.group_runs import group_runs
from planner.plan.layout.roles import Roles
from planner.plan.plan import Plan, Prediction
from planner.plan.words import (
    applied_update,
    expert_overlap_words,
    gradient_words,
    recomputation_words,
    table_words,
    tensor_overlap_words,
)
from planner.report.units import bytes_text, count_text, digits_text, percent_text, seconds_text

Rows = tuple[tuple[str, str], ...]

_LONG = 160
"""Length of a list of kept operators above which blocks are only counted."""

_TOLD = 0.05
"""Minimum share of the parameters for which another ZeRO stage than that of most is reported."""


def job_text(plan: Plan) -> tuple[str, str]:
    """The job: model, machine and training step: `llama70b (70.6B parameters) on 64 x h100-80gb`."""
    model, training = plan.model, plan.training
    length = f", {model.sequence_length} tokens each" if model.sequence_length else ""
    parameters = f"{count_text(model.parameters)} parameters"
    job = f"{model.reference} ({parameters}) on {plan.cluster.devices} x {plan.cluster.machine}"
    precision = training.precision + _products(training.fp8)
    trains = training.optimizer if plan.schedule_kind.trains else "forward only"
    added = training.update.padding_samples
    batch = f"{training.global_batch}" + (f" padded to {training.padded_batch}" if added else "")
    step = f"global batch {batch}{length}; {precision}, {trains}"
    return job, step + gradient_words(applied_update(plan))


def _products(fp8: Fp8) -> str:
    return f" with linear layers in fp8 ({fp8.text()})" if fp8 else ""


def degree_rows(plan: Plan, roles: Roles) -> Rows:
    """The decisions of a plan."""
    rows = [("degrees", _degrees(roles)), *_experts(plan, roles)]
    if roles.replicated > 1:
        alike = roles.replicated
        rows.append(("", f"every {alike} devices do the same work: 1/{alike} of the devices would be as fast"))
    rows.append(("mesh of a stage", " x ".join(f"{axis.axis} {axis.size}" for axis in roles.axes) or "one device"))
    rows += [(f"  {axis.axis}", f"{axis.role}: splits {axis.detail}") for axis in roles.axes]
    if roles.tensor > 1:
        rows.append(("sequence parallel", "yes" if roles.sequence_parallel else "no"))
    if plan.training.tensor_overlap:
        rows.append(("tensor overlap", tensor_overlap_words(plan.training.tensor_overlap)))
    if plan.training.expert_overlap:
        rows.append(("expert overlap", expert_overlap_words(plan.training.expert_overlap)))
    replicas = f", in {roles.replicas} replicas" if roles.replicas > 1 else ""
    if plan.schedule_kind.trains:
        rows.append(("optimizer sharding", _optimizer_sharding(roles)))
    else:
        rows.append(("weights", f"gathered for use{replicas}" if roles.zero != "off" else "as they are used"))
    together = f", {plan.training.interleave} interleaved" if plan.training.interleave > 1 else ""
    samples = f"{plan.training.part} sample{'s' if plan.training.part != 1 else ''}"
    rows.append(("micro-batches", f"{plan.training.micro_batches} of {samples}{together}"))
    if roles.pipeline > 1:
        blocks = ", ".join(map(str, sorted({stage.blocks for stage in plan.stages})))
        virtual = f", {plan.virtual_stages} stages a device" if plan.virtual_stages > 1 else ""
        slices = f", the sequence in {plan.slices} slices" if plan.slices > 1 else ""
        groups = _groups(plan)
        a_stage = f"{blocks} blocks a stage" if not groups else "stages sized to their devices"
        rows += [("pipeline", f"{plan.schedule}, {a_stage}{virtual}{slices}"), *groups]
    if plan.schedule_kind.trains:
        rows.append(("recomputation", _recomputation(plan, roles)))
    if tables := table_words(plan.training.update):
        rows.append(("tables", tables))
    if roles.offload != "none":
        rows.append(("offload", roles.offload))
    return tuple(rows)


def _recomputation(plan: Plan, roles: Roles) -> str:
    """What recomputed blocks keep; or, if that is too long, how many blocks are recomputed."""
    return roles.recomputation if len(roles.recomputation) <= _LONG else recomputation_words(plan)


def _optimizer_sharding(roles: Roles) -> str:
    """The ZeRO stage of the parameters; with shares, if there are several stages."""
    replicas = f", in {roles.replicas} replicas" if roles.replicas > 1 else ""

    def words(zero: str) -> str:
        called = (", HSDP" if replicas else ", FSDP") if zero.startswith("3") else ""
        return f"ZeRO {zero}{replicas}{called}" if zero != "off" else "off"

    several = [(zero, share) for zero, share in roles.zero_shares if share >= _TOLD]
    if len(several) < 2:
        nothing = roles.zero == "off" and roles.data * roles.context * roles.replicated == 1
        return "off: nothing to shard without data parallelism" if nothing else words(roles.zero)
    return "; ".join(f"{words(zero)} for {share:.0%} of the parameters" for zero, share in several)


def _groups(plan: Plan) -> Rows:
    """Which stages are on which devices, if there are several kinds of devices."""
    return tuple(
        (
            "" if number else "devices",
            f"{span_text(run.first_stage, run.stages, 'stage')} on {run.group}, "
            f"{span_text(run.first_device, run.devices, 'rank')}: {', '.join(map(str, run.blocks))} blocks",
        )
        for number, run in enumerate(group_runs(plan))
    )


def span_text(first: int, count: int, what: str) -> str:
    """`stage 3`, `stages 0 to 3`."""
    return f"{what} {first}" if count == 1 else f"{what}s {first} to {first + count - 1}"


def _degrees(roles: Roles) -> str:
    degrees = f"data {roles.data} x tensor {roles.tensor} x context {roles.context} x pipeline {roles.pipeline}"
    return degrees + (f" x replicated {roles.replicated}" if roles.replicated > 1 else "")


def _experts(plan: Plan, roles: Roles) -> Rows:
    if roles.expert == 1:
        return ()
    once = ("", "each token is sent once to each part of the outer expert axis")
    tensor = " x tensor" if any(axis.experts and axis.role == "tensor" for axis in roles.axes) else ""
    return (
        ("", f"expert {roles.expert}, divides data x context{tensor}"),
        *([once] if plan.training.tokens_once else []),
        ("expert load", f"maximum {plan.training.imbalance:g} times the mean"),
    )


def margin_text(prediction: Prediction) -> str:
    """The memory margin for the error of the predicted peak, and its sum with the peak."""
    high = prediction.peak_bytes if prediction.high_peak_bytes is None else prediction.high_peak_bytes
    kept = high - prediction.peak_bytes
    whole = f"{bytes_text(high)} of {bytes_text(prediction.capacity_bytes)}"
    over = "" if high <= prediction.capacity_bytes * (1 + 1e-9) else ", more than the device has"
    return f"{bytes_text(kept)} ({percent_text(kept / prediction.peak_bytes)}); with the peak {whole}{over}"


def tiles_of(rows: Rows) -> tuple[tuple[str, str, str], ...]:
    """Figures for a page: the name, the value, and what stands behind the value in smaller letters."""
    return tuple((name, *_value_and_rest(text)) for name, text in rows)


def _value_and_rest(text: str) -> tuple[str, str]:
    """`72.7 GiB` and `of 79.1 GiB (91.9%)`; `1,868 days` and `1,500 to 2,100` of such a number with an interval."""
    value, sign, rest = text.partition("; ")
    if not sign:
        value, sign, rest = text.partition(" of ")
        rest = f"of {rest}" if sign else ""
    if not sign and text.endswith(")"):
        value, _, rest = text[:-1].partition(" (")
    return value, rest


def figure_rows(plan: Plan, prediction: Prediction) -> Rows:
    """The cost of a plan, in the figures that people compare."""
    rows = [("step time", seconds_text(prediction.step_seconds))]
    if prediction.low_seconds is not None and prediction.high_seconds is not None:
        ends = f"{seconds_text(prediction.low_seconds)} to {seconds_text(prediction.high_seconds)}"
        rows.append(("80% interval", ends))
    devices = plan.cluster.devices
    if plan.model.sequence_length:
        tokens = prediction.samples_per_second * plan.model.sequence_length / devices
        rows.append(("tokens/s per device", f"{tokens:,.0f}"))
    else:
        rows.append(("samples/s per device", digits_text(prediction.samples_per_second / devices)))
    rows.append(("model FLOPs utilisation", percent_text(prediction.model_flops_utilisation)))
    share = prediction.peak_bytes / prediction.capacity_bytes
    peak = f"{bytes_text(prediction.peak_bytes)} of {bytes_text(prediction.capacity_bytes)} ({percent_text(share)})"
    fullest = next((one for one in group_runs(plan) if prediction.peak_bytes in one.peaks(prediction)), None)
    where = "" if fullest is None else f", on {fullest.group}"
    outside = tuple((f"kept on the {home}", bytes_text(nbytes)) for home, nbytes in prediction.offloaded)
    high = prediction.high_peak_bytes
    margin = () if high is None or high <= prediction.peak_bytes else (("memory margin", margin_text(prediction)),)
    return (*rows, ("peak memory", peak + where), *margin, *outside)
