"""Weights padded with zeros: what grows with them, and what refuses to."""

from pathlib import Path

import pytest
import torch
from torch import nn
from typer.testing import CliRunner

import planner
from planner.cli.main import app
from planner.errors import RequestError
from planner.graph.operator_graph import OperatorGraph
from planner.graph.trace import trace
from planner.models.zoo import build_model
from planner.sharding.padding import with_padding
from planner.sharding.rescale import rescale_batch
from planner.sharding.update import Update
from planner.strategy_search.variants import aligned, padding_for
from tests.refusals import refused


class Gated(nn.Module):
    """A look-up, a gated product, perhaps dropout or a mean, and the loss over a head; all sizes odd."""

    def __init__(self, kind: str = "") -> None:
        super().__init__()
        self.table, self.head = nn.Embedding(11, 5), nn.Linear(5, 11)
        self.gate, self.up, self.down = nn.Linear(5, 7), nn.Linear(5, 7, bias=False), nn.Linear(7, 5)
        self.kind = kind

    def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        x = self.table(tokens)
        inner = torch.sigmoid(self.gate(x)) * self.up(x)
        if self.kind == "dropout":
            inner = nn.functional.dropout(inner, 0.5)
        if self.kind == "mean":
            x = x * inner.mean(dim=-1, keepdim=True)
        if self.kind == "norm":
            inner = nn.functional.layer_norm(inner, (7,))
        if self.kind == "softmax":
            inner = inner.softmax(dim=-1)
        logits = self.head(x + self.down(inner))
        return nn.functional.cross_entropy(logits.view(-1, 11), targets.view(-1))


def graph_of(kind: str = "") -> OperatorGraph:
    return trace(Gated(kind), (torch.zeros(3, 2, dtype=torch.int64), torch.zeros(3, 2, dtype=torch.int64)))


def test_what_has_the_loop_of_padded_rows_grows() -> None:
    padded = with_padding(graph_of(), (("gate.weight", 4),))
    shapes = {name: padded.types[name].shape for name in padded.parameter_names}
    assert shapes["gate.weight"] == shapes["up.weight"] == (8, 5)
    assert (shapes["gate.bias"], shapes["down.weight"], shapes["head.weight"]) == ((8,), (5, 8), (11, 5))
    assert padded.own_shape("down.weight") == (5, 7)
    assert padded.own_shape("head.weight") == (11, 5)
    assert rescale_batch(padded, 3, 6).own_shape("gate.weight") == (7, 5), "also at another batch"


def test_a_padded_head_tells_the_loss_its_classes() -> None:
    padded = with_padding(graph_of(), (("head.weight", 4), ("table*", 2)))
    (loss,) = (op for op in padded.operators if op.op == "aten.cross_entropy_loss.default")
    assert dict(loss.keywords)["classes"] == 11
    assert padded.types[loss.operands[0]].shape == (6, 12)
    assert padded.types["table.weight"].shape == (12, 5)
    assert graph_of().fingerprint() == trace_again().fingerprint(), "the graph that was traced stays as it is"


def trace_again() -> OperatorGraph:
    graph = graph_of()
    with_padding(graph, (("head.weight", 4),))
    return graph


def test_what_divides_is_left_alone() -> None:
    graph = graph_of()
    assert with_padding(graph, (("head.weight", 11), ("gate*", 7))) is graph


@pytest.mark.parametrize(
    ("kind", "pattern", "said"),
    [
        ("dropout", "gate.weight", "dropout"),
        ("mean", "gate.weight", "mean"),
        ("softmax", "gate.weight", "softmax"),
        ("", "haed.weight", "head.weight"),
        ("norm", "gate.weight", "pad: "),
    ],
)
def test_what_would_count_is_refused(kind: str, pattern: str, said: str) -> None:
    with refused(RequestError, said):
        with_padding(graph_of(kind), ((pattern, 4),))


def test_padding_to_another_number_than_devices_is_searched() -> None:
    update = Update(padded=(("head.weight", 8),))  # 16 rows, of which no device has what it would have of 11
    plan = planner.search(graph_of(), "h100-80gb", devices=4, batch=3, global_batch=12, update=update).plan
    assert plan.training.update.padded == update.padded


