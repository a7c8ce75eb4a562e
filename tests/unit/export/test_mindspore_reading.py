"""Strategy files that MindSpore wrote, and our own, as plans."""

import json
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn
from torch.nn import functional

from hardware_profiles import load_profile
from planner.api.carrying import Subject, plan_of
from planner.export.description import Description, ExportError
from planner.export.mindspore.mindspore_files import parsed
from planner.export.mindspore.mindspore_names import Matches, Names, all_starts
from planner.export.target import OperatorReading
from planner.export.targets import OPERATOR_TARGETS
from planner.graph.trace import trace
from planner.plan.binding.bind import BoundPlan, bind, prepare
from planner.plan.outline import model_reference
from planner.plan.plan import Group
from planner.sharding.layout import format_layout
from planner.sharding.update import Update
from planner.strategy_search.fixed.by_operator import ByOperator, operator_plan
from planner.strategy_search.fixed.fixed_schedule import Order
from planner.strategy_search.request.request import SearchRequest
from planner.strategy_search.request.space import Pinned
from tests.refusals import refused
from tests.unit.export.descriptions import subject

SAMPLES = Path(__file__).parent / "mindspore"
MINDSPORE = OPERATOR_TARGETS["mindspore"]


class Net(nn.Module):
    """The MLP of the samples; with `turned` weights lie as those of linear layers."""

    def __init__(self, turned: bool) -> None:
        super().__init__()
        shapes = ((4096, 1024), (1024, 4096)) if turned else ((1024, 4096), (4096, 1024))
        self.w1, self.w2 = (nn.Parameter(torch.empty(shape, device="meta")) for shape in shapes)
        self.turned = turned

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Into a scalar."""
        if self.turned:
            return functional.linear(torch.relu(functional.linear(x, self.w1)), self.w2).mean()
        return (torch.relu(x @ self.w1) @ self.w2).mean()


class Layer(nn.Module):
    """A layer of the sample's GPT."""

    def __init__(self) -> None:
        super().__init__()
        shapes = {f"w{name}": (1024, 1024) for name in "qkvo"} | {"w1": (1024, 4096), "w2": (4096, 1024)}
        for name, shape in {**shapes, **dict.fromkeys(("g1", "b1", "g2", "b2"), (1024,))}.items():
            self.register_parameter(name, nn.Parameter(torch.empty(shape, device="meta")))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Attention and a product after another."""
        of: Any = dict(self.named_parameters())
        h = functional.layer_norm(x, (1024,), of["g1"], of["b1"])
        q, k, v = ((h @ of[f"w{name}"]).unflatten(-1, (16, 64)).transpose(1, 2) for name in "qkv")
        attended = functional.scaled_dot_product_attention(q, k, v).transpose(1, 2).flatten(2)
        x = x + attended @ of["wo"]
        h = functional.layer_norm(x, (1024,), of["g2"], of["b2"])
        return x + functional.gelu(h @ of["w1"]) @ of["w2"]


class Gpt(nn.Module):
    """One layer, in a list of layers."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([Layer()])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Into a scalar."""
        for layer in self.layers:
            x = layer(x)
        return x.square().mean()


def subject_of(module: nn.Module, *shape: int) -> Subject:
    graph = trace(module, (torch.empty(shape, device="meta"),), {})
    reference = model_reference(graph, name="net", sequence_length=None, batch=shape[0])
    return Subject(model=reference, graph=graph, batch=shape[0], cluster=load_profile("cpu").with_devices(8))


def read(asked: Subject, text: str, devices: int | None = None) -> OperatorReading:
    graph, blocks = prepare(asked.graph)
    return MINDSPORE.read(text.encode(), graph, blocks, devices)


