"""A network whose operators look at several samples, and by hand what data-parallel replicas make of it."""

import torch
import torch.nn.functional as F
from torch import nn
from torch.utils import _pytree as pytree

SAMPLES, CLASSES, IGNORED = 16, 5, 4


class Residual(nn.Module):
    """A block of a residual network."""

    def __init__(self, channels: int) -> None:
        super().__init__()
        self.first = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn1 = nn.BatchNorm2d(channels)
        self.second = nn.Conv2d(channels, channels, 3, padding=1, bias=False)
        self.bn2 = nn.BatchNorm2d(channels)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.relu(x + self.bn2(self.second(F.relu(self.bn1(self.first(x))))))


class Centre(nn.Module):
    """Leaves of every feature what is not the mean over the batch, in units of a norm of these means."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        mean = x.mean(0)
        return (x - mean) / (mean.pow(2).sum().sqrt() + 1)


class Network(nn.Module):
    """Batch norms, a mean over the batch, and a loss that is the mean over the targets that count."""

    def __init__(self, channels: int = 8) -> None:
        super().__init__()
        self.stem = nn.Conv2d(3, channels, 3, padding=1)
        self.bn = nn.BatchNorm2d(channels)
        self.blocks = nn.ModuleList(Residual(channels) for _ in range(4))
        self.centre = Centre()
        self.head = nn.Linear(channels, CLASSES)

    def forward(self, x: torch.Tensor, target: torch.Tensor) -> torch.Tensor:
        x = F.relu(self.bn(self.stem(x)))
        for block in self.blocks:
            x = block(x)
        return F.cross_entropy(self.head(self.centre(x.mean((2, 3)))), target, ignore_index=IGNORED)


class OfReplicas(nn.Module):
    """By hand: a module, called on the samples of each replica; the first one keeps its buffers."""

    def __init__(self, module: nn.Module, replicas: int) -> None:
        super().__init__()
        self.module, self.replicas = module, replicas

    def forward(self, *inputs: torch.Tensor) -> torch.Tensor:
        before = {name: buffer.clone() for name, buffer in self.module.named_buffers()}
        results, kept = [], before
        for number in range(self.replicas):
            for name, buffer in self.module.named_buffers():
                buffer.data = before[name].clone()
            results.append(self.module(*(tensor.chunk(self.replicas)[number] for tensor in inputs)))
            if number == 0:
                kept = {name: buffer.clone() for name, buffer in self.module.named_buffers()}
        for name, buffer in self.module.named_buffers():
            buffer.data = kept[name]
        return torch.cat(results) if results[0].dim() else torch.stack(results).mean()


def batch() -> tuple[torch.Tensor, torch.Tensor]:
    drawn = torch.Generator().manual_seed(1)
    images = torch.randn(SAMPLES, 3, 8, 8, generator=drawn)
    targets = torch.randint(0, IGNORED, (SAMPLES,), generator=drawn)
    targets[[0, 2, 5, 7, 8]] = IGNORED  # at most one of two neighbours: every replica has one that counts
    return images, targets


def network() -> Network:
    torch.manual_seed(0)
    return Network()


def by_hand(pattern: str, replicas: int) -> nn.Module:
    """The network as DistributedDataParallel has it: every replica its own copy, or its own batch norms alone."""
    module = network()
    if pattern == "*":
        return OfReplicas(module, replicas)
    for name, part in list(module.named_modules()):
        if isinstance(part, nn.BatchNorm2d if pattern == "*bn*" else Centre):
            owner, _, last = name.rpartition(".")
            setattr(module.get_submodule(owner), last, OfReplicas(part, replicas))
    return module


def trained(module: nn.Module, micro_batches: int) -> tuple[float, dict[str, torch.Tensor], dict[str, torch.Tensor]]:
    """Loss, gradients and buffers after the micro-batches of one batch, by the names that the network has."""
    loss = 0.0
    for number in range(micro_batches):
        part = pytree.tree_map(lambda tensor, number=number: tensor.chunk(micro_batches)[number], batch())
        value = module(*part) / micro_batches
        value.backward()
        loss += float(value.detach())
    gradients = {
        name.replace("module.", ""): one.grad for name, one in module.named_parameters() if one.grad is not None
    }
    return loss, gradients, {name.replace("module.", ""): one for name, one in module.named_buffers()}


@torch.no_grad()
def loss_of(module: nn.Module, micro_batches: int) -> float:
    """The mean loss of the micro-batches as the module is evaluated."""
    module.eval()
    parts = zip(*(tensor.chunk(micro_batches) for tensor in batch()), strict=True)
    return sum(float(module(*part)) for part in parts) / micro_batches
