"""Every rule, by execution: what it derives for a strategy must recombine to the unsharded call, forward and backward.

All ranks are simulated one after the other with plain tensors. Operands are cut into the derived layouts, each rank
runs the operator on its pieces, and the pieces of the results are put together again: concatenated where the layout
says S, summed where it says P, and found equal where it says R. A gradient of the results, cut in the derived
gradient layouts, must give the gradients of the operands in theirs.
"""

import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch.utils import _pytree as pytree

from planner.fp8_recipes import RECIPES
from planner.graph.fp8 import fp8_operator
from planner.graph.rewriting.masks import COMPOSED_ATTENTION, MASKED_ATTENTION
from planner.sharding.layout import REPLICATE, Layout, format_layout, local_shape, shard
from planner.sharding.legality import legal_strategies
from planner.sharding.mesh import Mesh, MeshAxis
from planner.sharding.rule import (
    FactorKind,
    Rule,
    Strategy,
    derive_layouts,
    local_extents,
    strategy_names,
    tensor_shape,
)
from planner.sharding.rules import RULES
from tests.contract.rule_calls import Example, examples, run

EXAMPLES = tuple(examples())
MESHES = ((2,), (3,), (2, 2), (4, 2))


def mesh_of(sizes: Sequence[int]) -> Mesh:
    strides = [math.prod(sizes[i + 1 :]) for i in range(len(sizes))]
    return Mesh(
        axes=tuple(
            MeshAxis(name=f"axis{i}", size=size, stride=stride, bandwidth=1e9)
            for i, (size, stride) in enumerate(zip(sizes, strides, strict=True))
        )
    )


Pieces = list[torch.Tensor]  # one per rank


def cut(tensor: torch.Tensor, layout: Layout, mesh: Mesh) -> Pieces:
    """The piece of each rank. Terms of a sum are unequal parts of the tensor, so that a missing sum is noticed."""
    pieces = [tensor]
    for placement, size in zip(layout, mesh.sizes, strict=True):
        if placement.is_shard:
            pieces = [part.contiguous() for piece in pieces for part in piece.chunk(size, placement.dim)]
        elif placement.kind == "partial":
            shares = [2.0 * (i + 1) / (size * (size + 1)) for i in range(size)]
            pieces = [piece * share for piece in pieces for share in shares]
        else:
            pieces = [piece.clone() for piece in pieces for _ in range(size)]
    return pieces


def combine(pieces: Pieces, layout: Layout, mesh: Mesh, what: str) -> torch.Tensor:
    """The whole tensor from the pieces of all ranks. Fails where copies differ."""
    for placement, size in reversed(list(zip(layout, mesh.sizes, strict=True))):
        groups = [pieces[i : i + size] for i in range(0, len(pieces), size)]
        if placement.is_shard:
            pieces = [torch.cat(group, placement.dim) for group in groups]
        elif placement.kind == "partial":
            pieces = [torch.stack(group).sum(0) for group in groups]
        else:
            for group in groups:
                for copy in group[1:]:
                    torch.testing.assert_close(copy, group[0], msg=lambda m: f"copies of {what} differ: {m}")
            pieces = [group[0] for group in groups]
    assert len(pieces) == 1
    return pieces[0]


def localised(example: Example, tensors: Sequence[torch.Tensor]) -> tuple[tuple[Any, ...], dict[str, Any]]:
    """Arguments of the call with other tensors in place of its own."""
    leaves, spec = pytree.tree_flatten((example.args, dict(example.kwargs)))
    pieces = iter(tensors)
    args, kwargs = pytree.tree_unflatten([next(pieces) if isinstance(x, torch.Tensor) else x for x in leaves], spec)
    return args, kwargs


Local = Callable[[Example, Rule, Strategy, Mesh, int, list[Pieces]], tuple[torch.Tensor, ...]]