def made(asked: Subject, reading: OperatorReading, like: BoundPlan | None = None) -> BoundPlan:
    """The plan of what was read, with what a file does not say as another plan has it."""
    plan = None if like is None else like.plan
    training = None if plan is None else plan.training
    blocks = prepare(asked.graph)[1].count
    request = SearchRequest(
        graph=asked.graph,
        batch=asked.batch,
        model=asked.model,
        cluster=asked.cluster,
        global_batch=32 if training is None else training.global_batch,
        precision="fp32",
        update=Update(buckets="none") if training is None else training.update,
        pinned=Pinned(
            mesh=reading.mesh,
            pipeline=reading.pipeline,
            micro_batches=1 if training is None else training.micro_batches,
        ),
    )
    decisions = ByOperator(
        operators={at: (wish.axes, wish.cuts) for at, wish in reading.operators.items()},
        parameters=reading.parameters,
        order=Order(stages=reading.stages, schedule="1f1b" if plan is None else plan.schedule),
        running=(("none", ()),) * blocks,
    )
    return operator_plan(request, decisions)


def without(prefix: str, text: str) -> Any:
    return json.loads(text.replace(f"_{prefix}.", "_").replace(f'"{prefix}.', '"'))


@pytest.mark.parametrize("turned", [False, True])
def test_what_mindspore_wrote_of_parameters_comes_back(turned: bool) -> None:
    text, asked = (SAMPLES / "parameter_strategy.json").read_text(), subject_of(Net(turned), 4, 1024)
    reading = read(asked, text)
    assert (reading.mesh, reading.pipeline) == ((2, 4), 1)
    assert reading.notes == ("names of the file are those of the model without 'net.'",)
    written, wanted = json.loads(MINDSPORE.write(made(asked, reading))["strategy.json"]), without("net", text)
    dropped = weightless(written)
    assert set(dropped) == {"Default/ReLU-op0", "Default/ReduceMean-op0"}
    for row in wanted["parallel_layout_item"].values() if turned else ():
        row["tensor_map"], row["tensor_shape"] = row["tensor_map"][::-1], row["tensor_shape"][::-1]
    for row in wanted["parallel_strategy_item"].values() if turned else ():
        row["parallel_strategy"][1] = row["parallel_strategy"][1][::-1]
    assert {**written, "current_stage": 2} == wanted


def weightless(content: Any) -> dict[str, Any]:
    """Operators without weights, which are taken out: MindSpore's files of parameters have none."""
    rows = content["parallel_strategy_item"]
    return {name: rows.pop(name) for name in [*rows] if name.startswith("Default/")}


@pytest.mark.parametrize("again", [False, True])
def test_operators_without_weights_are_kept_both_ways(again: bool) -> None:
    """As MindSpore wrote them; and as we write them of what was read."""
    text, asked = (SAMPLES / "operator_strategy.json").read_text(), subject_of(Net(False), 4, 1024)
    bound = made(asked, read(asked, text, 8))
    if again:
        text = MINDSPORE.write(bound)["strategy.json"]
        bound = made(asked, read(asked, text, 8))
    theirs = {name.rpartition("/")[2]: row for name, row in json.loads(text)["parallel_strategy_item"].items()}
    ours = json.loads(MINDSPORE.write(bound)["strategy.json"])["parallel_strategy_item"]
    for name in ("ReLU-op0", "ReduceMean-op0"):
        assert ours[f"Default/{name}"]["parallel_strategy"] == theirs[name]["parallel_strategy"]


def test_what_mindspore_wrote_of_operators_is_taken_over() -> None:
    text, asked = (SAMPLES / "operator_strategy.json").read_text(), subject_of(Net(False), 4, 1024)
    with refused(ExportError, 1, "--devices"):
        read(asked, text)
    reading = read(asked, text, 8)
    assert (reading.mesh, reading.parameters) == ((2, 4), {})
    assert [note for note in reading.notes if "Default/_VirtualDataset-op0" in note and "not taken over" in note]
    found = {op.operator.name: op for op in made(asked, reading).operators}
    cuts = {name: [format_layout(one.forward) for one in op.layouts.operands] for name, op in found.items()}
    assert cuts["relu"] == ["S0,S1"]
    assert cuts["matmul_2"] == ["S0,S1", "R,S0"]
    assert cuts["mean"] == ["S0,R"]


