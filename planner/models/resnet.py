"""Residual networks: convolutions with batch norm, and blocks that add their input (He et al. 2016). Downsampling
blocks have their stride in the 3 x 3 convolution, as in the weights that people train from.

Shape legend: B batch, C channels, X height and width, K classes.
"""

from dataclasses import dataclass

import torch
import torch.nn.functional as F
from torch import nn

from planner.models.initialise import initialise


@dataclass(frozen=True, slots=True, kw_only=True)
class ResNetConfig:
    """Dimensions of a residual network.

    `blocks` has the number of blocks of each stage; every stage is twice as wide as the one before, from `width`, and
    sees images of half the height. A bottleneck block works on a fourth of its channels, in `groups` groups (Xie et al.
    2017).
    """

    blocks: tuple[int, ...]
    bottleneck: bool
    width: int
    image_size: int
    num_classes: int
    groups: int = 1
    channels: int = 3


class Normalised(nn.Module):
    """A convolution without bias, and batch norm."""

    def __init__(self, channels: int, made: int, kernel: int, *, stride: int = 1, groups: int = 1) -> None:
        super().__init__()
        self.conv = nn.Conv2d(channels, made, kernel, stride=stride, padding=kernel // 2, groups=groups, bias=False)
        self.norm = nn.BatchNorm2d(made)

    def forward(self, x_BCXX: torch.Tensor) -> torch.Tensor:
        result: torch.Tensor = self.norm(self.conv(x_BCXX))
        return result


class Block(nn.Module):
    """Two 3 x 3 convolutions, or a bottleneck of three, added to the input, which is projected where its
    shape changes."""

    def __init__(self, channels: int, width: int, config: ResNetConfig, stride: int) -> None:
        super().__init__()
        made = width * 4 if config.bottleneck else width
        if config.bottleneck:
            narrowed, wide = Normalised(channels, width, 1), Normalised(width, made, 1)
            middle = Normalised(width, width, 3, stride=stride, groups=config.groups)
            self.layers = nn.ModuleList((narrowed, middle, wide))
        else:
            self.layers = nn.ModuleList((Normalised(channels, width, 3, stride=stride), Normalised(width, made, 3)))
        self.shortcut = None if channels == made and stride == 1 else Normalised(channels, made, 1, stride=stride)

    def forward(self, x_BCXX: torch.Tensor) -> torch.Tensor:
        kept_BCXX = x_BCXX if self.shortcut is None else self.shortcut(x_BCXX)
        *before, last = self.layers
        for layer in before:
            x_BCXX = F.relu(layer(x_BCXX))
        return F.relu(last(x_BCXX) + kept_BCXX)


class ResNet(nn.Module):
    """Called on images (B C X X) and labels (B, integers) it returns the mean loss."""

    def __init__(self, config: ResNetConfig) -> None:
        super().__init__()
        self.stem = Normalised(config.channels, config.width, 7, stride=2)
        channels, stages = config.width, []
        for number, count in enumerate(config.blocks):
            width, blocks = config.width * 2**number, []
            for at in range(count):
                blocks.append(Block(channels, width, config, stride=2 if number and not at else 1))
                channels = width * 4 if config.bottleneck else width
            stages.append(nn.Sequential(*blocks))
        self.stages = nn.Sequential(*stages)
        self.head = nn.Linear(channels, config.num_classes)
        initialise(self)
        _initialise_convolutions(self)

    def forward(self, images_BCXX: torch.Tensor, labels_B: torch.Tensor) -> torch.Tensor:
        x_BCXX = F.max_pool2d(F.relu(self.stem(images_BCXX)), kernel_size=3, stride=2, padding=1)
        pooled_BC = F.adaptive_avg_pool2d(self.stages(x_BCXX), 1).flatten(1)
        logits_BK = self.head(pooled_BC)
        return F.cross_entropy(logits_BK.float(), labels_B)


def _initialise_convolutions(model: nn.Module) -> None:
    """Normal with a variance of 2 / (outputs of a weight) (He et al. 2015); weights on meta are left alone."""
    for module in model.modules():
        if isinstance(module, nn.Conv2d) and not module.weight.is_meta:
            nn.init.kaiming_normal_(module.weight, mode="fan_out", nonlinearity="relu")
