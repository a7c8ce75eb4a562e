"""What a plan may say about the graph that it is bound to: its stages, operators, parameters, inputs and groups.

Rules that requests must follow too stand beside the plan (`planner.plan.schedule_checks`,
`planner.plan.offload_checks`).
"""

from collections.abc import Mapping

from planner.errors import LayoutError, PlanFileError, StrategyError, unknown_name
from planner.faults import assigned, said
from planner.graph.blocks import Blocks
from planner.graph.operator_graph import ROWS_FROM, Operator, OperatorGraph
from planner.graph.part_names import parameter_matches
from planner.plan.offload_checks import offload_fault, saved_fault, served_fault
from planner.plan.plan import RECOMPUTATION, Group, Plan
from planner.plan.refusing import refuse_plan
from planner.plan.schedule_checks import gathers_fault, ring_fault
from planner.pricing.keeping import keeping_fault
from planner.sharding.layout import PARTIAL, Layout, divides, format_layout
from planner.sharding.mesh import Mesh
from planner.sharding.rule import Rule, Strategy, ring_axis
from planner.sharding.stored import StoredParameter, own_copies, stored_fault
from planner.sharding.update import local_fault
from planner.sharding.zigzag import Sequences, check_parameter, order_fault, tensors_of


def check_stages(plan: Plan, blocks: Blocks) -> None:
    """Stages must hold all blocks, one after the other. If there are several, each holds at least one block.
    Exceptions: the first may hold only what comes before the blocks (the embedding), the last only what follows them
    (the head and the loss)."""
    following, ends = 0, (0, len(plan.stages) - 1)
    for index, stage in enumerate(plan.stages):
        if stage.first_block != following:
            before = f"the stages before it hold {following} blocks" if index else "the first stage starts at block 0"
            raise PlanFileError(
                f"stages.{index}: starts at block {stage.first_block}, but {before}; set its first_block to {following}"
            )
        if not stage.blocks and len(plan.stages) > 1 and index not in ends:
            raise PlanFileError(
                f"stages.{index}: holds no block, as only the first and the last may; give it one, or leave it out"
            )
        following += stage.blocks
    if following != blocks.count:
        raise PlanFileError(f"stages: they hold {following} blocks, the model has {blocks.count}")


def check_look_ups(plan: Plan, graph: OperatorGraph, blocks: Blocks) -> None:
    """Only the first stage looks up rows of tables that are outside of the devices, and it gets them by an
    all-to-all."""
    if plan.training.update.placed and not plan.mesh.alltoall:
        raise PlanFileError(
            f"training.placed: rows of '{plan.training.update.placed[0][0]}' are exchanged by an all-to-all, which an"
            " axis of the mesh lacks; leave the table on the devices"
        )
    first = blocks.borders[plan.stages[0].blocks] if blocks.count else len(graph.operators)
    for op in graph.operators[first:] if len(plan.stages) > 1 else ():
        if op.op in ROWS_FROM.values():
            raise PlanFileError(
                f"training.placed: operator '{op.name}' gets rows of table '{dict(op.keywords)['table']}' outside of"
                " the first stage; make it one stage, or leave the table on the devices"
            )


def check_interleave(plan: Plan, graph: OperatorGraph) -> None:
    """Interleaved micro-batches read nothing that another of them changes, and gather their weights one by one."""
    interleave = plan.training.interleave
    refuse_plan(gathers_fault(plan.training.update, interleave))
    if interleave > 1 and graph.updates:
        buffer = graph.updates[0][0]
        raise PlanFileError(
            f"training.interleave: {interleave} micro-batches at a time would all read buffer '{buffer}' as it was"
            " before them, which each of them changes; set interleave to 1 for this model"
        )


def check_forward_only(plan: Plan) -> None:
    """Nothing is kept for a backward pass where there is none."""
    if plan.schedule_kind.trains:
        return
    for group in plan.groups:
        if group.recomputation != "none" or group.activations_home != "device":
            raise PlanFileError(
                f"schedule: '{plan.schedule}' has no backward pass, for which group '{group.name}' would recompute or"
                " offload activations; set its recomputation to 'none' and its activations_home to 'device'"
            )


