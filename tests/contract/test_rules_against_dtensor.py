"""Every rule against PyTorch's own DTensor: the layouts that a rule derives are those that DTensor propagates.

One rank of two, with a process group that sends nothing. For each call and each factor that one axis can split, the
operands become DTensors in the derived layouts and the operator is called on them. DTensor agrees when its results
have the derived layouts and it issued no collective; then the results get gradients in the derived gradient layouts,
and the gradients of the operands are compared likewise. Where DTensor does something else, `DIFFERENCES` says why.
The rules themselves are proved by execution (test_rules_by_execution.py); a difference that goes away makes this test
fail, so that the list stays true.
"""

import fnmatch
from collections.abc import Callable, Iterator, Sequence

import pytest
import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.tensor import DTensor, Partial, Replicate, Shard
from torch.distributed.tensor.debug import CommDebugMode
from torch.distributed.tensor.placement_types import Placement
from torch.testing._internal.distributed.fake_pg import FakeStore
from torch.utils import _pytree as pytree

from planner.sharding.layout import Layout, format_layout
from planner.sharding.legality import legal_strategies
from planner.sharding.mesh import Mesh, MeshAxis
from planner.sharding.rule import OperatorLayouts, derive_layouts, strategy_names
from tests.contract.rule_calls import Example, examples, run

AXIS = Mesh(axes=(MeshAxis(name="axis0", size=2, stride=1, bandwidth=1e9),))

ATTENTION = "aten.scaled_dot_product_attention.default"
ATTENTION_FACTORS = ("b", "g")  # that are compared on the attention of GPUs


def comparable(example: Example) -> bool:
    """Not: what DTensor has not (operators of our own, calls without tensors), and attention that is plain or masked,
    where it searches for a quarter of a minute through decompositions of what it has no rule for (see
    `test_attention`)."""
    return (
        bool(example.tensors())
        and not example.op.startswith("planner.")
        and example.op != "aten.conv2d.default"  # DTensor cuts images into strips and sends their edges
        and (example.op != ATTENTION or example.label in ("causal", "grouped", "one key head"))
    )


EXAMPLES = tuple(example for example in examples() if comparable(example))

