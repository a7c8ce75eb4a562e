"""What transformers calls the tensors of a model, by the model's reference."""

from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

from planner.models.adapters import adapters_of, without_adapters
from planner.models.deepseek import DeepseekConfig
from planner.models.huggingface.deepseek import is_deepseek
from planner.models.huggingface.from_config import config_content, decoder_of, is_config
from planner.models.huggingface.mixtures import is_mixture
from planner.models.huggingface.taken_apart import pieces_of
from planner.models.naming.adapters import peft_naming
from planner.models.naming.bert import bert_naming
from planner.models.naming.deepseek import deepseek_naming
from planner.models.naming.gpt import gpt_naming
from planner.models.naming.llama import llama_naming
from planner.models.naming.parts import Built, Naming
from planner.models.naming.pieces import naming_of_pieces
from planner.models.naming.resnet import resnet_naming
from planner.models.naming.switch import switch_of_config_naming
from planner.models.naming.t5 import t5_naming
from planner.models.naming.vit import vit_naming, vit_of_config_naming
from planner.models.overrides import split_reference
from planner.models.zoo import ZOO, build_model, zoo_config

_NAMINGS: Mapping[str, Callable[[Any, Built], Naming]] = {
    "bert": bert_naming,
    "deepseek": deepseek_naming,
    "gpt": gpt_naming,
    "llama": llama_naming,
    "resnet": resnet_naming,
    "t5": t5_naming,
    "vit": vit_naming,
}
"""By family of the zoo. transformers has no models of clicks."""

_NAMED_OTHERWISE: Mapping[str, Callable[[Mapping[str, Any], Built], Naming]] = {
    "SwitchTransformersForConditionalGeneration": switch_of_config_naming,
    "ViTForImageClassification": vit_of_config_naming,
}
"""Classes whose modules here have other names than their files."""


def naming_of(reference: str, sequence_length: int | None) -> Naming | None:
    """What transformers calls the tensors of the model that `reference` names, planned for sequences of so many tokens;
    None where it has no such family of models, or the model is the user's own.

    Raises ModelError where none of its classes computes the same as the model, saying what differs, or a config cannot
    be read.
    """
    adapted, reference = adapters_of(reference) is not None, without_adapters(reference)
    name, _ = split_reference(reference)
    if name in ZOO and ZOO[name].family in _NAMINGS:
        built = _built(reference, sequence_length)
        found = _NAMINGS[ZOO[name].family](zoo_config(reference, sequence_length), built)
        return replace(found, built=built)
    if name in ZOO or ":" in name or not is_config(name):
        return None
    return _of_config(reference, sequence_length, adapted)


def adapter_naming_of(reference: str, sequence_length: int | None, base: Naming) -> Naming | None:
    """What peft calls what is trained of a model with adapters, whose own tensors are in `base` (`naming_of`); None for
    one without. Errors likewise."""
    adapters = adapters_of(reference)
    return None if adapters is None else peft_naming(adapters, base, _built(reference, sequence_length))


def _of_config(reference: str, sequence_length: int | None, adapted: bool) -> Naming:
    """The same of a model that was planned from a config: where transformers has built it, names are its own, and its
    weights are taken apart unless it is `adapted`."""
    architecture, content = config_content(reference)
    if is_mixture(architecture) or is_deepseek(architecture):
        built = _built(reference, sequence_length)
        config, neighbours = decoder_of(reference, sequence_length)
        if isinstance(config, DeepseekConfig):
            found = deepseek_naming(config, built, neighbours=neighbours)
        else:
            found = llama_naming(config, built)
        return replace(found, built=built, config=content)
    if architecture in _NAMED_OTHERWISE:
        built = _built(reference, sequence_length)
        return replace(_NAMED_OTHERWISE[architecture](content, built), built=built)
    module = None if adapted else _module(reference, sequence_length)
    pieces = {} if module is None else {piece.ours: piece for piece in pieces_of(module)}
    if not pieces:
        kinds, prefix = (str(content.get("model_type")),), getattr(module, "base_model_prefix", "")
        if module is None or not prefix:
            return Naming(parts=(), config=content, model_types=kinds)
        return Naming(parts=(), config=content, model_types=kinds, base=f"{prefix}.", built=_kept(module))
    return naming_of_pieces(content, _kept(module), pieces, module)


def _built(reference: str, sequence_length: int | None) -> Built:
    """Shapes and dtypes of what the model keeps, tied weights once."""
    return _kept(_module(reference, sequence_length))


def _module(reference: str, sequence_length: int | None) -> Any:
    return build_model(reference, dtype="float32", sequence_length=sequence_length).module


def _kept(module: Any) -> Built:
    saved = module.state_dict()
    tensors = {
        **dict(module.named_parameters()),
        **{name: buffer for name, buffer in module.named_buffers() if name in saved},
    }
    return {name: (tuple(tensor.shape), str(tensor.dtype).removeprefix("torch.")) for name, tensor in tensors.items()}
