"""Experts without a gate, and with other activations than SiLU: the operator, and models of transformers."""

import json
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F
from torch import nn

from planner.errors import ModelError
from planner.graph.kinds import find_blocks
from planner.graph.trace import trace
from planner.models.experts.mixture import experts
from planner.models.experts.rows import ACTIVATIONS, activation_of
from planner.models.huggingface.any_experts import AS_ONE_OPERATOR, activation_name, check_experts, experts_of
from planner.models.huggingface.rewriting import experts_where_they_can
from planner.models.huggingface.switch import unstacked
from planner.models.zoo import BuiltModel, build_model
from planner.sharding.rescale import rescale_batch
from planner.sharding.rules import rule_of
from tests.refusals import refused

CONFIGS = Path(__file__).resolve().parents[2] / "configs"
B, S, H, K, E, W = 3, 5, 8, 2, 4, 6  # samples, tokens, hidden, chosen, experts, width

PLAIN: dict[str, Callable[[torch.Tensor], torch.Tensor]] = {
    "silu": lambda x: x * torch.sigmoid(x),
    "gelu": lambda x: x * 0.5 * (1 + torch.erf(x / 2**0.5)),
    "gelu_tanh": lambda x: 0.5 * x * (1 + torch.tanh((2 / torch.pi) ** 0.5 * (x + 0.044715 * x**3))),
    "relu": lambda x: x * (x > 0),
    "relu2": lambda x: x * x * (x > 0),
}


def drawn(*, gated: bool, biases: bool) -> dict[str, Any]:
    """What the operator is called with, in float64."""
    generator = torch.Generator().manual_seed(0)

    def of(*shape: int) -> torch.Tensor:
        return torch.randn(*shape, dtype=torch.float64, generator=generator).requires_grad_()

    chosen = torch.stack([torch.randperm(E, generator=generator)[:K] for _ in range(B * S)]).view(B, S, K)
    first = {"gate": of(E, W, H) if gated else None, "up": of(E, W, H)}
    further = {f"{name}_bias": of(E, W) for name, matrix in first.items() if biases and matrix is not None}
    return {"x": of(B, S, H), "weights": of(B, S, K), "chosen": chosen, **first, "down": of(E, H, W), **further}


def every_expert(given: dict[str, Any], activation: str) -> torch.Tensor:
    """All experts for all tokens, and then those that were chosen."""

    def made(name: str) -> torch.Tensor:
        found = torch.einsum("bsh,efh->bsef", given["x"], given[name])
        return found + given.get(f"{name}_bias", torch.zeros(E, W))

    act = PLAIN[activation]
    wide = act(made("up")) if given["gate"] is None else act(made("gate")) * made("up")
    every = torch.einsum("bsef,ehf->bseh", wide, given["down"])
    chances = torch.zeros(B, S, E, dtype=torch.float64).scatter(-1, given["chosen"], given["weights"])
    return torch.einsum("bseh,bse->bsh", every, chances)


@pytest.mark.parametrize("biases", [False, True])
@pytest.mark.parametrize("gated", [False, True])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_results_and_gradients_are_those_of_all_experts(activation: str, gated: bool, biases: bool) -> None:
    given = drawn(gated=gated, biases=biases)
    leaves = [tensor for tensor in given.values() if tensor is not None and tensor.requires_grad]
    found, wanted = experts(**given, activation=activation), every_expert(given, activation)
    torch.testing.assert_close(found, wanted)
    gradient = torch.randn(found.shape, dtype=torch.float64, generator=torch.Generator().manual_seed(1))
    both = [torch.autograd.grad(one, leaves, gradient) for one in (found, wanted)]
    assert all(one.any() for one in both[1])
    torch.testing.assert_close(*both, rtol=1e-10, atol=1e-12)


@pytest.mark.parametrize("frozen", ["x", "weights", "up", "down", "up_bias"])
def test_what_needs_no_gradient_gets_none(frozen: str) -> None:
    given = drawn(gated=False, biases=True)
    given[frozen] = given[frozen].detach()
    experts(**given, activation="relu2").square().sum().backward()
    found = {name for name, tensor in given.items() if tensor is not None and tensor.grad is not None}
    assert found == {"x", "weights", "up", "down", "up_bias"} - {frozen}


@pytest.mark.parametrize(("gated", "bias"), [(True, "up_bias"), (True, "gate_bias"), (False, "gate_bias")])
def test_a_bias_alone_is_refused(gated: bool, bias: str) -> None:
    given = drawn(gated=gated, biases=False) | {bias: torch.ones(E, W, dtype=torch.float64)}
    for tensors in (given, {name: each if each is None else each.to("meta") for name, each in given.items()}):
        with refused(ModelError, bias, "give both" if gated else "leave it out"):
            experts(**tensors)


