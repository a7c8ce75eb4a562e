"""Differences between two plans in words: what is here, what is there."""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from itertools import groupby

from planner.matching import module_and_call
from planner.plan.binding.bind import BoundPlan
from planner.plan.file import format_strategy
from planner.plan.layout.roles import roles
from planner.plan.plan import Plan
from planner.plan.words import gradient_words, plan_words
from planner.sharding.layout import format_layout
from planner.sharding.stored import StoredParameter
from planner.sharding.update import Update

_NAMED = 3
"""Operators or parameters that are told in words; the others are counted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Difference:
    """What differs, as it is in the first plan and in the second. `items` are the operators or parameters that differ,
    `*` standing for the number of a block, each with both."""

    name: str
    here: str
    there: str
    items: tuple[tuple[str, str, str], ...] = ()


def model_words(plan: Plan) -> str:
    """`llama70b, 8192 tokens, bf16`."""
    length = f", {plan.model.sequence_length} tokens" if plan.model.sequence_length else ""
    return f"{plan.model.reference}{length}, {plan.training.precision}"


def update_text(update: Update) -> str:
    """What becomes of gradients, `as ever` where nothing is said of them."""
    return gradient_words(update).removeprefix("; ") or "as ever"


def degree_words(bound: BoundPlan) -> str:
    """`data 2 x tensor 8 x pipeline 4, mesh 2x8`."""
    words = plan_words(bound, roles(bound))
    virtual = f", {words['virtual stages']} virtual stages" if bound.plan.virtual_stages > 1 else ""
    return f"{words['degrees']}, mesh {words['mesh']}{virtual}"


def blocks_words(plan: Plan) -> str:
    """`10 x 7, 1 x 10`: so many stages of so many blocks, in the order of the model."""
    runs = ((blocks, len(list(run))) for blocks, run in groupby(stage.blocks for stage in plan.stages))
    return ", ".join(f"{count} x {blocks}" for blocks, count in runs)


def item_rows(
    name: str,
    here: Mapping[str, tuple[str | None, ...]] | Mapping[str, StoredParameter],
    there: Mapping[str, tuple[str | None, ...]] | Mapping[str, StoredParameter],
) -> Difference:
    """The difference of some operators or parameters; equal blocks are one item."""
    rows = tuple(
        dict.fromkeys((_in_all_blocks(item), choice_text(here[item]), choice_text(there[item])) for item in there)
    )
    more = f" and {len(rows) - _NAMED} more" if len(rows) > _NAMED else ""
    texts = [", ".join(f"{_short(row[0])} {row[side]}" for row in rows[:_NAMED]) + more for side in (1, 2)]
    return Difference(name=name, here=texts[0], there=texts[1], items=rows)


def choice_text(choice: tuple[str | None, ...] | StoredParameter) -> str:
    """A strategy as plan files write it; of stored layouts weight, gradient and state."""
    if isinstance(choice, StoredParameter):
        layouts = (choice.weight_words, format_layout(choice.gradient), choice.state_words)
        return "/".join(layout or "-" for layout in layouts)
    return format_strategy(choice) or "-"


def _in_all_blocks(name: str) -> str:
    return re.sub(r"(?<=\.)[0-9]+(?=[./])", "*", name, count=1)


def _short(name: str) -> str:
    """The module of an operator with a weight, the call of another, the last two words of a parameter."""
    module, call = module_and_call(name)
    if not call:
        return ".".join(name.split(".")[-2:])
    return module.rpartition(".")[2] if call in ("linear", "embedding") else call