# Why DTensor differs, and where: patterns of "call factor direction".
DIFFERENCES = {
    "DTensor has no rule for attention as CPUs compute it": (
        "scaled_dot_product_attention.default-*-causal [bg] forward",
        "scaled_dot_product_attention.default-*-grouped [bg] forward",
        "scaled_dot_product_attention.default-*-one key head [br] forward",
    ),
    "DTensor cannot transpose in place, as these do where samples come first": (
        "gru.input-4x3x6_* b forward",
        "rnn_*.input-4x3x6_* b forward",
    ),
    "DTensor expands and flattens batch dims that broadcast, and cannot flatten a cut inner dim": (
        "matmul.default-2x1x6x8_4x8x2 b1 forward",
    ),
    "DTensor's masked lookup has no masked backward: every device gets the gradient of every row": (
        "embedding.default-* v backward",
    ),
    "DTensor gathers the classes; only its `loss_parallel` context combines them where they are": (
        "cross_entropy_loss.default-* v forward",
        "cross_entropy_loss.default-* v backward",
    ),
    "DTensor sums the number of rows that count in the backward pass again": (
        "cross_entropy_loss.default-12x8_12 n backward",
        "cross_entropy_loss.default-12x8_12-ignored n backward",
        "cross_entropy_loss.default-12x8_12-smoothed n backward",
    ),
    "DTensor sums two terms of the smoothed loss one by one": (
        "cross_entropy_loss.default-12x8_12-smoothed n forward",
    ),
    "DTensor expands to a full copy on every device, where the rule makes each device's piece only": (
        "expand.default-4x1x8 d1 forward",
        "expand.default-6x1-new dim d[02] forward",
        *("sum.default-4x6x8 d? backward", "mean.default-4x6x8 d? backward"),
        *("sum.dim_IntList-4x6x8 d1 backward", "mean.dim-4x6x8 d1 backward"),
        *("sum.dim_IntList-4x6x8-kept d[02] backward", "mean.dim-4x6x8-kept d[02] backward"),
        *("sum.dim_IntList-4x6x8-all d? backward", "mean.dim-4x6x8-all d? backward"),
        *("einsum.default-4x6x8-one summed i backward", "einsum.default-4x6_4x1-* j backward"),
    ),
    "DTensor gathers a tensor before it takes a diagonal, and sums its gradient before": (
        "einsum.default-4x6x6* b forward",
        "einsum.default-4x6x6_4x8-* j backward",
    ),
    "DTensor gathers a dim before it is sliced, split or joined even where that changes nothing": (
        "slice.Tensor-4x6x8-first dim along backward",
        "slice.Tensor-4x6x8-whole along backward",
        "split.Tensor-4x6x8-whole along forward",
        "chunk.default-4x6x8-whole along forward",
        "cat.default-4x6x8-one along forward",
        "slice_scatter.default-4x6x8_4x6x8-whole along forward",
    ),
    "DTensor makes a full copy on every device, where the rule makes each device's piece only": (
        "expand_as.default-* d[02] forward",
        "expand_as.default-* d1 backward",
        "repeat.default-*-new dim d[02] forward",
        "new_zeros.default-* d? forward",
        "new_zeros.default-* in?_? forward",
        "new_full.default-* d? forward",
    ),
    "DTensor gathers the gradient of the result before it is added to rows of the source": (
        "index.Tensor-4x6x8_* i? backward",
        "index_select.default-* i0 backward",
        "gather.default-4x6x8_4x2x8 i1 backward",
        "gather.default-4x6x8_2x6x4-fewer i[02] backward",
    ),
    "DTensor 2.13 has no rule for the operator, or for its backward pass": (
        "hardswish.default-* d? backward",
        "log_sigmoid.default-* d? backward",
        "copy.default-* d? forward",
        "lift_fresh_copy.default-* d? forward",
        "slice_scatter.default-* d? backward",
        "select_scatter.default-* backward",
    ),
    "DTensor gathers a tensor before it is made triangular, whatever dim is cut": ("triu.default-4x6x8* d0 forward",),
    "DTensor 2.13 raises: the backward of select makes its zeros in the local shape and fills them in the global one": (
        "select.int-4x6x8-last d[01] backward",
    ),
    "DTensor 2.13 is wrong: it splits samples only, and takes a convolution of cut channels for a whole one": (
        "conv?d.* [oi] forward",
        "conv_transpose?d.* [oi] forward",
    ),
    "DTensor does not know that groups can be split, and calls the convolution with all of them": (
        "conv?d.* g forward",
        "conv_transpose?d.* g forward",
    ),
    "DTensor cuts pixels of convolutions of images alone; elsewhere it gathers them, or knows nothing of edges": (
        "conv?d.* ?@p? *",
        "conv_transpose?d.* ?@p? *",
        "avg_pool2d.default-* ?@p? *",
        "adaptive_avg_pool2d.default-* [hw] backward",
    ),
    "DTensor has no rule for these backward passes": (
        "avg_pool2d.default-* [nc] backward",
        "group_norm.default-*-no weight n backward",
    ),
    "DTensor gathers samples and spatial dims; the rule combines their statistics where they are": (
        "_native_batch_norm_*-* [nhw] forward",
        "batch_norm.default-* [nw] forward",
    ),
    "DTensor gathers the channels of running statistics that do not change, too": (
        "_native_batch_norm_*_6_6_6_6-evaluation c backward",
        "_native_batch_norm_legit_no_training.default-* c backward",
        "batch_norm.default-*-evaluation c backward",
    ),
    "DTensor does not know that groups can be split, and norms samples with the global number of them": (
        "group_norm.default-4x6x2_6_6* n backward",
        "group_norm.default-*-no weight g forward",
    ),
    "DTensor gathers the classes of this loss, or counts its rows again": (
        "nll_loss_nd.default-* v forward",
        "nll_loss_nd.default-12x8_12 n backward",
        "nll_loss_nd.default-12x8_12-ignored n backward",
    ),
    "DTensor broadcasts to full copies on every device, where the rule makes each device's piece only": (
        "broadcast_tensors.default-* d[01] forward",
    ),
}


@pytest.fixture(scope="module")
def devices() -> Iterator[DeviceMesh]:
    dist.init_process_group("fake", rank=0, world_size=2, store=FakeStore())  # type: ignore[no-untyped-call]
    yield init_device_mesh("cpu", (2,))
    dist.destroy_process_group()


def placed(tensor: torch.Tensor, layout: Layout, devices: DeviceMesh, takes_gradient: bool = True) -> DTensor:
    """A DTensor of the type of `tensor`; its content is that of the first device."""
    placement = layout[0]
    local = tensor.chunk(2, placement.dim)[0] if placement.is_shard else tensor
    kinds: dict[str, Callable[[], Placement]] = {"replicate": Replicate, "partial": Partial}
    wanted = Shard(placement.dim) if placement.is_shard else kinds[placement.kind]()
    whole = tensor.contiguous()
    made = DTensor.from_local(
        local.detach().clone().contiguous(),
        devices,
        [wanted],
        run_check=False,
        shape=whole.shape,
        stride=whole.stride(),
    )
    return made.requires_grad_(takes_gradient and tensor.is_floating_point())


def written(tensors: Sequence[object]) -> list[str]:
    """Layouts as the planner writes them."""
    return [_written(tensor) for tensor in tensors]


def _written(tensor: object) -> str:
    if not isinstance(tensor, DTensor):
        return "no DTensor"
    placement = tensor.placements[0]
    return f"S{placement.dim}" if isinstance(placement, Shard) else "P" if placement.is_partial() else "R"


