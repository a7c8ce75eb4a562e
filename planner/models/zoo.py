"""Models by name, those of a Hugging Face `config.json` by its path, and the user's own by `package.module:factory`.

Language models are in `language_models.py`, DeepSeek's in `deepseek_models.py`, image models in `images.py`, and
click models in `clicks.py`; `parameter_counts.py` has the number of parameters of each. A name may end with changes
to the model, as in `llama8b+num_layers=40` (`overrides.py`).
"""

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from planner.errors import ModelError, unknown_name
from planner.limits import interrupting
from planner.models.adapters import adapters_of, without_adapters
from planner.models.clicks import CLICK_FAMILIES, CLICK_MODELS
from planner.models.deepseek_models import DEEPSEEK_FAMILIES, DEEPSEEK_MODELS
from planner.models.entry import TRACE_BATCH, Dimension, Example, ZooEntry
from planner.models.huggingface.from_config import from_config, is_config
from planner.models.huggingface.rewriting import experts_where_they_can
from planner.models.images import IMAGE_FAMILIES, IMAGE_MODELS
from planner.models.imported import imported_factory
from planner.models.language_models import LANGUAGE_FAMILIES, LANGUAGE_MODELS
from planner.models.overrides import split_reference, typed_changes
from planner.models.parameter_counts import PARAMETER_COUNTS
from planner.models.weights_apart import weights_without_data


@dataclass(frozen=True, slots=True, kw_only=True)
class BuiltModel:
    """A module and example inputs on which calling it gives the loss.

    `sequence_length` is None where the model has no sequences. `bounds` has for each example tensor the number that
    its integers stay below, None where it is not known or the tensor has no integers. `on_host` says that all but its
    weights are on the host although no data was asked for, because its factory reads numbers. `compared` says that
    another trace has compared blocks that differ only in their numbers (`planner.graph.tracing.repeats`). `notes` say
    what of a config is not in its model.
    """

    reference: str
    module: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    batch: int
    sequence_length: int | None
    bounds: tuple[int | None, ...]
    on_host: bool = False
    compared: bool = False
    notes: tuple[str, ...] = ()

    @property
    def published(self) -> bool:
        """Whether it is a model of the zoo, with dimensions that may be changed."""
        return split_reference(self.reference)[0] in ZOO


ZOO: Mapping[str, ZooEntry] = {**LANGUAGE_MODELS, **DEEPSEEK_MODELS, **IMAGE_MODELS, **CLICK_MODELS}


def build_model(reference: str, *, dtype: str, device: str = "meta", sequence_length: int | None = None) -> BuiltModel:
    """The module that `reference` names, with example inputs.

    `reference` must come from the user, never from a file (`planner.plan.binding.model_of`): a name of the zoo, a path
    to a `config.json` of Hugging Face (or to a folder with one), or `package.module:factory` (on the import path or in
    the current folder); the factory returns `(module, args)` or `(module, args, kwargs)`. The first two may have
    changed dimensions: `llama8b+num_layers=40`; all may have adapters: `llama8b+lora=16` (`planner.models.adapters`).
    Floating point parameters of a zoo model get `dtype` ("bfloat16", ...); a module of the user's is converted too,
    unless it has parameters of several floating point dtypes, which the user has chosen. On "meta" nothing is
    allocated. Raises ModelError.
    """
    plain, adapters = without_adapters(reference), adapters_of(reference)
    with interrupting(f"building {reference}"):
        built = _built(plain, dtype, device, sequence_length, apart=adapters is None)
        if adapters is None:
            return built
        from planner.models.low_rank import add_adapters

        add_adapters(built.module, adapters, plain)
        return replace(built, reference=reference)


def _built(reference: str, dtype: str, device: str, sequence_length: int | None, *, apart: bool) -> BuiltModel:
    """The model without adapters. Weights of a config are taken `apart` only without them: adapters are added to layers
    by their names in transformers."""
    name, changes = split_reference(reference)
    if ":" in name:
        if changes:
            raise ModelError(f"--set does not apply to {name}: its factory decides what is built")
        if sequence_length is not None:
            raise ModelError(f"--seq-len does not apply to {name}: its factory fixes the shapes of the example inputs")
        return _from_factory(name, dtype=dtype, device=device)
    if name not in ZOO and is_config(name):
        return _from_config(reference, dtype=dtype, device=device, sequence_length=sequence_length, apart=apart)
    return _from_zoo(reference, dtype=dtype, device=device, sequence_length=sequence_length)


