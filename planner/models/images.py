"""Models of images by name: vision transformers and residual networks.

Dimensions are those of Dosovitskiy et al. 2021 (table 1) and He et al. 2016 (table 1), both for 1000 classes and images
of 224 x 224.
"""

from collections.abc import Callable, Mapping
from typing import Any

from planner.models.entry import TRACE_BATCH, Dimension, Example, ZooEntry

_CHANNELS = 3


def _vit(
    source: str, layers: int, hidden: int, ffn: int, heads: int, patch: int, image: int = 224, classes: int = 1000
) -> ZooEntry:
    dimensions: dict[str, Dimension] = {
        "num_layers": layers, "hidden_size": hidden, "ffn_size": ffn, "num_heads": heads, "patch_size": patch,
        "image_size": image, "num_classes": classes,
    }  # fmt: skip
    return ZooEntry(family="vit", dimensions=tuple(dimensions.items()), source=source)


def _resnet(
    source: str, blocks: tuple[int, ...], bottleneck: bool, width: int = 64, image: int = 224, classes: int = 1000
) -> ZooEntry:
    dimensions: dict[str, Dimension] = {
        "blocks": blocks, "bottleneck": bottleneck, "width": width, "image_size": image, "num_classes": classes,
    }  # fmt: skip
    return ZooEntry(family="resnet", dimensions=tuple(dimensions.items()), source=source)


_VIT = "Dosovitskiy et al. 2021 (arXiv 2010.11929), table 1"
_RESNET = "He et al. 2016 (arXiv 1512.03385), table 1"
_TINY = "made for tests and demonstrations"

IMAGE_MODELS: Mapping[str, ZooEntry] = {
    "vit-tiny": _vit(_TINY, 4, 64, 256, 4, 8, 32, 16),
    "vit-b16": _vit(_VIT, 12, 768, 3072, 12, 16),
    "vit-l16": _vit(_VIT, 24, 1024, 4096, 16, 16),
    "vit-h14": _vit(_VIT, 32, 1280, 5120, 16, 14),
    "resnet-tiny": _resnet(_TINY, (1, 3), True, 16, 32, 16),
    "resnet18": _resnet(_RESNET, (2, 2, 2, 2), False),
    "resnet50": _resnet(_RESNET, (3, 4, 6, 3), True),
    "resnet152": _resnet(_RESNET, (3, 8, 36, 3), True),
}


def _build_vit(dimensions: dict[str, Any]) -> Example:
    from planner.models.vit import ViT, ViTConfig

    return _classifier(ViT(ViTConfig(**dimensions)), dimensions)


def _build_resnet(dimensions: dict[str, Any]) -> Example:
    from planner.models.resnet import ResNet, ResNetConfig

    return _classifier(ResNet(ResNetConfig(**dimensions)), dimensions)


def _classifier(module: Any, dimensions: dict[str, Any]) -> Example:
    """Images, B 3 H W, and labels, B."""
    import torch

    size, classes = dimensions["image_size"], dimensions["num_classes"]
    images = torch.zeros(TRACE_BATCH, _CHANNELS, size, size)
    labels = torch.zeros(TRACE_BATCH, dtype=torch.int64)
    return Example(module=module, args=(images, labels), bounds=(None, classes))


IMAGE_FAMILIES: Mapping[str, Callable[[dict[str, Any]], Example]] = {"resnet": _build_resnet, "vit": _build_vit}