def test_layers_of_a_gpt_come_back() -> None:
    text, asked = (SAMPLES / "gpt_parameter_strategy.json").read_text(), subject_of(Gpt(), 2, 16, 1024)
    reading = read(asked, text)
    assert reading.mesh == (8,)
    written, wanted = json.loads(MINDSPORE.write(made(asked, reading))["strategy.json"]), without("net", text)
    weightless(written)
    for name in ("LayerNorm_layers.0.g1", "LayerNorm_layers.0.g2"):  # of rows there, of samples and positions here
        assert wanted["parallel_strategy_item"].pop(name)["parallel_strategy"] == [[8, 1], [1], [1]]
        assert written["parallel_strategy_item"].pop(name)["parallel_strategy"] == [[8, 1, 1], [1], [1]]
    assert {**written, "current_stage": 2} == wanted


BASE = Description(
    layers=(2, 2), full=(0, 0), selective=(0, 0), precision="fp32", sequence_length=128, micro_batch=2, micro_batches=4,
    data=2, tensor=2, zero=1,
)  # fmt: skip


def changed(group: Group, name: str, strategy: tuple[str | None, ...]) -> Group:
    operators = tuple((op, strategy if op.endswith(name) else old) for op, old in group.operators)
    return replace(group, operators=operators)


def test_what_we_write_of_blocks_that_differ_comes_back() -> None:
    asked = subject("llama-tiny", "cpu", 8)
    plan = plan_of(asked, BASE).plan
    graph, blocks = prepare(asked.graph)
    groups = []
    for group in plan.groups:
        if not group.blocks:
            groups.append(group)
            continue
        for first in (0, 2):
            old = [graph.operators[at].name for at in blocks.operators(0)]
            new = [graph.operators[at].name for at in blocks.operators(first)]
            half = replace(group, name=f"blocks {first} to {first + 1}", first_block=first, blocks=2)
            half = replace(half, operators=tuple((new[old.index(op)], how) for op, how in group.operators))
            names = tuple((n.replace("layers.0.", f"layers.{first}."), how) for n, how in group.parameters)
            half = replace(half, parameters=names)
            groups.append(changed(half, "k_proj/linear", ("b", None)) if first else half)
    bound = bind(replace(plan, groups=tuple(groups)), asked.graph, asked.batch)
    text = MINDSPORE.write(bound)["strategy.json"]
    row = json.loads(text)["parallel_strategy_item"]
    assert row["MatMul_model.layers.1.self_attn.k_proj.weight"] != row["MatMul_model.layers.2.self_attn.k_proj.weight"]
    reading = read(asked, text)
    assert (reading.mesh, reading.stages, reading.notes) == ((2, 2), (2, 2), ())
    again = made(asked, reading, bound)
    assert MINDSPORE.write(again)["strategy.json"] == text
    assert [group.blocks for group in again.plan.groups] == [0, 2, 2, 0]


ONE = replace(BASE, layers=(4,), full=(0,), selective=(0,))


@pytest.mark.parametrize(
    "description", [replace(BASE, zero=3), replace(ONE, data=8, tensor=1, zero=3, micro_batch=1, micro_batches=2)]
)
def test_what_we_write_comes_back(description: Description) -> None:
    asked = subject("llama-tiny", "cpu", 8)
    bound = plan_of(asked, description)
    text = MINDSPORE.write(bound)["strategy.json"]
    assert MINDSPORE.write(made(asked, read(asked, text), bound))["strategy.json"] == text


