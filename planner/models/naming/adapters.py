"""Adapters as peft keeps them: `adapter_model.safetensors`, and `adapter_config.json` beside it.

    model.layers.0.self_attn.q_proj.lora_A.weight                    ours
    base_model.model.model.layers.0.self_attn.q_proj.lora_A.weight   peft's, of the layer as transformers calls it

Modules that are trained in full beside adapters are in the same file. The weights that are frozen are not: they are
those of the model that the run began with.
"""

import re
from collections.abc import Mapping
from dataclasses import replace

from planner.errors import ModelError
from planner.models.adapters import Adapters
from planner.models.naming.parts import Built, Naming, Part, whole

_OF_ADAPTER = re.compile(r"(?P<layer>.+)\.(?P<which>lora_[AB])\.weight")
_PREFIX = "base_model.model."


def is_of_adapter(name: str) -> bool:
    """Whether a parameter is one of adapters."""
    return _OF_ADAPTER.fullmatch(name) is not None


def peft_naming(adapters: Adapters, base: Naming, built: Built) -> Naming:
    """What peft calls what is trained of a model with adapters, `built`, whose own tensors are in `base`.

    Raises ModelError where transformers keeps a layer with an adapter in another order, or with others in one tensor.
    """
    trained = {name: shape for name, (shape, _) in built.items() if _is_trained(name, adapters)}
    parts = tuple(_part(name, shape, base) for name, shape in trained.items())
    layers = {found["layer"] for name in trained if (found := _OF_ADAPTER.fullmatch(name))}
    return Naming(
        parts=parts,
        config={
            "peft_type": "LORA",
            "task_type": "CAUSAL_LM",
            "base_model_name_or_path": None,
            "r": adapters.rank,
            "lora_alpha": adapters.alpha,
            "lora_dropout": adapters.dropout,
            "target_modules": _targets({_layer_of(name, base) for name in layers}, layers, built, base),
            "modules_to_save": _modules(trained, base) or None,
            "bias": "none",
            "inference_mode": True,
        },
        model_types=(),
        built={name: built[name] for name in trained},
        single="adapter_model.safetensors",
        config_file="adapter_config.json",
    )


def _is_trained(name: str, adapters: Adapters) -> bool:
    module = name.rpartition(".")[0]
    inside = any(re.search(rf"(^|\.){re.escape(one)}(\.|$)", module) for one in adapters.trained)
    return is_of_adapter(name) or inside


def _part(name: str, shape: tuple[int, ...], base: Naming) -> Part:
    found = _OF_ADAPTER.fullmatch(name)
    if found is None:
        module, _, last = _name_there(name, base).rpartition(".")
        return whole(name, f"{_PREFIX}{module}.{last}", shape)
    return whole(name, f"{_PREFIX}{_layer_of(found['layer'], base)}.{found['which']}.weight", shape)


def _layer_of(layer: str, base: Naming) -> str:
    return _name_there(f"{layer}.weight", base).removesuffix(".weight")


def _name_there(name: str, base: Naming) -> str:
    """The tensor of transformers that is one of ours as it is."""
    if not base.parts:
        return name
    parts = [part for part in base.parts if part.ours == name]
    plain = len(parts) == 1 and replace(parts[0], theirs="") == whole(name, "", base.built[name][0])
    if not plain or sum(part.theirs == parts[0].theirs for part in base.parts) > 1:
        raise ModelError(
            f"transformers keeps {name} in another order, or with others in one tensor, so that an adapter beside it"
            " has no name there"
        )
    return parts[0].theirs


def _modules(trained: Mapping[str, object], base: Naming) -> list[str]:
    """Whole names of the modules that are trained in full: peft takes every module that a name of its list ends."""
    beside = (name for name in trained if not is_of_adapter(name))
    return sorted({_name_there(name, base).rpartition(".")[0] for name in beside})


def _targets(theirs: set[str], layers: set[str], built: Built, base: Naming) -> list[str]:
    """The ends of names that peft finds the layers by; whole names where others end so, too."""
    ends = {name.rpartition(".")[2] for name in theirs}
    matrices = {name.removesuffix(".weight") for name in built if name.endswith(".weight") and not is_of_adapter(name)}
    others = {layer.rpartition(".")[2] for layer in matrices - layers if len(built[f"{layer}.weight"][0]) > 1}
    return sorted(theirs if ends & others else ends)