def run_local(
    example: Example, rule: Rule, strategy: Strategy, mesh: Mesh, rank: int, operands: list[Pieces]
) -> tuple[torch.Tensor, ...]:
    """The operator on the pieces of one rank, in the local form that the rule names."""
    if example.op in SPECIAL:
        return SPECIAL[example.op](example, rule, strategy, mesh, rank, operands)
    pieces = [operand[rank] for operand in operands]
    args, kwargs = localised(example, pieces)
    if rule.local_form is not None:
        shape = tensor_shape(rule.results[0], local_extents(rule, strategy, mesh))
        return FORMS[rule.local_form](example, shape, args, kwargs)
    count = math.prod(
        size
        for choice, size in zip(strategy, mesh.sizes, strict=True)
        if choice is not None and choice in rule.mean_over
    )
    results = run(example.op, args, kwargs)
    return tuple(result / count for result in results) if count > 1 else results


def filled_local(
    example: Example, shape: tuple[int, ...], args: tuple[Any, ...], kwargs: dict[str, Any]
) -> tuple[torch.Tensor, ...]:
    """The first list among the arguments is the shape."""
    at = next(at for at, argument in enumerate(args) if isinstance(argument, list))
    return run(example.op, (*args[:at], list(shape), *args[at + 1 :]), kwargs)


