"""Models of Hugging Face, built from a `config.json` with random weights: nothing is downloaded.

The architecture that the config names picks the class with a loss, and the class what it is called with:

    ...ForCausalLM, GPT2LMHeadModel     input_ids, labels
    ...ForMaskedLM                      input_ids, attention_mask, labels
    ...ForConditionalGeneration         input_ids, attention_mask, decoder_input_ids, labels
    ...ForImageClassification           pixel_values, labels

Mixtures of experts are built as our own decoders (see `huggingface_experts` and `huggingface_deepseek`).

Attention is PyTorch's own, and keys and values are not kept for generation. While a model is exported transformers
spells out every mask, in training it leaves one out that is plainly causal or hides nothing. So where nothing is padded
and no layer looks back through a window, attention is registered once more, under a name without a function that makes
masks: transformers then leaves masks out, as in training.
"""

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner.errors import ModelError
from planner.models.huggingface_deepseek import deepseek_of, is_deepseek
from planner.models.huggingface_experts import is_mixture, mixture_of
from planner.models.overrides import changed_content, split_reference

if TYPE_CHECKING:
    from planner.models.deepseek import DeepseekConfig
    from planner.models.llama import LlamaConfig

_WITHOUT_MASKS = "sdpa_without_masks"
_WITH_MASKS = "sdpa"
_LENGTH = 128
"""Tokens of a sequence where neither the user nor the config says how many."""

_KINDS: Mapping[str, tuple[str, ...]] = {
    "ForCausalLM": ("input_ids", "labels"),
    "LMHeadModel": ("input_ids", "labels"),
    "ForMaskedLM": ("input_ids", "attention_mask", "labels"),
    "ForConditionalGeneration": ("input_ids", "attention_mask", "decoder_input_ids", "labels"),
    "ForImageClassification": ("pixel_values", "labels"),
}
"""What a class is called with, by the end of its name."""

_DERIVED = ("layer_types",)
"""Keys that a config derives from others where they are left out."""

