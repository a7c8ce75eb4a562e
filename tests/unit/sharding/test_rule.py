"""What a rule says about strategies: layouts, legality with reasons, names. That it is true is shown in
tests/contract."""

import itertools
import math
from collections.abc import Sequence
from dataclasses import replace

import pytest

from planner.errors import RuleError, StrategyError
from planner.graph.call import Call
from planner.graph.operator_graph import TensorType
from planner.sharding.layout import format_layout
from planner.sharding.legality import check_strategy, legal_strategies, strategy_fault
from planner.sharding.mesh import Mesh, MeshAxis
from planner.sharding.rule import (
    Rule,
    derive_layouts,
    local_extents,
    loop_extents,
    named_strategy,
    splittable,
    strategy_names,
)
from planner.sharding.rules import RULES
from tests.refusals import refused


def mesh_of(*sizes: int) -> Mesh:
    axes = [
        MeshAxis(name=f"axis{i}", size=n, stride=math.prod(sizes[i + 1 :]), bandwidth=1.0) for i, n in enumerate(sizes)
    ]
    return Mesh(axes=tuple(axes))


def tensor(*shape: int) -> TensorType:
    return TensorType(shape=shape, dtype="float32")


def rule(op: str, operands: Sequence[TensorType], result: TensorType, *literals: object) -> Rule:
    call = Call(op=f"aten.{op}", arguments=(*operands, *literals), keywords=(), results=(result,))  # type: ignore[arg-type]
    return RULES[call.op].build(call)


LINEAR = rule("linear.default", [tensor(8, 6, 16), tensor(12, 16), tensor(12)], tensor(8, 6, 12))
VIEW = rule("view.default", [tensor(4, 6, 8)], tensor(24, 8), (24, 8))
INSIDE = (
    "factor 'd1' inside the compound dim (d0 d1) is split, but factor 'd0' outside of it, of extent 4, is split into"
    " {} only"
)
MERGED = rule("view.default", [tensor(2, 3, 8)], tensor(6, 2, 4), (6, 2, 4))
SOFTMAX = rule("softmax.int", [tensor(4, 6)], tensor(4, 6), -1)


def test_a_rule_as_text() -> None:
    assert LINEAR.format() == "b s i, o i, o -> b s o"
    assert VIEW.format() == "d0 d1 d2 -> (d0 d1) d2"
    assert rule("unsqueeze.default", [tensor(4)], tensor(1, 4), 0).format() == "d0 -> 1 d0"


@pytest.mark.parametrize(
    ("factor", "forward", "gradient"),
    [
        (None, "R R R R", "R R R R"),
        ("b", "S0 R R S0", "S0 P P S0"),  # data parallelism
        ("s", "S1 R R S1", "S1 P P S1"),  # sequence parallelism
        ("o", "R S0 S0 S2", "P S0 S0 S2"),  # column parallelism
        ("i", "S2 S1 P P", "S2 S1 R R"),  # row parallelism: the bias joins once
    ],
)
def test_layouts_of_a_linear_layer(factor: str | None, forward: str, gradient: str) -> None:
    layouts = derive_layouts(LINEAR, named_strategy(LINEAR, [factor], "here"))
    every = (*layouts.operands, *layouts.results)
    assert " ".join(format_layout(duplex.forward) for duplex in every) == forward
    assert " ".join(format_layout(duplex.gradient) for duplex in every) == gradient


def experts(tokens: tuple[int, int], count: int) -> Rule:
    """The rule of experts of width 32 for tokens of 16, two experts each."""
    choices = tensor(*tokens, 2), TensorType(shape=(*tokens, 2), dtype="int64")
    weights = tensor(count, 32, 16), tensor(count, 32, 16), tensor(count, 16, 32)
    operands = (tensor(*tokens, 16), *choices, *weights)
    call = Call(op="planner.experts.default", arguments=operands, keywords=(), results=(operands[0],))
    return RULES[call.op].build(call)


EXPERTS = experts((8, 6), 4)


