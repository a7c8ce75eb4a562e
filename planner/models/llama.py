"""Llama: decoder blocks with RMS norm, rotary positions, grouped-query attention and a gated MLP (Touvron et al.
2023; Grattafiori et al. 2024). Plain PyTorch; module names follow the checkpoints people know.

The decoders of Mistral (Jiang et al. 2023), Mixtral (Jiang et al. 2024), Qwen2.5 and Qwen3 (Yang et al. 2024, 2025) and
Gemma (Gemma Team 2024) are the same, with these options: experts in place of the MLP, biases of the projections to
heads, norms of queries and keys, heads that need not add up to the hidden size, a GELU in the MLP, and embeddings that
are scaled by the root of the hidden size. Those of Nemotron-4 (Parmar et al. 2024) have an MLP of two matrices (`gated`
False).

Shape legend: B batch, S sequence, H hidden, N heads, K key/value heads, D head dim, V vocabulary.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from planner.errors import ModelError
from planner.models.experts.router import Routing, start_of_losses
from planner.models.initialise import blank_embedding, initialise
from planner.nearest import divisors, nearest_words


@dataclass(frozen=True, slots=True, kw_only=True)
class LlamaConfig:
    """Dimensions of a Llama model.

    `head_size` None divides the hidden size among the heads. With `num_experts` every block except the first
    `dense_layers` has experts of `expert_size`, of which a token takes `experts_per_token`, and, if `shared_size` is
    given, an MLP for all tokens. `balance_loss` is the coefficient of the load-balancing loss, `balance_speed` the
    speed of the load-balancing biases (see `planner.models.experts.router`). `capacity_factor`: an expert computes at
    most this many times its even share of a sample (see `planner.models.experts.mixture`); 0 for no limit.
    """

    num_layers: int
    hidden_size: int
    ffn_size: int
    num_heads: int
    num_kv_heads: int
    vocab_size: int
    sequence_length: int
    rope_theta: float = 500_000.0
    norm_epsilon: float = 1e-5
    tied_embeddings: bool = False
    head_size: int | None = None
    qk_norm: bool = False
    qkv_bias: bool = False
    gelu: bool = False
    gated: bool = True
    scaled_embeddings: bool = False
    num_experts: int = 0
    experts_per_token: int = 0
    expert_size: int = 0
    shared_size: int = 0
    dense_layers: int = 0
    normalised_weights: bool = True
    balance_loss: float = 0.0
    balance_speed: float = 0.0
    capacity_factor: float = 0.0

    def __post_init__(self) -> None:
        """Raise ModelError for heads that cannot be grouped or have no elements."""
        if self.num_kv_heads < 1 or self.num_heads % self.num_kv_heads:
            near = nearest_words(self.num_kv_heads, divisors(self.num_heads))
            raise ModelError(f"num_kv_heads={self.num_kv_heads} does not divide num_heads={self.num_heads}; {near}")
        if self.head_dim < 1:
            raise ModelError(
                f"heads of {self.head_dim} elements: hidden_size={self.hidden_size} is less than"
                f" num_heads={self.num_heads}; change one of them, or set head_size"
            )

    @property
    def head_dim(self) -> int:
        return self.hidden_size // self.num_heads if self.head_size is None else self.head_size


class Attention(nn.Module):
    """Causal self-attention with rotary positions; every key/value head serves num_heads / num_kv_heads query heads."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        hidden, kv_size = config.hidden_size, config.num_kv_heads * config.head_dim
        query_size = config.num_heads * config.head_dim
        self.head_dim = config.head_dim
        self.q_proj = nn.Linear(hidden, query_size, bias=config.qkv_bias)
        self.k_proj = nn.Linear(hidden, kv_size, bias=config.qkv_bias)
        self.v_proj = nn.Linear(hidden, kv_size, bias=config.qkv_bias)
        self.o_proj = nn.Linear(query_size, hidden, bias=False)
        self.q_norm, self.k_norm = (
            nn.RMSNorm(config.head_dim, eps=config.norm_epsilon) if config.qk_norm else None for _ in range(2)
        )

    def forward(self, x_BSH: torch.Tensor, cos_SD: torch.Tensor, sin_SD: torch.Tensor) -> torch.Tensor:
        query_BNSD, key_BKSD, value_BKSD = (
            (heads if norm is None else norm(heads)).transpose(1, 2)
            for heads, norm in (
                (projection(x_BSH).unflatten(-1, (-1, self.head_dim)), norm)
                for projection, norm in ((self.q_proj, self.q_norm), (self.k_proj, self.k_norm), (self.v_proj, None))
            )
        )
        mixed_BNSD = F.scaled_dot_product_attention(
            rotated(query_BNSD, cos_SD, sin_SD),
            rotated(key_BKSD, cos_SD, sin_SD),
            value_BKSD,
            is_causal=True,
            enable_gqa=True,
        )
        result: torch.Tensor = self.o_proj(mixed_BNSD.transpose(1, 2).flatten(2))
        return result


def rotated(x_BNSD: torch.Tensor, cos_SD: torch.Tensor, sin_SD: torch.Tensor) -> torch.Tensor:
    """Rotary position embedding on halves (Su et al. 2021)."""
    low, high = x_BNSD.chunk(2, dim=-1)
    return x_BNSD * cos_SD + torch.cat((-high, low), dim=-1) * sin_SD


