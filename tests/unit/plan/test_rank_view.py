"""One rank of a plan: what is said of it is what the runtime gives it."""

import random

import numpy as np
import pytest
import torch

from planner.errors import RequestError
from planner.plan.binding.bind import bind
from planner.plan.layout.rank_view import Runs, piece_of, rank_view
from planner.plan.layout.roles import roles
from planner.report.rank import piece_text
from planner.sharding.layout import PARTIAL, REPLICATE, shard
from planner.sharding.mesh import Mesh, MeshAxis
from tests.contract.one_rank import one_rank
from tests.distributed import plans
from tests.refusals import refused


def taken(whole: torch.Tensor, piece: tuple[Runs, ...]) -> torch.Tensor:
    """The elements of a tensor in the runs of a piece."""
    for dim, runs in enumerate(piece):
        at = [place for start, stop in runs for place in range(start, stop)]
        whole = whole.index_select(dim, torch.tensor(at, dtype=torch.long))
    return whole


@pytest.mark.parametrize(
    ("kind", "sizes", "settings"),
    [("zero3", (4,), {}), ("outer", (2, 2), {}), ("zero2", (2,), {"stages": (2, 2)}), (3, (2, 2), {})],
    ids=str,
)
def test_a_rank_has_the_pieces_that_it_is_said_to_have(
    kind: str | int, sizes: tuple[int, ...], settings: dict[str, object]
) -> None:
    model, mesh = "llama4", plans.mesh_of(*sizes)
    make = plans.random_plan(model, mesh, kind) if isinstance(kind, int) else None
    plan = make or plans.hand_plan(kind, model, mesh, **settings)  # type: ignore[arg-type]
    bound = bind(plan, plans.traced(model), plans.BATCH)
    stage = len(plan.stages) - 1
    with one_rank(model, plan, plans.traced(model), stage) as (step, _):
        step.prepare(*plans.inputs(model))
        rank = stage * plan.mesh.size + step.place.rank
        view = rank_view(bound, roles(bound), rank)
        assert view.coordinate == step.place.coordinate
        assert {one.name for one in view.parameters} == step.rank.parameters.keys()
        whole = dict(plans.build(model).named_parameters(remove_duplicate=False))
        for one in view.parameters:
            held = step.rank.parameters[one.name]
            assert torch.equal(taken(whole[one.name].detach(), one.weight), held.piece.detach())
            assert taken(whole[one.name].detach(), one.gradient).shape == held.leaf.shape


def test_nothing_is_held_of_gradients_and_states_that_there_are_not() -> None:
    model = "mixture-frozen"
    bound = bind(plans.hand_plan("zero3", model, plans.mesh_of(2)), plans.traced(model), plans.BATCH)
    view = rank_view(bound, roles(bound), 1)
    trained = {one.name for one in bound.graph.parameters if one.trainable}
    assert {one.name for one in view.parameters} > trained > set()
    for one in view.parameters:
        held = (one.gradient, one.state)
        assert all(all(piece) for piece in held) if one.name in trained else not any(any(piece) for piece in held)


def test_pieces_of_all_ranks_make_the_whole() -> None:
    draw = random.Random(0)
    for _ in range(200):
        sizes = [draw.choice([1, 2, 3]) for _ in range(draw.randint(1, 3))]
        mesh = plans.mesh_of(*sizes)
        layout = tuple(draw.choice([REPLICATE, PARTIAL, shard(0), shard(1)]) for _ in sizes)
        shape = (36, 54)
        seen = np.zeros(shape, dtype=int)
        for rank in range(mesh.size):
            rows, columns = piece_of(shape, layout, mesh, mesh.coordinate(rank))
            for top, bottom in rows:
                for left, right in columns:
                    seen[top:bottom, left:right] += 1
        copies = np.prod([size for size, one in zip(sizes, layout, strict=True) if not one.is_shard], initial=1)
        assert (seen == copies).all(), (sizes, layout)


def test_sequences_are_cut_in_the_order_of_their_axis() -> None:
    mesh = Mesh(
        axes=(
            MeshAxis(name="outer", size=2, stride=4, bandwidth=1e9),
            MeshAxis(name="ring", size=4, stride=1, bandwidth=1e9, order="zigzag"),
        )
    )
    layout = (shard(1), shard(1))
    assert piece_of((2, 16), layout, mesh, (0, 1), (1,)) == (((0, 2),), ((1, 2), (6, 7)))
    assert piece_of((2, 16), layout, mesh, (1, 3), (1,)) == (((0, 2),), ((11, 13),))
    assert piece_of((2, 16), layout, mesh, (1, 3)) == (((0, 2),), ((14, 16),)), "no sequence"


def test_pieces_in_words() -> None:
    assert piece_text((4, 8), (((0, 4),), ((2, 4), (6, 8)))) == ":, 2:4+6:8"
    assert piece_text((4,), ((),)) == "nothing"


@pytest.mark.parametrize("rank", [-1, 4])
def test_a_rank_that_there_is_not(rank: int) -> None:
    plan = plans.hand_plan("zero3", "llama4", plans.mesh_of(4))
    bound = bind(plan, plans.traced("llama4"), plans.BATCH)
    with refused(RequestError, f"rank {rank}", 4, 0, 3):
        rank_view(bound, roles(bound), rank)