@pytest.mark.parametrize(
    ("factor", "tokens", "weights", "of_weights", "result"),
    [
        ("b", "S0", "R R R", "P P P", "S0"),
        ("f", "R", "S1 S1 S2", "S1 S1 S2", "P"),
        ("e@b", "S0", "S0 S0 S0", "S0 S0 S0", "S0"),  # no gradient is partial: the owner of an expert gets all rows
        ("e@s", "S1", "S0 S0 S0", "S0 S0 S0", "S1"),
    ],
)
def test_layouts_of_experts(factor: str, tokens: str, weights: str, of_weights: str, result: str) -> None:
    layouts = derive_layouts(EXPERTS, named_strategy(EXPERTS, [factor], "here"))
    x, *_, gate, up, down = layouts.operands
    assert (format_layout(x.forward), format_layout(layouts.results[0].forward)) == (tokens, result)
    assert " ".join(format_layout(duplex.forward) for duplex in (gate, up, down)) == weights
    assert " ".join(format_layout(duplex.gradient) for duplex in (gate, up, down)) == of_weights


def test_an_exchange_splits_both_of_its_factors() -> None:
    strategy = named_strategy(EXPERTS, ["b", "e@b", "f"], "here")
    extents = local_extents(EXPERTS, strategy, mesh_of(2, 4, 8))
    assert {EXPERTS.factors[i].name: extent for i, extent in enumerate(extents)} == {
        **{"b": 1, "s": 6, "h": 16, "k": 2, "e": 1, "f": 4},
        **{"e@b": 1, "e@s": 1},
    }
    assert {EXPERTS.factors[i].name for i in EXPERTS.exchanged} == {"e"}


def test_an_exchange_brings_rows_of_all_its_tokens() -> None:
    """A device runs over the tokens of the whole axis, of which each expert gets its share; and over all of its own
    where experts are cut alone."""
    mesh = mesh_of(2, 4)
    for names in (["b", "e@b"], ["e@b", "b"], ["b", "e"], ["e", "b"], ["b", "b"]):
        extents = loop_extents(EXPERTS, named_strategy(EXPERTS, names, "here"), mesh)
        assert math.prod(extents[EXPERTS.index[name]] for name in "bske") == 8 * 6 * 2 * 4 / 8


def test_the_fullest_piece_of_an_uneven_loop() -> None:
    rule = replace(EXPERTS, factors=tuple(replace(f, imbalance=1.5 if f.name == "e" else 1.0) for f in EXPERTS.factors))
    cut = loop_extents(rule, named_strategy(rule, ["b", "e@b"], "here"), mesh_of(2, 4))
    whole = loop_extents(rule, named_strategy(rule, ["b", "b"], "here"), mesh_of(2, 4))
    assert (cut[rule.index["e"]], whole[rule.index["e"]]) == (1.5, 4)
    assert local_extents(rule, named_strategy(rule, ["b", "e@b"], "here"), mesh_of(2, 4))[rule.index["e"]] == 1


@pytest.mark.parametrize(
    ("names", "sizes", "fault"),
    [
        (["e@b"], (8,), "axis0 of size 8 does not divide factor 'e' of extent 4"),
        (["e@s"], (4,), "axis0 of size 4 does not divide factor 's' of extent 6"),
        (["b", "e@b"], (4, 4), "axis0 of size 4 and axis1 of size 4 does not divide factor 'b' of extent 8"),
        (["e@b", "e@s"], (4, 2), "axis0 of size 4 and axis1 of size 2 does not divide factor 'e' of extent 4"),
        (["e", "e@s"], (4, 2), "axis0 of size 4 and axis1 of size 2 does not divide factor 'e' of extent 4"),
    ],
)
def test_faults_of_exchanges(names: list[str | None], sizes: tuple[int, ...], fault: str) -> None:
    strategy, mesh = named_strategy(EXPERTS, names, "here"), mesh_of(*sizes)
    found = strategy_fault(EXPERTS, strategy, mesh)
    assert found is not None
    assert found.reason == fault
    assert strategy not in legal_strategies(EXPERTS, mesh)


def test_an_exchange_takes_two_factors() -> None:
    """One sample, or one expert, leaves nothing to exchange."""
    assert "e@b" not in experts((1, 6), 4).index
    assert "e@s" in experts((1, 6), 4).index
    assert not {"e@b", "e@s"} & set(experts((8, 6), 1).index)


