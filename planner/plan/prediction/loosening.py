"""A plan in which every block is a group of its own, so that single choices can be changed.

Groups of a plan hold equal blocks, so a change to one block would have to split its group. Here nothing is shared: a
loose plan means the same as the original at greater length, and its price is the same to the last digit.
"""

from collections.abc import Collection, Mapping, Sequence
from dataclasses import replace

from planner.graph.blocks import block_parameters
from planner.matching import module_and_call
from planner.plan.binding.bind import BoundPlan
from planner.plan.plan import Group, Plan
from planner.sharding.rule import strategy_names
from planner.sharding.stored import StoredParameter

OUTSIDE = "outside the blocks"
Strategies = Mapping[str, tuple[str | None, ...]]


def loosened(bound: BoundPlan) -> Plan:
    """The plan with one group for every block, and one for everything outside of the blocks."""
    blocks, rest = bound.blocks, dict(bound.parameters)
    inside = []
    for block in range(blocks.count):
        names = block_parameters(bound.graph, blocks, block)
        inside.append(_group(bound, block, {name: rest.pop(name) for name in names}))
    outside = [at for at in range(len(bound.operators)) if blocks.block_of(at) is None]
    group = Group(name=OUTSIDE, operators=_strategies(bound, outside), parameters=tuple(rest.items()))
    return replace(bound.plan, groups=(group, *inside))


def _group(bound: BoundPlan, block: int, parameters: Mapping[str, StoredParameter]) -> Group:
    inside, places = bound.blocks.operators(block), bound.recompute_of(block)
    kept = tuple(bound.operators[inside[place]].operator.name for place in sorted(places or ()))
    return Group(
        name=f"block {block}",
        first_block=block,
        blocks=1,
        recomputation="none" if places is None else "selective" if kept else "full",
        kept=kept,
        activations_home=bound.offloaded_blocks.get(block, "device"),
        operators=_strategies(bound, inside),
        parameters=tuple(parameters.items()),
    )


def _strategies(bound: BoundPlan, places: Sequence[int]) -> tuple[tuple[str, tuple[str | None, ...]], ...]:
    found = (bound.operators[at] for at in places)
    return tuple((one.operator.name, strategy_names(one.rule, one.strategy)) for one in found)


def strategies_of(plan: Plan) -> dict[str, tuple[str | None, ...]]:
    """The strategies of a loose plan, by operator."""
    return {name: strategy for group in plan.groups for name, strategy in group.operators}


def stored_of(plan: Plan) -> dict[str, StoredParameter]:
    """The stored layouts of a loose plan, by parameter."""
    return {name: stored for group in plan.groups for name, stored in group.parameters}


def with_strategies(plan: Plan, strategies: Strategies) -> Plan:
    """A loose plan with other strategies for some operators."""

    def changed(group: Group) -> Group:
        operators = tuple((name, strategies.get(name, strategy)) for name, strategy in group.operators)
        return replace(group, operators=operators)

    return replace(plan, groups=tuple(map(changed, plan.groups)))


def with_stored(plan: Plan, stored: Mapping[str, StoredParameter]) -> Plan:
    """A loose plan with other stored layouts for some parameters."""

    def changed(group: Group) -> Group:
        return replace(group, parameters=tuple((name, stored.get(name, known)) for name, known in group.parameters))

    return replace(plan, groups=tuple(map(changed, plan.groups)))


def with_places(plan: Plan, other: Plan, look_ups: Collection[str]) -> Plan:
    """A loose plan with embedding tables in the places where another plan of the same blocks has them: with the
    parameters that remain on the devices, and with that plan's strategies of the operators that look up rows."""
    like, chosen = {group.name: group for group in other.groups}, strategies_of(other)
    known = stored_of(plan)
    groups = (
        replace(
            group,
            parameters=tuple((name, known.get(name, stored)) for name, stored in like[group.name].parameters),
        )
        for group in plan.groups
    )
    update = replace(plan.training.update, placed=other.training.update.placed)
    moved = replace(plan, groups=tuple(groups), training=replace(plan.training, update=update))
    return with_strategies(moved, {name: chosen[name] for name in look_ups})


def with_recomputation(plan: Plan, other: Plan) -> Plan:
    """A loose plan whose blocks are recomputed like those of another plan with the same blocks."""
    like = {group.name: group for group in other.groups}
    groups = (
        replace(
            group,
            recomputation=like[group.name].recomputation,
            kept=like[group.name].kept,
            activations_home=like[group.name].activations_home,
        )
        for group in plan.groups
    )
    return replace(plan, groups=tuple(groups))


def part_of(name: str) -> str:
    """The part of the model that an operator or a parameter belongs to, the same in all blocks: `self_attn` for
    `model.layers.3.self_attn.q_proj/linear`, `lm_head` for `lm_head.weight`."""
    module, call = module_and_call(name)
    path = (module if call else module.rpartition(".")[0]).split(".")
    numbers = [at for at, word in enumerate(path) if word.isdigit()]
    if not numbers:
        return path[-1] or (call or name)
    after = [word for word in path[numbers[0] + 1 :] if not word.isdigit()]
    return after[0] if after else "between the parts"


def in_parts(names: Sequence[str]) -> dict[str, list[str]]:
    """Names by the part of the model that they belong to, in the order of the first name of each part."""
    found: dict[str, list[str]] = {}
    for name in names:
        found.setdefault(part_of(name), []).append(name)
    return found