def test_heads_are_padded_by_whole_groups() -> None:
    """Six heads of queries share three of keys: with a fourth of these there are eight."""
    changes = {"hidden_size": 48, "num_heads": 6, "num_kv_heads": 3, "num_layers": 1}
    reference = "llama-tiny" + "".join(f"+{name}={value}" for name, value in changes.items())
    built = build_model(reference, dtype="float32", device="meta", sequence_length=8)
    graph = trace(built.module, built.args, built.kwargs)
    padded = with_padding(graph, (("*k_proj.weight", 4 * 8),))
    assert padding_for(graph, 4) == (("model.layers.*.self_attn.q_proj.weight", 4 * 16),)
    assert ("lm_head.weight", 3) in padding_for(graph, 3)  # and no heads
    assert not any("_proj" in name and number > 3 for name, number in padding_for(graph, 3))
    shapes = {name.rpartition("self_attn.")[2]: padded.types[name].shape for name in graph.parameter_names}
    assert (shapes["q_proj.weight"], shapes["k_proj.weight"]) == ((64, 48), (32, 48))
    assert (shapes["v_proj.weight"], shapes["o_proj.weight"]) == ((32, 48), (48, 64))


def odd_gpt(dtype: str) -> OperatorGraph:
    built = build_model("gpt-tiny+vocab_size=1001+num_layers=1", dtype=dtype, device="meta", sequence_length=8)
    return trace(built.module, built.args, built.kwargs)


def test_rows_of_16_bits_are_padded_to_whole_words() -> None:
    graph = odd_gpt("bfloat16")
    assert aligned(graph, ()) == (("wte.weight", 8),)
    assert aligned(graph, (("wte.weight", 20),)) == (("wte.weight", 40),)
    assert aligned(graph, (("wte.weight", 16),)) == (("wte.weight", 16),)
    assert aligned(odd_gpt("float32"), ()) == ()


def test_tables_that_are_only_looked_up_are_not_padded_to_whole_words() -> None:
    built = build_model("bert-tiny+vocab_size=1001+num_layers=1", dtype="bfloat16", device="meta", sequence_length=8)
    graph = trace(built.module, built.args, built.kwargs)
    assert graph.types["token_type_embeddings.weight"].shape[0] == 2
    assert aligned(graph, ()) == (("word_embeddings.weight", 8),)


def test_rows_of_a_matrix_that_is_turned_by_hand_are_padded_to_whole_words() -> None:
    class Turned(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.head, self.few = nn.Linear(16, 11, bias=False), nn.Embedding(3, 16)

        def forward(self, tokens: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
            return nn.functional.cross_entropy(self.few(tokens) @ self.head.weight.t(), targets)

    tokens = torch.zeros(4, dtype=torch.int64)
    graph = trace(Turned().bfloat16(), (tokens, tokens), {})
    assert aligned(graph, ()) == (("head.weight", 8),)


def test_a_plan_says_which_rows_nobody_pads(tmp_path: Path) -> None:
    job = ["--model", "gpt-tiny+vocab_size=20001+num_layers=1", "--devices", "1", "--global-batch", "4"]
    job += ["--hardware", "h200-141gb", "-o", str(tmp_path / "plan.json")]
    said = "The rows of wte.weight (20,001) are not multiples of 8 (16 bytes), so their matrix products take longer"
    assert said in CliRunner().invoke(app, job).output
    assert "not multiples of 8" not in CliRunner().invoke(app, [*job, "--pad", "auto"]).output


def test_rows_are_padded_where_that_is_left_to_the_search_and_products_of_odd_ones_take_longer() -> None:
    job = {"devices": 1, "global_batch": 32, "hardware": "h200-141gb"}
    model = "gpt-tiny+vocab_size=20001+num_layers=1"
    odd, padded = planner.search(model, **job).plan, planner.search(model, pad="auto", **job).plan
    assert padded.training.update.padded == (("wte.weight", 8),)
    assert padded.prediction.step_seconds < odd.prediction.step_seconds
    assert not planner.search(model, pad="auto", **{**job, "hardware": "ascend-910b-64gb"}).plan.training.update.padded
