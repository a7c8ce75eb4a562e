"""Models of Hugging Face, built from a `config.json` with random weights: nothing is downloaded.

The architecture in the config selects the class with a loss, and the class determines the arguments (`inputs` beside
this file).

A ...ForConditionalGeneration that has no encoder and decoder reads images or sound beside tokens. It is called on
tokens alone, with sizes of its `text_config`; its other parts exist, and do nothing.

Mixtral, Qwen3 MoE and DeepSeek are built as our own decoders (see `mixtures` and `deepseek` beside this file).
Experts of other architectures are one operator each (see `any_experts`, `llama4` and `switch`).

Attention is PyTorch's own where the architecture has it, without masks where nothing needs them (see `rewriting`), and
keys and values are not kept for generation. Where all layers look back through a window, an input says which tokens are
padding.
"""

from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from planner.errors import ModelError
from planner.models.adapters import without_adapters
from planner.models.huggingface.config import check_activations, check_config, check_present, read_config
from planner.models.huggingface.dbrx import of_dbrx_as_operators
from planner.models.huggingface.decoders import dense_dimensions
from planner.models.huggingface.deepseek import deepseek_of, is_deepseek
from planner.models.huggingface.equivalents import EQUIVALENTS, note_on_part, rewritten
from planner.models.huggingface.gemma3n import made_traceable
from planner.models.huggingface.inputs import (
    PAIRS,
    SOUND_FRAMES,
    arguments_of,
    bound,
    ending_of,
    example,
    reads_images_alone,
    say_problem,
)
from planner.models.huggingface.library import errors_named, has_window, text_of, transformers_library
from planner.models.huggingface.mixtures import is_mixture, mixture_of
from planner.models.huggingface.notes import notes_on_inputs, notes_on_keys, notes_on_length
from planner.models.huggingface.pairs import NOTE, compared_in_any_batch
from planner.models.huggingface.phimoe import without_sampling
from planner.models.huggingface.positions import fix_frequencies
from planner.models.huggingface.refusals import not_built
from planner.models.huggingface.rewriting import (
    WITH_MASKS,
    computes_with_masks,
    experts_as_one_operator,
    register,
    set_attention,
)
from planner.models.huggingface.sound import without_draws
from planner.models.huggingface.taken_apart import take_apart
from planner.models.overrides import changed_content, split_reference

if TYPE_CHECKING:
    from planner.models.deepseek import DeepseekConfig
    from planner.models.llama import LlamaConfig

_SPELLED_OUT = "eager"
"""Attention of models that have no other attention."""

_LENGTH = 128
"""Tokens of a sequence where neither the user nor the config gives a number."""

_DERIVED = ("layer_types",)
"""Keys that a config derives from others if they are left out."""

_LAYERS = "num_hidden_layers"

_LENGTHS = ("max_position_embeddings", "n_positions", "max_target_positions", "max_seq_len")
"""Keys for the longest sequence of a config."""

_TRAINED_LENGTH = "seq_length"
"""The key for the sequences that a model without positions was trained on (BLOOM): it takes longer ones, too."""


@dataclass(frozen=True, slots=True, kw_only=True)
class FromConfig:
    """A module, its arguments, by name or in this order (`positional`), the bound of each input's integers,
    and the tokens of a sequence (None: no sequences). `notes` say what of the config is not in the model."""

    module: Any
    inputs: Mapping[str, Any]
    bounds: tuple[int | None, ...]
    sequence_length: int | None
    positional: bool = False
    notes: tuple[str, ...] = ()


def is_config(reference: str) -> bool:
    """Whether a reference names a config: a path to a JSON file, or a folder with a `config.json`."""
    return reference.endswith(".json") or "/" in reference or Path(reference, "config.json").is_file()


def from_config(
    reference: str, *, batch: int, device: str, sequence_length: int | None, apart: bool = True
) -> FromConfig:
    """The model of a config with weights drawn at random, on "meta" without any; weights that hold several matrices are
    taken `apart`. Raises ModelError, naming the file."""
    path, name, ending, config = _config(reference)
    made = _made(reference, path, name, ending, config, batch=batch, device=device, asked=sequence_length)
    if apart:
        take_apart(made.module)
    content = _read(split_reference(without_adapters(reference))[0])[2]
    said = _said(path)
    notes = [
        *note_on_part(said, path),
        *_note_on_type(said, path),
        *made.notes,
        *notes_on_keys(content, config, made.module, path),
    ]
    if made.sequence_length is not None and sequence_length is None:
        notes += notes_on_length(path, _longest(text_of(config, path))[0], made.sequence_length)
    return replace(made, notes=tuple(notes))


