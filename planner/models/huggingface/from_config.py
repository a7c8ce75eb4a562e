"""Models of Hugging Face, built from a `config.json` with random weights: nothing is downloaded.

The architecture in the config selects the class with a loss, and the class determines the arguments:

    ...ForCausalLM, GPT2LMHeadModel     input_ids, labels
    ...ForMaskedLM                      input_ids, attention_mask, labels
    ...ForConditionalGeneration         input_ids, attention_mask, decoder_input_ids, labels
    ...ForImageClassification           pixel_values, labels

A ...ForConditionalGeneration that has no encoder and decoder reads images or sound beside tokens. It is called on
tokens alone, with sizes of its `text_config`; its other parts exist, and do nothing.

Mixtral, Qwen3 MoE and DeepSeek are built as our own decoders (see `mixtures` and `deepseek` beside this file).
Experts of other architectures are one operator each (see `any_experts`, `llama4` and `switch`).

Attention is PyTorch's own where the architecture has it, and keys and values are not kept for generation. While a model
is exported, transformers writes out every mask; in training it leaves out a mask that is plainly causal or hides
nothing. So masks are left out here, too, if nothing is padded, no layer looks back through a window and nothing else is
computed with them. Where all layers look back through a window, an input says which tokens are padding.
"""

import contextlib
import inspect
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner.errors import ModelError
from planner.models.adapters import without_adapters
from planner.models.huggingface.any_experts import AS_ONE_OPERATOR, check_experts, experts_of
from planner.models.huggingface.config import check_activations, check_config, check_present, read_config
from planner.models.huggingface.decoders import dense_dimensions
from planner.models.huggingface.deepseek import deepseek_of, is_deepseek
from planner.models.huggingface.llama4 import with_chosen_rows
from planner.models.huggingface.mixtures import is_mixture, mixture_of
from planner.models.overrides import changed_content, split_reference

if TYPE_CHECKING:
    from planner.models.deepseek import DeepseekConfig
    from planner.models.llama import LlamaConfig

_WITHOUT_MASKS = "sdpa_without_masks"
_WITH_MASKS = "sdpa"
_COMPOSED_WITHOUT_MASKS = "composed_without_masks"
_COMPOSED_WITH_MASKS = "composed"
"""Attention with sinks or capped scores, which PyTorch's own lacks (`planner.models.composed_attention`)."""
_SPELLED_OUT = "eager"
"""Attention of models that have no other attention."""

_LENGTH = 128
"""Tokens of a sequence where neither the user nor the config gives a number."""

_KINDS: Mapping[str, tuple[str, ...]] = {
    "ForCausalLM": ("input_ids", "labels"),
    "LMHeadModel": ("input_ids", "labels"),
    "ForMaskedLM": ("input_ids", "attention_mask", "labels"),
    "ForConditionalGeneration": ("input_ids", "attention_mask", "decoder_input_ids", "labels"),
    "ForImageClassification": ("pixel_values", "labels"),
}
"""The arguments of a class, by the end of its name."""

_FROM_SOUND = ("input_features", "decoder_input_ids", "labels")
"""The arguments of a class that writes down speech (Whisper)."""

_FRAMES = 2
"""Frames of sound for each position of the encoder of Whisper: its second convolution takes every other frame."""

_DERIVED = ("layer_types",)
"""Keys that a config derives from others if they are left out."""

_LAYERS = "num_hidden_layers"

