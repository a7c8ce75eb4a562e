"""What a traced graph has in it, and what is said where a model cannot be traced."""

from collections.abc import Callable
from functools import partial
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from planner.errors import ModelError, RuleError
from planner.graph.operator_graph import OperatorGraph, Parameter, TensorType, ValueRef
from planner.graph.torch_operators import resolve
from planner.graph.trace import trace
from planner.graph.tracing.exported import tensor_type
from planner.models.zoo import ZOO, build_model
from planner.sharding.rescale import rescale_batch
from planner.sharding.rules import rule_of
from tests.refusals import refused

WIDTH = 4


class Net(nn.Module):
    """A linear layer and whatever `body` does with it; `parts` become attributes."""

    def __init__(self, body: Callable[..., Any], **parts: Any) -> None:
        super().__init__()
        self.linear = nn.Linear(WIDTH, WIDTH)
        self.body = body
        for name, part in parts.items():
            setattr(self, name, part)

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.body(self, *args, **kwargs)


def traced(body: Callable[..., Any], **parts: Any) -> OperatorGraph:
    return trace(Net(body, **parts), (torch.ones(2, WIDTH),))


def ops(graph: OperatorGraph) -> list[str]:
    return [op.op.removeprefix("aten.") for op in graph.operators]


ATTENTION = [
    *["linear.default", "unflatten.int", "transpose.int"] * 3,
    *["planner.rotary.default"] * 2,
    *["scaled_dot_product_attention.default", "transpose.int", "flatten.using_ints", "linear.default"],
]
LLAMA_BLOCK = [
    "rms_norm.default",
    *ATTENTION,
    "add.Tensor",
    "rms_norm.default",
    *["linear.default", "silu.default", "linear.default", "mul.Tensor", "linear.default"],
    "add.Tensor",
]
GPT_BLOCK = [
    *["layer_norm.default", "linear.default", "unflatten.int", "transpose.int", "chunk.default"],
    *["scaled_dot_product_attention.default", "transpose.int", "flatten.using_ints", "linear.default", "add.Tensor"],
    *["layer_norm.default", "linear.default", "gelu.default", "linear.default", "add.Tensor"],
]
HEAD = ["linear.default", "to.dtype", "flatten.using_ints", "flatten.using_ints", "cross_entropy_loss.default"]


def depth(name: str) -> int:
    return int(dict(ZOO[name].dimensions)["num_layers"])


def test_operators_of_llama() -> None:
    built = build_model("llama-tiny", dtype="bfloat16")
    graph = trace(built.module, built.args)
    assert sorted(ops(graph)[:1] + ops(graph)[-5:]) == sorted(["embedding.default", *HEAD])
    assert sorted(ops(graph)[1:-5]) == sorted([*LLAMA_BLOCK * depth("llama-tiny"), "rms_norm.default"])
    assert graph.buffers == ("model.cos", "model.sin")
    assert graph.types[graph.loss] == TensorType(shape=(), dtype="float32")
    assert graph.types["lm_head/linear"] == TensorType(
        shape=(2, built.sequence_length, built.bounds[0]), dtype="bfloat16"
    )
    assert graph.parameter_count() == sum(p.numel() for p in built.module.parameters())


def test_operators_of_gpt() -> None:
    built = build_model("gpt-tiny", dtype="float32")
    graph = trace(built.module, built.args)
    start = ["arange.default", "embedding.default", "embedding.default", "add.Tensor"]
    assert sorted(ops(graph)[:4]) == sorted(start)
    assert ops(graph)[4:] == [*GPT_BLOCK * depth("gpt-tiny"), "layer_norm.default", *HEAD]
    assert [op.name for op in graph.operators if op.module == "h.1.mlp_proj"] == ["h.1.mlp_proj/linear"]


