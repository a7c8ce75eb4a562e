"""Halos: what a stencil reads of the neighbouring pieces, which cuts it allows, and what is sent for it."""

from itertools import product

import pytest
import torch

from planner.graph.call import Call
from planner.graph.operator_graph import TensorType
from planner.pricing.inner_messages import inner_messages, joined_bytes
from planner.sharding.halo import Stencil, stencils
from planner.sharding.legality import legal_strategies, strategy_fault
from planner.sharding.mesh import Mesh, MeshAxis, Order
from planner.sharding.rule import Rule, named_strategy
from planner.sharding.rules import RULES
from planner.sharding.zigzag import order_fault

CASES = [
    (Stencil(size=size, stride=stride, padding=padding, dilation=dilation), pieces * length * stride, pieces)
    for size, stride, dilation, pieces, length in product((1, 2, 3, 5), (1, 2, 3), (1, 2), (2, 3), (2, 4))
    for padding in range(3)
]


def results_of(stencil: Stencil, extent: int) -> int:
    assert stencil.padding is not None
    return (extent + 2 * stencil.padding - (stencil.size - 1) * stencil.dilation - 1) // stencil.stride + 1


def test_a_halo_is_what_every_piece_reads_of_its_neighbours() -> None:
    cut = 0
    for stencil, extent, pieces in CASES:
        made = results_of(stencil, extent)
        halo = stencil.halo(extent, made)
        if halo is None:
            continue
        cut += 1
        own, each = extent // pieces, made // pieces
        for place in range(pieces):
            read = [
                result * stencil.stride - (stencil.padding or 0) + at * stencil.dilation
                for result in range(place * each, (place + 1) * each)
                for at in range(stencil.size)
            ]
            assert place * own - min(read) == halo.before, stencil
            assert max(0, max(read) + 1 - (place + 1) * own) == halo.after, stencil
    assert cut > len(CASES) / 5


def test_dims_that_no_halo_cuts_evenly_have_none() -> None:
    assert Stencil(size=3, stride=1, padding=0, dilation=1).halo(16, 14) is None
    assert Stencil(size=1, stride=1, padding=1, dilation=1).halo(16, 18) is None
    assert [one.padding for one in stencils((3, 4), 1, "same")] == [1, None]  # one more behind than before


def mesh_of(*sizes: int, order: Order = "contiguous") -> Mesh:
    named = [(f"axis{at}", size) for at, size in enumerate(sizes)]
    return Mesh(
        axes=tuple(MeshAxis(name=name, size=size, stride=1, bandwidth=1e9, order=order) for name, size in named)
    )


def rule_of(op: str, *shapes: tuple[int, ...], rest: tuple[object, ...]) -> Rule:
    *operands, result = (TensorType(shape=shape, dtype="bfloat16") for shape in shapes)
    return RULES[op].build(Call(op=op, arguments=(*operands, *rest), keywords=(), results=(result,)))  # type: ignore[arg-type]


STEM = rule_of("aten.conv2d.default", (8, 4, 32, 64), (6, 4, 7, 7), (8, 6, 16, 32), rest=(None, (2, 2), (3, 3)))


def test_an_edge_goes_to_each_neighbour_and_back_for_a_gradient() -> None:
    mesh, strategy = mesh_of(4), named_strategy(STEM, ("h@ph",), "")
    row = 8 * 4 * 64 * 2  # samples, channels, columns, bytes
    sent = inner_messages(STEM, strategy, mesh)
    assert [(one.message.kind, one.message.axis, one.message.nbytes) for one in sent] == [
        ("send_recv", 0, 3 * row), ("send_recv", 0, 2 * row)]  # fmt: skip
    assert [(one.forward, one.backward) for one in sent] == [(1, 1), (1, 1)]
    assert [one.backward for one in inner_messages(STEM, strategy, mesh, (1,))] == [0, 0]  # an image has no gradient
    assert joined_bytes(STEM, strategy, mesh) == 5 * row
    assert inner_messages(STEM, named_strategy(STEM, ("n",), ""), mesh) == ()