_LENGTHS = ("max_position_embeddings", "n_positions", "max_target_positions")
"""Keys for the longest sequence of a config."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FromConfig:
    """A module, its arguments, by name or in this order (`positional`), the bound of each input's integers,
    and the tokens of a sequence (None: no sequences)."""

    module: Any
    inputs: Mapping[str, Any]
    bounds: tuple[int | None, ...]
    sequence_length: int | None
    positional: bool = False


def is_config(reference: str) -> bool:
    """Whether a reference names a config: a path to a JSON file, or a folder with a `config.json`."""
    return reference.endswith(".json") or "/" in reference or Path(reference, "config.json").is_file()


def from_config(reference: str, *, batch: int, device: str, sequence_length: int | None) -> FromConfig:
    """The model of a config with weights drawn at random, on "meta" without any. Raises ModelError, naming the file."""
    path, name, ending, config = _config(reference)
    transformers = _transformers()
    names = _arguments(getattr(transformers, name), config, ending, path)
    images = ending == "ForImageClassification"
    text = _text_of(config, path)
    length = None if images else _length(text, path, sequence_length)
    if length is None and sequence_length is not None:
        raise ModelError(f"--seq-len does not apply to {reference}: {name} reads images, whose size is in its config")
    if (is_mixture(name) or is_deepseek(name)) and length is not None:
        return _decoder(config, name, length, path, batch, device)
    masked = "attention_mask" in names or (length is not None and _has_window(text, length))
    computed = _computes_with_masks(getattr(transformers, name))
    module = _built(transformers, config, name, path, masked=masked or computed, device=device)
    examples = {key: _example(key, config, batch, length, device) for key in names}
    bounds = tuple(_bound(key, text, images=images) for key in names)
    return FromConfig(module=module, inputs=examples, bounds=bounds, sequence_length=length)


def _arguments(made: Any, config: Any, ending: str, path: Path) -> tuple[str, ...]:
    """The names of the arguments of a class. Raises ModelError where its model reads what a config does not tell."""
    reads = made.main_input_name
    if reads == _FROM_SOUND[0] and config.model_type == "whisper":
        return _FROM_SOUND
    if not {reads, *inspect.signature(made.forward).parameters} & {"input_ids", "pixel_values"}:
        raise ModelError(
            f"{path}: {made.__name__} reads {reads}, and a config does not tell their shape; write a factory instead:"
            " --model package.module:factory"
        )
    return tuple(key for key in _KINDS[ending] if key != "decoder_input_ids" or config.is_encoder_decoder)


def config_content(reference: str) -> tuple[str, dict[str, Any]]:
    """The architecture of a config, and the content of its file with changes applied. Raises ModelError."""
    file, changes = split_reference(without_adapters(reference))
    _, name, content = _read(file)
    if not changes:
        return name, content
    return name, {**_config(reference)[3].to_dict(), "architectures": [name]}


def decoder_of(reference: str, sequence_length: int | None) -> "tuple[LlamaConfig | DeepseekConfig, bool]":
    """The dimensions of a decoder of the planner's own, from a config with experts, and whether its weights rotate
    neighbours. Raises ModelError, naming the file."""
    path, name, _, config = _config(reference)
    sizes = _sizes(config, name, _length(config, path, sequence_length), path)
    return sizes, bool(getattr(config, "rope_interleave", True))


def dimensions_of(reference: str, sequence_length: int | None) -> "LlamaConfig | DeepseekConfig | None":
    """The dimensions of the decoder of `planner.models` that computes the same as the model of a config; None where
    there is none, or the file is gone."""
    from planner.models.llama import LlamaConfig

    try:
        path, name, _, config = _config(reference)
        length = _length(config, path, sequence_length)
        if is_mixture(name) or is_deepseek(name):
            return _sizes(config, name, length, path)
    except ModelError:
        return None
    found = dense_dimensions(config, name, length)
    return None if found is None else LlamaConfig(**found)


def _config(reference: str) -> tuple[Path, str, str, Any]:
    """The file of a reference, the architecture in it, the ending of its class name that determines the arguments, and
    the config as transformers reads it."""
    file, changes = split_reference(without_adapters(reference))
    path, name, content = _read(file)
    transformers = _transformers()
    check_activations(content, _activations(), path)
    ending = next((ending for ending in _KINDS if name.endswith(ending)), None)
    found = getattr(transformers, name, None) if ending is not None else None
    if ending is None or not (isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)):
        known = ", ".join(f"…{known}" for known in _KINDS)
        lacks = f"transformers {transformers.__version__} has no model of that name"
        said = f"is not one that is built here ({known})" if ending is None else f"is not known: {lacks}"
        raise ModelError(
            f"{path}: the architecture {name} {said}; write a factory instead: --model package.module:factory"
        )
    config = _changed(_loaded(transformers, path, name, content), changes, path)
    _check_made(config, transformers, name, path)
    return path, name, ending, config


def _check_made(config: Any, transformers: Any, name: str, path: Path) -> None:
    """Raise ModelError where a config, with its defaults and changes, does not fit the architecture that it names."""
    wanted = getattr(transformers, name).config_class
    if not isinstance(config, wanted):
        raise ModelError(
            f"{path}: model_type '{config.model_type}' and architecture {name} do not go together; the model_type of"
            f" {name} is '{wanted.model_type}'"
        )
    content = config.to_dict()
    check_config(content, path)
    check_present(config, name, path)
    check_activations(content, _activations(), path)


def _activations() -> Mapping[str, Any]:
    from transformers.activations import ACT2FN

    return dict.fromkeys(ACT2FN)


def _sizes(config: Any, name: str, length: int, path: Path) -> "LlamaConfig | DeepseekConfig":
    """The dimensions of one of our own decoders with experts."""
    from planner.models.deepseek import DeepseekConfig
    from planner.models.llama import LlamaConfig

    if is_deepseek(name):
        return DeepseekConfig(**deepseek_of(config, name, length, path, stretched))
    return LlamaConfig(**mixture_of(config, name, length, path))


def _decoder(config: Any, name: str, length: int, path: Path, batch: int, device: str) -> FromConfig:
    """One of our own decoders with experts, called on tokens and labels."""
    import torch

    from planner.models.deepseek import Deepseek, DeepseekConfig
    from planner.models.llama import Llama

    sizes = _sizes(config, name, length, path)
    with torch.device(device):
        module = Deepseek(sizes) if isinstance(sizes, DeepseekConfig) else Llama(sizes)
        inputs = {key: torch.zeros(batch, length, dtype=torch.int64) for key in ("tokens", "labels")}
    bounds = (config.vocab_size, config.vocab_size)
    return FromConfig(module=module, inputs=inputs, bounds=bounds, sequence_length=length, positional=True)


def stretched(config: Any, kind: str) -> tuple[tuple[float, ...], float]:
    """Frequencies of positions of a type that is not the default, and the factor of the rotated parts."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    frequencies, magnitude = ROPE_INIT_FUNCTIONS[kind](config, "cpu")
    return tuple(frequencies.tolist()), float(magnitude)