def _made(
    reference: str, path: Path, name: str, ending: str, config: Any, *, batch: int, device: str, asked: int | None
) -> FromConfig:
    transformers = transformers_library()
    names = arguments_of(getattr(transformers, name), config, ending, path)
    text = text_of(config, path)
    length = None if reads_images_alone(ending) else _length(text, path, asked)
    if length is None and asked is not None:
        raise ModelError(f"--seq-len does not apply to {reference}: {name} reads images, whose size is in its config")
    if (is_mixture(name) or is_deepseek(name)) and length is not None:
        return _decoder(config, name, length, path, batch, device)
    masked = "attention_mask" in names or (length is not None and has_window(text, length))
    computed = computes_with_masks(getattr(transformers, name))
    silenced = tuple(without_draws(config, path))
    say_problem(config, ending)
    module = _built(transformers, config, name, path, masked=masked or computed, device=device)
    notes = (*silenced, *without_sampling(module), *of_dbrx_as_operators(module), *((NOTE,) if ending in PAIRS else ()))
    notes = (*notes_on_inputs(getattr(transformers, name), names, path), *notes)
    if length is not None:
        fix_frequencies(module, length)
    examples = {key: example(key, config, ending, batch, length, device) for key in names}
    bounds = tuple(bound(key, text, ending) for key in names if key != "return_loss")
    return FromConfig(module=module, inputs=examples, bounds=bounds, sequence_length=length, notes=notes)


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
    transformers = transformers_library()
    check_activations(content, _activations(), path)
    name = _as_transformers_writes(transformers, name)
    ending = ending_of(name)
    with errors_named(transformers, f"{path}: transformers cannot load {name}"):
        found = getattr(transformers, name, None) if ending is not None else None
    if ending is None or not (isinstance(found, type) and issubclass(found, transformers.PreTrainedModel)):
        raise ModelError(f"{path}: {not_built(transformers, name, content, ending)}")
    config = _changed(_loaded(transformers, path, name, content), changes, path)
    _check_made(config, transformers, name, path)
    return path, name, ending, config


def _as_transformers_writes(transformers: Any, name: str) -> str:
    """The name of a class in transformers that differs at most in capital letters and underscores (PhiMoEForCausalLM is
    PhimoeForCausalLM there); the name itself where there is none."""
    known = transformers.__all__  # of 7,000 names: dir(transformers) takes 0.15 s to list them
    return name if name in known else min((one for one in known if _plain(one) == _plain(name)), default=name)


def _plain(name: str) -> str:
    return name.lower().replace("_", "")


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
    """The file of a reference, the architecture that it names, and its whole content, or the architecture and content
    that compute the same (`equivalents`)."""
    path = Path(reference)
    path = path / "config.json" if path.is_dir() else path
    content, said = read_config(path), _said(path)
    name, same = rewritten(said, content, path)
    return path, name, same


def _said(path: Path) -> str:
    """The architecture that a file names. Raises ModelError where it names none, or several."""
    content = read_config(path)
    named = content.get("architectures")
    if isinstance(named, list) and len(named) == 1 and isinstance(named[0], str):
        return named[0]
    if "_class_name" in content:
        raise ModelError(
            f"{path}: a config of diffusers ({content['_class_name']!r:.80}) says nothing of the loss; write a factory"
            " instead: --model package.module:factory"
        )
    raise ModelError(
        f"{path}: 'architectures' must name the class to build, as in [\"LlamaForCausalLM\"]; it is {named!r:.80}"
    )


def _loaded(transformers: Any, path: Path, name: str, content: Mapping[str, Any]) -> Any:
    """The config as transformers reads it, by its model_type. If that is not known, it is read as of the class of
    transformers that it names, unless it brings code with another class: Kimi K2 is DeepSeek-V3 under another
    model_type. Such code never runs. The same holds for a model that computes the same as a class of transformers."""
    with errors_named(transformers, f"{path}: transformers cannot read it"):
        code, same = content.get("auto_map"), content.get("model_type") != read_config(path).get("model_type")
        unknown = "model_type" in content and content["model_type"] not in transformers.CONFIG_MAPPING
        if same or (unknown and (not code or _brings(code, name))):
            return getattr(transformers, name).config_class(**{k: v for k, v in content.items() if k != "model_type"})
        return transformers.AutoConfig.from_pretrained(str(path), local_files_only=True, trust_remote_code=False)


