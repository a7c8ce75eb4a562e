"""MindSpore: the JSON of operator strategies and parameter layouts, as in `parallel_strategy` files of version 2.

    parallel_strategy_item    "MatMul_<parameter>": into how many pieces each dim of each input is cut, and the stage
    parallel_layout_item      "<parameter>": dev_matrix, the mesh; tensor_map, for each dim the axis that cuts it,
                              counted from the right, -1 for none; opt_weight_shard_size and _step, devices that shard
                              optimizer states, and their distance

Operators without weights are named by their cell and counted in it, as in files of `set_op_strategy_config`:
"Default/<module>-Cell/ReLU-op0". MindSpore completes the other operators itself (`sharding_propagation`). There the
leading dims of a product's data are one dim, and a separate operator adds a bias. The files do not state micro-batches,
schedules and recomputation: `README.md` lists them. The meaning of the files was learned from files that MindSpore 2.10
wrote.
"""

import json
import math
from collections import Counter
from collections.abc import Iterator, Mapping, Sequence
from itertools import groupby
from typing import Any

from planner.export.description import ExportError
from planner.export.files.quoting import in_markdown
from planner.export.mindspore.mindspore_files import in_cell
from planner.export.mindspore.mindspore_reading import BIAS, PRIMITIVE_OF, call_of, read
from planner.export.target import OperatorTarget
from planner.plan.binding.bind import BoundOperator, BoundPlan, stage_of_operators
from planner.plan.layout.roles import roles
from planner.plan.words import (
    expert_overlap_words,
    gradient_words,
    recomputation_words,
    replica_words,
    table_words,
    tensor_overlap_words,
)
from planner.sharding.layout import Layout
from planner.sharding.rule import Dims, pieces_of
from planner.sharding.stored import StoredParameter
from planner.sharding.update import PLAIN

_PRIMITIVES = {"matmul": "MatMul", "embedding": "Gather"}
_CALLS = {"rms_norm": "RmsNorm", "layer_norm": "LayerNorm"}


def write(bound: BoundPlan) -> Mapping[str, str]:
    """`strategy.json`, and a list of what else has to be set.

    Raises ExportError if states have owners, which a strategy file cannot express.
    """
    if bound.plan.training.update.padded:
        raise ExportError("a strategy file is about weights as the model has them; plan again without --pad")
    if bound.plan.training.update.padding_samples:
        raise ExportError("a strategy file has no samples of weight zero; plan again without --pad batch=N")
    if bound.plan.training.update.per_replica:
        raise ExportError(
            "a strategy file does not say which operators replicas compute by themselves: MindSpore is told in the"
            f" network, by add_prim_attr('cross_batch', True) of each; the plan has"
            f" {replica_words(bound.plan.training.update)}; plan again without --per-replica"
        )
    if bound.plan.training.update.moment_dtype != PLAIN.moment_dtype:
        raise ExportError(
            "a strategy file does not say in which dtype an optimizer keeps its moments, and those of MindSpore's are"
            " fp32; plan again with --moment-dtype fp32"
        )
    if bound.plan.training.update.owned:
        raise ExportError(
            "a strategy file does not say that optimizer states are shared out by whole parameters, nor that they are"
            " on parameter servers; plan again with --zero-by slices"
        )
    content = {
        "current_stage": 0,
        "parallel_layout_item": _layouts(bound),
        "parallel_strategy_item": _strategies(bound),
    }
    return {"strategy.json": json.dumps(content, separators=(",", ":")) + "\n", "README.md": _readme(bound)}


def _strategies(bound: BoundPlan) -> dict[str, Any]:
    stages, found = stage_of_operators(bound), dict[str, Any]()
    for at, operator in enumerate(bound.operators):
        for name, cuts in _rows(bound, operator):
            row = {"parallel_strategy": cuts, "stage": bound.plan.rank_of(stages[at])}
            if found.setdefault(name, row) != row:
                raise ExportError(
                    f"{name}: operators that read it have different strategies, for which MindSpore has one name;"
                    " decide them alike with --shard"
                )
    return {**found, **_without_weights(bound, stages)}


