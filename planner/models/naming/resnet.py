"""ResNet's names: `ResNetForImageClassification`."""

from typing import Any

from planner.models.naming.parts import Built, Naming
from planner.models.naming.refusal import refuse
from planner.models.naming.rules import parts_of, rule
from planner.models.resnet import ResNetConfig

_STAGE, _THERE = r"stages\.(\d+)\.(\d+)\.", r"resnet.encoder.stages.\1.layers.\2."
_RULES = (
    rule(r"stem\.conv\.weight", "resnet.embedder.embedder.convolution.weight"),
    rule(r"stem\.norm\.(\w+)", r"resnet.embedder.embedder.normalization.\1"),
    rule(_STAGE + r"layers\.(\d)\.conv\.weight", _THERE + r"layer.\3.convolution.weight"),
    rule(_STAGE + r"layers\.(\d)\.norm\.(\w+)", _THERE + r"layer.\3.normalization.\4"),
    rule(_STAGE + r"shortcut\.conv\.weight", _THERE + "shortcut.convolution.weight"),
    rule(_STAGE + r"shortcut\.norm\.(\w+)", _THERE + r"shortcut.normalization.\3"),
    rule(r"head\.(\w+)", r"classifier.1.\1"),
)


def resnet_naming(config: ResNetConfig, built: Built) -> Naming:
    """What transformers calls the tensors of a residual network. Raises ModelError where convolutions are in groups."""
    if config.groups > 1:
        refuse(f"groups={config.groups}: ResNetForImageClassification has one group of channels")
    parts, _ = parts_of(built, _RULES)
    return Naming(parts=parts, config=_config(config), model_types=("resnet",), base="resnet.")


def _config(config: ResNetConfig) -> dict[str, Any]:
    labels = {str(number): f"LABEL_{number}" for number in range(config.num_classes)}
    wider = 4 if config.bottleneck else 1
    return {
        "architectures": ["ResNetForImageClassification"],
        "model_type": "resnet",
        "depths": list(config.blocks),
        "downsample_in_bottleneck": False,
        "downsample_in_first_stage": False,
        "embedding_size": config.width,
        "hidden_act": "relu",
        "hidden_sizes": [config.width * wider * 2**stage for stage in range(len(config.blocks))],
        "id2label": labels,
        "label2id": {label: int(number) for number, label in labels.items()},
        "layer_type": "bottleneck" if config.bottleneck else "basic",
        "num_channels": config.channels,
    }
