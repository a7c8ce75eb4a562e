"""Redistribution as a property: the steps, played on the pieces of all ranks, turn every layout into every other."""

import heapq
import importlib.util
import itertools
import math
import random
import sys
from collections.abc import Iterator, Sequence
from fractions import Fraction

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from numpy.typing import NDArray

from planner.errors import LayoutError
from planner.sharding import redistribute
from planner.sharding.layout import (
    PARTIAL,
    REPLICATE,
    Layout,
    PaddedShape,
    divides,
    format_layout,
    local_fraction,
    local_shape,
    parse_layout,
    replicated,
    shard,
    whole_shape,
)
from planner.sharding.mesh import Mesh, MeshAxis
from planner.sharding.redistribute import COLLECTIVES, Routes, Step, cut_limits, redistribution
from tests.refusals import refused

Array = NDArray[np.int64]


def mesh_of(sizes: Sequence[int], bandwidths: Sequence[float]) -> Mesh:
    return Mesh(
        axes=tuple(
            MeshAxis(name=f"axis{i}", size=size, stride=math.prod(sizes[i + 1 :]), bandwidth=bandwidth)
            for i, (size, bandwidth) in enumerate(zip(sizes, bandwidths, strict=True))
        )
    )


@st.composite
def cases(draw: st.DrawFn) -> tuple[tuple[int, ...], Mesh, Layout, Layout]:
    """A shape, a mesh of one to three axes and two layouts that the shape can have on it."""
    shape = tuple(draw(st.lists(st.sampled_from([1, 2, 3, 4, 6, 8, 12, 24]), min_size=0, max_size=3)))
    sizes = draw(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=3))
    bandwidths = draw(st.lists(st.sampled_from([1e9, 2.5e10, 4e11]), min_size=len(sizes), max_size=len(sizes)))
    placements = st.sampled_from([REPLICATE, PARTIAL, *(shard(dim) for dim in range(len(shape)))])
    layouts = st.tuples(*[placements] * len(sizes)).filter(lambda layout: divides(shape, layout, sizes))
    return shape, mesh_of(sizes, bandwidths), draw(layouts), draw(layouts)


@st.composite
def padded_cases(draw: st.DrawFn) -> tuple[tuple[int, ...], Mesh, Layout, Layout]:
    """The same of a parameter, whose shards may be padded."""
    shape = PaddedShape(draw(st.lists(st.sampled_from([1, 16, 31, 33, 46, 66]), min_size=1, max_size=3)))
    sizes = draw(st.lists(st.sampled_from([1, 2, 3, 4]), min_size=1, max_size=3))
    placements = st.sampled_from([REPLICATE, PARTIAL, *(shard(dim) for dim in range(len(shape)))])
    layouts = st.tuples(*[placements] * len(sizes)).filter(lambda layout: divides(shape, layout, sizes))
    return shape, mesh_of(sizes, [1e9] * len(sizes)), draw(layouts), draw(layouts)


@st.composite
def large_cases(draw: st.DrawFn) -> tuple[tuple[int, ...], Mesh, Layout, Layout]:
    """The same on a mesh of three or four axes, of some tens to hundreds of layouts."""
    sizes = draw(st.lists(st.sampled_from([1, 2, 2, 3, 4]), min_size=3, max_size=4))
    shape = tuple(draw(st.lists(st.sampled_from([2, 3, 4, 8, 12, 16]), min_size=1, max_size=6 - len(sizes))))
    bandwidths = draw(st.lists(st.sampled_from([1e9, 2.5e10, 4e11]), min_size=len(sizes), max_size=len(sizes)))
    mesh = mesh_of(sizes, bandwidths)
    chosen = st.sampled_from(layouts_of(shape, mesh))
    return shape, mesh, draw(chosen), draw(chosen)


def layouts_of(shape: tuple[int, ...], mesh: Mesh) -> list[Layout]:
    """Every layout that a shape can have."""
    placements = [REPLICATE, PARTIAL, *(shard(dim) for dim in range(len(shape)))]
    every = itertools.product(placements, repeat=len(mesh.axes))
    return [layout for layout in every if divides(shape, layout, mesh.sizes)]