def _without_weights(bound: BoundPlan, stages: Mapping[int, int]) -> dict[str, Any]:
    """Strategies of operators that read no parameter, by their module."""
    counted, found = Counter[tuple[str, str]](), dict[str, Any]()
    for at, operator in enumerate(bound.operators):
        op, rule = operator.operator, operator.rule
        primitive = PRIMITIVE_OF.get(call_of(op))
        if primitive is None or bound.graph.parameter_names.intersection(op.operands):
            continue
        number = counted[op.module, primitive]
        counted[op.module, primitive] += 1
        name = f"Default/{op.module}-Cell/{primitive}-op{number}" if op.module else f"Default/{primitive}-op{number}"
        pieces = pieces_of(rule, operator.strategy, bound.plan.mesh.sizes)
        cuts = [_cuts(dims, pieces) for dims in rule.operands]
        if in_cell(name):
            found[name] = {"parallel_strategy": cuts, "stage": bound.plan.rank_of(stages[at])}
    return found


def _rows(bound: BoundPlan, operator: BoundOperator) -> Iterator[tuple[str, list[list[int]]]]:
    """Strategies of an operator: names, and the pieces of each dim of each input."""
    rule, operands = operator.rule, operator.operator.operands
    primitive = _PRIMITIVES.get(rule.op_class) or _CALLS.get(call_of(operator.operator))
    if primitive is None:
        return
    product = rule.op_class == "matmul"
    pieces = pieces_of(rule, operator.strategy, bound.plan.mesh.sizes)
    main = [i for i in range(len(operands)) if not product or i not in rule.addends]
    cuts = [_cuts(rule.operands[i], pieces) for i in main]
    if product:  # the leading dims of its data are one dim
        cuts[0] = _as_rows(cuts[0])
    weight = next((operands[i] for i in main if operands[i] in bound.parameters), None)
    if weight is not None:
        yield f"{primitive}_{weight}", cuts
    for i in rule.addends if product else ():
        if operands[i] in bound.parameters:
            yield f"{BIAS}_{operands[i]}", [_as_rows(_cuts(rule.results[0], pieces)), _cuts(rule.operands[i], pieces)]


def _cuts(dims: Dims, pieces: Sequence[int]) -> list[int]:
    return [math.prod(pieces[factor] for factor in factors) for factors in dims]


def _as_rows(cuts: list[int]) -> list[int]:
    *rows, columns = cuts
    return [math.prod(rows), columns]


def _layouts(bound: BoundPlan) -> dict[str, Any]:
    mesh, found = bound.plan.mesh, {}
    for name, stored in bound.parameters.items():
        shape = bound.graph.types[name].shape
        size, step = _optimizer(stored, mesh.sizes, name)
        matrix, tensor_map, extents = _map(stored.weight, mesh.sizes, shape)
        found[name] = {
            "dev_matrix": matrix,
            "field": 0,
            "opt_weight_shard_size": size,
            "opt_weight_shard_step": step,
            "tensor_map": tensor_map,
            "tensor_shape": extents,
        }
    return found