@pytest.mark.slow
@pytest.mark.thorough
def test_heads_of_fused_attention_come_together_without_a_copy() -> None:
    """As its kernels store them on devices; not so where other dims are swapped."""

    def attention(net: Net, x: torch.Tensor, *, dims: tuple[int, int]) -> torch.Tensor:
        heads = net.linear(x).view(2, 3, 2, 2).transpose(1, 2)
        result = torch.nn.functional.scaled_dot_product_attention(heads, heads, heads)
        assert result.transpose(1, 2).is_contiguous() or x.is_meta
        return result.transpose(*dims).flatten(2).sum()

    for dims, op_class in (((1, 2), "view"), ((2, 3), "copy")):
        graph = trace(Net(partial(attention, dims=dims)), (torch.ones(2, 3, WIDTH),))
        at = max(
            i for i, op in enumerate(graph.operators) if op.op in ("aten.flatten.using_ints", "aten.reshape.default")
        )
        assert rule_of(graph, graph.operators[at]).op_class == op_class


@pytest.mark.cases(4)
@pytest.mark.slow
@pytest.mark.parametrize("name", [name for name in ZOO if name.endswith("-tiny")])
def test_every_operator_of_the_zoo_has_a_rule_and_resolves(name: str) -> None:
    built = build_model(name, dtype="float32")
    graph = trace(built.module, built.args)
    for op in graph.operators:
        assert op.op.startswith("planner.") or callable(resolve(op.op))
        assert len(rule_of(graph, op).operands) == len(op.operands)


def test_graph_does_not_depend_on_where_the_model_lives() -> None:
    graphs = []
    for device in ("meta", "cpu"):
        built = build_model("llama-tiny", dtype="float32", device=device)
        graphs.append(trace(built.module, built.args))
    assert graphs[0].fingerprint() == graphs[1].fingerprint()


def test_fingerprint_tells_graphs_apart() -> None:
    body = [
        lambda m, x: m.linear(x).mean(),
        lambda m, x: (m.linear(x) * 2).mean(),
        lambda m, x: (m.linear(x) * 3).mean(),
    ]
    prints = {traced(b).fingerprint() for b in body}
    prints.add(trace(Net(body[0]), (torch.ones(3, WIDTH),)).fingerprint())
    prints.add(trace(Net(body[0]).double(), (torch.ones(2, WIDTH).double(),)).fingerprint())
    prints.add(trace(Net(body[0], spare=nn.Linear(2, 2)), (torch.ones(2, WIDTH),)).fingerprint())
    assert len(prints) == 6
    assert traced(body[0]).fingerprint() in prints


def test_no_tensor_is_computed_or_changed() -> None:
    module = Net(lambda m, x: m.linear(x).mean())
    before = module.linear.weight.detach().clone()
    x = torch.full((2, WIDTH), float("nan"))
    graph = trace(module, (x,))
    assert graph.inputs == ("args_0",)
    assert module.linear.weight.equal(before)
    assert type(module.linear.weight) is nn.Parameter
    assert module.linear.weight.grad is None


# parameters and buffers


KINDS = ("full", "sliding", "global", "local", "ring", "window", "chunked", "linear")


def test_sets_of_strings_are_gone_over_in_order() -> None:
    """Their own order is another one in each process, and the graph must not be."""

    def body(net: Net, x: torch.Tensor) -> torch.Tensor:
        assert isinstance(net.kinds, set)
        assert isinstance({1}, set)
        assert not isinstance([], set)
        for kind in (*set(KINDS), *net.kinds):
            x = x + KINDS.index(kind)
        return net.linear(x).sum()

    kinds = set(KINDS)
    net = Net(body, kinds=kinds)
    graph = trace(net, (torch.ones(2, WIDTH),))
    added = [KINDS[op.arguments[1]] for op in graph.operators if op.op == "aten.add.Tensor"]  # type: ignore[index]
    assert added == sorted(KINDS) * 2
    assert net.kinds is kinds
    assert "set" not in globals()