def _read(reference: str) -> tuple[Path, str, dict[str, Any]]:
    """The file of a reference, the architecture that it names, and its whole content."""
    path = Path(reference)
    path = path / "config.json" if path.is_dir() else path
    content = read_config(path)
    named = content.get("architectures")
    if not isinstance(named, list) or len(named) != 1 or not isinstance(named[0], str):
        raise ModelError(
            f"{path}: 'architectures' must name the class to build, as in [\"LlamaForCausalLM\"]; it is {named!r:.80}"
        )
    return path, named[0], content


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise ModelError(
            "a config.json is built by Hugging Face's transformers, which cannot be imported"
            f" ({error}); pip install 'parallel-planner[huggingface]'"
        ) from error
    return transformers


@contextlib.contextmanager
def _theirs(transformers: Any, what: str) -> Iterator[None]:
    """Runs transformers on a user's config: without output, and with each of its errors as a ModelError.

    All of its errors: it may raise anything (KeyError, AttributeError, RuntimeError of torch, its own errors that
    have no common base), and no code of the planner runs inside.
    """
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        yield
    except Exception as error:
        raise ModelError(f"{what}: {_one_line(error)}") from error
    finally:
        transformers.logging.set_verbosity(verbosity)


def _loaded(transformers: Any, path: Path, name: str, content: Mapping[str, Any]) -> Any:
    """The config as transformers reads it, by its model_type. A model with code of its own, whose class has the name of
    a class in transformers, is read as that class: Kimi K2 is DeepSeek-V3 under another model_type. Its own code never
    runs."""
    with _theirs(transformers, f"{path}: transformers cannot read it"):
        if content.get("model_type") not in transformers.CONFIG_MAPPING and _brings(content.get("auto_map"), name):
            return getattr(transformers, name).config_class(**{k: v for k, v in content.items() if k != "model_type"})
        return transformers.AutoConfig.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)


def _brings(code: Any, name: str) -> bool:
    """Whether a config says that a file beside it has a class of this name."""
    classes = code.values() if isinstance(code, Mapping) else ()
    return any(isinstance(said, str) and said.rpartition(".")[2] == name for said in classes)


def _text_of(config: Any, path: Path) -> Any:
    """The config of the part that reads tokens, where a config has several parts; else the config itself."""
    with _theirs(_transformers(), f"{path}: transformers cannot tell which part of it reads tokens"):
        return config.get_text_config()


def _changed(config: Any, changes: Mapping[str, str], path: Path) -> Any:
    """The config with other values of some keys; keys that it derives from them are derived again."""
    if not changes:
        return config
    content = config.to_dict()
    derived = {key: None for key in _DERIVED if key in content}
    changed = changed_content(changes, content, str(path))
    content |= {**_by_layer(content, changed.get(_LAYERS)), **derived, **changed}
    with _theirs(_transformers(), f"{path}: transformers cannot change it so"):
        return type(config)(**content)


