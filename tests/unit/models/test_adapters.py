"""Low-rank adapters: names that ask for them, modules that have them, and graphs of these."""

from dataclasses import replace

import pytest
import torch
from torch import nn

from planner.api.exporting import refuse_adapters
from planner.errors import ModelError, RequestError
from planner.graph.forward_only import frozen
from planner.graph.operator_graph import STARTING
from planner.graph.trace import trace
from planner.models.adapters import Adapters, adapters_of, refuse_unread, with_adapters_of, without_adapters
from planner.models.low_rank import add_adapters
from planner.models.zoo import build_model
from planner.plan.binding.bind import prepare
from planner.plan.plan import ModelReference
from tests.refusals import refused

ALL = "llama-tiny+lora=4+lora_alpha=6+lora_dropout=0.5+lora_layers=q_proj,down_proj+lora_trained=lm_head+num_layers=5"


class Blocks(nn.Module):
    """A model of three blocks, beside which stand linear layers that are in none."""

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(16, 8)
        self.blocks = nn.ModuleList(nn.Sequential(nn.Linear(8, 8), nn.GELU()) for _ in range(3))
        self.head = nn.Linear(8, 16)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        h = self.embed(x)
        for block in self.blocks:
            h = h + block(h)
        return nn.functional.cross_entropy(self.head(h).flatten(0, 1), y.flatten())


def test_a_name_says_all_of_its_adapters() -> None:
    assert adapters_of(ALL) == Adapters(
        rank=4, alpha=6.0, dropout=0.5, layers=("q_proj", "down_proj"), trained=("lm_head",)
    )
    assert adapters_of("llama-tiny+lora=4") == Adapters(rank=4, alpha=8.0)
    assert adapters_of("llama-tiny+num_layers=5") is None
    assert without_adapters(ALL) == "llama-tiny+num_layers=5"
    assert with_adapters_of("mod:factory", "mod:factory+lora=4") == "mod:factory+lora=4"
    assert with_adapters_of("mod:factory+lora=8", "mod:factory+lora=4") == "mod:factory+lora=8"


@pytest.mark.parametrize(
    ("name", "facts"),
    [
        ("llama-tiny+lora=0", ("--lora 0", "4,096")),
        ("llama-tiny+lora=x", ("--lora x",)),
        ("llama-tiny+lora_alpha=2", ("--lora-alpha", "--lora RANK")),
        ("llama-tiny+lora=2+lora_alpha=0", ("--lora-alpha 0", "above 0")),
        ("llama-tiny+lora=2+lora_layers=q_proj+lora_trained=q_proj", ("--lora-layers", "--lora-trained")),
        ("llama-tiny+lora=2+lora_dropout=2", ("--lora-dropout 2", 0.99)),
        ("llama-tiny+lora=2+lora_layers=,", ("--lora-layers", "q_proj,v_proj")),
        ("llama-tiny+lora=2+lora_layers=c_attn", ("--lora-layers c_attn", "q_proj")),
        ("llama-tiny+lora=2+lora_layers=norm", ("model.norm", "RMSNorm")),
        ("llama-tiny+lora=2+lora_trained=score", ("--lora-trained score",)),
        ("dlrm-tiny+lora=2+lora_layers=tables", ("tables",)),
    ],
)
def test_what_cannot_be_adapted_is_said(name: str, facts: tuple[object, ...]) -> None:
    with refused(ModelError, *facts):
        build_model(name, dtype="float32")


def test_a_model_without_blocks_wants_names_of_layers() -> None:
    with refused(ModelError, "lists of blocks", "--lora-layers"):
        add_adapters(nn.Linear(4, 4), Adapters(rank=2, alpha=4.0), "mine:factory")


def test_adapters_alone_are_trained_and_begin_with_nothing() -> None:
    torch.manual_seed(0)
    model = Blocks()
    x, y = torch.randint(16, (2, 4)), torch.randint(16, (2, 4))
    before, names = model(x, y), [name for name, _ in model.named_parameters()]
    add_adapters(model, Adapters(rank=2, alpha=3.0), "mine:factory")
    assert torch.equal(model(x, y), before)
    trained = {name for name, one in model.named_parameters() if one.requires_grad}
    assert trained == {f"blocks.{n}.0.lora_{which}.weight" for n in range(3) for which in "AB"}
    assert set(names) == {name for name, _ in model.named_parameters()} - trained
    layer = model.blocks[0][0]
    assert isinstance(layer, nn.Linear)
    with torch.no_grad():
        layer.lora_B.weight.fill_(0.5)
    plain = nn.functional.linear(model.embed(x), layer.weight, layer.bias)
    low = nn.functional.linear(nn.functional.linear(model.embed(x), layer.lora_A.weight), layer.lora_B.weight)
    torch.testing.assert_close(layer(model.embed(x)), plain + 1.5 * low)


