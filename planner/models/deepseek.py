"""DeepSeek-V2 and V3: decoders with multi-head latent attention, a few blocks with an MLP, then blocks with experts,
some of which serve all tokens (DeepSeek-AI 2024a, arXiv 2405.04434, section 2; 2024b, arXiv 2412.19437, section 2.1).

    x ── q_a ── norm ── q_b ──────────────> [ queries without | with positions ]     each head
      └─ kv_a ─┬ latent ── norm ── kv_b ──> [ keys without positions | values ]      each head
               └ keys with positions ────────────────────────────────────────────    one for all heads

Keys and values of all heads are made from one small latent vector of a token; so are queries, where they have a rank. A
rotation does not commute with the projection from the latent vector to heads. So only a part of every query and key has
positions, and this part of the keys is made beside the latent vector, the same for all heads. Keys are longer than
values.

Positions rotate halves, where the released weights rotate neighbours: the only difference is the order of rows in a
weight. Multi-token prediction (2024b, section 2.2) is a module after the blocks, which predicts one token more with the
embedding and the head of the model.

Shape legend: B batch, S sequence, H hidden, N heads, L latent, C part of a head without positions, R with positions,
D = C + R, E head of the values, V vocabulary.
"""

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F
from torch import nn

from planner.models.experts.mixture import SparseMLP
from planner.models.experts.router import Routing, start_of_losses
from planner.models.initialise import blank_embedding, initialise
from planner.models.llama import MLP, rotary_tables, rotated


@dataclass(frozen=True, slots=True, kw_only=True)
class DeepseekConfig:
    """Dimensions of a DeepSeek model, named as in the other families; `q_rank`, `kv_rank`, `plain_size`, `rotary_size`
    and `value_size` are q_lora_rank, kv_lora_rank, qk_nope_head_dim, qk_rope_head_dim and v_head_dim of the released
    config files.

    A `q_rank` of 0 makes queries without a latent vector. The first `dense_layers` blocks have an MLP of `ffn_size`,
    the others `num_experts` experts of `expert_size`, of which a token takes `experts_per_token`, and an MLP of
    `shared_size` for all tokens. The fields from `normalised_weights` to `balance_speed` say how experts are chosen
    (see `planner.models.experts.router.Routing`). The load-balancing loss is over each sample. `predicted_tokens`
    modules predict that many tokens beyond the next; their losses count `predicted_weight` each on average.

    Positions have the frequencies of `rope_theta`, unless `rope_frequencies` has one for each pair of `rotary_size`.
    The rotated parts are multiplied with `rope_magnitude`, and scores with `score_scale`, beside one over the root of
    the size of a key. These fields extend a model to sequences that are longer than those of its training (Peng et al.
    2023, arXiv 2309.00071).
    """

    num_layers: int
    hidden_size: int
    ffn_size: int
    num_heads: int
    q_rank: int
    kv_rank: int
    plain_size: int
    rotary_size: int
    value_size: int
    vocab_size: int
    sequence_length: int
    num_experts: int
    experts_per_token: int
    expert_size: int
    shared_size: int
    dense_layers: int
    normalised_weights: bool = True
    sigmoid_scores: bool = False
    weight_scale: float = 1.0
    expert_groups: int = 1
    chosen_groups: int = 1
    groups_by: Literal[1, 2] = 1
    balance_loss: float = 0.0
    balance_speed: float = 0.0
    rope_theta: float = 10_000.0
    rope_frequencies: tuple[float, ...] = ()
    rope_magnitude: float = 1.0
    score_scale: float = 1.0
    norm_epsilon: float = 1e-6
    predicted_tokens: int = 0
    predicted_weight: float = 0.3


