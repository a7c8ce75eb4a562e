"""DeepSeek models compute what the publications say."""

import math
from dataclasses import replace

import pytest
import torch
import torch.nn.functional as F

from planner.models.deepseek import Deepseek, DeepseekConfig, LatentAttention
from planner.models.llama import rotary_tables, rotated
from planner.models.zoo import ZOO, build_model

TINY = DeepseekConfig(**dict(ZOO["deepseek-tiny"].dimensions))  # type: ignore[arg-type]
ACTIVE = {"deepseek-v2-lite": (2.4e9, 0), "deepseek-v2": (21e9, 1), "deepseek-v3": (36.6e9, 0)}
"""Parameters that a token uses, as published, and whether both embedding and head are counted (else the head alone)."""


@pytest.mark.parametrize("name", ACTIVE)
def test_active_parameters_are_the_published_ones(name: str) -> None:
    built, dimensions = build_model(name, dtype="bfloat16"), dict(ZOO[name].dimensions)
    share = float(dimensions["experts_per_token"]) / float(dimensions["num_experts"])  # type: ignore[arg-type]
    sizes = [(parameter.dim() == 3, parameter.numel()) for parameter in built.module.parameters()]
    active = sum(size * (share if stacked else 1.0) for stacked, size in sizes)
    published, embedding = ACTIVE[name]
    active -= 0 if embedding else built.module.model.embed_tokens.weight.numel()
    assert active == pytest.approx(published, rel=0.025)


@pytest.mark.parametrize("q_rank", [0, 64])
def test_latent_attention_is_attention_of_heads_made_from_a_latent_vector(q_rank: int) -> None:
    """Head by head, with the scores written out."""
    torch.manual_seed(0)
    config = replace(TINY, q_rank=q_rank)
    attention = LatentAttention(config).double()
    x_BSH = torch.randn(2, 6, config.hidden_size, dtype=torch.float64)
    cos_SR, sin_SR = (table.double() for table in rotary_tables(config.rotary_size, 6, config.rope_theta))
    queries = attention._queries(x_BSH)
    latent, turning = attention.kv_a_proj_with_mqa(x_BSH).split([config.kv_rank, config.rotary_size], -1)
    made = attention.kv_b_proj(attention.kv_a_layernorm(latent))
    turned = rotated(turning.unsqueeze(1), cos_SR, sin_SR)[:, 0]
    heads = []
    size, width = config.plain_size + config.rotary_size, config.plain_size + config.value_size
    for head in range(config.num_heads):
        query, own = queries[..., head * size : (head + 1) * size], made[..., head * width : (head + 1) * width]
        plain, around = query[..., : config.plain_size], query[..., config.plain_size :]
        around = rotated(around.unsqueeze(1), cos_SR, sin_SR)[:, 0]
        scores = plain @ own[..., : config.plain_size].transpose(1, 2) + around @ turned.transpose(1, 2)
        later = torch.ones(6, 6, dtype=torch.bool).triu(1)
        chances = (scores / math.sqrt(size)).masked_fill(later, -torch.inf).softmax(-1)
        heads.append(chances @ own[..., config.plain_size :])
    wanted = attention.o_proj(torch.cat(heads, -1))
    assert torch.allclose(attention(x_BSH, cos_SR, sin_SR), wanted, atol=1e-12)


def test_the_first_blocks_are_dense() -> None:
    module = Deepseek(TINY)
    assert [layer.sparse for layer in module.model.layers] == [False, False, True, True, True]
    assert (module.model.layers[2].mlp.router.routing.scores, TINY.expert_groups) == ("sigmoid", 4)


def test_a_token_more_is_foretold() -> None:
    """The loss of the main model, and a share of that of the module after it; every parameter gets a gradient."""
    torch.manual_seed(0)
    config = replace(TINY, balance_loss=0.0, predicted_tokens=1, num_layers=3)
    module = Deepseek(config)
    draw = torch.randint(config.vocab_size, (2, config.sequence_length + 2))
    tokens, labels = draw[:, :-2], draw[:, 1:]
    loss = module(tokens, labels)
    x_BSH, _ = module.model(tokens)
    main = F.cross_entropy(module.lm_head(module.model.norm(x_BSH)).flatten(0, 1), labels[:, :-1].flatten())
    more = (loss - main).detach() / config.predicted_weight
    assert math.isclose(float(more), math.log(config.vocab_size), rel_tol=0.1)  # it has learnt nothing yet
    loss.backward()
    assert all(parameter.grad is not None for parameter in module.parameters())


def test_what_is_foretold_is_not_in_models_of_the_zoo() -> None:
    """Planning is of the main model, as the published parameter counts are."""
    assert all(dict(entry.dimensions).get("predicted_tokens", 0) == 0 for entry in ZOO.values())