def test_blocks_that_hold_sets_are_traced_once() -> None:
    class Block(nn.Module):
        traced = 0

        def __init__(self) -> None:
            super().__init__()
            self.linear, self.kinds = nn.Linear(WIDTH, WIDTH), set(KINDS)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            Block.traced += 1
            return self.linear(x) * len(set(self.kinds))

    blocks = nn.Sequential(*(Block() for _ in range(4)))
    graph = traced(lambda net, x: net.blocks(x).sum(), blocks=blocks)
    assert Block.traced == 1
    assert ops(graph).count("linear.default") == 4


def test_tied_weights_are_one_parameter() -> None:
    built = build_model("gpt-tiny", dtype="float32")
    graph = trace(built.module, built.args)
    assert graph.parameters[0] == Parameter(name="wte.weight", aliases=("lm_head.weight",))
    users = [graph.operators[i].name for i in graph.consumers["wte.weight"]]
    assert users == ["wte/embedding", "lm_head/linear"]
    assert "lm_head.weight" not in graph.types


def test_unused_parameters_are_kept() -> None:
    graph = traced(lambda m, x: m.linear(x).mean(), spare=nn.Linear(3, 5))
    assert [p.name for p in graph.parameters] == ["linear.weight", "linear.bias", "spare.weight", "spare.bias"]
    assert graph.types["spare.weight"].shape == (5, 3)
    assert "spare.weight" not in graph.consumers
    assert graph.parameter_count() == 4 * 4 + 4 + 15 + 5


def test_frozen_parameters_are_marked_and_not_differentiable() -> None:
    frozen = nn.Linear(WIDTH, WIDTH).requires_grad_(False)
    graph = traced(lambda m, x: m.linear(m.frozen(x)).mean(), frozen=frozen)
    assert {p.name: p.trainable for p in graph.parameters} == {
        "linear.weight": True, "linear.bias": True, "frozen.weight": False, "frozen.bias": False,
    }  # fmt: skip
    assert graph.differentiable == {"linear.weight", "linear.bias", "linear/linear", "mean"}


def test_what_is_broadcast_beside_something_trained_has_no_gradient_itself() -> None:
    graph = traced(lambda m, x: torch.nn.functional.mse_loss(m.linear(x), 2 * x))
    (broadcast,) = (op for op in graph.operators if op.op == "aten.broadcast_tensors.default")
    assert [name in graph.differentiable for name in broadcast.results] == [True, False]
    assert graph.loss in graph.differentiable


def test_integer_parameters() -> None:
    order = nn.Parameter(torch.tensor([1, 0]), requires_grad=False)
    graph = traced(lambda m, x: torch.nn.functional.embedding(m.order, m.linear(x)).mean(), order=order)
    assert graph.types["order"] == TensorType(shape=(2,), dtype="int64")
    assert "order" not in graph.differentiable


@pytest.mark.parametrize("used", [True, False])
def test_a_parameter_without_elements_is_refused(used: bool) -> None:
    """By its name and shape, before anything is priced or cut."""
    weight = nn.Parameter(torch.empty(0, WIDTH))

    def forward(module: Any, x: torch.Tensor) -> torch.Tensor:
        made = module.linear(x)
        return (torch.cat([made, nn.functional.linear(x, module.empty)], dim=-1) if used else made).mean()

    with refused(ModelError, "'empty'", "Net", (0, WIDTH), "no elements"):
        traced(forward, empty=weight)


def test_all_frozen_is_refused() -> None:
    module = Net(lambda m, x: m.linear(x).mean()).requires_grad_(False)
    with refused(ModelError, "Net", "trainable"):
        trace(module, (torch.ones(2, WIDTH),))


def test_buffers_of_blocks() -> None:
    class Block(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.linear = nn.Linear(WIDTH, WIDTH)
            self.register_buffer("table", torch.ones(WIDTH), persistent=False)

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x) * self.table

    module = Net(lambda m, x: m.blocks(x).mean(), blocks=nn.Sequential(*(Block() for _ in range(4))))
    graph = trace(module, (torch.ones(2, WIDTH),))
    assert graph.buffers == tuple(f"blocks.{i}.table" for i in range(4))
    assert [op.operands[1] for op in graph.operators if op.op == "aten.mul.Tensor"] == list(graph.buffers)