class LatentAttention(nn.Module):
    """Causal self-attention whose keys and values are made from a latent vector."""

    def __init__(self, config: DeepseekConfig) -> None:
        super().__init__()
        hidden, heads, epsilon = config.hidden_size, config.num_heads, config.norm_epsilon
        self.query_sizes = [config.plain_size, config.rotary_size]
        self.latent_sizes = [config.kv_rank, config.rotary_size]
        self.made_sizes = [config.plain_size, config.value_size]
        queries = heads * sum(self.query_sizes)
        self.scale = None if config.score_scale == 1.0 else config.score_scale * sum(self.query_sizes) ** -0.5
        self.q_proj = None if config.q_rank else nn.Linear(hidden, queries, bias=False)
        self.q_a_proj = nn.Linear(hidden, config.q_rank, bias=False) if config.q_rank else None
        self.q_a_layernorm = nn.RMSNorm(config.q_rank, eps=epsilon) if config.q_rank else None
        self.q_b_proj = nn.Linear(config.q_rank, queries, bias=False) if config.q_rank else None
        self.kv_a_proj_with_mqa = nn.Linear(hidden, sum(self.latent_sizes), bias=False)
        self.kv_a_layernorm = nn.RMSNorm(config.kv_rank, eps=epsilon)
        self.kv_b_proj = nn.Linear(config.kv_rank, heads * sum(self.made_sizes), bias=False)
        self.o_proj = nn.Linear(heads * config.value_size, hidden, bias=False)

    def forward(self, x_BSH: torch.Tensor, cos_SR: torch.Tensor, sin_SR: torch.Tensor) -> torch.Tensor:
        query_BNSD = _heads(self._queries(x_BSH), sum(self.query_sizes))
        query_BNSC, turning_BNSR = torch.split_with_sizes(query_BNSD, self.query_sizes, -1)
        latent_BSL, turning_BSR = torch.split_with_sizes(self.kv_a_proj_with_mqa(x_BSH), self.latent_sizes, -1)
        made_BNSX = _heads(self.kv_b_proj(self.kv_a_layernorm(latent_BSL)), sum(self.made_sizes))
        key_BNSC, value_BNSE = torch.split_with_sizes(made_BNSX, self.made_sizes, -1)
        turned_BNSR = rotated(turning_BSR.unsqueeze(1), cos_SR, sin_SR).expand(-1, key_BNSC.shape[1], -1, -1)
        mixed_BNSE = F.scaled_dot_product_attention(
            torch.cat((query_BNSC, rotated(turning_BNSR, cos_SR, sin_SR)), dim=-1),
            torch.cat((key_BNSC, turned_BNSR), dim=-1),
            value_BNSE,
            is_causal=True,
            scale=self.scale,
        )
        result: torch.Tensor = self.o_proj(mixed_BNSE.transpose(1, 2).flatten(2))
        return result

    def _queries(self, x_BSH: torch.Tensor) -> torch.Tensor:
        """B S N*D"""
        if self.q_proj is not None:
            whole: torch.Tensor = self.q_proj(x_BSH)
            return whole
        assert self.q_a_proj is not None
        assert self.q_a_layernorm is not None
        assert self.q_b_proj is not None
        result: torch.Tensor = self.q_b_proj(self.q_a_layernorm(self.q_a_proj(x_BSH)))
        return result


def _heads(x_BSX: torch.Tensor, size: int) -> torch.Tensor:
    """A row of all heads as B N S size."""
    heads_BSNX: torch.Tensor = x_BSX.unflatten(-1, (-1, size))  # type: ignore[no-untyped-call]
    return heads_BSNX.transpose(1, 2)


