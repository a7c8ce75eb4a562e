"""BERT: encoder blocks with learned positions, token types and a norm behind each residual, trained to fill in masked
tokens (Devlin et al. 2019). Plain PyTorch; module names follow the checkpoints people know.

Next sentence prediction is left out, as later models of the family do (Liu et al. 2019).

Shape legend: B batch, S sequence, H hidden, N heads, D head dim, V vocabulary.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from planner.models.initialise import blank_embedding, initialise

IGNORED = -100
"""Label of a token that is not to be predicted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class BertConfig:
    """Dimensions of a BERT model; `sequence_length` counts its learned positions."""

    num_layers: int
    hidden_size: int
    num_heads: int
    vocab_size: int
    sequence_length: int
    token_types: int = 2
    norm_epsilon: float = 1e-12

    @property
    def ffn_size(self) -> int:
        return 4 * self.hidden_size


class Block(nn.Module):
    """Attention over all tokens that are not padding, and an MLP, each with a residual and a norm behind it."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.num_heads = config.num_heads
        self.query = nn.Linear(hidden, hidden)
        self.key = nn.Linear(hidden, hidden)
        self.value = nn.Linear(hidden, hidden)
        self.attention_output = nn.Linear(hidden, hidden)
        self.attention_norm = nn.LayerNorm(hidden, eps=config.norm_epsilon)
        self.intermediate = nn.Linear(hidden, config.ffn_size)
        self.output = nn.Linear(config.ffn_size, hidden)
        self.output_norm = nn.LayerNorm(hidden, eps=config.norm_epsilon)

    def forward(self, x_BSH: torch.Tensor, mask_BS: torch.Tensor) -> torch.Tensor:
        seen_B11S = mask_BS[:, None, None, :]  # here, so that blocks share nothing but an input
        query_BNSD, key_BNSD, value_BNSD = (
            projection(x_BSH).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
            for projection in (self.query, self.key, self.value)
        )
        mixed_BNSD = F.scaled_dot_product_attention(query_BNSD, key_BNSD, value_BNSD, attn_mask=seen_B11S)
        x_BSH = self.attention_norm(x_BSH + self.attention_output(mixed_BNSD.transpose(1, 2).flatten(2)))
        result: torch.Tensor = self.output_norm(x_BSH + self.output(F.gelu(self.intermediate(x_BSH))))
        return result


class Bert(nn.Module):
    """Called on tokens, token types, a mask (True: not padding) and labels, all B S, it returns the mean loss over the
    tokens whose label is not `IGNORED`."""

    def __init__(self, config: BertConfig) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.word_embeddings = blank_embedding(config.vocab_size, hidden)
        self.position_embeddings = blank_embedding(config.sequence_length, hidden)
        self.token_type_embeddings = blank_embedding(config.token_types, hidden)
        self.embedding_norm = nn.LayerNorm(hidden, eps=config.norm_epsilon)
        self.layer = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.transform = nn.Linear(hidden, hidden)
        self.transform_norm = nn.LayerNorm(hidden, eps=config.norm_epsilon)
        self.decoder = nn.Linear(hidden, config.vocab_size)
        self.decoder.weight = self.word_embeddings.weight
        initialise(self)

    def forward(
        self, tokens_BS: torch.Tensor, types_BS: torch.Tensor, mask_BS: torch.Tensor, labels_BS: torch.Tensor
    ) -> torch.Tensor:
        positions_S = torch.arange(tokens_BS.shape[1], device=tokens_BS.device)
        x_BSH = self.word_embeddings(tokens_BS) + self.token_type_embeddings(types_BS)
        x_BSH = self.embedding_norm(x_BSH + self.position_embeddings(positions_S))
        for block in self.layer:
            x_BSH = block(x_BSH, mask_BS)
        logits_BSV = self.decoder(self.transform_norm(F.gelu(self.transform(x_BSH))))
        return F.cross_entropy(logits_BSV.float().flatten(0, 1), labels_BS.flatten(), ignore_index=IGNORED)
