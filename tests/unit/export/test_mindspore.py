"""Strategies of operators as MindSpore writes them, with the keys of files that it wrote itself."""

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from typer.testing import CliRunner

import planner
from planner.api.carrying import plan_of
from planner.cli.main import app
from planner.errors import RequestError
from planner.export.description import Description
from planner.export.targets import OPERATOR_TARGETS
from planner.graph.fp8 import Fp8
from planner.sharding.update import Update
from tests.refusals import refused
from tests.unit.export.descriptions import subject

Content = dict[str, dict[str, dict[str, Any]]]

LAYOUT = {"dev_matrix", "field", "opt_weight_shard_size", "opt_weight_shard_step", "tensor_map", "tensor_shape"}
STRATEGY = {"parallel_strategy", "stage"}
BASE = Description(
    layers=(2, 2), full=(0, 0), selective=(0, 0), precision="fp32", sequence_length=128, micro_batch=2, micro_batches=4,
    data=2, tensor=2, zero=1,
)  # fmt: skip


def written(description: Description, devices: int) -> Content:
    bound = plan_of(subject("llama-tiny", "cpu", devices), description)
    files = OPERATOR_TARGETS["mindspore"].write(bound)
    assert "micro-batches: 4 of 4 samples" in files["README.md"]
    content: Content = json.loads(files["strategy.json"])
    return content


@pytest.mark.slow
def test_it_is_written_from_python_as_by_the_command(tmp_path: Path) -> None:
    plan = tmp_path / "plan.json"
    planner.save(plan_of(subject("llama-tiny", "cpu", 8), BASE).plan, plan)
    given = planner.export(plan, "mindspore", tmp_path / "python")
    assert (
        CliRunner().invoke(app, ["export", str(plan), "--to", "mindspore", "-o", str(tmp_path / "own")]).exit_code == 0
    )
    assert given.files["strategy.json"] == (tmp_path / "own" / "strategy.json").read_text()
    here, there = (json.loads((tmp_path / name / "export.json").read_text()) for name in ("python", "own"))
    assert {name for name, value in there.items() if here.get(name) != value} == {"schema_version", "checksum"}
    with refused(RequestError, "unknown engine 'mindspor'", "mindspore"):
        planner.export(plan, "mindspor")


@pytest.mark.slow
def test_every_weight_has_its_cuts_and_its_layout() -> None:
    content = written(BASE, 8)
    strategies, layouts = content["parallel_strategy_item"], content["parallel_layout_item"]
    assert all(set(row) == STRATEGY for row in strategies.values())
    assert all(set(row) == LAYOUT for row in layouts.values())
    column = strategies["MatMul_model.layers.0.self_attn.q_proj.weight"]
    row = strategies["MatMul_model.layers.3.mlp.down_proj.weight"]
    assert column == {"parallel_strategy": [[2, 1], [2, 1]], "stage": 0}
    assert row == {"parallel_strategy": [[2, 2], [1, 2]], "stage": 1}
    assert strategies["Gather_model.embed_tokens.weight"]["parallel_strategy"] == [[2, 1], [2, 1]]
    assert strategies["RmsNorm_model.norm.weight"]["stage"] == 1
    weight = layouts["model.layers.0.mlp.down_proj.weight"]
    assert (weight["dev_matrix"], weight["tensor_map"], weight["tensor_shape"]) == ([2, 2], [-1, 0], [256, 512])
    assert (weight["opt_weight_shard_size"], weight["opt_weight_shard_step"]) == (2, 2)


def test_tables_outside_of_the_devices_are_told_beside_the_file() -> None:
    write, machine = OPERATOR_TARGETS["mindspore"].write, subject("llama-tiny", "cpu", 8)
    placed = replace(BASE, update=Update(buckets="none", placed=(("model.embed_tokens.*", "servers"),)))
    files = write(plan_of(machine, placed))
    assert "- tables: model.embed_tokens.\\* on servers" in files["README.md"]
    assert "embed_tokens" not in files["strategy.json"]
    assert "tables" not in write(plan_of(machine, BASE))["README.md"]


def test_what_else_a_plan_decides_is_listed_beside_the_file() -> None:
    bound = plan_of(subject("llama-tiny", "cpu", 8), BASE)
    write, training = OPERATOR_TARGETS["mindspore"].write, bound.plan.training
    plain = write(bound)["README.md"]
    assert all(word not in plain for word in ("offload", "fp8", "gradients", "interleaved", "collectives"))
    update = Update(
        buckets="none", gradients="sum", clip_norm=0.5, master_weights=False, local_parameters=("*norm*",),
        broadcast=True,
    )  # fmt: skip
    overlap = (("model.layers.0.self_attn.o_proj/linear", 2, 2, 0),)
    changed = replace(training, update=update, interleave=2, fp8=Fp8(recipe="rowwise"), tensor_overlap=overlap)
    offloaded = {name: replace(stored, state_home="host") for name, stored in bound.parameters.items()}
    text = write(replace(bound, plan=replace(bound.plan, training=changed), parameters=offloaded))["README.md"]
    for words in ("summed", "norm 0.5", "no master weights", "own \\*norm\\*", "rank 0 broadcast"):
        assert words in text, words
    assert "offload: optimizer states on the host" in text
    assert "interleaved micro-batches: 2" in text
    assert "linear layers in fp8: rowwise" in text
    assert "under the products of 1 operator" in text


def test_without_a_finer_optimizer_nothing_is_shared_out() -> None:
    layouts = written(replace(BASE, zero=0), 8)["parallel_layout_item"]
    assert all(row["opt_weight_shard_size"] == 0 for row in layouts.values())
