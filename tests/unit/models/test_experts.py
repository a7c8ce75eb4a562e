"""The operator of a mixture of experts, and decoders with it."""

import pytest
import torch
import torch.nn.functional as F

from planner.graph.kinds import find_blocks
from planner.graph.trace import trace
from planner.models.experts.mixture import SparseMLP, experts
from planner.models.experts.router import Routing
from planner.models.experts.rows import capacity_of
from planner.models.llama import Llama, LlamaConfig

B, S, H, K, E, W = 3, 5, 8, 2, 4, 6  # samples, tokens, hidden, chosen, experts, width


def operands() -> tuple[torch.Tensor, ...]:
    torch.manual_seed(0)
    chosen = torch.stack([torch.randperm(E)[:K] for _ in range(B * S)]).view(B, S, K)
    weights = (torch.randn(E, W, H), torch.randn(E, W, H), torch.randn(E, H, W))
    return tuple(
        tensor.double() if tensor.is_floating_point() else tensor
        for tensor in (torch.randn(B, S, H), torch.rand(B, S, K), chosen, *weights)
    )


def every_expert(
    x: torch.Tensor,
    weights: torch.Tensor,
    chosen: torch.Tensor,
    gate: torch.Tensor,
    up: torch.Tensor,
    down: torch.Tensor,
) -> torch.Tensor:
    """All experts for all tokens, and then those that were chosen."""
    wide = F.silu(torch.einsum("bsh,efh->bsef", x, gate)) * torch.einsum("bsh,efh->bsef", x, up)
    every = torch.einsum("bsef,ehf->bseh", wide, down)
    chances = torch.zeros(B, S, E, dtype=x.dtype).scatter(-1, chosen, weights)
    return torch.einsum("bseh,bse->bsh", every, chances)


def test_the_operator_is_the_sum_over_the_chosen_experts() -> None:
    given = operands()
    torch.testing.assert_close(experts(*given), every_expert(*given))


@pytest.mark.thorough
@pytest.mark.slow
def test_its_gradients() -> None:
    given = [tensor.requires_grad_(tensor.is_floating_point()) for tensor in operands()]
    assert torch.autograd.gradcheck(experts, given)


def test_nothing_is_dropped_where_all_tokens_choose_one_expert() -> None:
    x, weights, _, *rest = operands()
    chosen = torch.tensor([3, 0]).expand(B, S, K)
    torch.testing.assert_close(experts(x, weights, chosen, *rest), every_expert(x, weights, chosen, *rest))


def in_a_loop(
    x: torch.Tensor, weights: torch.Tensor, chosen: torch.Tensor, *rest: torch.Tensor, capacity: int
) -> torch.Tensor:
    """Choice by choice, in the order of the tokens; each sample has room for so many rows of an expert."""
    gate, up, down = rest
    every = []
    for sample in range(x.shape[0]):
        room = [capacity] * len(gate)
        for token in range(x.shape[1]):
            made = torch.zeros_like(x[sample, token])
            for place in range(chosen.shape[2]):
                expert = int(chosen[sample, token, place])
                room[expert] -= 1
                if room[expert] >= 0:
                    wide = F.silu(gate[expert] @ x[sample, token]) * (up[expert] @ x[sample, token])
                    made = made + weights[sample, token, place] * (down[expert] @ wide)
            every.append(made)
    return torch.stack(every).view(x.shape)


@pytest.mark.parametrize("capacity", [1, 2, 3, S])
def test_results_and_gradients_are_those_of_a_plain_loop(capacity: int) -> None:
    given = [tensor.requires_grad_(tensor.is_floating_point()) for tensor in operands()]
    leaves = [tensor for tensor in given if tensor.requires_grad]
    capped, looped = experts(*given, capacity), in_a_loop(*given, capacity=capacity)
    torch.testing.assert_close(capped, looped)
    torch.manual_seed(1)
    gradient = torch.randn_like(capped)
    found = torch.autograd.grad(capped, leaves, gradient)
    torch.testing.assert_close(found, torch.autograd.grad(looped, leaves, gradient), rtol=1e-10, atol=1e-12)
    assert torch.equal(capped, experts(*given)) == (capacity == S)