def check_order_of_slices(plan: Plan) -> None:
    """Slices of a sequence follow each other, so no axis may cut the sequence in zigzag order."""
    if plan.slices > 1 and plan.mesh.zigzag:
        names = ", ".join(plan.mesh.axes[axis].name for axis in sorted(plan.mesh.zigzag))
        raise PlanFileError(f"slices: {plan.slices}, but {names} cut the sequence in zigzag order; set slices to 1")


def check_operator(plan: Plan, op: Operator, rule: Rule, strategy: Strategy, sequences: Sequences) -> None:
    """Raise StrategyError where a legal strategy is impossible with the slices of the plan, or on its axes in zigzag
    order."""
    axis = ring_axis(rule, strategy, plan.mesh.sizes)
    fault = None if axis is None else ring_fault(plan.slices, f"a ring on {plan.mesh.axes[axis].name}")
    if fault is not None:
        raise StrategyError(f"operator '{op.name}': {said(fault, assigned)}")
    if not plan.mesh.zigzag:
        return
    fault = order_fault(rule, strategy, plan.mesh, tensors_of(rule, op.operands, op.results, sequences))
    if fault is not None:
        raise StrategyError(f"operator '{op.name}' ({rule.format()}): {fault}")


def check_inputs(plan: Plan, graph: OperatorGraph) -> None:
    """Every input has a layout, and is whole or cut."""
    inputs = dict(plan.inputs)
    for name in graph.inputs:
        if name not in inputs:
            raise PlanFileError(
                f"inputs: no layout for input '{name}'; the model has the inputs {', '.join(graph.inputs)}"
            )
        _check_layout(plan.mesh, graph, f"inputs['{name}']", name, inputs[name])
        if PARTIAL in inputs[name]:
            raise LayoutError(
                f"inputs['{name}']: an input is whole or cut, not partial as in {format_layout(inputs[name])}"
            )
    for name in inputs:
        if name not in graph.inputs:
            raise PlanFileError(f"inputs: {unknown_name('input', name, graph.inputs)}")


def check_recomputation(group: Group, place: str) -> None:
    """Only blocks are recomputed, and they keep operators where recomputation is selective."""
    if not group.blocks and (group.recomputation != "none" or group.kept):
        raise PlanFileError(f"{place}: only blocks are recomputed; set its recomputation to 'none'")
    if group.recomputation not in RECOMPUTATION:
        raise PlanFileError(f"{place}: recomputation '{group.recomputation}' is not one of {', '.join(RECOMPUTATION)}")
    if group.recomputation == "selective" and not group.kept:
        raise PlanFileError(f"{place}: 'selective' keeps no operator; name some in kept, or recompute 'full'")
    if group.recomputation != "selective" and group.kept:
        raise PlanFileError(
            f"{place}: keeps '{group.kept[0]}' under recomputation '{group.recomputation}'; that takes 'selective'"
        )


def check_kept(rule: Rule, name: str, place: str) -> None:
    """Raise PlanFileError where the results of an operator cannot be kept."""
    fault = keeping_fault(rule)
    if fault is not None:
        raise PlanFileError(f"{place}: operator '{name}' cannot be kept: {fault}; take it out of kept")


def check_offloaded_group(plan: Plan, group: Group) -> None:
    """Raise PlanFileError where a group cannot offload activations."""
    home, place = group.activations_home, f"group '{group.name}'"
    if not group.blocks:
        raise PlanFileError(
            f"{place}: keeps activations on the {home}, which is for blocks; set activations_home to device"
        )
    saved = None if group.recomputation != "none" else saved_fault(plan.training.update, sliced=plan.slices > 1)
    if saved is not None:
        raise PlanFileError(
            f"{place}: keeps what it saves on the {home}, but {saved.reason}; recompute its blocks, or set"
            " activations_home to device"
        )
    fault = offload_fault("", plan.schedule)
    if fault is not None:
        raise PlanFileError(
            f"{place}: keeps activations on the {home}, but {fault.reason}; set activations_home to device"
        )


def check_kinds(blocks: Blocks, group: Group, place: str) -> None:
    """The blocks of a group are of one kind."""
    for block in range(group.first_block, group.first_block + group.blocks):
        if blocks.kinds[block] != blocks.kinds[group.first_block]:
            raise PlanFileError(
                f"{place}: block {block} is of another kind than block {group.first_block}, so that one strategy cannot"
                f" stand for both; end the group at block {block - 1}, and begin another one"
            )