_LENGTHS = ("max_position_embeddings", "n_positions")
"""Where a config says how long a sequence may be."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FromConfig:
    """A module, what it is called with, by name or in this order (`positional`), the bound of each input's integers,
    and the tokens of a sequence (None: there is none)."""

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
    names = _KINDS[ending]
    length = None if ending == "ForImageClassification" else _length(config, path, sequence_length)
    if length is None and sequence_length is not None:
        raise ModelError(f"--seq-len does not apply to {reference}: {name} reads images, whose size is in its config")
    if (is_mixture(name) or is_deepseek(name)) and length is not None:
        return _decoder(config, name, length, path, batch, device)
    masked = "attention_mask" in names or _has_window(config, length)
    inputs = dict.fromkeys((*names[:1], "attention_mask", *names[1:])) if masked else dict.fromkeys(names)
    module = _built(transformers, config, name, path, masked=masked, device=device)
    examples = {key: _example(key, config, batch, length, device) for key in inputs}
    bounds = tuple(_bound(key, config) for key in inputs)
    return FromConfig(module=module, inputs=examples, bounds=bounds, sequence_length=length)


def config_content(reference: str) -> tuple[str, dict[str, Any]]:
    """The architecture of a config, and what its file says, with what is changed of it. Raises ModelError."""
    file, changes = split_reference(reference)
    path, name = _read(file)
    if not changes:
        content: dict[str, Any] = json.loads(path.read_text(encoding="utf-8"))
        return name, content
    return name, {**_config(reference)[3].to_dict(), "architectures": [name]}


def decoder_of(reference: str, sequence_length: int | None) -> "tuple[LlamaConfig | DeepseekConfig, bool]":
    """The dimensions of one of our own decoders, from a config with experts, and whether its weights rotate neighbours.
    Raises ModelError, naming the file."""
    path, name, _, config = _config(reference)
    sizes = _sizes(config, name, _length(config, path, sequence_length), path)
    return sizes, bool(getattr(config, "rope_interleave", True))


def _config(reference: str) -> tuple[Path, str, str, Any]:
    """The file of a reference, the architecture that it names, the ending that says what its class is called with, and
    the config as transformers reads it."""
    file, changes = split_reference(reference)
    path, name = _read(file)
    transformers = _transformers()
    ending = next((ending for ending in _KINDS if name.endswith(ending)), None)
    found = getattr(transformers, name, None) if ending is not None else None
    if ending is None or not (isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)):
        known = ", ".join(f"…{known}" for known in _KINDS)
        raise ModelError(
            f"{path}: the architecture {name} is not one that is built here ({known}); "
            "write a factory instead: --model package.module:factory"
        )
    return path, name, ending, _changed(_loaded(transformers, path), changes, path)


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
    """Frequencies of positions of a type that is not the default, and what is rotated is multiplied with."""
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    frequencies, magnitude = ROPE_INIT_FUNCTIONS[kind](config, "cpu")
    return tuple(frequencies.tolist()), float(magnitude)


def _read(reference: str) -> tuple[Path, str]:
    """The file of a reference and the architecture that it names."""
    path = Path(reference)
    path = path / "config.json" if path.is_dir() else path
    try:
        content = json.loads(path.read_text(encoding="utf-8"))
    except OSError as error:
        raise ModelError(f"--model {reference}: cannot read {path}: {error.strerror}") from error
    except ValueError as error:
        raise ModelError(f"--model {reference}: {path} is no JSON: {error}") from error
    named = content.get("architectures") if isinstance(content, dict) else None
    if not isinstance(named, list) or len(named) != 1 or not isinstance(named[0], str):
        raise ModelError(
            f"{path}: 'architectures' must name the class to build, as in [\"LlamaForCausalLM\"]; it is {named!r}"
        )
    return path, named[0]


def _transformers() -> Any:
    try:
        import transformers
    except ImportError as error:
        raise ModelError(
            "a config.json is built by Hugging Face's transformers, which cannot be imported"
            f" ({error}); pip install 'parallel-planner[huggingface]'"
        ) from error
    return transformers


def _loaded(transformers: Any, path: Path) -> Any:
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        return transformers.AutoConfig.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise ModelError(f"{path}: transformers cannot read it: {_first_line(error)}") from error
    finally:
        transformers.logging.set_verbosity(verbosity)


def _changed(config: Any, changes: Mapping[str, str], path: Path) -> Any:
    """The config with other values of some keys, and what it derives from them derived anew."""
    if not changes:
        return config
    content = config.to_dict()
    derived = {key: None for key in _DERIVED if key in content}
    try:
        return type(config)(**{**content, **derived, **changed_content(changes, content, str(path))})
    except (ValueError, TypeError, KeyError) as error:
        raise ModelError(f"{path}: transformers cannot change it so: {_first_line(error)}") from error


def _built(transformers: Any, config: Any, name: str, path: Path, *, masked: bool, device: str) -> Any:
    import torch
    from transformers.integrations.sdpa_attention import sdpa_attention_forward

    transformers.AttentionInterface.register(_WITHOUT_MASKS, sdpa_attention_forward)
    attention = _WITH_MASKS if masked else _WITHOUT_MASKS
    config.use_cache = False
    verbosity = transformers.logging.get_verbosity()
    transformers.logging.set_verbosity_error()
    try:
        with torch.device(device):
            return getattr(transformers, name)._from_config(config, attn_implementation=attention).train()
    except (ValueError, TypeError, AttributeError, RuntimeError) as error:
        raise ModelError(f"{path}: transformers cannot build {name}: {_first_line(error)}") from error
    finally:
        transformers.logging.set_verbosity(verbosity)


def _first_line(error: Exception) -> str:
    lines = str(error).strip().splitlines()
    return lines[0] if lines else type(error).__name__


def _length(config: Any, path: Path, asked: int | None) -> int:
    """Tokens of a sequence: as asked, else as many as the config has positions for."""
    longest = next((int(found) for key in _LENGTHS if (found := getattr(config, key, None))), None)
    if asked is None:
        return longest if longest is not None else _LENGTH
    if asked < 1:
        raise ModelError(f"--seq-len {asked}: a sequence has 1 token or more")
    if longest is not None and asked > longest:
        raise ModelError(f"{path} has positions for {longest} tokens; --seq-len {asked} is longer")
    return asked


def _has_window(config: Any, length: int | None) -> bool:
    """Whether some layer looks back through a window that is shorter than the sequence."""
    window = getattr(config, "sliding_window", None)
    kinds = getattr(config, "layer_types", None)
    used = kinds is None or any(kind != "full_attention" for kind in kinds)
    return length is not None and used and window is not None and window < length


def _example(key: str, config: Any, batch: int, length: int | None, device: str) -> Any:
    import torch

    if key == "pixel_values":
        size = config.image_size
        sides = tuple(size) if isinstance(size, list | tuple) else (size, size)
        return torch.zeros(batch, config.num_channels, *sides, device=device)
    shape = (batch,) if length is None else (batch, length)
    make = torch.ones if key == "attention_mask" else torch.zeros
    return make(shape, dtype=torch.int64, device=device)


def _bound(key: str, config: Any) -> int | None:
    """Integers of an input are below this; None where they are drawn from the example."""
    if key == "attention_mask":
        return None
    if key == "labels" and getattr(config, "image_size", None) is not None:
        return int(config.num_labels)
    return int(config.vocab_size) if getattr(config, "vocab_size", None) is not None else None