def pieces_of(tensor: Array, layout: Layout, mesh: Mesh) -> list[Array]:
    """The piece of each rank; terms of a sum are made up."""
    terms = np.random.default_rng(0)
    pieces = [tensor]
    for placement, size in zip(layout, mesh.sizes, strict=True):
        if placement.is_shard:
            pieces = [part for piece in pieces for part in np.split(piece, size, placement.dim)]
        elif placement == PARTIAL:
            rest = [[terms.integers(-9, 9, piece.shape) for _ in range(size - 1)] for piece in pieces]
            pieces = [
                term for piece, others in zip(pieces, rest, strict=True) for term in (*others, piece - sum(others))
            ]
        else:
            pieces = [piece for piece in pieces for _ in range(size)]
    return pieces


def whole_of(pieces: Sequence[Array], layout: Layout, mesh: Mesh) -> Array:
    """The tensor that the pieces are of. Fails where copies differ."""
    for placement, size in reversed(list(zip(layout, mesh.sizes, strict=True))):
        groups = [pieces[i : i + size] for i in range(0, len(pieces), size)]
        if placement.is_shard:
            pieces = [np.concatenate(group, placement.dim) for group in groups]
        elif placement == PARTIAL:
            pieces = [np.sum(group, axis=0) for group in groups]
        else:
            assert all(np.array_equal(piece, group[0]) for group in groups for piece in group)
            pieces = [group[0] for group in groups]
    return pieces[0]


def played(step: Step, pieces: Sequence[Array], mesh: Mesh) -> list[Array]:
    """The pieces after a step. Every rank sees those of the ranks that differ from it on the axis of the step only."""
    axis = mesh.axes[step.axis]
    after = []
    for rank in range(mesh.size):
        own = rank // axis.stride % axis.size
        group = [_evened(pieces[rank + (i - own) * axis.stride], _cut_dim(step), axis.size) for i in range(axis.size)]
        mine = group[own]
        if step.kind == "all_gather":
            made = np.concatenate(group, step.dim)
        elif step.kind == "all_reduce":
            made = np.sum(group, axis=0)
        elif step.kind == "reduce_scatter":
            made = np.split(np.sum(group, axis=0), axis.size, step.dim)[own]
        elif step.kind == "all_to_all":
            made = np.concatenate([np.split(piece, axis.size, step.to_dim)[own] for piece in group], step.dim)
        elif step.kind == "slice":
            made = np.split(mine, axis.size, step.dim)[own]
        elif step.kind == "zero":
            made = mine if own == 0 else np.zeros_like(mine)
        else:
            assert step.kind == "pad", step
            made = np.concatenate([mine if i == own else np.zeros_like(mine) for i in range(axis.size)], step.dim)
        joined = step.kind in ("all_gather", "all_to_all", "pad") and step.extent >= 0
        after.append(np.take(made, range(step.extent), step.dim) if joined else made)
    return after


def _cut_dim(step: Step) -> int:
    if step.kind == "all_to_all":
        return step.to_dim
    return step.dim if step.kind in ("reduce_scatter", "slice") else -1


def _evened(piece: Array, dim: int, size: int) -> Array:
    """With zeros at the end of a dim, so that it is cut evenly."""
    zeros = [(0, -extent % size if at == dim else 0) for at, extent in enumerate(piece.shape)]
    return np.pad(piece, zeros) if dim >= 0 else piece


def moved(step: Step, mesh: Mesh) -> Fraction:
    """Share of the tensor that a device sends, by the formulas of the collectives."""
    n, message = mesh.sizes[step.axis], Fraction(step.fraction).limit_denominator(10**6)
    rounds = {"all_reduce": 2, "all_gather": 1, "reduce_scatter": 1, "all_to_all": 1}
    return rounds.get(step.kind, 0) * message * Fraction(n - 1, n)