def _by_layer(content: Mapping[str, Any], layers: int | None) -> dict[str, Any]:
    """What a config says for each of its layers, for another number of layers: for the first ones, or derived again."""
    before = content.get(_LAYERS)
    if layers is None or not before:
        return {}
    lists = {key: value for key, value in content.items() if isinstance(value, list) and len(value) == before}
    return {key: value[:layers] if layers <= before else None for key, value in lists.items()}


def _built(transformers: Any, config: Any, name: str, path: Path, *, masked: bool, device: str) -> Any:
    import torch

    _register(transformers)
    made = getattr(transformers, name)
    attention = _WITH_MASKS if made._supports_sdpa else _SPELLED_OUT
    config.use_cache = _text_of(config, path).use_cache = False
    with _theirs(transformers, f"{path}: transformers cannot build {name}"), torch.device(device):
        module = made._from_config(config, attn_implementation=attention).train()
        _set_attention(module, masked=masked)
    _experts_as_one_operator(module, str(path))
    return module


def _register(transformers: Any) -> None:
    """Register two things with transformers: attention without a function that makes masks, and experts as one
    operator."""
    from transformers.integrations.moe import ALL_EXPERTS_FUNCTIONS
    from transformers.integrations.sdpa_attention import sdpa_attention_forward
    from transformers.masking_utils import AttentionMaskInterface, sdpa_mask

    transformers.AttentionInterface.register(_WITHOUT_MASKS, sdpa_attention_forward)
    for name in (_COMPOSED_WITH_MASKS, _COMPOSED_WITHOUT_MASKS):
        transformers.AttentionInterface.register(name, _composed_attention)
    AttentionMaskInterface.register(_COMPOSED_WITH_MASKS, sdpa_mask)
    ALL_EXPERTS_FUNCTIONS.register(AS_ONE_OPERATOR, experts_of)


def _computes_with_masks(made: Any) -> bool:
    """Whether a class asks for a causal mask that its attention does not need: an indexer chooses keys by
    it (DeepSeek-V3.2), or biases are added to it (Falcon). Such code asks for attention by its usual name, too."""
    return "allow_is_causal_skip" in inspect.getsource(sys.modules[made.__module__])


def _has_sinks_or_cap(module: Any) -> bool:
    """Whether heads have sinks or scores are capped, and attention is called as transformers calls it."""
    sinks = any(name.rpartition(".")[2] == "sinks" for name, _ in module.named_parameters())
    capped = getattr(module.config.get_text_config(), "attn_logit_softcapping", None) is not None
    return bool(module._supports_attention_backend) and (sinks or capped)


def _set_attention(module: Any, *, masked: bool) -> None:
    """Make attention an operator with a rule, with masks or without."""
    if _has_sinks_or_cap(module):
        module.set_attn_implementation(_COMPOSED_WITH_MASKS if masked else _COMPOSED_WITHOUT_MASKS)
    elif module._supports_sdpa:
        module.set_attn_implementation(_WITH_MASKS if masked else _WITHOUT_MASKS)


def _composed_attention(
    module: Any,
    query: Any,
    key: Any,
    value: Any,
    attention_mask: Any,
    dropout: float = 0.0,
    scaling: float | None = None,
    s_aux: Any = None,
    softcap: float | None = None,
    **_: Any,
) -> tuple[Any, None]:
    """Attention with sinks or capped scores as one operator, in the form of transformers' attention functions."""
    from planner.models.composed_attention import composed_attention

    if dropout:
        raise ModelError(
            f"attention_dropout {dropout:g}: attention with sinks or capped scores drops nothing here; leave it 0"
        )
    causal = attention_mask is None and query.shape[2] > 1 and getattr(module, "is_causal", True)
    made = composed_attention(query, key, value, s_aux, attention_mask, causal, scaling, softcap)
    return made.transpose(1, 2).contiguous(), None


def _experts_as_one_operator(module: Any, where: str) -> None:
    """Make the experts of a model of transformers one operator each. Raises ModelError, which begins with `where`, for
    experts that the operator cannot compute."""
    from planner.models.huggingface.switch import stack_experts

    stack_experts(module, where)
    with_chosen_rows(module)
    found = _with_experts(module)
    for part in found:
        with _theirs(_transformers(), f"{where}: its experts cannot be changed"):
            part.set_experts_implementation(AS_ONE_OPERATOR)
    if found:
        check_experts(module, where)