def outcomes(example: Example, layouts: OperatorLayouts, devices: DeviceMesh) -> Iterator[tuple[str, str | None]]:
    """Per direction what DTensor did other than the rule says; None where it did the same."""
    triples = zip(example.tensors(), layouts.operands, example.takes_gradients(), strict=True)
    operands = [placed(tensor, duplex.forward, devices, takes) for tensor, duplex, takes in triples]
    leaves, spec = pytree.tree_flatten((example.args, dict(example.kwargs)))
    given = iter(operands)
    args, kwargs = pytree.tree_unflatten([next(given) if isinstance(x, torch.Tensor) else x for x in leaves], spec)
    results: tuple[torch.Tensor, ...] = ()

    def forward() -> list[str]:
        nonlocal results
        results = run(example.op, args, kwargs)
        return written(results)

    fault = difference(forward, [duplex.forward for duplex in layouts.results])
    yield "forward", fault
    flows = [i for i, result in enumerate(results) if result.requires_grad]
    if fault or not flows:
        return
    gradients = [placed(torch.ones(results[i].shape), layouts.results[i].gradient, devices) for i in flows]

    def backward() -> list[str]:
        torch.autograd.backward(
            [results[i] for i in flows],
            [g.detach().to(results[i].dtype) for g, i in zip(gradients, flows, strict=True)],
        )
        return written([operand.grad for operand in operands if operand.requires_grad])

    expected = [d.gradient for d, operand in zip(layouts.operands, operands, strict=True) if operand.requires_grad]
    yield "backward", difference(backward, expected)


def difference(call: Callable[[], list[str]], expected: Sequence[Layout]) -> str | None:
    with CommDebugMode() as seen:
        try:
            found = call()
        except (RuntimeError, NotImplementedError) as error:
            return f"raises {error}"
    wanted = [format_layout(layout) for layout in expected]
    if found != wanted or seen.get_total_counts():
        return f"gives {found} after {seen.get_total_counts()} collectives, the rule {wanted}"
    return None


def reasons(key: str) -> list[str]:
    return [why for why, patterns in DIFFERENCES.items() if any(fnmatch.fnmatchcase(key, p) for p in patterns)]


@pytest.mark.cases(30, 197)
@pytest.mark.slow
@pytest.mark.parametrize("example", EXAMPLES, ids=str)
def test_dtensor_propagates_the_same_layouts(example: Example, devices: DeviceMesh) -> None:
    rule = example.rule()
    for strategy in legal_strategies(rule, AXIS)[1:]:
        for direction, fault in outcomes(example, derive_layouts(rule, strategy), devices):
            key = f"{example} {strategy_names(rule, strategy)[0]} {direction}"
            explained = reasons(key)
            assert fault is None or explained, f"{key}: DTensor {fault}"
            assert fault is not None or not explained, f"{key}: DTensor agrees now; take it off the list: {explained}"


@pytest.mark.parametrize("factor", ATTENTION_FACTORS)
@pytest.mark.usefixtures("devices")
def test_attention(factor: str) -> None:
    """DTensor knows the attention of GPUs, which has no implementation here: on tensors without storage."""
    example = next(e for e in examples() if e.op == ATTENTION)
    rule = example.rule()
    layouts = derive_layouts(rule, (rule.index[factor],))
    devices = DeviceMesh("cpu", torch.arange(2))
    pairs = zip(example.tensors(), layouts.operands, strict=True)
    query, key, value = (placed(tensor.to("meta"), duplex.forward, devices).detach() for tensor, duplex in pairs)
    with CommDebugMode() as seen:
        made = torch.ops.aten._scaled_dot_product_flash_attention.default(query, key, value)
        result, sums, _, _, query_length, key_length, seed, offset, _ = made
        gradients = torch.ops.aten._scaled_dot_product_flash_attention_backward.default(
            result, query, key, value, result, sums, None, None, query_length, key_length, 0.0, False, seed, offset
        )
    assert written([result]) == [format_layout(duplex.forward) for duplex in layouts.results]
    assert written(gradients) == [format_layout(duplex.gradient) for duplex in layouts.operands]
    assert not seen.get_total_counts()


def test_every_difference_is_about_some_call() -> None:
    keys = [
        f"{example} {strategy_names(rule, strategy)[0]} {direction}"
        for example in EXAMPLES
        for rule in [example.rule()]
        for strategy in legal_strategies(rule, AXIS)[1:]
        for direction in ("forward", "backward")
    ]
    unused = [p for patterns in DIFFERENCES.values() for p in patterns if not fnmatch.filter(keys, p)]
    assert not unused


def test_cumsum_along_a_cut_dim_is_wrong_in_dtensor(devices: DeviceMesh) -> None:
    """Why the rule blocks the dim: DTensor 2.13 claims to keep it cut and lets every device sum its own piece."""
    x = placed(torch.ones(4, 6), (AXIS_CUT,), devices)
    result = x.detach().cumsum(-1)
    assert _written(result) == "S1"
    assert result.to_local()[0].tolist() == [
        1,
        2,
        3,
    ]  # of the first device; the second begins at 1 again, without a collective


AXIS_CUT = derive_layouts(EXAMPLES[0].rule(), (EXAMPLES[0].rule().index["i"],)).operands[1].forward[0]