def test_pieces_that_are_shorter_than_the_halo_are_handed_on() -> None:
    """Of 32 rows on 16 devices each has 2: 3 before come as 2 and 1, and 2 behind as one piece. On either side of a
    stencil 14 apart are 28 rows, 7 pieces of 4; the one piece of 16 that is beside another has fewer."""
    row = 8 * 4 * 64 * 2
    sent = inner_messages(STEM, named_strategy(STEM, ("h@ph",), ""), mesh_of(16))
    assert [(one.message.nbytes, one.forward, one.backward) for one in sent] == [
        (2 * row, 1, 1), (row, 1, 1), (2 * row, 1, 1)]  # fmt: skip
    wide = rule_of("aten.conv1d.default", (2, 4, 32), (4, 4, 3), (2, 4, 32), rest=(None, (1,), (28,), (28,)))
    cut = named_strategy(wide, ("w@pw",), "")
    assert [(one.message.nbytes, one.forward) for one in inner_messages(wide, cut, mesh_of(8))] == [
        (4 * 2 * 4 * 2, 7), (4 * 2 * 4 * 2, 7)]  # fmt: skip
    assert joined_bytes(wide, cut, mesh_of(8)) == 56 * 2 * 4 * 2
    assert cut in legal_strategies(wide, mesh_of(8))
    fault = strategy_fault(wide, cut, mesh_of(2))
    assert "axis0 of size 2 leaves 16 of factor 'w' beside a piece, and 28 are read beside it; leave it whole" in str(
        fault
    )
    assert cut not in legal_strategies(wide, mesh_of(2))


def test_patches_and_pooling_without_overlap_send_nothing() -> None:
    patches = rule_of("aten.conv2d.default", (8, 4, 32, 32), (6, 4, 4, 4), (8, 6, 8, 8), rest=(None, (4, 4)))
    pool = rule_of("aten.max_pool2d.default", (8, 4, 32, 32), (8, 4, 16, 16), rest=((2, 2),))
    for rule in (patches, pool):
        assert inner_messages(rule, named_strategy(rule, ("h@ph",), ""), mesh_of(4)) == ()
        assert strategy_fault(rule, named_strategy(rule, ("h@ph", "w@pw"), ""), mesh_of(2, 2)) is None


@pytest.mark.parametrize(
    ("sizes", "names", "said"),
    [
        ((2, 2), ("h@ph", "w@pw"), "axis0 and axis1 both split a dim whose pieces are read with their neighbours'"),
        ((3,), ("h@ph",), "axis0 of size 3 does not divide factor 'h' of extent 32"),
        ((4,), ("h",), "axis0 splits factor 'h', which cannot be split; splittable factors: n, o, i, h@ph, w@pw"),
    ],
)
def test_what_cannot_be_cut_is_said(sizes: tuple[int, ...], names: tuple[str, ...], said: str) -> None:
    strategy = named_strategy(STEM, names, "")
    assert said in str(strategy_fault(STEM, strategy, mesh_of(*sizes)))
    assert strategy not in legal_strategies(STEM, mesh_of(*sizes))


def test_legal_strategies_are_those_without_a_fault() -> None:
    for sizes in ((2,), (8,), (2, 2), (4, 2)):
        legal = set(legal_strategies(STEM, mesh_of(*sizes)))
        every = product((None, *range(len(STEM.factors))), repeat=len(sizes))
        assert legal == {strategy for strategy in every if strategy_fault(STEM, strategy, mesh_of(*sizes)) is None}


def test_neighbours_in_zigzag_order_are_none() -> None:
    rule = rule_of("aten.conv1d.default", (2, 4, 32), (4, 4, 3), (2, 4, 32), rest=(None, (1,), (1,)))
    strategy, tensors = named_strategy(rule, ("w@pw",), ""), [(rule.operands[0], {2}), (rule.results[0], {2})]
    fault = order_fault(rule, strategy, mesh_of(2, order="zigzag"), tensors)
    assert "neighbours do not have what comes before and behind a piece of factor 'w'" in str(fault)
    assert order_fault(rule, strategy, mesh_of(2), tensors) is None


def test_means_at_an_edge_of_fewer_elements_are_not_cut() -> None:
    same, x = ((4, 4, 8, 8),) * 2, torch.ones(1, 1, 8, 8)
    padded = rule_of("aten.avg_pool2d.default", *same, rest=((3, 3), (1, 1), (1, 1), False, True))
    fewer = rule_of("aten.avg_pool2d.default", *same, rest=((3, 3), (1, 1), (1, 1), False, False))
    assert "h@ph" in padded.index
    assert "h@ph" not in fewer.index
    assert torch.nn.functional.avg_pool2d(x, 3, 1, 1, count_include_pad=False)[0, 0, 0, 0] == 1
