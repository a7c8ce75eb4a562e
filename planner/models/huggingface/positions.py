"""Rotary frequencies of transformers that depend on the length of the sequences, fixed for the length of a model.

transformers looks for the last position in every forward pass, and changes a buffer by it: LongRoPE (Phi-3, Phi-4-mini,
MiniCPM) has frequencies for short sequences and others for long ones, and dynamic NTK scaling has others for sequences
longer than the config knows, which are refused here. All sequences of a plan have the same length. So the frequencies
are chosen once, before the model is traced; results are the same.
"""

from typing import Any

_BY_LENGTH = ("longrope", "dynamic")
"""Kinds of positions whose frequencies transformers computes anew in a forward pass."""


def fix_frequencies(module: Any, length: int) -> None:
    """Choose the frequencies of every rotary embedding in a model for sequences of this length, in place."""
    for part in module.modules():
        kinds = getattr(part, "rope_type", None)
        if isinstance(kinds, str) and kinds in _BY_LENGTH:
            _choose(part, kinds, None, length)
            part.rope_type = "default"
        elif isinstance(kinds, dict):
            for layers, kind in kinds.items():
                if kind in _BY_LENGTH:
                    _choose(part, kind, layers, length)
            part.rope_type = {layers: "default" if kind in _BY_LENGTH else kind for layers, kind in kinds.items()}


def _choose(part: Any, kind: str, layers: str | None, length: int) -> None:
    """Give the buffer of one kind of layers its frequencies; those of short sequences are there."""
    import torch
    from transformers.modeling_rope_utils import ROPE_INIT_FUNCTIONS

    if kind != "longrope":
        return
    said = part.config.rope_parameters if layers is None else part.config.rope_parameters[layers]
    if length <= said["original_max_position_embeddings"]:
        return
    frequencies, _ = ROPE_INIT_FUNCTIONS[kind](part.config, "cpu", seq_len=length, layer_type=layers)
    buffer = getattr(part, "inv_freq" if layers is None else f"{layers}_inv_freq")
    with torch.no_grad():
        buffer.copy_(frequencies)