def test_biases_are_added_by_operators_of_their_own() -> None:
    asked = subject("bert-tiny", "cpu", 4)
    description = replace(ONE, sequence_length=None)
    bound = plan_of(asked, description)
    text = MINDSPORE.write(bound)["strategy.json"]
    rows = json.loads(text)["parallel_strategy_item"]
    columns = [
        name for name in rows if name.startswith("BiasAdd_") and rows[name]["parallel_strategy"] == [[2, 2], [2]]
    ]
    assert columns
    products = (row["parallel_strategy"] for name, row in rows.items() if name.startswith("MatMul_"))
    assert {len(cuts) for cuts in products} == {2}
    assert MINDSPORE.write(made(asked, read(asked, text), bound))["strategy.json"] == text


def items(**strategies: Any) -> dict[str, Any]:
    return {"parallel_strategy_item": {name: {"parallel_strategy": cuts} for name, cuts in strategies.items()}}


def layout(tensor_map: list[int], shape: list[int]) -> dict[str, Any]:
    row = {"dev_matrix": [8], "tensor_map": tensor_map, "tensor_shape": shape}
    return {**items(), "parallel_layout_item": {"w1": row}}


@pytest.mark.parametrize(
    ("content", "message"),
    [
        ("layouts", "not valid JSON"),
        ([], "no 'parallel_strategy_item'"),
        (items(MatMul_w1=[[2, 0]]), "a list of numbers of pieces"),
        (items(MatMul_other=[[2, 1], [1, 4]]), "none of its names is one of the model's: other; the model has w1, w2"),
        (items(MatMul_w1=[[2, 3], [4, 4]]), "different numbers of pieces"),
        (layout([-1, -1], [8, 8]), "its shape is 8x8, that of the model's w1 is 1024x4096"),
        (layout([1, -1], [1024, 4096]), "names axes that dev_matrix [8] has not"),
    ],
)
def test_what_cannot_be_read_is_refused(content: Any, message: str) -> None:
    text = content if isinstance(content, str) else json.dumps(content)
    with pytest.raises(ExportError) as caught:
        read(subject_of(Net(False), 4, 1024), text, 8)
    assert message in str(caught.value)


def test_operators_are_told_apart_by_their_cells() -> None:
    text = json.dumps(items(**{"Default/network-Net/layers-CellList/0-Block/wq-Dense/MatMul-op3": [[1, 1], [1, 1]]}))
    ((item,), _) = parsed(text.encode())
    assert (item.primitive, item.owner, item.number) == ("MatMul", "network.layers.0.wq", 3)


WORDS = st.lists(st.sampled_from(("net", "model", "layers", "0", "1", "w")), min_size=1, max_size=4).map(".".join)


@pytest.mark.thorough
@settings(max_examples=200, deadline=None)
@given(known=st.sets(WORDS | st.just(""), max_size=8), theirs=st.sets(WORDS | st.just(""), max_size=8))
def test_beginnings_are_counted_as_if_one_tried_them_all(known: set[str], theirs: set[str]) -> None:
    drops, adds = all_starts(theirs), all_starts(known)
    matches = Matches(known, theirs, drops, adds)
    for drop in drops:
        for add in adds:
            names = Names(known=frozenset(known), aliases={}, drop=drop, add=add)
            assert matches.count((drop, add)) == sum(names.of_model(name) is not None for name in theirs), (drop, add)


def _calls(count: int) -> int:
    """Functions of Python that are called while a file with so many distinct beginnings is read."""
    row = {"parallel_strategy": [[1, 1], [1, 1]], "stage": 0}
    items = {f"MatMul_a{at}.b{at}.w1": row for at in range(count)}
    text = json.dumps({"parallel_strategy_item": items, "parallel_layout_item": {}})
    net = Net(turned=False)
    graph, blocks = prepare(trace(net, (torch.empty(32, 1024, device="meta"),)))
    counted = [0]

    def count_one(frame: object, event: str, argument: object) -> None:
        counted[0] += 1

    sys.setprofile(count_one)
    try:
        MINDSPORE.read(text.encode(), graph, blocks, 1)
    finally:
        sys.setprofile(None)
    return counted[0]