def check_parameters(
    plan: Plan, graph: OperatorGraph, blocks: Blocks, sequences: Sequences, stored: Mapping[str, StoredParameter]
) -> None:
    """Raise LayoutError, StrategyError or PlanFileError where the parameters of a plan cannot be stored as it says."""
    seen = set[object]()
    for name, parameter in stored.items():
        kind = (id(graph.types[name]), id(parameter), name in graph.differentiable, sequences.get(name))
        if kind not in seen:  # decides it, as blocks share types and layouts
            check_stored_parameter(plan.mesh, graph, sequences, name, parameter)
            seen.add(kind)
    _check_local(plan, stored)
    _check_offloaded_states(plan, stored)
    _check_offloaded_weights(plan, graph, blocks, stored)


def check_stored_parameter(
    mesh: Mesh, graph: OperatorGraph, sequences: Sequences, name: str, stored: StoredParameter
) -> None:
    """Raise LayoutError or StrategyError where one parameter cannot be stored like that."""
    if stored.offloaded and name not in graph.differentiable:
        raise StrategyError(
            f"parameter '{name}': is frozen, so that it has no state to keep on the {stored.state_home}"
        )
    for kind in ("weight", "gradient", "state"):
        _check_layout(mesh, graph, f"{kind} of parameter '{name}'", name, getattr(stored, kind))
    fault = stored_fault(stored)
    if fault is not None:
        raise StrategyError(f"parameter '{name}': {fault}")
    check_parameter(name, stored, mesh, sequences)


def _check_local(plan: Plan, stored: Mapping[str, StoredParameter]) -> None:
    """Parameters that every device has for itself are whole, and their gradients are not reduced."""
    axes = len(plan.mesh.axes)
    refuse_plan(local_fault(plan.training.update, stored))
    for pattern in plan.training.update.local_parameters:
        for name in (name for name in stored if parameter_matches(name, pattern)):
            if stored[name].on_device != own_copies(axes):
                raise StrategyError(
                    f"parameter '{name}': is local by '{pattern}', so that the plan may not cut or reduce it; store its"
                    f" weight and state as {format_layout(own_copies(axes).weight)} and its gradient as"
                    f" {format_layout(own_copies(axes).gradient)}"
                )


def _check_offloaded_states(plan: Plan, stored: Mapping[str, StoredParameter]) -> None:
    """States are offloaded only where the update of a parameter needs no other parameter, and happens once a step."""
    fault = offload_fault(plan.training.optimizer, plan.schedule)
    refuse_plan(served_fault(plan.training.update, plan.training.optimizer))
    if fault is None:
        return
    for name, one in stored.items():
        if one.offloaded:
            raise PlanFileError(
                f"parameter '{name}': its state is kept on the {one.state_home}, but {fault.reason}; keep it on the"
                " device"
            )


def _check_offloaded_weights(
    plan: Plan, graph: OperatorGraph, blocks: Blocks, stored: Mapping[str, StoredParameter]
) -> None:
    """Weights may be offloaded only where one block alone reads them, and where they change once a step."""
    fault = offload_fault("", plan.schedule)
    for name, one in stored.items():
        if one.weight_home == "device":
            continue
        if fault is not None:
            raise PlanFileError(
                f"parameter '{name}': is kept on the {one.weight_home}, but {fault.reason}; keep it on the device"
            )
        readers = {blocks.block_of(at) for at in graph.consumers.get(name, ())}
        if len(readers) != 1 or None in readers:
            raise PlanFileError(
                f"parameter '{name}': is kept on the {one.weight_home}, which is for weights that one repeated block"
                " reads, and nothing else; set its weight_home to device"
            )


def _check_layout(mesh: Mesh, graph: OperatorGraph, where: str, value: str, layout: Layout) -> None:
    shape = graph.types[value].shape
    if len(layout) != len(mesh.axes):
        raise LayoutError(
            f"{where}: layout {format_layout(layout)} has {len(layout)} entries, the mesh has {len(mesh.axes)} axes"
        )
    if not divides(shape, layout, mesh.sizes):
        raise LayoutError(
            f"{where}: layout {format_layout(layout)} does not divide shape {shape} on mesh "
            f"{'x'.join(map(str, mesh.sizes))}"
        )
