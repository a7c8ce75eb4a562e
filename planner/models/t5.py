"""T5: an encoder and a decoder that reads it, with relative positions as a bias of the attention scores (Raffel et al.
2020, section 2.1). Plain PyTorch; module names follow the checkpoints people know.

The bias depends on the distance of two tokens, put into buckets: near ones have a bucket each, far ones share buckets
whose widths grow logarithmically. It is made once for the encoder and once for the decoder, and all blocks read it.
Scores are not scaled: the initial weights of the queries are smaller instead. Padding is a mask of the encoder's
tokens.

Shape legend: B batch, S sequence read, T sequence written, H hidden, N heads, D head dim, V vocabulary; Q, K either.
"""

import math
from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from planner.models.initialise import blank_embedding, initialise

IGNORED = -100
"""Label of a token that is not to be predicted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class T5Config:
    """Dimensions of a T5 model; `num_layers` counts the blocks of the encoder, and the decoder has as many."""

    num_layers: int
    hidden_size: int
    num_heads: int
    head_size: int
    ffn_size: int
    vocab_size: int
    sequence_length: int
    buckets: int = 32
    farthest: int = 128
    norm_epsilon: float = 1e-6


class Attention(nn.Module):
    """Attention of queries made from one sequence to keys and values made from another, with a mask or a bias."""

    def __init__(self, config: T5Config) -> None:
        super().__init__()
        inner = config.num_heads * config.head_size
        self.num_heads = config.num_heads
        self.q = nn.Linear(config.hidden_size, inner, bias=False)
        self.k = nn.Linear(config.hidden_size, inner, bias=False)
        self.v = nn.Linear(config.hidden_size, inner, bias=False)
        self.o = nn.Linear(inner, config.hidden_size, bias=False)

    def forward(self, x_BQH: torch.Tensor, read_BKH: torch.Tensor, mask_BNQK: torch.Tensor) -> torch.Tensor:
        query_BNQD, key_BNKD, value_BNKD = (
            projection(given).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for projection, given in ((self.q, x_BQH), (self.k, read_BKH), (self.v, read_BKH))
        )
        mixed_BNQD = F.scaled_dot_product_attention(query_BNQD, key_BNKD, value_BNKD, attn_mask=mask_BNQK, scale=1.0)
        result: torch.Tensor = self.o(mixed_BNQD.transpose(1, 2).flatten(2))
        return result


class MLP(nn.Module):
    """wo(relu(wi(x)))."""

    def __init__(self, config: T5Config) -> None:
        super().__init__()
        self.wi = nn.Linear(config.hidden_size, config.ffn_size, bias=False)
        self.wo = nn.Linear(config.ffn_size, config.hidden_size, bias=False)

    def forward(self, x_BSH: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.wo(F.relu(self.wi(x_BSH)))
        return result


class EncoderBlock(nn.Module):
    """Attention and MLP, each behind a norm and with a residual."""

    def __init__(self, config: T5Config) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_epsilon)
        self.attention = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_epsilon)
        self.mlp = MLP(config)

    def forward(self, x_BSH: torch.Tensor, bias_BNSS: torch.Tensor) -> torch.Tensor:
        normed_BSH = self.attention_norm(x_BSH)
        x_BSH = x_BSH + self.attention(normed_BSH, normed_BSH, bias_BNSS)
        result: torch.Tensor = x_BSH + self.mlp(self.mlp_norm(x_BSH))
        return result


class DecoderBlock(nn.Module):
    """Attention to earlier tokens, attention to the result of the encoder, and an MLP."""

    def __init__(self, config: T5Config) -> None:
        super().__init__()
        self.attention_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_epsilon)
        self.attention = Attention(config)
        self.cross_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_epsilon)
        self.cross = Attention(config)
        self.mlp_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_epsilon)
        self.mlp = MLP(config)

    def forward(
        self, x_BTH: torch.Tensor, read_BSH: torch.Tensor, bias_1NTT: torch.Tensor, mask_BS: torch.Tensor
    ) -> torch.Tensor:
        normed_BTH = self.attention_norm(x_BTH)
        x_BTH = x_BTH + self.attention(normed_BTH, normed_BTH, bias_1NTT)
        x_BTH = x_BTH + self.cross(self.cross_norm(x_BTH), read_BSH, mask_BS[:, None, None, :])
        result: torch.Tensor = x_BTH + self.mlp(self.mlp_norm(x_BTH))
        return result


class RelativeBias(nn.Module):
    """One number per head and bucket of distances."""

    def __init__(self, config: T5Config, both_ways: bool) -> None:
        super().__init__()
        self.bias = blank_embedding(config.buckets, config.num_heads)
        self.buckets, self.farthest, self.both_ways = config.buckets, config.farthest, both_ways

    def forward(self, length: int, device: torch.device) -> torch.Tensor:
        """1 N Q K, for Q = K = length."""
        places = torch.arange(length, device=device)
        distance_QK = places[None, :] - places[:, None]
        result: torch.Tensor = self.bias(self._bucket(distance_QK)).permute(2, 0, 1).unsqueeze(0)
        return result

    def _bucket(self, distance_QK: torch.Tensor) -> torch.Tensor:
        """Buckets 0 to n-1 of keys before the query; with `both_ways` the upper half is for keys behind it."""
        count = self.buckets // 2 if self.both_ways else self.buckets
        offset = (distance_QK > 0).long() * count if self.both_ways else 0
        apart = distance_QK.abs() if self.both_ways else (-distance_QK).clamp(min=0)
        near = count // 2
        ratio = torch.log(apart.clamp(min=1).float() / near) / math.log(self.farthest / near)
        far = (near + (ratio * (count - near)).long()).clamp(max=count - 1)
        return offset + torch.where(apart < near, apart, far)


class T5(nn.Module):
    """Called on tokens (B S), a mask of them (True: not padding), the tokens that the decoder reads and labels (both
    B T), it returns the mean loss over the tokens whose label is not `IGNORED`."""

    def __init__(self, config: T5Config) -> None:
        super().__init__()
        self.scale = config.hidden_size**-0.5
        self.shared = blank_embedding(config.vocab_size, config.hidden_size)
        self.encoder_bias = RelativeBias(config, both_ways=True)
        self.encoder = nn.ModuleList(EncoderBlock(config) for _ in range(config.num_layers))
        self.encoder_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_epsilon)
        self.decoder_bias = RelativeBias(config, both_ways=False)
        self.decoder = nn.ModuleList(DecoderBlock(config) for _ in range(config.num_layers))
        self.decoder_norm = nn.RMSNorm(config.hidden_size, eps=config.norm_epsilon)
        initialise(self)

    def forward(
        self, tokens_BS: torch.Tensor, mask_BS: torch.Tensor, written_BT: torch.Tensor, labels_BT: torch.Tensor
    ) -> torch.Tensor:
        x_BSH = self.shared(tokens_BS)
        seen_B11S = torch.zeros_like(mask_BS, dtype=x_BSH.dtype).masked_fill(~mask_BS, float("-inf"))[:, None, None, :]
        bias_BNSS = self.encoder_bias(tokens_BS.shape[1], tokens_BS.device) + seen_B11S
        for block in self.encoder:
            x_BSH = block(x_BSH, bias_BNSS)
        read_BSH = self.encoder_norm(x_BSH)
        logits_BTV = F.linear(self._decoded(written_BT, read_BSH, mask_BS) * self.scale, self.shared.weight)
        return F.cross_entropy(logits_BTV.float().flatten(0, 1), labels_BT.flatten(), ignore_index=IGNORED)

    def _decoded(self, written_BT: torch.Tensor, read_BSH: torch.Tensor, mask_BS: torch.Tensor) -> torch.Tensor:
        length, device = written_BT.shape[1], written_BT.device
        later_TT = torch.ones(length, length, dtype=torch.bool, device=device).triu(1)
        bias_1NTT = self.decoder_bias(length, device).masked_fill(later_TT, float("-inf"))
        x_BTH: torch.Tensor = self.shared(written_BT)
        for block in self.decoder:
            x_BTH = block(x_BTH, read_BSH, bias_1NTT, mask_BS)
        result: torch.Tensor = self.decoder_norm(x_BTH)
        return result
