"""The machine-readable results of `--json`, documented in docs/json.md. Seconds and bytes are plain numbers."""

import math
import sys
from collections.abc import Mapping
from dataclasses import asdict
from typing import TYPE_CHECKING, Any

from planner.cli.answer import Answer
from planner.cli.errors import OUTPUT_SCHEMA_VERSION
from planner.plan.layout.group_runs import group_runs
from planner.sharding.update import update_words

if TYPE_CHECKING:
    from planner.plan.compare.explanation import Explanation
    from planner.plan.layout.rank_view import RankView
    from planner.plan.layout.roles import Roles
    from planner.plan.plan import Plan, Prediction
    from planner.strategy_search.finalists.settle import Certificate
    from planner.strategy_search.result import SearchResult


def write_json(command: str, content: Mapping[str, Any]) -> None:
    """Print the answer of a command, one object on stdout, in the form defined in `planner.cli.schemas`."""
    from planner.cli.schemas import answer_text

    sys.stdout.write(answer_text(command, content) + "\n")


def answer_content(answer: Answer) -> dict[str, Any]:
    """The result of a search."""
    from planner.plan.binding.discovered import discovered

    best, found = answer.shown[0].plan, answer.roles[0]
    content = plan_content(best, found, best.prediction)
    content["objective"] = answer.request.objective
    content["search"] = _search(answer)
    content["plans"] = _plans(answer)
    content["explanation"] = None if answer.explanation is None else explanation_content(answer.explanation)
    if ways := answer.found.best.contexts:
        content["contexts"] = [{k: _finite(v) for k, v in asdict(way).items()} for way in ways]
    if near := answer.found.best.neighbours:
        content["neighbours"] = [asdict(one) for one in near]
    if by_trial := discovered(answer.shown[0].bound):
        content["discovered"] = [asdict(each) for each in by_trial]
    if answer.engine is not None:
        content["engine"] = answer.engine.content()
    if answer.choices:
        content["choices"] = [{"name": name, "value": value, "why": why} for name, value, why in answer.choices]
    content["plan_file"] = str(answer.files[0]) if answer.files else None
    return content


def _finite(value: float | None) -> float | None:
    """The number, or None if it is infinite or unknown: degrees are None if every operator splits freely, seconds and
    bytes infinite if unknown."""
    return value if value is not None and math.isfinite(value) else None


def plan_content(plan: "Plan", found: "Roles", prediction: "Prediction") -> dict[str, Any]:
    """A plan and what it costs."""
    length = plan.model.sequence_length
    return {
        "schema_version": OUTPUT_SCHEMA_VERSION,
        "model": plan.model.reference,
        "parameters": plan.model.parameters,
        "hardware": plan.cluster.profile,
        "cluster": plan.cluster.composition or None,
        "software": plan.cluster.software,
        "devices": plan.cluster.devices,
        "groups": [asdict(run) for run in group_runs(plan)] or None,
        "sequence_length": length,
        "global_batch": plan.training.global_batch,
        "precision": plan.training.precision,
        "optimizer": plan.training.optimizer,
        "update": update_words(plan.training.update),
        "step_seconds": prediction.step_seconds,
        "objective_seconds": prediction.objective_seconds,
        "low_seconds": prediction.low_seconds,
        "high_seconds": prediction.high_seconds,
        "peak_bytes": prediction.peak_bytes,
        "high_peak_bytes": prediction.high_peak_bytes,
        "capacity_bytes": prediction.capacity_bytes,
        "tokens_per_second_per_device": prediction.samples_per_second * length / plan.cluster.devices
        if length
        else None,
        "samples_per_second": prediction.samples_per_second,
        "model_flops_utilisation": prediction.model_flops_utilisation,
        **_choices(plan, found),
        "mesh": [{"axis": axis.axis, "size": axis.size, "role": axis.role} for axis in found.axes],
        "time_seconds": dict(prediction.time),
        "memory_bytes": dict(prediction.memory),
        "offloaded_bytes": dict(prediction.offloaded),
    }


