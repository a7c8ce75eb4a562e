"""Models with a state, of transformers, on two processes: loss and all gradients are those of their own modules, whose
scans are written out there and one operator here."""

import pytest

from planner.plan.file import dump_plan
from planner.strategy_search.request.space import Pinned
from tests.distributed import plans
from tests.distributed.searched import searched_plan

WAYS = (
    Pinned(tensor=2, micro_batches=1),
    Pinned(data=2, zero=3, micro_batches=1, recompute="full"),
    Pinned(context=2, micro_batches=1),
    Pinned(pipeline=2, mesh=(1,), micro_batches=2),
)


@pytest.mark.cases(1, 6)
@pytest.mark.slow
@pytest.mark.parametrize("family", plans.STATE_SPACES)
def test_gradients_are_those_of_transformers(family: str, pair) -> None:
    """Under tensor, fully sharded data and context parallelism, in stages, and under a plan at random."""
    found = [searched_plan(family, 2, pinned=way) for way in WAYS]
    found.append(plans.random_plan(family, plans.mesh_of(2), 1, micro_batches=1))
    for errors in pair.run("tasks_models", "parity", family, [dump_plan(plan) for plan in found]):
        assert max(errors) < 1e-5, dict(zip(("tensor", "zero3", "context", "stages", "random"), errors, strict=True))


@pytest.mark.cases(2)
@pytest.mark.parametrize(
    ("family", "ends"),
    [
        ("mamba2", ("/state_space_scan", "/causal_convolution")),
        ("jamba", ("/selective_scan", "/causal_convolution", "/scaled_dot_product_attention")),
        ("gpt-oss", ("attention",)),
    ],
)
def test_context_parallelism_divides_what_takes_whole_sequences(family: str, ends: tuple[str, ...]) -> None:
    """Along heads, or channels, though it reads weights: it was computed on every device."""
    plan = searched_plan(family, 2, pinned=Pinned(context=2, micro_batches=1))
    chosen = [(name, strategy) for group in plan.groups for name, strategy in group.operators if name.endswith(ends)]
    assert {end for end in ends if any(name.endswith(end) for name, _ in chosen)} == set(ends)
    assert not [name for name, strategy in chosen if strategy == (None,)]
