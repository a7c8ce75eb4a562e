"""A model of operators that the table of rules lacks, among them one of its user's. Their rules are found by trial."""

import torch
import torch.nn.functional as F
from torch import nn


@torch.library.custom_op("tests::soft_clip", mutates_args=())
def soft_clip(x: torch.Tensor, slope: torch.Tensor, limit: float) -> torch.Tensor:
    """limit * tanh(slope * x / limit), with a slope for each column."""
    return limit * torch.tanh(x * slope / limit)


@soft_clip.register_fake
def _(x: torch.Tensor, slope: torch.Tensor, limit: float) -> torch.Tensor:
    return torch.empty_like(x)


def _keep(ctx, inputs, output):
    x, slope, ctx.limit = inputs
    ctx.save_for_backward(x, slope)


def _backward(ctx, gradient):
    x, slope = ctx.saved_tensors
    inner = gradient * (1 - torch.tanh(x * slope / ctx.limit) ** 2)
    return inner * slope, (inner * x).flatten(0, -2).sum(0), None


soft_clip.register_autograd(_backward, setup_context=_keep)


class Gated(nn.Module):
    """Few of them: gated units, the custom operator, a product that is added to something."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.rows = nn.Embedding(vocabulary, 16)
        self.wide = nn.Linear(16, 32)
        self.slope = nn.Parameter(torch.randn(16))
        self.square = nn.Parameter(torch.randn(4, 16, 8))

    def forward(self, tokens_BS: torch.Tensor, labels_BS: torch.Tensor) -> torch.Tensor:
        x = self.rows(tokens_BS)
        y = torch.ops.tests.soft_clip(F.glu(self.wide(x)), self.slope, 1.5)
        z = torch.baddbmm(x[..., :8], y, self.square, beta=0.5)
        return F.cross_entropy(z.flatten(0, 1), labels_BS.flatten() % 8)


class Unusual(nn.Module):
    """Gated units, a custom operator, rolls, scans, distances, sorting, scattering, pixels; an average in the end."""

    def __init__(self, vocabulary: int) -> None:
        super().__init__()
        self.rows = nn.Embedding(vocabulary, 16)
        self.wide = nn.Linear(16, 32)
        self.slope = nn.Parameter(torch.randn(16))
        self.mixture = nn.Parameter(torch.rand(16))
        self.centres = nn.Parameter(torch.randn(8, 16))
        self.square = nn.Parameter(torch.randn(4, 16, 8))

    def forward(self, tokens_BS: torch.Tensor, labels_BS: torch.Tensor) -> torch.Tensor:
        x = self.rows(tokens_BS)
        y = torch.ops.tests.soft_clip(F.glu(self.wide(x)), self.slope, 1.5)
        y = torch.lerp(y, torch.roll(x, 1, 1), self.mixture)
        y = torch.addcmul(y, x.flip(1), self.slope, value=0.5)
        distances = torch.cdist(y, self.centres.expand(4, 8, 16))
        sums = torch.logcumsumexp(distances, 1)
        ordered = torch.sort(sums, dim=-1).values
        z = torch.baddbmm(ordered, y, self.square, beta=0.5)
        kept = torch.scatter_add(z, 1, labels_BS.unsqueeze(-1).expand(4, 8, 8) % 8, ordered)
        image = F.pixel_shuffle(kept.view(4, 8, 2, 4), 2)
        image = F.avg_pool2d(F.interpolate(image, scale_factor=2.0), 2)
        lower = torch.tril(image.flatten(1, 2), 2)
        spectrum = torch.linalg.cross(lower.unfold(1, 3, 2), kept[:, :3, :1, None].expand(4, 3, 8, 3), dim=-1)
        waves = torch.fft.rfft(y).abs().mean()
        return F.mse_loss(spectrum.flatten(1), torch.ones(4, 72)) + kept.logsumexp(-1).var() + waves
