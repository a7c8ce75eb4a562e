"""Experts in three parts, so that other operators of their block run in between: each part is an instruction.

    router   depart   shared gate, up, silu   compute   shared down   arrive   sum
                └─ dispatch in flight ────────┘  └─ combine ──────────┘

`planner.plan.layout.expert_overlap` chooses the operators that run in between; `runtime.ops.experts` has the parts.
Each part has its own operands, in the layouts of the operator; only the last one makes a result. The state between the
parts is kept with the micro-batch.
"""

from collections.abc import Callable, Mapping, MutableMapping, Sequence
from dataclasses import dataclass, replace
from typing import TYPE_CHECKING, Literal, TypeAlias

import torch

from planner.plan.layout.expert_overlap import ExpertOverlap
from runtime.ops.experts import ExpertsCall, SplitExperts
from runtime.ops.local.local_language import splitting_experts
from runtime.ops.local.local_ops import FormCall
from runtime.ops.shard import Shard

if TYPE_CHECKING:
    from runtime.executor.instruction import Instruction

TENSORS = 6
"""Tokens, weights and their expert numbers; gate (may be none), up and down. Settings and biases follow by name."""

GATE = 3
"""The position of the gate among them."""

ROUTED = 3
"""The operands that the part `depart` takes."""

Part: TypeAlias = Literal["depart", "compute", "arrive"]


@dataclass(frozen=True, slots=True, kw_only=True)
class ExpertsPart:
    """One part of an operator with experts, number `at` of the graph; `switch` lets the other pass run."""

    part: Part
    at: int
    split: SplitExperts
    switch: Callable[[], None]

    def run(
        self, under_way: MutableMapping[int, ExpertsCall], operands: Sequence[torch.Tensor]
    ) -> Sequence[torch.Tensor]:
        """Run it for the micro-batch whose calls are `under_way`; returns its results, if any."""
        if self.part == "depart":
            call = under_way[self.at] = ExpertsCall(self.split, beside=True, switch=self.switch)
            call.depart(*operands)
            return ()
        if self.part == "compute":
            under_way[self.at].compute(operands)
            return ()
        return (under_way.pop(self.at).arrive(),)


def in_parts(
    instructions: dict[int, "Instruction"], overlaps: Sequence[ExpertOverlap], switch: Callable[[], None]
) -> Mapping[int, tuple["Instruction", ...]]:
    """Split the experts among the instructions: the first part replaces the whole. Returns the other parts, each with
    the operator behind which it runs; operators without an instruction run inside of an earlier one. Every wait for an
    all-to-all calls `switch` first."""
    behind: dict[int, tuple[Instruction, ...]] = {}
    for one in overlaps:
        whole = instructions[one.at]
        instructions[one.at] = _part(whole, "depart", switch)
        before = one.at
        parts: tuple[tuple[Part, tuple[int, ...]], ...] = (("compute", one.there), ("arrive", one.back))
        for part, beside in parts:
            before = next((other for other in reversed(beside) if other in instructions), before)
            behind[before] = (*behind.get(before, ()), _part(whole, part, switch))
    return behind


def _part(whole: "Instruction", part: Part, switch: Callable[[], None]) -> "Instruction":
    call, layouts = whole.call, whole.bound.layouts
    assert isinstance(call, FormCall), "experts run as a form"
    shard: Shard = call.form.args[0]  # type: ignore[attr-defined]
    every = len(whole.operands)
    first, end = {"depart": (0, ROUTED), "compute": (ROUTED, every), "arrive": (every, every)}[part]
    operands = whole.operands[first:end]
    results = whole.results if part == "arrive" else ()
    named = {operand.name for operand in operands} | {promise[0] for promise in results if promise is not None}
    own = replace(layouts, operands=layouts.operands[first:end], results=layouts.results if results else ())
    return replace(
        whole,
        bound=replace(whole.bound, layouts=own),
        operands=operands,
        results=results,
        last=tuple(name for name in whole.last if name in named),
        part=ExpertsPart(
            part=part,
            at=whole.index,
            split=splitting_experts(
                shard, *call.arguments[TENSORS:], gated=call.arguments[GATE] is not None, **call.keywords
            ),
            switch=switch,
        ),
        first=first,
    )
