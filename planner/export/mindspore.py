"""MindSpore: the JSON of operator strategies and parameter layouts, as `parallel_strategy` files of version 2 have it.

    parallel_strategy_item    "MatMul_<parameter>": into how many pieces each dim of each input is cut, and the stage
    parallel_layout_item      "<parameter>": dev_matrix, the mesh; tensor_map, for each dim the axis that cuts it,
                              counted from the right, -1 for none; opt_weight_shard_size and _step, devices that share
                              out what the optimizer keeps, and how far they stand apart

MindSpore completes the strategies of what has no weight by itself (`sharding_propagation`). Leading dims of a product's
data are one dim there. The files say nothing of micro-batches, schedules and recomputation: `README.md` lists them.
What the files mean was read from files that MindSpore 2.10 wrote.
"""

import json
import math
from collections.abc import Mapping, Sequence
from typing import Any

from planner.export.description import ExportError
from planner.export.target import OperatorTarget
from planner.plan.bind import BoundOperator, BoundPlan, stage_of_operators
from planner.plan.words import recomputation_words, table_words
from planner.sharding.layout import Layout
from planner.sharding.rule import pieces_of
from planner.sharding.stored import StoredParameter

_PRIMITIVES = {"matmul": "MatMul", "embedding": "Gather"}
_NORMS = {"rms_norm": "RmsNorm", "layer_norm": "LayerNorm"}


def write(bound: BoundPlan) -> Mapping[str, str]:
    """`strategy.json`, and what else has to be set."""
    content = {
        "current_stage": 0,
        "parallel_layout_item": _layouts(bound),
        "parallel_strategy_item": _strategies(bound),
    }
    return {"strategy.json": json.dumps(content, separators=(",", ":")) + "\n", "README.md": _readme(bound)}


def _strategies(bound: BoundPlan) -> dict[str, Any]:
    stages, found = stage_of_operators(bound), {}
    for at, operator in enumerate(bound.operators):
        weights = [i for i, name in enumerate(operator.operator.operands) if name in bound.parameters]
        primitive = _PRIMITIVES.get(operator.rule.op_class) or _NORMS.get(_call(operator))
        if not weights or primitive is None:
            continue
        name = f"{primitive}_{operator.operator.operands[weights[0]]}"
        stage = stages[at] % bound.plan.pipeline
        found[name] = {"parallel_strategy": _cuts(bound, operator), "stage": stage}
    return found


def _call(operator: BoundOperator) -> str:
    """The name of a call without its number: `rms_norm` of `norm/rms_norm_2`."""
    return operator.operator.name.rpartition("/")[2].rstrip("0123456789").rstrip("_")


def _cuts(bound: BoundPlan, operator: BoundOperator) -> list[list[int]]:
    """Pieces of each dim of each input; of a product's data, of its rows and its columns."""
    pieces = pieces_of(operator.rule, operator.strategy, bound.plan.mesh.sizes)
    found = [[math.prod(pieces[factor] for factor in factors) for factors in dims] for dims in operator.rule.operands]
    if operator.rule.op_class == "matmul":
        *rows, columns = found[0]
        found[0] = [math.prod(rows), columns]
    return found


def _layouts(bound: BoundPlan) -> dict[str, Any]:
    mesh, found = bound.plan.mesh, {}
    for name, stored in bound.parameters.items():
        shape = bound.graph.types[name].shape
        size, step = _optimizer(stored, mesh.sizes, name)
        found[name] = {
            "dev_matrix": list(mesh.sizes) or [1],
            "field": 0,
            "opt_weight_shard_size": size,
            "opt_weight_shard_step": step,
            "tensor_map": _map(stored.weight, len(shape), name),
            "tensor_shape": list(shape),
        }
    return found


def _map(layout: Layout, dims: int, name: str) -> list[int]:
    found = [-1] * dims
    for axis, placement in enumerate(layout):
        if placement.is_shard:
            if found[placement.dim] != -1:
                raise ExportError(
                    f"parameter '{name}': two axes of the mesh cut its dim {placement.dim}, which a tensor_map cannot"
                    " say; plan again with degrees by hand"
                )
            found[placement.dim] = len(layout) - 1 - axis
    return found


def _optimizer(stored: StoredParameter, sizes: Sequence[int], name: str) -> tuple[int, int]:
    """Devices that share out the states beyond the weight, and how far they stand apart; 0 and 0 where none do."""
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
    ]
    if tables := table_words(training.update):
        rows.append(("tables", tables))
    lines = [f"# {plan.model.reference} with MindSpore 2.10", ""]
    lines += [
        'Load `strategy.json` under `parallel_mode="semi_auto_parallel"`. Operators and parameters are called as in',
        "the plan's model; yours may be called otherwise. The file does not say:",
        "",
    ]
    return "\n".join([*lines, *(f"- {name}: {value}" for name, value in rows)]) + "\n"


MINDSPORE = OperatorTarget(
    name="mindspore", about="MindSpore 2.10: strategies of operators in strategy.json", write=write
)