def test_two_axes_cut_one_dim() -> None:
    strategy = named_strategy(LINEAR, ["b", "b"], "here")
    mesh = mesh_of(2, 4)
    assert format_layout(derive_layouts(LINEAR, strategy).results[0].forward) == "S0,S0"
    assert local_extents(LINEAR, strategy, mesh)[LINEAR.index["b"]] == 1
    assert strategy_fault(LINEAR, strategy, mesh) is None


@pytest.mark.parametrize(
    ("chosen", "names", "sizes", "fault"),
    [
        (LINEAR, ["b"], (3,), "axis0 of size 3 does not divide factor 'b' of extent 8"),
        (LINEAR, ["b", "b"], (4, 4), "axis0 of size 4 and axis1 of size 4 does not divide factor 'b' of extent 8"),
        (LINEAR, ["b"], (2, 2), "has 1 entries for a mesh of 2 axes"),
        (SOFTMAX, ["d1"], (2,), "axis0 splits factor 'd1', which cannot be split"),
        (VIEW, ["d1", "d0"], (2, 2), "the axes cut the compound dim (d0 d1) from the inside out"),
        (
            VIEW,
            ["d0", "d1"],
            (2, 2),
            INSIDE.format(2),
        ),
        (
            VIEW,
            ["d1"],
            (2,),
            INSIDE.format(1),
        ),
    ],
)
def test_faults(chosen: Rule, names: list[str | None], sizes: tuple[int, ...], fault: str) -> None:
    strategy, mesh = named_strategy(chosen, names, "here"), mesh_of(*sizes)
    found = strategy_fault(chosen, strategy, mesh)
    assert found is not None
    assert found.reason == fault
    with pytest.raises(StrategyError) as caught:
        check_strategy(chosen, strategy, mesh, "operator 'x'")
    expected = f"operator 'x' ({chosen.format()}): {fault}; splittable factors: {', '.join(splittable(chosen))}"
    assert str(caught.value) == expected
    if len(names) == len(sizes):
        assert strategy not in legal_strategies(chosen, mesh)


def test_compound_dims_that_are_legal() -> None:
    mesh = mesh_of(4, 2)
    strategy = named_strategy(VIEW, ["d0", "d1"], "here")
    check_strategy(VIEW, strategy, mesh, "here")
    layouts = derive_layouts(VIEW, strategy)
    assert format_layout(layouts.operands[0].forward) == "S0,S1"
    assert format_layout(layouts.results[0].forward) == "S0,S0"


def test_a_name_that_is_no_factor() -> None:
    with refused(StrategyError, "operator 'x'", "q", "d0"):
        named_strategy(SOFTMAX, ["q"], "operator 'x'")


def test_a_rule_that_nothing_splits_says_so() -> None:
    with refused(StrategyError, "q", "none"):
        named_strategy(rule("arange.default", [], tensor(8), 8), ["q"], "here")


def test_names_of_strategies_and_back() -> None:
    for strategy in legal_strategies(LINEAR, mesh_of(2, 2)):
        assert named_strategy(LINEAR, strategy_names(LINEAR, strategy), "here") == strategy


def test_strategies_come_in_a_fixed_order_without_splits_first() -> None:
    found = [strategy_names(LINEAR, strategy) for strategy in legal_strategies(LINEAR, mesh_of(2))]
    assert found == [(None,), ("b",), ("s",), ("i",), ("o",)]


def test_extents_of_one_are_no_factors() -> None:
    found = rule("linear.default", [tensor(1, 6, 16), tensor(12, 16)], tensor(1, 6, 12))
    assert found.format() == "1 s i, o i -> 1 s o"


def test_query_heads_are_split_once_key_heads_are() -> None:
    """Eight query heads share two key heads: the first cuts go between groups, later ones inside of them."""
    tensors = [tensor(2, 8, 6, 4), tensor(2, 2, 6, 4), tensor(2, 2, 6, 4)]
    found = rule("scaled_dot_product_attention.default", tensors, tensor(2, 8, 6, 4))
    assert found.format() == "b r q d, b kv k d, b kv k e -> b r q e"
    cases = ((["g"], (2,)), (["g", "r"], (2, 4)), (["r"], (4,)), (["r"], (8,)), (["r", "r"], (4, 2)))
    for names, sizes in cases:
        strategy = named_strategy(found, names, "here")
        assert strategy_fault(found, strategy, mesh_of(*sizes)) is None
        assert strategy in legal_strategies(found, mesh_of(*sizes))


