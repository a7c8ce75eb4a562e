"""Strategies that people write by hand, as candidates of the tables: Megatron, data parallelism, ZeRO."""

from collections.abc import Callable, Mapping, Sequence

from planner.sharding.layout import PARTIAL, REPLICATE, Placement, shard
from planner.sharding.rule import Rule, named_strategy
from planner.sharding.rules import rule_of
from planner.sharding.stored import StoredParameter
from planner.strategy_search.decomposition.pieces import Column, Piece
from planner.strategy_search.engine.outcome import RankFilling
from planner.strategy_search.tables.cost_table import CostTables
from tests.unit.search.cases import Case, column_of

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
    if "embedding" in name or "/add" in name:
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


def by_hand(case: Case, axes: tuple[str, ...], on_data: Option, *, recompute: bool = False) -> tuple[RankFilling, ...]:
    """All blocks alike, as many on every rank, kept or recomputed in full."""
    chain, setting = case.chain, case.setting
    operators = operators_by_hand(chain.tables, axes)
    parameters = parameters_by_hand(chain.tables, axes, on_data)
    assert all(operators[one] == operators[other] for one, other in chain.alias.items())

    def column(pieces: Sequence[Piece]) -> Column:
        piece = next(piece for piece in pieces if piece.recompute == (recompute and bool(pieces[1:])))
        return column_of(piece, {k: operators[k] if isinstance(k, int) else parameters[k] for k in piece.keys})

    inner = (column(chain.inner),) * (case.inner_blocks // setting.ranks)
    return tuple(
        RankFilling(
            head=column(chain.head) if rank == 0 else None,
            inner=inner,
            tail=column(chain.tail) if rank == setting.ranks - 1 else None,
            peak=0.0,
            beside=0.0,
        )
        for rank in range(setting.ranks)
    )
