"""Plans whose tensor parallelism communicates under its products."""

from dataclasses import replace

from planner.plan.binding.bind import bind
from planner.plan.layout.overlapped_products import in_chunks, name_of, possible_overlaps
from planner.plan.plan import Plan
from tests.distributed import plans


def overlapped(plan: Plan, model: str, there: int, back: int | None = None, first: int = 0) -> Plan:
    """The plan with all overlaps that so many chunks there and back divide, of those with more products than that the
    `first` in chunks."""
    bound = bind(plan, plans.traced(model), plans.BATCH)
    both = (there, there if back is None else back)
    every = (one for one in possible_overlaps(bound) if in_chunks(one, bound, both) is not None)
    chosen = tuple(sorted({(name_of(one, bound), *both, first * (len(one.products) > first)) for one in every}))
    return replace(plan, training=replace(plan.training, tensor_overlap=chosen))