def test_layers_and_modules_are_found_by_the_ends_of_their_names() -> None:
    model = build_model(ALL, dtype="float32").module
    trained = {name.split("layers.")[-1] for name, one in model.named_parameters() if one.requires_grad}
    places = [f"{n}.{layer}" for n in range(5) for layer in ("self_attn.q_proj", "mlp.down_proj")]
    assert trained == {f"{place}.lora_{which}.weight" for place in places for which in "AB"} | {"lm_head.weight"}


def test_gpt2_of_transformers_has_its_weights_the_other_way_round() -> None:
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(n_layer=2, n_embd=16, n_head=2, vocab_size=32, n_positions=8)
    with torch.device("meta"):
        model = transformers.GPT2LMHeadModel(config)
    add_adapters(model, Adapters(rank=2, alpha=4.0), "gpt2")
    shapes = {name: tuple(one.shape) for name, one in model.named_parameters() if one.requires_grad}
    assert shapes["transformer.h.1.attn.c_attn.lora_A.weight"] == (2, 16)
    assert shapes["transformer.h.1.attn.c_attn.lora_B.weight"] == (48, 2)
    assert len(shapes) == 2 * 4 * 2


def test_all_blocks_are_alike_though_the_embedding_is_frozen() -> None:
    """A gradient starts at the first block: it would differ from the others, which no pipeline divides evenly then."""
    with torch.device("meta"):
        model, x, y = Blocks(), torch.zeros(2, 4, dtype=torch.int64), torch.zeros(2, 4, dtype=torch.int64)
    add_adapters(model, Adapters(rank=2, alpha=4.0), "mine:factory")
    graph = trace(model, (x, y))
    starts = [op for op in graph.operators if op.op == STARTING]
    assert [op.operands for op in starts] == [("embed/embedding",)]
    assert prepare(graph)[1].count == 3
    evaluated = frozen(graph)
    assert not any(op.op == STARTING for op in evaluated.operators)
    assert not evaluated.trains
    assert {op.name for op in graph.operators} - {op.name for op in evaluated.operators} == {starts[0].name}


def test_gradients_start_nowhere_else_where_everything_is_trained() -> None:
    with torch.device("meta"):
        model, x, y = Blocks(), torch.zeros(2, 4, dtype=torch.int64), torch.zeros(2, 4, dtype=torch.int64)
    assert not any(op.op == STARTING for op in trace(model, (x, y)).operators)


def test_an_adapter_that_the_model_passes_by_is_refused() -> None:
    trained = ["blocks.0.out.lora_A.weight", "blocks.0.out.lora_B.weight"]
    refuse_unread({"blocks.0.out.weight", *trained}, trained)
    refuse_unread({"other.weight"}, trained)  # nobody reads the layer either
    with refused(ModelError, "blocks.0.out", "--lora-layers"):
        refuse_unread({"blocks.0.out.weight"}, trained)


def test_engines_that_would_train_all_weights_are_refused() -> None:
    adapted = ModelReference(reference="llama-tiny+lora=4", sequence_length=128, parameters=1, fingerprint="")
    for engine in ("megatron", "nemo", "torchtitan", "torch"):
        with refused(RequestError, engine, "llama-tiny+lora=4", "deepspeed"):
            refuse_adapters(engine, engine, adapted)
        refuse_adapters(engine, engine, replace(adapted, reference="llama-tiny"))
    refuse_adapters("accelerate", "Accelerate", adapted)


class Called(nn.Linear):
    """A linear layer of somebody's own."""


def test_linear_layers_of_other_classes_have_adapters_and_routers_have_none() -> None:
    layers = {
        "up": Called(8, 8),
        "gate": nn.Linear(8, 4),
        "down": nn.utils.parametrizations.weight_norm(nn.Linear(8, 8)),
    }
    model = nn.ModuleList([nn.ModuleDict(layers), nn.MultiheadAttention(8, 2)])
    add_adapters(model, Adapters(rank=2, alpha=4.0), "mine:factory")
    assert {name.removesuffix(".lora_A") for name, _ in model.named_modules() if name.endswith(".lora_A")} == {
        "0.up",
        "0.down",
    }
    with refused(ModelError, "0.up.lora_A", "without --lora"):
        add_adapters(model, Adapters(rank=2, alpha=4.0), "mine:factory")