def rank_content(view: "RankView", plan: "Plan") -> dict[str, Any]:
    """The parts that one rank of a plan holds."""
    return {
        "schema_version": OUTPUT_SCHEMA_VERSION,
        "rank": view.rank,
        "devices": plan.cluster.devices,
        "pipeline_rank": view.pipeline_rank,
        "coordinate": dict(zip(plan.mesh.names, view.coordinate, strict=True)),
        "stages": [{"stage": number, "first_block": first, "blocks": blocks} for number, first, blocks in view.stages],
        "peers": [asdict(peers) for peers in view.peers],
        "inputs": [asdict(one) for one in view.inputs],
        "parameters": [asdict(one) for one in view.parameters],
    }


def _choices(plan: "Plan", found: "Roles") -> dict[str, Any]:
    """The decisions of a plan, in the usual words."""
    return {
        "degrees": {
            "data": found.data,
            "tensor": found.tensor,
            "context": found.context,
            "expert": found.expert,
            "pipeline": found.pipeline,
            "replicated": found.replicated,
        },
        "virtual_stages": plan.virtual_stages,
        "schedule": plan.schedule,
        "slices": plan.slices,
        "interleave": plan.training.interleave,
        "tensor_overlap": {name: list(chunks) for name, *chunks in plan.training.tensor_overlap},
        "expert_overlap": dict(plan.training.expert_overlap),
        "sequence_parallel": found.sequence_parallel,
        "optimizer_sharding": found.zero,
        "micro_batches": plan.training.micro_batches,
        "recomputation": found.recomputation,
        "offload": found.offload,
    }


def _search(answer: Answer) -> dict[str, Any]:
    result, request = answer.result, answer.request
    statistics = result.statistics
    return {
        "algorithm": request.algorithm,
        "status": result.status,
        "gap": result.gap,
        "bound_seconds": result.bound_seconds,
        "usual_gap": None if result.apart is None else result.apart[1],
        "less_known": None if result.apart is None else result.apart[0],
        "assumed": list(result.assumed),
        "covered": result.covered,
        "configurations": statistics.configurations,
        "evaluated": statistics.evaluated,
        "solved": statistics.solved,
        "search_seconds": statistics.seconds,
        "total_seconds": answer.seconds,
        "placements": result.placements,
        "stopped": answer.found.stopped_by is not None,
        "stopped_by": answer.found.stopped_by,
        "certificate": _certificate(answer.shown[0].certificate),
        "simpler": _simpler(result),
    }


def _simpler(result: "SearchResult") -> dict[str, Any] | None:
    """Why the plan is not the fastest one found; None if it is."""
    simpler = result.simpler
    if simpler is None:
        return None
    return {
        "fastest_step_seconds": simpler.fastest.seconds,
        "fastest_objective_seconds": simpler.fastest.objective,
        "slower": result.slower,
        "decisions": list(simpler.decisions),
        "fastest_decisions": list(simpler.fastest_decisions),
    }


def _certificate(found: "Certificate | None") -> dict[str, Any] | None:
    if found is None:
        return None
    names = ("solver", "status", "busy_seconds", "bound_seconds", "gap", "variables", "seconds")
    return {name: getattr(found, name) for name in names}


def _plans(answer: Answer) -> list[dict[str, Any]]:
    files = dict(enumerate(answer.files))
    return [
        {
            "step_seconds": ranked.seconds,
            "objective_seconds": ranked.objective,
            "peak_bytes": ranked.plan.prediction.peak_bytes,
            "gap": answer.found.results[at].gap if answer.options.pareto else None,
            "devices": ranked.plan.cluster.devices,
            "mesh": list(ranked.plan.mesh.sizes),
            **_choices(ranked.plan, found),
            "plan_file": str(files[at]) if at in files else None,
        }
        for at, (ranked, found) in enumerate(zip(answer.shown, answer.roles, strict=True))
    ]


def explanation_content(found: "Explanation") -> dict[str, Any]:
    """Why a plan costs what it costs."""
    other = found.next_best
    return {
        "seconds": dict(found.shares),
        "memory_binds": found.memory_binds,
        "seconds_per_byte": found.memory_price,
        "free_bytes": found.free_bytes,
        "slowest_rank": found.slowest,
        "fullest_rank": found.fullest,
        "next_best": None
        if other is None
        else {
            "step_seconds": other.step_seconds,
            "peak_bytes": other.peak_bytes,
            "differences": {name: {"best": here, "next": there} for name, here, there in other.differences},
        },
    }