def _map(layout: Layout, sizes: Sequence[int], shape: Sequence[int]) -> tuple[list[int], list[int], list[int]]:
    """`dev_matrix`, `tensor_map` and `tensor_shape`.

    Neighbouring axes of the mesh that cut the same dim are one axis there. A dim that other axes cut too becomes
    several dims, all but the last as long as their axis has devices.
    """
    runs = [list(run) for key, run in groupby(range(len(layout)), key=lambda axis: _run_of(layout, axis))]
    matrix = [math.prod(sizes[axis] for axis in run) for run in runs]
    tensor_map, extents = list[int](), list[int]()
    for dim, extent in enumerate(shape):
        placed = [place for place, run in enumerate(runs) if layout[run[0]].is_shard and layout[run[0]].dim == dim]
        outer = [matrix[place] for place in placed[:-1]]
        tensor_map += [len(runs) - 1 - place for place in placed] or [-1]
        extents += [*outer, extent // math.prod(outer)]
    return matrix or [1], tensor_map, extents


def _run_of(layout: Layout, axis: int) -> tuple[str, int]:
    """What neighbouring axes must have in common to be written as one: the dim that they cut."""
    return ("dim", layout[axis].dim) if layout[axis].is_shard else ("axis", axis)


def _optimizer(stored: StoredParameter, sizes: Sequence[int], name: str) -> tuple[int, int]:
    """Number and distance of devices that shard the states beyond the weight; 0 and 0 if none do."""
    axes = [
        axis for axis, (weight, state) in enumerate(zip(stored.weight, stored.state, strict=True))
        if state.is_shard and not weight.is_shard
    ]  # fmt: skip
    if not axes:
        return 0, 0
    if axes != list(range(axes[0], axes[-1] + 1)):
        raise ExportError(f"parameter '{name}': axes {axes} of the mesh share out its states, which are no neighbours")
    return math.prod(sizes[axis] for axis in axes), math.prod(sizes[axes[-1] + 1 :])


def _readme(bound: BoundPlan) -> str:
    plan = bound.plan
    training = plan.training
    rows = [
        ("devices", plan.cluster.devices),
        ("pipeline_stages", plan.pipeline),
        ("micro-batches", f"{training.micro_batches} of {training.part} samples over all data parallel devices"),
        ("scheduler", f"{plan.schedule}, {plan.virtual_stages} stages on each rank"),
        ("layers of the stages", ", ".join(str(stage.blocks) for stage in plan.stages)),
        ("recomputation", recomputation_words(plan)),
        ("precision", training.precision),
        ("optimizer", training.optimizer),
        *_unusual(bound),
    ]
    lines = [f"# {in_markdown(plan.model.reference)} with MindSpore 2.10", ""]
    lines += [
        'Load `strategy.json` under `parallel_mode="semi_auto_parallel"`. Operators and parameters are called as in',
        "the plan's model; yours may be called otherwise. Start your program with",
        f"`msrun --worker_num={plan.cluster.devices} --local_worker_num=8 --master_addr=first-node --node_rank=0"
        " train.py`",
        "on each node, with its rank and its devices. The file does not say:",
        "",
    ]
    return "\n".join([*lines, *(f"- {name}: {in_markdown(str(value))}" for name, value in rows)]) + "\n"


def _unusual(bound: BoundPlan) -> Iterator[tuple[str, str]]:
    """What a plan decides beside the strategies of its operators, where it is unlike most plans."""
    plan, training = bound.plan, bound.plan.training
    found = {
        "tables": table_words(training.update),
        "gradients and updates": gradient_words(training.update).removeprefix("; "),
        "sequence slices (seq_split_num)": f"{plan.slices}" if plan.slices > 1 else "",
        "interleaved micro-batches": f"{training.interleave}" if training.interleave > 1 else "",
        "offload": roles(bound).offload.removeprefix("none"),
        "linear layers in fp8": training.fp8.text() if training.fp8 else "",
        "tensor-parallel collectives": tensor_overlap_words(training.tensor_overlap).removeprefix("none"),
        "experts": expert_overlap_words(training.expert_overlap).removeprefix("none"),
        "tokens": "sent once to each node of experts" if training.tokens_once else "",
        "axes without the all-to-all": ", ".join(axis.name for axis in plan.mesh.axes if not axis.alltoall),
        "axes in zigzag order": ", ".join(plan.mesh.axes[axis].name for axis in sorted(plan.mesh.zigzag)),
    }
    return ((name, words) for name, words in found.items() if words)


MINDSPORE = OperatorTarget(
    name="mindspore",
    about="MindSpore 2.10: strategies of operators in strategy.json",
    main="strategy.json",
    write=write,
    read=read,
)