def seconds(steps: Sequence[Step], mesh: Mesh) -> float:
    return sum(float(moved(step, mesh)) / mesh.axes[step.axis].bandwidth for step in steps)


def naive(mesh: Mesh, source: Layout, target: Layout) -> list[Step]:
    """Gather everything from the innermost axis outwards; what is cut afterwards costs nothing."""
    steps = []
    layout = list(source)
    for axis in reversed(range(len(source))):
        held = local_fraction(tuple(layout), mesh.sizes)
        if layout[axis].is_shard:
            steps.append(Step("all_gather", axis, layout[axis].dim, fraction=held * mesh.sizes[axis]))
        elif layout[axis] == PARTIAL:
            steps.append(Step("all_reduce", axis, fraction=held))
        layout[axis] = REPLICATE
    return steps


@pytest.mark.slow
@settings(max_examples=300)
@given(case=cases())
def test_steps_turn_source_into_target(case: tuple[tuple[int, ...], Mesh, Layout, Layout]) -> None:
    shape, mesh, source, target = case
    tensor = np.arange(1, math.prod(shape) + 1).reshape(shape)
    pieces = pieces_of(tensor, source, mesh)
    for step in redistribution(shape, mesh, source, target):
        before = pieces
        pieces = played(step, pieces, mesh)
        message = pieces if step.kind == "all_gather" else before
        assert {piece.size for piece in message} == {round(step.fraction * tensor.size)}, step
        assert (step.kind in COLLECTIVES) == (step.kind not in ("slice", "zero", "pad"))
    assert {piece.shape for piece in pieces} == {local_shape(shape, target, mesh.sizes)}
    assert np.array_equal(whole_of(pieces, target, mesh), tensor)
    if PARTIAL not in target:
        for found, expected in zip(pieces, pieces_of(tensor, target, mesh), strict=True):
            assert np.array_equal(found, expected)


@settings(max_examples=150)
@given(case=padded_cases())
def test_shards_of_parameters_are_padded_with_zeros(case: tuple[tuple[int, ...], Mesh, Layout, Layout]) -> None:
    shape, mesh, source, target = case
    tensor = np.arange(1, math.prod(shape) + 1).reshape(shape)
    pieces = pieces_of(padded(tensor, whole_shape(shape, source, mesh.sizes)), source, mesh)
    for step in redistribution(shape, mesh, source, target):
        size = mesh.sizes[step.axis]
        if step.kind in COLLECTIVES:
            comes = size if step.kind == "all_gather" else 1
            message = {comes * _evened(piece, _cut_dim(step), size).size for piece in pieces}
            assert message == {round(step.fraction * tensor.size)}, step
        pieces = played(step, pieces, mesh)
    assert {piece.shape for piece in pieces} == {local_shape(shape, target, mesh.sizes)}
    assert np.array_equal(whole_of(pieces, target, mesh), padded(tensor, whole_shape(shape, target, mesh.sizes)))


def padded(tensor: Array, shape: tuple[int, ...]) -> Array:
    return np.pad(tensor, [(0, more - extent) for extent, more in zip(tensor.shape, shape, strict=True)])


@pytest.mark.thorough
@pytest.mark.slow
@settings(max_examples=300)
@given(case=cases())
def test_never_worse_than_gathering_everything(case: tuple[tuple[int, ...], Mesh, Layout, Layout]) -> None:
    shape, mesh, source, target = case
    steps = redistribution(shape, mesh, source, target)
    assert seconds(steps, mesh) <= seconds(naive(mesh, source, target), mesh) * (1 + 1e-9)
    assert (steps == ()) == (source == target)


@settings(max_examples=100)
@given(case=cases(), by=st.sampled_from(["R", "S0", "P"]))
def test_a_detour_is_never_quicker(case: tuple[tuple[int, ...], Mesh, Layout, Layout], by: str) -> None:
    """Shortest paths obey the triangle inequality."""
    shape, mesh, source, target = case
    middle = parse_layout(by) * len(mesh.axes)
    if not divides(shape, middle, mesh.sizes):
        return
    detour = seconds(redistribution(shape, mesh, source, middle), mesh)
    detour += seconds(redistribution(shape, mesh, middle, target), mesh)
    assert seconds(redistribution(shape, mesh, source, target), mesh) <= detour * (1 + 1e-9)