class DecoderLayer(nn.Module):
    """One block: latent attention and MLP or experts, each behind a norm and with a residual."""

    def __init__(self, config: DeepseekConfig, sparse: bool) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.norm_epsilon)
        self.self_attn = LatentAttention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.norm_epsilon)
        self.sparse = sparse
        self.mlp = _experts(config) if sparse else MLP(config.hidden_size, config.ffn_size)

    def forward(
        self, x_BSH: torch.Tensor, balance: torch.Tensor | None, cos_SR: torch.Tensor, sin_SR: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The tokens after this block, and `balance`, the sum of router losses with that of this block. A block
        without a router adds nothing, by the same operator: so all blocks hand on the same kinds of values."""
        x_BSH = x_BSH + self.self_attn(self.input_layernorm(x_BSH), cos_SR, sin_SR)
        given_BSH = self.post_attention_layernorm(x_BSH)
        result_BSH, loss = self.mlp(given_BSH) if self.sparse else (self.mlp(given_BSH), None)
        if balance is not None:
            balance = balance + (start_of_losses(given_BSH) if loss is None else loss)
        return x_BSH + result_BSH, balance


def _experts(config: DeepseekConfig) -> nn.Module:
    return SparseMLP(
        config.hidden_size,
        config.num_experts,
        config.expert_size,
        Routing(
            chosen=config.experts_per_token,
            scores="sigmoid" if config.sigmoid_scores else "softmax",
            normalised=config.normalised_weights,
            scale=config.weight_scale,
            groups=config.expert_groups,
            chosen_groups=config.chosen_groups,
            groups_by=config.groups_by,
            loss=config.balance_loss,
            loss_over="sequence",
            bias_speed=config.balance_speed,
        ),
        shared=MLP(config.hidden_size, config.shared_size) if config.shared_size else None,
    )


class Decoder(nn.Module):
    """Embedding, blocks and the final norm."""

    def __init__(self, config: DeepseekConfig) -> None:
        super().__init__()
        self.embed_tokens = blank_embedding(config.vocab_size, config.hidden_size)
        self.layers = nn.ModuleList(DecoderLayer(config, at >= config.dense_layers) for at in range(config.num_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.norm_epsilon)
        cos_SR, sin_SR = _tables(config)
        self.register_buffer("cos", cos_SR, persistent=False)
        self.register_buffer("sin", sin_SR, persistent=False)
        self.balanced = bool(config.balance_loss)

    def forward(self, tokens_BS: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The result of the last block, B S H, before the norm, and the losses of all routers, None where there are
        none."""
        x_BSH: torch.Tensor = self.embed_tokens(tokens_BS)
        balance = start_of_losses(x_BSH) if self.balanced else None
        for layer in self.layers:
            x_BSH, balance = layer(x_BSH, balance, self.cos, self.sin)
        return x_BSH, balance


def _tables(config: DeepseekConfig) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of the rotation angles, S R each."""
    if not config.rope_frequencies:
        return rotary_tables(config.rotary_size, config.sequence_length, config.rope_theta)
    positions_S = torch.arange(config.sequence_length, dtype=torch.float32)
    angles = torch.outer(positions_S, torch.tensor(config.rope_frequencies))
    angles_SR = torch.cat((angles, angles), dim=-1)
    return angles_SR.cos() * config.rope_magnitude, angles_SR.sin() * config.rope_magnitude


class Foretelling(nn.Module):
    """Computes from the hidden states for one token, and that token, the states for the next (2024b, equations
    21-23)."""

    def __init__(self, config: DeepseekConfig) -> None:
        super().__init__()
        self.hnorm, self.enorm, self.norm = (nn.RMSNorm(config.hidden_size, eps=config.norm_epsilon) for _ in range(3))
        self.eh_proj = nn.Linear(2 * config.hidden_size, config.hidden_size, bias=False)
        self.layer = DecoderLayer(config, sparse=True)

    def forward(
        self,
        x_BSH: torch.Tensor,
        token_BSH: torch.Tensor,
        balance: torch.Tensor | None,
        cos_SR: torch.Tensor,
        sin_SR: torch.Tensor,
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        joined_BSH = self.eh_proj(torch.cat((self.hnorm(x_BSH), self.enorm(token_BSH)), dim=-1))
        result_BSH, balance = self.layer(joined_BSH, balance, cos_SR, sin_SR)
        return result_BSH, balance


class Deepseek(nn.Module):
    """Decoder with a language model head. Called on tokens (B S) and labels (B S, with one more column for every token
    that is predicted beyond the next), integers, it returns the mean loss."""

    def __init__(self, config: DeepseekConfig) -> None:
        super().__init__()
        self.weight = config.predicted_weight
        self.model = Decoder(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        self.foretelling = nn.ModuleList(Foretelling(config) for _ in range(config.predicted_tokens))
        initialise(self)

    def forward(self, tokens_BS: torch.Tensor, labels_BS: torch.Tensor) -> torch.Tensor:
        length = tokens_BS.shape[1]
        x_BSH, balance = self.model(tokens_BS)
        loss = self._loss(self.model.norm(x_BSH), labels_BS.narrow(1, 0, length) if self.foretelling else labels_BS)
        for depth, module in enumerate(self.foretelling):
            assert isinstance(module, Foretelling)
            next_BSH = self.model.embed_tokens(labels_BS.narrow(1, depth, length))
            x_BSH, balance = module(x_BSH, next_BSH, balance, self.model.cos, self.model.sin)
            share = self.weight / len(self.foretelling)
            loss = loss + share * self._loss(module.norm(x_BSH), labels_BS.narrow(1, depth + 1, length))
        return loss if balance is None else loss + balance

    def _loss(self, x_BSH: torch.Tensor, labels_BS: torch.Tensor) -> torch.Tensor:
        logits_BSV: torch.Tensor = self.lm_head(x_BSH)
        return F.cross_entropy(logits_BSV.float().flatten(0, 1), labels_BS.flatten())