def test_many_beginnings_are_read_in_linear_time() -> None:
    assert _calls(800) < 5 * _calls(200)


def test_a_dim_that_axes_apart_cut_comes_back() -> None:
    """As several dims, all but the last as long as their axis has devices."""
    row = {"dev_matrix": [2, 2, 2], "field": 0, "opt_weight_shard_size": 0, "opt_weight_shard_step": 0,
           "tensor_map": [2, 0, 1], "tensor_shape": [2, 512, 4096]}  # fmt: skip
    text = json.dumps({"current_stage": 0, "parallel_layout_item": {"w1": row}, "parallel_strategy_item": {}})
    asked = subject_of(Net(False), 4, 1024)
    reading = read(asked, text)
    assert {name: format_layout(weight) for name, (weight, _) in reading.parameters.items()} == {"w1": "S0,S1,S0"}
    written = json.loads(MINDSPORE.write(made(asked, reading))["strategy.json"])
    assert written["parallel_layout_item"]["w1"] == row
    with refused(ExportError, "its shape is 4x256x4096, that of the model's w1 is 1024x4096: another model"):
        read(asked, text.replace("[2, 512, 4096]", "[4, 256, 4096]"))


@pytest.mark.parametrize(("matrix", "cut", "size", "step", "mesh", "states"), [
    ([4, 2], 0, -1, 2, (4, 2), (True, True)), ([4, 2], 0, -1, 0, (4, 2), (False, True)),
    ([4, 2], 0, 0, 0, (4, 2), (False, True)), ([8], -1, 4, 1, (2, 4), (False, True)),
    ([8], -1, -1, 1, (8,), (True,)), ([2, 2, 2], 1, 4, 1, (2, 2, 2), (True, True, True)),
    ([2, 2, 2], 1, 2, 1, (2, 2, 2), (False, True, True)), ([2, 2, 2], 1, -1, 1, (2, 2, 2), (True, True, True)),
    ([2, 4], -1, 2, 4, (2, 4), (True, False)), ([2, 2, 2], -1, 4, 1, (2, 2, 2), (False, True, True)),
])  # fmt: skip
def test_states_are_shared_out_as_mindspore_writes_it(
    matrix: list[int], cut: int, size: int, step: int, mesh: tuple[int, ...], states: tuple[bool, ...]
) -> None:
    """mindspore/ccsrc, parallel/ops_info/operator_info.cc, CreateGroupForOptShard: the size is that of
    `optimizer_weight_shard_size`, -1 by default, for all devices with the same piece of a weight; a group is of the
    nearest ones; the step is the mean distance of all of them."""
    row = {"dev_matrix": matrix, "field": 0, "opt_weight_shard_size": size, "opt_weight_shard_step": step,
           "tensor_map": [cut, -1], "tensor_shape": [1024, 4096]}  # fmt: skip
    text = json.dumps({"current_stage": 0, "parallel_layout_item": {"w1": row}, "parallel_strategy_item": {}})
    reading = read(subject_of(Net(False), 4, 1024), text)
    assert (reading.mesh, reading.parameters["w1"][1]) == (mesh, states)


@pytest.mark.parametrize("size", [3, 16])
def test_groups_that_no_devices_make_are_refused(size: int) -> None:
    row = {"dev_matrix": [8], "field": 0, "opt_weight_shard_size": size, "opt_weight_shard_step": 1,
           "tensor_map": [-1, -1], "tensor_shape": [1024, 4096]}  # fmt: skip
    text = json.dumps({"current_stage": 0, "parallel_layout_item": {"w1": row}, "parallel_strategy_item": {}})
    with refused(ExportError, "w1", f"opt_weight_shard_size {size}", 8):
        read(subject_of(Net(False), 4, 1024), text)