def test_what_a_sample_drops_does_not_depend_on_the_others() -> None:
    x, weights, chosen, *rest = operands()
    whole = experts(x, weights, chosen, *rest, 1)
    each = [experts(x[at : at + 1], weights[at : at + 1], chosen[at : at + 1], *rest, 1) for at in range(B)]
    torch.testing.assert_close(whole, torch.cat(each))


@pytest.mark.parametrize(
    ("factor", "tokens", "chosen", "count", "rows"),
    [(1.0, 8, 2, 4, 4), (1.25, 8, 2, 8, 3), (9.0, 8, 2, 4, 8), (0.1, 8, 1, 8, 1)],
)
def test_a_capacity_is_a_multiple_of_the_even_share(
    factor: float, tokens: int, chosen: int, count: int, rows: int
) -> None:
    assert capacity_of(factor, tokens, chosen, count) == rows


def test_frozen_experts_get_no_gradient() -> None:
    x, weights, chosen, *rest = operands()
    experts(x.requires_grad_(), weights, chosen, *rest).sum().backward()
    assert x.grad is not None
    assert all(tensor.grad is None for tensor in (weights, *rest))


@pytest.mark.parametrize("normalised", [True, False])
def test_the_router_weighs_its_choices(normalised: bool) -> None:
    torch.manual_seed(0)
    module = SparseMLP(H, E, W, Routing(chosen=K, normalised=normalised))
    for parameter in module.parameters():
        torch.nn.init.normal_(parameter)
    x = torch.randn(B, S, H)
    best = module.gate(x).softmax(-1).topk(K)
    weights = best.values / best.values.sum(-1, keepdim=True) if normalised else best.values
    matrices = module.experts.gate_proj, module.experts.up_proj, module.experts.down_proj
    result, loss = module(x)
    assert loss is None
    torch.testing.assert_close(result, every_expert(x, weights, best.indices, *matrices))


def decoder(**other: int) -> Llama:
    config = LlamaConfig(
        num_layers=5, hidden_size=32, ffn_size=64, num_heads=4, num_kv_heads=2, vocab_size=64, sequence_length=8,
        num_experts=4, experts_per_token=2, expert_size=16, **other,
    )  # fmt: skip
    with torch.device("meta"):
        return Llama(config)


@pytest.mark.thorough
@pytest.mark.slow
def test_a_decoder_is_traced_into_equal_blocks_after_its_dense_layers() -> None:
    tokens = torch.zeros(2, 8, dtype=torch.int64, device="meta")
    graph = trace(decoder(dense_layers=2, shared_size=24), (tokens, tokens.clone()))
    assert sum(op.op == "planner.experts.default" for op in graph.operators) == 3
    blocks = find_blocks(graph)
    assert blocks.kinds == (0, 0, 1, 1, 1)
    inside = [graph.operators[at] for at in blocks.operators(2)]
    assert [op.name for op in inside if "experts" in op.op] == ["model.layers.2.mlp.experts/experts"]
    full = trace(decoder(dense_layers=2, shared_size=24), (tokens, tokens.clone()), full=True)
    assert graph.fingerprint() == full.fingerprint()


def test_names_are_those_that_people_know() -> None:
    names = [name for name, _ in decoder(shared_size=24).named_parameters() if "layers.0.mlp" in name]
    assert [name.removeprefix("model.layers.0.mlp.") for name in names] == [
        "gate.weight",
        *(f"experts.{matrix}" for matrix in ("gate_proj", "up_proj", "down_proj")),
        *(f"shared_expert.{matrix}.weight" for matrix in ("gate_proj", "up_proj", "down_proj")),
    ]
