"""Encoders of sound of transformers, without what they draw at random in training.

Wav2Vec2 and its relatives hide spans of frames (SpecAugment), drawn with numpy, and leave out whole layers (layer
drop). A plan has one graph for every step, so nothing is hidden, and every layer computes. The work is the same but for
the layers: a step with layer drop computes fewer.
"""

from collections.abc import Iterator
from pathlib import Path
from typing import Any

_HIDDEN = ("mask_time_prob", "mask_feature_prob")
"""Keys for the share of frames, and of features, that are hidden."""


def without_draws(config: Any, path: Path) -> Iterator[str]:
    """Turn off in a config what its model would draw, and say so in a note; other configs stay as they are."""
    if not hasattr(config, "apply_spec_augment") or not hasattr(config, "layerdrop"):
        return
    hidden = [key for key in _HIDDEN if config.apply_spec_augment and getattr(config, key, 0.0)]
    left = [f"spans that are hidden ({key} {getattr(config, key):g})" for key in hidden]
    left += [f"layers that are left out (layerdrop {config.layerdrop:g})"] if config.layerdrop else []
    config.apply_spec_augment, config.layerdrop = False, 0.0
    for key in hidden:
        setattr(config, key, 0.0)
    if left:
        yield f"{path}: drawn at random in training, and not planned: {'; '.join(left)}; every layer computes"