class MLP(nn.Module):
    """down(silu(gate(x)) * up(x)) (Shazeer 2020), or with GELU, in its tanh approximation, in place of SiLU."""

    def __init__(self, hidden_size: int, ffn_size: int, *, gelu: bool = False) -> None:
        super().__init__()
        self.gelu = gelu
        self.gate_proj = nn.Linear(hidden_size, ffn_size, bias=False)
        self.up_proj = nn.Linear(hidden_size, ffn_size, bias=False)
        self.down_proj = nn.Linear(ffn_size, hidden_size, bias=False)

    def forward(self, x_BSH: torch.Tensor) -> torch.Tensor:
        gate = self.gate_proj(x_BSH)
        gate = F.gelu(gate, approximate="tanh") if self.gelu else F.silu(gate)
        result: torch.Tensor = self.down_proj(gate * self.up_proj(x_BSH))
        return result


class SquaredReluMLP(nn.Module):
    """down(relu(up(x)) ** 2) (So et al. 2021), without a gate."""

    def __init__(self, hidden_size: int, ffn_size: int) -> None:
        super().__init__()
        self.up_proj = nn.Linear(hidden_size, ffn_size, bias=False)
        self.down_proj = nn.Linear(ffn_size, hidden_size, bias=False)

    def forward(self, x_BSH: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.down_proj(F.relu(self.up_proj(x_BSH)).square())
        return result


class DecoderLayer(nn.Module):
    """One block: attention and MLP or experts, each behind a norm and with a residual."""

    def __init__(self, config: LlamaConfig, sparse: bool) -> None:
        super().__init__()
        self.input_layernorm = nn.RMSNorm(config.hidden_size, eps=config.norm_epsilon)
        self.self_attn = Attention(config)
        self.post_attention_layernorm = nn.RMSNorm(config.hidden_size, eps=config.norm_epsilon)
        self.sparse = sparse
        self.mlp = _experts(config) if sparse else _dense(config)

    def forward(
        self, x_BSH: torch.Tensor, balance: torch.Tensor | None, cos_SD: torch.Tensor, sin_SD: torch.Tensor
    ) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The tokens after this block, and `balance`, the sum of router losses with that of this block."""
        x_BSH = x_BSH + self.self_attn(self.input_layernorm(x_BSH), cos_SD, sin_SD)
        given_BSH = self.post_attention_layernorm(x_BSH)
        if not self.sparse:
            return x_BSH + self.mlp(given_BSH), balance
        result_BSH, loss = self.mlp(given_BSH)
        return x_BSH + result_BSH, loss if balance is None or loss is None else balance + loss


def _dense(config: LlamaConfig) -> nn.Module:
    if not config.gated:
        return SquaredReluMLP(config.hidden_size, config.ffn_size)
    return MLP(config.hidden_size, config.ffn_size, gelu=config.gelu)


def _shared(config: LlamaConfig) -> nn.Module:
    made = MLP if config.gated else SquaredReluMLP
    return made(config.hidden_size, config.shared_size)


def _experts(config: LlamaConfig) -> nn.Module:
    from planner.models.experts.mixture import SparseMLP

    return SparseMLP(
        config.hidden_size,
        config.num_experts,
        config.expert_size,
        Routing(
            chosen=config.experts_per_token,
            normalised=config.normalised_weights,
            loss=config.balance_loss,
            bias_speed=config.balance_speed,
        ),
        shared=_shared(config) if config.shared_size else None,
        capacity_factor=config.capacity_factor,
        gated=config.gated,
    )


class Decoder(nn.Module):
    """Embedding, blocks and the final norm."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.embed_tokens = blank_embedding(config.vocab_size, config.hidden_size)
        dense = config.dense_layers if config.num_experts else config.num_layers
        self.layers = nn.ModuleList(DecoderLayer(config, at >= dense) for at in range(config.num_layers))
        self.norm = nn.RMSNorm(config.hidden_size, eps=config.norm_epsilon)
        cos_SD, sin_SD = rotary_tables(config.head_dim, config.sequence_length, config.rope_theta)
        self.register_buffer("cos", cos_SD, persistent=False)
        self.register_buffer("sin", sin_SD, persistent=False)

        self.balanced = bool(config.num_experts and config.balance_loss)
        self.scale = config.hidden_size**0.5 if config.scaled_embeddings else 1.0

    def forward(self, tokens_BS: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        """The tokens after the last norm, B S H, and the losses of all routers, None where they have none."""
        x_BSH: torch.Tensor = self.embed_tokens(tokens_BS)
        x_BSH = x_BSH if self.scale == 1.0 else x_BSH * self.scale
        balance = start_of_losses(x_BSH) if self.balanced else None
        for layer in self.layers:
            x_BSH, balance = layer(x_BSH, balance, self.cos, self.sin)
        return self.norm(x_BSH), balance


class Llama(nn.Module):
    """Decoder with a language model head; called on tokens and labels (both B S, integers) it returns the mean loss."""

    def __init__(self, config: LlamaConfig) -> None:
        super().__init__()
        self.model = Decoder(config)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tied_embeddings:
            self.lm_head.weight = self.model.embed_tokens.weight
        initialise(self)

    def forward(self, tokens_BS: torch.Tensor, labels_BS: torch.Tensor) -> torch.Tensor:
        x_BSH, balance = self.model(tokens_BS)
        logits_BSV: torch.Tensor = self.lm_head(x_BSH)
        loss = F.cross_entropy(logits_BSV.float().flatten(0, 1), labels_BS.flatten())
        return loss if balance is None else loss + balance


def rotary_tables(head_dim: int, length: int, theta: float) -> tuple[torch.Tensor, torch.Tensor]:
    """cos and sin of the rotation angles, S D each."""
    half = torch.arange(0, head_dim, 2, dtype=torch.float32) / head_dim
    angles = torch.outer(torch.arange(length, dtype=torch.float32), theta**-half)
    angles_SD = torch.cat((angles, angles), dim=-1)
    return angles_SD.cos(), angles_SD.sin()
