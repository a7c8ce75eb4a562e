"""Why the model of a config is not built, and what to do: the words of a refusal."""

from collections.abc import Iterator, Mapping
from typing import Any

from planner.models.huggingface.inputs import KINDS, PAIRS

_FACTORY = "write a factory instead: --model package.module:factory"

_REASONS: Mapping[str, str] = {
    "Wav2Vec2ForPreTraining": "its quantizer draws Gumbel noise, which would differ with the plan; name Wav2Vec2ForCTC,"
    " whose encoder is the same",
    "Siglip2Model": "the values of spatial_shapes decide the sizes of its tensors",
}
"""Reasons for single architectures."""


def not_built(transformers: Any, name: str, content: Mapping[str, Any], ending: str | None) -> str:
    """What is wrong with an architecture that is not built: its class has no loss, reads other inputs, or is unknown.
    `ending` is the end of its name that decides its inputs, None for an end that is not known."""
    if name in _REASONS:
        return f"the architecture {name} is not one that is built here: {_REASONS[name]}; or {_FACTORY}"
    if ending is not None:
        lacks = f"transformers {transformers.__version__} has no model of that name"
        if content.get("auto_map"):
            lacks += ", and the code beside the config, which builds it, never runs here"
        return f"the architecture {name} is not known: {lacks}; {_FACTORY}"
    others = _with_a_loss(transformers, name)
    if others is not None:
        instead = f"name one that has in 'architectures': {' or '.join(others)}; or " if others else ""
        return f"the architecture {name} has no loss to train by in transformers; {instead}{_FACTORY}"
    known = ", ".join([*(f"…{known}" for known in KINDS), *PAIRS])
    return f"the architecture {name} is not one that is built here ({known}); {_FACTORY}"


def _with_a_loss(transformers: Any, name: str) -> list[str] | None:
    """The classes that are built here for the config of `name`, a bare model of transformers; None for another name."""
    bare: Any = getattr(transformers, name, None)
    if not name.endswith("Model") or name.endswith("HeadModel") or not hasattr(bare, "config_class"):
        return None
    endings = (ending for ending in KINDS if ending.startswith("For"))
    found: Iterator[Any] = (getattr(transformers, f"{name.removesuffix('Model')}{ending}", None) for ending in endings)
    return [made.__name__ for made in found if getattr(made, "config_class", None) is bare.config_class]