def is_of_zoo(reference: str) -> bool:
    """Whether a reference names a model of the zoo, with or without changed dimensions. Nothing is read or imported."""
    return split_reference(reference)[0] in ZOO


def zoo_entry(reference: str) -> ZooEntry:
    """The zoo entry of a model, with its changes. Raises ModelError for a name that the zoo lacks."""
    name, changes = split_reference(without_adapters(reference))
    if name not in ZOO:
        raise ModelError(unknown_name("model", name, ZOO) + _OTHER_MODELS)
    return (
        with_dimensions(ZOO[name], **typed_changes(changes, _config_of(ZOO[name].family), name))
        if changes
        else ZOO[name]
    )


def zoo_config(reference: str, sequence_length: int | None) -> Any:
    """The config of its family that a zoo model is built from, for sequences of this many tokens (None: as published).
    Raises ModelError."""
    entry = zoo_entry(reference)
    return _config_of(entry.family)(**_dimensions(reference, entry, sequence_length))


def parameter_count(reference: str) -> int:
    """Parameters of a zoo model, tied ones once; a changed model is built to count them."""
    if reference in PARAMETER_COUNTS:
        return PARAMETER_COUNTS[reference]
    return sum(parameter.numel() for parameter in build_model(reference, dtype="bfloat16").module.parameters())


def _from_zoo(reference: str, *, dtype: str, device: str, sequence_length: int | None) -> BuiltModel:
    import torch

    entry = zoo_entry(reference)
    dimensions = _dimensions(reference, entry, sequence_length)
    floating = getattr(torch, dtype)
    try:
        with torch.device(device):
            example = _FAMILIES[entry.family](dimensions)
    except (ArithmeticError, RuntimeError, TypeError, ValueError) as error:
        if reference in ZOO:
            raise
        raise ModelError(f"{reference} cannot be built: {type(error).__name__}: {error}") from error
    return BuiltModel(
        reference=reference,
        module=example.module.to(floating),
        args=_converted(example.args, floating),
        kwargs={},
        batch=TRACE_BATCH,
        sequence_length=dimensions.get("sequence_length"),
        bounds=example.bounds,
    )


def _dimensions(reference: str, entry: ZooEntry, sequence_length: int | None) -> dict[str, Any]:
    """The arguments for the config of a family."""
    sequence = _sequence(reference, entry, sequence_length)
    length = {} if sequence is None else {"sequence_length": sequence}
    return {**dict(entry.dimensions), **length}


def _config_of(family: str) -> type:
    """The dimensions that models of a family have."""
    from planner.models.bert import BertConfig
    from planner.models.deepseek import DeepseekConfig
    from planner.models.dlrm import DLRMConfig
    from planner.models.gpt import GPTConfig
    from planner.models.llama import LlamaConfig
    from planner.models.resnet import ResNetConfig
    from planner.models.t5 import T5Config
    from planner.models.vit import ViTConfig
    from planner.models.wide_deep import WideDeepConfig

    configs: dict[str, type] = {
        "bert": BertConfig,
        "deepseek": DeepseekConfig,
        "dlrm": DLRMConfig,
        "gpt": GPTConfig,
        "llama": LlamaConfig,
        "resnet": ResNetConfig,
        "t5": T5Config,
        "vit": ViTConfig,
        "wide-deep": WideDeepConfig,
    }
    return configs[family]


_OTHER_MODELS = " Your own model: --model package.module:factory; of Hugging Face: --model path/to/config.json."
_LEARNED_POSITIONS = frozenset({"bert", "gpt"})


def _from_config(reference: str, *, dtype: str, device: str, sequence_length: int | None, apart: bool) -> BuiltModel:
    import torch

    made = from_config(reference, batch=TRACE_BATCH, device=device, sequence_length=sequence_length, apart=apart)
    floating = getattr(torch, dtype)
    inputs = _converted(made.inputs, floating)
    return BuiltModel(
        reference=reference,
        module=made.module.to(floating),
        args=tuple(inputs.values()) if made.positional else (),
        kwargs={} if made.positional else inputs,
        batch=TRACE_BATCH,
        sequence_length=made.sequence_length,
        bounds=made.bounds,
        notes=made.notes,
    )


def _sequence(name: str, entry: ZooEntry, wanted: int | None) -> int | None:
    """Tokens of a sample: as many as wanted, or as published; None for a model without sequences."""
    if wanted is None:
        return entry.sequence_length
    if entry.sequence_length is None:
        raise ModelError(f"--seq-len {wanted} does not apply to {name}: its samples are no sequences of tokens")
    if wanted < 1:
        raise ModelError(f"--seq-len {wanted}: a sequence has 1 token or more")
    if entry.family in _LEARNED_POSITIONS and wanted > entry.sequence_length:
        raise ModelError(
            f"{name} has learned positions for {entry.sequence_length} tokens; --seq-len {wanted} is longer"
        )
    return wanted


