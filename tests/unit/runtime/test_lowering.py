"""Programs that are written from a plan: one for each distinct block, checked when they first run."""

import traceback
from dataclasses import replace

import pytest
import torch

from planner.errors import StrategyError
from runtime.observer import Observer
from runtime.step.training_step import TrainingStep, parallelize
from tests.distributed import plans
from tests.refusals import refused

CPU = torch.device("cpu")


def step_of(model: str, *, lowered: bool = True, compiled: bool = False, **settings: object) -> TrainingStep:
    plan = plans.hand_plan("zero1", model, plans.mesh_of(), **settings)
    return parallelize(
        plans.build(model),
        plan,
        example=plans.inputs(model),
        traced=plans.traced(model),
        device=CPU,
        check_layouts=False,
        lowered=lowered,
        compiled=compiled,
    )


def test_equal_blocks_share_one_program() -> None:
    shallow, deep = step_of("llama4"), step_of("llama8")
    for step in (shallow, deep):
        step.accumulate(*plans.batch())
    assert len(shallow.rank.programs.texts) == len(deep.rank.programs.texts)
    section = deep.rank.executors[0].sections[0].instructions
    bodies = deep.rank.programs.bodies(section, recomputed=False, departs=False)
    blocks = bodies[1:-1]
    assert len(blocks) == 8
    assert len({body.bare for body in blocks[1:-1]}) == 1
    assert len({body.names for body in blocks}) == 8


def test_the_text_has_nothing_of_one_block_in_it() -> None:
    step = step_of("llama4")
    step.accumulate(*plans.batch())
    texts = ["\n".join(text.lines) for text in step.rank.programs.texts.values()]
    assert not any("layers" in text or "weight" in text for text in texts)
    assert any("observer" not in text and text.count("\n") > 20 for text in texts)


@pytest.mark.cases(2, 4)
@pytest.mark.slow
@pytest.mark.parametrize("recomputation", ["none", "full", "selective"])
@pytest.mark.parametrize("model", ["llama", "gpt", "mixture", "dropping", "assorted", "resnet64", "wide-deep"])
def test_both_ways_make_the_same(model: str, recomputation: str) -> None:
    found = []
    for lowered in (True, False):
        step = step_of(model, lowered=lowered, recomputation=recomputation, kept=("linear", "norm", "conv2d"))
        losses = [step.accumulate(*plans.inputs(model)) for _ in range(2)]
        found.append([*losses, *step.full_gradients().values(), *step.changed_buffers().values()])
    assert all(torch.equal(one, other) for one, other in zip(*found, strict=True))


def test_a_result_of_another_shape_than_promised_is_told_with_its_operator() -> None:
    step = step_of("llama")
    executor = step.rank.executors[0]
    section = executor.sections[0]
    at = next(n for n, i in enumerate(section.instructions) if i.bound.operator.name.endswith("q_proj/linear"))
    wrong = section.instructions[at]
    (promise,) = wrong.results
    instructions = list(section.instructions)
    instructions[at] = replace(wrong, results=((promise[0], (*promise[1][:-1], 7)),))
    object.__setattr__(executor, "sections", (replace(section, instructions=tuple(instructions)),))
    with refused(
        StrategyError, "model.layers.0.self_attn.q_proj/linear", "(4, 8, 32)", "(4, 8, 7)", "aten.linear.default"
    ) as raised:
        step.accumulate(*plans.batch())
    assert any("raise ops[" in line for line in traceback.format_tb(raised.value.__traceback__))


class Names(Observer):
    """Writes down who runs, on what, and what comes of it."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str, tuple[tuple[int, ...], ...]]] = []

    def operands(self, instruction, operands) -> None:
        self.seen.append(("in", instruction.bound.operator.name, tuple(tuple(o.shape) for o in operands)))

    def results(self, instruction, results) -> None:
        self.seen.append(("out", instruction.bound.operator.name, tuple(tuple(r.shape) for r in results)))


def test_observers_see_the_same_of_both() -> None:
    seen = []
    for lowered in (True, False):
        step = step_of("llama", lowered=lowered, recomputation="full")
        step.accumulate(*plans.batch())
        step.rank.observer = Names()
        step.accumulate(*plans.batch())
        seen.append(step.rank.observer.seen)
    assert seen[0] == seen[1]
    assert len(seen[0]) > 100
