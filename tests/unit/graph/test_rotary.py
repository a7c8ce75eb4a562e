"""Rotary position embeddings are one operator, which computes the same to the bit."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from transformers.models.deepseek_v3 import modeling_deepseek_v3 as deepseek
from transformers.models.ernie4_5 import modeling_ernie4_5 as ernie
from transformers.models.glm import modeling_glm as glm
from transformers.models.glm4_moe import modeling_glm4_moe as glm4
from transformers.models.gpt_oss import modeling_gpt_oss as gpt_oss
from transformers.models.llama import modeling_llama as llama

from planner.graph.operator_graph import Argument, OperatorGraph, TorchConstant, ValueRef
from planner.graph.rewriting.rotations import ROTARY
from planner.graph.torch_operators import resolve
from planner.graph.trace import trace
from planner.models.llama import rotated

Tables = tuple[torch.Tensor, torch.Tensor]
Form = Callable[[torch.Tensor, torch.Tensor, torch.Tensor], torch.Tensor]
HEADS, WIDTH = 2, 8


def _both(function: Callable[..., Tables]) -> Form:
    """Queries of a function of transformers, which turns keys, too."""
    return lambda x, cos, sin: sum(function(x * 3, x * 2, cos, sin))


def _in_pairs(x: torch.Tensor) -> torch.Tensor:
    return x.view(*x.shape[:-1], -1, 2).transpose(-1, -2).reshape(x.shape)


def _unbound(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.unflatten(-1, (-1, 2)).unbind(-1)
    cos, sin = cos[..., ::2], sin[..., ::2]
    return torch.stack((a * cos - b * sin, a * sin + b * cos), -1).flatten(-2)


def _behind(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """A part of a head that is turned behind one that passes, as in multi-head latent attention."""
    plain, turned = x.split([2, WIDTH - 2], dim=-1)
    return torch.cat((plain, rotated(turned, cos[..., 2:], sin[..., 2:])), dim=-1)


KNOWN: dict[str, tuple[Form, int, int]] = {
    "llama": (_both(llama.apply_rotary_pos_emb), 2, WIDTH),
    "zoo": (rotated, 1, WIDTH),
    "neighbours": (_both(glm.apply_rotary_pos_emb), 2, WIDTH),
    "neighbours to halves": (_both(deepseek.apply_rotary_pos_emb_interleave), 2, WIDTH),
    "put apart": (lambda x, cos, sin: rotated(_in_pairs(x), cos, sin), 1, WIDTH),
    "angles once": (_both(gpt_oss.apply_rotary_pos_emb), 2, WIDTH // 2),
    "casts": (lambda x, *tables: _both(ernie.apply_rotary_pos_emb)(x, *(one.float() for one in tables)), 2, WIDTH),
    "unbound": (_unbound, 1, WIDTH),
    "a part in front": (_both(glm4.apply_rotary_pos_emb), 2, WIDTH - 2),
    "a part behind": (_behind, 1, WIDTH),
}


class Model(nn.Module):
    """Heads of a product, turned."""

    def __init__(self, form: Form, width: int, *, trained: bool = False) -> None:
        super().__init__()
        self.form, self.product = form, nn.Linear(4, HEADS * WIDTH)
        angles = torch.randn(1, 3, width) if width != WIDTH else torch.randn(1, 3, width // 2).repeat(1, 1, 2)
        for name, table in (("cos", angles.cos()), ("sin", angles.sin())):
            if trained:
                self.register_parameter(name, nn.Parameter(table))
            else:
                self.register_buffer(name, table)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        heads = self.product(x).unflatten(-1, (HEADS, WIDTH)).transpose(1, 2)
        return self.form(heads, self.cos.to(x.dtype), self.sin.to(x.dtype)).reshape(-1).sin().mean()


def computed(graph: OperatorGraph, model: nn.Module, x: torch.Tensor) -> torch.Tensor:
    values: dict[str, Any] = {graph.inputs[0]: x, **dict(model.named_parameters()), **dict(model.named_buffers())}

    def value(argument: Argument) -> Any:
        if isinstance(argument, tuple):
            return [value(item) for item in argument]
        if isinstance(argument, ValueRef):
            return values[argument.name]
        return getattr(torch, argument.name) if isinstance(argument, TorchConstant) else argument

    for op in graph.operators:
        made = resolve(op.op)(*map(value, op.arguments), **{name: value(given) for name, given in op.keywords})
        values.update(zip(op.results, made if isinstance(made, list | tuple) else (made,), strict=True))
    found: torch.Tensor = values[graph.loss]
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, pytest.param(torch.float32, marks=pytest.mark.thorough)])
@pytest.mark.parametrize("name", KNOWN)
def test_a_rotation_is_one_operator_that_computes_the_same(name: str, dtype: torch.dtype) -> None:
    """To the bit, with its gradients, but where those are rounded to 16 bits part by part; nothing is left of what it
    was spelled out in."""
    form, count, width = KNOWN[name]
    torch.manual_seed(0)
    model, x = Model(form, width).to(dtype), torch.randn(2, 3, 4, dtype=dtype)
    graph = trace(model, (x,))
    calls = [op.op.split(".")[1] for op in graph.operators]
    assert calls.count("rotary") == count
    assert not {"neg", "cat", "stack", "sub"} & {*calls}
    results = []
    for loss in (lambda: model(x), lambda: computed(graph, model, x)):
        model.zero_grad()
        made = loss()
        made.backward()
        results.append([made.detach(), *(one.grad for one in model.parameters())])
    rounded = 5e-2 if name == "casts" and dtype == torch.bfloat16 else 0.0
    torch.testing.assert_close(*results, rtol=rounded, atol=rounded / 100)


def _swapped(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    return x * cos + torch.cat(x.chunk(2, dim=-1)[::-1], dim=-1) * sin


def _otherwise(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    """The first part is negated, not the second."""
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.cat((b, -a), dim=-1) * sin


def _mixed(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, dim=-1)
    return x * cos + torch.stack((-b, a), dim=-1).flatten(-2) * sin


def _of_another(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.sin().chunk(2, dim=-1)
    return x * cos + torch.cat((-b, a), dim=-1) * sin


def _read_again(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, dim=-1)
    across = torch.cat((-b, a), dim=-1)
    return x * cos + across * sin + across.exp()


def _of_heads(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, dim=1)
    return x * cos + torch.cat((-b, a), dim=1) * sin


def _with_two_angles(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
    a, b = x.chunk(2, dim=-1)
    cos, sin = cos[..., ::2], sin[..., ::2]
    return torch.cat((a * cos - b * sin, b * sin + a * cos), dim=-1)


@pytest.mark.parametrize("form", [_swapped, _otherwise, _mixed, _of_another, _read_again, _of_heads, _with_two_angles])
def test_what_is_none_stays_as_it_is(form: Form) -> None:
    graph = trace(Model(form, WIDTH), (torch.randn(2, 3, 4),))
    assert ROTARY not in [op.op for op in graph.operators]


def test_tables_that_are_trained_stay() -> None:
    graph = trace(Model(rotated, WIDTH, trained=True), (torch.randn(2, 3, 4),))
    assert ROTARY not in [op.op for op in graph.operators]


def test_a_part_whose_other_part_is_read_again_is_turned_alone() -> None:
    """The join stays; where what is read is another split of the same, it does not."""

    def form(x: torch.Tensor, cos: torch.Tensor, sin: torch.Tensor) -> torch.Tensor:
        plain, turned = x.split([2, WIDTH - 2], dim=-1)
        joined = torch.cat((plain, rotated(turned, cos[..., 2:], sin[..., 2:])), dim=-1)
        return joined * plain.mean() + _behind(x, cos, sin) * x.split([2, WIDTH - 2], dim=-1)[0].mean()

    graph = trace(Model(form, WIDTH), (torch.randn(2, 3, 4),))
    found = [op for op in graph.operators if op.op == ROTARY]
    assert [graph.types[op.operands[0]].shape[-1] for op in found] == [WIDTH - 2, WIDTH]
    assert [op.arguments[5:] for op in found] == [(0, WIDTH - 2, False, None), (2, WIDTH - 2, False, None)]
    assert [op.op for op in graph.operators].count("aten.cat.default") == 1