def arrived(step: Step, layout: Layout, mesh: Mesh) -> Layout:
    """The layout after a step. Fails where the step cannot be taken."""
    before = layout[step.axis]
    within = layout[step.axis + 1 :]
    after = {
        "all_gather": REPLICATE,
        "all_reduce": REPLICATE,
        "reduce_scatter": shard(max(step.dim, 0)),
        "slice": shard(max(step.dim, 0)),
        "all_to_all": shard(max(step.to_dim, 0)),
        "zero": PARTIAL,
        "pad": PARTIAL,
    }[step.kind]
    if step.kind in ("all_gather", "all_to_all", "pad"):
        assert before == shard(step.dim)
    else:
        assert before == (PARTIAL if step.kind in ("all_reduce", "reduce_scatter") else REPLICATE)
    assert before != after
    assert not any(placement.is_shard and placement in (before, after) for placement in within), "an outer cut moved"
    return (*layout[: step.axis], after, *within)


def neighbours(shape: tuple[int, ...], mesh: Mesh, layout: Layout) -> Iterator[tuple[float, Layout]]:
    """Every layout one step away, and the seconds per byte of the tensor to get there, by the formulas of the
    collectives."""
    held = local_fraction(layout, mesh.sizes)
    for axis, line in enumerate(mesh.axes):
        before, within, share = layout[axis], layout[axis + 1 :], (line.size - 1) / line.size / line.bandwidth
        for after in (REPLICATE, PARTIAL, *(shard(dim) for dim in range(len(shape)))):
            found = (*layout[:axis], after, *within)
            moves_cut = any(placement.is_shard and placement in within for placement in (before, after))
            if after == before or moves_cut or not divides(shape, found, mesh.sizes):
                continue
            if after == PARTIAL or before == REPLICATE:
                yield 0.0, found
            elif before == PARTIAL:
                yield (1 if after.is_shard else 2) * held * share, found
            else:
                yield held * share * (1 if after.is_shard else line.size), found


def shortest(shape: tuple[int, ...], mesh: Mesh, source: Layout, target: Layout) -> float:
    """Seconds per byte of the best path, by Dijkstra."""
    best, order, queue = {source: 0.0}, itertools.count(), [(0.0, 0, source)]
    while queue:
        distance, _, layout = heapq.heappop(queue)
        if layout == target:
            return distance
        for weight, after in neighbours(shape, mesh, layout) if distance == best[layout] else ():
            if distance + weight < best.get(after, math.inf):
                best[after] = distance + weight
                heapq.heappush(queue, (best[after], next(order), after))
    raise AssertionError(f"{format_layout(target)} cannot be reached")


@settings(max_examples=60, deadline=None)
@given(case=large_cases())
def test_on_many_axes_the_path_is_legal_and_the_shortest(case: tuple[tuple[int, ...], Mesh, Layout, Layout]) -> None:
    shape, mesh, source, target = case
    steps, layout = redistribution(shape, mesh, source, target), source
    for step in steps:
        layout = arrived(step, layout, mesh)
        assert divides(shape, layout, mesh.sizes)
    assert layout == target
    assert math.isclose(seconds(steps, mesh), shortest(shape, mesh, source, target), rel_tol=1e-6, abs_tol=1e-18)


