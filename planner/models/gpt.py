"""GPT-2 and GPT-3: decoder blocks with layer norm, learned positions, full attention and a GELU MLP (Radford et al.
2019; Brown et al. 2020).

Shape legend: B batch, S sequence, H hidden, N heads, D head dim, V vocabulary.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from planner.models.initialise import blank_embedding, initialise


@dataclass(frozen=True, slots=True, kw_only=True)
class GPTConfig:
    """Dimensions of a GPT model; the vocabulary is used as given, so pad it yourself where that pays."""

    num_layers: int
    hidden_size: int
    num_heads: int
    vocab_size: int
    sequence_length: int
    tied_embeddings: bool = True
    norm_epsilon: float = 1e-5

    @property
    def ffn_size(self) -> int:
        return 4 * self.hidden_size


class Block(nn.Module):
    """Attention and MLP, each behind a norm and with a residual. One projection makes query, key and value."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.num_heads = config.num_heads
        self.ln_1 = nn.LayerNorm(hidden, eps=config.norm_epsilon)
        self.c_attn = nn.Linear(hidden, 3 * hidden)
        self.attn_proj = nn.Linear(hidden, hidden)
        self.ln_2 = nn.LayerNorm(hidden, eps=config.norm_epsilon)
        self.c_fc = nn.Linear(hidden, config.ffn_size)
        self.mlp_proj = nn.Linear(config.ffn_size, hidden)

    def forward(self, x_BSH: torch.Tensor) -> torch.Tensor:
        # Heads outermost, then query / key / value, so that cutting the projection by heads leaves each piece whole.
        qkv_BNS3D = self.c_attn(self.ln_1(x_BSH)).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        query_BNSD, key_BNSD, value_BNSD = qkv_BNS3D.chunk(3, dim=-1)
        mixed_BNSD = F.scaled_dot_product_attention(query_BNSD, key_BNSD, value_BNSD, is_causal=True)
        x_BSH = x_BSH + self.attn_proj(mixed_BNSD.transpose(1, 2).flatten(2))
        result: torch.Tensor = x_BSH + self.mlp_proj(F.gelu(self.c_fc(self.ln_2(x_BSH)), approximate="tanh"))
        return result


class GPT(nn.Module):
    """Called on tokens and labels (both B S, integers) it returns the mean loss."""

    def __init__(self, config: GPTConfig) -> None:
        super().__init__()
        self.wte = blank_embedding(config.vocab_size, config.hidden_size)
        self.wpe = blank_embedding(config.sequence_length, config.hidden_size)
        self.h = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.ln_f = nn.LayerNorm(config.hidden_size, eps=config.norm_epsilon)
        self.lm_head = nn.Linear(config.hidden_size, config.vocab_size, bias=False)
        if config.tied_embeddings:
            self.lm_head.weight = self.wte.weight
        initialise(self)

    def forward(self, tokens_BS: torch.Tensor, labels_BS: torch.Tensor) -> torch.Tensor:
        positions_S = torch.arange(tokens_BS.shape[1], device=tokens_BS.device)
        x_BSH = self.wte(tokens_BS) + self.wpe(positions_S)
        for block in self.h:
            x_BSH = block(x_BSH)
        logits_BSV = self.lm_head(self.ln_f(x_BSH))
        return F.cross_entropy(logits_BSV.float().flatten(0, 1), labels_BS.flatten())
