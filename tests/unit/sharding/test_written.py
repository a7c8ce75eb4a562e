"""Rules as text: what fits a call becomes a rule, everything else is refused with the reason."""

import pytest

from planner.errors import RuleError
from planner.graph.call import Call
from planner.graph.operator_graph import TensorType, TorchConstant, WrittenRule
from planner.graph.written import call_text
from planner.sharding.rule import FactorKind, Rule, Work
from planner.sharding.rules.written import build_written
from tests.refusals import refused


def call(*shapes: tuple[int, ...], to: tuple[tuple[int, ...], ...] = ((4, 6),)) -> Call:
    return Call(
        op="mine.op.default",
        arguments=tuple(TensorType(shape=shape, dtype="float32") for shape in shapes),
        keywords=(),
        results=tuple(TensorType(shape=shape, dtype="float32") for shape in to),
    )


def built(text: str, *shapes: tuple[int, ...], to: tuple[tuple[int, ...], ...] = ((4, 6),), **more: object) -> Rule:
    return build_written(call(*shapes, to=to), WrittenRule(text=text, **more))  # type: ignore[arg-type]


def test_factors_and_kinds_follow_from_the_text() -> None:
    rule = built("d0 r0, x1d0 r0 -> d0 y0d1", (4, 8), (6, 8), blocked=("x1d0", "y0d1"), mean=("r0",), addends=(1,))
    assert [(f.name, f.extent, f.kind) for f in rule.factors] == [
        ("d0", 4, FactorKind.PARALLEL),
        ("r0", 8, FactorKind.REDUCTION),
        ("x1d0", 6, FactorKind.BLOCKED),
        ("y0d1", 6, FactorKind.BLOCKED),
    ]
    assert (rule.mean_over, rule.addends) == ((1,), (1,))


def test_work_is_one_pass_over_the_largest_tensor() -> None:
    rule = built("d0 x0d1 -> d0 y0d1", (4, 600), blocked=("x0d1", "y0d1"))
    assert (rule.op_class, rule.work) == ("elementwise", (Work(coefficient=1.0, factors=(0, 1)),))


def test_a_number_keeps_elements_together() -> None:
    rule = built("d0 (d1 4) -> d0 d1", (4, 24))
    assert [(f.name, f.extent, f.kind) for f in rule.factors] == [
        ("d0", 4, FactorKind.PARALLEL),
        ("d1", 6, FactorKind.PARALLEL),
        ("d1:4", 4, FactorKind.BLOCKED),
    ]
    assert rule.operands == (((0,), (1, 2)),)


def test_one_text_holds_for_every_extent() -> None:
    rule = built("d0 d1 -> d0 d1", (1, 9), to=((1, 9),), saved_extra=((4.0, "d0 d1"),))
    assert [(f.name, f.extent) for f in rule.factors] == [("d1", 9)]
    assert rule.saved_extra == (Work(coefficient=4.0, factors=(0,)),)


def test_scalars_and_nothing() -> None:
    assert built("r0, -> ", (4,), (), to=((),)).operands == (((0,),), ())
    assert built("none -> y0d0", to=((4,),), blocked=("y0d0",)).operands == ()


@pytest.mark.parametrize(
    ("text", "facts"),
    [
        ("d0 d1", ("->", "d0 d1")),
        ("d0 d1 -> d0 -> d1", ("->", "d0 d1 -> d0 -> d1")),
        ("d0 d1, d0 -> d0 d1", ("2 operands", 1)),
        ("d0 d1 -> d0 d1, d0 d1", ("2 results", 1)),
        ("d0 -> d0 d1", (1, "(4, 6)")),
        ("d0 d0 -> d0 d1", ("d0 d0",)),
        ("d0 d1 -> d1 d0", ("d1", 6, 4)),
        ("d0 (d1 5) -> d0 d1", (6, "d1", 5)),
        ("d0 (d1 0) -> d0 d1", ("(d1 0)", "(factor number)")),
        ("d0 (d1 d2) -> d0 d1", ("(d1 d2)", "(factor number)")),
        ("d0 (d1 99999999999) -> d0 d1", ("(d1 99999999999)", "(factor number)")),
        ("d0 1 -> d0 d1", ("extent 6", 1)),
        ("d0 __import__ -> d0 d1", ("__import__",)),
        ("d0 d1 -> d0 d2", ("factor 'd2'",)),
    ],
)
def test_what_does_not_fit_is_refused(text: str, facts: tuple[object, ...]) -> None:
    with refused(RuleError, "mine.op.default", *facts):
        built(text, (4, 6))


def test_a_factor_in_one_result_only_is_refused() -> None:
    with refused(RuleError, "factor 'd0'"):
        built("d0 d1 -> d0 d1, 1 d1", (4, 6), to=((4, 6), (1, 6)))


def test_the_text_of_a_call_tells_calls_apart() -> None:
    x = TensorType(shape=(4, 6), dtype="float32", contiguous=False)
    given = Call(
        op="mine.op.default",
        arguments=((x, x), None, True, 2, 2.0, 'a"b\n'),
        keywords=(("dtype", TorchConstant("dtype", "float32")), ("device", TorchConstant("device", "cuda:1"))),
        results=(x,),
    )
    assert call_text(given) == (
        'mine.op.default([float32[4,6], float32[4,6]], None, True, 2, 2.0, "a\\"b\\n", dtype=dtype:float32,'
        " device=any device) -> float32[4,6]"
    )