def _with_experts(module: Any) -> list[Any]:
    """Models of transformers in a module whose experts may be computed in other ways: the module itself, or, where it
    reads images beside tokens, the part that reads tokens (Kimi K2.5)."""
    models = (part for part in module.modules() if hasattr(part, "_can_set_experts_implementation"))
    return [part for part in models if part._can_set_experts_implementation()]


def trained_without_masks(module: Any) -> None:
    """Make a model of transformers build no masks except windows, and keep no keys and values, as `from_config`
    does where nothing is padded. Raises ModelError where its attention cannot be changed."""
    transformers, kind = _transformers(), type(module).__name__
    _register(transformers)
    text = _text_of(module.config, Path(kind))
    module.config.use_cache = text.use_cache = False
    masked = _has_window(text) or _computes_with_masks(type(module))
    with _theirs(transformers, f"{kind}: its attention cannot be changed"):
        _set_attention(module, masked=masked)


def with_experts_as_operators(module: Any) -> None:
    """Make the experts of a model of transformers operators, as `from_config` does. Raises ModelError for experts
    that the operator cannot compute."""
    _register(_transformers())
    _experts_as_one_operator(module, type(module).__name__)


def experts_where_they_can(module: Any) -> None:
    """Make experts operators where a module is, or contains, a model of transformers, and the operator can compute
    them; other experts stay as they are. Raises ModelError for experts that are modules of their own and cannot be
    stacked (`planner.models.huggingface.switch`), because they cannot be traced."""
    if not type(module).__module__.startswith("transformers.") or not hasattr(module, "set_experts_implementation"):
        for part in module.children():
            experts_where_they_can(part)
        return
    before = [(part, part.config._experts_implementation) for part in _with_experts(module)]
    try:
        with_experts_as_operators(module)
    except ModelError:
        if not before:
            raise
        for part, implementation in before:
            part.set_experts_implementation(implementation)


def _one_line(error: Exception) -> str:
    """An error as one line, with its type where its text alone does not say it."""
    text = " ".join(str(error).split())[:300]
    kind = type(error).__name__
    return text if kind in ("ValueError", "OSError") and text else f"{kind}: {text}" if text else kind


def _length(config: Any, path: Path, asked: int | None) -> int:
    """Tokens of a sequence: as asked, else as many as the config has positions for."""
    lengths = (int(getattr(config, key, None) or 0) for key in _LENGTHS)
    longest = next((length for length in lengths if length > 0), None)  # XLNet has -1, of any length
    if asked is None:
        return longest if longest is not None else _LENGTH
    if asked < 1:
        raise ModelError(f"--seq-len {asked}: a sequence has 1 token or more")
    if longest is not None and asked > longest:
        raise ModelError(f"{path} has positions for {longest} tokens; --seq-len {asked} is longer")
    return asked


def _has_window(config: Any, length: int | None = None) -> bool:
    """Whether some layer looks back through a window, or sees only its own chunk (Llama 4), that is shorter than a
    sequence of this length."""
    windows = [int(getattr(config, name, None) or 0) for name in ("sliding_window", "attention_chunk_size")]
    kinds = getattr(config, "layer_types", None)
    used = kinds is None or any(kind != "full_attention" for kind in kinds)
    return used and any(window > 0 and (length is None or window < length) for window in windows)


def _example(key: str, config: Any, batch: int, length: int | None, device: str) -> Any:
    import torch

    if key == "pixel_values":
        size = config.image_size
        sides = tuple(size) if isinstance(size, list | tuple) else (size, size)
        return torch.zeros(batch, config.num_channels, *sides, device=device)
    if key == "input_features":
        return torch.zeros(batch, config.num_mel_bins, _FRAMES * config.max_source_positions, device=device)
    shape = (batch,) if length is None else (batch, length)
    make = torch.ones if key == "attention_mask" else torch.zeros
    return make(shape, dtype=torch.int64, device=device)


def _bound(key: str, config: Any, *, images: bool) -> int | None:
    """The bound of the integers of an input; None where they are drawn from the example."""
    if key in ("attention_mask", "input_features"):
        return None
    if key == "labels" and images:
        return int(config.num_labels)
    return int(config.vocab_size) if getattr(config, "vocab_size", None) is not None else None
