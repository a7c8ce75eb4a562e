"""The inputs of models of transformers: the arguments of a class, by the end of its name, and an example of each.

    ...ForCausalLM, GPT2LMHeadModel     input_ids, labels
    ...ForMaskedLM                      input_ids, attention_mask, labels
    ...ForSequenceClassification        input_ids, attention_mask, labels (one for each sample)
    ...ForTokenClassification           input_ids, attention_mask, labels
    ...ForConditionalGeneration         input_ids, attention_mask, decoder_input_ids, labels
    ...ForImageClassification           pixel_values, labels
    ...ForCTC                           input_values, labels
    CLIPModel, SiglipModel, ...         input_ids, pixel_values, return_loss

Whisper (...ForConditionalGeneration) reads input_features, decoder_input_ids and labels.

Sound of ...ForCTC is a waveform: sequences are the frames that its convolutions make of it, and a quarter as many
labels.
"""

import inspect
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from planner.errors import ModelError

_OF_SAMPLES = "ForSequenceClassification"
"""The end of the name of a class with one label for each sample: a class, or a number where there is only one."""

KINDS: Mapping[str, tuple[str, ...]] = {
    "ForCausalLM": ("input_ids", "labels"),
    "LMHeadModel": ("input_ids", "labels"),
    "ForMaskedLM": ("input_ids", "attention_mask", "labels"),
    _OF_SAMPLES: ("input_ids", "attention_mask", "labels"),
    "ForTokenClassification": ("input_ids", "attention_mask", "labels"),
    "ForConditionalGeneration": ("input_ids", "attention_mask", "decoder_input_ids", "labels"),
    "ForImageClassification": ("pixel_values", "labels"),
    "ForCTC": ("input_values", "labels"),
}
"""The arguments of a class, by the end of its name."""

PAIRS = ("CLIPModel", "SiglipModel", "MetaClip2Model", "ChineseCLIPModel", "AltCLIPModel")
"""Classes that compare texts and images, each sample with all others."""

SOUND_FRAMES = 749
"""Frames of sound that has no length: 15 seconds of 16,000 values each for Wav2Vec2, whose published training cuts
samples of 15.6 seconds (Baevski et al. 2020, arXiv 2006.11477, section 4.2)."""

_OF_PAIRS = ("input_ids", "pixel_values", "return_loss")
_FROM_SOUND = ("input_features", "decoder_input_ids", "labels")
"""The arguments of a class that writes down speech (Whisper)."""

_FRAMES = 2
"""Frames of sound for each position of the encoder of Whisper: its second convolution takes every other frame."""

_FRAMES_OF_LABEL = 4
"""Frames for each label of ...ForCTC: about twelve letters a second."""


def ending_of(name: str) -> str | None:
    """What decides the arguments of a class: the end of its name, or the whole name of one of `PAIRS`; None for a class
    that is not built."""
    if name in PAIRS:
        return name
    return next((ending for ending in KINDS if name.endswith(ending)), None)


def reads_images_alone(ending: str) -> bool:
    """Whether samples are no sequences."""
    return ending == "ForImageClassification"


def arguments_of(made: Any, config: Any, ending: str, path: Path) -> tuple[str, ...]:
    """The names of the arguments of a class. Raises ModelError where its model reads what a config does not tell."""
    reads = made.main_input_name
    if ending in PAIRS:
        return _OF_PAIRS
    if reads == _FROM_SOUND[0] and config.model_type == "whisper":
        return _FROM_SOUND
    waveform = ending == "ForCTC" and reads == "input_values" and getattr(config, "conv_stride", None)
    if not waveform and not {reads, *inspect.signature(made.forward).parameters} & {"input_ids", "pixel_values"}:
        raise ModelError(
            f"{path}: {made.__name__} reads {reads}, and a config does not tell their shape; write a factory instead:"
            " --model package.module:factory"
        )
    generic = any(kind.__name__ == "GenericForSequenceClassification" for kind in made.__mro__)
    if generic and config.get_text_config().pad_token_id is None:
        raise ModelError(
            f"{path}: pad_token_id is missing; {made.__name__} finds the last token of a sample by it; say it in the"
            " config or with --set pad_token_id=0"
        )
    return tuple(key for key in KINDS[ending] if key != "decoder_input_ids" or config.is_encoder_decoder)


def say_problem(config: Any, ending: str) -> None:
    """Say in a config that samples have one class, or one number, each: a class that is left to find out looks at the
    content of the labels (DeBERTa). The loss is the same."""
    if ending == _OF_SAMPLES and config.problem_type is None:
        config.problem_type = "single_label_classification" if config.num_labels > 1 else "regression"


def example(key: str, config: Any, ending: str, batch: int, length: int | None, device: str) -> Any:
    """An example of an argument: `batch` samples, sequences of `length` tokens or frames."""
    import torch

    if key == "return_loss":
        return True
    if key == "pixel_values":
        seen = config.vision_config if ending in PAIRS else config
        size = seen.image_size
        sides = tuple(size) if isinstance(size, list | tuple) else (size, size)
        return torch.zeros(batch, seen.num_channels, *sides, device=device)
    if key == "input_features":
        return torch.zeros(batch, config.num_mel_bins, _FRAMES * config.max_source_positions, device=device)
    if key == "input_values":
        assert length is not None, "sound has a length"
        return torch.zeros(batch, _values(config, length), device=device)
    shape = (batch,) if length is None else (batch, length)
    if key == "labels" and ending == _OF_SAMPLES:
        return torch.zeros(batch, dtype=torch.int64 if config.num_labels > 1 else None, device=device)
    if key == "labels" and ending == "ForCTC" and length is not None:
        shape = (batch, max(1, length // _FRAMES_OF_LABEL))
    make = torch.ones if key == "attention_mask" else torch.zeros
    return make(shape, dtype=torch.int64, device=device)


def bound(key: str, config: Any, ending: str) -> int | None:
    """The bound of the integers of an input; None where they are drawn from the example."""
    if key in ("attention_mask", "input_features", "input_values") or (key == "pixel_values" and ending in PAIRS):
        return None
    if key == "labels" and ending.endswith("Classification"):
        return int(config.num_labels) if config.num_labels > 1 or ending != _OF_SAMPLES else None
    return int(config.vocab_size) if getattr(config, "vocab_size", None) is not None else None


def _values(config: Any, frames: int) -> int:
    """The fewest values of a waveform that convolutions without padding turn into this many frames."""
    for kernel, stride in zip(reversed(config.conv_kernel), reversed(config.conv_stride), strict=True):
        frames = (frames - 1) * stride + kernel
    return frames
