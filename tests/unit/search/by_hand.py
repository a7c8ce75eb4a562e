"""Strategies that people write by hand, as candidates of the tables: Megatron, data parallelism, ZeRO."""

from collections.abc import Callable, Mapping

from planner.search.assemble import StageChoice
from planner.search.cost_table import CostTables
from planner.sharding.layout import PARTIAL, REPLICATE, Placement, shard
from planner.sharding.rule import Rule, named_strategy
from planner.sharding.rules import rule_of
from planner.sharding.stored import StoredParameter
from tests.unit.search.cases import Case

Option = tuple[Placement, Placement, Placement]  # of weight, gradient and state on one axis
COPIES: Option = (REPLICATE, PARTIAL, REPLICATE)
UPDATE_CUT: Option = (REPLICATE, PARTIAL, shard(0))  # ZeRO-1
GRADIENT_CUT: Option = (REPLICATE, shard(0), shard(0))  # ZeRO-2
ALL_CUT: Option = (shard(0), shard(0), shard(0))  # ZeRO-3
BEFORE_HEADS = frozenset(f"{call}{number}" for call in ("unflatten", "transpose") for number in ("", "_2", "_3")) | {
    "flatten"
}


def batch_factor(rule: Rule) -> str | None:
    """The factor of the samples in the operators of a Llama."""
    return next((name for name in ("b", "n", "d0") if name in rule.index), None)


def tensor_factor(name: str, rule: Rule) -> str | None:
    """What Megatron splits in a Llama: heads, hidden units of the MLP, vocabulary; the sequence of norms and residuals
    (Korthikanti et al. 2022)."""
    place, _, call = name.partition("/")
    if name.endswith("rms_norm/shared"):
        return "copies"  # gathered for the column parallel layers, their gradients scattered
    if "embedding" in name or "/add" in name.replace("self_attn/add", ""):
        return "v" if "v" in rule.index else "d1"
    if call == "linear":
        return "i" if place.endswith(("o_proj", "down_proj")) else "o"
    if call == "rms_norm":
        return "s"
    if place.endswith("self_attn"):
        return "g" if "g" in rule.index else "d2" if call in BEFORE_HEADS else "d1"
    if name == "flatten_2":
        return None  # labels
    return "v" if "v" in rule.index else "d2"


def context_factor(name: str, rule: Rule) -> str | None:
    """Ulysses: the sequence where the work is, heads inside attention (Jacobs et al. 2023)."""
    return "s" if "s" in rule.index else "g" if "g" in rule.index else None


FACTORS: Mapping[str, Callable[[str, Rule], str | None]] = {
    "data": lambda name, rule: batch_factor(rule),
    "tensor": tensor_factor,
    "context": context_factor,
    "nothing": lambda name, rule: None,
}


def operators_by_hand(tables: CostTables, axes: tuple[str, ...]) -> Mapping[int, int]:
    """Candidates of all operators where each axis is used for one of `FACTORS`."""
    graph = tables.template.graph
    found = {}
    for at, (op, table) in enumerate(zip(graph.operators, tables.operators, strict=True)):
        rule = rule_of(graph, op)
        names = [FACTORS[axis](op.name, rule) for axis in axes]
        found[at] = table.candidates.strategies.index(named_strategy(rule, names, op.name))
    return found


def parameters_by_hand(tables: CostTables, axes: tuple[str, ...], on_data: Option) -> Mapping[str, int]:
    """Stored layouts: cut like their use on tensor axes, as `on_data` says on all others."""
    found = {}
    for table in tables.parameters:
        whole = len(tables.template.graph.types[table.name].shape) == 1
        cut = shard(1 if "o_proj" in table.name or "down_proj" in table.name else 0)
        on_tensor = COPIES if whole else (cut, cut, cut)
        options = [on_tensor if axis == "tensor" else on_data for axis in axes]
        weight, gradient, state = (tuple(option[kind] for option in options) for kind in range(3))
        found[table.name] = table.stored.index(StoredParameter(weight=weight, gradient=gradient, state=state))
    return found


def by_hand(case: Case, axes: tuple[str, ...], on_data: Option) -> list[StageChoice]:
    """One choice for every kind of stage."""
    operators = operators_by_hand(case.tables, axes)
    parameters = parameters_by_hand(case.tables, axes, on_data)
    return [
        StageChoice(
            first_block=kind.first_block,
            blocks=kind.blocks,
            operators={at: operators[at] for at in problem.operators},
            parameters={name: parameters[name] for name in problem.parameters},
        )
        for kind, problem in zip(case.kinds, case.problems(), strict=True)
    ]