_FAMILIES: Mapping[str, Callable[[dict[str, Any]], Example]] = {
    **LANGUAGE_FAMILIES,
    **DEEPSEEK_FAMILIES,
    **IMAGE_FAMILIES,
    **CLICK_FAMILIES,
}


def _converted(tree: Any, floating: Any) -> Any:
    """Arguments with their floating point tensors in this dtype."""
    import torch
    from torch.utils import _pytree as pytree

    def converted(leaf: Any) -> Any:
        return leaf.to(floating) if isinstance(leaf, torch.Tensor) and leaf.is_floating_point() else leaf

    return pytree.tree_map(converted, tree)


def _from_factory(reference: str, *, dtype: str, device: str) -> BuiltModel:
    import torch
    from torch.utils import _pytree as pytree

    here = os.getcwd()
    try:
        factory = imported_factory(reference, "--model", ModelError)
        try:
            made, on_host = _made(factory, device)
        except Exception as error:
            raise ModelError(
                f"the factory {reference} raised {type(error).__name__}: {error}{_remedy(error, device)}"
            ) from error
    finally:
        os.chdir(here)  # so that files of the command are found, wherever the user's code went
    parts = made if isinstance(made, tuple) else (made,)
    kinds = (torch.nn.Module, tuple | list, Mapping)
    if len(parts) not in (2, 3) or not all(isinstance(part, kind) for part, kind in zip(parts, kinds, strict=False)):
        raise ModelError(
            f"the factory {reference} must return (module, args) or (module, args, kwargs); it returned {_kinds(made)}"
        )
    floating = getattr(torch, dtype)
    experts_where_they_can(parts[0])
    module, args, kwargs = parts[0], tuple(parts[1]), dict(parts[2]) if len(parts) == 3 else {}
    if not _is_mixed(module):
        module, (args, kwargs) = _cast(module, floating), _converted((args, kwargs), floating)
    every = [leaf for leaf in pytree.tree_leaves((args, kwargs)) if isinstance(leaf, torch.Tensor)]
    tensors = [tensor for tensor in every if tensor.dim()]
    if not tensors:
        raise ModelError(f"the factory {reference} returned no example tensor with a batch dim")
    return BuiltModel(
        reference=reference,
        module=module,
        args=args,
        kwargs=kwargs,
        batch=int(tensors[0].shape[0]),
        sequence_length=None,
        bounds=(None,) * len(every),
        on_host=on_host,
    )


def _made(factory: Callable[[], Any], device: str) -> tuple[Any, bool]:
    """What a factory returns, and whether it was built on the host although no data was asked for, because it reads
    numbers of tensors as it builds."""
    import torch

    try:
        with torch.device(device):
            return factory(), False
    except Exception as error:
        if device != "meta" or "meta" not in str(error).lower():
            raise
    with torch.device("cpu"), weights_without_data():
        return factory(), True


def _remedy(error: Exception, device: str) -> str:
    """Advice for a factory that reads numbers of weights without data; empty for other errors."""
    of_torch = isinstance(error, RuntimeError | TypeError) and re.search(r"\bmeta\b", str(error), re.IGNORECASE)
    if device != "meta" or not of_torch:
        return ""
    return (
        "; weights have no data while a model is planned: keep what is read of them a tensor, as"
        " self.register_buffer('scale', self.weight.detach().abs().max()) in place of self.weight.abs().max().item()"
    )


def _cast(module: Any, floating: Any) -> Any:
    """A module in a floating point dtype. `module.to` would drop the imaginary part of complex tensors."""
    return module._apply(lambda tensor: tensor.to(floating) if tensor.is_floating_point() else tensor)


def _is_mixed(module: Any) -> bool:
    """Whether parameters have several floating point dtypes."""
    return len({one.dtype for one in module.parameters() if one.is_floating_point()}) > 1


def _kinds(made: Any) -> str:
    return f"({', '.join(type(part).__name__ for part in made)})" if isinstance(made, tuple) else type(made).__name__


def with_dimensions(entry: ZooEntry, **changes: Dimension) -> ZooEntry:
    """A variant of a zoo entry, for tests and studies."""
    return replace(entry, dimensions=tuple({**dict(entry.dimensions), **changes}.items()))
