"""Vision transformer: an image as a sequence of patches, encoder blocks with layer norm first, a class token
(Dosovitskiy et al. 2021).

Shape legend: B batch, C channels, I image height and width, P patches, S sequence (P + 1), H hidden, N heads, D head
dim, K classes.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from planner.models.initialise import initialise


@dataclass(frozen=True, slots=True, kw_only=True)
class ViTConfig:
    """Dimensions of a vision transformer; the image is cut into whole patches."""

    num_layers: int
    hidden_size: int
    ffn_size: int
    num_heads: int
    patch_size: int
    image_size: int
    num_classes: int
    channels: int = 3
    norm_epsilon: float = 1e-6

    @property
    def sequence_length(self) -> int:
        """Patches and the class token."""
        return (self.image_size // self.patch_size) ** 2 + 1


class Block(nn.Module):
    """Attention and MLP, each behind a norm and with a residual. One projection makes query, key and value."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        hidden = config.hidden_size
        self.num_heads = config.num_heads
        self.ln_1 = nn.LayerNorm(hidden, eps=config.norm_epsilon)
        self.qkv = nn.Linear(hidden, 3 * hidden)
        self.attn_proj = nn.Linear(hidden, hidden)
        self.ln_2 = nn.LayerNorm(hidden, eps=config.norm_epsilon)
        self.mlp_up = nn.Linear(hidden, config.ffn_size)
        self.mlp_down = nn.Linear(config.ffn_size, hidden)

    def forward(self, x_BSH: torch.Tensor) -> torch.Tensor:
        # Heads outermost, then query / key / value, so that cutting the projection by heads leaves each piece whole.
        qkv_BNS3D = self.qkv(self.ln_1(x_BSH)).unflatten(-1, (self.num_heads, -1)).transpose(1, 2)
        query_BNSD, key_BNSD, value_BNSD = qkv_BNS3D.chunk(3, dim=-1)
        mixed_BNSD = F.scaled_dot_product_attention(query_BNSD, key_BNSD, value_BNSD)
        x_BSH = x_BSH + self.attn_proj(mixed_BNSD.transpose(1, 2).flatten(2))
        result: torch.Tensor = x_BSH + self.mlp_down(F.gelu(self.mlp_up(self.ln_2(x_BSH))))
        return result


class ViT(nn.Module):
    """Called on images (B C I I) and labels (B, integers) it returns the mean loss."""

    def __init__(self, config: ViTConfig) -> None:
        super().__init__()
        hidden, patch = config.hidden_size, config.patch_size
        self.patches = nn.Conv2d(config.channels, hidden, patch, stride=patch)
        self.class_token = nn.Parameter(torch.empty(1, 1, hidden))
        self.positions = nn.Parameter(torch.empty(1, config.sequence_length, hidden))
        self.blocks = nn.ModuleList(Block(config) for _ in range(config.num_layers))
        self.norm = nn.LayerNorm(hidden, eps=config.norm_epsilon)
        self.head = nn.Linear(hidden, config.num_classes)
        initialise(self)

    def forward(self, images_BCII: torch.Tensor, labels_B: torch.Tensor) -> torch.Tensor:
        patches_BPH = self.patches(images_BCII).flatten(2).transpose(1, 2)
        token_B1H = self.class_token.expand(patches_BPH.shape[0], -1, -1)
        x_BSH = torch.cat((token_B1H, patches_BPH), dim=1) + self.positions
        for block in self.blocks:
            x_BSH = block(x_BSH)
        logits_BK = self.head(self.norm(x_BSH[:, 0]))
        return F.cross_entropy(logits_BK.float(), labels_B)