def test_a_capacity_holds_without_a_gate() -> None:
    given = drawn(gated=False, biases=False)
    assert torch.equal(experts(**given, capacity=S), experts(**given))
    assert not torch.equal(experts(**given, capacity=1), experts(**given))


@pytest.mark.parametrize(
    ("name", "wrong", "facts"),
    [("swish", {}, ("swish", "relu2")), ("relu", {"limit": 2.0}, (2, "silu")), ("silu", {"limit": 2.0}, (2, "gate"))],
)
def test_what_an_activation_is_not(name: str, wrong: dict[str, float], facts: tuple[object, ...]) -> None:
    with refused(ModelError, *facts):
        activation_of(name, gated=False, **wrong)


class OfParameters(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.slope = nn.Parameter(torch.ones(1))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(x) * self.slope


def test_activations_of_transformers_are_known_by_what_they_make() -> None:
    from transformers.activations import ACT2FN

    known = {name: activation_name(ACT2FN[name]) for name in ACT2FN if name not in ("xielu", "prelu")}
    assert {name: one for name, one in known.items() if one is not None} == {
        "gelu": "gelu", "gelu_python": "gelu",
        "gelu_fast": "gelu_tanh", "gelu_new": "gelu_tanh", "gelu_pytorch_tanh": "gelu_tanh",
        "gelu_python_tanh": "gelu_tanh", "gelu_accurate": "gelu_tanh",
        "relu": "relu", "relu2": "relu2", "silu": "silu", "swish": "silu",
    }  # fmt: skip
    assert activation_name(F.silu) == "silu"
    assert activation_name(OfParameters()) is None
    assert activation_name(None) is None


# models of transformers


def small(family: str, folder: Path, **changes: Any) -> str:
    """A config like one of `tests/configs`."""
    content = json.loads((CONFIGS / family / "config.json").read_text())
    (folder / "config.json").write_text(json.dumps({**content, **changes}))
    return str(folder)


def of_config(reference: str, **options: Any) -> BuiltModel:
    """A model with weights as large as those of trained ones, so that every part of it counts."""
    model = build_model(reference, dtype="float32", sequence_length=8, device="cpu", **options)
    generator = torch.Generator().manual_seed(0)
    for name, parameter in model.module.named_parameters():
        nn.init.normal_(parameter, std=1.0 if "router" in name or "gate." in name else 0.3, generator=generator)
    return model


def inputs_of(model: BuiltModel) -> dict[str, torch.Tensor]:
    generator = torch.Generator().manual_seed(1)
    return {
        name: torch.ones(4, *tensor.shape[1:], dtype=tensor.dtype)
        if name == "attention_mask"
        else torch.randint(0, 64, (4, *tensor.shape[1:]), generator=generator)
        for name, tensor in model.kwargs.items()
    }


def learnt(module: Any, inputs: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Loss, logits and the gradients of all weights."""
    module.zero_grad()
    made = module(**inputs)
    made.loss.backward()
    gradients = {name: one.grad for name, one in module.named_parameters() if one.grad is not None}
    return {"loss": made.loss.detach(), "logits": made.logits.detach(), **gradients}


@pytest.mark.parametrize(
    "changes",
    [{}, {"moe_latent_size": None, "n_group": 1, "topk_group": 1}, {"mlp_hidden_act": "gelu", "norm_topk_prob": False}],
    ids=str,
)
def test_nemotron_computes_what_that_of_transformers_computes(changes: dict[str, Any], tmp_path: Path) -> None:
    """Experts with two matrices, of latent vectors and of whole ones; sigmoid scores, a bias that chooses, groups."""
    model = of_config(small("nemotron-h", tmp_path, **changes))
    for name, buffer in model.module.named_buffers():
        if name.endswith("e_score_correction_bias"):
            buffer.copy_(torch.linspace(-0.4, 0.4, len(buffer)).roll(3))
    inputs, found = inputs_of(model), []
    for kind in (AS_ONE_OPERATOR, "eager"):
        model.module.set_experts_implementation(kind)
        found.append(learnt(model.module, inputs))
    assert all(found[1][f"model.layers.1.mixer.experts.{name}_proj"].any() for name in ("up", "down"))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


@pytest.mark.usefixtures("whole_weights")
@pytest.mark.parametrize("activation", ["gelu", "relu2"])
def test_a_gate_may_have_another_activation(activation: str, tmp_path: Path) -> None:
    model = of_config(small("olmoe", tmp_path, hidden_act=activation, head_dim=8))
    inputs, found = inputs_of(model), []
    for kind in (AS_ONE_OPERATOR, "eager"):
        model.module.set_experts_implementation(kind)
        found.append(learnt(model.module, inputs))
    torch.testing.assert_close(*found, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize("gated", [True, False])
@pytest.mark.parametrize("transposed", [True, False])
def test_biases_and_transposed_matrices_are_those_of_transformers(transposed: bool, gated: bool) -> None:
    """No model of transformers has biases without a gate; its own function computes them."""
    from transformers.integrations.moe import batched_mm_experts_forward, use_experts_implementation

    @use_experts_implementation(has_gate=gated, has_bias=True, is_transposed=transposed)
    class Own(nn.Module):
        def __init__(self, config: Any) -> None:
            super().__init__()
            self.num_experts, self.act_fn = E, nn.GELU()
            wide, first = (2 * W if gated else W), "gate_up_proj" if gated else "up_proj"
            shapes = {first: (E, wide, H), "down_proj": (E, H, W)}
            for name, (count, rows, columns) in shapes.items():
                shape = (count, columns, rows) if transposed else (count, rows, columns)
                setattr(self, name, nn.Parameter(torch.randn(shape, dtype=torch.float64)))
                setattr(self, f"{name}_bias", nn.Parameter(torch.randn(count, rows, dtype=torch.float64)))

    part = Own(None)
    check_experts(part, "own")
    given = drawn(gated=gated, biases=False)
    tokens, weights, chosen = (given[name].detach().flatten(0, 1) for name in ("x", "weights", "chosen"))
    found = []
    for function in (experts_of, batched_mm_experts_forward):
        part.zero_grad()
        made = function(part, tokens, chosen, weights)
        made.square().sum().backward()
        found.append([made.detach(), *(one.grad for one in part.parameters())])
    torch.testing.assert_close(*found, rtol=1e-10, atol=1e-10)


def as_transformers_has_it(gradients: dict[str, torch.Tensor]) -> dict[str, torch.Tensor]:
    """Tensors of Switch Transformers under the names of transformers."""

    def each() -> Iterator[tuple[str, torch.Tensor]]:
        for name, tensor in gradients.items():
            place, _, last = name.rpartition(".")
            short = {"up_proj": "wi", "down_proj": "wo"}.get(last)
            if short is None:
                yield name, tensor
            else:
                yield from ((f"{place}.expert_{at}.{short}.weight", one) for at, one in enumerate(tensor))

    return dict(each())


@pytest.mark.slow
@pytest.mark.parametrize(
    "changes",
    [
        {},
        {"expert_capacity": 1, "router_bias": True},
        {"expert_capacity": 2},
        {"expert_capacity": 64, "dense_act_fn": "gelu_new"},
    ],
)
def test_switch_computes_what_that_of_transformers_computes(changes: dict[str, Any], tmp_path: Path) -> None:
    """Tokens beyond the capacity of an expert get nothing of it, and give it no gradient, sample by sample."""
    from transformers import SwitchTransformersForConditionalGeneration

    reference = small("switch", tmp_path, **changes)
    model = of_config(reference)
    inputs = inputs_of(model)
    found = as_transformers_has_it(learnt(model.module, inputs))
    plain = SwitchTransformersForConditionalGeneration(model.module.config).train()
    plain.load_state_dict(as_transformers_has_it(model.module.state_dict()))
    wanted, dropped = learnt(plain, inputs), 0
    for part in plain.modules():
        if type(part).__name__ == "SwitchTransformersTop1Router":
            hidden = torch.randn(4, 8, 32, generator=torch.Generator().manual_seed(2))
            dropped += int((part(hidden)[0].sum(-1) == 0).sum())
    assert (dropped > 0) == (model.module.config.expert_capacity < 8)
    silent = {name: torch.zeros_like(one) for name, one in found.items() if name not in wanted}
    assert all("expert_" in name for name in silent)  # experts that no token chose
    torch.testing.assert_close(found, {**wanted, **silent}, rtol=1e-4, atol=1e-5)


@pytest.mark.slow
def test_tokens_beyond_all_capacities_are_no_work(tmp_path: Path) -> None:
    """4 experts with a capacity of 1 take 4 of 8 tokens."""
    few = dict.fromkeys(("num_layers", "num_decoder_layers", "num_sparse_encoder_layers"), 1)
    model = build_model(small("switch", tmp_path, expert_capacity=1, **few), dtype="float32", sequence_length=8)
    graph = trace(model.module, model.args, model.kwargs)
    assert {op.arguments[6] for op in graph.operators if op.op == "planner.experts.default"} == {1}


def test_what_a_factory_makes_is_stacked_once() -> None:
    from transformers import SwitchTransformersConfig, SwitchTransformersForConditionalGeneration

    content = json.loads((CONFIGS / "switch/config.json").read_text())
    module = SwitchTransformersForConditionalGeneration(SwitchTransformersConfig(**content))
    for _ in range(2):
        experts_where_they_can(module)
    stacked = [name for name, _ in module.named_parameters() if name.endswith("experts.up_proj")]
    assert len(stacked) == 6
    assert all(type(part).__name__ != "SwitchTransformersExperts" for part in module.modules())
    plain = SwitchTransformersForConditionalGeneration(SwitchTransformersConfig(**content))
    plain.load_state_dict(unstacked(module, module.state_dict()))
    other = SwitchTransformersForConditionalGeneration(SwitchTransformersConfig(**content, router_bias=True))
    other.encoder.block[0].layer[-1].mlp.router.jitter_noise = 0.5
    with refused(ModelError, "SwitchTransformersForConditionalGeneration", "router_jitter_noise", 0.5):
        experts_where_they_can(other)


@pytest.mark.cases(1)
@pytest.mark.slow
@pytest.mark.parametrize("family", ["nemotron-h", "switch"])
def test_they_are_traced_and_can_be_planned(family: str) -> None:
    model = build_model(str(CONFIGS / family), dtype="bfloat16", sequence_length=8)
    assert all(tensor.is_meta for tensor in (*model.module.parameters(), *model.module.buffers()))
    graph = trace(model.module, model.args, model.kwargs)
    rules = {op.name: rule_of(graph, op) for op in graph.operators}
    found = [rules[op.name] for op in graph.operators if op.op == "planner.experts.default"]
    assert len(found) == (2 if family == "nemotron-h" else 6)
    assert {rule.format().partition(", e f h")[2] for rule in found} == {
        ", e h f -> b 1 h" if family == "nemotron-h" else ", e h f -> b s h"
    }
    assert all({"e", "e@b", "f"} <= {factor.name for factor in rule.factors} for rule in found)
    assert find_blocks(graph).count >= 2
    larger = rescale_batch(graph, model.batch, 6)
    assert all(larger.types[name].shape[0] == 6 for name in larger.inputs)


@pytest.mark.parametrize(
    ("family", "changes", "facts"),
    [
        ("switch", {"dropout_rate": 0.1}, ("dropout_rate", 0.1, "encoder.block.0.layer.1.mlp")),
        ("switch", {"router_jitter_noise": 0.01}, ("router_jitter_noise", 0.01, "encoder.block.0.layer.1.mlp")),
        ("switch", {"dense_act_fn": "mish"}, ("MishActivation", "--model package.module:factory")),
        ("nemotron-h", {"mlp_hidden_act": "quick_gelu"}, ("QuickGELUActivation", "model.layers.1.mixer.experts")),
        ("olmoe", {"hidden_act": "relu6"}, ("ReLU6", "model.layers.0.mlp.experts", "--model package.module:factory")),
    ],
    ids=str,
)
def test_what_the_operator_does_not_compute_is_refused(
    family: str, changes: dict[str, Any], facts: tuple[object, ...], tmp_path: Path
) -> None:
    with refused(ModelError, tmp_path / "config.json", *facts):
        build_model(small(family, tmp_path, **changes), dtype="float32", sequence_length=8)


NLLB = {
    "architectures": ["NllbMoeForConditionalGeneration"], "model_type": "nllb-moe", "vocab_size": 64, "d_model": 16,
    "encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2,
    "encoder_ffn_dim": 16, "decoder_ffn_dim": 16, "encoder_sparse_step": 2, "decoder_sparse_step": 2, "num_experts": 4,
}  # fmt: skip


def test_nllb_of_transformers_is_refused_as_it_computes_two_experts_alone(tmp_path: Path) -> None:
    """What the refusal says is so: of four experts that a router chooses from two get all tokens."""
    from transformers import NllbMoeConfig
    from transformers.models.nllb_moe.modeling_nllb_moe import NllbMoeSparseMLP

    (tmp_path / "config.json").write_text(json.dumps(NLLB))
    with refused(ModelError, tmp_path / "config.json", "NLLB-MoE", "model.encoder.layers.1.ffn"):
        build_model(str(tmp_path), dtype="float32", sequence_length=8)
    part, called = NllbMoeSparseMLP(NllbMoeConfig(d_model=16, num_experts=4), 8), set()
    for number in range(4):
        part.experts[f"expert_{number}"].register_forward_hook(lambda *_, number=number: called.add(number))
    part(torch.randn(4, 16, 16, generator=torch.Generator().manual_seed(0)))
    assert called == {0, 1}