def _brings(code: Any, name: str) -> bool:
    """Whether a config says that a file beside it has a class of this name."""
    classes = code.values() if isinstance(code, Mapping) else ()
    return any(isinstance(said, str) and said.rpartition(".")[2] == name for said in classes)


def _note_on_type(name: str, path: Path) -> Iterator[str]:
    """A note where transformers does not know the model_type, and the config brings no class `name` of its own."""
    content = read_config(path)
    model_type, brings = content.get("model_type"), _brings(content.get("auto_map"), name)
    if name not in EQUIVALENTS and not brings and model_type not in transformers_library().CONFIG_MAPPING:
        yield f"{path}: transformers knows no model_type {model_type!r}; it is read as {name}"


def _changed(config: Any, changes: Mapping[str, str], path: Path) -> Any:
    """The config with other values of some keys; keys that it derives from them are derived again. A key that only
    the config of the part that reads tokens has is changed there, unless that part is within another one."""
    if not changes:
        return config
    content, text = config.to_dict(), text_of(config, path)
    part = next((key for key in content if text is not config and getattr(config, key, None) is text), None)
    if part is not None:
        inner = text.to_dict()
        changed_content(changes, inner | content, str(path))
        within = {key: value for key, value in changes.items() if key not in content}
        content[part] = _changed(text, within, path).to_dict()
        changes = {key: value for key, value in changes.items() if key in content}
    derived = {key: None for key in _DERIVED if key in content}
    changed = changed_content(changes, content, str(path))
    first = _by_layer(content, changed.get(_LAYERS))
    listed = {key: first[key] for key in derived if first.get(key)}

    def made(lists: Mapping[str, Any]) -> Any:
        with errors_named(transformers_library(), f"{path}: transformers cannot change it so"):
            return type(config)(**content | first | derived | lists | changed)

    try:
        found = made({})
    except ModelError:
        if not listed:
            raise
        return made(listed)
    lacking = {key: value for key, value in listed.items() if getattr(found, key, None) is None}
    return made(lacking) if lacking else found


def _by_layer(content: Mapping[str, Any], layers: int | None) -> dict[str, Any]:
    """What a config says for each of its layers, for another number of layers: for the first ones, or derived again."""
    before = content.get(_LAYERS)
    if layers is None or not before:
        return {}
    lists = {key: value for key, value in content.items() if isinstance(value, list) and len(value) == before}
    return {key: value[:layers] if layers <= before else None for key, value in lists.items()}


def _built(transformers: Any, config: Any, name: str, path: Path, *, masked: bool, device: str) -> Any:
    import torch

    register(transformers)
    made = getattr(transformers, name)
    attention = WITH_MASKS if made._supports_sdpa else _SPELLED_OUT
    config.use_cache = text_of(config, path).use_cache = False
    with errors_named(transformers, f"{path}: transformers cannot build {name}"), torch.device(device):
        module = made._from_config(config, attn_implementation=attention).train()
        set_attention(module, masked=masked)
    experts_as_one_operator(module, str(path))
    made_traceable(module)
    compared_in_any_batch(module)
    return module


def _longest(config: Any) -> tuple[str, int]:
    """The key of a config for the longest sequence, and that length; an empty key where it says none."""
    none = ("", SOUND_FRAMES if hasattr(config, "conv_stride") else _LENGTH)
    said = ((key, int(getattr(config, key, None) or 0)) for key in (*_LENGTHS, _TRAINED_LENGTH))
    return next(((key, length) for key, length in said if length > 0), none)  # XLNet has -1, of any length


def _length(config: Any, path: Path, asked: int | None) -> int:
    """Tokens of a sequence: as asked, else as many as the config has positions for."""
    key, longest = _longest(config)
    if asked is None:
        return longest
    if asked < 1:
        raise ModelError(f"--seq-len {asked}: a sequence has 1 token or more")
    if key in _LENGTHS and asked > longest:
        raise ModelError(f"{path} has positions for {longest} tokens; --seq-len {asked} is longer")
    return asked