@settings(max_examples=30, deadline=None)
@given(case=large_cases(), draw=st.randoms(use_true_random=False))
def test_the_path_does_not_depend_on_what_was_asked_before(
    case: tuple[tuple[int, ...], Mesh, Layout, Layout], draw: random.Random
) -> None:
    shape, mesh, source, target = case
    limits = cut_limits(shape, mesh.sizes)
    expected = Routes(mesh, limits).path(source, target)
    asked, every = Routes(mesh, limits), layouts_of(shape, mesh)
    others = [draw.choice(every) for _ in range(4)]
    for _ in range(3):
        asked.path(draw.choice(others), draw.choice(every))
    together = asked.hops(asked.positions([*others, source]), asked.positions([*others, target]))
    assert asked.path(source, target) == expected
    assert asked.path(others[0], target) == Routes(mesh, limits).path(others[0], target)
    moves = [(step.kind, step.axis, step.fraction) for step in expected]
    taken = [number for number in together.taken[:, -1, -1].tolist() if number < len(together.moves)]
    assert [together.moves[number] for number in taken] == moves


def test_every_process_finds_the_same_path(monkeypatch: pytest.MonkeyPatch) -> None:
    """Another copy of the module, with empty caches, asked in another order."""
    spec = importlib.util.spec_from_file_location("redistribute_elsewhere", redistribute.__file__)
    assert spec is not None
    assert spec.loader is not None
    elsewhere = importlib.util.module_from_spec(spec)
    monkeypatch.setitem(sys.modules, spec.name, elsewhere)
    spec.loader.exec_module(elsewhere)
    mesh, shape = mesh_of((2, 2, 2), (1e9, 1e9, 1e9)), (8, 4)
    every = [
        parse_layout(f"{a},{b},{c}")
        for a in ("R", "P", "S0", "S1")
        for b in ("R", "S0", "S1")
        for c in ("R", "P", "S0")
    ]
    layouts = [layout for layout in every if divides(shape, layout, mesh.sizes)]
    pairs = [(source, target) for source in layouts for target in layouts]
    here = {pair: repr(redistribution(shape, mesh, *pair)) for pair in pairs}
    there = {pair: repr(elsewhere.redistribution(shape, mesh, *pair)) for pair in reversed(pairs)}
    assert here == there


@pytest.mark.parametrize(
    ("source", "target", "expected"),
    [
        ("P,R", "R,R", [Step("all_reduce", 0)]),
        ("P,R", "S0,R", [Step("reduce_scatter", 0, 0)]),
        ("S0,R", "S1,R", [Step("all_to_all", 0, 0, 1, fraction=0.5)]),
        ("S0,S0", "R,R", [Step("all_gather", 1, 0, fraction=0.5), Step("all_gather", 0, 0)]),
        ("R,R", "R,S1", [Step("slice", 1, 1)]),
        ("R,R", "P,R", [Step("zero", 0)]),
        ("R,S1", "R,P", [Step("pad", 1, 1, fraction=0.25)]),
        ("S1,R", "S1,R", []),
    ],
)
def test_well_known_pairs(source: str, target: str, expected: list[Step]) -> None:
    mesh = mesh_of((2, 4), (1e10, 1e10))
    assert list(redistribution((8, 8), mesh, parse_layout(source), parse_layout(target))) == expected


def test_slow_links_are_spared() -> None:
    """The cut of the fast axis moves where it can be, so that the slow axis gathers pieces and not the whole."""
    mesh = mesh_of((2, 8), (1e9, 1e11))
    steps = redistribution((16, 16), mesh, parse_layout("P,P"), parse_layout("R,R"))
    slow = [step for step in steps if step.axis == 0]
    assert [step.kind for step in steps] == ["reduce_scatter", "all_reduce", "all_gather"]
    assert [step.fraction for step in slow] == [1 / 8]


@pytest.mark.parametrize("layout", ["S0", "S0,R", "S2,R", "S1,S1"])
def test_layouts_that_do_not_fit(layout: str) -> None:
    mesh = mesh_of((4, 2), (1e9, 1e9))
    for pair in ((parse_layout(layout), replicated(2)), (replicated(2), parse_layout(layout))):
        with refused(LayoutError, layout, "(6, 4)", "4x2"):
            redistribution((6, 4), mesh, *pair)


@given(case=cases())
def test_text_of_layouts(case: tuple[tuple[int, ...], Mesh, Layout, Layout]) -> None:
    _, _, layout, _ = case
    assert parse_layout(format_layout(layout)) == layout
