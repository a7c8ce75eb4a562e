"""Modules that cannot be traced, one cause each. The line that is the cause ends in `# here`; where there is none, it
is that of the forward."""

import random
from typing import NamedTuple

import numpy as np
import torch
from torch import nn
from torch.nn.attention.flex_attention import flex_attention


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.linear = nn.Linear(8, 8)


class Branches(Net):
    def forward(self, x):
        y = self.linear(x)
        if y.sum() > 0:  # here
            y = y * 2
        return y.mean()


class CountsInBatch(Net):
    def forward(self, x):
        rows = x.long().remainder(8)
        return nn.functional.embedding(rows, self.linear.weight, scale_grad_by_freq=True).mean()  # here


class CountsInBags(Net):
    def forward(self, x):
        rows = x.long().remainder(8)
        return nn.functional.embedding_bag(rows, self.linear.weight, scale_grad_by_freq=True).mean()  # here


class ReadsNumber(Net):
    def forward(self, x):
        y = self.linear(x)
        scale = y.abs().max().item()  # here
        return (y / scale).mean()


class ReadsNumberOnly(Net):
    def forward(self, x):
        y = self.linear(x)
        length = int(x.sum())  # here
        return y[:, :length].mean()


class ChangesInput(Net):
    def forward(self, x):
        x.mul_(2)  # here
        return self.linear(x).mean()


class PicksRows(Net):
    def forward(self, x):
        y = self.linear(x)
        return y[x > 0].mean()  # here


class MakesAsManyRows(Net):
    def forward(self, x):
        y = x[(x == 0).sum(1) != 8]  # as models of images drop those that are padding
        return self.linear(y).mean() + torch.ones(size=(y.size(0),), device=x.device).sum()  # here


class CountsRows(Net):
    def forward(self, x):
        rows = torch.nonzero(x[:, 0])  # here
        return self.linear(x).mean() + rows.float().mean()


class ReadsNothing(Net):
    def forward(self, x):
        return self.linear(x).mean() + self.linear.image_outputs.mean()  # here


class Loops(Net):
    def forward(self, x):
        y = self.linear(x)
        while y.norm() > 1:  # here
            y = y / 2
        return y.mean()


class Ranges(Net):
    def forward(self, x):
        y = self.linear(x)
        for _ in range(int(x.sum())):  # here
            y = y * 2
        return y.mean()


class LeavesTorch(Net):
    def forward(self, x):
        y = self.linear(x)
        scale = np.abs(y.detach().numpy()).max()  # here
        return (y / float(scale)).mean()


class Numpy(Net):
    def forward(self, x):
        return self.linear(torch.from_numpy(np.tanh(x.numpy()))).mean()  # here


class Lists(Net):
    def forward(self, x):
        y = self.linear(x)
        first = x.tolist()[0]  # here
        return y.mean() * first[0]