def test_constants_become_buffers() -> None:
    graph = traced(lambda m, x: (m.linear(x) * torch.tensor([1.0, 2.0, 3.0, 4.0])).mean())
    assert len(graph.buffers) == 1
    assert graph.types[graph.buffers[0]].shape == (4,)
    assert all(rule_of(graph, op) for op in graph.operators)


# inputs and the loss


def test_one_tensor_given_twice_is_two_inputs() -> None:
    x = torch.ones(2, WIDTH)
    graph = trace(Net(lambda m, a, b: m.linear(a * 2 + b).mean()), (x, x))
    assert len(graph.inputs) == 2
    assert [op.operands for op in graph.operators[:2]] == [(graph.inputs[0],), ("mul", graph.inputs[1])]


def test_keywords_nested_and_plain_arguments() -> None:
    x = torch.ones(2, WIDTH)
    body = lambda m, pair, *, factor, more: m.linear(pair["x"] * factor + more[1]).mean()  # noqa: E731
    graph = trace(Net(body), ({"x": x, "unused": x},), {"factor": 3, "more": [x, x]})
    assert len(graph.inputs) == 4
    assert len(set(graph.inputs) & set(graph.consumers)) == 2
    assert graph.operators[0].arguments[1] == 3


@pytest.mark.parametrize(
    "wrap",
    [
        lambda loss: loss,
        lambda loss: (loss, {"logits": loss * 2}),
        lambda loss: [loss],
        lambda loss: SimpleNamespace(loss=loss, logits=None),
    ],
)
def test_where_the_loss_is_found(wrap: Callable[[torch.Tensor], Any]) -> None:
    graph = traced(lambda m, x: wrap(m.linear(x).mean()))
    assert graph.loss == "mean"


def test_results_that_nobody_reads_are_kept_by_name() -> None:
    graph = traced(lambda m, x: m.linear(x).chunk(2, dim=-1)[0].mean())
    assert graph.operators[1].results == ("chunk#0", "chunk#1")
    assert graph.operators[2].operands == ("chunk#0",)


@pytest.mark.parametrize(
    ("body", "returned"),
    [
        (lambda m, x: m.linear(x), ("(2, 4)",)),
        (lambda m, x: {"out": x}, ("dict", "dict")),
        (lambda m, x: 1.0, ("float",)),
        (lambda m, x: None, ("NoneType",)),
        (lambda m, x: SimpleNamespace(loss=None), ("NoneType",)),
        (lambda m, x: (), ("tuple", "tuple")),
    ],
)
def test_no_scalar_loss(body: Callable[..., Any], returned: tuple[str, ...]) -> None:
    with refused(ModelError, "Net", *returned):
        traced(body)


# operators in place, names, errors


def test_operators_in_place_become_their_plain_form() -> None:
    def body(m: Any, x: torch.Tensor) -> torch.Tensor:
        h = m.linear(x)
        view = h[:, :2]
        view += 1
        return torch.relu_(h).mean()

    graph = traced(body)
    assert not [op.op for op in graph.operators if op.op.split(".")[1].endswith("_")]
    relu = next(op for op in graph.operators if op.op == "aten.relu.default")
    assert relu.operands != ("linear/linear",)  # reads what the addition left, not the linear layer
    assert ValueRef("linear/linear") in graph.operators[1].arguments


def test_names_are_unique_and_tell_the_module() -> None:
    graph = traced(lambda m, x: (m.linear(m.linear(x) * 2) * 3).mean())
    assert [op.name for op in graph.operators] == ["linear/linear", "mul", "linear/linear_2", "mul_2", "mean"]
    assert [op.module for op in graph.operators] == ["linear", "", "linear", "", ""]


def test_changed_inputs_are_refused() -> None:
    with refused(ModelError, "Net", "args_0"):
        traced(lambda m, x: m.linear(x.mul_(2)).mean())