FORMS: dict[str, Callable[..., tuple[torch.Tensor, ...]]] = {
    "counted": lambda example, shape, args, kwargs: run(example.op, args, kwargs),
    "expand": lambda example, shape, args, kwargs: (args[0].expand(shape),),
    "reshape": lambda example, shape, args, kwargs: (args[0].reshape(shape),),
    "filled": filled_local,
    "tiled": lambda example, shape, args, kwargs: (
        args[0].repeat(
            [b // a for a, b in zip((1,) * (len(shape) - args[0].dim()) + args[0].shape, shape, strict=True)]
        ),
    ),
}


def embedding_local(
    example: Example, rule: Rule, strategy: Strategy, mesh: Mesh, rank: int, operands: list[Pieces]
) -> tuple[torch.Tensor, ...]:
    """Rows of another rank's part of the vocabulary are zeros."""
    weight, indices = (operand[rank] for operand in operands)
    rows = weight.shape[0]
    start = position(rule, strategy, mesh, rank, "v") * rows
    inside = (indices >= start) & (indices < start + rows)
    padding = example.args[2] - start if len(example.args) > 2 else -1
    padding = padding if 0 <= padding < rows else -1
    found = torch.ops.aten.embedding.default(weight, (indices - start).where(inside, 0), padding)
    return (found.where(inside.unsqueeze(-1), 0.0),)


def cross_entropy_local(
    example: Example, rule: Rule, strategy: Strategy, mesh: Mesh, rank: int, operands: list[Pieces]
) -> tuple[torch.Tensor, ...]:
    """The loss of this rank's rows over the whole vocabulary: the pieces of its row of ranks joined, all but its own
    without gradient.

    An average divides the sum of the local rows by the number of rows that count everywhere.
    """
    logits, labels = operands
    own = mesh.coordinate(rank)
    split = [choice is not None and rule.factors[choice].name == "v" for choice in strategy]
    peers = [
        peer
        for peer in range(mesh.size)
        if all(a == b for a, b, v in zip(mesh.coordinate(peer), own, split, strict=True) if not v)
    ]
    joined = torch.cat([logits[peer] if peer == rank else logits[peer].detach() for peer in peers], dim=1)
    _, _, reduction, ignored, smoothing = (
        (*example.args, None, 1, -100, 0.0)[1:6]
        if len(example.args) == 2
        else ((*example.args, *(None, 1, -100, 0.0)[len(example.args) - 2 :])[1:6])
    )
    loss = F.cross_entropy(joined, labels[rank], reduction="sum", ignore_index=ignored, label_smoothing=smoothing)
    return (loss / (example.args[1] != ignored).sum() if reduction == 1 else loss,)


def experts_local(
    example: Example, rule: Rule, strategy: Strategy, mesh: Mesh, rank: int, operands: list[Pieces]
) -> tuple[torch.Tensor, ...]:
    """The tokens of a rank through the experts of all ranks that it exchanges rows with; rows of experts that none of
    them has are zeros.

    Autograd brings what the experts of another rank get from these tokens to the pieces of that rank, as the backward
    all-to-all does.
    """
    own = mesh.coordinate(rank)
    exchanged = [choice is not None and rule.factors[choice].kind is FactorKind.EXCHANGE for choice in strategy]
    peers = [
        peer
        for peer in range(mesh.size)
        if all(a == b for a, b, swaps in zip(mesh.coordinate(peer), own, exchanged, strict=True) if not swaps)
    ]
    stacked = [
        torch.cat([*(weights[peer] for peer in peers), torch.zeros_like(weights[rank][:1])]) for weights in operands[3:]
    ]
    every = torch.arange(example.args[5].shape[0])
    dims = derive_layouts(rule, strategy).operands[3].forward
    pieces = cut(every, tuple(layout if layout == shard(0) else REPLICATE for layout in dims), mesh)
    held = torch.cat([pieces[peer] for peer in peers])
    x, weights, chosen = (operand[rank] for operand in operands[:3])
    here = chosen.unsqueeze(-1) == held
    place = here.long().argmax(-1).where(here.any(-1), len(held))  # the last expert makes zeros
    gated, rest = example.args[3] is not None, iter(stacked)
    matrices = [next(rest) if gated else None, next(rest), next(rest)]
    biases = dict(zip(("gate_bias", "up_bias") if gated else ("up_bias",), rest, strict=False))
    return run(example.op, (x, weights, place, *matrices, *example.args[6:]), {**dict(example.kwargs), **biases})


def grouped_local(
    example: Example, rule: Rule, strategy: Strategy, mesh: Mesh, rank: int, operands: list[Pieces]
) -> tuple[torch.Tensor, ...]:
    """A convolution, or a norm, of the groups of this rank."""
    args, kwargs = localised(example, [operand[rank] for operand in operands])
    at = 1 if "norm" in example.op else 6
    if "g" in rule.index:
        pieces = math.prod(s for c, s in zip(strategy, mesh.sizes, strict=True) if c == rule.index["g"])
        args = (*args[:at], args[at] // pieces, *args[at + 1 :])
    return run(example.op, args, kwargs)


def batch_norm_local(
    example: Example, rule: Rule, strategy: Strategy, mesh: Mesh, rank: int, operands: list[Pieces]
) -> tuple[torch.Tensor, ...]:
    """The piece of this rank of the norm of all samples: the pieces that its channels are combined from, joined.

    Autograd brings what the statistics make of a piece to the rank that has it, as the backward all-reduce does.
    """
    axes = [a for a, c in enumerate(strategy) if c is not None and rule.factors[c].kind is FactorKind.COMBINED]
    dims = {a: next(d for d, factors in enumerate(rule.operands[0]) if strategy[a] in factors) for a in axes}
    order = {mesh.coordinate(peer): peer for peer in range(mesh.size)}
    joined = list(operands[0])
    for axis in reversed(axes):
        rows = [
            [order[*own[:axis], at, *own[axis + 1 :]] for at in range(mesh.sizes[axis])]
            for own in (mesh.coordinate(peer) for peer in range(mesh.size))
        ]
        joined = [torch.cat([joined[peer] for peer in row], dims[axis]) for row in rows]
    args, kwargs = localised(example, [joined[rank], *(operand[rank] for operand in operands[1:])])
    result, *rest = run(example.op, args, kwargs)
    for axis in axes:
        result = result.chunk(mesh.sizes[axis], dims[axis])[mesh.coordinate(rank)[axis]]
    return result, *rest


def sliding_local(
    example: Example, rule: Rule, strategy: Strategy, mesh: Mesh, rank: int, operands: list[Pieces]
) -> tuple[torch.Tensor, ...]:
    """The piece of this rank of the results that the pieces of all ranks on the axis of a halo have together.

    Autograd brings the gradient of an edge to the rank that has it, as the backward exchange does.
    """
    axes = [a for a, c in enumerate(strategy) if c is not None and rule.factors[c].kind is FactorKind.HALO]
    joined, parts = list(operands[0]), {a: rule.factors[strategy[a] or 0].parts for a in axes}
    read, made = (
        {a: next(d for d, factors in enumerate(dims) if parts[a][at] in factors) for a in axes}
        for at, dims in enumerate((rule.operands[0], rule.results[0]))
    )
    for axis in reversed(axes):
        joined = [torch.cat([joined[peer] for peer in line(mesh, rank, axis)], read[axis]) for rank in range(mesh.size)]
    whole = [joined if at == 0 else pieces for at, pieces in enumerate(operands)]
    local = grouped_local if "conv" in example.op else run_plain
    results = local(example, rule, strategy, mesh, rank, whole)
    for axis in axes:
        at, size = mesh.coordinate(rank)[axis], mesh.sizes[axis]
        results = tuple(result.chunk(size, made[axis])[at] for result in results)
    return results


def run_plain(
    example: Example, rule: Rule, strategy: Strategy, mesh: Mesh, rank: int, operands: list[Pieces]
) -> tuple[torch.Tensor, ...]:
    """The operator as it is on the pieces of a rank."""
    args, kwargs = localised(example, [operand[rank] for operand in operands])
    return run(example.op, args, kwargs)


def line(mesh: Mesh, rank: int, axis: int) -> list[int]:
    """The ranks that differ from one on an axis only, in its order."""
    own = mesh.coordinate(rank)
    order = {mesh.coordinate(peer): peer for peer in range(mesh.size)}
    return [order[(*own[:axis], at, *own[axis + 1 :])] for at in range(mesh.sizes[axis])]


def embedding_bag_local(
    example: Example, rule: Rule, strategy: Strategy, mesh: Mesh, rank: int, operands: list[Pieces]
) -> tuple[torch.Tensor, ...]:
    """Bags of the rows of this rank and of one row of zeros for all others. Averages divide by the size of the bag."""
    args, kwargs = localised(example, [operand[rank] for operand in operands])
    weight, indices, *offsets = args
    rows = weight.shape[0]
    if rows == example.args[0].shape[0]:
        return run(example.op, args, kwargs)
    start, padding = position(rule, strategy, mesh, rank, "v") * rows, kwargs.pop("padding_idx", -1)
    mean, kwargs = kwargs["mode"] == 1, {**kwargs, "mode": 0}
    inside = (indices >= start) & (indices < start + rows) & (indices != padding)
    longer = torch.cat([weight, weight.new_zeros(1, weight.shape[1])])
    (result,) = run(example.op, (longer, (indices - start).where(inside, rows), *offsets), kwargs)
    (sizes,) = run(example.op, (torch.tensor([[0.0], [1.0]]), (indices != padding).long(), *offsets), {"mode": 0, **{
        key: value for key, value in kwargs.items() if key == "include_last_offset"}})  # fmt: skip
    return (result / sizes.clamp(min=1) if mean else result,)


def nll_loss_local(
    example: Example, rule: Rule, strategy: Strategy, mesh: Mesh, rank: int, operands: list[Pieces]
) -> tuple[torch.Tensor, ...]:
    """Minus the elements that this rank has of those that the targets pick, over the number of targets that count."""
    chances, targets = (operand[rank] for operand in operands)
    column = targets - position(rule, strategy, mesh, rank, "v") * chances.shape[1]
    here = (column >= 0) & (column < chances.shape[1]) & (targets != -100)
    loss = -chances.gather(1, column.where(here, 0)[:, None])[:, 0].where(here, 0.0).sum()
    mean = len(example.args) < 4 or example.args[3] == 1
    return (loss / (example.args[1] != -100).sum() if mean else loss,)


def attention_local(
    example: Example, rule: Rule, strategy: Strategy, mesh: Mesh, rank: int, operands: list[Pieces]
) -> tuple[torch.Tensor, ...]:
    """Where query heads are split and key heads are not, those that the query heads of this rank share."""
    pieces = [operand[rank] for operand in operands]
    if "kv" in rule.index and rule.index["r"] in strategy:
        place = 0
        for choice, at, size in zip(strategy, mesh.coordinate(rank), mesh.sizes, strict=True):
            if choice is not None and rule.index["r"] in rule.splits[choice]:
                place = place * size + at
        heads, groups = example.args[0].shape[1], example.args[1].shape[1]
        shared = place * pieces[0].shape[1] // (heads // groups) % pieces[1].shape[1]
        pieces[1:3] = [piece[:, shared : shared + 1] for piece in pieces[1:3]]
    args, kwargs = localised(example, pieces)
    return run(example.op, args, kwargs)


def position(rule: Rule, strategy: Strategy, mesh: Mesh, rank: int, name: str) -> int:
    """Which piece of a factor a rank has."""
    found = 0
    for choice, coordinate, size in zip(strategy, mesh.coordinate(rank), mesh.sizes, strict=True):
        if choice is not None and rule.factors[choice].name == name:
            found = found * size + coordinate
    return found


SPECIAL: dict[str, Local] = {
    "aten.embedding.default": embedding_local,
    "aten.cross_entropy_loss.default": cross_entropy_local,
    "planner.experts.default": experts_local,
    **{f"aten.conv{spatial}d.{form}": sliding_local for spatial in (1, 2, 3) for form in ("default", "padding")},
    **{f"aten.conv_transpose{form}": sliding_local for form in ("1d.default", "2d.input", "3d.input")},
    "aten.max_pool2d.default": sliding_local,
    "aten.avg_pool2d.default": sliding_local,
    "aten.group_norm.default": grouped_local,
    "aten.scaled_dot_product_attention.default": attention_local,
    MASKED_ATTENTION: attention_local,
    COMPOSED_ATTENTION: attention_local,
    "aten._native_batch_norm_legit_functional.default": batch_norm_local,
    "aten._native_batch_norm_legit.no_stats": batch_norm_local,
    "aten.batch_norm.default": batch_norm_local,
    "planner.embedding_bag": embedding_bag_local,
    "aten.nll_loss_nd.default": nll_loss_local,
}


AGREEING = frozenset(map(fp8_operator, RECIPES))
"""Operators whose devices agree on scales while they run: tests/distributed/test_fp8.py runs them on processes."""


def test_every_row_has_an_example() -> None:
    assert {example.op for example in EXAMPLES} == set(RULES) - AGREEING
    assert len({str(example) for example in EXAMPLES}) == len(EXAMPLES)


@pytest.mark.cases(32, 162)
@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_results_and_gradients_recombine(example: Example) -> None:
    rule = example.rule()
    for sizes in MESHES:
        mesh = mesh_of(sizes)
        for strategy in legal_strategies(rule, mesh):
            check(example, rule, strategy, mesh)


def check(example: Example, rule: Rule, strategy: Strategy, mesh: Mesh) -> None:
    where = f"{example} {rule.format()} {strategy_names(rule, strategy)} on {mesh.sizes}"
    layouts = derive_layouts(rule, strategy)
    graded = example.takes_gradients()
    whole = [leaf(tensor, takes) for tensor, takes in zip(example.tensors(), graded, strict=True)]
    expected = run(example.op, *localised(example, whole))
    operands = [cut(t, d.forward, mesh) for t, d in zip(example.tensors(), layouts.operands, strict=True)]
    operands = [[leaf(piece, takes) for piece in pieces] for pieces, takes in zip(operands, graded, strict=True)]
    local = [run_local(example, rule, strategy, mesh, rank, operands) for rank in range(mesh.size)]
    for index, (result, duplex) in enumerate(zip(expected, layouts.results, strict=True)):
        pieces = [of_rank[index] for of_rank in local]
        assert {tuple(p.shape) for p in pieces} == {local_shape(result.shape, duplex.forward, mesh.sizes)}, where
        found = combine([p.detach() for p in pieces], duplex.forward, mesh, where)
        close(found, result.detach(), f"result {index} in {format_layout(duplex.forward)}, {where}")
    check_gradients(example, layouts, mesh, where, whole, expected, operands, local)


def check_gradients(
    example: Example,
    layouts: Any,
    mesh: Mesh,
    where: str,
    whole: list[torch.Tensor],
    expected: tuple[torch.Tensor, ...],
    operands: list[Pieces],
    local: list[tuple[torch.Tensor, ...]],
) -> None:
    flows = [i for i, result in enumerate(expected) if result.requires_grad]
    if not flows:
        return
    torch.manual_seed(1)
    gradients = {i: torch.randn_like(expected[i]) for i in flows}
    torch.autograd.backward([expected[i] for i in flows], [gradients[i] for i in flows])
    cuts = {i: cut(gradients[i], layouts.results[i].gradient, mesh) for i in flows}
    for rank, results in enumerate(local):
        reached = [i for i in flows if results[i].requires_grad]
        torch.autograd.backward([results[i] for i in reached], [cuts[i][rank] for i in reached])
    for index, (tensor, pieces, duplex) in enumerate(zip(whole, operands, layouts.operands, strict=True)):
        if tensor.grad is None:
            assert all(piece.grad is None for piece in pieces)
            continue
        parts = [piece.grad if piece.grad is not None else torch.zeros_like(piece) for piece in pieces]
        found = combine(parts, duplex.gradient, mesh, f"gradient {index}, {where}")
        close(found, tensor.grad, f"gradient of operand {index} in {format_layout(duplex.gradient)}, {where}")


def leaf(tensor: torch.Tensor, takes_gradient: bool) -> torch.Tensor:
    return tensor.detach().clone().requires_grad_(takes_gradient)


def close(found: torch.Tensor, expected: torch.Tensor, what: str) -> None:
    torch.testing.assert_close(found, expected, msg=lambda message: f"{what}: {message}")


@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_local_shapes_follow_from_local_extents(example: Example) -> None:
    """The extents of the factors on a device and the layouts of the tensors say the same."""
    rule = example.rule()
    for sizes in MESHES:
        mesh = mesh_of(sizes)
        for strategy in legal_strategies(rule, mesh):
            extents = local_extents(rule, strategy, mesh)
            layouts = derive_layouts(rule, strategy)
            for tensor, dims, duplex in zip(example.tensors(), rule.operands, layouts.operands, strict=True):
                assert tensor_shape(dims, extents) == local_shape(tensor.shape, duplex.forward, sizes)


def test_every_dim_of_every_example_can_be_split_or_is_known_not_to_be() -> None:
    """A rule that blocks too much is not wrong, but it hides plans: these are all the dims that no strategy splits."""
    blocked = {
        (example.op, factor.name)
        for example in EXAMPLES
        for factor in example.rule().factors
        if factor.kind is FactorKind.BLOCKED
    }
    assert {op for op, _ in blocked} == {
        *("aten._unsafe_view.default", "aten.view.default", "aten.reshape.default"),  # 6 x 4 -> 8 x 3
        *("aten.amax.default", "aten.amin.default", "aten.cumsum.default"),
        *("aten.softmax.int", "aten.log_softmax.int", "aten.layer_norm.default", "aten.rms_norm.default"),
        *("aten.scaled_dot_product_attention.default", MASKED_ATTENTION, COMPOSED_ATTENTION),
        *("aten.tril.default", "aten.triu.default"),
        *("planner.experts.default", "planner.expert_loads.default", "aten.topk.default"),
        *("aten.cat.default", "aten.chunk.default", "aten.narrow.default", "aten.select.int", "aten.slice.Tensor"),
        *("aten.split.Tensor", "aten.split_with_sizes.default", "aten.stack.default", "aten.unbind.int"),
        *("aten.arange.default", "aten.arange.start", "aten.arange.start_step"),
        *("aten.tril_indices.default", "aten.triu_indices.default", "planner.update"),
        *(f"aten.conv{spatial}d.{form}" for spatial in (1, 2, 3) for form in ("default", "padding")),  # spatial dims
        *(f"aten.conv_transpose{form}" for form in ("1d.default", "2d.input", "3d.input")),
        *("aten.max_pool2d.default", "aten.max_pool2d_with_indices.default", "aten.avg_pool2d.default"),
        *("aten.adaptive_avg_pool1d.default", "aten.adaptive_avg_pool2d.default", "aten.group_norm.default"),
        *("planner.embedding_bag", "aten.index.Tensor", "aten.index_select.default"),
        *("planner.marked_ranks.default", "planner.marked_places.default", "planner.picked_rows.default"),
        "planner.expected.default",  # what each sample is to be
        "planner.ctc_loss.default",  # steps, classes and targets
        "planner.gated_rms_norm.default",  # what is averaged over
        "planner.rotary.default",  # heads, whose elements are turned in pairs
        "planner.gated_delta_rule.default",  # its steps, and what of keys is summed over
        *("planner.state_space_scan.default", "planner.selective_scan.default"),  # steps, and elements of a state
        "planner.causal_convolution.default",  # steps and taps
        "planner.index_scores.default",  # elements of a head
        "aten.einsum.default",  # the diagonal of a letter that stands twice
        *("aten.constant_pad_nd.default", "aten.diff.default", "aten.flip.default", "aten.pad.default"),
        *("aten.gather.default", "aten.scatter.value", "aten.roll.default", "aten.eye.default", "aten.eye.m"),
        *("aten.repeat.default", "aten.repeat_interleave.self_int"),
        *("aten.select_scatter.default", "aten.slice_scatter.default"),
        *("aten.lstm.input", "aten.gru.input", "aten.rnn_tanh.input", "aten.rnn_relu.input"),
        *("planner.rows_from_host", "planner.rows_from_servers"),  # rows come whole
    }


def assignments(rule: Rule, mesh: Mesh) -> list[Strategy]:
    """All strategies, legal or not."""
    return list(itertools.product([None, *range(len(rule.factors))], repeat=len(mesh.axes)))


@pytest.mark.parametrize("sizes", [(2,), (2, 2), (4, 2), (2, 4), (3, 2), (2, 3, 2)])
@pytest.mark.parametrize(
    ("source", "target"),
    [((24,), (2, 3, 4)), ((24,), (4, 6)), ((2, 3, 4), (24,)), ((4, 6), (2, 12)), ((8, 3), (2, 12))],
)
def test_legal_on_compound_dims_is_exactly_contiguous(
    source: tuple[int, ...], target: tuple[int, ...], sizes: tuple[int, ...]
) -> None:
    """A strategy of a view is legal if and only if the elements that its factors give to a rank are, on both sides,
    one block of each dim, and the blocks come in the order of the axes."""
    example = Example("aten.view.default", (torch.arange(math.prod(source)).view(source), list(target)))
    rule, mesh = example.rule(), mesh_of(sizes)
    legal = set(legal_strategies(rule, mesh))
    extents = [factor.extent for factor in rule.factors]
    order = example.args[0].view(extents)  # factors of a view follow each other from the outermost to the innermost
    for strategy in assignments(rule, mesh):
        counts = [math.prod(s for c, s in zip(strategy, sizes, strict=True) if c == f) for f in range(len(extents))]
        if any(extent % count for extent, count in zip(extents, counts, strict=True)):
            assert strategy not in legal
            continue
        layouts = derive_layouts(rule, strategy)
        elements = [set(by_factors(order, strategy, mesh, rank).flatten().tolist()) for rank in range(mesh.size)]
        fits = all(
            elements == [set(piece.flatten().tolist()) for piece in cut(whole, duplex.forward, mesh)]
            for whole, duplex in ((example.args[0], layouts.operands[0]), (example.run()[0], layouts.results[0]))
        )
        assert fits == (strategy in legal), strategy


def by_factors(order: torch.Tensor, strategy: Strategy, mesh: Mesh, rank: int) -> torch.Tensor:
    """Elements of a rank when each axis cuts its factor."""
    for choice, coordinate, size in zip(strategy, mesh.coordinate(rank), mesh.sizes, strict=True):
        if choice is not None:
            order = order.chunk(size, choice)[coordinate]
    return order