class Noisy(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return x + torch.rand_like(x)

    @staticmethod
    def backward(ctx, gradient):
        return gradient


class Scaled(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x, how):
        return x * how["by"]

    @staticmethod
    def backward(ctx, gradient):
        return gradient, None


class Pointed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        return torch.from_numpy(2 * x.numpy())

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


class Passed(torch.autograd.Function):
    @staticmethod
    def forward(ctx, x):
        ctx.mark_dirty(x)
        return x.mul_(2)

    @staticmethod
    def backward(ctx, gradient):
        return 2 * gradient


class OwnDraws(Net):
    def forward(self, x):
        return Noisy.apply(self.linear(x)).mean()  # here


class OwnTakesDict(Net):
    def forward(self, x):
        return Scaled.apply(self.linear(x), {"by": 2}).mean()  # here


class OwnNeedsData(Net):
    def forward(self, x):
        return Pointed.apply(self.linear(x)).mean()  # here


class OwnInPlace(Net):
    def forward(self, x):
        return Passed.apply(self.linear(x)).mean()  # here


class Packs(Net):
    def forward(self, x):
        lengths = torch.ones(4, dtype=torch.long)
        packed = nn.utils.rnn.pack_padded_sequence(self.linear(x)[:, None], lengths, batch_first=True)
        return nn.utils.rnn.pad_packed_sequence(packed, batch_first=True)[0].mean()  # here


class Drops(Net):
    def forward(self, x):
        y = self.linear(x)
        if random.random() < 0.5:  # here
            y = self.linear(y)
        return y.mean()


class DropsTorch(Net):
    def forward(self, x):
        y = self.linear(x)
        if torch.rand(()) < 0.5:  # here
            y = self.linear(y)
        return y.mean()


class NoLoss(Net):
    def forward(self, x):
        return self.linear(x)


class Losses(Net):
    def forward(self, x):
        y = self.linear(x)
        return {"loss_a": y.mean(), "loss_b": y.pow(2).mean()}


class NamedLosses(NamedTuple):
    near: torch.Tensor
    far: torch.Tensor


class Named(Net):
    def forward(self, x):
        y = self.linear(x)
        return NamedLosses(y.mean(), y.pow(2).mean())


class OtherDevice(Net):
    def forward(self, x):
        return (self.linear(x) + torch.ones(8, device="cpu")).mean()  # here


class Sparse(Net):
    def forward(self, x):
        rows = (x > 0).float().to_sparse()  # here
        return torch.sparse.mm(rows, self.linear.weight).mean()


class WithoutKernel(Net):
    def forward(self, x):
        return torch.fake_quantize_per_tensor_affine(self.linear(x), 0.1, 0, -8, 7).mean()  # here


class TakesGradient(Net):
    def forward(self, x):
        x = x.requires_grad_(True)
        (slope,) = torch.autograd.grad(self.linear(x).pow(2).sum(), x, create_graph=True)  # here
        return slope.pow(2).mean()


class Hooks(Net):
    def forward(self, x):
        y = self.linear(x)
        y.register_hook(lambda gradient: 2 * gradient)  # here
        return y.mean()


class SpellsOut(Net):
    def forward(self, x):
        return self.linear(x).reshape(8, 2, 4).mean()  # here


class MixesDtypes(Net):
    def forward(self, x):
        y = self.linear(x)
        return torch.einsum("bo,o->b", y, torch.ones(8, dtype=torch.float64, device=x.device)).mean()  # here


class Convolves(Net):
    def __init__(self):
        super().__init__()
        self.convolution = nn.Conv1d(1, 1, 3, dtype=torch.float64)

    def forward(self, x):
        return self.convolution(self.linear(x).unsqueeze(1)).mean()  # here


class Starts(Net):
    def __init__(self):
        super().__init__()
        self.cell = nn.GRUCell(8, 8, dtype=torch.bfloat16)

    def forward(self, x):
        state = torch.zeros(x.shape[0], 8, device=x.device)
        return self.cell(self.linear(x).bfloat16(), state).float().mean()  # here


class Norms(Net):
    def __init__(self):
        super().__init__()
        self.norm = nn.LayerNorm(8, dtype=torch.bfloat16)

    def forward(self, x):
        return self.norm(self.linear(x)).mean()  # here


class Counts(Net):
    def forward(self, x):
        return self.linear(x.argsort(-1)).mean()  # here


class Sizes(Net):
    def forward(self, x):
        return self.linear(x[:, 1:]).mean()  # here


class Broadcasts(Net):
    def forward(self, x):
        return (self.linear(x)[:, :3] * x).mean()  # here


class Chooses(Net):
    def forward(self, x):
        return self.linear(x).topk(99).values.mean()  # here


class Aligns(Net):
    def forward(self, x):
        scores = self.linear(x).unsqueeze(1).log_softmax(-1)
        ones = torch.ones(1, dtype=torch.long, device=x.device)
        return torch.nn.functional.ctc_loss(scores, ones, 4 * ones, ones)  # here


class FlexAttention(Net):
    def forward(self, x):
        y = self.linear(x)[None, None]
        return flex_attention(y, y, y, score_mod=lambda score, b, h, q, k: score - (q - k)).mean()  # here


class Transforms(Net):
    def forward(self, x):
        return torch.fft.rfft(self.linear(x).bfloat16()).abs().mean()  # here
