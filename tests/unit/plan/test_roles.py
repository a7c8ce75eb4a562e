"""Plans written by hand are described in the words that their authors would use."""

import math

import pytest
import torch

from planner.graph.trace import trace
from planner.plan.binding.bind import bind
from planner.plan.layout.roles import Roles, roles
from planner.sharding.labels import factor_labels
from planner.strategy_search.request.space import Configuration
from tests.unit.plan.plans import NAMES, plan_named, verdict_of
from tests.unit.search.by_hand import ALL_CUT, COPIES, GRADIENT_CUT, UPDATE_CUT, Option, by_hand
from tests.unit.search.cases import BATCH, make_case, plan_of, traced

DEGREES = ("data", "tensor", "context", "replicated")


def roles_of(axes: tuple[str, ...], mesh: tuple[int, ...], on_data: Option, stages: int = 1) -> Roles:
    configuration = Configuration(pipeline=stages, mesh=mesh, micro_batches=2)
    case = make_case("llama-4", "h100-80gb", configuration, 16)
    return roles(bind(plan_of(case, by_hand(case, axes, on_data)), traced("llama-4"), BATCH))


@pytest.mark.cases(11)
@pytest.mark.parametrize("stages", [1, 2, 4])
@pytest.mark.parametrize(
    ("axes", "mesh"),
    [
        (("data",), (4,)),
        (("tensor",), (4,)),
        (("context",), (4,)),
        (("nothing",), (2,)),
        (("data", "tensor"), (2, 4)),
        (("tensor", "data"), (4, 2)),
        (("data", "context"), (2, 2)),
        (("context", "tensor"), (2, 2)),
        (("data", "data"), (2, 4)),
        (("data", "nothing"), (4, 2)),
        ((), ()),
    ],
)
def test_degrees(axes: tuple[str, ...], mesh: tuple[int, ...], stages: int) -> None:
    found = roles_of(axes, mesh, COPIES, stages)
    words = {"data": 1, "tensor": 1, "context": 1, "replicated": 1}
    for axis, size in zip(axes, mesh, strict=True):
        words["replicated" if axis == "nothing" else axis] *= size
    assert {degree: getattr(found, degree) for degree in DEGREES} == words
    assert found.pipeline == stages
    assert math.prod(words.values()) * found.pipeline == math.prod(mesh) * stages
    assert [axis.size for axis in found.axes] == list(mesh)
    assert found.sequence_parallel is ("tensor" in axes)


@pytest.mark.parametrize(
    ("axes", "on_data", "word"),
    [
        (("data",), COPIES, "off"),
        (("data",), UPDATE_CUT, "1 (states)"),
        (("data",), GRADIENT_CUT, "2 (gradients and states)"),
        (("data", "tensor"), GRADIENT_CUT, "2 (gradients and states)"),
        (("data",), ALL_CUT, "3 (weights, gradients and states)"),
        (("tensor",), UPDATE_CUT, "off"),
        (("data", "tensor"), COPIES, "off"),
        (("data", "tensor"), UPDATE_CUT, "1 (states)"),
    ],
)
def test_optimizer_sharding(axes: tuple[str, ...], on_data: Option, word: str) -> None:
    assert roles_of(axes, (2, 4)[-len(axes) :], on_data).zero == word


def test_details_say_what_attention_splits() -> None:
    details = {
        axis: roles_of((axis,), (4,), COPIES).axes[0].detail for axis in ("data", "tensor", "context", "nothing")
    }
    assert details == {
        "data": "batch",
        "tensor": "weights",
        "context": "sequence, heads in attention (Ulysses)",
        "nothing": "nothing",
    }


@pytest.mark.cases(1)
@pytest.mark.parametrize("name", NAMES)
def test_the_product_of_the_degrees_is_the_number_of_devices(name: str) -> None:
    found = roles(verdict_of(plan_named(name)).bound)
    product = found.pipeline * math.prod(getattr(found, degree) for degree in DEGREES)
    assert product == plan_named(name).cluster.devices


def test_labels_follow_batch_and_sequence_through_the_model() -> None:
    bound = verdict_of(plan_named("two axes")).bound
    labels = {op.operator.name: names for op, names in zip(bound.operators, factor_labels(bound.graph), strict=True)}
    assert labels["model.layers.3.self_attn.o_proj/linear"][:2] == ("batch", "sequence")
    assert labels["model.layers.3.mlp/mul"][:2] == ("batch", "sequence")
    assert labels["model.layers.0.self_attn/scaled_dot_product_attention"][0] == "batch"
    assert "sequence" in labels["model.layers.0.self_attn/scaled_dot_product_attention"]


class Masked(torch.nn.Module):
    """Masks of the batch size, made of no data and by looking samples up, as those of transformers."""

    def __init__(self) -> None:
        super().__init__()
        self.table = torch.nn.Embedding(8, 16)

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        batch, length = tokens.shape
        at, hidden = torch.arange(length), self.table(tokens)
        causal = (at[:, None] >= at).expand(batch, -1, -1)
        seen = (tokens != 0)[torch.arange(batch)[:, None, None], at]
        scores = torch.where(seen, hidden @ hidden.transpose(1, 2), 0.0)
        return torch.where(causal, scores, 0.0).sum()


def test_what_is_made_of_no_data_has_a_batch_where_it_meets_one() -> None:
    graph = trace(Masked(), (torch.zeros(4, 6, dtype=torch.int64),))
    labels = {op.op: names for op, names in zip(graph.operators, factor_labels(graph), strict=True)}
    assert labels["aten.expand.default"] == ("batch", "d1", "d2")
    assert labels["aten.index.Tensor"][0] == "batch"
    assert labels["aten.where.ScalarOther"][0] == "batch"