@pytest.mark.parametrize(
    ("names", "sizes", "fault"),
    [
        (["r"], (2,), "split 'g', or 'r' into a larger multiple of 2"),  # key heads can be split as well
        (["r", "g"], (4, 2), "split 'g' first"),
        (["g"], (4,), "4 does not divide factor 'kv' of extent 2"),
        (["kv"], (2,), "splits factor 'kv', which cannot be split"),
    ],
)
def test_query_heads_are_not_split_apart_from_key_heads(names: list[str], sizes: tuple[int, ...], fault: str) -> None:
    tensors = [tensor(2, 8, 6, 4), tensor(2, 2, 6, 4), tensor(2, 2, 6, 4)]
    found = rule("scaled_dot_product_attention.default", tensors, tensor(2, 8, 6, 4))
    strategy = named_strategy(found, names, "here")
    assert fault in str(strategy_fault(found, strategy, mesh_of(*sizes)))
    assert strategy not in legal_strategies(found, mesh_of(*sizes))


def test_keys_are_whole_where_query_heads_are_split_alone() -> None:
    tensors = [tensor(2, 8, 6, 4), tensor(2, 2, 6, 4), tensor(2, 2, 6, 4)]
    found = rule("scaled_dot_product_attention.default", tensors, tensor(2, 8, 6, 4))
    layouts = derive_layouts(found, named_strategy(found, ["r"], "here"))
    said = [(str(duplex.forward[0]), str(duplex.gradient[0])) for duplex in layouts.operands]
    assert said == [("S1", "S1"), ("R", "P"), ("R", "P")]


@pytest.mark.parametrize(
    ("op", "operands", "result", "facts"),
    [
        (
            "linear.default",
            [tensor(8, 16), tensor(12, 15)],
            tensor(8, 12),
            ("i", 16, 15),
        ),
        (
            "matmul.default",
            [tensor(), tensor(4)],
            tensor(),
            ("()", "(4,)"),
        ),
        (
            "add.Tensor",
            [tensor(4, 6), tensor(5)],
            tensor(4, 6),
            ("(5,)", "(4, 6)"),
        ),
        (
            "cross_entropy_loss.default",
            [tensor(4, 6), tensor(4)],
            tensor(4),
            (0, "(4,)"),
        ),
        ("embedding.default", [tensor(4, 6)], tensor(4), ("h", 6, 4)),
        ("nll_loss_nd.default", [tensor(6), tensor()], tensor(), (2, "(6,)")),
        ("addmm.default", [tensor(), tensor(4, 8), tensor(8, 6)], tensor(4, 6), (1, "()")),
    ],
)
def test_calls_that_do_not_match(
    op: str, operands: list[TensorType], result: TensorType, facts: tuple[object, ...]
) -> None:
    with refused(RuleError, f"aten.{op}", *facts):
        rule(op, operands, result)


@pytest.mark.parametrize("chosen", [LINEAR, VIEW, SOFTMAX, MERGED], ids=lambda chosen: chosen.op)
@pytest.mark.parametrize("sizes", [(), (2,), (2, 3), (2, 1, 2), (4, 2, 3), (2, 2, 2, 3)])
def test_growing_axis_by_axis_finds_what_trying_all_finds(chosen: Rule, sizes: tuple[int, ...]) -> None:
    mesh = mesh_of(*sizes)
    choices = [None, *range(len(chosen.factors))]
    every = itertools.product(choices, repeat=len(sizes))
    assert legal_strategies(chosen, mesh) == tuple(s for s in every if strategy_fault(chosen, s, mesh) is None)


def test_strategies_that_take_what_is_allowed() -> None:
    every, mesh = legal_strategies(LINEAR, mesh_of(2, 2, 2)), mesh_of(2, 2, 2)
    allowed = [(None, 2), (0,), (None, 1, 3)]
    found = legal_strategies(LINEAR, mesh, allowed)
    assert found == tuple(s for s in every if all(c in on for c, on in zip(s, allowed, strict=True)))
    assert len(found) == 6