def test_branch_on_a_value_names_the_line() -> None:
    def body(m: Any, x: torch.Tensor) -> torch.Tensor:
        if m.linear(x).sum() > 0:
            x = x + 1
        return m.linear(x).mean()

    line = body.__code__.co_firstlineno + 1
    with refused(ModelError, "Net", f"test_trace.py:{line}", "torch.where"):
        traced(body)


def test_shape_from_values_names_the_line() -> None:
    class Masked(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.linear(x[x.sum(1) > 0]).mean()

    line = Masked.forward.__code__.co_firstlineno + 1
    with refused(ModelError, "aten.index.Tensor", "(u0, 4)", f"test_trace.py:{line}"):
        trace(Masked(print), (torch.ones(2, WIDTH),))


def test_error_of_the_model_names_its_line() -> None:
    def body(m: Any, x: torch.Tensor) -> torch.Tensor:
        return m.linear(x @ x).mean()

    line = body.__code__.co_firstlineno + 1
    with refused(ModelError, "[2, 4]", f"test_trace.py:{line}"):
        traced(body)


def test_operator_without_rule_names_operator_and_module() -> None:
    graph = traced(lambda m, x: m.sort(m.linear(x)).mean(), sort=Net(lambda m, x: x.sort(dim=-1).values))
    op = next(op for op in graph.operators if op.op == "aten.sort.default")
    with refused(RuleError, "aten.sort.default", "sort", "planner.discover(graph)"):
        rule_of(graph, op)


@pytest.mark.parametrize("make", [torch.zeros_like, torch.ones_like, lambda x: x.new_zeros(x.shape)])
def test_no_gradient_flows_through_what_reads_a_shape_alone(make: Callable[[torch.Tensor], torch.Tensor]) -> None:
    graph = traced(lambda m, x: (make(m.spare(x)) + m.linear(x)).mean(), spare=nn.Linear(WIDTH, WIDTH))
    (made,) = (op.results[0] for op in graph.operators if "_like" in op.op or "zeros" in op.op)
    assert made not in graph.differentiable
    assert "linear/linear" in graph.differentiable


class ShapedAs(nn.Module):
    """Groups of rows that are counted together, and have the shape of another tensor again."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm = nn.Linear(8, 8), nn.GroupNorm(2, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        y = self.norm(self.first(x).reshape(-1, 8))
        return (y.view_as(x) * y.reshape_as(x)).mean()


def test_shapes_of_other_tensors_are_shapes() -> None:
    graph = trace(ShapedAs(), (torch.randn(4, 3, 8),))
    assert [op.op for op in graph.operators if op.arguments[1:] == ((4, 3, 8),)] == [
        "aten.view.default",
        "aten.reshape.default",
    ]
    assert rescale_batch(graph, 4, 6).types[graph.operators[-2].results[0] or ""].shape == (6, 3, 8)


class OfType(nn.Module):
    """A buffer of a dtype, and a transform of doubles."""

    def __init__(self, dtype: torch.dtype) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8).double()
        self.register_buffer("held", torch.ones(8).to(dtype))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        held = torch.view_as_real(self.held).sum(-1) if self.held.is_complex() else self.held
        return (torch.fft.fft(self.linear(x)).abs() * held.double()).mean()


@pytest.mark.parametrize("name", ["uint16", "uint32", "uint64", "complex32", "complex128", "float8_e8m0fnu"])
def test_all_types_of_numbers_have_a_size_and_gradients_flow_through_complex_ones(name: str) -> None:
    """Plans failed with a KeyError; of doubles the loss was said to depend on no parameter."""
    dtype = getattr(torch, name)
    graph = trace(OfType(dtype), (torch.randn(2, 8, dtype=torch.float64),))
    assert graph.types["held"].nbytes == 8 * dtype.itemsize
    assert "linear.weight" in graph.differentiable


def test_types_without_a_size_are_refused_by_name() -> None:
    with refused(ModelError, "bits8", "float32"):
        tensor_type(torch.empty(2, dtype=torch.bits8))
